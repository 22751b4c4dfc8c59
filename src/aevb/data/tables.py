"""Read tables, columns of numbers with their names, from text or Parquet files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from aevb.data.markers import mark_missing
from aevb.data.parquet import ParquetRows, is_parquet, open_rows, read_schema, read_whole
from aevb.data.sequence_index import Key
from aevb.data.text_tables import read_layout, read_text

TABLES = (".csv", ".tsv", ".txt", ".parquet")


@dataclass(frozen=True)
class Table:
    """Columns [N, C], with their names if the file has a header.

    ``lists`` holds columns of lists (Parquet).
    """

    values: np.ndarray | ParquetRows
    names: tuple[str, ...] | None
    lists: Mapping[str, list[np.ndarray] | ParquetRows]
    lines: np.ndarray | None = None  # the line number of each row in a text file


@dataclass(frozen=True)
class Header:
    """The header of a table: names and number of numeric columns, and names of list columns.

    The names are None if the file has no header.
    """

    names: tuple[str, ...] | None
    width: int
    lists: tuple[str, ...] = ()


def is_table(path: Path) -> bool:
    """Return whether this is a table: a text file, a Parquet file, or a folder of Parquet files."""
    return (path.suffix in TABLES and path.is_file()) or is_parquet(path)


def read_table(
    path: Path,
    without: Collection[str] = (),
    missing: Sequence[float] = (),
    *,
    whole: bool = True,
    written: Mapping[str, Key] = MappingProxyType({}),
) -> Table:
    """Read the numbers of a table; the columns ``without`` are skipped and may hold anything.

    ``missing`` are numbers that mark missing cells. ``whole=False``: the rows of large Parquet
    files are read when they are indexed. ``written`` are columns of words and dates, which are not
    read again: the table has the numbers of the words, in order, and zeros for dates.
    """
    if written:
        table = read_table(path, [*without, *written], missing)
        return _with_columns(table, header(path), written)
    rows = open_rows(path, without, missing) if is_parquet(path) and not whole else None
    if rows is not None:
        return Table(*rows)
    lists: dict[str, list[np.ndarray]] = {}
    lines = None
    names: tuple[str, ...] | None
    if is_parquet(path):
        values, names, lists = read_whole(path, without)
    else:
        values, names, lines = read_text(path, without)
    if missing:
        values = mark_missing(values, *missing)
        lists = {
            name: [mark_missing(row, *missing) for row in found] for name, found in lists.items()
        }
    return Table(values, names, lists, lines)


def _with_columns(table: Table, header: Header, written: Mapping[str, Key]) -> Table:
    """Insert columns of words and dates into a table, at their places in its header."""
    columns = dict(zip(table.names or (), np.asarray(table.values).T, strict=True))
    for name, key in written.items():
        columns[name] = np.zeros(len(key.values))
        if key.clock.kind == "number":
            seen: dict[Any, int] = {}  # in the order of their first lines
            columns[name] = np.array(
                [seen.setdefault(word, len(seen)) for word in key.values.tolist()], float
            )
    names = tuple(name for name in header.names or () if name in columns)
    return replace(table, values=np.stack([columns[name] for name in names], 1), names=names)


def header(path: Path) -> Header:
    """Read only the header of a table."""
    if is_parquet(path):
        names, lists = read_schema(path)
        return Header(names, len(names), lists)
    layout = read_layout(path)
    return Header(layout.names, layout.width)
