"""Exact expectation-maximisation (EM): E-step by Bayes' rule, M-step in closed form.

For a linear-Gaussian p, the posterior is Gaussian and each factor is a regression on expected
moments. For finite latents, the posterior is a table of responsibilities and each factor is a
weighted maximum-likelihood fit. Both accumulate statistics over all rows, so data need not fit into
memory and processes can share the work. ``update`` then returns p's next parameters as one vector.
An iteration (``iterations.py``) extrapolates from several of these vectors by Anderson acceleration
(``acceleration.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from aevb.declare.networks import mlp
from aevb.evidence.exact import why_not_exact
from aevb.evidence.finite import why_not_finite
from aevb.evidence.linear_gaussian import why_not_linear_gaussian
from aevb.model import Model
from aevb.training.em.factors import Statistics
from aevb.training.em.hidden_markov import HiddenMarkov, why_not_hidden_markov
from aevb.training.em.markov_chain import MarkovChain, is_markov_chain
from aevb.training.em.mixtures import Mixtures, is_mixture
from aevb.training.em.regressions import Regressions
from aevb.training.em.responsibilities import Responsibilities

__all__ = ["Regressions", "Responsibilities", "Statistics", "exact_em"]


def exact_em(
    model: Model, least: float | Sequence[float] | None = None
) -> Regressions | Responsibilities:
    """Return the EM algorithm for this model.

    ``least`` is the lower limit of a variance, as a share of the column's own variance; one share
    for all columns, or one for each column of the Gaussian variables.

    Raises ValueError with the reason, and with another schedule to use, if the model has no exact
    EM.
    """
    method = _method(model)
    if isinstance(least, Sequence):
        method.set_shares(least)
    elif least is not None:
        method.least = least
    return method


def _method(model: Model) -> Regressions | Responsibilities:
    if not model.graph.latents:
        raise ValueError(
            "em() computes the posterior of latents, and this model has none. Use mle() or joint()."
        )
    for entry in model.graph.entries():
        if entry.side == "p" and isinstance(entry.spec.net, mlp) and entry.spec.net.fixed:
            raise ValueError(
                f"em() sets all weights of a factor in closed form, but {entry.id} has fixed "
                f"weights. Use mle() or joint()."
            )
        if entry.side == "p" and getattr(entry.spec, "scale", None) == "isotropic":
            raise ValueError(
                f"em() works in the units of each column, but {entry.id} has one scale for all "
                f'columns (scale="isotropic"). Use mle() or joint().'
            )
    if reason := why_not_exact(model):
        raise ValueError(
            f"em() needs the exact posterior, which has no closed form for this model: {reason}. "
            f"Use alternate() or joint()."
        )
    if why_not_finite(model) is None:
        method = Responsibilities(model)
        return Mixtures(model) if method.closed and is_mixture(model) else method
    if (chain := why_not_hidden_markov(model)) is None:
        return MarkovChain(model) if is_markov_chain(model) else HiddenMarkov(model)
    if reason := why_not_linear_gaussian(model):
        kinds = (
            "finite latents (in time: with factors that read one class each), or variables "
            "without time that are all jointly Gaussian"
        )
        finite = all(
            entry.spec.finite
            for name in model.graph.latents
            for entry in model.graph.p[name].values()
        )
        reason = chain if finite else reason
        raise ValueError(
            f"em() has closed forms for {kinds}; here {reason}. The evidence is still exact: use "
            f"mle() or joint()."
        )
    return Regressions(model)
