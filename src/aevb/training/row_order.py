"""Which rows each step takes, and the seeds of everything random: functions of (seed, step)."""

from __future__ import annotations

from hashlib import blake2b
from itertools import accumulate

import torch
from torch import Tensor

from aevb.data.lazy_rows import Windows

NUMBERS = 2  # version of the random numbers of a seed; a run of another version cannot be resumed


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from numbers and words, the same on every machine."""
    words = [part if isinstance(part, str) else int(part) for part in parts]
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "little") >> 1


class Order:
    """The rows of each step.

    One permutation of the data follows another; they are cut into batches of one size. Rows that
    are read in groups (``windows``) are not mixed over the whole data: a pass visits the groups in
    random order and permutes the rows within each window of successive groups.
    """

    def __init__(
        self,
        n: int,
        batch: int,
        seed: int,
        device: torch.device | None = None,
        windows: Windows | None = None,
    ) -> None:
        self.n, self.batch, self.seed, self.device = n, min(batch, n), seed, device
        self.windows = windows
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._passes: dict[int, tuple[list[list[int]], Tensor]] = {}

    def rows(self, step: int, count: int = 1) -> Tensor:
        """The rows of ``count`` steps, one after another."""
        start = step * self.batch
        parts, wanted = [], count * self.batch
        while wanted:
            epoch, offset = divmod(start, self.n)
            part = self._from(epoch, offset)[:wanted]
            parts.append(part)
            start, wanted = start + len(part), wanted - len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _from(self, epoch: int, offset: int) -> Tensor:
        """Return the rows of a pass from ``offset`` on, at least one of them."""
        if self.windows is None:
            return self._permutation(epoch)[offset:]
        groups, ends = self._pass(epoch, self.windows)
        window = int(torch.searchsorted(ends, offset, right=True))
        begin = int(ends[window - 1]) if window else 0
        return self._window(epoch, window, groups[window], self.windows)[offset - begin :]

    def _permutation(self, epoch: int) -> Tensor:
        found = self._kept.get((epoch, 0))
        if found is None:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
            # The copy does not block, because steps may still be running on the device.
            found = torch.randperm(self.n, generator=generator).to(self.device, non_blocking=True)
            self._keep((epoch, 0), found)
        return found

    def _pass(self, epoch: int, windows: Windows) -> tuple[list[list[int]], Tensor]:
        """Return the groups of each window of a pass, and the number of rows up to its end."""
        found = self._passes.get(epoch)
        if found is None:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "groups", epoch))
            groups: list[list[int]] = []
            ends: list[int] = []
            size = windows.rows
            for group in torch.randperm(len(windows.sizes), generator=generator).tolist():
                more = windows.sizes[group]
                if size + more > windows.rows:
                    groups, ends, size = [*groups, []], [*ends, ends[-1] if ends else 0], 0
                groups[-1].append(group)
                ends[-1], size = ends[-1] + more, size + more
            found = groups, torch.tensor(ends)
            self._passes = {epoch: found}
        return found

    def _window(self, epoch: int, window: int, groups: list[int], windows: Windows) -> Tensor:
        found = self._kept.get((epoch, window))
        if found is None:
            starts = [0, *accumulate(windows.sizes)]
            rows = torch.cat([torch.arange(starts[j], starts[j + 1]) for j in groups])
            generator = torch.Generator().manual_seed(seed_of(self.seed, "window", epoch, window))
            found = rows[torch.randperm(len(rows), generator=generator)].to(self.device)
            self._keep((epoch, window), found)
        return found

    def _keep(self, key: tuple[int, int], found: Tensor) -> None:
        """Keep this permutation and the one before it: a batch may need both."""
        last = next(reversed(self._kept), None)
        self._kept = ({} if last is None else {last: self._kept[last]}) | {key: found}
