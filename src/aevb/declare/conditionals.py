"""Conditionals: the distributions to the right of the colon in a declaration.

A conditional is a frozen specification. A model builds a :class:`Factor` from it, the module that
holds its weights. A family defines the raw numbers that it needs (``heads``), how to make a torch
distribution of them, and, if possible, how to turn noise into a sample. Everything else (networks,
learned vectors, missing entries, enumeration, time) is shared by all families.

To add a family, write one small class::

    @register
    @dataclass(frozen=True, repr=False)
    class Gamma(Conditional):
        support = constraints.positive
        fill = 1.0                       # any value of the support, used for missing entries
        pathwise = True                  # torch's own rsample is differentiable

        def heads(self, d):
            return {"concentration": d, "rate": d}

        def distribution(self, concentration, rate):
            return td.Gamma(softplus(concentration), softplus(rate), validate_args=False)

A scalar distribution (as here) applies to each entry, and its log-probabilities are summed. A
distribution over vectors keeps its own event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.distributions import constraints

from aevb.declare.networks import Network, Shape, mlp
from aevb.declare.noise_kinds import Noise
from aevb.declare.own_networks import as_network

TABLE_LIMIT = 2**16  # a finite variable with more values than this cannot be enumerated
# Tables up to this size are built with the model: as many values as a plan enumerates by default.
TABLE_KEPT = 2**8
_FIXES: dict[Any, str] = {
    constraints.boolean: "Binarise them (x > 0.5), or use ContinuousBernoulli.",
    constraints.unit_interval: "Divide by 256, or use Normal.",
    constraints.nonnegative_integer: (
        "Counts are whole numbers from 0 on: round them, or use Normal."
    ),
    constraints.one_hot: "Pass labels 0 … C−1, or one-hot rows.",
    constraints.positive: "Shift or exponentiate them, or use Normal.",
}


class Degenerate(NamedTuple):
    """Columns of data for which the likelihood is unbounded."""

    # A mask of these columns, from the minimum and maximum of every column.
    columns: Callable[[Tensor, Tensor], Tensor]
    what: str  # completes "columns that are …"
    why: str  # completes "a Normal …": the setting that causes it; may be empty
    fix: str  # completes "or …": what to declare instead
    # Whether the density can concentrate on any value, not only on an end of the support.
    narrows: bool = True


class Occurrences(NamedTuple):
    """How often each value occurs in each column of some data, as three tensors of one length."""

    column: Tensor
    value: Tensor
    times: Tensor


def constant_columns(why: str, fix: str) -> Degenerate:
    """Constant columns: a density with a learned scale concentrates on them without bound."""
    return Degenerate(torch.eq, "constant", why, fix)


@dataclass(frozen=True)
class Conditional:
    """The base class of all conditionals.

    A subclass may set ``pure = True`` if its methods have no side effects. A training step can then
    be recorded and replayed without calling its Python code again.

    Arguments:
        size: The number of entries: an int, or a shape such as (1, 28, 28). Declare it once, in p.
        net: The network that maps the parents to the distribution's parameters (default: affine): a
            network of the library, or any torch module or function of the parents' tensors
            (:class:`aevb.wrap`).
        learned: Whether the parameters of a variable without parents are learned. By default it has
            a fixed standard distribution.

    >>> from aevb import Normal, mlp
    >>> Normal(3, net=mlp(8)).heads(3)
    {'loc': 3, 'scale': 3}
    """

    size: int | Shape | None = None
    net: Network | nn.Module | Callable[..., Any] | None = None
    learned: bool = False

    stochastic: ClassVar[bool] = True
    has_parameters: ClassVar[bool] = True
    support: ClassVar[Any] = constraints.real
    # A value inside the support; replaces missing entries before log_prob.
    fill: ClassVar[float] = 0.0
    finite: ClassVar[bool] = False  # has finitely many values, so it may be enumerated
    has_entropy: ClassVar[bool] = False  # has a closed-form entropy
    # A value is one of ``size`` classes, as a one-hot row; data may be class labels instead.
    categorical: ClassVar[bool] = False
    # A Gaussian with mean ``loc``, and a ``scale`` per entry or a Cholesky factor ``tril``.
    gaussian: ClassVar[bool] = False
    full_moments: ClassVar[bool] = False  # its likelihood depends on products of different entries
    pure: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.size, list):
            object.__setattr__(self, "size", tuple(self.size))
        sizes = (
            self.size if isinstance(self.size, tuple) else () if self.size is None else (self.size,)
        )
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{type(self).__name__}: a size is a positive whole number or a tuple of "
                    f"them, got {self.size!r}."
                )
        try:
            object.__setattr__(self, "net", as_network(self.net))
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None

    # What a family defines ------------------------------------------------------------------------

    def heads(self, d: int) -> dict[str, int]:
        """The network's outputs.

        Arguments:
            d: The number of entries of the variable.

        Returns:
            The number of raw numbers, by name. They are the arguments of ``distribution``.

        >>> from aevb import Normal
        >>> Normal().heads(2), Normal(scale=0.1).heads(2)
        ({'loc': 2, 'scale': 2}, {'loc': 2})
        """
        raise TypeError(f"{type(self).__name__} has no heads(d).")

    def vectors(self, d: int) -> dict[str, Tensor]:
        """Raw numbers that are free parameters, not network outputs.

        Arguments:
            d: The number of entries of the variable.

        Returns:
            Their initial values, by name. They are arguments of ``distribution``, like heads.

        >>> from aevb import Normal
        >>> Normal(scale="learned").vectors(2)
        {'scale': tensor([0.5413, 0.5413])}
        """
        return {}

    def unshared(self) -> Conditional:
        """Return the same family with its vectors as further heads.

        They then depend on the parents. A number for all entries becomes a head with one number per
        entry.

        >>> from aevb import Normal
        >>> Normal(2, scale="learned").unshared()
        Normal(2)
        """
        return self

    def standard(self, d: int) -> dict[str, float]:
        """The raw value of each head for a variable without parents.

        Arguments:
            d: The number of entries of the variable.

        Returns:
            The values by name; 0 for heads that are not listed.

        >>> from aevb import Normal
        >>> raw = Normal().standard(2)["scale"]
        >>> round(float(torch.nn.functional.softplus(torch.tensor(raw))), 6)
        1.0
        """
        return {}

    def distribution(self, **heads: Tensor) -> td.Distribution:
        """Make a torch distribution from raw numbers.

        Arguments:
            **heads: The heads and vectors of the family, by name.

        Returns:
            The distribution. Its entries are independent, or its event is the vector.

        >>> from aevb import Normal
        >>> Normal(scale=0.5).distribution(loc=torch.zeros(3))
        Normal(loc: torch.Size([3]), scale: torch.Size([3]))
        """
        raise TypeError(f"{type(self).__name__} has no distribution(...).")

    def noise(self, d: int) -> Noise | None:
        """The noise that ``reparametrise`` turns into a sample.

        Arguments:
            d: The number of entries of the variable.

        Returns:
            The kind of noise and the count of numbers; None to use torch's ``rsample`` or
            ``sample``.

        >>> from aevb import Normal
        >>> Normal().noise(2)
        ('normal', 2)
        """
        return None

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        """Turn noise into a sample.

        Arguments:
            dist: The distribution to sample.
            noise: Noise of the kind and count that the method ``noise`` says.

        Returns:
            The sample.

        >>> from aevb import Normal
        >>> dist = Normal(scale=0.5).distribution(loc=torch.ones(2))
        >>> Normal(scale=0.5).reparametrise(dist, torch.tensor([0.0, 2.0]))
        tensor([1., 2.])
        """
        raise TypeError(f"{type(self).__name__} cannot turn noise into a sample.")

    @property
    def pathwise(self) -> bool:
        """Whether a sample is a differentiable function of the parameters."""
        return self.noise(1) is not None and not self.finite

    @property
    def relaxable(self) -> bool:
        """Whether it has a relaxation: the methods ``relax`` and ``relaxed_log_prob``."""
        return hasattr(self, "relax")

    @property
    def strata(self) -> int | None:
        """The number of mixture components, each of which can be drawn once and weighted.

        None if it is not a mixture.
        """
        return None

    @property
    def learns_scale(self) -> bool:
        """Whether training can make the distribution narrower or wider.

        It does so through a scale or a covariance.
        """
        return False

    @property
    def shared_scale(self) -> bool:
        """Whether its scale or covariance is the same for all rows."""
        return False

    def spread_vectors(self, root: Tensor) -> dict[str, Tensor]:
        """The learned vectors of a Gaussian with ``shared_scale``, from a root of its covariance.

        Arguments:
            root: A matrix [d, d]; the covariance is ``root @ root.T``.

        Returns:
            The vectors by name. If the family cannot have this covariance, they are those of the
            nearest member in KL(q ‖ p).

        >>> from aevb import Normal
        >>> found = Normal(2, scale="learned").spread_vectors(2 * torch.eye(2))
        >>> torch.nn.functional.softplus(found["scale"])
        tensor([2., 2.])
        """
        raise TypeError(f"{type(self).__name__} is not a Gaussian.")

    def degenerate(self) -> Degenerate | None:
        """The columns of data for which the likelihood of the learned parameters is unbounded.

        Returns:
            A rule for such columns, with a text and the fix; None if there are none.

        >>> from aevb import Normal
        >>> Normal(scale="learned").degenerate().fix, Normal(scale=0.1).degenerate()
        ('fix the scale (Normal(…, scale=0.1))', None)
        """
        return None

    @property
    def preparation(self) -> str:
        """Name of the function in :mod:`aevb.data` that prepares grey levels for this family."""
        return {constraints.boolean: "threshold", constraints.nonnegative_integer: "counts"}.get(
            self.support, "dequantise"
        )

    def sample_formula(self, parents: str, component: str = "") -> str | None:
        """The formula of a sample as a function of its parents and of noise ε.

        Arguments:
            parents: The names of the parents, as the formula shows them.
            component: The index of a mixture's component, as the formula shows it.

        Returns:
            The formula; None if there is no simple one.

        >>> from aevb import Normal
        >>> Normal().sample_formula("x")
        'μ(x) + σ(x) ε'
        """
        return None

    def values(self, d: int) -> Tensor | None:
        """All values of a finite variable.

        Arguments:
            d: The number of entries of the variable.

        Returns:
            One value per row; None if the variable is not finite.

        >>> from aevb import Bernoulli
        >>> Bernoulli().values(2).tolist()
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
        """
        return None

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor] | None:
        """The maximum-likelihood heads and vectors for data with some moments.

        Each row of the arguments is for one value of a parent.

        Arguments:
            count: The weight of the data with that value [C, d].
            mean: Their mean [C, d].
            second: Their second moments [C, d], or [C, d, d] for a family with ``full_moments``.
            floor: No variance may be below this number [d].

        Returns:
            The heads, with one row per value, and the vectors, which all rows share. None if no
            closed form is known.

        >>> from aevb import Poisson
        >>> one = torch.ones(1, 1)
        >>> heads = Poisson().most_likely(count=one, mean=3 * one, second=9 * one, floor=one[0])
        >>> heads["log_rate"].exp()
        tensor([[3.]])
        """
        return None

    @property
    def has_most_likely(self) -> bool:
        """Whether ``most_likely`` knows the maximum-likelihood parameters."""
        return type(self).most_likely is not Conditional.most_likely

    @property
    def needs_occurrences(self) -> bool:
        """Whether moments do not determine the vectors, so that ``most_likely`` leaves them out.

        ``most_likely_vectors`` then computes them.
        """
        return False

    def most_likely_vectors(
        self, count: Tensor, mean: Tensor, heads: Mapping[str, Tensor], occurrences: Occurrences
    ) -> dict[str, Tensor]:
        """The maximum-likelihood vectors for some heads, if the family ``needs_occurrences``.

        Arguments:
            count: As for ``most_likely``.
            mean: As for ``most_likely``.
            heads: The maximum-likelihood heads, by name.
            occurrences: How often each value occurs in each column of all data.

        Returns:
            The vectors by name.

        >>> from aevb import NegativeBinomial
        >>> from aevb.declare.conditionals import Occurrences
        >>> family = NegativeBinomial(1)  # r, of the variance mean + mean²/r, is learned
        >>> values, count = torch.tensor([0.0, 1.0, 8.0]), torch.full((1, 1), 3.0)
        >>> found = family.most_likely_vectors(
        ...     count,
        ...     torch.full((1, 1), 3.0),
        ...     {"log_mean": torch.full((1, 1), 3.0).log()},
        ...     Occurrences(torch.zeros(3, dtype=torch.long), values, torch.ones(3)),
        ... )
        >>> found["dispersion"].shape
        torch.Size([1])
        """
        raise TypeError(f"{type(self).__name__} has no most_likely_vectors(...).")

    def polynomial(self, **heads: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """log p(v) as a quadratic polynomial in each entry of v.

        Terms that depend on v only (−log v! of a Poisson) are left out, and, if the family
        ``needs_occurrences``, those that depend on v and the vectors only.

        Arguments:
            **heads: The heads and vectors of the family, by name.

        Returns:
            The constant and the coefficients of v and v², each in the shape of a head. None if log
            p is not such a polynomial.

        >>> from aevb import Normal
        >>> constant, first, second = Normal(scale=1.0).polynomial(loc=torch.tensor([3.0]))
        >>> first, second
        (tensor([3.]), tensor([-0.5000]))
        """
        return None

    # What follows from the definition -------------------------------------------------------------

    @property
    def network(self) -> Network | None:
        """The network of ``net``; a module or a function of the user was wrapped in one."""
        return as_network(self.net)

    def log_prob(
        self, dist: td.Distribution, value: Tensor, present: Tensor | None = None
    ) -> Tensor:
        """log p(value), summed over the entries of the event.

        Arguments:
            dist: The distribution.
            value: The value [..., d].
            present: A mask [..., d] of the entries that count (by default all).

        Returns:
            One number per value [...].

        >>> from aevb import Bernoulli
        >>> dist = Bernoulli().distribution(logits=torch.zeros(2))
        >>> Bernoulli().log_prob(dist, torch.ones(2), torch.tensor([True, False])).exp()
        tensor(0.5000)
        """
        log_prob = dist.log_prob(value)
        if dist.event_shape:
            return log_prob if present is None else torch.where(present.all(-1), log_prob, 0.0)
        if present is not None:
            log_prob = torch.where(present, log_prob, torch.zeros_like(log_prob))
        return log_prob.sum(-1)

    def given_known(self, dist: td.Distribution, value: Tensor, present: Tensor) -> td.Distribution:
        """The distribution of the missing entries given the ``present`` ones.

        Arguments:
            dist: The distribution of all entries.
            value: The value [..., d]; its missing entries are ignored.
            present: A mask of the known entries [..., d].

        Returns:
            The conditional distribution; ``dist`` itself if entries are independent.

        >>> from aevb import MultivariateNormal
        >>> family = MultivariateNormal()
        >>> dist = family.distribution(loc=torch.zeros(2), tril=torch.tensor([0.5413, 3.0, 0.5413]))
        >>> known = torch.tensor([True, False])
        >>> family.given_known(dist, torch.tensor([1.0, 0.0]), known).mean.round(decimals=2)
        tensor([1., 3.])
        """
        return dist

    def entropy(self, dist: td.Distribution) -> Tensor:
        """The entropy in closed form, if the family ``has_entropy``.

        Arguments:
            dist: The distribution.

        Returns:
            One number per distribution, summed over the entries.

        >>> from aevb import Bernoulli
        >>> Bernoulli().entropy(Bernoulli().distribution(logits=torch.zeros(3))) / math.log(2)
        tensor(3.)
        """
        entropy = dist.entropy()
        return entropy if dist.event_shape else entropy.sum(-1)

    def outside(self, value: Tensor) -> tuple[Tensor, str, str]:
        """Find the entries outside the support.

        Arguments:
            value: Data [..., d].

        Returns:
            A mask of these entries, a description of them, and the fix.

        >>> from aevb import Bernoulli
        >>> bad, what, fix = Bernoulli().outside(torch.tensor([[0.0, 2.0]]))
        >>> bad.tolist(), what
        ([[False, True]], 'that are not 0 or 1')
        """
        check = self.support.check(value)
        bad = ~(check.unsqueeze(-1).expand(value.shape) if check.dim() < value.dim() else check)
        interval = {
            constraints.boolean: "that are not 0 or 1",
            constraints.unit_interval: "outside [0, 1]",
        }
        what = interval.get(self.support, f"outside {type(self).__name__}'s support")
        return bad, what, _FIXES.get(self.support, "Transform the data, or use another family.")

    def count(self, d: int) -> int | None:
        """The number of values of a finite variable.

        Arguments:
            d: The number of entries of the variable.

        Returns:
            The number; None if the variable is not finite.

        >>> from aevb import Normal, OneHot
        >>> OneHot().count(10), Normal().count(10)
        (10, None)
        """
        return None

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(repr(value) if field.name == "size" else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


class Factor(nn.Module):
    """A conditional with its weights: a map from parents to raw numbers to a distribution.

    ``first`` sums the first-layer blocks of some parents, ``rest`` computes the raw heads as one
    tensor, and ``distribution`` makes a torch distribution of them. All act on the last axis and
    broadcast over the axes before it.
    """

    def __init__(
        self,
        spec: Conditional,
        shape: Shape,
        parents: Mapping[str, Shape],
        masked: Sequence[str] = (),
    ) -> None:
        super().__init__()
        d = math.prod(shape)
        self.spec, self.shape, self.d = spec, shape, d
        self.sizes = spec.heads(d)
        self.vectors = nn.ParameterDict(spec.vectors(d))
        count = spec.count(d) if spec.finite else None
        # A buffer moves to the device with the model, so no estimate copies it.
        if count is not None and count <= TABLE_KEPT:
            self.register_buffer("values", spec.values(d), persistent=False)
        if parents:
            network = spec.network or mlp()
            self.net = network.build(parents, list(self.sizes.values()), shape, masked)
        else:
            standard = spec.standard(d)
            self.standard = torch.cat(
                [
                    torch.zeros(size, dtype=torch.float64) + standard.get(name, 0.0)
                    for name, size in self.sizes.items()
                ]
            )
            root = self.standard.to(torch.get_default_dtype())
            if spec.learned:
                self.root = nn.Parameter(root)
            else:
                self.register_buffer("root", root, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Factor:
        """Recompute a fixed root from double precision when the model is cast.

        It is then not rounded twice.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if "root" in self._buffers:
            self.root = self.standard.to(self.root)  # type: ignore[assignment]
        return self

    def table(self) -> Tensor:
        """All values of a finite variable, one per row.

        A large table is built at the first call.
        """
        if "values" not in self._buffers:
            count, values = self.spec.count(self.d) or 0, None
            if count <= TABLE_LIMIT:
                values = self.spec.values(self.d)
            if values is None:
                raise ValueError(
                    f"{type(self.spec).__name__}({self.d}) has {count} values, too many to list. "
                    f"Draw it instead (score)."
                )
            like = next(
                (
                    tensor
                    for tensor in (*self.parameters(), *self.buffers())
                    if tensor.is_floating_point()
                ),
                values,
            )
            self.register_buffer("values", values.to(like), persistent=False)
        return self._buffers["values"]  # type: ignore[return-value]

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        return self.net.first(inputs, bias=bias, missing=missing)  # type: ignore[operator]

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        return self.net.rest(h, keep)  # type: ignore[operator]

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        keep: Sequence[Tensor] = (),
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute the raw heads from all parents: [..., sum of the heads' sizes]."""
        if not inputs:
            return self.root.reshape(1, 1, -1)
        return self.rest(self.first(inputs, missing=missing), keep)

    def distribution(
        self, raw: Tensor, vectors: Callable[[Tensor], Tensor] | None = None
    ) -> td.Distribution:
        """The torch distribution with these raw heads.

        ``vectors`` is applied to the learned vectors, e.g. ``torch.detach``.
        """
        heads = dict(zip(self.sizes, raw.split(list(self.sizes.values()), -1), strict=True))
        heads |= {
            name: vectors(vector) if vectors else vector for name, vector in self.vectors.items()
        }
        return self.spec.distribution(**heads)
