"""Time models from the start of a process until they reach the tutorial's numbers on MNIST.

python benchmarks/race.py                 # all four at once, one process each, on one GPU
python benchmarks/race.py vae cvae        # some of them

The number of a model is the final bound of the tutorial's run on the test rows. The processes are
forked from one that has imported all modules. If CUDA's multi-process service is installed, they
use the GPU at the same time; otherwise, and with --in-turns, they use it in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TARGETS = {"vae": 1788.4, "cvae": 1820.1, "gmvae": -83.1, "vrnn": -78.5}
RECIPES: dict[str, dict[str, Any]] = {
    "vae": {"epochs": 10, "lr": 2e-3},
    "cvae": {"epochs": 32, "lr": 1e-3, "warmup": 600},
    "gmvae": {"epochs": 12, "lr": 1e-3},
    "vrnn": {"epochs": 2, "lr": 1e-3},
}


class ReachedError(Exception):
    """A run has reached the tutorial's number."""


def train(name: str, began: float, recipe: dict[str, Any]) -> dict[str, Any]:
    import torch

    from aevb import fit, zoo
    from aevb.data.sources import open_source
    from aevb.declare.families import ContinuousBernoulli
    from aevb.declare.networks import mlp
    from aevb.experiments.lab import Lab
    from aevb.model import Model
    from aevb.training.evaluation import evaluate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    lab = Lab(Path("unused"), data="mnist", device=device)
    torch.manual_seed(0)
    clamped = {"likelihood": ContinuousBernoulli(784, net=mlp(500, 500, dropout=0.1), clamped=True)}
    model: Model = {
        "vae": lambda: zoo.vae(**clamped),
        "cvae": lambda: zoo.cvae(**clamped),
        "gmvae": zoo.gmvae,
        "vrnn": zoo.vrnn,
    }[name]()
    model.to(device)
    how = "dequantise" if name in ("vae", "cvae") else None
    rows, test, _, _ = lab.rows(model, how=how)
    judged, seen = open_source(model.graph, test, model._parameter()), []
    glance = {variable: values[:100] for variable, values in test.items()}

    def look(step: int, model: Model) -> None:
        seen.append(
            (step, round(evaluate(model, judged, seed=0)["elbo"], 2), round(time.time() - began, 1))
        )
        if seen[-1][1] >= TARGETS[name]:
            raise ReachedError

    settings = {"batch": 100, "seed": 0, "compile": False} | recipe
    with suppress(ReachedError):
        fit(model, rows, validation=glance, progress=False, after=look, **settings)
    step, value, seconds = seen[-1]
    return {
        "model": name,
        "target": TARGETS[name],
        "reached": value,
        "seconds": seconds,
        "steps": step,
        "recipe": recipe,
        "seen": seen,
    }


@contextmanager
def shared() -> Iterator[None]:
    """Let processes started inside the context use the GPU at the same time.

    This needs CUDA's multi-process service.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if (
            control is None
            or subprocess.run([control, "-d"], env=os.environ | places, check=False).returncode
        ):
            print(
                "CUDA's multi-process service is not here: the GPU goes from process to process",
                flush=True,
            )
            yield
            return
        os.environ |= places
        try:
            yield
        finally:
            subprocess.run(
                [control], input="quit\n", text=True, check=False, stdout=subprocess.DEVNULL
            )


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(TARGETS))
    parser.add_argument(
        "--in-turns", action="store_true", help="do not start CUDA's multi-process service"
    )
    parser.add_argument(
        "--recipes",
        type=json.loads,
        default={},
        help='settings of fit that replace the defaults, as JSON: {"vae": {"epochs": 12}}',
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(given.models)))
    with nullcontext() if given.in_turns else shared():
        import aevb.experiments.lab
        import aevb.zoo  # noqa: F401  before the others are forked

        with ProcessPoolExecutor(len(given.models), mp_context=get_context("fork")) as pool:
            running = [
                pool.submit(train, name, began, given.recipes.get(name, RECIPES[name]))
                for name in given.models
            ]
            found = [process.result() for process in running]
        seconds = time.time() - began
    for row in found:
        met = "met" if row["reached"] >= row["target"] else "NOT MET"
        print(
            f"{row['model']:<6} {row['target']:9.1f} {met}: {row['reached']:9.2f} after "
            f"{row['steps']:6d} steps, {row['seconds']:5.1f} s"
        )
    print(f"all: {seconds:.1f} s")
    if given.json:
        given.json.write_text(
            json.dumps({"seconds": round(seconds, 1), "models": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
