"""Find the sequences and times of a frame, and check them: order, repetition, holes, spacing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from aevb.data.long_tables import Keys, Lines, row_among, step_among
from aevb.data.sequence_index import ROW, STEP, Clock, Key, SequenceIndex
from aevb.data.time_steps import MOST, SUBTRACT, Spacing, UnevenError, date_format, spacing_of

ISO = re.compile(r"\d{4}-\d\d(-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?)?")


def split_keys(
    frame: Any, id: str | None, time: str | None, variables: Collection[str]
) -> tuple[Any, Key | None, Key | None]:
    """Split a frame into its columns of data, its ids and its times.

    ``variables`` are names of columns that are data, whatever they look like.
    """
    import narwhals as nw

    library = _library(frame)
    found: dict[str, Any] = {}
    numbers, levels = None, 1
    if library == "pandas":
        levels = frame.index.nlevels
        frame, found = _of_pandas_index(frame, id, time)
        # Whole numbers without a name may be what a selection left of the numbers of the lines, so
        # they are times only if nothing else is.
        numbers = found.pop("unnamed", None)
    _refuse_twice(list(frame.column_names if library == "pyarrow" else frame.columns))
    table: nw.DataFrame[Any] = nw.from_native(frame, eager_only=True)
    if not len(table):
        raise ValueError("The frame has no lines; a sequence needs at least one step.")
    # A single column is data, whatever its name.
    free = [name for name in table.columns if name not in (*variables, id, time)]
    free = free if len(table.columns) > 1 else []
    for word, asked, among in (("id", id, row_among), ("time", time, step_among)):
        if word in found:
            continue
        if asked is not None and asked not in table.columns:
            raise ValueError(
                f"{word}={asked!r} is not a column; those are {', '.join(table.columns)}."
            )
        try:
            name = among(free) if asked is None else asked
        except ValueError as error:
            found_two = str(error).removeprefix("its ").replace("columns", "The columns", 1)
            raise ValueError(f"{found_two}. Or name it: aevb.sequences(frame, {word}=…).") from None
        if name is not None:
            found[word] = table[name]
    if "time" not in found and numbers is None:
        dates = [name for name in free if _holds_dates(table[name])]
        if len(dates) == 1:
            found["time"] = table[dates[0]]
    if numbers is not None and "time" not in found and "id" not in found:
        found["time"] = numbers
    named = [value.name for value in found.values() if isinstance(value, nw.Series)]
    keys = {word: key_of(word, value, library, levels) for word, value in found.items()}
    return table.drop(named), keys.get("id"), keys.get("time")


def _holds_dates(column: Any) -> bool:
    """Return whether a column holds dates, or texts that all are dates such as 2024-03-01."""
    import narwhals as nw

    if column.dtype in (nw.Date, nw.Datetime):
        return True
    return column.dtype in (nw.String, nw.Object) and _iso(column.to_numpy()) is not None


def _iso(values: np.ndarray) -> np.ndarray | None:
    """Read texts that all are dates of ISO 8601 without a time zone; else None."""
    texts = values.tolist()
    if not texts or not all(isinstance(text, str) and ISO.fullmatch(text) for text in texts):
        return None
    try:
        return np.array([text.replace(" ", "T") for text in texts], "datetime64[us]")
    except ValueError:  # 2024-02-31
        return None


def _refuse_twice(names: list[str]) -> None:
    """Raise ValueError if two columns have the same name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"The frame has the column{'s' * (len(twice) > 1)} {', '.join(map(repr, twice))} more "
            f"than once. Rename or drop one of them."
        )


def _library(frame: Any) -> str:
    modules = (kind.__module__.partition(".")[0] for kind in type(frame).__mro__)
    return next(name for name in modules if name in ("pandas", "polars", "pyarrow"))


