"""Digits of exact posteriors and evidence where sensors are nearly alike and almost without noise,
against 80 decimal digits.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from aevb import Model, MultivariateNormal, Normal, linear
from aevb.evidence.filtering import gaussian_posterior
from aevb.evidence.gaussian_belief import Rule
from aevb.evidence.square_root_belief import completed

SENSORS = {
    "one latent, twice the same": [[1.0], [1.0]],
    "one latent, nearly the same": [[1.0], [1.0001], [0.9999]],
    "two latents, two sensors": [[1.0, 1.0], [1.0, 1.0 + 1e-6]],
    "two latents, three sensors": [[1.0, 1.0], [1.0, 1.0 + 1e-6], [1.0, 1.0 - 1e-6]],
    "two latents, one sensor": [[1.0, 1.0]],
    "three latents, two sensors": [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0 + 1e-7]],
}
NOISES = [1e-2, 1e-6, 1e-8, 1e-10, 1e-12]


def declared(sensors, noise, apart=False):
    """z ~ N(0, I), and the sensors as one variable or each as one of its own."""
    rows = [[row] for row in sensors] if apart else [sensors]
    p = {"z": Normal(len(sensors[0]))} | {
        f"x{i} | z": Normal(len(row), linear(bias=False), scale=noise) for i, row in enumerate(rows)
    }
    names = [f"x{i}" for i in range(len(rows))]
    model = Model(p, {f"z | {', '.join(names)}": Normal()}).double()
    with torch.no_grad():
        for name, row in zip(names, rows, strict=True):
            model.factors[f"p({name}|z)"].net.blocks.weights["z"].copy_(
                torch.tensor(row, dtype=torch.float64)
            )
    return model, names


def truth(sensors, noise, x):
    """The posterior's means and standard deviations, and the log evidence."""
    with mpmath.workdps(80):
        A, X, variance = mpmath.matrix(sensors), mpmath.matrix(x), mpmath.mpf(noise) ** 2
        covariance = (mpmath.eye(A.cols) + A.T * A / variance) ** -1
        mean, whole = covariance * A.T * X / variance, A * A.T + variance * mpmath.eye(A.rows)
        evidence = (
            -(
                A.rows * mpmath.log(2 * mpmath.pi)
                + mpmath.log(mpmath.det(whole))
                + (X.T * whole**-1 * X)[0]
            )
            / 2
        )
        return (
            [float(v) for v in mean],
            [float(mpmath.sqrt(covariance[i, i])) for i in range(A.cols)],
            float(evidence),
        )


def data(sensors, noise):
    rng = np.random.default_rng(0)
    return (
        np.array(sensors) @ rng.normal(size=len(sensors[0])) + noise * rng.normal(size=len(sensors))
    ).tolist()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("case", SENSORS)
def test_nearly_collinear_sensors_keep_the_digits_that_float64_has(case, noise, apart):
    """A mean of order 1 is rounded by 1e-16, which is 1e-16 / noise of a standard deviation; the
    other digits are right.
    """
    sensors = SENSORS[case]
    x = data(sensors, noise)
    mean, sd, evidence = truth(sensors, noise, x)
    model, names = declared(sensors, noise, apart)
    given = (
        {"x0": torch.tensor([x], dtype=torch.float64)}
        if not apart
        else {
            name: torch.tensor([[value]], dtype=torch.float64)
            for name, value in zip(names, x, strict=True)
        }
    )
    rounding = 20 * 2.3e-16 / noise
    found = model.posterior(**given, method="exact")["z"]
    np.testing.assert_allclose(found.stddev[0].detach(), sd, rtol=max(1e-8, rounding))
    assert (np.abs(found.mean[0].detach().numpy() - mean) / sd).max() < 1e-9 + rounding
    joint = gaussian_posterior(model, model.prepare(**given), ["z"])
    np.testing.assert_allclose(joint.stddev[0].detach(), sd, rtol=max(1e-8, rounding))
    assert (
        abs(float(model.log_evidence(**given).value) - evidence) < 1e-9 * abs(evidence) + rounding
    )


