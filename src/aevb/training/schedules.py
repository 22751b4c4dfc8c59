"""Schedules as data: which parameters move at which step, and by what objective.

``joint()`` is AEVB: θ and φ together. ``alternate(e, m)`` is approximate EM: φ alone for e steps (the E-step, which tightens the
bound), then θ alone for m (the M-step, which raises it). ``em()`` takes the exact posterior for the E-step, where there is one;
``mle()`` ascends the exact evidence itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

STARTS = ("auto", "data", "keep")  # where EM begins
OPTIMISERS = ("auto", "lbfgs", "adam")  # of mle()


@dataclass(frozen=True)
class Phase:
    """What one step does: the groups it moves, and the position inside its phase, from 0 to ``length`` − 1."""

    name: str
    theta: bool
    phi: bool
    position: int
    length: int


@dataclass(frozen=True)
class Schedule:
    """The base: a schedule answers, for a step of so many, which phase it belongs to."""

    objective = "bound"

    @property
    def cycle(self) -> int:
        """After how many steps the phases repeat."""
        return 1

    def phase(self, step: int, total: int) -> Phase:
        return Phase("joint", True, True, step, total)


@dataclass(frozen=True)
class joint(Schedule):
    """θ and φ move together at every step: AEVB."""


@dataclass(frozen=True)
class alternate(Schedule):
    """φ alone for ``e_steps``, then θ alone for ``m_steps``, and again: approximate E- and M-steps."""

    e_steps: int = 1000
    m_steps: int = 1000

    def __post_init__(self) -> None:
        if not all(_is_count(steps) for steps in (self.e_steps, self.m_steps)):
            raise ValueError(f"alternate takes positive numbers of steps, got {self.e_steps} and {self.m_steps}.")

    @property
    def cycle(self) -> int:
        return self.e_steps + self.m_steps

    def phase(self, step: int, total: int) -> Phase:
        cycle, position = divmod(step, self.e_steps + self.m_steps)
        start = cycle * (self.e_steps + self.m_steps)
        if position < self.e_steps:
            return Phase("E", False, True, position, min(self.e_steps, total - start))
        return Phase("M", True, False, position - self.e_steps, min(self.m_steps, total - start - self.e_steps))


@dataclass(frozen=True)
class em(Schedule):
    """Exact E-steps, for linear-Gaussian models and finite latents; without dropout.

    Where the M-step has a closed form, a step is one iteration over all rows, and ``steps=`` (1,000 by default) is the most that are taken: EM ends
    when the last three raised the mean evidence by less than ``tol`` nats together (``tol=0``: never before ``steps``). ``accelerate``
    extrapolates from earlier iterations wherever that does not lower the evidence; ``accelerate=False`` is the textbook's EM.

    ``start`` is where it begins: ``"data"`` at parameters made from the data (principal components, k-means++ by the run's seed), ``"keep"`` at
    the model's own, biases moved to the data's means if that raises the evidence. ``"auto"`` is ``"data"`` for a model whose p is as it was
    initialised, and ``"keep"`` for one that was trained, loaded or set.

    Where the M-step has no closed form it is ``m_steps`` gradient steps on E[log p(x, z)] with the posterior frozen as the E-step found it.
    """

    m_steps: int = 100
    tol: float = 1e-5
    start: str = "auto"
    accelerate: bool = True
    objective = "em"

    def __post_init__(self) -> None:
        if not _is_count(self.m_steps):
            raise ValueError(f"em takes a positive number of steps, got {self.m_steps}.")
        if isinstance(self.tol, bool) or not isinstance(self.tol, int | float) or not 0 <= self.tol < math.inf:
            raise ValueError(f"em: tol is a gain of the mean evidence in nats, 0 or more, got {self.tol!r}.")
        if self.start not in STARTS:
            raise ValueError(f"em: start is {', '.join(map(repr, STARTS[:-1]))} or {STARTS[-1]!r}, got {self.start!r}.")
        if not isinstance(self.accelerate, bool):
            raise ValueError(f"em: accelerate is True or False, got {self.accelerate!r}.")

    def phase(self, step: int, total: int) -> Phase:
        position = step % self.m_steps
        return Phase("M", True, False, position, min(self.m_steps, total - (step - position)))


@dataclass(frozen=True)
class mle(Schedule):
    """θ ascends the exact evidence, without dropout; q stays as it is. For models whose evidence is known in closed form.

    Where model and data are small, a step is one iteration of L-BFGS on all rows, in float64, and ``steps=`` (1,000 by default) is the most that are
    taken: the ascent ends when the last iteration raised the mean evidence by less than ``tol`` nats and the next would too (``tol=0``: never before
    ``steps``, unless no step raises it any more). It searches in units of the data and begins at the model's parameters. Where Gaussians with
    the columns' means and spreads explain the data better, it reads them as those of standardised data, if that raises the evidence.

    Elsewhere, or where ``lr``, ``warmup`` or ``clip`` is set, a step is one of Adam's on a batch. ``optimiser="lbfgs"`` or ``"adam"`` decides it.
    """

    tol: float = 1e-5
    optimiser: str = "auto"
    objective = "evidence"

    def __post_init__(self) -> None:
        if isinstance(self.tol, bool) or not isinstance(self.tol, int | float) or not 0 <= self.tol < math.inf:
            raise ValueError(f"mle: tol is a gain of the mean evidence in nats, 0 or more, got {self.tol!r}.")
        if self.optimiser not in OPTIMISERS:
            raise ValueError(f"mle: optimiser is {', '.join(map(repr, OPTIMISERS[:-1]))} or {OPTIMISERS[-1]!r}, got {self.optimiser!r}.")

    def phase(self, step: int, total: int) -> Phase:
        return Phase("mle", True, False, step, total)


def parse_schedule(text: str) -> Schedule:
    """A schedule from its name and its first arguments: ``joint``, ``alternate:500,500``."""
    name, _, numbers = text.partition(":")
    kind = _kind(name)
    try:
        arguments = [int(number) for number in numbers.split(",") if number]
    except ValueError:
        raise ValueError(f"{name} takes whole numbers, got {numbers!r}. Write e.g. joint, alternate:1000,1000, em or mle.") from None
    takes = [one.name for one in fields(kind)]
    if len(arguments) > len(takes):
        raise ValueError(f"{name} takes {', '.join(takes) or 'no numbers'}, got {numbers!r}. Write e.g. joint, alternate:1000,1000, em or mle.")
    return kind(*arguments)


def schedule_from(record: Any) -> Schedule:
    """A schedule from its record, ``{"name": "alternate", "e_steps": 500}``, or from a text (:func:`parse_schedule`)."""
    if isinstance(record, str):
        return parse_schedule(record)
    if not isinstance(record, Mapping):
        raise ValueError(f'schedule is a text, e.g. "alternate:500,500", or a table with a name, got {record!r}.')
    kind = _kind(record.get("name"))
    takes = [one.name for one in fields(kind)]
    unknown = [key for key in record if key != "name" and key not in takes]
    if unknown:
        raise ValueError(f"schedule: {kind.__name__} has no {', '.join(unknown)}. It takes {', '.join(takes) or 'nothing'}.")
    return kind(**{key: value for key, value in record.items() if key != "name"})


def _kind(name: Any) -> type[Schedule]:
    kinds = {kind.__name__: kind for kind in Schedule.__subclasses__()}
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"Unknown schedule {name!r}. Choose one of {', '.join(kinds)}; alternate:1000,1000 says how many steps.")
    return kinds[name]


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
