"""The posterior after training: q's where q was trained, the exact one where it was not or where it is asked for, and what follows from it."""

from aevb.posterior.amortised import Posterior
from aevb.posterior.choice import UntaughtError, posterior_of, why_not_q
from aevb.posterior.exact import ExactPosterior
from aevb.posterior.imputation import Imputation, impute

__all__ = ["ExactPosterior", "Imputation", "Posterior", "UntaughtError", "impute", "posterior_of", "why_not_q"]
