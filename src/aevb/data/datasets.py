"""Data by name, as the command line asks for it: a built-in set or a file, prepared for one model.

What was done to the rows is a :class:`Recipe`, kept beside a run as ``data.json``: whatever is done with the run afterwards prepares
its rows in the same way, with the same numbers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints

from aevb.data.builtin import Images, digits, factor_analysis, mnist
from aevb.data.files import layout, read_file, read_lines
from aevb.data.grey_levels import Fresh
from aevb.data.long_tables import Lines
from aevb.data.mapped_rows import one_column, some_rows
from aevb.data.preparation import CHOICES, InfiniteError, Standardised, default_preparation, parts, prepare_levels, standardise
from aevb.data.tables import TABLES
from aevb.declare.graph import Graph
from aevb.estimate.keys import mask_of
from aevb.estimate.places import Placed, places_of
from aevb.runtime.checked_files import LONGEST_BESIDE, DataWarning, read_json

IMAGES: dict[str, Callable[[], tuple[Images, Images]]] = {"digits": digits, "mnist": mnist, "fashion": partial(mnist, "fashion")}
NAMES = ("fa", *IMAGES)


@dataclass(frozen=True)
class Recipe:
    """Where rows came from and what was done to them."""

    data: str
    prepare: str | None = None  # what was done to the first observed variable
    levels: int | None = None  # how many grey levels it had
    mean: list[float] | None = None  # what was subtracted from its columns,
    scale: list[float] | None = None  # and what they were divided by
    others: Mapping[str, Mapping[str, list[float]]] | None = None  # mean and scale of the other observed variables that were standardised
    columns: Mapping[str, list[str]] | None = None  # the columns of a table that each variable has
    long: bool | None = None  # whether that table had a line a step
    image: list[int] | None = None  # height and width, if rows were images
    steps: int | None = None  # the length of the longest sequence
    validation: str | None = None  # a file of test rows,
    hold_out: float = 0.0  # or the share of rows that are,
    split: int = 0  # drawn by this seed
    seed: int = 0  # of what is drawn in preparing the rows
    missing: list[float] | None = None  # numbers that mark missing cells of a table
    known: list[str] | None = None  # the variables that the training rows have values of, latents among them

    def text(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Recipe | None:
        """The recipe of a run; None for one that was trained without the command line."""
        path = folder / "data.json"
        if not path.is_file():
            return None
        try:
            record = read_json(path, LONGEST_BESIDE)
            before = {"split": record.get("seed", 0)} | ({"known": list(record["columns"])} if record.get("columns") else {})  # of older runs
            return cls(**before | record)._checked()  # before the split had a seed, it was drawn by the run's
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {str(error).rstrip('.')}. Delete it, and say --prepare yourself.") from None

    def _checked(self) -> Recipe:
        """The same; a field of another kind than it has is a ValueError."""
        for name, fits in _KINDS.items():
            value = getattr(self, name)
            if not (fits(value) if value is not None else name != "data"):
                raise ValueError(f"{name} is {json.dumps(value)[:60]}")
        if self.prepare is not None and self.prepare not in CHOICES:
            raise ValueError(f"prepare is {self.prepare[:60]!r}")
        for mean, scale in [(self.mean, self.scale), *((table.get("mean"), table.get("scale")) for table in (self.others or {}).values())]:
            if (mean is None) != (scale is None) or len(mean or ()) != len(scale or ()):
                raise ValueError("mean and scale are of different columns")
        return self

    def undo(self, x: np.ndarray, other: str | None = None) -> np.ndarray:
        """Values of the first observed variable, or of another, as a model has them, in the units of the data."""
        numbers, how = self.numbers(other), (self.prepare or "").partition("-")[0]
        if numbers is not None:
            return numbers.undo(x)
        if other is not None:
            return x
        if how == "dequantise":
            return x * (self.levels or 256) - 0.5
        return x * ((self.levels or 256) - 1) if how in ("scale", "binarise", "threshold") else x

    def numbers(self, other: str | None = None) -> Standardised | None:
        """The numbers that the first observed variable, or another, was standardised with."""
        found = {"mean": self.mean, "scale": self.scale} if other is None else (self.others or {}).get(other, {})
        return None if found.get("mean") is None else Standardised(np.empty(0), np.array(found["mean"]), np.array(found["scale"]))

    def spread(self, other: str | None = None) -> np.ndarray | None:
        """How many units of the data are 1 in the values of the first observed variable, or of another, by column; None where they are its units."""
        if self.prepare == "standardise":
            numbers = self.numbers(other)
            return None if numbers is None else numbers.scale
        levels = {"dequantise": self.levels or 256, "scale": (self.levels or 256) - 1}.get((self.prepare or "").partition("-")[0])
        return None if levels is None or other is not None else np.array([float(levels)])


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


_KINDS: dict[str, Callable[[Any], bool]] = {  # what the fields of a recipe are
    **dict.fromkeys(("data", "prepare", "validation"), _is(str)),
    **dict.fromkeys(("split", "seed"), _whole(0, 2**63 - 1)),
    "levels": _whole(2, 2**53),
    "steps": _whole(1, 2**24),
    "mean": _finite,
    "scale": lambda value: _finite(value) and all(number > 0 for number in value),
    "hold_out": lambda value: _is(int, float)(value) and 0 <= value < 1,
    "long": _is(bool),
    "image": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_whole(1, 2**20), value)),
    "columns": _table_of(_list_of(str)),
    "known": _list_of(str),
    "missing": _finite,
    "others": _table_of(_table_of(_finite)),
}


def in_units(recipe: Recipe | None, graph: Graph, name: str, value: np.ndarray) -> np.ndarray:
    """Values of a variable as a model has them, in the units of the data."""
    return value if recipe is None else recipe.undo(value, None if name == graph.observed[0] else name)


def log_spreads(recipe: Recipe, graph: Graph) -> dict[str, np.ndarray]:
    """Log of how many units of the data are 1, for every observed variable whose density is in other units than its data: [d], or [T, 1, 1]."""
    found = {}
    for name in graph.observed:
        spread = recipe.spread(None if name == graph.observed[0] else name)
        if spread is not None and not any(entry.spec.support.is_discrete for entry in graph.p[name].values()):
            each = graph.size(name) // spread.size  # 0 for a run of which every step had a spread of its own
            found[name] = np.log(np.tile(spread, each) if each else spread[:, None, None])
    return found


def log_jacobian(recipe: Recipe, graph: Graph, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By how much log p of each row's values in the units of the data is lower than in the model's, by variable, [N].

    A variable x = mean + spread · x' has log p(x) = log p(x') − Σ log spread, a sum over the entries that are known, at real steps.
    """
    found = {}
    for name, spread in log_spreads(recipe, graph).items():
        logs = torch.tensor(spread, device=batch[name].device).expand(batch[name].shape)
        for there in (mask_of(name), *(["steps"] if graph.timed[name] else [])):
            logs = torch.where(batch[there], logs, 0.0) if there in batch else logs
        found[name] = logs.sum((0, 2))
    return found


