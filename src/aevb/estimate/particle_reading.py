"""What a factor reads at one step of a particle filter, and the distribution it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributions as td
from torch import Tensor, nn

from aevb.declare.conditionals import Factor
from aevb.declare.deterministic import Function, Recurrence
from aevb.declare.graph import Entry
from aevb.declare.notation import Ref
from aevb.derive.axes import TIME, alike, steps_of
from aevb.derive.dependence import S
from aevb.derive.plan import Plan
from aevb.estimate.program import Program

State = tuple[Tensor, ...]


class At(NamedTuple):
    """A variable's distribution under one entry, and the rows [1, N, 1] it holds in (None: all)."""

    entry: Entry
    factor: Factor
    distribution: td.Distribution
    rows: Tensor | None
    raw: Tensor | None  # the output of the factor's network, if it differs between particles


class StepReader:
    """The values of K particles per row, and the distributions of the factors that read them.

    Values are [K or 1, 1, N, d]. Everything that depends on data only is computed beforehand, for
    all steps.
    """

    def __init__(
        self,
        plan: Plan,
        factors: Mapping[str, nn.Module] | nn.ModuleDict,
        batch: Mapping[str, Tensor],
        count: int,
        noise: Mapping[str, Tensor] | None,
    ) -> None:
        self.plan, self.graph, self.factors, self.batch = plan, plan.graph, factors, batch
        self.k, self.noise = count, noise
        self.n = next(iter(batch.values())).shape[-2]
        timed = [name for name in batch if self.graph.timed.get(name)]
        self.steps = batch[timed[0]].shape[TIME] if timed else 1
        self.like = next(value for value in batch.values() if value.is_floating_point())
        self.program = Program(
            self.graph,
            factors,
            batch,
            noise=noise,
            steps=self.steps,
            q_draws=frozenset(plan.choices),
        )
        self.program.values |= {
            name: batch[name] for name in (*self.graph.observed, *self.graph.given, *plan.clamped)
        }
        self.real = self.program.real
        self.nodes = self._compute_outside()
        # The values at the current step (static nodes: their one value), and under ``x[0]`` those
        # of the first step. Recurrent nodes also have a state.
        self.now: dict[str, Tensor] = {}
        self.states: dict[str, State] = {}
        self.before: dict[str, Tensor] = {}  # values at the previous step
        self._outer: dict[str, Sequence[Tensor] | None] = {}
        self._cut: dict[str, Sequence[Tensor]] = {}
        self._within: dict[str, Tensor | None] = {}  # by entry, the steps with parents inside
        self._here: dict[tuple[str, str], list[At]] = {}  # distributions at the current step

    def _compute_outside(self) -> list[str]:
        """Compute what depends on data only; return the other nodes, in q's order."""
        nodes: list[str] = []
        for stage in self.plan.stages:
            if any(S in self.plan.values[node] for node in stage.nodes):
                nodes += stage.nodes
                continue
            self.program.run([stage], lambda *_: torch.zeros(()))
        return nodes

    # Distributions and deterministic nodes --------------------------------------------------------

    def _distributions(self, side: str, name: str, t: int) -> list[At]:
        """The distributions of a variable at step t, one for each entry that holds in some row."""
        if (side, name) not in self._here:
            found = []
            for entry, rows in self._entries(side, name, t):
                factor = self.factors[entry.id]
                assert isinstance(factor, Factor)
                raw, own = self._raw(entry, t), self._reads_particles(entry)
                found.append(
                    At(entry, factor, factor.distribution(raw), rows, raw if own else None)
                )
            self._here[side, name] = found
        return self._here[side, name]

    def _entries(self, side: str, name: str, t: int) -> list[tuple[Entry, Tensor | None]]:
        """The entries of a variable at step t, each with its mask of rows (None: all)."""
        rules = self.graph.p[name] if side == "p" else self.graph.q[name]
        usual = rules["first"] if t == 0 and "first" in rules else rules[self.graph.main(name)]
        found: list[tuple[Entry, Tensor | None]] = [(usual, None)]
        if "last" in rules:
            found.append((rules["last"], self._is_last(t)))
        return found

    def _is_last(self, t: int) -> Tensor:
        return self._slices("last step", self.program.is_last)[t]

    def _deterministic(self, name: str, t: int) -> Tensor:
        """A deterministic node's value at a step; a recurrence advances its state."""
        entries = self.graph.p[name] if name in self.graph.p else self.graph.q[name]
        rule = entries[self.graph.main(name)]
        factor = self.factors[rule.id]
        last = self._is_last(t) if "last" in entries else None
        first = entries["first"] if t == 0 and "first" in entries else None
        inside = None  # a node is zero where all its parents lie outside the sequence
        if self.graph.timed[name] and first is None:
            if rule.id not in self._within:
                self._within[rule.id] = self.program._inside(rule)
            masks = self._within[rule.id]
            inside = None if masks is None else masks.narrow(0, t, 1)
        if isinstance(factor, Recurrence):
            state = self.states.get(name) or factor.initial(self.like.new_zeros(1, 1, 1))
            if first is not None:
                state = factor.starting_from(self._function(first, t))
            else:
                _, new = factor.step(self._first_layer(rule, t), state)
                state = new if inside is None else choose(inside, new, state)
            if last is not None:
                end = factor.starting_from(self._function(entries["last"], t))
                state = choose(last, end, state)
            self.states[name] = tuple(part.expand(self.k, 1, self.n, -1) for part in state)
            return self.states[name][factor.spec.layers - 1]
        value = self._function(first or rule, t)
        if inside is not None:
            value = torch.where(inside, value, torch.zeros_like(value))
        return (
            value if last is None else torch.where(last, self._function(entries["last"], t), value)
        )

    def _function(self, entry: Entry, t: int) -> Tensor:
        factor, raw = self.factors[entry.id], self._raw(entry, t)
        return factor.value(raw) if isinstance(factor, Function) else raw

    def _raw(self, entry: Entry, t: int) -> Tensor:
        """The output of a factor's network at a step; computed once if it reads data only."""
        if not self._reads_particles(entry):
            return self._slices(f"raw {entry.id}", lambda: self.program.raw(entry))[t]
        factor = self.factors[entry.id]
        keep = [
            self._slices(f"mask {i} of {entry.id}", lambda mask=mask: mask)[t]  # type: ignore[misc]
            for i, mask in enumerate(self.program.keep(entry))
        ]
        return factor.rest(self._first_layer(entry, t), keep)  # type: ignore[operator]

    def _first_layer(self, entry: Entry, t: int) -> Tensor:
        """The first layer of a factor at a step; the part of the data is computed beforehand."""
        factor = self.factors[entry.id]
        own = entry.key.name if isinstance(factor, Recurrence) else None
        inner = {
            ref.label: self._input(ref, t)
            for ref in entry.key.parents
            if ref.name != own and self._carried_in(entry, ref)
        }
        if entry.id not in self._outer:
            carried = {ref.name for ref in entry.key.parents if self._carried_in(entry, ref)}
            self._outer[entry.id], _ = self.program._prepare(entry, carried)
        before = self._outer[entry.id]
        if before is None:
            return factor.first(inner)  # type: ignore[operator]
        if not inner:
            return before[t]
        here = factor.first(inner, bias=False)  # type: ignore[operator]
        return alike(before[t], here) + here

    # Reading --------------------------------------------------------------------------------------

    def _carried(self, name: str) -> bool:
        """Whether a variable has a value per particle."""
        return S in self.plan.values[name]

    def _reads_particles(self, entry: Entry) -> bool:
        return any(self._carried_in(entry, ref) for ref in entry.key.parents)

    def _carried_in(self, entry: Entry, ref: Ref) -> bool:
        """Whether an entry reads a value per particle; q reads missing data as zeros."""
        of_data = entry.side == "q" and ref.name in self.plan.completed
        return self._carried(ref.name) and not of_data

    def _input(self, ref: Ref, t: int) -> Tensor:
        """A parent's value per particle as an entry reads it at step t."""
        if ref.at == "first":
            return self.now[f"{ref.name}[0]"] if t else self.now[ref.name]
        if not ref.lag or ref.at == "last":
            return self.now[ref.name]
        if t:
            return self.before[ref.name]
        return self.like.new_zeros(1, 1, 1, self.graph.size(ref.name))

    def _value(self, name: str, t: int) -> Tensor:
        return self.now[name] if self._carried(name) else at_step(self.batch[name], t)

    def _slices(self, key: str, value: Callable[[], Tensor]) -> Sequence[Tensor]:
        """A value cut into steps, cached."""
        if key not in self._cut:
            self._cut[key] = steps_of(value(), self.steps)
        return self._cut[key]


def at_step(value: Tensor, t: int) -> Tensor:
    return value if value.shape[TIME] == 1 else value.narrow(TIME, t, 1)


def choose(where: Tensor, these: State, those: State) -> State:
    return tuple(torch.where(where, a, b) for a, b in zip(these, those, strict=True))
