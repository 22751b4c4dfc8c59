"""Read frames of several libraries into plain arrays, and give results back in the same library.

pandas, polars and pyarrow tables are read through narwhals. A dictionary of columns and a
two-dimensional array are read directly. pandas frames keep their index.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import narwhals as nw
import numpy as np

from aevb.tables.amounts import Amounts, with_amounts
from aevb.tables.date_texts import DateTexts, with_dates
from aevb.tables.reading import (
    MISSING_WORDS,
    WORDS_METADATA,
    Cells,
    cells_of_array,
    cells_of_series,
    with_words,
)


@dataclass(frozen=True)
class Table:
    """A frame of any library: its columns, and how to give results back beside them."""

    native: Any
    library: str
    names: tuple[str, ...]
    rows: int

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def cells(
        self,
        name: str,
        words: Sequence[str] = MISSING_WORDS,
        levels: Collection[Any] = (),
        form: Amounts | DateTexts | None = None,
    ) -> Cells:
        """Read one column. Text cells that equal a missing word, and no level, are missing.

        With a ``form``, texts are amounts or dates in this form.
        """
        position = self.names.index(name)
        if self.library in ("dict", "array"):
            found = cells_of_array(name, self.native[name])
        else:
            found = cells_of_series(name, self._series(position))
        if self.library == "pyarrow":
            metadata = self.native.schema.field(position).metadata or {}
            found = replace(found, words=json.loads(metadata.get(WORDS_METADATA, b"{}")))
        found = with_words(found, words, levels)
        if isinstance(form, Amounts):
            return with_amounts(found, form)
        return found if form is None else with_dates(found, form)

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
        their values and types, bit for bit, except that a column of integers becomes one of float64
        if a new value is not whole.
        """
        if self.library in ("dict", "array"):
            columns = {name: np.array(self.native[name], copy=True) for name in self.names}
            for name, (rows, values) in filled.items():
                if columns[name].dtype.kind == "U":  # would cut longer texts
                    columns[name] = columns[name].astype(object)
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
            f"{len(repeated)} column name{'s occur' if len(repeated) > 1 else ' occurs'} more than "
            f"once: {', '.join(map(repr, repeated[:5]))}. Rename them, so that each name has one "
            f"column."
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
    masked = data if isinstance(data, np.ma.MaskedArray) else matrix
    columns = {name: _array(masked[:, j]) for j, name in enumerate(names)}
    return Table(columns, "array", names, len(matrix))


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


def _has_fractions(values: Sequence[Any]) -> bool:
    """Whether some value is a number that no column of integers holds."""
    return any(isinstance(value, float) and not value.is_integer() for value in values)


def _replace_pandas(table: Table, filled: Mapping[str, tuple[np.ndarray, Sequence[Any]]]) -> Any:
    frame = table.native.copy()
    for name, (rows, values) in filled.items():
        position = table.names.index(name)
        column = frame.iloc[:, position].copy()
        if _has_fractions(values) and column.dtype.kind in "iu":
            arrow = hasattr(column.dtype, "pyarrow_dtype")
            column = column.astype("double[pyarrow]" if arrow else "Float64")
        column.iloc[rows] = list(values)
        frame.isetitem(position, column)
    return frame


def _replace_polars(table: Table, filled: Mapping[str, tuple[np.ndarray, Sequence[Any]]]) -> Any:
    import polars as pl

    found = []
    for name, (rows, values) in filled.items():
        column = table.native[name]
        if _has_fractions(values) and column.dtype.is_integer():
            column = column.cast(pl.Float64)
        cells, kept = [None] * len(column), np.ones(len(column), bool)
        kept[rows] = False
        for row, value in zip(rows.tolist(), values, strict=True):
            cells[row] = value
        # A column without any known cell may have no type.
        kind = None if column.dtype == pl.Null else column.dtype
        new = pl.Series(name, cells, dtype=kind, strict=False)
        found.append(column.cast(new.dtype).zip_with(pl.Series(kept), new))
    return table.native.with_columns(found)


def _replace_pyarrow(table: Table, filled: Mapping[str, tuple[np.ndarray, Sequence[Any]]]) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    frame = table.native
    for name, (rows, values) in filled.items():
        position = table.names.index(name)
        field, column = frame.schema.field(position), frame.column(position)
        if _has_fractions(values) and pa.types.is_integer(field.type):
            field = field.with_type(pa.float64())
            column = column.cast(field.type, safe=False)
        listed = pa.types.is_dictionary(field.type)  # if_else takes no dictionary arrays
        cells: list[Any] = column.to_pylist() if listed else [None] * len(column)
        kept = np.ones(len(column), bool)
        kept[rows] = False
        for row, value in zip(rows.tolist(), values, strict=True):
            cells[row] = value
        if pa.types.is_null(field.type):  # a column without any known cell
            field = field.with_type(pa.array(cells).type)
            column = column.cast(field.type)
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
