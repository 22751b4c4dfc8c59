"""Quantiles of mixtures of normal distributions, and of draws."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.evidence.exact_posterior import Components

HALVINGS = 60  # of the interval that holds a quantile; float64 has 53 bits


def checked_levels(levels: Any) -> list[float]:
    """Return the levels of quantiles as numbers; raise ValueError outside (0, 1)."""
    every = levels if isinstance(levels, Sequence | np.ndarray | Tensor) else [levels]
    found: list[float] = []
    for level in every:
        number = isinstance(level, Real | Tensor) and not isinstance(level, bool)
        if not number or not 0 < float(level) < 1:  # type: ignore[arg-type]
            raise ValueError(
                f"Quantile levels lie between 0 and 1, e.g. quantile([0.05, 0.5, 0.95]). Got "
                f"{level!r}."
            )
        found.append(float(level))
    if not found:
        raise ValueError("quantile needs at least one level, e.g. quantile([0.05, 0.5, 0.95]).")
    return found


def normal_quantiles(components: Components, levels: Sequence[float]) -> Tensor:
    """Return quantiles of each entry of a mixture of normals, [Q, N, T, d].

    With one component the quantile is μ + σ Φ⁻¹(level). Otherwise it is found by bisection of the
    mixture's distribution function, up to rounding.
    """
    level = torch.tensor(levels, dtype=torch.float64, device=components.mean.device)
    z = torch.special.ndtri(level).reshape(-1, 1, 1, 1, 1)
    mean, sd = components.mean.double(), components.variance.double().clamp_min(0.0).sqrt()
    each = mean + sd * z  # [Q, N, T, K, d]
    if mean.shape[-2] == 1:
        return each[..., 0, :]
    # The mixture's quantile lies between the smallest and the largest one of its components.
    weight = components.weight.double().unsqueeze(-1)
    low, high = each.amin(-2), each.amax(-2)
    target = level.reshape(-1, 1, 1, 1)
    safe = sd.clamp_min(torch.finfo(torch.float64).tiny)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = (weight * torch.special.ndtr((middle.unsqueeze(-2) - mean) / safe)).sum(-2)
        low, high = (
            torch.where(below < target, middle, low),
            torch.where(below < target, high, middle),
        )
    return (low + high) / 2


def drawn_quantiles(draws: Tensor, levels: Sequence[float], *, discrete: bool = False) -> Tensor:
    """Return quantiles over draws, [S, …] → [Q, …], interpolated between neighbouring draws.

    Those of ``discrete`` values are values themselves: the smallest one that at least a share
    ``level`` of the draws does not exceed. A central interval then holds at least its share.
    """
    values = draws.double().cpu().numpy()
    if discrete:
        found = np.quantile(values, levels, axis=0, method="inverted_cdf")
    else:
        found = np.quantile(values, levels, axis=0)
    return torch.as_tensor(found).to(draws.device)
