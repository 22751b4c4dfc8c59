"""The trackers of a run: their names and ids, their start, and their end."""

from __future__ import annotations

import json
import re
import uuid
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from aevb.runtime.checked_files import read_json, replace
from aevb.trackers.guarded import Guarded
from aevb.trackers.opening import TENSORBOARD, Trackers, check_trackers, opened
from aevb.trackers.protocol import FAILED, FINISHED, STOPPED, RunInfo, Tracker
from aevb.training import events
from aevb.training.checkpoint import CheckpointError, folder_of, folders, read_manifest
from aevb.training.events import Event
from aevb.training.run_folder import TRACKING, Folder

if TYPE_CHECKING:
    from aevb.training.history import History
    from aevb.training.job import Job


class Tracking:
    """The trackers that ``fit`` was given, for one run or for the runs of several seeds."""

    def __init__(self, trackers: Trackers = (), *, several: bool = False) -> None:
        check_trackers(trackers, several=several)
        self.trackers, self.several = trackers, several
        self.tensorboard = TENSORBOARD in trackers
        self._unsaved = uuid.uuid4().hex[:6]  # names the runs that have no folder
        # Made before the data are read, so that a missing package is refused at once. Those of
        # several runs are made when each of them starts.
        self._made = [] if several else opened(trackers, several=False)
        if several:
            opened([one for one in trackers if isinstance(one, str)], several=True)

    def start(self, job: Job, history: History, closing: ExitStack, step: int) -> list[str]:
        """Start the trackers of a run, in its first process. ``closing`` ends them.

        Return what they say about where the run can be seen.
        """
        if not job.world.first:
            return []
        made = opened(self.trackers, several=True) if self.several else self._made
        if not made:
            return []
        folder = history.folder
        name, group = self._names(folder, job.settings.seed)
        info = RunInfo(
            id=_identity(folder, resumed=step > 0),
            name=name,
            model=job.model,
            settings=job.settings.record(),
            total=job.total,
            group=group,
            out=None if folder is None else folder.path,
            step=step,
            rows=tuple(history.rows),
        )

        def told(at: int, text: str) -> None:
            history.record_quietly(at, Event(events.TRACKER, "run", text))

        guarded = [Guarded(one, told) for one in made]
        places = []
        for one in guarded:
            closing.push(_Ending(one, info.out))
            places.append(one.start(info))
            history.track(one)
        return [place for place in places if place is not None]

    def _names(self, folder: Folder | None, seed: int) -> tuple[str, str | None]:
        if folder is not None:
            return names_of(folder.path)
        if self.several:
            return f"run-{self._unsaved}/seed-{seed}", f"run-{self._unsaved}"
        return f"run-{self._unsaved}", None


class _Ending:
    """The end of a tracker, as the exit of a context: the exception says how the run ended."""

    def __init__(self, tracker: Tracker, out: Path | None) -> None:
        self.tracker, self.out = tracker, out

    def __call__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            for path, what in _files(self.out):
                self.tracker.artifact(path, what)
            self.tracker.end(FINISHED)
            return
        with warnings.catch_warnings():
            # As errors, they would replace the exception that ended the run.
            warnings.simplefilter("default")
            self.tracker.end(STOPPED if issubclass(kind, KeyboardInterrupt) else FAILED)


def names_of(out: Path) -> tuple[str, str | None]:
    """Return the name and the group of a run in this folder.

    The runs of several seeds have the name of their folder in common, and those of a sweep the name
    of the sweep.

    >>> names_of(Path("/runs/vae")), names_of(Path("/runs/vae/seed-3"))
    (('vae', None), ('vae/seed-3', 'vae'))
    """
    path = out.resolve()
    if not re.fullmatch(r"seed-\d+", path.name):
        return path.name or "run", None
    parent = path.parent
    if (parent.parent / "sweep.json").is_file():
        return f"{parent.parent.name}/{parent.name}/{path.name}", parent.parent.name
    return f"{parent.name}/{path.name}", parent.name


def _identity(folder: Folder | None, *, resumed: bool) -> str:
    """Return the id of a run. That of a run with a folder is kept there, so that it can resume."""
    if folder is None:
        return uuid.uuid4().hex
    path = folder.path / TRACKING
    if resumed and path.is_file():
        try:
            found = read_json(path)["id"]
        except (OSError, ValueError, TypeError, KeyError):
            found = None
        if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{32}", found):
            return found
    made = uuid.uuid4().hex
    with folder.writing(path, None):
        replace(path, json.dumps({"id": made}) + "\n")
    return made


def _files(out: Path | None) -> list[tuple[Path, str]]:
    """Return the files of a finished run with their kinds."""
    if out is None or not folders(out):
        return []
    chosen = folders(out)[-1]
    try:
        best = read_manifest(chosen)["state"]["best"]
        chosen = chosen if best is None else folder_of(out, best["step"])
    except CheckpointError:
        pass  # whoever loads the run is told
    found = [
        (out / "model.json", "declaration"),
        (out / "config.toml", "settings"),
        (out / "metrics.jsonl", "history"),
        (chosen / "weights.safetensors", "weights"),
    ]
    return [(path, kind) for path, kind in found if path.is_file()]
