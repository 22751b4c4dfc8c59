"""Read sequences from frames of pandas, polars or pyarrow: a time index or an id column.

A line of the frame is a step. Its time is the frame's index (pandas) or a column; an id says which
sequence it belongs to. :func:`sequences` names them where they cannot be found by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from aevb.data.files import assign
from aevb.data.frame_times import index_of, split_keys
from aevb.data.long_tables import Lines, refuse_count_in_frame
from aevb.data.preparation import Standardised
from aevb.data.sequence_index import SequenceIndex
from aevb.data.time_steps import ROUNDED
from aevb.declare.graph import Graph
from aevb.estimate.keys import LENGTHS
from aevb.estimate.places import INDICES, Placed, named_columns, refuse_other_columns

COMMA = r"^\s*[+-]?\d+,\d+\s*$"
GAPS = ("refuse", "missing")
FRAMES = {"pandas": ("DataFrame", "Series"), "polars": ("DataFrame",), "pyarrow": ("Table",)}


@dataclass(frozen=True, eq=False, repr=False)
class Sequences(Mapping[str, "Sequences"]):
    """Sequences of a frame. ``["flow"]`` and ``[["a", "b"]]`` select columns, as in a frame.

    ``fit``, ``forecast`` and the other methods take it as data: ``fit(model, found)`` assigns
    columns to variables by their names, ``model.forecast(steps=12, x=found["flow"])`` names the
    variable. Frames of pandas need no :func:`sequences` if their index holds the times.

    Attributes:
        frame: The columns of data, as a frame of narwhals.
        names: The names of the selected columns.
        index: The ids and times of the sequences.
        lines: The lines of the frame, by sequence and step.
        filled: The same with the steps that ``gaps="missing"`` added, which are −1.

    >>> import pandas as pd
    >>> days = pd.DataFrame({"shop": [1, 1, 2, 2], "day": [1, 2, 1, 2], "sold": [3.0, 1.0, 2.0, 5]})
    >>> found = sequences(days, id="shop", time="day")
    >>> found["sold"]
    2 sequences of 2 steps by shop (day 1 to 2 in the first, 1 apart): sold
    >>> found.cells().tolist()
    [[3.0], [1.0], [2.0], [5.0]]
    """

    frame: Any  # a narwhals frame of the columns of data
    names: tuple[str, ...]
    index: SequenceIndex
    lines: Lines  # the lines of the frame, by sequence and step
    filled: np.ndarray  # the same with the added steps, which are −1

    def __getitem__(self, name: str | Sequence[str]) -> Sequences:  # type: ignore[override]
        wanted = (name,) if isinstance(name, str) else tuple(name)
        for one in wanted:
            if one not in self.names:
                raise KeyError(f"{one!r} is not a column; those are {', '.join(self.names)}.")
        return replace(self, names=wanted)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        index = self.index
        lengths = index.lengths
        low, high = min(lengths), max(lengths)
        steps = f"{low}" if low == high else f"{low} to {high}"
        n = len(lengths)
        what = "1 sequence" if n == 1 else f"{n} sequences"
        by = "" if index.ids is None else f" by {index.id_name}"
        apart = "" if index.spacing is None else f", {index.clock.distance(index.spacing)} apart"
        where = f"{index.time_name} {index.span(0)}" + (" in the first" if n > 1 else "")
        columns = ", ".join(self.names)
        return f"{what} of {steps} step{'s' * (high != 1)}{by} ({where}{apart}): {columns}"

    @cached_property
    def _stretched(self) -> Lines:
        starts = np.cumsum([0, *self.index.lengths[:-1]])
        return replace(self.lines, order=self.filled, starts=starts)

    def values(self) -> Any:
        """The columns, each as :class:`Sequences`."""
        return [self[name] for name in self.names]

    def cells(self) -> np.ndarray:
        """Return the numbers of all columns, [lines, columns]; missing cells are NaN."""
        import narwhals as nw

        found = []
        for name in self.names:
            column = self.frame[name]
            if not (column.dtype.is_numeric() or column.dtype == nw.Boolean):
                if column.dtype == nw.String and column.str.contains(COMMA).all():
                    raise ValueError(
                        f"The column {name!r} holds texts with a decimal comma, such as "
                        f"{column[0]!r}, not numbers. Read the file with "
                        f"pd.read_csv(…, decimal=',') (polars: decimal_comma=True)"
                    )
                raise ValueError(
                    f"The column {name!r} holds {column.dtype}, not numbers. Leave it out, or "
                    f"number its categories from 0"
                )
            found.append(np.asarray(column.cast(nw.Float64).to_numpy(), dtype=float))
        return np.stack(found, 1)

    def variable(self, graph: Graph, name: str) -> Any:
        """Return the values of a variable, by sequence.

        Arguments:
            graph: The graph of the model (``model.graph``).
            name: The variable.

        Returns:
            An array [N, T, …], or a list of N arrays if the lengths differ.

        Raises:
            ValueError: The number of columns is not the size of the variable.

        >>> import pandas as pd
        >>> from aevb import zoo
        >>> found = sequences(pd.DataFrame({"flow": [3.0, 1.0, 2.0]}))
        >>> found.variable(zoo.local_level().graph, "x").shape
        (1, 3, 1)
        """
        d, k = graph.size(name), len(self.names)
        labels = d > 1 == k and (name in graph.given or graph.rule("p", name).spec.categorical)
        if k != d and not labels:
            need = f"{d} column{'s' * (d != 1)}" + (", or one of labels" if d > 1 else "")
            select = f"frame[[{self.names[0]!r}]]" if d == 1 else f"frame[{list(self.names[:d])}]"
            raise ValueError(
                f"{name} needs {need}, but the frame has {k} ({', '.join(self.names[:8])}"
                f"{', …' if k > 8 else ''}). A line of a frame is a step: select the columns of "
                f"{name}, e.g. {select}. If a line is a whole sequence, pass frame.to_numpy()."
            )
        try:
            cells = self.cells()
        except ValueError as error:
            raise ValueError(f"{name}: {error}.") from None
        shape = () if labels else graph.shapes[name]
        if not graph.timed[name]:
            try:
                constants = self.lines.constants(name, cells)
            except ValueError as error:
                raise ValueError(f"{error}.") from None
            return constants.reshape(len(constants), *shape)
        whole = np.concatenate([cells, np.full((1, k), np.nan)])  # the last line is missing
        found = self._stretched.sequences(whole)
        if isinstance(found, list):
            return [row.reshape(len(row), *shape) for row in found]
        return found.reshape(*found.shape[:2], *shape)


def sequences(
    frame: Any, *, id: str | None = None, time: str | None = None, gaps: str = "refuse"
) -> Sequences:
    """Read the lines of a frame as the steps of one sequence, or of one sequence per id.

    Without ``id`` and ``time``, an index of pandas that is not the default one holds the times, or,
    with two levels, the ids and the times. Otherwise columns with names such as ``id``, ``step`` or
    ``year`` are found as in a file. A frame with neither is one sequence.

    Arguments:
        frame: A frame of pandas, polars or pyarrow, or a series of pandas.
        id: The column, or level of the index, that says which sequence a line belongs to.
        time: The column, or level of the index, of the times.
        gaps: What to do about holes between the times: "refuse", or "missing" to fill them with
            missing steps.

    Returns:
        The :class:`Sequences`.

    >>> import pandas as pd
    >>> months = pd.date_range("2024-01-31", periods=3, freq="ME")
    >>> sequences(pd.DataFrame({"sales": [3.0, 1.0, 2.0]}, index=months))
    1 sequence of 3 steps (time 2024-01-31 to 2024-03-31, 1 month apart): sales

    Raises:
        ValueError: Times are missing, not in order, repeated, or uneven; it says how to fix it.
    """
    return _read(frame, None, id, time, gaps)


def is_frame(value: Any) -> bool:
    """Return whether a value is a frame (or a series of pandas), or :class:`Sequences`."""
    if isinstance(value, Sequences):
        return True
    return any(
        kind.__name__ in FRAMES.get(kind.__module__.partition(".")[0], ())
        for kind in type(value).__mro__
    )


def frames_in_arrays(
    graph: Graph, data: Mapping[str, Any], lengths: Any = None
) -> tuple[dict[str, Any], Any, SequenceIndex | None]:
    """Replace the frames among the values of variables by arrays.

    Returns the data, the lengths, and the index of the frames; None if there are no frames.

    Raises ValueError if the frames have different sequences or times.
    """
    found: dict[str, Any] = dict(data)
    index: SequenceIndex | None = None
    columns: dict[str, Sequence[str]] = {}
    constants: dict[str, Any] = {}
    if not any(graph.timed.get(name, False) for name in data):
        return found, lengths, None
    for name, value in data.items():
        if name not in graph.shapes or not is_frame(value):
            continue
        if not graph.timed[name] and not isinstance(value, Sequences):
            constants[name] = value
            continue
        try:
            read = value if isinstance(value, Sequences) else _read(value, graph)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        found[name] = read.variable(graph, name)
        if index is not None:
            _same(index, read.index, next(iter(columns)), name)
        index = index or read.index
        columns[name] = read.names
    if index is None:
        return found, lengths, None
    found |= {name: _by_id(index, name, value) for name, value in constants.items()}
    if lengths is not None:
        raise ValueError(
            f"{next(iter(columns))} is a frame, whose index says how long its sequences are. Leave "
            f"out lengths=."
        )
    count = set(index.lengths)
    return found, count.pop() if len(count) == 1 else None, replace(index, columns=columns)


def column_names(
    graph: Graph, data: Mapping[str, Any], index: SequenceIndex | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the names of the columns of each variable whose data are a frame with names.

    ``index`` is that of :func:`frames_in_arrays`, which knows the names of variables with time.
    """
    timed = {} if index is None else index.columns
    found = {
        name: tuple(names)
        for name, names in timed.items()
        if isinstance(data.get(name), Sequences) or named_columns(data.get(name))
    }
    for name, value in data.items():
        if name not in found and (is_frame(value) or isinstance(value, Standardised)):
            found[name] = named_columns(value)
    return {name: columns for name, columns in found.items() if name in graph.shapes and columns}


