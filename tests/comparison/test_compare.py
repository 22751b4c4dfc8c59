"""Comparison of models: paired differences, trust, units and information criteria."""

import math

import numpy as np
import pytest
import torch

from aevb import (
    Bernoulli,
    Exact,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    compare,
    em,
    fit,
    mlp,
    zoo,
)
from aevb.comparison.criteria import free_parameters
from aevb.comparison.result import Compared, Comparison, limit, paired
from aevb.data.datasets import load
from aevb.training.seed_folders import distinct

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(300, 2)) + 4 * (np.arange(300) % 2)[:, None]
TRAIN, TEST = {"x": X[:200]}, {"x": X[200:]}


def mixture(k: int, columns: int = 2) -> Model:
    torch.manual_seed(k)
    p = {"y": OneHot(k, learned=True), "x | y": Normal(columns)}
    return Model(p, {"y | x": Exact()})


def vae(columns: int = 2) -> Model:
    torch.manual_seed(0)
    p = {"z": Normal(1), "x | z": Normal(columns, net=mlp(4))}
    return Model(p, {"z | x": Normal(net=mlp(4))})


@pytest.fixture(scope="module")
def mixtures():
    return {f"{k} clusters": fit(mixture(k), TRAIN, schedule=em(), steps=50) for k in (1, 2, 3)}


def made(name: str, values, *, flags=(), stderr=None) -> Compared:
    values = np.asarray(values, float)
    errors = np.zeros_like(values) if stderr is None else np.asarray(stderr, float)
    return Compared(name, values, errors, "exact" if stderr is None else "importance", 1, 0, flags)


def test_gaps_that_q_was_not_trained_on_are_a_reason_for_distrust():
    run = fit(vae(), TRAIN, steps=2, progress=False)
    x = X[200:].copy()
    x[3, 1] = math.nan
    (found,) = compare({"run": run}, {"x": x}, samples=20).models
    said = "1 row lacks entries of x (first, from 0: row 3), which q was not trained on"
    assert found.flags[-1].startswith(said)
    (whole,) = compare({"run": run}, TEST, samples=20).models
    assert not any("lack" in flag for flag in whole.flags)


# Values -------------------------------------------------------------------------------------------


def test_the_evidence_is_that_of_the_model_row_by_row(mixtures):
    found = compare(mixtures, TEST)
    for name, run in mixtures.items():
        exact = run.model.log_evidence(x=TEST["x"])
        assert found[name].method == "exact"
        assert np.array_equal(found[name].evidence, exact.value.double().numpy())
        assert found[name].mean == pytest.approx(exact.mean, abs=1e-12)
        assert found[name].error == 0
        assert found[name].seconds == run.seconds


def test_models_are_ordered_by_their_mean(mixtures):
    found = compare(mixtures, TEST)
    means = [one.mean for one in found.models]
    assert means == sorted(means, reverse=True)
    assert found.best is found.models[0]
    assert found.verdict(found.best.name) == "best"
    assert found.verdict("1 clusters") == "worse"


def test_a_model_differs_from_itself_by_0_with_error_0(mixtures):
    model = mixtures["2 clusters"].model
    found = compare({"a": model, "b": model}, TEST)
    difference = found.difference("b", "a")
    assert (difference.mean, difference.stderr, difference.told) == (0.0, 0.0, False)
    assert "b cannot be told from a" in str(found)


def test_differences_are_paired_by_rows(mixtures):
    found = compare(mixtures, TEST)
    rows = found["1 clusters"].evidence - found["2 clusters"].evidence
    difference = found.difference("1 clusters", "2 clusters")
    assert difference.mean == pytest.approx(rows.mean(), abs=1e-12)
    assert difference.stderr == pytest.approx(rows.std(ddof=1) / math.sqrt(len(rows)), abs=1e-12)
    back = found.difference("2 clusters", "1 clusters")
    assert (back.mean, back.stderr) == pytest.approx((-difference.mean, difference.stderr))


