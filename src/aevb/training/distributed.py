"""Many processes: each takes its share of every batch, and the active group's gradients are summed.

Started by ``torchrun``; without it there is one process and nothing here does anything. The noise of a step is drawn for the whole
batch and each process keeps its rows' part, so that any number of processes trains the same weights. Only what torch itself samples
from a seed (Beta, Poisson and NegativeBinomial as latents) differs with their number.

Where one process is killed the others hear it at once; one that hangs is waited for ten minutes, or as many seconds as ``AEVB_WAIT`` says. All then
end with a sentence, and the last checkpoint is there to resume from. (On GPUs NCCL ends the processes itself, after the same time.)
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
    """How many seconds a process waits for the others."""
    text = os.environ.get("AEVB_WAIT", "")
    try:
        found = float(text or WAIT)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise ValueError(f"AEVB_WAIT is how many seconds a process waits for the others, got {text!r}.")
    return found


@contextmanager
def _together() -> Iterator[None]:
    """What all processes do at once; where another has ended or hangs, say so."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"Another process of this run has ended, or has not answered for {waiting_time():.0f} s (AEVB_WAIT), so that none can go on. "
            f"Start them again with resume=True: the run continues from its last checkpoint. ({str(error).splitlines()[0][:120]})"
        ) from None


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    joined: bool = False  # whether it was this library that joined them

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """This process's part of n rows."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def rows_of(self, noise: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
        """The part of a step's noise that belongs to this process's rows.

        A seed has no parts: each process draws by one of its own, so that its rows are not drawn like those of the others.
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
        """Add up tensors over all processes, in place, as one message."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _together():
            dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
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
        """Give every process the first one's values."""
        if self.size > 1:
            with _together():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def gather(self, found: T) -> list[T]:
        """What every process found, in the order of their ranks."""
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
        """Part in order, before the interpreter goes: a connection still open then can abort the process."""
        if self.size > 1 and dist.is_initialized():
            self.wait()
            if self.joined:
                dist.destroy_process_group()


def join(device: torch.device) -> World:
    """Join the processes that torchrun started; alone if there are none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    joined = not dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if joined:
        with _together():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=waiting_time()))
    return World(dist.get_rank(), size, device, joined)
