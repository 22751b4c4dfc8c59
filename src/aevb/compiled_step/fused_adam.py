"""The end of a step as two compiled functions: the check of the gradient, and Adam's update.

On a GPU, the parameters of a group become views of one vector, so that the update is one kernel
that fills the GPU. torch's fused optimiser gives each block of 65,536 numbers to one
multiprocessor; with a million parameters, only a few multiprocessors have work. On a CPU, the
parameters stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from aevb.compiled_step.adam import Adam, lengths, move
from aevb.compiled_step.fusing import compiled, or_plain

ALIGNED = 4  # alignment of rows and kernel arguments, in numbers
MOST = 48  # most tensors in one compiled update: each takes about a third of a second to compile


class MovedTogether(ABC):
    """Parameters that are updated together, and their Adam state with one step counter."""

    values: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    step: Tensor
    _judge: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
    _move: Callable[[list[Tensor]], Sequence[Tensor]] | None = None

    def __init__(self, remarks: list[str]) -> None:
        self.remarks = remarks  # receives what could not be compiled, and why

    @abstractmethod
    def gather(self, found: Mapping[nn.Parameter, Tensor | None]) -> list[Tensor]:
        """Return the gradients of ``values``, in the memory layout of the values."""

    @torch.no_grad()
    def finish(
        self,
        found: Mapping[nn.Parameter, Tensor | None],
        rate: Tensor,
        clip: float | None,
        total: Tensor,
        measured: Tensor,
        counts: Sequence[Tensor],
    ) -> None:
        """Check the gradients, clip them and update the parameters.

        ``counts`` are those of :func:`judge`. These are two compiled functions. In a single one,
        torch's compiler would recompute the few numbers that the update needs (e.g. the norm) for
        every parameter value.
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
    """Parameters that keep their own memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], adam: Adam, remarks: list[str]) -> None:
        super().__init__(remarks)
        states = [adam.state[parameter] for parameter in parameters]
        self.values = list(parameters)
        self.means, self.squares = (
            [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")
        )
        self.step = states[0]["step"].clone()
        for state in states:
            state["step"] = self.step

    def gather(self, found: Mapping[nn.Parameter, Tensor | None]) -> list[Tensor]:
        return [
            torch.zeros_like(parameter) if gradient is None else _as_it_lies(gradient, parameter)
            for parameter, gradient in found.items()
        ]


class Vector(MovedTogether):
    """Parameters as views of one vector; their gradients and Adam state as views of other vectors.

    Several models of one declaration have one row each. ``weights`` and ``gradients`` are then
    indexed by the parameters of the first model and have a leading axis of models. A single model
    has no such axis.
    """

    def __init__(self, *models: tuple[Sequence[nn.Parameter], Adam], remarks: list[str]) -> None:
        super().__init__(remarks)
        first = models[0][0]
        # Matrix products are fast if rows begin at multiples of 16 bytes. Parameters that would
        # break the alignment of the following ones therefore come last.
        order = sorted(range(len(first)), key=lambda i: first[i].numel() % ALIGNED != 0)
        width = -(-sum(parameter.numel() for parameter in first) // ALIGNED) * ALIGNED
        shape = (len(models), width) if len(models) > 1 else (width,)
        vectors = [
            torch.zeros(shape, dtype=first[0].dtype, device=first[0].device) for _ in range(4)
        ]
        self.values, self.means, self.squares, (self.gradient,) = ([vector] for vector in vectors)
        self.step = torch.stack(
            [adam.state[parameters[0]]["step"] for parameters, adam in models]
        ).reshape(shape[:-1])
        self.weights: dict[nn.Parameter, Tensor] = {}
        self.gradients: dict[nn.Parameter, Tensor] = {}
        start = 0
        for i in order:
            stop = start + first[i].numel()
            parts = [
                vector[..., start:stop].view((*shape[:-1], *first[i].shape)) for vector in vectors
            ]
            self.weights[first[i]], _, _, self.gradients[first[i]] = parts
            for row, (parameters, adam) in enumerate(models):
                value, mean, square = (
                    (part[row] for part in parts[:3]) if len(models) > 1 else parts[:3]
                )
                state = adam.state[parameters[i]]
                for place, now in (
                    (value, parameters[i].detach()),
                    (mean, state["exp_avg"]),
                    (square, state["exp_avg_sq"]),
                ):
                    place.copy_(now)
                parameters[i].data = value
                state |= {
                    "exp_avg": mean,
                    "exp_avg_sq": square,
                    "step": self.step[row] if len(models) > 1 else self.step,
                }
            start = stop

    def gather(self, found: Mapping[nn.Parameter, Tensor | None]) -> list[Tensor]:
        """Return the vector of gradients, after copying into it those that are not there yet."""
        for parameter, place in self.gradients.items():
            gradient = found[parameter]
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
        return [self.gradient]


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient in its parameter's memory layout and dtype.

    The optimiser's kernels require both.
    """
    matches = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
    return gradient if matches else torch.empty_like(parameter).copy_(gradient)


