"""The command ``aevb cluster``: clusters of the rows of a table, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.choose_by_bic import choose_by_bic
from aevb.cli.classify_arrays import classify_arrays
from aevb.cli.model_argument import is_run
from aevb.cli.open_table import (
    File,
    FileOption,
    Opened,
    Out,
    columns_of,
    is_table_run,
    open_table,
    refuse_without_table,
)
from aevb.cli.options import Quiet, RunFolder, RunMissing, Seed, UnknownLevels, silent
from aevb.cli.table_files import is_known, read_table_file, text
from aevb.cli.table_text import paragraph, terminal_width
from aevb.cli.use import one_file

if TYPE_CHECKING:
    import numpy as np

    from aevb.tables.columns import Column
    from aevb.tables.fitted import TableModel

CLUSTERS = "clusters"  # the folder of the mixture, in that of the run
UNRELATED = 0.05  # adjusted Rand index up to which a column and the clusters are unrelated
FEW = 20  # most levels of a column that clusters are compared with


def cluster(
    run: RunFolder,
    file: File = None,
    out: Out = None,
    data: FileOption = None,
    missing: RunMissing = None,
    unknown_levels: UnknownLevels = None,
    clusters: Annotated[
        int | None,
        typer.Option(
            help="Number of clusters of a run whose model has none; default: BIC chooses."
        ),
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Assign each row to a cluster or class, with the probability of every one.

    The command describes the clusters, and compares them with categories that were left out of the
    model. The default model of a table has no clusters: then a mixture is fitted to the run's
    table, with as many clusters as BIC chooses or --clusters says, and kept in the run's folder.

    For a run of arrays with a discrete latent, such as that of m2 or gmvae, the command writes the
    most probable class of each row of a file. Known labels in the file are not read.

    Examples: aevb cluster run --out clusters.csv

    aevb cluster m2-run new.npz --out classes.csv
    """
    file = one_file(file, data)
    if not is_table_run(run) and is_run(str(run)):
        refuse_without_table({"--unknown-levels": unknown_levels, "--clusters": clusters})
        classify_arrays(run, file, out, missing, seed)
        return
    if clusters is not None and clusters < 1:
        raise ValueError(f"--clusters must be at least 1, got {clusters}.")
    opened = open_table(run, file, missing, out, unknown_levels=unknown_levels)
    with silent(quiet):
        opened = _with_clusters(opened, clusters, seed)
    columns = columns_of(opened.table.clusters(opened.known, seed=seed))
    labels, sure = columns["cluster"], _most_probable(columns)
    doubtful = int((sure < 0.8).sum())
    print(
        paragraph(
            f"{opened.rows()} in {len(columns) - 1} cluster{'s' * (len(columns) > 2)}; the mean "
            f"probability of a row's own cluster is {sure.mean():.3f}, and "
            f"{doubtful} row{'s have' if doubtful != 1 else ' has'} less than 0.8."
        )
        + "\n"
    )
    print(_described(opened, labels, len(columns) - 1))
    for name in _comparable(opened):
        print("\n" + _against(opened, labels, len(columns) - 1, name))
    print()
    if out is None:
        asked = "" if clusters is None else f" --clusters {clusters}"
        print(opened.offer("cluster", "clusters.csv") + asked)
    else:
        told = opened.written(
            out,
            columns,
            _probabilities(len(columns) - 1),
            lambda part: columns_of(opened.table.clusters(part, seed=seed)),
        )
        print(told)


def _probabilities(count: int) -> str:
    return "cluster and its probability" if count == 1 else f"cluster and {count} probabilities"


def _with_clusters(opened: Opened, count: int | None, seed: int) -> Opened:
    """Return the run itself if its model has clusters, and else that of a mixture for it.

    ``count`` is the number of clusters of the mixture; None if BIC chooses it.
    """
    from aevb.tables.declarations import PART

    graph = opened.table.model.graph
    if PART in graph.latents:
        return replace(opened, table=_mixture(opened, count, seed))
    if not any(graph.rule("p", name).spec.categorical for name in graph.latents):
        raise ValueError(
            f"The model of {opened.run} has no clusters. For the codes of its rows: aevb encode "
            f"{opened.run}. For clusters train with --model mixture or --model gmvae."
        )
    if count is not None:
        raise ValueError(
            f"The model of {opened.run} has clusters already, so leave --clusters out. For another "
            f"number of them train again: aevb train TABLE --model mixture --set "
            f"components={count} --out FOLDER."
        )
    return opened


