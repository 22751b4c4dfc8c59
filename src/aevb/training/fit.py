"""The training loop behind :func:`fit`.

All randomness (the order of the rows, the noise of the estimate) is a function of (seed, step).
The state of a run is therefore its weights, its optimiser state and its step number. On the CPU, a
resumed run equals the uninterrupted run bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np
import torch

from aevb.data.datasets import Recipe
from aevb.data.markers import array_warnings
from aevb.data.repeated_values import LOOK, note_numbering, note_repeats, refuse_degenerate
from aevb.data.sources import Source, open_source
from aevb.declare.deterministic import Recurrence
from aevb.declare.families import Exact
from aevb.declare.networks import MLP
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch, split_latents
from aevb.evidence.exact import why_not_exact
from aevb.model import Model
from aevb.posterior.choice import open_ended
from aevb.posterior.training_record import trainable_latents, with_weights
from aevb.runtime import private_torch
from aevb.runtime.contention import sharing_cores
from aevb.training import events
from aevb.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    TrainingError,
    check_fit,
    folders,
    latest,
    read,
)
from aevb.training.display import Checking, TensorBoard, Watcher, display
from aevb.training.distributed import join
from aevb.training.em import exact_em
from aevb.training.evaluation import Evaluation
from aevb.training.events import Event
from aevb.training.graph_steps import AT_ONCE
from aevb.training.interrupts import Flag, interruptible
from aevb.training.maximum_likelihood import why_in_batches
from aevb.training.purity import added, own_part
from aevb.training.row_order import NUMBERS, Order, seed_of
from aevb.training.run import Run
from aevb.training.run_folder import (
    Folder,
    check_declaration,
    check_recipe,
    read_rows,
    refuse_taken,
)
from aevb.training.schedules import Phase
from aevb.training.settings import Settings, toml_text
from aevb.training.settings_options import SettingsOptions
from aevb.training.step import Job
from aevb.training.step_queue import StepQueue
from aevb.training.steppers import stepper_for
from aevb.training.threads import threads, worth
from aevb.training.warning_signs import FEW, ROWS, effective_weights, fall, told_fall, told_weights

__all__ = ["Training", "TrainingError", "fit"]

LEAST_SHARE = 10  # q counts as untrained if p took more than this many steps per step of q
ITERATIONS = 1000  # default limit for iterations over all rows; they usually converge earlier
# Settings that exact answers do not use.
ESTIMATES = ("bound", "samples", "gradient", "temperature", "kl_warmup", "classify", "agree")
# Settings that a resumed run may change, because they do not affect the steps already taken. If the
# run becomes longer, the rest of the learning rate schedule is stretched.
MAY_CHANGE = (
    "epochs",
    "steps",
    "patience",
    "validate_every",
    "log_every",
    "checkpoint_every",
    "skip",
)


@overload
def fit(
    model: Model,
    data: Any,
    *,
    validation: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    tensorboard: bool = False,
    after: Callable[[int, Model], Mapping[str, float] | None] | None = None,
    seeds: None = None,
    recipe: Recipe | None = None,
    **settings: Unpack[SettingsOptions],
) -> Run: ...
@overload
def fit(
    model: Model,
    data: Any,
    *,
    validation: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    tensorboard: bool = False,
    after: Callable[[int, Model], Mapping[str, float] | None] | None = None,
    seeds: int | Sequence[int],
    recipe: Recipe | None = None,
    **settings: Unpack[SettingsOptions],
) -> list[Run]: ...
def fit(
    model: Model,
    data: Any,
    *,
    validation: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    tensorboard: bool = False,
    after: Callable[[int, Model], Mapping[str, float] | None] | None = None,
    seeds: int | Sequence[int] | None = None,
    recipe: Recipe | None = None,
    **settings: Unpack[SettingsOptions],
) -> Run | list[Run]:
    """Train a model in place and return the run.

    Afterwards the model has the weights of the last step or, if ``patience`` is set, those of the
    best validation. :func:`load_run` reads either from the run's files.

    Arguments:
        model: The model to train.
        data: A dictionary from variable to array or file.
        validation: Validation data, in the same form. Required by ``patience``.
        out: Folder for the run's files. It must be empty or not exist yet; with ``resume=True`` it
            may hold the run to continue.
        resume: Continue the run in ``out`` from its last checkpoint. If there is no checkpoint yet,
            the run starts at step 0.
        progress: Display of the progress. By default a live panel on a terminal and nothing
            elsewhere; True also prints plain lines elsewhere; False prints nothing.
        tensorboard: Write scalars for TensorBoard into ``out/tensorboard``.
        after: A function ``after(step, model)``, called after every validation. It may return a
            dictionary of numbers, which are recorded in the history.
        seeds: A number of runs or a list of seeds. ``seeds=8`` trains eight fresh models of the
        same
            declaration and leaves ``model`` unchanged. Their files go into ``out/seed-N``. Each run
            equals ``fit(model.fresh(seed), …, seed=seed)``; with ``compile=True`` on a GPU, up to
            rounding. Several models share a GPU, which is much faster than training one by one.
        recipe: Where the rows came from and how they were prepared. It is saved as
        ``out/data.json``,
            so that the command line can prepare other rows in the same way.
        **settings: The fields of :class:`Settings`: epochs or steps, batch, lr, schedule, how,
            bound, ….

    Returns:
        The :class:`Run`; with ``seeds``, a list of runs in the order of the seeds.

    Raises:
        TypeError: A keyword is not a setting. ValueError: A setting, the data or ``out`` does not
        fit the model or the schedule. No step is
            taken.
        CheckpointError: With ``resume=True``, the checkpoint is damaged or belongs to another
        model,
            other data or other settings.
        TrainingError: A loss, gradient or weight became non-finite, or a file could not be written.
        KeyboardInterrupt: The run was interrupted (Ctrl-C, SIGTERM). It saves a checkpoint first if
            ``out`` is set.

    Example::

        run = fit(model, {"x": x}, validation={"x": held_out}, epochs=50, out="runs/first")
        run.history["elbo"]
    """
    unknown = sorted(set(settings) - {f.name for f in fields(Settings)})
    if unknown:
        raise TypeError(
            f"fit has no setting {unknown[0]!r}. Its settings are "
            f"{', '.join(f.name for f in fields(Settings))}."
        )
    if out is not None and str(out) == "":
        raise ValueError(
            'out="" names no folder. Give the folder for the run\'s files, or leave out= out.'
        )
    folder = Path(out) if out is not None else None
    if seeds is None:
        with ExitStack() as closing, sharing_cores():
            training = Training(
                model,
                data,
                validation,
                Settings(**settings),
                folder,
                resume,
                closing,
                progress,
                recipe,
            )
            training.watch(progress, tensorboard, closing)
            training.after = after
            return training.run()
    if "seed" in settings:
        raise ValueError("Pass seed= for one run or seeds= for several runs, not both.")
    if folder is not None and (folder / "model.json").exists():
        raise ValueError(
            f"{folder} holds a model or a run of its own. Choose another folder for the runs of "
            f"several seeds."
        )
    every = [replace(Settings(**settings), seed=seed) for seed in _several(seeds)]
    _refuse_shared(model)
    if (what := added(model)) is not None:
        raise ValueError(
            f"seeds= trains fresh models made from the declaration, which does not include this: "
            f"{what}. Train this model without seeds=."
        )
    with ExitStack() as closing, sharing_cores():
        trainings: list[Training] = []
        for one in every:
            place = None if folder is None else folder / f"seed-{one.seed}"
            # The data are opened once, and all trainings read them.
            rows, judged = (
                (trainings[0].source, trainings[0].validation) if trainings else (data, validation)
            )
            training = Training(
                model.fresh(one.seed), rows, judged, one, place, resume, closing, progress, recipe
            )
            training.watch(False if trainings else progress, tensorboard, closing)
            training.after = after
            trainings.append(training)
        for watcher in trainings[0].watchers if len(trainings) > 1 else ():
            watcher.note(f"{len(trainings)} runs together; the display shows seed {every[0].seed}.")
        return _train_together(trainings)


def _several(seeds: int | Sequence[int]) -> list[int]:
    """Return the list of seeds for ``seeds=``: 0, 1, … for a number, or the given list."""
    chosen = list(range(seeds)) if isinstance(seeds, int | np.integer) else list(seeds)
    if isinstance(seeds, bool) or not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"seeds is a positive number of runs, or a list of different seeds, got {seeds!r}."
        )
    return chosen


def _train_together(trainings: Sequence[Training]) -> list[Run]:
    """Train several runs, one step of each in turn.

    If one run is interrupted or fails, all of them stop, and the others save a checkpoint first.
    """
    together, stopped, failed = StepQueue(), False, None
    with threads(trainings[0].threads), interruptible() as interrupted:
        loops = {training: training.loop(interrupted) for training in trainings}
        while loops:
            wanted = []
            for training, loop in list(loops.items()):
                try:
                    phase = next(loop)
                    wanted.append(
                        (
                            training.stepper,
                            training.step,
                            phase,
                            training.rate(phase, training.step),
                        )
                    )
                except (StopIteration, Stopped, TrainingError) as end:
                    del loops[training]
                    stopped = stopped or isinstance(end, Stopped)
                    if isinstance(end, TrainingError):
                        failed, interrupted.set = failed or (training, end), True
            if wanted:
                together.step(wanted)
                for training in loops:
                    training.note_what_stays()
    where = trainings[0].out.parent if trainings[0].out is not None else None
    if failed is not None:
        training, error = failed
        others = (
            f" The other runs were stopped{'' if where is None else ' and saved'}."
            if stopped
            else ""
        )
        raise TrainingError(f"Seed {training.settings.seed}: {error}{others}") from error
    if stopped:
        steps = ", ".join(str(training.step) for training in trainings)
        raise _stopped(f"stopped after steps {steps} of {trainings[0].total}", "them", where)
    return [training.finished() for training in trainings]


class Stopped(KeyboardInterrupt):
    """A run was interrupted and has saved a checkpoint.

    ``for_commands`` is the command line's message.
    """

    def __init__(self, text: str, for_commands: str = "") -> None:
        super().__init__(text)
        self.for_commands = for_commands or text


def _stopped(text: str, what: str, where: Path | None) -> Stopped:
    if where is None:
        return Stopped(text)
    python, command = (
        f"{text}; {how} continues {what} from {where}"
        for how in ("resume=True", "the same command with --resume")
    )
    return Stopped(python, command)


class NoValidationError(ValueError):
    """A setting needs validation data. ``for_commands`` is the command line's message."""

    for_commands = "patience counts validations; add --validation FILE, or --hold-out 0.1."


