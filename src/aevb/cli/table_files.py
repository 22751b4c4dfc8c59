"""Table files of the command line: read a table, and write results beside its cells as written."""

from __future__ import annotations

import csv
import datetime
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.missing_marks import Mark, numbers_of, words_of
from aevb.runtime.checked_files import DataWarning, whole_file

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.large_tables import LargeTable
    from aevb.tables.columns import Column
    from aevb.tables.schema import Schema

TEXT = (".csv", ".tsv", ".txt")
WRITTEN = (".csv", ".tsv", ".parquet")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
WHOLE = r"^-?\d{1,18}$"
SECONDS = 10  # between two messages on the progress of a pass over a large table
Cells = Sequence[Any]


@dataclass(frozen=True)
class TableFile:
    """A table file: ``table`` is a ``pyarrow.Table`` with typed columns, or a large table."""

    path: Path
    table: Any
    words: Collection[str] = ()  # that mark missing cells, beside the usual ones

    @property
    def large(self) -> LargeTable | None:
        """The table if it is large: then it is read by parts."""
        from aevb.data.large_tables import LargeTable

        return self.table if isinstance(self.table, LargeTable) else None

    @property
    def frame(self) -> Any:
        """All rows as a ``pyarrow.Table``; random ones of a large table, which describe it."""
        return self.table if self.large is None else self.large.sample

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of the rows of ``frame`` in the file, from 0."""
        import numpy as np

        return np.arange(self.rows) if self.large is None else self.large.sample_rows

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

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
        """Some cells of a column of ``frame``, as written in a text file."""
        if self.written:
            return [self.written[name][row] for row in rows.tolist()]
        return list(self.frame.column(name).take(rows).to_pylist())

    def known(self, schema: Schema) -> TableFile:
        """The file with the columns that the schema knows; see :meth:`known_to`."""
        if self.large is None:
            return TableFile(self.path, self.known_to(schema))
        names = [name for name in self.names if name in schema]
        return TableFile(self.path, self.large.select(names))

    def known_to(self, schema: Schema) -> Any:
        """The columns of ``frame`` that the schema knows, with the types of its own table.

        A category of words stays words if all its cells of this file look like numbers, numbers
        stay numbers if some cells of this file have leading zeros, and amounts such as $1,234.50
        and dates such as 01.03.2024 stay words if this file has none. Amounts with a unit or a
        decimal comma stay words if all cells of this file look like numbers: 1.234 may be 1234.
        """
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        from aevb.data.text_tables import MISSING_TEXT

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
            form, amounts = column.facts.form, column.facts.amounts
            written = amounts is not None and (amounts.unit or amounts.decimal == ",")
            if pa.types.is_string(kind) or not (
                words or written or (form is not None and pa.types.is_null(kind))
            ):
                continue
            cells = [cell.strip() for cell in self.written[column.name]]
            missing = pc.is_null(frame.column(position)).to_pylist()
            if words and pa.types.is_null(kind):  # the marks of missing numbers may be levels
                missing = [cell in MISSING_TEXT or cell.lower() in self.words for cell in cells]
            known = [None if gone else cell for cell, gone in zip(cells, missing, strict=True)]
            frame = frame.set_column(position, column.name, pa.array(known, pa.string()))
        return frame


def read_table_file(path: str | Path, missing: Collection[Mark] = ()) -> TableFile:
    """Read a table file; ``missing`` are numbers and words that mark missing cells.

    Words are compared without case, and mark cells in addition to the usual words. A number is a
    word of text columns, too. Large Parquet files are opened, and read by parts later.
    """
    from aevb.data.frames import read_frame
    from aevb.data.large_tables import open_large
    from aevb.data.parquet import is_parquet

    path = Path(path)
    if not path.exists():
        raise ValueError(f"There is no file {path}.")
    words = words_of(missing)
    if is_parquet(path) and (large := open_large(path)) is not None:
        marked = partial(_marked, missing=missing)
        return TableFile(path, replace(large, marked=marked, told=Progress()), words)
    frame = read_frame(path)
    if words and (spellings := _spellings(frame, words)):
        # Without its words, a column may hold numbers or dates.
        frame = read_frame(path, missing=spellings)
    return TableFile(path, _marked(frame, missing), words)


class Progress:
    """Say every ten seconds how many rows of a large table have been read."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def __call__(self, rows: int, total: int) -> None:
        if time.monotonic() - self.told > SECONDS:
            self.told = time.monotonic()
            print(f"{rows:,} of {total:,} rows read", file=sys.stderr, flush=True)


