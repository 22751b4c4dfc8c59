"""Outliers: rows of low density."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, OutlierMixin  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    check_is_fitted,
    validate_data,
)

from aevb.sklearn.columns import MixedColumns, is_mixed
from aevb.sklearn.default_density import default_density
from aevb.sklearn.density import DensityEstimator, fit_inner


class DensityOutlierDetector(OutlierMixin, BaseEstimator):
    """Mark the rows as outliers whose density under a latent variable model is lowest.

    Parameters:
        estimator: An unfitted estimator of this module with ``score_samples``. None is
            ``FactorAnalysis("bic")``, and ``MixtureClusterer(8, n_init=3)`` for a frame with other
            columns than numbers.
        contamination: Share of outliers among the training rows, above 0 and at most 0.5.
        random_state: Decides the fit if the estimator has no ``random_state`` of its own: an int, a
            RandomState or None.

    Attributes:
        estimator_: The fitted estimator.
        offset_: The density below which a row is an outlier, as log p.

    >>> X = np.vstack([np.random.default_rng(0).normal(size=(99, 2)), [[8.0, -8.0]]])
    >>> detector = DensityOutlierDetector(contamination=0.01, random_state=0)
    >>> np.flatnonzero(detector.fit_predict(X) == -1).tolist()
    [99]
    """

    def __init__(
        self, estimator: Any = None, *, contamination: float = 0.1, random_state: Any = None
    ) -> None:
        self.estimator = estimator
        self.contamination = contamination
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the density to the rows X [n, d]; NaN is a missing cell. ``y`` is ignored."""
        if is_mixed(X):
            validate_data(self, X, skip_check_array=True)
        else:
            X = validate_data(
                self, X, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=2
            )
        if not 0 < self.contamination <= 0.5:
            raise ValueError(
                f"contamination is a share of the rows, above 0 and at most 0.5, got "
                f"{self.contamination!r}."
            )
        if not isinstance(self.estimator, DensityEstimator | None):
            raise TypeError(
                f"estimator is one of aevb.sklearn with score_samples, got {self.estimator!r}."
            )
        self.estimator_ = fit_inner(self.estimator or default_density(X), self.random_state, X)
        scores = self.estimator_.score_samples(X)
        self.offset_ = float(np.percentile(scores, 100 * self.contamination))
        return self

    def score_samples(self, X: Any) -> np.ndarray:
        """Compute log p of each row [n], in the units of X; lower is more abnormal."""
        check_is_fitted(self)
        if isinstance(self.estimator_.columns_, MixedColumns):
            validate_data(self, X, reset=False, skip_check_array=True)
        else:
            X = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        return self.estimator_.score_samples(X)

    def decision_function(self, X: Any) -> np.ndarray:
        """Compute ``score_samples(X) − offset_`` [n]; it is negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """Return −1 for outliers and 1 for other rows [n]."""
        return np.where(self.decision_function(X) < 0, -1, 1)
