"""Steps of Adam on batches, run eagerly or from a recording of their operations.

The host first writes the inputs of a step (rows, random seeds, learning rate, KL weight) into
tensors. The rest of the step is a function of tensors alone. A step with a non-finite loss or
gradient changes nothing. On a GPU, the steps after it change nothing either, until the host checks
for failures. It does so when it reads the metrics, not after every step, and then returns to the
failed step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.compiled_step import CompiledStep, compile_step
from aevb.compiled_step.adam import Adam
from aevb.compiled_step.cuda_streams import CudaStreams
from aevb.compiled_step.fused_adam import (
    ALIGNED,
    MOST,
    MovedTogether,
    Parts,
    Vector,
    judge,
    laid_out,
)
from aevb.compiled_step.gradients import held_fixed
from aevb.compiled_step.recording import Found, gradients_of
from aevb.data.sources import Resident
from aevb.derive.plan import Layout
from aevb.estimate import noise as noises
from aevb.estimate.batch import Batch
from aevb.estimate.metric_names import OBJECTIVE
from aevb.runtime import private_torch
from aevb.training.checkpoint import CARRIED, State
from aevb.training.cropping import cropped
from aevb.training.events import NOT_COMPILED, Event
from aevb.training.exact_steps import left_alone
from aevb.training.job import Job
from aevb.training.objective import Objective
from aevb.training.purity import why_not_recorded
from aevb.training.row_order import seed_of
from aevb.training.schedules import Phase
from aevb.training.staging import Gathered, Staged
from aevb.training.step import Stepper
from aevb.training.step_inputs import ALL, COUNT, START, Input, Inputs, Kind, inputs_of
from aevb.training.trouble import finite, what_failed
from aevb.training.windows import Carried, joined

REFERENCE = "reference"  # in a checkpoint, a weight of the posterior that an M-step holds fixed
# Record a phase after this many steps, if at least this many remain.
RECORD_AFTER, RECORD_FOR = (10, 1000)


class GradientSteps(Stepper):
    """Take steps of Adam.

    The state is the optimiser's, and the posterior that an M-step holds fixed.
    """

    streams: CudaStreams | None = None  # only for steps that are captured as CUDA graphs

    def __init__(self, job: Job, places: int = 1) -> None:
        """``places`` is the number of steps whose inputs the host loads at a time."""
        super().__init__(job)
        settings, order = job.settings, job.order
        self.objective = Objective(
            job.model,
            job.plan,
            job.source,
            order.batch,
            settings,
            job.labelled,
            job.classes,
            job.em,
            job.world,
        )
        self.waits = on_gpu = self.device.type == "cuda"
        assert settings.lr is not None
        self.rates = (
            torch.full((places, ALIGNED), settings.lr, device=self.device) if on_gpu else None
        )
        self.adam = Adam(settings.lr if self.rates is None else self.rates[0, 0])
        self.noise, self.drawing = torch.Generator(self.device), torch.Generator(self.device)
        self.rows = torch.zeros(places, order.batch, dtype=torch.long, device=self.device)
        names = job.plan.choices if isinstance(settings.beta, Mapping) else (ALL,)
        # By latent, or one for all; empty if the KL terms have no weights.
        self.kl_weights = {
            name: torch.ones(places, ALIGNED, device=self.device, dtype=self.dtype)
            for name in (names if settings.weights_kl else ())
        }
        self.carried: Carried | None = None  # from window to window
        if job.windows is not None:
            first = job.windows.read(job.windows.rows(0), job.windows.times(0))
            self.carried = Carried(job.windows, job.plan, first, job.model.factors, places)
        self.layouts: dict[int, Layout] = {}  # by the number of time steps in a batch
        self.staged: Staged | Gathered | None = self._staging()  # prefetched batches
        self.not_recorded = why_not_recorded(job.model, settings, job.plan, job.world.size)
        self.compiled: dict[
            str, CompiledStep | None
        ] = {}  # by phase; None where a step could not be recorded
        self.not_compiled: list[Event] = []  # what could not be recorded or compiled
        self.ends_compiled = (
            settings.compile
            and job.world.size == 1
            and self.not_recorded is None
            and self.device.type in ("cpu", "cuda")
        )
        self.moving: dict[
            str, MovedTogether | None
        ] = {}  # by phase; None if Adam's update is not one function
        self.uncompiled: list[
            str
        ] = []  # parts of Adam's update that could not be compiled, and why
        self.alone = True  # whether the model is trained by itself, not in a bundle
        self.left = 0  # remaining steps
        # Whether the data of a step are random.
        self.draws = bool(job.source.fresh or settings.distort)
        self.seen: dict[str, int] = {}  # steps of each phase that were taken one by one

    def _staging(self) -> Staged | Gathered | None:
        if (
            self.job.windows is None
            and self.world.size == 1
            and Gathered.pays(self.source, self.order)
        ):
            assert isinstance(self.source, Resident)
            return Gathered(self.source, self.order)
        return None

    # Taking a step --------------------------------------------------------------------------------

    def step(self, step: int, phase: Phase, rate: float) -> None:
        self.load(step, [rate])
        if self.settings.schedule.objective == "em" and (
            phase.position == 0 or self.objective.reference is None
        ):
            self.objective.hold_posterior()
            assert self.job.em is not None
            self.left_alone = self.job.em.tighten(
                self.source.take(torch.arange(min(2, self.source.n)))
            )
        self.seen[phase.name] = self.seen.get(phase.name, 0) + 1
        self.advance(phase)

    def load(self, step: int, rates: Sequence[float]) -> None:
        """Load the inputs of the next steps from the host, one step per learning rate."""
        self.tally.begin(step)
        self._load_inputs(step, rates)

    def _load_inputs(self, step: int, rates: Sequence[float]) -> None:
        s, count = self.settings, len(rates)
        self.left = self.job.total - step
        if self.carried is not None:
            self.carried.load(step, count)
            self._put_rows(torch.stack([self.carried.windows.rows(step + i) for i in range(count)]))
        elif self.staged is not None:
            self.staged.load(step, count)
        else:
            self._put_rows(self.order.rows(step, count).view(count, -1))
        self._seed(self.noise, "noise", step)
        if self.draws:
            self._seed(self.drawing, "data", step)
        for name, places in self.kl_weights.items():
            weights = [
                s.beta_of(name) * s.kl_weight(step + i, self.job.total) for i in range(count)
            ]
            places[:count, 0].copy_(torch.tensor(weights, dtype=self.dtype), non_blocking=True)
        if self.rates is not None:
            self.rates[:count, 0].copy_(torch.tensor(rates), non_blocking=True)
        else:
            self.adam.rate = rates[0]

    def _put_rows(self, rows: Tensor) -> None:
        self.rows = rows

    def _seed(self, generator: torch.Generator, word: str, step: int) -> None:
        """Seed a generator from (seed, step)."""
        generator.manual_seed(seed_of(self.settings.seed, word, step))

    def inputs(self, place: int) -> dict[Input, Tensor]:
        """Return all inputs of a step besides the parameters.

        They are the batch, the noise, the distorted copy and the KL weights.
        """
        s, n = self.settings, self.order.batch
        carried = self.carried
        if carried is not None:
            batch = carried.windows.read(self.rows[place], carried.times[place])
            uniform = self.source.uniform(batch, n, self.drawing)
        elif self.staged is not None:
            batch = self.staged.batch(place)
            uniform = self.source.uniform(batch, n, self.drawing)
        else:
            batch, uniform = self.source.draw(
                self.rows[place], generator=self.drawing, share=self.world.share(n)
            )
        inputs = inputs_of(Kind.BATCH, batch) | inputs_of(Kind.UNIFORM, uniform)
        if s.schedule.objective == "bound":
            _, steps = self.model._extent(batch)
            if steps not in self.layouts:
                self.layouts[steps] = self.job.plan.layout(n, steps, dropout=True)
            drawn = noises.draw(
                self.layouts[steps], generator=self.noise, device=self.device, dtype=self.dtype
            )
            inputs |= inputs_of(Kind.NOISE, self.world.rows_of(drawn, n))
        if s.agree:
            moved = self._distorted(self.source.prepare(batch, uniform))
            inputs |= inputs_of(Kind.MOVED, moved)
        if carried is not None:
            window = {START: carried.start[place], COUNT: carried.count[place]}
            inputs |= inputs_of(Kind.WINDOW, window) | inputs_of(Kind.BEFORE, carried.values)
        weights = {name: places[place, 0] for name, places in self.kl_weights.items()}
        inputs |= inputs_of(Kind.KL_WEIGHT, weights)
        return cropped(inputs) if self.job.crops else inputs

    def _distorted(self, batch: Batch) -> Batch:
        """Return x̃: x with a small random rotation, shear, scale and shift."""
        graph, n, moved = self.model.graph, self.order.batch, {}
        for name, distortion in self.settings.distort.items():
            draws = distortion.draws(n, self.drawing, batch[name])[self.world.share(n)]
            moved[name] = distortion(
                batch[name][0],
                draws,
                binary=graph.rule("p", name).spec.support is constraints.boolean,
            ).unsqueeze(0)
        return moved

    def _arithmetic(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the objective and the metrics as a function of tensors alone.

        The tally names the metrics.
        """
        with torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.settings.precision == "bf16",
            cache_enabled=False,
        ):
            objective, bound, after = self.objective.and_after(inputs)
        name = {"evidence": "evidence", "em": "expected"}.get(
            self.settings.schedule.objective, self.settings.bound
        )
        values = {name: bound.value, **bound.terms}
        measured = (
            torch.stack([value.detach() for value in values.values()]).sum(-1) / self.order.batch
        )
        names = list(values)
        if self.settings.records_objective:
            names.append(OBJECTIVE)
            measured = torch.cat([measured, objective.detach().to(measured.dtype)[None]])
        self.tally.rename([*names, "gradient"])
        if self.carried is not None:
            measured = joined(measured, inputs[Kind.WINDOW, COUNT], after)
        return objective, measured

    def _evaluate(self, phase: Phase, inputs: Inputs) -> Found:
        """Return the objective, the metrics, and the gradients of the active parameters."""
        if phase.name not in self.compiled and self._worth_recording(phase):
            found = self._record_and_run(phase, inputs)
            if found is not None:
                return found
        recorded = self.compiled.get(phase.name)
        if recorded is not None and recorded.fits(inputs):
            return recorded(inputs)
        with held_fixed(
            p for name, group in self.groups.items() if not getattr(phase, name) for p in group
        ):
            objective, measured = self._arithmetic(inputs)
            return objective.detach(), measured, gradients_of(objective, self.active(phase))

    def _record_and_run(self, phase: Phase, inputs: Inputs) -> Found | None:
        """Record the step of a phase and run it.

        If that fails, return None, with a note. Steps then run eagerly.
        """
        try:
            step = self.compiled[phase.name] = self.record(phase, inputs)
            return step(inputs)
        # A failed optimisation must not stop a run. A mistake of the model fails again in the eager
        # step.
        except Exception as error:
            self.compiled[phase.name] = None
            cause = str(error).partition("\n")[0] or type(error).__name__
            self.not_compiled.append(
                Event(
                    NOT_COMPILED,
                    "run",
                    f"Steps run as they are written, since they could not be recorded: {cause}",
                )
            )
            return None

    def record(
        self,
        phase: Phase,
        inputs: Inputs,
        copies: Sequence[Tensor] | None = None,
        streams: CudaStreams | None = None,
    ) -> CompiledStep:
        """Record a step of this model, or of several models.

        ``copies`` are the stacked parameters of several models.
        """
        fuse, streams = bool(self.settings.compile), self.streams if streams is None else streams
        return compile_step(
            self._arithmetic,
            self.model,
            inputs,
            self.active(phase),
            fuse=fuse,
            streams=streams,
            copies=copies,
        )

    def _worth_recording(self, phase: Phase) -> bool:
        if self.not_recorded is not None or not self.alone or self.job.crops:
            return False
        if self.job.too_long is not None:
            if self.settings.compile:
                self._note_too_long(self.job.too_long)
            return False
        return bool(self.settings.compile) or (
            self._often_enough(phase) and self.left >= RECORD_FOR
        )

    def _note_too_long(self, reason: str) -> None:
        event = Event(NOT_COMPILED, "run", f"Steps run as they are written: {reason}.")
        if event not in self.not_compiled:
            self.note(event)

    def _often_enough(self, phase: Phase) -> bool:
        return self.seen[phase.name] >= RECORD_AFTER

    def _attempt(self, phase: Phase, inputs: Inputs) -> Found | None:
        """Return the objective, metrics and gradients of a step.

        Return None on every rank if any rank's evidence is undefined (a covariance is no longer
        positive definite).
        """
        if self.settings.schedule.objective != "evidence":
            return self._evaluate(phase, inputs)
        try:
            found = self._evaluate(phase, inputs)
        except LinAlgError:
            found = None
        return None if self.world.any(found is None) else found

    def advance(self, phase: Phase, place: int = 0, inputs: Inputs | None = None) -> None:
        """Take the step whose inputs the host has loaded at this place."""
        active, tally = self.active(phase), self.tally
        attempt = self._attempt(phase, self.inputs(place) if inputs is None else inputs)
        if attempt is None:
            tally.fail()
            return
        total, measured, found = attempt
        after: list[Tensor] = []
        if self.carried is not None:
            measured, after = self.carried.split(measured)
        moving = self._moving(phase, active) if self.ends_compiled and self.alone else None
        if moving is not None:
            rate = (
                torch.tensor(self.adam.rate, dtype=self.dtype)
                if self.rates is None
                else self.rates[place, 0]
            )
            tally.make_room()
            counts = tally.failed, tally.sums, tally.taken, tally.moved
            moving.finish(
                dict(zip(active, found, strict=True)),
                rate,
                self.settings.clip,
                total,
                measured,
                counts,
            )
            self._carry(after)
            return
        pairs = [
            (parameter, laid_out(gradient, parameter))
            for parameter, gradient in zip(active, found, strict=True)
            if gradient is not None
        ]
        gradients = [gradient for _, gradient in pairs]
        self.world.sum(gradients)
        self.world.sum([total])
        norm = _norm(gradients)
        tally.make_room()
        if self.waits:
            judge(
                total,
                norm / self.world.size,
                measured,
                tally.failed,
                tally.sums,
                tally.taken,
                tally.moved,
            )
        elif math.isfinite(float(norm) + float(total)):
            tally.add([*measured.tolist(), float(norm) / self.world.size])
        else:
            tally.fail()
            return
        if self.settings.clip is not None:
            gradients = private_torch.scaled(
                gradients, (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
            )
        if self.rates is not None:
            self.adam.rate = self.rates[place, 0]
        self.adam.update(
            [parameter for parameter, _ in pairs], gradients, tally.failed if self.waits else None
        )
        self._carry(after)

    def _carry(self, after: Sequence[Tensor]) -> None:
        if self.carried is not None:
            self.carried.keep(after, self.tally.failed)

    def _moving(self, phase: Phase, active: Sequence[nn.Parameter]) -> MovedTogether | None:
        """Return a phase's parameters for the compiled update.

        None until Adam has state for all of them, or if their step counts differ.
        """
        if phase.name not in self.moving:
            states = [
                self.adam.state[parameter] for parameter in active if parameter in self.adam.state
            ]
            if len(states) < len(active):
                return None
            together = len({float(state["step"]) for state in states}) == 1
            self.moving[phase.name] = self._moved_together(phase, active) if together else None
        return self.moving[phase.name]

    def _moved_together(self, phase: Phase, active: Sequence[nn.Parameter]) -> MovedTogether | None:
        return Parts(active, self.adam, self.uncompiled) if len(active) <= MOST else None

    def remarks(self, taken: int, total: int) -> list[Event]:
        found = [] if self.left_alone is None else [left_alone(self.left_alone)]
        prefix = "compile=True: " if self.settings.compile else "A step: "
        unfused = [
            remark for step in self.compiled.values() if step is not None for remark in step.remarks
        ] + self.uncompiled
        return (
            found
            + self.not_compiled
            + [
                Event(NOT_COMPILED, "run", f"{prefix}{remark}.")
                for remark in dict.fromkeys(unfused)
            ]
        )

    def note(self, event: Event) -> None:
        """Keep an event for :meth:`remarks`."""
        self.not_compiled.append(event)

    def adopt(self, phase: Phase, step: CompiledStep) -> None:
        """Use the compiled step of a bundle for this phase."""
        self.compiled[phase.name] = step

    def close(self) -> None:
        """Release graphs and threads, and give every parameter memory of its own again."""
        if self.staged is not None:
            self.staged.close()
        if not self.alone or any(isinstance(moving, Vector) for moving in self.moving.values()):
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()

    # State ----------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the optimiser's moments, and the weights of an M-step's fixed posterior."""
        found, held = self.adam.tensors(self.names), self.objective.reference
        for name, tensor in () if held is None else held.state_dict().items():
            found.setdefault(name, {})[REFERENCE] = tensor
        return found if self.carried is None else found | {CARRIED: dict(self.carried.values)}

    def restore(self, state: State, metrics: Mapping[str, Any]) -> None:
        moments = {owner: dict(tensors) for owner, tensors in state.items()}
        carried = moments.pop(CARRIED, None)
        if self.carried is not None and carried is not None:
            self.carried.restore(carried)
        reference = {
            owner: tensors.pop(REFERENCE)
            for owner, tensors in moments.items()
            if REFERENCE in tensors
        }
        self.adam.restore(moments, {name: parameter for parameter, name in self.names.items()})
        if reference:
            self.objective.hold_posterior(reference)
        self.tally.restore(metrics, self.dtype)

    # Trouble --------------------------------------------------------------------------------------

    def _judged(self, steps: Iterable[int]) -> bool:
        return any(self._finite(step) for step in steps)

    def _finite(self, step: int) -> bool:
        self._load_inputs(step, [0.0])  # this is a test, not a step
        return finite(self.objective, self.inputs(0))

    def what_failed(self, step: int, phase: Phase) -> str:
        """Repeat a failed step without the optimiser, and name what is not finite.

        The message names the term and the rows.
        """
        self._load_inputs(step, [0.0])
        windows = self.job.windows
        rows = self.order.rows(step) if windows is None else windows.rows(step)
        rows = rows[self.world.share(self.order.batch)].cpu()
        return what_failed(
            self.job, self.objective, self.inputs(0), rows, self.active(phase), self._broken()
        )


def _norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together."""
    if gradients[0].device.type == "cpu":
        # A dot product runs on all cores; torch's norm of a tensor does not.
        return (
            torch.stack(
                [torch.dot(flat, flat) for flat in (gradient.reshape(-1) for gradient in gradients)]
            )
            .sum()
            .sqrt()
        )
    return torch.nn.utils.get_total_norm(gradients)