def _of_pandas_index(frame: Any, id: str | None, time: str | None) -> tuple[Any, dict[str, Any]]:
    """Return a frame with the default index, and the levels of its index that are ids or times."""
    import pandas as pd  # type: ignore[import-untyped]

    if isinstance(frame, pd.Series):
        frame = frame.to_frame("value" if frame.name is None else frame.name)
    frame = frame.rename(columns=str)
    index = frame.index
    plain = frame.reset_index(drop=True)
    levels = [index.get_level_values(i) for i in range(index.nlevels)]
    found: dict[str, Any] = {}
    for word, name in (("id", id), ("time", time)):
        if name is not None and name not in plain.columns and name in index.names:
            found[word] = levels[list(index.names).index(name)]
    default = isinstance(index, pd.RangeIndex) and index.equals(pd.RangeIndex(len(index)))
    if time is not None or (default and index.name is None):
        return plain, found
    if index.nlevels > 2:
        raise ValueError(
            f"The index has {index.nlevels} levels ({', '.join(map(str, index.names))}), but a "
            f"sequence has an id and a time. Make the ids one column, and name it: "
            f"aevb.sequences(frame.reset_index(), id=…, time=…)."
        )
    if index.nlevels == 1:
        unnamed = index.name is None and pd.api.types.is_integer_dtype(index.dtype)
        return plain, found or {"unnamed" if unnamed else "time": index}
    if id is not None and not found:
        raise ValueError(
            f"id={id!r} is a column, but the index has two levels, an id and a time. Leave out "
            f"id=, or name the time too: time=…."
        )
    second = 1 - list(index.names).index(id) if found else 1
    return plain, {"id": levels[1 - second], "time": levels[second]}


def key_of(word: str, values: Any, library: str, levels: int = 1) -> Key:
    """Read a column (or one of ``levels`` of an index of pandas) of ids or times."""
    if library == "pandas":
        import narwhals as nw
        import pandas as pd

        column = isinstance(values, nw.Series)
        native = values.to_native() if column else values
        place = "column" if column else "index" if levels == 1 else "level"
        key = _of_pandas(word, pd.Index(native, name=native.name), place)
        return replace(key, level=native.name, column=column)
    name = values.name
    _refuse_missing(word, name, values.is_null().to_numpy())
    if word == "id":
        return Key(name, values.to_numpy())
    import narwhals as nw

    kind = values.dtype
    if kind.is_numeric():
        polars, numbers = library == "polars", values.to_numpy()
        return Key(name, _numbers(name, numbers, _of_polars if polars else _of_pyarrow))
    if kind == nw.Date:
        return Key(name, values.to_numpy().astype("datetime64[us]"), Clock("date", days=True))
    if kind == nw.Datetime:
        zone = kind.time_zone
        wall = values if zone is None else values.dt.replace_time_zone(None)
        utc = None if zone is None else values.dt.convert_time_zone("UTC")
        return Key(
            name,
            wall.to_numpy().astype("datetime64[us]"),
            Clock("date", zone),
            None if utc is None else _micro(utc.dt.replace_time_zone(None).to_numpy()),
        )
    if kind == nw.String and (dates := _iso(values.to_numpy())) is not None:
        return Key(name, dates, Clock("date", days=_whole_days(dates)))
    example = (
        f"frame.with_columns(pl.col({name!r}).str.to_datetime())"
        if library == "polars"
        else _set_column(name, f"table[{name!r}].cast('timestamp[us]')")
    )
    raise ValueError(
        f"The times {name!r} are of type {kind}, neither numbers nor dates. Convert them, e.g. "
        f"{example}."
    )


def _of_polars(name: str, form: str, *, whole: bool) -> str:
    at = f"pl.col({name!r})" + ".cast(pl.Int64)" * (not whole)
    if form == "%Y%m":
        return f"frame.with_columns(pl.date({at} // 100, {at} % 100, 1).alias({name!r}))"
    return f"frame.with_columns({at}.cast(pl.String).str.to_date({form!r}))"


def _of_pyarrow(name: str, form: str, *, whole: bool) -> str:
    text = f"table[{name!r}]" + ".cast('int64')" * (not whole) + ".cast('string')"
    return _set_column(name, f"pyarrow.compute.strptime({text}, format={form!r}, unit='s')")


def _set_column(name: str, values: str) -> str:
    return f"table.set_column(table.column_names.index({name!r}), {name!r}, {values})"


