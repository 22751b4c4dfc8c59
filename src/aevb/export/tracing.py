"""Trace a part with torch.export, for any number of rows and steps, without unused inputs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aevb.export.parts import Part
from aevb.export.ports import BATCH, TIME_AXIS, Axes
from aevb.export.values import example

# The sizes of the example; the traced function takes any.
ROWS, STEPS = 3, 5


class ExportError(ValueError):
    """A part that cannot be exported; the message gives the reason."""


def trace(part: Part) -> Any:
    """Return the traced part, a ``torch.export.ExportedProgram``.

    Inputs that the part does not use are removed from it.
    """
    while True:
        program = _traced(part)
        if not (unused := _unused(part, program)):
            return program
        if len(unused) == len(part.ports):
            raise ExportError(
                f"The {part.what} of this model is constant: it reads no data, so there is "
                f"nothing to export."
            )
        part.drop(unused)


def _traced(part: Part) -> Any:
    batch, time = torch.export.Dim(BATCH), torch.export.Dim(TIME_AXIS)
    free = {BATCH: batch, TIME_AXIS: time}
    shapes = {
        port.name: {i: free[axis] for i, axis in enumerate(port.axes) if isinstance(axis, str)}
        for port in part.ports
    }
    inputs = example(part, ROWS, STEPS, seed=0)
    try:
        with _quiet():
            return torch.export.export(
                part, (inputs,), dynamic_shapes={"inputs": shapes}, strict=False
            )
    except Exception as error:  # torch raises errors of many classes, some of them private
        if isinstance(error, ValueError) and not type(error).__module__.startswith("torch"):
            raise
        raise ExportError(
            f"torch.export cannot trace the {part.what} of this model: {_first_line(error)}"
        ) from error


def _unused(part: Part, program: Any) -> list[str]:
    """The inputs that no operation reads, except for their sizes."""
    names = dict(zip(program.graph_signature.user_inputs, part.ports, strict=True))
    returned = {str(name) for name in program.graph_signature.user_outputs}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found = []
    for name, port in names.items():
        users = [user for user in nodes[name].users if not _asks_for_size(user)]
        passed = all(user.op == "output" for user in users) and name in returned
        if not users or passed:
            found.append(port.name)
    return found


def _asks_for_size(node: Any) -> bool:
    return "sym_size" in str(node.target)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of torch about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"\s+", " ", text).rstrip(".") + "."


def output_axes(part: Part, program: Any, names: Iterable[str]) -> dict[str, Axes]:
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
        for name, node in zip(names, program.graph_signature.user_outputs, strict=True)
    }
