"""Time runs of three models alone and next to busy processes on the same two cores.

python benchmarks/contention.py                           # about ten minutes
python benchmarks/contention.py --models vae --rounds 9 --beside alone one --json contention.json
python benchmarks/contention.py --before ../earlier/src   # compare with an earlier version

Every run is a separate process on the first two cores. It imports the library, trains for 300 steps
and prints the time. In every round the sides run one after another: "one thread", "before" (threads
spin) and "after" (this tree). The rows "alone" need a machine without other load; the load average
is printed first.

Next to b busy processes on two cores, a run with two threads has the share 2 / (2 + b) of the
cores. The column "of its share" divides the time of a run by the time that this share allows: the
time of "after" alone, divided by the share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODELS = ("vae", "gmvae", "vrnn")
SIDES = ("one thread", "before", "after")
# The number of busy processes. A pinned one stays on the second core.
BESIDE = {"alone": 0, "one": 1, "one, pinned": 1, "two": 2}
CORES = 2
SOURCE = Path(__file__).parents[1] / "src"

console = Console()


def train(model: str, steps: int, threads: int | None, spin: bool) -> tuple[float, float]:
    """Train, and return wall and CPU seconds from the first read of the data to the last step."""
    import torch

    from aevb import Bernoulli, fit, zoo

    if spin:
        from aevb.runtime import contention

        contention.SCHEDSTAT = False
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes = {"vae": (2000, 784), "gmvae": (2000, 64), "vrnn": (500, 28, 28)}
    x = (torch.rand(*sizes[model]) < 0.3).float()
    built = {
        "vae": lambda: zoo.vae(784, 20, hidden=(500, 500), likelihood=Bernoulli()),
        "gmvae": lambda: zoo.gmvae(64, 10, 10, hidden=(200, 200)),
        "vrnn": lambda: zoo.vrnn(28, 2, 64, hidden=(64,)),
    }[model]()
    wall, cpu = time.perf_counter(), time.process_time()
    fit(built, {"x": x}, steps=steps, batch=100, seed=0, progress=False)
    return time.perf_counter() - wall, time.process_time() - cpu


def run(model: str, side: str, given: argparse.Namespace, cores: list[int]) -> float | None:
    """Return the seconds of a run in its own process; None if it exceeds the limit."""
    source = given.before if side == "before" and given.before is not None else SOURCE
    command = [sys.executable, __file__, "--child", model, "--steps", str(given.steps)]
    command += ["--threads", "1"] if side == "one thread" else []
    command += ["--spin"] if side == "before" and given.before is None else []
    process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MKL_"))},
            "PYTHONPATH": str(source),
        },
    )
    try:
        out, _ = process.communicate(timeout=given.limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    if process.returncode:
        raise SystemExit(f"{model}, {side}: the run failed; its message is above.")
    return float(json.loads(out)["wall"])


@contextmanager
def busy(name: str, cores: list[int]) -> Iterator[None]:
    """Keep processes running, inside the context, that use a core all the time."""
    chosen = cores[1:2] if "pinned" in name else cores
    command = [
        "taskset",
        "-c",
        ",".join(map(str, chosen)),
        sys.executable,
        "-c",
        "while True: pass",
    ]
    processes = [subprocess.Popen(command) for _ in range(BESIDE[name])]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def allowed(alone: float, others: int) -> float:
    """Return the seconds that a run takes with its share of the cores, next to ``others``.

    The run has as many threads as there are cores.
    """
    return alone * (CORES + others) / CORES


def measure(
    model: str, given: argparse.Namespace, cores: list[int]
) -> dict[str, dict[str, list[float | None]]]:
    """Return the seconds by neighbours and side, one number per round."""
    found: dict[str, dict[str, list[float | None]]] = {
        name: {side: [] for side in SIDES} for name in given.beside
    }
    for i in range(given.rounds):
        for name in given.beside:
            with busy(name, cores):
                for side in SIDES[i % 3 :] + SIDES[: i % 3]:
                    found[name][side].append(run(model, side, given, cores))
    return found


def middle(times: list[float | None], limit: float) -> float:
    """Return the median; a run that was stopped counts as its limit."""
    return statistics.median(limit if value is None else value for value in times)


def rows(found: dict[str, dict[str, list[float | None]]], limit: float) -> list[tuple[str, ...]]:
    """Return one table row per neighbour.

    It has the median seconds of each side, before : after (median over the rounds), and the time of
    "after" divided by the time that its share allows.
    """
    alone = middle(found["alone"]["after"], limit) if "alone" in found else None
    shown = []
    for name, sides in found.items():
        medians = {side: middle(times, limit) for side, times in sides.items()}
        stopped = {
            side: ">" if None in times and medians[side] >= limit else ""
            for side, times in sides.items()
        }
        ratio = statistics.median(
            (a or limit) / (b or limit)
            for a, b in zip(sides["before"], sides["after"], strict=True)
        )
        share = "" if alone is None else f"{medians['after'] / allowed(alone, BESIDE[name]):.2f}"
        shown.append(
            (
                name,
                *(f"{stopped[side]}{medians[side]:.2f}" for side in SIDES),
                f"{ratio:.2f}",
                share,
            )
        )
    return shown


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--beside",
        nargs="+",
        choices=list(BESIDE),
        default=list(BESIDE),
        metavar="NAME",
        help=f"some of: {', '.join(BESIDE)}",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--before", type=Path, help="the source folder of an earlier version")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds after which a run is stopped"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--spin", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        wall, cpu = train(given.child, given.steps, given.threads, given.spin)
        print(json.dumps({"wall": wall, "cpu": cpu}))
        return
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise SystemExit(f"This needs {CORES} cores, and there is one.")
    console.print(f"load average before: {os.getloadavg()[0]:.2f}")
    found: dict[str, Any] = {}
    for model in given.models:
        found[model] = measure(model, given, cores)
        table = Table(title=f"{model}: seconds for {given.steps} steps", title_justify="left")
        for name in ("beside", *SIDES, "before : after", "of its share"):
            table.add_column(name, justify="left" if name == "beside" else "right", no_wrap=True)
        for row in rows(found[model], given.limit):
            table.add_row(*row)
        console.print(table)
    if given.json:
        from timing import machine  # this import loads torch

        given.json.write_text(
            json.dumps(
                {
                    "machine": machine("cpu", []),
                    "rounds": given.rounds,
                    "steps": given.steps,
                    "limit": given.limit,
                    "seconds": found,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
