"""Rows of torch Datasets.

A map-style Dataset that would take more than :data:`aevb.data.lazy_rows.LARGE` bytes is indexed
when its rows are needed. An IterableDataset is read once, to its end, and stored.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.lazy_rows import LARGE, LazyRows
from aevb.declare.graph import Graph
from aevb.estimate.batch import unmasked

Row = Sequence[np.ndarray]  # the values of a row, one per variable
KEPT_FREE = 2**30  # bytes of a disk that a stream does not fill
CHECKED = 8  # rows that are read twice, to see whether they change


def read_dataset(data: Any, graph: Graph) -> dict[str, Any]:
    """Read the rows of a map-style Dataset: one array per variable, or lazy rows if it is large.

    A row is a dictionary, a tuple (observed, given), or a single array.
    """
    if not len(data):
        raise ValueError("The Dataset has no rows.")
    reader = _Reader(data, _Names(data[0], graph))
    first = reader.row(0)
    large = len(data) * sum(value.nbytes for value in first) > LARGE
    # Sequences may differ in length, so that all of them are needed at once.
    if large and not any(graph.timed.get(name) for name in reader.names.all):
        return {name: DatasetRows(reader, j) for j, name in enumerate(reader.names.all)}
    return _stacked(reader.names, [reader.row(i) for i in range(len(data))])


class _Names:
    """The variables of a Dataset's rows, and the check that all rows have the same."""

    def __init__(self, first: Any, graph: Graph) -> None:
        self.first = first
        known = [*graph.observed, *graph.given]
        self.all = list(first) if isinstance(first, Mapping) else known
        if isinstance(first, tuple | list):
            if len(first) > len(known):
                raise ValueError(
                    f"The Dataset's rows have {len(first)} parts, the model reads {len(known)} "
                    f"({', '.join(known)}). Let each be a dictionary by variable."
                )
            self.all = known[: len(first)]
        elif not isinstance(first, Mapping):
            self.all = known[:1]

    def values(self, i: int, row: Any) -> Row:
        """Return the values of row i in the order of the variables."""
        if isinstance(row, Mapping) != isinstance(self.first, Mapping) or (
            isinstance(row, Mapping) and set(row) != set(self.all)
        ):
            had = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise ValueError(
                f"Row {i} (from 0) of the Dataset has {had}, row 0 has "
                f"{', '.join(map(str, self.all))}. Let every row have the same variables."
            )
        if isinstance(row, tuple | list) and (
            not isinstance(self.first, tuple | list) or len(row) != len(self.first)
        ):
            raise ValueError(
                f"Row {i} (from 0) of the Dataset has {len(row)} parts, row 0 has another number. "
                f"Let every row have the same."
            )
        if isinstance(row, Mapping):
            parts = [row[name] for name in self.all]
        else:
            parts = list(row) if isinstance(row, tuple | list) else [row]
        return [
            np.asarray(value.detach() if isinstance(value, Tensor) else unmasked(value))
            for value in parts
        ]


class _Reader:
    """Read rows of a Dataset; keep those read last, because every variable asks for them."""

    def __init__(self, data: Any, names: _Names) -> None:
        self.data, self.names = data, names
        self.last: tuple[bytes, list[Row]] = b"", []
        self.lock = threading.Lock()  # rows of coming steps are read in a thread

    def row(self, i: int) -> Row:
        return self.names.values(i, self.data[i])

    def rows(self, index: np.ndarray) -> list[Row]:
        with self.lock:
            if index.tobytes() != self.last[0]:
                numbers = index.tolist()
                many = getattr(self.data, "__getitems__", None)
                found = many(numbers) if many is not None else [self.data[i] for i in numbers]
                values = [self.names.values(i, row) for i, row in zip(numbers, found, strict=True)]
                self.last = index.tobytes(), values
            return self.last[1]


class DatasetRows(LazyRows):
    """A variable of a map-style Dataset; ``data[i]`` is called each time row i is needed."""

    def __init__(self, reader: _Reader, place: int) -> None:
        self.reader, self.place = reader, place
        first = [reader.row(i)[place] for i in range(min(CHECKED, len(reader.data)))]
        self.name, self.row_shape = reader.names.all[place], first[0].shape
        self.shape = (len(reader.data), *self.row_shape)
        for i, value in enumerate(first):
            if not np.array_equal(value, reader.row(i)[place], equal_nan=value.dtype.kind == "f"):
                raise ValueError(
                    f"The Dataset returns another {self.name} each time row {i} is read (a random "
                    f"transformation?), so that a run could not be resumed. Let a row depend on "
                    f"its number alone, e.g. draw with torch.Generator().manual_seed(i)."
                )

    def read(self, index: np.ndarray) -> np.ndarray:
        found = [row[self.place] for row in self.reader.rows(index)]
        for i, value in zip(index.tolist(), found, strict=True):
            if value.shape != self.row_shape:
                raise ValueError(
                    f"Row {i} (from 0) of the Dataset has {self.name} of shape "
                    f"{list(value.shape)}, row 0 has {list(self.row_shape)}. Let every row have "
                    f"the same."
                )
        return np.stack(found) if found else np.empty((0, *self.row_shape))


