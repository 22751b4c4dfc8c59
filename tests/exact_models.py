"""Models with a known evidence and posterior, and rows drawn from them, in float64."""

from __future__ import annotations

import math

import torch

from aevb import (
    GRU,
    Bernoulli,
    Deterministic,
    Laplace,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    mlp,
)
from aevb.estimate.estimators import estimate

N, T = 3, 4
LENGTHS = [4, 2, 1]


def build(p, q, given=None, seed=0):
    """Return a model whose weights are large enough for values and paths to differ."""
    torch.manual_seed(seed)
    model = Model(p, q, given).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6)
    return model


def data_of(model, seed=1, steps=T):
    """Draw rows from p and keep only the observed and given variables."""
    generator = torch.Generator().manual_seed(seed)
    graph = model.graph
    given = {
        name: torch.randn(
            N,
            *([steps] if graph.timed[name] else []),
            graph.size(name),
            generator=generator,
            dtype=torch.float64,
        )
        for name in graph.given
    }
    timed = any(graph.timed.values())
    drawn = model.sample(N, seed=seed, **({"steps": steps} if timed else {}), **given)
    return {name: drawn[name] for name in graph.observed} | given


def laid_out(model, values, steps):
    """Convert values by (name, step), [rows, d] each, to data."""
    graph, rows = model.graph, max(len(value) for value in values.values())
    whole = {}
    for name in {name for name, _ in values}:
        parts = [values[name, t].expand(rows, -1) for t in range(steps if graph.timed[name] else 1)]
        whole[name] = torch.stack(parts, 1) if graph.timed[name] else parts[0]
    return model.prepare(
        **whole, lengths=steps if any(graph.timed[name] for name in whole) else None
    )


def log_p(model, batch):
    return estimate(model.plan(clamped=model.graph.latents), model.factors, batch, {}).value


