"""Fitted models of tables: frames out like frames in, imputation, files and fitting."""

from __future__ import annotations

import datetime
import warnings
from functools import cache

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from small_tables import mixed

import aevb
from aevb import Schema, TableModel, joint, load_table
from aevb.evidence.exact import exact_evidence
from aevb.runtime.checked_files import DataWarning
from aevb.tables import fitting
from aevb.tables.frames import read_table

LIBRARIES = {
    "pandas": lambda table: table,
    "polars": lambda table: pl.from_pandas(table).with_columns(
        pl.col("size").cast(pl.Enum(["small", "medium", "large"]))
    ),
    "pyarrow": lambda table: pa.Table.from_pandas(table, preserve_index=False),
    "dict": lambda table: {
        name: [None if pd.isna(cell) else cell for cell in table[name]] for name in table.columns
    },
}
FRAMES = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.Table, "dict": pd.DataFrame}


@cache
def fitted(library="pandas", covariance="diagonal") -> TableModel:
    table = LIBRARIES[library](mixed())
    schema = Schema.read(table)
    return schema.fit(schema.mixture(3, covariance=covariance), table, starts=2)


def cells(frame, name) -> list:
    """The cells of a column as Python objects, None where missing."""
    column = frame[name]
    values = column.to_pylist() if isinstance(column, pa.ChunkedArray) else list(column)
    return [None if pd.isna(value) else value for value in values]


def types(frame) -> dict:
    if isinstance(frame, pa.Table):
        return {field.name: field.type for field in frame.schema}
    return dict(frame.schema) if isinstance(frame, pl.DataFrame) else frame.dtypes.to_dict()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_the_same_model(library):
    scores = [
        cells(fitted(name).score(LIBRARIES[name](mixed())), "log_p") for name in ("pandas", library)
    ]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)  # other orders of levels, other rounding


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_frames_of_the_callers_library(library):
    model, table = fitted(library), LIBRARIES[library](mixed(50, seed=3))
    scores, clusters, filled = model.score(table), model.clusters(table), model.impute(table)
    for frame in (scores, clusters, filled, model.sample(5, seed=0)):
        assert isinstance(frame, FRAMES[library])
    assert len(scores) == len(clusters) == len(filled) == 50
    names = clusters.column_names if library == "pyarrow" else list(clusters.columns)
    assert names == ["cluster", "p0", "p1", "p2"]
    shares = np.array([cells(clusters, f"p{k}") for k in range(3)])
    np.testing.assert_allclose(shares.sum(0), 1, atol=1e-12)
    assert cells(clusters, "cluster") == shares.argmax(0).tolist()


def test_pandas_frames_keep_their_index():
    table = mixed(50, seed=3)
    model = fitted()
    filled = [*model.impute(table, return_std=True), *model.impute(table, draws=2)]
    for frame in (model.score(table), model.clusters(table), model.impute(table), *filled):
        pd.testing.assert_index_equal(frame.index, table.index)


@pytest.mark.parametrize("library", LIBRARIES)
def test_imputation_keeps_known_cells_and_types(library):
    model, table = fitted(library), LIBRARIES[library](mixed(50, seed=3, missing=0.3))
    filled = model.impute(table)
    if library != "dict":
        assert types(filled) == types(table)
    for column in model.schema.columns:
        before = cells(table, column.name) if library != "dict" else table[column.name]
        after = cells(filled, column.name)
        assert None in before
        assert None not in after
        assert all(a is b or a == b for a, b in zip(after, before, strict=True) if b is not None)
        if column.listed:
            assert set(after) <= set(column.levels)
        if column.kind == "count":
            assert all(value == int(value) >= 0 for value in after)
        if column.kind == "positive":
            assert min(after) > 0


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_samples_have_names_types_and_units_of_the_table(library):
    table = LIBRARIES[library](mixed())
    drawn = fitted(library).sample(4000, seed=1)
    names = list(mixed().columns)
    assert (drawn.column_names if library == "pyarrow" else list(drawn.columns)) == names
    for name, kind in types(table).items():
        given = types(drawn)[name]
        # pandas' nullable types are for missing cells, and samples have none.
        expected = str(kind).lower().replace("boolean", "bool").replace("large_", "")
        if isinstance(kind, pa.DictionaryType):
            assert given.ordered == kind.ordered
            assert drawn[name].combine_chunks().dictionary.to_pylist() == [
                "small",
                "medium",
                "large",
            ]
        else:
            assert given == kind or (library != "polars" and str(given).lower() == expected)
    for name in ("height", "income", "visits", "clicks"):
        mine = np.array([v for v in cells(table, name) if v is not None], dtype=float)
        theirs = np.array(cells(drawn, name), dtype=float)
        # 4,000 draws against 216 cells: 6 standard errors of the difference of means.
        error = np.sqrt(mine.var() / len(mine) + theirs.var() / len(theirs))
        assert abs(mine.mean() - theirs.mean()) < 6 * error
    shares = [np.mean([cell == "left" for cell in cells(frame, "side") if cell is not None])
              for frame in (table, drawn)]  # fmt: skip
    assert abs(shares[0] - shares[1]) < 0.2


