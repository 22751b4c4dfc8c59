"""Time ``fit`` from end to end, with its metrics and checkpoints, against the tutorial's loop:
epochs in turns, a process each.

python benchmarks/fits.py --json docs/figures/fits-cpu.json python benchmarks/fits.py --device cuda
--models vae-tutorial gmvae vrnn --json docs/figures/fits-cuda.json

What a process has done before changes what its memory costs, so here nobody shares one. Every epoch
ends with a look at one batch that was held out (``--held-out``: more rows), where the turn ends;
the tutorial's loop has none, writes no checkpoints, and keeps no metrics. Checkpoints are half a
minute apart, as they are by default: few or none fall into an epoch.
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
    "aevb": {},
    "aevb, compiled": {"compile": True},
    "aevb, compiled, bfloat16": {"compile": True, "precision": "bf16"},
}
STEPS = {  # of an epoch; on a GPU as many as MNIST has
    "cuda": {"vae": 600, "vae-tutorial": 600, "gmvae": 600, "vrnn": 600},
    "cpu": {"vae": 200, "vae-tutorial": 200, "gmvae": 40, "vrnn": 10},
}
ENOUGH = {"cuda": {"vrnn": 50}}  # of the tutorial's loop, which does nothing at the end of an epoch


AS_LONG = 2000  # steps that a run has at least: of a shorter one steps are not recorded


class Turns:
    """One contender's side: waits to be called, works, says how long a step took."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began = steps, 0.0

    def wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self.began = time.perf_counter()

    def done(self) -> None:
        print(json.dumps((time.perf_counter() - self.began) / self.steps), flush=True)


def take_part(way: str, problem: Problem, epochs: int, held_out: int) -> None:
    """Take turns until the epochs are over or nobody calls."""
    _set_precision(problem.device)
    steps = problem.count // BATCH
    turns = Turns(steps)
    if way == BASE:
        step = tutorial.BUILDERS[problem.model](problem).step
        for _ in range(epochs):
            turns.wait()
            for _ in range(steps):
                loss = step()
            float(loss)  # until the last step is done
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
    """What :func:`timing.summary` says of each way; an epoch a turn, in random order. The first
    epochs do not count.
    """
    order = [*ways, BASE]
    times: dict[str, list[float]] = {way: [] for way in order}
    epochs = rounds + warm_up + 1 + AS_LONG * BATCH // problem.count
    steps = problem.count // BATCH
    shorter = BATCH * min(steps, ENOUGH.get(problem.device, {}).get(problem.model, steps))
    with ExitStack() as stack:  # a side that is not called any more ends by itself
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
        "--held-out", type=int, default=BATCH, help="rows that are looked at after every epoch"
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
