"""Train several models of one declaration, each with its own seed, step by step in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aevb.training.checkpoint import TrainingError
from aevb.training.interrupts import Stopped, interruptible, stopped
from aevb.training.loop import Training
from aevb.training.run import Run
from aevb.training.step_queue import StepQueue
from aevb.training.threads import threads


def list_of_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the list of seeds for ``seeds=``: 0, 1, … for a number, or the given list."""
    chosen = list(range(seeds)) if isinstance(seeds, int | np.integer) else list(seeds)
    if isinstance(seeds, bool) or not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"seeds is a positive number of runs, or a list of different seeds, got {seeds!r}."
        )
    return chosen


def train_together(trainings: Sequence[Training]) -> list[Run]:
    """Train several runs, one step of each in turn.

    If one run is interrupted or fails, all of them stop, and the others save a checkpoint first.
    """
    queue, interrupt = StepQueue(), False
    failed: tuple[Training, TrainingError] | None = None
    with threads(trainings[0].threads), interruptible() as interrupted:
        loops = {training: training.loop(interrupted) for training in trainings}
        while loops:
            wanted = []
            for training, loop in list(loops.items()):
                try:
                    wanted.append(training.wanted(next(loop)))
                    continue
                except StopIteration:
                    pass
                except Stopped:
                    interrupt = True
                except TrainingError as error:
                    failed = failed or (training, error)
                    interrupted.ask_to_stop()
                del loops[training]
            if wanted:
                queue.step(wanted)
                for training in loops:
                    training.note_remarks()
    where = trainings[0].out.parent if trainings[0].out is not None else None
    if failed is not None:
        training, cause = failed
        saved = "" if where is None else " and saved"
        others = f" The other runs were stopped{saved}." if interrupt else ""
        raise TrainingError(f"Seed {training.settings.seed}: {cause}{others}") from cause
    if interrupt:
        steps = ", ".join(str(training.step) for training in trainings)
        raise stopped(f"stopped after steps {steps} of {trainings[0].total}", "them", where)
    return [training.finished() for training in trainings]
