"""Check numerically that the members of a distribution agree with one another.

For a distribution of scalars, its log_prob on a grid of nodes (the counts, or a quadrature of the
support) gives the total mass, the distribution function, the moments, the entropy and the KL
divergence. The members that claim these numbers are compared with them, and so are draws.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from aevb.declare.conditionals import TABLE_KEPT, Conditional, Factor
from aevb.declare.graph import Entry
from aevb.derive.divergences import closed_forms
from aevb.estimate import noise as noises
from aevb.runtime.callers import frames_of_aevb
from aevb.runtime.checked_files import DataWarning
from aevb.runtime.seeding import seeded

ROWS = 3  # parameters that a family is checked at
DRAWS = 4000
# The largest difference of two distribution functions; chance exceeds it once in a million times.
FARTHEST = 2.7 / math.sqrt(DRAWS)
TOLERANCE = 0.01
NODES = 4001
WIDEST = 12.0  # nodes reach sinh(12) widths from the centre, for heavy tails
MOST_COUNTS = 2**15
MOST_ENTRIES = 8  # of a vector
NOT_FORM = ("size", "net", "learned")  # fields that do not change the distribution
HORIZON = 350.0  # the largest logarithm of a node; its square is finite

DistributionOf = Callable[[Mapping[str, Tensor]], td.Distribution]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        member: What was checked, such as "mean".
        ok: Whether it agrees; None if it was not checked.
        text: The numbers, or why it was not checked.
    """

    member: str
    ok: bool | None
    text: str


@dataclass(frozen=True, repr=False)
class FamilyCheck:
    """The report of :func:`check_family`.

    Attributes:
        name: The family or the distribution.
        findings: The results, one per check.

    >>> import torch
    >>> report = check_family(torch.distributions.Poisson(torch.tensor([0.5, 8.0])))
    >>> report.ok, [finding.member for finding in report.findings][:3]
    (True, ['log_prob', 'sample', 'mean'])
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The checks that failed."""
        return tuple(finding for finding in self.findings if finding.ok is False)

    def __repr__(self) -> str:
        count, wrong = sum(one.ok is not None for one in self.findings), len(self.failed)
        result = f"{wrong} of {count} fail" if wrong else f"all {count} pass"
        result = result if count else "nothing could be checked"
        lines = [f"{self.name}: {result}"]
        width = max((len(one.member) for one in self.findings), default=0)
        words = {True: "ok   ", False: "WRONG", None: "—    "}
        lines += [f"  {one.member:{width}}  {words[one.ok]}  {one.text}" for one in self.findings]
        return "\n".join(lines)


def check_family(
    family: Conditional | td.Distribution, *, size: int | None = None, seed: int = 0
) -> FamilyCheck:
    """Check that log_prob, draws, moments, entropy, KL divergences and gradients agree.

    Arguments:
        family: A family, which is checked at a few raw parameters near its standard ones, or a
            torch distribution with a small batch of parameters.
        size: The number of entries of a family of vectors (by default its own size, or 2).
        seed: Decides the draws and the parameters.

    Returns:
        A report, which prints as a table. Its ``ok`` says whether no check failed. A member that
        the distribution lacks, or that has no simple check, is listed as not checked.

    >>> import torch.distributions as td
    >>> from aevb import Normal
    >>> check_family(Normal()).ok
    True
    >>> class Wrong(td.Exponential):
    ...     def log_prob(self, value):
    ...         return super().log_prob(value) + 1
    >>> print(check_family(Wrong(torch.tensor([0.5, 2.0]))).failed[0].text)
    exp(log_prob) integrates to 2.718, not 1, at rate = 0.5
    """
    with seeded(seed, all_code=True), torch.device("cpu"):
        if isinstance(family, td.Distribution):
            return FamilyCheck(type(family).__name__, tuple(_of_distribution(family)))
        d = size or (math.prod(family.size) if isinstance(family.size, tuple) else family.size or 2)
        return FamilyCheck(repr(family), tuple(_of_family(family, d)))


def warn_of_wrong_families(factors: Iterable[tuple[Entry, Factor]]) -> None:
    """Warn if a check of a family of the user fails; an error in its code is not reported here.

    Arguments:
        factors: The factors, each with its entry in the declaration.
    """
    seen = set()
    for entry, factor in factors:
        spec = factor.spec
        if type(spec).__module__.startswith("aevb."):
            continue
        settings = [getattr(spec, one.name) for one in fields(spec) if one.name not in NOT_FORM]
        key = type(spec), repr(settings)
        if key in seen:
            continue
        seen.add(key)
        with seeded(0, all_code=True), torch.device("cpu"):
            failed = [one for one in _of_family(spec, factor.d) if one.ok is False]
        if failed:
            text = "; ".join(f"{one.member}: {one.text}" for one in failed)
            warnings.warn(
                DataWarning(
                    f"{entry.where}: members of {type(spec).__name__}'s distribution contradict "
                    f"each other, so results that use them are wrong. {text}. After a change, "
                    f"aevb.check_family(…) of the family checks them again."
                ),
                stacklevel=frames_of_aevb(),
            )


