"""Truncated back-propagation: each step takes one window of time of a batch of rows.

The windows of a batch follow one another, and each reads the last values and states of the one
before (:mod:`aevb.estimate.before`), without gradient. The sum of their bounds is the bound of the
whole sequences with the same noise; its gradient is truncated at the borders of the windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from aevb.data.sources import Source
from aevb.declare.graph import Graph
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch
from aevb.estimate.before import shapes_before, why_no_windows, why_no_windows_by_plan
from aevb.estimate.keys import STEPS, is_mask, variable_of
from aevb.training.row_order import Order
from aevb.training.settings import Settings

ROWS = 1000  # rows whose lengths are read at a time


class Place(NamedTuple):
    """A window: the number of its batch, its number within the batch, and how many there are."""

    batch: int
    window: int
    windows: int


class Windows:
    """Which window of which batch each step takes: a function of (seed, step).

    A batch has as many windows as its longest row needs.
    """

    def __init__(self, graph: Graph, source: Source, order: Order, size: int) -> None:
        self.graph, self.source, self.order = graph, source, order
        lengths, self.steps = _lengths(graph, source)
        self.size = min(size, self.steps)
        self.needed = -(-lengths // self.size)  # by row
        # Whether the last window of some row ends after the row.
        self.padded = bool((lengths % self.size).any()) or bool((lengths < self.steps).any())
        self.ends: list[int] = []  # the step after the last window of each batch

    def __str__(self) -> str:
        return (
            f"A step takes a window of {self.size} time steps of its rows. States, and values read "
            f"at [t-1], are carried to the next window without gradient. The sum of the windows' "
            f"bounds estimates the bound of whole sequences; its gradient is truncated at the "
            f"borders of windows. The bound is recorded per sequence."
        )

    def at(self, step: int) -> Place:
        """Return the window that a step takes."""
        self._extend_to(step)
        batch = bisect_right(self.ends, step)
        first = self.ends[batch - 1] if batch else 0
        return Place(batch, step - first, self.ends[batch] - first)

    def _extend_to(self, step: int) -> None:
        while not self.ends or self.ends[-1] <= step:
            rows = self.order.rows(len(self.ends)).cpu()
            self.ends.append((self.ends[-1] if self.ends else 0) + int(self.needed[rows].max()))

    def per_batch(self) -> float:
        """Return the mean number of windows of a batch, over the first pass."""
        batches = max(1, round(self.order.n / self.order.batch))
        while len(self.ends) < batches:
            self._extend_to(self.ends[-1] if self.ends else 0)
        return self.ends[batches - 1] / batches

    def batches(self, steps: int) -> float:
        """Return how many batches a number of steps is."""
        if not steps:
            return 0.0
        place = self.at(steps - 1)
        return place.batch + (place.window + 1) / place.windows

    def rows(self, step: int) -> Tensor:
        return self.order.rows(self.at(step).batch)

    def times(self, step: int) -> Tensor:
        """Return the time steps of a step's window; those after the data are padding."""
        return torch.arange(self.size) + self.at(step).window * self.size

    def read(self, rows: Tensor, times: Tensor) -> Batch:
        """Return the batch of these rows and time steps.

        It has a mask of the real steps if any window of the data needs one, so that all windows
        have the same keys.
        """
        inside = times < self.steps
        batch = self.source.read_at(rows, times.clamp_max(self.steps - 1), self._timed)
        if not self.padded:
            return batch
        real = inside[:, None, None].to(self.source.like.device)
        real = real & batch[STEPS] if STEPS in batch else real.expand(-1, len(rows), 1)
        for name, value in batch.items():
            if not self._timed(name) or name == STEPS:
                continue
            batch[name] = value | ~real if is_mask(name) else value.masked_fill(~real, 0)
        return batch | {STEPS: real}

    def _timed(self, name: str) -> bool:
        return name == STEPS or self.graph.timed[variable_of(name) if is_mask(name) else name]


