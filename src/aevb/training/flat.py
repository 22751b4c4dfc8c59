"""Adam over one vector: a group's parameters side by side in memory, so that a step is one kernel that fills a GPU.

torch's fused optimiser gives each block of 65,536 numbers to one multiprocessor, so that a model of a million parameters keeps a few of
them busy and the others waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

BETAS, EPS = (0.9, 0.999), 1e-8


class Vector:
    """Parameters as views of one vector; their gradients, and the optimiser's state of each, as views of others."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        # Matrix products want rows that begin at multiples of 16 bytes: what would shift the others stands last.
        self.parameters = sorted(parameters, key=lambda parameter: parameter.numel() % 4 != 0)
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self.step = states[0]["step"].clone()
        self.values, self.means, self.squares = (
            torch.cat([part.detach().reshape(-1) for part in parts])
            for parts in (self.parameters, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states])
        )
        self.gradient = torch.zeros_like(self.values)
        self.gradients: dict[nn.Parameter, Tensor] = {}
        start = 0
        for parameter, state in zip(self.parameters, states, strict=True):
            stop = start + parameter.numel()
            value, mean, square = (vector[start:stop].view_as(parameter) for vector in (self.values, self.means, self.squares))
            parameter.data = value
            self.gradients[parameter] = self.gradient[start:stop].view_as(parameter)
            state |= {"exp_avg": mean, "exp_avg_sq": square, "step": self.step}
            start = stop

    @property
    def state(self) -> tuple[Tensor, ...]:
        return self.values, self.means, self.squares, self.step

    def gather(self, found: Mapping[nn.Parameter, Tensor | None]) -> Tensor:
        """The gradients in the parameters' order: those that were not put there, and zero where there is none."""
        for parameter, place in self.gradients.items():
            gradient = found[parameter]
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
        return self.gradient


def judge(total: Tensor, norm: Tensor, measured: Tensor, bad: Tensor, sums: Tensor, taken: Tensor, moved: Tensor) -> None:
    """Whether this step, or one before it that the host has not seen, failed; if none did, add what was measured, and count."""
    bad.copy_(torch.maximum(bad, 1 - (total + norm).isfinite().to(bad.dtype)))
    sums.add_(torch.where(bad > 0, 0.0, torch.cat([measured, norm.reshape(1)]).to(sums.dtype)))
    taken.add_(1 - bad)
    moved.add_(1 - bad)


def adam(values: Tensor, means: Tensor, squares: Tensor, step: Tensor, gradient: Tensor, rate: Tensor, bad: Tensor) -> None:
    """Adam's step in place; nothing where a step was bad."""
    live = bad == 0
    step.add_(live)
    mean = means + (1 - BETAS[0]) * (gradient - means)
    square = BETAS[1] * squares + (1 - BETAS[1]) * gradient.square()
    first, second = (-torch.expm1(step.to(values.dtype) * math.log(beta)) for beta in BETAS)  # 1 − βᵗ, exact also where βᵗ is almost 1
    size = (square / second).sqrt() + EPS
    values.copy_(torch.where(live, values - rate / first * mean / size, values))
    means.copy_(torch.where(live, mean, means))
    squares.copy_(torch.where(live, square, squares))


def finish(
    state: Sequence[Tensor], gradient: Tensor, rate: Tensor, clip: float | None, total: Tensor, measured: Tensor, counts: Sequence[Tensor]
) -> None:
    """All that follows a gradient: its norm, the judgement, Adam's step. ``state`` is a vector's, ``counts`` are bad, sums, taken, moved."""
    norm = gradient.square().sum().sqrt()
    judge(total, norm, measured, *counts)
    if clip is not None:
        gradient = gradient * (clip / (norm + 1e-6)).clamp(max=1.0)
    values, means, squares, step = state
    adam(values, means, squares, step, gradient, rate, counts[0])
