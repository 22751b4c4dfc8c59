"""Read tables, columns of numbers with their names, from text or Parquet files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.markers import mark_missing
from aevb.data.text_tables import FEW, WordsError, distinct, read_layout, read_text

TABLES = (".csv", ".tsv", ".txt", ".parquet")


@dataclass(frozen=True)
class Table:
    """Columns [N, C], with their names if the file has a header.

    ``lists`` holds columns of lists (Parquet).
    """

    values: np.ndarray
    names: tuple[str, ...] | None
    lists: Mapping[str, list[np.ndarray]]
    lines: np.ndarray | None = None  # the line number of each row in a text file


@dataclass(frozen=True)
class Header:
    """The header of a table: names and number of numeric columns, and names of list columns.

    The names are None if the file has no header.
    """

    names: tuple[str, ...] | None
    width: int
    lists: tuple[str, ...] = ()


def read_table(path: Path, without: Collection[str] = ()) -> Table:
    """Read the numbers of a table; the columns ``without`` are skipped and may hold anything."""
    if path.suffix == ".parquet":
        return _read_parquet(path, without)
    values, names, lines = read_text(path, without)
    return Table(values, names, {}, lines)


def marked(table: Table, missing: Sequence[float]) -> Table:
    """Replace the numbers that mark missing cells by NaN."""
    if not missing:
        return table
    lists = {
        name: [mark_missing(row, *missing) for row in rows] for name, rows in table.lists.items()
    }
    return replace(table, values=mark_missing(table.values, *missing), lists=lists)


def header(path: Path) -> Header:
    """Read only the header of a table."""
    if path.suffix == ".parquet":
        parquet, pyarrow = _pyarrow()
        try:
            schema = parquet.read_schema(path)
        except pyarrow.ArrowException as error:
            raise ValueError(str(error).splitlines()[0].rstrip(".")) from None
        distinct(schema.names)
        lists = tuple(field.name for field in schema if _is_list(pyarrow, field.type))
        names = tuple(name for name in schema.names if name not in lists)
        return Header(names, len(names), lists)
    layout = read_layout(path)
    return Header(layout.names, layout.width)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            "reading Parquet needs pyarrow; install the extra: pip install 'aevb[parquet]'"
        ) from None
    return parquet, pyarrow


def _is_list(pyarrow: Any, kind: Any) -> bool:
    return bool(
        pyarrow.types.is_list(kind)
        or pyarrow.types.is_large_list(kind)
        or pyarrow.types.is_fixed_size_list(kind)
    )


def _read_parquet(path: Path, without: Collection[str]) -> Table:
    parquet, pyarrow = _pyarrow()
    try:
        found = parquet.read_table(path)
        found = found.drop_columns([name for name in found.column_names if name in without])
    except pyarrow.ArrowException as error:
        raise ValueError(str(error).splitlines()[0].rstrip(".")) from None
    if not found.num_rows:
        raise ValueError("it has no rows")
    kinds = pyarrow.types
    numbers: dict[str, np.ndarray] = {}
    lists: dict[str, list[np.ndarray]] = {}
    for name, column in zip(distinct(found.column_names), found.columns, strict=True):
        kind = column.type
        if _is_list(pyarrow, kind):
            lists[name] = _lists(name, column.to_pylist())
        elif kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind):
            wanted = np.float32 if kinds.is_floating(kind) and kind.bit_width <= 32 else np.float64
            numbers[name] = column.cast(pyarrow.float64()).to_numpy().astype(wanted)
        elif kinds.is_boolean(kind):
            numbers[name] = column.cast(pyarrow.uint8()).cast(pyarrow.float64()).to_numpy()
        elif kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_dictionary(kind):
            words = [str(value) for value in column.unique().to_pylist() if value is not None]
            raise WordsError(name, tuple(words[: FEW + 1]) or ("",), 1)
        elif kinds.is_temporal(kind):
            raise ValueError(
                f"its column {name!r} holds {kind}, not numbers. Number the steps 0, 1, 2, … in a "
                f"column step, or leave it out"
            )
        else:
            raise ValueError(f"its column {name!r} holds {kind}, not numbers; leave it out")
    values = np.stack(list(numbers.values()), 1) if numbers else np.empty((found.num_rows, 0))
    return Table(values, tuple(numbers), lists)


def _lists(name: str, rows: list[Any]) -> list[np.ndarray]:
    """Convert a column of lists to arrays. Nested lists of one row must have equal lengths."""
    found = []
    for i, row in enumerate(rows):
        if row is None:
            raise ValueError(
                f"its column {name!r} has no list in row {i} (from 0); remove that row, or write "
                f"a list"
            )
        try:
            found.append(np.array(row, dtype=float))
        except (TypeError, ValueError):
            raise ValueError(
                f"its column {name!r} holds no list of numbers (or of lists of equal length) in "
                f"row {i} (from 0)"
            ) from None
    return found
