"""Compare the default of compile= with both fixed choices, on runs from tiny to long.

    python benchmarks/compile.py                # on a CPU
    python benchmarks/compile.py --device cuda
    python benchmarks/compile.py --quick        # one tiny run: check that it works

Each run is a process of its own with an empty compiler cache. Its seconds are those of ``fit``,
with the compilation and the decision. The last column is how far the default is behind the better
of the two fixed choices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from timing import keep

RUNS = {
    "cpu": [
        ("tiny VAE", 200),
        ("tiny VAE", 20000),
        ("digits VAE", 500),
        ("digits VAE", 10000),
        ("MNIST VAE", 1000),
        ("MNIST VAE", 4000),
        ("MNIST VAE", 16000),
        ("wide VAE", 2500),
        ("factor analysis", 5000),
        ("VRNN", 4000),
    ],
    "cuda": [
        ("tiny VAE", 200),
        ("tiny VAE", 20000),
        ("digits VAE", 2000),
        ("MNIST VAE", 1000),
        ("MNIST VAE", 20000),
        ("MNIST VAE", 120000),
        ("GMVAE", 10000),
        ("GMVAE", 60000),
        ("factor analysis", 20000),
        ("VRNN", 15000),
    ],
}
CHOICES = {"never": False, "always": True, "default": None}
HEAD = ("run", "never, s", "always, s", "default, s", "the default chose", "behind the better")


def models() -> dict[str, tuple[Callable[[], Any], tuple[int, ...]]]:
    from aevb import Bernoulli, Normal, zoo

    b = Bernoulli()
    return {
        "tiny VAE": (lambda: zoo.vae(16, 2, hidden=(16,), likelihood=b), (16,)),
        "digits VAE": (lambda: zoo.vae(64, 5, hidden=(100, 100), likelihood=b), (64,)),
        "MNIST VAE": (lambda: zoo.vae(784, 20, hidden=(500, 500), likelihood=b), (784,)),
        "wide VAE": (lambda: zoo.vae(2000, 50, hidden=(500,), likelihood=Normal()), (2000,)),
        "GMVAE": (lambda: zoo.gmvae(784, 64, 10, hidden=(512, 512)), (784,)),
        "factor analysis": (lambda: zoo.fa(50, 5), (50,)),
        "VRNN": (lambda: zoo.vrnn(28, 2, h=64, hidden=(100,), likelihood=b), (14, 28)),
    }


def train(name: str, steps: int, choice: str, device: str) -> dict[str, Any]:
    """Train one model in this process; return its seconds and whether it was compiled."""
    import torch

    from aevb import fit

    torch.manual_seed(0)
    build, shape = models()[name]
    model, x = build().to(device), (torch.rand(1000, *shape) < 0.5).float().to(device)
    fit(build().to(device), {"x": x}, steps=20, compile=False)  # loads what any run needs
    began = time.perf_counter()
    run = fit(model, {"x": x}, steps=steps, compile=CHOICES[choice])
    if device == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - began, "compiled": run.settings.compile}


def measured(name: str, steps: int, choice: str, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--one", name, str(steps), choice, "--device", device]
        done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def row(run: str, found: Mapping[str, Any]) -> list[str]:
    """Return the cells of a run: the seconds of each choice, and how far the default is behind."""
    never, always, default = (found[choice]["seconds"] for choice in CHOICES)
    best = min(never, always)
    behind = f"{default - best:+.1f} s, {100 * (default / best - 1):+.0f} %"
    chosen = "compiled" if found["default"]["compiled"] else "not compiled"
    return [run, f"{never:.1f}", f"{always:.1f}", f"{default:.1f}", chosen, behind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="one tiny run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "STEPS", "CHOICE"), help="one run")
    args = parser.parse_args()
    if args.one:
        name, steps, choice = args.one
        print(json.dumps(train(name, int(steps), choice, args.device)))
        return
    print("|", " | ".join(HEAD), "|")
    for name, steps in [("tiny VAE", 50)] if args.quick else RUNS[args.device]:
        found = {choice: measured(name, steps, choice, args.device) for choice in CHOICES}
        run = f"{name}, {steps:,} steps"
        print("|", " | ".join(row(run, found)), "|", flush=True)
        if args.json:
            keep(args.json, args.device, {run: found})


if __name__ == "__main__":
    main()
