"""Preparation: grey levels, standardised tables, and rows that are drawn anew."""

import re
import tomllib
from functools import partial

import numpy as np
import pytest
import torch
from small_models import NAN, put

from aevb import Bernoulli, Beta, ContinuousBernoulli, Model, Normal, Poisson, fit
from aevb.data import Prepared, as_sequence, binarise, dequantise, scale, standardise, threshold
from aevb.data import sources as source_files
from aevb.data.datasets import Recipe
from aevb.data.grey_levels import PREPARATIONS
from aevb.data.mapped_rows import Rows
from aevb.data.preparation import CHOICES, default_preparation, prepare_levels
from aevb.data.sources import Mapped, Resident, open_source
from aevb.training.checkpoint import CheckpointError
from aevb.training.evaluation import evaluate

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
        with pytest.raises(
            ValueError, match="takes grey levels 0 … .* Give the number of levels: levels="
        ):
            wrong()
    with pytest.raises(ValueError, match="12 columns cannot be split into a square of rows"):
        as_sequence(np.zeros((2, 12)))


@pytest.mark.parametrize("how", PREPARATIONS)
@pytest.mark.parametrize("kind", [np.uint8, np.float64], ids=["bytes", "numbers"])
def test_rows_of_a_file_are_prepared_as_they_are_taken_and_as_an_array_is(tmp_path, how, kind):
    grey = GREY[:, :5].astype(kind)  # an odd width: a row's draws begin in the middle of a word
    if kind is np.float64:
        grey[7, 2] = NAN
    np.save(tmp_path / "x.npy", grey)
    mapped, whole = np.load(tmp_path / "x.npy", mmap_mode="r"), PREPARATIONS[how](grey, 17, seed=3)
    record = PREPARATIONS[how](mapped, 17, seed=3)
    assert isinstance(record, Prepared)
    assert (record.shape, record.ndim, len(record)) == ((300, 5), 2, 300)
    same = partial(np.testing.assert_array_equal, strict=True)
    same(np.asarray(record), whole)
    for rows in (
        slice(3, 90),
        slice(200, None, 7),
        slice(0),
        np.array([5, 299, 5, 0]),
        np.arange(300) % 3 == 1,
        -1,
        np.arange(0),
    ):
        same(record[rows], whole[rows])
    index = np.array([250, 4, 7, 60])
    same(
        np.asarray(PREPARATIONS[how](Rows(mapped, index), 17, seed=3)),
        PREPARATIONS[how](grey[index], 17, seed=3),
    )
    model = Model({"z": Normal(2), "x | z": Normal(5, scale=1.0)}, {"z | x": Normal()})
    sources = [
        open_source(model.graph, {"x": value}, model._parameter()) for value in (record, whole)
    ]
    assert [type(source) for source in sources] == [Mapped, Resident]
    taken = [source.take(torch.tensor([7, 0, 8])) for source in sources]
    assert taken[0].keys() == taken[1].keys()
    assert all(torch.equal(value, taken[1][name]) for name, value in taken[0].items())


@pytest.mark.parametrize("how", [how for how in CHOICES if how != "standardise"])
def test_grey_levels_of_a_file_that_cannot_be_are_found_in_any_part(tmp_path, monkeypatch, how):
    monkeypatch.setattr(source_files, "CHUNK", 1000)
    grey = GREY.copy()
    grey[250, 3] = 17
    np.save(tmp_path / "x.npy", grey)
    prepared = prepare_levels(how, np.load(tmp_path / "x.npy", mmap_mode="r"), 17)
    model = Model({"z": Normal(2), "x | z": Normal(6, scale=1.0)}, {"z | x": Normal()})
    message = (
        rf"{how.partition('-')[0]} takes grey levels 0 … 16, but these go from 0 to 17 \(first, "
        rf"from 0: row 250\)\. Give the number"
    )
    with pytest.raises(ValueError, match=message):
        open_source(model.graph, {"x": prepared}, model._parameter())


@pytest.mark.parametrize("how", PREPARATIONS)
def test_prepared_values_are_taken_back_to_grey_levels(how):
    """Black and white come back, to half a level where noise was added; a spread is the slope of
    that map.
    """
    recipe = Recipe("x.npy", prepare=how, levels=17)
    for level in (0, 16):
        found = recipe.undo(PREPARATIONS[how](np.full((20, 3), level), 17))
        assert np.abs(found - level).max() <= 0.5 + 1e-5
    x = PREPARATIONS[how](GREY, 17).astype(float)
    slope = recipe.undo(x + 1) - recipe.undo(x)
    np.testing.assert_allclose(slope, 1.0 if how == "counts" else slope[0, 0], rtol=1e-6)
    spread = recipe.spread()
    assert spread is None or spread == pytest.approx(slope[0, 0])
    # these have probabilities, not densities
    assert (spread is None) == (how in ("counts", "threshold", "binarise"))