def frame_by_variable(data: Any, graph: Graph) -> Placed:
    """Assign the columns of a frame to the variables of a model, as those of a table in a file."""
    read = data if isinstance(data, Sequences) else _read(data, graph)
    taken = assign(read.names, graph)
    found = {name: read[cells].variable(graph, name) for name, cells in taken.items()}
    lengths = set(read.index.lengths)
    names = {name: tuple(columns) for name, columns in taken.items()}
    found |= {LENGTHS: lengths.pop()} if len(lengths) == 1 else {}
    places = replace(INDICES, pace=read.index.clock.pace(read.index.spacing))
    return Placed(found, places, names)


def future_in_arrays(
    index: SequenceIndex | None, data: Mapping[str, Any], steps: int, graph: Graph, what: str
) -> dict[str, Any]:
    """Replace frames of the future by arrays, [N, steps, …], at the times after the past.

    ``what`` begins the messages.

    Raises ValueError if a time is missing, naming it.
    """
    found = dict(data)
    for name, value in data.items():
        if name not in graph.shapes or not is_frame(value):
            continue
        if index is None:
            raise ValueError(
                f"{what}the future of {name} is a frame, but the past is not. Pass the past as a "
                f"frame too, or the future as an array."
            )
        read = value if isinstance(value, Sequences) else _read(value, graph)
        theirs = read.variable(graph, name)
        if (isinstance(value, Sequences) or named_columns(value)) and name in index.columns:
            past = index.columns[name]
            refuse_other_columns(f"{what}{name}", read.names, past, "the past has")
        found[name] = np.stack(
            [
                _at(index, read.index, theirs, row, ahead, f"{what}the future of {name}")
                for row, ahead in enumerate(index.ahead(steps))
            ]
        )
    return found


