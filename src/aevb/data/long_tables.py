"""Long tables, with one line per step: find the row and step columns, and the lines of each row.

Samples and codes of sequences are written in this form, with the columns ``row`` and ``step``. In
other files these columns may have other names, such as id or year. A table without them, in which
every line holds one step of every variable, is one sequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from aevb.data.sequence_index import NO_SPACING, Clock, Key
from aevb.data.time_steps import (
    MOST,
    ROUNDED,
    SUBTRACT,
    Spacing,
    UnevenError,
    date_format,
    spacing_of,
)
from aevb.declare.graph import Graph

ROWS = ("row", "id", "series", "sequence", "subject", "patient", "unit")
STEPS = (
    "step",
    "t",
    "time",
    "timestamp",
    "date",
    "year",
    "quarter",
    "month",
    "week",
    "day",
    "hour",
    "minute",
    "second",
    "period",
)
COUNTED = 5  # fewest lines for an evenly rising column to count as a line number
# A column is sorted on purpose if its values have at least this many orders (as a logarithm).
SORTED = math.log(20_000)
ADD = (
    "If nothing was observed between, add the missing steps (--gaps missing, or "
    'aevb.sequences(frame, gaps="missing"))'
)


@dataclass(frozen=True)
class Keys:
    """The columns of a table that number its rows and its steps; None if it has no such column."""

    row: str | None
    step: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.row, self.step) if name is not None)


def keys_of(names: Sequence[str] | None, graph: Graph) -> Keys | None:
    """Find the columns that number rows and steps, by name.

    None for a table without such columns, or for a model without time.
    """
    if names is None or not any(graph.timed[name] for name in (*graph.observed, *graph.given)):
        return None
    free = [name for name in names if name not in graph.shapes]
    found = Keys(row_among(free), step_among(free))
    return found if found.names else None


def row_among(names: list[str]) -> str | None:
    """Find the column that numbers the rows among these names; None if there is none."""
    return _key(names, ROWS, "the number of a row")


def step_among(names: list[str]) -> str | None:
    """Find the column that has the times of the steps; None if there is none."""
    return _key(names, STEPS, "the time of a step")


def _key(names: list[str], words: tuple[str, ...], what: str) -> str | None:
    if words[0] in names:
        return words[0]
    found = [name for name in names if name.lower() in words] or [
        name for name in names if words is ROWS and _is_id(name)
    ]
    if len(found) > 1:
        raise ValueError(
            f"its columns {' and '.join(map(repr, found))} look like {what}. Rename the right one "
            f"to {words[0]!r}, and drop the others"
        )
    return found[0] if found else None


def _is_id(name: str) -> bool:
    """Return whether a name ends in the word id: ``patient_id``, ``patientId``, ``Patient ID``."""
    return re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())[-1] == "id"


@dataclass(frozen=True)
class Lines:
    """The lines of each row of a long table, and how the table numbers rows and steps."""

    order: np.ndarray  # the indices of the lines, sorted by row and step; −1 for added steps
    starts: np.ndarray  # where each row begins in that order
    rows: np.ndarray  # the rows' numbers or words in the table
    begins: np.ndarray  # the number (time) of every row's first step,
    spacing: Spacing | None  # and the difference between two steps; None if every row has one
    keys: Keys
    clock: Clock = field(default_factory=lambda: Clock("number"))  # how the table writes times

    def sequences(self, values: np.ndarray) -> Any:
        """Return the values of each row at its steps.

        The result is an array if all lengths are equal, else a list.
        """
        ordered = values[self.order]
        if (added := self.order < 0).any():  # NaN is missing, and so is the label −1
            ordered[added] = np.nan if ordered.dtype.kind == "f" else -1
        rows = np.split(ordered, self.starts[1:])
        return np.stack(rows) if len({len(row) for row in rows}) == 1 else rows

    def constants(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the value of each row of a variable without time.

        It must be equal on all lines of a row.
        """
        here = self.order >= 0
        ordered, found = values[self.order[here]], values[self.order[self.starts]]
        lengths = np.add.reduceat(here, self.starts, dtype=np.int64)
        again = np.repeat(found, lengths, 0)
        differs = (
            ((ordered != again) & ~(np.isnan(ordered) & np.isnan(again)))
            .reshape(len(ordered), -1)
            .any(1)
        )
        if differs.any():
            row = self.rows[np.repeat(np.arange(len(lengths)), lengths)[differs.argmax()]]
            raise ValueError(
                f"{name} has no time, but changes within row {row}. Repeat a row's value on each "
                f"of its lines"
            )
        return found

    def filled(self, positions: Sequence[np.ndarray]) -> Lines:
        """Add the steps between the first and the last step of each row.

        ``positions`` holds the position of the lines of each row, counted in steps from 0.
        """
        parts = []
        for lines, at in zip(np.split(self.order, self.starts[1:]), positions, strict=True):
            parts.append(np.full(at[-1] + 1, -1))
            parts[-1][at] = lines
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        return replace(self, order=np.concatenate(parts), starts=starts)

    @property
    def nearest(self) -> np.ndarray:
        """The order with the line before an added step in its place."""
        places = np.where(self.order < 0, 0, np.arange(len(self.order)))
        return self.order[np.maximum.accumulate(places)]

    def numbers(self, rows: np.ndarray, steps: np.ndarray) -> list[str]:
        """Format these rows and steps as the first cells of a line, numbered as in the table."""
        parts = [[_quoted(str(row)) for row in self.rows.tolist()]] * (self.keys.row is not None)
        parts = [[part[row] for row in rows.tolist()] for part in parts]
        if self.keys.step is not None:
            parts.append(self.clock.cells(self.times(rows, steps)))
        return (
            ["".join(f"{cell}," for cell in line) for line in zip(*parts, strict=True)]
            if parts
            else [""] * len(rows)
        )

    def times(self, rows: Any, steps: np.ndarray) -> np.ndarray:
        """Return the times of these rows and steps, counted from 0."""
        if self.spacing is not None:
            return self.spacing.after(self.begins[rows], steps)
        if (steps != 0).any():
            raise ValueError(NO_SPACING)
        return np.asarray(self.begins[rows])

    @property
    def span(self) -> str:
        """The first and last time in the table, as text; empty without a step column."""
        lengths = np.diff([*self.starts, len(self.order)])
        last = self.times(np.arange(len(lengths)), lengths - 1)
        return (
            f"{self.keys.step} {self.clock.text(self.begins.min())} to "
            f"{self.clock.text(last.max())}"
            if self.keys.step
            else ""
        )


