"""A queue that collects requested steps and takes them as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aevb.compiled_step.cuda_graphs import Capturable, captured
from aevb.training.events import NOT_COMPILED, Event
from aevb.training.graph_steps import AT_ONCE, WARM_UP, GraphSteps
from aevb.training.model_bundle import Bundle, bundles, can_bundle
from aevb.training.schedules import Phase
from aevb.training.step import Wanted


class StepQueue:
    """A queue of steps of one model, or of several models.

    On a GPU, steps wait until there are ten, or until a model is read, and then run as one CUDA
    graph. Launching a graph costs as much as several kernels, and so does copying rows and learning
    rates; both are then done once for ten steps. Several models run concurrently in one graph, with
    the same results as alone. With ``compile=True`` they form a :class:`Bundle`, and their results
    differ by rounding.
    """

    def __init__(self) -> None:
        self.steppers: list[GraphSteps] = []
        self.waiting: list[Sequence[Any]] = []
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.bundles: list[Bundle] = []
        self.captures = True  # until a capture fails

    def step(self, wanted: Sequence[Wanted]) -> None:
        """Request these steps; they are taken now or later."""
        if not all(stepper.captures for stepper, *_ in wanted):
            for stepper, step, phase, rate in wanted:
                stepper.step(step, phase, rate)
            return
        if not self.steppers:
            self._stand([stepper for stepper, *_ in wanted], [phase for _, _, phase, _ in wanted])
        if not all(map(_warm, wanted)) or (not self.captures and self.steppers[0].alone):
            self.take()
            _singly([wanted])
            return
        self.waiting.append(wanted)
        if len(self.waiting) == AT_ONCE:
            self.take()

    def _stand(self, steppers: Sequence[Any], phases: Sequence[Phase]) -> None:
        """Register the models of the first steps, and decide whether they form a bundle."""
        self.steppers, apart = list(steppers), not can_bundle(steppers, phases)
        for number, stepper in enumerate(steppers):
            stepper.join(number, self.take, alone=apart)

    def take(self) -> None:
        """Take the waiting steps."""
        waiting, self.waiting = self.waiting, []
        same = len(waiting) == AT_ONCE and all(
            _kind(wanted) == _kind(waiting[0]) for wanted in waiting
        )
        for part in [waiting] if same else [[wanted] for wanted in waiting]:
            if not all(map(_warm, part[0])):
                _singly(part)
                continue
            _load(part)
            if part[0][0][0].alone:
                # The addresses of the weights change with this number.
                where = tuple(len(stepper.moving) for stepper, *_ in part[0])
                if not self._replay(
                    [(stepper, phase) for stepper, _, phase, _ in part[0]], len(part), where
                ):
                    _singly(part)
            else:
                self._take_together(part)

    def _replay(
        self, models: Sequence[tuple[Capturable, Phase]], count: int, where: tuple[int, ...] = ()
    ) -> bool:
        """Replay the graph of these steps; False if it could not be captured."""
        who = tuple(id(model) for model, _ in models)
        key = count, tuple(phase.name for _, phase in models), who, where
        if key not in self.graphs:
            # Graphs with other addresses are outdated.
            self.graphs = {
                other: graph for other, graph in self.graphs.items() if other[2:] == key[2:]
            }
            try:
                self.graphs[key] = captured(models, count)
            except Exception as error:  # a failed optimisation must not stop a run
                self._give_up(error)
                return False
        self.graphs[key].replay()
        return True

    def _give_up(self, error: Exception) -> None:
        """Take steps without CUDA graphs from now on, and say why."""
        self.captures = False
        cause = str(error).partition("\n")[0] or type(error).__name__
        event = Event(
            NOT_COMPILED,
            "run",
            f"Steps run without a CUDA graph, since they could not be captured: {cause}",
        )
        for stepper in self.steppers:
            stepper.renew_generators()
            stepper.note(event)

    def _take_together(self, part: Sequence[Sequence[Any]]) -> None:
        """Take loaded steps of models that form one bundle or a few."""
        phase = part[0][0][2]
        if not self.bundles:
            self.bundles = bundles([stepper for stepper, *_ in part[0]], phase)
            _load(part)  # again, because recording has advanced the generators
        if not self.bundles:  # fall back to separate models, and start the warm-up again
            for stepper in self.steppers:
                stepper.begin_again()
            _singly(part)
            return
        for bundle in self.bundles:
            bundle.only([stepper for stepper, *_ in part[0]])
        if self.captures and all(bundle.warm >= WARM_UP for bundle in self.bundles):
            if self._replay([(bundle, phase) for bundle in self.bundles], len(part)):
                return
            _load(part)  # again, because capturing has advanced the generators
        here = torch.cuda.current_stream(self.bundles[0].device)
        for bundle in self.bundles:
            bundle.run(phase, len(part), here)


def _warm(wanted: Any) -> bool:
    """Whether a step can be captured: the warm-up of its phase is over."""
    stepper, _, phase, _ = wanted
    return bool(stepper.seen.get(phase.name, 0) >= WARM_UP)


def _singly(part: Sequence[Sequence[Any]]) -> None:
    for stepper, step, phase, rate in (one for wanted in part for one in wanted):
        stepper.step(step, phase, rate)


def _load(part: Sequence[Sequence[Any]]) -> None:
    for several in zip(*part, strict=True):  # the steps of one model
        several[0][0].load(several[0][1], [rate for *_, rate in several])


def _kind(wanted: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    return tuple((id(stepper), phase.name) for stepper, _, phase, _ in wanted)
