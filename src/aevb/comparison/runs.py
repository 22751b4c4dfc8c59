"""Open the models of a comparison: models, runs and folders of runs, with their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aevb.comparison.entrants import Entrant, describe_rows, identify, trained_here
from aevb.data.datasets import Loaded, Recipe, load, log_jacobian, log_spreads
from aevb.data.sources import Source, open_source
from aevb.model import Model
from aevb.tables.fitted import TableModel, load_table
from aevb.tables.schema import Schema
from aevb.training.run import Run, load_run, recipe_of
from aevb.training.run_folder import SCHEMA
from aevb.training.seed_folders import distinct

Contestant = Model | Run | TableModel | str | Path  # a text or path is the folder of a run
CHUNK = 10_000  # rows whose Jacobian is computed at a time


def named(models: Mapping[str, Contestant] | Sequence[Contestant]) -> dict[str, Contestant]:
    """Return the models by name. Folders are named by what distinguishes their paths."""
    if isinstance(models, Mapping):
        return {str(name): one for name, one in models.items()}
    if isinstance(models, Model | Run | TableModel | str | Path):
        models = [models]
    folders = [place(one) for one in models]
    parts = distinct([one for one in folders if one is not None])
    found: dict[str, Contestant] = {}
    for i, (one, folder) in enumerate(zip(models, folders, strict=True), 1):
        name = f"model {i}" if folder is None else parts[folder]
        found[name if name not in found else f"{name} ({i})"] = one
    return found


def place(one: Contestant) -> Path | None:
    """Return the folder of a run; None for a model or a run without files."""
    if isinstance(one, TableModel):
        return one.folder
    return None if isinstance(one, Model) else one.out if isinstance(one, Run) else Path(one)


def opened(one: Contestant) -> tuple[Model, Path | None, float | None]:
    """Return the model of a contestant, its run's folder and the seconds of its training."""
    if isinstance(one, Model):
        return one, None, None
    if isinstance(one, Run):
        return one.model, one.out, one.seconds
    if isinstance(one, TableModel):
        return one.model, place(one), one.run.seconds if one.run is not None else None
    folder = Path(one)
    return load_run(folder), folder, Run.load(folder).seconds


def tables_of(models: Mapping[str, Contestant]) -> dict[str, TableModel]:
    """Return the models of tables; empty if there is none. Refuse a mixture of both kinds."""
    found = {
        name: one if isinstance(one, TableModel) else load_table(one)
        for name, one in models.items()
        if isinstance(one, TableModel)
        or (isinstance(one, str | Path) and (Path(one) / SCHEMA).is_file())
    }
    other = [name for name in models if name not in found]
    if found and other:
        raise ValueError(
            f"{next(iter(found))} is a model of a table and {other[0]} is not. Compare models of "
            f"tables with each other."
        )
    return found


def on_frames(tables: Mapping[str, TableModel], frames: Mapping[str, Any]) -> list[Entrant]:
    """Return models of tables with their rows; log p is a density of the columns.

    ``frames`` are the same rows for each model. Refuse models that read different cells of a
    column as missing: they would give log p of different cells.
    """
    found = []
    missing = {name: table.schema.missing_cells(frames[name]) for name, table in tables.items()}
    _refuse_other_cells(missing)
    for name, table in tables.items():
        frame = frames[name]
        entrant = Entrant.of(
            name,
            table.model,
            table.schema.encode(frame),
            log_jacobian=-table.schema.log_jacobian(frame),
            seconds=opened(table)[2],
            folder=place(table),
            quantities=_quantities(table.schema),
            rows_id=identify(missing[name], list(missing[name])),
        )
        found.append(replace(entrant, trained_on=trained_here(place(table), entrant.source)))
    return found


