"""Steps of ``fit`` with parts of the library switched off, beside steps with all of it, in one
process.

A part is switched off by replacing a name of a module while a step is built, recorded and taken,
and only then: other steps in the same process do not notice. The library needs no option for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from library import data, declared, stepping, training
from problems import Problem
from rich.console import Console
from rich.table import Table
from timing import WARM_UP, interleaved, summary, timed, use_cores

from aevb.training.events import NOT_COMPILED, events
from aevb.training.loop import Training

MODES = ("recorded", "compiled")  # a step as it is by default, and with compile=True
AGAIN = "nothing, a second time"


class Change(NamedTuple):
    """A name of a module, and what stands there meanwhile."""

    module: Any
    name: str
    value: Any


@contextmanager
def changed(changes: tuple[Change, ...]) -> Iterator[None]:
    before = [getattr(change.module, change.name) for change in changes]
    for change in changes:
        setattr(change.module, change.name, change.value)
    try:
        yield
    finally:
        for change, value in zip(changes, before, strict=True):
            setattr(change.module, change.name, value)


class Switched:
    """The steps of a run, all taken with these changes; ``stepper`` sets attributes of the object
    that takes them.
    """

    def __init__(
        self,
        begin: Callable[[], Training],
        changes: tuple[Change, ...] = (),
        stepper: Mapping[str, Any] | None = None,
    ) -> None:
        self.changes = changes
        with changed(changes):
            self.run = begin()
        for name, value in (stepper or {}).items():
            assert hasattr(self.run.stepper, name), name
            setattr(self.run.stepper, name, value)
        self.contender = stepping(self.run)

    def step(self) -> Switched:
        with changed(self.changes):
            self.contender.step()
        return self

    def block_until_ready(self) -> None:
        """Take the steps that wait for others on a GPU."""
        with changed(self.changes):
            self.run.stepper.take()

    def notes(self) -> list[str]:
        """What the run says could not be recorded, compiled or captured."""
        return [event.text for event in events(self.run.history.rows, NOT_COMPILED)]


def begin(problem: Problem, mode: str, **choices: Any) -> Training:
    """A run of a problem's model that never ends."""
    model, compile = declared(problem), mode == "compiled"
    return training(model, data(problem), lr=problem.lr, compile=compile, **choices)


def measured(
    builders: Mapping[str, Callable[[], Switched]], base: str, given: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """What :func:`timing.summary` says of each variant (``floor``: in times of the base), and the
    notes of its run. A variant that stops has only the reason, as a note.

    The base runs twice, so that the ratio of equal steps says how far the others can be trusted.
    The second one is built before all others: what a process builds first has other memory.
    """
    variants: dict[str, Switched] = {}
    stopped = {}
    for name, build in {AGAIN: builders[base], **builders}.items():
        try:
            variant = build()
            timed(variant.step, WARM_UP, given.device)
        except Exception as error:
            if name == base:
                raise
            stopped[name] = {"notes": [told(error)]}
        else:
            variants[name] = variant
    steps = {name: one.step for name, one in variants.items()}
    times = interleaved(steps, given.rounds, given.seconds, given.device, warm_up=1)
    rows = summary(times, floor=base)
    return {name: {**row, "notes": variants[name].notes()} for name, row in rows.items()} | stopped


def told(error: Exception) -> str:
    return f"Stops with {type(error).__name__}: {error}".partition("\n")[0]


def ratio(row: Mapping[str, Any] | None) -> str:
    """What a table says of a variant."""
    return "–" if row is None else f"{row['floor']:.2f}" if "floor" in row else "stops"


def columns(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The models and modes that were measured."""
    return [(model, mode) for mode in MODES for model in found if mode in found[model]]


def options(
    description: str | None, models: Sequence[str], chosen: Sequence[str], parts: Sequence[str]
) -> argparse.ArgumentParser:
    """The options of a command that switches some of these parts off in steps of these models."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, known, default in (
        ("--models", models, chosen),
        ("--modes", MODES, MODES),
        ("--only", parts, parts),
    ):
        parser.add_argument(
            option,
            nargs="+",
            choices=known,
            metavar="NAME",
            default=list(default),
            help=f"some of: {'; '.join(known)}",
        )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--threads", type=int, help="and as many cores; by default all that there are"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one short round")
    parser.add_argument("--json", type=Path)
    return parser


def prepare(given: argparse.Namespace) -> None:
    """Set rounds, threads and precision as the options say."""
    if given.quick:
        given.rounds, given.seconds = 1, 0.01
    if given.threads is not None:
        use_cores(given.threads)
    torch.set_float32_matmul_precision("highest" if given.device == "cpu" else "high")


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, quick: bool) -> None:
    console, table = Console(), Table(title=title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if quick:
        console.print("Tiny sizes and one short turn each: the times mean nothing.")
