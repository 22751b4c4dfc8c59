"""Train several models of one declaration as one batch of models.

One small model does not fill a GPU. Their weights are rows of one tensor, and the recorded step of
one model is mapped over the rows with ``torch.vmap``. The step has no more operations than that of
one model. Every model keeps its own data, noise, optimiser state and failure flag, and is read and
saved as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aevb.compiled_step import CompiledStep
from aevb.compiled_step.cuda_streams import CudaStreams, streams_of
from aevb.compiled_step.fused_adam import Vector
from aevb.training.graph_steps import GraphSteps
from aevb.training.schedules import Phase
from aevb.training.step_inputs import Input, Inputs

# Models per bundle. For a mixture on an H200, one bundle of 16 takes 86 µs per model, two of 8 take
# 95 µs.
MOST = 16


class Bundle:
    """Take steps of several models at once.

    Models whose runs have ended stay unchanged but are still computed.
    """

    def __init__(
        self, steppers: Sequence[GraphSteps], phase: Phase, step: CompiledStep, number: int = 0
    ) -> None:
        self.steppers, self.compiled, self.number = steppers, step, number
        first, models = steppers[0], [stepper.model for stepper in steppers]
        self.vector = Vector(
            *((stepper.active(phase), stepper.adam) for stepper in steppers), remarks=step.remarks
        )
        moving = self.vector.weights
        step.read_from(
            moving[p] if p in moving else _as_rows([m.get_parameter(n) for m in models])
            for n, p in first.model.named_parameters()
        )
        step.write_into(self.vector.gradients)
        tallies = [stepper.tally for stepper in steppers]
        self.failed, self.sums, self.taken, self.moved = (
            _as_rows([getattr(tally, name) for tally in tallies])
            for name in ("failed", "sums", "taken", "moved")
        )
        self.rates = _as_rows([stepper.rates for stepper in steppers if stepper.rates is not None])
        for stepper in steppers:
            stepper.adopt(phase, step)
        self.warm = 0  # steps that were not captured

    @property
    def device(self) -> torch.device:
        return self.steppers[0].device

    @property
    def streams(self) -> CudaStreams:
        return streams_of(self.device, self.number)

    @property
    def generators(self) -> list[torch.Generator]:
        return [generator for stepper in self.steppers for generator in stepper.generators]

    def settle(self) -> None:
        for stepper in self.steppers:
            stepper.settle()

    def only(self, going_on: Sequence[GraphSteps]) -> None:
        """Stop updating the models whose runs have ended."""
        for stepper in self.steppers:
            if stepper not in going_on:
                stepper.tally.fail()

    def inputs(self, place: int) -> dict[Input, Tensor]:
        return stacked_inputs(self.steppers, place)

    @torch.no_grad()
    def advance(self, phase: Phase, place: int, inputs: Inputs) -> None:
        first = self.steppers[0]
        total, measured, gradients = self.compiled(inputs)
        found = dict(zip(first.active(phase), gradients, strict=True))
        counts = self.failed, self.sums, self.taken, self.moved
        self.vector.finish(
            found, self.rates[:, place, 0], first.settings.clip, total, measured, counts
        )

    def run(self, phase: Phase, count: int, here: torch.cuda.Stream) -> None:
        """Take steps without a CUDA graph, on the bundle's own stream."""
        self.streams.chain.wait_stream(here)
        with torch.cuda.stream(self.streams.chain):
            for place in range(count):
                self.advance(phase, place, self.inputs(place))
        here.wait_stream(self.streams.chain)
        self.warm += count


def _as_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors, and make each of them a view of its row."""
    rows = torch.stack([tensor.detach() for tensor in tensors])
    for tensor, row in zip(tensors, rows.unbind(), strict=True):
        tensor.data = row
    return rows


def stacked_inputs(steppers: Sequence[GraphSteps], place: int) -> dict[Input, Tensor]:
    parts = [stepper.inputs(place) for stepper in steppers]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def bundles(steppers: Sequence[GraphSteps], phase: Phase) -> list[Bundle]:
    """Return the models as one bundle or a few; an empty list if they cannot be bundled."""
    if len(steppers) < 2:
        return []
    count = -(-len(steppers) // MOST)
    groups = [
        steppers[i * len(steppers) // count : (i + 1) * len(steppers) // count]
        for i in range(count)
    ]
    found = [bundled(group, phase, number) for number, group in enumerate(groups)]
    return [one for one in found if one is not None] if all(found) else []


def bundled(steppers: Sequence[GraphSteps], phase: Phase, number: int = 0) -> Bundle | None:
    """Return the models as one bundle.

    Return None if ``torch.vmap`` does not support an operation, or if Adam has no state yet for an
    active parameter. ``number`` selects the CUDA streams of the bundle.
    """
    if not all(
        parameter in stepper.adam.state
        for stepper in steppers
        for parameter in stepper.active(phase)
    ):
        return None
    parameters = [
        torch.stack([p.detach() for p in same])
        for same in zip(*(stepper.model.parameters() for stepper in steppers), strict=True)
    ]
    try:
        streams = streams_of(steppers[0].device, number) if steppers[0].captures else None
        step = steppers[0].record(phase, stacked_inputs(steppers, 0), parameters, streams)
    except Exception:  # torch may raise anything; the models then run separately
        return None
    return Bundle(steppers, phase, step, number)


def can_bundle(steppers: Sequence[GraphSteps], phases: Sequence[Phase]) -> bool:
    """Whether models can form a bundle.

    They must be compiled on a GPU, train all parameters at every step, and have equal buffers.
    """
    phase = phases[0]
    if len(steppers) < 2 or not all(
        stepper.ends_compiled and stepper.captures for stepper in steppers
    ):
        return False
    everything = phase.theta and phase.phi and all(other.name == phase.name for other in phases)
    fixed = [list(stepper.model.buffers()) for stepper in steppers]
    return everything and all(
        torch.equal(a, b) for others in fixed[1:] for a, b in zip(fixed[0], others, strict=True)
    )
