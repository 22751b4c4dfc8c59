"""Predictive checks: compare statistics of the data with those of data simulated from the model.

Replicated data are x_rep ~ p(x | z) with z ~ q(z | x) (posterior predictive), or all variables
drawn from p (prior predictive). Given variables and missing entries are those of the data. If a
statistic of the data is far outside its replicates, p does not reproduce that property. The
p-values are for the fitted parameters, so the data are used twice: under the true model they
concentrate around ½ more than uniform p-values do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from aevb.data.sources import open_source
from aevb.declare.graph import Graph
from aevb.model import Model
from aevb.pictures import replicated
from aevb.posterior.training_record import check_rows
from aevb.predictive.replicate import as_array, replicate, some_rows
from aevb.predictive.statistics import STATISTICS, Statistic, evaluate, usual_statistics
from aevb.runtime.checked_files import whole_file
from aevb.runtime.contention import sharing_cores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK = 1000  # rows per batch


@dataclass(frozen=True)
class Comparison:
    """One statistic of a variable, for the data and for every replicate.

    ``column`` is the column, or None for all columns together.
    """

    variable: str
    statistic: str
    column: int | None
    observed: float
    replicates: np.ndarray = field(repr=False)

    @property
    def above(self) -> float:
        """Fraction of replicates at or above the data, with the data counted among them.

        It is never 0: R replicates cannot show a p-value below 1/(R + 1).
        """
        return (1 + int((self.replicates >= self.observed).sum())) / (1 + len(self.replicates))

    @property
    def below(self) -> float:
        """Fraction of replicates at or below the data, with the data counted among them."""
        return (1 + int((self.replicates <= self.observed).sum())) / (1 + len(self.replicates))

    @property
    def p(self) -> float:
        """The two-sided p-value."""
        return min(1.0, 2 * min(self.above, self.below))

    @property
    def normal_p(self) -> float:
        """Two-sided p-value under a normal distribution of the replicates.

        It distinguishes values outside all replicates, for which ``p`` is always the smallest
        possible.
        """
        distance, sd = (
            abs(self.observed - float(self.replicates.mean())),
            float(self.replicates.std(ddof=1)),
        )
        return math.erfc(distance / (sd * math.sqrt(2))) if sd > 0 else float(distance == 0)

    @property
    def label(self) -> str:
        return (
            f"{self.statistic}({self.variable}{'' if self.column is None else f'[{self.column}]'})"
        )


@dataclass(frozen=True)
class PredictiveCheck:
    """All comparisons of a predictive check. ``print`` shows them.

    ``check["sd(x)"]`` and ``check["mean(x[3])"]`` are comparisons.

    Attributes:
        comparisons: One per statistic, with its value for the data and for every replicate.
        kind: "posterior" or "prior".
        rows: The number of rows.
        replicates: The number of replicates.

    >>> import torch
    >>> from aevb import Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> check = predictive_check(model, {"x": torch.full((50, 2), 9.0)}, ["mean"], replicates=99)
    >>> [found.label for found in check.extreme()]
    ['mean(x)']
    >>> check.to_dict()["rows"]
    50
    """

    comparisons: tuple[Comparison, ...]
    kind: str
    rows: int
    replicates: int

    def __getitem__(self, label: str) -> Comparison:
        """``check["sd(x)"]``, ``check["mean(x[3])"]``."""
        for comparison in self.comparisons:
            if comparison.label == label:
                return comparison
        raise KeyError(
            f"{label!r} was not compared; there are "
            f"{', '.join(comparison.label for comparison in self.comparisons[:12])}, …."
        )

    def extreme(self, level: float = 0.01) -> tuple[Comparison, ...]:
        """Return the comparisons that the model does not reproduce, the most extreme first.

        For a statistic of several columns, the limit is ``level`` divided by their number. A
        p-value below the limit may need more replicates than there are. A value outside all
        replicates is then judged as if the replicates were normal: by its distance from their mean,
        in standard deviations.

        Arguments:
            level: The p-value below which a comparison is extreme.
        """
        many: dict[tuple[str, str], int] = {}
        for found in self.comparisons:
            if found.column is not None:
                many[found.variable, found.statistic] = (
                    many.get((found.variable, found.statistic), 0) + 1
                )

        def strange(found: Comparison) -> bool:
            share = level / (1 if found.column is None else many[found.variable, found.statistic])
            least = 2 / (1 + self.replicates)
            return found.p <= share or (
                share < least and found.p <= least and found.normal_p <= share
            )

        return tuple(
            sorted(filter(strange, self.comparisons), key=lambda found: (found.p, found.normal_p))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the check as plain data, for JSON."""
        rows = [
            {
                "variable": found.variable,
                "statistic": found.statistic,
                "column": found.column,
                "observed": found.observed,
                "replicated": float(found.replicates.mean()),
                "sd": float(found.replicates.std()),
                "above": found.above,
                "below": found.below,
                "p": found.p,
            }
            for found in self.comparisons
        ]
        return {
            "kind": self.kind,
            "rows": self.rows,
            "replicates": self.replicates,
            "comparisons": rows,
        }

    def __str__(self) -> str:
        shown = [found for found in self.comparisons if found.column is None]
        strange = self.extreme()
        shown += [found for found in strange if found.column is not None][:20]
        lines = [
            f"{self.rows} rows against {self.replicates} replicates of them, {self.kind} "
            f"predictive; p is two-sided"
        ]
        lines.append(f"  {'':<24}{'data':>12}{'replicates':>24}{'p':>9}")
        for found in shown:
            low, high = np.quantile(found.replicates, [0.05, 0.95])
            mark = "  ← not reproduced" if found in strange else ""
            lines.append(
                f"  {found.label:<24}{found.observed:>12.4g}"
                f"{f'{low:.4g} … {high:.4g}':>24}{found.p:>9.3f}{mark}"
            )
        left = sum(found.column is not None for found in strange) - 20
        return "\n".join(lines + ([f"  and {left} more columns"] if left > 0 else []))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from aevb.notebook import cards

        return cards.check_card(self)

    def plot(self, path: str | Path | None = None, *, most: int = 24) -> Figure:
        """Plot a histogram of the replicates per statistic, with the data as a line.

        Arguments:
            path: A PNG file to write; None writes nothing.
            most: The largest number of panels; of the statistics per column, the most extreme come
                first.

        Returns:
            The figure.

        >>> import torch
        >>> from aevb import Normal
        >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
        >>> check = predictive_check(model, {"x": torch.zeros(50, 2)}, ["mean"], replicates=20)
        >>> len(check.plot().axes) > 0
        True
        """
        whole = [found for found in self.comparisons if found.column is None]
        columns = sorted(
            (found for found in self.comparisons if found.column is not None),
            key=lambda found: found.p,
        )
        panels = [
            (found.label, found.observed, found.replicates, found.p)
            for found in [*whole, *columns][:most]
        ]
        figure = replicated(panels)
        if path is not None:
            with whole_file(Path(path)) as place:
                figure.savefig(place, dpi=130)
        return figure


