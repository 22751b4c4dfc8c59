"""Maximum likelihood of the zoo's time series models: raw units, variances of zero, speed."""

import re
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.functional import softplus

from aevb import Deterministic, Model, Normal, fit, linear, mle, mlp
from aevb.data import standardise
from aevb.training.coordinates import LEAST, SMALL, _scale_factor
from aevb.training.maximum_likelihood import constant_functions
from aevb.zoo import zoo

STEPS = 40
TIMES = np.arange(STEPS)
TOGETHER = np.minimum(TIMES[:, None], TIMES[None, :])


def evaluations(run):
    return next(
        int(found[1])
        for row in run.rows
        if (found := re.search(r"\((\d+) evaluations\)", row.get("note", "")))
    )


def noisy_walk(seed=0):
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.normal(size=STEPS)) + rng.normal(size=STEPS)


def log_density(y, covariance):
    """log N(y; 0, covariance), by a Cholesky factor: scipy calls such a covariance singular."""
    root = np.linalg.cholesky(covariance)
    white = np.linalg.solve(root, y)
    return -0.5 * white @ white - np.log(np.diag(root)).sum() - 0.5 * len(y) * np.log(2 * np.pi)


def variances(model):
    return [
        softplus(factor.vectors["scale"]).square().item()
        for key, factor in model.factors.items()
        if key.startswith("p") and "scale" in factor.vectors
    ]


@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e5])
def test_raw_units_need_no_preparation(unit):
    """The optimum and the number of evaluations do not depend on the unit of the data."""
    x = unit * (500 + noisy_walk())[None, :, None]
    model = zoo["local_level"](start=1e4 * unit).double()
    run = fit(model, {"x": x}, schedule=mle(), progress=False)
    walk, noise = np.array(variances(model)) / unit**2
    found = minimize(
        lambda logs: (
            -log_density(
                x[0, :, 0] / unit,
                1e8 + np.exp(logs[0]) * TOGETHER + np.exp(logs[1]) * np.eye(STEPS),
            )
        ),
        [0.0, 0.0],
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-9},
    )
    evidence = run.history["evidence"][-1] + STEPS * np.log(unit)
    assert evidence == pytest.approx(-found.fun, abs=1e-5)
    np.testing.assert_allclose([walk, noise], np.exp(found.x), rtol=0.01)
    assert evaluations(run) <= 20


def test_a_variance_of_zero_is_reached_in_a_few_steps():
    """A walk without trend has its highest evidence with a slope that does not change."""
    y = noisy_walk(1)
    model = zoo["local_trend"](start=100.0).double()
    run = fit(model, {"x": y[None, :, None]}, schedule=mle(), progress=False)
    walk, slope, noise = variances(model)
    assert slope < 1e-6
    fixed = 100.0**2 * (1 + np.outer(TIMES, TIMES))
    expected = log_density(y, fixed + walk * TOGETHER + noise * np.eye(STEPS))
    # No other slope is better: the optimum is that of the two other variances.
    best = minimize(
        lambda logs: (
            -log_density(
                y,
                fixed + np.exp(logs[0]) * TOGETHER + np.exp(logs[1]) * np.eye(STEPS),
            )
        ),
        np.log([walk, noise]),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-9},
    )
    assert run.history["evidence"][-1] == pytest.approx(expected, abs=1e-5)
    assert run.history["evidence"][-1] == pytest.approx(-best.fun, abs=1e-5)
    assert run.rows[-2]["kind"] == "converged"
    assert evaluations(run) <= 40


