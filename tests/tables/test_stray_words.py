"""A few words among numbers or dates are refused: they may mark missing cells."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from aevb import Schema

NUMBERS = [f"{number:.3f}" for number in np.random.default_rng(0).normal(5, 1, 56)]
COLUMNS = {
    "numbers": (NUMBERS, "numbers"),
    "decimal commas": ([text[:-1].replace(".", ",") for text in NUMBERS], "numbers"),
    "amounts": ([f"$ {text[:-1]}" for text in NUMBERS], "amounts"),
    "dates": ([f"{1 + i % 28:02}.03.2024" for i in range(56)], "dates"),
    "times": ([f"2024-03-{1 + i % 28:02} 10:00" for i in range(56)], "dates"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_word_is_refused_with_the_fixes(case):
    texts, what = COLUMNS[case]
    cells = [*texts, "k.A.", "k.A.", "--", "not known"]
    with pytest.raises(ValueError, match="'a b'") as error:
        Schema.read({"a b": cells})
    assert str(error.value) == (
        f"Column 'a b' is text because of 3 words: 56 of 60 cells are {what}, and the others hold "
        f"'k.A.', '--', 'not known'. If they mark missing cells, declare them: "
        f"Schema.read(frame, missing=['', 'NA', 'k.A.', '--', 'not known']) (aevb train: "
        f"--missing k.A. --missing=-- --missing 'not known'). Otherwise read the column with "
        f"kinds={{'a b': \"category\"}} (aevb train: --kind 'a b=category')."
    )
    column = Schema.read({"a b": cells}, missing=["", "NA", "k.A.", "--", "not known"])["a b"]
    assert column.kind == ("date" if what == "dates" else "real")
    assert column.missing == 4
    assert "k.A." in Schema.read({"a b": cells}, kinds={"a b": "category"})["a b"].levels


def test_one_word_in_one_cell_is_counted_in_the_singular():
    with pytest.raises(ValueError, match=r"one word: 56 of 57 .* and the other holds 'x'\. If it"):
        Schema.read({"a": [*NUMBERS, "x"]})


@pytest.mark.parametrize(
    "cells",
    [
        ["1", "2", "x"] * 6,  # too few
        [*NUMBERS[:30], *["x"] * 10],  # too many words
        [*NUMBERS, "a", "b", "c", "d"],  # too many different words
        ["00123", "00124", "00125", "00126", "00127", "x"] * 5,  # codes
        ["2024-03-01", "5", "6", "7", "2024-03-02", "8", "9", "10", "11", "x"] * 5,
    ],
)
def test_other_columns_of_words_are_read(cells):
    table = pd.DataFrame({"a": cells, "b": np.arange(len(cells)) % 7})
    assert Schema.read(table)["a"].facts.type == "text"
    assert Schema.read(table.astype({"a": "category"}))["a"].facts.type == "category"


def test_numbers_that_missing_words_made_text_are_numbers_and_go_back_as_texts():
    cells = [*NUMBERS, "k.A.", "k.A."]
    table = pd.DataFrame({"a": cells})
    schema = Schema.read(table, missing=["k.A."])
    example = max(NUMBERS, key=len)
    assert schema["a"].reason.startswith(f"numbers as text such as {example!r}; ")
    np.testing.assert_array_equal(schema.cells(table)["a"], [*map(float, NUMBERS), np.nan, np.nan])
    fitted = schema.fit(schema.mixture(1), table, starts=1)
    mean = f"{np.mean([float(text) for text in NUMBERS]):.3f}"
    assert fitted.impute(table)["a"].tolist() == [*NUMBERS, mean, mean]


def test_an_open_end_is_a_level():
    schema = Schema.read({"children": ["0", "1", "2", "3+"] * 10, "a": np.arange(40.0) ** 2})
    assert schema["children"].levels == ("0", "1", "2", "3+")
