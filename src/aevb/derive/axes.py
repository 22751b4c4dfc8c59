"""The layout of every value, and the arithmetic of its axes.

From the right: event, N (examples), T (steps; 1 for what is static), S (samples), then one axis for each enumerated latent (two
for one whose neighbour in time is read). An axis that a value does not depend on has size 1 or is absent, so that broadcasting
does the enumeration and nothing is ever repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TIME, SAMPLES, FIRST_SLOT = -3, -4, -5  # enumeration axes stand from the first slot leftwards


def steps_of(value: Tensor, count: int) -> Sequence[Tensor]:
    """The T = 1 slices of a value. (Indexing instead would fill a whole tensor for each step in the backward pass.)"""
    return value.split(1, TIME) if value.shape[TIME] > 1 else [value] * count


def join(parts: Sequence[Tensor]) -> Tensor:
    """One after the other in time; all other axes are broadcast."""
    if len(parts) == 1:
        return parts[0]
    shape = torch.broadcast_shapes(*((*part.shape[:TIME], 1, *part.shape[TIME + 1 :]) for part in parts))
    return torch.cat([part.expand(*shape[:TIME], part.shape[TIME], *shape[TIME + 1 :]) for part in parts], TIME)


def over_time(value: Tensor, count: int) -> Tensor:
    """The value with a T axis of full length."""
    shape = list(value.shape)
    shape[TIME] = count
    return value.expand(shape)


def swap(value: Tensor, a: int, b: int) -> Tensor:
    """Exchange two axes counted from the right, one of which may be absent."""
    missing = max(-a, -b) - value.dim()
    return (value.reshape(*[1] * missing, *value.shape) if missing > 0 else value).transpose(a, b)


def on_axis(vector: Tensor, slot: int) -> Tensor:
    """Move the event axis to an enumeration axis. Contiguous: strided weights slow every gradient behind them."""
    return swap(vector, slot, -1).contiguous()


def place(values: Tensor, slot: int) -> Tensor:
    """A table of values, one a row, on an enumeration axis: [V, 1, …, 1, d]."""
    return values.reshape(values.shape[0], *[1] * (-slot - 2), values.shape[1])


def size(value: Tensor, axis: int) -> int:
    return value.shape[axis] if value.dim() >= -axis else 1


def alike(value: Tensor, like: Tensor) -> Tensor:
    """The value with as many axes as another, so that the gradient of their sum need not be reduced to fit."""
    return value.reshape(*[1] * (like.dim() - value.dim()), *value.shape) if value.dim() < like.dim() else value


def expand_axis(value: Tensor, axis: int, count: int) -> Tensor:
    """The value with an axis of full size, added on the left if absent."""
    if value.dim() < -axis:
        value = value.reshape(*[1] * (-axis - value.dim()), *value.shape)
    shape = list(value.shape)
    shape[axis] = count
    return value.expand(shape)


def contract(term: Tensor, weight: Tensor, axis: int) -> Tensor:
    """The weighted sum over an axis; what does not depend on the axis stays, since weights sum to one."""
    return (weight * term).sum(axis, keepdim=True) if size(term, axis) > 1 else term
