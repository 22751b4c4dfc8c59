"""Split the gap between the evidence and the ELBO into approximation and amortisation gap.

    log p(x) − ELBO  =  (log p(x) − ELBO*)  +  (ELBO* − ELBO)
         total            approximation         amortisation

ELBO* is the largest ELBO of a q of the declared family with parameters of its own per example. It
is found by gradient ascent on these parameters (:mod:`aevb.evidence.per_example_q`), starting from
the encoder's output. The result is the last iterate. If it is not clearly better, the average of
the later iterates or the start is used.
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
from aevb.derive.dependence import Axis
from aevb.derive.draws import Draw
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import estimate
from aevb.evidence import AIS, Particles, log_evidence
from aevb.evidence.per_example_q import free_factors, zero_offsets
from aevb.evidence.result import Evidence, weight_notes
from aevb.evidence.weights import Weights

RATE = 0.1  # initial learning rate of Adam; network outputs are of order one
LATER = 2 / 3  # share of the iterations, at the end, whose iterates are averaged
DRAWS = 16  # samples per example in one step of the ascent
REPEATS = 10  # independent estimates whose spread gives the standard errors
BUDGET = 20_000_000  # elements per chunk of rows

Offsets = dict[str, Tensor]  # offsets of the network outputs, by entry of q


@dataclass(frozen=True)
class Gap:
    """log p(x) − ELBO and its two parts, per example, in nats.

    A part may be negative within its error. If the evidence is itself estimated, an underestimate
    lowers ``approximation`` and ``total``. If the ascent has not converged, the remainder counts as
    approximation gap.

    Attributes:
        evidence: log p(x) [N].
        elbo: The ELBO of the amortised q [N].
        best: The best ELBO of a q of its own per example [N].
        method: The method of the evidence.
        stderr: The sampling errors [N], by the names of the numbers.
        notes: Warnings about an unreliable estimate of the evidence.

    >>> from aevb import zoo
    >>> model = zoo.fa(x=3, z=2)
    >>> gap = model.gap(x=torch.zeros(4, 3), iterations=5, samples=100, seed=0)
    >>> gap.method, gap.total.shape
    ('exact', torch.Size([4]))
    """

    evidence: Tensor
    elbo: Tensor
    best: Tensor
    method: str
    stderr: Mapping[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()  # warnings about an unreliable evidence estimate

    @property
    def total(self) -> Tensor:
        """log p(x) minus the ELBO: the sum of the two parts."""
        return self.evidence - self.elbo

    @property
    def approximation(self) -> Tensor:
        """log p(x) minus the best ELBO of a per-example q of the declared family."""
        return self.evidence - self.best

    @property
    def amortisation(self) -> Tensor:
        """Best ELBO of a per-example q minus the ELBO of the amortised q."""
        return self.best - self.elbo

    def __str__(self) -> str:
        def line(label: str, name: str, remark: str) -> str:
            # This is the standard error of the mean, because examples are independent.
            error = float(self.stderr[name].square().sum().sqrt()) / n
            shown = f" ± {error:.4f}" if error else ""
            mean = float(getattr(self, name).mean())
            return f"{label:<20} {mean:10.4f}{shown:<10} {remark}".rstrip()

        n = len(self.elbo)
        return "\n".join(
            [
                f"Mean over {n} example{'s' * (n > 1)}, in nats; ± is the sampling error",
                line("log p(x)", "evidence", self.method),
                line("  approximation gap", "approximation", "what q's family cannot reach"),
                line("best q per example", "best", ""),
                line(
                    "  amortisation gap", "amortisation", "what one network for all examples costs"
                ),
                line("ELBO", "elbo", ""),
                *self.notes,
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from aevb.notebook import cards

        return cards.gap_card(self)


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
    """Return the gap and its parts per example; see :meth:`aevb.Model.gap`."""
    for name, value, least in (("iterations", iterations, 0), ("samples", samples, 2 * REPEATS)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is a whole number, {least} or more, got {value!r}.")
    batch = model.prepare(gaps=True, **data)
    clamped, partial = split_latents(model.graph, batch)
    if not model.graph.latents:
        raise ValueError(
            "The model has no latents, so there is no q and no gap: the bound is log p."
        )
    if set(model.graph.latents) <= clamped:
        raise ValueError(
            "Every latent is passed for all rows, so there is no q and no gap. Leave one of them "
            "out of the data."
        )
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()

    choices: dict[str, Any] = {"how": how, "clamped": clamped, "partial": partial}
    _check_how(model, choices)
    plan = functools.partial(model.plan, gradient=_gradient(model, choices), **choices)
    with model._evaluating(None):
        chunks = _chunks(model, plan(samples=DRAWS), batch, samples // REPEATS)
        share = plan(samples=samples // REPEATS)
        places = [
            _ascend(model, plan(samples=DRAWS), rows, iterations, generator) for rows in chunks
        ]
        parts = [
            _choose(model, share, rows, found, generator)
            for rows, found in zip(chunks, places, strict=True)
        ]
        both = [
            _bounds(model, share, rows, offsets, generator)
            for rows, offsets in zip(chunks, parts, strict=True)
        ]
        elbo, best = (torch.cat([bounds[i] for bounds in both], 1) for i in range(2))
        evidence = _known_evidence(model, batch, plan(samples=DRAWS), method, samples, seed)
        if evidence is None:
            weighted = _weighted(model, plan(samples=DRAWS), samples // REPEATS)
            found = [
                _log_weights(model, weighted, rows, offsets, generator)
                for rows, offsets in zip(chunks, parts, strict=True)
            ]
            evidence = _importance(torch.cat(found, 1))

    stderr = {
        "evidence": evidence.stderr,
        "elbo": _error(elbo),
        "best": _error(best),
        "amortisation": _error(best - elbo),
    }
    stderr |= {
        name: (evidence.stderr.square() + stderr[of].square()).sqrt()
        for name, of in (("approximation", "best"), ("total", "elbo"))
    }
    return Gap(evidence.value, elbo.mean(0), best.mean(0), evidence.method, stderr, evidence.notes)


def _check_how(model: DeclaredModel, choices: Mapping[str, Any]) -> None:
    """Raise if the requested plan is biased or impossible.

    The error suggests an unbiased plan if there is one.
    """
    how = dict(choices["how"] or {})
    try:
        biased = model.plan(samples=DRAWS, **choices).biased
    except ValueError as error:
        # If no unbiased plan exists, or it is the default one, the request itself is wrong.
        if not (instead := _unbiased(model, choices, {})):
            raise
        raise ValueError(f"{error} A gap needs an unbiased bound: use how={instead}.") from None
    for name, why in biased.items():
        instead = _unbiased(
            model, choices, {other: words for other, words in how.items() if other != name}
        )
        fix = f" Use how={instead}." if instead else " Leave it out." if instead == {} else ""
        raise ValueError(
            f"how={{{name!r}: {how[name]!r}}} gives no unbiased bound to compare with log p(x): "
            f"{why}.{fix}"
        )


def _unbiased(
    model: DeclaredModel, choices: Mapping[str, Any], how: Mapping[str, str]
) -> dict[str, str] | None:
    """Return the request if its plan is unbiased, else one with score-function gradients.

    The second alternative draws all finite latents by the score function. Return None if neither
    request gives an unbiased plan.
    """
    graph = model.graph
    finite = [
        name
        for name in graph.latents
        if graph.rule("p", name).spec.finite and not isinstance(graph.rule("q", name).spec, Exact)
    ]
    for request in (
        dict(how),
        dict(how) | {name: "score" for name in finite if name not in choices["clamped"]},
    ):
        try:
            if not model.plan(samples=DRAWS, **{**choices, "how": request}).biased:
                return request
        except ValueError:
            continue
    return None


def _error(value: Tensor) -> Tensor:
    """Return the standard error of the mean of independent estimates, [REPEATS, N]."""
    return value.std(0) / math.sqrt(REPEATS)


def _gradient(model: DeclaredModel, choices: Mapping[str, Any]) -> str:
    """Return "stl" (sticking the landing) if the plan allows it, else "plain".

    With "stl", the variance of the bound and its gradient vanishes as q approaches the posterior.
    """
    try:
        return model.plan(samples=DRAWS, gradient="stl", **choices).gradient
    except ValueError:
        return "plain"


def _chunks(model: DeclaredModel, plan: Plan, batch: Batch, samples: int) -> list[Batch]:
    """Split the rows into chunks that fit into memory.

    Memory is estimated from the outputs of all networks per sample, step and enumerated value.
    """
    n, steps = model._extent(batch)
    width = (
        sum(model.graph.size(name) for name in model.graph.shapes)
        * steps
        * math.prod(plan.size(Axis(name)) for name in plan.slots)
    )
    rows = max(1, BUDGET // (max(samples, DRAWS) * width))
    return [
        {key: value.narrow(-2, start, min(rows, n - start)) for key, value in batch.items()}
        for start in range(0, n, rows)
    ]


def _ascend(
    model: DeclaredModel, plan: Plan, batch: Batch, iterations: int, generator: torch.Generator
) -> list[Offsets]:
    """Optimise the offsets of each example by Adam, with fresh noise and a decaying learning rate.

    Returns offsets of zero, the average of the later iterates, and the last iterate.
    """
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
            value = estimate(
                plan, factors, batch, model.draw_noise(plan, batch, seed=_seed(generator)) | offsets
            ).value
            for offset, gradient in zip(free, torch.autograd.grad(-value.sum(), free), strict=True):
                # An example with a non-finite gradient keeps its offset.
                offset.grad = gradient.nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
            for name, offset in offsets.items():
                if i >= early:
                    mean[name].lerp_(offset.detach(), 1 / (i - early + 1))
    return [start, mean, {name: offset.detach() for name, offset in offsets.items()}]


def _choose(
    model: DeclaredModel,
    plan: Plan,
    batch: Batch,
    places: Sequence[Offsets],
    generator: torch.Generator,
) -> Offsets:
    """Choose offsets per example; a later candidate must be better by more than the error.

    Adam's steps have the size of its learning rate however small the gradient is. Gradient noise
    may therefore move it away from a start that was nearly optimal. The choice uses its own noise:
    the noise of the ascent would favour the last iterate, and the noise of the report would bias
    the reported bound upwards.
    """
    factors, found = free_factors(model, plan), []
    for _ in range(REPEATS):
        noise = model.draw_noise(plan, batch, seed=_seed(generator))
        # [N, places]
        found.append(
            torch.stack(
                [estimate(plan, factors, batch, noise | offsets).value for offsets in places], 1
            )
        )
    bounds = torch.stack(found)
    chosen, value = dict(places[0]), bounds[..., 0]
    for i, offsets in enumerate(places[1:], 1):
        lead = bounds[..., i] - value
        rescued = bounds[..., i].isfinite().all(0) & ~value.isfinite().all(0)
        better = (lead.mean(0) > _error(lead)) | rescued
        chosen = {
            name: torch.where(better.unsqueeze(-1), offset, chosen[name])
            for name, offset in offsets.items()
        }
        value = torch.where(better, bounds[..., i], value)
    return chosen


def _bounds(
    model: DeclaredModel, plan: Plan, batch: Batch, offsets: Offsets, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the ELBO of the amortised q and of the best per-example q, [REPEATS, N] each.

    Both use the same fresh noise.
    """
    factors = free_factors(model, plan)
    amortised, best = [], []
    for _ in range(REPEATS):
        noise = model.draw_noise(plan, batch, seed=_seed(generator))
        amortised.append(estimate(plan, model.factors, batch, noise).value)
        best.append(estimate(plan, factors, batch, noise | offsets).value)
    return torch.stack(amortised), torch.stack(best)


