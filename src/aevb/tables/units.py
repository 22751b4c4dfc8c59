"""Warn of new cells in another unit than the cells that a schema was read from."""

from __future__ import annotations

import math
import warnings

import numpy as np

from aevb.runtime.checked_files import DataWarning
from aevb.tables.columns import Column, date_text

FAR = 8.0  # standard deviations between the median of new cells and the recorded centre
ENOUGH = 5  # cells from which their share outside the recorded range says something
OUTSIDE = 0.25  # share of cells outside the recorded range from which a factor is looked for,
LEFT = 0.1  # and the largest share that it may leave outside
FACTORS = (2.2046, 2.54, 3.2808, 12.0, 24.0, 25.4, 60.0, 3600.0)  # of usual units, beside 10ⁿ


def warn_of_unit(column: Column, values: np.ndarray, dtype: str) -> None:
    """Warn if the new cells lie far from those that the schema was read from.

    Rows of the schema's own table never do: either the median of the new cells lies outside the
    recorded range, or a quarter of them do and a usual factor between units explains it. Distances
    are those of logarithms if all cells are positive. Numbers of the type ``dtype`` for texts in
    percent are warned of, too, if all lie between 0 and 1: they may be shares.
    """
    known = values[~np.isnan(values)]
    if column.listed or not len(known) or column.facts.low is None:
        return
    if dtype != "String" and _are_shares(column, known):
        assert column.facts.amounts is not None
        warnings.warn(
            f"Column {column.name!r} had texts in percent such as {column.facts.amounts.example!r} "
            f"when the schema was read, and now holds numbers from 0 to 1 ({known[0]:g}), which "
            f"are read as percent, too. If they are shares, multiply them by 100.",
            DataWarning,
            stacklevel=5,
        )
        return
    factor = None if column.kind == "date" else _factor(column, known)
    if not _is_far(column, known) and (
        factor is None
        or len(known) < ENOUGH
        or _outside(column, known) <= OUTSIDE
        or _outside(column, known / factor) > LEFT
    ):
        return
    low, high = column.facts.low, column.facts.high or 0.0
    fix, told = "Check it", ""
    shown_cell = date_text if column.kind == "date" else _short
    if column.kind in ("real", "positive"):
        shown = "factor" if factor is None else f"{factor:.4g}"
        fix = f"Convert it, or use schema.rescaled({column.name!r}, {shown})"
    if factor is not None:
        times = f"{max(factor, 1 / factor):.3g}"
        told = f" Its cells are about {times} times {'larger' if factor > 1 else 'smaller'}."
    warnings.warn(
        f"Column {column.name!r} lies far from the cells that the schema was read from: its "
        f"median is {shown_cell(float(np.median(known)))}, and they were "
        f"{shown_cell(low)} to {shown_cell(high)}.{told} Has it another "
        f"unit? {fix}.",
        DataWarning,
        stacklevel=5,
    )


def _short(cell: float) -> str:
    return f"{cell:g}"


def _are_shares(column: Column, known: np.ndarray) -> bool:
    """Whether numbers of a column in percent all lie in [0, 1], and not all recorded ones do."""
    amounts, high = column.facts.amounts, column.facts.high or 0.0
    if amounts is None or amounts.unit != "%" or high <= 1:
        return False
    return bool(((known >= 0) & (known <= 1)).all() and known.any())


def _is_far(column: Column, known: np.ndarray) -> bool:
    """Whether the median lies outside the recorded range by more than it, or by ``FAR``."""
    facts, centre = column.facts, float(np.median(known))
    low, high, mean, spread = facts.low or 0.0, facts.high or 0.0, facts.mean, facts.spread
    if facts.log_mean is not None and low > 0 and column.kind != "date" and centre > 0:
        low, high, centre = math.log(low), math.log(high), math.log(centre)
        mean, spread = facts.log_mean, facts.log_spread
    beyond = max(low - centre, centre - high)
    # The next dates of a short period lie outside it by more than its length.
    return beyond > 0 and (
        (beyond > high - low and column.kind != "date")
        or abs(centre - (mean or 0.0)) > FAR * (spread or 0.0)
    )


def _outside(column: Column, known: np.ndarray) -> float:
    """The share of cells outside the recorded range."""
    return float(((known < column.facts.low) | (known > column.facts.high)).mean())


def _factor(column: Column, known: np.ndarray) -> float | None:
    """The factor between units, a power of ten if possible, that explains the median of cells."""
    facts, centre = column.facts, float(np.median(known))
    if facts.log_mean is not None and not facts.zeros:
        usual, near = math.exp(facts.log_mean), facts.log_spread or 0.0
    else:
        usual, near = facts.mean or 0.0, (facts.spread or 0.0) / abs(facts.mean or math.inf)
    if usual == 0 or centre / usual <= 0:
        return None
    ratio = math.log(centre / usual)
    ten = round(ratio / math.log(10))
    if ten and abs(ratio - ten * math.log(10)) <= near:
        return 10.0**ten
    factors = [factor**sign for factor in FACTORS for sign in (-1, 1)]
    best = min(factors, key=lambda factor: abs(ratio - math.log(factor)))
    return best if abs(ratio - math.log(best)) <= near else None
