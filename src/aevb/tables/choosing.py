"""The default model of a table: a mixture, chosen by held-out evidence and protected from overfit.

The model is a mixture with a full covariance of the real and positive columns
(``schema.mixture(k, covariance="full")``). It is fitted in three steps:

1. The number of clusters is the one with the highest evidence of held-out cells given the other
   cells of their rows.
2. EM with a prior (:class:`Shrunken`): every cluster is pulled towards the whole table, so that
   clusters of few rows have sound covariances and no probability is 0.
3. Several such fits, from different starts, are joined into one mixture. Its density is the mean of
   their densities, which predicts better than each of them.

The result is an ordinary :class:`~aevb.tables.fitted.TableModel` with an exact posterior.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.sources import open_source
from aevb.declare.families import OneHot
from aevb.declare.graph import Entry
from aevb.model import Model
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
ROUNDS = 60  # of EM at most
TOLERANCE = 1e-3  # nats per row: EM ends when a round gains less
MOST_ROWS = 10_000  # rows that are fitted; a larger table is sampled
MOST_WORK = 2e9  # rows · clusters · columns³ of a full covariance; beyond it, covariances are diagonal
SHARE, GROUPS = 0.2, 10  # of the columns that are held out, and of rows that hold out the same ones


class Shrunken(Mixtures):
    """EM for the posterior mode of a mixture: each cluster is pulled towards the whole table.

    The M-step adds imaginary rows to every cluster: ``pull`` rows with the covariance that is
    pooled over all clusters, half a row at the mean of the table, and one row (for a category, half
    a row per level) with the table's frequencies and rates. The pooled covariance has itself
    ``uncorrelated`` imaginary rows without correlations.
    """

    pull = 20.0
    uncorrelated = 3.0
    least = 1e-4

    def _centres(self, seed: int) -> dict[str, Tensor]:
        """Start at random rows. Different starts make the fits that are joined differ."""
        batch = next(iter(self.rows.parts()))
        rows, some, _ = self._standard(batch, self.latent)
        generator = torch.Generator().manual_seed(seed_of(seed, "clusters"))
        order = torch.randperm(int(some.sum()), generator=generator)
        return {self.latent: rows[some][order[: self.graph.size(self.latent)]]}

    def most_likely(
        self, entry: Entry, count: Tensor, first: Tensor, second: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not entry.key.parents:  # the cluster: one row each
            return super().most_likely(entry, count + count.shape[-1], first + 1, second + 1)
        total = count.sum(0)
        if not entry.spec.gaussian:
            levels = isinstance(entry.spec, OneHot)
            rows = 0.5 * count.shape[-1] if levels else 1.0
            whole = (first.sum(0) + 0.5) / (total + rows + 0.5 * (not levels))
            return super().most_likely(entry, count + rows, first + rows * whole, second)
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
    members: int = MEMBERS,
    seed: int = 0,
) -> TableModel:
    """Fit the default model of a table, for filling cells, scoring and sampling.

    ``clusters`` per fit is chosen by held-out evidence if it is None. The model has ``clusters`` ·
    ``members`` clusters. Over-dispersed counts are modelled as positive numbers, or as real ones if
    there are zeros, so that the model stays exact. A table of more than ``MOST_ROWS`` rows is
    fitted on a random sample of them.
    """
    for what, value in (("clusters", clusters), ("members", members)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ValueError(f"{what} is a positive whole number, got {value!r}.")
    schema = _without_dispersion(schema)
    data: Mapping[str, Any] = schema.encode(read_table(frame))
    n = len(next(iter(data.values())))
    rng = np.random.default_rng([seed, 20])
    if n > MOST_ROWS:
        some = np.sort(rng.choice(n, MOST_ROWS, replace=False))
        data = {name: value[some] for name, value in data.items()}
    sizes = _chosen(schema, data, seed, rng) if clusters is None else [clusters]
    fits = [
        fitted(schema, data, k, seed=seed + j) for k in sizes for j in range(members if k > 1 else 1)
    ]
    return TableModel(schema, joined(schema, fits))


def _without_dispersion(schema: Schema) -> Schema:
    for column in schema.used:
        if column.likelihood == "NegativeBinomial":
            kind = "real" if column.facts.log_mean is None else "positive"
            schema = schema.with_kind(column.name, kind)
    return schema


def fitted(schema: Schema, data: Mapping[str, Any], clusters: int, *, seed: int) -> Model:
    """Fit one mixture to encoded rows by EM with a prior."""
    model = schema.mixture(clusters, covariance=_covariance(schema, data, clusters))
    method = Shrunken(model)
    source = open_source(model.graph, data, next(model.parameters()))
    method.open(Rows(source, World()))
    point, before = method.from_data(method.read(), seed), -float("inf")
    for _ in range(ROUNDS):
        evidence, after = method.update(point)
        if abs(float(evidence) - before) < TOLERANCE:
            break
        point, before = after, float(evidence)
    method.write(point)
    return model


def _covariance(schema: Schema, data: Mapping[str, Any], clusters: int) -> str:
    if "x" not in schema.variables:
        return "diagonal"
    rows, columns = data["x"].shape
    return "full" if rows * clusters * columns**3 <= MOST_WORK else "diagonal"


def joined(schema: Schema, fits: list[Model]) -> Model:
    """Join mixtures into one, whose density is the mean of their densities."""
    if len(fits) == 1:
        return fits[0]
    first = fits[0]
    covariance = "full" if first.graph.rule("p", "x").spec.full_moments else "diagonal"
    model = schema.mixture(
        sum(fit.graph.size("cluster") for fit in fits), covariance=covariance
    )
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        parts = [fit.state_dict()[name] for fit in fits]
        state[name] = torch.cat(parts, -1) if value.shape != parts[0].shape else parts[0]
    model.load_state_dict(state)
    return model


# The number of clusters ---------------------------------------------------------------------------


def _chosen(
    schema: Schema, data: Mapping[str, Any], seed: int, rng: np.random.Generator
) -> list[int]:
    """Three neighbouring numbers of clusters: the first ones, or larger ones if they are better.

    Larger ones are better if the joined fits have a higher evidence of held-out cells.
    """
    most = len(next(iter(data.values()))) // LEAST_ROWS
    first = [k for k in FIRST if k <= most] or [1]
    more = [k for k in MORE if k <= most]
    if not more:
        return first
    kept = held_out(data, rng)
    sizes, fits = first, [fitted(schema, kept, k, seed=seed) for k in first]
    best = predictive(joined(schema, fits), data, kept)
    for k in more:
        fits = [*fits[1:], fitted(schema, kept, k, seed=seed)]
        score = predictive(joined(schema, fits), data, kept)
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
    # Every group hides some columns and keeps some, where there is more than one.
    count = min(max(1, round(SHARE * columns)), max(columns - 1, 1))
    order = np.concatenate(
        [rng.permutation(columns) for _ in range(GROUPS * count // columns + 1)]
    )
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
