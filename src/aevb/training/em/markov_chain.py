"""EM for a hidden Markov model with one chain of states.

The likelihood of the states and the M-step are matrix products, as for a mixture. The posterior of
the states comes from the forward-backward algorithm.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from aevb.declare.graph import Entry
from aevb.estimate.batch import Batch
from aevb.estimate.keys import real_steps
from aevb.evidence.forward_backward import ForwardBackward, PathsError
from aevb.model import Model
from aevb.training.em.emissions import Sums
from aevb.training.em.hidden_markov import HiddenMarkov, why_not_closed
from aevb.training.em.mixtures import Mixtures, Part, counts, reads_one_class


def is_markov_chain(model: Model) -> bool:
    """Return whether the only latent is a chain of states, read by observed variables in time."""
    graph = model.graph
    if len(graph.latents) != 1 or not all(graph.timed[name] for name in graph.stochastic):
        return False
    (latent,) = graph.latents
    forward = [ref.lag for ref in graph.rule("p", latent).key.parents] == [-1]
    own = all(len(graph.p[name]) == 1 for name in graph.observed)
    now = all(not ref.lag for name in graph.observed for ref in graph.rule("p", name).key.parents)
    cpu = model._parameter().device.type == "cpu"
    whole = graph.p[latent].keys() == {"t", "first"}
    return cpu and forward and whole and own and now and reads_one_class(model, latent)


class MarkovChain(Mixtures):
    """Hidden Markov models with p(y[0]), p(y[t] | y[t−1]), and observed variables that read y[t].

    Chains that need log space are left to :class:`HiddenMarkov`, which has the same parameters.
    """

    def _has_closed_form(self, entry: Entry) -> bool:
        return why_not_closed(self.model, entry) is None

    @cached_property
    def general(self) -> HiddenMarkov:
        method = HiddenMarkov(self.model)
        method.open(self.rows)
        return method

    def _prepared(self, batch: Batch) -> Part:
        part = super()._prepared(batch)
        steps = max(len(batch[name]) for name in self.rules)
        real = real_steps(batch)
        part["real"] = () if real is None else (real.expand(steps, -1, 1)[..., 0],)
        part["steps"] = (torch.tensor(steps),)
        return part

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        if not self._known(self.rows.first()):
            with suppress(PathsError):
                return super().update(vector)
        return self.general.update(vector)

    def _posterior(
        self, table: Tensor, part: Part, heads: dict[str, dict[str, Tensor]]
    ) -> tuple[Tensor, Tensor, dict[str, Sums]]:
        first, later = self.graph.p[self.latent]["first"], self.graph.p[self.latent]["t"]
        steps, count = int(part["steps"][0]), table.shape[1]
        start = heads.get(first.id, {}).get("logits", table.new_zeros(1, count)).log_softmax(-1)
        pairs = heads[later.id]["logits"].log_softmax(-1)[None, None, None]
        here = table.unflatten(0, (steps, -1)).unsqueeze(1)  # [T, 1, N, C]
        parts = (start + here[:1], pairs, here[1:])
        if steps == 1:
            weights = (start + table).softmax(-1)
            evidence = (start + table).logsumexp(-1).sum()
            return weights, evidence, {first.id: counts(weights.sum(0, keepdim=True))}
        real = part["real"][0][1:, None].numpy() if part["real"] else None
        with np.errstate(all="ignore"):
            begin, moves, rest = (one.numpy() for one in parts)
            chain = ForwardBackward(begin, moves, rest, real)
            weight = np.ones_like(chain.log_sum)
            found = chain.gradients(weight, tuple(tuple(one.shape) for one in parts))
        at_first, moved, at_later = map(torch.from_numpy, found)
        weights = torch.cat([at_first, at_later]).reshape(-1, count)
        own = {first.id: counts(at_first.sum((0, 1, 2))[None]), later.id: counts(moved[0, 0, 0])}
        return weights, torch.tensor(chain.log_sum.sum()), own

    def _counted(self, weights: Tensor) -> dict[str, Sums]:
        entries, total = self.graph.p[self.latent], weights.sum(0, keepdim=True)
        return {
            entries["first"].id: counts(total),
            entries["t"].id: counts(total.expand(weights.shape[1], -1)),
        }
