"""Faults that are put into the library on purpose: the comparisons must detect all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import aevb.declare.families
import aevb.derive.divergences
import aevb.derive.plan
import aevb.estimate.chain_marginals
import aevb.estimate.estimators
import aevb.estimate.program
import aevb.evidence.finite
import aevb.evidence.square_root_belief
from aevb.derive.axes import swap

from .compare import KINDS, Comparer
from .random_declarations import random_declaration


def wrapped(owner: Any, name: str, change: Any) -> AbstractContextManager[Any]:
    """Replace a function by one that gets the original as first argument."""
    original = getattr(owner, name)
    return patch.object(
        owner, name, lambda *arguments, **named: change(original, *arguments, **named)
    )


def no_end_of_q(original: Any, self: Any, side: str, name: str, region: str) -> Any:
    return original(self, side, name, "all" if side == "q" else region)


def transposed_pairs(original: Any, self: Any, direction: int) -> Tensor:
    weights = original(self, direction)
    for current, neighbour in self.slots:
        if neighbour is not None and direction:
            weights = swap(weights, current, neighbour)
    return weights


class WithoutLogarithms:
    """The module ``math``, but with log 1 = log K."""

    def __getattr__(self, name: str) -> Any:
        return (lambda number: 0.0) if name == "log" else getattr(math, name)


def dreg_without_weight(original: Any, self: Any, kl_weight: Any = 1.0) -> dict[str, Tensor]:
    logits = _sample_logits(self, kl_weight)
    return {
        name: torch.softmax(scale * 0 + logits, aevb.estimate.estimators.SAMPLES)
        for name, scale in original(self, 1.0).items()
    }


def _sample_logits(self: Any, kl_weight: Any) -> Tensor:
    total = aevb.estimate.estimators.integrand(*self.terms(), kl_weight)
    for name, axis in self.sequence():
        if name == "#S":
            break
        total = aevb.estimate.estimators.contract(total, self.weight(name), axis)
    return aevb.estimate.estimators.expand_axis(
        total, aevb.estimate.estimators.SAMPLES, self.plan.samples
    )


def all_present(
    original: Any, self: Any, dist: Any, value: Tensor, present: Tensor | None = None
) -> Tensor:
    return original(self, dist, value, None)


def padded_end(original: Any, self: Any, value: Tensor) -> Tensor:
    return aevb.estimate.program.over_time(value, self.count).narrow(
        aevb.estimate.program.TIME, self.count - 1, 1
    )


ORDER = aevb.derive.plan.Plan.order.fget  # type: ignore[attr-defined]


def reordered(change: Any) -> AbstractContextManager[Any]:
    """Replace the plan's order of sums, and so the printed formula, by a function of the order."""
    return patch.object(
        aevb.derive.plan.Plan, "order", property(lambda self: change(self, ORDER(self)))
    )


def by_draws(plan: Any, order: tuple[str, ...]) -> tuple[str, ...]:
    """Order the latents on each side of the mean over samples only by q's order of draws.

    The last one is innermost.
    """
    inner, outer = order[: order.index("#S")], order[order.index("#S") + 1 :]
    return (
        *(name for name in reversed(plan.slots) if name in inner),
        "#S",
        *(name for name in reversed(plan.slots) if name in outer),
    )


def samples_first(original: Any, self: Any) -> list[tuple[str, int]]:
    return sorted(original(self), key=lambda step: step[0] != "#S")


def weight_of_all_samples(original: Any, self: Any, name: str) -> Tensor:
    weight = original(self, name)
    return (
        weight
        if self.graph.timed[name]
        else weight.mean(aevb.estimate.estimators.SAMPLES, keepdim=True)
    )


def means_of_samples_first() -> AbstractContextManager[Any]:
    """Change only the estimate, not the formula: take the mean over samples first.

    The sums then have the mean of each weight.
    """
    stack = ExitStack()
    stack.enter_context(wrapped(aevb.estimate.estimators.Estimate, "sequence", samples_first))
    stack.enter_context(wrapped(aevb.estimate.estimators.Estimate, "weight", weight_of_all_samples))
    return stack


