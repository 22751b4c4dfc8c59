"""The posterior by q after training: marginals, joint samples, log-probabilities, reconstructions.

A latent that was trained by a relaxation has its own, discrete distribution here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.declare.distributions import Categories, Values
from aevb.declare.families import Exact
from aevb.derive.axes import SAMPLES, over_time, size, swap
from aevb.derive.completion import incomplete
from aevb.derive.dependence import S
from aevb.derive.plan import Plan, derive
from aevb.estimate.ancestral import ancestral_draw
from aevb.estimate.batch import Batch, prepare, public, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import Estimate
from aevb.estimate.keys import mask_of, real_steps, variable_of
from aevb.estimate.program import Program
from aevb.posterior.piecewise import Pieces, Point
from aevb.runtime.seeding import draw_from
from aevb.runtime.shapes import broadcast_shapes
from aevb.runtime.suggestions import did_you_mean


class Posterior:
    """The posterior of the latents of one batch, which :meth:`aevb.Model.posterior` returns.

    Use ``posterior["z"]``, ``posterior.sample(S)`` and ``posterior.log_prob(z=…)``. ``method`` is
    "q" here and "exact" for the exact posterior.

    Arguments:
        model: The model.
        batch: The data, from ``model.prepare``.
        samples: The number of draws of the other latents that a marginal averages over.
        seed: Decides the draws; None uses torch's global generator.
        why: Says why this posterior was chosen, if there was a choice.

    >>> from aevb import Model, Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> posterior = model.posterior(x=torch.zeros(3, 2), seed=0)
    >>> posterior
    posterior by q of z for 3 rows
    >>> draws = posterior.sample(5)
    >>> draws["z"].shape
    torch.Size([5, 3, 1])
    >>> posterior.log_prob(z=draws["z"][0]).shape, posterior.reconstruct()["x"].shape
    (torch.Size([3]), torch.Size([3, 2]))
    >>> values = posterior.joint(5)  # in the layout of a batch
    >>> values["z"].shape, posterior.generated(values).mean("x").shape
    (torch.Size([5, 1, 3, 1]), torch.Size([5, 1, 3, 2]))
    """

    method = "q"

    def __init__(
        self,
        model: DeclaredModel,
        batch: Batch,
        *,
        samples: int = 64,
        seed: int | None = None,
        why: str = "",
    ) -> None:
        self.model, self.graph, self.batch = model, model.graph, batch
        self.samples, self.seed, self.why = samples, seed, why
        self.n, self.steps = model._extent(batch)
        self.clamped, self.partial = split_latents(self.graph, batch)
        # Observed variables whose missing entries are drawn from p, because p reads them.
        self.gaps = incomplete(self.graph, self.partial)

    def __repr__(self) -> str:
        latents = (
            ", ".join(name for name in self.graph.latents if name not in self.clamped) or "nothing"
        )
        which = "exact posterior" if self.method == "exact" else "posterior by q"
        return f"{which} of {latents} for {self.n} {'row' if self.n == 1 else 'rows'}" + (
            f" ({self.why})" if self.why else ""
        )

    def _repr_html_(self) -> str:
        from aevb.notebook import result_cards

        return result_cards.posterior_card(self)

    @property
    def next_seed(self) -> int | None:
        """A seed for draws after the latents.

        ``seed`` itself would repeat the latents' random numbers.
        """
        return None if self.seed is None else self.seed ^ 0x5DEECE66D

    def _check_asked(self, name: str) -> None:
        if name not in self.graph.latents:
            raise ValueError(
                f"{name!r} is not a latent; those are {', '.join(self.graph.latents)}."
                f"{did_you_mean(name, self.graph.latents)}"
            )
        if name in self.clamped:
            raise ValueError(
                f"{name!r} was passed for every row, so it has no posterior here. Leave it out of "
                f"the data."
            )

    def __getitem__(self, name: str) -> td.Distribution:
        """Return q's marginal of one latent.

        It is q's factor if that reads only data, otherwise a mixture over the other latents that it
        reads: exact over enumerated latents, and over ``samples`` draws of the others.
        """
        self._check_asked(name)
        with self.model._evaluating(self.seed):
            working = self._working(name)
            pieces = self._by_region(working, name)
            found = pieces["all"]
            if isinstance(self.graph.rule("q", name).spec, Exact):
                return found
            program = working.program
            for region in list(pieces)[1:]:
                last = program.is_last().squeeze(-1).T[: self.n]  # [N or 1, T]
                here = (
                    last
                    if region == "last"
                    else torch.arange(self.steps, device=last.device).unsqueeze(0) == 0
                )
                own = pieces[region]
                if isinstance(own, Categories):
                    found = Categories(torch.where(here.unsqueeze(-1), own.logits, found.logits))  # type: ignore[attr-defined]
                else:
                    found = Pieces(here, own, found)
            if isinstance(found, Categories):
                return self._finite(name, found.probs)
            seen = self._as_public(mask_of(name), name)
            return (
                found
                if seen is None
                else Pieces(seen.all(-1), Point(self._as_public(name, name)), found)  # type: ignore[arg-type]
            )

    def _by_region(self, working: Estimate, name: str) -> dict[str, td.Distribution]:
        """Return q's marginal of a latent by region, as an estimate computed it.

        The region "all" comes first. It is the only one of a latent with an exact conditional.
        """
        if isinstance(self.graph.rule("q", name).spec, Exact):
            # ``log_w`` holds the log-probabilities of all values.
            raw, weight = self._components(
                working, name, swap(working.log_w(name), working.plan.slots[name][0], -1)
            )
            probs = (raw.softmax(-1) * weight.unsqueeze(-1)).sum(-2)
            return {"all": self._finite(name, probs)}
        return {
            region: self._marginal(working, name, region)
            for region in working.program.regions(name, "q")
        }

    def _marginal(self, working: Estimate, name: str, region: str) -> td.Distribution:
        """Return q's marginal of a latent at every step, by the rule of one region.

        A region is the whole sequence, its first step or its last step.
        """
        entry, program = working.program.entry("q", name, region), working.program
        factor = self.model.factors[entry.id]
        assert isinstance(factor, Factor)
        raw, weight = self._components(working, name, program.select(program.raw(entry), region))
        components = weight.shape[-1]
        dist = factor.distribution(raw if components > 1 else raw.squeeze(-2))
        if isinstance(dist, Categories):
            return (
                Categories((dist.probs * weight.unsqueeze(-1)).sum(-2).log())
                if components > 1
                else dist
            )
        whole = dist if dist.event_shape else td.Independent(dist, 1, validate_args=False)
        if components == 1:
            return whole
        return td.MixtureSameFamily(
            td.Categorical(probs=weight, validate_args=False), whole, validate_args=False
        )

    def _components(self, working: Estimate, name: str, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return a factor's raw parameters for each joint value of its parents, and their weights.

        Shape [N, (T,) components, numbers].
        """
        weight = _weights(working, raw, name)
        time = self.steps if self.graph.timed[name] else 1
        copies = next(iter(working.batch.values())).shape[-2] // self.n
        shape = (
            *broadcast_shapes(raw.shape[:-1], weight.shape[:-1])[:-2],
            time,
            copies * self.n,
        )
        count = math.prod(shape[:-2])
        raw = (
            raw.expand(*shape, raw.shape[-1])
            .reshape(count, time, copies, self.n, -1)
            .permute(3, 1, 0, 2, 4)
            .flatten(2, 3)
        )
        weight = (
            weight.expand(*shape, 1)
            .reshape(count, time, copies, self.n)
            .permute(3, 1, 0, 2)
            .flatten(2, 3)
        )
        if not self.graph.timed[name]:
            raw, weight = raw[:, 0], weight[:, 0]
        return raw, weight / weight.sum(-1, keepdim=True)

    def _as_public(self, key: str, name: str) -> Tensor | None:
        """Return the batch's values of a variable, examples first: [N, d] or [N, T, d]."""
        value = self.batch.get(key)
        return (
            None if value is None else value.transpose(0, 1) if self.graph.timed[name] else value[0]
        )

    def _finite(self, name: str, probs: Tensor) -> td.Distribution:
        """A distribution over the values of a finite latent; certain where it is known."""
        factor = self.model.factors[self.graph.rule("p", name).id]
        assert isinstance(factor, Factor)
        seen, known = self._as_public(mask_of(name), name), self._as_public(name, name)
        if seen is not None and known is not None:
            certain = (known.unsqueeze(-2) == factor.table()).all(-1)
            probs = torch.where(seen[..., :1], certain.to(probs.dtype), probs)
        return Categories(probs.log()) if factor.spec.categorical else Values(factor.table(), probs)

    def _working(self, name: str) -> Estimate:
        graph, model = self.graph, self.model
        # No gradient is needed of the draws of missing entries.
        how = dict.fromkeys(self.gaps, "detached")
        common: dict[str, Any] = {"how": how, "clamped": self.clamped, "partial": self.partial}
        batch, filled = self.batch, Batch()
        try:
            plan = derive(graph, **common)
            if S in plan.axes[graph.rule("q", name).id]:
                # With 1 sample, the plan would relax latents that are too large to enumerate.
                plan = derive(graph, samples=max(2, self.samples), **common)
        except ValueError:  # not enumerable: draw the other latents instead, in copies of the rows
            drawn, filled = self._drawn_in_turn(self.samples)
            others = {key: value for key, value in drawn.items() if key != name}
            batch = {
                key: value
                for key, value in self._copies(self.samples).items()
                if variable_of(key) not in others
            } | others
            plan = derive(
                graph,
                clamped=frozenset(graph.latents) - {name},
                partial=self.partial & {name, *self.gaps},
                sampling=True,
            )
        noise = model.draw_noise(plan, batch)
        return Estimate(plan, model.factors, batch, noise, filled=filled)

    def sample(self, samples: int = 1) -> dict[str, Tensor]:
        """Draw joint samples of all latents.

        Arguments:
            samples: The number S of draws.

        Returns:
            The draws by latent, [S, N, size] or [S, N, T, size] each.
        """
        drawn = self.joint(samples)
        return {
            name: public(self.graph, name, drawn[name], self.n, self.steps)
            for name in self.graph.latents
            if name in drawn
        }

    def joint(self, samples: int = 1) -> Batch:
        """Draw the unknown latents and the missing entries that p reads.

        Arguments:
            samples: The number S of draws.

        Returns:
            The draws in the layout of a batch, [S, T or 1, N, d] each. An observed variable with
            missing entries has its known entries too.
        """
        with self.model._evaluating(self.seed):
            plan = derive(
                self.graph,
                samples=samples,
                clamped=self.clamped,
                partial=self.partial,
                sampling=True,
            )
            if plan.enumerated:  # by Bayes' rule
                latents, filled = self._drawn_in_turn(samples)
                return {
                    name: value.unflatten(-2, (samples, self.n)).movedim(-3, 0)
                    for name, value in {**latents, **filled}.items()
                }
            working = Estimate(
                plan, self.model.factors, self.batch, self.model.draw_noise(plan, self.batch)
            )
            return {
                name: value.expand(samples, *value.shape[-3:])
                for name in (*plan.choices, *plan.completed)
                for value in [working.program.values[name]]
            }

    def _copies(self, count: int) -> Batch:
        """Return the batch repeated ``count`` times."""
        return {
            key: value.repeat(*[1] * (value.dim() - 2), count, 1)
            for key, value in self.batch.items()
        }

    def _drawn_in_turn(self, count: int) -> tuple[Batch, Batch]:
        """Draw all latents jointly for ``count`` copies of the rows, [T or 1, count · N, d] each.

        A latent whose q is Bayes' rule is enumerated until it is drawn. Latents that read it are
        drawn after it, given its value. The second result holds the observed variables with
        missing entries that p reads, completed by draws.
        """
        graph, batch = self.graph, self._copies(count)
        clamped, partial, drawn, filled = self.clamped, self.partial, Batch(), Batch()
        while set(graph.latents) - clamped or self.gaps - filled.keys():
            plan = derive(graph, clamped=clamped, partial=partial, sampling=True)
            noise = self.model.draw_noise(plan, batch)
            working = Estimate(plan, self.model.factors, batch, noise, filled=filled)
            for name in self.gaps - filled.keys():
                if by_bayes := [axis for axis, _ in plan.values[name] if axis in plan.slots]:
                    raise ValueError(
                        f"q computes {by_bayes[0]} by Bayes' rule, but {name} has missing entries "
                        f"that p reads and draws given {by_bayes[0]}, so there are no joint draws. "
                        f"Give {by_bayes[0]} a factor of its own in q, or fill the entries."
                    )
                value = working.program.values[name]
                filled[name] = value.reshape(-1, *value.shape[-2:])
            new = {
                name: working.program.values[name]
                for name in plan.drawn
                if not any(axis in plan.slots for axis, _ in plan.values[name])
            }
            for name in plan.enumerated[:1]:
                # In q's order, the first enumerated latent reads no other one.
                probs = swap(working.weight(name), plan.slots[name][0], -1)
                probs = probs.reshape(-1, *probs.shape[-2:]).expand(
                    self.steps if graph.timed[name] else 1, count * self.n, -1
                )
                factor = self.model.factors[graph.rule("p", name).id]
                assert isinstance(factor, Factor)
                new[name] = factor.table()[
                    draw_from(td.Categorical(probs=probs, validate_args=False))
                ]
            for name, value in new.items():
                steps = self.steps if graph.timed[name] else 1
                drawn[name] = batch[name] = value.reshape(-1, *value.shape[-2:]).expand(
                    steps, count * self.n, value.shape[-1]
                )
                batch.pop(mask_of(name), None)
            clamped, partial = clamped | new.keys(), partial - new.keys()
        return drawn, filled

    def _laid_out(self, values: dict[str, Any]) -> Batch:
        """Lay out values of latents as a batch, with the real steps of this batch."""
        real = real_steps(self.batch, timed=any(self.graph.timed[name] for name in values))
        steps = real.squeeze(-1).T if real is not None else None
        return prepare(
            self.graph, values, like=self.model._parameter(), need=(), steps=steps, single=True
        )

    def _complete(self, values: dict[str, Any]) -> Batch:
        """Lay out a value of every unknown latent as a batch; refuse missing or other names."""
        latents = [name for name in self.graph.latents if name not in self.clamped]
        if set(values) != set(latents):
            raise ValueError(
                f"log_prob takes a value for each latent, {', '.join(latents)}; got "
                f"{', '.join(values) or 'none'}."
            )
        return self._laid_out(values)

    def log_prob(self, **values: Any) -> Tensor:
        """Return log q(values | data) per example, [N].

        Arguments:
            **values: Values of all unknown latents, [N, size] or [N, T, size] each.
        """
        graph, model = self.graph, self.model
        given = self._complete(values)
        latents = [name for name in graph.latents if name not in self.clamped]
        batch = {**self.batch, **given}
        everything = self._with_all_latents()
        for entry in (entry for name in latents for entry in graph.q[name].values()):
            drawn = [
                ref
                for ref in entry.key.parents
                if ref.name not in self.gaps and S in everything.values[ref.name]
            ]
            if drawn:
                raise ValueError(
                    f"{entry.id} reads {drawn[0]}, which depends on missing entries of "
                    f"{min(self.gaps)} that p draws, so that q has no density of the latents in "
                    f"closed form. sample() draws from it."
                )
        with model._evaluating(self.seed):
            # Only p would read what is missing.
            filled = {name: batch[name] for name in self.gaps}
            known = Estimate(everything, model.factors, batch, {}, filled=filled)
            total = torch.zeros(
                self.n, dtype=model._parameter().dtype, device=model._parameter().device
            )
            for name in latents:
                if isinstance(graph.rule("q", name).spec, Exact):
                    # The factor is Bayes' rule at the values of all others.
                    plan = derive(graph, clamped=frozenset(graph.latents) - {name})
                    working = Estimate(plan, model.factors, batch, {})
                    here = (working.program.values[name] == given[name]).all(-1, keepdim=True)
                    slot = plan.slots[name][0]
                    part = torch.where(
                        here, working.log_w(name), torch.zeros_like(batch[name][..., :1])
                    ).sum(slot, keepdim=True)
                else:
                    part = _log_q(known.program, name, given[name])
                seen = self.batch.get(mask_of(name))
                if seen is not None:  # where the latent is known, q has no term
                    part = torch.where(seen[..., :1], torch.zeros_like(part), part)
                part = known.over_steps(over_time(part, self.steps)) if graph.timed[name] else part
                total = total + part.reshape(-1)
        return total

    def _with_all_latents(self) -> Plan:
        """A plan in which every latent is known."""
        return derive(
            self.graph,
            how=dict.fromkeys(self.gaps, "detached"),
            clamped=frozenset(self.graph.latents),
            partial=self.gaps,
        )

    def generated(self, values: Mapping[str, Tensor]) -> Program:
        """Evaluate p's factors at the data and at values of the latents.

        Arguments:
            values: Values of the latents, in the layout of :meth:`joint`. Observed variables with
                missing entries that p reads need complete values, too.

        Returns:
            The evaluated factors: ``mean("x")`` is p's mean of x.
        """
        batch = {**self.batch, **values}
        program = Program(self.graph, self.model.factors, batch, steps=self.steps)
        program.values |= {
            name: batch[name] for name in (*self.graph.stochastic, *self.graph.given)
        }
        program.run(
            derive(self.graph, clamped=frozenset(self.graph.latents)).stages,
            lambda *_: torch.zeros(()),
        )
        return program

    def reconstruct(self, *, mean: bool = True) -> dict[str, Tensor]:
        """Draw latents from the posterior and return p's mean of each observed variable.

        Arguments:
            mean: Whether to return p's mean; otherwise a draw from p.
        """
        model, graph = self.model, self.graph
        drawn = {name: value[0] for name, value in self.joint().items()}
        with model._evaluating(self.next_seed):
            program = self.generated(drawn)
            values = {
                name: program.mean(name)
                if mean
                else program.draw(name, ancestral_draw(model, self.n, self.steps))
                for name in graph.observed
            }
            return {
                name: public(graph, name, value, self.n, self.steps)
                for name, value in values.items()
            }


def _weights(working: Estimate, raw: Tensor, name: str) -> Tensor:
    """Return the joint weights over the axes of ``raw``; other axes are summed out."""
    plan, graph = working.plan, working.graph
    weight = raw.new_ones(1, 1, 1)
    timed = [latent for latent in plan.slots if graph.timed[latent]]
    slots = [slot for latent in timed for slot in plan.slots[latent] if slot]
    if any(size(raw, slot) > 1 for slot in slots):
        weight = working.chain.weights(plan.direction("q", name))
    for latent in reversed([latent for latent in plan.slots if latent not in timed]):
        slot = plan.slots[latent][0]
        if max(size(raw, slot), size(weight, slot)) > 1:
            weight = weight * working.weight(latent)
    for axis in range(-weight.dim(), SAMPLES):
        if size(raw, axis) == 1 and weight.shape[axis] > 1:
            weight = weight.sum(axis, keepdim=True)
    return weight


def _log_q(program: Program, name: str, value: Tensor) -> Tensor:
    def at(region: str) -> Tensor:
        spec, dist = program.distribution("q", name, region)
        return spec.log_prob(dist, program.select(value, region)).unsqueeze(-1)

    return program.piecewise(name, "q", at)
