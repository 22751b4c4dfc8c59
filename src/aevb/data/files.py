"""Files: arrays by variable from .npy, .npz, .csv and .parquet. Arrays stored plainly are mapped, never loaded whole.

A table has a line a row, with a column a step where a variable lives in time; or a line a step (``long.py``).
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.long import Lines, is_long, lines_of
from aevb.families import OneHot
from aevb.graph import Graph

TABLES = (".csv", ".tsv", ".txt", ".parquet")
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "None", "?")
_OBJECTS = ("Python objects in dtype", "Object arrays cannot be loaded")  # as numpy says it


@dataclass(frozen=True)
class Table:
    """Columns [N, C], with their names where the file has a header. A column of lists (Parquet) stands in ``lists`` instead."""

    values: np.ndarray
    names: tuple[str, ...] | None
    lists: Mapping[str, list[np.ndarray]]


def read_file(
    path: Path, graph: Graph, *, only: str | None = None, columns: Mapping[str, list[str]] | None = None, check: bool = True
) -> dict[str, Any]:
    """The arrays of a file by variable; ``only`` is the one variable that the file is for.

    ``columns`` says which of a table's columns a variable has, instead of the header's own names. ``check=False`` leaves the numbers
    of columns unchecked, for a model whose sizes are to be taken from them.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}; the data sets by name are {', '.join(('fa', 'digits', 'mnist', 'fashion'))}.")
    try:
        if path.suffix == ".npy":
            return {only or _names(graph)[0]: np.load(path, mmap_mode="r", allow_pickle=False)}
        if path.suffix == ".npz":
            return _by_name(_read_archive(path), graph, only)
        if path.suffix not in TABLES:
            raise ValueError(f"files of kind {path.suffix or 'no suffix'} are not known; use .npy, .npz, .csv or .parquet")
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from None
    return _split(path, _read_table(path), graph, only, columns, check)


def header(path: Path) -> tuple[str, ...] | None:
    """The names of a table's columns; None for a file without them."""
    return _read_table(path).names if path.suffix in TABLES and path.is_file() else None


def lines(path: Path) -> Lines:
    """Which lines of a table with a line a step belong to which row."""
    return lines_of(_read_table(path).values[:, :2])


def _unreadable(path: Path, error: Exception) -> ValueError:
    if path.suffix in (".npy", ".npz") and any(words in str(error) for words in _OBJECTS):
        return ValueError(
            f"{path} holds Python objects, not an array of numbers. Sequences of different lengths are saved padded, with how long each is "
            "(np.savez(file, x=padded, lengths=lengths)), or as a column of lists in Parquet."
        )
    return ValueError(f"{path} cannot be read: {str(error).rstrip('.')}.")


def _names(graph: Graph) -> list[str]:
    return [*graph.observed, *graph.given]


# Archives ------------------------------------------------------------------------------------------------------------------------


def _read_archive(path: Path) -> dict[str, Any]:
    """The members of a .npz: mapped where they are stored as they are (np.savez), loaded where compressed."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist() if info.filename.endswith(".npy")}
    mapped = {name: array for name, info in members.items() if (array := _map_member(path, info)) is not None}
    with np.load(path, allow_pickle=False) as loaded:
        return {name: mapped[name] if name in mapped else loaded[name] for name in members}


def _map_member(path: Path, info: zipfile.ZipInfo) -> np.memmap | None:
    if info.compress_type != zipfile.ZIP_STORED:
        return None
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)  # the local header: its name and extra field lie between it and the member
        if local[:4] != b"PK\x03\x04":
            raise ValueError(f"its member {info.filename} is damaged")
        file.seek(info.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"))
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject or not shape or 0 in shape:
            return None
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _by_name(arrays: dict[str, Any], graph: Graph, only: str | None) -> dict[str, Any]:
    if only in arrays:
        return {only: arrays[only]}
    known = {name: array for name, array in arrays.items() if name in graph.shapes or name in ("steps", "lengths")}
    if any(name in graph.shapes for name in known):
        return known
    others = [name for name in arrays if name not in known]
    if len(others) != 1:
        raise ValueError(f"its arrays are {', '.join(arrays) or 'none'}; name them after the model's variables ({', '.join(_names(graph))})")
    return {only or _names(graph)[0]: arrays[others[0]]} | known


# Tables --------------------------------------------------------------------------------------------------------------------------


def _read_table(path: Path) -> Table:
    try:
        return _read_parquet(path) if path.suffix == ".parquet" else _read_text(path)
    except (OSError, EOFError, ValueError) as error:
        raise _unreadable(path, error) from None


def _read_text(path: Path) -> Table:
    """A CSV file of numbers; an empty cell is missing. The first line is a header if any of its cells is no number, or if it counts from 0."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        sample = file.read(4096)
        file.seek(0)
        delimiter = "\t" if path.suffix == ".tsv" or ("\t" in sample and "," not in sample) else ";" if ";" in sample and "," not in sample else ","
        rows = list(csv.reader(file, delimiter=delimiter))
    while rows and not rows[-1]:
        rows.pop()
    if not any(rows):
        raise ValueError("it is empty")
    alone = max(map(len, rows)) == 1  # an empty line is then a missing cell
    rows = [row or [""] for row in rows] if alone else [row for row in rows if row]
    named = any(_number(cell) is None for cell in rows[0]) or _numbered(rows[0])
    body, width = rows[1:] if named else rows, len(rows[0])
    if not body:
        raise ValueError("it has a header but no rows")
    values = np.empty((len(body), width))
    for i, row in enumerate(body):
        if len(row) != width:
            raise ValueError(f"line {i + 1 + named} has {len(row)} cells, the first has {width}")
        try:
            values[i] = row
        except ValueError:
            values[i] = [_cell(cell, i + 1 + named, f"{rows[0][j].strip()!r}" if named else f"{j + 1}") for j, cell in enumerate(row)]
    return Table(values, _distinct(cell.strip() for cell in rows[0]) if named else None, {})


