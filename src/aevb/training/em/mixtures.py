"""EM for mixture models with one class and conditionally independent variables.

The E-step and the M-step are matrix products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from aevb.declare.conditionals import Conditional
from aevb.declare.graph import Entry
from aevb.estimate.batch import Batch
from aevb.estimate.keys import mask_of
from aevb.model import Model
from aevb.training.em.columns import flat, known
from aevb.training.em.emissions import ColumnsEmission, FullEmission, IncompleteFullEmission, Sums
from aevb.training.em.factors import Rows
from aevb.training.em.responsibilities import Responsibilities

# The rows prepared for each variable's emission. "known" has 0 or −∞ per cluster.
Part = dict[str, tuple[Tensor, ...]]
Emissions = dict[str, ColumnsEmission | FullEmission]


def is_mixture(model: Model) -> bool:
    """Return whether the only latent is one class, and observed variables read it or nothing."""
    graph = model.graph
    if len(graph.latents) != 1 or any(graph.timed[name] for name in graph.stochastic):
        return False
    (latent,) = graph.latents
    rule = graph.rule("p", latent)
    return rule.spec.categorical and not rule.key.parents and reads_one_class(model, latent)


def reads_one_class(model: Model, latent: str) -> bool:
    """Return whether observed variables read the class or nothing, and have an emission."""
    rules = [entry for name in model.graph.observed for entry in model.graph.p[name].values()]
    plain = all([ref.name for ref in entry.key.parents] in ([], [latent]) for entry in rules)
    return plain and all(
        _has_covariance(entry.spec) or type(entry.spec).polynomial is not Conditional.polynomial
        for entry in rules
    )


def _has_covariance(spec: Conditional) -> bool:
    return spec.gaussian and spec.full_moments


class Mixtures(Responsibilities):
    """Mixtures of independent columns, or of Gaussians with a full covariance.

    Real-valued columns are standardised to mean 0 and standard deviation 1.
    """

    fills_by_own = False  # whether the model's own covariances fill missing entries at the start

    def open(self, rows: Rows) -> None:
        (self.latent,) = self.graph.latents
        self.rules = {name: self.graph.rule("p", name) for name in self.graph.observed}
        self.holed = {name for name in self.graph.observed if mask_of(name) in rows.first()}
        super().open(rows)
        self.constant = self.constant + self._of_data_alone()

    def _prepared(self, batch: Batch) -> Part:
        part: Part = {}
        for name, entry in self.rules.items():
            value = (flat(batch, name) - self.centre[name]) / self.unit[name]
            part[name] = self._kind(entry).prepare(value, self._keep(batch, name))
        if self.latent in batch:
            here = known(batch, self.latent)[:, :1]
            part["known"] = (
                torch.where((here > 0) & (flat(batch, self.latent) == 0), -torch.inf, 0.0),
            )
        return part

    def _keep(self, batch: Batch, name: str) -> Tensor | None:
        return batch[mask_of(name)].flatten(0, 1) if name in self.holed else None

    def _kind(self, entry: Entry) -> type[ColumnsEmission] | type[FullEmission]:
        if not _has_covariance(entry.spec):
            return ColumnsEmission
        return IncompleteFullEmission if entry.key.name in self.holed else FullEmission

    def _of_data_alone(self) -> Tensor:
        """Return the parameter-free terms of the evidence, such as log x! of counts."""
        total = torch.zeros((), dtype=torch.float64, device=self.rows.source.like.device)
        for batch in self.rows.parts():
            for name, entry in self.rules.items():
                if not entry.spec.gaussian and not entry.spec.needs_occurrences:
                    factor: Any = self.model.factors[entry.id]
                    value, keep = flat(batch, name), self._keep(batch, name)
                    heads = {head: value.new_zeros(1, size) for head, size in factor.sizes.items()}
                    rows = ColumnsEmission.prepare(value, keep)
                    bare = ColumnsEmission(entry.spec, heads).log_likelihood(*rows)[:, 0]
                    total += (
                        entry.spec.log_prob(entry.spec.distribution(**heads), value, keep) - bare
                    ).sum()
        self.rows.world.sum([total])
        return total

    def _of_values(self, heads: dict[str, dict[str, Tensor]]) -> Tensor:
        """Return the terms of the evidence that depend on values and learned vectors only.

        Such as log Γ(v + r) of over-dispersed counts, which is the same in every cluster.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.rows.source.like.device)
        for entry in self.entries:
            if entry.id in self.occurrences:
                factor: Any = self.model.factors[entry.id]
                column, value, times = self.occurrences[entry.id]
                own = {head: torch.zeros_like(value) for head in factor.sizes}
                own |= {name: heads[entry.id][name][column] for name in factor.vectors}
                found = entry.spec.polynomial(**own)
                assert found is not None
                bare = found[0] + found[1] * value + found[2] * value.square()
                every = entry.spec.distribution(**own).log_prob(value)
                total = total + (times * (every - bare)).sum()
        return total

    # An iteration ---------------------------------------------------------------------------------

    def _emissions(self, heads: dict[str, dict[str, Tensor]]) -> Emissions:
        found: Emissions = {}
        for name, entry in self.rules.items():
            factor: Any = self.model.factors[entry.id]
            own = dict(heads.get(entry.id, {}))
            # This distribution has neither parents nor learned parameters.
            if "loc" not in own and not any(head in own for head in factor.sizes):
                own = self._root(entry) | own
            kind = self._kind(entry)
            found[name] = (
                ColumnsEmission(entry.spec, own) if kind is ColumnsEmission else kind(**own)  # type: ignore[arg-type]
            )
        return found

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._heads(vector)
        emissions = self._emissions(heads)
        evidence, found = self._total(
            self._of_part(part, heads, emissions) for part in self._parts()
        )
        evidence = evidence + self.constant + self._of_values(heads)
        return evidence / len(self.rows), self.maximise(found, heads)

    def _of_part(
        self, part: Part, heads: dict[str, dict[str, Tensor]], emissions: Emissions
    ) -> tuple[Tensor, dict[str, Sums]]:
        """Return the evidence of some rows, and the sums of every factor."""
        tables = [emission.log_likelihood(*part[name]) for name, emission in emissions.items()]
        table = sum(tables[1:], tables[0])
        table = table + part["known"][0] if "known" in part else table
        weights, evidence, found = self._posterior(table, part, heads)
        return evidence, found | self._emitted(weights, part, emissions)

    def _posterior(
        self, table: Tensor, part: Part, heads: dict[str, dict[str, Tensor]]
    ) -> tuple[Tensor, Tensor, dict[str, Sums]]:
        """Return responsibilities, the evidence and the class's sums; ``table`` is log p(x | y)."""
        logits = heads.get(self.graph.rule("p", self.latent).id, {}).get("logits")
        table = table if logits is None else table + logits.log_softmax(-1)
        highest = table.amax(1, keepdim=True)
        weights = (table - highest).exp_()
        total = weights.sum(1, keepdim=True)
        evidence = highest.sum() + total.log().sum()
        if logits is None:
            evidence = evidence - len(table) * math.log(self.graph.size(self.latent))
        weights = weights.div_(total)
        return weights, evidence, self._counted(weights)

    def _counted(self, weights: Tensor) -> dict[str, Sums]:
        """Return the sums of the class's own factors for these responsibilities."""
        return {self.graph.rule("p", self.latent).id: counts(weights.sum(0, keepdim=True))}

    def _emitted(self, weights: Tensor, part: Part, emissions: Emissions) -> dict[str, Sums]:
        """Return the sums of the observed variables; ``weights`` is [rows, clusters]."""
        every = weights.sum(1, keepdim=True)
        return {
            self.rules[name].id: emission.sums(
                weights if self.rules[name].key.parents else every, *part[name]
            )
            for name, emission in emissions.items()
        }

    def _assigned(self, batch: Batch, centres: dict[str, Tensor]) -> tuple[Tensor, dict[str, Sums]]:
        members = self._members(batch, self.latent, centres[self.latent])
        emissions = self._emissions(self._filling())
        found = self._counted(members) | self._emitted(members, self._prepared(batch), emissions)
        return members.new_zeros(()), found

    def _filling(self) -> dict[str, dict[str, Tensor]]:
        """Return the parameters that fill missing entries before the first M-step.

        Random initial covariances of many columns are nearly singular: without ``fills_by_own``,
        entries are independent with mean 0 and variance 1, in standardised units.
        """
        heads = self._heads(self.read())
        for entry in self.rules.values() if not self.fills_by_own else ():
            own = heads.get(entry.id, {})
            if "tril" in own:
                standard: Any = entry.spec.standard(self.graph.size(entry.key.name))["tril"]
                own["tril"] = standard.to(own["tril"]).expand_as(own["tril"])
                if "loc" in own:
                    own["loc"] = torch.zeros_like(own["loc"])
        return heads


def counts(weights: Tensor) -> Sums:
    """Return a class's sums for these expected counts, [values of the parent, values]."""
    return Sums(weights.sum(1, keepdim=True).expand_as(weights), weights, weights)
