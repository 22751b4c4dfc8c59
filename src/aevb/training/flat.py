"""Adam over one vector: a group's parameters side by side in memory, so that a step is one kernel that fills a GPU.

torch's fused optimiser gives each block of 65,536 numbers to one multiprocessor, so that a model of a million parameters keeps a few of
them busy and the others waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

BETAS, EPS = (0.9, 0.999), 1e-8
ALIGNED = 4  # numbers: where a row may begin


class Vector:
    """Parameters as views of one vector; their gradients, and the optimiser's state of each, as views of others.

    Several models of one declaration have a row each: ``weights`` and ``gradients`` have them by the first one's parameters, an axis of models
    in front; of one model alone there is no such axis.
    """

    def __init__(self, *models: tuple[Sequence[nn.Parameter], torch.optim.Optimizer]) -> None:
        first = models[0][0]
        # Matrix products want rows that begin at multiples of 16 bytes: what would shift the others stands last.
        order = sorted(range(len(first)), key=lambda i: first[i].numel() % ALIGNED != 0)
        width = -(-sum(parameter.numel() for parameter in first) // ALIGNED) * ALIGNED
        shape = (len(models), width) if len(models) > 1 else (width,)
        self.values, self.means, self.squares, self.gradient = (torch.zeros(shape, dtype=first[0].dtype, device=first[0].device) for _ in range(4))
        self.step = torch.stack([optimizer.state[parameters[0]]["step"] for parameters, optimizer in models]).reshape(shape[:-1])
        self.weights: dict[nn.Parameter, Tensor] = {}
        self.gradients: dict[nn.Parameter, Tensor] = {}
        start = 0
        for i in order:
            stop = start + first[i].numel()
            parts = [vector[..., start:stop].unflatten(-1, first[i].shape) for vector in (self.values, self.means, self.squares, self.gradient)]
            self.weights[first[i]], _, _, self.gradients[first[i]] = parts
            for row, (parameters, optimizer) in enumerate(models):
                value, mean, square = (part[row] for part in parts[:3]) if len(models) > 1 else parts[:3]
                state = optimizer.state[parameters[i]]
                for place, now in ((value, parameters[i].detach()), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])):
                    place.copy_(now)
                parameters[i].data = value
                state |= {"exp_avg": mean, "exp_avg_sq": square, "step": self.step[row] if len(models) > 1 else self.step}
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


# Of one model, or of several at once: what is a number of one has then an axis of models, and what is a vector has it in front.


def judge(total: Tensor, norm: Tensor, measured: Tensor, bad: Tensor, sums: Tensor, taken: Tensor, moved: Tensor) -> None:
    """Whether this step, or one before it that the host has not seen, failed; if none did, add what was measured, and count."""
    bad.copy_(torch.maximum(bad, 1 - (total + norm).isfinite().to(bad.dtype)))
    sums.add_(torch.where(bad.unsqueeze(-1) > 0, 0.0, torch.cat([measured, norm.unsqueeze(-1)], -1).to(sums.dtype)))
    taken.add_(1 - bad)
    moved.add_(1 - bad)


def adam(values: Tensor, means: Tensor, squares: Tensor, step: Tensor, gradient: Tensor, rate: Tensor, bad: Tensor) -> None:
    """Adam's step in place; nothing where a step was bad."""
    step.add_(bad == 0)
    live, count = (bad == 0).unsqueeze(-1), step.to(values.dtype).unsqueeze(-1)
    mean = means + (1 - BETAS[0]) * (gradient - means)
    square = BETAS[1] * squares + (1 - BETAS[1]) * gradient.square()
    first, second = (-torch.expm1(count * math.log(beta)) for beta in BETAS)  # 1 − βᵗ, exact also where βᵗ is almost 1
    size = (square / second).sqrt() + EPS
    values.copy_(torch.where(live, values - rate.unsqueeze(-1) / first * mean / size, values))
    means.copy_(torch.where(live, mean, means))
    squares.copy_(torch.where(live, square, squares))


def compiled() -> Callable[..., None]:
    """:func:`finish`, compiled."""
    run = torch.compile(finish, dynamic=False)

    def limited(*arguments: Any) -> None:
        with torch._dynamo.config.patch(recompile_limit=256):  # one for each size, precision and schedule of a process
            run(*arguments)

    return limited


def finish(
    state: Sequence[Tensor], gradient: Tensor, rate: Tensor, clip: float | None, total: Tensor, measured: Tensor, counts: Sequence[Tensor]
) -> None:
    """All that follows a gradient: its norm, the judgement, Adam's step. ``state`` is a vector's, ``counts`` are bad, sums, taken, moved."""
    norm = gradient.square().sum(-1).sqrt()
    judge(total, norm, measured, *counts)
    if clip is not None:
        gradient = gradient * (clip / (norm + 1e-6)).clamp(max=1.0).unsqueeze(-1)
    values, means, squares, step = state
    adam(values, means, squares, step, gradient, rate, counts[0])
