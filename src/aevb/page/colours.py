"""What the points of a map can be coloured by: clusters, labels, columns, and numbers per row."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from aevb.page.conditions import best_class
from aevb.page.contents import (
    dates_of,
    entry_names,
    levels_of,
    numbers_of,
    texts_of,
    values_of,
    whole_table,
)
from aevb.page.measures import Measures
from aevb.page.packing import pack, quantised
from aevb.page.subject import Rows
from aevb.tables.columns import Column
from aevb.tables.declarations import PART

BUDGET = 6 * 2**20  # most bytes of all colours; those of later ones are left out
MOST_LEVELS = 40  # of a class that has colours
MOST_CLASSES = 254  # of labels and clusters: a colour is a byte, and one value stands for unknown
STEPS = 4000  # fewest steps of 16 bits between the ends of a scale; otherwise 32 bits are stored


def class_title(latent: str) -> str:
    """The name of the colour that shows the classes of a latent.

    >>> class_title("y"), class_title("cluster")
    ('cluster y', 'cluster')
    """
    return latent if latent == "cluster" else f"cluster {latent}"


def pack_colours(rows: Rows, measures: Measures) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the colours, and sentences on those that were left out."""
    found: list[dict[str, Any]] = []
    graph = rows.subject.model.graph
    labels = rows.labels()
    if labels is not None and labels.max() < MOST_CLASSES:
        names = rows.subject.label_names or [str(k) for k in range(int(labels.max()) + 1)]
        found.append(classes("label", labels, list(names)))
    elif labels is not None:
        found.append(number("label", np.where(labels < 0, np.nan, labels)))
    for name, code in measures.codes.items():
        if graph.rule("p", name).spec.categorical and code.ndim == 2 and name != PART:
            if code.shape[1] <= MOST_CLASSES:
                levels = [str(k) for k in range(code.shape[1])]
                found.append(classes(class_title(name), best_class(code), levels))
            found.append(number(f"certainty of {name}", code.max(1), "probability of its cluster"))
        elif graph.rule("p", name).spec.categorical and code.ndim == 3:
            found += _states(name, code)
    splits = rows.subject.splits
    if len(splits) > 1:
        found.append(classes("split", rows.split, [split.name for split in splits]))
    for name, values in measures.numbers.items():
        found.append(number(name, values, measures.notes.get(name, "")))
    given, many = _columns(rows) if rows.subject.schema is not None else (_given(rows), [])
    what = "column" if rows.subject.schema is not None else "data"
    found = _distinct(found, given, what, graph.given)
    kept: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = []
    size = 0
    for colour in found:
        size += len(colour["values"]["b"])
        (kept if size <= BUDGET * 4 / 3 else left).append(colour)
    problems = []
    if left:
        problems.append(
            f"The map cannot be coloured by {', '.join(colour['name'] for colour in left)}: the "
            f"file would become too large. aevb page --rows N shows fewer rows."
        )
    if many:
        problems.append(
            f"The map has no colours for {', '.join(many)}: more than {MOST_LEVELS} different "
            f"texts."
        )
    return kept, problems


def _distinct(
    found: list[dict[str, Any]], given: list[dict[str, Any]], what: str, kept: Collection[str]
) -> list[dict[str, Any]]:
    """Give every colour a name of its own: that of a column may be that of a number.

    Given variables keep their names, by which the page finds their values.
    """
    for colour in found:
        if colour["name"] in kept:
            colour["name"] += " of the row"
    taken = {colour["name"] for colour in found}
    for colour in given:
        name = colour["name"]
        if name in taken:
            colour["name"] = f"{name} ({what})"
        again = 2
        while colour["name"] in taken:
            colour["name"], again = f"{name} ({what} {again})", again + 1
        taken.add(colour["name"])
    return [*found, *given]


def _states(name: str, code: np.ndarray) -> list[dict[str, Any]]:
    """The states of a discrete chain that stand for a whole row: the most frequent and the last."""
    real = ~np.isnan(code).any(-1)  # [n, T]
    if code.shape[2] > MOST_CLASSES:
        return []
    state = np.where(real, np.nan_to_num(code).argmax(-1), -1)
    counts = np.stack([(state == k).sum(1) for k in range(code.shape[2])], 1)
    last = np.maximum(real.sum(1) - 1, 0)
    levels = [str(k) for k in range(code.shape[2])]
    return [
        classes(f"most frequent {name}", counts.argmax(1), levels),
        classes(f"last {name}", state[np.arange(len(state)), last], levels),
    ]


