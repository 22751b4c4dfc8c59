"""Exact EM: the E-step is Bayes' rule, the M-step a closed form.

For a linear-Gaussian p the posterior is Gaussian and each factor a regression on expected moments; for finite latents it is a
table of responsibilities and each factor a weighted maximum of likelihood. Both add up statistics over all rows (so that data
need not fit into memory, and processes can share the work), then set p's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aevb import distributions as ad
from aevb.conditionals import Conditional, Factor
from aevb.evidence.exact import why_not_exact
from aevb.evidence.finite import log_joint, why_not_finite
from aevb.evidence.gaussian import LinearGaussian
from aevb.families import SMALLEST_VARIANCE, Exact, MultivariateNormal, Normal, OneHot
from aevb.graph import Entry
from aevb.networks import MLP

if TYPE_CHECKING:
    from aevb.model import Model

Statistics = dict[str, Tensor]


def exact_em(model: Model) -> Regressions | Responsibilities:
    """How this model's EM goes; a ValueError says why there is none."""
    if reason := why_not_exact(model):
        raise ValueError(f"em() takes the exact posterior, which is not known for this model: {reason}. Use alternate() or joint().")
    return Responsibilities(model) if why_not_finite(model) is None else Regressions(model)


def _floor(variance: Tensor, count: Tensor) -> Tensor:
    """The least variance that a closed form may give each column: a share of its own, and 1 for a column that no row has."""
    return torch.where(count > 0, (SMALLEST_VARIANCE * variance).clamp_min(1e-20), 1.0)


class EM:
    """What both kinds share: the factors of p that have parameters, and how to set them."""

    def __init__(self, model: Model) -> None:
        self.model, self.graph = model, model.graph
        entries = [entry for entry in self.graph.entries() if entry.side == "p" and any(True for _ in model.factors[entry.id].parameters())]
        self.entries: list[Entry] = entries

    def _set(self, entry: Entry, heads: Mapping[str, Tensor], weights: Mapping[str, Tensor], bias: Tensor | None) -> None:
        """Write learned vectors and, for a root, its heads; the first layer's blocks otherwise."""
        factor: Any = self.model.factors[entry.id]
        with torch.no_grad():
            for name in factor.vectors:
                factor.vectors[name].copy_(heads[name].reshape(-1))
            if not entry.key.parents:
                if entry.spec.learned:  # a fixed root is standard, and stays so
                    factor.root.copy_(torch.cat([heads[name].reshape(-1) for name in factor.sizes]))
                return
            blocks = factor.net.blocks
            for label, weight in weights.items():
                blocks.weights[label].copy_(weight)
            if blocks.bias is not None:
                blocks.bias.copy_(torch.zeros_like(blocks.bias) if bias is None else bias)


