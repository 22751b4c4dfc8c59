"""Data by name: what was done to the rows is recorded, undone in what comes out, and lazy for files
that do not fit into memory.
"""

import json

import numpy as np
import pytest
from small_models import NAN

from aevb import Laplace, Model, MultivariateNormal, Normal, OneHot, Poisson, cli
from aevb.data import Prepared
from aevb.data.builtin import digits
from aevb.data.datasets import Recipe, in_units, load

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
    for how, prepared in (
        ("scale", levels / 8),
        ("counts", levels),
        ("dequantise", (levels + 0.5) / 9),
        ("dequantise-fresh", (levels + 0.5) / 9),
    ):
        assert np.allclose(
            Recipe("x.npy", prepare=how, levels=9).undo(prepared), levels, rtol=0, atol=1e-12
        )
    for how in (
        "binarise",
        "threshold",
        "binarise-fresh",
    ):  # a probability stands for its share of the highest level
        assert np.allclose(
            Recipe("x.npy", prepare=how, levels=9).undo(np.array([0.0, 0.5, 1.0])),
            [0, 4, 8],
            rtol=0,
            atol=1e-12,
        )
    assert np.allclose(
        Recipe("x.npy", prepare="standardise", mean=[1.0], scale=[2.0]).undo(levels),
        2 * levels + 1,
        rtol=0,
        atol=1e-12,
    )
    assert np.array_equal(Recipe("x.npy").undo(levels), levels)


@pytest.mark.parametrize(
    ("how", "family"),
    [
        ("threshold", "Bernoulli"),
        ("dequantise", "ContinuousBernoulli"),
        ("scale", "Normal"),
        ("counts", "Poisson"),
    ],
)
def test_missing_grey_levels_are_filled_with_grey_levels(tmp_path, monkeypatch, how, family):
    missing = np.random.default_rng(1).random(GREY.shape) < 0.1
    np.save(tmp_path / "x.npy", np.where(missing, NAN, GREY))
    small = ["--set", "z=2", "--set", "hidden=8", "--set", f"likelihood={family}"]
    aevb(
        monkeypatch,
        "train",
        "vae",
        "--data",
        tmp_path / "x.npy",
        "--prepare",
        how,
        *small,
        "--steps",
        100,
        "--lr",
        0.03,
        "--out",
        tmp_path / "run",
    )
    assert json.loads((tmp_path / "run" / "data.json").read_text())["levels"] == 9
    aevb(monkeypatch, "impute", tmp_path / "run", "--out", tmp_path / "filled.npy", "--samples", 20)
    filled = np.load(tmp_path / "filled.npy")
    assert np.array_equal(filled[~missing], GREY[~missing])
    # of the data's 0 … 8, not of the model's 0 … 1
    assert abs(filled[missing].mean() - GREY.mean()) < 1.5
    assert filled[missing].min() > -1
    assert filled[missing].max() < 9


def test_digits_without_holes_come_back_as_their_pixels(tmp_path, monkeypatch):
    aevb(
        monkeypatch,
        "train",
        "vae",
        "--data",
        "digits",
        "--set",
        "z=2",
        "--set",
        "hidden=8",
        "--steps",
        2,
        "--out",
        tmp_path / "run",
    )
    aevb(monkeypatch, "impute", tmp_path / "run", "--out", tmp_path / "filled.npz", "--samples", 1)
    with np.load(tmp_path / "filled.npz") as found:
        assert np.array_equal(found["x"], digits()[0].pixels.reshape(-1, 64))


@pytest.mark.parametrize(
    "how", ["threshold", "binarise", "dequantise", "scale", "counts", "standardise"]
)
def test_a_mapped_file_stays_mapped_whatever_is_done_to_it(tmp_path, how):
    np.save(tmp_path / "x.npy", GREY)
    np.savez_compressed(tmp_path / "x.npz", x=GREY)
    files = [
        load(str(tmp_path / name), graph(), prepare=how, hold_out=0.25, seed=3)
        for name in ("x.npy", "x.npz")
    ]
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


def series():
    return Model({"z[t]": Normal(2), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()}).graph


@pytest.mark.parametrize("kind", ["t.csv", "t.npy", "mapped and held out", "padded.npz"])
def test_a_sequence_of_one_number_a_step_is_standardised_as_one_variable(tmp_path, kind):
    x = np.random.default_rng(0).normal(5, 2, (40, 3)) + 10 * np.arange(3)
    np.savetxt(tmp_path / "t.csv", x, delimiter=",", fmt="%.17g", header="a,b,c", comments="")
    np.save(tmp_path / "t.npy", x)
    np.savez(tmp_path / "padded.npz", x=np.c_[x, np.full(40, 1e6)], lengths=[3] * 40)
    name, held = ("t.npy", 0.25) if "held" in kind else (kind, 0.0)
    loaded = load(str(tmp_path / name), series(), prepare="standardise", hold_out=held)
    rows = (
        np.setdiff1d(np.arange(40), np.sort(np.random.default_rng(0).permutation(40)[:10]))
        if held
        else np.arange(40)
    )
    assert np.allclose(loaded.recipe.mean, [x[rows].mean()], rtol=0, atol=1e-9)
    assert np.allclose(loaded.recipe.scale, [x[rows].std()], rtol=0, atol=1e-9)
    values = np.asarray(loaded.train.data["x"])[:, :3]
    assert values.shape == (len(rows), 3, 1)
    assert np.allclose(
        in_units(loaded.recipe, series(), "x", values)[..., 0], x[rows], rtol=0, atol=1e-9
    )
    assert np.ndim(loaded.train.raw["x"]) == 2  # as the file has it


