"""Missing cells: their mean, spread and draws, against formulas, sums and quadrature."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

from aevb import (
    Bernoulli,
    ContinuousBernoulli,
    Exact,
    Mixture,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    StudentT,
    fit,
    mle,
    mlp,
    zoo,
)
from aevb.declare.distributions import continuous_bernoulli_variance

NAN = math.nan


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(p, q, **choices) -> Model:
    torch.manual_seed(0)
    model = Model(p=p, q=q, **choices).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7)
    return model


def as_prior(model: Model) -> Model:
    """x does not read z, and q is the prior: the posterior, whatever x is."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "weights.z" in name or name.startswith("factors.q("):
                parameter.zero_()
    return model


# Known cells of the same variable -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["q", "exact"])
def test_a_full_covariance_reads_the_known_cells(method):
    model = as_prior(
        built(
            {"z": Normal(1), "x | z": MultivariateNormal(3, covariance="shared")},
            {"z | x": Normal(scale=1.0)},
        )
    )
    factor = model.factors["p(x|z)"]
    dist = factor.distribution(factor({"z": torch.zeros(1, 1, dtype=torch.float64)}))
    mu, sigma = dist.loc[0].detach(), dist.covariance_matrix.reshape(3, 3).detach()
    x = randn(4, 3)
    x[0, 1], x[1, :2], x[2] = NAN, NAN, NAN
    found = model.impute(x=x, method=method, samples=4000, seed=0)
    assert found.method == method
    for row, missing in enumerate(([1], [0, 1], [0, 1, 2], [])):
        known = [i for i in range(3) if i not in missing]
        gain = sigma[missing][:, known] @ torch.linalg.inv(sigma[known][:, known])
        mean = mu[missing] + gain @ (x[row, known] - mu[known])
        covariance = sigma[missing][:, missing] - gain @ sigma[known][:, missing]
        assert torch.allclose(found.mean["x"][row, missing], mean)
        assert torch.allclose(found.sd["x"][row, missing], covariance.diagonal().sqrt())
        assert torch.equal(found.mean["x"][row, known], x[row, known])
        assert (found.sd["x"][row, known] == 0).all()
        drawn = found.draws["x"][:, row]
        assert torch.equal(drawn[:, known], x[row, known].expand(4000, -1))
        assert (
            (drawn[:, missing].mean(0) - mean).abs() < 5 * covariance.diagonal().sqrt() / 4000**0.5
        ).all()
        if len(missing) > 1:
            assert torch.allclose(
                torch.cov(drawn[:, missing].T),
                covariance,
                atol=0.12 * float(covariance.diagonal().max()),
            )
    assert torch.equal(found.missing["x"], x.isnan())


def test_a_mixture_likelihood_reads_the_known_cells():
    model = as_prior(
        built({"z": Normal(1), "x | z": Mixture(2, components=3)}, {"z | x": Normal(scale=1.0)})
    )
    factor = model.factors["p(x|z)"]
    dist = factor.distribution(factor({"z": torch.zeros(1, 1, dtype=torch.float64)}))
    weights, loc, scale = (
        part[0].detach().numpy() for part in (dist.log_weights.exp(), dist.loc, dist.scale)
    )
    x = torch.tensor([[0.7, NAN], [NAN, -1.2]], dtype=torch.float64)
    found = model.impute(x=x, samples=1, seed=0)
    grid = np.linspace(-15, 15, 20001)
    for row, missing in ((0, 1), (1, 0)):
        known = norm.pdf(float(x[row, 1 - missing]), loc[:, 1 - missing], scale[:, 1 - missing])
        density = (
            weights * known * norm.pdf(grid[:, None], loc[:, missing], scale[:, missing])
        ).sum(1)
        density /= density.sum()
        mean = (density * grid).sum()
        assert float(found.mean["x"][row, missing]) == pytest.approx(mean, abs=1e-6)
        assert float(found.sd["x"][row, missing]) == pytest.approx(
            math.sqrt((density * (grid - mean) ** 2).sum()), abs=1e-6
        )


# Discrete latents, other families -----------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        MultivariateNormal(3),
        Normal(3),
        Poisson(3),
        Bernoulli(3),
        ContinuousBernoulli(3),
        StudentT(3, df=5.0),
    ],
    ids=repr,
)
def test_a_mixtures_cells_are_the_sum_over_its_classes(family):
    model = built({"y": OneHot(3, learned=True), "x | y": family}, {"y | x": Exact()})
    x = model.sample(5, seed=1)["x"]
    x[0, 1], x[1, :2], x[2] = NAN, NAN, NAN
    found = model.impute(x=x, samples=1)
    assert found.method == "exact"
    for row in range(5):
        one = x[row : row + 1]
        weights = (
            torch.stack([model.log_evidence(x=one, y=torch.tensor([c])).value for c in range(3)])
        ).softmax(0)[:, 0]
        classes = model.factors["p(x|y)"].distribution(
            model.factors["p(x|y)"]({"y": torch.eye(3, dtype=torch.float64)})
        )
        spec, present = model.factors["p(x|y)"].spec, ~one.isnan()
        each = spec.given_known(classes, one.nan_to_num(0.5).expand(3, 3), present.expand(3, 3))
        mean = weights @ each.mean
        sd = (weights @ (each.variance + (each.mean - mean) ** 2)).sqrt()
        assert torch.allclose(found.mean["x"][row][one[0].isnan()], mean[one[0].isnan()])
        assert torch.allclose(found.sd["x"][row][one[0].isnan()], sd[one[0].isnan()])