@dataclass(frozen=True)
class Split:
    """Rows for one model, and labels where the data have some (whether or not the model reads them)."""

    data: dict[str, Any]
    labels: np.ndarray | None = None
    labels_of: str | None = None  # the latent whose labels these are, where they are compared with and are no data
    raw: dict[str, Any] = field(default_factory=dict)  # as they were before preparation


@dataclass(frozen=True)
class Loaded:
    """Training rows, test rows where there are some, and how they were prepared."""

    train: Split
    test: Split | None
    recipe: Recipe
    lines: Lines | None = None  # of a table with a line a step: which of its lines are whose, held out or not


def sizes(name: str, graph: Graph, missing: Sequence[float] = ()) -> dict[str, int]:
    """What data say about the sizes of a zoo model: x from the columns, y from the labels."""
    if name == "fa":
        return {"x": 3}
    if name in IMAGES:
        pixels = IMAGES[name]()[0].pixels
        return {"x": pixels.shape[2] if graph.timed["x"] else pixels.shape[1] * pixels.shape[2]}
    found = {}
    for variable, value in read_file(Path(name), graph, check=False, missing=missing).items():
        if variable in graph.shapes:
            shape = (0, *value[0].shape) if isinstance(value, list) else value.shape
            inner = shape[2 if graph.timed[variable] else 1 :]
            labels = not inner and variable != graph.observed[0]
            found[variable] = int(np.nanmax(np.concatenate(value) if isinstance(value, list) else value)) + 1 if labels else int(np.prod(inner))
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
    like: Recipe | None = None,
) -> Loaded:
    """Rows of a built-in set, which has test rows, or of a file, which may be told some: ``validation`` is a file, ``hold_out`` a share.

    ``missing`` are numbers that mark missing cells of a table.
    Which rows are held out depends on ``split`` alone, so that runs of other seeds are judged on the same ones.
    ``like`` is the recipe of a run: rows are then prepared as its training rows were. Values of a latent that these did not have are labels to
    compare with, not data: in such a run the classes have numbers of their own.
    """
    if prepare is not None and prepare not in (*CHOICES, "none"):
        raise ValueError(f"Unknown preparation {prepare!r}. Choose one of {', '.join((*CHOICES, 'none'))}.")
    if not 0 <= hold_out < 1:
        raise ValueError(f"A share of the rows is held out, from 0 to less than 1; got {hold_out}.")
    x = graph.observed[0]
    recipe = Recipe(name, validation=validation, hold_out=hold_out, split=split, seed=seed)
    if like is not None:
        recipe = like if like.data == name else replace(like, data=name, validation=None, hold_out=0.0)
    if missing:
        recipe = replace(recipe, missing=[float(number) for number in missing])
    if recipe.missing and name in NAMES:
        raise ValueError(f"{name} has no missing cells; --missing is for tables.")
    if name in NAMES and (recipe.hold_out or recipe.validation):
        raise ValueError(f"{name} brings its test rows; --validation and --hold-out are for files.")
    train, test, found, lines = (*_builtin(name, graph, recipe), None) if name in NAMES else _file(name, graph, recipe)
    recipe = replace(found, prepare=prepare or recipe.prepare, levels=recipe.levels or found.levels)
    if recipe.prepare is None and name in IMAGES:
        recipe = replace(recipe, prepare=default_preparation(graph, x))
    if recipe.prepare in (None, "none"):
        plain_test = None if test is None else replace(test, raw=test.data)
        return Loaded(replace(train, raw=train.data), plain_test, replace(recipe, prepare=None), lines)
    if recipe.prepare == "standardise":
        if recipe.mean is None and recipe.others is None:
            recipe = _measured(recipe, graph, train.data)
    elif recipe.levels is None:
        recipe = replace(recipe, levels=_count_levels(train.data[x]))

    def prepared(split: Split, offset: int) -> Split:
        if recipe.prepare == "standardise":
            done = _standardised(recipe, graph, split.data)
        else:
            done = {x: prepare_levels(str(recipe.prepare), split.data[x], recipe.levels or 256, seed=recipe.seed + offset)}
        return replace(split, data=split.data | done, raw=split.data)

    return Loaded(prepared(train, 0), None if test is None else prepared(test, 1), recipe, lines)


