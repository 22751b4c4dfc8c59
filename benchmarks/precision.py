"""Measure the cost of half precision: the test bound after a few epochs.

The bound is in float32 and in bfloat16, from the same seeds.

python benchmarks/precision.py --json docs/figures/precision.json    # on MNIST
python benchmarks/precision.py --data digits --models vae --seeds 4  # on the embedded digits
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import keep

from aevb import fit, zoo
from aevb.data.sources import open_source
from aevb.declare.families import Bernoulli
from aevb.experiments.lab import Lab
from aevb.model import Model
from aevb.training.evaluation import evaluate

MODELS: dict[str, Callable[[int, int], Model]] = {
    "vae": lambda side, d: zoo.vae(d, 20, hidden=(500, 500), dropout=0.0, likelihood=Bernoulli()),
    "gmvae": lambda side, d: zoo.gmvae(d),
    "vrnn": lambda side, d: zoo.vrnn(side),
}
PRECISIONS = ("float32", "bf16")


def compared(name: str, lab: Lab, seeds: int, epochs: int) -> dict[str, Any]:
    """Return the bounds of each seed in both precisions, and their mean difference in per cent.

    The difference is how much higher the second is, in per cent of the first.
    """
    pixels = lab.images()[0].pixels
    side = pixels.shape[-1]
    model = MODELS[name](side, side * pixels.shape[-2]).to(lab.device)
    rows, test, _, _ = lab.rows(model)
    judged = open_source(model.graph, test, model._parameter())
    bounds = {}
    for precision in PRECISIONS:
        choices = {
            "epochs": epochs,
            "batch": 100,
            "lr": 1e-3,
            "precision": precision,
            "compile": lab.device != "cpu",
        }
        runs = fit(model, rows, seeds=seeds, progress=False, **choices)
        bounds[precision] = [round(evaluate(run.model, judged, seed=0)["elbo"], 3) for run in runs]
    full, half = (bounds[precision] for precision in PRECISIONS)
    better = [100 * (b - a) / abs(a) for a, b in zip(full, half, strict=True)]
    error = statistics.stdev(better) / len(better) ** 0.5 if len(better) > 1 else None
    return {"epochs": epochs, "bounds": bounds, "better": statistics.fmean(better), "error": error}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["vae", "gmvae"])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high" if given.device == "cuda" else "highest")
    lab = Lab(Path("unused"), data=given.data, device=given.device)
    for name in given.models:
        row = {"data": given.data} | compared(name, lab, given.seeds, given.epochs)
        error = "" if row["error"] is None else f" ± {row['error']:.2f}"
        print(
            f"{name:<6} {given.seeds} seeds: bfloat16 is better by {row['better']:+.2f}{error} % "
            f"of float32's bound",
            flush=True,
        )
        if given.json:
            keep(given.json, given.device, {name: row})


if __name__ == "__main__":
    main()
