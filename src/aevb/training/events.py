"""Events of a run: notes with a machine-readable kind and a text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Kinds of events. They are part of the file format: programs distinguish events by kind, never by
# text.
SKIPPED = "step skipped"  # a batch with a non-finite loss or gradient was skipped
UNTAUGHT = "q untaught"  # a latent is observed in every row, so that its q is not trained
LABELS = "labels do not teach q"
CONVERGED = "converged"
NOT_CONVERGED = "not converged"
FLOOR = "variance floor"
LEFT_ALONE = "q left alone"
NOT_COMPILED = "not compiled"
COMPILED = "compiled"
IN_BATCHES = "mle in batches"
P_ALONE = "p trained alone"
REPEATED = "repeated values"
BIASED = "biased gradient"
NARROW_START = "narrow start"  # the data lie far outside the prior of a latent
ZERO_START = "zeros before the series"  # p reads them, and the data are far from 0
SHORT = "short series"  # fewer known values than p has unknown starting values
SMALL_SCALE = "small scale"  # the fixed scale of a likelihood is far below the spread of the data
UNSCALED = "unscaled data"  # the data are far from mean 0 and standard deviation 1
MARKER = "marker of missing values"  # a number such as -999 repeats far outside the others
OBJECTIVE = "objective"  # the run maximises something else than the bound
FEW_STEPS = "few steps"  # small data, for which the default number of epochs has few steps
WINDOWS = "windows"  # truncated back-propagation through time
FELL_BACK = "bound fell back"
ONE_SAMPLE = "one sample"
PIXELS = "pixels prepared"  # images of bytes, prepared as their likelihood requires
FOLDER = "folder"
DEVICE = "device"  # device="auto" avoids a GPU on which the model does not train
SCHEDULE = "usual schedule"  # the user names no schedule, and the model has one of its own
LOOSE = "loose bound"  # the evidence is exact and far above the bound
STOPPED_EARLY = "stopped early"  # the patience of the run has run out
TRACKER = "tracker failed"
# Events that concern the machine of the run only. They name its folders or hosts, so they are not
# published.
LOCAL = (FOLDER, TRACKER)
# Events that say that results may be wrong: odd data, and signs of failed training.
ODD_DATA = (NARROW_START, ZERO_START, SMALL_SCALE, UNSCALED, MARKER)
WARNINGS = (*ODD_DATA, FELL_BACK, ONE_SAMPLE, LOOSE)


EVENT_FIELDS = ("note", "kind", "about", "remedy")  # the texts in the row of an event


@dataclass(frozen=True)
class Event:
    """A note of a run: its ``kind``, its subject, a text and a remedy.

    ``about`` is the subject: a variable, or "run".
    """

    kind: str
    about: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".strip()

    def row(self, step: int) -> dict[str, Any]:
        """Return the event as a line of ``metrics.jsonl``."""
        return {"step": step, "note": str(self), "kind": self.kind, "about": self.about} | (
            {"remedy": self.remedy} if self.remedy else {}
        )


def events(rows: Iterable[Mapping[str, Any]], kind: str | None = None) -> list[Event]:
    """Return the events among a run's rows, all of them or those of one kind.

    Rows of earlier versions have only a text, from which :func:`_of_earlier_version` finds the
    kind.
    """
    found = []
    for row in rows:
        if "note" not in row:
            continue
        remedy = str(row.get("remedy", ""))
        text = str(row["note"]).removesuffix(remedy).rstrip() if remedy else str(row["note"])
        event = (
            Event(row["kind"], row.get("about", ""), text, remedy)
            if "kind" in row
            else _of_earlier_version(text)
        )
        if kind in (None, event.kind):
            found.append(event)
    return found


def _of_earlier_version(text: str) -> Event:
    """Return the event of a note that was recorded without a kind; "" is the kind of the others.

    The sentences are those of that version and will not change.
    """
    if " Skipped (" in text:
        return Event(SKIPPED, "run", text)
    variable, known, rest = text.partition(" is known in every row: ")
    if known:
        head, _, remedy = rest.partition(". ")
        return Event(UNTAUGHT, variable, f"{variable}{known}{head}.", remedy)
    return Event("", "", text)
