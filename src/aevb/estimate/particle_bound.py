"""The bound of particles: log p̂(x) = Σ_t log Σ_k W[t−1] w[t], and its gradient.

The mean of p̂ is p(x), so the mean of log p̂ is a lower bound of log p(x). With the ancestors held
fixed, its gradient is pathwise. The ancestors are drawn with probabilities that depend on the
parameters, too. ``gradient="score"`` adds the score function of these draws; ``"plain"`` leaves it
out, which is biased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from aevb.compiled_step.gradients import deferred
from aevb.derive.noise_names import RESAMPLING
from aevb.derive.plan import Plan
from aevb.estimate.bound import Bound, KLWeight, integrand, is_one
from aevb.estimate.free_bits import FreeBits
from aevb.estimate.keys import mask_of
from aevb.estimate.metric_names import kl_term, latent_of
from aevb.estimate.particle_densities import AllSteps
from aevb.estimate.particle_filter import ParticleFilter, ParticleStep
from aevb.estimate.particle_values import Terms, picked, rows_of
from aevb.estimate.resampling import normalised


class ParticleEstimate:
    """One estimate of the bound of particles for a batch and its noise."""

    def __init__(
        self,
        plan: Plan,
        factors: Mapping[str, nn.Module] | nn.ModuleDict,
        batch: Mapping[str, Tensor],
        noise: Mapping[str, Tensor],
    ) -> None:
        self.plan, self.factors, self.batch, self.noise = plan, factors, batch, noise
        graph = plan.graph
        known = (name for name in graph.latents if name in plan.clamped or mask_of(name) in batch)
        self.names = [*graph.observed, *known, *(kl_term(name) for name in plan.choices)]

    def bound(self, kl_weight: KLWeight = 1.0, free_bits: FreeBits | None = None) -> Bound:
        """The bound per example, and the objective that weights of the KL terms make of it.

        The weights are those of log q − log p in the weights of the particles. The terms are
        diagnostics: sums along the lines of the last particles, averaged with their weights.
        """
        if free_bits is not None:
            raise ValueError(
                'free_bits= compares KL terms with a number, but bound="particles" has no KL '
                "terms: they are inside its logarithms."
            )
        if is_one(kl_weight):
            return self._run(1.0)
        objective = self._run(kl_weight).value
        with torch.no_grad():
            return replace(self._run(1.0), weighted=objective)

    def _run(self, kl_weight: KLWeight) -> Bound:
        particles = self._filter(self.plan, self.noise, kl_weight)
        densities = AllSteps() if torch.is_grad_enabled() else None
        particles.values.densities = densities
        steps: list[ParticleStep] = []
        along: Tensor | None = None  # the terms along each particle's line, [K, 1, N, terms]
        with deferred():
            for step in particles:
                steps.append(step)
                along = self._added(along, step)
        assert along is not None
        if densities is not None:
            terms = densities.terms(particles.values)
            steps = self._with_gradients(steps, terms, particles, kl_weight)
        value = torch.stack([step.increment for step in steps]).sum(0)
        if self.plan.resamples and self.plan.gradient == "score":
            surrogate = self._score(steps, particles.values.real, self._baselines(kl_weight))
            value = value + (surrogate - surrogate.detach())
        weights = steps[-1].log_weights.detach().exp()[:, None, :, None]
        shown = dict(zip(self.names, (weights * along).sum((0, 1)).unbind(-1), strict=True))
        # A latent known in some rows has one term, the KL term.
        for name in [name for name in self.names if name in self.plan.choices]:
            shown[kl_term(name)] = shown[kl_term(name)] - shown.pop(name)
        return Bound(value, shown)

    def _with_gradients(
        self,
        steps: list[ParticleStep],
        timed: Terms,
        particles: ParticleFilter,
        kl_weight: KLWeight,
    ) -> list[ParticleStep]:
        """The steps again, with gradients: the ancestors stay, the weights come from ``timed``."""
        k, n, graph = particles.k, particles.values.n, self.plan.graph
        new = _log_weight(timed, kl_weight).expand(k, len(steps), n, 1)[..., 0].unbind(1)
        even = torch.full_like(steps[0].log_weights, -math.log(k))
        log_w, found = even, []
        for step, weight in zip(steps, new, strict=True):
            static = {
                name: term
                for name, term in step.terms.items()
                if not graph.timed[latent_of(name) or name]
            }
            if static:
                weight = weight + _log_weight(static, kl_weight).expand(k, 1, n, 1)[:, 0, :, 0]
            log_w, increment = normalised(log_w + weight)
            found.append(replace(step, log_weights=log_w, increment=increment))
            if step.ancestors is not None:
                log_w = torch.where(step.resampled, even, log_w)
        return found

    def _filter(
        self, plan: Plan, noise: Mapping[str, Tensor], kl_weight: KLWeight
    ) -> ParticleFilter:
        return ParticleFilter(
            plan,
            self.factors,
            self.batch,
            noise,
            threshold=plan.resample,
            log_weight=lambda terms: _log_weight(terms, kl_weight),
        )

    def _added(self, along: Tensor | None, step: ParticleStep) -> Tensor:
        """The terms of each line after a step, in the order of the particles of the next step."""
        shape = (*step.log_weights.shape[:1], 1, *step.log_weights.shape[1:], 1)
        zero = step.log_weights.new_zeros(())
        found = torch.cat(
            [step.terms.get(name, zero).detach().expand(shape) for name in self.names], -1
        )
        found = found if along is None else along + found
        return found if step.ancestors is None else picked(found, rows_of(step.ancestors))

    def _baselines(self, kl_weight: KLWeight) -> Tensor:
        """The increments of a second filter with the same noise, [T, N].

        Its ancestors are evenly spaced on the cumulative weights, so they are independent of those
        that the first filter draws.
        """
        middle = torch.full_like(self.noise[RESAMPLING][:1], 0.5)
        with torch.no_grad():
            second = self._filter(
                replace(self.plan, gradient="plain"),
                {**self.noise, RESAMPLING: middle},
                kl_weight,
            )
            return torch.stack([step.increment for step in second])

    def _score(self, steps: list[ParticleStep], real: Tensor | None, baselines: Tensor) -> Tensor:
        """Σ_t Σ_k log W[t](a[t, k]) · (later increments − baseline), [N], to be differentiated.

        Particle k of step t + 1 has the ancestor a[t, k]. The baselines are independent of that
        choice: the next increment without particle k, and later increments of a second filter.
        """
        increments = torch.stack([step.increment for step in steps]).detach() - baselines
        last = steps[-1].log_weights  # with the terms of static variables that read the last step
        after = increments.flip(0).cumsum(0).flip(0)  # the sum from each step on
        total = torch.zeros_like(increments[0])
        for t, step in enumerate(steps[:-1]):
            assert step.ancestors is not None
            log_w, later = steps[t + 1].log_weights, torch.zeros_like(total)
            if t + 2 < len(steps):
                ends = None if real is None else ~real[t + 2, :, 0]
                later = after[t + 2]
                if ends is not None:
                    log_w, later = torch.where(ends, last, log_w), torch.where(ends, 0.0, later)
            signal = torch.where(step.resampled, self._without_each(log_w) + later, 0.0)
            total = total + (signal * step.log_weights.gather(0, step.ancestors)).sum(0)
        return total

    def _without_each(self, log_w: Tensor) -> Tensor:
        """The increment of a step minus that of all particles but one, for each one, [K, N].

        The weights before the step are even; ``log_w`` are the normalised ones after it, [K, N].
        """
        k = self.plan.samples
        itself = torch.eye(k, dtype=torch.bool, device=log_w.device).unsqueeze(-1)
        others = log_w.detach().expand(k, *log_w.shape).masked_fill(itself, -math.inf)
        return math.log((k - 1) / k) - others.logsumexp(1)


def _log_weight(terms: Terms, kl_weight: KLWeight) -> Tensor:
    """Σ log p − Σ (log q − log p), each of the latter times its weight."""
    kls = {name: term for name, term in terms.items() if latent_of(name) is not None}
    rest = {name: term for name, term in terms.items() if name not in kls}
    first = next(iter(terms.values()))
    return integrand(rest or {"": torch.zeros_like(first)}, kls, kl_weight)
