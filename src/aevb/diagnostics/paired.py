"""Compare two densities row by row: a trimmed mean of the differences and its standard error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.estimate.keys import masks_of
from aevb.model import Model

TRIMMED = 0.05  # share of the rows left out at either end: a few rows must not decide
ENOUGH = 4  # rows from which on the rows tell the standard error
# A difference counts if it exceeds both: standard errors, and nats per observed number.
SIGMAS, NATS = 4.0, 0.01


@dataclass(frozen=True)
class Difference:
    """The mean difference in nats per row and its standard error; ``numbers`` are those of a row.

    >>> paired(torch.full((100,), 1.0), numbers=10).clear
    True
    """

    mean: float
    stderr: float
    numbers: float

    @property
    def clear(self) -> bool:
        return self.mean > max(SIGMAS * self.stderr, NATS * self.numbers)

    def __str__(self) -> str:
        error = f" (standard error {self.stderr:.2g})" if self.stderr else ""
        return f"{self.mean:z.2f} nats per example{error}"


def paired(differences: Tensor, numbers: float, *, trimmed: bool = True) -> Difference:
    """Return the mean over the rows, ``trimmed`` or not, with its standard error (Yuen 1974).

    ``differences`` may have several draws per row, [K, N]. With few rows their mean is not trimmed,
    and the draws tell the standard error.
    """
    values = differences.double().reshape(-1, differences.shape[-1])
    rows, n = values.mean(0).sort().values, values.shape[-1]
    if n < ENOUGH:
        draws = values.mean(1)
        stderr = float(draws.std()) / len(draws) ** 0.5 if len(draws) > 1 else 0.0
        return Difference(float(rows.mean()), stderr, numbers)
    share = TRIMMED if trimmed else 0.0
    cut = int(share * n)
    bounded = rows.clamp(rows[cut], rows[n - cut - 1])
    stderr = float(bounded.std()) / ((1 - 2 * share) * n**0.5)
    return Difference(float(rows[cut : n - cut].mean()), stderr, numbers)


def observed_numbers(model: Model, batch: Mapping[str, Tensor]) -> float:
    """Return how many numbers of a row are observed, as a mean over the rows."""
    n, found = model._extent(batch)[0], 0.0
    for name in model.graph.observed:
        found += float(known(model, batch, name).sum())
    return found / n


def known(model: Model, batch: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the mask of the known entries of a variable at real steps, in its own shape."""
    mask = torch.ones_like(batch[name], dtype=torch.bool)
    for one in masks_of(batch, name, timed=model.graph.timed[name]):
        mask = mask & one
    return mask
