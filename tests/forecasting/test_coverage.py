"""Intervals of forecasts contain the share of futures that they promise.

Past and future are drawn from p together, one future per row, so that rows are independent and a
share of n rows has the standard error √(level (1 − level) / n). Nine numbers a model at 4.5
standard errors fail by chance once in 16,000 models.
"""

import math

import numpy as np
import pytest
import torch
from exact_models import MODELS
from series_models import fill, gain, hidden_markov, local_level, local_trend, spread

from aevb import Model, Normal, OneHot, Poisson, linear

PAST, AHEAD, LEVELS = 10, 3, (0.5, 0.8, 0.95)
EXACT = {
    "level": lambda: local_level()[0],
    "trend": lambda: local_trend()[0],
    "hidden Markov": hidden_markov,
    "mixture of state spaces": MODELS["mixture of state spaces"],
    "two columns": MODELS["state space"],
    "states and factors": MODELS["hidden Markov over factor analysers"],
}


def volatility():
    """Returns whose log-variance is a random walk: p is not Gaussian. q is p's own transition."""
    model = Model(
        {
            "z[0]": Normal(1, scale=0.5, learned=True),
            "z[t] | z[t-1]": Normal(1, scale=0.4, net=linear(bias=False)),
            "x[t] | z[t]": Normal(1, net=linear()),
        },
        {
            "z[0]": Normal(scale=0.5, learned=True),
            "z[t] | z[t-1]": Normal(scale=0.4, net=linear(bias=False)),
        },
    ).double()
    fill(model, {"z[t] | z[t-1]": [[0.9]]})
    with torch.no_grad():
        blocks = model.factors["p(x[t]|z[t])"].net.blocks
        blocks.weights["z[t]"].copy_(torch.tensor([[0.0], [1.5]]))  # the mean, and the raw scale
        blocks.bias.copy_(torch.tensor([0.0, -0.5]))
    return model


def switching():
    """A level and a state that shifts its observations: no exact sum over the paths of states."""
    torch.manual_seed(0)
    model = Model(
        {
            "z[0]": Normal(1, scale=1.0, learned=True),
            "z[t] | z[t-1]": Normal(1, scale=0.6, net=linear(bias=False)),
            "s[t] | s[t-1]": OneHot(2),
            "x[t] | z[t], s[t]": Normal(1, scale=0.8, net=linear()),
        },
        {
            "z[0] | x[0]": Normal(scale=1.2 * spread(1.0, 0.8), net=linear(bias=False)),
            "z[t] | z[t-1], x[t]": Normal(scale=1.2 * spread(0.6, 0.8), net=linear(bias=False)),
            "s[t]": OneHot(learned=True),
        },
    ).double()
    after = gain(0.6, 0.8)
    fill(
        model,
        {
            "z[t] | z[t-1]": [[1.0]],
            "z[0] | x[0]": [[gain(1.0, 0.8)]],
            "z[t] | z[t-1], x[t]": [[1 - after], [after]],
        },
    )
    return model


PARTICLES = {"volatility": volatility, "switching": switching, **EXACT}
del PARTICLES["mixture of state spaces"], PARTICLES["two columns"], PARTICLES["states and factors"]


def covered(model, n, **options):
    """Return the shares of futures within the intervals, [levels, steps], all entries together."""
    drawn = model.sample(n, steps=PAST + AHEAD, seed=1)["x"]
    forecast = model.forecast(steps=AHEAD, x=drawn[:, :PAST], seed=2, **options)
    future = drawn[:, PAST:]
    found = []
    for level in LEVELS:
        low, high = forecast.interval(level)["x"]
        # Entries of one row are not independent, so count only the first.
        inside = (low <= future) & (future <= high)
        found.append(inside[..., 0].double().mean(0))
    return torch.stack(found), forecast


def check(shares, n, bias=0.0):
    for level, each in zip(LEVELS, shares, strict=True):
        error = math.sqrt(level * (1 - level) / n)
        assert ((each - level).abs() < 4.5 * error + bias).all(), (level, each)


@pytest.mark.parametrize("name", EXACT)
def test_exact_intervals(name):
    n = 4000
    shares, forecast = covered(EXACT[name](), n, samples=1)
    assert forecast.method == "exact"
    check(shares, n)


@pytest.mark.parametrize("name", PARTICLES)
def test_intervals_by_particles(name, monkeypatch):
    """Quantiles of 400 draws: the end of a 95 % interval lies at 0.975 ± 1/400 of the mass."""
    monkeypatch.setattr("aevb.forecasting.particles.LEAST", 400)
    n = 600
    shares, forecast = covered(PARTICLES[name](), n, samples=400, method="particles")
    assert forecast.method == "particles"
    check(shares, n, 0.006)


def test_intervals_of_the_draws_of_an_exact_forecast():
    """Counts of a hidden Markov model: their intervals hold at least their share."""
    torch.manual_seed(3)
    model = Model(
        {"s[t] | s[t-1]": OneHot(2), "x[t] | s[t]": Poisson(1)}, {"s[t] | x[t]": OneHot()}
    ).double()
    with torch.no_grad():
        model.factors["p(x[t]|s[t])"].net.blocks.weights["s[t]"].copy_(torch.tensor([[1.0, 3.0]]))
    n = 600
    shares, forecast = covered(model, n, samples=400)
    assert forecast.method == "exact"
    assert not forecast.exact_quantiles("x")
    for level, each in zip(LEVELS, shares, strict=True):
        assert (each > level - 4.5 * math.sqrt(level * (1 - level) / n)).all()


@pytest.mark.parametrize("name", ["level", "hidden Markov"])
def test_the_score_prefers_the_true_model(name):
    """Log densities of the future average to minus the entropy: the truth scores highest."""
    model = EXACT[name]()
    drawn = model.sample(500, steps=PAST + AHEAD, seed=3)["x"]

    def score(judged):
        forecast = judged.forecast(steps=AHEAD, x=drawn[:, :PAST], samples=1, seed=0)
        return forecast.log_prob(x=drawn[:, PAST:])

    truth, other = score(model), EXACT[name]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    better = truth - score(other)
    assert float(better.mean()) > 4 * float(better.std()) / math.sqrt(500)
    assert np.isfinite(truth.numpy()).all()
