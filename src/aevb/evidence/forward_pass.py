"""Filtering: the marginals of each step's unknowns given the data up to that step, in one pass.

The forward algorithm gives log p(s_t, x_0 … x_t) of the discrete latents, the Kalman filter the
moments of the Gaussian unknowns for each joint value of the discrete latents that they depend on.
Static latents have a belief at each step too. A step without data, such as a step after the end of
a series, gets the marginals of its forecast.

p must run forward in time (:func:`why_not_forward`): then p(x_0 … x_t) does not depend on what
follows step t.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.derive.axes import expand_axis, over_time, size, swap
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.evidence.chain_marginals import by_chain
from aevb.evidence.exact import AT_ONCE, Term, discrete_terms, integral_term
from aevb.evidence.exact_posterior import (
    Components,
    Marginals,
    moments_given_known,
    of_values,
    table_of,
)
from aevb.evidence.filtering import Filter
from aevb.evidence.finite import Tables
from aevb.evidence.forward import Paths
from aevb.evidence.gaussian_belief import Rule
from aevb.evidence.missing_patterns import parts
from aevb.evidence.square_root_belief import RootBelief
from aevb.evidence.structure import Axes, Structure
from aevb.runtime.shapes import broadcast_shapes


def why_not_forward(graph: Graph) -> str | None:
    """Return why p does not run forward in time; None if it does.

    p of a longer series then does not extend p of a shorter one.
    """
    for entry in graph.entries():
        if entry.side != "p":
            continue
        if entry.key.at == "last":
            return f'p has a rule of its own for the last step ("{entry.key}")'
        for ref in entry.key.parents:
            if ref.at == "last":
                return f'"{entry.key}" reads {ref}, the end of the sequence'
            if ref.lag > 0:
                return f'"{entry.key}" reads {ref}, a later step'
    return None


class ForwardPass:
    """Marginals of a batch at each step, given the data up to that step, in float64.

    They are those of the latents, and of the variables of ``observed`` (in time, with missing
    entries).
    """

    def __init__(
        self,
        model: DeclaredModel,
        structure: Structure,
        batch: Mapping[str, Tensor],
        observed: Collection[str] = (),
    ) -> None:
        self.model, self.graph, self.structure, self.batch = model, model.graph, structure, batch
        self.n, self.steps = model._extent(batch)
        hidden = [name for name in observed if mask_of(name) in batch]
        self.gaussian = [
            *(name for name in self.graph.latents if name in structure.gaussian),
            *(name for name in hidden if name in structure.linked),
        ]
        self.finite = [name for name in hidden if name in structure.discrete]
        self.others = [name for name in hidden if name not in (*self.gaussian, *structure.discrete)]

    def marginals(self) -> Marginals:
        """Return the marginals of every unknown, [N, T, …], of static ones too."""
        wide = sum(self.graph.size(name) for name in self.structure.linked)
        values = math.prod(
            self.graph.rule("p", name).spec.count(self.graph.size(name)) or 1
            for name, _ in self.structure.linked_axes
        )
        numbers = self.steps * max(self.structure.count**2, values * wide**2)
        cuts = list(parts(self.structure, self.batch, max(1, AT_ONCE // numbers), AT_ONCE))
        found = [_Rows(self, part).marginals() for _, part in cuts]
        order = torch.cat([index for index, _ in cuts]).argsort()
        return _joined(found, order)


class _Rows:
    """The pass over some rows of a batch."""

    def __init__(self, whole: ForwardPass, batch: Mapping[str, Tensor]) -> None:
        self.whole, self.structure, self.graph = whole, whole.structure, whole.graph
        self.batch, self.steps = batch, whole.steps
        self.n = whole.model._extent(batch)[0]
        self.tables = Tables(whole.model, whole.structure, batch)
        self.slots = self.tables.slots
        linked = self.structure.linked
        self.integral = Filter(whole.model, self.tables, batch) if linked else None
        # Mean and covariance of each Gaussian unknown at each step, [axes, 1, T, N or 1, …].
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def marginals(self) -> Marginals:
        terms = discrete_terms(self.tables)
        if self.integral is not None:
            terms.append(self._through_gaussians(self.integral))
        self._through_paths(terms)
        probs = {name: self._probs(name) for name in self.structure.discrete}
        components = {name: self._gaussian(name) for name in self.whole.gaussian}
        components |= {name: self._observed(name) for name in self.whole.others}
        for name in self.whole.finite:
            components[name] = of_values(probs[name], table_of(self.whole.model, name))
        return Marginals(probs, components)

    # Gaussian unknowns ----------------------------------------------------------------------------

    def _through_gaussians(self, integral: Filter) -> Term:
        """Run the Kalman filter; return log p of what it conditioned on, up to each step."""
        structure = self.structure
        if not structure.carried:
            belief = RootBelief.empty(integral.like)
            for name in integral.linked:
                belief, _ = self._visited(integral, belief, name, integral.rules[name])
            for name in self.whole.gaussian:
                self._record(name, [belief])
            return integral_term(integral)
        if (so_far := self._by_chain(integral)) is not None:
            return Term(so_far, structure.linked_axes, True, SO_FAR)
        belief, total = RootBelief.empty(integral.like), integral.like.new_zeros(1, 1)
        at_once = [name for name in integral.linked if not self.graph.timed[name]]
        for name in at_once:
            belief, found = self._visited(integral, belief, name, integral.rules[name])
            total = total + found
        names = [name for name in integral.linked if name not in at_once]
        forever = {column: column for column in belief.columns}
        remembered = {
            (name, 0): (name, -1)
            for name in names
            if any((name, -1) in rule.matrices for rule in integral.rules.values())
        }
        zero = integral.like.new_zeros
        for name, _ in remembered:  # the state before the first step is zero
            d = self.graph.size(name)
            belief = belief.extended((name, -1), Rule({}, zero(1, 1, d), zero(1, 1, d, d)))
        rules = {name: integral.rules[name].steps(self.steps) for name in names}
        beliefs, totals = [], []
        for t in range(self.steps):
            for name in names:
                belief, found = self._visited(integral, belief, name, rules[name][t], t)
                total = total + found
            kept = {(name, 0): (name, 0) for name in self.whole.gaussian}
            beliefs.append(belief.kept(kept) if kept else belief)
            totals.append(total.unsqueeze(-1))
            belief = belief.kept(forever | remembered)
        for name in self.whole.gaussian:
            self._record(name, beliefs)
        shape = broadcast_shapes(*(part.shape for part in totals))
        so_far = torch.cat([part.expand(shape) for part in totals], -3)
        return Term(so_far, structure.linked_axes, True, SO_FAR)

    def _by_chain(self, integral: Filter) -> Tensor | None:
        """Record all moments by :mod:`aevb.evidence.gaussian_chain`; return log p up to each step.

        None if this does not apply.
        """
        found = by_chain(integral, self.whole.gaussian)
        if found is None:
            return None
        moments, so_far = found
        self.moments |= moments
        total, _ = self._at_start(integral)
        return so_far + total.unsqueeze(-1)

    def _at_start(self, integral: Filter) -> tuple[Tensor, RootBelief]:
        """Visit the variables without time; return the log p of their known entries."""
        belief, total = RootBelief.empty(integral.like), integral.like.new_zeros(1, 1)
        for name in integral.linked:
            if not self.graph.timed[name]:
                belief, found = self._visited(integral, belief, name, integral.rules[name])
                total = total + found
        return total, belief

    def _visited(
        self, integral: Filter, belief: RootBelief, name: str, rule: Rule, t: int | None = None
    ) -> tuple[RootBelief, Tensor]:
        """Condition on a variable's known entries, and append it if some may be unknown."""
        value, keep = integral._value(name), integral._keep(name)
        if t is not None:
            value, keep = (
                None if part is None else part if len(part) == 1 else part.narrow(0, t, 1)
                for part in (value, keep)
            )
        unknown = name in self.structure.gaussian or name in self.whole.gaussian
        return belief.visited((name, 0) if unknown else None, rule, value, keep)

    def _record(self, name: str, beliefs: list[RootBelief]) -> None:
        means, covariances = [], []
        for belief in beliefs:
            place = belief.columns[name, 0]
            rows = belief.root[..., place, :]
            means.append(belief.mean[..., place])
            covariances.append(rows @ rows.mT)
        self.moments[name] = _stacked(means, -3), _stacked(covariances, -4)

    # Discrete unknowns ----------------------------------------------------------------------------

    def _through_paths(self, terms: list[Term]) -> None:
        """Compute log p(discrete latents of steps t and t−1, data up to t), up to a constant."""
        graph, tables, structure = self.graph, self.tables, self.structure
        paths = Paths.of(tables)
        like = tables.program.is_last()
        static = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=like.device)
        for term in terms:
            if any(graph.timed[name] for name, _ in term.axes):
                paths.add(term.value, structure.place(term.axes))
            elif term.timed and term.name != SO_FAR:
                value = over_time(term.value, self.steps)
                if tables.program.real is not None:
                    value = torch.where(tables.program.real, value, torch.zeros_like(value))
                static = static + value.cumsum(-3)
            else:
                static = static + term.value
        self.current = self.pair = over_time(static, self.steps)
        if not paths.slots:
            return
        needs_pairs = any(
            structure.place(axes) == -1
            for axes in (
                structure.linked_axes,
                *(structure.axes[name] for name in self.whole.others),
            )
        )
        alphas, pairs = [], []
        for pair, alpha in paths.forwards(needs_pairs):
            alphas.append(alpha)
            if needs_pairs:
                for _, slot in paths.slots if pair is None else ():
                    alpha = expand_axis(alpha, slot, tables.sizes[self._named(slot)])
                pairs.append(alpha if pair is None else pair)
        self.current = self.current + _stacked(alphas, -3)
        self.pair = self.pair + _stacked(pairs, -3) if needs_pairs else self.current

    def _named(self, slot: int) -> str:
        return next(name for name, pair in self.slots.items() if slot in pair)

    def _weight(self, axes: Axes) -> Tensor:
        """Return the probabilities of the values of some discrete latents, [axes, 1, T, N, 1]."""
        before = self.structure.place(axes) == -1
        joint = self.pair if before else self.current
        wanted = {self.slots[name][1 if place == -1 else 0] for name, place in axes}
        others = []
        for name, pair in self.slots.items():
            for slot in pair:
                if slot is None:
                    continue
                if slot in wanted:
                    joint = expand_axis(joint, slot, self.tables.sizes[name])
                elif size(joint, slot) > 1:
                    others.append(slot)
        if others:
            joint = joint.logsumexp(others, keepdim=True)
        joint = joint.expand(*joint.shape[:-2], self.n, 1)
        kept = [slot for slot in wanted if slot is not None]
        return joint.softmax(kept[0]) if len(kept) == 1 else _softmax(joint, kept)

    def _probs(self, name: str) -> Tensor:
        """Return the probabilities of a discrete latent, [N, T, C]."""
        slot = self.slots[name][0]
        weight = swap(self._weight(frozenset({(name, 0)})), slot, -1)
        return weight.reshape(self.steps, self.n, -1).transpose(0, 1)

    # Moments --------------------------------------------------------------------------------------

    def _gaussian(self, name: str) -> Components:
        mean, covariance = self.moments[name]
        weight = self._weight(self.structure.linked_axes)
        lead = weight.shape[:-1]
        mean = _rows_first(mean.expand(*lead, mean.shape[-1]), 1)
        covariance = _rows_first(covariance.expand(*lead, *covariance.shape[-2:]), 2)
        return Components(
            _rows_first(weight.squeeze(-1), 0),
            mean,
            covariance.diagonal(dim1=-2, dim2=-1),
            covariance,
        )

    def _observed(self, name: str) -> Components:
        """Return the moments of an observed variable that reads no Gaussian unknown."""
        weight = self._weight(self.structure.axes[name])
        mean, variance = (
            part.expand(broadcast_shapes(part.shape, weight.shape))
            for part in moments_given_known(self.tables, name)
        )
        weight = weight.squeeze(-1).expand(mean.shape[:-1])
        return Components(_rows_first(weight, 0), _rows_first(mean, 1), _rows_first(variance, 1))


