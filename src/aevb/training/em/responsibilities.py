"""EM for finite latents: a table of responsibilities, then weighted maximum likelihood."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.declare.families import Exact
from aevb.declare.graph import Entry
from aevb.declare.networks import MLP
from aevb.estimate.batch import Batch
from aevb.estimate.keys import mask_of
from aevb.evidence.finite import log_joint
from aevb.model import Model
from aevb.training.em.columns import flat, known
from aevb.training.em.emissions import Sums, sums
from aevb.training.em.factors import KEPT, Rows
from aevb.training.em.finite_parameters import Heads
from aevb.training.em.occurrences import occurrences
from aevb.training.em.starts import SAMPLE, cluster_centres
from aevb.training.row_order import seed_of

SURE = 0.95  # initial responsibility of the nearest centre


class Responsibilities(Heads):
    """Finite latents: posterior of every joint value, then weighted maximum likelihood."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.closed = all(self._has_closed_form(entry) for entry in self.entries)

    def _has_closed_form(self, entry: Entry) -> bool:
        """Return whether a factor has a closed-form M-step.

        It needs a free distribution per value of its only parent, a class, or no parent at all.
        """
        factor, parents = self.model.factors[entry.id], entry.key.parents
        if not isinstance(factor, Factor) or entry.key.target.timed or len(parents) > 1:
            return False
        if not entry.spec.has_most_likely:
            return False
        if not parents:
            return True
        parent = parents[0].name
        one_hot = parent in self.graph.stochastic and self.graph.rule("p", parent).spec.categorical
        return one_hot and isinstance(factor.net, MLP) and not factor.net.spec.hidden

    def posterior(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return p(latents | data) as a table, and log p(data).

        The table has one axis per latent; the examples are the last axis.
        """
        table = log_joint(self.model, batch)
        evidence = table.flatten(0, -2).logsumexp(0)
        return (table - evidence).exp(), evidence

    def statistics(self, batch: Batch) -> tuple[Tensor, dict[str, Sums]]:
        """Return the evidence of these rows, and the weighted sums of every factor."""
        table, evidence = self.posterior(batch)
        table = table.double()
        n = table.shape[-1]
        found: dict[str, Sums] = {}
        for entry in self.entries:
            name = entry.key.name
            parent = entry.key.parents[0].name if entry.key.parents else None
            unknown = [
                other
                for other in self.graph.latents
                if other in (name, parent) and other not in self._known(batch)
            ]
            # [values of the parent and of the variable, where unknown, in the graph's order …, N]
            weight = self._marginal(table, unknown)
            if name in unknown and parent in unknown and unknown.index(name) == 0:
                weight = weight.transpose(0, 1)
            if parent is None:
                weight = weight.unsqueeze(0)
            elif parent not in unknown:
                weight = weight.unsqueeze(0) * batch[parent][0].double().T.reshape(
                    -1, *[1] * (weight.dim() - 1), n
                )
            found[entry.id] = (
                self._sums_of(entry, weight.sum(-1))
                if name in unknown
                else self._sums(entry, weight, batch)
            )
        return evidence.double().sum(), found

    def _sums_of(self, entry: Entry, weight: Tensor) -> Sums:
        """Return the sums of a latent; ``weight`` ([cells, values]) holds its expected counts."""
        factor = self.model.factors[entry.id]
        assert isinstance(factor, Factor)
        return sums(weight, factor.table().double(), None, full=entry.spec.full_moments)

    def _sums(self, entry: Entry, weight: Tensor, batch: Batch) -> Sums:
        """Return the weighted sums of an observed variable.

        ``weight`` ([cells, rows of all steps]) is the responsibility of each cell for each row.
        """
        name = entry.key.name
        keep = known(batch, name) if mask_of(name) in batch else None
        if entry.spec.full_moments and keep is not None:
            raise ValueError(
                f"em(): {name} has missing entries and a full covariance, for which em() has no "
                f"closed form. Use mle() or joint()."
            )
        return sums(weight, flat(batch, name), keep, full=entry.spec.full_moments)

    def _known(self, batch: Batch) -> list[str]:
        return [name for name in self.graph.latents if name in batch and mask_of(name) not in batch]

    def _marginal(self, table: Tensor, names: list[str]) -> Tensor:
        """Return the marginal posterior of some latents.

        There is one axis per latent, in the graph's order; the examples are the last axis.
        """
        others = [axis for axis, name in enumerate(self.graph.latents) if name not in names]
        return table.sum(others) if others else table

    # Iterations -----------------------------------------------------------------------------------

    def open(self, rows: Rows) -> None:
        self.rows, self.working = rows, type(self)(copy.deepcopy(self.model).double())
        self._measure(rows)
        self.constant = self._log_units()
        self.occurrences = {
            entry.id: occurrences(rows, entry.key.name)
            for entry in self.entries
            if entry.spec.needs_occurrences
        }
        numbers = sum(value.numel() for value in rows.first().values())
        self.kept = None
        self.kept = list(self._parts()) if len(rows) * numbers <= KEPT else None

    def _parts(self) -> Iterable[Any]:
        """Iterate over this process's rows in standardised units, in chunks."""
        return map(self._prepared, self.rows.parts()) if self.kept is None else self.kept

    def _prepared(self, batch: Batch) -> Any:
        return batch | {
            name: (batch[name] - self.centre[name]) / self.unit[name]
            for name in self.graph.observed
        }

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean evidence at these parameters, and the next parameters."""
        heads = self._heads(vector)
        self.working.put(heads)
        evidence, found = self._total(self.working.statistics(batch) for batch in self._parts())
        return (evidence + self.constant) / len(self.rows), self.maximise(found, heads)

    def _total(
        self, parts: Iterable[tuple[Tensor, dict[str, Sums]]]
    ) -> tuple[Tensor, dict[str, Sums]]:
        """Sum the evidence and every factor's sums over all rows of all processes."""
        evidence, total = (
            torch.zeros((), dtype=torch.float64, device=self.rows.source.like.device),
            dict[str, Sums](),
        )
        for found, mine in parts:
            evidence = evidence + found
            total = {name: one.plus(total.get(name)) for name, one in mine.items()}
        if self.rows.world.size > 1:
            # Some tensors are views, which must not be summed in place.
            total = {
                name: Sums(*(value.clone() for value in found)) for name, found in total.items()
            }
            self.rows.world.sum([evidence, *(value for found in total.values() for value in found)])
        return evidence, total

    # Initial parameters ---------------------------------------------------------------------------

    @cached_property
    def clustered(self) -> dict[str, list[str]]:
        """Observed variables by which k-means first separates the values of each class.

        These are the variables that read the class. If there are none, they are those of the
        classes that read it.
        """
        pairs = [
            (ref.name, entry.key.name)
            for entry in self.entries
            for ref in entry.key.parents
            if ref.name in self.graph.latents
        ]
        found: dict[str, list[str]] = {}
        for latent in (latent for latent, name in pairs if name in self.graph.observed):
            found[latent] = sorted(
                {name for parent, name in pairs if parent == latent and name in self.graph.observed}
            )
        for _ in self.graph.latents:
            for latent, name in pairs:
                if latent not in found and name in found:
                    found[latent] = sorted(
                        {
                            column
                            for parent, other in pairs
                            if parent == latent
                            for column in found.get(other, ())
                        }
                    )
        return found

    def from_data(self, own: Tensor, seed: int) -> Tensor:
        """Run an M-step after a soft assignment of rows to k-means centres, class by class.

        A class that reads its neighbour in time gets the same probabilities for each value of the
        neighbour.
        """
        if not self.clustered:
            return own
        centres = self._centres(seed)
        return self.maximise(
            self._total(self._assigned(batch, centres) for batch in self.rows.parts())[1],
            self._heads(own),
        )

    def _assigned(self, batch: Batch, centres: dict[str, Tensor]) -> tuple[Tensor, dict[str, Sums]]:
        prepared, found, n = self._prepared(batch), dict[str, Sums](), self.model._extent(batch)[0]
        members = {latent: self._members(batch, latent, centres[latent]) for latent in centres}
        for entry in self.entries:
            name, parent = entry.key.name, entry.key.parents[0].name if entry.key.parents else None
            if name in members and name not in self._known(batch):
                together = (
                    parent in members
                    and not entry.key.parents[0].lag
                    and len(members[parent]) == len(members[name])
                )
                first = members[parent] if together else torch.ones_like(members[name][:, :1])  # type: ignore[index]
                found[entry.id] = self._sums_of(
                    entry, (first.mT @ members[name]).expand(self._shapes(entry)["logits"][0], -1)
                )
            elif name in batch and (parent is None or parent in members):
                steps = len(batch[name])
                member = (
                    known(batch, name).amax(1, keepdim=True) if parent is None else members[parent]
                )
                member = (
                    member if len(member) == steps * n else member.unflatten(0, (-1, n)).mean(0)
                )
                found[entry.id] = self._sums(entry, member.mT, prepared)
        return prepared[self.graph.observed[0]].new_zeros(()), found

    def _centres(self, seed: int) -> dict[str, Tensor]:
        """Return the k-means centres of the classes that observed variables read."""
        n, seed = len(self.rows), seed_of(seed, "clusters")
        generator = torch.Generator().manual_seed(seed)
        steps = max(len(value) for value in self.rows.first().values())
        size = max(1, SAMPLE // steps)
        rows = (
            torch.arange(n)
            if n <= size
            else torch.randperm(n, generator=generator)[:size].sort().values
        )
        batch = {
            name: value if value.dtype == torch.bool else value.double()
            for name, value in self.rows.source.take(rows).items()
        }
        found = {}
        for latent in self.clustered:
            standard, some, labels = self._standard(batch, latent)
            found[latent] = cluster_centres(
                standard[some],
                self.graph.size(latent),
                seed,
                None if labels is None else labels[some],
            )
        return found

    def _standard(self, batch: Batch, latent: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a class's standardised columns, which rows know any of them, and the known labels.

        Missing entries are replaced by the mean of their column. The label is −1 where unknown.
        Rows are those of all steps.
        """
        n, names = self.model._extent(batch)[0], self.clustered[latent]
        steps = max(len(batch[name]) for name in names)

        def spread(value: Tensor) -> Tensor:
            return value.unflatten(0, (-1, n)).expand(steps, n, -1).flatten(0, 1)

        standard = torch.cat(
            [
                spread(known(batch, name) * self.columns.standard(name, flat(batch, name)))
                for name in names
            ],
            1,
        )
        some = torch.cat([spread(known(batch, name)) for name in names], 1).any(1)
        if latent not in batch:
            return standard, some, None
        return (
            standard,
            some,
            torch.where(
                spread(known(batch, latent))[:, 0] > 0, spread(flat(batch, latent)).argmax(-1), -1
            ),
        )

    def _members(self, batch: Batch, latent: str, centres: Tensor) -> Tensor:
        """Return the initial responsibilities of a class, [rows of all steps, values].

        Rows that know no column get zeros.
        """
        (rows, some, labels), count = self._standard(batch, latent), len(centres)
        which = (centres.square().sum(1) - 2 * rows @ centres.mT).argmin(1)
        member = F.one_hot(which, count).double() * SURE + (1 - SURE) / count
        if labels is not None:
            member = torch.where(
                (labels >= 0).unsqueeze(1), F.one_hot(labels.clamp_min(0), count).double(), member
            )
        return member * some.unsqueeze(1)

    # Other M-steps, and q -------------------------------------------------------------------------

    def expected(self, batch: Mapping[str, Tensor], posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ posterior · log p(data, latents) and log p(data), per example.

        The first is the objective of an M-step without a closed form.
        """
        table = log_joint(self.model, batch)
        # log p is −∞ at values that a known label excludes.
        counted = torch.where(posterior > 0, table, torch.zeros_like(table))
        return (posterior * counted).flatten(0, -2).sum(0), table.flatten(0, -2).logsumexp(0)

    def tighten(self, batch: Batch) -> str | None:
        """Leave q unchanged; return the reason if q is not exact.

        ``Exact()`` is the posterior already, and a network has no closed form.
        """
        rules = [
            self.graph.rule("q", name)
            for name in self.graph.latents
            if name not in self._known(batch)
        ]
        free = next((rule for rule in rules if not isinstance(rule.spec, Exact)), None)
        return (
            None
            if free is None
            else f"{free.id} has weights of its own, for which there is no closed form (Exact() "
            f"has none)"
        )
