"""Square-root information filter: Gaussian unknowns stored by a square root of the covariance.

The stacked variables are v = m + A ε with ε ~ N(0, I). Data x = H v + b + N(0, R), whitened by the
root of R, are T ε + N(0, I) with T = R^{−½} H A. The QR decomposition [T; I] = Q U gives U⁻¹, the
root of the posterior covariance of ε. No covariance is ever subtracted. All singular values of [T;
I] are at least 1, so rounding costs about 2·10⁻¹⁶ · max |T| of a standard deviation. A warning is
issued when that is too much.

The smoother (:mod:`aevb.evidence.smoothing`) differentiates by weights on the unknowns. These
derivatives are also stored in the coordinates of ε: a ``shift`` of the mean and a ``change`` of the
covariance, both zero in value. An update maps them by U⁻¹.

The code branches on tensor values (for example, whether a covariance is diagonal). Training must
not do this and uses :class:`aevb.evidence.gaussian_belief.Belief` instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from aevb.evidence.gaussian_belief import Column, Rule, apply, cat_broadcast, matrix_of, selected

LEAST = 1e-300  # smallest noise variance; a smaller one counts as zero in float64
INACCURATE = 1e-3  # rounding error, as a share of a standard deviation, above which to warn


@dataclass(frozen=True)
class RootBelief:
    """N(mean, root rootᵀ) of the stacked variables given the data so far.

    The mean is [.., T, N, D], the root [.., T, N, D, r].
    """

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
        """Append a variable that follows the rule."""
        matrix, own, size = (
            matrix_of(self.columns, rule, self.mean),
            root_of(rule.noise),
            self.mean.shape[-1],
        )
        mean, rows, more = apply(matrix, self.mean) + rule.offset, matrix @ self.root, 0
        above = self.root
        if bool((own != 0).any()):  # a deterministic function of other variables adds no noise
            more = own.shape[-1]
            above, rows = pad(above, (0, more)), cat_broadcast(rows, own, -1)
        return RootBelief(
            {**self.columns, column: slice(size, size + rule.offset.shape[-1])},
            cat_broadcast(self.mean, mean, -1),
            cat_broadcast(above, rows, -2),
            None if self.shift is None else pad(self.shift, (0, more)),
            None if self.change is None else pad(self.change, (0, more, 0, more)),
        )

    def conditioned(
        self, rule: Rule, value: Tensor, keep: Tensor | None
    ) -> tuple[RootBelief, Tensor]:
        """Condition on an observed variable; also return its log-density, [.., T, N].

        Entries with ``keep`` false are marginalised out. The derivative by ``change`` is only right
        if the data equal their means.
        """
        matrix, noise = matrix_of(self.columns, rule, self.mean), rule.noise
        residual = value - apply(matrix, self.mean) - rule.offset
        count: Tensor | float = value.shape[-1]
        if keep is not None:  # a missing entry gets unit noise, a zero matrix and a zero residual
            there = keep.to(value.dtype)
            matrix, residual, value, count = (
                matrix * there.unsqueeze(-1),
                residual * there,
                value * there,
                there.sum(-1),
            )
            noise = noise * there.unsqueeze(-1) * there.unsqueeze(-2) + torch.diag_embed(1 - there)
        own = root_of(
            noise + torch.diag_embed((LEAST - noise.diagonal(dim1=-2, dim2=-1)).clamp_min(0.0))
        )
        if is_diagonal(own):
            scale = own.diagonal(dim1=-2, dim2=-1)
            white, residual, value, log_det = (
                matrix / scale.unsqueeze(-1),
                residual / scale,
                value / scale,
                scale.log().sum(-1),
            )
        else:
            inverse = torch.linalg.inv(own)
            white, residual, value, log_det = (
                inverse @ matrix,
                apply(inverse, residual),
                apply(inverse, value),
                torch.linalg.slogdet(own)[1],
            )
        _warn_if_inaccurate(apply(white.abs(), self.root.square().sum(-1).sqrt()), value)
        seen = white @ self.root
        # The most precise data come first. In this order, QR keeps the digits of each row.
        order = seen.square().sum(-1).argsort(-1, descending=True)
        seen = seen.gather(-2, order.unsqueeze(-1).expand(seen.shape))
        order, residual = torch.broadcast_tensors(order, residual)
        residual = residual.gather(-1, order)
        eye = torch.eye(seen.shape[-1], dtype=seen.dtype, device=seen.device)
        orthogonal, triangle = torch.linalg.qr(cat_broadcast(seen, eye[None, None], -2))
        inverse = torch.linalg.solve_triangular(triangle, eye.expand(triangle.shape), upper=True)
        above = orthogonal[..., : seen.shape[-2], :]
        within = apply(above.mT, residual)
        # E[ε | x], and the residual that remains
        found, rest = apply(inverse, within), residual - apply(above, within)
        log_det = log_det + triangle.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        log_density = (
            -0.5 * (rest.square().sum(-1) + found.square().sum(-1) + count * math.log(2 * math.pi))
            - log_det
        )
        after = RootBelief(self.columns, self.mean + apply(self.root, found), self.root @ inverse)
        if self.shift is not None:
            log_density = log_density + (self.shift * found).sum(-1)
            after = replace(after, shift=apply(inverse.mT, self.shift))
        if self.change is not None:
            log_density = log_density - 0.5 * (self.change * (eye - inverse @ inverse.mT)).sum(
                (-1, -2)
            )
            after = replace(after, change=inverse.mT @ self.change @ inverse)
        return after, log_density

    def visited(
        self, column: Column | None, rule: Rule, value: Tensor | None, keep: Tensor | None
    ) -> tuple[RootBelief, Tensor]:
        """Process a variable: condition on its known entries, then append it if it has a column.

        Returns the new belief and the log-density of the known entries.
        """
        belief, log_density = self, self.mean.new_zeros(1, 1)
        if value is not None:
            belief, log_density = self.conditioned(rule, value, keep)
            rule = (
                rule
                if column is None
                else completed(rule, value, torch.ones_like(value) if keep is None else keep)
            )
        return belief if column is None else belief.extended(column, rule), log_density

    def weighted_mean(self, place: slice, weight: Tensor) -> tuple[RootBelief, Tensor]:
        """Multiply the density by exp(weight · v) for some variables v, to first order.

        Returns the new belief and the log of the integral.
        """
        shift = apply(self.root[..., place, :].mT, weight)
        return replace(self, shift=shift if self.shift is None else self.shift + shift), (
            weight * self.mean[..., place]
        ).sum(-1)

    def weighted_covariance(self, place: slice, weight: Tensor) -> tuple[RootBelief, Tensor]:
        """Multiply the density by exp(−½ vᵀ weight v) for zero-mean variables v, to first order.

        Returns the new belief and the log of the integral.
        """
        rows = self.root[..., place, :]
        less = -rows.mT @ weight @ rows
        return replace(self, change=less if self.change is None else self.change + less), -0.5 * (
            weight * (rows @ rows.mT)
        ).sum((-1, -2))

    def kept(self, columns: Mapping[Column, Column]) -> RootBelief:
        """Marginalise to some of the variables and rename them."""
        renamed, places = selected(self.columns, columns)
        mean, root = (
            torch.cat([self.mean[..., place] for place in places], -1),
            torch.cat([self.root[..., place, :] for place in places], -2),
        )
        belief = RootBelief(renamed, mean, root, self.shift, self.change)
        return belief if root.shape[-1] <= root.shape[-2] else belief._narrowed()

    def _narrowed(self) -> RootBelief:
        """Return the same Gaussian with a square, lower triangular root."""
        orthogonal, triangle = torch.linalg.qr(self.root.mT)
        shift = None if self.shift is None else apply(orthogonal.mT, self.shift)
        change = None if self.change is None else orthogonal.mT @ self.change @ orthogonal
        return RootBelief(self.columns, self.mean, triangle.mT, shift, change)

    def tril(self) -> Tensor:
        """Return the Cholesky factor of the covariance, [.., T, N, D, D]."""
        root = (
            self._narrowed().root
            if self.root.shape[-1] >= self.root.shape[-2]
            else pad(self.root, (0, self.root.shape[-2] - self.root.shape[-1]))
        )
        return root * torch.where(root.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)


def completed(rule: Rule, value: Tensor, keep: Tensor) -> Rule:
    """Condition a variable's rule on its own known entries.

    Known entries become constants. The rule of the missing entries is conditioned on the known
    ones.
    """
    there = keep.to(value.dtype)
    both = there.unsqueeze(-1) * there.unsqueeze(-2)
    missing = torch.diag_embed(1 - there)
    # With correlated noise, known entries carry information about missing ones.
    if not is_diagonal(rule.noise):
        cross = rule.noise * (1 - there).unsqueeze(-1) * there.unsqueeze(-2)
        missing = missing - torch.linalg.solve(rule.noise * both + missing, cross.mT).mT
    matrices = {column: missing @ matrix for column, matrix in rule.matrices.items()}
    return Rule(
        matrices,
        value * there + apply(missing, rule.offset - value * there),
        missing @ rule.noise @ missing.mT,
    )


def root_of(covariance: Tensor) -> Tensor:
    """Return L with L Lᵀ = covariance, which may be singular; lower triangular if it is not."""
    if is_diagonal(covariance):
        return torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1).sqrt())
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not bool(failed.any()):
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    return torch.where(
        failed[..., None, None] > 0, vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2), factor
    )


def is_diagonal(matrix: Tensor) -> bool:
    return not bool((matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))).any())


def _warn_if_inaccurate(*lengths: Tensor) -> None:
    """Warn if standard deviations or values, in units of the noise, exceed float64's precision."""
    longest = max(
        (float(part.detach().abs().max()) for part in lengths if part.numel()), default=0.0
    )
    share = longest * torch.finfo(torch.float64).eps
    if INACCURATE < share < math.inf:
        warnings.warn(
            f"Exact inference loses digits: the noise of an observed variable is "
            f"{1 / longest:.0e} of its spread or of its values, too little for float64. Posterior "
            f"means may be off by {share:.0e} of their standard deviations, the log evidence by "
            f"as many nats. Declare or learn "
            "a larger scale.",
            stacklevel=2,
        )
