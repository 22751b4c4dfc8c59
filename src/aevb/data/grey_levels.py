"""Prepare grey levels 0 … L − 1: binarise, dequantise to (0, 1), scale, or keep as counts.

Each function maps an array to an array, or a list of sequences to such a list. The rows of a mapped
file are prepared lazily (:class:`Prepared`), with the same random numbers as an array in memory
would get. With ``fresh=True``, ``binarise`` and ``dequantise`` return :class:`Fresh` levels:
training draws every row again each time it takes the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from aevb.data.lazy_rows import is_lazy
from aevb.estimate.batch import unmasked

# Smallest distance of a dequantised value from 0 and 1, where a density may be undefined.
INSIDE = 2.0**-24


@dataclass(frozen=True, eq=False)
class Fresh:
    """Grey levels that are drawn again each time training takes their rows.

    The stored levels do not change. In validation and evaluation the draw of a row is always the
    same. :func:`binarise` and :func:`dequantise` return it with ``fresh=True``; ``fit`` accepts it.

    Attributes:
        values: The grey levels 0 … ``levels`` − 1, an array or a mapped file.
        how: "binarise" or "dequantise".
        levels: Number of grey levels.

    >>> pixels = binarise(np.array([[0, 128, 255]]), fresh=True)
    >>> pixels, len(pixels)
    (binarise 256, 1)
    """

    values: Any
    how: str
    levels: int = 256

    def draw(self, levels: Tensor, uniform: Tensor) -> Tensor:
        """Draw rows from their grey levels.

        Arguments:
            levels: The grey levels of the rows.
            uniform: As many numbers, uniform on [0, 1).

        Returns:
            The drawn rows: 0 or 1, or numbers inside (0, 1).

        >>> import torch
        >>> fresh = binarise(np.array([[0, 128, 255]]), fresh=True)
        >>> fresh.draw(torch.tensor([0, 128, 255]), torch.tensor([0.5, 0.4, 0.9]))
        tensor([0., 1., 1.])
        """
        if self.how == "binarise":
            return (uniform * (self.levels - 1) < levels).to(uniform.dtype)
        return ((levels + uniform) / self.levels).clamp(INSIDE, 1 - INSIDE)

    def middle(self, levels: np.ndarray, first_row: int | None = None) -> np.ndarray:
        """Return a possible value of a draw, for checks.

        Arguments:
            levels: The grey levels of some rows.
            first_row: The number of the first of these rows in their file, for messages.

        >>> dequantise(np.array([[0, 3]]), levels=4, fresh=True).middle(np.array([[0, 3]])).tolist()
        [[0.125, 0.875]]
        """
        checked = _levels(self.how, levels, self.levels, first_row)
        return (
            _RULES["threshold"](checked, self.levels, None)
            if self.how == "binarise"
            else (checked + 0.5) / self.levels
        )

    def once(self, seed: int = 0) -> np.ndarray:
        """Draw all rows once and return them as an array.

        Arguments:
            seed: Decides the draw.

        >>> binarise(np.array([[0, 255]]), fresh=True).once(seed=1).tolist()
        [[0.0, 1.0]]
        """
        return np.asarray(PREPARATIONS[self.how](self.values, self.levels, seed=seed))

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"{self.how} {self.levels}"


@dataclass(frozen=True, eq=False)
class Prepared:
    """Grey levels of a mapped file, prepared when they are indexed.

    Each row is the same as if the whole file were an array in memory. The preparations make it of
    a mapped file; numpy and ``fit`` accept it as an array.

    Attributes:
        raw: The grey levels of the file.
        how: The name of the preparation, such as "scale".
        levels: Number of grey levels.
        seed: Decides the draws of "dequantise" and "binarise".

    >>> rows = Prepared(np.array([[0, 255], [51, 102]]), "scale")
    >>> rows.shape, rows[1].round(2).tolist()
    ((2, 2), [0.20000000298023224, 0.4000000059604645])
    """

    raw: Any
    how: str
    levels: int = 256
    seed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the file's array."""
        return tuple(self.raw.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the file's array."""
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any) -> np.ndarray:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            index = np.arange(start, stop, step)
        else:
            index = np.asarray(rows)
            index = np.flatnonzero(index) if index.dtype == bool else index % len(self)
        if index.ndim == 0:
            return self[index[None]][0]
        first = int(index[0]) if len(index) else 0
        levels = _levels(
            self.how,
            np.asarray(self.raw[rows if isinstance(rows, slice) else index]),
            self.levels,
            first,
        )
        draws = (
            _uniform(self.seed, index, math.prod(self.shape[1:])).reshape(levels.shape)
            if self.how in DRAWN
            else None
        )
        return _RULES[self.how](levels, self.levels, draws)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)


