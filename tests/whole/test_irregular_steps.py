"""Irregular steps: the time since the last step is a given input, `dt[t]`."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from aevb import GRU, Deterministic, Model, Normal, fit, linear, mle, mlp

N, T = 40, 12


def irregular(seed: int = 0) -> dict[str, np.ndarray]:
    """A drift of 0.5 per unit of time, observed with noise at random times."""
    random = np.random.default_rng(seed)
    dt = random.exponential(1.0, (N, T, 1))
    level = 0.5 * dt.cumsum(1) + 0.1 * random.normal(size=(N, T, 1)).cumsum(1)
    x = level + 0.2 * random.normal(size=(N, T, 1))
    return {name: value.astype(np.float32) for name, value in (("x", x), ("dt", dt))}


def drift() -> Model:
    torch.manual_seed(0)
    return Model(
        p={
            "z[t] | z[t-1], dt[t]": Normal(1, net=linear(), scale="learned"),
            "x[t] | z[t]": Normal(1, net=linear(), scale="learned"),
        },
        q={"z[t] | z[t-1], x[t], dt[t]": Normal(net=linear())},
        given={"dt": 1},
    )


def test_the_exact_evidence_with_time_differences_is_that_of_the_joint_gaussian():
    model, data = drift().double(), irregular()
    found = model.log_evidence(**data)
    assert found.method == "exact"
    block = model.factors["p(z[t]|z[t-1],dt[t])".replace(",", ", ")].net.blocks
    emission = model.factors["p(x[t]|z[t])"]
    a, b = (float(block.weights[name].detach()) for name in ("z[t-1]", "dt[t]"))
    c, bias = float(emission.net.blocks.weights["z[t]"].detach()), float(block.bias.detach())
    offset = float(emission.net.blocks.bias.detach())
    scales = [
        float(torch.nn.functional.softplus(factor.vectors["scale"].detach()))
        for factor in (model.factors["p(z[t]|z[t-1], dt[t])"], emission)
    ]
    powers = np.array([[a ** (t - s) if s <= t else 0.0 for s in range(T)] for t in range(T)])
    covariance = c**2 * scales[0] ** 2 * powers @ powers.T + scales[1] ** 2 * np.eye(T)
    for row in range(5):
        mean = offset + c * powers @ (b * data["dt"][row, :, 0].astype(float) + bias)
        expected = multivariate_normal(mean, covariance).logpdf(data["x"][row, :, 0])
        np.testing.assert_allclose(float(found.value[row]), expected, rtol=1e-9)


def test_maximum_likelihood_finds_a_drift_per_unit_of_time():
    model, data = drift(), irregular()
    fit(model, data, schedule=mle())
    # The rise of x over a gap of 3 units of time, against a gap of 1.
    with torch.no_grad():
        gaps = np.array([[1.0]] * 4 + [[3.0]], np.float32)
        drawn = model.sample(4000, steps=5, dt=gaps, seed=0)["x"]
    rise = (drawn[:, 4] - drawn[:, 3]).mean()
    assert abs(float(rise) - 1.5) < 0.1


@pytest.mark.slow
def test_a_recurrent_model_trains_and_samples_with_time_differences():
    torch.manual_seed(0)
    model = Model(
        p={
            "e[t] | dt[t]": Deterministic(4, net=mlp(8)),
            "h[t] | h[t-1], e[t], x[t-1]": GRU(16),
            "z[t] | h[t]": Normal(2),
            "x[t] | h[t], z[t]": Normal(1),
        },
        q={"z[t] | h[t], x[t]": Normal()},
        given={"dt": 1},
    )
    data = irregular()
    run = fit(model, data, steps=600, batch=20, lr=1e-2, seed=0)
    window = fit(model, data, steps=60, batch=20, lr=1e-3, seed=0, window=4, compile=False)
    assert run.history["elbo"][-1] > run.history["elbo"][0] + 5
    assert np.isfinite(window.history["elbo"]).all()
    short, long = (
        model.sample(500, steps=6, dt=np.full((6, 1), gap, np.float32), seed=1)["x"]
        for gap in (0.3, 2)
    )
    assert float((long[:, -1] - long[:, 0]).mean()) > float((short[:, -1] - short[:, 0]).mean()) + 1
