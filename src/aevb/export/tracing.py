"""Trace a part with torch.export, for any number of rows and steps, without unused inputs."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch

from aevb.export.dependence import drop_unused, used_inputs
from aevb.export.parts import Part
from aevb.export.ports import BATCH, TIME_AXIS, Axes
from aevb.export.values import example

# The sizes of the example; the traced function takes any.
ROWS, STEPS = 3, 5


# The layout of a slice of one step is special, so torch traces longer sequences only. The function
# is the same for shorter ones.
FEWEST_STEPS = 3


class ExportError(ValueError):
    """A part that cannot be exported; the message gives the reason.

    >>> issubclass(ExportError, ValueError)
    True
    """


def trace(part: Part) -> Any:
    """Return the traced part, a ``torch.export.ExportedProgram``.

    Inputs that the part does not use are removed from it.
    """
    drop_unused(part, example(part, ROWS, STEPS, seed=0, start=False))
    while True:
        program = _traced(part)
        if not (unused := _unused(part, program)):
            return program
        if len(unused) == len(part.ports):
            raise ExportError(
                f"The {part.what} of this model reads no data: it is constant, so there is "
                f"nothing to export."
            )
        part.drop(unused)


def _traced(part: Part) -> Any:
    batch, time = torch.export.Dim(BATCH), torch.export.Dim(TIME_AXIS, min=FEWEST_STEPS)
    free = {BATCH: batch, TIME_AXIS: time}
    shapes = {
        port.name: {i: free[axis] for i, axis in enumerate(port.axes) if isinstance(axis, str)}
        for port in part.ports
    }
    inputs = example(part, ROWS, STEPS, seed=0)
    try:
        with quiet():
            return torch.export.export(
                part, (inputs,), dynamic_shapes={"inputs": shapes}, strict=False
            )
    except Exception as error:  # torch raises errors of many classes, some of them private
        if isinstance(error, ValueError) and not type(error).__module__.startswith("torch"):
            raise
        why = _first_line(error)
        if "data-dependent" in why:
            why = (
                "its code decides by the values of tensors (if, while, int, bool), and a file has "
                f"no Python. Use torch.where in your network. torch says: {why}"
            )
        raise ExportError(
            f"torch.export cannot trace the {part.what} of this model: {why}"
        ) from error


def _unused(part: Part, program: Any) -> list[str]:
    """The inputs that no output depends on, except for their sizes."""
    nodes = {node.name: node for node in program.graph.nodes}
    ports = dict(zip(program.graph_signature.user_inputs, part.ports, strict=True))
    reads: dict[str, frozenset[str]] = {}
    outputs = zip(output_names(program), program.graph_signature.user_outputs, strict=True)
    for name, output in outputs:
        reached: set[Any] = set()
        frontier = [nodes[output]]
        while frontier:
            node = frontier.pop()
            if node not in reached and not _tells_nothing(node):
                reached.add(node)
                frontier += node.all_input_nodes
        reads[name] = frozenset(port.name for key, port in ports.items() if nodes[key] in reached)
    used = used_inputs(part, reads)
    return [port.name for port in part.ports if port.name not in used]


def _tells_nothing(node: Any) -> bool:
    """Whether a value is a size, or has no entries."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return "sym_size" in str(node.target) or any(isinstance(s, int) and s == 0 for s in shape)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch prints, warns of and logs about its own code; errors are raised anyway."""
    disabled = logging.root.manager.disable
    nowhere = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"\s+", " ", text).rstrip(".") + "."


def output_names(program: Any) -> list[str]:
    """The names of the outputs, in order."""
    spec = program.call_spec.out_spec
    return list(spec.unflatten(range(spec.num_leaves)))


def output_axes(part: Part, program: Any) -> dict[str, Axes]:
    """The axes of the outputs, by name."""
    nodes = {node.name: node for node in program.graph.nodes}
    words: dict[str, str] = {}
    for port, node in zip(part.ports, program.graph_signature.user_inputs, strict=True):
        for axis, size in zip(port.axes, nodes[node].meta["val"].shape, strict=True):
            if isinstance(axis, str):
                words[str(size)] = axis
    return {
        name: tuple(
            size if isinstance(size, int) else words.get(str(size), str(size))
            for size in nodes[node].meta["val"].shape
        )
        for name, node in zip(
            output_names(program), program.graph_signature.user_outputs, strict=True
        )
    }
