"""Count how often each value occurs in each column of a variable."""

from __future__ import annotations

import torch
from torch import Tensor

from aevb.declare.conditionals import Occurrences
from aevb.training.em.columns import flat, known
from aevb.training.em.factors import Rows


def occurrences(rows: Rows, name: str) -> Occurrences:
    """Return the number of rows of all processes that have each value; missing ones do not count.

    Counts have few distinct values, so the result is much smaller than the data.
    """
    found = []
    for batch in rows.parts():
        value, keep = flat(batch, name), known(batch, name)
        column = torch.arange(value.shape[1], device=value.device).expand_as(value)
        some = keep > 0
        found.append(_merged([Occurrences(column[some], value[some], keep[some])]))
    if rows.world.size == 1:
        return _merged(found)
    device = rows.source.like.device
    mine = Occurrences(*(one.cpu() for one in _merged(found)))
    everyone = _merged(rows.world.gather(mine))
    return Occurrences(*(one.to(device) for one in everyone))


def _merged(parts: list[Occurrences]) -> Occurrences:
    """Return each pair of column and value once, sorted, with the sum of its times."""
    column, value, times = (torch.cat(one) for one in zip(*parts, strict=True))
    order = value.argsort(stable=True)
    order = order[column[order].argsort(stable=True)]
    column, value, times = column[order], value[order], times[order]
    new = torch.ones_like(column, dtype=torch.bool)
    new[1:] = (column[1:] != column[:-1]) | (value[1:] != value[:-1])
    which: Tensor = new.cumsum(0) - 1
    total = torch.zeros_like(times[new]).index_add_(0, which, times)
    return Occurrences(column[new], value[new], total)
