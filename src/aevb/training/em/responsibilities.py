"""EM for finite latents: a table of responsibilities, and each factor of p a weighted maximum of likelihood."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aevb.conditionals import Conditional, Factor
from aevb.evidence.finite import log_joint
from aevb.families import Exact, OneHot
from aevb.graph import Entry
from aevb.networks import MLP
from aevb.training.em.factors import EM, Rows, Statistics, add, floor

if TYPE_CHECKING:
    from aevb.model import Model


class Responsibilities(EM):
    """Finite latents: the posterior of every joint value, then weighted maximum likelihood, factor by factor."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.closed = all(self._has_closed_form(entry) for entry in self.entries)

    def _has_closed_form(self, entry: Entry) -> bool:
        """A factor whose distribution is free for every value of its one parent, a class, or that has no parent."""
        factor, parents = self.model.factors[entry.id], entry.key.parents
        if not isinstance(factor, Factor) or entry.key.target.timed or len(parents) > 1:
            return False
        if type(entry.spec).most_likely is Conditional.most_likely:
            return False
        if not parents:
            return True
        parent = parents[0].name
        one_hot = parent in self.graph.stochastic and isinstance(self.graph.rule("p", parent).spec, OneHot)
        return one_hot and isinstance(factor.net, MLP) and not factor.net.spec.hidden

    def posterior(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """p(latents | data) as a table (an axis a latent, the examples last), and log p(data)."""
        table = log_joint(self.model, batch)
        evidence = table.flatten(0, -2).logsumexp(0)
        return (table - evidence).exp(), evidence

    def statistics(self, batch: Mapping[str, Tensor]) -> Statistics:
        table, evidence = self.posterior(batch)
        table = table.double()
        n = table.shape[-1]
        found: Statistics = {"evidence": evidence.double().sum(), "rows": torch.tensor(float(n), dtype=torch.float64, device=evidence.device)}
        for entry in self.entries:
            name = entry.key.name
            parent = entry.key.parents[0].name if entry.key.parents else None
            unknown = [other for other in self.graph.latents if other in (name, parent) and other not in self._known(batch)]
            weight = self._marginal(table, unknown)  # [values of the parent and of the variable, where unknown, in the graph's order …, N]
            value = self._values(name, batch, unknown)  # [values, N or 1, d]
            if name in unknown and parent in unknown and unknown.index(name) == 0:
                weight = weight.transpose(0, 1)
            if parent is None:
                weight = weight.unsqueeze(0)
            elif parent not in unknown:
                weight = weight.unsqueeze(0) * batch[parent][0].double().T.reshape(-1, *[1] * (weight.dim() - 1), n)
            weight = weight if name in unknown else weight.unsqueeze(1)  # [cells, values, N]
            keep = batch[f"{name}?"][0].double() if f"{name}?" in batch and name not in unknown else torch.ones_like(value[0])
            keep = keep.expand(n, value.shape[-1])
            value = value.expand(value.shape[0], n, value.shape[-1])
            if entry.spec.full_moments and f"{name}?" in batch and name not in unknown:
                raise ValueError(f"em(): {name} has missing entries and a full covariance, for which no closed form is here. Use mle() or joint().")
            found[f"{entry.id} count"] = torch.einsum("cvn,nd->cd", weight, keep)
            found[f"{entry.id} first"] = torch.einsum("cvn,nd,vnd->cd", weight, keep, value)
            pattern = "cvn,nd,vnd,vne->cde" if entry.spec.full_moments else "cvn,nd,vnd,vnd->cd"
            found[f"{entry.id} second"] = torch.einsum(pattern, weight, keep, value, value)
        return found

    # As a vector --------------------------------------------------------------------------------------------------------------------

    def open(self, rows: Rows) -> None:
        self.rows, self.working = rows, type(self)(copy.deepcopy(self.model).double())

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for entry in self.entries for parameter in self.model.factors[entry.id].parameters()]

    def read(self) -> Tensor:
        return torch.cat([parameter.detach().double().reshape(-1) for parameter in self._parameters])

    def write(self, vector: Tensor) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, vector.split(sizes), strict=True):
            parameter.detach().copy_(part.reshape(parameter.shape))

    def within(self, vector: Tensor) -> Tensor:
        return vector

    def centred(self, own: Tensor) -> Tensor:
        return own

    def from_data(self, own: Tensor, seed: int) -> Tensor:
        return own

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The mean evidence at these parameters, and EM's next ones."""
        self.working.write(vector)
        found: Statistics = {}
        for batch in self.rows.parts():
            add(found, self.working.statistics(batch))
        self.rows.world.sum(list(found.values()))
        self.working.maximise(found)
        return found["evidence"] / len(self.rows), self.working.read()

    def _known(self, batch: Mapping[str, Tensor]) -> list[str]:
        return [name for name in self.graph.latents if name in batch and f"{name}?" not in batch]

    def _marginal(self, table: Tensor, names: list[str]) -> Tensor:
        """The posterior of some latents, an axis each in the graph's order, the examples last."""
        others = [axis for axis, name in enumerate(self.graph.latents) if name not in names]
        return table.sum(others) if others else table

    def _values(self, name: str, batch: Mapping[str, Tensor], unknown: list[str]) -> Tensor:
        if name not in unknown:
            return batch[name].double()
        factor = self.model.factors[self.graph.rule("p", name).id]
        assert isinstance(factor, Factor)
        return factor.table().double().unsqueeze(1)

    def maximise(self, found: Statistics) -> None:
        for entry in self.entries:
            heads, seen = self.most_likely(entry, *(found[f"{entry.id} {part}"] for part in ("count", "first", "second")))
            factor: Any = self.model.factors[entry.id]
            if not entry.key.parents:
                self._set(entry, heads, {}, None)
                continue
            label, blocks = str(entry.key.parents[0]), factor.net.blocks
            rows = torch.cat([heads[name] for name in factor.sizes], -1)  # [C, all heads]
            old = blocks.weights[label].T.double() + (blocks.bias.double() if blocks.bias is not None else 0.0)
            alive = torch.cat([seen[name] for name in factor.sizes], -1)
            self._set(entry, heads, {label: torch.where(alive, rows, old.detach()).T}, None)

    def most_likely(self, entry: Entry, count: Tensor, first: Tensor, second: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A factor's heads (a row for each value of its parent) and vectors for these sums over rows, and which numbers any row speaks of."""
        full = entry.spec.full_moments
        some = count.clamp_min(torch.finfo(count.dtype).tiny)
        mean, square = first / some, second / (some.unsqueeze(-1) if full else some)
        if not entry.key.parents and not entry.spec.learned:
            mean = torch.zeros_like(mean)  # a fixed root has mean 0
        total, squares = count.sum(0), second.diagonal(dim1=-2, dim2=-1) if full else second
        n = total.clamp_min(torch.finfo(count.dtype).tiny)
        heads = entry.spec.most_likely(count, mean, square, floor(squares.sum(0) / n - (first.sum(0) / n).square(), total))
        assert heads is not None
        seen = count > 1e-9  # what no row has keeps what it had
        whole = seen.all(-1, keepdim=True)
        return heads, {name: seen if value.shape == seen.shape else whole.expand_as(value) for name, value in heads.items() if value.dim() > 1}

    def expected(self, batch: Mapping[str, Tensor], posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Σ posterior · log p(data, latents) and log p(data), one number an example: what an M-step without closed form ascends."""
        table = log_joint(self.model, batch)
        counted = torch.where(posterior > 0, table, torch.zeros_like(table))  # −∞ stands where a known value excludes others
        return (posterior * counted).flatten(0, -2).sum(0), table.flatten(0, -2).logsumexp(0)

    def tighten(self, batch: Mapping[str, Tensor]) -> str | None:
        """q stays as it is: Exact() is the posterior already, and a network has no closed form."""
        rules = [self.graph.rule("q", name) for name in self.graph.latents if name not in self._known(batch)]
        free = next((rule for rule in rules if not isinstance(rule.spec, Exact)), None)
        return None if free is None else f"{free.id} has weights of its own, for which there is no closed form (Exact() has none)"
