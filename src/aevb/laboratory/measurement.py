"""Measure one way of estimating: moments of the bound and its gradient over noise, time, memory.

The gradient of a group of P parameters is a vector [P]. Of M gradients only block means [BLOCKS, P]
are kept. They are enough for the variance, its standard error, and an unbiased estimate of the
squared bias.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from aevb.estimate.estimators import estimate
from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.evidence.gap import gap
from aevb.laboratory.ways import Way
from aevb.model import Model
from aevb.training.row_order import seed_of

BLOCKS = 16  # 2^15 sign flips of the blocks: the smallest p-value of a bias is 3e-5
Groups = Mapping[str, Sequence[nn.Parameter]]


def groups_of(model: Model) -> dict[str, list[nn.Parameter]]:
    return {
        name: [p for p in group if p.requires_grad]
        for name, group in (("theta", model.theta()), ("phi", model.phi()))
    }


class Moments:
    """Block means and total variance of a stream of vectors.

    Deviations from the first vector are summed, which avoids cancellation if the variance is far
    smaller than the mean.
    """

    def __init__(self, count: int) -> None:
        if count < BLOCKS:
            raise ValueError(
                f"Separating the bias from the noise needs {BLOCKS} blocks of replicates: use "
                f"{BLOCKS} replicates or more, got {count}."
            )
        self.count, self.seen = count, 0
        self.sums, self.origin = torch.zeros(0), torch.zeros(0)
        self.squares, self.sizes = np.zeros(BLOCKS), np.zeros(BLOCKS)

    def add(self, vector: Tensor) -> None:
        if not self.seen:
            self.origin, self.sums = vector, vector.new_zeros(BLOCKS, len(vector))
        deviation, block = vector - self.origin, self.seen * BLOCKS // self.count
        self.sums[block] += deviation
        self.squares[block] += float(deviation.double().square().sum())
        self.sizes[block] += 1
        self.seen += 1

    @property
    def blocks(self) -> Tensor:
        return (
            self.origin
            + self.sums
            / torch.as_tensor(self.sizes, dtype=self.sums.dtype, device=self.sums.device)[:, None]
        )

    @property
    def mean(self) -> Tensor:
        return self.origin + self.sums.sum(0) / self.count

    def variance(self) -> tuple[float, float]:
        """Return the trace of the covariance, Σᵢ Var[gᵢ], and its standard error over blocks."""
        mean = self.sums.double().sum(0) / self.count
        along, length = (self.sums.double() @ mean).cpu().numpy(), float(mean.square().sum())
        around = (
            np.maximum(self.squares - 2 * along + self.sizes * length, 0)
            / self.sizes
            * self.count
            / (self.count - 1)
        )
        return float((around * self.sizes).sum() / self.count), float(
            around.std(ddof=1) / BLOCKS**0.5
        )


@dataclass(frozen=True)
class Replicates:
    """M estimates on one batch with independent noise."""

    value: Tensor  # mean of the bound per example
    spread: Tensor  # variance of the bound per example
    count: int
    gradients: dict[str, Moments] = field(repr=False)


@dataclass(frozen=True)
class Reference:
    """Value and gradient that ways are compared with: exact, or estimated by an unbiased way."""

    name: str
    value: Tensor
    error: Tensor  # variance of the value per example
    blocks: dict[str, Tensor] = field(repr=False)  # [BLOCKS, P] each, or [1, P] if exact
    squared_norm: dict[str, float]


def gradients(value: Tensor, groups: Groups) -> dict[str, Tensor]:
    """Return the gradient of the mean bound, one vector per group."""
    every = [p for group in groups.values() for p in group]
    found = (
        iter(torch.autograd.grad(value.mean(), every, allow_unused=True, materialize_grads=True))
        if value.requires_grad
        else None
    )
    empty = value.new_zeros(0)
    return {
        name: torch.cat(
            [
                empty,
                *(
                    (torch.zeros_like(p) if found is None else next(found)).reshape(-1)
                    for p in group
                ),
            ]
        )
        for name, group in groups.items()
    }


def step(
    model: Model, way: Way, batch: Mapping[str, Tensor], groups: Groups, seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the bound and its gradient as a training step does."""
    noise = model.draw_noise(way.plan, batch, seed=seed)
    bound = estimate(way.plan, model.factors, batch, noise, temperature=way.temperature or 0.5)
    return bound.value.detach(), gradients(bound.value, groups)


