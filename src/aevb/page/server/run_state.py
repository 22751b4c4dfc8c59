"""What the folder of a run says about it: its newest checkpoint, and whether it still trains.

Everything here only reads. In particular, nothing here takes or creates the lock of a run: a
trainer that starts at the same moment would be refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from aevb.runtime.checked_files import read_json
from aevb.runtime.process_namespace import process_namespace
from aevb.training.events import CONVERGED, NOT_CONVERGED
from aevb.training.settings import Settings

WAITING, TRAINING, FINISHED, STOPPED = "waiting", "training", "finished", "stopped"
REMOTE = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|ceph|beegfs|9p|fuse\..*|afs|virtiofs")
RECENT = 60.0  # seconds since the last line of a run whose process may not be seen from here
LAST_LINES = 2**16  # bytes at the end of metrics.jsonl that are searched for the last events


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    ``checkpoint`` identifies the newest checkpoint, or the saved model of a table's density; it is
    None if there is none. ``step`` and ``total`` are those of the checkpoint; None if unknown.
    ``begun`` says that the folder has a model.
    """

    state: str
    checkpoint: str | None = None
    step: int | None = None
    total: int | None = None
    begun: bool = False


class Folder:
    """A run's folder, which may not exist yet. Manifests are read once for each checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A checkpoint and whether the run trained; the total of its steps and whether it ended.
        self._known: tuple[tuple[str, bool], tuple[int | None, bool]] | None = None

    def look(self) -> Snapshot:
        """Read the state of the run."""
        begun = (self.path / "model.json").is_file()
        held = holds_lock(self.path)
        training = held is True or (held is None and wrote_lately(self.path))
        newest = newest_checkpoint(self.path)
        if newest is None:
            density = _written(self.path / "weights.safetensors") if begun else None
            if density is not None and not training:
                return Snapshot(FINISHED, f"model.{density}", begun=True)
            state = TRAINING if training else STOPPED if begun else WAITING
            return Snapshot(state, begun=begun)
        step, checkpoint = newest
        if self._known is None or self._known[0] != (checkpoint, training):
            self._known = (checkpoint, training), _progress(self.path, step)
        total, ended = self._known[1]
        training = training and not (ended and held is None)
        state = TRAINING if training else FINISHED if ended else STOPPED
        return Snapshot(state, checkpoint, step, total, begun)


def newest_checkpoint(path: Path) -> tuple[int, str] | None:
    """Return the step of the newest checkpoint and a text that identifies it.

    >>> newest_checkpoint(Path("no such folder")) is None
    True
    """
    try:
        names = os.listdir(path / "checkpoints")
    except OSError:
        return None
    steps = sorted(int(name[5:]) for name in names if re.fullmatch("step-[0-9]{1,18}", name))
    for step in reversed(steps):  # one that is being deleted has no manifest any more
        written = _written(path / "checkpoints" / f"step-{step}" / "manifest.json")
        if written is not None:
            return step, f"{step}.{written}"
    return None


def _written(path: Path) -> str | None:
    """Identify a file by its inode and the time of its last change; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return f"{found.st_ino:x}.{found.st_mtime_ns:x}" if stat.S_ISREG(found.st_mode) else None


# Whether a run still trains -----------------------------------------------------------------------


def holds_lock(path: Path) -> bool | None:
    """Return whether a process trains in a folder, without touching its lock.

    The kernel lists the locks of the processes that this one can see, and the trainer writes its
    process id and its namespace into its lock. The result is None if the trainer may be a process
    that is not seen from here: of another machine, or of another container.
    """
    lock = path / ".lock"
    try:
        found = lock.stat()
        if not stat.S_ISREG(found.st_mode):
            return False
        with lock.open(encoding="utf-8", errors="replace") as file:
            process, _, namespace, *_ = [*file.read(200).split("\n"), "", "", ""]
    except OSError:
        return False
    listed = _flocks()
    if listed is None:  # no Linux: the process that wrote the lock still runs
        return _lives(process)
    # A file of another file system may have the same inode.
    if any(_own_id(one) == process for one in listed.get(found.st_ino, ())):
        return True
    elsewhere = namespace.startswith("pid:") and namespace != process_namespace()
    return None if elsewhere or _is_remote(path) else False


