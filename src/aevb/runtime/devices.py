"""Devices by name: which ones torch finds here, and which one a name means."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from aevb.runtime.suggestions import did_you_mean

NAMES = ("auto", "cpu", "cuda", "cuda:0", "mps")
ALIASES = {"gpu": "cuda", "metal": "mps", "nvidia": "cuda"}


def available_devices() -> list[str]:
    """Return the devices that torch finds here, the fastest first.

    >>> available_devices()[-1]
    'cpu'
    """
    gpus = [f"cuda:{i}" for i in range(cuda_count())]
    return [*gpus, *(["mps"] if mps_is_here() else []), "cpu"]


def cuda_count() -> int:
    """Return the number of CUDA devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def mps_is_here() -> bool:
    """Return whether torch can use Apple's GPU."""
    return torch.backends.mps.is_available()


def device_named(asked: Any, *, argument: str = "device={!r}") -> torch.device:
    """Return the device that a name or a torch.device means, if it is here.

    "cuda" is the GPU of this process: of number ``LOCAL_RANK`` under torchrun, otherwise torch's
    current one. Raises ValueError, naming the devices that are here, for any other. "auto" has no
    place here, because it depends on the model: see :mod:`aevb.training.devices`. ``argument``
    is how a user writes the argument, for messages.

    >>> device_named("cpu")
    device(type='cpu')
    """
    if isinstance(asked, bool) or not isinstance(asked, str | torch.device):
        raise ValueError(
            f"A device is a name, such as {argument.format('cpu')} or {argument.format('cuda:0')}, "
            f"or a torch.device; got {asked!r}."
        )
    try:
        found = torch.device(asked)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda", "mps"):
        raise ValueError(
            f"{argument.format(str(asked))} is not a device that a model is trained on. Those are "
            f"auto, cpu, cuda, cuda:0, cuda:1, … and mps; torch finds "
            f"{', '.join(available_devices())} here.{did_you_mean(asked, NAMES, aliases=ALIASES)}"
        )
    if found.type == "cuda":
        return _gpu(found, argument)
    if found.type == "mps" and not mps_is_here():
        raise ValueError(_absent(argument, found))
    return found


def wide(value: Tensor) -> Tensor:
    """Return numbers in float64, for sums that must keep their digits.

    MPS has no float64, so its numbers move to the CPU.

    >>> wide(torch.ones(2)).dtype
    torch.float64
    """
    return (value.cpu() if value.device.type == "mps" else value).double()


def _gpu(asked: torch.device, argument: str) -> torch.device:
    count = cuda_count()
    if not count:
        raise ValueError(_absent(argument, asked))
    if asked.index is not None:
        if asked.index >= count:
            raise ValueError(_absent(argument, asked))
        return asked
    rank = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if rank is None else int(rank)
    if index >= count:
        raise ValueError(
            f"{argument.format('cuda')} gives each process of torchrun a GPU of its own, and this "
            f"is process {index} (from 0), but torch finds {', '.join(available_devices())} here. "
            f"Start at most {count} per machine, --nproc-per-node={count}, or use "
            f"{argument.format('cpu')}."
        )
    return torch.device("cuda", index)


def _absent(argument: str, asked: torch.device) -> str:
    here = available_devices()
    why = {
        "cuda": " (this torch is built without CUDA)" if torch.version.cuda is None else "",
        "mps": " (MPS needs an Apple GPU)",
    }[asked.type]
    return (
        f"There is no device {str(asked)!r} here{why}; torch finds {', '.join(here)}. Use "
        f"{argument.format(here[0])}."
    )
