"""Columns that are left out: new values and missing cells there are told."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

from aevb import Schema
from aevb.runtime.checked_files import DataWarning

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "x": RNG.normal(size=40),
        "country": "DE",
        "year": 2020,
        "day": pd.Timestamp("2020-01-01"),
        "empty": np.nan,
    }
)
SCHEMA = Schema.read(FRAME)
FITTED = SCHEMA.fit(SCHEMA.mixture(1), FRAME)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("country", "FR", r"'country' was constant \('DE'\), and is 'FR' in row 7, from 0\."),
        ("year", 2021, r"'year' was constant \(2020\), and is 2021 in row 7"),
        ("day", pd.Timestamp("2021-01-01"), r"\(2020-01-01\), and is 2021-01-01 in row 7"),
        ("empty", 3.0, "'empty' was empty, and is a value in row 7"),
    ],
)
def test_new_values_of_constant_columns_are_told(name, value, told):
    new = FRAME.copy()
    new.loc[7, name] = value
    with pytest.warns(DataWarning, match=told):
        FITTED.score(new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FITTED.score(FRAME)
        FITTED.score(FRAME[["x"]])


def test_cells_that_are_not_filled_are_told():
    with pytest.warns(DataWarning, match="stay missing .* 40 of 'empty' .every cell is missing."):
        assert FITTED.impute(FRAME)["empty"].isna().all()
    dropped = Schema.read(FRAME, drop=["empty"])
    dropped.fit(dropped.mixture(1), FRAME).impute(FRAME)
