"""Warn of columns that spoil clusters and densities without being wrong.

They are far cells and heavy tails, numbers that name rows, texts with mostly rare levels, and
columns that follow from several others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from aevb.runtime.checked_files import DataWarning
from aevb.tables.columns import Column, date_text
from aevb.tables.far_cells import ENOUGH, FAR, FEW, distances
from aevb.tables.kinds import SPIKE, by_itself

WIDER = 2.0  # times the standard deviation without far cells, from which they are told
ROWS = 1000  # at most, in which a column is compared with others
SCATTERED = 1.5  # the largest distance of far cells, per their median, from which they are a tail
TAIL = 0.1  # the largest share of cells that are a tail; more are a group
EVEN = 0.05  # largest distance between the cells of names of rows and even ones, per their range
RARE, MANY = 5, 50  # cells per level, and levels, of a text with mostly rare levels
EXACT = 1e-3  # standard deviations of what a column has apart from others that it follows from
WIDE = 100  # columns
SHOWN = 5  # columns that a warning names


def warn_of_doubtful(
    columns: Sequence[Column], cells: Sequence[np.ndarray], *, rows: bool = True
) -> None:
    """Warn of columns; ``cells`` are as those of ``Schema.cells``.

    ``rows`` says that they are the rows of the table, whose numbers a message may name.
    """
    notes = {}
    for column, values in zip(columns, cells, strict=True):
        known = ~np.isnan(values)
        if known.sum() >= ENOUGH:
            told = _far_text(column, values, rows=rows) or _name_text(column, values[known])
            told = told or _rare_text(column, int(known.sum()))
            if told:
                notes[column.name] = told
    notes |= _following(columns, cells)
    if not notes:
        return
    shown = list(notes)[:SHOWN]
    more = f" {len(notes) - SHOWN} more columns are like these." if len(notes) > SHOWN else ""
    text = " ".join(notes[name] for name in shown) + more
    several = len(shown) > 1
    leave = f" To leave {'them' if several else 'it'} out: "
    warning = DataWarning(f"{text}{leave}schema.without({', '.join(map(repr, shown))}).")
    warning.for_commands = f"{text}{leave}aevb train … --without {','.join(shown)}."
    warnings.warn(warning, stacklevel=3)


def _far_text(column: Column, values: np.ndarray, *, rows: bool) -> str:
    """Name the cells far from all others, or a heavy tail; "" without them."""
    if column.listed or column.facts.spike_share >= SPIKE:
        return ""
    known = np.flatnonzero(~np.isnan(values))
    standard = column.standardise(values[known])
    apart = distances(standard)
    far = np.flatnonzero(apart > FAR)
    if not len(far):
        return ""
    name, first = column.name, int(far[apart[far].argmax()])
    cell = values[known[first]]
    shown = date_text(cell) if column.kind == "date" else f"{cell:g}"
    share = len(far) / len(known)
    if len(far) <= max(1, FEW * len(known)):
        if standard.std() < WIDER * np.delete(standard, far).std():
            return ""
        place = f" in row {known[first]}, from 0" if rows else ""
        count = "A cell" if len(far) == 1 else f"{len(far)} cells"
        return (
            f"{count} of {name!r} lie{'s' * (len(far) == 1)} far from all others ({shown}"
            f"{place}): {'it makes' if len(far) == 1 else 'they make'} its scale so "
            f"large that clusters and densities do not see the others. Correct such cells or make "
            f"them missing."
        )
    if share > TAIL or apart[far].max() < SCATTERED * np.median(apart[far]):
        return ""
    return (
        f"{name!r} has heavy tails: {share:.1%} of its cells lie more than {FAR:g} robust standard "
        f"deviations from the median, up to {shown}, so that a {column.likelihood} is too wide for "
        f"the others. Model its logarithm or its rank, or clip it."
    )


def _name_text(column: Column, known: np.ndarray) -> str:
    """Say that whole numbers look like names of rows; "" if they do not."""
    facts = column.facts
    if column.listed or column.kind == "date" or not facts.whole or facts.amounts is not None:
        return ""
    if len(np.unique(known)) < len(known):
        return ""
    ends, ordered = (known.min(), known.max()), np.sort(known)
    even = np.linspace(*ends, len(known))
    near = max(EVEN, 1.36 / len(known) ** 0.5)  # chance numbers of an even distribution
    if np.abs(ordered - even).max() > near * (ends[1] - ends[0]):
        return ""
    return (
        f"{column.name!r} holds another whole number in every row, evenly from {ends[0]:.15g} to "
        f"{ends[1]:.15g}, as names of rows do: clusters would cut it into ranges."
    )


def _rare_text(column: Column, known: int) -> str:
    """Say that a text has mostly rare levels; "" if it has not."""
    levels = len(column.levels)
    if column.facts.type != "text" or not by_itself(column.reason):
        return ""
    if levels <= MANY or known >= RARE * levels:
        return ""
    return (
        f"{column.name!r} has {levels} levels in {known} cells, most with a few rows: each cluster "
        f"has a probability of every level, so that BIC chooses too few clusters."
    )


def _following(columns: Sequence[Column], cells: Sequence[np.ndarray]) -> dict[str, str]:
    """The columns that are a linear combination of several earlier ones."""
    dense = [
        (column, column.standardise(values))
        for column, values in zip(columns, cells, strict=True)
        if column.dense
    ]
    if not 3 <= len(dense) <= WIDE:
        return {}
    rows = np.linspace(0, len(dense[0][1]) - 1, min(len(dense[0][1]), ROWS)).astype(int)
    matrix = np.column_stack([values[rows] for _, values in dense])
    matrix = matrix[~np.isnan(matrix).any(1)]
    if len(matrix) < ENOUGH + 2 * len(dense):
        return {}
    spread = matrix.std(0)
    matrix = (matrix - matrix.mean(0)) / np.where(spread > 0, spread, 1.0)
    found, kept = dict[str, str](), list[int]()
    for j, (column, _) in enumerate(dense):
        if kept:
            weights = np.linalg.lstsq(matrix[:, kept], matrix[:, j], rcond=None)[0]
            rest = matrix[:, j] - matrix[:, kept] @ weights
            if rest.std() < EXACT:
                of = [
                    dense[i][0].name for i, w in zip(kept, weights, strict=True) if abs(w) > EXACT
                ]
                if len(of) > 1:  # one other column is told as a repeated one
                    found[column.name] = (
                        f"{column.name!r} follows from {', '.join(map(repr, of[:SHOWN]))}"
                        f"{', …' * (len(of) > SHOWN)}, which only clusters with full covariances "
                        f"can see; others split it, and the density has no limit."
                    )
                continue
        kept.append(j)
    return found
