"""The command ``aevb estimators``: measure every valid estimator of a model's bound."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aevb.cli.data_argument import model_and_rows, which_rows
from aevb.cli.options import (
    Device,
    Missing,
    Prepare,
    Quiet,
    RunData,
    Seed,
    Set,
    device_of,
    pairs,
    path,
)
from aevb.cli.units import units_note


def estimators(
    model: Annotated[
        str,
        typer.Argument(
            help="The folder of a run or saved model; a name from `aevb models`; or file.py:name "
            "(Python executes it)."
        ),
    ],
    data: RunData = None,
    set_: Set = None,
    prepare: Prepare = None,
    missing: Missing = None,
    how: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LATENT=CHOICE",
            help="Measure only this choice and the default one. May be repeated.",
            rich_help_panel="Estimator",
        ),
    ] = None,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            help="elbo or iwae; by default both. May be repeated.", rich_help_panel="Estimator"
        ),
    ] = None,
    samples: Annotated[
        list[int] | None,
        typer.Option(
            help="Samples per example; by default 1 and 10. May be repeated.",
            rich_help_panel="Estimator",
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="Temperature of relaxations; by default 0.1, 0.5 and 1.",
            rich_help_panel="Estimator",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows in the batch.")] = 50,
    replicates: Annotated[
        int, typer.Option(help="Repetitions of every estimator, each with independent noise.")
    ] = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="A folder for estimators.json and estimators.png; by default the run's folder.",
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure every valid estimator of a model's bound and recommend one.

    It measures bias, variance of bound and gradients, time and memory. A run is measured with its
    trained weights on its own data. Any other model is measured with its initial weights on --data.

    Examples:

    aevb estimators run

    aevb estimators gmvae --data digits --how y=gumbel --how y=score --samples 1 --samples 10
    """
    import torch
    from rich.console import Console

    from aevb.laboratory import compare_estimators

    torch.manual_seed(seed)
    found, loaded = model_and_rows(model, data, prepare, seed, pairs("--set", set_), missing)
    requests = None if not how else [{}, *(pairs("--how", [one]) for one in how)]
    chosen = loaded.test or loaded.train
    console = Console(stderr=True, quiet=quiet)
    with console.status("") as status:

        def tell(what: str) -> None:
            if console.is_terminal:
                status.update(f"measuring {what}")
            elif not quiet:
                print(f"measuring {what}", file=sys.stderr, flush=True)

        laboratory = compare_estimators(
            found.to(device_of(device)),
            chosen.data,
            rows=rows,
            replicates=replicates,
            samples=samples or (1, 10),
            bounds=bound or ("elbo", "iwae"),
            temperatures=temperature or (0.1, 0.5, 1.0),
            how=requests,
            seed=seed,
            tell=tell,
        )
    print(
        f"Rows of {loaded.recipe.validation or loaded.recipe.data}{which_rows(loaded)}.",
        *units_note(found, loaded),
        "",
        laboratory,
        sep="\n",
    )
    run = Path(model) if (Path(model) / "checkpoints").is_dir() else None
    folder = out or run
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        laboratory.save(folder / "estimators.json")
        laboratory.plot(folder / "estimators.png")
        print(
            f"\nAll figures are in {folder / 'estimators.json'}, the plot in "
            f"{folder / 'estimators.png'}."
        )
