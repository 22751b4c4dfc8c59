"""Adam over one vector: a group's parameters side by side in memory, so that a step is one kernel that fills a GPU.

torch's fused optimiser gives each block of 65,536 numbers to one multiprocessor, so that a model of a million parameters keeps a few of
them busy and the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

BETAS, EPS = (0.9, 0.999), 1e-8


class Vector:
    """Parameters as views of one vector, and the optimiser's state of each as views of two others."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        # Matrix products want rows that begin at multiples of 16 bytes: what would shift the others stands last.
        self.parameters = sorted(parameters, key=lambda parameter: parameter.numel() % 4 != 0)
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self.step = states[0]["step"].clone()
        self.values, self.means, self.squares = (
            torch.cat([part.detach().reshape(-1) for part in parts])
            for parts in (self.parameters, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states])
        )
        start = 0
        for parameter, state in zip(self.parameters, states, strict=True):
            stop = start + parameter.numel()
            value, mean, square = (vector[start:stop].view_as(parameter) for vector in (self.values, self.means, self.squares))
            parameter.data = value
            state |= {"exp_avg": mean, "exp_avg_sq": square, "step": self.step}
            start = stop

    def gather(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> Tensor:
        """The gradients in the parameters' order; zero where there is none."""
        return torch.cat([_or_zeros(gradients[parameter], parameter).reshape(-1) for parameter in self.parameters])


def _or_zeros(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def adam(values: Tensor, means: Tensor, squares: Tensor, step: Tensor, gradient: Tensor, rate: Tensor, bad: Tensor) -> None:
    """Adam's step in place; nothing where a step was bad."""
    live = bad == 0
    step.add_(live)
    mean = means + (1 - BETAS[0]) * (gradient - means)
    square = BETAS[1] * squares + (1 - BETAS[1]) * gradient.square()
    size = (square / (1 - BETAS[1] ** step)).sqrt() + EPS
    values.copy_(torch.where(live, values - rate / (1 - BETAS[0] ** step) * mean / size, values))
    means.copy_(torch.where(live, mean, means))
    squares.copy_(torch.where(live, square, squares))
