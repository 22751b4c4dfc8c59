"""Worker processes of a sweep: each carries out one job at a time, on one thread.

A worker ends at once if its parent dies, so that a killed sweep leaves no process behind. If the
parent is interrupted, each worker saves a checkpoint of its run first.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

from aevb.comparison.sweep import Finished, Job, Sweep, Told, attempt
from aevb.training.interrupts import Stopped, interruptible

LOOK = 0.2  # seconds between two looks at the interrupt flag


def carry_out_in_parallel(sweep: Sweep, jobs: Sequence[Job], workers: int, told: Told) -> None:
    """Carry out jobs in several processes.

    ``told(name, results or error, seconds)`` is called after each. Raise :class:`Stopped` after an
    interrupt.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(jobs))
    busy: dict[Connection, tuple[Any, Job, float]] = {}
    with interruptible() as interrupted:
        for _ in range(min(workers, len(jobs))):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(sweep, there), daemon=True)
            process.start()
            there.close()
            _hand_out(here, process, waiting, busy)
        try:
            while busy:
                if interrupted:
                    _stop(busy)
                    raise Stopped("stopped; the same command goes on")
                for connection in wait(list(busy), LOOK):
                    assert isinstance(connection, Connection)
                    process, job, start = busy.pop(connection)
                    try:
                        outcome: list[Finished] | str = connection.recv()
                    except EOFError:
                        outcome = (
                            "its process died; if memory was short, use fewer processes (--jobs 1)"
                        )
                        told(job.name, outcome, time.perf_counter() - start)
                        if not busy:
                            raise _died() from None
                        continue
                    told(job.name, outcome, time.perf_counter() - start)
                    _hand_out(connection, process, waiting, busy)
        finally:
            for process, _, _ in busy.values():
                process.kill()


def _died() -> ValueError:
    return ValueError("All processes of the sweep died. Repeat the command with --jobs 1.")


def _hand_out(
    connection: Connection,
    process: Any,
    waiting: list[Job],
    busy: dict[Connection, tuple[Any, Job, float]],
) -> None:
    """Give the next job to a worker, or let it end if none is left."""
    if not waiting:
        connection.close()
        process.join()
        return
    job = waiting.pop()
    connection.send(job)
    busy[connection] = process, job, time.perf_counter()


def _stop(busy: dict[Connection, tuple[Any, Job, float]]) -> None:
    """Let each worker save a checkpoint and end."""
    for process, _, _ in busy.values():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    for process, _, _ in busy.values():
        process.join()


def _work(sweep: Sweep, connection: Connection) -> None:
    """Carry out jobs until the parent closes the connection."""
    # Ctrl-C in a terminal reaches all processes of its group; the parent alone decides.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")  # the parent has loaded the same rows and warned
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            connection.send(attempt(sweep, connection.recv()))


def _end_with_parent() -> None:
    """Wait for the end of the parent process, then end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