SO_FAR = "∫ up to each step"  # the name of a term that is summed over the steps already


def _softmax(joint: Tensor, axes: list[int]) -> Tensor:
    if not axes:
        return torch.ones_like(joint)
    return (joint - joint.logsumexp(axes, keepdim=True)).exp()


def _stacked(values: list[Tensor], axis: int) -> Tensor:
    """Concatenate values of the steps along time and broadcast all other axes."""
    shape = broadcast_shapes(*(value.shape for value in values))
    return torch.cat([value.expand(shape) for value in values], axis)


def _rows_first(value: Tensor, rest: int) -> Tensor:
    """Reshape [axes, T, N, rest] to [N, T, K, rest]; K are the joint values of the axes."""
    flat = value.reshape(-1, *value.shape[value.dim() - rest - 2 :])
    return flat.permute(2, 1, 0, *range(3, 3 + rest))


def _joined(found: list[Marginals], order: Tensor) -> Marginals:
    """Concatenate the marginals of parts of the rows, in the order of the rows."""

    def joined(each: list[Tensor]) -> Tensor:
        return torch.cat(each)[order]

    components = {}
    for name, first in found[0].components.items():
        own = [one.components[name] for one in found]
        components[name] = Components(
            joined([one.weight for one in own]),
            joined([one.mean for one in own]),
            joined([one.variance for one in own]),
            None
            if first.covariance is None
            else joined([one.covariance for one in own if one.covariance is not None]),
        )
    return Marginals(
        {name: joined([one.probs[name] for one in found]) for name in found[0].probs}, components
    )
