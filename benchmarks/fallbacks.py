"""Take each private API of torch away in turn: what the run says, and what a step then costs.

python benchmarks/fallbacks.py --json docs/figures/fallbacks-cpu.json                  # on a CPU
python benchmarks/fallbacks.py --device cuda --json docs/figures/fallbacks-cuda.json   # on a GPU
python benchmarks/fallbacks.py --quick                                                 # tiny sizes

Every API is a name in ``src/aevb/runtime/private_torch.py``, and a release of torch may lack it. A
number is the time of a step without the API, in times of the untouched one; all steps of a model
take turns in one process. It is measured in two modes, ``recorded`` (the default of ``fit``) and
``compiled`` (``compile=True``). Gradients are clipped, so that what clipping uses counts too. The
sampler of Gamma numbers is measured with a Student t posterior, which alone uses it. The switch of
``torch.vmap`` is not here: it decides what several models trained at once refuse, not how long a
step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from library import data, training
from problems import BATCH, QUICK, SIZES, Problem
from switches import (
    MODES,
    Change,
    Switched,
    begin,
    changed,
    columns,
    measured,
    options,
    prepare,
    ratio,
    show,
    told,
)
from timing import keep

from aevb import Bernoulli, Model, Normal, StudentT, fit, mlp
from aevb.runtime import private_torch
from aevb.training import gradient_steps
from aevb.training.events import NOT_COMPILED, events
from aevb.training.loop import Training

UNTOUCHED = "untouched"
CLIP = 1.0
STUDENT = "vae, Student t"  # the VAE with a posterior of heavy tails


def _refuse(*_: Any, **__: Any) -> Any:
    raise ImportError("no such module in this torch")


@dataclass(frozen=True)
class Missing:
    """An API that this torch is made to lack. ``student``: only a Student t posterior uses it."""

    changes: tuple[Change, ...]
    modes: Sequence[str] = MODES
    student: bool = False


def _none(name: str) -> Change:
    return Change(private_torch, name, None)


MISSING = {name: Missing((_none(name),)) for name in private_torch.SLOWER} | {
    "addmm_activation": Missing(
        (
            _none("addmm_activation"),
            Change(private_torch, "ADDMM_ACTIVATION", private_torch.NOTHING),
        )
    ),
    "standard_gamma": Missing((_none("standard_gamma"),), student=True),
    "DispatchMode": Missing((_none("DispatchMode"),)),
    "HOOKS": Missing((Change(private_torch, "HOOKS", ("_hooks_elsewhere",)),)),
    "inductor": Missing((Change(private_torch, "inductor", _refuse),), ("compiled",)),
    "cpp_kernels": Missing((Change(private_torch, "cpp_kernels", lambda: None),), ("compiled",)),
}


def student(problem: Problem) -> Model:
    s = problem.sizes
    torch.manual_seed(0)
    return Model(
        {"z": Normal(s.z), "x | z": Bernoulli(s.x, net=mlp(*s.hidden))},
        {"z | x": StudentT(net=mlp(*s.hidden))},
    ).to(problem.device)


def start(problem: Problem, mode: str, *, heavy: bool) -> Training:
    if not heavy:
        return begin(problem, mode, clip=CLIP)
    return training(student(problem), data(problem), clip=CLIP, compile=mode == "compiled")


def variants(
    problem: Problem, mode: str, names: Sequence[str], *, heavy: bool
) -> dict[str, Callable[[], Switched]]:
    """An untouched step, and one without each API."""
    run = partial(start, problem, mode, heavy=heavy)
    return {UNTOUCHED: partial(Switched, run)} | {
        name: partial(Switched, run, MISSING[name].changes)
        for name in names
        if MISSING[name].student == heavy and mode in MISSING[name].modes
    }


def notes(name: str, device: str) -> list[str]:
    """What a short run of ``fit`` records if an API is missing."""
    problem = Problem("vae", QUICK["vae"], device)
    soon = Change(gradient_steps, "RECORD_AFTER", 2), Change(gradient_steps, "RECORD_FOR", 0)
    with changed((*soon, *MISSING[name].changes)):
        try:
            run = fit(student(problem), data(problem), steps=12, batch=BATCH, progress=False)
        except Exception as error:
            return [told(error)]
    return [event.text for event in events(run.rows, NOT_COMPILED)]


def rows_of(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line for each API: a column for each model and mode, and what the runs say."""
    places = columns(found)
    head = ["without", *(f"{model}, {mode}" for model, mode in places), "the run says"]
    times = [f"{found[model][mode][UNTOUCHED]['ms']:.4g}" for model, mode in places]
    rows = [[f"nothing: {UNTOUCHED}, ms", *times, ""]]
    for name in dict.fromkeys(name for model, mode in places for name in found[model][mode]):
        cells = [found[model][mode].get(name) for model, mode in places]
        said = dict.fromkeys(note for row in cells if row is not None for note in row["notes"])
        if name != UNTOUCHED:
            rows.append([name, *map(ratio, cells), " ".join(said)])
    return head, rows


def main(arguments: list[str] | None = None) -> None:
    models = [*SIZES, STUDENT]
    given = options(__doc__, models, ["vae", "vrnn", STUDENT], list(MISSING)).parse_args(arguments)
    prepare(given)
    said = {name: notes(name, given.device) for name in given.only}
    found: dict[str, Any] = {}
    for model in given.models:
        name = "vae" if model == STUDENT else model
        problem = Problem(name, (QUICK if given.quick else SIZES)[name], given.device)
        found[model] = {"rounds": given.rounds}
        for mode in given.modes:
            steps = variants(problem, mode, given.only, heavy=model == STUDENT)
            rows = found[model][mode] = measured(steps, UNTOUCHED, given)
            for api, row in rows.items():
                row["notes"] = list(dict.fromkeys([*said.get(api, []), *row["notes"]]))
        if given.json:
            keep(given.json, given.device, {model: found[model]})
    title = f"a step of {BATCH} rows without an API of torch, in times of the untouched one"
    show(title, *rows_of(found), quick=given.quick)


if __name__ == "__main__":
    main()
