"""Importance sampling with q as proposal: log p(x) from samples, in chunks that fit in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aevb.batch import split_latents
from aevb.estimators import estimate
from aevb.evidence.result import Evidence
from aevb.families import Exact
from aevb.plan import LIMIT

if TYPE_CHECKING:
    from aevb.model import Model

BUDGET = 50_000_000  # numbers that one chunk of importance samples may take


def importance(model: Model, batch: Mapping[str, Tensor], samples: int, seed: int | None) -> Evidence:
    """log 1/K Σ p(x, z)/q(z|x), z ~ q; enumerated latents are summed inside, exactly."""
    graph = model.graph
    # What is enumerated is summed inside the logarithm, exactly; over time it is drawn, since the sum does not factor.
    clamped, partial = split_latents(graph, batch)
    how, budget = {}, LIMIT
    for name in graph.latents:
        spec, by_bayes = graph.rule("p", name).spec, isinstance(graph.rule("q", name).spec, Exact)
        count = spec.count(graph.size(name)) if spec.finite else None
        if name in clamped or count is None or (by_bayes and graph.timed[name]):  # Bayes' sum over a step is exact as it is
            continue
        inside = by_bayes or (count <= budget and not graph.timed[name])
        how[name], budget = ("sum", max(1, budget // count)) if inside else ("score", budget)
    n, steps = model._extent(batch)
    # What one sample of one row takes: a few numbers for every output of every network, for each value summed over.
    passes = math.prod(graph.rule("p", name).spec.count(graph.size(name)) or 1 for name, choice in how.items() if choice == "sum")
    width = sum(graph.size(name) for name in graph.shapes) * passes * (steps if any(graph.timed.values()) else 1)
    rows = max(1, min(n, BUDGET // (2 * width)))
    if rows < n:
        cuts = [{key: value.narrow(-2, i, min(rows, n - i)) for key, value in batch.items()} for i in range(0, n, rows)]
        parts = [importance(model, cut, samples, None if seed is None else seed + i) for i, cut in enumerate(cuts)]
        return Evidence(torch.cat([part.value for part in parts]), torch.cat([part.stderr for part in parts]), "importance")
    chunk = max(2, min(samples, BUDGET // (n * width)))
    generator = torch.Generator(model._parameter().device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    was = model.training
    model.eval()
    log_weight_parts = []
    try:
        done = 0
        while done < samples:
            k = max(2, min(chunk, samples - done))
            plan = model.plan(how=how, bound="iwae", samples=k, clamped=clamped, partial=partial)
            noise = model.draw_noise(plan, batch, seed=int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            bound = estimate(plan, model.factors, batch, noise)  # type: ignore[arg-type]
            assert bound.log_weights is not None  # nothing is enumerated outside the logarithm
            log_weight_parts.append(bound.log_weights)
            done += k
    finally:
        model.train(was)
    log_weights = torch.cat(log_weight_parts)
    k = len(log_weights)
    value = log_weights.logsumexp(0) - math.log(k)
    return Evidence(value, (log_weights - value).exp().std(0) / math.sqrt(k), "importance")
