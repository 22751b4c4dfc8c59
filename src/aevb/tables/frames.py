"""Read frames of several libraries into plain arrays, and give results back in the same library.

pandas, polars and pyarrow tables are read through narwhals. A dictionary of columns and a
two-dimensional array are read directly. pandas frames keep their index.
"""

from __future__ import annotations

import datetime
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

import narwhals as nw
import numpy as np

EPOCH = datetime.date(1970, 1, 1)
MICROSECONDS = 86_400_000_000  # per day
# Words that other programs write for a missing cell. Text cells are compared without case.
MISSING_WORDS = ("", "?", "na", "n/a", "#n/a", "<na>", "nan", "null", "none")


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
    words: tuple[str, ...] = ()  # texts of this column that mark a missing cell


@dataclass(frozen=True)
class Table:
    """A frame of any library: its columns, and how to give results back beside them."""

    native: Any
    library: str
    names: tuple[str, ...]
    rows: int

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def cells(self, name: str, words: Sequence[str] = MISSING_WORDS) -> Cells:
        """Read one column. Text cells that equal a missing word are missing."""
        position = self.names.index(name)
        if self.library in ("dict", "array"):
            found = _of_array(name, self.native[name])
        else:
            found = _of_series(name, self._series(position))
        return _with_words(found, words)

    def _series(self, position: int) -> nw.Series[Any]:
        if self.library == "pandas":
            return nw.from_native(self.native.iloc[:, position], series_only=True)
        frame: nw.DataFrame[Any] = nw.from_native(self.native, eager_only=True)
        return frame[self.names[position]]

    def beside(self, columns: Mapping[str, np.ndarray | Sequence[Any]]) -> Any:
        """Return a new frame of the same library, with the same index and these columns."""
        found = new_frame(self.library, columns)
        if self.library == "pandas":
            found.index = self.native.index
        return found

    def replaced(self, filled: Mapping[str, tuple[np.ndarray, Sequence[Any]]]) -> Any:
        """Return a copy of the frame with some cells replaced.

        ``filled`` maps a column to the rows to replace and their new values. All other cells keep
        their values and types, bit for bit.
        """
        if self.library in ("dict", "array"):
            columns = {name: np.array(self.native[name], copy=True) for name in self.names}
            for name, (rows, values) in filled.items():
                columns[name][rows] = values
            return new_frame("dict", columns)
        return _REPLACE[self.library](self, filled)


