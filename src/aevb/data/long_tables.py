"""Tables with a line a step: which columns number the rows and the steps, and which lines are the steps of which row.

Samples and codes of sequences are written so, with the columns ``row`` and ``step``. Other files name them after what they are: an id,
a year. A table of which every line holds one step of every variable, and that numbers nothing, is one sequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aevb.declare.graph import Graph

ROWS = ("row", "id", "series", "sequence", "subject", "patient", "unit")
STEPS = ("step", "t", "time", "timestamp", "date", "year", "quarter", "month", "week", "day", "hour", "minute", "second", "period")
COUNTED = 5  # lines from which on a column that goes up evenly is taken for a count
ROUNDED = 0.02  # share of a step by which times may be off: those of months, in years, are rounded
SORTED = math.log(20_000)  # a column is taken for sorted if of so many orders of its values chance would have had to choose this one


@dataclass(frozen=True)
class Keys:
    """The columns of a table that number its rows and its steps, where it has them."""

    row: str | None
    step: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.row, self.step) if name is not None)


def keys_of(names: Sequence[str] | None, graph: Graph) -> Keys | None:
    """The columns that number rows and steps, by their names; None for a table without them, or a model without time."""
    if names is None or not any(graph.timed[name] for name in (*graph.observed, *graph.given)):
        return None
    free = [name for name in names if name not in graph.shapes]
    found = Keys(_key(free, ROWS, "the number of a row"), _key(free, STEPS, "the time of a step"))
    return found if found.names else None


def _key(names: list[str], words: tuple[str, ...], what: str) -> str | None:
    if words[0] in names:
        return words[0]
    found = [name for name in names if name.lower() in words] or [name for name in names if words is ROWS and _is_id(name)]
    if len(found) > 1:
        raise ValueError(f"its columns {' and '.join(map(repr, found))} look like {what}. Call the one that is {words[0]!r}, and drop the others")
    return found[0] if found else None


def is_row(name: str) -> bool:
    """Whether a column of this name numbers the rows."""
    return name.lower() in ROWS or _is_id(name)


def _is_id(name: str) -> bool:
    """``patient_id``, ``patientId`` and ``Patient ID`` are ids."""
    return re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())[-1] == "id"


@dataclass(frozen=True)
class Lines:
    """Which lines of a table are the steps of which row, and how the table numbers both."""

    order: np.ndarray  # the lines, by row and step
    starts: np.ndarray  # where among them a row begins
    rows: np.ndarray  # the rows' own numbers
    begins: np.ndarray  # the number of every row's first step,
    spacing: float  # and what lies between two of them
    keys: Keys

    def sequences(self, values: np.ndarray) -> Any:
        """What each row has at its steps: one array where all are of one length, otherwise a list."""
        rows = np.split(values[self.order], self.starts[1:])
        return np.stack(rows) if len({len(row) for row in rows}) == 1 else rows

    def constants(self, name: str, values: np.ndarray) -> np.ndarray:
        """What each row has at all of its steps."""
        ordered = values[self.order]
        found = ordered[self.starts]
        lengths = np.diff([*self.starts, len(ordered)])
        again = np.repeat(found, lengths, 0)
        differs = ((ordered != again) & ~(np.isnan(ordered) & np.isnan(again))).reshape(len(ordered), -1).any(1)
        if differs.any():
            row = self.rows[np.repeat(np.arange(len(lengths)), lengths)[differs.argmax()]]
            raise ValueError(f"{name} has no time, but changes within row {row}. Repeat a row's value on each of its lines")
        return found

    def numbers(self, rows: np.ndarray, steps: np.ndarray) -> list[str]:
        """How the table writes these rows and steps: what stands before a line's other cells."""
        times = self.begins[rows] + self.spacing * steps
        parts = [self.rows[rows].tolist()] * (self.keys.row is not None) + [[f"{time:.15g}" for time in times]] * (self.keys.step is not None)
        return ["".join(f"{number}," for number in line) for line in zip(*parts, strict=True)] if parts else [""] * len(rows)

    @property
    def span(self) -> str:
        """From when to when the steps are, in the table's own numbers."""
        lengths = np.diff([*self.starts, len(self.order)])
        last = self.begins + self.spacing * (lengths - 1)
        return f"{self.keys.step} {self.begins.min():.15g} to {last.max():.15g}" if self.keys.step else ""


