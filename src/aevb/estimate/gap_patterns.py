"""Which entries of rows are missing beside one another: a summary of the patterns in a data set."""

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

    Columns are compared within a step. ``apart[i, j]``: i is missing somewhere beside a known j.
    ``most``: the largest number of missing columns. ``throughout[i]``: i is missing in all steps of
    some row.

    >>> import torch
    >>> from aevb import Model, Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> batch = model.prepare(x=torch.tensor([[1.0, float("nan")], [0.0, 2.0]]))
    >>> GapPatterns.of(model.graph, batch).apart
    tensor([[False, False],
            [ True, False]])
    """

    apart: Tensor  # [D, D]
    throughout: Tensor  # [D]
    most: int

    @classmethod
    def of(cls, graph: Graph, batch: Mapping[str, Tensor]) -> GapPatterns | None:
        """Summarise a batch; None if it has too many columns."""
        width = sum(map(graph.size, graph.observed))
        if width > MOST_COLUMNS:
            return None
        never = torch.zeros(width, width, dtype=torch.bool)
        found, missing = cls(never, never[0], 0), missing_of(graph, batch)
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
        apart = here.T @ known > 0
        return cls(apart.cpu(), throughout.any(0).cpu(), int(here.sum(-1).max()))

    def __or__(self, other: GapPatterns) -> GapPatterns:
        """Return the patterns that either summary has."""
        return GapPatterns(
            self.apart | other.apart,
            self.throughout | other.throughout,
            max(self.most, other.most),
        )

    # Saving and loading ---------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """Return the summary as JSON-ready data; tables are texts of 0 and 1."""

        def text(row: list[int]) -> str:
            return "".join(map(str, row))

        return {
            "apart": [text(row) for row in self.apart.int().tolist()],
            "throughout": text(self.throughout.int().tolist()),
            "most": self.most,
        }

    @classmethod
    def restored(cls, state: object, width: int) -> GapPatterns | None:
        """Return a saved summary of ``width`` columns; None if there is none."""
        found = state if isinstance(state, Mapping) else {}
        apart, throughout, most = (found.get(word) for word in ("apart", "throughout", "most"))
        if not isinstance(apart, list) or len(apart) != width or not isinstance(most, int):
            return None
        if not all(isinstance(row, str) and len(row) == width for row in (*apart, throughout)):
            return None
        table = torch.tensor([[bit == "1" for bit in row] for row in (*apart, throughout)])
        return cls(table[:-1], table[-1], most)


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
