"""Read arrays by variable from .npy, .npz, .csv and .parquet files.

Uncompressed arrays are memory-mapped and never loaded as a whole. A table has either one line per
row, with one column per step for a variable with time, or one line per step (``long_tables.py``).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.archives import read_archive, read_array
from aevb.data.builtin import NAMES
from aevb.data.image_folders import images, is_image_folder
from aevb.data.long_tables import (
    Keys,
    Lines,
    keys_of,
    lines_of,
    refuse_count,
    refuse_numbering,
)
from aevb.data.markers import LOOK, array_warnings, marker_warnings
from aevb.data.parquet import ParquetRows
from aevb.data.sequence_index import Key
from aevb.data.tables import Header, Table, header, is_table, read_table
from aevb.data.text_tables import FEW, WordsError
from aevb.data.written_keys import read_written_keys
from aevb.declare.graph import Graph
from aevb.estimate.keys import LENGTHS, STEPS
from aevb.estimate.places import INDICES, Placed, Places
from aevb.runtime.checked_files import DataWarning


def read_file(
    path: Path,
    graph: Graph,
    *,
    only: str | None = None,
    columns: Mapping[str, list[str]] | None = None,
    check: bool = True,
    missing: Sequence[float] = (),
) -> dict[str, Any]:
    """Read the arrays of a file, by variable.

    ``only`` names the one variable that the file is for. ``columns`` gives the columns of each
    variable, instead of the names in the header. ``check=False`` does not check the number of
    columns: a model may take its sizes from it. ``missing`` are numbers that mark missing cells of
    a table.

    Raises ValueError if the file cannot be read or does not fit the model.
    """
    return read_lines(path, graph, only=only, columns=columns, check=check, missing=missing)[0]


def read_lines(
    path: Path,
    graph: Graph,
    *,
    only: str | None = None,
    columns: Mapping[str, list[str]] | None = None,
    check: bool = True,
    missing: Sequence[float] = (),
    fill: bool = False,
) -> tuple[dict[str, Any], Lines | None]:
    """Read the arrays of a file as :func:`read_file` does, and the lines of a long table.

    A long table has one line per step. The second value says which lines belong to which row; it is
    None for other files. With ``fill``, steps that a long table lacks are added as missing ones.
    """
    if is_image_folder(path):
        return _images(path, graph, only), None
    if not path.is_file() and not is_table(path):
        raise ValueError(f"There is no file {path}; the data sets by name are {', '.join(NAMES)}.")
    try:
        if path.suffix in (".npy", ".npz"):
            if missing:
                raise ValueError(
                    "numbers that mark missing cells (--missing) are for tables only. Write NaN "
                    "in the arrays"
                )
            plain = path.suffix == ".npy"
            arrays = (
                {only or _names(graph)[0]: read_array(path)}
                if plain
                else _by_name(path, read_archive(path), graph, only)
            )
            for warning in array_warnings(arrays, graph.observed, f"{path}: "):
                warnings.warn(warning, stacklevel=2)
            return arrays, None
        if not is_table(path):
            raise ValueError(
                f"files of kind {path.suffix or 'no suffix'} are not known; use .npy, .npz, .csv "
                f"or .parquet"
            )
        unused = [] if columns is None else _unused(path, header(path), graph, columns)
        # Sequences of different lengths, and lines in another order, need all rows at once.
        timed = any(graph.timed[name] for name in graph.shapes)
        keys = keys_of(header(path).names, graph) if timed else None
        written = {} if keys is None else read_written_keys(path, keys)
        table = read_table(path, unused, missing, whole=timed, written=written)
    except _ColumnsError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise _unreadable(path, error, graph) from None
    if unused:
        mine = ", ".join(map(repr, unused[:12])) + (
            f", … ({len(unused)})" if len(unused) > 12 else ""
        )
        warnings.warn(
            f"{path}: the column{'s' * (len(unused) > 1)} {mine} {_are(unused)} not used, because "
            f"the model was trained without {_them(unused)}.",
            DataWarning,
            2,
        )
    names = [repr(name) for name in table.names or range(1, table.values.shape[1] + 1)]
    fix = (
        "leave its cells empty, or read the table yourself and use aevb.data.mark_missing(x, "
        "{marker})."
    )
    for warning in marker_warnings(
        _some(table.values),
        names,
        f"{path}: ",
        fix,
        "leave its cells empty, or add --missing {marker}.",
    ):
        warnings.warn(warning, stacklevel=2)
    return _split(path, table, graph, only, columns, check, written, fill or not check)


def _images(path: Path, graph: Graph, only: str | None) -> dict[str, Any]:
    """The images of a folder; a given variable gets the numbers of its subfolders."""
    found, name = images(path), only or _names(graph)[0]
    labels = {next(iter(graph.given)): found.labels} if len(graph.given) == 1 else {}
    return {name: found.pixels} | (labels if found.names and only is None else {})


def _some(values: np.ndarray | ParquetRows) -> np.ndarray:
    """Return the values, or the first rows of values that are read when indexed."""
    return values if isinstance(values, np.ndarray) else values[:LOOK]


def layout(path: Path, graph: Graph) -> tuple[dict[str, list[str]] | None, bool]:
    """Return the columns of each variable, and whether the table has one line per step.

    The columns are None if the table has no header.
    """
    if not is_table(path):
        return None, False
    try:
        found = header(path)
        columns = None if found.names is None else assign(found.names, graph)
        taken = (
            {_names(graph)[0]: [str(j + 1) for j in range(found.width)]}
            if columns is None
            else columns
        )
        return columns, keys_of(found.names, graph) is not None or (
            not found.lists and _one_step(graph, taken, True)
        )
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, graph) from None


def _unreadable(path: Path, error: Exception, graph: Graph) -> ValueError:
    if not isinstance(error, WordsError):
        return ValueError(f"{path} cannot be read: {str(error).rstrip('.')}.")
    first, column = _names(graph)[0], error.column
    if len(error.found) == 1:
        return ValueError(f"{path}: {error}, and no other value follows. Leave the column out.")
    if len(error.found) > FEW:
        return ValueError(
            f"{path}: {error!s}, but more than {FEW} different words. Leave the column out."
        )
    shown = ", ".join(error.found[:6]) + (", …" if len(error.found) > 6 else "")
    numbers = ", ".join(f"{word} = {i}" for i, word in enumerate(error.found[:3])) + (
        ", …" if len(error.found) > 3 else ""
    )
    if column in graph.shapes and _labels(graph, column):
        return ValueError(
            f"{path}: the column {column!r} holds words ({shown}), not numbers. Number the "
            f"classes in it from 0 ({numbers})."
        )
    name = re.sub(r"\W|^(?=\d)", "_", column) if column else "c"
    rows = " If they name the sequences, rename the column to id." if graph.timed[first] else ""
    parents = (
        ", ".join(dict.fromkeys(map(str, graph.reads("p", first)))) if first in graph.p else ""
    )
    declared = (
        f'"{name}{"[t]" * graph.timed[first]}{" | " * bool(parents)}{parents}": '
        f"OneHot({len(error.found)})"
    )
    return ValueError(
        f"{path}: the column {column!r} holds words ({shown}), not numbers. If they are "
        f"categories, declare a variable for them, {declared} in p, and number them in the file "
        f"({numbers}) in a column {name}; as a column of {first} the numbers would be treated as "
        f"measurements. Or leave the column out.{rows}"
    )


def _names(graph: Graph) -> list[str]:
    return [*graph.observed, *graph.given]


def _by_name(path: Path, arrays: dict[str, Any], graph: Graph, only: str | None) -> dict[str, Any]:
    if only in arrays:
        return {only: arrays[only]}
    known = {
        name: array
        for name, array in arrays.items()
        if name in graph.shapes or name in (STEPS, LENGTHS)
    }
    others = [name for name in arrays if name not in known]
    if any(name in graph.shapes for name in known):
        if others:
            mine = ", ".join(map(repr, others))
            warnings.warn(
                f"{path}: the array{'s' * (len(others) > 1)} {mine} {_are(others)} not used, "
                f"because no variable has that name.",
                DataWarning,
                2,
            )
        return known
    if len(others) != 1:
        raise ValueError(
            f"its arrays are {', '.join(arrays) or 'none'}; name them after the model's variables "
            f"({', '.join(_names(graph))})"
        )
    return {only or _names(graph)[0]: arrays[others[0]]} | known


# From columns to variables ------------------------------------------------------------------------


def _split(
    path: Path,
    table: Table,
    graph: Graph,
    only: str | None,
    columns: Mapping[str, list[str]] | None,
    check: bool,
    written: Mapping[str, Key],
    fill: bool,
) -> tuple[dict[str, Any], Lines | None]:
    """Split the columns of a table into arrays by variable.

    Columns named after a variable (``y``, ``x0``, ``x_1``, ``x.2``) belong to it. All other columns
    belong to the first observed variable.
    """
    first = only or _names(graph)[0]
    names = (
        table.names
        if table.names is not None
        else tuple(str(j + 1) for j in range(table.values.shape[1]))
    )
    lists = {name: table.lists[name] for name in table.lists if name in graph.shapes}
    rest = [name for name in table.lists if name not in lists]
    try:
        keys = keys_of(table.names, graph)
        if table.names is None:
            taken = {first: list(names)}
        else:
            taken = assign(names, graph) if columns is None else _recorded(names, graph, columns)
        if only is not None and table.names is not None:
            taken = {
                only: taken.get(only)
                or [name for name in names if keys is None or name not in keys.names]
            }
        if len(rest) == 1 and not taken.get(first) and first not in lists:
            lists[first] = table.lists[rest[0]]
        elif rest:
            raise ValueError(
                f"the column {rest[0]!r} holds lists. Name it after its variable "
                f"({', '.join(_names(graph))}), or drop it"
            )
        if keys is None and not lists and len(table.values) > 1 and _one_step(graph, taken, check):
            keys = Keys(None, None)
        if check:
            _check_columns(
                table,
                graph,
                {name: cells for name, cells in taken.items() if name not in lists},
                only,
                tuple(lists),
                keys,
            )
        index = {name: i for i, name in enumerate(names)}
        arrays = {
            # A variable that has all columns in the order of the table needs no copy.
            name: table.values
            if list(cells) == list(names)
            else table.values[:, [index[cell] for cell in cells]]
            for name, cells in taken.items()
            if cells
        }
        stacked = {
            name: np.stack(rows)
            if isinstance(rows, list) and len({row.shape for row in rows}) == 1
            else rows
            for name, rows in lists.items()
        }
        found = {name: _values(graph, name, array, check) for name, array in arrays.items()}
        if keys is None:
            for name in taken:
                if graph.timed[name] and not _labels(graph, name):
                    refuse_numbering(found[name], taken[name], name)
            wide = frozenset(name for name in taken if graph.timed[name])
            return Placed(
                found | stacked,
                INDICES if table.lines is None else Places(table.lines.tolist(), taken, wide),
            ), None
        by_row = lines_of(np.asarray(table.values), table.names, keys, table.lines, written, fill)
        for name in taken if keys.step is None else ():
            if not _labels(graph, name):
                refuse_count(found[name][by_row.order], taken[name], name)
        found = {
            name: by_row.sequences(value) if graph.timed[name] else by_row.constants(name, value)
            for name, value in found.items()
        }
        places = (
            INDICES
            if table.lines is None
            else Places(np.split(table.lines[by_row.nearest], by_row.starts[1:]), taken)
        )
        places = replace(places, pace=by_row.clock.pace(by_row.spacing))
        return Placed(found | stacked, places), by_row
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).rstrip('.')}.") from None


def _one_step(graph: Graph, taken: Mapping[str, list[str]], check: bool) -> bool:
    """Return whether each line holds exactly one step of every variable.

    A table of such lines without row and step numbers is one sequence.
    """

    def one(name: str, cells: list[str]) -> bool:
        return (
            len(cells) == 1 if not check or _labels(graph, name) else len(cells) == graph.size(name)
        )

    return bool(taken) and all(
        graph.timed[name] and one(name, cells) for name, cells in taken.items()
    )


def assign(names: tuple[str, ...], graph: Graph) -> dict[str, list[str]]:
    """Return the columns of each variable for a table with this header."""
    keys, first = keys_of(names, graph), _names(graph)[0]
    names = names if keys is None else tuple(name for name in names if name not in keys.names)
    # Only latents with labels can be columns. A column z is data, not the code.
    known = [name for name in graph.latents if graph.rule("p", name).spec.finite]
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
    found = {
        variable: [column for _, column in sorted(pairs, key=lambda pair: pair[0])]
        for variable, pairs in numbered.items()
    }
    if rest:
        mine = {*rest, *found.get(first, ())}
        found[first] = [column for column in names if column in mine]
    return {variable: found[variable] for variable in (*_names(graph), *found) if variable in found}


def _recorded(
    names: tuple[str, ...], graph: Graph, columns: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """Find the columns that a run was trained with, by name and in any order.

    The columns of latents may be absent. Labels of a latent that the run did not have are added.
    """
    found, there = {}, set(names)
    for variable, wanted in columns.items():
        if variable not in graph.shapes:
            raise ValueError(
                f"data.json gives columns to {variable}, but the model has no such variable"
            )
        absent = [column for column in wanted if column not in there]
        if not absent:
            found[variable] = list(wanted)
        elif variable not in graph.latents or len(absent) < len(wanted):
            which = f"column{'s' * (len(absent) > 1)} {_listed(map(repr, absent))}"
            raise ValueError(
                f"it lacks the {which} that {variable} was trained with; its columns are "
                f"{_listed(names)}"
            )
    taken = {column for wanted in columns.values() for column in wanted}
    for name, cells in assign(names, graph).items():
        if (
            name not in columns
            and name in graph.latents
            and _labels(graph, name)
            and not graph.timed[name]
        ):
            found |= {name: cells} if len(cells) == 1 and cells[0] not in taken else {}
    return found


class _ColumnsError(ValueError):
    """The table is readable, but its columns do not fit the model."""


def _unused(path: Path, found: Header, graph: Graph, columns: Mapping[str, list[str]]) -> list[str]:
    """Return the columns that a run does not use: neither numbering nor data of a variable.

    Numbering columns hold row or step numbers.
    """
    if found.names is None:
        return []
    try:
        taken, keys = _recorded(found.names, graph, columns), keys_of(found.names, graph)
    except ValueError as error:
        raise _ColumnsError(f"{path}: {error}.") from None
    used = {
        *(keys.names if keys else ()),
        *(column for cells in taken.values() for column in cells),
    }
    lists = [
        name for name in found.lists if name not in graph.shapes and taken.get(_names(graph)[0])
    ]
    return [name for name in found.names if name not in used] + lists


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _check_columns(
    table: Table,
    graph: Graph,
    taken: Mapping[str, list[str]],
    only: str | None,
    elsewhere: tuple[str, ...],
    keys: Keys | None,
) -> None:
    """Refuse a table that gives a variable no columns, or a wrong number of columns."""
    problem: tuple[str, list[str]] | None = None
    for name in _names(graph) if only is None else ():
        if name not in taken and name not in elsewhere:
            problem = problem or (name, [])
    for name, cells in taken.items():
        d = graph.size(name)
        fine = len(cells) == d or (len(cells) == 1 and _labels(graph, name))
        if graph.timed[name] and keys is None:
            # A row is a sequence of numbers, or of labels.
            fine = d == 1 or (d > 1 and _labels(graph, name))
        if not fine:
            problem = problem or (name, cells)
    if problem is None:
        return
    name, cells = problem
    wide = graph.timed[name] and keys is None
    need = (
        "one column per step"
        if wide
        else f"{graph.size(name)} column{'s' * (graph.size(name) > 1)}"
    )
    need += ", or one of labels" if _labels(graph, name) and not wide else ""
    had = f"gets {len(cells)} ({_listed(cells)})" if cells else "gets none"
    names = f"Its columns are {_listed(table.names)}. " if table.names else "It has no header. "
    fix = f"Columns named {name}0, {name}1, … belong to {name}" + (
        ", and so do columns that match no variable name."
        if name == _names(graph)[0]
        else f"; columns that match no variable name belong to {_names(graph)[0]}."
    )
    if wide and graph.size(name) > 1:
        fix = (
            f"A line can hold a sequence of one number per step; for more, write one line per "
            f"step (row,step,{name}0,{name}1,…), or use .npz."
        )
    if keys is not None and keys.names and cells:
        fix += (
            f" Each line is read as one step, because the column {keys.names[0]!r} numbers them; "
            f"if a line is a whole row, drop that column."
        )
    raise ValueError(f"{name} needs {need}, but {had}. {names}{fix}")


def _labels(graph: Graph, name: str) -> bool:
    return graph.size(name) > 1 and (name in graph.given or graph.rule("p", name).spec.categorical)


def _values(graph: Graph, name: str, array: np.ndarray | ParquetRows, check: bool) -> Any:
    """Return the values of a variable.

    A single column of a variable with several classes holds labels, [N].
    """
    may_be_labels = name in graph.given or graph.rule("p", name).spec.categorical
    return (
        array[:, 0]
        if may_be_labels and array.shape[1] == 1 and (graph.size(name) > 1 or not check)
        else array
    )


def _listed(names: Any, limit: int = 12) -> str:
    shown = list(names)
    return ", ".join(map(str, shown[:limit])) + (
        f", … ({len(shown)})" if len(shown) > limit else ""
    )