@sharing_cores()
def predictive_check(
    model: Model,
    data: Any,
    statistics: Sequence[str] | Mapping[str, Statistic] | None = None,
    *,
    columns: bool = False,
    kind: str = "posterior",
    replicates: int = 300,
    rows: int | None = 2000,
    seed: int = 0,
) -> PredictiveCheck:
    """Run a predictive check.

    It compares statistics of the data with those of data simulated from the model.

    Arguments:
        model: The trained model.
        data: The rows, as for :func:`fit`.
        statistics: Names (mean, sd, zeros, min, max, q05, q50, q95, correlation, autocorrelation),
            by default those that suit each observed variable. Or a dictionary from names to your
            own functions of an array [N, d] or [N, T, d], with NaN for missing and padded entries,
            that return one or several numbers.
        columns: A named statistic is computed over all columns together; True adds each column.
        kind: "posterior" or "prior".
        replicates: The number of simulated data sets.
        rows: At most this many rows are used, chosen at random; None uses all.
        seed: Decides rows and draws.

    Returns:
        The :class:`PredictiveCheck`.

    >>> import torch
    >>> from aevb import Bernoulli, Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Bernoulli(3)}, q={"z | x": Normal()})
    >>> check = predictive_check(model, {"x": torch.eye(3)}, ["mean"], replicates=99)
    >>> check["mean(x)"].observed
    0.3333333333333333
    """
    if kind not in ("posterior", "prior"):
        raise ValueError(f'kind is "posterior" or "prior", got {kind!r}.')
    if isinstance(replicates, bool) or not isinstance(replicates, int) or replicates < 20:
        raise ValueError(f"replicates is a whole number, 20 or more, got {replicates!r}.")
    graph = model.graph
    source = open_source(graph, data, model._parameter())
    check_rows(source, model.teaching.columns, model.teaching.pixels)
    chosen = some_rows(source.n, rows, seed)
    batches = [source.take(chosen[start : start + CHUNK]) for start in range(0, len(chosen), CHUNK)]
    asked = {name: _functions(graph, name, statistics) for name in graph.observed}

    def numbers(parts: Sequence[Mapping[str, Tensor]]) -> dict[tuple[str, str], np.ndarray]:
        """Compute every statistic of the data or of a replicate."""
        found: dict[tuple[str, str], np.ndarray] = {}
        for name, functions in asked.items():
            x = np.concatenate(
                [
                    as_array(graph, batch, name, part[name])
                    for batch, part in zip(batches, parts, strict=True)
                ]
            )
            found |= {
                (name, word): evaluate(word, function, x, columns)
                for word, function in functions.items()
            }
        return found

    observed = numbers(batches)
    drawn: dict[tuple[str, str], list[np.ndarray]] = {key: [] for key in observed}
    with model._evaluating(seed):
        anew = [replicate(model, batch, kind) for batch in batches]
        for _ in range(replicates):
            for key, value in numbers([next(draws) for draws in anew]).items():
                drawn[key].append(value)
    comparisons = []
    for (name, word), value in observed.items():
        # The first number of a pooled statistic is over all columns.
        pooled = STATISTICS.get(word) is asked[name][word] or len(value) == 1
        table = np.stack(drawn[name, word])
        for i in range(len(value)):
            if np.isfinite(value[i]) and np.isfinite(table[:, i]).all():
                # A constant column has no correlation.
                comparisons.append(
                    Comparison(
                        name,
                        word,
                        (None if i == 0 else i - 1) if pooled else i,
                        float(value[i]),
                        table[:, i],
                    )
                )
    if not comparisons:
        raise ValueError(
            "No statistic is finite for the data and for every replicate. Choose other statistics."
        )
    return PredictiveCheck(tuple(comparisons), kind, len(chosen), replicates)


def _functions(
    graph: Graph, name: str, statistics: Sequence[str] | Mapping[str, Statistic] | None
) -> dict[str, Statistic]:
    if isinstance(statistics, Mapping):
        return dict(statistics)
    words = (
        usual_statistics(graph, name)
        if statistics is None
        else (statistics,)
        if isinstance(statistics, str)
        else statistics
    )
    for word in words:
        if word not in STATISTICS:
            raise ValueError(
                f"Unknown statistic {word!r}. Choose from {', '.join(STATISTICS)}, or pass your "
                f"own function: {{name: function}}."
            )
    return {word: STATISTICS[word] for word in words}
