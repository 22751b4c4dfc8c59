"""Keys of a batch: ``x`` holds the values of a variable, ``x?`` the mask of its known values.

``steps`` holds the mask of the steps that rows of different lengths have. Only this module builds
and parses such keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

STEPS = "steps"  # in data: which steps each row has; in a batch: the same as a mask [T, N, 1]
LENGTHS = "lengths"  # in data: how many steps each row has


def mask_of(name: str) -> str:
    """The key of a variable's mask.

    A batch has it if some values are missing. No variable can have such a name.
    """
    return f"{name}?"


def is_mask(key: str) -> bool:
    """Whether a key of a batch holds a mask."""
    return key.endswith("?")


def variable_of(key: str) -> str:
    """The variable whose values or whose mask a key holds."""
    return key.removesuffix("?")


def real_steps(batch: Mapping[str, Tensor], *, timed: bool = True) -> Tensor | None:
    """The mask of the steps that rows have, [T, N, 1].

    None if all rows have all steps, or if the variable is not ``timed``.
    """
    return batch.get(STEPS) if timed else None


def masks_of(batch: Mapping[str, Tensor], name: str, *, timed: bool) -> list[Tensor]:
    """The masks of a variable: its known values, and the real steps if it is ``timed``."""
    masks = batch.get(mask_of(name)), real_steps(batch, timed=timed)
    return [mask for mask in masks if mask is not None]
