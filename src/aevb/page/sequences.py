"""Sampled continuations of sequences: p goes on where the data are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.declare.evaluation_order import schedule
from aevb.declare.graph import Entry
from aevb.estimate.ancestral import ancestral_draw
from aevb.estimate.batch import Batch
from aevb.estimate.keys import STEPS, is_mask
from aevb.estimate.program import Program
from aevb.model import Model
from aevb.page.contents import pack_numbers, shown
from aevb.page.subject import Rows
from aevb.predictive.replicate import completions

SEQUENCES = 6  # whose continuations are drawn
DRAWN = 6  # continuations of each
AFTERWARDS = 2**20  # added to the seed of the latents for all later draws


def continued(model: Model, batch: Batch, start: int, seed: int) -> Batch:
    """Draw all variables of p from step ``start`` on, given what came before.

    Observed variables keep their data before that step. Latents before it, and those without steps,
    are drawn from their posterior given the data before it and the given variables before it. So
    nothing reads the future, except for what is given. All rows have all steps.
    """
    graph, (n, steps) = model.graph, model._extent(batch)
    whole = {name: value for name, value in batch.items() if name != STEPS and not is_mask(name)}
    past = {name: value[:start] if graph.timed[name] else value for name, value in whole.items()}
    known = next(completions(model, past, 1, seed))
    with model._evaluating(seed + AFTERWARDS), torch.no_grad():
        drawn = ancestral_draw(model, n, steps)

        def draw(name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
            if t is not None and t < start:
                return known[name][t : t + 1]
            fresh = drawn(name, entry, raw, t)
            if t is not None or not graph.timed[name]:
                return fresh if graph.timed[name] else known[name]
            return torch.cat([known[name].expand(start, n, -1), fresh[start:]])

        free = {name: graph.reads("p", name) for name in graph.p}
        program = Program(graph, model.factors, whole, steps=steps)
        program.values |= {name: whole[name] for name in graph.given if name in whole}
        program.run(schedule(free, "p"), draw)
        return {name: program.values[name] for name in graph.observed}


def pack_continuations(rows: Rows, seed: int) -> dict[str, Any] | None:
    """Continuations of a few sequences from their middle; None for models without sequences."""
    subject = rows.subject
    model, graph = subject.model, subject.model.graph
    name = graph.observed[0]
    # The end of the past is no last step: a rule for the last step would be wrong there.
    if not graph.timed[name] or any(
        "last" in rules for rules in (*graph.p.values(), *graph.q.values())
    ):
        return None
    # Rows that the model was not trained on, if there are any.
    judged = np.flatnonzero(rows.split == rows.split.max())
    found = _whole_rows(rows.some(judged))
    if found is None:
        return None
    at, batch = judged[found[0]], found[1]
    steps = batch[name].shape[0]
    if steps < 2:
        return None
    start = steps // 2
    draws = []
    for k in range(DRAWN):
        drawn = continued(model, batch, start, seed + k)[name]
        draws.append(drawn.expand(steps, len(at), -1).transpose(0, 1).double().cpu().numpy())
    values = shown(subject, name, np.stack(draws, 1))
    data = batch[name].transpose(0, 1).double().cpu().numpy()
    return {
        "variable": name,
        "rows": at.tolist(),
        "start": start,
        "shape": list(values.shape),
        "numbers": pack_numbers(values),
        "data": pack_numbers(shown(subject, name, data)),
    }


def _whole_rows(rows: Rows) -> tuple[np.ndarray, Batch] | None:
    """A few rows without missing entries, cut to the length of the shortest of them."""
    graph = rows.subject.model.graph
    for at, batch in rows.batches():
        complete = torch.ones(len(at), dtype=torch.bool)
        for key, value in batch.items():
            if is_mask(key):
                complete &= value.cpu().all(-1).all(0)
        lengths = batch[STEPS][..., 0].sum(0).cpu() if STEPS in batch else None
        if lengths is not None:
            complete &= lengths >= lengths.median()
        chosen = complete.nonzero()[:SEQUENCES, 0]
        if not len(chosen):
            continue
        part = {name: value.index_select(-2, chosen) for name, value in batch.items()}
        steps = int(lengths[chosen].min()) if lengths is not None else None
        if steps is not None:
            part = {
                name: value[:steps] if graph.timed.get(name) or name == STEPS else value
                for name, value in part.items()
            }
        return at[chosen.numpy()], part
    return None
