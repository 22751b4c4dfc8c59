"""What the laboratory found, as a table, a plot and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.runtime.checked_files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

SEEN = 1e-4  # the p-value below which a bias counts as seen
ERRORS = 4.0  # or how many standard errors of the bound's


@dataclass(frozen=True)
class GradientFigures:
    """Of the gradient of the mean bound for one group of parameters."""

    variance: float  # the trace of its covariance over the noise
    error: float  # the standard error of that
    squared_bias: float | None  # ‖E ĝ − g‖², the noise taken out, so that it may fall below zero; None without a reference
    p: float | None  # of a squared bias of zero


@dataclass(frozen=True)
class Figures:
    """One way of estimating, measured."""

    name: str
    bound: str
    samples: int
    gradient: str
    how: Mapping[str, str]
    temperature: float | None
    target: str  # what it estimates
    unbiased: bool  # by derivation
    note: str  # how it is biased
    value: float  # mean bound, nats an example
    bias: float | None
    bias_error: float | None
    variance: float  # of the bound, an example
    theta: GradientFigures
    phi: GradientFigures
    seconds: float
    seconds_error: float
    memory: int  # bytes
    rounding: float  # the squared bias that rounding alone can bring

    @property
    def full_name(self) -> str:
        return f"{self.bound} K={self.samples}: {self.name}"

    @property
    def noise(self) -> float:
        """The variance of the whole gradient, θ's and φ's."""
        return self.theta.variance + self.phi.variance

    @property
    def squared_bias(self) -> float:
        """That of the whole gradient, as far as it was seen."""
        return sum(part.squared_bias or 0.0 for part in (self.theta, self.phi) if self.sees(part))

    def sees(self, part: GradientFigures) -> bool:
        """Whether a bias of this gradient stands out from noise and rounding."""
        return part.p is not None and part.p < SEEN and (part.squared_bias or 0.0) > self.rounding

    @property
    def value_bias_seen(self) -> bool:
        if self.bias is None or self.bias_error is None:
            return False
        return abs(self.bias) > ERRORS * self.bias_error + math.sqrt(self.rounding) + 1e-5 * abs(self.value)

    @property
    def bias_seen(self) -> bool:
        return self.value_bias_seen or self.sees(self.theta) or self.sees(self.phi)


@dataclass(frozen=True)
class Target:
    """What some ways estimate in common."""

    name: str
    reference: str | None  # what they were compared with; None where none of them is unbiased
    value: float | None
    squared_norm: dict[str, float]  # of the reference gradient, θ and φ
    between: dict[str, float]  # the variance of the gradient that the choice of a batch's rows brings

    @property
    def rows_noise(self) -> float:
        return sum(self.between.values())


@dataclass(frozen=True)
class Laboratory:
    """Every way of estimating a model's bound, measured. ``print`` shows the table and the advice."""

    figures: tuple[Figures, ...]
    targets: tuple[Target, ...]
    rows: int
    replicates: int
    sizes: dict[str, int]  # how many parameters θ and φ are
    memory_kind: str
    refused: dict[str, str]  # requests that the plan does not accept, and why

    def __getitem__(self, full_name: str) -> Figures:
        """By its whole name, e.g. ``"elbo K=1: y enumerate, z pathwise closed"``."""
        for one in self.figures:
            if one.full_name == full_name:
                return one
        raise ValueError(f"No way is called {full_name!r}. There are: {'; '.join(one.full_name for one in self.figures)}.")

    def of(self, target: Target) -> list[Figures]:
        return [one for one in self.figures if one.target == target.name]

    def cost(self, one: Figures) -> float:
        """Variance of a training step's gradient × its seconds: what an estimator needs to reach a given precision, less is better.

        The variance is the noise's and that of the choice of rows, which no estimator of the bound can lower.
        """
        target = next(target for target in self.targets if target.name == one.target)
        return one.seconds * (one.noise + target.rows_noise)

    def best(self, target: Target) -> Figures | None:
        """The unbiased way of least cost; of several without any variance the fastest."""
        unbiased = [one for one in self.of(target) if one.unbiased and not one.bias_seen]
        return min(unbiased, key=lambda one: (self.cost(one), one.seconds), default=None)

    @property
    def advice(self) -> str:
        """What the numbers recommend, in words."""
        from aevb.laboratory.advice import advise

        return "\n".join(advise(self))

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=max(160, 110 + max(len(one.name) for one in self.figures)), no_color=True, highlight=False)
        with console.capture() as captured:
            console.print(self.table())
        lines = (line.rstrip() for line in captured.get().splitlines())
        return "\n".join((*lines, "", self.advice))

    def table(self) -> Table:
        """A line a way; a dot stands where no bias was seen, an asterisk at the best unbiased way of each target."""
        from rich.table import Table

        table = Table(
            title=f"{self.rows} rows a batch, {self.replicates} replicates. The bound in nats an example, of each gradient the coordinates' sum.",
            title_justify="left", caption="\n".join(self._caption()), caption_justify="left", box=None, pad_edge=False,
        )  # fmt: skip
        for heading in ("", "bound", "K", "estimator"):
            table.add_column(heading, no_wrap=True)
        for heading in ("bias of bound", "sd", "Var ∇θ", "bias² ∇θ", "Var ∇φ", "bias² ∇φ", "ms", "MiB"):
            table.add_column(heading, justify="right", no_wrap=True)
        best = [self.best(target) for target in self.targets]
        before = None
        for one in self.figures:
            if before is not None and (before.bound, before.samples) != (one.bound, one.samples):
                table.add_section()
            before = one
            shown = "" if one.bias is None else f"{one.bias:+.3f} ± {one.bias_error:.3f}"
            biases = ["?" if part.squared_bias is None else f"{part.squared_bias:.2g}" if one.sees(part) else "·" for part in (one.theta, one.phi)]
            table.add_row(
                "*" if one in best else "", one.bound, str(one.samples), one.name, shown, f"{one.variance**0.5:.3f}", f"{one.theta.variance:.3g}",
                biases[0], f"{one.phi.variance:.3g}", biases[1], f"{1000 * one.seconds:.2f}", f"{one.memory / 2**20:.2f}",
            )  # fmt: skip
        return table

    def _caption(self) -> list[str]:
        lines = [f"MiB: {self.memory_kind}. ±: the standard error over the replicates. A dot: no bias seen. *: the best unbiased way."]
        for target in self.targets:
            squares = ", ".join(f"‖∇{letter}‖² {target.squared_norm[group]:.3g}" for letter, group in (("θ", "theta"), ("φ", "phi")))
            against = f" against: {target.reference} ({squares})" if target.reference else ": no unbiased way to compare with"
            lines.append(target.name + against)
        return lines

    def record(self) -> dict[str, Any]:
        """All of it as JSON-ready data."""
        chosen = {target.name: self.best(target) for target in self.targets}
        return asdict(self) | {"best": {name: one and one.full_name for name, one in chosen.items()}, "advice": self.advice}

    def save(self, path: str | Path) -> None:
        with whole_file(Path(path)) as place:
            place.write_text(json.dumps(self.record(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def plot(self, path: str | Path | None = None) -> Figure:
        """Time against variance of the gradient, θ's and φ's; hollow is biased, and lines join what costs the same."""
        from aevb.pictures import trade_off

        panels = {
            f"Var ∇{letter}": [
                (f"{one.bound} K={one.samples}", one.name, 1000 * one.seconds, getattr(one, group).variance, not one.unbiased) for one in self.figures
            ]
            for letter, group in (("θ", "theta"), ("φ", "phi"))
        }
        figure = trade_off(panels, "ms a step", hollow="hollow: biased")
        if path is not None:
            with whole_file(Path(path)) as place:
                figure.savefig(place, dpi=150)
        return figure
