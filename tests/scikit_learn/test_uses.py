"""Imputation, outliers, labels, and the estimators inside scikit-learn's tools."""

import os
import pickle
import subprocess
import sys
import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline

from aevb.runtime.checked_files import DataWarning
from aevb.sklearn import (
    DensityOutlierDetector,
    FactorAnalysis,
    LatentImputer,
    MixtureClusterer,
    SemiSupervisedClassifier,
    VariationalAutoencoder,
)

WINE, KINDS = load_wine(return_X_y=True)


def holes(X, share=0.2, seed=0):
    return np.where(np.random.default_rng(seed).random(X.shape) < share, np.nan, X)


# Imputation ---------------------------------------------------------------------------------------


def test_imputed_cells_are_the_conditional_gaussian():
    X = holes(WINE)
    analysis = FactorAnalysis(3)
    filled, deviation = LatentImputer(analysis).fit(X).transform(X, return_std=True)
    found = clone(analysis).fit(X)
    mean, covariance = found.mean_, found.get_covariance()
    for row, whole, spread in zip(X, filled, deviation, strict=True):
        lost, known = np.isnan(row), ~np.isnan(row)
        gain = np.linalg.solve(covariance[np.ix_(known, known)], covariance[np.ix_(known, lost)]).T
        expected = mean[lost] + gain @ (row - mean)[known]
        left = covariance[np.ix_(lost, lost)] - gain @ covariance[np.ix_(known, lost)]
        np.testing.assert_allclose(whole[lost], expected, rtol=1e-7)
        np.testing.assert_allclose(spread[lost], np.sqrt(np.diag(left)), rtol=1e-7)
        np.testing.assert_array_equal(whole[known], row[known])
        assert (spread[known] == 0).all()


def test_draws_have_the_moments_of_the_posterior():
    X = holes(WINE)[:20]
    imputer = LatentImputer(random_state=1).fit(holes(WINE))
    mean, deviation = imputer.transform(X, return_std=True)
    draws = imputer.draw(X, n_draws=400)
    assert draws.shape == (400, *X.shape)
    lost = np.isnan(X)
    off = (draws.mean(0) - mean)[lost] / deviation[lost] * 20
    assert np.abs(off).max() < 5  # standard normal: one in 30,000 for 50 cells
    np.testing.assert_allclose((draws.std(0)[lost] / deviation[lost]).mean(), 1, atol=0.03)
    np.testing.assert_array_equal(draws[:, ~lost], np.broadcast_to(X[~lost], draws[:, ~lost].shape))
    np.testing.assert_array_equal(draws, imputer.draw(X, n_draws=400))


def test_the_imputer_keeps_names_and_index():
    frame = pd.DataFrame(holes(WINE), columns=load_wine().feature_names).set_index(
        np.arange(178) * 2
    )
    imputer = LatentImputer(random_state=0).set_output(transform="pandas")
    filled = imputer.fit_transform(frame)
    assert list(filled.columns) == list(frame.columns) == list(imputer.feature_names_in_)
    pd.testing.assert_index_equal(filled.index, frame.index)
    assert not filled.isna().to_numpy().any()


def test_an_imputer_refuses_what_it_cannot_learn():
    X = holes(WINE)
    with pytest.raises(ValueError, match="Column 3 .* has no known cell"):
        LatentImputer().fit(np.where(np.arange(13) == 3, np.nan, X))
    with pytest.raises(TypeError, match="estimator is a TableDensity, a FactorAnalysis or a Mix"):
        LatentImputer(VariationalAutoencoder()).fit(X)


# Outliers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [None, FactorAnalysis(2), MixtureClusterer(3)])
def test_planted_outliers_have_the_lowest_density(inner):
    random = np.random.default_rng(0)
    planted = WINE.mean(0) + 6 * WINE.std(0) * random.choice([-1, 1], (5, 13))
    detector = DensityOutlierDetector(inner, contamination=0.05, random_state=0).fit(WINE)
    assert (detector.predict(planted) == -1).all()
    assert (detector.predict(WINE) == -1).sum() == 9  # 5 % of 178 rows
    np.testing.assert_array_equal(
        detector.decision_function(WINE), detector.score_samples(WINE) - detector.offset_
    )


