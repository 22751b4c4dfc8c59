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
from aevb.runtime.seeding import seeded
from aevb.sklearn.columns import Columns, MixedColumns
from aevb.sklearn.density import ExactDensityEstimator, check_count
from aevb.tables.selection import parameters
from aevb.training.fit import fit
from aevb.training.run import Run
from aevb.training.schedules import em

COVARIANCES = ("diag", "full", "tied")
# The smallest variance of a column within a cluster, as a share of the column's variance.
LEAST = 1e-6


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
    >>> clusters.predict_proba(X).shape, clusters.predict(X[:2]).shape
    ((150, 3), (2,))
    >>> clusters.aic(X) < clusters.bic(X)
    True
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
        """Fit the mixture to the rows X [n, d]; NaN is a missing cell. ``y`` is ignored.

        Returns:
            This estimator.
        """
        data: dict[str, Any] = self._read(X)
        rows, count = len(next(iter(data.values()))), check_count("n_clusters", self.n_clusters)
        if rows < count:
            raise ValueError(f"n_samples={rows} should be at least n_clusters={count}.")

        random, best = check_random_state(self.random_state), -math.inf
        kept: Run | None = None
        for _ in range(check_count("n_init", self.n_init)):
            run = self._fit_once(count, data, seed=int(random.randint(2**31 - 1)))
            found = run.model.log_evidence(method="exact", **data).mean
            if kept is None or found > best:
                kept, best = run, found
        assert kept is not None
        self.model_ = kept.model
        self._check_convergence(kept)
        with torch.no_grad():
            root: Any = self.model_.factors["p(cluster)"]
            self.weights_ = root.root.softmax(-1).numpy()
        if isinstance(self.columns_, Columns):
            means = self.model_.sample(count, cluster=np.eye(count), mean=True, seed=0)["x"]
            self.means_ = self.columns_.restore(means.numpy())
        self.labels_ = self._probabilities(data).argmax(1)
        return self

    def _fit_once(self, count: int, data: dict[str, Any], seed: int) -> Run:
        steps = check_count("max_iter", self.max_iter)
        with seeded(seed, all_code=True):
            model = self._declare(count, data)
        settings: dict[str, Any] = {
            "seed": seed,
            "steps": steps,
            "progress": bool(self.verbose),
            "compile": False,
        }
        return fit(model, data, schedule=em(tol=self.tol, least=LEAST), **settings)

    def _declare(self, count: int, data: dict[str, np.ndarray]) -> Model:
        if self.covariance_type not in COVARIANCES:
            raise ValueError(
                f"covariance_type is one of {', '.join(COVARIANCES)}, got {self.covariance_type!r}."
            )
        if isinstance(self.columns_, MixedColumns):
            if self.covariance_type == "tied":
                raise ValueError(
                    'covariance_type="tied" needs columns of numbers. Use "diag" or "full".'
                )
            full = self.covariance_type == "full"
            return self.columns_.schema.mixture(count, covariance="full" if full else "diagonal")
        d = data["x"].shape[1]
        families: dict[str, Conditional] = {
            "diag": Normal(d),
            "full": MultivariateNormal(d),
            "tied": MultivariateNormal(d, covariance="shared"),
        }
        return Model(
            p={
                "cluster": OneHot(count, learned=True),
                "x | cluster": families[self.covariance_type],
            },
            q={"cluster | x": Exact()},
        ).double()

    def _probabilities(self, data: dict[str, Any]) -> np.ndarray:
        with torch.no_grad():
            return self._posterior(data)["cluster"].probs.numpy()  # type: ignore[attr-defined]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Compute the posterior probabilities [n, n_clusters] of the clusters of rows X [n, d]."""
        X = self._check(X)
        return np.concatenate([self._probabilities(data) for data in self._parts(X)])

    def predict(self, X: Any) -> np.ndarray:
        """Compute the most probable cluster [n] of each of the rows X [n, d]."""
        return self.predict_proba(X).argmax(1)

    def sample(self, n_samples: int = 1) -> tuple[Any, np.ndarray]:
        """Draw rows [n_samples, d] and their clusters [n_samples].

        ``random_state`` decides the draw: an int gives the same rows at every call.
        """
        found = self._draw(n_samples)
        return self.columns_.decode(found), found["cluster"].argmax(1)

    def _free_parameters(self) -> int:
        return parameters(self.model_)

    def bic(self, X: Any) -> float:
        """Compute the Bayesian information criterion on the rows X [n, d]; lower is better."""
        scores = self.score_samples(X)
        return float(-2 * scores.sum() + self._free_parameters() * math.log(len(scores)))

    def aic(self, X: Any) -> float:
        """Compute Akaike's information criterion on the rows X [n, d]; lower is better."""
        return float(-2 * self.score_samples(X).sum() + 2 * self._free_parameters())
