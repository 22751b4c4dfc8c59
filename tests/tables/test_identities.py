"""Exact identities of log p: a sum over factors, units, and missing cells, in float64."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats
from small_tables import mixed

from aevb import Schema, em


def softplus(x):
    return np.logaddexp(0, x)


def heads(model, name):
    """The raw parameters of p(name | cluster) and their sizes, read from the weights."""
    factor = model.factors[f"p({name}|cluster)"]
    weight = factor.net.blocks.weights["cluster"].detach().numpy().T
    raw = weight + (
        0 if factor.net.blocks.bias is None else factor.net.blocks.bias.detach().numpy()
    )
    cuts = np.cumsum(list(factor.sizes.values()))[:-1]
    found = dict(zip(factor.sizes, np.split(raw, cuts, axis=1), strict=True))
    return found | {key: value.detach().numpy() for key, value in factor.vectors.items()}


def days(cell):
    return (cell - pd.Timestamp(1970, 1, 1)) / pd.Timedelta(days=1)


def by_hand(schema, model, table, full=False):
    """log p of every row: log Σ_k π_k Π_cells p(cell | k), cell by cell, of original columns."""
    prior = special.log_softmax(model.factors["p(cluster)"].root.detach().numpy())
    result = []
    for _, row in table.iterrows():
        log_p = prior.copy()
        known_x, standard = [], []
        for j, column in enumerate(schema.variables["x"]):
            cell = row[column.name]
            if pd.isna(cell):
                continue
            v = days(cell) if column.kind == "date" else float(cell)
            if column.kind == "positive":
                log_p = log_p - np.log(v)
                v = np.log(v)
            known_x.append(j)
            standard.append((v - column.location) / column.scale)
            log_p = log_p - np.log(column.scale)
        raw = heads(model, "x")
        for k in range(len(log_p)):
            mean = raw["loc"][k, known_x]
            if full:
                d = len(schema.variables["x"])
                root = np.zeros((d, d))
                root[np.tril_indices(d)] = raw["tril"][k]
                root[np.diag_indices(d)] = softplus(np.diag(root))
                covariance = (root @ root.T)[np.ix_(known_x, known_x)]
                if known_x:
                    log_p[k] += stats.multivariate_normal.logpdf(standard, mean, covariance)
            else:
                log_p[k] += stats.norm.logpdf(
                    standard, mean, softplus(raw["scale"][k, known_x])
                ).sum()
        for variable, columns in schema.variables.items():
            if variable == "x":
                continue
            raw = heads(model, variable)
            for j, column in enumerate(columns):
                cell = row[column.name]
                if pd.isna(cell):
                    continue
                if variable == "counts":
                    log_p = log_p + stats.poisson.logpmf(int(cell), np.exp(raw["log_rate"][:, j]))
                elif variable == "overdispersed":
                    r, mean = softplus(raw["dispersion"][j]), np.exp(raw["log_mean"][:, j])
                    log_p = log_p + stats.nbinom.logpmf(int(cell), r, r / (r + mean))
                elif variable == "flags":
                    one = special.log_expit(raw["logits"][:, j])
                    zero = special.log_expit(-raw["logits"][:, j])
                    log_p = log_p + (one if cell == column.levels[1] else zero)
                else:
                    shares = special.log_softmax(raw["logits"], axis=1)
                    log_p = log_p + shares[:, column.levels.index(cell)]
        result.append(special.logsumexp(log_p))
    return np.array(result)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("missing", [0.0, 0.15])
def test_log_p_is_the_sum_over_factors_written_out(covariance, missing):
    table = mixed(missing=missing)
    schema = Schema.read(table)
    assert {column.kind for column in schema.columns} == {
        "real", "positive", "date", "count", "binary", "category", "ordered"
    }  # fmt: skip
    assert {"counts", "overdispersed"} <= set(schema.variables)
    fitted = schema.fit(schema.mixture(3, covariance=covariance), table, starts=2)
    score = fitted.score(table)
    expected = by_hand(schema, fitted.model, table, full=covariance == "full")
    assert list(score.columns) == ["log_p"]
    np.testing.assert_allclose(score["log_p"], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["height", "income"])
def test_another_unit_changes_log_p_by_exactly_the_jacobian(kind):
    table = mixed()
    schema = Schema.read(table)
    fitted = schema.fit(schema.mixture(3), table, starts=2)
    factor, offset = (-2.54, 17.0) if kind == "height" else (1000.0, 0.0)
    other = table.assign(**{kind: factor * table[kind] + offset})
    again = type(fitted)(schema.rescaled(kind, factor, offset), fitted.model)
    known = table[kind].notna().to_numpy()
    np.testing.assert_allclose(
        again.score(other)["log_p"],
        fitted.score(table)["log_p"] - np.log(abs(factor)) * known,
        rtol=0,
        atol=1e-9,
    )


def test_a_fit_in_other_units_finds_the_same_model():
    table = mixed().drop(columns="clicks")  # EM alone, without a search
    other = table.assign(height=table["height"] / 2.54 + 3, income=table["income"] * 1000)
    scores = []
    for frame in (table, other):
        schema = Schema.read(frame)
        settings = {"schedule": em(start="data", tol=0), "steps": 200}
        fitted = schema.fit(schema.mixture(3), frame, **settings)
        scores.append(fitted.score(frame)["log_p"].to_numpy())
    jacobian = np.log(2.54) * table["height"].notna() - np.log(1000) * table["income"].notna()
    np.testing.assert_allclose(scores[1], scores[0] + jacobian, rtol=0, atol=1e-6)


def test_missing_cells_are_marginalised_out_also_of_categories():
    """The probabilities of all levels of a cell add up to that of the row without it."""
    table = mixed(60)
    schema = Schema.read(mixed())
    fitted = schema.fit(schema.mixture(3), mixed(), starts=1)
    for name in ("colour", "size", "side", "member"):
        without = fitted.score(table.assign(**{name: pd.array([None] * 60, table[name].dtype)}))
        each = [
            fitted.score(table.assign(**{name: pd.array([level] * 60, table[name].dtype)}))["log_p"]
            for level in schema[name].levels
        ]
        np.testing.assert_allclose(
            special.logsumexp(each, axis=0), without["log_p"], rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("name", ["height", "income"])
def test_the_density_of_one_column_integrates_to_one(name):
    schema = Schema.read(mixed())
    fitted = schema.fit(schema.mixture(3), mixed(), starts=1)
    grid = np.linspace(100, 260, 4001) if name == "height" else np.exp(np.linspace(2, 14, 40_001))
    empty = {column: [None] * len(grid) for column in schema.names}
    density = np.exp(fitted.score(empty | {name: grid})["log_p"])
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-6)


def test_a_row_without_cells_has_log_p_zero():
    schema = Schema.read(mixed())
    fitted = schema.fit(schema.mixture(3), mixed(), starts=1)
    score = fitted.score({column: [None, None] for column in schema.names})
    np.testing.assert_allclose(score["log_p"], 0, atol=1e-12)
