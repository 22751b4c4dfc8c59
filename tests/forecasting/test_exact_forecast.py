"""Exact forecasts against joint Gaussians, sums over all paths, and the exact posterior."""

import itertools
import math

import numpy as np
import pytest
import torch
from exact_models import LENGTHS, MODELS, N, T, data_of, holed
from scipy.stats import multivariate_normal, norm
from series_models import (
    EXACT,
    Paths,
    autoregression,
    close,
    fill,
    hidden_markov,
    local_level,
    local_trend,
    series,
)

from aevb import Model, Normal, OneHot, linear

SERIES = {"level": local_level, "trend": local_trend, "autoregression": autoregression}
AHEAD = 4


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("holes", [False, True])
def test_a_gaussian_forecast_is_the_conditional_of_the_joint_gaussian(name, holes):
    model, matrices = SERIES[name]()
    x = series(holes=holes)
    forecast = model.forecast(steps=AHEAD, x=x[None], samples=1, seed=0)
    mean, covariance = matrices.future(x, AHEAD)
    assert forecast.method == "exact"
    assert forecast.exact_quantiles("x")
    close(forecast.mean["x"][0, :, 0], mean)
    close(forecast.sd["x"][0, :, 0], np.sqrt(np.diag(covariance)))
    levels = [0.025, 0.3, 0.5, 0.975]
    expected = mean + np.sqrt(np.diag(covariance)) * norm.ppf(levels)[:, None]
    close(forecast.quantile(levels)["x"][:, 0, :, 0], expected)
    close(forecast.interval(0.95)["x"][:, 0, :, 0], expected[[0, 3]])
    future = np.random.default_rng(1).normal(size=AHEAD)
    log_p = multivariate_normal(mean, covariance).logpdf(future)
    close(forecast.log_prob(x=future.reshape(1, AHEAD, 1)), [log_p])
    future[[1, 3]] = np.nan
    log_p = multivariate_normal(mean[[0, 2]], covariance[np.ix_([0, 2], [0, 2])])
    close(forecast.log_prob(x=future.reshape(1, AHEAD, 1)), [log_p.logpdf(future[[0, 2]])])


@pytest.mark.parametrize("name", SERIES)
def test_draws_have_the_joint_covariance(name):
    """4 standard errors for 14 numbers a model: one failure in 1,100 seeds."""
    model, matrices = SERIES[name]()
    x, count = series(), 20000
    draws = model.forecast(steps=AHEAD, x=x[None], samples=count, seed=0).draws["x"][:, 0, :, 0]
    mean, covariance = matrices.future(x, AHEAD)
    centred = draws.numpy() - mean
    products = centred[:, :, None] * centred[:, None]
    for found, expected in ((centred, np.zeros(AHEAD)), (products, covariance)):
        error = found.std(0) / math.sqrt(count)
        assert (np.abs(found.mean(0) - expected) < 4 * error).all()


def test_a_hidden_markov_forecast_is_the_sum_over_all_paths():
    model = hidden_markov()
    tables, x = Paths.of(model), series(5)[:, 0]
    forecast = model.forecast(steps=3, x=x[None, :, None], samples=20000, seed=0)
    paths, weights, evidence = tables.weights(x, 8)
    for h in range(3):
        at = paths[:, 5 + h]
        mean = weights @ tables.mean[at]
        variance = weights @ (tables.sd[at] ** 2 + (tables.mean[at] - mean) ** 2)
        close(forecast.mean["x"][0, h], [mean])
        close(forecast.sd["x"][0, h], [math.sqrt(variance)])
        for level in (0.01, 0.5, 0.9):  # the mixture's distribution function at its quantile
            value = float(forecast.quantile(level)["x"][0, 0, h, 0])
            below = weights @ norm.cdf((value - tables.mean[at]) / tables.sd[at])
            assert below == pytest.approx(level, abs=1e-12)
            share = float((forecast.draws["x"][:, 0, h, 0] <= value).double().mean())
            assert abs(share - level) < 4.5 * math.sqrt(level * (1 - level) / 20000)
    future = np.array([0.3, np.nan, -1.0])
    expected = tables.weights(np.concatenate([x, future]), 8)[2] - evidence
    close(forecast.log_prob(x=future.reshape(1, 3, 1)), [expected])


