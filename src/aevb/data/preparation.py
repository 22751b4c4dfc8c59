"""Prepare tables, images and grey levels (``grey_levels.py``) for a likelihood.

``standardise`` returns a record that numpy and ``fit`` accept as an array. It keeps the means and
scales, so that other rows can be standardised in the same way and samples converted back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.grey_levels import PREPARATIONS
from aevb.data.lazy_rows import LazyRows
from aevb.declare.graph import Graph
from aevb.estimate.batch import unmasked
from aevb.estimate.places import named_columns, refuse_other_columns
from aevb.runtime.checked_files import check_mapped

CHUNK = 2**24  # bytes of a file per read


@dataclass(frozen=True, eq=False)
class Standardised:
    """Values (raw − mean) / scale, computed when they are read.

    :func:`standardise` makes it. numpy and ``fit`` accept it as an array; files stay memory-mapped.

    Attributes:
        raw: The values in their own units: an array, a list of sequences, or a mapped file.
        mean: The mean of each column.
        scale: The standard deviation of each column, 1 for a constant column.
        columns: The names of the columns, if the values were a frame of several.

    >>> x = standardise([[1.0, 10.0], [3.0, 10.0]])
    >>> x.mean.tolist(), x.scale.tolist(), np.asarray(x).tolist()
    ([2.0, 10.0], [1.0, 1.0], [[-1.0, 0.0], [1.0, 0.0]])
    """

    raw: Any
    mean: np.ndarray
    scale: np.ndarray
    columns: tuple[str, ...] = ()

    @property
    def values(self) -> Any:
        """All standardised values, as an array or a list of sequences."""
        check_mapped(self.raw)
        return (
            [self.apply(np.asarray(row)) for row in self.raw]
            if isinstance(self.raw, list)
            else self.apply(np.asarray(self.raw))
        )

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Standardise other rows with the same mean and scale.

        Arguments:
            x: Rows in the units of ``raw``.

        Returns:
            The standardised rows, in the shape of x.

        >>> standardise([[1.0], [3.0]]).apply(np.array([[5.0]])).tolist()
        [[3.0]]
        """
        precision = x.dtype if x.dtype.kind == "f" else np.float64
        return ((self._columns(x) - self.mean) / self.scale).astype(precision).reshape(x.shape)

    def undo(self, x: Any) -> np.ndarray:
        """Convert standardised values back to the units of ``raw``.

        Arguments:
            x: Standardised values, for instance samples of a model.

        Returns:
            The values in the units of ``raw``, in the shape of x.

        >>> standardise([[1.0], [3.0]]).undo([[3.0]]).tolist()
        [[5.0]]
        """
        array = np.asarray(x)
        found = self._columns(array) * self.scale + self.mean
        return np.asarray(found, dtype=array.dtype if array.dtype.kind == "f" else None).reshape(
            array.shape
        )

    def _columns(self, x: np.ndarray) -> np.ndarray:
        """Return values with the standardised columns as the last axis.

        A variable of one number per step may or may not have an axis of size 1 for it.
        """
        d = self.mean.size
        if d == 1:
            return x if x.shape[-1:] == (1,) else x[..., None]
        columns = x[..., 0] if x.shape[-2:] == (d, 1) else x
        if columns.shape[-1:] != (d,):
            raise ValueError(
                f"The values have shape {list(x.shape)}, but {d} columns were standardised."
            )
        return columns

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.apply(np.asarray(self.raw[rows]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.values, dtype=dtype)


def standardise(x: Any, like: Standardised | None = None) -> Standardised:
    """Scale every column (the last axis) to mean 0 and standard deviation 1.

    Missing entries (NaN) are ignored. A constant column is only centred. In a list of sequences of
    different lengths, all steps of all sequences count.

    Arguments:
        x: An array, a list of sequences, or a mapped file.
        like: The record of other rows, whose mean and scale are then used:
            ``standardise(test, like=train)``.

    Returns:
        A record that ``fit`` and numpy accept as an array; ``record.undo(samples)`` converts back
        to the units of x.

    Raises:
        InfiniteError: An entry is infinite (a ValueError).

    >>> record = standardise([[1.0, 5.0], [3.0, 5.0]])
    >>> record.values.tolist(), record.mean.tolist(), record.scale.tolist()
    ([[-1.0, 0.0], [1.0, 0.0]], [2.0, 5.0], [1.0, 1.0])
    """
    x = unmasked(x)
    check_mapped(x)
    columns = named_columns(x) if hasattr(x, "columns") else ()
    if like is not None and columns and like.columns:
        refuse_other_columns("The frame", columns, like.columns, "like= has")
    if isinstance(x, list | tuple) and x and np.ndim(x[0]):
        raw: Any = [np.asarray(row) for row in x]
    else:
        # The rows of a file are read when they are needed.
        lazy = isinstance(x, np.memmap | LazyRows) or hasattr(x, "raw")
        raw = x if lazy else np.asarray(x)
    if isinstance(raw, list) and len({row.shape for row in raw}) == 1:
        raw = np.stack(raw)
    if like is not None:
        shape = (raw[0] if isinstance(raw, list) else raw).shape
        width = 1 if not isinstance(raw, list) and len(shape) == 1 else shape[-1]
        if like.mean.size != 1 and like.mean.size not in (
            width,
            *(shape[-2:-1] if width == 1 else ()),
        ):
            raise ValueError(
                f"The rows have {width} columns, but like= was standardised with {like.mean.size}."
            )
        return Standardised(raw, like.mean, like.scale, columns)
    count, mean, square, low, high = 0.0, 0.0, 0.0, np.inf, -np.inf
    for part in parts(raw):  # merge means and squares of parts, so that a file is read in parts
        if np.isinf(part).any():
            raise _first_infinite(raw)
        known = ~np.isnan(part)
        n = known.sum(0)
        here = np.where(known, part, 0).sum(0) / np.maximum(n, 1)
        spread = (np.where(known, part - here, 0) ** 2).sum(0)
        total = np.maximum(count + n, 1)
        square = square + spread + (here - mean) ** 2 * count * n / total
        mean = mean + (here - mean) * n / total
        count = count + n
        low, high = (
            np.minimum(low, np.where(known, part, np.inf).min(0)),
            np.maximum(high, np.where(known, part, -np.inf).max(0)),
        )
    deviation = np.sqrt(square / np.maximum(count, 1))
    return Standardised(
        raw, np.asarray(mean), np.where((high > low) & (deviation > 0), deviation, 1.0), columns
    )


class InfiniteError(ValueError):
    """Error for an infinite entry.

    ``value`` is the first such entry and ``place`` its (row, step, column).
    """

    fix = "Replace it; NaN marks a missing entry."

    def __init__(self, value: float, place: tuple[int, int, int], steps: bool) -> None:
        row, step, column = place
        where = f"row {row}, {f'step {step}, ' if steps else ''}column {column} (from 0)"
        super().__init__(f"standardise takes finite numbers, but {where} holds {value}. {self.fix}")
        self.value, self.place = value, place


def _first_infinite(raw: Any) -> InfiniteError:
    """Return the error for the first infinite entry."""
    for row in range(len(raw)):
        lines = next(parts(raw[row : row + 1]))
        for step, column in np.argwhere(np.isinf(lines)).tolist():
            return InfiniteError(float(lines[step, column]), (row, step, column), len(lines) > 1)
    raise AssertionError("every entry is finite")


def as_sequence(images: Any, steps: int | None = None) -> np.ndarray:
    """Turn images into sequences whose steps are the rows of the image.

    Arguments:
        images: [N, height, width], which is unchanged, or [N, height · width].
        steps: The number of rows of an image; by default images are square.

    Returns:
        The sequences [N, steps, width].

    >>> as_sequence(np.zeros((5, 64))).shape
    (5, 8, 8)
    """
    array = np.asarray(images)
    if array.ndim == 3:
        return array
    if array.ndim != 2:
        raise ValueError(
            f"as_sequence takes images [N, height, width] or [N, height · width], got the shape "
            f"{list(array.shape)}."
        )
    rows = steps or round(array.shape[1] ** 0.5)
    if array.shape[1] % rows or (steps is None and rows * rows != array.shape[1]):
        raise ValueError(
            f"{array.shape[1]} columns cannot be split into {steps or 'a square of'} rows. Give "
            f"the number of rows: as_sequence(x, steps=…)."
        )
    return array.reshape(len(array), rows, -1)


CHOICES = (*PREPARATIONS, "dequantise-fresh", "binarise-fresh", "standardise")


def default_preparation(graph: Graph, name: str) -> str:
    """Return the preparation that an image's likelihood requires: binary, counts or a density."""
    return "dequantise" if name in graph.given else graph.rule("p", name).spec.preparation


def prepare_levels(how: str, x: Any, levels: int, *, seed: int = 0) -> Any:
    """Prepare grey levels by the name of a preparation.

    It is a name of :data:`PREPARATIONS`, ``binarise-fresh`` or ``dequantise-fresh``.
    """
    name, _, fresh = how.partition("-")
    if how not in CHOICES or how == "standardise":
        raise ValueError(f"Unknown preparation {how!r}. Choose one of {', '.join(CHOICES)}.")
    return PREPARATIONS[name](x, levels, seed=seed, **({"fresh": True} if fresh else {}))


def as_variable(
    graph: Graph,
    name: str,
    pixels: np.ndarray,
    levels: int,
    *,
    how: str | None = None,
    seed: int = 0,
) -> Any:
    """Prepare images [N, height, width] for a variable.

    They become flat vectors, or one image row per step if the variable has time.
    """
    x = pixels if graph.timed[name] else pixels.reshape(len(pixels), -1)
    return prepare_levels(how or default_preparation(graph, name), x, levels, seed=seed)


def parts(raw: Any) -> Iterator[np.ndarray]:
    """Yield the rows in parts, [n, d] in double precision."""
    if isinstance(raw, list):
        for row in raw:
            yield row.reshape(len(row), -1).astype(np.float64)
        return
    width = raw.shape[-1] if raw.ndim > 1 else 1
    step = max(1, CHUNK // max(1, raw[:1].nbytes))
    for start in range(0, len(raw), step):
        yield np.asarray(raw[start : start + step]).reshape(-1, width).astype(np.float64)


@dataclass(frozen=True)
class Affine:
    """Random affine distortions of images: rotation, shear, scaling and shift.

    Every step draws small distortions, for ``fit(…, agree=…, distort=Affine(…))``. Each field is
    the largest distortion of its kind.

    Attributes:
        shape: Height and width of the images.
        rotate: The largest angle in radians.
        shear: The largest shear.
        scale: The largest change of the size, as a fraction.
        shift: The largest shift, as a fraction of the side.

    >>> generator = torch.Generator().manual_seed(0)
    >>> rows, distort = torch.ones(3, 64), Affine((8, 8))
    >>> distort(rows, distort.draws(3, generator, rows), binary=True).shape
    torch.Size([3, 64])
    """

    shape: tuple[int, int]
    rotate: float = 0.2
    shear: float = 0.3
    scale: float = 0.12
    shift: float = 0.06

    def draws(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """Draw the random numbers of distortions.

        Arguments:
            n: Number of distortions.
            generator: Decides the draws.
            like: A tensor whose device and precision the draws have.

        Returns:
            Numbers [n, 6], uniform on [−1, 1).
        """
        return torch.rand((n, 6), generator=generator, device=like.device, dtype=like.dtype) * 2 - 1

    def __call__(self, rows: Tensor, draws: Tensor, *, binary: bool) -> Tensor:
        """Return distorted copies of rows [N, height · width], rounded to 0 or 1 if ``binary``."""
        turn, shear = draws[:, 0] * self.rotate, draws[:, 1] * self.shear
        wide, high = 1 + draws[:, 2] * self.scale, 1 + draws[:, 3] * self.scale
        cos, sin = turn.cos(), turn.sin()
        top = torch.stack(
            [wide * cos, high * (shear * cos - sin), 2 * self.shift * draws[:, 4]], -1
        )
        bottom = torch.stack(
            [wide * sin, high * (shear * sin + cos), 2 * self.shift * draws[:, 5]], -1
        )
        images = rows.reshape(-1, 1, *self.shape)
        grid = torch.nn.functional.affine_grid(
            torch.stack([top, bottom], 1), list(images.shape), align_corners=False
        )
        moved = torch.nn.functional.grid_sample(images, grid, align_corners=False).reshape(
            rows.shape
        )
        return (moved > 0.5).to(rows.dtype) if binary else moved
