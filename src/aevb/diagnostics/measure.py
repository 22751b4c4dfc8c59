"""Expectations under q, per entry, for the diagnosis: KLs, distances from the prior, scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributions as td
from torch import Tensor

from aevb.derive.axes import SAMPLES, contract, over_time, size
from aevb.derive.dependence import S
from aevb.derive.draws import Draw, Term
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch
from aevb.estimate.estimators import Estimate
from aevb.estimate.keys import real_steps
from aevb.model import Model
from aevb.runtime.shapes import broadcast_shapes

SAMPLES_DRAWN = 4  # samples per example


class Measured:
    """One batch under q: its bound, and expectations per entry.

    The expectations are of functions of q's and p's distributions.
    """

    def __init__(self, model: Model, plan: Plan, batch: Batch, seed: int) -> None:
        self.model, self.plan, self.batch = model, plan, batch
        self.n, self.steps = model._extent(batch)
        self.working = Estimate(
            plan, model.factors, batch, model.draw_noise(plan, batch, seed=seed)
        )
        self.bound = self.working.bound()

    def steps_of(self, name: str) -> Tensor:
        """Return the number of real steps per example, [N, 1]; 1 for a static variable."""
        real = real_steps(self.batch)
        if not self.model.graph.timed[name]:
            return torch.ones(self.n, 1)
        return (
            real.sum(0).cpu().float()
            if real is not None
            else torch.full((self.n, 1), float(self.steps))
        )

    def expected(self, term: Tensor) -> Tensor:
        """Return the expectation of a term over samples and enumerated latents, [T or 1, N, d]."""
        for name, axis in self.working.sequence():
            if name == S.name:
                term = term.mean(axis, keepdim=True) if size(term, axis) > 1 else term
            else:
                term = contract(term, self.working.weight(name), axis)
        term = term.reshape(term.shape[SAMPLES + 1 :])
        return term.expand(term.shape[0], self.n, term.shape[-1])

    def per_step(self, name: str, term: Tensor, side: str) -> Tensor:
        """Return the expectation of a quantity per step, [T or 1, N, d].

        It is zero at padded steps.

        ``side`` ("p" or "q") names the factor of the variable whose axes the quantity has.
        """
        graph, plan = self.model.graph, self.plan
        slots = [
            slot
            for latent in plan.slots
            if graph.timed[latent]
            for slot in plan.slots[latent]
            if slot
        ]
        if any(size(term, slot) > 1 for slot in slots):
            weights = self.working.chain.weights(plan.direction(side, name))
            if not graph.timed[name]:  # it reads an end of the sequence
                weights = self.working.program.select(weights, plan.ends(graph.rule(side, name))[0])
            weighted = weights * term
            term = weighted.sum([slot for slot in slots if weighted.dim() >= -slot], keepdim=True)
        term = self.expected(over_time(term, self.steps) if graph.timed[name] else term)
        real = real_steps(self.batch, timed=graph.timed[name])
        return term if real is None else torch.where(real, term, torch.zeros_like(term))

    def compare(
        self, name: str, function: Callable[[td.Distribution, td.Distribution], Tensor]
    ) -> Tensor:
        """Return the expectation of a function of q's and p's distributions of a latent.

        The shape is [T or 1, N, d].
        """
        program, side = self.working.program, "q" if self.plan.direction("q", name) else "p"
        either = program.piecewise(
            name,
            "qp",
            lambda region: function(
                program.distribution("q", name, region)[1],
                program.distribution("p", name, region)[1],
            ),
        )
        return self.per_step(name, either, side)

    def of_p(self, name: str, function: Callable[[td.Distribution], Tensor]) -> Tensor:
        """Return the expectation of a function of p's distribution of a variable.

        The shape is [T or 1, N, d].
        """
        program = self.working.program
        return self.per_step(
            name,
            program.piecewise(
                name, "p", lambda region: function(program.distribution("p", name, region)[1])
            ),
            "p",
        )

    def kl(self, name: str) -> Tensor | None:
        """Return E[log q(v|·) − log p(v|·)] per entry, summed over time, [N, d].

        None unless both distributions factorise over the entries.
        """
        program, plan, value = self.working.program, self.plan, self.working.program.values[name]
        specs = [
            entry.spec
            for side in (self.model.graph.q, self.model.graph.p)
            for entry in side[name].values()
        ]
        if (
            any(not spec.has_parameters for spec in specs)
            or plan.choices[name].draw is Draw.STRATIFY
        ):
            return None
        if any(
            program.distribution(side, name, region)[1].event_shape
            for side in "qp"
            for region in program.regions(name, side)
        ):
            return None

        def log_prob(side: str) -> Tensor:
            def at(region: str) -> Tensor:
                dist = program.distribution(side, name, region)[1]
                if side == "q" and plan.choices[name].term is Term.ENTROPY:
                    return -dist.entropy()
                return dist.log_prob(program.select(value, region))

            return self.working.finish(name, program.piecewise(name, side, at), side)

        if plan.choices[name].term is Term.CLOSED:
            return self.compare(name, _kl).sum(0)
        return self.expected(log_prob("q") - log_prob("p"))[0]


def measured(model: Model, plan: Plan, batches: list[Batch], seed: int) -> Iterator[Measured]:
    for i, batch in enumerate(batches):
        yield Measured(model, plan, batch, seed + i)


def _kl(q: td.Distribution, p: td.Distribution) -> Tensor:
    """Return KL(q‖p) per entry. torch's ``kl_divergence`` does not always broadcast."""
    shape = broadcast_shapes(q.batch_shape, p.batch_shape)
    return td.kl_divergence(q.expand(shape), p.expand(shape))


def spread(dist: td.Distribution) -> Tensor:
    """Return the scale of a distribution per entry, in its own units.

    LogNormal's ``scale`` is that of the logarithms.
    """
    found = None if isinstance(dist, td.TransformedDistribution) else getattr(dist, "scale", None)
    return found if isinstance(found, Tensor) and not dist.event_shape else dist.variance.sqrt()


def with_values(
    model: Model, batch: Mapping[str, Tensor], values: Mapping[str, Tensor], but: str
) -> Tensor:
    """Return Σ log p of every variable except ``but``, at these values of the latents, [N]."""
    plan = model.plan(clamped=model.graph.latents)
    terms, _ = Estimate(plan, model.factors, {**batch, **values}, {}).terms()
    n = model._extent(batch)[0]
    return torch.stack(
        [term.reshape(-1).expand(n) for name, term in terms.items() if name != but]
    ).sum(0)
