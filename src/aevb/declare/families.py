"""The families of distributions that a variable may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from aevb.compiled_step.gradients import bernoulli_log_prob
from aevb.declare import distributions as ad
from aevb.declare.conditionals import Conditional, Degenerate, Occurrences, constant_columns
from aevb.declare.dispersion import most_likely_dispersion
from aevb.declare.noise_kinds import Noise, student
from aevb.declare.registry import register, registered
from aevb.runtime.shapes import broadcast_shapes

# Closed-form estimates clamp probabilities and rates here, because the maximum-likelihood logit of
# constant data (a column of zeros, a cluster of equal rows) is infinite.
SMALLEST_PROBABILITY = 1e-6


def _scale_setting(
    spec: Conditional, name: str, value: Any, words: tuple[str, ...] = ("network", "learned")
) -> None:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if numeric and not (value > 0 and math.isfinite(value)):
        raise ValueError(
            f'{type(spec).__name__}: {name} must be positive, got {value}. Or use "network" or '
            f'"learned".'
        )
    if not numeric and value not in words:
        quoted = ", ".join(f'"{word}"' for word in words)
        raise ValueError(f"{type(spec).__name__}: {name} is {quoted} or a number, got {value!r}.")


@dataclass(frozen=True, repr=False)
class LocationScale(Conditional):
    """Base of Normal, Laplace and StudentT.

    loc comes from the network; scale comes from the network, is learned (one number per entry, or
    one for all entries if "isotropic"), or is fixed.
    """

    scale: str | float = "network"
    has_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _scale_setting(self, "scale", self.scale, ("network", "learned", "isotropic"))

    def heads(self, d: int) -> dict[str, int]:
        return {"loc": d, "scale": d} if self.scale == "network" else {"loc": d}

    def vectors(self, d: int) -> dict[str, Tensor]:
        count = {"learned": d, "isotropic": 1}.get(str(self.scale))
        return {} if count is None else {"scale": torch.full((count,), ad.INVERSE_SOFTPLUS_ONE)}

    def unshared(self) -> Conditional:
        return replace(self, scale="network") if isinstance(self.scale, str) else self

    def standard(self, d: int) -> dict[str, float]:
        return {"scale": ad.INVERSE_SOFTPLUS_ONE}

    def scales(self, loc: Tensor, scale: Tensor | None) -> Tensor:
        """The scales of the entries.

        Arguments:
            loc: The locations [..., d].
            scale: The raw scales, whose softplus is taken; None if the scale is a fixed number.

        Returns:
            The scales, which broadcast with ``loc``.

        >>> Normal(scale=0.5).scales(torch.zeros(2), None)
        tensor(0.5000)
        """
        return loc.new_full((), float(self.scale)) if scale is None else F.softplus(scale)

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return torch.addcmul(dist.loc, dist.scale, noise)  # type: ignore[attr-defined]

    @property
    def learns_scale(self) -> bool:
        return isinstance(self.scale, str)

    @property
    def shared_scale(self) -> bool:
        return self.scale != "network"

    def degenerate(self) -> Degenerate | None:
        fix = f"fix the scale ({type(self).__name__}(…, scale=0.1))"
        return constant_columns("whose scale is learned", fix) if self.learns_scale else None


@register
@dataclass(frozen=True, repr=False)
class Normal(LocationScale):
    """Independent Gaussians, N(μ, diag σ²).

    Arguments:
        size: The size; ``net`` and ``learned`` are as in :class:`Conditional`.
        scale: Where σ comes from: "network" (softplus of a head), "learned" (one vector for all
            examples, initially 1), "isotropic" (one learned number for all entries and examples),
            or a fixed number.

    >>> Normal(20, scale=0.1)
    Normal(20, scale=0.1)
    """

    gaussian: ClassVar[bool] = True

    def distribution(self, loc: Tensor, scale: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        return td.Normal(loc, self.scales(loc, scale), validate_args=False)

    def log_prob(
        self, dist: td.Distribution, value: Tensor, present: Tensor | None = None
    ) -> Tensor:
        log_prob = ad.normal_log_prob(value, dist.loc, dist.scale)  # type: ignore[attr-defined]
        return (
            log_prob
            if present is None
            else torch.where(present, log_prob, torch.zeros_like(log_prob))
        ).sum(-1)

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor]:
        variance = second - mean.square()
        if self.scale in ("learned", "isotropic"):  # one scale for all rows
            variance = (count * variance).sum(0) / count.sum(0).clamp_min(
                torch.finfo(count.dtype).tiny
            )
        if self.scale == "isotropic":  # and for all entries
            share = count.sum(0) / count.sum().clamp_min(torch.finfo(count.dtype).tiny)
            variance, floor = (share * variance).sum().reshape(1), floor.max().reshape(1)
        found = {"scale": ad.inverse_softplus(variance.maximum(floor).sqrt())}
        return {"loc": mean} | (found if isinstance(self.scale, str) else {})

    def polynomial(self, loc: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        scales = self.scales(loc, scale).expand_as(loc)
        precision = scales.square().reciprocal()
        return (
            -0.5 * loc.square() * precision - scales.log() - 0.5 * math.log(2 * math.pi),
            loc * precision,
            -0.5 * precision,
        )

    def noise(self, d: int) -> Noise:
        return "normal", d

    def spread_vectors(self, root: Tensor) -> dict[str, Tensor]:
        # In KL(q ‖ p), the nearest Gaussian with independent entries has the diagonal of the
        # precision.
        precision = torch.cholesky_inverse(root).diagonal()
        if self.scale == "isotropic":
            precision = precision.mean().reshape(1)
        return {"scale": ad.inverse_softplus(precision.rsqrt())} if self.learns_scale else {}

    def sample_formula(self, parents: str, component: str = "") -> str:
        return f"μ({parents}) + σ({parents}) ε"


@register
@dataclass(frozen=True, repr=False)
class Laplace(LocationScale):
    """Independent Laplace distributions: heavier tails than Normal, a median instead of a mean.

    ``scale`` is as in :class:`Normal`, and ``size``, ``net`` and ``learned`` as in
    :class:`Conditional`.

    >>> Laplace(3, scale="learned").distribution(loc=torch.zeros(3), scale=torch.zeros(3)).mean
    tensor([0., 0., 0.])
    """

    def distribution(self, loc: Tensor, scale: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        return td.Laplace(loc, self.scales(loc, scale), validate_args=False)

    def noise(self, d: int) -> Noise:
        return "laplace", d


@register
@dataclass(frozen=True, repr=False)
class StudentT(LocationScale):
    """Independent Student t distributions, for outliers.

    ``scale`` is as in :class:`Normal`, and ``size``, ``net`` and ``learned`` as in
    :class:`Conditional`.

    Arguments:
        df: The degrees of freedom, one positive number.

    >>> StudentT(3, scale=1.0, df=2.0)
    StudentT(3, scale=1.0, df=2.0)
    """

    df: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.df > 0:
            raise ValueError(f"StudentT: df must be positive, got {self.df}.")

    def distribution(self, loc: Tensor, scale: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        return ad.StudentT(loc.new_full((), self.df), loc, self.scales(loc, scale))

    def noise(self, d: int) -> Noise:
        return student(self.df), d


@register
@dataclass(frozen=True, repr=False)
class MultivariateNormal(Conditional):
    """A Gaussian with full covariance, parametrised by its Cholesky factor.

    ``size``, ``net`` and ``learned`` are as in :class:`Conditional`.

    Arguments:
        covariance: "network" (a head) or "shared" (one learned factor for all examples).

    >>> MultivariateNormal(covariance="shared").heads(3), MultivariateNormal().heads(3)
    ({'loc': 3}, {'loc': 3, 'tril': 6})
    """

    covariance: str = "network"
    has_entropy: ClassVar[bool] = True
    gaussian: ClassVar[bool] = True
    full_moments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.covariance not in ("network", "shared"):
            raise ValueError(
                f'MultivariateNormal: covariance is "network" or "shared", got {self.covariance!r}.'
            )

    def heads(self, d: int) -> dict[str, int]:
        return {"loc": d} if self.covariance == "shared" else {"loc": d, "tril": d * (d + 1) // 2}

    def vectors(self, d: int) -> dict[str, Tensor]:
        return {"tril": self._identity(d)} if self.covariance == "shared" else {}

    def unshared(self) -> Conditional:
        return replace(self, covariance="network")

    def _identity(self, d: int) -> Tensor:
        rows, columns = torch.tril_indices(d, d).unbind(0)
        return torch.where(rows == columns, ad.INVERSE_SOFTPLUS_ONE, 0.0)

    def standard(self, d: int) -> dict[str, Any]:
        return {"tril": self._identity(d)}

    def distribution(self, loc: Tensor, tril: Tensor) -> td.Distribution:  # type: ignore[override]
        return ad.MultivariateNormal(loc, ad.tril_from_vector(tril, loc.shape[-1]))

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor]:
        covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        if self.covariance == "shared":
            covariance = (count[:, :1, None] * covariance).sum(0) / count[:, 0].sum()
        # In units of ``size``, the smallest allowed variance is 1 in every direction.
        size = floor.sqrt()
        values, vectors = torch.linalg.eigh(covariance / size.unsqueeze(-1) / size)
        root = size.unsqueeze(-1) * vectors * values.clamp_min(1.0).sqrt().unsqueeze(-2)
        return {"loc": mean, "tril": ad.vector_from_tril(torch.linalg.cholesky(root @ root.mT))}

    @property
    def learns_scale(self) -> bool:
        return True

    @property
    def shared_scale(self) -> bool:
        return self.covariance == "shared"

    def degenerate(self) -> Degenerate:
        return constant_columns("whose covariance is learned", "use Normal(…, scale=0.1)")

    def spread_vectors(self, root: Tensor) -> dict[str, Tensor]:
        return {"tril": ad.vector_from_tril(root)} if self.covariance == "shared" else {}

    def sample_formula(self, parents: str, component: str = "") -> str:
        return f"μ({parents}) + L({parents}) ε"

    def noise(self, d: int) -> Noise:
        return "normal", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return dist.loc + ad.matvec(dist._unbroadcasted_scale_tril, noise)  # type: ignore[attr-defined]

    def log_prob(
        self, dist: td.Distribution, value: Tensor, present: Tensor | None = None
    ) -> Tensor:
        if present is None:
            return dist.log_prob(value)
        # Marginalise: give missing entries unit variance and no covariance, then subtract their
        # known contribution.
        keep = present.to(value.dtype)
        factor = dist._unbroadcasted_scale_tril  # type: ignore[attr-defined]
        covariance = (factor @ factor.mT) * keep.unsqueeze(-1) * keep.unsqueeze(
            -2
        ) + torch.diag_embed(1 - keep)
        loc = dist.loc  # type: ignore[attr-defined]
        marginal = ad.MultivariateNormal(loc, torch.linalg.cholesky_ex(covariance).L)
        missing = (1 - keep).sum(-1)
        return (
            marginal.log_prob(torch.where(present, value, loc))
            + 0.5 * math.log(2 * math.pi) * missing
        )

    def given_known(self, dist: td.Distribution, value: Tensor, present: Tensor) -> td.Distribution:
        """The conditional Gaussian N(μ − R⁻¹ C (x − μ), R⁻¹) of the missing entries.

        R is the block of the precision matrix of the missing entries, and C its block of missing
        and present ones. A difference of covariances would lose the digits of a small variance.
        The present entries get their value as mean, and unit variance.
        """
        keep, factor = present.to(value.dtype), dist._unbroadcasted_scale_tril  # type: ignore[attr-defined]
        gone, eye = 1 - keep, torch.eye(keep.shape[-1]).to(factor)
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
        precision = inverse.mT @ inverse * gone.unsqueeze(-1)
        block = precision * gone.unsqueeze(-2) + torch.diag_embed(keep)
        # R = U Uᵀ with U upper triangular, so U⁻ᵀ is the Cholesky factor of R⁻¹.
        upper = torch.linalg.cholesky(block.flip(-1, -2)).flip(-1, -2)
        root = torch.linalg.solve_triangular(upper.mT, eye, upper=False)
        loc = dist.loc  # type: ignore[attr-defined]
        pull = ad.matvec(precision, torch.where(present, value - loc, torch.zeros_like(loc)))
        loc = loc - ad.matvec(root, ad.matvec(root.mT, pull))
        return ad.MultivariateNormal(torch.where(present, value, loc), root)


@register
@dataclass(frozen=True, repr=False)
class Mixture(Conditional):
    """A mixture of diagonal Gaussians, e.g. for a multi-modal posterior.

    As a latent's q it is stratified: one draw from every component, weighted by the component's
    π(x). ``size``, ``net`` and ``learned`` are as in :class:`Conditional`.

    Arguments:
        components: The number of Gaussians.

    >>> from aevb import Model
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Mixture(components=3)})
    >>> model.posterior(x=torch.zeros(4, 2))["z"].mean.shape
    torch.Size([4, 1])
    """

    components: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            isinstance(self.components, bool)
            or not isinstance(self.components, int)
            or self.components < 1
        ):
            raise ValueError(
                f"Mixture: components is a positive whole number, got {self.components!r}."
            )

    def heads(self, d: int) -> dict[str, int]:
        return {"weight": self.components, "loc": self.components * d, "scale": self.components * d}

    @property
    def strata(self) -> int:
        return self.components

    @property
    def learns_scale(self) -> bool:
        return True

    def degenerate(self) -> Degenerate:
        return constant_columns("whose scales are learned", "use Normal(…, scale=0.1)")

    def sample_formula(self, parents: str, component: str = "") -> str:
        return f"μ{component}({parents}) + σ{component}({parents}) ε"

    def standard(self, d: int) -> dict[str, Any]:
        return {
            "loc": torch.linspace(-1, 1, self.components).repeat_interleave(d),
            "scale": ad.INVERSE_SOFTPLUS_ONE,
        }

    def distribution(self, weight: Tensor, loc: Tensor, scale: Tensor) -> td.Distribution:  # type: ignore[override]
        shape = (self.components, loc.shape[-1] // self.components)
        return ad.GaussianMixture(
            weight, loc.unflatten(-1, shape), F.softplus(scale).unflatten(-1, shape)
        )

    def log_prob(
        self, dist: td.Distribution, value: Tensor, present: Tensor | None = None
    ) -> Tensor:
        return dist.log_prob(value, present)  # type: ignore[call-arg]

    def given_known(self, dist: td.Distribution, value: Tensor, present: Tensor) -> td.Distribution:
        """The same components, reweighted by their likelihood of the present entries."""
        assert isinstance(dist, ad.GaussianMixture)
        each = ad.normal_log_prob(value.unsqueeze(-2), dist.loc, dist.scale)
        each = torch.where(present.unsqueeze(-2), each, torch.zeros_like(each)).sum(-1)
        shape = (*broadcast_shapes(each.shape, dist.log_weights.shape), dist.loc.shape[-1])
        return ad.GaussianMixture(
            (each + dist.log_weights).log_softmax(-1),
            dist.loc.expand(shape),
            dist.scale.expand(shape),
        )


@register
@dataclass(frozen=True, repr=False)
class Bernoulli(Conditional):
    """Independent binary entries, parametrised by logits.

    ``size``, ``net`` and ``learned`` are as in :class:`Conditional`.

    >>> Bernoulli(2).distribution(logits=torch.zeros(2)).probs
    tensor([0.5000, 0.5000])
    """

    support = constraints.boolean
    finite: ClassVar[bool] = True
    has_entropy: ClassVar[bool] = True

    def heads(self, d: int) -> dict[str, int]:
        return {"logits": d}

    def distribution(self, logits: Tensor) -> td.Distribution:  # type: ignore[override]
        return td.Bernoulli(logits=logits, validate_args=False)

    def log_prob(
        self, dist: td.Distribution, value: Tensor, present: Tensor | None = None
    ) -> Tensor:
        logits = dist.logits  # type: ignore[attr-defined]
        if present is None:
            return bernoulli_log_prob(logits, value)
        log_prob = value * logits - F.softplus(logits)
        return torch.where(present, log_prob, torch.zeros_like(log_prob)).sum(-1)

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor]:
        return {"logits": torch.logit(mean, eps=SMALLEST_PROBABILITY)}

    def polynomial(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return -F.softplus(logits), logits, torch.zeros_like(logits)

    def count(self, d: int) -> int:
        # Already too many to enumerate; 2**d for a d of billions would take minutes.
        return 2 ** min(d, 1024)

    def values(self, d: int) -> Tensor:
        return (
            (torch.arange(2**d).unsqueeze(-1) >> torch.arange(d - 1, -1, -1))
            .bitwise_and(1)
            .to(torch.get_default_dtype())
        )

    def noise(self, d: int) -> Noise:
        return "logistic", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return (dist.logits + noise > 0).to(noise.dtype)  # type: ignore[attr-defined]

    def relax(
        self, dist: td.Distribution, noise: Tensor, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw from the relaxed distribution (binary Concrete), by noise.

        Arguments:
            dist: The distribution that is relaxed.
            noise: Logistic noise.
            temperature: The temperature, above 0; near 0 the values are near 0 and 1.

        Returns:
            The relaxed sample and its logit, the space of its density.

        >>> dist = Bernoulli().distribution(logits=torch.zeros(1))
        >>> Bernoulli().relax(dist, torch.tensor([2.0]), 0.5)[0]
        tensor([0.9820])
        """
        logit = (dist.logits + noise) / temperature  # type: ignore[attr-defined]
        return logit.sigmoid(), logit

    def relaxed_log_prob(
        self, dist: td.Distribution, log_value: Tensor, temperature: float | Tensor
    ) -> Tensor:
        """The log-density of a relaxed sample, over its logit.

        Arguments:
            dist: The distribution that is relaxed.
            log_value: The logit of the sample, the second result of ``relax``.
            temperature: The temperature.

        Returns:
            One number per sample.

        >>> dist = Bernoulli().distribution(logits=torch.zeros(1))
        >>> Bernoulli().relaxed_log_prob(dist, torch.zeros(1), 1.0).exp()  # a logistic density at 0
        tensor(0.2500)
        """
        return ad.relaxed_bernoulli_log_prob(log_value, dist.logits, temperature).sum(-1)  # type: ignore[attr-defined]


