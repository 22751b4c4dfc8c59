"""Which entries of rows are missing beside one another: a summary of the patterns in a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.estimate.keys import mask_of, real_steps

MOST_COLUMNS = 200  # tables with more columns have no summary, which is quadratic in them
AT_ONCE = 2**24  # entries that are compared at once
CHANCE = 0.01  # counts of missing columns that rows of the same kind have less often are too many


@dataclass(frozen=True)
class GapPatterns:
    """Patterns of missing entries, over the D columns of all observed variables.

    Columns are compared within a step. ``apart[i, j]``: i is missing somewhere beside a known j.
    ``most``: the largest number of missing columns. ``throughout[i]``: i is missing in all steps of
    some row. ``rows``: the number of rows, with and without gaps.

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
    rows: int

    @classmethod
    def of(cls, graph: Graph, batch: Mapping[str, Tensor]) -> GapPatterns | None:
        """Summarise a batch; None if it has too many columns."""
        width = sum(map(graph.size, graph.observed))
        if width > MOST_COLUMNS:
            return None
        never = torch.zeros(width, width, dtype=torch.bool)
        n = next(iter(batch.values())).shape[-2] if batch else 0
        found, missing = cls(never, never[0], 0, n), missing_of(graph, batch)
        if missing is None:
            return found
        gone, real = missing
        rows = gone.any(-1).any(0).nonzero()[:, 0]  # rows without gaps add nothing
        for some in rows.split(max(1, AT_ONCE // (len(gone) * width))):
            found = found | cls._of_masks(gone[:, some], real[:, some])
        return replace(found, rows=n)

    @classmethod
    def _of_masks(cls, gone: Tensor, real: Tensor) -> GapPatterns:
        here, known = (part.flatten(0, 1).float() for part in (gone, real & ~gone))
        throughout = (gone | ~real).all(0) & gone.any(0)
        apart = here.T @ known > 0
        most = int(here.sum(-1).max())
        return cls(apart.cpu(), throughout.any(0).cpu(), most, gone.shape[1])

    def __or__(self, other: GapPatterns) -> GapPatterns:
        """Return the patterns that either summary has."""
        return GapPatterns(
            self.apart | other.apart,
            self.throughout | other.throughout,
            max(self.most, other.most),
            self.rows + other.rows,
        )

    def too_many(self, counts: Tensor) -> Tensor:
        """Return which rows [N] miss clearly more columns at once (counts [N]) than these rows did.

        A few more missing columns in a few rows are expected if the rows are many: among rows of
        one kind, all k largest counts are new ones with a probability of at most (m / (m + n))ᵏ,
        for m new rows and these n.
        """
        more, new = counts > self.most, len(counts)
        if (new / max(1, new + self.rows)) ** int(more.sum()) < CHANCE:
            return more
        return counts > self.most + max(3, self.most // 2)

    # Saving and loading ---------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """Return the summary as JSON-ready data; tables are texts of 0 and 1."""

        def text(row: list[int]) -> str:
            return "".join(map(str, row))

        return {
            "apart": [text(row) for row in self.apart.int().tolist()],
            "throughout": text(self.throughout.int().tolist()),
            "most": self.most,
            "rows": self.rows,
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
        rows = found.get("rows")  # an earlier version did not save it
        return cls(table[:-1], table[-1], most, rows if isinstance(rows, int) else 0)


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