def dequantise(x: Any, levels: int = 256, *, seed: int = 0, fresh: bool = False) -> Any:
    """Dequantise grey levels to (0, 1): (x + u) / levels with u uniform on [0, 1).

    Arguments:
        x: Grey levels 0 … levels − 1: an array, a list of sequences, or a mapped file.
        levels: Number of grey levels.
        seed: Decides the draws u.
        fresh: Draw u again each time training takes a row (:class:`Fresh`).

    Returns:
        The numbers as float32; those of a mapped file are prepared when they are read.

    >>> (dequantise([0, 3], levels=4) * 4).astype(int).tolist()
    [0, 3]
    """
    return _fresh("dequantise", x, levels) if fresh else _prepared("dequantise", x, levels, seed)


def threshold(x: Any, levels: int = 256, *, seed: int = 0) -> Any:
    """Threshold grey levels: 1 for the upper half of the levels, else 0.

    Arguments:
        x: Grey levels, as in :func:`dequantise`.
        levels: Number of grey levels.
        seed: Unused: nothing is drawn.

    Returns:
        Zeros and ones as float32.

    >>> threshold([0, 127, 128, 255]).tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    return _prepared("threshold", x, levels, seed)


def binarise(x: Any, levels: int = 256, *, seed: int = 0, fresh: bool = False) -> Any:
    """Draw 1 with probability x / (levels − 1), else 0.

    Arguments:
        x: Grey levels, as in :func:`dequantise`.
        levels: Number of grey levels.
        seed: Decides the draws.
        fresh: Draw again each time training takes a row (:class:`Fresh`).

    Returns:
        Zeros and ones as float32; those of a mapped file are drawn when they are read.

    >>> binarise([0, 255]).tolist()
    [0.0, 1.0]
    """
    return _fresh("binarise", x, levels) if fresh else _prepared("binarise", x, levels, seed)


def scale(x: Any, levels: int = 256, *, seed: int = 0) -> Any:
    """Scale grey levels to [0, 1].

    Arguments:
        x: Grey levels, as in :func:`dequantise`.
        levels: Number of grey levels.
        seed: Unused: nothing is drawn.

    Returns:
        x / (levels − 1) as float32.

    >>> scale([0, 255]).tolist()
    [0.0, 1.0]
    """
    return _prepared("scale", x, levels, seed)


def counts(x: Any, levels: int = 256, *, seed: int = 0) -> Any:
    """Return grey levels unchanged, as counts in float32.

    Arguments:
        x: Grey levels, as in :func:`dequantise`.
        levels: Number of grey levels; larger numbers are refused.
        seed: Unused: nothing is drawn.

    >>> counts([0, 7, 16], levels=17).tolist()
    [0.0, 7.0, 16.0]
    """
    return _prepared("counts", x, levels, seed)


PREPARATIONS: dict[str, Callable[..., Any]] = {
    "dequantise": dequantise,
    "threshold": threshold,
    "binarise": binarise,
    "scale": scale,
    "counts": counts,
}


def _prepared(how: str, x: Any, levels: int, seed: int) -> Any:
    """Prepare grey levels.

    An array or a list of sequences is prepared at once, the rows of a file when indexed.
    """
    if is_lazy(x):
        return Prepared(x, how, levels, seed)
    if _of_different_lengths(x):
        rows = [np.asarray(row) for row in unmasked(x)]
        return np.split(
            _prepared(how, np.concatenate(rows), levels, seed),
            np.cumsum([len(row) for row in rows])[:-1],
        )
    array = _levels(how, x, levels)
    draws = (
        np.random.default_rng(seed).random(array.shape, dtype=np.float32) if how in DRAWN else None
    )
    return _RULES[how](array, levels, draws)


def _fresh(how: str, x: Any, levels: int) -> Fresh:
    """Return :class:`Fresh` grey levels; those of a mapped file are checked when they are read."""
    if _of_different_lengths(x):
        raise ValueError(
            f"{how}-fresh takes an array; pad the sequences to one length and pass lengths=…, or "
            f"use {how}."
        )
    return Fresh(x if is_lazy(x) else _levels(how, x, levels), how, levels)


def _of_different_lengths(x: Any) -> bool:
    return isinstance(x, list | tuple) and len({np.shape(row)[:1] for row in x}) > 1


def _uniform(seed: int, rows: np.ndarray, width: int) -> np.ndarray:
    """Return the numbers of ``default_rng(seed).random`` for these rows, [rows, width].

    The generator fills a float32 array. Two float32 numbers use the halves of one 64-bit word, and
    the generator can jump to any word.
    """
    bits = np.random.PCG64(seed)
    begin, generator = bits.state, np.random.Generator(bits)
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        rows, height = rows[:1], len(rows)
    else:
        height = 1
    found = []
    for row in rows.tolist():
        word, half = divmod(row * width, 2)
        bits.state = begin
        bits.advance(word)
        found.append(generator.random(half + height * width, dtype=np.float32)[half:])
    return np.concatenate([*found, np.zeros(0, np.float32)]).reshape(-1, width)


def _levels(what: str, x: Any, levels: int, first_row: int | None = None) -> np.ndarray:
    """Check grey levels and return them.

    ``first_row`` is the number of the first row within its file.
    """
    x = unmasked(x)
    array = x if isinstance(x, np.ndarray) else np.asarray(x)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{what} takes grey levels, not {array.dtype}.")
    if array.size and not (array.dtype == np.uint8 and levels == 256):
        low, high = np.fmin.reduce(array, None), np.fmax.reduce(array, None)
        if low < 0 or high > levels - 1:
            row = int(((array < 0) | (array > levels - 1)).nonzero()[0][0])
            where = "" if first_row is None else f" (first, from 0: row {first_row + row})"
            raise ValueError(
                f"{what} takes grey levels 0 … {levels - 1}, but these go from {low} to "
                f"{high}{where}. Give the number of levels: levels=…."
            )
    return array


def _dequantised(x: np.ndarray, levels: int, u: Any) -> np.ndarray:
    """Dequantise in place: allocating another large array costs as much time as the arithmetic."""
    found = x.astype(np.float32)
    found += u
    found /= np.float32(levels)
    return np.clip(found, np.float32(INSIDE), np.float32(1 - INSIDE), out=found)


# Functions of the grey levels, the number of levels, and uniform numbers on [0, 1) (None if not
# needed).
_RULES: dict[str, Callable[[np.ndarray, int, Any], np.ndarray]] = {
    "dequantise": _dequantised,
    "threshold": lambda x, levels, u: _where_known(x, x >= levels / 2),
    "binarise": lambda x, levels, u: _where_known(x, u * (levels - 1) < x),
    "scale": lambda x, levels, u: x.astype(np.float32) / np.float32(levels - 1),
    "counts": lambda x, levels, u: x.astype(np.float32),
}
DRAWN = ("dequantise", "binarise")
# Values with probabilities instead of densities: no change of units changes log p.
DISCRETE = ("threshold", "binarise", "counts")

# The way back, from the number of levels: the numbers a and b of grey level = a · value + b.
INVERSES: dict[str, Callable[[int], tuple[float, float]]] = {
    "dequantise": lambda levels: (levels, -0.5),
    "threshold": lambda levels: (levels - 1, 0),
    "binarise": lambda levels: (levels - 1, 0),
    "scale": lambda levels: (levels - 1, 0),
    "counts": lambda levels: (1, 0),
}


def _where_known(x: np.ndarray, value: np.ndarray) -> np.ndarray:
    found = value.astype(np.float32)
    return np.where(np.isnan(x), np.float32("nan"), found) if x.dtype.kind == "f" else found
