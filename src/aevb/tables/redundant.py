"""Warn of columns that repeat another one: equal, a linear function, or level for level."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aevb.runtime.checked_files import DataWarning
from aevb.tables.columns import Column
from aevb.tables.kinds import MOST_LEVELS

ROWS = 1000  # at most, that are compared
ENOUGH = 20  # rows that differ from the most frequent cells, without which nothing is said
SHARE = 0.99  # of these rows that a relation must hold in
ALIKE = 0.9  # rank correlation below which two columns are not compared further
NEAR = 1e-3  # distance from a line that rounding explains, in median absolute deviations
TESTED, SHOWN = 5000, 5  # pairs of columns


@dataclass(frozen=True)
class Repeated:
    """A column that repeats another one in ``rows`` of ``known`` rows, and how."""

    name: str
    of: str
    how: str
    rows: int
    known: int

    def __str__(self) -> str:
        where = "" if self.rows == self.known else f" in {self.rows:,} of {self.known:,} rows"
        return f"{self.name!r} {self.how}{where}"


def some_rows(rows: int) -> np.ndarray:
    """The rows of a table that are compared."""
    return np.unique(np.linspace(0, rows - 1, min(rows, ROWS)).astype(int))


def warn_of_repeated(columns: Sequence[Column], cells: Sequence[np.ndarray]) -> None:
    """Warn if columns repeat others; ``cells`` are those of some rows, as ``Schema.cells``."""
    found = repeated(columns, cells)
    if not found:
        return
    several = len(found) > 1
    shown = "; ".join(map(str, found[:SHOWN]))
    more = f"; and {len(found) - SHOWN} more columns" if len(found) > SHOWN else ""
    them = "them" if several else "it"
    text = (
        f"Column{'s' * several}: {shown}{more}. Clusters count {them} twice, and the density may "
        f"have no limit. Leave {them} out: "
    )
    names = [one.name for one in found[:SHOWN]]
    warning = DataWarning(f"{text}schema.without({', '.join(map(repr, names))}).")
    warning.for_commands = f"{text}--without {','.join(names)}."
    warnings.warn(warning, stacklevel=3)


def repeated(columns: Sequence[Column], cells: Sequence[np.ndarray]) -> list[Repeated]:
    """The columns that repeat an earlier one, each with the first one that it repeats."""
    numbers: list[tuple[Column, np.ndarray]] = []
    levels: list[tuple[Column, np.ndarray]] = []
    for column, values in zip(columns, cells, strict=True):
        if column.listed:  # positions
            levels.append((column, values))
        if column.facts.low is not None:
            if column.listed:
                each = np.array([*column.levels, np.nan], dtype=float)
                values = each[np.where(np.isnan(values), -1, values).astype(int)]
            numbers.append((column, values))
    found: dict[str, Repeated] = {}
    for group, relation in ((numbers, _linear), (levels, _same_levels)):
        for i, j in _alike([values for _, values in group], ordered=relation is _linear):
            (first, a), (second, b) = group[i], group[j]
            if first.name in found or second.name in found:
                continue
            both = ~(np.isnan(a) | np.isnan(b))
            told = relation(first, second, a[both], b[both])
            if told is not None:
                found[second.name] = told
    return [found[column.name] for column in columns if column.name in found]


def _alike(values: Sequence[np.ndarray], *, ordered: bool) -> list[tuple[int, int]]:
    """Pairs of columns that may repeat each other: those with a high rank correlation."""
    if len(values) < 2:
        return []
    if not ordered:
        return [(i, j) for j in range(len(values)) for i in range(j)][:TESTED]
    ranks = np.column_stack([_ranks(column) for column in values])
    known = ~np.isnan(ranks)
    ranks = np.where(known, ranks, 0.0)
    squares = (ranks**2).T @ known
    scale = np.sqrt(squares * squares.T)
    alike = np.abs(ranks.T @ ranks) >= ALIKE * np.where(scale > 0, scale, np.inf)
    return [(i, j) for j, i in np.argwhere(np.tril(alike, -1)).tolist()][:TESTED]


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks around 0, where equal cells share their mean; NaN stays NaN."""
    known = ~np.isnan(values)
    _, which, times = np.unique(values[known], return_inverse=True, return_counts=True)
    found = np.full(len(values), np.nan)
    found[known] = (np.cumsum(times) - times / 2)[which] - known.sum() / 2
    return found