def _of_pandas(word: str, values: Any, place: str) -> Key:
    import pandas as pd

    name = (ROW if word == "id" else "time") if values.name is None else values.name
    _refuse_missing(word, name, values.isna())
    if word == "id":
        return Key(name, values.to_numpy())
    # A level of an index cannot be set in place.
    named = "" if values.name is not None else f".rename_axis({[ROW, 'time']!r})"
    reset = f"frame = frame{named}.reset_index(); " if place == "level" else ""
    if isinstance(values.dtype, pd.ArrowDtype) and values.dtype.kind == "M":
        values = pd.DatetimeIndex(values)
    if isinstance(values, pd.PeriodIndex):
        return Key(name, values.asi8, Clock("period", frequency=values.freqstr))
    if isinstance(values, pd.DatetimeIndex):
        if values.tz is None:
            return Key(name, _micro(values.to_numpy()), Clock("date"))
        wall = _micro(values.tz_localize(None).to_numpy())
        utc = _micro(values.tz_convert("UTC").tz_localize(None).to_numpy())
        return Key(name, wall, Clock("date", str(values.tz)), utc)
    if pd.api.types.is_numeric_dtype(values.dtype) and values.dtype != bool:

        def fix(_: str, form: str, *, whole: bool) -> str:
            text = "astype(str)" if whole else "astype(int).astype(str)"
            at = "frame.index" if place == "index" else f"frame[{name!r}]"
            return f"{reset}{at} = pd.to_datetime({at}.{text}, format={form!r})"

        numbers = _numbers(name, values.to_numpy(), fix)
        return Key(STEP if values.name is None else name, numbers)
    if (dates := _iso(values.to_numpy())) is not None:
        return Key(name, dates, Clock("date", days=_whole_days(dates)))
    raise ValueError(
        f"The times {name!r} are of type {values.dtype} (first: {values[0]!r}), neither numbers "
        f"nor dates. Convert them: {reset}pd.to_datetime(…), or .to_timestamp(). If they name the "
        f"sequences, use aevb.sequences(frame, id=…)."
    )


def _whole_days(times: np.ndarray) -> bool:
    return bool((times == times.astype("datetime64[D]")).all())


def _micro(values: np.ndarray) -> np.ndarray:
    return values.astype("datetime64[us]")


def _numbers(name: Any, values: np.ndarray, fix: Callable[..., str]) -> np.ndarray:
    """Check times that are numbers; ``fix`` returns the code that reads them as dates."""
    if values.dtype.kind not in "iuf":
        values = values.astype(float)
    if not np.isfinite(values).all():
        raise ValueError(f"The times {name!r} are not all finite.")
    if (form := date_format(values)) is not None:
        raise ValueError(
            f"The times {name!r} are dates written as whole numbers, {values[0]:.15g} to "
            f"{values[-1]:.15g}. Numbers have other distances than dates. Convert them: "
            f"{fix(name, form, whole=values.dtype.kind != 'f')}. {SUBTRACT}."
        )
    return values.astype(np.int64) if values.dtype.kind == "u" else values


def _refuse_missing(word: str, name: Any, missing: np.ndarray) -> None:
    if missing.any():
        raise ValueError(
            f"Line {int(missing.argmax())} (from 0) of the frame has no {word} ({name!r}). Drop "
            f"the line, or fill in the {word}."
        )


# Checks -------------------------------------------------------------------------------------------


def index_of(
    frame: Any, rows: Key | None, times: Key | None, *, fill: bool
) -> tuple[SequenceIndex, Lines, np.ndarray]:
    """Sort the lines of a frame by sequence; return the index, the lines, and the filled lines.

    The filled lines are those of all steps; an added step is −1, a missing one.
    """
    count = len(frame)
    numbers, ids = np.zeros(count, np.int64), None
    if rows is not None:
        seen: dict[Any, int] = {}  # sequences in the order of their first lines
        numbers = np.array([seen.setdefault(each, len(seen)) for each in rows.values.tolist()])
        ids = rows.values[np.unique(numbers, return_index=True)[1]]
    order = np.argsort(numbers, kind="stable")
    starts = np.searchsorted(numbers[order], np.arange(numbers.max() + 1))
    id_name = ROW if rows is None else rows.name
    keys = Keys(None if rows is None else str(rows.name), None)
    levels = (ROW if rows is None else rows.level, None if times is None else times.level)
    lines = Lines(order, starts, np.arange(len(starts)) if ids is None else ids,
                  np.zeros(len(starts)), Spacing("number", 1.0), keys)  # fmt: skip
    library = _library(frame.to_native())
    if times is None:
        if rows is not None and len(starts) == count > 1:
            raise ValueError(
                f"Each line has an id of its own ({id_name!r}), so every sequence would have one "
                f"step. If the lines are the steps of one sequence, leave out the id; if the times "
                f"are in another column, name it: aevb.sequences(frame, id={id_name!r}, time=…)."
            )
        known = [np.arange(n) for n in np.diff([*starts, count])]
        spacing: Spacing | None = Spacing("number", 1)
        index = SequenceIndex(
            library, ids, known, spacing, Clock("number"), id_name, places=order, levels=levels
        )
        return index, lines, order
    index, positions = _spaced(
        [
            SequenceIndex(
                library, ids, known, None, clock, id_name, times.name, order, levels=levels,
                other_clock=other,
            )
            for known, clock, other in times.clocks(order, starts)
        ],
        by_id=rows is not None,
        sorting=_sorting(library, rows, times),
    )  # fmt: skip
    holes = [np.diff(row) > 1 for row in positions]
    if not any(hole.any() for hole in holes):
        return index, lines, order
    if not fill:
        raise ValueError(_hole(index, holes))
    return _filled(index, lines, positions, count)


