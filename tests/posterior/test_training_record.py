"""The model knows the range of its training rows, and warns of rows in other units."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import aevb
from aevb import Model, Normal, em, fit, linear
from aevb.data import standardise
from aevb.runtime.checked_files import DataWarning


def trained(tmp_path=None):
    rows = np.random.default_rng(0).normal([4000.0, 0.01], [800.0, 0.002], (200, 2))
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(1), "x | z": Normal(2, net=linear(), scale="learned")},
        {"z | x": Normal(net=linear(), scale="learned")},
    )
    prepared = standardise(rows)
    fit(model, {"x": prepared}, schedule=em(), out=tmp_path)
    return model, rows, prepared


def uses(model, x):
    return [
        lambda: model.elbo(x=x, seed=0),
        lambda: model.log_evidence(x=x),
        lambda: model.posterior(x=x),
        lambda: model.impute(x=x),
    ]


def test_rows_in_other_units_are_warned_of_and_prepared_ones_are_not():
    model, rows, prepared = trained()
    for use in uses(model, rows):
        with pytest.warns(DataWarning, match="In x, column 0 lies far from the rows"):
            use()
    for use in uses(model, np.asarray(prepared)):
        use()
    swapped = np.asarray(prepared)[:20] + 100.0
    with pytest.warns(DataWarning, match="In x, columns 0, 1 lie far"):
        model.log_evidence(x=swapped)


def test_columns_are_named_as_those_of_the_training_frame():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 2)), columns=["height", "mass"])
    model = Model({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Normal()})
    fit(model, {"x": frame}, steps=2, progress=False)
    with pytest.warns(DataWarning, match="In x, column mass lies far .* median of column mass is"):
        model.posterior(x=frame.assign(mass=30.0))


def test_a_bound_that_is_not_finite_is_warned_of():
    model, _, prepared = trained()
    x = np.array(prepared)
    x[3] = 1e25
    with pytest.warns(DataWarning, match=r"The bound is -inf in 1 of 200 rows .*row 3\)"):
        assert model.elbo(x=x, seed=0).value[3] == -np.inf


def test_missing_cells_and_single_outliers_are_no_other_unit():
    model, _, prepared = trained()
    x = np.array(prepared)
    x[:, 1] = np.nan
    x[0, 0] = 1e4
    model.posterior(x=x)


@pytest.mark.parametrize("kind", ["model", "run", "weights"])
def test_the_ranges_are_saved(tmp_path, kind):
    model, rows, _ = trained(tmp_path / "run")
    if kind == "model":
        model.save(tmp_path / "model")
        again = aevb.load(tmp_path / "model")
    elif kind == "run":
        again = aevb.load_run(tmp_path / "run")
    else:
        again = model.fresh(0)
        again.load_state_dict(model.state_dict())
    low, high = model.teaching.ranges["x"]
    assert torch.equal(again.teaching.ranges["x"][0], low)
    assert torch.equal(again.teaching.ranges["x"][1], high)
    with pytest.warns(DataWarning):
        again.log_evidence(x=rows)


def test_damaged_and_older_records_have_no_ranges():
    model, rows, _ = trained()
    for saved in ({}, {"ranges": 3}, {"ranges": {"x": [[0.0], [1.0]]}}, {"ranges": {"x": "wide"}}):
        model.teaching.restore(model, saved)
        assert model.teaching.ranges == {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.log_evidence(x=rows)
