"""Exact EM: the E-step is Bayes' rule, the M-step a closed form.

For a linear-Gaussian p the posterior is Gaussian and each factor a regression on expected moments; for finite latents it is a
table of responsibilities and each factor a weighted maximum of likelihood. Both add up statistics over all rows (so that data
need not fit into memory, and processes can share the work), then give p's next parameters, as one vector (``update``). An iteration
(``iterations.py``) extrapolates from several of them (``acceleration.py``).
"""

from __future__ import annotations

from aevb.evidence.exact import why_not_exact
from aevb.evidence.finite import why_not_finite
from aevb.evidence.linear_gaussian import why_not_linear_gaussian
from aevb.model import Model
from aevb.training.em.factors import Statistics
from aevb.training.em.hidden_markov import HiddenMarkov, why_not_hidden_markov
from aevb.training.em.mixtures import Mixtures, is_mixture
from aevb.training.em.regressions import Regressions
from aevb.training.em.responsibilities import Responsibilities

__all__ = ["Regressions", "Responsibilities", "Statistics", "exact_em"]


def exact_em(model: Model) -> Regressions | Responsibilities:
    """How this model's EM goes; a ValueError says why there is none."""
    if reason := why_not_exact(model):
        raise ValueError(f"em() takes the exact posterior, which is not known for this model: {reason}. Use alternate() or joint().")
    if why_not_finite(model) is None:
        method = Responsibilities(model)
        return Mixtures(model) if method.closed and is_mixture(model) else method
    if (chain := why_not_hidden_markov(model)) is None:
        return HiddenMarkov(model)
    if reason := why_not_linear_gaussian(model):
        kinds = "finite latents (in time: with factors that read one class each), or variables without time that are all jointly Gaussian"
        finite = all(entry.spec.finite for name in model.graph.latents for entry in model.graph.p[name].values())
        reason = chain if finite else reason
        raise ValueError(f"em() has closed forms for {kinds}; here {reason}. The evidence is exact all the same: use mle(), or joint().")
    return Regressions(model)