def test_a_run_whose_steps_were_standardised_one_by_one_keeps_its_numbers(tmp_path):
    x = np.random.default_rng(0).normal(5, 2, (40, 3))
    np.save(tmp_path / "t.npy", x)
    (tmp_path / "data.json").write_text(
        json.dumps(
            {
                "data": str(tmp_path / "t.npy"),
                "prepare": "standardise",
                "mean": [1, 2, 3],
                "scale": [2, 2, 4],
            }
        )
    )
    old = Recipe.read(tmp_path)
    values = np.asarray(load(old.data, series(), like=old).train.data["x"])
    assert np.allclose(values[..., 0], (x - [1, 2, 3]) / [2, 2, 4], rtol=0, atol=1e-12)
    assert np.allclose(old.undo(values)[..., 0], x, rtol=0, atol=1e-12)


def several():
    p = {
        "z": Normal(2),
        "x | z": Normal(2),
        "w | z": MultivariateNormal(2),
        "v | z": Laplace(1),
        "k | z": Poisson(1),
        "c | z": OneHot(3),
    }
    return Model(p, {"z | x": Normal()}).graph


def test_every_real_variable_is_standardised_and_taken_back(tmp_path):
    random = np.random.default_rng(0)
    real = {name: random.normal(50, 9, (30, d)) for name, d in (("x", 2), ("w", 2), ("v", 1))}
    np.savez(tmp_path / "t.npz", **real, k=random.poisson(3, (30, 1)), c=random.integers(0, 3, 30))
    loaded = load(str(tmp_path / "t.npz"), several(), prepare="standardise")
    assert np.allclose(loaded.recipe.mean, real["x"].mean(0), rtol=0, atol=1e-9)
    assert list(loaded.recipe.others) == ["w", "v"]
    (tmp_path / "data.json").write_text(loaded.recipe.text())
    again = Recipe.read(tmp_path)
    assert again == loaded.recipe
    for name, value in real.items():
        values = np.asarray(loaded.train.data[name])
        assert np.allclose(values, (value - value.mean(0)) / value.std(0), rtol=0, atol=1e-9)
        assert np.allclose(in_units(again, several(), name, values), value, rtol=0, atol=1e-9)
        other = load(str(tmp_path / "t.npz"), several(), like=again)
        np.testing.assert_array_equal(np.asarray(other.train.data[name]), values)
    counts = np.array([[1.0]])
    assert in_units(again, several(), "k", counts) is counts
    # a run from before
    alone = Recipe(
        str(tmp_path / "t.npz"), prepare="standardise", mean=[1.0, 1.0], scale=[2.0, 2.0]
    )
    assert np.array_equal(
        np.asarray(load(alone.data, several(), like=alone).train.data["w"]), real["w"]
    )


def test_counts_first_leave_the_numbers_of_the_first_out(tmp_path):
    model = Model({"z": Normal(2), "k | z": Poisson(1), "x | z": Normal(1)}, {"z | x": Normal()})
    np.savez(tmp_path / "t.npz", k=np.ones((3, 1)), x=np.array([[1.0], [3.0], [5.0]]))
    loaded = load(str(tmp_path / "t.npz"), model.graph, prepare="standardise")
    assert (loaded.recipe.mean, loaded.recipe.others["x"]["mean"]) == (None, [3.0])
    assert np.asarray(loaded.train.data["k"]).tolist() == [[1], [1], [1]]
    assert in_units(loaded.recipe, model.graph, "k", np.array([2.0])).tolist() == [2]
    alone = Model({"z": Normal(2), "k | z": Poisson(1)}, {"z | k": Normal()}).graph
    np.savez(tmp_path / "t.npz", k=np.ones((3, 1)))
    with pytest.raises(
        ValueError, match="but p gives k a Poisson. Leave out --prepare standardise."
    ):
        load(str(tmp_path / "t.npz"), alone, prepare="standardise")


def test_infinite_cells_of_a_table_are_named(tmp_path):
    (tmp_path / "t.csv").write_text("x0,x1\n1,2\n3,inf\n")
    with pytest.raises(
        ValueError,
        match="x: standardise takes finite numbers, but not all are .first: line 3, column 'x1': "
        "inf.. Replace it; NaN",
    ):
        load(str(tmp_path / "t.csv"), graph(2), prepare="standardise")
