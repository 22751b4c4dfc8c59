"""Predictive checks: replicates that obey p, statistics against their definitions, p-values of
right and wrong models.
"""

import json

import numpy as np
import pytest
import torch

from aevb import GRU, Bernoulli, Model, NegativeBinomial, Normal, OneHot, Poisson, linear, mlp
from aevb.predictive import predictive_check
from aevb.predictive.replicate import complete, redraw
from aevb.predictive.statistics import STATISTICS

RATE, R = 4.0, 1.5


def over_dispersed(n: int = 400) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.poisson(random.gamma(R, RATE / R, size=(n, 3))).astype(float)


def counts(family) -> Model:
    """x does not depend on z: a plain family at the data's mean; q is the prior, which is then the
    posterior.
    """
    model = Model(p={"z": Normal(1), "x | z": family}, q={"z | x": Normal()})
    with torch.no_grad():
        blocks = model.factors["p(x|z)"].net.blocks
        blocks.weights["z"].zero_()
        blocks.bias.copy_(torch.as_tensor(over_dispersed().mean(0)).log())
        for parameter in model.phi():
            parameter.zero_()
    return model


def test_a_poisson_has_too_little_variance_for_over_dispersed_counts():
    check = predictive_check(counts(Poisson(3)), {"x": over_dispersed()}, columns=True, seed=0)
    assert check["mean(x)"].p > 0.05
    assert check["sd(x)"].above == 1 / 301  # above all of the replicates
    assert check["zeros(x)"].above == 1 / 301
    assert {"sd(x)", "zeros(x)", "sd(x[0])", "sd(x[1])", "sd(x[2])"} <= {
        found.label for found in check.extreme()
    }
    assert "← not reproduced" in str(check)


@pytest.mark.parametrize("kind", ["posterior", "prior"])
def test_the_right_family_reproduces_them(kind):
    model = counts(NegativeBinomial(3, dispersion=R))
    check = predictive_check(model, {"x": over_dispersed()}, kind=kind, seed=1)
    assert {found.statistic for found in check.comparisons} == {
        "mean",
        "sd",
        "zeros",
        "max",
        "correlation",
    }
    # 5 p-values a kind: some 5 % of seeds would fail one
    assert all(found.p > 0.01 for found in check.comparisons)


def test_the_p_values_of_prior_replicates_are_uniform_under_the_model_itself():
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(4, net=mlp(8), scale=0.5)}, q={"z | x": Normal()}
    )
    above = []
    for seed in range(40):
        x = model.sample(30, seed=seed)["x"]
        above.append(
            predictive_check(
                model, {"x": x}, ["mean"], kind="prior", replicates=39, seed=1000 + seed
            )["mean(x)"].above
        )
    # Kolmogorov–Smirnov: 1 % of seeds would fail
    assert np.abs(np.sort(above) - (np.arange(40) + 0.5) / 40).max() < 0.26


def autoregression(weight: float) -> Model:
    model = Model(
        p={"z": Normal(1), "x[t] | x[t-1], z": Normal(2, net=linear(bias=False), scale=1.0)},
        q={"b[t] | b[t+1], x[t]": GRU(3), "z | b[0]": Normal()},
    )
    with torch.no_grad():
        weights = model.factors["p(x[t]|x[t-1], z)"].net.blocks.weights
        weights["x[t-1]"].copy_(weight * torch.eye(2))
        weights["z"].zero_()
    return model


def test_replicated_sequences_read_what_was_replicated_before():
    lengths = torch.randint(5, 13, (200,), generator=torch.Generator().manual_seed(0))
    x = autoregression(0.8).sample(200, steps=12, seed=0)["x"]
    right = predictive_check(
        autoregression(0.8),
        {"x": x, "lengths": lengths},
        ["sd", "autocorrelation"],
        replicates=100,
        seed=0,
    )
    wrong = predictive_check(
        autoregression(0.0),
        {"x": x, "lengths": lengths},
        ["sd", "autocorrelation"],
        replicates=100,
        seed=0,
    )
    assert all(found.p > 0.05 for found in right.comparisons)
    assert [found.above for found in wrong.comparisons] == [1 / 101] * 2
    # below 0.8: a sequence starts at zero
    assert right["autocorrelation(x)"].replicates.mean() == pytest.approx(0.74, abs=0.05)


def test_redrawing_holds_the_others_and_follows_p():
    torch.manual_seed(0)
    model = Model(
        p={
            "y": OneHot(3),
            "z | y": Normal(2, scale=1e-3),
            "x | z": Normal(2, net=linear(), scale=1e-3),
        },
        q={"y | x": OneHot(net=mlp(4)), "z | x, y": Normal(net=mlp(4))},
    )
    with model._evaluating(0):
        batch = complete(model, model.prepare(x=torch.randn(50, 2)))
        x = redraw(model, batch, ["x"])["x"]
        z = redraw(model, batch, ["z"])["z"]
        centres = model.factors["p(z|y)"]({"y": batch["y"]})
        assert (x - model.factors["p(x|z)"]({"z": batch["z"]})).abs().max() < 0.01
        assert (z - centres).abs().max() < 0.01
        both = redraw(model, batch, ["z", "x"])
        assert (both["x"] - model.factors["p(x|z)"]({"z": both["z"]})).abs().max() < 0.01


