"""Check for decoders whose fixed scale is far below the spread of the data.

A Normal with scale 0.2 on pixels from 0 to 16 counts every error in units of 0.2. log p of a row is
then so large that the KL terms weigh nothing beside it: the latents follow the noise of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from aevb.declare.families import LocationScale
from aevb.declare.graph import Graph
from aevb.estimate.keys import masks_of

RATIO = 10.0  # standard deviations of the data per scale from which on a scale is small


def note_small_scales(graph: Graph, rows: Mapping[str, Tensor]) -> Iterator[tuple[str, str, str]]:
    """Yield a variable, a note and a remedy for each fixed scale that is small for the data."""
    for name in graph.observed:
        entry = graph.rule("p", name)
        spec, parents = entry.spec, entry.key.parents
        # Where a parent is observed, or is the past, it may explain the spread.
        decoded = not graph.timed[name] and all(ref.name in graph.latents for ref in parents)
        if (
            name not in rows
            or not decoded
            or not isinstance(spec, LocationScale)
            or not isinstance(scale := getattr(spec, "scale", None), int | float)
        ):
            continue
        spread = _spread(graph, name, rows)
        if spread <= RATIO * scale:
            continue
        family = type(spec).__name__
        yield (
            name,
            f"{name} has a standard deviation of {spread:.3g} in its columns, {spread / scale:.0f} "
            f"times the fixed scale of p's {family}. Small errors then cost so much that the KL "
            f"terms weigh almost nothing.",
            f"Divide {name} by {float(f'{3 * spread:.1g}'):g}, or declare a larger scale: "
            f"{family}(…, scale={float(f'{spread / 3:.1g}'):g}).",
        )


def _spread(graph: Graph, name: str, rows: Mapping[str, Tensor]) -> float:
    """Return the root of the mean variance of the columns; 0 without a known value."""
    known = torch.ones((), dtype=torch.bool)
    for mask in masks_of(rows, name, timed=graph.timed[name]):
        known = known & mask.cpu()
    values = rows[name].cpu().double()
    there = known.expand(values.shape).flatten(0, 1)
    values = torch.where(there, values.flatten(0, 1), 0.0)
    count = there.sum(0).clamp_min(1)
    mean = values.sum(0) / count
    variance = torch.where(there, (values - mean).square(), 0.0).sum(0) / count
    return float(variance.mean().sqrt())
