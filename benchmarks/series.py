"""Check time series models against statsmodels and hmmlearn: log p, its maximum, and the seconds.

pip install "aevb[bench]"
python benchmarks/series.py
python benchmarks/series.py --only gdp --rounds 5

The first table compares log p at the same parameters: those at which statsmodels starts, and its
optimum. The second one compares the maximum that both sides find, each from its own start, in turns
in one process; seconds are CPU seconds of this process, the smallest of the rounds, and include the
declaration. The third table compares a hidden Markov model with hmmlearn at the same parameters,
and the time of EM from the same start.

Both sides have the same first state: N(0, start²), or for autoregressions the values before the
series. By default, statsmodels has a diffuse first state whose log p omits the first terms.
`initialize_known` replaces it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from exact_time import CONTESTS, Fitted, hmm_at, ours, raw, row, switching_series
from threadpoolctl import threadpool_limits

from aevb import Model
from aevb.zoo import ar, hmm, local_level, local_trend, seasonal

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Problem:
    """A series, the model of each side, and how the parameters of statsmodels are written in ours.

    ``data`` are all variables of our model. ``optimum`` fits theirs: its parameters and log p.
    """

    data: dict[str, Array]
    declared: Callable[[], Model]
    theirs: Callable[[], Any]
    log_p: Callable[[Any, Array], float]
    optimum: Callable[[Any], tuple[Array, float]]
    start: Array
    write: Callable[[Model, Array], None]

    def differences(self) -> list[float]:
        """Return |log p of ours − theirs| at the start and at the optimum of statsmodels."""
        model, found = self.theirs(), []
        for parameters in (self.start, self.optimum(model)[0]):
            mine = self.declared()
            with torch.no_grad():
                self.write(mine, parameters)
            value = mine.log_evidence(**self.data).value.sum().item()
            found.append(abs(value - self.log_p(model, parameters)))
        return found

    def contest(self) -> tuple[Callable[[], Fitted], Callable[[], Fitted]]:
        return (
            lambda: Fitted(self.optimum(self.theirs())[1], 0, None),
            lambda: ours(self.declared(), self.data),
        )


def components(
    y: Array, model: Callable[[], Model], start: float, order: list[str], **settings: Any
) -> Problem:
    """An unobserved-components model.

    ``order`` names our factors in the order of the variances of statsmodels.
    """
    import statsmodels.api as sm

    def theirs() -> Any:
        made = sm.tsa.UnobservedComponents(y, **settings)
        made.ssm.initialize_known(np.zeros(made.k_states), np.eye(made.k_states) * start**2)
        made.ssm.loglikelihood_burn = 0
        return made

    def optimum(made: Any) -> tuple[Array, float]:
        found = made.fit(disp=0, maxiter=1000, cov_type="none")
        return found.params, float(found.llf)

    def write(mine: Model, variances: Array) -> None:
        for factor, variance in zip(order, variances, strict=True):
            mine.factors[factor].vectors["scale"].fill_(raw(max(float(variance) ** 0.5, 1e-12)))

    data = {"x": y[None, :, None]}
    return Problem(
        data,
        lambda: model().double(),
        theirs,
        lambda made, parameters: float(made.loglike(parameters)),
        optimum,
        theirs().start_params,
        write,
    )


def autoregression(y: Array, lags: int) -> Problem:
    """AR(p), given its first p values."""
    from statsmodels.tsa.ar_model import AutoReg

    def log_p(made: Any, parameters: Array) -> float:
        """Of the values after the first ones; the last parameter is the scale of the noise."""
        past = np.lib.stride_tricks.sliding_window_view(y, lags)[:-1, ::-1]
        left = y[lags:] - parameters[0] - past @ parameters[1:-1]
        deviation = parameters[-1]
        return float(-0.5 * (left**2).sum() / deviation**2) - len(left) * float(
            np.log(deviation * np.sqrt(2 * np.pi))
        )

    def optimum(made: Any) -> tuple[Array, float]:
        deviation = np.sqrt((made.resid**2).mean())
        return np.append(made.params, deviation), float(made.llf)

    def write(mine: Model, parameters: Array) -> None:
        factor = mine.factors["p(x[t]|past[t])"]
        factor.net.blocks.bias.fill_(parameters[0])
        factor.net.blocks.weights["past[t]"].copy_(torch.as_tensor(parameters[None, 1:-1].copy()))
        factor.vectors["scale"].fill_(raw(float(parameters[-1])))

    return Problem(
        {"x": y[None, lags:, None], "before": y[:lags][::-1].copy()[None]},
        lambda: ar(lags=lags, start="given").double(),
        lambda: AutoReg(y, lags).fit(),
        log_p,
        optimum,
        np.array([y.mean(), *[0.5 / lags] * lags, y.std()]),
        write,
    )


NOISE, LEVEL = "p(x[t]|level[t])", "p(level[t]|level[t-1])"
TREND, SLOPE = "p(level[t]|level[t-1], slope[t-1])", "p(slope[t]|slope[t-1])"
SEASON = "p(season[t]|season[t-1])"


def problems() -> dict[str, Callable[[], Problem]]:
    from statsmodels.datasets import co2, macrodata, nile, sunspots

    def column(data: Any, name: str) -> Array:
        return data.load().data[name].to_numpy(dtype=float)

    def monthly() -> Array:
        whole = co2.load_pandas().data["co2"].resample("MS").mean().interpolate()
        return whole.to_numpy(dtype=float)

    def trend(name: str, start: float, log: bool = False) -> Problem:
        y = column(macrodata, name)
        return components(
            100 * np.log(y) if log else y,
            lambda: local_trend(start=start),
            start,
            [NOISE, TREND, SLOPE],
            level="lltrend",
        )

    return {
        "nile, local level": lambda: components(
            column(nile, "volume"),
            lambda: local_level(start=1e3),
            1e3,
            [NOISE, LEVEL],
            level="llevel",
        ),
        "inflation, local trend": lambda: trend("infl", 1e3),
        "unemployment, local trend": lambda: trend("unemp", 1e3),
        "100 log gdp, local trend": lambda: trend("realgdp", 1e3, log=True),
        "co2, trend and season of 12": lambda: components(
            monthly(),
            lambda: seasonal(12, start=1e3),
            1e3,
            ["p(x[t]|level[t], season[t])", TREND, SLOPE, SEASON],
            level="lltrend",
            freq_seasonal=[{"period": 12}],
        ),
        "sunspots, AR(9)": lambda: autoregression(column(sunspots, "SUNACTIVITY"), 9),
        "growth of gdp, AR(3)": lambda: autoregression(
            100 * np.diff(np.log(column(macrodata, "realgdp"))), 3
        ),
    }


def print_problem(name: str, problem: Problem, rounds: int) -> None:
    start, best = problem.differences()
    found = row(name, problem.contest(), rounds)
    theirs, mine = found["theirs"], found["ours"]
    print(
        f"| {name} | {start:.0e} | {best:.0e} | {theirs['log p']:.6f} | "
        f"{mine['log p'] - theirs['log p']:+.6f} | {theirs['seconds']:.3f} | "
        f"{mine['seconds']:.3f} |",
        flush=True,
    )


def print_hidden_markov(rounds: int) -> None:
    """Compare evidence and posteriors with hmmlearn at the same parameters, then time EM."""
    from hmmlearn.hmm import GaussianHMM

    x, means, spread, stay = switching_series()
    theirs = GaussianHMM(3, "diag", init_params="")
    theirs.startprob_, theirs.transmat_ = np.full(3, 1 / 3), stay
    theirs.means_, theirs.covars_ = means, np.full((3, 2), spread**2)
    model = hmm_at(hmm(2, 3), means, spread, stay)
    evidence = model.log_evidence(x=x[None]).value.item() - theirs.score(x)
    beliefs = model.posterior(x=x[None])["y"].probs[0].detach().numpy() - theirs.predict_proba(x)
    print(
        f"\nhidden Markov model, T = {len(x):,}, at the same parameters: log p differs by "
        f"{abs(evidence):.0e}, posteriors by at most {np.abs(beliefs).max():.0e}\n"
    )
    print("| EM | log p, hmmlearn | ours − hmmlearn | seconds, hmmlearn | aevb |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in ("hmm by em(), both tol 1e-2", "hmm by em(), both tol 1e-6"):
        found = row(name, CONTESTS[name](), rounds)
        theirs_found, mine = found["theirs"], found["ours"]
        print(
            f"| {name} | {theirs_found['log p']:.4f} | "
            f"{mine['log p'] - theirs_found['log p']:+.4f} | {theirs_found['seconds']:.3f} | "
            f"{mine['seconds']:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="fits of each side; the least time counts"
    )
    parser.add_argument("--only", default="", help="take only the rows whose name contains this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    threadpool_limits(1)
    print(
        "| series | log p apart, at their start | at their optimum | log p, statsmodels | "
        "ours − theirs | seconds, statsmodels | aevb |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, make in problems().items():
        if args.only in name:
            print_problem(name, make(), args.rounds)
    if args.only in "hmm":
        print_hidden_markov(args.rounds)


if __name__ == "__main__":
    main()
