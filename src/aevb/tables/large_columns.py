"""Columns of a large table, whose cells are read part by part: their facts, kinds and codes.

The facts of a column hold for all its rows. Its kind is chosen from random cells where the values
themselves are needed.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aevb.data.large_tables import LargeTable
from aevb.data.parquet import GroupedRows
from aevb.tables.amounts import Amounts, amounts_of, form_of
from aevb.tables.columns import (
    Column,
    asked_choice,
    column_of,
    dropped,
    warn_of_markers,
    warn_of_words,
)
from aevb.tables.frames import read_table
from aevb.tables.kinds import (
    FEW,
    LEFT_OUT,
    MOST_ASKED,
    Choice,
    Facts,
    check_moments,
    choose,
    decimals_of,
    infinite_error,
    number_levels,
    ordered_levels,
    steps_of_day,
    with_remarks,
)
from aevb.tables.reading import Cells

RANDOM_CELLS = 2**17  # of a column, from which its kind is chosen


def read_columns(
    table: LargeTable, kinds: Mapping[str, str], drop: Collection[str], words: Sequence[str]
) -> list[Column]:
    """Read the columns of a schema in one pass over the table; amounts need a second one."""
    found = _gathered(table, [name for name in table.names if name not in drop], words)
    forms = {
        name: form
        for name, one in found.items()
        if kinds.get(name) not in ("binary", "category", "ordered")  # whose levels are texts
        and isinstance(one, Texts)
        and (form := one.amounts()) is not None
    }
    for name, one in _gathered(table, list(forms), words, forms).items():
        if one.facts().distinct > 1:
            found[name] = one
    columns = []
    for name in table.names:
        if name in drop:
            columns.append(dropped(name))
            continue
        one = found[name]
        facts = replace(one.facts(), amounts=forms.get(name) if one.type == "number" else None)
        warn_of_markers(one.random_cells())
        warn_of_words(name, one.words, one.rows)
        wanted = kinds.get(name)
        choice = one.choice(facts) if wanted is None else asked_choice(name, facts, wanted)
        columns.append(column_of(name, one.like.dtype, facts, choice))
    return columns


def _gathered(
    table: LargeTable,
    names: Sequence[str],
    words: Sequence[str],
    amounts: Mapping[str, Amounts] | None = None,
) -> dict[str, Gathered]:
    found: dict[str, Gathered] = {}
    for first, frame in table.columns(names) if names else ():
        part = read_table(frame)
        for name in part:
            try:
                cells = part.cells(name, words, (), (amounts or {}).get(name))
            except ValueError as error:
                raise from_row(error, first) from None
            if name not in found:
                kind = Texts if cells.type in ("text", "category") else Numbers
                found[name] = kind(cells)
            found[name].add(cells, first)
    return found


def from_row(error: ValueError, first: int) -> ValueError:
    """The same error of a part of a table, which says where the part begins."""
    told = f" Its rows are counted from row {first:,} of the table." if first else ""
    return ValueError(f"{error}{told}")


# Facts --------------------------------------------------------------------------------------------


class Gathered(ABC):
    """What is known of a column after some parts of it."""

    def __init__(self, cells: Cells) -> None:
        nothing = np.zeros(0, bool)
        self.like = replace(cells, values=cells.values[:0], missing=nothing, words={})
        self.type, self.rows, self.missing = cells.type, 0, 0
        self.words: Counter[str] = Counter()
        self.draw = np.random.default_rng(0)
        self.random, self.keys = cells.values[:0], np.zeros(0)

    def add(self, cells: Cells, first: int) -> None:
        """Add a part that begins at the row ``first``."""
        self.rows += len(cells.values)
        self.missing += int(cells.missing.sum())
        self.words.update(cells.words)
        known = cells.values[~cells.missing]
        # The cells with the smallest random keys are a random sample.
        self.random = np.concatenate([self.random, known])
        self.keys = np.concatenate([self.keys, self.draw.random(len(known))])
        if len(self.keys) > RANDOM_CELLS:
            some = np.sort(np.argpartition(self.keys, RANDOM_CELLS)[:RANDOM_CELLS])
            self.random, self.keys = self.random[some], self.keys[some]
        self.gather(cells, known, first)

    @abstractmethod
    def gather(self, cells: Cells, known: np.ndarray, first: int) -> None:
        """Add the known cells of a part."""

    @abstractmethod
    def facts(self) -> Facts:
        """The facts of all cells."""

    @abstractmethod
    def choice(self, facts: Facts) -> Choice:
        """The kind of the column."""

    def random_cells(self) -> Cells:
        return self._cells(self.random)

    def _cells(self, values: np.ndarray) -> Cells:
        return replace(self.like, values=values, missing=np.zeros(len(values), bool))


class Texts(Gathered):
    """Texts or a categorical type: the distinct ones, as long as they are few."""

    def __init__(self, cells: Cells) -> None:
        super().__init__(cells)
        self.seen: set[Any] | None = set()
        self.declared: dict[Any, None] = {}
        self.forms: dict[str, str] | None = {} if cells.type == "text" else None
        self.times: Counter[str] = Counter()  # cells of each form, by its first text

    def gather(self, cells: Cells, known: np.ndarray, first: int) -> None:
        self.declared |= dict.fromkeys(cells.levels or ())
        if self.seen is None and self.forms is None:
            return
        texts = Counter(known.tolist())
        if self.seen is not None:
            self.seen.update(texts)
            if len(self.seen) > MOST_ASKED:
                self.seen = None
        if (forms := self.forms) is not None:
            for text, count in texts.items():
                if (form := form_of(text)) is None:
                    self.forms = None
                    break
                self.times[forms.setdefault(form, text)] += count

    def amounts(self) -> Amounts | None:
        return amounts_of(self.like.name, self.times) if self.forms else None

    def facts(self) -> Facts:
        levels, distinct = None, MOST_ASKED + 1
        if self.seen is not None:
            declared = None if self.like.levels is None else tuple(self.declared)
            levels = ordered_levels(replace(self.like, levels=declared), self.seen)
            levels, distinct = levels if len(levels) <= MOST_ASKED else None, len(self.seen)
        words = tuple(sorted(self.words))
        return Facts(self.type, self.rows, self.missing, distinct, levels, self.like.ordered, words)

    def choice(self, facts: Facts) -> Choice:
        if self.seen is not None:
            return choose(self._cells(np.fromiter(self.seen, object, len(self.seen))), facts)
        choose(self.random_cells(), facts)  # refuses numbers that are written as text
        reason = (
            f"more than {MOST_ASKED:,} levels in {facts.rows - facts.missing:,} known cells: most "
            f"levels are too rare to learn"
        )
        if self.type == "text" and len(set(self.random.tolist())) == len(self.random):
            reason = f"an identifier: text that differs in {len(self.random):,} random rows"
        return with_remarks(Choice(LEFT_OUT, "", reason), facts)


class Numbers(Gathered):
    """Numbers, truth values or dates: their range, their moments, and the distinct ones if few."""

    def __init__(self, cells: Cells) -> None:
        super().__init__(cells)
        self.low, self.high, self.whole = math.inf, -math.inf, True
        self.moments, self.logs, self.least = Moments(), Moments(), math.inf
        self.decimals: int | None = 0
        self.per_day = 1 if cells.type in ("date", "datetime") else None
        self.times: Counter[float] | None = Counter()
        self.rising, self.last = True, np.zeros(0)  # whether numbers rise by 1 from row to row
        self.infinite, self.first_infinite = 0, 0

    def gather(self, cells: Cells, known: np.ndarray, first: int) -> None:
        values = known.astype(float)
        if (infinite := np.isinf(values)).any():
            if not self.infinite:
                row = np.flatnonzero(~cells.missing)[np.argmax(infinite)]
                self.first_infinite = first + int(row)
            self.infinite += int(infinite.sum())
        if not len(values) or self.infinite:
            return
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self.whole = self.whole and bool((values == np.rint(values)).all())
        if self.rising:
            self.rising = bool((np.diff(values, prepend=self.last) == 1).all())
            self.last = values[-1:]
        self.moments.add(values)
        if self.low >= 0 and len(positive := values[values > 0]):
            self.logs.add(np.log(positive))
            self.least = min(self.least, float(positive.min()))
        if self.decimals is not None:
            here = decimals_of(values)
            self.decimals = None if here is None else max(here, self.decimals)
        if self.per_day is not None:
            finer = steps_of_day(values)
            self.per_day = None if finer is None else max(finer, self.per_day)
        if self.times is not None:
            distinct, times = np.unique(values, return_counts=True)
            self.times.update(dict(zip(distinct.tolist(), times.tolist(), strict=True)))
            if len(self.times) > MOST_ASKED:
                self.times = None

    def facts(self) -> Facts:
        if self.infinite:
            raise infinite_error(self.like.name, self.infinite, self.first_infinite)
        if self.rows == self.missing:
            return Facts(self.type, self.rows, self.missing, 0)
        if self.times is None:
            numbers, times = np.unique(self.random.astype(float), return_counts=True)
            distinct, levels = MOST_ASKED + 1, None
        else:
            numbers = np.array(sorted(self.times))
            times = np.array([self.times[number] for number in numbers.tolist()])
            distinct, levels = len(numbers), number_levels(self.like, numbers)
        mean, spread = self.moments.mean, self.moments.spread
        largest = max(abs(self.low), abs(self.high))
        check_moments(self.like.name, mean, spread, largest, distinct)
        logs, known = self.logs, self.rows - self.missing
        positive = self.low >= 0 and logs.count > 0
        zeros = known - logs.count if positive else 0
        least = self.least if zeros else None
        return Facts(
            self.type,
            self.rows,
            self.missing,
            distinct,
            levels,
            words=tuple(sorted(self.words)),
            whole=self.whole,
            low=self.low,
            high=self.high,
            mean=mean,
            spread=spread,
            log_mean=logs.mean if positive else None,
            log_spread=logs.spread if positive else None,
            spike=float(numbers[times.argmax()]),
            spike_share=float(times.max() / times.sum()),
            decimals=self.decimals,
            per_day=self.per_day,
            zeros=zeros,
            zero_share=zeros / known,
            least=least,
        )

    def choice(self, facts: Facts) -> Choice:
        values = self.random
        if self.rising and len(values) > FEW:  # random cells do not show it
            values = self.low + np.arange(len(values))
        return choose(self._cells(values), replace(facts, rows=len(values), missing=0))


class Moments:
    """The mean and the standard deviation of numbers that are added part by part."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            count, mean = self.count + len(values), float(values.mean())
            apart = mean - self.mean
            # The squares around the common mean.
            self.squares += float(values.var()) * len(values)
            self.squares += apart * apart * self.count * len(values) / count
            self.mean = mean if not self.count else self.mean + apart * len(values) / count
            self.count = count

    @property
    def spread(self) -> float:
        return math.sqrt(self.squares / self.count) if self.squares >= 0 else math.nan


