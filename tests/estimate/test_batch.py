"""Batches: every form of the same numbers gives the same bound, and every mistake is named before
anything is computed.
"""

import re

import numpy as np
import pytest
import torch
from small_models import (
    INF,
    LABELS,
    NAN,
    SEQUENCE,
    Sphere,
    X,
    by_row,
    conditional,
    controlled,
    image,
    mixture,
    put,
    state,
    vae,
)
from torch.nn.functional import one_hot

from aevb import (
    Bernoulli,
    Beta,
    ContinuousBernoulli,
    Deterministic,
    Model,
    NegativeBinomial,
    Normal,
    OneHot,
    Poisson,
)

# What is refused ----------------------------------------------------------------------------------

BAD = {
    # shapes
    "one example without its axis": (
        vae,
        {"x": X[0]},
        "x has shape [4]; expected [N, 4], the examples first.",
    ),
    "an axis too many": (
        vae,
        {"x": X[None]},
        "x has shape [1, 5, 4]; expected [N, 4], the examples first.",
    ),
    "another width": (
        vae,
        {"x": X[:, :3]},
        "x has shape [5, 3]; expected [N, 4], the examples first.",
    ),
    "a number": (vae, {"x": 0.5}, "x has shape []; expected [N, 4]"),
    "a sequence without time": (
        state,
        {"x": X},
        "x has shape [5, 4]; expected [N, T, 4], the examples first.",
    ),
    "an image of another size without channels": (
        image,
        {"x": np.zeros((2, 4, 5))},
        "x has shape [2, 4, 5]; expected [N, 1, 4, 4], the examples first. Declare the shape of "
        "the data, (1, 4, 5), or resize them: aevb.data.images(folder, size=(4, 4)).",
    ),
    "an image of another size": (
        image,
        {"x": np.zeros((2, 1, 4, 5))},
        "x has shape [2, 1, 4, 5]; expected [N, 1, 4, 4]",
    ),
    "labels in a column": (
        mixture,
        {"x": X, "y": np.zeros((5, 1))},
        "y has shape [5, 1]; expected [N, 3], the examples first.",
    ),
    "no examples": (vae, {"x": X[:0]}, "x has no examples."),
    "no steps": (state, {"x": SEQUENCE[:, :0]}, "x has no steps."),
    "different numbers of rows": (
        mixture,
        {"x": X, "y": [0, 1]},
        "The data disagree on the number of examples: x 5, y 2.",
    ),
    "different numbers of steps": (
        controlled,
        {"x": SEQUENCE, "u": np.zeros((5, 4, 2))},
        "The data disagree on the number of steps: x 3, u 4.",
    ),
    # names
    "unknown": (
        vae,
        {"x": X, "w": X},
        "The data have 'w', which is not a variable of this model (z, x). Leave it out.",
    ),
    "deterministic": (
        lambda: Model(
            {"z": Normal(2), "h | z": Deterministic(3), "x | h": Normal(4)}, {"z | x": Normal()}
        ),
        {"x": X, "h": np.zeros((5, 3))},
        "The data have 'h', which is deterministic, so it is computed. Leave it out.",
    ),
    "observed but absent": (
        vae,
        {},
        "'x' is observed (q has no factor for it), but the data lack it. Pass x=…",
    ),
    "observed but None": (
        vae,
        {"x": None},
        "'x' is observed (q has no factor for it), but the data lack it. Pass x=…",
    ),
    "one of two absent": (
        lambda: Model(
            {"z": Normal(2), "x | z": Normal(4), "u | z": Poisson(3)}, {"z | x, u": Normal()}
        ),
        {"x": X},
        "'u' is observed (q has no factor for it), but the data lack it. Pass u=…, "
        'or make it latent: add "u | x": Poisson(net=mlp(500, 500)) to q.',
    ),
    "given but absent": (
        conditional,
        {"x": X},
        "'y' is given: p or q is conditioned on it, but the data lack it. Pass y=….",
    ),
    # what is not a number
    "text": (vae, {"x": [["a"] * 4]}, "x holds"),
    "objects": (vae, {"x": [[None] * 4]}, "x holds"),
    "dates": (vae, {"x": np.zeros((2, 4), "datetime64[s]")}, "x holds"),
    "complex": (vae, {"x": np.zeros((2, 4), complex)}, "x holds complex128, not numbers."),
    "rows of different lengths": (vae, {"x": [[0.0] * 4, [0.0] * 3]}, "x "),
    # labels
    "label C": (
        mixture,
        {"x": X, "y": [0, 1, 2, 3, 7]},
        "y has 2 labels outside 0 … 2 (first, from 0: row 3: 3). Number the classes",
    ),
    "label −2": (
        mixture,
        {"x": X, "y": [0, 1, -2, 1, 0]},
        "y has 1 label outside 0 … 2 (first, from 0: row 2: -2). Number the classes from 0",
    ),
    "half a label": (
        mixture,
        {"x": X, "y": [0, 1.5, 2, 1, 0]},
        "y has 1 label outside 0 … 2 (first, from 0: row 1: 1.5). Number the classes from 0",
    ),
    "given label": (
        conditional,
        {"x": X, "y": [0, 1, 2, 3, 0]},
        "y has 1 label outside 0 … 2 (first, from 0: row 3: 3). Number the classes from 0",
    ),
    "label at a step": (
        lambda: Model({"y[t]": OneHot(3), "x[t] | y[t]": Normal(4)}, {"y[t] | x[t]": OneHot()}),
        {"x": SEQUENCE, "y": [[0, 1, 2]] * 4 + [[0, 1, 5]]},
        "y has 1 label outside 0 … 2 (first, from 0: row 4, step 2: 5).",
    ),
    "soft labels": (
        mixture,
        {"x": X, "y": np.full((5, 3), 1 / 3)},
        "but p gives y a OneHot. Pass labels 0 … C−1, or one-hot rows.",
    ),
    "two classes at once": (
        mixture,
        {"x": X, "y": np.ones((5, 3))},
        "y has 5 values outside OneHot's support (first, from 0: row 0, column 0: 1.0)",
    ),
    "row of a table": (
        by_row,
        {"x": X[:3], "i": [0, 1, 3]},
        "i has 1 value outside the rows of table(3)",
    ),
    "unknown row of a table": (
        by_row,
        {"x": X[:3], "i": [0, 1, -1]},
        "i has 1 value outside the rows of table(3)",
    ),
    "half a row of a table": (
        by_row,
        {"x": X[:3], "i": [0, 0.5, 1]},
        "i has 1 value outside the rows of table(3)",
    ),
    "missing row of a table": (by_row, {"x": X[:3], "i": [0, NAN, 1]}, "i has "),
    # supports
    "grey under Bernoulli": (
        lambda: vae(Bernoulli(4)),
        {"x": put(np.zeros((5, 4)), 0.5, 3, 1)},
        "x has 1 value that is not 0 or 1 (first, from 0: row 3, column 1: 0.5), but p gives x a "
        "Bernoulli. Binarise them (x > 0.5), or use ContinuousBernoulli.",
    ),
    "grey at a step": (
        lambda: Model({"z[t]": Normal(2), "x[t] | z[t]": Bernoulli(4)}, {"z[t] | x[t]": Normal()}),
        {"x": put(np.zeros((5, 3, 4)), 0.5, 3, 2, 1)},
        "x has 1 value that is not 0 or 1 (first, from 0: row 3, step 2, column 1: 0.5), but p "
        "gives x a Bernoulli.",
    ),
    "halves under Poisson": (
        lambda: vae(Poisson(4)),
        {"x": put(np.zeros((5, 4)), 0.5, 0, 2)},
        "x has 1 value outside Poisson's support (first, from 0: row 0, column 2: 0.5), but p "
        "gives x a Poisson. Counts are whole numbers from 0 on: round them, or use Normal.",
    ),
    "debts under NegativeBinomial": (
        lambda: vae(NegativeBinomial(4)),
        {"x": put(np.zeros((5, 4)), -1, 4, 3)},
        "x has 1 value outside NegativeBinomial's support (first, from 0: row 4, column 3: -1.0)",
    ),
    "0 under Beta": (
        lambda: vae(Beta(4)),
        {"x": put(np.full((5, 4), 0.5), 0, 1, 1)},
        "(first, from 0: row 1, column 1: 0.0), but p gives x a Beta.",
    ),
    "1 under Beta": (
        lambda: vae(Beta(4)),
        {"x": put(np.full((5, 4), 0.5), 1, 1, 1)},
        "(first, from 0: row 1, column 1: 1.0), but p gives x a Beta.",
    ),
    "infinite": (
        vae,
        {"x": put(X, INF, 3, 2)},
        "x has 1 value not finite (first, from 0: row 3, column 2: inf). Replace them; NaN",
    ),
    "infinite and given": (
        conditional,
        {"x": X, "y": put(np.zeros((5, 3)), -INF, 4, 0)},
        "y has 1 value not finite (first, from 0: row 4, column 0: -inf). Replace",
    ),
    "a latent outside its support": (
        mixture,
        {"x": X, "y": np.zeros((5, 3))},
        "but p gives y a OneHot. Pass labels 0 … C−1, or one-hot rows.",
    ),
    # missing entries
    "missing and given": (
        conditional,
        {"x": X, "y": [0, 1, -1, 0, 0]},
        'y has missing entries but p reads it ("z | y").',
    ),
    "missing in a vector without marginals": (
        lambda: vae(Sphere(4)),
        {"x": put(X, NAN, 2, 1)},
        "x has missing entries, but Sphere has no marginal",
    ),
    "half a latent": (
        vae,
        {"x": X, "z": put(np.zeros((5, 2)), NAN, 2, 1)},
        "'z' is latent, and in some row only part of its entries are known. Give the whole row, "
        "or none of it (NaN).",
    ),
    # steps and lengths
    "length 0": (
        state,
        {"x": SEQUENCE, "lengths": [0, 1, 2, 3, 3]},
        "lengths holds one number for each of the 5 rows, from 1 to 3; row 0 (from 0) has 0.",
    ),
    "length beyond T": (
        state,
        {"x": SEQUENCE, "lengths": [4, 1, 2, 3, 3]},
        "lengths holds one number for each of the 5 rows, from 1 to 3; row 0 (from 0) has 4.",
    ),
    "lengths of other rows": (
        state,
        {"x": SEQUENCE, "lengths": [1, 2]},
        "lengths holds one number for each of the 5 rows, from 1 to 3; it has shape [2].",
    ),
    "half a length": (
        state,
        {"x": SEQUENCE, "lengths": [1.5, 1, 2, 3, 3]},
        "lengths holds one number for each of the 5 rows, from 1 to 3; row 0 (from 0) has 1.5.",
    ),
    "length NaN": (
        state,
        {"x": SEQUENCE, "lengths": [NAN, 1, 2, 3, 3]},
        "lengths holds one number for each of the 5 rows, from 1 to 3; row 0 (from 0) has nan.",
    ),
    "steps and lengths": (
        state,
        {"x": SEQUENCE, "lengths": [3] * 5, "steps": np.ones((5, 3))},
        "steps= or lengths=",
    ),
    "steps the other way round": (
        state,
        {"x": SEQUENCE, "steps": np.ones((3, 5))},
        "steps has shape [3, 5]; expected [N, T] = [5, 3].",
    ),
    "a gap": (
        state,
        {"x": SEQUENCE, "steps": put(np.ones((5, 3)), 0, 1, 1)},
        "steps marks each row's real steps from the first on, without gaps; row 1 (from 0) has "
        "step 2, but not the one before. For a step that was not observed put NaN into the data.",
    ),
    "steps NaN": (
        state,
        {"x": SEQUENCE, "steps": put(np.ones((5, 3)), NAN, 1, 2)},
        "steps is 1 at the real steps of a row and 0 after them; row 1 (from 0) has NaN at step 2.",
    ),
    "a row of no steps": (
        state,
        {"x": SEQUENCE, "steps": put(np.ones((5, 3)), 0, 1)},
        "steps marks each row's real steps from the first on, without gaps; row 1 (from 0) has no "
        "step.",
    ),
    "lengths without time": (
        vae,
        {"x": X, "lengths": [1] * 5},
        "steps= and lengths= are for sequences; no variable of these data has [t].",
    ),
}


