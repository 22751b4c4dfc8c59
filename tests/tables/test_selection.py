"""Clusters and factors chosen by BIC."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import adjusted_rand_score
from small_tables import mixed

from aevb.comparison.criteria import free_parameters
from aevb.runtime.checked_files import DataWarning
from aevb.tables import Schema, load_table, selection
from aevb.tables.columns import KINDS
from aevb.tables.fitting import LEAST, least_shares
from aevb.tables.selection import compare, compared_rows, declare, parameters


def test_bic_counts_the_dimensions_of_the_family():
    draw = np.random.default_rng(0)
    frame = {
        "a": draw.normal(size=80),
        "b": draw.normal(size=80),
        "n": draw.poisson(3, 80) + draw.poisson(40, 80) * (draw.random(80) < 0.1),
        "flag": draw.random(80) < 0.4,
        "city": draw.choice(["Köln", "Bonn", "Nice"], 80),
    }
    schema = Schema.read(frame, kinds={"n": "count"})
    for arguments in (
        {"components": 2, "covariance": "diagonal"},
        {"components": 3, "covariance": "full"},
    ):
        model = schema.mixture(arguments["components"], covariance=arguments["covariance"])
        batch = model.prepare(**schema.encode(frame))
        assert parameters(model) == free_parameters(model, batch)
    numbers = {name: draw.normal(size=80) for name in "abcd"}
    schema = Schema.read(numbers)
    model = schema.factors(1)
    batch = model.prepare(**schema.encode(numbers))
    assert parameters(model) == free_parameters(model, batch)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("components", [1, 2])
def test_bic_counts_a_shared_dispersion_once(components, covariance):
    """The table has every kind of column; clusters share the dispersion of overdispersed counts."""
    frame = mixed()
    schema = Schema.read(frame).with_kind("clicks", "count", likelihood="NegativeBinomial")
    assert set(KINDS) <= {column.kind for column in schema.used}
    model = schema.mixture(components, covariance=covariance)
    batch = model.prepare(**schema.encode(frame))
    assert parameters(model) == free_parameters(model, batch)


def test_bic_finds_the_number_of_clusters():
    draw = np.random.default_rng(0)
    which = np.arange(240) % 3
    frame = pa.table(
        {
            "a": draw.normal(size=240) + 6 * which,
            "b": draw.normal(size=240) - 6 * (which == 1),
            "city": [["Köln", "Bonn", "Nice"][k] for k in which],
        }
    )
    schema, told = Schema.read(frame), []
    found = compare(schema, frame, "mixture", {}, tell=told.append)
    assert found[0].arguments == {"components": 3, "covariance": "diagonal"}
    assert {id(one) for one in found} == {id(one) for one in told}
    # Each family stops after three sizes without improvement.
    sizes = [one.arguments["components"] for one in told]
    assert sizes == [1, 2, 3, 4, 5, 6, *sizes[6:]]
    total = found[0].log_p * 240
    assert found[0].bic == pytest.approx(found[0].parameters * np.log(240) - 2 * total)


def test_factors_are_chosen_by_bic():
    draw = np.random.default_rng(0)
    z = draw.normal(size=(300, 2))
    values = z @ draw.normal(size=(2, 6)) + 0.3 * draw.normal(size=(300, 6))
    frame = {f"c{j}": values[:, j] for j in range(6)}
    found = compare(Schema.read(frame), frame, "factors", {})
    assert found[0].arguments == {"latent": 2}
    # With 4 factors, factor analysis of 6 columns would have more parameters than a covariance.
    assert sorted(one.arguments["latent"] for one in found) == [1, 2, 3]


def test_factors_of_words_need_a_number():
    frame = mixed()
    with pytest.raises(ValueError, match="needs its number of factors"):
        compare(Schema.read(frame), frame, "factors", {})


def test_unknown_models_are_refused():
    schema = Schema.read({"a": np.arange(9) / 3})
    with pytest.raises(ValueError, match="Unknown model 'density'. Choose one of mixture, factors"):
        declare(schema, "density", {})


@pytest.mark.slow
def test_clusters_are_those_of_bic_with_the_frame_of_the_caller():
    draw = np.random.default_rng(0)
    which = np.arange(240) % 3
    frame = pd.DataFrame(
        {
            "a": draw.normal(size=240) + 8 * which,
            "b": draw.normal(size=240) - 8 * (which == 1),
            "city": [["Köln", "Bonn", "Nice"][k] for k in which],
        },
        index=np.arange(240) + 1000,
    )
    fitted = Schema.read(frame).without("city").fit_clusters(frame)
    found = fitted.clusters(frame)
    assert found.index.tolist() == frame.index.tolist()
    assert len(pd.crosstab(found["cluster"], frame["city"]).melt().query("value > 0")) == 3


def test_large_tables_are_compared_by_random_rows():
    schema = Schema.read(mixed())
    used = len(schema.used)
    assert compared_rows(schema, 100) == 100
    assert compared_rows(schema, 10**6) == max(1000, 40_000 // used)


def two_groups(rows: int, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    which = draw.integers(0, 2, rows)
    values = draw.normal(size=(rows, 3)) @ draw.normal(size=(3, 3)) + 3 * which[:, None]
    return pd.DataFrame(values, columns=["a", "b", "c"])


def test_held_out_rows_choose_no_weights(tmp_path):
    """The weights of a run are those of its best validation: EM is validated at its end alone."""
    train, held_out = two_groups(60), two_groups(30, seed=1)
    schema = Schema.read(train)
    run = tmp_path / "run"
    fitted = schema.fit(schema.mixture(4), train, validation=held_out, out=run, seed=0)
    assert fitted.run.best.step == fitted.run.step
    again = load_table(run).score(held_out)["log_p"]
    np.testing.assert_array_equal(again, fitted.score(held_out)["log_p"])
    assert fitted.run.best.value == pytest.approx(
        (again - schema.log_jacobian(held_out)).mean(), abs=1e-9
    )


@pytest.mark.slow
def test_the_chosen_mixture_is_the_one_that_was_compared():
    frame = two_groups(150)
    schema = Schema.read(frame)
    best = compare(schema, frame, "mixture", {})[0]
    fitted = schema.fit_clusters(frame)
    assert fitted.score(frame)["log_p"].mean() == pytest.approx(best.log_p, abs=1e-9)
    assert fitted.model.graph.size("cluster") == best.arguments["components"]


def three_groups() -> tuple[np.ndarray, pd.DataFrame]:
    draw = np.random.default_rng(0)
    which = np.repeat([0, 1, 2], 60)
    return which, pd.DataFrame({"a": draw.normal(5 * which, 1), "b": draw.normal(-5 * which, 1)})


@pytest.mark.parametrize("form", ["constant in a group", "zero but in a group", "a difference"])
def test_equal_cells_of_a_group_do_not_hide_its_cluster(form):
    which, frame = three_groups()
    draw = np.random.default_rng(1).normal(20, 3, len(which))
    frame["c"] = {
        "constant in a group": np.where(which == 0, 5.0, draw),
        "zero but in a group": np.where(which == 0, draw, 0.0),
        "a difference": frame["a"] - frame["b"],
    }[form]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the difference
        schema = Schema.read(frame)
    arguments = {"covariance": "full" if form == "a difference" else "diagonal"}
    best = compare(schema, frame, "mixture", arguments)[0]
    assert best.arguments["components"] == 3
    assert best.sound
    assert "c" in best.redundant
    with pytest.warns(DataWarning, match=r"A scale is at its lower limit: the cells of .*'c'"):
        fitted = schema.fit(declare(schema, "mixture", best.arguments), frame, starts=3)
    found = fitted.clusters(frame)["cluster"]
    assert adjusted_rand_score(which, found) > 0.95


def test_coarse_cells_make_no_clusters():
    """Within a cluster, the scale of a column is at least half the distance of its cells."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"a": draw.normal(size=300).round(1), "b": draw.normal(size=300)})
    schema = Schema.read(frame)
    found = compare(schema, frame, "mixture", {"covariance": "diagonal"})
    assert found[0].arguments["components"] == 1
    model = schema.mixture(2)
    a, b = least_shares(model, schema.encode(frame))
    assert least_shares(model, {"x": frame[["b"]].to_numpy()}) == LEAST
    assert a * frame["a"].var(ddof=0) == pytest.approx(0.05**2)
    assert b == LEAST


def test_a_cluster_of_one_row_is_not_chosen(monkeypatch):
    monkeypatch.setattr(selection, "MOST", 2)
    _, frame = three_groups()
    frame.iloc[7] = [50.0, 50.0]
    schema, mixture = Schema.read(frame), {"covariance": "diagonal"}
    best, *others = compare(schema, frame, "mixture", mixture)
    assert best.sound
    assert any(not one.sound and one.bic < best.bic for one in others)
    with pytest.warns(DataWarning, match=r"cluster on a row that is far from all others \(row 7\)"):
        schema.fit_clusters(frame)


def test_the_largest_number_of_clusters_is_told(monkeypatch):
    monkeypatch.setattr(selection, "MOST", 2)
    _, frame = three_groups()
    with pytest.warns(DataWarning, match="BIC chose 2 clusters, the largest number that is comp"):
        Schema.read(frame).fit_clusters(frame)
