"""The evidence in closed form: which models have it, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aevb.evidence.finite import log_joint, why_not_finite
from aevb.evidence.gaussian import LinearGaussian, why_not_linear_gaussian

if TYPE_CHECKING:
    from aevb.model import Model


def why_not_exact(model: Model) -> str | None:
    """What keeps the evidence and the posterior from being known exactly, in words; None if nothing does."""
    return None if why_not_finite(model) is None else why_not_linear_gaussian(model)


def exact_evidence(model: Model, batch: Mapping[str, Tensor]) -> Tensor:
    """log p(observed | given), one number an example, differentiable; for models that have it exactly."""
    if why_not_finite(model) is None:
        return log_joint(model, batch).flatten(0, -2).logsumexp(0)
    return LinearGaussian(model, batch, torch.float64).log_evidence().to(model._parameter().dtype)
