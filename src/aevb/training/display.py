"""Display the progress of a run: a live panel, plain lines, or TensorBoard.

The panel is for terminals, plain lines are for everything else (``display_choice.py``). The loop
calls a watcher for every step, every recorded row and every note. A watcher reads only numbers that
are already on the host, so it causes no device synchronisation.
"""

from __future__ import annotations

import io
import math
import os
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from aevb.estimate.metric_names import BESIDES, BOUNDS, OBJECTIVE, Metric, latent_of
from aevb.runtime.callers import frames_of_aevb
from aevb.runtime.checked_files import DataWarning
from aevb.trackers.protocol import Tracker
from aevb.training.best import Best, better
from aevb.training.run_folder import Folder

if TYPE_CHECKING:
    from rich.console import RenderableType

PREPARING = 20  # first steps, which may compile and capture; the measured pace excludes them


class Watcher(Tracker):
    """Base class of displays: trackers that the loop also calls after every step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if "note" in values:
            self.note(str(values["note"]))
        else:
            self.row({"step": step, **values})

    def end(self, status: str) -> None:
        self.close()

    def step(self, step: int) -> None:
        """Called after every step."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Called for every recorded row of numbers."""

    def note(self, text: str) -> None:
        """Called for every note."""

    def close(self) -> None:
        """Called when the run ends or fails."""


class Warnings(Watcher):
    """Display nothing, but warn of events of some kinds, which say that results may be wrong."""

    def __init__(self, kinds: Collection[str]) -> None:
        self.kinds = kinds

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if values.get("kind") in self.kinds:
            warnings.warn(DataWarning(values["note"]), stacklevel=frames_of_aevb())


class Display(Watcher):
    """Base class of live panel and plain lines: the newest numbers, and the remaining time."""

    def __init__(
        self,
        start: int,
        total: int,
        epochs: float,
        bound: str = "elbo",
        best: Best | None = None,
    ) -> None:
        self.at, self.total, self.epochs, self.bound = start, total, epochs, bound
        self.judged = Metric(bound, validation=True).key
        self.best = best
        self.train: dict[str, float] = {}
        self.validation: dict[str, float] = {}
        self.phase = ""
        self.marks = deque([(time.perf_counter(), start)])
        self.steady = start + PREPARING

    def step(self, step: int) -> None:
        self.at = step
        if step == self.steady:
            self.marks = deque([(time.perf_counter(), step)])

    def row(self, row: Mapping[str, Any]) -> None:
        self.phase = row.get("phase", self.phase)
        # Iterations over all rows, which have no learning rate, have no noise to smooth.
        exact = "phase" in row and "lr" not in row
        for key, value in row.items():
            name, validation = Metric.of(key)
            if validation:
                self.validation[name] = value
            elif isinstance(value, int | float) and name not in ("step", "epoch", "seconds"):
                fresh = exact or name == "lr" or not math.isfinite(self.train.get(name, math.nan))
                self.train[name] = value if fresh else 0.7 * self.train[name] + 0.3 * value
        self.best = better(self.best, row["step"], row.get(self.judged, math.nan))

    def terms(self) -> list[str]:
        """Return the names of the bound, the objective, the likelihoods and the KL terms."""
        names = [
            name for name in dict.fromkeys((*self.train, *self.validation)) if name not in BESIDES
        ]
        return sorted(
            names,
            key=lambda name: (
                BOUNDS.index(name) if name in BOUNDS else len(BOUNDS),
                name != OBJECTIVE,
                latent_of(name) is not None,
            ),
        )

    def pace(self) -> tuple[float, float]:
        """Return the steps per second over the last half minute, and the remaining seconds."""
        now = time.perf_counter()
        if now - self.marks[-1][0] > 0.5:
            self.marks.append((now, self.at))
        while len(self.marks) > 2 and now - self.marks[0][0] > 30:
            self.marks.popleft()
        then, step = self.marks[0]
        rate = (self.at - step) / max(now - then, 1e-9)
        return rate, (self.total - self.at) / rate if rate else math.inf