def test_an_offset_common_to_all_rows_is_told_however_much_rows_vary():
    rows = GENERATOR.normal(scale=100, size=500)
    found = Comparison.of([made("a", rows), made("b", rows - 0.01)])
    assert found.difference("b").told is True
    assert found.difference("b").stderr < 1e-10


def test_differences_of_equal_models_are_rarely_told_from_noise():
    # 2,000 comparisons of equal models at the 5 % level: more than 7 % has probability 5e-5.
    noise = np.random.default_rng(1).normal(size=(2000, 2, 50))
    told = [paired(made("a", a), made("b", b)).told for a, b in noise]
    assert 0.03 < np.mean(told) < 0.07


def test_several_comparisons_share_the_level():
    assert limit(10**6, 1) == pytest.approx(1.95996, abs=1e-3)
    assert limit(10**6, 5) == pytest.approx(2.57583, abs=1e-3)
    rows = np.resize([1.0, -1.0], 400)
    models = [made("best", rows + 0.11), *(made(f"m{i}", -rows) for i in range(9))]
    few, many = Comparison.of(models[:2]), Comparison.of(models)
    assert (few.verdict("m0"), many.verdict("m0")) == ("not told apart", "not told apart")
    models[0] = made("best", rows + 2.3 * few.difference("m0").stderr)
    assert Comparison.of(models[:2]).verdict("m0") == "worse"
    assert Comparison.of(models).verdict("m0") == "not told apart"


def test_rounding_is_no_difference():
    rows = GENERATOR.normal(size=100) - 1000
    a, b = made("a", rows), made("b", rows + 1e-5)
    assert paired(b, a).told is True
    coarse = [
        Compared(one.name, one.evidence, one.stderr, "exact", 1, 0, rounding=1e-7) for one in (a, b)
    ]
    assert paired(coarse[1], coarse[0]).told is False


# Trust --------------------------------------------------------------------------------------------


def test_a_lower_estimate_that_must_not_be_trusted_decides_nothing():
    rows = GENERATOR.normal(size=100)
    low = made("low", rows - 1, flags=("k is high.",), stderr=np.ones(100))
    found = Comparison.of([made("exact", rows), low])
    assert found.difference("low").told is None
    assert found.verdict("low") == "not decided"
    text = str(found)
    assert "! low" in text
    assert "low must not be trusted: k is high." in text
    assert "Whether exact is better than low is not decided" in text


def test_a_higher_estimate_that_is_too_low_decides():
    rows = GENERATOR.normal(size=100)
    high = made("high", rows + 1, flags=("k is high.",), stderr=np.ones(100))
    found = Comparison.of([made("exact", rows), high])
    assert found.best.name == "high"
    assert found.verdict("exact") == "worse"


def test_an_untrained_q_is_flagged_and_sampling_errors_are_shown():
    found = compare({"mixture": mixture(2), "vae": vae()}, {"x": 30 * X[:50]}, samples=200)
    assert not found["vae"].trusted
    evidence = vae().log_evidence(x=30 * X[:50], method="importance", samples=200, seed=0)
    assert found["vae"].error == pytest.approx(evidence.error)
    assert found["vae"].mean == pytest.approx(evidence.mean)
    assert "it is exact for mixture" in " ".join(str(found).split())


def test_a_row_without_density_is_flagged_and_its_model_is_last():
    rows = GENERATOR.normal(size=30)
    broken = made("broken", np.where(np.arange(30) == 3, -np.inf, rows + 5))
    found = Comparison.of([broken, made("whole", rows)])
    assert found.best.name == "whole"
    assert found.difference("broken").told is None


def test_one_row_has_no_standard_error():
    found = Comparison.of([made("a", [1.0]), made("b", [0.0])])
    assert found.difference("b").told is None
    assert math.isnan(found.difference("b").stderr)
    assert "One row has no standard error" in str(found)


