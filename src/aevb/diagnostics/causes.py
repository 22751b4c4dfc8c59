"""Why a latent may be dead, measured: the gradient that reaches q's factor of it, and what p's other factors make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.derive.draws import Draw
from aevb.derive.plan import Plan
from aevb.diagnostics.measure import with_values
from aevb.estimate.batch import Batch
from aevb.estimate.estimators import estimate
from aevb.evidence.per_example_q import free_factors, zero_offsets
from aevb.model import Model
from aevb.predictive.replicate import complete, redraw

DRAWS = 8  # of a latent from p, in exchange for q's


@dataclass(frozen=True)
class Reach:
    """The gradient that the rest of the bound sends to q's factor of a latent: as the run was trained, and under the model's own plan."""

    trained: float
    own: float

    @property
    def cut(self) -> bool:
        """Whether the way of training keeps the gradient from q, rather than p having none to send."""
        return self.trained == 0 and self.own > 0


def reaching(model: Model, plan: Plan, batch: Batch, seed: int) -> dict[str, float]:
    """The norm of the gradient, an example, that everything in the bound but a latent's own KL sends to q's factor of it."""
    factors, offsets = free_factors(model, plan), zero_offsets(model, plan, batch)
    for offset in offsets.values():
        offset.requires_grad_()
    found = {}
    with torch.enable_grad():
        bound = estimate(plan, factors, batch, model.draw_noise(plan, batch, seed=seed) | offsets)
        for name, choice in plan.choices.items():
            own = [offsets[key] for entry in model.graph.q[name].values() if (key := f"{entry.id} offset") in offsets]
            if not own:
                continue
            others = [-term if key.startswith("kl(") else term for key, term in bound.terms.items() if key != f"kl({name})"]
            # The score function's gradient is part of the value alone; elsewhere the terms give an exact zero where nothing arrives.
            rest = bound.value + bound.terms[f"kl({name})"] if choice.draw is Draw.SCORE else torch.stack(others).sum(0)
            parts = torch.autograd.grad(rest.sum(), own, retain_graph=True, allow_unused=True) if rest.requires_grad else ()
            squares = [part.square().sum((-1, -3)).flatten(0, -2).sum(0) for part in parts if part is not None]
            found[name] = float(torch.stack(squares).sum(0).sqrt().mean()) if squares else 0.0
    return found


@dataclass(frozen=True)
class Dependence:
    """What p's other factors make of a latent v, in nats an example.

    ``offer`` is log E_p[p(rest | v)] − E_p[log p(rest | v)], what knowing v could add to the rest, from a few draws of v (and so rather too small).
    ``gain`` is how much likelier the rest is at q's draw than at p's; ``worth`` the gain less v's KL, by which the bound exceeds
    that of a q that is p there; ``error`` its standard error.
    """

    offer: float
    gain: float
    worth: float
    error: float


def dependence(model: Model, batch: Batch, name: str, kl: Tensor, seed: int) -> Dependence:
    """Measured by exchanging the latent's draw, all others held; ``kl`` is the latent's, [N]."""
    with model._evaluating(seed):
        whole = complete(model, batch, method="q")
        inferred = with_values(model, whole, {}, name).double()
        others = torch.stack([with_values(model, whole, redraw(model, whole, [name]), name).double() for _ in range(DRAWS)])
        gain = inferred - others.mean(0)
        offer = others.logsumexp(0) - math.log(DRAWS) - others.mean(0)
        worth = gain - kl.double()
        error = float(worth.std()) / len(worth) ** 0.5 if len(worth) > 1 else 0.0
        return Dependence(float(offer.mean()), float(gain.mean()), float(worth.mean()), error)
