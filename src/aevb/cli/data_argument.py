"""The rows that a command works on, prepared as those of the run were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.model_argument import is_run, open_run, resolve

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from aevb.data.datasets import Loaded, Recipe, Split
    from aevb.model import Model

ROWS = 1000  # rows that are taken at a time after training


def recipe_of(run: Path) -> Recipe | None:
    """What was done to a run's rows; None for a run that was trained without the command line."""
    from aevb.data.datasets import Recipe
    from aevb.training.checkpoint import check_beside, latest_manifest

    if (manifest := latest_manifest(run)) is not None:
        check_beside(run, "data.json", manifest)
    return Recipe.read(run)


def whole_of(recipe: Recipe | None) -> Recipe | None:
    """The same, with no rows held out."""
    from dataclasses import replace

    return None if recipe is None else replace(recipe, hold_out=0.0, validation=None)


def load_rows(
    run: Path, model: Model, data: str | None, prepare: str | None, seed: int, *, missing: Sequence[float] | None = None, whole: bool = False
) -> Loaded:
    """The rows that a command works on: those it names, or the run's own, prepared as in training; ``whole`` holds out none of a file."""
    from aevb.data.datasets import load

    recipe = whole_of(recipe_of(run)) if whole else recipe_of(run)
    name = data or (recipe.data if recipe else None)
    if name is None:
        raise ValueError(f"{run} does not say which data it was trained on. Name them: --data digits.")
    try:
        return load(name, model.graph, prepare=prepare, seed=seed, missing=missing, like=recipe)
    except ValueError as error:
        if data is None and not Path(name).exists():
            raise ValueError(f"{error} {run} was trained on {name}, as its data.json says: go to the folder where it lies, or say --data.") from None
        raise


def model_and_rows(
    text: str, data: str | None, prepare: str | None, seed: int, settings: Mapping[str, str], missing: Sequence[float] | None = None
) -> tuple[Model, Loaded]:
    """The model that the command line names, trained if it names a run, and rows for it: those of ``--data``, or the run's own."""
    from aevb.data.datasets import load

    if is_run(text):
        if settings:
            raise ValueError("--set gives arguments to a model of the zoo; a run has its own.")
        model = open_run(Path(text))
        return model, load_rows(Path(text), model, data, prepare, seed, missing=missing)
    if data is None:
        raise ValueError(f"{text} is not the folder of a run, so it has no data of its own. Name them: --data digits.")
    model = resolve(text, data, settings, missing)
    return model, load(data, model.graph, prepare=prepare, seed=seed, missing=missing)


def which_rows(loaded: Loaded) -> str:
    """Words for the rows that a command uses, if they are not all of them."""
    return "" if loaded.test is None else " (held out)" if loaded.recipe.hold_out else " (validation)" if loaded.recipe.validation else " (test)"


def counted_rows(model: Model, loaded: Loaded, split: Split) -> str:
    """How many rows there are, in words; of sequences also their lengths, and from when to when they are."""
    import numpy as np

    n = len(next(iter(split.raw.values())))
    timed = next((value for name, value in split.raw.items() if model.graph.timed.get(name)), None)
    if timed is None:
        return f"{n} row{'s' * (n != 1)}"
    if "steps" in split.raw:
        lengths = np.asarray(split.raw["steps"]).astype(bool).sum(1)
    elif "lengths" in split.raw:
        lengths = np.asarray(split.raw["lengths"])
    else:
        lengths = np.array([len(row) for row in timed] if isinstance(timed, list) else [np.shape(timed)[1]])
    low, high = int(lengths.min()), int(lengths.max())
    count = f"{low}" if low == high else f"{low} to {high}"
    span = f" ({loaded.lines.span})" if loaded.lines is not None and loaded.lines.span else ""
    return f"{n} sequence{'s' * (n != 1)} of {count} step{'s' * (high != 1)}{span}"


def batches(model: Model, data: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """All rows in parts, laid out as estimates read them."""
    import torch

    from aevb.data.sources import open_source

    source = open_source(model.graph, data, model._parameter())
    return [source.take(torch.arange(start, min(source.n, start + ROWS))) for start in range(0, source.n, ROWS)]


def without_latents(model: Model, data: Mapping[str, Any]) -> dict[str, Any]:
    from aevb.estimate.places import Placed, places_of

    return Placed({name: value for name, value in data.items() if name not in model.graph.latents}, places_of(data))


def known_rows(model: Model, data: Mapping[str, Any]) -> dict[str, int]:
    """In how many rows the value of a latent is known, by latent."""
    import numpy as np

    def told(name: str, values: Any) -> np.ndarray:
        array = np.asarray(values, dtype=float)
        return array >= 0 if model.graph.rule("p", name).spec.finite else ~np.isnan(array)

    found = {}
    for name in model.graph.latents:
        if name in data:
            value = data[name]
            rows = [told(name, row).all() for row in value] if isinstance(value, list) else told(name, value).reshape(len(value), -1).all(1)
            found[name] = int(np.sum(rows))
    return found
