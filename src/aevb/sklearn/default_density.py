"""The density that fills cells and finds outliers unless another one is given."""

from __future__ import annotations

from typing import Any

from aevb.sklearn.columns import is_mixed
from aevb.sklearn.density import ExactDensityEstimator
from aevb.sklearn.factor_analysis import FactorAnalysis
from aevb.sklearn.mixture import MixtureClusterer

CLUSTERS, ROWS_PER_CLUSTER = 8, 10


def default_density(X: Any) -> ExactDensityEstimator:
    """Return factor analysis of numbers, and a mixture of a frame with other columns.

    A joint Gaussian with all its covariances needs many more rows than columns. Factor analysis
    with few factors does not. A cluster has at least ten rows on average.
    """
    if is_mixed(X):
        return MixtureClusterer(max(1, min(CLUSTERS, len(X) // ROWS_PER_CLUSTER)), n_init=3)
    return FactorAnalysis("bic")