def classes(name: str, values: np.ndarray, levels: list[str]) -> dict[str, Any]:
    """A colour with a few levels; the number after the last one is unknown."""
    codes = np.where((values < 0) | (values >= len(levels)), len(levels), values)
    return {"name": name, "kind": "class", "levels": levels, "values": pack(codes, "u1")}


def number(name: str, values: np.ndarray, note: str = "") -> dict[str, Any]:
    """A colour on a scale. Its ends are the 1st and 99th percentile, so that no outlier sets it."""
    finite = values[np.isfinite(values)]
    infinite = int(np.isinf(values).sum())
    if infinite:
        note = "; ".join(filter(None, [note, f"infinite in {infinite:,} rows"]))
    ends = np.quantile(finite, [0.01, 0.99]) if len(finite) else np.zeros(2)
    found = {
        "name": name,
        "kind": "number",
        "note": note,
        "from": float(ends[0]),
        "to": float(ends[1]),
    }
    with np.errstate(over="ignore"):
        extent = float(finite.max() - finite.min()) if len(finite) else 0.0
        # One outlier would make the steps of 16 bits coarser than the differences of most rows.
        coarse = extent / 65534 > float(ends[1] - ends[0]) / STEPS
        if not coarse or float(np.abs(finite).max()) > np.finfo(np.float32).max:
            return found | quantised(values)
    return found | {"values": pack(np.where(np.isfinite(values), values, np.nan), "f4")}


def _columns(rows: Rows) -> tuple[list[dict[str, Any]], list[str]]:
    """The columns of a table, and the names of those with too many different texts."""
    schema = rows.subject.schema
    assert schema is not None
    whole = whole_table(rows)
    found, many = [], []
    known = {column.name: column for column in schema.columns}
    for name in whole.column_names:
        column = known.get(name)
        dates = dates_of(whole[name])
        if dates is not None:
            found.append(number(name, dates) | {"date": True})
            continue
        values = None if column is not None and column.listed else numbers_of(whole[name])
        if values is not None and len(np.unique(values[~np.isnan(values)])) > 2:
            found.append(number(name, values))
            continue
        codes, levels = _in_order(column, *levels_of(whole[name]))
        if 1 < len(levels) <= MOST_LEVELS:
            found.append(classes(name, codes, levels))
        elif len(levels) > MOST_LEVELS:
            many.append(name)
    return found, many


def _in_order(
    column: Column | None, codes: np.ndarray, levels: list[str]
) -> tuple[np.ndarray, list[str]]:
    """Levels in the order of the schema; those that it does not list come last."""
    if column is None or not column.listed:
        return codes, levels
    known = [text for text in texts_of(column.levels) if text in levels]
    order = [*known, *(text for text in levels if text not in known)]
    place = np.array([*(order.index(text) for text in levels), len(levels)])
    return place[codes], order


def _given(rows: Rows) -> list[dict[str, Any]]:
    """The variables that the model is given, and observed variables with few entries."""
    graph = rows.subject.model.graph
    names = [name for name in graph.given if not graph.timed[name]]
    names += [name for name in graph.observed if not graph.timed[name] and graph.size(name) <= 16]
    values: dict[str, np.ndarray] = {
        name: np.full((len(rows), graph.size(name)), np.nan) for name in names
    }
    for at, batch in rows.batches():
        for name in names:
            if name in batch:
                values[name][at] = values_of(rows.subject, name, batch)
    found = []
    for name, value in values.items():
        known = ~np.isnan(value).any(1)
        hot = value.shape[1] > 1 and bool(((value == 0) | (value == 1))[known].all())
        if hot and bool((value[known].sum(1) == 1).all()) and value.shape[1] <= MOST_LEVELS:
            levels = [str(k) for k in range(value.shape[1])]
            found.append(classes(name, np.where(known, value.argmax(1), -1), levels))
        else:
            titles = entry_names(rows.subject, name, value.shape[1])
            found += [number(title, value[:, j]) for j, title in enumerate(titles)]
    return found
