"""Check that all contenders compute the same bound, at equal weights and after equal training.

At equal weights, only the draws differ, so this checks the bound. After training, it checks the
gradient too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import torch
from contenders import FLOOR, OURS, build, contenders
from problems import BATCH, ROWS, Contender, Problem

AT_REST = 1e-12  # a learning rate that changes no weight in single precision
EPOCH = ROWS // BATCH
ERRORS = 5  # standard errors by which bounds at equal weights may differ
ROUNDING = 2e-3  # additional share of the bound for the rounding of bfloat16
# Share of the bound by which it may differ after training, because of the draws of all steps.
TRAINED = 0.03


@dataclass(frozen=True)
class Bounds:
    """The mean bound at the initial weights, its standard error, and the mean bound after training.

    The last one is over the last two epochs, and None without training.
    """

    first: float
    error: float
    trained: float | None = None


def bounds(
    problem: Problem,
    names: list[str] | None = None,
    *,
    steps: int = 200,
    epochs: int = 3,
    quick: bool = False,
) -> dict[str, Bounds]:
    """Return the bounds of every contender, over whole epochs, so that all see the same rows."""
    torch.manual_seed(0)
    names = [name for name in contenders(problem.model, problem.device, names) if name != FLOOR]
    resting, _ = build(replace(problem, lr=AT_REST), names, quick=quick)
    first = {}
    for name, contender in resting.items():
        _run(contender, EPOCH - 1)  # build() took the first step
        first[name] = _run(contender, epochs * EPOCH)
    found = {
        name: Bounds(fmean(values), stdev(values) / len(values) ** 0.5)
        for name, values in first.items()
    }
    moving, _ = build(problem, list(first), quick=quick) if steps else ({}, {})
    for name, contender in moving.items():
        _run(contender, steps - 2 * EPOCH)
        found[name] = replace(found[name], trained=fmean(_run(contender, 2 * EPOCH)))
    return found


def _run(contender: Contender, steps: int) -> list[float]:
    assert contender.bound is not None
    return [contender.bound(contender.step()) for _ in range(steps)]


def disagreeing(found: Mapping[str, Bounds]) -> list[str]:
    """Describe the bounds that differ from this library's by more than the draws explain."""
    ours, wrong = found[OURS], []
    for name, row in found.items():
        pairs = [
            (
                "at the first weights",
                row.first,
                ours.first,
                ERRORS * math.hypot(row.error, ours.error) + ROUNDING * abs(ours.first),
            )
        ]
        if row.trained is not None and ours.trained is not None:
            pairs.append(("after training", row.trained, ours.trained, TRAINED * abs(ours.trained)))
        for when, theirs, mine, most in pairs:
            if not abs(theirs - mine) <= most:
                wrong.append(
                    f"{name}, {when}: {theirs:.2f}, aevb {mine:.2f}, more than {most:.2f} apart"
                )
    return wrong
