"""The command ``aevb train``: train a model on data.

Example: ``aevb train gmvae --data digits --out run``.
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.completion import tables_and_models, words
from aevb.cli.data_argument import counted_rows, known_rows, recipe_of
from aevb.cli.missing_marks import marks_of, only_numbers
from aevb.cli.model_argument import code_of, is_run, program, resolve
from aevb.cli.options import (
    Data,
    Device,
    Gaps,
    Kind,
    Missing,
    Prepare,
    Quiet,
    Set,
    Size,
    SplitSeed,
    Track,
    Validation,
    Without,
    check_resume,
    fit_device,
    given_settings,
    in_its_words,
    pairs,
    path,
    record_command,
    side_lengths,
    takes_settings,
    trackers_of,
)
from aevb.cli.serve import page_beside
from aevb.cli.train_table import TableOptions, names_table, train_table
from aevb.cli.units import units_note
from aevb.estimate.metric_names import OBJECTIVE
from aevb.training.seed_folders import seed_folder
from aevb.training.settings import Settings, read_toml

if TYPE_CHECKING:
    from aevb.data.datasets import Loaded, Split
    from aevb.model import Model
    from aevb.training.run import Run

SHOWN = 4  # columns of a variable to print


@takes_settings
def train(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="TABLE|MODEL",
            help="A table (.csv, .tsv, .txt, .parquet); or a model with --data: a name from `aevb "
            "models`, file.py:name (Python executes the file), or the folder of a saved model or "
            "run.",
            autocompletion=tables_and_models,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="A folder for the files of the run; it must be new or empty. By default, that of "
            "table.csv is table-run.",
        ),
    ] = None,
    data: Data = None,
    set_: Set = None,
    model_: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="The model of a table: density (several mixtures joined, the default), mixture "
            "(--set components=3 covariance=full, by default chosen by BIC), factors (--set "
            "latent=2), vae (latent, hidden) or gmvae (components, latent, hidden).",
            rich_help_panel="Table",
            autocompletion=words("density", "mixture", "factors", "vae", "gmvae"),
        ),
    ] = None,
    kind: Kind = None,
    without: Without = None,
    prepare: Prepare = None,
    missing: Missing = None,
    gaps: Gaps = None,
    size: Size = None,
    validation: Validation = None,
    hold_out: Annotated[
        float,
        typer.Option(
            help="Fraction of the file's rows to hold out for validation, e.g. 0.1.",
            rich_help_panel="Data",
        ),
    ] = 0.0,
    split: SplitSeed = 0,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file of settings, e.g. another run's config.toml. Options override it. "
            "Only settings are read: other entries of a run's config.toml (data, fresh, "
            "frozen, numbers) are ignored.",
            rich_help_panel="Training",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Train this many models, with seeds 0, 1, …, in the folders seed-0, seed-1, …."
        ),
    ] = None,
    device: Device = "auto",
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write scalars for TensorBoard into the run's folder."),
    ] = False,
    track: Track = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue an interrupted run: repeat its command and add --resume."
        ),
    ] = False,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Show the run in the browser while it trains: start `aevb serve` beside it and "
            "print its address.",
        ),
    ] = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Train a model on a table or on other data, and write the run into a folder.

    A table may hold numbers, words, dates and missing cells. Its columns get kinds and likelihoods,
    which are printed. The model is a density that needs no choice, unless --model names another:

    aevb train table.csv

    aevb train table.csv --without id,species --kind year=category --hold-out 0.1 --out run

    aevb train table.csv --model mixture --set components=3

    With a model's name, the data follow. A zoo model takes its sizes from the data and may have its
    own defaults for --lr and --batch. Validation uses the test rows of built-in data sets.

    Examples:

    aevb train gmvae --data digits --out run

    aevb train vae --data table.csv --set likelihood=Normal --set z=5 --prepare standardise
    --hold-out 0.1 --out run

    aevb train vae --data photos --size 64 --set net=conv --hold-out 0.1 --out run

    aevb train vrnn --data sequences.npz --set likelihood=Poisson --schedule alternate:500,500 --out
    run

    aevb train gmvae --data digits --seeds 8 --out runs

    If the model is the folder of a run, training continues from its weights, on its own data or on
    --data, prepared in the same way:

    aevb train run --lr 1e-4 --out further

    To reuse the settings of a run, or settings that you wrote into a file:

    aevb train gmvae --data digits --config run/config.toml --seed 1 --out again
    """
    import torch

    from aevb.data.datasets import load
    from aevb.training.fit import fit
    from aevb.training.run_folder import refuse_taken
    from aevb.zoo import recipes, zoo

    asked = given_settings(settings)
    trackers = trackers_of([*(track or ()), *["tensorboard"] * tensorboard])
    if names_table(model):
        refuse_for_tables(model, data, prepare, seeds, gaps)
        given = _over(read_toml(config) if config is not None else {}, asked)
        options = TableOptions(
            model_,
            pairs("--set", set_),
            kind or (),
            without or (),
            marks_of(missing),
            validation,
            hold_out,
            split,
        )
        out = out or Path(f"{Path(model).stem}-run")
        train_table(
            model,
            out,
            options,
            given,
            device=device,
            trackers=trackers,
            resume=resume,
            serve=serve,
            quiet=quiet,
        )
        return
    refuse_table_options(model, model_, kind, without)
    target = fit_device(device)
    if out is None:
        resolve(
            model, data, pairs("--set", set_), size=side_lengths(size)
        )  # a wrong name is the first thing to say
        raise ValueError("Say where to write the run, e.g. --out run.")
    if seeds is not None and (seeds < 1 or asked.get("seed")):
        raise ValueError(
            f"--seeds {seeds} is a number of runs, at least 1, with the seeds 0, 1, …. For one "
            f"run with another seed use --seed alone."
        )
    places = [out] if seeds is None else [seed_folder(out, i) for i in range(seeds)]
    if resume:
        check_resume(out, places)
    given = _over(read_toml(config) if config is not None else {}, asked)
    if seeds is not None:
        given.pop("seed", None)
    seed: int = given.get("seed", Settings.seed)
    torch.manual_seed(seed)
    # If the run continues from another run, use that run's preparation of the rows.
    # A name of the zoo means that model, even if a folder has the same name.
    continues = is_run(model) and model not in zoo
    before = recipe_of(Path(model)) if continues else None
    # The new rows may have labels that the other run's rows did not have.
    before = before and replace(before, known=None)
    data = data or (before.data if before else None)
    if data is None:
        raise ValueError("Say which data to train on, e.g. --data digits or --data table.csv.")
    if continues and seeds is not None:
        raise ValueError(
            "--seeds trains new models, but this command continues a run. Leave out --seeds."
        )
    markers = only_numbers(missing)
    found = resolve(model, data, pairs("--set", set_), markers, side_lengths(size))
    if before is not None and (validation or hold_out):
        before = replace(before, validation=validation, hold_out=hold_out, split=split, data=data)
    with _offering_tables(data):
        loaded = load(
            data,
            found.graph,
            prepare=prepare,
            seed=seed,
            validation=validation,
            hold_out=hold_out,
            split=split,
            missing=markers,
            gaps=gaps,
            like=before,
            size=side_lengths(size),
        )
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, only the first one prints
    for place in places:
        refuse_taken(place, resume and place.exists())
    choices = {
        name: given[name]
        for name in ("how", "bound", "samples", "gradient", "resample")
        if name in given
    }
    known = known_rows(found, loaded.train.data)
    if speaks and not quiet:
        everywhere = {name for name, count in known.items() if count == _count(loaded.train)}
        partial = known.keys() - everywhere
        print(f"{found}\n\n{found.explain(**choices, clamped=everywhere, partial=partial)}\n")
        print(
            "\n".join(
                [
                    _data_line(found, loaded, known),
                    *_columns(loaded),
                    *_unused_classes(loaded, known),
                    *units_note(found, loaded),
                ]
            )
            + "\n"
        )
    schedule = given.get("schedule")
    # The zoo's recipes are for training on the bound only.
    usual: Mapping[str, Any] = (
        recipes.get(model, {}) if schedule is None or schedule.objective == "bound" else {}
    )
    files: dict[str, Any] = {
        "out": out,
        "resume": resume,
        "device": target,
        "progress": not quiet,
        "trackers": trackers,
    }
    check = loaded.test.data if loaded.test else None
    code = code_of(model, found, set_) or context.find_root().params.get("code")
    with page_beside(places, wanted=serve and speaks, code=code):
        try:
            with _advised(model):
                made = fit(
                    found,
                    loaded.train.data,
                    validation=check,
                    seeds=seeds,
                    recipe=loaded.recipe,
                    **files,
                    **{**usual, **given},
                )
        except KeyboardInterrupt as stop:  # typer would drop the message
            if speaks:
                print(f"aevb: {in_its_words(stop) or 'interrupted'}", file=sys.stderr)
            raise typer.Exit(130) from None
        if speaks:
            runs = made if isinstance(made, list) else [made]
            _report(runs, places, out, command=program(model, found), quiet=quiet)