def test_whole_numbers_are_drawn_whole_and_dates_as_dates():
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(days=i * 37 % 101) for i in range(60)]
    mass = [3000 + 25 * (i * 17 % 53) for i in range(60)]
    table = pl.DataFrame({"day": days, "mass": mass})
    schema = Schema.read(table)
    drawn = schema.fit(schema.mixture(2), table, starts=1).sample(20, seed=0)
    assert drawn.schema == table.schema


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_whole_numbers_in_another_unit_are_drawn_and_filled_as_numbers(library):
    made = LIBRARIES[library] if library != "polars" else pl.from_pandas
    whole = made(pd.DataFrame({"cm": np.arange(150, 210, 2), "v": np.arange(30) % 7 / 3}))
    schema = Schema.read(whole, kinds={"cm": "real"})
    model = schema.fit(schema.mixture(1, covariance="full"), whole, starts=1)
    metres = TableModel(schema.rescaled("cm", 0.01), model.model)
    drawn = np.array(cells(metres.sample(20, seed=0), "cm"))
    assert drawn.dtype == float
    assert (drawn != np.rint(drawn)).any()
    table = made(pd.DataFrame({"cm": [1.5, None, 1.7], "v": [0.0, None, 1.0]}))
    assert cells(metres.impute(table), "cm") == [1.5, pytest.approx(1.79), 1.7]


@pytest.mark.parametrize(
    "zone",
    [None, "Europe/Berlin", "America/New_York", datetime.timezone(datetime.timedelta(hours=2))],
)
@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_times_come_back_in_their_unit_and_zone(library, zone):
    times = pd.date_range("2020-03-01", periods=60, freq="11h", tz=zone).to_series()
    near = np.random.default_rng(0).normal(1.5 * np.arange(60) - 20)
    whole = pd.DataFrame({"time": times.to_numpy() if zone is None else times.array, "v": near})
    table = whole.assign(time=whole["time"].where(np.arange(60) % 5 > 0))
    table = {"pandas": table, "polars": pl.from_pandas(table),
             "pyarrow": pa.Table.from_pandas(table)}[library]  # fmt: skip
    schema = Schema.read(table)
    assert schema["time"].kind == "date"
    model = schema.fit(schema.mixture(1, covariance="full"), table, starts=1)
    filled = model.impute(table)
    assert types(filled) == types(model.sample(5, seed=0)) == types(table)
    found = pd.Series(cells(filled, "time"))
    assert abs(found - pd.Series(whole["time"])).max() < pd.Timedelta(days=2)


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_filled_times_are_no_finer_than_their_unit(unit):
    times = pd.date_range("2020", periods=20, tz="America/New_York", unit=unit)
    table = pd.DataFrame({"time": times.where(np.arange(20) % 4 > 0)})
    table["v"] = np.random.default_rng(0).normal(size=20)
    schema = Schema.read(table)
    (filled,) = schema.fit(schema.mixture(1), table, starts=1).impute(table, draws=1)
    assert filled["time"].dtype == table["time"].dtype
    assert filled["time"].notna().all()


def test_times_with_and_without_a_zone_are_not_mixed():
    naive = pd.DataFrame({"time": pd.date_range("2020", periods=20, freq="7h")})
    naive["v"] = np.random.default_rng(0).normal(size=20)
    zoned = naive.assign(time=naive["time"].dt.tz_localize("America/New_York"))
    schema = Schema.read(zoned)
    other = naive.assign(time=zoned["time"].dt.tz_convert("Asia/Tokyo"))
    assert schema.encode(other)["x"].tolist() == schema.encode(zoned)["x"].tolist()
    for frame in (naive, naive.assign(time=naive["time"].where(naive["v"] > 99))):
        with pytest.raises(ValueError, match=r"\['time'\]\.dt\.tz_localize\('America/New_York'\)"):
            schema.encode(frame)
    with pytest.raises(ValueError, match=r"in the zone America/New_York.*tz_localize\(None\)"):
        Schema.read(naive).encode(zoned)
    mixed_times = [*naive["time"].dt.to_pydatetime(), *zoned["time"].dt.to_pydatetime()]
    with pytest.raises(ValueError, match="mixes times with and without a time zone"):
        Schema.read({"time": mixed_times})


