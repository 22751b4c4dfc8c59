"""Estimate the bound of a plan: a pure function of parameters, batch and noise.

Terms are tensors with the axes of :mod:`aevb.derive.axes` and an event axis of size 1. The
expectation over an enumerated latent is a weighted sum over its axis. The expectation over samples
is a mean over S. Both are computed here, innermost latent first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributions as td
from torch import Tensor, nn

from aevb.declare import distributions as ad
from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.families import Exact
from aevb.declare.graph import Entry
from aevb.declare.notation import Ref
from aevb.derive.axes import (
    SAMPLES,
    TIME,
    at_step,
    contract,
    expand_axis,
    on_axis,
    over_time,
    place,
    size,
    steps_of,
)
from aevb.derive.dependence import Axis, S
from aevb.derive.divergences import closed_form_kl
from aevb.derive.draws import Draw, Reduction, Term
from aevb.derive.plan import Plan
from aevb.estimate.before import Before, state_name
from aevb.estimate.bound import (
    Bound,
    KLWeight,
    integrand,
    is_one,
    sample_with_seed,
    weight_of,
)
from aevb.estimate.chain_marginals import Chain
from aevb.estimate.free_bits import FreeBits
from aevb.estimate.keys import is_mask, mask_of
from aevb.estimate.metric_names import kl_term, latent_of
from aevb.estimate.particle_bound import ParticleEstimate
from aevb.estimate.program import Program
from aevb.runtime.shapes import broadcast_shapes


def scale_gradient(value: Tensor, factor: Tensor) -> Tensor:
    """Return the same value with its gradient multiplied by ``factor``."""
    return value.detach() + factor * (value - value.detach())


class Estimate:
    """The computation of one estimate.

    It draws all values, then computes log-probabilities, weights, terms and the bound.
    """

    def __init__(
        self,
        plan: Plan,
        factors: Mapping[str, nn.Module] | nn.ModuleDict,
        batch: Mapping[str, Tensor],
        noise: Mapping[str, Tensor],
        *,
        temperature: float | Tensor = 0.5,
        scale: Mapping[str, Tensor] | None = None,
        filled: Mapping[str, Tensor] | None = None,
        before: Before | None = None,
        chunk: int | None = None,
    ) -> None:
        """``filled`` holds complete values of variables whose missing entries p would draw."""
        self.plan, self.graph, self.factors = plan, plan.graph, factors
        self.batch, self.noise, self.temperature, self.scale = batch, noise, temperature, scale
        self.filled = filled or {}
        self._check_gaps()
        timed = [name for name in batch if self.graph.timed.get(name)]
        self.steps = batch[timed[0]].shape[TIME] if timed else 1
        self.program = Program(
            self.graph,
            factors,
            batch,
            noise=noise,
            slots=plan.slots,
            steps=self.steps,
            q_draws=frozenset(plan.choices),
            completed=plan.completed,
            hook=self._unscale if scale is not None else None,
            before=before,
            chunk=chunk,
        )
        self._log_p: dict[str, Tensor] = {}
        self._log_w: dict[str, Tensor] = {}
        self._terms: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._noise_steps: dict[str, Sequence[Tensor]] = {}
        values = self.program.values
        for name in (*self.graph.observed, *self.graph.given, *plan.clamped):
            if name not in plan.completed:
                values[name] = batch[name]
        # Functions of the data that the caller has computed already.
        values |= {name: batch[name] for name in self.graph.deterministic if name in batch}
        for name in plan.enumerated:
            factor = factors[self.graph.rule("p", name).id]
            assert isinstance(factor, Factor)
            values[name] = place(factor.table(), plan.slots[name][0])
        self.program.run(plan.stages, self._draw)

    def _check_gaps(self) -> None:
        """Raise ValueError for missing entries that p would read as zeros."""
        for name in self.graph.observed:
            if (
                mask_of(name) in self.batch
                and name not in self.plan.completed
                and name not in self.plan.choices
                and self.graph.is_read_by_p(name)
            ):
                raise ValueError(
                    f"{name} has missing entries that p reads, and this estimate does not draw "
                    f"them. Fill the entries, or name {name} in the plan's partial=."
                )

    def after(self) -> dict[str, Tensor]:
        """Return what the next window reads of this one's last step, without gradient."""
        program = self.program
        assert program.before is not None
        states = {
            state_name(name, i): part
            for name, state in program.states.items()
            for i, part in enumerate(state)
        }
        found = {}
        for name, like in program.before.values.items():
            if name in states:
                value = states[name]
            elif is_mask(name):
                value = (~self.batch[name][-1:]).to(like.dtype)
            else:
                value = over_time(program.values[name], self.steps).narrow(TIME, self.steps - 1, 1)
            found[name] = value.detach().to(like.dtype).expand(like.shape)
        return found

    def _like(self) -> Tensor:
        return next(iter(self.batch.values()))

    # Drawing --------------------------------------------------------------------------------------

    def _unscale(self, entry: Entry, ref: Ref, value: Tensor) -> Tensor:
        """Undo DReG's gradient weight on the inputs of a draw.

        Gradients to earlier draws are then not weighted twice. The plan decides whether a parent
        has a sample axis. Its tensor cannot decide: at the first step of a recurrence, the state
        may not have that axis yet.
        """
        if (
            entry.side == "p"
            or entry.key.name not in self.plan.drawn
            or S not in self.plan.values[ref.name]
            or self.program.reads_data(entry, ref.name)
            or self.scale is None
        ):
            return value
        return scale_gradient(value, 1 / self.scale[entry.key.name])

    def _scaled(self, name: str, raw: Tensor) -> Tensor:
        """Weight the gradient of a draw's parameters separately for each sample (DReG)."""
        assert self.scale is not None
        scale = self.scale[name]
        return scale_gradient(
            raw.expand(broadcast_shapes(raw.shape, (*scale.shape[:-1], 1))), scale
        )

    def _noise_at(self, entry: Entry, t: int | None) -> Tensor:
        name = self.plan.noise_keys[entry.id]
        noise = self.noise[name]
        if t is None or noise.dim() == 0:
            return noise if t is None else noise + t
        if name not in self._noise_steps:
            self._noise_steps[name] = steps_of(noise, self.steps)
        return self._noise_steps[name][t]

    def _draw(self, name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        if name in self.plan.completed:
            return self._complete(name, entry, raw, t)
        factor, noise = self.factors[entry.id], self._noise_at(entry, t)
        assert isinstance(factor, Factor)
        draw, spec = self.plan.choices[name].draw, factor.spec
        scaled = partial(self._scaled, name) if self.scale is not None else None
        raw = scaled(raw) if scaled else raw
        # A seed: torch draws the sample, so the parameters need all axes of the value.
        if noise.dim() == 0:
            raw = raw.expand(broadcast_shapes(raw.shape, (*self._value_shape(name, t)[:-1], 1)))
        whole = t is None and scaled is None and noise.dim() and entry.key.at in ("t", "static")
        dist = (
            self.program.distribution("q", name)[1] if whole else factor.distribution(raw, scaled)
        )
        if draw.reparametrises:
            value = (
                spec.reparametrise(dist, noise) if spec.noise(1) else sample_with_seed(dist, noise)
            )
            value = value.detach() if draw is Draw.DETACHED else value
        elif draw in (Draw.SCORE, Draw.SAMPLE):
            # An exported function has no gradient, and torch cannot save it with a change of mode.
            with nullcontext() if torch.compiler.is_exporting() else torch.no_grad():
                value = (
                    spec.reparametrise(dist, noise)
                    if spec.noise(1)
                    else sample_with_seed(dist, noise)
                )
        elif draw is Draw.STRATIFY:
            slot = self.plan.slots[name][0]
            loc, deviation = (_component_axis(part, slot) for part in (dist.loc, dist.scale))  # type: ignore[attr-defined]
            value = torch.addcmul(loc, deviation, noise)
        else:
            value, _ = spec.relax(dist, noise, self.temperature)  # type: ignore[attr-defined]
            if draw is Draw.STRAIGHT_THROUGH:
                hard = spec.reparametrise(dist, noise)
                value = hard + (value - value.detach())
        seen = self.batch.get(mask_of(name))
        if seen is not None:
            value = torch.where(at_step(seen, t), at_step(self.batch[name], t), value)
        return value

    def _complete(self, name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        """Return an observed variable, its missing entries drawn from p given the known ones."""
        if name in self.filled:
            return at_step(self.filled[name], t)
        factor, value = self.factors[entry.id], at_step(self.batch[name], t)
        known = self.batch.get(mask_of(name))
        if known is None:
            return value
        assert isinstance(factor, Factor)
        spec, known, noise = factor.spec, at_step(known, t), self._noise_at(entry, t)
        if spec.categorical:  # one entry of a class does not tell the others
            known = known.all(-1, keepdim=True)
        if noise.dim() == 0:
            shape = self._value_shape(name, t)
            raw = raw.expand(broadcast_shapes(raw.shape, (*shape[:-1], 1)))
        whole = t is None and noise.dim() and entry.key.at in ("t", "static")
        dist = self.program.distribution("p", name)[1] if whole else factor.distribution(raw)
        dist = spec.given_known(dist, value, known)
        pathwise = self.plan.completions[name].draw is Draw.PATHWISE
        with nullcontext() if pathwise else torch.no_grad():
            drawn = (
                spec.reparametrise(dist, noise) if spec.noise(1) else sample_with_seed(dist, noise)
            )
        return torch.where(known, value, drawn)

    def _value_shape(self, name: str, t: int | None) -> tuple[int, ...]:
        n = self._like().shape[-2]
        shape = list(self.plan._shape(self.plan.values[name], n, self.steps, self.graph.size(name)))
        if t is not None:
            shape[TIME] = 1
        return tuple(shape)

    # Log-probabilities and weights ----------------------------------------------------------------

    def _detached(self, side: str, name: str, region: str) -> tuple[Conditional, td.Distribution]:
        """Return a factor's distribution with detached weights and inputs.

        Inputs that are samples are not detached.
        """
        entry = self.program.entry(side, name, region)
        factor, program = self.factors[entry.id], self.program
        assert isinstance(factor, Factor)
        if S not in self.plan.axes[entry.id]:
            return factor.spec, factor.distribution(
                self.program.select(program.raw(entry).detach(), region), torch.detach
            )
        program.hook, hook = None, program.hook
        inputs = {
            ref.label: program.read(ref, entry)
            if S in self.plan.values[ref.name]
            else program.read(ref, entry).detach()
            for ref in entry.key.parents
        }
        program.hook = hook
        fixed = {key: parameter.detach() for key, parameter in factor.named_parameters()}
        raw = torch.func.functional_call(
            factor, fixed, (inputs, program.keep(entry), program.missing(entry, inputs))
        )
        return factor.spec, factor.distribution(self.program.select(raw, region), torch.detach)

    def log_p(self, name: str) -> Tensor:
        """log p(v | ·) at v's value; missing entries are marginalised out."""
        if name not in self._log_p:
            present = self.batch.get(mask_of(name)) if name in self.graph.observed else None
            self._log_p[name] = self.program.log_prob("p", name, self.program.values[name], present)
        return self._log_p[name]

    def log_drawn(self, name: str) -> Tensor:
        """log of the density with which a variable's draw was made, summed over time.

        It is log q of a latent where it is unknown, and log p of an observed variable's missing
        entries given the known ones.
        """
        if name not in self.plan.completed:
            found = self._where_unknown(name, self.log_q(name))
        else:
            found = self.program.log_prob("p", name, self.program.values[name]) - self.log_p(name)
            whole = self.batch[mask_of(name)].all(-1, keepdim=True)
            found = torch.where(whole, torch.zeros_like(found), found)
        return self.over_steps(found) if self.graph.timed[name] else found

    def log_q(self, name: str) -> Tensor:
        """log q(v | ·) at v's sample.

        For the gradients "stl" and "dreg", q's parameters are detached.
        """
        fixed = (
            self.plan.gradient in ("stl", "dreg") and self.plan.choices[name].draw is Draw.PATHWISE
        )
        return self.program.log_prob(
            "q", name, self.program.values[name], distribution=self._detached if fixed else None
        )

    def log_w(self, name: str) -> Tensor:
        """log q of every value of an enumerated latent, on the latent's axis.

        For a mixture, log π of every component.
        """
        if name not in self._log_w:
            self._log_w[name] = (
                self._bayes(name)
                if isinstance(self.graph.rule("q", name).spec, Exact)
                else self._weights_of(name)
            )
        return self._log_w[name]

    def _weights_of(self, name: str) -> Tensor:
        slot = self.plan.slots[name][0]

        def at(region: str) -> Tensor:
            spec, dist = self.program.distribution("q", name, region)
            if self.plan.choices[name].draw is Draw.STRATIFY:
                return on_axis(dist.log_weights, slot)  # type: ignore[attr-defined]
            if isinstance(dist, td.OneHotCategorical):
                return on_axis(dist.logits, slot)
            return spec.log_prob(dist, self.program.values[name]).unsqueeze(-1)

        return self.program.piecewise(name, "q", at)

    def _bayes(self, name: str) -> Tensor:
        """Apply Bayes' rule: log q(y|·) = Σ log p of the factors that contain y, normalised over y.

        A static factor that reads the first or last step contains y only at that step.
        """
        total: Tensor | None = None
        for factor in self.graph.factors_containing(name):
            part = self.log_p(factor)
            if self.graph.timed[name] and not self.graph.timed[factor]:
                part = torch.where(
                    self.program.is_end(self.plan.ends(self.graph.rule("p", factor))[0]),
                    part,
                    torch.zeros_like(part),
                )
            total = part if total is None else total + part
        assert total is not None
        return total.log_softmax(self.plan.slots[name][0])

    # Terms ----------------------------------------------------------------------------------------

    def over_steps(self, term: Tensor) -> Tensor:
        """Sum a term over the real (not padded) steps."""
        if self.program.real is not None:
            term = torch.where(self.program.real, term, torch.zeros_like(term))
        return term.sum(TIME, keepdim=True)

    def finish(self, name: str, term: Tensor, side: str) -> Tensor:
        """Sum a term over time, and over the values of the latents enumerated at each step.

        The values are weighted by their probabilities.
        """
        timed = self.graph.timed[name]
        slots = [
            slot
            for latent in self.plan.slots
            if self.graph.timed[latent]
            for slot in self.plan.slots[latent]
            if slot
        ]
        if any(size(term, slot) > 1 for slot in slots):
            weights = self.chain.weights(self.plan.direction(side, name))
            if not timed:  # a static factor that reads the first or last step
                weights = self.program.select(
                    weights, self.plan.ends(self.graph.rule(side, name))[0]
                )
            weighted = weights * term
            term = weighted.sum([slot for slot in slots if weighted.dim() >= -slot], keepdim=True)
        return self.over_steps(over_time(term, self.steps)) if timed else term

    @property
    def chain(self) -> Chain:
        if not hasattr(self, "_chain"):
            self._chain = Chain(self.plan, self.weight, self.steps)
        return self._chain

    def weight(self, name: str) -> Tensor:
        """The weight of every value of an enumerated latent.

        It is the value's probability under q, or one-hot where the value is known.
        """
        weight = self.log_w(name).exp()
        seen = self.batch.get(mask_of(name))
        if seen is None or self.plan.choices[name].draw is Draw.STRATIFY:
            return weight
        table = self.program.values[name]
        if self.program.real is not None and self.graph.timed[name]:
            # Padded steps have no known value, but their weights must still sum to one.
            seen = seen & self.program.real
        here = (table == self.batch[name]).all(-1, keepdim=True).to(weight.dtype)
        return torch.where(seen[..., :1], here, weight)

    def kl(self, name: str) -> Tensor:
        """E[log q(v|·) − log p(v|·)] as the plan computes it, summed over time.

        It is not yet averaged over the other latents. The term is zero where v is known: log p(v|·)
        is then a likelihood term.
        """
        choice = self.plan.choices[name]
        if choice.term is Term.SUMMED:
            log_q, log_p = self.log_w(name), self.log_p(name)
            if choice.draw is Draw.SUM:
                return -self.finish(name, self._where_unknown(name, log_p), "p")
            # This value has weight zero, and 0 · −∞ is NaN.
            log_q = torch.where(torch.isneginf(log_q), torch.zeros_like(log_q), log_q)
        elif choice.term is Term.CLOSED:

            def at(region: str) -> Tensor:
                (q, dist_q), (p, dist_p) = (
                    self.program.distribution("q", name, region),
                    self.program.distribution("p", name, region),
                )
                kl = closed_form_kl(q, p)
                assert kl is not None
                return kl(dist_q, dist_p).unsqueeze(-1)

            term = self._where_unknown(name, self.program.piecewise(name, "qp", at))
            return self.finish(name, term, "q" if self.plan.direction("q", name) else "p")
        elif choice.term is Term.RELAXED:
            log_value = self.program.piecewise(
                name, "q", lambda region: self._relaxed_value(name, region)
            )
            log_q, log_p = (self._relaxed_log_prob(side, name, log_value) for side in "qp")
        elif choice.term is Term.ENTROPY:

            def negative_entropy(region: str) -> Tensor:
                spec, dist = self.program.distribution("q", name, region)
                return -spec.entropy(dist).unsqueeze(-1)

            log_q, log_p = self.program.piecewise(name, "q", negative_entropy), self.log_p(name)
        else:
            log_q, log_p = self.log_q(name), self.log_p(name)
        log_q, log_p = self._where_unknown(name, log_q), self._where_unknown(name, log_p)
        return self.finish(name, log_q, "q") - self.finish(name, log_p, "p")

    def _where_unknown(self, name: str, term: Tensor) -> Tensor:
        """Set a latent's term to zero where its value is known."""
        seen = self.batch.get(mask_of(name))
        return term if seen is None else torch.where(seen[..., :1], torch.zeros_like(term), term)

    def _relaxed_value(self, name: str, region: str) -> Tensor:
        """The relaxed sample in the space of its density: its logarithm or logit.

        The logarithm is for OneHot, the logit for Bernoulli.
        """
        spec, dist = self.program.distribution("q", name, region)
        return spec.relax(dist, self.program.select(self.noise[name], region), self.temperature)[1]  # type: ignore[attr-defined]

    def _relaxed_log_prob(self, side: str, name: str, log_value: Tensor) -> Tensor:
        def at(region: str) -> Tensor:
            spec, dist = self.program.distribution(side, name, region)
            return spec.relaxed_log_prob(  # type: ignore[attr-defined]
                dist, self.program.select(log_value, region), self.temperature
            ).unsqueeze(-1)

        return self.program.piecewise(name, side, at)

    def likelihood(self, name: str) -> Tensor:
        """log p(v|·) of an observed variable, or of a latent where its value is known."""
        log_p, seen = self.log_p(name), self.batch.get(mask_of(name))
        if seen is not None and name in self.plan.choices:
            log_p = torch.where(seen[..., :1], log_p, torch.zeros_like(log_p))
        return self.finish(name, log_p, "p")

    # The bound ------------------------------------------------------------------------------------

    def sequence(self) -> list[tuple[str, int]]:
        """The expectations that remain after the sum over time, innermost first.

        They are pairs (latent or ``S.name``, axis).
        """
        return [
            (name, SAMPLES if name == S.name else self.plan.slots[name][0])
            for name in self.plan.order
        ]

    def terms(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The likelihood terms and the KL terms, summed over time.

        They are not yet averaged over latents and samples.
        """
        if self._terms is None:
            self._terms = self._make_terms()
        return self._terms

    def _make_terms(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        latents = (
            name
            for name in self.graph.latents
            if name in self.plan.clamped or mask_of(name) in self.batch
        )
        known = (*self.graph.observed, *latents)
        return {name: self.likelihood(name) for name in known}, {
            kl_term(name): self.kl(name) for name in self.plan.choices
        }

    def only_known(self, name: str, total: Tensor) -> Tensor:
        """In rows where a latent's value is known, set the total of all other values to −∞."""
        seen = self.batch.get(mask_of(name))
        if seen is None:
            return total
        here = (self.program.values[name] == self.batch[name]).all(-1, keepdim=True)
        return torch.where(seen[..., :1] & ~here, torch.full_like(total, -math.inf), total)

    def gradient_scale(self, kl_weight: KLWeight = 1.0) -> dict[str, Tensor]:
        """DReG's factor on the gradient of each draw, by latent: 1 − β + βw̃.

        w̃ is the sample's normalised importance weight, β the weight of the latent's KL term. The
        bound weights each sample's gradient by w̃. The log-weight contains −β log q(z). Its gradient
        with respect to q's parameters at fixed z has the same mean as −β(w̃ − w̃²) times the gradient
        of the log-weight along the path of z. The total factor is therefore w̃(1 − β + βw̃).
        """
        terms, kls = self.terms()
        total = integrand(terms, kls, kl_weight)
        for name, axis in self.sequence():
            if name == S.name:
                break
            total = contract(total, self.weight(name), axis)
        share = expand_axis(total, SAMPLES, self.plan.samples).softmax(SAMPLES)

        def scale(weight: float | Tensor) -> Tensor:
            found = 1 - weight + weight * share
            # ``_unscale`` divides by it.
            return torch.where(found.abs() < 1e-12, torch.full_like(found, 1e-12), found)

        if isinstance(kl_weight, Mapping):
            return {name: scale(weight_of(kl_weight, name)) for name in self.plan.drawn}
        return dict.fromkeys(self.plan.drawn, scale(kl_weight))

    def bound(self, kl_weight: KLWeight = 1.0, free_bits: FreeBits | None = None) -> Bound:
        """The bound and its terms per example, and the objective that weights make of it."""
        if is_one(kl_weight) and free_bits is None:
            return self._reduced(1.0)
        weights, cost = kl_weight, None
        if free_bits is not None:
            weights, cost = self._with_free_bits(kl_weight, free_bits)
        found = self._reduced(weights)
        objective = found.value if cost is None else found.value - cost
        with torch.no_grad():
            if self.plan.bound == "iwae":
                return replace(self._reduced(1.0), weighted=objective)
            terms = {name: term for name, term in found.terms.items() if latent_of(name) is None}
            kls = {name: term for name, term in found.terms.items() if name not in terms}
            return replace(found, value=integrand(terms, kls, 1.0), weighted=objective)

    def kl_totals(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The KL terms of some latents under the ELBO, summed over examples, without gradient.

        Return also the number of examples in which each latent is not entirely known.
        """
        _, kls = self.terms()
        with torch.no_grad():
            sums = [self._expected(kls[kl_term(name)]).sum() for name in names]
            return torch.stack(sums), torch.stack([self._unknown(name).sum() for name in names])

    def _expected(self, term: Tensor) -> Tensor:
        """The expectation of a term under the ELBO, one number per example."""
        for name, axis in self.sequence():
            if name != S.name:
                term = contract(term, self.weight(name), axis)
            elif size(term, axis) > 1:
                term = term.mean(axis, keepdim=True)
        return term.reshape(-1).expand(self._like().shape[-2])

    def _unknown(self, name: str) -> Tensor:
        """1 for every example in which a latent is not entirely known, else 0."""
        like, seen = self.terms()[1][kl_term(name)], self.batch.get(mask_of(name))
        if seen is None:
            return like.new_ones(self._like().shape[-2])
        missing = ~seen[..., :1]
        if self.program.real is not None and self.graph.timed[name]:
            missing = missing & self.program.real
        return missing.movedim(-2, -1).flatten(0, -2).any(0).to(like.dtype)

    def _with_free_bits(
        self, kl_weight: KLWeight, free_bits: FreeBits
    ) -> tuple[dict[str, float | Tensor], Tensor]:
        """The weights of the KL terms, 0 for those below their free bits, and the cost of these.

        A term below its free bits costs as much as if it were equal to them.
        """
        names = list(free_bits.nats)
        sums, rows = self.kl_totals(names)
        free_bits.sum_over_processes([sums, rows])
        weights = {name: weight_of(kl_weight, name) for name in self.plan.choices}
        cost = torch.zeros_like(sums[0])
        for i, (name, nats) in enumerate(free_bits.nats.items()):
            counts = (sums[i] > nats * rows[i]).to(sums.dtype)
            cost = cost + weights[name] * (1 - counts) * nats * self._unknown(name)
            weights[name] = weights[name] * counts
        return weights, cost

    def _reduced(self, kl_weight: KLWeight) -> Bound:
        """The bound with weighted KL terms: all remaining expectations, innermost first."""
        plan = self.plan
        terms, kls = self.terms()
        score = plan.scored
        weighted = plan.bound == "iwae"
        total = surrogate = log_weights = None
        if weighted or score:
            total = integrand(terms, kls, kl_weight)
        every = terms | kls
        summed: list[int] = []  # axes already reduced inside the mean over samples
        for name, axis in self.sequence():
            if name == S.name:
                if score:
                    assert total is not None
                    surrogate = self._score_surrogate(total, score, summed)
                if weighted:
                    assert total is not None
                    if math.prod(total.shape[:-4]) == 1:
                        log_weights = expand_axis(total, SAMPLES, plan.samples).reshape(
                            plan.samples, -1
                        )
                    share = expand_axis(total, SAMPLES, plan.samples).softmax(SAMPLES).detach()
                    total = expand_axis(total, SAMPLES, plan.samples)
                    total = ad.logsumexp(total, SAMPLES, keepdim=True) - math.log(plan.samples)
                    every = {key: contract(term, share, axis) for key, term in every.items()}
                else:
                    every = {
                        key: term.mean(axis, keepdim=True) if size(term, axis) > 1 else term
                        for key, term in every.items()
                    }
                    total = (
                        total.mean(axis, keepdim=True)
                        if total is not None and size(total, axis) > 1
                        else total
                    )
                continue
            weight, reduction = self.weight(name), plan.reduction(name)
            if reduction is not Reduction.EXPECTATION:
                assert total is not None
                logits = (
                    total + self.log_w(name)
                    if reduction is Reduction.LOG_EXPECTATION_EXP
                    else self.only_known(name, total)
                )
                logits = expand_axis(logits, axis, plan.size(Axis(name)))
                weight = logits.softmax(axis).detach()
                total = ad.logsumexp(logits, axis, keepdim=True)
            elif total is not None:
                total = contract(total, weight, axis)
            if surrogate is not None:
                surrogate = contract(surrogate, weight.detach(), axis)
            every = {key: contract(term, weight, axis) for key, term in every.items()}
            summed.append(axis)
        n = self._like().shape[-2]
        shown = {key: term.reshape(-1).expand(n) for key, term in every.items()}
        if weighted:
            assert total is not None
            value = total.reshape(-1).expand(n)
        else:
            value = integrand(
                {key: shown[key] for key in terms}, {key: shown[key] for key in kls}, kl_weight
            )
        if surrogate is not None:
            value = value + (surrogate - surrogate.detach()).reshape(-1)
        # A latent known in some rows has one term, the KL term.
        for name in [name for name in terms if name in plan.choices]:
            shown[kl_term(name)] = shown[kl_term(name)] - shown.pop(name)
        return Bound(value, shown, log_weights)

    def _score_surrogate(
        self, total: Tensor, names: Sequence[str], summed: Sequence[int]
    ) -> Tensor:
        """A term whose gradient is the score-function gradient.

        It has a leave-one-out baseline (VIMCO under iwae).

        ``summed`` are the axes (mixture components, values of a latent) that ``total`` is already
        summed over. All draws along these axes belong to one sample, so their log q are summed too.
        """
        log_q: Tensor | None = None
        for name in names:
            part = self.log_drawn(name)
            for axis in summed:
                part = part.sum(axis, keepdim=True) if size(part, axis) > 1 else part
            log_q = part if log_q is None else log_q + part
        assert log_q is not None
        k = self.plan.samples
        f = expand_axis(total, SAMPLES, k).detach()
        others = (f.sum(SAMPLES, keepdim=True) - f) / (k - 1)
        if self.plan.bound == "elbo":
            return ((f - others) * log_q).mean(SAMPLES, keepdim=True)
        # VIMCO's baseline for sample k: the bound with f_k replaced by the mean of the other f (a
        # geometric mean of weights).
        replaced = torch.where(
            torch.eye(k, dtype=torch.bool, device=f.device)[..., None, None, None],
            others.unsqueeze(SAMPLES),
            f.unsqueeze(SAMPLES - 1),
        )
        without = replaced.logsumexp(SAMPLES, keepdim=True).squeeze(SAMPLES)
        return ((f.logsumexp(SAMPLES, keepdim=True) - without) * log_q).sum(SAMPLES, keepdim=True)


def _component_axis(value: Tensor, slot: int) -> Tensor:
    """Move the components of a mixture, [.., N, k, d], to their enumeration axis, [k, …, N, d]."""
    value = value.movedim(-2, 0)
    return (
        value.reshape(value.shape[0], *[1] * (-slot - value.dim()), *value.shape[1:])
        if value.dim() < -slot
        else value
    )


def estimator(
    plan: Plan,
    factors: Mapping[str, nn.Module] | nn.ModuleDict,
    batch: Mapping[str, Tensor],
    noise: Mapping[str, Tensor],
    *,
    temperature: float | Tensor = 0.5,
    kl_weight: KLWeight = 1.0,
    chunk: int | None = None,
) -> Estimate | ParticleEstimate:
    """Compute one estimate of a plan; its ``bound`` method returns the bound.

    ``kl_weight`` is that of the bound, for the gradient "dreg". ``chunk`` is that of
    :func:`estimate`.
    """
    if plan.bound == "particles":
        return ParticleEstimate(plan, factors, batch, noise)
    scale = None
    if plan.gradient == "dreg":  # a first pass without gradient computes the importance weights
        with torch.no_grad():
            scale = Estimate(plan, factors, batch, noise, temperature=temperature).gradient_scale(
                kl_weight
            )
    return Estimate(plan, factors, batch, noise, temperature=temperature, scale=scale, chunk=chunk)


def estimate(
    plan: Plan,
    factors: Mapping[str, nn.Module] | nn.ModuleDict,
    batch: Mapping[str, Tensor],
    noise: Mapping[str, Tensor],
    *,
    temperature: float | Tensor = 0.5,
    kl_weight: KLWeight = 1.0,
    free_bits: FreeBits | None = None,
    chunk: int | None = None,
) -> Bound:
    """Estimate the plan's bound for this batch and noise, one number per example.

    With ``chunk``, the backward pass computes the values inside factors and recurrences again,
    ``chunk`` steps of a recurrence at a time, instead of keeping those of all steps.
    """
    found = estimator(
        plan, factors, batch, noise, temperature=temperature, kl_weight=kl_weight, chunk=chunk
    )
    return found.bound(kl_weight, free_bits)
