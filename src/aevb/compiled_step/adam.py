"""The Adam optimiser: its state, and its step by torch's fused kernel on CPU and CUDA.

It replaces ``torch.optim.Adam`` for two reasons. Constructing torch's optimiser imports torch's
compiler, which takes as long as importing torch. Its overhead per step costs as much as a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aevb.runtime import private_torch

BETAS, EPS = (0.9, 0.999), 1e-8
FUSED = ("cpu", "cuda")  # devices on which the fused kernel was tested; others use the formula


class Adam:
    """Adam. ``state`` has the moments and the step count of every parameter that was updated."""

    def __init__(self, rate: float | Tensor) -> None:
        self.rate = rate
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.sharing: dict[
            Tensor, int
        ] = {}  # for each shared step counter, the number of its parameters

    @torch.no_grad()
    def update(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        failed: Tensor | None = None,
    ) -> None:
        """Update the parameters, unless the tensor ``failed`` is 1; no device synchronisation."""
        if not parameters:
            return
        states = [self._of(parameter) for parameter in parameters]
        if failed is None:
            self._count(states)
        else:
            steps = list({id(state["step"]): state["step"] for state in states}.values())
            private_torch.add_to(steps, 1 - failed)
        means, squares, steps = (
            [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        if parameters[0].device.type in FUSED and private_torch.fused_adam is not None:
            choices: Any = {
                "lr": self.rate,
                "beta1": BETAS[0],
                "beta2": BETAS[1],
                "eps": EPS,
                "found_inf": failed,
            }
            choices |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
            private_torch.fused_adam(
                list(parameters), list(gradients), means, squares, [], steps, **choices
            )
            return
        live = (
            torch.ones((), dtype=torch.bool, device=steps[0].device)
            if failed is None
            else failed == 0
        )
        by_step = {id(step): lengths(step.to(parameters[0].dtype), self.rate) for step in steps}
        for value, mean, square, gradient, step in zip(
            parameters, means, squares, gradients, steps, strict=True
        ):
            move(value, mean, square, gradient, live, *by_step[id(step)])

    def _of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            # The fused kernel expects a step counter of this dtype.
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.state[parameter] = {
                "step": step,
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]

    def _count(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Increment the step counts. Parameters updated together share one counter tensor.

        One counter per parameter would cost as much as a layer.
        """
        step = states[0]["step"]
        if self.sharing.get(step) == len(states) and all(state["step"] is step for state in states):
            step.add_(1)
            return
        for state in states:
            state["step"] = state["step"] + 1
        if len({float(state["step"]) for state in states}) == 1:
            step = states[0]["step"]
            self.sharing[step] = len(states)
            for state in states:
                state["step"] = step

    def tensors(self, names: Mapping[Any, str]) -> dict[str, dict[str, Tensor]]:
        """Return the state by parameter name.

        A shared step counter is copied for each parameter.
        """
        return {
            names[parameter]: {
                key: value if value.dim() else value.clone() for key, value in state.items()
            }
            for parameter, state in self.state.items()
        }

    def restore(
        self,
        state: Mapping[str, Mapping[str, Tensor]],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Restore a state by parameter name."""
        for name, tensors in state.items():
            for key, tensor in tensors.items():
                parameter = parameters[name]
                there = tensor.to(parameter.device)
                # Copy the moments into the parameter's memory layout.
                value = torch.empty_like(parameter).copy_(there) if tensor.dim() else there.clone()
                self.state.setdefault(parameter, {})[key] = value.detach()


def lengths(step: Tensor, rate: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias-corrected step size, and the scale of the second moment's square root."""
    # 1 − βᵗ; expm1 is exact also if βᵗ is almost 1.
    first, second = (-torch.expm1(step * math.log(beta)) for beta in BETAS)
    return rate / first, second.rsqrt()


def move(
    value: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    live: Tensor,
    length: Tensor,
    scale: Tensor,
) -> None:
    """Apply Adam's update in place; change nothing where ``live`` is false."""
    new_mean = mean + (1 - BETAS[0]) * (gradient - mean)
    new_square = BETAS[1] * square + (1 - BETAS[1]) * gradient.square()
    new_value = value - length * new_mean / (new_square.sqrt() * scale + EPS)
    for place, new in ((value, new_value), (mean, new_mean), (square, new_square)):
        place.copy_(torch.where(live, new, place))
