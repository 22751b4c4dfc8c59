"""Diagnose a trained model: what is wrong, how much, why, and what to do about it."""

from aevb.diagnostics.doctor import diagnose
from aevb.diagnostics.finding import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
