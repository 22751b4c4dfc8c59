"""``aevb impute`` for the run of a table: fill its missing cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.open_table import Opened, open_table
from aevb.cli.table_files import rounded, rounded_cells, text, write_beside, write_parts
from aevb.cli.table_text import aligned, short

if TYPE_CHECKING:
    import numpy as np

    from aevb.tables.fitted import TableModel

Filled = dict[str, "tuple[np.ndarray, list[Any]]"]  # column → rows and their new cells


def impute_table(
    run: Path,
    file: str | None,
    missing: Sequence[str] | None,
    out: Path | None,
    seed: int,
    *,
    unknown_levels: str | None = None,
    std: bool = False,
) -> None:
    """``aevb impute`` for the run of a table."""
    opened = open_table(run, file, missing, out, unknown_levels=unknown_levels)
    filled, spread = _filled(opened.table, opened.known, seed)
    count = sum(len(rows) for rows, _ in filled.values())
    print(f"{opened.rows()}: {count} missing cell{'s' * (count != 1)} filled.")
    if filled:
        print(_filled_text(opened, filled, spread))
    if out is None:
        print("\n" + opened.offer("impute", "filled.csv"))
        return
    if opened.file.large is None:
        results = opened.beside(_deviations(spread, filled if std else ()))
        write_beside(out, opened.file, results, filled)
    else:
        names = _lacking(opened) if std else []

        def compute(part: Any) -> tuple[dict[str, Any], Filled]:
            here, deviations = _filled(opened.table, opened.known_in(part), seed)
            return opened.beside(_deviations(deviations, names)), here

        write_parts(out, opened.file.large, compute)
    print(f"\nThe filled table is in {out}. All other cells are as in {opened.file.path}.")


def _filled(table: TableModel, frame: Any, seed: int) -> tuple[Filled, Any]:
    """The filled cells of a frame with their rows, by column, and all standard deviations."""
    hidden = table.schema.missing_cells(frame, unknown_levels=False)
    whole, spread = table.impute(frame, return_std=True, seed=seed)
    filled: Filled = {}
    for column in table.schema.used:
        rows = hidden[column.name].nonzero()[0]
        if len(rows):
            cells = whole.column(column.name).take(rows).to_pylist()
            filled[column.name] = rows, rounded_cells(column, cells)
    return filled, spread


def _deviations(spread: Any, names: Iterable[str]) -> dict[str, np.ndarray]:
    return {f"{name}_std": rounded(spread[name].to_numpy()) for name in names}


def _lacking(opened: Opened) -> list[str]:
    """The modelled columns of a large table with missing cells."""
    assert opened.file.large is not None
    found = set()
    for part in opened.file.large.parts():
        hidden = opened.schema.missing_cells(opened.known_in(part), unknown_levels=False)
        found |= {name for name, cells in hidden.items() if cells.any()}
    return [column.name for column in opened.schema.used if column.name in found]


def _filled_text(opened: Opened, filled: Filled, spread: Any) -> str:
    """Filled cells of each column, with their uncertainty."""
    lines = [("column", "filled", "examples")]
    for name, (rows, cells) in filled.items():
        doubt = spread[name].to_numpy()[rows]
        listed = opened.schema[name].listed
        shown = [
            f"{text(cell)} ({1 - s:.0%})" if listed else f"{short(cell)} ± {short(s, 2)}"
            for cell, s in list(zip(cells, doubt.tolist(), strict=True))[:4]
        ]
        examples = ", ".join(shown) + (", …" if len(rows) > 4 else "")
        lines.append((name, str(len(rows)), examples))
    return "\n" + "\n".join("  " + line for line in aligned(lines, right={1}))
