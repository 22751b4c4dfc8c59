"""The most likely dispersion of negative binomials whose means are known."""

from __future__ import annotations

import torch
from torch import Tensor

from aevb.declare.conditionals import Occurrences

LOWEST, HIGHEST = -12, 14  # of log r
ENOUGH, MOST_STEPS = 1e-10, 60  # accuracy of log r, and steps that reach it in any case


def most_likely_dispersion(
    count: Tensor, total: Tensor, mean: Tensor, occurrences: Occurrences
) -> Tensor:
    """The dispersion r of each column, [d], that all clusters share.

    In a cluster, ``count`` rows know a column, their values sum to ``total``, and ``mean`` is the
    mean of the negative binomial; each is [clusters, d]. The terms of log p that depend on r are

        Σ_v times(v) (log Γ(v + r) − log Γ(r)) + Σ_clusters (count r log r − (count r + total)
        log(r + mean)),

    because every row has the same r in all clusters, so that its responsibilities sum to 1.

    The sum may have several maxima. The best point of a grid is therefore the start of Newton's
    method in log r, which bisection keeps between the neighbours of that point.
    """
    column, value, times = occurrences
    steps = HIGHEST - LOWEST + 1
    grid = torch.linspace(LOWEST, HIGHEST, steps, dtype=mean.dtype, device=mean.device)

    def by_column(terms: Tensor) -> Tensor:
        return terms.new_zeros(*terms.shape[:-1], mean.shape[1]).index_add_(-1, column, terms)

    def objective(log_r: Tensor) -> Tensor:
        r = log_r.exp()
        of_values = by_column(
            times * (torch.lgamma(value + r[:, column]) - torch.lgamma(r)[:, column])
        )
        r = r.unsqueeze(1)
        return of_values - (count * r * (mean / r).log1p() + total * (r + mean).log()).sum(1)

    def slopes(log_r: Tensor) -> tuple[Tensor, Tensor]:
        """The first and second derivative by log r."""
        r, here = log_r.exp(), log_r.exp()[column]
        excess = (count * mean - total) / (r + mean)
        first = by_column(times * (torch.digamma(value + here) - torch.digamma(here))) + (
            excess - count * (mean / r).log1p()
        ).sum(0)
        second = by_column(
            times * (torch.polygamma(1, value + here) - torch.polygamma(1, here))
        ) + ((count * mean / r - excess) / (r + mean)).sum(0)
        return r * first, r * first + r.square() * second

    best = grid[objective(grid.unsqueeze(1).expand(-1, mean.shape[1])).argmax(0)]
    low, high = (best - 1).clamp_min(LOWEST), (best + 1).clamp_max(HIGHEST)
    for _ in range(MOST_STEPS):
        first, second = slopes(best)
        low, high = torch.where(first > 0, best, low), torch.where(first < 0, best, high)
        newton = best - first / second
        inside = (second < 0) & (newton >= low) & (newton <= high)
        before, best = best, torch.where(inside, newton, (low + high) / 2)
        if bool(((best - before).abs() < ENOUGH).all()):
            break
    return best.exp()
