"""The runs of a server: their parts, computed once for each checkpoint, and their news.

While a run trains, its parts are computed again for new checkpoints only as far as that takes at
most a third of a percent of one core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aevb.page.metric_series import described
from aevb.page.server.metrics_tail import (
    START,
    Block,
    Position,
    end_of,
    parse_position,
    read_block,
)
from aevb.page.server.run_state import FINISHED, TRAINING, WAITING, Folder, Snapshot
from aevb.page.server.workers import Answer, Functions, Job, JobError, Worker
from aevb.training.seed_folders import distinct

SUMMARY, MAP, CHECKS = PARTS = ("summary", "map", "checks")
LIVE_PARTS = (SUMMARY, MAP)  # those that are computed while a run trains
POLL = 0.5  # seconds between two looks at the histories of runs
LOOK = 2.0  # seconds between two looks at the states of runs
HEARTBEAT = 15.0  # seconds of silence after which a client gets a comment
PAUSE = 300.0  # seconds to wait after an update while training, for each second of CPU time it took
MOST_CLIENTS = 100
MOST_EVENTS = 500  # events that wait for a slow client; then its stream ends, and it may come back
DECODE_TIMEOUT = 20.0
COMPARISON = "comparison"


class WaitingError(Exception):
    """A part that cannot be computed yet; the message says what it waits for."""


class FullError(Exception):
    """There are too many clients."""


@dataclass(frozen=True)
class Part:
    """A computed part. ``version`` changes with the checkpoint that it was computed from."""

    version: str
    text: bytes


@dataclass
class LiveRun:
    """A run and what is known of it."""

    index: int
    folder: Folder
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(WAITING))
    parts: dict[str, Part] = field(default_factory=dict)
    tasks: dict[tuple[str, str], asyncio.Task[Part]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # versions that could not be computed
    tail: Position = START  # how far its history was read
    looked: float = 0.0  # when its state was read last
    trouble: str = ""  # why it could not be read the last time
    changed: bool = False  # whether its state has changed since its history was read

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def training(self) -> bool:
        return self.snapshot.state == TRAINING

    def newest(self) -> str:
        """The version of a part that would be computed now."""
        return f"{self.snapshot.checkpoint or 'begun'}{'.live' if self.training else ''}"

    def version(self, part: str) -> str:
        """The version to show.

        While the run trains, it is the last computed one, because a part is not computed for each
        checkpoint. A client that asks for the first checkpoint's parts is the first to do so.
        """
        if not self.training:
            return self.newest()
        known = self.parts.get(part)
        first = "begun" if self.snapshot.checkpoint is None else "first"
        return first if known is None else known.version

    def described(self) -> dict[str, Any]:
        return {
            "run": self.index,
            "state": self.snapshot.state,
            "step": self.snapshot.step,
            "total": self.snapshot.total,
        }


@dataclass(eq=False)
class Client:
    """A stream of events, and the positions in the histories that it has reached."""

    positions: dict[int, Position]
    queue: asyncio.Queue[Event] = field(default_factory=lambda: asyncio.Queue(MOST_EVENTS))
    late: bool = False  # whether events were lost because it is too slow

    def put(self, event: Event) -> None:
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.late = True

    @property
    def last(self) -> str:
        """The text that says where to go on, the id of an event."""
        return ",".join(f"{i}.{position}" for i, position in sorted(self.positions.items()))


@dataclass(frozen=True)
class Event:
    """Something for all clients. Rows have a run and a block."""

    payloads: tuple[bytes, ...]
    run: int = -1
    block: Block | None = None


class Live:
    """All runs of a server, their workers and clients."""

    def __init__(
        self,
        folders: list[Path],
        functions: Functions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runs = [LiveRun(i, Folder(path)) for i, path in enumerate(folders)]
        self.functions, self.clock = functions, clock
        self.names = names_of(folders)
        known: Any = {"names": [str(path) for path in folders], "prepare": functions.prepare}
        # Decoding follows a hand on the page, so it waits for nothing else. The checks take long,
        # and a summary does not wait for them. Each process starts when it is needed.
        self.decoding = Worker("decoding", idle=False, **known)
        # A run that trains on all cores leaves an idle process no time at all, so what a page shows
        # meanwhile is limited by PAUSE instead.
        self.showing = Worker("showing", idle=False, **known)
        self.checking = Worker("checking", idle=True, **known)
        self.clients: set[Client] = set()
        self.allowed_at = 0.0  # when the next update of a training run may begin
        self._poller: asyncio.Task[None] | None = None
        self._compared: Part | None = None
        self._comparing: tuple[str, asyncio.Task[Part]] | None = None

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [task for run in self.runs for task in run.tasks.values()]
        tasks += [self._comparing[1]] if self._comparing is not None else []
        tasks += [self._poller] if self._poller is not None else []
        for task in tasks:
            task.cancel()
        for worker in (self.decoding, self.showing, self.checking):
            await worker.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Parts ----------------------------------------------------------------------------------------

    async def look(self, run: LiveRun) -> None:
        """Read the state of a run, and tell the clients what has changed.

        The state stays as it was if the folder cannot be read now.
        """
        run.looked = self.clock()
        try:
            found = await asyncio.to_thread(run.folder.look)
        except OSError as error:
            _report(run, error)
            return
        if found == run.snapshot:
            return
        versions = {part: run.version(part) for part in PARTS}
        run.snapshot, run.changed = found, True
        self.send("state", run.described())
        for part in PARTS:
            if run.version(part) != versions[part]:
                values = {"run": run.index, "part": part, "version": run.version(part)}
                self.send("version", values)

    async def part(self, run: LiveRun, name: str) -> Part:
        """Return a part of a run, computed once for each checkpoint.

        Raise :class:`WaitingError` or :class:`~aevb.page.server.workers.JobError`.
        """
        await self.look(run)
        self._refuse_early(run, name)
        version, known = run.newest(), run.parts.get(name)
        if known is not None and (
            known.version == version or (run.training and self.clock() < self.allowed_at)
        ):
            return known
        begun = [task for (part, _), task in run.tasks.items() if part == name]
        # While a run trains, checkpoints may come faster than a part can be computed.
        task = begun[0] if begun and run.training else self._task(run, name, version)
        return await asyncio.shield(task)

    def _refuse_early(self, run: LiveRun, name: str) -> None:
        if not run.snapshot.begun:
            raise WaitingError("The run has not begun yet.")
        if name == CHECKS and run.training:
            raise WaitingError("The checks are computed when the run has ended.")
        if name != SUMMARY and run.snapshot.checkpoint is None:
            raise WaitingError("The run has no checkpoint yet.")

    def _task(self, run: LiveRun, name: str, version: str) -> asyncio.Task[Part]:
        """Return the one task that computes a version of a part."""
        key = name, version
        if key not in run.tasks:
            task = asyncio.create_task(self._compute(run, name, version))
            run.tasks[key] = task
            task.add_done_callback(lambda done: _forget(run.tasks, key, done))
        return run.tasks[key]

    async def _compute(self, run: LiveRun, name: str, version: str) -> Part:
        live = run.training
        job = Job(self.functions.section, (run.path, name), {"live": live}, threads=self._threads())

        def tell(text: str) -> None:
            self.send("progress", {"run": run.index, "part": name, "text": text})

        worker = self.checking if name == CHECKS else self.showing
        try:
            answer = await worker.run(job, priority=1 + PARTS.index(name), tell=tell)
        except JobError:
            run.failed[name] = version
            raise
        part = Part(version, answer.text)
        if live:
            if name in run.parts:  # the first answer costs imports that no update repeats
                self._pause_after(answer)
            self.send("version", {"run": run.index, "part": name, "version": version})
        run.parts[name] = part
        return part

    def _pause_after(self, answer: Answer) -> None:
        self.allowed_at = max(self.allowed_at, self.clock()) + PAUSE * answer.cpu_seconds

    def _threads(self) -> int | None:
        """One thread while any run trains on this machine."""
        return 1 if any(run.training for run in self.runs) else None

    async def decode(self, run: LiveRun, request: dict[str, Any]) -> bytes:
        await self.look(run)
        self._refuse_early(run, MAP)
        job = Job(self.functions.decode, (run.path, request))
        return (await self.decoding.run(job, timeout=DECODE_TIMEOUT)).text

    async def comparison(self) -> Part:
        """Return the comparison of all runs, computed once for their checkpoints."""
        for run in self.runs:
            await self.look(run)
        if len(self.runs) < 2:
            raise WaitingError("A comparison needs two runs. Name them: aevb serve RUN RUN.")
        for run in self.runs:
            if run.training or run.snapshot.checkpoint is None:
                raise WaitingError("The runs are compared when all of them have ended.")
        version = "-".join(run.newest() for run in self.runs)
        if self._compared is not None and self._compared.version == version:
            return self._compared
        if self._comparing is None or self._comparing[0] != version:
            task = asyncio.create_task(self._compare(version))
            task.add_done_callback(_consumed)
            self._comparing = version, task
        comparing = self._comparing
        try:
            return await asyncio.shield(comparing[1])
        finally:
            if self._comparing is comparing and comparing[1].done():
                self._comparing = None

    async def _compare(self, version: str) -> Part:
        runs = {name: run.path for name, run in zip(self.names, self.runs, strict=True)}
        job = Job(self.functions.comparison, (runs,), threads=self._threads())
        answer = await self.checking.run(job, priority=9)
        self._compared = Part(version, answer.text)
        return self._compared

    # Events ---------------------------------------------------------------------------------------

    def described(self) -> list[dict[str, Any]]:
        """The runs as ``/api/runs`` lists them."""
        return [
            run.described()
            | {
                "name": name,
                "folder": str(run.path),
                "versions": {part: run.version(part) for part in PARTS},
            }
            for run, name in zip(self.runs, self.names, strict=True)
        ]

    def send(self, kind: str, values: dict[str, Any]) -> None:
        """Send an event to all clients."""
        event = Event((_payload(kind, values),))
        for client in self.clients:
            client.put(event)

    def events(self, last: str) -> AsyncIterator[bytes]:
        """Return the events of a new client, which has seen those up to ``last``."""
        if len(self.clients) >= MOST_CLIENTS:
            raise FullError
        return self._stream(Client(_positions(last, len(self.runs))))

    async def _stream(self, client: Client) -> AsyncIterator[bytes]:
        if len(self.clients) >= MOST_CLIENTS:
            return  # others came first; the client asks again and is refused
        # Not before: a stream that is never begun would not leave the set.
        self.clients.add(client)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            for run in self.runs:
                await self.look(run)
            yield b"retry: 2000\n" + _payload("hello", {"runs": self.described()})
            for run in self.runs:
                if run.snapshot.state != FINISHED:
                    # The summary has all rows of a finished run.
                    client.positions.setdefault(run.index, START)
                if run.index in client.positions:
                    async for text in self._catch_up(client, run, None):
                        yield text
            while not client.late:
                try:
                    event = await asyncio.wait_for(client.queue.get(), HEARTBEAT)
                except TimeoutError:
                    yield b":\n\n"
                    continue
                if event.block is None:
                    yield b"".join(event.payloads)
                    continue
                run, here = self.runs[event.run], client.positions.get(event.run, START)
                if here == event.block.start:
                    client.positions[event.run] = event.block.end
                    yield _with_id(client, event.payloads)
                elif here.inode != event.block.end.inode or here.offset < event.block.end.offset:
                    async for text in self._catch_up(client, run, event.block.end):
                        yield text
        finally:
            self.clients.discard(client)

    async def _catch_up(
        self, client: Client, run: LiveRun, end: Position | None
    ) -> AsyncIterator[bytes]:
        """Yield the rows between the position of one client and ``end``, or all there are."""
        client.positions.setdefault(run.index, START)
        while True:
            here = client.positions[run.index]
            until = None if end is None or end.inode != here.inode else end.offset
            block = await asyncio.to_thread(read_block, run.metrics, here, until)
            if block.end == here:
                return
            client.positions[run.index] = block.end
            yield _with_id(client, _rows(run.index, block))

    async def _poll(self) -> None:
        """Follow the runs as long as there are clients."""
        begun: set[int] = set()
        while self.clients:
            for run in self.runs:
                try:
                    if run.index not in begun:
                        run.tail = await asyncio.to_thread(end_of, run.metrics)
                        begun.add(run.index)
                    await self._follow(run)
                    run.trouble = ""
                except Exception as error:  # the other runs go on, and this one when it can
                    run.changed = True
                    _report(run, error)
            await asyncio.sleep(POLL)

    async def _follow(self, run: LiveRun) -> None:
        if self.clock() - run.looked >= LOOK:
            await self.look(run)
        if run.snapshot.state != FINISHED or run.changed:
            run.changed = False
            here = run.tail
            await self._follow_rows(run)
            if run.tail != here and not run.training:  # it has begun, or goes on
                await self.look(run)
        self._update(run)

    async def _follow_rows(self, run: LiveRun) -> None:
        while True:
            block = await asyncio.to_thread(read_block, run.metrics, run.tail)
            if block.end == run.tail:
                return
            run.tail = block.end
            event = Event(_rows(run.index, block), run.index, block)
            for client in self.clients:
                client.put(event)

    def _update(self, run: LiveRun) -> None:
        """Compute the parts of a new checkpoint of a training run, if there is time for it.

        All of them: the cheap ones alone would use up the time of the others.
        """
        if not run.training or self.clock() < self.allowed_at or run.tasks:
            return
        version = run.newest()
        for name in LIVE_PARTS:
            known = run.parts.get(name)
            if known is not None and known.version != version and run.failed.get(name) != version:
                self._task(run, name, version)


def names_of(folders: list[Path]) -> list[str]:
    """Return short names of runs, no two of them the same.

    >>> names_of([Path("runs/a/seed-0"), Path("runs/b/seed-0")])
    ['a', 'b']
    """
    if len(folders) == 1:
        return [folders[0].resolve().name or str(folders[0])]
    found = distinct(folders)
    return [found[folder] for folder in folders]


def _report(run: LiveRun, error: Exception) -> None:
    """Print on the server's terminal why a run cannot be followed, once for each reason."""
    if str(error) != run.trouble:
        run.trouble = str(error)
        print(f"aevb: {run.path} cannot be followed now, the server tries again:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)


def _forget(
    tasks: dict[tuple[str, str], asyncio.Task[Part]],
    key: tuple[str, str],
    done: asyncio.Task[Part],
) -> None:
    tasks.pop(key, None)
    _consumed(done)


def _consumed(done: asyncio.Task[Part]) -> None:
    """Mark the error of a task as seen: those who wait for it get it, if there are any."""
    if not done.cancelled():
        with contextlib.suppress(Exception):
            done.exception()


def _positions(last: str, count: int) -> dict[int, Position]:
    """Return the positions that the id of an event names; wrong ones are ignored.

    >>> _positions("0.1f.20.0,7.1.1.1,x", 2)
    {0: Position(inode=31, offset=32, check=0)}
    """
    found = {}
    for item in last[:20_000].split(","):
        index, _, text = item.partition(".")
        position = parse_position(text)
        if index.isdecimal() and len(index) < 6 and int(index) < count and position is not None:
            found[int(index)] = position
    return found


def _payload(kind: str, values: dict[str, Any]) -> bytes:
    """Return an event. JSON has no line breaks, so its text is one line."""
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return f"event: {kind}\ndata: {text}\n\n".encode("ascii")


def _rows(index: int, block: Block) -> tuple[bytes, ...]:
    """Return the events of a block: the start of a new history, and rows."""
    columns = block.columns()
    values: dict[str, Any] = {"run": index, "rows": len(block.rows), "columns": columns}
    values["series"] = [about for key in columns if (about := described(key)) is not None]
    values |= {"skipped": block.skipped} if block.skipped else {}
    reset = (_payload("reset", {"run": index}),) if block.reset else ()
    return reset + ((_payload("rows", values),) if block.rows or block.skipped else ())


def _with_id(client: Client, payloads: tuple[bytes, ...]) -> bytes:
    """Join events; the last of them gets the positions of the client as its id."""
    *before, last = payloads or (b"\n",)
    return b"".join([*before, b"id: ", client.last.encode("ascii"), b"\n", last])