# What is checked ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A distribution with a batch of parameters, and how a family or torch uses it."""

    dist: td.Distribution
    params: Mapping[str, Tensor]
    rebuild: DistributionOf | None  # None if it cannot be built from other parameters
    batch: tuple[int, ...]
    support: Any
    log_prob_of: Callable[[td.Distribution, Tensor], Tensor]
    entropy: Callable[[], Tensor] | None
    samplers: Mapping[str, Callable[[td.Distribution, int], Tensor]]  # n draws [n, *batch, …]
    pathwise: str | None  # the sampler whose draws have a gradient
    # log p of values, and the closed form, of each divergence KL(this ‖ p)
    kls: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]]
    values: Tensor | None = None  # all values of a finite vector

    def at(self, row: int) -> str:
        """Return the parameters of a row in words."""
        found = []
        for name, value in self.params.items():
            if value.numel() in (1, math.prod(self.batch)):
                found.append(f"{name} = {float(value.flatten()[row % value.numel()]):.3g}")
        return f", at {', '.join(found)}" if found else ""

    def log_prob(self, value: Tensor, dist: td.Distribution | None = None) -> Tensor:
        """Return log p of values [N, R], or [N, R, d] for vectors, as [N, R]."""
        shaped = value.reshape(len(value), *self.batch, *value.shape[2:])
        found = self.log_prob_of(self.dist if dist is None else dist, shaped)
        return found.reshape(len(value), -1)


def _of_distribution(given: td.Distribution) -> Iterator[Finding]:
    dist = _lenient(given)
    names = [
        name
        for name in dist.arg_constraints
        if not (name == "probs" and "logits" in vars(dist))
        and (name in vars(dist) or isinstance(getattr(type(dist), name, None), property))
    ]
    params = {name: torch.as_tensor(getattr(dist, name)) for name in names}

    def rebuild(found: Mapping[str, Tensor]) -> td.Distribution:
        family: Any = type(dist)
        return _lenient(family(**found))

    wide = _in_double(dist, params, rebuild)
    dist = wide or dist
    samplers = {"sample": lambda one, n: one.sample((n,))}
    if dist.has_rsample:
        samplers["rsample"] = lambda one, n: one.rsample((n,))
    kls = {}
    batch = tuple(dist.batch_shape)
    if batch and batch[0] > 1 and wide is not None:
        try:
            other = rebuild({name: value.double().roll(1, 0) for name, value in params.items()})
            td.kl_divergence(dist, other)
            kls[f"KL({type(dist).__name__} ‖ {type(dist).__name__})"] = (
                lambda value: other.log_prob(value.reshape(-1, *batch, *dist.event_shape)),
                lambda: td.kl_divergence(dist, other),
            )
        except Exception:
            kls = {}
    values = None
    if dist.event_shape and dist.has_enumerate_support:
        values = dist.enumerate_support(expand=False).reshape(-1, *dist.event_shape)
    yield from _checked(
        Subject(
            dist,
            params,
            None if wide is None else rebuild,
            batch,
            _support(dist, None),
            lambda one, value: one.log_prob(value),
            dist.entropy,
            samplers,
            "rsample" if dist.has_rsample else None,
            kls,
            values,
        )
    )


def _in_double(
    dist: td.Distribution, params: Mapping[str, Tensor], rebuild: DistributionOf
) -> td.Distribution | None:
    """The distribution in double precision; None if its parameters do not determine it."""
    if not params:
        return None
    try:
        found = rebuild({name: value.double() for name, value in params.items()})
        x = dist.sample((20,))
        same = torch.allclose(found.log_prob(x).float(), dist.log_prob(x).float(), 1e-3, 1e-3)
    except Exception:
        return None
    return found if same else None


def _of_family(spec: Conditional, d: int) -> Iterator[Finding]:
    try:
        subject = _subject(spec, 1)
        if subject.dist.event_shape:
            subject = _subject(spec, min(d, 3))
    except TypeError as error:
        rule = "the arguments of distribution have the names of heads"
        yield Finding("distribution", False, f"fails: {error} ({rule})")
        return
    except Exception as error:
        yield Finding("family", None, f"not checked: {type(error).__name__}: {error}")
        return
    yield from _checked(subject)