def _at(
    index: SequenceIndex, other: SequenceIndex, values: Any, row: int, times: np.ndarray, what: str
) -> np.ndarray:
    """Return the values at some times of the sequence that is a row of the past."""
    where = 0
    if index.ids is not None:
        ids = [] if other.ids is None else other.ids.tolist()
        if index.ids[row] not in ids:
            raise ValueError(f"{what} lacks the {index.id_name} {index.ids[row]}.")
        where = ids.index(index.ids[row])
    clock = other.times
    if other.clock.utc != index.clock.utc and other.other_clock is not None:
        clock = other.other_clock
    there = clock[where]
    if there.dtype.kind != times.dtype.kind and "M" in there.dtype.kind + times.dtype.kind:
        raise ValueError(
            f"{what} has the times {other.span(where)}, those of the past are {index.span(row)}. "
            f"Give both the same kind of index."
        )
    if (index.clock.zone is None) != (other.clock.zone is None):
        aware, naive = ("past", "future") if other.clock.zone is None else ("future", "past")
        raise ValueError(
            f"{what} and the past must both have a time zone, or none: the {aware} has one, the "
            f"{naive} has none. Convert one of them, e.g. frame.tz_localize(…)."
        )
    at = np.clip(np.searchsorted(there, times), 0, len(there) - 1)
    before = np.maximum(at - 1, 0)
    at = np.where(np.abs(there[before] - times) < np.abs(there[at] - times), before, at)
    away = np.abs(there[at] - times)
    # Numbers may be rounded, such as months written in years.
    assert index.spacing is not None
    limit = ROUNDED * index.spacing.size if away.dtype.kind == "f" else away.dtype.type(0)
    wrong = away > limit
    if wrong.any():
        raise ValueError(
            f"{what} lacks the {index.time_name} {index.clock.text(times[wrong.argmax()])}"
            f"{index.among(row)}; the forecast goes from {index.clock.text(times[0])} to "
            f"{index.clock.text(times[-1])}, these lines from {other.span(where)}."
        )
    return np.asarray(values[where])[at]


