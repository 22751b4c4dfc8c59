"""The objective of a training step, as a function of tensors alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aevb.data.sources import Source
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch
from aevb.estimate.before import Before
from aevb.estimate.bound import Bound
from aevb.estimate.estimators import Estimate, estimate
from aevb.estimate.free_bits import FreeBits
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.evidence.exact import exact_evidence
from aevb.model import Model
from aevb.training.distributed import World
from aevb.training.em import Regressions, Responsibilities
from aevb.training.settings import Settings
from aevb.training.step_inputs import ALL, START, Inputs, Kind, values_of


class Objective:
    """The schedule's objective plus the settings' terms.

    The schedule's objective is the bound, the exact evidence or EM's E[log p(x, z)]. The objective
    is the sum over the given rows divided by ``rows``, the size of the whole batch: a process with
    a part of the batch gets its part of the mean.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        source: Source,
        rows: int,
        settings: Settings,
        labelled: Sequence[str],
        classes: Sequence[str],
        em: Regressions | Responsibilities | None,
        world: World | None = None,
    ) -> None:
        self.model, self.plan, self.source, self.rows, self.settings = (
            model,
            plan,
            source,
            rows,
            settings,
        )
        self.labelled, self.classes, self.em = labelled, classes, em
        nats = {name: settings.free_bits_of(name) for name in plan.choices}
        nats = {name: bits for name, bits in nats.items() if bits}
        self.free_bits = FreeBits(nats, (world or World()).sum) if nats else None
        self._reference: Model | None = None  # whose posterior an M-step holds fixed

    @property
    def reference(self) -> Model | None:
        """The model whose posterior an M-step holds fixed, or None before the first E-step."""
        return self._reference

    def hold_posterior(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Hold the posterior of the current weights fixed, or of a checkpoint's ``weights``."""
        self._reference = copy.deepcopy(self.model).eval()
        if weights is not None:
            self._reference.load_state_dict(weights)

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Bound]:
        """The objective, and the bound of every row."""
        objective, bound, _ = self.and_after(inputs)
        return objective, bound

    def and_after(self, inputs: Inputs) -> tuple[Tensor, Bound, dict[str, Tensor]]:
        """The objective, the bound of every row, and what the next window reads."""
        after: dict[str, Tensor] = {}
        s = self.settings
        batch, uniform, noise, moved = (
            values_of(kind, inputs) for kind in (Kind.BATCH, Kind.UNIFORM, Kind.NOISE, Kind.MOVED)
        )
        batch = self.source.prepare(batch, uniform)
        if s.schedule.objective == "evidence":
            bound = Bound(exact_evidence(self.model, batch), {})
        elif s.schedule.objective == "em":
            bound = self._expected(batch)
        elif s.window is not None:
            bound, after = self._of_window(inputs, batch, noise)
        else:
            weights = values_of(Kind.KL_WEIGHT, inputs)
            bound = estimate(
                self.plan,
                self.model.factors,
                batch,
                noise,
                temperature=s.temperature,
                kl_weight=weights.get(ALL, weights) if weights else 1.0,
                free_bits=self.free_bits,
                chunk=s.checkpoint_time,
            )
        objective = bound.objective.sum() / self.rows
        if s.classify:
            objective = objective + s.classify * self._classification(batch) / self.rows
        if s.agree:
            objective = objective + s.agree * self.agreement(batch, batch | moved) / self.rows
        return objective, bound, after

    def _of_window(
        self, inputs: Inputs, batch: Batch, noise: Mapping[str, Tensor]
    ) -> tuple[Bound, dict[str, Tensor]]:
        """The bound of a window, and what the next window reads of it."""
        weights = values_of(Kind.KL_WEIGHT, inputs)
        estimated = Estimate(
            self.plan,
            self.model.factors,
            batch,
            noise,
            temperature=self.settings.temperature,
            before=Before.of(
                inputs[Kind.WINDOW, START].reshape(1, 1, 1), values_of(Kind.BEFORE, inputs)
            ),
            chunk=self.settings.checkpoint_time,
        )
        return estimated.bound(weights.get(ALL, weights) if weights else 1.0), estimated.after()

    def _expected(self, batch: Batch) -> Bound:
        """E[log p(x, z)] under the posterior that the last E-step found, held fixed."""
        assert self.reference is not None
        with torch.no_grad():
            frozen, _ = Responsibilities(self.reference).posterior(batch)
        assert isinstance(self.em, Responsibilities)
        expected, evidence = self.em.expected(batch, frozen)
        return Bound(expected, {"evidence": evidence.detach()})

    def _inference(self, batch: Batch) -> Program:
        """q's factors that are functions of the data."""
        graph = self.model.graph
        known = (*graph.observed, *graph.given)
        program = Program(graph, self.model.factors, batch, steps=self.model._extent(batch)[1])
        program.values |= {name: batch[name] for name in known}
        program.run(graph.function_stages(known), lambda *_: torch.zeros(()))
        return program

    def _classification(self, batch: Batch) -> Tensor:
        """The sum over the batch of log q(y|x) where the label is known.

        The bound of a row with a known label does not train q(y|x).
        """
        program = self._inference(batch)
        total = self._zero()
        for name in self.labelled:
            log_q = program.log_prob("q", name, batch[name])
            for mask in (
                batch.get(mask_of(name)),
                program.real if self.model.graph.timed[name] else None,
            ):
                log_q = (
                    log_q
                    if mask is None
                    else torch.where(mask[..., :1], log_q, torch.zeros_like(log_q))
                )
            total = total + log_q.sum()
        return total

    def agreement(self, batch: Batch, moved: Batch) -> Tensor:
        """The sum over the batch of Σ_y q(y|x) log q(y|x̃), with q(y|x) held fixed.

        The label replaces q(y|x) where it is known.
        """
        here, there = self._inference(batch), self._inference(moved)
        batch_rows = self.model._extent(batch)[0]
        total = self._zero()
        for name in self.classes:
            before: Any = here.distribution("q", name)[1]
            after: Any = there.distribution("q", name)[1]
            target = before.probs.detach()
            if name in batch:
                seen = batch.get(mask_of(name))
                target = batch[name] if seen is None else torch.where(seen, batch[name], target)
            # A root of q is the same in every row.
            total = total + (target * after.logits).sum(-1).expand(1, batch_rows).sum()
        return total

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=self.source.like.dtype, device=self.source.like.device)
