"""The choices of a plan: a latent's expectation (:class:`Draw`) and KL term (:class:`Term`).

They say how each is computed; :class:`Reduction` says how an axis is reduced. All are string enums.
A request such as ``how={"y": "gumbel"}`` uses the values of the first two.
"""

from __future__ import annotations

from enum import StrEnum

from aevb.declare.conditionals import Conditional
from aevb.declare.families import Exact


class Draw(StrEnum):
    """How the plan computes the expectation over a latent."""

    ENUMERATE = "enumerate"  # a sum over all values, weighted by q
    SUM = "sum"  # a sum over all values inside the logarithm, in which q cancels
    STRATIFY = "stratify"  # every component of a mixture once, weighted by its probability
    PATHWISE = "pathwise"  # a sample that is a differentiable function of q's parameters
    GUMBEL = "gumbel"  # a relaxed sample, with the term of the discrete one
    RELAXED = "relaxed"  # a relaxed sample, with both densities of the relaxation
    STRAIGHT_THROUGH = "straight-through"  # a discrete sample with the gradient of a relaxed one
    SCORE = "score"  # a sample with the score function's gradient
    DETACHED = "detached"  # a sample without gradient
    SAMPLE = "sample"  # a sample of q after training; a request cannot ask for it

    __repr__ = str.__repr__

    @property
    def enumerates(self) -> bool:
        """Whether it sums over all values of the latent instead of sampling."""
        return self in (Draw.ENUMERATE, Draw.SUM)

    @property
    def has_axis(self) -> bool:
        """Whether the latent's values or mixture components have an axis of their own."""
        return self.enumerates or self is Draw.STRATIFY

    @property
    def reparametrises(self) -> bool:
        """Whether its sample is a pathwise sample of q, with a gradient or without."""
        return self in (Draw.PATHWISE, Draw.DETACHED)

    @property
    def relaxes(self) -> bool:
        """Whether it depends on a temperature."""
        return self in (Draw.GUMBEL, Draw.RELAXED, Draw.STRAIGHT_THROUGH)

    @property
    def bias(self) -> str | None:
        """A description of the estimator's bias; None if it is unbiased."""
        return _BIASES.get(self)

    def check(self, name: str, q: Conditional, p: Conditional, samples: int, bound: str) -> None:
        """Raise ValueError if the latent ``name`` cannot be drawn like this from its factor of q.

        The message lists the alternatives.
        """
        family, where = type(q).__name__, f"how={{{name!r}: {self!r}}}"
        if self.enumerates and not p.finite:
            raise ValueError(
                f'{where}: {name} is a {family} with infinitely many values. Use "pathwise".'
            )
        if isinstance(q, Exact) and not self.enumerates:
            raise ValueError(
                f'{where}: Exact() is the sum over all values of {name}. Use "enumerate".'
            )
        if self is Draw.STRATIFY and q.strata is None:
            raise ValueError(
                f"{where}: only a Mixture has components to draw, {name} is a {family}."
            )
        if self.reparametrises and not q.pathwise:
            instead = '"enumerate", "gumbel" or "score"' if p.finite else '"stratify" or "score"'
            raise ValueError(
                f"{where}: a {family} sample is not a differentiable function of its parameters. "
                f"Use {instead}."
            )
        if self.relaxes and not q.relaxable:
            raise ValueError(
                f"{where}: only OneHot and Bernoulli have a relaxation, {name} is a {family}."
            )
        if self is Draw.SCORE and samples < 2:
            raise ValueError(
                f"{where}: the leave-one-out baseline compares samples. Ask for samples=2 or more."
            )
        if self is Draw.SUM and bound != "iwae":
            raise ValueError(
                f"{where} sums inside the logarithm, which is a different bound. Ask for "
                f'bound="iwae" too, or use "enumerate".'
            )
        if self is Draw.GUMBEL and bound == "iwae":
            raise ValueError(
                f"{where}: iwae needs the log-weight of each sample, but a relaxed sample has no "
                f"probability under the categorical. "
                'Use "relaxed" or "straight-through".'
            )


_BIASES = {
    Draw.GUMBEL: "value and gradient are biased by the relaxation, less so at low temperature",
    Draw.RELAXED: "an unbiased bound, but of the relaxed model",
    Draw.STRAIGHT_THROUGH: "the value is unbiased, the gradient is not",
    Draw.DETACHED: "no gradient of the reconstruction reaches q, so the gradient of q is biased",
}


class Reduction(StrEnum):
    """How the values along an axis of a plan become one."""

    MEAN = "mean"
    EXPECTATION = "expectation"
    LOG_MEAN_EXP = "log mean exp"
    LOG_EXPECTATION_EXP = "log expectation exp"
    LOG_SUM_EXP = "log sum exp"

    @property
    def in_logarithm(self) -> bool:
        """Whether the exponentials of the values are reduced, inside a logarithm."""
        return self not in (Reduction.MEAN, Reduction.EXPECTATION)


class Term(StrEnum):
    """How the plan computes E[log p(v|·) − log q(v|·)] of a latent v."""

    CLOSED = "closed"  # a KL divergence in closed form
    ENTROPY = "entropy"  # log p at the sample, q's entropy in closed form
    SAMPLED = "sampled"  # log p and log q at the sample
    SUMMED = "summed"  # over all values of an enumerated latent; a request cannot ask for it
    # Both densities of the relaxation at the relaxed sample, for the draw of the same name.
    RELAXED = "relaxed"

    __repr__ = str.__repr__

    def check(self, name: str, draw: Draw) -> None:
        """Raise ValueError if the draw of the latent ``name`` does not allow this term."""
        where = f"how={{{name!r}: {self!r}}}"
        if draw.enumerates and self is not Term.CLOSED:
            raise ValueError(
                f"{where}: {name} is enumerated, so its term is summed exactly; there is no "
                f"sample. Draw it (gumbel, score) to sample its term."
            )
        if draw is Draw.RELAXED:
            raise ValueError(
                f'{where}: "relaxed" takes both log-probabilities on the relaxed sample. Use '
                f'"gumbel" for the categorical KL.'
            )
        if draw is Draw.GUMBEL and self is Term.SAMPLED:
            raise ValueError(
                f"{where}: a relaxed sample has no probability under the categorical. Use "
                f'"relaxed".'
            )


# The values that a request may use.
DRAWS = tuple(draw for draw in Draw if draw is not Draw.SAMPLE)
TERMS = (Term.CLOSED, Term.ENTROPY, Term.SAMPLED)
