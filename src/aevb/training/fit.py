"""fit: one training loop, read top to bottom.

What is random is a function of (seed, step): the order of the rows, the noise of the estimate. So a run's whole state is its
weights, its optimiser, and its step; a resumed run is the uninterrupted one, bit for bit on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from aevb.batch import Batch, split_latents
from aevb.data.degenerate import refuse_degenerate
from aevb.data.sources import Source, open_source
from aevb.deterministic import Recurrence
from aevb.evidence.exact import why_not_exact
from aevb.evidence.gap import reads_latents
from aevb.families import OneHot
from aevb.model import Model
from aevb.networks import MLP
from aevb.plan import Plan
from aevb.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    TrainingError,
    check_fit,
    folders,
    latest,
    read,
)
from aevb.training.display import TensorBoard, Watcher, display
from aevb.training.distributed import join
from aevb.training.em import exact_em
from aevb.training.evaluation import evaluate
from aevb.training.folder import Folder, check_declaration, read_rows, refuse_second
from aevb.training.order import Order
from aevb.training.run import Run
from aevb.training.schedules import Phase
from aevb.training.settings import Settings, to_toml
from aevb.training.step import Stepper

__all__ = ["Training", "TrainingError", "fit"]

# What a resumed run may set anew: none of it changes the steps that were taken. A longer run stretches what is left of the learning rate.
MAY_CHANGE = ("epochs", "steps", "patience", "validate_every", "log_every", "checkpoint_every", "skip")


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
    **settings: Any,
) -> Run:
    """Train a model and return the run.

    ``data`` is a dictionary of arrays (or files) by variable; ``validation`` likewise. ``settings`` are those of
    :class:`Settings`: epochs or steps, batch, lr, schedule, how, bound, …. With ``out`` the run's files go there, and
    ``resume=True`` continues one that was interrupted. The model is left with the weights of the last step, or of the best
    validation if ``patience`` is set; :func:`load_run` reads either from the files.

    ``progress`` shows the run as it goes: on a terminal unless it is False, elsewhere as plain lines if it is True.
    ``tensorboard=True`` writes scalars for TensorBoard into ``out/tensorboard``. ``after(step, model)`` is called
    after every validation; numbers that it returns, by name, are recorded with it.
    """
    unknown = sorted(set(settings) - {f.name for f in fields(Settings)})
    if unknown:
        raise TypeError(f"fit has no setting {unknown[0]!r}. Its settings are {', '.join(f.name for f in fields(Settings))}.")
    with ExitStack() as closing:
        training = Training(model, data, validation, Settings(**settings), Path(out) if out is not None else None, resume, closing)
        training.watch(progress, tensorboard, closing)
        training.after = after
        return training.run()


class Training:
    """One run in the making."""

    def __init__(self, model: Model, data: Any, validation: Any, settings: Settings, out: Path | None, resume: bool, closing: ExitStack) -> None:
        settings = settings if settings.lr is not None else replace(settings, lr=_usual_rate(model))
        self.model, self.settings, self.out = model, settings, out
        like = model._parameter()
        self.device, self.dtype = like.device, like.dtype
        self.world = join(self.device)
        self.world.copy_first(list(model.state_dict().values()))
        self.source = open_source(model.graph, data, like)
        refuse_degenerate(model.graph, self.source)
        self.recorded = settings.record() | {"fresh": {name: repr(fresh) for name, fresh in self.source.fresh.items()} or None}
        self.recorded["data"] = _fingerprint(self.source)
        self.validation = None if validation is None else open_source(model.graph, validation, like)
        self.em = exact_em(model) if settings.schedule.objective == "em" else None
        size = self.source.n if self.em is not None and self.em.closed else settings.batch  # a step is then an iteration over all rows
        self.total = settings.total(self.source.n, size)
        self.order = Order(self.source.n, size, settings.seed, self.device)
        self.per_epoch = max(1, round(self.source.n / self.order.batch))
        first = self.source.take(torch.arange(min(2, self.source.n)))
        self.plan = self._plan(first)
        self.labelled = [name for name in model.graph.latents if name in first and model.graph.rule("q", name).spec.finite]
        self._check_settings()
        self.stepper = Stepper(model, self.plan, self.source, self.order, settings, self.world, self.labelled, self._classes(), self.em)
        self._check_groups()
        self.step, self.waited, self.skipped, self.before = 0, 0, 0, 0.0
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.best_checkpoint: Checkpoint | None = None
        self.folder: Folder | None = None
        self.watchers: list[Watcher] = []
        self.after: Callable[[int, Model], Mapping[str, float] | None] | None = None
        if out is not None:
            self._open(out, resume, closing)
        elif resume:
            raise ValueError("resume=True continues a run from its files; say where they are with out=….")

    # Before the first step ----------------------------------------------------------------------------------------------------

    def _plan(self, batch: Batch) -> Plan:
        clamped, partial = split_latents(self.model.graph, batch)
        s = self.settings
        return self.model.plan(how=s.how, bound=s.bound, samples=s.samples, gradient=s.gradient, clamped=clamped, partial=partial)

    def _check_settings(self) -> None:
        s = self.settings
        if s.kl_warmup >= self.total:
            raise ValueError(
                f"kl_warmup={s.kl_warmup} does not end before training does ({self.total} steps): the bound would never be trained. Shorten it."
            )
        if s.warmup >= self.total:
            raise ValueError(f"warmup={s.warmup} does not end before training does ({self.total} steps). Shorten it.")
        if self.plan.untrained and s.schedule.objective == "bound":
            name = self.plan.untrained[0]
            raise ValueError(
                f"how={{{name!r}: 'sum'}} cancels q({name}) from the bound, so it cannot be trained. Use 'enumerate' to train, 'sum' to evaluate."
            )
        if s.schedule.objective == "evidence" and (reason := why_not_exact(self.model)):
            raise ValueError(f"mle() ascends the exact evidence, which is not known for this model: {reason}. Use joint().")
        if s.classify and not self.labelled:
            raise ValueError(
                "classify= adds log q(y|x) on rows whose label is known; the data have labels for no discrete latent. Pass y=…, −1 where unknown."
            )
        if bool(s.agree) != bool(s.distort):
            raise ValueError("agree= is the weight of a class staying the same, distort= says under what. Set both, or neither.")
        if s.agree and not self._classes():
            raise ValueError("agree= is about q(y|x), but no latent without time is a OneHot that q reads off the data alone.")
        for name in s.distort:
            if name not in self.model.graph.observed or math.prod(s.distort[name].shape) != self.model.graph.size(name):
                raise ValueError(f"distort= has images of {s.distort[name].shape} for {name!r}, which is no observed variable of that size.")
        for name in self.labelled if s.classify else ():
            unknown = [ref.name for ref in self.model.graph.reads("q", name) if ref.name in self.model.graph.latents]
            if unknown:
                raise ValueError(f"classify= needs q({name}|·) as a function of the data alone, but it reads {unknown[0]!r}.")
        if s.patience is not None and self.validation is None:
            raise ValueError("patience counts validations; pass validation= data.")

    def _classes(self) -> list[str]:
        """Discrete latents whose q is a function of the data."""
        graph = self.model.graph
        return [
            name
            for name in graph.latents
            if isinstance(graph.rule("q", name).spec, OneHot) and not graph.timed[name] and not reads_latents(graph, name)
        ]

    def _check_groups(self) -> None:
        """Every phase must have something to move."""
        schedule = self.settings.schedule
        phases = {phase.name: phase for phase in (schedule.phase(step, self.total) for step in range(min(self.total, schedule.cycle)))}
        for phase in phases.values():
            if not self.stepper.active(phase) and not (self.em is not None and self.em.closed):
                what = "q" if phase.phi and not phase.theta else "p" if phase.theta and not phase.phi else "the model"
                raise ValueError(f"There is nothing to train in phase {phase.name}: {what} has no free parameters. Use another schedule.")

    def _open(self, out: Path, resume: bool, closing: ExitStack) -> None:
        refuse_second(out, resume)
        folder = Folder(out)
        if self.world.first:
            closing.enter_context(folder.held())
        found = latest(out) if resume else None
        if found is not None:
            self._continue(out, found)
        if self.world.first:
            folder.begin(self.model.declaration(), to_toml(self.recorded), self.rows)
            self.folder = folder

    def _continue(self, out: Path, found: Checkpoint) -> None:
        there = Settings().record() | found.state["settings"]  # a setting that did not exist then had its default
        changed = sorted(key for key in self.recorded.keys() & there.keys() - set(MAY_CHANGE) if self.recorded[key] != there[key])
        if changed == ["data"]:
            raise CheckpointError(f"{out} was trained on other data ({there['data']}, not {self.recorded['data']}). Resume with the same.")
        changed = [key for key in changed if key != "data"]
        if changed:
            raise CheckpointError(
                f"{out} was trained with {changed[0]}={there.get(changed[0])!r}, not {self.recorded[changed[0]]!r}. Resume with the same settings."
            )
        check_fit(found, self.model.state_dict(), out)
        check_declaration(out, self.model.declaration())
        self.model.load_state_dict(found.weights)
        self.stepper.restore(found.optimizer, found.state["metrics"])
        self.step, self.best, self.waited, self.skipped = found.step, found.state["best"], found.state["waited"], found.state["skipped"]
        self.rows = read_rows(out, self.step)
        self.before = max((row.get("seconds", 0.0) for row in self.rows), default=0.0)

    def watch(self, progress: bool | None, tensorboard: bool, closing: ExitStack) -> None:
        """Show the run as it goes; of several processes, the first does."""
        if tensorboard and self.out is None:
            raise ValueError("tensorboard=True writes into the run's folder; say where that is with out=….")
        if not self.world.first:
            return
        if tensorboard and self.folder is not None:
            self.watchers.append(TensorBoard(self.folder, self.rows))
        epochs = self.total * self.order.batch / self.source.n
        self.watchers.append(display(progress, self.step, self.total, epochs, self.settings.judge, self.best))
        for watcher in self.watchers:
            closing.callback(watcher.close)

    # The loop ---------------------------------------------------------------------------------------------------------------------

    def run(self) -> Run:
        s = self.settings
        began = time.perf_counter()
        validate = s.validate_every or self.per_epoch
        intervals = {"log": s.log_every or max(1, self.total // 200), "validate": validate, "checkpoint": s.checkpoint_every or validate}
        self.saved = began
        was = self.model.training
        self.model.train()
        stop = self._out_of_patience()
        try:
            with _interruptible() as interrupted:
                while self.step < self.total and not stop:
                    phase = s.schedule.phase(self.step, self.total)
                    self._take_step(phase)
                    self.step += 1
                    for watcher in self.watchers:
                        watcher.step(self.step)
                    due = {name: self.step % every == 0 or self.step == self.total for name, every in intervals.items()}
                    ask = self.world.size == 1 or any(due.values()) or self.step % 20 == 0  # the same in every process
                    stopped = ask and self.world.any(bool(interrupted))
                    if self.stepper.waits and not (any(due.values()) or stopped):
                        continue  # a GPU works on; the host looks when there is something to do
                    if self.stepper.failed():
                        reached = self.step
                        self._trouble()
                        if self.step < reached:
                            continue
                    if due["log"]:
                        self._record(self.stepper.read() | self._place(phase), began)
                    if due["validate"] and self.validation is not None:
                        self._validate(began)
                        stop = self._out_of_patience()
                    if (due["checkpoint"] and self._time_to_save()) or self.step == self.total or stop or stopped:
                        self._save()
                    if stopped:
                        raise KeyboardInterrupt(
                            f"stopped after step {self.step} of {self.total}" + (f"; resume=True continues it from {self.out}" if self.out else "")
                        )
            if s.patience is not None:
                self._restore_best()
        finally:
            self.stepper.optimizer.zero_grad(set_to_none=True)
            self.model.train(was)
        self.world.leave()
        return Run(self.model, s, self.rows, self.out, self.step, self.before + time.perf_counter() - began)

    def _take_step(self, phase: Phase) -> None:
        self.stepper.step(self.step, phase, self._rate(phase, self.step))

    def _place(self, phase: Phase) -> dict[str, Any]:
        """Where in the schedule a step stands; an iteration in closed form has no learning rate."""
        if self.em is not None and self.em.closed:
            return {"phase": "EM"}
        s = self.settings
        return {"lr": self._rate(phase, self.step - 1), "phase": phase.name} | (
            {"kl weight": min(1.0, self.step / s.kl_warmup)} if s.kl_warmup else {}
        )

    def _rate(self, phase: Phase, step: int) -> float:
        s = self.settings
        assert s.lr is not None
        rate = s.lr * min(1.0, (step + 1) / s.warmup) if s.warmup else s.lr
        if s.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * phase.position / phase.length))
        return rate

    # Seeing it ------------------------------------------------------------------------------------------------------------------------

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

    def _validate(self, began: float) -> None:
        """Record the bound (and the evidence, where exact) on the validation data, and whether it is the best so far."""
        assert self.validation is not None
        s = self.settings
        values = evaluate(self.model, self.validation, how=s.how, bound=s.bound, samples=s.samples, seed=s.seed)
        found = self.after(self.step, self.model) if self.after is not None else None
        self._record({f"validation {name}": value for name, value in values.items()} | dict(found or {}), began)
        value = values[s.judge]
        if math.isfinite(value) and (self.best is None or value > self.best["value"]):
            self.best, self.waited = {"value": value, "step": self.step}, 0
            self.best_checkpoint = self._checkpoint(copied=True)  # on disk with the next one that is written
        else:
            self.waited += 1

    def _out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.waited >= self.settings.patience

    # Keeping it --------------------------------------------------------------------------------------------------------------------------

    def _time_to_save(self) -> bool:
        """Unless an interval was asked for, checkpoints are half a minute apart: on small data writing them would take longer than training."""
        return self.settings.checkpoint_every is not None or self.world.any(self.world.first and time.perf_counter() - self.saved > 30)

    def _checkpoint(self, copied: bool = False) -> Checkpoint:
        state = {"best": self.best, "waited": self.waited, "skipped": self.skipped, "settings": self.recorded, "metrics": self.stepper.metrics()}
        weights, tensors = dict(self.model.state_dict()), self.stepper.state()
        if copied:
            weights, tensors = ({name: tensor.clone() for name, tensor in found.items()} for found in (weights, tensors))
        return Checkpoint(self.step, weights, tensors, state)

    def _save(self) -> None:
        if self.out is None:
            return
        newest, best = self._checkpoint(), self.best_checkpoint
        if self.folder is not None:
            known = {int(path.name[5:]) for path in folders(self.out)}
            if best is not None and best.step != newest.step and best.step not in known:
                self.folder.save(best, keep=frozenset(known))
            before = max((step for step in known if step < newest.step), default=newest.step)  # should the newest be damaged one day
            self.folder.save(newest, keep=frozenset({before} | ({self.best["step"]} if self.best else set())))
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

    # Trouble -----------------------------------------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        """A non-finite loss or gradient: nothing has moved since the step that failed; name what it was, and stop unless skipping is allowed."""
        self.step = self.stepper.at
        message = self.stepper.what_failed(self.step, self.settings.schedule.phase(self.step, self.total))
        self.skipped += 1
        if self.skipped > self.settings.skip:
            kept = f" The last good checkpoint is {folders(self.out)[-1]}." if self.out is not None and folders(self.out) else ""
            raise TrainingError(message + kept + " Look at these rows; a new run may do better with a lower lr, or clip=.")
        self._note(message + f" Skipped ({self.skipped} of {self.settings.skip}).")
        self.step += 1
        self.stepper.go_on()

    def _note(self, text: str) -> None:
        row = {"step": self.step, "note": text}
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
        for watcher in self.watchers:
            watcher.note(text)


def _fingerprint(source: Source) -> str:
    """The number of rows and a digest of some, by which a resumed run knows its data again."""
    rows = torch.cat([torch.arange(min(8, source.n)), torch.arange(max(0, source.n - 8), source.n)])
    digest = hashlib.sha256()
    for name, value in sorted(source.read(rows).items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return f"{source.n} rows, {digest.hexdigest()[:16]}"


def _usual_rate(model: Model) -> float:
    """The learning rate where none is asked for: a model of linear maps takes much larger steps than one with networks."""
    linear = all(not isinstance(module, MLP) or not module.spec.hidden for module in model.modules())
    plain = all(not isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d | Recurrence) for module in model.modules())
    return 0.05 if linear and plain else 2e-3


class _Flag:
    def __init__(self) -> None:
        self.set = False

    def __bool__(self) -> bool:
        return self.set


@contextmanager
def _interruptible() -> Iterator[_Flag]:
    """Ctrl-C, or a request to end (SIGTERM), finishes the step and saves; a second one stops at once."""
    flag = _Flag()

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.set:
            raise KeyboardInterrupt
        flag.set = True

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, handle) for number in signals}
    except ValueError:  # not the main thread
        yield flag
        return
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