def _spaced(
    choices: list[SequenceIndex], *, by_id: bool, sorting: str
) -> tuple[SequenceIndex, list[np.ndarray]]:
    """Return the first index whose times are even, and the positions of its times in steps."""
    uneven = ""
    for index in choices:
        _check_order(index, by_id, sorting)
        try:
            spacing, positions = spacing_of(index.times)
        except UnevenError as error:
            uneven = uneven or _uneven(index, str(error))
        else:
            return replace(index, spacing=spacing), positions
    raise ValueError(uneven)


def _check_order(index: SequenceIndex, by_id: bool, sorting: str) -> None:
    name = index.time_name
    for row, times in enumerate(index.times):
        between = np.diff(times).astype(float)
        if (between < 0).any():
            at = int((between < 0).argmax())
            before, here = (index.clock.text(time) for time in times[at : at + 2])
            raise ValueError(
                f"The times are not in order: after {name} {before} comes {here}"
                f"{index.among(row)}. Sort the frame, e.g. {sorting}."
                + ("" if by_id else _several())
            )
        if (between == 0).any():
            time = index.clock.text(times[int((between == 0).argmax())])
            raise ValueError(
                f"The {name} {time} occurs twice{index.among(row)}. Keep one line of a time (or "
                f"their mean)." + ("" if by_id else _several())
            )


def _sorting(library: str, rows: Key | None, times: Key) -> str:
    """Return the code that sorts a frame by its ids and times."""
    keys = [str(key.name) for key in (rows, times) if key is not None and key.column]
    if library == "pyarrow":
        return f"table.sort_by({[(key, 'ascending') for key in keys]!r})"
    if library == "polars":
        return f"frame.sort({', '.join(map(repr, keys))})"
    return f"frame.sort_values({keys!r})" if times.column else "frame.sort_index()"


def _several() -> str:
    return (
        " If the lines belong to several sequences, name the column that says to which: "
        "aevb.sequences(frame, id=…)."
    )


def _uneven(index: SequenceIndex, distances: str) -> str:
    fix = (
        "dates of one calendar period become even as periods, frame.to_period(…)"
        if index.clock.kind == "date" and index.library == "pandas"
        else "round the times, or number the steps in a column and name it, time=…"
    )
    return (
        f"The times ({index.time_name!r}) are not evenly spaced: some steps are {distances} "
        f"apart. A step of a model has one length: {fix}; or give the time between two steps as a "
        f"given variable, with steps numbered 0, 1, 2, …."
    )


def _hole(index: SequenceIndex, holes: list[np.ndarray]) -> str:
    assert index.spacing is not None
    apart = index.clock.distance(index.spacing)
    count = sum(int(hole.sum()) for hole in holes)
    row = next(i for i, hole in enumerate(holes) if hole.any())
    at = int(holes[row].argmax())
    before, after = (index.clock.text(time) for time in index.times[row][at : at + 2])
    return (
        f"The times have {count} hole{'s' * (count != 1)}: from {index.time_name} {before} to "
        f"{after}{index.among(row)}, where steps are {apart} apart. If nothing was "
        f'observed there, aevb.sequences(frame, gaps="missing") adds missing steps; if the steps '
        f"follow one another, number them 0, 1, 2, … instead."
    )


def _filled(
    index: SequenceIndex, lines: Lines, positions: list[np.ndarray], count: int
) -> tuple[SequenceIndex, Lines, np.ndarray]:
    """Add the steps that are missing between the first and the last time of each sequence."""
    assert index.spacing is not None
    added = sum(int(row[-1]) + 1 - len(row) for row in positions)
    if added > MOST * count:
        raise ValueError(
            f"Filling the holes would add {added:,} steps to {count:,} lines, because some lines "
            f"are only {index.clock.distance(index.spacing)} apart. Round the times, or number the "
            f"steps 0, 1, 2, …."
        )
    times = []
    for row, known in zip(positions, index.times, strict=True):
        every = index.spacing.after(known[0], np.arange(row[-1] + 1))
        every[row] = known
        times.append(every)
    filled = lines.filled(positions).order
    return replace(index, times=times, places=None, other_clock=None), lines, filled
