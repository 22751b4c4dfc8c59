"""Distributions that torch lacks or computes inaccurately, and the functions they share.

Nothing here validates its arguments (data are checked once, before training), and nothing
synchronises with the device.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

# torch's ContinuousBernoulli clamps probs at float32's eps; this is the logit of that clamp.
CLAMPED_LOGIT = math.log(1 - torch.finfo(torch.float32).eps) - math.log(
    torch.finfo(torch.float32).eps
)
INVERSE_SOFTPLUS_ONE = math.log(math.expm1(1.0))


def _inside(x: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Return the mask |x| < radius, and |x| with 1 in these entries.

    The 1 gives the far branch finite gradients.
    """
    near = x.abs() < radius
    return near, torch.where(near, torch.ones_like(x), x.abs())


def continuous_bernoulli_log_normalizer(logits: Tensor) -> Tensor:
    """The log-normaliser log C(η), C = η / tanh(η/2), of λˣ(1−λ)¹⁻ˣ on [0, 1].

    Even in η, and exact for any η.
    """
    near, a = _inside(logits, 0.5)
    far = a.log() + torch.log1p(-torch.exp(-a)).neg() + torch.log1p(torch.exp(-a))
    s = torch.where(near, logits, torch.zeros_like(logits)).square()
    higher = s * (-127 / 4838400 + s * (73 / 34214400 - s * 1414477 / 7846046208000))
    series = math.log(2) + s * (1 / 12 + s * (-7 / 1440 + s * (31 / 90720 + higher)))
    return torch.where(near, series, far)


def continuous_bernoulli_mean(logits: Tensor) -> Tensor:
    """The mean 1/(1−e^{−η}) − 1/η, computed by its series near 0 and by symmetry for negative η."""
    near, a = _inside(logits, 0.5)
    positive = -1 / torch.expm1(-a) - 1 / a
    far = torch.where(logits < 0, 1 - positive, positive)
    e = torch.where(near, logits, torch.zeros_like(logits))
    s = e.square()
    series = 0.5 + e * (1 / 12 + s * (-1 / 720 + s * (1 / 30240 + s * (-1 / 1209600))))
    return torch.where(near, series, far)


def continuous_bernoulli_variance(logits: Tensor) -> Tensor:
    """The variance 1/η² − 1/(4 sinh²(η/2)), computed by its series near 0."""
    near, a = _inside(logits, 0.5)
    far = a.pow(-2) - torch.exp(-a) / torch.expm1(-a).square()
    s = torch.where(near, logits, torch.zeros_like(logits)).square()
    series = 1 / 12 + s * (-1 / 240 + s * (1 / 6048 + s * (-1 / 172800)))
    return torch.where(near, series, far)


