"""Steps as CUDA graphs: captured once, many steps of one model or of several side by side, and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aevb.training.bundle import Bundle, alike, bundles
from aevb.training.schedules import Phase

if TYPE_CHECKING:
    from aevb.training.step import Stepper

WARM_UP = 3  # steps of a phase that run before it is captured: libraries initialise themselves, the optimiser makes its state
AT_ONCE = 10  # steps in a graph


Wanted = tuple["Stepper", int, Phase, float]  # a step of a model: its number, its phase, its learning rate


class Steps:
    """Steps of one model, or of several at once.

    On a GPU they are asked for one by one and taken many at a time, as one graph: a graph's start costs as much as several kernels, and
    so do the host's rows and rates, which are then copied for all of them together. Whoever looks at a model first has them taken.
    Several models lie side by side in the graph and get the numbers that they would get alone; compiled, they are one :class:`Bundle`, and
    their numbers differ from those in rounding.
    """

    def __init__(self) -> None:
        self.steppers: list[Stepper] = []
        self.waiting: list[Sequence[Wanted]] = []
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.bundles: list[Bundle] = []

    def step(self, wanted: Sequence[Wanted]) -> None:
        if not self.steppers:
            apart = not alike([stepper for stepper, *_ in wanted], [phase for _, _, phase, _ in wanted])
            for stepper, *_ in wanted:
                stepper.alone = apart
        for stepper, *_ in wanted:
            if stepper not in self.steppers:
                stepper.number = len(self.steppers)
                self.steppers.append(stepper)
        if not all(map(_warm, wanted)):
            self.take()
            _singly([wanted])
            return
        for stepper, *_ in wanted:
            stepper.take = self.take
        self.waiting.append(wanted)
        if len(self.waiting) == AT_ONCE:
            self.take()

    def take(self) -> None:
        """Take the steps that were asked for."""
        waiting, self.waiting = self.waiting, []
        same = len(waiting) == AT_ONCE and all(_kind(wanted) == _kind(waiting[0]) for wanted in waiting)
        for part in [waiting] if same else [[wanted] for wanted in waiting]:
            if not all(map(_warm, part[0])):
                _singly(part)
                continue
            _load(part)
            if part[0][0][0].alone:
                where = tuple(len(stepper.moving) for stepper, *_ in part[0])  # where weights lie in memory changes with it
                self._replay([(stepper, phase) for stepper, _, phase, _ in part[0]], len(part), where)
            else:
                self._take_together(part)

    def _replay(self, models: Sequence[tuple[Stepper | Bundle, Phase]], count: int, where: tuple[int, ...] = ()) -> None:
        who = tuple(id(model) for model, _ in models)
        key = count, tuple(phase.name for _, phase in models), who, where
        if key not in self.graphs:
            self.graphs = {other: graph for other, graph in self.graphs.items() if other[2:] == key[2:]}  # of other models or places: never again
            self.graphs[key] = captured(models, count)
        self.graphs[key].replay()

    def _take_together(self, part: Sequence[Sequence[Wanted]]) -> None:
        """Steps for which the host has loaded the first places, of models that are one, or a few."""
        phase = part[0][0][2]
        if not self.bundles:
            self.bundles = bundles([stepper for stepper, *_ in part[0]], phase)
            _load(part)  # to record a step, its noise was drawn
        if not self.bundles:  # side by side, then, from the beginning
            for stepper in self.steppers:
                stepper.alone, stepper.seen, stepper.recordings = True, {}, {}
            _singly(part)
            return
        for bundle in self.bundles:
            bundle.only([stepper for stepper, *_ in part[0]])
        if all(bundle.warm >= WARM_UP for bundle in self.bundles):
            self._replay([(bundle, phase) for bundle in self.bundles], len(part))
            return
        here = torch.cuda.current_stream(self.bundles[0].device)
        for bundle in self.bundles:
            bundle.lane.chain.wait_stream(here)
            with torch.cuda.stream(bundle.lane.chain):
                for place in range(len(part)):
                    bundle.advance(phase, place, bundle.inputs(place))
            here.wait_stream(bundle.lane.chain)
            bundle.warm += len(part)


def _warm(wanted: Wanted) -> bool:
    """Whether a step can be captured: libraries and optimiser are ready."""
    stepper, _, phase, _ = wanted
    return stepper.captures and stepper.seen.get(phase.name, 0) >= WARM_UP


def _singly(part: Sequence[Sequence[Wanted]]) -> None:
    for stepper, step, phase, rate in (one for wanted in part for one in wanted):
        stepper.step(step, phase, rate)


def _load(part: Sequence[Sequence[Wanted]]) -> None:
    for several in zip(*part, strict=True):  # the steps of one model
        several[0][0].load(several[0][1], [rate for *_, rate in several])


def _kind(wanted: Sequence[Wanted]) -> tuple[tuple[int, str], ...]:
    return tuple((id(stepper), phase.name) for stepper, _, phase, _ in wanted)


def captured(models: Sequence[tuple[Stepper | Bundle, Phase]], count: int) -> torch.cuda.CUDAGraph:
    """``count`` steps as one graph, of one model or of several side by side, since one does not fill a GPU."""
    device, graph = models[0][0].device, torch.cuda.CUDAGraph()
    for model, _ in models:
        model.settle()
        for generator in model.generators:
            graph.register_generator_state(generator)
    torch.cuda.synchronize(device)
    here = models[0][0].lane.chain
    others = {model.lane.chain for model, _ in models} - {here}
    with torch.cuda.graph(graph, stream=here):
        for chain in others:
            chain.wait_stream(here)
        for model, phase in models:
            with torch.cuda.stream(model.lane.chain):
                _advance(model, phase, count)
        for chain in others:
            here.wait_stream(chain)
    return graph


def _advance(model: Stepper | Bundle, phase: Phase, count: int) -> None:
    """Steps in turn; the rows and the noise of the next are made ready beside each."""
    chain, ahead = model.lane.chain, model.lane.ahead
    inputs = model.inputs(0)
    for place in range(count):
        following = {}
        if place + 1 < count:
            ahead.wait_stream(chain)
            with torch.cuda.stream(ahead):
                following = model.inputs(place + 1)
        model.advance(phase, place, inputs)
        chain.wait_stream(ahead) if following else None
        inputs = following


# Streams -------------------------------------------------------------------------------------------------------------------------------

LANES, BRANCHES = 8, 3


@dataclass(frozen=True)
class Lane:
    """The streams of a model: one for its steps, one for what can be computed at the same time, one for the rows and noise of the next step, some for
    what nobody waits for.

    Memory goes back to the stream that it was taken on, which may use it again as soon as it waits for the chain. That is safe as long as nobody
    else is on these streams: they belong together, and to one model, or to several in turn.
    """

    chain: torch.cuda.Stream
    along: torch.cuda.Stream
    ahead: torch.cuda.Stream
    branches: tuple[torch.cuda.Stream, ...]


_lanes: dict[torch.device, list[Lane]] = {}


def lane(device: torch.device, number: int) -> Lane:
    """torch has 32 streams of each priority and deals them out in turn: all are taken at once, so that none is two."""
    if device not in _lanes:
        others = [torch.cuda.Stream(device) for _ in range(LANES * (1 + BRANCHES))]
        chains, along = ([torch.cuda.Stream(device, priority=-1) for _ in range(LANES)] for _ in range(2))
        parts = [others[i::LANES] for i in range(LANES)]
        streams = zip(chains, along, parts, strict=True)
        _lanes[device] = [Lane(chain, beside, part[0], tuple(part[1:])) for chain, beside, part in streams]
    return _lanes[device][number % LANES]
