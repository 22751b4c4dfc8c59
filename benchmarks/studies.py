"""Studies of the time of a step of ``fit`` as one quantity grows.

A study has lines, and a line has a piece of work for every value.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from library import Taken, stepping, training
from timing import WARM_UP, Work, interleaved, machine, summary, wait

from aevb import zoo
from aevb.declare.families import Bernoulli
from aevb.training.step_queue import StepQueue

Line = dict[int, Work]


@dataclass(frozen=True)
class Place:
    """The device and length of a study, and whether its sizes are tiny."""

    device: str
    folder: Path
    rounds: int = 10
    seconds: float = 0.3
    quick: bool = False

    @property
    def hidden(self) -> tuple[int, ...]:
        return (8, 8) if self.quick else (500, 500)

    def values(self, *all_of_them: int) -> tuple[int, ...]:
        return all_of_them[:2] if self.quick else all_of_them


@dataclass(frozen=True)
class Study:
    """A study: ``lines`` builds the work, ``what`` is the quantity on the axis.

    ``devices`` are those for which the study is meaningful.
    """

    what: str
    lines: Callable[[Place], dict[str, Line]]
    devices: tuple[str, ...] = ("cpu", "cuda")

    def run(self, place: Place) -> dict[str, Any]:
        lines = self.lines(place)
        work = {
            f"{line} {value}": piece
            for line, points in lines.items()
            for value, piece in points.items()
        }
        # On a GPU, ten steps are captured as one.
        warm_up = 2 if place.quick else 3 * WARM_UP if place.device == "cuda" else WARM_UP
        times = interleaved(work, place.rounds, place.seconds, place.device, warm_up=warm_up)
        found = {
            line: points_of({value: times[f"{line} {value}"] for value in points})
            for line, points in lines.items()
        }
        return {"what": self.what, "lines": found}


def points_of(times: Mapping[int, list[float]]) -> list[dict[str, float]]:
    """Return the points by value: ms, quartiles, and ``times``, the ratio to the first one."""
    named = {str(value): seconds for value, seconds in times.items()}
    found = summary(named, floor=next(iter(named)))
    return [
        {"value": value, "times": found[str(value)].pop("floor"), **found[str(value)]}
        for value in times
    ]


def rows(place: Place) -> dict[str, Line]:
    """The number of rows, in memory and in a file.

    In memory, rows are indexed in place; from a file, the rows of a batch are read. The time should
    not depend on the number of rows.
    """
    memory, mapped, d = {}, {}, 64
    for n in place.values(10**3, 10**4, 10**5, 10**6):
        path = place.folder / f"rows-{n}.npy"
        np.save(
            path,
            (np.random.default_rng(0).random((n, d), dtype=np.float32) < 0.2).astype(np.float32),
        )
        for line, mode in ((memory, None), (mapped, "r")):
            model = zoo.vae(
                d,
                10,
                hidden=(8, 8) if place.quick else (200, 200),
                dropout=0.0,
                likelihood=Bernoulli(),
            ).to(place.device)
            line[n] = stepping(training(model, {"x": np.load(path, mmap_mode=mode)})).step
    return {"in memory": memory, "memory-mapped": mapped}


def latent(place: Place) -> dict[str, Line]:
    x = _bits(1000, 16 if place.quick else 784)
    line = {}
    for z in place.values(2, 8, 32, 128, 512):
        model = zoo.vae(x.shape[1], z, hidden=place.hidden, dropout=0.0, likelihood=Bernoulli()).to(
            place.device
        )
        line[z] = stepping(training(model, {"x": x})).step
    return {"VAE": line}


def classes(place: Place) -> dict[str, Line]:
    """The number of classes: a sum needs one decoder pass per class, a relaxed draw only one.

    A relaxed draw is biased.
    """
    x, lines = _bits(1000, 16 if place.quick else 784), {}
    for name, how in (("summed", {}), ("Gumbel-Softmax", {"y": "gumbel"})):
        lines[name] = {}
        for c in place.values(2, 5, 10, 20, 50, 100):
            model = zoo.gmvae(x.shape[1], 4 if place.quick else 64, c, hidden=place.hidden).to(
                place.device
            )
            lines[name][c] = stepping(training(model, {"x": x}, how=how)).step
    return lines


def length(place: Place) -> dict[str, Line]:
    line = {}
    for steps in place.values(7, 14, 28, 56, 112):
        model = zoo.vrnn(28, 2, 8 if place.quick else 256, hidden=place.hidden).to(place.device)
        line[steps] = stepping(
            training(model, {"x": _bits(200, 28 * steps).reshape(200, steps, 28)})
        ).step
    return {"VRNN": line}


def seeds(place: Place) -> dict[str, Line]:
    """The number of runs: one step of each of several runs, as ``fit(seeds=…)`` takes them.

    The steps are parallel parts of one graph, or compiled as one program.
    """
    x, lines = _bits(1000, 16 if place.quick else 784), {}
    # Compiling takes long, so the compiled line has fewer points.
    ways = [("side by side", False, (1, 2, 4, 8, 16)), ("compiled", True, (1, 4, 8, 16))]
    for name, compiled, counts in ways[:1] if place.quick else ways:
        lines[name] = {}
        for count in place.values(*counts):
            model = zoo.gmvae(x.shape[1], 4 if place.quick else 64, hidden=place.hidden).to(
                place.device
            )
            lines[name][count] = _together(
                [
                    training(model.fresh(seed), {"x": x}, seed=seed, compile=compiled)
                    for seed in range(count)
                ]
            )
    return lines


def _together(runs: list[Any]) -> Work:
    together = StepQueue()
    phase = runs[0].settings.schedule.phase(0, runs[0].total)

    def step() -> Taken:
        together.step([run.wanted(phase) for run in runs])
        for run in runs:
            run.step += 1
            if run.step % 100 == 0:
                if run.stepper.failed():
                    raise FloatingPointError(f"a step before step {run.step} was not finite")
                run.stepper.read()
        return Taken(*runs)

    return step


STUDIES = {
    "rows": Study("rows of data", rows),
    "latent": Study("size of z", latent),
    "classes": Study("classes", classes),
    "length": Study("steps of a sequence", length),
    "seeds": Study("runs together", seeds, devices=("cuda",)),
}


# Processes: each launch is a measurement of its own -----------------------------------------------


def processes(place: Place, counts: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    """The number of processes under ``torchrun``, with one thread each.

    They share a batch of a thousand rows. Launches of each number take turns.
    """
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(min(place.rounds, 3)):
        for count in counts:
            times[count].append(_launch(place, count))
    return {
        "what": "processes, one thread each",
        "lines": {"mixture, batches of 1000": points_of(times)},
    }


def _launch(place: Place, count: int) -> float:
    """Return the seconds per step, as the first process measured them."""
    target = place.folder / f"processes-{count}.json"
    run = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
        str(Path(__file__).with_name("scaling.py")),
    ]
    told = {
        "device": place.device,
        "seconds": place.seconds,
        "quick": place.quick,
        "target": str(target),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *run, "--worker", json.dumps(told)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode or not target.exists():
        raise RuntimeError(
            f"{count} processes ended with {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    found = json.loads(target.read_text())
    target.unlink()
    return found


def worker(told: Mapping[str, Any]) -> None:
    """Run in each process: the first one writes the median time of single steps."""
    device = f"cuda:{os.environ['LOCAL_RANK']}" if told["device"] == "cuda" else "cpu"
    place = Place(device, Path(), seconds=told["seconds"], quick=told["quick"])
    x = _bits(4000, 16 if place.quick else 784)
    run = training(
        zoo.gmvae(x.shape[1], 4 if place.quick else 64, hidden=place.hidden).to(device),
        {"x": x},
        batch=1000,
    )
    step = stepping(run).step
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(5 if place.quick else 30):
        # Every process takes the same number of steps, because each waits for the others.
        began = time.perf_counter()
        step()
        wait(told["device"])
        times.append(time.perf_counter() - began)
    if run.job.world.first:
        Path(told["target"]).write_text(json.dumps(statistics.median(times)))
    run.job.world.wait()
    run.job.world.leave()
    os._exit(0)


def record(place: Place, found: Mapping[str, Any], left_out: Mapping[str, str]) -> dict[str, Any]:
    return {
        "machine": machine(place.device),
        "rounds": place.rounds,
        "seconds": place.seconds,
        "studies": dict(found),
        "left out": dict(left_out),
    }


def _bits(n: int, d: int) -> np.ndarray:
    return (np.random.default_rng(0).random((n, d)) < 0.13).astype(np.float32)