@register
@dataclass(frozen=True, repr=False)
class ContinuousBernoulli(Conditional):
    """Independent entries in [0, 1] with density ∝ λˣ(1−λ)¹⁻ˣ, exact for any logit.

    ``size``, ``net`` and ``learned`` are as in :class:`Conditional`.

    Arguments:
        clamped: Reproduce torch's version for comparison; it clamps λ and therefore caps the
            density.

    >>> dist = ContinuousBernoulli().distribution(logits=torch.zeros(1))
    >>> dist.log_prob(torch.tensor([0.3])).exp()  # logit 0: uniform
    tensor([1.])
    """

    clamped: bool = False
    support = constraints.unit_interval

    def heads(self, d: int) -> dict[str, int]:
        return {"logits": d}

    def distribution(self, logits: Tensor) -> td.Distribution:  # type: ignore[override]
        return ad.ContinuousBernoulli(
            logits.clamp(-ad.CLAMPED_LOGIT, ad.CLAMPED_LOGIT) if self.clamped else logits
        )

    def noise(self, d: int) -> Noise:
        return "uniform", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return dist.icdf(noise)

    def degenerate(self) -> Degenerate | None:
        if self.clamped:
            return None

        def at_an_end(low: Tensor, high: Tensor) -> Tensor:
            return (high == 0) | (low == 1)

        return Degenerate(
            at_an_end,
            "exactly 0 (or exactly 1) in every row",
            "",
            "use Bernoulli for binary data",
            narrows=False,
        )


