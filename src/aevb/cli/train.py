"""``aevb train gmvae --data digits --out run``."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.data_argument import counted_rows, known_rows, recipe_of
from aevb.cli.model_argument import is_run, resolve
from aevb.cli.options import SEEDS, Data, Missing, ModelName, Prepare, Set, device_of, in_its_words, pairs, path, takes_settings
from aevb.cli.units import units_note
from aevb.training.schedules import parse_schedule
from aevb.training.settings import Settings, read_toml

if TYPE_CHECKING:
    from aevb.data.datasets import Loaded, Split
    from aevb.model import Model

SHOWN = 4  # columns of a variable that are named


@takes_settings
def train(
    model: ModelName,
    out: Annotated[Path, typer.Option(parser=path, help="A new folder for the run's files.")],
    data: Data = None,
    set_: Set = None,
    prepare: Prepare = None,
    missing: Missing = None,
    validation: Annotated[str | None, typer.Option(help="A file of validation rows.", rich_help_panel="Data")] = None,
    hold_out: Annotated[float, typer.Option(help="The share of a file's rows to validate on, e.g. 0.1.", rich_help_panel="Data")] = 0.0,
    split: Annotated[
        int, typer.Option(help="Seed of the rows that --hold-out takes; --seed leaves them as they are.", rich_help_panel="Data", **SEEDS)
    ] = 0,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file of settings, e.g. another run's config.toml; options given here override it. It gives settings alone: what a run "
            "records besides them (data, fresh, frozen, numbers) is ignored.",
            rich_help_panel="Training",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Train so many models, with seeds 0, 1, …, in folders seed-0, seed-1, ….")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard into the run's folder.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run: the same command with this added.")] = False,
    **settings: Any,
) -> None:
    """Train a model on data and write everything about the run into a folder.

    A model of the zoo takes its sizes from the data, and may have its own usual lr and batch. Built-in data bring test rows, which validate.

    Examples:

    aevb train gmvae --data digits --out run

    aevb train vae --data table.csv --set likelihood=Normal --set z=5 --prepare standardise --hold-out 0.1 --out run

    aevb train vrnn --data sequences.npz --set likelihood=Poisson --schedule alternate:500,500 --out run

    aevb train gmvae --data digits --seeds 8 --out runs

    Where the model is the folder of a run, its weights are trained further, on its own data unless --data names others, prepared as they were:

    aevb train run --lr 1e-4 --out further

    A run's config.toml, or a file of such lines written by hand, gives its settings to another run:

    aevb train gmvae --data digits --config run/config.toml --seed 1 --out again
    """
    import torch

    from aevb.data.datasets import load
    from aevb.training.fit import fit
    from aevb.training.run_folder import refuse_taken
    from aevb.zoo import recipes

    asked = _asked(settings)
    if seeds is not None and (seeds < 1 or asked.get("seed")):
        raise ValueError(f"--seeds {seeds} is a number of runs, with seeds from 0 on; say --seed for one run with a seed of your own.")
    places = [out] if seeds is None else [out / f"seed-{i}" for i in range(seeds)]
    if resume and not any(place.is_dir() and any(place.iterdir()) for place in places):
        raise ValueError(
            f"There is no run in {out} that --resume could continue. Name its folder by --out, or leave out --resume to start a new run."
        )
    told = _over(read_toml(config) if config is not None else {}, asked)
    if seeds is not None:
        told.pop("seed", None)
    seed: int = told.get("seed", Settings.seed)
    torch.manual_seed(seed)
    before = recipe_of(Path(model)) if is_run(model) else None  # what was done to the rows of the run that is trained further
    before = before and replace(before, known=None)  # new rows may have labels that it had not
    data = data or (before.data if before else None)
    if data is None:
        raise ValueError("Say which data to train on: --data digits, or a file.")
    if is_run(model) and seeds is not None:
        raise ValueError("--seeds trains fresh models; a run is trained further alone.")
    found = resolve(model, data, pairs("--set", set_), missing)
    found = found.to(device_of(device))
    if before is not None and (validation or hold_out):
        before = replace(before, validation=validation, hold_out=hold_out, split=split, data=data)
    loaded = load(
        data, found.graph, prepare=prepare, seed=seed, validation=validation, hold_out=hold_out, split=split, missing=missing, like=before
    )  # fmt: skip
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, the first
    for place in places:
        refuse_taken(place, resume and place.exists())
    choices = {name: told[name] for name in ("how", "bound", "samples", "gradient") if name in told}
    known = known_rows(found, loaded.train.data)
    if speaks:
        everywhere = {name for name, count in known.items() if count == _count(loaded.train)}
        print(f"{found}\n\n{found.explain(**choices, clamped=everywhere, partial=known.keys() - everywhere)}\n")
        print("\n".join([_told(found, loaded, known), *_columns(loaded), *_unused_classes(loaded, known), *units_note(found, loaded)]) + "\n")
    schedule = told.get("schedule")
    usual: Mapping[str, Any] = recipes.get(model, {}) if schedule is None or schedule.objective == "bound" else {}  # rates are about the bound
    files: dict[str, Any] = {"out": out, "resume": resume, "progress": True, "tensorboard": tensorboard}
    check = loaded.test.data if loaded.test else None
    try:
        with _advised(model):
            made = fit(found, loaded.train.data, validation=check, seeds=seeds, recipe=loaded.recipe, **files, **{**usual, **told})
    except KeyboardInterrupt as stop:  # typer would drop the message
        if speaks:
            print(f"aevb: {in_its_words(stop) or 'interrupted'}", file=sys.stderr)
        raise typer.Exit(130) from None
    if not speaks:
        return
    runs = made if isinstance(made, list) else [made]
    for run, place in zip(runs, places, strict=True):
        run.plot(place / "curves.png")
    first = runs[0]
    if seeds is None:
        print(f"\n{first.step} steps in {first.seconds:.1f} s. The run is in {out}: curves.png, metrics.jsonl, checkpoints.")
    else:
        print(f"\n{seeds} runs in {max(run.seconds for run in runs):.1f} s. They are in {out}, each with curves.png, metrics.jsonl, checkpoints:")
        for run, place in zip(runs, places, strict=True):
            judged = f", best validation {run.best.value:.3f} at step {run.best.step}" if run.best else ""
            print(f"  {place.name}: {run.step} steps{judged}")
        out = max(zip(runs, places, strict=True), key=lambda pair: pair[0].best.value if pair[0].best else 0.0)[1]
    print("Next: " + "; ".join(f"aevb {command} {shlex.quote(str(out))}" for command in ("evaluate", "doctor", "sample")))


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that options give, as :class:`Settings` takes them."""
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if "how" in given:
        given["how"] = pairs("--how", given["how"])
    if "schedule" in given:
        try:
            given["schedule"] = parse_schedule(given["schedule"])
        except ValueError as error:
            raise ValueError(f"--schedule {given['schedule']}: {error}") from None
    return given


