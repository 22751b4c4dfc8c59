"""Rows to judge the model of a table by, and whether its table has changed since training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.data_argument import HELD_OUT_UNKNOWN
from aevb.cli.open_table import Opened, open_table
from aevb.cli.table_files import read_table_file
from aevb.cli.table_text import paragraph

if TYPE_CHECKING:
    from aevb.data.datasets import Loaded, Recipe
    from aevb.tables.schema import Schema

TRAINED, MOSTLY = "the training rows", "most of them training rows"  # values of Judged.which


@dataclass(frozen=True)
class Judged:
    """Rows to judge a model by: which they are, and the rows that it was trained on.

    ``changed`` is a note that the run's own file is not the one of the training; ``trained_on`` are
    then the rows themselves.
    """

    opened: Opened
    rows: Any
    which: str
    trained_on: Any
    changed: str = ""


def judged_rows(
    run: Path,
    file: str | None,
    missing: Sequence[str] | None,
    *,
    unknown_levels: str | None = None,
    tell: bool = True,
    few: bool = False,
) -> Judged:
    """Open a table, and return its rows to judge the model by.

    They are the rows of the file, or else the run's validation or held-out rows, or all its rows;
    those of a large file are random ones (with ``few``, few of them). If the run's own file has
    changed since training, which rows were held out is unknown: they are all its rows, and a note
    says so.
    """
    from aevb.cli.train_table import split_rows
    from aevb.data.large_tables import in_memory

    opened = open_table(run, file, missing, unknown_levels=unknown_levels, tell=tell, few=few)
    recipe, known = opened.recipe, opened.known
    if recipe is None:
        return Judged(opened, known, "", known)
    if file is not None and _is_own_table(opened, recipe):
        trained_on, held_out = split_rows(opened.file.known(opened.schema), recipe)
        which = TRAINED if held_out is None else MOSTLY
        return Judged(opened, known, which, in_memory(trained_on))
    note = _changed(opened.schema, recipe)
    if file is not None or recipe.validation:
        which = "" if file is not None else "validation"
        if file is None:
            opened = open_table(
                run, recipe.validation, missing, unknown_levels=unknown_levels, tell=tell, few=few
            )
        if note:
            return Judged(opened, opened.known, which, opened.known, f"{note}.")
        own = read_table_file(recipe.data, recipe.missing or ())
        trained_on, _ = split_rows(own.known(opened.schema), recipe)
        return Judged(opened, opened.known, which, in_memory(trained_on))
    if note:
        unknown = (
            HELD_OUT_UNKNOWN
            if recipe.hold_out
            else "whether the model was trained on these rows is unknown. Name new rows: --data "
            "FILE."
        )
        return Judged(opened, known, "", known, f"{note}, so {unknown}")
    trained_on, held_out = split_rows(opened.file.known(opened.schema), recipe)
    if held_out is not None:
        return Judged(opened, held_out, "held out", in_memory(trained_on))
    return Judged(opened, known, TRAINED, in_memory(trained_on))


def _is_own_table(opened: Opened, recipe: Recipe) -> bool:
    """Whether a file has the cells of the table that the run was trained on, row by row."""
    from aevb.cli.train_table import digest_of

    frame = opened.known if opened.file.large is None else opened.file.large
    return recipe.digest is not None and digest_of(opened.schema, frame) == recipe.digest


def _changed(schema: Schema, recipe: Recipe) -> str:
    """Say that the table of a run is not the one of its training; "" if it is."""
    from aevb.cli.train_table import has_changed

    if not Path(recipe.data).exists():
        return f"{recipe.data}, the table of the training, is not here"
    return f"{recipe.data} has changed since training" if has_changed(schema, recipe) else ""


def loaded_rows(run: Path, file: str | None, missing: Sequence[str] | None) -> Loaded:
    """The rows of a table as the data of its model, for commands that examine a model."""
    from aevb.data.datasets import Loaded, Recipe, Split

    found = judged_rows(run, file, missing)
    opened = found.opened
    data = opened.schema.encode(found.rows)
    rows = Split(dict(data), raw=dict(data))
    recipe = opened.recipe or Recipe(str(opened.file.path))
    told = (paragraph(found.changed, "  "),) if found.changed else ()
    holds = [paragraph(text, "  ") for text in opened.schema.variables_text()]
    held_out = rows if found.which in ("held out", "validation") else None
    return Loaded(rows, held_out, recipe, notes=(*holds, *told))
