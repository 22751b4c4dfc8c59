"""Draws from p in the place of the data: some variables drawn anew, all others held."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from aevb.declare.evaluation_order import schedule
from aevb.declare.graph import Graph
from aevb.estimate.ancestral import ancestral_draw
from aevb.estimate.batch import Batch
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.model import Model
from aevb.posterior import posterior_of

AT_ONCE = 50  # draws of an exact posterior


def redraw(model: Model, batch: Mapping[str, Tensor], names: Collection[str]) -> Batch:
    """Draws of some variables from p, laid out as a batch; every other one has the batch's value, deterministic ones are computed anew.

    What is drawn reads what is drawn: of a sequence each step reads the steps drawn before it.
    """
    graph, (n, steps) = model.graph, model._extent(batch)
    free = {name: graph.reads("p", name) for name in graph.p if name in names or graph.is_deterministic(name)}
    program = Program(graph, model.factors, batch, steps=steps)  # type: ignore[arg-type]
    program.values |= {name: batch[name] for name in (*graph.stochastic, *graph.given) if name not in names and name in batch}
    program.run(schedule(free, "p"), ancestral_draw(model, n, steps))
    return {name: program.values[name].expand(steps if graph.timed[name] else 1, n, -1) for name in names}


def complete(model: Model, batch: Batch, seed: int | None = None, method: str = "auto") -> Batch:
    """The batch with a joint draw of its latents from their posterior: q's where q was trained."""
    return next(completions(model, batch, 1, seed, method))


def completions(model: Model, batch: Batch, at_once: int, seed: int | None = None, method: str = "auto") -> Iterator[Batch]:
    """The same again and again; of an exact posterior, ``at_once`` draws are made together, since they share its work."""
    posterior = posterior_of(model, model.teaching, batch, samples=1, seed=seed, method=method)
    at_once = 1 if posterior.method == "q" else at_once
    while True:
        drawn = posterior.sample(at_once)
        for s in range(at_once):
            yield batch | posterior._laid_out({name: value[s] for name, value in drawn.items()})


def replicate(model: Model, batch: Batch, kind: str) -> Iterator[Batch]:
    """The data drawn anew, again and again: x ~ p(x | z) with z from its posterior ("posterior"), or all variables from p ("prior")."""
    graph = model.graph
    if kind == "prior":
        while True:
            yield redraw(model, batch, graph.stochastic)
    for whole in completions(model, batch, AT_ONCE):
        yield redraw(model, whole, graph.observed)


def as_array(graph: Graph, batch: Mapping[str, Tensor], name: str, value: Tensor) -> np.ndarray:
    """A variable's values as [N, d], of a sequence [N, T, d], NaN where the batch's are missing or beyond a row's end."""
    for mask in (batch.get(mask_of(name)), batch.get("steps") if graph.timed[name] else None):
        if mask is not None:
            value = torch.where(mask, value, torch.nan)
    found = value.transpose(0, 1) if graph.timed[name] else value[0]
    return np.asarray(found.detach().cpu().double().numpy())


def some_rows(n: int, rows: int | None, seed: int) -> Tensor:
    """All rows, or as many as asked for, at random but in order."""
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows is how many rows to use at most, a positive whole number or None for all, got {rows!r}.")
    if rows is None or rows >= n:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:rows].sort().values
