"""Fill missing cells with their posterior means, with standard deviations and draws."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import (  # type: ignore[import-untyped]
    OneToOneFeatureMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]

from aevb.sklearn.columns import MixedColumns, is_mixed
from aevb.sklearn.default_density import TableDensity
from aevb.sklearn.density import (
    ROWS,
    AllowsMissing,
    ExactDensityEstimator,
    check_count,
    check_rows,
    fit_inner,
    validate_training,
)
from aevb.tables.fitted import TableModel
from aevb.tables.frames import read_table


class LatentImputer(OneToOneFeatureMixin, TransformerMixin, AllowsMissing):
    """Fill missing cells (NaN) given the known cells of their row, by a latent variable model.

    The posterior of the missing cells is exact: its mean fills a cell, ``return_std=True`` adds
    its standard deviation, and :meth:`draw` gives several complete tables for multiple imputation.

    Parameters:
        estimator: An unfitted :class:`TableDensity`, :class:`FactorAnalysis` or
            :class:`MixtureClusterer`. None is ``TableDensity()``.
        random_state: Decides the fit, if the estimator has no ``random_state`` of its own, and the
            draws: an int, a RandomState or None.

    Attributes:
        estimator_: The fitted estimator.

    The missing cells of a constant column are filled with its constant. A column without any known
    cell cannot be learned, and neither can some columns of a frame with other columns than numbers,
    such as identifiers: if such a column has missing cells, a ValueError names it.

    >>> height = np.linspace(1.5, 2.0, 50)
    >>> X = np.column_stack([height, 25 * height**2])
    >>> X[10, 1] = np.nan
    >>> filled, deviation = LatentImputer(random_state=0).fit(X).transform(X, return_std=True)
    >>> round(filled[10, 1]), round(deviation[10, 1]), round(25 * height[10] ** 2)
    (64, 2, 64)
    """

    def __init__(self, estimator: Any = None, *, random_state: Any = None) -> None:
        self.estimator = estimator
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the model to the rows X [n, d], with missing cells or without. ``y`` is ignored.

        Returns:
            This estimator.
        """
        X = validate_training(self, X)
        if not is_mixed(X) and (empty := np.isnan(X).all(0)).any():
            raise ValueError(
                f"Column {int(empty.argmax())} (from 0) has no known cell, so its missing cells "
                f"cannot be filled. Drop the column."
            )
        if not isinstance(self.estimator, ExactDensityEstimator | None):
            raise TypeError(
                f"estimator is a TableDensity, a FactorAnalysis or a MixtureClusterer, whose "
                f"posteriors of missing cells are exact, got {self.estimator!r}."
            )
        self.estimator_ = fit_inner(self.estimator or TableDensity(), self.random_state, X)
        if isinstance(columns := self.estimator_.columns_, MixedColumns):
            columns.with_constants(X)  # refuses missing cells that cannot be filled
        return self

    def _table(self) -> TableModel | None:
        """The model of a frame with other columns than numbers, else None."""
        check_is_fitted(self)
        columns = self.estimator_.columns_
        if isinstance(columns, MixedColumns):
            return TableModel(columns.schema, self.estimator_.model_)
        return None

    def _parts(self, X: np.ndarray) -> list[np.ndarray]:
        return [X[start : start + ROWS] for start in range(0, len(X), ROWS)]

    def transform(self, X: Any, return_std: bool = False) -> Any:
        """Fill the missing cells of X [n, d] with their posterior means.

        In a frame with other columns than numbers, a level is the most probable one, and the filled
        rows are a frame of the same kind.

        Parameters:
            X: Rows with missing cells (NaN).
            return_std: Whether to return standard deviations too.

        Returns:
            The filled rows [n, d]; with ``return_std=True`` also the standard deviation of every
            cell [n, d], which is 0 for a known cell, and for a level the probability that it is
            another one.
        """
        table = self._table()
        X = check_rows(self, X, self.estimator_.columns_)
        if table is not None:
            X = self.estimator_.columns_.with_constants(X)
            if not return_std:
                return table.impute(X)
            filled, spreads = table.impute(X, return_std=True)
            rows = read_table(X)
            return filled, rows.beside(
                {
                    name: spreads[name] if table.schema[name].used else np.zeros(rows.rows)
                    for name in rows
                }
            )
        found = [self.estimator_._impute(part, 0, None) for part in self._parts(X)]
        mean = np.concatenate([one[0] for one in found])
        return (mean, np.concatenate([one[1] for one in found])) if return_std else mean

    def draw(self, X: Any, n_draws: int = 5) -> Any:
        """Draw complete tables [n_draws, n, d] of the rows X [n, d] for multiple imputation.

        The missing cells of a row are drawn jointly from their posterior.

        Parameters:
            X: Rows with missing cells (NaN).
            n_draws: Number of tables.

        Returns:
            The tables as one array; a list of frames for a frame with other columns than numbers.

        >>> from aevb.sklearn import MixtureClusterer
        >>> X = np.column_stack([np.arange(20.0), np.arange(20.0) ** 2])
        >>> X[3, 1] = np.nan
        >>> imputer = LatentImputer(MixtureClusterer(1), random_state=0).fit(X)
        >>> imputer.draw(X, n_draws=4).shape
        (4, 20, 2)
        """
        check_count("n_draws", n_draws)
        table, random = self._table(), check_random_state(self.random_state)
        X = check_rows(self, X, self.estimator_.columns_)
        if table is not None:
            X = self.estimator_.columns_.with_constants(X)
            return table.impute(X, draws=n_draws, seed=int(random.randint(2**31 - 1)))
        found = [
            self.estimator_._impute(part, n_draws, int(random.randint(2**31 - 1)))[2]
            for part in self._parts(X)
        ]
        return np.concatenate(found, axis=1)