def _raw(spec: Conditional, d: int) -> dict[str, Tensor]:
    """Raw parameters near the standard ones, [ROWS, size] by name."""
    standard = spec.standard(d)
    heads = {
        name: standard.get(name, 0.0) + 0.7 * torch.randn(ROWS, size, dtype=torch.float64)
        for name, size in spec.heads(d).items()
    }
    vectors = {k: v.double().expand(ROWS, *v.shape).clone() for k, v in spec.vectors(d).items()}
    return heads | vectors


def _subject(spec: Conditional, d: int) -> Subject:
    raw = _raw(spec, d)

    def rebuild(found: Mapping[str, Tensor]) -> td.Distribution:
        return _lenient(spec.distribution(**found))

    dist = rebuild(raw)
    own = type(spec).log_prob is not Conditional.log_prob

    def log_prob(one: td.Distribution, value: Tensor) -> Tensor:
        return spec.log_prob(one, value) if own else one.log_prob(value)

    samplers: dict[str, Callable[[td.Distribution, int], Tensor]] = {
        "sample": lambda one, n: one.sample((n,))
    }
    noise, pathwise = spec.noise(d), None
    if noise is not None:
        kind, count = noise

        def reparametrised(one: td.Distribution, n: int) -> Tensor:
            like = next(iter(raw.values()))
            drawn = noises.draw_one(kind, (n, ROWS, count), None, like.device, like.dtype)
            return spec.reparametrise(one, drawn)

        samplers["reparametrise"] = reparametrised
        pathwise = "reparametrise" if spec.pathwise else None
    elif spec.pathwise and dist.has_rsample:
        samplers["rsample"] = lambda one, n: one.rsample((n,))
        pathwise = "rsample"
    batch = (ROWS,) if dist.event_shape else (ROWS, d)
    kls = {}
    for kind_of_p, function in closed_forms(type(spec)):
        same = kind_of_p is type(spec)
        try:
            p = spec if same else kind_of_p()
            theirs = _lenient(p.distribution(**_raw(p, d)))
        except Exception:
            continue
        own_p = type(p).log_prob is not Conditional.log_prob
        kls[f"KL({type(spec).__name__} ‖ {type(p).__name__})"] = (
            partial(_family_log_prob, p, theirs, own_p, d),
            partial(function, dist, theirs),
        )
    count_of = spec.count(d) if spec.finite else None
    return Subject(
        dist,
        raw,
        rebuild,
        batch,
        _support(dist, spec.support),
        log_prob,
        (lambda: spec.entropy(dist)) if spec.has_entropy else None,
        samplers,
        pathwise,
        kls,
        spec.values(d) if dist.event_shape and count_of and count_of <= TABLE_KEPT else None,
    )


def _family_log_prob(
    p: Conditional, dist: td.Distribution, own: bool, d: int, value: Tensor
) -> Tensor:
    value = value.reshape(len(value), ROWS, d)
    return p.log_prob(dist, value) if own or dist.event_shape else dist.log_prob(value).sum(-1)


def _lenient(dist: td.Distribution) -> td.Distribution:
    """A copy that does not refuse values outside the support."""
    found = copy.copy(dist)
    found._validate_args = False
    for name, part in vars(dist).items():
        if isinstance(part, td.Distribution):
            setattr(found, name, _lenient(part))
    return found


def _support(dist: td.Distribution, declared: Any) -> Any:
    try:
        found = dist.support
    except (NotImplementedError, AttributeError):
        found = None
    if found is None or isinstance(found, constraints._Dependent):
        return declared
    base = getattr(found, "base_constraint", None)  # of a mixture of scalars
    return base if base is not None and not found.event_dim else found


# The checks ---------------------------------------------------------------------------------------


def _checked(subject: Subject) -> Iterator[Finding]:
    """Run every check that applies; a member that is lacking is not checked."""
    draws: dict[str, Tensor] = {}
    lacking = []
    for name, sampler in subject.samplers.items():
        try:
            with torch.no_grad():
                drawn = sampler(subject.dist, DRAWS)
            draws[name] = drawn.double().reshape(
                DRAWS, math.prod(subject.batch), *subject.dist.event_shape
            )
        except Exception as error:
            lacking.append(_unchecked(name, error))
    try:
        with torch.no_grad():
            nodes = _nodes(subject, next(iter(draws.values()), None))
    except _NotCheckedError as reason:
        if subject.dist.event_shape:
            yield from _vectors(subject, draws)
        else:
            yield Finding("log_prob", None, f"not checked: {reason}")
        yield from lacking
        return
    except Exception as error:
        yield _unchecked("log_prob", error)
        yield from lacking
        return
    checks: list[tuple[str, Callable[[], Finding]]] = [("log_prob", lambda: _total(subject, nodes))]
    checks += [
        (name, partial(_draws_agree, subject, nodes, name, drawn)) for name, drawn in draws.items()
    ]
    checks += [(name, partial(_moment, subject, nodes, name)) for name in ("mean", "variance")]
    if subject.entropy is not None:
        checks.append(("entropy", partial(_entropy, subject, nodes)))
    checks += [
        (name, partial(_divergence, subject, nodes, name, *parts))
        for name, parts in subject.kls.items()
    ]
    for name, check in checks:
        try:
            with torch.no_grad():
                yield check()
        except Exception as error:
            yield _unchecked(name, error)
    yield from lacking
    if subject.pathwise in draws and not nodes.discrete:
        name = f"gradient of {subject.pathwise}"
        try:
            yield _gradient(subject, nodes, name)
        except Exception as error:
            yield _unchecked(name, error)


