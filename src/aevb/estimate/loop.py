"""Compute a recurrence step by step, or by torch's own LSTM and GRU.

The parts of a step that the recurrence does not produce are computed before the loop, for all
steps. With ``Program.chunk``, the loop runs in chunks of time, and the backward pass computes the
inner values of one chunk at a time again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aevb.compiled_step.gradients import deferred
from aevb.declare.deterministic import Recurrence
from aevb.declare.evaluation_order import Stage
from aevb.declare.graph import Entry
from aevb.declare.notation import Ref
from aevb.derive.axes import TIME, alike, join
from aevb.estimate.before import state_name
from aevb.estimate.fused_recurrence import fused, is_fused

if TYPE_CHECKING:
    from aevb.estimate.program import Program

State = tuple[Tensor, ...]
Draw = Callable[[str, Entry, Tensor, int | None], Tensor]


class Carry(NamedTuple):
    """What a step reads of the step computed before it: the nodes' values, and cells' states."""

    values: dict[str, Tensor]
    states: dict[str, State]


class Part(NamedTuple):
    """The results of some steps: values by node, raw numbers by entry, and what follows reads."""

    values: dict[str, Tensor]
    raws: dict[str, Tensor]
    carry: Carry


class Loop:
    """A loop over the steps of one stage of a program."""

    def __init__(self, program: Program, stage: Stage, draw: Draw) -> None:
        self.program, self.stage, self.draw = program, stage, draw
        self.inside, count = set(stage.nodes), program.count
        self.rules = {name: program.entries(name) for name in stage.nodes}
        self.order = range(count) if stage.direction > 0 else range(count - 1, -1, -1)
        # By entry, the parents that the loop produces; a cell's own state is not an input.
        self.inner = {
            entry.id: tuple(
                ref
                for ref in entry.key.parents
                if ref.name in self.inside
                and not (ref.name == name and isinstance(program.factors[entry.id], Recurrence))
            )
            for name, entries in self.rules.items()
            for entry in entries.values()
        }
        self.cells = {
            name: isinstance(program.factors[entries["t"].id], Recurrence)
            for name, entries in self.rules.items()
        }
        self.ready: dict[str, tuple[Sequence[Tensor] | None, list[Sequence[Tensor]]]] = {}
        self.real: Sequence[Tensor] | None = None
        self.last: Sequence[Tensor] | None = None
        self.within: dict[str, Tensor | None] = {}

    def run(self) -> None:
        """Compute the values, raw numbers and last states of the stage's nodes."""
        with deferred():
            part = self._part()
        self.program.values |= part.values
        self.program.raws |= part.raws
        self.program.states |= part.carry.states

    def _part(self) -> Part:
        self._masks()
        if is_fused(self):
            return self._fused()
        self._prepare()
        program, order = self.program, self.order
        size = program.chunk
        if size is None or size >= len(order) or not torch.is_grad_enabled():
            return self._steps(order, self._begin())
        parts: list[Part] = []
        carry = self._begin()
        for start in range(0, len(order), size):
            part = self._again(order[start : start + size], carry)
            parts.append(part)
            carry = part.carry
        ordered = parts if self.stage.direction > 0 else parts[::-1]
        return Part(
            {name: join([part.values[name] for part in ordered]) for name in parts[0].values},
            {
                entry_id: join([part.raws[entry_id] for part in ordered if entry_id in part.raws])
                for entry_id in dict.fromkeys(key for part in parts for key in part.raws)
            },
            carry,
        )

    def _fused(self) -> Part:
        """All steps by torch's own recurrence; the first one apart if it has another rule."""
        program, (name,) = self.program, self.stage.nodes
        entries, carry = self.rules[name], self._begin()
        state, start = carry.states[name], None
        raws: dict[str, dict[int, Tensor]] = {entry.id: {} for entry in entries.values()}
        first = entries.get("first")
        if first is not None:
            self.ready[first.id] = program._prepare(first, self.inside)
        if self.stage.direction > 0 and (first is not None or self.within[name] is not None):
            entry, factor = entries["t"], program.factors[entries["t"].id]
            inputs = program.inputs(entry)
            missing = program.missing(entry, inputs)
            part, masks = (
                {label: value.narrow(TIME, 0, 1) for label, value in values.items()}
                for values in (inputs, missing)
            )
            self.ready[entry.id] = [factor.first(part, missing=masks)], []  # type: ignore[operator]
            start, state = self._cell(name, 0, carry.values, {}, state, raws)
        value, state = fused(self, state, start)
        if first is not None and self.stage.direction < 0:
            begin = self._evaluate(name, first, 0, {}, {}, raws)
            value = join([begin, value.narrow(TIME, 1, program.count - 1)])
        found = {entry_id: parts[0] for entry_id, parts in raws.items() if parts}
        return Part({name: value}, found, Carry({}, {name: state}))

    def _prepare(self) -> None:
        program, rules = self.program, self.rules
        self.ready = {
            entry.id: program._prepare(entry, self.inside)
            for entries in rules.values()
            for entry in entries.values()
        }

    def _masks(self) -> None:
        program, rules = self.program, self.rules
        self.real = program.real.split(1, 0) if program.real is not None else None
        ends = any("last" in entries for entries in rules.values())
        self.last = program.is_last().split(1, 0) if ends else None
        self.within = {
            name: program._inside(entries["t"])
            for name, entries in rules.items()
            if program.graph.is_deterministic(name)
        }

    def _begin(self) -> Carry:
        """What the first step reads: the window before, or zeros."""
        program = self.program
        values: dict[str, Tensor] = {}
        states: dict[str, State] = {}
        known: Mapping[str, Tensor] = {} if program.before is None else program.before.values
        for name, entries in self.rules.items():
            factor = program.factors[entries["t"].id]
            if isinstance(factor, Recurrence):
                state = factor.initial(program._parameter().new_zeros(1, 1, 1))
                states[name] = tuple(
                    known.get(state_name(name, i), part) for i, part in enumerate(state)
                )
            if name in known:
                values[name] = known[name]
        return Carry(values, states)

    # Chunks ---------------------------------------------------------------------------------------

    def _again(self, steps: range, carry: Carry) -> Part:
        """The steps of one chunk, whose inner values the backward pass computes again.

        The graph of the chunk's forward pass is then freed as a whole, so that its weights'
        gradients are collected within the chunk.
        """
        form: list[Any] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            with deferred():
                part = self._steps(steps, _filled(carry, iter(tensors)))
            form[:] = [_filled(part, repeat(None))]  # without tensors, which would keep the graph
            return tuple(_tensors(part))

        found = checkpoint(flat, *_tensors(carry), use_reentrant=False, preserve_rng_state=False)
        filled: Part = _filled(form[0], iter(found))
        return filled

    # Steps ----------------------------------------------------------------------------------------

    def _steps(self, steps: Iterable[int], carry: Carry) -> Part:
        """Some steps, in order."""
        rules = self.rules
        states = dict(carry.states)
        values: dict[str, dict[int, Tensor]] = {name: {} for name in rules}
        raws: dict[str, dict[int, Tensor]] = {entry_id: {} for entry_id in self.ready}
        before = carry.values
        for t in steps:
            here: dict[str, Tensor] = {}
            for name, is_cell in self.cells.items():
                if is_cell:
                    here[name], states[name] = self._cell(name, t, before, here, states[name], raws)
                else:
                    here[name] = self._node(name, t, before, here, raws)
                values[name][t] = here[name]
            before = here
        return Part(
            {name: join([found[t] for t in sorted(found)]) for name, found in values.items()},
            {
                entry_id: join([found[t] for t in sorted(found)])
                for entry_id, found in raws.items()
                if found
            },
            Carry(before, states),
        )

    def _cell(
        self,
        name: str,
        t: int,
        before: Mapping[str, Tensor],
        here: Mapping[str, Tensor],
        state: State,
        raws: dict[str, dict[int, Tensor]],
    ) -> tuple[Tensor, State]:
        """The value and the new state of a recurrence."""
        program, entries = self.program, self.rules[name]
        factor = program.factors[entries["t"].id]
        assert isinstance(factor, Recurrence)
        top = factor.spec.layers - 1
        outside, window = self.within.get(name), program.before
        begins = t == self.order[0]
        if "first" in entries and t == 0 and window is None:
            value = self._evaluate(name, entries["first"], t, before, here, raws)
            new = factor.starting_from(value)
        elif outside is not None and self.real is None and window is None and begins:
            value, new = state[top], state  # all parents lie outside the sequence
        else:
            value, new = factor.step(self._gates(entries["t"], t, before, here), state)
            live = None if self.real is None else self.real[t]
            if outside is not None and (live is not None or begins):
                live = outside[t : t + 1] if live is None else live & outside[t : t + 1]
            if live is not None:
                new = tuple(torch.where(live, a, b) for a, b in zip(new, state, strict=True))
                value = new[top]
            if "first" in entries and t == 0 and window is not None:
                first = self._evaluate(name, entries["first"], t, before, here, raws)
                value = torch.where(window.start, first, value)
                new = tuple(
                    torch.where(window.start, a, b)
                    for a, b in zip(factor.starting_from(first), new, strict=True)
                )
        if "last" in entries and self.last is not None:
            end = self._evaluate(name, entries["last"], t, before, here, raws)
            value = torch.where(self.last[t], end, value)
            new = tuple(
                torch.where(self.last[t], a, b)
                for a, b in zip(factor.starting_from(end), new, strict=True)
            )
        return value, new

    def _node(
        self,
        name: str,
        t: int,
        before: Mapping[str, Tensor],
        here: Mapping[str, Tensor],
        raws: dict[str, dict[int, Tensor]],
    ) -> Tensor:
        """The value of a draw, or of a function."""
        entries, outside = self.rules[name], self.within.get(name)
        window = self.program.before
        value = self._evaluate(name, entries["t"], t, before, here, raws)
        if outside is not None:
            value = torch.where(outside[t : t + 1], value, torch.zeros_like(value))
        if "first" in entries and t == 0:
            first = self._evaluate(name, entries["first"], t, before, here, raws)
            value = first if window is None else torch.where(window.start, first, value)
        if "last" in entries and self.last is not None:
            end = self._evaluate(name, entries["last"], t, before, here, raws)
            value = torch.where(self.last[t], end, value)
        if self.real is not None and entries["t"].spec.stochastic:
            value = torch.where(self.real[t], value, torch.zeros_like(value))
        return value

    def _evaluate(
        self,
        name: str,
        entry: Entry,
        t: int,
        before: Mapping[str, Tensor],
        here: Mapping[str, Tensor],
        raws: dict[str, dict[int, Tensor]],
    ) -> Tensor:
        factor = self.program.factors[entry.id]
        keep = [masks[t] for masks in self.ready[entry.id][1]]
        if not entry.key.parents:
            raw = factor({}, keep)
        else:
            raw = factor.rest(self._gates(entry, t, before, here), keep)  # type: ignore[operator]
        raws[entry.id][t] = raw
        return self.program._value(name, entry, raw, t, self.draw)

    def _gates(
        self, entry: Entry, t: int, before: Mapping[str, Tensor], here: Mapping[str, Tensor]
    ) -> Tensor:
        """The first layer of an entry at a step."""
        program, (ready, _) = self.program, self.ready[entry.id]
        factor = program.factors[entry.id]
        inner = {
            ref.label: self._neighbour(ref, t, before) if ref.lag else here[ref.name]
            for ref in self.inner[entry.id]
        }
        if program.hook:
            inner = {
                ref.label: program.hook(entry, ref, inner[ref.label])
                for ref in self.inner[entry.id]
            }
        if ready is None:
            return factor.first(inner)  # type: ignore[no-any-return,operator]
        if not inner:
            return ready[t]
        new = factor.first(inner, bias=False)  # type: ignore[operator]
        return alike(ready[t], new) + new

    def _neighbour(self, ref: Ref, t: int, before: Mapping[str, Tensor]) -> Tensor:
        """The value of a node of the loop at the step before (or after, in a backward loop)."""
        program = self.program
        if t == self.order[0]:
            if ref.name in before:
                return before[ref.name]
            like = next(iter(program.batch.values())) if program.batch else program._parameter()
            return torch.zeros(
                1,
                1,
                program.graph.size(ref.name),
                dtype=program._parameter().dtype,
                device=like.device,
            )
        value = before[ref.name]
        if self.real is None:
            return value
        return torch.where(self.real[t + ref.lag], value, torch.zeros_like(value))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a Carry or a Part, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in _tensors(part)]


def _filled(form: Any, tensors: Any) -> Any:
    """A Carry or a Part like ``form``, with other tensors."""
    if form is None or isinstance(form, Tensor):
        return next(tensors)
    if isinstance(form, dict):
        return {key: _filled(part, tensors) for key, part in form.items()}
    parts = [_filled(part, tensors) for part in form]
    return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)