def test_a_column_of_missing_times_is_filled_in_its_zone():
    table = pd.DataFrame({"time": pd.date_range("2020", periods=20, tz="America/New_York")})
    table["v"] = np.random.default_rng(0).normal(size=20)
    schema = Schema.read(table)
    model = schema.fit(schema.mixture(1), table, starts=1)
    filled = model.impute(table.assign(time=table["time"].where(table["v"] > 99)))
    assert filled["time"].dtype == table["time"].dtype
    mean = table["time"].mean()
    assert (abs(filled["time"] - mean) < pd.Timedelta(seconds=1)).all()


def test_a_complete_training_table_needs_hide_for_networks():
    table = mixed(120, missing=0.0)
    schema = Schema.read(table)
    model = schema.fit(schema.vae(2, hidden=(8,)), table, epochs=2)
    with pytest.raises(ValueError, match=r"hide=0\.2"):
        model.impute(mixed(20))
    model = schema.fit(schema.vae(2, hidden=(8,)), table, epochs=2, hide=0.2)
    assert not model.impute(mixed(20)).isna().any().any()
    with pytest.raises(ValueError, match="hide= is for models with networks"):
        schema.fit(schema.mixture(2), table, hide=0.2)
    with pytest.raises(ValueError, match="share of the cells"):
        schema.fit(schema.vae(2), table, hide=1)


def by_hand(model, table, name):
    """Mean and standard deviation of missing cells from clusters and heads, independently."""
    schema = model.schema
    column = schema[name]
    j = [c.name for c in schema.variables["x"]].index(name)
    weight = model.clusters(table)[["p0", "p1", "p2"]].to_numpy()
    factor = model.model.factors["p(x|cluster)"]
    raw = factor.net.blocks.weights["cluster"].detach().numpy().T
    bias = factor.net.blocks.bias
    raw = raw if bias is None else raw + bias.detach().numpy()
    d = len(schema.variables["x"])
    loc = raw[:, j] * column.scale + column.location
    sd = np.logaddexp(0, raw[:, d + j]) * column.scale
    if column.kind == "positive":
        loc, sd = np.exp(loc + sd**2 / 2), np.sqrt(np.expm1(sd**2)) * np.exp(loc + sd**2 / 2)
    mean = weight @ loc
    return mean, np.sqrt(weight @ (sd**2 + loc**2) - mean**2)


@pytest.mark.parametrize("name", ["height", "income"])
def test_imputed_numbers_are_posterior_means_in_original_units(name):
    model, table = fitted(), mixed(80, seed=5, missing=0.3)
    filled, spread = model.impute(table, return_std=True)
    hole = table[name].isna()
    mean, sd = by_hand(model, table, name)
    np.testing.assert_allclose(filled[name][hole], mean[hole], rtol=1e-9)
    np.testing.assert_allclose(spread[name][hole], sd[hole], rtol=1e-6)
    assert (spread[name][~hole] == 0).all()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_draws_agree_with_the_mean_the_spread_and_the_levels(covariance):
    """400 draws: 6 standard errors of a mean, 0.13 of a share."""
    model, table = fitted(covariance=covariance), mixed(12, seed=5, missing=0.4)
    filled, spread = model.impute(table, return_std=True)
    frames = model.impute(table, draws=400, seed=1)
    for name in ("height", "balance", "income"):
        hole = table[name].isna().to_numpy()
        drawn = np.array([frame[name].to_numpy(float)[hole] for frame in frames])
        error = spread[name].to_numpy()[hole] / 20
        assert (abs(drawn.mean(0) - filled[name].to_numpy()[hole]) < 6 * error).all()
    for name in ("colour", "member"):
        hole = table[name].isna().to_numpy()
        drawn = np.array([frame[name].to_numpy()[hole] for frame in frames])
        share = (drawn == filled[name].to_numpy()[hole]).mean(0)
        assert (abs(share - (1 - spread[name].to_numpy()[hole])) < 0.13).all()


