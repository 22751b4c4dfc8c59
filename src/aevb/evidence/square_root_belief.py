"""Gaussian unknowns held by a square root of their covariance, so that nothing is subtracted from a covariance.

The stack of variables is v = m + A ε with ε ~ N(0, I). Data x = H v + b + N(0, R), whitened by the root of R, are T ε + N(0, I) with
T = R^{−½} H A. With the orthogonal Q and the triangular U of [T; I] = Q U, the posterior of ε has the root U⁻¹ (the square-root information
filter). All singular values of [T; I] are at least 1. So rounding costs about 2·10⁻¹⁶ · max |T| of a standard deviation, and a warning says
when that is too much.

A derivative by a weight on an unknown (:mod:`aevb.evidence.smoothing`) is carried in the coordinates of ε, too: a ``shift`` of its mean and a
``change`` of its covariance, whose values are zeros. An update maps them by U⁻¹.

Values decide which operations are taken. Training must not look at values and takes :class:`aevb.evidence.gaussian_belief.Belief`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from aevb.evidence.gaussian_belief import Column, Rule, apply, beside, matrix_of, selected

LEAST = 1e-300  # the least variance of noise: less than this is zero in float64
INACCURATE = 1e-3  # the share of a standard deviation that rounding may cost without a warning


@dataclass(frozen=True)
class RootBelief:
    """N(mean, root rootᵀ) of a stack of variables, given what was observed so far: [.., T, N, D] and [.., T, N, D, r]."""

    columns: Mapping[Column, slice]
    mean: Tensor
    root: Tensor
    shift: Tensor | None = None  # [.., T, N, r], zeros to differentiate by
    change: Tensor | None = None  # [.., T, N, r, r], zeros to differentiate by

    @classmethod
    def empty(cls, like: Tensor) -> RootBelief:
        return cls({}, like.new_zeros(1, 1, 0), like.new_zeros(1, 1, 0, 0))

    @property
    def covariance(self) -> Tensor:
        return self.root @ self.root.mT

    def extended(self, column: Column, rule: Rule) -> RootBelief:
        """The stack with one more variable, which follows the rule."""
        matrix, own, size = matrix_of(self.columns, rule, self.mean), root_of(rule.noise), self.mean.shape[-1]
        mean, rows, more = apply(matrix, self.mean) + rule.offset, matrix @ self.root, 0
        above = self.root
        if bool((own != 0).any()):  # functions of the others have no noise of their own
            more = own.shape[-1]
            above, rows = pad(above, (0, more)), beside(rows, own, -1)
        return RootBelief(
            {**self.columns, column: slice(size, size + rule.offset.shape[-1])},
            beside(self.mean, mean, -1),
            beside(above, rows, -2),
            None if self.shift is None else pad(self.shift, (0, more)),
            None if self.change is None else pad(self.change, (0, more, 0, more)),
        )

    def conditioned(self, rule: Rule, value: Tensor, keep: Tensor | None) -> tuple[RootBelief, Tensor]:
        """The belief once a variable that follows the rule was seen, and the log-density it had, [.., T, N].

        Entries that are not to be kept are integrated over. The derivative by ``change`` is taken for data at their means.
        """
        matrix, noise = matrix_of(self.columns, rule, self.mean), rule.noise
        residual = value - apply(matrix, self.mean) - rule.offset
        count: Tensor | float = value.shape[-1]
        if keep is not None:  # what is missing gets unit noise, no matrix and no residual
            there = keep.to(value.dtype)
            matrix, residual, value, count = matrix * there.unsqueeze(-1), residual * there, value * there, there.sum(-1)
            noise = noise * there.unsqueeze(-1) * there.unsqueeze(-2) + torch.diag_embed(1 - there)
        own = root_of(noise + torch.diag_embed((LEAST - noise.diagonal(dim1=-2, dim2=-1)).clamp_min(0.0)))
        if _is_diagonal(own):
            scale = own.diagonal(dim1=-2, dim2=-1)
            white, residual, value, log_det = matrix / scale.unsqueeze(-1), residual / scale, value / scale, scale.log().sum(-1)
        else:
            inverse = torch.linalg.inv(own)
            white, residual, value, log_det = inverse @ matrix, apply(inverse, residual), apply(inverse, value), torch.linalg.slogdet(own)[1]
        _tell(apply(white.abs(), self.root.square().sum(-1).sqrt()), value)
        seen = white @ self.root
        order = seen.square().sum(-1).argsort(-1, descending=True)  # the rows of the most precise data first: in this order each row keeps its digits
        seen = seen.gather(-2, order.unsqueeze(-1).expand(seen.shape))
        order, residual = torch.broadcast_tensors(order, residual)
        residual = residual.gather(-1, order)
        eye = torch.eye(seen.shape[-1], dtype=seen.dtype, device=seen.device)
        orthogonal, triangle = torch.linalg.qr(beside(seen, eye[None, None], -2))
        inverse = torch.linalg.solve_triangular(triangle, eye.expand(triangle.shape), upper=True)
        above = orthogonal[..., : seen.shape[-2], :]
        within = apply(above.mT, residual)
        found, rest = apply(inverse, within), residual - apply(above, within)  # E[ε | x], and what is then left of the residual
        log_det = log_det + triangle.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        log_density = -0.5 * (rest.square().sum(-1) + found.square().sum(-1) + count * math.log(2 * math.pi)) - log_det
        after = RootBelief(self.columns, self.mean + apply(self.root, found), self.root @ inverse)
        if self.shift is not None:
            log_density = log_density + (self.shift * found).sum(-1)
            after = replace(after, shift=apply(inverse.mT, self.shift))
        if self.change is not None:
            log_density = log_density - 0.5 * (self.change * (eye - inverse @ inverse.mT)).sum((-1, -2))
            after = replace(after, change=inverse.mT @ self.change @ inverse)
        return after, log_density

    def visited(self, column: Column | None, rule: Rule, value: Tensor | None, keep: Tensor | None) -> tuple[RootBelief, Tensor]:
        """The belief once a variable was taken up: conditioned on its known entries, and extended by it if it has a column; and their log-density."""
        belief, log_density = self, self.mean.new_zeros(1, 1)
        if value is not None:
            belief, log_density = self.conditioned(rule, value, keep)
            rule = rule if column is None else completed(rule, value, torch.ones_like(value) if keep is None else keep)
        return belief if column is None else belief.extended(column, rule), log_density

    def weighted_mean(self, place: slice, weight: Tensor) -> tuple[RootBelief, Tensor]:
        """The belief times exp(weight · v) of some of the variables, and the log of its integral, to first order in the weight."""
        shift = apply(self.root[..., place, :].mT, weight)
        return replace(self, shift=shift if self.shift is None else self.shift + shift), (weight * self.mean[..., place]).sum(-1)

    def weighted_covariance(self, place: slice, weight: Tensor) -> tuple[RootBelief, Tensor]:
        """The belief times exp(−½ vᵀ weight v) of some of the variables, whose means are zero, and the log of its integral, to first order."""
        rows = self.root[..., place, :]
        less = -rows.mT @ weight @ rows
        return replace(self, change=less if self.change is None else self.change + less), -0.5 * (weight * (rows @ rows.mT)).sum((-1, -2))

    def kept(self, columns: Mapping[Column, Column]) -> RootBelief:
        """Some of the variables, under new names; the others are integrated over."""
        renamed, places = selected(self.columns, columns)
        mean, root = torch.cat([self.mean[..., place] for place in places], -1), torch.cat([self.root[..., place, :] for place in places], -2)
        belief = RootBelief(renamed, mean, root, self.shift, self.change)
        return belief if root.shape[-1] <= root.shape[-2] else belief._narrowed()

    def _narrowed(self) -> RootBelief:
        """The same with as many ε as variables, and a lower triangular root."""
        orthogonal, triangle = torch.linalg.qr(self.root.mT)
        shift = None if self.shift is None else apply(orthogonal.mT, self.shift)
        change = None if self.change is None else orthogonal.mT @ self.change @ orthogonal
        return RootBelief(self.columns, self.mean, triangle.mT, shift, change)

    def tril(self) -> Tensor:
        """The lower triangular root with a positive diagonal, [.., T, N, D, D]."""
        root = self._narrowed().root if self.root.shape[-1] >= self.root.shape[-2] else pad(self.root, (0, self.root.shape[-2] - self.root.shape[-1]))
        return root * torch.where(root.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)


def completed(rule: Rule, value: Tensor, keep: Tensor) -> Rule:
    """The rule of a variable some of whose entries are known: those are their values, and the others follow the rule given those."""
    there = keep.to(value.dtype)
    both = there.unsqueeze(-1) * there.unsqueeze(-2)
    missing = torch.diag_embed(1 - there)
    if not _is_diagonal(rule.noise):  # the noise of known entries says something about that of the others
        cross = rule.noise * (1 - there).unsqueeze(-1) * there.unsqueeze(-2)
        missing = missing - torch.linalg.solve(rule.noise * both + missing, cross.mT).mT
    matrices = {column: missing @ matrix for column, matrix in rule.matrices.items()}
    return Rule(matrices, value * there + apply(missing, rule.offset - value * there), missing @ rule.noise @ missing.mT)


def root_of(covariance: Tensor) -> Tensor:
    """A matrix L with L Lᵀ the covariance, which may be singular; lower triangular where it is not."""
    if _is_diagonal(covariance):
        return torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1).sqrt())
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not bool(failed.any()):
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    return torch.where(failed[..., None, None] > 0, vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2), factor)


def _is_diagonal(matrix: Tensor) -> bool:
    return not bool((matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))).any())


def _tell(*lengths: Tensor) -> None:
    """Warn if standard deviations or values that are this many times the noise are too long for float64."""
    longest = max((float(part.detach().abs().max()) for part in lengths if part.numel()), default=0.0)
    share = longest * torch.finfo(torch.float64).eps
    if INACCURATE < share < math.inf:
        warnings.warn(
            f"Exact inference loses digits: the noise of an observed variable is {1 / longest:.0e} of its spread or of its values, too little for "
            f"float64. Posterior means may be off by {share:.0e} of their standard deviations, the log evidence by as many nats. Declare or learn "
            "a larger scale.",
            stacklevel=2,
        )
