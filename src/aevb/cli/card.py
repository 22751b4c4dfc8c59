"""The command ``aevb card``: write the model card of a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from aevb.cli.model_argument import program
from aevb.cli.options import RunFolder, path, refuse_input

About = Annotated[
    str | None, typer.Option(help="What the model is for, a sentence or more for the card.")
]
License = Annotated[
    str | None, typer.Option(help="The licence of the model, an identifier such as mit.")
]


def card(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, help="The .md file; by default README.md in the run's folder."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Other rows than those of the run: a file, prepared like the training data.",
            rich_help_panel="Data",
        ),
    ] = None,
    about: About = None,
    license: License = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a card that is there.")
    ] = False,
) -> None:
    """Write a model card: what the run is, how good it is, and where its limits are.

    The card is Markdown for a model hub or a repository: the declaration and the derived bound,
    rows and columns (no cells), settings, evidence with its error, gap, findings of `aevb doctor`,
    limits, and how to load the model. Results are of the held-out rows if there are any.

    Example: aevb card run --license mit --about "Wing lengths of birds of one island."
    """
    from aevb.cli.page_subjects import open_for_page
    from aevb.model_card import card_of

    out = out or run / "README.md"
    if out.exists() and not overwrite:
        raise ValueError(
            f"{out} exists, and may have been edited. Replace it by --overwrite, or write to "
            f"another file: --out FILE.md."
        )
    if data is not None:
        refuse_input(out, data)
    given = {"--data": data, "--about": about, "--license": license}
    words = ["aevb", "card", run.resolve().name]
    words += [word for name, value in given.items() if value is not None for word in (name, value)]
    found = card_of(
        open_for_page(run, data, name=run.resolve().name),
        command=shlex.join(words),
        about=about,
        license=license,
        progress=tell,
    )
    clear()
    found.save(out)
    for problem in found.problems:
        print(problem)
    print(f"The card is in {out}. Next: {program()} push {shlex.quote(str(run))} USER/NAME")


def tell(text: str) -> None:
    """Show what is computed, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text} …", end="", file=sys.stderr, flush=True)


def clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
