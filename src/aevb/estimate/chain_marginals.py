"""Marginals and pairwise marginals of discrete latents that are enumerated at every step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from aevb.derive.axes import TIME, expand_axis, join, over_time, steps_of, swap
from aevb.derive.dependence import Axis
from aevb.derive.plan import Plan


class Chain:
    """q's marginals of the latents that are enumerated at every step.

    There are pairwise marginals too if a factor reads a neighbour. If q's factors read their
    neighbour in time, a recursion computes the marginals at cost T·C² instead of summing over C^T
    paths.
    """

    def __init__(self, plan: Plan, weights: Callable[[str], Tensor], steps: int) -> None:
        graph = plan.graph
        self.steps = steps
        names = [name for name in plan.slots if graph.timed[name]]
        self.slots = [plan.slots[name] for name in names]
        self.sizes = [plan.size(Axis(name)) for name in names]
        product: Tensor | None = None
        for name in names:
            weight = over_time(weights(name), self.steps)
            product = weight if product is None else product * weight
        assert product is not None
        self.direction = next(filter(None, [plan.direction("q", name) for name in names]), 0)
        self.neighbours = [slot for _, slot in self.slots if slot is not None]
        self.pair: Tensor | None = None
        self.conditional = self.single = product
        if self.direction:
            self.pair, self.single = self._recursion(product)

    def _uniform(self) -> float:
        return 1 / math.prod(
            [
                count
                for count, (_, slot) in zip(self.sizes, self.slots, strict=True)
                if slot is not None
            ]
        )

    def _to_neighbour(self, value: Tensor) -> Tensor:
        """Move each latent from its own axis to its neighbour's axis.

        Sum out latents that have no neighbour's axis.
        """
        for current, slot in self.slots:
            if slot is not None:
                value = swap(value, current, slot)
            elif value.dim() >= -current:
                value = value.sum(current, keepdim=True)
        return value

    def _recursion(self, conditional: Tensor) -> tuple[Tensor, Tensor]:
        parts = steps_of(conditional, self.steps)
        pairs: list[Tensor] = [conditional] * self.steps
        singles: list[Tensor] = [conditional] * self.steps
        before: Tensor | None = None
        for t in range(self.steps) if self.direction < 0 else range(self.steps - 1, -1, -1):
            pairs[t] = parts[t] * (
                self._uniform() if before is None else self._to_neighbour(before)
            )
            widened = pairs[t]
            for count, slot in zip(self.sizes, (slot for _, slot in self.slots), strict=True):
                if slot is not None:
                    widened = expand_axis(widened, slot, count)
            pairs[t] = widened
            singles[t] = before = widened.sum(self.neighbours, keepdim=True)
        return join(pairs), join(singles)

    def weights(self, direction: int) -> Tensor:
        """The joint weights of (present, neighbour at t + direction).

        The weights of the present alone for direction 0.
        """
        if not direction:
            return self.single
        if direction == self.direction:
            assert self.pair is not None
            return self.pair
        # q runs the other way: use the neighbour's conditional given the present. Outside the
        # sequence the weights are uniform.
        edge = self.single.narrow(TIME, 0 if direction < 0 else self.steps - 1, 1) * self._uniform()
        start = 0 if direction < 0 else 1
        here = self.single.narrow(TIME, 1 - start, self.steps - 1)
        inside = here * self._to_neighbour(self.conditional.narrow(TIME, start, self.steps - 1))
        for count, (_, slot) in zip(self.sizes, self.slots, strict=True):
            if slot is not None:
                edge = expand_axis(edge, slot, count)
        return join([edge, inside] if direction < 0 else [inside, edge])
