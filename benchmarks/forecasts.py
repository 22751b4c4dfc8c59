"""Measure forecasts: the coverage of intervals on simulated data, and scores on real series.

pip install "aevb[bench]"
python benchmarks/forecasts.py --json docs/figures/forecasts.json
python benchmarks/forecasts.py --only coverage --futures 1000
python benchmarks/forecasts.py --only scores

The first table has the share of futures inside the intervals of 50, 80 and 95 %. For each of eight
models, past and future of 10,000 rows are drawn from p, and the past is forecast. Rows are
independent, so a share has the standard error √(level (1 − level) / 10,000). Exact forecasts have
exact quantiles; those by particles are quantiles of 2,000 draws.

The second table compares scores of forecasts of real series with statsmodels at rolling origins.
Both sides fit the same class of model to the part before the first origin, by maximum likelihood
and each from its own start. Their parameters then stay fixed; at each origin, a filter takes in the
data so far. The log score is the log-density of the next value; CRPS is the mean over the next four
steps, for normal forecasts in closed form. A difference is paired over the origins; its standard
error allows for the overlap of horizons (Newey and West).
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exact_time import raw
from threadpoolctl import threadpool_limits
from timing import machine

from aevb import Model, Normal, fit, linear, mle
from aevb.zoo import ar, hmm, local_level, local_trend, seasonal, switching

Array = np.ndarray[Any, np.dtype[np.float64]]
LEVELS, PAST, AHEAD, SHOWN = (0.5, 0.8, 0.95), 24, 12, (1, 4, 12)
CHUNK = 1000  # rows that are forecast together

# Coverage -----------------------------------------------------------------------------------------


def scales(model: Model, **values: float) -> Model:
    """Set the learned scales of the factors of p, by variable."""
    with torch.no_grad():
        for name, value in values.items():
            rule = next(key for key in model.factors if key.startswith(f"p({name}[t]"))
            model.factors[rule].vectors["scale"].fill_(raw(value))
    return model.double()


def autoregressive() -> Model:
    model = scales(ar(lags=3), x=1.0)
    with torch.no_grad():
        blocks = model.factors["p(x[t]|past[t])"].net.blocks
        blocks.weights["past[t]"].copy_(torch.tensor([[0.6, -0.3, 0.4]]))
        blocks.bias.fill_(0.5)
    return model


def states() -> Model:
    """Three states that last for ten steps, and a normal distribution for each."""
    model = hmm(1, 3).double()
    with torch.no_grad():
        chain = model.factors["p(y[t]|y[t-1])"].net.blocks
        moves = torch.full((3, 3), 0.05, dtype=torch.float64) + 0.85 * torch.eye(3)
        chain.weights["y[t-1]"].copy_(moves.log())
        chain.bias.zero_()
        seen = model.factors["p(x[t]|y[t])"].net.blocks
        seen.bias.zero_()
        seen.weights["y[t]"].copy_(torch.tensor([[-3.0, 0.0, 2.0], [raw(s) for s in (0.5, 1, 2)]]))
    return model


def regimes() -> Model:
    """A regression on a given u, whose coefficient, mean and noise switch between two regimes."""
    model = switching()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.theta():
            parameter.normal_(0, 0.7)
        chain = model.factors["p(y[t]|y[t-1])"].net.blocks
        chain.weights["y[t-1]"].copy_(3.0 * torch.eye(2))
    return model.double()


def factors() -> Model:
    """Two states that turn and decay, seen through three series; the first one is counted."""
    torch.manual_seed(2)
    turn = ((0.8, 0.4), (-0.4, 0.8))
    step = Normal(2, net=linear(bias=False, fixed={"z[t-1]": turn}), scale="learned")
    p = {"z[t] | z[t-1]": step, "x[t] | z[t]": Normal(3, scale="learned")}
    return scales(Model(p, {"z[t] | x[t]": Normal()}), z=0.7, x=0.5)


def volatility() -> Model:
    """Returns whose log-variance is an autoregression; q is p's own transition."""
    walk = {"z[0]": 0.5, "z[t] | z[t-1]": 0.4}
    fixed = linear(bias=False, fixed={"z[t-1]": 0.9})
    p: dict[str, Any] = {
        "z[0]": Normal(1, scale=walk["z[0]"], learned=True),
        "z[t] | z[t-1]": Normal(1, net=fixed, scale=walk["z[t] | z[t-1]"]),
        "x[t] | z[t]": Normal(1, net=linear()),
    }
    q = {
        "z[0]": Normal(scale=0.5, learned=True),
        "z[t] | z[t-1]": Normal(net=fixed, scale=0.4),
    }
    model = Model(p, q).double()
    with torch.no_grad():
        blocks = model.factors["p(x[t]|z[t])"].net.blocks
        blocks.weights["z[t]"].copy_(torch.tensor([[0.0], [1.5]]))  # the mean, and the raw scale
        blocks.bias.copy_(torch.tensor([0.0, -0.5]))
    return model


