"""Running statistics of importance weights, kept without the weights: their mean, its error, their effective number, their tail."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_TAIL = 5  # weights; a Pareto fit to fewer says nothing
ENOUGH = 21  # weights of which a fifth is such a tail
FLAT = 0.01  # nats: a tail that rises by less is no tail


class Weights:
    """The weights w of some rows, added as log-weights [k, N] a piece at a time.

    In units of the largest weight so far, mean and summed squared deviations are merged as Chan, Golub and LeVeque do, so that neither
    overflow nor cancellation hurts. Of the weights themselves only the ⌈min(K/5, 3√K)⌉ + 1 largest of a row are kept, in ``tail``.
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
        self.deviations = deviations + (weights - here).square().sum(0) + step.square() * (self.count * k / total)
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
        """The standard error of log 1/K Σ w by the delta method: sd(w) / (w̄ √K)."""
        return (self.deviations / (self.count - 1) / self.count).sqrt() / self.mean

    @property
    def ess(self) -> Tensor:
        """The effective number of weights, (Σ w)² / Σ w²."""
        squares = self.deviations + self.count * self.mean.square()
        return (self.count * self.mean).square() / squares

    @property
    def khat(self) -> Tensor:
        """The shape k of a Pareto tail: moments of order 1/k and above do not exist. NaN where the weights are too few to say."""
        return tail_shape(self.tail, self.count)


def tail_length(samples: int) -> int:
    """How many of the largest weights are taken for the tail (Vehtari et al. 2024)."""
    return math.ceil(min(0.2 * samples, 3 * math.sqrt(samples)))


def tail_shape(tail: Tensor, samples: int) -> Tensor:
    """The Pareto shape of weights, [N], from the ⌈min(K/5, 3√K)⌉ + 1 largest of K log-weights, [·, N], the largest first."""
    length = tail_length(samples)
    if length < LEAST_TAIL:
        return torch.full_like(tail[0], math.nan)
    cutoff = tail[length]
    exceedances = (tail[:length].flip(0) - tail[0]).exp() - (cutoff - tail[0]).exp()
    flat = tail[0] - cutoff < FLAT
    return torch.where(flat, torch.zeros_like(cutoff), pareto_shape(torch.where(flat, torch.ones_like(exceedances), exceedances)))


def reliable_shape(samples: int) -> float:
    """The k above which this many weights do not give a reliable mean (Vehtari et al. 2024): min(1 − 1/log₁₀ K, 0.7)."""
    return min(1 - 1 / math.log10(max(samples, 11)), 0.7)


def pareto_shape(x: Tensor) -> Tensor:
    """The shape of a generalised Pareto distribution, [N], from sorted exceedances [n, N]: the largest last.

    Zhang and Stephens' (2009) posterior mean of b = −k/σ over a grid, with the prior of Vehtari et al. on k: ten observations of ½.
    """
    n, grid = len(x), 30 + math.isqrt(len(x))
    tiny = torch.finfo(x.dtype).tiny
    x = x.clamp_min(tiny)
    quartile, largest = x[math.floor(n / 4 + 0.5) - 1], x[-1]
    i = torch.arange(1, grid + 1, dtype=x.dtype, device=x.device).unsqueeze(-1)
    b = 1 / largest + (1 - (grid / (i - 0.5)).sqrt()) / (3 * quartile)  # [grid, N]

    def shape(b: Tensor) -> Tensor:
        return torch.log1p(-b * x).mean(0)

    k = torch.stack([shape(row) for row in b])  # a row at a time: never grid × n × N numbers
    likelihood = n * ((-b / k).log() - k - 1)
    found = shape((likelihood.softmax(0) * b).sum(0))
    found = (n * found + 10 * 0.5) / (n + 10)
    return torch.where(found.isnan(), torch.full_like(found, math.inf), found)  # so far apart that they leave the range of numbers
