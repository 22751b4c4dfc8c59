"""Check for series that are too short for the unknown starting values of p.

A component such as a season of 12 months starts at values with a nearly flat prior. If a series has
fewer known steps than these values, it does not determine them, and forecasts are arbitrary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.data.unscaled import moments
from aevb.declare.graph import Graph
from aevb.estimate.keys import masks_of

FLAT = 30.0  # a prior this many times as wide as the data leaves a starting value unknown


def note_short_series(graph: Graph, rows: Mapping[str, Tensor]) -> str | None:
    """Return a note if some series has fewer known values than p has unknown starting values."""
    timed = [name for name in graph.observed if graph.timed[name] and name in rows]
    if not timed:
        return None
    spread = max(float(moments(rows, name, timed=True).sd.max()) for name in timed)
    starts = {}
    for name in graph.latents:
        first = graph.p[name].get("first")
        scale = getattr(first.spec, "scale", None) if first is not None else None
        if isinstance(scale, int | float) and scale > FLAT * spread > 0:
            starts[f"{name}[0]"] = graph.size(name)
    needed = sum(starts.values())
    if not needed:
        return None
    count = torch.zeros((), dtype=torch.long)
    for name in timed:
        known = torch.ones(rows[name].shape, dtype=torch.bool)
        for mask in masks_of(rows, name, timed=True):
            known &= mask.cpu().expand(known.shape)
        count = count + known.sum((0, -1))
    row = int(count.argmin())
    fewest = int(count[row])
    if fewest >= needed:
        return None
    which = ", ".join(f"{name} has {size}" for name, size in starts.items())
    return (
        f"Row {row} (from 0) has {fewest} known value{'s' * (fewest != 1)}, fewer than the "
        f"{needed} unknown starting values of p ({which}): it does not show every season or slope "
        f"once, and forecasts are arbitrary. Use a longer series, or a model with fewer of them."
    )
