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
from aevb.derive.plan import Plan
from aevb.estimate.bound import Bound, KLWeight, integrand, is_one
from aevb.estimate.free_bits import FreeBits
from aevb.estimate.keys import mask_of
from aevb.estimate.metric_names import kl_term, latent_of
from aevb.estimate.particle_filter import ParticleFilter, ParticleStep
from aevb.estimate.particle_values import Terms, picked


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
                'free_bits= compares KL terms with a number, but bound="particles" has no KL terms: '
                "they are inside its logarithms."
            )
        if is_one(kl_weight):
            return self._run(1.0)
        objective = self._run(kl_weight).value
        with torch.no_grad():
            return replace(self._run(1.0), weighted=objective)

    def _run(self, kl_weight: KLWeight) -> Bound:
        def log_weight(terms: Terms) -> Tensor:
            kls = {name: term for name, term in terms.items() if latent_of(name) is not None}
            rest = {name: term for name, term in terms.items() if name not in kls}
            return integrand(rest, kls, kl_weight)

        particles = ParticleFilter(
            self.plan,
            self.factors,
            self.batch,
            self.noise,
            threshold=self.plan.resample,
            log_weight=log_weight,
        )
        steps: list[ParticleStep] = []
        along: Tensor | None = None  # the terms along each particle's line, [K, 1, N, terms]
        with deferred():
            for step in particles:
                steps.append(step)
                along = self._added(along, step)
        assert along is not None
        value = torch.stack([step.increment for step in steps]).sum(0)
        if self.plan.resamples and self.plan.gradient == "score":
            surrogate = self._score(steps, particles.values.real)
            value = value + (surrogate - surrogate.detach())
        weights = steps[-1].log_weights.detach().exp()[:, None, :, None]
        shown = dict(zip(self.names, (weights * along).sum((0, 1)).unbind(-1), strict=True))
        # A latent known in some rows has one term, the KL term.
        for name in [name for name in self.names if name in self.plan.choices]:
            shown[kl_term(name)] = shown[kl_term(name)] - shown.pop(name)
        return Bound(value, shown)

    def _added(self, along: Tensor | None, step: ParticleStep) -> Tensor:
        """The terms of each line after a step, in the order of the particles of the next step."""
        shape = (*step.log_weights.shape[:1], 1, *step.log_weights.shape[1:], 1)
        zero = step.log_weights.new_zeros(())
        found = torch.cat(
            [step.terms.get(name, zero).detach().expand(shape) for name in self.names], -1
        )
        found = found if along is None else along + found
        return found if step.ancestors is None else picked(found, step.ancestors)

    def _score(self, steps: list[ParticleStep], real: Tensor | None) -> Tensor:
        """Σ_t Σ_k log W[t](a[t, k]) · (later increments − baseline), [N], to be differentiated.

        Particle k of step t + 1 has the ancestor a[t, k]. Its baseline is independent of that
        choice: for the next increment, the same without particle k; for each later one, the mean
        increment until t.
        """
        increments = torch.stack([step.increment for step in steps]).detach()
        steps_left = torch.ones_like(increments) if real is None else real[..., 0].to(increments)
        after = increments.flip(0).cumsum(0).flip(0)  # the sum from each step on
        left = steps_left.flip(0).cumsum(0).flip(0)
        rate = increments.cumsum(0) / steps_left.cumsum(0)
        total: Tensor | None = None
        for t, step in enumerate(steps[:-1]):
            assert step.ancestors is not None
            signal = self._without_each(steps[t + 1])
            if t + 2 < len(steps):
                signal = signal + (after[t + 2] - rate[t] * left[t + 2])
            log_p = step.log_weights.gather(0, step.ancestors)
            part = (torch.where(step.resampled, signal, 0.0) * log_p).sum(0)
            total = part if total is None else total + part
        return torch.zeros_like(increments[0]) if total is None else total

    def _without_each(self, step: ParticleStep) -> Tensor:
        """The increment of a step minus that of all particles but one, for each one, [K, N]."""
        k = self.plan.samples
        log_w = step.log_weights.detach()
        others = log_w.expand(k, *log_w.shape).masked_fill(
            torch.eye(k, dtype=torch.bool, device=log_w.device)[..., None], -math.inf
        )
        return math.log((k - 1) / k) - others.logsumexp(1)
