"""Checkpoints: safetensors and JSON files with hashes.

They are written so that a kill at any moment loses nothing. A checkpoint is written into a
temporary folder, synced, renamed and read back; only then are older ones deleted. Its manifest has
the hashes of the checkpoint's files, of the run's ``model.json`` and ``data.json``, of the history
so far, and of itself. Nothing is pickled. Randomness is a function of (seed, step), so no state of
random generators needs to be saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from aevb.runtime.checked_files import (
    LONGEST_BESIDE,
    read_json,
    refuse_endless,
    seal,
    sync_folder,
    write_synced,
)

# The state of the steps besides the weights: tensors by owner (a parameter, EM or MLE) and name.
State = dict[str, dict[str, Tensor]]
FORMAT, VERSION = "aevb checkpoint", 1
EM, MLE = ("em", "mle")  # owners of the state of iterations over all rows
CARRIED = "window"  # owner of what the next window of time reads of the last one
NO_PARAMETERS = (EM, MLE, CARRIED)
FILES = ("weights.safetensors", "optimizer.safetensors")


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be used.

    The message says which file, what is wrong and what to do.
    """


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the place and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    step: int
    weights: dict[str, Tensor]
    optimizer: State
    state: dict[str, Any]  # state of the training loop: best validation, patience used, settings, …
    beside: dict[str, str] = field(default_factory=dict)  # hashes of the run's own JSON files