def test_sequences_of_different_lengths_are_prepared_step_by_step():
    rows = [GREY[:3], GREY[3:4], GREY[4:6]]
    for how in PREPARATIONS:
        found = PREPARATIONS[how](rows, 17, seed=1)
        assert [row.shape for row in found] == [(3, 6), (1, 6), (2, 6)]
        np.testing.assert_array_equal(
            np.concatenate(found), PREPARATIONS[how](GREY[:6], 17, seed=1)
        )
    with pytest.raises(
        ValueError,
        match="binarise-fresh takes an array; pad the sequences to one length and pass lengths=",
    ):
        prepare_levels("binarise-fresh", rows, 17)


def test_standardising_uses_known_entries_and_the_training_rows_numbers(tmp_path):
    x = put(np.random.default_rng(5).standard_normal((50, 3)) * [1, 10, 0] + [5, -3, 7], NAN, 4, 1)
    record = standardise(x)
    assert np.allclose(record.mean, np.nanmean(x, 0), rtol=0, atol=1e-12)
    assert np.allclose(record.scale, [*np.nanstd(x, 0)[:2], 1.0], rtol=0, atol=1e-12)
    assert np.array_equal(np.isnan(record.values), np.isnan(x))
    assert np.allclose(record.undo(record.values), x, rtol=0, atol=1e-12, equal_nan=True)
    test = standardise(x[:5] + 1, like=record)
    assert np.allclose(
        test.values, (x[:5] + 1 - record.mean) / record.scale, rtol=0, atol=1e-12, equal_nan=True
    )
    with pytest.raises(
        ValueError, match="The rows have 2 columns, but like= was standardised with 3"
    ):
        standardise(x[:, :2], like=record)
    np.save(tmp_path / "x.npy", x)
    mapped = standardise(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert np.allclose(mapped.mean, record.mean, rtol=0, atol=1e-12)
    model = Model({"z": Normal(2), "x | z": Normal(3, scale=1.0)}, {"z | x": Normal()}).double()
    rows = torch.tensor([4, 20, 3])
    sources = [
        open_source(model.graph, {"x": value}, model._parameter())
        for value in (record, record.values, mapped)
    ]
    assert isinstance(sources[2], Mapped)
    batches = [source.take(rows) for source in sources]
    assert all(
        torch.equal(batches[0][name], other[name]) for other in batches[1:] for name in ("x", "x?")
    )
    ragged = standardise([np.array([[1.0], [2.0]]), np.array([[6.0]])])
    assert ragged.mean.tolist() == [3.0]
    assert [row.tolist() for row in ragged.values] == [
        [[-2 / ragged.scale[0]], [-1 / ragged.scale[0]]],
        [[3 / ragged.scale[0]]],
    ]
    assert standardise([1.0, 3.0]).values.tolist() == [-1.0, 1.0]
    assert standardise(np.full((3, 2), NAN)).scale.tolist() == [1.0, 1.0]


def test_a_number_a_step_is_standardised_and_taken_back_on_any_axes():
    x = np.random.default_rng(0).normal(5, 2, (20, 3))
    columns, together = standardise(x), standardise(x[..., None])
    assert (columns.mean.shape, together.mean.shape) == ((3,), (1,))
    for record in (columns, together):  # a model's samples have the number on an axis of its own
        values = np.asarray(record).reshape(20, 3)
        assert np.allclose(record.undo(values), x, rtol=0, atol=1e-12)
        assert np.allclose(record.undo(values[..., None]), x[..., None], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(standardise(x[..., None], like=record).values[..., 0], values)
    with pytest.raises(
        ValueError, match=r"The values have shape \[20, 4, 1\], but 3 columns were standardised"
    ):
        columns.undo(np.zeros((20, 4, 1)))


INFINITE = {
    "array": (np.array([[1.0, np.inf], [2, 3]]), "row 0, column 1 (from 0) holds inf"),
    "sequences": (
        put(np.zeros((3, 4, 2)), -np.inf, 2, 1, 0),
        "row 2, step 1, column 0 (from 0) holds -inf",
    ),
    "lists": (
        [np.zeros((1, 2)), put(np.zeros((3, 2)), np.inf, 2, 1)],
        "row 1, step 2, column 1 (from 0) holds inf",
    ),
    "numbers": ([0.0, 1.0, np.inf], "row 2, column 0 (from 0) holds inf"),
}


@pytest.mark.parametrize(("x", "place"), INFINITE.values(), ids=INFINITE)
def test_infinite_entries_are_not_standardised(x, place):
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"standardise takes finite numbers, but {place}. Replace it; NaN marks a missing entry."
        ),
    ):
        standardise(x)


def test_masked_entries_are_missing_ones_in_every_preparation():
    grey = np.ma.masked_greater(GREY[:5].astype(int), 12)
    holes = np.where(GREY[:5] > 12, NAN, GREY[:5])
    assert np.isnan(holes).any()
    np.testing.assert_array_equal(standardise(grey).mean, standardise(holes).mean)
    np.testing.assert_array_equal(standardise(grey).values, standardise(holes).values)
    for how in PREPARATIONS:
        np.testing.assert_array_equal(PREPARATIONS[how](grey, 17), PREPARATIONS[how](holes, 17))
        found = PREPARATIONS[how]([grey[:2], grey[2:]], 17)
        np.testing.assert_array_equal(np.concatenate(found), PREPARATIONS[how](holes, 17))


