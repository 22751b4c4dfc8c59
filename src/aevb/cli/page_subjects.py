"""Open runs for a page: as much of each as can be read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.data_argument import load_rows, recipe_of
from aevb.cli.model_argument import is_density, is_saved, open_run
from aevb.cli.open_table import is_table_run, open_table
from aevb.cli.table_files import own_names

MOST_KEPT = 4  # runs that train whose rows a process keeps
MOST_DECODED = 256  # rows of a request to decode
FEW_SAMPLES = 200  # importance samples per row in a comparison of runs, if the usual number of
WORK = 2e12  # samples takes more multiplications than this

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.datasets import Loaded, Recipe
    from aevb.model import Model
    from aevb.page.sections import Opened
    from aevb.page.subject import Split, Subject


def open_for_page(
    folder: Path,
    data: str | None = None,
    *,
    name: str | None = None,
    with_rows: bool = True,
    live: bool = False,
) -> Opened:
    """Open a run. What cannot be read is a sentence in ``problems``, and the rest is there.

    ``live``: the run trains, so that its history is ahead of its last checkpoint, or has none.
    """
    from aevb.page.sections import Opened, reason_of
    from aevb.runtime.checked_files import DataWarning, IntegrityWarning
    from aevb.training.checkpoint import folders
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
            if not (is_density(folder) or is_saved(folder)):
                run = Run.load(folder)
            model = open_run(folder)
        except Exception as error:
            if not (live and not folders(folder)):
                problems.append(f"The trained model cannot be read: {reason_of(error)}")
        history, damaged = read_rows(folder, {}, 2**62)
        if damaged and run is None:  # a run that can be read has said so itself
            problems.append(
                f"{folder / 'metrics.jsonl'} is damaged: some of its lines cannot be read. The "
                f"curves show the others."
            )
        try:
            recipe = recipe_of(folder)
            if model is not None and with_rows:
                open_subject = _kept_subject if live else _subject
                subject, notes = open_subject(folder, model, run, recipe, data, name or folder.name)
        except Exception as error:
            if data is not None:
                raise  # the command names rows that are not there, or that do not fit
            if model is not None:
                problems.append(f"The rows cannot be read, so there is no map: {reason_of(error)}")
    ours = DataWarning if live else (DataWarning, IntegrityWarning)
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
        "training" if live else _state(folder),
    )


def _state(folder: Path) -> str:
    from aevb.page.server.run_state import STOPPED, WAITING, Folder

    found = Folder(folder).look().state
    return STOPPED if found == WAITING else found


_KEPT: dict[Path, tuple[Any, Subject, tuple[str, ...], list[warnings.WarningMessage]]] = {}


def _kept_subject(
    folder: Path, model: Model, run: Any, recipe: Recipe | None, data: str | None, name: str
) -> tuple[Subject, tuple[str, ...]]:
    """The subject of a run that trains: its rows are read again only if their files have changed.

    The server asks for a map at many checkpoints, and only the weights differ.
    """
    places = [folder / "data.json", folder / "clusters"]
    if recipe is not None:
        places += [Path(one) for one in (recipe.data, recipe.validation) if one]
    key = name, data, tuple(map(_file_state, places))
    if folder not in _KEPT or _KEPT[folder][0] != key:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            subject, notes = _subject(folder, model, run, recipe, data, name)
        while len(_KEPT) >= MOST_KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[folder] = key, subject, notes, caught
    _, subject, notes, caught = _KEPT[folder]
    for one in caught:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return replace(subject, model=model, run=run), notes


def _file_state(path: Path) -> tuple[Any, ...]:
    """What changes when a file, or a file in a folder, is written."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    found = [(one.name, one.stat()) for one in files]
    return tuple((name, state.st_ino, state.st_mtime_ns, state.st_size) for name, state in found)


