"""Columns that spoil clusters and densities are named, and few far cells do not decide a kind."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

from aevb import Schema
from aevb.runtime.checked_files import DataWarning

RNG = np.random.default_rng(0)
N = 300
A, B = RNG.normal(size=(2, N))
FAR = np.where(np.arange(N) == 7, 1e6, RNG.normal(size=N))
DOUBTFUL = {
    "a sum": (A + B, r"'c' follows from 'a', 'b', which only clusters with full covariances"),
    "a permutation": (RNG.permutation(np.arange(1000, 1000 + N)), "evenly from 1000 to 1299, as"),
    "names": (RNG.integers(10**9, 10**10, N), "'c' holds another whole number in every row"),
    "rare levels": ([f"w{i}" for i in RNG.integers(0, 75, N)], r"'c' has \d+ levels in 300 cells"),
    "a far cell": (FAR, r"A cell of 'c' lies far from all others \(1e\+06 in row 7, from 0\)"),
    "heavy tails": (RNG.standard_cauchy(N), r"'c' has heavy tails: [\d.]+% of its cells"),
}
FINE = {
    "normal": RNG.normal(size=N),
    "log-normal": np.exp(RNG.normal(0, 2, N)),
    "counts": RNG.poisson(3, N),
    "amounts": RNG.integers(20_000, 30_000, N),
    "a small group": np.where(np.arange(N) % 20 == 0, 50 + B, RNG.normal(size=N)),
    "nearly a sum": A + B + 0.01 * RNG.normal(size=N),
    "levels": RNG.choice(list("xyz"), N),
    "zeros": np.where(np.arange(N) % 3 == 0, 5 + A, 0.0),
}


@pytest.mark.parametrize("what", DOUBTFUL)
def test_columns_that_spoil_clusters_are_named(what):
    column, message = DOUBTFUL[what]
    frame = pd.DataFrame({"a": A, "b": B, "c": column})
    with pytest.warns(DataWarning, match=message) as told:
        Schema.read(frame)
    assert str(told[0].message).endswith("To leave it out: schema.without('c').")
    assert told[0].message.for_commands.endswith("aevb train … --without c.")


@pytest.mark.parametrize("what", FINE)
def test_usual_columns_are_not_named(what):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Schema.read(pd.DataFrame({"a": A, "b": B, "c": FINE[what]}))


def test_far_cells_do_not_decide_the_kind():
    temperature = 20 + 5 * A
    assert Schema.read({"t": temperature, "b": B})["t"].kind == "real"
    temperature[3] = 4000
    with pytest.warns(DataWarning, match=r"A cell of 't' lies far .*\(4000 in row 3, from 0\)"):
        schema = Schema.read({"t": temperature, "b": B})
    assert schema["t"].kind == "real"
    assert schema["t"].reason.endswith("(1 far cell aside: 4000)")
    assert np.isfinite(schema.encode({"t": [-3.0], "b": [0.0]})["x"]).all()
    # A negative cell among positive ones has no logarithm.
    income = np.exp(A)
    income[3] = -500.0
    with pytest.warns(DataWarning, match="-500 in row 3"):
        assert Schema.read({"t": income, "b": B})["t"].kind == "real"


def test_a_far_date_is_written_as_a_date():
    days = pd.date_range("2020-01-01", periods=N).to_series(index=range(N))
    days[5] = pd.Timestamp("1900-01-01")
    days[6:] = days[6:] + pd.Timedelta(days=3)
    with pytest.warns(DataWarning, match="of 'd' lies far from all others .1900-01-01 in row 5"):
        Schema.read(pd.DataFrame({"d": days, "b": B}))
