"""log p(x) and its distance from the bound: exact where the declared structure allows it, elsewhere estimated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.evidence.result import Evidence
from aevb.evidence.sampling import importance

__all__ = ["Evidence", "log_evidence"]

if TYPE_CHECKING:
    from aevb.model import Model


def log_evidence(model: Model, data: Mapping[str, Any], *, method: str, samples: int, seed: int | None) -> Evidence:
    if method not in ("auto", "exact", "importance"):
        raise ValueError(f"Unknown method {method!r}. Choose auto, exact or importance.")
    reason = why_not_exact(model)
    if method == "exact" and reason:
        raise ValueError(f'The evidence of this model is not known in closed form: {reason}. Use method="importance".')
    with model._evaluating(None):
        if reason is None and method != "importance":
            value = exact_evidence(model, model.prepare(**data))
            return Evidence(value, torch.zeros_like(value), "exact")
        return importance(model, model.prepare(**data), samples, seed)
