"""Trackio: a local database with a dashboard (``trackio show``), or a Space of Hugging Face."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from aevb.trackers.packages import check_installed
from aevb.trackers.protocol import RunInfo, Tracker, scalars


@dataclass
class Trackio(Tracker):
    """Record runs in Trackio, locally or on Hugging Face.

    A resumed run goes on in the same Trackio run: its name ends with the beginning of its id. Runs
    of several seeds or of a sweep form a group. Files are not sent.

    Arguments:
        project: The project.
        space: A Space of Hugging Face, "user/name". Without it, the runs are recorded locally.

    >>> Trackio(project="digits")  # it needs the package trackio      # doctest: +SKIP
    Trackio(project='digits', space=None)
    """

    project: str = "aevb"
    space: str | None = None
    _run: Any = field(default=None, init=False, repr=False, compare=False)
    _known: int = field(default=-1, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_installed("trackio", "trackio")

    def start(self, run: RunInfo) -> str | None:
        import trackio

        name = f"{run.name}-{run.id[:6]}"
        self._run = _quietly(
            trackio.init,
            self.project,
            name=name,
            group=run.group,
            space_id=self.space,
            config=run.config,
            resume="allow" if run.step else "never",
            embed=False,
        )
        # Its own counter of steps, which has no public name.
        self._known = getattr(self._run, "_next_step", 0) - 1 if run.step else -1
        where = f"https://huggingface.co/spaces/{self.space}" if self.space else "trackio show"
        return f"Trackio: run {name} of project {self.project}; see it by {where}"

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if "note" in values or step <= self._known:
            return  # a resumed run repeats the steps after its last checkpoint
        beside = {name: values[name] for name in ("epoch", "seconds") if name in values}
        self._run.log(scalars(values) | beside, step=step)

    def end(self, status: str) -> None:
        if self._run is not None:
            _quietly(self._run.finish)
            self._run = None


def _quietly(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call a function of trackio without its printing, which belongs to the display of the run.

    It runs in a context of its own: trackio.init ends the run of the context before, which may be
    one that trains at the same time.
    """
    with redirect_stdout(io.StringIO()):
        return Context().run(function, *arguments, **settings)
