"""Tail probabilities: how unusual the log p of a row is among rows with the same missing cells."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from aevb.model import Model
from aevb.tables.cells import frame_of
from aevb.tables.schema import Schema

SIMULATED = 1000  # rows that every row is compared with


class TailProbabilities:
    """Shares of simulated rows, with the same missing cells, that are at most as likely.

    log p of the simulated rows is computed once for every pattern of missing cells.
    """

    def __init__(self, schema: Schema, model: Model, seed: int = 0) -> None:
        self.schema, self.model, self.seed = schema, model, seed
        self._references: dict[bytes, np.ndarray] = {}

    def of(self, frame: Any, log_p: np.ndarray, most: float = math.inf) -> np.ndarray | None:
        """The tail probabilities of rows with these log p, [N].

        None if the rows have more than ``most`` patterns of missing cells.
        """
        hidden = np.column_stack(list(self.schema.missing_cells(frame).values()))
        patterns, which = np.unique(hidden, axis=0, return_inverse=True)
        if len(patterns) > most:
            return None
        found = np.empty(len(log_p))
        for i, pattern in enumerate(patterns):
            rows = which.reshape(-1) == i
            reference = self._reference(pattern)
            found[rows] = np.searchsorted(reference, log_p[rows], side="right") / SIMULATED
        return found

    def _reference(self, pattern: np.ndarray) -> np.ndarray:
        """log p of the simulated rows without the cells of a pattern, in order."""
        key = pattern.tobytes()
        if key not in self._references:
            data, jacobian = self._simulated
            hidden = {c.name for c, lost in zip(self.schema.used, pattern, strict=True) if lost}
            known: dict[str, Any] = {}
            for name, columns in self.schema.variables.items():
                lost = np.array([column.name in hidden for column in columns])
                known[name] = np.where(lost if data[name].ndim > 1 else lost[0], np.nan, data[name])
            found = self.model.log_evidence(method="exact", **known).value
            log_p = found.detach().double().cpu().numpy() + jacobian[:, ~pattern].sum(1)
            self._references[key] = np.sort(log_p)
        return self._references[key]

    @cached_property
    def _simulated(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The data of simulated rows, and the logarithm of the Jacobian of each cell."""
        drawn = self.model.sample(SIMULATED, seed=self.seed)
        data = {name: drawn[name].detach().double().cpu().numpy() for name in self.schema.variables}
        # Through a frame, so that whole numbers and dates are rounded like those of a table.
        frame = frame_of(self.schema, self.schema.decode(data))
        cells = self.schema.cells(frame)
        jacobian = [column.log_jacobian(cells[column.name]) for column in self.schema.used]
        return self.schema.encode(frame), np.column_stack(jacobian)
