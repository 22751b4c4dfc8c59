"""Steps on a GPU, replayed as CUDA graphs of ten steps each.

Kernel launches then cost almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from aevb.compiled_step.cuda_streams import CudaStreams, streams_of
from aevb.compiled_step.fused_adam import MovedTogether, Vector
from aevb.training.gradient_steps import GradientSteps
from aevb.training.job import Job
from aevb.training.purity import drawn_by_torch, own_part
from aevb.training.row_order import seed_of
from aevb.training.schedules import Phase
from aevb.training.staging import Gathered, Staged

# Steps of a phase before it is captured. In them, libraries initialise and the optimiser creates
# its state.
WARM_UP = 3
AT_ONCE = 10  # steps per graph


def can_capture(job: Job) -> bool:
    """Whether a step runs only on a GPU, in one process, with the same operations at every call."""
    on_gpu = job.model._parameter().device.type == "cuda"
    return (
        on_gpu
        and job.world.size == 1
        and job.settings.schedule.objective == "bound"
        and not drawn_by_torch(job.plan)
        and own_part(job.model) is None
        and job.too_long is None
        # The rows of a window are read where the graph runs.
        and (job.windows is None or job.source.near)
    )


class GraphSteps(GradientSteps):
    """Steps that a queue (``step_queue.py``) captures and replays.

    During warm-up they run one by one.
    """

    captures = True

    def __init__(self, job: Job) -> None:
        super().__init__(job, AT_ONCE)
        self.number = 0  # index among models that are trained together; each has its own streams
        self.drawn: dict[str, int] = {}  # how far a step advances each generator
        self._take: Callable[[], None] | None = None

    def _staging(self) -> Staged | Gathered | None:
        if self.source.near or self.job.windows is not None:
            return super()._staging()
        return Staged(
            self.source,
            self.order,
            AT_ONCE,
            self.job.total,
            self.device,
        )

    # The queue ------------------------------------------------------------------------------------

    def join(self, number: int, take: Callable[[], None], *, alone: bool) -> None:
        """Join a queue; ``take`` makes it take the waiting steps.

        ``alone`` means: not in a bundle.
        """
        # A bundle would have to stack what each model carries from window to window.
        alone = alone or self.carried is not None
        self.number, self._take, self.alone = number, take, alone

    def begin_again(self) -> None:
        """Train alone from now on, and start the warm-up again."""
        self.alone, self.seen, self.compiled = True, {}, {}

    def take(self) -> None:
        if self._take is not None:
            self._take()

    # A step ---------------------------------------------------------------------------------------

    @property
    def streams(self) -> CudaStreams:  # type: ignore[override]
        return streams_of(self.device, self.number)

    @property
    def generators(self) -> list[torch.Generator]:
        """The random generators that a graph of its steps uses."""
        return [self.noise, *([self.drawing] if self.draws else [])]

    def renew_generators(self) -> None:
        """Replace the generators, which a failed capture leaves unusable."""
        self.noise, self.drawing = torch.Generator(self.device), torch.Generator(self.device)

    def settle(self) -> None:
        """Wait for the thread that reads rows."""
        if self.staged is not None:
            self.staged.settle()

    def step(self, step: int, phase: Phase, rate: float) -> None:
        self.load(step, [rate])
        self.seen[phase.name] = self.seen.get(phase.name, 0) + 1
        here = torch.cuda.current_stream(self.device)
        self.streams.chain.wait_stream(here)
        with torch.cuda.stream(self.streams.chain):
            self.advance(phase)
        here.wait_stream(self.streams.chain)

    def _often_enough(self, phase: Phase) -> bool:
        return self.seen[phase.name] >= WARM_UP

    def _put_rows(self, rows: Tensor) -> None:
        self.rows[: len(rows)].copy_(rows, non_blocking=True)

    def _seed(self, generator: torch.Generator, word: str, step: int) -> None:
        """Set the generator to the step's offset in one random stream.

        One graph can then hold several steps.
        """
        if word not in self.drawn:
            self.noise.manual_seed(0), self.drawing.manual_seed(0)
            self.inputs(0)
            self.drawn = {"noise": self.noise.get_offset(), "data": self.drawing.get_offset()}
        generator.manual_seed(seed_of(self.settings.seed, word))
        generator.set_offset(step * self.drawn[word])

    def _moved_together(self, phase: Phase, active: Sequence[nn.Parameter]) -> MovedTogether | None:
        vector, step = (
            Vector((active, self.adam), remarks=self.uncompiled),
            self.compiled.get(phase.name),
        )
        if step is not None:
            step.write_into(vector.gradients)
        return vector

    def close(self) -> None:
        self._take = None
        super().close()
