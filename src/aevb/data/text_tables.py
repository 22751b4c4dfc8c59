"""Read text tables (.csv, .tsv, .txt) of numbers.

pyarrow reads a table in blocks (``arrow_text.py``). What it does not read, this module reads line
by line: odd ways to write a number, and tables that are refused with the line and the column.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "None", "?")
# In a column of words, the others of these are often levels of their own.
MISSING_TEXT = ("", "NA", "N/A", "n/a", "NaN", "nan")
# A first line of this many consecutive numbers may be a header even if whole numbers follow.
MANY = 5
FEW = 50  # most distinct words of a column of categories
LONGEST = 2**24  # most characters of a line
_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}([-/.]\d{1,4})?([ T]\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}.*")

Cells = tuple[int, list[str]]  # the number of a line, and its cells


@dataclass(frozen=True)
class Layout:
    """How a text table is written, as its first lines show."""

    names: tuple[str, ...] | None  # None without a header
    width: int  # the number of columns
    separator: str | None  # None: blanks
    decimal: bool  # whether commas may be decimal
    header: int  # the number of lines up to the end of the header; 0 without one

    def kept(self, without: Collection[str]) -> list[int]:
        """Return the columns that are read, from 0."""
        if not without:
            return list(range(self.width))
        return [j for j, name in enumerate(self.names or ()) if name not in without]


class WordsError(ValueError):
    """A column holds words instead of numbers. If they are few, they may be categories."""

    def __init__(self, column: str, found: tuple[str, ...], line: int) -> None:
        super().__init__(f"line {line}, column {column!r} holds {found[0]!r}, not a number")
        self.column, self.found, self.line = column, found, line


def read_text(
    path: Path, without: Collection[str] = ()
) -> tuple[np.ndarray, tuple[str, ...] | None, np.ndarray]:
    """Read a text table: its numbers [N, C], header, and the line number of each row [N].

    Line numbers count from 1. An empty cell is missing (NaN). The columns ``without`` are skipped
    and may hold anything.

    The first line is a header if one of its cells is not a number, or if it counts 0, 1, 2, …. A
    first line that counts from another number is ambiguous and refused.
    """
    from aevb.data.arrow_text import read_numbers

    layout = read_layout(path)
    kept = layout.kept(without)
    found = read_numbers(path, layout, kept) if kept else None
    if found is None:
        return read_lines(path, without)
    numbers, lines = found
    return numbers, layout.names and tuple(layout.names[j] for j in kept), lines


def read_lines(
    path: Path, without: Collection[str] = ()
) -> tuple[np.ndarray, tuple[str, ...] | None, np.ndarray]:
    """Read a text table as :func:`read_text` does, line by line; raise the precise error."""
    with opened(path) as file:
        layout, rows = _begun(file, path)
        names, width, decimal, kept = (
            layout.names,
            layout.width,
            layout.decimal,
            layout.kept(without),
        )
        numbers, first, pending = array("d"), -1, array("q")
        lines = array("q")
        signs: dict[str, str] = {}
        for line, cells in rows:
            if not cells:
                # In a table of one column, an empty line is a missing cell, unless it is at the
                # end.
                pending.extend([line] * (width == 1))
                continue
            first = line if first < 0 else first
            _check_width(cells, width, line)
            cells = [cells[j] for j in kept] if without else cells
            if decimal:
                _check_signs(cells, line, signs)
            numbers.extend([float("nan")] * len(pending))
            lines.extend([*pending, line])
            pending = array("q")
            try:
                numbers.fromlist([float(cell) for cell in cells])
            except ValueError:
                numbers.fromlist(
                    [
                        _cell(cell, names, j, line, line == first, rows, decimal)
                        for j, cell in zip(kept, cells, strict=True)
                    ]
                )
    if not numbers:
        raise ValueError("it has a header but no rows" if names else "it is empty")
    return (
        np.frombuffer(numbers, dtype=np.float64).reshape(-1, len(kept)),
        names and tuple(names[j] for j in kept),
        np.array(lines),
    )


def read_layout(path: Path) -> Layout:
    """Read the header and how the cells are written, from the first lines alone."""
    with opened(path) as file:
        return _begun(file, path)[0]


def check_lines(path: Path) -> None:
    """Raise the precise error of a table whose lines have other numbers of cells, or no text."""
    with opened(path) as file:
        layout, rows = _begun(file, path)
        for line, cells in rows:
            if cells:
                _check_width(cells, layout.width, line)


def check_quotes(path: Path) -> bool:
    """Return whether the file has quotes.

    Raise ValueError if a quote is open at the end: its cell would hold the rest of the table.
    """
    with path.open("rb") as file:
        quotes = sum(block.count(b'"') for block in iter(lambda: file.read(2**20), b""))
    if quotes % 2 == 0:
        return quotes > 0
    with opened(path) as file:
        separator = _separator(file, path)
        reader, before = csv.reader(file, delimiter=separator or ",", strict=True), 0
        try:
            for _ in reader if separator is not None else ():
                before = reader.line_num
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise _open_quote(before + 1) from None
    return True


def distinct(names: list[str]) -> tuple[str, ...]:
    """Return the column names; refuse an empty name or one that occurs twice."""
    times = Counter(names)
    if "" in times:
        at = names.index("") + 1
        raise ValueError(f"its column {at} has no name; drop it (an index?), or name it")
    repeated = [name for name, count in times.items() if count > 1]
    if repeated:
        one = len(repeated) == 1
        raise ValueError(
            f"its header has the column{'s' * (not one)} {', '.join(map(repr, repeated))} more "
            f"than once. Rename {'it' if one else 'them'}"
        )
    return tuple(names)


# The parts of a file ------------------------------------------------------------------------------


def opened(path: Path) -> TextIOWrapper:
    """Open the file as text: UTF-8, or UTF-16 if it begins with a byte order mark."""
    with path.open("rb") as file:
        start = file.read(4096)
    kinds = {
        b"\x1f\x8b": "compressed by gzip: unpack it",
        b"PK\x03\x04": "a zip archive (an Excel workbook?): save it as CSV",
        b"\xff\xfe\0\0": "text in UTF-32: save it as UTF-8",
    }
    for magic, what in kinds.items():
        if start.startswith(magic):
            raise ValueError(f"it is {what}")
    wide = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in start and not wide:
        raise ValueError("it holds NUL bytes, so it is not text. If it is UTF-16, save it as UTF-8")
    return path.open(newline="", encoding="utf-16" if wide else "utf-8-sig")


def _begun(file: IO[str], path: Path) -> tuple[Layout, Iterator[Cells]]:
    """Read the header; return the layout, and the other lines."""
    separator = _separator(file, path)
    rows = _rows(file, separator)
    blank = 0
    for row in rows:
        if row[1]:
            break
        blank += 1
    else:
        raise ValueError("it is empty")
    cells = row[1]
    decimal = separator == ";"
    if _consecutive(cells):  # years, or 1, 2, 3, …
        following = next(rows, (0, []))
        rows = chain([following], rows)
        fractions = any(
            cell.strip() not in MISSING and not cell.strip().isdecimal() for cell in following[1]
        )
        if fractions or len(cells) >= MANY:
            raise ValueError(
                f"its first line counts {', '.join(cells[:3])}, …: it may be a header or a row. "
                f"Give the columns names in a first line (x0,x1,…); "
                "if that line is a header of numbers, replace it"
            )
    named = any(_number(cell, decimal) is None for cell in cells) or _numbered(cells)
    if named:
        names = distinct([cell.strip() for cell in cells])
        return Layout(names, len(cells), separator, decimal, row[0]), rows
    begin: Iterator[Cells] = ((number, []) for number in range(1, blank + 1))
    return Layout(None, len(cells), separator, decimal, 0), chain(begin, [row], rows)


def _separator(file: IO[str], path: Path) -> str | None:
    """Find the separator of the cells from the first two lines, and rewind the file.

    None means blanks.
    """
    file.seek(0)
    try:
        lines = [
            re.sub(r'"[^"]*"', "", text)
            for text in (file.readline(2**20), file.readline(2**20))
            if text.strip()
        ]
    except UnicodeDecodeError as error:
        raise _not_unicode(error) from None
    finally:
        file.seek(0)
    if path.suffix == ".tsv":
        return "\t"
    if not lines:
        return ","
    counts = {separator: [line.count(separator) for line in lines] for separator in ";\t,"}
    found = next(
        (separator for separator, count in counts.items() if all(count) and len(set(count)) == 1),
        None,
    )
    found = found or next((separator for separator, count in counts.items() if count[0]), None)
    blanks = len(lines[-1].split()) > 1 and all(
        _number(cell, False) is not None for cell in lines[-1].split()
    )
    return found or (None if blanks else ",")


def _rows(file: IO[str], separator: str | None) -> Iterator[Cells]:
    """Yield the number and the cells of every line; a blank line has no cells."""
    if separator is None:
        for number, text in enumerate(file, 1):
            yield number, text.split()
        return
    quoted = False

    def lines() -> Iterator[str]:
        nonlocal quoted
        for number, text in enumerate(file, 1):
            if len(text) > LONGEST:
                raise ValueError(
                    f"line {number} has more than {LONGEST} characters. If it is a table of so "
                    f"many columns, save it as .npy"
                )
            quoted = quoted or '"' in text
            yield text

    reader = csv.reader(lines(), delimiter=separator)
    before = 0
    try:
        for cells in reader:
            before, quoted = reader.line_num, False
            yield reader.line_num, [] if len(cells) == 1 and not cells[0].strip() else cells
    except csv.Error as error:
        if "field limit" in str(error):
            if not quoted:
                raise ValueError(
                    f"line {before + 1} has a cell of more than {csv.field_size_limit()} "
                    f"characters, too long for a number or a name"
                ) from None
            raise _open_quote(before + 1) from None
        raise ValueError(f"line {reader.line_num}: {error}") from None
    except UnicodeDecodeError as error:
        raise _not_unicode(error) from None


def _check_width(cells: list[str], width: int, line: int) -> None:
    if len(cells) != width and any("\n" in cell for cell in cells):
        raise _open_quote(line - sum(cell.count("\n") for cell in cells))
    if len(cells) != width:
        raise ValueError(f"line {line} has {len(cells)} cells, the first has {width}")


def _open_quote(line: int) -> ValueError:
    return ValueError(
        f'a quote (") that opens on line {line} or later is not closed. Remove it, or write it '
        f'twice ("")'
    )


def _not_unicode(error: UnicodeDecodeError) -> ValueError:
    if error.encoding.startswith("utf-16"):
        return ValueError(
            f"it begins as UTF-16 but is not valid UTF-16 ({error.reason}). Save it as UTF-8"
        )
    byte = error.object[error.start]
    # Latin-1 has no signs from 0x80 to 0x9f, where Windows has € and quotes.
    windows = any(0x80 <= one <= 0x9F for one in error.object)
    name, code = ("Windows-1252", "cp1252") if windows else ("Latin-1", "latin1")
    return ValueError(
        f"it is not UTF-8 text (byte 0x{byte:02x}: {name}?). Save it as UTF-8, e.g. iconv -f "
        f"{code} -t utf-8 old.csv > new.csv"
    )


# The cells ----------------------------------------------------------------------------------------


def _numbered(first: list[str]) -> bool:
    """Return whether a line is the header of pandas for unnamed columns: 0, 1, 2, …

    An empty cell comes first if pandas wrote the index too.
    """
    numbers = [str(j) for j in range(len(first))]
    return len(first) > 1 and first in (numbers, ["", *numbers[:-1]])


def _consecutive(first: list[str]) -> bool:
    """Return whether a line holds consecutive numbers that do not begin with 0."""
    cells = [cell.strip() for cell in first]
    if len(cells) < 3 or not all(cell.isdecimal() for cell in cells):
        return False
    numbers = [int(cell) for cell in cells[:3]]
    return numbers[0] > 0 and cells == [str(numbers[0] + j) for j in range(len(cells))]


def _number(cell: str, decimal: bool) -> float | None:
    """Parse a cell: a number, NaN if it is missing, None if it is not a number.

    ``decimal=True``: a comma is the decimal separator.
    """
    text = cell.strip()
    if text in MISSING:
        return float("nan")
    if decimal and _COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


def _cell(
    cell: str,
    names: tuple[str, ...] | None,
    j: int,
    line: int,
    begins: bool,
    rows: Iterator[Cells],
    decimal: bool,
) -> float:
    value = _number(cell, decimal)
    if value is not None:
        return value
    column = names[j] if names else str(j + 1)
    text = cell.strip()
    place = f"line {line}, column {column!r} holds {_short(cell)}"
    if "\n" in cell:
        raise _open_quote(line - cell.count("\n"))
    if _COMMA.fullmatch(text):
        raise ValueError(
            f"{place}: a decimal comma? Write {text.replace(',', '.')}, or separate the cells by "
            f"semicolons"
        )
    if _DATE.fullmatch(text):
        raise ValueError(
            f"{place}, a date or a time, not a number. If it is the time of a step, write it as "
            f"2024-03-01 or 2024-03-01 12:30 in a column date, or number the steps 0, 1, 2, … in a "
            f"column step; otherwise leave the column out"
        )
    if re.match(r"[^\w]*\d", text):
        raise ValueError(
            f"{place}, not a number. Write numbers alone (12.5), without units or signs, or leave "
            f"the column out"
        )
    if not begins:
        raise ValueError(f"{place}, not a number. If it marks a missing cell, leave the cell empty")
    found = {text: None}
    for _, cells in rows:
        if len(cells) > j and (word := cells[j].strip()) not in MISSING:
            found[word] = None
        if len(found) > FEW:
            break
    raise WordsError(column, tuple(found), line)


def _check_signs(cells: list[str], line: int, signs: dict[str, str]) -> None:
    """Refuse a table with both 2,5 and 1.234, because one sign may separate thousands.

    ``signs`` keeps the first cell with each sign.
    """
    for cell in cells:
        for sign in ",.":
            if sign in cell and sign not in signs and _number(cell, True) is not None:
                signs[sign] = f"{cell.strip()} on line {line}"
    if len(signs) == 2:
        raise ValueError(
            f"it has decimal commas and points ({signs[',']}, {signs['.']}). Use one decimal sign "
            f"and no thousands separators"
        )


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:40] + "…")
