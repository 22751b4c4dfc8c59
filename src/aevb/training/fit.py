"""fit: one training loop, read top to bottom.

What is random is a function of (seed, step): the order of the rows, the noise of the estimate. So a run's whole state is its
weights, its optimiser, and its step; a resumed run is the uninterrupted one, bit for bit on the CPU.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from aevb import noise as noises
from aevb.batch import Batch, split_latents
from aevb.data.sources import open_source
from aevb.estimators import Bound, estimate
from aevb.evidence import LinearGaussian, why_not_linear_gaussian
from aevb.model import Model
from aevb.plan import Plan
from aevb.program import Program
from aevb.training.checkpoint import Checkpoint, CheckpointError, check_fit, folders, latest, optimizer_tensors, read, restore_optimizer, write
from aevb.training.distributed import join
from aevb.training.evaluation import evaluate
from aevb.training.order import Order, seed_of
from aevb.training.run import Run
from aevb.training.schedules import Phase
from aevb.training.settings import Settings, to_toml


class TrainingError(RuntimeError):
    """A run that cannot go on; the message names the step, the rows and the factor."""


def fit(
    model: Model, data: Any, *, validation: Any = None, out: str | Path | None = None, resume: bool = False, progress: bool = False, **settings: Any
) -> Run:
    """Train a model and return the run.

    ``data`` is a dictionary of arrays (or files) by variable; ``validation`` likewise. ``settings`` are those of
    :class:`Settings`: epochs or steps, batch, lr, schedule, how, bound, …. With ``out`` the run's files go there, and
    ``resume=True`` continues one that was interrupted.
    """
    unknown = sorted(set(settings) - {f.name for f in fields(Settings)})
    if unknown:
        raise TypeError(f"fit has no setting {unknown[0]!r}. Its settings are {', '.join(f.name for f in fields(Settings))}.")
    return Training(model, data, validation, Settings(**settings), Path(out) if out is not None else None, resume, progress).run()


class Training:
    """One run in the making."""

    def __init__(self, model: Model, data: Any, validation: Any, settings: Settings, out: Path | None, resume: bool, progress: bool) -> None:
        self.model, self.settings, self.out, self.progress = model, settings, out, progress
        like = model._parameter()
        self.device, self.dtype = like.device, like.dtype
        self.world = join(self.device)
        self.world.copy_first(list(model.state_dict().values()))
        self.source = open_source(model.graph, data, like)
        self.validation = None if validation is None else open_source(model.graph, validation, like)
        self.total = settings.total(self.source.n)
        self.order = Order(self.source.n, settings.batch, settings.seed)
        self.per_epoch = max(1, round(self.source.n / self.order.batch))
        first = self.source.take(torch.arange(min(2, self.source.n)))
        self.plan = self._plan(first)
        self.labelled = [name for name in model.graph.latents if name in first and model.graph.rule("q", name).spec.finite]
        self._check_settings()
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.groups = {"theta": model.theta(), "phi": model.phi()}
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.Adam([p for group in self.groups.values() for p in group], lr=settings.lr, fused=fused)
        self.step, self.waited, self.skipped = 0, 0, 0
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.best_weights: dict[str, Tensor] | None = None
        self.spoke = time.perf_counter()
        self.exact = why_not_linear_gaussian(model) is None
        if out is not None:
            self._open(out, resume)
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
        if self.plan.untrained and s.schedule.objective != "evidence":
            name = self.plan.untrained[0]
            raise ValueError(
                f"how={{{name!r}: 'sum'}} cancels q({name}) from the bound, so it cannot be trained. Use 'enumerate' to train, 'sum' to evaluate."
            )
        if s.schedule.objective == "evidence" and (reason := why_not_linear_gaussian(self.model)):
            raise ValueError(f"mle() ascends the exact evidence, which is not known for this model: {reason}. Use joint().")
        if s.classify and not self.labelled:
            raise ValueError(
                "classify= adds log q(y|x) on rows whose label is known; the data have labels for no discrete latent. Pass y=…, −1 where unknown."
            )
        for name in self.labelled if s.classify else ():
            unknown = [ref.name for ref in self.model.graph.reads("q", name) if ref.name in self.model.graph.latents]
            if unknown:
                raise ValueError(f"classify= needs q({name}|·) as a function of the data alone, but it reads {unknown[0]!r}.")
        if s.patience is not None and self.validation is None:
            raise ValueError("patience counts validations; pass validation= data.")

    def _open(self, out: Path, resume: bool) -> None:
        if folders(out) and not resume:
            raise ValueError(f"{out} holds a run already. Continue it with resume=True, or choose another folder.")
        out.mkdir(parents=True, exist_ok=True)
        declaration = self.model.declaration()
        found = latest(out) if resume else None
        if not self.world.first and found is None:
            return
        if found is None:
            (out / "model.json").write_text(json.dumps(declaration, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            (out / "config.toml").write_text(to_toml(self.settings.record()), encoding="utf-8")
            (out / "metrics.jsonl").write_text("", encoding="utf-8")
            return
        here = {**self.settings.record(), "epochs": None, "steps": None}
        there = {**found.state["settings"], "epochs": None, "steps": None}
        changed = sorted(key for key in here if here[key] != there.get(key))
        if changed:
            raise CheckpointError(
                f"{out} was trained with {changed[0]}={there.get(changed[0])!r}, not {here[changed[0]]!r}. Resume with the same settings."
            )
        check_fit(found, self.model.state_dict(), out)
        self.model.load_state_dict(found.weights)
        restore_optimizer(self.optimizer, found.optimizer, {name: parameter for parameter, name in self.names.items()})
        self.step, self.best, self.waited, self.skipped = found.step, found.state["best"], found.state["waited"], found.state["skipped"]
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if (out / "metrics.jsonl").is_file() else []
        self.rows = [row for row in (_parse(line) for line in lines) if row and row["step"] <= self.step]
        if self.world.first:
            (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    # The loop ---------------------------------------------------------------------------------------------------------------------

    def run(self) -> Run:
        s = self.settings
        began = time.perf_counter()
        log_every = s.log_every or max(1, self.total // 200)
        validate_every = s.validate_every or self.per_epoch
        checkpoint_every = s.checkpoint_every or validate_every
        was = self.model.training
        self.model.train()
        sums: dict[str, Tensor] = {}
        counted = 0
        with _interruptible() as interrupted:
            while self.step < self.total:
                phase = s.schedule.phase(self.step, self.total)
                taken = self._take_step(phase)
                self.step += 1
                if taken is not None:
                    counted += 1
                    for name, value in taken.items():
                        sums[name] = sums[name] + value if name in sums else value
                if self.step % log_every == 0 or self.step == self.total:
                    self.world.sum(list(sums.values()))
                    self._record(
                        {name: float(value) / max(1, counted) for name, value in sums.items()} | {"lr": self._rate(phase), "phase": phase.name}, began
                    )
                    sums, counted = {}, 0
                stop = False
                if self.validation is not None and (self.step % validate_every == 0 or self.step == self.total):
                    stop = self._validate(began)
                stopped = self.world.any(bool(interrupted))
                if self.step % checkpoint_every == 0 or self.step == self.total or stop or stopped:
                    self._save()
                if stopped:
                    raise KeyboardInterrupt(
                        f"stopped after step {self.step} of {self.total}" + (f"; resume=True continues it from {self.out}" if self.out else "")
                    )
                if stop:
                    break
        if s.patience is not None:
            self._restore_best()
        self.model.train(was)
        self.world.leave()
        return Run(self.model, s, self.rows, self.out, self.step, time.perf_counter() - began)

    def _take_step(self, phase: Phase) -> dict[str, Tensor] | None:
        """One step of the optimiser; None if it was skipped."""
        s, model = self.settings, self.model
        rows = self.order.rows(self.step)
        n = len(rows)
        rows = rows[self.world.share(n)]
        batch = self.source.take(rows)
        active = [p for name in ("theta", "phi") if getattr(phase, name) for p in self.groups[name]]
        self.optimizer.zero_grad(set_to_none=True)
        if s.schedule.objective == "evidence":
            bound = Bound(self._evidence(batch), {})
        else:
            steps = next((value.shape[-3] for name, value in batch.items() if model.graph.timed.get(name)), 1)
            layout = self.plan.layout(n, steps, dropout=True)
            generator = torch.Generator(self.device).manual_seed(seed_of(s.seed, "noise", self.step))
            noise = self.world.rows_of(noises.draw(layout, generator=generator, device=self.device, dtype=self.dtype), n)
            kl_weight = min(1.0, (self.step + 1) / s.kl_warmup) if s.kl_warmup else 1.0
            bound = estimate(self.plan, model.factors, batch, noise, temperature=s.temperature, kl_weight=kl_weight)  # type: ignore[arg-type]
        objective = bound.value.sum() / n
        if s.classify:
            objective = objective + s.classify * self._classification(batch) / n
        (-objective).backward(inputs=active)
        gradients = [p.grad for p in active if p.grad is not None]
        self.world.sum(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        total = objective.detach().clone()
        self.world.sum([total])
        if not bool(torch.isfinite(norm + total)):
            self._trouble(bound, rows, active)
            return None
        if s.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(active, s.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(phase)
        self.optimizer.step()
        name = "evidence" if s.schedule.objective == "evidence" else s.bound
        sums = {name: bound.value.detach().sum() / n} | {name: term.detach().sum() / n for name, term in bound.terms.items()}
        return sums | {"gradient": norm / self.world.size}  # each process adds its share

    def _rate(self, phase: Phase) -> float:
        s = self.settings
        rate = s.lr * min(1.0, (phase.position + 1) / s.warmup) if s.warmup else s.lr
        if s.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * phase.position / phase.length))
        return rate

    def _evidence(self, batch: Batch) -> Tensor:
        return LinearGaussian(self.model, batch).log_evidence()

    def _classification(self, batch: Batch) -> Tensor:
        """The sum over the batch of log q(y|x) where the label is known: clamped rows teach q(y|x) nothing by themselves."""
        graph = self.model.graph
        program = Program(graph, self.model.factors, batch, steps=next(iter(batch.values())).shape[-3])  # type: ignore[arg-type]
        program.values |= {name: batch[name] for name in (*graph.observed, *graph.given)}
        program.run(graph.inference_stages(()), lambda *_: torch.zeros(()))
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for name in self.labelled:
            spec, dist = program.distribution("q", name)
            log_q, seen = spec.log_prob(dist, batch[name]), batch.get(f"{name}?")
            total = total + (log_q if seen is None else torch.where(seen[..., 0], log_q, torch.zeros_like(log_q))).sum()
        return total

    # Seeing it ------------------------------------------------------------------------------------------------------------------------

    def _record(self, values: dict[str, Any], began: float) -> None:
        row = {
            "step": self.step,
            "epoch": round(self.step * self.order.batch / self.source.n, 4),
            **values,
            "seconds": round(time.perf_counter() - began, 3),
        }
        self.rows.append(row)
        if self.out is not None and self.world.first:
            with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self.progress and self.world.first and (self.step == self.total or any(name.startswith("validation") for name in values) or self._due()):
            shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float) and name != "gradient")
            print(f"step {self.step}/{self.total}  {shown}", flush=True)

    def _due(self) -> bool:
        """Whether it is time for a line between validations: not more than one in five seconds."""
        now = time.perf_counter()
        if now - self.spoke < 5:
            return False
        self.spoke = now
        return True

    def _validate(self, began: float) -> bool:
        """Record the bound (and the evidence, where exact) on the validation data; whether patience has run out."""
        assert self.validation is not None
        values = evaluate(self.model, self.validation, plan=None, seed=self.settings.seed)
        self._record({f"validation {name}": value for name, value in values.items()}, began)
        value = values["elbo"]
        if self.best is None or value > self.best["value"]:
            self.best, self.waited = {"value": value, "step": self.step}, 0
            self.best_weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        else:
            self.waited += 1
        return self.settings.patience is not None and self.waited >= self.settings.patience

    # Keeping it --------------------------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.out is None:
            return
        if not self.world.first:
            self.world.wait()
            return
        state = {"best": self.best, "waited": self.waited, "skipped": self.skipped, "settings": self.settings.record()}
        weights = dict(self.model.state_dict())
        checkpoint = Checkpoint(self.step, weights, optimizer_tensors(self.optimizer, self.names), state)
        write(self.out, checkpoint, keep=frozenset({self.best["step"]} if self.best else set()))
        self.world.wait()

    def _restore_best(self) -> None:
        if self.best is None:
            return
        weights = self.best_weights
        if weights is None and self.out is not None:
            weights = read(self.out / "checkpoints" / f"step-{self.best['step']}").weights
        if weights is not None:
            self.model.load_state_dict(weights)

    # Trouble -----------------------------------------------------------------------------------------------------------------------------

    def _trouble(self, bound: Bound, rows: Tensor, active: list[torch.nn.Parameter]) -> None:
        """A non-finite loss or gradient: no step is taken; name the rows and the factor, and stop unless skipping is allowed."""
        self.optimizer.zero_grad(set_to_none=False)
        what = "the gradient"
        bad = ~bound.value.detach().isfinite()
        for name, term in bound.terms.items():
            if not bool(term.detach().isfinite().all()):
                latent = name[3:-1] if name.startswith("kl(") else name
                what, bad = f"the term {name} (p's factor {self.model.graph.rule('p', latent).id})", ~term.detach().isfinite()
                break
        else:
            if not bool(bad.any()):
                culprit = next((self.names[p] for p in active if p.grad is not None and not bool(p.grad.isfinite().all())), None)
                what = f"the gradient of {culprit}" if culprit else "the gradient"
        which = rows[bad.cpu()].tolist() if bool(bad.any()) else rows.tolist()
        shown = ", ".join(map(str, which[:8])) + (f", … ({len(which)} rows)" if len(which) > 8 else "")
        message = f"Step {self.step}: {what} is not finite for rows {shown}. No step was taken."
        self.skipped += 1
        if self.skipped <= self.settings.skip:
            self._note(message + f" Skipped ({self.skipped} of {self.settings.skip}).")
            return
        kept = f" The last good checkpoint is {folders(self.out)[-1]}." if self.out is not None and folders(self.out) else ""
        raise TrainingError(message + kept + " Look at these rows, lower lr, or set clip=.")

    def _note(self, text: str) -> None:
        self.rows.append({"step": self.step, "note": text})
        if self.out is not None and self.world.first:
            with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, "note": text}) + "\n")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # the last line of a run that was killed while writing it
        return None
    return row if isinstance(row, dict) and "step" in row else None


class _Flag:
    def __init__(self) -> None:
        self.set = False

    def __bool__(self) -> bool:
        return self.set


@contextmanager
def _interruptible() -> Iterator[_Flag]:
    """Ctrl-C finishes the step and saves; a second one stops at once."""
    flag = _Flag()

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.set:
            raise KeyboardInterrupt
        flag.set = True

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread
        yield flag
        return
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