def test_one_row_that_carries_the_difference_is_reported():
    rows = np.zeros(100)
    spike = rows.copy()
    spike[7] = -50
    found = Comparison.of([made("a", rows), made("b", spike)])
    assert "One row makes up most of the variation of the difference to b" in " ".join(
        str(found).split()
    )


# What compares ------------------------------------------------------------------------------------


def test_models_of_different_quantities_are_refused():
    two = Model({"z": Normal(1), "x | z": Normal(2), "w | z": Normal(1)}, {"z | x": Normal()})
    data = {"x": X[:9], "w": X[:9, :1]}
    with pytest.raises(ValueError, match=r"a gives log p\(x\) and b gives log p\(x, w\)"):
        compare({"a": mixture(2), "b": two}, data)
    bits = {"x": (X[:9] > 1).astype(float)}
    binary = Model({"z": Normal(1), "x | z": Bernoulli(2)}, {"z | x": Normal()})
    with pytest.raises(ValueError, match="densities of 2 numbers, b gives probabilities of 2"):
        compare({"a": mixture(2), "b": binary}, bits)


def test_known_labels_are_part_of_the_quantity():
    known = {"x": X[:20], "y": np.arange(20) % 2}
    without = Model({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Normal()})
    with pytest.raises(ValueError, match=r"a gives log p\(x, y\) and b gives log p\(x\)"):
        compare({"a": mixture(2), "b": without}, known)
    found = compare([mixture(2)], known)
    exact = mixture(2).log_evidence(**known)
    assert found["model 1"].mean == pytest.approx(exact.mean)


def test_unknown_names_and_empty_comparisons_are_refused(mixtures):
    found = compare(mixtures, TEST)
    with pytest.raises(ValueError, match="No model is called '4 clusters'. There are: "):
        found["4 clusters"]
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({}, TEST)


def test_a_run_without_recorded_data_asks_for_them(mixtures):
    with pytest.raises(ValueError, match="1 clusters does not record which data"):
        compare(mixtures)


def test_standardised_runs_compare_in_the_units_of_the_data(tmp_path):
    file = tmp_path / "x.csv"
    x = X * [1.0, 250.0] + [3.0, -40.0]
    np.savetxt(file, x, delimiter=",", header="a,b", comments="")
    runs = {}
    for prepare in ("standardise", "none"):
        model = mixture(2)
        loaded = load(str(file), model.graph, prepare=prepare, hold_out=0.2)
        out = tmp_path / prepare
        fit(model, loaded.train.data, schedule=em(), steps=60, out=out, recipe=loaded.recipe)
        runs[prepare] = out
    found = compare(runs)
    assert found.what == "60 rows of " + str(file) + " (held out)"
    assert "in the units of the data" in str(found)
    # EM does not depend on the units, so that both runs reach the same density.
    assert found["standardise"].evidence == pytest.approx(found["none"].evidence, abs=1e-3)
    with pytest.raises(ValueError, match="standardise and none prepared their rows differently"):
        compare(runs, {"x": x})


def test_runs_that_held_out_different_rows_are_refused(tmp_path):
    file = tmp_path / "x.csv"
    np.savetxt(file, X, delimiter=",", header="a,b", comments="")
    runs = []
    for split in (0, 1):
        model = mixture(1)
        loaded = load(str(file), model.graph, hold_out=0.2, split=split)
        runs.append(tmp_path / f"split{split}")
        fit(model, loaded.train.data, schedule=em(), steps=5, out=runs[-1], recipe=loaded.recipe)
    with pytest.raises(ValueError, match=r"different rows: split is 0 and 1 \(data.json\)"):
        compare(runs)
    other = tmp_path / "other.csv"
    np.savetxt(other, X[:50], delimiter=",", header="a,b", comments="")
    assert compare(runs, str(other)).rows == 50


