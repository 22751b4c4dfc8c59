"""Simulate data from p: draw some variables again and keep all others fixed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from aevb.declare.evaluation_order import schedule
from aevb.declare.graph import Graph
from aevb.estimate.ancestral import ancestral_draw
from aevb.estimate.batch import Batch
from aevb.estimate.keys import masks_of
from aevb.estimate.program import Program
from aevb.model import Model
from aevb.posterior import posterior_of

AT_ONCE = 50  # draws of an exact posterior that are made together


def redraw(model: Model, batch: Mapping[str, Tensor], names: Collection[str]) -> Batch:
    """Draw some variables from p and return them as a batch.

    All other variables keep the values of the batch; deterministic ones are computed again. A drawn
    variable reads the drawn values of its parents, for example of earlier steps of its sequence.
    """
    graph, (n, steps) = model.graph, model._extent(batch)
    free = {
        name: graph.reads("p", name)
        for name in graph.p
        if name in names or graph.is_deterministic(name)
    }
    program = Program(graph, model.factors, batch, steps=steps)
    program.values |= {
        name: batch[name]
        for name in (*graph.stochastic, *graph.given)
        if name not in names and name in batch
    }
    program.run(schedule(free, "p"), ancestral_draw(model, n, steps))
    return {
        name: program.values[name].expand(steps if graph.timed[name] else 1, n, -1)
        for name in names
    }


def complete(model: Model, batch: Batch, seed: int | None = None, method: str = "auto") -> Batch:
    """Add a joint draw of the latents from their posterior (q if it was trained) to the batch."""
    return next(completions(model, batch, 1, seed, method))


def completions(
    model: Model, batch: Batch, at_once: int, seed: int | None = None, method: str = "auto"
) -> Iterator[Batch]:
    """Yield completed batches without end, each with a new draw of the latents.

    An exact posterior makes ``at_once`` draws together, because they share most of the work.
    """
    posterior = posterior_of(model, model.teaching, batch, samples=1, seed=seed, method=method)
    at_once = 1 if posterior.method == "q" else at_once
    while True:
        drawn = posterior.sample(at_once)
        for s in range(at_once):
            yield batch | posterior._laid_out({name: value[s] for name, value in drawn.items()})


def replicate(model: Model, batch: Batch, kind: str) -> Iterator[Batch]:
    """Yield replicated data without end.

    ``kind="posterior"`` draws x ~ p(x | z) with z from its posterior, "prior" draws all variables
    from p.
    """
    graph = model.graph
    if kind == "prior":
        while True:
            yield redraw(model, batch, graph.stochastic)
    for whole in completions(model, batch, AT_ONCE):
        yield redraw(model, whole, graph.observed)


def as_array(graph: Graph, batch: Mapping[str, Tensor], name: str, value: Tensor) -> np.ndarray:
    """Return values as an array [N, d], or [N, T, d] for sequences.

    Entries that are missing or padded in the batch are NaN.
    """
    for mask in masks_of(batch, name, timed=graph.timed[name]):
        value = torch.where(mask, value, torch.nan)
    found = value.transpose(0, 1) if graph.timed[name] else value[0]
    return np.asarray(found.detach().cpu().double().numpy())


def some_rows(n: int, rows: int | None, seed: int) -> Tensor:
    """Return the indices of all rows, or of ``rows`` random rows in ascending order."""
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(
            f"rows is the largest number of rows to use, a positive whole number or None for all, "
            f"got {rows!r}."
        )
    if rows is None or rows >= n:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:rows].sort().values
