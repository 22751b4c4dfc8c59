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

    ``size`` is an int, or a shape such as (1, 28, 28); declare it once, in p. ``net`` maps the
    parents to the distribution's parameters (default: affine): a network of the library, or any
    torch module or function of the parents' tensors (:class:`aevb.wrap`). A variable without
    parents has a fixed standard distribution unless ``learned=True``.

    A subclass may set ``pure = True`` if its methods have no side effects. A training step can then
    be recorded and replayed without calling its Python code again.
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
        """The network's outputs for a variable with d entries: name → number of raw numbers."""
        raise TypeError(f"{type(self).__name__} has no heads(d).")

    def vectors(self, d: int) -> dict[str, Tensor]:
        """Raw numbers that are free parameters, not network outputs: name → initial values."""
        return {}

    def unshared(self) -> Conditional:
        """The same family with its vectors as further heads, so that they depend on the parents.

        A number for all entries becomes a head with one number per entry.
        """
        return self

    def standard(self, d: int) -> dict[str, float]:
        """The raw value of each head for a variable without parents.

        0 for heads that are not listed.
        """
        return {}

    def distribution(self, **heads: Tensor) -> td.Distribution:
        """The torch distribution with these raw parameters."""
        raise TypeError(f"{type(self).__name__} has no distribution(...).")

    def noise(self, d: int) -> Noise | None:
        """The noise that ``reparametrise`` turns into a sample.

        None to use torch's ``rsample`` or ``sample``.
        """
        return None

    def reparametrise(self, dist: td.Distribution, noise: Tensor) -> Tensor:
        """Turn noise into a sample."""
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

        The covariance is ``root`` ``root``ᵀ. If the family cannot have this covariance, return
        those of the nearest member in KL(q ‖ p).
        """
        raise TypeError(f"{type(self).__name__} is not a Gaussian.")

    def degenerate(self) -> Degenerate | None:
        """The columns of data for which the likelihood of the learned parameters is unbounded.

        None if there are none.
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

        None if there is no simple one.
        """
        return None

    def values(self, d: int) -> Tensor | None:
        """All values of a finite variable, one per row."""
        return None

    def most_likely(
        self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor
    ) -> dict[str, Tensor] | None:
        """The maximum-likelihood heads and vectors for data with these moments.

        None if no closed form is known. Each row is for one value of a parent: ``count`` is the
        weight of the data with that value ([C, d]), ``mean`` their mean ([C, d]), and ``second``
        their second moments ([C, d], or [C, d, d] for a family with ``full_moments``). The heads
        have one row per value; the vectors are shared. No variance may be below ``floor`` ([d]).
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
        """The maximum-likelihood vectors for these heads, if the family ``needs_occurrences``.

        ``count`` and ``mean`` are those of ``most_likely``. ``occurrences`` are those of the values
        of all data.
        """
        raise TypeError(f"{type(self).__name__} has no most_likely_vectors(...).")

    def polynomial(self, **heads: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """log p(v) as a quadratic polynomial in each entry of v.

        The result holds the constant and the coefficients of v and v². Each has the shape of a
        head. Terms that depend on v only (−log v! of a Poisson) are left out, and, if the family
        ``needs_occurrences``, those that depend on v and the vectors only. None if log p is not
        such a polynomial.
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
        """log p(value), summed over the ``present`` entries of the event (by default all)."""
        log_prob = dist.log_prob(value)
        if dist.event_shape:
            return log_prob if present is None else torch.where(present.all(-1), log_prob, 0.0)
        if present is not None:
            log_prob = torch.where(present, log_prob, torch.zeros_like(log_prob))
        return log_prob.sum(-1)

    def given_known(self, dist: td.Distribution, value: Tensor, present: Tensor) -> td.Distribution:
        """The distribution of the missing entries given the ``present`` ones.

        Unchanged if entries are independent.
        """
        return dist

    def entropy(self, dist: td.Distribution) -> Tensor:
        entropy = dist.entropy()
        return entropy if dist.event_shape else entropy.sum(-1)

    def outside(self, value: Tensor) -> tuple[Tensor, str, str]:
        """Return a mask of the entries outside the support, a description of them, and the fix."""
        check = self.support.check(value)
        bad = ~(check.unsqueeze(-1).expand(value.shape) if check.dim() < value.dim() else check)
        interval = {
            constraints.boolean: "that are not 0 or 1",
            constraints.unit_interval: "outside [0, 1]",
        }
        what = interval.get(self.support, f"outside {type(self).__name__}'s support")
        return bad, what, _FIXES.get(self.support, "Transform the data, or use another family.")

    def count(self, d: int) -> int | None:
        """Number of values of a finite variable with d entries."""
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