def test_names_of_folders_are_what_distinguishes_them(tmp_path):
    a, b = tmp_path / "a" / "seed-0", tmp_path / "b" / "seed-1"
    assert distinct([a, b]) == {a: "a/seed-0", b: "b/seed-1"}
    assert distinct([a]) == {a: "seed-0"}


# Information criteria -----------------------------------------------------------------------------


def test_bic_of_a_gaussian_is_that_by_hand():
    model = mixture(1)
    run = fit(model, TRAIN, schedule=em(), steps=20)
    found = compare({"gaussian": run}, TRAIN, criteria=True)["gaussian"]
    x, n = TRAIN["x"], 200
    variance = x.var(0)
    log_likelihood = -n / 2 * (np.log(2 * np.pi * variance) + 1).sum()
    assert found.free == 4
    assert found.aic == pytest.approx(-2 * log_likelihood + 2 * 4, abs=1e-2)
    assert found.bic == pytest.approx(-2 * log_likelihood + 4 * math.log(n), abs=1e-2)


def chain() -> Model:
    p = {"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(2)}
    return Model(p, {"y[t] | x[t]": OneHot()})


def factor_analysis(d: int) -> Model:
    return Model({"z": Normal(d), "x | z": Normal(6, scale="learned")}, {"z | x": Normal()})


def counts() -> Model:
    return Model({"y": OneHot(3, learned=True), "c | y": Poisson(2)}, {"y | c": Exact()})


def regression() -> Model:
    p = {"z | u": Normal(1, scale=1.0), "x | z": Normal(2, scale="learned")}
    return Model(p, {"z | x, u": Normal()}, given={"u": 3})


@pytest.mark.parametrize(
    ("model", "data", "free"),
    [
        (mixture(1), {"x": X[:1]}, 4),
        (mixture(3), {"x": X[:1]}, 2 + 3 * 4),
        (factor_analysis(1), {"x": np.zeros((1, 6))}, 6 + 6 + 6),
        (factor_analysis(2), {"x": np.zeros((1, 6))}, 6 + 6 + 12 - 1),
        (factor_analysis(3), {"x": np.zeros((1, 6))}, 6 + 6 + 18 - 3),
        (counts(), {"c": np.zeros((1, 2))}, 2 + 6),
        (chain(), {"x": np.zeros((1, 5, 2))}, 2 + 6 + 3 * 4),
        # The mean b + W A u has 2 + 4 numbers. They give W up to its length, which the covariance
        # W Wᵀ + diag σ² decides, besides the 2 of σ.
        (regression(), {"x": np.zeros((50, 2)), "u": GENERATOR.normal(size=(50, 3))}, 6 + 1 + 2),
    ],
    ids=["gaussian", "mixture", "1 factor", "2 factors", "3 factors", "counts", "hmm", "given"],
)
def test_free_parameters_are_the_dimensions_of_the_family(model, data, free):
    batch = model.prepare(**data)
    before = [parameter.clone() for parameter in model.parameters()]
    assert free_parameters(model, batch) == free
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_frozen_weights_are_not_counted():
    model = mixture(3)
    model.theta()[0].requires_grad_(False)
    count = sum(one.numel() for one in model.theta() if one.requires_grad)
    assert free_parameters(model, model.prepare(x=X[:1])) == min(count, 12)


def test_a_full_covariance_has_its_own_count():
    p = {"y": OneHot(2, learned=True), "x | y": MultivariateNormal(3)}
    model = Model(p, {"y | x": Exact()})
    assert free_parameters(model, model.prepare(x=np.zeros((1, 3)))) == 1 + 2 * (3 + 6)


def test_criteria_need_exact_evidence_of_the_training_rows(tmp_path):
    run = fit(mixture(2), TRAIN, schedule=em(), steps=10, out=tmp_path / "run")
    here = compare({"a": run, "b": tmp_path / "run"}, TRAIN)
    assert here["a"].bic == here["b"].bic
    assert here["a"].free == 9
    assert "training rows of all models" in str(here)
    assert compare({"a": run}, TEST)["a"].bic is None
    assert compare({"a": run}, TRAIN, criteria=False)["a"].bic is None
    with pytest.raises(ValueError, match="a was trained on others"):
        compare({"a": run}, TEST, criteria=True)
    with pytest.raises(ValueError, match="AIC and BIC need the exact evidence"):
        compare({"a": vae()}, TRAIN, criteria=True)


def test_criteria_without_a_record_of_the_rows_say_what_they_assume(tmp_path):
    recorded = fit(mixture(2), TRAIN, schedule=em(), steps=10, out=tmp_path / "run")
    models = {"recorded": recorded, "in memory": mixture(1)}
    found = compare(models, TRAIN, criteria=True)
    said = "take these rows to be the training rows of in memory, of which"
    assert found["in memory"].bic is not None
    assert any(said in note for note in found.notes)
    for found in (compare(models, TRAIN), compare({"a": recorded}, TRAIN, criteria=True)):
        assert not any("take these rows" in note for note in found.notes)


# Text ---------------------------------------------------------------------------------------------


def test_the_table_fits_80_columns_and_has_the_bound(mixtures):
    found = compare(mixtures, TEST, elbo=True)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "100 rows: exact log p in nats per example"
    assert found["2 clusters"].elbo == pytest.approx(found["2 clusters"].mean, abs=1e-4)
    assert "ELBO" in lines[1]


def test_a_bound_of_an_untrained_q_is_not_shown():
    run = fit(
        Model({"z": Normal(1), "x | z": Normal(2, scale="learned")}, {"z | x": Normal()}),
        TRAIN,
        schedule=em(),
        steps=5,
    )
    found = compare({"factors": run}, TEST, elbo=True)
    assert found["factors"].elbo is None
    assert "factors has no ELBO: em() left q as it is" in " ".join(str(found).split())


def test_the_csv_has_one_line_per_model(mixtures, tmp_path):
    found = compare(mixtures, TEST)
    found.save(tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0].startswith("rank,model,log_p,log_p_error,difference,difference_error,verdict")
    assert len(lines) == 4
    assert float(lines[1].split(",")[2]) == found.best.mean


def test_bic_of_sequences_counts_their_observed_steps():
    x = GENERATOR.normal(size=(2, 40, 1))
    x[0, 30:] = np.nan
    models = {"level": zoo.local_level().double(), "ar": zoo.ar(lags=3).double()}
    found = compare(models, {"x": x, "lengths": [35, 40]}, criteria=True)
    for name, free in (("level", 2), ("ar", 5)):
        one = found[name]
        assert (one.free, one.observed_steps) == (free, 30 + 40)
        expected = -2 * one.evidence.sum() + free * np.log(70)
        assert one.bic == pytest.approx(expected)
    assert "n of BIC: 70 steps with data" in found.legend()


def test_bic_of_one_series_has_a_penalty():
    found = compare({"ar": zoo.ar(lags=3)}, {"x": np.ones((1, 50, 1))}, criteria=True)["ar"]
    assert found.bic == pytest.approx(-2 * found.evidence.sum() + 5 * np.log(50))


def test_different_flat_starts_are_told():
    x = np.random.default_rng(0).normal(size=(1, 30, 1))
    level, trend = zoo.local_level(seed=0), zoo.local_trend(seed=0)
    told = compare({"level": level, "trend": trend}, {"x": x}).notes
    assert any(
        note.startswith(
            "The models have different first steps that are nearly flat (level: level[0]; trend: "
            "level[0], slope[0])."
        )
        for note in told
    )
    narrow = {"a": zoo.local_level(start=10.0, seed=0), "b": zoo.local_trend(start=10.0, seed=0)}
    for models in ({"level": level, "again": zoo.local_level(seed=1)}, narrow):
        assert not any("nearly flat" in note for note in compare(models, {"x": x}).notes)