def _report(runs: list[Run], places: list[Path], out: Path, *, command: str, quiet: bool) -> None:
    """Draw the curves of the runs, and print where they are and what to do next.

    ``command`` begins the commands that are printed.
    """
    for run, place in zip(runs, places, strict=True):
        run.plot(place / "curves.png")
        record_command(place)
    first = runs[0]
    apart = "" if quiet else "\n"
    if places == [out]:
        print(
            f"{apart}{first.step} steps in {first.seconds:.1f} s{_early(first)}. The run is in "
            f"{out}: curves.png, metrics.jsonl, checkpoints."
        )
    else:
        print(
            f"{apart}{len(runs)} runs in {max(run.seconds for run in runs):.1f} s. They are in "
            f"{out}, each with curves.png, metrics.jsonl, checkpoints:"
        )
        objective = "objective " if first.settings.judge == OBJECTIVE else ""
        for run, place in zip(runs, places, strict=True):
            judged = (
                f", best validation {objective}{run.best.value:.3f} at step {run.best.step}"
                if run.best
                else ""
            )
            print(f"  {place.name}: {run.step} steps{_early(run)}{judged}")
        out = max(
            zip(runs, places, strict=True),
            key=lambda pair: pair[0].best.value if pair[0].best else 0.0,
        )[1]
    if not quiet:
        print(
            "Next: "
            + "; ".join(
                f"{command} {word} {shlex.quote(str(out))}"
                for word in ("evaluate", "doctor", "sample")
            )
        )