class _NotCheckedError(Exception):
    """There is no simple check; the message says why."""


def _unchecked(name: str, error: Exception) -> Finding:
    if isinstance(error, _NotCheckedError):
        return Finding(name, None, f"not checked: {error}")
    if isinstance(error, NotImplementedError) and not str(error):
        return Finding(name, None, "not checked: the distribution has none")
    text = str(error).partition("\n")[0]
    return Finding(name, None, f"not checked: {type(error).__name__}: {text}")


@dataclass(frozen=True)
class _Nodes:
    """Values and weights, so that sums over them are integrals of p."""

    x: Tensor  # [N, R], or [N, R, d] for vectors
    log_weight: Tensor  # [N, R]
    log_prob: Tensor  # [N, R]
    half: Tensor  # 0.5 for a node that stands for the values around it, 0 for a point mass
    discrete: bool
    coarse: Tensor | None  # the masses by every second node

    @property
    def mass(self) -> Tensor:
        """The probability of each node, [N, R], not normalised."""
        return (self.log_prob + self.log_weight).exp().nan_to_num(0.0, posinf=torch.inf)

    @property
    def share(self) -> Tensor:
        """The probability of each node, normalised."""
        return self.mass / self.mass.sum(0)

    def mean(self, value: Tensor) -> Tensor:
        """Return the expectation of a value of the nodes, [R]; nodes without mass are left out."""
        share = self.share
        return torch.where(share > 0, share * value, 0.0).sum(0)

    def settled(self, value: Tensor, spread: Tensor) -> bool:
        """Return whether half of the nodes give the same expectation, and the ends have no part."""
        share, value = self.share, value.abs()
        part = torch.where(share > 0, share * value, 0.0)
        expected = part.sum(0)
        if self.coarse is None:
            return True
        half = torch.where(self.coarse > 0, self.coarse * value, 0.0).sum(0)
        usable = (self.log_weight > -torch.inf).double()
        ends = torch.stack([usable.argmax(0), len(part) - 1 - usable.flip(0).argmax(0)])
        return bool(
            ((half / self.coarse.sum(0) - expected).abs() <= 0.005 * spread).all()
            and (part.gather(0, ends) <= 1e-4 * spread).all()
            and expected.isfinite().all()
        )

    def quarters(self) -> Tensor:
        """Return the quartiles of p, [3, R]."""
        below = (self.share.cumsum(0)[None] < _quarters()[:, None, None]).sum(1)
        return self.x.gather(0, below.clamp_max(len(self.x) - 1))


def _nodes(subject: Subject, draws: Tensor | None) -> _Nodes:
    support, rows = subject.support, math.prod(subject.batch)
    if subject.values is not None:
        x = subject.values.double().unsqueeze(1)
        x = x.expand(len(x), rows, x.shape[-1])
        log_prob = subject.log_prob(x).double()
        zero = torch.zeros_like(log_prob)
        return _Nodes(x, zero, log_prob, zero, True, None)
    if support is None or support.event_dim:
        raise _NotCheckedError(f"no rule for the support {support}")
    if support.is_discrete:
        return _counts(subject, *_bounds(support, rows))
    if draws is not None and bool((draws == draws.round()).all()):  # counts without their support
        return _counts(subject, torch.zeros(rows), None)
    return _quadrature(subject, *_bounds(support, rows), draws)


