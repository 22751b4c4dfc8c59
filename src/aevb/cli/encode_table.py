"""``aevb encode`` for the run of a table: the codes of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aevb.cli.open_table import LISTED, Opened, columns_of, open_table


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
    means, spreads = opened.table.codes(opened.known, return_std=True, seed=seed)
    columns = columns_of(means)
    columns |= {f"{name}_std": values for name, values in columns_of(spreads).items()}
    results = opened.beside(columns)
    if out is None:
        print(f"{opened.rows()}, their codes (posterior means) and standard deviations:")
        print(opened.some(results, np.arange(min(LISTED, opened.file.rows))))
        print("\n" + opened.offer("encode", "codes.csv"))
    else:
        print(opened.written(out, results, ", ".join(results)))


def _need_codes(opened: Opened) -> None:
    graph = opened.table.model.graph
    if all(graph.rule("p", name).spec.finite for name in graph.latents):
        raise ValueError(
            f"The model of {opened.run} has no continuous codes. For codes train with --model "
            f"factors, vae or gmvae and --set latent=2. For the cluster of each row: aevb cluster "
            f"{opened.run}."
        )
