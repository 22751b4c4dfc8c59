"""Conditionals: what stands right of the colon in a declaration.

A conditional is a frozen specification; a model builds a :class:`Factor` from it, the module that holds its weights. A family
says which raw numbers it needs (``heads``), how they become a torch distribution, and, where it can, how noise becomes a
sample. The rest (networks, learned vectors, missing entries, enumeration, time) is the same for all families and written once.

A family of your own is one small class::

    @register
    @dataclass(frozen=True)
    class Gamma(Conditional):
        support = constraints.positive
        fill = 1.0                                   # any value of the support, put where data are missing

        def heads(self, d):
            return {"concentration": d, "rate": d}

        def distribution(self, concentration, rate):
            return td.Gamma(softplus(concentration), softplus(rate), validate_args=False)

A scalar distribution (as here) is taken entry by entry and summed; one over vectors keeps its own event.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import constraints

from aevb import distributions as ad
from aevb.networks import Network, Shape, mlp
from aevb.registry import register

Noise = tuple[str, int]  # what to draw (see noise.py) and how many numbers an example


@dataclass(frozen=True)
class Conditional:
    """The base of all conditionals: a size, a network, and whether a root is learned.

    ``size`` is stated once, in p: an int, or a shape such as (1, 28, 28). ``net`` maps the parents to the distribution's
    parameters (default: affine). Without parents the distribution is fixed and standard unless ``learned=True``.
    """

    size: int | Shape | None = None
    net: Network | None = None
    learned: bool = False

    stochastic: ClassVar[bool] = True
    has_parameters: ClassVar[bool] = True
    support: ClassVar[Any] = constraints.real
    fill: ClassVar[float] = 0.0  # a value inside the support, put where data are missing before log_prob
    finite: ClassVar[bool] = False  # has a finite list of values: may be enumerated
    has_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.size, list):
            object.__setattr__(self, "size", tuple(self.size))
        sizes = self.size if isinstance(self.size, tuple) else () if self.size is None else (self.size,)
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{type(self).__name__}: a size is a positive whole number or a tuple of them, got {self.size!r}.")
        if self.net is not None and not isinstance(self.net, Network):
            raise ValueError(f"{type(self).__name__}: net={self.net!r} is not a network. Use linear(), mlp(500, 500), conv(...), deconv(...).")

    # What a family says ------------------------------------------------------------------------------------------------

    def heads(self, d: int) -> dict[str, int]:
        """The raw numbers the network gives for a variable of d entries, by name."""
        raise TypeError(f"{type(self).__name__} has no heads(d).")

    def vectors(self, d: int) -> dict[str, Tensor]:
        """Raw numbers that are free parameters instead, with their initial values."""
        return {}

    def standard(self, d: int) -> dict[str, float]:
        """The raw value of each head for a fixed root; 0 where not named."""
        return {}

    def distribution(self, **heads: Tensor) -> td.Distribution:
        """The distribution these raw numbers stand for."""
        raise TypeError(f"{type(self).__name__} has no distribution(...).")

    def noise(self, d: int) -> Noise | None:
        """The noise that ``reparametrise`` turns into a sample; None: torch's own (r)sample is used."""
        return None

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} cannot turn noise into a sample.")

    @property
    def pathwise(self) -> bool:
        """Whether a sample is a differentiable function of the parameters."""
        return self.noise(1) is not None and not self.finite

    def values(self, d: int) -> Tensor | None:
        """All values of a finite variable, one a row."""
        return None

    # What follows from it ----------------------------------------------------------------------------------------------

    def log_prob(self, dist: td.Distribution, value: Tensor, present: Tensor | None = None) -> Tensor:
        """log p(value), summed over the event's entries, of which only the ``present`` ones count."""
        log_prob = dist.log_prob(value)
        if dist.event_shape:
            return log_prob if present is None else torch.where(present.all(-1), log_prob, 0.0)
        if present is not None:
            log_prob = torch.where(present, log_prob, torch.zeros_like(log_prob))
        return log_prob.sum(-1)

    def entropy(self, dist: td.Distribution) -> Tensor:
        entropy = dist.entropy()
        return entropy if dist.event_shape else entropy.sum(-1)

    def count(self, d: int) -> int | None:
        """How many values a finite variable of d entries has."""
        return None

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(repr(value) if field.name == "size" else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _scale_setting(spec: Conditional, name: str, value: Any) -> None:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if numeric and not (value > 0 and math.isfinite(value)):
        raise ValueError(f'{type(spec).__name__}: {name} must be positive, got {value}. Or use "network" or "learned".')
    if not numeric and value not in ("network", "learned"):
        raise ValueError(f'{type(spec).__name__}: {name} is "network", "learned" or a number, got {value!r}.')


@dataclass(frozen=True, repr=False)
class LocationScale(Conditional):
    """What Normal, Laplace and StudentT share: loc from the network, scale from it, learned, or fixed."""

    scale: str | float = "network"
    has_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _scale_setting(self, "scale", self.scale)

    def heads(self, d: int) -> dict[str, int]:
        return {"loc": d, "scale": d} if self.scale == "network" else {"loc": d}

    def vectors(self, d: int) -> dict[str, Tensor]:
        return {"scale": torch.full((d,), ad.INVERSE_SOFTPLUS_ONE)} if self.scale == "learned" else {}

    def standard(self, d: int) -> dict[str, float]:
        return {"scale": ad.INVERSE_SOFTPLUS_ONE}

    def scales(self, loc: Tensor, scale: Tensor | None) -> Tensor:
        return loc.new_full((), float(self.scale)) if scale is None else F.softplus(scale)

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return torch.addcmul(dist.loc, dist.scale, noise)  # type: ignore[attr-defined]


@register
@dataclass(frozen=True, repr=False)
class Normal(LocationScale):
    """Independent Gaussians, N(μ, diag σ²). σ is softplus of a head, one ``"learned"`` vector (initially 1), or a number."""

    def distribution(self, loc: Tensor, scale: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        return td.Normal(loc, self.scales(loc, scale), validate_args=False)

    def log_prob(self, dist: td.Distribution, value: Tensor, present: Tensor | None = None) -> Tensor:
        log_prob = ad.normal_log_prob(value, dist.loc, dist.scale)  # type: ignore[attr-defined]
        return (log_prob if present is None else torch.where(present, log_prob, torch.zeros_like(log_prob))).sum(-1)

    def noise(self, d: int) -> Noise:
        return "normal", d


@register
@dataclass(frozen=True, repr=False)
class Laplace(LocationScale):
    """Independent Laplace distributions: heavier tails than Normal, a median instead of a mean."""

    def distribution(self, loc: Tensor, scale: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        return td.Laplace(loc, self.scales(loc, scale), validate_args=False)

    def noise(self, d: int) -> Noise:
        return "laplace", d


@register
@dataclass(frozen=True, repr=False)
class StudentT(LocationScale):
    """Independent Student t distributions with ``df`` degrees of freedom: for data with outliers."""

    df: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.df > 0:
            raise ValueError(f"StudentT: df must be positive, got {self.df}.")

    def distribution(self, loc: Tensor, scale: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        return td.StudentT(loc.new_full((), self.df), loc, self.scales(loc, scale), validate_args=False)

    def noise(self, d: int) -> Noise:
        return f"student {self.df}", d


@register
@dataclass(frozen=True, repr=False)
class MultivariateNormal(Conditional):
    """A Gaussian with full covariance, through its Cholesky factor: from the network, or one learned and ``"shared"``."""

    covariance: str = "network"
    has_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.covariance not in ("network", "shared"):
            raise ValueError(f'MultivariateNormal: covariance is "network" or "shared", got {self.covariance!r}.')

    def heads(self, d: int) -> dict[str, int]:
        return {"loc": d} if self.covariance == "shared" else {"loc": d, "tril": d * (d + 1) // 2}

    def vectors(self, d: int) -> dict[str, Tensor]:
        return {"tril": self._identity(d)} if self.covariance == "shared" else {}

    def _identity(self, d: int) -> Tensor:
        rows, columns = torch.tril_indices(d, d).unbind(0)
        return torch.where(rows == columns, ad.INVERSE_SOFTPLUS_ONE, 0.0)

    def standard(self, d: int) -> dict[str, Any]:
        return {"tril": self._identity(d)}

    def distribution(self, loc: Tensor, tril: Tensor) -> td.Distribution:  # type: ignore[override]
        return ad.MultivariateNormal(loc, ad.tril_from_vector(tril, loc.shape[-1]))

    def noise(self, d: int) -> Noise:
        return "normal", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return dist.loc + ad.matvec(dist._unbroadcasted_scale_tril, noise)  # type: ignore[attr-defined]

    def log_prob(self, dist: td.Distribution, value: Tensor, present: Tensor | None = None) -> Tensor:
        if present is None:
            return dist.log_prob(value)
        # Marginalise: give missing entries unit variance and no covariance, then take their known share out again.
        keep = present.to(value.dtype)
        factor = dist._unbroadcasted_scale_tril  # type: ignore[attr-defined]
        covariance = (factor @ factor.mT) * keep.unsqueeze(-1) * keep.unsqueeze(-2) + torch.diag_embed(1 - keep)
        loc = dist.loc  # type: ignore[attr-defined]
        marginal = ad.MultivariateNormal(loc, torch.linalg.cholesky_ex(covariance).L)
        missing = (1 - keep).sum(-1)
        return marginal.log_prob(torch.where(present, value, loc)) + 0.5 * math.log(2 * math.pi) * missing


@register
@dataclass(frozen=True, repr=False)
class Mixture(Conditional):
    """A mixture of ``components`` diagonal Gaussians: a multi-modal posterior.

    As a latent's q it is stratified: every component is drawn once, and the results are weighted by π(x).
    """

    components: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.components, bool) or not isinstance(self.components, int) or self.components < 1:
            raise ValueError(f"Mixture: components is a positive whole number, got {self.components!r}.")

    def heads(self, d: int) -> dict[str, int]:
        return {"weight": self.components, "loc": self.components * d, "scale": self.components * d}

    def standard(self, d: int) -> dict[str, Any]:
        return {"loc": torch.linspace(-1, 1, self.components).repeat_interleave(d), "scale": ad.INVERSE_SOFTPLUS_ONE}

    def distribution(self, weight: Tensor, loc: Tensor, scale: Tensor) -> td.Distribution:  # type: ignore[override]
        shape = (self.components, loc.shape[-1] // self.components)
        return ad.GaussianMixture(weight, loc.unflatten(-1, shape), F.softplus(scale).unflatten(-1, shape))

    def log_prob(self, dist: td.Distribution, value: Tensor, present: Tensor | None = None) -> Tensor:
        return dist.log_prob(value, present)  # type: ignore[call-arg]


@register
@dataclass(frozen=True, repr=False)
class Bernoulli(Conditional):
    """Independent binary entries, by their logits."""

    support = constraints.boolean
    finite: ClassVar[bool] = True
    has_entropy: ClassVar[bool] = True

    def heads(self, d: int) -> dict[str, int]:
        return {"logits": d}

    def distribution(self, logits: Tensor) -> td.Distribution:  # type: ignore[override]
        return td.Bernoulli(logits=logits, validate_args=False)

    def log_prob(self, dist: td.Distribution, value: Tensor, present: Tensor | None = None) -> Tensor:
        logits = dist.logits  # type: ignore[attr-defined]
        log_prob = value * logits - F.softplus(logits)
        return (log_prob if present is None else torch.where(present, log_prob, torch.zeros_like(log_prob))).sum(-1)

    def count(self, d: int) -> int:
        return 2**d

    def values(self, d: int) -> Tensor:
        return torch.tensor(list(itertools.product([0.0, 1.0], repeat=d)))

    def noise(self, d: int) -> Noise:
        return "logistic", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return (dist.logits + noise > 0).to(noise.dtype)  # type: ignore[attr-defined]

    def relax(self, dist: td.Distribution, noise: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """The relaxed sample, and its logit, in which densities are taken."""
        logit = (dist.logits + noise) / temperature  # type: ignore[attr-defined]
        return logit.sigmoid(), logit

    def relaxed_log_prob(self, dist: td.Distribution, log_value: Tensor, temperature: float | Tensor) -> Tensor:
        return ad.relaxed_bernoulli_log_prob(log_value, dist.logits, temperature).sum(-1)  # type: ignore[attr-defined]


@register
@dataclass(frozen=True, repr=False)
class ContinuousBernoulli(Conditional):
    """Independent entries in [0, 1] with density ∝ λˣ(1−λ)¹⁻ˣ, exact for any logit.

    ``clamped=True`` reproduces torch's version, which clamps λ and so caps the density, for comparison.
    """

    clamped: bool = False
    support = constraints.unit_interval

    def heads(self, d: int) -> dict[str, int]:
        return {"logits": d}

    def distribution(self, logits: Tensor) -> td.Distribution:  # type: ignore[override]
        return ad.ContinuousBernoulli(logits.clamp(-ad.CLAMPED_LOGIT, ad.CLAMPED_LOGIT) if self.clamped else logits)

    def noise(self, d: int) -> Noise:
        return "uniform", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        return dist.icdf(noise)


@register
@dataclass(frozen=True, repr=False)
class OneHot(Conditional):
    """A categorical variable of ``size`` classes, as a one-hot vector."""

    support = constraints.one_hot
    finite: ClassVar[bool] = True
    has_entropy: ClassVar[bool] = True

    def heads(self, d: int) -> dict[str, int]:
        return {"logits": d}

    def distribution(self, logits: Tensor) -> td.Distribution:  # type: ignore[override]
        return Categories(logits)

    def count(self, d: int) -> int:
        return d

    def values(self, d: int) -> Tensor:
        return torch.eye(d)

    def noise(self, d: int) -> Noise:
        return "gumbel", d

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        perturbed = dist.logits + noise  # type: ignore[attr-defined]
        return F.one_hot(perturbed.argmax(-1), perturbed.shape[-1]).to(noise.dtype)

    def relax(self, dist: td.Distribution, noise: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        """The relaxed sample, and its logarithm, in which densities are taken."""
        log_value = ((dist.logits + noise) / temperature).log_softmax(-1)  # type: ignore[attr-defined]
        return log_value.exp(), log_value

    def relaxed_log_prob(self, dist: td.Distribution, log_value: Tensor, temperature: float | Tensor) -> Tensor:
        return ad.relaxed_log_prob(log_value, dist.logits, temperature)  # type: ignore[attr-defined]


class Categories(td.OneHotCategorical):
    """torch's OneHotCategorical without the checks it makes even when told not to; log_prob is linear in the value."""

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
        return -ad.xlogy_difference(self.logits, torch.zeros_like(self.logits)).sum(-1)


@register
@dataclass(frozen=True, repr=False)
class Beta(Conditional):
    """Independent Beta distributions on (0, 1)."""

    support = constraints.unit_interval
    fill: ClassVar[float] = 0.5
    has_entropy: ClassVar[bool] = True

    def heads(self, d: int) -> dict[str, int]:
        return {"concentration1": d, "concentration0": d}

    def standard(self, d: int) -> dict[str, float]:
        return {"concentration1": ad.INVERSE_SOFTPLUS_ONE, "concentration0": ad.INVERSE_SOFTPLUS_ONE}

    def distribution(self, concentration1: Tensor, concentration0: Tensor) -> td.Distribution:  # type: ignore[override]
        return td.Beta(F.softplus(concentration1), F.softplus(concentration0), validate_args=False)

    @property
    def pathwise(self) -> bool:
        return True  # torch's rsample differentiates implicitly


@register
@dataclass(frozen=True, repr=False)
class Poisson(Conditional):
    """Independent counts, by their log-rates."""

    support = constraints.nonnegative_integer

    def heads(self, d: int) -> dict[str, int]:
        return {"log_rate": d}

    def distribution(self, log_rate: Tensor) -> td.Distribution:  # type: ignore[override]
        return ad.Poisson(log_rate)


@register
@dataclass(frozen=True, repr=False)
class NegativeBinomial(Conditional):
    """Independent over-dispersed counts: mean from the network, variance mean + mean²/r.

    ``dispersion`` is r: one ``"learned"`` vector (default), a head of the ``"network"``, or a number.
    """

    dispersion: str | float = "learned"
    support = constraints.nonnegative_integer

    def __post_init__(self) -> None:
        super().__post_init__()
        _scale_setting(self, "dispersion", self.dispersion)

    def heads(self, d: int) -> dict[str, int]:
        return {"log_mean": d, "dispersion": d} if self.dispersion == "network" else {"log_mean": d}

    def vectors(self, d: int) -> dict[str, Tensor]:
        return {"dispersion": torch.full((d,), ad.INVERSE_SOFTPLUS_ONE)} if self.dispersion == "learned" else {}

    def standard(self, d: int) -> dict[str, float]:
        return {"dispersion": ad.INVERSE_SOFTPLUS_ONE}

    def distribution(self, log_mean: Tensor, dispersion: Tensor | None = None) -> td.Distribution:  # type: ignore[override]
        r = log_mean.new_full((), float(self.dispersion)) if dispersion is None else F.softplus(dispersion)
        return td.NegativeBinomial(r, logits=log_mean - r.log(), validate_args=False)


@register
@dataclass(frozen=True, repr=False)
class Exact(Conditional):
    """In q: p's own conditional of an enumerable latent, by Bayes. It has no parameters.

    q(y | ·) ∝ Π of p's factors that contain y, over y's values.
    """

    finite: ClassVar[bool] = True
    has_parameters: ClassVar[bool] = False


# Closed-form KL divergences ---------------------------------------------------------------------------------------------

_KL: dict[tuple[type, type], Callable[[Any, Any], Tensor]] = {}


def register_kl(q: type[Conditional], p: type[Conditional]) -> Callable[[Callable[[Any, Any], Tensor]], Callable[[Any, Any], Tensor]]:
    """Declare KL(q‖p) for two families: a function of the two torch distributions, summed over the event."""

    def add(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        _KL[q, p] = function
        return function

    return add


def closed_form_kl(q: Conditional, p: Conditional) -> Callable[[Any, Any], Tensor] | None:
    """KL(q‖p) as a function of the two distributions, or None where no closed form is known."""
    return _KL.get((type(q), type(p)))


@register_kl(Normal, Normal)
def _kl_normal(q: td.Normal, p: td.Normal) -> Tensor:
    ratio = (q.scale / p.scale).square()
    return 0.5 * (ratio + ((q.loc - p.loc) / p.scale).square() - 1 - ratio.log()).sum(-1)


@register_kl(MultivariateNormal, Normal)
def _kl_full_diagonal(q: ad.MultivariateNormal, p: td.Normal) -> Tensor:
    variance = q._unbroadcasted_scale_tril.square().sum(-1)
    quadratic = ((variance + (q.loc - p.loc).square()) / p.scale.square() - 1 + 2 * p.scale.log()).sum(-1)
    return 0.5 * quadratic - q.log_det


@register_kl(Normal, MultivariateNormal)
def _kl_diagonal_full(q: td.Normal, p: ad.MultivariateNormal) -> Tensor:
    scale = q.scale.expand(torch.broadcast_shapes(q.scale.shape, q.loc.shape))
    return _kl_full(ad.MultivariateNormal(q.loc, torch.diag_embed(scale)), p)


@register_kl(MultivariateNormal, MultivariateNormal)
def _kl_full(q: ad.MultivariateNormal, p: ad.MultivariateNormal) -> Tensor:
    factor_q, factor_p = q._unbroadcasted_scale_tril, p._unbroadcasted_scale_tril
    shape = torch.broadcast_shapes(factor_q.shape, factor_p.shape)
    trace = torch.linalg.solve_triangular(factor_p.expand(shape), factor_q.expand(shape), upper=False).square().sum((-2, -1))
    return 0.5 * (trace + p.whiten(q.loc).square().sum(-1) - shape[-1]) + p.log_det - q.log_det


@register_kl(OneHot, OneHot)
def _kl_one_hot(q: Categories, p: Categories) -> Tensor:
    return ad.xlogy_difference(*torch.broadcast_tensors(q.logits, p.logits)).sum(-1)


@register_kl(Bernoulli, Bernoulli)
def _kl_bernoulli(q: td.Bernoulli, p: td.Bernoulli) -> Tensor:
    return (q.probs * (q.logits - p.logits) - F.softplus(q.logits) + F.softplus(p.logits)).sum(-1)


def _kl_torch(q: td.Distribution, p: td.Distribution) -> Tensor:
    return td.kl_divergence(q, p).sum(-1)


@register_kl(Poisson, Poisson)
def _kl_poisson(q: ad.Poisson, p: ad.Poisson) -> Tensor:
    return (q.rate * (q.log_rate - p.log_rate) - q.rate + p.rate).sum(-1)


for _family in (Laplace, Beta):
    register_kl(_family, _family)(_kl_torch)


class Factor(nn.Module):
    """A conditional with its weights: parents → raw numbers → distribution.

    ``first`` sums the first-layer blocks of some parents, ``rest`` gives the raw heads as one tensor, ``distribution`` reads
    them. All are maps over the last axis; whatever axes stand before it are broadcast.
    """

    def __init__(self, spec: Conditional, shape: Shape, parents: Mapping[str, Shape], masked: Sequence[str] = ()) -> None:
        super().__init__()
        d = math.prod(shape)
        self.spec, self.shape, self.d = spec, shape, d
        self.sizes = spec.heads(d)
        self.vectors = nn.ParameterDict(spec.vectors(d))
        self.dropouts: tuple[tuple[float, int], ...] = ()
        if parents:
            self.net = (spec.net or mlp()).build(parents, list(self.sizes.values()), shape, masked)
            self.dropouts = tuple(self.net.dropouts)  # type: ignore[arg-type]
        else:
            standard = spec.standard(d)
            self.standard = torch.cat([torch.zeros(size, dtype=torch.float64) + standard.get(name, 0.0) for name, size in self.sizes.items()])
            root = self.standard.to(torch.get_default_dtype())
            if spec.learned:
                self.root = nn.Parameter(root)
            else:
                self.register_buffer("root", root, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Factor:
        """A fixed root is standard in any precision: made anew when the model is cast, not rounded twice."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if "root" in self._buffers:
            self.root = self.standard.to(self.root)  # type: ignore[assignment]
        return self

    def first(self, inputs: Mapping[str, Tensor], *, bias: bool = True, missing: Mapping[str, Tensor] | None = None) -> Tensor:
        return self.net.first(inputs, bias=bias, missing=missing)  # type: ignore[union-attr,operator]

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        return self.net.rest(h, keep)  # type: ignore[union-attr,operator]

    def forward(self, inputs: Mapping[str, Tensor], keep: Sequence[Tensor] = (), missing: Mapping[str, Tensor] | None = None) -> Tensor:
        """All parents at once: the raw heads, [..., sum of the heads' sizes]."""
        if not inputs:
            return self.root.reshape(1, 1, -1)  # type: ignore[union-attr,operator]
        return self.rest(self.first(inputs, missing=missing), keep)

    def distribution(self, raw: Tensor, vectors: Callable[[Tensor], Tensor] | None = None) -> td.Distribution:
        """The torch distribution; ``vectors`` is applied to the learned vectors as the caller did to ``raw``, e.g. detached."""
        heads = dict(zip(self.sizes, raw.split(list(self.sizes.values()), -1), strict=True))
        heads |= {name: vectors(vector) if vectors else vector for name, vector in self.vectors.items()}
        return self.spec.distribution(**heads)
