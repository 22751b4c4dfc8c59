"""Rows of a Parquet file, or of a folder of Parquet files, read by row groups.

A row group can only be decoded as a whole. A bounded cache keeps the groups decoded last, and
training visits the rows in windows of groups (:class:`aevb.data.lazy_rows.Windows`), so that a pass
over the data decodes every group once.
"""

from __future__ import annotations

import hashlib
import os
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.lazy_rows import LARGE, LazyRows, Windows
from aevb.data.markers import mark_missing
from aevb.data.text_tables import FEW, WordsError, distinct


def is_parquet(path: Path) -> bool:
    """Return whether this is a Parquet file, or a folder with at least one."""
    if path.is_dir():
        return next(_files(path), None) is not None
    return path.suffix == ".parquet" and path.is_file()


def _files(folder: Path) -> Iterator[Path]:
    """The Parquet files of a folder, except those whose path in it has a name such as .x or _x."""
    for file in folder.rglob("*.parquet"):
        if not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts):
            yield file


def open_dataset(path: Path) -> Any:
    """Open a Parquet file, or all Parquet files of a folder, as a ``pyarrow.dataset.Dataset``.

    The files of a folder follow one another in the order of their names, and must have the same
    columns and types. Files and folders whose names begin with "." or "_" are not read.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import dataset

    files = sorted(_files(path)) if path.is_dir() else [path]
    if not files:
        raise ValueError("there is no file .parquet in it")
    try:
        found = dataset.dataset([str(file) for file in files], format="parquet")
        for fragment in found.get_fragments():
            if not fragment.physical_schema.equals(found.schema):
                raise ValueError(
                    f"{fragment.path} has other columns than the first file: "
                    f"{_difference(fragment.physical_schema, found.schema)}. Write all files of "
                    f"the folder with the same columns and types"
                )
    except pa.ArrowException as error:
        raise ValueError(_first_line(error)) from None
    return found


def read_schema(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the columns of single values, and of the columns of lists."""
    schema = open_dataset(path).schema
    distinct(schema.names)
    lists = tuple(field.name for field in schema if _is_list(field.type))
    return tuple(name for name in schema.names if name not in lists), lists


def read_whole(
    path: Path, without: Collection[str]
) -> tuple[np.ndarray, tuple[str, ...], dict[str, list[np.ndarray]]]:
    """Read all rows: the numbers [N, C], their columns, and the columns of lists."""
    import pyarrow as pa

    files = open_dataset(path)
    names = [name for name in distinct(files.schema.names) if name not in without]
    try:
        found = files.to_table(columns=names)
    except pa.ArrowException as error:
        raise ValueError(_first_line(error)) from None
    if not found.num_rows:
        raise ValueError("it has no rows")
    lists = {
        name: _lists(name, found.column(name).to_pylist())
        for name in names
        if _is_list(found.schema.field(name).type)
    }
    names = [name for name in names if name not in lists]
    numbers = [_numbers(name, found.column(name)) for name in names]
    values = np.stack(numbers, 1) if numbers else np.empty((found.num_rows, 0))
    return values, tuple(names), lists


