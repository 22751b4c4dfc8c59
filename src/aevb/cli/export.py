"""The command ``aevb export``: write a part of a model as an ONNX or torch file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aevb.cli.data_argument import recipe_of
from aevb.cli.model_argument import is_run, resolve
from aevb.cli.open_table import is_table_run
from aevb.cli.options import ModelName, Set, pairs, path, refuse_input


def export(
    model: ModelName,
    what: Annotated[
        str,
        typer.Option(
            help="encoder (data to the parameters of q), decoder (latents to those of p's "
            "observed variables), prior (those of p's latents) or score (log p, or the bound)."
        ),
    ] = "encoder",
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="An .onnx file, or a .pt2 file of torch.export; by default WHAT.onnx.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Write out this many steps of a recurrence. Without it, the file holds one step."
        ),
    ] = None,
    bound: Annotated[
        str,
        typer.Option(help="Of the score: auto (exact where it is known), exact, elbo or iwae."),
    ] = "auto",
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of the bound. By default 1, or 5 for iwae."),
    ] = None,
    set_: Set = None,
) -> None:
    """Write a part of a model as a file that other programs run, and compare it with the model.

    The number of rows is free. Missing entries are NaN.

    Example: aevb export run --what encoder --out encoder.onnx
    """
    file = Path(f"{what}.onnx") if out is None else out
    formats = {".onnx": "onnx", ".pt2": "torch"}
    if file.suffix not in formats:
        raise ValueError(
            f"--out {file} is neither .onnx nor .pt2. Name one, e.g. --out {what}.onnx."
        )
    format = formats[file.suffix]
    if Path(model).exists():
        refuse_input(file, model)
    note = ""
    if is_table_run(Path(model)):
        from aevb.tables import load_table

        if set_ or steps is not None:
            option = "--set" if set_ else "--steps"
            raise ValueError(f"{option} is not for the run of a table. Leave it out.")
        found = load_table(model).export(format, what=what, out=file, bound=bound, samples=samples)
    else:
        from aevb.export import export_model

        resolved = resolve(model, settings=pairs("--set", set_))
        prepared = _preparation(Path(model)) if is_run(model) else {}
        found = export_model(
            resolved,
            resolved.teaching,
            format,
            what=what,
            out=file,
            steps=steps,
            bound=bound,
            samples=samples,
            metadata={"preparation": prepared} if prepared else None,
        )
        if word := prepared.get("prepare"):
            note = f"  data are prepared as in the run ({word}; see the metadata)"
    print(found, *([note] if note else []), sep="\n")


def _preparation(run: Path) -> dict[str, Any]:
    """How a run prepared its rows, without the names of its files."""
    recipe = recipe_of(run)
    keys = ("prepare", "levels", "mean", "scale", "others", "columns")
    return {key: value for key in keys if (value := getattr(recipe, key, None)) is not None}
