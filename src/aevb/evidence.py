"""log p(x) and its distance from the bound: exact for linear-Gaussian models and for finite latents, elsewhere by importance sampling.

An exact posterior comes with the exact evidence: :class:`LinearGaussian` has Gaussian conditionals, :func:`log_joint` a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributions as td
from torch import Tensor

from aevb.axes import expand_axis
from aevb.batch import split_latents
from aevb.conditionals import Factor
from aevb.deterministic import Deterministic
from aevb.distributions import MultivariateNormal as Gaussian
from aevb.estimators import Estimate, estimate
from aevb.families import Exact, MultivariateNormal, Normal
from aevb.graph import Graph
from aevb.networks import MLP
from aevb.plan import LIMIT
from aevb.program import Program

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
    reason = why_not_exact(model)
    if method == "exact" and reason:
        raise ValueError(f'The evidence of this model is not known in closed form: {reason}. Use method="importance".')
    with model._evaluating(None):
        if reason is None and method != "importance":
            value = exact_evidence(model, model.prepare(**data))
            return Evidence(value, torch.zeros_like(value), "exact")
        return importance(model, model.prepare(**data), samples, seed)


def why_not_exact(model: Model) -> str | None:
    """What keeps the evidence and the posterior from being known exactly, in words; None if nothing does."""
    return None if why_not_finite(model) is None else why_not_linear_gaussian(model)


def exact_evidence(model: Model, batch: Mapping[str, Tensor]) -> Tensor:
    """log p(observed | given), one number an example, differentiable; for models that have it exactly."""
    if why_not_finite(model) is None:
        return log_joint(model, batch).flatten(0, -2).logsumexp(0)
    return LinearGaussian(model, batch, torch.float64).log_evidence().to(model._parameter().dtype)


def gap(model: Model, batch: Mapping[str, Tensor]) -> Tensor | None:
    """KL(q(latents | data) ‖ p(latents | data)), one number an example and without sampling; None where it is not known so."""
    graph = model.graph
    if why_not_finite(model) is None:
        clamped, partial = split_latents(graph, batch)
        how = {name: "enumerate" for name in graph.latents if name not in clamped}
        bound = estimate(model.plan(how=how, clamped=clamped, partial=partial), model.factors, batch, {})  # type: ignore[arg-type]
        return exact_evidence(model, batch) - bound.value
    latents = tuple(name for name in graph.latents if name not in batch)
    if why_not_linear_gaussian(model) or any(f"{name}?" in batch for name in graph.latents) or not latents:
        return None
    program = Program(graph, model.factors, batch, steps=1)  # type: ignore[arg-type]
    program.values |= {name: batch[name] for name in (*graph.stochastic, *graph.given) if name in batch}
    program.run(graph.inference_stages(()), lambda *_: torch.zeros(()))
    means, factors = [], []
    for name in latents:
        spec = graph.rule("q", name).spec
        if not isinstance(spec, Normal | MultivariateNormal) or reads_latents(graph, name):
            return None
        dist: Any = program.distribution("q", name)[1]
        d = graph.size(name)
        means.append(dist.loc.reshape(-1, d))
        factor = dist._unbroadcasted_scale_tril if isinstance(dist, Gaussian) else torch.diag_embed(dist.scale.expand(dist.loc.shape))
        factors.append(factor.reshape(-1, d, d))
    exact = LinearGaussian(model, batch).posterior(*latents)
    n = exact.loc.shape[0]
    q = td.MultivariateNormal(torch.cat(means, -1), scale_tril=_block_diagonal([factor.expand(n, -1, -1) for factor in factors]), validate_args=False)
    p = td.MultivariateNormal(exact.loc, scale_tril=exact._unbroadcasted_scale_tril.expand(n, -1, -1), validate_args=False)
    return td.kl_divergence(q, p)


def reads_latents(graph: Graph, name: str) -> bool:
    """Whether q's factor of a latent reads another latent, directly or through what is computed from one."""
    frontier, seen = [ref.name for ref in graph.reads("q", name)], set()
    while frontier:
        parent = frontier.pop()
        if parent in graph.latents:
            return True
        if parent not in seen and graph.is_deterministic(parent):
            seen.add(parent)
            side = "q" if parent in graph.q else "p"
            frontier += [ref.name for ref in graph.reads(side, parent)]
    return False


