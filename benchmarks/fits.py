"""Time ``fit`` with its metrics and checkpoints against the tutorial's loop, by epochs in turns.

python benchmarks/fits.py --json docs/figures/fits-cpu.json
python benchmarks/fits.py --device cuda --models vae-tutorial gmvae vrnn --json fits-cuda.json

The earlier work of a process changes the cost of its memory, so each contender has its own process.
Every epoch ends with a validation on one held-out batch (``--held-out``: more rows), which ends the
turn. The tutorial's loop has no validation, no checkpoints and no metrics. Checkpoints are half a
minute apart, the default, so an epoch has few or none.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tutorial
from contenders import BASE
from library import data, declared
from problems import BATCH, QUICK, SIZES, Problem
from timing import keep, summary

from aevb import fit
from aevb.model import Model

WAYS: dict[str, dict[str, Any]] = {
    "aevb": {"compile": False},
    "aevb, compiled": {"compile": True},
    "aevb, compiled, bfloat16": {"compile": True, "precision": "bf16"},
}
STEPS = {  # steps of an epoch; on a GPU as many as MNIST has
    "cuda": {"vae": 600, "vae-tutorial": 600, "gmvae": 600, "vrnn": 600},
    "cpu": {"vae": 200, "vae-tutorial": 200, "gmvae": 40, "vrnn": 10},
}
# The tutorial's loop does nothing at the end of an epoch, so these steps of an epoch are enough.
ENOUGH = {"cuda": {"vrnn": 50}}


AS_LONG = 2000  # minimum number of steps of a run: shorter runs do not record their steps


class Turns:
    """The process of one contender: it waits for its turn, works, and prints the time of a step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began = steps, 0.0

    def wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self.began = time.perf_counter()

    def done(self) -> None:
        print(json.dumps((time.perf_counter() - self.began) / self.steps), flush=True)


def take_part(way: str, problem: Problem, epochs: int, held_out: int) -> None:
    """Take turns until the epochs are over or the caller stops."""
    _set_precision(problem.device)
    steps = problem.count // BATCH
    turns = Turns(steps)
    if way == BASE:
        step = tutorial.BUILDERS[problem.model](problem).step
        for _ in range(epochs):
            turns.wait()
            for _ in range(steps):
                loss = step()
            float(loss)  # waits until the last step is done
            turns.done()
        return

    def between(step: int, model: Model) -> None:
        turns.done()
        turns.wait()

    judged = Problem(problem.model, problem.sizes, problem.device, count=held_out)
    with TemporaryDirectory() as folder:
        turns.wait()
        settings = {
            "batch": BATCH,
            "lr": problem.lr,
            "epochs": epochs,
            "progress": False,
            "out": folder,
        }
        fit(
            declared(problem),
            data(problem),
            validation=data(judged),
            after=between,
            **settings,
            **WAYS[way],
        )


def _set_precision(device: str) -> None:
    torch.set_float32_matmul_precision("highest" if device == "cpu" else "high")


def measure(
    problem: Problem, ways: Sequence[str], rounds: int, warm_up: int, held_out: int
) -> dict[str, Any]:
    """Return :func:`timing.summary` of each way; a turn is an epoch, in random order.

    The first epochs do not count.
    """
    order = [*ways, BASE]
    times: dict[str, list[float]] = {way: [] for way in order}
    epochs = rounds + warm_up + 1 + AS_LONG * BATCH // problem.count
    steps = problem.count // BATCH
    shorter = BATCH * min(steps, ENOUGH.get(problem.device, {}).get(problem.model, steps))
    with ExitStack() as stack:  # a process without a caller ends by itself
        running = {}
        for way in order:
            side = {
                "way": way,
                "model": problem.model,
                "quick": problem.sizes == QUICK[problem.model],
                "device": problem.device,
            }
            side |= {
                "held_out": held_out,
                "count": shorter if way == BASE else problem.count,
                "epochs": epochs,
            }
            command = [sys.executable, __file__, "--side", json.dumps(side)]
            running[way] = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        chance = random.Random(0)
        for _ in range(rounds + warm_up):
            for way in chance.sample(order, len(order)):
                times[way].append(_turn(way, running[way]))
    return {
        "ways": summary({way: found[warm_up:] for way, found in times.items()}, BASE),
        "rounds": rounds,
        "steps": steps,
        "held out": held_out,
    }


def _turn(way: str, process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"{way} ended with {process.wait()}")
    return float(json.loads(answer))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(SIZES), default=["vae", "gmvae", "vrnn"]
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--device", choices=list(STEPS), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--held-out", type=int, default=BATCH, help="rows of the validation after every epoch"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two short epochs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.side:
        side = given.side
        sizes = (QUICK if side["quick"] else SIZES)[side["model"]]
        take_part(
            side["way"],
            Problem(side["model"], sizes, side["device"], count=side["count"]),
            side["epochs"],
            side["held_out"],
        )
        return
    rounds, warm_up = (1, 1) if given.quick else (given.rounds, 3)
    _set_precision(given.device)
    for model in given.models:
        count = BATCH * (2 if given.quick else STEPS[given.device][model])
        problem = Problem(
            model, (QUICK if given.quick else SIZES)[model], given.device, count=count
        )
        found = measure(problem, given.ways, rounds, warm_up, given.held_out)
        for way, row in found["ways"].items():
            print(
                f"{model:<13} {way:<26} {1e3 * row['ms']:9.0f} µs a step, {row['speed']:6.2f} "
                f"times the tutorial's speed",
                flush=True,
            )
        if given.json:
            keep(given.json, given.device, {model: found})


if __name__ == "__main__":
    main()