def _numbered(first: list[str]) -> bool:
    """Whether a line is the header that pandas writes for columns without names: 0, 1, 2, …, after an empty cell where the index is written."""
    numbers = [str(j) for j in range(len(first))]
    return len(first) > 1 and first in (numbers, ["", *numbers[:-1]])


def _cell(cell: str, line: int, column: str) -> float:
    value = _number(cell)
    if value is None:
        raise ValueError(f"line {line}, column {column} holds {cell!r}, not a number; number its values from 0, or leave the column out")
    return value


def _number(cell: str) -> float | None:
    text = cell.strip()
    if text in MISSING:
        return float("nan")
    try:
        return float(text)
    except ValueError:
        return None


def _distinct(names: Any) -> tuple[str, ...]:
    found = tuple(names)
    if "" in found:
        raise ValueError(f"its column {found.index('') + 1} has no name; drop it (an index?), or name it")
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"its header has the column {twice!r} twice")
    return found


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise ValueError("reading Parquet needs pyarrow; install the extra: pip install 'aevb[parquet]'") from None
    try:
        found = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error).splitlines()[0].rstrip(".")) from None
    if not found.num_rows:
        raise ValueError("it has no rows")
    kinds = pyarrow.types
    numbers: dict[str, np.ndarray] = {}
    lists: dict[str, list[np.ndarray]] = {}
    for name, column in zip(_distinct(found.column_names), found.columns, strict=True):
        kind = column.type
        if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
            lists[name] = [np.array(row, dtype=float) for row in column.to_pylist()]
        elif kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind):
            wanted = np.float32 if kinds.is_floating(kind) and kind.bit_width <= 32 else np.float64
            numbers[name] = column.cast(pyarrow.float64()).to_numpy().astype(wanted)
        elif kinds.is_boolean(kind):
            numbers[name] = column.cast(pyarrow.uint8()).cast(pyarrow.float64()).to_numpy()
        else:
            raise ValueError(f"its column {name!r} holds {kind}, not numbers")
    values = np.stack(list(numbers.values()), 1) if numbers else np.empty((found.num_rows, 0))
    return Table(values, tuple(numbers), lists)


# From columns to variables ---------------------------------------------------------------------------------------------------------


def _split(path: Path, table: Table, graph: Graph, only: str | None, columns: Mapping[str, list[str]] | None, check: bool) -> dict[str, Any]:
    """Columns named after a variable (``y``, ``x0``, ``x_1``, ``x.2``) are that variable's; the others are the first observed one's."""
    first = only or _names(graph)[0]
    if table.names is None:
        if check:
            _check_columns(path, table, graph, {first: [str(j + 1) for j in range(table.values.shape[1])]}, only)
        return {first: _values(graph, first, table.values, check)}
    taken = assign(table.names, graph) if columns is None else _recorded(path, table.names, graph, columns)
    long = is_long(table.names, graph)
    if only is not None:
        taken = {only: taken.get(only) or list(table.names[2:] if long else table.names)}
    lists = {name: table.lists[name] for name in table.lists if name in graph.shapes}
    rest = [name for name in table.lists if name not in lists]
    if len(rest) == 1 and not taken.get(first) and first not in lists:
        lists[first] = table.lists[rest[0]]
    elif rest:
        raise ValueError(f"{path}: the column {rest[0]!r} holds lists. Name it after its variable ({', '.join(_names(graph))}), or drop it.")
    if check:
        _check_columns(path, table, graph, {name: cells for name, cells in taken.items() if name not in lists}, only, tuple(lists), long)
    index = {name: i for i, name in enumerate(table.names)}
    arrays = {name: table.values[:, [index[cell] for cell in cells]] for name, cells in taken.items() if cells}
    stacked = {name: np.stack(rows) if len({row.shape for row in rows}) == 1 else rows for name, rows in lists.items()}
    found = {name: _values(graph, name, array, check) for name, array in arrays.items()}
    if long:
        try:
            by_row = lines_of(table.values[:, :2])
            found = {name: by_row.sequences(value) if graph.timed[name] else by_row.constants(name, value) for name, value in found.items()}
        except ValueError as error:
            raise ValueError(f"{path}: {error}.") from None
    return found | stacked


