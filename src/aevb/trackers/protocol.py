"""The protocol of trackers: start, log, artifact, end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.estimate.metric_names import Metric

if TYPE_CHECKING:
    from aevb.model import Model

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"  # how a run ended
BESIDE = ("step", "epoch", "seconds")  # numbers of a row that are no metrics


class TrackerWarning(UserWarning):
    """Warning that a tracker failed. The run goes on, and its own files are complete."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about a run before its first step.

    ``id`` stays the same if the run is resumed. ``group`` is the name that the runs of several
    seeds or of a sweep have in common. ``step`` is 0, or the step from which the run resumes, and
    ``rows`` is its history up to there.
    """

    id: str
    name: str
    model: Model
    settings: Mapping[str, Any]  # plain values, as in config.toml
    total: int  # steps of the whole run
    group: str | None = None
    out: Path | None = None
    step: int = 0
    rows: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    @property
    def config(self) -> dict[str, Any]:
        """The settings and the declaration, as flat plain values for a table of runs.

        Names of nested settings are joined by a slash: ``schedule/name``.
        """
        graph = self.model.graph
        found: dict[str, Any] = {}
        for name, value in self.settings.items():
            if isinstance(value, Mapping):
                found |= {f"{name}/{key}": each for key, each in value.items()}
            elif value is not None:
                found[name] = value
        parameters = sum(p.numel() for p in self.model.parameters())
        sizes = {f"size/{name}": graph.size(name) for name in (*graph.latents, *graph.observed)}
        declared = self.model.declaration()
        sides = {side: ", ".join(declared[side]) for side in ("p", "q") if declared.get(side)}
        return found | sizes | sides | {"parameters": parameters, "total steps": self.total}


class Tracker:
    """Base class of trackers. Every method does nothing; override those that you need.

    ``fit`` calls ``start`` once, ``log`` about 200 times and after every validation, ``artifact``
    for the files of a run that finished, and ``end`` once. It calls them in the first process only,
    and never between two steps without something to record, so that a tracker costs no time in the
    steps themselves.

    If a method raises an exception, the run goes on and warns.

    >>> class Loudest(Tracker):
    ...     best = float("-inf")
    ...     def log(self, step, values):
    ...         self.best = max(self.best, values.get("validation elbo", self.best))
    """

    def start(self, run: RunInfo) -> str | None:
        """Begin to record a run. The text that this returns is displayed, such as an address."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the values of a step: a line of ``metrics.jsonl``.

        They are numbers, named as in ``run.history``, with the text ``phase``; or an event of the
        run, with the texts ``note`` and ``kind``. Several calls may have the same step. A resumed
        run repeats the steps after its last checkpoint.
        """

    def artifact(self, path: Path, kind: str) -> None:
        """Keep a file of a run that has finished.

        ``kind`` is "declaration" (model.json), "settings" (config.toml), "history" (metrics.jsonl)
        or "weights" (of the best validation, or else of the last step).
        """

    def end(self, status: str) -> None:
        """The run is over: ``status`` is "finished", "stopped" (Ctrl-C) or "failed"."""


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by names in two groups, ``training/…`` and ``validation/…``.

    >>> scalars({"epoch": 2.0, "elbo": -9.5, "validation kl(z)": 1.5, "phase": "joint"})
    {'training/elbo': -9.5, 'validation/kl(z)': 1.5}
    """
    found = {}
    for key, value in values.items():
        if key not in BESIDE and isinstance(value, int | float):
            name, validation = Metric.of(key)
            found[f"{'validation' if validation else 'training'}/{name}"] = value
    return found
