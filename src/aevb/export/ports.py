"""The named inputs of an exported function: their axes, and what each of them holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.declare.networks import table
from aevb.estimate.keys import is_mask, variable_of

# The names of the axes whose length is free: examples, and steps of a sequence.
BATCH, TIME_AXIS = "batch", "time"
# Sizes that no other axis has: they mark the axes of examples and steps in a derived shape.
PRIME_ROWS, PRIME_STEPS = 7919, 104729

Axes = tuple[int | str, ...]


@dataclass(frozen=True)
class Port:
    """An input: its name, its axes, and what it holds.

    ``kind`` is "data", "given", "latent", "noise", "draw", "state" or "start". ``key`` is the
    variable, or the key of the noise or of the state. ``missing`` says whether NaN entries are
    marginalised out, except in the columns ``refused``: q was not trained on rows that lack them,
    so their outputs are NaN. ``noise`` says from which distribution the numbers are drawn.
    """

    name: str
    kind: str
    key: str
    axes: Axes
    missing: bool = False
    noise: str = ""
    refused: tuple[int, ...] = ()

    def record(self) -> dict[str, object]:
        """The port as JSON-ready data."""
        found: dict[str, object] = {"name": self.name, "kind": self.kind, "axes": list(self.axes)}
        if self.missing:
            whole = len(self.refused) == math.prod(a for a in self.axes[1:] if isinstance(a, int))
            found["missing"] = "refused" if self.refused and whole else "NaN"
            if self.refused and not whole:
                found["refused"] = list(self.refused)
        return found | ({"distribution": self.noise} if self.noise else {})


def variable_port(graph: Graph, name: str, kind: str, steps: int | str | None) -> Port:
    """The port of a variable: [batch, *shape], or [batch, time, *shape] for a sequence.

    ``steps`` is the length of sequences or the name of their axis; None for one step.
    """
    time: Axes = (steps,) if graph.timed[name] and steps is not None else ()
    missing = kind in ("data", "given") and not graph.is_read_by_p(name)
    if kind == "given" and any(
        isinstance(entry.spec.net, table) and entry.key.parents[0].name == name
        for entry in graph.entries()
    ):
        missing = False  # a row of a table of parameters cannot be unknown
    return Port(name, kind, name, (BATCH, *time, *graph.shapes[name]), missing)


def state_name(key: str) -> str:
    """The name of a port for a value of the step before: ``h:0`` becomes ``state.h.0``."""
    part = f"{variable_of(key)}.missing" if is_mask(key) else key.replace(":", ".")
    return f"state.{part}"


def next_name(name: str) -> str:
    """The name of the output that a state input takes at the next step.

    An ONNX file cannot have an input and an output of one name.
    """
    return f"next{name.removeprefix('state')}"


def axes_of(shape: tuple[int, ...], steps: int | str | None) -> Axes:
    """The axes of a port from the shape of its internal value, [.., T, N, d].

    The shape was derived for ``PRIME_ROWS`` rows and ``PRIME_STEPS`` steps.
    """
    *lead, count, n, d = shape
    rows: Axes = (BATCH,) if n == PRIME_ROWS else ()
    time: Axes = (steps,) if count == PRIME_STEPS and steps is not None else ()
    return (*(size for size in lead if size != 1), *rows, *time, d)


def inside(value: Tensor, shape: tuple[int, ...], timed: bool) -> Tensor:
    """Convert the value of a port to its internal shape, [.., T, N, d]."""
    if timed:
        value = value.transpose(-3, -2)
    return value.reshape(shape)


def outside(value: Tensor, n: int, steps: int | None, shape: tuple[int, ...]) -> Tensor:
    """Convert an internal value [.., T or 1, N or 1, numbers] to [.., N, *shape].

    The result is [.., N, T, *shape] if ``steps`` is given. Leading axes of size 1 are dropped.
    """
    lead = value.shape[:-3]
    value = value.expand(*lead, 1 if steps is None else steps, n, value.shape[-1])
    value = value.transpose(-3, -2)
    kept = [size for size in lead if size != 1]
    return value.reshape(*kept, n, *([] if steps is None else [steps]), *shape)


def zeros(port: Port, n: int, steps: int, like: Tensor) -> Tensor:
    """A value for an input that the exported function does not use."""
    sizes = [
        n if axis == BATCH else steps if axis == TIME_AXIS else int(axis) for axis in port.axes
    ]
    return torch.zeros(sizes, dtype=like.dtype, device=like.device)
