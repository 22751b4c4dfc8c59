"""``aevb impute`` for the run of a table: fill its missing cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.open_table import Opened, open_table
from aevb.cli.table_files import rounded, rounded_cells, text, write_beside
from aevb.cli.table_text import aligned, short

if TYPE_CHECKING:
    import numpy as np


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
    hidden = opened.schema.missing_cells(opened.known, unknown_levels=False)
    filled_frame, spread = opened.table.impute(opened.known, return_std=True, seed=seed)
    filled: dict[str, tuple[np.ndarray, list[Any]]] = {}
    for column in opened.schema.used:
        rows = hidden[column.name].nonzero()[0]
        if len(rows):
            cells = filled_frame.column(column.name).take(rows).to_pylist()
            filled[column.name] = rows, rounded_cells(column, cells)
    count = sum(len(rows) for rows, _ in filled.values())
    print(f"{opened.rows()}: {count} missing cells filled.")
    if filled:
        print(_filled_text(opened, filled, spread))
    if out is None:
        print("\n" + opened.offer("impute", "filled.csv"))
        return
    results = {}
    if std:
        results = {f"{name}_std": rounded(spread[name].to_numpy()) for name in filled}
    write_beside(out, opened.file, opened.beside(results), filled)
    print(f"\nThe filled table is in {out}. All other cells are as in {opened.file.path}.")


def _filled_text(
    opened: Opened, filled: Mapping[str, tuple[np.ndarray, list[Any]]], spread: Any
) -> str:
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
