"""Levels that the schema does not know: refused by default, or treated as missing cells."""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np
import pandas as pd
import pytest
from small_tables import mixed

from aevb import Schema, TableModel, load_table
from aevb.runtime.checked_files import DataWarning


@cache
def fitted() -> TableModel:
    table = mixed()
    schema = Schema.read(table)
    return schema.fit(schema.mixture(3), table, starts=1)


def rows_with_new_levels() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows with three unknown colours and one unknown side, and the same with missing cells."""
    table = mixed(20, seed=5, missing=0.0)
    new, empty = table.copy(), table.copy()
    for column, row, level in (
        ("colour", 2, "pink"),
        ("colour", 3, "pink"),
        ("colour", 7, "teal"),
        ("side", 3, "middle"),
    ):
        position = table.columns.get_loc(column)
        new.iloc[row, position], empty.iloc[row, position] = level, None
    return new, empty


SAID = (
    "Cells with a level that the schema does not know are treated as missing: 1 in 'side' "
    "('middle'), 3 in 'colour' ('pink', 'teal')."
)


@pytest.mark.parametrize("use", ["score", "clusters"])
def test_unknown_levels_are_marginalised_out_like_missing_cells(use):
    new, empty = rows_with_new_levels()
    model = fitted().with_unknown_levels("missing")
    with pytest.warns(DataWarning) as told:
        found = getattr(model, use)(new)
    assert [str(one.message) for one in told] == [SAID]
    pd.testing.assert_frame_equal(found, getattr(fitted(), use)(empty))


def test_imputation_keeps_unknown_levels_and_fills_missing_cells():
    new, empty = rows_with_new_levels()
    new.iloc[3, new.columns.get_loc("height")] = np.nan
    empty.iloc[3, empty.columns.get_loc("height")] = np.nan
    model = fitted().with_unknown_levels("missing")
    with pytest.warns(DataWarning, match=re.escape(SAID)):
        filled, spread = model.impute(new, return_std=True)
    expected = new.assign(height=fitted().impute(empty)["height"])
    pd.testing.assert_frame_equal(filled, expected)
    assert (spread.to_numpy() > 0).sum() == 1
    with pytest.warns(DataWarning, match=re.escape(SAID)):
        draws = model.impute(new, draws=2)
    for drawn in draws:
        pd.testing.assert_frame_equal(drawn.drop(columns="height"), new.drop(columns="height"))


def test_the_error_names_both_ways_to_treat_unknown_levels_as_missing():
    with pytest.raises(ValueError, match="does not know: 'pink', 'teal'") as error:
        fitted().score(rows_with_new_levels()[0].assign(side="left"))
    assert 'fitted.with_unknown_levels("missing")' in str(error.value)
    assert "--unknown-levels missing" in str(error.value)


def test_numbers_as_text_are_refused_instead_of_being_lost():
    letters = [letter for letter in ("a", "b", "1") for _ in range(20)]
    schema = Schema.read({"year": [2007, 2008, 2009] * 20, "letter": letters})
    assert schema["year"].levels == (2007, 2008, 2009)
    schema = schema.with_unknown_levels("missing")
    with pytest.warns(DataWarning, match=re.escape("missing: 1 in 'year' ('2010').")):
        found = schema.encode({"year": [2007, 2010], "letter": ["a", "b"]})
    np.testing.assert_array_equal(found["year"], [0, np.nan])
    for table, message in (
        (
            {"year": ["2007", "never"], "letter": ["a", "b"]},
            "'year' had numbers .* text ('never' in row 1",
        ),
        (
            {"year": [2007, 2008], "letter": [98765, 2]},
            "'letter' had text .* numbers (98765 in row 0",
        ),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(") + r", from 0\)"):
            schema.encode(table)


def test_the_choice_is_saved_and_older_files_refuse(tmp_path):
    model = fitted().with_unknown_levels("missing")
    model.save(tmp_path / "m")
    assert load_table(tmp_path / "m").schema == model.schema
    assert load_table(tmp_path / "m").with_unknown_levels("error").schema == fitted().schema
    file = tmp_path / "m" / "schema.json"
    record = json.loads(file.read_text())
    del record["unknown levels"]
    file.write_text(json.dumps(record))
    assert load_table(tmp_path / "m").schema == fitted().schema


def test_other_choices_are_refused():
    with pytest.raises(ValueError, match='Unknown levels are "error" or "missing", got \'drop\''):
        fitted().with_unknown_levels("drop")
    record = json.loads(fitted().schema.to_json()) | {"unknown levels": "drop"}
    with pytest.raises(ValueError, match="This is no schema of a table: Unknown levels"):
        Schema.from_json(json.dumps(record))


def test_a_schema_with_the_choice_makes_a_model():
    schema = fitted().schema.with_unknown_levels("missing")
    assert TableModel(schema, fitted().model).schema.unknown_levels == "missing"
    assert schema.without("side").unknown_levels == "missing"


def test_a_run_resumes_with_another_choice(tmp_path):
    table = mixed(60)
    schema = Schema.read(table)
    schema.fit(schema.mixture(2), table, starts=1, out=tmp_path / "run")
    other = schema.with_unknown_levels("missing")
    again = other.fit(other.mixture(2), table, starts=1, out=tmp_path / "run", resume=True)
    assert again.schema.unknown_levels == "missing"


def test_numbers_and_texts_of_one_spelling_are_the_same_level():
    years = np.repeat([2007, 2008, 2009], 20)
    frame = pd.DataFrame({"number": years, "text": np.roll(years, 7).astype(str)})
    schema = Schema.read(frame)
    assert (schema["number"].levels, schema["text"].levels[0]) == ((2007, 2008, 2009), "2007")
    other = frame.rename(columns={"number": "text", "text": "number"})
    for name, codes in schema.encode(frame).items():
        np.testing.assert_array_equal(codes, schema.encode(frame.astype({"number": str}))[name])
        np.testing.assert_array_equal(codes, schema.encode(frame.astype({"text": int}))[name])
    other = other.astype({"text": "Int64"})
    other.loc[3, ["number", "text"]] = None
    filled = schema.fit(schema.mixture(1), frame, starts=1).impute(other)
    assert isinstance(filled["number"][3], str)
    assert filled["text"][3] in years
    with pytest.raises(ValueError, match="does not know: '02007'"):
        schema.encode(frame.assign(number="02007"))