COVERED: dict[str, Callable[[], Model]] = {
    "local level": lambda: scales(local_level(start=10.0), level=0.5, x=1.0),
    "local trend": lambda: scales(local_trend(start=10.0), level=0.3, slope=0.1, x=1.0),
    "season of 4": lambda: scales(
        seasonal(4, start=10.0), level=0.3, slope=0.05, season=0.2, x=1.0
    ),
    "AR(3)": autoregressive,
    "two factors, three series": factors,
    "hidden Markov, 3 states": states,
    "switching regression": regimes,
    "stochastic volatility": volatility,
}


def coverage(model: Model, futures: int, samples: int, method: str) -> dict[str, Any]:
    """Return the shares of futures within the intervals, [levels, steps]."""
    generator = torch.Generator().manual_seed(0)
    shape = (futures, PAST + AHEAD, 1)
    given = {name: torch.randn(shape, generator=generator) for name in model.graph.given}
    drawn = model.sample(futures, steps=PAST + AHEAD, seed=1, **given)["x"]
    inside = torch.zeros(len(LEVELS), AHEAD, dtype=torch.float64)
    began = time.process_time()
    for start in range(0, futures, CHUNK):
        rows = drawn[start : start + CHUNK]
        known = {name: value[start : start + CHUNK] for name, value in given.items()}
        forecast = model.forecast(
            steps=AHEAD,
            x=rows[:, :PAST],
            samples=samples,
            method=method,
            seed=start,
            given={name: value[:, PAST:] for name, value in known.items()},
            **{name: value[:, :PAST] for name, value in known.items()},
        )
        for i, level in enumerate(LEVELS):
            low, high = forecast.interval(level)["x"]
            # The entries of a step are not independent, so only the first one counts.
            within = (low <= rows[:, PAST:]) & (rows[:, PAST:] <= high)
            inside[i] += within[..., 0].double().sum(0)
    return {
        "method": method,
        "shares": (inside / futures).tolist(),
        "seconds": time.process_time() - began,
    }


def print_coverage(name: str, found: dict[str, Any], futures: int) -> None:
    cells, largest = [], 0.0
    for level, shares in zip(LEVELS, found["shares"], strict=True):
        error = math.sqrt(level * (1 - level) / futures)
        largest = max(largest, *(abs(share - level) / error for share in shares))
        cells += [f"{100 * shares[step - 1]:.1f}" for step in SHOWN]
    print(f"| {name} | {found['method']} | {' | '.join(cells)} | {largest:.1f} |", flush=True)


# Scores -------------------------------------------------------------------------------------------

HORIZON = 4


@dataclass(frozen=True)
class Series:
    """A real series, our model of it, and the forecasts of statsmodels at each origin.

    ``theirs`` takes the series and the first origin. It returns means and variances,
    [origins, horizon].
    """

    values: Array
    declared: Callable[[], Model]
    theirs: Callable[[Array, int], tuple[Array, Array]]
    lags: int = 0  # values before the series, of an autoregression


def our_forecasts(series: Series, first: int) -> tuple[Array, Array]:
    """Fit to the values before the first origin, and forecast from all origins at once."""
    y, lags, model = series.values, series.lags, series.declared()
    before = {"before": y[:lags][::-1].copy()[None]} if lags else {}
    fit(model, {"x": y[None, lags:first, None]} | before, schedule=mle(), progress=False)
    origins = np.arange(first, len(y) - HORIZON + 1)
    rows = np.broadcast_to(y[lags:], (len(origins), len(y) - lags))[..., None]
    more = {name: np.repeat(value, len(origins), 0) for name, value in before.items()}
    found = model.forecast(
        steps=HORIZON, x=rows.copy(), lengths=origins - lags, samples=1, seed=0, **more
    )
    return found.mean["x"][..., 0].numpy(), found.sd["x"][..., 0].numpy() ** 2


def components(**settings: Any) -> Callable[[Array, int], tuple[Array, Array]]:
    """Forecast by unobserved components of statsmodels, with its own diffuse start."""

    def forecasts(y: Array, first: int) -> tuple[Array, Array]:
        import statsmodels.api as sm

        params = sm.tsa.UnobservedComponents(y[:first], **settings).fit(disp=0, maxiter=1000).params
        found = []
        for origin in range(first, len(y) - HORIZON + 1):
            model = sm.tsa.UnobservedComponents(y[:origin], **settings)
            ahead = model.filter(params).get_forecast(HORIZON)
            found.append((np.asarray(ahead.predicted_mean), np.asarray(ahead.var_pred_mean)))
        mean, variance = (np.stack(part) for part in zip(*found, strict=True))
        return mean, variance

    return forecasts


def autoregression(lags: int) -> Callable[[Array, int], tuple[Array, Array]]:
    """Forecast by AutoReg of statsmodels."""

    def forecasts(y: Array, first: int) -> tuple[Array, Array]:
        from statsmodels.tsa.ar_model import AutoReg

        fitted = AutoReg(y[:first], lags).fit()
        scale = float((fitted.resid**2).mean())
        weights = np.zeros(HORIZON)  # of the shocks: how one moves the next values
        weights[0] = 1
        for step in range(1, HORIZON):
            taken = min(step, lags)
            weights[step] = fitted.params[1 : taken + 1] @ weights[step - taken : step][::-1]
        spread = scale * np.cumsum(weights**2)
        found = [
            fitted.apply(y[:origin]).forecast(HORIZON)
            for origin in range(first, len(y) - HORIZON + 1)
        ]
        return np.stack(found), np.broadcast_to(spread, (len(found), HORIZON))

    return forecasts


