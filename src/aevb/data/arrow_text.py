"""Read text tables with pyarrow: numbers block by block, or a frame of typed columns.

:func:`read_numbers` returns None for a table that it may read differently than
:func:`aevb.data.text_tables.read_lines`, which then reads it line by line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.text_tables import LONGEST, MISSING, Layout, opened

BLOCK = 2**24  # bytes of text that are read at once
NEWLINE, CARRIAGE_RETURN, QUOTE = b'\n\r"'
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PIECE = 2**20  # bytes of a block that one thread reads; a multiple of it for wide tables
# pyarrow reads ",5" and "5," as numbers, too.
_HALF_COMMA = re.compile(rb",(?!\d)|(?<!\d),")
_NAN_WITH_PAYLOAD = re.compile(rb"nan\(", re.IGNORECASE)
_BLANKS, _ENDS = re.compile(rb"[ \t]+"), re.compile(rb"^ | (?=\r?$)", re.MULTILINE)


def read_numbers(
    path: Path, layout: Layout, kept: Sequence[int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the columns ``kept`` of a table: numbers [N, C] and the line number of each row [N].

    Memory holds the numbers and one block of the text. None if the table has no rows, or if a part
    of it is to be read line by line.
    """
    size = path.stat().st_size
    numbers, lines = np.empty((0, len(kept))), np.empty(0, np.int64)
    rows, seen, done, signs = 0, layout.header, 0, set()
    try:
        for block in _blocks(path, layout):
            comma = layout.decimal and b"," in block
            signs |= {","} if comma else {"."} if layout.decimal and b"." in block else set()
            if len(signs) > 1 or not _plain(block, layout):
                return None
            found = _parsed(block, layout, kept, comma)
            if found is None:
                return None
            count = int(np.count_nonzero(np.frombuffer(block, np.uint8) == NEWLINE))
            here = _line_numbers(block, count, found.num_rows, layout)
            if here is None:
                return None
            done += len(block)
            if rows + found.num_rows > len(numbers):
                # Expect as many rows per byte of the file as until here.
                more = int((rows + found.num_rows) * 1.02 * max(size / done, 1)) + 1
                numbers.resize((more, len(kept)), refcheck=False)
                lines.resize(more, refcheck=False)
            lines[rows : rows + len(here)] = here + seen
            for batch in found.to_batches():
                tensor = batch.to_tensor(null_to_nan=True, row_major=True)
                numbers[rows : rows + batch.num_rows] = tensor.to_numpy()
                rows += batch.num_rows
            seen += count
    except (UnicodeDecodeError, _OneLineError):
        return None
    numbers.resize((rows, len(kept)), refcheck=False)
    lines.resize(rows, refcheck=False)
    return (numbers, lines) if rows else None


class _OneLineError(Exception):
    """A row does not end: its line is too long, or a quote is not closed."""


def _blocks(path: Path, layout: Layout) -> Iterator[bytes]:
    """Yield the lines below the header in blocks of whole rows, in UTF-8.

    A row may hold line breaks between quotes. Raises UnicodeDecodeError or _OneLineError.
    """
    with opened(path) as text:
        wide = text.encoding == "utf-16"
        # The bytes of UTF-8 need no decoding; the byte order mark is not part of the first line.
        source: Any = text.buffer
        if not wide and source.read(3) != BYTE_ORDER_MARK:
            source.seek(0)

        def read(count: int) -> bytes:
            return text.read(count).encode() if wide else source.read(count)

        def line() -> bytes:
            found = text.readline(LONGEST).encode() if wide else source.readline(LONGEST)
            if len(found) >= LONGEST:
                raise _OneLineError
            return found

        for _ in range(layout.header):
            line()
        while block := read(BLOCK):
            parts = [block, line()]
            inside = sum(part.count(b'"') for part in parts) % 2 if b'"' in block else 0
            length = len(parts[1])
            while inside and layout.separator is not None and (more := line()):
                parts.append(more)
                inside, length = (inside + more.count(b'"')) % 2, length + len(more)
                if length > LONGEST:
                    raise _OneLineError
            block = b"".join(parts)
            yield block if block.endswith(b"\n") else block + b"\n"


