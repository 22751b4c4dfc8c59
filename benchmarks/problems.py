"""The problem of every contender: the model's sizes, its initial weights, and its rows.

All contenders therefore compute the same bound.

- ``vae``: a Bernoulli VAE, 784-500-500-20.
- ``vae-tutorial``: the tutorial's VAE: continuous Bernoulli, dropout 0.1, grey levels dequantised
  again at every step.
- ``gmvae``: a Gaussian-mixture VAE with ten summed classes, 784-512-512-64.
- ``vrnn``: a variational RNN, 28 steps of 28, an LSTM of two layers of 256, networks of 500-500, z
  of 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 100
ROWS = 1000
DROPOUT = 0.1
LEVELS = 256
PATTERNS = 20


class LeftOutError(Exception):
    """Error with the reason why a contender does not run here."""


@dataclass(frozen=True)
class Contender:
    """``step`` takes one optimisation step; ``bound`` computes the mean bound from its result.

    The bound is in nats per example.
    """

    step: Callable[[], Any]
    bound: Callable[[Any], float] | None = lambda loss: -float(loss)


@dataclass(frozen=True)
class Sizes:
    x: int
    hidden: tuple[int, ...]
    z: int
    classes: int = 0
    h: int = 0
    steps: int = 0


SIZES = {
    "vae": Sizes(784, (500, 500), 20),
    "vae-tutorial": Sizes(784, (500, 500), 20),
    "gmvae": Sizes(784, (512, 512), 64, classes=10),
    "vrnn": Sizes(28, (500, 500), 2, h=256, steps=28),
}
QUICK = {  # tiny sizes, to check that everything runs
    "vae": Sizes(16, (12, 12), 3),
    "vae-tutorial": Sizes(16, (12, 12), 3),
    "gmvae": Sizes(16, (12, 12), 4, classes=3),
    "vrnn": Sizes(6, (10, 10), 2, h=8, steps=3),
}


@dataclass(frozen=True)
class Problem:
    """One model, to be trained on one device from given weights."""

    model: str
    sizes: Sizes
    device: str = "cpu"
    lr: float = 1e-3
    count: int = ROWS

    def networks(self) -> dict[str, tuple[int, ...]]:
        """The layers of each network.

        Two parents are concatenated: (x, y), (h, x), (h, z).
        """
        s = self.sizes
        if self.model == "gmvae":
            return {
                "to_y": (s.x, *s.hidden, s.classes),
                "encoder": (s.x + s.classes, *s.hidden, 2 * s.z),
                "prior": (s.classes, 2 * s.z),
                "decoder": (s.z, *s.hidden, s.x),
            }
        if self.model == "vrnn":
            heads = {
                "prior": (s.h, 2 * s.z),
                "encoder": (s.h + s.x, 2 * s.z),
                "decoder": (s.h + s.z, s.x),
            }
            return {name: (inputs, *s.hidden, outputs) for name, (inputs, outputs) in heads.items()}
        return {"encoder": (s.x, *s.hidden, 2 * s.z), "decoder": (s.z, *s.hidden, s.x)}

    def weights(self) -> dict[str, Tensor]:
        """The initial weights: ``network.layer.weight`` [outputs, inputs] and ``.bias``.

        An LSTM's weights have torch's names. The variance of all weights is one over the number of
        inputs, three times that of torch's initialisation, so that the KL terms matter from the
        first step.
        """
        generator = torch.Generator().manual_seed(0)

        def draw(shape: Sequence[int], inputs: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / inputs**0.5).to(self.device)

        found = {}
        for name, sizes in self.networks().items():
            for i, (a, b) in enumerate(pairwise(sizes)):
                found |= {f"{name}.{i}.weight": draw((b, a), a), f"{name}.{i}.bias": draw((b,), a)}
        if self.model == "vrnn":
            for name, shape in self.recurrent_shapes().items():
                found[f"lstm.{name}"] = draw(shape, self.sizes.h)
        return found

    def recurrent_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of two layers, the lower of which reads (x, z)."""
        s, gates = self.sizes, 4 * self.sizes.h
        found: dict[str, tuple[int, ...]] = {}
        for layer, inputs in enumerate((s.x + s.z, s.h)):
            found |= {f"weight_ih_l{layer}": (gates, inputs), f"weight_hh_l{layer}": (gates, s.h)}
            found |= {f"bias_ih_l{layer}": (gates,), f"bias_hh_l{layer}": (gates,)}
        return found

    def rows(self) -> Tensor:
        """Return rows with a structure to learn: noisy copies of twenty patterns.

        The patterns are as sparse as digits, and some entries of each row are flipped. Binary,
        [rows, x] or [rows, steps, x]; grey levels as bytes for ``vae-tutorial``.
        """
        s, generator = self.sizes, torch.Generator().manual_seed(0)
        shape = (s.steps, s.x) if s.steps else (s.x,)
        patterns = torch.rand(PATTERNS, *shape, generator=generator) < 0.13
        chosen = patterns[torch.randint(PATTERNS, (self.count,), generator=generator)]
        x = chosen ^ (torch.rand(self.count, *shape, generator=generator) < 0.02)
        if self.model == "vae-tutorial":
            ink = torch.randint(128, LEVELS, (self.count, *shape), generator=generator)
            return (x * ink).to(torch.uint8).to(self.device)
        return x.float().to(self.device)

    def network(self, name: str, dropout: float = 0.0) -> nn.Sequential:
        """Return a network of torch's own modules, with the initial weights."""
        weights, layers = self.weights(), []
        pairs = list(pairwise(self.networks()[name]))
        for i, (a, b) in enumerate(pairs):
            layers.append(
                set_layer(
                    nn.Linear(a, b), weights[f"{name}.{i}.weight"], weights[f"{name}.{i}.bias"]
                )
            )
            if i < len(pairs) - 1:
                layers += [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(*layers).to(self.device)

    def lstm(self) -> nn.LSTM:
        lstm, weights = nn.LSTM(self.sizes.x + self.sizes.z, self.sizes.h, 2), self.weights()
        lstm.load_state_dict({name: weights[f"lstm.{name}"] for name in self.recurrent_shapes()})
        return lstm.to(self.device)


def set_layer(layer: nn.Linear, weight: Tensor, bias: Tensor) -> nn.Linear:
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


class Batches:
    """Batches in the order of one permutation after another."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.at, self.order = data, 0, torch.randperm(len(data), device=data.device)

    def __call__(self, rows: int = BATCH) -> Tensor:
        if self.at + rows > len(self.data):
            self.at, self.order = 0, torch.randperm(len(self.data), device=self.data.device)
        self.at += rows
        return self.data[self.order[self.at - rows : self.at]]