@pytest.mark.parametrize(
    "inner",
    [
        None,
        MixtureClusterer(2, covariance_type="full"),
        VariationalAutoencoder(1, max_iter=3, n_importance_samples=5),
    ],
)
@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_units_do_not_change_the_outliers(inner, unit):
    X = np.random.default_rng(0).normal(size=(400, 3))
    lost = np.random.default_rng(1).random(400) < 0.1
    X[lost, 2] = np.nan
    detector = DensityOutlierDetector(inner, contamination=0.1, random_state=0)
    scores, flags = detector.fit(X).score_samples(X), detector.predict(X)
    np.testing.assert_allclose(
        detector.fit(X * [1, 1, unit]).score_samples(X * [1, 1, unit]), scores, atol=1e-4
    )
    np.testing.assert_array_equal(detector.predict(X * [1, 1, unit]), flags)
    # Rows with and without a hole come from one distribution: 41 and 359 rows, of which a tenth is
    # marked. The difference of the shares has a standard deviation of 0.05.
    assert abs((flags == -1)[lost].mean() - (flags == -1)[~lost].mean()) < 0.1
    log_p = detector.estimator_.score_samples(X * [1, 1, unit])
    np.testing.assert_array_equal(np.argsort(scores[~lost]), np.argsort(log_p[~lost]))


def test_scores_of_a_gaussian_are_its_standardised_log_density():
    X = holes(WINE)
    detector = DensityOutlierDetector(FactorAnalysis(2)).fit(X)
    mean, covariance = detector.estimator_.mean_, detector.estimator_.get_covariance()
    expected = []
    for row in X:
        here = ~np.isnan(row)
        off = (row - mean)[here]
        # The squared distance is χ² with as many degrees of freedom as the row has known cells.
        distance = off @ np.linalg.solve(covariance[np.ix_(here, here)], off)
        expected.append((here.sum() - distance) / np.sqrt(2 * here.sum()))
    # Of 1,000 rows: the mean has a standard error of 0.03, the standard deviation of about 4 %.
    np.testing.assert_allclose(detector.score_samples(X), expected, rtol=0.2, atol=0.15)


def test_a_row_without_known_cells_is_no_outlier():
    detector = DensityOutlierDetector(random_state=0).fit(holes(WINE[:80, :4]))
    empty = np.full((1, 4), np.nan)
    assert detector.score_samples(empty).tolist() == [0.0]
    assert detector.predict(empty).tolist() == [1]


def test_a_detector_refuses_wrong_parameters():
    for share in (0.0, 0.6):
        with pytest.raises(ValueError, match="contamination is a share of the rows"):
            DensityOutlierDetector(contamination=share).fit(WINE)
    with pytest.raises(TypeError, match="one of aevb.sklearn with score_samples"):
        DensityOutlierDetector(LogisticRegression()).fit(WINE)


# Labels -------------------------------------------------------------------------------------------


def test_unlabelled_digits_are_classified():
    X, y = load_digits(n_class=4, return_X_y=True)
    labels = np.where(np.arange(len(y)) % 20 == 0, y, -1)
    found = SemiSupervisedClassifier(shared_unit=True, max_iter=20, random_state=0).fit(X, labels)
    assert found.classes_.tolist() == [0, 1, 2, 3]
    assert (found.transduction_ == y).mean() > 0.98
    known = labels >= 0
    np.testing.assert_array_equal(found.transduction_[known], labels[known])
    probabilities = found.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    np.testing.assert_array_equal(found.predict(X), found.classes_[probabilities.argmax(1)])


def test_probabilities_are_bayes_rule_over_log_p():
    labels = np.where(np.arange(178) % 5 == 0, KINDS, -1)
    found = SemiSupervisedClassifier(max_iter=10, random_state=0).fit(WINE, labels)
    joint = found._joint(found.columns_.encode(WINE))
    np.testing.assert_allclose(
        found.score_samples(WINE),
        np.log(np.exp(joint).sum(1)) + found.columns_.log_jacobian(WINE),
    )
    np.testing.assert_allclose(
        found.predict_proba(WINE), np.exp(joint) / np.exp(joint).sum(1, keepdims=True)
    )


