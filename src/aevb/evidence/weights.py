"""Running statistics of importance weights: mean, standard error, effective sample size, tail."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_TAIL = 5  # fewest weights for a Pareto fit
ENOUGH = 21  # number of weights whose largest fifth is long enough for a fit
FEW = 0.2  # share of the samples; with a larger effective sample size no few weights dominate
FLAT = 0.01  # nats; a flatter tail counts as no tail


class Weights:
    """Running statistics of the weights w of some rows, added as log-weights [k, N] in chunks.

    Means and summed squared deviations are stored relative to the largest weight so far and merged
    by the formulas of Chan, Golub and LeVeque, which avoid overflow and cancellation. Only the
    ⌈min(K/5, 3√K)⌉ + 1 largest weights per row are stored, in ``tail``.
    """

    def __init__(self, rows: int, samples: int, device: torch.device, *, tail: bool = True) -> None:
        zeros = torch.zeros(rows, dtype=torch.float64, device=device)
        self.count, self.mean, self.deviations = 0, zeros, zeros
        self.shift = torch.full_like(zeros, -math.inf)
        self.kept = tail_length(samples) + 1 if tail else 0
        self.tail = zeros.new_empty(0, rows)

    def add(self, log_weights: Tensor) -> None:
        new = log_weights.double()
        shift = torch.maximum(self.shift, new.amax(0))
        safe = torch.where(shift.isneginf(), torch.zeros_like(shift), shift)
        before = (self.shift - safe).exp()
        mean, deviations = self.mean * before, self.deviations * before.square()
        weights = (new - safe).exp()
        here, k = weights.mean(0), len(new)
        total = self.count + k
        step = here - mean
        self.mean = mean + step * (k / total)
        self.deviations = (
            deviations + (weights - here).square().sum(0) + step.square() * (self.count * k / total)
        )
        self.count, self.shift = total, shift
        if self.kept:
            both = torch.cat([self.tail, new])
            self.tail = both.topk(min(self.kept, len(both)), dim=0).values

    @property
    def value(self) -> Tensor:
        """log 1/K Σ w."""
        return torch.where(self.shift.isneginf(), self.shift, self.shift + self.mean.log())

    @property
    def stderr(self) -> Tensor:
        """Standard error of log 1/K Σ w by the delta method: sd(w) / (w̄ √K)."""
        return (self.deviations / (self.count - 1) / self.count).sqrt() / self.mean

    @property
    def ess(self) -> Tensor:
        """Effective sample size, (Σ w)² / Σ w²."""
        squares = self.deviations + self.count * self.mean.square()
        return (self.count * self.mean).square() / squares

    @property
    def khat(self) -> Tensor:
        """Shape k of the Pareto tail; NaN if there are too few weights.

        Moments of order 1/k and above do not exist.
        """
        return tail_shape(self.tail, self.count)


def tail_length(samples: int) -> int:
    """Return how many of the largest weights form the tail (Vehtari et al. 2024)."""
    return math.ceil(min(0.2 * samples, 3 * math.sqrt(samples)))


def tail_shape(tail: Tensor, samples: int) -> Tensor:
    """Return the Pareto shape per row, [N], of K weights.

    ``tail`` holds the ⌈min(K/5, 3√K)⌉ + 1 largest log-weights, [·, N], in descending order.
    """
    length = tail_length(samples)
    if length < LEAST_TAIL:
        return torch.full_like(tail[0], math.nan)
    cutoff = tail[length]
    exceedances = (tail[:length].flip(0) - tail[0]).exp() - (cutoff - tail[0]).exp()
    flat = tail[0] - cutoff < FLAT
    return torch.where(
        flat,
        torch.zeros_like(cutoff),
        pareto_shape(torch.where(flat, torch.ones_like(exceedances), exceedances)),
    )


def reliable_shape(samples: int) -> float:
    """Return the k above which the mean of the weights is unreliable: min(1 − 1/log₁₀ K, 0.7).

    See Vehtari et al. (2024).
    """
    return min(1 - 1 / math.log10(max(samples, 11)), 0.7)


def suspect(khat: Tensor, ess: Tensor, samples: int) -> Tensor:
    """Return the mask of the rows whose estimate a few weights may carry.

    Both must say so: Pareto's k is too high, and the effective sample size is below a fifth of the
    samples. The k of weights that are nearly equal means nothing.
    """
    return (khat > reliable_shape(samples)) & (ess < FEW * samples)


def pareto_shape(x: Tensor) -> Tensor:
    """Fit the shape of a generalised Pareto distribution, [N], to exceedances [n, N].

    The exceedances are in ascending order. The estimate is the posterior mean of b = −k/σ over a
    grid (Zhang and Stephens 2009), with the prior of Vehtari et al. on k: ten observations of ½.
    """
    n, grid = len(x), 30 + math.isqrt(len(x))
    tiny = torch.finfo(x.dtype).tiny
    x = x.clamp_min(tiny)
    quartile, largest = x[math.floor(n / 4 + 0.5) - 1], x[-1]
    i = torch.arange(1, grid + 1, dtype=x.dtype, device=x.device).unsqueeze(-1)
    b = 1 / largest + (1 - (grid / (i - 0.5)).sqrt()) / (3 * quartile)  # [grid, N]

    def shape(b: Tensor) -> Tensor:
        return torch.log1p(-b * x).mean(0)

    # Work row by row, to avoid a tensor of grid × n × N numbers.
    k = torch.stack([shape(row) for row in b])
    likelihood = n * ((-b / k).log() - k - 1)
    found = shape((likelihood.softmax(0) * b).sum(0))
    found = (n * found + 10 * 0.5) / (n + 10)
    # The fit overflows if the weights differ too much.
    return torch.where(found.isnan(), torch.full_like(found, math.inf), found)
