"""Keep the code that torch compiles for a CPU inside its arrays: a known mistake of the compiler is corrected, others are noticed.

A sum may be vectorised over an axis that it keeps, eight numbers at a time. Where that axis has no multiple of eight, the last vector is
stored in part, by code of its own. Up to torch 2.14 the compiler chooses that code only if the axis that is summed comes right after the one
that is vectorised. With an axis between them it stores the whole vector: into the next row, and past the end of the result, which damages
the heap (pytorch issue 196681).
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

ZONE = 64  # numbers behind an array, more than a vector has
_alone = Lock()  # the correction is a method of a class of torch's, which all threads see


@contextmanager
def corrected() -> Iterator[None]:
    """Inside, the compiler stores the last vector of a sum in part wherever a summed axis lies beneath the vectorised one."""
    proxy = private_torch.cpp_kernels()
    if proxy is None:  # another compiler, perhaps without the mistake: code that writes past an array is noticed by :func:`stays_inside`
        yield
        return
    original = proxy.aggregate_reduction_buffers

    def aggregate(kernels: Any, by_range: bool, vectorised: Any) -> None:
        beneath = vectorised is not None and not vectorised.is_reduction and any(loop.is_reduction for loop in kernels.loop_nest.loops)
        original(kernels, by_range or beneath, vectorised)

    with _alone, patch.object(proxy, "aggregate_reduction_buffers", aggregate):
        yield


def stays_inside(code: Callable[[list[Tensor]], Any], arguments: Sequence[Tensor]) -> bool:
    """Whether compiled code leaves alone what lies behind its arrays, the arguments' copies and those that it makes itself."""
    zones: list[Tensor] = []

    def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        length = _length(shape, stride)
        memory = torch.full((length + ZONE,), 7).to(dtype)
        zones.append(memory[length:])
        return memory.as_strided(tuple(shape), tuple(stride))

    def copied(argument: Tensor) -> Tensor:
        copy, whole = allocate(argument.shape, argument.stride(), argument.dtype), ((_length(argument.shape, argument.stride()),), (1,))
        copy.as_strided(*whole).copy_(argument.detach().as_strided(*whole))  # as it lies: of an expanded one some numbers are many
        return copy

    copies = [copied(argument) for argument in arguments]
    with patch.dict(getattr(code, "__func__", code).__globals__, empty_strided_cpu=allocate):
        code(copies)
    return all(bool(zone.eq(torch.tensor(7).to(zone.dtype)).all()) for zone in zones)


def _length(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Numbers from the first to the last of a tensor in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
