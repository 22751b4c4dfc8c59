"""Compute the values of a declaration's nodes stage by stage, in batches or in loops over time.

Values have the axes of :mod:`aevb.derive.axes`. A step inside a loop is a batch with T = 1, so a
factor runs the same code inside and outside a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.deterministic import Function, Recurrence
from aevb.declare.evaluation_order import Stage
from aevb.declare.graph import Entry, Graph
from aevb.declare.notation import At, Ref
from aevb.derive.axes import TIME, join, over_time, steps_of, swap
from aevb.derive.noise_names import dropout_name, offset_name, own_draws_name
from aevb.estimate.before import Before
from aevb.estimate.keys import mask_of, real_steps
from aevb.estimate.loop import Loop

APART = 1_000_003  # between the seeds of two steps; processes derive theirs by the rows' positions
# How to draw a node's value: (node, entry, raw numbers, step or None for all steps at once) → value
Draw = Callable[[str, Entry, Tensor, int | None], Tensor]
# A function from (side, variable, region) to the distribution there.
Distributions = Callable[[str, str, str], tuple[Conditional, td.Distribution]]


class Program:
    """One evaluation: the values of all nodes for one batch.

    ``batch`` holds [T or 1, N, d] tensors: data by name, ``name?`` a mask of the known entries,
    ``steps`` a mask of the real steps. ``slots`` maps each enumerated latent to its axis and, if a
    factor reads its neighbour in time, to the neighbour's axis. ``completed`` names observed
    variables whose missing entries p draws: their values are complete, but q reads the batch.
    ``before`` is what a window of longer sequences reads of the steps before it. ``chunk`` is the
    number of time steps whose intermediate values exist at once: in the backward pass the others
    are computed again.
    """

    def __init__(
        self,
        graph: Graph,
        factors: Mapping[str, torch.nn.Module] | torch.nn.ModuleDict,
        batch: Mapping[str, Tensor],
        *,
        noise: Mapping[str, Tensor] | None = None,
        slots: Mapping[str, tuple[int, int | None]] | None = None,
        steps: int = 1,
        q_draws: frozenset[str] = frozenset(),
        completed: frozenset[str] = frozenset(),
        hook: Callable[[Entry, Ref, Tensor], Tensor] | None = None,
        before: Before | None = None,
        chunk: int | None = None,
    ) -> None:
        self.graph, self.factors, self.batch = graph, factors, batch
        self.noise, self.slots, self.count = noise or {}, slots or {}, steps
        self.q_draws, self.completed, self.hook = q_draws, completed, hook
        self.before, self.chunk = before, chunk
        self.real = real_steps(batch)
        self.values: dict[str, Tensor] = {}
        self.raws: dict[str, Tensor] = {}
        # The states of recurrences after the last step of their loop.
        self.states: dict[str, tuple[Tensor, ...]] = {}
        self._distributions: dict[tuple[str, str], td.Distribution] = {}

    # Reading --------------------------------------------------------------------------------------

    def read(self, ref: Ref, entry: Entry | None = None) -> Tensor:
        """The value of a parent as an entry reads it: shifted in time.

        It is zero outside the sequence.
        """
        if entry is not None and self.reads_data(entry, ref.name):
            return self._at(self.batch[ref.name], ref, ref.name)
        value = self._at(self.values[ref.name], ref, ref.name)
        return self.hook(entry, ref, value) if self.hook and entry else value

    def reads_data(self, entry: Entry, name: str) -> bool:
        """Whether an entry reads the data of a variable whose missing entries p draws."""
        return entry.side == "q" and name in self.completed

    def _at(self, value: Tensor, ref: Ref, name: str) -> Tensor:
        """A value as ``ref`` reads it; ``name`` is its name in ``before``."""
        if ref.at == "first":
            return value.narrow(TIME, 0, 1)
        if ref.at == "last":
            return self.last_step(value)
        if not ref.lag:
            return value
        for current, neighbour in self.slots.values():
            if neighbour is not None and value.dim() >= -neighbour:
                # After the shift, the latent's present is its neighbour.
                value = swap(value, current, neighbour)
        value = over_time(value, self.count)
        if self.real is not None:
            value = torch.where(self.real, value, torch.zeros_like(value))
        kept = value.narrow(TIME, max(ref.lag, 0), self.count - 1)
        if self.before is not None:
            return join([self.before.values[name], kept])
        zeros = torch.zeros_like(value.narrow(TIME, 0, 1))
        return torch.cat([zeros, kept] if ref.lag < 0 else [kept, zeros], TIME)

    def last_step(self, value: Tensor) -> Tensor:
        """The value at the last real step of each row, with T = 1."""
        value = over_time(value, self.count)
        if self.real is None:
            return value.narrow(TIME, self.count - 1, 1)
        return (value * self.is_last().to(value.dtype)).sum(TIME, keepdim=True)

    def is_last(self) -> Tensor:
        """A mask [T, N or 1, 1] of the last real step of each row."""
        if self.real is None:
            return self._is_step(-1)
        after = torch.cat([self.real[1:], torch.zeros_like(self.real[:1])], 0)
        return self.real & ~after

    def is_end(self, end: str) -> Tensor:
        """A mask [T, N or 1, 1] of the "first" or the "last" step of each row."""
        return self.is_last() if end == "last" else self._is_step(0)

    def at_start(self, first: Tensor, value: Tensor) -> Tensor:
        """The first step by its own rule, in rows that begin here; otherwise that of ``value``."""
        if self.before is None:
            return first
        return torch.where(self.before.start, first, value.narrow(TIME, 0, 1))

    def _is_step(self, t: int) -> Tensor:
        here = torch.zeros(self.count, 1, 1, dtype=torch.bool, device=self._device())
        here[t] = True
        return here if self.before is None or t else here & self.before.start

    def _device(self) -> torch.device:
        return next(iter(self.batch.values())).device if self.batch else torch.device("cpu")

    def inputs(
        self, entry: Entry, names: Callable[[str], bool] = lambda name: True
    ) -> dict[str, Tensor]:
        """The values, by label, of an entry's parents whose name satisfies ``names``."""
        own = entry.key.name if isinstance(self.factors[entry.id], Recurrence) else None
        return {
            ref.label: self.read(ref, entry)
            for ref in entry.key.parents
            if ref.name != own and names(ref.name)
        }

    def missing(self, entry: Entry, labels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Masks of the missing entries of an entry's inputs; only factors of q read them."""
        found = {}
        for ref in entry.key.parents:
            mask = self.batch.get(mask_of(ref.name))
            if (
                entry.side == "q"
                and mask is not None
                and ref.label in labels
                and ref.name in self.graph.observed
            ):
                known = self.batch[ref.name]
                found[ref.label] = self._at((~mask).to(known.dtype), ref, mask_of(ref.name))
        return found

    def keep(self, entry: Entry) -> list[Tensor]:
        """The dropout masks in the noise, a seed per step, and the per-example offset, if any.

        A network that draws random numbers itself draws them from the seed [T, 1, 1].
        :mod:`aevb.evidence.per_example_q` uses the offset.
        """
        masks: list[Tensor] = []
        while (name := dropout_name(entry, len(masks))) in self.noise:
            masks.append(self.noise[name])
        if (seed := self.noise.get(own_draws_name(entry))) is not None:
            steps = torch.arange(self.count, device=seed.device).view(-1, 1, 1)
            masks.append((seed + steps * APART) % 2**62)
        offset = self.noise.get(offset_name(entry))
        return masks if offset is None else [*masks, offset]

    # Factors outside loops ------------------------------------------------------------------------

    def raw(self, entry: Entry) -> Tensor:
        """The output of a factor's network (raw numbers) for all steps at once, cached."""
        if entry.id not in self.raws:
            inputs = self.inputs(entry)
            self.raws[entry.id] = self.again(
                self.factors[entry.id], inputs, self.keep(entry), self.missing(entry, inputs)
            )
        return self.raws[entry.id]

    def again(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; with ``chunk``, compute its inner values again in the backward pass.

        Noise is an argument, so the second pass computes the same numbers.
        """
        if self.chunk is None or not torch.is_grad_enabled():
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    # Quantities of a variable, step by step -------------------------------------------------------

    def regions(self, name: str, sides: Sequence[str]) -> list[str]:
        """The regions of a sequence with different rules.

        The first is "all". "first" and "last" follow if one side has an entry for them. A row of
        one step is both first and last. The region "only" covers such rows if one side declares the
        first step and the other side the last.
        """
        ends = [
            set((self.graph.p if side == "p" else self.graph.q)[name]) - {"t", "static"}
            for side in sides
        ]
        found = [at for at in ("first", "last") if any(at in ats for ats in ends)]
        one_step = self.count == 1 or self.real is not None
        return [
            "all",
            *found,
            *(["only"] if one_step and len(found) > 1 and {"first"} in ends else []),
        ]

    def entry(self, side: str, name: str, region: str) -> Entry:
        """The rule of a region.

        For a step that is both first and last ("only"), the last step's rule takes precedence.
        """
        entries = (self.graph.p if side == "p" else self.graph.q)[name]
        ends = {"all": (), "only": ("last", "first")}.get(region, (region,))
        return next((entries[at] for at in ends if at in entries), entries[self.graph.main(name)])

    def select(self, value: Tensor, region: str) -> Tensor:
        """The part of a value in a region: all steps, or the first or last step as T = 1."""
        if region == "all" or value.shape[TIME] == 1:
            return value
        return self.last_step(value) if region == "last" else value.narrow(TIME, 0, 1)

    def distribution(
        self, side: str, name: str, region: str = "all"
    ) -> tuple[Conditional, td.Distribution]:
        """A variable's conditional and its torch distribution in a region, cached."""
        entry = self.entry(side, name, region)
        factor = self.factors[entry.id]
        assert isinstance(factor, Factor)
        if (entry.id, region) not in self._distributions:
            self._distributions[entry.id, region] = factor.distribution(
                self.select(self.raw(entry), region)
            )
        return factor.spec, self._distributions[entry.id, region]

    def piecewise(
        self, name: str, sides: Sequence[str], function: Callable[[str], Tensor]
    ) -> Tensor:
        """Assemble a quantity per step, [.., T, N, 1], from its values in the regions."""
        regions = self.regions(name, sides)
        result = function("all")
        if not self.graph.timed[name]:
            return result
        result = over_time(result, self.count)
        if "first" in regions:
            start = self.at_start(function("first"), result)
            result = (
                join([start, result.narrow(TIME, 1, self.count - 1)]) if self.count > 1 else start
            )
        if "last" in regions:
            end, is_last = function("last"), self.is_last()
            if "only" in regions:
                end = torch.where(is_last[:1], function("only"), end)
            result = torch.where(is_last, end, result)
        return result

    def log_prob(
        self,
        side: str,
        name: str,
        value: Tensor,
        present: Tensor | None = None,
        distribution: Distributions | None = None,
    ) -> Tensor:
        """log p or log q of a variable's ``present`` entries at every step, [.., T, N, 1].

        Each step uses its own rule. A rule ignores missing entries, padded steps and steps of other
        rules. These entries are first set to the family's ``fill``, a value inside its support.
        They already hold 0, so a ``fill`` of 0 needs no work.
        """
        distribution = distribution or self.distribution

        def at(region: str) -> Tensor:
            spec, dist = distribution(side, name, region)
            here = self.select(value, region)
            known = (
                present
                if present is None or region == "all"
                else self.select(present.to(value.dtype), region) > 0
            )
            for counts in (known if spec.fill else None, self._own_steps(side, name, region)):
                here = (
                    here
                    if counts is None
                    else torch.where(counts, here, torch.full_like(here, spec.fill))
                )
            return spec.log_prob(dist, here, known).unsqueeze(-1)

        return self.piecewise(name, side, at)

    def _own_steps(self, side: str, name: str, region: str) -> Tensor | None:
        """A mask [T or 1, N or 1, 1] of the real steps at which the region's rule holds.

        None if the values at other steps are also inside the support of the rule.
        """
        entries = (self.graph.p if side == "p" else self.graph.q)[name]
        harmless = (
            len(entries) == 1
            or len({(str(entry.spec.support), entry.spec.fill) for entry in entries.values()}) == 1
        )
        own = (
            self.real
            if region == "all"
            and self.graph.timed[name]
            and self.entry(side, name, region).spec.fill
            else None
        )
        for end in () if harmless or region == "last" else ("first", "last"):
            if end in entries and end != region:
                other = ~self.is_end(end) if region == "all" else ~self.is_end(end)[:1]
                own = other if own is None else own & other
        if region == "first" and self.before is not None and not harmless:
            own = self.before.start
        return own

    def mean(self, name: str) -> Tensor:
        """The mean of p's conditional, at every step."""
        return self.piecewise(
            name, "p", lambda region: self.distribution("p", name, region)[1].mean
        )

    def draw(self, name: str, draw: Draw) -> Tensor:
        """Draw a variable from p's conditional, all steps at once.

        No other variable may read it.
        """

        def at(region: str) -> Tensor:
            entry = self.entry("p", name, region)
            return draw(
                name, entry, self.select(self.raw(entry), region), None if region == "all" else 0
            )

        return self.piecewise(name, "p", at)

    # Running --------------------------------------------------------------------------------------

    def run(self, stages: Sequence[Stage], draw: Draw) -> None:
        """Compute the values of all stages in order, with ``draw`` for the stochastic nodes.

        Nodes that have their values already are left out.
        """
        for stage in stages:
            if stage.direction:
                if any(name not in self.values for name in stage.nodes):
                    Loop(self, stage, draw).run()
            elif stage.nodes[0] not in self.values:
                self.values[stage.nodes[0]] = self._batched(stage.nodes[0], draw)

    def entries(self, name: str) -> dict[At, Entry]:
        """The rules that produce a node's value in this program.

        They are q's if q draws it or only q declares it, otherwise p's.
        """
        graph = self.graph
        return graph.q[name] if name in self.q_draws or name not in graph.p else graph.p[name]

    def _value(self, name: str, entry: Entry, raw: Tensor, t: int | None, draw: Draw) -> Tensor:
        factor = self.factors[entry.id]
        return factor.value(raw) if isinstance(factor, Function) else draw(name, entry, raw, t)

    def _batched(self, name: str, draw: Draw) -> Tensor:
        entries = self.entries(name)
        main = entries[self.graph.main(name)]
        value = self._value(name, main, self.raw(main), None, draw)
        if self.graph.is_deterministic(name):
            value = self._zero_outside(value, main)
        if "first" in entries:
            start = self._value(name, entries["first"], self.raw(entries["first"]), 0, draw)
            value = over_time(value, self.count)
            start = self.at_start(start, value)
            value = (
                join([start, value.narrow(TIME, 1, self.count - 1)]) if self.count > 1 else start
            )
        if "last" in entries:
            value = torch.where(
                self.is_last(),
                self._value(name, entries["last"], self.raw(entries["last"]), None, draw),
                value,
            )
        if self.real is not None and main.spec.stochastic and self.graph.timed[name]:
            value = torch.where(self.real, value, torch.zeros_like(value))
        return value

    def _zero_outside(self, value: Tensor, entry: Entry) -> Tensor:
        """Set a deterministic node to zero where all its parents lie outside the sequence."""
        inside = self._inside(entry)
        return (
            value
            if inside is None
            else torch.where(inside, over_time(value, self.count), torch.zeros_like(value))
        )

    def _inside(self, entry: Entry) -> Tensor | None:
        """A mask [T, N or 1, 1] of the steps at which some parent lies inside the sequence.

        None if one always does.
        """
        lags = {ref.lag for ref in entry.key.parents}
        if 0 in lags:
            return None
        real = (
            self.real
            if self.real is not None
            else torch.ones(self.count, 1, 1, dtype=torch.bool, device=self._device())
        )
        outside = torch.zeros_like(real[:1])
        if self.before is not None:
            outside = outside | ~self.before.start
        parts = [
            torch.cat([outside, real[:-1]] if lag < 0 else [real[1:], outside], 0) for lag in lags
        ]
        return parts[0] if len(parts) == 1 else parts[0] | parts[1]

    def _parameter(self) -> Tensor:
        for factor in self.factors.values():
            for tensor in (*factor.parameters(), *factor.buffers()):
                return tensor
        return torch.zeros(())

    def _prepare(
        self, entry: Entry, inside: set[str]
    ) -> tuple[Sequence[Tensor] | None, list[Sequence[Tensor]]]:
        """The parts of an entry that can be computed before the loop, by step.

        They are the sum of the outer parents' blocks, and dropout masks.
        """
        outer = self.inputs(entry, lambda name: name not in inside)
        keep = [steps_of(mask, self.count) for mask in self.keep(entry)]
        if not outer:
            return None, keep
        before = self.factors[entry.id].first(outer, missing=self.missing(entry, outer))  # type: ignore[operator]
        return steps_of(before, self.count), keep