def _block_diagonal(matrices: list[Tensor]) -> Tensor:
    """Batched square matrices, [N, d, d] each, as one of blocks."""
    size = sum(matrix.shape[-1] for matrix in matrices)
    whole = matrices[0].new_zeros(*matrices[0].shape[:-2], size, size)
    start = 0
    for matrix in matrices:
        stop = start + matrix.shape[-1]
        whole[..., start:stop, start:stop] = matrix
        start = stop
    return whole


# Finite latents ---------------------------------------------------------------------------------------------------------------


def why_not_finite(model: Model) -> str | None:
    """What keeps p's latents from being summed over, in words; None if nothing does."""
    graph, count = model.graph, 1
    for name in graph.latents:
        spec = graph.rule("p", name).spec
        if not spec.finite:
            return f"{name} has no finite list of values"
        if graph.timed[name]:
            return f"{name} lives in time"
        count *= spec.count(graph.size(name)) or 1
    return f"the latents have {count} joint values, more than {LIMIT}" if count > LIMIT else None


def log_joint(model: Model, batch: Mapping[str, Tensor]) -> Tensor:
    """log p(observed, latents | given) for every joint value of the latents: an axis each, in the graph's order, the examples last.

    A latent known in all rows has an axis of one; where it is known in some, −∞ stands at its other values.
    """
    graph = model.graph
    clamped, partial = split_latents(graph, batch)
    unknown = [name for name in graph.latents if name not in clamped]
    plan = model.plan(how=dict.fromkeys(unknown, "sum"), bound="iwae", clamped=clamped, partial=partial)
    table = Estimate(plan, model.factors, batch, {}).log_joint()  # type: ignore[arg-type]
    for name in unknown:
        table = expand_axis(table, plan.slots[name][0], plan.size((name, 0)))
    n = next(iter(batch.values())).shape[-2]
    table = table.squeeze(-1).expand(*table.shape[:-2], n)
    axes = {name: plan.slots[name][0] + 1 for name in unknown}
    table = table.permute(*(axes[name] for name in unknown), *range(-3, 0)) if unknown else table
    return table.reshape([1 if name in clamped else plan.size((name, 0)) for name in graph.latents] + [n])


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

    def __init__(self, model: Model, batch: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        graph = model.graph
        self.graph, self.dtype = graph, dtype or model._parameter().dtype
        self.batch = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in batch.items()}
        self.n = next(iter(self.batch.values())).shape[-2]
        self.means: dict[str, Tensor] = {}
        self.covariances: dict[tuple[str, str], Tensor] = {}
        for stage in graph.generation:
            self._add(model, stage.nodes[0])

    def _add(self, model: Model, name: str) -> None:
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
        """log p(observed | given), with missing entries marginalised."""
        names = tuple(name for name in self.graph.stochastic if name in self.batch)
        value = torch.cat([self.batch[name][0] for name in names], -1)
        mean = torch.cat([self.means[name] for name in names], -1)
        dist = Gaussian(mean, torch.linalg.cholesky(self._stack(names, names)))
        present = self._present(names)
        if present is None:
            return dist.log_prob(value)
        return MultivariateNormal().log_prob(dist, value, present)

    def posterior(self, *latents: str) -> Gaussian:
        """p(latents | observed, given), exactly and jointly, with missing entries marginalised."""
        names = tuple(other for other in self.graph.stochastic if other in self.batch)
        cross, observed = self._stack(latents, names), self._stack(names, names)
        residual = torch.cat([self.batch[other][0] - self.means[other] for other in names], -1)
        present = self._present(names)
        if present is not None:  # what is missing gets unit variance and no covariance with anything
            keep = present.to(residual.dtype)
            cross, residual = cross * keep.unsqueeze(-2), residual * keep
            observed = observed * keep.unsqueeze(-1) * keep.unsqueeze(-2) + torch.diag_embed(1 - keep)
        gain = torch.linalg.solve(observed, cross.mT).mT
        covariance = self._stack(latents, latents) - gain @ cross.mT
        mean = torch.cat([self.means[name] for name in latents], -1) + (gain @ residual.unsqueeze(-1)).squeeze(-1)
        return Gaussian(mean, torch.linalg.cholesky((covariance + covariance.mT) / 2))

    def _present(self, names: tuple[str, ...]) -> Tensor | None:
        """Which entries of these variables, side by side, are known; None if all are."""
        masks = [self.batch.get(f"{name}?") for name in names]
        if all(mask is None for mask in masks):
            return None
        pairs = zip(names, masks, strict=True)
        return torch.cat([torch.ones_like(self.batch[name][0], dtype=torch.bool) if mask is None else mask[0] for name, mask in pairs], -1)
