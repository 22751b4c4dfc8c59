"""Weighted draws from the posterior, for missing entries that p reads.

p draws a missing entry given the past, but the posterior of a gap depends on the data after it,
too. Draws of latents and missing entries are therefore weighted by p / q. A particle filter weights
and resamples them step by step. Where it does not apply, whole draws are weighted, which is
importance sampling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from aevb.derive.plan import derive
from aevb.estimate.batch import Batch
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.estimators import Estimate
from aevb.estimate.particle_filter import ParticleFilter
from aevb.evidence.memory_limit import narrow
from aevb.evidence.methods import why_not_filtered
from aevb.posterior.amortised import Posterior
from aevb.runtime.seeding import generator

PARTICLES = 1000  # weighted draws per row
FILTERS = 4  # independent filters that share them, weighted by their estimates of p(x)
AT_ONCE = 2**25  # numbers in the draws of the rows that are processed together


class WeightedPosterior(Posterior):
    """The posterior of a batch with missing entries that p reads, by weighted draws.

    ``method`` is "particles" or "importance".
    """

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
        self.filters = why_not_filtered(model, self.gaps) is None
        self.method = "particles" if self.filters else "importance"
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    def joint(self, samples: int = 1) -> Batch:
        """Draw all unknowns in proportion to the weights, [S, T or 1, N, d] each."""
        found: list[Batch] = []
        moments: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.gaps}
        with self.model._evaluating(self.seed):
            for rows in self._blocks():
                values, log_weights = self._filtered(rows) if self.filters else self._drawn(rows)
                for name in self.gaps:
                    moments[name].append(_mean_and_sd(values[name], log_weights))
                index = _chosen(log_weights, samples)[:, None, :, None]
                found.append(
                    {
                        name: value.gather(0, index.expand(-1, value.shape[1], -1, value.shape[-1]))
                        for name, value in values.items()
                    }
                )
        for name, parts in moments.items():
            mean, sd = (torch.cat([part[i] for part in parts], -2) for i in range(2))
            self._moments[name] = mean, sd
        return {name: torch.cat([one[name] for one in found], -2) for name in found[0]}

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the weighted mean and standard deviation of an observed variable.

        Each has shape [T or 1, N, d]. The variable has missing entries that p reads.
        """
        if name not in self._moments:
            self.joint()
        return self._moments[name]

    def _blocks(self) -> Iterator[Batch]:
        """Yield the rows in parts whose draws fit into memory."""
        names = [*self.graph.latents, *self.gaps]
        width = sum(
            self.graph.size(name) * (self.steps if self.graph.timed[name] else 1) for name in names
        )
        rows = max(1, AT_ONCE // (PARTICLES * width))
        for start in range(0, self.n, rows):
            yield narrow(self.batch, start, min(rows, self.n - start))

    def _filtered(self, rows: Batch) -> tuple[Batch, Tensor]:
        """Return the lines of the last particles, [K, T or 1, N, d] each, and their log-weights."""
        names = [name for name in self.graph.latents if name not in self.clamped]
        names += sorted(self.gaps)
        timed = [name for name in names if self.graph.timed[name]]
        parts, weights = [], []
        for _ in range(FILTERS):
            run = ParticleFilter.of(self.model, rows, PARTICLES // FILTERS).run(record=timed)
            weights.append(run.value + run.log_weights)
            parts.append(
                {
                    name: run.paths(name).transpose(0, 1) if name in timed else run.values[name]
                    for name in names
                }
            )
        return {name: torch.cat([part[name] for part in parts]) for name in names}, torch.cat(
            weights
        )

    def _drawn(self, rows: Batch) -> tuple[Batch, Tensor]:
        """Return draws of q and p, [K, T or 1, N, d] each, and the log of p / q."""
        plan = derive(
            self.graph,
            samples=PARTICLES,
            clamped=self.clamped,
            partial=self.partial,
            sampling=True,
        )
        if plan.enumerated:
            raise ValueError(
                f"q computes {plan.enumerated[0]} by Bayes' rule, so there are no weighted draws "
                f"of the missing entries of {min(self.gaps)}, which p reads. Give "
                f"{plan.enumerated[0]} a factor of its own in q, or fill the entries."
            )
        working = Estimate(plan, self.model.factors, rows, self.model.draw_noise(plan, rows))
        n = self.model._extent(rows)[0]
        total = torch.zeros(PARTICLES, 1, n, 1, device=self.model._parameter().device)
        for name in self.graph.stochastic:
            term = working.log_p(name)
            total = total + (working.over_steps(term) if self.graph.timed[name] else term)
        for name in plan.choices:
            total = total - working.log_drawn(name)
        values = {}
        for name in (*plan.choices, *plan.completed):
            value = working.program.values[name]
            values[name] = value.expand(PARTICLES, value.shape[-3], n, value.shape[-1])
        return values, total.reshape(PARTICLES, n).double()


def _mean_and_sd(value: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted moments of values [K, T or 1, N, d], each [T or 1, N, d]."""
    weight = log_weights.softmax(0)[:, None, :, None].to(value.dtype)
    mean = (weight * value).sum(0)
    return mean, (weight * (value - mean).square()).sum(0).sqrt()


def _chosen(log_weights: Tensor, samples: int) -> Tensor:
    """Choose among K draws in proportion to their weights, [S, N], in random order."""
    k, n = log_weights.shape
    device = log_weights.device
    edges = log_weights.softmax(0).double().cumsum(0).T.contiguous()  # [N, K]
    offset = torch.rand(n, 1, device=device, generator=generator(device), dtype=torch.float64)
    at = (torch.arange(samples, device=device) + offset) / samples * edges[:, -1:]
    index = torch.searchsorted(edges, at, right=True).clamp_max(k - 1).T
    order = torch.rand(samples, n, device=device, generator=generator(device)).argsort(0)
    return index.gather(0, order)
