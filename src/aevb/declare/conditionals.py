"""Conditionals: what stands right of the colon in a declaration.

A conditional is a frozen specification; a model builds a :class:`Factor` from it, the module that holds its weights. A family
says which raw numbers it needs (``heads``), how they become a torch distribution, and, where it can, how noise becomes a
sample. The rest (networks, learned vectors, missing entries, enumeration, time) is the same for all families and written once.

A family of your own is one small class::

    @register
    @dataclass(frozen=True, repr=False)
    class Gamma(Conditional):
        support = constraints.positive
        fill = 1.0                                   # any value of the support, put where data are missing
        pathwise = True                              # torch's own rsample is differentiable

        def heads(self, d):
            return {"concentration": d, "rate": d}

        def distribution(self, concentration, rate):
            return td.Gamma(softplus(concentration), softplus(rate), validate_args=False)

A scalar distribution (as here) is taken entry by entry and summed; one over vectors keeps its own event.
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

TABLE_LIMIT = 2**16  # values of a finite variable that are listed
TABLE_KEPT = 2**8  # those that are listed before anyone asks: as many as a plan enumerates of its own accord
Noise = tuple[str, int]  # what to draw (see noise.py) and how many numbers an example
_FIXES: dict[Any, str] = {
    constraints.boolean: "Binarise them (x > 0.5), or use ContinuousBernoulli.",
    constraints.unit_interval: "Divide by 256, or use Normal.",
    constraints.nonnegative_integer: "Counts are whole numbers from 0 on: round them, or use Normal.",
    constraints.one_hot: "Pass labels 0 … C−1, or one-hot rows.",
    constraints.positive: "Shift or exponentiate them, or use Normal.",
}


class Degenerate(NamedTuple):
    """The columns on which a density has no greatest value."""

    columns: Callable[[Tensor, Tensor], Tensor]  # which they are, given the least and the greatest value of every column
    what: str  # "columns that are …"
    why: str  # "a Normal …": the setting to blame, or nothing
    fix: str  # "or …": what to declare instead
    narrows: bool = True  # whether the density can narrow onto any value, not only onto an end of the support


def constant_columns(why: str, fix: str) -> Degenerate:
    """Columns with one value, onto which a density with a scale to learn narrows without bound."""
    return Degenerate(torch.eq, "constant", why, fix)


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
    categorical: ClassVar[bool] = False  # a value is one of ``size`` classes, as a one-hot row; data may give its number instead
    gaussian: ClassVar[bool] = False  # a Gaussian of mean ``loc``, with a ``scale`` for each entry or a Cholesky factor ``tril``
    full_moments: ClassVar[bool] = False  # its likelihood depends on products of different entries
    pure: ClassVar[bool] = False  # of a class of your own: all it does is in its tensors, so that a step may be recorded and need not call it again

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

    @property
    def relaxable(self) -> bool:
        """Whether it has a relaxation: the methods ``relax`` and ``relaxed_log_prob``."""
        return hasattr(self, "relax")

    @property
    def strata(self) -> int | None:
        """How many components can each be drawn once and weighted; None if it is no mixture."""
        return None

    @property
    def learns_scale(self) -> bool:
        """Whether training can make the distribution narrower or wider through a scale or a covariance."""
        return False

    @property
    def shared_scale(self) -> bool:
        """Whether its scale or covariance is the same for all rows."""
        return False

    def spread_vectors(self, root: Tensor) -> dict[str, Tensor]:
        """The learned vectors for which a Gaussian with ``shared_scale`` has the covariance ``root`` ``root``ᵀ, or is nearest to it in KL(q ‖ p)."""
        raise TypeError(f"{type(self).__name__} is not a Gaussian.")

    def degenerate(self) -> Degenerate | None:
        """The columns on which its density has no greatest value, if it has parameters to learn; None if there are none."""
        return None

    @property
    def preparation(self) -> str:
        """How grey levels become its values: a function of :mod:`aevb.data`."""
        return {constraints.boolean: "threshold", constraints.nonnegative_integer: "counts"}.get(self.support, "dequantise")

    def sample_formula(self, parents: str, component: str = "") -> str | None:
        """A sample as a function of its parents and of noise ε, in symbols; None if they would say nothing."""
        return None

    def values(self, d: int) -> Tensor | None:
        """All values of a finite variable, one a row."""
        return None

    def most_likely(self, count: Tensor, mean: Tensor, second: Tensor, floor: Tensor) -> dict[str, Tensor] | None:
        """The raw heads and vectors of greatest likelihood for values with these moments; None if no closed form is known.

        Each row stands for one value of a parent: how much of the data has it ([C, d]), their mean ([C, d]) and their second
        moments ([C, d], or [C, d, d] for a family with ``full_moments``). Heads have a row each, vectors are one for all. No variance is
        to be less than ``floor`` ([d]).
        """
        return None

    def polynomial(self, **heads: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """log p(v) as a polynomial in each entry of v: constant, coefficient of v and of v², each like a head; None if it is none.

        A term that depends on v alone (−log v! of a Poisson) is left out.
        """
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

    def given_known(self, dist: td.Distribution, value: Tensor, present: Tensor) -> td.Distribution:
        """The distribution of the entries that are missing, given those that are ``present``; the same where entries are independent."""
        return dist

    def entropy(self, dist: td.Distribution) -> Tensor:
        entropy = dist.entropy()
        return entropy if dist.event_shape else entropy.sum(-1)

    def outside(self, value: Tensor) -> tuple[Tensor, str, str]:
        """Which entries of a value lie outside the support, what they are in words, and the fix."""
        check = self.support.check(value)
        bad = ~(check.unsqueeze(-1).expand(value.shape) if check.dim() < value.dim() else check)
        interval = {constraints.boolean: "that are not 0 or 1", constraints.unit_interval: "outside [0, 1]"}
        what = interval.get(self.support, f"outside {type(self).__name__}'s support")
        return bad, what, _FIXES.get(self.support, "Transform the data, or use another family.")

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
        count = spec.count(d) if spec.finite else None
        if count is not None and count <= TABLE_KEPT:  # on the device from the start: an estimate copies nothing
            self.register_buffer("values", spec.values(d), persistent=False)
        if parents:
            self.net = (spec.net or mlp()).build(parents, list(self.sizes.values()), shape, masked)
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

    def table(self) -> Tensor:
        """All values of a finite variable, one a row; of one with many, listed (d numbers each) when they are first asked for."""
        if "values" not in self._buffers:
            count, values = self.spec.count(self.d) or 0, None
            if count <= TABLE_LIMIT:
                values = self.spec.values(self.d)
            if values is None:
                raise ValueError(f"{type(self.spec).__name__}({self.d}) has {count} values, too many to list. Draw it instead (score).")
            like = next((tensor for tensor in (*self.parameters(), *self.buffers()) if tensor.is_floating_point()), values)
            self.register_buffer("values", values.to(like), persistent=False)
        return self._buffers["values"]  # type: ignore[return-value]

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
