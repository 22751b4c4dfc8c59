"""The parts of a page about one run, each computed on its own: summary, map and checks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aevb.data.datasets import Recipe
from aevb.data.units import densities_note, statistics_note
from aevb.declare.registry import UnknownNetworkError
from aevb.estimate.keys import LENGTHS, STEPS
from aevb.model import Model
from aevb.page.checks import checks
from aevb.page.clusters import pack_clusters
from aevb.page.colours import pack_colours
from aevb.page.conditions import pack_classes, pack_given
from aevb.page.contents import (
    entry_names,
    known_values,
    pack_contents,
    pack_units,
    values_of,
)
from aevb.page.decoder import export, plane
from aevb.page.latent_map import Space, pack_rows, pack_space, spaces
from aevb.page.measures import measure, units_shift
from aevb.page.packing import pack, unpack
from aevb.page.sequences import pack_continuations
from aevb.page.subject import Rows, Subject
from aevb.page.summary import summary
from aevb.posterior.choice import UntaughtError
from aevb.runtime.checked_files import DataWarning, IntegrityWarning
from aevb.runtime.contention import sharing_cores
from aevb.training.run import Run

MOST_ROWS = 1_000_000  # rows of a map
LIVE_ROWS = 2000  # rows of a map while the run trains
GRID = 15  # decoded points per side of a plane, where the page cannot decode itself

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Opened:
    """A run as far as it can be read: its history, its model, and its rows.

    ``problems`` are sentences on what is missing. ``subject`` is None without a trained model or
    without its rows.
    """

    name: str
    folder: Path | None = None
    model: Model | None = None
    run: Run | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    recipe: Recipe | None = None
    subject: Subject | None = None
    notes: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    state: str = "finished"  # or "training" or "stopped"


def run_section(opened: Opened, progress: Progress | None = None, **options: Any) -> dict[str, Any]:
    """Return everything about a run: its summary, its map and its checks."""
    found: dict[str, Any] = {"name": opened.name, "folder": str(opened.folder or "")}
    found |= {"state": opened.state, "problems": list(opened.problems)}
    for part in ("summary", "map", "checks"):
        found[part] = section(opened, part, progress, **options)
        problems = (found[part] or {}).get("problems", [])
        found["problems"] += [text for text in problems if text not in found["problems"]]
        if part != "summary" and found[part]:
            found[part].pop("seconds", None)  # so that the same run gives the same page
    return found


@sharing_cores()
def section(
    opened: Opened, part: str, progress: Progress | None = None, **options: Any
) -> dict[str, Any] | None:
    """Return one part of a page; None if the run has nothing to show there.

    Whatever fails becomes a sentence in ``problems``, and the rest is shown.
    """
    tell = progress or (lambda text: None)
    if part == "summary":
        return _summary(opened, live=options.get("live", False))
    if part != "map":
        options = {}
    if opened.subject is None:
        return None
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if part == "map":
                found = map_section(opened.subject, tell, **options)
            else:
                found = checks_section(opened.subject, tell)
        except Exception as error:
            problems.append(f"The {part} could not be made: {reason_of(error)}")
            found = {"failed": True}
    ours = (DataWarning, IntegrityWarning)
    problems += [str(one.message) for one in caught if issubclass(one.category, ours)]
    return found | {"problems": [*found.get("problems", []), *dict.fromkeys(problems)]}


def _summary(opened: Opened, *, live: bool) -> dict[str, Any]:
    known = (opened.history, opened.run, opened.recipe, opened.notes)
    try:
        return summary(opened.model, *known, longest=_longest(opened), live=live)
    except Exception as error:
        rest = summary(None, *known, live=live)
        return rest | {"problems": [f"The model cannot be shown: {reason_of(error)}"]}


def _longest(opened: Opened) -> int | None:
    """The number of real steps of the longest row; None without lengths."""
    parts = [split.data for split in opened.subject.splits] if opened.subject else []
    if parts and all(LENGTHS in data for data in parts):
        return max(int(np.max(data[LENGTHS], initial=0)) for data in parts)
    if parts and all(STEPS in data for data in parts):
        real = (np.asarray(data[STEPS], bool) for data in parts)
        return max(int(steps.sum(1).max(initial=0)) for steps in real)
    return None


def reason_of(error: Exception) -> str:
    """What went wrong, as a sentence; errors that are not written for a reader name their type."""
    if isinstance(error, UntaughtError | UnknownNetworkError):
        return error.for_commands  # advice that only Python code can follow is left out
    own = type(error).__module__.startswith("aevb.")
    expected = own or type(error) in (ValueError, ArithmeticError, RuntimeError)
    return str(error) if expected and str(error) else f"{type(error).__name__}: {error}"


def map_section(
    subject: Subject, tell: Progress, *, rows: int = MOST_ROWS, live: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Return the latent map: points, colours, contents of rows, decoder, clusters."""
    began = time.perf_counter()
    chosen = Rows.chosen(subject, min(rows, LIVE_ROWS) if live else rows, seed)
    graph = subject.model.graph
    tell(f"latents of {len(chosen):,} rows")
    measures = measure(chosen, seed, evidence=not live)
    tell("map")
    data = _data_space(chosen) if all(_is_class(graph, name) for name in graph.latents) else None
    packed = [
        pack_space(space, seed, embed=not live)
        for space in spaces(graph, measures.codes, data, seed)
    ]
    contents = pack_contents(chosen, seed=seed)
    available = np.ones(len(chosen), bool)
    if contents["detail"] is not None:
        available[:] = False
        available[unpack(contents["detail"])] = True
    colours, left = pack_colours(chosen, measures)
    given = pack_given(chosen)
    classes = [name for name, one in given.items() if one["categorical"]]
    decoder = export(subject.model, categorical=classes)
    problems = [*measures.problems, *left]
    tell("clusters")
    return {
        "rows": pack_rows(chosen),
        "posterior": measures.method,
        "spaces": packed,
        "colours": colours,
        "contents": contents,
        "units": pack_units(subject),
        "decoder": decoder | {"planes": [] if decoder["runs"] else _planes(subject, packed, given)},
        "clusters": pack_clusters(chosen, measures, available, seed),
        "classes": pack_classes(chosen, measures),
        "given": given,
        "continuations": None if live else pack_continuations(chosen, seed),
        "problems": problems,
        "seconds": time.perf_counter() - began,
    }


