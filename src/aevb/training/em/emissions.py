"""Emissions of a mixture: log-likelihood per cluster, and weighted moments, as matrix products."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from aevb.declare import distributions as ad
from aevb.declare.conditionals import Conditional

AT_ONCE = 2**17  # largest number of elements at a time for full covariances


class Sums(NamedTuple):
    """Responsibility-weighted sums over rows, per cluster.

    Sums of 1, of the values, and of their squares or products.
    """

    number: Tensor
    first: Tensor
    second: Tensor

    def plus(self, other: Sums | None) -> Sums:
        return self if other is None else Sums(*(a + b for a, b in zip(self, other, strict=True)))


def sums(weight: Tensor, value: Tensor, keep: Tensor | None, *, full: bool) -> Sums:
    """Sum values ([rows, d]) with weights ([clusters, rows]).

    ``keep`` is 1 at known entries; None if all are known.
    """
    if full:
        second = torch.stack([(one.unsqueeze(1) * value).mT @ value for one in weight])
        return Sums(weight.sum(1, keepdim=True).expand(-1, value.shape[1]), weight @ value, second)
    value = value if keep is None else keep * value
    count = (
        weight.sum(1, keepdim=True).expand(-1, value.shape[1]) if keep is None else weight @ keep
    )
    return Sums(count, weight @ value, weight @ value.square())


class ColumnsEmission:
    """Variable with independent entries, whose log-likelihood is a polynomial in them.

    A row is stored as (v, v², 1 if v is known), with zeros where v is missing. One matrix product
    gives the log-likelihood, another the moments.
    """

    def __init__(self, spec: Conditional, heads: dict[str, Tensor]) -> None:
        found = spec.polynomial(**heads)
        assert found is not None
        self.constant, *self.coefficients = found

    @staticmethod
    def prepare(value: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
        value = value if keep is None else torch.where(keep, value, 0.0)
        columns = (
            [value, value.square()]
            if keep is None
            else [value, value.square(), keep.to(value.dtype)]
        )
        return (torch.cat(columns, 1),)

    def log_likelihood(self, rows: Tensor) -> Tensor:
        """Return the log-likelihood, [rows, clusters]."""
        weights = torch.cat(
            [*self.coefficients, *([self.constant] if self._holed(rows) else [])], 1
        )
        return (
            rows @ weights.mT
            if self._holed(rows)
            else torch.addmm(self.constant.sum(1), rows, weights.mT)
        )

    def _holed(self, rows: Tensor) -> bool:
        return rows.shape[1] == 3 * self.constant.shape[1]

    def sums(self, weights: Tensor, rows: Tensor) -> Sums:
        first, second, *count = (weights.mT @ rows).split(self.constant.shape[1], 1)
        return Sums(
            count[0] if count else weights.sum(0).unsqueeze(1).expand_as(first), first, second
        )


class FullEmission:
    """Gaussian with a full covariance per cluster, or one covariance for all clusters."""

    def __init__(self, loc: Tensor, tril: Tensor) -> None:
        clusters, d = loc.shape
        self.loc, self.root = loc, ad.tril_from_vector(tril, d).expand(clusters, d, d)
        eye = torch.eye(d, dtype=loc.dtype, device=loc.device).expand(clusters, d, d)
        self.inverse = torch.linalg.solve_triangular(self.root, eye, upper=False)
        self.constant = -self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * d * math.log(
            2 * math.pi
        )
        self.whitening = self.inverse.flatten(0, 1).mT.contiguous()  # [d, clusters · d]
        self.shift = -(self.inverse @ loc.unsqueeze(-1)).reshape(-1)

    @staticmethod
    def prepare(value: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
        return (value,)

    def log_likelihood(self, rows: Tensor) -> Tensor:
        clusters, d = self.loc.shape
        parts = []
        for part in rows.split(max(64, AT_ONCE // (clusters * d))):
            parts.append(
                torch.addmm(self.shift, part, self.whitening)
                .unflatten(1, (clusters, d))
                .square_()
                .sum(-1)
            )
        return self.constant - 0.5 * torch.cat(parts)

    def sums(self, weights: Tensor, rows: Tensor) -> Sums:
        clusters, d = self.loc.shape
        size, second = max(64, AT_ONCE // (clusters * d)), rows.new_zeros(d, clusters * d)
        for weight, part in zip(weights.split(size), rows.split(size), strict=True):
            second.addmm_(part.mT, (weight.unsqueeze(2) * part.unsqueeze(1)).flatten(1))
        first = weights.mT @ rows
        return Sums(
            weights.sum(0).unsqueeze(1).expand_as(first),
            first,
            second.unflatten(1, (clusters, d)).transpose(0, 1),
        )


class IncompleteFullEmission(FullEmission):
    """Gaussian with a full covariance and missing entries.

    Missing entries are latent: in every cluster, they are Gaussian given the row's known entries.
    """

    @staticmethod
    def prepare(value: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
        assert keep is not None
        patterns, which = keep.unique(dim=0, return_inverse=True)
        return torch.where(keep, value, 0.0), keep.to(value.dtype), patterns.to(value.dtype), which

    # A cache: rows, and their results.
    last: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None = None

    def _filled(self, *rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-likelihoods, rows with missing entries imputed, and their covariances.

        The log-likelihood is [rows, clusters]. Missing entries are replaced by their conditional
        means, [clusters, rows, d]. Covariances are given per pattern of missing entries.
        """
        if self.last is None or self.last[0] is not rows[0]:
            self.last = rows[0], self._fill(*rows)
        return self.last[1]

    def _fill(
        self, rows: Tensor, keep: Tensor, patterns: Tensor, which: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        precision = self.inverse.mT @ self.inverse
        gone = 1 - patterns.unsqueeze(1)
        # [patterns, clusters, d, d]
        root = torch.linalg.cholesky(
            precision * gone.unsqueeze(-1) * gone.unsqueeze(-2)
            + torch.diag_embed(patterns).unsqueeze(1)
        )
        covariance = torch.cholesky_inverse(root) * gone.unsqueeze(-1) * gone.unsqueeze(-2)
        off = keep * (rows - self.loc.unsqueeze(1))  # [clusters, rows, d]
        pull = (1 - keep) * (off @ precision)
        fill = -(covariance[which] @ pull.transpose(0, 1).unsqueeze(-1)).squeeze(-1).transpose(0, 1)
        off = off + fill
        distance = ((off @ self.inverse.mT).square()).sum(-1).mT
        log_root = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)[which]
        missing = 0.5 * math.log(2 * math.pi) * (1 - keep).sum(1, keepdim=True)
        return (
            self.constant - 0.5 * distance - log_root + missing,
            off + self.loc.unsqueeze(1),
            covariance,
        )

    def log_likelihood(self, *rows: Tensor) -> Tensor:
        return self._filled(*rows)[0]

    def sums(self, weights: Tensor, *rows: Tensor) -> Sums:
        _, filled, covariance = self._filled(*rows)
        patterns = torch.zeros(
            len(covariance), weights.shape[1], dtype=weights.dtype, device=weights.device
        ).index_add_(0, rows[3], weights)
        weighted = weights.mT.unsqueeze(-1) * filled
        second = weighted.mT @ filled + (patterns[:, :, None, None] * covariance).sum(0)
        first = weighted.sum(1)
        return Sums(weights.sum(0).unsqueeze(1).expand_as(first), first, second)
