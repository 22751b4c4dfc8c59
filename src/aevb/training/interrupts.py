"""A request to end, as a run hears it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Flag:
    """Whether a run was asked to end."""

    def __init__(self) -> None:
        self.set = False

    def __bool__(self) -> bool:
        return self.set


@contextmanager
def interruptible() -> Iterator[Flag]:
    """Ctrl-C, or a request to end (SIGTERM, or SIGHUP when a terminal closes), finishes the step and saves; a second one stops at once.

    SIGHUP stays ignored where it is (``nohup``).
    """
    flag = Flag()

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.set:
            raise KeyboardInterrupt
        flag.set = True

    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, handle) for number in signals}
    except ValueError:  # not the main thread
        yield flag
        return
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
