"""Batches for a particle filter that draws missing data, and that continues past the data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.estimate.batch import Batch
from aevb.estimate.keys import STEPS, is_mask, mask_of, variable_of


def completed(graph: Graph, batch: Mapping[str, Tensor], *, ahead: bool = False) -> frozenset[str]:
    """Return the observed variables whose missing entries the particles must draw from p.

    p reads them; with ``ahead``, all that have steps after the past.
    """
    return frozenset(
        name
        for name in graph.observed
        if (ahead and graph.timed[name]) or (mask_of(name) in batch and graph.is_read_by_p(name))
    )


def continued(
    graph: Graph,
    batch: Mapping[str, Tensor],
    ahead: int,
    given: Mapping[str, Tensor] | None = None,
) -> tuple[Batch, Tensor]:
    """Extend a batch of the past by ``ahead`` steps; return it and the mask of the past.

    The future of a row begins after its own last step. Its observed variables and latents are
    missing there. ``given`` has the future values [ahead, N, d] of the given variables with a time
    axis; observed variables may have future values in it, too.
    """
    given = given or {}
    timed = [name for name in batch if graph.timed.get(name)]
    steps, n = batch[timed[0]].shape[0], batch[timed[0]].shape[-2]
    device = batch[timed[0]].device
    real = batch.get(STEPS)
    length = torch.full((n, 1), steps, device=device) if real is None else real.sum(0).reshape(n, 1)
    t = torch.arange(steps + ahead, device=device)[:, None, None]
    past, whole = t < length, t < length + ahead
    place = (t - length).clamp(0, ahead - 1)  # the step of the future
    found: Batch = {}
    for name, value in batch.items():
        if name == STEPS or (is_mask(name) and graph.timed[variable_of(name)]):
            continue
        if not graph.timed[variable_of(name)]:
            found[name] = value
            continue
        old = torch.cat([value, value.new_zeros(ahead, n, value.shape[-1])])
        mask = batch.get(mask_of(name), torch.ones_like(value, dtype=torch.bool))
        known = torch.cat([mask, mask.new_zeros(ahead, n, value.shape[-1])])
        known = torch.where(past, known, torch.zeros_like(known))
        if name in given:
            later = given[name].gather(0, place.expand(-1, -1, value.shape[-1]))
            old, known = torch.where(past, old, later), known | (whole & ~past)
        elif name in graph.given:
            raise ValueError(
                f"{name} is given at every step: pass its values for the {ahead} steps to come."
            )
        found[name] = torch.where(known, old, torch.zeros_like(old))
        if name not in graph.given:
            found[mask_of(name)] = known | ~whole
    found[STEPS] = whole
    return found, past
