"""A saved model's folder: ``model.json`` (the declaration), ``weights.safetensors``, and ``manifest.json`` with the hashes of both."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from aevb.storage import IntegrityWarning, file_sha256, read_json, replace, sync_folder

FORMAT = "aevb saved model"
FILES = ("model.json", "weights.safetensors")


def write_model(folder: Path, declaration: Mapping[str, Any], weights: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write a model into a folder, made if it is not there; ``notes`` go beside the weights. Only a model saved there before is replaced."""
    from safetensors.torch import save_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{folder} cannot be a folder: there is a file of that name, or on the way to it. Save the model elsewhere.") from None
    _refuse_others(folder)
    text = json.dumps(declaration, indent=2, ensure_ascii=False) + "\n"
    temporary = folder / "weights.safetensors.writing"
    try:
        save_file(dict(weights), temporary, metadata=dict(notes))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        replace(folder / "model.json", text)
        temporary.replace(folder / "weights.safetensors")
    finally:
        temporary.unlink(missing_ok=True)
    files = {name: {"sha256": file_sha256(folder / name), "bytes": (folder / name).stat().st_size} for name in FILES}
    replace(folder / "manifest.json", json.dumps({"format": FORMAT, "version": 1, "files": files}, indent=2) + "\n")
    sync_folder(folder)


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


def check_files(folder: Path) -> None:
    """Refuse a saved model whose files are not those that its manifest has the hashes of. One without a manifest is read, with a warning."""
    if (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} holds a run, not a saved model. Read its model by aevb.load_run({str(folder)!r}).")
    for name in FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no saved model: {name} is missing.")
    path = folder / "manifest.json"
    if not path.exists():
        warnings.warn(
            f"{folder} has no manifest.json, so damage to the model would not be noticed: an earlier version saved it, or the file was removed. "
            "Saving the model again writes one.",
            IntegrityWarning,
            stacklevel=3,
        )
        return
    remedy = "Restore the file, or save the model again."
    try:
        manifest = read_json(path)
        records = {name: (manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]) for name in FILES}
        fine = manifest["format"] == FORMAT and isinstance(manifest["version"], int)
    except (OSError, ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        raise ValueError(f"{path} is damaged: it is not what a saved model has. {remedy} If the model is known to be whole, delete {path}.")
    if manifest["version"] > 1:
        raise ValueError(f"{path} has format version {manifest['version']}, newer than this version's 1. Update aevb.")
    for name, (size, recorded) in records.items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{folder / name} is damaged: {(folder / name).stat().st_size} bytes instead of {size}. {remedy}")
        if file_sha256(folder / name) != recorded:
            raise ValueError(
                f"{folder / name} was changed: its SHA-256 is not the one in manifest.json. {remedy} If the change is meant, delete {path}."
            )
