"""The densities of particles at all steps at once, for the gradient of their bound.

The filter needs the weights of a step before the next one, but not their gradients. It computes the
weights without gradients, and this module computes the same terms again from the values of all
steps: one batch of matrix products and of densities instead of one per step, and no gradient of
them inside the loop over time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aevb.declare.graph import Entry
from aevb.declare.notation import Ref
from aevb.derive.axes import join
from aevb.estimate.keys import mask_of
from aevb.estimate.particle_values import ParticleValues, Terms, terms_of_latent
from aevb.estimate.program import Program


class AllSteps:
    """The values of particles at every step, and their terms."""

    def __init__(self) -> None:
        self.now: dict[str, list[Tensor]] = {}
        self.before: dict[str, list[Tensor]] = {}  # values of a step before, after resampling
        self.raws: dict[str, dict[int, Tensor]] = {}  # outputs of the networks of q, by step
        self.lagged: dict[str, Tensor] = {}

    def add(self, values: ParticleValues, t: int) -> None:
        """Keep the values of a step."""
        shape = (values.k, 1, values.n)
        for name, value in values.now.items():
            if "[" in name:
                continue
            self.now.setdefault(name, []).append(value)
            before = values.before.get(name)
            if before is None:
                before = value.new_zeros(1, 1, 1, 1).expand(*shape, value.shape[-1])
            self.before.setdefault(name, []).append(before)
        for (side, _), parts in values._here.items():
            for part in parts if side == "q" else ():
                if part.raw is not None:
                    self.raws.setdefault(part.entry.id, {})[t] = part.raw

    def terms(self, values: ParticleValues) -> Terms:
        """The terms of variables with a time axis, [K or 1, T, N or 1, 1]."""
        graph, plan, batch = values.graph, values.plan, values.batch
        outside = values.program
        program = Program(
            graph,
            values.factors,
            batch,
            noise=values.noise,
            steps=values.steps,
            q_draws=frozenset(plan.choices),
            hook=self._read,
        )
        program.values |= outside.values
        program.values |= {name: join(parts) for name, parts in self.now.items()}
        program.raws = {
            entry.id: values.program.raws[entry.id]
            for name in plan.choices
            for entry in graph.q[name].values()
            if entry.id in values.program.raws
        } | {entry_id: self._joined(parts) for entry_id, parts in self.raws.items()}
        self.lagged = {name: join(parts) for name, parts in self.before.items()}
        found: Terms = {}
        for name in graph.stochastic:
            if not graph.timed[name]:
                continue
            latent, present = name in plan.choices, batch.get(mask_of(name))
            value = program.values[name]
            log_p = program.log_prob("p", name, value, None if latent else present)
            if not latent:
                found[name] = log_p
                continue
            log_q = program.log_prob("q", name, value)
            found |= terms_of_latent(name, log_q - log_p, log_p, present)
        if program.real is not None:
            found = {
                name: torch.where(program.real, term, torch.zeros_like(term))
                for name, term in found.items()
            }
        return found

    def _joined(self, parts: dict[int, Tensor]) -> Tensor:
        """The outputs of an entry at all steps, or at the only one that it rules.

        The rule for all steps does not hold at the first one if that has its own.
        """
        if len(parts) == 1:
            return next(iter(parts.values()))
        zero = torch.zeros_like(next(iter(parts.values())))
        return join([parts.get(t, zero) for t in range(max(parts) + 1)])

    def _read(self, entry: Entry, ref: Ref, value: Tensor) -> Tensor:
        """A parent at the step before is that of the particle's ancestor."""
        return self.lagged[ref.name] if ref.lag and ref.name in self.lagged else value
