"""Which rows each step takes, and the seeds of everything random: functions of (seed, step)."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

NUMBERS = 2  # version of the random numbers of a seed; a run of another version cannot be resumed


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from numbers and words, the same on every machine."""
    words = [part if isinstance(part, str) else int(part) for part in parts]
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "little") >> 1


class Order:
    """The rows of each step.

    One permutation of the data follows another; they are cut into batches of one size.
    """

    def __init__(self, n: int, batch: int, seed: int, device: torch.device | None = None) -> None:
        self.n, self.batch, self.seed, self.device = n, min(batch, n), seed, device
        self._kept: dict[int, Tensor] = {}

    def rows(self, step: int, count: int = 1) -> Tensor:
        """The rows of ``count`` steps, one after another."""
        start = step * self.batch
        parts, wanted = [], count * self.batch
        while wanted:
            epoch, offset = divmod(start, self.n)
            part = self._permutation(epoch)[offset : offset + wanted]
            parts.append(part)
            start, wanted = start + len(part), wanted - len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _permutation(self, epoch: int) -> Tensor:
        found = self._kept.get(epoch)
        if found is None:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
            # The copy does not block, because steps may still be running on the device.
            found = torch.randperm(self.n, generator=generator).to(self.device, non_blocking=True)
            self._kept = {key: value for key, value in self._kept.items() if key == epoch - 1} | {
                epoch: found
            }
        return found
