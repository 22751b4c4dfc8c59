"""Measure what each pass of the step compiler earns: a step with all of them, and with each one
switched off in turn, as ratios.

python benchmarks/passes.py --json docs/figures/passes-cpu.json                  # on a CPU
python benchmarks/passes.py --device cuda --json docs/figures/passes-cuda.json   # on a GPU
python benchmarks/passes.py --quick                                              # tiny sizes

All steps of a model take turns in one process. A number is the time without the pass, in times of
the time with all passes: above 1 the pass earns something, but no more than noise if the step with
all passes, measured a second time, differs as much. There are two modes, ``recorded`` (the
default of ``fit``) and ``compiled`` (``compile=True``); a pass is measured in those where it has
something to do. Beside it stand the lines of code that only this pass needs, without docstrings and
comments.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from problems import BATCH, QUICK, SIZES, Problem
from switches import (
    AGAIN,
    MODES,
    Change,
    Switched,
    begin,
    columns,
    measured,
    options,
    prepare,
    ratio,
    show,
)
from timing import keep
from torch import fx

from aevb.compiled_step import (
    array_bounds,
    cuda_graphs,
    cuda_streams,
    fused_adam,
    fusing,
    gradients,
    recording,
    rewriting,
    tracing,
)
from aevb.training import graph_steps, step_queue

ALL = "all passes"
BOTH = {"cpu": MODES, "cuda": MODES}
REWRITES = {"cpu": ("compiled",), "cuda": MODES}  # elsewhere the recording is not rewritten
COMPILED = {"cpu": ("compiled",), "cuda": ("compiled",)}
ON_GPU = {"cuda": MODES}


class OneStream(cuda_streams.ConcurrentRun):
    """A recorded step on the stream of its chain alone."""

    run_node = fx.Interpreter.run_node


@dataclass(frozen=True)
class Pass:
    """``modes``: where it has something to do, by device. ``code``: the modules and functions that
    only it needs. ``changes`` and ``stepper`` switch it off.
    """

    modes: Mapping[str, Sequence[str]]
    code: Sequence[Any]
    changes: tuple[Change, ...] = ()
    stepper: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> int:
        return sum(map(lines_of_code, self.code))


def _nothing(*_: Any) -> None:
    pass


PASSES = {
    "recording": Pass(
        {"cpu": ("recorded",), "cuda": ("recorded",)},  # nothing unrecorded is compiled
        (tracing, recording),
        stepper={"not_recorded": "its cost is measured"},
    ),
    "merging of products": Pass(
        REWRITES,
        (rewriting._merge, rewriting._kind, rewriting._bias, rewriting._side_by_side),
        (Change(rewriting, "_merge", _nothing),),
    ),
    "ReLU in the product": Pass(
        REWRITES, (rewriting._activate,), (Change(rewriting, "_activate", _nothing),)
    ),
    "deferral and streams": Pass(
        ON_GPU,
        (rewriting._leaves, cuda_streams),
        (
            Change(rewriting, "_leaves", lambda *_: []),
            Change(recording, "ConcurrentRun", OneStream),
        ),
    ),
    "fusing": Pass(
        COMPILED,
        (fusing, array_bounds),
        (  # as a step is recorded that is not compiled: constants folded, an LSTM's cell one kernel
            Change(recording, "fused", lambda graph, *_, **__: graph),
            Change(recording, "elementary", nullcontext),
            Change(recording, "traced", lambda *given, **_: tracing.traced(*given, fold=True)),
        ),
    ),
    "fused Adam": Pass(COMPILED, (fused_adam,), stepper={"ends_compiled": False}),
    "hand-written gradients": Pass(
        BOTH, (gradients,), (Change(gradients, "is_transformed", lambda: True),)
    ),
    "CUDA graphs": Pass(
        ON_GPU, (cuda_graphs, graph_steps, step_queue), stepper={"captures": False}
    ),
}


def lines_of_code(code: Any) -> int:
    """Lines of a module or function, without docstrings, comments and blank lines."""
    text = textwrap.dedent(inspect.getsource(code))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (*empty, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(found - docstrings)


def variants(
    problem: Problem, mode: str, names: Sequence[str]
) -> dict[str, Callable[[], Switched]]:
    """A step with all passes, and without each of those that do something here."""
    start = partial(begin, problem, mode)
    return {ALL: partial(Switched, start)} | {
        name: partial(Switched, start, one.changes, one.stepper)
        for name, one in PASSES.items()
        if name in names and mode in one.modes.get(problem.device, ())
    }


def rows_of(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """One line for each pass: its lines of code, then a column for each model and mode."""
    places = columns(found)
    head = ["without", "lines of code", *(f"{model}, {mode}" for model, mode in places)]
    times = [f"{found[model][mode][ALL]['ms']:.4g}" for model, mode in places]
    again = [ratio(found[model][mode][AGAIN]) for model, mode in places]
    rows = [[f"nothing: {ALL}, ms", "", *times], [AGAIN, "", *again]]
    lines = {name: number for one in found.values() for name, number in one["lines"].items()}
    for name, number in lines.items():
        cells = [found[model][mode].get(name) for model, mode in places]
        if any(cells):
            rows.append([name, str(number), *map(ratio, cells)])
    return head, rows


def notes_of(found: Mapping[str, Any]) -> list[str]:
    """What the runs say: in some, more may have been missing than the pass."""
    return [
        f"{model}, {mode}, without {'nothing' if name == ALL else name}: {note}"
        for model, mode in columns(found)
        for name, row in found[model][mode].items()
        if name != AGAIN
        for note in row["notes"]
    ]


def main(arguments: list[str] | None = None) -> None:
    given = options(__doc__, list(SIZES), ["vae", "gmvae", "vrnn"], list(PASSES)).parse_args(
        arguments
    )
    prepare(given)
    found: dict[str, Any] = {}
    for model in given.models:
        problem = Problem(model, (QUICK if given.quick else SIZES)[model], given.device)
        lines = {name: PASSES[name].lines() for name in PASSES if name in given.only}
        found[model] = {"rounds": given.rounds, "lines": lines}
        for mode in given.modes:
            torch.manual_seed(0)
            steps = variants(problem, mode, given.only)
            found[model][mode] = measured(steps, ALL, given)
        if given.json:
            keep(given.json, given.device, {model: found[model]})
    title = f"a step of {BATCH} rows without a pass, in times of the one with all"
    show(title, *rows_of(found), quick=given.quick)
    print(*notes_of(found), sep="\n")


if __name__ == "__main__":
    main()
