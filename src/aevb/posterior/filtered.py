"""The exact filtering posterior: the belief about each step given the data up to that step."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from aevb.estimate.keys import real_steps
from aevb.evidence.exact_posterior import Marginals
from aevb.evidence.forward_pass import ForwardPass, why_not_forward
from aevb.evidence.prefixes import marginals_by_prefixes
from aevb.posterior.exact import ExactPosterior


class FilteredPosterior(ExactPosterior):
    """The exact p(latents of step t | data of steps 0 … t), at every step t.

    A latent without time has a marginal per step too. Marginals of different steps condition on
    different data, so there are no joint draws.

    Raises :class:`NotExactError`, with the reason, for a model without an exact posterior.
    """

    @cached_property
    def marginals(self) -> Marginals:
        with self.model._evaluating(None):
            if why_not_forward(self.graph) is None:
                return ForwardPass(self.model, self.unknowns.structure, self.batch).marginals()
            return marginals_by_prefixes(self.model, self.batch)

    def _by_step(self, name: str) -> bool:
        return True

    def _as_public(self, key: str, name: str) -> Tensor | None:
        value = super()._as_public(key, name)
        if value is None or self.graph.timed[name]:
            return value
        return value.unsqueeze(1).expand(-1, self.steps, -1)

    def _certain(self, name: str) -> Tensor | None:
        found = super()._certain(name)
        real = real_steps(self.batch)
        if self.graph.timed[name] or real is None:
            return found
        padded = ~real.squeeze(-1).T
        return padded if found is None else found | padded

    def sample(self, samples: int = 1) -> dict[str, Tensor]:
        raise ValueError(
            "A filter has no joint draws: the beliefs of different steps condition on different "
            "data. Use smooth, or posterior(…).sample(…)."
        )

    def log_prob(self, **values: Any) -> Tensor:
        raise ValueError(
            "A filter has no joint density: the beliefs of different steps condition on different "
            'data. Take one marginal, e.g. beliefs["z"].log_prob(z).'
        )
