"""A folder of experiments: each task writes its numbers and arrays to files, and runs once.

A task is a function that returns a :class:`Result`. Its files appear all at once when it is
finished. A laboratory that was stopped can therefore continue: finished tasks are read from disk,
and an unfinished training resumes from its last checkpoint. The figures and the report read only
these files.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aevb.data.builtin import IMAGES, Images
from aevb.data.preparation import as_variable
from aevb.estimate.metric_names import Metric
from aevb.model import Model
from aevb.runtime.checked_files import replace
from aevb.training.fit import fit
from aevb.training.run import Run
from aevb.version import __version__


@dataclass
class Result:
    """The result of a task: numbers and texts that JSON can hold, and arrays."""

    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Lab:
    """A folder of results, their data, and the device that computes them."""

    out: Path
    data: str = "digits"
    device: str = "cpu"
    quick: bool = False

    @property
    def tutorial_sizes(self) -> bool:
        """Whether models have the tutorial's sizes.

        The embedded digits have 8×8 pixels, and their models are smaller.
        """
        return self.data != "digits"

    def claim(self) -> None:
        """Refuse a folder with other files, or with results of other data or ``quick``."""
        path = self.out / "lab.json"
        mine = {"data": self.data, "quick": self.quick}
        if path.is_file():
            there = json.loads(path.read_text(encoding="utf-8"))
            if any(there.get(key) != value for key, value in mine.items()):
                raise ValueError(
                    f"{self.out} has results of "
                    f"{there['data']}{' (quick)' if there['quick'] else ''}. Choose another "
                    f"folder with --out."
                )
            replace(path, json.dumps(there | {"before": there["seconds"]}) + "\n")
            return
        if self.out.is_dir() and any(self.out.iterdir()):
            raise ValueError(
                f"{self.out} has files that do not belong to a reproduction. Choose an empty or "
                f"a new folder with --out."
            )
        self.out.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(mine | {"seconds": 0.0, "before": 0.0}) + "\n")

    def took(self, seconds: float) -> None:
        """Record the total wall time so far, including the time of earlier calls."""
        path = self.out / "lab.json"
        there = json.loads(path.read_text(encoding="utf-8"))
        replace(path, json.dumps(there | {"seconds": round(there["before"] + seconds, 1)}) + "\n")

    def folder(self, name: str) -> Path:
        """Return the folder of a task's files.

        The parts of a task (one per seed) have another folder, because the folder of a task is
        replaced as a whole.
        """
        return self.out / ("parts" if name.count("/") > 1 else "results") / name

    def done(self, name: str) -> bool:
        return (self.folder(name) / "result.json").is_file()

    def result(self, name: str) -> Result:
        return read(self.folder(name))

    def do(self, name: str, task: Callable[[Lab], Result]) -> float:
        """Compute a task's result, write it, and return the seconds."""
        began = time.perf_counter()
        result = task(self)
        seconds = time.perf_counter() - began
        # A summary already has the seconds of its parts.
        result.numbers = {"seconds": round(seconds, 2)} | result.numbers
        result.numbers |= {"machine": self.machine(), "quick": self.quick, "data": self.data}
        write(self.folder(name), result)
        shutil.rmtree(self.out / "unfinished" / name, ignore_errors=True)
        return seconds

    def train(
        self,
        name: str,
        model: Model,
        data: Mapping[str, Any],
        validation: Mapping[str, Any],
        *,
        device: str | None = None,
        **settings: Any,
    ) -> Run:
        """Train a model, or resume the training of an interrupted task.

        The initial weights of the model must come from a seed.
        """
        model.to(device or self.device)
        return fit(
            model,
            data,
            validation=validation,
            out=self.out / "unfinished" / name,
            resume=True,
            progress=False,
            # Tasks share the cores, and a result is the same to the last bit on every machine.
            **({"compile": False} | settings),
        )

    def images(self, name: str | None = None) -> tuple[Images, Images]:
        return IMAGES[name or self.data]()

    def rows(
        self, model: Model, *, name: str | None = None, how: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], np.ndarray, np.ndarray]:
        """Return training and test rows as this model takes them, and their labels."""
        train, test = self.images(name)
        found = []
        for seed, images in enumerate((train, test)):
            rows: dict[str, Any] = {
                "x": as_variable(model.graph, "x", images.pixels, images.levels, how=how, seed=seed)
            }
            found.append(rows | ({"y": images.labels} if "y" in model.graph.given else {}))
        return found[0], found[1], train.labels, test.labels

    def machine(self) -> dict[str, str]:
        on_gpu = self.device.startswith("cuda")
        threads = torch.get_num_threads()
        name = (
            f"{torch.cuda.get_device_name()}, TF32"
            if on_gpu
            else f"{platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
        )
        return {
            "device": name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "aevb": __version__,
        }


def write(folder: Path, result: Result) -> None:
    """Write all files of a result at once, so that a kill leaves all or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    if result.arrays:
        np.savez_compressed(temporary / "arrays.npz", **result.arrays)  # type: ignore[arg-type]
    (temporary / "result.json").write_text(
        json.dumps(result.numbers, indent=1, ensure_ascii=False, default=_plain) + "\n",
        encoding="utf-8",
    )
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def read(folder: Path) -> Result:
    numbers = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if not (folder / "arrays.npz").is_file():
        return Result(numbers)
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        return Result(numbers, dict(arrays))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"A result's numbers cannot hold a {type(value).__name__}. Put arrays into Result.arrays"
    )


def declared(model: Model, **choices: Any) -> dict[str, str]:
    """Return the declaration and the derived estimator, as the report shows them."""
    explanation = model.explain(**choices)
    return {"model": str(model), "estimator": str(explanation), "latex": explanation.latex}


def check(
    what: str,
    measured: float,
    *,
    least: float | None = None,
    most: float | None = None,
    source: str = "",
) -> dict[str, Any]:
    """Return a target together with the measured value."""
    ok = (least is None or measured >= least) and (most is None or measured <= most)
    return {
        "what": what,
        "measured": measured,
        "least": least,
        "most": most,
        "source": source,
        "ok": bool(ok),
    }


def curve(run: Run, *names: str) -> dict[str, np.ndarray]:
    """Return parts of a history as arrays: ``name`` and ``name.step``."""
    history = run.history
    return {
        key: history[key]
        for name in names
        if name in history
        for key in (name, Metric.of(name).steps)
    }
