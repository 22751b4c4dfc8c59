"""Load data by name for the command line: a built-in data set or a file, prepared for one model.

A :class:`Recipe` records how the rows were prepared. The run's folder keeps it as ``data.json``, so
that later commands prepare rows in the same way, with the same means and scales.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints

from aevb.data.builtin import IMAGES, NAMES, Images, factor_analysis
from aevb.data.files import layout, read_file, read_lines
from aevb.data.grey_levels import DISCRETE, INVERSES, Fresh
from aevb.data.image_folders import classes_of, images, is_image_folder, shape_of
from aevb.data.long_tables import Lines
from aevb.data.mapped_rows import one_column, some_rows
from aevb.data.preparation import (
    CHOICES,
    InfiniteError,
    Standardised,
    default_preparation,
    parts,
    prepare_levels,
    standardise,
)
from aevb.data.tables import is_table
from aevb.declare.graph import Graph
from aevb.estimate.batch import holds_bytes, holds_pixels, image_shape
from aevb.estimate.keys import LENGTHS, STEPS, masks_of
from aevb.estimate.places import Placed, places_of
from aevb.runtime.checked_files import LONGEST_BESIDE, DataWarning, read_json


@dataclass(frozen=True)
class Recipe:
    """Record of where rows came from and how they were prepared."""

    data: str
    prepare: str | None = None  # the preparation of the first observed variable
    levels: int | None = None  # its number of grey levels
    mean: list[float] | None = None  # what standardise subtracted from its columns,
    scale: list[float] | None = None  # and what it divided them by
    others: Mapping[str, Mapping[str, list[float]]] | None = (
        None  # mean and scale of the other observed variables that were standardised
    )
    columns: Mapping[str, list[str]] | None = None  # the columns of a table, per variable
    long: bool | None = None  # whether that table had one line per step
    image: list[int] | None = None  # height and width, if rows were images
    folder: bool | None = None  # whether the data are a folder of images,
    classes: list[str] | None = None  # and its subfolders
    steps: int | None = None  # the length of the longest sequence
    validation: str | None = None  # a file of validation rows,
    hold_out: float = 0.0  # or the fraction of rows held out for validation,
    split: int = 0  # and the seed that chose them
    seed: int = 0  # the seed of random preparations
    missing: list[Any] | None = None  # numbers and words that mark missing cells of a table
    gaps: str | None = None  # "missing" if steps that a table lacks are missing ones
    known: list[str] | None = (
        None  # the variables, latents included, that the training rows have values of
    )
    digest: str | None = None  # a hash of the modelled cells of a table, held-out rows included

    def text(self) -> str:
        return (
            json.dumps(
                {key: value for key, value in asdict(self).items() if value is not None},
                indent=2,
                ensure_ascii=False,
            )
            + "\n"
        )

    @classmethod
    def read(cls, folder: Path) -> Recipe | None:
        """Read the recipe of a run; None for a run that was not trained by the command line."""
        path = folder / "data.json"
        if not path.is_file():
            return None
        try:
            record = read_json(path, LONGEST_BESIDE)
            # The records of older runs have other keys.
            before = {"split": record.get("seed", 0)} | (
                {"known": list(record["columns"])} if record.get("columns") else {}
            )
            return cls(
                **before | record
            )._checked()  # older runs chose the held-out rows by the run's seed
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged: {str(error).rstrip('.')}. Delete it, and give --prepare."
            ) from None

    def _checked(self) -> Recipe:
        """Return the recipe itself; raise ValueError if a field has a wrong type or value."""
        for name, fits in _KINDS.items():
            value = getattr(self, name)
            if not (fits(value) if value is not None else name != "data"):
                raise ValueError(f"{name} is {json.dumps(value)[:60]}")
        if self.prepare is not None and self.prepare not in CHOICES:
            raise ValueError(f"prepare is {self.prepare[:60]!r}")
        for mean, scale in [
            (self.mean, self.scale),
            *((table.get("mean"), table.get("scale")) for table in (self.others or {}).values()),
        ]:
            if (mean is None) != (scale is None) or len(mean or ()) != len(scale or ()):
                raise ValueError("mean and scale are of different columns")
        return self

    def undo(self, x: np.ndarray, other: str | None = None) -> np.ndarray:
        """Convert values back to the units of the data.

        They are values of the first observed variable, or of ``other``.
        """
        numbers, how = self.numbers(other), (self.prepare or "").partition("-")[0]
        if numbers is not None:
            return numbers.undo(x)
        if other is not None or how not in INVERSES:
            return x
        slope, offset = INVERSES[how](self.levels or 256)
        return x * slope + offset

    def numbers(self, other: str | None = None) -> Standardised | None:
        """Return the mean and scale that standardised the first observed variable, or ``other``."""
        found = (
            {"mean": self.mean, "scale": self.scale}
            if other is None
            else (self.others or {}).get(other, {})
        )
        return (
            None
            if found.get("mean") is None
            else Standardised(np.empty(0), np.array(found["mean"]), np.array(found["scale"]))
        )

    def spread(self, other: str | None = None) -> np.ndarray | None:
        """Return, per column, how many units of the data equal 1 in the prepared values.

        The variable is the first observed one, or ``other``. None if the units did not change.
        """
        if self.prepare == "standardise":
            numbers = self.numbers(other)
            return None if numbers is None else numbers.scale
        how = (self.prepare or "").partition("-")[0]
        if other is not None or how not in INVERSES or how in DISCRETE:
            return None
        slope, _ = INVERSES[how](self.levels or 256)
        return np.array([float(slope)])


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: _is(int)(value) and low <= value <= high


def _finite(value: Any) -> bool:
    return _list_of(int, float)(value) and bool(np.isfinite(np.array(value, dtype=float)).all())


def _list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(_is(*kinds), value))


def _table_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(fits, value.values()))


_KINDS: dict[str, Callable[[Any], bool]] = {  # checks of a recipe's fields
    **dict.fromkeys(("data", "prepare", "validation", "digest"), _is(str)),
    "gaps": lambda value: value == "missing",
    **dict.fromkeys(("split", "seed"), _whole(0, 2**63 - 1)),
    "levels": _whole(2, 2**53),
    "steps": _whole(1, 2**24),
    "mean": _finite,
    "scale": lambda value: _finite(value) and all(number > 0 for number in value),
    "hold_out": lambda value: _is(int, float)(value) and 0 <= value < 1,
    **dict.fromkeys(("long", "folder"), _is(bool)),
    "image": lambda value: (
        isinstance(value, list) and len(value) == 2 and all(map(_whole(1, 2**20), value))
    ),
    "columns": _table_of(_list_of(str)),
    "known": _list_of(str),
    "classes": _list_of(str),
    "missing": lambda value: (
        isinstance(value, list) and all(isinstance(mark, str) or _finite([mark]) for mark in value)
    ),
    "others": _table_of(_table_of(_finite)),
}


def in_units(recipe: Recipe | None, graph: Graph, name: str, value: np.ndarray) -> np.ndarray:
    """Convert values of a variable from the model's units to the units of the data."""
    return (
        value if recipe is None else recipe.undo(value, None if name == graph.observed[0] else name)
    )