def folder_of(out: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint."""
    return out / "checkpoints" / f"step-{step}"


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint's folder; None if it has another name.

    >>> step_of(Path("run/checkpoints/step-30"))
    30
    """
    word, _, digits = folder.name.partition("-")
    return int(digits) if word == "step" and digits.isascii() and digits.isdecimal() else None


def folders(out: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    return [path for _, path in _numbered(out)]


def saved_steps(out: Path) -> list[int]:
    """Return the steps of a run's checkpoints, oldest first."""
    return [step for step, _ in _numbered(out)]


def _numbered(out: Path) -> list[tuple[int, Path]]:
    paths = (out / "checkpoints").glob("step-*")
    return sorted((step, path) for path in paths if (step := step_of(path)) is not None)


def write(
    out: Path,
    checkpoint: Checkpoint,
    *,
    keep: frozenset[int] = frozenset(),
    allowed: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint, verify it by reading it back, then delete all others.

    The checkpoints of the steps in ``keep`` are not deleted.

    ``allowed`` is called before anything is replaced or deleted. It raises if the folder now
    belongs to another run.
    """
    root = out / "checkpoints"
    root.mkdir(exist_ok=True)  # without parents: if the run's folder was removed, this must fail
    for stale in root.glob("writing-*"):
        shutil.rmtree(stale, ignore_errors=True)
    target, temporary = folder_of(out, checkpoint.step), root / f"writing-{os.getpid()}"
    temporary.mkdir()
    try:
        files = {}
        contents = checkpoint.weights, _flat(checkpoint.optimizer)
        for name, tensors in zip(FILES, contents, strict=True):
            content = _serialise(tensors)
            write_synced(temporary / name, content)
            files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": checkpoint.step,
            "files": files,
            "state": checkpoint.state,
        }
        manifest |= {"beside": checkpoint.beside}
        write_synced(
            temporary / "manifest.json",
            (json.dumps(manifest | {"sha256": seal(manifest)}, indent=2) + "\n").encode(),
        )
        sync_folder(temporary)
        allowed()
        if target.exists():
            _drop(target)
        temporary.rename(target)
        sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    read(target)
    allowed()
    for other in folders(out):
        if other != target and step_of(other) not in keep:
            _drop(other)
    return target


def read(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint; a :class:`CheckpointError` says what is wrong."""
    manifest = read_manifest(folder)
    weights, optimizer = (_read_verified(folder / name, manifest["files"][name]) for name in FILES)
    return Checkpoint(
        manifest["step"], weights, _nested(optimizer), manifest["state"], manifest.get("beside", {})
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and verify the manifest of a checkpoint, without its tensors."""
    path = folder / "manifest.json"
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {_advice(folder)}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. {_advice(folder)}"
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: it is no JSON that can be read ({error}). {_advice(folder)}"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} was not written by aevb. Move it out of the run's folder.")
    version = manifest.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{folder} has format version {version}, newer than this version's {VERSION}. Update "
            f"aevb."
        )
    if wrong := _wrong(manifest):
        raise CheckpointError(
            f"{path} is damaged: {wrong} is missing, or not what it should be. {_advice(folder)}"
        )
    if step_of(folder) not in (None, manifest["step"]):
        raise CheckpointError(
            f"{folder} holds the checkpoint of step {manifest['step']}. Rename it to "
            f"{folder_of(folder, manifest['step']).name}, or delete it."
        )
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    if ("sha256" in manifest or "beside" in manifest) and seal(content) != manifest.get("sha256"):
        # Earlier versions have neither key.
        raise CheckpointError(
            f"{path} was changed: its SHA-256 is not the one recorded. {_advice(folder)}"
        )
    return manifest


def check_beside(out: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Raise if a run's JSON file differs from the one that a checkpoint recorded.

    Earlier versions recorded none.
    """
    recorded = manifest.get("beside", {}).get(name)
    path, remedy = out / name, "Resuming the run with its model and its data writes it again."
    try:
        there = read_json(path, LONGEST_BESIDE) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {remedy}") from None
    if recorded is not None and there is None:
        raise CheckpointError(f"{path} is missing. {remedy}")
    if recorded is not None and seal(there) != recorded:
        raise CheckpointError(
            f"{path} was changed: its SHA-256 is not the one that the last checkpoint recorded. "
            f"{remedy}"
        )


def latest(out: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run, verified, or None."""
    found = folders(out)
    return read(found[-1]) if found else None


def latest_manifest(out: Path) -> dict[str, Any] | None:
    """Return the manifest of the newest checkpoint, verified, or None."""
    found = folders(out)
    return read_manifest(found[-1]) if found else None


def check_fit(checkpoint: Checkpoint, expected: Mapping[str, Tensor], where: Path) -> None:
    """Raise if the names, shapes or dtypes of a checkpoint's tensors do not match the model."""
    for name in sorted(checkpoint.weights.keys() ^ expected.keys()):
        raise CheckpointError(
            f"{where}: its weights are not this model's: {name} is in only one of them. Resume "
            f"with the model it was trained with."
        )
    of_parameters = {
        owner: state for owner, state in checkpoint.optimizer.items() if owner not in NO_PARAMETERS
    }
    for owner in sorted(of_parameters.keys() - expected.keys()):
        name = min(_flat({owner: of_parameters[owner]}))
        raise CheckpointError(
            f"{where}: its optimiser is not this model's: {name} belongs to no parameter."
        )
    moments = [
        (name, tensor, expected[owner])
        for owner, state in of_parameters.items()
        for name, tensor in _flat({owner: state}).items()
        if tensor.dim()  # the counters of steps are scalars
    ]
    weights = [(name, tensor, expected[name]) for name, tensor in checkpoint.weights.items()]
    for name, tensor, own in weights + moments:
        if tensor.shape != own.shape:
            shapes = f"{list(tensor.shape)}, the model's has {list(own.shape)}"
            raise CheckpointError(
                f"{where}: {name} has shape {shapes}. Resume with the model it was trained with."
            )
        if tensor.dtype != own.dtype:
            raise CheckpointError(
                f"{where}: {name} is {tensor.dtype}, the model's is {own.dtype}. Make the model "
                f"what it was: model.to(…)."
            )


def _flat(state: State) -> dict[str, Tensor]:
    """Return the state with one name per tensor, as in a file: ``owner/name``."""
    return {
        f"{owner}/{name}" if owner else name: tensor
        for owner, tensors in state.items()
        for name, tensor in tensors.items()
    }


def _nested(tensors: Mapping[str, Tensor]) -> State:
    """Return the tensors of a file by owner and name."""
    found: State = {}
    for path, tensor in tensors.items():
        owner, _, name = path.rpartition("/")
        found.setdefault(owner, {})[name] = tensor
    return found


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _drop(folder: Path) -> None:
    """Delete a checkpoint.

    It is renamed first, so that a kill leaves no partial checkpoint under its name.
    """
    doomed = folder.rename(folder.with_name(f"writing-{folder.name}"))
    shutil.rmtree(doomed)


def _wrong(manifest: Mapping[str, Any]) -> str | None:
    """Return the first invalid entry of a manifest, or None."""
    kinds = {"version": int, "step": int, "files": dict, "state": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    if wrong:
        return wrong[0]
    for name in FILES:
        record = manifest["files"].get(name)
        if (
            not isinstance(record, dict)
            or not isinstance(record.get("bytes"), int)
            or not isinstance(record.get("sha256"), str)
        ):
            return f"files: {name}"
    beside = manifest.get("beside", {})
    if not isinstance(beside, dict) or not all(isinstance(value, str) for value in beside.values()):
        return "beside"
    state = manifest["state"]
    history = state.get("history")
    best, metrics = state.get("best", ...), state.get("metrics")
    right = {
        "best": best is None
        or (
            isinstance(best, dict)
            and isinstance(best.get("step"), int)
            and isinstance(best.get("value"), int | float)
        ),
        "waited": _is_count(state.get("waited")),
        "skipped": _is_count(state.get("skipped")),
        "metrics": isinstance(metrics, dict)
        and _is_count(metrics.get("taken"))
        and _are_numbers(metrics.get("sums")),
        "settings": isinstance(state.get("settings"), dict),
        "history": history is None
        or (
            isinstance(history, dict)
            and _is_count(history.get("lines"))
            and isinstance(history.get("sha256"), str)
        ),
    }
    return next((f"state: {name}" for name, fine in right.items() if not fine), None)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(
        isinstance(value, int | float) for value in values.values()
    )


def _read_verified(path: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of a file, after comparing its size with the record; verify its hash."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        refuse_endless(path)
        size = path.stat().st_size
        if path.is_file() and size != record["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {size} bytes instead of {record['bytes']}. "
                f"{_advice(path.parent)}"
            )
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {_advice(path.parent)}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. {_advice(path.parent)}"
        ) from None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. {_advice(path.parent)}") from None
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise CheckpointError(
            f"{path} was changed: its SHA-256 is not the one recorded. {_advice(path.parent)}"
        )
    try:
        return load(content)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: {error}. {_advice(path.parent)}"
        ) from None


def _advice(folder: Path) -> str:
    """Return the remedy for a damaged checkpoint."""
    if step_of(folder) is None:
        return "Choose another checkpoint."
    others = [path for path in folders(folder.parents[1]) if path != folder]
    if others:
        return f"Delete {folder}; resume=True then goes on from {others[-1].name}."
    return f"Delete {folder}; there is none before it, so training then starts again."
