"""Schedules as data: which parameters move at which step, and by what objective.

``joint()`` is AEVB: θ and φ together. ``alternate(e, m)`` is approximate EM: φ alone for e steps (the E-step, which tightens the
bound), then θ alone for m (the M-step, which raises it). ``em()`` takes the exact posterior for the E-step, where there is one;
``mle()`` ascends the exact evidence itself.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        if min(self.e_steps, self.m_steps) < 1:
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

    Where the M-step has a closed form, a step is one iteration over all rows. Elsewhere an M-step is ``m_steps`` gradient steps
    on E[log p(x, z)] with the posterior frozen as the E-step found it.
    """

    m_steps: int = 100
    objective = "em"

    def __post_init__(self) -> None:
        if self.m_steps < 1:
            raise ValueError(f"em takes a positive number of steps, got {self.m_steps}.")

    def phase(self, step: int, total: int) -> Phase:
        position = step % self.m_steps
        return Phase("M", True, False, position, min(self.m_steps, total - (step - position)))


@dataclass(frozen=True)
class mle(Schedule):
    """θ ascends the exact evidence, without dropout; q stays as it is. For models whose evidence is known in closed form."""

    objective = "evidence"

    def phase(self, step: int, total: int) -> Phase:
        return Phase("mle", True, False, step, total)