def _subject(
    folder: Path, model: Model, run: Any, recipe: Recipe | None, data: str | None, name: str
) -> tuple[Subject, tuple[str, ...]]:
    from aevb.page.subject import Subject

    known = Subject(name, model, (), folder, run, recipe)
    if is_table_run(folder):
        if data is None and recipe is not None and not Path(recipe.data).exists():
            raise ValueError(
                f"{folder} was trained on {recipe.data}, which is not here. Change to the folder "
                f"that holds this file, or use --data PATH."
            )
        table = open_table(folder, data, tell=False)
        return replace(known, splits=_table_splits(table, recipe, data), schema=table.schema), ()
    lost = False
    try:
        loaded = load_rows(folder, model, data, None, 0)
    except (ValueError, OSError) as error:
        if data is not None or recipe is None or not recipe.validation:
            raise
        loaded = load_rows(folder, model, None, None, 0, whole=True)
        _warn_of_validation(recipe, error)
        lost = True
    from aevb.cli.use import _has_ink, _image_shape

    first = model.graph.observed[0]
    image = None if model.graph.timed[first] else _image_shape(model.graph, first, loaded.recipe)
    own = recipe is not None and data in (None, recipe.data)
    splits = _splits(loaded, own=own)
    if lost:
        splits = [replace(splits[0], name="training")]
    ink = _has_ink(loaded.recipe)
    names = tuple(loaded.recipe.classes or ())
    labels = [one.labels for one in splits if one.labels is not None]
    named = all(int(one.max(initial=-1)) < len(names) for one in labels)
    found = replace(
        known,
        splits=splits,
        recipe=loaded.recipe,
        image=image,
        ink=ink,
        label_names=names if named else (),
    )
    return found, loaded.notes


def _splits(loaded: Loaded, *, own: bool) -> list[Split]:
    """The training rows and the others; ``own``: they are those of the run, not of another file."""
    import numpy as np

    from aevb.page.subject import Split

    recipe, test = loaded.recipe, loaded.test
    if test is None:
        return [Split("", loaded.train.data, _labels(loaded.train.labels))]
    held = "held out" if recipe.hold_out else "validation" if recipe.validation else "test"
    names = ("training", held) if own else (f"{recipe.data} training", f"{recipe.data} {held}")
    numbers: list[Any] = [None, None]
    if recipe.hold_out:
        # The rows of both splits by their numbers in the file; see aevb.data.datasets.
        n, few = (len(part.data[next(iter(part.data))]) for part in (loaded.train, test))
        order = np.random.default_rng(recipe.split).permutation(n + few)
        numbers = [np.sort(order[few:]), np.sort(order[:few])]
    parts = zip(names, (loaded.train, test), numbers, strict=True)
    return [Split(name, part.data, _labels(part.labels), at) for name, part, at in parts]


def _labels(labels: np.ndarray | None) -> np.ndarray | None:
    """Labels that are class numbers; known values of a continuous latent are none."""
    import numpy as np

    if labels is None or not np.issubdtype(labels.dtype, np.number):
        return None
    values = np.nan_to_num(labels.astype(float), nan=-1.0)
    return values.astype(int) if bool((values == np.round(values)).all()) else None


def _table_splits(table: Any, recipe: Recipe | None, data: str | None) -> list[Split]:
    """The rows of a table: those of the training, and those held out or of a validation file.

    If the file has changed since training, which of its rows were held out is unknown.
    """
    import numpy as np

    from aevb.cli.data_argument import HELD_OUT_UNKNOWN
    from aevb.cli.train_table import has_changed, split_numbers
    from aevb.runtime.checked_files import DataWarning

    everything = np.arange(table.known.num_rows)
    frame = _cells(table)
    if recipe is None or data is not None:
        return [_table_split(table, frame, "", everything)]
    if has_changed(table.schema, recipe):
        warnings.warn(
            DataWarning(f"{recipe.data} has changed since training, so {HELD_OUT_UNKNOWN}"),
            stacklevel=2,
        )
        return [_table_split(table, frame, "", everything)]
    if recipe.hold_out and table.file.large is not None:
        return [_table_split(table, frame, "", everything)]  # random rows, held-out ones among them
    if recipe.hold_out:
        trained_on, held_out = split_numbers(table.file, recipe)
        return [
            _table_split(table, frame, "training", trained_on),
            _table_split(table, frame, "held out", held_out),
        ]
    found = [_table_split(table, frame, "training", everything)]
    if recipe.validation:
        try:
            other = open_table(table.run, recipe.validation, tell=False)
            rows = np.arange(other.known.num_rows)
            found.append(_table_split(other, _cells(other), "validation", rows))
        except (ValueError, OSError) as error:
            _warn_of_validation(recipe, error)
    return found


def _warn_of_validation(recipe: Recipe, error: Exception) -> None:
    from aevb.runtime.checked_files import DataWarning

    warnings.warn(
        DataWarning(
            f"The validation rows of {recipe.validation} cannot be read, so the page shows the "
            f"training rows only: {error}"
        ),
        stacklevel=2,
    )


def _cells(table: Any) -> Any:
    """The rows of a table with the types of the run's own table, and their clusters."""
    frame = _with_clusters(table)
    for column in table.known.column_names:
        at = frame.column_names.index(column)
        frame = frame.set_column(at, column, table.known[column])
    return frame


