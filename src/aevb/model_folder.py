"""A saved model's folder: ``model.json`` (the declaration), ``weights.safetensors``, and ``manifest.json`` with the hashes of both.

A model that replaces another is first written beside it, as ``model.json.new`` and ``weights.safetensors.new``. The one rename that replaces
the manifest decides: before it the old files are those of the manifest, after it the new ones are, under either name. So a kill at any moment
leaves a folder from which the old or the new model is read, and the next save finishes what was interrupted.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from aevb.runtime.checked_files import IntegrityWarning, file_sha256, read_json, replace, sync_folder, write_synced

FORMAT = "aevb saved model"
FILES = ("model.json", "weights.safetensors")
REMEDY = "Restore the file, or save the model again."


def write_model(folder: Path, declaration: Mapping[str, Any], weights: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write a model into a folder, made if it is not there; ``notes`` go beside the weights. Only a model saved there before is replaced."""
    from safetensors.torch import save_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{folder} cannot be a folder: there is a file of that name, or on the way to it. Save the model elsewhere.") from None
    _finish(folder)
    _refuse_others(folder)
    new = {name: _beside(folder / name) for name in FILES}
    try:
        for path in new.values():
            path.unlink(missing_ok=True)  # of a save that was interrupted, or a link to somebody else's file
        write_synced(new["model.json"], (json.dumps(declaration, indent=2, ensure_ascii=False) + "\n").encode())
        save_file(dict(weights), new["weights.safetensors"], metadata=dict(notes))
        with new["weights.safetensors"].open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(folder)  # the new files are on the disk before the manifest names them
        files = {name: {"sha256": file_sha256(path), "bytes": path.stat().st_size} for name, path in new.items()}
        replace(folder / "manifest.json", json.dumps({"format": FORMAT, "version": 1, "files": files}, indent=2) + "\n")
    except BaseException:
        _finish(folder)  # an interrupt may come after the manifest was replaced
        for path in new.values():
            path.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    _finish(folder)


def _beside(path: Path) -> Path:
    """Where a file is written before the manifest names it."""
    return path.with_name(f"{path.name}.new")


def _finish(folder: Path) -> None:
    """Give the files that the manifest has the hashes of their names, if a save was interrupted before it did."""
    if not any(_beside(folder / name).exists() for name in FILES):
        return
    try:
        records = _records(folder)
    except ValueError:  # there is no manifest, or another program's
        return
    for name, (size, recorded) in records.items():
        if _is(_beside(folder / name), size, recorded):
            _beside(folder / name).replace(folder / name)
    sync_folder(folder)


def _records(folder: Path) -> dict[str, tuple[int, str]]:
    """The length and the hash of each file, from the manifest. A ValueError says what is wrong with it."""
    path = folder / "manifest.json"
    try:
        manifest = read_json(path)
        records = {name: (manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]) for name in FILES}
        fine = manifest["format"] == FORMAT and isinstance(manifest["version"], int)
    except (OSError, ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        raise ValueError(f"{path} is damaged: it is not what a saved model has. {REMEDY} If the model is known to be whole, delete {path}.")
    if manifest["version"] > 1:
        raise ValueError(f"{path} has format version {manifest['version']}, newer than this version's 1. Update aevb.")
    return records


def _is(path: Path, size: int, recorded: str) -> bool:
    """Whether a file has this length and this hash."""
    return path.is_file() and path.stat().st_size == size and file_sha256(path) == recorded


def _refuse_others(folder: Path) -> None:
    """Refuse to overwrite what ``write_model`` did not write: the files of a run, or somebody else's of the same names."""
    if (folder / "checkpoints").is_dir() or (folder / ".lock").exists():
        raise ValueError(f"{folder} holds a run, whose model.json would be overwritten. Save the model elsewhere.")
    there = [name for name in (*FILES, "manifest.json") if (folder / name).exists()]
    saved = _format(folder / "model.json") == "aevb model" and _format(folder / "manifest.json") in (None, FORMAT)
    if there and not saved:
        raise ValueError(f"{folder / there[0]} is not a saved model's and would be overwritten. Save the model elsewhere, or move that file away.")


def _format(path: Path) -> str | None:
    """What a JSON file says it is; None if it is not there, and "" if it does not say."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""
    return str(found.get("format", "")) if isinstance(found, dict) else ""


def checked_files(folder: Path) -> dict[str, Path]:
    """Where the files of a saved model are. Files that are not those of the manifest's hashes are refused; without a manifest a warning tells so."""
    if (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} holds a run, not a saved model. Read its model by aevb.load_run({str(folder)!r}).")
    path = folder / "manifest.json"
    found = {name: folder / name for name in FILES}
    for name, place in found.items():
        if not place.is_file() and not (path.exists() and _beside(place).is_file()):
            raise ValueError(f"{folder} holds no saved model: {name} is missing.")
    if not path.exists():
        warnings.warn(
            f"{folder} has no manifest.json, so damage to the model would not be noticed: an earlier version saved it, or the file was removed. "
            "Saving the model again writes one.",
            IntegrityWarning,
            stacklevel=3,
        )
        return found
    for name, (size, recorded) in _records(folder).items():
        place = found[name]
        if _is(place, size, recorded):
            continue
        if _is(_beside(place), size, recorded):
            found[name] = _beside(place)
        elif not place.is_file():
            raise ValueError(f"{folder} holds no saved model: {name} is missing.")
        elif place.stat().st_size != size:
            raise ValueError(f"{place} is damaged: {place.stat().st_size} bytes instead of {size}. {REMEDY}")
        else:
            raise ValueError(f"{place} was changed: its SHA-256 is not the one in manifest.json. {REMEDY} If the change is meant, delete {path}.")
    return found
