"""Random rows for a declaration.

They are complete, or have missing entries, latents that are known in some rows, and different
lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .declaration import Declaration
from .unroll import Row


@dataclass(frozen=True)
class Rows:
    """The library's data ([N, d] or [N, T, d], NaN where unknown), and the length of each row."""

    arrays: dict[str, Tensor]
    lengths: list[int]
    steps: int
    ragged: bool

    def __len__(self) -> int:
        return len(self.lengths)

    def arguments(self) -> dict[str, object]:
        return {**self.arrays, **({"lengths": torch.tensor(self.lengths)} if self.ragged else {})}

    def row(self, declaration: Declaration, n: int) -> Row:
        """Return one row as the interpreter reads it, with its own steps only."""
        data, present = {}, {}
        for name, array in self.arrays.items():
            own = array[n, : self.lengths[n]] if name in declaration.timed else array[n]
            known = ~own.isnan()
            data[name] = torch.where(known, own, 0.0)
            if not bool(known.all()):
                present[name] = known
        return Row(self.lengths[n], data, present)

    def knows(self, declaration: Declaration, name: str) -> bool:
        """Return whether a latent is known at every step of every row."""
        steps = [range(length) if name in declaration.timed else [None] for length in self.lengths]
        return all(
            self.row(declaration, n).known((name, t)) for n, own in enumerate(steps) for t in own
        )

    def repeated(self, n: int, times: int) -> Rows:
        """Return one row, repeated."""
        arrays = {
            name: array[n : n + 1].expand(times, *array.shape[1:]).clone()
            for name, array in self.arrays.items()
        }
        return Rows(arrays, [self.lengths[n]] * times, self.steps, self.ragged)


def values(rng: np.random.Generator, family: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw numbers in a family's support."""
    if family == "OneHot":
        return np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]
    if family == "Bernoulli":
        return rng.integers(2, size=shape).astype(float)
    if family in ("Poisson", "NegativeBinomial"):
        return rng.poisson(2.0, size=shape).astype(float)
    if family in ("Beta", "ContinuousBernoulli"):
        return rng.uniform(0.05, 0.95, size=shape)
    return rng.normal(size=shape)


def random_rows(declaration: Declaration, rng: np.random.Generator, kind: str) -> Rows:
    """Draw rows of a kind: "complete", "missing" or "clamped".

    "missing" has missing entries of data, some known latents, and rows of different lengths.
    "clamped" has a latent that is known in every row.
    """
    n = 3
    steps = int(rng.choice([1, 2, 3])) if declaration.timed else 1
    ragged = bool(declaration.timed) and kind != "complete" and steps > 1
    lengths = [int(rng.integers(1, steps + 1)) if ragged else steps for _ in range(n)]
    arrays = {}
    for name in (*declaration.observed, *declaration.given):
        family = (
            next(iter(declaration.rules("p", name).values())).family
            if name not in declaration.given
            else "Normal"
        )
        shape = (
            (n, steps, declaration.sizes[name])
            if name in declaration.timed
            else (n, declaration.sizes[name])
        )
        array = values(rng, family, shape)
        read = any(
            other.name == name
            for line in declaration.lines
            if line.side == "p"
            for other in line.reads
        )
        if kind == "missing" and not read:
            gone = rng.random(shape) < 0.25
            if family == "OneHot":
                gone[:] = gone[..., :1]
            array = np.where(gone, np.nan, array)
        arrays[name] = torch.from_numpy(array)
    for name in declaration.latents if kind != "complete" else ():
        if rng.random() < 0.5:
            family = declaration.rules("p", name)["t" if name in declaration.timed else ""].family
            shape = (
                (n, steps, declaration.sizes[name])
                if name in declaration.timed
                else (n, declaration.sizes[name])
            )
            array = values(rng, family, shape)
            if kind == "missing":
                array = np.where(rng.random((*shape[:-1], 1)) < 0.5, np.nan, array)
            arrays[name] = torch.from_numpy(array)
    return Rows(arrays, lengths, steps, ragged)


def random_noise(
    rng: np.random.Generator, kind: str | tuple[str, float], shape: tuple[int, ...]
) -> Tensor:
    name, parameter = (kind, math.nan) if isinstance(kind, str) else kind
    draw = {
        "normal": lambda: rng.normal(size=shape),
        "laplace": lambda: rng.laplace(size=shape),
        "gumbel": lambda: rng.gumbel(size=shape),
        "logistic": lambda: rng.logistic(size=shape),
        "uniform": lambda: rng.uniform(0.02, 0.98, size=shape),
        "student": lambda: rng.standard_t(parameter, size=shape),
    }[name]
    return torch.from_numpy(np.asarray(draw()))
