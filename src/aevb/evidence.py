"""log p(x): exact for linear-Gaussian models, by importance sampling with q as proposal elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aevb.batch import split_latents
from aevb.conditionals import Factor
from aevb.deterministic import Deterministic
from aevb.distributions import MultivariateNormal as Gaussian
from aevb.estimators import estimate
from aevb.families import Exact, MultivariateNormal, Normal
from aevb.networks import MLP
from aevb.plan import LIMIT

if TYPE_CHECKING:
    from aevb.model import Model


BUDGET = 50_000_000  # numbers that one chunk of importance samples may take


@dataclass(frozen=True)
class Evidence:
    """log p(x) an example, its standard error (0 where exact), and how it was found."""

    value: Tensor
    stderr: Tensor
    method: str


def log_evidence(model: Model, data: Mapping[str, Any], *, method: str, samples: int, seed: int | None) -> Evidence:
    if method not in ("auto", "exact", "importance"):
        raise ValueError(f"Unknown method {method!r}. Choose auto, exact or importance.")
    reason = why_not_linear_gaussian(model)
    if method == "exact" and reason:
        raise ValueError(f'The evidence of this model is not known in closed form: {reason}. Use method="importance".')
    with torch.no_grad():
        if reason is None and method != "importance":
            value = LinearGaussian(model, model.prepare(**data)).log_evidence()
            return Evidence(value, torch.zeros_like(value), "exact")
        return importance(model, model.prepare(**data), samples, seed)


def importance(model: Model, batch: Mapping[str, Tensor], samples: int, seed: int | None) -> Evidence:
    """log 1/K Σ p(x, z)/q(z|x), z ~ q; enumerated latents are summed inside, exactly."""
    graph = model.graph
    # What is enumerated is summed inside the logarithm, exactly; over time it is drawn, since the sum does not factor.
    clamped, partial = split_latents(graph, batch)
    how, budget = {}, LIMIT
    for name in graph.latents:
        spec, by_bayes = graph.rule("p", name).spec, isinstance(graph.rule("q", name).spec, Exact)
        count = spec.count(graph.size(name)) if spec.finite else None
        if name in clamped or count is None or (by_bayes and graph.timed[name]):  # Bayes' sum over a step is exact as it is
            continue
        inside = by_bayes or (count <= budget and not graph.timed[name])
        how[name], budget = ("sum", max(1, budget // count)) if inside else ("score", budget)
    n, steps = model._extent(batch)
    # What one sample of one row takes: a few numbers for every output of every network, for each value summed over.
    passes = math.prod(graph.rule("p", name).spec.count(graph.size(name)) or 1 for name, choice in how.items() if choice == "sum")
    width = sum(graph.size(name) for name in graph.shapes) * passes * (steps if any(graph.timed.values()) else 1)
    rows = max(1, min(n, BUDGET // (2 * width)))
    if rows < n:
        cuts = [{key: value.narrow(-2, i, min(rows, n - i)) for key, value in batch.items()} for i in range(0, n, rows)]
        parts = [importance(model, cut, samples, None if seed is None else seed + i) for i, cut in enumerate(cuts)]
        return Evidence(torch.cat([part.value for part in parts]), torch.cat([part.stderr for part in parts]), "importance")
    chunk = max(2, min(samples, BUDGET // (n * width)))
    generator = torch.Generator(model._parameter().device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    was = model.training
    model.eval()
    log_weight_parts = []
    try:
        done = 0
        while done < samples:
            k = max(2, min(chunk, samples - done))
            plan = model.plan(how=how, bound="iwae", samples=k, clamped=clamped, partial=partial)
            noise = model.draw_noise(plan, batch, seed=int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            bound = estimate(plan, model.factors, batch, noise)  # type: ignore[arg-type]
            assert bound.log_weights is not None  # nothing is enumerated outside the logarithm
            log_weight_parts.append(bound.log_weights)
            done += k
    finally:
        model.train(was)
    log_weights = torch.cat(log_weight_parts)
    k = len(log_weights)
    value = log_weights.logsumexp(0) - math.log(k)
    return Evidence(value, (log_weights - value).exp().std(0) / math.sqrt(k), "importance")


def why_not_linear_gaussian(model: Model) -> str | None:
    """What keeps p from being jointly Gaussian, in words; None if nothing does."""
    for entry in model.graph.entries():
        if entry.side == "q":
            continue
        spec, factor = entry.spec, model.factors[entry.id]
        if entry.key.target.timed:
            return f"{entry.id} lives in time"
        affine = not entry.key.parents or (isinstance(getattr(factor, "net", None), MLP) and not factor.net.spec.hidden)  # type: ignore[union-attr]
        if isinstance(spec, Deterministic):
            if not affine or spec.activation != "identity":
                return f"{entry.id} is not linear"
        elif not isinstance(spec, Normal | MultivariateNormal):
            return f"{entry.id} is a {type(spec).__name__}"
        elif not affine:
            return f"{entry.id} is not linear in its parents"
        elif entry.key.parents and len(spec.heads(1)) > 1:
            return f"the spread of {entry.id} depends on its parents"
    return None


class LinearGaussian:
    """The joint Gaussian of all of p's variables, given the data's conditioning variables.

    Each variable is v = Σ A parent + b + ε, so mean and covariance follow in the order of generation.
    """

    def __init__(self, model: Model, batch: Mapping[str, Tensor]) -> None:
        graph = model.graph
        self.graph, self.batch = graph, batch
        self.n = next(iter(self.batch.values())).shape[-2]
        self.means: dict[str, Tensor] = {}
        self.covariances: dict[tuple[str, str], Tensor] = {}
        for stage in graph.generation:
            self._add(model, stage.nodes[0])

    def _add(self, model: Model, name: str) -> None:
        entry, d = self.graph.rule("p", name), self.graph.size(name)
        factor = model.factors[entry.id]
        assert isinstance(factor, Factor)
        like = model._parameter()
        mean = torch.zeros(self.n, d, dtype=like.dtype, device=like.device)
        rows: dict[str, Tensor] = {}
        if entry.key.parents:
            assert isinstance(factor.net, MLP)
            blocks = factor.net.blocks
            mean = mean + (blocks.bias[:d] if blocks.bias is not None else 0.0)
            for ref in entry.key.parents:
                matrix = blocks.weights[str(ref)][:d]
                rows[ref.name] = matrix
                value = self.means[ref.name] if ref.name in self.means else self.batch[ref.name][0]
                mean = mean + value @ matrix.T
            raw = torch.zeros(1, sum(factor.sizes.values()), dtype=like.dtype, device=like.device)
        else:
            raw = factor({})[0]
        noise = torch.zeros(d, d, dtype=like.dtype, device=like.device)
        if entry.spec.stochastic:
            dist = factor.distribution(raw)
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
        """log p(observed | given), with missing entries marginalised."""
        names = tuple(name for name in self.graph.stochastic if name in self.batch)
        value = torch.cat([self.batch[name][0] for name in names], -1)
        mean = torch.cat([self.means[name] for name in names], -1)
        dist = Gaussian(mean, torch.linalg.cholesky(self._stack(names, names)))
        masks = [self.batch.get(f"{name}?") for name in names]
        if all(mask is None for mask in masks):
            return dist.log_prob(value)
        present = torch.cat(
            [torch.ones_like(self.batch[name][0], dtype=torch.bool) if mask is None else mask[0] for name, mask in zip(names, masks, strict=True)], -1
        )
        return MultivariateNormal().log_prob(dist, value, present)

    def posterior(self, name: str) -> Gaussian:
        """p(latent | observed, given), exactly."""
        names = tuple(other for other in self.graph.stochastic if other in self.batch)
        cross, observed = self._stack((name,), names), self._stack(names, names)
        residual = torch.cat([self.batch[other][0] - self.means[other] for other in names], -1)
        gain = torch.linalg.solve(observed, cross.T).T
        covariance = self.covariances[name, name] - gain @ cross.T
        return Gaussian(self.means[name] + residual @ gain.T, torch.linalg.cholesky(covariance))
