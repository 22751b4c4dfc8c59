"""``aevb evaluate`` for the run of a table: log p, and cells that are hidden and predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.judged_rows import MOSTLY, TRAINED, Judged, judged_rows
from aevb.cli.table_text import aligned, paragraph, short

if TYPE_CHECKING:
    import numpy as np

    from aevb.tables.columns import Column

HIDDEN = 0.1  # share of the known cells that evaluate hides in each round
ENOUGH, ROUNDS = 100, 10  # hidden cells per column that are enough; most rounds


def evaluate_table(
    run: Path,
    file: str | None,
    missing: Sequence[str] | None,
    *,
    evidence: str,
    samples: int | None,
    seed: int,
    unknown_levels: str | None = None,
) -> None:
    """``aevb evaluate`` for the run of a table: log p, and cells that are hidden and predicted."""
    import numpy as np

    found = judged_rows(run, file, missing, unknown_levels=unknown_levels)
    opened, which = found.opened, found.which
    scores = opened.table.score(found.rows, method=evidence, samples=samples, seed=seed)
    log_p = scores["log_p"].to_numpy()
    how = "exact"
    if "stderr" in scores.column_names:
        noise = float(np.sqrt(np.mean(scores["stderr"].to_numpy() ** 2) / len(log_p)))
        method = "importance sampling" if evidence == "auto" else evidence
        how = f"{method}, sampling error {noise:.2g}"
    error = log_p.std(ddof=1) / len(log_p) ** 0.5 if len(log_p) > 1 else np.nan
    rows = f"{len(log_p):,} row{'s' * (len(log_p) != 1)} of {opened.file.path}"
    if opened.file.large is not None and which != "held out":
        rows = opened.rows()
    print(rows + f" ({which})" * bool(which) + "\n")
    if found.changed:
        print(paragraph(f"Note: {found.changed}") + "\n")
    print(
        paragraph(
            f"log p per row: {log_p.mean():.3f} ± {error:.2g} nats "
            f"({how}; ± is the standard error between rows), a density of the table's own columns."
        )
    )
    if which in (TRAINED, MOSTLY):
        rows, fix = (
            ("these rows", "Train with --hold-out 0.2 to judge the model.")
            if which == TRAINED
            else ("most of these rows", f"For the rows held out: aevb evaluate {run}.")
        )
        print(
            "\n"
            + paragraph(
                f"The model was fitted to {rows}, so log p and the errors below look better than "
                f"they are for new rows. {fix}"
            )
        )
    print("\n" + _hidden_cells(found, seed))


def _hidden_cells(judged: Judged, seed: int) -> str:
    """Hide known cells at random, fill them, and compare with the truth.

    The comparison is with the mean or commonest level of each column's training cells, which the
    model knows, too.
    """
    import numpy as np

    opened, frame = judged.opened, judged.rows
    draw = np.random.default_rng(seed)
    known = opened.schema.cells(frame)
    missing = {name: np.isnan(values) for name, values in known.items()}
    rounds = min(max(math.ceil(ENOUGH / (HIDDEN * frame.num_rows)), 1), ROUNDS)
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in missing}
    for k in range(rounds):
        hide = {name: ~gone & (draw.random(len(gone)) < HIDDEN) for name, gone in missing.items()}
        filled = opened.schema.cells(
            opened.table.impute(_without_cells(frame, hide), seed=seed + k)
        )
        for name, rows in hide.items():
            found[name].append((known[name][rows], filled[name][rows]))
    trained_on = opened.schema.cells(judged.trained_on)
    lines: list[tuple[str, ...]] = [
        ("column", "hidden", "error", "model", "column alone", "better by")
    ]
    for column in opened.schema.used:
        truth, guess = map(np.concatenate, zip(*found[column.name], strict=True))
        if not len(truth):
            continue
        typical = _typical(column, trained_on[column.name])
        if column.listed:
            ours, theirs = (float((truth != other).mean()) for other in (guess, typical))
            what, shown = "wrong level", [f"{100 * value:.1f} %" for value in (ours, theirs)]
        else:
            ours, theirs = (
                float(np.sqrt(np.mean((truth - other) ** 2))) for other in (guess, typical)
            )
            unit = ", days" if column.kind == "date" else ""
            what, shown = f"RMSE{unit}", [short(value) for value in (ours, theirs)]
        gain = f"{100 * (1 - ours / theirs):.0f} %" if theirs > 0 else "—"
        lines.append((column.name, str(len(truth)), what, *shown, gain))
    times = f" in each of {rounds} rounds" if rounds > 1 else ""
    which = "these rows" if judged.changed else "the training rows"
    head = paragraph(
        f"Cells hidden at random ({HIDDEN:.0%} of the known ones{times}, seed {seed}) and filled "
        f"from the other cells of their row, against the mean or the commonest level of the "
        f"column in {which}:"
    )
    return head + "\n\n" + "\n".join("  " + line for line in aligned(lines, right={1, 3, 4, 5}))


def _typical(column: Column, values: np.ndarray) -> float:
    """The position of a column's commonest level, or its mean."""
    import numpy as np

    known = values[~np.isnan(values)]
    if column.listed:
        return float(np.bincount(known.astype(int), minlength=1).argmax())
    return float(known.mean()) if len(known) else math.nan


def _without_cells(frame: Any, hide: Mapping[str, np.ndarray]) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    for name, gone in hide.items():
        column = frame.column(name)
        position, field = frame.column_names.index(name), frame.schema.field(name)
        frame = frame.set_column(position, field, pc.if_else(pa.array(gone), None, column))
    return frame
