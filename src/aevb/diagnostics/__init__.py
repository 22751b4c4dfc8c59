"""After training: what is wrong with a model, by how much, from what cause, and what to do about it."""

from aevb.diagnostics.doctor import diagnose
from aevb.diagnostics.finding import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
