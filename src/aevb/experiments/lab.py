"""Where experiments run: each task leaves its numbers and arrays in files, and is not done twice.

A task is a function that returns a :class:`Result`. Its files appear at once when it is finished,
so a laboratory that was stopped goes on where it was: finished tasks are read back, the training of
an unfinished one resumes from its last checkpoint. Whatever is shown later (figures, the report)
reads these files alone.
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
from aevb.model import Model
from aevb.runtime.checked_files import replace
from aevb.training.fit import fit
from aevb.training.run import Run
from aevb.version import __version__


@dataclass
class Result:
    """What a task found: numbers and words that JSON can hold, and arrays."""

    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Lab:
    """A folder of results, the data they are about, and the device they are computed on."""

    out: Path
    data: str = "digits"
    device: str = "cpu"
    quick: bool = False

    @property
    def tutorial_sizes(self) -> bool:
        """Whether models have the tutorial's sizes; the embedded digits are 8×8 and get smaller
        ones.
        """
        return self.data != "digits"

    def claim(self) -> None:
        """Refuse a folder that holds other files, or results about other data, or from a quick
        look.
        """
        path = self.out / "lab.json"
        mine = {"data": self.data, "quick": self.quick}
        if path.is_file():
            there = json.loads(path.read_text(encoding="utf-8"))
            if any(there.get(key) != value for key, value in mine.items()):
                raise ValueError(
                    f"{self.out} holds results on "
                    f"{there['data']}{' (quick)' if there['quick'] else ''}. Choose another "
                    f"folder with --out."
                )
            replace(path, json.dumps(there | {"before": there["seconds"]}) + "\n")
            return
        if self.out.is_dir() and any(self.out.iterdir()):
            raise ValueError(
                f"{self.out} holds files that are not a reproduction's. Choose a folder that is "
                f"empty or does not exist yet with --out."
            )
        self.out.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(mine | {"seconds": 0.0, "before": 0.0}) + "\n")

    def took(self, seconds: float) -> None:
        """Note the wall time of the whole so far, beside what was done before."""
        path = self.out / "lab.json"
        there = json.loads(path.read_text(encoding="utf-8"))
        replace(path, json.dumps(there | {"seconds": round(there["before"] + seconds, 1)}) + "\n")

    def folder(self, name: str) -> Path:
        """Where a task's files are. The parts of a task (a seed each) lie apart from it: its own
        folder is replaced whole.
        """
        return self.out / ("parts" if name.count("/") > 1 else "results") / name

    def done(self, name: str) -> bool:
        return (self.folder(name) / "result.json").is_file()

    def result(self, name: str) -> Result:
        return read(self.folder(name))

    def do(self, name: str, task: Callable[[Lab], Result]) -> float:
        """Compute a task's result and write it; the seconds it took."""
        began = time.perf_counter()
        result = task(self)
        seconds = time.perf_counter() - began
        result.numbers = {
            "seconds": round(seconds, 2)
        } | result.numbers  # a summary has the seconds of its parts
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
        """Fit, resuming what an interrupted task had begun. The model's weights must come from a
        seed.
        """
        model.to(device or self.device)
        return fit(
            model,
            data,
            validation=validation,
            out=self.out / "unfinished" / name,
            resume=True,
            progress=False,
            **settings,
        )

    def images(self, name: str | None = None) -> tuple[Images, Images]:
        return IMAGES[name or self.data]()

    def rows(
        self, model: Model, *, name: str | None = None, how: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], np.ndarray, np.ndarray]:
        """Training and test rows as this model takes them, and their labels."""
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
    """All files of a result, or none."""
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
        f"{type(value).__name__} does not go into a result's numbers; put arrays into arrays"
    )


def declared(model: Model, **choices: Any) -> dict[str, str]:
    """The declaration and the derived estimator, as the report shows them."""
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
    """A target beside what was measured."""
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
    """Parts of a history as arrays: ``name`` and ``name.step``."""
    history = run.history
    return {
        key: history[key] for name in names if name in history for key in (name, f"{name}.step")
    }
