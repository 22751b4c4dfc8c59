"""The bound, its terms and the evidence over all rows of a source."""

from __future__ import annotations

import torch

from aevb.batch import split_latents
from aevb.data.sources import Source
from aevb.estimators import estimate
from aevb.evidence import LinearGaussian, importance, why_not_linear_gaussian
from aevb.model import Model
from aevb.plan import Plan
from aevb.training.order import seed_of


def evaluate(model: Model, source: Source, *, plan: Plan | None = None, seed: int = 0, chunk: int = 1000) -> dict[str, float]:
    """The mean bound and its terms over all rows of a source (and the exact evidence where there is one), in nats an example."""
    sums: dict[str, float] = {}
    exact = why_not_linear_gaussian(model) is None
    with model._evaluating(None):
        for start in range(0, source.n, chunk):
            batch = source.take(torch.arange(start, min(source.n, start + chunk)))
            clamped, partial = split_latents(model.graph, batch)
            chosen = plan or model.plan(clamped=clamped, partial=partial)
            noise = model.draw_noise(chosen, batch, seed=seed_of(seed, "evaluation", start))
            bound = estimate(chosen, model.factors, batch, noise)  # type: ignore[arg-type]
            found = {"elbo": bound.value, **bound.terms}
            if exact:
                found["evidence"] = LinearGaussian(model, batch).log_evidence()
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value.double().sum())
    return {name: value / source.n for name, value in sums.items()}


def evaluate_evidence(model: Model, source: Source, *, samples: int, seed: int = 0, chunk: int = 100) -> float:
    """The mean importance-sampled log p(x) over all rows of a source."""
    total = 0.0
    for start in range(0, source.n, chunk):
        batch = source.take(torch.arange(start, min(source.n, start + chunk)))
        with torch.no_grad():
            total += float(importance(model, batch, samples, seed_of(seed, "evidence", start)).value.double().sum())
    return total / source.n
