"""Forward algorithm: sum over all paths of discrete latents in time, at cost T·C² instead of C^T.

log p(x) = log Σ over s₁ … s_T of Π ψ_t(s_t) ψ_t(s_{t−1}, s_t), computed in log space by α_t(s) =
ψ_t(s) Σ_{s'} ψ_t(s', s) α_{t−1}(s'). A factor may read the previous or the next step. A factor of
step t that reads step t+1 belongs to the pair (t, t+1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from aevb.derive.axes import SAMPLES, TIME, expand_axis, over_time, size, steps_of, swap
from aevb.evidence.finite import Tables
from aevb.evidence.forward_backward import LogSum, PathsError


@dataclass
class Paths:
    """Log-factors of a chain of states, and the log-sum over its paths.

    ``slots`` holds the axes of each latent and of its neighbour, ``sizes`` their number of values.
    ``real`` and ``last``, [T, N or 1, 1], mark the real (not padded) steps and each row's last
    step.
    """

    # Whether to use scaled probabilities where possible, which is much faster than log space.
    fast: ClassVar[bool] = True

    slots: Sequence[tuple[int, int]]
    sizes: Sequence[int]
    steps: int
    real: Tensor | None
    last: Tensor
    here: list[Tensor] = field(default_factory=list)  # ψ_t(s_t)
    behind: list[Tensor] = field(default_factory=list)  # ψ_t(s_t, s_{t−1})
    ahead: list[Tensor] = field(default_factory=list)  # ψ_t(s_t, s_{t+1})
    at_first: list[Tensor] = field(default_factory=list)
    at_last: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tables: Tables) -> Paths:
        """Return an empty chain for a model's discrete latents in time."""
        pairs = {
            name: (current, neighbour)
            for name, (current, neighbour) in tables.slots.items()
            if neighbour is not None
        }
        return cls(
            list(pairs.values()),
            [tables.sizes[name] for name in pairs],
            tables.steps,
            tables.program.real,
            tables.program.is_last(),
        )

    def add(self, factor: Tensor, place: int | str) -> None:
        """Add a log-factor, [axes, 1, T or 1, N or 1, 1].

        ``place`` is the neighbour that the factor reads (−1 or +1), 0, or the end that it belongs
        to.
        """
        if isinstance(place, str):
            (self.at_first if place == "first" else self.at_last).append(factor)
            return
        {0: self.here, -1: self.behind, 1: self.ahead}[place].append(factor)

    def log_sum(self) -> Tensor:
        """Return the log-sum over all paths, [axes of static latents, 1, 1, N, 1]."""
        quick = (
            self._scaled()
            if self.fast
            and self.steps > 1
            and self.last.device.type == "cpu"
            and not torch.compiler.is_compiling()
            else None
        )
        return self._by_logarithms() if quick is None else quick

    # Scaled probabilities, all steps at once ------------------------------------------------------

    def _scaled(self) -> Tensor | None:
        """Compute the sum by :mod:`aevb.evidence.forward_backward`; None if it needs log space."""
        ends = [*(self._inside(part) for part in self.ahead), *self.at_last]
        here = [
            *self.here,
            *(torch.where(self.last, part, torch.zeros_like(part)) for part in ends),
        ]
        start = [
            *(self._inside(_from(part, 0, 1)) for part in self.behind),
            *(_from(part, 0, 1) for part in here),
            *self.at_first,
        ]
        behind = [_from(part, 1, self.steps) for part in self.behind]
        ahead = [self._to_neighbour(_from(part, 0, self.steps - 1)) for part in self.ahead]
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        sums = [
            _sum([nothing, *parts])
            for parts in (start, [*behind, *ahead], [_from(part, 1, self.steps) for part in here])
        ]
        depth = max(-slot for pair in self.slots for slot in pair)
        depth = max(depth, *(part.dim() for part in sums))
        static = [
            axis for axis in range(-depth, SAMPLES) if all(axis not in pair for pair in self.slots)
        ]
        laid = [
            self._laid_out(part, depth, static, pairs=pairs)
            for part, pairs in zip(sums, (False, True, False), strict=True)
        ]
        lead = np.broadcast_shapes(*(part.shape[: len(static)] for part in laid))
        laid = [
            part.expand(*lead, *part.shape[len(static) :]).flatten(0, len(static) - 1)
            if static
            else part[None]
            for part in laid
        ]
        first, pairs, rest = (part.transpose(0, 1) for part in laid)
        try:
            real = None if self.real is None else self.real[1:].transpose(1, 2)
            found: Tensor = LogSum.apply(
                first, pairs, rest.expand(self.steps - 1, *rest.shape[1:]), real
            )  # type: ignore[no-untyped-call]
        except PathsError:
            return None
        shape = [1] * depth
        for axis, count in zip(static, lead, strict=True):
            shape[axis] = count
        shape[-2] = found.shape[-1]
        return found.reshape(shape)

    def _laid_out(self, part: Tensor, depth: int, static: list[int], *, pairs: bool) -> Tensor:
        """Reshape to [static axes, T, N, states], with the values of all latents on one axis.

        With ``pairs``: [.., states of the neighbour, states].
        """
        part = part.reshape(*[1] * (depth - part.dim()), *part.shape)
        groups = (
            [[slot for _, slot in self.slots], [slot for slot, _ in self.slots]]
            if pairs
            else [[slot for slot, _ in self.slots]]
        )
        for slots in groups:
            for slot, count in zip(slots, self.sizes, strict=True):
                part = expand_axis(part, slot, count)
        kept = [*static, TIME, -2, *(slot for slots in groups for slot in slots)]
        rest = [axis for axis in range(-depth, 0) if axis not in kept]  # of size 1
        part = part.permute(*rest, *kept)
        count = math.prod(self.sizes)
        return part.reshape(
            *part.shape[len(rest) : len(rest) + len(static) + 2], *[count] * len(groups)
        )

    # Log space, step by step, on any device -------------------------------------------------------

    def _by_logarithms(self) -> Tensor:
        alpha = torch.zeros(())
        for _, alpha in self.forwards():  # noqa: B007 (the last one is needed)
            pass
        return alpha.logsumexp([slot for slot, _ in self.slots], keepdim=True)

    def forwards(self, pairs: bool = False) -> Iterator[tuple[Tensor | None, Tensor]]:
        """Yield α_t for each step t: log of the summed products of all factors up to step t.

        With ``pairs``, also yield the same for each pair of states (s_t, s_{t−1}) before the sum
        over s_{t−1}; None at the first step. A factor that reads the next step counts from there.
        """
        here, behind, ahead = (
            [steps_of(over_time(part, self.steps), self.steps) for part in parts]
            for parts in (self.here, self.behind, self.ahead)
        )
        last = self.last.split(1, 0)
        real = None if self.real is None else self.real.split(1, 0)
        # A neighbour outside the sequence is zero, so every index of its axis is equal. Take the
        # first.
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=self.last.device)
        start = [
            nothing,
            *(self._inside(part[0]) for part in behind),
            *(part[0] for part in here),
            *self.at_first,
        ]
        alpha = self._at_end(self._whole(_sum(start)), [part[0] for part in ahead], last[0])
        yield None, alpha
        for t in range(1, self.steps):
            before = _sum(
                [
                    self._to_neighbour(alpha),
                    *(part[t] for part in behind),
                    *(self._to_neighbour(part[t - 1]) for part in ahead),
                ]
            )
            arrived = before.logsumexp([slot for _, slot in self.slots], keepdim=True)
            local = [part[t] for part in here]
            step = self._at_end(
                self._whole(_sum([arrived, *local])), [part[t] for part in ahead], last[t]
            )
            alpha = step if real is None else torch.where(real[t], step, alpha)
            yield (self._whole(_sum([before, *local])) if pairs else None), alpha

    def _whole(self, alpha: Tensor) -> Tensor:
        """Expand the current step's axes to full size; factors need not read every latent."""
        for (slot, _), count in zip(self.slots, self.sizes, strict=True):
            alpha = expand_axis(alpha, slot, count)
        return alpha

    def _at_end(self, alpha: Tensor, ahead: Sequence[Tensor], last: Tensor) -> Tensor:
        """Add the factors of a row's last step.

        These read a neighbour beyond the end, or the end of the sequence.
        """
        parts = [*(self._inside(part) for part in ahead), *self.at_last]
        for part in parts:
            alpha = alpha + torch.where(last, part, torch.zeros_like(part))
        return alpha

    def _inside(self, factor: Tensor) -> Tensor:
        for _, slot in self.slots:
            factor = factor.narrow(slot, 0, 1) if size(factor, slot) > 1 else factor
        return factor

    def _to_neighbour(self, value: Tensor) -> Tensor:
        """Swap the axes of the current step and of the neighbour."""
        for current, neighbour in self.slots:
            value = swap(value, current, neighbour)
        return value


def _from(part: Tensor, begin: int, end: int) -> Tensor:
    """Slice a factor's steps; a factor that is constant over time is returned whole."""
    return part if part.shape[TIME] == 1 else part.narrow(TIME, begin, end - begin)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