def test_names_of_classes_and_missing_cells():
    names = np.array(["barolo", "grignolino", "barbera"], dtype=object)[KINDS]
    labels = np.where(np.arange(178) % 3 == 0, names, "?")
    X = holes(WINE, 0.1)
    classifier = SemiSupervisedClassifier(missing_label="?", max_iter=40, random_state=0)
    assert classifier.fit(X, labels).score(X, names) > 0.9
    assert classifier.classes_.tolist() == ["barbera", "barolo", "grignolino"]


def test_labels_that_do_not_suffice():
    with pytest.raises(ValueError, match="y has no label"):
        SemiSupervisedClassifier().fit(WINE, np.full(178, -1))
    with pytest.warns(UserWarning, match="pass missing_label=None"):
        SemiSupervisedClassifier(max_iter=2).fit(WINE, np.where(KINDS == 1, 1, -1))


@pytest.mark.parametrize(
    ("labels", "missing", "fix"),
    [
        (["a", "b", "-1"], -1, "missing_label='-1'"),
        (["a", "b", "-1.0"], -1, "missing_label='-1.0'"),
        ([0, 1, -1], "-1", "missing_label=-1"),
    ],
)
def test_a_missing_label_of_another_type_is_refused(labels, missing, fix):
    y = np.array(labels)[KINDS]
    classifier = SemiSupervisedClassifier(missing_label=missing, max_iter=2, random_state=0)
    with pytest.raises(ValueError, match=f"y has the label .* Pass {fix}, or None"):
        classifier.fit(WINE, y)
    for right, classes in ((np.array(labels)[2].item(), 2), (None, 3)):
        found = classifier.set_params(missing_label=right).fit(WINE, y)
        assert len(found.classes_) == classes


def test_a_number_marks_missing_labels_among_names():
    y = np.array(["a", "b", -1], dtype=object)[KINDS]
    found = SemiSupervisedClassifier(max_iter=2, random_state=0).fit(WINE, y)
    assert found.classes_.tolist() == ["a", "b"]
    np.testing.assert_array_equal(found.transduction_[KINDS < 2], y[KINDS < 2])


