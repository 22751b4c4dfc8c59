"""Outliers: rows of low density."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import OutlierMixin  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]

from aevb.sklearn.default_density import TableDensity
from aevb.sklearn.density import (
    AllowsMissing,
    DensityEstimator,
    check_rows,
    fit_inner,
    validate_training,
)

MOST, LEAST = 1000, 100  # rows simulated from the model per pattern of missing cells,
IN_ALL = 100_000  # and for all patterns of the training rows together, unless LEAST needs more
EQUAL = 1e-9  # a smaller standard deviation of log p is rounding


class DensityOutlierDetector(OutlierMixin, AllowsMissing):
    """Mark the rows as outliers that are least likely under a latent variable model.

    log p of rows with different missing cells is not comparable: each known cell adds a term that
    depends on the unit of its column. The score of a row is therefore (log p − m) / s, where m and
    s are the mean and standard deviation of log p of rows simulated from the model with the same
    missing cells. It has no unit, and orders rows with the same missing cells as log p does. A row
    without any known cell has the score 0.

    Parameters:
        estimator: An unfitted estimator of this module with ``score_samples``. None is
            ``TableDensity()``.
        contamination: Share of outliers among the training rows, above 0 and at most 0.5.
        random_state: Decides the fit if the estimator has no ``random_state`` of its own: an int, a
            RandomState or None.

    Attributes:
        estimator_: The fitted estimator.
        offset_: The score below which a row is an outlier.

    >>> X = np.vstack([np.random.default_rng(0).normal(size=(99, 2)), [[8.0, -8.0]]])
    >>> detector = DensityOutlierDetector(contamination=0.01, random_state=0).fit(X)
    >>> np.flatnonzero(detector.predict(X) == -1).tolist()
    [99]
    >>> detector.score_samples(X).argmin(), detector.decision_function(X)[99] < 0
    (np.int64(99), np.True_)
    """

    def __init__(
        self, estimator: Any = None, *, contamination: float = 0.1, random_state: Any = None
    ) -> None:
        self.estimator = estimator
        self.contamination = contamination
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the density to the rows X [n, d]; NaN is a missing cell. ``y`` is ignored.

        Returns:
            This estimator.
        """
        X = validate_training(self, X)
        if not 0 < self.contamination <= 0.5:
            raise ValueError(
                f"contamination is a share of the rows, above 0 and at most 0.5, got "
                f"{self.contamination!r}."
            )
        if not isinstance(self.estimator, DensityEstimator | None):
            raise TypeError(
                f"estimator is one of aevb.sklearn with score_samples, got {self.estimator!r}."
            )
        self.estimator_ = fit_inner(self.estimator or TableDensity(), self.random_state, X)
        data = self.estimator_.columns_.encode(X)
        self._simulate(data)
        self.offset_ = float(np.percentile(self._scores(data), 100 * self.contamination))
        return self

    def _simulate(self, data: dict[str, np.ndarray]) -> None:
        """Draw rows from the model, and summarise log p for the training rows' missing cells."""
        patterns = np.unique(_missing(data), axis=0)
        count = max(LEAST, min(MOST, IN_ALL // len(patterns)))
        drawn = self.estimator_.model_.sample(count, seed=0)
        # The model draws one-hot rows of a category, of which the data has positions.
        self._simulated = {
            name: drawn[name].numpy() if value.ndim == 2 else drawn[name].numpy().argmax(1) * 1.0
            for name, value in data.items()
        }
        self._moments = {pattern.tobytes(): self._moments_of(pattern) for pattern in patterns}

    def _moments_of(self, pattern: np.ndarray) -> tuple[float, float]:
        """Mean and standard deviation of log p of simulated rows with these missing cells."""
        data, start = {}, 0
        for name, value in self._simulated.items():
            width = value.shape[1] if value.ndim == 2 else 1
            hidden = pattern[start : start + width]
            data[name] = np.where(hidden if value.ndim == 2 else hidden[0], np.nan, value)
            start += width
        found = self._relative_log_p(data)
        spread = float(found.std())
        return float(found.mean()), spread if spread > EQUAL else 1.0

    def _relative_log_p(self, data: dict[str, np.ndarray]) -> np.ndarray:
        """log p of encoded rows, up to a constant for each pattern of missing cells."""
        inner = self.estimator_
        return inner._encoded_scores(data) + inner.columns_.relative_log_jacobian(data)

    def _scores(self, data: dict[str, np.ndarray]) -> np.ndarray:
        found = self._relative_log_p(data)
        patterns, which = np.unique(_missing(data), axis=0, return_inverse=True)
        moments = np.array(
            [self._moments.get(one.tobytes()) or self._moments_of(one) for one in patterns]
        )[which.reshape(-1)]
        return (found - moments[:, 0]) / moments[:, 1]

    def score_samples(self, X: Any) -> np.ndarray:
        """Compute the score [n] of each of the rows X [n, d]; lower is more abnormal.

        It is log p in standard deviations from its mean, both over rows simulated from the model
        with the same missing cells. ``estimator_.score_samples`` computes log p itself.
        """
        check_is_fitted(self)
        columns = self.estimator_.columns_
        return self._scores(columns.encode(check_rows(self, X, columns)))

    def decision_function(self, X: Any) -> np.ndarray:
        """Compute ``score_samples(X) − offset_`` [n]; it is negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """Return −1 for outliers and 1 for other rows [n], for the rows X [n, d]."""
        return np.where(self.decision_function(X) < 0, -1, 1)


def _missing(data: dict[str, np.ndarray]) -> np.ndarray:
    """Which entries of encoded rows are missing [n, entries]."""
    return np.column_stack([np.isnan(value) for value in data.values()])
