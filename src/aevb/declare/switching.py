"""A linear network whose weights are chosen by a class: ``switching("y[t]")``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aevb.declare.networks import INITIALIZERS, Blocks, Named, Network, Shape, _choice
from aevb.declare.registry import register
from aevb.runtime.shapes import broadcast_shapes


@register
@dataclass(frozen=True, repr=False)
class switching(Network):
    """One affine map of the other parents per class of one parent: Σ_c y_c (W_c x + b_c).

    It makes a mixture of regressions, ``"x | y, u": Normal(1, net=switching("y"))``, and over time
    a regression that switches with a hidden state. With probabilities instead of a class, the maps
    are averaged.

    Arguments:
        by: The parent that chooses the map, a class such as "y[t]".
        bias: Whether the maps have an intercept.
        init: How weights start, as in :class:`mlp`.

    >>> switching("y[t]", bias=False)
    switching(by='y[t]', bias=False)
    """

    by: str = ""
    bias: bool = True
    init: str = "default"

    def __post_init__(self) -> None:
        if not isinstance(self.by, str) or not self.by:
            raise ValueError(
                f'switching takes the parent that chooses the weights, e.g. switching("y[t]"), got '
                f"{self.by!r}."
            )
        _choice("initialiser", self.init, INITIALIZERS)

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        by = self.by.replace(" ", "")
        if by not in parents:
            raise ValueError(
                f"switching({self.by!r}) names a parent that this variable does not have. Its "
                f"parents are {', '.join(parents)}."
            )
        if len(parents) == 1:
            raise ValueError(
                f"switching({self.by!r}) needs another parent, whose weights {by} chooses. Without "
                f"one, use linear(): it has an intercept per class."
            )
        sizes = {name: math.prod(parent) for name, parent in parents.items()}
        return Switching(self, by, sizes, heads, masked)


class Switching(nn.Module):
    """The module of ``switching``.

    The first layer holds the maps of all classes side by side, and the classes' weights after them,
    so that it is a sum over the parents. ``rest`` multiplies the two.
    """

    def __init__(
        self,
        spec: switching,
        by: str,
        parents: Mapping[str, int],
        heads: Sequence[int],
        masked: Sequence[str],
    ) -> None:
        super().__init__()
        self.spec, self.by, self.classes, self.out = spec, by, parents[by], sum(heads)
        self.blocks = Blocks(
            {name: size for name, size in parents.items() if name != by},
            self.classes * self.out,
            bias=spec.bias,
            init=spec.init,
            heads=list(heads) * self.classes,
            masked=[name for name in masked if name != by],
        )
        # The weights of the classes where the class is missing; zero at first.
        self.missing = Named(
            {by: nn.Parameter(torch.zeros(self.classes, self.classes))} if by in masked else {}
        )

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return [..., classes · out + classes]: the maps by class, and the classes' weights."""
        others = {name: value for name, value in inputs.items() if name != self.by}
        absent = {name: value for name, value in (missing or {}).items() if name != self.by}
        like = next(iter(inputs.values()))
        zeros = like.new_zeros(*[1] * (like.dim() - 1), self.classes)
        if others:
            maps = self.blocks(others, bias=bias, missing=absent, full=True)
        else:
            maps = zeros.new_zeros(*zeros.shape[:-1], self.classes * self.out)
            if bias and self.blocks.bias is not None:
                maps = maps + self.blocks.bias
        chosen = inputs.get(self.by, zeros)
        if missing and self.by in missing and self.by in self.missing:
            chosen = chosen + missing[self.by].to(chosen.dtype) @ self.missing[self.by].T
        lead = broadcast_shapes(maps.shape[:-1], chosen.shape[:-1])
        return torch.cat([maps.expand(*lead, -1), chosen.to(maps.dtype).expand(*lead, -1)], -1)

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        maps, chosen = h.split([self.classes * self.out, self.classes], -1)
        return (maps.unflatten(-1, (self.classes, self.out)) * chosen.unsqueeze(-1)).sum(-2)
