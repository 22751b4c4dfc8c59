"""Data: every form a user may have them in gives the same numbers, and every mistake is named before anything is computed."""

import re
import sys
import tomllib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributions as td
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm
from torch.nn.functional import one_hot

from aevb import (
    GRU,
    Bernoulli,
    Beta,
    Conditional,
    ContinuousBernoulli,
    Deterministic,
    Laplace,
    Mixture,
    Model,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHot,
    Poisson,
    StudentT,
    conv,
    deconv,
    fit,
    linear,
    table,
)
from aevb.data import as_sequence, binarise, dequantise, scale, sources, standardise, threshold
from aevb.data.files import read_file
from aevb.data.preparation import default_preparation
from aevb.data.sources import Mapped, Resident, open_source, read_arrays
from aevb.training.checkpoint import CheckpointError
from aevb.training.evaluation import evaluate

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Sphere(Conditional):
    """A family of vectors, N(μ, I), that does not say what is left of it without some entries."""

    def heads(self, d):
        return {"loc": d}

    def distribution(self, loc):
        return td.Independent(td.Normal(loc, loc.new_ones(()), validate_args=False), 1, validate_args=False)


def vae(likelihood=None):
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z": likelihood or Normal(4)}, {"z | x": Normal()}).double()


def mixture():
    torch.manual_seed(0)
    return Model({"y": OneHot(3, learned=True), "x | y": Normal(4)}, {"y | x": OneHot()}).double()


def conditional():
    torch.manual_seed(0)
    return Model({"z | y": Normal(2), "x | y, z": Normal(4)}, {"z | x, y": Normal()}, given={"y": 3}).double()


def state():
    """x is read by p, through a recurrence."""
    p = {"h[t] | h[t-1], x[t-1]": GRU(3), "z[t] | h[t]": Normal(2), "x[t] | h[t], z[t]": Normal(4)}
    torch.manual_seed(0)
    return Model(p, {"z[t] | h[t], x[t]": Normal()}).double()


def controlled():
    """Two sequences: x and what it is given, u."""
    torch.manual_seed(0)
    return Model({"z[t]": Normal(2), "x[t] | z[t], u[t]": Normal(4)}, {"z[t] | x[t]": Normal()}, given={"u": 2}).double()


def image():
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z": Bernoulli((1, 4, 4), net=deconv(4))}, {"z | x": Normal(net=conv(4, hidden=8))}).double()


def by_row():
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z": Normal(4)}, {"z | i": Normal(net=table(3))}, given={"i": 1}).double()


X = np.random.default_rng(0).standard_normal((5, 4))
SEQUENCE = np.random.default_rng(1).standard_normal((5, 3, 4))


def put(array, value, *place):
    array = np.array(array, dtype=float)
    array[place] = value
    return array


# What is refused ------------------------------------------------------------------------------------------------------------

