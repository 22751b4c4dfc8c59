"""Gaussian unknowns, one after the other: a Gaussian over a stack of variables that grows by a linear rule and narrows by data.

Every tensor has leading axes as in :mod:`aevb.derive.axes` (latents summed over, samples, steps, examples); one that nothing depends on has size 1,
so that all examples share a covariance unless their entries, lengths or spreads differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Column = tuple[str, int]  # a variable of the stack, and its offset in time


@dataclass(frozen=True)
class Rule:
    """v = Σ A · parent + b + ε with ε ~ N(0, Q), at one step or at all: A and Q are [.., T, N, d, ·], b is [.., T, N, d]."""

    matrices: Mapping[Column, Tensor]
    offset: Tensor
    noise: Tensor

    def where(self, mask: Tensor, other: Rule) -> Rule:
        """The other rule where the mask, [T, N or 1, 1], holds."""
        wide = mask.unsqueeze(-1)
        columns = {**self.matrices, **other.matrices}
        matrices = {}
        for column, either in columns.items():
            zero = torch.zeros_like(either)
            matrices[column] = torch.where(wide, other.matrices.get(column, zero), self.matrices.get(column, zero))
        return Rule(matrices, torch.where(mask, other.offset, self.offset), torch.where(wide, other.noise, self.noise))

    def zero(self) -> Rule:
        """The rule by which the variable is zeros."""
        return Rule({}, torch.zeros_like(self.offset), torch.zeros_like(self.noise))

    def detached(self) -> Rule:
        """The same numbers, without gradients."""
        return Rule({column: matrix.detach() for column, matrix in self.matrices.items()}, self.offset.detach(), self.noise.detach())

    def steps(self, count: int) -> list[Rule]:
        """The rule of each step."""
        matrices = {column: _split(matrix, -4, count) for column, matrix in self.matrices.items()}
        offsets, noises = _split(self.offset, -3, count), _split(self.noise, -4, count)
        return [Rule({column: parts[t] for column, parts in matrices.items()}, offsets[t], noises[t]) for t in range(count)]


@dataclass(frozen=True)
class Belief:
    """N(mean, covariance) of a stack of variables, given what was observed so far: [.., T, N, D] and [.., T, N, D, D]."""

    columns: Mapping[Column, slice]
    mean: Tensor
    covariance: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Belief:
        return cls({}, like.new_zeros(1, 1, 0), like.new_zeros(1, 1, 0, 0))

    def extended(self, column: Column, rule: Rule) -> Belief:
        """The stack with one more variable, which follows the rule."""
        matrix = matrix_of(self.columns, rule, self.mean)
        mean = apply(matrix, self.mean) + rule.offset
        cross = matrix @ self.covariance
        own = cross @ matrix.mT + rule.noise
        size = self.mean.shape[-1]
        top = beside(self.covariance, cross.mT, -1)
        whole = beside(top, beside(cross, own, -1), -2)
        return Belief({**self.columns, column: slice(size, size + rule.offset.shape[-1])}, beside(self.mean, mean, -1), whole)

    def conditioned(self, rule: Rule, value: Tensor, keep: Tensor | None) -> tuple[Belief, Tensor]:
        """The belief once a variable that follows the rule was seen, and the log-density it had, [.., T, N].

        Entries that are not to be kept are integrated over: they get unit variance, no covariance and no residual. The covariance is a sum,
        (I − KA) P (I − KA)ᵀ + K R Kᵀ (Joseph's form), so that a small one left of a large one keeps its digits.
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
        factor = torch.where(failed[..., None, None] > 0, math.nan, factor)  # without it a part of a factor would look like one
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, eye.expand(factor.shape), upper=False)
        white, gain = apply(inverse, residual), inverse @ cross
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_density = -0.5 * (white.square().sum(-1) + count * math.log(2 * math.pi)) - log_det
        shift = apply(gain.mT, white)
        total = gain.mT @ inverse  # K, zeros for entries that are not kept
        rest = torch.eye(matrix.shape[-1], dtype=factor.dtype, device=factor.device) - total @ matrix
        covariance = rest @ self.covariance @ rest.mT + total @ rule.noise @ total.mT
        return Belief(self.columns, self.mean + shift, covariance), log_density

    def kept(self, columns: Mapping[Column, Column]) -> Belief:
        """Some of the variables, under new names; the others are integrated over."""
        renamed, places = selected(self.columns, columns)
        rows = torch.cat([self.covariance[..., place, :] for place in places], -2)
        covariance = torch.cat([rows[..., place] for place in places], -1)
        return Belief(renamed, torch.cat([self.mean[..., place] for place in places], -1), covariance)


def matrix_of(columns: Mapping[Column, slice], rule: Rule, like: Tensor) -> Tensor:
    """A rule's matrices side by side in the order of a stack's columns, zeros for what it does not read."""
    d = rule.offset.shape[-1]
    whole = like.new_zeros(1, 1, d, 0)
    for column, place in columns.items():
        size = place.stop - place.start
        whole = beside(whole, rule.matrices.get(column, whole.new_zeros(1, 1, d, size)), -1)
    return whole


def selected(columns: Mapping[Column, slice], names: Mapping[Column, Column]) -> tuple[dict[Column, slice], list[slice]]:
    """The columns of a stack of some of the variables under new names, and their places in the old one."""
    renamed, start = {}, 0
    for old, new in names.items():
        size = columns[old].stop - columns[old].start
        renamed[new] = slice(start, start := start + size)
    return renamed, [columns[old] for old in names]


def apply(matrix: Tensor, vectors: Tensor) -> Tensor:
    """[.., N, d, D] times [.., N, D]; one product where all examples share the matrix."""
    if matrix.shape[-3] == 1:
        return vectors @ matrix.squeeze(-3).mT
    return (matrix @ vectors.unsqueeze(-1)).squeeze(-1)


def beside(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """Concatenated on one axis, the others broadcast."""
    shapes = [list(part.shape) for part in (a, b)]
    widths = [shape[axis] for shape in shapes]
    for shape in shapes:
        shape[axis] = 1
    common = list(np.broadcast_shapes(*shapes))  # torch's own takes a hundred times as long
    parts = []
    for part, width in zip((a, b), widths, strict=True):
        common[axis] = width
        parts.append(part.expand(common))
    return torch.cat(parts, axis)


def _split(tensor: Tensor, axis: int, count: int) -> tuple[Tensor, ...]:
    return tensor.split(1, axis) if tensor.shape[axis] > 1 else (tensor,) * count
