"""Cut batches of sequences of very different lengths to their own longest row.

Padded steps cost as much as real ones. A recorded step has one shape, so its batches keep the
length of the longest row of all. If most batches are much shorter, cutting them saves more than a
recording does.
"""

from __future__ import annotations

import torch

from aevb.data.sources import Resident, Source
from aevb.estimate.keys import STEPS
from aevb.training.row_order import Order
from aevb.training.step_inputs import Input, Inputs, Kind

# Cut batches if their mean length is below this share of the longest row's: a recorded step of a
# recurrence takes half the time of one that runs as written.
SHARE = 0.5
BATCHES = 100  # judged


def cropping_pays(source: Source, order: Order) -> bool:
    """Return whether most batches are much shorter than the longest row.

    It reads no clock: a run is a function of its settings. A GPU replays graphs of one shape.
    """
    if not isinstance(source, Resident) or STEPS not in source.batch or source.like.is_cuda:
        return False
    lengths = source.batch[STEPS][..., 0].sum(0)
    batches = min(BATCHES, max(1, round(order.n / order.batch)))
    longest = lengths[order.rows(0, batches)].view(batches, -1).amax(1).double().mean()
    return bool(longest < SHARE * len(source.batch[STEPS]))


def cropped(inputs: Inputs) -> dict[Input, torch.Tensor]:
    """Return the inputs of a step without the time steps that no row of its batch has.

    The noise was drawn for all steps, so that the other steps keep theirs.
    """
    real = inputs[Kind.BATCH, STEPS]
    steps, longest = len(real), int(real.any(1).sum())
    found = dict(inputs)
    for key, value in inputs.items():
        timed = value.dim() > 2 and value.shape[-3] == steps
        if timed and key[0] in (Kind.BATCH, Kind.UNIFORM, Kind.NOISE):
            found[key] = value.narrow(-3, 0, longest)
    return found
