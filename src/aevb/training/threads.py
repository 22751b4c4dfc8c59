"""Choose the number of CPU threads for a step.

Waking 16 threads takes longer than a product of 10 µs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

import torch
from torch import nn

from aevb.derive.plan import Plan
from aevb.model import Model
from aevb.training.purity import own_part

SHARE = 5_000_000  # multiplications in a product for every thread that it is given
FEW = 2  # threads that are always worth it


def worth(model: Model, plan: Plan, batch: int) -> int:
    """Return how many of torch's threads to use for a step of ``batch`` rows.

    Use all threads if the work is unknown. The number is computed from the model, the plan, the
    batch and the available threads, not measured. For sequences, the rows of one time step count,
    because time steps run one after another.
    """
    everyone = torch.get_num_threads()
    matrices = [parameter.numel() for parameter in model.parameters() if parameter.dim() == 2]
    unknown = own_part(model) is not None or any(
        isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()
    )
    if unknown or not matrices or model._parameter().device.type != "cpu":
        return everyone
    rows = max(
        (math.prod(shape[:-1]) for _, shape in plan.layout(batch, 1, dropout=False).values()),
        default=batch,
    )
    return min(everyone, max(FEW, int(max(rows, batch) * sum(matrices) / len(matrices) / SHARE)))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads inside the context.

    The number is global to the process, so only the main thread changes it.
    """
    before = torch.get_num_threads()
    if count == before or current_thread() is not main_thread():
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
