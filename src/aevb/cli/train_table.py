"""``aevb train table.csv``: read the schema of a table, choose a model, train it, and write it."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aevb.cli.choose_by_bic import choose_by_bic
from aevb.cli.missing_marks import Mark, words_of
from aevb.cli.model_argument import is_run
from aevb.cli.options import check_resume, fit_device, in_its_words, record_command, silent
from aevb.cli.series_hint import series_hint
from aevb.cli.serve import page_beside
from aevb.cli.table_files import TableFile, read_table_file
from aevb.cli.table_models import DENSITY, read_arguments
from aevb.cli.table_text import paragraph, schema_text
from aevb.runtime.suggestions import did_you_mean, listed

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.datasets import Recipe
    from aevb.tables import Schema
    from aevb.tables.fitted import TableModel

NOTES = "notes.txt"
HIDE = 0.2  # share of cells hidden in a copy of the rows, so that networks learn to do without them
LARGE = 1_000_000  # cells of a table whose exact training shows its progress on a terminal
ARRAYS = (".npz", ".npy")
OTHERS = {
    ".xlsx": "save the sheet as CSV",
    ".xls": "save the sheet as CSV",
    ".ods": "save the sheet as CSV",
    ".json": "save the table as CSV or Parquet",
    ".feather": "save the table as Parquet",
    ".gz": "unpack it",
    ".zip": "unpack it",
}


@dataclass(frozen=True)
class TableOptions:
    """The options of ``aevb train`` that concern a table."""

    model: str | None = None
    arguments: Mapping[str, str] | None = None
    kinds: Sequence[str] = ()
    without: Sequence[str] = ()
    missing: Sequence[Mark] = ()
    validation: str | None = None
    hold_out: float = 0.0
    split: int = 0


def names_table(text: str) -> bool:
    """Whether the first argument of ``aevb train`` names a table and not a model.

    Raise ValueError for a file of another type.
    """
    from aevb.data.image_folders import is_image_folder
    from aevb.data.parquet import is_parquet
    from aevb.data.tables import TABLES
    from aevb.zoo import zoo

    path = Path(text)
    if text in zoo or ".py:" in text:
        return False
    if path.is_dir():
        known = (path / "model.json").is_file() or is_run(text)
        if not known and not is_parquet(path):
            if is_image_folder(path):
                raise ValueError(
                    f"{text} is a folder of images. Train a model on them: aevb train vae --data "
                    f"{shlex.quote(text)} --set net=conv --out run."
                )
            raise ValueError(
                f"The folder {text} holds no run, no saved model and no Parquet files."
            )
        return not known
    if path.suffix in (*TABLES, *OTHERS) and not path.exists():
        raise ValueError(
            f"There is no file {text} in this folder ({Path.cwd()}). Name a table that exists, or "
            f"a model and its data: aevb train vae --data FILE --out run."
        )
    if path.suffix in TABLES:
        return True
    if path.suffix in ARRAYS:
        raise ValueError(
            f"{text} holds arrays and is no table. Name a model for them: aevb train vae --data "
            f"{shlex.quote(text)} --out run."
        )
    if path.is_file():
        fix = OTHERS.get(path.suffix, "tables are .csv, .tsv, .txt or .parquet files")
        raise ValueError(f"{text} is not a file that can be read as a table: {fix}.")
    return False


def train_table(
    table: str,
    out: Path | None,
    options: TableOptions,
    settings: Mapping[str, Any],
    *,
    device: str,
    trackers: Sequence[str],
    resume: bool,
    serve: bool,
    quiet: bool = False,
) -> None:
    """Train a model of a table and write the run.

    ``serve`` shows it in the browser meanwhile, and ``quiet`` prints the result only.
    """
    from aevb.data.large_tables import in_memory
    from aevb.evidence.exact import why_not_exact
    from aevb.tables.selection import STARTS
    from aevb.training.run_folder import refuse_taken

    path = Path(table)
    out = out or Path(f"{path.stem}-run")
    name, arguments = read_arguments(options.model, options.arguments or {})
    if not 0 <= options.hold_out < 1:
        raise ValueError(f"--hold-out is a fraction of the rows below 1, got {options.hold_out}.")
    if options.hold_out and options.validation:
        raise ValueError("Use --hold-out or --validation, not both.")
    if name == DENSITY:
        _refuse_settings(settings, device, resume=resume, trackers=trackers)
    target = "cpu" if name == DENSITY else fit_device(device)
    if resume:
        check_resume(out, [out])
    refuse_taken(out, resume and out.exists())
    if name == DENSITY and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is no empty folder. Delete it, or choose another: --out FOLDER.")
    file, schema, recipe = read_named_table(table, options)
    train, check = rows_of(file, schema, recipe)
    notes = [
        f"{table}: {file.rows:,} rows, {len(file.names)} columns, {len(schema.used)} modelled",
        "",
        schema_text(schema),
        "",
    ]
    if file.large is not None:
        notes += [
            paragraph(
                "The table is large, so it is read by parts. All its rows describe the columns, "
                "and random rows the model."
            ),
            "",
        ]
    if check is not None:
        notes += [
            f"{train.num_rows:,} rows to train on, {check.num_rows:,} "
            f"{'held out' if options.hold_out else 'of ' + str(options.validation)}.",
            "",
        ]
    if file.large is None and (hint := series_hint(table, file.frame)) is not None:
        notes += [paragraph(hint[0]), f"  {hint[1]}", ""]
    tell = _nothing if quiet else print
    tell("\n".join(notes))
    if name == DENSITY:
        with page_beside([out], wanted=serve):
            _train_density(schema, train, check, out, recipe, settings, notes, quiet=quiet)
        return
    with silent(quiet):
        model, told = _model(schema, train, name, arguments, out, settings, resume=resume)
    notes += told
    networks = why_not_exact(model) is not None
    shown = in_memory(train).num_rows * len(schema.used) > LARGE
    if file.large is not None:
        train = train.few() if networks else train
        rows = "all rows" if networks else f"{train.sample.num_rows:,} random rows"
        notes.append(f"It is fitted to {rows}.")
        tell(notes[-1])
    with page_beside([out], wanted=serve):
        try:
            fitted = schema.fit(
                model,
                train,
                validation=check,
                out=out,
                resume=resume,
                device=target,
                starts=STARTS if name == "mixture" and None in arguments.values() else None,
                hide=HIDE if networks else 0.0,
                progress=None if (networks or shown) and not quiet else False,
                trackers=trackers,
                recipe=recipe,
                **settings,
            )
        except KeyboardInterrupt as stop:  # typer would drop the message
            print(f"aevb: {in_its_words(stop) or 'interrupted'}", file=sys.stderr)
            raise typer.Exit(130) from None
        run = fitted.run
        assert run is not None
        run.plot(out / "curves.png")
        result = _result(fitted, train, check, f"{run.seconds:.1f} s ({run.step} steps)")
        _write_notes(out, fitted, [*notes, *result])
        _print_result(result, fitted, out, quiet=quiet)


def _nothing(text: str) -> None:
    """Print nothing, instead of a text."""


def _print_result(result: Sequence[str], fitted: TableModel, out: Path, *, quiet: bool) -> None:
    """Print how well the model fits, where it is, and what to do next."""
    run = fitted.run
    early = run.ended if run is not None and run.ended.startswith("stopped early") else ""
    lines = [*result, *([f"The run has {early}."] if early else [])]
    if quiet:
        print("\n".join([*lines, f"The run is in {out}."]))
    else:
        print("\n".join(["", *lines, "", *_next(fitted, out)]))


def _train_density(
    schema: Schema,
    train: Any,
    check: Any,
    out: Path,
    recipe: Recipe,
    settings: Mapping[str, Any],
    notes: list[str],
    *,
    quiet: bool,
) -> None:
    """Fit the default density of a table, and write it with its schema and recipe."""
    from aevb.data.large_tables import in_memory
    from aevb.runtime.checked_files import replace, whole_folder
    from aevb.tables.choosing import most_rows

    begun = time.perf_counter()
    fitted = schema.fit_default(train, seed=int(settings.get("seed", 0)))
    seconds = time.perf_counter() - begun
    rows = most_rows(schema.encode(in_memory(train)))
    some = f", fitted to {rows:,} random rows" if train.num_rows > rows else ""
    told = [paragraph(f"Model: density of {_parts(fitted)}{some}.")]
    if not quiet:
        print("\n".join(told))
    result = _result(fitted, train, check, f"{seconds:.1f} s")
    with whole_folder(out) as place:
        fitted.save(place)
        replace(place / "data.json", recipe.text())
        _write_notes(place, fitted, [*notes, *told, *result])
    _print_result(result, fitted, out, quiet=quiet)


def _parts(fitted: TableModel) -> str:
    """The parts of a joined mixture in words."""
    graph = fitted.model.graph
    (latent,) = graph.latents
    several = "x" in graph.observed and graph.size("x") > 1
    full = several and graph.rule("p", "x").spec.full_moments
    parts = graph.size(latent)
    if parts == 1:
        return f"one part{' with a full covariance' * full}"
    return f"{parts} parts{' with full covariances' * full}, several mixtures joined into one"


def _refuse_settings(
    settings: Mapping[str, Any], device: str, *, resume: bool, trackers: Sequence[str]
) -> None:
    """Refuse options of training that the default density has no use for."""
    given = [f"--{name.replace('_', '-')}" for name in settings if name != "seed"]
    given += ["--resume"] * resume
    given += ["--tensorboard" if name == "tensorboard" else f"--track {name}" for name in trackers]
    given += [f"--device {device}"] * (device not in ("auto", "cpu"))
    if given:
        raise ValueError(
            f"{given[0]} has no meaning for the default density of a table, which takes no "
            f"training steps. Leave it out, or choose a model: --model mixture, factors, vae or "
            f"gmvae."
        )


def _write_notes(folder: Path, fitted: TableModel, lines: Sequence[str]) -> None:
    """Write what was printed of the training, and the columns."""
    text = "\n".join([*lines, "", str(fitted.schema)]) + "\n"
    (folder / NOTES).write_text(text, encoding="utf-8")
    record_command(folder)


def read_named_table(table: str, options: TableOptions) -> tuple[TableFile, Schema, Recipe]:
    """Read a table and its schema, and record how."""
    from aevb.data.datasets import Recipe

    file = read_table_file(table, options.missing)
    schema = read_schema(file, options)
    recipe = Recipe(
        table,
        validation=options.validation,
        hold_out=options.hold_out,
        split=options.split,
        missing=list(options.missing) or None,
        digest=digest_of(schema, file.table),
    )
    return file, schema, recipe


def read_schema(file: TableFile, options: TableOptions) -> Schema:
    """Read the schema of a table, with the kinds and the columns left out of the options."""
    from aevb.tables import Schema
    from aevb.tables.reading import MISSING_WORDS

    kinds = _kinds(options.kinds, file.names)
    without = _listed_names(options.without, file.names)
    for name in without:
        if name in kinds:
            raise ValueError(f"Column {name!r} is named by --kind and by --without.")
    words = (*MISSING_WORDS, *words_of(options.missing))
    return Schema.read(file.table, kinds=kinds, drop=without, missing=words)


def _kinds(items: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    found = {}
    for item in items:
        name, equals, kind = item.rpartition("=")
        if not equals:
            raise ValueError(f"--kind takes COLUMN=KIND, e.g. --kind year=category; got {item!r}.")
        _check_column("--kind", name, names)
        found[name] = kind
    return found


def _listed_names(items: Sequence[str], names: Sequence[str]) -> list[str]:
    """Columns between commas. A name that holds a comma is found if it is an item of its own."""
    found: list[str] = []
    for item in items:
        parts = [item] if item in names else [part.strip() for part in item.split(",")]
        for name in filter(None, parts):
            _check_column("--without", name, names)
            found += [name] if name not in found else []
    return found


def _check_column(option: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        near = did_you_mean(name, names)
        raise ValueError(
            f"{option} names the column {name!r}, which the table does not have."
            + (near or f" Its columns are {listed(names)}.")
        )


# Rows ---------------------------------------------------------------------------------------------


def split_rows(file: TableFile, recipe: Recipe) -> tuple[Any, Any]:
    """The rows to train on, and those held out (None without --hold-out), in their order.

    They depend on the number of rows and on ``recipe.split`` only, so they are those of the
    training only if the file has not changed: see :func:`has_changed`. The rows held out are in
    memory, so that few are held out of a large table.
    """
    if not recipe.hold_out:
        return file.table, None
    if file.large is not None:
        return file.large.split(recipe.hold_out, recipe.split)
    trained_on, held_out = split_numbers(file, recipe)
    return file.frame.take(trained_on), file.frame.take(held_out)


def split_numbers(file: TableFile, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the rows to train on, and of those held out, of a table in memory."""
    import numpy as np

    n = file.rows
    held = max(1, round(n * recipe.hold_out))
    if n - held < 2:
        raise ValueError(f"{file.path} has {n} rows: holding out {held} leaves too few.")
    order: np.ndarray = np.random.default_rng(recipe.split).permutation(n)
    return np.sort(order[held:]), np.sort(order[:held])


