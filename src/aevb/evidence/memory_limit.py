"""What a computation holds in memory, found by running it small, and how many rows and samples then fit into a limit."""

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

DEFAULT = 2**27  # on the CPU, where larger pieces are no faster: their pages are fetched anew for every operation
CORNERS = 0.02  # of a limit on a GPU
SHARE = 0.5  # of a GPU's free memory
PROBE = 32  # samples of the small run; enough that what every sample needs outweighs what a row needs once
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Peak(private_torch.DispatchMode or object):  # type: ignore[misc]
    """The most that tensors made inside held at once: ``with Peak() as peak: …`` and then ``peak.bytes``, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):  # made outside, e.g. a weight: a view of it takes nothing
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
    """A limit in bytes, from a number of them, a text such as "2 GiB", or None: what is sensible on the device."""
    if memory is None:
        if device.type != "cuda":
            return DEFAULT
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(SHARE * (torch.cuda.mem_get_info(device)[0] + unused))
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMG]?i?B?)\s*", memory, re.IGNORECASE)
        if match is None or match[2].upper() not in UNITS:
            raise ValueError(f'memory is a number of bytes or a text such as "2 GiB" or "500 MB", got {memory!r}.')
        memory = float(match[1]) * UNITS[match[2].upper()]
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not (memory > 0 and math.isfinite(memory)):
        raise ValueError(f'memory is a positive number of bytes or a text such as "2 GiB", got {memory!r}.')
    return int(memory)


def room(memory: float | str | None, parameters: Iterable[Tensor], batch: Mapping[str, Tensor]) -> int:
    """What a limit leaves beside what is there already, of which a part of at least a quarter is always given to work with.

    There are the weights and the data; on a GPU whatever the process holds, and the corners of blocks that no tensor fills.
    """
    weights = list(parameters)
    device = weights[0].device if weights else next(iter(batch.values())).device
    whole, there = limit(memory, device), sum(value.numel() * value.element_size() for value in (*weights, *batch.values()))
    if device.type == "cuda":  # where no limit was set, it is a share of what is free
        there = int(CORNERS * whole) + (torch.cuda.memory_allocated(device) if memory is not None else 0)
    return max(whole // 4, whole - there)


def pieces(run: Callable[[int, int], object], rows: int, samples: int, budget: int, *, smallest: int = 1) -> tuple[int, int]:
    """(rows, samples) of one piece such that run(rows, samples) holds at most ``budget`` bytes at once.

    A row keeps all its samples together if they fit, so that what depends on the row alone is computed once. ``run`` is tried on one
    row and on two; what it then holds is c + r·rows + s·rows·samples. A piece is never less than one row with ``smallest`` samples.
    """

    def held(n: int, k: int) -> int:
        with Peak() as peak:
            result = run(n, k)
        del result
        return peak.bytes

    if private_torch.DispatchMode is None:  # nobody can say what is held: small pieces
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
    """Some rows of a batch."""
    return {name: value.narrow(-2, start, count) for name, value in batch.items()}


def shares(total: int, most: int, *, smallest: int = 1) -> list[int]:
    """A total in parts as equal as can be, none above ``most`` (if that allows parts of ``smallest``)."""
    parts = max(1, min(math.ceil(total / most), total // smallest))
    return [total // parts + (i < total % parts) for i in range(parts)]
