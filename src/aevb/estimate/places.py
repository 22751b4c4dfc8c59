"""How messages name rows and columns: those of arrays by their indices, from 0; those of a table by its lines and its header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

SHOWN = 8  # rows or columns that are named


@dataclass(frozen=True)
class Places:
    """``lines`` has the line of each row, or of each of its steps where a line is a step; None for arrays.

    ``columns`` are the columns of a table by variable. Those of the variables in ``wide`` are the steps of a sequence.
    """

    lines: Sequence[Any] | None = None
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()

    def some(self, rows: Sequence[int] | np.ndarray) -> Places:
        """The places of some rows."""
        return self if self.lines is None else replace(self, lines=[self.lines[row] for row in rows])

    def first(self, row: int, name: str | None = None, step: int | None = None, column: int | None = None) -> str:
        """Where the first entry of a kind stands.

        >>> Places().first(17, "x", column=4)
        'first, from 0: row 17, column 4'
        >>> Places([2, 3, 5], {"x": ["height", "weight"]}).first(2, "x", column=1)
        "first: line 5, column 'weight'"
        """
        if self.lines is None:
            parts = {"row": row, "step": step, "column": column}
            return "first, from 0: " + ", ".join(f"{what} {number}" for what, number in parts.items() if number is not None)
        line, names = self.lines[row], self.columns.get(name or "", ())
        at = (step if name in self.wide else column) or 0
        return f"first: line {line if np.ndim(line) == 0 else line[step or 0]}" + (f", column {names[at]!r}" if at < len(names) else "")

    def rows(self, rows: Sequence[int]) -> str:
        """Rows, in words: their lines, or of sequences with a line a step their first ones."""
        numbers = rows if self.lines is None else [int(np.min(self.lines[row])) for row in rows]
        shown = ", ".join(map(str, numbers[:SHOWN])) + (f", … ({len(rows)} rows)" if len(rows) > SHOWN else "")
        return f"rows {shown} (from 0)" if self.lines is None else f"lines {shown}"

    def among(self, name: str, columns: Sequence[int]) -> str:
        """Some columns of a variable, in words."""
        names = () if name in self.wide else self.columns.get(name, ())
        known = all(column < len(names) for column in columns)
        shown = ", ".join(repr(names[column]) if known else str(column) for column in columns[:SHOWN]) + ", …" * (len(columns) > SHOWN)
        return f"column{'s' * (len(columns) > 1)} {shown}" + ("" if known else ", from 0")


INDICES = Places()


class Placed(dict[str, Any]):
    """Arrays by variable that remember where in a file they stood."""

    def __init__(self, arrays: Mapping[str, Any], places: Places) -> None:
        super().__init__(arrays)
        self.places = places

    def __or__(self, other: Mapping[str, Any]) -> Placed:  # type: ignore[override]
        return Placed({**self, **other}, self.places)


def places_of(data: Any) -> Places:
    """Where the rows and columns of data stood, as messages name them."""
    return data.places if isinstance(data, Placed) else INDICES
