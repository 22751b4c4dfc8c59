"""Several runs side by side: their evidence on the same rows, and the settings that differ."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from aevb.comparison import Comparison, compare
from aevb.model import Model
from aevb.page.checks import plain
from aevb.page.packing import pack
from aevb.training.run import Run, recipe_of

MOST_ROWS = 5000
LONGEST = 120  # characters of the text of a setting
FAILURES = (ValueError, RuntimeError, ArithmeticError, OSError)
# Entries of data.json that a user chose. The others follow from them and from the data.
RECIPE = ("data", "prepare", "validation", "hold_out", "split", "seed", "missing")


class Subject(Protocol):
    """A run to compare: its name, and its folder, its model and its history."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path | None: ...
    @property
    def model(self) -> Model | None: ...
    @property
    def run(self) -> Run | None: ...


def compared(
    subjects: Sequence[Subject],
    comparison: Comparison | Exception | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
) -> dict[str, Any] | None:
    """Compare runs, best first; None if there is only one.

    By default each run is compared on the held-out rows of its own data. ``comparison`` is a
    comparison on other rows, or the reason why there is none. ``samples`` and ``seed`` are those of
    :func:`aevb.compare`. ``problem`` of the result says why the runs cannot be compared; the
    settings that differ are there in any case.
    """
    if len(subjects) < 2:
        return None
    names = distinct_names([subject.name for subject in subjects])
    notes: list[str] = []
    if comparison is None:
        comparison = _compare(dict(zip(names, subjects, strict=True)), samples, seed, notes)
    result: dict[str, Any] = {
        "models": [],
        "what": "",
        "units": "",
        "notes": [],
        "pairs": None,
        "problem": None,
        "names": names,
        "settings": _differing(subjects),
    }
    if isinstance(comparison, Exception):
        text = str(comparison).strip() or type(comparison).__name__
        return result | {"notes": notes, "problem": f"The runs cannot be compared: {text}"}
    return result | {
        "models": [_model(comparison, one.name) for one in comparison.models],
        "what": comparison.title(),
        "units": comparison.units,
        "notes": [*comparison.sentences(), *comparison.notes, *notes],
        "pairs": _pairs(comparison),
    }


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names of which no two are the same.

    >>> distinct_names(["vae", "fa", "vae"])
    ['vae', 'fa', 'vae (2)']
    """
    found: list[str] = []
    for name in names:
        count, new = 1, name
        while new in found:
            count += 1
            new = f"{name} ({count})"
        found.append(new)
    return found


def _compare(
    subjects: Mapping[str, Subject], samples: int | None, seed: int, notes: list[str]
) -> Comparison | Exception:
    """Compare runs on the rows that they held out; return the error if they cannot be compared."""
    lost = [name for name, subject in subjects.items() if subject.folder is None]
    if lost:
        return ValueError(f"{lost[0]} is not saved, so its rows are unknown.")
    folders = {name: str(subject.folder) for name, subject in subjects.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            return compare(folders, samples=samples, seed=seed)
        except FAILURES as error:
            return error
        finally:
            notes += dict.fromkeys(str(one.message) for one in caught)


def _model(comparison: Comparison, name: str) -> dict[str, Any]:
    one = comparison[name]
    difference = None
    if one is not comparison.best:
        found = comparison.difference(name)
        difference = {
            "mean": plain(found.mean),
            "stderr": plain(found.stderr),
            "told": None if found.told is None else bool(found.told),
        }
    return {
        "name": one.name,
        "mean": plain(one.mean),
        "error": plain(one.error),
        "method": one.method,
        "difference": difference,
        "verdict": comparison.verdict(name),
        "flags": list(one.flags),
        "notes": list(one.notes),
        "parameters": one.parameters,
        "parameters_q": one.parameters_q,
        "seconds": plain(one.seconds),
    }


def _pairs(comparison: Comparison) -> dict[str, Any]:
    """Pack log p per row of every model, [M, N], in the order of the models."""
    whole = np.stack([one.evidence for one in comparison.models])
    n = whole.shape[1]
    kept = np.linspace(0, n - 1, min(n, MOST_ROWS)).astype(int)
    return pack(whole[:, kept], "f4")


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
