"""The base of all estimators: a declared model of standardised columns, with its density."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.utils import check_array, check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from aevb.estimate.batch import split_latents
from aevb.model import Model
from aevb.posterior import ExactPosterior, Posterior, impute
from aevb.runtime.checked_files import DataWarning
from aevb.runtime.seeding import seeded
from aevb.sklearn.columns import Columns, MixedColumns, first_text, is_mixed
from aevb.training.fit import fit
from aevb.training.run import Run

ROWS = 4096  # rows that a model reads at once after training


class AllowsMissing(BaseEstimator):
    """An estimator whose rows may have missing cells (NaN)."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


class DensityEstimator(AllowsMissing):
    """A latent variable model of a table, as a density of its columns.

    A subclass declares the model, trains it in ``fit``, and sets ``columns_`` and ``model_``.
    ``model_`` is an ordinary :class:`aevb.Model` of the standardised columns. Missing cells are
    marginalised out.
    """

    columns_: Columns | MixedColumns
    model_: Model
    random_state: Any
    verbose: Any

    # Fitting --------------------------------------------------------------------------------------

    def _read(self, X: Any) -> dict[str, np.ndarray]:
        """Check the training rows, read their columns, and return them as data of the model."""
        if self._mixed(X):
            validate_data(self, X, skip_check_array=True)
            self.columns_ = MixedColumns.read(X)
            return self.columns_.encode(X)
        X = validate_numbers(self, X, ensure_min_samples=2)
        self.columns_ = read_numbers(X)
        return self.columns_.encode(X)

    def _mixed(self, X: Any) -> bool:
        """Whether to read X as a frame with other columns than numbers."""
        return is_mixed(X)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _train(
        self, build: Callable[[], Model], data: dict[str, Any], seed: int, **settings: Any
    ) -> Run:
        """Build a model and train it, from a seed and without torch's global generator."""
        with seeded(seed, all_code=True):
            model = build()
        return fit(model, data, seed=seed, progress=bool(self.verbose), compile=False, **settings)

    def _check_convergence(self, run: Run) -> None:
        """Set ``n_iter_`` and ``converged_`` of an exact method.

        Warn if it did not converge, or if a density is as narrow as EM allows.
        """
        self.n_iter_ = run.step
        self.converged_ = any(row.get("kind") == "converged" for row in run.rows)
        if not self.converged_:
            warnings.warn(
                f"{type(self).__name__} took all max_iter={run.step} iterations without "
                f"converging. Raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=3,
            )
        if any(row.get("kind") == "variance floor" for row in run.rows):
            warnings.warn(
                f"{type(self).__name__}: a variance is at its lower limit, because values repeat "
                f"or follow from other columns. log p depends on this limit. Take fewer clusters "
                f"or components, or leave such columns out.",
                DataWarning,
                stacklevel=3,
            )

    # After fitting --------------------------------------------------------------------------------

    def _check(self, X: Any) -> Any:
        """Check new rows by number and names of their columns."""
        check_is_fitted(self)
        return check_rows(self, X, self.columns_)

    def _parts(self, X: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows as data of the model, a limited number at a time."""
        return split(self.columns_.encode(X))

    def _posterior(self, data: dict[str, Any]) -> Posterior:
        """The posterior of the latents of encoded rows."""
        raise NotImplementedError

    def _log_density(self, data: dict[str, Any]) -> Tensor:
        """log p of encoded rows."""
        raise NotImplementedError

    def score_samples(self, X: Any) -> np.ndarray:
        """Compute log p of each row.

        It is the log-density of the known cells in the units of X: a change of units of a column
        changes it by the logarithm of the factor.

        Parameters:
            X: Rows [n, d]; NaN is a missing cell, and in a frame also None.

        Returns:
            The log-densities [n].

        >>> from sklearn.datasets import load_iris
        >>> from aevb.sklearn import FactorAnalysis
        >>> X = load_iris().data
        >>> density = FactorAnalysis(n_components=2, random_state=0).fit(X)
        >>> density.score_samples(X).shape
        (150,)
        >>> bool(np.isclose(density.score(X), density.score_samples(X).mean()))
        True
        >>> density.sample(3).shape
        (3, 4)
        """
        X = self._check(X)
        return self._encoded_scores(self.columns_.encode(X)) + self.columns_.log_jacobian(X)

    def _encoded_scores(self, data: dict[str, Any]) -> np.ndarray:
        """log p of encoded rows, a limited number at a time."""
        with torch.no_grad():
            found = [self._log_density(part).double().numpy() for part in split(data)]
        return np.concatenate(found)

    def score(self, X: Any, y: Any = None) -> float:
        """Compute the mean of log p over the rows X [n, d]. ``y`` is ignored.

        >>> from sklearn.datasets import load_iris
        >>> from aevb.sklearn import FactorAnalysis
        >>> X = load_iris().data
        >>> round(FactorAnalysis(n_components=2).fit(X).score(X), 1)
        -2.6
        """
        return float(self.score_samples(X).mean())

    def _draw(self, n_samples: int) -> dict[str, np.ndarray]:
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(
                f"n_samples is the number of rows to draw, 1 or more, got {n_samples}."
            )
        found = self.model_.sample(n_samples, seed=self._seed())
        return {name: value.numpy() for name, value in found.items()}

    def sample(self, n_samples: int = 1) -> Any:
        """Draw rows [n, d] from the model, in the units of the training rows.

        They are a frame if the training rows were one with other columns than numbers.
        ``random_state`` decides the draw: an int gives the same rows at every call.

        Parameters:
            n_samples: The number n of rows.

        >>> from sklearn.datasets import load_iris
        >>> from aevb.sklearn import FactorAnalysis
        >>> X = load_iris().data
        >>> FactorAnalysis(n_components=2, random_state=0).fit(X).sample(3).shape
        (3, 4)
        """
        return self.columns_.decode(self._draw(n_samples))


def split(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield encoded rows, a limited number at a time."""
    for start in range(0, len(next(iter(data.values()))), ROWS):
        yield {name: value[start : start + ROWS] for name, value in data.items()}


class ExactDensityEstimator(DensityEstimator):
    """A density whose posterior, log p and imputation are exact."""

    def _posterior(self, data: dict[str, Any]) -> Posterior:
        return self.model_.posterior(method="exact", **data)

    def _log_density(self, data: dict[str, Any]) -> Tensor:
        return self.model_.log_evidence(method="exact", **data).value

    def _impute(
        self, X: np.ndarray, draws: int, seed: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fill missing cells: their means [n, d], standard deviations [n, d], draws [S, n, d]."""
        columns, missing = self.columns_, np.isnan(X)
        assert isinstance(columns, Columns)
        batch = self.model_.prepare(x=columns.standardise(X))
        found = impute(
            ExactPosterior(self.model_, batch, seed=seed), max(draws, 1), draws=draws > 0
        )
        mean = np.where(missing, columns.restore(found.mean["x"].numpy()), X)
        deviation = np.zeros_like(X)
        deviation[:, columns.varies] = found.sd["x"].numpy() * columns.scale[columns.varies]
        drawn = [
            np.where(missing, columns.restore(one.numpy()), X) for one in found.draws.get("x", ())
        ]
        return mean, np.where(missing, deviation, 0.0), np.array(drawn)


def importance_weighted(
    model: Model, data: Mapping[str, np.ndarray], samples: int, seed: int
) -> Tensor:
    """The importance-weighted bound of log p of each row, where all rows share their noise.

    The bound of a row is then a function of this row alone. The latents in ``data`` are known.
    """
    found = []
    n = len(next(iter(data.values())))
    for start in range(0, n, count := max(1, 50_000 // samples)):
        part: dict[str, Any] = {name: value[start : start + count] for name, value in data.items()}
        batch = model.prepare(**part)
        clamped, partial = split_latents(model.graph, batch)
        plan = model.plan(bound="iwae", samples=samples, clamped=clamped, partial=partial)
        first = {name: value[..., :1, :] for name, value in batch.items()}
        noise = {
            name: value.expand(*value.shape[:-2], min(count, n - start), value.shape[-1])
            for name, value in model.draw_noise(plan, first, seed=seed).items()
        }
        with torch.no_grad():
            found.append(model.elbo(bound="iwae", samples=samples, noise=noise, **part).value)
    return torch.cat(found)


class CodesMixin:
    """``transform`` to the posterior mean of the codes z, and back."""

    columns_: Columns | MixedColumns
    model_: Model

    def transform(self: Any, X: Any) -> np.ndarray:
        """Compute the posterior means of the codes [n, n_components] of the rows X [n, d].

        >>> from sklearn.datasets import load_iris
        >>> from aevb.sklearn import FactorAnalysis
        >>> X = load_iris().data
        >>> FactorAnalysis(n_components=2).fit(X).transform(X).shape
        (150, 2)
        """
        X = self._check(X)
        with torch.no_grad():
            found = [self._posterior(data)["z"].mean.double().numpy() for data in self._parts(X)]
        return np.concatenate(found)

    def inverse_transform(self: Any, X: Any) -> Any:
        """Compute the mean row [n, d], in its own units, of each code X [n, n_components].

        >>> from sklearn.datasets import load_iris
        >>> from aevb.sklearn import FactorAnalysis
        >>> X = load_iris().data
        >>> factors = FactorAnalysis(n_components=2).fit(X)
        >>> factors.inverse_transform(factors.transform(X)).shape
        (150, 4)
        """
        check_is_fitted(self)
        codes = check_array(X, dtype=np.float64)
        if codes.shape[1] != self._n_features_out:
            raise ValueError(
                f"A code has {self._n_features_out} numbers (n_components), got "
                f"{codes.shape[1]} columns."
            )
        found = self.model_.sample(len(codes), z=codes, mean=True, seed=0)
        return self.columns_.decode({name: value.numpy() for name, value in found.items()})

    @property
    def _n_features_out(self) -> int:
        return int(self.model_.graph.size("z"))


def read_numbers(X: np.ndarray, *, shared_unit: bool = False) -> Columns:
    """Read the columns of an array; raise ValueError if all of them are constant."""
    columns = Columns.read(X, shared_unit=shared_unit)
    if not columns.varies.any():
        raise ValueError(
            f"All columns are constant in these rows (n_samples={len(X)}), so there is nothing to "
            f"learn."
        )
    return columns


def validate_numbers(estimator: Any, X: Any, *y: Any, **settings: Any) -> Any:
    """Check rows of numbers as scikit-learn does, and name a column that is none."""
    try:
        return validate_data(
            estimator, X, *y, dtype=np.float64, ensure_all_finite="allow-nan", **settings
        )
    except (TypeError, ValueError) as error:
        if (found := first_text(X)) is None:
            raise
        raise ValueError(
            f"{type(estimator).__name__} reads numbers, but column {found[0]!r} holds "
            f"{found[1]!r}. Encode such columns first, for example in a pipeline with "
            f'ColumnTransformer([("levels", OneHotEncoder(sparse_output=False), '
            f'[{found[0]!r}])], remainder="passthrough"), or drop them.'
        ) from error


def validate_training(estimator: Any, X: Any) -> Any:
    """Check training rows: numbers, or a frame with other columns."""
    if is_mixed(X):
        validate_data(estimator, X, skip_check_array=True)
        return X
    return validate_numbers(estimator, X, ensure_min_samples=2)


def check_rows(estimator: Any, X: Any, columns: Columns | MixedColumns) -> Any:
    """Check new rows by number and names of their columns, and warn of columns left out."""
    if isinstance(columns, MixedColumns):
        validate_data(estimator, X, reset=False, skip_check_array=True)
    else:
        X = validate_numbers(estimator, X, reset=False)
    columns.warn_of_changes(X, getattr(estimator, "feature_names_in_", None))
    return X


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return a whole number of at least ``least``, or raise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} is a whole number, {least} or more, got {value!r}.")
    return int(value)


def fit_inner(estimator: Any, random_state: Any, X: Any) -> Any:
    """Fit a clone of an estimator to X.

    If the clone has no ``random_state`` of its own, it gets a seed from ``random_state``.
    """
    inner = clone(estimator)
    if "random_state" in (own := inner.get_params()) and own["random_state"] is None:
        inner.set_params(random_state=check_random_state(random_state).randint(2**31 - 1))
    return inner.fit(X)
