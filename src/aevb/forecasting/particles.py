"""Forecasts and beliefs by a particle filter with q as its proposal.

A filter runs to the end of the past. Draws of the past's latents are the lines of its last
particles, chosen by their weights; p continues them. The filter's own particles give the beliefs at
each step given the data up to it. Beliefs given all data come from backward simulation, or from
the lines of the last particles (:mod:`aevb.forecasting.backward_simulation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.estimate.batch import Batch, completed, public, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import real_steps
from aevb.estimate.particle_filter import Filtered, ParticleFilter
from aevb.evidence.exact_posterior import table_of
from aevb.evidence.memory_limit import narrow
from aevb.evidence.result import Evidence
from aevb.forecasting.backward_simulation import simulated, why_not_markov
from aevb.forecasting.beliefs import Beliefs
from aevb.forecasting.forecast import Forecast
from aevb.forecasting.request import Past
from aevb.forecasting.sampled import forecast_from
from aevb.runtime.seeding import generator

FEW = 0.02  # share of the particles; a note says if fewer count at some step
Names = Sequence[Any] | np.ndarray  # of the rows
Moments = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
NAMED = 5  # rows that such a note names
LEAST = 1000  # particles of a filter; more if more draws are asked for
REPEATS = 16  # filters that give the standard error of a score
AT_ONCE = 2**26  # numbers that a filter may record at once


def particle_count(samples: int) -> int:
    """Return how many particles a filter has for this number of draws."""
    return max(LEAST, samples)


def forecast_by_particles(past: Past, samples: int, seed: int | None, why: str) -> Forecast:
    """Draw the latents of the past from a particle filter, and the future from p."""
    model = past.model
    with model._evaluating(seed):
        count, names = particle_count(samples), drawn_names(model, past.batch)
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        ess = []
        for block in _blocks(model, past.batch, count, names):
            run = ParticleFilter.of(model, block, count).run(record=names)
            ess.append(run.ess)
            chosen = draw_ancestors(run.log_weights, samples)
            for name in names:
                parts[name].append(_lines(run, name, chosen))
    drawn = {name: torch.cat(each, -2) for name, each in parts.items()}
    drawn = {
        name: value if model.graph.timed[name] else value[:, -1:] for name, value in drawn.items()
    }
    text = f"{count} particles" + (f"; {why}" if why else "")
    after = None if seed is None else seed ^ 0x5DEECE66D
    notes = degenerate(torch.cat(ess), count)
    return forecast_from(past, drawn, samples, after, "particles", text, score_by_particles, notes)


def degenerate(ess: Tensor, count: int) -> tuple[str, ...]:
    """Return a note if few particles count at some step of some rows; ``ess`` is the lowest, [N].

    The lines of such rows then go through a few particles only.
    """
    few = (ess < FEW * count).nonzero()[:, 0].tolist()
    if not few:
        return ()
    return (FewParticles(few, len(ess), float(ess.min()), count),)


class FewParticles(str):
    """A note about rows with a step at which few particles count.

    It names the first rows by their numbers, from 0, or by the ids that ``named`` gives.
    """

    __slots__ = ("found",)
    found: tuple[Sequence[int], int, float, int]

    def __new__(
        cls,
        rows: Sequence[int],
        total: int,
        lowest: float,
        count: int,
        names: Names | None = None,
    ) -> FewParticles:
        shown = [row if names is None else names[row] for row in rows[:NAMED]]
        which = ", ".join(map(str, shown)) + ", …" * (len(rows) > NAMED)
        if names is None:
            which = f"row{'s' * (len(rows) > 1)} {which}"
        have = (
            f"1 row ({which}) has"
            if len(rows) == 1
            else f"{len(rows)} of {total} rows ({which}) have"
        )
        if total == 1:
            have = "1 row has"
        note = super().__new__(
            cls,
            f"{have} a step at which only {lowest:.1f} of {count} particles count (effective "
            f"sample size), so that moments and intervals are unreliable: train q longer, or "
            f"raise samples.",
        )
        note.found = (rows, total, lowest, count)
        return note


def named(notes: Sequence[str], names: Names | None) -> tuple[str, ...]:
    """Return notes that call the rows by these names, such as the ids of a frame."""
    if names is None:
        return tuple(notes)
    return tuple(
        FewParticles(*note.found, names) if isinstance(note, FewParticles) else note
        for note in notes
    )


def drawn_names(model: DeclaredModel, batch: Batch) -> list[str]:
    """Return the variables that particles draw: the latents, and missing data that p reads."""
    graph = model.graph
    clamped, _ = split_latents(graph, batch)
    filled = completed(graph, batch)
    return [name for name in graph.latents if name not in clamped] + sorted(filled)


def _blocks(
    model: DeclaredModel, batch: Batch, count: int, names: list[str]
) -> Iterator[dict[str, Tensor]]:
    """Yield some rows at a time, so that the recorded particles fit into memory."""
    n, steps = model._extent(batch)
    width = sum(model.graph.size(name) for name in names) + 2
    rows = max(1, AT_ONCE // (count * steps * width))
    for start in range(0, n, rows):
        yield narrow(batch, start, min(rows, n - start))


def draw_ancestors(log_weights: Tensor, samples: int) -> Tensor:
    """Draw particles by their weights, [S, N], by systematic resampling in random order."""
    n, device = log_weights.shape[1], log_weights.device
    source = generator(device)
    uniform = torch.rand(n, generator=source, device=device, dtype=log_weights.dtype)
    edges = log_weights.exp().cumsum(0).T.contiguous()
    places = (torch.arange(samples, device=device) + uniform.unsqueeze(-1)) / samples
    index = torch.searchsorted(edges, places * edges[:, -1:]).clamp_max(len(log_weights) - 1).T
    order = torch.rand(samples, n, generator=source, device=device).argsort(0)
    return index.gather(0, order)


def _lines(run: Filtered, name: str, chosen: Tensor) -> Tensor:
    """Return the values of the chosen particles' lines, [S, T, N, d]."""
    whole = run.paths(name)
    index = chosen.expand(len(whole), *chosen.shape).unsqueeze(-1)
    return whole.gather(1, index.expand(*index.shape[:-1], whole.shape[-1])).transpose(0, 1)


