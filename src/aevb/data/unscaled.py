"""Check for columns far from mean 0 and standard deviation 1, under a likelihood of learned scale.

Networks begin with outputs near 0 and scales near 1. The small steps that train a network with a
hidden layer take long to reach means in the tens, or a scale of 0.01: training ends before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.declare.families import LocationScale
from aevb.declare.graph import Graph
from aevb.estimate.keys import masks_of

# A factor of 5 costs a fifth of a nat per column after 2,000 steps, one of 10 more than a nat.
LARGE, SMALL = 5.0, 0.1


@dataclass(frozen=True)
class Moments:
    """The mean, the standard deviation and the median absolute deviation of each column."""

    mean: Tensor
    sd: Tensor
    deviation: Tensor


def note_unscaled(graph: Graph, columns: Mapping[str, Moments]) -> Iterator[tuple[str, str, str]]:
    """Yield a variable, a note and a remedy for each variable with a column far from standardised.

    The pixels of an image have one scale. The standard deviation of a column in which most values
    are equal says how many differ, not in which unit they are.
    """
    for name, found in columns.items():
        mean, sd = found.mean, found.sd
        spec = graph.rule("p", name).spec
        if not isinstance(spec, LocationScale) or not spec.learns_scale:
            continue
        own = sd.max() if len(graph.shapes[name]) == 3 else sd
        far = torch.maximum(mean.abs(), sd) / LARGE
        far = torch.maximum(far, torch.where(found.deviation > 0, SMALL / own, 0.0))
        if float(far.max()) <= 1:
            continue
        where = f" (farthest: column {int(far.argmax())}, from 0)" * (len(mean) > 1)
        yield (
            name,
            f"{name} is not standardised: its columns have means from {float(mean.min()):.3g} to "
            f"{float(mean.max()):.3g} and standard deviations from {float(sd.min()):.3g} to "
            f"{float(sd.max()):.3g}{where}. Networks start near mean 0 and scale 1, and training "
            f"may end far from the optimum.",
            f"Train on {name} = aevb.data.standardise({name}); {name}.undo(draws) returns to its "
            f"units (on the command line, --prepare standardise).",
        )


def moments_of(graph: Graph, rows: Mapping[str, Tensor]) -> dict[str, Moments]:
    """Return the moments of the columns of each observed variable with a location and a scale."""
    return {
        name: moments(rows, name, timed=graph.timed[name])
        for name in graph.observed
        if name in rows and isinstance(graph.rule("p", name).spec, LocationScale)
    }


def moments(rows: Mapping[str, Tensor], name: str, *, timed: bool) -> Moments:
    """Return the moments of each column; 0 without a known value."""
    known = torch.ones((), dtype=torch.bool)
    for mask in masks_of(rows, name, timed=timed):
        known = known & mask.cpu()
    values = rows[name].detach().cpu().double()
    there = known.expand(values.shape).flatten(0, 1)
    values = torch.where(there, values.flatten(0, 1), 0.0)
    count = there.sum(0).clamp_min(1)
    mean = values.sum(0) / count
    variance = torch.where(there, (values - mean).square(), 0.0).sum(0) / count
    values = torch.where(there, values, torch.nan)
    deviation = (values - values.nanmedian(0).values).abs().nanmedian(0).values
    return Moments(mean, variance.sqrt(), deviation.nan_to_num(0.0))
