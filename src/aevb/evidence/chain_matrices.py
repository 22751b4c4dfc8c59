"""Assemble the matrices of a linear-Gaussian chain from the rules of its variables.

The chain is u_t = F u_{t−1} + c + N(0, Q), y_t = H u_t + d + N(0, R). The matrices of all steps are
assembled at once from blocks; zero blocks are never computed. Tensors have leading axes as in
:mod:`aevb.derive.axes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aevb.evidence.gaussian_belief import Belief, Column, Rule, apply, cat_broadcast
from aevb.evidence.gaussian_chain import Chain, ChainError, LogLikelihood, Smoother
from aevb.evidence.square_root_belief import RootBelief

Blocks = dict[Column, Tensor]  # an absent block is zero


class Variable(NamedTuple):
    """A variable of one step: Σ matrix · (column of the previous state) + offset + noise."""

    matrices: Blocks
    offset: Tensor | None
    size: int


class Step:
    """Variables of one step as linear functions of the previous state."""

    def __init__(self, state: Belief | RootBelief) -> None:
        self.sizes = {column: place.stop - place.start for column, place in state.columns.items()}
        self.like = state.mean
        self.variables: dict[Column, Variable] = {}
        self.covariances: dict[tuple[Column, Column], Tensor] = {}

    def add(self, column: Column, rule: Rule) -> None:
        """Add a variable that follows the rule; it may read the state and earlier variables."""
        inside = {
            parent: matrix for parent, matrix in rule.matrices.items() if parent in self.variables
        }
        matrices = {
            parent: matrix for parent, matrix in rule.matrices.items() if parent in self.sizes
        }
        offset, own = rule.offset, rule.noise
        for parent, matrix in inside.items():
            for before, block in self.variables[parent].matrices.items():
                matrices[before] = (
                    matrix @ block + matrices[before] if before in matrices else matrix @ block
                )
            shift = self.variables[parent].offset
            offset = offset if shift is None else offset + apply(matrix, shift)
        for other in self.variables:
            parts = [
                matrix @ self.covariances[parent, other]
                for parent, matrix in inside.items()
                if (parent, other) in self.covariances
            ]
            if parts:
                cross = sum(parts[1:], parts[0])
                self.covariances[column, other], self.covariances[other, column] = cross, cross.mT
        for parent, matrix in inside.items():
            if (column, parent) in self.covariances:
                own = own + self.covariances[column, parent] @ matrix.mT
        self.covariances[column, column] = own
        self.variables[column] = Variable(matrices, offset, rule.offset.shape[-1])

    def keep(self, column: Column) -> None:
        """Copy a column of the previous state unchanged."""
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
    """Return log p(values), [axes.., 1, N], given the belief before the first step.

    Return None if an innovation covariance is not positive definite. ``following`` maps each column
    of a step to the column of the next state, in the state's order.
    """
    laid, lead, _ = _assembled(step, state, following, observed, values, keep)
    if backwards:
        laid = [part if part is None or len(part) == 1 else part.flip(0) for part in laid]
    try:
        found: Tensor = LogLikelihood.apply(*laid)  # type: ignore[no-untyped-call]
    except ChainError:
        return None
    return found.reshape(*lead, 1, -1)


class Moments(NamedTuple):
    """Moments of u_t and y_t given y_0 … y_t (filtered) or all data (smoothed), and log p.

    ``columns`` and ``seen`` are the places of the variables in u and in y. The moments of y are
    those of H u + d + noise: they are right for missing entries, if the noise of known ones beside
    them is independent. ``left`` is the smallest share of a filtered variance that smoothing left.
    """

    columns: dict[Column, slice]
    seen: dict[str, slice]
    mean: Tensor  # [axes.., T, N, D]
    covariance: Tensor  # [axes.., T, N or 1, D, D]
    seen_mean: Tensor  # [axes.., T, N, M]
    seen_covariance: Tensor  # [axes.., T, N or 1, M, M]
    so_far: Tensor  # log p(y_0 … y_t), [axes.., T, N]
    left: float


def chain_moments(
    step: Step,
    state: Belief | RootBelief,
    following: Mapping[Column, Column],
    observed: Sequence[Rule],
    names: Sequence[str],
    values: Tensor,
    keep: Tensor | None,
    asked: Sequence[Column],
    *,
    smoothed: bool,
) -> Moments | None:
    """Return moments of the columns ``asked`` and of the state, without gradients.

    ``names`` are those of the observed variables. Return None if an innovation covariance is not
    positive definite.
    """
    laid, lead, columns = _assembled(step, state, following, observed, values, keep, asked)
    chain = Chain(*(None if part is None else part.detach().numpy() for part in laid))
    left = 1.0
    with np.errstate(all="ignore"):
        try:
            found = Smoother(chain)
        except ChainError:
            return None
        mean, covariance = found.mean, found.filtered
        if smoothed:
            mean, after = found.smoothed()
            share = _diagonals(after)[..., _places(columns, asked)]
            before = _diagonals(covariance)[..., _places(columns, asked)]
            there = before > 0
            left = float((share[there] / before[there]).min(initial=1.0))
            covariance = after
        covariance = found.by_row(covariance)
        seen = chain.H @ covariance @ np.swapaxes(chain.H, -1, -2) + chain.R
        if chain.H.shape[2] == 1:
            seen_mean = mean @ np.swapaxes(chain.H[:, :, 0], -1, -2) + chain.d
        else:
            seen_mean = (chain.H @ mean[..., None])[..., 0] + chain.d

    def leading(part: np.ndarray) -> Tensor:
        """Reshape [T, K, …] to [axes.., T, …]."""
        whole = torch.from_numpy(np.ascontiguousarray(np.swapaxes(part, 0, 1)))
        if whole.shape[0] == 1:
            return whole.reshape(*[1] * len(lead), *whole.shape[1:])
        return whole.reshape(*lead, *whole.shape[1:])

    so_far = found.increments.cumsum(0)
    places, start = {}, 0
    for name, rule in zip(names, observed, strict=True):
        places[name] = slice(start, start := start + rule.offset.shape[-1])
    return Moments(
        columns,
        places,
        leading(mean),
        leading(covariance),
        leading(seen_mean),
        leading(seen),
        leading(so_far),
        left,
    )


def _diagonals(matrices: np.ndarray) -> np.ndarray:
    return matrices.diagonal(axis1=-2, axis2=-1)


def _places(columns: Mapping[Column, slice], asked: Sequence[Column]) -> list[int]:
    return [i for column in asked for i in range(columns[column].start, columns[column].stop)]


def _assembled(
    step: Step,
    state: Belief | RootBelief,
    following: Mapping[Column, Column],
    observed: Sequence[Rule],
    values: Tensor,
    keep: Tensor | None,
    asked: Sequence[Column] = (),
) -> tuple[list[Tensor | None], tuple[int, ...], dict[Column, slice]]:
    """Return the parts of the chain, its leading axes, and the places of the columns of u."""
    read = [
        column
        for rule in observed
        for column in rule.matrices
        if column in step.variables or column in step.sizes
    ]
    columns = list(dict.fromkeys([*following, *read, *asked]))
    for column in columns:
        if column not in step.variables:
            step.keep(column)
    variables, like = {column: step.variables[column] for column in columns}, step.like
    sizes = {column: variable.size for column, variable in variables.items()}
    more = sum(sizes.values()) - sum(step.sizes.values())
    offsets = [
        like.new_zeros(1, 1, variable.size) if variable.offset is None else variable.offset
        for variable in variables.values()
    ]
    noises = {(i, i): rule.noise for i, rule in enumerate(observed)}
    widths = {i: rule.offset.shape[-1] for i, rule in enumerate(observed)}
    parts = Chain(
        F=_padded(
            _grid(
                {(a, b): block for a, v in variables.items() for b, block in v.matrices.items()},
                sizes,
                step.sizes,
                like,
            ),
            more,
        ),
        c=_joined(offsets, -1),
        Q=_grid(step.covariances, sizes, sizes, like),
        H=_grid(
            {
                (i, column): block
                for i, rule in enumerate(observed)
                for column, block in rule.matrices.items()
            },
            widths,
            sizes,
            like,
        ),
        d=_joined([rule.offset for rule in observed], -1),
        R=_grid(noises, widths, widths, like),
        mean=_padded(state.mean, more),
        covariance=_padded(state.covariance, more, more),
        y=values,
        keep=keep,
    )
    events = Chain(2, 1, 2, 2, 1, 2, 1, 2, 1, 1)
    lead = np.broadcast_shapes(
        *(
            part.shape[: -2 - event]
            for part, event in zip(parts, events, strict=True)
            if part is not None
        )
    )
    laid = [
        None if part is None else _laid_out(part, event, lead)
        for part, event in zip(parts, events, strict=True)
    ]
    places, start = {}, 0
    for column, size in sizes.items():
        places[column] = slice(start, start := start + size)
    return laid, tuple(lead), places


def _laid_out(part: Tensor, event: int, lead: Sequence[int]) -> Tensor:
    """Reshape [leading axes, T, N, event] to [T, K, N, event].

    K joins the leading axes; it is 1 if the part does not depend on them.
    """
    shape = part.shape[-2 - event :]
    if part.numel() == math.prod(shape):
        return part.reshape(shape).unsqueeze(1)
    return part.expand(*lead, *shape).reshape(-1, *shape).transpose(0, 1)


def _grid(
    blocks: Mapping[tuple[Any, Any], Tensor],
    rows: Mapping[Any, int],
    columns: Mapping[Any, int],
    like: Tensor,
) -> Tensor:
    """Assemble blocks into one matrix, with zeros for absent blocks."""
    lines = [
        _joined(
            [
                blocks[a, b] if (a, b) in blocks else like.new_zeros(1, 1, rows[a], columns[b])
                for b in columns
            ],
            -1,
        )
        for a in rows
    ]
    return _joined(lines, -2)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    whole = parts[0]
    for part in parts[1:]:
        whole = cat_broadcast(whole, part, axis)
    return whole


def _padded(part: Tensor, right: int, below: int = 0) -> Tensor:
    return (
        torch.nn.functional.pad(part, (0, right, 0, below) if below else (0, right))
        if right or below
        else part
    )
