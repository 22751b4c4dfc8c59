"""The step of this library, as ``fit`` runs it.

It is the step of a :class:`Training`, with the work of ``fit`` between two records of its metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from problems import BATCH, DROPOUT, Contender, Problem, set_layer
from torch import nn

from aevb import zoo
from aevb.data import dequantise
from aevb.declare.deterministic import Recurrence
from aevb.declare.families import Bernoulli, ContinuousBernoulli
from aevb.model import Model
from aevb.training.loop import Training
from aevb.training.settings import Settings

STEPS = 10**9
FACTORS = {
    "vae": {"decoder": "p(x|z)", "encoder": "q(z|x)"},
    "gmvae": {"prior": "p(z|y)", "decoder": "p(x|z)", "to_y": "q(y|x)", "encoder": "q(z|x, y)"},
    "vrnn": {
        "prior": "p(z[t]|h[t])",
        "decoder": "p(x[t]|h[t], z[t])",
        "encoder": "q(z[t]|h[t], x[t])",
    },
}
FACTORS["vae-tutorial"] = FACTORS["vae"]
LSTM = "p(h[t]|h[t-1], x[t-1], z[t-1])"


def declared(problem: Problem) -> Model:
    """Return the model as the zoo declares it, with the problem's initial weights."""
    s = problem.sizes
    if problem.model == "gmvae":
        model = zoo.gmvae(s.x, s.z, s.classes, hidden=s.hidden)
    elif problem.model == "vrnn":
        model = zoo.vrnn(s.x, s.z, s.h, hidden=s.hidden)
    elif problem.model == "vae":
        model = zoo.vae(s.x, s.z, hidden=s.hidden, dropout=0.0, likelihood=Bernoulli())
    else:
        # torch's continuous Bernoulli clamps its parameter. The same clamping here gives the same
        # bound.
        model = zoo.vae(
            s.x, s.z, hidden=s.hidden, dropout=DROPOUT, likelihood=ContinuousBernoulli(clamped=True)
        )
    _set_weights(model, problem)
    return model.to(problem.device)


def _set_weights(model: Model, problem: Problem) -> None:
    weights = problem.weights()
    for name, factor in FACTORS[problem.model].items():
        net = model.factors[factor].net
        layers = [*net.hidden, *([net.heads] if net.heads is not None else [])]
        _set_blocks(net.blocks, weights[f"{name}.0.weight"], weights[f"{name}.0.bias"])
        for i, layer in enumerate(layers, 1):
            set_layer(layer, weights[f"{name}.{i}.weight"], weights[f"{name}.{i}.bias"])
    if problem.model == "vrnn":
        cell = model.factors[LSTM]
        assert isinstance(cell, Recurrence)
        _set_blocks(cell.blocks, weights["lstm.weight_ih_l0"], weights["lstm.bias_ih_l0"])
        set_layer(cell.upper[0], weights["lstm.weight_ih_l1"], weights["lstm.bias_ih_l1"])
        for i, layer in enumerate(cell.recurrent):
            set_layer(layer, weights[f"lstm.weight_hh_l{i}"], weights[f"lstm.bias_hh_l{i}"])


def _set_blocks(blocks: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Set a first layer: the columns of each parent belong to a separate block."""
    parts = list(blocks.weights.values())
    with torch.no_grad():
        for block, part in zip(
            parts, weight.split([block.shape[1] for block in parts], 1), strict=True
        ):
            block.copy_(part)
        blocks.bias.copy_(bias)


def training(model: Model, data: Mapping[str, Any], **choices: Any) -> Training:
    """Return a run that never ends, ready for its first step."""
    settings = Settings(
        steps=STEPS,
        **({"batch": BATCH, "lr": 1e-3, "decay": "constant", "compile": False} | choices),
    )
    begun = Training(model, data, None, settings, None, False, ExitStack())
    model.train()
    return begun


class Taken:
    """The result of a step, whose ``block_until_ready`` takes all requested steps.

    On a GPU, requested steps wait until there are ten. A timing must include all of them.
    """

    def __init__(self, *runs: Training) -> None:
        self.runs = runs

    def block_until_ready(self) -> None:
        for run in self.runs:
            run.stepper.take()


def stepping(run: Training, *, recorded: bool = True) -> Contender:
    """Return the steps of a run.

    With ``recorded=False`` every step runs eagerly: it is neither recorded nor captured.
    """
    taken = Taken(run)
    phase, stepper, seen = run.settings.schedule.phase(0, STEPS), run.stepper, (0, 0.0)
    if not recorded:
        stepper.captures, stepper.not_recorded = False, "its cost without is asked for"

    def step() -> Taken:
        run._take_step(phase)
        run.step += 1
        if run.step % 100 == 0:
            look()
        return taken

    def look() -> float:
        """Return the mean bound of the steps since the last call."""
        nonlocal seen
        if seen[0] < run.step:
            if stepper.failed():
                raise FloatingPointError(f"a step before step {run.step} was not finite")
            seen = run.step, stepper.read()["elbo"]
        return seen[1]

    return Contender(step, lambda _: look())


def data(problem: Problem) -> dict[str, Any]:
    rows = problem.rows()
    return {
        "x": dequantise(rows.cpu().numpy(), fresh=True) if problem.model == "vae-tutorial" else rows
    }


def aevb(problem: Problem, *, recorded: bool = True, **choices: Any) -> Contender:
    return stepping(
        training(declared(problem), data(problem), lr=problem.lr, **choices), recorded=recorded
    )
