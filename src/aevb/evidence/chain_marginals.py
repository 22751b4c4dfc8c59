"""Marginals of the Gaussian unknowns of a chain in time, for all steps at once.

They come from the vectorised filter and smoother of :mod:`aevb.evidence.gaussian_chain`, which is
much faster than visiting one variable after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aevb.estimate.keys import mask_of
from aevb.evidence.filtering import Filter
from aevb.evidence.square_root_belief import is_diagonal

# Smallest share of a filtered variance that the smoother may leave. It subtracts, and a smaller
# share has lost digits.
LEFT = 1e-4


def by_chain(
    integral: Filter, asked: Sequence[str], *, smoothed: bool = False
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor] | None:
    """Return mean and covariance of each unknown, and log p of the data up to each step.

    The unknowns ``asked`` are latents, and observed variables with missing entries. Means are
    [axes, T, N, d], covariances [axes, T, N or 1, d, d], log p is [axes, T, N, 1]. Moments are
    filtered, or ``smoothed``. None if this does not apply, or would lose digits.
    """
    structure, graph, batch = integral.structure, integral.graph, integral.batch
    if not structure.carried:
        return None
    hidden = [name for name in asked if name not in structure.gaussian]
    for name in hidden:
        known = batch[mask_of(name)]
        partly = bool((known.any(-1) != known.all(-1)).any())
        if not graph.timed[name] or (partly and not is_diagonal(integral.rules[name].noise)):
            return None
    columns = [(name, 0) for name in asked if name not in hidden]
    moments = integral.chain_moments(columns, smoothed=smoothed)
    if moments is None or moments.left < LEFT:
        return None
    found = {}
    for name in asked:
        if name not in hidden:
            place = moments.columns[name, 0]
            found[name] = moments.mean[..., place], moments.covariance[..., place, place]
            continue
        place, known = moments.seen[name], batch[mask_of(name)]
        mean, covariance = (
            moments.seen_mean[..., place],
            moments.seen_covariance[..., place, place],
        )
        found[name] = (
            torch.where(known, batch[name].double(), mean),
            covariance.masked_fill(known.unsqueeze(-1) | known.unsqueeze(-2), 0.0),
        )
    return found, moments.so_far.unsqueeze(-1)