def _refuse_other_cells(missing: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    first, *others = missing
    for other in others:
        for column, mine in missing[first].items():
            theirs = missing[other].get(column, mine)
            if len(mine) == len(theirs) and (mine != theirs).any():
                raise ValueError(
                    f"Column {column!r}: {first} reads {int((~mine).sum())} of {len(mine)} cells "
                    f"and {other} {int((~theirs).sum())}; the other cells are missing to them. "
                    f"log p of different cells cannot be compared. Train both models with the same "
                    f"missing cells (the same schema, or the same --missing)."
                )


def _quantities(schema: Schema) -> dict[str, str]:
    return {
        column.name: "densities" if column.dense else "probabilities"
        for column in sorted(schema.used, key=lambda column: column.name)
    }


def on_arrays(models: Mapping[str, Contestant], data: Any) -> list[Entrant]:
    """Return the models with the same arrays for each, in the units of the models.

    Refuse runs of the command line that prepared their rows in different ways: the same numbers
    would mean different things to them.
    """
    found, recipes = [], {}
    for name, one in models.items():
        model, folder, seconds = opened(one)
        recipe = recipe_of(folder) if folder is not None else None
        recipes[name] = recipe
        entrant = Entrant.of(name, model, data, seconds=seconds, folder=folder)
        found.append(replace(entrant, trained_on=trained_here(folder, entrant.source)))
    prepared = {name: _preparation(recipe) for name, recipe in recipes.items()}
    if len(set(prepared.values())) > 1:
        first, other = _two_different(prepared)
        raise ValueError(
            f"{first} and {other} prepared their rows differently, so the same arrays mean "
            f'different things to them. Name the file instead: data="table.csv"; each run then '
            f"prepares its rows, and log p is in the units of the file."
        )
    return found


def _preparation(recipe: Recipe | None) -> str:
    """Return what a recipe does to the numbers of a row, as text; "" if it leaves them."""
    if recipe is None or recipe.prepare is None:
        return ""
    return repr((recipe.prepare, recipe.levels, recipe.mean, recipe.scale, recipe.others))


def _two_different(found: Mapping[str, str]) -> tuple[str, str]:
    first = next(iter(found))
    return first, next(name for name in found if found[name] != found[first])


def on_file(
    models: Mapping[str, Contestant],
    data: str | None = None,
    *,
    missing: Sequence[float] | None = None,
) -> tuple[list[Entrant], str, str]:
    """Return the models with rows of a file, or of the runs' own data, prepared as in training.

    The rows are the held-out ones if a run has any. Also return a description of the rows and a
    sentence on the units of log p.
    """
    loaded: dict[str, Loaded] = {}
    found: list[Entrant] = []
    seed: int | None = None
    units = ""
    for name, one in models.items():
        model, folder, seconds = opened(one)
        recipe = recipe_of(folder) if folder is not None else None
        if recipe is None and data is None:
            raise ValueError(
                f"{name} does not record which data it was trained on. Name them: data=… (--data)."
            )
        # Random preparations (binarise) draw the same values for every model.
        seed = seed if seed is not None or recipe is None else recipe.seed
        like = recipe if recipe is None or seed is None else replace(recipe, seed=seed)
        rows = load(data or str(recipe and recipe.data), model.graph, missing=missing, like=like)
        if recipe is not None and rows.recipe.hold_out and has_changed(folder, model, recipe):
            raise ValueError(
                f"{recipe.data} has changed since {name} was trained, so which rows it held out is "
                f"unknown. Name rows to compare on, which no run was trained on: data=… (--data)."
            )
        loaded[name] = rows
        chosen = rows.test or rows.train
        entrant = Entrant.of(name, model, chosen.data)
        jacobian, note = units_of(model, rows, entrant.source)
        units = units or note
        found.append(
            replace(
                entrant,
                log_jacobian=jacobian,
                rows_id=identify(chosen.raw, list(entrant.scored())),
                trained_on=trained_here(folder, entrant.source),
                seconds=seconds,
                folder=folder,
            )
        )
    _refuse_other_rows(found, loaded)
    first = next(iter(loaded.values()))
    return found, describe_loaded(first, found[0].source.n), units


def has_changed(folder: Path | None, model: Model, recipe: Recipe) -> bool:
    """Whether the training rows in the file of a run are others than the run was trained on.

    Then which of its rows were held out is unknown. False if the run recorded no hash of all rows.
    """
    rows = load(recipe.data, model.graph, like=recipe).train.data
    return trained_here(folder, open_source(model.graph, rows, model._parameter())) is False


def describe_loaded(loaded: Loaded, n: int) -> str:
    """Describe the rows to compare on: the held-out ones if there are any."""
    recipe = loaded.recipe
    which = (
        ""
        if loaded.test is None
        else "held out"
        if recipe.hold_out
        else "validation"
        if recipe.validation
        else "test"
    )
    return describe_rows(n, which, recipe.validation or recipe.data)


def _refuse_other_rows(found: Sequence[Entrant], loaded: Mapping[str, Loaded]) -> None:
    """Refuse runs whose rows differ, with the entry of their data.json that makes the difference.

    Preparations that change more than the units of a column give other data.
    """
    first = found[0]
    for one in found[1:]:
        mine, theirs = loaded[first.name].recipe, loaded[one.name].recipe
        units_only = (None, "standardise")
        if mine.prepare != theirs.prepare and not (
            mine.prepare in units_only and theirs.prepare in units_only
        ):
            raise ValueError(
                f"{first.name} was trained on rows prepared by {mine.prepare or 'none'}, "
                f"{one.name} on rows prepared by {theirs.prepare or 'none'}: these are different "
                f"data. Compare runs with the same --prepare."
            )
        if one.rows_id == first.rows_id:
            continue
        for key in ("data", "columns", "validation", "hold_out", "split", "missing"):
            if getattr(mine, key) != getattr(theirs, key):
                raise ValueError(
                    f"{first.name} and {one.name} have different rows: {key} is "
                    f"{_short(getattr(mine, key))} and {_short(getattr(theirs, key))} (data.json). "
                    f"Compare them on rows that are new to both: --data FILE."
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def units_of(model: Model, loaded: Loaded, source: Source) -> tuple[np.ndarray | None, str]:
    """Return what to subtract from log p for the units of the data, [N], and a sentence on it."""
    names = list(log_spreads(loaded.recipe, model.graph))
    if not names:
        return None, ""
    if loaded.recipe.prepare != "standardise":
        return None, (
            f"log p is of {', '.join(names)} with grey levels from 0 to 1 "
            f"({loaded.recipe.prepare})."
        )
    parts = []
    for start in range(0, source.n, CHUNK):
        batch = source.take(torch.arange(start, min(source.n, start + CHUNK)))
        rows = log_jacobian(loaded.recipe, model.graph, batch)
        parts.append(torch.stack(list(rows.values())).sum(0).double().cpu().numpy())
    return np.concatenate(parts), f"log p is of {', '.join(names)} in the units of the data."
