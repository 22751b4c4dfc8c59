"""Adam as one function of all that moves, compiled, as is what is asked before it: how large the gradient is, and whether it is finite.

On a GPU a group's parameters stand side by side in memory, so that a step is one kernel that fills it: torch's fused optimiser gives each
block of 65,536 numbers to one multiprocessor, so that a model of a million parameters keeps a few of them busy and the others waiting.
On a CPU they stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from aevb.compiled_step.adam import Adam, lengths, move
from aevb.compiled_step.fusing import compiled, or_plain

ALIGNED = 4  # numbers: where a row, or an argument of a kernel, may begin
MOST = 48  # tensors that one function moves: about a third of a second each to compile


class MovedTogether(ABC):
    """What moves together, and Adam's state of it, as tensors; one tensor counts the steps."""

    values: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    step: Tensor
    _judge: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
    _move: Callable[[list[Tensor]], Sequence[Tensor]] | None = None

    def __init__(self, remarks: list[str]) -> None:
        self.remarks = remarks  # gets what could not be compiled, and why

    @abstractmethod
    def gather(self, found: Mapping[nn.Parameter, Tensor | None]) -> list[Tensor]:
        """The gradients of ``values``, each as its value lies in memory."""

    @torch.no_grad()
    def finish(
        self, found: Mapping[nn.Parameter, Tensor | None], rate: Tensor, clip: float | None, total: Tensor, measured: Tensor, counts: Sequence[Tensor]
    ) -> None:
        """All that follows a gradient; ``counts`` are those of :func:`judge`.

        Two functions: of the first the second needs a few numbers, which torch's compiler would else compute anew for every number that moves.
        """
        gradients = self.gather(found)
        given = [*gradients, self.step, rate, total, measured, *counts]
        if self._judge is None:
            self._judge = or_plain(compiled, partial(_judged, clip), given, self.remarks)
        moving = [*self.values, *self.means, *self.squares, *gradients, *self._judge(given)]
        if self._move is None:
            self._move = or_plain(compiled, partial(_moved, len(gradients)), moving, self.remarks)
        self._move(moving)


class Parts(MovedTogether):
    """Parameters where they lie."""

    def __init__(self, parameters: Sequence[nn.Parameter], adam: Adam, remarks: list[str]) -> None:
        super().__init__(remarks)
        states = [adam.state[parameter] for parameter in parameters]
        self.values = list(parameters)
        self.means, self.squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        self.step = states[0]["step"].clone()
        for state in states:
            state["step"] = self.step

    def gather(self, found: Mapping[nn.Parameter, Tensor | None]) -> list[Tensor]:
        return [torch.zeros_like(parameter) if gradient is None else _as_it_lies(gradient, parameter) for parameter, gradient in found.items()]


