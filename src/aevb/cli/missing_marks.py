"""Marks of missing cells: the numbers and words of ``--missing``."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

Mark = float | str


def marks_of(texts: Sequence[str] | None) -> list[Mark]:
    """Read the texts of ``--missing``: a number if it is one, otherwise a word.

    >>> marks_of(["-999", "unknown"])
    [-999.0, 'unknown']
    """
    return [_mark(text) for text in texts or ()]


def _mark(text: str) -> Mark:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def words_of(marks: Collection[Mark]) -> list[str]:
    """Return the marks as words of text columns, which are compared without case.

    >>> words_of([-999.0, 0.5, "Unknown"])
    ['-999', '0.5', 'unknown']
    """
    return [
        mark.strip().lower() if isinstance(mark, str) else repr(float(mark)).removesuffix(".0")
        for mark in marks
    ]


def numbers_of(marks: Collection[Mark]) -> list[float]:
    return [mark for mark in marks if not isinstance(mark, str)]


def only_numbers(texts: Sequence[str] | None) -> list[float] | None:
    """Return the numbers of ``--missing`` for data of a named model; refuse words."""
    if texts is None:
        return None
    marks = marks_of(texts)
    words = [mark for mark in marks if isinstance(mark, str)]
    if words:
        raise ValueError(
            f"--missing {words[0]}: the data of a named model are numbers, so a number marks their "
            f"missing cells, e.g. --missing -999. Words are for models of a table: aevb train "
            f"table.csv --missing {words[0]}."
        )
    return numbers_of(marks)