def all_series() -> dict[str, Series]:
    from statsmodels.datasets import macrodata, nile, sunspots

    def column(data: Any, name: str) -> Array:
        return data.load().data[name].to_numpy(dtype=float)

    growth = 100 * np.diff(np.log(column(macrodata, "realgdp")))
    return {
        "Nile, local level": Series(
            column(nile, "volume"), lambda: local_level().double(), components(level="llevel")
        ),
        "sunspots, AR(9)": Series(
            column(sunspots, "SUNACTIVITY"),
            lambda: ar(lags=9, start="given").double(),
            autoregression(9),
            9,
        ),
        "growth of GDP, AR(3)": Series(
            growth, lambda: ar(lags=3, start="given").double(), autoregression(3), 3
        ),
        "inflation, local level": Series(
            column(macrodata, "infl"), lambda: local_level().double(), components(level="llevel")
        ),
        "unemployment, local trend": Series(
            column(macrodata, "unemp"), lambda: local_trend().double(), components(level="lltrend")
        ),
    }


def log_score(y: Array, mean: Array, variance: Array) -> Array:
    return -0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)


def crps(y: Array, mean: Array, variance: Array) -> Array:
    """The continuous ranked probability score of a normal forecast; less is better."""
    from scipy.special import ndtr

    deviation = np.sqrt(variance)
    z = (y - mean) / deviation
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return deviation * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / np.sqrt(np.pi))


def error_of_mean(values: Array, overlap: int) -> float:
    """Return the standard error of a mean of correlated values (Newey and West)."""
    n, left = len(values), values - values.mean()
    total = float(left @ left)
    for lag in range(1, overlap + 1):
        total += 2 * (1 - lag / (overlap + 1)) * float(left[lag:] @ left[:-lag])
    return math.sqrt(max(total, 0.0)) / n


def scores(series: Series) -> dict[str, Any]:
    """Score both sides at all origins after the first 60 % of the series."""
    y, first = series.values, round(0.6 * len(series.values))
    future = np.lib.stride_tricks.sliding_window_view(y[first:], HORIZON)
    sides = {"ours": our_forecasts(series, first), "theirs": series.theirs(y, first)}
    found: dict[str, Any] = {"origins": len(future)}
    for kind, rule, overlap in (("log score", log_score, 0), ("crps", crps, HORIZON - 1)):
        each = {side: rule(future, *moments) for side, moments in sides.items()}
        by_origin = {
            side: value[:, 0] if kind == "log score" else value.mean(1)
            for side, value in each.items()
        }
        difference = by_origin["ours"] - by_origin["theirs"]
        found[kind] = {side: float(value.mean()) for side, value in by_origin.items()} | {
            "error": error_of_mean(by_origin["ours"], overlap),
            "difference": float(difference.mean()),
            "error of difference": error_of_mean(difference, overlap),
        }
    return found


def print_scores(name: str, found: dict[str, Any]) -> None:
    cells = []
    for kind in ("log score", "crps"):
        one = found[kind]
        cells += [
            f"{one['ours']:.4f} ± {one['error']:.4f}",
            f"{one['theirs']:.4f}",
            f"{one['difference']:+.5f} ± {one['error of difference']:.5f}",
        ]
    print(f"| {name} | {found['origins']} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["coverage", "scores"], help="run one of the two parts")
    parser.add_argument("--futures", type=int, default=10_000, help="rows of each model")
    parser.add_argument("--samples", type=int, default=2000, help="draws, where nothing is exact")
    parser.add_argument("--models", default="", help="only the models whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    threadpool_limits(1)
    report: dict[str, Any] = {}
    if args.json and args.json.exists():  # models that are not measured again stay
        report = json.loads(args.json.read_text())
    report |= {"machine": machine("cpu", ["statsmodels"]), "futures": args.futures}
    if args.only != "scores":
        heads = " | ".join(f"{level:.0%}, step {step}" for level in LEVELS for step in SHOWN)
        print(f"| model | method | {heads} | largest deviation, errors |")
        print("| --- | --- |" + " ---: |" * (len(LEVELS) * len(SHOWN) + 1))
        for name, make in COVERED.items():
            if args.models in name:
                exact = name != "stochastic volatility"
                settings = (1, "exact") if exact else (args.samples, "particles")
                found = coverage(make(), args.futures, *settings)
                report.setdefault("coverage", {})[name] = found
                keep(args.json, report)
                print_coverage(name, found, args.futures)
    if args.only != "coverage":
        print(
            "\n| series | origins | log score, aevb | statsmodels | difference | CRPS, aevb | "
            "statsmodels | difference |"
        )
        print("| --- | ---: |" + " ---: |" * 6)
        for name, series in all_series().items():
            if args.models in name:
                report.setdefault("scores", {})[name] = found = scores(series)
                keep(args.json, report)
                print_scores(name, found)


def keep(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
