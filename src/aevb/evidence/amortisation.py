"""The gap between the evidence and the bound, split: what q's family cannot reach, and what one network for all examples costs.

    log p(x) − ELBO  =  (log p(x) − max ELBO over a q of x's own)  +  (max ELBO over a q of x's own − ELBO)
         total                       approximation                                amortisation

The best q of an example is found by gradient ascent on its own raw numbers (:mod:`aevb.evidence.per_example_q`), from where the encoder put them: the
ascent's end, or its later mean or its start where the end is not clearly above them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aevb.compiled_step.gradients import weights_fixed
from aevb.declare.families import Exact
from aevb.derive.draws import Draw
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import estimate
from aevb.evidence import AIS, Particles, log_evidence
from aevb.evidence.per_example_q import free_factors, zero_offsets
from aevb.evidence.result import Evidence, weight_notes
from aevb.evidence.weights import Weights

RATE = 0.1  # of Adam at the start; raw numbers are of order one
LATER = 2 / 3  # of the steps of the ascent, over which its places are averaged
DRAWS = 16  # samples of each example in one step of the ascent
REPEATS = 10  # independent estimates whose spread gives the errors
BUDGET = 20_000_000  # numbers that one chunk of rows may take

Offsets = dict[str, Tensor]  # by the entry of q whose raw numbers they move


@dataclass(frozen=True)
class Gap:
    """log p(x) − ELBO and its two parts, one number an example each, in nats; ``stderr`` has the sampling error of each by its name.

    A part may come out below zero by its error. Where the evidence is itself estimated (``method``), what that estimate misses is missing
    from ``approximation`` and ``total``; and where the ascent has not arrived, what it missed is counted as approximation.
    """

    evidence: Tensor
    elbo: Tensor
    best: Tensor
    method: str
    stderr: Mapping[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()  # about the evidence, where it should not be trusted

    @property
    def total(self) -> Tensor:
        return self.evidence - self.elbo

    @property
    def approximation(self) -> Tensor:
        """log p(x) less the best bound that a q of the example's own, of the declared family, can have."""
        return self.evidence - self.best

    @property
    def amortisation(self) -> Tensor:
        """That best bound less the bound of q as its network gives it."""
        return self.best - self.elbo

    def __str__(self) -> str:
        def line(label: str, name: str, remark: str) -> str:
            error = float(self.stderr[name].square().sum().sqrt()) / n  # of the mean; the examples' draws are independent
            shown = f" ± {error:.4f}" if error else ""
            return f"{label:<20} {float(getattr(self, name).mean()):10.4f}{shown:<10} {remark}".rstrip()

        n = len(self.elbo)
        return "\n".join([
            f"Mean over {n} example{'s' * (n > 1)}, in nats; ± is the sampling error",
            line("log p(x)", "evidence", self.method),
            line("  approximation gap", "approximation", "what q's family cannot reach"),
            line("best q of its own", "best", ""),
            line("  amortisation gap", "amortisation", "what one network for all examples costs"),
            line("ELBO", "elbo", ""),
            *self.notes,
        ])  # fmt: skip