def future_given(model, steps, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(
            N, steps, model.graph.size(name), generator=generator, dtype=torch.float64
        )
        for name in model.graph.given
        if model.graph.timed[name]
    }


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_row_alone_has_the_same_forecast(name, lengths):
    """Each row of a ragged batch, cut to its length, and by itself."""
    model, data = MODELS[name](), data_of(MODELS[name]())
    given = future_given(model, 2)
    ragged = model.forecast(steps=2, given=given, lengths=lengths, samples=1, seed=0, **data)
    for i in range(N):
        length = T if lengths is None else lengths[i]
        row = {
            key: value[i : i + 1, :length] if model.graph.timed[key] else value[i : i + 1]
            for key, value in data.items()
        }
        own = {key: value[i : i + 1] for key, value in given.items()}
        alone = model.forecast(steps=2, given=own, lengths=length, samples=1, seed=0, **row)
        for key in alone.mean:
            close(ragged.mean[key][i], alone.mean[key][0])
            close(ragged.sd[key][i], alone.sd[key][0])
            assert not ragged.mean[key].isnan().any()


@pytest.mark.parametrize(
    "name",
    ["state space", "mixture of state spaces", "hidden Markov over factor analysers", "two chains"],
)
def test_a_forecast_is_the_posterior_of_a_missing_end(name):
    """The posterior itself is compared with brute force in test_exact_posterior.py."""
    model, data = MODELS[name](), data_of(MODELS[name]())
    if name != "two chains":
        data = holed(data, "x")
    forecast = model.forecast(steps=3, samples=1, seed=0, **data)
    longer = {
        key: torch.cat([value, torch.full((N, 3, value.shape[-1]), math.nan).double()], 1)
        for key, value in data.items()
    }
    filled = model.impute(samples=1, method="exact", **longer)
    for key in forecast.mean:
        close(forecast.mean[key], filled.mean[key][:, T:])
        close(forecast.sd[key], filled.sd[key][:, T:])


@pytest.mark.parametrize("name", EXACT)
def test_the_density_of_two_steps_is_a_product_of_one_step_densities(name):
    """log p(x₁, x₂ | past) = log p(x₁ | past) + log p(x₂ | past, x₁)."""
    model, data = MODELS[name](), data_of(MODELS[name]())
    given = future_given(model, 2)
    future = {key: value[:, 1:3] for key, value in data_of(model, seed=7).items()}
    timed = [key for key in model.graph.observed if model.graph.timed[key]]

    def score(past, given, future):
        steps = len(next(iter(future.values()))[0])
        return model.forecast(steps=steps, given=given, samples=1, seed=0, **past).log_prob(
            **future
        )

    first = {key: value[:, :1] for key, value in given.items()}
    second = {key: value[:, 1:] for key, value in given.items()}
    extended = {
        key: torch.cat([value, (first if key in first else future)[key][:, :1]], 1)
        if model.graph.timed[key]
        else value
        for key, value in data.items()
    }
    whole = score(data, given, {key: future[key] for key in timed})
    parts = score(data, first, {key: future[key][:, :1] for key in timed}) + score(
        extended, second, {key: future[key][:, 1:] for key in timed}
    )
    close(whole, parts)


@pytest.mark.parametrize("name", EXACT)
def test_moments_are_those_of_the_draws(name):
    """4.5 standard errors; up to 36 numbers a model."""
    model, data, count = MODELS[name](), data_of(MODELS[name]()), 4000
    forecast = model.forecast(
        steps=2, given=future_given(model, 2), samples=count, seed=0, lengths=LENGTHS, **data
    )
    for key, mean in forecast.mean.items():
        draws, sd = forecast.draws[key], forecast.sd[key]
        assert ((draws.mean(0) - mean).abs() < 4.5 * sd / math.sqrt(count)).all()
        squares = (draws - mean).square()
        error = squares.std(0) / math.sqrt(count)
        assert ((squares.mean(0) - sd.square()).abs() < 4.5 * error + 1e-12).all()


