"""Results of a comparison of models: log p per row, paired differences, table, CSV."""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aevb.runtime.checked_files import whole_file

LEVEL = 0.05  # chance, over all comparisons with the best, to call one of equal models worse
FEW = 20  # rows; with fewer, the standard error of a mean is itself uncertain
MOST_OF_IT = 0.5  # share of the squared deviations that one row may have without a note
WIDTH = 80  # columns of the text below a table


@dataclass(frozen=True)
class Compared:
    """One model of a comparison.

    ``evidence`` is log p per row, [N], in the units that all models share. ``stderr`` is its
    sampling error per row, 0 if it is exact. ``flags`` say why the estimate must not be trusted;
    ``notes`` are other remarks. ``parameters`` and ``parameters_q`` count the numbers that p and q
    have. ``free`` is the number of free parameters of p, as AIC and BIC need it. ``samples`` is the
    number of samples per row of an estimate. ``observed_steps`` counts the steps with data of all
    sequences, None for rows without steps.
    """

    name: str
    evidence: np.ndarray
    stderr: np.ndarray
    method: str
    parameters: int
    parameters_q: int
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    elbo: float | None = None
    elbo_error: float | None = None
    free: int | None = None
    observed_steps: int | None = None
    samples: int | None = None
    rounding: float = 0.0  # relative precision of the numbers in ``evidence``

    @property
    def mean(self) -> float:
        """Mean log p over the rows, nats per example."""
        return float(self.evidence.mean())

    @property
    def error(self) -> float:
        """Sampling error of the mean, for these rows; 0 if log p is exact."""
        return float(np.sqrt(np.square(self.stderr).sum())) / len(self.stderr)

    @property
    def trusted(self) -> bool:
        return not self.flags

    @property
    def aic(self) -> float | None:
        """Akaike's criterion −2 log p + 2 k for the k free parameters of p; lower is better."""
        return None if self.free is None else -2 * float(self.evidence.sum()) + 2 * self.free

    @property
    def bic(self) -> float | None:
        """The Bayesian criterion −2 log p + k log n of Schwarz; lower is better.

        n is the number of rows; of sequences, the number of their steps with data.
        """
        n = len(self.evidence) if self.observed_steps is None else self.observed_steps
        return (
            None if self.free is None else -2 * float(self.evidence.sum()) + self.free * math.log(n)
        )


@dataclass(frozen=True)
class Difference:
    """Mean of the differences of log p, row by row, between two models.

    ``told`` says whether it can be told from noise; None if that is not decided, because there is a
    single row or because an estimate must not be trusted. ``widest`` is the share of the largest
    row in the squared deviations from the mean.
    """

    mean: float
    stderr: float
    told: bool | None
    widest: float = 0.0

    def __str__(self) -> str:
        return plus_minus(self.mean, self.stderr, sign=True)


def paired(one: Compared, other: Compared, comparisons: int = 1) -> Difference:
    """Compare two models row by row: the mean of log p − log p' and its standard error over rows.

    The rows of both are the same, so that what makes a row hard for both cancels. The sampling
    errors of the estimates are part of the standard error. ``comparisons`` is the number of
    comparisons that share the level of 5 %.
    """
    with np.errstate(invalid="ignore"):
        rows = one.evidence - other.evidence
        mean, n = float(rows.mean()), len(rows)
    if not np.isfinite(rows).all():
        return Difference(mean, math.nan, None)
    if n < 2:
        return Difference(mean, math.nan, None)
    squares = np.square(rows - mean)
    stderr = math.sqrt(float(squares.sum()) / (n - 1) / n)
    widest = float(squares.max() / squares.sum()) if squares.sum() > 0 else 0.0
    rounding = max(model.rounding * float(np.abs(model.evidence).mean()) for model in (one, other))
    told = abs(mean) > max(limit(n, comparisons) * stderr, rounding)
    # An estimate that must not be trusted is too low. The lead of the higher one is then too small,
    # so it decides; the lower one may be the better.
    lower = one if mean < 0 else other
    sure = lower.trusted if told else one.trusted and other.trusted
    return Difference(mean, stderr, told if sure else None, widest)


