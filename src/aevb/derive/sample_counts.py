"""The number of samples per example that a bound takes by default."""

from __future__ import annotations

WEIGHTED_SAMPLES = 5  # one weighted sample, or particle, would give the ELBO


def usual_samples(bound: str) -> int:
    """Return the default number of samples, or particles, of a bound.

    >>> usual_samples("elbo"), usual_samples("iwae")
    (1, 5)
    """
    return 1 if bound == "elbo" else WEIGHTED_SAMPLES
