"""Schedules: which parameters each step trains, and with which objective.

``joint()`` is AEVB: θ and φ together. ``alternate(e, m)`` is approximate EM: φ alone for e steps
(the E-step, which tightens the bound), then θ alone for m steps (the M-step, which raises it).
``em()`` uses the exact posterior in the E-step, for models that have one. ``mle()`` maximises the
exact evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from aevb.runtime.suggestions import did_you_mean

STARTS = ("auto", "data", "keep")  # where EM begins
OPTIMISERS = ("auto", "lbfgs", "adam")  # of mle()


@dataclass(frozen=True)
class Phase:
    """The phase of one step: the parameter groups it trains, and its position.

    The position is in 0 … ``length`` − 1.
    """

    name: str
    theta: bool
    phi: bool
    position: int
    length: int


@dataclass(frozen=True)
class Schedule:
    """Base class of schedules: maps a step, and the total number of steps, to its phase."""

    objective = "bound"

    @property
    def cycle(self) -> int:
        """The number of steps after which the phases repeat."""
        return 1

    def phase(self, step: int, total: int) -> Phase:
        """Return the phase of a step.

        Arguments:
            step: The step, from 0.
            total: The number of steps of the run.

        >>> alternate(10, 20).phase(12, total=100)
        Phase(name='M', theta=True, phi=False, position=2, length=20)
        """
        return Phase("joint", True, True, step, total)


@dataclass(frozen=True)
class joint(Schedule):
    """Train θ and φ together at every step: AEVB.

    >>> joint().phase(0, total=100).name
    'joint'
    """


@dataclass(frozen=True)
class alternate(Schedule):
    """Train φ alone, then θ alone, and repeat: approximate EM.

    Arguments:
        e_steps: The number of steps of φ, which tighten the bound.
        m_steps: The number of steps of θ, which raise it.

    >>> [alternate(10, 20).phase(step, total=100).name for step in (0, 9, 10, 29, 30)]
    ['E', 'E', 'M', 'M', 'E']
    """

    e_steps: int = 1000
    m_steps: int = 1000

    def __post_init__(self) -> None:
        if not all(_is_count(steps) for steps in (self.e_steps, self.m_steps)):
            raise ValueError(
                f"alternate takes positive numbers of steps, got {self.e_steps} and {self.m_steps}."
            )

    @property
    def cycle(self) -> int:
        return self.e_steps + self.m_steps

    def phase(self, step: int, total: int) -> Phase:
        cycle, position = divmod(step, self.e_steps + self.m_steps)
        start = cycle * (self.e_steps + self.m_steps)
        if position < self.e_steps:
            return Phase("E", False, True, position, min(self.e_steps, total - start))
        return Phase(
            "M",
            True,
            False,
            position - self.e_steps,
            min(self.m_steps, total - start - self.e_steps),
        )


@dataclass(frozen=True)
class em(Schedule):
    """EM with exact E-steps, for linear-Gaussian models and finite latents; without dropout.

    If the M-step has a closed form, a step is one iteration over all rows, and at most ``steps=``
    (1,000 by default) iterations are taken. Over-dispersed counts (``NegativeBinomial``) with one
    dispersion for all clusters belong here: Newton's method finds the exact maximum.

    Arguments:
        m_steps: If the M-step has no closed form, it is this many gradient steps on E[log p(x, z)]
            with the posterior of the last E-step held fixed.
        tol: EM converges when the last three iterations together raised the mean evidence by less
            than ``tol`` nats; with 0 it always takes all steps.
        start: Chooses the initial parameters. "data" computes them from the data (principal
            factors, k-means++ with the run's seed). "keep" takes the model's parameters, and
            moves the biases to the means of the data if that raises the evidence. "auto" is "data"
            if p is as it was initialised, and "keep" if it was trained, loaded or set.
        accelerate: Extrapolate from earlier iterations if that does not lower the evidence; False
            is textbook EM.
        least: The lower limit of the variance that an M-step gives a column, as a share of the
            column's own variance. By default it is 1e-12 for finite latents and 1e-6 for Gaussian
            ones. A larger one, such as 1e-4, keeps a cluster from collapsing onto equal rows. For
            finite latents, a sequence has one share for each column of the Gaussian variables.

    >>> import torch
    >>> from aevb import fit, zoo
    >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    >>> run = fit(zoo.fa(x=3, z=1), {"x": x}, schedule=em(), progress=False)
    >>> any(row.get("kind") == "converged" for row in run.rows)
    True
    """

    m_steps: int = 100
    tol: float = 1e-5
    start: str = "auto"
    accelerate: bool = True
    least: float | Sequence[float] | None = None
    objective = "em"

    def __post_init__(self) -> None:
        if not _is_count(self.m_steps):
            raise ValueError(f"em takes a positive number of steps, got {self.m_steps}.")
        if (
            isinstance(self.tol, bool)
            or not isinstance(self.tol, int | float)
            or not 0 <= self.tol < math.inf
        ):
            raise ValueError(
                f"em: tol is a gain of the mean evidence in nats, 0 or more, got {self.tol!r}."
            )
        if self.start not in STARTS:
            raise ValueError(
                f"em: start is {', '.join(map(repr, STARTS[:-1]))} or {STARTS[-1]!r}, got "
                f"{self.start!r}."
            )
        if not isinstance(self.accelerate, bool):
            raise ValueError(f"em: accelerate is True or False, got {self.accelerate!r}.")
        if isinstance(self.least, Sequence) and not isinstance(self.least, str):
            object.__setattr__(self, "least", tuple(self.least))  # TOML reads lists
        shares = self.least if isinstance(self.least, tuple) else (self.least,)
        if self.least is not None and not all(map(_is_share, shares)):
            raise ValueError(
                f"em: least is a share of a column's variance between 0 and 1, got {self.least!r}."
            )

    def phase(self, step: int, total: int) -> Phase:
        position = step % self.m_steps
        return Phase("M", True, False, position, min(self.m_steps, total - (step - position)))


@dataclass(frozen=True)
class mle(Schedule):
    """Maximum likelihood: train θ on the exact evidence, without dropout, and leave q unchanged.

    The evidence of the model must be known in closed form. If model and data are small, a step is
    one iteration of L-BFGS on all rows, in float64, and at most ``steps=`` (1,000 by default)
    iterations are taken.

    The search uses the units of the data and starts at the model's parameters. If independent
    Gaussians with the means and standard deviations of the columns have a higher evidence, two
    other starts are tried: one moves the biases to the means of the data, and the other interprets
    the parameters as those of a model of standardised data. The best start is used.

    Arguments:
        tol: The run converges when the last iteration raised the mean evidence by less than ``tol``
            nats and the next one is expected to as well. With 0 it takes all steps, unless no step
            raises the evidence.
        optimiser: "lbfgs" or "adam". "auto" takes steps of Adam on batches for larger models or
            data, or if ``lr``, ``warmup`` or ``clip`` is set.

    >>> import torch
    >>> from aevb import fit, zoo
    >>> x = torch.randn(1, 50, 1, generator=torch.Generator().manual_seed(0))
    >>> run = fit(zoo.local_level(), {"x": x}, schedule=mle(), progress=False)
    >>> run.step < 100
    True
    """

    tol: float = 1e-5
    optimiser: str = "auto"
    objective = "evidence"

    def __post_init__(self) -> None:
        if (
            isinstance(self.tol, bool)
            or not isinstance(self.tol, int | float)
            or not 0 <= self.tol < math.inf
        ):
            raise ValueError(
                f"mle: tol is a gain of the mean evidence in nats, 0 or more, got {self.tol!r}."
            )
        if self.optimiser not in OPTIMISERS:
            raise ValueError(
                f"mle: optimiser is {', '.join(map(repr, OPTIMISERS[:-1]))} or "
                f"{OPTIMISERS[-1]!r}, got {self.optimiser!r}."
            )

    def phase(self, step: int, total: int) -> Phase:
        return Phase("mle", True, False, step, total)


def parse_schedule(text: str) -> Schedule:
    """Return a schedule from its name and first arguments: ``joint``, ``alternate:500,500``."""
    name, _, numbers = text.partition(":")
    kind = _kind(name)
    try:
        arguments = [int(number) for number in numbers.split(",") if number]
    except ValueError:
        raise ValueError(
            f"{name} takes whole numbers, got {numbers!r}. Write e.g. joint, alternate:1000,1000, "
            f"em or mle."
        ) from None
    takes = [one.name for one in fields(kind)]
    if len(arguments) > len(takes):
        raise ValueError(
            f"{name} takes {', '.join(takes) or 'no numbers'}, got {numbers!r}. Write e.g. joint, "
            f"alternate:1000,1000, em or mle."
        )
    return kind(*arguments)


def schedule_from(record: Any) -> Schedule:
    """Return a schedule from its record or its text (:func:`parse_schedule`).

    A record is e.g. ``{"name": "alternate", "e_steps": 500}``.
    """
    if isinstance(record, str):
        return parse_schedule(record)
    if not isinstance(record, Mapping):
        raise ValueError(
            f'schedule is a text, e.g. "alternate:500,500", or a table with a name, got {record!r}.'
        )
    kind = _kind(record.get("name"))
    takes = [one.name for one in fields(kind)]
    unknown = [key for key in record if key != "name" and key not in takes]
    if unknown:
        raise ValueError(
            f"schedule: {kind.__name__} has no {', '.join(unknown)}. It takes "
            f"{', '.join(takes) or 'nothing'}.{did_you_mean(unknown[0], takes)}"
        )
    return kind(**{key: value for key, value in record.items() if key != "name"})


def _kind(name: Any) -> type[Schedule]:
    kinds = {kind.__name__: kind for kind in Schedule.__subclasses__()}
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f"Unknown schedule {name!r}. Choose one of {', '.join(kinds)}; alternate:1000,1000 "
            f"sets the steps per phase.{did_you_mean(name, kinds)}"
        )
    return kinds[name]


def _is_share(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < 1


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
