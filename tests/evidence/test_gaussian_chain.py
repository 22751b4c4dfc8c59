"""The recursions of a Gaussian chain against the step-by-step filter (value and gradient) and
against its joint Gaussian (smoothed moments).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aevb import Deterministic, Model, MultivariateNormal, Normal, OneHot, fit, linear, mle
from aevb.evidence.exact import exact_evidence
from aevb.evidence.filtering import Filter
from aevb.evidence.gaussian_chain import Chain, Smoother

N, T = 5, 12
LENGTHS = torch.tensor([12, 3, 7, 7, 1])
SHOWN = {"x[t] | z[t]": Normal(3, scale="learned")}

DECLARATIONS = {
    "first step of its own": (
        {"z[0]": Normal(2, learned=True), "z[t] | z[t-1]": Normal(2, scale="learned"), **SHOWN},
        {"z[t] | x[t]": Normal()},
        {},
    ),
    "backwards in time": (
        {"z[t] | z[t+1]": Normal(2, scale="learned"), **SHOWN},
        {"z[t] | x[t]": Normal()},
        {},
    ),
    "last step of its own": (
        {
            "z[t] | z[t-1]": Normal(2, scale="learned"),
            **SHOWN,
            "x[T] | z[T]": Normal(3, scale="learned"),
        },
        {"z[t] | x[t]": Normal()},
        {},
    ),
    "static Gaussian and its own past": (
        {
            "w": Normal(2),
            "z[t] | z[t-1], w": Normal(2, scale="learned"),
            "x[t] | z[t], x[t-1], w": Normal(3, scale="learned"),
        },
        {"w | x[T]": Normal(), "z[t] | x[t]": Normal()},
        {},
    ),
    "static class": (
        {
            "k": OneHot(3, learned=True),
            "z[t] | z[t-1], k": Normal(2, scale="learned"),
            "x[t] | z[t], k": MultivariateNormal(3, covariance="shared"),
        },
        {"k | x[T]": OneHot(), "z[t] | x[t]": Normal()},
        {},
    ),
    "functions without noise": (
        {
            "z[t] | z[t-1]": Normal(1, scale="learned"),
            "h[t] | z[t], h[t-1]": Deterministic(2, linear()),
            "x[t] | h[t], z[t-1]": Normal(1, scale="learned"),
            "y[t] | z[t]": Normal(2, scale="learned"),
        },
        {"z[t] | x[t]": Normal()},
        {},
    ),
    "given inputs that decide the spread": (
        {
            "z[t] | z[t-1], u[t]": Normal(2, scale="learned"),
            "x[t] | z[t], u[t]": Normal(2, scale="learned"),
            "y[t] | u[t]": Normal(1),
        },
        {"z[t] | x[t]": Normal()},
        {"u": 2},
    ),
}


def build(declaration):
    torch.manual_seed(0)
    p, q, given = declaration
    model = Model(p, q, given).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model


def drawn(model, steps=T):
    generator = torch.Generator().manual_seed(1)
    given = {
        name: torch.randn(
            N, steps, model.graph.size(name), generator=generator, dtype=torch.float64
        )
        for name in model.graph.given
    }
    every = model.sample(N, seed=1, steps=steps, **given)
    return {
        name: value for name, value in every.items() if name in model.graph.observed
    } | given, every


def both(model, data, monkeypatch, **lengths):
    """Value and gradients by the step-by-step filter, and by the chain."""
    batch, found = model.prepare(**data, **lengths), []
    for fast in (False, True):
        monkeypatch.setattr(Filter, "fast", fast)
        if fast:
            monkeypatch.setattr(Filter, "_through_time", None)  # the chain has the answer
        model.zero_grad()
        value = exact_evidence(model, batch)
        (value * torch.linspace(0.5, 1.5, N)).sum().backward()
        found.append(
            {"value": value.detach()}
            | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    return found


def hide(value, generator):
    return value.masked_fill(torch.rand(value.shape, generator=generator) < 0.3, torch.nan)


@pytest.mark.parametrize(
    "rows",
    [
        "complete",
        "ragged",
        "missing",
        "missing alike",
        "missing and ragged",
        "latent known at times",
        "long",
    ],
)
@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_chain_is_the_filter(name, rows, monkeypatch):
    model = build(DECLARATIONS[name])
    data, every = drawn(model, 80 if rows == "long" else T)
    if rows.startswith("missing"):
        generator = torch.Generator().manual_seed(2)
        if name.startswith("static Gaussian"):
            pytest.skip("p reads x, which may then have no missing entries")
        if rows == "missing alike":
            data = {
                key: value.index_fill(1, torch.tensor([3, 4, 9]), torch.nan)
                if key not in model.graph.given
                else value
                for key, value in data.items()
            }
        else:
            data = {
                key: hide(value, generator) if key not in model.graph.given else value
                for key, value in data.items()
            }
    if rows.startswith("latent"):
        data["z"] = every["z"].index_fill(1, torch.tensor([0, 1, 4, 5, 7, 8, 9, 10, 11]), torch.nan)
    general, fast = both(
        model, data, monkeypatch, **({"lengths": LENGTHS} if rows.endswith("ragged") else {})
    )
    assert general.keys() == fast.keys()
    for key, value in general.items():
        torch.testing.assert_close(fast[key], value, rtol=1e-10, atol=1e-10)


def test_a_steady_state_is_reached_and_ends_with_a_gap(monkeypatch):
    """Covariances that settle, are disturbed by a gap and settle again: 400 steps take far fewer
    products, and no digit is lost.
    """
    model = build(DECLARATIONS["first step of its own"])
    data, _ = drawn(model, 400)
    data["x"][:, 200:205] = torch.nan
    seen = []
    whole = np.linalg.inv
    monkeypatch.setattr(np.linalg, "inv", lambda S: seen.append(S) or whole(S))
    general, fast = both(model, data, monkeypatch)
    for key, value in general.items():
        torch.testing.assert_close(fast[key], value, rtol=1e-10, atol=1e-9)
    assert len(seen) < 150


@pytest.mark.parametrize("ratio", [1.0, 1e4, 1e8, 1e16])
def test_a_small_state_settles_by_its_own_scale(ratio, monkeypatch):
    """White noise beside a slow state whose scale is far below: the covariance is not constant
    before that of the slow state is.
    """
    p = {
        "u[t] | u[t-1]": Normal(1, linear(bias=False), scale=0.1 * ratio),
        "x[t] | u[t]": Normal(1, linear(bias=False), scale=ratio),
    }
    p |= {
        "v[t] | v[t-1]": Normal(1, linear(bias=False), scale="learned"),
        "w[t] | v[t]": Normal(1, linear(bias=False), scale=1.0),
    }
    model = Model(p, {"u[t] | x[t]": Normal(), "v[t] | w[t]": Normal()}).double()
    with torch.no_grad():
        for label, factor, value in (
            ("u[t-1]", "p(u[t]|u[t-1])", 0.0),
            ("v[t-1]", "p(v[t]|v[t-1])", 0.98),
            ("u[t]", "p(x[t]|u[t])", 1.0),
        ):
            model.factors[factor].net.blocks.weights[label].fill_(value)
        model.factors["p(w[t]|v[t])"].net.blocks.weights["v[t]"].fill_(1.0)
        model.factors["p(v[t]|v[t-1])"].vectors["scale"].fill_(-2.0)
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(N, 200, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    general, fast = both(model, {"x": ratio * x, "w": w}, monkeypatch)
    for key, value in general.items():
        torch.testing.assert_close(fast[key], value, rtol=1e-9, atol=1e-9)


def test_smoothed_moments_are_the_joint_gaussians():
    rng = np.random.default_rng(0)
    D, M, steps, rows = 2, 3, 6, 4
    F, H = rng.normal(size=(steps, 1, 1, D, D)), rng.normal(size=(1, 1, 1, M, D))
    root = rng.normal(size=(1, 1, 1, D, D))
    Q, P = root @ root.swapaxes(-1, -2), np.eye(D)[None, None, None]
    R = np.diag([0.5, 1.0, 2.0])[None, None, None]
    y, keep = (
        rng.normal(size=(steps, 1, rows, M)),
        (rng.random((steps, 1, rows, M)) > 0.3).astype(float),
    )
    c, d = rng.normal(size=(1, 1, 1, D)), rng.normal(size=(1, 1, 1, M))
    found = Smoother(Chain(F, c, Q, H, d, R, np.ones((1, 1, 1, D)), P, y, keep))
    mean, covariance = found.smoothed()

    # The joint Gaussian of all u: u = lower · (noise of every step), of all y: H u + noise.
    lower = np.zeros((steps * D, steps * D))
    offset, before = np.zeros(steps * D), np.ones(D)
    for t in range(steps):
        now = slice(t * D, t * D + D)
        lower[now, now] = np.eye(D)
        if t:
            lower[now, : t * D] = F[t, 0, 0] @ lower[now.start - D : now.start, : t * D]
        before = F[t, 0, 0] @ before + c[0, 0, 0]
        offset[now] = before
    noise = np.kron(np.eye(steps), Q[0, 0, 0])
    noise[:D, :D] += F[0, 0, 0] @ F[0, 0, 0].T
    joint = lower @ noise @ lower.T
    seen = np.kron(np.eye(steps), H[0, 0, 0])
    for n in range(rows):
        there = keep[:, 0, n].reshape(-1) > 0
        A = seen[there]
        S = A @ joint @ A.T + np.diag(np.tile([0.5, 1.0, 2.0], steps)[there])
        residual = (y[:, 0, n] - d[0, 0, 0]).reshape(-1)[there] - A @ offset
        gain = joint @ A.T @ np.linalg.inv(S)
        after = joint - gain @ A @ joint
        np.testing.assert_allclose(mean[:, 0, n].reshape(-1), offset + gain @ residual, atol=1e-10)
        group = n if found.group is None else found.group[n]
        blocks = np.stack([after[t * D : t * D + D, t * D : t * D + D] for t in range(steps)])
        np.testing.assert_allclose(covariance[:, 0, group], blocks, atol=1e-10)
        exact = -0.5 * (
            residual @ np.linalg.solve(S, residual) + np.linalg.slogdet(2 * np.pi * S)[1]
        )
        np.testing.assert_allclose(found.log_likelihood[0, n], exact, rtol=1e-12)


def test_sequences_of_one_step_are_the_first_step_of_longer_ones() -> None:
    model = Model(
        p={"z[t] | z[t-1]": Normal(1, scale="learned"), "x[t] | z[t]": Normal(1, scale="learned")},
        q={"z[t] | z[t-1], x[t]": Normal(scale="learned")},
    ).double()
    x = torch.randn(5, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone, padded = {"x": x, "lengths": 1}, {"x": torch.cat([x, x], 1), "lengths": [1] * 5}
    found, expected = (model.log_evidence(**data).value for data in (alone, padded))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    means = [model.posterior(**data, method="exact")["z"].mean[:, :1] for data in (alone, padded)]
    torch.testing.assert_close(*means, rtol=0, atol=1e-12)
    run = fit(model, alone, schedule=mle(), steps=3)
    assert run.history["evidence"][-1] >= float(expected.mean())