def test_classes_are_probabilities():
    model = built(
        {"y": OneHot(2, learned=True), "x | y": Normal(2), "k | y": OneHot(3)},
        {"y | x, k": Exact()},
    )
    drawn = model.sample(4, seed=0)
    k = drawn["k"].argmax(-1)
    k[1] = -1
    found = model.impute(x=drawn["x"], k=k, samples=3)
    posterior = model.posterior(x=drawn["x"], k=k, method="exact")["y"].probs[1]
    classes = model.factors["p(k|y)"]({"y": torch.eye(2, dtype=torch.float64)}).softmax(-1)
    assert torch.allclose(found.mean["k"][1], posterior @ classes)
    assert torch.equal(found.mean["k"][[0, 2, 3]], drawn["k"][[0, 2, 3]])
    assert found.draws["k"].shape == (3, 4, 3)


def test_the_variance_of_a_continuous_bernoulli_is_its_integral():
    for logit in (-30.0, -3.0, -0.51, -0.49, 0.0, 1e-3, 0.49, 0.51, 8.0):
        x = np.linspace(0, 1, 200001)
        density = np.exp(logit * (x - (logit > 0)))
        density /= density.sum()
        expected = (density * x * x).sum() - (density * x).sum() ** 2
        assert float(
            continuous_bernoulli_variance(torch.tensor(logit, dtype=torch.float64))
        ) == pytest.approx(expected, rel=2e-4)


def test_draws_by_q_agree_with_the_exact_moments_where_q_is_exact():
    """Averages over 20,000 draws within 5 standard errors, of some 6 cells."""
    model = built(
        {"z": Normal(2), "x | z": Normal(3, scale="learned")}, {"z | x": MultivariateNormal()}
    )
    x = randn(3, 3)
    x[0, 1], x[1, :2], x[2] = NAN, NAN, NAN
    exact = model.posterior(x=x, method="exact")

    class Teller(type(exact)):  # the exact posterior, asked as q is: by its draws
        method = "q"

    from aevb.posterior import imputation

    drawn = imputation._by_draws(Teller(model, model.prepare(x=x), seed=0), ["x"], 20000)["x"]
    mean, sd = exact.moments("x")
    here = x.isnan()[None]
    assert ((drawn.mean - mean)[here].abs() < 5 * sd[here] / 20000**0.5).all()
    assert ((drawn.sd / sd - 1)[here].abs() < 0.03).all()
    assert ((drawn.draws.std(0)[here] / sd[here] - 1).abs() < 0.03).all()


# As users call it ---------------------------------------------------------------------------------


def test_it_is_the_same_for_a_seed_and_nan_beyond_the_end():
    model = built(
        {"z[t] | z[t-1]": Normal(1, net=mlp(3)), "x[t] | z[t]": Normal(2)},
        {"z[t] | z[t-1], x[t]": Normal()},
    )
    x = [randn(4, 2), randn(2, 2, seed=1)]
    x[1][0, 1] = NAN
    fit(model, {"x": x}, steps=2)
    a, b = (model.impute(x=x, seed=5, samples=7) for _ in range(2))
    assert repr(a) == "1 missing cell of x filled by q, 7 draws"
    assert torch.equal(a.draws["x"].nan_to_num(9.0), b.draws["x"].nan_to_num(9.0))
    assert a.mean["x"].shape == (2, 4, 2)
    assert a.mean["x"][1, 2:].isnan().all()
    assert not a.mean["x"][1, :2].isnan().any()
    assert int((a.sd["x"].nan_to_num(0.0) > 0).sum()) == 1


