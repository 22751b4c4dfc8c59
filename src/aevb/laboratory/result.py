"""Results of the comparison of estimators, as a table, a plot and JSON."""

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

SEEN = 1e-4  # a gradient bias is detected below this p-value
ERRORS = 4.0  # a bias of the bound is detected above this many standard errors


@dataclass(frozen=True)
class GradientFigures:
    """Measurements of the gradient of the mean bound, for one group of parameters."""

    variance: float  # the trace of its covariance over the noise
    error: float  # the standard error of the variance
    # ‖E ĝ − g‖², unbiased, so it may be negative; None without a reference
    squared_bias: float | None
    p: float | None  # p-value of the hypothesis that the bias is zero


@dataclass(frozen=True)
class Figures:
    """Measurements of one way of estimating the bound."""

    name: str
    bound: str
    samples: int
    gradient: str
    how: Mapping[str, str]
    enumerated: list[str]  # latents
    temperature: float | None
    target: str  # the quantity that it estimates
    unbiased: bool  # by derivation
    note: str  # why it is biased
    value: float  # mean bound, nats per example
    bias: float | None
    bias_error: float | None
    variance: float  # variance of the bound per example
    theta: GradientFigures
    phi: GradientFigures
    seconds: float
    seconds_error: float
    memory: int  # bytes
    rounding: float  # the squared bias that rounding alone can cause

    @property
    def full_name(self) -> str:
        return f"{self.bound} K={self.samples}: {self.name}"

    @property
    def noise(self) -> float:
        """Variance of the whole gradient, θ and φ together."""
        return self.theta.variance + self.phi.variance

    @property
    def squared_bias(self) -> float:
        """Squared bias of the whole gradient; biases that were not detected count as 0."""
        return sum(part.squared_bias or 0.0 for part in (self.theta, self.phi) if self.sees(part))

    def sees(self, part: GradientFigures) -> bool:
        """Return whether a bias of this gradient is larger than noise and rounding explain."""
        return part.p is not None and part.p < SEEN and (part.squared_bias or 0.0) > self.rounding

    @property
    def value_bias_seen(self) -> bool:
        if self.bias is None or self.bias_error is None:
            return False
        return abs(self.bias) > ERRORS * self.bias_error + math.sqrt(self.rounding) + 1e-5 * abs(
            self.value
        )

    @property
    def bias_seen(self) -> bool:
        return self.value_bias_seen or self.sees(self.theta) or self.sees(self.phi)


@dataclass(frozen=True)
class Target:
    """A quantity that several ways estimate."""

    name: str
    reference: str | None  # what the ways were compared with; None if none of them is unbiased
    value: float | None
    squared_norm: dict[str, float]  # squared norm of the reference gradient, θ and φ
    between: dict[str, float]  # variance of the gradient due to the choice of a batch's rows

    @property
    def rows_noise(self) -> float:
        return sum(self.between.values())