def test_gaps_that_p_reads_are_marginalised():
    """p reads its own past; a gap is an unknown, which the joint Gaussian integrates out."""
    model = Model(
        {
            "z[t]": Normal(1),
            "x[0]": Normal(1, scale=1.5, learned=True),
            "x[t] | x[t-1], z[t]": Normal(1, scale=0.5, net=linear(bias=False)),
        },
        {"z[t] | x[t]": Normal()},
    ).double()
    fill(model, {"x[t] | x[t-1], z[t]": [[0.8], [0.7]]})
    x = np.array([0.4, np.nan, 1.2, np.nan, np.nan])
    lag, steps = 0.8, 7
    variance, noise = 1.5**2, 0.5**2 + 0.7**2
    covariance = np.zeros((steps, steps))
    for t in range(steps):
        variance = variance if t == 0 else lag**2 * variance + noise
        for s in range(t, steps):
            covariance[s, t] = covariance[t, s] = lag ** (s - t) * variance
    known, wanted = [0, 2], [5, 6]
    gain = np.linalg.solve(covariance[np.ix_(known, known)], covariance[np.ix_(known, wanted)]).T
    forecast = model.forecast(steps=2, x=x[None, :, None], samples=200000, seed=0)
    mean = gain @ x[known]
    assert model.log_evidence(x=x[None, :, None]).method == "exact"
    evidence = multivariate_normal(np.zeros(2), covariance[np.ix_(known, known)])
    close(model.log_evidence(x=x[None, :, None]).value, [evidence.logpdf(x[known])])
    after = covariance[np.ix_(wanted, wanted)] - gain @ covariance[np.ix_(known, wanted)]
    assert forecast.method == "exact"
    close(forecast.mean["x"][0, :, 0], mean)
    close(forecast.sd["x"][0, :, 0], np.sqrt(np.diag(after)))
    draws = forecast.draws["x"][:, 0, :, 0].numpy()
    # 4.5 standard errors of a variance, and of a mean.
    error = 4.5 / math.sqrt(len(draws))
    np.testing.assert_allclose(np.cov(draws.T), after, atol=error * math.sqrt(2) * after.max())
    np.testing.assert_allclose(draws.mean(0), mean, atol=error * math.sqrt(after.max()))


def classes_with_memory():
    """States that read the class observed before them."""
    torch.manual_seed(0)
    model = Model(
        {"s[t] | s[t-1], v[t-1]": OneHot(2), "v[t] | s[t]": OneHot(3)}, {"s[t] | v[t]": OneHot()}
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1)
    return model


def test_missing_classes_that_p_reads_are_summed_over():
    model = classes_with_memory()
    gaps = torch.tensor([[0, -1, 2, -1, 1]])
    every = []
    for a, b in itertools.product(range(3), repeat=2):
        filled = gaps.clone()
        filled[0, 1], filled[0, 3] = a, b
        values = model.log_evidence(v=filled).value, model.forecast(steps=1, v=filled)
        every.append((*values, model.smooth(v=filled).probs["s"]))
    logs = torch.cat([value for value, *_ in every])
    close(model.log_evidence(v=gaps).value, [logs.logsumexp(0)])
    means = torch.stack([forecast.mean["v"][0, 0] for _, forecast, _ in every])
    close(model.forecast(steps=1, v=gaps).mean["v"][0, 0], logs.softmax(0) @ means)
    states = (logs.softmax(0)[:, None, None, None] * torch.stack([p for *_, p in every])).sum(0)
    close(model.smooth(v=gaps).probs["s"], states)
    close(model.filter(v=gaps).probs["s"][:, -1], states[:, -1])


def test_a_forecast_of_two_steps_sums_over_the_first():
    model = classes_with_memory()
    v = torch.tensor([[0, 1, 2, 2]])
    two = model.forecast(steps=2, v=v, samples=20000, seed=0)
    first = two.mean["v"][0, 0]
    after = [
        model.forecast(steps=1, v=torch.cat([v, torch.tensor([[k]])], 1), samples=1, seed=0)
        for k in range(3)
    ]
    close(two.mean["v"][0, 1], first @ torch.stack([one.mean["v"][0, 0] for one in after]))
    close(torch.stack([two.log_prob(v=[[k, -1]])[0] for k in range(3)]).exp(), first)
    error = (first * (1 - first) / 20000).sqrt()
    assert ((two.draws["v"][:, 0, 0].mean(0) - first).abs() < 4.5 * error).all()
    for k in range(3):  # draws of the second step given the first
        rows = two.draws["v"][:, 0, 0, k] == 1
        mean = after[k].mean["v"][0, 0]
        error = (mean * (1 - mean) / rows.sum()).sqrt()
        assert ((two.draws["v"][rows, 0, 1].mean(0) - mean).abs() < 4.5 * error).all()


