"""The place in the user's code that a warning names."""

from __future__ import annotations

import sys

PASSED = ("aevb", "contextlib")  # contextlib calls the functions that a context manager decorates


def frames_of_aevb() -> int:
    """Return the stack level at which a warning names the line that called aevb."""
    level, frame = 0, sys._getframe(1)
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED
    ):
        level, frame = level + 1, frame.f_back
    return level + 1
