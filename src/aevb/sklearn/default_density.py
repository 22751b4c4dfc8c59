"""The density that fills cells and finds outliers unless another one is given."""

from __future__ import annotations

from typing import Any, Self

from aevb.sklearn.columns import MixedColumns
from aevb.sklearn.density import ExactDensityEstimator
from aevb.tables.choosing import fit_density


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
    -1.9
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
        self.model_ = fit_density(specs, data, seed=self._seed())
        return self
