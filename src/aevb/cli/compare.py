"""The command ``aevb compare``: compare runs on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aevb.cli.options import RunMissing, Seed, in_its_words, path


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs. A folder of several seeds, or of a sweep, stands for its runs."
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
    from aevb.comparison.entrants import compare_entrants
    from aevb.comparison.runs import expanded, named, on_file

    for folder in runs:
        if not (is_run(str(folder)) or (folder / "sweep.json").is_file()):
            raise ValueError(f"{folder} is not the folder of a run.")
    entrants, what, units = on_file(named(expanded(runs)), data, missing=missing)
    found = compare_entrants(
        entrants, what=what, units=units, method=evidence, samples=samples, elbo=elbo, seed=seed
    )
    print(in_its_words(str(found)))
    if out is not None:
        found.save(out)
        print(f"The table is in {out}.")
