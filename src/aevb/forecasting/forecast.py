"""The result of a forecast: moments, quantiles, draws and densities of what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aevb.evidence.exact_posterior import Components
from aevb.evidence.quantiles import checked_levels, drawn_quantiles, normal_quantiles
from aevb.evidence.result import Evidence

if TYPE_CHECKING:
    from aevb.data.sequence_index import SequenceIndex

SHOWN = 3  # rows that the text of a forecast shows


@dataclass(frozen=True, repr=False)
class Forecast:
    """The predictive distribution of the observed variables after the end of each row.

    Mean and standard deviation of an exact forecast are exact; otherwise they are averages over the
    draws of the latents.

    Attributes:
        mean: The means [N, steps, …] by variable.
        sd: The standard deviations, in the same shapes.
        draws: Joint draws of all variables and steps, [S, N, steps, …].
        steps: The number of steps.
        method: "exact", "particles" or "q".
        why: Why the method was chosen.
        notes: Reasons not to trust the numbers.
        past: The data before, [N, T, …], NaN where unknown.
        lengths: The number of steps of each row's past.
        index: The ids and times of the past if it was a frame.

    >>> from aevb import zoo
    >>> forecast = zoo.local_level().forecast(steps=3, x=torch.zeros(1, 5, 1), seed=0)
    >>> forecast.mean["x"].shape, forecast.quantile([0.1, 0.9])["x"].shape
    (torch.Size([1, 3, 1]), torch.Size([2, 1, 3, 1]))
    >>> forecast.exact_quantiles("x")
    True
    >>> forecast.log_prob(x=torch.zeros(1, 3, 1)).shape
    torch.Size([1])
    >>> forecast.score(x=torch.zeros(1, 3, 1)).method
    'exact'
    """

    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    draws: dict[str, Tensor]
    steps: int
    method: str
    why: str
    notes: tuple[str, ...]
    past: dict[str, Tensor] = field(repr=False)  # [N, T, …], NaN where unknown
    lengths: Tensor = field(repr=False)  # the number of steps of each row's past
    # Exact mixtures of normals, [N, steps, K, d]; empty for other families and methods.
    _mixtures: Mapping[str, Components] = field(repr=False, default_factory=dict)
    _score: Callable[[Mapping[str, Any]], Evidence] | None = field(repr=False, default=None)
    index: SequenceIndex | None = field(repr=False, default=None)  # of the frame of the past
    _classes: frozenset[str] = frozenset()  # the variables whose means are probabilities
    _discrete: frozenset[str] = frozenset()  # counts, classes and 0-1 variables

    @property
    def samples(self) -> int:
        """The number of draws."""
        return len(next(iter(self.draws.values()))) if self.draws else 0

    def exact_quantiles(self, name: str) -> bool:
        """Return whether the quantiles of a variable are exact; otherwise they are of draws.

        Arguments:
            name: The variable.
        """
        return name in self._mixtures

    def quantile(self, levels: float | Sequence[float]) -> dict[str, Tensor]:
        """Return quantiles of each entry, [Q, N, steps, …] by variable.

        They are exact for an exact forecast of normally distributed variables (for a mixture over
        discrete latents too), otherwise quantiles of the draws. Those of counts are whole numbers,
        and an interval of counts holds at least its probability.

        Arguments:
            levels: One level between 0 and 1, or Q of them.
        """
        wanted = checked_levels(levels)
        found = {}
        for name, mean in self.mean.items():
            if name in self._mixtures:
                values = normal_quantiles(self._mixtures[name], wanted)
            elif self.samples:
                discrete = name in self._discrete
                values = drawn_quantiles(self.draws[name], wanted, discrete=discrete)
            else:
                raise ValueError(f"Quantiles of {name} need draws, and this forecast has none.")
            found[name] = values.reshape(len(wanted), *mean.shape).to(mean.dtype)
        return found

    def interval(self, level: float = 0.9) -> dict[str, Tensor]:
        """Return the ends of central intervals, [2, N, steps, …] by variable.

        Arguments:
            level: The probability of an interval.

        >>> import torch
        >>> from aevb import Model, Normal
        >>> p = {"z[t] | z[t-1]": Normal(1, scale=0.1), "x[t] | z[t]": Normal(1, scale=1.0)}
        >>> model = Model(p, q={"z[t] | x[t]": Normal()})
        >>> forecast = model.forecast(steps=3, x=torch.zeros(1, 5, 1), method="exact")
        >>> low, high = forecast.interval(0.9)["x"]
        >>> low.shape
        torch.Size([1, 3, 1])
        """
        (inside,) = checked_levels([level])
        return self.quantile([(1 - inside) / 2, (1 + inside) / 2])

    def frame(self, levels: Sequence[float] = (0.8, 0.95)) -> Any:
        """Return a frame with one line per step ahead, in the index of the past.

        If the past was a frame, it is one of the same library, at the times that follow: the
        spacing is that of the past. Otherwise rows and steps are counted from 0. Columns are
        ``x_mean``, ``x_sd``, and the ends of the intervals, ``x_lower_80``, ``x_upper_80``, …;
        for classes their probabilities, ``x_p``.

        Arguments:
            levels: The probabilities of the intervals; an empty list for none.

        >>> import pandas as pd
        >>> from aevb import Model, Normal
        >>> p = {"z[t] | z[t-1]": Normal(1, scale=0.1), "x[t] | z[t]": Normal(1, scale=1.0)}
        >>> model = Model(p, q={"z[t] | x[t]": Normal()}).double()
        >>> x = pd.Series(0.0, pd.period_range("2024-01", periods=9, freq="M"), name="sales")
        >>> frame = model.forecast(steps=2, x=x).frame(levels=[0.9])
        >>> list(frame)
        ['sales_mean', 'sales_sd', 'sales_lower_90', 'sales_upper_90']
        >>> frame.index
        PeriodIndex(['2024-10', '2024-11'], dtype='period[M]')
        """
        from aevb.data.sequence_index import entry_names, numbered

        none = isinstance(levels, Sequence) and not levels
        inside = [] if none else checked_levels(levels)
        index = self.index or numbered(self.lengths.tolist())
        ends = [end for level in inside for end in ((1 - level) / 2, (1 + level) / 2)]
        sides = [f"{side}_{100 * level:.12g}" for level in inside for side in ("lower", "upper")]
        quantiles = self.quantile(ends) if ends and self._classes < self.mean.keys() else {}
        columns: dict[str, Any] = {}
        for name, mean in self.mean.items():
            kinds = {"mean": mean, "sd": self.sd[name]}
            if name in self._classes:
                kinds = {"p": mean}
            else:
                kinds |= dict(zip(sides, quantiles.get(name, ()), strict=True))
            flat = {
                kind: value.reshape(*value.shape[:2], -1).cpu().numpy()
                for kind, value in kinds.items()
            }
            for i, entry in enumerate(
                entry_names(index, name, next(iter(flat.values())).shape[-1])
            ):
                columns |= {f"{entry}_{kind}": value[..., i] for kind, value in flat.items()}
        return index.ahead_frame(columns, self.steps)

    def score(self, **future: Any) -> Evidence:
        """Return log p(future | past) per row, with its standard error.

        All steps and variables count jointly. The value is log p(past, future) − log p(past): exact
        for an exact forecast, otherwise by the method that its ``method`` names.

        Arguments:
            **future: Realised values by variable, [N, steps, …]; NaN marks an unknown entry. If the
                past was a frame, this may be one too; its lines are found by their times.
        """
        if self._score is None:
            raise ValueError("This forecast has no density.")
        missing = [name for name in self.mean if future.get(name) is None]
        unknown = [name for name in future if name not in self.mean]
        if missing or unknown:
            raise ValueError(
                f"log_prob takes the realised future of {', '.join(self.mean)}, "
                f"{self.steps} step{'s' * (self.steps != 1)} of each row (NaN where unknown); got "
                f"{', '.join(future) or 'nothing'}."
            )
        return self._score(future)

    def log_prob(self, **future: Any) -> Tensor:
        """Return log p(future | past) per row, [N]; see :meth:`score` for its error.

        Arguments:
            **future: Realised values, as in :meth:`score`.
        """
        return self.score(**future).value

    def plot(self, path: str | Path, **options: Any) -> None:
        """Write a picture of the past and of the 50, 80 and 95 % intervals ahead.

        Arguments:
            path: A .png, .svg or .pdf file.
            **options: ``panels`` is the largest number of panels, ``past`` the number of past steps
                to show. The first step has the time ``start``, steps are ``spacing`` apart,
                ``time`` names the axis, and ``columns`` names the entries of all variables.

        >>> import tempfile
        >>> from aevb import zoo
        >>> forecast = zoo.local_level().forecast(steps=3, x=torch.zeros(1, 5, 1), seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     forecast.plot(Path(folder) / "nile.svg", start=1871, time="year")
        ...     (Path(folder) / "nile.svg").stat().st_size > 1000
        True
        """
        from aevb.forecasting.picture import plot

        plot(self, path, **options)

    def __repr__(self) -> str:
        n = len(self.lengths)
        rows = "1 row" if n == 1 else f"{n} rows"
        names = ", ".join(self.mean)
        lines = [
            f"Forecast of {names}, {self.steps} step{'s' * (self.steps != 1)} after the end of "
            f"{rows} ({self._how()})"
        ]
        intervals = self.interval(0.95)
        for name, mean in self.mean.items():
            middle, spread = (part.reshape(n, self.steps, -1) for part in (mean, self.sd[name]))
            low, high = intervals[name].reshape(2, n, self.steps, -1)
            for row in range(min(n, SHOWN)):
                steps = dict.fromkeys((0, self.steps - 1))
                parts = [
                    f"step {t + 1} {middle[row, t, 0]:.4g} ± {spread[row, t, 0]:.3g} "
                    f"(95 % {low[row, t, 0]:.4g} to {high[row, t, 0]:.4g})"
                    for t in steps
                ]
                entry = "" if middle.shape[-1] == 1 else ", entry 0"
                lines.append(f"  {name}, row {row}{entry}: {'; '.join(parts)}")
        if n > SHOWN:
            lines.append(f"  … and {n - SHOWN} more rows")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        from aevb.notebook import result_cards

        return result_cards.forecast_card(self)

    def _how(self) -> str:
        draws = f"{self.samples} draws"
        if self.method != "exact":
            return f"by {self.method}, {draws}" + (f": {self.why}" if self.why else "")
        by_draws = [name for name in self.mean if name not in self._mixtures]
        quantiles = (
            "exact quantiles"
            if not by_draws
            else f"quantiles of {', '.join(by_draws)} from {draws}"
        )
        return f"exact, {quantiles}" + (f"; {self.why}" if self.why else "")


def stderr_free(value: Tensor) -> Evidence:
    """Return an exact log-density as an :class:`Evidence`."""
    return Evidence(value, torch.zeros_like(value), "exact")