def read_table(data: Any) -> Table:
    """Read a frame, a dictionary of columns or a two-dimensional array.

    Raise TypeError or ValueError if it is none of these, has no column, or repeats a name.
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, Mapping):
        return _of_mapping(data)
    library = _library(data)
    if library == "polars" and not hasattr(data, "get_columns"):
        data = data.collect()
    if library is not None:
        return _checked_names(data, library)
    if hasattr(data, "__array__") or isinstance(data, list | tuple):
        return _of_matrix(data)
    raise TypeError(
        f"A table is a pandas or polars DataFrame, a pyarrow Table, a dictionary of columns or a "
        f"two-dimensional array, got {type(data).__name__}."
    )


def _library(data: Any) -> str | None:
    """The library of a frame; None if it is no frame."""
    kind = type(data)
    library = kind.__module__.partition(".")[0]
    if library == "pandas" and kind.__name__ == "Series":
        raise TypeError(
            "A table has columns, got a pandas Series. Make it a frame: series.to_frame()."
        )
    if library == "polars" and kind.__name__ == "Series":
        raise TypeError(
            "A table has columns, got a polars Series. Make it a frame: series.to_frame()."
        )
    frames = {"pandas": ("DataFrame",), "polars": ("DataFrame", "LazyFrame"), "pyarrow": ("Table",)}
    for name, classes in frames.items():
        if any(
            base.__module__.partition(".")[0] == name and base.__name__ in classes
            for base in kind.__mro__
        ):
            return name
    return None


def _checked_names(data: Any, library: str) -> Table:
    given = list(data.column_names if library == "pyarrow" else data.columns)
    for name in given:
        if not isinstance(name, str | int | np.integer):
            raise ValueError(
                f"A column is named {name!r}; names are text or whole numbers. Rename it, for "
                f"example frame.columns = [str(c) for c in frame.columns]."
            )
    return Table(data, library, _unique([str(name) for name in given]), len(data))


def _unique(names: list[str]) -> tuple[str, ...]:
    if not names:
        raise ValueError("The table has no columns.")
    repeated = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if repeated:
        raise ValueError(
            f"{len(repeated)} column name{'s' * (len(repeated) > 1)} occur more than once: "
            f"{', '.join(map(repr, repeated[:5]))}. Rename them, so that each name has one column."
        )
    return tuple(names)


def _of_mapping(data: Mapping[Any, Any]) -> Table:
    columns: dict[str, np.ndarray] = {}
    names = _unique([str(name) for name in data])
    for name, values in zip(names, data.values(), strict=True):
        column = _array(values)
        if column.ndim == 2 and column.shape[1] == 1 and column.dtype != object:
            column = column[:, 0]
        if column.ndim != 1:
            raise ValueError(
                f"Column {name!r} has {column.ndim} axes; a column of a table is a list of cells."
            )
        columns[name] = column
    lengths = {name: len(column) for name, column in columns.items()}
    first, n = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != n:
            raise ValueError(
                f"Columns have different lengths: {first!r} has {n} rows and {name!r} has {length}."
            )
    return Table(columns, "dict", names, n)


def _of_matrix(data: Any) -> Table:
    matrix = np.asarray(data)
    if matrix.ndim != 2:
        raise ValueError(
            f"An array of {matrix.ndim} axes is no table: expected [rows, columns]. A single "
            f"column is array[:, None]."
        )
    if matrix.shape[1] == 0:
        raise ValueError("The table has no columns.")
    names = tuple(str(j) for j in range(matrix.shape[1]))
    return Table({name: matrix[:, j] for j, name in enumerate(names)}, "array", names, len(matrix))


def _array(values: Any) -> np.ndarray:
    """A column as an array; a list of mixed things stays a list of objects."""
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise ValueError(f"A column is a list or an array of cells, got {values!r}.")
    if isinstance(values, np.ma.MaskedArray):
        found = np.array(values.data, dtype=object)
        found[np.ma.getmaskarray(values)] = None
        return found
    if isinstance(values, np.ndarray) or hasattr(values, "__array__"):
        return np.asarray(values)
    kinds = {type(value) for value in values}
    if kinds <= {int, float, bool} and not (bool in kinds and len(kinds) > 1):
        return np.asarray(values)
    found = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        found[i] = value
    return found


# Reading a column ---------------------------------------------------------------------------------


def _of_series(name: str, series: nw.Series[Any]) -> Cells:
    dtype, shown = series.dtype, str(series.dtype)
    missing = series.is_null().to_numpy().astype(bool)
    if dtype.is_numeric():
        values = _floats(name, series, missing)
        return Cells(name, "number", shown, values, missing | np.isnan(values))
    if dtype == nw.Boolean:
        values = np.array([bool(v) for v in series.fill_null(False).to_list()], dtype=float)
        return Cells(name, "boolean", shown, values, missing)
    if dtype in (nw.Categorical, nw.Enum):
        levels, ordered = _declared_levels(name, series)
        return Cells(
            name,
            "category",
            shown,
            np.array(series.to_list(), dtype=object),
            missing,
            levels,
            ordered,
        )
    if dtype == nw.String:
        return Cells(name, "text", shown, _objects(series.to_list()), missing)
    if dtype in (nw.Date, nw.Datetime):
        return _of_objects(name, _objects(series.to_list()), shown)
    if dtype == nw.Object or dtype == nw.Unknown:
        return _of_objects(name, _objects(series.to_list()), shown)
    raise _refused(name, shown)


def _floats(name: str, series: nw.Series[Any], missing: np.ndarray) -> np.ndarray:
    if series.dtype == nw.Decimal:
        return np.array([math.nan if v is None else float(v) for v in series.to_list()])
    values = (series.cast(nw.Float64) if missing.any() else series).to_numpy()
    return np.where(missing, np.nan, values.astype(float))


def _declared_levels(name: str, series: nw.Series[Any]) -> tuple[tuple[Any, ...], bool]:
    native = series.to_native()
    if hasattr(native, "cat") and hasattr(native.cat, "categories"):  # pandas
        levels, ordered = native.cat.categories.tolist(), bool(native.cat.ordered)
    elif hasattr(native, "combine_chunks"):  # pyarrow
        whole = native.combine_chunks()
        levels, ordered = whole.dictionary.to_pylist(), bool(whole.type.ordered)
    elif isinstance(series.dtype, nw.Enum):
        levels, ordered = list(series.dtype.categories), True
    else:
        levels, ordered = sorted({value for value in series.to_list() if value is not None}), False
    for level in levels:
        if not isinstance(level, str | bool | int | float):
            raise ValueError(
                f"Column {name!r} has the category {level!r} of type {type(level).__name__}; "
                f"categories are text or numbers. Convert it: frame[{name!r}].astype(str)."
            )
    return tuple(levels), ordered


def _objects(values: list[Any]) -> np.ndarray:
    found = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        found[i] = value
    return found


def _of_array(name: str, column: np.ndarray) -> Cells:
    kind = column.dtype.kind
    if kind in "iuf":
        values = column.astype(float)
        return Cells(name, "number", column.dtype.name.capitalize(), values, np.isnan(values))
    if kind == "b":
        return Cells(name, "boolean", "Boolean", column.astype(float), np.zeros(len(column), bool))
    if kind in "US":
        return Cells(name, "text", "String", _objects(column.tolist()), np.zeros(len(column), bool))
    if kind in "MO":
        return _of_objects(
            name,
            _objects(column.tolist() if kind == "O" else column.astype("datetime64[us]").tolist()),
            "Object" if kind == "O" else "Datetime",
        )
    raise _refused(name, column.dtype.name)


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, numbers.Real | Decimal) and value != value)
        or type(value).__name__ in ("NAType", "NaTType")
    )


TYPES: dict[str, Any] = {
    "boolean": bool | np.bool_,
    "number": numbers.Real | Decimal,
    "text": str,
    "datetime": datetime.datetime,
    "date": datetime.date,
}


def _of_objects(name: str, values: np.ndarray, shown: str) -> Cells:
    """A column of Python objects, which must all be of one type."""
    missing = np.fromiter((_is_missing(value) for value in values), bool, len(values))
    first: dict[str, tuple[int, Any]] = {}
    for i in np.flatnonzero(~missing).tolist():
        value = values[i]
        kind = next((kind for kind, types in TYPES.items() if isinstance(value, types)), None)
        if kind is None:
            raise _refused(name, type(value).__name__, i)
        first.setdefault(kind, (i, value))
    if len(first) > 1:
        examples = ", ".join(f"{kind} ({value!r} in row {i})" for kind, (i, value) in first.items())
        raise ValueError(
            f"Column {name!r} mixes types: {examples}. Make all its cells one type: "
            f"frame[{name!r}].astype(str) for categories, or numbers with missing cells."
        )
    kind = next(iter(first), "number")
    if kind == "text":
        return Cells(name, "text", "String", values, missing)
    found = np.full(len(values), np.nan)
    for i in np.flatnonzero(~missing).tolist():
        found[i] = _days(values[i]) if kind in ("date", "datetime") else float(values[i])
    stated = {"date": "Date", "datetime": shown, "boolean": "Boolean", "number": "Float64"}[kind]
    return Cells(name, kind, stated, found, missing)


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
        "complex": "split it into a real and an imaginary column",
    }
    fix = next(
        (fix for key, fix in fixes.items() if key in what),
        "drop it, or make columns of its parts: each cell is one number, text, truth value or date",
    )
    place = "" if row is None else f" (row {row})"
    return ValueError(
        f"Column {name!r} holds cells of type {what}{place}, which no likelihood fits: {fix}."
    )


def _with_words(cells: Cells, words: Sequence[str]) -> Cells:
    """The same column; text cells that equal one of the words are missing."""
    if cells.type not in ("text", "category"):
        return cells
    lower = frozenset(words)

    def marks(value: Any) -> bool:
        return isinstance(value, str) and value.strip().lower() in lower

    values = cells.values.tolist()
    found = {value for value in set(values) if marks(value)}
    if not found:
        return cells
    marked = np.fromiter((value in found for value in values), bool, len(values))
    levels = cells.levels
    return replace(
        cells,
        missing=cells.missing | marked,
        levels=None if levels is None else tuple(v for v in levels if not marks(v)),
        words=tuple(sorted(found)),
    )


# Giving frames back -------------------------------------------------------------------------------


def new_frame(library: str, columns: Mapping[str, Any]) -> Any:
    """Return a new frame of a library from arrays.

    A dictionary or an array gives a pandas frame if pandas is installed, else a dictionary.
    """
    if library in ("dict", "array", "pandas"):
        if find_spec("pandas") is None:
            return dict(columns)
        import pandas as pd  # type: ignore[import-untyped]

        return pd.DataFrame(dict(columns))
    if library == "polars":
        import polars as pl

        return pl.DataFrame(dict(columns))
    import pyarrow as pa  # type: ignore[import-untyped]

    return pa.table(dict(columns))


def _replace_pandas(table: Table, filled: Mapping[str, tuple[np.ndarray, Sequence[Any]]]) -> Any:
    frame = table.native.copy()
    for name, (rows, values) in filled.items():
        position = table.names.index(name)
        column = frame.iloc[:, position].copy()
        column.iloc[rows] = list(values)
        frame.isetitem(position, column)
    return frame


def _replace_polars(table: Table, filled: Mapping[str, tuple[np.ndarray, Sequence[Any]]]) -> Any:
    import polars as pl

    found = []
    for name, (rows, values) in filled.items():
        column = table.native[name]
        cells, kept = [None] * len(column), np.ones(len(column), bool)
        kept[rows] = False
        for row, value in zip(rows.tolist(), values, strict=True):
            cells[row] = value
        new = pl.Series(name, cells, dtype=column.dtype, strict=False)
        found.append(column.zip_with(pl.Series(kept), new))
    return table.native.with_columns(found)


def _replace_pyarrow(table: Table, filled: Mapping[str, tuple[np.ndarray, Sequence[Any]]]) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    frame = table.native
    for name, (rows, values) in filled.items():
        position = table.names.index(name)
        field, column = frame.schema.field(position), frame.column(position)
        listed = pa.types.is_dictionary(field.type)  # if_else takes no dictionary arrays
        cells: list[Any] = column.to_pylist() if listed else [None] * len(column)
        kept = np.ones(len(column), bool)
        kept[rows] = False
        for row, value in zip(rows.tolist(), values, strict=True):
            cells[row] = value
        new = pa.array(cells, field.type)
        frame = frame.set_column(
            position, field, new if listed else pc.if_else(pa.array(kept), column, new)
        )
    return frame


_REPLACE = {
    "pandas": _replace_pandas,
    "polars": _replace_polars,
    "pyarrow": _replace_pyarrow,
}
