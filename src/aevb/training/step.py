"""The interface between the training loop and its steps, and the metrics that steps accumulate.

Implementations: closed-form EM and L-BFGS, which iterate over all rows (``exact_steps.py``), and
Adam on batches (``gradient_steps.py``), which a GPU replays as CUDA graphs (``graph_steps.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aevb.estimate.metric_names import OBJECTIVE
from aevb.training.checkpoint import CheckpointError, State
from aevb.training.distributed import World
from aevb.training.job import Job
from aevb.training.schedules import Phase

# A requested step: stepper, step number, phase, learning rate.
Wanted = tuple["Stepper", int, Phase, float]


class Tally:
    """The metrics summed since the last reading, and whether a step failed.

    Both are tensors on the device. A failed step changes nothing. On a GPU, the host does not check
    for failures after every step.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, world: World) -> None:
        self.world = world
        self.failed = torch.zeros((), device=device)  # 1 once a step has failed
        # Steps since the host last checked. The first of them was ``origin``.
        self.moved = torch.zeros((), device=device)
        self.taken = torch.zeros((), device=device)  # steps whose metrics are in ``sums``
        self.sums = torch.zeros(0, device=device, dtype=dtype)
        self.names: list[str] = []  # of the metrics
        self.restored: list[str] = []  # names of the metrics of a checkpoint, until the next step
        self.origin: int | None = None

    def begin(self, step: int) -> None:
        """Set the first step since the last check to this one, if there is none yet."""
        self.origin = step if self.origin is None else self.origin

    def rename(self, names: Sequence[str]) -> None:
        """Set the names of the metrics."""
        self.names = list(names)

    def fail(self) -> None:
        """Note that a step failed."""
        self.failed.fill_(1.0)

    def set(self, names: Sequence[str], values: Sequence[float]) -> None:
        """Count a step and replace the metrics by its own, in float64.

        Iterations over all rows are not averaged.
        """
        self.names = list(names)
        self.sums = (
            torch.tensor(list(values), dtype=torch.float64, device=self.sums.device)
            / self.world.size
        )
        self.taken.fill_(1)
        self.moved.add_(1)

    def add(self, values: Sequence[float]) -> None:
        """Count a step and add its metrics."""
        self.sums.add_(torch.tensor(list(values), dtype=self.sums.dtype, device=self.sums.device))
        self.taken.add_(1)
        self.moved.add_(1)

    def make_room(self) -> None:
        if not len(self.sums):
            self.sums = torch.zeros(len(self.names), device=self.sums.device, dtype=self.sums.dtype)
        if self.restored == [name for name in self.names if name != OBJECTIVE] != self.names:
            # Earlier versions did not record the objective: start the means anew.
            self.sums = self.sums.new_zeros(len(self.names))
            self.taken.zero_()
        self.restored = []
        if len(self.sums) != len(self.names):
            raise CheckpointError(
                f"The checkpoint has sums of {len(self.sums)} quantities, but a step measures "
                f"{len(self.names)} ({', '.join(self.names)}). "
                "Resume from another checkpoint."
            )

    def look(self) -> int | None:
        """Check for failures: return the number of the failed step, or None."""
        assert self.origin is not None
        if bool(self.failed):
            return self.origin + int(self.moved)
        self.moved.zero_()
        self.origin = None
        return None

    def pass_over(self) -> None:
        """Clear the failure, so that training continues after the failed step."""
        self.failed.zero_()
        self.moved.zero_()
        self.origin = None

    def metrics(self) -> dict[str, Any]:
        """Return the sums of the metrics since the last reading, over all processes."""
        sums = self.sums.clone()
        self.world.sum([sums])
        return {"taken": int(self.taken), "sums": dict(zip(self.names, sums.tolist(), strict=True))}

    def read(self) -> dict[str, float]:
        """Return the means of the metrics over the steps since the last reading, and reset them."""
        found = self.metrics()
        self.sums.zero_()
        self.taken.zero_()
        return (
            {name: value / found["taken"] for name, value in found["sums"].items()}
            if found["taken"]
            else {}
        )

    def restore(self, metrics: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.names = self.restored = list(metrics["sums"])
        # The sums are over all processes. The first process keeps them.
        mine = 1.0 if self.world.first else 0.0
        self.sums = mine * torch.tensor(
            list(metrics["sums"].values()), device=self.sums.device, dtype=dtype
        )
        self.taken.fill_(metrics["taken"])


class Stepper(ABC):
    """Base class: takes the steps of one run, and keeps their state."""

    captures = False  # whether steps are replayed as CUDA graphs
    waits = False  # whether the host may leave steps unchecked for a while
    converged = False  # whether no further step is needed
    left_alone: str | None = None  # why EM does not set q
    not_recorded: str | None = None  # why steps cannot be recorded

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model, self.source, self.order, self.settings, self.world = (
            job.model,
            job.source,
            job.order,
            job.settings,
            job.world,
        )
        like = job.model._parameter()
        self.device, self.dtype = like.device, like.dtype
        groups = {"theta": job.model.theta(), "phi": job.model.phi()}
        self.groups = {
            name: [p for p in group if p.requires_grad] for name, group in groups.items()
        }
        self.names = {parameter: name for name, parameter in job.model.named_parameters()}
        self.tally = Tally(self.device, self.dtype, job.world)
        self.at = 0  # the step that failed

    def active(self, phase: Phase) -> list[nn.Parameter]:
        """Return the parameters that a phase trains."""
        return [p for name in ("theta", "phi") if getattr(phase, name) for p in self.groups[name]]

    @abstractmethod
    def step(self, step: int, phase: Phase, rate: float) -> None:
        """Take a step."""

    def take(self) -> None:  # noqa: B027
        """Take the steps that were requested but are still waiting in a queue."""

    def remarks(self, taken: int, total: int) -> list[Any]:
        """Return the events to record after ``taken`` steps.

        The loop drops those already recorded.
        """
        return []

    def settle_model(self) -> None:  # noqa: B027
        """Write the current parameters into the model, so that they can be read."""

    def close(self) -> None:  # noqa: B027
        """Release resources after the last step."""

    # Failures and metrics -------------------------------------------------------------------------

    def failed(self) -> bool:
        """Whether a step failed since the last check; ``at`` is then its number."""
        self.take()
        found = self.tally.look()
        self.at = self.at if found is None else found
        return found is not None

    def go_on(self) -> None:
        """Skip the step that failed."""
        self.tally.pass_over()

    def read(self) -> dict[str, float]:
        self.take()
        return self.tally.read()

    def metrics(self) -> dict[str, Any]:
        self.take()
        return self.tally.metrics()

    # State ----------------------------------------------------------------------------------------

    @abstractmethod
    def state(self) -> State:
        """Return the state that the next step needs besides the weights, for a checkpoint."""

    @abstractmethod
    def restore(self, state: State, metrics: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""

    # Failed steps ---------------------------------------------------------------------------------

    def sound(self, steps: Iterable[int]) -> bool:
        """Return whether the weights and an objective are finite.

        One finite objective of these steps' batches is enough.
        """
        return not self.world.any(bool(self._broken()) or not self._judged(steps))

    def _judged(self, steps: Iterable[int]) -> bool:
        """Whether the objective is finite; an iteration over all rows has checked that already."""
        return True

    def _broken(self) -> list[str]:
        """Return the factors with non-finite parameters."""
        return [
            name
            for name, factor in self.model.factors.items()
            if any(not bool(p.isfinite().all()) for p in factor.parameters())
        ]

    @abstractmethod
    def what_failed(self, step: int, phase: Phase) -> str:
        """Return a sentence that says why a step failed."""