def _early(run: Run) -> str:
    return f", {run.ended}" if run.ended.startswith("stopped early") else ""


def refuse_for_tables(
    table: str, data: str | None, prepare: str | None, seeds: int | None, gaps: str | None = None
) -> None:
    """Refuse options that a table has no use for."""
    if data is not None:
        raise ValueError(
            f"{table} is a table already, so --data {data} has no place. To train a named model: "
            f"aevb train vae --data {data} --out run."
        )
    if prepare is not None:
        raise ValueError(
            "Columns of a table are standardised as their kinds need it. Leave out --prepare, or "
            "use --kind."
        )
    if gaps is not None:
        raise ValueError(
            "The rows of a table are no series, so there are no steps to fill. Leave out --gaps."
        )
    if seeds is not None:
        raise ValueError(
            "A mixture of a table is fitted from several starts already. Leave out --seeds, or "
            "use --seed with another --out for each run."
        )


def refuse_table_options(
    model: str, name: str | None, kind: list[str] | None, without: list[str] | None
) -> None:
    for option, value in (("--model", name), ("--kind", kind), ("--without", without)):
        if value:
            raise ValueError(
                f"{option} belongs to a table, e.g. aevb train table.csv {option} …, but "
                f"{model} is a model."
            )
    if (Path(model) / "schema.json").is_file():
        raise ValueError(
            f"{model} is the run of a table. Continue an interrupted run by its own command and "
            f"--resume, or train a new one: aevb train table.csv --out FOLDER."
        )