def score_by_particles(
    past: Past, future: Mapping[str, Any], samples: int, seed: int | None
) -> Evidence:
    """Estimate log p(future | past) by filters over past and future.

    The estimate is log of the mean of p̂(past, future) over independent filters, minus the same of
    p̂(past) from the same filters. The standard error follows from their spread (delta method).
    """
    model = past.model
    batch = past.with_future(past.future(future, "log_prob"))
    count = particle_count(samples)
    with model._evaluating(seed):
        before, whole = [], []
        for _ in range(REPEATS):
            parts = [
                ParticleFilter.of(model, block, count).run().increments.double()
                for block in _blocks(model, batch, count, [])
            ]
            increments = torch.cat(parts, 1)  # [T + steps, N]
            step = torch.arange(len(increments), device=increments.device).unsqueeze(-1)
            before.append(torch.where(step < past.lengths, increments, 0.0).sum(0))
            whole.append(increments.sum(0))
    logs = torch.stack([torch.stack(whole), torch.stack(before)])  # [2, repeats, N]
    mean = logs.logsumexp(1)
    share = (logs - mean.unsqueeze(1)).exp() * REPEATS  # of the mean
    value, error = mean[0] - mean[1], (share[0] - share[1]).std(0) / REPEATS**0.5
    dtype = model._parameter().dtype
    return Evidence(
        value.to(dtype),
        error.to(dtype),
        "particles",
        {"particles": count, "repeats": REPEATS},
    )


def filtered_by_particles(
    model: DeclaredModel, batch: Batch, samples: int, seed: int | None, why: str
) -> Beliefs:
    """Return moments of the particles at each step, weighted by the weights of that step."""
    count = particle_count(samples)
    found: list[tuple[Moments, dict[str, Tensor], Tensor]] = []
    names = [name for name in drawn_names(model, batch) if name in model.graph.latents]
    with model._evaluating(seed):
        for block in _blocks(model, batch, count, names):
            run = ParticleFilter.of(model, block, count).run(record=names)
            assert run.weights_then is not None
            values = {name: run.history[name][:, :, 0].transpose(0, 1) for name in names}
            weight = run.weights_then.exp().transpose(0, 1)  # [K, T, N]
            found.append((_moments(model, block, values, weight, True), {}, run.ess))
    return _beliefs(model, batch, found, True, why, count)


