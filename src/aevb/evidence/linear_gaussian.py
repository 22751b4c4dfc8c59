"""Linear-Gaussian models without time: joint Gaussian of all variables, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.declare.deterministic import Deterministic
from aevb.declare.distributions import MultivariateNormal as Gaussian
from aevb.declare.families import MultivariateNormal
from aevb.declare.networks import MLP
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.evidence.structure import is_affine


def why_not_linear_gaussian(model: DeclaredModel) -> str | None:
    """Return why p is not jointly Gaussian; None if it is."""
    for entry in model.graph.entries():
        if entry.side == "q":
            continue
        spec, factor = entry.spec, model.factors[entry.id]
        if entry.key.target.timed:
            return f"{entry.id} has a time axis"
        affine = not entry.key.parents or is_affine(factor)
        if isinstance(spec, Deterministic):
            if not affine or spec.activation != "identity":
                return f"{entry.id} is not linear"
        elif not spec.gaussian:
            return f"{entry.id} is a {type(spec).__name__}"
        elif not affine:
            return f"{entry.id} is not linear in its parents"
        elif entry.key.parents and len(spec.heads(1)) > 1:
            return f"the spread of {entry.id} depends on its parents"
    return None


class LinearGaussian:
    """Joint Gaussian of all variables of p, given the conditioning variables of the data.

    Each variable is v = Σ A parent + b + ε. Means and covariances follow in the order of
    generation.
    """

    def __init__(
        self, model: DeclaredModel, batch: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        graph = model.graph
        self.graph, self.dtype = graph, dtype or model._parameter().dtype
        self.batch = {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in batch.items()
        }
        self.n = next(iter(self.batch.values())).shape[-2]
        self.means: dict[str, Tensor] = {}
        self.covariances: dict[tuple[str, str], Tensor] = {}
        for stage in graph.generation:
            self._add(model, stage.nodes[0])

    def _add(self, model: DeclaredModel, name: str) -> None:
        entry, d = self.graph.rule("p", name), self.graph.size(name)
        factor = model.factors[entry.id]
        assert isinstance(factor, Factor)
        like = model._parameter().to(self.dtype)
        mean = torch.zeros(self.n, d, dtype=like.dtype, device=like.device)
        rows: dict[str, Tensor] = {}
        if entry.key.parents:
            assert isinstance(factor.net, MLP)
            blocks = factor.net.blocks
            mean = mean + (blocks.bias[:d].to(self.dtype) if blocks.bias is not None else 0.0)
            for ref in entry.key.parents:
                matrix = blocks.weights[str(ref)][:d].to(self.dtype)
                rows[ref.name] = matrix
                value = self.means[ref.name] if ref.name in self.means else self.batch[ref.name][0]
                mean = mean + value @ matrix.T
            raw = torch.zeros(1, sum(factor.sizes.values()), dtype=like.dtype, device=like.device)
        else:
            raw = factor({})[0].to(self.dtype)
        noise = torch.zeros(d, d, dtype=like.dtype, device=like.device)
        if entry.spec.stochastic:
            dist = factor.distribution(raw, lambda vector: vector.to(self.dtype))
            if isinstance(dist, Gaussian):
                factor_l = dist._unbroadcasted_scale_tril.reshape(d, d)
                noise = factor_l @ factor_l.T
            else:
                noise = torch.diag_embed(dist.scale.expand(1, d)[0].square())  # type: ignore[attr-defined]
            if not entry.key.parents:
                mean = mean + dist.loc.reshape(1, d)  # type: ignore[attr-defined]
        for other in self.means:
            cross = noise.new_zeros(d, self.graph.size(other))
            for parent, matrix in rows.items():
                if parent in self.means:
                    cross = cross + matrix @ self.covariances[parent, other]
            self.covariances[name, other], self.covariances[other, name] = cross, cross.T
        own = noise
        for parent, matrix in rows.items():
            if parent in self.means:
                own = own + self.covariances[name, parent] @ matrix.T
        self.means[name], self.covariances[name, name] = mean, own

    def _stack(self, names: tuple[str, ...], others: tuple[str, ...]) -> Tensor:
        return torch.cat([torch.cat([self.covariances[a, b] for b in others], 1) for a in names], 0)

    def log_evidence(self) -> Tensor:
        """Return log p(observed | given), with missing entries marginalised out."""
        names = tuple(name for name in self.graph.stochastic if name in self.batch)
        value = torch.cat([self.batch[name][0] for name in names], -1)
        mean = torch.cat([self.means[name] for name in names], -1)
        dist = Gaussian(mean, torch.linalg.cholesky(self._stack(names, names)))
        present = self._present(names)
        if present is None:
            return dist.log_prob(value)
        return MultivariateNormal().log_prob(dist, value, present)

    def _present(self, names: tuple[str, ...]) -> Tensor | None:
        """Return the mask of known entries, concatenated; None if all are known."""
        masks = [self.batch.get(mask_of(name)) for name in names]
        if all(mask is None for mask in masks):
            return None
        pairs = zip(names, masks, strict=True)
        return torch.cat(
            [
                torch.ones_like(self.batch[name][0], dtype=torch.bool) if mask is None else mask[0]
                for name, mask in pairs
            ],
            -1,
        )