class ContinuousBernoulli(td.Distribution):
    """The continuous Bernoulli on [0, 1], exact in logit space for any logit.

    log p(x) = xη − softplus(η) + log C(η).
    """

    arg_constraints: ClassVar[dict] = {"logits": constraints.real}
    support = constraints.unit_interval
    has_rsample = True

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        super().__init__(logits.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return continuous_bernoulli_mean(self.logits)

    @property
    def variance(self) -> Tensor:
        return continuous_bernoulli_variance(self.logits)

    @property
    def probs(self) -> Tensor:
        return torch.sigmoid(self.logits)

    def expand(self, batch_shape, _instance=None):  # type: ignore[no-untyped-def]
        return ContinuousBernoulli(self.logits.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        # This is xη − softplus(η), in a form without cancellation at large positive η.
        positive = self.logits > 0
        decay = F.softplus(torch.where(positive, -self.logits, self.logits))
        return (
            (value - positive.to(value.dtype)) * self.logits
            - decay
            + continuous_bernoulli_log_normalizer(self.logits)
        )

    def icdf(self, value: Tensor) -> Tensor:
        """The quantile function; the reparametrised sample is ``icdf(u)`` with u uniform."""
        near, a = _inside(self.logits, 1e-2)
        u = torch.where(self.logits < 0, 1 - value, value)
        inner = u + (1 - u) * torch.exp(-a)
        # If u is exactly 0 and e^−a underflows, x is 0, and its gradient is set to 0.
        end = inner < torch.finfo(inner.dtype).tiny
        x = torch.where(
            end,
            torch.zeros_like(inner),
            1 + torch.log(torch.where(end, torch.ones_like(inner), inner)) / a,
        )
        far = torch.where(self.logits < 0, 1 - x, x)
        e = torch.where(near, self.logits, torch.zeros_like(self.logits))
        v = value * (1 - value)  # the terms of the series are the cumulants of a Bernoulli variable
        series = value + v * e * (
            0.5
            + e
            * (
                (1 - 2 * value) / 6
                + e * ((1 - 6 * v) / 24 + e * (1 - 2 * value) * (1 - 12 * v) / 120)
            )
        )
        return torch.where(near, series, far).clamp(0, 1)

    def rsample(self, sample_shape=torch.Size()) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: B008
        u = torch.rand(
            self._extended_shape(sample_shape), dtype=self.logits.dtype, device=self.logits.device
        )
        return self.icdf(u)


class StudentT(td.StudentT):
    """torch's StudentT, but the χ² distribution of its sampler is built only when it samples.

    torch builds and validates the χ² in the constructor, and the validation synchronises with the
    device.
    """

    def __init__(self, df: Tensor, loc: Tensor, scale: Tensor) -> None:
        self.df, self.loc, self.scale = broadcast_all(df, loc, scale)
        td.Distribution.__init__(self, self.df.shape, validate_args=False)

    # torch's moments index with a mask, which synchronises and cannot be traced.
    @property
    def mean(self) -> Tensor:
        return torch.where(self.df > 1, self.loc, math.nan)

    @property
    def variance(self) -> Tensor:
        many = self.df > 2
        ratio = self.df / torch.where(many, self.df - 2, 1.0)
        wide = torch.where(self.df > 1, math.inf, math.nan).to(self.loc.dtype)
        return torch.where(many, self.scale.square() * ratio, wide)

    @property
    def _chi2(self) -> td.Chi2:  # type: ignore[override]
        return td.Chi2(self.df, validate_args=False)

    def expand(self, batch_shape, _instance=None):  # type: ignore[no-untyped-def]
        return StudentT(*(part.expand(batch_shape) for part in (self.df, self.loc, self.scale)))


class MultivariateNormal(td.MultivariateNormal):
    """torch's MultivariateNormal with a shared inverse Cholesky factor.

    The factor is computed once for all rows that share it.
    """

    def __init__(self, loc: Tensor, scale_tril: Tensor) -> None:
        super().__init__(loc, scale_tril=scale_tril, validate_args=False)

    def expand(self, batch_shape, _instance=None):  # type: ignore[no-untyped-def]
        d = self.loc.shape[-1]
        return MultivariateNormal(self.loc.expand(*batch_shape, d), self._unbroadcasted_scale_tril)

    def whiten(self, value: Tensor) -> Tensor:
        """L⁻¹ (value − loc)."""
        factor = self._unbroadcasted_scale_tril
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, eye.expand(factor.shape), upper=False)
        return matvec(inverse, value - self.loc)

    def log_prob(self, value: Tensor) -> Tensor:
        d = self._unbroadcasted_scale_tril.shape[-1]
        return (
            -0.5 * (self.whiten(value).square().sum(-1) + d * math.log(2 * math.pi)) - self.log_det
        )

    @property
    def log_det(self) -> Tensor:
        """log |L|, half the log-determinant of the covariance."""
        return self._unbroadcasted_scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class Categories(td.OneHotCategorical):
    """torch's OneHotCategorical without validation (torch validates even with validate_args=False).

    ``log_prob`` is linear in the value.
    """

    def __init__(self, logits: Tensor) -> None:
        self._categorical = td.Categorical(logits=logits, validate_args=False)
        td.Distribution.__init__(self, logits.shape[:-1], logits.shape[-1:], validate_args=False)

    def expand(self, batch_shape, _instance=None):  # type: ignore[no-untyped-def]
        return Categories(self.logits.expand(*batch_shape, self.logits.shape[-1]))

    def log_prob(self, value: Tensor) -> Tensor:
        logits = self.logits
        impossible = torch.isneginf(logits) & (value == 0)
        return (value * torch.where(impossible, torch.zeros_like(logits), logits)).sum(-1)

    def entropy(self) -> Tensor:
        return -xlogy_difference(self.logits, torch.zeros_like(self.logits)).sum(-1)


class Values(td.Distribution):
    """A distribution over finitely many vectors.

    The vectors are the rows of ``table``, and ``probs`` are their probabilities.
    """

    arg_constraints: ClassVar[dict] = {"probs": constraints.simplex}

    def __init__(self, table: Tensor, probs: Tensor) -> None:
        self.table, self.probs = table, probs
        super().__init__(probs.shape[:-1], table.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.probs @ self.table

    @property
    def variance(self) -> Tensor:
        return self.probs @ self.table.square() - self.mean.square()

    def log_prob(self, value: Tensor) -> Tensor:
        here = (value.unsqueeze(-2) == self.table).all(-1)
        return (self.probs * here.to(self.probs.dtype)).sum(-1).log()

    def sample(self, sample_shape=torch.Size()) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: B008
        return self.table[
            td.Categorical(probs=self.probs, validate_args=False).sample(sample_shape)
        ]


class Poisson(td.Poisson):
    """torch's Poisson, parametrised by its log-rate.

    log p(k) = k log λ − λ − log k! is finite even if λ underflows.
    """

    def __init__(self, log_rate: Tensor) -> None:
        self.log_rate = log_rate
        super().__init__(log_rate.exp(), validate_args=False)

    def expand(self, batch_shape, _instance=None):  # type: ignore[no-untyped-def]
        return Poisson(self.log_rate.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return value * self.log_rate - self.rate - torch.lgamma(value + 1)


class NegativeBinomial(td.NegativeBinomial):
    """torch's negative binomial, with a log-probability that is accurate for large r and counts.

    A large r, with which it is nearly a Poisson distribution, is the most likely one of counts that
    are not over-dispersed.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        r, logits = self.total_count, self.logits
        each = r * F.logsigmoid(-logits) + value * F.logsigmoid(logits)
        return each + log_binomial(r, value)


def log_binomial(r: Tensor, value: Tensor) -> Tensor:
    """log Γ(r + value) − log Γ(r) − log Γ(value + 1).

    A difference of large logarithms would lose digits, in float32 all of them. In float32, it is
    therefore taken in float64, and in float64 by Stirling's series if a term is large.
    """
    if r.dtype == torch.float32:
        wide, count = r.double(), value.double()
        found = torch.lgamma(wide + count) - torch.lgamma(wide) - torch.lgamma(count + 1)
        return found.to(r.dtype)
    large = torch.maximum(r, value + 1) > 100
    a = torch.where(large, torch.maximum(r, value + 1), 100.0)
    b = torch.where(large, torch.minimum(r, value + 1), 1.0)
    series = (
        (a + b - 1.5) * torch.log1p((b - 1) / a)
        + (b - 1) * (a.log() - 1)
        + _stirling_remainder(a + b - 1)
        - _stirling_remainder(a)
        - torch.lgamma(b)
    )
    r, value = torch.where(large, 1.0, r), torch.where(large, 0.0, value)
    direct = torch.lgamma(r + value) - torch.lgamma(r) - torch.lgamma(value + 1)
    return torch.where(large, series, direct)


def _stirling_remainder(a: Tensor) -> Tensor:
    """log Γ(a) − (a − ½) log a + a − ½ log 2π, to 1e-17 if a is near 100 or larger."""
    inverse = a.reciprocal()
    square = inverse.square()
    return inverse * (1 / 12 - square * (1 / 360 - square / 1260))


class GaussianMixture(td.MixtureSameFamily):
    """Σₖ πₖ N(μₖ, diag σₖ²) on vectors; ``loc`` and ``scale`` are [..., k, d]."""

    def __init__(self, logits: Tensor, loc: Tensor, scale: Tensor) -> None:
        self.log_weights = logits.log_softmax(-1)
        self.loc, self.scale = loc, scale
        super().__init__(
            td.Categorical(logits=logits, validate_args=False),
            td.Independent(td.Normal(loc, scale, validate_args=False), 1, validate_args=False),
            validate_args=False,
        )

    def expand(self, batch_shape, _instance=None):  # type: ignore[no-untyped-def]
        parts = (self.log_weights, self.loc, self.scale)
        return GaussianMixture(
            *(part.expand(*batch_shape, *part.shape[len(self.batch_shape) :]) for part in parts)
        )

    def log_prob(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """The log-density.

        Entries that are not ``present`` are marginalised out of every component, and so of the
        mixture.
        """
        each = normal_log_prob(x.unsqueeze(-2), self.loc, self.scale)
        if present is not None:
            each = torch.where(present.unsqueeze(-2), each, torch.zeros_like(each))
        return logsumexp(each.sum(-1) + self.log_weights, -1)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix @ vector with broadcast leading axes.

    A single matrix product if all rows share the matrix.
    """
    if matrix.dim() == 2:
        return F.linear(vector, matrix)
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def logsumexp(value: Tensor, axis: int, *, keepdim: bool = False) -> Tensor:
    """log Σ exp along an axis, whose gradient is a softmax that sums to 1.

    torch's own gradient is exp(value − result). In float32, at 10⁶ nats, the result is rounded to
    0.06, and the gradient is off by the same factor. Here the result is computed around the
    largest value.
    """
    top = value.detach().amax(axis, keepdim=True)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    found = (value - top).logsumexp(axis, keepdim=True) + top
    return found if keepdim else found.squeeze(axis)


def normal_log_prob(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return -0.5 * ((value - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)


def inverse_softplus(value: Tensor) -> Tensor:
    """The inverse of softplus: the x with log(1 + eˣ) = value."""
    return value + torch.log(-torch.expm1(-value))


def vector_from_tril(matrix: Tensor) -> Tensor:
    """The free entries of a Cholesky factor: the inverse of :func:`tril_from_vector`."""
    d = matrix.shape[-1]
    rows, columns = torch.tril_indices(d, d, device=matrix.device).unbind(0)
    entries = matrix[..., rows, columns]
    return torch.where(
        rows == columns, inverse_softplus(torch.where(rows == columns, entries, 1.0)), entries
    )


def tril_from_vector(entries: Tensor, d: int) -> Tensor:
    """A Cholesky factor from its d(d+1)/2 free entries, row by row.

    The diagonal passes through a softplus.
    """
    rows, columns = torch.tril_indices(d, d, device=entries.device).unbind(0)
    position = torch.full((d, d), entries.shape[-1], dtype=torch.long, device=entries.device)
    position[rows, columns] = torch.arange(entries.shape[-1], device=entries.device)
    padded = F.pad(entries, (0, 1))  # the appended zero fills the places above the diagonal
    matrix = padded[..., position.flatten()].unflatten(-1, (d, d))
    eye = torch.eye(d, dtype=torch.bool, device=entries.device)
    return torch.where(eye, F.softplus(matrix), matrix)


def relaxed_log_prob(log_value: Tensor, logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Density of log ỹ for ỹ ~ Gumbel-Softmax(logits, τ), in log space so that no ỹ underflows.

    log Γ(C) + (C−1) log τ + Σ aᵢ − C logsumexp(a), with a = logits − τ log ỹ.
    """
    c = logits.shape[-1]
    a = logits - temperature * log_value
    return math.lgamma(c) + (c - 1) * _log(temperature) + a.sum(-1) - c * a.logsumexp(-1)


def relaxed_bernoulli_log_prob(
    logit_value: Tensor, logits: Tensor, temperature: float | Tensor
) -> Tensor:
    """Density of logit(ỹ) for the binary relaxation.

    It is a logistic density with location logits/τ and scale 1/τ.
    """
    a = logits - temperature * logit_value
    return _log(temperature) + a - 2 * F.softplus(a)


def _log(number: float | Tensor) -> float | Tensor:
    return number.log() if isinstance(number, Tensor) else math.log(number)


def xlogy_difference(log_q: Tensor, log_p: Tensor) -> Tensor:
    """q (log q − log p), zero where q is zero, with finite gradients there."""
    zero = torch.isneginf(log_q)
    safe = torch.where(zero, torch.zeros_like(log_q), log_q)
    log_p = torch.where(zero, torch.zeros_like(log_p), log_p)
    return torch.where(zero, torch.zeros_like(safe), safe.exp() * (safe - log_p))