class Lines(Display):
    """A table with a line for the first and for the last recorded step, and some between them.

    A line is due five seconds after the one before it, or at a validation (without validation data:
    at any recorded step) if a twentieth of the run has passed. A run of a second therefore has
    about twenty lines, and a long one a line every five seconds. A line is printed only after its
    step is complete, because the validation of the step belongs to it.
    """

    EVERY = 5.0
    MOST = 20  # lines of a run that takes less than EVERY

    def __init__(
        self,
        start: int,
        total: int,
        epochs: float,
        bound: str = "elbo",
        best: Best | None = None,
        *,
        validates: bool = True,
    ) -> None:
        super().__init__(start, total, epochs, bound, best)
        self.validates = validates
        self.spoke, self.spoke_at = time.perf_counter(), -total  # -total: the first row is due
        self.columns: list[str] = []
        # The heading of the validation column names the objective where it is not the bound.
        self.validated = "valid. objective" if bound == OBJECTIVE else "validation"
        self.wide = len(self.validated) + 2
        self.due, self.measured = False, (0.0, math.inf)
        self.told = True  # whether the newest row has, or will have, a line

    def step(self, step: int) -> None:
        self._print_due()
        super().step(step)

    def row(self, row: Mapping[str, Any]) -> None:
        super().row(row)
        self.at = row["step"]
        now, validated = time.perf_counter(), self.judged in row
        share = (self.at - self.spoke_at) / max(self.total, 1)
        if (
            now - self.spoke >= self.EVERY
            or share >= 1  # the first row
            or (share >= 1 / self.MOST and (validated or not self.validates))
            or (self.at == self.total and (validated or not self.validates))
        ):
            self._take(now)
        self.told = self.due
        if validated:
            self._print_due()

    def note(self, text: str) -> None:
        self._print_due()
        print(text, flush=True)

    def close(self) -> None:
        if not self.told:  # the run has ended early
            self._take(time.perf_counter())
        self._print_due()

    def _take(self, now: float) -> None:
        """Make a line due for the newest row."""
        self.due, self.told, self.spoke, self.spoke_at = True, True, now, self.at
        self.measured = self.pace()

    def _print_due(self) -> None:
        if self.due:
            self.due = False
            self._print()

    def _print(self) -> None:
        width = max(len(f"{self.total:,}"), 6)
        if self.columns != self.terms():
            self.columns = self.terms()
            names = "".join(f"{name[:14]:>{self._width(name)}}" for name in self.columns)
            print(
                f"{'step':>{width}}  {'epoch':>7}{names}{self.validated:>{self.wide}}"
                f"{'best':>12}{'lr':>10}{'steps/s':>9}{'left':>9}",
                flush=True,
            )
        rate, left = self.measured
        values = "".join(
            f"{number(self.train.get(name, self.validation.get(name))):>{self._width(name)}}"
            for name in self.columns
        )
        best = self.best.value if self.best else None
        checked = f"{number(self.validation.get(self.bound)):>{self.wide}}{number(best):>12}"
        epoch = self.epochs * self.at / max(self.total, 1)
        rest = f"{rate_of(self.train):>10}{pace(rate):>9}{clock(left):>9}"
        print(f"{self.at:>{width},}  {epoch:>7.2f}{values}{checked}{rest}", flush=True)

    def _width(self, name: str) -> int:
        return max(11, len(name[:14]) + 2)