def _measured(recipe: Recipe, graph: Graph, data: Mapping[str, Any]) -> Recipe:
    """The recipe with the mean and scale of every observed variable that may be any real number."""
    found = {}
    for name in graph.observed:
        if name in data and all(entry.spec.support in (constraints.real, constraints.real_vector) for entry in graph.p[name].values()):
            try:
                record = standardise(_real(graph, data, name))
            except InfiniteError as error:
                row, step, column = error.place
                where = places_of(data).first(row, name, step if graph.timed[name] else None, column)
                raise ValueError(f"{name}: standardise takes finite numbers, but not all are ({where}: {error.value}). {error.fix}") from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            found[name] = {"mean": record.mean.tolist(), "scale": record.scale.tolist()}
    if not found:
        rules = [(name, entry) for name in graph.observed for entry in graph.p[name].values()]
        families = ", ".join(f"{name if len(graph.p[name]) == 1 else entry.key.target} a {type(entry.spec).__name__}" for name, entry in rules)
        raise ValueError(f"standardise is for variables that may be any real number, but p gives {families}. Leave out --prepare standardise.")
    first = found.pop(graph.observed[0], {"mean": None, "scale": None})
    return replace(recipe, **first, others=found or None)


def _standardised(recipe: Recipe, graph: Graph, data: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a recipe standardises, with its numbers."""
    records = {name: recipe.numbers(None if name == graph.observed[0] else name) for name in graph.observed if name in data}
    return {name: standardise(_steps(graph, name, data[name]), like=record) for name, record in records.items() if record is not None}


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
    told = replace(recipe, levels=both[0].levels, image=list(shape[1:]), steps=shape[1] if graph.timed[x] else None, long=None)
    return split(both[0]), split(both[1]), told


def _file(name: str, graph: Graph, recipe: Recipe) -> tuple[Split, Split | None, Recipe, Lines | None]:
    x, path = graph.observed[0], Path(name)
    recipe = _laid_out(path, graph, recipe)
    data, lines = _read(path, graph, recipe.columns, recipe.missing)
    shape = data[x][0].shape if isinstance(data[x], list) else data[x].shape[1:]
    if not graph.timed[x] and len(shape) == 2 and len(graph.shapes[x]) == 1:
        recipe = replace(recipe, image=list(shape))
    data = _flat(graph, x, data)
    test = None
    if recipe.validation is not None:
        if recipe.hold_out:
            raise ValueError("Validation rows come from --validation or from --hold-out, not both.")
        other = Path(recipe.validation)
        test = _flat(graph, x, _read(other, graph, _laid_out(other, graph, recipe).columns, recipe.missing)[0])
    elif recipe.hold_out:
        n = len(data[x])
        held = max(1, round(n * recipe.hold_out))
        if held >= n:
            raise ValueError(f"{name} has {n} row{'s' * (n != 1)}: holding out {held} leaves none to train on.")
        order = np.random.default_rng(recipe.split).permutation(n)
        train_rows, test_rows = np.sort(order[held:]), np.sort(order[:held])
        places = places_of(data)
        data, test = (Placed({key: some_rows(value, rows) for key, value in data.items()}, places.some(rows)) for rows in (train_rows, test_rows))
    timed = next((data[name] for name in graph.observed if graph.timed[name] and name in data), None)
    longest = None if timed is None else max(map(len, timed)) if isinstance(timed, list) else timed.shape[1]
    recipe = replace(recipe, steps=longest)
    recipe = replace(recipe, known=[name for name in data if name in graph.shapes]) if recipe.known is None else recipe
    return _labelled(data, graph, recipe), None if test is None else _labelled(test, graph, recipe), recipe, lines


def _laid_out(path: Path, graph: Graph, recipe: Recipe) -> Recipe:
    """The recipe with the columns of this table, which are those of training where that was laid out alike: a line a row, or a line a step."""
    columns, long = layout(path, graph)
    kept = columns is None or (recipe.columns and bool(recipe.long) == long)
    return replace(recipe, columns=recipe.columns if kept else columns, long=long or None)


def _read(path: Path, graph: Graph, columns: Mapping[str, list[str]] | None, missing: Sequence[float] | None) -> tuple[dict[str, Any], Lines | None]:
    data, lines = read_lines(path, graph, columns=columns if path.suffix in TABLES else None, missing=missing or ())
    if graph.observed[0] not in data:
        raise ValueError(f"{path} holds {', '.join(data)}, but not {graph.observed[0]}.")
    return data, lines


def _flat(graph: Graph, x: str, data: dict[str, Any]) -> dict[str, Any]:
    """Images [N, height, width] as rows, where the variable is flat."""
    value = data[x]
    flat = not graph.timed[x] and isinstance(value, np.ndarray) and value.ndim > 2 and len(graph.shapes[x]) == 1
    return data | {x: value.reshape(len(value), -1)} if flat else data


def _labelled(data: dict[str, Any], graph: Graph, recipe: Recipe) -> Split:
    latents = {name: value for name, value in data.items() if name in graph.latents}
    labels = {name: np.asarray(value) for name, value in latents.items() if not isinstance(value, list) and np.ndim(value) == 1}
    new = [name for name in latents if name not in (recipe.known or ())]
    for name in new:
        if name not in labels:
            warnings.warn(f"The values of {name} are not used: the training rows of this run had none.", DataWarning, 2)
    first = next(iter(labels), None)
    kept = Placed({name: value for name, value in data.items() if name not in new}, places_of(data))
    return Split(kept, labels.get(first or ""), labels_of=first if first in new else None)


class _Real:
    """The values of a sequence, NaN in the padding beyond each row's end; those of a file are read when they are taken."""

    def __init__(self, raw: Any, inside: np.ndarray) -> None:
        self.raw, self.inside = raw, inside
        self.shape, self.ndim = raw.shape, raw.ndim

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any) -> np.ndarray:
        value, inside = np.asarray(self.raw[rows]), self.inside[rows]
        return np.where(inside.reshape(*inside.shape, *[1] * (value.ndim - 2)), value, np.nan)


