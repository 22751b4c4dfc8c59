"""Warning signs of a finished run: a bound that fell back, weights that rest on one sample.

The weights are importance weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.derive.plan import Plan
from aevb.estimate.estimators import estimate
from aevb.estimate.metric_names import OBJECTIVE, Metric
from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.model import Model
from aevb.training.events import FELL_BACK, LOOSE, ONE_SAMPLE, Event
from aevb.training.job import Job
from aevb.training.row_order import seed_of
from aevb.training.run import Run

# Limits that a fall must exceed, all three: nats, share of the whole rise, standard errors.
NATS, SHARE, SIGMAS = (0.5, 0.01, 5.0)
WINDOWS, LEAST = 10, 10  # windows per history, and the fewest recorded values that are tested
FEW = 2.0  # effective sample size below which one sample has more than half of the weight
ROWS = 200  # rows that the effective sample size is computed on
FAR = (5.0, 0.05)  # a gap that exceeds both is loose: in nats, and as a share of the evidence
TRIED = 100  # steps that q needs before its bound is judged
SOME = 50  # rows that the exact evidence is compared with the bound on
MANY = 5  # fewest samples per example for which a small effective sample size is reported


class Fall(NamedTuple):
    """A fall of the training bound: mean and step of its best window, and the last mean.

    ``name`` is "objective" if the run maximised an objective with other KL terms.
    """

    best: float
    step: int
    last: float
    name: str


def fall(run: Run) -> Fall | None:
    """Return how far the training bound fell from its best, by moving averages; None if it did not.

    If ``beta`` or ``free_bits`` changes the objective, the fall is that of the objective. Also None
    if the objective has other terms (``classify``, ``agree``, exact schedules), or if ``patience``
    restores the best weights anyway.
    """
    settings, history = run.settings, run.history
    name = settings.judge
    if (
        settings.schedule.objective != "bound"
        or settings.classify
        or settings.agree
        or settings.patience is not None
        or name not in history
    ):
        return None
    values, steps = history[name], history[Metric(name).steps]
    kept = np.isfinite(values) & (steps > max(settings.kl_warmup, _last_rise(history)))
    values, steps = values[kept], steps[kept]
    if len(values) < LEAST:
        return None
    width = max(1, len(values) // WINDOWS)
    means = np.convolve(values, np.ones(width) / width, "valid")
    at = int(means.argmax())
    lost, rise = float(means[at] - means[-1]), float(means[at] - values[0])
    # 0.954 is the median of |a − b| for standard normal a and b: the first factor estimates the
    # noise sd.
    chance = float(np.median(np.abs(np.diff(values)))) / 0.954 * (2 / width) ** 0.5
    if lost <= max(NATS, SHARE * rise, SIGMAS * chance):
        return None
    return Fall(float(means[at]), int(steps[at + width - 1]), float(means[-1]), name)


def _last_rise(history: Mapping[str, np.ndarray]) -> int:
    """Return the last recorded step in which the KL terms did not have their whole weight."""
    weight = Metric("kl weight")
    if weight.key not in history:
        return 0
    rising = history[weight.steps][history[weight.key] < 1]
    return int(rising[-1]) if len(rising) else 0


def effective_weights(
    model: Model, plan: Plan, batch: Mapping[str, Tensor], seed: int
) -> float | None:
    """Return the median over rows of IWAE's effective sample size (Σw)²/Σw².

    None if the bound has no importance weights, or fewer than ``MANY``.
    """
    if plan.bound != "iwae" or plan.samples < MANY:
        return None
    with model._evaluating(None):
        log_weights = estimate(
            plan, model.factors, batch, model.draw_noise(plan, batch, seed=seed)
        ).log_weights
    if log_weights is None:
        return None
    return float((1 / torch.softmax(log_weights.double(), 0).square().sum(0)).median())


def is_loose(evidence: float, bound: float) -> bool:
    """Return whether the mean evidence is far above the mean bound."""
    nats, share = FAR
    return evidence - bound > max(nats, share * abs(evidence))


def loose(evidence: float, bound: float) -> Event:
    """Return the note on a bound far below the exact evidence."""
    return Event(
        LOOSE,
        "run",
        f"The evidence of this model is exact, {evidence:.2f} nats per example, and far above the "
        f"trained bound, {bound:.2f}: q is far from the posterior, so p was trained on a loose "
        f"bound.",
        "Train p on the exact evidence instead: schedule=mle() (--schedule mle).",
    )


def exact_and_bound(job: Job) -> tuple[float, float] | None:
    """Return mean evidence and mean bound of some rows; None if the evidence is not exact."""
    model, batch = job.model, job.source.take(torch.arange(min(SOME, job.source.n)))
    if not model.graph.latents or why_not_exact(model, batch) is not None:
        return None
    noise = model.draw_noise(job.plan, batch, seed=seed_of(job.settings.seed, "course", 1))
    with model._evaluating(None):
        try:
            evidence = exact_evidence(model, batch)
        except LinAlgError:
            return None
        bound = estimate(job.plan, model.factors, batch, noise).value
    return float(evidence.double().mean()), float(bound.double().mean())


def fell_back(found: Fall) -> Event:
    """Return the note on a fall."""
    return Event(
        FELL_BACK,
        "run",
        f"The training {'objective' if found.name == OBJECTIVE else 'bound'} fell back from "
        f"{found.best:.2f} nats around step {found.step} to "
        f"{found.last:.2f} at the end.",
        "The steps are too large: use a lower lr=, or clip=. With validation= data, load_run "
        "reads the best checkpoint.",
    )


def one_sample(effective: float, samples: int) -> Event:
    """Return the note on collapsed importance weights."""
    return Event(
        ONE_SAMPLE,
        "run",
        f"The importance weights rest on one sample: the effective sample size is {effective:.1f} "
        f"of {samples} (median over rows), which makes the gradient noisy.",
        'Use a lower lr=, train with bound="elbo" first, or give q a richer family; '
        'gradient="dreg" has less noise.',
    )


def signs_at_end(job: Job, run: Run) -> Iterator[Event]:
    """Return the events to record after the last step of a run."""
    if (found := fall(run)) is not None:
        yield fell_back(found)
    if job.settings.schedule.objective == "bound":
        batch = job.source.take(torch.arange(min(ROWS, job.source.n)))
        seed = seed_of(job.settings.seed, "course", 0)
        effective = effective_weights(job.model, job.plan, batch, seed)
        if effective is not None and effective < FEW:
            yield one_sample(effective, job.plan.samples)
        means = exact_and_bound(job) if run.step >= TRIED else None
        if means is not None and is_loose(*means):
            yield loose(*means)
