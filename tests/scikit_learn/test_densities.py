"""Densities, codes and clusters, against formulas and other implementations."""

import warnings

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.decomposition import FactorAnalysis as TheirFactorAnalysis
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture

from aevb.runtime.checked_files import DataWarning
from aevb.sklearn import (
    FactorAnalysis,
    MixtureClusterer,
    TableDensity,
    VariationalAutoencoder,
)
from aevb.sklearn.columns import Columns

WINE, KINDS = load_wine(return_X_y=True)
IRIS = load_iris().data


def holes(X, share=0.1, seed=0):
    return np.where(np.random.default_rng(seed).random(X.shape) < share, np.nan, X)


DENSITIES = {
    "factors": FactorAnalysis(1),
    "diagonal mixture": MixtureClusterer(3, random_state=0),
    "full mixture": MixtureClusterer(2, covariance_type="full", random_state=0),
    "tied mixture": MixtureClusterer(3, covariance_type="tied", random_state=0),
    "autoencoder": VariationalAutoencoder(2, max_iter=5, random_state=0),
}


def test_factor_analysis_is_the_gaussian_of_its_attributes():
    X = holes(WINE)
    found = FactorAnalysis(3).fit(X)
    covariance = found.get_covariance()
    expected = [
        multivariate_normal(found.mean_[here], covariance[np.ix_(here, here)]).logpdf(row[here])
        for row, here in zip(X, ~np.isnan(X), strict=True)
    ]
    np.testing.assert_allclose(found.score_samples(X), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("rows", "count", "steps"), [(WINE, 2, 5000), (load_breast_cancer().data, 4, 200)]
)
def test_factor_analysis_reaches_the_likelihood_of_scikit_learn(rows, count, steps):
    standard = (rows - rows.mean(0)) / rows.std(0)
    theirs = TheirFactorAnalysis(count, tol=1e-8, max_iter=steps, svd_method="lapack")
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        theirs.fit(standard)
    expected = theirs.score(standard) - np.log(rows.std(0)).sum()
    assert FactorAnalysis(count).fit(rows).score(rows) > expected - 1e-4


def test_codes_of_factor_analysis_are_posterior_means():
    found = FactorAnalysis(2).fit(WINE)
    expected = (WINE - found.mean_) @ np.linalg.solve(found.get_covariance(), found.components_.T)
    np.testing.assert_allclose(found.transform(WINE), expected, atol=1e-9)
    np.testing.assert_allclose(
        found.inverse_transform(found.transform(WINE)),
        found.mean_ + expected @ found.components_,
        rtol=1e-9,
    )


def test_factors_are_rotated_to_independent_posteriors_in_order():
    found = FactorAnalysis(4).fit(WINE)
    information = (found.components_ / found.noise_variance_) @ found.components_.T
    np.testing.assert_allclose(information, np.diag(np.diag(information)), atol=1e-7)
    assert (np.diff(np.diag(information)) < 0).all()
    scale = WINE.std(0)
    largest = np.abs(found.components_ / scale).argmax(1)
    assert (found.components_[np.arange(4), largest] > 0).all()


def test_bic_finds_the_number_of_factors():
    random = np.random.default_rng(0)
    X = random.normal(size=(500, 3)) @ random.normal(size=(3, 12)) + random.normal(size=(500, 12))
    found = FactorAnalysis("bic").fit(X)
    assert found.n_components_ == 3
    np.testing.assert_array_equal(found.transform(X), FactorAnalysis(3).fit(X).transform(X))
    # A criterion of a few rows would choose too many factors.
    assert FactorAnalysis("bic").fit(X[:25]).n_components_ <= 2


def test_a_density_as_narrow_as_em_allows_warns():
    X = np.repeat(IRIS[:4], 10, axis=0)
    with pytest.warns(DataWarning, match="MixtureClusterer: a variance is at its lower limit"):
        MixtureClusterer(4, random_state=0).fit(X)


