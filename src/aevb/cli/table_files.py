"""Table files of the command line: read a table, and write results beside its cells as written."""

from __future__ import annotations

import csv
import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.missing_marks import Mark, numbers_of, words_of
from aevb.runtime.checked_files import whole_file

if TYPE_CHECKING:
    import numpy as np

    from aevb.tables.columns import Column
    from aevb.tables.schema import Schema

TEXT = (".csv", ".tsv", ".txt")
WRITTEN = (".csv", ".tsv", ".parquet")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
WHOLE = r"^-?\d{1,18}$"
Cells = Sequence[Any]


@dataclass(frozen=True)
class TableFile:
    """A table file: ``frame`` is a ``pyarrow.Table`` with typed columns."""

    path: Path
    frame: Any
    words: Collection[str] = ()  # that mark missing cells, beside the usual ones

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.frame.column_names)

    @property
    def rows(self) -> int:
        return int(self.frame.num_rows)

    @cached_property
    def written(self) -> dict[str, list[str]] | None:
        """The cells of a text file as they are written, by column; None for Parquet."""
        if self.path.suffix not in TEXT:
            return None
        rows = _written_rows(self.path)
        # The two readers agree on the rows unless a file is odd; then typed cells are written.
        if len(rows) != self.rows or any(len(row) != len(self.names) for row in rows):
            return None
        return dict(zip(self.names, map(list, zip(*rows, strict=True)), strict=True))

    @cached_property
    def layout(self) -> tuple[str, str]:
        """The separator and the decimal sign of a text file; "," and "." for others."""
        from aevb.data.text_tables import read_layout

        if self.path.suffix not in TEXT:
            return ",", "."
        found = read_layout(self.path)
        commas = found.decimal and any(
            DECIMAL_COMMA.fullmatch(cell.strip())
            for cells in (self.written or {}).values()
            for cell in cells
        )
        return found.separator or ",", "," if commas else "."

    def cells(self, name: str, rows: np.ndarray) -> list[Any]:
        """Some cells of a column, as written in a text file."""
        if self.written:
            return [self.written[name][row] for row in rows.tolist()]
        return list(self.frame.column(name).take(rows).to_pylist())

    def known_to(self, schema: Schema) -> Any:
        """The columns that the schema knows, with the types of the table that it was read from.

        A category of words stays words if all its cells of this file look like numbers, numbers
        stay numbers if some cells of this file have leading zeros, and amounts such as $1,234.50
        stay words if this file has none.
        """
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        from aevb.data.text_tables import MISSING, MISSING_TEXT

        frame = self.frame.select([name for name in self.names if name in schema])
        for column in schema.used:
            if column.name not in self.names or not self.written:
                continue
            words = column.listed and all(isinstance(level, str) for level in column.levels)
            kind = frame.schema.field(column.name).type
            position = frame.column_names.index(column.name)
            if column.facts.type == "number" and pa.types.is_string(kind):
                cells = frame.column(position)
                if pc.all(pc.match_substring_regex(cells, WHOLE)).as_py():
                    frame = frame.set_column(position, column.name, pc.cast(cells, pa.int64()))
            if column.facts.amounts is not None and pa.types.is_null(kind):
                words = True
            if words and not pa.types.is_string(kind):
                cells = [cell.strip() for cell in self.written[column.name]]
                missing = MISSING_TEXT if pa.types.is_null(kind) else MISSING
                known = [
                    None if cell in missing or cell.lower() in self.words else cell
                    for cell in cells
                ]
                found = pa.array(known, pa.string())
                frame = frame.set_column(position, column.name, found)
        return frame


def read_table_file(path: str | Path, missing: Collection[Mark] = ()) -> TableFile:
    """Read a table file whole; ``missing`` are numbers and words that mark missing cells.

    Words are compared without case, and mark cells in addition to the usual words.
    """
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    from aevb.data.frames import read_frame

    path = Path(path)
    if not path.exists():
        raise ValueError(f"There is no file {path}.")
    frame, numbers, words = read_frame(path), numbers_of(missing), words_of(missing)
    if words and (spellings := _spellings(frame, words)):
        # Without its words, a column may hold numbers or dates.
        frame = _without_words(read_frame(path, missing=spellings), spellings)
    for j, field in enumerate(frame.schema if numbers else ()):
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            column = frame.column(j)
            marked = pc.is_in(
                pc.cast(column, pa.float64(), safe=False), value_set=pa.array(numbers, pa.float64())
            )
            frame = frame.set_column(j, field, pc.if_else(marked, None, column))
    return TableFile(path, frame, words)