NORMALS = (aevb.Normal, aevb.Normal)
KL = aevb.derive.divergences._KL

FAULTS: dict[str, Any] = {
    "densities of q ignore its ends": lambda: wrapped(
        aevb.estimate.program.Program, "entry", no_end_of_q
    ),
    "q's entropy has the wrong sign": lambda: wrapped(
        aevb.declare.families.Normal, "entropy", lambda original, *a: -original(*a)
    ),
    "KL between Normals has its arguments exchanged": lambda: patch.dict(
        KL, {NORMALS: lambda q, p, kl=KL[NORMALS]: kl(p, q)}
    ),
    "a KL in closed form though p's parent depends on the latent": lambda: patch.object(
        aevb.derive.plan, "conflict", lambda *a, **k: None
    ),
    "missing entries of a Normal count": lambda: wrapped(
        aevb.declare.families.Normal, "log_prob", all_present
    ),
    "iwae lacks − log K": lambda: patch.object(
        aevb.estimate.estimators, "math", WithoutLogarithms()
    ),
    "pairwise marginals of a chain are transposed": lambda: wrapped(
        aevb.estimate.chain_marginals.Chain, "weights", transposed_pairs
    ),
    "dreg weights samples by w² whatever the KL weight": lambda: wrapped(
        aevb.estimate.estimators.Estimate, "gradient_scale", dreg_without_weight
    ),
    "a known latent pays − log q": lambda: wrapped(
        aevb.estimate.estimators.Estimate, "_where_unknown", lambda original, self, name, term: term
    ),
    "the last step of a padded row is read at the padding": lambda: wrapped(
        aevb.estimate.program.Program, "last_step", padded_end
    ),
    "a function of nothing but the outside is not zeros": lambda: wrapped(
        aevb.estimate.program.Program, "_zero_outside", lambda original, self, v, e: v
    ),
    "a Gaussian belief forgets the noise of a rule": lambda: wrapped(
        aevb.evidence.square_root_belief.RootBelief,
        "extended",
        lambda original, self, column, rule: original(
            self, column, replace(rule, noise=0.5 * rule.noise)
        ),
    ),
    "the sum over finite latents forgets their prior": lambda: wrapped(
        aevb.evidence.finite.Tables,
        "log_p",
        lambda original, self, name: original(self, name) * (name not in self.structure.discrete),
    ),
    "the mean over samples is planned before every sum": lambda: reordered(
        lambda plan, order: ("#S", *(name for name in order if name != "#S"))
    ),
    "the mean over samples is taken before every sum": means_of_samples_first,
    "every sum is planned before the mean over samples": lambda: reordered(
        lambda plan, order: (*(name for name in order if name != "#S"), "#S")
    ),
    "every sum is taken before the mean over samples": lambda: wrapped(
        aevb.estimate.estimators.Estimate,
        "sequence",
        lambda original, self: sorted(original(self), key=lambda step: step[0] == "#S"),
    ),
    "an expectation is planned inside a logarithm that its weights do not depend on": lambda: (
        reordered(by_draws)
    ),
}


def noticed(
    fault: str | None, seeds: Iterable[int], kinds: Sequence[str] = KINDS, requests: int = 7
) -> Counter[str]:
    """Return how many comparisons of these random models detect a fault, by quantity.

    "error" counts models that failed.
    """
    found: Counter[str] = Counter()
    for seed in seeds:
        declaration, _ = random_declaration(seed)
        comparer = Comparer(declaration, seed)
        with FAULTS[fault]() if fault else nullcontext():
            try:
                for comparison in comparer.run(kinds, requests):
                    found["comparisons"] += 1
                    if not comparison.agrees:
                        found["noticed"] += 1
                        found[comparison.what] += 1
            except (RuntimeError, ValueError, AssertionError, KeyError, IndexError):
                found["errors"] += 1
    return found
