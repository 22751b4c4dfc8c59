"""Adam: its state, and its step, by torch's fused kernel on a CPU and on CUDA.

torch's own optimiser loads torch's compiler as soon as it is made, which takes as long as to load torch, and what it does around its kernel costs as
much as a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aevb.runtime import private_torch

BETAS, EPS = (0.9, 0.999), 1e-8
FUSED = ("cpu", "cuda")  # devices whose kernel was tried; elsewhere the formula


class Adam:
    """``state`` has, of every parameter that has moved, the means of its gradients and of their squares, and the number of its steps."""

    def __init__(self, rate: float | Tensor) -> None:
        self.rate = rate
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.sharing: dict[Tensor, int] = {}  # by tensor that counts steps: of how many parameters, when it was made

    @torch.no_grad()
    def update(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], failed: Tensor | None = None) -> None:
        """Move these parameters. Where the tensor ``failed`` is 1 they stay as they are; the host does not look at it."""
        if not parameters:
            return
        states = [self._of(parameter) for parameter in parameters]
        if failed is None:
            self._count(states)
        else:
            steps = list({id(state["step"]): state["step"] for state in states}.values())
            private_torch.add_to(steps, 1 - failed)
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        if parameters[0].device.type in FUSED and private_torch.fused_adam is not None:
            choices: Any = {"lr": self.rate, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "found_inf": failed}
            choices |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
            private_torch.fused_adam(list(parameters), list(gradients), means, squares, [], steps, **choices)
            return
        live = torch.ones((), dtype=torch.bool, device=steps[0].device) if failed is None else failed == 0
        by_step = {id(step): lengths(step.to(parameters[0].dtype), self.rate) for step in steps}
        for value, mean, square, gradient, step in zip(parameters, means, squares, gradients, steps, strict=True):
            move(value, mean, square, gradient, live, *by_step[id(step)])

    def _of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)  # as the kernel counts
            self.state[parameter] = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        return self.state[parameter]

    def _count(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Count a step of some parameters. Those that move together share the tensor that counts: one each costs as much as a layer."""
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

    def tensors(self, names: Mapping[Any, str]) -> dict[str, Tensor]:
        """The state by parameter name; what parameters share (how many steps they have taken) once for each."""
        return {
            f"{names[parameter]}/{key}": value if value.dim() else value.clone()
            for parameter, state in self.state.items()
            for key, value in state.items()
        }

    def restore(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        for name, tensor in tensors.items():
            parameter_name, _, key = name.rpartition("/")
            parameter = parameters[parameter_name]
            there = tensor.to(parameter.device)
            value = torch.empty_like(parameter).copy_(there) if tensor.dim() else there.clone()  # as the parameter lies
            self.state.setdefault(parameter, {})[key] = value.detach()


def lengths(step: Tensor, rate: float | Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`move` needs to know of a step, the moments' bias taken out: how far, and the scale of the squares."""
    first, second = (-torch.expm1(step * math.log(beta)) for beta in BETAS)  # 1 − βᵗ, exact also where βᵗ is almost 1
    return rate / first, second.rsqrt()


def move(value: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, live: Tensor, length: Tensor, scale: Tensor) -> None:
    """Adam's formula, in place; nothing where ``live`` is false."""
    new_mean = mean + (1 - BETAS[0]) * (gradient - mean)
    new_square = BETAS[1] * square + (1 - BETAS[1]) * gradient.square()
    new_value = value - length * new_mean / (new_square.sqrt() * scale + EPS)
    for place, new in ((value, new_value), (mean, new_mean), (square, new_square)):
        place.copy_(torch.where(live, new, place))
