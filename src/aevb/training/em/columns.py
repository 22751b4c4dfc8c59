"""Columns of the data in units of their own: EM works on numbers of mean 0 and spread 1, whatever the units of the data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from aevb.training.em.factors import Rows, Statistics, add


class Columns:
    """The mean, the spread and the number of known entries of every column of some variables."""

    def __init__(self, rows: Rows, names: Iterable[str]) -> None:
        self.names = tuple(names)
        found: Statistics = {}
        for batch in rows.parts():
            for name in self.names:
                value, keep = batch[name][0], known(batch, name)
                add(found, {f"{name} count": keep.sum(0), f"{name} first": (keep * value).sum(0)})
        rows.world.sum(list(found.values()))
        self.count = {name: found[f"{name} count"] for name in self.names}
        self.mean = {name: found[f"{name} first"] / self.count[name].clamp_min(1.0) for name in self.names}
        squares: Statistics = {}
        for batch in rows.parts():
            add(squares, {name: (known(batch, name) * (batch[name][0] - self.mean[name]).square()).sum(0) for name in self.names})
        rows.world.sum(list(squares.values()))
        self.spread = {name: self._spread(name, squares[name]) for name in self.names}

    def _spread(self, name: str, squares: Tensor) -> Tensor:
        """1 for a column that is constant, but for rounding."""
        spread = (squares / self.count[name].clamp_min(1.0)).sqrt()
        return torch.where(spread > 1e-12 * self.mean[name].abs(), spread, 1.0).clamp_min(1e-150)

    def standard(self, name: str, value: Tensor) -> Tensor:
        return (value - self.mean[name]) / self.spread[name]


def known(batch: dict[str, Tensor], name: str) -> Tensor:
    """1 where an entry is known, 0 where it is missing."""
    return batch[f"{name}?"][0].double() if f"{name}?" in batch else torch.ones_like(batch[name][0])
