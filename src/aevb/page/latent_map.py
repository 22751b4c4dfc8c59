"""Maps of latent space: the points of the rows, in two dimensions.

A latent with two entries is drawn as it is. Of more entries, the map shows two principal components
or a neighbour embedding (t-SNE). A model without a continuous latent has a map of its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aevb.declare.graph import Graph
from aevb.page.packing import pack, quantised
from aevb.page.subject import Rows

EMBEDDED = 2000  # rows that t-SNE embeds; the others are placed among their neighbours
NEIGHBOURS = 5
MOST_STEPS = 200_000  # most points of a latent with a value at every step
CODES = 12 * 2**20  # most bytes of the codes of one latent


@dataclass(frozen=True)
class Space:
    """Points in the space of a latent, [P, d]; ``row`` and ``step`` say whose they are."""

    latent: str | None  # None for the space of the data
    points: np.ndarray
    row: np.ndarray | None = None
    step: np.ndarray | None = None


def spaces(graph: Graph, codes: Mapping[str, np.ndarray], data: np.ndarray) -> list[Space]:
    """The spaces of all continuous latents; that of the data if there is none.

    ``codes`` are posterior means, and ``data`` the rows as numbers, [n, d], without missing ones.
    """
    found = []
    for name, code in codes.items():
        if graph.rule("p", name).spec.categorical:
            continue
        found.append(_timed(name, code) if code.ndim == 3 else Space(name, code))
    return found or [Space(None, data)]


def _timed(name: str, code: np.ndarray) -> Space:
    """One point per row and step, of as many rows as the map can hold."""
    real = ~np.isnan(code).any(-1)
    ends = real.sum(1).cumsum()
    rows = max(1, int(np.searchsorted(ends, MOST_STEPS, side="right")))
    row, step = np.nonzero(real[:rows])
    return Space(name, code[row, step], row, step)


def pack_space(space: Space, seed: int, *, embed: bool = True) -> dict[str, Any]:
    """Return a space with its views as JSON-ready data."""
    points, d = space.points, space.points.shape[1]
    views = _views(points, d, "z" if space.latent is None else space.latent, seed, embed)
    wide = 4 if points.size * 4 <= CODES else 2
    kept = points.size * wide <= CODES
    return {
        "latent": space.latent,
        "size": d,
        "count": len(points),
        "row": None if space.row is None else pack(space.row, "u4"),
        "step": None if space.step is None else pack(space.step, "u2"),
        "views": views,
        "codes": pack(points, f"f{wide}") if kept else None,
        "mean": _plain(points.mean(0, dtype=np.float64)),
        "sd": _plain(points.std(0, dtype=np.float64)),
        "low": _plain(points.min(0)),
        "high": _plain(points.max(0)),
    }


def _views(points: np.ndarray, d: int, name: str, seed: int, embed: bool) -> list[dict[str, Any]]:
    if d == 1:
        spread = np.random.default_rng(seed).normal(size=len(points))
        flat = np.column_stack([points[:, 0], spread])
        view = _view("entries", f"{name}", flat, np.zeros(1), np.array([[1.0], [0.0]]))
        return [view | {"x": name, "y": "", "note": "Heights are random and have no meaning."}]
    if d == 2:
        view = _view("entries", f"{name}1 and {name}2", points, np.zeros(2), np.eye(2))
        return [view | {"x": f"{name}1", "y": f"{name}2"}]
    mean, axes, shares = principal_axes(points)
    flat = (points - mean) @ axes.T
    title = "Principal components 1 and 2"
    pca = _view("principal", title, flat, mean, axes) | {
        "x": f"component 1 ({shares[0]:.0%} of the variance)",
        "y": f"component 2 ({shares[1]:.0%})",
    }
    if not embed or len(points) < 10:
        return [pca]
    placed, note = neighbour_embedding(points, seed)
    near = _view("neighbours", "Neighbour embedding (t-SNE)", placed, None, None) | {
        "x": "",
        "y": "",
        "note": note,
    }
    return [pca, near]


def _view(
    kind: str, title: str, flat: np.ndarray, origin: np.ndarray | None, axes: np.ndarray | None
) -> dict[str, Any]:
    """A view: points of the plane, and where the plane lies in the latent's space.

    A point (a, b) of the plane is ``origin`` + a ``axes[0]`` + b ``axes[1]``.
    """
    return {
        "kind": kind,
        "title": title,
        "across": quantised(flat[:, 0]),
        "up": quantised(flat[:, 1]),
        "origin": None if origin is None else _plain(origin),
        "axes": None if axes is None else [_plain(axis) for axis in axes],
        "note": "",
    }


def principal_axes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean, the first two principal axes, [2, d], and their shares of the variance."""
    mean = points.mean(0, dtype=np.float64)
    centred = points - mean
    values, vectors = np.linalg.eigh(centred.T @ centred / max(1, len(points)))
    axes = vectors[:, ::-1][:, :2].T
    # An axis has no sign of its own: let its largest entry be positive.
    signs = np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])
    shares = values[::-1][:2] / max(values.sum(), np.finfo(float).tiny)
    return mean, axes * signs[:, None], shares


def neighbour_embedding(points: np.ndarray, seed: int) -> tuple[np.ndarray, str]:
    """Embed points in the plane by t-SNE.

    Of many points, a random choice is embedded. Each other point is placed at the mean of its
    nearest embedded neighbours. The second result is a note that says so.
    """
    from sklearn.manifold import TSNE  # type: ignore[import-untyped]
    from sklearn.neighbors import NearestNeighbors  # type: ignore[import-untyped]

    n = len(points)
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.permutation(n)[:EMBEDDED])
    base = np.ascontiguousarray(points[chosen], dtype=np.float32)
    spread = base.std(0).max()
    if not spread > 0:
        return np.zeros((n, 2)), "All codes are equal."
    perplexity = min(30.0, (len(base) - 1) / 3)
    found = TSNE(
        perplexity=perplexity, init="pca", random_state=seed, max_iter=500, method="barnes_hut"
    ).fit_transform(base / spread)
    note = "Distances between far groups have no meaning."
    if len(chosen) == n:
        return found, note
    placed = np.empty((n, 2), np.float32)
    near = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(base)
    for start in range(0, n, 50_000):
        part = points[start : start + 50_000]
        distance, neighbour = near.kneighbors(np.ascontiguousarray(part, dtype=np.float32))
        weight = 1 / np.maximum(distance, 1e-12)
        weight /= weight.sum(1, keepdims=True)
        placed[start : start + 50_000] = (found[neighbour] * weight[..., None]).sum(1)
    placed[chosen] = found
    return placed, (
        f"{len(chosen):,} of the {n:,} points are embedded, the others placed among their nearest "
        f"neighbours. {note}"
    )


def pack_rows(rows: Rows) -> dict[str, Any]:
    """The rows of the map: how many, of which split, and their numbers in their file."""
    subject = rows.subject
    numbers = rows.numbers()
    plain = len(subject.splits) == 1 and bool((numbers == np.arange(len(rows))).all())
    return {
        "count": len(rows),
        "total": rows.total,
        "splits": [split.name for split in subject.splits],
        "split": pack(rows.split, "u1") if len(subject.splits) > 1 else None,
        "numbers": None if plain else pack(numbers, "u4"),
    }


def _plain(values: np.ndarray) -> list[float]:
    return [float(value) for value in values]
