"""``aevb sample`` for the run of a table: draw new rows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.data_argument import recipe_of
from aevb.cli.open_table import LISTED
from aevb.cli.options import refuse_input
from aevb.cli.table_files import TEXT, read_table_file, refuse_ending, rounded_cells, write_frame
from aevb.cli.table_text import rows_text

if TYPE_CHECKING:
    from aevb.data.datasets import Recipe


def sample_table(run: Path, out: Path | None, n: int, seed: int) -> None:
    """``aevb sample`` for the run of a table."""
    import pyarrow as pa  # type: ignore[import-untyped]

    from aevb.tables.fitted import load_table

    if out is not None:
        refuse_ending(out)
    table, recipe = load_table(run), recipe_of(run)
    if recipe is not None and out is not None:
        refuse_input(out, recipe.data, recipe.validation)
    frame = table.sample(n, seed=seed)
    if not isinstance(frame, pa.Table):
        frame = pa.table(dict(frame))
    columns = {
        column.name: rounded_cells(column, frame.column(column.name).to_pylist())
        for column in table.schema.used
    }
    frame = pa.table(
        {name: pa.array(cells, frame.schema.field(name).type) for name, cells in columns.items()}
    )
    if out is None:
        shown: dict[str, Sequence[Any]] = {
            name: cells[: 2 * LISTED] for name, cells in columns.items()
        }
        print(f"{n} new row{'s' * (n != 1)} from the model of {run}:")
        print(rows_text(shown, first=1))
        if n > 2 * LISTED:
            more = n - 2 * LISTED
            print(f"  … {more} more row{'s' * (more != 1)}")
        print(
            f"\nWrite them: {shlex.join(['aevb', 'sample', str(run), '-n', str(n)])} --out new.csv"
        )
        return
    write_frame(out, frame, *_layout(recipe))
    rows = "1 new row" if n == 1 else f"{n} new rows"
    print(f"{rows} with the columns of the table {'is' if n == 1 else 'are'} in {out}.")


def _layout(recipe: Recipe | None) -> tuple[str, str]:
    """The separator and the decimal sign of the run's table; "," and "." if it is not there."""
    if recipe is None or Path(recipe.data).suffix not in TEXT or not Path(recipe.data).exists():
        return ",", "."
    return read_table_file(recipe.data).layout