def digest_of(schema: Schema, frame: Any) -> str:
    """A hash of the modelled cells of a table, row by row; of a large table, that of its files."""
    import hashlib

    import numpy as np

    from aevb.data.large_tables import LargeTable

    if isinstance(frame, LargeTable):
        return frame.groups.digest()
    cells = schema.cells(frame)
    digest = hashlib.sha256()
    for name in sorted(cells):
        values = cells[name]
        digest.update(f"{name} {len(values)}".encode())
        digest.update(np.where(np.isnan(values), np.nan, values).tobytes())  # one NaN for all
    return digest.hexdigest()


def has_changed(schema: Schema, recipe: Recipe) -> bool:
    """Whether the table of a run differs from the one that it was trained on."""
    if recipe.digest is None:  # an older run
        return False
    try:
        file = read_table_file(recipe.data, recipe.missing or ())
        return digest_of(schema, file.known(schema).table) != recipe.digest
    except ValueError:  # it has other columns, or cells that the schema does not allow
        return True


def rows_of(file: TableFile, schema: Schema, recipe: Recipe) -> tuple[Any, Any]:
    """The rows to train on, and those of --validation or --hold-out (None without either)."""
    train, held_out = split_rows(file, recipe)
    if recipe.validation is not None:
        held_out = read_table_file(recipe.validation, recipe.missing or ()).known_to(schema)
    return train, held_out


