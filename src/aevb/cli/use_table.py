"""Commands on the run of a table: score, cluster, impute, encode, sample and evaluate."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.data_argument import recipe_of
from aevb.cli.model_argument import open_run
from aevb.cli.options import RunFolder, RunMissing, Seed, path, refuse_input
from aevb.cli.table_files import (
    TableFile,
    own_names,
    read_table_file,
    refuse_ending,
    rounded,
    rounded_cells,
    text,
    write_beside,
    write_frame,
)
from aevb.cli.table_text import aligned, paragraph, rows_text

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.datasets import Loaded, Recipe
    from aevb.tables.columns import Column
    from aevb.tables.fitted import TableModel
    from aevb.tables.schema import Schema

LISTED = 5  # rows of a preview
SIMULATED = 1000  # rows per pattern of missing cells, for tail probabilities
PATTERNS = 200  # most patterns of missing cells for which rows are simulated
HIDDEN = 0.1  # share of the known cells that evaluate hides in each round
ENOUGH, ROUNDS = 100, 10  # hidden cells per column that are enough; most rounds
UNRELATED = 0.05  # adjusted Rand index up to which a column and the clusters are unrelated
FEW = 20  # most levels of a column that clusters are compared with

File = Annotated[
    str | None,
    typer.Argument(help="A table with the columns of the run's; by default the run's own file."),
]
Out = Annotated[
    Path | None,
    typer.Option(parser=path, help="A .csv, .tsv or .parquet file. Without it, a part is printed."),
]


def is_table_run(run: Path) -> bool:
    """Whether a folder is the run of a table."""
    return (run / "schema.json").is_file()


@dataclass(frozen=True)
class Opened:
    """The run of a table, and the table that a command works on."""

    run: Path
    table: TableModel
    recipe: Recipe | None
    file: TableFile
    known: Any  # the columns of the file that the schema knows

    @property
    def schema(self) -> Schema:
        return self.table.schema

    def rows(self) -> str:
        return f"{self.file.rows:,} row{'s' * (self.file.rows != 1)} of {self.file.path}"


def refuse_options(given: Mapping[str, Any]) -> None:
    """Refuse options that the run of a table has no use for."""
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option} is not for the run of a table. Leave it out.")


def open_table(
    run: Path,
    file: str | None = None,
    missing: Sequence[float] | None = None,
    out: Path | None = None,
    *,
    tell: bool = True,
) -> Opened:
    """Open the run of a table and a file for it, by default the run's own.

    ``missing`` are numbers that mark missing cells, by default those of the training. With
    ``tell=False``, columns that the model does not read are not listed.
    """
    from aevb.tables.fitted import load_table

    if not is_table_run(run):
        open_run(run)  # raises if the folder holds no run
        raise ValueError(
            f"{run} is not the run of a table: `aevb train table.csv` makes one. For this run use "
            f"aevb evaluate, encode, impute or sample."
        )
    if out is not None:
        refuse_ending(out)
    table, recipe = load_table(run), recipe_of(run)
    name = file or (recipe.data if recipe else None)
    if name is None:
        raise ValueError(
            f"{run} does not record its table. Name a file after it: aevb score {run} FILE."
        )
    if file is None and not Path(name).exists():
        raise ValueError(
            f"{run} was trained on {name}, which is not here. Change to the folder that holds "
            f"this file, or name the file after the run."
        )
    if out is not None:
        refuse_input(out, name)
    marks = (recipe.missing if recipe else None) if missing is None else missing
    found = read_table_file(name, marks or ())
    _check_columns(table.schema, found, tell=tell)
    return Opened(run, table, recipe, found, found.known_to(table.schema))


def _check_columns(schema: Schema, file: TableFile, *, tell: bool) -> None:
    absent = [column.name for column in schema.used if column.name not in file.names]
    if absent:
        shown = ", ".join(map(repr, absent[:5])) + (", …" if len(absent) > 5 else "")
        raise ValueError(
            f"{file.path} lacks the column{'s' * (len(absent) > 1)} {shown} of the run's table. "
            f"Add {'it' if len(absent) == 1 else 'them'} (empty cells are missing values), or "
            f"train a model without: aevb train … --without {','.join(absent[:5])}."
        )
    extra = [name for name in file.names if name not in schema]
    if extra and tell:
        shown = ", ".join(extra[:5]) + (", …" if len(extra) > 5 else "")
        print(
            paragraph(
                f"Not in the run's table, so not read by the model: {shown}. "
                f"{'It is' if len(extra) == 1 else 'They are'} copied to the output."
            )
        )


def _columns_of(frame: Any) -> dict[str, np.ndarray]:
    return {name: rounded(frame[name].to_numpy()) for name in frame.column_names}


def _beside(opened: Opened, results: Mapping[str, Any]) -> dict[str, Any]:
    """Results under names that the table does not have."""
    names = own_names(list(results), opened.file.names)
    return {names[name]: values for name, values in results.items()}


def _some(opened: Opened, results: Mapping[str, Any], rows: np.ndarray) -> str:
    """Some rows in text: the row number, the results, then the columns of the table."""
    shown: dict[str, Any] = {"row": (rows + 1).tolist()}
    shown |= {name: values[rows].tolist() for name, values in results.items()}
    first = len(shown)
    shown |= {name: opened.file.cells(name, rows) for name in opened.file.names}
    return rows_text(shown, first=first)


def _written(opened: Opened, out: Path, results: Mapping[str, Any], what: str) -> str:
    write_beside(out, opened.file, results)
    return paragraph(f"{opened.rows()}, with {what}, are in {out}.")


def _offer(command: str, opened: Opened, out: str) -> str:
    own = "" if opened.recipe and str(opened.file.path) == opened.recipe.data else opened.file.path
    words = ["aevb", command, str(opened.run), *([str(own)] if own else []), "--out", out]
    return f"Write all rows: {shlex.join(words)}"


def loaded_rows(run: Path, file: str | None, missing: Sequence[float] | None) -> Loaded:
    """The rows of a table as the data of its model, for commands that examine a model."""
    from aevb.data.datasets import Loaded, Recipe, Split

    found = judged_rows(run, file, missing)
    opened = found.opened
    data = opened.schema.encode(found.rows)
    rows = Split(dict(data), raw=dict(data))
    recipe = opened.recipe or Recipe(str(opened.file.path))
    told = (paragraph(found.changed, "  "),) if found.changed else ()
    held_out = rows if found.which in ("held out", "validation") else None
    return Loaded(rows, held_out, recipe, notes=(*_variables(opened.schema), *told))


def _variables(schema: Schema) -> tuple[str, ...]:
    """Say which columns each variable of the model holds."""
    found = []
    for name, columns in schema.variables.items():
        shown = ", ".join(column.name for column in columns[:8]) + ", …" * (len(columns) > 8)
        scaled = ", standardised" if columns[0].dense else ""
        if shown != name:
            found.append(paragraph(f"{name} holds {shown}{scaled}.", "  "))
    return tuple(found)


# Score --------------------------------------------------------------------------------------------


def score(
    run: RunFolder,
    file: File = None,
    out: Out = None,
    missing: RunMissing = None,
    seed: Seed = 0,
) -> None:
    """Compute log p of each row of a table, and list the least likely rows (outliers).

    log p is a density of the table's own columns, in nats; missing cells are marginalised out. The
    tail probability of a row is the share of rows simulated from the model, with the same missing
    cells, that are at most as likely: it compares rows with different missing cells fairly.

    Example: aevb score run new.csv --out scored.csv
    """
    import numpy as np

    opened = open_table(run, file, missing, out)
    found = opened.table.score(opened.known, seed=seed)
    columns = {name: found[name].to_numpy() for name in found.column_names}
    if "stderr" not in columns:
        tail = tail_probabilities(opened.table, opened.known, columns["log_p"], seed)
        columns |= {} if tail is None else {"tail": tail}
    log_p = columns["log_p"]
    results = _beside(opened, {name: rounded(values) for name, values in columns.items()})
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
    print(f"\nThe least likely rows{' for their missing cells' * ('tail' in columns)}:")
    print(_some(opened, results, order[:LISTED]))
    if "tail" in columns:
        level = 10 / SIMULATED
        few = int((columns["tail"] <= level).sum())
        print(
            "\n"
            + paragraph(
                f"tail: share of simulated rows that are at most as likely. {few} "
                f"row{'s have' if few != 1 else ' has'} a tail of at most {level:g}; about "
                f"{level * len(log_p):.1f} would, if the rows came from the model."
            )
        )
    print()
    if out is None:
        print(_offer("score", opened, "scored.csv"))
    else:
        print(_written(opened, out, results, " and ".join(results)))


def tail_probabilities(
    table: TableModel, frame: Any, log_p: np.ndarray, seed: int
) -> np.ndarray | None:
    """The share of simulated rows, with the same missing cells, that are at most as likely, [N].

    None if the table has more than ``PATTERNS`` patterns of missing cells.
    """
    import numpy as np

    hidden = np.column_stack(list(table.schema.missing_cells(frame).values()))
    patterns, which = np.unique(hidden, axis=0, return_inverse=True)
    if len(patterns) > PATTERNS:
        return None
    names = [column.name for column in table.schema.used]
    simulated = table.sample(SIMULATED, seed=seed)
    found = np.empty(len(log_p))
    for i, pattern in enumerate(patterns):
        rows = which.reshape(-1) == i
        known = _hidden(simulated, [name for name, h in zip(names, pattern, strict=True) if h])
        reference = np.sort(table.score(known, seed=seed)["log_p"].to_numpy())
        found[rows] = np.searchsorted(reference, log_p[rows], side="right") / SIMULATED
    return found


def _hidden(frame: Any, names: list[str]) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]

    for name in names:
        field = frame.schema.field(name)
        nothing = pa.nulls(frame.num_rows, field.type)
        frame = frame.set_column(frame.column_names.index(name), field, nothing)
    return frame


# Clusters -----------------------------------------------------------------------------------------


def cluster(
    run: RunFolder,
    file: File = None,
    out: Out = None,
    missing: RunMissing = None,
    seed: Seed = 0,
) -> None:
    """Assign each row of a table to a cluster, with the probability of every cluster.

    The command describes the clusters, and compares them with categories that were left out of the
    model.

    Example: aevb cluster run --out clusters.csv
    """
    opened = open_table(run, file, missing, out)
    _need_latent(opened, "clusters", clusters=True)
    columns = _columns_of(opened.table.clusters(opened.known, seed=seed))
    results = _beside(opened, columns)
    labels, sure = columns["cluster"], _most_probable(columns)
    print(
        paragraph(
            f"{opened.rows()} in {len(columns) - 1} cluster{'s' * (len(columns) > 2)}; the mean "
            f"probability of a row's own cluster is {sure.mean():.3f}, and "
            f"{int((sure < 0.8).sum())} rows have less than 0.8."
        )
        + "\n"
    )
    print(_described(opened, labels, len(columns) - 1))
    for name in _comparable(opened):
        print("\n" + _against(opened, labels, len(columns) - 1, name))
    print()
    if out is None:
        print(_offer("cluster", opened, "clusters.csv"))
    else:
        print(_written(opened, out, results, _probabilities(len(columns) - 1)))


def _probabilities(count: int) -> str:
    return "cluster and its probability" if count == 1 else f"cluster and {count} probabilities"


def _need_latent(opened: Opened, what: str, *, clusters: bool) -> None:
    graph = opened.table.model.graph
    specs = [graph.rule("p", name).spec for name in graph.latents]
    if clusters and not any(spec.categorical for spec in specs):
        raise ValueError(
            f"The model of {opened.run} has no clusters. For the codes of its rows: aevb encode "
            f"{opened.run}. For clusters train with --model mixture or --model gmvae."
        )
    if not clusters and all(spec.finite for spec in specs):
        raise ValueError(
            f"The model of {opened.run} has clusters and no continuous codes. For the cluster of "
            f"each row: aevb cluster {opened.run}. For codes train with --model factors, vae or "
            f"gmvae and --set latent=2."
        )


def _most_probable(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    import numpy as np

    return np.column_stack([columns[f"p{k}"] for k in range(len(columns) - 1)]).max(1)


def _described(opened: Opened, labels: np.ndarray, count: int) -> str:
    """A table of the clusters: size, and the mean or the most frequent level of each column."""
    lines = [("column", *(f"cluster {k}" for k in range(count)))]
    sizes = [int((labels == k).sum()) for k in range(count)]
    lines.append(("rows", *map(str, sizes)))
    for column in opened.schema.used:
        cells = opened.known.column(column.name).to_pylist()
        lines.append((column.name, *(_summary(column, cells, labels == k) for k in range(count))))
    return _blocks(lines)


def _blocks(lines: list[tuple[str, ...]]) -> str:
    """A wide table in blocks that fit the terminal, each with the first column."""
    from aevb.cli.table_text import terminal_width

    widths = [max(len(line[j]) for line in lines) for j in range(len(lines[0]))]
    room, j, blocks = terminal_width() - 2 - widths[0], 1, []
    while j < len(widths):
        end, used = j, 0
        while end < len(widths) and (end == j or used + widths[end] + 2 <= room):
            used += widths[end] + 2
            end += 1
        blocks.append(
            "\n".join(
                "  "
                + line[0].ljust(widths[0])
                + "".join("  " + line[i].rjust(widths[i]) for i in range(j, end))
                for line in lines
            )
        )
        j = end
    return "\n\n".join(blocks)


def _summary(column: Column, cells: list[Any], rows: np.ndarray) -> str:
    import numpy as np

    here = [cell for cell, kept in zip(cells, rows.tolist(), strict=True) if kept and _is(cell)]
    if not here:
        return "—"
    if column.listed:
        level = max(column.levels, key=here.count)
        return f"{text(level)} {round(100 * here.count(level) / len(here))} %"
    if column.kind == "date":
        return str(np.array(here, dtype="datetime64[D]").astype(float).mean().astype("M8[D]"))
    return f"{float(np.mean(here)):.4g}"


def _is(cell: Any) -> bool:
    return cell is not None and cell == cell


def _comparable(opened: Opened) -> list[str]:
    """Columns with few levels that the model did not read."""
    read = {column.name for column in opened.schema.used}
    found = []
    for name in opened.file.names:
        if name not in read:
            levels = set(opened.file.frame.column(name).to_pylist()) - {None}
            if 2 <= len(levels) <= FEW:
                found.append(name)
    return found


def _against(opened: Opened, labels: np.ndarray, count: int, name: str) -> str:
    """Clusters against a column that the model did not read."""
    from sklearn.metrics import adjusted_rand_score  # type: ignore[import-untyped]

    cells = opened.file.frame.column(name).to_pylist()
    known = [i for i, cell in enumerate(cells) if _is(cell)]
    levels = sorted({cells[i] for i in known})
    lines = [(name, *(f"cluster {k}" for k in range(count)))]
    for level in levels:
        rows = [i for i in known if cells[i] == level]
        lines.append((text(level), *(str(int((labels[rows] == k).sum())) for k in range(count))))
    agreement = adjusted_rand_score([str(cells[i]) for i in known], labels[known])
    table = [[int(number) for number in line[1:]] for line in lines[1:]]
    same = sum(max(column) for column in zip(*table, strict=True))
    head = paragraph(
        f"Clusters against {name}, which the model did not read: {same} of {len(known)} rows have "
        f"the commonest {name} of their cluster (adjusted Rand index {agreement:.3f})"
    )
    # A table of numbers without a pattern would only distract.
    return f"{head}:\n\n{_blocks(lines)}" if agreement > UNRELATED else f"{head}."


# Codes --------------------------------------------------------------------------------------------


def encode_table(
    run: Path, file: str | None, missing: Sequence[float] | None, out: Path | None, seed: int
) -> None:
    """``aevb encode`` for the run of a table."""
    import numpy as np

    opened = open_table(run, file, missing, out)
    _need_latent(opened, "codes", clusters=False)
    means, spreads = opened.table.codes(opened.known, return_std=True, seed=seed)
    columns = _columns_of(means)
    columns |= {f"{name}_std": values for name, values in _columns_of(spreads).items()}
    results = _beside(opened, columns)
    if out is None:
        print(f"{opened.rows()}, their codes (posterior means) and standard deviations:")
        print(_some(opened, results, np.arange(min(LISTED, opened.file.rows))))
        print("\n" + _offer("encode", opened, "codes.csv"))
    else:
        print(_written(opened, out, results, ", ".join(results)))


# Missing cells ------------------------------------------------------------------------------------


def impute_table(
    run: Path,
    file: str | None,
    missing: Sequence[float] | None,
    out: Path | None,
    seed: int,
    *,
    std: bool = False,
) -> None:
    """``aevb impute`` for the run of a table."""
    opened = open_table(run, file, missing, out)
    hidden = opened.schema.missing_cells(opened.known)
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
        print("\n" + _offer("impute", opened, "filled.csv"))
        return
    results = {}
    if std:
        results = {f"{name}_std": rounded(spread[name].to_numpy()) for name in filled}
    write_beside(out, opened.file, _beside(opened, results), filled)
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
            f"{text(cell)} ({1 - s:.0%})" if listed else f"{_short(cell)} ± {_short(s, 2)}"
            for cell, s in list(zip(cells, doubt.tolist(), strict=True))[:4]
        ]
        examples = ", ".join(shown) + (", …" if len(rows) > 4 else "")
        lines.append((name, str(len(rows)), examples))
    return "\n" + "\n".join("  " + line for line in aligned(lines, right={1}))


def _short(cell: Any, digits: int = 4) -> str:
    if not isinstance(cell, float):
        return str(cell)
    text = f"{cell:.{digits}g}"
    return f"{cell:.0f}" if "e+" in text and abs(cell) < 1e7 else text


# Samples ------------------------------------------------------------------------------------------


def sample_table(run: Path, out: Path | None, n: int, seed: int) -> None:
    """``aevb sample`` for the run of a table."""
    import pyarrow as pa

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
        print(f"{n} new rows from the model of {run}:")
        print(rows_text(shown, first=1))
        if n > 2 * LISTED:
            print(f"  … {n - 2 * LISTED} more rows")
        print(
            f"\nWrite them: {shlex.join(['aevb', 'sample', str(run), '-n', str(n)])} --out new.csv"
        )
        return
    write_frame(out, frame)
    print(f"{n} new rows with the columns of the table are in {out}.")


# Evaluation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """Rows to judge a model by: which they are, and the rows that it was trained on.

    ``changed`` is a note that the run's own file is not the one of the training; ``trained_on`` are
    then the rows themselves.
    """

    opened: Opened
    rows: Any
    which: str
    trained_on: Any
    changed: str = ""


def judged_rows(
    run: Path, file: str | None, missing: Sequence[float] | None, *, tell: bool = True
) -> Judged:
    """Open a table, and return its rows to judge the model by.

    They are the rows of the file, or else the run's validation or held-out rows, or all its rows.
    If the run's own file has changed since training, which rows were held out is unknown: they are
    all its rows, and a note says so.
    """
    from aevb.cli.train_table import split_rows

    opened = open_table(run, file, missing, tell=tell)
    recipe, known = opened.recipe, opened.known
    if recipe is None:
        return Judged(opened, known, "", known)
    note = _changed(opened.schema, recipe)
    if file is not None or recipe.validation:
        which = "" if file is not None else "validation"
        if file is None:
            opened = open_table(run, recipe.validation, missing, tell=tell)
        if note:
            return Judged(opened, opened.known, which, opened.known, f"{note}.")
        own = read_table_file(recipe.data, recipe.missing or ())
        trained_on, _ = split_rows(TableFile(own.path, own.known_to(opened.schema)), recipe)
        return Judged(opened, opened.known, which, trained_on)
    if note:
        unknown = (
            "which of its rows were held out is unknown. These are all its rows, and the model may "
            "have been trained on most of them"
            if recipe.hold_out
            else "whether the model was trained on these rows is unknown"
        )
        return Judged(
            opened, known, "", known, f"{note}, so {unknown}. Name new rows: --data FILE."
        )
    trained_on, held_out = split_rows(TableFile(opened.file.path, known), recipe)
    if held_out is not None:
        return Judged(opened, held_out, "held out", trained_on)
    return Judged(opened, known, "the training rows", trained_on)


def _changed(schema: Schema, recipe: Recipe) -> str:
    """Say that the table of a run is not the one of its training; "" if it is."""
    from aevb.cli.train_table import has_changed

    if not Path(recipe.data).exists():
        return f"{recipe.data}, the table of the training, is not here"
    return f"{recipe.data} has changed since training" if has_changed(schema, recipe) else ""


def evaluate_table(
    run: Path,
    file: str | None,
    missing: Sequence[float] | None,
    *,
    evidence: str,
    samples: int | None,
    seed: int,
) -> None:
    """``aevb evaluate`` for the run of a table: log p, and cells that are hidden and predicted."""
    import numpy as np

    found = judged_rows(run, file, missing)
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
    print(rows + f" ({which})" * bool(which) + "\n")
    if found.changed:
        print(paragraph(f"Note: {found.changed}") + "\n")
    print(
        paragraph(
            f"log p per row: {log_p.mean():.3f} ± {error:.2g} nats "
            f"({how}; ± is the standard error between rows), a density of the table's own columns."
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
    missing = opened.schema.missing_cells(frame)
    rounds = min(max(math.ceil(ENOUGH / (HIDDEN * frame.num_rows)), 1), ROUNDS)
    found: dict[str, list[tuple[list[Any], list[Any]]]] = {name: [] for name in missing}
    for k in range(rounds):
        hide = {name: ~gone & (draw.random(len(gone)) < HIDDEN) for name, gone in missing.items()}
        filled = opened.table.impute(_without_cells(frame, hide), seed=seed + k)
        for name, rows in hide.items():
            truth, guess = (one.column(name).filter(rows).to_pylist() for one in (frame, filled))
            found[name].append((truth, guess))
    lines: list[tuple[str, ...]] = [
        ("column", "hidden", "error", "model", "column alone", "better by")
    ]
    for column in opened.schema.used:
        truth, guess = (
            [cell for part in parts for cell in part]
            for parts in zip(*found[column.name], strict=True)
        )
        if not truth:
            continue
        typical = _typical(column, judged.trained_on, len(truth))
        if column.listed:
            ours, theirs = (
                sum(a != b for a, b in zip(truth, other, strict=True)) / len(truth)
                for other in (guess, typical)
            )
            what, shown = "wrong level", [f"{100 * value:.1f} %" for value in (ours, theirs)]
        else:
            numbers = _days(truth)
            ours, theirs = (
                float(np.sqrt(np.mean((numbers - _days(other)) ** 2))) for other in (guess, typical)
            )
            unit = ", days" if column.kind == "date" else ""
            what, shown = f"RMSE{unit}", [_short(value) for value in (ours, theirs)]
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


def _typical(column: Column, frame: Any, count: int) -> list[Any]:
    """The commonest level of a column, or its mean, ``count`` times."""
    import numpy as np

    cells = [cell for cell in frame.column(column.name).to_pylist() if _is(cell)]
    if column.listed:
        return [max(column.levels, key=cells.count)] * count
    return [float(np.mean(_days(cells))) if cells else np.nan] * count


def _without_cells(frame: Any, hide: Mapping[str, np.ndarray]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    for name, gone in hide.items():
        column = frame.column(name)
        position, field = frame.column_names.index(name), frame.schema.field(name)
        frame = frame.set_column(position, field, pc.if_else(pa.array(gone), None, column))
    return frame


def _days(cells: list[Any]) -> np.ndarray:
    import datetime

    import numpy as np

    if cells and isinstance(cells[0], datetime.date):
        return np.array(cells, dtype="datetime64[us]").astype(float) / 86_400_000_000
    return np.array(cells, dtype=float)
