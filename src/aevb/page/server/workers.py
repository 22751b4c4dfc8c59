"""Child processes that compute the parts of pages, so that the server never waits for a model.

A worker has one child, which is started for its first job and again if it dies. The jobs of a
worker run one after another, those of a lower ``priority`` number first.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MOST_WAITING = 64  # jobs that wait for a worker
START = 300.0  # seconds that a child may take more for its first job, to start and to import torch


@dataclass(frozen=True)
class Functions:
    """The functions that compute the parts of a page, as ``module:name``.

    They are named, not passed, because only the child imports them: they need torch.

    ``section(folder, part, live=…)`` returns the JSON text of a part, ``decode(folder, request)``
    that of decoded latents, and ``comparison({name: folder})`` that of several runs. A function
    that takes ``progress`` may call it with sentences for the user. ``prepare`` is called once in
    each child, before its first job.
    """

    section: str
    decode: str
    comparison: str
    prepare: Job | None = None


@dataclass(frozen=True)
class Job:
    """A call of one of the functions; ``threads`` is None for torch's default."""

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    threads: int | None = 1


@dataclass(frozen=True)
class Answer:
    text: bytes
    cpu_seconds: float


class JobError(Exception):
    """A job without an answer; the message is a sentence for the user.

    ``mistaken`` says that the request is wrong, and not the run or the server.
    """

    def __init__(self, text: str, *, mistaken: bool = False) -> None:
        super().__init__(text)
        self.mistaken = mistaken


class WorkerDiedError(JobError):
    """The child process ended, or did not answer in time."""


Tell = Callable[[str], None]


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    job: Job = field(compare=False)
    timeout: float = field(compare=False)
    tell: Tell | None = field(compare=False)
    answer: asyncio.Future[Answer] = field(compare=False)


