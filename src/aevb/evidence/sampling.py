"""Importance sampling of log p(x), with q or p as proposal.

Weights are computed in chunks that fit into a memory limit and are added to running statistics. The
number of samples is therefore limited by time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.declare.evaluation_order import schedule
from aevb.declare.families import Exact
from aevb.declare.graph import Entry
from aevb.derive.axes import SAMPLES, at_step, expand_axis
from aevb.derive.completion import incomplete
from aevb.derive.dependence import Axis, S
from aevb.derive.draws import Draw
from aevb.derive.plan import LIMIT
from aevb.estimate import noise as noises
from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import Estimate
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.evidence.coverage import ROWS, SEED, WIDER, how_many, note_missed, widened
from aevb.evidence.memory_limit import narrow, pieces, room, shares
from aevb.evidence.methods import closer, either
from aevb.evidence.result import Evidence, weight_notes
from aevb.evidence.weights import Weights
from aevb.runtime.seeding import draw_from
from aevb.runtime.shapes import broadcast_shapes

Memory = float | str | None
Weigher = Callable[[Mapping[str, Tensor], int], Tensor]  # (rows of a batch, K) → log-weights [K, N]
LEAST = 2  # fewest samples: a single one has no spread, and a score-function estimate needs two


def importance(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    samples: int,
    seed: int | None,
    *,
    memory: Memory = None,
    compare: bool = False,
) -> Evidence:
    """Estimate log p(x) by log 1/K Σ p(x, z)/q(z|x), z ~ q; enumerated latents are summed exactly.

    With ``compare``, a few weights of wider proposals check that q does not miss part of the
    posterior.
    """
    found = _collect(model, batch, samples, seed, memory, proposal_weights(model, batch))
    methods = closer(model, incomplete(model.graph, split_latents(model.graph, batch)[1]))
    judged = _judged(
        model,
        found,
        "importance",
        f"raise samples, train q longer, or use {either(methods)}"
        if methods
        else "raise samples, or train q longer",
    )
    return (
        replace(judged, notes=(*judged.notes, *_missed(model, batch, judged, memory, methods)))
        if compare
        else judged
    )


def _missed(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    found: Evidence,
    memory: Memory,
    methods: Sequence[str],
) -> list[str]:
    """Return notes if draws from p or from a wider q find a clearly higher evidence.

    The caller's random state is unchanged.
    """
    samples, rows = (
        how_many(int(found.diagnostics["samples"])),
        narrow(batch, 0, min(ROWS, len(found.value))),
    )
    weighers = {
        "p": prior_weights(model),
        f"q with noise {WIDER:g} times as wide": proposal_weights(model, batch, wider=True),
    }
    others = {
        what: _judged(model, _collect(model, rows, samples, SEED, memory, weigh), what, "")
        for what, weigh in weighers.items()
    }
    return note_missed(found, others, f"train q longer, or use {either([*methods, 'prior'])}")


def naive(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    samples: int,
    seed: int | None,
    *,
    memory: Memory = None,
) -> Evidence:
    """Estimate log p(x) by log 1/K Σ p(x|z), z ~ p.

    The mean is unbiased, but has a huge variance beyond a few dimensions, which the diagnostics
    show.
    """
    found = _collect(model, batch, samples, seed, memory, prior_weights(model))
    return _judged(
        model,
        found,
        "prior",
        f"hardly any draw from p explains x; use {either(['importance', *closer(model)])}",
    )


# The weights of a chunk ---------------------------------------------------------------------------


def prior_weights(model: DeclaredModel) -> Weigher:
    """Return a function that computes log p(x | z) at z ~ p."""
    return lambda rows, k: _log_known(model, rows, *draw_from_p(model, rows, k))


def proposal_weights(
    model: DeclaredModel, batch: Mapping[str, Tensor], *, wider: bool = False
) -> Weigher:
    """Return a function that computes log p(x, z) − log q(z|x) at z ~ q.

    With ``wider``, z is drawn from q with wider Gaussian noise.
    """
    clamped, partial = split_latents(model.graph, batch)
    how = _inside(model, clamped)

    def weigh(rows: Mapping[str, Tensor], k: int) -> Tensor:
        plan = model.plan(how=how, bound="iwae", samples=k, clamped=clamped, partial=partial)
        noise, correction = model.draw_noise(plan, rows), torch.zeros(())
        if wider:
            noise, correction = widened(plan.layout(*model._extent(rows), dropout=False), noise)
        return log_weights(Estimate(plan, model.factors, rows, noise), correction)

    return weigh


def _inside(model: DeclaredModel, clamped: frozenset[str]) -> dict[str, str]:
    """Choose how to treat each finite latent: sum it inside the logarithm, or draw it.

    Finite latents are summed exactly as long as their joint values can be enumerated. Latents in
    time are drawn, because the sum does not factor over steps.
    """
    graph = model.graph
    how, budget = {}, LIMIT
    for name in graph.latents:
        spec, by_bayes = graph.rule("p", name).spec, isinstance(graph.rule("q", name).spec, Exact)
        values = spec.count(graph.size(name)) if spec.finite else None
        if (
            graph.timed[name]
            and name not in clamped
            and any(entry.spec.strata is not None for entry in graph.q[name].values())
        ):
            how[name] = "score"  # one mixture component per step would give components^T paths
        # Bayes' rule within a step is exact already
        if name in clamped or values is None or (by_bayes and graph.timed[name]):
            continue
        listed = by_bayes or (values <= budget and not graph.timed[name])
        how[name], budget = ("sum", max(1, budget // values)) if listed else ("score", budget)
    return how


def log_weights(working: Estimate, correction: Tensor | float = 0.0) -> Tensor:
    """Return the log-weights of an estimate's samples, [K, N], summed over enumerated latents."""
    plan = working.plan
    likelihoods, kls = working.terms()
    total = (
        sum(likelihoods.values(), torch.zeros(())) - sum(kls.values(), torch.zeros(())) + correction
    )
    total = inner_sum(working, total)
    return expand_axis(total, SAMPLES, plan.samples).reshape(plan.samples, -1)


