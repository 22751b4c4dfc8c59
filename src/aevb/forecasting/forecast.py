"""The result of a forecast: moments, quantiles, draws and densities of what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aevb.evidence.exact_posterior import Components
from aevb.evidence.result import Evidence
from aevb.forecasting.quantiles import checked_levels, drawn_quantiles, normal_quantiles

SHOWN = 3  # rows that the text of a forecast shows


@dataclass(frozen=True, repr=False)
class Forecast:
    """The predictive distribution of the observed variables after the end of each row.

    ``mean`` and ``sd`` are [N, steps, *shape] by variable. ``draws`` are joint draws of all
    variables and steps, [S, N, steps, *shape]. ``method`` is "exact", "particles" or "q", and
    ``why`` says why it was chosen. Mean and standard deviation of an exact forecast are exact;
    otherwise they are averages over the draws of the latents. ``notes`` are reasons not to trust
    the numbers.
    """

    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    draws: dict[str, Tensor]
    steps: int
    method: str
    why: str
    notes: tuple[str, ...]
    past: dict[str, Tensor] = field(repr=False)  # [N, T, *shape], NaN where unknown
    lengths: Tensor = field(repr=False)  # the number of steps of each row's past
    # Exact mixtures of normals, [N, steps, K, d]; empty for other families and methods.
    _mixtures: Mapping[str, Components] = field(repr=False, default_factory=dict)
    _score: Callable[[Mapping[str, Any]], Evidence] | None = field(repr=False, default=None)

    @property
    def samples(self) -> int:
        """The number of draws."""
        return len(next(iter(self.draws.values()))) if self.draws else 0

    def exact_quantiles(self, name: str) -> bool:
        """Return whether the quantiles of a variable are exact; otherwise they are of draws."""
        return name in self._mixtures

    def quantile(self, levels: float | Sequence[float]) -> dict[str, Tensor]:
        """Return quantiles of each entry, [Q, N, steps, *shape] by variable.

        They are exact for an exact forecast of normally distributed variables (for a mixture over
        discrete latents too), otherwise quantiles of the draws.
        """
        wanted = checked_levels(levels)
        found = {}
        for name, mean in self.mean.items():
            if name in self._mixtures:
                values = normal_quantiles(self._mixtures[name], wanted)
            elif self.samples:
                values = drawn_quantiles(self.draws[name], wanted)
            else:
                raise ValueError(f"Quantiles of {name} need draws, and this forecast has none.")
            found[name] = values.reshape(len(wanted), *mean.shape).to(mean.dtype)
        return found

    def interval(self, level: float = 0.9) -> dict[str, Tensor]:
        """Return the ends of central intervals, [2, N, steps, *shape] by variable.

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

    def score(self, **future: Any) -> Evidence:
        """Return log p(future | past) per row, with its standard error.

        ``future`` holds realised values, [N, steps, …]; NaN marks an unknown entry. All steps and
        variables count jointly. The value is log p(past, future) − log p(past): exact for an exact
        forecast, otherwise by the method that its ``method`` names.
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
        """Return log p(future | past) per row, [N]; see :meth:`score` for its error."""
        return self.score(**future).value

    def plot(self, path: str | Path, **options: Any) -> None:
        """Write a picture of the past and of the 50, 80 and 95 % intervals ahead.

        Options are those of :func:`aevb.forecasting.picture.fan`.
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
