"""The density that fills cells and finds outliers unless another one is given."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np

from aevb.runtime.checked_files import DataWarning
from aevb.sklearn.columns import MixedColumns
from aevb.sklearn.density import ExactDensityEstimator
from aevb.tables.choosing import fit_density
from aevb.tables.columns import Column
from aevb.tables.kinds import Facts
from aevb.tables.redundant import SHOWN, repeated, some_rows


class TableDensity(ExactDensityEstimator):
    """A density of a table that needs no choice.

    It is a mixture with full covariances: several fits with different numbers of clusters, each
    pulled towards the whole table, joined into one (:meth:`aevb.Schema.fit_default`). log p and the
    posterior of missing cells are exact. Of more than 10,000 rows, a random sample is used.

    Parameters:
        random_state: Decides the fit and the draws of ``sample``: an int, a RandomState or None.

    Attributes:
        model_: The declared :class:`aevb.Model` of the standardised columns.

    >>> from sklearn.datasets import load_iris
    >>> X = load_iris().data
    >>> round(TableDensity(random_state=0).fit(X[::2]).score(X[1::2]), 1)
    -1.7
    """

    def __init__(self, *, random_state: Any = None) -> None:
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the density to the rows X [n, d]; NaN is a missing cell. ``y`` is ignored.

        Returns:
            This estimator.
        """
        data, columns = self._read(X), self.columns_
        specs = (
            columns.schema.specs
            if isinstance(columns, MixedColumns)
            else {"x": ("Normal", data["x"].shape[1])}
        )
        if not isinstance(columns, MixedColumns):
            self._warn_of_repeated(columns.decode(data), columns.varies)
        self.model_ = fit_density(specs, data, seed=self._seed())
        return self

    def _warn_of_repeated(self, X: np.ndarray, varies: np.ndarray) -> None:
        """Warn of columns of numbers that repeat others, as :meth:`aevb.Schema.read` does."""
        names = getattr(self, "feature_names_in_", np.arange(len(varies)))[varies]
        x = X[some_rows(len(X))][:, varies]
        facts = Facts("number", len(x), 0, len(x), low=0.0)
        columns = [Column(str(name), "real", "Normal", "", "Float64", facts) for name in names]
        if found := repeated(columns, list(x.T)):
            shown = "; ".join(map(str, found[:SHOWN])) + "; …" * (len(found) > SHOWN)
            warnings.warn(
                f"Column{'s' * (len(found) > 1)}: {shown}. The density may have no limit. Drop "
                f"{'them' if len(found) > 1 else 'it'}.",
                DataWarning,
                stacklevel=3,
            )
