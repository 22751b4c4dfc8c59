"""Maps of latent space: the points of the rows, in two dimensions.

A latent with two entries is drawn as it is. Of more entries, the map shows two principal components
or a neighbour embedding (t-SNE). A model without a continuous latent has a map of its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributions import constraints

from aevb.declare.graph import Graph
from aevb.page.packing import pack, quantised
from aevb.page.subject import Rows

EMBEDDED = 2000  # rows that t-SNE embeds; the others are placed among their neighbours
NEIGHBOURS = 5
MOST_STEPS = 200_000  # most points of a latent with a value at every step
CODES = 8 * 2**20  # most bytes of the codes of one latent, and in single precision half as many


@dataclass(frozen=True)
class Space:
    """Points in the space of a latent, [P, d]; ``row`` and ``step`` say whose they are."""

    latent: str | None  # None for the space of the data
    points: np.ndarray
    names: tuple[str, ...] = ()  # of the entries
    row: np.ndarray | None = None
    step: np.ndarray | None = None
    binary: bool = False  # the latent is 0 or 1, and the points are its probabilities
    support: tuple[float | None, float | None] = (None, None)  # the ends of its values
    whole: bool = False  # the values are whole numbers
    note: str = ""


def spaces(
    graph: Graph, codes: Mapping[str, np.ndarray], data: Space | None, seed: int = 0
) -> list[Space]:
    """The spaces of all latents that are no classes; that of the data if there is none.

    ``codes`` are posterior means. Those of a Bernoulli latent are probabilities.
    """
    found = []
    for name, code in codes.items():
        spec, d = graph.rule("p", name).spec, code.shape[-1]
        if spec.categorical:
            continue
        names = (name,) if d == 1 else tuple(f"{name}{j}" for j in range(d))
        space = _timed(name, code, seed) if code.ndim == 3 else Space(name, code)
        found.append(
            replace(
                space,
                names=names,
                binary=spec.support is constraints.boolean,
                support=_ends(spec.support),
                whole=bool(spec.support.is_discrete),
            )
        )
    return found or ([] if data is None else [data])


def _ends(support: Any) -> tuple[float | None, float | None]:
    """The smallest and the largest value of a support; None where it has no end."""
    if support is constraints.boolean:
        return 0.0, 1.0
    low, high = (getattr(support, end, None) for end in ("lower_bound", "upper_bound"))
    return None if low is None else float(low), None if high is None else float(high)


def _timed(name: str, code: np.ndarray, seed: int) -> Space:
    """One point per row and step: of all rows, or of as many random ones as the map can hold."""
    real = ~np.isnan(code).any(-1)
    order = np.random.default_rng(seed).permutation(len(code))
    ends = real[order].sum(1).cumsum()
    rows = max(1, int(np.searchsorted(ends, MOST_STEPS, side="right")))
    kept = np.sort(order[:rows])
    row, step = np.nonzero(real[kept])
    note = f"The map holds {rows:,} random sequences of {len(code):,}." if rows < len(code) else ""
    return Space(name, code[kept[row], step], row=kept[row], step=step, note=note)


def pack_space(space: Space, seed: int, *, embed: bool = True) -> dict[str, Any]:
    """Return a space with its views as JSON-ready data."""
    points, d = space.points, space.points.shape[1]
    finite = np.isfinite(points).all(1)
    real = points[finite] if finite.any() else np.zeros((1, d))
    notes = [space.note] if space.note else []
    if space.binary:
        notes.append(f"{space.latent} is 0 or 1: the points are probabilities of 1.")
    if not finite.all():
        count = int((~finite).sum())
        notes.append(f"{count:,} of the points are not finite, and lie in the upper right corner.")
        points = np.where(finite[:, None], points, real.mean(0, dtype=np.float64))
    views = _views(points, finite, space.names, seed, embed=embed)
    for view in views:
        view["note"] = " ".join([*notes, *filter(None, [view["note"]])])
        if space.binary:  # p reads only zeros and ones, so no point of the plane can be decoded
            view |= {"origin": None, "axes": None}
    kept_points = np.where(finite[:, None], points, np.nan)
    kept_points = np.round(kept_points) if space.binary else kept_points
    wide = 4 if points.size * 4 <= CODES // 2 else 2
    # Half precision ends at 65504.
    kept = points.size * wide <= CODES and (wide == 4 or float(np.abs(real).max()) < 6e4)
    return {
        "latent": space.latent,
        "size": d,
        "count": len(points),
        "row": None if space.row is None else pack(space.row, "u4"),
        "step": None if space.step is None else _pack_steps(space.step),
        "views": views,
        "codes": pack(kept_points, f"f{wide}") if kept else None,
        "mean": _plain(real.mean(0, dtype=np.float64)),
        "sd": _plain(real.std(0, dtype=np.float64)),
        "low": _plain(real.min(0)),
        "high": _plain(real.max(0)),
        "support": list(space.support),
        "whole": space.whole,
    }


def _pack_steps(step: np.ndarray) -> dict[str, Any]:
    return pack(step, "u2" if step.max(initial=0) < 2**16 else "u4")


def _views(
    points: np.ndarray, finite: np.ndarray, names: Sequence[str], seed: int, *, embed: bool
) -> list[dict[str, Any]]:
    """The views of points; those that are not ``finite`` stand at the mean, and have no place."""
    found = _all_views(points, names, seed, embed=embed)
    return [
        {
            key: quantised(np.where(finite, value, np.nan)) if key in ("across", "up") else value
            for key, value in view.items()
        }
        for view in found
    ]


def _all_views(
    points: np.ndarray, names: Sequence[str], seed: int, *, embed: bool
) -> list[dict[str, Any]]:
    d = points.shape[1]
    if d == 1:
        spread = np.random.default_rng(seed).normal(size=len(points))
        flat = np.column_stack([points[:, 0], spread])
        view = _view("entries", names[0], flat, np.zeros(1), np.array([[1.0], [0.0]]))
        return [view | {"x": names[0], "y": "", "note": "Heights are random and have no meaning."}]
    if d == 2:
        view = _view("entries", f"{names[0]} and {names[1]}", points, np.zeros(2), np.eye(2))
        return [view | {"x": names[0], "y": names[1]}]
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
        "across": flat[:, 0],
        "up": flat[:, 1],
        "origin": None if origin is None else _plain(origin),
        "axes": None if axes is None else [_plain(axis) for axis in axes],
        "note": "",
    }


def principal_axes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean, the first two principal axes, [2, d], and their shares of the variance."""
    mean = points.mean(0, dtype=np.float64)
    centred = points - mean
    # The squares of huge numbers would overflow; axes and shares do not depend on the scale.
    centred /= np.abs(centred).max(initial=0.0) or 1.0
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
    centre = points.mean(0, dtype=np.float64)
    spread = float(np.abs(points - centre).max(initial=0.0))
    if not spread > 0:
        return np.zeros((n, 2)), "All codes are equal."

    def scaled(part: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray((part - centre) / spread, dtype=np.float32)

    base = scaled(points[chosen])
    perplexity = min(30.0, (len(base) - 1) / 3)
    found = TSNE(
        perplexity=perplexity, init="pca", random_state=seed, max_iter=500, method="barnes_hut"
    ).fit_transform(base)
    note = "Distances between far groups have no meaning."
    if len(chosen) == n:
        return found, note
    placed = np.empty((n, 2), np.float32)
    near = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(base)
    for start in range(0, n, 50_000):
        part = points[start : start + 50_000]
        distance, neighbour = near.kneighbors(scaled(part))
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
