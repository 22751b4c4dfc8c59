"""Check for data far outside the prior of a latent that fixed weights tie to them.

A level that x follows with weight 1 is as large as x. If p gives its first value N(0, 1) and x is
in the thousands, log p is low, and learned scales grow to make up for the start.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.declare.fixed_weights import constant_blocks
from aevb.declare.graph import Entry, Graph
from aevb.estimate.keys import masks_of

FAR = 5.0  # standard deviations of the prior from which the data count as far away


def note_narrow_starts(graph: Graph, rows: Mapping[str, Tensor]) -> list[str]:
    """Return a note per variable with data far outside the priors that are tied to it."""
    size = {
        name: _largest(graph, name, rows)
        for name in graph.observed
        if name in rows and graph.rule("p", name).spec.gaussian
    }
    source = {name: name for name in size}
    waiting = [entry for ats in graph.p.values() for entry in ats.values()]
    while ready := [entry for entry in waiting if entry.key.name in size]:
        waiting = [entry for entry in waiting if entry.key.name not in size]
        for entry in ready:
            for name, reached in _tied(graph, entry, size[entry.key.name]).items():
                if name in graph.latents and name not in size:
                    size[name], source[name] = reached, source[entry.key.name]
    narrow: dict[str, list[tuple[Entry, float]]] = {}
    for name in (name for name in graph.latents if name in size):
        for entry in graph.p[name].values():
            spec, stated = entry.spec, getattr(entry.spec, "scale", None)
            scale = float(stated) if isinstance(stated, int | float) else 1.0
            root = not entry.key.parents and spec.gaussian and not spec.learned
            if root and float(size[name].max()) > FAR * scale:
                narrow.setdefault(source[name], []).append((entry, scale))
    return [_note(name, float(size[name].max()), entries) for name, entries in narrow.items()]


def _note(data: str, largest: float, entries: list[tuple[Entry, float]]) -> str:
    priors = ", ".join(f"{entry.key.target} ~ N(0, {scale:g}²)" for entry, scale in entries)
    return (
        f"p declares {priors}. Fixed weights tie this to {data}, which reaches {largest:.3g}, far "
        f"outside. Standardise {data}, or declare a larger scale: Normal(…, "
        f"scale={10 * largest:.0e})."
    )


def _largest(graph: Graph, name: str, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the largest known |value| of each column, on the CPU, where the fixed weights are."""
    known = torch.ones((), dtype=torch.bool)
    for mask in masks_of(rows, name, timed=graph.timed[name]):
        known = known & mask
    values = rows[name].cpu().double()
    return torch.where(known.cpu(), values.abs(), 0.0).flatten(0, 1).amax(0)


def _tied(graph: Graph, entry: Entry, size: Tensor) -> dict[str, Tensor]:
    """Return the size of each parent with fixed weights for which the variable is this large."""
    fixed = getattr(entry.spec.net, "fixed", ())
    if not fixed:
        return {}
    parents = {str(ref): graph.size(ref.name) for ref in entry.key.parents}
    d = graph.size(entry.key.name)
    blocks = constant_blocks(fixed, parents, list(entry.spec.heads(d).values()))
    found = {}
    for ref in entry.key.parents:
        if str(ref) in blocks:
            weights = blocks[str(ref)][:d].abs()
            each = torch.where(weights > 0, size.unsqueeze(1) / weights, torch.inf).amin(0)
            found[ref.name] = torch.where(each.isfinite(), each, 0.0)
    return found
