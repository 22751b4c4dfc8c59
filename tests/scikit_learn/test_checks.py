"""scikit-learn's own checks of every estimator."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from aevb.sklearn import (
    DensityOutlierDetector,
    FactorAnalysis,
    LatentImputer,
    MixtureClusterer,
    VariationalAutoencoder,
)

ESTIMATORS = [
    FactorAnalysis(),
    FactorAnalysis(2),
    MixtureClusterer(3),
    MixtureClusterer(2, covariance_type="full"),
    MixtureClusterer(2, covariance_type="tied"),
    VariationalAutoencoder(max_iter=5),
    LatentImputer(),
    LatentImputer(FactorAnalysis(2)),
    DensityOutlierDetector(),
    DensityOutlierDetector(MixtureClusterer(2)),
    DensityOutlierDetector(VariationalAutoencoder(max_iter=5)),
]


@parametrize_with_checks(ESTIMATORS)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)