def lines_of(
    values: np.ndarray,
    names: Sequence[str] | None,
    keys: Keys,
    numbers_of_lines: np.ndarray | None = None,
    written: Mapping[str, Key] = MappingProxyType({}),
    fill: bool = False,
) -> Lines:
    """Sort the lines of a table by row and step; refuse a row with missing or repeated steps.

    ``numbers_of_lines`` are the line numbers in the file, for messages. ``written`` holds the ids
    that are words and the times that are dates; the table has the numbers of the ids instead. With
    ``fill``, steps that are missing between two times of a row are added.
    """
    numbers = [_column(values, names, key) for key in (keys.row, keys.step)]
    for key, column in zip((keys.row, keys.step), numbers, strict=True):
        whole = key in (keys.row, "step")
        if (
            column is not None
            and (bad := ~(np.abs(column) < 2.0**53) | whole & (column != np.round(column))).any()
        ):
            line = int(bad.argmax())
            where = (
                f"row {line} (from 0)"
                if numbers_of_lines is None
                else f"line {numbers_of_lines[line]}"
            )
            raise ValueError(
                f"{where} has the {key} {column[line]}; "
                f"{'rows and steps are whole' if whole else 'times are'} numbers"
            )
    row = np.zeros(len(values)) if numbers[0] is None else numbers[0]
    alone = keys.row is not None and len(np.unique(row)) == len(row) > 1
    if alone and keys.step is None:
        raise ValueError(
            f"its column {keys.row!r} numbers the lines one by one, and no column numbers the "
            f"steps. If a line is a whole row, drop {keys.row!r}; "
            "if it is a step, number the steps of each row 0, 1, 2, … in a column step"
        )
    if alone and keys.row != ROWS[0]:
        raise ValueError(
            f"its column {keys.row!r} numbers the lines one by one, so each line would be a "
            f"sequence of one step. If the lines are the steps of one sequence, drop "
            f"{keys.row!r}; if you mean sequences of one step, rename it to {ROWS[0]!r}"
        )
    time = np.arange(len(values), dtype=float) if numbers[1] is None else numbers[1]
    dates = written.get(keys.step or "")
    if dates is not None:
        time = (dates.values if dates.utc is None else dates.utc).astype(np.int64)
    order = np.lexsort((time, row))
    rows, starts, counts = np.unique(row[order], return_index=True, return_counts=True)
    rows, ordered = rows.astype(np.int64), time[order]
    if keys.row is not None and keys.row in written:
        rows = written[keys.row].values[order[starts]]
    one = Spacing("number", 1.0)
    if keys.step is None:
        return Lines(order, starts, rows, np.zeros(len(rows)), one, keys)
    if dates is not None:
        return _dated(dates, order, starts, rows, keys, fill)
    if keys.step != "step":
        if date_format(ordered) is not None:
            raise ValueError(
                f"its times ({keys.step}) are dates written as whole numbers, "
                f"{ordered.min():.15g} to {ordered.max():.15g}, and numbers have other distances "
                f"than dates. Write them as dates, such as 2010-12 or 2010-12-31. {SUBTRACT}"
            )
        if fill and not (np.diff(ordered)[np.diff(row[order]) == 0] == 0).any():
            return _filled_numbers(ordered, Lines(order, starts, rows, ordered[starts], one, keys))
        spacing = Spacing("number", _spacing(ordered, starts, rows, keys))
        return Lines(order, starts, rows, ordered[starts], spacing, keys)
    first = 0 if (ordered <= 0).any() else 1
    expected = np.arange(len(ordered)) - np.repeat(starts, counts) + first
    found = Lines(order, starts, rows, np.full(len(rows), float(first)), one, keys)
    wrong, begins = ordered != expected, np.isin(np.arange(len(ordered)), starts)
    twice = (np.diff(ordered, prepend=np.nan) == 0) & ~begins
    if fill and not (twice | wrong & begins).any():
        return _filled(found, np.split((ordered - first).astype(np.int64), starts[1:]))
    if wrong.any():
        at = int((twice if twice.any() else wrong).argmax())
        number, step, wanted = (
            rows[np.searchsorted(starts, at, "right") - 1],
            int(ordered[at]),
            expected[at],
        )
        what = (
            f"has step {step} twice"
            if twice[at]
            else f"lacks step {wanted}"
            if step > wanted
            else f"begins with step {step}"
        )
        fix = "Number" if (twice | begins)[at] else f"{ADD}, or number"
        raise ValueError(
            f"row {number} {what}. {fix} the steps of a row 0, 1, 2, …, and leave cells empty "
            f"where nothing was observed"
        )
    return found


