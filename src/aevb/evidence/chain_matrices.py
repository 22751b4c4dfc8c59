"""The rules of one step's Gaussian variables as the matrices of a chain: u_t = F u_{t−1} + c + N(0, Q), y_t = H u_t + d + N(0, R).

All steps' matrices are made at once, from blocks of which those that are zero are never computed; tensors
have leading axes as in :mod:`aevb.derive.axes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aevb.evidence.gaussian_belief import Belief, Column, Rule, apply, beside
from aevb.evidence.gaussian_chain import Chain, ChainError, LogLikelihood
from aevb.evidence.square_root_belief import RootBelief

Blocks = dict[Column, Tensor]  # what is not there is zeros


class Variable(NamedTuple):
    """A variable of a step: Σ matrix · (column of the state before it) + offset + noise."""

    matrices: Blocks
    offset: Tensor | None
    size: int


class Step:
    """What a step makes of the state before it, one variable after the other."""

    def __init__(self, state: Belief | RootBelief) -> None:
        self.sizes = {column: place.stop - place.start for column, place in state.columns.items()}
        self.like = state.mean
        self.variables: dict[Column, Variable] = {}
        self.covariances: dict[tuple[Column, Column], Tensor] = {}

    def add(self, column: Column, rule: Rule) -> None:
        """One more variable, which follows the rule: it may read the state and the variables before it."""
        inside = {parent: matrix for parent, matrix in rule.matrices.items() if parent in self.variables}
        matrices = {parent: matrix for parent, matrix in rule.matrices.items() if parent in self.sizes}
        offset, own = rule.offset, rule.noise
        for parent, matrix in inside.items():
            for before, block in self.variables[parent].matrices.items():
                matrices[before] = matrix @ block + matrices[before] if before in matrices else matrix @ block
            shift = self.variables[parent].offset
            offset = offset if shift is None else offset + apply(matrix, shift)
        for other in self.variables:
            parts = [matrix @ self.covariances[parent, other] for parent, matrix in inside.items() if (parent, other) in self.covariances]
            if parts:
                cross = sum(parts[1:], parts[0])
                self.covariances[column, other], self.covariances[other, column] = cross, cross.mT
        for parent, matrix in inside.items():
            if (column, parent) in self.covariances:
                own = own + self.covariances[column, parent] @ matrix.mT
        self.covariances[column, column] = own
        self.variables[column] = Variable(matrices, offset, rule.offset.shape[-1])

    def keep(self, column: Column) -> None:
        """A column of the state, as it was."""
        eye = torch.eye(self.sizes[column], dtype=self.like.dtype)[None, None]
        self.variables[column] = Variable({column: eye}, None, self.sizes[column])


def log_likelihood(
    step: Step,
    state: Belief | RootBelief,
    following: Mapping[Column, Column],
    observed: Sequence[Rule],
    values: Tensor,
    keep: Tensor | None,
    *,
    backwards: bool,
) -> Tensor | None:
    """log p of the values, [axes.., 1, N], from the belief before the first step; None where a covariance of theirs is none.

    ``following`` says which column of a step becomes which of the state's, in the state's order.
    """
    read = [column for rule in observed for column in rule.matrices if column in step.variables or column in step.sizes]
    columns = list(dict.fromkeys([*following, *read]))
    for column in columns:
        if column not in step.variables:
            step.keep(column)
    variables, like = {column: step.variables[column] for column in columns}, step.like
    sizes = {column: variable.size for column, variable in variables.items()}
    more = sum(sizes.values()) - sum(step.sizes.values())
    offsets = [like.new_zeros(1, 1, variable.size) if variable.offset is None else variable.offset for variable in variables.values()]
    noises = {(i, i): rule.noise for i, rule in enumerate(observed)}
    widths = {i: rule.offset.shape[-1] for i, rule in enumerate(observed)}
    parts = Chain(
        F=_padded(_grid({(a, b): block for a, v in variables.items() for b, block in v.matrices.items()}, sizes, step.sizes, like), more),
        c=_joined(offsets, -1),
        Q=_grid(step.covariances, sizes, sizes, like),
        H=_grid({(i, column): block for i, rule in enumerate(observed) for column, block in rule.matrices.items()}, widths, sizes, like),
        d=_joined([rule.offset for rule in observed], -1),
        R=_grid(noises, widths, widths, like),
        mean=_padded(state.mean, more),
        covariance=_padded(state.covariance, more, more),
        y=values,
        keep=keep,
    )
    events = Chain(2, 1, 2, 2, 1, 2, 1, 2, 1, 1)
    lead = np.broadcast_shapes(*(part.shape[: -2 - event] for part, event in zip(parts, events, strict=True) if part is not None))
    laid = [None if part is None else _laid_out(part, event, lead) for part, event in zip(parts, events, strict=True)]
    if backwards:
        laid = [part if part is None or len(part) == 1 else part.flip(0) for part in laid]
    try:
        found: Tensor = LogLikelihood.apply(*laid)  # type: ignore[no-untyped-call]
    except ChainError:
        return None
    return found.reshape(*lead, 1, -1)


def _laid_out(part: Tensor, event: int, lead: Sequence[int]) -> Tensor:
    """[leading axes, T, N, event] as [T, K, N, event]: the leading axes as one, which stays 1 where the part does not depend on them."""
    shape = part.shape[-2 - event :]
    if part.numel() == math.prod(shape):
        return part.reshape(shape).unsqueeze(1)
    return part.expand(*lead, *shape).reshape(-1, *shape).transpose(0, 1)


def _grid(blocks: Mapping[tuple[Any, Any], Tensor], rows: Mapping[Any, int], columns: Mapping[Any, int], like: Tensor) -> Tensor:
    """Blocks as one matrix, zeros where there is none."""
    lines = [_joined([blocks[a, b] if (a, b) in blocks else like.new_zeros(1, 1, rows[a], columns[b]) for b in columns], -1) for a in rows]
    return _joined(lines, -2)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    whole = parts[0]
    for part in parts[1:]:
        whole = beside(whole, part, axis)
    return whole


def _padded(part: Tensor, right: int, below: int = 0) -> Tensor:
    return torch.nn.functional.pad(part, (0, right, 0, below) if below else (0, right)) if right or below else part
