"""Particles of a sequence model: proposed by q step by step, weighted by p, and resampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributions as td
from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.declare.deterministic import Function, Recurrence
from aevb.declare.graph import Entry
from aevb.declare.notation import Ref
from aevb.derive.axes import over_time
from aevb.derive.dependence import S
from aevb.derive.plan import Plan, derive
from aevb.estimate import noise as noises
from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.evidence.weights import tail_length, tail_shape
from aevb.runtime.seeding import draw_from, generator


class Filtered(NamedTuple):
    """log p(x) per row, [N], with diagnostics."""

    value: Tensor
    ess: Tensor  # lowest effective sample size of all steps, [N]
    khat: Tensor  # Pareto k of the weights of each step, [T, N]
    resampled: Tensor  # share of steps after which particles were resampled, [N]


class Swarm:
    """K particles per row of a batch.

    Quantities that depend on data only are computed for all steps beforehand; particles advance
    step by step.
    """

    def __init__(
        self, model: DeclaredModel, batch: Mapping[str, Tensor], particles: int, threshold: float
    ) -> None:
        self.model, self.graph, self.batch = model, model.graph, batch
        self.k, self.threshold = particles, threshold
        self.n, self.steps = model._extent(batch)
        clamped, partial = split_latents(self.graph, batch)
        self.plan: Plan = derive(
            self.graph, samples=max(2, particles), clamped=clamped, partial=partial, sampling=True
        )
        self.program = Program(
            self.graph,
            model.factors,
            batch,
            steps=self.steps,
            q_draws=frozenset(self.plan.choices),
        )
        self.program.values |= {
            name: batch[name] for name in (*self.graph.observed, *self.graph.given, *clamped)
        }
        outside = [
            stage
            for stage in self.plan.stages
            if not any(S in self.plan.values[node] for node in stage.nodes)
        ]
        self.program.run(outside, lambda *_: torch.zeros(()))
        self.nodes = [
            node for stage in self.plan.stages if stage not in outside for node in stage.nodes
        ]
        # The values at the current step (static nodes: one value), [K, 1, N, d].
        self.now: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}  # values at the previous step
        self.states: dict[str, tuple[Tensor, ...]] = {}
        self._outer: dict[tuple[str, str], tuple[Tensor, Tensor | None]] = {}
        self.like = model._parameter()

    # Reading --------------------------------------------------------------------------------------

    def _carried(self, name: str) -> bool:
        return S in self.plan.values[name]

    def _input(self, entry: Entry, ref: Ref, t: int) -> Tensor:
        if not self._carried(ref.name):
            return self._whole(entry, ref)[0].narrow(0, t, 1)
        if ref.at == "last" or (entry.key.at in ("first", "last") and not ref.lag):
            return self.now[ref.name]
        if ref.at == "first":
            return self.now[f"{ref.name}[0]"]
        if not ref.lag:
            return self.now[ref.name]
        return (
            self.before[ref.name]
            if t
            else torch.zeros(
                1, 1, self.graph.size(ref.name), dtype=self.like.dtype, device=self.like.device
            )
        )

    def _whole(self, entry: Entry, ref: Ref) -> tuple[Tensor, Tensor | None]:
        """Return a parent that depends on data only, at all steps, and its missing mask; cached."""
        key = (entry.id, ref.label)
        if key not in self._outer:
            value = self.program.read(ref, entry)
            missing = self.program.missing(entry, {ref.label: value}).get(ref.label)
            self._outer[key] = (
                over_time(value, self.steps),
                None if missing is None else over_time(missing, self.steps),
            )
        return self._outer[key]

    def _inputs(self, entry: Entry, t: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        own = entry.key.name if isinstance(self.model.factors[entry.id], Recurrence) else None
        refs = [ref for ref in entry.key.parents if ref.name != own]
        missing = {
            ref.label: mask.narrow(0, t, 1)
            for ref in refs
            if not self._carried(ref.name) and (mask := self._whole(entry, ref)[1]) is not None
        }
        return {ref.label: self._input(entry, ref, t) for ref in refs}, missing

    def _raw(self, entry: Entry, t: int) -> Tensor:
        inputs, missing = self._inputs(entry, t)
        return self.model.factors[entry.id](inputs, (), missing)

    def _at(self, value: Tensor, t: int) -> Tensor:
        return value if value.shape[0] == 1 else value.narrow(0, t, 1)

    def _entries(self, side: str, name: str, t: int) -> list[tuple[Entry, Tensor | None]]:
        """Return the entries of a variable at step t, each with its mask of rows (None: all)."""
        rules = self.graph.p[name] if side == "p" else self.graph.q[name]
        found: list[tuple[Entry, Tensor | None]] = [
            (rules["first"] if t == 0 and "first" in rules else rules[self.graph.main(name)], None)
        ]
        if "last" in rules:
            found.append((rules["last"], self.program.is_last().narrow(0, t, 1)))
        return found

    # Values ---------------------------------------------------------------------------------------

    def _distributions(
        self, side: str, name: str, t: int
    ) -> list[tuple[Factor, td.Distribution, Tensor | None]]:
        found = []
        for entry, where in self._entries(side, name, t):
            factor = self.model.factors[entry.id]
            assert isinstance(factor, Factor)
            found.append((factor, factor.distribution(self._raw(entry, t)), where))
        return found

    def _log_prob(
        self,
        dists: list[tuple[Factor, td.Distribution, Tensor | None]],
        value: Tensor,
        present: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Return log p of a value under the entries that apply.

        Entries that do not count (missing, padded, or ruled by another entry) are first replaced by
        a value within the support.
        """
        total: Tensor | None = None
        for factor, dist, where in dists:
            own, here = where if where is not None or len(dists) == 1 else ~dists[1][2], value  # type: ignore[operator]
            for counts in (present, real, own):
                here = (
                    here
                    if counts is None
                    else torch.where(counts, here, torch.full_like(here, factor.spec.fill))
                )
            part = factor.spec.log_prob(dist, here, present).unsqueeze(-1)
            total = part if total is None or where is None else torch.where(where, part, total)
        assert total is not None
        return total

    def _propose(self, name: str, t: int) -> tuple[Tensor, Tensor]:
        """Draw a latent from q, keep known values, and return the value and −log q."""
        dists, value = self._distributions("q", name, t), None
        for factor, dist, where in dists:
            part = self._sample(factor, dist)
            value = part if value is None or where is None else torch.where(where, part, value)
        assert value is not None
        log_q = self._log_prob(dists, value)
        seen = self.batch.get(mask_of(name))
        if seen is not None:
            here = self._at(seen, t)
            value, log_q = (
                torch.where(here, self._at(self.batch[name], t), value),
                torch.where(here[..., :1], torch.zeros_like(log_q), log_q),
            )
        return value, -log_q

    def _sample(self, factor: Factor, dist: td.Distribution) -> Tensor:
        lead = (self.k, 1, self.n)
        kind = factor.spec.noise(factor.d)
        if kind is not None:
            return factor.spec.reparametrise(
                dist,
                noises.draw_one(kind[0], (*lead, kind[1]), None, self.like.device, self.like.dtype),
            )
        event = 1 if dist.event_shape else 0
        batch_shape = dist.batch_shape if event else dist.batch_shape[:-1]
        wide = torch.broadcast_shapes(batch_shape, lead)
        return draw_from(dist.expand(wide if event else (*wide, dist.batch_shape[-1])))

    def _log_p(self, name: str, value: Tensor, t: int) -> Tensor:
        """Return log p of a variable at one step, without its missing entries."""
        present = self.batch.get(mask_of(name)) if name in self.graph.observed else None
        real = self._real(t) if self.program.real is not None and self.graph.timed[name] else None
        return self._log_prob(
            self._distributions("p", name, t),
            value,
            None if present is None else self._at(present, t),
            real,
        )

    def _real(self, t: int) -> Tensor:
        assert self.program.real is not None
        return self.program.real.narrow(0, t, 1)

    def _deterministic(self, name: str, t: int) -> Tensor:
        """Return a deterministic node's value at one step; a recurrence advances its state."""
        entries = self.graph.p.get(name) or self.graph.q[name]
        rule = entries[self.graph.main(name)]
        factor, last = (
            self.model.factors[rule.id],
            self.program.is_last().narrow(0, t, 1) if "last" in entries else None,
        )
        first = entries["first"] if t == 0 and "first" in entries else None
        inside = self.program._inside(rule) if self.graph.timed[name] and first is None else None
        # A function is zero where all its parents lie outside the sequence.
        inside = None if inside is None else inside.narrow(0, t, 1)
        if isinstance(factor, Recurrence):
            state = self.states.get(name) or factor.initial(self.like.new_zeros(1, 1, 1))
            if first is not None:
                state = factor.starting_from(self._function(first, t))
            else:
                inputs, missing = self._inputs(rule, t)
                _, new = factor.step(factor.first(inputs, missing=missing), state)
                state = new if inside is None else _choose(inside, new, state)
            if last is not None:
                state = _choose(
                    last, factor.starting_from(self._function(entries["last"], t)), state
                )
            self.states[name] = tuple(part.expand(self.k, 1, self.n, -1) for part in state)
            return self.states[name][factor.spec.layers - 1]
        value = self._function(first or rule, t)
        value = value if inside is None else torch.where(inside, value, torch.zeros_like(value))
        return (
            value if last is None else torch.where(last, self._function(entries["last"], t), value)
        )

    def _function(self, entry: Entry, t: int) -> Tensor:
        factor, raw = self.model.factors[entry.id], self._raw(entry, t)
        return factor.value(raw) if isinstance(factor, Function) else raw

    # Steps ----------------------------------------------------------------------------------------

    def run(self) -> Filtered:
        """Run the particle filter over all steps."""
        graph = self.graph
        log_w = torch.full(
            (self.k, self.n), -math.log(self.k), dtype=torch.float64, device=self.like.device
        )
        total, lowest, resampled = (
            log_w.new_zeros(self.n),
            log_w.new_full((self.n,), float(self.k)),
            log_w.new_zeros(self.n),
        )
        tails = []
        static = [name for name in graph.stochastic if not graph.timed[name]]
        late = [name for name in static if self._reads_steps(name)]
        for t in range(self.steps):
            self.before = {name: value for name, value in self.now.items() if graph.timed.get(name)}
            new = self._advance(t)
            for name in graph.stochastic:
                if graph.timed[name] or (t == 0 and name not in late):
                    new = new + self._log_p(
                        name,
                        self.now[name]
                        if self._carried(name)
                        else self._at(self.program.values[name], t),
                        t,
                    )
            if t == self.steps - 1:
                new = self._only_real(new, t)
                for name in late:
                    new = new + self._log_p(
                        name,
                        self.now[name] if self._carried(name) else self.program.values[name],
                        t,
                    )
            log_w, step, ess = _reweigh(
                log_w, self._only_real(new, t) if t < self.steps - 1 else new
            )
            total, lowest = total + step, torch.minimum(lowest, ess)
            tails.append(log_w.topk(tail_length(self.k) + 1, dim=0).values)
            if t < self.steps - 1:
                log_w, chosen = self._resample(log_w, ess)
                resampled = resampled + chosen
        khat = tail_shape(torch.cat(tails, 1), self.k).unflatten(0, (self.steps, self.n))
        return Filtered(total, lowest, khat, resampled / max(1, self.steps - 1))

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

    def _advance(self, t: int) -> Tensor:
        """Compute all nodes of step t; return −Σ log q of the draws.

        Static nodes are computed at the first step.
        """
        total = torch.zeros(1, 1, 1, dtype=self.like.dtype, device=self.like.device)
        for name in self.nodes:
            timed = self.graph.timed[name]
            if not timed and t:
                continue
            held = self.states.get(name)
            if self.graph.is_deterministic(name):
                value = self._deterministic(name, t)
            else:
                value, weight = self._propose(name, t)
                total = total + weight
            value = value.expand(self.k, 1, self.n, -1)
            if t and self.program.real is not None:  # a row that has ended keeps its values
                value = torch.where(self._real(t), value, self.now[name])
                if held is not None:
                    self.states[name] = _choose(self._real(t), self.states[name], held)
            self.now[name] = value
            if timed and t == 0:
                self.now[f"{name}[0]"] = value
        return total

    def _only_real(self, weight: Tensor, t: int) -> Tensor:
        if self.program.real is None:
            return weight
        return torch.where(self._real(t), weight, torch.zeros_like(weight))

    def _resample(self, log_w: Tensor, ess: Tensor) -> tuple[Tensor, Tensor]:
        """Resample rows with a low effective sample size, by systematic resampling.

        Other rows keep their particles and weights.
        """
        chosen = (
            ess < self.threshold * self.k
            if self.threshold < 1
            else torch.ones_like(ess, dtype=torch.bool)
        )
        if not bool(chosen.any()):
            return log_w, chosen.to(log_w.dtype)
        edges = log_w.exp().cumsum(0).T.contiguous()  # [N, K]
        start = torch.rand(
            self.n, 1, dtype=log_w.dtype, device=log_w.device, generator=generator(log_w.device)
        )
        places = (torch.arange(self.k, dtype=log_w.dtype, device=log_w.device) + start) / self.k
        index = torch.searchsorted(edges, places * edges[:, -1:]).clamp_max(self.k - 1).T  # [K, N]
        itself = torch.arange(self.k, device=log_w.device).unsqueeze(-1)
        index = torch.where(chosen, index, itself)

        def pick(value: Tensor) -> Tensor:
            return value.gather(
                0, index[:, None, :, None].expand(self.k, 1, self.n, value.shape[-1])
            )

        self.now = {name: pick(value) for name, value in self.now.items()}
        self.states = {
            name: tuple(pick(part) for part in state) for name, state in self.states.items()
        }
        return torch.where(chosen, torch.full_like(log_w, -math.log(self.k)), log_w), chosen.to(
            log_w.dtype
        )


def _choose(
    where: Tensor, these: tuple[Tensor, ...], those: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return tuple(torch.where(where, a, b) for a, b in zip(these, those, strict=True))


def _reweigh(log_w: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply weights by a step's weights and normalise.

    Returns the normalised log-weights, the log of the mean weight and the effective sample size.
    """
    k, n = log_w.shape
    log_w = log_w + new.double().expand(k, 1, n, 1).reshape(k, n)
    step = log_w.logsumexp(0)
    log_w = log_w - step
    return log_w, step, 1 / (2 * log_w).logsumexp(0).exp()
