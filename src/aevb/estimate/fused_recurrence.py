"""Compute a recurrence whose inputs are all known before its loop by torch's own LSTM or GRU.

These are one call for all steps (oneDNN's LSTM on a CPU, cuDNN on a GPU). The value is that of the
loop up to rounding. torch has no second derivatives of them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aevb.declare.deterministic import LSTM, Recurrence
from aevb.derive.axes import TIME, join, over_time
from aevb.runtime.private_torch import is_transformed
from aevb.runtime.shapes import broadcast_shapes

if TYPE_CHECKING:
    from aevb.estimate.loop import Loop, State

# Fewest steps for which torch's own recurrences are used. Shorter sequences gain little, and the
# loop gives them the numbers of earlier versions.
LONG = 64
# On a CPU, torch's GRU is a loop in C++, which is slower than ours for larger states.
WIDEST_GRU = 128


def is_fused(loop: Loop) -> bool:
    """Return whether torch's own recurrence computes a loop."""
    program, (name, *others) = loop.program, loop.stage.nodes
    entries = loop.rules[name]
    factor, count = program.factors[entries["t"].id], program.count
    if others or not isinstance(factor, Recurrence) or count < LONG or "last" in entries:
        return False
    reads = [ref for entry in entries.values() for ref in entry.key.parents]
    if len({ref.name for ref in reads} & loop.inside) > 1 or program.chunk is not None:
        return False
    weight = factor.recurrent[0].weight
    assert isinstance(weight, Tensor)
    device = weight.device.type
    if is_transformed() or torch.is_autocast_enabled(device) or device not in ("cpu", "cuda"):
        return False
    if device == "cpu" and not isinstance(factor.spec, LSTM) and factor.d > WIDEST_GRU:
        return False
    # Backward in time, rows begin at their own last step, and one step later if they read [t+1].
    return loop.stage.direction > 0 or loop.within[name] is None


def fused(loop: Loop, state: State, start: Tensor | None) -> tuple[Tensor, State]:
    """Return a recurrence's values at all steps, and its state after the last one.

    ``state`` is the state before. If ``start`` is given, it is the value of the first step, and
    ``state`` the state after that step.
    """
    program, (name,) = loop.program, loop.stage.nodes
    entry, backward = loop.rules[name]["t"], loop.stage.direction < 0
    factor = program.factors[entry.id]
    assert isinstance(factor, Recurrence)
    inputs = program.inputs(entry)
    missing = {
        label: mask
        for label, mask in program.missing(entry, inputs).items()
        if label in factor.blocks.missing
    }
    blocks = [factor.blocks.weights[label] for label in inputs]
    blocks += [factor.blocks.missing[label] for label in missing]
    parts = [over_time(part, program.count) for part in (*inputs.values(), *missing.values())]
    # The axes before time, and the number of rows, of all inputs and the state together.
    shape = broadcast_shapes(
        *(part.shape[:-1] for part in parts),
        *((*part.shape[:TIME], program.count, part.shape[-2]) for part in state),
    )
    x = torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], -1)
    real, skip = program.real, 0 if start is None else 1
    order: Tensor | None = None
    if backward and real is None:
        x = x.flip(TIME)
    elif backward and real is not None:
        order = _reversed(real, x.shape[:-1])
        x = x.gather(TIME, order.expand(x.shape))
    x = x.narrow(TIME, skip, program.count - skip)
    rows = x.movedim(TIME, 0).reshape(program.count - skip, -1, x.shape[-1])
    found, last = _run(factor, rows, [_rows(part, shape) for part in state], torch.cat(blocks, 1))
    value = found.view(-1, *shape[:-2], shape[-1], factor.d).movedim(0, TIME)
    if backward:
        if order is None:
            value = value.flip(TIME)
        else:
            value = value.gather(TIME, order.expand(value.shape))
            assert real is not None
            value = torch.where(real, value, state[factor.spec.layers - 1])
    if start is not None:
        value = join([start, value])
    if not backward and real is not None:
        # A row holds its state after its last step.
        end = (real.sum(0, keepdim=True) - 1).expand(*value.shape[:TIME], 1, *value.shape[-2:])
        value = torch.where(real, value, value.gather(TIME, end))
    return value, tuple(part.view(*shape[:-2], 1, shape[-1], factor.d) for part in last)


def _rows(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A part of a state as a matrix with all examples, samples and enumerated values as rows."""
    return part.expand(*shape[:-2], 1, shape[-1], part.shape[-1]).reshape(-1, part.shape[-1])


def _reversed(real: Tensor, shape: tuple[int, ...]) -> Tensor:
    """For each row, its steps in reverse order, then its padded steps: indices [T, N, 1]."""
    steps = torch.arange(len(real), device=real.device)[:, None, None]
    order = torch.where(real, real.sum(0, keepdim=True) - 1 - steps, steps)
    return order.expand(*shape, 1)


def _run(
    factor: Recurrence, x: Tensor, state: list[Tensor], first: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Run torch's recurrence on [T, rows, inputs]; ``first`` is the bottom layer's weight."""
    layers = factor.spec.layers
    weights: list[Tensor] = []
    for i in range(layers):
        upper, own = (None if i == 0 else factor.upper[i - 1]), factor.recurrent[i]
        weights += [
            first if upper is None else upper.weight,  # type: ignore[list-item]
            own.weight,  # type: ignore[list-item]
            factor.blocks.bias if upper is None else upper.bias,  # type: ignore[list-item]
            own.bias,  # type: ignore[list-item]
        ]
    hidden, cells = torch.stack(state[:layers]), state[layers:]
    train = torch.is_grad_enabled()
    with warnings.catch_warnings():
        if x.is_cuda:  # the weights of blocks are no contiguous vector, so cuDNN copies them
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
        if cells:
            value, *last = torch.lstm(
                x, (hidden, torch.stack(cells)), weights, True, layers, 0.0, train, False, False
            )
        else:
            value, *last = torch.gru(x, hidden, weights, True, layers, 0.0, train, False, False)
    return value, [part for tensor in last for part in tensor.unbind()]