def _row_ends(text: bytes) -> np.ndarray:
    """Return the positions of the line breaks that are not between quotes."""
    content = np.frombuffer(text, np.uint8)
    ends, quotes = np.flatnonzero(content == NEWLINE), np.flatnonzero(content == QUOTE)
    return ends[np.searchsorted(quotes, ends) % 2 == 0]


def _plain(block: bytes, layout: Layout) -> bool:
    """Return whether pyarrow reads the block as ``read_lines`` does, or fails."""
    if not block.isascii():
        block.decode()
    if b"\0" in block or (b"(" in block and _NAN_WITH_PAYLOAD.search(block)):
        return False
    if b"\r" in block and block.count(b"\r") != block.count(b"\r\n"):
        return False
    if layout.decimal and b"," in block and _HALF_COMMA.search(block):
        return False
    # A cell longer than the limit of read_lines covers one of these windows.
    half, separator = csv.field_size_limit() // 2, (layout.separator or " ").encode()
    return all(
        block.find(b"\n", at, at + half) >= 0 or block.find(separator, at, at + half) >= 0
        for at in range(0, len(block) - half, half)
    )


def _parsed(block: bytes, layout: Layout, kept: Sequence[int], comma: bool) -> Any:
    """Return a pyarrow table of the columns ``kept``, or None if pyarrow refuses the block."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import csv as arrow

    if layout.separator is None:
        block = normalised(block)
    names = [str(j) for j in range(layout.width)]
    wanted = [names[j] for j in kept]
    first = block.find(b"\n") + 1
    try:
        return arrow.read_csv(
            stream(block),
            read_options=arrow.ReadOptions(
                column_names=names,
                block_size=max(PIECE, 16 * first),
                use_threads=len(block) > PIECE,
            ),
            parse_options=parse_options(layout, quoted=b'"' in block),
            convert_options=arrow.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.float64()),
                include_columns=wanted,
                # In a table of one column, an empty cell may be a blank line at the end.
                null_values=[word for word in null_words() if layout.width > 1 or word.strip()],
                decimal_point="," if comma else ".",
            ),
        )
    except pa.ArrowException:
        return None


def stream(text: bytes) -> Any:
    """Return pyarrow's copy of the text.

    Threads of pyarrow would need Python's lock to free memory that Python owns.
    """
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    sink.write(text)
    return pa.BufferReader(sink.getvalue())


def parse_options(layout: Layout, *, quoted: bool, blank_rows: bool = False) -> Any:
    """Return pyarrow's options for this layout; ``blank_rows``: a blank line is a row."""
    from pyarrow import csv as arrow

    return arrow.ParseOptions(
        delimiter=layout.separator or " ",
        # Text between blanks has no quotes.
        quote_char='"' if layout.separator is not None else False,
        newlines_in_values=quoted and layout.separator is not None,
        ignore_empty_lines=not blank_rows,
    )


def null_words(more: Sequence[str] = ()) -> list[str]:
    """Return the words of a missing cell, also after a blank: pyarrow compares whole cells."""
    words = (*MISSING, *more)
    return [*words, *(" " + word for word in words)]


def normalised(text: bytes) -> bytes:
    """Separate the cells of a table between blanks by one blank each."""
    return _ENDS.sub(b"", _BLANKS.sub(b" ", text))


def _line_numbers(block: bytes, count: int, rows: int, layout: Layout) -> np.ndarray | None:
    """Return the line number of each row within the block, from 1; None if they are not certain.

    ``count`` is the number of lines. The line of a row is its last one. pyarrow skips blank lines,
    which in a table of one column are missing cells.
    """
    quoted = layout.separator is not None and b'"' in block
    if count == rows and not quoted:
        return np.arange(1, count + 1)
    content = np.frombuffer(block, np.uint8)
    breaks = np.flatnonzero(content == NEWLINE)
    ends = _row_ends(block) if quoted else breaks
    starts = np.concatenate([[0], ends[:-1] + 1])
    blank = (ends == starts) | ((ends == starts + 1) & (content[starts] == CARRIAGE_RETURN))
    if (layout.width == 1 and blank.any()) or len(ends) - blank.sum() != rows:
        return None
    numbers = np.arange(1, count + 1)
    return (numbers[np.searchsorted(breaks, ends)] if quoted else numbers)[~blank]
