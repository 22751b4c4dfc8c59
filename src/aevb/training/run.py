"""A run: what a training left behind, in memory and on disk."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aevb.loading import read_model
from aevb.model import Model
from aevb.pictures import curves
from aevb.posterior.training_record import with_weights
from aevb.runtime.checked_files import IntegrityWarning
from aevb.training.checkpoint import Checkpoint, CheckpointError, check_beside, check_fit, folders, read, read_manifest
from aevb.training.run_folder import note_later, read_rows
from aevb.training.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Best(NamedTuple):
    """The best validation of a run."""

    step: int
    value: float


@dataclass
class Run:
    """What a training left behind: ``history`` as arrays by name, the model, and where its files are.

    The model has the weights of the last step; of the best validation if ``patience`` was set. On disk are both: see :func:`load_run`.
    """

    model: Model
    settings: Settings
    rows: list[dict[str, Any]]
    out: Path | None
    step: int
    seconds: float

    @classmethod
    def load(cls, out: str | Path) -> Run:
        """A run from its files, as it stands: the model at its last checkpoint, the history up to there."""
        folder = Path(out)
        model, found, rows = _load(folder, "last")
        seconds = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        return cls(model, _settings(found.state["settings"]), rows, folder, found.step, seconds)

    @property
    def best(self) -> Best | None:
        """The step and the bound of the best validation, the first of equals; None without validation data."""
        name = f"validation {self.settings.judge}"
        found = [Best(row["step"], row[name]) for row in self.rows if np.isfinite(row.get(name, np.nan))]
        return max(found, key=lambda best: best.value) if found else None

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Every recorded quantity as an array over the steps it was recorded at, those in ``<name>.step``.

        ``gap`` is KL(q ‖ the exact posterior) where that is known: as recorded, or the evidence less the ELBO.
        """
        found: dict[str, list[tuple[int, Any]]] = {}
        for row in self.rows:
            gaps = {
                f"{side}gap": row[f"{side}evidence"] - row[f"{side}elbo"]
                for side in ("", "validation ")
                if f"{side}evidence" in row and f"{side}elbo" in row
            }
            for name, value in (gaps | row).items():
                if name != "step" and isinstance(value, int | float):
                    found.setdefault(name, []).append((row["step"], value))
        arrays = {name: np.array([value for _, value in pairs], dtype=float) for name, pairs in found.items()}
        return arrays | {f"{name}.step": np.array([step for step, _ in pairs]) for name, pairs in found.items()}

    @property
    def phases(self) -> list[tuple[str, int, int]]:
        """The phases of the schedule that were trained, in order: name ("E", "M", "joint", …), first step, and the step after the last."""
        found: list[tuple[str, int, int]] = []
        start = 0
        while start < self.step:
            phase = self.settings.schedule.phase(start, self.step)
            end = min(self.step, start + max(1, phase.length - phase.position))
            found.append((phase.name, start, end))
            start = end
        return found

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the bound (and the evidence, where it is known) and its terms over the steps; written as a PNG if a path is given."""
        figure = curves(self.history, [(start, end) for name, start, end in self.phases if name == "E"])
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure


def load_run(out: str | Path, which: str = "best") -> Model:
    """The model of a run, from its files.

    ``which="best"``, the default, has the weights of the best validation, or of the last checkpoint if there was no validation:
    what one wants to use. ``which="last"`` has those of the last checkpoint, where ``resume=True`` would go on; that is also what
    ``fit`` leaves in the model, unless ``patience`` was set.
    """
    if which not in ("best", "last"):
        raise ValueError(f'which is "best" or "last", got {which!r}.')
    return _load(Path(out), which)[0]


def _load(folder: Path, which: str) -> tuple[Model, Checkpoint, list[dict[str, Any]]]:
    """The model, its checkpoint, and the history up to there; a warning says if the history is not that of this checkpoint and the last one."""
    path = folder / "model.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no run: model.json is missing.")
    places = folders(folder)
    if not places and (folder / "weights.safetensors").is_file():
        raise ValueError(f"{folder} holds a saved model, not a run. Read it by aevb.load({str(folder)!r}).")
    if not places:
        raise ValueError(f"{folder} holds no checkpoint yet. Train it further with resume=True.")
    chosen, manifest = places[-1], read_manifest(places[-1])
    best = manifest["state"]["best"]
    if which == "best" and best is not None and best["step"] != manifest["step"]:
        chosen = folder / "checkpoints" / f"step-{best['step']}"
        if not chosen.is_dir():
            raise CheckpointError(f'{chosen}, the best checkpoint, is missing. Load the last one: which="last".')
    check_beside(folder, "model.json", manifest)
    found = read(chosen)
    model = read_model(path, chosen / "weights.safetensors")
    floating = [tensor.dtype for tensor in found.weights.values() if tensor.is_floating_point()]
    model = model.to(floating[0]) if floating else model
    check_fit(found, model.state_dict(), folder)
    model.load_state_dict(found.weights)
    model.teaching.restore(model, found.state["teaching"] if "teaching" in found.state else _older(model, found.state["settings"]))
    rows, wrong = read_rows(folder, found.state, found.step)
    if found.step != manifest["step"]:
        wrong = wrong or read_rows(folder, manifest["state"], manifest["step"])[1]
    for sentence in filter(None, (wrong, note_later(folder, manifest["step"]))):
        warnings.warn(sentence, IntegrityWarning, stacklevel=3)
    return model, found, rows


def _older(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """What a run that was saved without a word about q says of it: exact schedules leave q behind p."""
    schedule = settings.get("schedule")
    name = schedule.get("name") if isinstance(schedule, dict) else None
    return {"untaught": dict.fromkeys(with_weights(model), f"{name}() trains p")} if name in ("mle", "em") else {}


def _settings(record: dict[str, Any]) -> Settings:
    """The settings that a record was made from."""
    try:
        return Settings.from_record(record)
    except ValueError as error:
        raise CheckpointError(f"The checkpoint's settings are damaged ({error}). Resume from an earlier checkpoint.") from None