def read_stream(data: Iterable[Any], graph: Graph) -> dict[str, Any]:
    """Read an IterableDataset to its end, once, and store its rows.

    Training then has any row at any time, so that order and resuming are those of other data. The
    stream must end, and must be the same when a run is resumed. Up to :data:`LARGE` bytes stay in
    memory. A larger stream goes to temporary files, if it does not hold sequences.
    """
    stream = iter(data)
    found = next(stream, None)
    if found is None:
        raise ValueError("The IterableDataset has no rows.")
    names = _Names(found, graph)
    rows = (names.values(i, row) for i, row in enumerate(chain([found], stream)))
    begin, size = [], 0
    for row in rows:
        begin.append(row)
        size += sum(value.nbytes for value in row)
        if size > LARGE:
            break
    else:
        return _stacked(names, begin)
    if any(graph.timed.get(name) for name in names.all):
        raise ValueError(
            f"The IterableDataset holds more than {LARGE >> 20} MiB of sequences. Write them to a "
            f".npz file, or pass a map-style Dataset."
        )
    return _spooled(names, chain(begin, rows))


def _spooled(names: _Names, rows: Iterable[Row]) -> dict[str, Any]:
    """Write the rows to a temporary file per variable; return memory maps, which delete them."""
    folders = [tempfile.TemporaryDirectory(prefix="aevb-") for _ in names.all]
    files: list[IO[bytes]] = [open(Path(folder.name) / "rows", "wb") for folder in folders]  # noqa: SIM115
    kinds: list[tuple[np.dtype, tuple[int, ...]]] = []
    n = 0
    try:
        for row in rows:
            kinds = kinds or [(value.dtype, value.shape) for value in row]
            if n % 1000 == 0 and shutil.disk_usage(folders[0].name).free < KEPT_FREE:
                raise ValueError(
                    f"The IterableDataset did not end before {folders[0].name} was full, after {n} "
                    f"rows. Let it end, or set TMPDIR to a folder with more room."
                )
            for name, value, (dtype, shape), file in zip(names.all, row, kinds, files, strict=True):
                if value.shape != shape or value.dtype != dtype:
                    raise ValueError(
                        f"Row {n} (from 0) of the IterableDataset has {name} of shape "
                        f"{list(value.shape)} and {value.dtype}, row 0 has {list(shape)} and "
                        f"{dtype}. Let every row have the same."
                    )
                file.write(np.ascontiguousarray(value).data)
            n += 1
    except BaseException:
        for file, folder in zip(files, folders, strict=True):
            file.close()
            folder.cleanup()
        raise
    for file in files:
        file.close()
    found: dict[str, Any] = {}
    for name, file, folder, (dtype, shape) in zip(names.all, files, folders, kinds, strict=True):
        found[name] = np.memmap(file.name, dtype, mode="r", shape=(n, *shape))
        weakref.finalize(found[name], folder.cleanup)
    return found


def _stacked(names: _Names, rows: Sequence[Row]) -> dict[str, Any]:
    columns = zip(*rows, strict=True)
    return {name: _stack(list(column)) for name, column in zip(names.all, columns, strict=True)}


def _stack(rows: list[np.ndarray]) -> Any:
    return np.stack(rows) if len({row.shape for row in rows}) == 1 else rows


def dataset_of(loader: Any) -> Any:
    """Return the Dataset of a DataLoader. Training makes its own batches and order.

    A loader that changes the rows or their order by a sampler or a collate_fn is refused.
    """
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    usual = (torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler)
    if loader.batch_sampler is not None and not iterable and not isinstance(loader.sampler, usual):
        raise ValueError(
            f"The DataLoader has a {type(loader.sampler).__name__}; training orders the rows "
            f"itself. Pass the Dataset (or a Subset of it)."
        )
    if loader.collate_fn is not torch.utils.data.default_collate:
        raise ValueError(
            "The DataLoader has its own collate_fn, but training builds its own batches. Do that "
            "work in the Dataset and pass it."
        )
    return loader.dataset
