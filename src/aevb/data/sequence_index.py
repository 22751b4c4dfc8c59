"""The index of sequences that came from a frame, and results given back in it.

An index says which line of the frame is which step of which sequence. Results become frames of the
same library: for the steps of the data, for later steps, or with one line per sequence.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from aevb.data.time_steps import DAY, Spacing
from aevb.estimate.places import Pace

ROW, STEP = "row", "step"
# The units of the frequencies of pandas' periods; names changed with its version 2.2.
PERIODS = {
    **dict.fromkeys(("Y", "A"), "year"),
    **{"Q": "quarter", "M": "month", "W": "week", "D": "day", "B": "business day"},
    **dict.fromkeys(("h", "H"), "hour"),
    **dict.fromkeys(("min", "T"), "minute"),
    **dict.fromkeys(("s", "S"), "second"),
}
MONTH = 2_629_800.0  # seconds, on average
SECONDS = {
    **{"year": 12 * MONTH, "quarter": 3 * MONTH, "month": MONTH, "week": 7 * 86_400.0},
    **{"business day": 86_400.0, "day": 86_400.0, "hour": 3600.0, "minute": 60.0, "second": 1.0},
    "microsecond": 1e-6,
}
NO_SPACING = (
    "Every sequence has one step, so the time between two steps is unknown, and later steps have "
    "no time. Use the arrays of the result (mean, quantile), or number the steps 0, 1, 2, … of "
    "longer sequences."
)


@dataclass(frozen=True)
class Clock:
    """How times are written in the frame: numbers, dates, dates of a time zone, or periods."""

    kind: str  # "number", "date" or "period"
    zone: str | None = None
    utc: bool = False  # whether the times inside are those of UTC, not of clocks of the zone
    frequency: Any = None  # of periods
    days: bool = False  # whether dates have no time of day
    months: bool = False  # whether a text table writes dates as months, 2024-03

    def written(self, library: str, times: np.ndarray) -> Any:
        """Return times as a column of the library (for pandas, an index)."""
        if library == "pandas":
            import pandas as pd  # type: ignore[import-untyped]

            if self.kind == "period":
                return pd.PeriodIndex.from_ordinals(times, freq=self.frequency)
            if self.kind == "number":
                return pd.Index(times)
            dates = pd.DatetimeIndex(times)
            if self.utc:
                return dates.tz_localize("UTC").tz_convert(self.zone)
            if self.zone is None:
                return dates
            return dates.tz_localize(self.zone, nonexistent="shift_forward", ambiguous=True)
        if self.zone is not None:
            import narwhals as nw

            series = nw.new_series("time", times, backend=library)  # type: ignore[arg-type]
            if self.utc:
                zoned = series.dt.replace_time_zone("UTC").dt.convert_time_zone(self.zone)
            elif (instants := _instants(times, self.zone)) is None:
                zoned = series.dt.replace_time_zone(self.zone)
            else:
                utc = nw.new_series("time", instants, backend=library)  # type: ignore[arg-type]
                zoned = utc.dt.replace_time_zone("UTC").dt.convert_time_zone(self.zone)
            return zoned.to_native()
        return times.astype("datetime64[D]") if self.days else times

    def distance(self, spacing: Spacing) -> str:
        """Describe the time between two steps.

        >>> Clock("period", frequency="Q-DEC").distance(Spacing("number", 2))
        '2 quarters'
        """
        if self.kind != "period":
            return str(spacing)
        unit = PERIODS.get(str(self.frequency).lstrip("0123456789").partition("-")[0], "period")
        return f"{spacing} {unit}{'s' * (spacing.size != 1)}"

    def pace(self, spacing: Spacing | None) -> Pace | None:
        """Return the time between two steps; None for steps that are numbered.

        Months have the mean length of one.

        >>> Clock("date").pace(Spacing("month", 3))
        Pace(text='3 months', seconds=7889400.0)
        """
        if spacing is None or self.kind == "number":
            return None
        unit, text = spacing.unit, self.distance(spacing)
        if self.kind == "period":
            unit = text.removeprefix(f"{spacing} ").removesuffix("s")
        seconds = SECONDS.get(unit)
        return None if seconds is None else Pace(text, seconds * spacing.size)

    def text(self, time: Any) -> str:
        """Write one time for a message."""
        if self.kind == "period":
            import pandas as pd

            return str(pd.Period(ordinal=int(time), freq=self.frequency))
        if self.kind == "number":
            return f"{time:.15g}"
        if self.months:
            return str(time.astype("datetime64[M]"))
        text = str(time.astype("datetime64[s]")).replace("T", " ")
        return text.removesuffix(" 00:00:00") + (" UTC" if self.utc else "")

    def cells(self, times: np.ndarray) -> list[str]:
        """Write times as the cells of a text table.

        >>> Clock("date", days=True).cells(np.array(["2024-01-01T00:00"], "datetime64[us]"))
        ['2024-01-01']
        """
        if self.kind == "number":
            return [f"{time:.15g}" for time in times]
        if self.zone is not None:
            return [time.isoformat(" ") for time in self.written("pyarrow", times).to_pylist()]
        unit = "M" if self.months else "D" if self.days else "s"
        exact = times.astype(f"datetime64[{unit}]")
        texts = times if (exact != times).any() else exact
        return [text.replace("T", " ") for text in np.datetime_as_string(texts).tolist()]


def _instants(times: np.ndarray, zone: str) -> np.ndarray | None:
    """Return local times as times of UTC; None for a zone that is a fixed offset.

    A time that the clock skips is moved forward, and of a repeated one the first is meant.
    """
    try:
        place = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        return None
    local: list[datetime.datetime] = times.astype("datetime64[us]").tolist()
    shifts = [time.replace(tzinfo=place).utcoffset() or datetime.timedelta() for time in local]
    return times - np.array(shifts, "timedelta64[us]")


@dataclass(frozen=True)
class Key:
    """A column of ids or times: its name, its values, and how times are written."""

    name: Any
    values: np.ndarray
    clock: Clock = field(default_factory=lambda: Clock("number"))
    utc: np.ndarray | None = None  # the times in UTC, if the frame's have a zone
    level: Any = None  # the name of the level of an index of pandas, None if it has no name
    column: bool = True  # whether it is a column, not a level of an index of pandas

    def clocks(
        self, order: np.ndarray, starts: np.ndarray
    ) -> list[tuple[list[np.ndarray], Clock, list[np.ndarray] | None]]:
        """Return the clocks that may space the steps evenly.

        Each has the times by sequence, on this clock and on the other one, if there is another.
        A clock of a zone repeats and skips hours, UTC does not. Days may be even on either.
        """
        wall = np.split(self.values[order], starts[1:])
        if self.utc is None:
            return [(wall, self.clock, None)]
        utc = np.split(self.utc[order], starts[1:])
        in_utc = (utc, replace(self.clock, utc=True), wall)
        return [in_utc] if _hourly(wall) else [(wall, self.clock, utc), in_utc]


def _hourly(rows: list[np.ndarray]) -> bool:
    return any(len(row) > 1 and np.abs(np.diff(row).astype(np.int64)).min() < DAY for row in rows)


@dataclass(frozen=True)
class SequenceIndex:
    """The sequences of a frame: their names, and the times of their steps.

    ``ids`` has one entry per sequence; None if the frame is one sequence. ``times`` holds the times
    of each sequence, in order. ``places`` holds the line of each step in the frame, sequence by
    sequence; None if the results cannot stand on the frame's own lines.
    """

    library: str
    ids: np.ndarray | None
    times: list[np.ndarray]
    spacing: Spacing | None
    clock: Clock
    id_name: Any = ROW
    time_name: Any = STEP
    places: np.ndarray | None = None
    # The names of the columns of each variable.
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # The names of the levels of an index of pandas: of ids and times.
    levels: tuple[Any, Any] = (ROW, STEP)
    # Times with a zone on the other clock: UTC if ``times`` are those of the zone, or the reverse.
    other_clock: list[np.ndarray] | None = None

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.times]

    def ahead(self, steps: int) -> list[np.ndarray]:
        """Return the times of the ``steps`` steps after the end of each sequence."""
        if self.spacing is None:
            raise ValueError(NO_SPACING)
        return [self.spacing.after(row[-1], np.arange(1, steps + 1)) for row in self.times]

    def span(self, row: int) -> str:
        """Describe the times of a sequence."""
        first, last = self.times[row][0], self.times[row][-1]
        return f"{self.clock.text(first)} to {self.clock.text(last)}"

    def drawn(self, times: np.ndarray) -> np.ndarray:
        """Return times as the axis of a picture takes them: numbers or dates."""
        if self.clock.kind != "period":
            return times
        return np.asarray(self.clock.written("pandas", times).to_timestamp().to_numpy())

    def among(self, row: int) -> str:
        """Name a sequence within a message: empty if there is only one."""
        return "" if self.ids is None else f" of {self.id_name} {self.ids[row]}"

    # Frames ---------------------------------------------------------------------------------------

    def past_frame(self, columns: Mapping[str, np.ndarray]) -> Any:
        """Return a frame of values at the steps of the data, each [N, T, …] → one column."""
        found = {name: _joined(value, self.lengths) for name, value in columns.items()}
        times, order = np.concatenate(self.times), None
        if self.places is not None:
            order = np.argsort(self.places)
        return self._frame(times, self._ids(self.lengths), found, order)

    def ahead_frame(self, columns: Mapping[str, np.ndarray], steps: int) -> Any:
        """Return a frame of values at the steps after the data, each [N, steps]."""
        lengths = [steps] * len(self.times)
        found = {name: _joined(value, lengths) for name, value in columns.items()}
        return self._frame(np.concatenate(self.ahead(steps)), self._ids(lengths), found, None)

    def row_frame(self, columns: Mapping[str, np.ndarray]) -> Any:
        """Return a frame with one line per sequence, each value [N]."""
        if self.library == "pandas":
            import pandas as pd

            index = None if self.ids is None else pd.Index(self.ids, name=self.levels[0])
            return pd.DataFrame(dict(columns), index=index)
        ids = {} if self.ids is None else {self.id_name: _column(self.ids)}
        return _native(self.library, {**ids, **columns})

    def _ids(self, lengths: list[int]) -> np.ndarray | None:
        return None if self.ids is None else np.repeat(self.ids, lengths)

    def _frame(
        self,
        times: np.ndarray,
        ids: np.ndarray | None,
        columns: dict[str, np.ndarray],
        order: np.ndarray | None,
    ) -> Any:
        if order is not None:
            times, ids = times[order], None if ids is None else ids[order]
            columns = {name: value[order] for name, value in columns.items()}
        written = self.clock.written(self.library, times)
        if self.library == "pandas":
            import pandas as pd

            index = written.rename(self.levels[1])
            if ids is not None:
                index = pd.MultiIndex.from_arrays([ids, index], names=self.levels)
            return pd.DataFrame(columns, index=index)
        keys = {} if ids is None else {self.id_name: _column(ids)}
        return _native(self.library, {**keys, self.time_name: written, **columns})


def numbered(lengths: Sequence[int]) -> SequenceIndex:
    """Return the index of arrays: rows and steps are counted from 0, in pandas if installed."""
    library = next((name for name in ("pandas", "polars") if find_spec(name)), "pyarrow")
    return SequenceIndex(
        library,
        np.arange(len(lengths)) if len(lengths) > 1 else None,
        [np.arange(length) for length in lengths],
        Spacing("number", 1),
        Clock("number"),
    )


def entry_names(index: SequenceIndex, name: str, size: int) -> Sequence[str]:
    """Name the entries of a variable by the frame's columns, or else by their numbers."""
    names = index.columns.get(name, ())
    if len(names) == size:
        return names
    return [name] if size == 1 else [f"{name}{i}" for i in range(size)]


def _joined(value: np.ndarray, lengths: list[int]) -> np.ndarray:
    return np.concatenate([row[:length] for row, length in zip(value, lengths, strict=True)])


def _column(ids: np.ndarray) -> Any:
    """Return ids as a column: numbers keep their type."""
    return ids if ids.dtype.kind in "iu" else ids.tolist()


def _native(library: str, columns: dict[str, Any]) -> Any:
    if library == "polars":
        import polars as pl

        return pl.DataFrame(columns)
    import pyarrow as pa  # type: ignore[import-untyped]

    return pa.table(columns)
