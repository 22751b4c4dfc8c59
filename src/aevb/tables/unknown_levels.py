"""Cells of a new table whose level the schema does not know: refused, or treated as missing."""

from __future__ import annotations

import warnings

import numpy as np

from aevb.runtime.checked_files import DataWarning
from aevb.tables.columns import Column, plain_text
from aevb.tables.kinds import levels_text
from aevb.tables.reading import Cells

CHOICES = ("error", "missing")
SHOWN = 5  # levels and columns that a message names


def checked_choice(choice: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f'Unknown levels are "error" or "missing", got {choice!r}.')
    return choice


def unknown_levels_error(column: Column, cells: Cells, unknown: np.ndarray) -> ValueError:
    """The error that some cells of a column, given by a mask, have unknown levels."""
    levels = _levels(cells, unknown)
    return ValueError(
        f"Column {column.name!r} has {'a level' if len(levels) == 1 else 'levels'} that the schema "
        f"does not know: {_shown(levels)} (row {int(np.argmax(unknown))}, from 0). Its levels are "
        f"{levels_text(column.levels, 60)}. Correct the cells, fit again with a table that has all "
        f"levels, or treat unknown levels as missing cells: in Python "
        f'fitted.with_unknown_levels("missing"), and for aevb score, cluster, impute, encode and '
        f"evaluate --unknown-levels missing."
    )


def describe_unknown_levels(column: Column, cells: Cells, unknown: np.ndarray) -> str:
    """Count the cells of a column with unknown levels, and name a few levels.

    Raise ValueError if they are text and no level is, or the reverse: then cells such as "2007" of
    the level 2007 would be lost.
    """
    texts = {isinstance(level, str) for level in column.levels}
    found = cells.values[unknown].tolist()
    other = [i for i, value in enumerate(found) if isinstance(value, str) not in texts]
    if other:
        row = int(np.flatnonzero(unknown)[other[0]])
        was, now = ("text", "numbers") if True in texts else ("numbers", "text")
        raise ValueError(
            f"Column {column.name!r} had {was} when the schema was read, and now holds {now} "
            f"({plain_text(found[other[0]])} in row {row}, from 0). Convert it to {was}; a word "
            f"that marks missing cells is named by missing= of Schema.read, or --missing WORD."
        )
    return f"{int(unknown.sum())} in {column.name!r} ({_shown(_levels(cells, unknown))})"


def warn_of_unknown_levels(columns: list[str]) -> None:
    """Warn that unknown levels of these columns, in words, are treated as missing cells."""
    if columns:
        more = f" and {len(columns) - SHOWN} more columns" if len(columns) > SHOWN else ""
        warnings.warn(
            f"Cells with a level that the schema does not know are treated as missing: "
            f"{', '.join(columns[:SHOWN])}{more}.",
            DataWarning,
            stacklevel=5,
        )


def _levels(cells: Cells, unknown: np.ndarray) -> list[str]:
    values = cells.values[unknown].tolist()
    return sorted({f"{v:.17g}" if isinstance(v, float) else str(v) for v in values})


def _shown(levels: list[str]) -> str:
    more = f" and {len(levels) - SHOWN} others" if len(levels) > SHOWN else ""
    return ", ".join(map(repr, levels[:SHOWN])) + more
