"""What users pass besides arrays of numbers: other tensors, other names, other kinds of numbers."""

import json
import os
import re

import numpy as np
import pytest
import torch
from small_models import LENGTHS, RAGGED, SEQUENCE, X, state, vae

from aevb import (
    Bernoulli,
    ContinuousBernoulli,
    Exact,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    StudentT,
    em,
    fit,
)
from aevb.data import standardise
from aevb.data.datasets import Recipe
from aevb.data.sources import open_source
from aevb.runtime.checked_files import DataWarning


def gaussian(d=1, **more):
    return Model({"z": Normal(1), "x | z": Normal(d, **more)}, {"z | x": Normal()})


# Names, and what stands for numbers ---------------------------------------------------------------


def test_a_name_that_is_nearly_a_variables_is_asked_about():
    for call in (lambda: vae().elbo(X=X), lambda: fit(vae(), {"X": X}, steps=1)):
        with pytest.raises(
            ValueError,
            match=r"The data have 'X', which is not a variable of this model \(z, x\)\. Did you "
            r"mean 'x'\?",
        ):
            call()
    model = Model({"z": Normal(1), "income | z": Normal(1)}, {"z | income": Normal()})
    with pytest.raises(ValueError, match=r"Did you mean 'income'\?"):
        model.elbo(incone=X[:, :1])
    with pytest.raises(ValueError, match=r"The data have 'w', .* Leave it out\."):
        vae().elbo(x=X, w=X)


TENSORS = {
    "meta": (torch.zeros(5, 4, device="meta"), "x holds no numbers (a meta tensor)"),
    "sparse": (torch.zeros(5, 4).to_sparse(), "x is a sparse tensor. Pass a dense one"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.zeros(5, 4), 0.1, 0, torch.qint8),
        "x holds quantised numbers. Pass value.dequantize()",
    ),
    "complex": (torch.zeros(5, 4, dtype=torch.complex64), "x holds complex numbers"),
    "a word": (
        np.array([["1", "2", "3", "red"]] * 5),
        "x holds 'red' in row 0, column 3 (from 0), not a number. If these are categories, declare",
    ),
    "an object": (
        np.array([[1, 2, 3, None]] * 5, dtype=object),
        "x holds None in row 0, column 3 (from 0), not a number",
    ),
    "numbers as words": (
        np.array([["1", "2", "3", "4"]] * 5),
        "not numbers. Convert it: .astype(float)",
    ),
    "bytes": (
        np.arange(20).reshape(5, 4) * 13,
        "They look like grey levels 0 … 255: make them binary (aevb.data.threshold(x, 256); "
        "--prepare threshold)",
    ),
    "levels": (
        np.arange(20).reshape(5, 4) % 17,
        "They look like grey levels 0 … 16: make them binary (aevb.data.threshold(x, 17)",
    ),
}