def _quoted(cell: str) -> str:
    """Write a cell of a text table, in quotes if it needs them."""
    if not re.search(r'[,"\r\n]', cell):
        return cell
    doubled = cell.replace('"', '""')
    return f'"{doubled}"'


def _filled_numbers(ordered: np.ndarray, lines: Lines) -> Lines:
    """Add the missing steps of a table whose times are rising numbers."""
    try:
        spacing, positions = spacing_of(np.split(ordered, lines.starts[1:]))
    except UnevenError as error:
        raise ValueError(
            f"some of its steps ({lines.keys.step}) are {error} apart, but all steps of a model "
            f"have one length. Round the times, or number the steps 0, 1, 2, … in a column step, "
            f"and drop {lines.keys.step!r}"
        ) from None
    return _filled(replace(lines, spacing=spacing), positions)


def _filled(lines: Lines, positions: Sequence[np.ndarray]) -> Lines:
    """Add the missing steps, unless there are too many of them."""
    count = len(lines.order)
    added = sum(int(row[-1]) + 1 for row in positions) - count
    if added > MOST * count:
        raise ValueError(
            f"filling its holes would add {added:,} steps to {count:,} lines, because some lines "
            f"are only {lines.spacing} apart. Round the times ({lines.keys.step})"
        )
    return lines.filled(positions)


