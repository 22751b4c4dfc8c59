"""Why a latent is dead: the gradient that reaches q's factor, and p's dependence on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.derive.draws import Draw
from aevb.derive.noise_names import offset_name
from aevb.derive.plan import Plan
from aevb.diagnostics.measure import with_values
from aevb.estimate.batch import Batch
from aevb.estimate.estimators import estimate
from aevb.estimate.metric_names import kl_term, latent_of
from aevb.evidence.per_example_q import free_factors, zero_offsets
from aevb.model import Model
from aevb.predictive.replicate import complete, redraw

DRAWS = 8  # draws of a latent from p that replace the one from q


@dataclass(frozen=True)
class Reach:
    """Norm of the gradient that the other terms of the bound send to q's factor of a latent.

    ``trained`` is under the run's plan, ``own`` under the model's default plan.
    """

    trained: float
    own: float

    @property
    def cut(self) -> bool:
        """Whether the training method blocks the gradient, although p would send one."""
        return self.trained == 0 and self.own > 0


def reaching(model: Model, plan: Plan, batch: Batch, seed: int) -> dict[str, float]:
    """Return, per latent, the mean gradient norm per example at q's factor.

    The gradient is that of all terms of the bound except the latent's own KL.
    """
    factors, offsets = free_factors(model, plan), zero_offsets(model, plan, batch)
    for offset in offsets.values():
        offset.requires_grad_()
    found = {}
    with torch.enable_grad():
        bound = estimate(plan, factors, batch, model.draw_noise(plan, batch, seed=seed) | offsets)
        for name, choice in plan.choices.items():
            own = [
                offsets[key]
                for entry in model.graph.q[name].values()
                if (key := offset_name(entry)) in offsets
            ]
            if not own:
                continue
            others = [
                term if latent_of(key) is None else -term
                for key, term in bound.terms.items()
                if key != kl_term(name)
            ]
            # The score-function gradient is in the value only, not in the terms. For other draws
            # the terms give an exact zero if no gradient arrives.
            rest = (
                bound.value + bound.terms[kl_term(name)]
                if choice.draw is Draw.SCORE
                else torch.stack(others).sum(0)
            )
            parts = (
                torch.autograd.grad(rest.sum(), own, retain_graph=True, allow_unused=True)
                if rest.requires_grad
                else ()
            )
            squares = [
                part.square().sum((-1, -3)).flatten(0, -2).sum(0)
                for part in parts
                if part is not None
            ]
            found[name] = float(torch.stack(squares).sum(0).sqrt().mean()) if squares else 0.0
    return found


@dataclass(frozen=True)
class Dependence:
    """How p's other factors ("the rest") depend on a latent v, in nats per example.

    ``offer`` is log E_p[p(rest | v)] − E_p[log p(rest | v)]: what knowing v could add to log p of
    the rest. It is estimated from a few draws of v, so it tends to be too small. ``gain`` is log p
    of the rest at q's draw minus that at p's draws. ``worth`` is the gain minus v's KL: by how much
    the bound exceeds the bound with q(v|·) replaced by p. ``error`` is the standard error of
    ``worth``.
    """

    offer: float
    gain: float
    worth: float
    error: float


def dependence(model: Model, batch: Batch, name: str, kl: Tensor, seed: int) -> Dependence:
    """Measure how p depends on a latent.

    Draws from p replace the latent's draw from q; all other draws are fixed.

    ``kl`` is the KL of the latent, [N].
    """
    with model._evaluating(seed):
        whole = complete(model, batch, method="q")
        inferred = with_values(model, whole, {}, name).double()
        others = torch.stack(
            [
                with_values(model, whole, redraw(model, whole, [name]), name).double()
                for _ in range(DRAWS)
            ]
        )
        gain = inferred - others.mean(0)
        offer = others.logsumexp(0) - math.log(DRAWS) - others.mean(0)
        worth = gain - kl.double()
        error = float(worth.std()) / len(worth) ** 0.5 if len(worth) > 1 else 0.0
        return Dependence(float(offer.mean()), float(gain.mean()), float(worth.mean()), error)
