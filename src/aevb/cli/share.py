"""The commands ``aevb push`` and ``aevb pull``: share runs by a model hub."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aevb.cli.card import About, License, clear, tell
from aevb.cli.model_argument import program
from aevb.cli.options import RunFolder, path

if TYPE_CHECKING:
    from aevb.hub import Item
    from aevb.model_card import ModelCard

Name = Annotated[str, typer.Argument(metavar="USER/NAME", help="The repository on the hub.")]


def push(
    run: RunFolder,
    name: Name,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Send the listed files without asking.")
    ] = False,
    resumable: Annotated[
        bool,
        typer.Option(
            "--resumable", help="Send the state of the optimiser, too, so that --resume works."
        ),
    ] = False,
    about: About = None,
    license: License = None,
) -> None:
    """Send a run to a model hub (Hugging Face), with its model card.

    The command lists the files and asks before it sends them. Rows of the data are never sent. The
    card is README.md in the run's folder, or is made as by `aevb card`. Log in before: hf auth
    login. HF_ENDPOINT names another hub.

    Example: aevb push run me/penguins --license mit
    """
    from aevb import hub
    from aevb.hub.transfer import check_ready

    check_ready(name)  # before the card is made, which may take a minute
    own = run / "README.md"
    if own.is_file() and (about or license):
        raise ValueError(
            f"{own} is the card of the run. Write --about and --license into it, or delete it."
        )
    card = None if own.is_file() else _card(run, name, about, license)

    def confirm(items: Sequence[Item]) -> bool:
        print("\n".join(["These files will be sent:", *(f"  {item}" for item in items)]))
        if yes:
            return True
        if not sys.stdin.isatty():
            raise ValueError("Nothing was sent. Add --yes to send these files.")
        return typer.confirm(f"Send them to {name}?")

    sent = hub.push(run, name, private=private, card=card, resumable=resumable, confirm=confirm)
    print(f"Sent {sent}.")


def _card(run: Path, name: str, about: str | None, license: str | None) -> ModelCard:
    from aevb.cli.page_subjects import open_for_page
    from aevb.model_card import card_of

    opened = open_for_page(run, name=run.resolve().name)
    found = card_of(opened, about=about, license=license, repo=name, progress=tell)
    clear()
    for problem in found.problems:
        print(problem)
    return found


def pull(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, help="A new folder; by default the NAME of USER/NAME."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, a tag or a commit; by default the newest.")
    ] = None,
    most_bytes: Annotated[
        int, typer.Option(help="The most bytes to fetch; a larger run is refused.", min=1)
    ] = 2_000_000_000,
) -> None:
    """Fetch a run from a model hub and check its files against their hashes.

    No code of the repository is fetched or executed.

    Example: aevb pull me/penguins --out penguins
    """
    from aevb import hub

    default = Path(name.rpartition("/")[2] or name)
    place = hub.pull(name, out or default, revision=revision, most_bytes=most_bytes)
    print(f"The run is in {place}, and its files match their hashes.")
    print(f"Next: {program()} sample {shlex.quote(str(place))} -n 5")
