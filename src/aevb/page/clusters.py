"""The clusters of a run: sizes, typical and doubtful members, and draws of p."""

from __future__ import annotations

from typing import Any

import numpy as np

from aevb.page.colours import class_title
from aevb.page.conditions import best_class
from aevb.page.contents import pack_numbers, shown
from aevb.page.measures import Measures
from aevb.page.subject import Rows, Subject
from aevb.tables.cells import frame_of
from aevb.tables.declarations import PART

MEMBERS = 12  # typical members, and doubtful ones, of a cluster
DRAWN = 8  # draws of p per cluster
MOST = 60  # clusters that are shown


def pack_clusters(
    rows: Rows, measures: Measures, available: np.ndarray, seed: int
) -> list[dict[str, Any]]:
    """Return the clusters of every latent class; ``available`` marks rows whose content is shown.

    Parts of a table's density are no clusters and are left out.
    """
    graph = rows.subject.model.graph
    found = []
    for name, code in measures.codes.items():
        if graph.rule("p", name).spec.categorical and code.ndim == 2 and name != PART:
            found.append(_of(rows, name, code, available, seed))
    return found


def _of(
    rows: Rows, name: str, probs: np.ndarray, available: np.ndarray, seed: int
) -> dict[str, Any]:
    best, certainty = best_class(probs), probs.max(1)
    # The second best cluster says with which other one a doubtful row may be confused.
    second = np.argsort(probs, axis=1)[:, -2] if probs.shape[1] > 1 else best
    sizes = np.bincount(best[best >= 0], minlength=probs.shape[1])
    listed = sorted(np.argsort(-sizes, kind="stable")[:MOST].tolist())
    labels, names = rows.labels(), rows.subject.label_names
    clusters = []
    for k in listed:
        mine = np.flatnonzero((best == k) & available)
        order = mine[np.argsort(-certainty[mine], kind="stable")]
        cluster: dict[str, Any] = {
            "number": k,
            "size": int(sizes[k]),
            "typical": order[:MEMBERS].tolist(),
            "doubtful": [
                {"row": int(i), "p": float(certainty[i]), "other": int(second[i])}
                for i in order[::-1][:MEMBERS]
            ],
            "certainty": float(certainty[best == k].mean()) if (best == k).any() else None,
        }
        if labels is not None:
            there = labels[(best == k) & (labels >= 0)]
            values, counts = np.unique(there, return_counts=True)
            order = np.argsort(-counts)
            cluster["labels"] = [
                [names[values[j]] if names else int(values[j]), int(counts[j])] for j in order[:8]
            ]
            cluster["labelled"] = len(there)
        clusters.append(cluster)
    return {
        "latent": name,
        "colour": class_title(name),
        "count": probs.shape[1],
        "clusters": clusters,
        "empty": int((sizes == 0).sum()),
        "undecided": int((best < 0).sum()),  # rows whose posterior is not finite
        "among": int(available.sum()),  # rows from which members are chosen
        "draws": _draws(rows.subject, name, listed, seed),
    }


def _draws(subject: Subject, name: str, listed: list[int], seed: int) -> dict[str, Any] | None:
    """Draws of the observed variables for some classes, or None if p cannot fix the class.

    Images are the means of the likelihood; everything else is drawn.
    """
    model, graph = subject.model, subject.model.graph
    if any(graph.timed[other] for other in graph.observed) or graph.reads("p", name):
        return None
    if any(other in graph.given for ref in graph.p for other in _parents(graph, ref)):
        return None
    drawn = []
    for k in listed:
        fixed: dict[str, Any] = {name: k}
        drawn.append(model.sample(DRAWN, mean=subject.image is not None, seed=seed + k, **fixed))
    arrays = {
        variable: np.stack([part[variable].detach().double().cpu().numpy() for part in drawn])
        for variable in graph.observed
    }
    if subject.schema is not None:
        flat = {v: a.reshape(-1, *a.shape[2:]) for v, a in arrays.items()}
        cells = subject.schema.decode({v: flat[v] for v in subject.schema.variables})
        frame = frame_of(subject.schema, cells)
        import narwhals as nw

        table = nw.from_native(frame, eager_only=True)
        return {
            "columns": list(table.columns),
            "cells": [[_plain(cell) for cell in row] for row in table.rows()],
            "each": DRAWN,
        }
    first = graph.observed[0]
    values = shown(subject, first, arrays[first])
    image = subject.image is not None
    return {
        "variable": first,
        "each": DRAWN,
        "shape": list(values.shape),
        "numbers": pack_numbers(np.clip(values, 0, 1) if image else values, unit=image),
    }


def _parents(graph: Any, name: str) -> list[str]:
    return [ref.name for ref in graph.reads("p", name)]


def _plain(cell: Any) -> Any:
    if cell is None or (isinstance(cell, float) and not np.isfinite(cell)):
        return None
    return (
        float(f"{cell:.6g}")
        if isinstance(cell, float)
        else cell
        if isinstance(cell, int | bool)
        else str(cell)
    )
