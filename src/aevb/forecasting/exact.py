"""Exact forecasts: the Kalman filter, the forward algorithm, and their combinations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aevb.estimate.batch import public
from aevb.estimate.keys import mask_of
from aevb.evidence.exact import exact_evidence
from aevb.evidence.exact_posterior import Components, Marginals
from aevb.evidence.forward_pass import ForwardPass
from aevb.evidence.result import Evidence
from aevb.evidence.structure import Structure, structure_of
from aevb.forecasting.continuation import continued
from aevb.forecasting.finite_draws import finite_draws
from aevb.forecasting.forecast import Forecast, stderr_free
from aevb.forecasting.gaussian_draws import gaussian_draws
from aevb.forecasting.request import Past
from aevb.posterior.exact import ExactPosterior


def exact_forecast(
    past: Past, samples: int, seed: int | None, why: str, *, draws: bool = True
) -> Forecast:
    """Return the exact forecast, with ``samples`` joint draws.

    ``draws=False`` leaves them out where all quantiles are exact.

    Raises :class:`NotExactError`, with the reason, for a model without an exact forecast.
    """
    model, graph = past.model, past.model.graph
    structure = structure_of(model, past.extended)
    with model._evaluating(None):
        marginals = ForwardPass(model, structure, past.extended, past.names).marginals()
    mean, sd, mixtures, dtype = {}, {}, {}, model._parameter().dtype
    for name in past.names:
        whole = marginals.components[name]
        parts = {
            field: past.ahead_by_row(getattr(whole, field))
            for field in ("weight", "mean", "variance")
        }
        found = Components(**parts)
        middle, spread = found.moments()
        shape = (*middle.shape[:2], *graph.shapes[name])
        mean[name], sd[name] = middle.reshape(shape).to(dtype), spread.reshape(shape).to(dtype)
        if graph.rule("p", name).spec.gaussian:
            mixtures[name] = found
    return Forecast(
        mean,
        sd,
        _draws(past, structure, marginals, samples, seed)
        if draws or len(mixtures) < len(mean)
        else {},
        past.steps,
        "exact",
        why,
        (),
        past.observed(),
        past.lengths,
        mixtures,
        lambda future: _score(past, future),
    )


def _draws(
    past: Past, structure: Structure, marginals: Marginals, samples: int, seed: int | None
) -> dict[str, Tensor]:
    """Draw the belief at the end of a chain, or the latents of the past, and continue with p."""
    model, graph, n = past.model, past.model.graph, len(past.lengths)
    with model._evaluating(seed):
        drawn = gaussian_draws(past, structure, samples)
        if drawn is None:
            drawn = finite_draws(past, marginals, samples)
    if drawn is not None:
        return {
            name: public(graph, name, value.to(model._parameter().dtype), n, past.steps)
            for name, value in drawn.items()
        }
    posterior = ExactPosterior(model, past.batch, seed=seed)
    unknown = len(posterior.clamped) < len(graph.latents) or posterior.unknowns.structure.gaussian
    with model._evaluating(seed):
        latents = posterior.unknowns.draw(samples) if unknown else {}
        dtype = model._parameter().dtype
        known = {
            name: past.batch[name].expand(samples, *past.batch[name].shape)
            for name in posterior.clamped
        }
        whole = {name: value.to(dtype) for name, value in latents.items()} | known
        for name in posterior.partial & whole.keys():
            here = past.batch[mask_of(name)]
            whole[name] = torch.where(here, past.batch[name], whole[name])
        found = continued(past, whole, samples)
    return {name: public(graph, name, found[name].draws, n, past.steps) for name in past.names}


def _score(past: Past, future: Mapping[str, Any]) -> Evidence:
    """Return log p(past, future) − log p(past)."""
    model = past.model
    batch = past.with_future(past.future(future, "log_prob"))
    with model._evaluating(None):
        whole = exact_evidence(model, batch, dtype=torch.float64)
        before = exact_evidence(model, past.batch, dtype=torch.float64)
    return stderr_free((whole - before).to(model._parameter().dtype))