@pytest.mark.parametrize(("build", "data", "message"), BAD.values(), ids=BAD)
def test_bad_data_are_refused_by_name(build, data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build().elbo(**data)


def test_pixels_that_were_not_divided():
    x = torch.rand(20, 6, generator=torch.Generator().manual_seed(0))
    x[17, 4], x[18, 0], x[19, 5] = 255.0, -1.0, 3.0
    with pytest.raises(ValueError) as error:
        vae(ContinuousBernoulli(6)).elbo(x=x)
    assert str(error.value) == (
        "x has 3 values outside [0, 1] (first, from 0: row 17, column 4: 255.0), but p gives x a "
        "ContinuousBernoulli. Divide by 256, or use Normal."
    )


@pytest.mark.parametrize(
    ("build", "data", "useless"),
    [
        (vae, {}, '"x | x"'),  # with x latent too, nothing would be observed
        (
            conditional,
            {"x": X, "y": [0, 1, -1, 0, 0]},
            "Give q a factor for y",
        ),  # p has none for it
    ],
    ids=["the only data absent", "given and missing"],
)
def test_a_message_names_no_fix_that_cannot_work(build, data, useless):
    with pytest.raises(ValueError) as error:
        build().elbo(**data)
    assert useless not in str(error.value)


# What is the same ---------------------------------------------------------------------------------

WHOLE = np.array([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 1], [0, 1, 1, 0]])
FORMS = {
    "float64": WHOLE.astype(np.float64),
    "float32": WHOLE.astype(np.float32),
    "float16": WHOLE.astype(np.float16),
    "int64": WHOLE,
    "uint8": WHOLE.astype(np.uint8),
    "bool": WHOLE.astype(bool),
    "lists": WHOLE.tolist(),
    "tuples": tuple(map(tuple, WHOLE.tolist())),
    "rows": list(WHOLE),
    "float32 tensor": torch.tensor(WHOLE, dtype=torch.float32),
    "integer tensor": torch.tensor(WHOLE),
    "bool tensor": torch.tensor(WHOLE).bool(),
    "tensor with a gradient": torch.tensor(WHOLE, dtype=torch.float64, requires_grad=True),
    "strided": np.repeat(WHOLE, 2, axis=1)[:, ::2],
    "reversed": WHOLE[::-1].copy()[::-1],
    "transposed": WHOLE.T.copy().T,
    "big-endian": WHOLE.astype(">f8"),
    "read-only": np.frombuffer(WHOLE.astype(float).tobytes()).reshape(WHOLE.shape),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_numbers_gives_the_same_bound(form):
    model = vae(Bernoulli(4))
    expected = model.elbo(x=torch.tensor(WHOLE, dtype=torch.float64), seed=0).value
    assert torch.equal(model.elbo(x=FORMS[form], seed=0).value, expected)


def test_preparing_leaves_the_users_array_alone():
    x = put(X, NAN, 2, 1)
    before = x.copy()
    vae().elbo(x=x, seed=0)
    assert np.array_equal(x, before, equal_nan=True)


def test_images_may_be_flat():
    model = image()
    x = torch.bernoulli(torch.full((3, 1, 4, 4), 0.5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.elbo(x=x, seed=0).value, model.elbo(x=x.reshape(3, 16), seed=0).value)


def test_a_single_entry_may_go_without_its_axis():
    torch.manual_seed(0)
    model = Model({"z": Normal(2), "x | z": Normal(1)}, {"z | x": Normal()}).double()
    assert torch.equal(model.elbo(x=X[:, 0], seed=0).value, model.elbo(x=X[:, :1], seed=0).value)


@pytest.mark.parametrize("build", [mixture, conditional], ids=["latent", "given"])
def test_labels_are_one_hot_vectors(build):
    model = build()
    vectors = one_hot(torch.tensor(LABELS), 3)
    expected = model.elbo(x=X, y=vectors, seed=0).value
    for labels in (
        LABELS,
        np.array(LABELS, np.uint8),
        np.array(LABELS, float),
        torch.tensor(LABELS),
    ):
        assert torch.equal(model.elbo(x=X, y=labels, seed=0).value, expected)


def test_labels_of_a_sequence_are_one_hot_vectors():
    torch.manual_seed(0)
    model = Model(
        {"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(4)}, {"y[t] | x[t]": OneHot()}
    ).double()
    labels = torch.tensor([[0, 1, 2], [2, 2, 0], [1, 0, 1], [0, 0, 0], [2, 1, 0]])
    assert torch.equal(
        model.elbo(x=SEQUENCE, y=labels).value, model.elbo(x=SEQUENCE, y=one_hot(labels, 3)).value
    )


def test_masked_entries_are_missing():
    model = Model(p={"z": Normal(2), "x | z": Normal(3)}, q={"z | x": Normal()})
    values = np.arange(6.0).reshape(2, 3)
    masked = np.ma.masked_greater(values, 3)
    expected = model.elbo(x=np.where(values > 3, np.nan, values), seed=0).value
    assert torch.equal(model.elbo(x=masked, seed=0).value, expected)
    assert torch.equal(model.elbo(x=masked.astype(int), seed=0).value, expected)
    rows = [np.ma.masked_greater(np.arange(3.0 * n).reshape(n, 3), 4) for n in (3, 2, 4)]
    sequence = Model(p={"z[t]": Normal(2), "x[t] | z[t]": Normal(3)}, q={"z[t] | x[t]": Normal()})
    found, wanted = (
        sequence.elbo(x=value, seed=0).value
        for value in (rows, [row.filled(np.nan) for row in rows])
    )
    assert torch.equal(found, wanted)
    with pytest.raises(
        ValueError, match=r"sample fixes y, but its value in row 0 \(from 0\) is unknown"
    ):
        mixture().sample(3, y=np.ma.array([0, 1, 2], mask=[1, 0, 0]))
