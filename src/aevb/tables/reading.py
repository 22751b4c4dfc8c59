"""Read one column of any library into plain arrays."""

from __future__ import annotations

import datetime
import math
import numbers
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import narwhals as nw
import numpy as np

EPOCH = datetime.date(1970, 1, 1)
FIRST_DAY, LAST_DAY = np.datetime64("0001-01-01"), np.datetime64("9999-12-31")  # of Python's dates
# Words that other programs write for a missing cell. Text cells are compared without case. Words
# that are often levels of their own ("none", "null", "?") are not among them.
MISSING_WORDS = ("", "na", "n/a", "#n/a", "<na>", "nan")
# The metadata of a pyarrow field: words that its reader made missing, and how often, as JSON.
WORDS_METADATA = b"missing words"


@dataclass(frozen=True)
class Cells:
    """One column as plain arrays.

    ``type`` is "number", "boolean", "text", "category", "date" or "datetime". ``values`` are
    float64 for numbers, booleans and dates (days since 1970-01-01), and objects otherwise; the
    values of missing cells have no meaning. ``levels`` are those that a categorical type declares.
    """

    name: str
    type: str
    dtype: str
    values: np.ndarray
    missing: np.ndarray
    levels: tuple[Any, ...] | None = None
    ordered: bool = False
    words: Mapping[str, int] = field(default_factory=dict)  # texts made missing, and how often


def cells_of_series(name: str, series: nw.Series[Any]) -> Cells:
    dtype, shown = series.dtype, str(series.dtype)
    missing = series.is_null().to_numpy().astype(bool)
    if dtype.is_numeric():
        values = _floats(name, series, missing)
        return Cells(name, "number", shown, values, missing | np.isnan(values))
    if dtype == nw.Boolean:
        values = series.fill_null(False).to_numpy().astype(float)
        return Cells(name, "boolean", shown, values, missing)
    if dtype in (nw.Categorical, nw.Enum):
        values, levels, ordered = _declared_levels(name, series)
        return Cells(name, "category", shown, values, missing, levels, ordered)
    if dtype == nw.String:
        native = series.to_native()  # pyarrow makes one object of equal texts, and quickly
        texts = native.to_numpy() if hasattr(native, "combine_chunks") else series.to_list()
        return Cells(name, "text", shown, _objects(texts), missing)
    if (zone := getattr(getattr(series.to_native(), "dtype", None), "tz", None)) is not None:
        # narwhals does not know the names of all zones of pandas.
        shown = _zoned(name, zone, series.to_native().dtype.unit)
    if dtype in (nw.Date, nw.Datetime) or zone is not None:
        kind = "date" if dtype == nw.Date else "datetime"
        return Cells(name, kind, shown, _days_of_series(name, series), missing)
    if dtype == nw.Object or dtype == nw.Unknown:
        return _of_objects(name, _objects(series.to_list()), shown)
    raise _refused(name, shown)


def _floats(name: str, series: nw.Series[Any], missing: np.ndarray) -> np.ndarray:
    if series.dtype == nw.Decimal:
        return np.array([math.nan if v is None else float(v) for v in series.to_list()])
    values = (series.cast(nw.Float64) if missing.any() else series).to_numpy()
    return np.where(missing, np.nan, values.astype(float))


def _declared_levels(name: str, series: nw.Series[Any]) -> tuple[np.ndarray, tuple[Any, ...], bool]:
    """The cells of a categorical type, its levels, and whether they are ordered."""
    native = series.to_native()
    if hasattr(native, "combine_chunks"):  # pyarrow
        whole = native.combine_chunks()
        levels, ordered = whole.dictionary.to_pylist(), bool(whole.type.ordered)
        values = _objects([*levels, None])[whole.indices.fill_null(0).to_numpy()]
    else:
        values = _objects(series.to_list())
        if hasattr(native, "cat") and hasattr(native.cat, "categories"):  # pandas
            levels, ordered = native.cat.categories.tolist(), bool(native.cat.ordered)
        elif isinstance(series.dtype, nw.Enum):
            levels, ordered = list(series.dtype.categories), True
        else:
            levels, ordered = sorted({value for value in values if value is not None}), False
    for level in levels:
        if not isinstance(level, str | bool | int | float):
            raise ValueError(
                f"Column {name!r} has the category {level!r} of type {type(level).__name__}; "
                f"categories are text or numbers. Convert it: frame[{name!r}].astype(str)."
            )
    return values, tuple(levels), ordered


