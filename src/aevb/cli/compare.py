"""The command ``aevb compare``: compare runs on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.completion import runs as runs_here
from aevb.cli.missing_marks import only_numbers
from aevb.cli.options import RunMissing, Seed, in_its_words, path

if TYPE_CHECKING:
    from aevb.cli.judged_rows import Judged
    from aevb.comparison import Comparison
    from aevb.comparison.entrants import Entrant
    from aevb.tables.fitted import TableModel


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs. A folder of several seeds, or of a sweep, stands for its runs.",
            autocompletion=runs_here,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="The rows to compare on; by default the held-out rows of the runs. Each run "
            "prepares them like its training rows.",
            rich_help_panel="Data",
        ),
    ] = None,
    missing: RunMissing = None,
    evidence: Annotated[
        str,
        typer.Option(
            help="How to compute log p(x): exact, importance, ais, particles or prior; auto is "
            "exact if possible, otherwise importance."
        ),
    ] = "auto",
    samples: Annotated[
        int | None, typer.Option(help="Samples of the estimate; by default that of the method.")
    ] = None,
    elbo: Annotated[bool, typer.Option("--elbo", help="Print the ELBO, too.")] = False,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Write the table into a .csv file, too.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Compare runs by log p(x) on the same rows, with paired differences to the best.

    All values are in nats per example and, if columns were standardised, in the units of the data,
    so that runs with different preparations compare. On training rows, AIC and BIC are printed if
    log p is exact.

    Example: aevb compare run-1 run-2
    """
    from aevb.cli.model_argument import is_run
    from aevb.training.seed_folders import expanded

    for folder in runs:
        if not (is_run(str(folder)) or (folder / "sweep.json").is_file()):
            raise ValueError(f"{folder} is not the folder of a run.")
    found = compare_runs(
        expanded(runs), data, missing, method=evidence, samples=samples, elbo=elbo, seed=seed
    )
    print(in_its_words(str(found)))
    if out is not None:
        found.save(out)
        print(f"The table is in {out}.")


def compare_runs(
    folders: Mapping[str, Path] | Sequence[Path],
    data: str | None = None,
    missing: Sequence[str] | None = None,
    **settings: Any,
) -> Comparison:
    """Compare runs on the rows of a file, or else on the rows that all held out.

    ``folders`` may have names. ``settings`` are those of
    :func:`aevb.comparison.entrants.compare_entrants`.
    """
    from aevb.comparison.entrants import compare_entrants
    from aevb.comparison.runs import named, on_file, tables_of

    models = named(folders)
    tables = tables_of(models)
    entrants, what, units = (
        _on_tables(tables, data, missing)
        if tables
        else on_file(models, data, missing=only_numbers(missing))
    )
    return compare_entrants(entrants, what=what, units=units, **settings)


def _on_tables(
    tables: Mapping[str, TableModel], data: str | None, missing: Sequence[str] | None
) -> tuple[list[Entrant], str, str]:
    """Return models of tables with the rows of a file, or else with the rows that all held out.

    Each run reads the file with its own markers of missing cells, unless ``missing`` names them.
    """
    from aevb.cli.data_argument import recipe_of
    from aevb.cli.judged_rows import judged_rows
    from aevb.comparison import COLUMNS
    from aevb.comparison.entrants import describe_rows
    from aevb.comparison.runs import on_frames, place

    folders = {n: folder for n, table in tables.items() if (folder := place(table)) is not None}
    recipes = [recipe_of(folder) for folder in folders.values()]
    rows = {r and (r.data, r.validation, r.hold_out, r.split) for r in recipes}
    if data is None and len(rows) > 1:
        raise ValueError(
            "These runs were trained on different rows, or held out different ones. Name rows to "
            "compare on, which none of them was trained on: --data FILE."
        )
    found = {
        name: judged_rows(folder, data, missing, tell=False, few=True)
        for name, folder in folders.items()
    }
    for name, one in found.items():
        if data is None and one.changed and one.which != "validation":
            raise ValueError(
                f"{one.opened.file.path} has changed since {name} was trained, so which rows it "
                f"held out is unknown. Name rows to compare on, which no run was trained on: "
                f"--data FILE."
            )
    first = next(iter(found.values()))
    alike = len({one.which for one in found.values()}) == 1
    which = first.which if alike else ""
    what = describe_rows(first.rows.num_rows, which, str(first.opened.file.path))
    entrants = on_frames(tables, {name: one.rows for name, one in found.items()})
    return [_with_record(one, found[one.name]) for one in entrants], what, COLUMNS


def _with_record(entrant: Entrant, judged: Judged) -> Entrant:
    """Say whether a model was trained on its rows, or on most of them.

    The record of the run itself does not always say it: a model that took no steps has none, and
    networks are trained on copies of the rows, too. Of a large table, the rows are random ones.
    """
    from aevb.cli.judged_rows import MOSTLY, TRAINED

    which, whole = judged.which, judged.opened.file.large is None
    if which and (entrant.trained_on is None or (which == TRAINED and whole)):
        entrant = replace(entrant, trained_on=which == TRAINED)
    return replace(entrant, trained_on_most=which == MOSTLY)
