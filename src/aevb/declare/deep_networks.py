"""Deep networks: a residual perceptron, and attention over tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aevb.compiled_step.gradients import affine
from aevb.declare.networks import (
    ACTIVATIONS,
    INITIALIZERS,
    Blocks,
    Named,
    Network,
    Shape,
    _choice,
    _layer,
    _sizes,
)
from aevb.declare.registry import register
from aevb.runtime.shapes import broadcast_shapes


@register
@dataclass(frozen=True, repr=False)
class residual(Network):
    """A residual perceptron: ``residual(128, blocks=3)``.

    The first layer has ``width`` units. Each of the ``blocks`` adds two layers to it,
    h ← h + W₂ f(W₁ f(h)). The function f is ``activation``, and ``init`` says how weights start;
    both are as for :class:`aevb.mlp`.

    >>> residual(128, blocks=3)
    residual(width=128, blocks=3)
    """

    width: int = 64
    blocks: int = 2
    activation: str = "relu"
    init: str = "default"

    def __post_init__(self) -> None:
        _sizes("residual", [self.width, self.blocks])
        _choice("activation", self.activation, list(ACTIVATIONS))
        _choice("initialiser", self.init, INITIALIZERS)

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        return Residual(self, parents, heads, masked)


class Residual(nn.Module):
    def __init__(
        self,
        spec: residual,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        masked: Sequence[str],
    ) -> None:
        super().__init__()
        inputs = {name: math.prod(parent) for name, parent in parents.items()}
        self.blocks = Blocks(inputs, spec.width, bias=True, init=spec.init, masked=masked)
        self.inner, self.outer = (
            nn.ModuleList(_layer(spec.width, spec.width, spec.init) for _ in range(spec.blocks))
            for _ in range(2)
        )
        self.heads = _layer(spec.width, sum(heads), spec.init, heads)
        self.activation = ACTIVATIONS[spec.activation]

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        return self.blocks(inputs, bias=bias, missing=missing)  # type: ignore[no-any-return]

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            h = h + _applied(outer, self.activation(_applied(inner, self.activation(h))))
        return affine(self.activation(h), self.heads.weight, self.heads.bias, full=True)


@register
@dataclass(frozen=True, repr=False)
class attention(Network):
    """A transformer encoder over tokens: ``attention(64, heads=4, layers=2)``.

    A parent of shape (n, size) is n tokens, every other parent is one. A token is embedded linearly
    and gets a learned position; each layer then adds self-attention and a perceptron of ``4 ·
    width`` units, both on normalised tokens; and the mean of the tokens goes to the parameters.
    With ``positions=False`` the tokens of a parent are a set: their order has no effect.

    >>> attention(64, layers=2, positions=False)
    attention(layers=2, positions=False)
    """

    width: int = 64
    heads: int = 4
    layers: int = 1
    positions: bool = True

    def __post_init__(self) -> None:
        _sizes("attention", [self.width, self.heads, self.layers])
        if self.width % self.heads:
            raise ValueError(
                f"attention splits its width into heads of one size, but {self.width} cannot be "
                f"split into {self.heads}."
            )

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        return Attention(self, parents, heads, masked)


class Attention(nn.Module):
    def __init__(
        self,
        spec: attention,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        masked: Sequence[str],
    ) -> None:
        super().__init__()
        width = spec.width
        # By parent, the number of its tokens and the size of each.
        self.tokens = {
            name: (parent[0], parent[1]) if len(parent) == 2 else (1, math.prod(parent))
            for name, parent in parents.items()
        }
        self.weights = Named(
            {name: _layer(size, width, "default").weight for name, (_, size) in self.tokens.items()}
        )
        self.missing = Named({name: torch.zeros(width, self.tokens[name][1]) for name in masked})
        counts = [count for count, _ in self.tokens.values()]
        rows = sum(counts) if spec.positions else len(counts)
        self.places = nn.Parameter(torch.randn(rows, width) / math.sqrt(width))
        self.counts = [1] * rows if spec.positions else counts  # tokens that share a place
        self.width, self.total = width, sum(counts)
        self.layers = nn.ModuleList(AttentionLayer(width, spec.heads) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(width)
        self.heads = _layer(width, sum(heads), "default", heads)

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The embedded tokens side by side, with zeros for those of other parents."""
        if not inputs:
            raise ValueError("a first layer needs at least one parent")
        missing, some = missing or {}, next(iter(inputs.values()))
        found = []
        for name, (count, size) in self.tokens.items():
            if name not in inputs:
                found.append(some.new_zeros(count * self.width))
                continue
            value = inputs[name].unflatten(-1, (count, size))
            part = affine(value, self.weights[name])
            if name in missing and name in self.missing:
                absent = missing[name].unflatten(-1, (count, size))
                part = part + affine(absent, self.missing[name])
            found.append(part.flatten(-2))
        lead = broadcast_shapes(*(part.shape[:-1] for part in found))
        tokens = torch.cat([part.expand(*lead, part.shape[-1]) for part in found], -1)
        if not bias:
            return tokens
        places = zip(self.places.split(1), self.counts, strict=True)
        return tokens + torch.cat([place.expand(count, -1) for place, count in places]).flatten()

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        tokens = h.reshape(-1, self.total, self.width)
        for layer in self.layers:
            tokens = layer(tokens)
        mean = self.norm(tokens).mean(-2).reshape(*h.shape[:-1], self.width)
        return affine(mean, self.heads.weight, self.heads.bias, full=True)


class AttentionLayer(nn.Module):
    """t ← t + attention(norm(t)), then t ← t + perceptron(norm(t)), for tokens [rows, n, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.count = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.reads = _layer(width, 3 * width, "default")  # queries, keys and values
        self.mixes = _layer(width, width, "default")
        self.inner = _layer(width, 4 * width, "default")
        self.outer = _layer(4 * width, width, "default")

    def forward(self, tokens: Tensor) -> Tensor:
        read = _applied(self.reads, self.norms[0](tokens)).unflatten(-1, (3, self.count, -1))
        query, key, value = read.transpose(-4, -2).unbind(-3)  # each [rows, heads, n, width/heads]
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mixed = (scores.softmax(-1) @ value).transpose(-3, -2).flatten(-2)
        tokens = tokens + _applied(self.mixes, mixed)
        hidden = F.gelu(_applied(self.inner, self.norms[1](tokens)))
        return tokens + _applied(self.outer, hidden)


def _applied(layer: nn.Module, value: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return affine(value, layer.weight, layer.bias)
