"""The default density of a table: mixtures with a prior, joined into one.

The model is a mixture with a full covariance of the real and positive columns
(``schema.mixture(k, covariance="full")``). Three things keep it from overfitting small tables:

1. EM with a prior (:class:`Shrunken`) pulls every cluster towards the whole table, so that clusters
   of few rows have sound covariances and no probability is 0.
2. Fits with different numbers of clusters, from different starts, are joined into one mixture. Its
   density is the mean of their densities, which predicts better than each of them.
3. Larger numbers of clusters are used only if they give held-out cells a higher evidence.

The result is an ordinary :class:`~aevb.tables.fitted.TableModel` with an exact posterior. Its class
is called ``part``, because the parts of a density are no clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.large_tables import in_memory
from aevb.data.sources import open_source
from aevb.declare.conditionals import Conditional
from aevb.declare.families import OneHot
from aevb.declare.graph import Entry
from aevb.model import Model
from aevb.tables.declarations import PART, Specs, mixture
from aevb.tables.fitted import TableModel
from aevb.tables.frames import read_table
from aevb.tables.schema import Schema
from aevb.training.distributed import World
from aevb.training.em.factors import Rows
from aevb.training.em.mixtures import Mixtures
from aevb.training.row_order import seed_of

FIRST, MORE = (3, 5, 8), (12, 18, 27, 40)  # numbers of clusters
LEAST_ROWS = 20  # per cluster
MEMBERS = 3  # fits of each number of clusters
ROUNDS = 40  # of EM at most
TOLERANCE = 1e-3  # nats per row and entry: EM ends when a round gains less
WORSE = 0.2  # nats per row and entry that a fit may lie below the best one of its size
MOST_ROWS = 10_000  # rows that are fitted; a larger table is sampled
KNOWN = 200  # known cells of every column in such a sample, if the table has as many
# Rows · clusters · columns³ of x with missing cells, where most rows have covariances of their own,
# and the number of rows that are fitted in spite of it.
HOLED_WORK, FEW_ROWS = 1e9, 2000
# Rows · clusters · columns³ of x, the work of a round of EM with a full covariance. Beyond the
# first number a fit is not repeated, beyond the second the covariance is diagonal.
HEAVY, TOO_HEAVY = 1e8, 5e9
SHARE, GROUPS = 0.2, 10  # of the columns that are held out, and of rows that hold out the same ones


class Shrunken(Mixtures):
    """EM for the posterior mode of a mixture: each cluster is pulled towards the whole table.

    The M-step adds imaginary rows to every cluster: ``pull`` rows with the covariance that is
    pooled over all clusters, half a row at the mean of the table, and one row (for a category, half
    a row per level) with the table's frequencies and rates. The pooled covariance has itself
    ``uncorrelated`` imaginary rows without correlations. The dispersion of over-dispersed counts,
    which all clusters share, has no prior.
    """

    pull = 20.0
    uncorrelated = 3.0
    least = 1e-4

    def _centres(self, seed: int) -> dict[str, Tensor]:
        """Start at random rows. Different starts make the fits that are joined differ."""
        parts = [self._standard(batch, self.latent)[:2] for batch in self.rows.parts()]
        rows = torch.cat([rows[some] for rows, some in parts])
        generator = torch.Generator().manual_seed(seed_of(seed, "clusters"))
        order = torch.randperm(len(rows), generator=generator)
        return {self.latent: rows[order[: self.graph.size(self.latent)]]}

    def most_likely(
        self, entry: Entry, count: Tensor, first: Tensor, second: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not entry.key.parents:  # the cluster: one row each
            return super().most_likely(entry, count + count.shape[-1], first + 1, second + 1)
        total = count.sum(0)
        if not entry.spec.gaussian:
            rows = 0.5 * count.shape[-1] if isinstance(entry.spec, OneHot) else 1.0
            whole = (first.sum(0) + 0.5) / (total + rows)
            found, seen = super().most_likely(entry, count + rows, first + rows * whole, second)
            if entry.spec.needs_occurrences:  # of the table alone: a dispersion has no prior
                mean, values = first / count.clamp_min(1e-9), self.occurrences[entry.id]
                found |= entry.spec.most_likely_vectors(count, mean, found, values)
            return found, seen
        whole = first.sum(0) / total.clamp_min(1e-9)
        mean = (first + 0.5 * whole) / (count + 0.5)
        if entry.spec.full_moments:
            cross = mean.unsqueeze(-1) * first.unsqueeze(-2)
            square = mean.unsqueeze(-1) * mean.unsqueeze(-2)
            weight = count[:, :1, None]
            squares = second - cross - cross.mT + weight * square
            pooled = squares.sum(0)
            pooled = pooled + self.uncorrelated * torch.diag(pooled.diagonal() / weight.sum())
        else:
            square, weight = mean.square(), count
            squares = second - 2 * mean * first + weight * square
            pooled = squares.sum(0) * (1 + self.uncorrelated / weight.sum(0).clamp_min(1e-9))
        pooled = pooled / (weight.sum(0) + self.uncorrelated)
        spread = (squares + self.pull * pooled) / (weight + self.pull)
        return super().most_likely(entry, torch.ones_like(count), mean, spread + square)


def fit_default(
    schema: Schema,
    frame: Any,
    *,
    clusters: int | None = None,
    members: int | None = None,
    seed: int = 0,
) -> TableModel:
    """Fit the default model of a table, for filling cells, scoring and sampling.

    The model joins ``members`` fits of each number of clusters (3 by default, 1 for a large table
    with many real columns). ``clusters`` is that number; by default, there are three: 3, 5 and 8,
    or more if held-out cells ask for more, or fewer if the table has few rows.

    A table of more than ``MOST_ROWS`` rows, or fewer if it is wide and has missing cells, is fitted
    to a random sample of them, and to more rows with known cells of columns that the sample lacks.
    """
    for what, value in (("clusters", clusters), ("members", members)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ValueError(f"{what} is a positive whole number, got {value!r}.")
    data = schema.encode(read_table(in_memory(frame)))
    model = fit_density(schema.specs, data, clusters=clusters, members=members, seed=seed)
    return TableModel(schema, model)


def fit_density(
    specs: Specs,
    data: Mapping[str, Any],
    *,
    clusters: int | None = None,
    members: int | None = None,
    seed: int = 0,
) -> Model:
    """Fit the default density to encoded rows; see :func:`fit_default`."""
    n = len(next(iter(data.values())))
    if clusters is not None and clusters > n:
        raise ValueError(f"The table has {n} rows, fewer than the {clusters} clusters.")
    rng = np.random.default_rng(seed)
    if n > (most := most_rows(data)):
        some = _sampled(data, most, rng)
        data = {name: value[some] for name, value in data.items()}
    sizes = _chosen(specs, data, seed, rng) if clusters is None else [clusters]
    if members is None:
        light = _work(data, max(sizes)) <= HEAVY or _covariance(data) == "diagonal"
        members = MEMBERS if light else 1
    one = fitted(specs, data, 1)
    fits = [
        fitted(specs, data, k, seed=seed + j, start=one) if k > 1 else one
        for k in sizes
        for j in range(members if k > 1 else 1)
    ]
    return joined(_sound(fits, data))


def _entries(model: Model) -> int:
    return sum(model.graph.size(name) for name in model.graph.observed)


def _sound(fits: list[Model], data: Mapping[str, Any]) -> list[Model]:
    """Leave out fits far below another one of their size: two groups of rows share a cluster."""
    sizes = [fit.graph.size(PART) for fit in fits]
    if len(set(sizes)) == len(fits):
        return fits
    found = [float(fit.log_evidence(**data).value.mean()) for fit in fits]
    best = {size: max(e for e, k in zip(found, sizes, strict=True) if k == size) for size in sizes}
    return [
        fit
        for fit, size, evidence in zip(fits, sizes, found, strict=True)
        if evidence > best[size] - WORSE * _entries(fit)
    ]


def most_rows(data: Mapping[str, Any]) -> int:
    """The number of rows that are fitted. With missing cells, wide tables take long."""
    holes = "x" in data and bool(np.isnan(data["x"]).any())
    if not holes:
        return MOST_ROWS
    return int(np.clip(HOLED_WORK // (max(FIRST) * data["x"].shape[1] ** 3), FEW_ROWS, MOST_ROWS))


def _sampled(data: Mapping[str, Any], most: int, rng: np.random.Generator) -> np.ndarray:
    """Random rows, in their order, and more rows with known cells of columns that lack them."""
    n = len(next(iter(data.values())))
    chosen = np.zeros(n, dtype=bool)
    chosen[rng.choice(n, most, replace=False)] = True
    for value in data.values():
        for column in value.reshape(n, -1).T:
            known = ~np.isnan(column)
            lacking = min(KNOWN, most // 4) - int((known & chosen).sum())
            more = np.flatnonzero(known & ~chosen) if lacking > 0 else ()
            if len(more):
                chosen[rng.choice(more, min(lacking, len(more)), replace=False)] = True
    return np.flatnonzero(chosen)


def fitted(
    specs: Specs,
    data: Mapping[str, Any],
    clusters: int,
    *,
    seed: int = 0,
    start: Model | None = None,
) -> Model:
    """Fit one mixture to encoded rows by EM with a prior.

    ``start`` is a fit with one cluster. Its covariance fills the missing cells of the first round,
    which saves many rounds.
    """
    covariance = _covariance(data)
    model = mixture(specs, clusters, covariance=covariance, latent=PART).fresh(seed)
    if start is not None:
        old = start.state_dict()
        model.load_state_dict({n: old[n].expand_as(v) for n, v in model.state_dict().items()})
    method = Shrunken(model)
    method.fills_by_own = start is not None
    method.open(Rows(open_source(model.graph, data, next(model.parameters())), World()))
    point, before = method.from_data(method.read(), seed), -float("inf")
    enough = TOLERANCE * _entries(model)
    for _ in range(ROUNDS):
        evidence, after = method.update(point)
        if abs(float(evidence) - before) < enough:
            break
        point, before = after, float(evidence)
    method.write(point)
    return model


def _work(data: Mapping[str, Any], clusters: int) -> float:
    """The work of a round of EM with a full covariance of x."""
    rows, columns = data["x"].shape if "x" in data else (0, 0)
    return float(rows) * clusters * columns**3


def _covariance(data: Mapping[str, Any]) -> str:
    return "full" if 0 < _work(data, max(FIRST)) <= TOO_HEAVY else "diagonal"


def joined(fits: list[Model]) -> Model:
    """Join mixtures into one, whose density is the mean of their densities.

    Each fit has one dispersion of over-dispersed counts for all its parts. In the joined mixture,
    each part has a dispersion of its own.
    """
    if len(fits) == 1:
        return fits[0]
    sizes = [fit.graph.size(PART) for fit in fits]
    p, q = dict[str, Conditional](), dict[str, Conditional]()
    for entry in fits[0].graph.entries():
        if entry.side == "p":
            p[str(entry.key)] = entry.spec.unshared()
        else:
            q[str(entry.key)] = entry.spec
    p[PART] = OneHot(sum(sizes), learned=True)
    method, each = Mixtures(Model(p, q).double()), [Mixtures(fit).get() for fit in fits]
    found: dict[str, dict[str, Tensor]] = {}
    for entry in method.entries:
        heads = [one[entry.id] for one in each]
        if entry.key.parents:
            found[entry.id] = {
                name: torch.cat(
                    [one[name].expand(size, -1) for one, size in zip(heads, sizes, strict=True)]
                )
                for name in heads[0]
            }
        else:  # every fit has the same total probability
            logits = [one["logits"].log_softmax(-1) for one in heads]
            found[entry.id] = {"logits": torch.cat(logits, -1)}
    method.put(found)
    return method.model


# The number of clusters ---------------------------------------------------------------------------


def _chosen(
    specs: Specs, data: Mapping[str, Any], seed: int, rng: np.random.Generator
) -> list[int]:
    """Three neighbouring numbers of clusters: the first ones, or larger ones if they are better.

    Larger ones are better if the joined fits have a higher evidence of held-out cells.
    """
    most = len(next(iter(data.values()))) // LEAST_ROWS
    first = [k for k in FIRST if k <= most] or [1]
    full = _covariance(data) == "full"
    more = [k for k in MORE if k <= most and not (full and _work(data, k) > HEAVY)]
    if not more or (len(data) == 1 and next(iter(data.values())).shape[1:] in ((), (1,))):
        return first
    kept = held_out(data, rng)
    one = fitted(specs, kept, 1)
    sizes, fits = first, [fitted(specs, kept, k, seed=seed, start=one) for k in first]
    best = predictive(joined(fits), data, kept)
    for k in more:
        fits = [*fits[1:], fitted(specs, kept, k, seed=seed, start=one)]
        score = predictive(joined(fits), data, kept)
        if score <= best:
            break
        sizes, best = [*sizes[1:], k], score
    return sizes


def held_out(data: Mapping[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Hide a share of the columns from each of several groups of rows.

    Rows of a group hide the same columns, so that there are few patterns of missing cells.
    """
    sizes = {name: 1 if value.ndim == 1 else value.shape[1] for name, value in data.items()}
    rows, columns = len(next(iter(data.values()))), sum(sizes.values())
    group = rng.permutation(rows) % GROUPS
    count = max(1, round(SHARE * columns))
    order = np.concatenate([rng.permutation(columns) for _ in range(GROUPS * count // columns + 1)])
    hidden = np.zeros((rows, columns), dtype=bool)
    for g in range(GROUPS):
        hidden[np.ix_(group == g, order[g * count : (g + 1) * count])] = True
    found, start = {}, 0
    for name, value in data.items():
        mask = hidden[:, start : start + sizes[name]]
        found[name] = np.where(mask[:, 0] if value.ndim == 1 else mask, np.nan, value)
        start += sizes[name]
    return found


def predictive(model: Model, data: Mapping[str, Any], kept: Mapping[str, Any]) -> float:
    """The mean of log p(hidden cells | kept cells) over rows."""
    whole, part = (model.log_evidence(**rows).value for rows in (data, kept))
    return float((whole - part).mean())
