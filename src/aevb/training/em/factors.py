"""Shared parts of exact EM: factors of p with parameters, writing them, and reading rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aevb.data.sources import Source
from aevb.declare import distributions as ad
from aevb.declare.graph import Entry
from aevb.estimate.batch import Batch
from aevb.model import Model
from aevb.training.distributed import World

Statistics = dict[str, Tensor]
ROWS = 4096  # rows per chunk
# Elements of prepared rows that are cached between iterations. Larger data are read again.
KEPT = 2**25
READ_ONCE = 2**22  # elements of rows that are read and converted to float64 only once


@dataclass(frozen=True)
class Rows:
    """All rows of the data; this process reads its share of them."""

    source: Source
    world: World

    def __len__(self) -> int:
        return self.source.n

    def parts(self) -> Iterable[Batch]:
        """Iterate over this process's rows in chunks, in float64."""
        return self._read() if self._kept is None else self._kept

    @cached_property
    def _kept(self) -> list[Batch] | None:
        numbers = sum(
            value.numel() for value in self.source.take(torch.arange(min(1, len(self)))).values()
        )
        return list(self._read()) if len(self) * numbers <= READ_ONCE else None

    def _read(self) -> Iterator[Batch]:
        for rows in torch.arange(len(self))[self.world.share(len(self))].split(ROWS):
            batch = self.source.take(rows)
            yield {
                name: value if value.dtype == torch.bool else value.double()
                for name, value in batch.items()
            }

    def first(self) -> Batch:
        return self.source.take(torch.arange(min(2, len(self))))


def add(total: Statistics, found: Mapping[str, Tensor]) -> None:
    for name, value in found.items():
        total[name] = total[name] + value if name in total else value


class EM:
    """The factors of p that have parameters, and how to set them.

    ``least`` is the lower limit of the variance that an M-step gives a column, as a share of the
    column's own variance: a number, or a tensor of one share for each column.
    """

    least: float | Tensor

    def __init__(self, model: Model) -> None:
        self.model, self.graph = model, model.graph
        entries = [
            entry
            for entry in self.graph.entries()
            if entry.side == "p" and any(True for _ in model.factors[entry.id].parameters())
        ]
        self.entries: list[Entry] = entries

    def _set(
        self,
        entry: Entry,
        heads: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        bias: Tensor | None,
    ) -> None:
        """Write learned vectors, and the root's heads or the first layer's blocks."""
        factor: Any = self.model.factors[entry.id]
        with torch.no_grad():
            for name in factor.vectors:
                factor.vectors[name].copy_(heads[name].reshape(-1))
            if not entry.key.parents:
                if entry.spec.learned:  # a fixed root keeps its standard distribution
                    factor.root.copy_(torch.cat([heads[name].reshape(-1) for name in factor.sizes]))
                return
            blocks = factor.net.blocks
            for label, weight in weights.items():
                blocks.weights[label].copy_(weight)
            if blocks.bias is not None:
                blocks.bias.copy_(torch.zeros_like(blocks.bias) if bias is None else bias)

    # Lower limit of the variance ------------------------------------------------------------------

    def set_shares(self, least: Sequence[float]) -> None:
        """Set the lower limit of each column of the Gaussian variables."""
        raise ValueError(
            "em: least is one share for all columns; a sequence of shares is for finite latents."
        )

    def floor(self, variance: Tensor, count: Tensor) -> Tensor:
        """Return the lower limit of each column's variance; 1 for a column that no row knows."""
        return torch.where(count > 0, (self.least * variance).clamp_min(1e-20), 1.0)

    @cached_property
    def raw_least(self) -> Tensor:
        """Raw (inverse softplus) scale of a standardised column at the lower limit."""
        return torch.as_tensor(self.least, dtype=torch.float64).sqrt().expm1().log()

    def at_floor(self, heads: Mapping[str, Tensor | None]) -> list[int]:
        """Return the columns whose variance is at the lower limit for any value of the parent.

        ``heads`` holds the raw "scale" or "tril" of standardised columns, [values of the parent,
        …].
        """
        scale, tril = heads.get("scale"), heads.get("tril")
        if scale is not None:
            least = torch.as_tensor(self.least).to(scale).sqrt()
            found = F.softplus(scale) < math.sqrt(2) * least
        elif tril is not None:
            least = torch.as_tensor(self.least).to(tril).sqrt()
            size = (math.isqrt(8 * tril.shape[-1] + 1) - 1) // 2
            # In units of the lower limit.
            root = ad.tril_from_vector(tril, size) / least.unsqueeze(-1)
            _, values, directions = torch.linalg.svd(root.mT)
            found = ((values < math.sqrt(2)).unsqueeze(-1) & (directions.abs() > 0.1)).any(-2)
        else:
            return []
        return found.reshape(-1, found.shape[-1]).any(0).nonzero()[:, 0].tolist()

    def told_floor(self, vector: Tensor) -> str | None:
        """Return a warning on observed columns at the lower limit of the variance, or None."""
        found = {
            name: at
            for name, at in self.floored(vector).items()
            if at and name in self.graph.observed
        }
        if not found:
            return None
        parts = [
            f"{name} (column{'s' * (len(at) > 1)} "
            f"{', '.join(map(str, at[:5]))}{', …' * (len(at) > 5)}, from 0)"
            for name, at in found.items()
        ]
        share = f"{self.least:g}" if isinstance(self.least, float) else "a share"
        return (
            f"em() holds the variance of {', '.join(parts)} at its lower limit, {share} "
            f"of the column's own variance. Values that repeat, "
            "or that follow from other columns, make the evidence unbounded, and the model may "
            "not fit other rows. Leave such columns or outliers out, dequantise "
            "(aevb.data.dequantise), take fewer classes or latents, or fix the scale (Normal(…, "
            "scale=0.1))."
        )

    def floored(self, vector: Tensor) -> dict[str, list[int]]:
        """Return, for every variable, the columns whose variance is at the lower limit."""
        raise NotImplementedError
