"""Checks for columns on which a density is unbounded or says nothing useful.

A constant column is refused before the first step, because training could only diverge. A column
with few repeated values, or with one often repeated value, gets a note: a flexible p can narrow
onto these values, so log p grows without bound and means little. A column that numbers the rows
gets a note too.
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
from aevb.estimate.keys import mask_of, masks_of
from aevb.estimate.places import INDICES, Places
from aevb.runtime.devices import wide

FEW = 10  # a column with at most this many distinct values has few values,
REPEATS = 20  # and so has one with more, if each value occurs this often on average
SHARE = 4  # one value repeats if at least 1/SHARE of the entries have it
LOOK = 2000  # rows that are examined
NUMBERED = 20  # fewest rows for a column of whole multiples of a step to count as numbering them,
GAP = 20  # and the most steps between neighbours (the rows between may have been held out)


def refuse_degenerate(graph: Graph, source: Source) -> None:
    """Refuse columns with an unbounded density in p, and columns missing in every row."""
    for name in graph.observed:
        if name in source.extents:
            _refuse_missing(
                graph,
                name,
                (source.extents[name][0] > source.extents[name][1]).nonzero()[:, 0].tolist(),
                source.places,
            )
        for entry in graph.p[name].values():
            degenerate = _degenerate(entry)
            if degenerate is None or name not in source.extents:
                continue
            low, high = (part.cpu() for part in source.extents[name])
            # low > high means that the column is missing in every row.
            columns = (degenerate.columns(low, high) & (low <= high)).nonzero()[:, 0].tolist()
            if columns:
                raise FamilyError(
                    _message(
                        name,
                        type(entry.spec).__name__,
                        columns,
                        degenerate,
                        source,
                        graph.size(name),
                        timed=graph.timed[name],
                    ),
                    name,
                    span=float((high - low)[low <= high].max()),
                )


def _refuse_missing(graph: Graph, name: str, columns: list[int], places: Places) -> None:
    if len(columns) == graph.size(name):
        raise ValueError(
            f"{name} is missing (NaN) in every row: p cannot learn it. Give it values, or leave "
            f"it out of p."
        )
    if columns:
        raise ValueError(
            f"{name} is missing (NaN) in every row of {places.among(name, columns)}: p cannot "
            f"learn it. Give it values, or drop it from the data."
        )


def note_repeated_rows(graph: Graph, source: Source) -> list[str]:
    """Return the notes of :func:`note_repeats` on a sample of all rows of a source."""
    sample = source.read(source.spread(LOOK))
    return note_repeats(graph, sample, source.fresh, source.places)


def note_repeats(
    graph: Graph,
    batch: Mapping[str, Tensor],
    besides: Collection[str] = (),
    places: Places = INDICES,
) -> list[str]:
    """Return notes on columns of few repeated values whose density could narrow onto them.

    The variables in ``besides`` are skipped.
    """
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
                f"{name} has columns in which one value repeats ({places.among(name, spikes)}; "
                f"the first: in {int(most[spikes[0]])} of {int(known[spikes[0]])} entries). p "
                f"gives {name} a {type(entry.spec).__name__}, a density, which can narrow onto "
                f"that value without bound: log p grows and means little. If the value marks a "
                f"missing entry, write NaN; otherwise model it as a separate variable, or "
                f"{degenerate.fix}."
            )
        if columns:
            family, k = type(entry.spec).__name__, int(counts[columns[0]])
            where = f"{places.among(name, columns)}; the first: {k}"
            parents = ", ".join(map(str, entry.key.parents))
            declared = f'"c{" | " * bool(parents)}{parents}": OneHot({k})'
            notes.append(
                f"{name} has columns of few values that repeat ({where} in "
                f"{int(known[columns[0]])} entries). p gives {name} a {family}, a density, which "
                f"can narrow onto such values without bound: log p grows and means little. "
                f"Declare categories as such ({declared}, in a column c) and counts as Poisson; "
                f"dequantise rounded numbers (aevb.data.dequantise), or {degenerate.fix}."
            )
    return notes


def _narrows(graph: Graph, entry: Entry) -> bool:
    """Return whether a factor's density can narrow onto several values.

    It can if it is a mixture, or if its parents distinguish the values.
    """
    degenerate, spec = _degenerate(entry), entry.spec
    if degenerate is None or not degenerate.narrows:
        return False
    if spec.strata is not None:
        return True
    smooth = all(
        ref.name in graph.p
        and ref.name not in graph.functions
        and not graph.rule("p", ref.name).spec.finite
        for ref in entry.key.parents
    )
    maps = spec.net is None or (isinstance(spec.net, mlp) and not spec.net.hidden)
    # A linear function of a Gaussian is Gaussian, so it has only one peak.
    return bool(entry.key.parents) and not (smooth and maps and spec.shared_scale)


def _distinct(batch: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Count distinct values, known entries, and entries with the commonest value, per column.

    Only known entries at real steps count.
    """
    value = batch[name]
    rows = torch.linspace(
        0, value.shape[1] - 1, min(LOOK, value.shape[1]), device=value.device
    ).long()
    known = torch.ones_like(value, dtype=torch.bool)
    for mask in masks_of(batch, name, timed=len(value) > 1):
        known = known & mask
    value, known = (part[:, rows].flatten(0, 1)[: 20 * LOOK] for part in (value, known))
    ordered = torch.where(known, value, torch.inf).sort(0).values
    finite = ordered.isfinite()
    # True where a value occurs for the first time.
    new = torch.cat([finite[:1], (ordered.diff(dim=0) != 0) & finite[1:]])
    place = torch.arange(len(ordered), device=value.device)[:, None].expand_as(ordered)
    began = torch.where(new, place, -1).cummax(0).values
    return new.sum(0), known.sum(0), torch.where(finite, place - began + 1, 0).amax(0)


