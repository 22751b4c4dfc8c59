"""The evidence of sequence models by a particle filter with q as proposal.

log p(x) is estimated by the product over steps of the mean weights
(:mod:`aevb.estimate.particle_filter`), and by the mean over independent filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aevb.estimate.batch import completed
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.particle_filter import ParticleFilter
from aevb.evidence.memory_limit import narrow, pieces, room
from aevb.evidence.methods import why_not_filtered
from aevb.evidence.result import Evidence, count, weight_notes
from aevb.evidence.sampling import LEAST, Memory
from aevb.evidence.weights import Weights, tail_length, tail_shape

# If the effective sample size is below this share of the particles, a note says so.
FEW = 0.1


@dataclass(frozen=True)
class Particles:
    """Settings of the particle filter: ``log_evidence(x=x, method=Particles(repeats=16))``.

    Arguments:
        repeats: The number of independent filters that are averaged; their spread gives the
            standard error.
        threshold: A row is resampled when its effective sample size falls below ``threshold`` times
            the number of particles. With 0 it is never resampled, which is importance sampling;
            with 1 it is resampled at every step.

    >>> import torch
    >>> from aevb import zoo
    >>> model = zoo.local_level(start=1.0)
    >>> found = model.log_evidence(
    ...     x=torch.zeros(1, 5, 1), method=Particles(repeats=4), samples=20, seed=0
    ... )
    >>> found.method
    'particles'
    """

    repeats: int = 16
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or self.repeats < 2:
            raise ValueError(
                f"Particles: repeats is a whole number of at least 2, for a standard error from "
                f"their spread. Got {self.repeats!r}."
            )
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"Particles: threshold is between 0 and 1, got {self.threshold!r}.")


class Estimated(NamedTuple):
    """log p(x) per row, [N], by one filter, with diagnostics."""

    value: Tensor
    ess: Tensor  # lowest effective sample size of all steps, [N]
    khat: Tensor  # Pareto k of the weights of each step, [T, N]
    resampled: Tensor  # share of steps after which particles were resampled, [N]


def run_once(
    model: DeclaredModel, batch: Mapping[str, Tensor], particles: int, threshold: float
) -> Estimated:
    """Run one filter of all rows."""
    increments, ess, tails, resampled = [], [], [], []
    for step in ParticleFilter.of(model, batch, particles, threshold=threshold):
        increments.append(step.increment)
        ess.append(step.ess)
        tails.append(step.log_weights.topk(tail_length(particles) + 1, dim=0).values)
        resampled.append(step.resampled.double())
    steps, n = len(ess), len(ess[0])
    khat = tail_shape(torch.cat(tails, 1), particles).unflatten(0, (steps, n))
    return Estimated(
        torch.stack(increments).sum(0),
        torch.stack(ess).amin(0),
        khat,
        torch.stack(resampled).sum(0) / max(1, steps - 1),
    )


def filtered(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    settings: Particles,
    *,
    particles: int = 1000,
    seed: int | None = None,
    memory: Memory = None,
) -> Evidence:
    """Return the log of the mean over repeats of Π_t Σ_i W_i[t−1] w_i[t]."""
    if reason := why_not_filtered(model, completed(model.graph, batch)):
        raise ValueError(
            f'method="particles" filters sequences, but {reason}. Use method="importance".'
        )
    if isinstance(particles, bool) or not isinstance(particles, int) or particles < LEAST:
        raise ValueError(
            f"samples is a whole number of at least {LEAST} particles, got {particles!r}."
        )
    n, _ = model._extent(batch)
    few = narrow(batch, 0, min(n, 2))
    found, lowest, heaviest, resampled = [], [], [], []
    with model._evaluating(seed):
        budget = room(memory, model.parameters(), batch)
        rows, _ = pieces(
            lambda r, k: run_once(model, narrow(few, 0, r), k, settings.threshold),
            n,
            particles,
            budget,
            smallest=particles,
        )
        for i in range(0, n, rows):
            block = narrow(batch, i, min(rows, n - i))
            weights = Weights(
                min(rows, n - i), settings.repeats, model._parameter().device, tail=False
            )
            runs = [
                run_once(model, block, particles, settings.threshold)
                for _ in range(settings.repeats)
            ]
            weights.add(torch.stack([run.value for run in runs]))
            found.append(weights)
            lowest.append(torch.stack([run.ess for run in runs]).mean(0))
            # Take the mean first, because the maximum of many noisy k would be too large.
            heaviest.append(torch.stack([run.khat for run in runs]).mean(0).amax(0))
            resampled.append(torch.stack([run.resampled for run in runs]).mean(0))
    value, stderr, ess, khat = (
        torch.cat([w.value for w in found]),
        torch.cat([w.stderr for w in found]),
        torch.cat(lowest),
        torch.cat(heaviest),
    )
    notes = weight_notes(
        value, khat, ess, particles, "raise samples, or train q longer", "particles of a step"
    )
    if bad := int((ess < FEW * particles).sum()):
        notes.append(
            f"{count(bad, n)} have a step with an effective sample size below {FEW * particles:g} "
            f"of {particles} particles: raise samples."
        )
    diagnostics: dict[str, Tensor | float | int] = {
        "particles": particles,
        "repeats": settings.repeats,
        "ess": ess,
        "khat": khat,
    }
    dtype = model._parameter().dtype
    return Evidence(
        value.to(dtype),
        stderr.to(dtype),
        "particles",
        diagnostics | {"resampled": torch.cat(resampled)},
        tuple(notes),
    )
