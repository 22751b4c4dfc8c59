"""Compare filtered, smoothed and forecast moments of time series with statsmodels and hmmlearn.

Usage::

    python benchmarks/series_statsmodels.py

Both sides have the same parameters and the same first state. The table has the largest absolute
difference of means and of variances over all steps, relative to the largest value of that kind. The
last column is the time of ours divided by the time of theirs, as the median of interleaved runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from exact_time import exact, raw, started

from aevb import Deterministic, Model, Normal, OneHot, linear

AHEAD = 12
START = 1000.0  # standard deviation of the first state


@dataclass(frozen=True)
class Moments:
    """Means and variances by kind: "filtered", "smoothed", "forecast"."""

    mean: Mapping[str, np.ndarray]
    variance: Mapping[str, np.ndarray]


Contest = tuple[Callable[[], Moments], Callable[[], Moments]]


def ours(model: Model, y: np.ndarray, names: list[str]) -> Moments:
    """Filter, smooth and forecast a series with our model; ``names`` are its latents in order."""
    x = y[None, :, None]
    beliefs = {"filtered": model.filter(x=x), "smoothed": model.smooth(x=x)}
    mean, variance = {}, {}
    for kind, found in beliefs.items():
        mean[kind] = np.stack([found.mean[name][0, :, 0].numpy() for name in names])
        variance[kind] = np.stack([found.sd[name][0, :, 0].numpy() ** 2 for name in names])
    forecast = model.forecast(steps=AHEAD, x=x, samples=1, seed=0)
    mean["forecast"] = forecast.mean["x"][0, :, 0].numpy()
    variance["forecast"] = forecast.sd["x"][0, :, 0].numpy() ** 2
    return Moments(mean, variance)


def theirs(model: Any, params: np.ndarray, states: int) -> Moments:
    """Filter, smooth and forecast with statsmodels; the first ``states`` states are compared."""
    found = model.smooth(params)
    ahead = found.get_forecast(AHEAD)
    return Moments(
        {
            "filtered": found.filtered_state[:states],
            "smoothed": found.smoothed_state[:states],
            "forecast": np.asarray(ahead.predicted_mean),
        },
        {
            "filtered": _variances(found.filtered_state_cov, states),
            "smoothed": _variances(found.smoothed_state_cov, states),
            "forecast": np.asarray(ahead.var_pred_mean),
        },
    )


def _variances(covariances: np.ndarray, states: int) -> np.ndarray:
    return np.stack([covariances[i, i] for i in range(states)])


def _known(model: Any, variances: list[float]) -> Any:
    """Set the first state to N(0, variances), and count every step."""
    model.ssm.initialize_known(np.zeros(len(variances)), np.diag(variances))
    model.ssm.loglikelihood_burn = 0
    return model


def nile(missing: float) -> np.ndarray:
    from statsmodels.datasets import nile as data

    y = data.load().data["volume"].to_numpy(dtype=float)
    return np.where(np.random.default_rng(7).random(len(y)) < missing, np.nan, y)


def sunspots() -> np.ndarray:
    from statsmodels.datasets import sunspots as data

    y = data.load().data["SUNACTIVITY"].to_numpy(dtype=float)
    return y - y.mean()


def local_level(missing: float) -> Contest:
    """The Nile as a random walk with noise."""
    import statsmodels.api as sm

    y, noise, level = nile(missing), 15099.0, 1469.1
    p = {
        "z[0]": Normal(1, scale=START),
        "z[t] | z[t-1]": exact({"z[t-1]": 1}),
        "x[t] | z[t]": exact({"z[t]": 1}),
    }
    scales = {"p(z[t]|z[t-1])": level**0.5, "p(x[t]|z[t])": noise**0.5}
    model = started(Model(p, {"z[t] | x[t]": Normal()}), scales)

    def peer() -> Moments:
        found = _known(sm.tsa.UnobservedComponents(y, "llevel"), [START**2])
        return theirs(found, np.array([noise, level]), 1)

    return peer, lambda: ours(model, y, ["z"])


def local_trend(missing: float) -> Contest:
    """The Nile as a level with a drifting slope."""
    import statsmodels.api as sm

    y, noise, level, slope = nile(missing), 14000.0, 1200.0, 30.0
    p = {
        "l[0]": Normal(1, scale=START),
        "b[0]": Normal(1, scale=START),
        "l[t] | l[t-1], b[t-1]": exact({"l[t-1]": 1, "b[t-1]": 1}),
        "b[t] | b[t-1]": exact({"b[t-1]": 1}),
        "x[t] | l[t]": exact({"l[t]": 1}),
    }
    scales = {
        "p(l[t]|l[t-1], b[t-1])": level**0.5,
        "p(b[t]|b[t-1])": slope**0.5,
        "p(x[t]|l[t])": noise**0.5,
    }
    model = started(Model(p, {"l[t] | x[t]": Normal(), "b[t] | x[t]": Normal()}), scales)

    def peer() -> Moments:
        found = _known(sm.tsa.UnobservedComponents(y, "lltrend"), [START**2] * 2)
        return theirs(found, np.array([noise, level, slope]), 2)

    return peer, lambda: ours(model, y, ["l", "b"])


def autoregression() -> Contest:
    """The sunspots as an AR(2) with observation noise; the second state is the first, delayed."""
    import statsmodels.api as sm

    y, a, b, shock, noise = sunspots(), 1.39, -0.69, 250.0, 20.0
    p = {
        "z[0]": Normal(1, scale=START),
        "z[t] | z[t-1], w[t-1]": exact({"z[t-1]": a, "w[t-1]": b}),
        "w[t] | z[t-1]": Deterministic(1, linear(bias=False, fixed={"z[t-1]": 1})),
        "x[t] | z[t]": exact({"z[t]": 1}),
    }
    scales = {"p(z[t]|z[t-1], w[t-1])": shock**0.5, "p(x[t]|z[t])": noise**0.5}
    model = started(Model(p, {"z[t] | x[t]": Normal()}), scales)

    def peer() -> Moments:
        found = sm.tsa.SARIMAX(
            y, order=(2, 0, 0), measurement_error=True, enforce_stationarity=False
        )
        return theirs(_known(found, [START**2, 0.0]), np.array([a, b, noise, shock]), 1)

    return peer, lambda: ours(model, y, ["z"])


def hidden_markov() -> Contest:
    """Three states and two columns, T = 1,000: posterior probabilities, against hmmlearn."""
    from hmmlearn.hmm import GaussianHMM

    rng = np.random.default_rng(0)
    move = np.array([[0.9, 0.07, 0.03], [0.05, 0.9, 0.05], [0.04, 0.06, 0.9]])
    means, spreads = np.array([[0.0, 0.0], [1.5, 1.0], [-1.0, 2.0]]), np.array([1.0, 0.7, 1.3])
    states = [0]
    for _ in range(999):
        states.append(int(rng.choice(3, p=move[states[-1]])))
    x = means[states] + spreads[states][:, None] * rng.normal(size=(1000, 2))
    peer_model = GaussianHMM(3, "diag")
    peer_model.startprob_, peer_model.transmat_ = np.full(3, 1 / 3), move
    peer_model.means_ = means
    peer_model.covars_ = np.repeat(spreads[:, None] ** 2, 2, 1)
    p = {"y[0]": OneHot(3, learned=True), "y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(2)}
    model = Model(p, {"y[t] | x[t]": OneHot()}).double()
    with torch.no_grad():
        model.factors["p(y[0])"].root.zero_()
        moves, seen = (
            model.factors[name].net.blocks for name in ("p(y[t]|y[t-1])", "p(x[t]|y[t])")
        )
        moves.bias.zero_()
        moves.weights["y[t-1]"].copy_(torch.tensor(np.log(move).T))
        seen.bias.zero_()
        scales = torch.tensor([[raw(spread) for spread in spreads]] * 2, dtype=torch.float64)
        seen.weights["y[t]"].copy_(torch.cat([torch.tensor(means.T), scales]))

    def theirs_found() -> Moments:
        return Moments({"smoothed": peer_model.predict_proba(x)}, {})

    def ours_found() -> Moments:
        return Moments({"smoothed": model.smooth(x=x[None]).probs["y"][0].numpy()}, {})

    return theirs_found, ours_found


CONTESTS: dict[str, Callable[[], Contest]] = {
    "Nile, local level": lambda: local_level(0.0),
    "Nile, local level, 20 % missing": lambda: local_level(0.2),
    "Nile, local linear trend": lambda: local_trend(0.0),
    "Nile, local linear trend, 20 % missing": lambda: local_trend(0.2),
    "sunspots, AR(2) with noise": autoregression,
    "hidden Markov (hmmlearn)": hidden_markov,
}


def differences(a: Moments, b: Moments) -> dict[str, tuple[float, float]]:
    """Return, by kind, the largest relative differences of means and of variances."""

    def largest(ours: np.ndarray, theirs: np.ndarray) -> float:
        return float(np.abs(ours - theirs).max() / np.abs(theirs).max())

    return {
        kind: (
            largest(b.mean[kind], a.mean[kind]),
            largest(b.variance[kind], a.variance[kind]) if kind in a.variance else float("nan"),
        )
        for kind in a.mean
    }


def seconds(run: Callable[[], Moments]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved runs that are timed")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'model':40}{'':12}{'means':>10}{'variances':>11}{'ours/theirs':>13}")
    for name, build in CONTESTS.items():
        peer, mine = build()
        found = differences(peer(), mine())
        ratio = median(seconds(mine) / seconds(peer) for _ in range(rounds))
        for i, (kind, (mean, variance)) in enumerate(found.items()):
            times = f"{ratio:12.2f}×" if i == 0 else ""
            print(f"{name if i == 0 else '':40}{kind:12}{mean:10.1e}{variance:11.1e}{times}")


if __name__ == "__main__":
    main()
