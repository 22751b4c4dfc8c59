"""Columns of dates are read as whole arrays, with the numbers that Python's objects give."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from aevb import Schema
from aevb.tables.cells import typed
from aevb.tables.frames import read_table
from aevb.tables.reading import time_zone

UNITS = ("s", "ms", "us", "ns")
ZONES = (None, "UTC", "Europe/Berlin", "+02:00")


def times(unit: str) -> np.ndarray:
    """Times from 1684 to 2255, or from year 1 to 9999 unless nanoseconds end before; some missing.

    float64 rounds numbers of microseconds outside 1684 to 2255.
    """
    rng = np.random.default_rng(0)
    ends = ("1678-01-01", "2262-01-01") if unit == "ns" else ("0002-01-01", "9998-12-31")
    low, high = (int(np.datetime64(end, unit).astype(int)) for end in ends)
    near = [np.datetime64(end, unit).astype(int) for end in ("1684-07-29", "2255-06-05")]
    ticks = [*rng.integers(low, high, 300), *rng.integers(*near, 300), -1, 0, 1, -1001, low, high]
    found = np.array(ticks).astype(f"datetime64[{unit}]")
    found[::7] = np.datetime64("NaT")
    return found


def pandas_frame(unit: str, zone: str | None) -> pd.DataFrame:
    column = pd.Series(times(unit))
    return pd.DataFrame(
        {"a": column if zone is None else column.dt.tz_localize("UTC").dt.tz_convert(zone)}
    )


def pandas_arrow_frame(unit: str, zone: str | None) -> pd.DataFrame:
    kind = pd.ArrowDtype(pa.timestamp(unit, zone))
    return pd.DataFrame({"a": pd.array(pa.array(times(unit)).cast(kind.pyarrow_dtype), dtype=kind)})


def polars_frame(unit: str, zone: str | None) -> pl.DataFrame:
    column = pl.Series("a", times(unit))
    if zone is not None:
        name = "Etc/GMT-2" if zone == "+02:00" else zone
        column = column.dt.replace_time_zone("UTC").dt.convert_time_zone(name)
    return column.to_frame()


def pyarrow_frame(unit: str, zone: str | None) -> pa.Table:
    return pa.table({"a": pa.array(times(unit)).cast(pa.timestamp(unit, zone))})


FRAMES = {
    "pandas": pandas_frame,
    "pandas arrow": pandas_arrow_frame,
    "polars": polars_frame,
    "pyarrow": pyarrow_frame,
}


def objects(frame) -> list:
    column = frame["a"]
    return column.to_pylist() if isinstance(frame, pa.Table) else column.to_list()


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(
    ("library", "unit"),  # polars has no seconds
    [(name, unit) for name in FRAMES for unit in UNITS if (name, unit) != ("polars", "s")],
)
def test_times_are_those_of_python_objects_to_the_last_bit(library, unit, zone):
    frame = FRAMES[library](unit, zone)
    found = read_table(frame).cells("a")
    slow = read_table({"a": objects(frame)}).cells("a")
    assert found.type == slow.type == "datetime"
    np.testing.assert_array_equal(found.missing, slow.missing)
    assert found.missing.sum() == 87
    assert found.values.tobytes() == slow.values.tobytes()


@pytest.mark.parametrize("unit", ["D", *UNITS])
def test_times_of_numpy_are_those_of_python_objects(unit):
    column = times("s").astype("datetime64[D]") if unit == "D" else times(unit)
    found = read_table({"a": column}).cells("a")
    slow = read_table({"a": column.astype("datetime64[us]").tolist()}).cells("a")
    assert (found.type, found.dtype) == ("datetime", "Datetime")
    np.testing.assert_array_equal(found.missing, slow.missing)
    assert found.values.tobytes() == slow.values.tobytes()


def test_dates_are_whole_days():
    days = [datetime.date(1, 1, 1), datetime.date(1969, 12, 31), None, datetime.date(9999, 12, 31)]
    frames = {
        "polars": pl.DataFrame({"a": days}),
        "pyarrow": pa.table({"a": pa.array(days)}),
        "64 bits": pa.table({"a": pa.array(days, pa.date64())}),
        "pandas": pd.DataFrame({"a": pd.array(days, dtype=pd.ArrowDtype(pa.date32()))}),
        "objects": {"a": days},
    }
    for library, frame in frames.items():
        cells = read_table(frame).cells("a")
        assert (cells.type, cells.dtype) == ("date", "Date"), library
        np.testing.assert_array_equal(cells.values, [-719162, -1, np.nan, 2932896])


def test_columns_without_a_known_time():
    for kind in (pl.Date, pl.Datetime("us", "UTC")):
        frame = pl.DataFrame({"a": pl.Series([None, None], dtype=kind)})
        for table in (frame, frame.to_arrow(), frame.to_pandas(use_pyarrow_extension_array=True)):
            cells = read_table(table).cells("a")
            assert cells.type == ("date" if kind == pl.Date else "datetime")
            assert cells.missing.all()
            assert np.isnan(cells.values).all()
    cells = read_table({"a": np.array(["NaT", "NaT"], "M8[s]")}).cells("a")
    assert (cells.type, cells.missing.all()) == ("number", True)


def test_known_times():
    halves = np.array(["1969-12-31T12:00", "1970-01-01T06:00", "2000-01-01T18:00"], "M8[us]")
    days = [-0.5, 0.25, 10957.75]
    np.testing.assert_array_equal(read_table({"a": halves}).cells("a").values, days)
    berlin = pd.DataFrame({"a": pd.to_datetime(halves).tz_localize("Europe/Berlin")})
    expected = np.array(days) - 1 / 24
    np.testing.assert_allclose(read_table(berlin).cells("a").values, expected, rtol=0, atol=1e-11)


def test_years_that_python_does_not_know_are_refused():
    far = np.array([10**12, 0], "datetime64[s]")
    for frame in ({"a": far}, pa.table({"a": far}), pd.DataFrame({"a": far})):
        with pytest.raises(ValueError, match=r"'a' has the date 33658-09-27 in row 0, outside"):
            Schema.read(frame)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("unit", UNITS)
def test_written_times_are_those_of_python_objects(unit, zone):
    frame = FRAMES["pyarrow"](unit, zone)
    column = Schema.read(frame)["a"]
    days = np.random.default_rng(1).uniform(-7e5, 2.9e6, 500)
    finest = {"s": 10**6, "ms": 1000}.get(unit, 1)
    start = datetime.datetime(1970, 1, 1, tzinfo=None if zone is None else datetime.UTC)
    expected = [
        start + datetime.timedelta(microseconds=round(day * 864e8 / finest) * finest)
        for day in days.tolist()
    ]
    if zone is not None:
        expected = [time.astimezone(time_zone(zone)) for time in expected]
    found = typed(column, days, column.dtype)
    assert found == expected
    assert [time.tzinfo for time in found] == [time.tzinfo for time in expected]


def test_written_dates_are_those_of_python_objects():
    column = Schema.read(pl.DataFrame({"a": [datetime.date(2020, 1, d) for d in range(1, 30)]}))[
        "a"
    ]
    days = np.array([-719162.0, -0.5, 0.5, 1.5, 2932896.4, 1e9])
    assert typed(column, days, "Date") == [
        datetime.date(1, 1, 1),
        *(datetime.date(1970, 1, 1) + datetime.timedelta(days=n) for n in (0, 0, 2)),
        *[datetime.date(9999, 12, 31)] * 2,
    ]


def test_iso_texts_are_dates_of_a_column_of_dates():
    random = np.random.default_rng(0)
    days = pd.date_range("2021-01-01", periods=60)
    frame = pd.DataFrame({"day": days, "x": random.normal(size=60)})
    fitted = Schema.read(frame).fit_default(frame)
    texts = frame.assign(day=frame["day"].dt.strftime("%Y-%m-%d"))
    pd.testing.assert_frame_equal(fitted.score(texts), fitted.score(frame))
    texts.loc[3, "day"] = None
    filled = fitted.impute(texts)["day"]
    assert datetime.date.fromisoformat(filled[3]) > datetime.date(2020, 12, 1)
    with pytest.raises(ValueError, match="'day' had dates .* and now holds text"):
        fitted.score(frame.assign(day="tomorrow"))


@pytest.mark.parametrize(("step", "unit"), [("D", "1D"), ("h", "1h"), ("s", "1s")])
def test_filled_and_drawn_times_are_as_fine_as_those_of_the_table(step, unit):
    random = np.random.default_rng(0)
    days = pd.Timestamp("2021-03-01") + pd.to_timedelta(random.integers(0, 90, 60), unit=step)
    frame = pd.DataFrame({"at": days.to_series(index=range(60)), "x": random.normal(size=60)})
    frame.loc[:4, "at"] = None
    fitted = Schema.read(frame).fit_default(frame)
    for times in (fitted.sample(20, seed=0)["at"], fitted.impute(frame)["at"]):
        assert (times == pd.to_datetime(times).dt.round(unit)).all()
