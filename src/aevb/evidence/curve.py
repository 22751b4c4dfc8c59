"""Importance-weighted bound for several numbers of samples, from one set of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.estimate.declared_model import DeclaredModel
from aevb.evidence.sampling import LEAST, Memory, proposal_weights, streams
from aevb.evidence.weights import Weights


@dataclass(frozen=True, repr=False)
class Curve:
    """Importance-weighted bound E log 1/k Σ w with k samples, for several k.

    ``value`` and ``stderr`` are [len(ks), N].
    """

    ks: tuple[int, ...]
    value: Tensor
    stderr: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over the examples, one number per k."""
        return self.value.mean(-1)

    @property
    def error(self) -> Tensor:
        return self.stderr.square().sum(-1).sqrt() / self.stderr.shape[-1]

    def __repr__(self) -> str:
        rows = zip(self.ks, self.mean.tolist(), self.error.tolist(), strict=True)
        return "\n".join(f"k = {k:<7} {mean:.4f} ± {error:.2g}" for k, mean, error in rows)


def curve(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    ks: Sequence[int] = (1, 10, 100, 1000),
    seed: int | None = None,
    *,
    memory: Memory = None,
) -> Curve:
    """Return the importance-weighted bound for each k, all from the same weights.

    There are max(ks) weights per example. k = 1 is the ELBO, and k → ∞ gives the evidence. The
    weights are cut into groups of k, so a small k averages over many groups. Raises ValueError if
    ``ks`` are not positive whole numbers.
    """
    ks = tuple(sorted(set(ks)))
    if not ks or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in ks):
        raise ValueError(f"ks are positive whole numbers, got {ks}.")
    samples, device = max(ks[-1], LEAST), model._parameter().device
    found = []
    with model._evaluating(seed):
        for rows, parts in streams(model, batch, samples, memory, proposal_weights(model, batch)):
            groups = [_Groups(k, rows, device) for k in ks]
            for part in parts:
                for group in groups:
                    group.add(part.double())
            found.append([group.result() for group in groups])
    value, stderr = (
        torch.stack([torch.cat([block[i][j] for block in found]) for i in range(len(ks))])
        for j in range(2)
    )
    return Curve(ks, value, stderr)


class _Groups:
    """Average log-mean-exp over successive groups of k log-weights; a group may span two chunks."""

    def __init__(self, k: int, rows: int, device: torch.device) -> None:
        self.k, self.done = k, 0
        self.open = Weights(rows, k, device, tail=False)
        self.mean = self.deviations = torch.zeros(rows, dtype=torch.float64, device=device)
        self.alone: Tensor | None = None  # variance if there is a single group, by the delta method

    def add(self, part: Tensor) -> None:
        while len(part):
            if not self.open.count and len(part) >= self.k:  # process whole groups at once
                whole = len(part) // self.k
                groups = part[: whole * self.k].unflatten(0, (whole, self.k))
                if whole == 1:
                    self._fill(groups[0])
                else:
                    self._merge(groups.logsumexp(1) - math.log(self.k))
                part = part[whole * self.k :]
            else:
                room = self.k - self.open.count
                self._fill(part[:room])
                part = part[room:]

    def _fill(self, part: Tensor) -> None:
        self.open.add(part)
        if self.open.count == self.k:
            if not self.done and self.k > 1:
                self.alone = self.open.stderr.square()
            self._merge(self.open.value.unsqueeze(0))
            self.open = Weights(part.shape[1], self.k, part.device, tail=False)

    def _merge(self, values: Tensor) -> None:
        here, step, total = values.mean(0), values.mean(0) - self.mean, self.done + len(values)
        self.deviations = (
            self.deviations
            + (values - here).square().sum(0)
            + step.square() * (self.done * len(values) / total)
        )
        self.mean, self.done = self.mean + step * (len(values) / total), total

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the bound and its standard error (by the delta method for a single group)."""
        if self.done > 1:
            return self.mean, (self.deviations / (self.done - 1) / self.done).sqrt()
        return self.mean, self.mean.new_full(
            self.mean.shape, math.nan
        ) if self.alone is None else self.alone.sqrt()