def _by_id(index: SequenceIndex, name: str, frame: Any) -> Any:
    """Return a frame with one line per sequence in the order of the sequences.

    An index of pandas holds their ids; without one, the lines are in order, as in an array.
    """
    if index.ids is None or not hasattr(frame, "index"):
        return frame
    import pandas as pd  # type: ignore[import-untyped]

    known = frame.index
    if known.name is None and known.equals(pd.RangeIndex(len(known))):
        return frame
    twice = not known.is_unique
    places = None if twice else known.get_indexer(index.ids)
    if places is None or (places < 0).any():
        what = "several for one" if places is None else f"none for {index.ids[places.argmin()]}"
        raise ValueError(
            f"{name} has no time, so its frame needs one line for each {index.id_name}, but its "
            f"index has {what}. Index it by {index.id_name}, or pass {name}.to_numpy() if its "
            f"lines are in the order of the sequences."
        )
    return frame.iloc[places]


def _same(first: SequenceIndex, other: SequenceIndex, a: str, b: str) -> None:
    """Raise ValueError if two frames have different sequences or times."""
    mine = [None] if first.ids is None else first.ids.tolist()
    theirs = [None] if other.ids is None else other.ids.tolist()
    if mine != theirs:
        raise ValueError(
            f"{a} and {b} have different sequences: {len(mine)} and {len(theirs)}, or in another "
            f"order. Take both from one frame."
        )
    for row, (x, y) in enumerate(zip(first.times, other.times, strict=True)):
        if len(x) != len(y) or not (x == y).all():
            raise ValueError(
                f"{a} and {b} have different times{first.among(row)}: {len(x)} steps, "
                f"{first.span(row)}, and {len(y)} steps, {other.span(row)}. Take both from one "
                f"frame, with missing cells (NaN) where nothing was observed."
            )


def _read(
    frame: Any,
    graph: Graph | None = None,
    id: str | None = None,
    time: str | None = None,
    gaps: str = "refuse",
) -> Sequences:
    if gaps not in GAPS:
        raise ValueError(
            f'gaps is "refuse", or "missing" to fill holes between the times with missing steps; '
            f"got {gaps!r}."
        )
    if isinstance(frame, Sequences) or not is_frame(frame):
        raise TypeError(
            f"sequences(…) takes a frame of pandas, polars or pyarrow, got {type(frame).__name__}."
        )
    table, rows, times = split_keys(frame, id, time, () if graph is None else graph.shapes)
    if not table.columns:
        raise ValueError("The frame has no column of data beside its times.")
    if rows is None and times is None:
        refuse_count_in_frame(
            {
                name: np.asarray(table[name].to_numpy(), dtype=float)
                for name in table.columns
                if table[name].dtype.is_numeric()
            }
        )
    index, lines, filled = index_of(table, rows, times, fill=gaps == "missing")
    return Sequences(table, tuple(table.columns), index, lines, filled)
