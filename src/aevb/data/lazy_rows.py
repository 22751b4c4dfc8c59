"""Rows that are read when they are indexed, and the order in which they are cheap to read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

# Data of more bytes are read when indexed, and at most so many bytes are kept in memory.
# The order of rows depends on it: raise NUMBERS of training/row_order.py if it changes.
LARGE = 2**28


@dataclass(frozen=True)
class Windows:
    """Groups of consecutive rows that are read as a whole, and how many of them to mix.

    A pass over the data visits the groups in random order. The rows of successive groups, at most
    ``rows`` of them or one group, form a window and are mixed with each other.
    """

    sizes: tuple[int, ...]  # the number of rows of each group
    rows: int


class LazyRows(ABC):
    """An array [N, …] whose rows are read when they are indexed by a slice or by whole numbers."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, rows: Any) -> np.ndarray:
        if isinstance(rows, int | np.integer):
            return self[np.array([rows])][0]
        if isinstance(rows, slice):
            return self.read(np.arange(*rows.indices(len(self))))
        index = np.asarray(rows)
        index = np.flatnonzero(index) if index.dtype == bool else index
        return self.read(np.where(index < 0, index + len(self), index))

    @abstractmethod
    def read(self, index: np.ndarray) -> np.ndarray:
        """Return the rows of these numbers, from 0."""

    def windows(self) -> Windows | None:
        """Return the groups of rows that are read together; None if any order costs the same."""
        return None


def is_lazy(x: Any) -> bool:
    """Return whether the rows of an array are read when indexed, e.g. from a mapped file."""
    while hasattr(x, "raw"):
        x = x.raw
    return isinstance(x, LazyRows) or (
        isinstance(x, np.memmap) and getattr(x, "_mmap", None) is not None
    )