# Codes --------------------------------------------------------------------------------------------


class EncodedRows(GroupedRows):
    """A variable of the rows of a large table, [N] or [N, C], encoded when it is indexed.

    ``encode`` encodes a frame of the columns. With ``hide``, the rows are followed by a copy in
    which this share of the cells is missing: the same cells for the same ``seed``.
    """

    dtype = np.dtype(np.float64)

    def __init__(
        self,
        table: LargeTable,
        columns: Sequence[str],
        encode: Callable[[Any], np.ndarray],
        *,
        flat: bool,
        hide: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.table, self.columns, self.encode = table, tuple(columns), encode
        self.groups, self.flat, self.hide, self.seed = table.groups, flat, hide, seed
        self.length = len(self.columns)
        n = table.num_rows * (2 if hide else 1)
        self.shape = (n,) if flat else (n, self.length)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.table.sizes * (2 if self.hide else 1)

    def with_hidden(self, share: float, seed: int) -> EncodedRows:
        """The rows, followed by a copy in which a share of the known cells is missing."""
        return EncodedRows(
            self.table, self.columns, self.encode, flat=self.flat, hide=share, seed=seed
        )

    def sample(self) -> np.ndarray:
        """The random rows of the table, encoded."""
        return self.encode(self.table.sample.select(self.columns))

    def decoded(self, group: int) -> np.ndarray:
        part = group % len(self.table.sizes)
        try:
            values = self.encode(self.table.part(part, self.columns)).reshape(-1, self.length)
        except ValueError as error:
            raise from_row(error, sum(self.table.sizes[:part])) from None
        if part == group:
            return values
        draw = np.random.default_rng([self.seed, part, zlib.crc32(repr(self.columns).encode())])
        return np.where(draw.random(values.shape) < self.hide, np.nan, values)
