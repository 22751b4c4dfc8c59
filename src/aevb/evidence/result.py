"""What an evidence is: a number an example, its error, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    """log p(x) an example, its standard error (0 where exact), and how it was found."""

    value: Tensor
    stderr: Tensor
    method: str