def test_a_full_covariance_uses_the_other_columns():
    rng = np.random.default_rng(0)
    a = rng.normal(size=400)
    table = pd.DataFrame({"a": a, "b": 3 * a + 10 + 0.1 * rng.normal(size=400)})
    schema = Schema.read(table)
    holed = table.assign(b=np.nan)
    errors = {}
    for covariance in ("diagonal", "full"):
        model = schema.fit(schema.mixture(1, covariance=covariance), table, starts=1)
        errors[covariance] = (model.impute(holed)["b"] - table["b"]).std()
    assert errors["full"] == pytest.approx(0.1, rel=0.2)
    assert errors["diagonal"] == pytest.approx(table["b"].std(), rel=0.01)


def test_a_complete_table_is_returned_unchanged():
    table = mixed(20, missing=0.0)
    pd.testing.assert_frame_equal(fitted().impute(table), table)
    assert len(fitted().impute(table, draws=3)) == 3


def test_exact_factors_score_like_a_gaussian():
    """log p is that of N(b, W Wᵀ + diag ψ) in original units."""
    from scipy import stats

    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)) @ rng.normal(size=(2, 5)) + 0.3 * rng.normal(size=(300, 5))
    table = pd.DataFrame(x * 7 + 3, columns=list("abcde"))
    schema = Schema.read(table)
    model = schema.fit(schema.factors(2), table)
    factor = model.model.factors["p(x|z)"]
    W = factor.net.blocks.weights["z"].detach().numpy()
    b, psi = factor.net.blocks.bias.detach().numpy(), factor.vectors["scale"].detach().numpy()
    scale = np.array([column.scale for column in schema.columns])
    shift = np.array([column.location for column in schema.columns])
    covariance = W @ W.T + np.diag(np.logaddexp(0, psi) ** 2)
    expected = stats.multivariate_normal.logpdf(
        table, b * scale + shift, covariance * np.outer(scale, scale)
    )
    np.testing.assert_allclose(model.score(table)["log_p"], expected, rtol=0, atol=1e-9)
    codes, spread = model.codes(table, return_std=True)
    assert list(codes.columns) == list(spread.columns) == ["z1", "z2"]
    gain = np.linalg.solve(covariance, W).T
    np.testing.assert_allclose(codes, ((table - shift) / scale - b) @ gain.T, atol=1e-9)
    np.testing.assert_allclose(spread**2, np.tile(1 - np.diag(gain @ W), (300, 1)), atol=1e-9)
    holed = table.mask(rng.random(table.shape) < 0.3)
    assert ((model.impute(holed) - table).abs().mean() < table.std()).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_tails_are_shares_of_simulated_rows_with_the_same_missing_cells(library):
    model, table = fitted(library), mixed(30, seed=3)
    scores = model.score(LIBRARIES[library](table), tail=True, seed=4)
    log_p, tails = np.array(cells(scores, "log_p")), np.array(cells(scores, "tail"))
    simulated = pd.DataFrame({name: cells(model.sample(1000, seed=4), name) for name in table})
    for row in (0, 7, 11, 19):
        known = simulated.astype(table.dtypes).mask(table.iloc[[row] * 1000].isna().to_numpy())
        others = np.array(cells(model.score(LIBRARIES[library](known)), "log_p"))
        assert tails[row] == pytest.approx((others <= log_p[row]).mean(), abs=1e-3)


def test_tails_need_an_exact_log_p():
    table = mixed()
    schema = Schema.read(table)
    with pytest.raises(ValueError, match="tail=True needs an exact log p"):
        schema.fit(schema.vae(2, hidden=(4,)), table, epochs=1, seed=1).score(table, tail=True)
    with pytest.raises(ValueError, match="tail=True needs an exact log p"):
        fitted().score(table, tail=True, method="importance")


@pytest.mark.parametrize("make", [lambda s: s.factors(2), lambda s: s.vae(2, hidden=(16,)),
                                  lambda s: s.gmvae(3, 2, hidden=(16,))])  # fmt: skip
def test_amortised_models_of_mixed_tables(make):
    table = mixed()
    schema = Schema.read(table)
    model = schema.fit(make(schema), table, epochs=60, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)  # of weights that are not reliable
        score = model.score(table, samples=200)
    assert list(score.columns) == ["log_p", "stderr"]
    independent = schema.fit(schema.mixture(1), table, starts=1).score(table)["log_p"]
    assert score["log_p"].mean() > independent.mean()
    assert list(model.codes(table).columns) == ["z1", "z2"]
    filled = model.impute(table)
    assert not filled.isna().any().any()
    assert (filled.dtypes == table.dtypes).all()
    if "cluster" in model.model.graph.latents:
        assert model.clusters(table).shape == (240, 4)


