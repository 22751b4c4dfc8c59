"""Training with several processes: each takes its share of every batch, and gradients are summed.

``torchrun`` starts the processes; without it there is one process, and this module does nothing.
The noise of a step is drawn for the whole batch, and each process keeps the part of its rows. The
result therefore does not depend on the number of processes. The exceptions are latents that torch's
own samplers draw (Beta, Poisson, NegativeBinomial).

If a process is killed, the others notice at once. If one hangs, the others wait for ten minutes, or
for ``AEVB_WAIT`` seconds. All then end with an error, and the run can be resumed from its last
checkpoint. On GPUs, NCCL itself ends the processes after the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from aevb.estimate.noise import fork
from aevb.training.checkpoint import TrainingError

T = TypeVar("T")
WAIT = 600.0  # seconds that a process waits for the others


def waiting_time() -> float:
    """Return how many seconds a process waits for the others (``AEVB_WAIT``)."""
    text = os.environ.get("AEVB_WAIT", "")
    try:
        found = float(text or WAIT)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise ValueError(
            f"AEVB_WAIT is the number of seconds that a process waits for the others, got {text!r}."
        )
    return found


@contextmanager
def _together() -> Iterator[None]:
    """Run a collective operation; raise TrainingError if another process has ended or hangs."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"Another process of this run has ended, or has not answered for {waiting_time():.0f} "
            f"s (AEVB_WAIT), so that none can go on. Start them again with resume=True: the run "
            f"continues from its last checkpoint. ({str(error).splitlines()[0][:120]})"
        ) from None


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    joined: bool = False  # whether this library initialised the process group

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and displays progress."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """Return this process's part of n rows."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def rows_of(self, noise: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
        """Return the part of a step's noise that belongs to this process's rows.

        A seed cannot be split: each process derives a seed of its own, so that their draws differ.
        """
        if self.size == 1:
            return dict(noise)
        part = self.share(n)

        def mine(value: Tensor) -> Tensor:
            if value.dim() == 0:
                return fork(value, part.start)
            return value[..., part, :] if value.dim() > 1 and value.shape[-2] == n else value

        return {name: mine(value) for name, value in noise.items()}

    def sum(self, tensors: list[Tensor]) -> None:
        """Sum tensors over all processes, in place, with one all-reduce."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _together():
            dist.all_reduce(flat)
        for tensor, part in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part.reshape(tensor.shape))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        count = torch.tensor([float(flag)], device=self.device)
        with _together():
            dist.all_reduce(count)
        return bool(count.item())

    def copy_first(self, tensors: list[Tensor]) -> None:
        """Broadcast the first process's values to all processes."""
        if self.size > 1:
            with _together():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def gather(self, found: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        if self.size == 1:
            return [found]
        everything: list[Any] = [None] * self.size
        with _together():
            dist.all_gather_object(everything, found)
        return everything

    def wait(self) -> None:
        if self.size > 1:
            with _together():
                dist.barrier()

    def leave(self) -> None:
        """Close the process group before the interpreter exits.

        An open connection can abort the process.
        """
        if self.size > 1 and dist.is_initialized():
            self.wait()
            if self.joined:
                dist.destroy_process_group()


def join(device: torch.device) -> World:
    """Join the process group that torchrun started, or return a world of one process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    joined = not dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if joined:
        with _together():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=timedelta(seconds=waiting_time()),
            )
    return World(dist.get_rank(), size, device, joined)
