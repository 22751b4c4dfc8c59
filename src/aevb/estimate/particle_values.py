"""The values of K particles per row at one step, and their computation from those a step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
import torch.distributions as td
from torch import Tensor, nn

from aevb.compiled_step.gradients import weights_fixed
from aevb.declare.conditionals import Factor
from aevb.declare.deterministic import Recurrence
from aevb.derive.plan import Plan
from aevb.estimate import noise as noises
from aevb.estimate.bound import sample_with_seed
from aevb.estimate.keys import mask_of
from aevb.estimate.metric_names import kl_term, latent_of
from aevb.estimate.particle_reading import At, State, StepReader, at_step, choose
from aevb.runtime.seeding import draw_from
from aevb.runtime.shapes import broadcast_shapes

Terms = dict[str, Tensor]  # log p, and log q − log p of latents, by the names of a bound's terms


class ParticleDensities(Protocol):
    """Computes the densities of all steps after the loop; ``add`` gives it the values of a step."""

    def add(self, values: ParticleValues, t: int) -> None: ...


class ParticleValues(StepReader):
    """The values of K particles per row of a batch, at the current step; they advance by steps."""

    def __init__(
        self,
        plan: Plan,
        factors: Mapping[str, nn.Module] | nn.ModuleDict,
        batch: Mapping[str, Tensor],
        count: int,
        noise: Mapping[str, Tensor] | None,
    ) -> None:
        super().__init__(plan, factors, batch, count, noise)
        self.densities: ParticleDensities | None = None  # computes the terms' gradients later
        static = [name for name in self.graph.stochastic if not self.graph.timed[name]]
        self.late = [name for name in static if self._reads_steps(name)]
        self.read_later = self._read_later()

    def _read_later(self) -> set[str]:
        """The values that a later step reads; all other values are computed anew before."""
        found = {name for name, timed in self.graph.timed.items() if not timed}
        for entry in self.graph.entries():
            # A recurrence reads itself from its state.
            own = entry.key.name if isinstance(self.factors[entry.id], Recurrence) else None
            found |= {ref.name for ref in entry.key.parents if ref.lag and ref.name != own}
            found |= {f"{ref.name}[0]" for ref in entry.key.parents if ref.at == "first"}
        return found

    def _reads_steps(self, name: str) -> bool:
        """Return whether p's factor of a static variable reads a sampled sequence.

        Its weight can then be computed at the last step only.
        """
        frontier, seen = [name], {name}
        while frontier:
            for ref in self.graph.reads("p", frontier.pop()):
                if self.graph.timed[ref.name] and self._carried(ref.name):
                    return True
                if ref.name not in seen and self.graph.is_deterministic(ref.name):
                    seen.add(ref.name)
                    frontier.append(ref.name)
        return False

    # A step ---------------------------------------------------------------------------------------

    def advance(self, t: int) -> Terms:
        """Compute all values of step t, and return its terms, each [K or 1, 1, N or 1, 1].

        The terms of padded steps are zero. Static variables have their terms at the first step, or
        at the last one if they read the sequence.
        """
        self.before = {name: value for name, value in self.now.items() if name in self.graph.timed}
        now, states = self.now, self.states
        self.now, self.states, self._here = dict(now), dict(states), {}
        terms = self._advance(t)
        self._keep_ended(now, states, t)
        if t == 0:
            self.now |= {
                f"{name}[0]": value for name, value in self.now.items() if self.graph.timed[name]
            }
        terms = {
            name: self._only_real(term, t) if self.graph.timed[latent_of(name) or name] else term
            for name, term in terms.items()
        }
        if t == self.steps - 1:
            for name in self.late:
                self._add_log_p(terms, name, t)
        if self.densities is not None:
            self.densities.add(self, t)
        return terms

    def _advance(self, t: int) -> Terms:
        """Compute the nodes of a step, and draw the latents from q."""
        terms: Terms = {}
        for name in self.nodes:
            if not self.graph.timed[name] and t:
                continue
            if self.graph.is_deterministic(name):
                value = self._deterministic(name, t)
            elif name in self.plan.completed:
                value = self._complete(name, t)
            else:
                value, terms[kl_term(name)] = self._draw_latent(name, t)
            self.now[name] = value.expand(self.k, 1, self.n, -1)
        for name in self.graph.stochastic:
            if self.graph.timed[name] or (t == 0 and name not in self.late):
                self._add_log_p(terms, name, t)
        return terms

    def _keep_ended(self, now: dict[str, Tensor], states: dict[str, State], t: int) -> None:
        """Let a row that has ended keep its values and states."""
        if not t or self.real is None:
            return
        real = self.real.narrow(0, t, 1)
        for name, value in self.now.items():
            if value is not now[name]:
                self.now[name] = torch.where(real, value, now[name])
        for name, state in self.states.items():
            if state is not states[name]:
                self.states[name] = choose(real, state, states[name])

    def pick(self, index: Tensor) -> None:
        """Let particle k of row n continue particle ``index[k, n]``."""
        rows = rows_of(index)
        self.now = {
            name: picked(value, rows) if name in self.read_later else value
            for name, value in self.now.items()
        }
        self.states = {
            name: tuple(picked(part, rows) for part in state) for name, state in self.states.items()
        }

    # Terms ----------------------------------------------------------------------------------------

    def _add_log_p(self, terms: Terms, name: str, t: int) -> None:
        """Add log p of a variable to a step's terms, without its missing entries.

        log p of a latent is a part of its KL term where it is drawn, and a term of its own where it
        is known.
        """
        latent = name in self.plan.choices
        seen = self.batch.get(mask_of(name))
        present = None if seen is None else at_step(seen, t)
        with self._without_gradient(name):
            log_p = self._log_prob(
                self._distributions("p", name, t),
                self._value(name, t),
                None if latent else present,
                self._real_at(t) if self.graph.timed[name] else None,
            )
        if not latent:
            terms[name] = log_p
            return
        log_q = terms.pop(kl_term(name), None)
        kl = -log_p if log_q is None else log_q - log_p
        terms |= terms_of_latent(name, kl, log_p, present)

    def _without_gradient(self, name: str) -> AbstractContextManager[Any]:
        """Compute a density without a gradient if the gradient is computed later for all steps."""
        if self.densities is None or not self.graph.timed[name]:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(weights_fixed())
        return stack

    def _only_real(self, term: Tensor, t: int) -> Tensor:
        real = self._real_at(t)
        return term if real is None else torch.where(real, term, torch.zeros_like(term))

    def _real_at(self, t: int) -> Tensor | None:
        return None if self.real is None else self.real.narrow(0, t, 1)

    def _log_prob(
        self,
        parts: Sequence[At],
        value: Tensor,
        present: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """log p or log q of a value under the entries that apply.

        Entries that do not count (missing, padded, or ruled by another entry) are first replaced by
        a value within the support.
        """
        total: Tensor | None = None
        for _, factor, dist, rows, _ in parts:
            own = rows if rows is not None or len(parts) == 1 else ~parts[1].rows  # type: ignore[operator]
            here = value
            for counts in (present, real, own):
                here = (
                    here
                    if counts is None
                    else torch.where(counts, here, torch.full_like(here, factor.spec.fill))
                )
            part = factor.spec.log_prob(dist, here, present).unsqueeze(-1)
            total = part if total is None or rows is None else torch.where(rows, part, total)
        assert total is not None
        return total

    # Draws ----------------------------------------------------------------------------------------

    def _draw_latent(self, name: str, t: int) -> tuple[Tensor, Tensor]:
        """Draw a latent from q, keep its known values, and return the value and log q."""
        value = self._draw("q", name, t)
        seen = self.batch.get(mask_of(name))
        known = None if seen is None else at_step(seen, t)
        if known is not None:
            value = torch.where(known, at_step(self.batch[name], t), value)
        parts = self._distributions("q", name, t)
        with self._without_gradient(name):
            log_q = self._log_prob(parts, value)
        if known is not None:
            log_q = torch.where(known[..., :1], torch.zeros_like(log_q), log_q)
        return value, log_q

    def _complete(self, name: str, t: int) -> Tensor:
        """Return an observed variable, its missing entries drawn from p given the known ones."""
        value, known = at_step(self.batch[name], t), self.batch.get(mask_of(name))
        if known is None:
            return value
        present = at_step(known, t)
        return torch.where(present, value, self._draw("p", name, t, value, present))

    def _draw(
        self,
        side: str,
        name: str,
        t: int,
        given: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Tensor:
        """Draw a variable from q or p, given its ``present`` entries if there are some."""
        drawn: Tensor | None = None
        for entry, factor, dist, rows, _ in self._distributions(side, name, t):
            if given is not None and present is not None:
                dist = factor.spec.given_known(dist, given, present)
            part = self._sample(self.plan.noise_keys.get(entry.id, name), factor, dist, t)
            drawn = part if drawn is None or rows is None else torch.where(rows, part, drawn)
        assert drawn is not None
        return drawn

    def _sample(self, key: str, factor: Factor, dist: td.Distribution, t: int) -> Tensor:
        spec, lead = factor.spec, (self.k, 1, self.n)
        kind = spec.noise(factor.d)
        if self.noise is not None:
            noise = self._noise_at(key, t)
            if kind is not None:
                return spec.reparametrise(dist, noise)
            return sample_with_seed(_widened(dist, lead), noise + t)
        if kind is not None:
            noise = noises.draw_one(
                kind[0], (*lead, kind[1]), None, self.like.device, self.like.dtype
            )
            return spec.reparametrise(dist, noise)
        return draw_from(_widened(dist, lead))

    def _noise_at(self, key: str, t: int) -> Tensor:
        assert self.noise is not None
        noise = self.noise[key]
        if noise.dim() == 0:
            return noise
        return self._slices(f"noise of {key}", lambda: noise)[t]


def terms_of_latent(name: str, kl: Tensor, log_p: Tensor, known: Tensor | None) -> Terms:
    """Return log q − log p of a latent where it is drawn, and log p where its value is known."""
    if known is None:
        return {kl_term(name): kl}
    zero, known = torch.zeros_like(kl), known[..., :1]
    return {kl_term(name): torch.where(known, zero, kl), name: torch.where(known, log_p, zero)}


def rows_of(index: Tensor) -> Tensor:
    """Return the particles ``index`` [K, N] as rows of K · N values."""
    n = index.shape[1]
    return (index * n + torch.arange(n, device=index.device)).reshape(-1)


def picked(value: Tensor, rows: Tensor) -> Tensor:
    """Return the values [K, 1, N, d] of the particles ``rows``."""
    return value.reshape(-1, value.shape[-1]).index_select(0, rows).view(value.shape)


def _widened(dist: td.Distribution, lead: tuple[int, int, int]) -> td.Distribution:
    """Expand a distribution so that each particle has its own."""
    event = 1 if dist.event_shape else 0
    shape = dist.batch_shape if event else dist.batch_shape[:-1]
    wide = broadcast_shapes(shape, lead)
    return dist.expand(wide if event else (*wide, dist.batch_shape[-1]))
