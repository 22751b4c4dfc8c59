"""A particle filter over a declared model, with q as the proposal.

A particle is one draw of all latents up to step t, with the recurrent states that depend on them.
At each step it is weighted by p(x[t], z[t] | past) / q(z[t] | ·). Where the weights of a row become
too unequal, its particles are resampled in proportion to their weights. The product over steps of
the mean weights is an unbiased estimate of p(x) for every q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from aevb.derive.dependence import S
from aevb.derive.filtering import why_not_filtered
from aevb.derive.noise_names import RESAMPLING
from aevb.derive.plan import Plan, derive
from aevb.estimate.batch import completed, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.metric_names import latent_of
from aevb.estimate.particle_reading import State
from aevb.estimate.particle_values import ParticleValues, Terms
from aevb.estimate.resampling import effective_sample_size, multinomial, normalised, systematic
from aevb.runtime.seeding import generator


@dataclass(frozen=True)
class ParticleStep:
    """One step of a particle filter of K particles on N rows.

    ``log_weights`` are normalised, and ``values`` are those of before resampling. Particle k of the
    next step continues particle ``ancestors[k, n]`` of this one; None if no row is resampled.
    ``increment`` is log Σ_k W[t−1] w[t], an estimate of log p(x[t] | x[0…t−1]); it is zero after a
    row's end.
    """

    t: int
    increment: Tensor  # [N]
    log_weights: Tensor  # [K, N]
    ess: Tensor  # effective sample size, [N]
    values: Mapping[str, Tensor]  # by variable, [K, 1, N, d]
    terms: Terms  # log p, and log q − log p of the latents, [K or 1, 1, N or 1, 1]
    ancestors: Tensor | None  # [K, N]
    resampled: Tensor  # the rows that are resampled after this step, [N]


@dataclass(frozen=True)
class Filtered:
    """The result of a particle filter.

    ``value`` estimates log p(x) per row. ``log_weights`` are the normalised weights of the last
    particles, whose values and recurrent states are ``values`` and ``states``; a static variable
    has its one value, and rows that end earlier keep those of their own last step. The recorded
    variables have their values at every step in ``history``, [T, K, 1, N, d]; ``weights_then`` and
    ``ancestors``, [T, K, N], are those of :class:`ParticleStep` (the last step has no ancestors).
    """

    value: Tensor  # [N]
    increments: Tensor  # [T, N]
    log_weights: Tensor  # [K, N]
    ess: Tensor  # lowest effective sample size of all steps, [N]
    resampled: Tensor  # share of steps after which a row was resampled, [N]
    values: Mapping[str, Tensor]
    states: Mapping[str, State]
    history: Mapping[str, Tensor] = field(default_factory=dict)
    weights_then: Tensor | None = None
    ancestors: Tensor | None = None

    def paths(self, name: str) -> Tensor:
        """The recorded values along the lines of the last particles, [T, K, N, d].

        With ``log_weights`` they are draws of the whole sequence given all data.
        """
        if name not in self.history or self.ancestors is None:
            recorded = ", ".join(self.history) or "nothing"
            raise ValueError(
                f"The filter recorded {recorded}. Run it with record=({name!r},) to follow the "
                f"values of {name}."
            )
        whole = self.history[name]
        index = torch.arange(whole.shape[1], device=whole.device).unsqueeze(-1)
        index = index.expand_as(self.log_weights)
        found = []
        for t in range(len(whole) - 1, -1, -1):
            index = index if t == len(whole) - 1 else self.ancestors[t].gather(0, index)
            shape = (*index.shape, whole.shape[-1])
            found.append(whole[t, :, 0].gather(0, index.unsqueeze(-1).expand(shape)))
        return torch.stack(found[::-1])


class ParticleFilter:
    """K particles per row of a batch, proposed by q step by step, weighted by p, and resampled.

    ``for step in ParticleFilter(…)`` yields a :class:`ParticleStep` for every step, and ``run()``
    returns a :class:`Filtered`. Build a new filter for every run. It is differentiable, and a pure
    function of parameters, batch and ``noise`` if that is given (``plan.layout``). With
    ``noise=None`` it draws its own random numbers, from the seed of the surrounding code, and takes
    the shortcut of not resampling a step that no row needs.

    A row is resampled where its effective sample size is below ``threshold`` · K: never with 0, at
    every step with 1.

    - *Ragged rows* have a mask ``steps`` in the batch. After its end, a row keeps its particles.
    - *Missing entries* of an observed variable leave the weight. If p reads the variable (its own
      past, for instance), the plan must list it as ``completed``: its missing entries are then
      drawn from p for every particle, given the known entries of the step. q reads them as zeros.
    - *Known latents* (a mask in the batch) keep their values and add log p to the weight.

    :meth:`of` builds a filter of a model for use after training.
    """

    def __init__(
        self,
        plan: Plan,
        factors: Mapping[str, nn.Module] | nn.ModuleDict,
        batch: Mapping[str, Tensor],
        noise: Mapping[str, Tensor] | None = None,
        *,
        threshold: float = 0.5,
        particles: int | None = None,
        log_weight: Callable[[Terms], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``log_weight`` makes a weight of a step's terms, by default Σ log p − Σ (log q − log p).

        ``particles`` is K, by default the samples of the plan. ``dtype`` is that of the weights, by
        default that of the batch.
        """
        self.k = plan.samples if particles is None else particles
        self.values = ParticleValues(plan, factors, batch, self.k, noise)
        self.noise, self.threshold = noise, threshold
        self.log_weight = log_weight or log_weight_of
        self.dtype = dtype or self.values.like.dtype
        self.resample = multinomial if plan.gradient == "score" else systematic

    @classmethod
    def of(
        cls,
        model: DeclaredModel,
        batch: Mapping[str, Tensor],
        particles: int,
        *,
        threshold: float = 0.5,
    ) -> ParticleFilter:
        """Build a filter that draws every latent from q, with weights in double precision.

        Run it inside ``model._evaluating(seed)``, without gradients and dropout. Missing entries
        that p reads are drawn from p.
        """
        clamped, partial = split_latents(model.graph, batch)
        drawn_by_p = completed(model.graph, batch)
        plan = derive(
            model.graph,
            samples=max(2, particles),
            clamped=clamped,
            partial=partial,
            sampling=True,
            completed=drawn_by_p,
        )
        carried = {name for name, axes in plan.values.items() if S in axes}
        if reason := why_not_filtered(model.graph, carried, drawn_by_p):
            raise ValueError(f"A particle filter does not apply to this model: {reason}.")
        return cls(
            plan,
            model.factors,
            batch,
            threshold=threshold,
            particles=particles,
            dtype=torch.float64,
        )

    def __iter__(self) -> Iterator[ParticleStep]:
        """Run the filter, step by step."""
        values, k, n = self.values, self.k, self.values.n
        even = torch.full((k, n), -math.log(k), dtype=self.dtype, device=values.like.device)
        log_w = even
        for t in range(values.steps):
            terms = values.advance(t)
            new = self.log_weight(terms).to(self.dtype)
            log_w, increment = normalised(log_w + new.expand(k, 1, n, 1).reshape(k, n))
            ess = effective_sample_size(log_w.detach())
            ancestors, chosen = self._ancestors(log_w, ess, t)
            yield ParticleStep(t, increment, log_w, ess, values.now, terms, ancestors, chosen)
            if ancestors is not None:
                values.pick(ancestors)
                log_w = torch.where(chosen, even, log_w)

    def _ancestors(self, log_w: Tensor, ess: Tensor, t: int) -> tuple[Tensor | None, Tensor]:
        """The particles that the next step continues, and the rows that are resampled."""
        values, k = self.values, self.k
        chosen = torch.zeros_like(ess, dtype=torch.bool)
        if t == values.steps - 1 or not self.threshold or k == 1:
            return None, chosen
        chosen = ess < self.threshold * k if self.threshold < 1 else torch.ones_like(chosen)
        if values.real is not None:  # a row that has ended keeps its particles
            chosen = chosen & values.real[t + 1, :, 0]
        if self.noise is None and not bool(chosen.any()):
            return None, chosen
        drawn = self.resample(log_w.detach(), self._uniform(log_w, t))
        itself = torch.arange(k, device=log_w.device).unsqueeze(-1)
        return torch.where(chosen, drawn, itself), chosen

    def _uniform(self, log_w: Tensor, t: int) -> Tensor:
        """The random numbers of a resampling: one per row, or one per particle."""
        alone = self.resample is systematic
        if self.noise is not None:
            found = self.noise[RESAMPLING].narrow(-3, t, 1).to(log_w.dtype)
            return found.reshape(-1) if alone else found.reshape(self.k, -1)
        shape = log_w.shape[1:] if alone else log_w.shape
        return torch.rand(
            shape, dtype=log_w.dtype, device=log_w.device, generator=generator(log_w.device)
        )

    def run(self, record: Sequence[str] = ()) -> Filtered:
        """Run the filter over all steps; ``record`` names variables whose values to keep."""
        increments, ess, resampled = [], [], []
        weights: list[Tensor] = []
        lines: list[Tensor] = []
        kept: dict[str, list[Tensor]] = {name: [] for name in record}
        last = itself = torch.arange(self.k, device=self.values.like.device).unsqueeze(-1)
        for step in self:
            increments.append(step.increment)
            ess.append(step.ess)
            resampled.append(step.resampled.to(self.dtype))
            last = step.log_weights
            if record:
                weights.append(last)
                same = itself.expand_as(last)
                lines.append(same if step.ancestors is None else step.ancestors)
            for name, values in kept.items():
                values.append(self._whole(name, step))
        return Filtered(
            value=torch.stack(increments).sum(0),
            increments=torch.stack(increments),
            log_weights=last,
            ess=torch.stack(ess).amin(0),
            # No step follows the last one.
            resampled=torch.stack(resampled).sum(0) / max(1, len(resampled) - 1),
            values={name: value for name, value in self.values.now.items() if "[" not in name},
            states=self.values.states,
            history={name: torch.stack(values) for name, values in kept.items()},
            weights_then=torch.stack(weights) if record else None,
            ancestors=torch.stack(lines) if record else None,
        )

    def _whole(self, name: str, step: ParticleStep) -> Tensor:
        """A variable's values at a step, [K, 1, N, d]; those of data are the same in all."""
        value = step.values.get(name)
        if value is None:
            value = self.values._value(name, step.t)
        return value.expand(self.k, 1, self.values.n, value.shape[-1])


def log_weight_of(terms: Terms) -> Tensor:
    """Return Σ log p − Σ (log q − log p) of a step's terms."""
    total: Tensor | None = None
    for name, term in terms.items():
        part = term if latent_of(name) is None else -term
        total = part if total is None else total + part
    assert total is not None  # every step has an observed variable
    return total
