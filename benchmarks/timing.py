"""Time several pieces of work in turns, so that other load affects all of them equally."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

WARM_UP = 15  # steps until a step has been recorded or captured
Work = Callable[[], Any]


def interleaved(
    work: Mapping[str, Work], rounds: int, seconds: float, device: str, *, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Return the seconds that each piece takes once, in each of the rounds.

    A turn lasts about ``seconds``; turns follow in random order.
    """
    counts, order = {}, random.Random(0)
    for name, piece in work.items():
        timed(piece, warm_up, device)
        counts[name] = max(1, round(seconds / timed(piece, 3, device)))
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name in order.sample(list(work), len(work)):
            times[name].append(timed(work[name], counts[name], device))
    return times


def timed(piece: Work, count: int, device: str) -> float:
    """Return the seconds per call, of ``count`` calls, until the last is done."""
    wait(device)
    began, last = time.perf_counter(), None
    for _ in range(count):
        last = piece()
    wait(device, last)
    return (time.perf_counter() - began) / count


def wait(device: str, result: Any = None) -> None:
    if hasattr(result, "block_until_ready"):
        # JAX returns before it is done, and this library on a GPU before it has begun.
        result.block_until_ready()
    if device == "cuda":
        torch.cuda.synchronize()


def summary(
    times: Mapping[str, list[float]], base: str | None = None, floor: str | None = None
) -> dict[str, dict[str, float]]:
    """Return, per piece of work: median ms, quartiles, ``speed`` and ``floor``.

    ``speed`` is how many times as fast as the base it is, and ``floor`` is its time divided by that
    of the floor. Ratios are medians of the ratios within rounds.
    """
    found: dict[str, dict[str, float]] = {}
    for name, values in times.items():
        low, high = _quartiles(values)
        row = {"ms": 1e3 * statistics.median(values), "low": 1e3 * low, "high": 1e3 * high}
        if base in times:
            row["speed"] = statistics.median(
                a / b for a, b in zip(times[base], values, strict=True)
            )
        if floor in times:
            row["floor"] = statistics.median(
                b / a for a, b in zip(times[floor], values, strict=True)
            )
        found[name] = {key: _rounded(value) for key, value in row.items()}
    return found


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def machine(
    device: str, peers: Sequence[str] = ("pyro-ppl", "numpyro", "jax", "pythae")
) -> dict[str, Any]:
    """Describe the machine and the versions of the libraries."""
    packages = ("aevb", "torch", "numpy", *peers)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "kind": device,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "float32 products": torch.get_float32_matmul_precision(),
        "versions": {"python": platform.python_version()}
        | {name: found for name in packages if (found := _version(name)) is not None},
    }


def where(device: str) -> str:
    """Name the processor, or the GPU, and the version of torch."""
    found = machine(device, ())
    cores = "" if device == "cuda" else f", {found['cores']} cores"
    return f"{found['device']}{cores}, torch {found['versions']['torch'].partition('+')[0]}"


def keep(path: Path, device: str, models: Mapping[str, Any]) -> None:
    """Write the measurements of some models.

    Other models that this machine has measured before stay in the file.
    """
    here = machine(device)
    before = json.loads(path.read_text()) if path.exists() else {"machine": None}
    earlier = before["models"] if before["machine"] == here else {}
    path.write_text(json.dumps({"machine": here, "models": {**earlier, **models}}, indent=1) + "\n")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def use_cores(threads: int) -> None:
    """Set the number of torch's threads, and restrict the process to as many cores.

    Other libraries start as many threads as they see cores.
    """
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, mine[:threads])
