"""The models of a comparison with their rows: checks that they compare, and their evidence."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.comparison.criteria import free_parameters, observed_steps
from aevb.comparison.result import Compared, Comparison, counted, listed
from aevb.data.repeated_values import note_repeated_rows
from aevb.data.sources import Source, open_source
from aevb.estimate.keys import masks_of
from aevb.evidence import AIS, Evidence, Particles, unnoted_evidence
from aevb.evidence.exact import why_not_exact
from aevb.evidence.result import count
from aevb.model import Model
from aevb.posterior import untrained_gaps_note
from aevb.posterior.training_record import check_rows
from aevb.tables.declarations import PART
from aevb.training.evaluation import evaluate_precisely
from aevb.training.resuming import fingerprint, is_partial

FLAT = 1e3  # standard deviations of the data from which on a first step counts as nearly flat
SOME = 2000  # rows whose given variables serve to count free parameters
ROWS = 10_000  # rows whose exact evidence is computed at a time


@dataclass(frozen=True)
class Entrant:
    """A model and the rows on which it is compared, laid out and prepared for it.

    ``log_jacobian``, [N], is what to subtract from the model's log p to get a density in the units
    of the data; None if the rows are in these units. ``rows_id`` identifies the rows before their
    preparation; it must be the same for all models. ``trained_on`` says whether the model was
    trained on exactly these rows, None if that is unknown, and ``trained_on_most`` whether these
    are its training rows and those that it held out. ``quantities`` are what log p is of, if
    these are not the variables of the model but the columns of a table.
    """

    name: str
    model: Model
    source: Source
    log_jacobian: np.ndarray | None = None
    rows_id: str = ""
    trained_on: bool | None = None
    trained_on_most: bool = False
    seconds: float | None = None
    folder: Path | None = None
    quantities: Mapping[str, str] | None = None

    @property
    def joined(self) -> bool:
        """Whether the model is a joined mixture of a table, which maximises no likelihood."""
        return self.quantities is not None and PART in self.model.graph.latents

    @classmethod
    def of(cls, name: str, model: Model, data: Any, **others: Any) -> Entrant:
        """Lay out the rows of ``data`` for a model. Variables that it lacks are left out."""
        if isinstance(data, Mapping):
            mine = (*model.graph.shapes, "steps", "lengths")
            data = {key: value for key, value in data.items() if key in mine}
        source = open_source(model.graph, data, model._parameter())
        check_rows(source, model.teaching.columns, model.teaching.pixels)
        return cls(
            name, model, source, rows_id=others.pop("rows_id", "") or str(source.n), **others
        )

    def scored(self) -> dict[str, str]:
        """Return what log p is a density of: variable or column → kind, for comparison."""
        if self.quantities is not None:
            return dict(self.quantities)
        graph, found = self.model.graph, {}
        known = self.source.read(torch.zeros(1).long())
        for name in (*graph.observed, *(name for name in graph.latents if name in known)):
            discrete = any(entry.spec.support.is_discrete for entry in graph.p[name].values())
            kind = "probabilities" if discrete else "densities"
            found[name] = f"{kind} of {math.prod(graph.shapes[name])} numbers"
        return found


def trained_here(folder: Path | None, source: Source) -> bool | None:
    """Return whether the run in a folder was trained on these rows.

    None if it has no record of all its rows.
    """
    import tomllib

    if folder is None or not (folder / "config.toml").is_file():
        return None
    recorded = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")).get("data")
    if recorded is None or is_partial(recorded):
        return None
    return bool(recorded == fingerprint(source))


def identify(raw: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a hash of rows as they were before their preparation."""
    digest = hashlib.sha256()
    for name in sorted(set(names) & raw.keys()):
        value = raw[name]
        rows = list(value) if isinstance(value, list) else [np.asarray(value)]
        digest.update(f"{name} {len(value)}".encode())
        for row in rows:
            digest.update(np.ascontiguousarray(np.asarray(row, dtype=np.float64)).tobytes())
    return digest.hexdigest()


