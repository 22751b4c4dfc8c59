"""Resampling of particles: which particle each new one continues."""

from __future__ import annotations

import torch
from torch import Tensor

COUNTED = 32  # up to so many particles, all pairs are compared, which a compiler can fuse


def normalised(log_w: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-weights [K, N] that sum to one over K, and log Σ w, [N]."""
    total = log_w.logsumexp(0)
    return log_w - total, total


def effective_sample_size(log_w: Tensor) -> Tensor:
    """Return 1 / Σ W² of normalised log-weights [K, N], [N]."""
    return 1 / (2 * log_w).logsumexp(0).exp()


def systematic(log_w: Tensor, uniform: Tensor) -> Tensor:
    """Return ancestors [K, N] from normalised log-weights [K, N] and one uniform per row, [N].

    The k-th ancestor is the particle at (k + u) / K on the cumulative weights. A particle with
    weight W has ⌊KW⌋ or ⌈KW⌉ children, KW in the mean.
    """
    k = log_w.shape[0]
    places = torch.arange(k, dtype=log_w.dtype, device=log_w.device).unsqueeze(-1) + uniform
    return _at(log_w, places / k)


def multinomial(log_w: Tensor, uniform: Tensor) -> Tensor:
    """Return independent ancestors [K, N], each with the weights as probabilities.

    ``log_w`` are normalised log-weights and ``uniform`` independent uniforms, both [K, N].
    """
    return _at(log_w, uniform)


def _at(log_w: Tensor, places: Tensor) -> Tensor:
    """The particles at places [K, N] in [0, 1) on the cumulative weights.

    A particle's number is that of the particles whose cumulative weight is below the place.
    """
    edges = log_w.exp().cumsum(0)
    places = places * edges[-1:]
    if len(edges) <= COUNTED:
        index = (edges.unsqueeze(0) < places.unsqueeze(1)).sum(1)
    else:
        index = torch.searchsorted(edges.T.contiguous(), places.T.contiguous()).T
    return index.clamp_max(len(edges) - 1)
