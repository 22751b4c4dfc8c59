"""The scaled forward-backward algorithm against the recursion in logarithms: value and gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aevb import Bernoulli, Model, Normal, OneHot
from aevb.evidence import forward_backward
from aevb.evidence.exact import exact_evidence
from aevb.evidence.forward import Paths
from aevb.evidence.forward_backward import ForwardBackward, PathsError

SEEN = {"x[t] | y[t]": Normal(2, scale="learned")}
STATE = {"y[t] | x[t]": OneHot()}

DECLARATIONS = {
    "first step of its own": (
        {"y[0]": OneHot(3, learned=True), "y[t] | y[t-1]": OneHot(3), **SEEN},
        STATE,
        {},
    ),
    "backwards in time": ({"y[t] | y[t+1]": OneHot(3), **SEEN}, STATE, {}),
    "both ends read": (
        {"y[t] | y[t-1]": OneHot(2), **SEEN, "l | y[T]": Normal(1), "f | y[0]": Normal(1)},
        STATE,
        {},
    ),
    "inputs, and data that read two states": (
        {"y[t] | y[t-1], u[t]": OneHot(3), "x[t] | y[t], y[t-1]": Normal(2, scale="learned")},
        STATE,
        {"u": 2},
    ),
    "two chains and a class": (
        {
            "k": OneHot(2, learned=True),
            "y[t] | y[t-1]": OneHot(3),
            "b[t] | b[t-1], y[t], k": Bernoulli(1),
            "x[t] | y[t], b[t], k": Normal(2, scale="learned"),
        },
        {"k | x[T]": OneHot(), **STATE, "b[t] | x[t]": Bernoulli()},
        {},
    ),
}


def build(name):
    torch.manual_seed(0)
    p, q, given = DECLARATIONS[name]
    model = Model(p, q, given).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6)
    return model


def both(model, data, monkeypatch, **lengths):
    batch, found = model.prepare(**data, **lengths), []
    for fast in (False, True):
        monkeypatch.setattr(Paths, "fast", fast)
        if fast:
            # the scaled algorithm has the answer
            monkeypatch.setattr(Paths, "_by_logarithms", None)
        model.zero_grad()
        value = exact_evidence(model, batch)
        (value * torch.linspace(0.5, 1.5, len(value))).sum().backward()
        found.append(
            {"value": value.detach()}
            | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    return found


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [(9, [9, 3, 1]), (70, [70, 33, 50])],
    ids=["by steps", "as a banded system"],
)
@pytest.mark.parametrize("rows", ["complete", "ragged", "missing", "known at times"])
@pytest.mark.parametrize("name", DECLARATIONS)
def test_scaled_probabilities_give_what_logarithms_do(name, rows, steps, lengths, monkeypatch):
    model, generator = build(name), torch.Generator().manual_seed(1)
    n = len(lengths)
    given = {
        name: torch.randn(
            n, steps, model.graph.size(name), generator=generator, dtype=torch.float64
        )
        for name in model.graph.given
    }
    every = model.sample(n, seed=1, steps=steps, **given)
    data = {name: value for name, value in every.items() if name in model.graph.observed} | given
    if rows == "missing":
        data["x"] = data["x"].masked_fill(
            torch.rand(data["x"].shape, generator=generator) < 0.3, torch.nan
        )
    if rows == "known at times":
        states = every["y"].argmax(-1)
        data["y"] = states.masked_fill(torch.rand(states.shape, generator=generator) < 0.6, -1)
    general, fast = both(
        model, data, monkeypatch, **({"lengths": torch.tensor(lengths)} if rows == "ragged" else {})
    )
    assert general.keys() == fast.keys()
    for key, value in general.items():
        torch.testing.assert_close(fast[key], value, rtol=1e-9, atol=1e-9)


def test_data_thousands_of_nats_apart_lose_nothing(monkeypatch):
    """Emissions underflow in every state but one; the sum is what the logarithms say."""
    model = build("first step of its own")
    data = {
        "x": 40
        * torch.randn(2, 60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    }
    general, fast = both(model, data, monkeypatch)
    assert float(general["value"].max()) < -1e4
    for key, value in general.items():
        torch.testing.assert_close(fast[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("spread", "stay", "banded"),
    [(1.0, 0.0, True), (300.0, 0.0, True), (300.0, 200.0, False)],
    ids=["ordinary data", "wild data", "sums out of range"],
)
@pytest.mark.parametrize("ragged", [False, True], ids=["complete", "ragged"])
def test_a_long_chain_as_a_banded_system_is_the_loop_over_steps(
    spread, stay, banded, ragged, monkeypatch
):
    rng, steps, rows, count = np.random.default_rng(0), 5000, 3, 4
    pairs = 2 * rng.normal(size=(1, 2, 1, count, count)) + stay * np.eye(count)
    start, here = rng.normal(size=(1, 2, rows, count)), rng.normal(size=(steps, 2, rows, count))
    real = np.arange(steps)[:, None, None] < np.array([steps, 2000, 31]) if ragged else None
    weight, found = rng.normal(size=(2, rows)), []
    for few in (10**9, 0):
        monkeypatch.setattr(forward_backward, "FEW", few)
        with np.errstate(all="ignore"):
            one = ForwardBackward(start, pairs, spread * here, real)
            gradients = one.gradients(weight, (start.shape, pairs.shape, here.shape))
        assert (one.system is not None) == (banded and few > 0)
        found.append([one.log_sum, *gradients])
    for whole, by_steps in zip(*found, strict=True):
        np.testing.assert_allclose(whole, by_steps, rtol=1e-9, atol=1e-11)


def test_transitions_without_probability_are_left_to_the_logarithms(monkeypatch):
    """From one state no way leads on: scaled probabilities might lose the only path there is."""
    pairs = np.log(np.array([[1.0, 1.0], [1e-300, 1.0]]))[None, None, None]
    zeros = np.zeros((1, 1, 1, 2))
    with pytest.raises(PathsError):
        ForwardBackward(zeros, pairs, np.zeros((3, 1, 1, 2)), None)
    model = build("first step of its own")
    with torch.no_grad():
        model.factors["p(y[t]|y[t-1])"].net.blocks.weights["y[t-1]"].copy_(
            torch.tensor([[0.0, -400.0, -400.0], [-400.0, 0.0, -400.0], [0.0, 0.0, 0.0]])
        )
        model.factors["p(x[t]|y[t])"].net.blocks.weights["y[t]"].zero_()
    data = model.sample(1, seed=0, steps=5)["x"]
    whole = exact_evidence(model, model.prepare(x=data))
    monkeypatch.setattr(Paths, "fast", False)
    torch.testing.assert_close(whole, exact_evidence(model, model.prepare(x=data)), rtol=0, atol=0)
