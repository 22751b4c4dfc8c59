"""A table in large Parquet files, which is read by parts and described by random rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.parquet import RowGroups
from aevb.data.text_tables import distinct

CELLS, LEAST_ROWS = 2_000_000, 20_000  # random rows have so many cells, or are so many if more
FEW = 10_000  # random rows for models whose log p is estimated by sampling
HELD = 20_000  # most rows that are held out
SPREAD = 64  # row groups that random rows are read from, at least
AT_ONCE = 2**20  # cells that are read or computed at once, if row groups allow it


def _unchanged(frame: Any) -> Any:
    return frame


@dataclass(frozen=True, eq=False)
class LargeTable:
    """Columns of Parquet files whose rows are read by row groups.

    ``marked`` is applied to every frame that is read; it makes marked cells missing. ``held`` maps
    a row group to its rows that do not belong to the table: those held out. ``told(rows, all)`` is
    called during a pass over all rows. ``most`` is the largest number of random rows.
    """

    groups: RowGroups
    names: tuple[str, ...]
    marked: Callable[[Any], Any] = _unchanged
    held: Mapping[int, np.ndarray] = field(default_factory=dict)
    told: Callable[[int, int], None] | None = None
    most: int = LEAST_ROWS

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each part; a part is a row group without its rows held out."""
        return tuple(len(self._kept(g)) for g in self.numbers)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The row group of each part."""
        sizes = enumerate(self.groups.sizes)
        return tuple(g for g, size in sizes if size > len(self.held.get(g, ())))

    @property
    def column_names(self) -> list[str]:
        return list(self.names)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    def _kept(self, group: int) -> range | np.ndarray:
        """The rows of a row group that belong to the table, counted from the group's first."""
        rows = range(self.groups.sizes[group])
        return rows if group not in self.held else np.delete(rows, self.held[group])

    def select(self, names: Sequence[str]) -> LargeTable:
        return replace(self, names=tuple(names))

    def part(self, part: int, names: Sequence[str] | None = None) -> Any:
        """Read columns of a part as a ``pyarrow.Table``."""
        return self.marked(self._raw(part, names or self.names))

    def _raw(self, part: int, names: Sequence[str]) -> Any:
        group = self.numbers[part]
        found = self.groups.read(group, names)
        return found.take(self._kept(group)) if group in self.held else found

    def parts(self, *, told: bool = True) -> Iterator[Any]:
        """Read all columns, in parts of at most ``AT_ONCE`` cells, in the order of the rows."""
        done, most = 0, max(1, AT_ONCE // len(self.names))
        for part, size in enumerate(self.sizes):
            frame = self._raw(part, self.names)
            for start in range(0, size, most):
                yield self.marked(frame.slice(start, most))
            done += size
            if told and self.told is not None:
                self.told(done, self.num_rows)

    def columns(self, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Read columns of all parts, few at a time: the number of the first row, and a frame."""
        first = 0
        for part, size in enumerate(self.sizes):
            few = max(1, AT_ONCE // size)
            for j in range(0, len(names), few):
                yield first, self.part(part, names[j : j + few])
            first += size
            if self.told is not None:
                self.told(first, self.num_rows)

    # Random rows ----------------------------------------------------------------------------------

    def few(self) -> LargeTable:
        """The same table with few random rows."""
        return self if self.most <= FEW else replace(self, most=FEW)

    @cached_property
    def sample(self) -> Any:
        """Random rows, in their order, as a ``pyarrow.Table``."""
        return self._taken(self._sampled)

    @cached_property
    def sample_rows(self) -> np.ndarray:
        """The numbers of the random rows in the files, from 0."""
        found = [
            self.groups.starts[group] + np.asarray(self._kept(group))[rows]
            for part, rows in self._sampled.items()
            for group in [self.numbers[part]]
        ]
        return np.concatenate(found)

    @cached_property
    def _sampled(self) -> dict[int, np.ndarray]:
        return self._drawn(min(self.num_rows, self.most), 0)

    def split(self, share: float, seed: int) -> tuple[LargeTable, Any]:
        """Hold out a share of the rows at random, at most ``HELD`` of them.

        Return the table of the other rows, and a ``pyarrow.Table`` of those held out.
        """
        drawn = self._drawn(min(max(1, round(self.num_rows * share)), HELD), seed)
        held = {
            self.numbers[part]: np.asarray(self._kept(self.numbers[part]))[rows]
            for part, rows in drawn.items()
        }
        both = {g: np.union1d(self.held.get(g, rows), rows) for g, rows in held.items()}
        return replace(self, held={**self.held, **both}), self._taken(drawn)

    def _drawn(self, count: int, seed: int) -> dict[int, np.ndarray]:
        """Random rows of random parts: part → its rows in ascending order."""
        draw = np.random.default_rng(seed)
        order, sizes = draw.permutation(len(self.sizes)), np.array(self.sizes)
        enough = int(np.searchsorted(np.cumsum(sizes[order]), count)) + 1
        parts = np.sort(order[: max(SPREAD, enough)])
        counts = draw.multivariate_hypergeometric(sizes[parts], count, method="marginals")
        return {
            int(part): np.sort(draw.choice(sizes[part], some, replace=False, shuffle=False))
            for part, some in zip(parts, counts, strict=True)
            if some
        }

    def _taken(self, drawn: Mapping[int, np.ndarray]) -> Any:
        import pyarrow as pa  # type: ignore[import-untyped]

        frames = [self._raw(part, self.names).take(rows) for part, rows in drawn.items()]
        return self.marked(pa.concat_tables(frames).unify_dictionaries().combine_chunks())


def open_large(path: Path) -> LargeTable | None:
    """Open the table of large Parquet files; None if they are small."""
    try:
        groups = RowGroups(path)
        names = distinct(groups.schema.names)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None
    if not groups.is_large(len(names)):
        return None
    return LargeTable(groups, tuple(names), most=max(LEAST_ROWS, CELLS // len(names)))


def in_memory(rows: Any) -> Any:
    """The random rows of a large table; a frame as it is."""
    return rows.sample if isinstance(rows, LargeTable) else rows
