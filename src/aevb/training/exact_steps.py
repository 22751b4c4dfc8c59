"""Iterations over all rows with an exact objective.

They are closed-form EM, and L-BFGS on the exact evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aevb.evidence.structure import Structure
from aevb.training import schedules
from aevb.training.checkpoint import EM, MLE, State
from aevb.training.em import Regressions, Responsibilities
from aevb.training.em.acceleration import GAINS, NoEvidenceError, converged
from aevb.training.em.factors import Rows
from aevb.training.em.iterations import Iterations
from aevb.training.events import CONVERGED, FLOOR, LEFT_ALONE, NOT_CONVERGED, Event
from aevb.training.job import Job
from aevb.training.maximum_likelihood import Likelihood
from aevb.training.objective import Objective
from aevb.training.schedules import Phase
from aevb.training.step import Stepper
from aevb.training.step_inputs import Kind, inputs_of
from aevb.training.trouble import what_failed


def left_alone(reason: str) -> Event:
    return Event(
        LEFT_ALONE,
        "q",
        f"em() leaves q as it is: {reason}.",
        "To train q, fit again with alternate() or joint().",
    )


class ExactSteps(Stepper):
    """Iterations over all rows."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.not_recorded = (
            f"{job.settings.schedule} computes the objective exactly, without an estimate of the "
            f"bound"
        )

    def what_failed(self, step: int, phase: Phase) -> str:
        """Name the rows whose evidence is not finite."""
        job = self.job
        rows = torch.arange(job.source.n)[job.world.share(job.source.n)]
        inputs = inputs_of(Kind.BATCH, job.source.take(rows))
        objective = Objective(
            job.model,
            job.plan,
            job.source,
            job.source.n,
            job.settings,
            job.labelled,
            job.classes,
            job.em,
        )
        return what_failed(job, objective, inputs, rows, self.active(phase), self._broken())


class EMSteps(ExactSteps):
    """Exact EM.

    Compute the posterior's statistics over all rows, then set every factor of p in closed form.
    """

    def __init__(self, job: Job, em: Regressions | Responsibilities) -> None:
        super().__init__(job)
        assert isinstance(job.settings.schedule, schedules.em)
        self.em, self.schedule = em, job.settings.schedule
        self.iterations: Iterations | None = None  # None before the first step
        self.kept: dict[str, Tensor] = {}  # their state from a checkpoint
        self.lost: str | None = None  # why an iteration failed
        self.settled: Tensor | None = None  # the parameters that the model and q have

    def step(self, step: int, phase: Phase, rate: float) -> None:
        self.tally.begin(step)
        with torch.no_grad():
            try:
                if self.iterations is None:
                    fresh, rows = (
                        step == 0 and self.model.untouched(),
                        Rows(self.source, self.world),
                    )
                    self.iterations = Iterations(
                        self.em,
                        rows,
                        self.schedule,
                        self.settings.seed,
                        fresh=fresh,
                        tensors=self.kept,
                    )
                evidence = self.iterations.step()
            except NoEvidenceError as error:
                self.lost = str(error)
                self.tally.fail()
                return
        self.tally.set(["evidence"], [evidence])

    @property
    def converged(self) -> bool:  # type: ignore[override]
        gains = (
            self.kept.get(GAINS, torch.zeros(0)).tolist()
            if self.iterations is None
            else self.iterations.ascent.gains
        )
        return converged(gains, self.schedule.tol)

    def remarks(self, taken: int, total: int) -> list[Event]:
        tol, ended = self.schedule.tol, self.converged
        if ended or taken == total:
            self.settle_model()
        found = [] if self.left_alone is None else [left_alone(self.left_alone)]
        if (ended or taken == total) and self.iterations is not None:
            note = self.iterations.method.told_floor(self.iterations.ascent.point)
            found += [] if note is None else [Event(FLOOR, "p", note)]
        if ended:
            text = (
                f"em() converged after {taken} iterations: the last ones raised the mean evidence "
                f"by less than tol={tol:g} nats."
            )
            found.append(Event(CONVERGED, "run", text))
        elif taken == total and tol > 0:
            text = (
                f"em() ended after {taken} iterations, as asked, before it converged "
                f"(tol={tol:g}); more steps= would raise the evidence."
            )
            found.append(Event(NOT_CONVERGED, "run", text))
        return found

    def settle_model(self) -> None:
        """Write the current parameters into the model, and set q to the posterior if possible.

        This is called before the model is read, not after every iteration.
        """
        if self.iterations is not None and self.settled is not self.iterations.ascent.point:
            with torch.no_grad():
                self.iterations.write()
                self.settled = self.iterations.ascent.point
                self.left_alone = self.em.tighten(
                    self.source.take(torch.arange(min(2, self.source.n)))
                )

    def close(self) -> None:
        if self.iterations is not None:
            with torch.no_grad():
                self.iterations.write()

    def state(self) -> State:
        return {EM: self.kept if self.iterations is None else self.iterations.ascent.tensors()}

    def restore(self, state: State, metrics: Mapping[str, Any]) -> None:
        self.kept = state.get(EM, {})
        self.tally.restore(metrics, torch.float64)

    def what_failed(self, step: int, phase: Phase) -> str:
        return super().what_failed(step, phase) if self.lost is None else f"{self.lost}."