def _flocks() -> dict[int, list[str]] | None:
    """Return the processes that hold a flock, by the inode of the file; None if none are listed."""
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as lines:
            fields = [line.split() for line in lines]
    except OSError:
        return None
    found: dict[int, list[str]] = {}
    for line in fields:
        if len(line) >= 6 and line[1] == "FLOCK" and line[3] == "WRITE":
            place = line[5].rpartition(":")[2]
            if place.isdecimal():
                found.setdefault(int(place), []).append(line[4])
    return found


def _own_id(process: str) -> str:
    """Return the id of a process in its own namespace."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as lines:
            found = [line.split() for line in lines if line.startswith("NSpid:")]
    except OSError:
        return process
    return found[0][-1] if found else process


def _lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True  # a process of another user
    except (OSError, ValueError, OverflowError):
        return False
    return True


def wrote_lately(path: Path) -> bool:
    """Return whether a run has written a line of its history within RECENT seconds."""
    return _seconds_since(path / "metrics.jsonl") < RECENT


def _is_remote(path: Path) -> bool:
    """Return whether other machines may write to the file system of a folder."""
    place = str(path.resolve())
    best = ("", "")
    try:
        with open("/proc/mounts", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                _, mount, kind, *_ = line.split(" ")
                mount = mount.replace("\\040", " ")
                inside = place == mount or place.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(best[0]):
                    best = (mount, kind)
    except (OSError, ValueError):
        return False
    return REMOTE.fullmatch(best[1]) is not None


def _seconds_since(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")


# Whether a run has ended --------------------------------------------------------------------------


def _progress(path: Path, step: int) -> tuple[int | None, bool]:
    """Return the number of steps of the whole run (None if unknown), and whether it has ended."""
    try:
        manifest = read_json(path / "checkpoints" / f"step-{step}" / "manifest.json")
        state = manifest["state"]
        record = dict(state["settings"])
        waited, patience = state.get("waited"), record.get("patience")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, False
    last = _last_rows(path / "metrics.jsonl")
    impatient = type(waited) is type(patience) is int and waited >= patience
    ended = impatient or any(
        row.get("kind") in (CONVERGED, NOT_CONVERGED) and row["step"] >= step - 1 for row in last
    )
    total = _total(record, last)
    return total, ended or (total is not None and step >= total)


def _total(record: Mapping[str, Any], last: list[dict[str, Any]]) -> int | None:
    """Return the number of steps of a run with recorded settings; None if unknown.

    Iterations over all rows have no learning rate. Without ``steps`` or ``epochs`` they go on until
    they converge.
    """
    rows = re.match(r"(\d{1,18}) rows", str(record.get("data")))
    steps, epochs, batch = (record.get(name) for name in ("steps", "epochs", "batch"))
    if type(steps) is int:
        return steps if steps > 0 else None
    if record.get("window") is not None:
        return None  # the number of windows depends on the lengths of the rows
    if rows is None or int(rows[1]) < 1 or not last or type(batch) is not int or batch < 1:
        return None
    if epochs is not None and not (isinstance(epochs, int | float) and 0 < epochs < 1e9):
        return None
    n = int(rows[1])
    numbers = [row for row in last if "phase" in row]
    if numbers and "lr" not in numbers[-1]:
        if epochs is None:
            return None
        batch = n
    # Settings imports torch to check its values, and this process does without.
    settings = cast(Settings, SimpleNamespace(steps=None, epochs=epochs))
    return Settings.total(settings, n, batch)


def _last_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - LAST_LINES))
            lines = file.read(LAST_LINES).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            found.append(row)
    return found
