"""The best validation of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Best(NamedTuple):
    """The best validation of a run."""

    step: int
    value: float

    @classmethod
    def of(cls, record: Mapping[str, Any] | None) -> Best | None:
        """Return the best validation of a checkpoint's record."""
        return None if record is None else cls(record["step"], record["value"])

    def record(self) -> dict[str, Any]:
        """Return it for a checkpoint."""
        return {"value": self.value, "step": self.step}


def better(best: Best | None, step: int, value: float) -> Best | None:
    """Return the better of the best validation so far and another one.

    The earlier one wins a tie, and a value that is not finite is never the best.

        >>> better(Best(10, -3.0), 20, -2.0)
        Best(step=20, value=-2.0)
    """
    if math.isfinite(value) and (best is None or value > best.value):
        return Best(step, value)
    return best
