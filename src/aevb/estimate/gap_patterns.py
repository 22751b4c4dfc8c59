"""Which entries of rows are missing together: a summary of the patterns in a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.estimate.keys import mask_of, real_steps

MOST_COLUMNS = 200  # tables with more columns have no summary, which is quadratic in them
AT_ONCE = 2**24  # entries that are compared at once


@dataclass(frozen=True)
class GapPatterns:
    """Patterns of missing entries, over the D columns of all observed variables.

    A pair of columns is compared within a step. ``apart[i, j]``: i is missing somewhere beside a
    known j. ``together[i, j]``: both are missing somewhere. ``throughout[i]``: i is missing in all
    steps of some row.

    >>> import torch
    >>> from aevb import Model, Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> batch = model.prepare(x=torch.tensor([[1.0, float("nan")], [0.0, 2.0]]))
    >>> GapPatterns.of(model.graph, batch).apart
    tensor([[False, False],
            [ True, False]])
    """

    apart: Tensor  # [D, D]
    together: Tensor  # [D, D]
    throughout: Tensor  # [D]

    @classmethod
    def of(cls, graph: Graph, batch: Mapping[str, Tensor]) -> GapPatterns | None:
        """Summarise a batch; None if it has too many columns."""
        width = sum(map(graph.size, graph.observed))
        if width > MOST_COLUMNS:
            return None
        never = torch.zeros(width, width, dtype=torch.bool)
        found, missing = cls(never, never, never[0]), missing_of(graph, batch)
        if missing is None:
            return found
        gone, real = missing
        rows = gone.any(-1).any(0).nonzero()[:, 0]  # rows without gaps add nothing
        for some in rows.split(max(1, AT_ONCE // (len(gone) * width))):
            found = found | cls._of_masks(gone[:, some], real[:, some])
        return found

    @classmethod
    def _of_masks(cls, gone: Tensor, real: Tensor) -> GapPatterns:
        here, known = (part.flatten(0, 1).float() for part in (gone, real & ~gone))
        throughout = (gone | ~real).all(0) & gone.any(0)
        found = here.T @ known > 0, here.T @ here > 0, throughout.any(0)
        return cls(*(part.cpu() for part in found))

    def __or__(self, other: GapPatterns) -> GapPatterns:
        """Return the patterns that either summary has."""
        return GapPatterns(
            self.apart | other.apart,
            self.together | other.together,
            self.throughout | other.throughout,
        )

    # Saving and loading ---------------------------------------------------------------------------

    def state(self) -> dict[str, list[str]]:
        """Return the summary as JSON-ready data: texts of 0 and 1."""
        tables = {"apart": self.apart, "together": self.together, "throughout": self.throughout}
        return {
            word: [
                "".join("01"[bit] for bit in row) for row in torch.atleast_2d(table).int().tolist()
            ]
            for word, table in tables.items()
        }

    @classmethod
    def restored(cls, state: object, width: int) -> GapPatterns | None:
        """Return a saved summary of ``width`` columns; None if there is none."""
        tables = []
        for word, count in (("apart", width), ("together", width), ("throughout", 1)):
            rows = state.get(word) if isinstance(state, Mapping) else None
            if (
                not isinstance(rows, list)
                or len(rows) != count
                or not all(isinstance(row, str) and len(row) == width for row in rows)
            ):
                return None
            tables.append(torch.tensor([[bit == "1" for bit in row] for row in rows]))
        return cls(tables[0], tables[1], tables[2][0])


def missing_of(graph: Graph, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return masks [T, N, D] of the missing entries and [T, N, 1] of the real steps.

    None if no observed variable has missing entries. Padded steps have none.
    """
    names = graph.observed
    if not any(mask_of(name) in batch for name in names):
        return None
    steps = max(batch[name].shape[0] for name in names)
    masks = [
        ~batch[mask_of(name)]
        if mask_of(name) in batch
        else torch.zeros_like(batch[name], dtype=torch.bool)
        for name in names
    ]
    gone = torch.cat([mask.expand(steps, *mask.shape[1:]) for mask in masks], -1)
    real = real_steps(batch)
    real = torch.ones_like(gone[..., :1]) if real is None else real.expand(steps, *real.shape[1:])
    return gone & real, real