def _marked(frame: Any, missing: Collection[Mark]) -> Any:
    """Make marked cells missing."""
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    numbers, words = numbers_of(missing), words_of(missing)
    if words and (spellings := _spellings(frame, words)):
        frame = _without_words(frame, spellings)
    for j, field in enumerate(frame.schema if numbers else ()):
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            column = frame.column(j)
            marked = pc.is_in(
                pc.cast(column, pa.float64(), safe=False), value_set=pa.array(numbers, pa.float64())
            )
            frame = frame.set_column(j, field, pc.if_else(marked, None, column))
    return frame


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
        write_parquet(out, _typed_beside(file.frame, results, filled))
        return
    separator, sign = file.layout
    columns = file.written or _texts_of(file.frame)
    write_texts(out, _texts_beside(columns, results, filled, sign), separator)


Computed = tuple[Mapping[str, "Cells | np.ndarray"], Mapping[str, "tuple[np.ndarray, Cells]"]]


def write_parts(out: Path, large: LargeTable, compute: Callable[[Any], Computed]) -> None:
    """Write the columns of a large table, and results beside them, part by part.

    ``compute`` maps the frame of a part to its results and filled cells, as in
    :func:`write_beside`. Warnings about a part are not shown: those about random rows were.
    """
    from pyarrow import parquet  # type: ignore[import-untyped]

    from aevb.tables.large_columns import from_row

    first, writer = 0, None
    with whole_file(out) as place, ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        for part in large.parts():
            try:
                results, filled = compute(part)
            except ValueError as error:
                raise from_row(error, first) from None
            first += part.num_rows
            if out.suffix == ".parquet":
                frame = _typed_beside(part, results, filled)
                if writer is None:
                    writer = stack.enter_context(parquet.ParquetWriter(place, frame.schema))
                writer.write_table(frame.cast(writer.schema))
                continue
            columns = _texts_beside(_texts_of(part), results, filled)
            if writer is None:
                file = stack.enter_context(place.open("w", encoding="utf-8", newline=""))
                writer = _csv_writer(out, file, ",")
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))


def _typed_beside(
    frame: Any,
    results: Mapping[str, Cells | np.ndarray],
    filled: Mapping[str, tuple[np.ndarray, Cells]],
) -> Any:
    from aevb.tables.frames import read_table

    found = read_table(frame).replaced(filled)
    for name, values in results.items():
        found = found.append_column(name, [_arrow(values)])
    return found


def _texts_of(frame: Any, sign: str = ".") -> dict[str, list[str]]:
    return {name: texts(frame.column(name).to_pylist(), sign) for name in frame.column_names}


def _texts_beside(
    columns: Mapping[str, list[str]],
    results: Mapping[str, Cells | np.ndarray],
    filled: Mapping[str, tuple[np.ndarray, Cells]],
    sign: str = ".",
) -> dict[str, list[str]]:
    columns = dict(columns)
    for name, (rows, cells) in filled.items():
        column = list(columns[name])
        for row, cell in zip(rows.tolist(), texts(cells, sign), strict=True):
            column[row] = cell
        columns[name] = column
    return columns | {name: texts(_plain(values), sign) for name, values in results.items()}


def write_frame(out: Path, frame: Any, separator: str = ",", sign: str = ".") -> None:
    """Write a pyarrow table; ``sign`` is the decimal sign of a text file."""
    if out.suffix == ".parquet":
        write_parquet(out, frame)
    else:
        write_texts(out, _texts_of(frame, sign), separator)


def write_parquet(out: Path, frame: Any) -> None:
    from pyarrow import parquet  # type: ignore[import-untyped]

    with whole_file(out) as place:
        parquet.write_table(frame, place)


def write_texts(out: Path, columns: Mapping[str, Sequence[str]], separator: str) -> None:
    with whole_file(out) as place, place.open("w", encoding="utf-8", newline="") as file:
        writer = _csv_writer(out, file, separator)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _csv_writer(out: Path, file: Any, separator: str) -> Any:
    separator = "\t" if out.suffix == ".tsv" else separator
    return csv.writer(file, delimiter=separator, lineterminator="\n")


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
    """Cells of a column to about three digits of its standard deviation, or more.

    They have at least the decimals of the training table, or six significant digits if these have
    no fixed number: a far cell makes the standard deviation of a column large.
    """
    import math

    facts = column.facts
    if not facts.spread or column.listed:
        return list(cells)
    fine = 3 - math.floor(math.log10(facts.spread))

    def short(cell: float) -> float:
        if not math.isfinite(cell):
            return cell
        own = facts.decimals
        if own is None:
            own = 5 - math.floor(math.log10(abs(cell))) if cell else 0
        digits = max(fine, own)
        found = round(cell, digits)
        return 10.0**-digits if found == 0 < cell and column.kind == "positive" else found

    return [short(cell) if isinstance(cell, float) else cell for cell in cells]
