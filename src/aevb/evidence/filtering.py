"""Kalman filter for any graph: integrate out the Gaussian unknowns in the order of generation.

A latent extends the belief (the joint Gaussian of the unknowns given the data so far) by its linear
rule. An observed variable that reads a latent conditions the belief and adds its log-density. If
nothing is carried over time, all steps are processed at once. Otherwise the filter runs step by
step and keeps only the variables that the next step reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from aevb.declare.conditionals import Factor
from aevb.declare.deterministic import Function
from aevb.declare.distributions import MultivariateNormal as Gaussian
from aevb.declare.graph import Entry
from aevb.declare.networks import Named
from aevb.derive.axes import steps_of
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of
from aevb.evidence.chain_matrices import Moments, Step, chain_moments, log_likelihood
from aevb.evidence.finite import Tables
from aevb.evidence.gaussian_belief import Belief, Column, Rule
from aevb.evidence.square_root_belief import RootBelief
from aevb.evidence.structure import chooses_weights, structure_of


class Filter:
    """Integral of all factors that involve Gaussian unknowns, in float64.

    Computed for every value of the discrete latents that these factors depend on.
    """

    # Whether to use :mod:`aevb.evidence.gaussian_chain` for models in time, where it applies.
    fast = True

    def __init__(self, model: DeclaredModel, tables: Tables, batch: Mapping[str, Tensor]) -> None:
        self.model, self.graph, self.structure, self.program = (
            model,
            model.graph,
            tables.structure,
            tables.program,
        )
        self.batch = batch
        self.steps = tables.steps
        self.like = model._parameter().double()
        self.real = tables.program.real
        self.linked = tables.structure.linked
        self.timed = any(self.graph.timed[name] for name in self.linked)
        self.rules = {name: self._rule(name) for name in self.linked}

    # The rule of each variable --------------------------------------------------------------------

    def _rule(self, name: str, padded: bool = True) -> Rule:
        """Return the variable's rule at every step, with its own rules for the first and last step.

        If ``padded``, the rule is zero at padded steps.
        """
        entries, graph = self.graph.p[name], self.graph
        rule = self._linear(entries[graph.main(name)])
        if not graph.timed[name]:
            return rule
        inside = self.program._inside(entries["t"]) if graph.is_deterministic(name) else None
        if inside is not None:  # a function is zero where all its parents lie outside the sequence
            rule = rule.where(~inside, rule.zero())
        if "first" in entries:
            first = torch.arange(self.steps, device=self.like.device).reshape(-1, 1, 1) == 0
            rule = rule.where(first, self._linear(entries["first"]))
        if "last" in entries:
            rule = rule.where(self.program.is_last(), self._linear(entries["last"]))
        return rule if self.real is None or not padded else rule.where(~self.real, rule.zero())

    def _linear(self, entry: Entry) -> Rule:
        """Return one entry as a rule: a matrix per Gaussian parent, an offset and a covariance.

        The offset and the covariance may depend on the entry's other parents.
        """
        factor: Any = self.model.factors[entry.id]
        assert isinstance(factor, Factor)
        gaussian = [ref for ref in entry.key.parents if ref.name in self.structure.gaussian]
        matrices = {
            # Only the rows of the mean: the scale does not depend on these parents.
            (ref.name, ref.lag): self._matrix(entry, factor, ref.label)
            for ref in gaussian
        }
        raw = (
            self._without_gaussians(entry, factor) if matrices else self.program.raw(entry)
        ).double()
        if isinstance(factor, Function):
            return Rule(matrices, factor.value(raw), raw.new_zeros(1, 1, factor.d, factor.d))
        dist: Any = factor.distribution(raw, lambda vector: vector.double())
        if isinstance(dist, Gaussian):
            tril = dist._unbroadcasted_scale_tril
            noise = tril @ tril.mT
        else:
            noise = torch.diag_embed(dist.scale.expand(*dist.scale.shape[:-1], factor.d).square())
        return Rule(matrices, dist.loc, noise.reshape(*[1] * (4 - noise.dim()), *noise.shape))

    def _matrix(self, entry: Entry, factor: Factor, label: str) -> Tensor:
        """Return a parent's weights on the mean, [.., T or 1, N or 1, d, size of the parent].

        Constant ones are as declared, without rounding. If a class chooses the weights, they have
        its axes.
        """
        weights: Named = factor.net.blocks.weights  # type: ignore[union-attr,assignment]
        constant = weights.constants.get(label)
        whole = (weights[label] if constant is None else constant).to(self.like)
        by = chooses_weights(factor)
        if by is None:
            return whole[None, None, : factor.d]
        chosen = next(
            self.program.read(ref, entry) for ref in entry.key.parents if ref.label == by
        ).to(self.like)
        maps = whole.unflatten(0, (chosen.shape[-1], -1))[:, : factor.d]
        return torch.einsum("...c,cij->...ij", chosen, maps)

    def _without_gaussians(self, entry: Entry, factor: Factor) -> Tensor:
        """Evaluate a linear factor's network without the contribution of its Gaussian parents."""
        inputs = self.program.inputs(entry, lambda name: name not in self.structure.gaussian)
        if inputs:
            return factor.rest(factor.first(inputs))
        bias = factor.net.blocks.bias  # type: ignore[union-attr]
        return (self.like.new_zeros(sum(factor.sizes.values())) if bias is None else bias).reshape(  # type: ignore[operator]
            1, 1, -1
        )

    # Through the graph and time -------------------------------------------------------------------

    def log_evidence(self) -> Tensor:
        """Return log p of the observed variables that read a Gaussian, given the discrete latents.

        The shape is [axes, 1, T or 1, N or 1, 1]. If unknowns are carried from step to step, the
        result is summed over the steps; otherwise there is one number per step.
        """
        total, belief = (
            self.like.new_zeros(1, 1),
            (Belief if torch.is_grad_enabled() else RootBelief).empty(self.like),
        )
        at_once = [
            name for name in self.linked if not (self.structure.carried and self.graph.timed[name])
        ]
        for name in at_once:
            belief, found = self._visit(
                belief, name, self.rules[name], self._value(name), self._keep(name)
            )
            total = total + found
        if self.structure.carried:
            timed = [name for name in self.linked if name not in at_once]
            belief, following = self._remembering(belief, timed)
            quick = (
                self._as_chain(belief, following, timed) if self.fast and self._in_numpy() else None
            )
            total = total + (
                self._through_time(belief, following, timed) if quick is None else quick
            )
        return total.unsqueeze(-1)

    def _in_numpy(self) -> bool:
        """Whether the values are numbers in host memory, and no symbols of a traced function."""
        return self.like.device.type == "cpu" and not torch.compiler.is_compiling()

    def _remembering(
        self, belief: Belief | RootBelief, names: list[str]
    ) -> tuple[Belief | RootBelief, dict[Column, Column]]:
        """Add the previous state, which is zero before the first step, to the belief.

        Also returns which column of a step becomes which column of the next state.
        """
        lag, size = -self.structure.direction, belief.mean.shape[-1]
        following, columns = {column: column for column in belief.columns}, dict(belief.columns)
        for name in (
            name
            for name in names
            if any((name, lag) in rule.matrices for rule in self.rules.values())
        ):
            columns[name, lag] = slice(size, size := size + self.graph.size(name))
            following[name, 0] = (name, lag)
        more = size - belief.mean.shape[-1]
        mean = pad(belief.mean, (0, more))
        if isinstance(belief, RootBelief):
            return RootBelief(columns, mean, pad(belief.root, (0, 0, 0, more))), following
        return Belief(columns, mean, pad(belief.covariance, (0, more, 0, more))), following

    def _as_chain(
        self, belief: Belief | RootBelief, following: Mapping[Column, Column], names: list[str]
    ) -> Tensor | None:
        """Run the filter by :mod:`aevb.evidence.gaussian_chain`; None if it does not apply.

        The matrices of all steps are assembled at once.
        """
        parts = self._chain_parts(belief, names)
        if parts is None:
            return None
        step, observed, values, keep = parts
        rules = [rule for rule, _ in observed]
        backwards = self.structure.direction < 0
        return log_likelihood(step, belief, following, rules, values, keep, backwards=backwards)

    def chain_moments(self, asked: Sequence[Column], *, smoothed: bool = False) -> Moments | None:
        """Return moments of a chain that runs forward; None if this does not apply.

        ``asked`` are columns whose moments are needed besides the state's.
        """
        if not self.fast or not self._in_numpy() or self.structure.direction < 0:
            return None
        belief = RootBelief.empty(self.like)
        for name in (name for name in self.linked if not self.graph.timed[name]):
            belief = belief.visited(
                (name, 0) if name in self.structure.gaussian else None,
                self.rules[name],
                self._value(name),
                self._keep(name),
            )[0]
        timed = [name for name in self.linked if self.graph.timed[name]]
        state, following = self._remembering(belief, timed)
        parts = self._chain_parts(state, timed)
        if parts is None:
            return None
        step, observed, values, keep = parts
        names = [name for _, name in observed]
        rules = [rule for rule, _ in observed]
        return chain_moments(
            step, state, following, rules, names, values, keep, asked, smoothed=smoothed
        )

    def _chain_parts(
        self, belief: Belief | RootBelief, names: list[str]
    ) -> tuple[Step, list[tuple[Rule, str]], Tensor, Tensor | None] | None:
        """Return the variables of one step, the observed ones, their values and known entries."""
        step = Step(belief)
        observed: list[tuple[Rule, str]] = []
        for name in names:
            # Padded steps have no data, so a forward filter may run through them. Rows of all
            # lengths then share their matrices.
            rule = (
                self._rule(name, padded=False)
                if self.real is not None and self.structure.direction > 0
                else self.rules[name]
            )
            if name in self.structure.gaussian:
                step.add((name, 0), rule)
                rule = self._itself(name) if name in self.batch else rule
            if name in self.batch:
                observed.append((rule, name))
        if not observed:
            return None
        values = torch.cat([self.batch[name].double() for _, name in observed], -1)
        keep = None
        if any(self._keep(name) is not None for _, name in observed):
            masks = [
                torch.ones_like(self.batch[name], dtype=torch.bool)
                if self._keep(name) is None
                else self._keep(name)
                for _, name in observed
            ]
            keep = torch.cat(masks, -1).double()  # type: ignore[arg-type]
        return step, observed, values, keep

    def _through_time(
        self, belief: Belief | RootBelief, following: Mapping[Column, Column], names: list[str]
    ) -> Tensor:
        """Run the filter step by step, on any device."""
        lag, total = -self.structure.direction, self.like.new_zeros(1, 1)
        rules = {name: self.rules[name].steps(self.steps) for name in names}
        values, keep = (
            {name: self._steps(part(name)) for name in names} for part in (self._value, self._keep)
        )
        for t in range(self.steps) if lag < 0 else range(self.steps - 1, -1, -1):
            for name in names:
                belief, found = self._visit(
                    belief, name, rules[name][t], values[name][t], keep[name][t]
                )
                total = total + found
            belief = belief.kept(following)
        return total

    def _visit(
        self,
        belief: Belief | RootBelief,
        name: str,
        rule: Rule,
        value: Tensor | None,
        keep: Tensor | None,
    ) -> tuple[Belief | RootBelief, Tensor]:
        """Process one variable: extend the belief by it, condition the belief on it, or both.

        Both apply to a latent that is known in some rows.
        """
        if isinstance(belief, RootBelief):
            return belief.visited(
                (name, 0) if name in self.structure.gaussian else None, rule, value, keep
            )
        if name in self.structure.gaussian:
            belief = belief.extended((name, 0), rule)
            if value is None:
                return belief, self.like.new_zeros(1, 1)
            rule = self._itself(name)
        assert value is not None
        return belief.conditioned(rule, value, keep)

    def _itself(self, name: str) -> Rule:
        """Return the identity rule, by which known values of a latent are observed."""
        eye = torch.eye(self.graph.size(name), dtype=self.like.dtype, device=self.like.device)[
            None, None
        ]
        return Rule({(name, 0): eye}, eye.new_zeros(1, 1, len(eye[0, 0])), torch.zeros_like(eye))

    def _value(self, name: str) -> Tensor | None:
        return self.batch[name].double() if name in self.batch else None

    def _keep(self, name: str) -> Tensor | None:
        """Return the mask of known entries at real steps; None if all entries are known."""
        known, real = (
            self.batch.get(mask_of(name)),
            self.real if self.graph.timed[name] and name in self.batch else None,
        )
        if known is None or real is None:
            return known if real is None else real.expand_as(self.batch[name])
        return known & real

    def _steps(self, value: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * self.steps if value is None else steps_of(value, self.steps)


def gaussian_posterior(
    model: DeclaredModel, batch: Mapping[str, Tensor], names: Sequence[str]
) -> Gaussian:
    """Return p(names | observed, given) jointly, [N, D], in float64.

    ``names`` are latents of a linear-Gaussian model without time. Missing entries are marginalised
    out.
    """
    structure = structure_of(model, batch)
    integral = Filter(model, Tables(model, structure, batch), batch)
    belief = RootBelief.empty(integral.like)
    for name in integral.linked:
        belief = belief.visited(
            (name, 0) if name in structure.gaussian else None,
            integral.rules[name],
            integral._value(name),
            integral._keep(name),
        )[0]
    asked = belief.kept({(name, 0): (name, 0) for name in names})
    return Gaussian(asked.mean[0].expand(model._extent(batch)[0], -1), asked.tril()[0])