# The evidence -------------------------------------------------------------------------------------


def _known_evidence(
    model: DeclaredModel,
    batch: Batch,
    plan: Plan,
    method: str | AIS | Particles,
    samples: int,
    seed: int | None,
) -> Evidence | None:
    """Return the evidence by the requested method, or exactly if possible.

    Return None if it should be estimated by importance sampling from the best per-example q, which
    is closer to the posterior.
    """
    # AIS and particle filters have their own default counts
    if method != "auto":
        return log_evidence(
            model,
            batch,
            method=method,
            samples=samples if method == "importance" else None,
            seed=seed,
        )
    try:
        return log_evidence(model, batch, method="exact")
    except ValueError:
        # Inside the logarithm, the sum does not factor over time.
        if any(model.graph.timed[name] for name in plan.enumerated):
            return log_evidence(model, batch, samples=samples, seed=seed)
        return None


def _weighted(model: DeclaredModel, plan: Plan, samples: int) -> Plan:
    """Return the plan for log-weights, with enumerated latents summed inside the logarithm.

    Its factors have the same axes as those of ``plan``.
    """
    how = {
        name: Draw.SUM if choice.draw is Draw.ENUMERATE else choice.draw
        for name, choice in plan.choices.items()
    }
    return model.plan(
        how=how, bound="iwae", samples=samples, clamped=plan.clamped, partial=plan.partial
    )


def _log_weights(
    model: DeclaredModel, plan: Plan, batch: Batch, offsets: Offsets, generator: torch.Generator
) -> Tensor:
    """Return log p(x, z)/q(z) of draws from the best per-example q, [samples, N]."""
    factors, found = free_factors(model, plan), []
    for _ in range(REPEATS):
        weights = estimate(
            plan, factors, batch, model.draw_noise(plan, batch, seed=_seed(generator)) | offsets
        ).log_weights
        assert weights is not None  # nothing is enumerated outside the logarithm
        found.append(weights)
    return torch.cat(found)


def _importance(log_weights: Tensor) -> Evidence:
    """Return log 1/K Σ w, with a note on examples where a few weights dominate."""
    samples, n = log_weights.shape
    weights = Weights(n, samples, log_weights.device)
    weights.add(log_weights)
    value, stderr = (part.to(log_weights.dtype) for part in (weights.value, weights.stderr))
    notes = weight_notes(
        value,
        weights.khat,
        weights.ess,
        samples,
        "take more samples: their approximation gap is too small as well",
    )
    return Evidence(
        value, stderr, "importance, from the best q", {"khat": weights.khat}, tuple(notes)
    )


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))
