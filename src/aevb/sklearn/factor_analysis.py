"""Factor analysis, exact and with missing cells."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import (  # type: ignore[import-untyped]
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import Tensor

from aevb.declare.families import MultivariateNormal, Normal
from aevb.model import Model
from aevb.sklearn.columns import Columns
from aevb.sklearn.density import CodesMixin, ExactDensityEstimator, check_count
from aevb.training.run import Run
from aevb.training.schedules import em

COUNTS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 27, 36, 48)  # of factors that "bic" tries
ROWS_PER_FACTOR = 10  # at least: the criterion is wrong for fewer rows


class FactorAnalysis(
    ClassNamePrefixFeaturesOutMixin, CodesMixin, TransformerMixin, ExactDensityEstimator
):
    """Factor analysis: x = mean + W z + noise with a variance for each column.

    EM is exact, also with missing cells (NaN), and so are codes and densities. The factors are
    rotated so that Wᵀ Ψ⁻¹ W is diagonal and decreasing (Ψ is the diagonal matrix of the noise), and
    the largest loading of each factor is positive. The result therefore does not depend on a seed.

    Parameters:
        n_components: Number of factors. None is the number of columns; "bic" chooses the number
            by the Bayesian information criterion.
        tol: EM stops when three iterations raise the mean of log p by less than this.
        max_iter: Maximum number of iterations of EM.
        random_state: Decides the draws of ``sample``: an int, a RandomState or None.
        verbose: Print the progress.

    Attributes:
        n_components_: Number of factors.
        components_: Loadings [n_components, d], in the units of the columns.
        mean_: Means of the columns [d].
        noise_variance_: Variances of the noise [d]; 0 for a constant column.
        model_: The declared :class:`aevb.Model` of the standardised columns.
        n_iter_: Number of iterations of EM.
        converged_: Whether EM converged.

    >>> from sklearn.datasets import load_iris
    >>> X = load_iris().data
    >>> codes = FactorAnalysis(n_components=2).fit(X)
    >>> codes.transform(X).shape, codes.components_.shape
    ((150, 2), (2, 4))
    >>> covariance = codes.get_covariance()
    >>> np.abs(covariance - np.cov(X.T)).max() < 0.1
    np.True_
    """

    def __init__(
        self,
        n_components: int | str | None = None,
        *,
        tol: float = 1e-5,
        max_iter: int = 1000,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the factors to the rows X [n, d]; NaN is a missing cell. ``y`` is ignored.

        Returns:
            This estimator.
        """
        data = self._read(X)
        rows, d = data["x"].shape
        if isinstance(self.n_components, str):
            run = self._choose(data, rows, d)
        else:
            asked = d if self.n_components is None else self.n_components
            run = self._fit_count(check_count("n_components", asked), data)
        self.model_ = run.model
        self._check_convergence(run)
        self._rotate()
        self.n_components_ = len(self.components_)
        return self

    def _fit_count(self, count: int, data: dict[str, Any]) -> Run:
        def build() -> Model:
            return Model(
                p={"z": Normal(count), "x | z": Normal(data["x"].shape[1], scale="learned")},
                q={"z | x": MultivariateNormal(covariance="shared")},
            ).double()

        return self._train(
            build,
            data,
            seed=0,  # EM starts at principal factors, so nothing is random
            schedule=em(tol=self.tol),
            steps=check_count("max_iter", self.max_iter),
        )

    def _choose(self, data: dict[str, Any], rows: int, d: int) -> Run:
        """Fit numbers of factors until two in turn do not lower BIC, and keep the best fit."""
        if self.n_components != "bic":
            raise ValueError(
                f'n_components is a whole number, None or "bic", got {self.n_components!r}.'
            )
        kept: Run | None = None
        best, worse = math.inf, 0
        for count in (k for k in COUNTS if k == 1 or (k < d and ROWS_PER_FACTOR * k <= rows)):
            run = self._fit_count(count, data)
            # A rotation of the factors changes nothing.
            free = 2 * d + d * count - count * (count - 1) / 2
            evidence = run.model.log_evidence(method="exact", **data).mean
            found = free * math.log(rows) - 2 * rows * evidence
            if kept is None or found < best:
                kept, best, worse = run, found, 0
            elif (worse := worse + 1) == 2:
                break
        assert kept is not None
        return kept

    def _mixed(self, X: Any) -> bool:
        if super()._mixed(X):
            raise ValueError(
                "FactorAnalysis reads numbers, but this frame has other columns. Select its "
                "numbers, or use VariationalAutoencoder, which reads all columns."
            )
        return False

    def _loadings(self) -> tuple[Tensor, Tensor, Tensor]:
        """W [d, k], the mean [d] and the variance of the noise [d], all standardised."""
        factor: Any = self.model_.factors["p(x|z)"]
        blocks = factor.net.blocks
        return (
            blocks.weights["z"].detach(),
            blocks.bias.detach(),
            F.softplus(factor.vectors["scale"].detach()).square(),
        )

    def _rotate(self) -> None:
        """Rotate z so that Wᵀ Ψ⁻¹ W is diagonal and decreasing."""
        weights, bias, variance = self._loadings()
        information = weights.mT @ (weights / variance[:, None])
        weights = weights @ torch.linalg.eigh(information)[1].flip(1)
        largest = weights.abs().argmax(0, keepdim=True)
        weights = weights * torch.where(weights.gather(0, largest) < 0, -1.0, 1.0)
        with torch.no_grad():
            factor: Any = self.model_.factors["p(x|z)"]
            factor.net.blocks.weights["z"].copy_(weights)
        columns = self.columns_
        assert isinstance(columns, Columns)
        here = columns.varies
        self.components_ = np.zeros((weights.shape[1], len(here)))
        self.components_[:, here] = weights.mT.numpy() * columns.scale[here]
        self.mean_ = columns.restore(bias.numpy()[None])[0]
        self.noise_variance_ = np.zeros(len(here))
        self.noise_variance_[here] = variance.numpy() * columns.scale[here] ** 2

    def get_covariance(self) -> np.ndarray:
        """Return the covariance [d, d] of the model: ``Wᵀ W + diag(noise_variance_)``."""
        check_is_fitted(self)
        return self.components_.T @ self.components_ + np.diag(self.noise_variance_)
