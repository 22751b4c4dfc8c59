"""The axes of every value, and operations on them.

From the right, the axes are: event, N (examples), T (steps; size 1 for static values), S (samples),
then one axis for each enumerated latent (two if a factor reads its neighbour in time). An axis that
a value does not depend on has size 1 or is absent. Broadcasting therefore does the enumeration, and
no value is repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aevb.runtime.shapes import broadcast_shapes

TIME, SAMPLES, FIRST_SLOT = -3, -4, -5  # enumeration axes extend from the first slot to the left


def steps_of(value: Tensor, count: int) -> Sequence[Tensor]:
    """Split a value into slices with T = 1.

    (With indexing, the backward pass would fill a whole tensor for each step.)
    """
    return value.split(1, TIME) if value.shape[TIME] > 1 else [value] * count


def at_step(value: Tensor, t: int | None) -> Tensor:
    """A value at step t; at all steps if t is None, or if it is the same at all steps."""
    return value if t is None or value.shape[TIME] == 1 else value.narrow(TIME, t, 1)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate parts along time; all other axes are broadcast."""
    if len(parts) == 1:
        return parts[0]
    shape = broadcast_shapes(*((*part.shape[:TIME], 1, *part.shape[TIME + 1 :]) for part in parts))
    return torch.cat(
        [part.expand(*shape[:TIME], part.shape[TIME], *shape[TIME + 1 :]) for part in parts], TIME
    )


def over_time(value: Tensor, count: int) -> Tensor:
    """Expand the T axis of a value to full length."""
    shape = list(value.shape)
    shape[TIME] = count
    return value.expand(shape)


def swap(value: Tensor, a: int, b: int) -> Tensor:
    """Exchange two axes counted from the right, one of which may be absent."""
    missing = max(-a, -b) - value.dim()
    return (value.reshape(*[1] * missing, *value.shape) if missing > 0 else value).transpose(a, b)


def on_axis(vector: Tensor, slot: int) -> Tensor:
    """Move the event axis to an enumeration axis.

    The result is contiguous, because strided weights slow down the gradients.
    """
    return swap(vector, slot, -1).contiguous()


def place(values: Tensor, slot: int) -> Tensor:
    """Put a table of values [V, d] on an enumeration axis: [V, 1, …, 1, d]."""
    return values.reshape(values.shape[0], *[1] * (-slot - 2), values.shape[1])


def size(value: Tensor, axis: int) -> int:
    """The length of an axis; 1 if it is absent."""
    return value.shape[axis] if value.dim() >= -axis else 1


def alike(value: Tensor, like: Tensor) -> Tensor:
    """Add leading axes until the value has as many as ``like``.

    The gradient of their sum then needs no reduction.
    """
    return (
        value.reshape(*[1] * (like.dim() - value.dim()), *value.shape)
        if value.dim() < like.dim()
        else value
    )


def expand_axis(value: Tensor, axis: int, count: int) -> Tensor:
    """Expand an axis to full size; add it on the left if it is absent."""
    if value.dim() < -axis:
        value = value.reshape(*[1] * (-axis - value.dim()), *value.shape)
    shape = list(value.shape)
    shape[axis] = count
    return value.expand(shape)


def contract(term: Tensor, weight: Tensor, axis: int) -> Tensor:
    """The weighted sum over an axis.

    A term that does not depend on the axis is returned unchanged, since the weights sum to one.
    """
    return (weight * term).sum(axis, keepdim=True) if size(term, axis) > 1 else term
