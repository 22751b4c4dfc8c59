"""The rules of one step's Gaussian variables as the matrices of a chain: u_t = F u_{t−1} + c + N(0, Q), y_t = H u_t + d + N(0, R).

All steps' matrices are made at once; tensors have leading axes as in :mod:`aevb.axes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aevb.evidence.belief import Belief, Column, Rule, beside
from aevb.evidence.chain import Chain, ChainError, LogLikelihood


@dataclass(frozen=True)
class Transition:
    """What a step makes of the state before it: every variable is matrix · state + N(mean, covariance) of the belief."""

    matrix: Tensor
    belief: Belief

    @classmethod
    def empty(cls, state: Belief) -> Transition:
        size = state.mean.shape[-1]
        eye = torch.eye(size, dtype=state.mean.dtype)[None, None]
        return cls(eye, Belief(state.columns, eye.new_zeros(1, 1, size), torch.zeros_like(eye)))

    def extended(self, column: Column, rule: Rule) -> Transition:
        return Transition(beside(self.matrix, self.belief.matrix(rule) @ self.matrix, -2), self.belief.extended(column, rule))


def log_likelihood(
    step: Transition,
    state: Belief,
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
    places = step.belief.columns
    read = {column for rule in observed for column in rule.matrices if column in places}
    columns = [*following, *(column for column in places if column in read and column not in following)]
    index = torch.cat([torch.arange(places[column].start, places[column].stop) for column in columns])
    more = len(index) - step.matrix.shape[-1]
    parts = Chain(
        F=torch.nn.functional.pad(step.matrix[..., index, :], (0, more)),
        c=step.belief.mean[..., index],
        Q=step.belief.covariance[..., index, :][..., index],
        H=_joined([step.belief.matrix(rule)[..., index] for rule in observed], -2),
        d=_joined([rule.offset for rule in observed], -1),
        R=_diagonal([rule.noise for rule in observed]),
        mean=torch.nn.functional.pad(state.mean, (0, more)),
        covariance=torch.nn.functional.pad(state.covariance, (0, more, 0, more)),
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
        return part.reshape(1, *shape).transpose(0, 1)
    return part.expand(*lead, *shape).reshape(-1, *shape).transpose(0, 1)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    whole = parts[0]
    for part in parts[1:]:
        whole = beside(whole, part, axis)
    return whole


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks on the diagonal, zeros elsewhere."""
    whole = blocks[0]
    for block in blocks[1:]:
        a, b = whole.shape[-1], block.shape[-1]
        whole = beside(torch.nn.functional.pad(whole, (0, b)), torch.nn.functional.pad(block, (a, 0)), -2)
    return whole