def test_what_is_fixed_in_a_sample_is_refused_alike():
    model = Model({"y": OneHot(3), "x | y": Normal(4)}, {"y | x": OneHot()})
    meta = torch.zeros(3, dtype=torch.long, device="meta")
    for value, message in (
        ("cat", "y holds 'cat'"),
        (meta, "y holds no numbers (a meta tensor)"),
        ({"a": 1}, "y is a dict, not an array of numbers"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            model.sample(3, y=value)
    assert model.sample(3, y=torch.tensor([0, 2, 1], dtype=torch.uint64))["y"].argmax(
        -1
    ).tolist() == [0, 2, 1]
    with pytest.raises(
        ValueError, match="y has 1 label outside 0 … 2"
    ):  # not taken for −1, an unknown one
        model.elbo(x=torch.zeros(1, 4), y=torch.tensor([2**64 - 1], dtype=torch.uint64))


def test_a_matrix_of_scipy_is_refused_by_what_it_is():
    matrix = pytest.importorskip("scipy.sparse").csr_matrix(np.eye(4))
    with pytest.raises(
        ValueError, match=r"x is a csr_matrix, not an array of numbers\. Pass x\.toarray\(\)\."
    ):
        gaussian(4).elbo(x=matrix)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("value", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_what_is_no_array_of_numbers_is_refused_by_what_it_is(value, message):
    value = value() if callable(value) and not isinstance(value, torch.Tensor) else value
    model = Model({"z": Normal(1), "x | z": Bernoulli(4)}, {"z | x": Normal()})
    for call in (lambda: model.elbo(x=value), lambda: fit(model, {"x": value}, steps=1)):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_grey_levels_into_a_density_on_the_unit_interval_are_spread():
    model = Model({"z": Normal(1), "x | z": ContinuousBernoulli(4)}, {"z | x": Normal()})
    with pytest.raises(
        ValueError,
        match=re.escape(
            "spread them over (0, 1) (aevb.data.dequantise(x, 256); --prepare dequantise)."
        ),
    ):
        model.elbo(x=np.arange(20).reshape(5, 4) * 13)
    with pytest.raises(ValueError, match=r"Divide by 256, or use Normal\."):  # these are no levels
        model.elbo(x=np.full((5, 4), 1.5))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_unsigned_labels_lengths_and_values_are_numbers(kind):
    model = Model({"y": OneHot(3), "x | y": Normal(2)}, {"y | x": OneHot()})
    x, y = np.arange(6).reshape(3, 2), np.array([0, 2, 1])
    expected = model.elbo(x=x, y=y).value
    assert torch.equal(model.elbo(x=x.astype(kind), y=y.astype(kind)).value, expected)
    assert torch.equal(
        model.elbo(x=torch.as_tensor(x.astype(kind)), y=torch.as_tensor(y.astype(kind))).value,
        expected,
    )
    fit(model, {"x": x.astype(kind), "y": y.astype(kind)}, steps=1)
    series = state()
    wanted = series.elbo(x=SEQUENCE, lengths=LENGTHS, seed=0).value
    for lengths in (np.array(LENGTHS, dtype=kind), torch.as_tensor(np.array(LENGTHS, dtype=kind))):
        assert torch.equal(series.elbo(x=SEQUENCE, lengths=lengths, seed=0).value, wanted)


def test_a_standardised_list_of_sequences_is_data_everywhere():
    model = state()
    record = standardise(RAGGED)
    expected = model.elbo(x=record.values, seed=0).value
    assert torch.equal(model.elbo(x=record, seed=0).value, expected)
    assert torch.equal(
        model.log_evidence(x=record, seed=0).value,
        model.log_evidence(x=record.values, seed=0).value,
    )
    assert torch.equal(
        model.posterior(x=record, seed=0)["z"].mean,
        model.posterior(x=record.values, seed=0)["z"].mean,
    )
    assert open_source(model.graph, {"x": record}, model._parameter()).n == len(RAGGED)


def test_rows_of_a_dataset_must_have_the_same_parts():
    class Rows(torch.utils.data.Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return self.rows[i]

    x = torch.zeros(4)
    uneven = {
        "Row 1 (from 0) of the Dataset has y, row 0 has x": [{"x": x}, {"y": x}],
        "Row 2 (from 0) of the Dataset has x, y, row 0 has x": [
            {"x": x},
            {"x": x},
            {"x": x, "y": x},
        ],
        "Row 1 (from 0) of the Dataset has Tensor, row 0 has x": [{"x": x}, x],
        "Row 1 (from 0) of the Dataset has 2 parts": [(x,), (x, x)],
    }
    for message, rows in uneven.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            fit(vae(), Rows(rows), steps=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_sentence():
    for call in (
        lambda: vae().to("cuda"),
        lambda: vae().to(torch.device("cuda", 1)),
        lambda: vae().to(device="cuda"),
        lambda: vae().cuda(),
    ):
        with pytest.raises(ValueError, match=r"no device 'cuda(:1)?' here.*Use \.to\('cpu'\)"):
            call()
    assert vae().to("cpu", torch.float64)._parameter().dtype is torch.float64
    assert vae().to(torch.float64)._parameter().dtype is torch.float64


def test_a_model_in_bfloat16_is_used_but_not_trained():
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    model = gaussian(4).to(torch.bfloat16)
    assert model.elbo(x=x).value.dtype is torch.bfloat16
    assert np.isfinite(model.sample(3, seed=0)["x"].float().numpy()).all()
    assert model.log_evidence(x=x, seed=0).value.isfinite().all()
    assert model.posterior(x=x)["z"].mean.dtype is torch.bfloat16
    with pytest.raises(
        ValueError,
        match=re.escape("The model is in bfloat16, too coarse to train in. Train model.float()"),
    ):
        fit(model, {"x": x}, steps=3)


def test_what_torch_cannot_compute_in_low_precision_is_a_sentence():
    student = Model({"z": StudentT(1), "x | z": Normal(2)}, {"z | x": Normal()}).to(torch.bfloat16)
    full = Model({"z": Normal(1), "x | z": MultivariateNormal(2)}, {"z | x": Normal()}).to(
        torch.bfloat16
    )
    for call in (lambda: student.sample(3), lambda: full.elbo(x=torch.zeros(3, 2))):
        with pytest.raises(
            ValueError,
            match=r"torch cannot compute this in the model's precision, bfloat16 .* Use "
            r"model\.float\(\)\.",
        ):
            call()


def test_a_model_without_weights_is_a_sentence():
    model = gaussian(4).to("meta")
    for call in (
        lambda: model.elbo(x=torch.zeros(3, 4)),
        lambda: model.sample(3),
        lambda: fit(model, {"x": torch.zeros(3, 4)}, steps=1),
    ):
        with pytest.raises(ValueError, match="This model is on the meta device and has no weights"):
            call()


# Files that change, and recipes -------------------------------------------------------------------


def test_a_mapped_file_that_was_cut_is_named(tmp_path):
    """Reading beyond the end of a mapped file would end the process (SIGBUS)."""
    # such a map is read through its pages
    x = np.asfortranarray(np.random.default_rng(0).random((4000, 4)))
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = open_source(gaussian(4).graph, {"x": mapped}, torch.zeros(()))
    os.truncate(tmp_path / "x.npy", 4096)
    with pytest.raises(
        ValueError, match=r"x\.npy has 4096 bytes, but had 128128 when it was opened"
    ):
        source.take(torch.arange(3000, 3010))
    with pytest.raises(ValueError, match=r"x\.npy has 4096 bytes"):
        open_source(gaussian(4).graph, {"x": mapped}, torch.zeros(()))


def test_a_recipe_of_other_kinds_is_damaged(tmp_path):
    good = {
        "data": "t.csv",
        "mean": [0.0],
        "scale": [1.0],
        "columns": {"x": ["a"]},
        "hold_out": 0.1,
        "seed": 3,
    }
    (tmp_path / "data.json").write_text(json.dumps(good))
    assert Recipe.read(tmp_path).split == 3  # written before the split had a seed of its own
    wrong = {
        "mean": "0",
        "scale": [1.0, 2.0],
        "columns": {"x": "a"},
        "hold_out": "0.1",
        "seed": [1],
        "image": [8],
        "others": {"u": [1]},
        "data": None,
    }
    for name, value in wrong.items():
        (tmp_path / "data.json").write_text(json.dumps(good | {name: value}))
        with pytest.raises(ValueError, match=r"data\.json is damaged"):
            Recipe.read(tmp_path)
    (tmp_path / "data.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"data\.json is damaged"):
        Recipe.read(tmp_path)


# What a run says ----------------------------------------------------------------------------------


def notes(run):
    return [row["note"] for row in run.rows if "note" in row]


def test_labels_of_some_rows_are_said_not_to_teach_q():
    model = Model({"y": OneHot(2), "x | y": Normal(2)}, {"y | x": OneHot()})
    x = np.random.default_rng(0).normal(size=(40, 2))
    y = np.where(np.arange(40) < 9, np.arange(40) % 2, -1)
    assert "add classify=1" in notes(fit(model, {"x": x, "y": y}, steps=1))[0]
    assert notes(fit(model, {"x": x, "y": y}, steps=1, classify=1.0)) == []
    assert notes(fit(model, {"x": x}, steps=1)) == []


def repeats(run):
    return [note for note in notes(run) if "few values that repeat" in note]


def test_values_that_repeat_are_noted_under_a_density():
    rng = np.random.default_rng(0)
    x = np.stack(
        [
            rng.integers(0, 2, 300),
            rng.normal(size=300),
            rng.integers(0, 8, 300),
            rng.normal(size=300).round(2),
        ],
        1,
    )
    mixture = Model({"y": OneHot(3, learned=True), "x | y": Normal(4)}, {"y | x": Exact()})
    (note,) = repeats(fit(mixture, {"x": x}, schedule=em(), steps=1))
    assert note.startswith(
        "x has columns of few values that repeat (columns 0, 2, from 0; the first: 2 in 300 "
        "entries)"
    )
    assert '"c | y": OneHot(2)' in note
    assert mixture.log_evidence(x=x).notes == (note,)
    assert mixture.log_evidence(x=x[:3]).notes == ()  # of three rows nothing can be said
    # one peak, whose width the data bound
    assert repeats(fit(gaussian(4, scale="learned"), {"x": x}, steps=1)) == []
    with pytest.warns(DataWarning, match="times the fixed scale"):
        run = fit(gaussian(4, scale=0.1), {"x": x}, steps=1)
    assert repeats(run) == []
    assert len(repeats(fit(gaussian(4), {"x": x}, steps=1))) == 1  # a scale that depends on z
    assert repeats(fit(mixture, {"x": x[:, [1, 3, 1, 3]]}, schedule=em(), steps=1)) == []
    holes = np.where(rng.random(x.shape) < 0.3, np.nan, x)
    assert "columns 0, 2" in repeats(fit(mixture, {"x": holes}, schedule=em(), steps=1))[0]


def test_one_value_that_repeats_and_columns_that_number_the_rows_are_noted():
    torch.manual_seed(0)
    x = torch.randn(100, 3)
    x[:30, 1] = 0
    model = Model({"y": OneHot(2, learned=True), "x | y": Normal(3)}, {"y | x": OneHot()})
    (note,) = [row["note"] for row in fit(model, {"x": x}, steps=1).rows if "note" in row]
    assert note.startswith(
        "x has columns in which one value repeats (column 1, from 0; the first: in 30 of 100 "
        "entries). p gives x a Normal"
    )
    assert note in str(model.log_evidence(x=x))
    x[:, 1], x[:, 2] = torch.randn(100), (torch.arange(100.0) - 50) / 30
    for rows in (x, x[torch.arange(100) % 7 != 3]):  # all, or without those held out
        (note,) = [row["note"] for row in fit(model, {"x": rows}, steps=1).rows if "note" in row]
        assert note.startswith("x has columns that number the rows (column 2, from 0)")
    # sorted, but no numbers
    assert not [
        row
        for row in fit(model, {"x": torch.randn(100, 3).sort(0).values}, steps=1).rows
        if "note" in row
    ]
