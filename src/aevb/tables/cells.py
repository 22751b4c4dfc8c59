"""Cells of a column in the type of the caller's frame."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aevb.tables.columns import Column, spelled
from aevb.tables.date_texts import iso_dates
from aevb.tables.frames import new_frame
from aevb.tables.reading import FIRST_DAY, LAST_DAY, time_zone, zone_of
from aevb.tables.schema import Schema


def typed(column: Column, values: np.ndarray, dtype: str, *, rounded: bool = True) -> list[Any]:
    """Values of a column as Python objects of a type.

    Numbers are rounded if the type is an integer and all cells of the schema's table were whole,
    unless ``rounded`` is False.
    Amounts and dates that the column writes as text are texts in the same form.
    """
    if (amounts := column.facts.amounts) is not None and dtype == "String":
        values = column.bounded(values, 10.0**-amounts.decimals)
        return [amounts.text(number) for number in values.tolist()]
    if (dates := column.facts.dates) is not None and not dtype.startswith("Date"):
        return dates.texts(values)
    if column.listed:
        levels = values.tolist()
        texts = any(isinstance(one, str) for one in column.levels)
        if dtype == "String" and not texts:
            return [spelled(level) for level in levels]
        whole = all(str(one).lstrip("-").isdigit() for one in column.levels)
        if texts and whole and dtype.startswith(("Int", "UInt")):  # 2007 of the level "2007"
            return [int(level) for level in levels]
        if dtype == "Boolean":
            return [bool(level) for level in levels]
        if dtype.startswith("Float") and not texts:
            return [float(level) for level in levels]
        return list(levels)
    if column.kind == "date":
        per_day = column.facts.per_day
        values = values if per_day is None else np.rint(values * per_day) / per_day
        if dtype == "String":
            return iso_dates(timed=column.dtype != "Date" and per_day != 1).texts(values)
        return _dates(values, dtype if dtype.startswith("Date") else column.dtype)
    bits = re.fullmatch(r"(u?)int(\d+)", dtype.lower())
    if bits is not None and column.facts.whole and rounded:
        bound = np.iinfo(bits[0])
        whole = np.clip(np.rint(values), float(bound.min), float(bound.max))
        return [int(number) for number in column.bounded(whole, 1.0).tolist()]
    return column.bounded(values.astype(float), 0.0).tolist()


def _dates(days: np.ndarray, dtype: str) -> list[Any]:
    """Days since 1970-01-01 as dates or times of Python, which has the years 1 to 9999."""
    days = np.clip(days, FIRST_DAY.astype(float), LAST_DAY.astype(float))
    if dtype == "Date":
        return list(np.rint(days).astype("datetime64[D]").tolist())
    # pandas refuses times that are finer than the unit of the column.
    finest = {"s": 10**6, "ms": 1000}.get((re.findall("time_unit='([^']+)'", dtype) or [""])[0], 1)
    ticks = np.rint(days * 864e8 / finest).astype(np.int64) * finest
    times = ticks.astype("datetime64[us]").tolist()
    if (name := zone_of(dtype)) is None:
        return list(times)
    zone = time_zone(name)
    return [time.replace(tzinfo=datetime.UTC).astimezone(zone) for time in times]


def frame_of(schema: Schema, values: Mapping[str, np.ndarray]) -> Any:
    """A new frame of the schema's library, with its names and types."""
    columns: dict[Any, Any] = {}
    for column in schema.used:
        numbers = values[column.name]
        if not column.listed and column.facts.whole and column.kind != "date":
            numbers = column.bounded(np.rint(numbers), 1.0)
        cells = typed(column, numbers, column.dtype)
        name = int(column.name) if schema.integer_names else column.name
        columns[name] = _series(schema.library, column, cells)
    return new_frame(schema.library, columns)


def _series(library: str, column: Column, cells: Sequence[Any]) -> Any:
    """Cells as a column of a library."""
    dtype, category = column.dtype, column.dtype.startswith(("Categorical", "Enum"))
    if library == "polars":
        import polars as pl

        if category:
            kind = (
                pl.Enum([str(level) for level in column.levels])
                if dtype.startswith("Enum")
                else pl.Categorical
            )
            return pl.Series(column.name, cells, dtype=kind)
        return _cast_polars(pl, column.name, cells, dtype)
    if library == "pyarrow":
        import pyarrow as pa  # type: ignore[import-untyped]

        if category:
            at = {level: i for i, level in enumerate(column.levels)}
            return pa.DictionaryArray.from_arrays(
                pa.array([at[cell] for cell in cells], pa.int32()),
                pa.array(column.levels),
                ordered=column.facts.ordered,
            )
        return _cast_pyarrow(pa, cells, dtype)
    if category and library == "pandas":
        import pandas as pd  # type: ignore[import-untyped]

        return pd.Categorical(cells, categories=list(column.levels), ordered=column.facts.ordered)
    if dtype.startswith(("Int", "UInt", "Float")):
        return np.array(cells, dtype=dtype.lower())
    if dtype == "Boolean":
        return np.array(cells, dtype=bool)
    return cells


def _cast_polars(pl: Any, name: str, cells: Sequence[Any], dtype: str) -> Any:
    if dtype.startswith("Datetime"):
        unit, zone = (re.search(f"time_{key}='([^']+)'", dtype) for key in ("unit", "zone"))
        kind = pl.Datetime(unit[1] if unit else "us", zone[1] if zone else None)
    else:
        kind = getattr(pl, dtype, None) if dtype.isidentifier() and dtype != "Object" else None
    return pl.Series(name, cells, dtype=kind)


def _cast_pyarrow(pa: Any, cells: Sequence[Any], dtype: str) -> Any:
    names = {"Boolean": "bool", "String": "string", "Date": "date32"}
    name = names.get(dtype, dtype.lower() if dtype.startswith(("Int", "UInt", "Float")) else "")
    if dtype.startswith("Datetime"):
        unit, zone = (re.search(f"time_{key}='([^']+)'", dtype) for key in ("unit", "zone"))
        return pa.array(cells, pa.timestamp(unit[1] if unit else "us", zone[1] if zone else None))
    return pa.array(cells, pa.type_for_alias(name) if name else None)