def lines_of(values: np.ndarray, names: Sequence[str] | None, keys: Keys, numbers_of_lines: np.ndarray | None = None) -> Lines:
    """The lines of a table by row and step; the steps of each row must be complete. ``numbers_of_lines`` are those in the file, for messages."""
    numbers = [_column(values, names, key) for key in (keys.row, keys.step)]
    for key, column in zip((keys.row, keys.step), numbers, strict=True):
        whole = key in (keys.row, "step")
        if column is not None and (bad := ~(np.abs(column) < 2.0**53) | whole & (column != np.round(column))).any():
            line = int(bad.argmax())
            where = f"row {line} (from 0)" if numbers_of_lines is None else f"line {numbers_of_lines[line]}"
            raise ValueError(f"{where} has the {key} {column[line]}; {'rows and steps are whole' if whole else 'times are'} numbers")
    row = np.zeros(len(values)) if numbers[0] is None else numbers[0]
    alone = keys.row is not None and len(np.unique(row)) == len(row) > 1
    if alone and keys.step is None:
        raise ValueError(
            f"its column {keys.row!r} numbers the lines one by one, and no column numbers the steps. If a line is a whole row, drop {keys.row!r}; "
            "if it is a step, number the steps of each row 0, 1, 2, … in a column step"
        )
    if alone and keys.row != ROWS[0]:
        raise ValueError(
            f"its column {keys.row!r} numbers the lines one by one, so that each would be a sequence of one step. If they are the steps of one "
            f"sequence, drop {keys.row!r}; if sequences of one step are meant, call it {ROWS[0]!r}"
        )
    time = np.arange(len(values), dtype=float) if numbers[1] is None else numbers[1]
    order = np.lexsort((time, row))
    rows, starts, counts = np.unique(row[order], return_index=True, return_counts=True)
    rows, ordered = rows.astype(np.int64), time[order]
    if keys.step is None:
        return Lines(order, starts, rows, np.zeros(len(rows)), 1.0, keys)
    if keys.step != "step":
        spacing = _spacing(ordered, starts, rows, keys)
        return Lines(order, starts, rows, ordered[starts], spacing, keys)
    first = 0 if (ordered <= 0).any() else 1
    expected = np.arange(len(ordered)) - np.repeat(starts, counts) + first
    wrong = ordered != expected
    if wrong.any():
        at = wrong.argmax()
        number, step, wanted = rows[np.searchsorted(starts, at, "right") - 1], int(ordered[at]), expected[at]
        what = f"lacks step {wanted}" if step > wanted else f"has step {step} twice" if step >= first else f"begins with step {step}"
        raise ValueError(f"row {number} {what}. Number the steps of a row 0, 1, 2, …, and leave cells empty where nothing was observed")
    return Lines(order, starts, rows, np.full(len(rows), float(first)), 1.0, keys)


def _column(values: np.ndarray, names: Sequence[str] | None, key: str | None) -> np.ndarray | None:
    return None if key is None or names is None else np.asarray(values[:, list(names).index(key)], dtype=float)


def _spacing(time: np.ndarray, starts: np.ndarray, rows: np.ndarray, keys: Keys) -> float:
    """What lies between two steps, which must be the same everywhere."""
    inner = np.ones(len(time), bool)
    inner[starts] = False  # not from a row to the next
    between = np.diff(time, prepend=time[0])
    if not inner.any():
        return 1.0
    spacing = float(np.median(between[inner]))
    twice = inner & (between == 0)
    wrong = twice if twice.any() else inner & (np.abs(between - spacing) > ROUNDED * spacing)
    if wrong.any():
        at = int(wrong.argmax())
        where = f"row {rows[np.searchsorted(starts, at, 'right') - 1]}" if keys.row else "it"
        before, here = f"{time[at - 1]:.15g}", f"{time[at]:.15g}"
        if twice.any():
            more = "" if keys.row else ". If its lines are of several rows, number these in a column row"
            raise ValueError(f"{where} has the {keys.step} {here} twice{more}")
        raise ValueError(
            f"{where} goes from {keys.step} {before} to {here}, where steps are {spacing:.15g} apart. Add lines with empty cells for what lies "
            f"between, or number the steps 0, 1, 2, … in a column step, and drop {keys.step!r}"
        )
    exact = (between[inner] == spacing).all()
    return spacing if exact else float(between[inner].mean())