def test_digits_that_float64_lacks_are_said():
    model, _ = declared(SENSORS["two latents, three sensors"], 1e-14)
    with pytest.warns(
        UserWarning,
        match=r"noise of an observed variable is 5e-15 of its spread .* off by 4e-02 of their "
        r"standard deviations",
    ):
        _ = model.posterior(x0=torch.ones(1, 3), method="exact")["z"]
    with pytest.warns(UserWarning, match="loses digits"):
        model.log_evidence(x0=torch.ones(1, 3))


def test_values_far_from_zero_lose_digits_too():
    """The noise is far above the rounding of the latent's spread, but not above that of the
    values.
    """
    model, _ = declared([[1.0]], 1e-4)
    with pytest.warns(UserWarning, match="loses digits"):
        _ = model.posterior(x0=torch.full((1, 1), 1e9, dtype=torch.float64), method="exact")["z"]


def test_precise_sensors_after_noisy_ones_keep_their_digits():
    """The order of sensors whose noises differ by 10¹⁰ changes nothing."""
    model = Model(
        {"z": Normal(2), "x | z": Normal(3, linear(bias=False), scale="learned")},
        {"z | x": Normal()},
    ).double()
    factor, scale = model.factors["p(x|z)"], [1.0, 1e-10, 1e-10]
    rows = [[1.0, -1.0], [1.0, 1.0], [1.0, 1.0]]
    with torch.no_grad():
        factor.net.blocks.weights["z"].copy_(torch.tensor(rows, dtype=torch.float64))
        next(iter(factor.vectors.values())).copy_(
            torch.tensor(scale, dtype=torch.float64).expm1().log()
        )
    scale = (
        factor.distribution(torch.zeros(1, 3, dtype=torch.float64))
        .scale.detach()
        .reshape(-1)
        .tolist()
    )
    with mpmath.workdps(80):
        A = mpmath.matrix(rows)
        precision = mpmath.eye(2)
        for i, s in enumerate(scale):
            precision += A[i, :].T * A[i, :] / mpmath.mpf(s) ** 2
        exact = precision**-1
        difference = float(mpmath.sqrt(exact[0, 0] + exact[1, 1] - 2 * exact[0, 1]))
    joint = (
        gaussian_posterior(model, model.prepare(x=torch.zeros(1, 3)), ["z"])
        ._unbroadcasted_scale_tril[0]
        .detach()
    )
    assert abs(float((joint[0] - joint[1]).norm()) / difference - 1) < 1e-12


def test_missing_entries_follow_the_known_ones_through_correlated_noise():
    """Given one entry of a Gaussian vector, the other has the conditional distribution of the
    textbook.
    """
    noise = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)[None, None]
    rule = Rule({}, torch.tensor([[[1.0, 3.0]]], dtype=torch.float64), noise)
    found = completed(
        rule, torch.tensor([[[5.0, 0.0]]], dtype=torch.float64), torch.tensor([[[True, False]]])
    )
    torch.testing.assert_close(
        found.offset[0, 0], torch.tensor([5.0, 3.0 + 0.6 / 2.0 * 4.0], dtype=torch.float64)
    )
    torch.testing.assert_close(
        found.noise[0, 0],
        torch.tensor([[0.0, 0.0], [0.0, 1.0 - 0.6**2 / 2.0]], dtype=torch.float64),
    )


def test_correlated_noise_and_missing_entries_agree_with_the_joint_gaussian():
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(2), "x | z": MultivariateNormal(3, linear(), covariance="shared")},
        {"z | x": Normal()},
    ).double()
    factor = model.factors["p(x|z)"]
    x = torch.tensor([[0.3, float("nan"), -1.0]], dtype=torch.float64)
    found = model.posterior(x=x, method="exact")["z"]
    with torch.no_grad():
        A, b = factor.net.blocks.weights["z"][[0, 2]], factor.net.blocks.bias[[0, 2]]
        root = factor.distribution(
            torch.zeros(1, 3, dtype=torch.float64)
        )._unbroadcasted_scale_tril.reshape(3, 3)
        precision = torch.linalg.inv((root @ root.T)[[0, 2]][:, [0, 2]])
        covariance = torch.linalg.inv(torch.eye(2, dtype=torch.float64) + A.T @ precision @ A)
        torch.testing.assert_close(found.covariance_matrix[0], covariance)
        torch.testing.assert_close(found.mean[0], covariance @ A.T @ precision @ (x[0, [0, 2]] - b))
