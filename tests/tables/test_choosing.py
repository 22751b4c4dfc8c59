"""The default model of a table: the prior, joining, held-out cells, and what it fills."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import multivariate_normal, nbinom
from small_tables import mixed

from aevb import Schema, load_table
from aevb.data.sources import open_source
from aevb.evidence.exact import why_not_exact
from aevb.tables import choosing
from aevb.tables.choosing import Shrunken, fit_default, fitted, held_out, joined, predictive
from aevb.training.distributed import World
from aevb.training.em.factors import Rows


def numbers(rows: int = 200, seed: int = 0) -> pd.DataFrame:
    """Two correlated columns, a third one that depends on a level, and the level."""
    rng = np.random.default_rng(seed)
    level = rng.integers(3, size=rows)
    a = rng.normal(size=rows)
    b = 0.9 * a + 0.3 * rng.normal(size=rows)
    c = 4.0 * level + rng.normal(size=rows)
    return pd.DataFrame({"a": a, "b": b, "c": c, "level": np.array(["p", "q", "r"])[level]})


def with_holes(frame: pd.DataFrame, rate: float = 0.3, seed: int = 0) -> pd.DataFrame:
    return frame.mask(np.random.default_rng(seed).random(frame.shape) < rate)


def update(model, data):
    """Two M-steps from the start."""
    method = Shrunken(model)
    method.open(Rows(open_source(model.graph, data, next(model.parameters())), World()))
    with torch.no_grad():
        point = method.from_data(method.read(), 0)
        method.write(method.update(point)[1])


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_prior_of_one_cluster_is_imaginary_rows(covariance):
    frame = numbers()[["a", "b", "c"]]
    schema = Schema.read(frame)
    data = schema.encode(frame)
    model = schema.mixture(1, covariance=covariance).fresh(0)
    update(model, data)
    n, pull, u = len(frame), Shrunken.pull, Shrunken.uncorrelated
    own = np.cov(data["x"].T, ddof=0)
    alone = np.diag(own.diagonal())
    own = own if covariance == "full" else alone
    pooled = (n * own + u * alone) / (n + u)
    expected = multivariate_normal(data["x"].mean(0), (n * own + pull * pooled) / (n + pull))
    found = model.log_evidence(**data).value.detach().numpy()
    assert np.allclose(found, expected.logpdf(data["x"]), rtol=0, atol=1e-9)


def test_a_probability_is_never_zero():
    frame = pd.DataFrame(
        {
            "v": np.r_[np.zeros(100), 9 * np.ones(100)] + np.random.default_rng(0).normal(size=200),
            "level": ["p"] * 50 + ["q"] * 50 + ["r"] * 100,
        }
    )
    schema = Schema.read(frame)
    table = fit_default(schema, frame, clusters=2, members=1)
    known = pd.DataFrame({"v": [9.0], "level": [None]})
    found = table.model.posterior(method="exact", **schema.encode(known)).marginals
    level = found.components["level"]
    share = (level.weight.unsqueeze(-1) * level.mean)[0, 0].sum(0)
    # The cluster has 100 rows, none of them p, and 1.5 imaginary ones, a quarter of them p.
    assert float(share[0]) == pytest.approx(1.5 * 50.5 / 201.5 / 101.5, rel=1e-3)


def counts(rows: int = 200, seed: int = 0) -> pd.DataFrame:
    """Over-dispersed counts of two groups, and a number that differs between them."""
    rng = np.random.default_rng(seed)
    group = rng.integers(2, size=rows)
    mean = np.array([[2.0, 9.0], [12.0, 1.0]])[group]
    found = rng.poisson(rng.gamma(1.5, mean / 1.5))
    return pd.DataFrame({"m": found[:, 0], "n": found[:, 1], "v": group + rng.normal(size=rows)})


def test_the_prior_of_over_dispersed_counts_is_a_row_at_the_mean_and_leaves_the_dispersion():
    frame = with_holes(counts()[["m", "n"]], 0.1)
    schema = Schema.read(frame)
    data = schema.encode(frame)
    model = schema.mixture(1).fresh(0)
    update(model, data)
    expected = np.zeros(len(frame))
    for column in data["overdispersed"].T:
        known = ~np.isnan(column)
        value, n = column[known], known.sum()
        mean = (value.sum() + (value.sum() + 0.5) / (n + 1)) / (n + 1)

        def log_p(log_r, value=value, mean=mean):
            r = np.exp(log_r)
            return nbinom.logpmf(value, r, r / (r + mean))

        best = minimize_scalar(
            lambda log_r, log_p=log_p: -log_p(log_r).sum(), bracket=(-1, 1), tol=1e-12
        )
        expected[known] += log_p(best.x)
    found = model.log_evidence(**data).value.detach().numpy()
    assert np.allclose(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("table", [numbers, counts])
def test_the_density_of_joined_fits_is_the_mean_of_their_densities(table):
    """Also if each fit has its own dispersion of over-dispersed counts."""
    frame = with_holes(table())
    schema = Schema.read(frame)
    data = schema.encode(frame)
    fits = [fitted(schema.specs, data, k, seed=k) for k in (1, 2, 4)]
    whole = joined(fits).log_evidence(**data).value
    parts = torch.stack([fit.log_evidence(**data).value for fit in fits])
    assert torch.allclose(whole, parts.logsumexp(0) - np.log(3), rtol=0, atol=1e-10)


def test_held_out_cells_are_known_ones_and_leave_each_row_some():
    frame = with_holes(numbers(), 0.1)
    data = Schema.read(frame).encode(frame)
    kept = held_out(data, np.random.default_rng(0))
    assert list(kept) == list(data)
    hidden = 0
    for name in data:
        same = kept[name] == data[name]
        assert np.array_equal(np.isnan(kept[name]), ~same)
        hidden += int((np.isnan(kept[name]) & ~np.isnan(data[name])).sum())
    # One of four columns in each group of rows.
    assert hidden / frame.notna().to_numpy().sum() == pytest.approx(0.25, abs=0.03)


def test_the_evidence_of_held_out_cells_is_a_difference_of_evidences():
    frame = numbers()
    schema = Schema.read(frame)
    data = schema.encode(frame)
    kept = {name: value.copy() for name, value in data.items()}
    kept["x"][:, 1] = np.nan
    model = fitted(schema.specs, data, 1)
    x = data["x"]
    mean = model.posterior(method="exact", **kept).marginals.components["x"]
    m, v = (part[:, 0, 0, 1].detach().numpy() for part in (mean.mean, mean.variance))
    expected = -0.5 * ((x[:, 1] - m) ** 2 / v + np.log(2 * np.pi * v))
    assert predictive(model, data, kept) == pytest.approx(expected.mean(), abs=1e-9)


def test_filled_cells_are_better_than_column_means_and_the_posterior_is_exact():
    truth = numbers(300)
    frame = with_holes(truth)
    table = fit_default(Schema.read(frame), frame)
    assert why_not_exact(table.model) is None
    assert table.model.graph.size("part") == choosing.MEMBERS * sum(choosing.FIRST)
    filled = table.impute(frame)
    gone = frame["b"].isna() & frame["a"].notna()
    error = np.sqrt(((filled["b"] - truth["b"])[gone] ** 2).mean())
    assert error < 0.4  # the noise of b given a is 0.3, its standard deviation 0.95
    gone = frame["level"].isna() & frame["c"].notna()
    assert (filled["level"] == truth["level"])[gone].mean() > 0.9


def test_it_fits_every_kind_of_column():
    frame = mixed()
    table = fit_default(Schema.read(frame), frame, clusters=3, members=2)
    assert np.isfinite(table.score(frame)["log_p"]).all()
    assert "NegativeBinomial" in [column.likelihood for column in table.schema.used]


def test_over_dispersed_counts_stay_counts_in_files_and_draws(tmp_path):
    frame = with_holes(counts(), 0.2)
    table = fit_default(Schema.read(frame), frame, clusters=3, members=2)
    likelihoods = [column.likelihood for column in table.schema.used]
    assert likelihoods == ["NegativeBinomial", "NegativeBinomial", "Normal"]
    drawn = table.sample(500, seed=0)[["m", "n"]].to_numpy(dtype=float)
    assert (drawn >= 0).all()
    assert np.array_equal(drawn, np.rint(drawn))
    table.save(tmp_path / "table")
    again = load_table(tmp_path / "table")
    assert again.score(frame)["log_p"].equals(table.score(frame)["log_p"])
    assert again.impute(frame).equals(table.impute(frame))


def test_the_seed_decides():
    frame = with_holes(numbers(100))
    schema = Schema.read(frame)
    first, again, other = (
        fit_default(schema, frame, seed=seed).score(frame)["log_p"] for seed in (1, 1, 2)
    )
    assert first.equals(again)
    assert not first.equals(other)


def test_few_rows_take_few_clusters_and_many_rows_a_sample(monkeypatch):
    few = numbers(30)
    assert fit_default(Schema.read(few), few).model.graph.size("part") == 1
    monkeypatch.setattr(choosing, "MOST_ROWS", 100)
    many = numbers(500)
    table = fit_default(Schema.read(many), many)
    assert table.model.graph.size("part") == choosing.MEMBERS * (3 + 5)
    assert len(table.score(many)) == 500


def test_a_table_without_real_columns_and_one_of_one_column():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"u": rng.choice(["a", "b", "c"], 300), "v": rng.choice(["d", "e"], 300)})
    assert np.isfinite(fit_default(Schema.read(frame), frame).score(frame)["log_p"]).all()
    frame = pd.DataFrame({"v": rng.normal(size=300)})
    assert np.isfinite(fit_default(Schema.read(frame), frame).score(frame)["log_p"]).all()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"clusters": 0}, "clusters is a positive whole number, got 0"),
        ({"members": 0}, "members is a positive whole number, got 0"),
        ({"clusters": 101}, "100 rows, fewer than the 101 clusters"),
    ],
)
def test_bad_sizes_are_refused(wrong, match):
    frame = numbers(100)
    with pytest.raises(ValueError, match=match):
        fit_default(Schema.read(frame), frame, **wrong)


@pytest.mark.parametrize(
    ("rows", "columns"), [pytest.param(200, 60, marks=pytest.mark.slow), (150, 45)]
)
def test_wide_tables_with_missing_cells(rows, columns):
    """Random initial covariances of so many columns would be singular in float64."""
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(rows, 5)) @ rng.normal(size=(5, columns))
    values = factors + 0.5 * rng.normal(size=(rows, columns))
    hidden = rng.random(values.shape) < 0.1
    frame = pd.DataFrame(np.where(hidden, np.nan, values)).rename(columns=str)
    schema = Schema.read(frame)
    filled = fit_default(schema, frame).impute(frame).to_numpy()
    error = np.sqrt((((filled - values) / values.std(0))[hidden] ** 2).mean())
    assert error < 0.5
    start = schema.fit(schema.mixture(1, covariance="full"), frame)
    assert np.isfinite(start.score(frame)["log_p"]).all()


def test_a_sample_has_known_cells_of_every_column(monkeypatch):
    """Of 400 rows, 30 know a count. A sample of 100 rows alone would hold about 8 of them."""
    monkeypatch.setattr(choosing, "MOST_ROWS", 100)
    rng = np.random.default_rng(0)
    count = np.full(400, np.nan)
    count[rng.choice(400, 30, replace=False)] = rng.poisson(17, 30)
    data = {"x": rng.normal(size=(400, 2)), "counts": count[:, None]}
    chosen = choosing._sampled(data, 100, rng)
    assert np.isfinite(count[chosen]).sum() == 25
    assert 100 <= len(chosen) <= 125


def test_wide_tables_with_missing_cells_take_fewer_rows():
    x = np.zeros((10, 30))
    assert choosing.most_rows({"x": x}) == choosing.MOST_ROWS
    x[0, 0] = np.nan
    assert choosing.most_rows({"x": x}) == int(1e9 // (8 * 30**3))
    wide = np.full((10, 100), np.nan)
    assert choosing.most_rows({"x": wide}) == choosing.FEW_ROWS


def test_a_fit_whose_cluster_holds_two_groups_is_left_out():
    random = np.random.default_rng(0)
    group = random.integers(0, 3, 600)
    frame = {
        "group": np.array(["a", "b", "c"])[group],
        "u": 100.0 * group + random.normal(size=600),
        "v": random.normal(size=600),
    }
    density = fit_default(Schema.read(frame), frame, seed=0)
    assert density.model.graph.size("part") == 3 * (3 + 5 + 8) - 3
    drawn = density.sample(4000, seed=0)
    of_a = np.asarray(drawn["group"]) == "a"
    assert (np.asarray(drawn["u"], dtype=float)[of_a] > 50).mean() < 0.02
