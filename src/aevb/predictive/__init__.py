"""Predictive checks: statistics of the data against those of data that the model would have given in their place."""

from aevb.predictive.check import Comparison, PredictiveCheck, predictive_check

__all__ = ["Comparison", "PredictiveCheck", "predictive_check"]
