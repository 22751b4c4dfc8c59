"""Compare exact maximum likelihood for time series with statsmodels and hmmlearn.

pip install "aevb[bench]"
python benchmarks/exact_time.py --rounds 5
python benchmarks/exact_time.py --only nile
python benchmarks/exact_time.py --rounds 9 --json docs/figures/exact-time.json

The libraries are the Kalman filter of statsmodels and the forward-backward algorithm of hmmlearn.
Both sides fit the same model from the same start, in turns, in one process. Seconds are CPU seconds
of this process, the smallest of the rounds. On both sides they include the declaration of the model
and the whole fit.

The models have the same first state. By default statsmodels has a diffuse first state, and its
log-likelihood omits the first terms. Here `initialize_known` sets it to N(0, s²) with a fixed s, as
"z[0]" declares it. The optimiser of statsmodels is its default, L-BFGS with numerical derivatives.
hmmlearn runs EM without priors (its default adds some), with the tolerance in the table. It does
not accept missing cells, so these rows have only the result of aevb.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tables import exact_head, exact_line
from threadpoolctl import threadpool_limits
from timing import machine

from aevb import Deterministic, Model, Normal, em, fit, linear, mle
from aevb.declare.distributions import inverse_softplus
from aevb.training.schedules import Schedule
from aevb.zoo import hmm, local_level

WHO = "statsmodels or hmmlearn"


class Fitted(NamedTuple):
    """The result of a fit: the log-likelihood of all data, iterations, evaluations."""

    value: float
    iterations: int
    evaluations: int | None


Contest = tuple[Callable[[], Fitted] | None, Callable[[], Fitted]]


def raw(scale: float) -> float:
    """Return the raw number that a softplus maps to this scale."""
    return float(inverse_softplus(torch.tensor(scale, dtype=torch.float64)))


def ours(model: Model, data: dict[str, Any], schedule: Schedule | None = None) -> Fitted:
    run = fit(model, data, schedule=mle() if schedule is None else schedule)
    counts = [re.search(r"\((\d+) evaluations\)", row.get("note", "")) for row in run.rows]
    return Fitted(
        float(run.history["evidence"][-1]) * len(data["x"]),
        run.step,
        next((int(found[1]) for found in counts if found), None),
    )


def started(model: Model, scales: dict[str, float]) -> Model:
    """Set the learned scale of each factor, and use double precision."""
    for factor, scale in scales.items():
        model.factors[factor].vectors["scale"].data.fill_(raw(scale))
    return model.double()


def exact(fixed: dict[str, Any] | None = None, d: int = 1) -> Normal:
    return Normal(d, linear(bias=False, fixed=fixed), scale="learned")


# Local level --------------------------------------------------------------------------------------


def nile(missing: float) -> Contest:
    """The annual flow of the Nile, T = 100: a random walk with observation noise; two variances."""
    import statsmodels.api as sm
    from statsmodels.datasets import nile as data

    y = data.load().data["volume"].to_numpy(dtype=float)
    y = _with_gaps(y, missing)

    def structural() -> Any:
        model = sm.tsa.UnobservedComponents(y, "llevel")
        _known(model, 1, 1000.0)
        return model

    start = structural().start_params

    def declared() -> Model:
        scales = {
            "p(x[t]|level[t])": float(np.sqrt(start[0])),
            "p(level[t]|level[t-1])": float(np.sqrt(start[1])),
        }
        return started(local_level(start=1000.0), scales)

    return _statsmodels(structural, start), lambda: ours(declared(), {"x": y[None, :, None]})


# Five states --------------------------------------------------------------------------------------


def structural(missing: float) -> Contest:
    """Level, slope and a season of four, T = 1,000: five states and four variances.

    Two of the states are shifted copies.
    """
    import statsmodels.api as sm

    rng, steps = np.random.default_rng(0), 1000
    level = np.cumsum(rng.normal(0, 0.3, steps) + np.cumsum(rng.normal(0, 0.02, steps)))
    season = np.zeros(steps + 3)
    season[:3] = 2, -1, -2
    for t in range(3, steps + 3):
        season[t] = -season[t - 3 : t].sum() + rng.normal(0, 0.1)
    y = _with_gaps(level + season[3:] + rng.normal(0, 1, steps), missing)

    def components() -> Any:
        model = sm.tsa.UnobservedComponents(y, "lltrend", seasonal=4)
        # The shifted copies begin at 0.
        model.ssm.initialize_known(np.zeros(5), np.diag([100.0, 100.0, 100.0, 0.0, 0.0]))
        model.ssm.loglikelihood_burn = 0
        return model

    start = np.array([1.0, 0.1, 0.01, 0.1])  # irregular, level, trend, seasonal

    def declared() -> Model:
        def copied(of: str) -> Deterministic:
            return Deterministic(1, linear(bias=False, fixed={of: 1}))

        p = {f"{name}[0]": Normal(1, scale=10.0) for name in "lbs"} | {
            "l[t] | l[t-1], b[t-1]": exact({"l[t-1]": 1, "b[t-1]": 1}),
            "b[t] | b[t-1]": exact({"b[t-1]": 1}),
            "s[t] | s[t-1], r[t-1], o[t-1]": exact({"s[t-1]": -1, "r[t-1]": -1, "o[t-1]": -1}),
            "r[t] | s[t-1]": copied("s[t-1]"),
            "o[t] | r[t-1]": copied("r[t-1]"),
            "x[t] | l[t], s[t]": exact({"l[t]": 1, "s[t]": 1}),
        }
        factors = (
            "p(x[t]|l[t], s[t])",
            "p(l[t]|l[t-1], b[t-1])",
            "p(b[t]|b[t-1])",
            "p(s[t]|s[t-1], r[t-1], o[t-1])",
        )
        model = Model(p, {f"{name}[t] | x[t]": Normal() for name in "lbs"})
        return started(model, dict(zip(factors, np.sqrt(start).tolist(), strict=True)))

    return _statsmodels(components, start), lambda: ours(declared(), {"x": y[None, :, None]})


def factors(missing: float) -> Contest:
    """Five states with different decay rates, five series, T = 1,000.

    There are fifteen parameters: rates and variances.
    """
    import statsmodels.api as sm

    rng, steps, k = np.random.default_rng(1), 1000, 5
    z = np.zeros((steps, k))
    for t in range(1, steps):
        z[t] = np.linspace(0.5, 0.95, k) * z[t - 1] + rng.normal(0, 0.5, k)
    y = _with_gaps(z + rng.normal(0, 1, (steps, k)), missing)

    class Decays(sm.tsa.statespace.MLEModel):
        def __init__(self) -> None:
            super().__init__(y, k_states=k, k_posdef=k)
            self["selection"] = self["design"] = np.eye(k)
            _known(self, k, 1.0)

        start_params = np.concatenate([np.full(k, 0.5), np.ones(2 * k)])
        param_names = tuple(f"{kind}.{i}" for kind in ("rate", "state", "noise") for i in range(k))

        def transform_params(self, free: np.ndarray) -> np.ndarray:
            return np.concatenate([free[:k], free[k:] ** 2])

        def untransform_params(self, held: np.ndarray) -> np.ndarray:
            return np.concatenate([held[:k], held[k:] ** 0.5])

        def update(self, params: np.ndarray, **settings: Any) -> None:
            params = super().update(params, **settings)
            self["transition"], self["state_cov"], self["obs_cov"] = (
                np.diag(params[:k]),
                np.diag(params[k : 2 * k]),
                np.diag(params[2 * k :]),
            )

    def declared() -> Model:
        names = "abcde"
        p: dict[str, Any] = {f"{name}[0]": Normal(1) for name in names}
        p |= {f"{name}[t] | {name}[t-1]": exact() for name in names}
        columns = {f"{name}[t]": np.eye(k)[:, [i]] for i, name in enumerate(names)}
        p["x[t] | a[t], b[t], c[t], d[t], e[t]"] = exact(columns, k)
        model = Model(p, {f"{name}[t] | x[t]": Normal() for name in names})
        for name in names:
            model.factors[f"p({name}[t]|{name}[t-1])"].net.blocks.weights[
                f"{name}[t-1]"
            ].data.fill_(0.5)
        return model.double()

    return _statsmodels(Decays, Decays.start_params), lambda: ours(declared(), {"x": y[None]})


# Hidden Markov ------------------------------------------------------------------------------------


def switching_series() -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    """Return a series of three classes, T = 1,000, and where EM starts: means, scale and moves."""
    rng, steps = np.random.default_rng(0), 1000
    A = np.array([[0.95, 0.04, 0.01], [0.03, 0.95, 0.02], [0.02, 0.03, 0.95]])
    centres = np.array([[0.0, 0.0], [1.5, 1.0], [-1.0, 2.0]])
    states = [0]
    for _ in range(steps - 1):
        states.append(int(rng.choice(3, p=A[states[-1]])))
    x = centres[states] + rng.normal(size=(steps, 2))
    return x, centres + 0.5, 1.5, np.full((3, 3), 0.1) + 0.7 * np.eye(3)


def hmm_at(model: Model, means: np.ndarray, spread: float, moves: np.ndarray) -> Model:
    """Set a hidden Markov model's parameters: equal shares at first, one scale for all."""
    model = model.double()
    classes, columns = means.shape
    with torch.no_grad():
        model.factors["p(y[0])"].root.zero_()
        chain = model.factors["p(y[t]|y[t-1])"].net.blocks
        seen = model.factors["p(x[t]|y[t])"].net.blocks
        chain.bias.zero_()
        chain.weights["y[t-1]"].copy_(torch.tensor(np.log(moves).T))
        seen.bias.zero_()
        scales = torch.full((columns, classes), raw(spread), dtype=torch.float64)
        seen.weights["y[t]"].copy_(torch.cat([torch.tensor(means.T), scales]))
    return model


