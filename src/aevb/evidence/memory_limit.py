"""Measure the memory of a computation on a small run, and choose chunk sizes for a limit."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aevb.runtime import private_torch
from aevb.runtime.private_torch import tree_leaves

# Default limit on the CPU. Larger chunks are not faster, because each operation allocates fresh
# memory pages.
DEFAULT = 2**27
CORNERS = 0.02  # share of a GPU limit that is reserved for allocator fragmentation
SHARE = 0.5  # share of a GPU's free memory that is used by default
PROBE = 32  # samples in the small run; enough that memory per sample outweighs memory per row
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


class Peak(private_torch.DispatchMode or object):  # type: ignore[misc]
    """Measure the peak memory of tensors created inside a ``with`` block, on any device.

    Use ``with Peak() as peak: …``, then read ``peak.bytes``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            # Inputs from outside, e.g. a weight, count as 0 bytes: a view of them takes no memory.
            if isinstance(value, Tensor):
                self._see(value, 0)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._see(value, value.untyped_storage().nbytes())
        return result

    def _see(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.live += size
            self.bytes = max(self.bytes, self.live)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def limit(memory: float | str | None, device: torch.device) -> int:
    """Return a memory limit in bytes.

    ``memory`` is a number of bytes, a text such as "2 GiB", or None for the device's default.

    >>> limit("2 GiB", torch.device("cpu"))
    2147483648
    """
    if memory is None:
        if device.type != "cuda":
            return DEFAULT
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMG]?i?B?)\s*", memory, re.IGNORECASE)
        if match is None or match[2].upper() not in UNITS:
            raise ValueError(
                f'memory is a number of bytes or a text such as "2 GiB" or "500 MB", got '
                f"{memory!r}."
            )
        memory = float(match[1]) * UNITS[match[2].upper()]
    if (
        isinstance(memory, bool)
        or not isinstance(memory, int | float)
        or not (memory > 0 and math.isfinite(memory))
    ):
        raise ValueError(
            f'memory is a positive number of bytes or a text such as "2 GiB", got {memory!r}.'
        )
    return int(memory)


def room(
    memory: float | str | None, parameters: Iterable[Tensor], batch: Mapping[str, Tensor]
) -> int:
    """Return the bytes that a limit leaves for work, at least a quarter of the limit.

    Weights and data are subtracted from the limit. On a GPU, all memory that the process holds and
    a share for fragmentation are subtracted instead.
    """
    weights = list(parameters)
    device = weights[0].device if weights else next(iter(batch.values())).device
    whole, there = (
        limit(memory, device),
        sum(value.numel() * value.element_size() for value in (*weights, *batch.values())),
    )
    if device.type == "cuda":  # the default limit is a share of the free memory already
        there = int(CORNERS * whole) + (
            torch.cuda.memory_allocated(device) if memory is not None else 0
        )
    return max(whole // 4, whole - there)


def pieces(
    run: Callable[[int, int], object], rows: int, samples: int, budget: int, *, smallest: int = 1
) -> tuple[int, int]:
    """Choose (rows, samples) per chunk such that run(rows, samples) needs at most ``budget`` bytes.

    All samples of a row stay together if they fit, so that quantities per row are computed once.
    ``run`` is tried on one row and on two rows, and the memory is modelled as c + r·rows +
    s·rows·samples. A chunk has at least one row with ``smallest`` samples.
    """

    def held(n: int, k: int) -> int:
        with Peak() as peak:
            result = run(n, k)
        del result
        return peak.bytes

    # This torch cannot measure memory, so use small chunks.
    if private_torch.DispatchMode is None:
        return 1, min(samples, max(smallest, PROBE))
    few, many = held(1, PROBE), held(1, 2 * PROBE)
    each = max(1.0, (many - few) / PROBE)
    row = max(0.0, held(2, PROBE) - few - PROBE * each) if rows > 1 else 0.0
    fixed = max(0.0, few - row - PROBE * each)
    fitting = (budget - fixed) / (row + samples * each)
    if fitting >= 1:
        return min(rows, int(fitting)), samples
    return 1, min(samples, max(smallest, int((budget - fixed - row) / each)))


def narrow(batch: Mapping[str, Tensor], start: int, count: int) -> dict[str, Tensor]:
    """Slice rows of a batch."""
    return {name: value.narrow(-2, start, count) for name, value in batch.items()}


def shares(total: int, most: int, *, smallest: int = 1) -> list[int]:
    """Split a total into nearly equal parts of at most ``most``.

    A part may exceed ``most`` if it would otherwise be smaller than ``smallest``.

    >>> shares(10, 4)
    [4, 3, 3]
    """
    parts = max(1, min(math.ceil(total / most), total // smallest))
    return [total // parts + (i < total % parts) for i in range(parts)]
