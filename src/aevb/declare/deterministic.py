"""Deterministic nodes of a declaration: shared features and recurrent states.

They have no probability; their children read their value. Factors share features if they name the
same node as a parent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from aevb.compiled_step.gradients import affine, lstm_cell
from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.networks import ACTIVATIONS, Blocks, Shape, _choice
from aevb.declare.registry import register

State = tuple[Tensor, ...]


@register
@dataclass(frozen=True, repr=False)
class Deterministic(Conditional):
    """A function of its parents: ``"h | x": Deterministic(256, net=mlp(500))``.

    A typical use are features that several factors share.

    Arguments:
        size: The number of entries.
        net: The network that computes them (default: affine).
        learned: Must be False: the weights are learned anyway.
        activation: The function of the network's outputs, such as "relu" or "identity".

    >>> from aevb import Bernoulli, Model, Normal, OneHot, mlp
    >>> model = Model(
    ...     p={"y": OneHot(3), "z": Normal(2), "x | y, z": Bernoulli(8)},
    ...     q={
    ...         "h | x": Deterministic(16, net=mlp(16), activation="relu"),
    ...         "y | h": OneHot(),
    ...         "z | h, y": Normal(),
    ...     },
    ... )
    >>> model.elbo(x=torch.zeros(5, 8)).value.shape
    torch.Size([5])
    """

    activation: str = "identity"
    stochastic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _choice("activation", self.activation, list(ACTIVATIONS))

    def heads(self, d: int) -> dict[str, int]:
        return {"value": d}


class Function(Factor):
    """The module of a Deterministic node."""

    def value(self, raw: Tensor) -> Tensor:
        return ACTIVATIONS[self.spec.activation](raw)  # type: ignore[attr-defined]


@dataclass(frozen=True, repr=False)
class Cell(Conditional):
    """Base of LSTM and GRU.

    The node reads itself at [t-1] (forward) or [t+1] (backward); its other parents are its input.
    """

    layers: int = 1
    stochastic: ClassVar[bool] = False
    gates: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise ValueError(
                f"{type(self).__name__}: layers is a positive whole number, got {self.layers!r}."
            )
        if self.net is not None:
            raise ValueError(f"{type(self).__name__} takes no net; its parents feed its gates.")


@register
@dataclass(frozen=True, repr=False)
class LSTM(Cell):
    """A long short-term memory, a recurrent state.

    The node reads itself at [t-1] (forward) or [t+1] (backward); its other parents are its input.

    Arguments:
        size: The number of units.
        net: Must be None: the parents feed the gates.
        learned: Must be False: the weights are learned anyway.
        layers: The number of layers; children read the last one.

    >>> from aevb import Bernoulli, Model, Normal
    >>> model = Model(
    ...     p={
    ...         "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(8, layers=2),
    ...         "z[t] | h[t]": Normal(2),
    ...         "x[t] | h[t], z[t]": Bernoulli(4),
    ...     },
    ...     q={"z[t] | h[t], x[t]": Normal()},
    ... )
    >>> model.elbo(x=torch.zeros(5, 6, 4)).value.shape
    torch.Size([5])
    """

    gates: ClassVar[int] = 4


@register
@dataclass(frozen=True, repr=False)
class GRU(Cell):
    """A gated recurrent unit, a recurrent state.

    The node reads itself at [t-1] (forward) or [t+1] (backward); its other parents are its input.

    Arguments:
        size: The number of units.
        net: Must be None: the parents feed the gates.
        learned: Must be False: the weights are learned anyway.
        layers: The number of layers; children read the last one.

    >>> from aevb import Model, Normal
    >>> model = Model(  # q smooths: b reads the data from each step to the end
    ...     p={"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(4)},
    ...     q={"b[t] | b[t+1], x[t]": GRU(8), "z[t] | z[t-1], b[t]": Normal()},
    ... )
    >>> model.elbo(x=torch.zeros(5, 6, 4)).value.shape
    torch.Size([5])
    """

    gates: ClassVar[int] = 3


class Recurrence(nn.Module):
    """The module of a cell.

    ``first`` computes the inputs' part of the bottom layer's gates, ``step`` advances the state.
    """

    def __init__(
        self, spec: Cell, size: int, parents: Mapping[str, Shape], masked: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.spec, self.d, self.shape = spec, size, (size,)
        out = spec.gates * size
        inputs = {name: math.prod(shape) for name, shape in parents.items()}
        self.blocks = Blocks(inputs, out, bias=True, init="default", masked=masked)
        self.upper = nn.ModuleList(nn.Linear(size, out) for _ in range(spec.layers - 1))
        self.recurrent = nn.ModuleList(nn.Linear(size, out) for _ in range(spec.layers))
        bound = 1 / math.sqrt(size)
        for name, parameter in self.named_parameters():
            if ".missing." not in name:
                nn.init.uniform_(parameter, -bound, bound)

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        return self.blocks(inputs, bias=bias, missing=missing, full=True)

    def initial(self, like: Tensor) -> State:
        zeros = like.new_zeros(*([1] * (like.dim() - 1)), self.d)
        return (zeros,) * (self.spec.layers * (2 if isinstance(self.spec, LSTM) else 1))

    def starting_from(self, value: Tensor) -> State:
        """The state with top layer ``value`` and zeros elsewhere, for a declared first step."""
        state = list(self.initial(value))
        state[self.spec.layers - 1] = value
        return tuple(state)

    def step(self, gates: Tensor, state: State) -> tuple[Tensor, State]:
        n = self.spec.layers
        hidden, cells = list(state[:n]), list(state[n:])
        for i in range(n):
            if i:
                gates = _applied(self.upper[i - 1], hidden[i - 1])
            recurrent = _applied(self.recurrent[i], hidden[i])
            if isinstance(self.spec, LSTM):
                hidden[i], cells[i] = lstm_cell(gates, recurrent, cells[i])
            else:
                (r, z, n1), (hr, hz, hn) = gates.chunk(3, -1), recurrent.chunk(3, -1)
                update = torch.sigmoid(z + hz)
                candidate = torch.tanh(n1 + torch.sigmoid(r + hr) * hn)
                hidden[i] = candidate + update * (hidden[i] - candidate)
        return hidden[n - 1], (*hidden, *cells)


def _applied(layer: nn.Module, value: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return affine(value, layer.weight, layer.bias, full=True)
