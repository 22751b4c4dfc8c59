"""Open the folder of a run that starts or resumes.

A run records its settings and what else decides its numbers; if it is resumed, they must be the
same.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aevb.data.datasets import Recipe
from aevb.data.sources import Source
from aevb.training.checkpoint import Checkpoint, CheckpointError, check_fit, latest
from aevb.training.job import Job
from aevb.training.row_order import NUMBERS
from aevb.training.run_folder import (
    Folder,
    check_declaration,
    check_recipe,
    read_rows,
    refuse_taken,
)
from aevb.training.settings import Settings, read_toml, toml_text

# Settings that a resumed run may change, because they do not affect the steps already taken. If the
# run becomes longer, the rest of the learning rate schedule is stretched.
MAY_CHANGE = (
    "epochs",
    "steps",
    "patience",
    "validate_every",
    "log_every",
    "checkpoint_every",
    "skip",
)


class Opened(NamedTuple):
    """The opened folder of a run: None in all processes but the first, and if nothing is saved.

    ``checkpoint`` is None if the run starts at step 0.
    """

    folder: Folder | None
    checkpoint: Checkpoint | None
    rows: list[dict[str, Any]]  # of the history up to the checkpoint


def open_run(
    out: Path | None,
    job: Job,
    recorded: dict[str, Any],
    asked: Settings,
    recipe: Recipe | None,
    closing: ExitStack,
    *,
    resume: bool,
) -> Opened:
    """Lock the folder of a run, read the checkpoint to resume from, and write the run's files.

    ``recorded`` is what the run records (:func:`recorded_settings`), ``asked`` the settings as the
    user gave them. ``closing`` releases the lock.
    """
    if out is None:
        return Opened(None, None, [])
    folder = Folder(out)
    if job.world.first:
        closing.enter_context(folder.held())
        # Check again: another process may have trained here before this one got the lock.
        refuse_taken(out, resume)
    found = latest(out) if resume else None
    rows: list[dict[str, Any]] = []
    beside: dict[str, str] = {}
    if found is not None:
        folder.note(*check_resumable(out, found, job, recorded, recipe))
        rows, damaged = read_rows(out, found.state, found.step)
        if damaged is not None:
            folder.note(damaged)
        beside = found.beside
    if not job.world.first:
        return Opened(None, found, rows)
    # Iterations over all rows have no learning rate. config.toml therefore records only an lr that
    # the user set, because mle() switches to Adam if lr is set.
    config = recorded | ({"lr": asked.lr} if job.on_all_rows else {})
    folder.begin(job.model.declaration(), toml_text(config), rows, recipe, beside)
    return Opened(folder, found, rows)


def recorded_compile(out: Path) -> bool | None:
    """Return whether the run in a folder compiles its steps; None if nothing is recorded.

    A longer run might choose otherwise, but a resumed run must take the same steps.
    """
    path = out / "config.toml"
    found = read_toml(path).get("compile") if path.exists() else None
    return found if isinstance(found, bool) else None


def recorded_settings(job: Job, *, with_data: bool) -> dict[str, Any]:
    """Return what a run records: its settings and what else decides its numbers.

    ``with_data`` includes a hash of all rows.
    """
    return job.settings.record() | {
        "fresh": {name: repr(fresh) for name, fresh in job.source.fresh.items()} or None,
        "data": fingerprint(job.source) if with_data else None,
        "numbers": NUMBERS,
        "frozen": job.frozen,
    }


def check_resumable(
    out: Path, found: Checkpoint, job: Job, recorded: dict[str, Any], recipe: Recipe | None
) -> list[str]:
    """Raise unless the run goes on as the checkpoint's run would; return notes to record."""
    if not found.state.get("resumable", True):
        raise CheckpointError(
            f"{out} was shared without the state of its optimiser, so it cannot be resumed. Start "
            f"a new run from its weights: fit(aevb.load_run({str(out)!r}), …)."
        )
    # A setting that did not exist at that time had its default.
    before = Settings(samples=1).record() | {"numbers": 1, "compile": False}
    there = before | found.state["settings"]
    if there["numbers"] != NUMBERS:
        raise CheckpointError(
            f"{out} was trained by another version of aevb, in which a seed gave other random "
            f"numbers. Resuming it would not reproduce the uninterrupted run. Start a new run "
            f"from its weights (aevb.load_run), or from scratch."
        )
    if recipe is not None:
        check_recipe(out, recipe, found.beside.get("data.json"))
    notes = []
    if is_partial(there["data"]):
        if there["data"] == partial_fingerprint(job.source):
            there["data"] = recorded["data"]
        notes.append(
            "The version of aevb that began this run recorded a hash of only some of the rows. "
            "Those rows are the same; the others could not be compared."
        )
    _refuse_changed(out, there, recorded)
    check_fit(found, job.model.state_dict(), out)
    check_declaration(out, job.model.declaration(), found.beside.get("model.json"))
    return notes


def _refuse_changed(out: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    changed = sorted(
        key for key in here.keys() & there.keys() - set(MAY_CHANGE) if here[key] != there[key]
    )
    if changed == ["data"]:
        raise CheckpointError(
            f"{out} was trained on other data ({there['data']}, not {here['data']}). Resume with "
            f"the same data."
        )
    for key in changed:
        if key != "data":
            raise CheckpointError(
                f"{out} was trained with {key}={there.get(key)!r}, not {here[key]!r}. Resume with "
                f"the same settings."
            )


def fingerprint(source: Source) -> str:
    """Return the number of rows and a hash of all of them."""
    return f"{source.n} rows, {source.digest()}"


def is_partial(fingerprint: Any) -> bool:
    """Whether a fingerprint has 16 digits: earlier versions hashed only the first and last rows."""
    return isinstance(fingerprint, str) and len(fingerprint.rpartition(" ")[2]) == 16


def partial_fingerprint(source: Source) -> str:
    """Return the fingerprint of earlier versions: a hash of the first and last rows."""
    rows = torch.cat([torch.arange(min(8, source.n)), torch.arange(max(0, source.n - 8), source.n)])
    digest = hashlib.sha256()
    for name, value in sorted(source.read(rows).items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return f"{source.n} rows, {digest.hexdigest()[:16]}"
