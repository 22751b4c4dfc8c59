"""Closed-form KL divergences between families.

With one, a plan computes a KL term without sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor

from aevb.declare import distributions as ad
from aevb.declare.conditionals import Conditional
from aevb.declare.families import (
    Bernoulli,
    Beta,
    Laplace,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
)
from aevb.runtime.shapes import broadcast_shapes

_KL: dict[tuple[type, type], Callable[[Any, Any], Tensor]] = {}


def register_kl(
    q: type[Conditional], p: type[Conditional]
) -> Callable[[Callable[[Any, Any], Tensor]], Callable[[Any, Any], Tensor]]:
    """Register KL(q‖p) for two families.

    Arguments:
        q: The family of q.
        p: The family of p.

    Returns:
        A decorator of a function of the two torch distributions, which returns the divergence
        summed over the event.

    >>> from dataclasses import dataclass
    >>> from aevb import Normal
    >>> @dataclass(frozen=True, repr=False)
    ... class UnitNormal(Normal):
    ...     scale: str | float = 1.0
    >>> @register_kl(UnitNormal, UnitNormal)
    ... def unit_kl(q, p):
    ...     return 0.5 * (q.loc - p.loc).square().sum(-1)
    >>> closed_form_kl(UnitNormal(1), UnitNormal(1)) is unit_kl
    True
    """

    def add(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        _KL[q, p] = function
        return function

    return add


def closed_form_kl(q: Conditional, p: Conditional) -> Callable[[Any, Any], Tensor] | None:
    """KL(q‖p) as a function of the two distributions, or None if no closed form is known."""
    return _KL.get((type(q), type(p)))


def closed_forms(
    q: type[Conditional],
) -> list[tuple[type[Conditional], Callable[[Any, Any], Tensor]]]:
    """The families p, each with KL(q‖p), for which a closed form is known."""
    return [(p, function) for (family, p), function in _KL.items() if family is q]


@register_kl(Normal, Normal)
def _kl_normal(q: td.Normal, p: td.Normal) -> Tensor:
    ratio = (q.scale / p.scale).square()
    return 0.5 * (ratio + ((q.loc - p.loc) / p.scale).square() - 1 - ratio.log()).sum(-1)


@register_kl(MultivariateNormal, Normal)
def _kl_full_diagonal(q: ad.MultivariateNormal, p: td.Normal) -> Tensor:
    variance = q._unbroadcasted_scale_tril.square().sum(-1)
    quadratic = (
        (variance + (q.loc - p.loc).square()) / p.scale.square() - 1 + 2 * p.scale.log()
    ).sum(-1)
    return 0.5 * quadratic - q.log_det


@register_kl(Normal, MultivariateNormal)
def _kl_diagonal_full(q: td.Normal, p: ad.MultivariateNormal) -> Tensor:
    scale = q.scale.expand(broadcast_shapes(q.scale.shape, q.loc.shape))
    return _kl_full(ad.MultivariateNormal(q.loc, torch.diag_embed(scale)), p)


@register_kl(MultivariateNormal, MultivariateNormal)
def _kl_full(q: ad.MultivariateNormal, p: ad.MultivariateNormal) -> Tensor:
    factor_q, factor_p = q._unbroadcasted_scale_tril, p._unbroadcasted_scale_tril
    shape = broadcast_shapes(factor_q.shape, factor_p.shape)
    trace = (
        torch.linalg.solve_triangular(factor_p.expand(shape), factor_q.expand(shape), upper=False)
        .square()
        .sum((-2, -1))
    )
    return 0.5 * (trace + p.whiten(q.loc).square().sum(-1) - shape[-1]) + p.log_det - q.log_det


@register_kl(OneHot, OneHot)
def _kl_one_hot(q: ad.Categories, p: ad.Categories) -> Tensor:
    return ad.xlogy_difference(*torch.broadcast_tensors(q.logits, p.logits)).sum(-1)


@register_kl(Bernoulli, Bernoulli)
def _kl_bernoulli(q: td.Bernoulli, p: td.Bernoulli) -> Tensor:
    return (q.probs * (q.logits - p.logits) - F.softplus(q.logits) + F.softplus(p.logits)).sum(-1)


def _kl_torch(q: td.Distribution, p: td.Distribution) -> Tensor:
    return td.kl_divergence(q, p).sum(-1)


@register_kl(Poisson, Poisson)
def _kl_poisson(q: ad.Poisson, p: ad.Poisson) -> Tensor:
    return (q.rate * (q.log_rate - p.log_rate) - q.rate + p.rate).sum(-1)


for _family in (Laplace, Beta):
    register_kl(_family, _family)(_kl_torch)
