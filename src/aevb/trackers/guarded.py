"""Keep the failures of a tracker away from the run: warn, go on, and say what is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aevb.trackers.protocol import RunInfo, Tracker, TrackerWarning

MOST = 3  # failures in a row after which a tracker gets no more rows


class Guarded(Tracker):
    """A tracker whose exceptions become warnings.

    ``told(step, text)`` is called at the first failure, to record it in the run's history.
    """

    def __init__(self, tracker: Tracker, told: Callable[[int, str], None]) -> None:
        self.tracker, self.told = tracker, told
        self.name = type(tracker).__name__
        self.step = 0
        self.rows, self.lost = 0, 0  # rows of the run, and those that were not recorded
        self.first = ""  # the first failure
        self._in_a_row = 0
        self._where = "The run's own history has them all."

    def start(self, run: RunInfo) -> str | None:
        self.step = run.step
        if run.out is not None:
            self._where = f"{run.out / 'metrics.jsonl'} has them all."
        try:
            return self.tracker.start(run)
        except Exception as error:
            self._in_a_row = MOST
            self._failed("start", error)
            return None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.step = step
        self.rows += 1
        if self._in_a_row >= MOST or not self._call("log", step, dict(values)):
            self.lost += 1

    def artifact(self, path: Path, kind: str) -> None:
        if self._in_a_row < MOST:
            self._call("artifact", path, kind)

    def end(self, status: str) -> None:
        self._call("end", status)
        if self.first:
            lost = f"{self.lost} of {self.rows} rows of the run are missing there"
            warnings.warn(
                f"{self.name}: {lost if self.lost else 'all rows of the run were recorded'} "
                f"({self.first}). {self._where if self.lost else ''}".strip(),
                TrackerWarning,
                stacklevel=2,
            )

    def _call(self, method: str, *arguments: Any) -> bool:
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:
            self._in_a_row += 1
            self._failed(method, error)
            return False
        self._in_a_row = 0
        return True

    def _failed(self, method: str, error: Exception) -> None:
        if self.first:
            return
        lines = str(error).splitlines() or [""]
        self.first = f"{method} failed at step {self.step}: {type(error).__name__}: {lines[0]}"
        text = f"The tracker {self.name} failed, and the run goes on without it: {self.first}"
        self.told(self.step, text)
        warnings.warn(text, TrackerWarning, stacklevel=2)
