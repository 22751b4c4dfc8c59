"""Read the new lines of a run's ``metrics.jsonl`` from a position that a client remembers.

A position is the file's inode, a byte offset at the end of a line, and a checksum of the bytes
before it. A resumed run replaces the file, and then the position no longer fits: reading begins
again, and the client forgets the earlier rows.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 2**18  # bytes that are read at once
LONGEST_LINE = 2**20  # bytes of a line; the trainer writes no longer ones
MOST_COLUMNS = 256  # quantities in a block; others are left out
LONGEST_TEXT = 4000  # characters of a note
CHECKED = 64  # bytes before a position that must still be the same


@dataclass(frozen=True)
class Position:
    inode: int
    offset: int
    check: int

    def __str__(self) -> str:
        return f"{self.inode:x}.{self.offset:x}.{self.check:x}"


START = Position(0, 0, 0)


@dataclass(frozen=True)
class Block:
    """Rows of a history between two positions.

    ``reset`` says that they are the first rows of the file. ``skipped`` counts unreadable lines.
    """

    start: Position
    end: Position
    rows: list[dict[str, Any]]
    reset: bool = False
    skipped: int = 0

    def columns(self) -> dict[str, list[Any]]:
        """Return the rows as columns, with None where a row has no finite value.

        >>> rows = [{"step": 1, "elbo": -1.0}, {"step": 2, "note": "x"}]
        >>> Block(START, START, rows).columns()
        {'step': [1, 2], 'elbo': [-1.0, None], 'note': [None, 'x']}
        """
        names = list(dict.fromkeys(name for row in self.rows for name in row))[:MOST_COLUMNS]
        return {name: [row.get(name) for row in self.rows] for name in names}


def read_block(path: Path, start: Position, until: int | None = None) -> Block:
    """Read the complete lines after a position, at most BLOCK bytes, and not beyond ``until``.

    A block without rows and with ``end == start`` says that there is nothing new.
    """
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return Block(start, START, [], reset=start != START)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return Block(start, START, [], reset=start != START)
        fits = (
            start.inode == found.st_ino
            and start.offset <= found.st_size
            and _check(file, start.offset) == start.check
        )
        offset = start.offset if fits else 0
        end = found.st_size if until is None or not fits else min(until, found.st_size)
        content, skipped = _lines(file, offset, end)
        rows = []
        for line in content.split(b"\n")[:-1]:
            row = _row(line)
            if row is None:
                skipped += 1
            else:
                rows.append(row)
        offset += len(content)
        position = Position(found.st_ino, offset, _check(file, offset))
    finally:
        os.close(file)
    return Block(start, position, rows, not fits, skipped)


def end_of(path: Path) -> Position:
    """Return the position after the last complete line; START if there is no file."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return START
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return START
        low = max(0, found.st_size - LONGEST_LINE)
        offset = low + os.pread(file, LONGEST_LINE, low).rfind(b"\n") + 1
        return Position(found.st_ino, offset, _check(file, offset))
    finally:
        os.close(file)


def parse_position(text: str) -> Position | None:
    """Return the position of a text; None if it is none.

    >>> parse_position("1f.20.0")
    Position(inode=31, offset=32, check=0)
    """
    found = re.fullmatch(r"([0-9a-f]{1,16})\.([0-9a-f]{1,16})\.([0-9a-f]{1,8})", text)
    return None if found is None else Position(*(int(part, 16) for part in found.groups()))


def _lines(file: int, offset: int, end: int) -> tuple[bytes, int]:
    """Return complete lines from an offset, and how many endless lines they have."""
    content = os.pread(file, min(BLOCK, end - offset), offset)
    if b"\n" not in content and len(content) == BLOCK:
        content = os.pread(file, min(LONGEST_LINE, end - offset), offset)
        if b"\n" not in content and len(content) == LONGEST_LINE:
            return content, 1  # its rest is unreadable as well, and is skipped with the next block
    return content[: content.rfind(b"\n") + 1], 0


def _check(file: int, offset: int) -> int:
    low = max(0, offset - CHECKED)
    return zlib.crc32(os.pread(file, offset - low, low))


def _row(line: bytes) -> dict[str, Any] | None:
    """Return a line as a row of numbers and texts; None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return {name: _value(value) for name, value in row.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, float):
        # Seven digits are those of float32, and of every curve.
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