def fresh_model(family=Bernoulli):
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z": family(6)}, {"z | x": Normal()})


def test_fresh_rows_are_drawn_by_the_generator_and_fixed_without_one(tmp_path):
    np.save(tmp_path / "x.npy", GREY)
    like = torch.zeros(())
    for make, value in (
        (binarise, GREY),
        (dequantise, GREY),
        (binarise, np.load(tmp_path / "x.npy", mmap_mode="r")),
    ):
        source = open_source(
            fresh_model(ContinuousBernoulli).graph, {"x": make(value, 17, fresh=True)}, like
        )
        if isinstance(source, Resident):
            assert source.batch["x"].dtype == torch.uint8
        rows = torch.arange(300)
        draws = [
            source.take(rows, generator=torch.Generator().manual_seed(seed))["x"]
            for seed in (0, 0, 1)
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        shares = [
            source.take(rows, generator=torch.Generator().manual_seed(0), share=share)["x"]
            for share in (slice(0, 100), slice(100, 300))
        ]
        assert torch.equal(torch.cat(shares, 1), draws[0])
        fixed = source.take(rows)["x"]
        assert torch.equal(source.take(torch.tensor([270, 3, 40]))["x"], fixed[:, [270, 3, 40]])
        if make is dequantise:
            assert torch.equal((draws[0] * 17).floor(), torch.tensor(GREY).float()[None])
        else:
            mean = torch.stack(
                [
                    source.take(rows, generator=torch.Generator().manual_seed(seed))["x"]
                    for seed in range(100)
                ]
            ).mean(0)[0]
            probability = torch.tensor(GREY / 16)
            assert (
                (mean - probability).abs() <= 5.5 * (probability * (1 - probability) / 100).sqrt()
            ).all()  # 1,800 cells, each fails by 4e-8


def test_fresh_rows_keep_what_is_missing_and_padded():
    x = put(GREY, NAN, 3, 2)
    source = open_source(
        fresh_model(ContinuousBernoulli).graph,
        {"x": dequantise(x, 17, fresh=True)},
        torch.zeros(()),
    )
    taken = source.take(torch.tensor([3, 4]), generator=torch.Generator().manual_seed(0))
    assert taken["x"][0, 0, 2] == 0
    assert taken["x?"][0].tolist() == [[True, True, False, True, True, True], [True] * 6]
    model = Model(
        {"z[t]": Normal(2), "x[t] | z[t]": ContinuousBernoulli(3)}, {"z[t] | x[t]": Normal()}
    )
    source = open_source(
        model.graph,
        {"x": dequantise(GREY.reshape(300, 2, 3), 17, fresh=True), "lengths": [1] * 300},
        torch.zeros(()),
    )
    taken = source.take(torch.arange(5), generator=torch.Generator().manual_seed(0))
    assert (taken["x"][1] == 0).all()
    assert (taken["x"][0] > 0).all()


def test_a_run_on_fresh_rows_is_recorded_resumed_bit_equal_and_validated_on_fixed_draws(tmp_path):
    data = {"x": binarise(GREY, 17, fresh=True)}
    models = [fresh_model(), fresh_model(), fresh_model()]
    runs = [fit(models[0], data, validation=data, steps=12, batch=50, out=tmp_path / "whole")]
    fit(
        models[1],
        data,
        validation=data,
        steps=6,
        batch=50,
        out=tmp_path / "parts",
        decay="constant",
    )
    fit(
        models[2],
        data,
        validation=data,
        steps=12,
        batch=50,
        out=tmp_path / "straight",
        decay="constant",
    )
    fit(
        models[1],
        data,
        validation=data,
        steps=12,
        batch=50,
        out=tmp_path / "parts",
        decay="constant",
        resume=True,
    )
    for one, other in zip(models[1].parameters(), models[2].parameters(), strict=True):
        assert torch.equal(one, other)
    config = tomllib.loads((tmp_path / "whole" / "config.toml").read_text())
    assert config["fresh"] == {"x": "binarise 17"}
    with pytest.raises(CheckpointError, match="was trained with fresh="):
        fit(
            models[1],
            {"x": threshold(GREY, 17)},
            steps=14,
            batch=50,
            out=tmp_path / "parts",
            decay="constant",
            resume=True,
        )
    source = open_source(models[0].graph, data, models[0]._parameter())
    assert evaluate(models[0], source)["elbo"] == pytest.approx(
        runs[0].rows[-1]["validation elbo"], abs=1e-4
    )


def test_images_are_dequantised_under_a_density():
    for family, how in (
        (Normal, "dequantise"),
        (ContinuousBernoulli, "dequantise"),
        (Beta, "dequantise"),
        (Bernoulli, "threshold"),
        (Poisson, "counts"),
    ):
        assert default_preparation(fresh_model(family).graph, "x") == how
