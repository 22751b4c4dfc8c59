"""Whether compiling a run's steps is worth its time, by a rule of sizes, device and steps.

torch's compiler takes seconds that grow with the number of different operations of a step. It saves
time at every step: the launch of each operation, and the memory traffic between operations. The
rule does not read a clock, so that a run is a function of its settings. ``benchmarks/compile.py``
compares its choices with both fixed ones.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from os import environ
from typing import NamedTuple

import torch
from torch import Tensor

from aevb.compiled_step.tracing import is_view, traced
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch
from aevb.estimate.estimators import estimate
from aevb.model import Model

FEWEST = 2000  # steps of a run below which compiling is never considered
# Seconds to compile a step, measured on two cores and on one H200: for the start of the compiler,
# per different operation, and per operation.
START, PER_KIND, PER_OPERATION = 6.0, 0.12, 0.008
# Seconds that a compiled step saves, per operation and per number that an operation writes.
SAVED = {"cpu": (2.2e-6, 3e-10), "cuda": (2.0e-6, 1e-11)}
MARGIN = 1.2  # the saving must exceed the cost by this factor
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear")


class Choice(NamedTuple):
    """Whether to compile, and the estimated seconds that it costs and saves."""

    compile: bool
    cost: float
    saving: float

    def __str__(self) -> str:
        return (
            f"Steps are compiled, which takes about {self.cost:.0f} s and saves about "
            f"{self.saving:.0f} s. Set compile=False (--no-compile) to train without it."
            if self.compile
            else f"Steps are not compiled: it takes about {self.cost:.0f} s and would save about "
            f"{self.saving:.0f} s."
        )


def choose(model: Model, plan: Plan, batch: Batch, steps: int) -> Choice | None:
    """Return whether to compile a run of ``steps`` steps on batches like this one.

    Return None if it is not worth considering: few steps, or no compiler.
    """
    device = model._parameter().device.type
    if steps < FEWEST or device not in SAVED or not has_compiler(device):
        return None
    sizes = step_sizes(model, plan, batch)
    if sizes is None:
        return None
    per_operation, per_number = SAVED[device]
    cost = START + PER_KIND * sizes.kinds + PER_OPERATION * sizes.operations
    saving = steps * (per_operation * sizes.operations + per_number * sizes.numbers)
    return Choice(saving > MARGIN * cost, cost, saving)


def has_compiler(device: str) -> bool:
    """Return whether torch's compiler can make code for a device."""
    found = any(map(shutil.which, (environ.get("CXX", "g++"), "c++", "clang++")))
    return found and (device != "cuda" or find_spec("triton") is not None)


class Sizes(NamedTuple):
    """A step's operations, its different operations, and the numbers that they write."""

    operations: int
    kinds: int
    numbers: int


def step_sizes(model: Model, plan: Plan, batch: Batch) -> Sizes | None:
    """Count the operations of a step and of its gradient; None if they cannot be traced."""
    noise = model.draw_noise(plan, batch, seed=0)
    active = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients() -> list[Tensor | None]:
        with torch.enable_grad():
            bound = estimate(plan, model.factors, batch, noise).value.mean()
            return list(torch.autograd.grad(bound, active, allow_unused=True))

    try:
        graph = traced(gradients).graph
    except RuntimeError:  # the run then takes its steps without a recording, too
        return None
    nodes = [node for node in graph.nodes if node.op == "call_function" and not is_view(node)]
    seen = [
        (node.target.overloadpacket.__name__, node.meta["val"].shape)
        for node in nodes
        if "val" in node.meta
    ]
    written = sum(shape.numel() for name, shape in seen if name not in PRODUCTS)
    return Sizes(len(nodes), len(set(seen)), written)