def _objects(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    return np.fromiter(values, object, len(values))


def cells_of_array(name: str, column: np.ndarray) -> Cells:
    kind = column.dtype.kind
    if kind in "iuf":
        values = column.astype(float)
        return Cells(name, "number", column.dtype.name.capitalize(), values, np.isnan(values))
    if kind == "b":
        return Cells(name, "boolean", "Boolean", column.astype(float), np.zeros(len(column), bool))
    if kind == "U":
        return Cells(name, "text", "String", _objects(column.tolist()), np.zeros(len(column), bool))
    if kind == "M":
        days = _days_of_times(name, column)
        missing = np.isnan(days)
        type_, shown = ("number", "Float64") if missing.all() else ("datetime", "Datetime")
        return Cells(name, type_, shown, days, missing)
    if kind == "O":
        return _of_objects(name, _objects(column.tolist()), "Object")
    raise _refused(name, column.dtype.name)


TYPES: dict[str, Any] = {
    "boolean": bool | np.bool_,
    "number": numbers.Real | Decimal,
    "text": str,
    "datetime": datetime.datetime,
    "date": datetime.date,
}


def _type_of(kind: type) -> str | None:
    """The type of Python objects of a class; None if no column has it."""
    if kind.__name__ in ("NoneType", "NAType", "NaTType"):
        return "missing"
    return next((name for name, kinds in TYPES.items() if issubclass(kind, kinds)), None)


def _of_objects(name: str, values: np.ndarray, shown: str) -> Cells:
    """A column of Python objects, which must all be of one type."""
    classes = list(map(type, values.tolist()))
    types = {kind: _type_of(kind) for kind in set(classes)}
    each = np.fromiter(map(types.get, classes), object, len(classes))
    if None in types.values():
        row = each.tolist().index(None)
        raise _refused(name, classes[row].__name__, row)
    missing = each == "missing"
    numeric = np.flatnonzero(each == "number")
    missing[numeric] = [value != value for value in values[numeric].tolist()]
    rows = {kind: np.flatnonzero((each == kind) & ~missing) for kind in TYPES}
    first = {kind: (int(at[0]), values[at[0]]) for kind, at in rows.items() if len(at)}
    if len(first) > 1:
        examples = ", ".join(
            f"{kind} ({value!r} in row {i})"
            for kind, (i, value) in sorted(first.items(), key=lambda item: item[1][0])
        )
        raise ValueError(
            f"Column {name!r} mixes types: {examples}; rows count from 0. Make all its cells one "
            f"type: frame[{name!r}].astype(str) for categories, or numbers with missing cells."
        )
    kind = next(iter(first), "number")
    if kind == "datetime":
        shown = _checked_zone(name, values, missing, shown)
    if kind == "text":
        return Cells(name, "text", "String", values, missing)
    found, number = np.full(len(values), np.nan), _days if kind in ("date", "datetime") else float
    found[~missing] = [number(value) for value in values[~missing].tolist()]
    stated = {"date": "Date", "datetime": shown, "boolean": "Boolean", "number": "Float64"}[kind]
    return Cells(name, kind, stated, found, missing)


def _checked_zone(name: str, values: np.ndarray, missing: np.ndarray, shown: str) -> str:
    """The type of times, with the zone of the first one if it has a zone."""
    known = np.flatnonzero(~missing)
    zones = [values[i].tzinfo for i in known.tolist()]
    without = [zone is None for zone in zones]
    if any(without) and not all(without):
        first = sorted((without.index(True), without.index(False)))
        examples = " and ".join(f"{values[known[i]]} in row {known[i]}" for i in first)
        raise ValueError(
            f"Column {name!r} mixes times with and without a time zone ({examples}; rows count "
            f"from 0). Give all the same zone."
        )
    if zones[0] is None or zone_of(shown) is not None:
        return shown
    return _zoned(name, zones[0])


def _zoned(name: str, zone: datetime.tzinfo, unit: str = "us") -> str:
    """The type of times in a zone."""
    try:
        time_zone(str(zone))
    except ValueError:
        raise ValueError(
            f"Column {name!r} has times in the zone {str(zone)!r}, which has no name of the time "
            f'zone database. Convert it: frame[{name!r}].dt.tz_convert("UTC").'
        ) from None
    return f"Datetime(time_unit='{unit}', time_zone='{zone}')"


def zone_of(dtype: str) -> str | None:
    """The time zone of a type; None if its times have no zone."""
    found = re.search(r"time_zone='([^']+)'", dtype)
    return None if found is None else found[1]


def time_zone(name: str) -> datetime.tzinfo:
    """The zone of a name such as "Europe/Berlin", "+02:00" or "UTC+02:00"."""
    offset = re.fullmatch(r"(?:UTC)?([+-])(\d\d):(\d\d)", name)
    if offset is None:
        try:
            return ZoneInfo(name)
        except (ValueError, OSError, ZoneInfoNotFoundError):
            raise ValueError(f"there is no time zone {name!r}") from None
    size = datetime.timedelta(hours=int(offset[2]), minutes=int(offset[3]))
    return datetime.timezone(size if offset[1] == "+" else -size)


def _days_of_series(name: str, series: nw.Series[Any]) -> np.ndarray:
    native = series.to_native()
    if not hasattr(native, "iloc"):
        times = native.to_numpy()
        # pyarrow makes pandas' objects of nanoseconds, polars none.
        pandas = hasattr(native, "combine_chunks") and times.dtype == "datetime64[ns]"
        return _days_of_times(name, times, pandas=pandas)
    if series.dtype == nw.Date:
        return _days_of_times(name, series.to_arrow().to_numpy(zero_copy_only=False))
    unit = getattr(native.dtype, "unit", None) or getattr(series.dtype, "time_unit", "us")
    return _days_of_times(name, native.to_numpy(f"datetime64[{unit}]"), pandas=True)


def _days_of_times(name: str, times: np.ndarray, *, pandas: bool = False) -> np.ndarray:
    """Days since 1970-01-01 of datetime64 cells in UTC; NaN where a cell is missing.

    They equal those of Python objects to the last bit (:func:`_days`): pandas divides float64
    numbers of nanoseconds or microseconds, Python whole microseconds.
    """
    missing, days = np.isnat(times), times.astype("datetime64[D]")
    outside = ~missing & ((days < FIRST_DAY) | (days > LAST_DAY))
    if outside.any():
        row = int(np.argmax(outside))
        raise ValueError(
            f"Column {name!r} has the date {days[row]} in row {row}, outside the years 1 to 9999. "
            f"Correct it, or make it missing."
        )
    fine = pandas and times.dtype == "datetime64[ns]"
    ticks = times.astype(f"datetime64[{'ns' if fine else 'us'}]").astype(np.int64)
    found = ticks / (864e11 if fine else 864e8)
    if not pandas:  # float64 rounds far ticks before it divides
        far = np.flatnonzero(np.abs(ticks) > 2**53)
        found[far] = [tick / 86_400_000_000 for tick in ticks[far].tolist()]
    return np.where(missing, np.nan, found)


def _days(value: Any) -> float:
    """Days since 1970-01-01, with the time of day as a fraction."""
    if not isinstance(value, datetime.datetime):
        return float((value - EPOCH).days)
    zone = value.tzinfo
    start = datetime.datetime(1970, 1, 1, tzinfo=None if zone is None else datetime.UTC)
    return (value - start) / datetime.timedelta(days=1)


def _refused(name: str, what: str, row: int | None = None) -> ValueError:
    fixes = {
        "Duration": f"convert it to a number: frame[{name!r}].dt.total_seconds()",
        "timedelta": f"convert it to a number: frame[{name!r}].dt.total_seconds()",
        "Time": "convert it to a number of hours",
        "bytes": f"decode it to text, for example [cell.decode() for cell in table[{name!r}]]",
        "Binary": "decode it to text",
        "complex": "split it into a real and an imaginary column",
    }
    fix = next(
        (fix for key, fix in fixes.items() if key in what),
        "drop it, or make columns of its parts: each cell is one number, text, truth value or date",
    )
    place = "" if row is None else f" (row {row}, from 0)"
    return ValueError(
        f"Column {name!r} holds cells of type {what}{place}, which no likelihood fits: {fix}."
    )


def with_words(cells: Cells, words: Sequence[str], levels: Collection[Any] = ()) -> Cells:
    """The same column; text cells that equal one of the words, and no level, are missing.

    A categorical type declares its levels, so its cells keep their texts.
    """
    if cells.type != "text":
        return cells
    lower = frozenset(words)

    def marks(value: Any) -> bool:
        return isinstance(value, str) and value.strip().lower() in lower and value not in levels

    values = cells.values.tolist()
    marking = {value for value in set(values) if marks(value)}
    if not marking:
        return cells
    marked = np.fromiter(map(marking.__contains__, values), bool, len(values))
    found = Counter(cells.values[marked].tolist())
    return replace(cells, missing=cells.missing | marked, words=dict(cells.words) | found)