# The model ----------------------------------------------------------------------------------------


def _model(
    schema: Schema,
    frame: Any,
    name: str,
    arguments: Mapping[str, Any],
    out: Path,
    settings: Mapping[str, Any],
    *,
    resume: bool,
) -> tuple[Any, list[str]]:
    """Declare the model, chosen by BIC where the options leave it open, and say what was chosen."""
    from aevb.tables.selection import declare, described
    from aevb.training.checkpoint import folders
    from aevb.training.run import load_run

    seed = int(settings.get("seed", 0))
    if resume and folders(out):
        _check_schema(schema, out)
        print(f"The model is that of {out}.")
        return load_run(out).fresh(seed), []
    if None in arguments.values():
        return choose_by_bic(schema, frame, name, arguments, seed)
    text = f"Model: {described(name, arguments)}."
    print(text)
    return declare(schema, name, arguments), [text]


def _check_schema(schema: Schema, out: Path) -> None:
    """Refuse to resume a run with other columns or kinds."""
    from aevb.tables import Schema
    from aevb.training.run_folder import SCHEMA

    if not (out / SCHEMA).is_file():
        return
    there = Schema.from_json((out / SCHEMA).read_text(encoding="utf-8"))
    before = {column.name: column.kind for column in there.columns}
    now = {column.name: column.kind for column in schema.columns}
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{out} was trained with column {name!r} as {before.get(name, 'no column')}, and "
                f"now it is {now.get(name, 'no column')}. Repeat the command of the run (--kind, "
                f"--without and the file) and add --resume."
            )


