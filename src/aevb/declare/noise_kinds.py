"""Kinds of noise: what a sample, or a dropout mask, is computed from.

A kind is a word (``"normal"``, ``"uniform"``, ``"gumbel"``, ``"logistic"``, ``"laplace"``,
``"seed"``) or, if it has a parameter, a :class:`WithParameter`.
"""

from __future__ import annotations

from typing import NamedTuple

SEED = "seed"  # of torch's own sampler
STUDENT, KEEP = "student", "keep"


class WithParameter(NamedTuple):
    """A kind of noise with a parameter."""

    name: str
    parameter: float

    def __str__(self) -> str:
        return f"{self.name} {self.parameter}"


NoiseKind = str | WithParameter
Noise = tuple[NoiseKind, int]  # the kind of noise, and how many numbers per example


def student(df: float) -> WithParameter:
    """Student's t noise."""
    return WithParameter(STUDENT, df)


def keep(probability: float) -> WithParameter:
    """A dropout mask: 1, with this probability, keeps a unit."""
    return WithParameter(KEEP, probability)
