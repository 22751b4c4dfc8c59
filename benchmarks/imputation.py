"""Filling missing cells: the default model of a table against five usual imputers.

    python benchmarks/imputation.py run results.jsonl            # all tables, rates and seeds
    python benchmarks/imputation.py run results.jsonl --only wine --methods mean,knn --seeds 3
    python benchmarks/imputation.py show results.jsonl
    python benchmarks/imputation.py markdown results.jsonl       # the table of docs/howto/table.md

Cells of complete public tables are removed at random, filled, and compared with the truth. ``run``
appends one line per (table, rate, seed, method) and skips lines that the file already has.

Scores of the removed cells, by column and then averaged:

- ``rmse``: root mean squared error of a number, in standard deviations of its whole column.
- ``wrong``: share of levels filled wrongly.
- ``relative``: each column's error (its RMSE or its share of wrong levels) divided by that of the
  column mean or mode, averaged over columns. 1 is no better than the mean or mode.
- ``density``: mean log density of the true numbers, in standard deviations of the column (nats per
  cell), for methods that have a predictive distribution.
- ``probability``: mean log probability of the true levels.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import logsumexp
from scipy.stats import nbinom, poisson
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer

from aevb.tables.fitted import TableModel
from aevb.tables.schema import Schema

RATES, TREES = (0.1, 0.3, 0.5), 50
SEEDS = range(100, 110)  # seeds below 100 were used to develop the model


# Tables -------------------------------------------------------------------------------------------


def tables() -> dict[str, Callable[[], pd.DataFrame]]:
    return {
        "wine": lambda: datasets.load_wine(as_frame=True).data,
        "breast cancer": lambda: datasets.load_breast_cancer(as_frame=True).data,
        "diabetes": lambda: datasets.load_diabetes(as_frame=True, scaled=False).data,
        "penguins": _penguins,
        "election": _election,
        "affairs": _affairs,
    }


def _penguins() -> pd.DataFrame:
    from palmerpenguins import load_penguins

    return load_penguins()


def _election() -> pd.DataFrame:
    """944 rows of a survey in the United States of 1996."""
    from statsmodels.datasets import anes96

    frame = anes96.load_pandas().data.drop(columns="logpopul")
    return frame.assign(vote=frame["vote"].map({0.0: "Clinton", 1.0: "Dole"}))


def _affairs() -> pd.DataFrame:
    """6,366 rows of a survey of married women of 1974."""
    from statsmodels.datasets import fair

    frame = fair.load_pandas().data
    for name in ("occupation", "occupation_husb"):
        frame[name] = "group " + frame[name].astype(int).astype(str)
    return frame


def levelled(frame: pd.DataFrame) -> list[str]:
    """Columns of levels: text, and numbers with two values."""
    return [
        name
        for name in frame
        if not pd.api.types.is_numeric_dtype(frame[name]) or frame[name].nunique() == 2
    ]


def holes(frame: pd.DataFrame, rate: float, seed: int) -> np.ndarray:
    """Which cells are removed: each known cell with probability ``rate``."""
    rng = np.random.default_rng([seed, round(100 * rate)])
    return (rng.random(frame.shape) < rate) & frame.notna().to_numpy()


# Contenders ---------------------------------------------------------------------------------------


@dataclass
class Filled:
    """Filled columns, and log densities or probabilities of the truth where there are any."""

    cells: dict[str, np.ndarray]
    logs: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Coded:
    """A table as standardised numbers and one column per level."""

    matrix: np.ndarray
    place: dict[str, slice]
    mean: dict[str, float]
    spread: dict[str, float]
    levels: dict[str, np.ndarray]

    @classmethod
    def of(cls, frame: pd.DataFrame, listed: Sequence[str]) -> Coded:
        parts: list[np.ndarray] = []
        place, mean, spread, levels = {}, {}, {}, {}
        at = 0
        for name in frame:
            if name in listed:
                kinds = np.array(sorted(frame[name].dropna().unique()))
                part = (frame[name].to_numpy()[:, None] == kinds).astype(float)
                part[frame[name].isna()] = np.nan
                levels[name] = kinds
            else:
                mean[name], spread[name] = frame[name].mean(), frame[name].std(ddof=0) or 1.0
                part = ((frame[name] - mean[name]) / spread[name]).to_numpy(float)[:, None]
            parts.append(part)
            place[name] = slice(at, at + part.shape[1])
            at += part.shape[1]
        return cls(np.concatenate(parts, 1), place, mean, spread, levels)

    def cells(self, full: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: self.levels[name][full[:, at].argmax(1)]
            if name in self.levels
            else full[:, at.start] * self.spread[name] + self.mean[name]
            for name, at in self.place.items()
        }


def _normal(value: np.ndarray, mean: Any, spread: Any) -> np.ndarray:
    return -0.5 * ((value - mean) / spread) ** 2 - np.log(spread) - 0.5 * np.log(2 * np.pi)


def mean(frame: pd.DataFrame, listed: Sequence[str], truth: pd.DataFrame, seed: int) -> Filled:
    """Column mean or mode; a Normal of the column, or its frequencies."""
    cells, logs = {}, {}
    for name in frame:
        known = frame[name].dropna()
        if name in listed:
            share = known.value_counts(normalize=True)
            cells[name] = np.full(len(frame), share.index[0])
            least = 0.5 / len(known)
            logs[name] = np.log([max(share.get(value, 0.0), least) for value in truth[name]])
        else:
            cells[name] = np.full(len(frame), known.mean())
            logs[name] = _normal(truth[name].to_numpy(float), known.mean(), known.std())
    return Filled(cells, logs)


def knn(frame: pd.DataFrame, listed: Sequence[str], truth: pd.DataFrame, seed: int) -> Filled:
    """KNNImputer with its 5 neighbours, on standardised numbers and one column per level."""
    coded = Coded.of(frame, listed)
    return Filled(coded.cells(KNNImputer().fit_transform(coded.matrix)))


def iterative(frame: pd.DataFrame, listed: Sequence[str], truth: pd.DataFrame, seed: int) -> Filled:
    """IterativeImputer with its defaults: Bayesian ridge regressions, 10 rounds.

    Its density of a number is the Normal of the last regression, given the filled cells.
    """
    return _chained(frame, listed, truth, [seed], sample=False)


def draws(frame: pd.DataFrame, listed: Sequence[str], truth: pd.DataFrame, seed: int) -> Filled:
    """The mean of ten draws of IterativeImputer(sample_posterior=True); a mixture of Normals."""
    return _chained(frame, listed, truth, range(10 * seed, 10 * seed + 10), sample=True)


def _chained(
    frame: pd.DataFrame,
    listed: Sequence[str],
    truth: pd.DataFrame,
    seeds: Sequence[int],
    *,
    sample: bool,
) -> Filled:
    coded = Coded.of(frame, listed)
    # With a column for every level, each regression would repeat the fill it starts from.
    kept = np.delete(np.arange(coded.matrix.shape[1]), [coded.place[name].start for name in listed])
    total = np.zeros_like(coded.matrix)
    found: dict[str, list[np.ndarray]] = {}
    for seed in seeds:
        method = IterativeImputer(random_state=seed, sample_posterior=sample)
        full = method.fit_transform(coded.matrix[:, kept])
        total[:, kept] += full / len(seeds)
        last = {int(kept[step.feat_idx]): step for step in method.imputation_sequence_}
        for name, at in coded.place.items():
            if name in listed or at.start not in last:
                continue
            step = last[at.start]
            means, spreads = step.estimator.predict(
                full[:, step.neighbor_feat_idx], return_std=True
            )
            if sample:  # the mean of the regressions has less noise than the mean of the draws
                gap = np.isnan(coded.matrix[:, at.start])
                total[gap, at.start] += (means - full[:, list(kept).index(at.start)])[gap] / len(
                    seeds
                )
            scale = coded.spread[name]
            value = truth[name].to_numpy(float)
            found.setdefault(name, []).append(
                _normal(value, means * scale + coded.mean[name], spreads * scale)
            )
    for name in listed:
        at = coded.place[name]
        total[:, at.start] = 1 - total[:, at.start + 1 : at.stop].sum(1)
    logs = {name: np.logaddexp.reduce(each) - np.log(len(each)) for name, each in found.items()}
    return Filled(coded.cells(total), logs)


def forest(frame: pd.DataFrame, listed: Sequence[str], truth: pd.DataFrame, seed: int) -> Filled:
    """MissForest: random forests of each column given all others, until the change grows.

    50 trees, √columns candidates per split, leaves of at least 5 rows for numbers.
    """
    coded = Coded.of(frame, listed)
    blank = np.isnan(coded.matrix)
    full = np.where(blank, np.nanmean(coded.matrix, 0), coded.matrix)
    order = sorted(coded.place, key=lambda name: blank[:, coded.place[name].start].sum())
    best, change = full, (np.inf, np.inf)
    for _ in range(10):
        old, full = full, full.copy()
        for name in order:
            at = coded.place[name]
            gap = blank[:, at.start]
            if not gap.any():
                continue
            others = np.delete(full, np.r_[at], axis=1)
            model: Any
            if name in listed:
                model = RandomForestClassifier(TREES, max_features="sqrt", random_state=seed)
                model.fit(others[~gap], full[~gap][:, at].argmax(1))
                full[gap, at] = np.eye(at.stop - at.start)[model.predict(others[gap])]
            else:
                model = RandomForestRegressor(
                    TREES, max_features="sqrt", min_samples_leaf=5, random_state=seed
                )
                model.fit(others[~gap], full[~gap, at.start])
                full[gap, at.start] = model.predict(others[gap])
        numbers = [coded.place[name].start for name in order if name not in listed]
        levels = [
            j for name in listed for j in range(coded.place[name].start, coded.place[name].stop)
        ]
        found = tuple(
            ((full - old)[:, part] ** 2).sum() / max((full[:, part] ** 2).sum(), 1e-12)
            for part in (numbers, levels)
        )
        if all(new >= past for new, past in zip(found, change, strict=True)):
            break
        best, change = full, found
    return Filled(coded.cells(best))


def ours(frame: pd.DataFrame, listed: Sequence[str], truth: pd.DataFrame, seed: int) -> Filled:
    """The default density of the table, with the kinds that its schema chooses."""
    table = Schema.read(frame).fit_default(frame, seed=seed)
    filled = table.impute(frame, rounded=False)
    cells = {name: filled[name].to_numpy() for name in filled}
    return Filled(cells, log_densities(table, frame, truth))


def clusters(frame: pd.DataFrame, listed: Sequence[str], truth: pd.DataFrame, seed: int) -> Filled:
    """The mixture that BIC chooses, which is for finding groups, not for filling cells."""
    filled = Schema.read(frame).fit_clusters(frame, seed=seed).impute(frame, rounded=False)
    return Filled({name: filled[name].to_numpy() for name in filled})


def log_densities(
    table: TableModel, frame: pd.DataFrame, truth: pd.DataFrame
) -> dict[str, np.ndarray]:
    """The exact log densities of the true cells, given the known cells of their row.

    A number that the model takes for a level or a count gets a probability. It is divided by the
    distance of neighbouring values to make it comparable with a density.
    """
    schema, logs = table.schema, {}
    posterior = table.model.posterior(method="exact", **schema.encode(frame))
    for name, found in posterior.marginals.components.items():
        if name not in schema.variables:
            continue
        weight, mean, variance = (
            part[:, 0].detach().double().numpy()
            for part in (found.weight, found.mean, found.variance)
        )
        for j, column in enumerate(schema.variables[name]):
            true = truth[column.name]
            if column.listed:
                share = (weight[..., None] * mean).sum(1)
                share = share if column.kind != "binary" else share[:, j]
                share = share if share.ndim == 2 else np.column_stack([1 - share, share])
                share = np.column_stack([share, np.full(len(share), 0.5 / len(frame))])
                where = {level: i for i, level in enumerate(column.levels)}
                at = np.array([where.get(value, -1) for value in true])  # -1: a level not seen
                logs[column.name] = np.log(share[np.arange(len(share)), at])
                if column.kind == "ordered" and not isinstance(column.levels[0], str):
                    logs[column.name] -= np.log(np.median(np.diff(np.sort(column.levels))))
                continue
            m, v = mean[..., j], variance[..., j].clip(1e-12)
            value = true.to_numpy(float)
            if column.dense:
                each = _normal(column.standardise(value)[:, None], m, np.sqrt(v))
            elif column.likelihood == "Poisson":
                each = poisson.logpmf(value[:, None], m)
            else:
                each = nbinom.logpmf(value[:, None], m**2 / (v - m), m / v)
            logs[column.name] = logsumexp(each, b=weight, axis=1) + column.log_jacobian(value)
    return logs


METHODS: dict[str, Callable[..., Filled]] = {
    "mean": mean,
    "knn": knn,
    "iterative": iterative,
    "draws": draws,
    "forest": forest,
    "ours": ours,
    "clusters": clusters,
}


# Scores -------------------------------------------------------------------------------------------


def score(
    truth: pd.DataFrame, removed: np.ndarray, listed: Sequence[str], filled: Filled, plain: Filled
) -> dict[str, float]:
    """The scores of the module docstring; ``plain`` has the column means and modes."""
    found: dict[str, list[float]] = {key: [] for key in ("rmse", "wrong", "relative")}
    logs: dict[str, list[float]] = {"density": [], "probability": []}
    for j, name in enumerate(truth):
        at = removed[:, j]
        if not at.any():
            continue
        true = truth[name].to_numpy()[at]
        spread = 1.0 if name in listed else float(truth[name].std(ddof=0))

        def error(cells: np.ndarray, true: Any = true, name: Any = name) -> float:
            if name in listed:
                return float((cells[at] != true).mean())  # noqa: B023
            return float(np.sqrt(((cells[at] - true) ** 2).mean())) / spread  # noqa: B023

        own, base = error(filled.cells[name]), error(plain.cells[name])
        found["wrong" if name in listed else "rmse"].append(own)
        if base > 0:
            found["relative"].append(own / base)
        if name in filled.logs:
            value = float(filled.logs[name][at].mean()) + np.log(spread)
            logs["probability" if name in listed else "density"].append(value)
    return {key: float(np.mean(each)) for key, each in (found | logs).items() if each}


def measure(name: str, frame: pd.DataFrame, rate: float, seed: int, method: str) -> dict[str, Any]:
    listed = levelled(frame)
    removed = holes(frame, rate, seed)
    holed = frame.mask(removed)
    plain = mean(holed, listed, frame, seed)
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filled = METHODS[method](holed, listed, frame, seed)
    seconds = time.perf_counter() - begun
    line: dict[str, Any] = {"table": name, "rate": rate, "seed": seed, "method": method}
    line |= score(frame, removed, listed, filled, plain)
    return line | {"seconds": seconds}


def run(path: Path, only: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> None:
    done = {key(line) for line in lines(path)}
    for seed in seeds:
        for name, read in tables().items():
            if only and name not in only:
                continue
            frame = read()
            for rate in RATES:
                for method in methods:
                    if (name, rate, seed, method) in done:
                        continue
                    line = measure(name, frame, rate, seed, method)
                    with path.open("a") as file:
                        file.write(json.dumps(line) + "\n")


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[part] for part in ("table", "rate", "seed", "method"))


def lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


def show(path: Path) -> None:
    frame = pd.DataFrame(lines(path))
    for what in ("relative", "rmse", "wrong", "density", "probability", "seconds"):
        if what not in frame:
            continue
        table = frame.pivot_table(index=["table", "rate"], columns="method", values=what)
        print(f"\n{what}\n{table.round(3).to_string()}")
        print(table.mean().round(3).to_string())
    print(
        "\nseeds\n",
        frame.pivot_table(
            index=["table", "rate"], columns="method", values="seed", aggfunc="count"
        ).to_string(),
    )


def markdown(path: Path) -> None:
    """Print the errors relative to the column mean or mode as a table, for the documents.

    The last line has the paired difference of ours, with its standard error over seeds of the mean
    over tables and rates. Seeds that a method lacks are left out of its difference.
    """
    frame = pd.DataFrame(lines(path))
    table = frame.pivot_table(index=["table", "rate"], columns="method", values="relative")
    seeds = frame.groupby("method")["seed"].nunique()
    names = [name for name in METHODS if name in table and name not in ("mean", "ours", "clusters")]
    print(f"| table, cells removed | {' | '.join(['ours', *names])} |")
    print("|---|" + "---:|" * (1 + len(names)))
    for (name, rate), line in table.iterrows():
        best = min(line[["ours", *names]])
        cells = [f"**{v:.3f}**" if v == best else f"{v:.3f}" for v in line[["ours", *names]]]
        print(f"| {name}, {rate:.0%} | {' | '.join(cells)} |")
    print(f"| mean | {' | '.join(f'{table[name].mean():.3f}' for name in ['ours', *names])} |")
    wide = frame.pivot_table(index=["table", "rate", "seed"], columns="method", values="relative")
    told = []
    for name in names:
        gap = (wide["ours"] - wide[name]).dropna().unstack("seed").dropna(axis=1).mean()
        error = gap.std() / len(gap) ** 0.5
        told.append(f"{gap.mean():+.3f} ± {error:.3f}")
    print(f"| ours − it | | {' | '.join(told)} |")
    print(f"| seeds | {' | '.join(str(seeds[name]) for name in ['ours', *names])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "show", "markdown"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS)[:-1])
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of them")
    asked = parser.parse_args()
    if asked.what == "run":
        run(asked.results, asked.only, asked.methods, SEEDS[: asked.seeds])
    elif asked.what == "show":
        show(asked.results)
    else:
        markdown(asked.results)


if __name__ == "__main__":
    main()
