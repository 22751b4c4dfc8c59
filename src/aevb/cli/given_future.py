"""The future of given variables, from the file of ``aevb forecast --given``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.datasets import Loaded
    from aevb.data.sequence_index import SequenceIndex
    from aevb.model import Model


def future_of_given(
    model: Model, loaded: Loaded, path: Path | None, lengths: np.ndarray, steps: int
) -> dict[str, Any]:
    """Read the future of the given variables with time, [N, steps, …] by variable.

    ``lengths`` holds the number of steps of each row of the past. The lines of a table are found by
    the ids and times that follow those of the past; without a column of times, they are the steps
    in order.

    Raises ValueError if the model needs a file and there is none, or if the file lacks a variable,
    a row or a time.
    """
    graph = model.graph
    timed = [name for name in graph.given if graph.timed[name]]
    needed = [name for name in timed if graph.is_read_by_p(name)]
    index = _index(loaded, lengths)
    if path is None:
        if not needed:
            return {}
        what = (
            f"a table with the columns {', '.join(_columns(model, loaded, needed))}"
            if loaded.lines is not None
            else f"a .npz file with the arrays {', '.join(needed)} of shape [{len(lengths)}, "
            f"{steps}, size]"
        )
        raise ValueError(
            f"p is conditioned on {needed[0]}[t], so a forecast needs its future: --given FILE, "
            f"{what}, for {_span(loaded, index, steps)}."
        )
    if not timed:
        raise ValueError("--given is the future of given variables in time, and p has none.")
    try:
        if path.suffix == ".npz":
            return _arrays(path, timed, needed)
        return _table(model, loaded, path, index, steps, timed, needed)
    except (OSError, ValueError) as error:
        raise ValueError(f"--given {path}: {str(error).rstrip('.')}.") from None


def _arrays(path: Path, timed: list[str], needed: list[str]) -> dict[str, Any]:
    from aevb.data.archives import read_archive

    found = dict(read_archive(path))
    for name in needed:
        if name not in found:
            raise ValueError(
                f"it holds {', '.join(found) or 'nothing'}, but not {name}. Name the arrays after "
                f"the variables"
            )
    return {name: value for name, value in found.items() if name in timed}


def _table(
    model: Model,
    loaded: Loaded,
    path: Path,
    index: SequenceIndex,
    steps: int,
    timed: list[str],
    needed: list[str],
) -> dict[str, Any]:
    import numpy as np

    from aevb.data.frames import read_frame
    from aevb.data.sequences import future_in_arrays, sequences
    from aevb.data.written_keys import read_written_keys

    lines = loaded.lines
    if lines is None and len(index.times) > 1:
        raise ValueError(
            f"the past has {len(index.times)} rows without ids, so a table cannot say which line "
            f"belongs to which row. Use a .npz file with arrays [N, {steps}, size]"
        )
    table = read_frame(path)
    keys = () if lines is None else lines.keys.names
    known = None if lines is None else lines.keys
    for name in keys:
        if name not in table.column_names:
            raise ValueError(
                f"it has no column {name!r}, which numbers the lines of the past; its columns are "
                f"{', '.join(table.column_names)}"
            )
    # Only the columns that are used: another one may hold words, or look like a time.
    taken = {name: _columns(model, loaded, [name]) for name in timed}
    there = {name: cells for name, cells in taken.items() if set(cells) <= set(table.column_names)}
    for name in needed:
        if name not in there:
            raise ValueError(
                f"{name} needs the column{'s' * (len(taken[name]) > 1)} {', '.join(taken[name])}; "
                f"its columns are {', '.join(table.column_names)}"
            )
    table = table.select(
        [*keys, *dict.fromkeys(cell for cells in there.values() for cell in cells)]
    )
    for name, key in ({} if known is None else read_written_keys(path, known)).items():
        if key.clock.months:  # a frame has them as words
            table = table.set_column(table.column_names.index(name), name, [key.values])
    read = sequences(
        table,
        id=None if lines is None else lines.keys.row,
        time=None if lines is None else lines.keys.step,
    )
    data = {name: read[cells] for name, cells in there.items()}
    found = future_in_arrays(index, data, steps, model.graph, "")
    marks = [mark for mark in loaded.recipe.missing or () if not isinstance(mark, str)]
    return {
        name: np.where(np.isin(value, marks), np.nan, value) if marks else value
        for name, value in found.items()
    }


def _columns(model: Model, loaded: Loaded, names: list[str]) -> list[str]:
    """Return the columns of variables: those of the training table, or else by their names."""
    recorded, found = loaded.recipe.columns or {}, []
    for name in names:
        size = model.graph.size(name)
        plain = [name] if size == 1 else [f"{name}{i}" for i in range(size)]
        found += list(recorded.get(name) or plain)
    return found


def _index(loaded: Loaded, lengths: np.ndarray) -> SequenceIndex:
    """Return the index of the past. Without a column of times, its steps end at −1."""
    import numpy as np

    from aevb.data.sequence_index import Clock, SequenceIndex
    from aevb.data.time_steps import Spacing

    lines = loaded.lines
    numbered = lines is not None and lines.keys.step is not None
    times = [
        lines.times(row, np.arange(length))
        if lines is not None and numbered
        else np.arange(length) - length
        for row, length in enumerate(lengths)
    ]
    return SequenceIndex(
        "pyarrow",
        lines.rows if lines is not None and lines.keys.row is not None else None,
        times,
        lines.spacing if lines is not None and numbered else Spacing("number", 1),
        Clock("number") if lines is None else lines.clock,
        None if lines is None else lines.keys.row,
        lines.keys.step if lines is not None and numbered else "step",
    )


def _span(loaded: Loaded, index: SequenceIndex, steps: int) -> str:
    """Describe the steps that a file must have."""
    lines = loaded.lines
    ahead = index.ahead(steps)
    if lines is None or lines.keys.step is None:
        return f"the {steps} steps after the end of each row"
    first, last = min(row[0] for row in ahead), max(row[-1] for row in ahead)
    each = f" of each {lines.keys.row}" if lines.keys.row is not None else ""
    return f"{lines.keys.step} {index.clock.text(first)} to {index.clock.text(last)}{each}"