@dataclass(frozen=True)
class Laboratory:
    """Measurements of every way of estimating a model's bound.

    ``print`` shows a table and the advice.
    """

    figures: tuple[Figures, ...]
    targets: tuple[Target, ...]
    rows: int
    replicates: int
    sizes: dict[str, int]  # number of parameters in θ and φ
    memory_kind: str
    refused: dict[str, str]  # requests that the plan does not accept, and why

    def __getitem__(self, full_name: str) -> Figures:
        """Return a way by its full name, e.g. ``"elbo K=1: y enumerate, z pathwise closed"``."""
        for one in self.figures:
            if one.full_name == full_name:
                return one
        raise ValueError(
            f"No way is called {full_name!r}. There are: "
            f"{'; '.join(one.full_name for one in self.figures)}."
        )

    def of(self, target: Target) -> list[Figures]:
        return [one for one in self.figures if one.target == target.name]

    def cost(self, one: Figures) -> float:
        """Return variance of the gradient × seconds of a step: the cost of a given precision.

        The variance includes that of the choice of rows, which no estimator of the bound can lower.
        """
        target = next(target for target in self.targets if target.name == one.target)
        return one.seconds * (one.noise + target.rows_noise)

    def best(self, target: Target) -> Figures | None:
        """Return the unbiased way of lowest cost; among ways without variance, the fastest."""
        unbiased = [one for one in self.of(target) if one.unbiased and not one.bias_seen]
        return min(unbiased, key=lambda one: (self.cost(one), one.seconds), default=None)

    @property
    def advice(self) -> str:
        """The recommendation, as text."""
        from aevb.laboratory.advice import advise

        return "\n".join(advise(self))

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(
            width=max(160, 110 + max(len(one.name) for one in self.figures)),
            no_color=True,
            highlight=False,
            force_jupyter=False,  # in a notebook, rich would display the table and return nothing
        )
        with console.capture() as captured:
            console.print(self.table())
        lines = (line.rstrip() for line in captured.get().splitlines())
        return "\n".join((*lines, "", self.advice))

    __repr__ = __str__

    def table(self) -> Table:
        """Return the table, one line per way.

        A dot means that no bias was detected; an asterisk marks the best unbiased way of each
        target.
        """
        from rich.table import Table

        table = Table(
            title=f"{self.rows} rows per batch, {self.replicates} replicates. Bound in nats per "
            f"example, gradients summed over coordinates.",
            title_justify="left",
            caption="\n".join(self._caption()),
            caption_justify="left",
            box=None,
            pad_edge=False,
        )
        for heading in ("", "bound", "K", "estimator"):
            table.add_column(heading, no_wrap=True)
        for heading in (
            "bias of bound",
            "sd",
            "Var ∇θ",
            "bias² ∇θ",
            "Var ∇φ",
            "bias² ∇φ",
            "ms",
            "MiB",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        best = [self.best(target) for target in self.targets]
        before = None
        for one in self.figures:
            if before is not None and (before.bound, before.samples) != (one.bound, one.samples):
                table.add_section()
            before = one
            shown = "" if one.bias is None else f"{one.bias:+.3f} ± {one.bias_error:.3f}"
            biases = [
                "?"
                if part.squared_bias is None
                else f"{part.squared_bias:.2g}"
                if one.sees(part)
                else "·"
                for part in (one.theta, one.phi)
            ]
            table.add_row(
                "*" if one in best else "",
                one.bound,
                str(one.samples),
                one.name,
                shown,
                f"{one.variance**0.5:.3f}",
                f"{one.theta.variance:.3g}",
                biases[0],
                f"{one.phi.variance:.3g}",
                biases[1],
                f"{1000 * one.seconds:.2f}",
                f"{one.memory / 2**20:.2f}",
            )
        return table

    def _caption(self) -> list[str]:
        lines = [
            f"MiB: {self.memory_kind}. ±: the standard error over the replicates. A dot: no bias "
            f"detected. *: the best unbiased way."
        ]
        for target in self.targets:
            squares = ", ".join(
                f"‖∇{letter}‖² {target.squared_norm[group]:.3g}"
                for letter, group in (("θ", "theta"), ("φ", "phi"))
            )
            against = (
                f" against: {target.reference} ({squares})"
                if target.reference
                else ": no unbiased way to compare with"
            )
            lines.append(target.name + against)
        return lines

    def record(self) -> dict[str, Any]:
        """Return all results as JSON-ready data."""
        chosen = {target.name: self.best(target) for target in self.targets}
        return asdict(self) | {
            "best": {name: one and one.full_name for name, one in chosen.items()},
            "advice": self.advice,
        }

    def save(self, path: str | Path) -> None:
        """Write all results to a JSON file."""
        with whole_file(Path(path)) as place:
            place.write_text(
                json.dumps(self.record(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )

    def plot(self, path: str | Path | None = None) -> Figure:
        """Plot time against the variance of the gradient, for θ and φ.

        Hollow markers are biased ways; lines connect points of equal cost.
        """
        from aevb.pictures import trade_off

        panels = {
            f"Var ∇{letter}": [
                (
                    f"{one.bound} K={one.samples}",
                    one.name,
                    1000 * one.seconds,
                    getattr(one, group).variance,
                    not one.unbiased,
                )
                for one in self.figures
            ]
            for letter, group in (("θ", "theta"), ("φ", "phi"))
        }
        figure = trade_off(panels, "ms per step", hollow="hollow: biased")
        if path is not None:
            with whole_file(Path(path)) as place:
                figure.savefig(place, dpi=150)
        return figure
