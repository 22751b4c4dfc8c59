"""What the course of a run says against its end: a bound that fell back, importance weights that rest on one sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aevb.derive.plan import Plan
from aevb.estimate.estimators import estimate
from aevb.model import Model
from aevb.training.run import Run

NATS, SHARE, SIGMAS = 0.5, 0.01, 5.0  # a fall is one of so many nats, of such a part of the whole rise, and beyond chance
WINDOWS, LEAST = 10, 10  # a window is a tenth of the rows, and there must be that many
FEW = 2.0  # weights that count: below, one sample has more than half of the sum
ROWS = 200  # that are looked at
MANY = 5  # samples, for so few of them to be a collapse


class Fall(NamedTuple):
    """The bound of training: its best window of rows, and the last one."""

    best: float
    step: int
    last: float


def fall(run: Run) -> Fall | None:
    """How far the training bound fell back from its best, by means over windows of its record; None if it did not.

    Where the objective has other terms, or other weights, than the bound, its fall says nothing.
    """
    settings, history = run.settings, run.history
    if (
        settings.schedule.objective != "bound"
        or settings.classify
        or settings.agree
        or settings.patience is not None
        or settings.bound not in history
    ):
        return None
    values, steps = history[settings.bound], history[f"{settings.bound}.step"]
    kept = np.isfinite(values) & (steps > settings.kl_warmup)
    values, steps = values[kept], steps[kept]
    if len(values) < LEAST:
        return None
    width = max(1, len(values) // WINDOWS)
    means = np.convolve(values, np.ones(width) / width, "valid")
    at = int(means.argmax())
    lost, rise = float(means[at] - means[-1]), float(means[at] - values[0])
    chance = float(np.median(np.abs(np.diff(values)))) / 0.954 * (2 / width) ** 0.5  # 0.954: of a difference of two normals, in units of one's sd
    if lost <= max(NATS, SHARE * rise, SIGMAS * chance):
        return None
    return Fall(float(means[at]), int(steps[at + width - 1]), float(means[-1]))


def effective_weights(model: Model, plan: Plan, batch: Mapping[str, Tensor], seed: int) -> float | None:
    """The median over rows of (Σw)²/Σw² of iwae's weights; None where the bound has no such weights, or few."""
    if plan.bound != "iwae" or plan.samples < MANY:
        return None
    with model._evaluating(None):
        log_weights = estimate(plan, model.factors, batch, model.draw_noise(plan, batch, seed=seed)).log_weights  # type: ignore[arg-type]
    if log_weights is None:
        return None
    return float((1 / torch.softmax(log_weights.double(), 0).square().sum(0)).median())


def told_fall(found: Fall) -> tuple[str, str]:
    """The sentence and its remedy."""
    text = f"The training bound fell back from {found.best:.2f} nats around step {found.step} to {found.last:.2f} at the end."
    return text, "The steps are too large: take a lower lr=, or clip=. With validation rows, load_run reads the best checkpoint."


def told_weights(effective: float, samples: int) -> tuple[str, str]:
    text = f"The importance weights rest on one sample: of a row's {samples} weights {effective:.1f} count (median), which makes a noisy gradient."
    return text, 'Take a lower lr=, train with bound="elbo" first, or give q a richer family; gradient="dreg" has less noise.'
