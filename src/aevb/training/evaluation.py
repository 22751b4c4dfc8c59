"""The bound, its terms and the evidence over all rows of a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.batch import Batch, split_latents
from aevb.data.sources import Source
from aevb.estimators import estimate
from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.evidence.gap import gap
from aevb.evidence.sampling import importance
from aevb.model import Model
from aevb.plan import Plan
from aevb.training.order import seed_of

ROWS, ROWS_ON_GPU = 1000, 10_000  # rows evaluated at a time


def evaluate(
    model: Model, source: Source, *, how: Mapping[str, str] | None = None, bound: str = "elbo", samples: int = 1, seed: int = 0
) -> dict[str, float]:
    """The mean bound and its terms over all rows of a source, in nats an example.

    The expectations are taken in the plan's own ways, which are exact where they can be; ``how`` is for models that have none.
    Where the posterior is known exactly, so are the evidence and the gap, the mean KL(q ‖ p(z|x)); neither is sampled.
    """
    sums: dict[str, Tensor] = {}
    exact = why_not_exact(model) is None
    chunk = max(1, (ROWS_ON_GPU if source.like.is_cuda else ROWS) // samples)
    with model._evaluating(None):
        for start in range(0, source.n, chunk):
            batch = source.take(torch.arange(start, min(source.n, start + chunk)))
            plan = _plan(model, batch, how, bound, samples)
            noise = model.draw_noise(plan, batch, seed=seed_of(seed, "evaluation", start))
            estimated = estimate(plan, model.factors, batch, noise)  # type: ignore[arg-type]
            found = {bound: estimated.value, **estimated.terms}
            if exact:
                found |= _exactly(model, batch)
            for name, value in found.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=value.device)) + value.double().sum()
    totals = torch.stack(list(sums.values())).tolist()
    return {name: value / source.n for name, value in zip(sums, totals, strict=True)}


def _exactly(model: Model, batch: Batch) -> dict[str, Tensor]:
    """The evidence and, where it is known, the gap; NaN where a covariance of p is none any more."""
    try:
        distance = gap(model, batch)
        return {"evidence": exact_evidence(model, batch)} | ({} if distance is None else {"gap": distance})
    except LinAlgError:
        return dict.fromkeys(("evidence", "gap"), model._parameter().new_full((next(iter(batch.values())).shape[-2],), torch.nan))


def _plan(model: Model, batch: Batch, how: Mapping[str, str] | None, bound: str, samples: int) -> Plan:
    clamped, partial = split_latents(model.graph, batch)
    choices: dict[str, Any] = {"bound": bound, "samples": samples, "clamped": clamped, "partial": partial}
    if not how:
        return model.plan(**choices)
    try:
        return model.plan(**choices)
    except ValueError:
        return model.plan(how=how, **choices)


def evaluate_evidence(model: Model, source: Source, *, samples: int, seed: int = 0, chunk: int = 100) -> float:
    """The mean importance-sampled log p(x) over all rows of a source."""
    total = 0.0
    for start in range(0, source.n, chunk):
        batch = source.take(torch.arange(start, min(source.n, start + chunk)))
        with torch.no_grad():
            total += float(importance(model, batch, samples, seed_of(seed, "evidence", start)).value.double().sum())
    return total / source.n
