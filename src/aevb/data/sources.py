"""Sources: arrays in memory, memory-mapped files, tables. A source checks all its rows once and then hands out batches."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.batch import Batch, prepare
from aevb.graph import Graph

CHUNK = 4096  # rows checked at a time when data are not loaded whole


class Source:
    """Rows laid out for a model. ``take`` gives the batch of some rows; ``n`` counts them."""

    n: int

    def take(self, rows: Tensor) -> Batch:
        raise TypeError(f"{type(self).__name__} has no take(rows).")


class Resident(Source):
    """Data in memory (the model's device): laid out once, indexed ever after."""

    def __init__(self, graph: Graph, data: Mapping[str, Any], like: Tensor) -> None:
        values = {name: value for name, value in data.items() if name not in ("steps", "lengths")}
        self.batch = prepare(graph, values, like=like, steps=data.get("steps"), lengths=data.get("lengths"))
        self.n = next(iter(self.batch.values())).shape[-2]

    def take(self, rows: Tensor) -> Batch:
        return {name: value.index_select(-2, rows.to(value.device)) for name, value in self.batch.items()}


class Mapped(Source):
    """Memory-mapped arrays: checked in chunks before training, then only the rows of a batch are read."""

    def __init__(self, graph: Graph, data: Mapping[str, Any], like: Tensor) -> None:
        self.graph, self.data, self.like = graph, dict(data), like
        counts = {name: len(value) for name, value in data.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"The data disagree on the number of examples: {', '.join(f'{name} {n}' for name, n in counts.items())}.")
        self.n = next(iter(counts.values()))
        self.masked: set[str] = set()
        for start in range(0, self.n, CHUNK):
            self.masked |= {name for name in self._lay_out(slice(start, start + CHUNK), start) if name.endswith("?")}

    def _lay_out(self, rows: Any, first_row: int = 0) -> Batch:
        values = {name: np.asarray(value[rows]) for name, value in self.data.items()}
        steps, lengths = values.pop("steps", None), values.pop("lengths", None)
        return prepare(self.graph, values, like=self.like, first_row=first_row, steps=steps, lengths=lengths)

    def take(self, rows: Tensor) -> Batch:
        index = rows.cpu().numpy()
        order = np.argsort(index, kind="stable")  # a file is read front to back
        back = torch.as_tensor(np.argsort(order, kind="stable"))
        batch = {name: value.index_select(-2, back.to(value.device)) for name, value in self._lay_out(index[order]).items()}
        for name in self.masked - batch.keys():  # a batch may happen to miss nothing; the plan stays the same
            batch[name] = torch.ones_like(batch[name[:-1]], dtype=torch.bool)
        return batch


def open_source(graph: Graph, data: Any, like: Tensor) -> Source:
    """A source from what the user has: a mapping of arrays or files, a file, or a torch Dataset or DataLoader."""
    if isinstance(data, Source):
        return data
    arrays = read_arrays(data, graph)
    if any(isinstance(value, np.memmap) for value in arrays.values()):
        return Mapped(graph, arrays, like)
    return Resident(graph, arrays, like)


def read_arrays(data: Any, graph: Graph) -> dict[str, Any]:
    if isinstance(data, torch.utils.data.DataLoader):
        data = data.dataset
    if isinstance(data, str | Path):
        return _read_file(Path(data), graph)
    if isinstance(data, Mapping):
        if not data:
            raise ValueError('The data are empty: pass a dictionary from variable to array, e.g. {"x": X}.')
        found: dict[str, Any] = {}
        for name, value in data.items():
            found[name] = _single(Path(value), name, graph) if isinstance(value, str | Path) else value
        return found
    if isinstance(data, torch.utils.data.IterableDataset):
        raise ValueError("An IterableDataset has no rows to return to, so a run could not be resumed. Pass arrays, files or a map-style Dataset.")
    if isinstance(data, torch.utils.data.Dataset):
        return _from_dataset(data, graph)
    names = _names(graph)
    if len(names) == 1:
        return {names[0]: data}
    raise ValueError(f"Pass the data by name: {{{', '.join(f'{name!r}: …' for name in names)}}}.")


def _names(graph: Graph) -> list[str]:
    return [*graph.observed, *graph.given]


def _from_dataset(data: torch.utils.data.Dataset, graph: Graph) -> dict[str, Any]:
    """Rows of a map-style Dataset: dictionaries, tuples in the order (observed, given), or single arrays."""
    rows = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
    if not rows:
        raise ValueError("The Dataset has no rows.")
    names = list(rows[0]) if isinstance(rows[0], Mapping) else _names(graph)
    columns = (
        ([row[name] for row in rows] for name in names)
        if isinstance(rows[0], Mapping)
        else zip(*(row if isinstance(row, tuple | list) else (row,) for row in rows), strict=True)
    )
    return {name: np.stack([np.asarray(value) for value in column]) for name, column in zip(names, columns, strict=False)}


def _single(path: Path, name: str, graph: Graph) -> Any:
    found = _read_file(path, graph)
    return found[name] if name in found else next(iter(found.values()))


def _read_file(path: Path, graph: Graph) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    names = _names(graph)
    try:
        if path.suffix == ".npy":
            return {names[0]: np.load(path, mmap_mode="r", allow_pickle=False)}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                known = [key for key in archive.files if key in graph.shapes or key in ("steps", "lengths")]
                return {key: archive[key] for key in known} or {names[0]: archive[archive.files[0]]}
        if path.suffix in (".csv", ".tsv", ".txt"):
            return {names[0]: _read_table(path)}
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    raise ValueError(f"{path}: files of kind {path.suffix or 'no suffix'} are not known; use .npy, .npz or .csv.")


def _read_table(path: Path) -> np.ndarray:
    """A CSV file of numbers; a header is skipped, an empty cell is missing."""
    with path.open(newline="", encoding="utf-8") as file:
        sample = file.read(4096)
        file.seek(0)
        delimiter = "\t" if path.suffix == ".tsv" or ("\t" in sample and "," not in sample) else ";" if ";" in sample and "," not in sample else ","
        rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    if not rows:
        raise ValueError("it is empty")
    header = not all(_number(cell) is not None for cell in rows[0])
    body = rows[1:] if header else rows
    width = len(rows[0])
    table = np.empty((len(body), width))
    for i, row in enumerate(body):
        if len(row) != width:
            raise ValueError(f"line {i + 1 + header} has {len(row)} cells, the first has {width}")
        for j, cell in enumerate(row):
            value = _number(cell)
            if value is None:
                raise ValueError(f"line {i + 1 + header}, column {j + 1} holds {cell!r}, not a number")
            table[i, j] = value
    return table


def _number(cell: str) -> float | None:
    text = cell.strip()
    if text in ("", "NA", "NaN", "nan", "null"):
        return float("nan")
    try:
        return float(text)
    except ValueError:
        return None
