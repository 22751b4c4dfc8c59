"""Ancestral sampling: draw the variables of p in topological order, with some of them fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from torch import Tensor

from aevb.declare.conditionals import Factor
from aevb.declare.evaluation_order import schedule
from aevb.declare.graph import Entry, Graph
from aevb.estimate import noise as noises
from aevb.estimate.batch import Batch, are_labels, numbers, prepare, public
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.program import Program
from aevb.runtime.seeding import draw_from
from aevb.runtime.shapes import broadcast_shapes
from aevb.runtime.suggestions import did_you_mean


def sample(
    model: DeclaredModel,
    n: int,
    fixed: Mapping[str, Any],
    *,
    steps: int | None = None,
    mean: bool = False,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Draw ancestral samples of all variables; see :meth:`aevb.Model.sample`."""
    graph = model.graph
    timed = [name for name in graph.stochastic if graph.timed[name]]
    n, steps = _count("n", "rows", n), None if steps is None else _count("steps", "steps", steps)
    if steps is not None and not timed:
        raise ValueError(
            "No variable of this model has [t], so a sample has no steps. Leave out steps=."
        )
    if timed and steps is None:
        raise ValueError(
            f"{timed[0]}[t] is a sequence: say how many steps to draw, e.g. sample({n}, steps=28)."
        )
    for name in graph.given:
        if name not in fixed and any(
            ref.name == name for other in graph.p for ref in graph.reads("p", other)
        ):
            raise ValueError(
                f"{name!r} is given: p is conditioned on it. Pass {name}=…, e.g. sample({n}, "
                f"{name}=…)."
            )
    known = fixed_values(model, n, steps or 1, fixed)
    for name in fixed:
        _check_fixed(graph, name, set(fixed))
    free = {name: graph.reads("p", name) for name in graph.p if name not in fixed}
    with model._evaluating(seed):
        program = Program(graph, model.factors, known, steps=steps or 1)
        program.values |= known
        program.run(schedule(free, "p"), ancestral_draw(model, n, steps or 1))
        values = {name: program.values[name] for name in graph.stochastic}
        if mean:
            for name in graph.observed:
                if name not in fixed:
                    values[name] = program.mean(name)
    return {name: public(graph, name, value, n, steps or 1) for name, value in values.items()}


def fixed_values(model: DeclaredModel, n: int, steps: int, fixed: Mapping[str, Any]) -> Batch:
    """Expand fixed values to n rows and check them.

    A value is a label or a number, one row, or n rows.
    """
    graph, full = model.graph, {}
    for name, value in fixed.items():
        if name not in graph.shapes or graph.is_deterministic(name):
            raise ValueError(
                f"{name!r} is not a variable that can be fixed; those are "
                f"{', '.join((*graph.stochastic, *graph.given))}."
                f"{did_you_mean(name, (*graph.stochastic, *graph.given))}"
            )
        tensor = numbers(name, value)
        time = (steps,) if graph.timed[name] else ()
        labels = time if not tensor.is_floating_point() else None
        if not tensor.dim():
            tensor = tensor.expand(n, *time)
        elif tensor.shape in ((*time, *graph.shapes[name]), labels) and (
            time or labels is None or tensor.shape != (n,)
        ):
            tensor = tensor.expand(n, *tensor.shape)
        if tensor.shape[0] != n:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, but {n} samples were asked for. Pass one "
                f"row, or one for each sample."
            )
        _check_known(graph, name, tensor)
        full[name] = tensor
    return (
        prepare(graph, full, like=model._parameter(), need=tuple(full), single=True) if full else {}
    )


def _check_known(graph: Graph, name: str, value: Tensor) -> None:
    """Raise ValueError if a fixed value has unknown entries: NaN, or the label −1."""
    unknown = value.isnan() | (value == -1) if are_labels(graph, name, value) else value.isnan()
    if bool(unknown.any()):
        row = int(unknown.nonzero()[0, 0])
        fix = "" if name in graph.given else f", or leave {name} out to draw it"
        raise ValueError(
            f"sample fixes {name}, but its value in row {row} (from 0) is unknown (−1 or NaN). "
            f"Give its value there{fix}."
        )


def _check_fixed(graph: Graph, name: str, fixed: set[str]) -> None:
    """Raise ValueError if p draws a fixed variable given one that is not fixed."""
    if name in graph.given:
        return
    frontier = [ref.name for ref in graph.reads("p", name)]
    while frontier:
        parent = frontier.pop()
        if graph.is_deterministic(parent):
            frontier += [ref.name for ref in graph.reads("p", parent) if ref.name != parent]
        elif parent not in fixed:
            raise ValueError(
                f"sample cannot fix {name!r}: p draws it given {parent!r}, which is free, so this "
                f"would be an intervention. Use reconstruct({name}=…) or posterior({name}=…) to "
                f"condition on it, or fix {parent!r} too."
            )


def ancestral_draw(
    model: DeclaredModel, n: int, steps: int
) -> Callable[[str, Entry, Tensor, int | None], Tensor]:
    """Return the function by which a program draws n rows of a variable of p.

    It draws from the raw numbers of the variable's factor.
    """
    like = model._parameter()

    def draw(name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        factor = model.factors[entry.id]
        assert isinstance(factor, Factor)
        count = steps if model.graph.timed[name] and t is None else 1
        raw = raw.expand(broadcast_shapes(raw.shape, (count, n, 1)))
        dist, kind = factor.distribution(raw), factor.spec.noise(factor.d)
        if kind is None:
            return draw_from(dist)
        shape = (*raw.shape[:-1], kind[1])
        return factor.spec.reparametrise(
            dist, noises.draw_one(kind[0], shape, None, like.device, like.dtype)
        )

    return draw


def _count(word: str, what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(
            f"sample({word}=…) is how many {what} to draw, a whole number from 1 on. Got {value!r}."
        )
    return int(value)
