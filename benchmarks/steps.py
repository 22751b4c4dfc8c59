"""Time a training step of the same model written in several ways, in turns, as ratios.

python benchmarks/steps.py --json docs/figures/steps-cpu.json   # VAE, mixture, recurrent model
python benchmarks/steps.py --models vae-tutorial --device cuda  # the tutorial's own VAE
python benchmarks/steps.py --check                              # check that all bounds agree
python benchmarks/steps.py --quick                              # tiny sizes: check that all run

Other libraries take part where they are installed: pip install 'aevb[bench]'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from agreement import bounds, disagreeing
from contenders import BASE, ENTRIES, FLOOR, build
from problems import BATCH, QUICK, SIZES, Problem
from rich.console import Console
from rich.table import Table
from timing import WARM_UP, interleaved, keep, summary, use_cores

console = Console()


def measure(
    problem: Problem,
    rounds: int,
    seconds: float,
    names: list[str] | None = None,
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """Time the contenders: ``ways`` has :func:`timing.summary` of each.

    ``left out`` has the reasons why others did not run.
    """
    torch.manual_seed(0)
    found, left_out = build(problem, names, quick=quick)
    warm_up = 2 if quick else WARM_UP
    times = interleaved(
        {name: contender.step for name, contender in found.items()},
        rounds,
        seconds,
        problem.device,
        warm_up=warm_up,
    )
    ways = summary(times, BASE, FLOOR)
    return {
        "ways": dict(sorted(ways.items(), key=lambda item: -item[1]["ms"])),
        "rounds": rounds,
        "seconds": seconds,
        "left out": left_out,
    }


def show(model: str, found: dict[str, Any]) -> None:
    table = Table(title=f"{model}: a step of {BATCH} rows", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("ms", "times the tutorial's speed", "times the floor"):
        table.add_column(name, justify="right")
    for name, row in found["ways"].items():
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("speed", "floor")]
        table.add_row(name, f"{row['ms']:.3f}", *ratios)
    console.print(table)
    for name, reason in found["left out"].items():
        console.print(f"left out: {name}: {reason}", markup=False)


def check(problem: Problem, names: list[str] | None, *, quick: bool) -> list[str]:
    found = bounds(problem, names, quick=quick)
    table = Table(title=f"{problem.model}: the mean bound, nats an example", title_justify="left")
    for name in ("", "at the first weights", "after 200 steps"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in found.items():
        table.add_row(name, f"{row.first:.2f} ± {row.error:.2f}", f"{row.trained:.2f}")
    console.print(table)
    return disagreeing(found)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(SIZES), default=["vae", "gmvae", "vrnn"]
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=list(ENTRIES),
        metavar="NAME",
        help=f"some of: {', '.join(ENTRIES)}",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--threads", type=int, help="number of threads and cores; by default all cores"
    )
    parser.add_argument("--full-precision", action="store_true", help="no TF32 on a GPU")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, one short round, nothing recorded or compiled",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the bounds instead of the times"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rounds, seconds = (1, 0.01) if given.quick else (given.rounds, given.seconds)
    if given.threads is not None:
        use_cores(given.threads)
    torch.set_float32_matmul_precision(
        "highest" if given.full_precision or given.device == "cpu" else "high"
    )
    found, wrong = {}, []
    for model in given.models:
        problem = Problem(model, (QUICK if given.quick else SIZES)[model], given.device)
        if given.check:
            wrong += [f"{model}: {line}" for line in check(problem, given.ways, quick=given.quick)]
            continue
        found[model] = measure(problem, rounds, seconds, given.ways, quick=given.quick)
        show(model, found[model])
    if given.quick and not given.check:
        console.print(
            "Tiny sizes and one short turn each: everything runs; the times mean nothing."
        )
    if given.check:
        sys.exit("\n".join(wrong) if wrong else 0)
    if given.json:
        keep(given.json, given.device, found)


if __name__ == "__main__":
    main()
