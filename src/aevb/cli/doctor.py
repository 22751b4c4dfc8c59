"""The commands ``aevb doctor`` and ``aevb check``: examine a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from aevb.cli.data_argument import load_rows, which_rows, without_latents
from aevb.cli.model_argument import is_density, is_saved, open_run
from aevb.cli.options import RunData, RunFolder, RunMissing, RunPrepare, Seed, path
from aevb.cli.units import statistics_note, units_note

AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


def doctor(
    run: RunFolder,
    data: RunData = None,
    prepare: RunPrepare = None,
    missing: RunMissing = None,
    rows: Annotated[int, typer.Option(help="Largest number of rows to examine.")] = 1000,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Check the calibration of q on data simulated from p (simulation-based "
            "calibration).",
        ),
    ] = True,
    train: Annotated[
        bool,
        typer.Option(
            "--train/--no-train",
            help="Train a copy for up to 5 seconds, to see if further training would help.",
        ),
    ] = True,
    as_json: AsJson = False,
    seed: Seed = 0,
) -> None:
    """Diagnose a trained model: what is wrong, why, and what to do.

    It looks for dead latents and classes, poor calibration, too little training, over-fitting and
    diverging scales. It uses the test rows if there are any (of a built-in data set, --validation
    or --hold-out), otherwise the training rows.

    Example: aevb doctor run
    """
    from aevb.diagnostics import diagnose

    model = open_run(run)
    loaded = load_rows(run, model, data, prepare, seed, missing=missing)
    chosen = loaded.test or loaded.train
    found = diagnose(
        model,
        chosen.data,
        run=None if is_density(run) or is_saved(run) else run,
        labels=chosen.labels,
        rows=rows,
        calibrate=calibrate,
        train=train,
        seed=seed,
    )
    for line in units_note(model, loaded):
        print(line, file=sys.stderr if as_json else sys.stdout)
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else found)


def check(
    run: RunFolder,
    data: RunData = None,
    prepare: RunPrepare = None,
    missing: RunMissing = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path, help="A .png file for the plot; by default check.png in the run's folder."
        ),
    ] = None,
    statistic: Annotated[
        list[str] | None,
        typer.Option(
            help="mean, sd, zeros, min, max, q05, q50, q95, correlation, autocorrelation; by "
            "default those that suit the data."
        ),
    ] = None,
    columns: Annotated[
        bool, typer.Option("--columns", help="Compute the statistics of each column too.")
    ] = False,
    prior: Annotated[
        bool,
        typer.Option(
            "--prior",
            help="Draw the latents from p, not from the posterior: a prior predictive check.",
        ),
    ] = False,
    replicates: Annotated[int, typer.Option(help="Number of simulated data sets.")] = 300,
    rows: Annotated[int, typer.Option(help="Largest number of rows to use.")] = 2000,
    as_json: AsJson = False,
    seed: Seed = 0,
) -> None:
    """Posterior predictive check: compare the data with data simulated from the model.

    The command compares statistics, as a table and a plot.

    Example: aevb check run --statistic sd --statistic max --columns
    """
    from aevb.predictive import predictive_check

    model = open_run(run)
    loaded = load_rows(run, model, data, prepare, seed, missing=missing)
    chosen = (loaded.test or loaded.train).data
    found = predictive_check(
        model,
        without_latents(model, chosen),
        statistic or None,
        columns=columns,
        kind="prior" if prior else "posterior",
        replicates=replicates,
        rows=rows,
        seed=seed,
    )
    out = out or run / "check.png"
    found.plot(out)
    for line in statistics_note(model, loaded):
        print(line, file=sys.stderr if as_json else sys.stdout)
    print(
        json.dumps(found.to_dict(), indent=2, ensure_ascii=False)
        if as_json
        else f"{found}\nThe plot{which_rows(loaded)} is in {out}."
    )
