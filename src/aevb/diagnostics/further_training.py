"""Whether further training would raise the bound, measured on a copy of the model.

The copy is trained for a short while on one half of the rows. The bound of the other half, row by
row and under the same noise, says whether that helped: a model that has converged, or that
over-fits, does not gain on rows that the copy has not seen.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.data.sources import Source
from aevb.derive.plan import Plan
from aevb.diagnostics.finding import Finding
from aevb.diagnostics.paired import ENOUGH, observed_numbers, paired
from aevb.estimate.batch import Batch
from aevb.estimate.estimators import estimate
from aevb.evidence.exact import exact_evidence
from aevb.model import Model
from aevb.training.job import usual_rate

STEPS, LEAST_STEPS, SECONDS = 300, 10, 5.0  # most and fewest steps, and the time for them
BATCH, COMPARED = 100, 500  # rows per step, and most rows that are compared
REPEATS = 4  # draws of the noise under which the bounds are compared
SLOW = 0.1  # share of the usual learning rate; a lower one is not used

Value = Callable[[Model, Batch, int], Tensor]  # (model, rows, seed) → nats, one number per row


def bound_of(plan: Plan) -> Value:
    """Return the plan's bound as a function of model, rows and seed."""

    def value(model: Model, batch: Batch, seed: int) -> Tensor:
        noise = model.draw_noise(plan, batch, seed=seed)
        return estimate(plan, model.factors, batch, noise).objective

    return value


def exact_value(model: Model, batch: Batch, seed: int) -> Tensor:
    """Return the exact evidence, whatever the seed."""
    return exact_evidence(model, batch)


def judge_training(
    model: Model,
    source: Source,
    chosen: Tensor,
    what: str,
    value: Value,
    lr: float | None,
    seed: int,
    trained: Value | None = None,
) -> list[Finding]:
    """Report whether a short training of a copy raises a quantity (``what``, by ``value``).

    ``trained`` is the objective of the training, if it is another one. ``lr`` is that of the run,
    if there was one. The model and its gradients stay unchanged.
    """
    if not any(one.requires_grad for one in model.parameters()):
        return []
    usual = usual_rate(model)
    rate = usual if lr is None or lr < SLOW * usual else lr
    halved = len(chosen) >= 2 * ENOUGH
    train, rest = (chosen[0::2], chosen[1::2]) if halved else (chosen, chosen)
    held = source.take(rest[:COMPARED])
    twin = copy.deepcopy(model)
    try:
        with twin._evaluating(seed):
            before = _compared(twin, held, value, seed)
            steps = _train(twin, source, train, trained or value, rate, seed)
            differences = _compared(twin, held, value, seed) - before
    except (LinAlgError, RuntimeError):
        steps = 0
    if steps < LEAST_STEPS or not bool(differences.isfinite().all()):
        text = (
            "Whether further training would help was not examined: the steps of a copy of the "
            f"model {'take too long' if 0 < steps < LEAST_STEPS else 'failed'}."
        )
        return [Finding("note", "further training", "run", text)]
    rise = paired(differences, observed_numbers(model, held))
    figures = asdict(rise) | {"before": float(before.mean()), "steps": steps, "lr": rate}
    where = (
        f"on {len(train)} of these rows, {what} of {rest[:COMPARED].numel()} others"
        if halved
        else f"on these rows, {what}"
    )
    tried = f"after {steps} steps of a copy (lr={rate:g}) {where}"
    if not rise.clear and rise.mean > 2 * rise.stderr > 0:
        text = f"Further training may help, which is not decided: {tried} rose by {rise}."
        return [Finding("note", "further training", "run", text, figures)]
    if not rise.clear:
        text = (
            f"Further training hardly helps soon: {tried} changed by {rise}. A slow rise, as of "
            f"the parameters of a random effect, would not show."
        )
        return [Finding("ok", "further training", "run", text, figures)]
    text = f"Further training would help: {tried} rose by {rise}."
    remedy = "Train longer (steps=, epochs=)"
    if lr is not None and lr < SLOW * usual:
        remedy += f" and with a larger lr than {lr:g}, such as the default {usual:g}"
    remedy += ". If these rows are not those of the training, more data may be what helps."
    return [Finding("warning", "further training", "run", text, figures, remedy)]


def _compared(model: Model, batch: Batch, value: Value, seed: int) -> Tensor:
    return torch.stack([value(model, batch, seed + i).double() for i in range(REPEATS)])


def _train(model: Model, source: Source, rows: Tensor, value: Value, lr: float, seed: int) -> int:
    """Take up to ``STEPS`` steps of Adam within ``SECONDS``; return the number taken."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr)
    step, total, start = 0, STEPS, time.perf_counter()
    while step < total:
        optimiser.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / total))
        batch = source.take(rows[torch.randperm(len(rows), generator=generator)[:BATCH]])
        optimiser.zero_grad()
        with torch.enable_grad():
            loss = -value(model, batch, seed + REPEATS + step).mean()
            loss.backward()
        optimiser.step()
        step += 1
        if step == 2:  # the first step prepares what later ones reuse
            total = min(STEPS, int(2 * SECONDS / (time.perf_counter() - start)))
            if total < LEAST_STEPS:
                break
    return step
