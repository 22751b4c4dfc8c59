"""How messages name rows and columns: by index from 0 for arrays, by line and header for tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

SHOWN = 8  # a message names at most this many rows or columns


class Pace(NamedTuple):
    """The time between two steps of dated sequences, in words and in seconds."""

    text: str
    seconds: float


@dataclass(frozen=True)
class Places:
    """The position of rows and columns in their file.

    ``lines`` holds the line number of each row; in a table with one line per step, the line numbers
    of the row's steps. It is None for arrays. ``columns`` maps a variable to its columns in the
    table. The columns of a variable in ``wide`` are the steps of a sequence. ``pace`` is the time
    between two steps, if they have dates.
    """

    lines: Sequence[Any] | None = None
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    pace: Pace | None = None

    def some(self, rows: Sequence[int] | np.ndarray) -> Places:
        """The places of some rows."""
        return (
            self if self.lines is None else replace(self, lines=[self.lines[row] for row in rows])
        )

    def first(
        self, row: int, name: str | None = None, step: int | None = None, column: int | None = None
    ) -> str:
        """Describe the position of an entry, as the first of its kind.

        >>> Places().first(17, "x", column=4)
        'first, from 0: row 17, column 4'
        >>> Places([2, 3, 5], {"x": ["height", "weight"]}).first(2, "x", column=1)
        "first: line 5, column 'weight'"
        """
        if self.lines is None:
            parts = {"row": row, "step": step, "column": column}
            return "first, from 0: " + ", ".join(
                f"{what} {number}" for what, number in parts.items() if number is not None
            )
        line, names = self.lines[row], self.columns.get(name or "", ())
        at = (step if name in self.wide else column) or 0
        return f"first: line {line if np.ndim(line) == 0 else line[step or 0]}" + (
            f", column {names[at]!r}" if at < len(names) else ""
        )

    def rows(self, rows: Sequence[int]) -> str:
        """Describe rows by index or line.

        For sequences with one line per step, by their first line.
        """
        numbers = rows if self.lines is None else [int(np.min(self.lines[row])) for row in rows]
        shown = ", ".join(map(str, numbers[:SHOWN])) + (
            f", … ({len(rows)} rows)" if len(rows) > SHOWN else ""
        )
        return f"rows {shown} (from 0)" if self.lines is None else f"lines {shown}"

    def among(self, name: str, columns: Sequence[int]) -> str:
        """Describe some columns of a variable."""
        names = () if name in self.wide else self.columns.get(name, ())
        known = all(column < len(names) for column in columns)
        shown = ", ".join(
            repr(names[column]) if known else str(column) for column in columns[:SHOWN]
        ) + ", …" * (len(columns) > SHOWN)
        return f"column{'s' * (len(columns) > 1)} {shown}" + ("" if known else ", from 0")


INDICES = Places()
ColumnNames = Mapping[str, tuple[str, ...]]


class Placed(dict[str, Any]):
    """Arrays by variable, with their positions in the file they were read from.

    ``columns`` are the names of the columns of variables that were frames.
    """

    def __init__(
        self, arrays: Mapping[str, Any], places: Places, columns: ColumnNames | None = None
    ) -> None:
        super().__init__(arrays)
        self.places = places
        self.columns = columns or {}

    def __or__(self, other: Mapping[str, Any]) -> Placed:  # type: ignore[override]
        return Placed({**self, **other}, self.places, self.columns)


def places_of(data: Any) -> Places:
    """The positions of the data in their file, for messages; array indices if there is no file."""
    return data.places if isinstance(data, Placed) else INDICES


def columns_of(data: Any) -> ColumnNames:
    """The names of the columns of variables that were frames."""
    return data.columns if isinstance(data, Placed) else {}


def named_columns(frame: Any) -> tuple[str, ...]:
    """The names of the columns of a frame, or of a series; none if they are numbers or None."""
    alone = (frame.name,) if hasattr(frame, "name") else ()
    names = tuple(getattr(frame, "column_names", getattr(frame, "columns", alone)))
    return names if all(isinstance(name, str) for name in names) else ()


def refuse_other_columns(
    name: str, found: Sequence[str], known: Sequence[str], whose: str = "the model was trained on"
) -> None:
    """Raise ValueError if the columns of a frame are not the known ones in the known order."""
    if list(found) == list(known):
        return

    def shown(names: Sequence[str]) -> str:
        return ", ".join(map(repr, names[:SHOWN])) + ", …" * (len(names) > SHOWN)

    if len(found) == len(known) == 1:
        raise ValueError(
            f"{name} has the column {found[0]!r}, but {whose} {known[0]!r}. Rename it if it holds "
            f"the same quantity: frame.rename({known[0]!r}) of a series, or "
            f"frame.rename(columns={{{found[0]!r}: {known[0]!r}}})."
        )
    order = ", in this order" if sorted(found) == sorted(known) else ""
    raise ValueError(
        f"{name} has the columns {shown(found)}, but {whose} {shown(known)}{order}. Select "
        f"these columns: frame[[{shown(known)}]]. An array is read by position: "
        f"frame.to_numpy()."
    )