def test_averages_beat_column_means_after_mle():
    """The defect: an untrained q made imputed cells worse than column means."""
    torch.manual_seed(0)
    loadings = randn(2, 6, seed=1)
    x = randn(300, 2) @ loadings + 0.4 * randn(300, 6, seed=2)
    holes = torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) < 0.2
    seen = torch.where(holes, NAN, x)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(6, scale="learned")}, q={"z | x": Normal(net=mlp(8))}
    ).double()
    fit(model, {"x": seen}, schedule=mle(), steps=150, lr=0.05)
    filled = model.impute(x=seen)
    by_means = torch.where(holes, torch.nanmean(seen, 0), x)
    # with the parameters that made the data
    covariance, best = (loadings.T @ loadings + 0.16 * torch.eye(6), torch.zeros_like(x))
    for row, (known, value) in enumerate(zip(~holes, x, strict=True)):
        best[row] = covariance[:, known] @ torch.linalg.solve(
            covariance[known][:, known], value[known]
        )
    ours, means, least = (
        float((guess - x)[holes].square().mean().sqrt())
        for guess in (filled.mean["x"], by_means, best)
    )
    assert ours < 1.03 * least < 0.6 * means
    inside = ((filled.mean["x"] - x)[holes].abs() < 1.96 * filled.sd["x"][holes]).double().mean()
    assert 0.88 < float(inside) < 0.99


def test_random_numbers_of_latents_and_data_differ():
    """With one seed for both, x − E[x|z] would be the same numbers as z."""
    model = built({"z": Normal(1), "x | z": Normal(1, scale=1.0)}, {"z | x": Normal(scale=1.0)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.factors["p(x|z)"].net.blocks.weights["z"].fill_(1.0)
    x = torch.zeros(2000, 1, dtype=torch.float64)
    drawn = model.reconstruct(x=x, mean=False, seed=0, method="q")["x"]
    assert abs(float(drawn.var()) - 2.0) < 0.3  # 4 if the noise were shared


def test_samples_are_counted_from_one():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        built({"z": Normal(1), "x | z": Normal(1)}, {"z | x": Normal()}).impute(
            x=randn(2, 1), samples=0
        )


def test_intervals_of_filled_gaps_are_exact_for_normal_variables():
    times = pd.Index([1, 2, 3, 4], name="year")
    flow = pd.Series([3.0, np.nan, np.nan, 2.0], times, name="flow")
    found = zoo.local_level().double().impute(x=flow, samples=5, seed=0)
    frame = found.frame(levels=[0.8])
    assert list(frame) == ["flow", "flow_lower_80", "flow_upper_80"]
    half = norm.ppf(0.9) * found.sd["x"][0, :, 0].numpy()
    assert np.allclose(frame["flow_lower_80"], frame["flow"] - half)
    assert np.allclose(frame["flow_upper_80"], frame["flow"] + half)
    assert list(frame.loc[4]) == [2.0, 2.0, 2.0]
    assert list(found.frame()) == ["flow"]
    with pytest.raises(ValueError, match="Quantile levels lie between 0 and 1"):
        found.frame(levels=[1.5])


def test_quantiles_of_filled_counts_are_whole_numbers_of_the_draws():
    model = zoo.hmm(y=2, likelihood="Poisson").double()
    x = torch.tensor([[[3.0], [torch.nan], [5.0]]], dtype=torch.float64)
    found = model.impute(x=x, samples=200, seed=0)
    (low,), (high,) = found.quantile([0.1, 0.9])["x"]
    assert torch.equal(low, low.round())
    assert torch.equal(high, high.round())
    inside = (found.draws["x"][:, 0] >= low) & (found.draws["x"][:, 0] <= high)
    assert bool((inside.double().mean(0) >= 0.8).all())
    assert [low[0].item(), high[2].item()] == [3.0, 5.0]


def test_mixtures_have_the_quantiles_of_their_distribution_function():
    model = zoo.hmm(y=2).double()
    x = torch.tensor([[[3.0], [torch.nan], [5.0]]], dtype=torch.float64)
    found = model.impute(x=x, samples=20_000, seed=0)
    for level in (0.1, 0.5, 0.9):
        end = found.quantile(level)["x"][0, 0, 1, 0]
        share = (found.draws["x"][:, 0, 1, 0] <= end).double().mean().item()
        assert share == pytest.approx(level, abs=5 * 0.5 / 20_000**0.5)