@pytest.mark.parametrize("kind", ["diag", "full", "tied"])
def test_a_mixture_is_the_one_of_scikit_learn_from_the_same_start(kind):
    ours = MixtureClusterer(2, covariance_type=kind, tol=1e-10, random_state=0).fit(IRIS)
    theirs = GaussianMixture(
        2,
        covariance_type=kind,
        weights_init=ours.weights_,
        means_init=ours.means_,
        tol=1e-12,
        max_iter=5000,
        reg_covar=0,
        random_state=0,
    ).fit(IRIS)
    np.testing.assert_allclose(ours.score_samples(IRIS), theirs.score_samples(IRIS), atol=1e-3)
    np.testing.assert_allclose(ours.predict_proba(IRIS), theirs.predict_proba(IRIS), atol=1e-3)
    assert ours.bic(IRIS) == pytest.approx(theirs.bic(IRIS), abs=1e-2)
    assert ours.aic(IRIS) == pytest.approx(theirs.aic(IRIS), abs=1e-2)


@pytest.mark.parametrize("kind", ["diag", "full", "tied"])
def test_the_density_of_a_mixture_integrates_to_one(kind):
    X = IRIS[:, [0, 2]] * [10.0, 0.1]
    found = MixtureClusterer(3, covariance_type=kind, random_state=0).fit(X)
    axes = [np.linspace(a - 30 * s, a + 30 * s, 500) for a, s in zip(X.mean(0), X.std(0) / 6)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    assert np.exp(found.score_samples(grid)).sum() * cell == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", DENSITIES)
def test_a_change_of_units_changes_log_p_by_the_jacobian(name):
    estimator, X = DENSITIES[name], holes(IRIS)
    factor, shift = np.array([1e3, 2.0, 0.5, 1e-4]), np.array([5.0, 0.0, -100.0, 1.0])
    before = estimator.fit(X).score_samples(X)
    after = estimator.fit(X * factor + shift).score_samples(X * factor + shift)
    jacobian = np.where(np.isnan(X), 0, np.log(factor)).sum(1)
    np.testing.assert_allclose(after, before - jacobian, atol=1e-4)


@pytest.mark.parametrize("name", DENSITIES)
def test_a_constant_column_is_left_out_and_returned(name):
    estimator = DENSITIES[name]
    before = estimator.fit(IRIS).score_samples(IRIS)
    X = np.insert(IRIS, 2, 7.0, axis=1)
    np.testing.assert_allclose(estimator.fit(X).score_samples(X), before)
    drawn = estimator.sample(5)
    rows = drawn[0] if isinstance(drawn, tuple) else drawn
    assert rows.shape == (5, 5)
    assert (rows[:, 2] == 7.0).all()
    with pytest.raises(ValueError, match="All columns are constant"):
        estimator.fit(np.ones((10, 3)))


@pytest.mark.parametrize("name", DENSITIES)
def test_an_empty_row_has_log_p_zero(name):
    estimator = DENSITIES[name].fit(holes(IRIS))
    row = np.full((1, 4), np.nan)
    if name == "autoencoder":
        with pytest.warns(DataWarning, match="1 row lacks 4 columns at once"):
            empty = estimator.score_samples(row)
    else:
        empty = estimator.score_samples(row)
    # The bound of the autoencoder is log p less the divergence of q from the prior.
    assert empty[0] <= 1e-9 if name == "autoencoder" else empty[0] == pytest.approx(0, abs=1e-12)


def test_clusters_of_wine_are_its_kinds():
    found = MixtureClusterer(3, n_init=5, random_state=0)
    assert adjusted_rand_score(KINDS, found.fit_predict(holes(WINE))) > 0.75
    np.testing.assert_array_equal(found.labels_, found.predict(holes(WINE)))
    rows, clusters = found.sample(4000)
    share = np.bincount(clusters, minlength=3) / 4000
    np.testing.assert_allclose(share, found.weights_, atol=0.04)  # 5 standard errors
    for k in range(3):
        error = rows[clusters == k].std(0) / (clusters == k).sum() ** 0.5
        assert (np.abs(rows[clusters == k].mean(0) - found.means_[k]) < 5 * error).all()


def test_more_starts_never_lower_log_p():
    scores = [
        MixtureClusterer(6, n_init=count, random_state=3).fit(WINE).score(WINE) for count in (1, 4)
    ]
    assert scores[1] >= scores[0]


def test_the_bound_of_a_linear_autoencoder_is_below_its_exact_evidence():
    found = VariationalAutoencoder(
        2, hidden_layer_sizes=(), learning_rate=0.02, max_iter=400, random_state=0
    ).fit(IRIS)
    x = found.columns_.standardise(IRIS)
    exact = found.model_.log_evidence(x=x, method="exact").value.detach().numpy()
    gap = exact + found.columns_.log_jacobian(IRIS) - found.score_samples(IRIS)
    assert 0 < gap.mean() < 0.05  # the bound holds in the mean over rows


def test_an_autoencoder_that_read_complete_rows_refuses_missing_cells():
    found = VariationalAutoencoder(2, max_iter=5, random_state=0).fit(IRIS)
    for method in (found.transform, found.score_samples):
        with pytest.raises(ValueError, match="not trained on"):
            method(holes(IRIS))


def test_em_that_does_not_converge_warns():
    with pytest.warns(ConvergenceWarning, match="max_iter=3"):
        found = MixtureClusterer(3, max_iter=3, tol=0.0, random_state=0).fit(IRIS)
    assert (found.n_iter_, found.converged_) == (3, False)


@pytest.mark.parametrize("name", DENSITIES)
def test_random_state_decides_everything_and_global_generators_stay(name):
    estimator = DENSITIES[name]
    numbers, before = np.random.get_state()[1].copy(), torch.get_rng_state()

    def outcome(random_state):
        found = estimator.set_params(random_state=random_state).fit(IRIS)
        drawn = found.sample(3)
        return np.append(found.score_samples(IRIS), drawn[0] if isinstance(drawn, tuple) else drawn)

    np.testing.assert_array_equal(outcome(4), outcome(4))
    np.testing.assert_array_equal(
        outcome(np.random.RandomState(4)), outcome(np.random.RandomState(4))
    )
    assert (outcome(4) != outcome(5)).any()
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numbers, np.random.get_state()[1])
    estimator.set_params(random_state=0)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (FactorAnalysis(0), "n_components is a whole number, 1 or more, got 0"),
        (FactorAnalysis("aic"), "whole number, None or .bic., got 'aic'"),
        (FactorAnalysis(max_iter=0), "max_iter is a whole number"),
        (MixtureClusterer(2.5), "n_clusters is a whole number"),
        (MixtureClusterer(200), "n_samples=150 should be at least n_clusters=200"),
        (MixtureClusterer(covariance_type="round"), "one of diag, full, tied, got 'round'"),
        (VariationalAutoencoder(hidden_layer_sizes=(0,)), "a hidden layer is a whole number"),
    ],
)
def test_wrong_parameters_are_refused_in_fit(estimator, message):
    with pytest.raises(ValueError, match=message):
        estimator.fit(IRIS)


def test_wrong_calls_are_refused():
    found = FactorAnalysis(2).fit(IRIS)
    with pytest.raises(ValueError, match="A code has 2 numbers"):
        found.inverse_transform(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="n_samples is the number of rows"):
        found.sample(0)


def test_columns_keep_their_digits():
    X = np.array([[1e300, 1e9 + 1, 1e-300], [-1e300, 1e9 + 3, 3e-300]])
    read = Columns.read(X)
    np.testing.assert_allclose(read.scale, [1e300, 1.0, 1e-300])
    np.testing.assert_allclose(read.restore(read.standardise(X)), X)
    with pytest.raises(ValueError, match="Column 0 .* spans more than the range"):
        Columns.read(X * [1.7e8, 1, 1])


def test_a_repeated_column_of_a_density_is_told():
    X = np.column_stack([WINE[:, :3], 2 * WINE[:, 1]])
    with pytest.warns(DataWarning, match="Column: '3' is 2 · '1'. .* Drop it"):
        TableDensity(random_state=0).fit(X)
