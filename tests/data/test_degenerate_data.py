"""Data on which a density has no bound are refused before training, and only those."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import NAN, put

from aevb import (
    Bernoulli,
    Beta,
    ContinuousBernoulli,
    Laplace,
    Mixture,
    Model,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
    diagnose,
    fit,
    linear,
    mlp,
    zoo,
)
from aevb.data import dequantise, standardise
from aevb.data.repeated_values import note_repeats
from aevb.data.sources import open_source
from aevb.data.unscaled import moments_of, note_unscaled
from aevb.runtime.checked_files import DataWarning
from aevb.training.checkpoint import TrainingError
from aevb.training.events import SMALL_SCALE, UNSCALED, events
from aevb.training.starting_notes import rows_for_scales

ONE_FOR_ALL = {Normal: {"scale": "learned"}, MultivariateNormal: {"covariance": "shared"}}
FLAT = put(put(np.random.default_rng(6).random((40, 4)), 0.25, slice(None), 1), 0.0, slice(None), 3)
UNBOUNDED = {
    "Normal": (
        Normal(4),
        FLAT,
        "x has 2 of 4 columns that are constant (columns 1, 3, from 0), but p gives x a Normal "
        "whose scale is learned",
    ),
    "one scale": (Normal(4, scale="learned"), FLAT, "fix the scale (Normal(…, scale=0.1))"),
    "Laplace": (Laplace(4), FLAT, "p gives x a Laplace"),
    "StudentT": (StudentT(4), FLAT, "p gives x a StudentT"),
    "MultivariateNormal": (
        MultivariateNormal(4),
        FLAT,
        "p gives x a MultivariateNormal whose covariance is learned",
    ),
    "Mixture": (Mixture(4), FLAT, "p gives x a Mixture"),
    "ContinuousBernoulli": (
        ContinuousBernoulli(4),
        FLAT,
        "x has 1 of 4 columns that are exactly 0 (or exactly 1) in every row (column 3, from 0)",
    ),
    "ones": (ContinuousBernoulli(4), put(FLAT, 1.0, slice(None), 0), "(columns 0, 3, from 0)"),
    "Beta": (
        Beta(4),
        np.clip(FLAT, 0.1, 0.9),
        "x has 2 of 4 columns that are constant (columns 1, 3, from 0), but p gives x a Beta",
    ),
    "one row": (
        Normal(4),
        FLAT[:1],
        "x has a single row, so every column is constant, but p gives x a Normal whose scale is "
        "learned",
    ),
    "one value": (
        Normal(4),
        put(put(FLAT[:, [0, 2, 0, 2]], NAN, slice(1, 40), 0), 1.0, 5, 1),
        "columns that are constant (column 0, from 0)",
    ),
}


@pytest.mark.parametrize("mapped", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize(("family", "x", "message"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_data_on_which_a_density_is_unbounded_are_refused_before_training(
    tmp_path, family, x, message, mapped
):
    model = Model({"z": Normal(2), "x | z": family}, {"z | x": Normal()})
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(model, {"x": tmp_path / "x.npy" if mapped else x}, steps=1)
    assert torch.isfinite(model.elbo(x=x).value).all()  # only training would diverge


def test_a_constant_series_is_called_constant():
    """It is one row, but more rows are not what it lacks."""
    with pytest.raises(
        ValueError,
        match=r"^x has a single series, and it is constant, but p gives x a Normal whose scale is "
        r"learned.* Train on a series that varies, dequantise",
    ):
        fit(zoo.local_level(), {"x": np.full((1, 20, 1), 3.0)}, steps=1)


@pytest.mark.parametrize(
    ("family", "x"),
    [
        (Normal(4, scale=0.1), FLAT),
        (ContinuousBernoulli(4, clamped=True), FLAT),
        (ContinuousBernoulli(4), FLAT.clip(0.1)),
        (Bernoulli(4), np.zeros((9, 4))),
        (Poisson(4), np.zeros((9, 4))),
        (NegativeBinomial(4), np.zeros((9, 4))),
        (Normal(4), dequantise(np.zeros((9, 4), np.uint8))),
    ],
)
def test_other_data_and_other_densities_are_trained(family, x):
    model = Model({"z": Normal(2), "x | z": family}, {"z | x": Normal()})
    assert fit(model, {"x": x}, steps=2).step == 2


@pytest.mark.parametrize(
    "family", [Normal(4, scale="learned"), MultivariateNormal(4, covariance="shared")]
)
def test_a_root_with_a_scale_to_learn_refuses_constant_columns(family):
    model = Model({"z": Normal(2), "x": family, "y | z": Normal(4)}, {"z | x": Normal()})
    with pytest.raises(
        ValueError, match=r"columns that are constant \(columns 1, 3, from 0\), but p gives x a"
    ):
        fit(model, {"x": FLAT, "y": FLAT[:, [0, 2, 0, 2]]}, steps=1)


@pytest.mark.parametrize("family", [Normal, MultivariateNormal])
def test_repeated_values_are_noted_where_a_scale_depends_on_parents(family):
    """A linear function of a Gaussian with one covariance for all rows has one peak; with a
    covariance of every row it can narrow onto each value.
    """
    x = torch.tensor(np.random.default_rng(0).integers(0, 3, (200, 2)), dtype=torch.float32)
    for spec, noted in ((family(2), 1), (replace(family(2), **ONE_FOR_ALL[family]), 0)):
        model = Model({"z": Normal(2), "x | z": spec}, {"z | x": Normal()})
        assert len(note_repeats(model.graph, model.prepare(x=x))) == noted


def test_what_is_missing_everywhere_is_refused():
    x = np.random.default_rng(0).normal(size=(30, 3))
    with pytest.raises(ValueError, match=r"x is missing \(NaN\) in every row: p cannot learn it"):
        fit(zoo.fa(), {"x": np.full((30, 3), np.nan)}, steps=2)
    x[:, 1] = np.nan
    with pytest.raises(
        ValueError,
        match=r"x is missing \(NaN\) in every row of column 1, from 0: p cannot learn it",
    ):
        fit(zoo.fa(), {"x": x}, steps=2)


def test_a_fixed_scale_far_below_the_spread_of_the_data_is_noted():
    x = 5.0 * np.random.default_rng(0).normal(size=(50, 3))
    x[0, 0] = np.nan

    def notes(scale, data, p="z"):
        latent = {"z": Normal(1)} if p == "z" else {}
        model = Model(
            latent | {f"x | {p}": Normal(3, scale=scale)},
            {"z | x": Normal()} if latent else {},
            given=None if latent else {"u": 1},
            seed=0,
        )
        more = {} if latent else {"u": np.zeros((50, 1))}
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            run = fit(model, {"x": data} | more, steps=1, progress=False)
        return [str(one) for one in events(run.rows, SMALL_SCALE)]

    (note,) = notes(0.1, x)
    assert "times the fixed scale of p's Normal" in note
    assert note.endswith("Divide x by 20, or declare a larger scale: Normal(…, scale=2).")
    (note,) = notes(0.01, x / 10)  # divided, x has a standard deviation of 3 scales
    assert note.endswith("Divide x by 20, or declare a larger scale: Normal(…, scale=0.2).")
    assert notes(1.0, x) == notes("learned", x) == notes(0.1, x / 10) == notes(0.1, x, "u") == []


STANDARD = np.random.default_rng(0).normal(size=(50, 3))


@pytest.mark.parametrize(
    ("x", "net", "scale", "noted"),
    [
        (STANDARD, mlp(4), "network", False),
        (3 * STANDARD + 3, mlp(4), "network", False),
        (10 * STANDARD, mlp(4), "network", True),
        (10 * STANDARD, mlp(4), "learned", True),
        (10 * STANDARD, mlp(4), 10.0, False),  # a scale that suits the data
        (10 * STANDARD, linear(), "network", False),  # trains with large steps
        (STANDARD + np.array([0, 0, 20]), mlp(4), "network", True),
        (0.01 * STANDARD, mlp(4), "network", True),
        (STANDARD * np.array([1, 1e-4, 1e-6]), mlp(4), "network", True),
        (standardise(10 * STANDARD), mlp(4), "network", False),
    ],
)
def test_data_that_networks_hardly_reach_are_warned_of(x, net, scale, noted):
    """The warning, the notes of the run and the diagnosis with and without the run agree."""
    model = Model(
        {"z": Normal(1), "x | z": Normal(3, net=net, scale=scale)}, {"z | x": Normal()}, seed=0
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = fit(model, {"x": x}, steps=1)
    assert [str(one.message) for one in warned] == list(run.notes)
    assert [one.kind for one in events(run.rows)] == [UNSCALED] * noted
    assert [one.filename for one in warned] == [__file__] * noted
    assert ("\n  note    x is not standardised: its columns" in repr(run)) == noted
    for found in (
        diagnose(model, {"x": x}, run=run, calibrate=False),
        diagnose(model, {"x": x}, calibrate=False),
    ):
        assert len(found.of(UNSCALED, about="x")) == noted


def test_a_warning_names_the_columns_and_the_fix():
    model = Model({"z": Normal(1), "x | z": Normal(3, net=mlp(4))}, {"z | x": Normal()}, seed=0)
    message = (
        r"x is not standardised: its columns have means from .* to 20 and standard deviations from "
        r"0\.\d+ to 1\.\d+ \(farthest: column 2, from 0\)\. .* x = aevb.data.standardise\(x\)"
    )
    with pytest.warns(DataWarning, match=message):
        fit(model, {"x": STANDARD + np.array([0, 0, 20 - STANDARD[:, 2].mean()])}, steps=1)


@pytest.mark.parametrize(
    ("scales", "far"), [([1, 1e-4, 1e-6], 2), ([1e-4, 1e-2, 1e-3], 0), ([1, 30, 1e-6], 2)]
)
def test_the_farthest_column_is_the_one_that_costs_most(scales, far):
    model = Model({"z": Normal(1), "x | z": Normal(3, net=mlp(4))}, {"z | x": Normal()}, seed=0)
    with pytest.warns(DataWarning, match=rf"\(farthest: column {far}, from 0\)"):
        fit(model, {"x": STANDARD * np.array(scales)}, steps=1)


@pytest.mark.parametrize("differ", [0, 1, 5])
def test_a_column_of_mostly_equal_values_is_not_noted(differ):
    """Its standard deviation says how many rows differ."""
    model = Model({"z": Normal(1), "x | z": Normal(2, net=mlp(4))}, {"z | x": Normal()}, seed=0)
    x = torch.tensor(STANDARD[:, :2].copy())
    x[:, 1] = 0.1
    x[:differ, 1] = 0.2
    x[9, 1] = np.nan
    rows = {"x": x.nan_to_num().unsqueeze(0), "x?": ~x.isnan().unsqueeze(0)}
    assert not list(note_unscaled(model.graph, moments_of(model.graph, rows)))


def test_a_trained_model_does_not_start_near_the_standard_scale():
    model = Model({"z": Normal(1), "x | z": Normal(3, net=mlp(4))}, {"z | x": Normal()}, seed=0)
    with pytest.warns(DataWarning, match="not standardised"):
        fit(model, {"x": 10 * STANDARD}, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fit(model, {"x": 10 * STANDARD}, steps=1).notes


def test_nearly_constant_pixels_of_an_image_are_not_noted():
    pixels = np.random.default_rng(0).random((50, 1, 3, 3))
    pixels[:, :, 0] *= 1e-3
    model = Model({"z": Normal(1), "x | z": Normal((1, 3, 3), net=mlp(4))}, {"z | x": Normal()})
    assert not fit(model, {"x": pixels}, steps=1).notes


def test_the_scale_of_wide_data_is_read_from_few_rows_spread_evenly(monkeypatch):
    monkeypatch.setattr("aevb.training.starting_notes.MOST_ENTRIES", 17)
    graph = Model({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Normal()}).graph
    x = np.arange(50.0)[:, None] * [1, 1]
    rows = rows_for_scales(open_source(graph, {"x": x}, torch.zeros(())))
    assert rows["x"][0, :, 0].tolist() == [0, 7, 14, 21, 28, 35, 42, 49]


def test_a_failed_step_names_the_scale_of_the_data_as_its_cause():
    model = Model({"z": Normal(1), "x | z": Normal(3, net=mlp(4))}, {"z | x": Normal()}, seed=0)
    with (
        pytest.warns(DataWarning, match="^x is not standardised"),
        pytest.raises(TrainingError, match="scale of the data is the probable cause: x is not st"),
    ):
        fit(model, {"x": 1e30 * STANDARD}, steps=2)


def test_a_display_shows_the_notes_and_does_not_warn(capsys):
    model = Model({"z": Normal(1), "x | z": Normal(3, net=mlp(4))}, {"z | x": Normal()}, seed=0)
    run = fit(model, {"x": 10 * STANDARD}, steps=1, progress=True)
    assert run.notes[0] in capsys.readouterr().out
    with pytest.warns(DataWarning) as warned:  # of seeds= the first run alone
        fit(model, {"x": 10 * STANDARD}, steps=1, seeds=2)
    assert len(warned) == 1