def _bounds(support: Any, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the ends of the support, [R]; None where it has none."""
    if support is constraints.boolean:
        return torch.zeros(rows), torch.ones(rows)
    known = (constraints.real, constraints.nonnegative_integer, constraints.positive_integer)
    ends = [getattr(support, name, None) for name in ("lower_bound", "upper_bound")]
    if ends == [None, None] and support not in known:
        raise _NotCheckedError(f"no rule for the support {support}")
    low, high = (
        None if end is None else torch.as_tensor(end, dtype=torch.float64).reshape(-1).expand(rows)
        for end in ends
    )
    return low, high


def _counts(subject: Subject, low: Tensor | None, high: Tensor | None) -> _Nodes:
    if low is None:
        raise _NotCheckedError("the counts have no smallest one")
    count = 512 if high is None else int((high - low).max()) + 1
    while True:
        if count > MOST_COUNTS:
            raise _NotCheckedError(f"more than {MOST_COUNTS:,} counts have a share")
        x = low + torch.arange(count, dtype=torch.float64)[:, None]
        log_prob = subject.log_prob(x).double()
        if high is not None:
            log_prob = torch.where(x <= high, log_prob, -torch.inf)
        mass = log_prob.exp()
        if high is not None or bool((mass[count // 2 :].sum(0) <= 1e-6 * mass.sum(0)).all()):
            zero = torch.zeros_like(log_prob)
            return _Nodes(x, zero, log_prob, zero, True, None)
        count *= 4


def _quadrature(
    subject: Subject, low: Tensor | None, high: Tensor | None, draws: Tensor | None
) -> _Nodes:
    """Nodes at which t = c + s sinh(v) is evenly spaced in v, for t = x, log x or logit x.

    c and s are the median and the spread of t under p: those of the draws, then those of the nodes.
    """
    rows = math.prod(subject.batch)
    sign = 1.0
    if low is None and high is not None:
        low, high, sign = -high, None, -1.0

    def place(t: Tensor) -> tuple[Tensor, Tensor]:
        """The values at t, and the logarithm of dx/dt."""
        if low is None:
            return t, torch.zeros_like(t)
        if high is None:
            return sign * (low + t.exp()), t
        x = low + (high - low) * t.sigmoid()
        inside = (x > low) & (x < high)
        log_slope = torch.nn.functional.logsigmoid(t) + torch.nn.functional.logsigmoid(-t)
        return x, torch.where(inside, log_slope + (high - low).log(), -torch.inf)

    def coordinate(x: Tensor) -> Tensor:
        if low is None:
            return x
        if high is None:
            return (sign * x - low).log()
        return ((x - low) / (high - low)).logit()

    def grid(centre: Tensor, width: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        v = torch.linspace(-WIDEST, WIDEST, n, dtype=torch.float64)[:, None]
        t = centre + width * v.sinh()
        x, log_slope = place(t)
        log_weight = (width * v.cosh() * (v[1] - v[0])).log() + log_slope
        usable = x.isfinite() & log_weight.isfinite()
        if low is not None:
            usable &= (t.abs() < HORIZON) & (sign * x > low)
        middle = place(centre)[0]
        x = torch.where(usable, x, middle)
        log_prob = subject.log_prob(x).double()
        return (
            x,
            torch.where(usable, log_weight, -torch.inf),
            torch.where(log_prob.isnan(), -torch.inf, log_prob),
        )

    centre = torch.zeros(rows, dtype=torch.float64)
    width = torch.ones(rows, dtype=torch.float64)
    if draws is not None:
        t = coordinate(draws)
        quarters = torch.where(t.isfinite(), t, torch.nan).nanquantile(_quarters(), dim=0)
        spread = (quarters[2] - quarters[0]) / 1.35
        seen = spread > 0
        centre = torch.where(seen, quarters[1], centre)
        width = torch.where(seen, spread, width)
    for _ in range(3):
        x, log_weight, log_prob = grid(centre, width, 801)
        share = (log_prob + log_weight).softmax(0).cumsum(0)
        places = [(share < level).sum(0).clamp_max(len(share) - 1) for level in (0.25, 0.5, 0.75)]
        t = coordinate(x)
        low_t, middle, high_t = (t.gather(0, place[None])[0] for place in places)
        good = middle.isfinite() & share[-1].isfinite()
        centre = torch.where(good, middle, centre)
        spread = (high_t - low_t) / 1.35
        width = torch.where(good & (spread > 0), spread, width)
    x, log_weight, log_prob = grid(centre, width, NODES)
    atoms = _atoms(subject, low, high, sign, draws)
    for value, _ in atoms:  # the density around a point mass, not the mass
        at = x == value
        if bool(at.any()):
            beside = subject.log_prob(torch.where(at, x + 1e-9, x)).double()
            log_prob = torch.where(at, beside, log_prob)
    mass = (log_prob + log_weight).exp()
    coarse = torch.zeros_like(mass)
    coarse[::2] = 2 * mass[::2]
    half = torch.full_like(mass, 0.5)
    total, total_coarse = mass.sum(0), coarse.sum(0)
    if bool((total == 0).any()):
        raise _NotCheckedError("no mass was found")
    usable = log_weight > -torch.inf
    ends = torch.stack([usable.double().argmax(0), NODES - 1 - usable.flip(0).double().argmax(0)])
    for value, masses in atoms:
        x = torch.cat([torch.full_like(x[:1], value), x])
        log_weight = torch.cat([torch.where(masses > 0, 0.0, -torch.inf)[None], log_weight])
        log_prob = torch.cat([masses.clamp_min(1e-300).log()[None], log_prob])
        half = torch.cat([torch.zeros_like(half[:1]), half])
        coarse = torch.cat([masses[None], coarse])
        total_coarse, total = total_coarse + masses, total + masses
    at_ends = mass.gather(0, ends)
    if not bool(
        (total.isfinite() & (total > 0)).all()
        and ((total - total_coarse).abs() <= 2e-3 * total).all()
        and (at_ends <= 1e-5 * total).all()
    ):
        raise _NotCheckedError("its integral could not be computed to 3 digits")
    order = x.argsort(0)
    x, log_weight, log_prob, half, coarse = (
        part.gather(0, order) for part in (x, log_weight, log_prob, half, coarse)
    )
    return _Nodes(x, log_weight, log_prob, half, False, coarse)


def _quarters() -> Tensor:
    return torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


def _atoms(
    subject: Subject, low: Tensor | None, high: Tensor | None, sign: float, draws: Tensor | None
) -> list[tuple[float, Tensor]]:
    """Find point masses of a distribution that is continuous elsewhere, with their masses [R].

    Candidates are 0, 1 and values that are drawn repeatedly. At a point mass log_prob differs from
    that of the values beside it.
    """
    candidates = {0.0, 1.0}
    if draws is not None:
        for row in draws.T:
            value, times = row.unique(return_counts=True)
            candidates |= set(value[times >= len(row) // 200].tolist())
    found = []
    rows = math.prod(subject.batch)
    for value in sorted(candidates)[:50]:
        step = 1e-9 * max(1.0, abs(value))
        x = torch.tensor([value, value - step, value + step], dtype=torch.float64)
        log_prob = subject.log_prob(x[:, None].expand(3, rows)).double()
        here, below, above = log_prob
        inside = [torch.ones(rows, dtype=torch.bool) for _ in range(2)]
        for side, one in zip(inside, x[1:], strict=True):
            if low is not None:
                side &= sign * one > low
            if high is not None:
                side &= sign * one < high
        jump = here.isfinite() & (here <= 1e-6) & (inside[0] | inside[1])
        for side, other in zip(inside, (below, above), strict=True):
            jump &= ~side | ~((here - other).abs() <= 1e-3)
        if bool(jump.any()):
            found.append((value, torch.where(jump, here.exp(), 0.0)))
    return found


# One check each -----------------------------------------------------------------------------------


def _total(subject: Subject, nodes: _Nodes) -> Finding:
    total = nodes.mass.sum(0)
    row = int((total.log().abs()).argmax())
    how = "sums" if nodes.discrete else "integrates"
    text = f"exp(log_prob) {how} to {total[row]:.4g}"
    if bool(((total - 1).abs() <= TOLERANCE).all()):
        return Finding("log_prob", True, text)
    return Finding("log_prob", False, f"{text}, not 1{subject.at(row)}")


def _draws_agree(subject: Subject, nodes: _Nodes, name: str, draws: Tensor) -> Finding:
    """Compare the distribution functions of the draws and of the nodes."""
    share = nodes.share
    if nodes.x.dim() == 3:  # all values of a finite vector
        same = (draws[:, None] == nodes.x[None]).all(-1).double().mean(0)
        farthest = (same - share).abs().amax(0)
    else:
        expected = share.cumsum(0) - nodes.half * share
        ordered = draws.T.sort(-1).values.contiguous()
        found = torch.searchsorted(ordered, nodes.x.T.contiguous(), right=True).T / DRAWS
        farthest = torch.where(nodes.log_weight > -torch.inf, (found - expected).abs(), 0.0).amax(0)
    row = int(farthest.argmax())
    if bool(farthest[row] <= FARTHEST):
        return Finding(
            name,
            True,
            f"{DRAWS:,} draws agree with log_prob (distribution functions differ by "
            f"{farthest[row]:.3f})",
        )
    if nodes.x.dim() == 3:
        numbers = f"a value has the share {farthest[row]:.3f} more or less than its probability"
    else:
        drawn, mean = draws[:, row], nodes.mean(nodes.x)[row]
        sd = nodes.mean((nodes.x - nodes.mean(nodes.x)).square())[row].sqrt()
        numbers = (
            f"mean {drawn.mean():.4g} and sd {drawn.std():.4g}, but log_prob has {mean:.4g} and "
            f"{sd:.4g}"
        )
    return Finding(
        name,
        False,
        f"draws do not follow log_prob (distribution functions differ by {farthest[row]:.3f}): "
        f"{numbers}{subject.at(row)}",
    )


def _moment(subject: Subject, nodes: _Nodes, name: str) -> Finding:
    x, vectors = nodes.x, nodes.x.dim() == 3
    claimed = getattr(subject.dist, name).double()
    if claimed.isnan().all():
        raise _NotCheckedError("it is nan")
    if vectors:
        share = nodes.share.unsqueeze(-1)
        mean = (share * x).sum(0)
        variance = (share * (x - mean).square()).sum(0)
        expected = (mean if name == "mean" else variance).flatten()
        spread = torch.ones_like(expected)
    else:
        mean = nodes.mean(x)
        square = (x - mean).square()
        variance = nodes.mean(square)
        expected = mean if name == "mean" else variance
        quarters = nodes.quarters()
        width = (quarters[2] - quarters[0]).clamp_min(1e-12)
        spread, limit = (variance.sqrt(), width) if name == "mean" else (variance, width.square())
        spread = spread.clamp_min(1e-12)
        if not nodes.settled(x - quarters[1] if name == "mean" else square, limit):
            raise _NotCheckedError("the tails are too heavy")
    claimed = claimed.expand(subject.batch + subject.dist.event_shape).flatten()
    error = (claimed - expected).abs() / spread
    row = int(error.nan_to_num(torch.inf).argmax())
    if bool((error <= (0.02 if name == "mean" else 0.03)).all()):
        return Finding(name, True, "agrees with log_prob")
    return Finding(
        name,
        False,
        f"is {claimed[row]:.4g}, but log_prob has the {name} {expected[row]:.4g}"
        f"{subject.at(row if not vectors else row // x.shape[-1])}",
    )


def _entropy(subject: Subject, nodes: _Nodes) -> Finding:
    assert subject.entropy is not None
    log_prob = torch.where(nodes.log_prob > -torch.inf, nodes.log_prob, 0.0)
    return _compared(subject, nodes, "entropy", subject.entropy(), -log_prob)


def _divergence(
    subject: Subject,
    nodes: _Nodes,
    name: str,
    log_p: Callable[[Tensor], Tensor],
    closed: Callable[[], Tensor],
) -> Finding:
    ratio = nodes.log_prob - log_p(nodes.x).reshape(nodes.log_prob.shape)
    return _compared(subject, nodes, name, closed(), ratio)


def _compared(
    subject: Subject, nodes: _Nodes, name: str, claimed: Tensor, value: Tensor
) -> Finding:
    """Compare a closed form with the expectation of a value of the nodes."""
    claimed, expected = claimed.double().reshape(-1), nodes.mean(value)
    scale = expected.abs().clamp_min(1.0)
    if not bool(expected.isfinite().all() and nodes.settled(value, scale)) or claimed.isinf().any():
        raise _NotCheckedError("it is not finite, or the tails are too heavy")
    error = (claimed - expected).abs() / scale
    row = int(error.nan_to_num(torch.inf).argmax())
    if bool((error <= TOLERANCE).all()):
        return Finding(name, True, "agrees with log_prob")
    return Finding(
        name,
        False,
        f"is {claimed[row]:.4g}, but log_prob gives {expected[row]:.4g}{subject.at(row)}",
    )


def _gradient(subject: Subject, nodes: _Nodes, name: str) -> Finding:
    """Compare the gradient of E[f(x)] by draws with its differences by log_prob.

    f is bounded and increasing, and is not symmetric about the middle of the distribution.
    """
    if subject.rebuild is None:
        raise _NotCheckedError("the distribution has no parameters that it can be built from")
    if any(
        isinstance(getattr(subject.support, end, None), Tensor)
        for end in ("lower_bound", "upper_bound")
    ):
        raise _NotCheckedError("the support depends on the parameters")
    rows = math.prod(subject.batch)
    with torch.no_grad():
        params = {key: value.double() for key, value in subject.params.items()}
        quarters = nodes.quarters()
        middle = quarters[1]
        width = ((quarters[2] - quarters[0]) / 1.35).clamp_min(1e-12)

    def f(x: Tensor) -> Tensor:
        return ((x - middle) / width - 0.7).tanh()

    leaves = {
        key: value.expand(DRAWS, *value.shape).clone().requires_grad_()
        for key, value in params.items()
    }
    drawn = subject.samplers[subject.pathwise or ""]
    one = subject.rebuild(leaves)
    x = one.rsample() if subject.pathwise == "rsample" else drawn(one, DRAWS)
    value = f(x.double().reshape(DRAWS, rows))
    if not value.requires_grad:
        return Finding(name, False, "draws have no gradient with respect to the parameters")
    gradients = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    for (key, leaf), gradient in zip(params.items(), gradients, strict=True):
        if leaf.numel() != rows:
            continue
        found = torch.zeros(DRAWS, rows) if gradient is None else gradient.reshape(DRAWS, rows)
        step = (1e-3 * leaf.abs()).clamp_min(1e-5)
        step = torch.minimum(step, 1e-2 * width.reshape(leaf.shape)).clamp_min(1e-7)

        def expected(shift: Tensor, key: str = key, leaf: Tensor = leaf) -> Tensor:
            assert subject.rebuild is not None
            moved = subject.rebuild({**params, key: leaf + shift})
            share = replace(nodes, log_prob=subject.log_prob(nodes.x, moved).double()).share
            return torch.where(share > 0, share * f(nodes.x), 0.0).sum(0)

        with torch.no_grad():
            slope, wide = (
                (expected(k * step) - expected(-k * step)) / (2 * k * step.reshape(-1))
                for k in (1, 2)
            )
        scale = slope.abs().clamp_min(0.05)
        if not bool(((slope - wide).abs() <= 0.01 * scale).all()):
            raise _NotCheckedError("differences of log_prob are not smooth enough")
        mean, error = found.mean(0), found.std(0) / math.sqrt(DRAWS)
        wrong = ~((mean - slope).abs() <= 6 * error + TOLERANCE * scale)
        if bool(wrong.any()):
            row = int(wrong.double().argmax())
            return Finding(
                name,
                False,
                f"the derivative of E[tanh((x − {middle[row]:.3g}) / {width[row]:.3g} − 0.7)] by "
                f"{key} is {mean[row]:.4g}, but log_prob gives {slope[row]:.4g}{subject.at(row)}",
            )
    return Finding(name, True, "agrees with log_prob")


def _vectors(subject: Subject, draws: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Check a distribution over real vectors by weighted draws of a Gaussian."""
    if "sample" not in draws:
        return
    drawn = draws["sample"]
    try:
        with torch.no_grad():
            yield _total_of_vectors(subject, drawn)
    except Exception as error:
        yield _unchecked("log_prob", error)
    drawn = drawn.flatten(1)
    mean = drawn.mean(0)
    for name, value in (("mean", drawn), ("variance", (drawn - mean).square())):
        try:
            claimed = getattr(subject.dist, name).double()
            claimed = claimed.expand(subject.batch + subject.dist.event_shape).flatten()
            found, stderr = value.mean(0), value.std(0) / math.sqrt(DRAWS)
            away = (claimed - found).abs() - 8 * stderr - 0.05 * found.abs()
            i = int(away.nan_to_num(torch.inf).argmax())
            if claimed.isinf().any():
                yield Finding(name, None, "not checked: it is infinite")
            elif bool(away[i] <= 0):
                yield Finding(name, True, "agrees with draws")
            else:
                yield Finding(name, False, f"is {claimed[i]:.4g}, but draws have {found[i]:.4g}")
        except Exception as error:
            yield _unchecked(name, error)
    yield Finding("sample", None, "not checked against log_prob: a distribution over vectors")


def _total_of_vectors(subject: Subject, draws: Tensor) -> Finding:
    d = draws.shape[-1]
    flat = constraints.independent(constraints.real, 1), constraints.real_vector, constraints.real
    if draws.dim() != 3 or d > MOST_ENTRIES or not _same_constraint(subject.support, flat):
        raise _NotCheckedError(f"vectors of {d} entries with the support {subject.support}")
    centred = draws - draws.mean(0)
    covariance = torch.einsum("nri,nrj->rij", centred, centred) / len(draws)
    wide = td.MultivariateNormal(draws.mean(0), 1.5 * covariance)
    x = wide.sample((DRAWS,))
    weight = (subject.log_prob(x).double() - wide.log_prob(x)).exp()
    total, error = weight.mean(0), weight.std(0) / math.sqrt(DRAWS)
    if bool((weight.sum(0).square() / weight.square().sum(0) < DRAWS / 20).any()):
        raise _NotCheckedError("it is too far from a Gaussian to integrate by draws")
    wrong = (total - 1).abs() - 6 * error - TOLERANCE
    row = int(wrong.argmax())
    text = f"exp(log_prob) integrates to {total[row]:.3g} ± {error[row]:.1g}"
    if bool(wrong[row] <= 0):
        return Finding("log_prob", True, text)
    return Finding("log_prob", False, f"{text}, not 1")


def _same_constraint(support: Any, known: tuple[Any, ...]) -> bool:
    """Return whether a support is one of some real ones; torch's constraints do not compare."""
    base = getattr(support, "base_constraint", support)
    return support in known or base is constraints.real