def _as_it_lies(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient in its parameter's memory layout.

    Compiled code converts the dtype itself.
    """
    return gradient if gradient.stride() == parameter.stride() else laid_out(gradient, parameter)


# The functions below work for one model or for several at once. With several models, every scalar
# and every tensor has a leading axis of models.


def judge(
    total: Tensor,
    norm: Tensor,
    measured: Tensor,
    bad: Tensor,
    sums: Tensor,
    taken: Tensor,
    moved: Tensor,
) -> None:
    """Set ``bad`` if this step, or an earlier one since the last check, failed; else count it.

    To count a step is to add its metrics to ``sums`` and 1 to ``taken`` and ``moved``.
    """
    size = total + norm
    failed = (
        size - size
    ) != bad  # size − size is 0 if size is finite, else NaN; few kernels when not compiled
    bad.copy_(failed)
    sums.add_(torch.cat([measured, norm.unsqueeze(-1)], -1).masked_fill_(failed.unsqueeze(-1), 0.0))
    live = 1 - bad
    taken.add_(live)
    moved.add_(live)


def _judged(clip: float | None, *given: Tensor) -> tuple[Tensor, ...]:
    """Check a step, and return what Adam's update needs.

    That is: whether to update, the step size, the scale of the second moment, and the clipping
    factor.
    """
    *gradients, step, rate, total, measured, bad, sums, taken, moved = given
    wide = [gradient.to(total.dtype) for gradient in gradients]
    rows = [
        _rows(gradient, bad.dim()).square().sum(-1).reshape((*bad.shape, -1)) for gradient in wide
    ]
    norm = torch.cat(rows, -1).sum(-1).sqrt()
    judge(total, norm, measured, bad, sums, taken, moved)
    step.add_(bad == 0)
    clipped = () if clip is None else ((clip / (norm + 1e-6)).clamp(max=1.0),)
    return bad == 0, *lengths(step.to(norm.dtype), rate), *clipped


def _rows(gradient: Tensor, models: int) -> Tensor:
    """Flatten a gradient to several long rows, one sum per row.

    Threads share the rows.
    """
    return gradient.flatten(models + 1) if gradient.dim() > models + 1 else gradient


def _moved(count: int, *moving: Tensor) -> tuple[()]:
    """Apply Adam's update to ``count`` tensors in place; change nothing where the step failed."""
    numbers = moving[4 * count :]
    for value, mean, square, gradient in zip(
        *(moving[i * count : (i + 1) * count] for i in range(4)), strict=True
    ):
        live, length, scale, *clipped = (
            number.reshape((*number.shape, *[1] * (value.dim() - number.dim())))
            for number in numbers
        )
        wide = gradient.to(value.dtype)
        move(value, mean, square, wide * clipped[0] if clipped else wide, live, length, scale)
    return ()
