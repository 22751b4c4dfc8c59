"""Estimators for scikit-learn over declared models of tables.

Columns are standardised inside, and every log-density is one of the original columns. Missing cells
(NaN) are marginalised out. ``random_state`` decides everything, and torch's global generator is not
used. The attribute ``model_`` of a fitted estimator is an ordinary :class:`aevb.Model`.

Rows are an array or a frame of numbers. A frame of pandas or polars with other columns (text,
categories, truth values) is read by :class:`aevb.Schema`, which gives each column a likelihood of
its own.
"""

from aevb.sklearn.autoencoder import VariationalAutoencoder
from aevb.sklearn.classifier import SemiSupervisedClassifier
from aevb.sklearn.default_density import TableDensity
from aevb.sklearn.factor_analysis import FactorAnalysis
from aevb.sklearn.imputer import LatentImputer
from aevb.sklearn.mixture import MixtureClusterer
from aevb.sklearn.outliers import DensityOutlierDetector

__all__ = [
    "DensityOutlierDetector",
    "FactorAnalysis",
    "LatentImputer",
    "MixtureClusterer",
    "SemiSupervisedClassifier",
    "TableDensity",
    "VariationalAutoencoder",
]