class RowGroups:
    """The row groups of Parquet files, and a cache of those decoded last.

    The cache holds at most :data:`LARGE` bytes, or one group if that is larger.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        files = open_dataset(path)
        self.schema = files.schema
        self.groups: list[tuple[Any, int]] = []  # a file and the number of a row group in it
        self.stats: dict[str, tuple[int, int]] = {}
        self.bytes, sizes = 0, []
        try:
            for fragment in files.get_fragments():
                self.stats[fragment.path] = _stat(fragment.path)
                for group in fragment.row_groups:
                    if group.num_rows:
                        self.groups.append((fragment, group.id))
                        sizes.append(group.num_rows)
                        self.bytes += group.total_byte_size
        except pa.ArrowException as error:
            raise ValueError(_first_line(error)) from None
        if not sizes:
            raise ValueError("it has no rows")
        self.sizes = tuple(sizes)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.path = path
        self.cache: OrderedDict[tuple[int, GroupedRows], np.ndarray] = OrderedDict()
        self.lock = threading.Lock()  # rows of coming steps are read in a thread

    @property
    def n(self) -> int:
        return int(self.starts[-1])

    def is_large(self, columns: int) -> bool:
        """Return whether the files, or so many columns of numbers of them, are read lazily."""
        return max(self.bytes, self.n * 8 * columns) > LARGE

    def digest(self) -> str:
        """Hash the names, the sizes and the footers of the files, without reading their rows.

        A footer holds the statistics of the row groups.
        """
        digest = hashlib.sha256()
        for name, (size, _) in self.stats.items():
            relative = Path(os.path.relpath(name, self.path)).as_posix()
            with open(name, "rb") as file:
                file.seek(-8, os.SEEK_END)  # the length of the footer, then "PAR1"
                length = int.from_bytes(file.read(4), "little")
                file.seek(-8 - length, os.SEEK_END)
                digest.update(f"{relative} {size} {length}\n".encode())
                digest.update(file.read(length))
        return digest.hexdigest()

    def decoded(self, group: int, rows: GroupedRows) -> np.ndarray:
        """Return the values of a group, from the cache if they are there."""
        with self.lock:
            found = self.cache.get((group, rows))
            if found is None:
                room = LARGE - rows.sizes[group] * rows.row_bytes
                while self.cache and sum(value.nbytes for value in self.cache.values()) > room:
                    self.cache.popitem(last=False)
                found = self.cache[group, rows] = rows.decoded(group)
            self.cache.move_to_end((group, rows))
            return found

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Read columns of a group as a ``pyarrow.Table``."""
        import pyarrow as pa

        fragment, number = self.groups[group]
        try:
            if _stat(fragment.path) != self.stats[fragment.path]:
                raise ValueError(
                    f"{fragment.path} was changed after it was opened. Start again with files that "
                    f"stay the same"
                )
            return fragment.subset(row_group_ids=[number]).to_table(columns=list(columns))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{fragment.path} cannot be read: {_first_line(error)}") from None


