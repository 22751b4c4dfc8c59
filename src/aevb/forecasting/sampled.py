"""Forecasts by q: its draws of the past's latents, continued with p."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from aevb.estimate.batch import Batch, public
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.evidence.methods import why_not_filtered
from aevb.evidence.result import Evidence
from aevb.forecasting.continuation import continued
from aevb.forecasting.forecast import Forecast
from aevb.forecasting.request import Past
from aevb.posterior.amortised import Posterior

Score = Callable[[Past, Mapping[str, Any], int, int | None], Evidence]


def forecast_by_q(past: Past, samples: int, seed: int | None, why: str, score: Score) -> Forecast:
    """Draw the latents of the past from q, and the future from p.

    q is not exact, and neither is this forecast: draws are not weighted. Its log-density is
    estimated by ``score``.
    """
    model = past.model
    posterior = Posterior(model, past.batch, samples=samples, seed=seed)
    drawn = posterior.sample(samples)
    internal = {name: as_internal(model, name, value) for name, value in drawn.items()}
    return forecast_from(past, internal, samples, posterior.next_seed, "q", why, score)


def as_internal(model: DeclaredModel, name: str, value: Tensor) -> Tensor:
    """Lay out draws as values of a program: [S, N, (T,) *shape] → [S, T or 1, N, d]."""
    graph = model.graph
    lead = 3 if graph.timed[name] else 2
    flat = value.reshape(*value.shape[:lead], graph.size(name))
    return flat.transpose(1, 2) if graph.timed[name] else flat.unsqueeze(1)


def forecast_from(
    past: Past,
    latents: dict[str, Tensor],
    samples: int,
    seed: int | None,
    method: str,
    why: str,
    score: Score,
    notes: tuple[str, ...] = (),
) -> Forecast:
    """Continue draws of the past's latents, [S, T or 1, N, d], with p."""
    model, graph, n = past.model, past.model.graph, len(past.lengths)
    whole = {
        name: latents[name] if name in latents else known_draws(past.batch, name, samples)
        for name in graph.latents
    }
    with model._evaluating(seed):
        found = continued(past, whole, samples)
    mean, sd, draws = {}, {}, {}
    for name, part in found.items():
        moments = part.moments()
        mean[name], sd[name], draws[name] = (
            public(graph, name, value, n, past.steps) for value in (*moments, part.draws)
        )
    scored = None
    if why_not_filtered(model) is None:
        scored = partial(_scored, past, score, samples, seed)
    return Forecast(
        mean, sd, draws, past.steps, method, why, notes, past.observed(), past.lengths, {}, scored
    )


def _scored(
    past: Past, score: Score, samples: int, seed: int | None, future: Mapping[str, Any]
) -> Evidence:
    return score(past, future, samples, seed)


def known_draws(batch: Batch, name: str, samples: int) -> Tensor:
    """Return the values of a latent that is known in every row, repeated for each draw."""
    assert mask_of(name) not in batch
    return batch[name].expand(samples, *batch[name].shape)


def q_reads_later(model: DeclaredModel) -> str | None:
    """Return why q's beliefs at a step depend on later data; None if they do not."""
    graph = model.graph
    reached, frontier = set(graph.latents), list(graph.latents)
    while frontier:
        name = frontier.pop()
        rules = [*graph.q.get(name, {}).values()]
        if graph.is_deterministic(name):
            rules += [*graph.p.get(name, {}).values()]
        for entry in rules:
            for ref in entry.key.parents:
                if ref.lag > 0 or ref.at == "last":
                    return f'"{entry.key}" reads {ref}, a later step'
                if not graph.timed.get(entry.key.name, True) and ref.timed and ref.at == "t":
                    return f'"{entry.key}" reads all steps'
                if ref.name not in reached:
                    reached.add(ref.name)
                    frontier.append(ref.name)
    return None