def _spellings(frame: Any, words: Sequence[str]) -> list[str]:
    """The cells of columns of words that equal one of the words, in the case of the file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = set()
    for column in frame.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found |= set(pc.unique(column).to_pylist()) - {None}
    return sorted(cell for cell in found if cell.strip().lower() in words)


def _without_words(frame: Any, spellings: Sequence[str]) -> Any:
    """Make these cells of columns of words missing, and count them in the metadata."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from aevb.tables.reading import WORDS_METADATA

    for j, field in enumerate(frame.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            column = frame.column(j)
            marked = pc.is_in(column, value_set=pa.array(spellings, field.type))
            times = json.loads((field.metadata or {}).get(WORDS_METADATA, b"{}"))
            for one in pc.value_counts(column.filter(marked)).to_pylist():
                times[one["values"]] = one["counts"]
            if times:
                field = field.with_metadata({WORDS_METADATA: json.dumps(times)})
            frame = frame.set_column(j, field, pc.if_else(marked, None, column))
    return frame


def _written_rows(path: Path) -> list[list[str]]:
    from aevb.data.text_tables import opened, read_layout

    layout = read_layout(path)
    with opened(path) as file:
        if layout.separator is None:
            lines = file.read().splitlines()[layout.header :]
            return [line.split() for line in lines if line.strip()]
        reader = csv.reader(file, delimiter=layout.separator)
        while reader.line_num < layout.header:
            next(reader)
        rows = list(reader)
    if layout.width > 1:
        return [row for row in rows if row]
    # In a table of one column, a blank line is a missing cell, unless it is at the end.
    kept = list(dropwhile(lambda row: not "".join(row).strip(), reversed(rows)))
    return [row or [""] for row in reversed(kept)]


# Writing ------------------------------------------------------------------------------------------


def refuse_ending(out: Path) -> None:
    """Refuse an output file of an unsupported type, before anything is computed."""
    if out.suffix not in WRITTEN:
        raise ValueError(f"{out}: write a .csv, .tsv or .parquet file.")


def own_names(names: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Names for columns of results that are no columns of the table: all with the same ending.

    >>> own_names(["log_p", "tail"], ["log_p", "mass"])
    {'log_p': 'log_p_', 'tail': 'tail_'}
    """
    ending = ""
    while any(name + ending in taken for name in names):
        ending += "_"
    return {name: name + ending for name in names}


def write_beside(
    out: Path,
    file: TableFile,
    results: Mapping[str, Cells | np.ndarray],
    filled: Mapping[str, tuple[np.ndarray, Cells]] | None = None,
) -> None:
    """Write the columns of a table, and results beside them.

    ``filled`` maps a column to the rows whose cells are replaced, and their new cells. All other
    cells of a text file are written as they are in the file; a .parquet file has typed cells.
    """
    filled = filled or {}
    if out.suffix == ".parquet":
        from aevb.tables.frames import read_table

        frame = read_table(file.frame).replaced(filled)
        for name, values in results.items():
            frame = frame.append_column(name, [_arrow(values)])
        write_parquet(out, frame)
        return
    separator, sign = file.layout
    columns = dict(file.written or {})
    if not columns:
        columns = {name: texts(file.frame.column(name).to_pylist()) for name in file.names}
    for name, (rows, cells) in filled.items():
        column = list(columns[name])
        for row, cell in zip(rows.tolist(), texts(cells, sign), strict=True):
            column[row] = cell
        columns[name] = column
    columns |= {name: texts(_plain(values), sign) for name, values in results.items()}
    write_texts(out, columns, separator)


def write_frame(out: Path, frame: Any) -> None:
    """Write a pyarrow table."""
    if out.suffix == ".parquet":
        write_parquet(out, frame)
    else:
        names = frame.column_names
        write_texts(out, {name: texts(frame.column(name).to_pylist()) for name in names}, ",")


def write_parquet(out: Path, frame: Any) -> None:
    from pyarrow import parquet  # type: ignore[import-untyped]

    with whole_file(out) as place:
        parquet.write_table(frame, place)


def write_texts(out: Path, columns: Mapping[str, Sequence[str]], separator: str) -> None:
    separator = "\t" if out.suffix == ".tsv" else separator
    with whole_file(out) as place, place.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def texts(cells: Cells, sign: str = ".") -> list[str]:
    """Cells as texts; ``sign`` is the decimal sign."""
    found = [text(cell) for cell in cells]
    if sign == ".":
        return found
    return [
        shown.replace(".", sign) if isinstance(cell, float) else shown
        for shown, cell in zip(found, cells, strict=True)
    ]


def text(cell: Any) -> str:
    """A cell as text: "" for a missing cell, true and false, dates in ISO form."""
    if not is_known(cell):
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return repr(int(cell)) if cell == int(cell) and abs(cell) < 2**53 else repr(cell)
    return cell.isoformat() if isinstance(cell, datetime.date) else str(cell)


def is_known(cell: Any) -> bool:
    return cell is not None and cell == cell


def _plain(values: Cells | np.ndarray) -> Cells:
    return values.tolist() if hasattr(values, "tolist") else values


def _arrow(values: Cells | np.ndarray) -> Any:
    import pyarrow as pa

    return pa.array(_plain(values))


# Digits -------------------------------------------------------------------------------------------


def rounded(values: np.ndarray) -> np.ndarray:
    """Results with six significant digits."""
    import numpy as np

    if values.dtype.kind != "f":
        return values
    return np.array([float(f"{value:.6g}") for value in values.tolist()])


def rounded_cells(column: Column, cells: Cells) -> list[Any]:
    """Cells of a column to about three digits of its standard deviation."""
    import math

    spread = column.facts.spread
    if not spread or column.listed:
        return list(cells)
    digits = 3 - math.floor(math.log10(spread))
    return [round(cell, digits) if isinstance(cell, float) else cell for cell in cells]
