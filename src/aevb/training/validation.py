"""Validation during a run: the bound on held-out rows, the best value so far, and patience."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aevb.data.sources import Source
from aevb.training.best import Best, better
from aevb.training.evaluation import Evaluation
from aevb.training.job import Job


class Validation:
    """The validations of a run; ``source`` is None if it has no validation data."""

    def __init__(self, job: Job, source: Source | None) -> None:
        self.job, self.source = job, source
        self.best: Best | None = None
        self.waited = 0  # validations since the best one
        self._evaluation: Evaluation | None = None

    def values(self) -> dict[str, float]:
        """Return the bound, its terms and, if known, the exact evidence on the validation data.

        If ``beta`` or ``free_bits`` changes the objective, return the objective too.
        """
        assert self.source is not None
        if self._evaluation is None:
            s = self.job.settings
            self._evaluation = Evaluation(
                self.job.model,
                self.source,
                how=s.how,
                bound=s.bound,
                samples=self.job.plan.samples,
                seed=s.seed,
                settings=s,
            )
        return self._evaluation()

    def is_best(self, step: int, values: Mapping[str, float]) -> bool:
        """Count a validation, and return whether it is the best so far."""
        before, self.best = self.best, better(self.best, step, values[self.job.settings.judge])
        self.waited = self.waited + 1 if self.best is before else 0
        return self.waited == 0

    @property
    def out_of_patience(self) -> bool:
        patience = self.job.settings.patience
        return patience is not None and self.waited >= patience

    def close(self) -> None:
        self._evaluation = None  # frees its CUDA graph

    def state(self) -> dict[str, Any]:
        """Return the best validation and the validations since, for a checkpoint."""
        best = None if self.best is None else self.best.record()
        return {"best": best, "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = Best.of(state["best"]), state["waited"]