class Vector(MovedTogether):
    """Parameters as views of one vector; their gradients, and the optimiser's state of each, as views of others.

    Several models of one declaration have a row each: ``weights`` and ``gradients`` have them by the first one's parameters, an axis of models
    in front; of one model alone there is no such axis.
    """

    def __init__(self, *models: tuple[Sequence[nn.Parameter], Adam], remarks: list[str]) -> None:
        super().__init__(remarks)
        first = models[0][0]
        # Matrix products want rows that begin at multiples of 16 bytes: what would shift the others stands last.
        order = sorted(range(len(first)), key=lambda i: first[i].numel() % ALIGNED != 0)
        width = -(-sum(parameter.numel() for parameter in first) // ALIGNED) * ALIGNED
        shape = (len(models), width) if len(models) > 1 else (width,)
        vectors = [torch.zeros(shape, dtype=first[0].dtype, device=first[0].device) for _ in range(4)]
        self.values, self.means, self.squares, (self.gradient,) = ([vector] for vector in vectors)
        self.step = torch.stack([adam.state[parameters[0]]["step"] for parameters, adam in models]).reshape(shape[:-1])
        self.weights: dict[nn.Parameter, Tensor] = {}
        self.gradients: dict[nn.Parameter, Tensor] = {}
        start = 0
        for i in order:
            stop = start + first[i].numel()
            parts = [vector[..., start:stop].view((*shape[:-1], *first[i].shape)) for vector in vectors]
            self.weights[first[i]], _, _, self.gradients[first[i]] = parts
            for row, (parameters, adam) in enumerate(models):
                value, mean, square = (part[row] for part in parts[:3]) if len(models) > 1 else parts[:3]
                state = adam.state[parameters[i]]
                for place, now in ((value, parameters[i].detach()), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])):
                    place.copy_(now)
                parameters[i].data = value
                state |= {"exp_avg": mean, "exp_avg_sq": square, "step": self.step[row] if len(models) > 1 else self.step}
            start = stop

    def gather(self, found: Mapping[nn.Parameter, Tensor | None]) -> list[Tensor]:
        """Those that were not put there are now, and zero where there is none."""
        for parameter, place in self.gradients.items():
            gradient = found[parameter]
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
        return [self.gradient]


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient as its parameter lies in memory, in its precision: the kernels of the optimiser read both from beginning to end."""
    alike = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
    return gradient if alike else torch.empty_like(parameter).copy_(gradient)


def _as_it_lies(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The same, but in its own precision: a compiled function widens it as it reads."""
    return gradient if gradient.stride() == parameter.stride() else laid_out(gradient, parameter)


# Of one model, or of several at once: what is a number of one has then an axis of models, and what is a tensor has it in front.


def judge(total: Tensor, norm: Tensor, measured: Tensor, bad: Tensor, sums: Tensor, taken: Tensor, moved: Tensor) -> None:
    """Whether this step, or one before it that the host has not seen, failed; if none did, add what was measured, and count."""
    size = total + norm
    failed = (size - size) != bad  # 0 where it is finite, else no number; few operations, since uncompiled each is a kernel
    bad.copy_(failed)
    sums.add_(torch.cat([measured, norm.unsqueeze(-1)], -1).masked_fill_(failed.unsqueeze(-1), 0.0))
    live = 1 - bad
    taken.add_(live)
    moved.add_(live)


def _judged(clip: float | None, *given: Tensor) -> tuple[Tensor, ...]:
    """The judgement of a step, and what Adam needs to know of it: whether it moves, how far, the scale of the squares, and how much is clipped."""
    *gradients, step, rate, total, measured, bad, sums, taken, moved = given
    wide = [gradient.to(total.dtype) for gradient in gradients]
    rows = [_rows(gradient, bad.dim()).square().sum(-1).reshape((*bad.shape, -1)) for gradient in wide]
    norm = torch.cat(rows, -1).sum(-1).sqrt()
    judge(total, norm, measured, bad, sums, taken, moved)
    step.add_(bad == 0)
    clipped = () if clip is None else ((clip / (norm + 1e-6)).clamp(max=1.0),)
    return bad == 0, *lengths(step.to(norm.dtype), rate), *clipped


def _rows(gradient: Tensor, models: int) -> Tensor:
    """As a matrix, whose rows are as long as can be and yet many: then threads share them, and each is summed at once."""
    return gradient.flatten(models + 1) if gradient.dim() > models + 1 else gradient


def _moved(count: int, *moving: Tensor) -> tuple[()]:
    """Adam's step of ``count`` tensors, in place; nothing where a step was bad."""
    numbers = moving[4 * count :]
    for value, mean, square, gradient in zip(*(moving[i * count : (i + 1) * count] for i in range(4)), strict=True):
        live, length, scale, *clipped = (number.reshape((*number.shape, *[1] * (value.dim() - number.dim()))) for number in numbers)
        wide = gradient.to(value.dtype)
        move(value, mean, square, wide * clipped[0] if clipped else wide, live, length, scale)
    return ()