class Live(Display):
    """A live panel: progress bar, the bound and its terms, and the pace.

    The bound and its terms are those of training and of validation.
    """

    EVERY = 0.2  # a frame takes about two milliseconds
    MOST = 12  # most terms shown

    def __init__(
        self,
        start: int,
        total: int,
        epochs: float,
        bound: str = "elbo",
        best: Best | None = None,
    ) -> None:
        from rich.console import Console
        from rich.live import Live as Panel

        super().__init__(start, total, epochs, bound, best)
        self.console = Console(file=sys.stdout)
        self.panel = Panel(
            self.frame(), console=self.console, auto_refresh=False, vertical_overflow="crop"
        )
        self.panel.start(refresh=True)
        self.drawn = time.perf_counter()

    def step(self, step: int) -> None:
        self.at = step
        if time.perf_counter() - self.drawn >= self.EVERY:
            self._draw()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        try:
            self._draw()
        finally:
            self.panel.stop()

    def _draw(self) -> None:
        self.panel.update(self.frame(), refresh=True)
        self.drawn = time.perf_counter()

    def frame(self) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rate, left = self.pace()
        wide = self.console.width >= 80
        epoch = f"epoch {self.epochs * self.at / max(self.total, 1):.2f} of {self.epochs:g}"
        done = self.at >= self.total
        top = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=self.total,
            completed=self.at,
            width=28 if wide else 12,
            complete_style="cyan",
            finished_style="green",
        )
        time_left = Text("done" if done else f"{clock(left)} left", style="green" if done else "")
        top.add_row(
            bar,
            Text(f"step {self.at:,} of {self.total:,}"),
            *([Text(epoch, style="dim")] if wide else []),
            time_left,
        )
        table = Table.grid(padding=(0, 3))
        table.add_column(min_width=10, no_wrap=True)
        table.add_column(justify="right", min_width=10, no_wrap=True)
        table.add_column(justify="right", min_width=10, no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_row(
            "",
            Text("training", style="dim"),
            Text("validation" if self.validation else "", style="dim"),
            "",
        )
        names = self.terms()
        for name in names[: self.MOST]:
            style = "bold" if name in (*BOUNDS, OBJECTIVE) else ""
            best = (
                f"best {number(self.best.value)} at step {self.best.step:,}"
                if name == self.bound and self.best
                else ""
            )
            train, validation = (
                Text(number(values.get(name)), style=style)
                for values in (self.train, self.validation)
            )
            table.add_row(Text(name, style=style), train, validation, Text(best, style="dim"))
        more = (
            [Text(f"… and {len(names) - self.MOST} more", style="dim")]
            if len(names) > self.MOST
            else []
        )
        pieces = [f"{pace(rate)} steps/s"] if rate else []
        if "lr" in self.train:
            pieces = [
                f"lr {rate_of(self.train)}",
                f"gradient {number(self.train.get('gradient'))}",
                *pieces,
            ]
        if self.phase not in ("", "joint", "mle"):
            pieces.append(f"phase {self.phase}")
        if not wide:
            pieces.append(epoch)
        parts: list[RenderableType] = [
            top,
            *([table] if names else []),
            *more,
            Text("   ".join(pieces), style="dim", no_wrap=True, overflow="ellipsis"),
        ]
        return Padding(Group(*parts), (0, 1))


class TensorBoard(Watcher):
    """Scalars for TensorBoard.

    A resumed run rewrites the file from its rows, so that no step appears twice.
    """

    def __init__(self, run: Folder, rows: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.run, self.folder = run, run.path / "tensorboard"
        self.path = (
            self.folder
            / f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        )
        self.began = time.time() - max((row.get("seconds", 0.0) for row in rows), default=0.0)
        start = [
            self._event(0, 0.0, file_version="brain.Event:2"),
            self._event(0, 0.0, session_log=SessionLog(status=SessionLog.START)),
        ]
        with run.writing(self.folder, None):
            self.folder.mkdir(exist_ok=True)
            for old in self.folder.glob("events.out.tfevents.*"):
                old.unlink()
            self.path.write_bytes(b"".join([*start, *map(self._scalars, rows)]))

    def row(self, row: Mapping[str, Any]) -> None:
        with self.run.writing(self.folder, row["step"]), self.path.open("ab") as file:
            file.write(self._scalars(row))

    def _scalars(self, row: Mapping[str, Any]) -> bytes:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = {
            name: value
            for name, value in row.items()
            if name not in ("step", "epoch", "seconds") and isinstance(value, int | float)
        }
        tags = {
            key: f"{'validation' if validation else 'training'}/{name}"
            for key in values
            for name, validation in (Metric.of(key),)
        }
        summary = Summary(
            value=[
                Summary.Value(tag=tags[name], simple_value=value) for name, value in values.items()
            ]
        )
        return self._event(row["step"], row.get("seconds", 0.0), summary=summary)

    def _event(self, step: int, seconds: float, **content: Any) -> bytes:
        """Return one record: an event with its length and checksums."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(
            Event(wall_time=self.began + seconds, step=step, **content).SerializeToString()
        )
        return record.getvalue()


class Checking:
    """Progress of checking large data files. It prints nothing for the first two seconds.

    On a terminal, it then updates one line in place. Elsewhere, it prints a line every five seconds
    if ``progress`` is True.
    """

    PATIENCE = 2.0

    def __init__(self, progress: bool | None, what: str = "training") -> None:
        self.what, self.live = what, progress is not False and on_terminal()
        self.speaks, self.every = (
            self.live or bool(progress),
            Live.EVERY if self.live else Lines.EVERY,
        )
        self.began = time.perf_counter()
        self.spoke = self.began + self.PATIENCE - self.every
        self.shown = False

    def __call__(self, rows: int, of: int) -> None:
        now = time.perf_counter()
        if self.speaks and rows < of and now - self.spoke >= self.every:
            self.spoke, self.shown = now, True
            text = (
                f"checking the {self.what} data: {rows:,} of {of:,} rows, "
                f"{clock((now - self.began) * (of - rows) / rows)} left"
            )
            print(
                f"\r\x1b[2K{text}" if self.live else text, end="" if self.live else "\n", flush=True
            )
        elif rows >= of and self.shown and self.live:
            print("\r\x1b[2K", end="", flush=True)


def on_terminal() -> bool:
    """Return whether standard output is a terminal that can redraw lines."""
    from rich.console import Console

    return sys.stdout.isatty() and not Console(file=sys.stdout).is_dumb_terminal


def number(value: float | None) -> str:
    """Format a number with about four significant digits and a nearly constant width."""
    if value is None:
        return "·"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{4 if size < 10 else 3 if size < 100 else 2 if size < 1000 else 1}f}"


def rate_of(values: Mapping[str, float]) -> str:
    return f"{values['lr']:.1e}" if "lr" in values else "·"


def pace(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def clock(seconds: float) -> str:
    """Format a duration: 0:07, 12:34, 1:02:03, or 3 d 4 h."""
    if not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
