"""The posterior after training, by q or exact, and imputation of missing values.

q is used if it was trained. The exact posterior is used if q was not trained, or on request.
"""

from aevb.posterior.amortised import Posterior
from aevb.posterior.choice import (
    UntaughtError,
    posterior_of,
    remedy,
    untrained_gaps_note,
    warn_of_unseen_patterns,
    why_not_q,
)
from aevb.posterior.exact import ExactPosterior
from aevb.posterior.imputation import Imputation, impute

__all__ = [
    "ExactPosterior",
    "Imputation",
    "Posterior",
    "UntaughtError",
    "impute",
    "posterior_of",
    "remedy",
    "untrained_gaps_note",
    "warn_of_unseen_patterns",
    "why_not_q",
]
