"""The forward algorithm: the sum over all paths of discrete latents in time, T·C² instead of C^T.

log p(x) = log Σ over s₁ … s_T of Π ψ_t(s_t) ψ_t(s_{t−1}, s_t), by α_t(s) = ψ_t(s) Σ_{s'} ψ_t(s', s) α_{t−1}(s'), in log space. The
factors may come from either direction of time: what step t says about its neighbour ahead belongs to the pair (t, t+1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aevb.axes import expand_axis, over_time, size, steps_of, swap
from aevb.evidence.finite import Tables


@dataclass
class Paths:
    """Log-factors of a chain of states, and the sum over its paths.

    ``slots`` holds each latent's axis and its neighbour's, ``sizes`` their number of values. ``real`` and ``last``, [T, N or 1, 1], say which
    steps are real and which is a row's last.
    """

    slots: Sequence[tuple[int, int]]
    sizes: Sequence[int]
    steps: int
    real: Tensor | None
    last: Tensor
    here: list[Sequence[Tensor]] = field(default_factory=list)  # ψ_t(s_t)
    behind: list[Sequence[Tensor]] = field(default_factory=list)  # ψ_t(s_t, s_{t−1})
    ahead: list[Sequence[Tensor]] = field(default_factory=list)  # ψ_t(s_t, s_{t+1})
    at_first: list[Tensor] = field(default_factory=list)
    at_last: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tables: Tables) -> Paths:
        """The discrete latents in time of a model, without factors yet."""
        pairs = {name: (current, neighbour) for name, (current, neighbour) in tables.slots.items() if neighbour is not None}
        return cls(list(pairs.values()), [tables.sizes[name] for name in pairs], tables.steps, tables.program.real, tables.program.is_last())

    def add(self, factor: Tensor, place: int | str) -> None:
        """A log-factor, [axes, 1, T or 1, N or 1, 1]; ``place`` is the neighbour it reads (−1, +1), 0, or the end it belongs to."""
        if isinstance(place, str):
            (self.at_first if place == "first" else self.at_last).append(factor)
            return
        {0: self.here, -1: self.behind, 1: self.ahead}[place].append(steps_of(over_time(factor, self.steps), self.steps))

    def log_sum(self) -> Tensor:
        """The log of the sum over all paths, [axes of static latents, 1, 1, N, 1]."""
        last = self.last.split(1, 0)
        real = None if self.real is None else self.real.split(1, 0)
        # Outside the sequence a neighbour is read as zeros, whichever of its values the axis stands for: one of them is taken.
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=self.last.device)
        start = [nothing, *(self._inside(part[0]) for part in self.behind), *(part[0] for part in self.here), *self.at_first]
        alpha = self._at_end(self._whole(_sum(start)), 0, last[0])
        for t in range(1, self.steps):
            pairs = [*(part[t] for part in self.behind), *(self._to_neighbour(part[t - 1]) for part in self.ahead)]
            arrived = _sum([self._to_neighbour(alpha), *pairs]).logsumexp([slot for _, slot in self.slots], keepdim=True)
            step = self._at_end(self._whole(_sum([arrived, *(part[t] for part in self.here)])), t, last[t])
            alpha = step if real is None else torch.where(real[t], step, alpha)
        return alpha.logsumexp([slot for slot, _ in self.slots], keepdim=True)

    def _whole(self, alpha: Tensor) -> Tensor:
        """With the present's axes at full size, though the factors of a step may not read every latent."""
        for (slot, _), count in zip(self.slots, self.sizes, strict=True):
            alpha = expand_axis(alpha, slot, count)
        return alpha

    def _at_end(self, alpha: Tensor, t: int, last: Tensor) -> Tensor:
        """What a row's last step says besides: about a neighbour ahead that is not there, and what reads the end of the sequence."""
        parts = [*(self._inside(part[t]) for part in self.ahead), *self.at_last]
        for part in parts:
            alpha = alpha + torch.where(last, part, torch.zeros_like(part))
        return alpha

    def _inside(self, factor: Tensor) -> Tensor:
        for _, slot in self.slots:
            factor = factor.narrow(slot, 0, 1) if size(factor, slot) > 1 else factor
        return factor

    def _to_neighbour(self, value: Tensor) -> Tensor:
        """Exchange present and neighbour."""
        for current, neighbour in self.slots:
            value = swap(value, current, neighbour)
        return value


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
