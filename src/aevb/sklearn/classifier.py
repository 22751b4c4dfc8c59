"""Classify rows when most of them have no label."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import column_or_1d  # type: ignore[import-untyped]
from torch import Tensor

from aevb.clustering import spread_labels
from aevb.declare.families import Normal, OneHot
from aevb.declare.networks import mlp
from aevb.model import Model
from aevb.sklearn.density import (
    DensityEstimator,
    check_count,
    importance_weighted,
    read_numbers,
    validate_numbers,
)
from aevb.training.fit import fit

WARM = 0.4  # share of the epochs that are trained with the labels that the graph suggests


class SemiSupervisedClassifier(ClassifierMixin, DensityEstimator):
    """A classifier for rows of which only some have a label.

    The model is M2: class y and style z are independent, and a network makes x of both. Rows
    without a label (−1) train it too, with y summed out. Training starts from labels that the graph
    of nearest neighbours suggests for these rows, and continues without them. The class
    probabilities are Bayes' rule, p(y | x) ∝ p(y) p(x | y), with the importance-weighted bound of
    log p(x | y).

    These probabilities are too confident: entries of x that depend on each other beyond y and z
    count as independent evidence for the class. On scikit-learn's digits with a tenth of the
    labels, the mean probability of the predicted class is 0.98 to 0.995 and the accuracy 0.96.
    Calibrate them with a few hundred labelled rows that were not in ``fit``, some of which are
    misclassified: ``CalibratedClassifierCV(FrozenEstimator(classifier), method="temperature")`` of
    scikit-learn.

    Parameters:
        n_components: Number of entries of the style z.
        hidden_layer_sizes: Sizes of the hidden layers of all networks.
        shared_unit: Whether all columns have one unit, as pixels have. They are then scaled by one
            number; otherwise each column is scaled to a standard deviation of 1.
        n_neighbors: Neighbours of a row in the graph. 0 uses no graph.
        classify_weight: Weight of log q(y | x) of the rows with labels.
        batch_size: Rows per step of Adam.
        learning_rate: Learning rate of Adam.
        max_iter: Number of epochs.
        n_importance_samples: Draws of z per row and class in predictions.
        missing_label: The value of y that marks a row without a label, −1 as in
            ``sklearn.semi_supervised``. With None all rows have labels. It has the type of the
            labels: −1 does not mark a text "-1", and y with such a label is refused.
        random_state: Decides weights, noise and draws: an int, a RandomState or None.
        verbose: Print the progress.

    Attributes:
        classes_: The classes, sorted.
        transduction_: The label of each training row: its own, or else the predicted one.
        model_: The declared :class:`aevb.Model` of the standardised columns.
        n_iter_: Number of epochs.

    >>> from sklearn.datasets import load_wine
    >>> X, y = load_wine(return_X_y=True)
    >>> some = np.where(np.arange(178) % 10 == 0, y, -1)
    >>> classifier = SemiSupervisedClassifier(max_iter=40, random_state=0).fit(X, some)
    >>> classifier.score(X, y) > 0.9
    True
    >>> classifier.predict(X[:3]), classifier.predict_proba(X[:3]).shape
    (array([0, 0, 0]), (3, 3))
    """

    def __init__(
        self,
        n_components: int = 10,
        *,
        hidden_layer_sizes: Sequence[int] = (128,),
        shared_unit: bool = False,
        n_neighbors: int = 5,
        classify_weight: float = 50.0,
        batch_size: int = 100,
        learning_rate: float = 2e-3,
        max_iter: int = 100,
        n_importance_samples: int = 20,
        missing_label: Any = -1,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.hidden_layer_sizes = hidden_layer_sizes
        self.shared_unit = shared_unit
        self.n_neighbors = n_neighbors
        self.classify_weight = classify_weight
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.n_importance_samples = n_importance_samples
        self.missing_label = missing_label
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Self:
        """Train on the rows X [n, d] and their labels y [n]; NaN is a missing cell of X.

        Returns:
            This estimator.
        """
        X, y = validate_numbers(self, X, y, ensure_min_samples=2)
        labels = self._encode(column_or_1d(y))
        self.columns_ = read_numbers(X, shared_unit=self.shared_unit)
        x = self.columns_.standardise(X).astype(np.float32)
        seed = self._seed()
        model = self._fit_model(x, labels, seed)
        self.model_ = model.double()
        self.n_iter_ = self.max_iter
        self._score_seed = seed
        found = np.where(labels < 0, self._joint(self.columns_.encode(X)).argmax(1), labels)
        self.transduction_ = self.classes_[found]
        return self

    def _encode(self, y: np.ndarray) -> np.ndarray:
        """Set ``classes_``, and return the index of each label, −1 for a row without one."""
        known = np.ones(len(y), dtype=bool)
        if self.missing_label is not None:
            if (alike := [one for one in y.tolist() if _alike(one, self.missing_label)]) != []:
                raise ValueError(
                    f"y has the label {alike[0]!r}, but missing_label={self.missing_label!r} is "
                    f"{'no' if isinstance(alike[0], str) else 'a'} text, so it would not mark this "
                    f"row. Pass missing_label={alike[0]!r}, or None if it is a class."
                )
            known = np.array([one != self.missing_label for one in y], dtype=bool)
        if not known.any():
            raise ValueError(
                f"y has no label: every value is missing_label={self.missing_label!r}."
            )
        check_classification_targets(y[known])
        self.classes_, index = np.unique(y[known], return_inverse=True)
        if len(self.classes_) == 1 and not known.all():
            warnings.warn(
                f"All labels are {self.classes_[0]!r}, because {self.missing_label!r} marks rows "
                f"without a label. If it is a class, pass missing_label=None.",
                UserWarning,
                stacklevel=3,
            )
        labels = np.full(len(y), -1)
        labels[known] = index
        return labels

    def _fit_model(self, x: np.ndarray, labels: np.ndarray, seed: int) -> Model:
        count, classes = check_count("n_components", self.n_components), len(self.classes_)
        epochs = check_count("max_iter", self.max_iter)
        check_count("n_importance_samples", self.n_importance_samples)
        net = mlp(*(check_count("a hidden layer", size) for size in self.hidden_layer_sizes))
        settings: dict[str, Any] = {
            "batch": check_count("batch_size", self.batch_size),
            "lr": self.learning_rate,
            "classify": float(self.classify_weight),
        }

        def rows(labels: np.ndarray) -> np.ndarray:
            """One-hot rows, and NaN for unknown labels."""
            return np.where(labels[:, None] < 0, np.nan, np.eye(classes)[labels])

        def build() -> Model:
            return Model(
                p={
                    "y": OneHot(classes, learned=True),
                    "z": Normal(count),
                    "x | y, z": Normal(x.shape[1], net=net, scale="learned"),
                },
                q={"y | x": OneHot(net=net), "z | x, y": Normal(net=net)},
                missing="mask",
            )

        warm = round(WARM * epochs) if self.n_neighbors and (labels < 0).any() else 0
        if not warm:
            return self._train(
                build, {"x": x, "y": rows(labels)}, seed, epochs=epochs, **settings
            ).model
        model = self._train(
            build,
            {"x": x, "y": rows(self._suggested(x, labels))},
            seed,
            epochs=warm,
            decay="constant",
            **settings,
        ).model
        # The first steps of a new optimiser are large. Without a warm-up they would undo the start.
        per_epoch = -(-len(x) // settings["batch"])
        steps = max(1, (epochs - warm) * per_epoch)
        fit(
            model,
            {"x": x, "y": rows(labels)},
            steps=steps,
            warmup=min(2 * per_epoch, steps - 1),
            seed=seed,
            progress=bool(self.verbose),
            compile=False,
            **settings,
        )
        return model

    def _suggested(self, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Labels of all rows that the graph of neighbours reaches; missing cells are means."""
        rows = torch.from_numpy(np.nan_to_num(x)).double()
        found = spread_labels(
            rows,
            torch.from_numpy(labels),
            len(self.classes_),
            neighbours=check_count("n_neighbors", self.n_neighbors),
        ).numpy()
        suggested = np.where(found.any(1), found.argmax(1), -1)
        return np.where(labels < 0, suggested, labels)

    def _joint(self, data: dict[str, Any]) -> np.ndarray:
        """log p(x, y) of encoded rows and all classes [n, classes]."""
        self.model_.posterior(**data)  # refuses missing cells that q was not trained to read
        found = [
            importance_weighted(
                self.model_,
                data | {"y": np.broadcast_to(one, (len(data["x"]), len(one)))},
                self.n_importance_samples,
                self._score_seed,
            ).numpy()
            for one in np.eye(len(self.classes_))
        ]
        return np.stack(found, axis=1)

    def _log_density(self, data: dict[str, Any]) -> Tensor:
        return torch.from_numpy(self._joint(data)).logsumexp(1)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Compute p(y | x) of each class [n, classes] for the rows X [n, d].

        The columns are in the order of ``classes_``.
        """
        X = self._check(X)
        joint = np.concatenate([self._joint(data) for data in self._parts(X)])
        found = np.exp(joint - joint.max(1, keepdims=True))
        return found / found.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class [n] of each of the rows X [n, d]."""
        most = self.predict_proba(X).argmax(1)
        return self.classes_[most]


def _alike(label: Any, missing: Any) -> bool:
    """Whether one of two labels is a text that writes the other one, a number."""
    if isinstance(label, str) == isinstance(missing, str):
        return False
    try:
        return float(label) == float(missing)
    except (TypeError, ValueError):
        return False
