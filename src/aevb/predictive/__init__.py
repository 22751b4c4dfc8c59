"""Predictive checks: compare statistics of the data with those of data simulated from the model."""

from aevb.predictive.check import Comparison, PredictiveCheck, predictive_check

__all__ = ["Comparison", "PredictiveCheck", "predictive_check"]
