"""``aevb encode`` for the run of a table: the codes of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.open_table import LISTED, Opened, columns_of, open_table

if TYPE_CHECKING:
    import numpy as np

    from aevb.tables.fitted import TableModel


def encode_table(
    run: Path,
    file: str | None,
    missing: Sequence[str] | None,
    out: Path | None,
    seed: int,
    *,
    unknown_levels: str | None = None,
) -> None:
    """``aevb encode`` for the run of a table."""
    import numpy as np

    opened = open_table(run, file, missing, out, unknown_levels=unknown_levels)
    _need_codes(opened)
    columns = _codes(opened.table, seed, opened.known)
    results = opened.beside(columns)
    if out is None:
        print(f"{opened.rows()}, their codes (posterior means) and standard deviations:")
        print(opened.some(results, np.arange(min(LISTED, opened.known.num_rows))))
        print("\n" + opened.offer("encode", "codes.csv"))
    else:
        again = partial(_codes, opened.table, seed)
        print(opened.written(out, columns, ", ".join(results), again))


def _codes(table: TableModel, seed: int, frame: Any) -> dict[str, np.ndarray]:
    """The codes of rows, and their standard deviations."""
    means, spreads = table.codes(frame, return_std=True, seed=seed)
    stds = {f"{name}_std": values for name, values in columns_of(spreads).items()}
    return columns_of(means) | stds


def _need_codes(opened: Opened) -> None:
    graph = opened.table.model.graph
    if all(graph.rule("p", name).spec.finite for name in graph.latents):
        raise ValueError(
            f"The model of {opened.run} has no continuous codes. For codes train with --model "
            f"factors, vae or gmvae and --set latent=2. For the cluster of each row: aevb cluster "
            f"{opened.run}."
        )
