"""Print schemas and parts of tables within the width of the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aevb.cli.table_files import text, texts

if TYPE_CHECKING:
    from aevb.tables.columns import Column
    from aevb.tables.schema import Schema

SHOWN = 40  # columns of a schema to print
NARROW = 8  # characters to which a cell of a cramped table is cut
WIDEST = 24  # characters of a cell of a table
NUMBER = re.compile(r"(< )?([+-]?[\d.,]+([eE][+-]?\d+)?)?")


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def paragraph(words: str, indent: str = "") -> str:
    """Wrap a text at the width of the terminal."""
    return textwrap.fill(
        words,
        terminal_width(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def schema_text(schema: Schema) -> str:
    """The columns that are modelled, one line each, then those that are left out and why."""
    from aevb.tables.kinds import case_text, marks_text, words_text, zeros_text

    used = schema.used[:SHOWN]
    lines = [("column", "kind", "likelihood", "missing")]
    lines += [
        (
            column.name,
            column.kind,
            column.likelihood,
            str(column.missing) if column.missing else "",
        )
        for column in used
    ]
    room = _room(_widths(lines))
    values = ["values", *(values_text(column, room) for column in used)]
    found = aligned([(*line, cell) for line, cell in zip(lines, values, strict=True)], right={3})
    if len(schema.used) > SHOWN:
        found.append(f"… {len(schema.used) - SHOWN} more columns")
    for column in used:
        if column.facts.form is not None:
            told = column.facts.form.described()
            found.append(paragraph(f"{column.name}: {told}", " " * 4))
        if column.facts.words:
            found.append(paragraph(f"{column.name}: {words_text(column.facts)}", " " * 4))
        if told := zeros_text(column.facts, column.kind):
            zeros = column.facts.zeros
            count = f"{zeros} zero{'s' * (zeros > 1)}; " if zeros else ""
            found.append(paragraph(f"{column.name}: {count}{told}", " " * 4))
        if column.listed and (told := case_text(column.facts)):
            found.append(paragraph(f"{column.name}: {told}", " " * 4))
        if column.listed and (told := marks_text(column.facts)):
            found.append(paragraph(f"{column.name}: {told} (--missing)", " " * 4))
    left = [column for column in schema.columns if not column.used]
    if left:
        width = min(max(len(column.name) for column in left[:SHOWN]), WIDEST)
        found += ["", "left out:"]
        found += [
            paragraph(f"{cut(column.name, width):<{width}}  {column.reason}", " " * (width + 4))
            for column in left[:SHOWN]
        ]
        if len(left) > SHOWN:
            found.append(f"… {len(left) - SHOWN} more columns")
    return "\n".join(f"  {line}".rstrip() for line in found)


def values_text(column: Column, width: int) -> str:
    """The levels of a column, or its smallest and largest value.

    Levels beyond the width are counted: "a, b, … (230)" are 230 levels.
    """
    import numpy as np

    from aevb.tables.kinds import levels_text

    if column.listed:
        levels = [one_line(text(level)) for level in column.levels]
        whole = ", ".join(levels)
        left = max(width - len(f", … ({len(levels)})"), NARROW)
        return (
            whole if len(whole) <= width else levels_text([cut(one, left) for one in levels], left)
        )
    low, high = column.facts.low, column.facts.high
    if low is None or high is None:
        return ""
    if column.kind == "date":
        return f"{np.datetime64(round(low), 'D')} … {np.datetime64(round(high), 'D')}"
    return f"{low:g} … {high:g}"


def aligned(lines: Sequence[Sequence[str]], right: Sequence[int] | set[int] = ()) -> list[str]:
    """Lines of cells, aligned in columns; the last column is cut at the width of the terminal."""
    widths = _widths([line[:-1] for line in lines])
    widths.append(min(max(len(line[-1]) for line in lines), _room(widths)))
    return [
        "  ".join(
            cut(cell, width).rjust(width) if j in right else cut(cell, width).ljust(width)
            for j, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [min(max(len(line[j]) for line in lines), WIDEST) for j in range(len(lines[0]))]


def _room(widths: Sequence[int]) -> int:
    """The width of a last column after columns of these widths."""
    return max(terminal_width() - 2 - sum(widths) - 2 * len(widths), NARROW)


def rows_text(columns: dict[str, Sequence[Any]], *, first: int) -> str:
    """Some rows as text, columns aligned; columns beyond the width of the terminal are counted.

    The ``first`` columns are always shown.
    """
    shown = {name: [name, *map(one_line, texts(cells))] for name, cells in columns.items()}
    numbers = {name for name, cells in shown.items() if all(map(NUMBER.fullmatch, cells[1:]))}
    parts, total = [], 2
    for j, (name, cells) in enumerate(shown.items()):
        width = min(max(map(len, cells)), WIDEST)
        room = terminal_width() - (0 if j == len(shown) - 1 else len(" … 99 more"))
        if j >= first and total + width > room:
            break
        total += width + 2
        parts.append(
            [
                cut(cell, width).rjust(width) if name in numbers else cut(cell, width).ljust(width)
                for cell in cells
            ]
        )
    left = len(shown) - len(parts)
    lines = ["  " + "  ".join(line).rstrip() for line in zip(*parts, strict=True)]
    if left:
        lines[0] += f" … {left} more"
    return "\n".join(lines)


def one_line(cell: str) -> str:
    """A cell on one line."""
    return " ".join(cell.split()) if "\n" in cell or "\t" in cell else cell


def cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "…"


def short(cell: Any, digits: int = 4) -> str:
    """A cell with few significant digits, if it is a number."""
    if not isinstance(cell, float):
        return str(cell)
    shown = f"{cell:.{digits}g}"
    return f"{cell:.0f}" if "e+" in shown and abs(cell) < 1e7 else shown
