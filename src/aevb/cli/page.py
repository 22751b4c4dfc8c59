"""The command ``aevb page``: write one file that shows runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aevb.cli.completion import runs as runs_here
from aevb.cli.options import Quiet, path, refuse_input


def page(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs (`aevb train … --out FOLDER`).", autocompletion=runs_here
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(parser=path, help="The .html file; by default page.html in the first folder."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Other rows than those of the run: a file, prepared like the training data.",
            rich_help_panel="Data",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Largest number of rows on the map.", rich_help_panel="Data")
    ] = 1_000_000,
    quiet: Quiet = False,
) -> None:
    """Write one HTML file to look at runs: it opens offline, and can be mailed.

    It shows the findings of `aevb doctor`, the learning curves, the latent map with decoding by
    hand, clusters, the evidence, calibration, a predictive check, and the model with its derived
    estimator. With several runs it compares them.

    Example: aevb page run --out page.html
    """
    from aevb.cli.page_subjects import comparison_of, open_for_page
    from aevb.page.html import document, write_page
    from aevb.page.sections import run_section
    from aevb.training.seed_folders import distinct, expanded

    folders = list(dict.fromkeys(expanded(runs)))
    if not folders:
        raise ValueError(f"{runs[0]} holds no runs yet.")
    if out is None:
        out = runs[0] / "page.html"
    elif not out.parent.is_dir():
        raise ValueError(f"There is no folder {out.parent} for --out {out}. Make it first.")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {out} is no HTML file. Name one, e.g. --out page.html.")
    if data is not None:
        refuse_input(out, data)
    names = distinct(folders) if len(folders) > 1 else {}

    shows = sys.stderr.isatty() and not quiet

    def tell(text: str) -> None:
        if shows:
            print(f"\r\x1b[2K{text} …", end="", file=sys.stderr, flush=True)

    opened, parts = [], []
    for folder in folders:
        one = open_for_page(folder, data, name=names.get(folder, folder.resolve().name))
        opened.append(one)
        prefix = f"{one.name}: " if len(folders) > 1 else ""
        parts.append(
            run_section(one, lambda text, prefix=prefix: tell(prefix + text), rows=rows)  # type: ignore[misc]
        )
    comparison = comparison_of(opened, data) if len(opened) > 1 else None
    write_page(document(parts, comparison), out)
    if shows:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    for part in parts:
        for problem in part["problems"]:
            print(f"{part['name']}: {problem}" if len(parts) > 1 else problem)
    size = out.stat().st_size
    shown = f"{size / 2**20:.1f} MB" if size >= 2**20 else f"{size / 2**10:.0f} KB"
    print(f"The page is in {out} ({shown}). Open it in a browser; it needs no network.")
