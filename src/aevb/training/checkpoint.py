"""Checkpoints: safetensors and JSON with hashes, written so that a kill at any moment loses nothing.

A checkpoint is written into a temporary folder, synced, renamed into place, and read back; only then does an older one go.
Nothing is pickled. What is random in training is a function of (seed, step), so the step is all the state that randomness has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT, VERSION = "aevb checkpoint", 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says which file, what is wrong and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]  # what the loop needs besides: best value, patience used, the settings it ran with


def folders(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in (out / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def write(out: Path, checkpoint: Checkpoint, *, keep: frozenset[int] = frozenset()) -> Path:
    """Write a checkpoint, check it by reading it back, then drop all others but those of the steps to ``keep``."""
    root = out / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob("writing-*"):
        shutil.rmtree(stale, ignore_errors=True)
    target, temporary = root / f"step-{checkpoint.step}", root / f"writing-{os.getpid()}"
    temporary.mkdir()
    try:
        files = {}
        for name, tensors in (("weights.safetensors", checkpoint.weights), ("optimizer.safetensors", checkpoint.optimizer)):
            content = _serialise(tensors)
            _write_synced(temporary / name, content)
            files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        manifest = {"format": FORMAT, "version": VERSION, "step": checkpoint.step, "files": files, "state": checkpoint.state}
        _write_synced(temporary / "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
        _sync_folder(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        _sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    read(target)
    for other in folders(out):
        if other != target and int(other.name[5:]) not in keep:
            shutil.rmtree(other)
    return target


def read(folder: Path) -> Checkpoint:
    """Read and verify; a :class:`CheckpointError` names what is wrong."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: manifest.json is missing.") from None
    except ValueError:
        raise CheckpointError(f"{folder / 'manifest.json'} is damaged. {_advice(folder)}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} was not written by aevb.")
    if manifest["version"] > VERSION:
        raise CheckpointError(f"{folder} has format version {manifest['version']}, newer than this version's {VERSION}. Update aevb.")
    parts = {name: _read_verified(folder / name, record) for name, record in manifest["files"].items()}
    return Checkpoint(manifest["step"], parts["weights.safetensors"], parts["optimizer.safetensors"], manifest["state"])


def latest(out: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, verified."""
    found = folders(out)
    return read(found[-1]) if found else None


def check_fit(checkpoint: Checkpoint, expected: Mapping[str, Tensor], where: Path) -> None:
    """Refuse weights that are not this model's."""
    for name in sorted(checkpoint.weights.keys() ^ expected.keys()):
        raise CheckpointError(f"{where}: its weights are not this model's: {name} is in only one of them.")
    for name, tensor in expected.items():
        if checkpoint.weights[name].shape != tensor.shape:
            raise CheckpointError(f"{where}: {name} has shape {list(checkpoint.weights[name].shape)}, the model's has {list(tensor.shape)}.")


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _read_verified(path: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {_advice(path.parent)}") from None
    if len(content) != record["bytes"]:
        raise CheckpointError(f"{path} is truncated: {len(content)} bytes instead of {record['bytes']}. {_advice(path.parent)}")
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise CheckpointError(f"{path} was changed: its SHA-256 is not the one recorded. {_advice(path.parent)}")
    try:
        return load(content)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}.") from None


def _advice(folder: Path) -> str:
    return f"Delete {folder.name} to go on from the checkpoint before it."


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, Tensor]:
    """An optimiser's state by parameter name."""
    return {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        parameter_name, _, key = name.rpartition("/")
        parameter = parameters[parameter_name]
        value = tensor.to(parameter.device) if tensor.dim() else tensor
        optimizer.state[parameter][key] = value.clone()
