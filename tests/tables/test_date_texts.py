"""Dates written as text."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from aevb import Schema, load_table
from aevb.tables.date_texts import dates_of, is_date_like, why_no_dates

N = 60
DAYS = pd.date_range("2023-11-01", periods=N, freq="37h")
NUMBERS = np.random.default_rng(0).normal(size=N)

# (texts, their times, 11:00:07 on 1970-01-02 as a text of the column)
FORMS = {
    "ISO": (["2024-03-01", "2023-12-24"], ["2024-03-01", "2023-12-24"], "1970-01-02"),
    "minutes": (["2024-03-01 10:00"], ["2024-03-01 10:00"], "1970-01-02 11:00"),
    "seconds": (["2024-03-01 10:00:30"], ["2024-03-01 10:00:30"], "1970-01-02 11:00:07"),
    "a T": (["2024-03-01T10:00"], ["2024-03-01 10:00"], "1970-01-02T11:00"),
    "some times": (
        ["2024-03-01", "2024-03-01 09:30"],
        ["2024-03-01", "2024-03-01 09:30"],
        "1970-01-02 11:00",
    ),
    "points": (["01.03.2024", "02.03.2024"], ["2024-03-01", "2024-03-02"], "02.01.1970"),
    "no zeros": (["1.3.2024", "12.10.2024"], ["2024-03-01", "2024-10-12"], "2.1.1970"),
    "points and times": (["01.03.2024 9:30"], ["2024-03-01 09:30"], "02.01.1970 11:00"),
    "day first": (["01/03/2024", "13/01/2024"], ["2024-03-01", "2024-01-13"], "02/01/1970"),
    "month first": (["01/03/2024", "01/13/2024"], ["2024-01-03", "2024-01-13"], "01/02/1970"),
    "spaces around": ([" 01.03.2024 "], ["2024-03-01"], "02.01.1970"),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms(case):
    texts, times, written = FORMS[case]
    form = dates_of("a", texts)
    days = (np.array(times, "M8[s]") - np.datetime64("1970-01-01")) / np.timedelta64(1, "D")
    assert [form.day(text) for text in texts] == days.tolist()
    assert form.texts(np.array([1 + 11 / 24 + 7 / 86400])) == [written]
    assert [form.day(text) for text in form.texts(days)] == days.tolist()
    assert form.texts(np.array([-1e9, 1e9])) == form.texts(np.array([-719162.0, 2932896.0]))


@pytest.mark.parametrize(
    "texts",
    [
        ["31.02.2024", "01.03.2024"],
        ["2024-3-1"],
        ["01.03.24"],
        ["01.03/2024"],
        ["13/01/2024", "01/13/2024"],
        ["2024-03-01", "01.03.2024"],
        ["2024-03-01 24:00"],
        ["2024-03-01", "soon"],
        [],
    ],
)
def test_other_texts_are_no_dates(texts):
    assert dates_of("a", texts) is None


def test_reasons_why_texts_are_no_dates():
    days = [f"{1 + i % 9:02}.03.2024" for i in range(N - 1)]
    assert Schema.read({"a": [*days, "31.02.2024"]})["a"].reason == (
        "text with 10 levels; dates, but there is no day '31.02.2024'; correct it, or make it "
        "missing"
    )
    assert why_no_dates(["13/01/2024", "01/13/2024"]) == (
        "dates in two orders ('01/13/2024' and '13/01/2024'); write all in one"
    )
    assert why_no_dates(["99.99.2024"]) == why_no_dates(["a", "01.03.2024"]) == ""
    assert why_no_dates([]) == why_no_dates(["01/01/2024"]) == ""
    assert is_date_like("31.02.2024")
    assert not is_date_like("31.02")


def test_ambiguous_dates_are_refused_with_the_fix():
    cells = [f"0{1 + i % 9}/0{1 + i % 7}/2024" for i in range(N)]
    with pytest.raises(ValueError, match=r"'a' .* day or the month.* ISO .*--kind a=category"):
        Schema.read({"a": cells})
    assert Schema.read({"a": cells}, kinds={"a": "category"})["a"].levels == tuple(
        sorted(set(cells))
    )


FRAMES = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "pyarrow": pa.table,
    "dict": lambda columns: columns,
}


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%d", "%Y-%m-%dT%H:%M"])
@pytest.mark.parametrize("library", FRAMES)
def test_dates_are_read_and_go_back_as_texts(library, form, tmp_path):
    texts = [*DAYS.strftime(form)[:-2], None, None]
    table = FRAMES[library]({"a": NUMBERS, "b": texts})
    schema = Schema.read(table)
    column, dates = schema["b"], schema["b"].facts.dates
    assert (column.kind, column.dtype, column.missing) == ("date", "String", 2)
    assert column.reason.startswith(f"dates such as {texts[0]!r} ({dates.order}")
    times = pd.to_datetime(pd.Series(texts), format=form)
    np.testing.assert_allclose(
        schema.cells(table)["b"], (times - pd.Timestamp(0)) / pd.Timedelta("1D"), rtol=1e-14
    )
    np.testing.assert_allclose(
        schema.encode(table)["x"], schema.encode({"a": NUMBERS, "b": times.array})["x"]
    )
    assert Schema.from_json(schema.to_json()) == schema
    fitted = schema.fit(schema.mixture(1), table, starts=1)
    filled = fitted.impute(table)
    found = filled["b"].to_pylist() if library == "pyarrow" else list(filled["b"])
    assert found[:-2] == texts[:-2]
    assert dates.texts(np.array([dates.day(text) for text in found])) == found
    assert Schema.read(filled)["b"].facts.dates == dates
    drawn = fitted.sample(20, seed=0)["b"]
    drawn = drawn.to_pylist() if library == "pyarrow" else list(drawn)
    assert None not in map(dates.day, drawn)
    fitted.save(tmp_path / "model")
    assert load_table(tmp_path / "model").schema == schema


def test_real_dates_in_new_tables_stay_dates():
    table = pd.DataFrame({"a": NUMBERS, "b": DAYS.strftime("%d.%m.%Y")})
    fitted = (schema := Schema.read(table)).fit(schema.mixture(1), table, starts=1)
    new = pd.DataFrame({"a": NUMBERS, "b": DAYS})
    new.loc[3, "b"] = pd.NaT
    assert fitted.impute(new)["b"].dtype == new["b"].dtype
    with pytest.raises(ValueError, match=r"\(day\.month\.year\) .* '2024-03-01' in row 1.* same f"):
        schema.encode({"a": [1.0, 2.0], "b": ["01.03.2024", "2024-03-01"]})
    with pytest.raises(ValueError, match=r"holds '01.03.2024 10:00' in row 0"):
        schema.encode({"a": [1.0], "b": ["01.03.2024 10:00"]})


def test_schemas_without_dates_in_their_files_are_read():
    schema = Schema.read({"a": NUMBERS, "b": ["x", "y"] * 30})
    record = json.loads(schema.to_json())
    for column in record["columns"]:
        del column["facts"]["dates"]
    assert Schema.from_json(json.dumps(record)) == schema


def test_few_or_equal_dates_stay_text():
    few = [None] * 58 + ["2024-03-01", "2024-03-02"]
    schema = Schema.read({"a": NUMBERS, "b": few, "c": ["2024-03-01"] * N})
    assert schema["b"].levels == ("2024-03-01", "2024-03-02")
    assert schema["c"].reason == "constant: every known cell is '2024-03-01'"
    dates = Schema.read({"a": NUMBERS, "b": DAYS.strftime("%d.%m.%Y").tolist()})
    assert dates.with_kind("b", "date")["b"].reason.endswith("(day.month.year); as asked")
