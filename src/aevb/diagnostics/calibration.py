"""Is q as sure as it may be? Simulation-based calibration: latents and data drawn from p, then the rank of the truth among q's draws.

If q(z | x) were p(z | x), the rank of z among draws of q(z | x) would be uniform for (z, x) ~ p, in every entry. Ranks at both ends mean a q
that is too narrow, in the middle too wide, to one side biased. Discrete entries are ranked with ties broken at random. Of a sequence one step a
row is ranked, since steps of a row are not independent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.diagnostics.finding import Finding
from aevb.estimate.batch import Batch
from aevb.estimate.keys import is_mask, variable_of
from aevb.model import Model
from aevb.posterior import Posterior
from aevb.predictive.replicate import redraw

DRAWS = 99  # of q, among which the truth is ranked
LEAST = 200  # draws of p: where there are fewer rows, each stands for several
LARGE, NOTABLE = 0.25, 0.12  # distance of the ranks' distribution from the uniform one


def ranks(model: Model, batch: Batch, seed: int) -> dict[str, np.ndarray]:
    """The rank of every latent's entries among q's draws as a share of (0, 1), [N, d] ([N, 1] for classes): uniform if q is p's posterior.

    Only what the model is given, the number of rows and their lengths are taken from the batch.
    """
    graph = model.graph
    n, steps = model._extent(batch)
    generator = torch.Generator().manual_seed(seed)
    with model._evaluating(seed):
        drawn = redraw(model, batch, graph.stochastic)
        seen = {name: value for name, value in batch.items() if name in graph.given or name == "steps"}
        seen |= {name: drawn[name] for name in graph.observed}
        truth = {name: drawn[name] for name in graph.latents}
        found = Posterior(model, seen, samples=DRAWS, seed=None).sample(DRAWS)
    lengths = seen["steps"][..., 0].sum(0).cpu() if "steps" in seen else torch.full((n,), steps)
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
            draws, true = draws.argmax(-1, keepdim=True).double(), true.argmax(-1, keepdim=True).double()
        result[name] = _rank(draws, true, generator)
    return result


def _rank(draws: Tensor, true: Tensor, generator: torch.Generator) -> np.ndarray:
    below, ties = (draws < true).sum(0), (draws == true).sum(0)
    place = below + torch.rand(true.shape, generator=generator, dtype=torch.float64) * (ties + 1)
    return np.asarray((place / (len(draws) + 1)).numpy())


def judge_ranks(name: str, rank: np.ndarray) -> Finding:
    """How far the ranks are from uniform, entry by entry: by the Kolmogorov–Smirnov distance, and which way."""
    from scipy.stats import kstest  # type: ignore[import-untyped]

    n, d = rank.shape
    tests = [kstest(rank[:, i], "uniform") for i in range(d)]
    distance, p = np.array([test.statistic for test in tests]), np.array([test.pvalue for test in tests])
    worst = int(distance.argmax())
    figures: dict[str, Any] = {"distance": distance.tolist(), "p": p.tolist(), "mean": rank.mean(0).tolist(), "variance": rank.var(0).tolist()}
    seen = p.min() * d < 0.01  # Bonferroni: of what chance alone would show, one in a hundred
    figure = f"largest distance of the ranks from uniform {distance[worst]:.2f}, p = {min(1.0, float(p.min()) * d):.2g}"
    if not seen or distance[worst] < NOTABLE:
        return Finding("ok", "calibration", name, f"q({name}|·) is calibrated on {n} draws of p ({figure}).", figures)
    text = f"q({name}|·) is {_which_way(rank[:, worst])} on data that p itself draws ({figure})."
    if distance[worst] < LARGE:
        return Finding("note", "calibration", name, text, figures)
    remedy = "Its error bars mean little there. Train q further or with a richer family; model.gap(…) says which of the two. "
    remedy += "If p's own draws look unlike the data, q has never seen such x: then mend p first."
    return Finding("warning", "calibration", name, text, figures, remedy)


def _which_way(rank: np.ndarray) -> str:
    """In words, from the ranks' mean (½) and variance (1/12)."""
    side = (rank.mean() - 0.5) * math.sqrt(12)
    width = rank.var() * 12 - 1
    if abs(side) > abs(width):
        return f"too {'low' if side > 0 else 'high'}"
    return "too narrow" if width > 0 else "too wide"


def judge_calibration(model: Model, batches: list[Batch], seed: int) -> list[Finding]:
    """A finding for every latent; one that says so if p's draws cannot be made or read."""
    if any(is_mask(mask) and variable_of(mask) in model.graph.given for batch in batches for mask in batch):
        return [Finding("note", "calibration", "run", "Calibration was not checked: what the model is given has missing entries.")]
    times = -(-LEAST // sum(model._extent(batch)[0] for batch in batches))
    parts = [ranks(model, batch, seed + i) for i, batch in enumerate(batches * times)]
    return [judge_ranks(name, np.concatenate([part[name] for part in parts])) for name in model.graph.latents]
