"""Sweep: train a grid of models, resumably, and compare them on the same held-out rows.

Each run trains on one thread, so that its numbers do not depend on how many train at a time. The
folder of a sweep has one folder per combination of arguments with one run per seed, a file per
finished run in ``results/``, and ``sweep.json``, which records what all runs share. A run with a
result is not repeated; a run without one resumes from its last checkpoint.
"""

from __future__ import annotations

import io
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
import torch

from aevb.comparison.entrants import Entrant, compared
from aevb.comparison.grid import combinations, folder_name, label
from aevb.comparison.result import Compared, Comparison
from aevb.data.datasets import Recipe
from aevb.data.sources import open_source
from aevb.model import Model
from aevb.runtime.checked_files import read_json, replace, seal, whole_file
from aevb.training.checkpoint import TrainingError
from aevb.training.run import Run, load_run
from aevb.training.run_folder import Folder
from aevb.training.seed_folders import seed_folder
from aevb.training.threads import threads
from aevb.version import __version__

FORMAT = "aevb sweep"


@dataclass(frozen=True)
class Rows:
    """Training and held-out rows, prepared for a model.

    ``log_jacobian``, [N], is what to subtract from log p of the held-out rows to get the units of
    the data. ``train_id`` and ``held_out_id`` identify the rows before their preparation.
    """

    train: Any
    held_out: Any
    train_id: str
    held_out_id: str
    recipe: Recipe | None = None
    log_jacobian: np.ndarray | None = None
    what: str = ""  # a description of the held-out rows
    units: str = ""  # a sentence on the units of log p


class Builder(Protocol):
    """What a sweep trains: a model for each combination of arguments, rows for it, and how.

    It is sent to other processes, so it must be picklable.
    """

    def model(self, arguments: Mapping[str, str]) -> Model:
        """Build the model of these arguments."""
        ...

    def rows(self, model: Model) -> Rows:
        """Load rows for a model."""
        ...

    def train(
        self,
        model: Model,
        rows: Rows,
        seeds: Sequence[int],
        out: Path,
        *,
        resume: bool,
        settings: Mapping[str, Any],
    ) -> list[Run]:
        """Train fresh models with these seeds, in the folders ``seed-N`` of ``out``.

        ``resume`` says that some of these folders have a run already.
        """
        ...


@dataclass(frozen=True)
class Job:
    """One combination of arguments, with the seeds to train together."""

    arguments: Mapping[str, str]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        return f"{label(self.arguments)} seed{'s' * (len(self.seeds) > 1)} {seeds}"


@dataclass(frozen=True)
class Finished:
    """The result of one run: its arguments, seed, steps and evidence."""

    arguments: Mapping[str, str]
    seed: int
    steps: int
    folder: Path
    compared: Compared