class Regressions(EM):
    """Linear-Gaussian models: expected second moments under the Gaussian posterior, then least squares."""

    closed = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        for entry in self.entries:
            if not entry.spec.stochastic:
                raise ValueError(f"em(): {entry.where} is deterministic with weights of its own, which has no closed form. Use mle().")

    def statistics(self, batch: Mapping[str, Tensor]) -> Statistics:
        """The sums over the rows of this batch; rows that know the same latents are taken together."""
        partial = [name for name in self.graph.latents if f"{name}?" in batch]
        if not partial:
            return self._statistics(batch)
        known = torch.stack([batch[f"{name}?"][0].all(-1) for name in partial], -1)
        found: Statistics = {}
        for pattern in known.unique(dim=0):
            rows = (known == pattern).all(-1).nonzero()[:, 0]
            hidden = {name for name, there in zip(partial, pattern.tolist(), strict=True) if not there}
            drop = hidden | {f"{name}?" for name in partial}
            some = {key: part.index_select(-2, rows) for key, part in batch.items() if key not in drop}
            for name, value in self._statistics(some).items():
                found[name] = found[name] + value if name in found else value
        return found

    def _statistics(self, batch: Mapping[str, Tensor]) -> Statistics:
        joint = LinearGaussian(self.model, batch, torch.float64)
        evidence = joint.log_evidence().sum()
        found: Statistics = {"evidence": evidence, "rows": torch.full_like(evidence, joint.n)}
        latents = tuple(name for name in self.graph.latents if name not in batch)
        means: dict[str, Tensor] = {name: batch[name][0].double() for name in (*self.graph.stochastic, *self.graph.given) if name in batch}
        where: dict[str, slice] = {}
        covariance = torch.zeros(0)
        if latents:
            posterior = joint.posterior(*latents)
            factor = posterior._unbroadcasted_scale_tril.double()
            covariance = (factor @ factor.mT).expand(joint.n, *factor.shape[-2:])
            start = 0
            for name in latents:
                where[name] = slice(start, start := start + self.graph.size(name))
                means[name] = posterior.loc[:, where[name]].double()

        def second(a: str, b: str) -> Tensor:
            """E[a bᵀ] of every row."""
            product = means[a].unsqueeze(-1) * means[b].unsqueeze(-2)
            return product + covariance[:, where[a], where[b]] if a in where and b in where else product

        for entry in self.entries:
            name = entry.key.name
            parents = [ref.name for ref in entry.key.parents]
            columns = [means[parent] for parent in parents]
            if self._has_bias(entry):
                columns.append(torch.ones(joint.n, 1, dtype=torch.float64, device=means[name].device))
            design = torch.cat(columns, -1)
            inner = design.unsqueeze(-1) * design.unsqueeze(-2)
            outer = means[name].unsqueeze(-1) * design.unsqueeze(-2)
            start_a = 0
            for a in parents:
                stop_a = start_a + self.graph.size(a)
                outer[..., start_a:stop_a] = second(name, a)
                start_b = 0
                for b in parents:
                    stop_b = start_b + self.graph.size(b)
                    inner[:, start_a:stop_a, start_b:stop_b] = second(a, b)
                    start_b = stop_b
                start_a = stop_a
            own, centre = second(name, name), means[name]
            present = batch.get(f"{name}?")
            if present is None:
                found |= {f"{entry.id} inner": inner.sum(0), f"{entry.id} outer": outer.sum(0), f"{entry.id} own": own.sum(0)}
                found[f"{entry.id} first"] = centre.sum(0)
                found[f"{entry.id} count"] = torch.full((self.graph.size(name),), float(joint.n), dtype=torch.float64, device=own.device)
            elif isinstance(entry.spec, MultivariateNormal):
                raise ValueError(f"em(): {name} has missing entries and a full covariance, for which no closed form is here. Use mle().")
            else:  # every column has rows of its own
                keep = present[0].double()
                found[f"{entry.id} inner"] = torch.einsum("nd,npq->dpq", keep, inner)
                found[f"{entry.id} outer"] = torch.einsum("nd,ndp->dp", keep, outer)
                found[f"{entry.id} own"] = torch.diag_embed((keep * own.diagonal(dim1=-2, dim2=-1)).sum(0))
                found[f"{entry.id} count"], found[f"{entry.id} first"] = keep.sum(0), (keep * centre).sum(0)
        return found

    def maximise(self, found: Statistics) -> None:
        """The M-step: every factor's regression, and what it leaves over."""
        for entry in self.entries:
            inner, outer, own, count, first = (found[f"{entry.id} {part}"] for part in ("inner", "outer", "own", "count", "first"))
            some = count.clamp_min(1.0)
            inverse = torch.linalg.pinv(inner, hermitian=True)
            matrix = (outer.unsqueeze(-2) @ inverse).squeeze(-2) if inner.dim() == 3 else outer @ inverse
            if not entry.key.parents and not entry.spec.learned:
                matrix = torch.zeros_like(matrix)  # a fixed root has mean 0
            left = (own - outer @ matrix.mT) / some
            floor = _floor(own.diagonal() / some - (first / some).square(), count)
            heads = entry.spec.most_likely(
                count[None], torch.zeros_like(count)[None], left[None] if entry.spec.full_moments else left.diagonal()[None], floor
            )
            assert heads is not None
            if not entry.key.parents:
                heads["loc"] = matrix[:, 0]
                self._set(entry, heads, {}, None)
                continue
            sizes = [self.graph.size(ref.name) for ref in entry.key.parents]
            parts = matrix.split([*sizes, 1] if self._has_bias(entry) else sizes, -1)
            weights = {str(ref): part for ref, part in zip(entry.key.parents, parts, strict=False)}
            self._set(entry, heads, weights, parts[-1][:, 0] if self._has_bias(entry) else None)

    def _has_bias(self, entry: Entry) -> bool:
        return not entry.key.parents or self.model.factors[entry.id].net.blocks.bias is not None  # type: ignore[union-attr]

    def tighten(self, batch: Mapping[str, Tensor]) -> bool:
        """Set q to the exact posterior of complete rows, or to the nearest of its family; False where that cannot express the posterior's mean."""
        graph = self.graph
        latents = tuple(name for name in graph.latents if name not in batch)
        if len(latents) != 1 or graph.given or f"{latents[0]}?" in batch:
            return False
        entry = graph.rule("q", latents[0])
        factor: Any = self.model.factors[entry.id]
        parents = [ref.name for ref in entry.key.parents]
        if set(parents) != set(graph.observed) or not isinstance(getattr(factor, "net", None), MLP) or factor.net.spec.hidden:
            return False
        spec = entry.spec
        if not (isinstance(spec, Normal) and spec.scale != "network") and not (isinstance(spec, MultivariateNormal) and spec.covariance == "shared"):
            return False
        joint = LinearGaussian(self.model, {name: torch.zeros_like(batch[name][:, :1]) for name in graph.observed}, torch.float64)
        names = tuple(parents)
        cross, observed = joint._stack(latents, names), joint._stack(names, names)
        gain = torch.linalg.solve(observed, cross.T).T
        offset = joint.means[latents[0]][0] - gain @ torch.cat([joint.means[name][0] for name in names])
        blocks = factor.net.blocks
        if blocks.bias is None and bool(offset.abs().max() > 1e-12):
            return False
        covariance = joint._stack(latents, latents) - gain @ cross.T
        covariance = (covariance + covariance.T) / 2
        heads: dict[str, Tensor] = {}
        if isinstance(spec, MultivariateNormal):
            heads["tril"] = ad.vector_from_tril(torch.linalg.cholesky(covariance))
        elif spec.scale == "learned":  # the nearest independent Gaussian has the precision's diagonal
            heads["scale"] = ad.inverse_softplus(torch.linalg.inv(covariance).diagonal().rsqrt())
        parts = gain.split([graph.size(name) for name in names], -1)
        self._set(entry, heads, {str(ref): part for ref, part in zip(entry.key.parents, parts, strict=True)}, offset)
        return True


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
            count, first, second = (found[f"{entry.id} {part}"] for part in ("count", "first", "second"))
            some = count.clamp_min(torch.finfo(count.dtype).tiny)
            mean, square = first / some, second / (some.unsqueeze(-1) if entry.spec.full_moments else some)
            if not entry.key.parents and not entry.spec.learned:
                mean = torch.zeros_like(mean)  # a fixed root has mean 0
            total, squares = count.sum(0), second.diagonal(dim1=-2, dim2=-1) if entry.spec.full_moments else second
            n = total.clamp_min(torch.finfo(count.dtype).tiny)
            heads = entry.spec.most_likely(count, mean, square, _floor(squares.sum(0) / n - (first.sum(0) / n).square(), total))
            assert heads is not None
            factor: Any = self.model.factors[entry.id]
            if not entry.key.parents:
                self._set(entry, heads, {}, None)
                continue
            label = str(entry.key.parents[0])
            rows = torch.cat([heads[name] for name in factor.sizes], -1)  # [C, all heads]
            blocks = factor.net.blocks
            old = blocks.weights[label].T.double() + (blocks.bias.double() if blocks.bias is not None else 0.0)
            seen = count > 1e-9  # what no row has keeps what it had
            whole = seen.all(-1, keepdim=True)
            alive = torch.cat([seen if heads[name].shape == seen.shape else whole.expand_as(heads[name]) for name in factor.sizes], -1)
            self._set(entry, heads, {label: torch.where(alive, rows, old.detach()).T}, None)

    def expected(self, batch: Mapping[str, Tensor], posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Σ posterior · log p(data, latents) and log p(data), one number an example: what an M-step without closed form ascends."""
        table = log_joint(self.model, batch)
        counted = torch.where(posterior > 0, table, torch.zeros_like(table))  # −∞ stands where a known value excludes others
        return (posterior * counted).flatten(0, -2).sum(0), table.flatten(0, -2).logsumexp(0)

    def tighten(self, batch: Mapping[str, Tensor]) -> bool:
        """q stays as it is: Exact() is the posterior already, and a network has no closed form."""
        return all(isinstance(self.graph.rule("q", name).spec, Exact) for name in self.graph.latents)
