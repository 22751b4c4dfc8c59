"""Rows that do not lie on the device, brought there before they are asked for.

A thread reads the rows of the steps to come, in blocks, while the device works on those before. A block waits in page-locked memory, from
which the device takes it without the host's help. So files, and data that are larger than the device, train as what lies there does.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from aevb.batch import Batch
from aevb.data.sources import Source
from aevb.training.order import Order

APART = 256  # bytes: every place begins where the fast kernels want their arguments


class Staged:
    """The batches of up to ``places`` steps, always in the same tensors on the device, so that a graph can read them.

    ``steps`` is the number of steps of the run, beyond which nothing is read. At most three blocks of ``places`` batches are held, one on the device.
    """

    def __init__(self, source: Source, order: Order, places: int, steps: int, device: torch.device) -> None:
        self.source, self.order, self.places, self.steps, self.device = source, order, places, steps, device
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self.blocks: dict[int, Future[Batch]] = {}
        self.here: Batch = {name: _apart(value, device) for name, value in self._block(0).items()}

    def load(self, step: int, count: int) -> None:
        """Put the rows of ``count`` steps into the first places; those of the block that follows are read meanwhile."""
        done = 0
        while done < count:
            block, offset = divmod(step + done, self.places)
            many = min(count - done, self.places - offset)
            for name, value in self._ready(block).items():
                self.here[name][done : done + many].copy_(value[offset : offset + many], non_blocking=True)
            done += many
        if (block + 1) * self.places < self.steps:
            self._ask(block + 1)
        self.blocks = {number: coming for number, coming in self.blocks.items() if number in (block, block + 1)}

    def batch(self, place: int) -> Batch:
        return {name: value[place] for name, value in self.here.items()}

    def settle(self) -> None:
        """Wait for what is being read: while a graph is captured no other thread may ask the device for memory."""
        wait(self.blocks.values())

    def close(self) -> None:
        self.reader.shutdown(wait=False, cancel_futures=True)
        self.blocks = {}

    def _ready(self, block: int) -> Batch:
        self._ask(block)
        try:
            return self.blocks[block].result()
        except BaseException:
            del self.blocks[block]  # whoever asks again has it read again
            raise

    def _ask(self, block: int) -> None:
        if block not in self.blocks:
            self.blocks[block] = self.reader.submit(self._block, block)

    def _block(self, block: int) -> Batch:
        """The batches of ``places`` steps, [places, T or 1, batch, d] each."""
        rows = self.order.rows(block * self.places, self.places)
        return {name: self._laid_out(value) for name, value in self.source.on_host(rows).items()}

    def _laid_out(self, value: Tensor) -> Tensor:
        value = value.unflatten(-2, (self.places, -1)).movedim(-3, 0).contiguous()
        return value.pin_memory() if self.device.type == "cuda" else value


def _apart(value: Tensor, device: torch.device) -> Tensor:
    """Memory for such a block, each place of it at a multiple of ``APART``."""
    places, numbers = len(value), value[0].numel()
    stride = -(-numbers * value.element_size() // APART) * APART // value.element_size()
    return torch.empty(places, stride, dtype=value.dtype, device=device)[:, :numbers].unflatten(1, value.shape[1:])