def test_the_factor_of_a_scale_is_smooth_and_passes_through_zero():
    """exp(x), then a line with the same value and slope; the slopes equal finite differences."""
    x = np.array([3.0, 0.0, -1.0, -2.0, np.log(SMALL), -2.6, -3.1, -3.4, -4.0, -8.0])
    factor, slope = _scale_factor(x)
    np.testing.assert_allclose(factor[:4], np.exp(x[:4]))
    assert factor[4] == pytest.approx(SMALL)
    step = 1e-6
    after, before = (_scale_factor(x + sign * step)[0] for sign in (1, -1))
    np.testing.assert_allclose(slope, (np.log(after) - np.log(before)) / (2 * step), rtol=1e-4)
    middle = np.log(SMALL) - 1.0
    np.testing.assert_allclose(  # the same scales on both sides of zero
        _scale_factor(np.array([middle - 0.3]))[0], _scale_factor(np.array([middle + 0.3]))[0]
    )
    assert _scale_factor(np.array([middle]))[0] == LEAST


def test_functions_of_the_data_are_computed_once_if_they_have_no_parameters():
    torch.manual_seed(0)
    model = Model(
        p={
            "a[t] | x[t-1]": Deterministic(2, net=linear(bias=False, fixed={"x[t-1]": [[1], [2]]})),
            "b[t] | b[t-1], a[t]": Deterministic(
                2, net=linear(bias=False, fixed={"b[t-1]": 0.5, "a[t]": 1})
            ),
            "c[t] | b[t]": Deterministic(3, net=mlp(4)),
            "d[t] | c[t]": Deterministic(3, net=linear(bias=False, fixed={"c[t]": 1})),
            "x[t] | b[t], d[t]": Normal(1, scale="learned"),
        },
        q={},
    ).double()
    x = np.random.default_rng(0).normal(size=(3, 5, 1))
    found = constant_functions(model, model.prepare(x=x))
    assert set(found) == {"a", "b"}  # c has parameters, and d reads c
    before = np.concatenate([np.zeros((3, 1, 1)), x[:, :-1]], 1)
    a = before * [1, 2]
    a[:, 0] = 0
    b = np.zeros((3, 5, 2))
    for t in range(5):
        b[:, t] = 0.5 * (b[:, t - 1] if t else 0) + a[:, t]
    np.testing.assert_allclose(found["a"].transpose(0, 1), a)
    np.testing.assert_allclose(found["b"].transpose(0, 1), b)


def test_an_autoregression_reaches_least_squares():
    """Given the values before the series, the optimum is known in closed form."""
    rng, lags = np.random.default_rng(0), 3
    x = np.zeros(200)
    for t in range(3, 200):
        x[t] = 30 + 0.5 * x[t - 1] + 0.2 * x[t - 3] + rng.normal()
    past = np.stack([x[lags - k - 1 : -k - 1] for k in range(lags)], 1)
    design = np.column_stack([np.ones(len(past)), past])
    weights, squares, *_ = np.linalg.lstsq(design, x[lags:], rcond=None)
    variance = squares[0] / len(past)
    model = zoo["ar"](lags=lags, start="given").double()
    data = {"x": x[None, lags:, None], "before": x[:lags][::-1].copy()[None]}
    run = fit(model, data, schedule=mle(), progress=False)
    expected = -0.5 * len(past) * (np.log(2 * np.pi * variance) + 1)
    assert run.history["evidence"][-1] == pytest.approx(expected, abs=1e-4)
    factor = model.factors["p(x[t]|past[t])"]
    np.testing.assert_allclose(
        factor.net.blocks.weights["past[t]"].detach()[0], weights[1:], atol=1e-3
    )
    assert evaluations(run) <= 60