def refuse_numbering(values: np.ndarray, columns: Sequence[str], name: str) -> None:
    """Refuse columns, taken for the steps of a variable's sequences, of which one numbers the lines, their rows or their times."""
    if _named_after(name, columns) or values.shape[1] < 2:
        return
    for j, column in enumerate(columns):
        if what := _counting(values[:, j]) or _ordering(values[:, j]):
            raise ValueError(
                f"its column {column!r} {what}, so that it is no step of a sequence. If a line is a step, call that column step (or time, year, …) "
                f"where it numbers the steps, row (or id) where it numbers the sequences. If a line is a whole sequence, drop it; where it is data "
                f"all the same, name the columns {name}0, {name}1, …"
            )
    if name in columns:
        other = next(column for column in columns if column != name)
        raise ValueError(
            f"its columns {name!r} and {other!r} would be two steps of {name}. If a line is a step, drop {other!r}, or call it step where it numbers "
            f"the steps and row where it numbers the sequences. If a line is a whole sequence, name the columns {name}0, {name}1, …"
        )


def refuse_count(values: np.ndarray, columns: Sequence[str], name: str) -> None:
    """Refuse columns, taken for the vectors of a single sequence, of which one counts the lines."""
    for j, column in enumerate(columns if values.shape[1] > 1 and not _named_after(name, columns) else ()):
        if what := _counting(values[:, j]):
            raise ValueError(
                f"its column {column!r} {what}. If it numbers the steps, call it step (or time, year, …), and declare {name} with one number less; "
                f"where it is data all the same, name the columns {name}0, {name}1, …"
            )


def _named_after(name: str, columns: Sequence[str]) -> bool:
    """Whether the header says that these columns are the variable's own (``x0``, ``x1``, …), whatever they hold."""
    return all(re.fullmatch(rf"{re.escape(name)}[ _.\-]?\d+", column) for column in columns)


def _counting(column: np.ndarray) -> str | None:
    """What a column does, if it counts: from line to line, or again and again from its first value."""
    between = np.diff(column)
    step = float(np.median(np.abs(between))) if len(column) >= COUNTED else 0.0
    if not step > 0:  # constant, or not all known
        return None
    even = np.abs(np.abs(between) - step) <= ROUNDED * step
    if even.all() and ((between > 0).all() or (between < 0).all()):
        return f"counts the lines ({column[0]:.15g}, {column[1]:.15g}, …, {column[-1]:.15g})"
    again = (between < 0) & (column[1:] == column[0])
    if (again | (even & (between > 0))).all() and np.count_nonzero(~again) > np.count_nonzero(again) + 1:
        return f"counts again and again from {column[0]:.15g} ({', '.join(f'{value:.15g}' for value in column[:3])}, …)"
    return None


def _ordering(column: np.ndarray) -> str | None:
    """What a column does, if it orders the lines: it goes up (or down) all along, or has every whole number between two."""
    between = np.diff(column)
    if np.isnan(between).any() or len(column) < COUNTED:
        return None
    if (between >= 0).all() or (between <= 0).all():
        _, counts = np.unique(column, return_counts=True)
        orders = math.lgamma(len(column) + 1) - sum(math.lgamma(count + 1) for count in counts.tolist())  # the logarithm of how many there are
        return f"is in order ({column[0]:.15g}, {column[1]:.15g}, …, {column[-1]:.15g})" if orders > SORTED else None
    whole = np.sort(column)
    if (whole == np.round(whole)).all() and (np.diff(whole) == 1).all():
        return f"has every number from {whole[0]:.15g} to {whole[-1]:.15g} once"
    return None
