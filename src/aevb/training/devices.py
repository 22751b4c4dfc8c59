"""The device of a run: the one that the user names, or the fastest on which training works.

"auto" takes a GPU of CUDA if there is one. Apple's GPU (MPS) lacks float64 and some operations, and
which operations a step needs depends on the model and the settings. Therefore "auto" first takes
two steps and a validation of a copy of the model there, on two rows that p draws. If they fail,
the run takes the CPU, with a note.
"""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aevb.model import Model
from aevb.runtime import devices
from aevb.training.events import DEVICE, Event
from aevb.training.loop import Training
from aevb.training.settings import Settings

ROWS = 2  # rows, steps of the optimiser and time steps of the trial


def device_for(model: Model, asked: Any, settings: Settings) -> tuple[torch.device, Event | None]:
    """Return the device that ``device=`` means for a run, and a note if "auto" avoids a GPU."""
    if asked != "auto":
        return devices.device_named(asked), None
    if devices.cuda_count():
        return devices.device_named("cuda"), None
    cpu = torch.device("cpu")
    if not devices.mps_is_here() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return cpu, None
    mps = torch.device("mps")
    reason = why_not_on(mps, model, settings)
    if reason is None:
        return mps, None
    text = f'device="auto" trains on the CPU, because two steps on MPS failed: {reason}.'
    return cpu, Event(DEVICE, "run", text)


def why_not_on(device: torch.device, model: Model, settings: Settings) -> str | None:
    """Return why a run with these settings fails on a device; None if a short trial succeeds.

    The trial leaves the model as it is.
    """
    trial = replace(
        settings,
        steps=ROWS,
        epochs=None,
        batch=ROWS,
        window=None,
        patience=None,
        validate_every=1,
        log_every=1,
        checkpoint_every=None,
    )
    try:
        rows = _rows(model)
        twin = copy.deepcopy(model).to(device)
        with ExitStack() as closing:
            Training(twin, rows, rows, trial, None, False, closing, warned=()).run()
    # Whatever fails on this device, the CPU is the answer; a mistake of the user fails there again.
    except Exception as error:
        return (str(error).partition("\n")[0] or type(error).__name__).rstrip(".")
    return None


def _rows(model: Model) -> dict[str, Tensor]:
    """Draw a few rows from p; given variables are zeros."""
    graph = model.graph
    steps = ROWS if any(graph.timed.values()) else None
    given = {
        name: torch.zeros(ROWS, *([ROWS] if graph.timed[name] else []), *shape)
        for name, shape in graph.given.items()
    }
    read: dict[str, Any] = {name: v for name, v in given.items() if graph.is_read_by_p(name)}
    drawn = model.sample(ROWS, steps=steps, seed=0, **read)
    return {name: drawn[name] for name in graph.observed} | given