def checks_section(subject: Subject, tell: Progress, *, seed: int = 0) -> dict[str, Any]:
    """Return the diagnosis and all checks, on held-out rows if there are any."""
    split = subject.judged
    all_rows = Rows.chosen(subject, 2**62)
    judged = all_rows.some(np.flatnonzero(all_rows.split == len(subject.splits) - 1))
    shifts = [units_shift(judged, at, batch) for at, batch in judged.batches()]
    # The entries of the variable of a category are its levels.
    columns = {
        name: [column.name for column in columns]
        for name, columns in (subject.schema.variables if subject.schema else {}).items()
        if columns[0].kind not in ("category", "ordered")
    }
    found = checks(
        subject.model,
        split.data,
        held_out=split.name,
        run=subject.run,
        labels=split.labels,
        seed=seed,
        progress=tell,
        log_jacobian=torch.cat(shifts),
        numbers=judged.numbers(),
        columns=columns,
    )
    densities, statistics = _units_notes(subject)
    for part, notes in (("evidence", densities), ("gap", densities), ("predictive", statistics)):
        if found.get(part) is not None:
            found[part]["notes"] = [*found[part].get("notes", []), *notes]
    return found


def _units_notes(subject: Subject) -> tuple[list[str], list[str]]:
    """Sentences on the units of the densities and of the statistics of the checks."""
    if subject.schema is not None:
        return [], subject.schema.variables_text()
    if subject.recipe is None:
        return [], []
    graph, recipe = subject.model.graph, subject.recipe
    # Densities of standardised values are converted to the units of the data.
    densities = "" if subject.standardised else densities_note(recipe, graph)
    statistics = statistics_note(recipe, graph)
    return [densities] * bool(densities), [statistics] * bool(statistics)


def _is_class(graph: Any, name: str) -> bool:
    return bool(graph.rule("p", name).spec.categorical)


def _data_space(rows: Rows) -> Space:
    """The space of the observed variables, missing entries replaced by column means.

    One or two entries are in the units of the data, more in the units of the model. Those of a
    table are scaled to variance 1: a count would outweigh all other columns.
    """
    subject, graph = rows.subject, rows.subject.model.graph
    observed = [name for name in graph.observed if not graph.timed[name]] or [graph.observed[0]]
    parts, names = [], list[str]()
    few = subject.schema is None and sum(graph.size(name) for name in observed) <= 2
    for name in observed:
        values = [
            (at, (values_of if few else known_values)(subject, name, batch).reshape(len(at), -1))
            for at, batch in rows.batches()
        ]
        width = max(part.shape[1] for _, part in values)
        whole = np.full((len(rows), width), np.nan)
        for at, part in values:
            whole[at, : part.shape[1]] = part
        parts.append(whole)
        names += entry_names(subject, name, width)
    found = np.concatenate(parts, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any known cell
        means = np.nan_to_num(np.nanmean(found, 0))
    found = np.where(np.isnan(found), means, found)
    if subject.schema is not None:
        found = (found - means) / np.maximum(found.std(0), np.finfo(float).tiny)
    return Space(None, found, tuple(names))


def _planes(
    subject: Subject, packed: list[dict[str, Any]], given: dict[str, Any]
) -> list[dict[str, Any]]:
    """Decoded grids of the first views, for networks that cannot run in a page.

    Given variables have their usual value.
    """
    graph = subject.model.graph
    found: list[dict[str, Any]] = []
    if any(graph.timed[name] for name in graph.p):
        return found
    usual = {name: np.array(one["usual"]) for name, one in given.items()}
    for i, space in enumerate(packed):
        view = space["views"][0]
        if space["latent"] is None or view["axes"] is None:
            continue
        ends = [(view[side]["low"], view[side]["high"]) for side in ("across", "up")]
        origin, axes = np.array(view["origin"]), np.array(view["axes"])
        corner = origin + ends[0][0] * axes[0] + ends[1][0] * axes[1]
        spans = np.stack(
            [(high - low) * axis for (low, high), axis in zip(ends, axes, strict=True)]
        )
        try:
            values = plane(subject.model, space["latent"], corner, spans, GRID, usual)
        except ValueError:
            continue
        found.append({"space": i, "steps": GRID, "values": pack(values, "f4")})
    return found