def replicate(
    model: Model, way: Way, batch: Mapping[str, Tensor], count: int, seed: int
) -> Replicates:
    groups = groups_of(model)
    moments = {name: Moments(count) for name in groups}
    values = []
    for m in range(count):
        value, found = step(model, way, batch, groups, seed_of(seed, way.full_name, m))
        values.append(value.double())
        for name, vector in found.items():
            moments[name].add(vector)
    every = torch.stack(values)
    return Replicates(every.mean(0), every.var(0), count, moments)


# References ---------------------------------------------------------------------------------------


def exact_elbo(model: Model, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return log p(x) − KL(q ‖ p(·|x)), differentiable; None if one of them needs sampling."""
    if why_not_exact(model) is not None:
        return None
    distance = gap(model, batch)
    return None if distance is None else exact_evidence(model, batch) - distance


def exact_reference(model: Model, batch: Mapping[str, Tensor]) -> Reference | None:
    value = exact_elbo(model, batch)
    if value is None:
        return None
    found = gradients(value, groups_of(model))
    value = value.detach().double()
    norms = {name: float(vector.double().square().sum()) for name, vector in found.items()}
    return Reference(
        "exact",
        value,
        torch.zeros_like(value),
        {name: vector[None] for name, vector in found.items()},
        norms,
    )


def sampled_reference(way: Way, found: Replicates) -> Reference:
    blocks = {name: moments.blocks for name, moments in found.gradients.items()}
    norms = {name: squared_bias(block)[0] for name, block in blocks.items()}
    return Reference(
        f"{found.count} × {way.full_name}", found.value, found.spread / found.count, blocks, norms
    )


def squared_bias(differences: Tensor) -> tuple[float, float]:
    """Estimate ‖E Δ‖² from independent block means Δ [BLOCKS, P], and test whether it is zero.

    The mean of Δ_b·Δ_c over pairs b ≠ c is an unbiased estimate, because different blocks have
    independent noise. Without a bias, Δ and −Δ are equally likely, so the p-value compares the
    statistic with its values under all sign flips of the blocks.
    """
    gram = (differences.double() @ differences.double().T).cpu().numpy()
    pairs, signs = gram - np.diag(np.diag(gram)), _signs(len(gram))
    flipped = ((signs @ pairs) * signs).sum(1)
    reached = flipped >= flipped[0] - 1e-9 * abs(flipped[0])
    return float(pairs.sum() / (len(gram) * (len(gram) - 1))), float(reached.mean())


@cache
def _signs(n: int) -> np.ndarray:
    """Return all choices of n signs up to a global flip; the first row has no flip."""
    return np.array([(1, *rest) for rest in product((1, -1), repeat=n - 1)], float)


# Time and memory ----------------------------------------------------------------------------------


def timings(
    model: Model, ways: Sequence[Way], batch: Mapping[str, Tensor], rounds: int, seed: int
) -> list[tuple[float, float]]:
    """Return the seconds of a step (noise, forward, backward) of every way, and their error.

    They are medians over rounds in which every way takes one turn.
    """
    groups, device = groups_of(model), model._parameter().device
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):  # the first round is a warm-up
        for way, taken in zip(ways, seconds, strict=True):
            _synchronise(device)
            began = time.perf_counter()
            step(model, way, batch, groups, seed_of(seed, "timing", turn))
            _synchronise(device)
            taken.append(time.perf_counter() - began)
    found = []
    for taken in seconds:
        middle = statistics.median(taken[1:])
        found.append(
            (
                middle,
                1.4826 * statistics.median(abs(one - middle) for one in taken[1:]) / rounds**0.5,
            )
        )
    return found


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(model: Model, way: Way, batch: Mapping[str, Tensor], seed: int) -> int:
    """Return the bytes that a step needs.

    On a GPU it is the peak above the memory in use before. On a CPU it is the size of the tensors
    saved for the backward pass; each storage counts once, and parameters do not count.
    """
    groups, device = groups_of(model), model._parameter().device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step(model, way, batch, groups, seed)
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model, way, batch, groups, seed)
    return sum(kept.values())