MODELS = {
    "mixture of factor analysers": lambda seed=0: build(
        {"y": OneHot(3, learned=True), "z | y": Normal(2), "x | z, y": Normal(4, scale="learned")},
        {"y | x": OneHot(), "z | x, y": Normal()},
        seed=seed,
    ),
    "full covariances by class": lambda seed=0: build(
        {
            "y": OneHot(2, learned=True),
            "z | y": MultivariateNormal(2),
            "x | z": MultivariateNormal(3, covariance="shared"),
        },
        {"y | x": OneHot(), "z | x": Normal()},
        seed=seed,
    ),
    "two layers, two discrete, given": lambda seed=0: build(
        {
            "y": OneHot(2, learned=True),
            "b | y, u": Bernoulli(2),
            "a | y": Normal(2, scale=0.7),
            "c | a, b": Normal(2, scale="learned"),
            "f | c, b": Deterministic(3),
            "x | f, u": Normal(3, scale="learned"),
            "w | b, u": Poisson(2, net=mlp(4)),
        },
        {"y | x": OneHot(), "b | x": Bernoulli(), "a | x": Normal(), "c | x": Normal()},
        {"u": 2},
        seed=seed,
    ),
    "a spread and a mean from data": lambda seed=0: build(
        {
            "z | u": Normal(2, net=mlp(5, activation="tanh")),
            "x | z": Normal(2, scale=0.8),
            "v | x": Normal(2, net=mlp(5, activation="tanh")),
            "w | v": Laplace(2),
            "a | z, v": Normal(1, scale="learned"),
        },
        {"z | x, v, w, a": Normal()},
        {"u": 1},
        seed=seed,
    ),
    "state space": lambda seed=0: build(
        {
            "z[0]": Normal(2, learned=True),
            "z[t] | z[t-1]": Normal(2, scale="learned"),
            "x[t] | z[t]": Normal(3, scale="learned"),
        },
        {"z[t] | x[t]": Normal()},
        seed=seed,
    ),
    "state space with inputs and lags": lambda seed=0: build(
        {
            "a[t] | a[t-1], b[t-1], u[t]": Normal(1, scale="learned"),
            "b[t] | a[t], x[t-1], g": MultivariateNormal(2, covariance="shared"),
            "x[t] | a[t], b[t], b[t-1], u[t-1]": Normal(2, scale=0.5),
        },
        {"a[t] | x[t]": Normal(), "b[t] | x[t]": Normal()},
        {"u": 2, "g": 1},
        seed=seed,
    ),
    "state space backwards, with ends": lambda seed=0: build(
        {
            "z[t] | z[t+1]": Normal(2, scale="learned"),
            "z[T]": Normal(2, learned=True),
            "z[0] | u": Normal(2, scale=0.6),
            "x[t] | z[t]": Normal(2, scale="learned"),
            "x[T] | z[T], u": Normal(2, scale=0.4),
        },
        {"z[t] | x[t]": Normal()},
        {"u": 1},
        seed=seed,
    ),
    "state space backwards, with inputs": lambda seed=0: build(
        {
            "z[t] | z[t+1], u[t+1]": Normal(1, scale="learned"),
            "x[t] | z[t], z[t+1]": Normal(2, scale="learned"),
        },
        {"z[t] | x[t]": Normal()},
        {"u": 1},
        seed=seed,
    ),
    "state space with a static latent": lambda seed=0: build(
        {
            "w": Normal(2),
            "c | w": Normal(1, scale=0.5),
            "z[t] | z[t-1], w": Normal(1, scale="learned"),
            "x[t] | z[t], w": Normal(2, scale="learned"),
        },
        {"w | c": Normal(), "z[t] | x[t]": Normal()},
        seed=seed,
    ),
    "a static latent alone": lambda seed=0: build(
        {"w": Normal(2), "x[t] | w": Normal(2, scale="learned")},
        {"b[t] | b[t+1], x[t]": GRU(3), "w | b[0]": Normal()},
        seed=seed,
    ),
    "mixture of state spaces": lambda seed=0: build(
        {
            "y": OneHot(2, learned=True),
            "z[t] | z[t-1], y": Normal(1, scale="learned"),
            "x[t] | z[t], y": Normal(2, scale="learned"),
        },
        {"b[t] | b[t+1], x[t]": GRU(3), "y | b[0]": OneHot(), "z[t] | x[t]": Normal()},
        seed=seed,
    ),
    "linear memory, and a network of the past": lambda seed=0: build(
        {
            "h[t] | h[t-1], x[t-1]": GRU(3),
            "z[t] | h[t]": Normal(1),
            "f[t] | f[t-1], z[t-1]": Deterministic(2),
            "x[t] | f[t], z[t], h[t]": Normal(2, scale="learned"),
        },
        {"z[t] | x[t]": Normal()},
        seed=seed,
    ),
    "factor analysis at every step": lambda seed=0: build(
        {
            "z[t] | u[t]": Normal(1),
            "x[t] | z[t], u[t-1]": Normal(2, scale="learned"),
            "x[0] | z[0]": Normal(2, scale=0.3),
        },
        {"z[t] | x[t]": Normal()},
        {"u": 1},
        seed=seed,
    ),
    "hidden Markov": lambda seed=0: build(
        {
            "s[0]": OneHot(3, learned=True),
            "s[t] | s[t-1]": OneHot(3),
            "x[t] | s[t]": Normal(2, net=mlp(4)),
        },
        {"s[t] | x[t]": OneHot()},
        seed=seed,
    ),
    "hidden Markov, autoregressive, with ends": lambda seed=0: build(
        {
            "s[t] | s[t-1], x[t-1]": OneHot(2, net=mlp(4)),
            "s[T] | u": OneHot(2),
            "x[t] | s[t], s[t-1], x[t-1], u": Poisson(1),
            "c | s[T], u": Normal(1),
            "d | s[0]": Bernoulli(2),
        },
        {"s[t] | x[t]": OneHot()},
        {"u": 1},
        seed=seed,
    ),
    "two chains": lambda seed=0: build(
        {
            "a[t] | a[t-1]": OneHot(2),
            "b[t] | a[t], b[t-1]": Bernoulli(1),
            "x[t] | b[t], a[t-1]": Normal(1),
            "v[t] | a[t]": OneHot(3),
        },
        {"a[t] | x[t]": OneHot(), "b[t] | x[t]": Bernoulli()},
        seed=seed,
    ),
    "hidden Markov backwards": lambda seed=0: build(
        {"s[t] | s[t+1]": OneHot(3), "x[t] | s[t]": Normal(2)},
        {"s[t] | x[t]": OneHot()},
        seed=seed,
    ),
    "emissions from both sides": lambda seed=0: build(
        {
            "s[t] | s[t-1]": OneHot(2),
            "x[t] | s[t+1]": Normal(1),
            "f[t] | s[t-1]": Deterministic(2, activation="tanh"),
            "v[t] | f[t]": Normal(1),
        },
        {"s[t] | x[t]": OneHot()},
        seed=seed,
    ),
    "states read only beside": lambda seed=0: build(
        {"s[t] | s[t+1]": OneHot(2), "x[t] | s[t-1]": Normal(1)},
        {"s[t] | x[t]": OneHot()},
        seed=seed,
    ),
    "mixture of hidden Markovs": lambda seed=0: build(
        {"y": OneHot(2, learned=True), "s[t] | s[t-1], y": OneHot(2), "x[t] | s[t], y": Normal(1)},
        {"b[t] | b[t+1], x[t]": GRU(3), "y | b[0]": OneHot(), "s[t] | x[t]": OneHot()},
        seed=seed,
    ),
    "hidden Markov over factor analysers": lambda seed=0: build(
        {
            "s[t] | s[t-1]": OneHot(2),
            "z[t] | s[t]": Normal(1),
            "x[t] | z[t], s[t-1]": Normal(2, scale="learned"),
        },
        {"s[t] | x[t]": OneHot(), "z[t] | x[t]": Normal()},
        seed=seed,
    ),
    "a chain beside a state space": lambda seed=0: build(
        {
            "s[t] | s[t-1]": OneHot(2),
            "c[t] | s[t]": Normal(1),
            "z[t] | z[t-1]": Normal(1, scale="learned"),
            "x[t] | z[t]": Normal(1, scale=0.5),
        },
        {"s[t] | c[t]": OneHot(), "z[t] | x[t]": Normal()},
        seed=seed,
    ),
}


def holed(data, name, seed=3):
    """Return the data with missing entries of a variable, and with a missing step or row."""
    value = data[name].clone()
    value[torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = math.nan
    value[(0, 1) if value.dim() == 3 else 1] = math.nan
    return data | {name: value}
