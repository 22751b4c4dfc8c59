"""Backward simulation: draws of the latents given all data, from the particles of a filter.

The lines of the last particles share few ancestors at early steps. Backward simulation draws each
path anew, from the last step to the first: particle k of step t is chosen with a probability
proportional to W_t[k] p(step t+1 | particle k), where p counts all factors that read step t. p must
be Markov in its latents: its factors read the step before, directly or by functions, and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributions as td
from torch import Tensor

from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.deterministic import Recurrence
from aevb.declare.evaluation_order import schedule
from aevb.declare.graph import Graph
from aevb.derive.axes import over_time
from aevb.estimate.batch import Batch, completed, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of, real_steps
from aevb.estimate.particle_filter import Filtered
from aevb.estimate.program import Program
from aevb.evidence.forward_pass import why_not_forward
from aevb.runtime.seeding import generator

AT_ONCE = 2**20  # pairs of particles and paths, times their width, at once: they fit into a cache


def why_not_markov(model: DeclaredModel, batch: Mapping[str, Tensor]) -> str | None:
    """Return why p is not Markov in its latents; None if it is."""
    graph = model.graph
    clamped, _ = split_latents(graph, batch)
    unknown = [name for name in graph.latents if name not in clamped]
    if (reason := why_not_forward(graph)) is not None:
        return reason
    static = next((name for name in unknown if not graph.timed[name]), None)
    if static is not None:
        return f"the latent {static} has no time axis"
    for name in sorted(completed(graph, batch)):
        return f"p reads {name}, which has missing entries"
    for name in _functions(graph, unknown):
        if isinstance(model.factors[graph.rule("p", name).id], Recurrence):
            return f"{name} is a recurrence that remembers latents"
        if "first" in graph.p[name]:
            return f"{name} has a rule of its own for the first step"
    found = _lags(graph, unknown)
    if found is None:
        return "a function of the latents reads its own past"
    for name in graph.stochastic:
        for entry in graph.p[name].values():
            for ref in entry.key.parents:
                lags = {ref.lag + lag for lag in found.get(ref.name, ())}
                if any(lag < -1 for lag in lags):
                    return f'"{entry.key}" reads more than one step back'
                if lags and ref.at == "first":
                    return f'"{entry.key}" reads {ref}, the first step'
    return None


def _functions(graph: Graph, unknown: Sequence[str]) -> list[str]:
    """Return p's deterministic nodes that depend on unknown latents."""
    found: list[str] = []
    more = True
    while more:
        new = [
            name
            for name in graph.p
            if graph.is_deterministic(name)
            and name not in found
            and any(ref.name in (*unknown, *found) for ref in graph.reads("p", name))
        ]
        found, more = found + new, bool(new)
    return found


def _lags(graph: Graph, unknown: Sequence[str]) -> dict[str, set[int]] | None:
    """Return at which lags each variable depends on unknown latents; None if without bound."""
    found: dict[str, set[int]] = {name: {0} for name in unknown}
    functions = _functions(graph, unknown)
    for _ in range(len(functions) + 2):
        before = {name: set(lags) for name, lags in found.items()}
        for name in functions:
            lags = {
                ref.lag + lag for ref in graph.reads("p", name) for lag in found.get(ref.name, ())
            }
            found[name] = found.get(name, set()) | lags
        if found == before:
            return found
    return None


def simulated(
    model: DeclaredModel, batch: Batch, run: Filtered, names: Sequence[str], chosen: Tensor
) -> dict[str, Tensor]:
    """Draw paths of the latents given all data, [S, T, N, d] each.

    ``run`` is a filter that recorded ``names``, and ``chosen`` [S, N] are its last particles from
    which the paths start.
    """
    weights, steps = run.weights_then, model._extent(batch)[1]
    assert weights is not None
    pairs = _Pairs(model, batch, names)
    real = real_steps(batch)
    index = chosen
    current = {name: _taken(run.history[name][steps - 1], index) for name in names}
    paths = {name: [current[name]] for name in names}
    for t in range(steps - 2, -1, -1):
        every = {name: run.history[name][t] for name in names}  # [K, 1, N, d]
        drawn = pairs.drawn(t, every, current, weights[t])
        if real is not None:  # a row that ends here or earlier keeps its last particle
            drawn = torch.where(real[t + 1, :, 0], drawn, index)
        index = drawn
        current = {name: _taken(every[name], index) for name in names}
        for name in names:
            paths[name].append(current[name])
    return {name: torch.stack(each[::-1], 1) for name, each in paths.items()}


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """Select particles: [K, 1, N, d] and [S, N] → [S, N, d]."""
    return values[:, 0].gather(0, index.unsqueeze(-1).expand(*index.shape, values.shape[-1]))