def _over(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Override the settings of a file by those of options.

    epochs and steps both set the length of training, so either of them overrides the other.
    """
    same = {"epochs", "steps"}
    kept = {
        name: value
        for name, value in recorded.items()
        if not (name in same and same & asked.keys())
    }
    return kept | dict(asked)


def _count(split: Split) -> int:
    return len(next(iter(split.data.values())))


def _data_line(model: Model, loaded: Loaded, known: Mapping[str, int]) -> str:
    """Summarise the data in one line: rows, steps, known latents, preparation, validation rows."""
    recipe = loaded.recipe
    n = _count(loaded.train)
    parts = [f"{counted_rows(model, loaded, loaded.train)} of {recipe.data}"]
    parts += [
        f"{name} known in {'all' if count == n else count}"
        for name, count in known.items()
        if count
    ]
    parts += (
        [
            f"{recipe.prepare}d"
            if recipe.prepare in ("standardise", "dequantise", "binarise", "scale")
            else str(recipe.prepare)
        ]
        if recipe.prepare
        else []
    )
    parts += [f"{_count(loaded.test)} for validation"] if loaded.test else []
    return "Data: " + ", ".join(parts) + "."


def _columns(loaded: Loaded) -> list[str]:
    """List the columns of each variable, so that the user notices an id among the measurements."""
    found = []
    for name, columns in (loaded.recipe.columns or {}).items():
        shown = ", ".join(columns[:SHOWN]) + (", …" if len(columns) > SHOWN else "")
        found.append(f"{name}: {len(columns)} column{'s' * (len(columns) != 1)} ({shown}).")
    recipe = loaded.recipe
    if recipe.image is not None and recipe.folder:
        height, width = recipe.image
        names = recipe.classes or []
        shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
        classes = f", {len(names)} classes ({shown})" if names else ""
        found.append(f"Images of {height}×{width} pixels{classes}.")
    return found


def _unused_classes(loaded: Loaded, known: Mapping[str, int]) -> list[str]:
    """Note labels that are numbered from 1."""
    import numpy as np

    found = []
    for name, count in known.items():
        labels = loaded.train.data[name]
        if (
            count
            and not isinstance(labels, list)
            and (here := np.asarray(labels, dtype=float)).ndim == 1
            and here[here >= 0].min(initial=2) == 1
        ):
            found.append(
                f"{name}: the labels begin with 1, so no row has class 0. If the classes are "
                f"numbered from 1, subtract 1."
            )
    return found


@contextmanager
def _offering_tables(data: str) -> Iterator[None]:
    """Add to an error about a table with words that ``aevb train table.csv`` reads it."""
    try:
        yield
    except ValueError as error:
        if not _has_words(data):
            raise
        raise ValueError(
            f"{error} To model the table with its words as they are: aevb train {data}."
        ) from None


def _has_words(data: str) -> bool:
    import pyarrow as pa  # type: ignore[import-untyped]

    from aevb.data.frames import read_frame
    from aevb.data.parquet import is_parquet, open_dataset
    from aevb.data.tables import is_table

    path = Path(data)
    try:
        if not is_table(path):
            return False
        found = open_dataset(path) if is_parquet(path) else read_frame(path)
        return any(map(pa.types.is_string, found.schema.types))
    except ValueError:
        return False


class _advised:
    """Context that adds to an error about a zoo model's likelihood how to choose another."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        from aevb.estimate.batch import FamilyError
        from aevb.zoo import zoo

        if not isinstance(error, FamilyError) or error.variable != "x" or self.model not in zoo:
            return
        if "likelihood" in inspect.signature(zoo[self.model]).parameters:
            raise ValueError(
                f"{error} On the command line, --set 'likelihood={error.fits}' takes the numbers "
                f"as they are; or name another family, or --prepare."
            ) from None
