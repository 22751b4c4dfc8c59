"""A run: what a training left behind, in memory and on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aevb.model import Model, from_declaration
from aevb.pictures import curves
from aevb.training.checkpoint import check_fit, latest, read
from aevb.training.settings import Settings


@dataclass
class Run:
    """What a training left behind: ``history`` as arrays by name, the model, and where its files are."""

    model: Model
    settings: Settings
    rows: list[dict[str, Any]]
    out: Path | None
    step: int
    seconds: float

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Every recorded quantity as an array over the steps it was recorded at, those in ``<name>.step``."""
        found: dict[str, list[tuple[int, Any]]] = {}
        for row in self.rows:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    found.setdefault(name, []).append((row["step"], value))
        arrays = {name: np.array([value for _, value in pairs], dtype=float) for name, pairs in found.items()}
        return arrays | {f"{name}.step": np.array([step for step, _ in pairs]) for name, pairs in found.items()}

    def plot(self, path: str | Path) -> None:
        """Draw the bound (and the evidence, where it is known) over the steps, as a PNG."""
        curves(self.history, path)


def load_run(out: str | Path) -> Model:
    """The model of a run, with the weights of its best checkpoint where validation chose one, otherwise of its last."""
    folder = Path(out)
    if not (folder / "model.json").is_file():
        raise ValueError(f"{folder} holds no run: model.json is missing.")
    found = latest(folder)
    if found is None:
        raise ValueError(f"{folder} holds no checkpoint yet.")
    best = found.state["best"]
    if best is not None and (folder / "checkpoints" / f"step-{best['step']}").is_dir():
        found = read(folder / "checkpoints" / f"step-{best['step']}")
    model = from_declaration(json.loads((folder / "model.json").read_text(encoding="utf-8")))
    floating = [tensor.dtype for tensor in found.weights.values() if tensor.is_floating_point()]
    model = model.to(floating[0]) if floating else model
    check_fit(found, model.state_dict(), folder)
    model.load_state_dict(found.weights)
    return model