def note_numbering(
    graph: Graph,
    batch: Mapping[str, Tensor],
    besides: Collection[str] = (),
    places: Places = INDICES,
) -> list[str]:
    """Return notes on columns of static variables that number the rows.

    Examples are an index, an id or a year.
    """
    notes = []
    for name in graph.observed:
        if (
            graph.timed[name]
            or name not in batch
            or name in besides
            or mask_of(name) in batch
            or batch[name].shape[1] < NUMBERED
        ):
            continue
        value = wide(batch[name][0])
        between = value.diff(dim=0)
        step = between.abs().amin(0)
        times = between / step
        even = (
            ((times - times.round()).abs() < 0.05).all(0)
            & ((times > 0).all(0) | (times < 0).all(0))
            & (times.abs() <= GAP).all(0)
        )
        if columns := even.nonzero()[:, 0].tolist():
            notes.append(
                f"{name} has columns that number the rows ({places.among(name, columns)}): they "
                f"go up or down from each row to the next. The model treats such a number (an "
                f"index, an id, a year) as a measurement; if it is not one, leave it out of the "
                f"data."
            )
    return notes


def _degenerate(entry: Entry) -> Degenerate | None:
    """Return what makes columns degenerate under a factor; None if all its parameters are fixed."""
    spec = entry.spec
    return spec.degenerate() if entry.key.parents or spec.learned or spec.vectors(1) else None


def _message(
    name: str,
    family: str,
    columns: list[int],
    degenerate: Degenerate,
    source: Source,
    d: int,
    *,
    timed: bool,
) -> str:
    _, what, why, fix, _ = degenerate
    n, which = (
        source.n,
        f"{len(columns)} of {d} columns that are {what} ({source.places.among(name, columns)})",
    )
    first = "Train on more rows" if n == 1 else "Drop these columns"
    if n == 1 and len(columns) == d:
        which = "a single row, so every column is constant"
    if n == 1 and len(columns) == d and timed:
        which, first = f"a single series, and it is {what}", "Train on a series that varies"
    reason = (
        f"but p gives {name} a {family}{why and ' ' + why}: its density has no bound there, and "
        f"training would only sharpen it"
    )
    return (
        f"{name} has {which}, {reason}. {first}, dequantise them (aevb.data.dequantise), or {fix}."
    )
