"""Draws of the future of a chain of classes: from the belief at each row's end.

The future depends on the past through the class and the data of the last step. So p is continued
from that step alone. It needs no draws of the past, and does not run over it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aevb.estimate.batch import Batch
from aevb.estimate.keys import STEPS, is_mask, mask_of
from aevb.evidence.exact_posterior import Marginals, table_of
from aevb.forecasting.continuation import continued
from aevb.forecasting.request import Past, at_steps
from aevb.runtime.seeding import generator


def finite_draws(past: Past, beliefs: Marginals, samples: int) -> dict[str, Tensor] | None:
    """Draw the future of the observed variables jointly, [S, steps, N, d].

    ``beliefs`` are the marginals of the past followed by the future, given the data so far. None if
    p is no chain of one finite latent.
    """
    graph = past.model.graph
    if len(graph.latents) != 1 or graph.latents[0] not in beliefs.probs:
        return None
    (name,) = graph.latents
    if not graph.timed[name] or name in past.batch or not _markov(past):
        return None
    rows = torch.arange(len(past.lengths), device=past.lengths.device)
    probs = beliefs.probs[name][rows, past.lengths - 1]
    chosen = torch.multinomial(probs, samples, replacement=True, generator=generator(probs.device))
    like = past.model._parameter()
    values = table_of(past.model, name).to(like.dtype)[chosen.T]  # [S, N, d]
    last = Past(past.model, _last_step(past), past.steps, past.given)
    found = continued(last, {name: values.unsqueeze(1)}, samples)
    return {observed: found[observed].draws for observed in past.names}


def _markov(past: Past) -> bool:
    """Return whether the last step says all that the future depends on."""
    for entry in past.model.graph.entries():
        for ref in entry.key.parents if entry.side == "p" else ():
            if ref.lag == 0:
                continue
            # A deterministic state remembers earlier steps; a missing entry is unknown.
            if ref.name in past.model.graph.deterministic or mask_of(ref.name) in past.batch:
                return False
    return True


def _last_step(past: Past) -> Batch:
    """Return the data of the last step of each row, [1, N, d]."""
    graph, last = past.model.graph, (past.lengths - 1)[None]
    found: Batch = {}
    for key in past.batch:
        if key == STEPS or is_mask(key):
            continue
        for part in (key, mask_of(key)):
            if part in past.batch:
                whole = past.batch[part]
                if graph.timed[key]:
                    n = len(past.lengths)
                    whole = at_steps(whole.expand(len(whole), n, whole.shape[-1]), last)
                found[part] = whole
    return found