def _result(fitted: TableModel, train: Any, check: Any, seconds: str) -> list[str]:
    """How well the model fits."""
    from aevb.data.large_tables import LargeTable, in_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `aevb evaluate` says how certain an estimate is
        rows, which = in_memory(train), "training rows"
        if isinstance(train, LargeTable):
            which = f"{rows.num_rows:,} random training rows"
        scores = {which: fitted.score(rows)}
        if check is not None:
            scores["held-out rows"] = fitted.score(check)
    exact = "stderr" not in scores[which].column_names
    parts = []
    for which, frame in scores.items():
        values: np.ndarray = frame["log_p"].to_numpy()
        parts.append(f"{values.mean():.3f} ({which})")
    how = "exact" if exact else "estimated by importance sampling"
    return [
        paragraph(
            f"Trained in {seconds}. log p per row, a density of the table's own columns, {how}: "
            f"{', '.join(parts)}."
        )
    ]


def _next(fitted: TableModel, out: Path) -> list[str]:
    """Commands to try next."""
    graph = fitted.model.graph
    clusters = any(
        graph.rule("p", name).spec.categorical and graph.size(name) > 1 for name in graph.latents
    )
    codes = any(not graph.rule("p", name).spec.finite for name in graph.latents)
    run = shlex.quote(str(out))
    lines = [(f"aevb evaluate {run}", "how well it predicts cells")]
    if clusters:
        lines.append((f"aevb cluster {run} --out clusters.csv", "the cluster of each row"))
    if codes:
        lines.append((f"aevb encode {run} --out codes.csv", "the codes of each row"))
    if any(column.missing for column in fitted.schema.used):
        lines.append((f"aevb impute {run} --out filled.csv", "fill the missing cells"))
    lines.append((f"aevb score {run} --out scored.csv", "log p of rows, outliers"))
    lines.append((f"aevb sample {run} -n 100 --out new.csv", "new rows like these"))
    width = max(len(command) for command, _ in lines)
    return [f"The run is in {out}. Next:", *(f"  {a:<{width}}  # {b}" for a, b in lines)]