class _Pairs:
    """log p of a step t+1 for each pair of a particle of step t and a path at step t+1."""

    def __init__(self, model: DeclaredModel, batch: Batch, names: Sequence[str]) -> None:
        self.model, self.graph, self.batch, self.names = model, model.graph, batch, names
        graph = model.graph
        self.steps = model._extent(batch)[1]
        self.functions = _functions(graph, names)
        lags = _lags(graph, names) or {}
        self.factors = [
            name
            for name in graph.stochastic
            if graph.timed[name]
            and any(
                ref.lag + lag == -1
                for ref in graph.reads("p", name)
                for lag in lags.get(ref.name, ())
            )
        ]
        # Their parameters depend on step t alone; those of the others on the path's step t+1 too.
        self.alone = [
            name
            for name in self.factors
            if {ref.lag + lag for ref in graph.reads("p", name) for lag in lags.get(ref.name, ())}
            == {-1}
        ]
        self.joint = [name for name in self.factors if name not in self.alone]
        self.width = sum(graph.size(name) for name in (*names, *self.functions, *self.factors))
        whole = Program(graph, model.factors, batch, steps=self.steps)
        whole.values |= {
            name: batch[name]
            for name in (*graph.observed, *graph.given, *graph.latents)
            if name in batch and name not in names
        }
        outside = {
            name: graph.reads("p", name)
            for name in graph.p
            if graph.is_deterministic(name) and name not in self.functions
        }
        whole.run(schedule(outside, "p"), lambda *_: torch.zeros(()))
        self.outside = dict(whole.values)

    def drawn(
        self, t: int, every: Mapping[str, Tensor], current: Mapping[str, Tensor], weight: Tensor
    ) -> Tensor:
        """Draw a particle of step t for each path, [S, N]."""
        samples, k = len(next(iter(current.values()))), len(weight)
        ahead = self._parameters(t, every)
        block = max(1, AT_ONCE // (k * weight.shape[1] * self.width))
        found = []
        for start in range(0, samples, block):
            some = {name: value[start : start + block] for name, value in current.items()}
            logits = weight.unsqueeze(1) + self._log_p(t, every, some, ahead)  # [K, S, N]
            found.append(_drawn_by(logits))
        return torch.cat(found)

    def _log_p(
        self,
        t: int,
        every: Mapping[str, Tensor],
        current: Mapping[str, Tensor],
        ahead: Mapping[str, tuple[Conditional, td.Distribution]],
    ) -> Tensor:
        """Return Σ log p of the factors of step t+1 that read step t, [K, S, N]."""
        graph = self.graph
        parts = [
            self._of_paths(name, t, current, *distribution) for name, distribution in ahead.items()
        ]
        if self.joint:
            before = {name: value.unsqueeze(1) for name, value in every.items()}  # [K, 1, 1, N, d]
            after = {name: value[None, :, None] for name, value in current.items()}
            program = self._program(t, before, after)
            for name in self.joint:
                present = program.batch.get(mask_of(name)) if name in graph.observed else None
                part = program.log_prob("p", name, program.values[name], present)
                parts.append(over_time(part, 2).narrow(-3, 1, 1))
        first = next(iter(current.values()))
        shape = (len(next(iter(every.values()))), len(first), 1, first.shape[-2], 1)
        total = torch.zeros((), dtype=torch.float64, device=first.device)
        for part in parts:
            total = total + part.double()
        return total.expand(shape)[:, :, 0, :, 0]

    def _parameters(
        self, t: int, every: Mapping[str, Tensor]
    ) -> dict[str, tuple[Conditional, td.Distribution]]:
        """Return the distributions at step t+1 whose parameters depend on step t alone.

        A network then runs once for each particle, and not for each pair.
        """
        if not self.alone:
            return {}
        before = {name: value.unsqueeze(1) for name, value in every.items()}
        program = self._program(t, before, before)  # no factor of these reads step t+1
        found = {}
        for name in self.alone:
            entry = program.entry("p", name, "all")
            factor = self.model.factors[entry.id]
            assert isinstance(factor, Factor)
            raw = over_time(program.raw(entry), 2).narrow(-3, 1, 1)
            found[name] = factor.spec, factor.distribution(raw)
        return found

    def _of_paths(
        self,
        name: str,
        t: int,
        current: Mapping[str, Tensor],
        spec: Conditional,
        distribution: td.Distribution,
    ) -> Tensor:
        """Return log p of a variable at step t+1, [K, S or 1, 1, N, 1]."""
        known = None
        if name in current:
            value = current[name][None, :, None]  # [1, S, 1, N, d]
        else:
            value = _step(self.batch[name], t + 1, self.steps)
            present = self.batch.get(mask_of(name))
            known = None if present is None else _step(present, t + 1, self.steps)
            if known is not None and spec.fill:
                value = torch.where(known, value, torch.full_like(value, spec.fill))
        return spec.log_prob(distribution, value, known).unsqueeze(-1)

    def _program(
        self, t: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Program:
        """Return p's values at steps t and t+1, with these values of the latents."""
        graph = self.graph
        two = {
            key: value[t : t + 2] if len(value) == self.steps else value
            for key, value in self.batch.items()
        }
        two.pop("steps", None)
        program = Program(graph, self.model.factors, two, steps=2)
        for name, value in self.outside.items():
            timed = graph.timed[name]
            program.values[name] = over_time(value, self.steps).narrow(-3, t, 2) if timed else value
        for name in self.names:
            both = torch.broadcast_tensors(before[name], after[name])
            program.values[name] = torch.cat(both, -3)
        reads = {name: graph.reads("p", name) for name in self.functions}
        program.run(schedule(reads, "p"), lambda *_: torch.zeros(()))
        return program


def _step(value: Tensor, t: int, steps: int) -> Tensor:
    """Return step t of data [T or 1, N, d], as [1, N, d]."""
    return value[t : t + 1] if len(value) == steps else value


def _drawn_by(logits: Tensor) -> Tensor:
    """Draw a particle for each path by unnormalised log-weights [K, S, N] → [S, N]."""
    edges = (logits - logits.amax(0)).permute(1, 2, 0).exp().cumsum(-1).contiguous()
    uniform = torch.rand(edges.shape[:2], generator=generator(edges.device), dtype=edges.dtype)
    index = torch.searchsorted(edges, uniform.to(edges.device).unsqueeze(-1) * edges[..., -1:])
    return index.squeeze(-1).clamp_max(len(logits) - 1)