def smoothed_by_particles(
    model: DeclaredModel, batch: Batch, samples: int, seed: int | None, why: str
) -> Beliefs:
    """Return moments of draws of the latents given all data."""
    graph, count = model.graph, particle_count(samples)
    found: list[tuple[Moments, dict[str, Tensor], Tensor]] = []
    names, reason = drawn_names(model, batch), why_not_markov(model, batch)
    weight = torch.full((samples, 1, 1), 1 / samples, dtype=torch.float64)
    with model._evaluating(seed):
        for block in _blocks(model, batch, count, names):
            run = ParticleFilter.of(model, block, count).run(record=names)
            chosen = draw_ancestors(run.log_weights, samples)
            if reason is None:
                drawn = simulated(model, block, run, names, chosen)
            else:
                drawn = {name: _lines(run, name, chosen) for name in names}
            values = {
                name: value if graph.timed[name] else value[:, -1:]
                for name, value in drawn.items()
                if name in graph.latents
            }
            n, steps = model._extent(block)
            draws = {
                name: _ended(block, graph.timed[name], public(graph, name, value, n, steps))
                for name, value in values.items()
            }
            found.append((_moments(model, block, values, weight, False), draws, run.ess))
    how = (
        "backward simulation"
        if reason is None
        else f"lines of the last particles, which are few for early steps, because {reason}"
    )
    return _beliefs(model, batch, found, False, f"{how}; {why}" if why else how, count)


def _ended(batch: Batch, timed: bool, value: Tensor) -> Tensor:
    """Set values [S, N, T, *shape] beyond the end of a row to NaN."""
    real = real_steps(batch, timed=timed)
    if real is None:
        return value
    inside = real.squeeze(-1).T
    inside = inside.reshape(*inside.shape, *[1] * (value.dim() - 3))
    return torch.where(inside, value, torch.nan)


def _moments(
    model: DeclaredModel,
    batch: Batch,
    values: Mapping[str, Tensor],
    weight: Tensor,
    filtered: bool,
) -> Moments:
    """Return weighted moments of values [K, T or 1, N, d], with weights [K, T or 1, N or 1].

    They are mean and standard deviation, and the probabilities of the values of finite latents.
    """
    graph, n = model.graph, model._extent(batch)[0]
    real, w = real_steps(batch), weight.unsqueeze(-1)
    mean, sd, probs = {}, {}, {}
    for name, value in values.items():
        by_step = filtered or graph.timed[name]
        w = w.to(value.device)
        middle = (w * value.double()).sum(0)
        spread = (w * (value.double() - middle).square()).sum(0).sqrt()

        def laid(part: Tensor, by_step: bool = by_step) -> Tensor:
            if real is not None and by_step:
                part = torch.where(real, part, torch.nan)
            part = part.expand(part.shape[0], n, -1).transpose(0, 1).to(model._parameter().dtype)
            return part if by_step else part[:, 0]

        shape = graph.shapes[name]
        found = [laid(middle), laid(spread)]
        mean[name], sd[name] = (part.reshape(*part.shape[:-1], *shape) for part in found)
        if graph.rule("p", name).spec.finite:
            each = (value.unsqueeze(-2) == table_of(model, name)).all(-1).double()
            probs[name] = laid((w * each).sum(0))
    return mean, sd, probs


def _beliefs(
    model: DeclaredModel,
    batch: Batch,
    found: Sequence[tuple[Moments, dict[str, Tensor], Tensor]],
    filtered: bool,
    why: str,
    count: int,
) -> Beliefs:
    """Join the moments, the draws and the effective sample sizes of blocks of rows."""

    def joined(parts: Sequence[Mapping[str, Tensor]], axis: int = 0) -> dict[str, Tensor]:
        return {name: torch.cat([part[name] for part in parts], axis) for name in parts[0]}

    mean, sd, probs = (joined([moments[i] for moments, _, _ in found]) for i in range(3))
    n, steps = model._extent(batch)
    real = real_steps(batch)
    lengths = torch.full((n,), steps) if real is None else real.squeeze(-1).sum(0).expand(n)
    notes = degenerate(torch.cat([ess for _, _, ess in found]), count)
    draws = joined([draws for _, draws, _ in found], 1)
    constant = {name for name in mean if not (filtered or model.graph.timed[name])}
    return Beliefs(
        mean,
        sd,
        probs,
        filtered,
        "particles",
        why,
        lengths,
        count,
        draws,
        notes,
        _constant=frozenset(constant),
    )