def _dated(
    dates: Key,
    order: np.ndarray,
    starts: np.ndarray,
    rows: np.ndarray,
    keys: Keys,
    fill: bool,
) -> Lines:
    """Return the lines of a table whose times are dates, which must be evenly spaced."""
    uneven = ""
    number = f"or number the steps 0, 1, 2, … in a column step, and drop {keys.step!r}"
    for times, clock, _ in dates.clocks(order, starts):
        for row, each in zip(rows, times, strict=True):
            where = f"row {row}" if keys.row else "it"
            if (twice := np.diff(each).astype(np.int64) == 0).any():
                raise ValueError(_twice(where, keys, clock.text(each[twice.argmax()])))
        try:
            spacing, positions = spacing_of(times)
        except UnevenError as error:
            uneven = uneven or (
                f"some of its steps ({keys.step}) are {error} apart, but all steps of a model have "
                f"one length. Round the times, {number}"
            )
            continue
        begins = np.array([each[0] for each in times])
        found = Lines(order, starts, rows, begins, spacing, keys, clock)
        if fill:
            return _filled(found, positions)
        for row, each, at in zip(rows, times, positions, strict=True):
            if (hole := np.diff(at) > 1).any():
                before, here = (clock.text(time) for time in each[hole.argmax() :][:2])
                raise ValueError(
                    f"{f'row {row}' if keys.row else 'it'} goes from {keys.step} {before} to "
                    f"{here}, where steps are {spacing} apart. {ADD}, {number}"
                )
        return found
    raise ValueError(uneven)


def _twice(where: str, keys: Keys, time: str) -> str:
    """The error message for a time that occurs twice in a row."""
    more = (
        "" if keys.row
        else ". If its lines belong to several rows, number the rows in a column row"
    )  # fmt: skip
    return f"{where} has the {keys.step} {time} twice{more}"


def _column(values: np.ndarray, names: Sequence[str] | None, key: str | None) -> np.ndarray | None:
    return (
        None
        if key is None or names is None
        else np.asarray(values[:, list(names).index(key)], dtype=float)
    )


def _spacing(time: np.ndarray, starts: np.ndarray, rows: np.ndarray, keys: Keys) -> float:
    """Return the time between two steps, which must be the same everywhere."""
    inner = np.ones(len(time), bool)
    inner[starts] = False  # skip the difference from one row to the next
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
            raise ValueError(_twice(where, keys, here))
        raise ValueError(
            f"{where} goes from {keys.step} {before} to {here}, where steps are {spacing:.15g} "
            f"apart. {ADD}, or number the steps 0, 1, 2, … in a column step, and drop "
            f"{keys.step!r}"
        )
    exact = (between[inner] == spacing).all()
    return spacing if exact else float(between[inner].mean())


