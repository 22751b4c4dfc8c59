"""Codes and densities by a variational autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn.base import (  # type: ignore[import-untyped]
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from torch import Tensor

from aevb.declare.families import Normal
from aevb.declare.networks import mlp
from aevb.model import Model
from aevb.posterior import Posterior
from aevb.sklearn.columns import MixedColumns
from aevb.sklearn.density import (
    CodesMixin,
    DensityEstimator,
    check_count,
    importance_weighted,
)


class VariationalAutoencoder(
    ClassNamePrefixFeaturesOutMixin, CodesMixin, TransformerMixin, DensityEstimator
):
    """A variational autoencoder: x = f(z) + noise with a network f and a variance for each column.

    ``transform`` computes the means of q(z | x). ``score_samples`` computes the importance-weighted
    bound of log p(x), which approaches log p(x) from below as ``n_importance_samples`` grows. All
    rows share its random numbers, so the score of a row does not depend on the other rows.

    Rows may have missing cells (NaN) if the training rows had missing cells in the same columns;
    otherwise the encoder was not trained to read them, and a ValueError says so.

    Parameters:
        n_components: Number of entries of a code z.
        hidden_layer_sizes: Sizes of the hidden layers of encoder and decoder.
        batch_size: Rows per step of Adam.
        learning_rate: Learning rate; it falls to 0 along a cosine.
        max_iter: Number of epochs.
        n_importance_samples: Draws of z per row in ``score_samples``.
        random_state: Decides weights, noise and draws: an int, a RandomState or None.
        verbose: Print the progress.

    Attributes:
        model_: The declared :class:`aevb.Model` of the standardised columns.
        n_iter_: Number of epochs.

    >>> from sklearn.datasets import load_iris
    >>> X = load_iris().data
    >>> autoencoder = VariationalAutoencoder(2, max_iter=20, random_state=0).fit(X)
    >>> autoencoder.transform(X).shape
    (150, 2)
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        hidden_layer_sizes: Sequence[int] = (100,),
        batch_size: int = 100,
        learning_rate: float = 2e-3,
        max_iter: int = 200,
        n_importance_samples: int = 100,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.hidden_layer_sizes = hidden_layer_sizes
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.n_importance_samples = n_importance_samples
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train the autoencoder on the rows X [n, d]; NaN is a missing cell. ``y`` is ignored.

        Returns:
            This estimator.
        """
        data = self._read(X)
        count = check_count("n_components", self.n_components)
        check_count("n_importance_samples", self.n_importance_samples)
        hidden = [check_count("a hidden layer", size) for size in self.hidden_layer_sizes]

        def build() -> Model:
            if isinstance(self.columns_, MixedColumns):
                return self.columns_.schema.vae(count, hidden=hidden)
            net, d = mlp(*hidden), data["x"].shape[1]
            return Model(
                p={"z": Normal(count), "x | z": Normal(d, net=net, scale="learned")},
                q={"z | x": Normal(net=net)},
                missing="mask",
            )

        seed = self._seed()
        run = self._train(
            build,
            {name: value.astype(np.float32) for name, value in data.items()},
            seed=seed,
            batch=check_count("batch_size", self.batch_size),
            lr=self.learning_rate,
            epochs=check_count("max_iter", self.max_iter),
        )
        self.model_ = run.model.double()
        self.n_iter_ = self.max_iter
        self._score_seed = seed
        return self

    def _posterior(self, data: dict[str, Any]) -> Posterior:
        return self.model_.posterior(**data)

    def score_samples(self, X: Any) -> np.ndarray:
        """Estimate a lower bound on log p of each row.

        It is the importance-weighted bound of ``n_importance_samples`` draws, which rises to log p
        with their number, in the units of X. Other estimators compute log p itself, so compare
        their scores with many draws.

        Parameters:
            X: Rows [n, d]; NaN is a missing cell, and in a frame also None.

        Returns:
            The bounds [n].
        """
        return super().score_samples(X)

    def score(self, X: Any, y: Any = None) -> float:
        """Estimate the mean over the rows X [n, d] of a lower bound on log p. ``y`` is ignored."""
        return super().score(X)

    def _log_density(self, data: dict[str, Any]) -> Tensor:
        self._posterior(data)  # refuses missing cells that the encoder was not trained to read
        return importance_weighted(self.model_, data, self.n_importance_samples, self._score_seed)
