"""Data on which a density has no greatest value, or tells nothing.

Constant columns are refused before the first step, since training could only diverge. Columns of few values that repeat, or of one that does, are
noted: a flexible p can narrow onto each of them, so that log p grows without telling anything. So are columns that number the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aevb.data.sources import Source
from aevb.declare.conditionals import Degenerate
from aevb.declare.graph import Entry, Graph
from aevb.declare.networks import mlp
from aevb.estimate.batch import FamilyError
from aevb.estimate.keys import mask_of
from aevb.estimate.places import INDICES, Places

FEW = 10  # values that are few in any column,
REPEATS = 20  # and how often each occurs, on average, where they are more
SHARE = 4  # a value that every so many entries have, among others that do not repeat, is such a value too
LOOK = 2000  # rows that are looked at
NUMBERED = 20  # rows from which on a column that goes up by whole multiples of a step numbers them,
GAP = 20  # if no two neighbours are so many steps apart (rows between them may have been held out)


def refuse_degenerate(graph: Graph, source: Source) -> None:
    """Refuse columns on which p's density of an observed variable grows without bound, and columns that no row has."""
    for name in graph.observed:
        if name in source.extents:
            _refuse_missing(graph, name, (source.extents[name][0] > source.extents[name][1]).nonzero()[:, 0].tolist(), source.places)
        for entry in graph.p[name].values():
            degenerate = _degenerate(entry)
            if degenerate is None or name not in source.extents:
                continue
            low, high = (part.cpu() for part in source.extents[name])
            columns = (degenerate.columns(low, high) & (low <= high)).nonzero()[:, 0].tolist()  # a column that is missing everywhere has low > high
            if columns:
                raise FamilyError(_message(name, type(entry.spec).__name__, columns, degenerate, source, graph.size(name)), name)


def _refuse_missing(graph: Graph, name: str, columns: list[int], places: Places) -> None:
    if len(columns) == graph.size(name):
        raise ValueError(f"{name} is missing (NaN) in every row: there is nothing to learn it from. Give it values, or leave it out of p.")
    if columns:
        raise ValueError(
            f"{name} is missing (NaN) in every row of {places.among(name, columns)}: there is nothing to learn it from. "
            "Give it values, or drop it from the data."
        )


