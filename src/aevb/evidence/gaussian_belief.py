"""Joint Gaussian of a growing list of variables: predict and condition, as in a Kalman filter.

Every tensor has leading axes as in :mod:`aevb.derive.axes` (enumerated latents, samples, steps,
examples). An axis has size 1 if nothing depends on it. All examples therefore share a covariance
unless their missing entries, lengths or noise scales differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Column = tuple[str, int]  # a variable's name and its offset in time


@dataclass(frozen=True)
class Rule:
    """Linear-Gaussian conditional v = Σ A · parent + b + ε, ε ~ N(0, Q).

    For one step or for all: A and Q are [.., T, N, d, ·], b is [.., T, N, d].
    """

    matrices: Mapping[Column, Tensor]
    offset: Tensor
    noise: Tensor

    def where(self, mask: Tensor, other: Rule) -> Rule:
        """Return a rule that equals ``other`` where the mask, [T, N or 1, 1], holds."""
        wide = mask.unsqueeze(-1)
        columns = {**self.matrices, **other.matrices}
        matrices = {}
        for column, either in columns.items():
            zero = torch.zeros_like(either)
            matrices[column] = torch.where(
                wide, other.matrices.get(column, zero), self.matrices.get(column, zero)
            )
        return Rule(
            matrices,
            torch.where(mask, other.offset, self.offset),
            torch.where(wide, other.noise, self.noise),
        )

    def zero(self) -> Rule:
        """Return the rule of a variable that is identically zero."""
        return Rule({}, torch.zeros_like(self.offset), torch.zeros_like(self.noise))

    def detached(self) -> Rule:
        """Return the same rule without gradients."""
        return Rule(
            {column: matrix.detach() for column, matrix in self.matrices.items()},
            self.offset.detach(),
            self.noise.detach(),
        )

    def steps(self, count: int) -> list[Rule]:
        """Split the rule into one rule per step."""
        matrices = {column: _split(matrix, -4, count) for column, matrix in self.matrices.items()}
        offsets, noises = _split(self.offset, -3, count), _split(self.noise, -4, count)
        return [
            Rule({column: parts[t] for column, parts in matrices.items()}, offsets[t], noises[t])
            for t in range(count)
        ]


@dataclass(frozen=True)
class Belief:
    """N(mean, covariance) of the stacked variables given the data so far.

    The mean is [.., T, N, D], the covariance [.., T, N, D, D].
    """

    columns: Mapping[Column, slice]
    mean: Tensor
    covariance: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Belief:
        return cls({}, like.new_zeros(1, 1, 0), like.new_zeros(1, 1, 0, 0))

    def extended(self, column: Column, rule: Rule) -> Belief:
        """Append a variable that follows the rule."""
        matrix = matrix_of(self.columns, rule, self.mean)
        mean = apply(matrix, self.mean) + rule.offset
        cross = matrix @ self.covariance
        own = cross @ matrix.mT + rule.noise
        size = self.mean.shape[-1]
        top = cat_broadcast(self.covariance, cross.mT, -1)
        whole = cat_broadcast(top, cat_broadcast(cross, own, -1), -2)
        return Belief(
            {**self.columns, column: slice(size, size + rule.offset.shape[-1])},
            cat_broadcast(self.mean, mean, -1),
            whole,
        )

    def conditioned(self, rule: Rule, value: Tensor, keep: Tensor | None) -> tuple[Belief, Tensor]:
        """Condition on an observed variable; also return its log-density, [.., T, N].

        Entries with ``keep`` false are marginalised out: they get unit variance, zero covariance
        and zero residual. The new covariance is computed as the sum (I − KA) P (I − KA)ᵀ + K R Kᵀ
        (Joseph form). The sum keeps its digits when data shrink a large covariance to a small one.
        """
        matrix = matrix_of(self.columns, rule, self.mean)
        residual = value - apply(matrix, self.mean) - rule.offset
        cross = matrix @ self.covariance
        own = cross @ matrix.mT + rule.noise
        count: Tensor | float = value.shape[-1]
        if keep is not None:
            there = keep.to(value.dtype)
            residual, cross, count = residual * there, cross * there.unsqueeze(-1), there.sum(-1)
            own = own * there.unsqueeze(-1) * there.unsqueeze(-2) + torch.diag_embed(1 - there)
        factor, failed = torch.linalg.cholesky_ex(own)
        # A failed factorisation leaves a partial factor, which must not look valid.
        factor = torch.where(failed[..., None, None] > 0, math.nan, factor)
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, eye.expand(factor.shape), upper=False)
        white, gain = apply(inverse, residual), inverse @ cross
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_density = -0.5 * (white.square().sum(-1) + count * math.log(2 * math.pi)) - log_det
        shift = apply(gain.mT, white)
        total = gain.mT @ inverse  # the Kalman gain, zero for missing entries
        rest = (
            torch.eye(matrix.shape[-1], dtype=factor.dtype, device=factor.device) - total @ matrix
        )
        covariance = rest @ self.covariance @ rest.mT + total @ rule.noise @ total.mT
        return Belief(self.columns, self.mean + shift, covariance), log_density

    def kept(self, columns: Mapping[Column, Column]) -> Belief:
        """Marginalise to some of the variables and rename them."""
        renamed, places = selected(self.columns, columns)
        rows = torch.cat([self.covariance[..., place, :] for place in places], -2)
        covariance = torch.cat([rows[..., place] for place in places], -1)
        return Belief(
            renamed, torch.cat([self.mean[..., place] for place in places], -1), covariance
        )


def matrix_of(columns: Mapping[Column, slice], rule: Rule, like: Tensor) -> Tensor:
    """Concatenate a rule's matrices in the order of the columns.

    A column that the rule does not read gets zeros.
    """
    d = rule.offset.shape[-1]
    whole = like.new_zeros(1, 1, d, 0)
    for column, place in columns.items():
        size = place.stop - place.start
        whole = cat_broadcast(whole, rule.matrices.get(column, whole.new_zeros(1, 1, d, size)), -1)
    return whole


def selected(
    columns: Mapping[Column, slice], names: Mapping[Column, Column]
) -> tuple[dict[Column, slice], list[slice]]:
    """Return the columns of the selected variables under their new names, and their old slices."""
    renamed, start = {}, 0
    for old, new in names.items():
        size = columns[old].stop - columns[old].start
        renamed[new] = slice(start, start := start + size)
    return renamed, [columns[old] for old in names]


def apply(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiply [.., N, d, D] by [.., N, D]; one product if all examples share the matrix."""
    if matrix.shape[-3] == 1:
        return vectors @ matrix.squeeze(-3).mT
    return (matrix @ vectors.unsqueeze(-1)).squeeze(-1)


def cat_broadcast(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """Concatenate along one axis and broadcast the others."""
    shapes = [list(part.shape) for part in (a, b)]
    widths = [shape[axis] for shape in shapes]
    for shape in shapes:
        shape[axis] = 1
    # torch.broadcast_shapes would take a hundred times as long, but numpy reads no free sizes.
    broadcast = torch.broadcast_shapes if torch.compiler.is_compiling() else np.broadcast_shapes
    common = list(broadcast(*shapes))
    parts = []
    for part, width in zip((a, b), widths, strict=True):
        common[axis] = width
        parts.append(part.expand(common))
    return torch.cat(parts, axis)


def _split(tensor: Tensor, axis: int, count: int) -> tuple[Tensor, ...]:
    return tensor.split(1, axis) if tensor.shape[axis] > 1 else (tensor,) * count
