"""Data by name, as the command line asks for it: a built-in set or a file, prepared for one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from aevb.data.builtin import Images, digits, factor_analysis, mnist
from aevb.data.preparation import as_variable
from aevb.data.sources import read_arrays
from aevb.graph import Graph

IMAGES: dict[str, Callable[[], tuple[Images, Images]]] = {"digits": digits, "mnist": mnist, "fashion": partial(mnist, "fashion")}
NAMES = ("fa", *IMAGES)


@dataclass(frozen=True)
class Split:
    """Rows for one model, and labels where the data have some (whether or not the model reads them)."""

    data: dict[str, Any]
    labels: np.ndarray | None = None


def sizes(name: str, timed: bool) -> dict[str, int]:
    """What a built-in set says about a zoo model's sizes."""
    if name == "fa":
        return {"x": 3}
    if name not in IMAGES:
        return {}
    pixels = IMAGES[name]()[0].pixels
    return {"x": pixels.shape[2] if timed else pixels.shape[1] * pixels.shape[2]}


def load(name: str, graph: Graph, *, prepare: str | None = None, seed: int = 0) -> tuple[Split, Split | None]:
    """Training and test rows of a built-in set, or all rows of a file."""
    if name == "fa":
        return Split({"x": factor_analysis(seed=0)}), Split({"x": factor_analysis(seed=1)})
    if name not in IMAGES:
        return Split(read_arrays(name, graph)), None
    observed = next((variable for variable in graph.observed), "x")
    train, test = IMAGES[name]()

    def split(images: Images, offset: int) -> Split:
        data: dict[str, Any] = {observed: as_variable(graph, observed, images.pixels, images.levels, how=prepare, seed=seed + offset)}
        if len(graph.given) == 1:
            data[next(iter(graph.given))] = images.labels
        return Split(data, images.labels)

    return split(train, 0), split(test, 1)


def clustering_accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows whose cluster is matched to their label, under the best one-to-one matching."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    table = np.zeros((predicted.max() + 1, labels.max() + 1))
    np.add.at(table, (predicted, labels), 1)
    return float(table[linear_sum_assignment(-table)].sum() / len(labels))
