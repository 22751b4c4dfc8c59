"""The files of a run that may be published, and a copy of the run that holds nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aevb.data.datasets import Recipe
from aevb.loading import load
from aevb.runtime.checked_files import seal
from aevb.training.checkpoint import Checkpoint, folder_of, folders, read, write
from aevb.training.events import LOCAL
from aevb.training.run import load_run, recipe_of
from aevb.training.run_folder import SCHEMA

CARD = "README.md"
SAVED = ("weights.safetensors", "manifest.json")  # of a model that is no run
WHAT = {
    CARD: "the model card",
    "model.json": "the declaration",
    "config.toml": "the settings, and a hash of the training rows",
    "metrics.jsonl": "the numbers and notes recorded during training",
    "data.json": "names of columns and files, and how columns are scaled",
    SCHEMA: "names, kinds, ranges and levels of the columns",
    "weights.safetensors": "the weights",
    "optimizer.safetensors": "the state of the optimiser, or nothing without --resumable",
    "manifest.json": "hashes of the files, the state of the training, and ranges of columns",
}
# The only files that are sent or fetched. None of them is executed or unpickled.
ALLOWED = re.compile(
    r"(README\.md|model\.json|config\.toml|metrics\.jsonl|data\.json|schema\.json|"
    r"weights\.safetensors|manifest\.json|"
    r"checkpoints/step-\d{1,12}/(weights\.safetensors|optimizer\.safetensors|manifest\.json))"
)
# The folders of an absolute path within a note.
FOLDERS_OF = re.compile(r"(?<![\w.~/])~?(/[^\s/\"'(),:;]+)+/(?=[^\s/])")


@dataclass(frozen=True)
class Item:
    """A file that a push sends.

    Attributes:
        path: Its path in the repository.
        bytes: Its size.
        what: What it holds, in words.

    >>> print(Item("model.json", 900, "the declaration"))
    model.json (900 bytes): the declaration
    """

    path: str
    bytes: int
    what: str

    def __str__(self) -> str:
        return f"{self.path} ({size_text(self.bytes)}): {self.what}"


def size_text(count: int) -> str:
    """Format a number of bytes.

    >>> size_text(900), size_text(3_500_000)
    ('900 bytes', '3.5 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def contents(
    run: str | Path, *, resumable: bool = False, modules: Mapping[str, Any] | None = None
) -> list[Item]:
    """List the files that :func:`push` would send for a run, besides a card that it writes.

    These are the declaration, the settings, the recorded numbers, the weights of the best and of
    the last step, and what is known of the columns: names, kinds, scaling and, for a table, levels
    and ranges. Rows of the data, paths of folders, notes that concern this machine, and other files
    in the run's folder are not sent.

    Arguments:
        run: The folder of a run, or of a saved model.
        resumable: Include the state of the optimiser.
        modules: Your own torch modules and functions, as for :func:`aevb.load`, with which the run
            is read. They are not sent.

    Returns:
        The files.

    >>> from aevb import zoo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zoo.fa(x=3, z=2).save(folder)
    ...     [item.path for item in contents(folder)]
    ['manifest.json', 'model.json', 'weights.safetensors']
    """
    with staged(Path(run), resumable=resumable, modules=modules) as place:
        return items(place)


def items(folder: Path) -> list[Item]:
    """List the files of a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        Item(path.relative_to(folder).as_posix(), path.stat().st_size, WHAT[path.name])
        for path in paths
    ]


@contextmanager
def staged(
    run: Path, *, resumable: bool = False, modules: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Yield a temporary copy of what a run publishes, after reading it back."""
    if not run.is_dir():
        raise ValueError(f"There is no folder {run}. Name the folder of a run.")
    with tempfile.TemporaryDirectory(prefix="aevb-push-") as temporary:
        place = Path(temporary)
        if folders(run):
            _stage_run(run, place, resumable, modules)
            load_run(place, modules=modules)
        elif (run / SAVED[0]).is_file():
            if resumable:
                raise ValueError(f"{run} is a saved model without training steps to resume.")
            load(run, modules=modules)  # compares the files with their hashes
            _copy(run, place, "model.json", *SAVED, SCHEMA)
            if (recipe := Recipe.read(run)) is not None:
                (place / "data.json").write_text(_without_folders(recipe).text(), encoding="utf-8")
        else:
            load_run(run)  # says what is wrong
        _copy(run, place, CARD)
        yield place


def _copy(run: Path, place: Path, *names: str) -> None:
    for name in names:
        if (run / name).is_file():
            shutil.copyfile(run / name, place / name)


def _stage_run(run: Path, place: Path, resumable: bool, modules: Mapping[str, Any] | None) -> None:
    """Copy a run with its best and its last checkpoint, and without the folders of its data."""
    load_run(run, modules=modules)
    last = read(folders(run)[-1])
    best = last.state["best"]
    chosen = [last]
    if best is not None and best["step"] != last.step:
        chosen = [read(folder_of(run, best["step"])), last]
    _copy(run, place, "model.json", "config.toml", SCHEMA)
    history = History(run / "metrics.jsonl")
    (place / "metrics.jsonl").write_bytes(b"".join(history.published))
    recipe = recipe_of(run)
    if recipe is not None:
        recipe = _without_folders(recipe)
        (place / "data.json").write_text(recipe.text(), encoding="utf-8")
    kept = frozenset(one.step for one in chosen)
    for one in chosen:
        write(place, _published(one, recipe, history, resumable), keep=kept)


def _published(
    one: Checkpoint, recipe: Recipe | None, history: History, resumable: bool
) -> Checkpoint:
    """Return a checkpoint for others, which names the published data.json and history."""
    beside = dict(one.beside)
    if recipe is not None:
        beside["data.json"] = seal(json.loads(recipe.text()))
    state = dict(one.state)
    if state.get("history") is not None:
        state["history"] = history.record(state["history"])
    if resumable:
        return replace(one, state=state, beside=beside)
    return replace(one, optimizer={}, state=state | {"resumable": False}, beside=beside)


class History:
    """The lines of a ``metrics.jsonl``, and those for others, b"" for a line that is left out.

    Notes that concern the machine of the run are left out, and paths in others lose their folders.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.is_file() else b""
        self.lines = content.splitlines(keepends=True)
        self.published = [_published_line(line) for line in self.lines]

    def record(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the number and the hash of the published lines up to a checkpoint.

        A history that is not the one that the checkpoint records stays so.
        """
        count = record["lines"]
        if _hash(self.lines[:count]) != record["sha256"]:
            return record
        kept = [line for line in self.published[:count] if line]
        return {"lines": len(kept), "sha256": _hash(kept)}


def _published_line(line: bytes) -> bytes:
    try:
        row = json.loads(line)
    except ValueError:
        return b""
    if not isinstance(row, dict) or "note" not in row:
        return line
    if row.get("kind") in LOCAL:
        return b""
    texts = {
        name: FOLDERS_OF.sub("", value) for name, value in row.items() if isinstance(value, str)
    }
    return line if texts.items() <= row.items() else json.dumps(row | texts).encode() + b"\n"


def _hash(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _without_folders(recipe: Recipe) -> Recipe:
    """Return a recipe in which files have no folders: a path may be private."""
    validation = recipe.validation and Path(recipe.validation).name
    return replace(recipe, data=Path(recipe.data).name, validation=validation)
