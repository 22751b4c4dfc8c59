"""What happens to tables that people really have: each is read, or refused with the fix."""

from __future__ import annotations

import datetime
import decimal
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from small_tables import mixed

from aevb import Schema
from aevb.runtime.checked_files import DataWarning

N = 40


def numbers(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=N)


def beside(cells) -> pd.DataFrame:
    """A frame with one good column, and these cells as column b."""
    return pd.DataFrame({"a": numbers(), "b": cells})


# Tables that are refused: (table, the kind of error, what its message must say).
REFUSED = {
    "nothing": (None, TypeError, "got NoneType"),
    "a path": ("table.csv", TypeError, "got str"),
    "a generator": ((i for i in range(3)), TypeError, "got generator"),
    "a pandas series": (pd.Series([1, 2]), TypeError, "to_frame"),
    "a polars series": (pl.Series([1, 2]), TypeError, "to_frame"),
    "empty": (pd.DataFrame(), ValueError, "no columns"),
    "an array of bytes": (
        {"b": np.array([b"x", b"y"] * 20)},
        ValueError,
        "decode it to text, for example [cell.decode() for cell in table['b']]",
    ),
    "bytes of pyarrow": (pa.table({"b": [b"x", b"y"] * 20}), ValueError, "decode it to text"),
    "an empty dictionary": ({}, ValueError, "no columns"),
    "header only": (pd.DataFrame({"a": [], "b": []}), ValueError, "no rows"),
    "one row": (pd.DataFrame({"a": [1.0]}), ValueError, "one row"),
    "duplicate names": (
        pd.DataFrame([[1.0, 2.0]] * 4, columns=["a", "a"]),
        ValueError,
        "more than once: 'a'",
    ),
    "1 and '1' as names": (
        pd.DataFrame([[1.0, 2.0]] * 4, columns=[1, "1"]),
        ValueError,
        "more than once: '1'",
    ),
    "levels of names": (
        pd.DataFrame([[1.0, 2.0]] * 4, columns=pd.MultiIndex.from_product([["a"], ["b", "c"]])),
        ValueError,
        "named ('a', 'b')",
    ),
    "mixed types": (
        beside([1, "a"] * 20),
        ValueError,
        "(1 in row 0), text ('a' in row 1); rows count from 0.",
    ),
    "numbers and truth values": (
        beside(pd.Series([1, True] * 20, dtype=object)),
        ValueError,
        "mixes types",
    ),
    "numbers as text": (beside([f"{i * 1.5}" for i in range(N)]), ValueError, "to_numeric"),
    "durations": (
        beside(pd.to_timedelta(np.arange(N), unit="h")),
        ValueError,
        "total_seconds",
    ),
    "times of day": (
        pl.DataFrame({"b": [datetime.time(1, i) for i in range(N)]}),
        ValueError,
        "number of hours",
    ),
    "lists": (beside([[1, 2]] * N), ValueError, "'b' holds cells of type list"),
    "dictionaries": (beside([{"a": 1}] * N), ValueError, "type dict"),
    "polars lists": (pl.DataFrame({"b": [[1, 2]] * N}), ValueError, "type List"),
    "polars structs": (pl.DataFrame({"b": [{"q": 1}] * N}), ValueError, "type Struct"),
    "bytes": (beside([b"a", b"b"] * 20), ValueError, "type bytes"),
    "complex numbers": (beside(numbers() + 1j), ValueError, "real and an imaginary"),
    "periods": (beside(pd.period_range("2020", periods=N, freq="M")), ValueError, "Period"),
    "intervals": (beside(pd.cut(numbers(), 4)), ValueError, "astype(str)"),
    "infinite": (beside([np.inf, *numbers()[1:]]), ValueError, "1 infinite cell (row 0, from 0)"),
    "minus infinite": (beside([*numbers()[1:], -np.inf]), ValueError, "(row 39, from 0)"),
    "huge numbers": (beside(numbers() * 1e300), ValueError, "larger unit"),
    "tiny numbers": (beside(numbers() * 1e-300), ValueError, "smaller unit"),
    "one axis": (numbers(), ValueError, "array[:, None]"),
    "three axes": (np.zeros((3, 3, 3)), ValueError, "expected [rows, columns]"),
    "no columns": (np.zeros((5, 0)), ValueError, "no columns"),
    "different lengths": ({"a": [1, 2, 3], "b": [1, 2]}, ValueError, "'b' has 2"),
    "a scalar column": ({"a": 3}, ValueError, "list or an array"),
    "a matrix as column": ({"a": np.zeros((4, 2))}, ValueError, "2 axes"),
    "all columns constant": (
        pd.DataFrame({"a": [1.0] * 5}),
        ValueError,
        "No column of the table can be modelled ('a': constant",
    ),
    "all columns missing": ({"a": [None] * 5}, ValueError, "every cell is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    table, error, message = REFUSED[case]
    with pytest.raises(error) as raised:
        Schema.read(table)
    assert message in str(raised.value)


RNG = np.random.default_rng(1)
# Tables that are read: (the cells of column b, its kind, what the reason must say).
READ = {
    "all missing": ([None] * N, "left out", "every cell is missing"),
    "all NaN": (np.full(N, np.nan), "left out", "every cell is missing"),
    "all not a time": ([pd.NaT] * N, "left out", "every cell is missing"),
    "only words for missing": (["", "", "", "NA"] * 10, "left out", "every cell is missing"),
    "one level": ("x", "left out", "constant: every known cell is 'x'"),
    "one level and holes": ([None, "x"] * 20, "left out", "constant"),
    "one number": (3.5, "left out", "constant: every known cell is 3.5"),
    "one number up to rounding": (1e9 + 1e-7 * np.arange(N), "left out", "rounding"),
    "one of three categories": (
        pd.Categorical(["x"] * N, categories=["x", "y", "z"]),
        "left out",
        "constant",
    ),
    "identifiers": ([f"id{i}" for i in range(N)], "left out", "identifier"),
    "row numbers": (np.arange(1, N + 1), "left out", "row numbers"),
    "64-bit identifiers": ([2**62 + i * i for i in range(N)], "left out", "2^53"),
    "words for missing": (["", "NA", "nan", "x", "y"] * 8, "binary", "text is '', 'NA', 'nan'"),
    "words that may be levels": (
        ["none", "null", "?", "x"] * 10,
        "category",
        "text with 4 levels; '?' and 'none' and 'null' are levels; if they mark missing cells, "
        "declare them missing",
    ),
    "a word that may be a level": (
        ["Unknown", "other", "x", "y"] * 10,
        "category",
        "4 levels; 'Unknown' is a level; if it marks missing cells, declare it missing",
    ),
    "categories named as missing cells": (
        pd.Categorical(["NA", "none", "nan", "?"] * 10),
        "category",
        "4 levels",
    ),
    "spaces in levels": (["x", " x", "x ", "y"] * 10, "category", "only in spaces"),
    "codes as text": (["02139", "94305", "10001", "60601"] * 10, "category", "4 levels"),
    "categories of numbers": (pd.Categorical([3, 1, 2, 1] * 10), "category", "3 levels"),
    "an unused category": (
        pd.Categorical(["x", "y"] * 20, categories=["x", "y", "z"]),
        "category",
        "3 levels",
    ),
    "ordered categories": (
        pd.Categorical(["lo", "hi", "mid", "lo"] * 10, ["lo", "mid", "hi"], ordered=True),
        "ordered",
        "order not used",
    ),
    "free text": (
        [f"said {max(i - N // 3, 0)}" for i in range(N)],
        "left out",
        f"text that differs in most rows ({N - N // 3} different ones in {N} cells)",
    ),
    "dates": (
        [datetime.date(2020, 1, 1) + datetime.timedelta(days=i * i) for i in range(N)],
        "date",
        "dates, in days",
    ),
    "times with a zone": (
        pd.date_range("2020", periods=N, freq="7h", tz="Europe/Berlin"),
        "date",
        "dates, in days",
    ),
    "decimals": ([decimal.Decimal(i * 7 % 13) / 3 for i in range(N)], "real", "zeros"),
    "nullable integers": (pd.array([0, None, 2, 1] * 10, dtype="Int64"), "count", "Poisson"),
    "sparse counts": (pd.arrays.SparseArray([0, 0, 1, 2] * 10), "count", "Poisson"),
    "negative whole numbers": (RNG.integers(-50, 50, N), "real", "negative"),
    "large whole numbers": (RNG.integers(0, 10**9, N), "real", "large whole numbers"),
    "few numbers": ([0.1, 0.2, 0.3, 0.5] * 10, "ordered", "4 distinct numbers"),
    "zeros and numbers": ([0.0] * 20 + list(RNG.random(20)), "real", "50% of the cells are 0"),
    "zeros and a number as good as zero": (
        [0.0, 5e-324, *np.exp(np.arange(N - 2) / 8)],
        "real",
        "all positive but 1 zero: zeros too far below the other logarithms for a LogNormal",
    ),
    "zeros and ones": (RNG.integers(0, 2, N), "binary", "0 and 1"),
    "ones and twos": (RNG.integers(1, 3, N), "binary", "1 and 2"),
    "years": (RNG.integers(2007, 2010, N), "ordered", "levels beat counts by"),
    "incomes": (np.exp(3 * RNG.normal(size=N)), "positive", "LogNormal beats Normal by"),
    "heights": (175 + 7 * RNG.normal(size=N), "real", "as likely as LogNormal"),
    "accidents": (RNG.poisson(2.0, N), "count", "no more spread than Poisson"),
    "purchases": (RNG.negative_binomial(1, 0.1, N), "count", "NegativeBinomial beats"),
    "truth values": ([True, False, None, True] * 10, "binary", "truth values"),
}


@pytest.mark.parametrize("case", READ)
def test_read(case):
    cells, kind, reason = READ[case]
    table = beside(cells)
    schema = Schema.read(table)
    assert schema["b"].kind == kind
    assert reason in schema["b"].reason
    data = schema.encode(table)
    assert all(len(value) == N for value in data.values())
    assert len(data) == (1 if kind in ("left out", "real", "positive", "date") else 2)


def test_a_hundred_thousand_levels_are_left_out():
    table = pd.DataFrame(
        {"a": np.tile(numbers(), 5000), "b": [f"v{i // 2}" for i in range(200_000)]}
    )
    schema = Schema.read(table)
    assert schema["b"].kind == "left out"
    assert schema["b"].reason.startswith("100,000 levels in 200,000 known cells")
    with pytest.raises(ValueError, match="more than 10,000"):
        schema.with_kind("b", "category")


def test_markers_of_missing_cells_are_told():
    cells = np.where(np.arange(N) % 5 == 0, -999, numbers())
    with pytest.warns(DataWarning, match=r"the value -999 repeats far outside .* column b"):
        Schema.read(beside(cells))


@pytest.mark.filterwarnings("ignore:Columns")
def test_names_that_are_no_identifiers():
    levels = list("abcd") * 10
    names = ["x", "z", "class", "a b", "a_b", "z | x", "日本", "1st", "", "seed"]
    schema = Schema.read(dict.fromkeys(names, levels))
    assert len(set(schema.variables)) == len(names)
    fitted = schema.fit(schema.mixture(2), dict.fromkeys(names, levels), starts=1)
    assert list(fitted.sample(3, seed=0).columns) == names


def changed(**columns) -> pd.DataFrame:
    table = mixed(30, missing=0.0)
    return table.assign(**columns)


# New tables for a known schema that are refused.
NEW = {
    "a column lacks": (changed().drop(columns="height"), "lacks column 'height'"),
    "an extra column": (changed(weight=1.0), "column 'weight', which the schema does not know"),
    "no rows": (changed().iloc[:0], "no rows"),
    "a new level": (changed(colour="pink"), "does not know: 'pink' (row 0, from 0)"),
    "a new category": (changed(size="huge"), "does not know: 'huge'"),
    "a new truth value": (changed(member="maybe"), "does not know: 'maybe'"),
    "text for numbers": (changed(height="tall"), "had numbers when the schema was read"),
    "numbers for dates": (changed(born=3.0), "had dates when the schema was read"),
    "dates for numbers": (
        changed(height=pd.Timestamp("2020-01-01")),
        "had numbers when the schema was read, and now holds dates",
    ),
    "zero income": (changed(income=0.0), "30 cells are not positive"),
    "half a visit": (changed(visits=0.5), "no counts"),
    "minus one visit": (changed(visits=-1), "no counts"),
    "infinite height": (changed(height=np.inf), "infinite"),
}


@pytest.mark.parametrize("case", NEW)
def test_new_tables_are_refused(case):
    schema = Schema.read(mixed())
    table, message = NEW[case]
    with pytest.raises(ValueError, match="(?s).") as raised:
        schema.encode(table)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "cell", "one", "several"),
    [
        ("height", np.inf, "1 cell is infinite (inf", "2 cells are infinite (inf"),
        (
            "income",
            0.0,
            "1 cell is not positive, so it has no logarithm (0",
            "2 cells are not positive, so they have no logarithm (0",
        ),
        (
            "visits",
            -1,
            "1 cell is no count (a whole number from 0 on) (-1",
            "2 cells are no counts (whole numbers from 0 on) (-1",
        ),
    ],
)
def test_one_refused_cell_is_singular(name, cell, one, several):
    schema, fix = Schema.read(mixed()), {one: "it", several: "them"}
    for count, message in enumerate((one, several), start=1):
        table = mixed(missing=0.0)
        table.iloc[:count, table.columns.get_loc(name)] = cell
        with pytest.raises(
            ValueError, match=re.escape(f"Column {name!r}: {message} in row 0")
        ) as e:
            schema.encode(table)
        assert re.search(rf"(Correct|Replace) {fix[message]} ", str(e.value))


