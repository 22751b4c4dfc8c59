"""Exact gap between the evidence and the ELBO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from aevb.declare.distributions import MultivariateNormal as Gaussian
from aevb.derive.completion import incomplete
from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import estimate
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.evidence.exact import exact_evidence
from aevb.evidence.filtering import gaussian_posterior
from aevb.evidence.finite import why_not_finite
from aevb.evidence.linear_gaussian import why_not_linear_gaussian


def gap(model: DeclaredModel, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return KL(q(latents | data) ‖ p(latents | data)) per example, without sampling.

    Return None if this KL divergence has no closed form.
    """
    graph = model.graph
    if incomplete(graph, split_latents(graph, batch)[1]):
        return None
    if why_not_finite(model) is None:
        clamped, partial = split_latents(graph, batch)
        how = {name: "enumerate" for name in graph.latents if name not in clamped}
        bound = estimate(
            model.plan(how=how, clamped=clamped, partial=partial), model.factors, batch, {}
        )
        return exact_evidence(model, batch) - bound.value
    latents = tuple(name for name in graph.latents if name not in batch)
    if (
        why_not_linear_gaussian(model)
        or any(mask_of(name) in batch for name in graph.latents)
        or not latents
    ):
        return None
    program = Program(graph, model.factors, batch, steps=1)
    known = [name for name in (*graph.stochastic, *graph.given) if name in batch]
    program.values |= {name: batch[name] for name in known}
    program.run(graph.function_stages(known), lambda *_: torch.zeros(()))
    exact = gaussian_posterior(model, batch, latents)
    n = exact.loc.shape[0]
    means, factors = [], []
    for name in latents:
        spec = graph.rule("q", name).spec
        if not spec.gaussian or graph.latent_behind(name) is not None:
            return None
        dist: Any = program.distribution("q", name)[1]
        d = graph.size(name)
        # A factor of q without parents is the same in every row.
        means.append(dist.loc.double().reshape(-1, d).expand(n, d))
        factor = (
            dist._unbroadcasted_scale_tril
            if isinstance(dist, Gaussian)
            else torch.diag_embed(dist.scale.expand(dist.loc.shape))
        )
        factors.append(factor.double().reshape(-1, d, d).expand(n, d, d))
    q = td.MultivariateNormal(
        torch.cat(means, -1), scale_tril=_block_diagonal(factors), validate_args=False
    )
    p = td.MultivariateNormal(
        exact.loc, scale_tril=exact._unbroadcasted_scale_tril.expand(n, -1, -1), validate_args=False
    )
    return td.kl_divergence(q, p).to(model._parameter().dtype)


def _block_diagonal(matrices: list[Tensor]) -> Tensor:
    """Return a block diagonal matrix of batched square matrices, [N, d, d] each."""
    size = sum(matrix.shape[-1] for matrix in matrices)
    whole = matrices[0].new_zeros(*matrices[0].shape[:-2], size, size)
    start = 0
    for matrix in matrices:
        stop = start + matrix.shape[-1]
        whole[..., start:stop, start:stop] = matrix
        start = stop
    return whole