def note_repeats(graph: Graph, batch: Mapping[str, Tensor], besides: Collection[str] = (), places: Places = INDICES) -> list[str]:
    """Sentences about columns of a few values that repeat, under a density that could narrow onto them; ``besides`` are not looked at."""
    notes = []
    for name in graph.observed:
        entry = next((entry for entry in graph.p[name].values() if _narrows(graph, entry)), None)
        degenerate = None if entry is None else _degenerate(entry)
        if entry is None or degenerate is None or name not in batch or name in besides:
            continue
        counts, known, most = _distinct(batch, name)
        few = (counts <= (known // REPEATS).clamp_min(FEW)) & (known >= 4 * counts) & (counts > 0)
        columns = few.nonzero()[:, 0].tolist()
        spikes = (~few & (most * SHARE >= known) & (most >= NUMBERED)).nonzero()[:, 0].tolist()
        if spikes:
            notes.append(
                f"{name} has columns in which one value repeats ({places.among(name, spikes)}; the first: in "
                f"{int(most[spikes[0]])} of {int(known[spikes[0]])} entries). p gives {name} a {type(entry.spec).__name__}, a density, which can "
                f"narrow onto that value without bound: log p grows, and says little. If it stands for a missing entry, write NaN; else model it "
                f"apart, or {degenerate.fix}."
            )
        if columns:
            family, k = type(entry.spec).__name__, int(counts[columns[0]])
            where = f"{places.among(name, columns)}; the first: {k}"
            parents = ", ".join(map(str, entry.key.parents))
            declared = f'"c{" | " * bool(parents)}{parents}": OneHot({k})'
            notes.append(
                f"{name} has columns of few values that repeat ({where} in {int(known[columns[0]])} entries). p gives {name} a {family}, a density, "
                f"which can narrow onto such values without bound: log p grows, and says little. Declare categories as such ({declared}, in a "
                f"column c) and counts as Poisson; dequantise rounded numbers (aevb.data.dequantise), or {degenerate.fix}."
            )
    return notes


def _narrows(graph: Graph, entry: Entry) -> bool:
    """Whether a factor's density can narrow onto each of several values: it has a mixture, or parents that tell them apart."""
    degenerate, spec = _degenerate(entry), entry.spec
    if degenerate is None or not degenerate.narrows:
        return False
    if spec.strata is not None:
        return True
    smooth = all(ref.name in graph.p and ref.name not in graph.functions and not graph.rule("p", ref.name).spec.finite for ref in entry.key.parents)
    maps = spec.net is None or (isinstance(spec.net, mlp) and not spec.net.hidden)
    return bool(entry.key.parents) and not (smooth and maps and spec.shared_scale)  # a linear function of a Gaussian is one: it has one peak


def _distinct(batch: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of each column's known entries at real steps: how many different values they have, how many they are, and how many have the commonest value."""
    value = batch[name]
    rows = torch.linspace(0, value.shape[1] - 1, min(LOOK, value.shape[1]), device=value.device).long()
    known = torch.ones_like(value, dtype=torch.bool)
    for there in (mask_of(name), "steps"):
        if there in batch and (there != "steps" or value.shape[0] > 1):
            known = known & batch[there]
    value, known = (part[:, rows].flatten(0, 1)[: 20 * LOOK] for part in (value, known))
    ordered = torch.where(known, value, torch.inf).sort(0).values
    finite = ordered.isfinite()
    new = torch.cat([finite[:1], (ordered.diff(dim=0) != 0) & finite[1:]])  # where a value occurs for the first time
    place = torch.arange(len(ordered), device=value.device)[:, None].expand_as(ordered)
    began = torch.where(new, place, -1).cummax(0).values
    return new.sum(0), known.sum(0), torch.where(finite, place - began + 1, 0).amax(0)


def note_numbering(graph: Graph, batch: Mapping[str, Tensor], besides: Collection[str] = (), places: Places = INDICES) -> list[str]:
    """Sentences about columns of static variables that number the rows: an index, an id or a year among measurements."""
    notes = []
    for name in graph.observed:
        if graph.timed[name] or name not in batch or name in besides or mask_of(name) in batch or batch[name].shape[1] < NUMBERED:
            continue
        value = batch[name][0].double()
        between = value.diff(dim=0)
        step = between.abs().amin(0)
        times = between / step
        even = ((times - times.round()).abs() < 0.05).all(0) & ((times > 0).all(0) | (times < 0).all(0)) & (times.abs() <= GAP).all(0)
        if columns := even.nonzero()[:, 0].tolist():
            notes.append(
                f"{name} has columns that number the rows ({places.among(name, columns)}): they go up or down from each row to the next. "
                f"Such a number (an index, an id, a year) is taken for a measurement here; leave it out of the data if it is none."
            )
    return notes


def _degenerate(entry: Entry) -> Degenerate | None:
    """The columns that are degenerate under a factor; None for one whose parameters are all fixed."""
    spec = entry.spec
    return spec.degenerate() if entry.key.parents or spec.learned or spec.vectors(1) else None


def _message(name: str, family: str, columns: list[int], degenerate: Degenerate, source: Source, d: int) -> str:
    _, what, why, fix, _ = degenerate
    n, which = source.n, f"{len(columns)} of {d} columns that are {what} ({source.places.among(name, columns)})"
    if n == 1 and len(columns) == d:
        which = "a single row, so every column is constant"
    reason = f"but p gives {name} a {family}{why and ' ' + why}: its density has no bound there, and training would only sharpen it"
    first = "Train on more rows" if n == 1 else "Drop these columns"
    return f"{name} has {which}, {reason}. {first}, dequantise them (aevb.data.dequantise), or {fix}."