def test_replicates_miss_what_the_data_miss():
    x = np.full((50, 3), 2.0)
    x[:, 0] = np.nan
    x[:25, 1] = np.nan
    model = Model(p={"z": Normal(1), "x | z": Poisson(3)}, q={"z | x": Normal()})
    seen = []
    predictive_check(
        model, {"x": x}, {"missing": lambda rows: seen.append(np.isnan(rows)) or 0.0}, replicates=20
    )
    assert len(seen) == 21
    assert all((mask == np.isnan(x)).all() for mask in seen)


def test_a_column_of_which_nothing_is_known_is_not_compared():
    x = np.ones((30, 3))
    x[:, 1] = np.nan
    model = Model(p={"z": Normal(1), "x | z": Normal(3)}, q={"z | x": Normal()})
    check = predictive_check(model, {"x": x}, ["mean", "sd"], columns=True, replicates=20)
    assert [found.label for found in check.comparisons] == [
        "mean(x)",
        "mean(x[0])",
        "mean(x[2])",
        "sd(x)",
        "sd(x[0])",
        "sd(x[2])",
    ]


def test_many_columns_of_the_model_itself_are_seldom_strange():
    """500 columns, more than 99 replicates can tell apart by counting: each lies outside all of
    them once in 50 times.
    """
    model = Model(p={"z": Normal(1), "x | z": Normal(500, scale=1.0)}, q={"z | x": Normal()})
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.weights["z"].zero_()
    x = model.sample(40, seed=1)["x"]
    check = predictive_check(model, {"x": x}, ["mean"], columns=True, kind="prior", replicates=99)
    outside = [found for found in check.comparisons if found.p <= 0.02]
    assert len(outside) > 3  # Binomial(501, 0.02): one seed in 100
    assert len(check.extreme()) <= 1
    x[:, 7] += 2.0
    assert (
        predictive_check(model, {"x": x}, ["mean"], columns=True, kind="prior", replicates=99)
        .extreme()[0]
        .label
        == "mean(x[7])"
    )


def test_statistics_are_what_their_names_say():
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 5, 3))
    x[..., 1] += x[..., 0]
    flat = x.reshape(-1, 3)
    r = np.abs(np.corrcoef(flat.T))
    np.testing.assert_allclose(STATISTICS["correlation"](x), (r.sum(0) - 1) / 2)
    pairs = [np.corrcoef(x[:, :-1, i].ravel(), x[:, 1:, i].ravel())[0, 1] for i in range(3)]
    np.testing.assert_allclose(STATISTICS["autocorrelation"](x), pairs)
    holes = np.where(random.random(x.shape) < 0.3, np.nan, x)
    columns = [holes[..., i][np.isfinite(holes[..., i])] for i in range(3)]
    for name, function in (
        ("mean", np.mean),
        ("sd", np.std),
        ("max", np.max),
        ("q95", lambda column: np.quantile(column, 0.95)),
    ):
        np.testing.assert_allclose(
            STATISTICS[name](holes), [function(column) for column in columns]
        )


def test_functions_of_ones_own_json_and_a_picture(tmp_path):
    model = Model(p={"z": Normal(1), "x | z": Bernoulli(4)}, q={"z | x": Normal()})
    x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)).round()
    check = predictive_check(
        model,
        {"x": x},
        {"pairs": lambda x: [x[:, 0] @ x[:, 1], x[:, 2] @ x[:, 3]], "all": lambda x: x.sum()},
        replicates=30,
    )
    assert [found.label for found in check.comparisons] == ["pairs(x[0])", "pairs(x[1])", "all(x)"]
    assert check["all(x)"].observed == float(x.sum())
    assert len(json.loads(json.dumps(check.to_dict()))["comparisons"]) == 3
    check.plot(tmp_path / "check.png")
    assert (tmp_path / "check.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"statistics": ["median"]}, "Unknown statistic 'median'"),
        ({"statistics": ["autocorrelation"]}, "no \\[t\\]"),
        ({"kind": "both"}, '"posterior" or "prior"'),
        ({"replicates": 3}, "20 or more"),
        ({"rows": 0}, "rows is the largest number of rows to use"),
        ({"statistics": {"none": lambda x: np.nan}, "replicates": 20}, "No statistic is finite"),
    ],
)
def test_what_is_asked_wrongly_is_said(choices, message):
    model = Model(p={"z": Normal(1), "x | z": Bernoulli(4)}, q={"z | x": Normal()})
    with pytest.raises(ValueError, match=message):
        predictive_check(model, {"x": torch.eye(4)}, **choices)


def test_quantiles_are_those_of_the_known_entries():
    x = np.random.default_rng(0).normal(size=(50, 3))
    holed = np.where(np.random.default_rng(1).random(x.shape) < 0.2, np.nan, x)
    for name, share in (("q05", 0.05), ("q50", 0.5), ("q95", 0.95)):
        for rows in (x, holed):
            expected = [np.quantile(column[~np.isnan(column)], share) for column in rows.T]
            np.testing.assert_allclose(STATISTICS[name](rows), expected, rtol=1e-12)
