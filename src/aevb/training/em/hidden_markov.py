"""Baum-Welch algorithm: EM for finite latents in time.

The E-step computes expected counts of states and of pairs of states; the M-step is maximum
likelihood. The posterior of a factor's states is the derivative of log p(data) by the log-factor,
so the forward-backward algorithm gives all counts.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.declare.graph import Entry
from aevb.declare.networks import MLP
from aevb.derive.axes import TIME, expand_axis
from aevb.estimate.batch import Batch, split_latents
from aevb.evidence.exact import discrete_terms, log_sum
from aevb.evidence.finite import Tables
from aevb.evidence.structure import Structure
from aevb.model import Model
from aevb.training.em.emissions import Sums
from aevb.training.em.responsibilities import Responsibilities


def why_not_hidden_markov(model: Model) -> str | None:
    """Return why EM in time has no closed form; None if it has one."""
    graph = model.graph
    for name in graph.latents:
        if not all(entry.spec.finite for entry in graph.p[name].values()):
            return f"{name} has no finite list of values"
    for entry in graph.entries():
        if entry.side == "p" and (reason := why_not_closed(model, entry)):
            return reason
    return None


def why_not_closed(model: Model, entry: Entry) -> str | None:
    """Return why a factor has no closed-form M-step; None if it has one.

    A factor needs a free distribution per value of its only parent, a class, or no parent at all.
    """
    factor, parents, graph = model.factors[entry.id], entry.key.parents, model.graph
    if not isinstance(factor, Factor) or not entry.spec.has_most_likely:
        return f"{entry.id} has no maximum-likelihood fit in closed form"
    if entry.spec.needs_occurrences and len(graph.p[entry.key.name]) > 1:
        return (
            f"{entry.id} has no maximum-likelihood fit in closed form, because {entry.key.name} "
            f"has another factor at other steps"
        )
    if not parents:
        return None
    parent = parents[0]
    if (
        len(parents) > 1
        or parent.name not in graph.latents
        or not graph.rule("p", parent.name).spec.categorical
    ):
        return f"{entry.id} reads more than one class"
    if not isinstance(factor.net, MLP) or factor.net.spec.hidden:
        return f"{entry.id} is not linear"
    end = {-1: "first", 1: "last"}.get(parent.lag)
    if end is not None and end not in graph.p[entry.key.name]:
        declared = f"{entry.key.name}[{'0' if end == 'first' else 'T'}]"
        return (
            f"{entry.id} also decides the {end} step, where {parent} is zeros (declare a factor "
            f"of {declared})"
        )
    return None


class HiddenMarkov(Responsibilities):
    """Finite latents in time whose factors read at most one class each."""

    def _has_closed_form(self, entry: Entry) -> bool:
        return why_not_closed(self.model, entry) is None

    @cached_property
    def _structure(self) -> Structure:
        return Structure(self.model)

    def statistics(self, batch: Batch) -> tuple[Tensor, dict[str, Sums]]:
        clamped, _ = split_latents(self.graph, batch)
        if clamped:
            raise ValueError(
                f"em(): {min(clamped)} is known at every step of every row, so that no state is "
                f"hidden. Use mle()."
            )
        tables = Tables(self.model, self._structure, batch)
        terms = [
            term._replace(value=term.value.detach().requires_grad_())
            for term in discrete_terms(tables)
        ]
        n, _ = self.model._extent(batch)
        with torch.enable_grad():
            evidence = log_sum(tables, terms).reshape(-1).expand(n).sum()
            weights = torch.autograd.grad(evidence, [term.value for term in terms])
        by_name = {term.name: weight for term, weight in zip(terms, weights, strict=True)}
        return evidence.detach(), {
            entry.id: self._counted(entry, by_name[entry.key.name], tables, batch)
            for entry in self.entries
        }

    def _counted(self, entry: Entry, weight: Tensor, tables: Tables, batch: Batch) -> Sums:
        """Return expected counts, sums and second moments of a variable per value of its parent.

        Only the steps count to which the entry applies.
        """
        name, graph = entry.key.name, self.graph
        if graph.timed[name] and (region := self._region(entry, tables)) is not None:
            weight = weight * region
        slots = []
        for ref in entry.key.parents:
            present, neighbour = tables.slots[ref.name]
            slots.append(neighbour if ref.lag else present)
        hidden = name in tables.structure.discrete
        slots += [tables.slots[name][0]] if hidden else []
        depth = max([weight.dim(), *(-slot for slot in slots if slot is not None)])
        weight = weight.reshape(*[1] * (depth - weight.dim()), *weight.shape)
        for ref, slot in zip(entry.key.parents, slots):
            # rows of one step have no neighbour, and so no axis for it
            weight = weight if slot is None else expand_axis(weight, slot, tables.sizes[ref.name])
        kept = [slot for slot in slots if slot is not None] + ([] if hidden else [TIME, -2])
        weight = weight.sum([axis for axis in range(-depth, 0) if axis not in kept], keepdim=True)
        weight = weight.permute(*(axis for axis in range(-depth, 0) if axis not in kept), *kept)
        weight = weight.reshape(weight.shape[-len(kept) :])
        # [values of the parent, values, or steps and rows]
        weight = weight if entry.key.parents else weight.unsqueeze(0)
        if hidden:
            return self._sums_of(entry, weight)
        for axis in (-2, -1):
            weight = expand_axis(weight, axis, batch[name].shape[axis - 1])
        return self._sums(entry, weight.flatten(1), batch)

    def _region(self, entry: Entry, tables: Tables) -> Tensor | None:
        """Return the mask, [T, N or 1, 1], of steps to which the entry applies; None for all."""
        others = self.graph.p[entry.key.name]
        if len(others) == 1:
            return None
        last = tables.program.is_last()
        first = torch.arange(tables.steps, device=last.device).reshape(-1, 1, 1) == 0
        if entry.key.at == "last":
            return last.double()
        here = (
            first
            if entry.key.at == "first"
            else ~first
            if "first" in others
            else torch.ones_like(first)
        )
        return (here & ~last if "last" in others else here).double()