@pytest.mark.parametrize("library", LIBRARIES)
def test_profiles_are_the_parameters_of_the_clusters(library):
    model = fitted(library)
    found = model.profiles()
    assert isinstance(found, FRAMES[library])
    assert sum(cells(found, "share")) == pytest.approx(1, abs=1e-12)
    weights = model.model.factors["p(x|cluster)"].net.blocks
    loc = (weights.weights["cluster"].T + weights.bias).detach().numpy()
    for j, column in enumerate(model.schema.variables["x"]):
        if column.kind in ("real", "positive"):
            expected = loc[:, j] * column.scale + column.location
            expected = np.exp(expected) if column.kind == "positive" else expected
            np.testing.assert_allclose(cells(found, column.name), expected, rtol=1e-9)
    assert set(cells(found, "colour")) <= set(model.schema["colour"].levels)
    other = TableModel(model.schema, model.schema.vae(2))
    with pytest.raises(ValueError, match="those of a mixture"):
        other.profiles()


def test_questions_that_a_model_cannot_answer():
    table = mixed(20)
    with pytest.raises(ValueError, match="no continuous latents"):
        fitted().codes(table)
    schema = Schema.read(table[["height", "balance"]])
    factors = schema.fit(schema.factors(1), table[["height", "balance"]])
    with pytest.raises(ValueError, match="no clusters"):
        factors.clusters(table[["height", "balance"]])
    with pytest.raises(ValueError, match="not both"):
        fitted().impute(table, draws=2, return_std=True)
    with pytest.raises(ValueError, match="at least 1"):
        fitted().impute(table, draws=0)


# Files --------------------------------------------------------------------------------------------


def test_a_model_is_the_same_after_saving(tmp_path):
    model, table = fitted(), mixed(40, seed=2)
    model.save(tmp_path / "model")
    again = load_table(tmp_path / "model")
    assert again.schema == model.schema
    pd.testing.assert_frame_equal(again.score(table), model.score(table))
    pd.testing.assert_frame_equal(again.impute(table), model.impute(table))
    pd.testing.assert_frame_equal(again.sample(5, seed=3), model.sample(5, seed=3))


@pytest.mark.parametrize("make", [lambda s: s.mixture(2), lambda s: s.vae(2, hidden=(8,))])
def test_a_run_keeps_its_schema(tmp_path, make):
    table = mixed(60).drop(columns="clicks")
    schema = Schema.read(table)
    settings = {"epochs": 2} if make(schema).graph.latents == ("z",) else {"starts": 3}
    model = schema.fit(make(schema), table, out=tmp_path / "run", **settings)
    again = load_table(tmp_path / "run")
    assert again.schema == schema
    assert again.run.step == model.run.step
    torch.testing.assert_close(again.model.state_dict(), model.model.state_dict(), rtol=0, atol=0)
    resumed = schema.fit(make(schema), table, out=tmp_path / "run", resume=True, **settings)
    assert resumed.run.step == model.run.step


def test_other_folders_are_refused(tmp_path):
    aevb.zoo.fa().save(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"schema\.json is missing"):
        load_table(tmp_path / "plain")
    fitted().save(tmp_path / "table")
    (tmp_path / "table" / "schema.json").write_text(Schema.read(mixed()).without("side").to_json())
    with pytest.raises(ValueError, match="but the schema has"):
        load_table(tmp_path / "table")


# Fitting ------------------------------------------------------------------------------------------


def test_the_seed_decides_everything():
    table = mixed(80).drop(columns="clicks")
    schema = Schema.read(table)
    for make, settings in ((schema.mixture, {}), (schema.vae, {"epochs": 1})):
        first, second = (schema.fit(make(2), table, seed=4, **settings) for _ in range(2))
        torch.testing.assert_close(
            first.model.state_dict(), second.model.state_dict(), rtol=0, atol=0
        )


def test_the_seed_decides_the_start_of_over_dispersed_counts():
    draw = np.random.default_rng(0)
    table = {"eggs": draw.negative_binomial(2, 0.2, 200), "mass": draw.normal(size=200)}
    table["length"] = np.where(
        draw.random(200) < 0.1, np.nan, table["mass"] + draw.normal(size=200)
    )
    schema = Schema.read(table)
    assert schema["eggs"].likelihood == "NegativeBinomial"
    scores = []
    for other in (1, 2):
        torch.manual_seed(other)
        fitted = schema.fit(schema.mixture(2, covariance="full"), table, starts=1, seed=0)
        scores.append(np.asarray(fitted.score(table)["log_p"]))
    assert np.array_equal(*scores)