BAD = {
    # shapes
    "one example without its axis": (vae, {"x": X[0]}, "x has shape [4]; expected [N, 4], the examples first."),
    "an axis too many": (vae, {"x": X[None]}, "x has shape [1, 5, 4]; expected [N, 4], the examples first."),
    "another width": (vae, {"x": X[:, :3]}, "x has shape [5, 3]; expected [N, 4], the examples first."),
    "a number": (vae, {"x": 0.5}, "x has shape []; expected [N, 4]"),
    "a sequence without time": (state, {"x": X}, "x has shape [5, 4]; expected [N, T, 4], the examples first."),
    "an image without channels": (image, {"x": np.zeros((2, 4, 4))}, "x has shape [2, 4, 4]; expected [N, 1, 4, 4], the examples first."),
    "an image of another size": (image, {"x": np.zeros((2, 1, 4, 5))}, "x has shape [2, 1, 4, 5]; expected [N, 1, 4, 4]"),
    "labels in a column": (mixture, {"x": X, "y": np.zeros((5, 1))}, "y has shape [5, 1]; expected [N, 3], the examples first."),
    "no examples": (vae, {"x": X[:0]}, "x has no examples."),
    "no steps": (state, {"x": SEQUENCE[:, :0]}, "x has no steps."),
    "different numbers of rows": (mixture, {"x": X, "y": [0, 1]}, "The data disagree on the number of examples: x 5, y 2."),
    "different numbers of steps": (controlled, {"x": SEQUENCE, "u": np.zeros((5, 4, 2))}, "The data disagree on the number of steps: x 3, u 4."),
    # names
    "unknown": (vae, {"x": X, "w": X}, "The data have 'w', which is not a variable of this model (z, x). Leave it out."),
    "deterministic": (
        lambda: Model({"z": Normal(2), "h | z": Deterministic(3), "x | h": Normal(4)}, {"z | x": Normal()}), {"x": X, "h": np.zeros((5, 3))},
        "The data have 'h', which is deterministic, so it is computed. Leave it out.",
    ),
    "observed but absent": (vae, {}, "'x' is observed (q has no factor for it), but the data lack it. Pass x=…"),
    "observed but None": (vae, {"x": None}, "'x' is observed (q has no factor for it), but the data lack it. Pass x=…"),
    "one of two absent": (
        lambda: Model({"z": Normal(2), "x | z": Normal(4), "u | z": Poisson(3)}, {"z | x, u": Normal()}), {"x": X},
        "'u' is observed (q has no factor for it), but the data lack it. Pass u=…, "
        'or make it latent: add "u | x": Poisson(net=mlp(500, 500)) to q.',
    ),
    "given but absent": (conditional, {"x": X}, "'y' is given: p or q is conditioned on it, but the data lack it. Pass y=…."),
    # what is not a number
    "text": (vae, {"x": [["a"] * 4]}, "x holds"),
    "objects": (vae, {"x": [[None] * 4]}, "x holds"),
    "dates": (vae, {"x": np.zeros((2, 4), "datetime64[s]")}, "x holds"),
    "complex": (vae, {"x": np.zeros((2, 4), complex)}, "x holds complex128, not numbers."),
    "rows of different lengths": (vae, {"x": [[0.0] * 4, [0.0] * 3]}, "x "),
    # labels
    "label C": (mixture, {"x": X, "y": [0, 1, 2, 3, 7]}, "y has 2 labels outside 0 … 2 (first: row 3: 3). Number the classes from 0; −1 is unknown."),
    "label −2": (mixture, {"x": X, "y": [0, 1, -2, 1, 0]}, "y has 1 labels outside 0 … 2 (first: row 2: -2). Number the classes from 0"),
    "half a label": (mixture, {"x": X, "y": [0, 1.5, 2, 1, 0]}, "y has 1 labels outside 0 … 2 (first: row 1: 1.5). Number the classes from 0"),
    "given label": (conditional, {"x": X, "y": [0, 1, 2, 3, 0]}, "y has 1 labels outside 0 … 2 (first: row 3: 3). Number the classes from 0"),
    "label at a step": (
        lambda: Model({"y[t]": OneHot(3), "x[t] | y[t]": Normal(4)}, {"y[t] | x[t]": OneHot()}), {"x": SEQUENCE, "y": [[0, 1, 2]] * 4 + [[0, 1, 5]]},
        "y has 1 labels outside 0 … 2 (first: row 4, step 2: 5).",
    ),
    "soft labels": (mixture, {"x": X, "y": np.full((5, 3), 1 / 3)}, "but p gives y a OneHot. Pass labels 0 … C−1, or one-hot rows."),
    "two classes at once": (mixture, {"x": X, "y": np.ones((5, 3))}, "y has 5 values outside OneHot's support (first: row 0, column 0: 1.0), but p"),
    "row of a table": (by_row, {"x": X[:3], "i": [0, 1, 3]}, "i has 1 "),
    "unknown row of a table": (by_row, {"x": X[:3], "i": [0, 1, -1]}, "i has 1 "),
    "half a row of a table": (by_row, {"x": X[:3], "i": [0, 0.5, 1]}, "i has 1 "),
    "missing row of a table": (by_row, {"x": X[:3], "i": [0, NAN, 1]}, "i has "),
    # supports
    "grey under Bernoulli": (
        lambda: vae(Bernoulli(4)), {"x": put(np.zeros((5, 4)), 0.5, 3, 1)},
        "x has 1 values that are not 0 or 1 (first: row 3, column 1: 0.5), but p gives x a Bernoulli. "
        "Binarise them (x > 0.5), or use ContinuousBernoulli.",
    ),
    "grey at a step": (
        lambda: Model({"z[t]": Normal(2), "x[t] | z[t]": Bernoulli(4)}, {"z[t] | x[t]": Normal()}), {"x": put(np.zeros((5, 3, 4)), 0.5, 3, 2, 1)},
        "x has 1 values that are not 0 or 1 (first: row 3, step 2, column 1: 0.5), but p gives x a Bernoulli.",
    ),
    "halves under Poisson": (
        lambda: vae(Poisson(4)), {"x": put(np.zeros((5, 4)), 0.5, 0, 2)},
        "x has 1 values outside Poisson's support (first: row 0, column 2: 0.5), but p gives x a Poisson. Round them to counts, or use Normal.",
    ),
    "debts under NegativeBinomial": (
        lambda: vae(NegativeBinomial(4)), {"x": put(np.zeros((5, 4)), -1, 4, 3)},
        "x has 1 values outside NegativeBinomial's support (first: row 4, column 3: -1.0)",
    ),
    "0 under Beta": (lambda: vae(Beta(4)), {"x": put(np.full((5, 4), 0.5), 0, 1, 1)}, "(first: row 1, column 1: 0.0), but p gives x a Beta."),
    "1 under Beta": (lambda: vae(Beta(4)), {"x": put(np.full((5, 4), 0.5), 1, 1, 1)}, "(first: row 1, column 1: 1.0), but p gives x a Beta."),
    "infinite": (vae, {"x": put(X, INF, 3, 2)}, "x has 1 values not finite (first: row 3, column 2: inf). Replace them; NaN marks a missing entry."),
    "infinite and given": (
        conditional, {"x": X, "y": put(np.zeros((5, 3)), -INF, 4, 0)}, "y has 1 values not finite (first: row 4, column 0: -inf). Replace them.",
    ),
    "a latent outside its support": (mixture, {"x": X, "y": np.zeros((5, 3))}, "but p gives y a OneHot. Pass labels 0 … C−1, or one-hot rows."),
    # missing entries
    "missing where p reads": (
        state, {"x": put(SEQUENCE, NAN, 1, 0, 2)},
        'x has missing entries but p reads it ("h[t] | h[t-1], x[t-1]"). Give q a factor for x, or fill the entries.',
    ),
    "missing and given": (conditional, {"x": X, "y": [0, 1, -1, 0, 0]}, 'y has missing entries but p reads it ("z | y").'),
    "missing in a vector without marginals": (lambda: vae(Sphere(4)), {"x": put(X, NAN, 2, 1)}, "x has missing entries, but Sphere has no marginal"),
    "half a latent": (
        vae, {"x": X, "z": put(np.zeros((5, 2)), NAN, 2, 1)},
        "'z' is latent and known in part of its entries in some row. Give the whole row, or none of it (NaN).",
    ),
    # steps and lengths
    "length 0": (state, {"x": SEQUENCE, "lengths": [0, 1, 2, 3, 3]}, "lengths holds one number for each of the 5 rows, from 1 to 3."),
    "length beyond T": (state, {"x": SEQUENCE, "lengths": [4, 1, 2, 3, 3]}, "lengths holds one number for each of the 5 rows, from 1 to 3."),
    "lengths of other rows": (state, {"x": SEQUENCE, "lengths": [1, 2]}, "lengths holds one number for each of the 5 rows, from 1 to 3."),
    "half a length": (state, {"x": SEQUENCE, "lengths": [1.5, 1, 2, 3, 3]}, "lengths holds one number for each of the 5 rows, from 1 to 3."),
    "length NaN": (state, {"x": SEQUENCE, "lengths": [NAN, 1, 2, 3, 3]}, "lengths holds one number for each of the 5 rows, from 1 to 3."),
    "steps and lengths": (state, {"x": SEQUENCE, "lengths": [3] * 5, "steps": np.ones((5, 3))}, "steps= or lengths="),
    "steps the other way round": (state, {"x": SEQUENCE, "steps": np.ones((3, 5))}, "steps has shape [3, 5]; expected [N, T] = [5, 3]."),
    "a gap": (
        state, {"x": SEQUENCE, "steps": put(np.ones((5, 3)), 0, 1, 1)},
        "steps marks each row's real steps from the first on, without gaps. For a step that was not observed put NaN into the data.",
    ),
    "a row of no steps": (state, {"x": SEQUENCE, "steps": put(np.ones((5, 3)), 0, 1)}, "steps marks each row's real steps from the first on"),
    "lengths without time": (vae, {"x": X, "lengths": [1] * 5}, "steps= and lengths= are for sequences; no variable of these data has [t]."),
}  # fmt: skip


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
        "x has 3 values outside [0, 1] (first: row 17, column 4: 255.0), but p gives x a ContinuousBernoulli. Divide by 256, or use Normal."
    )


