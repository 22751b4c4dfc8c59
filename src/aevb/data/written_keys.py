"""Key columns of a table whose cells are no numbers: ids that are words, times that are dates."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.frame_times import key_of
from aevb.data.frames import read_columns
from aevb.data.long_tables import Keys
from aevb.data.sequence_index import Clock, Key

_MONTH = re.compile(r"\d{4}-\d{2}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([ T].*)?")


def read_written_keys(path: Path, keys: Keys) -> dict[str, Key]:
    """Return the ids that are words and the times that are dates; columns of numbers are left out.

    Dates are ISO dates (2024-03-01), with or without a time, or months (2024-03).

    Raises ValueError for a missing cell, and for a column of times of which only some are dates.
    """
    frame = read_columns(path, keys.names)
    found = {}
    for name in keys.names:
        column = frame.column(name)
        key = _ids(name, column) if name == keys.row else _times(name, column)
        if key is not None:
            found[name] = key
    return found


def _ids(name: str, column: Any) -> Key | None:
    from pyarrow import types  # type: ignore[import-untyped]

    kind = column.type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)):
        return None
    _refuse_missing(name, column)
    return Key(name, np.array(column.to_pylist(), object))


def _times(name: str, column: Any) -> Key | None:
    import narwhals as nw
    from pyarrow import types

    if types.is_timestamp(column.type) or types.is_date(column.type):
        _refuse_missing(name, column)
        series: nw.Series[Any] = nw.from_native(column, series_only=True)
        key = key_of("time", series.alias(name), "pyarrow")
        days = bool((key.values == key.values.astype("datetime64[D]")).all())
        return replace(key, clock=replace(key.clock, days=days))
    if not types.is_string(column.type) or not (first := column[0].as_py()):
        return None
    form = next((form for form in (_MONTH, _DATE) if form.fullmatch(first)), None)
    if form is None:
        return None  # refused as a column of numbers, with its line
    _refuse_missing(name, column)
    cells = column.to_pylist()
    for row, cell in enumerate(cells):
        if form.fullmatch(cell) is None or not _is_date(cell):
            raise ValueError(
                f"its column {name!r} has {cell!r} in row {row} (from 0), but {first!r} in row 0. "
                f"Write all dates of it in one way: 2024-03-01, or 2024-03 for months"
            )
    return Key(name, np.array(cells, "datetime64[us]"), Clock("date", months=form is _MONTH))


def _is_date(cell: str) -> bool:
    try:
        np.datetime64(cell)
    except ValueError:
        return False
    return True


def _refuse_missing(name: str, column: Any) -> None:
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise ValueError(f"row {row} (from 0) has no {name}. Fill in the cell, or drop the line")