def test_data_far_outside_a_prior_are_noted():
    y = 1e9 * noisy_walk()[None, :, None]
    for model, notes in (
        (zoo["local_trend"](), 1),
        (zoo["local_level"](start=1e11), 0),
        (zoo["ar"](), 0),
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run = fit(model.double(), {"x": y}, schedule=mle(), steps=2, progress=False)
        found = [row["note"] for row in run.rows if row.get("kind") == "narrow start"]
        assert len(found) == notes
        assert [str(one.message) for one in warned] == found
        if notes:
            assert found[0].startswith(
                "p declares level[0] ~ N(0, 1e+06²), slope[0] ~ N(0, 1e+06²). Fixed weights tie "
                "this to x, which reaches "
            )
            assert "Standardise x, or declare a larger scale: Normal(…, scale=" in found[0]


ZEROS = (
    "p reads the values of x before its first step as 0, but x has the mean 49.94 and the standard "
    "deviation 0.787. This distorts the coefficients and the forecasts. Train on x = "
    "aevb.data.standardise(x), whose mean is 0 (on the command line, --prepare standardise); or "
    'give the values, as zoo.ar(start="given") does.'
)


@pytest.mark.parametrize(
    ("model", "mean", "count"),
    [
        (zoo["ar"](lags=3), 50.0, 1),
        (zoo["ar"](lags=3), 0.0, 0),
        (Model({"x[t] | x[t-1]": Normal(1, scale="learned")}, {}), 50.0, 1),
        (
            Model({"x[0]": Normal(1, scale=1e3), "x[t] | x[t-1]": Normal(1, scale="learned")}, {}),
            50.0,
            0,
        ),
        (zoo["switching"](u=0, autoregressive=True), 50.0, 1),
    ],
)
def test_zeros_before_a_series_far_from_0_are_noted(model, mean, count):
    x = mean + np.random.default_rng(0).standard_normal((1, 40, 1))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = fit(model.double(), {"x": x}, schedule=mle(), steps=1, progress=False)
    found = [row["note"] for row in run.rows if row.get("kind") == "zeros before the series"]
    assert found == [ZEROS] * count
    assert {str(one.message) for one in warned} >= set(found)


def test_a_standardised_autoregression_is_near_the_conditional_fit():
    """The zeros are then the mean: the coefficients differ little from those given the start."""
    rng = np.random.default_rng(1)
    x = np.zeros(200)
    for t in range(2, 200):
        x[t] = 0.5 * x[t - 1] + 0.2 * x[t - 2] + rng.standard_normal()
    x = 100 + x
    rows = np.stack([np.ones(198), x[1:-1], x[:-2]], 1)
    wanted = np.linalg.lstsq(rows, x[2:], rcond=None)[0][1:]
    model = zoo["ar"](lags=2, seed=0).double()
    fit(model, {"x": standardise(x.reshape(1, -1, 1))}, progress=False)
    weights = model.factors["p(x[t]|past[t])"].net.blocks.weights["past[t]"]
    np.testing.assert_allclose(weights.detach()[0], wanted, atol=0.02)


def test_a_series_without_axes_is_refused_with_the_call_to_write():
    with pytest.raises(ValueError, match=re.escape("write x.reshape(1, 40, 1).")):
        fit(zoo["local_level"](), {"x": noisy_walk()}, schedule=mle())


SHORT = (
    "Row 0 (from 0) has 10 known values, fewer than the 13 unknown starting values of p (level[0] "
    "has 1, slope[0] has 1, season[0] has 11): it does not show every season or slope once, and "
    "forecasts are arbitrary. Use a longer series, or a model with fewer of them."
)


def test_a_season_that_was_not_seen_once_is_noted():
    x = np.random.default_rng(0).standard_normal((1, 24, 1))
    model = zoo["seasonal"](12, seed=0).double()
    run = fit(model, {"x": x[:, :10]}, steps=1, progress=False)
    assert SHORT in run.notes
    assert model.forecast(steps=1, x=x[:, :10], seed=0).notes == (SHORT,)
    run = fit(model, {"x": x}, steps=1, progress=False)
    assert not any("starting values" in note for note in run.notes)
    gappy = np.where(np.arange(24)[None, :, None] % 2 == 0, x, np.nan)
    assert "12 known values" in model.forecast(steps=1, x=gappy, seed=0).notes[0]
    assert model.forecast(steps=1, x=x, seed=0).notes == ()
