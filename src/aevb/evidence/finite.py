"""Finite latents: tables of log p at every joint value."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributions as td
from torch import Tensor

from aevb.declare.evaluation_order import schedule
from aevb.derive.axes import FIRST_SLOT, expand_axis, on_axis, over_time
from aevb.derive.completion import incomplete
from aevb.derive.draws import Draw, Term
from aevb.derive.plan import LIMIT, Choice, Plan
from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import Estimate
from aevb.estimate.keys import mask_of
from aevb.evidence.structure import Structure


def why_not_finite(model: DeclaredModel) -> str | None:
    """Return why p's latents cannot be enumerated in one table; None if they can."""
    graph, count = model.graph, 1
    for name in graph.latents:
        spec = graph.rule("p", name).spec
        if not spec.finite:
            return f"{name} has no finite list of values"
        if graph.timed[name]:
            return f"{name} has a time axis"
        count *= spec.count(graph.size(name)) or 1
    return f"the latents have {count} joint values, more than {LIMIT}" if count > LIMIT else None


class Tables:
    """log p of every factor that reads no Gaussian unknown, at every value of its discrete latents.

    Each latent has an axis (:mod:`aevb.derive.axes`). A latent in time has two: one for the current
    step and one for its neighbour. q is not used.
    """

    def __init__(
        self, model: DeclaredModel, structure: Structure, batch: Mapping[str, Tensor]
    ) -> None:
        self.structure, self.graph, self.batch = structure, model.graph, batch
        self.working = Estimate(_summing_plan(structure, batch), model.factors, batch, {})
        self.program, self.slots, self.steps = (
            self.working.program,
            self.working.plan.slots,
            self.working.steps,
        )
        self.sizes = {
            name: self.graph.rule("p", name).spec.count(self.graph.size(name)) or 1
            for name in structure.discrete
        }

    def log_p(self, name: str) -> Tensor:
        """Return log p(v | ·), [axes of the latents, 1, T or 1, N or 1, 1]."""
        if name not in self.structure.discrete:
            return self.working.log_p(name)
        slot = self.slots[name][0]

        def at(region: str) -> Tensor:
            spec, dist = self.program.distribution("p", name, region)
            # The logits are the table, so no product with one-hot values is needed.
            if isinstance(dist, td.OneHotCategorical):
                return on_axis(dist.logits, slot)
            return spec.log_prob(dist, self.program.values[name]).unsqueeze(-1)

        return self.program.piecewise(name, "p", at)

    def known(self, name: str) -> Tensor | None:
        """Return 0 at the values that a discrete unknown may have in each row, −∞ elsewhere.

        Return None if no row knows anything about it.
        """
        seen = self.batch.get(mask_of(name))
        if seen is None:
            return None
        if self.graph.rule("p", name).spec.categorical:
            seen = seen.all(-1, keepdim=True)
        # Entries of an observed variable may be missing one by one.
        here = ((self.program.values[name] == self.batch[name]) | ~seen).all(-1, keepdim=True)
        possible = torch.zeros(here.shape, dtype=self.batch[name].dtype, device=here.device)
        return possible.masked_fill(~here, -math.inf)

    def over_steps(self, term: Tensor) -> Tensor:
        """Sum a term with one number per step over the real steps."""
        return self.working.over_steps(over_time(term, self.steps))


def _summing_plan(structure: Structure, batch: Mapping[str, Tensor]) -> Plan:
    """Return a plan, made from p alone, that enumerates every discrete latent and draws nothing."""
    graph = structure.graph
    slots: dict[str, tuple[int, int | None]] = {}
    position = FIRST_SLOT
    for name in structure.discrete:
        slots[name] = (position - 1, position) if graph.timed[name] else (position, None)
        position -= 2 if graph.timed[name] else 1
    functions = {
        name: graph.reads("p", name)
        for name in graph.p
        if graph.is_deterministic(name) and name not in structure.gaussian
    }
    clamped, partial = split_latents(graph, batch)
    return Plan(
        graph=graph,
        choices={
            name: Choice(
                name, Draw.SUM, Term.SUMMED, "a finite latent", "summed over all values, exactly"
            )
            for name in structure.discrete
        },
        bound="iwae",
        samples=1,
        gradient="plain",
        clamped=clamped,
        partial=partial,
        stages=schedule(functions, "p"),
        slots=slots,
        axes={},
        values={},
        noise_keys={},
        # Only the filter reads Gaussian unknowns.
        completed=frozenset(name for name in graph.observed if name in structure.gaussian),
    )


def log_joint(model: DeclaredModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Return log p(observed, latents | given) for every joint value of the latents.

    There is one axis per latent, in the graph's order; the examples are the last axis. A latent
    that is known in all rows has an axis of size 1. If it is known in some rows, its other values
    have −∞ there. Missing entries that p reads are refused.
    """
    graph = model.graph
    clamped, partial = split_latents(graph, batch)
    if gaps := incomplete(graph, partial):
        raise ValueError(
            f"{min(gaps)} has missing entries that p reads, so its joint density with the latents "
            f"has no table. Use joint() or mle() to train, or fill the entries."
        )
    tables = Tables(model, Structure(model, clamped), batch)
    table = torch.zeros((), dtype=model._parameter().dtype, device=model._parameter().device)
    for name in graph.stochastic:
        term = tables.log_p(name)
        table = table + (tables.over_steps(term) if graph.timed[name] else term)
    for name in tables.slots:
        known = tables.known(name)
        table = table if known is None else table + known
    for name, (slot, _) in tables.slots.items():
        table = expand_axis(table, slot, tables.sizes[name])
    n = next(iter(batch.values())).shape[-2]
    table = table.squeeze(-1).expand(*table.shape[:-2], n)
    unknown = [name for name in graph.latents if name not in clamped]
    axes = {name: tables.slots[name][0] + 1 for name in unknown}
    table = table.permute(*(axes[name] for name in unknown), *range(-3, 0)) if unknown else table
    return table.reshape(
        [1 if name in clamped else tables.sizes[name] for name in graph.latents] + [n]
    )
