"""Clusters by a Gaussian mixture, with exact EM and missing cells."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClusterMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]

from aevb.declare.conditionals import Conditional
from aevb.declare.families import Exact, MultivariateNormal, Normal, OneHot
from aevb.model import Model
from aevb.sklearn.density import ExactDensityEstimator, check_count
from aevb.training.run import Run
from aevb.training.schedules import em

COVARIANCES = ("diag", "full", "tied")


class MixtureClusterer(ClusterMixin, ExactDensityEstimator):
    """Clusters by a mixture of Gaussians.

    EM is exact, also with missing cells (NaN), and so are probabilities and densities.

    Parameters:
        n_clusters: Number of clusters, and of components of the mixture.
        covariance_type: "diag" (each component has a variance for every column), "full" (each has
            a covariance) or "tied" (all share one covariance).
        n_init: Number of starts by k-means++. The fit with the largest log p is kept.
        tol: EM stops when three iterations raise the mean of log p by less than this.
        max_iter: Maximum number of iterations of EM.
        random_state: Decides the starts and the draws of ``sample``: an int, a RandomState or
            None.
        verbose: Print the progress.

    Attributes:
        labels_: The cluster of each training row [n].
        weights_: Probabilities of the clusters [n_clusters].
        means_: Means of the clusters [n_clusters, d], in the units of the columns.
        model_: The declared :class:`aevb.Model` of the standardised columns.
        n_iter_: Number of iterations of EM of the fit that was kept.
        converged_: Whether EM converged.

    >>> from sklearn.datasets import load_iris
    >>> X = load_iris().data
    >>> clusters = MixtureClusterer(3, covariance_type="full", random_state=0).fit(X)
    >>> np.bincount(clusters.labels_).tolist()
    [45, 55, 50]
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        covariance_type: str = "diag",
        n_init: int = 1,
        tol: float = 1e-4,
        max_iter: int = 1000,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_clusters = n_clusters
        self.covariance_type = covariance_type
        self.n_init = n_init
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the mixture to the rows X [n, d]; NaN is a missing cell. ``y`` is ignored."""
        x = self._read(X)
        count = check_count("n_clusters", self.n_clusters)
        if len(x) < count:
            raise ValueError(f"n_samples={len(x)} should be at least n_clusters={count}.")
        family = self._family(x.shape[1])

        def build() -> Model:
            return Model(
                p={"y": OneHot(count, learned=True), "x | y": family}, q={"y | x": Exact()}
            ).double()

        random, best = check_random_state(self.random_state), -math.inf
        kept: Run | None = None
        for _ in range(check_count("n_init", self.n_init)):
            run = self._train(
                build,
                {"x": x},
                seed=int(random.randint(2**31 - 1)),
                schedule=em(tol=self.tol),
                steps=check_count("max_iter", self.max_iter),
            )
            found = run.model.log_evidence(x=x, method="exact").mean
            if kept is None or found > best:
                kept, best = run, found
        assert kept is not None
        self.model_ = kept.model
        self._check_convergence(kept)
        every = np.eye(count)
        with torch.no_grad():
            root: Any = self.model_.factors["p(y)"]
            self.weights_ = root.root.softmax(-1).numpy()
            means = self.model_.sample(count, y=every, mean=True, seed=0)["x"].numpy()
        self.means_ = self.columns_.restore(means)
        self.labels_ = self._probabilities(x).argmax(1)
        return self

    def _family(self, d: int) -> Conditional:
        if self.covariance_type not in COVARIANCES:
            raise ValueError(
                f"covariance_type is one of {', '.join(COVARIANCES)}, got {self.covariance_type!r}."
            )
        if self.covariance_type == "diag":
            return Normal(d)
        return MultivariateNormal(
            d, covariance="shared" if self.covariance_type == "tied" else "network"
        )

    def _probabilities(self, x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self._posterior(x)["y"].probs.numpy()  # type: ignore[attr-defined]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Compute the posterior probability of each cluster [n, n_clusters]."""
        X = self._check(X)
        return np.concatenate([self._probabilities(x) for x in self._parts(X)])

    def predict(self, X: Any) -> np.ndarray:
        """Compute the most probable cluster of each row [n]."""
        return self.predict_proba(X).argmax(1)

    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows [n_samples, d] and their clusters [n_samples].

        ``random_state`` decides the draw: an int gives the same rows at every call.
        """
        found = self._draw(n_samples)
        return self.columns_.restore(found["x"]), found["y"].argmax(1)

    def _free_parameters(self) -> int:
        k, d = len(self.weights_), int(self.columns_.varies.sum())
        square = d * (d + 1) // 2
        spread = {"diag": k * d, "full": k * square, "tied": square}[self.covariance_type]
        return k - 1 + k * d + spread

    def bic(self, X: Any) -> float:
        """Compute the Bayesian information criterion on X; lower is better."""
        scores = self.score_samples(X)
        return float(-2 * scores.sum() + self._free_parameters() * math.log(len(scores)))

    def aic(self, X: Any) -> float:
        """Compute Akaike's information criterion on X; lower is better."""
        return float(-2 * self.score_samples(X).sum() + 2 * self._free_parameters())
