"""How a model of a table is fitted: exact EM from several starts where it applies."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aevb.declare import distributions as ad
from aevb.declare.conditionals import Conditional
from aevb.declare.families import NegativeBinomial
from aevb.declare.networks import MLP
from aevb.evidence.exact import why_not_exact
from aevb.evidence.finite import why_not_finite
from aevb.evidence.linear_gaussian import why_not_linear_gaussian
from aevb.model import Model
from aevb.runtime.checked_files import DataWarning
from aevb.tables.kinds import negative_binomial_likelihood
from aevb.tables.large_columns import EncodedRows
from aevb.tables.schema import Schema
from aevb.training.checkpoint import folders
from aevb.training.em import Responsibilities
from aevb.training.fit import fit
from aevb.training.run import Run
from aevb.training.schedules import em, mle
from aevb.training.settings import Settings

Data = Mapping[str, Any]  # of arrays, by variable
STARTS, FEW_STARTS = 10, 3  # of a mixture, for small tables and for large ones
SMALL = 3_000_000  # operations of an iteration on a small table
# A start is compared with the others after this many iterations, or when they gain less. On a small
# table, the best ones are compared again when they have converged.
TRIAL_STEPS, TRIAL_TOL, FINALISTS = 100, 1e-3, 3
NEVER = 10**9  # steps
# The smallest variance of a column within a cluster, as a share of the column's variance: LEAST, or
# that of half the smallest distance between its cells, up to MOST. A cluster of equal cells would
# otherwise have an unbounded density.
LEAST, MOST = 1e-4, 0.25
EQUAL = 10  # rows of a cluster from which its equal cells are those of a group, and no accident
LEAST_STEPS, EPOCHS = 2000, 200  # gradient steps of a small table; the most passes of fit's default
NEAR = 1.1  # scales at most this multiple of the smallest one count as collapsed


def fit_data(
    schema: Schema,
    model: Model,
    data: Data,
    *,
    starts: int | None,
    hide: float = 0.0,
    **settings: Any,
) -> Run:
    """Fit a model to encoded rows, by the schedule of ``settings`` or else by the one that fits.

    A mixture takes exact EM from several starts and keeps the best. Exact factor analysis takes
    EM. Other models with an exact evidence take maximum likelihood (``mle()``), and those without
    take gradient steps on the bound, with ``hide`` as in :meth:`Schema.fit`.
    """
    if isinstance(hide, bool) or not 0 <= hide < 1:
        raise ValueError(f"hide is a share of the cells, 0 or more and below 1, got {hide!r}.")
    if starts is not None and (isinstance(starts, bool) or starts < 1):
        raise ValueError(f"starts is a positive whole number, got {starts!r}.")
    fresh, seed = model.untouched(), int(settings.get("seed", 0))
    if fresh:  # the seed of the run decides the initial weights, too
        model.load_state_dict(model.fresh(seed).state_dict())
    exact, finite = why_not_exact(model) is None, why_not_finite(model) is None
    closed = Responsibilities(model).closed if finite else why_not_linear_gaussian(model) is None
    if starts is not None and ("schedule" in settings or not (finite and closed)):
        raise ValueError("starts= is for mixtures that are fitted by the default schedule, em().")
    if hide and exact:
        raise ValueError(
            "hide= is for models with networks; this model marginalises missing cells exactly."
        )
    if not exact:
        return _by_gradients(model, data, _holed(data, hide, seed), settings, fresh=fresh)
    if "schedule" in settings:
        return fit(model, data, **settings)
    out = None if settings.get("out") is None else Path(settings["out"])
    begun, least = False, least_shares(model, data)
    if out is not None and settings.get("resume") and folders(out):
        begun = True
        recorded = Settings.from_toml(out / "config.toml")
        settings["seed"] = recorded.seed
        if isinstance(recorded.schedule, em) and recorded.schedule.least is not None:
            least = recorded.schedule.least
    if fresh and finite and closed and not begun:
        settings["seed"] = _best_seed(model, data, starts, settings)
    if not settings.get("patience"):
        # The weights of a run are those of its best validation. Exact methods converge, so that
        # they are validated once, at the end; held-out rows choose no weights.
        settings = {"validate_every": NEVER, "checkpoint_every": 1} | settings
    start = "data" if fresh else "keep"
    run = fit(model, data, schedule=em(start=start, least=least) if closed else mle(), **settings)
    _warn_of_limits(schema, model, data)
    return run


def _by_gradients(
    model: Model, data: Data, rows: Data, settings: dict[str, Any], *, fresh: bool
) -> Run:
    """Gradient steps on the bound. A small table takes more passes than the default of ``fit``."""
    if fresh:
        _start_at_marginals(model, data)
    if "steps" not in settings and "epochs" not in settings:
        n, batch = len(next(iter(rows.values()))), int(settings.get("batch", 100))
        if n * EPOCHS < LEAST_STEPS * batch:
            settings = settings | {"steps": LEAST_STEPS}
    return fit(model, rows, **settings)


def _best_seed(model: Model, data: Data, starts: int | None, settings: Mapping[str, Any]) -> int:
    """The seed from which EM finds the highest evidence, of several seeds.

    Solutions with a collapsed cluster come last.
    """
    first, small = int(settings.get("seed", 0)), _operations(model, data) <= SMALL
    count = starts or (STARTS if small else FEW_STARTS)
    clusters = math.prod(model.graph.size(name) for name in model.graph.latents)
    if count == 1 or clusters == 1:
        return first
    names = {field.name for field in fields(Settings)} - {"patience", "epochs"}
    own = {key: value for key, value in settings.items() if key in names}

    def ranked(seeds: Iterable[int], **choices: Any) -> list[int]:
        found = []
        for seed in seeds:
            run = fit(model.fresh(seed), data, progress=False, **(own | choices | {"seed": seed}))
            sound = all(one.sound for one in at_limit(run.model, data))
            found.append((sound, float(run.history["evidence"][-1]), -seed))
        return [-key[2] for key in sorted(found, reverse=True)]

    steps = min(TRIAL_STEPS, int(settings.get("steps") or TRIAL_STEPS))
    least = least_shares(model, data)
    trial = em(start="data", least=least, tol=TRIAL_TOL)
    best = ranked(range(first, first + count), steps=steps, schedule=trial)
    if not small:
        return best[0]
    return ranked(best[:FINALISTS], schedule=em(start="data", least=least))[0]


def _operations(model: Model, data: Data) -> int:
    """About how many multiplications an iteration of EM takes."""
    graph = model.graph
    clusters = math.prod(graph.size(name) for name in graph.latents)
    total = 0
    for name, value in data.items():
        full = graph.rule("p", name).spec.full_moments
        # With missing entries, every row has a covariance of its own to factor.
        power = 1 if not full else 3 if np.isnan(value).any() else 2
        total += len(value) * clusters * graph.size(name) ** power
    return total


def _holed(data: Data, share: float, seed: int) -> Data:
    """The rows, followed by a copy in which a share of the known cells is missing."""
    if not share:
        return data
    if any(isinstance(value, EncodedRows) for value in data.values()):
        return {name: value.with_hidden(share, seed) for name, value in data.items()}
    rng = np.random.default_rng(seed)
    return {
        name: np.concatenate([value, np.where(rng.random(value.shape) < share, np.nan, value)])
        for name, value in data.items()
    }


def _start_at_marginals(model: Model, data: Data) -> None:
    """Set the biases of the decoders to the most likely ones of each column alone.

    Gradient steps would otherwise spend most of a short run on the rates of counts and levels.
    """
    for name in model.graph.observed:
        rule = model.graph.rule("p", name)
        factor: Any = model.factors[rule.id]
        value = data[name]
        some = value.sample() if isinstance(value, EncodedRows) else np.asarray(value, dtype=float)
        heads = _most_likely(rule.spec, some, factor.d)
        if heads is None or not isinstance(factor.net, MLP):
            continue
        bias = (factor.net.blocks if factor.net.heads is None else factor.net.heads).bias
        with torch.no_grad():
            if bias is not None and set(factor.sizes) <= set(heads):
                bias.copy_(torch.cat([heads[head].reshape(-1) for head in factor.sizes]))
            for vector in factor.vectors:
                factor.vectors[vector].copy_(heads[vector].reshape(-1))


def _most_likely(spec: Conditional, values: np.ndarray, size: int) -> dict[str, Tensor] | None:
    """The most likely parameters of a family for each column [rows, columns] alone."""
    if spec.categorical:
        values = np.where(
            np.isnan(values)[:, None], np.nan, np.eye(size)[np.nan_to_num(values).astype(int)]
        )
    count = (~np.isnan(values)).sum(0, keepdims=True).clip(1).astype(float)
    mean = np.nansum(values, 0, keepdims=True) / count
    if isinstance(spec, NegativeBinomial):
        each = [negative_binomial_likelihood(column[~np.isnan(column)])[1] for column in values.T]
        return {
            "log_mean": torch.tensor(np.log(mean)),
            "dispersion": ad.inverse_softplus(torch.tensor(each).clamp(1e-2, 1e2)),
        }
    second = np.nansum(values**2, 0, keepdims=True) / count
    some = [torch.tensor(part) for part in (count, mean, second, np.full(size, 1e-6))]
    return spec.most_likely(*some)


# Clusters at the lower limit of a scale -----------------------------------------------------------


@dataclass(frozen=True)
class AtLimit:
    """A cluster with fewer than two rows, or whose scale of some entries of x is at its limit.

    A scale is that of an entry, or of a direction of a full covariance. The cluster is ``sound`` if
    it has many rows: the limit then keeps their density finite. With few rows it fits an accident.
    """

    cluster: int
    entries: tuple[int, ...]
    sound: bool
    row: int | None = None  # the row of a cluster that holds fewer than two


def least_shares(model: Model, data: Data) -> float | Sequence[float]:
    """The smallest variance within a cluster of each entry of x, as a share of its variance.

    One number is that of all entries.
    """
    if why_not_finite(model) is not None or "x" not in data:
        return LEAST
    found = tuple(_least(np.asarray(column, dtype=float)) for column in data["x"].T)
    return LEAST if set(found) == {LEAST} else found


def _least(values: np.ndarray) -> float:
    gaps, variance = np.diff(np.unique(values[~np.isnan(values)])), _variance(values)
    if not variance:
        return LEAST
    return float(np.clip((gaps.min() / 2) ** 2 / variance, LEAST, MOST))


def _variance(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.var()) if len(known) else 0.0


def at_limit(model: Model, data: Data) -> list[AtLimit]:
    """The clusters at a limit. A model without clusters has one, 0, of all rows."""
    graph, found = model.graph, dict[int, list[int]]()
    classes = [name for name in graph.latents if graph.rule("p", name).spec.categorical]
    alone = dict[int, int]()
    rows, needed = [float(len(next(iter(data.values()))))], float(EQUAL)
    if classes == list(graph.latents) and len(classes) == 1:
        probs = model.posterior(method="exact", **data)[classes[0]].probs  # type: ignore[attr-defined]
        rows = probs.sum(0).tolist()
        alone = {k: int(probs[:, k].argmax()) for k, count in enumerate(rows) if count < 2}
        found = {k: [] for k in alone}
        if "x" in graph.observed and graph.rule("p", "x").spec.full_moments:
            needed = max(EQUAL, 2 * graph.size("x"))
    else:
        needed = math.inf
    for k, j in _held(model, data, classes).nonzero().tolist():
        found.setdefault(k, []).append(j)
    return [
        AtLimit(k, tuple(entries), rows[k if k < len(rows) else 0] >= needed, alone.get(k))
        for k, entries in sorted(found.items())
    ]


def _held(model: Model, data: Data, classes: list[str]) -> Tensor:
    """Whether the scale of each entry of x is at its limit, [clusters, entries]."""
    graph = model.graph
    rule = graph.rule("p", "x") if "x" in graph.observed else None
    if rule is None:
        return torch.zeros(0, 0)
    factor: Any = model.factors[rule.id]
    shares = torch.as_tensor(least_shares(model, data), dtype=torch.float64)
    columns = np.asarray(data["x"], dtype=float).T
    variance = torch.tensor([_variance(column) for column in columns], dtype=torch.float64)
    limit = NEAR * (shares * variance).sqrt().clamp_min(1e-12)
    with torch.no_grad():
        if "scale" in factor.vectors:
            return (F.softplus(factor.vectors["scale"]) < limit).unsqueeze(0)
        if [ref.name for ref in rule.key.parents] != classes or len(classes) != 1:
            return torch.zeros(0, 0)
        values = torch.eye(graph.size(classes[0])).to(model._parameter())
        raw = factor.rest(factor.first({classes[0]: values}))
        heads = dict(zip(factor.sizes, raw.split(list(factor.sizes.values()), -1), strict=True))
        if "tril" not in heads:
            return F.softplus(heads["scale"]) < limit
        root = ad.tril_from_vector(heads["tril"], graph.size("x")) / limit.unsqueeze(-1)
        _, scales, directions = torch.linalg.svd(root.mT)
        return ((scales < 1).unsqueeze(-1) & (directions.abs() > 0.1)).any(-2)


def _warn_of_limits(schema: Schema, model: Model, data: Data) -> None:
    graph, found = model.graph, at_limit(model, data)
    several = any(
        graph.rule("p", name).spec.categorical and graph.size(name) > 1 for name in graph.latents
    )
    collapsed, held = ([one for one in found if one.sound is sound] for sound in (False, True))
    column = (
        "leave a redundant column out ({without}), or make a column that repeats a few values one "
        "of levels ({kind})"
    )
    if collapsed:
        _warn(
            f"Collapsed: {_described(schema, collapsed, several)}. The density there is set by a "
            f"lower limit of the scale, not by the data. Take fewer clusters or factors, ",
            column,
        )
    if held:
        _warn(
            f"A scale is at its lower limit: {_described(schema, held, several)}. log p of these "
            f"rows depends on the limit, {LEAST**0.5:.0%} of the standard deviation or half the "
            f"smallest distance between cells. To avoid it, ",
            column,
        )


def _warn(text: str, column: str) -> None:
    python = column.format(without="schema.without", kind='schema.with_kind(name, "ordered")')
    warning = DataWarning(f"{text}{python}.")
    options = column.format(without="aevb train … --without NAME", kind="--kind NAME=ordered")
    warning.for_commands = f"{text}{options}."
    warnings.warn(warning, stacklevel=6)


def _described(schema: Schema, found: Sequence[AtLimit], several: bool) -> str:
    told = []
    for one in found[:3]:
        names = ", ".join(repr(schema.variables["x"][j].name) for j in one.entries[:5])
        where = f" in cluster {one.cluster}" if several else ""
        told.append(
            f"the cells of {names}{', …' * (len(one.entries) > 5)}{where} are (nearly) equal, or "
            f"follow from the other columns"
            if one.entries
            else f"cluster {one.cluster} holds fewer than two rows"
        )
    rest = len(found) - 3
    more = f"; and so on in {rest} more cluster{'s' * (rest > 1)}" if rest > 0 else ""
    return "; ".join(told) + more
