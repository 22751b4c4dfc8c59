"""Information in each entry of a latent: its KL, and the variance of the posterior mean.

The variance is called the activity of the entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aevb.declare.families import Exact
from aevb.diagnostics.measure import Measured, spread
from aevb.estimate.keys import real_steps
from aevb.estimate.metric_names import kl_term
from aevb.model import Model

# Threshold of Burda et al. for the variance of the posterior mean over the data / prior variance.
ACTIVE = 0.01
CARRIES = 0.01  # nats per entry and step


@dataclass
class Usage:
    """KL per example, KL and activity per entry, and mean number of steps of a latent.

    ``kl_by_entry`` is None if p or q does not factorise over the entries.
    """

    kl: float
    kl_by_entry: Tensor | None
    activity: Tensor | None
    steps: float

    @property
    def inactive(self) -> Tensor | None:
        """Mask of the entries that are not used."""
        if self.activity is None:
            return None
        entries = self.kl / len(self.activity) if self.kl_by_entry is None else self.kl_by_entry
        # An entry with a constant mean can still have a KL.
        return (self.activity < ACTIVE) & (torch.as_tensor(entries) / self.steps < 5 * CARRIES)


class UsageSums:
    """Accumulate the usage of a latent over batches."""

    def __init__(self) -> None:
        self.n = self.steps = self.kl = 0.0
        self.by_entry: Tensor | None = None
        self.count: Tensor | None = None  # number of rows that have the step, [T or 1, 1]
        self.first: Tensor | None = (
            None  # Σ and Σ of squares of (E_q − E_p)/σ_p over the rows, [T or 1, d]
        )
        self.second: Tensor | None = None

    def add(self, part: Measured, name: str) -> None:
        model = part.model
        self.n += part.n
        self.steps += float(part.steps_of(name).sum())
        self.kl += float(part.bound.terms[kl_term(name)].double().sum())
        entries = part.kl(name)
        if entries is not None:
            self.by_entry = entries.double().sum(0) + (
                0.0 if self.by_entry is None else self.by_entry
            )
        if model.graph.rule("p", name).spec.finite and not _scalar(model, name):
            # Classes have no order. clusters.py measures their information by their probabilities.
            return
        if isinstance(model.graph.rule("q", name).spec, Exact):
            return
        shift = part.compare(name, lambda q, p: (q.mean - p.mean) / spread(p)).double()
        real = real_steps(part.batch, timed=model.graph.timed[name])
        there = torch.ones_like(shift[..., :1]) if real is None else real.double()
        added = (there.sum(1), shift.sum(1), shift.square().sum(1))
        before = (self.count, self.first, self.second)
        self.count, self.first, self.second = (
            added
            if before[0] is None
            else tuple(_longer(a, b) for a, b in zip(before, added, strict=True))
        )

    def usage(self) -> Usage:
        activity = None
        if self.count is not None and self.first is not None and self.second is not None:
            count = self.count.clamp_min(1)
            variance = self.second / count - (self.first / count).square()
            activity = ((variance * self.count).sum(0) / self.count.sum(0)).cpu()
        entries = None if self.by_entry is None else (self.by_entry / self.n).cpu()
        return Usage(self.kl / self.n, entries, activity, self.steps / self.n)


def _longer(a: Any, b: Tensor) -> Tensor:
    """Add two arrays [T, d] of different lengths T."""
    if len(a) == len(b):
        return a + b
    return torch.nn.functional.pad(a, (0, 0, 0, max(0, len(b) - len(a)))) + torch.nn.functional.pad(
        b, (0, 0, 0, max(0, len(a) - len(b)))
    )


def _scalar(model: Model, name: str) -> bool:
    """Return whether the entries of a finite latent are separate numbers, as for a Bernoulli."""
    return not model.graph.rule("p", name).spec.categorical and not isinstance(
        model.graph.rule("q", name).spec, Exact
    )