def refuse_numbering(values: np.ndarray, columns: Sequence[str], name: str) -> None:
    """Refuse a table with one column per step if a column numbers lines, rows or times."""
    if _named_after(name, columns) or values.shape[1] < 2:
        return
    for j, column in enumerate(columns):
        if what := _counting(values[:, j]) or _ordering(values[:, j]):
            raise ValueError(
                f"its column {column!r} {what}, so it is not a step of a sequence. If a line is a "
                f"step, rename it to step (or time, year, …) if it numbers the steps, or to row "
                f"(or id) if it numbers the sequences. If a line is a whole sequence, drop the "
                f"column; if it is data, name the columns {name}0, {name}1, …"
            )
    if name in columns:
        other = next(column for column in columns if column != name)
        raise ValueError(
            f"its columns {name!r} and {other!r} would be two steps of {name}. If a line is a "
            f"step, drop {other!r}, or rename it to step if it numbers the steps and to row if it "
            f"numbers the sequences. If a line is a whole sequence, name the columns {name}0, "
            f"{name}1, …"
        )


def refuse_count(values: np.ndarray, columns: Sequence[str], name: str) -> None:
    """Refuse a table that is a single sequence if one of its columns counts the lines."""
    for j, column in enumerate(
        columns if values.shape[1] > 1 and not _named_after(name, columns) else ()
    ):
        if what := _counting(values[:, j]):
            raise ValueError(
                f"its column {column!r} {what}. If it numbers the steps, rename it to step (or "
                f"time, year, …), and declare {name} one smaller; if it is data, name the columns "
                f"{name}0, {name}1, …"
            )


def refuse_count_in_frame(columns: Mapping[str, np.ndarray]) -> None:
    """Refuse a frame without ids and times if one of several columns counts its lines."""
    names = list(columns)
    stems = {re.sub(r"\d+$", "", name) for name in names}
    if len(names) < 2 or (len(stems) == 1 and stems.isdisjoint(names)):  # x0, x1, …
        return
    for name, column in columns.items():
        if what := _counting(column):
            raise ValueError(
                f"The column {name!r} {what}. If it numbers the steps, name it, and the column "
                f"that says which sequence a line belongs to, if there are several: "
                f"aevb.sequences(frame, id=…, time={name!r}). If it is data, name the columns x0, "
                f"x1, …."
            )


def _named_after(name: str, columns: Sequence[str]) -> bool:
    """Return whether the header names these columns after the variable (``x0``, ``x1``, …)."""
    return all(re.fullmatch(rf"{re.escape(name)}[ _.\-]?\d+", column) for column in columns)


def _counting(column: np.ndarray) -> str | None:
    """Describe a column that counts, else return None.

    It counts from line to line, or repeatedly from its first value.
    """
    between = np.diff(column)
    step = float(np.median(np.abs(between))) if len(column) >= COUNTED else 0.0
    if not step > 0:  # constant, or with missing entries
        return None
    even = np.abs(np.abs(between) - step) <= ROUNDED * step
    if even.all() and ((between > 0).all() or (between < 0).all()):
        return f"counts the lines ({column[0]:.15g}, {column[1]:.15g}, …, {column[-1]:.15g})"
    again = (between < 0) & (column[1:] == column[0])
    if (again | (even & (between > 0))).all() and np.count_nonzero(~again) > np.count_nonzero(
        again
    ) + 1:
        return (
            f"counts repeatedly from {column[0]:.15g} "
            f"({', '.join(f'{value:.15g}' for value in column[:3])}, …)"
        )
    return None


def _ordering(column: np.ndarray) -> str | None:
    """Describe a column that orders the lines; else None.

    It rises or falls monotonically, or holds every whole number of a range once.
    """
    between = np.diff(column)
    if np.isnan(between).any() or len(column) < COUNTED:
        return None
    if (between >= 0).all() or (between <= 0).all():
        _, counts = np.unique(column, return_counts=True)
        # The logarithm of the number of orders.
        orders = math.lgamma(len(column) + 1) - sum(
            math.lgamma(count + 1) for count in counts.tolist()
        )
        return (
            f"is in order ({column[0]:.15g}, {column[1]:.15g}, …, {column[-1]:.15g})"
            if orders > SORTED
            else None
        )
    whole = np.sort(column)
    if (whole == np.round(whole)).all() and (np.diff(whole) == 1).all():
        return f"has every number from {whole[0]:.15g} to {whole[-1]:.15g} once"
    return None
