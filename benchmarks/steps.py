"""Time a training step of the same model in several ways, interleaved, as ratios of medians.

python benchmarks/steps.py --models vae gmvae vrnn --rounds 20 --json steps.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch
from contenders import contenders

BASE = "the tutorial's way"


def measure(model: str, device: str, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """The median time of a step of each contender over rounds in which each has its turn."""
    steps = {name: build() for name, build in contenders(model, device).items()}
    counts = {}
    for name, step in steps.items():  # warm up, and see how many steps fill a turn
        for _ in range(5):
            step()
        counts[name] = max(1, round(seconds / _time(step, 3, device)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            times[name].append(_time(steps[name], counts[name], device))
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = {name: statistics.median(a / b for a, b in zip(times[BASE], values, strict=True)) for name, values in times.items()}
    return {name: {"ms": 1e3 * median[name], "speed": ratio[name]} for name in steps}


def _time(step: object, count: int, device: str) -> float:
    """Seconds a step."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    for _ in range(count):
        step()  # type: ignore[operator]
    wait()
    return (time.perf_counter() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["vae", "gmvae", "vrnn"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    random.seed(0)
    found = {}
    for model in arguments.models:
        found[model] = measure(model, arguments.device, arguments.rounds, arguments.seconds)
        print(f"{model}, a step of a hundred rows")
        for name, row in sorted(found[model].items(), key=lambda item: -item[1]["ms"]):
            print(f"  {name:<24} {row['ms']:9.3f} ms   {row['speed']:5.2f} times the tutorial's speed")
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()}
        machine |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "rounds": arguments.rounds, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
