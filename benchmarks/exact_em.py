"""Compare exact EM with scikit-learn: factor analysis and Gaussian mixtures.

python benchmarks/exact_em.py                       # all rows, 5 rounds
python benchmarks/exact_em.py --only wine --rounds 9
python benchmarks/exact_em.py --json docs/figures/exact-em.json

Both sides work on the same rows, one after the other in every round, in one process, with the
default threads of torch and BLAS. Times are medians over the rounds, and the ratio is the median of
the rounds' ratios. Mixtures start with rows of the data as means, the variances of the columns, and
equal shares. Both sides stop at the same tolerance (scikit-learn's is for one iteration, ours for
three together). In rows marked "missing", a tenth of the cells are removed. scikit-learn cannot
read these, so it has no number there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture
from tables import exact_head, exact_line
from timing import machine

from aevb import Exact, Model, MultivariateNormal, Normal, OneHot, em, fit, linear
from aevb.declare.distributions import inverse_softplus, vector_from_tril

CLUSTERS = 5
# A function that trains, and returns the mean evidence of the rows and the iterations.
Side = Callable[[], tuple[float, int]]


def standardised(x: np.ndarray) -> np.ndarray:
    x = x[:, x.std(0) > 0]
    return (x - x.mean(0)) / x.std(0)


def factors(n: int, d: int, count: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return standardised(
        random.normal(size=(n, count)) @ random.normal(size=(count, d))
        + random.normal(size=(n, d)) * random.uniform(0.5, 2, d)
    )


def clusters(n: int, d: int) -> np.ndarray:
    random = np.random.default_rng(0)
    centres, shapes, which = (
        1.5 * random.normal(size=(CLUSTERS, d)),
        random.normal(size=(CLUSTERS, d, d)) / np.sqrt(d),
        random.integers(CLUSTERS, size=n),
    )
    return (
        centres[which]
        + np.einsum("nij,nj->ni", shapes[which], random.normal(size=(n, d)))
        + 0.3 * random.normal(size=(n, d))
    )


def with_holes(x: np.ndarray) -> np.ndarray:
    return np.where(np.random.default_rng(1).random(x.shape) < 0.1, np.nan, x)


def factor_analysis(x: np.ndarray, count: int, holes: bool) -> tuple[Side | None, Side]:
    data = with_holes(x) if holes else x

    def theirs() -> tuple[float, int]:
        found = FactorAnalysis(count).fit(x)
        return float(found.loglike_[-1]) / len(x), found.n_iter_

    def ours() -> tuple[float, int]:
        torch.manual_seed(0)
        p = {"z": Normal(count), "x | z": Normal(x.shape[1], scale="learned")}
        run = fit(
            Model(p, {"z | x": MultivariateNormal(net=linear(), covariance="shared")}),
            {"x": data},
            schedule=em(),
        )
        return run.rows[-1]["evidence"], run.step

    return None if holes else theirs, ours


def mixture(x: np.ndarray, kind: str, tol: float, holes: bool) -> tuple[Side | None, Side]:
    n, d = x.shape
    data = with_holes(x) if holes else x
    means, scale = x[np.random.default_rng(1).choice(n, CLUSTERS, replace=False)], x.std(0)

    def theirs() -> tuple[float, int]:
        precision = np.stack([np.diag(scale**-2.0) if kind == "full" else scale**-2.0] * CLUSTERS)
        shares = np.full(CLUSTERS, 1 / CLUSTERS)
        found = GaussianMixture(
            CLUSTERS,
            covariance_type=kind,
            weights_init=shares,
            means_init=means,
            precisions_init=precision,
            max_iter=1000,
        ).fit(x)
        return found.lower_bound_, found.n_iter_

    def ours() -> tuple[float, int]:
        spec = MultivariateNormal(d) if kind == "full" else Normal(d)
        model = Model(p={"y": OneHot(CLUSTERS, learned=True), "x | y": spec}, q={"y | x": Exact()})
        spread = torch.as_tensor(scale)
        raw = vector_from_tril(spread.diag()) if kind == "full" else inverse_softplus(spread)
        with torch.no_grad():
            blocks: Any = model.factors["p(x|y)"].net.blocks  # type: ignore[union-attr]
            blocks.weights["y"].copy_(
                torch.cat([torch.as_tensor(means), raw.expand(CLUSTERS, -1)], 1).T
            )
            blocks.bias.zero_()
        run = fit(model, {"x": data}, schedule=em(start="keep", tol=tol))
        return run.rows[-1]["evidence"], run.step

    return None if holes else theirs, ours


def problems() -> dict[str, Callable[[bool], tuple[Side | None, Side]]]:
    found: dict[str, Callable[[bool], tuple[Side | None, Side]]] = {
        "breast cancer 569 × 30, 5 factors": lambda holes: factor_analysis(
            standardised(load_breast_cancer().data), 5, holes
        ),
        "wine 178 × 13, 3 factors": lambda holes: factor_analysis(
            standardised(load_wine().data), 3, holes
        ),
        "digits 1,797 × 61, 10 factors": lambda holes: factor_analysis(
            standardised(load_digits().data), 10, holes
        ),
        "factors 5,000 × 50, 5 factors": lambda holes: factor_analysis(
            factors(5_000, 50, 5), 5, holes
        ),
        "factors 50,000 × 100, 10 factors": lambda holes: factor_analysis(
            factors(50_000, 100, 10), 10, holes
        ),
    }
    for kind, n, d in (
        ("diag", 20_000, 10),
        ("diag", 100_000, 20),
        ("full", 20_000, 10),
        ("full", 100_000, 20),
    ):
        for tol in (1e-3, 1e-5):
            name = f"{kind} mixture {n:,} × {d}, tol {tol:g}"
            found[name] = lambda holes, kind=kind, n=n, d=d, tol=tol: mixture(
                clusters(n, d), kind, tol, holes
            )  # type: ignore[misc]
    return found


def measured(side: Side) -> tuple[float, int, float]:
    began = time.perf_counter()
    evidence, iterations = side()
    return evidence, iterations, time.perf_counter() - began


def row(name: str, sides: tuple[Side | None, Side], rounds: int) -> dict[str, Any]:
    """Measure evidence, iterations and seconds of both sides, and the ratio of the times."""
    theirs, ours = sides
    found = [
        (measured(theirs) if theirs is not None else None, measured(ours)) for _ in range(rounds)
    ]

    def side(values: list[tuple[float, int, float]]) -> dict[str, Any]:
        return {
            "log p": float(values[-1][0]),
            "iterations": str(values[-1][1]),
            "seconds": statistics.median(value[2] for value in values),
        }

    theirs_found = [other for other, _ in found if other is not None]
    ratio = (
        statistics.median(mine[2] / other[2] for other, mine in found if other is not None)
        if theirs_found
        else None
    )
    return {
        "data": name,
        "theirs": side(theirs_found) if theirs_found else None,
        "ours": side([mine for _, mine in found]),
        "ratio": ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--no-missing", action="store_true", help="leave out the rows with missing cells"
    )
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=Warning, module="sklearn")
    rows: list[dict[str, Any]] = []
    print(*exact_head("scikit-learn"), sep="\n")
    for name, problem in problems().items():
        if given.only not in name:
            continue
        measured(problem(False)[1])  # the first call loads modules, so it is not timed
        for holes in (False, True)[: 1 if given.no_missing else 2]:
            rows.append(
                row(
                    f"{name}, missing" if holes else name,
                    problem(holes),
                    1 if holes else given.rounds,
                )
            )
            print(exact_line(rows[-1]), flush=True)
    if given.json:
        record = {
            "machine": machine("cpu", ["scikit-learn"]),
            "rounds": given.rounds,
            "who": "scikit-learn",
            "rows": rows,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