@pytest.mark.parametrize(
    ("build", "data", "useless"),
    [
        (vae, {}, '"x | x"'),  # with x latent too, nothing would be observed
        (conditional, {"x": X, "y": [0, 1, -1, 0, 0]}, "Give q a factor for y"),  # p has none for it
    ],
    ids=["the only data absent", "given and missing"],
)
def test_a_message_names_no_fix_that_cannot_work(build, data, useless):
    with pytest.raises(ValueError) as error:
        build().elbo(**data)
    assert useless not in str(error.value)


# What is the same ------------------------------------------------------------------------------------------------------------

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


LABELS = [0, 2, 1, 1, 0]


@pytest.mark.parametrize("build", [mixture, conditional], ids=["latent", "given"])
def test_labels_are_one_hot_vectors(build):
    model = build()
    vectors = one_hot(torch.tensor(LABELS), 3)
    expected = model.elbo(x=X, y=vectors, seed=0).value
    for labels in (LABELS, np.array(LABELS, np.uint8), np.array(LABELS, float), torch.tensor(LABELS)):
        assert torch.equal(model.elbo(x=X, y=labels, seed=0).value, expected)


def test_labels_of_a_sequence_are_one_hot_vectors():
    torch.manual_seed(0)
    model = Model({"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(4)}, {"y[t] | x[t]": OneHot()}).double()
    labels = torch.tensor([[0, 1, 2], [2, 2, 0], [1, 0, 1], [0, 0, 0], [2, 1, 0]])
    assert torch.equal(model.elbo(x=SEQUENCE, y=labels).value, model.elbo(x=SEQUENCE, y=one_hot(labels, 3)).value)


# What is unknown -------------------------------------------------------------------------------------------------------------


def by_hand(model):
    """log p(y), log p(x|y) and log q(y|x) of the mixture model for all y, [N, 3] each, from its weights."""
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    root = weights["factors.p(y).root"]
    log_prior = root - np.log(np.exp(root).sum())

    def affine(name):
        blocks = model.factors[name].net.blocks
        (weight,) = blocks.weights.values()
        return weight.detach().numpy(), blocks.bias.detach().numpy()

    weight, bias = affine("p(x|y)")
    heads = weight.T + bias  # a row for each y
    loc, scale = heads[:, :4], np.log1p(np.exp(heads[:, 4:]))
    log_likelihood = norm.logpdf(X[:, None], loc, scale).sum(-1)
    weight, bias = affine("q(y|x)")
    logits = X @ weight.T + bias
    return log_prior, log_likelihood, logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_an_unknown_label_is_summed_over_and_a_known_one_is_clamped():
    model = mixture()
    with torch.no_grad():
        model.factors["p(y)"].root.copy_(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))
    log_prior, log_likelihood, log_q = by_hand(model)
    free = (np.exp(log_q) * (log_prior + log_likelihood - log_q)).sum(-1)
    rows = np.arange(5)
    clamped = log_prior[LABELS] + log_likelihood[rows, LABELS]
    assert np.allclose(model.elbo(x=X).value.detach(), free, rtol=0, atol=1e-12)
    assert np.allclose(model.elbo(x=X, y=LABELS).value.detach(), clamped, rtol=0, atol=1e-12)
    known = np.array([True, False, True, False, False])
    expected = np.where(known, clamped, free)
    integers = np.where(known, LABELS, -1)
    floats = np.where(known, LABELS, NAN)
    vectors = np.where(known[:, None], np.eye(3)[LABELS], NAN)
    for y in (integers, floats, vectors, torch.tensor(integers)):
        bound = model.elbo(x=X, y=y)
        assert np.allclose(bound.value.detach(), expected, rtol=0, atol=1e-12)
        assert set(bound.terms) == {"x", "kl(y)"}
    for nothing in (None, [-1] * 5, np.full(5, NAN), np.full((5, 3), NAN)):
        assert np.allclose(model.elbo(x=X, y=nothing).value.detach(), free, rtol=0, atol=1e-12)


def test_a_latent_known_in_every_row_is_clamped():
    model = vae()
    z = np.random.default_rng(2).standard_normal((5, 2))
    bound = model.elbo(x=X, z=z)
    assert set(bound.terms) == {"x", "z"}
    assert np.allclose(bound.terms["z"].detach(), norm.logpdf(z).sum(-1), rtol=0, atol=1e-12)
    assert torch.equal(bound.value, bound.terms["x"] + bound.terms["z"])
    assert torch.equal(bound.value, model.log_prob(x=X, z=z))
    assert torch.equal(bound.value, model.elbo(x=X, z=z, seed=5).value)  # nothing is drawn


# What is missing -------------------------------------------------------------------------------------------------------------

HOLES = put(put(put(X, NAN, 0, 1), NAN, 2), NAN, 4, slice(1, 4))  # one entry, a whole row, all but one


def test_missing_entries_leave_a_factorised_likelihood():
    model = vae(Normal(4, net=linear(), scale="learned"))
    with torch.no_grad():
        model.factors["p(x|z)"].vectors["scale"].copy_(torch.tensor([0.1, 0.4, -0.3, 0.9], dtype=torch.float64))
    z = np.random.default_rng(2).standard_normal((5, 2))
    blocks = model.factors["p(x|z)"].net.blocks
    loc = z @ blocks.weights["z"].detach().numpy().T + blocks.bias.detach().numpy()
    scale = np.log1p(np.exp([0.1, 0.4, -0.3, 0.9]))
    each = norm.logpdf(X, loc, scale)
    expected = np.where(np.isnan(HOLES), 0, each).sum(-1)
    term = model.elbo(x=HOLES, z=z).terms["x"].detach()
    assert np.allclose(term, expected, rtol=0, atol=1e-12)
    assert term[2] == 0


def test_missing_entries_are_marginalised_out_of_a_full_covariance():
    model = vae(MultivariateNormal(4, net=linear(), covariance="shared"))
    tril = torch.tensor([0.3, -0.4, 0.8, 0.5, 0.2, 1.1, -0.7, 0.6, 0.1, 0.4], dtype=torch.float64)
    with torch.no_grad():
        model.factors["p(x|z)"].vectors["tril"].copy_(tril)
    factor = np.zeros((4, 4))
    factor[np.tril_indices(4)] = tril
    np.fill_diagonal(factor, np.log1p(np.exp(factor.diagonal())))
    covariance = factor @ factor.T
    z = np.random.default_rng(2).standard_normal((5, 2))
    blocks = model.factors["p(x|z)"].net.blocks
    loc = z @ blocks.weights["z"].detach().numpy().T + blocks.bias.detach().numpy()
    expected = [
        multivariate_normal.logpdf(x[seen], mean[seen], covariance[np.ix_(seen, seen)]) if seen.any() else 0.0
        for x, mean, seen in zip(HOLES, loc, ~np.isnan(HOLES))
    ]
    assert np.allclose(model.elbo(x=HOLES, z=z).terms["x"].detach(), expected, rtol=0, atol=1e-12)


def test_missing_entries_are_marginalised_out_of_every_component():
    model = vae(Mixture(4, components=3))
    z = np.random.default_rng(2).standard_normal((5, 2))
    blocks = model.factors["p(x|z)"].net.blocks
    heads = z @ blocks.weights["z"].detach().numpy().T + blocks.bias.detach().numpy()
    weight, loc, scale = heads[:, :3], heads[:, 3:15].reshape(5, 3, 4), np.log1p(np.exp(heads[:, 15:].reshape(5, 3, 4)))
    each = np.where(np.isnan(HOLES)[:, None], 0, norm.logpdf(X[:, None], loc, scale)).sum(-1)
    expected = logsumexp(weight - logsumexp(weight, -1, keepdims=True) + each, -1)
    assert np.allclose(model.elbo(x=HOLES, z=z).terms["x"].detach(), expected, rtol=0, atol=1e-12)


def test_a_row_that_is_missing_as_a_whole_leaves_any_likelihood():
    model = vae(Sphere(4))
    z = np.random.default_rng(2).standard_normal((5, 2))
    full, holes = (model.elbo(x=x, z=z).terms["x"].detach() for x in (X, put(X, NAN, 2)))
    assert torch.equal(holes, torch.where(torch.arange(5) == 2, 0.0, full))


def test_a_missing_label_that_is_data_leaves_its_likelihood():
    torch.manual_seed(0)
    model = Model({"z": Normal(2), "x | z": OneHot(3)}, {"z | x": Normal()}).double()
    z = np.random.default_rng(2).standard_normal((5, 2))
    full, holes = (model.elbo(x=labels, z=z).terms["x"].detach() for labels in (LABELS, [0, -1, 1, -1, 0]))
    assert torch.equal(holes, torch.where(torch.tensor([True, False, True, False, True]), full, 0.0))


def test_q_reads_missing_entries_as_zeros():
    model = vae()
    zeros = np.nan_to_num(HOLES)
    assert torch.equal(model.elbo(x=HOLES, seed=0).terms["kl(z)"], model.elbo(x=zeros, seed=0).terms["kl(z)"])


def test_the_mask_that_q_reads_starts_without_effect_and_then_has_one():
    torch.manual_seed(0)
    plain = Model({"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal()}).double()
    torch.manual_seed(0)
    told = Model({"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal()}, missing="mask").double()
    assert torch.equal(told.elbo(x=HOLES, seed=0).value, plain.elbo(x=HOLES, seed=0).value)
    with torch.no_grad():
        told.factors["q(z|x)"].net.blocks.missing["x"].fill_(0.5)
    changed = told.elbo(x=HOLES, seed=0).value != plain.elbo(x=HOLES, seed=0).value
    assert changed.tolist() == np.isnan(HOLES).any(-1).tolist()
    assert torch.equal(told.elbo(x=X, seed=0).value, plain.elbo(x=X, seed=0).value)


# Ragged sequences ---------------------------------------------------------------------------------------------------------------

LENGTHS = [3, 1, 2, 3, 2]
REAL = np.arange(3) < np.array(LENGTHS)[:, None]


@pytest.mark.parametrize("padding", [0.0, 7.0, NAN, INF], ids=["zeros", "sevens", "NaN", "inf"])
def test_what_stands_in_the_padding_does_not_matter(padding):
    model = state()
    x = np.where(REAL[..., None], SEQUENCE, padding)
    expected = model.elbo(x=SEQUENCE, lengths=LENGTHS, seed=0).value
    assert torch.isfinite(expected).all()
    for end in ({"lengths": LENGTHS}, {"lengths": torch.tensor(LENGTHS)}, {"steps": REAL}, {"steps": REAL.tolist()}, {"steps": REAL.astype(int)}):
        assert torch.equal(model.elbo(x=x, **end, seed=0).value, expected)


def test_padding_may_lie_outside_the_support():
    torch.manual_seed(0)
    model = Model({"z[t]": Normal(2), "x[t] | z[t]": Bernoulli(4)}, {"z[t] | x[t]": Normal()}).double()
    x = (SEQUENCE > 0).astype(float)
    padded = np.where(REAL[..., None], x, 255.0)
    assert torch.equal(model.elbo(x=padded, lengths=LENGTHS, seed=0).value, model.elbo(x=x, lengths=LENGTHS, seed=0).value)


def test_a_given_without_time_is_constant_over_it():
    p = {"z[t]": Normal(2), "x[t] | z[t], c": Normal(4)}
    torch.manual_seed(0)
    static = Model(p, {"z[t] | x[t]": Normal()}, given={"c": 2}).double()
    torch.manual_seed(0)
    timed = Model({"z[t]": Normal(2), "x[t] | z[t], c[t]": Normal(4)}, {"z[t] | x[t]": Normal()}, given={"c": 2}).double()
    c = np.random.default_rng(3).standard_normal((5, 2))
    repeated = np.repeat(c[:, None], 3, 1)
    assert torch.allclose(static.elbo(x=SEQUENCE, c=c, seed=0).value, timed.elbo(x=SEQUENCE, c=repeated, seed=0).value, rtol=0, atol=1e-12)


# Ragged sequences as lists ----------------------------------------------------------------------------------------------------

RAGGED = [SEQUENCE[i, :length] for i, length in enumerate(LENGTHS)]


def objects(rows):
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


@pytest.mark.parametrize(
    "form", [list, tuple, objects, lambda rows: [row.tolist() for row in rows], lambda rows: [torch.tensor(row) for row in rows]]
)
def test_a_list_of_sequences_is_padded_and_says_its_lengths(form):
    model = state()
    expected = model.elbo(x=SEQUENCE, lengths=LENGTHS, seed=0).value
    assert torch.equal(model.elbo(x=form(RAGGED), seed=0).value, expected)
    assert torch.equal(model.prepare(x=form(RAGGED))["steps"], model.prepare(x=SEQUENCE, lengths=LENGTHS)["steps"])


def test_a_list_of_sequences_of_one_length_is_an_array():
    assert "steps" not in state().prepare(x=list(SEQUENCE))


def test_sequences_of_numbers_and_of_labels_may_be_ragged():
    torch.manual_seed(0)
    model = Model({"y[t]": OneHot(3), "x[t] | y[t]": Normal(1)}, {"y[t] | x[t]": OneHot()}).double()
    x, y = [[0.5, 1.0, -1.0], [2.0]], [[0, 2, 1], [1]]
    padded = model.elbo(x=[[0.5, 1.0, -1.0], [2.0, 0, 0]], y=[[0, 2, 1], [1, 0, 0]], lengths=[3, 1]).value
    assert torch.equal(model.elbo(x=x, y=y).value, padded)


U = [np.zeros((length, 2)) for length in LENGTHS]
BAD_RAGGED = {
    "lengths besides": (state, {"x": RAGGED, "lengths": LENGTHS}, "which say how long each is. Leave out lengths=."),
    "steps besides": (state, {"x": RAGGED, "steps": REAL}, "Leave out steps=."),
    "another sequence disagrees": (controlled, {"x": RAGGED, "u": [*U[:2], np.zeros((3, 2)), *U[3:]]}, "Row 2 has 2 steps of x but 3 of u."),
    "another sequence is whole": (controlled, {"x": RAGGED, "u": np.zeros((5, 3, 2))}, "Row 1 has 1 steps of x but 3 of u."),
    "rows differ": (controlled, {"x": RAGGED, "u": U[:4]}, "The data disagree on the number of examples: x 5, u 4."),
    "no steps": (state, {"x": [RAGGED[0], np.zeros((0, 4))]}, "x has no steps in row 1. Leave that row out."),
    "another width": (state, {"x": [RAGGED[0], np.zeros((1, 3))]}, "x has shape [1, 3] in row 1 but [3, 4] in row 0. Only"),
    "words": (state, {"x": [RAGGED[0], np.array([["a"] * 4])]}, "in row 1, not numbers."),
    "no sequence": (vae, {"x": [[0.0] * 4, [0.0] * 3]}, "its rows have different lengths, which only a sequence may have (x[t])."),
}  # fmt: skip


@pytest.mark.parametrize(("build", "data", "message"), BAD_RAGGED.values(), ids=BAD_RAGGED)
def test_ragged_sequences_that_do_not_fit_are_refused(build, data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build().elbo(**data)


def test_two_ragged_sequences_agree_row_by_row():
    model = controlled()
    u = np.random.default_rng(2).standard_normal((5, 3, 2))
    expected = model.elbo(x=SEQUENCE, u=u, lengths=LENGTHS, seed=0).value
    assert torch.equal(model.elbo(x=RAGGED, u=[row[:n] for row, n in zip(u, LENGTHS)], seed=0).value, expected)


def test_fit_takes_ragged_sequences_from_lists_datasets_and_archives(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return RAGGED[i]

    np.savez(tmp_path / "lengths.npz", x=SEQUENCE, lengths=LENGTHS)
    np.savez(tmp_path / "steps.npz", x=SEQUENCE, steps=REAL)
    found = []
    for data in ({"x": RAGGED}, RAGGED, Rows(), {"x": SEQUENCE, "lengths": LENGTHS}, tmp_path / "lengths.npz", tmp_path / "steps.npz"):
        model = state()
        fit(model, data, steps=3, batch=4)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert all(torch.equal(found[0], other) for other in found[1:])


# Files in parts ----------------------------------------------------------------------------------------------------------------


def kinds(tmp_path):
    """A conditional model's rows with labels and holes, as every kind of map, and as arrays in memory."""
    x, y = put(np.random.default_rng(3).standard_normal((700, 4)), NAN, slice(3, 700, 7), 2), np.arange(700) % 3
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "packed.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x))
    np.save(tmp_path / "wide.npy", np.hstack([x, x]))
    np.save(tmp_path / "single.npy", x.astype(np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    return {
        "memory": {"x": x, "y": y},
        "plain": tmp_path / "plain.npz",
        "packed": tmp_path / "packed.npz",
        "npy": {"x": tmp_path / "x.npy", "y": y},
        "mapped": {"x": mapped, "y": torch.tensor(y)},
        "fortran": {"x": tmp_path / "fortran.npy", "y": y.tolist()},
        "columns": {"x": np.load(tmp_path / "wide.npy", mmap_mode="r")[:, :4], "y": y},
        "reshaped": {"x": mapped.reshape(700, 4, 1)[..., 0], "y": y},
        "copy on write": {"x": np.load(tmp_path / "x.npy", mmap_mode="c"), "y": y},
        "single": {"x": tmp_path / "single.npy", "y": y},
    }


def test_every_kind_of_file_gives_the_rows_that_memory_does(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 4000)  # a hundred rows at a time
    monkeypatch.setattr(sources, "RELEASE", -1)  # every page goes back at once
    model, rows = conditional(), torch.tensor([5, 699, 3, 3, 10, 17])
    for name, data in kinds(tmp_path).items():
        source = open_source(model.graph, data, model._parameter())
        if name == "memory":
            expected = source.take(rows)
        assert isinstance(source, Resident if name in ("memory", "packed") else Mapped), name
        taken = source.take(rows)
        assert taken.keys() == expected.keys() == {"x", "y", "x?"}
        for key, value in expected.items():
            assert torch.allclose(taken[key], value, rtol=0, atol=1e-7 if name == "single" else 0), (name, key)
        assert source.take(torch.tensor([0, 1])).keys() == {"x", "y", "x?"}  # no hole there, but the same plan
        low, high = source.extents["x"]
        assert torch.allclose(low, torch.tensor(np.nanmin(kinds(tmp_path)["memory"]["x"], 0)), rtol=0, atol=1e-7)
        assert (high > 1).all()


def test_a_map_that_was_written_to_keeps_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "RELEASE", -1)
    np.save(tmp_path / "x.npy", np.ones((50, 4)))
    array = np.load(tmp_path / "x.npy", mmap_mode="c")
    array[7] = 5.0
    source = open_source(vae().graph, {"x": array}, torch.zeros(()).double())
    assert source.take(torch.tensor([7]))["x"].flatten().tolist() == [5.0] * 4


def test_members_of_an_archive_are_mapped_where_they_are_stored_plainly(tmp_path):
    graph = vae().graph
    np.savez(tmp_path / "odd.npz", a_name_of_some_length=np.zeros(3, np.uint8), x=X.astype(">f4"))
    found = read_file(tmp_path / "odd.npz", graph)
    assert isinstance(found["x"], np.memmap)
    assert np.array_equal(found["x"], X.astype(np.float32))
    np.savez_compressed(tmp_path / "packed.npz", x=X)
    assert not isinstance(read_file(tmp_path / "packed.npz", graph)["x"], np.memmap)
    content = bytearray((tmp_path / "odd.npz").read_bytes())
    (tmp_path / "cut.npz").write_bytes(content[:300])
    with pytest.raises(ValueError, match="cut.npz cannot be read"):
        read_file(tmp_path / "cut.npz", graph)
    np.savez(tmp_path / "two.npz", a=X, b=X)
    with pytest.raises(ValueError, match="its arrays are a, b; name them after the model's variables"):
        read_file(tmp_path / "two.npz", graph)


def test_labels_out_of_range_are_found_in_any_part_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 4000)
    y = np.arange(700) % 3
    y[650] = 3
    np.savez(tmp_path / "bad.npz", x=np.zeros((700, 4)), y=y)
    with pytest.raises(ValueError, match=r"y has 1 labels outside 0 … 2 \(first: row 650: 3\)"):
        open_source(conditional().graph, tmp_path / "bad.npz", torch.zeros(()))


# Tables -------------------------------------------------------------------------------------------------------------------------

SHUFFLED = "b,y,x_2,a\n0.5,2,1,7\n1.5,,2,8\n2.5,0,3,9\n"


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_columns_go_to_the_variables_they_are_named_after(tmp_path):
    graph = Model({"y": OneHot(3), "x | y": Normal(3)}, {"y | x": OneHot()}).graph
    (tmp_path / "t.csv").write_text(SHUFFLED)
    write_parquet(tmp_path / "t.parquet", {"b": [0.5, 1.5, 2.5], "y": [2, None, 0], "x_2": [1, 2, 3], "a": [7.0, 8.0, 9.0]})
    for name in ("t.csv", "t.parquet"):
        found = read_file(tmp_path / name, graph)
        assert found["x"].tolist() == [[0.5, 1, 7], [1.5, 2, 8], [2.5, 3, 9]]  # in the file's order
        assert np.array_equal(found["y"], [2, NAN, 0], equal_nan=True)
    (tmp_path / "n.csv").write_text("x.10,x.2,x.1,y0,y1,y2\n10,2,1,0,1,0\n")
    found = read_file(tmp_path / "n.csv", graph)
    assert found["x"].tolist() == [[1, 2, 10]]  # numbered: in the order of the numbers
    assert found["y"].tolist() == [[0, 1, 0]]
    (tmp_path / "bare.csv").write_text("\ufeff1;2;3\n4;NA;6\n")
    assert np.array_equal(read_file(tmp_path / "bare.csv", graph)["x"], [[1, 2, 3], [4, NAN, 6]], equal_nan=True)
    again = read_file(tmp_path / "t.csv", graph, columns={"x": ["a", "b", "x_2"]})
    assert again["x"].tolist()[0] == [7, 0.5, 1]
    both = read_arrays({"x": tmp_path / "t.csv", "y": tmp_path / "t.csv"}, graph)
    assert both["x"].shape == (3, 3)
    assert both["y"].shape == (3,)


def test_a_header_names_labels_of_a_given_variable_and_steps_of_a_sequence(tmp_path):
    (tmp_path / "t.csv").write_text("y,a,b,c,d\n0,1,2,3,4\n2,5,6,7,8\n")
    model = conditional()
    source = open_source(model.graph, tmp_path / "t.csv", model._parameter())
    assert source.batch["y"][0].tolist() == [[1, 0, 0], [0, 0, 1]]
    series = Model({"z[t]": Normal(2), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()})
    source = open_source(series.graph, tmp_path / "t.csv", series._parameter())
    assert source.batch["x"].shape == (5, 2, 1)


def test_lists_in_parquet_are_vectors_and_ragged_sequences(tmp_path):
    write_parquet(tmp_path / "v.parquet", {"embedding": X.tolist()})
    assert np.array_equal(read_file(tmp_path / "v.parquet", vae().graph)["x"], X)
    write_parquet(tmp_path / "s.parquet", {"x": [row.tolist() for row in RAGGED]})
    model = state()
    source = open_source(model.graph, tmp_path / "s.parquet", model._parameter())
    expected = model.prepare(x=SEQUENCE, lengths=LENGTHS)
    assert all(torch.equal(source.batch[name], value) for name, value in expected.items())


BAD_TABLES = {
    "too many": (vae, "a,b,c,d,e\n1,2,3,4,5\n", "x needs 4 columns, but gets 5 (a, b, c, d, e). Its columns are a, b, c, d, e."),
    "too few": (vae, "a,b\n1,2\n", "x needs 4 columns, but gets 2 (a, b)."),
    "no header": (vae, "1,2,3\n", "x needs 4 columns, but gets 3 (1, 2, 3). It has no header."),
    "no labels": (conditional, "a,b,c,d\n1,2,3,4\n", "y needs 3 columns, or one of labels, but gets none. Its columns are a, b, c, d."),
    "two of three": (conditional, "a,b,c,d,y0,y1\n1,2,3,4,0,1\n", "y needs 3 columns, or one of labels, but gets 2 (y0, y1)."),
    "sequences of vectors": (state, "a,b\n1,2\n", "A table holds sequences of one number a step; use .npz for more."),
    "twice": (vae, "a,a,c,d\n1,2,3,4\n", "its header has the column 'a' twice"),
    "no rows": (vae, "a,b,c,d\n", "it has a header but no rows"),
    "words": (vae, "a,b,c,d\n1,2,3,x\n", "line 2, column 'd' holds 'x', not a number"),
}


@pytest.mark.parametrize(("build", "text", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_table_that_does_not_fit_is_refused_with_its_columns(tmp_path, build, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_file(tmp_path / "t.csv", build().graph)


def test_parquet_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    graph = vae().graph
    write_parquet(tmp_path / "w.parquet", {"name": ["a", "b"]})
    with pytest.raises(ValueError, match="w.parquet cannot be read: its column 'name' holds string, not numbers"):
        read_file(tmp_path / "w.parquet", graph)
    (tmp_path / "no.parquet").write_text("nothing of the kind")
    with pytest.raises(ValueError, match="no.parquet cannot be read"):
        read_file(tmp_path / "no.parquet", graph)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=re.escape("reading Parquet needs pyarrow; install the extra: pip install 'aevb[parquet]'")):
        read_file(tmp_path / "w.parquet", graph)


# Preparation ---------------------------------------------------------------------------------------------------------------------

GREY = np.random.default_rng(4).integers(0, 17, (300, 6)).astype(np.uint8)


def test_preparations_of_grey_levels():
    quantised = dequantise(GREY, 17)
    assert np.array_equal(np.floor(quantised * 17), GREY)
    assert quantised.min() > 0
    assert quantised.max() < 1
    assert np.array_equal(threshold(GREY, 17), GREY > 8)
    binary = binarise(GREY, 17)
    assert set(np.unique(binary)) == {0, 1}
    assert (binary[GREY == 0] == 0).all()
    assert (binary[GREY == 16] == 1).all()
    assert abs(binary.mean() - GREY.mean() / 16) < 5 * 0.5 / GREY.size**0.5  # five standard errors
    assert np.allclose(scale(GREY, 17), GREY / 16, rtol=0, atol=1e-7)
    assert np.isnan(binarise(np.array([NAN, 3.0]), 17)).tolist() == [True, False]
    assert as_sequence(np.arange(24).reshape(2, 12), steps=4).shape == (2, 4, 3)
    for wrong in (lambda: dequantise(GREY, 16), lambda: threshold(np.array([-1.0]))):
        with pytest.raises(ValueError, match="takes grey levels 0 … .* Say how many there are: levels="):
            wrong()
    with pytest.raises(ValueError, match="12 columns are no square of rows"):
        as_sequence(np.zeros((2, 12)))


def test_standardising_uses_known_entries_and_the_training_rows_numbers(tmp_path):
    x = put(np.random.default_rng(5).standard_normal((50, 3)) * [1, 10, 0] + [5, -3, 7], NAN, 4, 1)
    record = standardise(x)
    assert np.allclose(record.mean, np.nanmean(x, 0), rtol=0, atol=1e-12)
    assert np.allclose(record.scale, [*np.nanstd(x, 0)[:2], 1.0], rtol=0, atol=1e-12)
    assert np.array_equal(np.isnan(record.values), np.isnan(x))
    assert np.allclose(record.undo(record.values), x, rtol=0, atol=1e-12, equal_nan=True)
    test = standardise(x[:5] + 1, like=record)
    assert np.allclose(test.values, (x[:5] + 1 - record.mean) / record.scale, rtol=0, atol=1e-12, equal_nan=True)
    with pytest.raises(ValueError, match="These rows have 2 columns, those that they are standardised like have 3"):
        standardise(x[:, :2], like=record)
    np.save(tmp_path / "x.npy", x)
    mapped = standardise(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert np.allclose(mapped.mean, record.mean, rtol=0, atol=1e-12)
    model = Model({"z": Normal(2), "x | z": Normal(3, scale=1.0)}, {"z | x": Normal()}).double()
    rows = torch.tensor([4, 20, 3])
    sources = [open_source(model.graph, {"x": value}, model._parameter()) for value in (record, record.values, mapped)]
    assert isinstance(sources[2], Mapped)
    batches = [source.take(rows) for source in sources]
    assert all(torch.equal(batches[0][name], other[name]) for other in batches[1:] for name in ("x", "x?"))
    ragged = standardise([np.array([[1.0], [2.0]]), np.array([[6.0]])])
    assert ragged.mean.tolist() == [3.0]
    assert [row.tolist() for row in ragged.values] == [[[-2 / ragged.scale[0]], [-1 / ragged.scale[0]]], [[3 / ragged.scale[0]]]]
    assert standardise([1.0, 3.0]).values.tolist() == [-1.0, 1.0]
    assert standardise(np.full((3, 2), NAN)).scale.tolist() == [1.0, 1.0]


def fresh_model(family=Bernoulli):
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z": family(6)}, {"z | x": Normal()})


def test_fresh_rows_are_drawn_by_the_generator_and_fixed_without_one(tmp_path):
    np.save(tmp_path / "x.npy", GREY)
    like = torch.zeros(())
    for make, value in ((binarise, GREY), (dequantise, GREY), (binarise, np.load(tmp_path / "x.npy", mmap_mode="r"))):
        source = open_source(fresh_model(ContinuousBernoulli).graph, {"x": make(value, 17, fresh=True)}, like)
        if isinstance(source, Resident):
            assert source.batch["x"].dtype == torch.uint8
        rows = torch.arange(300)
        draws = [source.take(rows, generator=torch.Generator().manual_seed(seed))["x"] for seed in (0, 0, 1)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        shares = [source.take(rows, generator=torch.Generator().manual_seed(0), share=share)["x"] for share in (slice(0, 100), slice(100, 300))]
        assert torch.equal(torch.cat(shares, 1), draws[0])
        fixed = source.take(rows)["x"]
        assert torch.equal(source.take(torch.tensor([270, 3, 40]))["x"], fixed[:, [270, 3, 40]])
        if make is dequantise:
            assert torch.equal((draws[0] * 17).floor(), torch.tensor(GREY).float()[None])
        else:
            mean = torch.stack([source.take(rows, generator=torch.Generator().manual_seed(seed))["x"] for seed in range(100)]).mean(0)[0]
            probability = torch.tensor(GREY / 16)
            assert ((mean - probability).abs() <= 5.5 * (probability * (1 - probability) / 100).sqrt()).all()  # 1,800 cells, each fails by 4e-8


def test_fresh_rows_keep_what_is_missing_and_padded():
    x = put(GREY, NAN, 3, 2)
    source = open_source(fresh_model(ContinuousBernoulli).graph, {"x": dequantise(x, 17, fresh=True)}, torch.zeros(()))
    taken = source.take(torch.tensor([3, 4]), generator=torch.Generator().manual_seed(0))
    assert taken["x"][0, 0, 2] == 0
    assert taken["x?"][0].tolist() == [[True, True, False, True, True, True], [True] * 6]
    model = Model({"z[t]": Normal(2), "x[t] | z[t]": ContinuousBernoulli(3)}, {"z[t] | x[t]": Normal()})
    source = open_source(model.graph, {"x": dequantise(GREY.reshape(300, 2, 3), 17, fresh=True), "lengths": [1] * 300}, torch.zeros(()))
    taken = source.take(torch.arange(5), generator=torch.Generator().manual_seed(0))
    assert (taken["x"][1] == 0).all()
    assert (taken["x"][0] > 0).all()


def test_a_run_on_fresh_rows_is_recorded_resumed_bit_equal_and_validated_on_fixed_draws(tmp_path):
    data = {"x": binarise(GREY, 17, fresh=True)}
    models = [fresh_model(), fresh_model(), fresh_model()]
    runs = [fit(models[0], data, validation=data, steps=12, batch=50, out=tmp_path / "whole")]
    fit(models[1], data, validation=data, steps=6, batch=50, out=tmp_path / "parts", decay="constant")
    fit(models[2], data, validation=data, steps=12, batch=50, out=tmp_path / "straight", decay="constant")
    fit(models[1], data, validation=data, steps=12, batch=50, out=tmp_path / "parts", decay="constant", resume=True)
    for one, other in zip(models[1].parameters(), models[2].parameters(), strict=True):
        assert torch.equal(one, other)
    config = tomllib.loads((tmp_path / "whole" / "config.toml").read_text())
    assert config["fresh"] == {"x": "binarise 17"}
    with pytest.raises(CheckpointError, match="was trained with fresh="):
        fit(models[1], {"x": threshold(GREY, 17)}, steps=14, batch=50, out=tmp_path / "parts", decay="constant", resume=True)
    source = open_source(models[0].graph, data, models[0]._parameter())
    assert evaluate(models[0], source)["elbo"] == pytest.approx(runs[0].rows[-1]["validation elbo"], abs=1e-4)


# What no density has a bound on ----------------------------------------------------------------------------------------------------

FLAT = put(put(np.random.default_rng(6).random((40, 4)), 0.25, slice(None), 1), 0.0, slice(None), 3)
UNBOUNDED = {
    "Normal": (Normal(4), FLAT, "x has 2 of 4 columns that are constant (columns 1, 3), but p gives x a Normal whose scale is learned"),
    "one scale": (Normal(4, scale="learned"), FLAT, "fix the scale (Normal(…, scale=0.1))"),
    "Laplace": (Laplace(4), FLAT, "p gives x a Laplace"),
    "StudentT": (StudentT(4), FLAT, "p gives x a StudentT"),
    "MultivariateNormal": (MultivariateNormal(4), FLAT, "p gives x a MultivariateNormal whose covariance is learned"),
    "Mixture": (Mixture(4), FLAT, "p gives x a Mixture"),
    "ContinuousBernoulli": (ContinuousBernoulli(4), FLAT, "x has 1 of 4 columns that are exactly 0 (or exactly 1) in every row (column 3)"),
    "ones": (ContinuousBernoulli(4), put(FLAT, 1.0, slice(None), 0), "(columns 0, 3)"),
    "Beta": (Beta(4), np.clip(FLAT, 0.1, 0.9), "x has 2 of 4 columns that are constant (columns 1, 3), but p gives x a Beta"),
    "one row": (Normal(4), FLAT[:1], "x has a single row, so every column is constant, but p gives x a Normal whose scale is learned"),
    "one value": (Normal(4), put(put(FLAT[:, [0, 2, 0, 2]], NAN, slice(1, 40), 0), 1.0, 5, 1), "columns that are constant (column 0)"),
}  # fmt: skip


@pytest.mark.parametrize("mapped", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize(("family", "x", "message"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_data_on_which_a_density_is_unbounded_are_refused_before_training(tmp_path, family, x, message, mapped):
    model = Model({"z": Normal(2), "x | z": family}, {"z | x": Normal()})
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(model, {"x": tmp_path / "x.npy" if mapped else x}, steps=1)
    assert torch.isfinite(model.elbo(x=x).value).all()  # only training would diverge


@pytest.mark.parametrize(
    ("family", "x"),
    [
        (Normal(4, scale=0.1), FLAT),
        (ContinuousBernoulli(4, clamped=True), FLAT),
        (ContinuousBernoulli(4), FLAT.clip(0.1)),
        (Bernoulli(4), np.zeros((9, 4))),
        (Poisson(4), np.zeros((9, 4))),
        (NegativeBinomial(4), np.zeros((9, 4))),
        (Normal(4), put(FLAT[:, [0, 2, 0, 2]], NAN, slice(None), 1)),  # missing everywhere: it has no likelihood
        (Normal(4), dequantise(np.zeros((9, 4), np.uint8))),
    ],
)
def test_other_data_and_other_densities_are_trained(family, x):
    model = Model({"z": Normal(2), "x | z": family}, {"z | x": Normal()})
    assert fit(model, {"x": x}, steps=2).step == 2


def test_images_are_dequantised_under_a_density():
    for family, how in (
        (Normal, "dequantise"),
        (ContinuousBernoulli, "dequantise"),
        (Beta, "dequantise"),
        (Bernoulli, "threshold"),
        (Poisson, "counts"),
    ):
        assert default_preparation(fresh_model(family).graph, "x") == how


def test_what_a_loader_would_change_is_not_dropped_silently():
    from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

    from aevb import zoo

    rows = TensorDataset(torch.as_tensor(np.random.default_rng(0).random((20, 3))))
    graph, like = zoo.fa().graph, torch.zeros(())
    assert open_source(graph, DataLoader(rows, batch_size=4, shuffle=True), like).n == 20
    with pytest.raises(ValueError, match="SubsetRandomSampler; training orders the rows itself"):
        open_source(graph, DataLoader(rows, sampler=SubsetRandomSampler([1, 2])), like)
    with pytest.raises(ValueError, match="collate_fn of its own"):
        open_source(graph, DataLoader(rows, collate_fn=lambda batch: batch), like)


def test_a_variable_that_is_missing_everywhere_is_refused_and_a_column_is_not():
    from aevb import fit, zoo

    x = np.random.default_rng(0).normal(size=(30, 3))
    with pytest.raises(ValueError, match=r"x is missing \(NaN\) in every row: there is nothing to learn it from"):
        fit(zoo.fa(), {"x": np.full((30, 3), np.nan)}, steps=2)
    x[:, 1] = np.nan
    fit(zoo.fa(), {"x": x}, steps=2)
