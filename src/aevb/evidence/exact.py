"""The evidence in closed form: which models have it, and what it is.

Gaussian unknowns are integrated out for every value of the discrete latents (:mod:`aevb.evidence.filtering`), discrete latents in time
by the forward algorithm, what is left by a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.evidence.filtering import Filter
from aevb.evidence.finite import Tables
from aevb.evidence.forward import Paths
from aevb.evidence.linear_gaussian import LinearGaussian, why_not_linear_gaussian
from aevb.evidence.memory_limit import narrow
from aevb.evidence.structure import Axes, NotExactError, Structure

INTEGRAL = "∫"  # the name of the term that holds the integral over the Gaussian unknowns
AT_ONCE = 2**24  # numbers of one tensor, beyond which rows are taken in parts


def why_not_exact(model: DeclaredModel) -> str | None:
    """What keeps the evidence from being known exactly, in words; None if nothing does."""
    try:
        Structure(model)
    except NotExactError as reason:
        return str(reason)
    return None


def exact_evidence(model: DeclaredModel, batch: Mapping[str, Tensor], structure: Structure | None = None) -> Tensor:
    """log p(observed | given), one number per example, differentiable; for models that have it exactly.

    ``structure`` is the model's for these data, if it is at hand. Without gradients, little noise costs no digits
    (:mod:`aevb.evidence.square_root_belief`).
    """
    if torch.is_grad_enabled() and why_not_linear_gaussian(model) is None:
        value = LinearGaussian(model, batch, torch.float64).log_evidence()
    else:
        structure = structure or Structure(model, split_latents(model.graph, batch)[0])
        n, steps = model._extent(batch)
        rows = max(1, AT_ONCE // (_numbers_a_row(structure, batch) * (steps if structure.carried else 1)))
        cuts = (narrow(batch, start, min(rows, n - start)) for start in range(0, n, rows))
        value = torch.cat([marginal(model, structure, cut) for cut in cuts])
    return value.to(model._parameter().dtype)


def _numbers_a_row(structure: Structure, batch: Mapping[str, Tensor]) -> int:
    """How many numbers the largest tensor of one step has for each row: pairs of states, or a covariance for each value of the latents."""
    own = any(mask_of(name) in batch for name in structure.linked) or "steps" in batch  # otherwise all rows share their covariances
    widest = max((structure.graph.size(name) for name in structure.linked), default=0)
    return structure.count * max(structure.count, widest**2 if own else widest)


def marginal(model: DeclaredModel, structure: Structure, batch: Mapping[str, Tensor]) -> Tensor:
    """log Σ over the discrete latents ∫ over the Gaussian ones of p, one number an example, in float64."""
    tables = Tables(model, structure, batch)
    factors = discrete_terms(tables)
    if structure.linked:
        factors.append(integral_term(Filter(model, tables, batch)))
    n, _ = model._extent(batch)
    return log_sum(tables, factors).reshape(-1).expand(n)


def discrete_terms(tables: Tables) -> list[Term]:
    """The factors that read no Gaussian unknown: log p of each variable, and what is known of the discrete latents."""
    structure, graph = tables.structure, tables.graph
    found = [Term(tables.log_p(name).double(), axes, graph.timed[name], name) for name, axes in structure.axes.items()]
    for name in structure.discrete:
        # A factor of its own: inside log p, a value that is ruled out whatever came before it would have no gradient.
        if (known := tables.known(name)) is not None:
            found.append(Term(known.double(), frozenset({(name, 0)}), graph.timed[name], mask_of(name)))
    return found


def integral_term(integral: Filter) -> Term:
    """The integral over the Gaussian unknowns."""
    structure = integral.structure
    return Term(integral.log_evidence(), structure.linked_axes, integral.timed and not structure.carried, INTEGRAL)


def log_sum(tables: Tables, factors: Sequence[Term]) -> Tensor:
    """The log of the sum over all values of the discrete latents of the product of the factors, [1, 1, N or 1, 1]."""
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
    """A log-factor, the discrete latents it depends on, whether it has a number for every step, and whose it is."""

    value: Tensor
    axes: Axes
    timed: bool
    name: str