class Worker:
    """One child process and its queue of jobs.

    ``idle`` runs the child only when no other process wants the cores. ``names`` are the folders as
    the user typed them: messages show no other absolute path. ``prepare`` is called once in each
    child, before its first job.
    """

    def __init__(
        self, name: str, *, idle: bool, names: list[str], prepare: Job | None = None
    ) -> None:
        self.name, self.idle, self.names, self.prepare = name, idle, names, prepare
        self.started = 0  # children so far
        self._queue: asyncio.PriorityQueue[_Waiting] = asyncio.PriorityQueue(MOST_WAITING)
        self._number = 0
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"aevb-{name}")
        self._child: tuple[Any, Connection] | None = None
        self._warm = False  # whether the child has answered
        self._closed = False

    async def run(
        self, job: Job, *, priority: int = 0, timeout: float = 1800.0, tell: Tell | None = None
    ) -> Answer:
        """Return the answer to a job; raise :class:`JobError` if there is none.

        ``tell`` gets the job's reports of progress, in the event loop.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=f"aevb {self.name}")
        self._number += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait(_Waiting(priority, self._number, job, timeout, tell, answer))
        except asyncio.QueueFull:
            raise JobError("The server is busy with earlier requests. Ask again later.") from None
        return await answer

    async def close(self) -> None:
        self._closed = True
        child = self._child
        if child is not None:
            child[0].kill()  # a thread that waits for it then sees the end of the connection
            await asyncio.to_thread(child[0].join, 2)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            waiting = await self._queue.get()
            if waiting.answer.done():  # nobody waits for it any more
                continue
            tell = waiting.tell

            def report(text: str, tell: Tell | None = tell) -> None:
                if tell is not None:
                    loop.call_soon_threadsafe(tell, text)

            try:
                answer = await loop.run_in_executor(
                    self._thread, self._exchange, waiting.job, waiting.timeout, report
                )
            except JobError as error:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            except asyncio.CancelledError:
                waiting.answer.cancel()
                raise
            except Exception as error:  # a mistake here must not leave the others waiting
                traceback.print_exception(error, file=sys.stderr)
                if not waiting.answer.done():
                    text = f"This could not be computed ({type(error).__name__}). The terminal of "
                    waiting.answer.set_exception(JobError(f"{text}aevb serve has the details."))
            else:
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)

    # In the worker's thread -----------------------------------------------------------------------

    def _exchange(self, job: Job, timeout: float, report: Tell) -> Answer:
        process, connection = self._child or self._start()
        until = time.monotonic() + timeout + (0.0 if self._warm else START)
        try:
            connection.send(job)
            while connection.poll(max(0.0, until - time.monotonic())):
                kind, *values = connection.recv()
                self._warm = self._warm or kind != "progress"
                if kind == "answer":
                    return Answer(*values)
                if kind == "progress":
                    report(public_text(values[0], self.names))
                    continue
                text, mistaken = values
                raise JobError(public_text(text, self.names), mistaken=mistaken)
        except (EOFError, OSError):
            raise WorkerDiedError(self._obituary(process)) from None
        self._end_child()
        raise WorkerDiedError(
            f"The computation took longer than {timeout:g} s and was stopped. Ask again."
        )

    def _start(self) -> tuple[Any, Connection]:
        if self._closed:
            raise JobError("The server is stopping.")
        context = multiprocessing.get_context("spawn")
        try:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child,
                args=(theirs, self.idle, self.prepare),
                name=f"aevb {self.name}",
                daemon=True,
            )
            process.start()
        except OSError as error:
            raise JobError(
                f"The process that computes this could not be started: {error.strerror}."
            ) from None
        theirs.close()
        self.started += 1
        self._child, self._warm = (process, ours), False
        if self._closed:  # meanwhile, and close() saw no child to end
            self._end_child()
            raise JobError("The server is stopping.")
        return process, ours

    def _obituary(self, process: Any) -> str:
        """Return why the child ended, after it has ended."""
        process.join(2)
        code = process.exitcode
        self._end_child()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        cause = " The memory may be full." if code == -signal.SIGKILL else ""
        return (
            f"The process that computes this ended ({how}).{cause} A new one starts with the next "
            f"request: ask again."
        )

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            process, connection = child
            process.kill()
            connection.close()


def public_text(text: str, names: list[str]) -> str:
    """Return a message without absolute paths, except those that the user typed.

    >>> public_text("/home/a/runs/x/model.json is missing.", ["x"])
    '…/model.json is missing.'
    >>> public_text("/data/run/model.json is missing.", ["/data/run"])
    '/data/run/model.json is missing.'
    """
    kept = [name for name in names if name.startswith(("/", "~"))]

    def shorten(found: re.Match[str]) -> str:
        path = found[0]
        if any(path == name or path.startswith(name.rstrip("/") + "/") for name in kept):
            return path
        return "…/" + path.rstrip("/").rpartition("/")[2]

    return re.sub(r"(?<![\w.…/])/[^\s'\",;:()]+", shorten, text)


# In the child -------------------------------------------------------------------------------------


def _child(connection: Connection, idle: bool, prepare: Job | None) -> None:
    """Answer jobs until the server closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its children itself
    _yield_to_others(idle)
    threading.Thread(target=_end_with_server, daemon=True).start()
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if prepare is not None:  # again with the next job if it fails
                _function(prepare)(*prepare.arguments)
                prepare = None
            function = _function(job)
            began = time.process_time()  # importing torch, once, is not the cost of an answer
            text = _call(function, job, connection)
            connection.send(("answer", text.encode(), time.process_time() - began))
        except BrokenPipeError:
            return
        except Exception as error:
            connection.send(("error", *_told(error)))


def _function(job: Job) -> Callable[..., Any]:
    module, _, name = job.function.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _call(function: Callable[..., Any], job: Job, connection: Connection) -> str:
    _use_threads(job.threads)
    options = dict(job.options)
    if "progress" in inspect.signature(function).parameters:
        options["progress"] = lambda text: connection.send(("progress", str(text)))
    found = function(*job.arguments, **options)
    if not isinstance(found, str):
        raise TypeError(f"{job.function} returned {type(found).__name__} instead of JSON text")
    return found


def _told(error: Exception) -> tuple[str, bool]:
    """Return a sentence for the user, and whether the request was wrong.

    A traceback stays on the server's terminal.
    """
    checkpoint = sys.modules.get("aevb.training.checkpoint")  # it imports torch
    if checkpoint is not None and isinstance(
        error, checkpoint.CheckpointError | checkpoint.TrainingError
    ):
        return str(error), False
    if isinstance(error, ValueError):
        return str(error), True
    if isinstance(error, OSError) and error.filename:
        return f"{Path(str(error.filename)).name}: {error.strerror}.", False
    traceback.print_exception(error, file=sys.stderr)
    return (
        f"This could not be computed ({type(error).__name__}). The terminal of aevb serve has the "
        f"details."
    ), False


def _use_threads(count: int | None) -> None:
    torch = sys.modules.get("torch")
    if torch is None:  # the function needs none
        return
    wanted = count or cores()
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _yield_to_others(idle: bool) -> None:
    """Let every other process go first; the system may not allow it."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19 if idle else 10)
    if idle and hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _end_with_server() -> None:
    server = multiprocessing.parent_process()
    if server is not None:
        wait([server.sentinel])
        os._exit(1)
