"""Digits of exact Gaussian recursions in time, against the same recursions in 80 decimal digits:
diffuse starts, little noise, mixed scales.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from aevb import Model, Normal, linear, zoo
from aevb.declare.distributions import inverse_softplus
from aevb.evidence.exact import exact_evidence
from aevb.evidence.filtering import Filter
from aevb.evidence.gaussian_chain import Chain, Smoother

STEPS = 40
TREND = np.array([[1.0, 1.0], [0.0, 1.0]])
LEVEL, BOTH, ALIKE = np.array([[1.0, 0.0]]), np.eye(2), np.array([[1.0, 0.0], [1.0, 1e-3]])
SUM = np.array([[1.0, 1.0]])

# what is seen of (level, slope), and the standard deviations of the first state, of a step and of
# what is seen
CASES = {
    "mild": (ALIKE, 1.0, 1.0, 1.0),
    "diffuse start, two series nearly alike": (ALIKE, 1e6, 1.0, 1.0),
    "diffuse start, both states seen": (BOTH, 1e7, 1.0, 1.0),
    "diffuse start, level seen": (LEVEL, 1e6, 1.0, 1.0),
    "diffuse start, sum seen": (SUM, 1e6, 1.0, 1.0),
    "little noise": (ALIKE, 1e3, 1e-6, 1e-6),
    "hardly any noise in what is seen": (ALIKE, 1.0, 1.0, 1e-8),
    "next to no noise in what is seen": (ALIKE, 1.0, 1.0, 1e-11),
}


def parts(case):
    """F, H, Q, R and P of a case, and data: P belongs to the first step, before which u is zero."""
    H, first, step, seen = CASES[case]
    rng = np.random.default_rng(0)
    u, y = rng.normal(size=2) * 10, np.empty((STEPS, len(H)))
    for t in range(STEPS):
        u = TREND @ u + step * rng.normal(size=2) if t else u
        y[t] = H @ u + seen * rng.normal(size=len(H))
    return H, np.eye(2) * step**2, np.eye(len(H)) * seen**2, np.eye(2) * first**2, y


def precise(H, Q, R, P, y, F=TREND):
    """The log-likelihood in 80 digits."""
    mean, total = mpmath.matrix(2, 1), mpmath.mpf(0)
    for t in range(len(y)):
        if t:
            mean, P = F * mean, F * P * F.T + Q
        S = H * P * H.T + R
        inverse, residual = S**-1, mpmath.matrix(y[t].tolist()) - H * mean
        total -= (
            len(y[t]) * mpmath.log(2 * mpmath.pi)
            + mpmath.log(mpmath.det(S))
            + (residual.T * inverse * residual)[0]
        ) / 2
        gain = P * H.T * inverse
        mean, P = mean + gain * residual, P - gain * H * P
    return total


def as_chain(H, Q, R, P, y):
    """F is zero at the first step, and Q is what u has then."""
    every = np.broadcast_to(TREND, (len(y), 2, 2)).copy()
    every[0], noise = 0.0, np.broadcast_to(Q, (len(y), 2, 2)).copy()
    noise[0] = P
    wide = (None, None, None)
    zero, none = np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 1, len(H)))
    return Chain(
        every[:, None, None],
        zero,
        noise[:, None, None],
        H[wide],
        none,
        R[wide],
        zero,
        np.zeros((1, 1, 1, 2, 2)),
        y[:, None, None],
    )


@pytest.mark.parametrize("case", CASES)
def test_value_and_score_keep_their_digits(case):
    H, Q, R, P, y = parts(case)
    found = Smoother(as_chain(H, Q, R, P, y))
    score = found.gradients(np.ones((1, 1)))
    with mpmath.workdps(80):
        whole = {
            "F": mpmath.matrix(TREND),
            **{
                name: mpmath.matrix(part) for name, part in (("H", H), ("Q", Q), ("R", R), ("P", P))
            },
        }
        value = precise(**whole, y=y)
        assert abs(found.log_likelihood[0, 0] - value) < 1e-7 * abs(value), (
            found.log_likelihood[0, 0],
            value,
        )
        ours = {
            "F": score.F[1:, 0, 0].sum(0),
            "H": score.H[0, 0, 0],
            "Q": score.Q[1:, 0, 0].sum(0),
            "R": score.R[0, 0, 0],
            "P": score.Q[0, 0, 0],
        }
        for name, derivative in ours.items():
            for i in range(derivative.shape[0]):
                size = (
                    max(abs(whole[name][i, i]), mpmath.mpf(1))
                    if name in "FH"
                    else whole[name][i, i]
                )
                moved = {other: part.copy() for other, part in whole.items()}
                moved[name][i, i] += size * mpmath.mpf(10) ** -30
                exact = (precise(**moved, y=y) - value) * mpmath.mpf(
                    10
                ) ** 30  # by a relative change of the entry
                assert abs(derivative[i, i] * size - exact) < 2e-5 * max(1, abs(exact)), (name, i)


def declared(case):
    """A case as a model."""
    H, first, step, noise = CASES[case]
    p = {
        "u[0]": Normal(2, learned=True),
        "u[t] | u[t-1]": Normal(2, linear(bias=False), scale=step),
    }
    model = Model(
        p | {"x[t] | u[t]": Normal(len(H), linear(bias=False), scale=noise)},
        {"u[t] | x[t]": Normal()},
    ).double()
    with torch.no_grad():
        model.factors["p(u[0])"].root[:2] = 0.0
        model.factors["p(u[0])"].root[2:] = inverse_softplus(
            torch.tensor(first, dtype=torch.float64)
        )
        model.factors["p(u[t]|u[t-1])"].net.blocks.weights["u[t-1]"].copy_(torch.tensor(TREND))
        model.factors["p(x[t]|u[t])"].net.blocks.weights["u[t]"].copy_(torch.tensor(H))
    return model


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_evidence_keeps_its_digits_on_both_paths(case, fast, monkeypatch):
    H, Q, R, P, y = parts(case)
    monkeypatch.setattr(Filter, "fast", fast)
    model = declared(case)
    with torch.no_grad():
        found = exact_evidence(model, model.prepare(x=torch.tensor(y)[None])).item()
    with mpmath.workdps(80):
        exact = precise(*map(mpmath.matrix, (H, Q, R, P)), y=y, F=mpmath.matrix(TREND))
        assert abs(found - exact) < 1e-10 * abs(exact), (found, exact)


@pytest.mark.parametrize("case", CASES)
def test_smoothed_variances_keep_their_digits(case):
    """Against the inverse of the joint precision of all states, in 80 digits."""
    H, Q, R, P, y = parts(case)
    steps = 12
    found = (
        declared(case)
        .posterior(x=torch.tensor(y[None, :steps]), method="exact")["u"]
        .stddev[0]
        .detach()
    )
    with mpmath.workdps(80):
        H, Q, R, P = (mpmath.matrix(part) for part in (H, Q, R, P))
        F, precision, inside = mpmath.matrix(TREND), mpmath.zeros(2 * steps), H.T * R**-1 * H
        for t in range(steps):
            blocks = {(t, t): inside + (Q if t else P) ** -1}
            if t:
                blocks |= {
                    (t - 1, t - 1): F.T * Q**-1 * F,
                    (t, t - 1): -(Q**-1) * F,
                    (t - 1, t): -F.T * Q**-1,
                }
            for (a, b), block in blocks.items():
                for i in range(2):
                    for j in range(2):
                        precision[2 * a + i, 2 * b + j] += block[i, j]
        covariance = precision**-1
        exact = [
            [float(mpmath.sqrt(covariance[2 * t + i, 2 * t + i])) for i in range(2)]
            for t in range(steps)
        ]
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_a_nearly_flat_start_costs_no_digits_of_the_smoother(monkeypatch):
    """The lag is as long as the memory allows; a warning comes only where 1 % may be lost."""
    model = zoo.seasonal(4, seed=0).double()
    x = torch.randn(1, 16, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, [1, 6]] = math.nan
    wanted = model.smooth(x=x).sd
    for largest, error in ((16 * 60**2, 1e-12), (1, 2e-3)):  # lags of 10 steps and of none
        monkeypatch.setattr("aevb.evidence.smoothing.LARGEST", largest)
        found = model.smooth(x=x).sd
        for name, sd in wanted.items():
            torch.testing.assert_close(found[name], sd, rtol=error, atol=0.0)
    with pytest.warns(UserWarning, match=r"may be wrong by 1 %.* zoo.seasonal\(12, start=1e3\)\.$"):
        zoo.seasonal(4, start=1e7, seed=0).double().smooth(x=x)
