"""What all kinds of exact EM share: the factors of p that have parameters, how to set them, and the rows they are learned from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aevb.batch import Batch
from aevb.data.sources import Source
from aevb.families import SMALLEST_VARIANCE
from aevb.graph import Entry
from aevb.training.distributed import World

if TYPE_CHECKING:
    from aevb.model import Model

Statistics = dict[str, Tensor]
ROWS = 4096  # rows that are read at a time
KEPT = 2**25  # numbers of prepared rows that are kept from one iteration to the next; of more, each iteration reads them again
LEAST = math.log(math.expm1(math.sqrt(SMALLEST_VARIANCE)))  # raw scale of a column of spread 1 whose variance is the least that an M-step gives
READ_ONCE = 2**22  # numbers of rows that are read and converted once, whoever asks for them


def floor(variance: Tensor, count: Tensor) -> Tensor:
    """The least variance that a closed form may give each column: a share of its own, and 1 for a column that no row has."""
    return torch.where(count > 0, (SMALLEST_VARIANCE * variance).clamp_min(1e-20), 1.0)


@dataclass(frozen=True)
class Rows:
    """All rows of the data, of which this process reads its share."""

    source: Source
    world: World

    def __len__(self) -> int:
        return self.source.n

    def parts(self) -> Iterable[Batch]:
        """This process's rows, a part at a time, in float64."""
        return self._read() if self._kept is None else self._kept

    @cached_property
    def _kept(self) -> list[Batch] | None:
        numbers = sum(value.numel() for value in self.source.take(torch.arange(min(1, len(self)))).values())
        return list(self._read()) if len(self) * numbers <= READ_ONCE else None

    def _read(self) -> Iterator[Batch]:
        for rows in torch.arange(len(self))[self.world.share(len(self))].split(ROWS):
            batch = self.source.take(rows)
            yield {name: value if value.dtype == torch.bool else value.double() for name, value in batch.items()}

    def first(self) -> Batch:
        return self.source.take(torch.arange(min(2, len(self))))


def add(total: Statistics, found: Mapping[str, Tensor]) -> None:
    for name, value in found.items():
        total[name] = total[name] + value if name in total else value


class EM:
    """The factors of p that have parameters, and how to set them."""

    def __init__(self, model: Model) -> None:
        self.model, self.graph = model, model.graph
        entries = [entry for entry in self.graph.entries() if entry.side == "p" and any(True for _ in model.factors[entry.id].parameters())]
        self.entries: list[Entry] = entries

    def _set(self, entry: Entry, heads: Mapping[str, Tensor], weights: Mapping[str, Tensor], bias: Tensor | None) -> None:
        """Write learned vectors and, for a root, its heads; the first layer's blocks otherwise."""
        factor: Any = self.model.factors[entry.id]
        with torch.no_grad():
            for name in factor.vectors:
                factor.vectors[name].copy_(heads[name].reshape(-1))
            if not entry.key.parents:
                if entry.spec.learned:  # a fixed root is standard, and stays so
                    factor.root.copy_(torch.cat([heads[name].reshape(-1) for name in factor.sizes]))
                return
            blocks = factor.net.blocks
            for label, weight in weights.items():
                blocks.weights[label].copy_(weight)
            if blocks.bias is not None:
                blocks.bias.copy_(torch.zeros_like(blocks.bias) if bias is None else bias)
