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
    """Warning that a tracker failed. The run goes on, and its own files are complete.

    To stop a program at it, make it an error:

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", TrackerWarning)
    """


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about a run before its first step.

    Attributes:
        id: A text that stays the same if the run is resumed.
        name: The name of the run.
        model: The model, with its initial weights.
        settings: The settings of the run, as in config.toml.
        total: The number of steps of the whole run.
        group: The name that the runs of several seeds or of a sweep have in common.
        out: The folder of the run, if it has one.
        step: 0, or the step from which the run resumes.
        rows: The history up to that step.

    >>> from aevb import zoo
    >>> settings = {"lr": 0.01, "schedule": {"name": "em"}}
    >>> info = RunInfo("f00d", "first", zoo.fa(x=3, z=2), settings, 90)
    >>> info.config["lr"], info.config["schedule/name"], info.config["total steps"]
    (0.01, 'em', 90)
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

    >>> class Best(Tracker):
    ...     def start(self, run):
    ...         self.best = float("-inf")
    ...     def log(self, step, values):
    ...         self.best = max(self.best, values.get("validation elbo", self.best))
    >>> best = Best()  # for fit(…, trackers=[best]), which calls:
    >>> best.start(None), best.log(10, {"validation elbo": -9.5}), best.end("finished")
    (None, None, None)
    >>> best.artifact(Path("metrics.jsonl"), "history"), best.best
    (None, -9.5)
    """

    def start(self, run: RunInfo) -> str | None:
        """Begin to record a run.

        Arguments:
            run: What is known before the first step.

        Returns:
            A text to display, such as an address, or nothing.
        """

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the values of a step: a line of ``metrics.jsonl``.

        Several calls may have the same ``step``. A resumed run repeats the steps after its last
        checkpoint. The ``values`` are numbers, named as in ``run.history``, with the text
        ``phase``; or an event of the run, with the texts ``note`` and ``kind``.
        """

    def artifact(self, path: Path, kind: str) -> None:
        """Keep the file ``path`` of a run that has finished.

        ``kind`` is "declaration" (model.json), "settings" (config.toml), "history" (metrics.jsonl)
        or "weights" (of the best validation, or else of the last step).
        """

    def end(self, status: str) -> None:
        """The run is over: ``status`` is "finished", "stopped" (Ctrl-C) or "failed"."""


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by names in two groups, ``training/…`` and ``validation/…``.

    ``values`` are those of :meth:`Tracker.log`.

    >>> scalars({"epoch": 2.0, "elbo": -9.5, "validation kl(z)": 1.5, "phase": "joint"})
    {'training/elbo': -9.5, 'validation/kl(z)': 1.5}
    """
    found = {}
    for key, value in values.items():
        if key not in BESIDE and isinstance(value, int | float):
            name, validation = Metric.of(key)
            found[f"{'validation' if validation else 'training'}/{name}"] = value
    return found