def test_over_dispersed_counts_take_em_and_no_search_finds_more():
    draw, size = np.random.default_rng(0), 400
    group = draw.integers(3, size=size)
    mean = np.array([[1.0, 20.0], [8.0, 4.0], [40.0, 1.0]])[group]
    counts = draw.poisson(draw.gamma(1.5, mean / 1.5)).astype(float)
    counts[draw.random(counts.shape) < 0.1] = np.nan
    table = {"eggs": counts[:, 0], "nests": counts[:, 1], "mass": group + draw.normal(size=size)}
    schema = Schema.read(table)
    assert [column.likelihood for column in schema.used][:2] == ["NegativeBinomial"] * 2
    model = schema.fit(schema.mixture(3), table)
    before = model.score(table)["log_p"].mean()
    more = schema.fit(model.model, table, schedule=aevb.mle(tol=1e-9))
    after = more.score(table)["log_p"].mean()
    assert after == pytest.approx(before, abs=1e-4)


def test_a_mixture_without_a_closed_form_takes_maximum_likelihood():
    table = {"mass": np.random.default_rng(0).standard_t(3, size=300)}
    schema = Schema.read(table)
    p = {"y": aevb.OneHot(2, learned=True), "x | y": aevb.StudentT(1, df=3.0)}
    model = aevb.Model(p, {"y | x": aevb.Exact()}).double()
    with pytest.raises(ValueError, match=r"starts= is for mixtures .* by the default schedule, em"):
        schema.fit(model, table, starts=3)
    fitted = schema.fit(model, table)
    value = exact_evidence(fitted.model, fitted.model.prepare(**schema.encode(table))).mean()
    slopes = torch.autograd.grad(value, list(fitted.model.theta()))
    assert max(float(one.abs().max()) for one in slopes) < 1e-2


def test_more_starts_do_not_lower_the_evidence():
    table = mixed().drop(columns="clicks")
    schema = Schema.read(table)
    found = [
        schema.fit(schema.mixture(6), table, starts=starts).score(table)["log_p"].mean()
        for starts in (1, 8)
    ]
    assert found[1] >= found[0]


def test_a_trained_model_goes_on_from_its_weights():
    table = mixed().drop(columns="clicks")
    schema = Schema.read(table)
    model = schema.fit(schema.mixture(3), table)
    again = schema.fit(model.model, table)
    assert again.run.step < 10
    assert again.score(table)["log_p"].mean() >= model.score(table)["log_p"].mean() - 1e-9


@pytest.mark.parametrize(("collapsed", "said"), [(4, "1 more cluster."), (5, "2 more clusters.")])
def test_the_number_of_further_collapsed_clusters_is_told(monkeypatch, collapsed, said):
    found = [fitting.AtLimit(k, (), sound=False) for k in range(collapsed)]
    monkeypatch.setattr(fitting, "at_limit", lambda model, data: found)
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["a", "b"])
    schema = Schema.read(table)
    with pytest.warns(DataWarning, match=f"cluster 2 holds fewer .* and so on in {said}"):
        schema.fit(schema.mixture(2), table, starts=1)


