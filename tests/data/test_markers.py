"""Numbers that mark missing values are looked for in arrays and in frames."""

import numpy as np
import pandas as pd
import pytest

from aevb import Model, Normal, fit, zoo
from aevb.runtime.checked_files import DataWarning

ROWS = np.random.default_rng(0).normal(size=100)
ROWS[[3, 30, 31, 60]] = -999
MONTHS = pd.date_range("2016-01-01", periods=100, freq="MS", name="month")
SERIES = pd.Series(ROWS, index=MONTHS, name="s")


@pytest.mark.parametrize(
    "data", [{"x": ROWS.reshape(1, -1, 1)}, {"x": SERIES}, SERIES.to_frame()], ids=range(3)
)
def test_markers_in_series_are_told(data):
    with pytest.warns(DataWarning, match="the value -999 repeats far outside the others"):
        fit(zoo.local_level(seed=0).double(), data, steps=1, progress=False)


def test_markers_in_a_frame_of_rows_are_told():
    model = Model(p={"x": Normal(1, scale="learned")}, q={}, seed=0)
    with pytest.warns(DataWarning, match="the value -999 repeats far outside the others"):
        fit(model, {"x": SERIES.reset_index(drop=True).to_frame()}, steps=1, progress=False)