def hidden_markov(missing: float, tol: float, schedule: Schedule) -> Contest:
    """Three states, two columns, diagonal Gaussians: 2 + 6 + 12 free parameters."""
    x, means, spread, stay = switching_series()
    x = _with_gaps(x, missing)

    def theirs() -> Fitted:
        from hmmlearn.hmm import GaussianHMM

        model = GaussianHMM(
            3,
            "diag",
            tol=tol,
            n_iter=10000,
            init_params="",
            covars_prior=0,
            covars_weight=0,
            min_covar=1e-10,
        )
        model.startprob_, model.transmat_ = np.full(3, 1 / 3), stay.copy()
        model.means_, model.covars_ = means.copy(), np.full((3, 2), spread**2)
        model.fit(x)
        return Fitted(float(model.score(x)), model.monitor_.iter, None)

    return None if missing else theirs, lambda: ours(
        hmm_at(hmm(2, 3), means, spread, stay), {"x": x[None]}, schedule
    )


# The table ----------------------------------------------------------------------------------------


def _with_gaps(values: np.ndarray, share: float) -> np.ndarray:
    return np.where(np.random.default_rng(7).random(values.shape) < share, np.nan, values)


def _known(model: Any, size: int, scale: float) -> None:
    """Set the first state to N(0, scale²), and count every step in the likelihood."""
    model.ssm.initialize_known(np.zeros(size), np.eye(size) * scale**2)
    model.ssm.loglikelihood_burn = 0


