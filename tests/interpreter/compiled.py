"""Compare compiled steps with eager ones, on random declarations and sizes.

cd tests && python -m interpreter.compiled --models 40

The models run in child processes, which may crash. A child trains each of its models twice from the
same weights, with ``compile=True`` and without. It prints how far the bounds of the steps and the
last weights differ. Sizes are small and odd on purpose, because compiled code tends to fail at the
ends of vectors.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import aevb

from .data import values
from .declaration import Declaration
from .random_declarations import random_declaration

# Tolerance for the bounds and weights, relative to numbers larger than 1.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
STEPS = 8


def trainable(seed: int) -> Declaration:
    """Return a random declaration with weights, whose estimate is a function of noise."""
    rng = random.Random(seed)
    while True:
        declaration, _ = random_declaration(rng.randrange(2**31))
        families = {line.family for line in declaration.lines if line.side == "q"}
        if len(list(declaration.model(0).parameters())) and not families & {
            "Beta",
            "Poisson",
            "NegativeBinomial",
        }:
            return declaration


def difference(seed: int) -> tuple[float, str]:
    """Return the difference between the compiled and the eager run of one random model.

    The second value describes the model. The difference is NaN if the library refuses the model.
    """
    declaration, rng = trainable(seed), np.random.default_rng(seed)
    dtype = torch.float64 if rng.random() < 0.3 else torch.float32
    n, steps, batch = int(rng.integers(20, 160)), int(rng.integers(2, 6)), int(rng.integers(3, 20))
    rows: dict[str, Tensor] = {}
    for name in (*declaration.observed, *declaration.given):
        family = (
            "Normal"
            if name in declaration.given
            else next(iter(declaration.rules("p", name).values())).family
        )
        shape = (
            (n, steps, declaration.sizes[name])
            if name in declaration.timed
            else (n, declaration.sizes[name])
        )
        rows[name] = torch.from_numpy(values(rng, family, shape)).to(dtype)
    what = (
        f"{n} rows of {steps} steps, batch {batch}, {str(dtype).removeprefix('torch.')}: "
        f"{declaration}"
    )
    settings = {"steps": STEPS, "batch": batch, "samples": 2, "lr": 1e-3, "log_every": 1, "seed": 1}
    models, bounds = [], []
    for compiled in (False, True):
        model = declaration.model(seed).to(dtype)
        try:
            run = aevb.fit(model, rows, compile=compiled, **settings)
        except ValueError:
            return float("nan"), what
        models.append(
            torch.cat([weight.detach().reshape(-1).double() for weight in model.parameters()])
        )
        bounds.append(torch.as_tensor(np.asarray(run.history["elbo"])).double())
    gaps = [((b - a).abs() / a.abs().clamp_min(1.0)).max() for a, b in (bounds, models)]
    return float(max(gaps)) / TOLERANCE[dtype], what


def child(seeds: list[int]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in seeds:
        gap, what = difference(seed)
        print(f"{seed}\t{gap}\t{what}", flush=True)


def trained(seeds: list[int], cache: Path) -> tuple[list[tuple[int, float, str]], int, str]:
    """Train models in a child process; return its results, exit status and last errors."""
    command = [sys.executable, "-m", "interpreter.compiled", "--child", *map(str, seeds)]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "MALLOC_CHECK_": "3",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 2]
    return (
        [(int(seed), float(gap), what) for seed, gap, what in lines],
        done.returncode,
        done.stderr[-600:],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=40, help="how many random models")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--each", type=int, default=2, help="models of one child process")
    parser.add_argument("--child", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    compared = refused = differing = crashes = 0
    started = time.time()
    with tempfile.TemporaryDirectory() as cache:
        for first in range(arguments.first, arguments.first + arguments.models, arguments.each):
            seeds = list(
                range(first, min(first + arguments.each, arguments.first + arguments.models))
            )
            found, status, errors = trained(seeds, Path(cache))
            for seed, gap, what in found:
                compared, refused = compared + (gap == gap), refused + (gap != gap)
                if gap > 1:
                    differing += 1
                    print(f"seed {seed} differs by {gap:.3g} tolerances: {what}", flush=True)
            if status:
                crashes += 1
                print(
                    f"seeds {seeds}: exit status {status} after {len(found)} models: {errors}",
                    flush=True,
                )
            print(
                f"{compared} compared, {refused} refused, {differing} differ, {crashes} crashed, "
                f"{time.time() - started:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
