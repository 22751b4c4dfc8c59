"""Draws of the future of a Gaussian chain: from the belief at each row's end, step by step.

This takes one filter over the past and as many draws as there are future steps. It needs no draws
of the past, which the general way (:mod:`aevb.forecasting.continuation`) continues.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.evidence.filtering import Filter
from aevb.evidence.finite import Tables
from aevb.evidence.gaussian_belief import Column, Rule
from aevb.evidence.square_root_belief import root_of
from aevb.evidence.structure import Structure
from aevb.forecasting.request import Past
from aevb.runtime.seeding import generator


def gaussian_draws(past: Past, structure: Structure, samples: int) -> dict[str, Tensor] | None:
    """Draw the future of the observed variables jointly, [S, steps, N, d], in float64.

    None if a variable is not a part of the chain, or if p has discrete unknowns.
    """
    model, graph = past.model, past.model.graph
    if structure.discrete or not structure.carried or not set(past.names) <= {*structure.linked}:
        return None
    integral = Filter(model, Tables(model, structure, past.extended), past.extended)
    found = integral.chain_moments(())
    if found is None:
        return None
    n, last = len(past.lengths), past.lengths - 1
    mean = _at(found.mean.expand(*found.mean.shape[:-2], n, -1), last, n, 1)
    root = root_of(_at(found.covariance, last, n, 2))
    before = mean + _times(root, _normal(samples, n, root.shape[-1], mean))
    current: dict[Column, Tensor] = {
        column: before[..., place] for column, place in found.columns.items()
    }
    timed = [name for name in integral.linked if graph.timed[name]]
    drawn: dict[str, list[Tensor]] = {name: [] for name in past.names}
    for h in range(past.steps):
        t = past.lengths + h
        current |= {(name, -1): value for (name, lag), value in current.items() if lag == 0}
        for name in timed:
            rule = _rule_at(integral.rules[name], t, n)
            current[name, 0] = _followed(rule, current, samples, n)
        for name in past.names:
            drawn[name].append(current[name, 0])
    return {name: torch.stack(each, 1) for name, each in drawn.items()}


def _followed(rule: Rule, parents: Mapping[Column, Tensor], samples: int, n: int) -> Tensor:
    """Draw a variable given its parents, [S, N, d]."""
    root = root_of(rule.noise)
    value = rule.offset + _times(root, _normal(samples, n, root.shape[-1], rule.offset))
    for column, matrix in rule.matrices.items():
        value = value + _times(matrix, parents[column])
    return value


def _rule_at(rule: Rule, t: Tensor, n: int) -> Rule:
    """Return each row's rule at its own step, with matrices [N or 1, d, D]."""
    return Rule(
        {column: _at(matrix, t, n, 2) for column, matrix in rule.matrices.items()},
        _at(rule.offset, t, n, 1),
        _at(rule.noise, t, n, 2),
    )


def _at(value: Tensor, t: Tensor, n: int, event: int) -> Tensor:
    """Select a step of each row, [1.., T or 1, N or 1, event] → [N or 1, event]."""
    value = value.reshape(value.shape[-2 - event :])
    if len(value) == 1:
        return value[0]
    if value.shape[1] == 1 and bool((t == t[0]).all()):
        return value[int(t[0])]
    rows = torch.arange(n, device=value.device)
    return value.expand(-1, n, *value.shape[2:])[t, rows]


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiply [N or 1, d, D] by [S, N, D]."""
    if len(matrix) == 1:
        return vectors @ matrix[0].mT
    return (matrix @ vectors.unsqueeze(-1)).squeeze(-1)


def _normal(samples: int, n: int, size: int, like: Tensor) -> Tensor:
    source = generator(like.device)
    return torch.randn(samples, n, size, dtype=like.dtype, device=like.device, generator=source)