def limit(n: int, comparisons: int) -> float:
    """Return how many standard errors a difference must have to be told from noise.

    It is the two-sided quantile of Student's t with n − 1 degrees of freedom, at the level 5 %
    divided by the number of comparisons (Bonferroni).

    >>> round(limit(1000, 1), 2), round(limit(1000, 10), 2)
    (1.96, 2.81)
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    return float(t.ppf(1 - LEVEL / (2 * max(1, comparisons)), n - 1))


@dataclass(frozen=True, repr=False)
class Comparison:
    """Models ordered by their mean log p on the same rows, the best first.

    ``print`` shows a table, what can be told from noise, and what must not be trusted. A model is
    found by its name: ``comparison["vae"].evidence`` is its log p per row.

    Attributes:
        models: The models with their log p per row, the best first.
        what: Which rows they are, e.g. "38 held-out rows of table.csv".
        units: A sentence on the units of log p.
        notes: Other remarks.

    >>> from aevb import Model, Normal, compare
    >>> x = np.random.default_rng(0).normal(size=(200, 1))
    >>> narrow, wide = (Model(p={"x": Normal(1, scale=s)}, q={}) for s in (1.0, 5.0))
    >>> found = compare({"narrow": narrow, "wide": wide}, {"x": x})
    >>> found.best.name, found.verdict("wide"), found.close()
    ('narrow', 'worse', [])
    >>> found.difference("wide").mean < 0, found.rows
    (True, 200)

    ``print(found)`` shows these parts:

    >>> found.title()
    '200 rows: exact log p in nats per example'
    >>> list(found.columns())
    ['', 'model', 'log p', 'difference', 'p']
    >>> len(found.table()), len(found.sentences())
    (3, 1)
    >>> found.conclusions()[0].startswith(found.legend()[:20])
    True

    A file gets the same numbers:

    >>> import tempfile
    >>> [one["model"] for one in found.record()]
    ['narrow', 'wide']
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found.save(Path(folder) / "models.csv")
    >>> Comparison.of(found.models[::-1]).best.name
    'narrow'
    """

    models: tuple[Compared, ...]
    what: str = ""  # which rows they are, e.g. "38 held-out rows of table.csv"
    units: str = ""  # a sentence on the units of log p
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, models: Sequence[Compared], what: str = "", units: str = "", notes: Sequence[str] = ()
    ) -> Comparison:
        """Order models by their mean log p; those without a finite one come last.

        Arguments:
            models: The models, in any order.
            what: Which rows they are.
            units: A sentence on the units of log p.
            notes: Other remarks.

        Returns:
            The comparison.
        """
        order = sorted(
            models, key=lambda one: one.mean if math.isfinite(one.mean) else -math.inf, reverse=True
        )
        return cls(tuple(order), what, units, tuple(notes))

    def __getitem__(self, name: str) -> Compared:
        for one in self.models:
            if one.name == name:
                return one
        raise ValueError(
            f"No model is called {name!r}. There are: {', '.join(one.name for one in self.models)}."
        )

    @property
    def best(self) -> Compared:
        """The model with the highest mean log p."""
        return self.models[0]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.best.evidence)

    def difference(self, name: str, other: str | None = None) -> Difference:
        """Compute the paired difference of two models: the mean of log p − log p' over the rows.

        Arguments:
            name: The model.
            other: The model to compare it with, by default the best.

        Returns:
            The mean, its standard error, and whether it can be told from noise.
        """
        found = self.best if other is None else self[other]
        return paired(self[name], found, len(self.models) - 1)

    def close(self) -> list[Compared]:
        """Return the models that cannot be told from the best, without the best itself."""
        return [one for one in self.models[1:] if self.difference(one.name).told is False]

    def verdict(self, name: str) -> str:
        """Return "best", "worse", "not told apart" or "not decided".

        Arguments:
            name: The model.
        """
        if name == self.best.name:
            return "best"
        told = self.difference(name).told
        return "not decided" if told is None else "worse" if told else "not told apart"

    # Text -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        lines = [self.title(), *self.table(), *self.conclusions()]
        return "\n".join(line for line in lines if line)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from aevb.notebook import cards

        return cards.comparison_card(self)

    def title(self) -> str:
        """Return the line above the table: which rows, and how log p was computed."""
        exact = all(one.method == "exact" for one in self.models)
        return f"{self.what or counted(self.rows)}: {'exact ' * exact}log p in nats per example"

    def table(self) -> list[str]:
        """Return the lines of the table, one per model."""
        return aligned(self.columns())

    def columns(self) -> dict[str, list[str]]:
        """Return the columns of the table by heading; the column of marks has none."""
        columns: dict[str, list[str]] = {
            "": [self._mark(one) for one in self.models],
            "model": [one.name for one in self.models],
            "log p": [
                f"{one.mean:.3f}" + (f" ± {one.error:.1g}" if one.method != "exact" else "")
                for one in self.models
            ],
        }
        if len(self.models) > 1:
            columns["difference"] = [
                "" if one is self.best else str(self.difference(one.name)) for one in self.models
            ]
        if any(one.elbo is not None for one in self.models):
            columns["ELBO"] = [
                "–"
                if one.elbo is None
                else f"{one.elbo:.3f}" + (f" ± {one.elbo_error:.1g}" if one.elbo_error else "")
                for one in self.models
            ]
        if any(one.free is not None for one in self.models):
            for heading in ("aic", "bic"):
                values = [getattr(one, heading) for one in self.models]
                columns[heading.upper()] = [
                    "–" if value is None else f"{value:.1f}" for value in values
                ]
            columns["free"] = ["–" if one.free is None else str(one.free) for one in self.models]
        columns["p"] = [str(one.parameters) for one in self.models]
        if any(one.parameters_q for one in self.models):
            columns["q"] = [str(one.parameters_q) for one in self.models]
        if any(one.seconds is not None for one in self.models):
            columns["s"] = [
                "–" if one.seconds is None else f"{one.seconds:.1f}" for one in self.models
            ]
        return columns

    def _mark(self, one: Compared) -> str:
        if not one.trusted:
            return "!"
        if len(self.models) == 1:
            return ""
        return {"best": "*", "not told apart": "~", "not decided": "?", "worse": ""}[
            self.verdict(one.name)
        ]

    def legend(self) -> str:
        """Return the explanation of the columns and marks that the table has."""
        marks = {self._mark(one) for one in self.models}
        said = {
            "*": "*: best",
            "~": "~: cannot be told from the best",
            "?": "?: not decided",
            "!": "!: not to be trusted",
        }
        parts = [said[mark] for mark in said if mark in marks]
        if len(self.models) > 1:
            parts.append("difference: to the best, paired by rows, ± standard error over rows")
        bounds = [name for name in ("log p", "ELBO") if self._sampled(name)]
        if bounds:
            parts.append(f"± of {listed(bounds)}: sampling error")
        if any(one.free is not None for one in self.models):
            parts.append("AIC, BIC: lower is better, by the free parameters of p")
            steps = {
                one.observed_steps
                for one in self.models
                if one.free is not None and one.observed_steps is not None
            }
            if steps:
                counts = listed([f"{n:,}" for n in sorted(steps)])
                parts.append(f"n of BIC: {counts} steps with data")
        names = "p, q" if any(one.parameters_q for one in self.models) else "p"
        parts.append(f"{names}: number of parameters")
        if any(one.seconds is not None for one in self.models):
            parts.append("s: seconds of training")
        return "; ".join(parts) + "."

    def _sampled(self, name: str) -> bool:
        """Whether any value of a column has a sampling error."""
        return any(
            one.method != "exact" if name == "log p" else bool(one.elbo_error)
            for one in self.models
        )

    def conclusions(self) -> list[str]:
        """Return what the numbers say, wrapped to 80 columns."""
        return [
            wrapped(sentence)
            for sentence in (self.legend(), *self.sentences(), self.units, *self.notes)
            if sentence
        ]

    def sentences(self) -> list[str]:
        """Return what can be told from noise, and which estimates must not be trusted."""
        found = []
        others, close = self.models[1:], self.close()
        errors = f"{limit(self.rows, len(others)):.1f}" if others and self.rows > 1 else ""
        if others and not math.isfinite(self.best.mean):
            found.append("No model gives all rows a finite log p, so none is the best.")
        elif others and self.rows < 2:
            found.append("One row has no standard error: no difference can be told from noise.")
        elif close:
            found.append(
                f"{listed([one.name for one in close])} cannot be told from {self.best.name}: a "
                f"difference within {errors} standard errors is noise (5 % level, "
                f"{counted(len(others), 'comparison')})."
            )
        elif others and all(self.difference(one.name).told for one in others):
            found.append(
                f"{self.best.name} is better than {'every other' if len(others) > 1 else 'the'} "
                f"{'model' if len(others) > 1 else 'other'}: each difference exceeds {errors} "
                f"standard errors (5 % level, {counted(len(others), 'comparison')})."
            )
        for one in self.models:
            found += [f"{one.name} must not be trusted: {flag}" for flag in one.flags]
        open_ = [one.name for one in others if self.verdict(one.name) == "not decided"]
        if open_ and self.rows > 1 and math.isfinite(self.best.mean):
            found.append(
                f"Whether {self.best.name} is better than {listed(open_, either='or')} is not "
                f"decided: an estimate that must not be trusted is too low."
            )
        sampled = sorted({one.method for one in self.models if one.method != "exact"})
        if sampled:
            exact = [one.name for one in self.models if one.method == "exact"]
            found.append(
                f"log p was estimated ({', '.join(sampled)})"
                + (f"; it is exact for {listed(exact)}." if exact else ".")
            )
        if 1 < self.rows < FEW:
            found.append(f"{self.rows} rows are few: the standard errors are themselves uncertain.")
        rare = [
            one.name
            for one in others
            if self.rows >= FEW and self.difference(one.name).widest > MOST_OF_IT
        ]
        if rare:
            found.append(
                f"One row makes up most of the variation of the difference to {listed(rare)}: look "
                f"at the row before you rely on its standard error."
            )
        return found + list(dict.fromkeys(note for one in self.models for note in one.notes))

    # Data -----------------------------------------------------------------------------------------

    def record(self) -> list[dict[str, Any]]:
        """Return one dictionary per model, best first, with everything but the rows."""
        return [
            {
                "rank": rank,
                "model": one.name,
                "log_p": one.mean,
                "log_p_error": one.error,
                "difference": self.difference(one.name).mean,
                "difference_error": self.difference(one.name).stderr,
                "verdict": self.verdict(one.name),
                "elbo": one.elbo,
                "aic": one.aic,
                "bic": one.bic,
                "free": one.free,
                "parameters_p": one.parameters,
                "parameters_q": one.parameters_q,
                "seconds": one.seconds,
                "method": one.method,
                "flags": " ".join(one.flags),
            }
            for rank, one in enumerate(self.models, 1)
        ]

    def save(self, path: str | Path) -> None:
        """Write :meth:`record` to a CSV file, one line per model.

        Arguments:
            path: The file.
        """
        write_csv(Path(path), self.record())


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write dictionaries with the same keys as the lines of a CSV file; None is an empty cell."""
    with whole_file(path) as place, place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plus_minus(value: float, error: float, *, sign: bool = False) -> str:
    """Format a value with its error, to two digits of the error and at most four decimals.

    >>> plus_minus(-15.4567, 0.0234), plus_minus(-3.2, 0.0, sign=True), plus_minus(-812.3, 41.0)
    ('-15.457 ± 0.023', '-3.200 ± 0', '-812 ± 41')
    """
    form = "+" if sign else ""
    if not math.isfinite(error):
        return f"{value:{form}.3f}"
    if error == 0:
        return f"{value:{form}.3f} ± 0"
    digits = max(0, min(4, 1 - math.floor(math.log10(error))))
    return f"{value:{form}.{digits}f} ± {error:.{digits}f}"


