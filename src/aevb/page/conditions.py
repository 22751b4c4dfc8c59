"""The classes and the given variables of the rows, with which the page decodes a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from aevb.data.datasets import in_units
from aevb.page.contents import entry_names, known_values
from aevb.page.decoder import given_of_p
from aevb.page.measures import Measures
from aevb.page.packing import pack
from aevb.page.subject import Rows

UNKNOWN = 65535  # in place of a class
BUDGET = 4 * 2**20  # most bytes of the values of one given variable


def best_class(probs: np.ndarray) -> np.ndarray:
    """The most probable class of each row, [N]; −1 where the posterior is not finite.

    >>> best_class(np.array([[0.2, 0.8], [np.nan, np.nan]])).tolist()
    [1, -1]
    """
    known = np.isfinite(probs).all(1)
    return np.where(known, np.where(known[:, None], probs, 0.0).argmax(1), -1)


def pack_classes(rows: Rows, measures: Measures) -> dict[str, Any]:
    """The number of classes of every latent class, and the most probable one of every row."""
    graph = rows.subject.model.graph
    return {
        name: {"size": code.shape[1], "values": _pack_classes(best_class(code))}
        for name, code in measures.codes.items()
        if graph.rule("p", name).spec.categorical and code.ndim == 2
    }


def _pack_classes(values: np.ndarray) -> dict[str, Any]:
    return pack(np.where(values < 0, UNKNOWN, values), "u2")


def pack_given(rows: Rows) -> dict[str, Any]:
    """The given variables that p reads: what they are, and their value in every row.

    ``usual`` is the value for points that have none: the mean, or the most frequent class.
    ``values`` are class numbers [N] or entries [N, size], in the units of the model; no value is
    missing, because p reads them. It is None for entries beyond the budget.
    """
    graph = rows.subject.model.graph
    return {name: _given(rows, name) for name in given_of_p(graph) if not graph.timed[name]}


def _given(rows: Rows, name: str) -> dict[str, Any]:
    subject, size = rows.subject, rows.subject.model.graph.size(name)
    values = np.empty((len(rows), size), dtype=np.float32)
    for at, batch in rows.batches():
        values[at] = known_values(subject, name, batch)
    if size > 1 and ((values == 0) | (values == 1)).all() and (values.sum(1) == 1).all():
        classes = values.argmax(1)
        return {
            "size": size,
            "categorical": True,
            "usual": np.eye(size)[np.bincount(classes).argmax()].tolist(),
            "values": _pack_classes(classes),
        }
    zero, one = (
        in_units(subject.recipe, subject.model.graph, name, np.full((1, size), value))[0]
        for value in (0.0, 1.0)
    )
    return {
        "size": size,
        "categorical": False,
        "usual": values.mean(0, dtype=np.float64).tolist(),
        "values": pack(values, "f4") if values.nbytes <= BUDGET else None,
        "names": entry_names(subject, name, size),
        "low": values.min(0).tolist(),
        "high": values.max(0).tolist(),
        "units": [
            {"location": float(low), "scale": float(high - low)}
            for low, high in zip(zero, one, strict=True)
        ],
    }
