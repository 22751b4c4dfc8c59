"""Exact posterior p(unknowns | data).

Discrete latents have a table of probabilities. Gaussian unknowns have one Gaussian per joint value
of the discrete latents. The derivative of the log evidence by a log-factor is the posterior
probability of that factor's values. The forward-backward algorithm is therefore the forward
algorithm followed by automatic differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.derive.axes import over_time
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of, variable_of
from aevb.evidence.chain_marginals import by_chain
from aevb.evidence.exact import AT_ONCE, INTEGRAL, Term, discrete_terms, integral_term, log_sum
from aevb.evidence.filtering import Filter
from aevb.evidence.finite import Tables
from aevb.evidence.missing_patterns import parts
from aevb.evidence.smoothing import Smoother
from aevb.evidence.structure import Structure, structure_of
from aevb.runtime.seeding import generator
from aevb.runtime.shapes import broadcast_shapes


@dataclass(frozen=True)
class Components:
    """Moments of an unknown for each of the K joint values of its discrete latents.

    Weights are [N, T or 1, K], means and variances [N, T or 1, K, d]. Gaussian unknowns also have
    covariances, [N, T or 1, K, d, d].
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation per entry, [N, T or 1, d].

        The discrete latents are summed over.
        """
        weight = self.weight.unsqueeze(-1)
        mean = (weight * self.mean).sum(-2)
        return mean, (weight * (self.variance + (self.mean - mean.unsqueeze(-2)).square())).sum(
            -2
        ).clamp_min(0.0).sqrt()


@dataclass(frozen=True)
class Marginals:
    """Posterior marginals of a batch.

    ``probs`` holds the probabilities of the discrete latents, [N, T or 1, C]. ``components`` holds
    the moments of Gaussian latents and of observed variables with missing entries.
    """

    probs: dict[str, Tensor]
    components: dict[str, Components]


class Unknowns:
    """Posterior of a batch's unknowns under a model with exact evidence.

    All results are in float64 and carry no gradients.
    """

    def __init__(
        self, model: DeclaredModel, structure: Structure, batch: Mapping[str, Tensor]
    ) -> None:
        self.model, self.graph, self.structure, self.batch = model, model.graph, structure, batch
        self.n, self.steps = model._extent(batch)
        hidden = [name for name in self.graph.observed if mask_of(name) in batch]
        self.gaussian = [
            *(name for name in self.graph.latents if name in structure.gaussian),
            *(name for name in hidden if name in structure.linked),
        ]
        self.finite = [name for name in hidden if name in structure.discrete]
        self.others = [
            name for name in hidden if name not in (*structure.linked, *structure.discrete)
        ]

    def _parts(
        self, batch: Mapping[str, Tensor], samples: int = 1
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Split the rows into parts that fit into memory; each part comes with its row numbers.

        The largest tensors hold pairs of states, or covariances, of all steps.
        """
        values = math.prod(_count(self.structure, name) for name, _ in self.structure.linked_axes)
        wide = sum(self.graph.size(name) for name in self.structure.linked)
        numbers = self.steps * max(self.structure.count**2, values * wide**2, samples * wide)
        return list(parts(self.structure, batch, max(1, AT_ONCE // numbers), AT_ONCE))

    # Probabilities and moments --------------------------------------------------------------------

    def marginals(self) -> Marginals:
        """Return the marginal posterior of every unknown at each step."""
        cuts = self._parts(self.batch)
        found = [self._marginals(part, index) for index, part in cuts]
        if len(found) == 1:
            return found[0]
        order = torch.cat([index for index, _ in cuts]).argsort()

        def joined(each: list[Tensor]) -> Tensor:
            return torch.cat(each)[order]

        probs = {name: joined([one.probs[name] for one in found]) for name in found[0].probs}
        components = {}
        for name, first in found[0].components.items():
            own = [one.components[name] for one in found]
            weight, mean, variance = (
                joined([getattr(one, field) for one in own])
                for field in ("weight", "mean", "variance")
            )
            covariance = (
                None
                if first.covariance is None
                else joined([one.covariance for one in own if one.covariance is not None])
            )
            components[name] = Components(weight, mean, variance, covariance)
        return Marginals(probs, components)

    def _marginals(self, batch: Mapping[str, Tensor], index: Tensor) -> Marginals:
        tables = Tables(self.model, self.structure, batch)
        integral = Filter(self.model, tables, batch) if self.structure.linked else None
        n = self.model._extent(batch)[0]
        terms = [*discrete_terms(tables), *([] if integral is None else [integral_term(integral)])]
        weights = {
            term.name: weight
            for term, weight in zip(terms, _derivatives(tables, terms, n, index), strict=True)
        }
        probs = {
            name: _normalised(
                _rows_first(weights[name].movedim(tables.slots[name][0], -1), 2).sum(2)[..., 0, :]
            )
            for name in self.structure.discrete
        }
        components = {name: self._observed(tables, name, weights[name], n) for name in self.others}
        components |= {
            name: of_values(probs[name], table_of(self.model, name)) for name in self.finite
        }
        if integral is not None and self.gaussian:
            means, covariances = self._moments(tables, integral)
            for name in self.gaussian:
                lead = (*means[name].shape[:-3], self.steps if self.graph.timed[name] else 1, n)
                covariance = _rows_first(
                    covariances[name].expand(*lead, *covariances[name].shape[-2:]), 2
                )
                weight = _rows_first(weights[INTEGRAL].squeeze(-1).expand(lead), 0)
                mean = _rows_first(means[name].expand(*lead, -1), 1)
                components[name] = Components(
                    _normalised(weight), mean, covariance.diagonal(dim1=-2, dim2=-1), covariance
                )
        return Marginals(probs, components)

    def _moments(
        self, tables: Tables, integral: Filter
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return means and covariances of the Gaussian unknowns given all data."""
        found = by_chain(integral, self.gaussian, smoothed=True)
        if found is not None and all(self.graph.timed[name] for name in self.gaussian):
            moments = found[0]
            return (
                {name: mean for name, (mean, _) in moments.items()},
                {name: covariance for name, (_, covariance) in moments.items()},
            )
        smoother = Smoother(integral, tables.slots, tables.sizes, self.gaussian)
        return smoother.means(), smoother.covariances()

    def _observed(self, tables: Tables, name: str, weight: Tensor, n: int) -> Components:
        """Return the moments of an observed variable that reads no Gaussian unknown.

        Missing entries are conditioned on the known ones and on each value of the discrete latents.
        """
        mean, variance = (
            part.expand(broadcast_shapes(part.shape, (*weight.shape[:-1], 1)))
            for part in moments_given_known(tables, name)
        )
        weight = weight.squeeze(-1).expand(mean.shape[:-1])
        return Components(
            _normalised(_rows_first(weight, 0)), _rows_first(mean, 1), _rows_first(variance, 1)
        )

    # Joint draws ----------------------------------------------------------------------------------

    def draw(self, samples: int) -> dict[str, Tensor]:
        """Draw the unknown latents jointly given all data, [S, T or 1, N, d].

        Discrete latents are drawn first, then Gaussian latents given the discrete ones.
        """
        cuts = self._parts(self.batch, samples)
        found = [self._draw(part, samples, index) for index, part in cuts]
        order = torch.cat([index for index, _ in cuts]).argsort()
        return {
            name: torch.cat([one[name] for one in found], -2).index_select(-2, order)
            for name in found[0]
        }

    def _draw(self, batch: Mapping[str, Tensor], samples: int, index: Tensor) -> dict[str, Tensor]:
        if not self.structure.discrete:
            return self._draw_gaussian(batch, samples)
        found = self._draw_discrete(batch, samples, index)
        if not self.structure.gaussian:
            return found
        # Each draw of the discrete latents becomes a row in which they are known.
        known = {
            name: value.transpose(0, 1).flatten(1, 2).to(self.model._parameter().dtype)
            for name, value in found.items()
        }
        repeated = {
            key: value.repeat(1, samples, 1)
            for key, value in batch.items()
            if variable_of(key) not in known
        }
        whole = repeated | known
        drawn = Unknowns(self.model, structure_of(self.model, whole), whole).draw(1)
        return found | {
            name: value[0].unflatten(-2, (samples, -1)).transpose(0, 1)
            for name, value in drawn.items()
        }

    def _draw_gaussian(self, batch: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        tables = Tables(self.model, self.structure, batch)
        names = [
            name
            for name in (*self.graph.latents, *self.graph.observed)
            if name in self.structure.gaussian
        ]
        return Smoother(Filter(self.model, tables, batch), tables.slots, tables.sizes, names).draw(
            samples
        )

    def _draw_discrete(
        self, batch: Mapping[str, Tensor], samples: int, index: Tensor
    ) -> dict[str, Tensor]:
        """Draw the discrete latents: static ones and the first step jointly, then step by step."""
        tables, n = Tables(self.model, self.structure, batch), self.model._extent(batch)[0]
        graph, sizes = self.graph, tables.sizes
        static = [name for name in self.structure.discrete if not graph.timed[name]]
        timed = [name for name in self.structure.discrete if graph.timed[name]]
        slots = [
            *(tables.slots[name][0] for name in static),
            *(tables.slots[name][0] for name in timed),
            *(tables.slots[name][1] for name in timed),
        ]
        counts = [sizes[name] for name in (*static, *timed, *timed)]
        depth = -min(slot for slot in slots if slot is not None)
        shape = [1] * depth
        for slot, count in zip(slots, counts, strict=True):
            shape[slot] = count  # type: ignore[index]
        shape[-3], shape[-2] = self.steps if timed else 1, n
        nothing = torch.zeros(shape, dtype=torch.float64, device=self.model._parameter().device)
        pairs = Term(
            nothing,
            frozenset(
                {(name, 0) for name in self.structure.discrete} | {(name, -1) for name in timed}
            ),
            bool(timed),
            "pairs",
        )
        terms = [pairs, *discrete_terms(tables)]
        if self.structure.linked:
            terms.append(integral_term(Filter(self.model, tables, batch)))
        joint = _derivatives(tables, terms, n, index)[0]
        order = [axis + depth for axis in (-3, -2, *slots)]  # type: ignore[operator]
        rest = [axis for axis in range(depth) if axis not in order]
        states = math.prod(sizes[name] for name in timed)
        # [T, N, static, present, neighbour]
        table = joint.permute(*order, *rest).reshape(shape[-3], n, -1, states, states)
        first = table[0, ..., 0].reshape(n, -1)
        whole = torch.multinomial(
            first, samples, replacement=True, generator=generator(first.device)
        ).T  # [S, N]
        fixed, state = whole // states, whole % states
        rows = torch.arange(n, device=whole.device).expand(samples, n)
        path = [state]
        for t in range(1, table.shape[0]):
            probs = _normalised(table[t][rows, fixed, :, path[-1]])
            path.append(
                torch.multinomial(
                    probs.flatten(0, 1), 1, generator=generator(probs.device)
                ).reshape(samples, n)
            )
        found = {}
        steps = torch.stack(path, 1)  # [S, T, N]
        for names, number in ((static, fixed.unsqueeze(1)), (timed, steps)):
            for name in reversed(names):
                factor = self.model.factors[graph.rule("p", name).id]
                assert isinstance(factor, Factor)
                found[name] = factor.table()[number % sizes[name]]
                number = number // sizes[name]
        return found


def _derivatives(tables: Tables, terms: list[Term], n: int, index: Tensor) -> list[Tensor]:
    """Differentiate the log evidence by each term: the posterior probabilities of its values.

    Raises ValueError if p gives a row probability zero; ``index`` are their row numbers.
    """
    whole = []
    for term in terms:
        value = over_time(term.value, tables.steps) if term.timed else term.value
        whole.append(
            term._replace(
                value=value.expand(*value.shape[:-2], n, 1).detach().clone().requires_grad_(True)
            )
        )
    with torch.enable_grad():
        total = log_sum(tables, whole)
        found = torch.autograd.grad(total.sum(), [term.value for term in whole])
    values = total.detach().reshape(-1)
    if tables.structure.discrete and not bool(values.isfinite().all()):
        row = int((~values.isfinite()).nonzero()[0])
        raise ValueError(
            f"Row {int(index[row])} (from 0) has no exact posterior: p gives its data the "
            f"log-probability {float(values[row])}. Check the row's values "
            "and labels (labels that p rules out, values far outside the data that p was fitted "
            "to), and that all parameters of p are finite."
        )
    return list(found)


def _rows_first(value: Tensor, rest: int) -> Tensor:
    """Reshape [axes, T, N, rest] to [N, T, K, rest]; K are the joint values of the axes."""
    flat = value.reshape(-1, *value.shape[value.dim() - rest - 2 :])
    return flat.permute(2, 1, 0, *range(3, 3 + rest))


def _normalised(weight: Tensor) -> Tensor:
    """Normalise weights to sum to one; uniform weights at padded steps."""
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / total, 1 / weight.shape[-1])


def moments_given_known(tables: Tables, name: str) -> tuple[Tensor, Tensor]:
    """Return mean and variance of p's factor of a variable given its known entries.

    They are [axes of discrete latents, T or 1, N, d] in float64.
    """
    program, value, present = tables.program, tables.batch[name], tables.batch[mask_of(name)]

    def at(region: str) -> Tensor:
        spec, dist = program.distribution("p", name, region)
        here = program.select(present.to(value.dtype), region) > 0
        dist = spec.given_known(dist, program.select(value, region), here)
        # Side by side on the last axis: rules of different regions read different latents, so they
        # have different leading axes.
        return torch.cat([dist.mean, dist.variance], -1)

    mean, variance = program.piecewise(name, "p", at).double().chunk(2, -1)
    return mean, variance


def table_of(model: DeclaredModel, name: str) -> Tensor:
    """Return the values of a finite variable, [C, d]."""
    factor = model.factors[model.graph.rule("p", name).id]
    assert isinstance(factor, Factor)
    return factor.table()


def of_values(probs: Tensor, table: Tensor) -> Components:
    """Return the moments of a finite variable with these probabilities of its values, [N, T, C]."""
    table = table.to(probs.dtype)
    mean = probs @ table
    variance = probs @ table.square() - mean.square()
    return Components(torch.ones_like(mean[..., :1]), mean.unsqueeze(-2), variance.unsqueeze(-2))


def _count(structure: Structure, name: str) -> int:
    return structure.graph.rule("p", name).spec.count(structure.graph.size(name)) or 1
