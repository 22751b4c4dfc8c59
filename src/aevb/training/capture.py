"""Steps as CUDA graphs: captured once, of one model or of several side by side, and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from aevb.training.schedules import Phase

if TYPE_CHECKING:
    from aevb.training.step import Stepper

WARM_UP = 3  # steps of a phase that run before it is captured: libraries initialise themselves, the optimiser makes its state


def captured(steppers: Sequence[Stepper], phases: Sequence[Phase]) -> torch.cuda.CUDAGraph:
    """The steps of one or several models as one graph; several stand side by side in it, since one does not fill a GPU."""
    device, graph = steppers[0].device, torch.cuda.CUDAGraph()
    for stepper in steppers:
        for generator in (stepper.noise, *([stepper.drawing] if stepper.draws else [])):
            graph.register_generator_state(generator)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream(device)
        sides = [torch.cuda.Stream(device) for _ in steppers[1:]]
        for stepper, phase, stream in zip(steppers, phases, [*sides, here], strict=True):
            stream.wait_stream(here) if stream is not here else None
            with torch.cuda.stream(stream):
                stepper.advance(phase)
        for stream in sides:
            here.wait_stream(stream)
    return graph


class Together:
    """Steps of several models at once: on a GPU as one graph, elsewhere in turn. Each gets the numbers that it would get alone."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[tuple[int, str], ...], torch.cuda.CUDAGraph] = {}

    def step(self, wanted: Sequence[tuple[Stepper, int, Phase, float]]) -> None:
        alone = len(wanted) == 1 or not all(stepper.captures and stepper.seen.get(phase.name, 0) >= WARM_UP for stepper, _, phase, _ in wanted)
        for stepper, step, phase, rate in wanted:
            stepper.step(step, phase, rate) if alone else stepper.load(step, rate)
        if not alone:
            key = tuple((id(stepper), phase.name) for stepper, _, phase, _ in wanted)
            if key not in self.graphs:
                self.graphs[key] = captured([stepper for stepper, *_ in wanted], [phase for *_, phase, _ in wanted])
            self.graphs[key].replay()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Steps before a capture run beside the default stream, as graphs want it."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    _streams[device].wait_stream(torch.cuda.current_stream(device))
    return _streams[device]