def _statsmodels(declared: Callable[[], Any], start: np.ndarray) -> Callable[[], Fitted]:
    def run() -> Fitted:
        found = declared().fit(start_params=start, disp=0, maxiter=1000, cov_type="none")
        return Fitted(
            float(found.llf), found.mle_retvals["iterations"], found.mle_retvals["fcalls"]
        )

    return run


CONTESTS: dict[str, Callable[[], Contest]] = {
    "nile": lambda: nile(0.0),
    "nile, 20 % missing": lambda: nile(0.2),
    "5 states, structural": lambda: structural(0.0),
    "5 states, structural, 10 % missing": lambda: structural(0.1),
    "5 states, 5 series": lambda: factors(0.0),
    "5 states, 5 series, 10 % missing": lambda: factors(0.1),
    "hmm by em(), both tol 1e-2": lambda: hidden_markov(0.0, 1e-2, em(start="keep", tol=1e-2)),
    "hmm by em(), both tol 1e-6": lambda: hidden_markov(0.0, 1e-6, em(start="keep", tol=1e-6)),
    "hmm by em(), their tol 1e-2": lambda: hidden_markov(0.0, 1e-2, em(start="keep")),
    "hmm by em(), their tol 1e-6": lambda: hidden_markov(0.0, 1e-6, em(start="keep")),
    "hmm by em(), 10 % missing": lambda: hidden_markov(0.1, 1e-6, em(start="keep")),
    "hmm by mle(), their tol 1e-6": lambda: hidden_markov(0.0, 1e-6, mle()),
}


def timed(run: Callable[[], Fitted]) -> tuple[float, Fitted]:
    began = time.process_time()
    found = run()
    return time.process_time() - began, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="fits of each side; the least time counts"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", default="", help="take only the rows whose name contains this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(*exact_head(WHO), sep="\n")
    for name, make in CONTESTS.items():
        if args.only in name:
            rows.append(row(name, make(), args.rounds))
            print(exact_line(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "machine": machine("cpu", ["statsmodels", "hmmlearn"]),
                    "rounds": args.rounds,
                    "who": WHO,
                    "rows": rows,
                },
                indent=1,
            )
            + "\n"
        )


def row(name: str, contest: Contest, rounds: int) -> dict[str, Any]:
    """Measure both sides: results, iterations (evaluations), smallest seconds, and the ratio."""
    # Limit the threads of numpy and scipy, which are loaded by now. Threads that wait for one
    # another would count as CPU seconds.
    threadpool_limits(1)
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    reached: dict[str, Fitted] = {}
    for _ in range(rounds + 1):  # the first round warms up
        for side, run in zip(times, contest, strict=True):
            if run is not None:
                seconds, reached[side] = timed(run)
                times[side].append(seconds)

    def side(which: str) -> dict[str, Any] | None:
        if which not in reached:
            return None
        found = reached[which]
        evaluations = "" if found.evaluations is None else f" ({found.evaluations})"
        return {
            "log p": found.value,
            "iterations": f"{found.iterations}{evaluations}",
            "seconds": min(times[which][1:]),
        }

    theirs, ours = side("theirs"), side("ours")
    assert ours is not None
    return {
        "data": name,
        "theirs": theirs,
        "ours": ours,
        "ratio": None if theirs is None else ours["seconds"] / theirs["seconds"],
    }


if __name__ == "__main__":
    main()
