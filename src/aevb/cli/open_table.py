"""Open the run of a table and the table that a command works on."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.completion import files
from aevb.cli.data_argument import recipe_of
from aevb.cli.missing_marks import marks_of
from aevb.cli.model_argument import open_run
from aevb.cli.options import path, refuse_input
from aevb.cli.table_files import (
    TEXT,
    TableFile,
    own_names,
    read_table_file,
    refuse_ending,
    rounded,
    write_beside,
    write_parts,
)
from aevb.cli.table_text import paragraph, rows_text

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.datasets import Recipe
    from aevb.tables.fitted import TableModel
    from aevb.tables.schema import Schema

LISTED = 5  # rows of a preview

File = Annotated[
    str | None,
    typer.Argument(
        help="A table with the columns of the run's; by default the run's own file.",
        autocompletion=files,
    ),
]
FileOption = Annotated[
    str | None,
    typer.Option("--data", help="The same file, as an option.", autocompletion=files),
]
Out = Annotated[
    Path | None,
    typer.Option(parser=path, help="A .csv, .tsv or .parquet file. Without it, a part is printed."),
]


def is_table_run(run: Path) -> bool:
    """Whether a folder is the run of a table."""
    return (run / "schema.json").is_file()


@dataclass(frozen=True)
class Opened:
    """The run of a table, and the table that a command works on."""

    run: Path
    table: TableModel
    recipe: Recipe | None
    file: TableFile
    known: Any  # the columns of the file's frame that the schema knows

    @property
    def schema(self) -> Schema:
        return self.table.schema

    def rows(self) -> str:
        """The rows that a command describes: all, or random ones of a large table."""
        if self.file.large is not None:
            return f"{self.known.num_rows:,} random rows of the {self.all_rows()}"
        return self.all_rows()

    def all_rows(self) -> str:
        return f"{self.file.rows:,} row{'s' * (self.file.rows != 1)} of {self.file.path}"

    def known_in(self, part: Any) -> Any:
        """The columns of a part of the file that the schema knows."""
        return part.select([name for name in part.column_names if name in self.schema])

    def beside(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Results under names that the table does not have."""
        names = own_names(list(results), self.file.names)
        return {names[name]: values for name, values in results.items()}

    def some(self, results: Mapping[str, Any], rows: np.ndarray) -> str:
        """Some rows in text: the row number, the results, then the columns of the table."""
        shown: dict[str, Any] = {"row": self.file.numbers[rows].tolist()}
        shown |= {name: values[rows].tolist() for name, values in results.items()}
        first = len(shown)
        shown |= {name: self.file.cells(name, rows) for name in self.file.names}
        header = ", without the header line of the file" * (self.file.path.suffix in TEXT)
        return f"{rows_text(shown, first=first)}\n\nrow: counted from 0{header}."

    def written(
        self,
        out: Path,
        columns: Mapping[str, Any],
        what: str,
        compute: Callable[[Any], Mapping[str, Any]],
    ) -> str:
        """Write the results of all rows beside the table, and say so.

        ``columns`` are the results of the known columns, and ``compute`` makes those of a part of a
        large table.
        """
        if self.file.large is None:
            write_beside(out, self.file, self.beside(columns))
        else:
            write_parts(
                out,
                self.file.large,
                lambda part: (self.beside(compute(self.known_in(part))), {}),
            )
        return paragraph(f"{self.all_rows()}, with {what}, are in {out}.")

    def offer(self, command: str, out: str) -> str:
        own = "" if self.recipe and str(self.file.path) == self.recipe.data else self.file.path
        words = ["aevb", command, str(self.run), *([str(own)] if own else []), "--out", out]
        return f"Write all rows: {shlex.join(words)}"


def refuse_options(given: Mapping[str, Any]) -> None:
    """Refuse options that the run of a table has no use for."""
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option} is not for the run of a table. Leave it out.")


def refuse_without_table(given: Mapping[str, Any]) -> None:
    """Refuse options that only the run of a table has a use for."""
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option} is for runs of tables (`aevb train table.csv`).")


def open_table(
    run: Path,
    file: str | None = None,
    missing: Sequence[str] | None = None,
    out: Path | None = None,
    *,
    unknown_levels: str | None = None,
    tell: bool = True,
    few: bool = False,
) -> Opened:
    """Open the run of a table and a file for it, by default the run's own.

    ``missing`` are the marks of missing cells, by default those of the training, and
    ``unknown_levels`` is "error" or "missing", by default that of the schema. With ``tell=False``,
    columns that the model does not read are not listed. A large table is described by random rows:
    by few of them if its log p is estimated by sampling, or with ``few``.
    """
    from aevb.evidence.exact import why_not_exact
    from aevb.tables.fitted import load_table

    if not is_table_run(run):
        open_run(run)  # raises if the folder holds no run
        raise ValueError(
            f"{run} is not the run of a table: `aevb train table.csv` makes one. For this run use "
            f"aevb evaluate, encode, impute or sample."
        )
    if out is not None:
        refuse_ending(out)
    table, recipe = load_table(run), recipe_of(run)
    if unknown_levels is not None:
        table = table.with_unknown_levels(unknown_levels)
    name = file or (recipe.data if recipe else None)
    if name is None:
        raise ValueError(
            f"{run} does not record its table. Name a file after it: aevb score {run} FILE."
        )
    if file is None and not Path(name).exists():
        raise ValueError(
            f"{run} was trained on {name}, which is not here. Change to the folder that holds "
            f"this file, or name the file after the run."
        )
    if out is not None:
        refuse_input(out, name)
    marks = (recipe.missing if recipe else None) if missing is None else marks_of(missing)
    found = read_table_file(name, marks or ())
    if found.large is not None and (few or why_not_exact(table.model) is not None):
        found = replace(found, table=found.large.few())
    _check_columns(table.schema, found, tell=tell)
    return Opened(run, table, recipe, found, found.known_to(table.schema))


def _check_columns(schema: Schema, file: TableFile, *, tell: bool) -> None:
    absent = [column.name for column in schema.used if column.name not in file.names]
    if absent:
        shown = ", ".join(map(repr, absent[:5])) + (", …" if len(absent) > 5 else "")
        raise ValueError(
            f"{file.path} lacks the column{'s' * (len(absent) > 1)} {shown} of the run's table. "
            f"Add {'it' if len(absent) == 1 else 'them'} (empty cells are missing values), or "
            f"train a model without: aevb train … --without {','.join(absent[:5])}."
        )
    extra = [name for name in file.names if name not in schema]
    if extra and tell:
        shown = ", ".join(extra[:5]) + (", …" if len(extra) > 5 else "")
        print(
            paragraph(
                f"Not in the run's table, so not read by the model: {shown}. "
                f"{'It is' if len(extra) == 1 else 'They are'} copied to the output."
            )
        )


def columns_of(frame: Any) -> dict[str, np.ndarray]:
    return {name: rounded(frame[name].to_numpy()) for name in frame.column_names}
