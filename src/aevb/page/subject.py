"""What a page shows: a run with its model, and the rows that the page is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.datasets import Recipe
from aevb.data.sources import Source, open_source
from aevb.model import Model
from aevb.tables.schema import Schema
from aevb.training.run import Run

CHUNK = 1000  # rows per batch


@dataclass(frozen=True)
class Split:
    """Some rows of a page: as data of the model, and as their user knows them.

    ``data`` are arrays by variable, without latents that are to be found out. ``labels`` are class
    numbers, −1 where unknown. ``numbers`` are the numbers of the rows in their file, from 0, and
    ``cells`` the columns of a table, with those that the model does not read.
    """

    name: str  # "training", "held out", "test" or "validation"; "" for rows of unknown origin
    data: Mapping[str, Any]
    labels: np.ndarray | None = None
    numbers: np.ndarray | None = None
    cells: Any = None  # a pyarrow.Table


@dataclass(frozen=True)
class Subject:
    """A run, its model and its rows."""

    name: str
    model: Model
    splits: Sequence[Split] = ()
    folder: Path | None = None
    run: Run | None = None
    recipe: Recipe | None = None
    schema: Schema | None = None
    image: tuple[int, ...] | None = None  # the shape of a row of the first observed variable
    ink: bool = True  # whether its grey levels are ink on paper, or light as in photographs
    label_names: tuple[str, ...] = ()  # of the labels 0, 1, …, if they are no numbers
    sources: dict[int, Source] = field(default_factory=dict, repr=False, compare=False)
    greys: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def standardised(self) -> bool:
        """Whether the model reads standardised values of arrays."""
        return self.recipe is not None and self.recipe.prepare == "standardise"

    @property
    def judged(self) -> Split:
        """The rows to judge the model by: those that it was not trained on, if there are any."""
        return self.splits[-1]

    def source(self, i: int) -> Source:
        """The rows of a split as a source of batches, opened once."""
        if i not in self.sources:
            graph = self.model.graph
            data = {
                name: value
                for name, value in self.splits[i].data.items()
                if name not in graph.latents
            }
            self.sources[i] = open_source(graph, data, self.model._parameter())
        return self.sources[i]


@dataclass(frozen=True)
class Rows:
    """The rows that a map shows: all rows of a subject, or a random choice of them.

    ``split`` and ``index`` say where each row is: the number of its split, and of the row in it.
    """

    subject: Subject
    split: np.ndarray
    index: np.ndarray
    total: int

    @classmethod
    def chosen(cls, subject: Subject, most: int, seed: int = 0) -> Rows:
        """Choose at most ``most`` rows at random, in their order."""
        sizes = [subject.source(i).n for i in range(len(subject.splits))]
        split = np.repeat(np.arange(len(sizes)), sizes)
        index = np.concatenate([np.arange(size) for size in sizes])
        total = len(split)
        if total > most:
            kept = np.sort(np.random.default_rng(seed).permutation(total)[:most])
            split, index = split[kept], index[kept]
        return cls(subject, split, index, total)

    def __len__(self) -> int:
        return len(self.index)

    def some(self, kept: np.ndarray) -> Rows:
        return Rows(self.subject, self.split[kept], self.index[kept], self.total)

    def batches(self, chunk: int = CHUNK) -> Iterator[tuple[np.ndarray, dict[str, Tensor]]]:
        """Yield the positions of some rows and their batch. Rows of a batch are of one split."""
        for i in range(len(self.subject.splits)):
            mine = np.flatnonzero(self.split == i)
            for start in range(0, len(mine), chunk):
                part = mine[start : start + chunk]
                yield part, self.subject.source(i).take(torch.from_numpy(self.index[part]))

    def labels(self) -> np.ndarray | None:
        """The class numbers of the rows; None if no row has one."""
        splits = self.subject.splits
        found = np.full(len(self), -1)
        for i, one in enumerate(splits):
            if one.labels is not None:
                mine = self.split == i
                # An unknown label is −1, or NaN among real numbers.
                labels = np.nan_to_num(np.asarray(one.labels, dtype=float), nan=-1.0)
                found[mine] = labels[self.index[mine]]
        return found if (found >= 0).any() else None

    def numbers(self) -> np.ndarray:
        """The numbers of the rows in their file or split, from 0."""
        found = self.index.copy()
        for i, one in enumerate(self.subject.splits):
            if one.numbers is not None:
                mine = self.split == i
                found[mine] = one.numbers[self.index[mine]]
        return found