def _linear(first: Column, second: Column, a: np.ndarray, b: np.ndarray) -> Repeated | None:
    """Whether b is a line of a in nearly all rows, as written or as the model reads them."""
    for x, y, written in (
        (a, b, True),
        (first.standardise(a), second.standardise(b), False),
    ):
        rest = _unusual(x, y)
        if rest.sum() < ENOUGH:
            return None
        order, half = np.argsort(x), len(x) // 2
        low, high = order[:half], order[half : 2 * half]
        apart = x[high] - x[low]
        if not (apart > 0).any():
            return None
        slope = float(np.median((y[high] - y[low])[apart > 0] / apart[apart > 0]))
        start = float(np.median(y - slope * x))
        off = np.abs(y - slope * x - start)
        middle = float(np.median(y[rest]))
        spread = float(np.median(np.abs(y[rest] - middle)))
        near = off <= NEAR * spread + 1e-9 * abs(middle)
        if slope and near[rest].mean() >= SHARE:
            how = f"is a function of {first.name!r}"
            if written and np.allclose(y[near], x[near], rtol=1e-9, atol=0):
                how = f"equals {first.name!r}"
            elif written:
                start *= abs(start) > NEAR * spread
                how = f"is {_line(first, second, slope, start)}"
            return Repeated(second.name, first.name, how, int(near.sum()), len(x))
    return None


def _line(first: Column, second: Column, slope: float, start: float) -> str:
    """Write slope · first + start; dates are days since 1970-01-01."""
    times = "" if abs(slope - 1) < 1e-9 else f"{slope:.4g} · "
    name = repr(first.name)
    if first.kind == "date" and second.kind != "date":
        return f"{times}the days of {name} since {_day(-start / slope)}"
    if second.kind == "date" and first.kind != "date":
        return f"{_day(start)} + {times}{name} days"
    days = " days" * (first.kind == "date")
    if abs(slope + 1) < 1e-9:
        return f"{start:.4g}{days} - {name}" if start else f"-{name}"
    plus = f" {'-' if start < 0 else '+'} {abs(start):.4g}{days}" if start else ""
    return f"{times}{name}{plus}"


def _day(days: float) -> str:
    return str(np.datetime64(round(days), "D"))


def _same_levels(first: Column, second: Column, a: np.ndarray, b: np.ndarray) -> Repeated | None:
    """Whether the levels of two columns belong together one to one, in nearly all rows."""
    if len(a) < ENOUGH:
        return None
    x, y = a.astype(int), b.astype(int)
    if (x.max() + 1) * (y.max() + 1) > MOST_LEVELS**2:
        x, y = (np.unique(each, return_inverse=True)[1] for each in (x, y))
    wide = y.max() + 1
    times = np.bincount(x * wide + y, minlength=(x.max() + 1) * wide).reshape(-1, wide)
    most, usual = times.argmax(1), (times.sum(1).argmax(), times.sum(0).argmax())
    # Pairs of levels that are each the most frequent one beside the other.
    pairs = [(i, j) for i, j in enumerate(most.tolist()) if times[:, j].argmax() == i]
    same = sum(times[pair] for pair in pairs)
    rest, alike = len(x) - times[usual], same - times[usual] * (usual in pairs)
    if rest < ENOUGH or alike < SHARE * rest:
        return None
    equal = first.levels == second.levels and int((a == b).sum()) >= same
    how = f"equals {first.name!r}" if equal else f"says the same as {first.name!r}"
    return Repeated(second.name, first.name, how, int(same), len(a))


def _unusual(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rows in which not both cells are the most frequent ones of their columns."""
    found = np.zeros(len(a), bool)
    for values in (a, b):
        if len(values):
            distinct, times = np.unique(values, return_counts=True)
            found |= values != distinct[times.argmax()]
    return found
