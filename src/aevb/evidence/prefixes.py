"""Filtering for a p that does not run forward in time: one smoother per step.

All data after step t are hidden, and the smoother gives the marginals of step t. This takes T times
as long as one pass (:mod:`aevb.evidence.forward_pass`), which needs a p that runs forward. The
model is p of all steps: its latents after step t exist, but their data are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.evidence.exact_posterior import Components, Marginals, Unknowns
from aevb.evidence.structure import NotExactError, Structure


def marginals_by_prefixes(model: DeclaredModel, batch: Mapping[str, Tensor]) -> Marginals:
    """Return the marginals of every latent at each step, [N, T, …], given the data up to it.

    Raises :class:`NotExactError` if p reads a variable whose later values would be hidden.
    """
    graph, steps = model.graph, model._extent(batch)[1]
    for entry in graph.entries():
        read = next(
            (ref for ref in entry.key.parents if ref.name in graph.observed and ref.timed), None
        )
        if entry.side == "p" and read is not None:
            raise NotExactError(
                f'"{entry.key}" reads {read}, and p does not run forward in time, so that later '
                f"data cannot be left out"
            )
    found: list[Marginals] = []
    for t in range(steps):
        hidden = _until(model, batch, t)
        structure = Structure(model, split_latents(graph, hidden)[0])
        found.append(Unknowns(model, structure, hidden).marginals())

    def at(name: str, part: Tensor, t: int) -> Tensor:
        return part[:, t if graph.timed[name] else 0]

    def stacked(name: str, parts: list[Tensor]) -> Tensor:
        return torch.stack([at(name, part, t) for t, part in enumerate(parts)], 1)

    probs = {
        name: stacked(name, [one.probs[name] for one in found])
        for name in found[0].probs
        if name in graph.latents
    }
    components = {}
    for name in (name for name in found[0].components if name in graph.latents):
        own = [one.components[name] for one in found]
        components[name] = Components(
            stacked(name, [one.weight for one in own]),
            stacked(name, [one.mean for one in own]),
            stacked(name, [one.variance for one in own]),
            stacked(name, [one.covariance for one in own if one.covariance is not None]),
        )
    return Marginals(probs, components)


def _until(model: DeclaredModel, batch: Mapping[str, Tensor], t: int) -> dict[str, Tensor]:
    """Hide all data after step t; given variables stay."""
    graph, found = model.graph, dict(batch)
    for name in (*graph.observed, *graph.latents):
        if name in batch and graph.timed[name]:
            known = batch.get(mask_of(name), torch.ones_like(batch[name], dtype=torch.bool))
            known = known.expand(batch[name].shape).clone()
            known[t + 1 :] = False
            found[mask_of(name)] = known
            found[name] = torch.where(known, batch[name], torch.zeros_like(batch[name]))
    return found
