"""Prefetch the rows of coming steps.

For a GPU, a thread reads the rows of the next steps in blocks while the device works. A block waits
in page-locked memory, from which the device copies it asynchronously. Files, and data larger than
the device's memory, therefore train as fast as data on the device. On a CPU, small batches are
gathered for a few steps at once.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from aevb.data.sources import Resident, Source
from aevb.estimate.batch import Batch
from aevb.training.row_order import Order

# Steps gathered at once on a CPU, and the largest batch in bytes for which this is done.
TOGETHER, SMALL = (8, 2**20)
# Alignment in bytes. Matrix products round differently if a batch is not aligned like freshly
# allocated memory.
LINE = 64
APART = 256  # bytes; the alignment of each batch that fast kernels need


class Staged:
    """Batches of up to ``places`` steps, in fixed tensors on the device.

    A CUDA graph can read them there.

    ``steps`` is the number of steps of the run; nothing is read beyond it. At most three blocks of
    ``places`` batches are in memory, one of them on the device.
    """

    def __init__(
        self, source: Source, order: Order, places: int, steps: int, device: torch.device
    ) -> None:
        self.source, self.order, self.places, self.steps, self.device = (
            source,
            order,
            places,
            steps,
            device,
        )
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self.blocks: dict[int, Future[Batch]] = {}
        self.here: Batch = {name: _apart(value, device) for name, value in self._block(0).items()}

    def load(self, step: int, count: int) -> None:
        """Copy the rows of ``count`` steps into the first places; start reading the next block."""
        done = 0
        while done < count:
            block, offset = divmod(step + done, self.places)
            many = min(count - done, self.places - offset)
            for name, value in self._ready(block).items():
                self.here[name][done : done + many].copy_(
                    value[offset : offset + many], non_blocking=True
                )
            done += many
        if (block + 1) * self.places < self.steps:
            self._ask(block + 1)
        self.blocks = {
            number: coming for number, coming in self.blocks.items() if number in (block, block + 1)
        }

    def batch(self, place: int) -> Batch:
        return {name: value[place] for name, value in self.here.items()}

    def settle(self) -> None:
        """Wait for the reader.

        During a graph capture, no other thread may allocate memory on the device.
        """
        wait(self.blocks.values())

    def close(self) -> None:
        """Wait for the reader and stop it: another model's graph may be captured next."""
        self.reader.shutdown(cancel_futures=True)
        self.blocks = {}

    def _ready(self, block: int) -> Batch:
        self._ask(block)
        try:
            return self.blocks[block].result()
        except BaseException:
            del self.blocks[block]  # so that the next request reads it again
            raise

    def _ask(self, block: int) -> None:
        if block not in self.blocks:
            self.blocks[block] = self.reader.submit(self._block, block)

    def _block(self, block: int) -> Batch:
        """Read the batches of ``places`` steps.

        Each variable has shape [places, T or 1, batch, d].
        """
        rows = self.order.rows(block * self.places, self.places)
        return {name: self._laid_out(value) for name, value in self.source.on_host(rows).items()}

    def _laid_out(self, value: Tensor) -> Tensor:
        value = value.unflatten(-2, (self.places, -1)).movedim(-3, 0).contiguous()
        return value.pin_memory() if self.device.type == "cuda" else value


class Gathered:
    """Batches of several successive steps, gathered at once.

    On a CPU, the calls cost more than small batches.
    """

    def __init__(self, source: Resident, order: Order) -> None:
        self.source, self.order = source, order
        self.block: int | None = None
        self.here: Batch = {}

    @staticmethod
    def pays(source: Source, order: Order) -> bool:
        """Return whether gathering is faster: for small batches without a time axis.

        A time axis would need another memory layout.
        """
        if not isinstance(source, Resident) or source.like.device.type != "cpu":
            return False
        values = source.batch.values()
        return (
            all(len(value) == 1 for value in values)
            and order.batch * sum(value[0, 0].nbytes for value in values) <= SMALL
        )

    def load(self, step: int, count: int) -> None:
        """Prepare the batch of a step; ``count`` is always 1."""
        block, self.offset = divmod(step, TOGETHER)
        if block != self.block:
            rows = self.order.rows(block * TOGETHER, TOGETHER)
            values = {
                name: value.unflatten(-2, (TOGETHER, -1)).movedim(-3, 0)
                for name, value in self.source.read(rows).items()
            }
            self.here = {
                name: value
                if value[0].nbytes % LINE == 0
                else _apart(value, value.device).copy_(value)
                for name, value in values.items()
            }
            self.block = block

    def batch(self, place: int) -> Batch:
        return {name: value[self.offset + place] for name, value in self.here.items()}

    def settle(self) -> None:
        """Do nothing: there is no reader thread."""

    def close(self) -> None:
        self.here, self.block = {}, None


def _apart(value: Tensor, device: torch.device) -> Tensor:
    """Allocate memory for such a block, with each batch at a multiple of ``APART`` bytes."""
    places, numbers = len(value), value[0].numel()
    stride = -(-numbers * value.element_size() // APART) * APART // value.element_size()
    return torch.empty(places, stride, dtype=value.dtype, device=device)[:, :numbers].unflatten(
        1, value.shape[1:]
    )
