"""Data by name: what was done to the rows is recorded, undone in what comes out, and lazy for files that do not fit into memory."""

import json

import numpy as np
import pytest
from small_models import NAN

from aevb import Model, Normal, cli
from aevb.data import Prepared
from aevb.data.builtin import digits
from aevb.data.named import Recipe, load

GREY = np.random.default_rng(0).integers(0, 9, (120, 6)).astype(float)


def aevb(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


def graph(size: int = 6):
    return Model({"z": Normal(2), "x | z": Normal(size)}, {"z | x": Normal()}).graph


def test_a_preparation_is_undone_in_the_units_of_the_data():
    levels = np.array([0.0, 3.0, 8.0])
    for how, prepared in (("scale", levels / 8), ("counts", levels), ("dequantise", (levels + 0.5) / 9), ("dequantise-fresh", (levels + 0.5) / 9)):
        assert np.allclose(Recipe("x.npy", prepare=how, levels=9).undo(prepared), levels, rtol=0, atol=1e-12)
    for how in ("binarise", "threshold", "binarise-fresh"):  # a probability stands for its share of the highest level
        assert np.allclose(Recipe("x.npy", prepare=how, levels=9).undo(np.array([0.0, 0.5, 1.0])), [0, 4, 8], rtol=0, atol=1e-12)
    assert np.allclose(Recipe("x.npy", prepare="standardise", mean=[1.0], scale=[2.0]).undo(levels), 2 * levels + 1, rtol=0, atol=1e-12)
    assert np.array_equal(Recipe("x.npy").undo(levels), levels)


@pytest.mark.parametrize(
    ("how", "family"), [("threshold", "Bernoulli"), ("dequantise", "ContinuousBernoulli"), ("scale", "Normal"), ("counts", "Poisson")]
)
def test_missing_grey_levels_are_filled_with_grey_levels(tmp_path, monkeypatch, how, family):
    missing = np.random.default_rng(1).random(GREY.shape) < 0.1
    np.save(tmp_path / "x.npy", np.where(missing, NAN, GREY))
    small = ["--set", "z=2", "--set", "hidden=8", "--set", f"likelihood={family}"]
    aevb(monkeypatch, "train", "vae", "--data", tmp_path / "x.npy", "--prepare", how, *small, "--steps", 100, "--lr", 0.03, "--out", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "data.json").read_text())["levels"] == 9
    aevb(monkeypatch, "impute", tmp_path / "run", "--out", tmp_path / "filled.npy", "--samples", 20)
    filled = np.load(tmp_path / "filled.npy")
    assert np.array_equal(filled[~missing], GREY[~missing])
    assert abs(filled[missing].mean() - GREY.mean()) < 1.5  # of the data's 0 … 8, not of the model's 0 … 1
    assert filled[missing].min() > -1
    assert filled[missing].max() < 9


def test_digits_without_holes_come_back_as_their_pixels(tmp_path, monkeypatch):
    aevb(monkeypatch, "train", "vae", "--data", "digits", "--set", "z=2", "--set", "hidden=8", "--steps", 2, "--out", tmp_path / "run")
    aevb(monkeypatch, "impute", tmp_path / "run", "--out", tmp_path / "filled.npz", "--samples", 1)
    with np.load(tmp_path / "filled.npz") as found:
        assert np.array_equal(found["x"], digits()[0].pixels.reshape(-1, 64))


@pytest.mark.parametrize("how", ["threshold", "binarise", "dequantise", "scale", "counts", "standardise"])
def test_a_mapped_file_stays_mapped_whatever_is_done_to_it(tmp_path, how):
    np.save(tmp_path / "x.npy", GREY)
    np.savez_compressed(tmp_path / "x.npz", x=GREY)
    files = [load(str(tmp_path / name), graph(), prepare=how, hold_out=0.25, seed=3) for name in ("x.npy", "x.npz")]
    mapped, memory = ((found.train.data["x"], found.test.data["x"]) for found in files)
    if how != "standardise":
        assert all(isinstance(value, Prepared) for value in mapped)
        assert files[0].recipe.levels == files[1].recipe.levels == 9
    for one, other in zip(mapped, memory, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_the_padding_of_a_mapped_file_is_not_standardised_by(tmp_path):
    model = Model({"z[t]": Normal(2), "x[t] | z[t]": Normal(2)}, {"z[t] | x[t]": Normal()})
    x, lengths = np.random.default_rng(2).normal(5, 2, (30, 4, 2)), np.arange(30) % 4 + 1
    x[np.arange(4) >= lengths[:, None]] = 1e6
    np.savez(tmp_path / "plain.npz", x=x, lengths=lengths)
    real = x[np.arange(4) < lengths[:, None]]
    recipe = load(str(tmp_path / "plain.npz"), model.graph, prepare="standardise").recipe
    assert np.allclose(recipe.mean, real.mean(0), rtol=0, atol=1e-9)
    assert np.allclose(recipe.scale, real.std(0), rtol=0, atol=1e-9)
