"""EM for linear-Gaussian models: each factor of p is a regression on moments expected under the Gaussian posterior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aevb import distributions as ad
from aevb.evidence.gaussian import LinearGaussian
from aevb.families import MultivariateNormal, Normal
from aevb.graph import Entry
from aevb.networks import MLP
from aevb.training.em.factors import EM, Statistics, floor

if TYPE_CHECKING:
    from aevb.model import Model


class Regressions(EM):
    """Linear-Gaussian models: expected second moments under the Gaussian posterior, then least squares."""

    closed = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        for entry in self.entries:
            if not entry.spec.stochastic:
                raise ValueError(f"em(): {entry.where} is deterministic with weights of its own, which has no closed form. Use mle().")

    def columns(self, batch: Mapping[str, Tensor]) -> Statistics:
        """The evidence of this batch, and of every column of the data the sum and the number of its known entries."""
        found: Statistics = {"evidence": LinearGaussian(self.model, batch, torch.float64).log_evidence().sum()}
        for name in (*self.graph.observed, *self.graph.given):
            value = batch[name][0].double()
            keep = batch[f"{name}?"][0].double() if f"{name}?" in batch else torch.ones_like(value)
            found |= {f"{name} first": (keep * value).sum(0), f"{name} count": keep.sum(0)}
        return found

    def centre(self, found: Statistics) -> dict[str, Tensor]:
        """Shift the biases of observed variables so that p has the data's means, and give back what they were.

        Where all is known this is the maximum of the evidence over the biases, whatever the weights. EM itself would go there in small
        steps, since every iteration explains most of a common offset by the latents.
        """
        mean = {name: found[f"{name} first"] / found[f"{name} count"].clamp_min(1.0) for name in (*self.graph.observed, *self.graph.given)}
        row = {name: value.reshape(1, 1, -1) for name, value in mean.items()}
        before: dict[str, Tensor] = {}
        with torch.no_grad():
            for name in (name for stage in self.graph.generation for name in stage.nodes if name in self.graph.observed):
                entry = self.graph.rule("p", name)
                bias = self._bias(entry)
                if bias is not None:
                    before[entry.id] = bias.clone()
                    shift = mean[name] - LinearGaussian(self.model, row, torch.float64).means[name][0]
                    bias += torch.where(found[f"{name} count"] > 0, shift, 0.0).to(bias.dtype)
        return before

    def restore(self, biases: Mapping[str, Tensor]) -> None:
        for entry in self.entries:
            bias = self._bias(entry)
            if bias is not None and entry.id in biases:
                with torch.no_grad():
                    bias.copy_(biases[entry.id])

    def _bias(self, entry: Entry) -> Tensor | None:
        """What is added to the mean of a factor: the network's bias, or a learned root's mean; None where nothing is."""
        factor: Any = self.model.factors[entry.id]
        if entry.key.parents:
            found: Tensor | None = factor.net.blocks.bias
        else:
            found = factor.root if entry.spec.learned else None
        return None if found is None else found[: self.graph.size(entry.key.name)]

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
            least = floor(own.diagonal() / some - (first / some).square(), count)
            heads = entry.spec.most_likely(
                count[None], torch.zeros_like(count)[None], left[None] if entry.spec.full_moments else left.diagonal()[None], least
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

    def tighten(self, batch: Mapping[str, Tensor]) -> str | None:
        """Set q to the exact posterior of complete rows, or to the nearest of its family.

        Where that is not possible q stays as it is, and the reason comes back in words.
        """
        graph = self.graph
        latents = tuple(name for name in graph.latents if name not in batch)
        if not latents:
            return None  # all are known: there is nothing that q is asked
        if len(latents) > 1:
            return f"a joint posterior of {', '.join(latents)} has no closed form in factors of q"
        if f"{latents[0]}?" in batch:
            return f"{latents[0]} is known in some rows"
        if graph.given:
            return f"the posterior also depends on what is given ({', '.join(graph.given)})"
        entry = graph.rule("q", latents[0])
        factor: Any = self.model.factors[entry.id]
        parents = [ref.name for ref in entry.key.parents]
        if set(parents) != set(graph.observed):
            return f"{entry.id} does not read all that is observed ({', '.join(graph.observed)})"
        if not isinstance(getattr(factor, "net", None), MLP) or factor.net.spec.hidden:
            return f"{entry.id} is not linear"
        spec = entry.spec
        if not (isinstance(spec, Normal) and spec.scale != "network") and not (isinstance(spec, MultivariateNormal) and spec.covariance == "shared"):
            return f"{entry.id} is no Gaussian with one spread for all rows (scale='learned', covariance='shared')"
        joint = LinearGaussian(self.model, {name: torch.zeros_like(batch[name][:, :1]) for name in graph.observed}, torch.float64)
        names = tuple(parents)
        cross, observed = joint._stack(latents, names), joint._stack(names, names)
        gain = torch.linalg.solve(observed, cross.T).T
        offset = joint.means[latents[0]][0] - gain @ torch.cat([joint.means[name][0] for name in names])
        blocks = factor.net.blocks
        if blocks.bias is None and bool(offset.abs().max() > 1e-12):
            return f"{entry.id} has no bias, which the posterior's mean needs"
        covariance = joint._stack(latents, latents) - gain @ cross.T
        covariance = (covariance + covariance.T) / 2
        heads: dict[str, Tensor] = {}
        if isinstance(spec, MultivariateNormal):
            heads["tril"] = ad.vector_from_tril(torch.linalg.cholesky(covariance))
        elif spec.scale == "learned":  # the nearest independent Gaussian has the precision's diagonal
            heads["scale"] = ad.inverse_softplus(torch.linalg.inv(covariance).diagonal().rsqrt())
        parts = gain.split([graph.size(name) for name in names], -1)
        self._set(entry, heads, {str(ref): part for ref, part in zip(entry.key.parents, parts, strict=True)}, offset)
        return None