@dataclass(frozen=True)
class Sweep:
    """A grid of models to train in a folder.

    ``record`` is what all runs share, as JSON: a sweep goes on only with the same. ``evidence`` are
    the settings of the evidence: method, samples, seed.
    """

    builder: Builder
    grid: Mapping[str, Sequence[str]]
    seeds: int
    out: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    def name(self, arguments: Mapping[str, str], seed: int) -> str:
        """Return the name of a run in tables; without its seed if there is one seed only."""
        return label(arguments) + (f" seed {seed}" if self.seeds > 1 else "")

    def folder(self, arguments: Mapping[str, str], seed: int) -> Path:
        return seed_folder(self.out / folder_name(arguments), seed)

    def result_file(self, arguments: Mapping[str, str], seed: int) -> Path:
        return self.out / "results" / f"{folder_name(arguments)},seed={seed}.npz"

    def runs(self) -> list[tuple[dict[str, str], int]]:
        """Every run of the sweep: arguments and seed."""
        return [(one, seed) for one in combinations(self.grid) for seed in range(self.seeds)]

    def open_jobs(self, *, together: bool) -> list[Job]:
        """Return what is left to do; ``together`` makes one job of all seeds of a combination."""
        left: dict[int, Job] = {}
        every = combinations(self.grid)
        for i, arguments in enumerate(every):
            seeds = tuple(
                seed
                for seed in range(self.seeds)
                if not self.result_file(arguments, seed).is_file()
            )
            if seeds:
                left[i] = Job(arguments, seeds)
        if together:
            return list(left.values())
        return [Job(one.arguments, (seed,)) for one in left.values() for seed in one.seeds]

    # Training -------------------------------------------------------------------------------------

    def carry_out(self, job: Job) -> list[Finished]:
        """Train the runs of a job on one thread, or resume them, and write their results."""
        with threads(1), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # for a builder whose code draws from torch's global generator
            model = self.builder.model(job.arguments)
            rows = self.builder.rows(model)
            # A folder that a kill left without files is a new run.
            places = [self.folder(job.arguments, seed) for seed in job.seeds]
            resume = any(place.is_dir() and any(place.iterdir()) for place in places)
            out = self.out / folder_name(job.arguments)
            runs = self.builder.train(
                model, rows, job.seeds, out, resume=resume, settings=self.settings
            )
            found = []
            for run, seed, place in zip(runs, job.seeds, places, strict=True):
                best = load_run(place).to(model._parameter().device)
                source = open_source(best.graph, rows.held_out, best._parameter())
                entrant = Entrant(
                    self.name(job.arguments, seed),
                    best,
                    source,
                    rows.log_jacobian,
                    rows.held_out_id,
                    trained_on=False,
                    seconds=run.seconds,
                    folder=place,
                )
                one = Finished(
                    job.arguments, seed, run.step, place, compared(entrant, **self.evidence)
                )
                self._write(one, seal(best.declaration()))
                found.append(one)
            return found

    def _write(self, one: Finished, declaration: str) -> None:
        plain = asdict(one.compared)
        arrays = {name: plain.pop(name) for name in ("evidence", "stderr")}
        record = {"declaration": declaration, "steps": one.steps, "compared": plain}
        path = self.result_file(one.arguments, one.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as place:
            np.savez(place, record=np.array(json.dumps(record)), **arrays)

    def read(self, arguments: Mapping[str, str], seed: int) -> Finished | None:
        """Read the result of a run; None if there is none yet."""
        path = self.result_file(arguments, seed)
        if not path.is_file():
            return None
        record, arrays = _read_result(path)
        plain = record["compared"]
        plain |= {name: tuple(plain[name]) for name in ("flags", "notes")}
        plain["name"] = self.name(arguments, seed)  # the number of seeds may have changed
        return Finished(
            arguments,
            seed,
            int(record["steps"]),
            self.folder(arguments, seed),
            Compared(**plain, **arrays),
        )

    # The folder -----------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[Rows]:
        """Check the sweep against its folder, lock it, and write sweep.json.

        Every model of the grid is built once, so that a wrong argument is found before the first
        run. Yield the rows of the first model.
        """
        path = self.out / "sweep.json"
        if self.out.is_dir() and not path.is_file():
            others = sorted({one.name for one in self.out.iterdir()} - {".lock"})
            if others:
                raise ValueError(
                    f"{self.out} holds files that are not a sweep's ({', '.join(others[:3])}). "
                    f"Choose a folder that is empty or does not exist yet."
                )
        models = [(one, self.builder.model(one)) for one in combinations(self.grid)]
        rows = self.builder.rows(models[0][1])
        record = json.loads(
            json.dumps(
                {
                    "format": FORMAT,
                    **self.record,
                    "rows": {"train": rows.train_id, "held out": rows.held_out_id},
                }
            )
        )
        with Folder(self.out).held():
            if path.is_file():
                self._check(path, record)
            for arguments, model in models:
                self._check_declaration(arguments, seal(model.declaration()))
            grid = {"grid": {name: list(values) for name, values in self.grid.items()}}
            text = json.dumps(
                record | grid | {"seeds": self.seeds, "version": __version__}, indent=2
            )
            replace(path, text + "\n")
            yield rows

    def _check(self, path: Path, record: Mapping[str, Any]) -> None:
        """Refuse to go on with anything else than the sweep in this folder."""
        try:
            there = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Choose another --out.") from None
        for key, value in record.items():
            before = there.get(key)
            if before == value:
                continue
            if key == "rows":
                raise ValueError(
                    f"{self.out} holds a sweep over other rows: the data have changed since. "
                    f"Choose another --out."
                )
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                key, before, value = next(
                    (one, before.get(one), value.get(one))
                    for one in (*value, *before)
                    if before.get(one) != value.get(one)
                )
            raise ValueError(
                f"{self.out} holds a sweep with {key} = {_shown(before)}, but this command has "
                f"{_shown(value)}. Repeat its command to go on (the grid and --seeds may change), "
                f"or choose another --out."
            )

    def _check_declaration(self, arguments: Mapping[str, str], declaration: str) -> None:
        """Refuse results of a model that has another declaration now."""
        for seed in range(self.seeds):
            path = self.result_file(arguments, seed)
            if path.is_file() and _read_result(path)[0]["declaration"] != declaration:
                raise ValueError(
                    f"{label(arguments)} is another model now than in {self.out}: its declaration "
                    f"has changed. Choose another --out."
                )


def _read_result(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record of a result file, and its arrays."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            record = json.loads(str(file["record"]))
            arrays = {name: file[name] for name in ("evidence", "stderr")}
        for key in ("compared", "declaration", "steps"):
            record[key]
        return record, arrays
    except (ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(
            f"{path} is damaged ({error}). Delete it and repeat the command: it computes the "
            f"evidence of this run again."
        ) from None


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


Told = Callable[[str, list[Finished] | str, float], None]


def carry_out_here(sweep: Sweep, jobs: Sequence[Job], told: Told) -> None:
    """Carry out jobs one after another in this process.

    ``told(name, results or error, seconds)`` is called after each.
    """
    for job in jobs:
        start = time.perf_counter()
        told(job.name, attempt(sweep, job), time.perf_counter() - start)


def attempt(sweep: Sweep, job: Job) -> list[Finished] | str:
    """Carry out a job; return its results, or why it failed."""
    try:
        return sweep.carry_out(job)
    except (TrainingError, ValueError, OSError) as error:
        return str(error)
    except RuntimeError as error:  # of torch, e.g. out of memory
        return f"{error} ({traceback.format_exc(limit=-1).splitlines()[-2].strip()})"


def ranked(sweep: Sweep, rows: Rows) -> tuple[list[Finished], Comparison]:
    """Return the finished runs, the best first, and their comparison."""
    found = [one for run in sweep.runs() if (one := sweep.read(*run)) is not None]
    if not found:
        raise ValueError("No run of the sweep has finished.")
    comparison = Comparison.of([one.compared for one in found], rows.what, rows.units)
    by_name = {one.compared.name: one for one in found}
    return [by_name[one.name] for one in comparison.models], comparison


def across_seeds(found: Sequence[Finished]) -> list[Combination]:
    """Return the combinations of arguments with the results of all their seeds, best first."""
    groups: dict[str, list[Finished]] = {}
    for one in found:
        groups.setdefault(label(one.arguments), []).append(one)
    averages = {
        name: np.mean([one.compared.evidence for one in group], 0) for name, group in groups.items()
    }
    best = max(averages, key=lambda name: _or_lowest(float(averages[name].mean())))
    made = []
    for name, group in groups.items():
        means = np.array([one.compared.mean for one in group])
        rows = averages[name] - averages[best]
        spread = float(means.std(ddof=1)) if len(means) > 1 else math.nan
        error = float(rows.std(ddof=1)) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
        made.append(
            Combination(name, group, float(means.mean()), spread, float(rows.mean()), error)
        )
    return sorted(made, key=lambda one: _or_lowest(one.mean), reverse=True)


def _or_lowest(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


@dataclass(frozen=True)
class Combination:
    """The runs of all seeds of one combination of arguments.

    ``spread`` is the standard deviation of mean log p between seeds. ``difference`` is that of the
    average over seeds to the best combination, paired by rows, with its error over rows.
    """

    name: str
    runs: Sequence[Finished]
    mean: float
    spread: float
    difference: float
    error: float
