"""Load the rows that a command works on, prepared like the training rows of its run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.missing_marks import only_numbers
from aevb.cli.model_argument import is_run, open_run, resolve
from aevb.estimate.keys import LENGTHS, STEPS
from aevb.runtime.checked_files import DataWarning

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from aevb.data.datasets import Loaded, Recipe, Split
    from aevb.model import Model

ROWS = 1000  # rows per batch after training
HELD_OUT_UNKNOWN = (
    "which of its rows were held out is unknown. These are all its rows, and the model may have "
    "been trained on most of them. Name new rows: --data FILE."
)


def recipe_of(run: Path) -> Recipe | None:
    """Return how a run prepared its rows; None if the command line did not train the run."""
    from aevb.training.run import recipe_of

    return recipe_of(run)


def whole_of(recipe: Recipe | None) -> Recipe | None:
    """Return the recipe with no rows held out."""
    from dataclasses import replace

    return None if recipe is None else replace(recipe, hold_out=0.0, validation=None)


def load_rows(
    run: Path,
    model: Model,
    data: str | None,
    prepare: str | None,
    seed: int,
    *,
    missing: Sequence[str] | None = None,
    gaps: str | None = None,
    whole: bool = False,
) -> Loaded:
    """Load the rows that a command names, or else those of the run, prepared as in training.

    ``whole=True`` loads all rows of a file and holds out none. So does a file that has changed
    since training, with a warning.
    """
    from aevb.cli.judged_rows import loaded_rows
    from aevb.cli.open_table import is_table_run, refuse_options
    from aevb.comparison.runs import has_changed
    from aevb.data.datasets import load

    if is_table_run(run):
        refuse_options({"--prepare": prepare, "--gaps": gaps})
        return loaded_rows(run, data, missing)
    recipe = whole_of(recipe_of(run)) if whole else recipe_of(run)
    name = data or (recipe.data if recipe else None)
    if name is None:
        raise ValueError(
            f"{run} does not record which data it was trained on. Name them, e.g. --data digits."
        )

    def rows(like: Recipe | None) -> Loaded:
        markers = only_numbers(missing)
        return load(
            name, model.graph, prepare=prepare, seed=seed, missing=markers, gaps=gaps, like=like
        )

    try:
        found = rows(recipe)
        if recipe is None or not found.recipe.hold_out or not has_changed(run, model, recipe):
            return found
        warnings.warn(
            DataWarning(f"{name} has changed since training, so {HELD_OUT_UNKNOWN}"), stacklevel=2
        )
        return rows(whole_of(recipe))
    except ValueError as error:
        if data is None and not Path(name).exists():
            raise ValueError(
                f"{error} {run} was trained on {name}: change to the folder that holds this file, "
                f"or use --data PATH."
            ) from None
        raise


def model_and_rows(
    text: str,
    data: str | None,
    prepare: str | None,
    seed: int,
    settings: Mapping[str, str],
    missing: Sequence[str] | None = None,
) -> tuple[Model, Loaded]:
    """Return the model that the command line names, and rows for it.

    The rows come from ``--data`` or from the run. The model is the trained one if the text names a
    run.
    """
    from aevb.data.datasets import load
    from aevb.zoo import zoo

    if is_run(text) and text not in zoo:
        if settings:
            raise ValueError(
                "--set gives arguments to a zoo model; a run already has its arguments. Leave out "
                "--set."
            )
        model = open_run(Path(text))
        return model, load_rows(Path(text), model, data, prepare, seed, missing=missing)
    if data is None:
        raise ValueError(
            f"{text} is not the folder of a run, so it has no data of its own. Name them: --data "
            f"digits."
        )
    markers = only_numbers(missing)
    model = resolve(text, data, settings, markers)
    return model, load(data, model.graph, prepare=prepare, seed=seed, missing=markers)


def which_rows(loaded: Loaded) -> str:
    """Describe the rows that a command uses, e.g. " (held out)"; empty if it uses all rows."""
    return (
        ""
        if loaded.test is None
        else " (held out)"
        if loaded.recipe.hold_out
        else " (validation)"
        if loaded.recipe.validation
        else " (test)"
    )


def counted_rows(model: Model, loaded: Loaded, split: Split) -> str:
    """Describe the number of rows; for sequences also their lengths and their time span."""
    import numpy as np

    n = len(next(iter(split.raw.values())))
    timed = next((value for name, value in split.raw.items() if model.graph.timed.get(name)), None)
    if timed is None:
        return f"{n} row{'s' * (n != 1)}"
    if STEPS in split.raw:
        lengths = np.asarray(split.raw[STEPS]).astype(bool).sum(1)
    elif LENGTHS in split.raw:
        lengths = np.asarray(split.raw[LENGTHS])
    else:
        lengths = np.array(
            [len(row) for row in timed] if isinstance(timed, list) else [np.shape(timed)[1]]
        )
    low, high = int(lengths.min()), int(lengths.max())
    count = f"{low}" if low == high else f"{low} to {high}"
    span = f" ({loaded.lines.span})" if loaded.lines is not None and loaded.lines.span else ""
    return f"{n} sequence{'s' * (n != 1)} of {count} step{'s' * (high != 1)}{span}"


def batches(model: Model, data: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return all rows as batches of at most :data:`ROWS` rows."""
    import torch

    from aevb.data.sources import open_source

    source = open_source(model.graph, data, model._parameter())
    model.teaching.warn_of_other_pace(source.places.pace)
    return [
        source.take(torch.arange(start, min(source.n, start + ROWS)))
        for start in range(0, source.n, ROWS)
    ]


def without_latents(model: Model, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data without the known values of latents."""
    from aevb.estimate.places import Placed, places_of

    return Placed(
        {name: value for name, value in data.items() if name not in model.graph.latents},
        places_of(data),
    )


def known_rows(model: Model, data: Mapping[str, Any]) -> dict[str, int]:
    """Count, for each latent, the rows in which its value is known."""
    import numpy as np

    def is_known(name: str, values: Any) -> np.ndarray:
        array = np.asarray(values, dtype=float)
        return array >= 0 if model.graph.rule("p", name).spec.finite else ~np.isnan(array)

    found = {}
    for name in model.graph.latents:
        if name in data:
            value = data[name]
            rows = (
                [is_known(name, row).all() for row in value]
                if isinstance(value, list)
                else is_known(name, value).reshape(len(value), -1).all(1)
            )
            found[name] = int(np.sum(rows))
    return found