class GroupedRows(LazyRows):
    """Rows [N, C], or [N] if ``flat``, that are decoded by groups of ``sizes`` rows."""

    groups: RowGroups
    dtype: np.dtype[Any]
    length: int
    flat: bool

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each group."""

    @abstractmethod
    def decoded(self, group: int) -> np.ndarray:
        """Read and decode the rows of a group, [rows, C]."""

    @cached_property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @property
    def row_bytes(self) -> int:
        return self.length * self.dtype.itemsize

    def read(self, index: np.ndarray) -> np.ndarray:
        found = np.empty((len(index), self.length), self.dtype)
        group = np.searchsorted(self.starts, index, side="right") - 1
        order = np.argsort(group, kind="stable")
        numbers, first = np.unique(group[order], return_index=True)
        for number, places in zip(numbers.tolist(), np.split(order, first[1:]), strict=True):
            start = int(self.starts[number])
            found[places] = self.groups.decoded(number, self)[index[places] - start]
        return found[:, 0] if self.flat else found

    def windows(self) -> Windows:
        # A batch may lie across two windows, so the cache has room for both.
        return Windows(self.sizes, max(1, LARGE // 2 // max(1, self.row_bytes)))


class ParquetRows(GroupedRows):
    """Columns of numbers [N, C], or one column of lists of equal length, of :class:`RowGroups`.

    ``missing`` are numbers that mark missing cells. ``values[:, [0, 2]]`` selects columns and
    ``values[:, 0]`` is one column, [N].
    """

    def __init__(
        self,
        groups: RowGroups,
        columns: Sequence[str],
        missing: Sequence[float] = (),
        *,
        flat: bool = False,
    ) -> None:
        self.groups, self.columns, self.missing, self.flat = groups, tuple(columns), missing, flat
        kinds = [groups.schema.field(name).type for name in self.columns]
        self.list = len(kinds) == 1 and _is_list(kinds[0])
        self.dtype = (
            np.dtype(np.float64)
            if self.list
            else np.result_type(*(_precision(kind) for kind in kinds), np.float32)
        )
        self.length = len(self.columns)
        if self.list:
            self.length = len(_first_list(groups, self.columns[0]))
        self.shape = (groups.n,) if flat else (groups.n, self.length)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.groups.sizes

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, tuple):
            _, columns = rows
            flat = isinstance(columns, int)
            chosen = [self.columns[j] for j in ([columns] if flat else columns)]
            return ParquetRows(self.groups, chosen, self.missing, flat=flat)
        return super().__getitem__(rows)

    def decoded(self, group: int) -> np.ndarray:
        return self.decode(self.groups.read(group, self.columns), int(self.starts[group]))

    def decode(self, table: Any, start: int) -> np.ndarray:
        """Convert a group that begins at the row ``start`` to numbers [rows, C]."""
        if self.list:
            values = _equal_lists(self.columns[0], table.column(0), self.length, start)
        else:
            values = np.empty((table.num_rows, self.length), self.dtype)
            for j, name in enumerate(self.columns):
                values[:, j] = _numbers(name, table.column(name))
        return mark_missing(values, *self.missing) if self.missing else values


def open_rows(
    path: Path, without: Collection[str], missing: Sequence[float]
) -> tuple[ParquetRows, tuple[str, ...], dict[str, ParquetRows]] | None:
    """Open large Parquet files: numbers [N, C], their columns, and the columns of lists.

    None if the files are small, or if they hold nested lists or lists of different lengths: then
    they are read whole.
    """
    groups = RowGroups(path)
    names = [name for name in distinct(groups.schema.names) if name not in without]
    lists = [name for name in names if _is_list(groups.schema.field(name).type)]
    plain = [name for name in names if name not in lists]
    if not groups.is_large(len(plain)):
        return None
    for name in plain:
        kind = groups.schema.field(name).type
        if not _is_number(kind):
            _numbers(name, groups.read(0, [name]).column(0))  # refuses it
    for name in lists:
        if not _is_number(groups.schema.field(name).type.value_type):
            return None
    found = {name: ParquetRows(groups, [name], missing) for name in lists}
    return ParquetRows(groups, plain, missing), tuple(plain), found


# Columns ------------------------------------------------------------------------------------------


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
    )


def _precision(kind: Any) -> type:
    from pyarrow import types

    return np.float32 if types.is_floating(kind) and kind.bit_width <= 32 else np.float64


def _numbers(name: str, column: Any) -> np.ndarray:
    """Convert a column to numbers; a missing cell becomes NaN. Raises ValueError for words."""
    import pyarrow as pa
    from pyarrow import types

    kind = column.type
    if types.is_boolean(kind):
        return np.asarray(column.cast(pa.uint8()).cast(pa.float64()).to_numpy())
    if _is_number(kind):
        wanted = pa.float32() if _precision(kind) is np.float32 else pa.float64()
        return np.asarray((column if kind == wanted else column.cast(wanted)).to_numpy())
    if types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind):
        words = [str(value) for value in column.unique().to_pylist() if value is not None]
        raise WordsError(name, tuple(words[: FEW + 1]) or ("",), 1)
    if types.is_temporal(kind):
        raise ValueError(
            f"its column {name!r} holds {kind}, not numbers. Number the steps 0, 1, 2, … in a "
            f"column step, or leave it out"
        )
    raise ValueError(f"its column {name!r} holds {kind}, not numbers; leave it out")


def _lists(name: str, rows: list[Any]) -> list[np.ndarray]:
    """Convert a column of lists to arrays. Nested lists of one row must have equal lengths."""
    found = []
    for i, row in enumerate(rows):
        if row is None:
            raise _no_list(name, i)
        try:
            found.append(np.array(row, dtype=float))
        except (TypeError, ValueError):
            raise ValueError(
                f"its column {name!r} holds no list of numbers (or of lists of equal length) in "
                f"row {i} (from 0)"
            ) from None
    return found


def _first_list(groups: RowGroups, name: str) -> list[Any]:
    found = groups.read(0, [name]).column(0)[0].as_py()
    if found is None:
        raise _no_list(name, 0)
    return list(found)


def _equal_lists(name: str, column: Any, length: int, start: int) -> np.ndarray:
    """Convert lists of numbers, all of one length, to an array [rows, length]."""
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~(lengths == length))
    if len(wrong):
        row = int(wrong[0])
        if not column[row].is_valid:
            raise _no_list(name, start + row)
        raise ValueError(
            f"its column {name!r} holds {length} numbers in row 0 but {int(lengths[row])} in row "
            f"{start + row} (from 0). Write lists of one length"
        )
    return _numbers(name, pc.list_flatten(column)).reshape(-1, length)


def _no_list(name: str, row: int) -> ValueError:
    return ValueError(
        f"its column {name!r} has no list in row {row} (from 0); remove that row, or write a list"
    )


def _stat(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _difference(here: Any, first: Any) -> str:
    kinds: list[Mapping[str, Any]] = [
        {field.name: field.type for field in s} for s in (here, first)
    ]
    for name in (*kinds[0], *kinds[1]):
        a, b = (kind.get(name) for kind in kinds)
        if a != b:
            return f"{name!r} is {a or 'absent'}, not {b or 'absent'}"
    return f"their order is {', '.join(here.names[:12])}"
