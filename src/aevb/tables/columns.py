"""Columns of a schema: how their cells are checked, standardised and written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np

from aevb.data.markers import marker_warnings
from aevb.runtime.checked_files import DataWarning
from aevb.runtime.suggestions import did_you_mean
from aevb.tables.amounts import Amounts
from aevb.tables.date_texts import DateTexts, with_iso_dates
from aevb.tables.kinds import (
    KINDS,
    LEFT_OUT,
    LIKELIHOODS,
    Choice,
    Facts,
    asked,
    log_moments,
    why_not,
)
from aevb.tables.reading import Cells, zone_of

MANY = 3  # a word for missing cells in more than 1 / MANY of the cells is warned of
UNKNOWN = -1.0  # the position of a level that the schema does not know
COUNTS = {"Poisson": "counts", "NegativeBinomial": "overdispersed"}  # variables of counts


@dataclass(frozen=True)
class Column:
    """One column of a table: its kind, its likelihood, and the reason.

    ``variable`` is the variable of the model that holds it. Real, positive and date columns are
    entries of ``x``, standardised: (v − location) / scale, with v the logarithm for a positive
    column. ``levels`` are the levels of a binary, category or ordered column, in order.
    """

    name: str
    kind: str
    likelihood: str
    reason: str
    dtype: str
    facts: Facts
    levels: tuple[Any, ...] = ()
    location: float = 0.0
    scale: float = 1.0
    variable: str = ""

    @property
    def missing(self) -> int:
        """The number of missing cells in the table that the schema was read from."""
        return self.facts.missing

    @property
    def used(self) -> bool:
        return self.kind != LEFT_OUT

    @property
    def dense(self) -> bool:
        """Whether the column has a density: it is an entry of ``x``."""
        return self.kind in ("real", "positive", "date")

    @property
    def listed(self) -> bool:
        """Whether the column has levels."""
        return self.kind in ("binary", "category", "ordered")

    @property
    def zero(self) -> float | None:
        """The number that a positive column reads for a zero; None if it has no zeros."""
        return None if self.kind != "positive" or self.facts.least is None else self.facts.least / 2

    def _logs(self, values: np.ndarray) -> np.ndarray:
        return np.log(values if self.zero is None else np.where(values == 0, self.zero, values))

    def standardise(self, values: np.ndarray) -> np.ndarray:
        """The values as the model reads them; NaN stays NaN."""
        if not self.dense:
            return values
        return ((self._logs(values) if self.kind == "positive" else values) - self.location) / (
            self.scale
        )

    def restore(self, values: np.ndarray) -> np.ndarray:
        """The values of the table, from those that :meth:`standardise` returns."""
        if not self.dense:
            return values
        plain = values * self.scale + self.location
        if self.kind != "positive":
            return plain
        found = np.exp(plain)
        # Between a zero and the smallest positive number, the middle of the logarithms decides.
        return found if self.zero is None else np.where(found < self.zero * 2**0.5, 0.0, found)

    def bounded(self, values: np.ndarray, step: float) -> np.ndarray:
        """Numbers to fill or to draw: at least ``step`` in a positive column, which has no zeros.

        They are at least 0 in a column without negative numbers that has several zeros, or numbers
        as good as 0.
        """
        if self.kind == "positive" and self.zero is None:
            return np.maximum(values, step)
        if self.zero is not None or self.facts.not_negative:
            return np.maximum(values, 0.0)
        return values

    def log_jacobian(self, values: np.ndarray) -> np.ndarray:
        """log |d standardised / d value| per cell; 0 for missing cells and for probabilities."""
        if not self.dense:
            return np.zeros(len(values))
        found = np.full(len(values), -math.log(abs(self.scale)))
        if self.kind == "positive":
            found = found - self._logs(values)
        return np.where(np.isnan(values), 0.0, found)


def column_of(name: str, dtype: str, facts: Facts, choice: Choice) -> Column:
    levels: tuple[Any, ...] = ()
    location, scale = 0.0, 1.0
    if choice.kind in ("binary", "category", "ordered"):
        assert facts.levels is not None
        levels = facts.levels
    elif choice.kind == "positive":
        location, scale = log_moments(facts)
    elif choice.kind in ("real", "date", "count"):
        assert facts.mean is not None
        assert facts.spread is not None
        location, scale = facts.mean, facts.spread
    return Column(
        name, choice.kind, choice.likelihood, choice.reason, dtype, facts, levels, location, scale
    )


def dropped(name: str) -> Column:
    return Column(name, LEFT_OUT, "", "as asked", "", Facts("", 0, 0, 0))


def asked_choice(name: str, facts: Facts, kind: str, likelihood: str | None = None) -> Choice:
    if kind not in KINDS:
        raise ValueError(
            f"Unknown kind {kind!r}. The kinds are {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
        )
    if (reason := why_not(facts, kind)) is not None:
        raise ValueError(f"Column {name!r} cannot be of kind {kind}: {reason}.")
    if likelihood is not None and (kind != "count" or likelihood not in COUNTS):
        raise ValueError(
            f'likelihood is "Poisson" or "NegativeBinomial", of a count, got {likelihood!r} of '
            f"kind {kind}."
        )
    return asked(facts, kind, likelihood)


def column_from(record: Mapping[str, Any]) -> Column:
    facts = dict(record["facts"])
    facts["levels"] = None if facts["levels"] is None else tuple(facts["levels"])
    facts["words"] = tuple(facts["words"])
    if facts.get("amounts") is not None:
        facts["amounts"] = Amounts(**facts["amounts"])
    if facts.get("dates") is not None:
        facts["dates"] = DateTexts(**facts["dates"])
    fields = dict(record) | {"facts": Facts(**facts), "levels": tuple(record["levels"])}
    column = Column(**fields)
    if column.kind not in (*KINDS, LEFT_OUT) or (
        column.used and not (math.isfinite(column.location) and column.scale)
    ):
        raise ValueError(f"column {column.name!r} is damaged")
    if column.used and column.likelihood not in (*LIKELIHOODS.values(), *COUNTS):
        raise ValueError(f"column {column.name!r} has the likelihood {column.likelihood!r}")
    return column


def warn_of_markers(cells: Cells) -> None:
    """Warn of numbers such as -999 that may mark missing cells."""
    if cells.type != "number":
        return
    fix = (
        f"make them missing, for example frame[{cells.name!r}] = "
        f"frame[{cells.name!r}].replace({{marker}}, None)."
    )
    option = "leave its cells empty, or add --missing {marker}."
    if cells.dtype == "String":  # amounts
        fix = option = "make these cells missing."
    for warning in marker_warnings(cells.values[:, None], [cells.name], "", fix, option):
        warnings.warn(warning, stacklevel=4)


def warn_of_words(name: str, words: Mapping[str, int], rows: int) -> None:
    """Warn of a word for missing cells that is so frequent that it may be a level."""
    for word, times in words.items():
        if word.strip() and times > rows / MANY:
            warnings.warn(
                f"Column {name!r} is missing where the text is {word!r}: {times} of "
                f"{rows} cells. If {word!r} is a level, give it another name, or make "
                f"the column categorical (a pandas Categorical, a polars Enum).",
                DataWarning,
                stacklevel=4,
            )


def rescaled_facts(facts: Facts, factor: float, offset: float) -> Facts:
    ends = sorted(factor * end + offset for end in (facts.low, facts.high) if end is not None)
    positive = facts.log_mean is not None and factor > 0 and offset == 0
    return replace(
        facts,
        whole=False,
        spike=None if facts.spike is None else factor * facts.spike + offset,
        levels=None,
        amounts=None,
        low=ends[0],
        high=ends[-1],
        mean=factor * (facts.mean or 0.0) + offset,
        spread=abs(factor) * (facts.spread or 0.0),
        log_mean=None
        if facts.log_mean is None or not positive
        else facts.log_mean + math.log(factor),
        log_spread=facts.log_spread if positive else None,
        decimals=None,
        zeros=facts.zeros if positive else 0,
        zero_share=facts.zero_share if positive else 0.0,
        least=None if facts.least is None or not positive else factor * facts.least,
    )


# Checks of new cells ------------------------------------------------------------------------------


def checked_cells(column: Column, cells: Cells) -> np.ndarray:
    """The cells as float64, after checking them against the column's kind.

    A level is its position among the levels of the column, or ``UNKNOWN``.
    """
    if column.kind == "date" and cells.type in ("date", "datetime"):
        _check_zone(column, cells)
    if bool(cells.missing.all()):
        return np.full(len(cells.values), np.nan)
    if column.listed:
        return _positions(column, cells)
    if column.kind == "date" and zone_of(column.dtype) is None:
        cells = with_iso_dates(cells)
    dates = cells.type in ("date", "datetime")
    if (column.kind == "date") != dates or cells.type in ("text", "category"):
        was = "dates" if column.kind == "date" else "numbers"
        now = (
            "dates"
            if dates
            else {"number": "numbers", "boolean": "truth values"}.get(cells.type, "text")
        )
        first = int(np.argmin(cells.missing))
        raise ValueError(
            f"Column {column.name!r} had {was} when the schema was read, and now holds {now} "
            f"({plain_text(cells.values[first])} in row {first}, from 0). Convert it."
        )
    values = np.where(cells.missing, np.nan, cells.values.astype(float))
    # What one cell is, what several are, and what to do with {them}.
    checks = [
        (
            np.isinf(values),
            "is infinite",
            "are infinite",
            "Replace {them} by a number or a missing value",
        )
    ]
    if column.kind == "positive":
        checks.append(
            (
                values <= 0,
                "is not positive, so it has no logarithm",
                "are not positive, so they have no logarithm",
                _fix(column),
            )
            if column.zero is None
            else (
                values < 0,
                "is negative, so it has no logarithm",
                "are negative, so they have no logarithm",
                _fix(column),
            )
        )
    if column.kind == "count":
        checks.append(
            (
                (values < 0) | (values != np.rint(values)) & ~np.isnan(values),
                "is no count (a whole number from 0 on)",
                "are no counts (whole numbers from 0 on)",
                _fix(column),
            )
        )
    for bad, one, several, fix in checks:
        if count := int(bad.sum()):
            row = int(np.argmax(bad))
            what = f"1 cell {one}" if count == 1 else f"{count} cells {several}"
            raise ValueError(
                f"Column {column.name!r}: {what} ({values[row]:g} in row {row}, from 0). "
                f"{fix.replace('{them}', 'it' if count == 1 else 'them')}."
            )
    return values


def _check_zone(column: Column, cells: Cells) -> None:
    was, now = zone_of(column.dtype), zone_of(cells.dtype)
    if (was is None) == (now is None):
        return
    if now is None:
        told, fix = f"times in the zone {was}", f"tz_localize({was!r})"
        found = "times without a zone"
    else:
        told, found, fix = "times without a zone", f"times in the zone {now}", "tz_localize(None)"
    raise ValueError(
        f"Column {column.name!r} had {told} when the schema was read, and now holds {found}. "
        f"Convert it: in pandas, frame[{column.name!r}].dt.{fix}."
    )


def _fix(column: Column) -> str:
    return (
        f"Correct {{them}} or make {{them}} missing, or fit a schema with "
        f'schema.with_kind({column.name!r}, "real")'
    )


def plain_text(value: Any) -> str:
    """A cell in a message: a number without its type, other cells as Python writes them."""
    return f"{value:.17g}" if isinstance(value, float) else repr(value)


def _positions(column: Column, cells: Cells) -> np.ndarray:
    codes = {level: i for i, level in enumerate(column.levels)}
    found = np.full(len(cells.values), np.nan)
    known = cells.values[~cells.missing].tolist()
    if any(isinstance(level, str) for level in column.levels) != (cells.type == "text"):
        # 2007 and "2007" are one level: a reader may make either of a file.
        codes = {spelled(level): i for level, i in codes.items()}
        known = [spelled(value) for value in known]
    found[~cells.missing] = np.fromiter(map(codes.get, known, repeat(UNKNOWN)), float, len(known))
    return found


def spelled(level: Any) -> Any:
    """A number as text; other levels as they are."""
    if isinstance(level, bool) or not isinstance(level, int | float):
        return level
    return str(int(level)) if level == int(level) else str(level)


def levels_at(column: Column, positions: np.ndarray) -> np.ndarray:
    levels = np.array([*column.levels, None], dtype=object)
    missing = np.isnan(positions)
    return levels[np.where(missing, -1, np.rint(positions)).astype(int)]


def date_text(days: float) -> str:
    return str(np.datetime64(round(days), "D"))


def range_text(column: Column) -> str:
    if column.facts.low is None or not column.used:
        return ""
    if column.kind == "date":
        return f"{date_text(column.facts.low)} … {date_text(column.facts.high or 0.0)}"
    return f"{column.facts.low:g} … {column.facts.high:g}"
