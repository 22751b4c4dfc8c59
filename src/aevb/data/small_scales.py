"""Check for decoders whose fixed scale is far below the spread of the data.

A Normal with scale 0.2 on pixels from 0 to 16 counts every error in units of 0.2. log p of a row is
then so large that the KL terms weigh nothing beside it: the latents follow the noise of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aevb.data.unscaled import Moments
from aevb.declare.families import LocationScale
from aevb.declare.graph import Graph

RATIO = 10.0  # standard deviations of the data per scale from which on a scale is small


def note_small_scales(
    graph: Graph, columns: Mapping[str, Moments]
) -> Iterator[tuple[str, str, str]]:
    """Yield a variable, a note and a remedy for each fixed scale that is small for the data."""
    for name, found in columns.items():
        entry = graph.rule("p", name)
        spec, parents = entry.spec, entry.key.parents
        # Where a parent is observed, or is the past, it may explain the spread.
        decoded = not graph.timed[name] and all(ref.name in graph.latents for ref in parents)
        if (
            not decoded
            or not isinstance(spec, LocationScale)
            or not isinstance(scale := getattr(spec, "scale", None), int | float)
        ):
            continue
        spread = float(found.sd.square().mean().sqrt())
        if spread <= RATIO * scale:
            continue
        family = type(spec).__name__
        yield (
            name,
            f"{name} has a standard deviation of {spread:.3g} in its columns, {spread / scale:.0f} "
            f"times the fixed scale of p's {family}. Small errors then cost so much that the KL "
            f"terms weigh almost nothing.",
            f"Divide {name} by {float(f'{spread / (3 * scale):.1g}'):g}, or declare a larger "
            f"scale: {family}(…, scale={float(f'{spread / 3:.1g}'):g}).",
        )