@register
@dataclass(frozen=True, repr=False)
class OneHot(Conditional):
    """A categorical variable, represented as a one-hot vector.

    ``net`` and ``learned`` are as in :class:`Conditional`.

    Arguments:
        size: The number of classes.

    >>> OneHot(3).values(3).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    support = constraints.one_hot
    categorical: ClassVar[bool] = True
    finite: ClassVar[bool] = True
    has_entropy: ClassVar[bool] = True

    def heads(self, d: int) -> dict[str, int]:
        return {"logits": d}

    def distribution(self, logits: Tensor) -> td.Distribution:  # type: ignore[override]
        return ad.Categories(logits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.size, tuple) and len(self.size) > 1:
            raise ValueError(f"OneHot has one number of classes, got the shape {self.size}.")

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor]:
        return {"logits": mean.clamp_min(SMALLEST_PROBABILITY).log()}

    def polynomial(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return torch.zeros_like(logits), logits.log_softmax(-1), torch.zeros_like(logits)

    def count(self, d: int) -> int:
        return d

    def values(self, d: int) -> Tensor:
        return torch.eye(d)

    def noise(self, d: int) -> Noise:
        return "gumbel", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        perturbed = dist.logits + noise  # type: ignore[attr-defined]
        return torch.zeros_like(perturbed).scatter_(-1, perturbed.argmax(-1, keepdim=True), 1.0)

    def relax(
        self, dist: td.Distribution, noise: Tensor, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw from the relaxed distribution (Concrete, Gumbel-Softmax), by noise.

        Arguments:
            dist: The distribution that is relaxed.
            noise: Gumbel noise.
            temperature: The temperature, above 0; near 0 the values are near one-hot.

        Returns:
            The relaxed sample and its logarithm, the space of its density.

        >>> dist = OneHot().distribution(logits=torch.zeros(3))
        >>> OneHot().relax(dist, torch.tensor([3.0, 0.0, 0.0]), 0.5)[0].round(decimals=2)
        tensor([1., 0., 0.])
        """
        log_value = ((dist.logits + noise) / temperature).log_softmax(-1)  # type: ignore[attr-defined]
        return log_value.exp(), log_value

    def relaxed_log_prob(
        self, dist: td.Distribution, log_value: Tensor, temperature: float | Tensor
    ) -> Tensor:
        """The log-density of a relaxed sample, over its logarithm.

        Arguments:
            dist: The distribution that is relaxed.
            log_value: The logarithm of the sample, the second result of ``relax``.
            temperature: The temperature.

        Returns:
            One number per sample.

        >>> dist = OneHot().distribution(logits=torch.zeros(2))
        >>> OneHot().relaxed_log_prob(dist, torch.tensor([0.5, 0.5]).log(), 1.0).exp()
        tensor(0.2500)
        """
        return ad.relaxed_log_prob(log_value, dist.logits, temperature)  # type: ignore[attr-defined]


