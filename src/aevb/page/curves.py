"""The history of a run as packed columns: one series per metric, phases and events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aevb.estimate.metric_names import BESIDES, BOUNDS, OBJECTIVE, Metric, latent_of
from aevb.page.packing import pack
from aevb.training.best import Best, better
from aevb.training.events import EVENT_FIELDS, events

MOST_PHASES = 400
MOST_EVENTS = 1000
CLOCKS = {"seconds": "seconds", "epochs": "epoch"}  # entry of the result → entry of a row
NO_SERIES = ("step", "phase", *CLOCKS.values(), *EVENT_FIELDS)

Column = tuple[np.ndarray, np.ndarray]  # steps and values


def curves(
    rows: Sequence[Mapping[str, Any]],
    phases: Sequence[tuple[str, int, int]],
    *,
    judge: str | None = None,
) -> dict[str, Any]:
    """Return the history of a run as packed columns.

    ``rows`` are those of :class:`Run`, and ``phases`` are (name, first step, step after the last).
    ``judge`` is the metric that compares validations (``run.settings.judge``), by default the bound
    that the rows have. ``seconds`` and ``epochs`` of the result map steps to the seconds and epochs
    of training.
    """
    columns = _columns(rows)
    for validation in (False, True):
        gap, evidence, elbo = (Metric(name, validation).key for name in ("gap", "evidence", "elbo"))
        if gap not in columns and evidence in columns and elbo in columns:
            columns[gap] = _difference(columns[evidence], columns[elbo])
    packed: dict[bytes, dict[str, Any]] = {}  # most series have the same steps

    def packed_steps(steps: np.ndarray) -> dict[str, Any]:
        raw = steps.tobytes()
        if raw not in packed:
            packed[raw] = _steps(steps)
        return packed[raw]

    series = [
        {
            "key": key,
            "name": Metric.of(key).name,
            "validation": Metric.of(key).validation,
            "kind": _kind(Metric.of(key).name),
            "title": _title(Metric.of(key).name),
            "step": packed_steps(steps),
            "value": _values(values),
        }
        for key, (steps, values) in columns.items()
        if key not in NO_SERIES
    ]
    best = _best(columns, judge)
    return {
        "series": series,
        "phases": [list(phase) for phase in merged(phases)],
        "events": _events(rows),
        "best": None if best is None else {"step": best.step, "value": best.value},
        **{
            name: {"step": packed_steps(columns[key][0]), "value": pack(columns[key][1], "f8")}
            if key in columns
            else None
            for name, key in CLOCKS.items()
        },
    }


def merged(
    phases: Sequence[tuple[str, int, int]], most: int = MOST_PHASES
) -> list[tuple[str, int, int]]:
    """Return at most ``most`` phases: neighbours are merged, and their names joined.

    >>> merged([("E", 0, 5), ("M", 5, 9), ("E", 9, 14), ("M", 14, 18)], most=2)
    [('E/M', 0, 9), ('E/M', 9, 18)]
    """
    each = max(1, math.ceil(len(phases) / most))
    groups = [phases[start : start + each] for start in range(0, len(phases), each)]
    return [
        ("/".join(dict.fromkeys(name for name, _, _ in group)), group[0][1], group[-1][2])
        for group in groups
    ]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Return every numeric entry of the rows, with its steps in ascending order."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row), []).append(i)
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for keys, members in groups.items():
        places = np.array(members)
        chosen = [rows[i] for i in members]
        steps = _numbers([row["step"] for row in chosen])[1]
        for key in keys:
            if key in ("step", "phase", *EVENT_FIELDS):
                continue
            kept, values = _numbers([row[key] for row in chosen])
            if len(values):
                parts.setdefault(str(key), []).append((places[kept], steps[kept], values))
    found = {}
    for key, several in parts.items():
        places, steps, values = (
            column[0] if len(column) == 1 else np.concatenate(column)
            for column in zip(*several, strict=True)
        )
        if len(several) > 1 or (np.diff(steps) < 0).any():
            order = np.lexsort((places, steps))
            steps, values = steps[order], values[order]
        found[key] = (steps, values)
    return found


def _numbers(values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the values are numbers, and these numbers.

    The hook ``after=`` of a run may record anything that JSON can hold.
    """
    try:
        array = np.array(values)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.empty(0, dtype=object)
    if array.ndim == 1 and array.dtype.kind in "fiub":
        return np.arange(len(array)), array.astype(float)
    kept = [i for i, value in enumerate(values) if isinstance(value, int | float)]
    return np.array(kept, dtype=int), np.array([_number(values[i]) for i in kept], dtype=float)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _difference(one: Column, other: Column) -> Column:
    """Subtract two metrics at the steps that both have."""
    steps, first, second = np.intersect1d(one[0], other[0], return_indices=True)
    return steps, one[1][first] - other[1][second]


def _steps(steps: np.ndarray) -> dict[str, Any]:
    whole = not len(steps) or bool(steps.min() >= 0 and steps.max() < 2**32)
    return pack(steps, "u4" if whole else "f8")


def _values(values: np.ndarray) -> dict[str, Any]:
    with np.errstate(over="ignore"):
        return pack(values, "f4")


def _kind(name: str) -> str:
    """Return where a metric is shown: with the bounds, as a term, as a KL, or besides them."""
    if name in BOUNDS:
        return "bound"
    if name in BESIDES:
        return "besides"
    return "term" if latent_of(name) is None else "kl"


def _title(name: str) -> str:
    plain = _kind(name) in ("bound", "besides", "kl") or name in (OBJECTIVE, "gap")
    return name if plain else f"log p({name}|·)"


def _best(columns: Mapping[str, Column], judge: str | None) -> Best | None:
    """Return the best validation, the first of equal ones."""
    for name in ("particles", "iwae", "elbo", "evidence") if judge is None else (judge,):
        found = columns.get(Metric(name, validation=True).key)
        if found is not None:
            best: Best | None = None
            for step, value in zip(found[0].tolist(), found[1].tolist(), strict=True):
                best = better(best, int(step), value)
            return best
    return None


def _events(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the events with their steps: the first and the last ones if there are too many."""
    noted = [row for row in rows if "note" in row]
    if len(noted) > MOST_EVENTS:
        noted = noted[: MOST_EVENTS // 2] + noted[-MOST_EVENTS // 2 :]
    return [
        {
            "step": row["step"],
            "kind": str(event.kind),
            "about": str(event.about),
            "text": event.text,
            "remedy": event.remedy,
        }
        for row in noted
        for event in events([row])
    ]
