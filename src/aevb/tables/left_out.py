"""Warn of cells of columns that the model leaves out, where they say something of its results."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from aevb.runtime.checked_files import DataWarning
from aevb.tables.columns import Column, date_text, plain_text
from aevb.tables.frames import Table
from aevb.tables.kinds import by_itself

SHOWN = 5  # columns that a message names


def warn_of_changed_constants(
    columns: Sequence[Column], table: Table, words: Sequence[str], *, stacklevel: int
) -> None:
    """Warn of new values in columns that were constant, or had no known cell."""
    told = []
    for column in _left_out(columns, table):
        facts = column.facts
        if not facts.constant and facts.distinct:
            continue
        cells = table.cells(column.name, words, facts.levels or (), facts.form)
        changed = ~cells.missing
        if facts.distinct and (cells.values.dtype != object) == (facts.low is not None):
            if facts.low is not None:
                values = np.where(cells.missing, np.nan, cells.values.astype(float))
                changed &= (values < facts.low) | (values > facts.high)
            elif facts.levels is not None:
                changed &= cells.values != facts.levels[0]
        if changed.any():
            row = int(np.argmax(changed))
            was = f"constant ({_written(column, facts.low)})" if facts.distinct else "empty"
            now = _written(column, cells.values[row]) if facts.distinct else "a value"
            told.append(f"{column.name!r} was {was}, and is {now} in row {row}, from 0")
    if told:
        more = f"; and {len(told) - SHOWN} more columns" if len(told) > SHOWN else ""
        warnings.warn(
            f"Columns that are left out have changed since the schema was read: "
            f"{'; '.join(told[:SHOWN])}{more}. The results do not depend on them; to model them, "
            f"read the schema of a table in which they vary.",
            DataWarning,
            stacklevel=stacklevel,
        )


def warn_of_unfilled(columns: Sequence[Column], table: Table, words: Sequence[str]) -> None:
    """Warn of columns that are not filled, because the schema's table had no cell of them."""
    told = []
    for column in _left_out(columns, table):
        count = int(table.cells(column.name, words).missing.sum())
        if count and not column.facts.distinct:
            told.append(f"{count} of {column.name!r} ({column.reason})")
    if told:
        more = f" and {len(told) - SHOWN} more columns" if len(told) > SHOWN else ""
        warnings.warn(
            f"Cells stay missing in columns that are left out: {', '.join(told[:SHOWN])}{more}.",
            DataWarning,
            stacklevel=3,
        )


def _left_out(columns: Sequence[Column], table: Table) -> list[Column]:
    """The columns of a table that are left out by themselves, not as asked."""
    return [
        column
        for column in columns
        if not column.used and by_itself(column.reason) and column.name in table.names
    ]


def _written(column: Column, value: object) -> str:
    if value is None:  # of a text
        levels = column.facts.levels or ("",)
        return repr(levels[0])
    if column.facts.type in ("date", "datetime") and isinstance(value, float):
        return date_text(value)
    return plain_text(value)
