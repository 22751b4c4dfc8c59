"""Several runs side by side: their evidence on the same rows, and the settings that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from aevb.comparison import Comparison
from aevb.model import Model
from aevb.page.checks import histogram, plain
from aevb.training.run import Run, recipe_of

BINS = 30  # of a histogram of differences
LONGEST = 120  # characters of the text of a setting
# Entries of data.json that a user chose. The others follow from them and from the data.
RECIPE = ("data", "prepare", "validation", "hold_out", "split", "seed", "missing")


class Subject(Protocol):
    """A run to compare: its name, and its folder, its model and its training."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path | None: ...
    @property
    def model(self) -> Model | None: ...
    @property
    def run(self) -> Run | None: ...


def compared(
    subjects: Sequence[Subject], comparison: Comparison | Exception, notes: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Return a comparison of runs, best first, for their page; None if there is only one.

    Its models have the names of the subjects. An exception says why there is no comparison; the
    settings that differ are there in any case. ``notes`` are sentences on what was compared.
    """
    if len(subjects) < 2:
        return None
    result: dict[str, Any] = {
        "models": [],
        "what": "",
        "units": "",
        "notes": list(notes),
        "problem": None,
        "names": [subject.name for subject in subjects],
        "settings": _differing(subjects),
    }
    if isinstance(comparison, Exception):
        text = str(comparison).strip() or type(comparison).__name__
        return result | {"problem": f"The runs cannot be compared: {text}"}
    return result | {
        "models": [_model(comparison, one.name) for one in comparison.models],
        "what": comparison.title(),
        "units": comparison.units,
        "notes": [*notes, *comparison.sentences(), *comparison.notes],
    }


def _model(comparison: Comparison, name: str) -> dict[str, Any]:
    one = comparison[name]
    difference = None
    if one is not comparison.best:
        found = comparison.difference(name)
        with np.errstate(invalid="ignore"):
            rows = one.evidence - comparison.best.evidence
        difference = {
            "mean": plain(found.mean),
            "stderr": plain(found.stderr),
            "told": None if found.told is None else bool(found.told),
            "histogram": histogram(rows, BINS) if len(rows) > 1 else None,
        }
    return {
        "name": one.name,
        "mean": plain(one.mean),
        "error": plain(one.error),
        "method": one.method,
        "samples": one.samples,
        "difference": difference,
        "verdict": comparison.verdict(name),
        "flags": list(one.flags),
        "notes": list(one.notes),
        "parameters": one.parameters,
        "parameters_q": one.parameters_q,
        "seconds": plain(one.seconds),
    }


# Settings -----------------------------------------------------------------------------------------


def _differing(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return the settings, and the factors of the models, that are not the same in all runs."""
    records = [_record(subject) for subject in subjects]
    names = dict.fromkeys(name for record in records for name in record)
    found = []
    for name in names:
        values = [record.get(name, "–") for record in records]
        if len(set(values)) > 1:
            found.append({"name": name, "values": values})
    return found


def _record(subject: Subject) -> dict[str, str]:
    """Return how a run was trained as texts: its settings, its data, and the factors of p and q."""
    found: dict[str, str] = {}
    if subject.run is not None:
        for name, value in subject.run.settings.record().items():
            found |= _texts(name, value)
    try:
        recipe = None if subject.folder is None else recipe_of(subject.folder)
    except (ValueError, OSError):  # a damaged data.json, of which the comparison tells
        recipe = None
    if recipe is not None:
        for name in RECIPE:
            found |= _texts(name if name == "data" else f"data: {name}", getattr(recipe, name))
    for entry in subject.model.graph.entries() if subject.model is not None else ():
        found[str(entry.id)] = _short(repr(entry.spec))
    return found


def _texts(name: str, value: Any) -> dict[str, str]:
    """Return a setting as text; an entry per key if it is a dictionary."""
    if isinstance(value, Mapping) and value:
        return {f"{name}: {key}": _short(_text(one)) for key, one in value.items()}
    return {name: _short(_text(value))}


def _text(value: Any) -> str:
    if value is None or value == {}:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
