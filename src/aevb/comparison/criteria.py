"""Number of free parameters of p, and of observations, for information criteria.

The weights of a declaration may have directions that do not change p: a constant added to all
logits of a softmax, a rotation of the factors of factor analysis, or the unused half of a matrix.
AIC and BIC count the dimensions of the family of densities, without those directions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.sources import Source
from aevb.estimate.keys import mask_of, masks_of
from aevb.evidence.exact import exact_evidence
from aevb.model import Model

MOST = 1000  # trained numbers in p; for more, the count takes too long
STEP = 1e-4  # of the central differences
RANK = 1e-7  # singular values below this share of the largest count as 0
ROWS = 1000  # rows that are counted at a time
SPREAD = 0.5  # of the random weights at which the rank is computed


def free_parameters(model: Model, batch: Mapping[str, Tensor]) -> int | None:
    """Return the number of free parameters of p; None if p has more than 1,000 trained numbers.

    It is the rank of ∂ log p(x_n) / ∂θ_j at random weights θ, for rows x_n drawn from p: the
    dimension of the family of densities, up to a set of weights of measure zero. ``batch`` gives
    the length of sequences, the given variables and which latents are known. Frozen weights are not
    counted. The evidence of the model must be exact.
    """
    twin = copy.deepcopy(model).cpu().double()
    theta = list({id(one): one for one in twin.theta() if one.requires_grad}.values())
    count = sum(one.numel() for one in theta)
    if count > MOST:
        return None
    generator = torch.Generator().manual_seed(0)
    with twin._evaluating(0):
        for one in theta:
            fan = one.shape[-1] if one.dim() > 1 else 1
            drawn = torch.randn(one.shape, dtype=one.dtype, generator=generator)
            one.data = drawn * SPREAD / fan**0.5
        rows = _rows(twin, batch, 2 * count + 20)
        columns = []
        for one in theta:
            flat = one.view(-1)
            for j in range(len(flat)):
                here = float(flat[j])
                flat[j] = here + STEP
                above = exact_evidence(twin, rows)
                flat[j] = here - STEP
                columns.append((above - exact_evidence(twin, rows)) / (2 * STEP))
                flat[j] = here
    if not columns:
        return 0
    matrix = torch.stack(columns, 1).numpy()
    norms = np.linalg.norm(matrix, axis=0)
    used = matrix[:, norms > RANK * norms.max()]
    if not used.size or norms.max() == 0:
        return 0
    values = np.linalg.svd(used / np.linalg.norm(used, axis=0), compute_uv=False)
    return int((values > RANK * values[0]).sum())


def observed_steps(model: Model, source: Source) -> int | None:
    """Return the number of steps of all rows with a known entry; None if nothing has steps.

    It is the number of observations of BIC: the steps of one series carry information as rows do.
    """
    graph = model.graph
    timed = [name for name in graph.observed if graph.timed[name]]
    if not timed:
        return None
    total = 0
    for start in range(0, source.n, ROWS):
        batch = source.take(torch.arange(start, min(source.n, start + ROWS)))
        seen = torch.zeros(batch[timed[0]].shape[:2], dtype=torch.bool)
        for name in timed:
            there = torch.ones_like(batch[name], dtype=torch.bool)
            for mask in masks_of(batch, name, timed=True):
                there = there & mask
            seen |= there.any(-1).cpu()
        total += int(seen.sum())
    return total


def _rows(model: Model, batch: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    """Draw rows from p as a batch: the observed variables, the given ones, the known latents."""
    graph = model.graph
    there, steps = model._extent(batch)
    fixed: dict[str, Any] = {}
    for name in graph.given:
        value = batch[name].cpu().double()[:, torch.arange(n) % there]
        fixed[name] = value.transpose(0, 1) if graph.timed[name] else value[0]
    timed = any(graph.timed[name] for name in graph.observed)
    drawn = model.sample(n, steps=steps if timed else None, seed=0, **fixed)
    known = [name for name in graph.latents if name in batch and mask_of(name) not in batch]
    return model.prepare(**fixed, **{name: drawn[name] for name in (*graph.observed, *known)})
