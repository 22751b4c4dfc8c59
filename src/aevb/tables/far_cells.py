"""Cells far from the others of their column, in robust standard deviations around the median."""

from __future__ import annotations

import numpy as np

FAR = 20.0  # robust standard deviations
FEW = 0.01  # the largest share of far cells that are outliers, and not the tail of a distribution
ENOUGH = 50  # known cells
PER_MAD = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations


def distances(values: np.ndarray) -> np.ndarray:
    """Robust standard deviations between each cell and the median; 0 if most cells are equal.

    >>> distances(np.array([1.0, 2.0, 3.0, 4.0, 150.0])).round(1).tolist()
    [1.3, 0.7, 0.0, 0.7, 99.2]
    """
    away = np.abs(values - np.median(values))
    spread = PER_MAD * float(np.median(away))
    return away / spread if spread else np.zeros(len(values))


def few_far(values: np.ndarray) -> np.ndarray:
    """The mask of the cells that lie far from all others, if they are few."""
    if len(values) < ENOUGH:
        return np.zeros(len(values), bool)
    far = distances(values) > FAR
    return far if far.sum() <= max(1, FEW * len(values)) else np.zeros(len(values), bool)
