"""EM for mixture models with one class and conditionally independent variables.

The E-step and the M-step are matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aevb.declare.conditionals import Conditional
from aevb.declare.graph import Entry
from aevb.estimate.batch import Batch
from aevb.estimate.keys import mask_of
from aevb.model import Model
from aevb.training.em.columns import known
from aevb.training.em.emissions import ColumnsEmission, FullEmission, IncompleteFullEmission, Sums
from aevb.training.em.factors import Rows
from aevb.training.em.responsibilities import Responsibilities

# rows prepared for each variable's emission; "known": 0 or −∞ per cluster
Part = dict[str, tuple[Tensor, ...]]
Emissions = dict[str, ColumnsEmission | FullEmission]


def is_mixture(model: Model) -> bool:
    """Return whether the only latent is one class, and observed variables read it or nothing."""
    graph = model.graph
    if len(graph.latents) != 1 or any(graph.timed[name] for name in graph.stochastic):
        return False
    (latent,) = graph.latents
    rule = graph.rule("p", latent)
    if not rule.spec.categorical or rule.key.parents:
        return False
    rules = [graph.rule("p", name) for name in graph.observed]
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

    def open(self, rows: Rows) -> None:
        (self.latent,) = self.graph.latents
        self.rules = {name: self.graph.rule("p", name) for name in self.graph.observed}
        self.holed = {name for name in self.graph.observed if mask_of(name) in rows.first()}
        super().open(rows)
        self.constant = self.constant + self._of_data_alone()

    def _prepared(self, batch: Batch) -> Part:
        part: Part = {}
        for name, entry in self.rules.items():
            value = (batch[name][0] - self.centre[name]) / self.unit[name]
            part[name] = self._kind(entry).prepare(
                value, batch[mask_of(name)][0] if name in self.holed else None
            )
        if self.latent in batch:
            here = known(batch, self.latent)[:, :1]
            part["known"] = (
                torch.where((here > 0) & (batch[self.latent][0] == 0), -torch.inf, 0.0),
            )
        return part

    def _kind(self, entry: Entry) -> type[ColumnsEmission] | type[FullEmission]:
        if not _has_covariance(entry.spec):
            return ColumnsEmission
        return IncompleteFullEmission if entry.key.name in self.holed else FullEmission

    def _of_data_alone(self) -> Tensor:
        """Return the parameter-free terms of the evidence, such as log x! of counts."""
        total = torch.zeros((), dtype=torch.float64, device=self.rows.source.like.device)
        for batch in self.rows.parts():
            for name, entry in self.rules.items():
                if not entry.spec.gaussian:
                    factor: Any = self.model.factors[entry.id]
                    value, keep = (
                        batch[name][0],
                        batch[mask_of(name)][0] if name in self.holed else None,
                    )
                    heads = {head: value.new_zeros(1, size) for head, size in factor.sizes.items()}
                    rows = ColumnsEmission.prepare(value, keep)
                    bare = ColumnsEmission(entry.spec, heads).log_likelihood(*rows)[:, 0]
                    total += (
                        entry.spec.log_prob(entry.spec.distribution(**heads), value, keep) - bare
                    ).sum()
        self.rows.world.sum([total])
        return total

    # An iteration ---------------------------------------------------------------------------------

    def _emissions(self, heads: dict[str, dict[str, Tensor]]) -> Emissions:
        found: Emissions = {}
        for name, entry in self.rules.items():
            factor: Any = self.model.factors[entry.id]
            own = dict(heads.get(entry.id, {}))
            # a distribution without parents and without learned parameters
            if "loc" not in own and not any(head in own for head in factor.sizes):
                raw = factor.root.detach().double().unsqueeze(0)
                own = (
                    dict(zip(factor.sizes, raw.split(list(factor.sizes.values()), -1), strict=True))
                    | own
                )
            kind = self._kind(entry)
            found[name] = (
                ColumnsEmission(entry.spec, own) if kind is ColumnsEmission else kind(**own)  # type: ignore[arg-type]
            )
        return found

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._heads(vector)
        logits = heads.get(self.graph.rule("p", self.latent).id, {}).get("logits")
        prior = vector.new_zeros(1, self.graph.size(self.latent)) if logits is None else logits
        prior = prior.log_softmax(-1)
        emissions = self._emissions(heads)

        def posterior(part: Part) -> tuple[Tensor, Tensor]:
            table = prior
            for name, emission in emissions.items():
                table = table + emission.log_likelihood(*part[name])
            if "known" in part:
                table = table + part["known"][0]
            highest = table.amax(1, keepdim=True)
            weights = (table - highest).exp_()
            total = weights.sum(1, keepdim=True)
            return weights.div_(total), highest.sum() + total.log().sum()

        evidence, found = self._total(
            self._of_part(*posterior(part), part, emissions) for part in self._parts()
        )
        return (evidence + self.constant) / len(self.rows), self.maximise(found, heads)

    def _of_part(
        self, weights: Tensor, evidence: Tensor, part: Part, emissions: Emissions
    ) -> tuple[Tensor, dict[str, Sums]]:
        """Return the sums of every factor for these responsibilities ([rows, clusters])."""
        counts = weights.sum(0, keepdim=True)
        found = {
            self.graph.rule("p", self.latent).id: Sums(
                counts.sum(1, keepdim=True).expand_as(counts), counts, counts
            )
        }
        for name, emission in emissions.items():
            mine = weights if self.rules[name].key.parents else torch.ones_like(weights[:, :1])
            found[self.rules[name].id] = emission.sums(mine, *part[name])
        return evidence, found

    def _assigned(self, batch: Batch, centres: dict[str, Tensor]) -> tuple[Tensor, dict[str, Sums]]:
        members = self._members(batch, self.latent, centres[self.latent])
        return self._of_part(
            members,
            members.new_zeros(()),
            self._prepared(batch),
            self._emissions(self._heads(self.read())),
        )
