"""Structural time series and autoregressions: linear-Gaussian, so that their evidence is exact.

The first value of a component is unknown. Its prior N(0, start²) is nearly flat if ``start`` is far
larger than the data. Matrices such as the step "level + slope" are constants of the declaration.
"""

from __future__ import annotations

import math

from aevb.declare.conditionals import Conditional
from aevb.declare.deterministic import Deterministic
from aevb.declare.families import MultivariateNormal, Normal
from aevb.declare.fixed_weights import Matrix
from aevb.declare.networks import linear, mlp
from aevb.model import Model
from aevb.zoo.arguments import choose, trained_by

START = 1e6  # standard deviation of the first value of a component


@trained_by("mle")
def local_level(x: int = 1, *, start: float = START, seed: int | None = None) -> Model:
    """Local level: a random walk, observed with noise.

    The two learned scales are those of the walk and of the noise, per series.

    Arguments:
        x: Number of series.
        start: Standard deviation of the prior of the first level.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x]. ``fit`` trains it with ``mle()``.

    >>> import torch
    >>> local_level().log_evidence(x=torch.zeros(1, 20, 1)).method
    'exact'
    """
    return Model(
        p={
            "level[0]": Normal(x, scale=start),
            "level[t] | level[t-1]": _sum({"level[t-1]": 1}, x),
            "x[t] | level[t]": _sum({"level[t]": 1}, x),
        },
        q=_smoother({"level[t]": "level[t-1]"}, 2 * x),
        seed=seed,
    )


@trained_by("mle")
def local_trend(x: int = 1, *, start: float = START, seed: int | None = None) -> Model:
    """Local linear trend: a level whose slope is a random walk, observed with noise.

    The three learned scales are those of the level, of the slope and of the noise, per series.

    Arguments:
        x: Number of series.
        start: Standard deviation of the priors of the first level and the first slope.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x]. ``fit`` trains it with ``mle()``.

    >>> import torch
    >>> local_trend().forecast(steps=3, x=torch.zeros(1, 20, 1)).mean["x"].shape
    torch.Size([1, 3, 1])
    """
    return Model(
        p={
            "level[0]": Normal(x, scale=start),
            "level[t] | level[t-1], slope[t-1]": _sum({"level[t-1]": 1, "slope[t-1]": 1}, x),
            "slope[0]": Normal(x, scale=start),
            "slope[t] | slope[t-1]": _sum({"slope[t-1]": 1}, x),
            "x[t] | level[t]": _sum({"level[t]": 1}, x),
        },
        q=_smoother(
            {"level[t]": "level[t-1], slope[t-1]", "slope[t]": "slope[t-1], level[t]"}, 3 * x
        ),
        seed=seed,
    )


@trained_by("mle")
def seasonal(period: int = 12, *, start: float = START, seed: int | None = None) -> Model:
    """Level, slope and a trigonometric season of one series, observed with noise.

    The season has a wave for each frequency j / period. The waves turn by a fixed angle per step,
    and all change with the same learned scale.

    Arguments:
        period: Number of steps after which the season repeats.
        start: Standard deviation of the priors of the first level, slope and season.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, 1]. ``fit`` trains it with ``mle()``.

    >>> seasonal(period=4).graph.latents
    ('level', 'slope', 'season')
    """
    if isinstance(period, bool) or not isinstance(period, int) or period < 2:
        raise ValueError(f"seasonal: period is a whole number of steps from 2 on, got {period!r}.")
    turn, seen = _waves(period)
    net = linear(bias=False, fixed={"season[t-1]": turn})
    return Model(
        p={
            "level[0]": Normal(1, scale=start),
            "level[t] | level[t-1], slope[t-1]": _sum({"level[t-1]": 1, "slope[t-1]": 1}),
            "slope[0]": Normal(1, scale=start),
            "slope[t] | slope[t-1]": _sum({"slope[t-1]": 1}),
            "season[0]": Normal(period - 1, scale=start),
            "season[t] | season[t-1]": Normal(period - 1, net=net, scale="isotropic"),
            "x[t] | level[t], season[t]": _sum({"level[t]": 1, "season[t]": [seen]}),
        },
        q=_smoother(
            {
                "level[t]": "level[t-1], slope[t-1]",
                "slope[t]": "slope[t-1], level[t]",
                "season[t]": "season[t-1], level[t]",
            },
            period + 2,
        ),
        seed=seed,
    )


@trained_by("mle")
def ar(x: int = 1, lags: int = 2, *, start: str = "zeros", seed: int | None = None) -> Model:
    """Autoregression: x is a linear function of its last values, plus noise; no latents.

    Several series have full matrices and a full covariance.

    Arguments:
        x: Number of series.
        lags: Number of last values that x reads.
        start: The values before the series are "zeros", for data with mean near 0, or "given" as
            ``before``: the last values, the newest first.
        seed: Decides the initial weights, as in :class:`aevb.Model`.

    Returns:
        The model, for data x [N, T, x]. ``fit`` trains it with ``mle()``.

    >>> import torch
    >>> model = ar(lags=3)
    >>> model.log_evidence(x=torch.zeros(1, 20, 1)).value.shape
    torch.Size([1])
    """
    if isinstance(lags, bool) or not isinstance(lags, int) or lags < 1:
        raise ValueError(f"ar: lags is a positive whole number, got {lags!r}.")
    size = lags * x
    shift = [[float(i == j + x) for j in range(size)] for i in range(size)]
    newest = [[float(i == j) for j in range(x)] for i in range(size)]
    moved = linear(bias=False, fixed={"past[t-1]": shift, "x[t-1]": newest})
    before = linear(bias=False, fixed={"before": 1})
    first: dict[str, dict[str, Conditional]] = {
        "zeros": {},
        "given": {"past[0] | before": Deterministic(size, net=before)},
    }
    return Model(
        p={
            **choose("start", start, first),
            "past[t] | past[t-1], x[t-1]": Deterministic(size, net=moved),
            "x[t] | past[t]": Normal(1, net=linear(), scale="learned")
            if x == 1
            else MultivariateNormal(x, net=linear(), covariance="shared"),
        },
        q={},
        given={"before": size} if start == "given" else None,
        seed=seed,
    )


def _sum(weights: dict[str, float | list[tuple[float, ...]]], size: int = 1) -> Normal:
    """Return a Gaussian around a fixed combination of its parents."""
    return Normal(size, net=linear(bias=False, fixed=weights), scale="learned")


def _smoother(reads: dict[str, str], size: int) -> dict[str, Conditional]:
    """Return q: each component given its past and a linear summary of the data from now on."""
    drawn: dict[str, Conditional] = {
        f"{name} | {past}, b[t]": Normal(net=linear(), scale="learned")
        for name, past in reads.items()
    }
    return {"b[t] | b[t+1], x[t]": Deterministic(size, net=mlp())} | drawn


def _waves(period: int) -> tuple[Matrix, tuple[float, ...]]:
    """Return the matrix that turns all waves by one step, and the weights that add them up."""
    size = period - 1
    rows = [[0.0] * size for _ in range(size)]
    for at in range(0, size - 1, 2):
        angle = 2 * math.pi * (at // 2 + 1) / period
        cos, sin = (round(value, 15) for value in (math.cos(angle), math.sin(angle)))
        rows[at][at : at + 2] = cos, sin
        rows[at + 1][at : at + 2] = -sin, cos
    if period % 2 == 0:  # the fastest wave changes its sign at every step
        rows[-1][-1] = -1.0
    return tuple(map(tuple, rows)), tuple(float(at % 2 == 0) for at in range(size))
