"""Choose how to forecast, filter and smooth: exactly, by particles, or by q."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

from aevb.data.short_series import note_short_series
from aevb.estimate.batch import Batch, completed, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.evidence.methods import why_not_filtered
from aevb.evidence.structure import NotExactError, structure_of
from aevb.forecasting.beliefs import Beliefs, beliefs_of
from aevb.forecasting.exact import exact_forecast
from aevb.forecasting.forecast import Forecast
from aevb.forecasting.particles import (
    filtered_by_particles,
    forecast_by_particles,
    score_by_particles,
    smoothed_by_particles,
)
from aevb.forecasting.request import Past, check_sequences, past_of, prepared
from aevb.forecasting.sampled import forecast_by_q, q_reads_later
from aevb.posterior import (
    ExactPosterior,
    Posterior,
    UntaughtError,
    remedy,
    warn_of_unseen_patterns,
    why_not_q,
)
from aevb.posterior.filtered import FilteredPosterior
from aevb.posterior.training_record import Teaching

METHODS = ("auto", "exact", "particles", "q")


def forecast_of(
    model: DeclaredModel,
    teaching: Teaching,
    data: Mapping[str, Any],
    *,
    steps: Any,
    samples: int,
    given: Mapping[str, Any] | None,
    method: str,
    seed: int | None,
    lengths: Any,
) -> Forecast:
    """Return the forecast of the observed variables; see :meth:`aevb.Model.forecast`."""
    check_method(method, samples)
    past = past_of(model, steps, given, lengths, data)
    return forecast_past(model, teaching, past, samples=samples, method=method, seed=seed)


def forecast_past(
    model: DeclaredModel,
    teaching: Teaching,
    past: Past,
    *,
    samples: int,
    method: str,
    seed: int | None,
    draws: bool = True,
) -> Forecast:
    """Return the forecast after the end of a past.

    ``draws=False`` leaves the draws out where all quantiles are exact.
    """
    teaching.warn_of_other_units(model, past.batch)
    inexact = _why_not_exact(model, past.extended)
    chosen, why = _chosen(model, teaching, past.batch, method, inexact)
    if chosen == "exact":
        found = exact_forecast(past, samples, seed, why, draws=draws)
    elif chosen == "particles":
        found = forecast_by_particles(past, samples, seed, why)
    else:
        found = forecast_by_q(past, samples, seed, why, score_by_particles)
    rules = {name: model.graph.rule("p", name).spec for name in found.mean}
    classes = frozenset(name for name, spec in rules.items() if spec.categorical)
    discrete = frozenset(name for name, spec in rules.items() if spec.support.is_discrete)
    short = note_short_series(model.graph, past.batch)
    notes = found.notes if short is None else (*found.notes, short)
    return replace(found, notes=notes, _classes=classes, _discrete=discrete)


def filter_of(
    model: DeclaredModel,
    teaching: Teaching,
    data: Mapping[str, Any],
    *,
    samples: int,
    method: str,
    seed: int | None,
    lengths: Any,
) -> Beliefs:
    """Return p(latents of step t | data up to t); see :meth:`aevb.Model.filter`."""
    check_method(method, samples)
    check_sequences(model.graph, "filter")
    batch = prepared(model, data, lengths)
    return filter_batch(model, teaching, batch, samples=samples, method=method, seed=seed)


def filter_batch(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    *,
    samples: int,
    method: str,
    seed: int | None,
) -> Beliefs:
    """Return the filter of prepared rows."""
    teaching.warn_of_other_units(model, batch)
    if method == "q":
        if (reason := q_reads_later(model)) is not None:
            raise ValueError(
                f"q is no filter: {reason}. Use smooth(…) for beliefs given all data, or "
                f'method="particles" for a filter.'
            )
        return beliefs_of(
            Posterior(model, batch, samples=samples, seed=seed, why="as asked"),
            filtered=True,
            samples=samples,
        )
    chosen, why = _chosen(model, teaching, batch, method, _why_not_exact(model, batch))
    if chosen == "exact":
        found = FilteredPosterior(model, batch, why=why)
        return beliefs_of(found, filtered=True)
    if chosen == "q" and (reason := q_reads_later(model)) is not None:
        raise ValueError(f"{why}, and q is no filter either: {reason}. Use smooth(…).")
    if chosen == "q":
        found_q = Posterior(model, batch, samples=samples, seed=seed, why=why)
        return beliefs_of(found_q, filtered=True, samples=samples)
    _check_unknown(model, batch)
    return filtered_by_particles(model, batch, samples, seed, why)


def smooth_of(
    model: DeclaredModel,
    teaching: Teaching,
    data: Mapping[str, Any],
    *,
    samples: int,
    method: str,
    seed: int | None,
    lengths: Any,
) -> Beliefs:
    """Return p(latents of step t | all data); see :meth:`aevb.Model.smooth`."""
    check_method(method, samples)
    check_sequences(model.graph, "smooth")
    batch = prepared(model, data, lengths)
    return smooth_batch(model, teaching, batch, samples=samples, method=method, seed=seed)


def smooth_batch(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    *,
    samples: int,
    method: str,
    seed: int | None,
) -> Beliefs:
    """Return the smoother of prepared rows."""
    teaching.warn_of_other_units(model, batch)
    chosen, why = _chosen(model, teaching, batch, method, _why_not_exact(model, batch))
    if chosen == "exact":
        return beliefs_of(ExactPosterior(model, batch, why=why), filtered=False)
    if chosen == "q":
        found = Posterior(model, batch, samples=samples, seed=seed, why=why)
        return beliefs_of(found, filtered=False, samples=samples)
    _check_unknown(model, batch)
    return smoothed_by_particles(model, batch, samples, seed, why)


def _check_unknown(model: DeclaredModel, batch: Batch) -> None:
    """Raise ValueError if the data hold all latents, so that particles would draw none."""
    latents = model.graph.latents
    if split_latents(model.graph, batch)[0].issuperset(latents):
        raise ValueError(
            f'method="particles" draws the latents, but the data hold all of them '
            f"({', '.join(latents)}). Leave out those that you want beliefs about."
        )


def check_method(method: str, samples: Any) -> None:
    if method not in METHODS:
        raise ValueError(f'method is "auto", "exact", "particles" or "q", got {method!r}.')
    if isinstance(samples, bool) or not isinstance(samples, Integral) or samples < 1:
        raise ValueError(
            f"samples is the number of draws or particles, a whole number from 1 on. Got "
            f"{samples!r}."
        )


def _why_not_exact(model: DeclaredModel, batch: Batch) -> str | None:
    try:
        structure_of(model, batch)
    except NotExactError as reason:
        return str(reason)
    return None


def _chosen(
    model: DeclaredModel, teaching: Teaching, batch: Batch, method: str, inexact: str | None
) -> tuple[str, str]:
    """Return the method and the reason for it; ``inexact`` is why the result is not exact.

    "auto" is exact where that is known, else particles with a trained q as their proposal, else q.

    Raises ValueError if the method does not apply, with one that does.
    """
    filtered = why_not_filtered(model, completed(model.graph, batch))
    if method == "exact" and inexact is not None:
        other = "q" if filtered else "particles"
        raise ValueError(
            f'This is not known in closed form for this model: {inexact}. Use method="{other}".'
        )
    if method == "particles" and filtered is not None:
        raise ValueError(
            f'method="particles" needs latents that a filter can draw step by step, but '
            f'{filtered}. Use method="{"q" if inexact else "exact"}".'
        )
    if method != "auto":
        return method, "as asked"
    if inexact is None:
        return "exact", "known for this model"
    reason = why_not_q(model, teaching, batch)
    if reason is not None:
        particles = ' Or use method="particles" with many samples.' if filtered is None else ""
        raise UntaughtError(
            f"{reason}, and an exact result is not known: {inexact}. "
            f"{remedy(model, teaching, batch)}{particles}"
        )
    if filtered is None:
        return "particles", f"not exact: {inexact}"
    warn_of_unseen_patterns(model, teaching, batch)
    return "q", f"not exact: {inexact}; no particles: {filtered}"
