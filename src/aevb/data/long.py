"""Tables with a line a step, as samples and codes of sequences are written: their first columns are ``row`` and ``step``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aevb.graph import Graph

KEYS = ("row", "step")


def is_long(names: tuple[str, ...] | None, graph: Graph) -> bool:
    """Whether a table with this header has a line a step; the model must have a variable in time."""
    return names is not None and names[:2] == KEYS and any(graph.timed[name] for name in (*graph.observed, *graph.given))


@dataclass(frozen=True)
class Lines:
    """Which lines of a table are the steps of which row."""

    order: np.ndarray  # the lines, by row and step
    starts: np.ndarray  # where among them a row begins
    rows: np.ndarray  # the rows' own numbers
    first: int  # the number of every row's first step

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


def lines_of(keys: np.ndarray) -> Lines:
    """The lines of a table by their numbers of row and step, [L, 2]; the steps of each row must be complete."""
    whole = np.isfinite(keys) & (keys == np.round(keys))
    if not whole.all():
        line, column = np.argwhere(~whole)[0]
        raise ValueError(f"line {line + 2} has the {KEYS[column]} {keys[line, column]}; rows and steps are whole numbers")
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order].astype(np.int64)
    rows, starts, counts = np.unique(ordered[:, 0], return_index=True, return_counts=True)
    first = 0 if (ordered[:, 1] <= 0).any() else 1
    expected = np.arange(len(ordered)) - np.repeat(starts, counts) + first
    wrong = ordered[:, 1] != expected
    if wrong.any():
        (row, step), wanted = ordered[wrong.argmax()], expected[wrong.argmax()]
        what = f"lacks step {wanted}" if step > wanted else f"has step {step} twice" if step >= first else f"begins with step {step}"
        raise ValueError(f"row {row} {what}. Number the steps of a row 0, 1, 2, …, and leave cells empty where nothing was observed")
    return Lines(order, starts, rows, first)