def _steps(graph: Graph, name: str, value: Any) -> Any:
    """Values whose last axis is the variable's: of a sequence of one number a step, [N, T], the steps are no columns."""
    axes = 1 + value[0].ndim if isinstance(value, list) else value.ndim
    return one_column(value) if graph.timed[name] and graph.size(name) == 1 and axes == 2 else value


def _real(graph: Graph, data: Mapping[str, Any], x: str) -> Any:
    value, lengths, steps = _steps(graph, x, data[x]), data.get("lengths"), data.get("steps")
    if isinstance(value, list) or (lengths is None and steps is None):
        return value
    return _Real(value, np.asarray(steps).astype(bool) if steps is not None else np.arange(value.shape[1]) < np.asarray(lengths)[:, None])


def _count_levels(x: Any) -> int:
    if not isinstance(x, list) and np.asarray(x[:1]).dtype == np.uint8:
        return 256
    highest = max((float(part[~np.isnan(part)].max(initial=0.0)) for part in parts(x)), default=0.0)
    if highest != int(highest):
        raise ValueError(f"Grey levels are whole numbers from 0, but the data go up to {highest}. --prepare none takes them as they are.")
    return max(2, int(highest) + 1)


def plain(value: Any) -> np.ndarray:
    """A prepared variable as an array; what is fresh is drawn once."""
    return value.once() if isinstance(value, Fresh) else np.asarray(value)


def clustering_accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows whose cluster is matched to their label, under the best one-to-one matching."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    labels = np.unique(labels, return_inverse=True)[1]  # whatever numbers they are
    table = np.zeros((predicted.max() + 1, labels.max() + 1))
    np.add.at(table, (predicted, labels), 1)
    return float(table[linear_sum_assignment(-table)].sum() / len(labels))
