"""Standardise columns: EM works on data with mean 0 and standard deviation 1."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from aevb.estimate.batch import Batch
from aevb.estimate.keys import masks_of
from aevb.training.em.factors import Rows, Statistics, add


class Columns:
    """Mean, standard deviation and number of known entries of every column of some variables."""

    def __init__(self, rows: Rows, names: Iterable[str]) -> None:
        self.names = tuple(names)
        found: Statistics = {}
        for batch in rows.parts():
            for name in self.names:
                value, keep = flat(batch, name), known(batch, name)
                add(found, {f"{name} count": keep.sum(0), f"{name} first": (keep * value).sum(0)})
        rows.world.sum(list(found.values()))
        self.count = {name: found[f"{name} count"] for name in self.names}
        self.mean = {
            name: found[f"{name} first"] / self.count[name].clamp_min(1.0) for name in self.names
        }
        squares: Statistics = {}
        for batch in rows.parts():
            add(
                squares,
                {
                    name: (known(batch, name) * (flat(batch, name) - self.mean[name]).square()).sum(
                        0
                    )
                    for name in self.names
                },
            )
        rows.world.sum(list(squares.values()))
        self.spread = {name: self._spread(name, squares[name]) for name in self.names}

    def _spread(self, name: str, squares: Tensor) -> Tensor:
        """Return the standard deviation; 1 for a column that is constant up to rounding."""
        spread = (squares / self.count[name].clamp_min(1.0)).sqrt()
        return torch.where(spread > 1e-12 * self.mean[name].abs(), spread, 1.0).clamp_min(1e-150)

    def standard(self, name: str, value: Tensor) -> Tensor:
        return (value - self.mean[name]) / self.spread[name]


def flat(batch: Batch, name: str) -> Tensor:
    """Return the values of all rows at all steps, flattened to one axis."""
    return batch[name].flatten(0, 1)


def known(batch: Batch, name: str) -> Tensor:
    """Return the mask of known entries, flattened: 0 where missing or padded, else 1."""
    value = batch[name]
    keep = torch.ones_like(value)
    for mask in masks_of(batch, name, timed=len(value) > 1):
        keep = keep * mask
    return keep.flatten(0, 1)
