"""Ctrl-C and termination signals during a run: the run saves a checkpoint and stops."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A run was interrupted and has saved a checkpoint.

    ``for_commands`` is the command line's message.
    """

    def __init__(self, text: str, for_commands: str = "") -> None:
        super().__init__(text)
        self.for_commands = for_commands or text


def stopped(text: str, what: str, where: Path | None) -> Stopped:
    """Return the error of an interrupted run, with the way to continue it from its folder."""
    if where is None:
        return Stopped(text)
    python, command = (
        f"{text}; {how} continues {what} from {where}"
        for how in ("resume=True", "the same command with --resume")
    )
    return Stopped(python, command)


class Flag:
    """Whether the run was interrupted."""

    def __init__(self) -> None:
        self._set = False

    def __bool__(self) -> bool:
        return self._set

    def ask_to_stop(self) -> None:
        self._set = True


@contextmanager
def interruptible() -> Iterator[Flag]:
    """Set a flag on Ctrl-C, SIGTERM or SIGHUP, so that the run finishes its step and saves.

    A second signal stops the run at once. SIGHUP stays ignored if it was ignored before
    (``nohup``).
    """
    flag = Flag()

    def handle(number: int, frame: FrameType | None) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.ask_to_stop()

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
