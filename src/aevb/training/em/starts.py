"""Initial parameters for EM: factor analysis for Gaussian latents, k-means++ for clusters."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE, TRIES, ROUNDS = 10_000, 4, 30  # rows for k-means, its restarts, and its iterations at most
# Rounds of factor analysis, for at most WIDE columns, and the least share of noise in a variance.
FACTOR_ROUNDS, WIDE, LEAST_NOISE = 20, 256, 1e-4


def principal_factors(covariance: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Posterior of factor analysis for data of this covariance, after a few rounds.

    A round computes the loadings for known variances of the noise, and then the noise for these
    loadings; of many columns, only the first round is made, with equal noise (probabilistic PCA).
    Returns the gain [size, d] and the variances [size] of ``size`` latents. Every latent explains
    some variance, and the noise is positive: EM cannot leave a point where either is zero.
    """
    variances, least = covariance.diagonal(), torch.finfo(covariance.dtype).tiny
    wide = len(variances) > WIDE
    count = min(size, len(variances))
    noise = variances.clamp_min(least)
    if wide:
        values = torch.linalg.eigvalsh(covariance)
        noise = torch.full_like(
            noise, max(float(values[:-count].mean()), 0.05 * float(values.mean()), least)
        )
    for left in reversed(range(1 if wide else FACTOR_ROUNDS)):
        scale = noise.sqrt()
        values, vectors = torch.linalg.eigh(covariance / scale / scale.unsqueeze(1))
        top, vectors = values.flip(0)[:count].clamp_min(1.01), vectors.flip(1)[:, :count]
        if left:
            loadings = scale.unsqueeze(1) * vectors * (top - 1.0).sqrt()
            noise = variances - loadings.square().sum(1)
            noise = noise.maximum(LEAST_NOISE * variances).clamp_min(least)
    gain = covariance.new_zeros(size, len(variances))
    gain[:count] = (vectors * ((top - 1.0).sqrt() / top) / scale.unsqueeze(1)).mT
    return gain, torch.cat([1.0 / top, covariance.new_ones(size - count)])


def cluster_centres(rows: Tensor, count: int, seed: int, known: Tensor | None = None) -> Tensor:
    """Find ``count`` cluster centres by k-means, the best of several k-means++ starts.

    ``known`` ([rows]) is the cluster of each row, or −1 if unknown. A cluster with known rows
    starts at their mean.
    """
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, Tensor] | None = None
    for _ in range(TRIES):
        centres = _spread_out(rows, count, generator, known)
        for _ in range(ROUNDS):
            distances = _distances(rows, centres)
            nearest, which = distances.min(1)
            if known is not None:
                which = torch.where(known >= 0, known, which)
            member = torch.nn.functional.one_hot(which, count).to(rows.dtype)
            sizes = member.sum(0).unsqueeze(1)
            moved = torch.where(sizes > 0, (member.mT @ rows) / sizes.clamp_min(1.0), centres)
            if torch.allclose(moved, centres, rtol=0, atol=1e-3):
                break
            centres = moved
        inertia = float(nearest.sum())
        if best is None or inertia < best[0]:
            best = inertia, centres
    assert best is not None
    return best[1]


def _spread_out(
    rows: Tensor, count: int, generator: torch.Generator, known: Tensor | None
) -> Tensor:
    """Initialise centres by k-means++.

    Each centre is a row, drawn with probability proportional to its squared distance from the
    nearest centre so far. The best of several draws is taken.
    """
    centres = rows.new_zeros(count, rows.shape[1])
    labelled = [] if known is None else [k for k in range(count) if bool((known == k).any())]
    for k in labelled:
        assert known is not None
        centres[k] = rows[known == k].mean(0)
    others = [k for k in range(count) if k not in labelled]
    nearest = (
        _distances(rows, centres[labelled]).amin(1) if labelled else torch.ones_like(rows[:, 0])
    )
    draws = 2 + int(math.log(count))
    for k in others:
        weights = nearest.double().cpu() + torch.finfo(torch.float64).tiny
        chosen = rows[
            torch.multinomial(weights, draws, replacement=True, generator=generator).to(rows.device)
        ]
        found = _distances(rows, chosen)
        found = torch.minimum(found, nearest.unsqueeze(1)) if labelled or k != others[0] else found
        pick = found.sum(0).argmin()
        centres[k], nearest = chosen[pick], found[:, pick]
    return centres


def _distances(rows: Tensor, centres: Tensor) -> Tensor:
    """Return squared distances [rows, centres]."""
    return (
        rows.square().sum(1, keepdim=True) - 2 * rows @ centres.mT + centres.square().sum(1)
    ).clamp_min(0.0)
