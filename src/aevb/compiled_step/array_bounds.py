"""Prevent out-of-bounds writes of code that torch compiles for the CPU.

A known bug of the compiler is corrected; compiled code with any other out-of-bounds write is
rejected.

The bug (pytorch issue 196681): a sum may be vectorised over an axis that it keeps, eight numbers at
a time. If the length of that axis is no multiple of eight, the last vector must be stored
partially. Up to torch 2.14, the compiler does so only if the summed axis directly follows the
vectorised axis. With an axis between them, it stores the whole vector, into the next row and past
the end of the result, and corrupts the heap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from aevb.runtime import private_torch

ZONE = 64  # length of the guard zone behind an array, longer than a vector
_alone = Lock()  # the correction patches a class of torch, which all threads share


@contextmanager
def corrected() -> Iterator[None]:
    """Patch the compiler in the context: it stores the last vector of such a sum partially."""
    proxy = private_torch.cpp_kernels()
    if proxy is None:
        # This is another version of the compiler. :func:`stays_inside` still detects out-of-bounds
        # writes.
        yield
        return
    original = proxy.aggregate_reduction_buffers

    def aggregate(kernels: Any, by_range: bool, vectorised: Any) -> None:
        beneath = (
            vectorised is not None
            and not vectorised.is_reduction
            and any(loop.is_reduction for loop in kernels.loop_nest.loops)
        )
        original(kernels, by_range or beneath, vectorised)

    with _alone, patch.object(proxy, "aggregate_reduction_buffers", aggregate):
        yield


def stays_inside(code: Callable[[list[Tensor]], Any], arguments: Sequence[Tensor]) -> bool:
    """Return whether compiled code writes only inside its arrays.

    It is run on copies of the arguments; these, and the arrays that it allocates, have guard zones.
    """
    zones: list[Tensor] = []

    def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        length = _length(shape, stride)
        memory = torch.full((length + ZONE,), 7).to(dtype)
        zones.append(memory[length:])
        return memory.as_strided(tuple(shape), tuple(stride))

    def copied(argument: Tensor) -> Tensor:
        copy, whole = (
            allocate(argument.shape, argument.stride(), argument.dtype),
            ((_length(argument.shape, argument.stride()),), (1,)),
        )
        # Copy the memory, not the elements: an expanded tensor shares some of them.
        copy.as_strided(*whole).copy_(argument.detach().as_strided(*whole))
        return copy

    copies = [copied(argument) for argument in arguments]
    with patch.dict(getattr(code, "__func__", code).__globals__, empty_strided_cpu=allocate):
        code(copies)
    return all(bool(zone.eq(torch.tensor(7).to(zone.dtype)).all()) for zone in zones)


def _length(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of memory elements from the first to the last element of a tensor."""
    return (
        1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if all(shape)
        else 0
    )