def test_columns_are_found_by_name():
    schema, table = Schema.read(mixed()), mixed(30)
    permuted = table[list(reversed(table.columns))]
    for name, value in schema.encode(table).items():
        np.testing.assert_array_equal(schema.encode(permuted)[name], value)


def test_a_column_left_out_may_be_absent_or_present():
    schema = Schema.read(mixed()).without("colour")
    with_it, without_it = mixed(30), mixed(30).drop(columns="colour")
    for name, value in schema.encode(with_it).items():
        np.testing.assert_array_equal(schema.encode(without_it)[name], value)


@pytest.mark.parametrize(("name", "factor"), [("height", 0.01), ("income", 1000), ("visits", 100)])
def test_another_unit_is_told(name, factor):
    schema, table = Schema.read(mixed()), mixed(30)
    with pytest.warns(DataWarning, match=f"Column '{name}' lies far .* another unit"):
        schema.encode(table.assign(**{name: table[name] * factor}))


def test_the_same_unit_is_not_told():
    """Also for a single, extreme row of the training table."""
    table = mixed()
    schema = Schema.read(table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema.encode(table)
        for name in ("height", "income", "clicks"):
            schema.encode(table.loc[[table[name].astype(float).idxmax()]])


def wide(rows: int = 300) -> pd.DataFrame:
    """Positive columns from narrow to wide, and a column with zeros."""
    draw = np.random.default_rng(5)
    return pd.DataFrame(
        {
            "length": draw.normal(44, 5.5, rows),
            "dollars": draw.lognormal(4, 1, rows).round(2),
            "percent": draw.lognormal(2.5, 0.5, rows),
            "share": np.maximum(draw.normal(12, 9, rows), 0.0),
        }
    )


@pytest.mark.parametrize(
    ("name", "factor", "told"),
    [
        ("length", 0.1, "10 times smaller"),
        ("length", 1 / 25.4, "25.4 times smaller"),
        ("length", 2.54, "2.54 times larger"),
        ("length", 60, "60 times larger"),
        ("dollars", 100, "100 times larger"),
        ("percent", 0.01, "100 times smaller"),
        ("share", 100, "100 times larger"),
    ],
)
def test_a_usual_factor_between_units_is_named(name, factor, told):
    schema, table = Schema.read(wide()), wide()[:40]
    with pytest.warns(DataWarning) as caught:
        schema.encode(table.assign(**{name: table[name] * factor}))
    (message,) = [str(one.message) for one in caught]
    assert f"Column {name!r} lies far" in message
    assert f"Its cells are about {told}. Has it another unit? Convert it" in message
    assert message.endswith(f"schema.rescaled({name!r}, {factor:.4g}).")


def test_a_column_far_away_without_a_usual_factor_is_told():
    schema, table = Schema.read(wide()), wide()[:1]
    with pytest.warns(
        DataWarning, match=r"were [\d.]+ to [\d.]+\. Has it another unit\?"
    ) as caught:
        schema.encode(table.assign(length=44 * 5.5))
    assert str(caught[0].message).endswith("schema.rescaled('length', factor).")


def test_parts_of_the_same_table_are_not_told():
    """Clusters, single rows and random rows of the schema's own table."""
    from sklearn.datasets import load_wine

    penguins = pd.read_csv(Path(__file__).parents[2] / "docs" / "data" / "penguins.csv")
    wine = load_wine(as_frame=True).frame
    tables = [(penguins, ["species", "island"]), (wine, ["target"]), (wide(), [])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for table, groups in tables:
            schema = Schema.read(table)
            for group in groups:
                for _, rows in table.groupby(group):
                    schema.encode(rows)
            for n in (1, 2, 5, 30):
                for seed in range(10):
                    schema.encode(table.sample(n, random_state=seed))
            for name in table.select_dtypes("number"):  # the ends of a column
                ordered = table.sort_values(name)
                schema.encode(ordered[:6])
                schema.encode(ordered[-6:])


def test_new_rows_of_the_same_source_are_not_told():
    """40 schemas of 150 rows and 150 other rows; about 1 % of new cells lie outside a range."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(40):
            table = wide().sample(frac=1, random_state=seed)
            Schema.read(table[:150]).encode(table[150 : 150 + (1, 5, 20, 150)[seed % 4]])


def test_the_next_dates_of_a_short_period_are_not_told():
    days = pd.date_range("2024-01-01", periods=60)
    schema = Schema.read(pd.DataFrame({"day": days}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema.encode(pd.DataFrame({"day": days + pd.Timedelta(days=120)}))
    with pytest.warns(DataWarning, match="Has it another unit\\? Check it"):
        schema.encode(pd.DataFrame({"day": days + pd.Timedelta(days=2000)}))


def test_a_type_may_change_within_its_kind():
    schema, table = Schema.read(mixed()), mixed(30, missing=0.0)
    other = table.assign(
        visits=table["visits"].astype(float),
        member=table["member"].astype(int),
        size=table["size"].astype(str),
        colour=pd.Categorical(table["colour"]),
    )
    for name, value in schema.encode(table).items():
        np.testing.assert_array_equal(schema.encode(other)[name], value)


@pytest.mark.parametrize("whole", [True, False])
def test_masked_arrays_are_missing_cells(whole):
    values = np.ma.masked_less(numbers().reshape(20, 2), 0)
    schema = Schema.read(values if whole else {"0": values[:, 0], "1": values[:, 1]})
    assert [column.missing for column in schema.columns] == values.mask.sum(0).tolist()


def test_arrow_strings_and_nulls():
    table = pa.table({"a": numbers(), "b": pa.array(["x", None, "y", "z"] * 10)})
    schema = Schema.read(table)
    assert schema["b"].levels == ("x", "y", "z")
    assert schema["b"].missing == 10


def test_names_that_are_nearly_right_are_suggested():
    frame = {"body_mass_g": RNG.normal(size=N), "year": RNG.integers(2007, 2010, N)}
    schema = Schema.read(frame)
    with pytest.raises(ValueError, match="Did you mean 'category'"):
        schema.with_kind("year", "categry")
    with pytest.raises(ValueError, match="Rename 'body_mas_g' to 'body_mass_g'"):
        schema.encode({"body_mas_g": frame["body_mass_g"], "year": frame["year"]})
    with pytest.raises(ValueError, match="at most 256 clusters, .* got 300"):
        schema.mixture(300)


def test_far_dates_are_written_as_dates():
    days = np.datetime64("2020-01-01") + np.arange(N)
    schema = Schema.read({"day": days, "x": RNG.normal(size=N)})
    with pytest.warns(DataWarning, match="its median is 2089-12-01, and they were 2020-01-01 to 2"):
        schema.encode({"day": np.array(["2089-12-01"], "M8[D]"), "x": [0.0]})