@register
@dataclass(frozen=True, repr=False)
class Beta(Conditional):
    """Independent Beta distributions on (0, 1).

    ``size``, ``net`` and ``learned`` are as in :class:`Conditional`.

    >>> dist = Beta().distribution(torch.tensor([2.0]), torch.tensor([2.0]))
    >>> dist.mean
    tensor([0.5000])
    """

    support = constraints.unit_interval
    fill: ClassVar[float] = 0.5
    has_entropy: ClassVar[bool] = True

    def heads(self, d: int) -> dict[str, int]:
        return {"concentration1": d, "concentration0": d}

    def standard(self, d: int) -> dict[str, float]:
        return {
            "concentration1": ad.INVERSE_SOFTPLUS_ONE,
            "concentration0": ad.INVERSE_SOFTPLUS_ONE,
        }

    def distribution(self, concentration1: Tensor, concentration0: Tensor) -> td.Distribution:  # type: ignore[override]
        return td.Beta(F.softplus(concentration1), F.softplus(concentration0), validate_args=False)

    @property
    def pathwise(self) -> bool:
        return True  # torch's rsample has implicit reparametrisation gradients

    def degenerate(self) -> Degenerate:
        return constant_columns("", "use ContinuousBernoulli")

    def outside(self, value: Tensor) -> tuple[Tensor, str, str]:
        """As in the base class, but 0 and 1 lie outside too.

        The density is 0 or infinite there.
        """
        return (
            (value <= 0) | (value >= 1),
            "outside (0, 1)",
            "Squeeze them inside, or use ContinuousBernoulli.",
        )


