"""The first part of a page: the declaration and what is derived from it, settings, and curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from aevb.data.datasets import Recipe
from aevb.derive.sample_counts import usual_samples
from aevb.model import Model
from aevb.notebook.cards import model_parts
from aevb.page.curves import curves
from aevb.training.run import Run
from aevb.training.settings import Settings, default_of, documentation


def summary(
    model: Model | None,
    rows: list[dict[str, Any]],
    run: Run | None = None,
    recipe: Recipe | None = None,
    notes: tuple[str, ...] = (),
    *,
    longest: int | None = None,
    live: bool = False,
) -> dict[str, Any]:
    """Return the model, its derivation, the settings, and the history of a run.

    ``rows`` are those of ``metrics.jsonl``; ``notes`` are sentences about the data. ``longest``
    is the number of steps of the longest row, without padding, if it is known. ``live``: the
    page gets the rows as they are written, so that the curves have only what is known besides them.
    """
    phases = run.phases if run is not None else []
    judge = run.settings.judge if run is not None else None
    return {
        "model": None if model is None else _model(model, run),
        "curves": curves([] if live else rows, phases, judge=judge) if rows else None,
        "settings": [] if run is None else _settings(run.settings),
        "data": _data(recipe, longest),
        "steps": None if run is None else run.step,
        "seconds": None if run is None else run.seconds,
        "notes": list(notes),
    }


def _model(model: Model, run: Run | None) -> dict[str, Any]:
    choices: dict[str, Any] = {}
    if run is not None and run.settings.schedule.objective == "bound":
        settings = run.settings
        choices = {
            "how": settings.how,
            "bound": settings.bound,
            "samples": settings.samples,
            "gradient": settings.gradient,
            "resample": settings.resample,
        }
    return model_parts(model, **choices) | {"text": str(model)}


def _settings(settings: Settings) -> list[dict[str, Any]]:
    """Every setting with its value and documentation; ``usual`` if it is the default."""
    bound = settings.bound
    record, usual = settings.record(), Settings(bound=bound, samples=usual_samples(bound))
    return [
        {
            "name": one.name,
            "value": _text(record.get(one.name)),
            "usual": getattr(settings, one.name) in (default_of(one), getattr(usual, one.name)),
            "help": documentation(one),
        }
        for one in fields(Settings)
        if record.get(one.name) is not None
    ]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} {_text(each)}" for key, each in value.items())
        return inner.removeprefix("name ")
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _data(recipe: Recipe | None, longest: int | None) -> list[list[str]]:
    """Where the rows came from and how they were prepared, as pairs of a name and a text."""
    if recipe is None:
        return []
    found = {
        "data": Path(recipe.data).name,
        "preparation": recipe.prepare,
        "validation": recipe.validation and Path(recipe.validation).name,
        "held out": f"{100 * recipe.hold_out:.3g} % of the rows" if recipe.hold_out else None,
        "missing cells": ", ".join(map(str, recipe.missing)) if recipe.missing else None,
        "steps of the longest sequence": recipe.steps if longest is None else longest,
    }
    return [[name, str(value)] for name, value in found.items() if value is not None]
