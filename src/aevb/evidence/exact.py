"""Exact evidence: which models have it, and its value.

Gaussian unknowns are integrated out for every value of the discrete latents
(:mod:`aevb.evidence.filtering`). Discrete latents in time are summed over by the forward algorithm,
all other discrete latents by a plain sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import STEPS, mask_of
from aevb.evidence.filtering import Filter
from aevb.evidence.finite import Tables
from aevb.evidence.forward import Paths
from aevb.evidence.linear_gaussian import LinearGaussian, why_not_linear_gaussian
from aevb.evidence.missing_patterns import parts
from aevb.evidence.structure import Axes, NotExactError, Structure, structure_of

INTEGRAL = "∫"  # the name of the term that holds the integral over the Gaussian unknowns
AT_ONCE = 2**24  # elements per tensor above which rows are processed in parts


def why_not_exact(model: DeclaredModel, batch: Mapping[str, Tensor] | None = None) -> str | None:
    """Return why the evidence has no closed form; None if it has one.

    With a batch, its gaps that p reads count as unknowns.
    """
    try:
        if batch is None:
            Structure(model)
        else:
            structure_of(model, batch)
    except NotExactError as reason:
        return str(reason)
    return None


def exact_evidence(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    structure: Structure | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return log p(observed | given) per example, differentiable, for models with exact evidence.

    ``structure`` is the model's structure for these data, if it is already known. ``dtype`` is that
    of the result, by default the model's. Without
    gradients, a square-root filter (:mod:`aevb.evidence.square_root_belief`) keeps the result
    accurate even if the observation noise is very small.
    """
    if torch.is_grad_enabled() and why_not_linear_gaussian(model) is None:
        value = LinearGaussian(model, batch, torch.float64).log_evidence()
    else:
        structure = structure or structure_of(model, batch)
        steps = model._extent(batch)[1]
        rows = max(
            1, AT_ONCE // (_numbers_per_row(structure, batch) * (steps if structure.carried else 1))
        )
        found = [
            (index, marginal(model, structure, part))
            for index, part in parts(structure, batch, rows, AT_ONCE)
        ]
        value = torch.cat([part for _, part in found])
        value = value[torch.cat([index for index, _ in found]).argsort()]
    return value.to(dtype or model._parameter().dtype)


def _numbers_per_row(structure: Structure, batch: Mapping[str, Tensor]) -> int:
    """Return the elements per row in the largest tensor of one step.

    The largest tensor holds pairs of states, or one covariance, or the entries of one variable, per
    value of the latents.
    """
    # If entries are missing or lengths differ, each row has its own covariances.
    own = any(mask_of(name) in batch for name in structure.linked) or STEPS in batch
    widest = max((structure.graph.size(name) for name in structure.linked), default=0)
    observed = max((structure.graph.size(name) for name in structure.graph.observed), default=0)
    return structure.count * max(structure.count, widest**2 if own else widest, observed)


def marginal(model: DeclaredModel, structure: Structure, batch: Mapping[str, Tensor]) -> Tensor:
    """Return log Σ over discrete latents ∫ over Gaussian ones of p, per example, in float64."""
    tables = Tables(model, structure, batch)
    factors = discrete_terms(tables)
    if structure.linked:
        factors.append(integral_term(Filter(model, tables, batch)))
    n, _ = model._extent(batch)
    return log_sum(tables, factors).reshape(-1).expand(n)


def discrete_terms(tables: Tables) -> list[Term]:
    """Return the log-factors that read no Gaussian unknown.

    These are log p of each variable, and the known values of discrete latents.
    """
    structure, graph = tables.structure, tables.graph
    found = [
        Term(tables.log_p(name).double(), axes, graph.timed[name], name)
        for name, axes in structure.axes.items()
    ]
    for name in structure.discrete:
        # A separate factor: inside log p, a value of probability zero would have no gradient.
        if (known := tables.known(name)) is not None:
            found.append(
                Term(known.double(), frozenset({(name, 0)}), graph.timed[name], mask_of(name))
            )
    return found


def integral_term(integral: Filter) -> Term:
    """Return the integral over the Gaussian unknowns as a log-factor."""
    structure = integral.structure
    return Term(
        integral.log_evidence(),
        structure.linked_axes,
        integral.timed and not structure.carried,
        INTEGRAL,
    )


def log_sum(tables: Tables, factors: Sequence[Term]) -> Tensor:
    """Return the log of the sum, over the discrete latents, of the product of the factors.

    The shape is [1, 1, N or 1, 1].
    """
    structure, graph = tables.structure, tables.graph
    total = torch.zeros(1, 1, 1, dtype=torch.float64, device=tables.program.is_last().device)
    paths = Paths.of(tables)
    for factor in factors:
        if any(graph.timed[name] for name, _ in factor.axes):
            paths.add(factor.value, structure.place(factor.axes))
        else:
            total = total + (tables.over_steps(factor.value) if factor.timed else factor.value)
    if paths.slots:
        total = total + paths.log_sum()
    static = [tables.slots[name][0] for name in structure.discrete if not graph.timed[name]]
    return total.logsumexp(static, keepdim=True) if static else total


class Term(NamedTuple):
    """A log-factor of the evidence.

    ``axes`` are the discrete latents that it depends on. ``timed`` says whether it has one number
    per step. ``name`` is the variable that it belongs to.
    """

    value: Tensor
    axes: Axes
    timed: bool
    name: str
