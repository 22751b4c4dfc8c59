"""What both kinds of exact EM share: the factors of p that have parameters, and how to set them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aevb.families import SMALLEST_VARIANCE
from aevb.graph import Entry

if TYPE_CHECKING:
    from aevb.model import Model

Statistics = dict[str, Tensor]


def floor(variance: Tensor, count: Tensor) -> Tensor:
    """The least variance that a closed form may give each column: a share of its own, and 1 for a column that no row has."""
    return torch.where(count > 0, (SMALLEST_VARIANCE * variance).clamp_min(1e-20), 1.0)


class EM:
    """What both kinds share: the factors of p that have parameters, and how to set them."""

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
