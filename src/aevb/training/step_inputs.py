"""The inputs of a training step: tensors by kind and name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from torch import Tensor


class Kind(StrEnum):
    """What an input is."""

    BATCH = "batch"  # the rows of the step, by the keys of a batch
    UNIFORM = "uniform"  # random numbers for data that are drawn anew in every step
    NOISE = "noise"  # the noise of the estimate
    MOVED = "moved"  # the distorted copy of the rows
    BEFORE = "before"  # what a window reads of the window before it
    WINDOW = "window"  # whether a window starts its sequences, and the windows of its batch
    KL_WEIGHT = "KL weight"  # by latent, or one for all latents under the name ALL


Input = tuple[Kind, str]  # the key of an input: its kind and its name
Inputs = Mapping[Input, Tensor]
ALL = ""
START, COUNT = "start", "count"  # the inputs of kind WINDOW


def inputs_of(kind: Kind, values: Mapping[str, Tensor]) -> dict[Input, Tensor]:
    """Return tensors of one kind as inputs."""
    return {(kind, name): value for name, value in values.items()}


def values_of(kind: Kind, inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs of one kind, by their own names."""
    return {name: value for (its_kind, name), value in inputs.items() if its_kind is kind}
