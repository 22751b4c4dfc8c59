"""Examining a run: ``aevb doctor``, ``aevb check``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from aevb.cli.data_argument import load_rows, which_rows, without_latents
from aevb.cli.model_argument import open_run
from aevb.cli.options import RunData, RunFolder, RunMissing, RunPrepare, Seed, path
from aevb.cli.units import statistics_note, units_note

AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON instead.")]


def doctor(
    run: RunFolder,
    data: RunData = None,
    prepare: RunPrepare = None,
    missing: RunMissing = None,
    rows: Annotated[int, typer.Option(help="Rows to examine at most.")] = 1000,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Rank p's own draws among q's (simulation-based calibration).")
    ] = True,
    as_json: AsJson = False,
    seed: Seed = 0,
) -> None:
    """What is wrong with a trained model, from what cause, and what to do: dead latents and classes, calibration, over-fitting, runaway scales.

    On test rows where the data have some: those of a built-in set, or those held out.

    Example: aevb doctor run
    """
    from aevb.diagnostics import diagnose

    model = open_run(run)
    loaded = load_rows(run, model, data, prepare, seed, missing=missing)
    chosen = loaded.test or loaded.train
    found = diagnose(model, chosen.data, run=run, labels=chosen.labels, rows=rows, calibrate=calibrate, seed=seed)
    for line in units_note(model, loaded):
        print(line, file=sys.stderr if as_json else sys.stdout)
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else found)


def check(
    run: RunFolder,
    data: RunData = None,
    prepare: RunPrepare = None,
    missing: RunMissing = None,
    out: Annotated[Path | None, typer.Option(parser=path, help="A .png of every statistic; by default check.png in the run's folder.")] = None,
    statistic: Annotated[
        list[str] | None,
        typer.Option(help="mean, sd, zeros, min, max, q05, q50, q95, correlation, autocorrelation; by default what suits the data."),
    ] = None,
    columns: Annotated[bool, typer.Option("--columns", help="Also of every column by itself.")] = False,
    prior: Annotated[bool, typer.Option("--prior", help="Draw the latents from p instead of q: prior predictive.")] = False,
    replicates: Annotated[int, typer.Option(help="How often the data are drawn anew.")] = 300,
    rows: Annotated[int, typer.Option(help="Rows to use at most.")] = 2000,
    as_json: AsJson = False,
    seed: Seed = 0,
) -> None:
    """Compare statistics of the data with those of data that the model draws in their place: a predictive check, as a table and a picture.

    Example: aevb check run --statistic sd --statistic max --columns
    """
    from aevb.predictive import predictive_check

    model = open_run(run)
    loaded = load_rows(run, model, data, prepare, seed, missing=missing)
    chosen = (loaded.test or loaded.train).data
    found = predictive_check(
        model, without_latents(model, chosen), statistic or None, columns=columns, kind="prior" if prior else "posterior", replicates=replicates,
        rows=rows, seed=seed,
    )  # fmt: skip
    out = out or run / "check.png"
    found.plot(out)
    for line in statistics_note(model, loaded):
        print(line, file=sys.stderr if as_json else sys.stdout)
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else f"{found}\nThe picture{which_rows(loaded)}: {out}")
