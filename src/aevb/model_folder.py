"""The folder of a saved model.

It holds ``model.json`` (the declaration), ``weights.safetensors``, and ``manifest.json`` with the
hashes of both. A save first writes the new files as ``model.json.new`` and
``weights.safetensors.new``. Then one atomic rename replaces the manifest. Before it, the manifest's
hashes match the old files; after it, they match the new files, with or without ``.new``. If the
process is killed at any moment, the folder still holds the old or the new model, and the next save
completes the interrupted one.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from aevb.runtime.checked_files import (
    IntegrityWarning,
    file_sha256,
    read_json,
    replace,
    sync_folder,
    write_synced,
)

FORMAT = "aevb saved model"
FILES = ("model.json", "weights.safetensors")
REMEDY = "Restore the file, or save the model again."


def write_model(
    folder: Path,
    declaration: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    notes: Mapping[str, str],
) -> None:
    """Write a model into a folder, which is created if necessary.

    ``notes`` become metadata of the weights file. Only an earlier saved model is replaced; other
    files raise ValueError.
    """
    from safetensors.torch import save_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{folder} cannot be a folder: it or one of its parents is a file. Save the model "
            f"elsewhere."
        ) from None
    _finish(folder)
    _refuse_others(folder)
    new = {name: _unfinished(folder / name) for name in FILES}
    try:
        for path in new.values():
            path.unlink(missing_ok=True)  # left by an interrupted save, or a link to another file
        write_synced(
            new["model.json"],
            (json.dumps(declaration, indent=2, ensure_ascii=False) + "\n").encode(),
        )
        plain = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(plain, new["weights.safetensors"], metadata=dict(notes))
        with new["weights.safetensors"].open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(folder)  # the new files are on the disk before the manifest names them
        files = {
            name: {"sha256": file_sha256(path), "bytes": path.stat().st_size}
            for name, path in new.items()
        }
        replace(
            folder / "manifest.json",
            json.dumps({"format": FORMAT, "version": 1, "files": files}, indent=2) + "\n",
        )
    except BaseException:
        _finish(folder)  # the interrupt may have come after the manifest was replaced
        for path in new.values():
            path.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    _finish(folder)


def _unfinished(path: Path) -> Path:
    """The path of a file until the manifest has its hash: its name with ``.new``."""
    return path.with_name(f"{path.name}.new")


def _finish(folder: Path) -> None:
    """Complete an interrupted save: rename the ``.new`` files whose hashes are in the manifest."""
    if not any(_unfinished(folder / name).exists() for name in FILES):
        return
    try:
        records = _records(folder)
    except ValueError:  # no manifest, or that of another program
        return
    for name, (size, recorded) in records.items():
        if _is(_unfinished(folder / name), size, recorded):
            _unfinished(folder / name).replace(folder / name)
    sync_folder(folder)


def _records(folder: Path) -> dict[str, tuple[int, str]]:
    """Read the length and the hash of each file from the manifest.

    Raise ValueError if the manifest is damaged.
    """
    path = folder / "manifest.json"
    try:
        manifest = read_json(path)
        records = {
            name: (manifest["files"][name]["bytes"], manifest["files"][name]["sha256"])
            for name in FILES
        }
        fine = manifest["format"] == FORMAT and isinstance(manifest["version"], int)
    except (OSError, ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        raise ValueError(
            f"{path} is damaged: it is not the manifest of a saved model. {REMEDY} If the model "
            f"is known to be intact, delete {path}."
        )
    if manifest["version"] > 1:
        raise ValueError(
            f"{path} has format version {manifest['version']}, newer than this version's 1. "
            f"Update aevb."
        )
    return records


def _is(path: Path, size: int, recorded: str) -> bool:
    """Whether a file has this length and this hash."""
    return path.is_file() and path.stat().st_size == size and file_sha256(path) == recorded


def _refuse_others(folder: Path) -> None:
    """Raise ValueError if the folder holds files that ``write_model`` did not write.

    These are a run's files, or others with the same names.
    """
    if (folder / "checkpoints").is_dir() or (folder / ".lock").exists():
        raise ValueError(
            f"{folder} holds a run, whose model.json would be overwritten. Save the model "
            f"elsewhere."
        )
    there = [name for name in (*FILES, "manifest.json") if (folder / name).exists()]
    saved = _format(folder / "model.json") == "aevb model" and _format(
        folder / "manifest.json"
    ) in (None, FORMAT)
    if there and not saved:
        raise ValueError(
            f"{folder / there[0]} does not belong to a saved model and would be overwritten. Save "
            f"the model elsewhere, or move that file away."
        )


def _format(path: Path) -> str | None:
    """The "format" of a JSON file; None if there is no file, and "" if it has no format."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""
    return str(found.get("format", "")) if isinstance(found, dict) else ""


def checked_files(folder: Path) -> dict[str, Path]:
    """Return the paths of a saved model's files, by name.

    Raise ValueError if the files do not match the hashes in the manifest. Warn if there is no
    manifest.
    """
    if (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{folder} holds a run, not a saved model. Read its model by "
            f"aevb.load_run({str(folder)!r})."
        )
    path = folder / "manifest.json"
    found = {name: folder / name for name in FILES}
    for name, place in found.items():
        if not place.is_file() and not (path.exists() and _unfinished(place).is_file()):
            raise ValueError(f"{folder} holds no saved model: {name} is missing.")
    if not path.exists():
        warnings.warn(
            f"{folder} has no manifest.json, so damage to the model would not be noticed: an "
            f"earlier version saved it, or the file was removed. "
            "Saving the model again writes one.",
            IntegrityWarning,
            stacklevel=3,
        )
        return found
    for name, (size, recorded) in _records(folder).items():
        place = found[name]
        if _is(place, size, recorded):
            continue
        if _is(_unfinished(place), size, recorded):
            found[name] = _unfinished(place)
        elif not place.is_file():
            raise ValueError(f"{folder} holds no saved model: {name} is missing.")
        elif place.stat().st_size != size:
            raise ValueError(
                f"{place} is damaged: {place.stat().st_size} bytes instead of {size}. {REMEDY}"
            )
        else:
            raise ValueError(
                f"{place} was changed: its SHA-256 is not the one in manifest.json. {REMEDY} If "
                f"the change is meant, delete {path}."
            )
    return found