def log_spreads(recipe: Recipe, graph: Graph) -> dict[str, np.ndarray]:
    """Return log spread for every observed variable whose density is not in the units of its data.

    The spread is the number of data units that equal 1 in the model. Shape [d], or [T, 1, 1].
    """
    found = {}
    for name in graph.observed:
        spread = recipe.spread(None if name == graph.observed[0] else name)
        if spread is not None and not any(
            entry.spec.support.is_discrete for entry in graph.p[name].values()
        ):
            # This is 0 for a run in which each step has its own spread.
            each = graph.size(name) // spread.size
            found[name] = np.log(np.tile(spread, each) if each else spread[:, None, None])
    return found


def log_jacobian(recipe: Recipe, graph: Graph, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, per variable and row, what to subtract from log p to get the units of the data, [N].

    A variable x = mean + spread · x' has log p(x) = log p(x') − Σ log spread. The sum is over the
    known entries at real steps.
    """
    found = {}
    for name, spread in log_spreads(recipe, graph).items():
        logs = torch.tensor(spread, device=batch[name].device).expand(batch[name].shape)
        for mask in masks_of(batch, name, timed=graph.timed[name]):
            logs = torch.where(mask, logs, 0.0)
        found[name] = logs.sum((0, 2))
    return found


@dataclass(frozen=True)
class Split:
    """Rows for one model, and their labels if the data have any.

    The labels are there whether or not the model reads them.
    """

    data: dict[str, Any]
    labels: np.ndarray | None = None
    labels_of: str | None = (
        None  # the latent of the labels, if they are for comparison only and not data
    )
    raw: dict[str, Any] = field(default_factory=dict)  # the rows before preparation


@dataclass(frozen=True)
class Loaded:
    """Training rows, test rows if there are any, and how they were prepared."""

    train: Split
    test: Split | None
    recipe: Recipe
    lines: Lines | None = (
        None  # of a table with one line per step: which lines belong to which row, held out or not
    )
    notes: tuple[str, ...] = ()  # sentences on the columns and units of the variables, to print


def sizes(
    name: str,
    graph: Graph,
    missing: Sequence[float] = (),
    *,
    images: bool = False,
    size: tuple[int, int] | None = None,
) -> dict[str, int | tuple[int, ...]]:
    """Return the sizes of a zoo model's variables: x from the columns, y from the labels.

    ``images`` asks for the shape (channels, height, width) of images. Images of files, which may
    have colours, always get it; ``size`` is the size that they are resized to.
    """
    if name == "fa":
        return {"x": 3}
    if name in IMAGES:
        shape = IMAGES[name]()[0].shape
        if images and not graph.timed["x"]:
            return {"x": shape}
        return {"x": shape[2] if graph.timed["x"] else shape[1] * shape[2]}
    found: dict[str, int | tuple[int, ...]] = {}
    if is_image_folder(Path(name)):
        shape, classes = shape_of(Path(name), size), classes_of(Path(name))
        found["x"] = shape[2] if graph.timed["x"] else shape
        if classes:
            found["y"] = len(classes)
        return found
    columns, long = layout(Path(name), graph)
    x = graph.observed[0]
    if columns is not None and list(columns) == [x] and not long and not graph.timed[x]:
        return {x: len(columns[x])}  # the header says it; the rows are read once, by load
    for variable, value in read_file(Path(name), graph, check=False, missing=missing).items():
        if variable in graph.shapes:
            rows = (0, *value[0].shape) if isinstance(value, list) else value.shape
            inner = rows[2 if graph.timed[variable] else 1 :]
            image = None if graph.timed[variable] else image_shape(inner)
            if image is not None and (images or (image[0] == 3 and holds_bytes(value))):
                found[variable] = image
                continue
            labels = not inner and variable != graph.observed[0]
            found[variable] = (
                int(max(np.nan_to_num(part, nan=-1).max(initial=-1) for part in parts(value))) + 1
                if labels
                else int(np.prod(inner))
            )
    return found


def load(
    name: str,
    graph: Graph,
    *,
    prepare: str | None = None,
    seed: int = 0,
    validation: str | None = None,
    hold_out: float = 0.0,
    split: int = 0,
    missing: Sequence[float] | None = None,
    gaps: str | None = None,
    like: Recipe | None = None,
    size: tuple[int, int] | None = None,
) -> Loaded:
    """Load the rows of a built-in data set or of a file, prepared for a model.

    A built-in data set has test rows. For a file, ``validation`` names a file of test rows, or
    ``hold_out`` gives the fraction of rows to hold out. Which rows are held out depends on
    ``split`` only, so runs with different seeds are evaluated on the same rows. ``missing`` are
    numbers that mark missing cells of a table. ``gaps="missing"`` adds the steps that a table with
    times lacks, as missing ones. ``like`` is the recipe of a run: rows are then
    prepared like its training rows. If these had no values of a latent, values in the new rows are
    labels for comparison, not data, because the run numbered its classes itself. ``size`` is the
    (height, width) to which the files of a folder of images are resized.
    """
    if size is not None and not is_image_folder(Path(name)):
        raise ValueError(f"--size is for a folder of images, but {name} is none. Leave it out.")
    if prepare is not None and prepare not in (*CHOICES, "none"):
        raise ValueError(
            f"Unknown preparation {prepare!r}. Choose one of {', '.join((*CHOICES, 'none'))}."
        )
    if not 0 <= hold_out < 1:
        raise ValueError(
            f"hold_out is a fraction of the rows, from 0 to less than 1; got {hold_out}."
        )
    x = graph.observed[0]
    recipe = Recipe(name, validation=validation, hold_out=hold_out, split=split, seed=seed)
    if like is not None:
        recipe = (
            like if like.data == name else replace(like, data=name, validation=None, hold_out=0.0)
        )
    if missing:
        recipe = replace(recipe, missing=[float(number) for number in missing])
    if gaps is not None:
        if gaps != "missing":
            raise ValueError(f'gaps is "missing" or left out, got {gaps!r}.')
        if name in NAMES:
            raise ValueError(_no_times(name))
        recipe = replace(recipe, gaps=gaps)
    if recipe.missing and name in NAMES:
        raise ValueError(f"{name} has no missing cells; --missing is for tables.")
    if name in NAMES and (recipe.hold_out or recipe.validation):
        raise ValueError(
            f"{name} has its own test rows; --validation and --hold-out are for files."
        )
    if size is not None:
        recipe = replace(recipe, image=list(size))
    train, test, found, lines = (
        (*_builtin(name, graph, recipe), None) if name in NAMES else _file(name, graph, recipe)
    )
    if gaps is not None and (lines is None or lines.keys.step is None):
        raise ValueError(_no_times(name))
    recipe = replace(found, prepare=prepare or found.prepare, levels=recipe.levels or found.levels)
    if recipe.prepare is None and name in IMAGES:
        recipe = replace(recipe, prepare=default_preparation(graph, x))
    if recipe.prepare in (None, "none"):
        plain_test = None if test is None else replace(test, raw=test.data)
        return Loaded(
            replace(train, raw=train.data), plain_test, replace(recipe, prepare=None), lines
        )
    if recipe.prepare == "standardise":
        if recipe.mean is None and recipe.others is None:
            recipe = _measured(recipe, graph, train.data)
    elif recipe.levels is None:
        recipe = replace(recipe, levels=_count_levels(train.data[x]))

    def prepared(split: Split, offset: int) -> Split:
        if (like is not None or offset) and _is_prepared(recipe, split.data[x]):
            of = recipe.validation if offset and recipe.validation else name
            warnings.warn(
                DataWarning(
                    f"{of} holds numbers from 0 to 1, which are taken as prepared "
                    f"({recipe.prepare}), not as grey levels 0 … {(recipe.levels or 256) - 1}."
                ),
                stacklevel=3,
            )
            return replace(split, raw=split.data)
        if recipe.prepare == "standardise":
            done = _standardised(recipe, graph, split.data)
        else:
            done = {
                x: prepare_levels(
                    str(recipe.prepare),
                    split.data[x],
                    recipe.levels or 256,
                    seed=recipe.seed + offset,
                )
            }
        return replace(split, data=split.data | done, raw=split.data)

    rows, held_out = prepared(train, 0), None if test is None else prepared(test, 1)
    if rows.data is train.data:  # the file is in the units of the model
        recipe = replace(recipe, prepare=None)
    return Loaded(rows, held_out, recipe, lines)


def _is_prepared(recipe: Recipe, x: Any) -> bool:
    """Whether rows for a model of grey levels are prepared already: numbers from 0 to 1."""
    how = str(recipe.prepare).partition("-")[0]
    if how not in INVERSES or how == "counts" or (recipe.levels or 256) == 2:
        return False
    if any(np.asarray(part[:1]).dtype.kind != "f" for part in (x if isinstance(x, list) else [x])):
        return False
    known = (part[~np.isnan(part)] for part in parts(x))
    return all(part.min(initial=0.0) >= 0 and part.max(initial=0.0) <= 1 for part in known)


def _measured(recipe: Recipe, graph: Graph, data: Mapping[str, Any]) -> Recipe:
    """Add the mean and scale of every real-valued observed variable to the recipe."""
    found = {}
    for name in graph.observed:
        if name in data and all(
            entry.spec.support in (constraints.real, constraints.real_vector)
            for entry in graph.p[name].values()
        ):
            try:
                record = standardise(_real(graph, data, name))
            except InfiniteError as error:
                row, step, column = error.place
                where = places_of(data).first(
                    row, name, step if graph.timed[name] else None, column
                )
                raise ValueError(
                    f"{name}: standardise takes finite numbers, but not all are ({where}: "
                    f"{error.value}). {error.fix}"
                ) from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            found[name] = {"mean": record.mean.tolist(), "scale": record.scale.tolist()}
    if not found:
        rules = [(name, entry) for name in graph.observed for entry in graph.p[name].values()]
        families = ", ".join(
            f"{name if len(graph.p[name]) == 1 else entry.key.target} a {type(entry.spec).__name__}"
            for name, entry in rules
        )
        raise ValueError(
            f"standardise is for variables that may be any real number, but p gives {families}. "
            f"Leave out --prepare standardise."
        )
    first = found.pop(graph.observed[0], {"mean": None, "scale": None})
    return replace(recipe, **first, others=found or None)


def _standardised(recipe: Recipe, graph: Graph, data: Mapping[str, Any]) -> dict[str, Any]:
    """Standardise variables with the means and scales of a recipe."""
    records = {
        name: recipe.numbers(None if name == graph.observed[0] else name)
        for name in graph.observed
        if name in data
    }
    return {
        name: standardise(_steps(graph, name, data[name]), like=record)
        for name, record in records.items()
        if record is not None
    }


def _no_times(name: str) -> str:
    return (
        f"{name} has no times, so no holes between them can be filled. Leave out --gaps (gaps=), "
        f"or number the steps in a column step of a table with one line per step."
    )


def _builtin(name: str, graph: Graph, recipe: Recipe) -> tuple[Split, Split, Recipe]:
    x = graph.observed[0]
    if name == "fa":
        return Split({x: factor_analysis(seed=0)}), Split({x: factor_analysis(seed=1)}), recipe
    both = IMAGES[name]()

    def split(images: Images) -> Split:
        pixels = images.pixels if graph.timed[x] else images.pixels.reshape(len(images.pixels), -1)
        data: dict[str, Any] = {x: pixels}
        if len(graph.given) == 1:
            data[next(iter(graph.given))] = images.labels
        return Split(data, images.labels)

    shape = both[0].pixels.shape
    described = replace(
        recipe,
        levels=both[0].levels,
        image=list(shape[1:]),
        steps=shape[1] if graph.timed[x] else None,
        long=None,
    )
    return split(both[0]), split(both[1]), described


def _file(
    name: str, graph: Graph, recipe: Recipe
) -> tuple[Split, Split | None, Recipe, Lines | None]:
    x, path = graph.observed[0], Path(name)
    lines, labels, test_labels = None, None, None
    if folder := is_image_folder(path):
        data, labels, recipe = _images(path, graph, recipe)
    else:
        recipe = _laid_out(path, graph, recipe)
        data, lines = _read(path, graph, recipe.columns, recipe.missing, recipe.gaps)
        shape = data[x][0].shape if isinstance(data[x], list) else data[x].shape[1:]
        image, flat = image_shape(shape), len(graph.shapes[x]) == 1
        grey = image is not None and len(shape) == 2 and flat
        bytes_ = image is not None and holds_bytes(data[x]) and not flat
        if image is not None and not graph.timed[x] and (grey or bytes_):
            recipe = replace(recipe, image=list(image[1:]))
            if holds_bytes(data[x]) and recipe.known is None:
                recipe = replace(recipe, prepare=default_preparation(graph, x))
        elif graph.timed[x] and recipe.known is None and holds_pixels(graph, x, data[x]):
            recipe = replace(recipe, prepare=default_preparation(graph, x))
    data = _flat(graph, x, data)
    test = None
    if recipe.validation is not None:
        if recipe.hold_out:
            raise ValueError("Validation rows come from --validation or from --hold-out, not both.")
        other = Path(recipe.validation)
        if is_image_folder(other):
            rows, test_labels, _ = _images(other, graph, recipe)
        else:
            columns = _laid_out(other, graph, recipe).columns
            rows = _read(other, graph, columns, recipe.missing, recipe.gaps)[0]
        test = _flat(graph, x, rows)
    elif recipe.hold_out:
        n = len(data[x])
        held = max(1, round(n * recipe.hold_out))
        if held >= n:
            raise ValueError(
                f"{name} has {n} row{'s' * (n != 1)}: holding out {held} leaves none to train on."
            )
        order = np.random.default_rng(recipe.split).permutation(n)
        train_rows, test_rows = np.sort(order[held:]), np.sort(order[:held])
        places = places_of(data)
        data, test = (
            Placed({key: some_rows(value, rows) for key, value in data.items()}, places.some(rows))
            for rows in (train_rows, test_rows)
        )
        if labels is not None:
            labels, test_labels = labels[train_rows], labels[test_rows]
    found = [_longest(data, key) for key in graph.observed if graph.timed[key]]
    longest = max(found, default=0) or None
    recipe = replace(recipe, steps=longest)
    recipe = (
        replace(recipe, known=[name for name in data if name in graph.shapes])
        if recipe.known is None
        else recipe
    )
    train, held_out = (
        None if rows is None else _labelled(rows, graph, recipe) for rows in (data, test)
    )
    assert train is not None
    if folder:
        train = replace(train, labels=labels)
        held_out = held_out and replace(held_out, labels=test_labels)
    return train, held_out, recipe, lines


def _images(
    path: Path, graph: Graph, recipe: Recipe
) -> tuple[dict[str, Any], np.ndarray | None, Recipe]:
    """Read a folder of images: the data, the labels, and the recipe with size and classes.

    The size and the classes of the recipe are those of training. A given variable gets the labels.
    """
    x = graph.observed[0]
    size = None if recipe.image is None else (recipe.image[0], recipe.image[1])
    declared = graph.shapes[x] if len(graph.shapes[x]) == 3 else None
    colour = declared[0] == 3 if declared else False if graph.timed[x] else None
    found = images(path, size=size, colour=colour, classes=recipe.classes)
    data: dict[str, Any] = {x: found.pixels}
    if len(graph.given) == 1 and found.names:
        data[next(iter(graph.given))] = found.labels
    classes = list(found.names) or None
    size_of_all = list(found.shape[1:])
    recipe = replace(recipe, folder=True, image=size_of_all, classes=classes, levels=256)
    if recipe.known is None:
        recipe = replace(recipe, prepare=default_preparation(graph, x))
    return data, found.labels if classes else None, recipe


def _laid_out(path: Path, graph: Graph, recipe: Recipe) -> Recipe:
    """Add the columns of this table to the recipe.

    They are the columns of training if both tables have the same layout: one line per row, or one
    line per step.
    """
    columns, long = layout(path, graph)
    kept = columns is None or (recipe.columns and bool(recipe.long) == long)
    return replace(recipe, columns=recipe.columns if kept else columns, long=long or None)


def _read(
    path: Path,
    graph: Graph,
    columns: Mapping[str, list[str]] | None,
    missing: Sequence[float] | None,
    gaps: str | None,
) -> tuple[dict[str, Any], Lines | None]:
    data, lines = read_lines(
        path,
        graph,
        columns=columns if is_table(path) else None,
        missing=missing or (),
        fill=gaps is not None,
    )
    if graph.observed[0] not in data:
        raise ValueError(f"{path} holds {', '.join(data)}, but not {graph.observed[0]}.")
    return data, lines


def _flat(graph: Graph, x: str, data: dict[str, Any]) -> dict[str, Any]:
    """Flatten images [N, height, width] to rows if the variable is declared flat."""
    value = data[x]
    flat = (
        not graph.timed[x]
        and isinstance(value, np.ndarray)
        and value.ndim > 2
        and len(graph.shapes[x]) == 1
    )
    return data | {x: value.reshape(len(value), -1)} if flat else data


def _labelled(data: dict[str, Any], graph: Graph, recipe: Recipe) -> Split:
    latents = {name: value for name, value in data.items() if name in graph.latents}
    labels = {
        name: np.asarray(value)
        for name, value in latents.items()
        if not isinstance(value, list) and np.ndim(value) == 1
    }
    new = [name for name in latents if name not in (recipe.known or ())]
    for name in new:
        if name not in labels:
            warnings.warn(
                f"The values of {name} are not used, because the training rows of this run had "
                f"none.",
                DataWarning,
                2,
            )
    first = next(iter(labels), None)
    kept = Placed({name: value for name, value in data.items() if name not in new}, places_of(data))
    return Split(kept, labels.get(first or ""), labels_of=first if first in new else None)


class _Real:
    """Sequences with NaN in the padding beyond each end; those of a file are read when indexed."""

    def __init__(self, raw: Any, inside: np.ndarray) -> None:
        self.raw, self.inside = raw, inside
        self.shape, self.ndim = raw.shape, raw.ndim

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any) -> np.ndarray:
        value, inside = np.asarray(self.raw[rows]), self.inside[rows]
        return np.where(inside.reshape(*inside.shape, *[1] * (value.ndim - 2)), value, np.nan)


def _steps(graph: Graph, name: str, value: Any) -> Any:
    """Return values whose last axis holds the columns.

    [N, T] of one number per step becomes [N, T, 1].
    """
    axes = 1 + value[0].ndim if isinstance(value, list) else value.ndim
    return one_column(value) if graph.timed[name] and graph.size(name) == 1 and axes == 2 else value


def _real(graph: Graph, data: Mapping[str, Any], x: str) -> Any:
    """Return the values of a variable with NaN at padded steps."""
    value, lengths, steps = _steps(graph, x, data[x]), data.get(LENGTHS), data.get(STEPS)
    if isinstance(value, list) or (lengths is None and steps is None):
        return value
    return _Real(
        value,
        np.asarray(steps).astype(bool)
        if steps is not None
        else np.arange(value.shape[1]) < np.asarray(lengths)[:, None],
    )


def _count_levels(x: Any) -> int:
    if not isinstance(x, list) and np.asarray(x[:1]).dtype == np.uint8:
        return 256
    highest = max((float(part[~np.isnan(part)].max(initial=0.0)) for part in parts(x)), default=0.0)
    if highest != int(highest):
        raise ValueError(
            f"Grey levels are whole numbers from 0, but the data go up to {highest}. Use "
            f"--prepare none to leave them unchanged."
        )
    return max(2, int(highest) + 1)


def plain(value: Any) -> np.ndarray:
    """Return a prepared variable as an array; :class:`Fresh` levels are drawn once."""
    return value.once() if isinstance(value, Fresh) else np.asarray(value)


def clustering_accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of rows whose cluster matches their label.

    Clusters are matched to labels one-to-one, in the best way.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    labels = np.unique(labels, return_inverse=True)[1]  # labels may be any numbers
    table = np.zeros((predicted.max() + 1, labels.max() + 1))
    np.add.at(table, (predicted, labels), 1)
    return float(table[linear_sum_assignment(-table)].sum() / len(labels))


def _longest(data: Mapping[str, Any], name: str) -> int:
    """Return the number of steps of the longest sequence; 0 if the file does not have it."""
    value = data.get(name)
    if value is None or isinstance(value, list):
        return max(map(len, value)) if value else 0
    if np.ndim(value) < 2:
        raise ValueError(
            f"{name} is a sequence ({name}[t]), but has one axis only, of {len(value)} numbers. If "
            f"they are the steps of one sequence, save {name}.reshape(1, {len(value)}, 1)."
        )
    return int(value.shape[1])
