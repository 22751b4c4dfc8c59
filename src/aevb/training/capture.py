"""Steps as CUDA graphs: captured once, many steps of one model or of several side by side, and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aevb.training.schedules import Phase

if TYPE_CHECKING:
    from aevb.training.step import Stepper

WARM_UP = 3  # steps of a phase that run before it is captured: libraries initialise themselves, the optimiser makes its state
AT_ONCE = 10  # steps in a graph


Wanted = tuple["Stepper", int, Phase, float]  # a step of a model: its number, its phase, its learning rate


class Steps:
    """Steps of one model, or of several at once. Each gets the numbers that it would get alone.

    On a GPU they are asked for one by one and taken many at a time, as one graph: a graph's start costs as much as several kernels, and
    so do the host's rows and rates, which are then copied for all of them together. Whoever looks at a model first has them taken.
    """

    def __init__(self) -> None:
        self.steppers: list[Stepper] = []
        self.waiting: list[Sequence[Wanted]] = []
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}

    def step(self, wanted: Sequence[Wanted]) -> None:
        for stepper, *_ in wanted:
            if stepper not in self.steppers:
                stepper.number = len(self.steppers)
                self.steppers.append(stepper)
        if not all(stepper.captures and stepper.seen.get(phase.name, 0) >= WARM_UP for stepper, _, phase, _ in wanted):
            self.take()
            for stepper, step, phase, rate in wanted:
                stepper.step(step, phase, rate)
            return
        for stepper, *_ in wanted:
            stepper.take = self.take
        self.waiting.append(wanted)
        if len(self.waiting) == AT_ONCE:
            self.take()

    def take(self) -> None:
        """Take the steps that were asked for."""
        waiting, self.waiting = self.waiting, []
        alike = len(waiting) == AT_ONCE and all(_kind(wanted) == _kind(waiting[0]) for wanted in waiting)
        for part in [waiting] if alike else [[wanted] for wanted in waiting]:
            for several in zip(*part, strict=True):  # the steps of one model
                several[0][0].load(several[0][1], [rate for *_, rate in several])
            moved = tuple(len(stepper.vectors) for stepper, *_ in part[0])  # where weights lie in memory changes with it
            key = len(part), _kind(part[0]), moved
            self.graphs = {other: graph for other, graph in self.graphs.items() if other[1] != key[1] or other[2] == moved}
            if key not in self.graphs:
                self.graphs[key] = captured([(stepper, phase) for stepper, _, phase, _ in part[0]], len(part))
            self.graphs[key].replay()


def _kind(wanted: Sequence[Wanted]) -> tuple[tuple[int, str], ...]:
    return tuple((id(stepper), phase.name) for stepper, _, phase, _ in wanted)


def captured(models: Sequence[tuple[Stepper, Phase]], count: int) -> torch.cuda.CUDAGraph:
    """``count`` steps as one graph, of one model or of several side by side, since one does not fill a GPU."""
    device, graph = models[0][0].device, torch.cuda.CUDAGraph()
    for stepper, _ in models:
        if stepper.staged is not None:
            stepper.staged.settle()
        for generator in (stepper.noise, *([stepper.drawing] if stepper.draws else [])):
            graph.register_generator_state(generator)
    torch.cuda.synchronize(device)
    here = models[0][0].lane.chain
    others = {stepper.lane.chain for stepper, _ in models} - {here}
    with torch.cuda.graph(graph, stream=here):
        for chain in others:
            chain.wait_stream(here)
        for stepper, phase in models:
            with torch.cuda.stream(stepper.lane.chain):
                _advance(stepper, phase, count)
        for chain in others:
            here.wait_stream(chain)
    return graph


def _advance(stepper: Stepper, phase: Phase, count: int) -> None:
    """Steps in turn; the rows and the noise of the next are made ready beside each."""
    chain, ahead = stepper.lane.chain, stepper.lane.ahead
    inputs = stepper.inputs(0)
    for place in range(count):
        following = {}
        if place + 1 < count:
            ahead.wait_stream(chain)
            with torch.cuda.stream(ahead):
                following = stepper.inputs(place + 1)
        stepper.advance(phase, place, inputs)
        chain.wait_stream(ahead) if following else None
        inputs = following


# Streams -------------------------------------------------------------------------------------------------------------------------------

LANES, BRANCHES = 8, 3


@dataclass(frozen=True)
class Lane:
    """The streams of a model: one for its steps, one for the rows and noise of the next, some for what nobody waits for.

    Memory goes back to the stream that it was taken on, which may use it again as soon as it waits for the chain. That is safe as long as nobody
    else is on these streams: they belong together, and to one model, or to several in turn.
    """

    chain: torch.cuda.Stream
    ahead: torch.cuda.Stream
    branches: tuple[torch.cuda.Stream, ...]


_lanes: dict[torch.device, list[Lane]] = {}


def lane(device: torch.device, number: int) -> Lane:
    """torch has 32 streams of each priority and deals them out in turn: all are taken at once, so that none is two."""
    if device not in _lanes:
        others = [torch.cuda.Stream(device) for _ in range(LANES * (1 + BRANCHES))]
        chains = [torch.cuda.Stream(device, priority=-1) for _ in range(LANES)]
        parts = [others[i::LANES] for i in range(LANES)]
        _lanes[device] = [Lane(chain, part[0], tuple(part[1:])) for chain, part in zip(chains, parts, strict=True)]
    return _lanes[device][number % LANES]