def aligned(columns: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table: text on the left, numbers on the right.

    >>> aligned({"model": ["a", "bb"], "log p": ["-1.50", "-12.00"]})
    ['model   log p', 'a       -1.50', 'bb     -12.00']
    """
    left = ("", "model", *(name for name in columns if name.endswith(" ")))
    cells = [[name.strip(), *values] for name, values in columns.items()]
    widths = [max(map(len, column)) for column in cells]
    lines = []
    for row in zip(*cells, strict=True):
        parts = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        lines.append(_joined(parts, list(columns)))
    return lines


def _joined(parts: list[str], names: list[str]) -> str:
    """Join the cells of a line: one space after the column of marks, two after any other."""
    return "".join(
        part + (" " if name == "" else "  ") for name, part in zip(names, parts, strict=True)
    ).rstrip()


def wrapped(text: str) -> str:
    """Wrap a sentence to 80 columns. Paths and names stay whole, so that they can be copied."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def counted(n: int, what: str = "row") -> str:
    """Format a count.

    >>> counted(1), counted(3, "model")
    ('1 row', '3 models')
    """
    return f"{n} {what}{'s' * (n != 1)}"


def listed(names: Sequence[str], most: int = 6, either: str = "and") -> str:
    """Join names for a sentence.

    >>> listed(["a", "b", "c"]), listed("abcdefgh", most=3)
    ('a, b and c', 'a, b and 6 more')
    """
    more = len(names) - most + 1
    *first, last = names if len(names) <= most else [*names[: most - 1], f"{more} more"]
    return f"{', '.join(first)} {either} {last}" if first else last
