"""The folder of a run: its files besides the checkpoints, its lock, and errors of the disk.

Only one process trains in a folder at a time. The lock is an ``flock``, which the kernel releases
when the process dies. Before every write, the lock file is compared with the one that was locked. A
run whose folder was removed, or was recreated by another run, writes nothing there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace as altered
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from aevb.runtime.checked_files import read_json, refuse_endless, replace, seal
from aevb.runtime.process_namespace import process_namespace
from aevb.training.checkpoint import Checkpoint, CheckpointError, TrainingError, folders, write
from aevb.training.events import EVENT_FIELDS

if TYPE_CHECKING:
    from aevb.data.datasets import Recipe

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = "schema.json"  # the columns of the table that a run models
TRACKING = "tracking.json"  # the id by which trackers know the run
_REMEDIES = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room in your quota",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "Make it writable",
    errno.EACCES: "Make it writable",
    errno.EPERM: "Make it writable",
}


LONGEST_LINE = 2**20  # most bytes of a line of metrics.jsonl


class Folder:
    """The folder of a run that is being trained."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics = path, path / "metrics.jsonl"
        self._notes: list[str] = []  # sentences for the run to record
        self.beside: dict[str, str] = {}  # seals of the JSON files, for the checkpoints
        self._id = uuid.uuid4().hex
        self._file: IO[str] | None = None  # the lock file, while the lock is held
        self._place: tuple[int, int] | None = None  # device and inode of the folder
        self._lines, self._hash = 0, hashlib.sha256()  # of metrics.jsonl so far

    def note(self, *texts: str) -> None:
        """Add sentences for the run to record."""
        self._notes += texts

    def take_notes(self) -> list[str]:
        """Return the sentences for the run to record, each of them once."""
        taken, self._notes = self._notes, []
        return taken

    # The lock -------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the folder if it does not exist, and lock it against other processes."""
        with self.writing(self.path, None):
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / ".lock").is_symlink():
                raise TrainingError(
                    f"{self.path / '.lock'} is a link to another file, which would be "
                    f"overwritten. Remove the link."
                )
            file: IO[str] = (self.path / ".lock").open("a+", encoding="utf-8")
        try:
            file = self._lock(file)
            self._file, self._place = file, _identity(os.stat(self.path))
            self._check()
            yield
        finally:
            (self._file or file).close()
            self._file = None

    def _lock(self, file: IO[str]) -> IO[str]:
        """Lock a file and write the ids of this process, of this run and of its namespace into it.

        On a file system without locks, a new file replaces the old one, so that a process that used
        the old one notices and stops.
        """
        try:
            if fcntl is None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self.path)
            file.close()
            raise TrainingError(
                f"{self.path} is being trained by process {holder}. Wait until it ends, stop it, "
                f"or choose another folder."
            ) from None
        except OSError as error:
            self.note(
                f"{self.path} lies on a file system without locks ({error.strerror}), which "
                f"cannot keep a second process from training there. "
                "If one starts, this run stops before its next write."
            )
            file.close()
            with self.writing(self.path, None):
                (self.path / ".lock").unlink(missing_ok=True)
                file = (self.path / ".lock").open("a+", encoding="utf-8")
        with self.writing(self.path, None):
            os.ftruncate(file.fileno(), 0)
            ids = [str(os.getpid()), self._id, *filter(None, [process_namespace()])]
            os.write(file.fileno(), "".join(f"{line}\n" for line in ids).encode())
        return file

    def _check(self) -> None:
        """Raise if the folder no longer belongs to this run.

        Recreate a removed lock file, and note it.
        """
        if self._file is None:
            return
        try:
            with (self.path / ".lock").open(encoding="utf-8", errors="replace") as there:
                mine = _identity(os.fstat(there.fileno())) == _identity(
                    os.fstat(self._file.fileno())
                ) and self._id in there.read(200)
        except FileNotFoundError:
            if _identity(os.stat(self.path)) != self._place:
                raise self._taken() from None
            try:
                file = (self.path / ".lock").open("x+", encoding="utf-8")
            except FileExistsError:
                raise self._taken() from None
            self._file.close()
            self._file = None  # so that _lock's own writes are not checked against the old file
            self._file = self._lock(file)
            self.note(
                f"{self.path / '.lock'} was removed while the run trained. It was made again, so "
                f"that no second process trains here."
            )
            return
        if not mine:
            raise self._taken()

    def _taken(self) -> TrainingError:
        return TrainingError(
            f"{self.path} belongs to another run now (process {_holder(self.path)}): it was "
            f"removed and made again, or its .lock was replaced, while "
            "this run trained. This run stops and writes nothing more there. The model in memory "
            "has its weights: save it elsewhere."
        )

    # Writing --------------------------------------------------------------------------------------

    def begin(
        self,
        declaration: Mapping[str, Any],
        config: str,
        rows: list[dict[str, Any]],
        recipe: Recipe | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Write the files of a run that starts or resumes.

        ``beside`` has the seals of a resumed run's files; those that are not written anew keep
        theirs.
        """
        texts = {
            "model.json": json.dumps(declaration, indent=2, ensure_ascii=False) + "\n",
            "config.toml": config,
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        }
        texts |= {} if recipe is None else {"data.json": recipe.text()}
        for name, text in texts.items():
            with self.writing(self.path / name, None):
                replace(self.path / name, text)
        self.beside = dict(beside or {}) | {
            name: seal(json.loads(text)) for name, text in texts.items() if name.endswith(".json")
        }
        self._lines, self._hash = len(rows), hashlib.sha256(texts["metrics.jsonl"].encode())

    def append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        with (
            self.writing(self.metrics, row["step"]),
            self.metrics.open("a", encoding="utf-8") as file,
        ):
            file.write(line)
        self._lines += 1
        self._hash.update(line.encode())

    def history(self) -> dict[str, Any]:
        """Return the number of lines of ``metrics.jsonl`` so far, and their hash."""
        return {"lines": self._lines, "sha256": self._hash.hexdigest()}

    def save(self, checkpoint: Checkpoint, keep: frozenset[int]) -> None:
        with self.writing(self.path / "checkpoints", checkpoint.step):
            with self.metrics.open("a", encoding="utf-8") as file:
                # The history must be on disk before the checkpoint that refers to it.
                os.fsync(file.fileno())
            write(
                self.path, altered(checkpoint, beside=self.beside), keep=keep, allowed=self._check
            )

    @contextmanager
    def writing(self, path: Path, step: int | None) -> Iterator[None]:
        """Check that the folder still belongs to this run; turn OSError into TrainingError.

        ``step`` is None before the first step.
        """
        try:
            self._check()
            yield
        except OSError as error:
            raise self._refusal(error, path, step) from error

    def _refusal(self, error: OSError, path: Path, step: int | None) -> TrainingError:
        """Return the error for a failed write.

        It has the path, the system's message, the remedy and the last checkpoint.
        """
        where = "" if step is None else f"Step {step}: "
        text = f"{where}{path} could not be written: {error.strerror or error}."
        if step is not None and not self.path.is_dir():
            return TrainingError(
                f"{text} The run's folder was removed while it trained. The model in memory has "
                f"its weights: save it."
            )
        remedy = _REMEDIES.get(error.errno or 0, "Remove the cause")
        left = folders(self.path) if self.path.is_dir() else []
        if left:
            return TrainingError(
                f"{text} {remedy}, then resume=True goes on from the last good checkpoint, "
                f"{left[-1]}."
            )
        if step is None:
            return TrainingError(
                f"{text} {remedy}, or choose another folder; nothing was trained yet."
            )
        return TrainingError(f"{text} {remedy} and start again: no checkpoint was written yet.")


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _holder(path: Path) -> str:
    """Return the process id in the lock file."""
    try:
        with (path / ".lock").open(encoding="utf-8", errors="replace") as file:
            return file.read(200).split()[0]
    except (OSError, IndexError):
        return "(unknown)"


def refuse_taken(path: Path, resume: bool) -> None:
    """Raise if a folder holds a run (without ``resume``) or files that are not a run's."""
    if folders(path):
        if not resume:
            raise ValueError(
                f"{path} holds a run already. Continue it with resume=True, or choose another "
                f"folder."
            )
        return
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if names == [SCHEMA]:  # of the run that begins now
        return
    if names and not _began_here(path, names):
        listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        what = (
            "a saved model"
            if {"model.json", "weights.safetensors"} <= set(names)
            else f"files that are not a run's ({listed})"
        )
        raise ValueError(
            f"{path} holds {what}, which would be overwritten. Choose a folder that is empty or "
            f"does not exist yet."
        )


def _began_here(path: Path, names: list[str]) -> bool:
    """Return whether a run began in a folder.

    The content of its lock says so or, if a kill left that empty, the files of the folder.
    """
    if ".lock" not in names:
        return False
    try:
        refuse_endless(path / ".lock")
        with (path / ".lock").open(encoding="utf-8", errors="replace") as file:
            content = file.read(200)
    except (OSError, ValueError):
        return False
    whole = ("model.json", "data.json", "config.toml", "metrics.jsonl", SCHEMA, TRACKING)
    ours = {".lock", "checkpoints", "tensorboard", *whole, *(f"{name}.writing" for name in whole)}
    return bool(re.fullmatch(r"\d+\n([0-9a-f]{32}\n(pid:\S+\n)?)?", content)) or (
        not content and ours.issuperset(names) and _is_ours(path / "model.json")
    )


def _is_ours(path: Path) -> bool:
    """Whether model.json is a declaration of this library, or does not exist."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == "aevb model"


def check_declaration(path: Path, declaration: Mapping[str, Any], recorded: str | None) -> None:
    """Refuse to resume a run with a different model. A damaged model.json is rewritten later.

    ``recorded`` is the hash of the declaration in the checkpoint; earlier versions recorded none.
    """
    here = json.loads(json.dumps(declaration))
    if recorded is not None and seal(here) == recorded:
        return
    try:
        there = read_json(path / "model.json")
    except (OSError, ValueError):
        there = None
    if recorded is not None and (there is None or seal(there) != recorded):
        raise CheckpointError(
            f"{path} was trained with another model, and its model.json is missing or damaged. "
            f"Resume with the same model."
        )
    for part in ("p", "q", "given", "missing"):
        if isinstance(there, dict) and there.get(part) != here.get(part):
            raise CheckpointError(
                f"{path} was trained with another model: model.json declares another {part}. "
                f"Resume with the same model."
            )


def check_recipe(path: Path, recipe: Recipe, recorded: str | None) -> None:
    """Refuse to resume a run with differently prepared rows.

    A damaged data.json is rewritten later.
    """
    from aevb.data.datasets import Recipe

    older: list[dict[str, Any]] = [
        {},
        {"known": None},
        {"digest": None},
        {"known": None, "digest": None},
    ]
    if recorded in {seal(json.loads(altered(recipe, **one).text())) for one in older}:
        # Older runs did not record ``known`` and ``digest``.
        return
    try:
        there = Recipe.read(path)
    except ValueError:
        if recorded is None:
            raise
        there = None
    # The causes come first. The other entries follow from them.
    asked = ("data", "missing", "validation", "hold_out", "prepare", "seed")
    changed = (
        [key for key in (*asked, *vars(recipe)) if getattr(there, key) != getattr(recipe, key)]
        if there is not None
        else []
    )
    changed = [
        key
        for key in changed
        if key not in ("known", "digest") or (there is not None and getattr(there, key) is not None)
    ]
    if changed == ["digest"]:
        raise ValueError(
            f"{recipe.data} has changed since {path} was trained. Resume with the same data."
        )
    if changed:
        raise ValueError(
            f"{path} was trained with {changed[0]}={getattr(there, changed[0])!r}, not "
            f"{getattr(recipe, changed[0])!r} (data.json). "
            "Resume with the same data. If they are the same, another version of aevb prepared "
            "them differently: start a new run."
        )
    if recorded is not None:
        raise ValueError(
            f"{path} was trained on differently prepared rows, and its data.json is damaged. "
            f"Resume with the same data."
        )


def read_rows(
    path: Path, state: Mapping[str, Any], step: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of ``metrics.jsonl`` up to a checkpoint.

    The second value is a sentence if the file is damaged. Later lines belong to steps after the
    checkpoint, and may be incomplete if the run was killed.
    """
    metrics, record = path / "metrics.jsonl", state.get("history")
    lines = _lines(metrics, None if record is None else record["lines"])
    expected = len(lines) if record is None else record["lines"]
    if (
        record is not None
        and hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest() == record["sha256"]
    ):
        found = [_row(line, strict=False) for line in lines]
        if None not in found:
            return [row for row in found if row is not None], None
    found = [_row(line) for line in lines]
    # The note of a step is written before the step is counted, so that one at the limit belongs to
    # the step after it.
    rows = [row for row in found if row is not None and row["step"] + ("note" in row) <= step]
    unreadable = found.count(None) + expected - len(lines)
    if record is None and not unreadable:
        return rows, None
    what = (
        f"{unreadable} of its {expected} lines are missing or unreadable"
        if unreadable
        else "its lines are not those that the run wrote"
    )
    other = "" if unreadable else f", or the checkpoint of step {step} is another run's"
    return (
        rows,
        f"{metrics} is damaged: {what} up to step {step}{other}. The run's history has what could "
        f"be read.",
    )


def note_later(path: Path, step: int) -> str | None:
    """Return a sentence if the history continues after the last checkpoint, else None."""
    metrics = path / "metrics.jsonl"
    last = max(
        (row["step"] for row in map(_row, _lines(metrics)[-100:]) if row is not None), default=0
    )
    if last <= step:
        return None
    return (
        f"{metrics} goes on to step {last}, but the last checkpoint is of step {step}: the run "
        f"was stopped in between or still trains, or a checkpoint was removed. resume=True goes "
        f"on from step {step}."
    )


def _lines(path: Path, most: int | None = None) -> list[bytes]:
    """Return the first ``most`` complete lines of a history; stop at a line that is too long."""
    found: list[bytes] = []
    if path.is_file():
        with path.open("rb") as file:
            while (most is None or len(found) < most) and (
                line := file.readline(LONGEST_LINE)
            ).endswith(b"\n"):
                found.append(line[:-1])
    return found


def _row(line: bytes, strict: bool = True) -> dict[str, Any] | None:
    """Return a line as a row, or None if it is invalid.

    ``strict`` allows only numbers, and text for the phase and for the fields of an event.
    Otherwise ``after=`` may have recorded other values.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    words = ("phase", *EVENT_FIELDS)
    fine = (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and isinstance(row.get("seconds", 0.0), int | float)
    )
    return (
        row
        if fine
        and (
            not strict
            or all(
                isinstance(value, str if name in words else int | float)
                for name, value in row.items()
            )
        )
        else None
    )
