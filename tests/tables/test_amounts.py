"""Amounts: numbers written as text, with a currency or percent sign or thousands separators."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from aevb import Schema, load_table
from aevb.runtime.checked_files import DataWarning
from aevb.tables.amounts import amounts_of, mixed_units
from aevb.tables.frames import read_table

# Some tables have one column in several forms.
pytestmark = pytest.mark.filterwarnings("ignore:.*'b' equals 'a'")

N = 60
RNG = np.random.default_rng(0)
NUMBERS = np.round(np.exp(RNG.normal(7, 1, N)), 2)
COMMA = str.maketrans(",.", ".,")

# (texts, their numbers, -1234.567 and 7 as amounts of the column)
FORMS = {
    "dollars": (["$1,234.50", "$7"], [1234.5, 7], "-$1,234.57", "$7.00"),
    "no groups": (["$1234.5", "$7"], [1234.5, 7], "-$1234.6", "$7.0"),
    "thousands": (["1,234,567", "12"], [1234567, 12], "-1,235", "7"),
    "thousands only": (["1,234", "12,345"], [1234, 12345], "-1,235", "7"),
    "percent": (["12 %", "-3.5 %"], [12, -3.5], "-1234.6 %", "7.0 %"),
    "a blank": (["€ 3.50", "€ 1,000.00"], [3.5, 1000], "-€ 1,234.57", "€ 7.00"),
    "a minus before the sign": (["-£5", "£1,200"], [-5, 1200], "-£1,235", "£7"),
    "a minus after the sign": (["£-5", "£1,200"], [-5, 1200], "£-1,235", "£7"),
    "a long minus": (["\u22125 %", "+7.25 %"], [-5, 7.25], "\u22121234.57 %", "7.00 %"),
    "accounts": (["(1,200.00)", "7.00"], [-1200, 7], "(1,234.57)", "7.00"),
    "accounts in dollars": (["($1,200)", "$7"], [-1200, 7], "($1,235)", "$7"),
    "all below zero": (["-£5", "-£6"], [-5, -6], "-£1235", "£7"),
    "no leading digit": (["$.50", "$1"], [0.5, 1], "-$1234.57", "$7.00"),
    "both signs": (["1.234,50 €", "7 €"], [1234.5, 7], "-1.234,57 €", "7,00 €"),
    "decimal commas": (["3,5", "12,75"], [3.5, 12.75], "-1234,57", "7,00"),
    "a comma after zero": (["0,125 €", "1,234 €"], [0.125, 1.234], "-1234,567 €", "7,000 €"),
    "points as groups": (["€1.234.567", "€1.234"], [1234567, 1234], "-€1.235", "€7"),
    "points and a comma": (["1.234.567", "1.234", "3,5"], [1234567, 1234, 3.5], "-1.234,6", "7,0"),
    "one group": (["1,234", "12", "999"], [1234, 12, 999], "-1,235", "7"),
    "one group is certain": (["1,234.5", "5678"], [1234.5, 5678], "-1,234.6", "7.0"),
    "billions": (["8,045,311,447", "12"], [8045311447, 12], "-1,235", "7"),
    "spaces around": ([" $5 ", "$1,000"], [5, 1000], "-$1,235", "$7"),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms(case):
    texts, numbers, below, above = FORMS[case]
    amounts = amounts_of("a", texts)
    assert [amounts.number(text) for text in texts] == numbers
    assert (amounts.text(-1234.567), amounts.text(7)) == (below, above)
    again = [amounts.number(amounts.text(number)) for number in numbers]
    assert again == numbers
    assert amounts.text(-1e-9) == amounts.text(0.0)


@pytest.mark.parametrize(
    "texts",
    [
        ["$5", "five"],
        ["1234", "7.5"],
        ["(5)", "(7)"],
        ["00,123", "1,234"],
        ["$007", "$8"],
        ["1,23,456", "1"],
        ["1,2345.6", "1"],
        ["1,2,3", "1,2"],
        ["$5%", "$6%"],
        ["-$-5", "$6"],
        ["($5", "$6"],
        ["10.123.45", "1,2"],
        ["$", "$5"],
        ["1,234.5", "1.234,5"],
        ["$5", "€5"],
        ["$5", "5"],
        ["192.168.106.207", "192.168.106.208"],
        ["1.234.567", "1.234"],
        ["1,234,567,890,123", "101,202,303,404,505"],
        ["1,4", "3", "2,5"],
        ["1,4", "2,5"],
        ["1,45", "3", "2", "4"],
        ["1,234", "5678"],
        [],
    ],
)
def test_other_texts_are_no_amounts(texts):
    assert amounts_of("a", texts) is None


@pytest.mark.parametrize("texts", [["€ 1.234", "€ 5"], ["$1,234", "$1.234"], ["12.345 %"]])
def test_ambiguous_points_are_refused(texts):
    with pytest.raises(ValueError, match=r"'a' holds amounts such as .*may separate thousands or"):
        Schema.read({"a": texts * 10})
    schema = Schema.read({"a": texts * 10, "b": NUMBERS[: 10 * len(texts)]}, drop=["a"])
    assert not schema["a"].used
    if len(texts) > 1:
        levels = Schema.read({"a": texts * 10}, kinds={"a": "category"})["a"].levels
        assert set(levels) == set(texts)


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        ([f"192.168.{i % 256}.{100 + i}" for i in range(100, 130)], "left out"),
        ([f"1.{100 + i}.{200 + i}" for i in range(30)], "left out"),
        (["1,4", "3", "2,5"] * 10, "category"),
    ],
)
def test_texts_that_only_look_like_numbers_stay_text(texts, kind):
    column = Schema.read({"a": texts, "b": NUMBERS[:30]})["a"]
    assert (column.kind, column.facts.type, column.facts.amounts) == (kind, "text", None)


def dollars(numbers=NUMBERS) -> list:
    return [f"${number:,.2f}" for number in numbers]


FRAMES = {
    "pandas": pd.DataFrame,
    "objects": lambda columns: pd.DataFrame(columns, dtype=object).astype({"a": float}),
    "polars": pl.DataFrame,
    "pyarrow": pa.table,
    "dict": lambda columns: columns,
    "arrays": lambda columns: {name: np.array(cells) for name, cells in columns.items()},
}


def cells_of(frame, name: str) -> list:
    column = frame[name]
    return column.to_pylist() if isinstance(frame, pa.Table) else list(column)


@pytest.mark.parametrize("library", FRAMES)
def test_amounts_of_every_library_are_numbers_and_go_back_as_texts(library):
    missing = "" if library == "arrays" else None
    texts = [*dollars()[:-2], missing, missing]
    table = FRAMES[library]({"a": NUMBERS + RNG.normal(size=N), "b": texts})
    schema, plain = (
        Schema.read(table),
        Schema.read({"a": NUMBERS, "b": [*NUMBERS[:-2], None, None]}),
    )
    assert (schema["b"].kind, schema["b"].missing) == ("positive", 2)
    assert (schema["b"].location, schema["b"].scale) == (plain["b"].location, plain["b"].scale)
    assert schema["b"].reason.startswith("amounts such as '$1,243.56'; ")
    np.testing.assert_array_equal(schema.cells(table)["b"], [*NUMBERS[:-2], np.nan, np.nan])
    fitted = schema.fit(schema.mixture(2), table, starts=1)
    filled = fitted.impute(table)
    found = cells_of(filled, "b")
    assert found[:-2] == texts[:-2]
    form = schema["b"].facts.amounts
    assert [form.text(form.number(text)) for text in found[-2:]] == found[-2:]
    assert (schema.missing_cells(filled)["b"]).sum() == 0
    assert Schema.read(filled)["b"].facts.amounts == form
    drawn = fitted.sample(20, seed=0)
    assert all(form.number(text) > 0 for text in cells_of(drawn, "b"))
    assert np.isfinite(fitted.score(drawn)["log_p"].to_numpy()).all()
    for draw in fitted.impute(table, 2):
        assert all(text.startswith("$") for text in cells_of(draw, "b"))


def test_amounts_survive_json_and_files(tmp_path):
    table = {"a": NUMBERS, "b": dollars()}
    schema = Schema.read(table)
    assert Schema.from_json(schema.to_json()) == schema
    fitted = schema.fit(schema.mixture(2), table, starts=1)
    fitted.save(tmp_path / "model")
    assert load_table(tmp_path / "model").schema == schema


def test_schemas_without_amounts_in_their_files_are_read():
    schema = Schema.read({"a": NUMBERS, "b": ["x", "y"] * 30})
    record = json.loads(schema.to_json())
    for column in record["columns"]:
        del column["facts"]["amounts"]
    assert Schema.from_json(json.dumps(record)) == schema


def test_mixed_units_stay_text():
    for n, kind in ((N, "left out"), (3, "category")):
        cells = [f"{'$€'[i % 2]}{i % n}" for i in range(N)]
        column = Schema.read({"a": NUMBERS, "b": cells})["b"]
        assert column.kind == kind
        assert column.facts.amounts is None
        assert column.reason.endswith(
            "amounts with different signs ('$0' and '€1'), which have no common unit"
        )
    assert mixed_units(["$5", "6", "€7"]).startswith(
        "amounts with and without a sign ('$5' and '6')"
    )
    assert mixed_units(["$5", "6", "none"]) == mixed_units(["$5", "$6"]) == mixed_units([]) == ""


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([f"{number:.1f} %" for number in NUMBERS], "%', in percent; "),
        ([f"{number:,.0f}" for number in 1e6 + 1e3 * NUMBERS], ", ',' separates thousands; "),
        ([f"{number:,.2f} €".translate(COMMA) for number in NUMBERS], "€', with a decimal comma; "),
    ],
)
def test_the_reason_says_how_amounts_are_read(cells, words):
    schema = Schema.read({"b": cells})
    assert words in schema["b"].reason
    assert words.strip("; ") in schema.with_kind("b", "real")["b"].reason


def test_equal_amounts_stay_text():
    table = {"a": NUMBERS, "b": ["$5"] * N, "c": ["$5", "$5.00"] * 30}
    schema = Schema.read(table)
    assert schema["b"].reason == "constant: every known cell is '$5'"
    assert schema["c"].levels == ("$5", "$5.00")


def test_words_for_missing_cells_are_missing_amounts():
    schema = Schema.read({"b": [*dollars()[:-2], "NA", None]})
    assert schema["b"].missing == 2
    assert schema["b"].reason.endswith("missing where the text is 'NA'")


@pytest.mark.parametrize("asked", [True, False])
def test_levels_of_amounts_are_numbers_and_go_back_as_texts(asked):
    table = pd.DataFrame({"a": NUMBERS, "b": ["$5", "$10", "$1,020", "$5"] * 15})
    schema = Schema.read(table)
    assert schema["b"].kind == "ordered"
    if asked:
        schema = schema.with_kind("b", "category")
    assert schema["b"].levels == (5, 10, 1020)
    fitted = schema.fit(schema.mixture(2), table, starts=1)
    assert set(fitted.sample(50, seed=0)["b"]) == {"$5", "$10", "$1,020"}
    holes = table.assign(b=table["b"].where(np.arange(N) % 5 > 0))
    filled = fitted.impute(holes)
    assert set(filled["b"]) <= {"$5", "$10", "$1,020"}
    assert set(fitted.profiles()["b"]) <= {"$5", "$10", "$1,020"}
    with pytest.raises(ValueError, match="does not know: '7'"):
        schema.encode(table.assign(b="$7"))


def test_a_category_of_amounts_that_is_asked_for_has_texts():
    table = {"a": NUMBERS, "b": ["$5", "$10", "$1,020", "$5"] * 15}
    column = Schema.read(table, kinds={"b": "category"})["b"]
    assert column.levels == ("$1,020", "$10", "$5")
    assert column.facts.amounts is None


def test_new_tables():
    schema = Schema.read(pd.DataFrame({"b": dollars()}))
    expected = schema.encode({"b": dollars()})["x"]
    for cells in (NUMBERS, pd.Series(dollars()).astype("str"), [f"$ {n:.2f}" for n in NUMBERS]):
        np.testing.assert_array_equal(schema.encode(pd.DataFrame({"b": cells}))["x"], expected)
    missing = schema.encode(pl.DataFrame({"b": pl.Series([None, "NA"], dtype=pl.String)}))["x"]
    assert np.isnan(missing).all()
    with pytest.raises(ValueError, match=r"'b' had amounts such as '\$1,243.56' .* '€7' in row 1"):
        schema.encode({"b": ["$5", "€7"]})
    with pytest.raises(ValueError, match=r"now holds '7' in row 0\. Write all its amounts"):
        schema.encode({"b": ["7", "$5"]})
    with pytest.raises(ValueError, match=r"now holds '\$1\.243,56' in row 0"):
        schema.encode({"b": ["$1.243,56"]})
    with pytest.raises(ValueError, match="not positive"):
        schema.encode({"b": ["-$5"]})
    numbers = Schema.read({"b": NUMBERS})
    with pytest.raises(ValueError, match="had numbers .* now holds text"):
        numbers.encode({"b": dollars()})


def test_numbers_for_texts_in_percent_may_be_shares():
    """A recorded range from 0 on and single cells say nothing of the unit."""
    numbers = np.linspace(0.0, 40.0, N)
    schema = Schema.read({"b": [f"{number:.2f} %" for number in numbers]})
    with pytest.warns(DataWarning, match=r"'b' had texts in percent .* from 0 to 1 \(0\.05\), whi"):
        schema.encode({"b": [0.05, None, 0.2]})
    for cells in (["0.05 %"], [0.0, 0.0], [0.5, 2.0], numbers, [None, -0.5]):
        schema.encode({"b": cells})
    small = Schema.read({"b": [f"{number / 50:.3f} %" for number in numbers]})
    small.encode({"b": numbers / 50})


def test_new_tables_may_show_the_separators_first():
    """The training table has no separators, so its form is open."""
    schema = Schema.read({"b": [f"€{number}" for number in range(100, 900, 7)]})
    assert schema["b"].facts.amounts.decimal == ""
    for text, number in (("€700,50", 700.5), ("€700.50", 700.5), ("€1,000", 1000.0)):
        assert schema.cells({"b": [text]})["b"].tolist() == [number]
    with pytest.raises(ValueError, match="may separate thousands or decimals"):
        schema.encode({"b": ["€1.000"]})


def test_a_new_unit_is_that_of_numbers():
    table = {"a": NUMBERS, "b": dollars()}
    schema = Schema.read(table)
    fitted = schema.fit(schema.mixture(2), table, starts=1)
    euros = type(fitted)(schema.rescaled("b", 0.5), fitted.model)
    found = euros.score({"a": NUMBERS, "b": NUMBERS / 2})["log_p"]
    np.testing.assert_allclose(found, fitted.score(table)["log_p"] + np.log(2))
    assert euros.sample(3, seed=0)["b"].dtype == float


def test_whole_positive_amounts_are_never_filled_by_zero():
    table = pd.DataFrame({"b": [f"${number:.0f}" for number in np.exp(RNG.normal(1, 2, 400)) + 1]})
    schema = Schema.read(table).with_kind("b", "positive")
    fitted = schema.fit(schema.mixture(1), table, starts=1)
    drawn = fitted.sample(2000, seed=0)
    assert "$1" in set(drawn["b"])
    assert np.isfinite(fitted.score(drawn)["log_p"]).all()


def test_markers_of_missing_amounts_are_told():
    cells = ["$-999.00" if i % 5 == 0 else f"${1 + i / 100:.2f}" for i in range(N)]
    with pytest.warns(DataWarning, match="value -999 repeats far outside .* make these cells"):
        Schema.read({"b": cells})


def test_texts_of_arrays_are_not_cut():
    table = {"a": NUMBERS, "b": np.array(["x", "yellow", "yellow"] * 20)}
    fitted = (schema := Schema.read(table)).fit(schema.mixture(1), table, starts=1)
    new = {"a": NUMBERS[:2], "b": np.array(["x", ""])}
    assert list(fitted.impute(new)["b"]) == ["x", "yellow"]


def test_plain_numbers_as_text_keep_their_error():
    with pytest.raises(ValueError, match="numbers written as text"):
        Schema.read({"b": [f"{number:.2f}" for number in NUMBERS]})
    assert read_table({"b": ["1", "2"]}).cells("b").type == "text"
