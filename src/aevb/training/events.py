"""Events of a run: what happened besides its numbers, for a program to tell apart and for a person to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What an event is about. A kind is part of a run's file format: programs tell events apart by it, never by the text.
SKIPPED = "step skipped"  # a step whose loss or gradient was not finite was left out
UNTAUGHT = "q untaught"  # a latent that every row knows, so that nothing trains q's factor of it
LABELS = "labels do not teach q"
CONVERGED = "converged"
NOT_CONVERGED = "not converged"
FLOOR = "variance floor"
LEFT_ALONE = "q left alone"
NOT_COMPILED = "not compiled"
IN_BATCHES = "mle in batches"
P_ALONE = "p trained alone"
REPEATED = "repeated values"
FELL_BACK = "bound fell back"
ONE_SAMPLE = "one sample"
FOLDER = "folder"
TOGETHER = "several runs"


@dataclass(frozen=True)
class Event:
    """Something that a run has to say: of what ``kind`` it is, what it is ``about`` (a variable, or the run), a sentence, and what to do."""

    kind: str
    about: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".strip()

    def row(self, step: int) -> dict[str, Any]:
        """A line of ``metrics.jsonl``."""
        return {"step": step, "note": str(self), "kind": self.kind, "about": self.about} | ({"remedy": self.remedy} if self.remedy else {})


def events(rows: Iterable[Mapping[str, Any]], kind: str | None = None) -> list[Event]:
    """The events among a run's rows, all or those of a kind. Rows of versions that wrote sentences alone have the kind ""."""
    found = []
    for row in rows:
        if "note" in row and kind in (None, row.get("kind", "")):
            remedy = str(row.get("remedy", ""))
            text = str(row["note"]).removesuffix(remedy).rstrip() if remedy else str(row["note"])
            found.append(Event(row.get("kind", ""), row.get("about", ""), text, remedy))
    return found