class Carried:
    """What the next window reads of the last one, in fixed tensors on the device.

    ``start`` and ``count`` hold, for each step whose inputs the host loads at a time, whether its
    batch starts, and the number of windows of its batch. A window that fails leaves the values of
    the one before.
    """

    def __init__(
        self, windows: Windows, plan: Plan, batch: Batch, modules: nn.ModuleDict, places: int
    ) -> None:
        like = windows.source.like
        self.windows = windows
        self.values = {
            name: torch.zeros(shape, dtype=like.dtype, device=like.device)
            for name, shape in shapes_before(plan, batch, modules).items()
        }
        self.start = torch.ones(places, dtype=torch.bool, device=like.device)
        self.count = torch.ones(places, dtype=like.dtype, device=like.device)
        self.times = torch.zeros(places, windows.size, dtype=torch.long, device=like.device)

    def load(self, step: int, count: int) -> None:
        """Load the windows of the next steps from the host."""
        places = [self.windows.at(step + i) for i in range(count)]
        self.start[:count].copy_(torch.tensor([place.window == 0 for place in places]))
        self.count[:count].copy_(
            torch.tensor([place.windows for place in places], dtype=self.count.dtype)
        )
        self.times[:count].copy_(
            torch.stack([self.windows.times(step + i) for i in range(count)]), non_blocking=True
        )

    def split(self, measured: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Split what a step measured into its metrics and what the next window reads."""
        sizes = [value.numel() for value in self.values.values()]
        metrics, *parts = measured.split([len(measured) - sum(sizes), *sizes])
        return metrics, [
            part.view(value.shape) for part, value in zip(parts, self.values.values(), strict=True)
        ]

    def keep(self, after: Sequence[Tensor], failed: Tensor) -> None:
        """Keep what a window left, unless it failed."""
        for value, new in zip(self.values.values(), after, strict=True):
            value.copy_(torch.where(failed > 0, value, new))

    def restore(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(values[name])


def joined(metrics: Tensor, count: Tensor, after: Mapping[str, Tensor]) -> Tensor:
    """Return the metrics and what the next window reads as one vector.

    The metrics are multiplied by the number of windows: their mean over the windows of a batch is
    then that of whole sequences.
    """
    return torch.cat([metrics * count, *(value.detach().reshape(-1) for value in after.values())])


def check_windows(
    graph: Graph, plan: Plan, settings: Settings, processes: int, source: Source
) -> None:
    """Raise a ValueError if the rows of a run cannot be trained in windows."""
    reason = why_no_windows(graph) or why_no_windows_by_plan(plan)
    if reason is None and settings.schedule.objective != "bound":
        reason = f"{settings.schedule} computes an exact objective, of whole sequences. Use joint()"
    if reason is None and settings.has_free_bits:
        reason = "free_bits= compares the KL terms of whole sequences with a number. Leave it out"
    for name in ("classify", "agree"):
        if reason is None and getattr(settings, name):
            reason = f"{name}= adds a term of whole sequences. Leave {name}= out"
    if reason is None and processes > 1:
        reason = (
            "each process would have to save the states of its own rows, which a checkpoint does "
            "not hold. Train in one process"
        )
    if reason is not None:
        raise ValueError(f"window={settings.window} trains on windows of time, but {reason}.")


def _lengths(graph: Graph, source: Source) -> tuple[Tensor, int]:
    """Return the length of every row, and the number of steps of the data."""
    timed = next(name for name in graph.observed if graph.timed[name])
    found = []
    for start in range(0, source.n, ROWS):
        batch = source.read(torch.arange(start, min(source.n, start + ROWS)))
        steps = batch[timed].shape[0]
        if STEPS not in batch:
            return torch.full((source.n,), steps), steps
        found.append(batch[STEPS][..., 0].sum(0).cpu())
    return torch.cat(found), steps
