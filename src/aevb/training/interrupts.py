"""Handle Ctrl-C and termination signals during a run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Flag:
    """Whether the run was interrupted."""

    def __init__(self) -> None:
        self.set = False

    def __bool__(self) -> bool:
        return self.set


@contextmanager
def interruptible() -> Iterator[Flag]:
    """Set a flag on Ctrl-C, SIGTERM or SIGHUP, so that the run finishes its step and saves.

    A second signal stops the run at once. SIGHUP stays ignored if it was ignored before
    (``nohup``).
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