class Training:
    """The state of one run while it trains."""

    def __init__(
        self,
        model: Model,
        data: Any,
        validation: Any,
        settings: Settings,
        out: Path | None,
        resume: bool,
        closing: ExitStack,
        progress: bool | None = False,
        recipe: Recipe | None = None,
    ) -> None:
        asked, settings = (
            settings,
            settings if settings.lr is not None else replace(settings, lr=_usual_rate(model)),
        )
        self.asked_lr = asked.lr
        self.model, self.settings, self.out, self.recipe = model, settings, out, recipe
        if out is not None:
            refuse_taken(out, resume)
        like = model._parameter()
        self.device, self.dtype = like.device, like.dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"The model is in {str(self.dtype)[6:]}, too coarse to train in. Train "
                f"model.float(); "
                'precision="bf16" then computes matrix products in bfloat16.'
            )
        self.world = join(self.device)
        self.world.copy_first(list(model.state_dict().values()))
        shown = progress if self.world.first else False
        self.source = open_source(model.graph, data, like, Checking(shown))
        self.markers = (
            array_warnings(data, model.graph.observed)
            if recipe is None and isinstance(data, Mapping)
            else []
        )
        refuse_degenerate(model.graph, self.source)
        self.recorded = settings.record() | {
            "fresh": {name: repr(fresh) for name, fresh in self.source.fresh.items()} or None
        }
        self.recorded |= {
            "data": _fingerprint(self.source) if out is not None else None,
            "numbers": NUMBERS,
        }
        self.recorded["frozen"] = _frozen(model)
        self.validation = (
            None
            if validation is None
            else open_source(model.graph, validation, like, Checking(shown, "validation"))
        )
        self.evaluation: Evaluation | None = None  # on the validation data
        self.em = exact_em(model) if settings.schedule.objective == "em" else None
        exact = settings.schedule.objective == "evidence" and why_not_exact(model) is None
        self.in_batches = why_in_batches(model, self.source, asked) if exact else None
        # A step is then an iteration over all rows.
        self.on_all_rows = (exact and self.in_batches is None) or (
            self.em is not None and self.em.closed
        )
        size = self.source.n if self.on_all_rows else settings.batch
        unbounded = self.on_all_rows and settings.steps is None and settings.epochs is None
        self.total = ITERATIONS if unbounded else settings.total(self.source.n, size)
        self.order = Order(
            self.source.n, size, settings.seed, self.device if self.source.near else None
        )
        self.per_epoch = max(1, round(self.source.n / self.order.batch))
        first = self.source.take(torch.arange(min(2, self.source.n)))
        self.plan = self._plan(first)
        self.all_threads = torch.get_num_threads()
        self.threads = (
            self.all_threads
            if settings.schedule.objective != "bound"
            else worth(model, self.plan, -(-self.order.batch // self.world.size))
        )
        self.labelled = [
            name
            for name in model.graph.latents
            if name in first and model.graph.rule("q", name).spec.finite
        ]
        self._check_settings()
        job = Job(
            model,
            self.plan,
            self.source,
            self.order,
            settings,
            self.world,
            self.labelled,
            self._classes(),
            self.em,
        )
        self.stepper = stepper_for(job, on_all_rows=self.on_all_rows)
        self.steps = StepQueue()
        self._check_groups()
        if settings.compile and self.stepper.not_recorded is not None:
            raise ValueError(
                f"compile=True compiles a step of the bound, but {self.stepper.not_recorded}. "
                f"Train without compile=True."
            )
        self.step, self.waited, self.skipped, self.before = 0, 0, 0, 0.0
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.best_checkpoint: Checkpoint | None = None
        self.folder: Folder | None = None
        self.anew = False  # whether resume=True found no checkpoint
        self.watchers: list[Watcher] = []
        self.after: Callable[[int, Model], Mapping[str, float] | None] | None = None
        if out is not None:
            self._open(out, resume, closing)
        elif resume:
            raise ValueError(
                "resume=True continues a run from its files; give their folder with out=…."
            )
        self._check_weights()

    # Before the first step ------------------------------------------------------------------------

    def _plan(self, batch: Batch) -> Plan:
        clamped, partial = split_latents(self.model.graph, batch)
        s = self.settings
        return self.model.plan(
            how=s.how,
            bound=s.bound,
            samples=s.samples,
            gradient=s.gradient,
            clamped=clamped,
            partial=partial,
        )

    def _check_settings(self) -> None:
        s = self.settings
        if self.order.batch < self.world.size:
            raise ValueError(
                f"A step takes {self.order.batch} rows, so some of the {self.world.size} "
                f"processes would have none. Start at most {self.order.batch} processes (torchrun "
                f"--nproc-per-node)"
                + (", or raise batch=." if self.order.batch < self.source.n else ".")
            )
        if s.kl_warmup >= self.total:
            raise ValueError(
                f"kl_warmup={s.kl_warmup} does not end before training does ({self.total} steps): "
                f"the bound would never be trained. Shorten it."
            )
        if s.warmup >= self.total:
            raise ValueError(
                f"warmup={s.warmup} does not end before training does ({self.total} steps). "
                f"Shorten it."
            )
        if self.plan.untrained and s.schedule.objective == "bound":
            name = self.plan.untrained[0]
            raise ValueError(
                f"how={{{name!r}: 'sum'}} cancels q({name}) from the bound, so it cannot be "
                f"trained. Use 'enumerate' to train, 'sum' to evaluate."
            )
        if s.schedule.objective == "evidence" and (reason := why_not_exact(self.model)):
            raise ValueError(
                f"mle() ascends the exact evidence, which is not known for this model: {reason}. "
                f"Use joint()."
            )
        if s.classify and not self.labelled:
            raise ValueError(
                "classify= adds log q(y|x) on rows whose label is known; the data have labels for "
                "no discrete latent. Pass y=…, −1 where unknown."
            )
        exact = [
            name
            for name in self.labelled
            if isinstance(self.model.graph.rule("q", name).spec, Exact)
        ]
        if s.classify and exact:
            raise ValueError(
                f"classify= trains q({exact[0]}|·), but q({exact[0]}|·) is Exact(): it has no "
                f"parameters of its own. "
                "Leave classify= out; the labels train p."
            )
        if s.schedule.objective != "bound":
            defaults = Settings()
            idle = next(
                (name for name in ESTIMATES if getattr(s, name) != getattr(defaults, name)), None
            )
            if idle is not None:
                raise ValueError(
                    f"{idle}= configures q or the estimate of the bound, but {s.schedule} "
                    f"computes the objective exactly. Leave {idle}= out, or use joint()."
                )
        if self.em is not None and self.em.closed:
            held = [
                name
                for name in self.recorded["frozen"]
                if dict(self.model.named_parameters())[name] in set(self.model.theta())
            ]
            if held:
                raise ValueError(
                    f"em() sets all of p's parameters in closed form, but {held[0]} is frozen. "
                    f"Use mle() or joint()."
                )
        elif self.em is not None and s.schedule.start == "data":  # type: ignore[attr-defined]
            raise ValueError(
                'em(start="data") needs a closed-form M-step, which this model does not have. '
                "Leave start= out."
            )
        if bool(s.agree) != bool(s.distort):
            raise ValueError(
                "agree= weights the agreement of q(y|x) under distortions, and distort= defines "
                "the distortions. Set both, or neither."
            )
        if s.agree and not self._classes():
            raise ValueError(
                "agree= needs q(y|x) of a OneHot latent without a time index whose parents in q "
                "are data, but the model has none."
            )
        for name in s.distort:
            if name not in self.model.graph.observed or math.prod(
                s.distort[name].shape
            ) != self.model.graph.size(name):
                raise ValueError(
                    f"distort= gives images of shape {s.distort[name].shape} for {name!r}, which "
                    f"is no observed variable of that size."
                )
        for name in self.labelled if s.classify else ():
            if unknown := self.model.graph.latent_behind(name):
                raise ValueError(
                    f"classify= needs q({name}|·) as a function of the data alone, but it reads "
                    f"{unknown!r}."
                )
        if s.precision == "bf16" and self.dtype != torch.float32:
            raise ValueError(
                f'precision="bf16" lowers the precision of products in float32, but the model is '
                f"in {str(self.dtype)[6:]}."
            )
        if s.patience is not None and self.validation is None:
            raise NoValidationError("patience counts validations; pass validation= data.")

    def _untaught(self) -> list[str]:
        """Return the latents that are observed in every row.

        No term of the objective uses their q.
        """
        s = self.settings
        if s.schedule.objective == "evidence":
            return []  # mle() has its own note: it trains no factor of q
        taught = {*(self.labelled if s.classify else ()), *(self._classes() if s.agree else ())}
        known = [
            name
            for name in self.model.graph.latents
            if name in self.plan.clamped and name not in taught
        ]
        factors = {
            name: [self.model.factors[entry.id] for entry in self.model.graph.q[name].values()]
            for name in known
        }
        return [
            name
            for name in known
            if any(p.requires_grad for factor in factors[name] for p in factor.parameters())
        ]

    def _taught_apart(self) -> list[str]:
        """Return the partly labelled discrete latents whose q is not trained on the labels.

        ``classify`` would train it on them.
        """
        if self.settings.schedule.objective != "bound" or self.settings.classify:
            return []
        graph = self.model.graph
        return [
            name
            for name in self.labelled
            if name in self.plan.partial
            and not isinstance(graph.rule("q", name).spec, Exact)
            and graph.latent_behind(name) is None
        ]

    def _repeats(self) -> list[str]:
        """Return notes about the data, from a sample of rows.

        They report repeated values under a density, and columns that look like row numbers.
        """
        graph, n, fresh = self.model.graph, self.source.n, self.source.fresh
        notes = note_repeats(
            graph,
            self.source.read(torch.linspace(0, n - 1, min(LOOK, n)).long()),
            fresh,
            self.source.places,
        )
        notes += [str(warning) for warning in self.markers]
        return notes + note_numbering(
            graph, self.source.read(torch.arange(min(LOOK, n))), fresh, self.source.places
        )

    def _classes(self) -> list[str]:
        """Return the discrete latents without a time index whose q depends on data alone."""
        graph = self.model.graph
        return [
            name
            for name in graph.latents
            if graph.rule("q", name).spec.categorical
            and not graph.timed[name]
            and graph.latent_behind(name) is None
        ]

    def _check_weights(self) -> None:
        """Refuse weights that are not finite: a ReLU can turn NaN into 0 and hide the error."""
        _refuse_shared(self.model)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not bool(parameter.isfinite().all()):
                raise ValueError(
                    f"The parameter {name} holds numbers that are not finite. Start with a fresh "
                    f"model, or load finite weights."
                )

    def _check_groups(self) -> None:
        """Refuse a schedule with a phase that has no parameters to train."""
        schedule = self.settings.schedule
        phases = {
            phase.name: phase
            for phase in (
                schedule.phase(step, self.total) for step in range(min(self.total, schedule.cycle))
            )
        }
        for phase in phases.values():
            if not self.stepper.active(phase) and not (self.em is not None and self.em.closed):
                what = (
                    "q"
                    if phase.phi and not phase.theta
                    else "p"
                    if phase.theta and not phase.phi
                    else "the model"
                )
                raise ValueError(
                    f"There is nothing to train in phase {phase.name}: {what} has no free "
                    f"parameters. Use another schedule."
                )

    def _open(self, out: Path, resume: bool, closing: ExitStack) -> None:
        folder = Folder(out)
        if self.world.first:
            closing.enter_context(folder.held())
            # Check again: another process may have trained here before this one got the lock.
            refuse_taken(out, resume)
        found = latest(out) if resume else None
        if found is not None:
            folder.beside = found.beside
            folder.notes += self._continue(out, found)
        self.anew = resume and found is None
        if self.world.first:
            # Iterations over all rows have no learning rate. config.toml therefore records only an
            # lr that the user set, because mle() switches to Adam if lr is set.
            config = self.recorded | ({"lr": self.asked_lr} if self.on_all_rows else {})
            folder.begin(self.model.declaration(), toml_text(config), self.rows, self.recipe)
            self.folder = folder

    def _continue(self, out: Path, found: Checkpoint) -> list[str]:
        """Restore the state of a checkpoint, and return notes for the run to record."""
        # A setting that did not exist at that time had its default.
        there = Settings().record() | {"numbers": 1} | found.state["settings"]
        if there["numbers"] != NUMBERS:
            raise CheckpointError(
                f"{out} was trained by another version of aevb, in which a seed gave other random "
                f"numbers. Resuming it would not reproduce the "
                "uninterrupted run. Start a new run from its weights (aevb.load_run), or from "
                "scratch."
            )
        if self.recipe is not None:
            check_recipe(out, self.recipe, found.beside.get("data.json"))
        notes = []
        if _is_partial(there["data"]):
            there["data"] = (
                self.recorded["data"]
                if there["data"] == _partial_fingerprint(self.source)
                else there["data"]
            )
            notes.append(
                "The version of aevb that began this run recorded a hash of only some of the "
                "rows. Those rows are the same; the others could not be compared."
            )
        changed = sorted(
            key
            for key in self.recorded.keys() & there.keys() - set(MAY_CHANGE)
            if self.recorded[key] != there[key]
        )
        if changed == ["data"]:
            raise CheckpointError(
                f"{out} was trained on other data ({there['data']}, not {self.recorded['data']}). "
                f"Resume with the same data."
            )
        changed = [key for key in changed if key != "data"]
        if changed:
            raise CheckpointError(
                f"{out} was trained with {changed[0]}={there.get(changed[0])!r}, not "
                f"{self.recorded[changed[0]]!r}. Resume with the same settings."
            )
        check_fit(found, self.model.state_dict(), out)
        check_declaration(out, self.model.declaration(), found.beside.get("model.json"))
        self.model.load_state_dict(found.weights)
        self.model.teaching.restore(self.model, found.state.get("teaching"))
        self.stepper.restore(found.optimizer, found.state["metrics"])
        self.step, self.best, self.waited, self.skipped = (
            found.step,
            found.state["best"],
            found.state["waited"],
            found.state["skipped"],
        )
        self.rows, wrong = read_rows(out, found.state, found.step)
        self.before = max((row.get("seconds", 0.0) for row in self.rows), default=0.0)
        return notes if wrong is None else [*notes, wrong]

    def watch(self, progress: bool | None, tensorboard: bool, closing: ExitStack) -> None:
        """Attach the progress display and TensorBoard. Only the first process has them."""
        if tensorboard and self.out is None:
            raise ValueError(
                "tensorboard=True writes into the run's folder; give that folder with out=…."
            )
        if not self.world.first:
            return
        if tensorboard and self.folder is not None:
            self.watchers.append(TensorBoard(self.folder, self.rows))
        epochs = self.total * self.order.batch / self.source.n
        self.watchers.append(
            display(progress, self.step, self.total, epochs, self.settings.judge, self.best)
        )
        for watcher in self.watchers:
            closing.callback(watcher.close)
            if self.anew:  # not recorded, so that the history equals that of an uninterrupted run
                watcher.note(
                    f"There is no checkpoint in {self.out} yet that resume=True could continue: "
                    f"the run starts at step 0."
                )

    # The loop -------------------------------------------------------------------------------------

    def run(self) -> Run:
        with threads(self.threads), interruptible() as interrupted:
            for phase in self.loop(interrupted):
                self._take_step(phase)
        return self.finished()

    def loop(self, interrupted: Flag) -> Iterator[Phase]:
        """Run everything except the steps.

        Yield the phase of each step. The caller then takes the step.
        """
        s = self.settings
        began = time.perf_counter()
        validate = s.validate_every or self.per_epoch
        log = 1 if self.on_all_rows and self.total <= ITERATIONS else max(1, self.total // 200)
        # A CUDA graph holds AT_ONCE steps.
        log = -(-log // AT_ONCE) * AT_ONCE if self.stepper.captures else log
        intervals = {
            "log": s.log_every or log,
            "validate": validate,
            "checkpoint": s.checkpoint_every or validate,
        }
        self.saved = began
        was = self.model.training
        self.model.train()
        for name in self._untaught():
            alone = (
                name in self.labelled
                and self.model.graph.latent_behind(name) is None
                and self.em is None
            )
            remedy = (
                f"To train q({name}|·) too, add classify=1 (--classify 1); to infer {name}"
                if alone
                else f"To infer {name}"
            )
            text = f"{name} is known in every row: nothing teaches q({name}|·)."
            self._note_once(
                Event(
                    events.UNTAUGHT,
                    name,
                    text,
                    f"{remedy} without labels, leave {name} out of the data.",
                )
            )
        self._note_folder()
        for name in self._taught_apart():
            text = (
                f"{name} is known in some rows. The bound of these rows has no term with "
                f"q({name}|·), so their labels do not train it."
            )
            self._note_once(
                Event(
                    events.LABELS,
                    name,
                    text,
                    f"To train q to predict {name}, add classify=1 (--classify 1).",
                )
            )
        for note in self._repeats():
            self._note_once(Event(events.REPEATED, "data", note))
        stop = self._out_of_patience() or self.stepper.converged
        if slower := private_torch.slower():
            text = (
                f"torch {torch.__version__} lacks private functions that aevb uses, so these are "
                f"slower: {', '.join(slower)}."
            )
            self._note_once(Event(events.NOT_COMPILED, "run", text))
        if s.schedule.objective == "evidence" and with_weights(self.model):
            text = "mle() trains p alone."
            remedy = (
                "Judge the run by the evidence: the elbo, its terms and the gap use q as it was "
                "before the run."
            )
            self._note_once(Event(events.P_ALONE, "q", text, remedy))
        if self.in_batches is not None:
            text = (
                f"mle() takes Adam's steps on batches instead of L-BFGS on all rows: "
                f"{self.in_batches}."
            )
            self._note_once(Event(events.IN_BATCHES, "run", text))
        try:
            while self.step < self.total and not stop:
                phase = s.schedule.phase(self.step, self.total)
                yield phase
                self.step += 1
                for watcher in self.watchers:
                    watcher.step(self.step)
                stop = self.stepper.converged
                due = {
                    name: self.step % every == 0 or self.step == self.total or stop
                    for name, every in intervals.items()
                }
                # world.any() is collective: every rank must get the same answer.
                ask = self.world.size == 1 or any(due.values()) or self.step % 20 == 0
                stopped = ask and self.world.any(interrupted.set)
                if self.stepper.waits and not (any(due.values()) or stopped):
                    continue  # do not synchronise with the GPU unless there is something to do
                if self.stepper.failed():
                    reached = self.step
                    self._trouble()
                    if self.step < reached:
                        continue
                if due["log"]:
                    self._record(self.stepper.read() | self._place(phase), began)
                if due["validate"] and self.validation is not None:
                    self._validate(began)
                    stop = stop or self._out_of_patience()
                if (
                    (due["checkpoint"] and self._time_to_save())
                    or self.step == self.total
                    or stop
                    or stopped
                ):
                    self._refuse_broken()
                    if self.step == self.total:
                        self._note_course()
                    self._save()
                if stopped:
                    raise _stopped(
                        f"stopped after step {self.step} of {self.total}", "it", self.out
                    )
            self.stepper.settle_model()
            if s.patience is not None:
                self._restore_best()
        finally:
            self.stepper.close()
            self.evaluation = None  # frees its CUDA graph
            self.model.train(was)
            self._note_teaching()
            self.seconds = self.before + time.perf_counter() - began

    def finished(self) -> Run:
        self.world.leave()
        return Run(self.model, self.settings, self.rows, self.out, self.step, self.seconds)

    def _take_step(self, phase: Phase) -> None:
        self.steps.step([(self.stepper, self.step, phase, self.rate(phase, self.step))])
        self.note_what_stays()

    def note_what_stays(self) -> None:
        """Record the events that the stepper reports."""
        for event in self.stepper.remarks(self.step + 1, self.total):
            self._note_once(event)

    def _note_course(self) -> None:
        """Record at the end of a run whether its bound fell back.

        Record also whether its importance weights rest on one sample.
        """
        if (
            found := fall(Run(self.model, self.settings, self.rows, self.out, self.step, 0.0))
        ) is not None:
            self._note(Event(events.FELL_BACK, "run", *told_fall(found)))
        if self.settings.schedule.objective != "bound":
            return
        self.stepper.settle_model()
        batch = self.source.take(torch.arange(min(ROWS, self.source.n)))
        effective = effective_weights(
            self.model, self.plan, batch, seed_of(self.settings.seed, "course", 0)
        )
        if effective is not None and effective < FEW:
            self._note(Event(events.ONE_SAMPLE, "run", *told_weights(effective, self.plan.samples)))

    def _place(self, phase: Phase) -> dict[str, Any]:
        """Return a step's phase, learning rate and KL weight.

        Iterations over all rows have only a phase.
        """
        if self.on_all_rows:
            return {"phase": "EM" if self.em is not None else phase.name}
        s = self.settings
        return {"lr": self.rate(phase, self.step - 1), "phase": phase.name} | (
            {"kl weight": s.kl_weight(self.step - 1)} if s.kl_warmup else {}
        )

    def rate(self, phase: Phase, step: int) -> float:
        s = self.settings
        assert s.lr is not None
        rate = s.lr * min(1.0, (step + 1) / s.warmup) if s.warmup else s.lr
        if s.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * phase.position / phase.length))
        return rate

    # History and validation -----------------------------------------------------------------------

    def _record(self, values: dict[str, Any], began: float) -> None:
        row = {
            "step": self.step,
            "epoch": round(self.step * self.order.batch / self.source.n, 4),
            **values,
            "seconds": round(self.before + time.perf_counter() - began, 3),
        }
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
        for watcher in self.watchers:
            watcher.row(row)
        self._note_folder()

    def _validate(self, began: float) -> None:
        """Record the bound (and the exact evidence, if known) on the validation data.

        Keep the weights if the value is the best so far.
        """
        assert self.validation is not None
        s = self.settings
        self.stepper.settle_model()
        if self.evaluation is None:
            self.evaluation = Evaluation(
                self.model,
                self.validation,
                how=s.how,
                bound=s.bound,
                samples=s.samples,
                seed=s.seed,
            )
        with threads(self.all_threads):  # large batches, and after= is the user's code
            values = self.evaluation()
            found = self._asked()
        self._record({f"validation {name}": value for name, value in values.items()} | found, began)
        value = values[s.judge]
        if math.isfinite(value) and (self.best is None or value > self.best["value"]):
            self.best, self.waited = {"value": value, "step": self.step}, 0
            # The next checkpoint writes it to disk.
            self.best_checkpoint = self._checkpoint(copied=True)
        else:
            self.waited += 1

    def _asked(self) -> dict[str, float]:
        """Call ``after`` and return the numbers that it gives.

        ``after`` may change the values of the weights, but not their layout, nor their address if
        steps are CUDA graphs: a compiled step reads them where they were. It may not freeze
        parameters or add hooks either, because the steps are fixed when the run begins.
        """
        if self.after is None:
            return {}
        before = self._forms()
        self._note_teaching()  # ``after`` may compute a posterior, which reads this record
        found = dict(self.after(self.step, self.model) or {})
        changed = next(
            (name for name, form in self._forms().items() if before.get(name) != form), None
        )
        if changed is not None:
            raise TrainingError(
                f"after= put another tensor in the place of {changed} at step {self.step}, but "
                f"the run keeps using the old one. "
                "Write the new values into the parameter (parameter.copy_(…) under "
                "torch.no_grad(), or load_state_dict)."
            )
        frozen, was = _frozen(self.model), self.recorded["frozen"]
        if frozen != was:
            name = min(set(frozen).symmetric_difference(was))
            done = "froze" if name in frozen else "unfroze"
            raise TrainingError(
                f"after= {done} {name} at step {self.step}, but a run cannot change which "
                f"parameters it trains. Train in two runs."
            )
        own = own_part(self.model) if self.stepper.not_recorded is None else None
        if own is not None:
            raise TrainingError(
                f"after= changed the model at step {self.step}: {own}. This run replays recorded "
                f"steps, so the change would have no effect. "
                "Make it before fit()."
            )
        return found

    def _forms(self) -> dict[str, tuple[Any, ...]]:
        fixed = self.stepper.captures
        return {
            name: (id(p), p.shape, p.stride(), p.dtype, p.device, p.data_ptr() if fixed else None)
            for name, p in self.model.named_parameters()
        }

    def _out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.waited >= self.settings.patience

    # Checkpoints ----------------------------------------------------------------------------------

    def _time_to_save(self) -> bool:
        """Return whether a due checkpoint is written now.

        Unless ``checkpoint_every`` is set, checkpoints are at least half a minute apart: on small
        data, writing them would take longer than training.
        """
        return self.settings.checkpoint_every is not None or self.world.any(
            self.world.first and time.perf_counter() - self.saved > 30
        )

    @cached_property
    def open_ends(self) -> bool:
        """Whether sequences end in time steps without data, judged by the first 1,000 rows."""
        graph = self.model.graph
        return any(graph.timed[name] for name in graph.observed) and open_ended(
            graph, self.source.take(torch.arange(min(1000, self.source.n)))
        )

    def _note_teaching(self) -> None:
        """Record in the model which factors of q this run trained.

        Record also which it left untrained, and why.
        """
        model, schedule = self.model, self.settings.schedule
        if not self.step:
            return
        names, known = with_weights(model), self._untaught()
        untrained = {
            name: f"{name} was known in every training row, so that q({name}|·) was not trained"
            for name in known
        }
        if schedule.objective == "bound":
            e_steps, m_steps = self._counted()
            trained = [name for name in trainable_latents(model) if name not in known]
            if e_steps and e_steps * LEAST_SHARE < m_steps:
                model.teaching.record(
                    model,
                    dict.fromkeys(trained, f"q was trained in {e_steps} of {self.step} steps"),
                )
            elif e_steps:
                model.teaching.taught(
                    model, trained, lacked=self.source.lacking, open_ends=self.open_ends
                )
                model.teaching.record(model, untrained)
            return
        behind = (
            "mle() trains p alone"
            if schedule.objective == "evidence"
            else self.stepper.left_alone and f"em() left q as it is: {self.stepper.left_alone}"
        )
        if behind:
            model.teaching.record(model, dict.fromkeys(names, behind) | untrained)
            return
        model.teaching.record(model, untrained)
        if names := [name for name in names if name not in self.plan.clamped]:
            model.teaching.lacked = None  # EM replaced q by the exact posterior of complete rows
            model.teaching.taught(model, names, lacked={})

    def _counted(self) -> tuple[int, int]:
        """Return how many of the steps so far trained q, and how many trained p."""
        schedule = self.settings.schedule
        cycles, rest = divmod(self.step, schedule.cycle)
        phases = [
            schedule.phase(step, self.total) for step in range(schedule.cycle if cycles else rest)
        ]
        q, p = ([getattr(phase, group) for phase in phases] for group in ("phi", "theta"))
        return cycles * sum(q) + sum(q[:rest]), cycles * sum(p) + sum(p[:rest])

    def _checkpoint(self, copied: bool = False) -> Checkpoint:
        self.stepper.settle_model()
        self._note_teaching()
        state = {
            "best": self.best,
            "waited": self.waited,
            "skipped": self.skipped,
            "settings": self.recorded,
            "metrics": self.stepper.metrics(),
        }
        state |= {"teaching": self.model.teaching.state(self.model)}
        state |= {"history": self.folder.history()} if self.folder is not None else {}
        weights, tensors = dict(self.model.state_dict()), self.stepper.state()
        if copied:
            weights, tensors = (
                {name: tensor.clone() for name, tensor in found.items()}
                for found in (weights, tensors)
            )
        return Checkpoint(self.step, weights, tensors, state)

    def _save(self) -> None:
        if self.out is None:
            return
        newest, best = self._checkpoint(), self.best_checkpoint
        if self.folder is not None:
            known = {int(path.name[5:]) for path in folders(self.out)}
            if best is not None and best.step != newest.step and best.step not in known:
                self.folder.save(best, keep=frozenset(known))
            # Keep one earlier checkpoint as a fallback, in case the newest gets damaged.
            before = max((step for step in known if step < newest.step), default=newest.step)
            self.folder.save(
                newest, keep=frozenset({before} | ({self.best["step"]} if self.best else set()))
            )
        self.saved = time.perf_counter()
        self.world.wait()

    def _restore_best(self) -> None:
        if self.best is None:
            return
        best = self.best_checkpoint
        if best is None and self.out is not None:
            best = read(self.out / "checkpoints" / f"step-{self.best['step']}")
        if best is not None:
            self.model.load_state_dict(best.weights)
            self.model.teaching.restore(self.model, best.state.get("teaching"))

    # Failed steps ---------------------------------------------------------------------------------

    def _trouble(self) -> None:
        """Handle a non-finite loss or gradient: name its cause, and raise unless it may be skipped.

        The weights are those from before the failed step.
        """
        self.step = self.stepper.at
        phase = self.settings.schedule.phase(self.step, self.total)
        failure = self.stepper.what_failed(self.step, phase)
        message = f"Step {self.step}: {failure} No step was taken."
        self.skipped += 1
        if self.skipped > self.settings.skip:
            advice = " Look at these rows; a new run may do better with a lower lr, or clip=."
            if self.step == 0 and (name := self._large()) is not None:
                advice = (
                    f" Nothing has been learned yet, so the cause is probably the networks' "
                    f"inputs: {name} is large. For counts, let the "
                    "networks read logarithms, net=mlp(…, log=True); standardise other data "
                    "(aevb.data.standardise)."
                )
            if self.em is not None and self.em.closed:
                advice = " Standardise the data (aevb.data.standardise), or use mle()."
            raise TrainingError(message + self._last_good() + advice)
        self._note(
            Event(
                events.SKIPPED,
                "run",
                f"{message} Skipped ({self.skipped} of {self.settings.skip}).",
            )
        )
        self.step += 1
        self.stepper.go_on()

    def _refuse_broken(self) -> None:
        """Raise if the objective is not finite at the current weights: never save such weights.

        The test uses the rows of the last step, whose objective was finite before it. If steps may
        be skipped, it also uses the rows of the next few steps, and one finite objective is enough.
        """
        last = self.step - 1
        if not self.stepper.sound(range(last, self.step + min(self.settings.skip, 9))):
            what = self.stepper.what_failed(last, self.settings.schedule.phase(last, self.total))
            raise TrainingError(
                f"After step {last}, {what} The weights are of no use and were not "
                f"saved.{self._last_good()} Use a lower lr (it was {self.settings.lr:g}), or "
                f"clip=."
            )

    def _last_good(self) -> str:
        """Return a sentence that names the newest checkpoint.

        Every checkpoint was tested before it was saved.
        """
        return (
            f" The last good checkpoint is {folders(self.out)[-1]}."
            if self.out is not None and folders(self.out)
            else ""
        )

    def _large(self) -> str | None:
        """Return a variable that q reads and that has values above 100, or None."""
        batch = self.source.take(self.order.rows(0).cpu())
        read = {
            ref.name
            for name in self.model.graph.latents
            for ref in self.model.graph.reads("q", name)
        }
        return next(
            (name for name in batch if name in read and float(batch[name].abs().max()) > 100), None
        )

    def _note_once(self, event: Event) -> None:
        """Record an event unless the run, or the run that it resumes, has already recorded it."""
        if not any(
            row.get("note") == str(event) and row.get("kind", event.kind) == event.kind
            for row in self.rows
        ):
            self._note(event)

    def _note_folder(self) -> None:
        """Record the notes of the run's folder."""
        while self.folder is not None and self.folder.notes:
            self._note_once(Event(events.FOLDER, "run", self.folder.notes.pop(0)))

    def _note(self, event: Event) -> None:
        row = event.row(self.step)
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
        for watcher in self.watchers:
            watcher.note(str(event))


def _refuse_shared(model: Model) -> None:
    """Refuse a parameter under two names: each step would update it twice."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ValueError(
                f"{first} and {name} are one parameter, but in a declaration every factor has its "
                f"own parameters. "
                "To share a computation, declare it as a variable that both factors read."
            )


def _frozen(model: Model) -> list[str]:
    """Return the names of the frozen parameters."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _fingerprint(source: Source) -> str:
    """Return the number of rows and a hash of all of them.

    A resumed run compares it with its data.
    """
    return f"{source.n} rows, {source.digest()}"


def _is_partial(fingerprint: Any) -> bool:
    """Whether a fingerprint has 16 digits: earlier versions hashed only the first and last rows."""
    return isinstance(fingerprint, str) and len(fingerprint.rpartition(" ")[2]) == 16


def _partial_fingerprint(source: Source) -> str:
    rows = torch.cat([torch.arange(min(8, source.n)), torch.arange(max(0, source.n - 8), source.n)])
    digest = hashlib.sha256()
    for name, value in sorted(source.read(rows).items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return f"{source.n} rows, {digest.hexdigest()[:16]}"


def _usual_rate(model: Model) -> float:
    """Return the default learning rate: larger for linear models than for models with networks."""
    linear = all(
        not isinstance(module, MLP) or not module.spec.hidden for module in model.modules()
    )
    plain = all(
        not isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d | Recurrence)
        for module in model.modules()
    )
    return 0.05 if linear and plain else 2e-3