def _table_split(table: Any, frame: Any, name: str, rows: np.ndarray) -> Split:
    from aevb.page.subject import Split

    encoded = table.schema.encode(table.known.take(rows))
    return Split(name, encoded, None, table.file.numbers[rows], frame.take(rows))


def _with_clusters(table: Any) -> Any:
    """The rows of a table, with their clusters if ``aevb cluster`` has found some."""
    import numpy as np

    from aevb.tables.fitted import load_table

    frame, folder = table.file.frame, table.run / "clusters"
    if not is_table_run(folder):
        return frame
    name = own_names(["cluster"], frame.column_names)["cluster"]
    found = np.asarray(load_table(folder).clusters(table.known)["cluster"])
    return frame.append_column(name, [[str(k) for k in found.tolist()]])


def _declared(folder: Path, problems: list[str]) -> Model | None:
    """The model of ``model.json`` without trained weights, to show what it declares."""
    from aevb.loading import from_declaration
    from aevb.runtime.checked_files import read_json

    try:
        return from_declaration(read_json(folder / "model.json"))
    except (ValueError, OSError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        if not problems:  # else they say so already
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

    opened = open_for_page(folder, with_rows=part != "summary", live=live)
    found = section(opened, part, live=live)
    problems = [*opened.problems, *((found or {}).get("problems", []))]
    return to_json({"part": part, "content": found, "problems": problems})


def decode_json(folder: Path, request: dict[str, Any]) -> str:
    """The observed variables for given values of the latents, as JSON, for the server."""
    from aevb.page.decoder import decode
    from aevb.page.html import to_json

    model = _model_of(folder)
    return to_json(_lists(decode(model, **_checked(model, request))))


def _checked(model: Model, request: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a request to decode, of which a browser may have sent anything."""
    import numpy as np

    values, draw, seed = (
        request.get(name, usual) for name, usual in (("values", {}), ("draw", False), ("seed", 0))
    )
    if not isinstance(values, dict):
        raise ValueError("values is an object: the numbers of each variable by its name.")
    if not isinstance(draw, bool):
        raise ValueError("draw is true or false.")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ValueError("seed is a whole number from 0 to 2**63 − 1.")
    found, graph = {}, model.graph
    for name, value in values.items():
        try:
            array = np.asarray(value, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"The value of {name[:80]} is no array of numbers.") from None
        size = graph.size(name) if name in graph.stochastic or name in graph.given else array.size
        if array.size > MOST_DECODED * max(1, size):
            raise ValueError(f"{name} has more than {MOST_DECODED} rows.")
        found[name] = array
    return {"values": found, "draw": draw, "seed": seed}


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


def comparison_json(runs: dict[str, Path]) -> str:
    """The comparison of several runs, by name, as JSON, for the server."""
    from aevb.page.html import to_json

    opened = [open_for_page(folder, name=name) for name, folder in runs.items()]
    return to_json(comparison_of(opened))


def comparison_of(opened: list[Opened], data: str | None = None) -> dict[str, Any] | None:
    """Compare runs on the rows that they held out, or on those of a file.

    Runs that cannot be read are left out, and a sentence says so.
    """
    from aevb.cli.compare import compare_runs
    from aevb.comparison import Comparison
    from aevb.evidence import SAMPLES
    from aevb.page.compared import compared

    whole = [one for one in opened if one.subject is not None]
    lost = [one for one in opened if one.subject is None]
    notes = [
        f"{one.name} is left out: {next(iter(one.problems), 'it has no trained model.')}"
        for one in lost
    ]
    found: Comparison | Exception
    try:
        if len(whole) < 2:
            raise ValueError("Fewer than two of them can be read.")
        samples = _samples(whole)
        found = compare_runs(
            {one.name: one.folder for one in whole if one.folder is not None}, data, samples=samples
        )
        if samples is not None and any(one.samples for one in found.models):
            notes.append(
                f"The models are large, so their log p is estimated with {samples} samples per row "
                f"instead of {SAMPLES:,}. `aevb compare --samples N` takes more."
            )
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        found = error
    return compared(opened, found, notes)


def _samples(opened: list[Opened]) -> int | None:
    """The importance samples per row of a comparison; None for the usual number."""
    import torch

    from aevb.evidence import SAMPLES
    from aevb.page.measures import work_of

    work = 0.0
    for one in opened:
        if one.subject is not None:
            rows = one.subject.source(len(one.subject.splits) - 1)
            work += rows.n * SAMPLES * work_of(one.subject.model, rows.take(torch.arange(1)))
    return FEW_SAMPLES if work > WORK else None
