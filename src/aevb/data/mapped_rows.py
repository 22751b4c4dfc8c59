"""Lazy access to the rows of memory-mapped files and of other :class:`LazyRows`."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from aevb.data.grey_levels import Fresh, Prepared
from aevb.data.lazy_rows import LazyRows, Windows, is_lazy
from aevb.data.preparation import Standardised


class OnDisk:
    """Rows of a memory-mapped array, read from its file with ``preadv``.

    Reading through the map instead would page in up to 2 MiB of the file per row.
    """

    def __init__(self, array: np.memmap) -> None:
        self.file = open(array.filename, "rb", buffering=0)  # type: ignore[arg-type]  # noqa: SIM115
        # The position in the file where the map begins. The array may begin later.
        begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
        address = np.frombuffer(array._mmap, np.uint8, 1).__array_interface__["data"][0]  # type: ignore[attr-defined]
        self.offset = begin + array.__array_interface__["data"][0] - address
        self.dtype, self.shape = array.dtype, array.shape
        self.number, self.width = self.file.fileno(), array[:1].nbytes
        weakref.finalize(self, self.file.close)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        start, stop, _ = rows.indices(len(self)) if isinstance(rows, slice) else (0, len(rows), 1)
        found = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        content = memoryview(found.reshape(-1).view(np.uint8).data)
        if isinstance(rows, slice):
            self._read(content, self.offset + start * self.width)
        else:
            width = self.width
            for i, row in enumerate(rows.tolist()):
                self._read(content[i * width : (i + 1) * width], self.offset + row * width)
        return found

    def _read(self, into: memoryview, place: int) -> None:
        count = os.preadv(self.number, [into], place)
        if count < len(into):  # one call reads at most 2 GiB, and 0 bytes at the end of the file
            if not count:
                raise ValueError(
                    f"{self.file.name} became shorter while it was read. Write it again, and "
                    f"restart."
                )
            self._read(into[count:], place + count)


class Rows:
    """Selected rows of an array, in a given order; those of a mapped file are read when indexed."""

    def __init__(self, raw: Any, index: np.ndarray) -> None:
        self.raw, self.index = raw, index
        self.shape = (len(index), *raw.shape[1:])
        self.ndim = len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return np.asarray(self.raw[self.index[rows]])


def memory_map(value: Any) -> np.memmap | None:
    """Return the memory map behind an array, its selected rows or its preparation; else None."""
    while isinstance(value, Rows | Standardised | Prepared | Fresh):
        value = value.values if isinstance(value, Fresh) else value.raw
    return (
        value
        if isinstance(value, np.memmap) and getattr(value, "_mmap", None) is not None
        else None
    )


def windows_of(value: Any) -> Windows | None:
    """Return the groups of rows that are read together; None if any order costs the same."""
    if isinstance(value, LazyRows):
        return value.windows()
    if isinstance(value, Rows):
        found = windows_of(value.raw)
        if found is None or (np.diff(value.index) <= 0).any():
            return None
        starts = np.concatenate([[0], np.cumsum(found.sizes)])
        counts = np.diff(np.searchsorted(value.index, starts))
        return Windows(tuple(counts[counts > 0].tolist()), found.rows)
    if isinstance(value, Standardised | Prepared | Fresh):
        return windows_of(value.values if isinstance(value, Fresh) else value.raw)
    return None


def some_rows(value: Any, index: np.ndarray) -> Any:
    """Select rows of an array, a list or lazy rows (which stay lazy)."""
    if is_lazy(value):
        return Rows(value, index)
    if isinstance(value, list):
        return [value[i] for i in index]
    return np.asarray(value)[index]


def one_column(value: Any) -> Any:
    """Add a last axis of size 1 to sequences of one number per step, [N, T] or a list of [T].

    A mapped file stays mapped.
    """
    if isinstance(value, list):
        return [np.asarray(row)[:, None] for row in value]
    return Rows(value.raw[..., None], value.index) if isinstance(value, Rows) else value[..., None]


def rows_of(value: Any) -> Any:
    """Return an object to read rows from.

    It is an :class:`OnDisk` for a plainly mapped array, else the array.
    """
    if isinstance(value, Rows):
        return Rows(rows_of(value.raw), value.index)
    if isinstance(value, Standardised | Prepared):
        return replace(value, raw=rows_of(value.raw))
    if (
        memory_map(value) is not None
        and value.mode == "r"
        and value.flags.c_contiguous
        and value.filename
    ):
        return OnDisk(value)
    if isinstance(value, np.memmap | LazyRows):
        return value
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