class LikelihoodSteps(ExactSteps):
    """L-BFGS on the exact evidence of all rows."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.likelihood: Likelihood | None = None  # None before the first step
        self.known: dict[str, Tensor] = {}  # its state from a checkpoint

    @property
    def tol(self) -> float:
        return self.settings.schedule.tol  # type: ignore[attr-defined]

    def step(self, step: int, phase: Phase, rate: float) -> None:
        self.tally.begin(step)
        if self.likelihood is None:
            self.likelihood = Likelihood(
                self.model, self.source, self.world, self.active(phase), self.known
            )
        found = self.likelihood.step(self.tol)
        if found is None:
            self.tally.fail()
            return
        self.tally.set(["evidence", "gradient"], found)

    @property
    def converged(self) -> bool:  # type: ignore[override]
        if self.likelihood is not None:
            return self.likelihood.ended(self.tol)
        return bool(self.known["converged"]) if self.known else False

    def remarks(self, taken: int, total: int) -> list[Event]:
        if self.likelihood is None:
            return []
        search = self.likelihood.search
        told = f"after {taken} iterations of L-BFGS on all rows ({search.evaluations} evaluations)"
        if search.converged(self.tol):
            text = (
                f"mle() converged {told}: the last one raised the mean evidence by less than "
                f"tol={self.tol:g} nats."
            )
            structure = Structure(self.model, self.job.plan.clamped, self.job.plan.completed)
            remedy = ""
            if structure.carried or structure.discrete:
                text += " This is a local maximum"
                if self._random_start():
                    text += ", and another start may find a higher one:"
                    remedy = (
                        'max(fit(…, seeds=8), key=lambda run: run.history["evidence"][-1]) takes '
                        "the best of 8."
                    )
                else:
                    text += "."
            return [Event(CONVERGED, "run", text, remedy)]
        if self.converged:
            text = (
                f"mle() ended {told} without having converged (tol={self.tol:g}): no step raises "
                f"the evidence any more, although its gradient is not "
                "0. The likelihood may have no maximum (a scale that goes to 0), or too little "
                "precision is left."
            )
            return [Event(NOT_CONVERGED, "run", text)]
        if taken == total and self.tol > 0:
            text = (
                f"mle() ended {told}, as asked, before it converged (tol={self.tol:g}); more "
                f"steps= would raise the evidence."
            )
            return [Event(NOT_CONVERGED, "run", text)]
        return []

    def _random_start(self) -> bool:
        """Return whether p has weights, whose initial values depend on the seed."""
        theta = {id(parameter) for parameter in self.model.theta() if parameter.requires_grad}
        return any(
            id(parameter) in theta and ".net." in name
            for name, parameter in self.model.named_parameters()
        )

    def state(self) -> State:
        search = self.known
        if self.likelihood is not None:
            search = self.likelihood.tensors() | {"converged": torch.tensor(self.converged)}
        return {MLE: search}

    def restore(self, state: State, metrics: Mapping[str, Any]) -> None:
        self.known = state.get(MLE, {})
        self.tally.restore(metrics, torch.float64 if self.known else self.dtype)