def refuse_incomparable(entrants: Sequence[Entrant]) -> None:
    """Raise ValueError unless all models give log p of the same variables and the same rows."""
    first = entrants[0]
    names = [one.name for one in entrants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Two models are called {twice[0]!r}. Give each a name of its own.")
    for one in entrants[1:]:
        ours, theirs = first.scored(), one.scored()
        if ours.keys() != theirs.keys():
            raise ValueError(
                f"{first.name} gives log p({_joined(ours)}) and {one.name} gives log "
                f"p({_joined(theirs)}): these are different quantities. Compare models of the "
                f"same variables."
            )
        for name, kind in ours.items():
            if kind != theirs[name]:
                raise ValueError(
                    f"{name}: {first.name} gives {kind}, {one.name} gives {theirs[name]}. These "
                    f"cannot be compared."
                )
        if first.source.n != one.source.n or first.rows_id != one.rows_id:
            raise ValueError(
                f"{first.name} and {one.name} would be compared on different rows "
                f"({first.source.n} and {one.source.n}). Compare them on rows that are new to "
                f"both: name a file by data= (--data)."
            )


def _joined(names: Mapping[str, str], most: int = 8) -> str:
    return ", ".join(list(names)[:most]) + ", …" * (len(names) > most)


def compared(
    entrant: Entrant,
    *,
    method: str | AIS | Particles = "auto",
    samples: int | None = None,
    seed: int = 0,
    memory: float | str | None = None,
    elbo: bool = False,
    criteria: bool = False,
) -> Compared:
    """Compute the evidence of one model on its rows, and what else a comparison shows of it."""
    model, source = entrant.model, entrant.source
    exact = method in ("auto", "exact") and why_not_exact(model) is None
    if exact:
        found, gaps = _exact(model, source), None
    else:
        rows = source.take(torch.arange(source.n))
        found = unnoted_evidence(
            model, rows, method=method, samples=samples, seed=seed, memory=memory
        )
        by_q = found.method not in ("exact", "prior")
        gaps = untrained_gaps_note(model, model.teaching, rows, source.places) if by_q else None
    value = found.value.double().cpu().numpy()
    if entrant.log_jacobian is not None:
        value = value - entrant.log_jacobian
    bound, untrained = _bound(entrant, seed) if elbo else (None, [])
    drawn = found.diagnostics.get("samples")
    free = steps = None
    if criteria and exact and not entrant.joined:
        free = free_parameters(model, source.take(torch.arange(min(source.n, SOME))))
        steps = observed_steps(model, source)
    return Compared(
        entrant.name,
        value,
        found.stderr.double().cpu().numpy(),
        found.method,
        sum(one.numel() for one in model.theta()),
        sum(one.numel() for one in model.phi()),
        flags=(*found.notes, *([gaps] if gaps else [])),
        notes=(*untrained, *note_repeated_rows(model.graph, source)),
        seconds=entrant.seconds,
        elbo=None if bound is None else bound[0],
        elbo_error=None if bound is None else bound[1],
        free=free,
        observed_steps=steps,
        samples=drawn if isinstance(drawn, int) else None,
        rounding=4 * torch.finfo(model._parameter().dtype).eps,
    )


def compare_entrants(
    entrants: Sequence[Entrant],
    *,
    what: str = "",
    units: str = "",
    criteria: bool | None = None,
    elbo: bool = False,
    **settings: Any,
) -> Comparison:
    """Compare models on their rows; see :func:`aevb.compare` for the settings."""
    refuse_incomparable(entrants)
    wanted = _criteria(entrants, criteria, settings.get("method", "auto"))
    models = [compared(one, elbo=elbo, criteria=wanted, **settings) for one in entrants]
    notes = [*_notes(entrants), *_assumed(entrants, wanted), *_uncounted(entrants, models, wanted)]
    return Comparison.of(models, what, units, notes)


def _notes(entrants: Sequence[Entrant]) -> list[str]:
    found = []
    trained = {
        "These are the": [one.name for one in entrants if one.trained_on],
        "Most of these rows are": [one.name for one in entrants if one.trained_on_most],
    }
    for which, names in trained.items():
        if names:
            whose = "all models" if len(names) == len(entrants) else listed(names)
            found.append(
                f"{which} training rows of {whose}: log p of new rows is lower, and the more so "
                f"the more parameters a model has."
            )
    given = {one.name: tuple(one.model.graph.given) for one in entrants}
    if len(set(given.values())) > 1:
        found.append(
            "The models are given different variables ("
            + "; ".join(f"{name}: {', '.join(those) or 'none'}" for name, those in given.items())
            + "): each log p is conditional on its own."
        )
    return [*found, *_flat_starts(entrants)]


def _flat_starts(entrants: Sequence[Entrant]) -> list[str]:
    """Say that log p does not compare models with different nearly flat first steps."""
    starts = {one.name: flat_starts(one.model, one.source) for one in entrants}
    if len({tuple(sorted(those.values())) for those in starts.values()}) < 2:
        return []
    told = "; ".join(f"{name}: {', '.join(those) or 'none'}" for name, those in starts.items())
    return [
        f"The models have different first steps that are nearly flat ({told}). Each of their "
        f"entries costs log p about the log of its scale, whatever the data, so differences of log "
        f"p, AIC and BIC do not tell which model is better. Compare forecasts of steps that were "
        f"held out."
    ]


def flat_starts(model: Model, source: Source) -> dict[str, tuple[float, ...]]:
    """Return the latents' first steps whose fixed scale is far above the sd of the data.

    The values are the scales of the entries.
    """
    graph = model.graph
    if not any(graph.timed[name] for name in graph.observed):
        return {}
    rows = source.take(torch.arange(min(source.n, SOME)))
    spread = 0.0
    for name in graph.observed:
        seen = torch.ones_like(rows[name], dtype=torch.bool)
        for mask in masks_of(rows, name, timed=graph.timed[name]):
            seen = seen & mask
        values = rows[name][seen].double()
        spread = max(spread, float(values.std()) if len(values) > 1 else 0.0)
    found = {}
    for name in graph.latents:
        for entry in graph.p[name].values():
            scale = getattr(entry.spec, "scale", None)
            root = graph.timed[name] and not entry.key.parents
            if root and isinstance(scale, int | float) and scale >= FLAT * spread > 0:
                found[str(entry.key.target)] = (float(scale),) * graph.size(name)
    return found


def _assumed(entrants: Sequence[Entrant], wanted: bool) -> list[str]:
    """Say for which models AIC and BIC rely on the caller that these are the training rows."""
    unknown = [one.name for one in entrants if wanted and one.trained_on is None and not one.joined]
    return (
        [
            f"AIC and BIC take these rows to be the training rows of {listed(unknown)}, of which "
            f"there is no record. On other rows they have no meaning."
        ]
        if unknown
        else []
    )


def _uncounted(entrants: Sequence[Entrant], models: Sequence[Compared], wanted: bool) -> list[str]:
    """Say which models have no AIC and BIC, and why."""
    joined = [one.name for one in entrants if wanted and one.joined]
    many = [one.name for one in models if wanted and one.free is None and one.name not in joined]
    reasons = {
        "mixtures joined into one do not maximise the likelihood": joined,
        "too many parameters to count the free": many,
    }
    return [
        f"AIC and BIC are not computed for {listed(names)}: {reason}."
        for reason, names in reasons.items()
        if names
    ]


def _criteria(entrants: Sequence[Entrant], asked: bool | None, method: Any) -> bool:
    """Return whether to compute AIC and BIC. Refuse them where they have no meaning."""
    if asked is False:
        return False
    inexact = {
        one.name: reason
        for one in entrants
        if (reason := why_not_exact(one.model) if method in ("auto", "exact") else "of method=")
    }
    elsewhere = [one.name for one in entrants if one.trained_on is False]
    if asked is None:
        return not inexact and all(one.trained_on for one in entrants)
    if inexact:
        name, reason = next(iter(inexact.items()))
        raise ValueError(
            f"AIC and BIC need the exact evidence, but that of {name} is not computed, because "
            f"{reason}. Leave out criteria=True."
        )
    if elsewhere:
        raise ValueError(
            f"AIC and BIC are about the rows that a model was trained on, but {elsewhere[0]} was "
            f"trained on others. Leave out criteria=True; held-out rows need no such criterion."
        )
    return True


def _exact(model: Model, source: Source) -> Evidence:
    """Return the exact evidence of all rows, with a flag if a row has none."""
    parts = []
    for start in range(0, source.n, ROWS):
        batch = source.take(torch.arange(start, min(source.n, start + ROWS)))
        try:
            parts.append(unnoted_evidence(model, batch, method="exact").value)
        except LinAlgError:
            rows = next(iter(batch.values())).shape[-2]
            parts.append(torch.full((rows,), torch.nan))
    value = torch.cat(parts)
    lost = int((~value.isfinite()).sum())
    flags = (
        (f"{count(lost, len(value))} have no finite log p: p gives NaN or zero probability there.",)
        if lost
        else ()
    )
    return Evidence(value, torch.zeros_like(value), "exact", notes=flags)


def _bound(entrant: Entrant, seed: int) -> tuple[tuple[float, float] | None, list[str]]:
    """Return the mean ELBO with its sampling error in the units of log p, or why there is none."""
    reasons = sorted(set(entrant.model.untaught().values()))
    if reasons:
        return None, [f"{entrant.name} has no ELBO: {'; '.join(reasons)}."]
    value, error = evaluate_precisely(entrant.model, entrant.source, seed=seed)["elbo"]
    shift = 0.0 if entrant.log_jacobian is None else float(entrant.log_jacobian.mean())
    return (value - shift, error), []


def describe_rows(n: int, which: str = "", data: str = "") -> str:
    """Describe rows for the title of a table.

    >>> describe_rows(38, "held out", "table.csv")
    '38 rows of table.csv (held out)'
    """
    return counted(n) + f" of {data}" * bool(data) + f" ({which})" * bool(which)
