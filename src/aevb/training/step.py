"""One optimisation step, as the device takes it.

What a step needs from the host (its rows, the seeds of what it draws, the learning rate, the weight of the KL terms) is put into
tensors first; the rest is a function of tensors alone. On a GPU that function is captured as a graph, ten steps at a time and for
each phase of the schedule, and replayed, so that a step costs what its kernels cost.

A step whose loss or gradient is not finite changes nothing. On a GPU nor does any step after it, until the host has looked: it looks
when it reads the metrics, not at every step, and then goes back to the step that failed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.data.sources import Resident, Source
from aevb.declare.families import Bernoulli
from aevb.declare.gradients import held_fixed
from aevb.derive.plan import Plan
from aevb.estimate import noise as noises
from aevb.estimate.batch import Batch
from aevb.model import Model
from aevb.training import flat, schedules
from aevb.training.adam import Adam
from aevb.training.capture import AT_ONCE, WARM_UP, Lane, lane
from aevb.training.checkpoint import CheckpointError
from aevb.training.distributed import World
from aevb.training.em import Regressions, Responsibilities
from aevb.training.em.acceleration import NoEvidenceError, converged
from aevb.training.em.factors import Rows
from aevb.training.em.iterations import Iterations
from aevb.training.maximum_likelihood import Likelihood
from aevb.training.objective import Objective
from aevb.training.recording import Found, Recording, gradients_of, own_part, shapes
from aevb.training.row_order import Order, seed_of
from aevb.training.schedules import Phase
from aevb.training.settings import Settings
from aevb.training.staging import Gathered, Staged

MLE = "mle/"  # in a checkpoint, before the names of what L-BFGS remembers
RECORD_AFTER, RECORD_FOR = 10, 1000  # steps of a phase before its arithmetic is recorded, and steps to come that make it worth the seconds


class Stepper:
    """Takes steps, and keeps what they need from one to the next: the optimiser, and the posterior that an M-step holds fixed."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        source: Source,
        order: Order,
        settings: Settings,
        world: World,
        labelled: list[str],
        classes: list[str],
        em: Regressions | Responsibilities | None,
        on_all_rows: bool = False,
    ) -> None:
        self.model, self.plan, self.source, self.order, self.settings, self.world = model, plan, source, order, settings, world
        self.em, self.on_all_rows = em, on_all_rows  # mle() by L-BFGS
        self.objective = Objective(model, plan, source, order.batch, settings, labelled, classes, em)
        like = model._parameter()
        self.device, self.dtype = like.device, like.dtype
        groups = {"theta": model.theta(), "phi": model.phi()}
        self.groups = {name: [p for p in group if p.requires_grad] for name, group in groups.items()}
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        on_gpu = self.device.type == "cuda"
        assert settings.lr is not None
        self.rates = torch.full((AT_ONCE, flat.ALIGNED), settings.lr, device=self.device) if on_gpu else None
        self.adam = Adam(settings.lr if self.rates is None else self.rates[0, 0])
        self.left_alone: str | None = None  # why EM does not set q
        self.lost: str | None = None  # why EM found no next parameters
        self.iterations: Iterations | None = None  # EM in closed form, once it has begun
        self.kept: dict[str, Tensor] = {}  # what a checkpoint knew of it
        self.likelihood: Likelihood | None = None  # what mle() ascends on all rows, once it has begun
        self.known: dict[str, Tensor] = {}  # what a checkpoint knew of it
        self.noise, self.drawing = torch.Generator(self.device), torch.Generator(self.device)
        places = AT_ONCE if on_gpu else 1  # what the host says of so many steps
        self.rows = torch.zeros(places, order.batch, dtype=torch.long, device=self.device)
        self.kl_weights = torch.ones(places, flat.ALIGNED, device=self.device, dtype=self.dtype)
        self.bad = torch.zeros((), device=self.device)  # 1 once a step has failed
        self.moved = torch.zeros((), device=self.device)  # steps taken since the host last looked, the first of which was ``origin``
        self.origin: int | None = None
        self.taken = torch.zeros((), device=self.device)  # steps whose metrics are in ``sums``
        self.measured: list[str] = []
        self.sums = torch.zeros(0, device=self.device)
        layout = plan.layout(order.batch, 1, dropout=True)
        self.layouts: dict[int, noises.Layout] = {}  # by the number of steps of a batch
        self.captures = (
            on_gpu
            and world.size == 1
            and settings.schedule.objective == "bound"
            and not any(kind == "seed" for kind, _ in layout.values())
            and own_part(model) is None
        )
        self.staged: Staged | Gathered | None = None  # what holds the batches of some steps
        if self.captures and not source.near:
            self.staged = Staged(source, order, places, settings.total(source.n, order.batch), self.device)
        elif world.size == 1 and Gathered.pays(source, order):
            assert isinstance(source, Resident)
            self.staged = Gathered(source, order)
        self.number, self.alone = 0, True  # among models that are trained together; whether its steps are its own
        self.not_recorded = _why_not_recorded(model, settings, [name for name, (kind, _) in layout.items() if kind == "seed"])
        self.recordings: dict[str, Recording] = {}
        self.ends_compiled = settings.compile and world.size == 1 and self.not_recorded is None and self.device.type in ("cpu", "cuda")
        self.moving: dict[str, flat.Moving | None] = {}  # by phase; None where Adam's step is no one function
        self.left = 0  # steps to come
        self.draws = bool(source.fresh or settings.distort)  # whether the data of a step are drawn
        self.waits = on_gpu  # the host need not look after every step
        self.drawn: dict[str, int] = {}  # how far a step moves its generators
        self.seen: dict[str, int] = {}  # steps of each phase that were taken one by one
        self.take: Callable[[], None] = nothing  # takes the steps that were asked for and not taken yet

    # Taking a step ----------------------------------------------------------------------------------------------------------------

    def step(self, step: int, phase: Phase, rate: float) -> None:
        if self.em is not None and self.em.closed:
            self.origin = step if self.origin is None else self.origin
            self._iterate(step)
            return
        if self.on_all_rows:
            self.origin = step if self.origin is None else self.origin
            self._ascend(phase)
            return
        self.load(step, [rate])
        if self.settings.schedule.objective == "em" and (phase.position == 0 or self.objective.reference is None):
            self.objective.reference = copy.deepcopy(self.model).eval()
            assert self.em is not None
            self.left_alone = self.em.tighten(self.source.take(torch.arange(min(2, self.source.n))))
        self.seen[phase.name] = self.seen.get(phase.name, 0) + 1
        if not self.captures:
            self.advance(phase)
            return
        here = torch.cuda.current_stream(self.device)
        self.lane.chain.wait_stream(here)
        with torch.cuda.stream(self.lane.chain):
            self.advance(phase)
        here.wait_stream(self.lane.chain)

    def load(self, step: int, rates: Sequence[float]) -> None:
        """What the next steps need from the host: one for each rate."""
        s, count = self.settings, len(rates)
        self.origin = step if self.origin is None else self.origin
        self.left = s.total(self.source.n, self.order.batch) - step
        if self.staged is not None:
            self.staged.load(step, count)
        else:
            rows = self.order.rows(step, count).view(count, -1)
            if self.captures:
                self.rows[:count].copy_(rows, non_blocking=True)
            else:
                self.rows = rows
        self._seed(self.noise, "noise", step)
        if self.draws:
            self._seed(self.drawing, "data", step)
        if s.kl_warmup:
            weights = [s.kl_weight(step + i) for i in range(count)]
            self.kl_weights[:count, 0].copy_(torch.tensor(weights, dtype=self.dtype), non_blocking=True)
        if self.rates is not None:
            self.rates[:count, 0].copy_(torch.tensor(rates), non_blocking=True)
        else:
            self.adam.rate = rates[0]

    def _seed(self, generator: torch.Generator, word: str, step: int) -> None:
        """What a step draws is a function of (seed, step): drawn with a seed of its own, or, so that steps can follow each other in one graph,
        from its place in one stream."""
        if not self.captures:
            generator.manual_seed(seed_of(self.settings.seed, word, step))
            return
        if word not in self.drawn:
            self.noise.manual_seed(0), self.drawing.manual_seed(0)
            self.inputs(0)
            self.drawn = {"noise": self.noise.get_offset(), "data": self.drawing.get_offset()}
        generator.manual_seed(seed_of(self.settings.seed, word))
        generator.set_offset(step * self.drawn[word])

    @property
    def lane(self) -> Lane:
        return lane(self.device, self.number)

    @property
    def generators(self) -> list[torch.Generator]:
        """What a graph of its steps draws from."""
        return [self.noise, *([self.drawing] if self.draws else [])]

    def settle(self) -> None:
        if self.staged is not None:
            self.staged.settle()

    def close(self) -> None:
        """After the last step: let go of graphs and threads; every parameter has memory of its own again."""
        self.take = nothing
        if self.iterations is not None:
            with torch.no_grad():
                self.iterations.write()
        if self.staged is not None:
            self.staged.close()
        if not self.alone or any(isinstance(moving, flat.Vector) for moving in self.moving.values()):
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()

    def active(self, phase: Phase) -> list[nn.Parameter]:
        return [p for name in ("theta", "phi") if getattr(phase, name) for p in self.groups[name]]

    def inputs(self, place: int) -> dict[str, Tensor]:
        """All that a step's arithmetic reads besides the parameters: the batch, its noise, its distorted copy, the weight of the KL terms."""
        s, n = self.settings, self.order.batch
        if self.staged is not None:
            batch = self.staged.batch(place)
            uniform = self.source.uniform(batch, n, self.drawing)
        else:
            batch, uniform = self.source.draw(self.rows[place], generator=self.drawing, share=self.world.share(n))
        inputs = {f"batch {name}": value for name, value in batch.items()} | {f"uniform {name}": value for name, value in uniform.items()}
        if s.schedule.objective == "bound":
            _, steps = self.model._extent(batch)
            if steps not in self.layouts:
                self.layouts[steps] = self.plan.layout(n, steps, dropout=True)
            drawn = noises.draw(self.layouts[steps], generator=self.noise, device=self.device, dtype=self.dtype)
            inputs |= {f"noise {name}": value for name, value in self.world.rows_of(drawn, n).items()}
        if s.agree:
            inputs |= {f"moved {name}": value for name, value in self._distorted(self.source.prepare(batch, uniform)).items()}
        return inputs | ({"weight": self.kl_weights[place, 0]} if s.kl_warmup else {})

    def _distorted(self, batch: Batch) -> Batch:
        """x̃, a little turned, sheared, scaled and shifted."""
        graph, n, moved = self.model.graph, self.order.batch, {}
        for name, distortion in self.settings.distort.items():
            draws = distortion.draws(n, self.drawing, batch[name])[self.world.share(n)]
            moved[name] = distortion(batch[name][0], draws, binary=isinstance(graph.rule("p", name).spec, Bernoulli)).unsqueeze(0)
        return moved

    def _arithmetic(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The objective, and what is measured (its names are in ``measured``): a function of tensors alone."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16", cache_enabled=False):
            objective, bound = self.objective(inputs)
        name = {"evidence": "evidence", "em": "expected"}.get(self.settings.schedule.objective, self.settings.bound)
        values = {name: bound.value if bound.unweighted is None else bound.unweighted, **bound.terms}
        self.measured = [*values, "gradient"]
        return objective, torch.stack([value.detach() for value in values.values()]).sum(-1) / self.order.batch

    def _evaluate(self, phase: Phase, inputs: Mapping[str, Tensor]) -> Found:
        """The objective, what is measured, and the gradients of the active parameters."""
        active, recorded = self.active(phase), self.recordings.get(phase.name)
        if recorded is None and self._worth_recording(phase):
            recorded = self.recordings[phase.name] = self.recorded(phase, inputs)
        if recorded is not None and recorded.shapes == shapes(inputs):
            return recorded(inputs)
        with held_fixed(p for name, group in self.groups.items() if not getattr(phase, name) for p in group):
            objective, measured = self._arithmetic(inputs)
            return objective.detach(), measured, gradients_of(objective, active)

    def recorded(self, phase: Phase, inputs: Mapping[str, Tensor], stacked: Sequence[Tensor] | None = None) -> Recording:
        """A step of this model, or with their ``stacked`` parameters and inputs of several."""
        compiled, lane = self.settings.compile, self.lane if self.captures else None
        return Recording(self.model, self._arithmetic, inputs, self.active(phase), compiled=compiled, lane=lane, stacked=stacked)

    def _worth_recording(self, phase: Phase) -> bool:
        if self.not_recorded is not None or phase.name in self.recordings or not self.alone:
            return False
        if self.settings.compile:
            return True
        return self.seen[phase.name] >= (WARM_UP if self.captures else RECORD_AFTER) and self.left >= RECORD_FOR

    def _attempt(self, phase: Phase, inputs: Mapping[str, Tensor]) -> Found | None:
        """What a step finds; None, in every process, where the exact evidence has no value in one: a covariance of p is none any more."""
        if self.settings.schedule.objective != "evidence":
            return self._evaluate(phase, inputs)
        try:
            found = self._evaluate(phase, inputs)
        except LinAlgError:
            found = None
        return None if self.world.any(found is None) else found

    def advance(self, phase: Phase, place: int = 0, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Take the step for which the host has loaded this place."""
        active = self.active(phase)
        attempt = self._attempt(phase, self.inputs(place) if inputs is None else inputs)
        if attempt is None:
            self.bad.fill_(1.0)
            return
        total, measured, found = attempt
        moving = self._moving(phase, active) if self.ends_compiled and self.alone else None
        if moving is not None:
            rate = torch.tensor(self.adam.rate, dtype=self.dtype) if self.rates is None else self.rates[place, 0]
            self._make_room()
            counts = self.bad, self.sums, self.taken, self.moved
            moving.finish(dict(zip(active, found, strict=True)), rate, self.settings.clip, total, measured, counts)
            return
        pairs = [(parameter, flat.laid_out(gradient, parameter)) for parameter, gradient in zip(active, found, strict=True) if gradient is not None]
        gradients = [gradient for _, gradient in pairs]
        self.world.sum(gradients)
        self.world.sum([total])
        norm = _norm(gradients)
        self._make_room()
        if self.waits:
            flat.judge(total, norm / self.world.size, measured, self.bad, self.sums, self.taken, self.moved)
        elif math.isfinite(float(norm) + float(total)):
            self.sums.add_(torch.tensor([*measured.tolist(), float(norm) / self.world.size], dtype=self.dtype, device=self.device))
            self.taken.add_(1)
            self.moved.add_(1)
        else:
            self.bad.fill_(1.0)
            return
        if self.settings.clip is not None:
            share = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
            gradients = list(torch._foreach_mul(gradients, share))
        if self.rates is not None:
            self.adam.rate = self.rates[place, 0]
        self.adam.update([parameter for parameter, _ in pairs], gradients, self.bad if self.waits else None)

    def _moving(self, phase: Phase, active: Sequence[nn.Parameter]) -> flat.Moving | None:
        """What a phase moves, for the end of a step as one function; None until Adam has begun with all of it, or where not all at the same step."""
        if phase.name not in self.moving:
            states = [self.adam.state[parameter] for parameter in active if parameter in self.adam.state]
            if len(states) < len(active):
                return None
            together = len({float(state["step"]) for state in states}) == 1
            few = self.captures or len(active) <= flat.MOST
            self.moving[phase.name] = self._gathered(phase, active) if together and few else None
        return self.moving[phase.name]

    def _gathered(self, phase: Phase, active: Sequence[nn.Parameter]) -> flat.Moving:
        if not self.captures:
            return flat.Parts(active, self.adam)
        vector = flat.Vector((active, self.adam))
        self.recordings[phase.name].write_into(vector.gradients)
        return vector

    def _make_room(self) -> None:
        if not len(self.sums):
            self.sums = torch.zeros(len(self.measured), device=self.device, dtype=self.dtype)
        if len(self.sums) != len(self.measured):
            raise CheckpointError(
                f"The checkpoint has sums of {len(self.sums)} quantities, but a step measures {len(self.measured)} ({', '.join(self.measured)}). "
                "Resume from another checkpoint."
            )

    def _iterate(self, step: int) -> None:
        """One iteration of exact EM: the posterior's statistics over all rows, then every factor of p in closed form."""
        schedule = self.settings.schedule
        assert self.em is not None
        assert isinstance(schedule, schedules.em)
        with torch.no_grad():
            try:
                if self.iterations is None:
                    fresh = step == 0 and self.model.untouched()
                    rows = Rows(self.source, self.world)
                    self.iterations = Iterations(self.em, rows, schedule, self.settings.seed, fresh=fresh, tensors=self.kept)
                    self.settle_model()
                evidence = self.iterations.step()
            except NoEvidenceError as error:
                self.lost = str(error)
                self.bad.fill_(1.0)
                return
        self.measured = ["evidence"]
        self.sums = torch.full((1,), evidence / self.world.size, dtype=torch.float64, device=self.device)  # of the last iteration
        self.taken.fill_(1)
        self.moved.add_(1)

    def _ascend(self, phase: Phase) -> None:
        """One iteration of L-BFGS on the exact evidence of all rows."""
        if self.likelihood is None:
            self.likelihood = Likelihood(self.model, self.source, self.world, self.active(phase), self.known)
        found = self.likelihood.step(self.settings.schedule.tol)  # type: ignore[attr-defined]
        if found is None:
            self.bad.fill_(1.0)
            return
        self.measured = ["evidence", "gradient"]
        self.sums = torch.tensor(found, dtype=torch.float64, device=self.device) / self.world.size  # of the last iteration
        self.taken.fill_(1)
        self.moved.add_(1)

    @property
    def converged(self) -> bool:
        """Whether iterations over all rows, of EM in closed form or of L-BFGS, have come to their end."""
        schedule = self.settings.schedule
        if self.likelihood is not None:
            return self.likelihood.ended(schedule.tol)  # type: ignore[attr-defined]
        if self.known:
            return bool(self.known["converged"])
        gains = self.kept.get("em/gains", torch.zeros(0)).tolist() if self.iterations is None else self.iterations.ascent.gains
        return isinstance(schedule, schedules.em) and converged(gains, schedule.tol)

    def settle_model(self) -> None:
        """Give the model what EM in closed form has found, and set q to the posterior where it can. A reader calls for it, not every iteration."""
        if self.iterations is not None and self.em is not None:
            with torch.no_grad():
                self.iterations.write()
                self.left_alone = self.em.tighten(self.source.take(torch.arange(min(2, self.source.n))))

    # What the host sees -------------------------------------------------------------------------------------------------------------

    def failed(self) -> bool:
        """Whether a step failed since the host last looked; ``at`` is then that step."""
        self.take()
        assert self.origin is not None
        if bool(self.bad):
            self.at = self.origin + int(self.moved)
            return True
        self.moved.zero_()
        self.origin = None
        return False

    def go_on(self) -> None:
        """Pass over the step that failed."""
        self.bad.zero_()
        self.moved.zero_()
        self.origin = None

    def read(self) -> dict[str, float]:
        """The means of the metrics over the steps since the last reading."""
        found = self.metrics()
        self.sums.zero_()
        self.taken.zero_()
        return {name: value / found["taken"] for name, value in found["sums"].items()} if found["taken"] else {}

    def metrics(self) -> dict[str, Any]:
        """What was added up since the last reading, over all processes."""
        self.take()
        sums = self.sums.clone()
        self.world.sum([sums])
        return {"taken": int(self.taken), "sums": dict(zip(self.measured, sums.tolist(), strict=True))}

    # State --------------------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """What the next step needs besides the weights: the optimiser's moments, and the weights an M-step's posterior belongs to."""
        held = self.objective.reference
        reference = {} if held is None else {f"{name}/reference": tensor for name, tensor in held.state_dict().items()}
        iterations = self.kept if self.iterations is None else self.iterations.ascent.tensors()
        search = self.known
        if self.likelihood is not None:
            search = self.likelihood.tensors() | {"converged": torch.tensor(self.converged)}
        return self.adam.tensors(self.names) | reference | iterations | {f"{MLE}{name}": tensor for name, tensor in search.items()}

    def restore(self, tensors: Mapping[str, Tensor], metrics: Mapping[str, Any]) -> None:
        reference = {name.removesuffix("/reference"): tensor for name, tensor in tensors.items() if name.endswith("/reference")}
        self.kept = {name: tensor for name, tensor in tensors.items() if name.startswith("em/")}
        self.known = {name.removeprefix(MLE): tensor for name, tensor in tensors.items() if name.startswith(MLE)}
        others = ("em/", MLE)
        moments = {name: tensor for name, tensor in tensors.items() if not name.endswith("/reference") and not name.startswith(others)}
        self.adam.restore(moments, {name: parameter for parameter, name in self.names.items()})
        if reference:
            self.objective.reference = copy.deepcopy(self.model).eval()
            self.objective.reference.load_state_dict(reference)
        self.measured = list(metrics["sums"])
        mine = 1.0 if self.world.first else 0.0  # the sums are over all processes
        kind = torch.float64 if self.kept or self.known else self.dtype
        self.sums = mine * torch.tensor(list(metrics["sums"].values()), device=self.device, dtype=kind)
        self.taken.fill_(metrics["taken"])

    # Trouble ------------------------------------------------------------------------------------------------------------------------

    def sound(self, steps: Iterable[int]) -> bool:
        """Whether the weights are finite, and the objective of the rows of one of these steps is too. Nothing moves."""
        fine = not self._broken()
        judged = self.likelihood is not None or (self.em is not None and self.em.closed)  # every iteration judges the evidence of all rows
        if fine and not judged:
            fine = any(self._finite(step) for step in steps)
        return not self.world.any(not fine)

    def _finite(self, step: int) -> bool:
        origin = self.origin
        self.load(step, [0.0])
        self.origin = origin  # no step is asked for
        try:
            with torch.no_grad():
                objective, _ = self.objective(self.inputs(0))
        except (RuntimeError, ValueError):  # a covariance is none any more, or torch refuses parameters that are not numbers
            return False
        return bool(objective.isfinite())

    def _broken(self) -> list[str]:
        """The factors that have parameters which are not finite."""
        return [name for name, factor in self.model.factors.items() if any(not bool(p.isfinite().all()) for p in factor.parameters())]

    def what_failed(self, step: int, phase: Phase) -> str:
        """Take a failed step again, without the optimiser, and name the factor and the rows."""
        if self.lost is not None:
            return f"{self.lost}."
        self.load(step, [0.0])
        share = self.world.share(self.order.batch)
        rows = self.order.rows(step)[share].cpu()
        broken = self._broken()
        cause = f" The parameters of {', '.join(broken)} are not finite." if broken else ""
        try:
            what, bad = self._culprit(self.active(phase), share)
        except LinAlgError:
            what, bad = "the exact evidence (a covariance of p is not positive definite)", torch.ones(len(rows), dtype=torch.bool)
        except (RuntimeError, ValueError):  # torch refuses parameters that are not numbers
            if not broken:
                raise
            what, bad = "the bound", torch.ones(len(rows), dtype=torch.bool)
        mine = (not what.startswith("the gradient"), what, rows[bad].tolist())
        _, what, which = max(self.world.gather(mine), key=lambda found: found[0])  # of several processes, one that has a term to name
        return f"{what} is not finite for {self.source.places.rows(which)}.{cause}"

    def _culprit(self, active: list[nn.Parameter], share: slice) -> tuple[str, Tensor]:
        """The term that is not finite and the rows where, or the parameter whose gradient is not, by all rows."""
        objective, bound = self.objective(self.inputs(0))
        for name, term in bound.terms.items():
            bad = ~term.detach().isfinite().cpu()
            if bool(bad.any()):
                variable = name[3:-1] if name.startswith("kl(") else name
                factor = f" (p's factor {self.model.graph.rule('p', variable).id})" if variable in self.model.graph.stochastic else ""
                return f"the term {name}{factor}", bad
        bad = ~bound.value.detach().isfinite().cpu()
        if bool(bad.any()):
            return "the bound", bad
        gradients = torch.autograd.grad(-objective, active, allow_unused=True)
        culprit = next(
            (self.names[p] for p, found in zip(active, gradients, strict=True) if found is not None and not bool(found.isfinite().all())), None
        )
        return f"the gradient of {culprit}" if culprit else "the gradient", torch.ones_like(bad)


def nothing() -> None:
    """Takes the steps that wait where none do."""


def _why_not_recorded(model: Model, settings: Settings, seeded: Sequence[str]) -> str | None:
    """Why a step runs as it was written, in words; None where its operations can be recorded, since nothing else happens in it."""
    if settings.schedule.objective != "bound":
        return f"{settings.schedule} takes exact answers, not an estimate of the bound"
    if seeded:
        return f"{seeded[0]} is drawn by a sampler of torch's own"
    return own_part(model)


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together."""
    if gradients[0].device.type == "cpu":  # a dot product runs on all cores; torch's norm of a tensor does not
        return torch.stack([torch.dot(flat, flat) for flat in (gradient.reshape(-1) for gradient in gradients)]).sum().sqrt()
    return torch.nn.utils.get_total_norm(gradients)
