"""A run's folder: what is written beside its checkpoints, the lock on it, and what to do when the disk refuses.

One process trains in a folder at a time. The lock is the kernel's (``flock``), so one that was killed leaves none behind.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aevb.training.checkpoint import Checkpoint, CheckpointError, TrainingError, folders, replace, write

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

_REMEDIES = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room in your quota",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "Make it writable",
    errno.EACCES: "Make it writable",
    errno.EPERM: "Make it writable",
}


class Folder:
    """The files of a run in training."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics = path, path / "metrics.jsonl"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, made if it is not there, against other processes that would train in it."""
        with self.writing(self.path, None):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+", encoding="utf-8")
        with file:
            if fcntl is not None:
                self._lock(file.fileno())
            yield

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (self.path / ".lock").read_text(encoding="utf-8").strip()
            raise TrainingError(
                f"{self.path} is being trained by process {holder or '(unknown)'}. Wait until it ends, stop it, or choose another folder."
            ) from None
        except OSError:  # a file system without locks
            return
        with self.writing(self.path, None):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())

    def begin(self, declaration: Mapping[str, Any], config: str, rows: list[dict[str, Any]]) -> None:
        """Write what a run starts with, or starts again with."""
        texts = {
            "model.json": json.dumps(declaration, indent=2, ensure_ascii=False) + "\n",
            "config.toml": config,
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        }
        for name, text in texts.items():
            with self.writing(self.path / name, None):
                replace(self.path / name, text)

    def append(self, row: Mapping[str, Any]) -> None:
        with self.writing(self.metrics, row["step"]), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def save(self, checkpoint: Checkpoint, keep: frozenset[int]) -> None:
        with self.writing(self.path / "checkpoints", checkpoint.step):
            with self.metrics.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())  # no checkpoint without the record of how it came about
            write(self.path, checkpoint, keep=keep)

    @contextmanager
    def writing(self, path: Path, step: int | None) -> Iterator[None]:
        """Turn the disk's refusal into an error that says what to do; ``step`` is None before the first."""
        try:
            yield
        except OSError as error:
            raise self._refusal(error, path, step) from error

    def _refusal(self, error: OSError, path: Path, step: int | None) -> TrainingError:
        """What to say when the disk refuses: the place, the system's words, the remedy, and what is left."""
        where = "" if step is None else f"Step {step}: "
        text = f"{where}{path} could not be written: {error.strerror or error}."
        if step is not None and not self.path.is_dir():
            return TrainingError(f"{text} The run's folder was removed while it trained. The model in memory has its weights: save it.")
        remedy = _REMEDIES.get(error.errno or 0, "Remove the cause")
        left = folders(self.path) if self.path.is_dir() else []
        if left:
            return TrainingError(f"{text} {remedy}, then resume=True goes on from the last good checkpoint, {left[-1]}.")
        if step is None:
            return TrainingError(f"{text} {remedy}, or choose another folder; nothing was trained yet.")
        return TrainingError(f"{text} {remedy} and start again: no checkpoint was written yet.")


def refuse_second(path: Path, resume: bool) -> None:
    """A folder holds one run: it is continued, or another is chosen."""
    if folders(path) and not resume:
        raise ValueError(f"{path} holds a run already. Continue it with resume=True, or choose another folder.")


def check_declaration(path: Path, declaration: Mapping[str, Any]) -> None:
    """Refuse to continue a run with a model that is declared otherwise; a damaged model.json is written again."""
    try:
        there = json.loads((path / "model.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    here = json.loads(json.dumps(declaration))
    for part in ("p", "q", "given", "missing"):
        if isinstance(there, dict) and there.get(part) != here.get(part):
            raise CheckpointError(f"{path} was trained with another model: model.json declares another {part}. Resume with the same model.")


def read_rows(path: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``, up to a step; what a kill left half written is passed over."""
    if not (path / "metrics.jsonl").is_file():
        return []
    found = [_row(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()]
    # The note of a step is written before the step is counted, so that one at the limit belongs to the step after it.
    return [row for row in found if row is not None and (step is None or row["step"] + ("note" in row) <= step)]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
