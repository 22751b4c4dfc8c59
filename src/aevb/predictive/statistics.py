"""Statistics for predictive checks: functions of [N, d] or [N, T, d], NaN for missing entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.distributions import constraints

from aevb.declare.graph import Graph

Statistic = Callable[[np.ndarray], Any]


def _columns(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


def _correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Correlate each column of a with the same column of b, over known entries.

    The correlation is NaN if one of the columns is constant.
    """
    there = np.isfinite(a) & np.isfinite(b)
    count = np.maximum(there.sum(0), 1)
    a, b = (np.where(there, part, 0.0) for part in (a, b))
    a, b = (np.where(there, part - part.sum(0) / count, 0.0) for part in (a, b))
    scale = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.divide((a * b).sum(0), scale, out=np.full(a.shape[1], np.nan), where=scale > 0)


def _autocorrelation(x: np.ndarray) -> np.ndarray:
    """Compute the lag-1 autocorrelation of each column, over all sequences."""
    if x.ndim < 3:
        raise ValueError(
            "autocorrelation needs sequences; this variable has no [t]. Leave out autocorrelation."
        )
    return _correlations(_columns(x[:, :-1]), _columns(x[:, 1:]))


def _correlation(x: np.ndarray) -> np.ndarray:
    """Compute the mean |correlation| of each column with the others.

    The column mean replaces missing entries.
    """
    flat = _columns(x)
    if flat.shape[1] < 2:
        raise ValueError(
            "correlation needs several columns; this variable has only one. Leave out correlation."
        )
    known = np.isfinite(flat)
    centred = np.where(known, flat, 0.0)
    centred = np.where(known, centred - centred.sum(0) / np.maximum(known.sum(0), 1), 0.0)
    scale = np.sqrt((centred**2).sum(0))
    varies = scale > 0
    unit = centred / np.where(varies, scale, 1.0)
    sizes = np.abs(unit.T @ unit)
    np.fill_diagonal(sizes, 0.0)
    return np.where(varies, sizes.sum(0) / max(1, int(varies.sum()) - 1), np.nan)


def _quantile(share: float) -> Statistic:
    def found(x: np.ndarray) -> np.ndarray:
        columns = _columns(x)
        # nanquantile goes through the columns one by one, which takes a hundred times as long.
        quantile = np.nanquantile if np.isnan(columns).any() else np.quantile
        return np.asarray(quantile(columns, share, axis=0))

    return found


# Each maps [N, d] or [N, T, d] to one number per column.
STATISTICS: dict[str, Statistic] = {
    "mean": lambda x: np.nanmean(_columns(x), 0),
    "sd": lambda x: np.nanstd(_columns(x), 0),
    "zeros": lambda x: (_columns(x) == 0).sum(0) / np.isfinite(_columns(x)).sum(0),
    "min": lambda x: np.nanmin(_columns(x), 0),
    "max": lambda x: np.nanmax(_columns(x), 0),
    "q05": _quantile(0.05),
    "q50": _quantile(0.5),
    "q95": _quantile(0.95),
    "correlation": _correlation,
    "autocorrelation": _autocorrelation,
}
# For all columns together, these statistics are averaged. The others pool the entries.
BETWEEN = ("correlation", "autocorrelation")


def usual_statistics(graph: Graph, name: str) -> tuple[str, ...]:
    """Return the default statistics of a variable, by its family."""
    # The first and last step may have supports of their own.
    supports = {str(entry.spec.support) for entry in graph.p[name].values()}
    if supports <= {str(constraints.boolean), str(constraints.one_hot)}:
        found: tuple[str, ...] = ("mean",)
    elif supports <= {str(constraints.boolean), str(constraints.nonnegative_integer)}:
        found = ("mean", "sd", "zeros", "max")
    else:
        found = ("mean", "sd", "min", "q05", "q50", "q95", "max")
    return (
        found + ("correlation",) * (graph.size(name) > 1) + ("autocorrelation",) * graph.timed[name]
    )


def evaluate(name: str, statistic: Statistic, x: np.ndarray, columns: bool) -> np.ndarray:
    """Evaluate a statistic over all columns, then with ``columns=True`` per column.

    A user's function is evaluated once and may return any numbers.
    """
    if STATISTICS.get(name) is not statistic:
        found = np.asarray(statistic(x), float).reshape(-1)
        if not found.size:
            raise ValueError(f"The statistic {name!r} gave no number.")
        return found
    if name in BETWEEN:
        each = statistic(x)
        whole = np.nanmean(each, keepdims=True) if np.isfinite(each).any() else np.full(1, np.nan)
    else:
        each, whole = _where_known(statistic, x), _where_known(statistic, x.reshape(-1, 1))
    return np.concatenate([whole, each]) if columns else whole


def _where_known(statistic: Statistic, x: np.ndarray) -> np.ndarray:
    """Evaluate the statistic of each column with known entries; NaN for the other columns."""
    there = np.isfinite(_columns(x)).any(0)
    found = np.full(len(there), np.nan)
    if there.any():
        found[there] = statistic(x[..., there])
    return found