def inner_sum(working: Estimate, total: Tensor) -> Tensor:
    """Return log Σ over the values of every enumerated static latent.

    Where a latent is known, only its known value counts.
    """
    plan = working.plan
    for name, axis in working.sequence():
        if name == S.name:
            continue
        if plan.choices[name].draw is Draw.STRATIFY:
            total = total + working.log_w(name)
        else:
            total = working.only_known(name, total)
        total = expand_axis(total, axis, plan.size(Axis(name))).logsumexp(axis, keepdim=True)
    return total


def draw_latents(
    model: DeclaredModel, rows: Mapping[str, Tensor], samples: int
) -> dict[str, Tensor]:
    """Draw all latents from p by ancestral sampling, [K, T or 1, N, d] each.

    Observed variables and known latent values keep their values.
    """
    return draw_from_p(model, rows, samples)[0]


def draw_from_p(
    model: DeclaredModel, rows: Mapping[str, Tensor], samples: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw the latents, and observed variables with missing entries that p reads, from p.

    Known values and entries are kept; missing entries are drawn given those of their step.
    """
    graph = model.graph
    n, steps = model._extent(rows)
    like = model._parameter()
    clamped, partial = split_latents(graph, rows)
    gaps = incomplete(graph, partial)
    known = {*graph.observed, *graph.given, *clamped} - gaps

    def draw(name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        factor = model.factors[entry.id]
        assert isinstance(factor, Factor)
        count = steps if graph.timed[name] and t is None else 1
        raw = raw.expand(broadcast_shapes(raw.shape, (samples, count, n, 1)))
        dist, kind = factor.distribution(raw), factor.spec.noise(factor.d)
        truth, seen = rows.get(name), rows.get(mask_of(name))
        if truth is not None and seen is not None:
            truth, seen = at_step(truth, t), at_step(seen, t)
            if name in gaps:
                seen = seen.all(-1, keepdim=True) if factor.spec.categorical else seen
                dist = factor.spec.given_known(dist, truth, seen)
        if kind is None:
            value = draw_from(dist)
        else:
            value = factor.spec.reparametrise(
                dist,
                noises.draw_one(kind[0], (*raw.shape[:-1], kind[1]), None, like.device, like.dtype),
            )
        return value if truth is None or seen is None else torch.where(seen, truth, value)

    program = Program(graph, model.factors, rows, steps=steps)
    program.values |= {name: rows[name] for name in known}
    program.run(
        schedule({name: graph.reads("p", name) for name in graph.p if name not in known}, "p"), draw
    )
    latents = {name: program.values[name] for name in graph.latents if name not in clamped}
    return latents, {name: program.values[name] for name in gaps}


def _log_known(
    model: DeclaredModel,
    rows: Mapping[str, Tensor],
    latents: Mapping[str, Tensor],
    filled: Mapping[str, Tensor],
) -> Tensor:
    """Return Σ log p of all known variables at these draws from p, [K, N]."""
    how = dict.fromkeys(filled, "detached")  # no gradient is needed
    plan = model.plan(how=how, clamped=model.graph.latents, partial=filled)
    seen = {name: rows[mask_of(name)][..., :1] for name in latents if mask_of(name) in rows}
    given = {name: value for name, value in rows.items() if name[:-1] not in seen}
    working = Estimate(plan, model.factors, {**given, **latents}, {}, filled=filled)
    total: Any = torch.zeros((), dtype=model._parameter().dtype, device=model._parameter().device)
    for name in model.graph.stochastic:
        if name not in latents or name in seen:
            term = working.log_p(name)
            term = torch.where(seen[name], term, torch.zeros_like(term)) if name in seen else term
            total = total + (working.over_steps(term) if model.graph.timed[name] else term)
    drawn = [*latents.values(), *filled.values()]
    k, n = drawn[0].shape[0] if drawn else 1, model._extent(rows)[0]
    return expand_axis(total, SAMPLES, k).expand(k, 1, n, 1).reshape(k, n)


# Chunk by chunk -----------------------------------------------------------------------------------


def streams(
    model: DeclaredModel, batch: Mapping[str, Tensor], samples: int, memory: Memory, weigh: Weigher
) -> Iterator[tuple[int, Iterator[Tensor]]]:
    """Yield blocks of rows: (number of rows, iterator over chunks of log-weights [k, rows]).

    The chunks of a block add up to ``samples`` weights per row.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < LEAST:
        raise ValueError(
            f"samples is a whole number of at least {LEAST}: their spread gives the standard "
            f"error. Got {samples!r}."
        )
    n, _ = model._extent(batch)
    budget = room(memory, model.parameters(), batch)
    few = narrow(batch, 0, min(n, 2))
    rows, most = pieces(
        lambda r, k: weigh(narrow(few, 0, r), k), n, samples, budget, smallest=LEAST
    )
    for start in range(0, n, rows):
        block = narrow(batch, start, min(rows, n - start))
        yield min(rows, n - start), (weigh(block, k) for k in shares(samples, most, smallest=LEAST))


def _collect(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    samples: int,
    seed: int | None,
    memory: Memory,
    weigh: Weigher,
) -> list[Weights]:
    found = []
    with model._evaluating(seed):
        for rows, parts in streams(model, batch, samples, memory, weigh):
            weights = Weights(rows, samples, model._parameter().device)
            for part in parts:
                weights.add(part)
            found.append(weights)
    return found


def _judged(model: DeclaredModel, found: Sequence[Weights], method: str, remedy: str) -> Evidence:
    value, stderr, ess, khat = (
        torch.cat([getattr(weights, name) for weights in found])
        for name in ("value", "stderr", "ess", "khat")
    )
    samples, dtype = found[0].count, model._parameter().dtype
    diagnostics: dict[str, Tensor | float | int] = {"samples": samples, "ess": ess, "khat": khat}
    return Evidence(
        value.to(dtype),
        stderr.to(dtype),
        method,
        diagnostics,
        tuple(weight_notes(value, khat, ess, samples, remedy)),
    )
