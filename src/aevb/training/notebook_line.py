"""The progress of a run in a notebook: one line that is updated in place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from aevb.training.best import Best
from aevb.training.display import Display, clock, number


@dataclass(frozen=True)
class Line:
    """The line at one moment: a text, and the share of the run that is done."""

    text: str
    share: float

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        bar = '<progress value="{:.3f}" max="1" style="vertical-align: middle"></progress> '
        text = '<span style="font-variant-numeric: tabular-nums">{}</span>'
        return str(Markup(f"<div>{bar}{text}</div>").format(self.share, self.text))


class NotebookLine(Display):
    """One line in a notebook: step, bound, validation and remaining time.

    It is updated at most five times per second, and stays as it was at the end of the run.
    """

    EVERY = 0.2

    def __init__(
        self,
        start: int,
        total: int,
        epochs: float,
        bound: str = "elbo",
        best: Best | None = None,
    ) -> None:
        from IPython.display import display

        super().__init__(start, total, epochs, bound, best)
        self.began = self.drawn = time.perf_counter()
        self.handle = display(self.line(), display_id=True)

    def step(self, step: int) -> None:
        super().step(step)
        if time.perf_counter() - self.drawn >= self.EVERY:
            self._draw()

    def row(self, row: Mapping[str, Any]) -> None:
        super().row(row)
        self.at = row["step"]

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        self._draw(ended=True)

    def _draw(self, *, ended: bool = False) -> None:
        self.drawn = time.perf_counter()
        if self.handle is not None:
            self.handle.update(self.line(ended=ended))

    def line(self, *, ended: bool = False) -> Line:
        """Return the line of this moment."""
        parts = [f"step {self.at:,} of {self.total:,}"]
        if self.bound in self.train:
            parts.append(f"{self.bound} {number(self.train[self.bound])}")
        if self.bound in self.validation:
            best = "" if self.best is None else f" (best {number(self.best.value)})"
            parts.append(f"validation {number(self.validation[self.bound])}{best}")
        parts.append(
            f"{time.perf_counter() - self.began:.1f} s"
            if ended
            else f"{clock(self.pace()[1])} left"
        )
        return Line(" · ".join(parts), self.at / max(self.total, 1))
