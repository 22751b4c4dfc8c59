"""Weights & Biases: online, or offline into files that ``wandb sync`` sends later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aevb.trackers.packages import check_installed
from aevb.trackers.protocol import FINISHED, RunInfo, Tracker, scalars


@dataclass
class WandB(Tracker):
    """Record runs in Weights & Biases.

    Arguments that are None leave the choice to W&B: its environment variables (``WANDB_PROJECT``,
    ``WANDB_ENTITY``, ``WANDB_MODE``) and its defaults.

    A resumed run goes on in the same W&B run. Runs of several seeds or of a sweep form a group.

    Arguments:
        project: The project; "aevb" if ``WANDB_PROJECT`` is not set either.
        entity: The user or the team.
        mode: "online", "offline" or "disabled".
        folder: Where W&B makes its folder ``wandb``; by default the current folder.
        files: Send the declaration, the settings and the history.
        weights: Send the weights, too.

    >>> WandB(project="digits", mode="offline")  # for fit(…, trackers=[…])
    WandB(project='digits', entity=None, mode='offline', folder=None, files=True, weights=False)
    """

    project: str | None = None
    entity: str | None = None
    mode: str | None = None
    folder: str | Path | None = None
    files: bool = True
    weights: bool = False
    _run: Any = field(default=None, init=False, repr=False, compare=False)
    _events: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    _artifact: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_installed("wandb", "wandb")

    def start(self, run: RunInfo) -> str | None:
        import wandb

        self._run, self._events, self._artifact = None, [], None
        # The terminal belongs to the display of the run, and several runs may train at a time.
        mode = self.mode or os.environ.get("WANDB_MODE") or "online"
        self._run = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT") or "aevb",
            entity=self.entity,
            mode=mode,  # type: ignore[arg-type]
            dir=self.folder,
            id=run.id,
            name=run.name,
            group=run.group,
            config=run.config,
            # W&B cannot resume offline: each part of the run has a folder, with the same id.
            resume="allow" if run.step and mode == "online" else None,
            reinit="create_new",
            save_code=False,
            settings=wandb.Settings(console="off", silent=True),
        )
        if mode == "online" and not self._run.offline:
            return f"Weights & Biases: {self._run.url}"
        return f"Weights & Biases: {mode}, in {Path(self._run.dir).parent}"

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if "note" in values:
            self._events.append(f"step {step}: {values['note']}")
            self._run.summary["events"] = self._events
        elif step >= self._run.step:  # a resumed run repeats the steps after its last checkpoint
            beside = {name: values[name] for name in ("epoch", "seconds") if name in values}
            self._run.log(scalars(values) | beside, step=step)

    def artifact(self, path: Path, kind: str) -> None:
        import wandb

        if not (self.weights if kind == "weights" else self.files):
            return
        if self._artifact is None:
            name = f"run-{self._run.id}"
            self._artifact = wandb.Artifact(name, "model", metadata={"run": self._run.name})
        self._artifact.add_file(str(path), name=path.name)

    def end(self, status: str) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        if self._artifact is not None:
            run.log_artifact(self._artifact)
        run.finish(exit_code=0 if status == FINISHED else 1)
