"""Values for the inputs of a part: a sample of the model, and noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.declare.networks import table
from aevb.estimate import ancestral
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import is_mask
from aevb.estimate.noise import draw_one
from aevb.export.parts import START, Part
from aevb.export.ports import BATCH, TIME_AXIS, Port

HIDDEN = 0.3  # the share of missing entries, where a part allows them


def example(
    part: Part, rows: int, steps: int, *, seed: int, missing: bool = False, start: bool = True
) -> dict[str, Tensor]:
    """Draw values for the inputs of a part, by name.

    Data and latents are a sample of the model. With ``missing``, some of their entries are NaN
    where the part allows it.
    """
    model, graph = part.model, part.graph
    steps = part.steps if isinstance(part.steps, int) else 1 if part.steps is None else steps
    generator = torch.Generator().manual_seed(seed)
    timed = any(graph.timed[name] for name in graph.stochastic)
    given = {name: _given(model, name, rows, steps, generator) for name in graph.given}
    drawn = ancestral.sample(model, rows, given, steps=steps if timed else None, seed=seed)
    values = {
        port.name: _value(part, port, {**drawn, **given}, rows, steps, generator)
        for port in part.ports
        if port.kind != START
    }
    if missing:
        for port in part.ports:
            if port.missing:
                values[port.name] = _with_gaps(part, port, values[port.name], generator)
    if any(port.kind == START for port in part.ports):
        values[START] = torch.full((1,), start)
    return {port.name: values[port.name] for port in part.ports}


def _value(
    part: Part,
    port: Port,
    known: Mapping[str, Tensor],
    rows: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    like = part.model._parameter()
    lengths = {BATCH: rows, TIME_AXIS: steps}
    sizes = [lengths[axis] if isinstance(axis, str) else axis for axis in port.axes]
    if port.kind == "noise":
        return draw_one(part.kinds[port.key], tuple(sizes), generator, like.device, like.dtype)
    if port.kind == "state":
        value = torch.randn(sizes, generator=generator, dtype=like.dtype)
        return (value > 0).to(like.dtype) if is_mask(port.key) else value
    name = port.key.partition("[")[0]
    value = known[name]
    if part.steps is None and part.graph.timed[name]:
        value = value[:, 0]
    return value.expand(sizes).clone()


def _with_gaps(part: Part, port: Port, value: Tensor, generator: torch.Generator) -> Tensor:
    """Hide entries of a variable; of a class, all of them."""
    hidden = torch.rand(value.shape, generator=generator) < HIDDEN
    if port.kind == "given" or part.graph.rule("p", port.key).spec.categorical:
        hidden = hidden[..., :1].expand(value.shape)
    return torch.where(hidden, torch.nan, value)


def _given(
    model: DeclaredModel, name: str, rows: int, steps: int, generator: torch.Generator
) -> Tensor:
    """A class for a given variable with several entries, otherwise a number."""
    graph, like = model.graph, model._parameter()
    lead, size = (rows, steps) if graph.timed[name] else (rows,), graph.size(name)
    indexed = any(
        isinstance(entry.spec.net, table) and entry.key.parents[0].name == name
        for entry in graph.entries()
    )
    if indexed:
        value = torch.zeros(*lead, 1)
    elif size == 1:
        value = torch.randn(*lead, 1, generator=generator)
    else:
        which = torch.randint(size, lead, generator=generator)
        value = torch.nn.functional.one_hot(which, size)
    return value.to(like.dtype).reshape(*lead, *graph.shapes[name])