def split_gap(
    model: DeclaredModel,
    data: Mapping[str, Any],
    *,
    iterations: int,
    samples: int,
    method: str | AIS | Particles,
    how: Mapping[str, str] | None,
    seed: int | None,
) -> Gap:
    """The gap of every example and its parts; see :meth:`aevb.Model.gap`."""
    for name, value, least in (("iterations", iterations, 0), ("samples", samples, 2 * REPEATS)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is a whole number, {least} or more, got {value!r}.")
    batch = model.prepare(**data)
    clamped, partial = split_latents(model.graph, batch)
    if set(model.graph.latents) <= clamped:
        raise ValueError("Every latent is passed for all rows, so that there is no q and no gap. Leave one of them out of the data.")
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()

    choices: dict[str, Any] = {"how": how, "clamped": clamped, "partial": partial}
    _check_how(model, choices)
    plan = functools.partial(model.plan, gradient=_gradient(model, choices), **choices)
    with model._evaluating(None):
        chunks = _chunks(model, plan(samples=DRAWS), batch, samples // REPEATS)
        share = plan(samples=samples // REPEATS)
        places = [_ascend(model, plan(samples=DRAWS), rows, iterations, generator) for rows in chunks]
        parts = [_choose(model, share, rows, found, generator) for rows, found in zip(chunks, places, strict=True)]
        both = [_bounds(model, share, rows, offsets, generator) for rows, offsets in zip(chunks, parts, strict=True)]
        elbo, best = (torch.cat([bounds[i] for bounds in both], 1) for i in range(2))
        evidence = _known_evidence(model, batch, plan(samples=DRAWS), method, samples, seed)
        if evidence is None:
            weighted = _weighted(model, plan(samples=DRAWS), samples // REPEATS)
            found = [_log_weights(model, weighted, rows, offsets, generator) for rows, offsets in zip(chunks, parts, strict=True)]
            evidence = _importance(torch.cat(found, 1))

    stderr = {"evidence": evidence.stderr, "elbo": _error(elbo), "best": _error(best), "amortisation": _error(best - elbo)}
    stderr |= {name: (evidence.stderr.square() + stderr[of].square()).sqrt() for name, of in (("approximation", "best"), ("total", "elbo"))}
    return Gap(evidence.value, elbo.mean(0), best.mean(0), evidence.method, stderr, evidence.notes)


def _check_how(model: DeclaredModel, choices: Mapping[str, Any]) -> None:
    """Refuse a request whose plan is biased or cannot be had, and name an unbiased one if there is one."""
    how = dict(choices["how"] or {})
    try:
        biased = model.plan(samples=DRAWS, **choices).biased
    except ValueError as error:
        if not (instead := _unbiased(model, choices, {})):  # none, or the plan's own: then it is the request that is wrong
            raise
        raise ValueError(f"{error} A gap needs an unbiased bound: use how={instead}.") from None
    for name, why in biased.items():
        instead = _unbiased(model, choices, {other: words for other, words in how.items() if other != name})
        fix = f" Use how={instead}." if instead else " Leave it out." if instead == {} else ""
        raise ValueError(f"how={{{name!r}: {how[name]!r}}} gives no unbiased bound to compare with log p(x): {why}.{fix}")


def _unbiased(model: DeclaredModel, choices: Mapping[str, Any], how: Mapping[str, str]) -> dict[str, str] | None:
    """This request where its plan is unbiased, or else the same with all finite latents drawn by the score function; None if neither is."""
    graph = model.graph
    finite = [name for name in graph.latents if graph.rule("p", name).spec.finite and not isinstance(graph.rule("q", name).spec, Exact)]
    for request in (dict(how), dict(how) | {name: "score" for name in finite if name not in choices["clamped"]}):
        try:
            if not model.plan(samples=DRAWS, **{**choices, "how": request}).biased:
                return request
        except ValueError:
            continue
    return None


def _error(value: Tensor) -> Tensor:
    """The standard error of the mean of independent estimates, [REPEATS, N]."""
    return value.std(0) / math.sqrt(REPEATS)


def _gradient(model: DeclaredModel, choices: Mapping[str, Any]) -> str:
    """Log q at the sample, where the plan allows it: the closer q is to the posterior, the less do the bound and its gradient then vary."""
    try:
        return model.plan(samples=DRAWS, gradient="stl", **choices).gradient
    except ValueError:
        return "plain"


def _chunks(model: DeclaredModel, plan: Plan, batch: Batch, samples: int) -> list[Batch]:
    """The rows in parts that fit in memory: a few numbers for every output of every network, sample, step and enumerated value."""
    n, steps = model._extent(batch)
    width = sum(model.graph.size(name) for name in model.graph.shapes) * steps * math.prod(plan.size((name, 0)) for name in plan.slots)
    rows = max(1, BUDGET // (max(samples, DRAWS) * width))
    return [{key: value.narrow(-2, start, min(rows, n - start)) for key, value in batch.items()} for start in range(0, n, rows)]


def _ascend(model: DeclaredModel, plan: Plan, batch: Batch, iterations: int, generator: torch.Generator) -> list[Offsets]:
    """Offsets of zero, the later ones' mean, and the last: Adam, each example by itself, on fresh noise in every step, at a rate that falls to 0."""
    factors, offsets = free_factors(model, plan), zero_offsets(model, plan, batch)
    start, mean = ({name: offset.clone() for name, offset in offsets.items()} for _ in range(2))
    free = [offset.requires_grad_() for offset in offsets.values()]
    if not free:
        return [start]
    optimizer = torch.optim.Adam(free, lr=RATE)
    early = iterations - math.ceil(LATER * iterations)
    with torch.enable_grad(), weights_fixed():
        for i in range(iterations):
            optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * i / iterations))
            value = estimate(plan, factors, batch, model.draw_noise(plan, batch, seed=_seed(generator)) | offsets).value
            for offset, gradient in zip(free, torch.autograd.grad(-value.sum(), free), strict=True):
                offset.grad = gradient.nan_to_num(0.0, 0.0, 0.0)  # an example that overflows stays where it is
            optimizer.step()
            for name, offset in offsets.items():
                if i >= early:
                    mean[name].lerp_(offset.detach(), 1 / (i - early + 1))
    return [start, mean, {name: offset.detach() for name, offset in offsets.items()}]


def _choose(model: DeclaredModel, plan: Plan, batch: Batch, places: Sequence[Offsets], generator: torch.Generator) -> Offsets:
    """For each example one of these offsets: a later one where its bound is higher than an earlier one's by more than the error of that.

    Adam's steps have the size of its rate however small the slope, so that the noise of its gradients may carry it below a start that was
    nearly right. The choice has draws of its own: the ascent's favour its end, and those of the report would favour whatever they chose.
    """
    factors, found = free_factors(model, plan), []
    for _ in range(REPEATS):
        noise = model.draw_noise(plan, batch, seed=_seed(generator))
        found.append(torch.stack([estimate(plan, factors, batch, noise | offsets).value for offsets in places], 1))  # [N, places]
    bounds = torch.stack(found)
    chosen, value = dict(places[0]), bounds[..., 0]
    for i, offsets in enumerate(places[1:], 1):
        lead = bounds[..., i] - value
        rescued = bounds[..., i].isfinite().all(0) & ~value.isfinite().all(0)
        better = (lead.mean(0) > _error(lead)) | rescued
        chosen = {name: torch.where(better.unsqueeze(-1), offset, chosen[name]) for name, offset in offsets.items()}
        value = torch.where(better, bounds[..., i], value)
    return chosen


def _bounds(model: DeclaredModel, plan: Plan, batch: Batch, offsets: Offsets, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The bound of q as amortised and of the best q of each example's own, [REPEATS, N] each, on the same fresh noise."""
    factors = free_factors(model, plan)
    amortised, best = [], []
    for _ in range(REPEATS):
        noise = model.draw_noise(plan, batch, seed=_seed(generator))
        amortised.append(estimate(plan, model.factors, batch, noise).value)  # type: ignore[arg-type]
        best.append(estimate(plan, factors, batch, noise | offsets).value)
    return torch.stack(amortised), torch.stack(best)


# The evidence ----------------------------------------------------------------------------------------------------------------


def _known_evidence(model: DeclaredModel, batch: Batch, plan: Plan, method: str | AIS | Particles, samples: int, seed: int | None) -> Evidence | None:
    """The evidence as asked for, or exactly where it can be; None where the best q is to propose its samples, being nearer to the posterior."""
    if method != "auto":  # chains and particles are counted by those methods themselves
        return log_evidence(model, batch, method=method, samples=samples if method == "importance" else None, seed=seed)
    try:
        return log_evidence(model, batch, method="exact")
    except ValueError:
        if any(model.graph.timed[name] for name in plan.enumerated):  # inside the logarithm their sum does not factor over time
            return log_evidence(model, batch, samples=samples, seed=seed)
        return None


def _weighted(model: DeclaredModel, plan: Plan, samples: int) -> Plan:
    """The plan of log-weights whose factors have the same axes as under this one; what is enumerated is summed inside the logarithm."""
    how = {name: Draw.SUM if choice.draw is Draw.ENUMERATE else choice.draw for name, choice in plan.choices.items()}
    return model.plan(how=how, bound="iwae", samples=samples, clamped=plan.clamped, partial=plan.partial)


def _log_weights(model: DeclaredModel, plan: Plan, batch: Batch, offsets: Offsets, generator: torch.Generator) -> Tensor:
    """log p(x, z)/q(z) of draws from the best q, [samples, N]."""
    factors, found = free_factors(model, plan), []
    for _ in range(REPEATS):
        weights = estimate(plan, factors, batch, model.draw_noise(plan, batch, seed=_seed(generator)) | offsets).log_weights
        assert weights is not None  # nothing is enumerated outside the logarithm
        found.append(weights)
    return torch.cat(found)


def _importance(log_weights: Tensor) -> Evidence:
    """log 1/K Σ w, with a note on the examples of which a few weights carry the mean."""
    samples, n = log_weights.shape
    weights = Weights(n, samples, log_weights.device)
    weights.add(log_weights)
    value, stderr = (part.to(log_weights.dtype) for part in (weights.value, weights.stderr))
    notes = weight_notes(value, weights.khat, samples, "take more samples: their approximation gap is too small as well")
    return Evidence(value, stderr, "importance, from the best q", {"khat": weights.khat}, tuple(notes))


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))
