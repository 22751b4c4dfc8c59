"""Dates written as text: 2024-03-01, 01.03.2024, 01/03/2024, with or without a time of day."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from aevb.tables.reading import FIRST_DAY, LAST_DAY, Cells

LEAST = 3  # known cells of a column of dates
DAY = datetime.timedelta(days=1)
START = datetime.datetime(1970, 1, 1)
SHORT, YEAR = "(?P<{}>[0-9]{{1,2}})", "(?P<year>[0-9]{4})"
TIME = "((?P<mark>[T ])(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})(:(?P<second>[0-9]{2}))?)?"
SHAPES = {
    "year-month-day": re.compile(f"{YEAR}-(?P<month>[0-9]{{2}})-(?P<day>[0-9]{{2}}){TIME}")
} | {
    order: re.compile(
        sign.join([SHORT.format(first), SHORT.format(second), YEAR]).replace(".", "[.]") + TIME
    )
    for order, (first, second), sign in (
        ("day.month.year", ("day", "month"), "."),
        ("day/month/year", ("day", "month"), "/"),
        ("month/day/year", ("month", "day"), "/"),
    )
}


@dataclass(frozen=True)
class DateTexts:
    """How a column writes its dates.

    ``order`` is a key of ``SHAPES``. ``pattern`` is a format of day, month, year, and of hour,
    minute and second if the cells have them.

    >>> found = dates_of("born", ["01.03.2024", "24.12.2023", "05.06.2024"])
    >>> found.day("02.03.2024") - found.day("01.03.2024"), found.texts(np.array([0.0]))
    (1.0, ['01.01.1970'])
    """

    example: str
    order: str
    pattern: str

    @property
    def timed(self) -> bool:
        return "{minute" in self.pattern

    def day(self, text: str) -> float | None:
        """Days since 1970-01-01 of a text; None if it is no date of this form."""
        time = _time(text, self.order)
        return None if time is None or _timed(text) > self.timed else (time - START) / DAY

    def texts(self, days: np.ndarray) -> list[str]:
        """Days since 1970-01-01 as texts, rounded to what the column writes."""
        per = 86_400 if "{second" in self.pattern else 1440 if self.timed else 1
        days = np.clip(days.astype(float), FIRST_DAY.astype(float), LAST_DAY.astype(float))
        seconds = np.rint(days * per).astype(np.int64) * (86_400 // per)
        return [
            self.pattern.format(
                day=time.day,
                month=time.month,
                year=time.year,
                hour=time.hour,
                minute=time.minute,
                second=time.second,
            )
            for time in seconds.astype("datetime64[s]").tolist()
        ]

    def described(self) -> str:
        """The form in words, for the reason of a schema."""
        times = ", with times" if self.timed else ""
        return f"dates such as {self.example!r} ({self.order}{times})"


def _timed(text: str) -> bool:
    return ":" in text


def _time(text: str, order: str) -> datetime.datetime | None:
    """The time of a text in this order; None if it is none."""
    found = SHAPES[order].fullmatch(text.strip())
    if found is None:
        return None
    parts = ("year", "month", "day", "hour", "minute", "second")
    year, month, day, hour, minute, second = (int(found[part] or 0) for part in parts)
    try:
        return datetime.datetime(year, month, day, hour, minute, second)
    except ValueError:
        return None


def is_date_like(text: str) -> bool:
    """Whether a text has the shape of a date, also if there is no such day."""
    return any(shape.fullmatch(text.strip()) for shape in SHAPES.values())


def dates_of(name: str, texts: Iterable[str]) -> DateTexts | None:
    """How a column writes its dates; None if its texts are not all dates of one order.

    Raise ValueError if the day and the month cannot be told apart.
    """
    known = list(dict.fromkeys(texts))
    orders = [order for order in SHAPES if known and all(_time(one, order) for one in known)]
    if not orders:
        return None
    example = max(known, key=len).strip()
    if len(orders) > 1:
        raise ValueError(
            f"Column {name!r} holds dates such as {example!r}, whose first number may be the day "
            f"or the month, because neither number is above 12 in any cell. Write ISO dates "
            f"(2024-03-01), or read the schema with drop=[{name!r}] or "
            f'kinds={{{name!r}: "category"}} (aevb train: --kind {name}=category).'
        )
    (order,) = orders
    cells = [cell for one in known if (cell := SHAPES[order].fullmatch(one.strip()))]
    wide = all(len(cell["day"]) == len(cell["month"]) == 2 for cell in cells)
    pattern = order
    for part in ("day", "month"):
        pattern = pattern.replace(part, f"{{{part}:02}}" if wide else f"{{{part}}}")
    pattern = pattern.replace("year", "{year:04}")
    marks = [cell["mark"] for cell in cells if cell["mark"]]
    if marks:
        seconds = any(cell["second"] for cell in cells)
        pattern += marks[0] + "{hour:02}:{minute:02}" + ":{second:02}" * seconds
    return DateTexts(example, order, pattern)


def why_no_dates(texts: Iterable[str]) -> str:
    """Say why texts with the shape of dates are none; "" if they have not this shape."""
    known = list(dict.fromkeys(texts))
    orders = [
        o for o, shape in SHAPES.items() if all(shape.fullmatch(one.strip()) for one in known)
    ]
    invalid = [one for one in known if not any(_time(one, order) for order in orders)]
    if not orders or 2 * len(invalid) > len(known):
        return ""
    if invalid:
        return f"dates, but there is no day {invalid[0]!r}; correct it, or make it missing"
    wrong = [next((one for one in known if not _time(one, order)), None) for order in orders]
    if None in wrong:
        return ""
    return f"dates in two orders ({' and '.join(map(repr, wrong))}); write all in one"


def read_dates(cells: Cells) -> tuple[Cells, DateTexts | None]:
    """A text column of different dates as days, and their form; else the column, and None."""
    if cells.type != "text" or (~cells.missing).sum() < LEAST:
        return cells, None
    dates = dates_of(cells.name, cells.values[~cells.missing].tolist())
    if dates is None:
        return cells, None
    found = with_dates(cells, dates)
    if len(np.unique(found.values[~found.missing])) < 2:
        return cells, None
    return found, dates


def with_iso_dates(cells: Cells) -> Cells:
    """A text column of ISO dates as days; any other column as it is."""
    known = cells.values[~cells.missing].tolist() if cells.type == "text" else []
    if not known or not all(_time(text, "year-month-day") for text in dict.fromkeys(known)):
        return cells
    return with_dates(cells, iso_dates(timed=any(map(_timed, known))))


def iso_dates(*, timed: bool) -> DateTexts:
    time = " {hour:02}:{minute:02}:{second:02}" * timed
    return DateTexts("2024-03-01", "year-month-day", "{year:04}-{month:02}-{day:02}" + time)


def with_dates(cells: Cells, dates: DateTexts) -> Cells:
    """The same column, with days since 1970-01-01 for its texts; other types as they are.

    Raise ValueError for a text that is no date of the form ``dates``.
    """
    if cells.type != "text":
        return cells
    texts = cells.values[~cells.missing].tolist()
    days = {text: dates.day(text) for text in dict.fromkeys(texts)}
    wrong = next((text for text, day in days.items() if day is None), None)
    if wrong is not None:
        row = int(np.flatnonzero((cells.values == wrong) & ~cells.missing)[0])
        raise ValueError(
            f"Column {cells.name!r} had {dates.described()} when the schema was read, and now "
            f"holds {wrong!r} in row {row}, from 0. Write all its dates in the same form, or "
            f"convert them to dates, or make the cell missing."
        )
    values = np.full(len(cells.values), np.nan)
    values[~cells.missing] = [days[text] for text in texts]
    return replace(cells, type="datetime" if dates.timed else "date", values=values)