def test_clusters_do_not_collapse_onto_equal_rows():
    """A cluster on 20 equal rows would have an unbounded density; here its scale has a limit."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(120, 2)), columns=["a", "b"])
    table.iloc[:20] = [0.123, 0.456]
    schema = Schema.read(table)
    with pytest.warns(DataWarning, match=r"cells of 'a', 'b' .*are \(nearly\) equal"):
        model = schema.fit(schema.mixture(2), table)
    score = model.score(table)["log_p"]
    limit = sum(-np.log(0.01 * c.scale) - 0.5 * np.log(2 * np.pi) for c in schema.columns)
    assert score.max() <= limit + 1e-9


@pytest.mark.parametrize(
    "make", [lambda s: s.factors(1), lambda s: s.mixture(1, covariance="full")]
)
def test_columns_that_follow_from_each_other_are_told(make):
    rng = np.random.default_rng(0)
    a = rng.normal(size=200)
    table = pd.DataFrame({"a": a, "b": 2 * a + 1, "c": rng.normal(size=200)})
    with pytest.warns(DataWarning, match=r"Column: 'b' is 2 · 'a' \+ 1\. .*without\('b'\)"):
        schema = Schema.read(table)
    with pytest.warns(DataWarning, match=r"cells of 'a', 'b' are \(nearly\) equal, or follow"):
        model = schema.fit(make(schema), table)
    assert np.isfinite(model.score(table)["log_p"]).all()


def test_rows_without_cells_do_not_matter():
    table = mixed(100).drop(columns="clicks")
    schema = Schema.read(table)
    more = pd.concat([table, table.iloc[:20].assign(**dict.fromkeys(table.columns))])
    model = schema.fit(schema.mixture(2), more.astype(table.dtypes), starts=2)
    other = schema.fit(schema.mixture(2), table, starts=2)
    assert model.score(table)["log_p"].mean() == pytest.approx(
        other.score(table)["log_p"].mean(), abs=0.05
    )
    assert not model.impute(more.astype(table.dtypes)).isna().any().any()


def test_settings_of_fit_are_passed_on():
    table = mixed(60).drop(columns="clicks")
    schema = Schema.read(table)
    model = schema.fit(schema.mixture(2), table, schedule=joint(), epochs=3, batch=20)
    assert model.run.step == 9
    assert model.run.settings.schedule == joint()
    assert schema.fit(schema.mixture(2), table, epochs=3).run.step == 3
    with pytest.raises(TypeError, match="no setting 'epoch'"):
        schema.fit(schema.mixture(2), table, epoch=3)
    with pytest.raises(ValueError, match="starts= is for mixtures"):
        schema.fit(schema.mixture(2), table, schedule=joint(), starts=2)


def test_validation_is_a_frame_too():
    table = mixed()
    schema = Schema.read(table)
    model = schema.fit(
        schema.vae(2, hidden=(8,)), table[:200], validation=table[200:], epochs=3, patience=2
    )
    assert model.run.best is not None


def test_clusters_are_found():
    """Well separated clusters of mixed columns, from the default settings."""
    rng = np.random.default_rng(0)
    truth = rng.integers(3, size=300)
    table = pd.DataFrame({
        "a": rng.normal(6 * truth),
        "b": np.exp(rng.normal(2.0 * truth, 0.5)),
        "c": rng.poisson(1 + 8 * truth),
        "d": np.array(["p", "q", "r"])[(truth + (rng.random(300) < 0.1)) % 3],
    }).mask(rng.random((300, 4)) < 0.1)  # fmt: skip
    schema = Schema.read(table)
    found = schema.fit(schema.mixture(3), table).clusters(table)["cluster"]
    pairs = pd.crosstab(truth, found).to_numpy()
    assert pairs.max(1).sum() >= 290


def small(shift=0.0):
    rng = np.random.default_rng(5)
    return pd.DataFrame({"a": rng.normal(size=60) + shift, "b": rng.normal(size=60)})


def test_a_refused_fit_leaves_the_schema_of_the_run_alone(tmp_path):
    table, out = small(), tmp_path / "run"
    schema = Schema.read(table)
    schema.fit(schema.mixture(2), table, out=out, seed=0)
    before = (out / "schema.json").read_bytes()
    log_p = load_table(out).score(table)["log_p"].to_numpy()
    other = small(shift=3.0)
    for settings in ({}, {"resume": True}):
        wanted = Schema.read(other)
        with pytest.raises(ValueError, match="trained with another schema: column 'a' was real"):
            wanted.fit(wanted.mixture(2), other, out=out, seed=0, **settings)
    with pytest.raises(ValueError, match="holds a run"):
        schema.fit(schema.mixture(2), table, out=out, seed=0)
    assert (out / "schema.json").read_bytes() == before
    np.testing.assert_array_equal(load_table(out).score(table)["log_p"].to_numpy(), log_p)


def test_a_fit_with_wrong_settings_leaves_no_schema(tmp_path):
    table = small()
    schema = Schema.read(table)
    with pytest.raises(ValueError):
        schema.fit(schema.mixture(2), table, out=tmp_path / "run", steps=-1)
    assert not (tmp_path / "run" / "schema.json").exists()


def test_a_killed_run_has_its_schema(tmp_path):
    table = small()
    schema = Schema.read(table)

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        schema.fit(
            schema.vae(1, hidden=(4,)),
            table,
            out=tmp_path / "run",
            steps=30,
            validation=table,
            after=stop,
        )
    assert (tmp_path / "run" / "schema.json").read_text() == schema.to_json()


def test_samples_of_positive_whole_numbers_have_a_logarithm():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {"income": np.ceil(np.exp(rng.normal(2, 1.5, 300))).astype(int), "b": rng.normal(size=300)}
    )
    schema = Schema.read(table, kinds={"income": "positive"})
    model = schema.fit(schema.mixture(1), table)
    drawn = model.sample(500, seed=0)
    assert drawn["income"].min() == 1
    assert np.isfinite(model.score(drawn)["log_p"]).all()


def test_cells_far_beyond_the_known_ones_are_warned_of():
    """A linear model of logarithms extrapolates: the true value of b is exp(9)."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=300)
    a, b, c, d = (slope * a + 0.1 * rng.normal(size=300) for slope in (1, 1, -2, 1))
    table = pd.DataFrame({"a": a, "b": np.exp(b), "c": c, "d": d})
    schema = Schema.read(table)
    model = schema.fit(schema.factors(1), table)
    table.loc[[0, 1], ["b", "c"]] = np.nan
    model.impute(table)
    far = pd.DataFrame({"a": [1.0, 9.0], "b": np.nan, "c": np.nan, "d": np.nan})
    with pytest.warns(
        DataWarning, match=r"far beyond all known cells of 'b' \(1, up to [\d.e+]+\)"
    ):
        model.impute(far)


