"""How often a run records its metrics, validates and saves a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from aevb.training.graph_steps import AT_ONCE
from aevb.training.job import ITERATIONS, Job

ENTRIES = 200  # entries of the history per run, by default


class Due(NamedTuple):
    """What is due after a step."""

    log: bool
    validate: bool
    checkpoint: bool


class Intervals(NamedTuple):
    """The numbers of steps between entries of the history, validations and checkpoints."""

    log: int
    validate: int
    checkpoint: int

    @classmethod
    def of(cls, job: Job, *, captures: bool) -> Intervals:
        """Return the intervals of a run; ``captures`` says that its steps are CUDA graphs."""
        s = job.settings
        log = 1 if job.on_all_rows and job.total <= ITERATIONS else max(1, job.total // ENTRIES)
        if captures:  # a CUDA graph holds AT_ONCE steps
            log = -(-log // AT_ONCE) * AT_ONCE
        validate = s.validate_every or job.per_epoch
        return cls(s.log_every or log, validate, s.checkpoint_every or validate)

    def due(self, step: int, *, last: bool) -> Due:
        """Return what is due after ``step`` steps; everything is after the last one."""
        return Due(
            last or step % self.log == 0,
            last or step % self.validate == 0,
            last or step % self.checkpoint == 0,
        )
