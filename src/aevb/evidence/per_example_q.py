"""q set free: raw numbers of its own for every example, instead of what one network gives for all of them.

An offset is added to the raw numbers of each of q's factors: for every example, every step and every value of an enumerated latent that the
factor reads. What a factor reads of latents that are drawn stays a function of them, so that offsets of zero are q as it was amortised and
any other q of its factorization's form, one example at a time, is within reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from aevb.declare.conditionals import Factor
from aevb.declare.graph import Entry
from aevb.derive.dependence import N, S, T
from aevb.derive.plan import Plan
from aevb.estimate.declared_model import DeclaredModel


class Free(Factor):
    """A factor of q whose raw numbers an offset moves, the last of ``keep``.

    Learned vectors, such as a covariance that all examples share, count among the raw numbers: each example gets its own.
    """

    def __init__(self, factor: Factor) -> None:
        nn.Module.__init__(self)
        self.spec, self.shape, self.d = factor.spec, factor.shape, factor.d
        self.amortised = factor
        self.sizes = factor.sizes | {name: vector.numel() for name, vector in factor.vectors.items()}
        self.vectors = nn.ParameterDict()

    def _moved(self, raw: Tensor, offset: Tensor) -> Tensor:
        vectors = [vector.expand(*raw.shape[:-1], -1) for vector in self.amortised.vectors.values()]
        return torch.cat([raw, *vectors], -1) + offset

    def first(self, inputs: Mapping[str, Tensor], *, bias: bool = True, missing: Mapping[str, Tensor] | None = None) -> Tensor:
        return self.amortised.first(inputs, bias=bias, missing=missing)

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        return self._moved(self.amortised.rest(h, keep[:-1]), keep[-1])

    def forward(self, inputs: Mapping[str, Tensor], keep: Sequence[Tensor] = (), missing: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._moved(self.amortised(inputs, keep[:-1], missing), keep[-1])


def free_factors(model: DeclaredModel, plan: Plan) -> dict[str, nn.Module]:
    """The model's factors, those of q for the plan's latents set free."""
    free = {entry.id: Free(factor) for entry, factor in _owned(model, plan)}
    return {name: free.get(name, factor) for name, factor in model.factors.items()}


def zero_offsets(model: DeclaredModel, plan: Plan, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Offsets of zero, for the noise of an estimate with :func:`free_factors`; q is then as it was amortised."""
    like, (n, steps) = model._parameter(), model._extent(batch)
    found = {}
    for entry, factor in _owned(model, plan):
        axes = plan.axes[entry.id] - {S, T} | {N} | ({T} if entry.key.at == "t" else set())
        width = sum(factor.sizes.values()) + sum(vector.numel() for vector in factor.vectors.values())
        found[f"{entry.id} offset"] = torch.zeros(plan._shape(axes, n, steps, width), dtype=like.dtype, device=like.device)
    return found


def _owned(model: DeclaredModel, plan: Plan) -> list[tuple[Entry, Factor]]:
    """q's factors that have raw numbers: all but those that are p's own by Bayes' rule."""
    pairs = [(entry, model.factors[entry.id]) for name in plan.choices for entry in model.graph.q[name].values()]
    return [(entry, factor) for entry, factor in pairs if isinstance(factor, Factor)]
