"""The exact posterior, for models with exact evidence.

It uses Bayes' rule, the Kalman smoother, the forward–backward algorithm, and combinations of these.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from aevb.declare.distributions import MultivariateNormal
from aevb.estimate.batch import Batch, public
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import estimate
from aevb.estimate.keys import mask_of, real_steps
from aevb.evidence.exact import exact_evidence
from aevb.evidence.exact_posterior import Marginals, Unknowns
from aevb.evidence.structure import structure_of
from aevb.posterior.amortised import Posterior
from aevb.posterior.piecewise import Pieces, Point


class ExactPosterior(Posterior):
    """The exact p(latents | data) of one batch, without q.

    Raises :class:`NotExactError`, with the reason, for a model without an exact posterior.
    """

    method = "exact"

    def __init__(
        self,
        model: DeclaredModel,
        batch: Batch,
        *,
        samples: int = 64,
        seed: int | None = None,
        why: str = "",
    ) -> None:
        super().__init__(model, batch, samples=samples, seed=seed, why=why)
        self.unknowns = Unknowns(model, structure_of(model, batch), batch)

    @cached_property
    def marginals(self) -> Marginals:
        with self.model._evaluating(None):
            return self.unknowns.marginals()

    def __getitem__(self, name: str) -> td.Distribution:
        """Return the marginal of one latent: categorical, Gaussian, or a mixture of Gaussians.

        The mixture has one component per value of the discrete latents.
        """
        self._check_asked(name)
        dtype = self.model._parameter().dtype
        if name in self.marginals.probs:
            probs = self.marginals.probs[name]
            return self._finite(name, (probs if self._by_step(name) else probs[:, 0]).to(dtype))
        found = self.marginals.components[name]
        assert found.covariance is not None
        mean, covariance, weight = (
            part if self._by_step(name) else part[:, 0]
            for part in (found.mean, found.covariance, found.weight)
        )
        certain = self._certain(name)
        if certain is not None:
            covariance = torch.where(
                certain[..., None, None, None],
                torch.eye(covariance.shape[-1]).to(covariance),
                covariance,
            )
        whole: td.Distribution = MultivariateNormal(mean.to(dtype), _root(covariance).to(dtype))
        if weight.shape[-1] > 1:
            whole = td.MixtureSameFamily(
                td.Categorical(probs=weight.to(dtype), validate_args=False),
                whole,
                validate_args=False,
            )
        else:
            whole = MultivariateNormal(
                mean[..., 0, :].to(dtype), _root(covariance[..., 0, :, :]).to(dtype)
            )
        if certain is None:
            return whole
        known = self._as_public(name, name) if mask_of(name) in self.batch else None
        return Pieces(
            certain, Point(torch.zeros_like(whole.mean) if known is None else known), whole
        )

    def _by_step(self, name: str) -> bool:
        """Return whether there is one marginal per step."""
        return self.graph.timed[name]

    def _certain(self, name: str) -> Tensor | None:
        """Return a mask of where a Gaussian latent is known or padding; None if nowhere.

        The mask has shape [N] or [N, T].
        """
        seen, real = (
            self._as_public(mask_of(name), name),
            real_steps(self.batch, timed=self.graph.timed[name]),
        )
        known = None if seen is None else seen.all(-1)
        padded = None if real is None else ~real.squeeze(-1).T
        return known if padded is None else padded if known is None else known | padded

    def sample(self, samples: int = 1) -> dict[str, Tensor]:
        """Draw joint samples of all latents, [S, N, size] or [S, N, T, size] each."""
        with self.model._evaluating(self.seed):
            drawn = self.unknowns.draw(samples)
        found = {}
        for name in (latent for latent in self.graph.latents if latent in drawn):
            value = drawn[name].to(self.model._parameter().dtype)
            if mask_of(name) in self.batch:
                value = torch.where(self.batch[mask_of(name)], self.batch[name], value)
            real = real_steps(self.batch, timed=self.graph.timed[name])
            if real is not None:
                value = torch.where(real, value, torch.zeros_like(value))
            found[name] = public(self.graph, name, value, self.n, self.steps)
        return found

    def log_prob(self, **values: Any) -> Tensor:
        """Return log p(values | data) = log p(values, data) − log p(data) per example, [N].

        ``values`` are those of all unknown latents, [N, size] or [N, T, size].
        """
        given = self._complete(values)
        with self.model._evaluating(None):
            joint = estimate(
                self.model.plan(clamped=self.graph.latents),
                self.model.factors,
                {**self.batch, **given},
                {},
            ).value
            return joint - exact_evidence(self.model, self.batch)

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return posterior mean and standard deviation of an observed variable.

        Each has shape [T or 1, N, d].
        """
        mean, sd = self.marginals.components[name].moments()
        dtype = self.model._parameter().dtype
        return mean.transpose(0, 1).to(dtype), sd.transpose(0, 1).to(dtype)


def _root(covariance: Tensor) -> Tensor:
    """Return the Cholesky factor.

    A numerically singular covariance gets a little more variance first.
    """
    covariance = (covariance + covariance.mT) / 2
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not bool(failed.any()):
        return factor
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    least = torch.maximum(1e-12 * variance, 1e-24 * variance.amax(-1, keepdim=True)).clamp_min(
        1e-200
    )
    return torch.linalg.cholesky(covariance + torch.diag_embed(least - variance.clamp_max(0.0)))