def test_a_random_state_decides_the_classifier():
    labels = np.where(np.arange(178) % 5 == 0, KINDS, -1)
    found = [
        SemiSupervisedClassifier(max_iter=3, random_state=seed)
        .fit(WINE, labels)
        .predict_proba(WINE)
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


# scikit-learn's tools -----------------------------------------------------------------------------

EVERY = [
    FactorAnalysis(2, random_state=0),
    MixtureClusterer(3, random_state=0),
    VariationalAutoencoder(2, max_iter=3, random_state=0),
    LatentImputer(random_state=0),
    DensityOutlierDetector(random_state=0),
    SemiSupervisedClassifier(max_iter=3, random_state=0),
]


def answer(estimator, X):
    return (estimator.predict if hasattr(estimator, "predict") else estimator.transform)(X)


@pytest.mark.parametrize("estimator", EVERY, ids=lambda one: type(one).__name__)
def test_pickled_and_joblib_copies_give_the_same_answers(estimator, tmp_path):
    fitted = clone(estimator).fit(WINE, KINDS)
    joblib.dump(fitted, tmp_path / "estimator.joblib")
    for copy in (pickle.loads(pickle.dumps(fitted)), joblib.load(tmp_path / "estimator.joblib")):
        np.testing.assert_array_equal(answer(copy, WINE), answer(fitted, WINE))


@pytest.mark.parametrize("estimator", EVERY, ids=lambda one: type(one).__name__)
def test_frames_are_checked_by_name(estimator):
    frame = pd.DataFrame(WINE, columns=load_wine().feature_names)
    fitted = clone(estimator).fit(frame, KINDS)
    assert list(fitted.feature_names_in_) == list(frame.columns)
    with pytest.raises(ValueError, match="feature names should match"):
        answer(fitted, frame[frame.columns[::-1]])


@pytest.mark.parametrize("estimator", EVERY, ids=lambda one: type(one).__name__)
def test_other_values_of_a_constant_column_warn(estimator):
    X = np.insert(WINE, 2, 7.0, axis=1)
    fitted = clone(estimator).fit(X, KINDS)
    before = answer(fitted, X)
    X[:3, 2] = 8.0
    with pytest.warns(DataWarning, match=r"Column 2 \(from 0\) was always 7 .* in 3 of these rows"):
        after = answer(fitted, X)
    same = np.delete(after, 2, axis=1) if after.shape == X.shape else after
    np.testing.assert_array_equal(
        same, np.delete(before, 2, axis=1) if before.shape == X.shape else before
    )
    named = pd.DataFrame(X, columns=[f"c{j}" for j in range(14)])
    fitted = clone(estimator).fit(named.assign(c2=7.0), KINDS)
    with pytest.warns(DataWarning, match="Column 'c2' was always 7"):
        answer(fitted, named)


def test_other_values_of_constant_columns_are_said_once():
    X = np.insert(WINE, [2, 5], 7.0, axis=1)
    fitted = FactorAnalysis(2).fit(X)
    X[:3, 2], X[2:4, 6] = 8.0, 9.0
    text = r"2 columns .* \(2 \(from 0\), 6 \(from 0\)\).* in 4 of these rows have no influence"
    with pytest.warns(DataWarning, match=text):
        fitted.score_samples(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.score_samples(X[:2])
        fitted.transform(X)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_codes_are_frames_with_names(library):
    pytest.importorskip(library)
    codes = FactorAnalysis(2).set_output(transform=library).fit_transform(WINE)
    assert list(codes.columns) == ["factoranalysis0", "factoranalysis1"]


def test_a_column_transformer_combines_codes():
    frame = pd.DataFrame(WINE, columns=load_wine().feature_names)
    both = ColumnTransformer(
        [
            ("factors", FactorAnalysis(2), list(frame.columns[:6])),
            ("codes", VariationalAutoencoder(1, max_iter=3, random_state=0), slice(6, 13)),
        ]
    )
    assert both.fit_transform(frame).shape == (178, 3)
    assert both.get_feature_names_out().tolist() == [
        "factors__factoranalysis0",
        "factors__factoranalysis1",
        "codes__variationalautoencoder0",
    ]


# A filled cell follows from the other cells, so a column may have (nearly) no noise of its own.
@pytest.mark.filterwarnings("ignore:.*at its lower limit:aevb.runtime.checked_files.DataWarning")
def test_a_grid_search_chooses_the_codes_of_a_logistic_regression():
    X, y = load_breast_cancer(return_X_y=True)
    pipeline = make_pipeline(
        LatentImputer(FactorAnalysis(5)), FactorAnalysis(), LogisticRegression(max_iter=500)
    )
    grid = {"factoranalysis__n_components": [1, 6], "logisticregression__C": [0.1, 10.0]}
    search = GridSearchCV(pipeline, grid, cv=3, error_score="raise").fit(holes(X, 0.05), y)
    assert search.best_params_["factoranalysis__n_components"] == 6
    assert search.best_score_ > 0.93


def test_held_out_density_chooses_the_number_of_clusters():
    X = load_iris().data
    search = GridSearchCV(
        MixtureClusterer(covariance_type="full", n_init=2, random_state=0),
        {"n_clusters": [1, 2, 3]},
        cv=[(np.arange(150) % 3 != k, np.arange(150) % 3 == k) for k in range(3)],
    )
    search.fit(X)
    assert search.best_params_["n_clusters"] > 1
    expected = cross_val_score(search.best_estimator_, X, cv=search.cv)
    assert search.best_score_ == pytest.approx(expected.mean())


def test_jobs_of_a_grid_search_give_the_same_scores():
    grid = {"n_components": [1, 2]}
    alone, together = (
        GridSearchCV(
            VariationalAutoencoder(max_iter=2, random_state=0), grid, cv=2, n_jobs=jobs
        ).fit(WINE)
        for jobs in (1, 2)
    )
    np.testing.assert_allclose(
        alone.cv_results_["mean_test_score"], together.cv_results_["mean_test_score"], rtol=1e-6
    )


@pytest.mark.slow
def test_array_dispatch_changes_nothing():
    # scipy reads this variable when it is imported, so the check needs a process of its own.
    code = (
        "import test_checks\n"
        "from sklearn.utils.estimator_checks import check_array_api_input as check\n"
        "for one in test_checks.ESTIMATORS:\n"
        "    check(type(one).__name__, one, 'numpy', expect_only_array_outputs=False)\n"
        "print(len(test_checks.ESTIMATORS), 'checked')\n"
    )
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, *(one for one in sys.path if one)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"SCIPY_ARRAY_API": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("8 checked\n"), done.stderr