@register
@dataclass(frozen=True, repr=False)
class Poisson(Conditional):
    """Independent counts, parametrised by log-rates.

    ``size``, ``net`` and ``learned`` are as in :class:`Conditional`.

    >>> Poisson().distribution(log_rate=torch.tensor([4.0]).log()).mean
    tensor([4.])
    """

    support = constraints.nonnegative_integer

    def heads(self, d: int) -> dict[str, int]:
        return {"log_rate": d}

    def distribution(self, log_rate: Tensor) -> td.Distribution:  # type: ignore[override]
        return ad.Poisson(log_rate)

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor]:
        return {"log_rate": mean.clamp_min(SMALLEST_PROBABILITY).log()}

    def polynomial(self, log_rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return -log_rate.exp(), log_rate, torch.zeros_like(log_rate)


@register
@dataclass(frozen=True, repr=False)
class NegativeBinomial(Conditional):
    """Independent over-dispersed counts: mean from the network, variance mean + mean²/r.

    ``size``, ``net`` and ``learned`` are as in :class:`Conditional`.

    Arguments:
        dispersion: The number r: one "learned" vector (default), a head of the "network", or a
            fixed number. Exact EM of mixtures needs a vector or a number.

    >>> dist = NegativeBinomial(dispersion=2.0).distribution(log_mean=torch.tensor([4.0]).log())
    >>> dist.mean, dist.variance  # 4 + 16/2
    (tensor([4.]), tensor([12.]))
    """

    dispersion: str | float = "learned"
    support = constraints.nonnegative_integer

    def __post_init__(self) -> None:
        super().__post_init__()
        _scale_setting(self, "dispersion", self.dispersion)

    def heads(self, d: int) -> dict[str, int]:
        return {"log_mean": d, "dispersion": d} if self.dispersion == "network" else {"log_mean": d}

    def vectors(self, d: int) -> dict[str, Tensor]:
        return (
            {"dispersion": torch.full((d,), ad.INVERSE_SOFTPLUS_ONE)}
            if self.dispersion == "learned"
            else {}
        )

    def unshared(self) -> Conditional:
        return replace(self, dispersion="network") if self.dispersion == "learned" else self

    def standard(self, d: int) -> dict[str, float]:
        return {"dispersion": ad.INVERSE_SOFTPLUS_ONE}

    def distribution(self, log_mean: Tensor, dispersion: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        r = self._r(log_mean, dispersion)
        return ad.NegativeBinomial(r, logits=log_mean - r.log(), validate_args=False)

    def _r(self, log_mean: Tensor, dispersion: Tensor | None) -> Tensor:
        return (
            log_mean.new_full((), float(self.dispersion))
            if dispersion is None
            else F.softplus(dispersion)
        )

    @property
    def has_most_likely(self) -> bool:
        return self.dispersion != "network"

    @property
    def needs_occurrences(self) -> bool:
        return self.dispersion == "learned"

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor] | None:
        # The most likely mean is the same for every dispersion.
        if not self.has_most_likely:
            return None
        return {"log_mean": mean.clamp_min(SMALLEST_PROBABILITY).log()}

    def most_likely_vectors(
        self, count: Tensor, mean: Tensor, heads: Mapping[str, Tensor], occurrences: Occurrences
    ) -> dict[str, Tensor]:
        r = most_likely_dispersion(count, count * mean, heads["log_mean"].exp(), occurrences)
        return {"dispersion": ad.inverse_softplus(r)}

    def polynomial(  # type: ignore[override]
        self, log_mean: Tensor, dispersion: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self.has_most_likely:
            return None  # log Γ(v + r) differs from cluster to cluster
        r = self._r(log_mean, dispersion)
        logits = log_mean - r.log()
        return r * F.logsigmoid(-logits), F.logsigmoid(logits), torch.zeros_like(log_mean)


@register
@dataclass(frozen=True, repr=False)
class Exact(Conditional):
    """The exact conditional of an enumerable latent, for use in q.

    It is computed from p by Bayes' rule and has no parameters. q(y | ·) is proportional to the
    product of p's factors that contain y, normalised over y's values. It takes no ``net`` and
    nothing ``learned``. The size is that of p; ``size`` may repeat it, as in every factor of q.

    >>> from aevb import Model
    >>> p = {"y": OneHot(2), "x | y": Normal(1, scale=1.0)}
    >>> model = Model(p, q={"y | x": Exact()})
    >>> model.posterior(x=torch.zeros(1, 1))["y"].probs.shape
    torch.Size([1, 2])
    """

    finite: ClassVar[bool] = True
    has_parameters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.net is not None:
            raise ValueError("Exact takes no net; it is computed from p by Bayes' rule.")
        if self.learned:
            raise ValueError(
                "Exact has nothing to learn; it is computed from p by Bayes' rule. Drop "
                "learned=True."
            )


# All families by name, except Exact, which has no parameters.
FAMILIES: dict[str, type[Conditional]] = {
    name: cls for name, cls in registered(__name__).items() if cls.has_parameters
}