def _mixture(opened: Opened, count: int | None, seed: int) -> TableModel:
    """Read the mixture in the run's folder, or choose one by BIC and fit it to the run's table.

    BIC chooses the covariance, and the number of clusters if ``count`` is None.
    """
    name = CLUSTERS if count is None else f"{CLUSTERS}-{count}"
    place = opened.run / name
    kept = place.is_dir() and any(place.iterdir())
    fitted_here = not kept and _fit_mixture(opened, count, seed, place)
    found = _read_mixture(place).with_unknown_levels(opened.schema.unknown_levels)
    which = "The mixture is in" if fitted_here else "The clusters are those of the mixture in"
    print(f"{which} {place}.\n")
    return found


def _fit_mixture(opened: Opened, count: int | None, seed: int, place: Path) -> bool:
    """Fit the mixture and write its folder at once.

    Return False if another command has written it in the meantime.
    """
    from aevb.runtime.checked_files import whole_folder
    from aevb.tables.doubtful import warn_of_doubtful
    from aevb.tables.selection import STARTS

    schema, train = opened.schema, _training_rows(opened)
    fixed = {"components": count, "covariance": None}
    warn_of_doubtful(schema.used, list(schema.cells(train).values()))
    model, _ = choose_by_bic(schema, train, "mixture", fixed, seed)
    try:
        with whole_folder(place) as folder:
            schema.fit(
                model,
                train,
                starts=STARTS,
                out=folder,
                recipe=opened.recipe,
                progress=False,
                seed=seed,
            )
    except FileExistsError:
        return False
    return True


def _read_mixture(place: Path) -> TableModel:
    from aevb.tables.fitted import load_table

    try:
        return load_table(place)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"The mixture in {place} cannot be read: {error} Delete the folder {place}, and repeat "
            f"the command to fit the mixture again."
        ) from None


def _training_rows(opened: Opened) -> Any:
    """The rows that the run was trained on."""
    from aevb.cli.train_table import has_changed, split_rows
    from aevb.data.large_tables import in_memory

    recipe, schema = opened.recipe, opened.schema
    if recipe is None or not Path(recipe.data).exists() or has_changed(schema, recipe):
        what = "has changed" if recipe and Path(recipe.data).exists() else "is not here"
        raise ValueError(
            f"The model of {opened.run} has no clusters yet, and the table that it was trained on "
            f"{what}. Train a mixture: aevb train TABLE --model mixture --out FOLDER."
        )
    own = read_table_file(recipe.data, recipe.missing or ())
    return in_memory(split_rows(own.known(schema), recipe)[0])


def _most_probable(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    import numpy as np

    return np.column_stack([columns[f"p{k}"] for k in range(len(columns) - 1)]).max(1)


def _described(opened: Opened, labels: np.ndarray, count: int) -> str:
    """A table of the clusters: size, and the mean or the most frequent level of each column."""
    lines = [("column", *(f"cluster {k}" for k in range(count)))]
    sizes = [int((labels == k).sum()) for k in range(count)]
    lines.append(("rows", *map(str, sizes)))
    cells = opened.schema.cells(opened.known)
    for column in opened.schema.used:
        values = cells[column.name]
        lines.append((column.name, *(_summary(column, values[labels == k]) for k in range(count))))
    return _blocks(lines)


def _blocks(lines: list[tuple[str, ...]]) -> str:
    """A wide table in blocks that fit the terminal, each with the first column."""
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


def _summary(column: Column, values: np.ndarray) -> str:
    import numpy as np

    here = values[~np.isnan(values)]
    if not len(here):
        return "—"
    if column.listed:
        times = np.bincount(here.astype(int))
        level = column.levels[int(times.argmax())]
        return f"{text(level)} {round(100 * int(times.max()) / len(here))} %"
    if column.kind == "date":
        return str(np.floor(here).mean().astype("M8[D]"))
    return f"{float(here.mean()):.4g}"


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
    known = [i for i, cell in enumerate(cells) if is_known(cell)]
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
