"""The training loop.

All randomness (the order of the rows, the noise of the estimate) is a function of (seed, step).
The state of a run is therefore its weights, its optimiser state and its step number. On the CPU, a
resumed run equals the uninterrupted run bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aevb.data.datasets import Recipe
from aevb.data.sources import Source, open_source
from aevb.estimate.metric_names import Metric
from aevb.model import Model
from aevb.posterior.training_record import check_rows
from aevb.training import events
from aevb.training.after_hook import After, call_after
from aevb.training.checkpoint import Checkpoint, TrainingError
from aevb.training.checks import check_settings, check_steps, check_weights
from aevb.training.display import Checking, TensorBoard
from aevb.training.display_choice import display
from aevb.training.events import Event
from aevb.training.history import History
from aevb.training.interrupts import Flag, interruptible, stopped
from aevb.training.intervals import Due, Intervals
from aevb.training.job import prepare_job
from aevb.training.resuming import open_run, recorded_compile, recorded_settings
from aevb.training.run import Run
from aevb.training.run_folder import refuse_taken
from aevb.training.saving import Saving
from aevb.training.schedules import Phase
from aevb.training.settings import Settings
from aevb.training.starting_notes import notes_at_start
from aevb.training.step import Wanted
from aevb.training.step_queue import StepQueue
from aevb.training.steppers import stepper_for
from aevb.training.threads import threads, worth
from aevb.training.tracking import Tracking
from aevb.training.trained_factors import record_trained_factors
from aevb.training.trouble import advice, scale_at_fault
from aevb.training.validation import Validation
from aevb.training.warning_signs import signs_at_end


class Training:
    """One run while it trains."""

    def __init__(
        self,
        model: Model,
        data: Any,
        validation: Any,
        settings: Settings,
        out: Path | None,
        resume: bool,
        closing: ExitStack,
        *,
        progress: bool | None = False,
        warned: Collection[str] = events.WARNINGS,
        tensorboard: bool = False,
        tracking: Tracking | None = None,
        after: After | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        """Check everything, open the run's files, and restore the checkpoint of a resumed run.

        ``warned`` lists the kinds of events that are warnings if nothing is displayed. ``closing``
        releases the folder and the displays at the end.
        """
        if out is not None:
            refuse_taken(out, resume)
        elif resume:
            raise ValueError(
                "resume=True continues a run from its files; give their folder with out=…."
            )
        elif tensorboard:
            raise ValueError(
                "TensorBoard's files are in the run's folder; give that folder with out=…."
            )
        if resume and settings.compile is None and out is not None:
            settings = replace(settings, compile=recorded_compile(out))
        job = prepare_job(model, data, settings, progress=progress, look_for_markers=recipe is None)
        self.job, self.model, self.settings, self.total = job, model, job.settings, job.total
        self.out, self.after = out, after
        self.validation = Validation(job, self._open_validation(validation, progress))
        check_settings(job, validated=validation is not None)
        self.all_threads = torch.get_num_threads()
        self.threads = (
            self.all_threads
            if job.settings.schedule.objective != "bound"
            else worth(model, job.plan, -(-job.order.batch // job.world.size))
        )
        self.stepper, self.queue = stepper_for(job), StepQueue()
        check_steps(job, self.stepper)
        self.step, self.skipped = 0, 0
        self.recorded = recorded_settings(job, with_data=out is not None)
        opened = open_run(out, job, self.recorded, settings, recipe, closing, resume=resume)
        self.history = History(opened.folder, opened.rows)
        self.saving = Saving(out, opened.folder, job.world, job.settings.checkpoint_every)
        if opened.checkpoint is not None:
            self._restore(opened.checkpoint)
        check_weights(model)
        tracking = tracking or Tracking()
        places = tracking.start(job, self.history, closing, self.step)
        self._watch(
            progress, warned, tensorboard, closing, anew=resume and opened.checkpoint is None
        )
        for place in places:
            self.history.tell(place)

    # The loop -------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Train, and return the run."""
        with threads(self.threads), interruptible() as interrupted:
            for phase in self.loop(interrupted):
                self._take_step(phase)
        return self.finished()

    def loop(self, interrupted: Flag) -> Iterator[Phase]:
        """Run everything except the steps.

        Yield the phase of each step. The caller then takes the step.
        """
        schedule, total, stepper = self.settings.schedule, self.total, self.stepper
        intervals = Intervals.of(self.job, captures=stepper.captures)
        with self._training():
            self.history.note_folder(self.step)
            for event in notes_at_start(self.job):
                self.history.note_once(self.step, event)
            stop = self.validation.out_of_patience or stepper.converged
            while self.step < total and not stop:
                phase = schedule.phase(self.step, total)
                yield phase  # the caller takes the step
                self.step += 1
                self.history.stepped(self.step)
                stop = stepper.converged
                due = intervals.due(self.step, last=stop or self.step == total)
                interrupt = self._interrupted(interrupted, due)
                if stepper.waits and not (any(due) or interrupt):
                    continue  # do not synchronise with the GPU unless there is something to do
                if stepper.failed():
                    reached = self.step
                    self._skip_failed_step()
                    if self.step < reached:  # a GPU has not taken the steps after the failed one
                        continue
                if due.log:
                    self._record(stepper.read() | self._place(phase))
                if due.validate and self.validation.source is not None:
                    self._validate()
                    stop = stop or self.validation.out_of_patience
                    if self.validation.out_of_patience and self.step < self.total:
                        self.history.note_once(self.step, self._early_stop())
                last = stop or interrupt or self.step == total
                if last or (due.checkpoint and self.saving.time_to_save()):
                    self._save()
                if interrupt:
                    raise stopped(f"stopped after step {self.step} of {total}", "it", self.out)
            stepper.settle_model()
            if self.settings.patience is not None:
                self._restore_best()

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Train the model inside the context; release what the steps use at its end."""
        self.history.start_clock()
        self.saving.start_clock()
        was = self.model.training
        self.model.train()
        try:
            yield
        finally:
            self.stepper.close()
            self.validation.close()
            self.model.train(was)
            self._record_trained_factors()
            self.seconds = self.history.seconds

    def finished(self) -> Run:
        """Return the run after its last step."""
        self.job.world.leave()
        return self._result(self.seconds)

    def _result(self, seconds: float) -> Run:
        return Run(
            self.model,
            self.settings,
            self.history.rows,
            self.out,
            self.step,
            seconds,
            total=self.total,
        )

    # A step ---------------------------------------------------------------------------------------

    def wanted(self, phase: Phase) -> Wanted:
        """Return the next step, as the queue takes it."""
        return self.stepper, self.step, phase, self.settings.rate(self.step, phase)

    def _take_step(self, phase: Phase) -> None:
        self.queue.step([self.wanted(phase)])
        self.note_remarks()

    def note_remarks(self) -> None:
        """Record the events that the stepper reports."""
        for event in self.stepper.remarks(self.step + 1, self.total):
            self.history.note_once(self.step, event)

    def _interrupted(self, interrupted: Flag, due: Due) -> bool:
        """Whether any process was interrupted. All processes ask at the same steps."""
        world = self.job.world
        ask = world.size == 1 or any(due) or self.step % 20 == 0
        return ask and world.any(bool(interrupted))

    def _skip_failed_step(self) -> None:
        """Return to a step with a non-finite loss or gradient, and skip it or raise.

        The weights are those from before the failed step.
        """
        self.step = self.stepper.at
        phase = self.settings.schedule.phase(self.step, self.total)
        failure = self.stepper.what_failed(self.step, phase)
        message = f"Step {self.step}: {failure} No step was taken."
        self.skipped += 1
        if self.skipped > self.settings.skip:
            raise TrainingError(message + self.saving.last_good() + advice(self.job, self.step))
        text = f"{message} Skipped ({self.skipped} of {self.settings.skip})."
        self.history.note(self.step, Event(events.SKIPPED, "run", text))
        self.step += 1
        self.stepper.go_on()

    # History and validation -----------------------------------------------------------------------

    def _record(self, values: dict[str, Any]) -> None:
        self.history.record(self.step, self.job.epochs(self.step), values)

    def _place(self, phase: Phase) -> dict[str, Any]:
        """Return a step's phase, learning rate and KL weight.

        Iterations over all rows have only a phase.
        """
        if self.job.on_all_rows:
            return {"phase": "EM" if self.job.em is not None else phase.name}
        s, step = self.settings, self.step - 1
        return {"lr": s.rate(step, phase), "phase": phase.name} | (
            {"kl weight": s.kl_weight(step, self.total)} if s.kl_warmup else {}
        )

    def _validate(self) -> None:
        """Record the bound (and the exact evidence, if known) on the validation data.

        Record also what ``after`` returns. Keep the weights if the value is the best so far.
        """
        self.stepper.settle_model()
        with threads(self.all_threads):  # large batches, and after= is the user's code
            values = self.validation.values()
            found = self._call_after()
        self._record(
            {Metric(name, validation=True).key: value for name, value in values.items()} | found
        )
        if self.validation.is_best(self.step, values):
            self.saving.keep_best(self._checkpoint(copied=True))

    def _early_stop(self) -> Event:
        """Return the announcement that the run stops because its patience has run out."""
        s, best = self.settings, self.validation.best
        since = (
            "was not finite"
            if best is None
            else f"has not risen above {best.value:.4f}, its value at step {best.step:,},"
        )
        kept = "" if best is None else f" The model has the weights of step {best.step:,}."
        text = (
            f"Stopped early, after step {self.step:,} of {self.total:,}: the validation {s.judge} "
            f"{since} in {self.validation.waited} validations (patience {s.patience}).{kept}"
        )
        return Event(events.STOPPED_EARLY, "run", text)

    def _call_after(self) -> dict[str, float]:
        if self.after is None:
            return {}
        self._record_trained_factors()  # ``after`` may compute a posterior, which reads this record
        return call_after(self.after, self.step, self.job, self.stepper)

    def _record_trained_factors(self) -> None:
        record_trained_factors(self.job, self.step, self.stepper.left_alone)

    # Checkpoints ----------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save a checkpoint, unless the weights are of no use."""
        self._refuse_broken()
        if self.step == self.total:
            self.stepper.settle_model()
            for event in signs_at_end(self.job, self._result(0.0)):
                self.history.note(self.step, event)
        if self.out is not None:
            best = self.validation.best
            self.saving.save(self._checkpoint(), None if best is None else best.step)

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
                f"saved.{self.saving.last_good()}"
                + (
                    scale_at_fault(self.job)
                    or f" Use a lower lr (it was {self.settings.lr:g}), or clip=."
                )
            )

    def _checkpoint(self, *, copied: bool = False) -> Checkpoint:
        """Return the state of the run; ``copied`` keeps it while training goes on."""
        self.stepper.settle_model()
        self._record_trained_factors()
        folder = self.history.folder
        state = {
            **self.validation.state(),
            "skipped": self.skipped,
            "settings": self.recorded,
            "metrics": self.stepper.metrics(),
            "teaching": self.model.teaching.state(self.model),
            **({} if folder is None else {"history": folder.history()}),
        }
        weights, optimizer = dict(self.model.state_dict()), self.stepper.state()
        if copied:
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            optimizer = {
                owner: {name: tensor.clone() for name, tensor in tensors.items()}
                for owner, tensors in optimizer.items()
            }
        return Checkpoint(self.step, weights, optimizer, state)

    def _restore(self, found: Checkpoint) -> None:
        self._set_weights(found)
        self.stepper.restore(found.optimizer, found.state["metrics"])
        self.validation.restore(found.state)
        self.step, self.skipped = found.step, found.state["skipped"]

    def _restore_best(self) -> None:
        """Give the model the weights of the best validation."""
        best = self.validation.best
        found = None if best is None else self.saving.best(best.step)
        if found is not None:
            self._set_weights(found)

    def _set_weights(self, found: Checkpoint) -> None:
        self.model.load_state_dict(found.weights)
        self.model.teaching.restore(self.model, found.state.get("teaching"))

    # Before the first step ------------------------------------------------------------------------

    def _open_validation(self, data: Any, progress: bool | None) -> Source | None:
        if data is None:
            return None
        shown = Checking(progress if self.job.world.first else False, "validation")
        source = open_source(self.model.graph, data, self.model._parameter(), shown)
        check_rows(source, self.job.source.columns, self.job.source.pixels)
        return source

    def _watch(
        self,
        progress: bool | None,
        warned: Collection[str],
        tensorboard: bool,
        closing: ExitStack,
        *,
        anew: bool,
    ) -> None:
        """Attach the progress display and TensorBoard. Only the first process has them.

        ``anew`` says that ``resume=True`` found no checkpoint.
        """
        history, total = self.history, self.total
        if not self.job.world.first:
            return
        if tensorboard and history.folder is not None:
            history.watch(TensorBoard(history.folder, history.rows))
        history.watch(
            display(
                progress,
                self.step,
                total,
                self.job.epochs(total),
                self.settings.judge,
                self.validation.best,
                validates=self.validation.source is not None,
                warned=warned,
            )
        )
        for watcher in history.watchers:
            closing.callback(watcher.close)
        if anew:  # not recorded, so that the history equals that of an uninterrupted run
            history.tell(
                f"There is no checkpoint in {self.out} yet that resume=True could continue: the "
                f"run starts at step 0."
            )
