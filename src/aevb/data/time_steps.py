"""The times of sequences: find the spacing of the steps, and continue it.

Times are numbers (also the ordinals of periods) or ``datetime64[us]``. Steps may be a fixed time
apart, some months (on the same day, or at the ends of months), or business days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# Relative error allowed in the spacing of times, because months written in years are rounded.
ROUNDED = 0.02
MOST = 100  # steps added per line of a table or frame, at most
DATES = ("%Y%m", "%Y%m%d")  # formats of dates that may be written as whole numbers
SUBTRACT = "If they number the steps, subtract the first from each: 0, 1, 2, …"
DAY = 86_400_000_000  # microseconds
UNITS = (("day", DAY), ("hour", DAY // 24), ("minute", DAY // 1440), ("second", DAY // 86400))


@dataclass(frozen=True)
class Spacing:
    """The time between two steps: ``size`` times a ``unit``.

    A unit is "number", "month" (``at_end``: the last day of the month), "business day" or
    "microsecond".
    """

    unit: str
    size: float
    at_end: bool = False

    def after(self, last: Any, counts: np.ndarray) -> np.ndarray:
        """Return the times that are ``counts`` steps after a time.

        >>> import numpy as np
        >>> month = Spacing("month", 1, at_end=True)
        >>> month.after(np.datetime64("2024-01-31", "us"), np.array([1, 2])).astype("datetime64[D]")
        array(['2024-02-29', '2024-03-31'], dtype='datetime64[D]')
        """
        if self.unit == "number":
            whole = float(self.size).is_integer() and np.issubdtype(last.dtype, np.integer)
            return last + (int(self.size) if whole else self.size) * counts
        day = last.astype("datetime64[D]")
        hour = last - day
        if self.unit == "microsecond":
            return last + (int(self.size) * counts).astype("timedelta64[us]")
        if self.unit == "business day":
            return np.busday_offset(day, int(self.size) * counts) + hour
        month = day.astype("datetime64[M]") + int(self.size) * counts
        length = (month + 1).astype("datetime64[D]") - month.astype("datetime64[D]")
        final = length.astype(np.int64) - 1
        date = (day - day.astype("datetime64[M]").astype("datetime64[D]")).astype(np.int64)
        return month.astype("datetime64[D]") + np.where(self.at_end, final, date) + hour

    def __str__(self) -> str:
        if self.unit == "number":
            return f"{self.size:.15g}"
        unit, size = self.unit, self.size
        if unit == "month" and size % 12 == 0:
            unit, size = "year", size // 12
        if unit == "microsecond":
            unit, one = next(((u, one) for u, one in UNITS if size % one == 0), (unit, 1))
            size = int(size // one)
        return f"{size:.15g} {unit}{'s' * (size != 1)}"


def date_format(times: np.ndarray) -> str | None:
    """Return the format of whole numbers that write months or dates of 1900 to 2100, else None.

    >>> import numpy as np
    >>> date_format(np.array([201011, 201012, 201101])), date_format(np.array([20240131, 20240201]))
    ('%Y%m', '%Y%m%d')
    >>> date_format(np.array([201012, 201013])) is None
    True
    """
    if len(times) < 2 or not (times == np.round(times)).all():
        return None
    for form, whole in zip(DATES, (times * 100 + 1, times), strict=True):
        if not ((whole >= 19000101) & (whole <= 21001231)).all():
            continue
        days = whole.astype(np.int64)
        year, month, day = days // 10000, days // 100 % 100, days % 100
        if not ((month >= 1) & (month <= 12) & (day >= 1)).all():
            continue
        months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
        length = (months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")
        if (day <= length.astype(np.int64)).all():
            return form
    return None


class UnevenError(ValueError):
    """Times without a common spacing; the message holds two distances as text."""


def spacing_of(rows: list[np.ndarray]) -> tuple[Spacing | None, list[np.ndarray]]:
    """Find the spacing of rising times; None if every row has one step.

    The second value has, for each row, the position of its times in steps of this spacing, from 0.

    Raises :class:`UnevenError` if the times are not whole numbers of steps apart.
    """
    inner = [row for row in rows if len(row) > 1]
    if not inner:
        return None, [np.zeros(len(row), np.int64) for row in rows]
    if inner[0].dtype.kind != "M":
        return _numbers(rows)
    for unit, at_end, count in _calendars(rows):
        counted = [np.diff(count(row)) for row in inner]
        size = min(int(each.min()) for each in counted)
        if size > 0 and all((each % size == 0).all() for each in counted):
            found = Spacing(unit, size, at_end)
            return found, [(count(row) - count(row[:1])) // size for row in rows]
    between = np.concatenate([np.diff(row.astype(np.int64)) for row in inner])
    size = int(between.min())
    uneven = between[between % size != 0]
    raise UnevenError(f"{Spacing('microsecond', size)} and {Spacing('microsecond', uneven[0])}")


def _numbers(rows: list[np.ndarray]) -> tuple[Spacing, list[np.ndarray]]:
    between = np.concatenate([np.diff(row) for row in rows])
    size = between.min()
    steps = between / size
    wrong = np.abs(steps - np.round(steps)) > ROUNDED
    if wrong.any():
        raise UnevenError(f"{size:.15g} and {between[wrong][0]:.15g}")
    single = between[np.round(steps) == 1]
    if not (single == size).all():  # rounded times, such as months written in years
        size = single.mean()
    return Spacing("number", size.item()), [
        np.round((row - row[0]) / size).astype(np.int64) for row in rows
    ]


def _calendars(
    rows: list[np.ndarray],
) -> Iterator[tuple[str, bool, Callable[[np.ndarray], np.ndarray]]]:
    """Yield the calendars that may describe these dates: unit, at_end, and how it counts."""
    times = np.concatenate(rows)
    days = times.astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    if (times - days == times[0] - days[0]).all():
        ends = bool(((days + 1).astype("datetime64[M]") == months + 1).all())
        dates = (days - months.astype("datetime64[D]")).astype(np.int64)
        if ends or ((dates == dates[0]).all() and dates[0] < 28):
            yield "month", ends, _months
        # Daily data without a weekend, although they cross one.
        longer = [row for row in rows if len(row) > 1]
        between = [(np.diff(row.astype("datetime64[D]").astype(int)), row) for row in longer]
        if (
            np.is_busday(days).all()
            and min(int(each.min()) for each, _ in between) == 1
            and any((each > np.diff(_business_days(row))).any() for each, row in between)
        ):
            yield "business day", False, _business_days
    yield "microsecond", False, _microseconds


def _months(row: np.ndarray) -> np.ndarray:
    return row.astype("datetime64[M]").astype(np.int64)


def _business_days(row: np.ndarray) -> np.ndarray:
    return np.busday_count(np.datetime64("1970-01-01"), row.astype("datetime64[D]"))


def _microseconds(row: np.ndarray) -> np.ndarray:
    return row.astype(np.int64)