def _over(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file with those of options over them; epochs and steps say the same thing, so that one takes the other's place."""
    same = {"epochs", "steps"}
    kept = {name: value for name, value in recorded.items() if not (name in same and same & asked.keys())}
    return kept | dict(asked)


def _count(split: Split) -> int:
    return len(next(iter(split.data.values())))


def _told(model: Model, loaded: Loaded, known: Mapping[str, int]) -> str:
    """One line on the data: how many rows (of how many steps), how prepared, what is known of latents, what validates."""
    recipe = loaded.recipe
    n = _count(loaded.train)
    parts = [f"{counted_rows(model, loaded, loaded.train)} of {recipe.data}"]
    parts += [f"{name} known in {'all' if count == n else count}" for name, count in known.items() if count]
    parts += (
        [f"{recipe.prepare}d" if recipe.prepare in ("standardise", "dequantise", "binarise", "scale") else str(recipe.prepare)]
        if recipe.prepare
        else []
    )
    parts += [f"{_count(loaded.test)} validate"] if loaded.test else []
    return "Data: " + ", ".join(parts) + "."


def _columns(loaded: Loaded) -> list[str]:
    """Which columns of a table each variable takes, so that an id among them is seen."""
    found = []
    for name, columns in (loaded.recipe.columns or {}).items():
        shown = ", ".join(columns[:SHOWN]) + (", …" if len(columns) > SHOWN else "")
        found.append(f"{name}: {len(columns)} column{'s' * (len(columns) != 1)} ({shown}).")
    return found


def _unused_classes(loaded: Loaded, known: Mapping[str, int]) -> list[str]:
    """A sentence for labels that are numbered from 1."""
    import numpy as np

    found = []
    for name, count in known.items():
        labels = loaded.train.data[name]
        if count and not isinstance(labels, list) and (here := np.asarray(labels, dtype=float)).ndim == 1 and here[here >= 0].min(initial=2) == 1:
            found.append(f"{name}: the labels begin with 1, so that no row has class 0. If the classes are numbered from 1, subtract 1.")
    return found


class _advised:
    """Where a zoo model's likelihood does not take the data, say how to choose another here."""

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
            raise ValueError(f"{error} Here: --set likelihood=Normal (or another family), or --prepare.") from None
