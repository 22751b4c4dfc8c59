"""The history of a run while it trains: its rows of numbers and its notes.

They are kept in memory and logged by trackers: ``metrics.jsonl``, the displays and those of the
user. Only displays are called after every step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aevb.trackers.protocol import Tracker
from aevb.training.display import Watcher
from aevb.training.events import FOLDER, Event
from aevb.training.run_folder import Folder


class History:
    """The rows of a run, and the seconds that it has trained.

    ``folder`` is None if nothing is written; ``rows`` are those of the run that is resumed.
    """

    def __init__(self, folder: Folder | None, rows: list[dict[str, Any]]) -> None:
        self.folder, self.rows = folder, rows
        self.watchers: list[Watcher] = []
        self._file = [] if folder is None else [MetricsFile(folder)]
        self.trackers: list[Tracker] = [*self._file]
        self._before = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        self._began = time.perf_counter()

    def start_clock(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds that the run has trained, before and after it was resumed."""
        return self._before + time.perf_counter() - self._began

    def watch(self, watcher: Watcher) -> None:
        """Add a display."""
        self.watchers.append(watcher)
        self.track(watcher)

    def track(self, tracker: Tracker) -> None:
        """Add a tracker, which gets the rows and the events from now on."""
        self.trackers.append(tracker)

    def stepped(self, step: int) -> None:
        """Tell the displays that a step was taken."""
        for watcher in self.watchers:
            watcher.step(step)

    def record(self, step: int, epoch: float, values: Mapping[str, Any]) -> None:
        """Record a row of numbers."""
        row = {
            "step": step,
            "epoch": round(epoch, 4),
            **values,
            "seconds": round(self.seconds, 3),
        }
        self._log(row, self.trackers)
        self.note_folder(step)

    def note(self, step: int, event: Event) -> None:
        """Record an event."""
        self._log(event.row(step), self.trackers)

    def note_once(self, step: int, event: Event) -> None:
        """Record an event unless the run, or the run that it resumes, has already recorded it."""
        if not any(
            row.get("note") == str(event) and row.get("kind", event.kind) == event.kind
            for row in self.rows
        ):
            self.note(step, event)

    def note_folder(self, step: int) -> None:
        """Record the notes of the run's folder."""
        for text in () if self.folder is None else self.folder.take_notes():
            self.note_once(step, Event(FOLDER, "run", text))

    def tell(self, text: str) -> None:
        """Show a note without recording it."""
        for watcher in self.watchers:
            watcher.note(text)

    def record_quietly(self, step: int, event: Event) -> None:
        """Record an event in memory and in ``metrics.jsonl`` only."""
        self._log(event.row(step), self._file)

    def _log(self, row: dict[str, Any], trackers: Sequence[Tracker]) -> None:
        self.rows.append(row)
        values = {name: value for name, value in row.items() if name != "step"}
        for tracker in trackers:
            tracker.log(row["step"], values)


class MetricsFile(Tracker):
    """The file ``metrics.jsonl`` of a run's folder. If it cannot be written, the run stops."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.folder.append({"step": step, **values})
