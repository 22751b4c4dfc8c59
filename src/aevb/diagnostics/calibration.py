"""Simulation-based calibration of q.

It draws latents and data from p, and ranks the true latents among q's draws. If q(z | x) equals p(z
| x), the rank of z among draws of q(z | x) is uniform for (z, x) ~ p, in every entry. Many ranks at
both ends mean that q is too narrow, many in the middle that it is too wide, and many at one end
that it is biased. Ties of discrete entries are broken at random. One step per sequence is ranked,
because the steps of a sequence are not independent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.diagnostics.finding import Finding
from aevb.estimate.batch import Batch
from aevb.estimate.keys import STEPS, is_mask, real_steps, variable_of
from aevb.model import Model
from aevb.posterior import Posterior
from aevb.predictive.replicate import redraw

DRAWS = 99  # draws of q, among which the true value is ranked
LEAST = 200  # fewest draws of p; with fewer rows, each row is used several times
# Limits of the Kolmogorov–Smirnov distance of the ranks from the uniform distribution: from LARGE
# on, error bars mislead; below SMALL, the ranks are uniform for all purposes.
LARGE, SLIGHT, SMALL = (0.25, 0.12, 0.05)


def ranks(model: Model, batch: Batch, seed: int) -> dict[str, np.ndarray]:
    """Return the rank of every latent's true entries among q's draws, scaled to (0, 1).

    Shape [N, d], or [N, 1] for classes. Ranks are uniform if q is the posterior of p. Of the batch,
    only the given variables, the number of rows and their lengths are used.
    """
    graph = model.graph
    n, steps = model._extent(batch)
    generator = torch.Generator().manual_seed(seed)
    with model._evaluating(seed):
        drawn = redraw(model, batch, graph.stochastic)
        seen = {
            name: value for name, value in batch.items() if name in graph.given or name == STEPS
        }
        seen |= {name: drawn[name] for name in graph.observed}
        truth = {name: drawn[name] for name in graph.latents}
        found = Posterior(model, seen, samples=DRAWS, seed=None).sample(DRAWS)
    real = real_steps(seen)
    lengths = torch.full((n,), steps) if real is None else real[..., 0].sum(0).cpu()
    at = (torch.rand(n, generator=generator) * lengths).long()
    result = {}
    for name, value in truth.items():
        d = graph.size(name)
        draws = found[name].reshape(DRAWS, n, -1, d).cpu()
        true = value.transpose(0, 1).reshape(n, -1, d).cpu()
        if graph.timed[name]:
            draws, true = draws[:, torch.arange(n), at], true[torch.arange(n), at]
        else:
            draws, true = draws[:, :, 0], true[:, 0]
        if graph.rule("p", name).spec.categorical:
            draws, true = (
                draws.argmax(-1, keepdim=True).double(),
                true.argmax(-1, keepdim=True).double(),
            )
        result[name] = _rank(draws, true, generator)
    return result


def _rank(draws: Tensor, true: Tensor, generator: torch.Generator) -> np.ndarray:
    below, ties = (draws < true).sum(0), (draws == true).sum(0)
    place = below + torch.rand(true.shape, generator=generator, dtype=torch.float64) * (ties + 1)
    return np.asarray((place / (len(draws) + 1)).numpy())


def judge_ranks(name: str, rank: np.ndarray) -> Finding:
    """Report the Kolmogorov–Smirnov distance of the ranks from uniform, and how q errs."""
    from scipy.stats import kstest  # type: ignore[import-untyped]

    n, d = rank.shape
    tests = [kstest(rank[:, i], "uniform") for i in range(d)]
    distance, p = (
        np.array([test.statistic for test in tests]),
        np.array([test.pvalue for test in tests]),
    )
    worst = int(distance.argmax())
    figures: dict[str, Any] = {
        "distance": distance.tolist(),
        "p": p.tolist(),
        "mean": rank.mean(0).tolist(),
        "variance": rank.var(0).tolist(),
    }
    seen = p.min() * d < 0.01  # Bonferroni-corrected level of 0.01
    figure = (
        f"largest distance of the ranks from uniform {distance[worst]:.2f}, p = "
        f"{min(1.0, float(p.min()) * d):.2g}"
    )
    if not seen or distance[worst] < SMALL:
        return Finding(
            "ok",
            "calibration",
            name,
            f"q({name}|·) is calibrated on {n} draws of p ({figure}).",
            figures,
        )
    which = f"{_which_way(rank[:, worst])}{f' in entry {worst}' * (d > 1)}"
    slightly = "slightly " * bool(distance[worst] < SLIGHT)
    text = f"q({name}|·) is {slightly}{which} on data simulated from p ({figure})."
    if distance[worst] < LARGE:
        return Finding("note", "calibration", name, text, figures)
    remedy = (
        "Its error bars are not reliable there. Train q further or with a richer family; "
        "model.gap(…) says which of the two. "
    )
    remedy += (
        "If data simulated from p look unlike the real data, q has never seen such x: improve p "
        "first."
    )
    return Finding("warning", "calibration", name, text, figures, remedy)


def _which_way(rank: np.ndarray) -> str:
    """Describe the error of q from the mean and variance of the ranks (½ and 1/12 if uniform)."""
    side = (rank.mean() - 0.5) * math.sqrt(12)
    width = rank.var() * 12 - 1
    if abs(side) > abs(width):
        return f"too {'low' if side > 0 else 'high'}"
    return "too narrow" if width > 0 else "too wide"


def judge_calibration(model: Model, batches: list[Batch], seed: int) -> list[Finding]:
    """Return a finding per latent, or a single note if calibration cannot be checked."""
    if any(
        is_mask(mask) and variable_of(mask) in model.graph.given
        for batch in batches
        for mask in batch
    ):
        return [
            Finding(
                "note",
                "calibration",
                "run",
                "Calibration was not checked, because the given variables have missing entries.",
            )
        ]
    times = -(-LEAST // sum(model._extent(batch)[0] for batch in batches))
    parts = [ranks(model, batch, seed + i) for i, batch in enumerate(batches * times)]
    return [
        judge_ranks(name, np.concatenate([part[name] for part in parts]))
        for name in model.graph.latents
    ]
