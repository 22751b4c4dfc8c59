"""Per-example (non-amortised) variational parameters for q.

An offset is added to the outputs of each of q's networks: per example, per step and per value of an
enumerated latent that the factor reads. The dependence on sampled latents is unchanged. Offsets of
zero give the amortised q. Other offsets reach, for each example, any q of the declared
factorisation and family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from aevb.declare.conditionals import Factor
from aevb.declare.graph import Entry
from aevb.derive.dependence import N, S, T
from aevb.derive.noise_names import offset_name
from aevb.derive.plan import Plan
from aevb.estimate.declared_model import DeclaredModel


class Free(Factor):
    """A factor of q with an offset on its network outputs; the offset is the last item of ``keep``.

    Learned vectors, such as a covariance shared by all examples, also get an offset per example.
    """

    def __init__(self, factor: Factor) -> None:
        nn.Module.__init__(self)
        self.spec, self.shape, self.d = factor.spec, factor.shape, factor.d
        self.amortised = factor
        self.sizes = factor.sizes | {
            name: vector.numel() for name, vector in factor.vectors.items()
        }
        self.vectors = nn.ParameterDict()

    def _moved(self, raw: Tensor, offset: Tensor) -> Tensor:
        vectors = [vector.expand(*raw.shape[:-1], -1) for vector in self.amortised.vectors.values()]
        return torch.cat([raw, *vectors], -1) + offset

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        return self.amortised.first(inputs, bias=bias, missing=missing)

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        return self._moved(self.amortised.rest(h, keep[:-1]), keep[-1])

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        keep: Sequence[Tensor] = (),
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        return self._moved(self.amortised(inputs, keep[:-1], missing), keep[-1])


def free_factors(model: DeclaredModel, plan: Plan) -> dict[str, nn.Module]:
    """Return the model's factors, with offsets added to the plan's factors of q."""
    free = {entry.id: Free(factor) for entry, factor in _owned(model, plan)}
    return {name: free.get(name, factor) for name, factor in model.factors.items()}


def zero_offsets(
    model: DeclaredModel, plan: Plan, batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return offsets of zero, to pass as noise of an estimate with :func:`free_factors`.

    With these offsets q is the amortised q.
    """
    like, (n, steps) = model._parameter(), model._extent(batch)
    found = {}
    for entry, factor in _owned(model, plan):
        axes = plan.axes[entry.id] - {S, T} | {N} | ({T} if entry.key.at == "t" else set())
        width = sum(factor.sizes.values()) + sum(
            vector.numel() for vector in factor.vectors.values()
        )
        found[offset_name(entry)] = torch.zeros(
            plan._shape(axes, n, steps, width), dtype=like.dtype, device=like.device
        )
    return found


def _owned(model: DeclaredModel, plan: Plan) -> list[tuple[Entry, Factor]]:
    """Return q's factors with a network; factors given by Bayes' rule have none."""
    pairs = [
        (entry, model.factors[entry.id])
        for name in plan.choices
        for entry in model.graph.q[name].values()
    ]
    return [(entry, factor) for entry, factor in pairs if isinstance(factor, Factor)]