@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame, pa.table])
def test_columns_without_a_type_are_filled(library):
    rng = np.random.default_rng(0)
    table = {
        "height": rng.normal(size=40),
        "colour": ["red", "blue", "green", "red"] * 10,
        "visits": rng.poisson(4, 40),
        "day": [datetime.date(2020, 1, 1 + i % 28) for i in range(40)],
    }
    schema = Schema.read(table)
    fitted = schema.fit(schema.mixture(1), table, starts=1)
    for name in table:
        new = library({key: [None, None] if key == name else table[key][:2] for key in table})
        filled = fitted.impute(new)
        assert not any(mask.any() for mask in schema.missing_cells(filled).values()), name
        if name == "colour":
            assert list(map(str, filled[name])) == ["red", "red"]


INTEGERS = {
    "pandas": lambda cells: pd.DataFrame({"a": pd.array(cells, "Int64")}),
    "pandas of pyarrow": lambda cells: pd.DataFrame({"a": pd.array(cells, "int64[pyarrow]")}),
    "polars": lambda cells: pl.DataFrame({"a": pl.Series(cells, dtype=pl.Int64)}),
    "pyarrow": lambda cells: pa.table({"a": pa.array(cells, pa.int64())}),
}


@pytest.mark.parametrize("library", INTEGERS)
@pytest.mark.parametrize("kind", ["positive", "real", "ordered"])
def test_a_new_table_of_integers_is_filled_with_the_numbers_of_the_schema(library, kind):
    """The type of a column depends on the known cells of its file, the filled cells do not."""
    table = {"a": [1.0, 0.07, 0.25, 0.07] * 20}
    schema = Schema.read(table, kinds={"a": kind})
    model = schema.fit(schema.mixture(1), table, starts=1)
    (filled,) = cells(model.impute({"a": [None]}), "a")
    assert 0.05 < filled < 0.9
    new = INTEGERS[library]([1, None, 1])
    found = model.impute(new)
    assert cells(found, "a") == [1, filled, 1]
    assert types(found)["a"] in ("Float64", "double[pyarrow]", pl.Float64, pa.float64())
    assert cells(new, "a") == [1, None, 1]
    # Whole numbers that a column of fractions happens to have need no other type.
    same = read_table(new).replaced({"a": (np.array([1]), [2.0])})
    assert (cells(same, "a"), types(same)) == ([1, 2, 1], types(new))


@pytest.mark.parametrize("library", INTEGERS)
@pytest.mark.parametrize("kind", ["ordered", "count", "real"])
def test_means_of_integers_are_not_rounded_if_not_asked(library, kind):
    table = INTEGERS[library]([1, 5, 10, 1, None, 1])
    schema = Schema.read(table, kinds={"a": kind})
    model = schema.fit(schema.mixture(1), table, starts=1)
    found, spread = model.impute(table, rounded=False, return_std=True)
    mean = pytest.approx(18 / 5, rel=1e-3)
    assert cells(found, "a") == [1, 5, 10, 1, mean, 1]
    assert types(found)["a"] in ("Float64", "double[pyarrow]", pl.Float64, pa.float64())
    assert cells(spread, "a")[4] > 1
    whole = model.impute(table)
    assert cells(whole, "a") == [1, 5, 10, 1, 1 if kind == "ordered" else 4, 1]
    assert types(whole) == types(table)
