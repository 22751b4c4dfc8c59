"""Seconds from the start of a process until a model reaches, on MNIST's test rows, the number that the tutorial's own run ended with.

python benchmarks/race.py                 # all four at once, a process each, on one GPU
python benchmarks/race.py vae cvae        # some of them
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TARGETS = {"vae": 1788.4, "cvae": 1820.1, "gmvae": -83.1, "vrnn": -78.5}
RECIPES: dict[str, dict[str, Any]] = {
    "vae": {"epochs": 10, "lr": 2e-3},
    "cvae": {"epochs": 32, "lr": 1e-3, "warmup": 600},
    "gmvae": {"epochs": 12, "lr": 1e-3},
    "vrnn": {"epochs": 2, "lr": 1e-3},
}


class ReachedError(Exception):
    """The tutorial's number was met."""


def train(name: str, began: float, recipe: dict[str, Any]) -> dict[str, Any]:
    import torch

    from aevb import fit, zoo
    from aevb.data.sources import open_source
    from aevb.experiments.lab import Lab
    from aevb.families import ContinuousBernoulli
    from aevb.model import Model
    from aevb.networks import mlp
    from aevb.training.evaluation import evaluate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    lab = Lab(Path("unused"), data="mnist", device=device)
    torch.manual_seed(0)
    clamped = {"likelihood": ContinuousBernoulli(784, net=mlp(500, 500, dropout=0.1), clamped=True)}
    model: Model = {"vae": lambda: zoo.vae(**clamped), "cvae": lambda: zoo.cvae(**clamped), "gmvae": zoo.gmvae, "vrnn": zoo.vrnn}[name]()
    model.to(device)
    how = "dequantise" if name in ("vae", "cvae") else None
    rows, test, _, _ = lab.rows(model, how=how)
    judged, seen = open_source(model.graph, test, model._parameter()), []
    glance = {variable: values[:100] for variable, values in test.items()}

    def look(step: int, model: Model) -> None:
        seen.append((step, round(evaluate(model, judged, seed=0)["elbo"], 2), round(time.time() - began, 1)))
        if seen[-1][1] >= TARGETS[name]:
            raise ReachedError

    settings = {"batch": 100, "seed": 0} | recipe
    with suppress(ReachedError):
        fit(model, rows, validation=glance, progress=False, after=look, **settings)
    step, value, seconds = seen[-1]
    return {"model": name, "target": TARGETS[name], "reached": value, "seconds": seconds, "steps": step, "recipe": recipe, "seen": seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(TARGETS))
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--recipes", type=json.loads, default={}, help='settings of fit in place of the usual, as JSON: {"vae": {"epochs": 12}}')
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(train(given.alone, given.began, given.recipes.get(given.alone, RECIPES[given.alone]))))
        return
    began = time.time()
    recipe = ["--recipes", json.dumps(given.recipes)]
    cores = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(given.models)))}
    running = [
        subprocess.Popen([sys.executable, __file__, "--alone", name, "--began", str(began), *recipe], stdout=subprocess.PIPE, text=True, env=cores)
        for name in given.models
    ]
    found = []
    for process in running:
        out, _ = process.communicate()
        if process.returncode:
            sys.exit(f"a run ended with {process.returncode}")
        found.append(json.loads(out.splitlines()[-1]))
    for row in found:
        met = "met" if row["reached"] >= row["target"] else "NOT MET"
        print(f"{row['model']:<6} {row['target']:9.1f} {met}: {row['reached']:9.2f} after {row['steps']:6d} steps, {row['seconds']:5.1f} s")
    print(f"all: {time.time() - began:.1f} s")
    if given.json:
        given.json.write_text(json.dumps({"seconds": round(time.time() - began, 1), "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