def assign(names: tuple[str, ...], graph: Graph) -> dict[str, list[str]]:
    """Which columns of a table with this header go to which variable."""
    names, first = names[2:] if is_long(names, graph) else names, _names(graph)[0]
    known = [name for name in graph.latents if graph.rule("p", name).spec.finite]  # labels; a column z is a column, not the code
    variables = sorted((*_names(graph), *known), key=len, reverse=True)
    numbered: dict[str, list[tuple[int, str]]] = {}
    rest = []
    for column in names:
        for variable in variables:
            match = re.fullmatch(rf"{re.escape(variable)}(?:[ _.\-]?(\d+))?", column)
            if match:
                numbered.setdefault(variable, []).append((int(match[1] or 0), column))
                break
        else:
            rest.append(column)
    found = {variable: [column for _, column in sorted(pairs, key=lambda pair: pair[0])] for variable, pairs in numbered.items()}
    if rest:
        mine = {*rest, *found.get(first, ())}
        found[first] = [column for column in names if column in mine]
    return {variable: found[variable] for variable in (*_names(graph), *found) if variable in found}


def _recorded(path: Path, names: tuple[str, ...], graph: Graph, columns: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The columns a run was trained with, found again by name in any order; latents and labels may be absent."""
    found = {}
    for variable, wanted in columns.items():
        absent = [column for column in wanted if column not in names]
        if not absent:
            found[variable] = list(wanted)
        elif variable not in graph.latents or len(absent) < len(wanted):
            raise ValueError(f"{path} lacks the column {absent[0]!r} that {variable} was trained with; its columns are {_listed(names)}.")
    return found


def _check_columns(
    path: Path,
    table: Table,
    graph: Graph,
    taken: Mapping[str, list[str]],
    only: str | None,
    elsewhere: tuple[str, ...] = (),
    long: bool = False,
) -> None:
    """Refuse a table that leaves a variable without its columns, or with more or fewer than it has."""
    problem: tuple[str, list[str]] | None = None
    for name in _names(graph) if only is None else ():
        if name not in taken and name not in elsewhere:
            problem = problem or (name, [])
    for name, cells in taken.items():
        d = graph.size(name)
        fine = len(cells) == d or (len(cells) == 1 and _labels(graph, name))
        if graph.timed[name] and not long:
            fine = d == 1 or (d > 1 and _labels(graph, name))  # a row is a sequence of numbers, or of labels
        if not fine:
            problem = problem or (name, cells)
    if problem is None:
        return
    name, cells = problem
    wide = graph.timed[name] and not long
    need = "a step a column" if wide else f"{graph.size(name)} column{'s' * (graph.size(name) > 1)}"
    need += ", or one of labels" if _labels(graph, name) and not wide else ""
    had = f"gets {len(cells)} ({_listed(cells)})" if cells else "gets none"
    names = f"Its columns are {_listed(table.names)}. " if table.names else "It has no header. "
    fix = f"Columns named {name}0, {name}1, … are {name}'s" + (
        ", and so are those named after no variable." if name == _names(graph)[0] else f"; those named after no variable are {_names(graph)[0]}'s."
    )
    if wide and graph.size(name) > 1:
        fix = f"A line of a table holds a sequence of one number a step; for more write a line a step (row,step,{name}0,{name}1,…), or use .npz."
    raise ValueError(f"{path}: {name} needs {need}, but {had}. {names}{fix}")


def _labels(graph: Graph, name: str) -> bool:
    return graph.size(name) > 1 and (name in graph.given or isinstance(graph.rule("p", name).spec, OneHot))


def _values(graph: Graph, name: str, array: np.ndarray, check: bool) -> np.ndarray:
    """One column for many classes is labels, [N]."""
    may_be_labels = name in graph.given or isinstance(graph.rule("p", name).spec, OneHot)
    return array[:, 0] if may_be_labels and array.shape[1] == 1 and (graph.size(name) > 1 or not check) else array


def _listed(names: Any, limit: int = 12) -> str:
    shown = list(names)
    return ", ".join(map(str, shown[:limit])) + (f", … ({len(shown)})" if len(shown) > limit else "")