def test_a_known_latent_of_the_past_is_known():
    """States passed as data: the forecast follows from the last one alone."""
    model = hidden_markov()
    tables, x = Paths.of(model), series(4, holes=False)
    states = np.array([[0, 2, 1, 1]])
    forecast = model.forecast(steps=1, x=x[None], s=states, samples=10, seed=0)
    probs = tables.move[1]
    close(forecast.mean["x"][0, 0, 0], probs @ tables.mean)


def test_the_same_seed_gives_the_same_draws():
    model, _ = local_level()
    x = series()[None]
    a, b, c = (model.forecast(steps=2, x=x, seed=seed).draws["x"] for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_labels_are_forecast_as_classes():
    """An observed class: its mean is its probabilities, its draws are one-hot."""
    model, data = MODELS["two chains"](), data_of(MODELS["two chains"]())
    labels = data["v"].argmax(-1)
    a = model.forecast(steps=2, x=data["x"], v=labels, samples=50, seed=0)
    b = model.forecast(steps=2, x=data["x"], v=data["v"], samples=50, seed=0)
    close(a.mean["v"], b.mean["v"])
    close(a.mean["v"].sum(-1), np.ones((N, 2)))
    assert set(a.draws["v"].unique().tolist()) == {0.0, 1.0}
    future = np.array([[0, 2], [1, 1], [2, -1]])
    same = a.log_prob(x=np.zeros((N, 2, 1)), v=future)
    vectors = np.eye(3)[future]
    vectors[2, 1] = np.nan
    close(same, b.log_prob(x=np.zeros((N, 2, 1)), v=vectors))


def test_joint_draws_of_classes_follow_the_exact_density():
    """20,000 draws of two steps after rows of different lengths; 8 shares at 4.5 errors."""
    torch.manual_seed(3)
    model = Model(
        {
            "s[0]": OneHot(3, learned=True),
            "s[t] | s[t-1]": OneHot(3),
            "x[t] | s[t]": OneHot(2),
        },
        {"s[t] | x[t]": OneHot()},
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1)
    x = torch.randint(0, 2, (2, 7))
    n = 20_000
    forecast = model.forecast(steps=2, x=x, lengths=[7, 4], samples=n, seed=0)
    drawn = forecast.draws["x"].argmax(-1)
    for a, b in itertools.product((0, 1), repeat=2):
        exact = forecast.log_prob(x=torch.tensor([[a, b], [a, b]])).exp()
        share = ((drawn[..., 0] == a) & (drawn[..., 1] == b)).double().mean(0)
        assert ((share - exact).abs() < 4.5 * (exact * (1 - exact) / n).sqrt()).all()


@pytest.mark.parametrize("family", [Normal, OneHot])
def test_a_first_step_with_a_rule_of_its_own_changes_no_later_step(family):
    """x[0] says nothing about the state, so it is as if it were missing under the usual rule."""
    own = Normal(2, scale=5.0) if family is Normal else OneHot(2, learned=True)
    chain = {"s[0]": OneHot(3, learned=True), "s[t] | s[t-1]": OneHot(3), "x[t] | s[t]": family(2)}
    torch.manual_seed(0)
    usual, first = (
        Model(p, {"s[t] | x[t]": OneHot()}).double() for p in (chain, chain | {"x[0]": own})
    )
    with torch.no_grad():
        for parameter in usual.parameters():
            parameter.normal_(0, 1)
    first.load_state_dict(usual.state_dict(), strict=False)
    x = np.random.default_rng(0).normal(size=(2, 6, 2))
    x = np.eye(2)[(x[..., 0] > 0).astype(int)] if family is OneHot else x
    without = x.copy()
    without[:, 0] = np.nan
    for lengths in ([6, 6], [6, 2]):
        found = first.forecast(steps=3, x=x, lengths=lengths, samples=1, seed=0)
        expected = usual.forecast(steps=3, x=without, lengths=lengths, samples=1, seed=0)
        assert found.method == "exact"
        close(found.mean["x"], expected.mean["x"])
        close(found.sd["x"], expected.sd["x"])
    x[0, 0] = x[0, 3] = without[0, 3] = np.nan
    filled, expected = (
        model.impute(x=value, samples=1, seed=0) for model, value in ((first, x), (usual, without))
    )
    close(filled.mean["x"][0, 3], expected.mean["x"][0, 3])
    close(filled.sd["x"][0, 3], expected.sd["x"][0, 3])
    if family is Normal:
        close(filled.mean["x"][0, 0], [0, 0])
        close(filled.sd["x"][0, 0], [5, 5])
