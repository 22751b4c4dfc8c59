"""The history of a run while it trains: its rows of numbers and its notes.

They are kept in memory, written to ``metrics.jsonl`` and shown on the displays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

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
        self._before = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        self._began = time.perf_counter()

    def start_clock(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds that the run has trained, before and after it was resumed."""
        return self._before + time.perf_counter() - self._began

    def watch(self, watcher: Watcher) -> None:
        self.watchers.append(watcher)

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
        self._append(row)
        for watcher in self.watchers:
            watcher.row(row)
        self.note_folder(step)

    def note(self, step: int, event: Event) -> None:
        """Record an event."""
        self._append(event.row(step))
        self.tell(str(event))

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

    def _append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
