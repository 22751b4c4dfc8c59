"""Open runs for a page: as much of each as can be read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.data_argument import load_rows, recipe_of
from aevb.cli.model_argument import is_density, open_run
from aevb.cli.open_table import is_table_run, open_table

SAMPLES = 200  # importance samples per row in a comparison of runs

if TYPE_CHECKING:
    from aevb.data.datasets import Loaded, Recipe
    from aevb.model import Model
    from aevb.page.sections import Opened
    from aevb.page.subject import Split, Subject


def open_for_page(
    folder: Path, data: str | None = None, *, name: str | None = None, with_rows: bool = True
) -> Opened:
    """Open a run. What cannot be read is a sentence in ``problems``, and the rest is there."""
    from aevb.page.sections import Opened
    from aevb.runtime.checked_files import DataWarning, IntegrityWarning
    from aevb.training.run import Run
    from aevb.training.run_folder import read_rows

    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}. Name the folder of a run.")
    if not (folder / "model.json").exists() and not (folder / "metrics.jsonl").exists():
        open_run(folder)  # explains what the folder holds instead
    problems: list[str] = []
    model, run, recipe, subject = None, None, None, None
    notes: tuple[str, ...] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if not is_density(folder):
                run = Run.load(folder)
            model = open_run(folder)
        except (ValueError, OSError, RuntimeError) as error:
            problems.append(f"The trained model cannot be read: {error}")
        history, damaged = read_rows(folder, {}, 2**62)
        if damaged:
            problems.append(damaged)
        if model is not None and with_rows:
            try:
                recipe = recipe_of(folder)
                subject, notes = _subject(folder, model, run, recipe, data, name or folder.name)
            except (ValueError, OSError) as error:
                problems.append(f"The rows cannot be read, so there is no map: {error}")
    ours = (DataWarning, IntegrityWarning)
    problems += [str(one.message) for one in caught if issubclass(one.category, ours)]
    declared = model if model is not None else _declared(folder, problems)
    return Opened(
        name or folder.name,
        folder,
        declared,
        run,
        history if run is None or len(history) > len(run.rows) else run.rows,
        recipe,
        subject,
        (*notes, *_written_notes(folder)),
        list(dict.fromkeys(problems)),
    )


def _subject(
    folder: Path, model: Model, run: Any, recipe: Recipe | None, data: str | None, name: str
) -> tuple[Subject, tuple[str, ...]]:
    from aevb.page.subject import Subject

    known = Subject(name, model, (), folder, run, recipe)
    if is_table_run(folder):
        table = open_table(folder, data, tell=False)
        return replace(known, splits=_table_splits(table, recipe, data), schema=table.schema), ()
    loaded = load_rows(folder, model, data, None, 0)
    from aevb.cli.use import _image_shape

    first = model.graph.observed[0]
    image = None if model.graph.timed[first] else _image_shape(model.graph, first, loaded.recipe)
    return replace(known, splits=_splits(loaded), recipe=loaded.recipe, image=image), loaded.notes


def _splits(loaded: Loaded) -> list[Split]:
    from aevb.page.subject import Split

    recipe = loaded.recipe
    held = "held out" if recipe.hold_out else "validation" if recipe.validation else "test"
    found = [Split("training" if loaded.test else "", loaded.train.data, loaded.train.labels)]
    if loaded.test is not None:
        found.append(Split(held, loaded.test.data, loaded.test.labels))
    return found


def _table_splits(table: Any, recipe: Recipe | None, data: str | None) -> list[Split]:
    """The rows of a table: those of the training, and those held out if they are known."""
    import numpy as np

    from aevb.cli.train_table import has_changed, split_numbers
    from aevb.page.subject import Split

    frame, numbers = table.file.frame, table.file.numbers

    def split(name: str, rows: np.ndarray) -> Split:
        cells = frame.take(rows)
        encoded = table.schema.encode(table.known_in(cells))
        return Split(name, encoded, None, numbers[rows], cells)

    own = recipe if data is None else None
    if own is not None and own.hold_out and table.file.large is None:
        # If the file has changed, which rows were held out is unknown.
        if has_changed(table.schema, own):
            return [split("", np.arange(frame.num_rows))]
        trained_on, held_out = split_numbers(table.file, own)
        return [split("training", trained_on), split("held out", held_out)]
    return [split("" if own is None else "training", np.arange(frame.num_rows))]


def _declared(folder: Path, problems: list[str]) -> Model | None:
    """The model of ``model.json`` without trained weights, to show what it declares."""
    from aevb.loading import from_declaration
    from aevb.runtime.checked_files import read_json

    try:
        return from_declaration(read_json(folder / "model.json"))
    except (ValueError, OSError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        problems.append(f"model.json cannot be read: {error}")
        return None


def _written_notes(folder: Path) -> tuple[str, ...]:
    from aevb.cli.train_table import NOTES

    path = folder / NOTES
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()


def section_json(folder: Path, part: str, *, live: bool = False) -> str:
    """One part of a run's page as JSON, for the server."""
    from aevb.page.html import to_json
    from aevb.page.sections import section

    opened = open_for_page(folder, with_rows=part != "summary")
    found = section(opened, part, live=live)
    problems = [*opened.problems, *((found or {}).get("problems", []))]
    return to_json({"part": part, "content": found, "problems": problems})


def decode_json(folder: Path, request: dict[str, Any]) -> str:
    """The observed variables for given values of the latents, as JSON, for the server."""
    from aevb.page.decoder import decode
    from aevb.page.html import to_json

    model = _model_of(folder)
    found = decode(
        model,
        request.get("values", {}),
        draw=bool(request.get("draw")),
        seed=int(request.get("seed", 0)),
    )
    return to_json(_lists(found))


_MODELS: dict[Path, tuple[float, Model]] = {}


def _model_of(folder: Path) -> Model:
    """The model of a run, read once per checkpoint."""
    places = [folder / "checkpoints", folder / "manifest.json"]
    changed = max((place.stat().st_mtime for place in places if place.exists()), default=0.0)
    if folder not in _MODELS or _MODELS[folder][0] != changed:
        _MODELS[folder] = changed, open_run(folder)
    return _MODELS[folder][1]


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def comparison_json(folders: list[Path]) -> str:
    """The comparison of several runs as JSON, for the server."""
    from aevb.page.html import to_json

    return to_json(comparison_of([open_for_page(one, with_rows=False) for one in folders]))


def comparison_of(opened: list[Opened], data: str | None = None) -> dict[str, Any] | None:
    """Compare runs on the rows that they held out, or on those of a file."""
    from aevb.cli.compare import compare_runs
    from aevb.comparison import Comparison
    from aevb.page.compared import compared

    known = [one for one in opened if one.model is not None]
    found: Comparison | Exception
    try:
        folders = [one.folder for one in known if one.folder is not None]
        found = compare_runs(folders, data, samples=SAMPLES)
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        found = error
    return compared(known, found)
