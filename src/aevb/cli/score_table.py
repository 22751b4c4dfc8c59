"""The command ``aevb score``: log p of the rows of a table, and its outliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aevb.cli.open_table import LISTED, File, FileOption, Out, open_table
from aevb.cli.options import RunFolder, RunMissing, Seed, UnknownLevels
from aevb.cli.table_files import rounded
from aevb.cli.table_text import paragraph
from aevb.cli.use import one_file

if TYPE_CHECKING:
    import numpy as np

    from aevb.tables.fitted import TableModel
    from aevb.tables.tail_probabilities import TailProbabilities

PATTERNS = 200  # most patterns of missing cells for which rows are simulated


def score(
    run: RunFolder,
    file: File = None,
    out: Out = None,
    data: FileOption = None,
    missing: RunMissing = None,
    unknown_levels: UnknownLevels = None,
    seed: Seed = 0,
) -> None:
    """Compute log p of each row of a table, and list the least likely rows (outliers).

    log p is a density of the table's own columns, in nats; missing cells are marginalised out. The
    tail probability of a row is the share of rows simulated from the model, with the same missing
    cells, that are at most as likely: it compares rows with different missing cells fairly.

    Example: aevb score run new.csv --out scored.csv
    """
    import numpy as np

    from aevb.tables.tail_probabilities import SIMULATED, TailProbabilities

    opened = open_table(run, one_file(file, data), missing, out, unknown_levels=unknown_levels)
    tails = TailProbabilities(opened.schema, opened.table.model, seed)
    columns = _scores(opened.table, tails, opened.known, PATTERNS)
    log_p = columns["log_p"]
    results = opened.beside(_rounded(columns))
    shown = opened.beside(_rounded(columns) | _tails_text(columns))
    error = log_p.std(ddof=1) / len(log_p) ** 0.5 if len(log_p) > 1 else np.nan
    print(
        paragraph(
            f"{opened.rows()}: log p per row is {log_p.mean():.3f} in the mean (standard error "
            f"{error:.3f}), from {log_p.min():.3f} to {log_p.max():.3f} nats"
            + (
                f"; its sampling error is {columns['stderr'].mean():.2g} per row."
                if "stderr" in columns
                else ", exactly."
            )
        )
    )
    order = np.lexsort((log_p, columns["tail"])) if "tail" in columns else log_p.argsort()
    by = "tail probability" if "tail" in columns else "log p"
    print(f"\nThe least likely rows, ordered by {by}:")
    print(opened.some(shown, order[:LISTED]))
    if "tail" in columns:
        level = 10 / SIMULATED
        few = int((columns["tail"] <= level).sum())
        print(
            paragraph(
                f"tail: share of simulated rows that are at most as likely. {few} "
                f"row{'s have' if few != 1 else ' has'} a tail of at most {level:g}; about "
                f"{level * len(log_p):.1f} would, if the rows came from the model."
            )
        )
    print()
    if out is None:
        print(opened.offer("score", "scored.csv"))
    else:
        most = math.inf if "tail" in columns else 0
        told = opened.written(
            out,
            _rounded(columns),
            " and ".join(results),
            lambda part: _rounded(_scores(opened.table, tails, part, most)),
        )
        print(told)


def _tails_text(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tail probabilities to print; none of the simulated rows is less than one of them."""
    import numpy as np

    from aevb.tables.tail_probabilities import SIMULATED

    if "tail" not in columns:
        return {}
    least = f"< {1 / SIMULATED:g}"
    return {"tail": np.array([tail or least for tail in columns["tail"].tolist()], dtype=object)}


def _rounded(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: rounded(values) for name, values in columns.items()}


def _scores(
    table: TableModel, tails: TailProbabilities, frame: Any, most: float
) -> dict[str, np.ndarray]:
    """log p of rows with its standard error, or with tail probabilities if log p is exact.

    They have no tail probabilities if they have more than ``most`` patterns of missing cells.
    """
    found = table.score(frame, seed=tails.seed)
    columns = {name: found[name].to_numpy() for name in found.column_names}
    if "stderr" not in columns:
        tail = tails.of(frame, columns["log_p"], most)
        columns |= {} if tail is None else {"tail": tail}
    return columns
