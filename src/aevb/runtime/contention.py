"""Stop OpenMP threads from spinning while other processes need the same cores.

torch's OpenMP threads meet at a barrier after every operation. A thread that arrives early spins
there for some milliseconds. With free cores that is the fastest way to wait. If another process
occupies the core of the last thread, each barrier costs a time slice, and a run takes ten to fifty
times as long as on one thread.

torch's wheels for Linux contain libgomp. It hardly spins while a process has more OpenMP threads
than cores (GNU libgomp manual, GOMP_SPINCOUNT). This module therefore holds a team of idle threads
as long as threads of this process wait for cores. Every operation runs on the same threads as
before, so results stay the same to the last bit.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

FIRST = 0.02  # seconds until the first measurement
PERIOD = 0.1  # seconds between two measurements
ALL = 0.93  # a process that used this share of the cores' time counts as having used all of it
UNLOADED = 1.0  # seconds between two looks whether torch is loaded
LINGER = 1.0  # seconds that teams are held after the last context: another one may follow
COST = 500  # the pause between two measurements is at least COST times the time of one
# Threads that do not spin take about twice as long for small operations on free cores, and a fifth
# of the time on contended ones. So they stop spinning if a thread of this process has waited for a
# core for a good part of the last half second, and not because another process took some
# milliseconds: the mean over a window is compared with both limits.
WINDOW = 0.5  # seconds, the time constant of the mean
CONTENDED = 0.25  # above this share of the time, threads stop spinning
FREE = 0.05  # below this share, they spin again

TASKS = "/proc/self/task"
# Linux has this file, unless it was built without it. Elsewhere nothing is measured.
SCHEDSTAT = os.path.exists("/proc/self/schedstat")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Keep OpenMP threads from spinning, inside the context, while this process waits for cores.

    Contexts may be nested, in any thread.
    """
    watch.enter()
    try:
        yield
    finally:
        watch.leave()


class Watch:
    """A thread that measures contention while any context is open, and sleeps otherwise.

    There is one per process, because there is one libgomp.
    """

    def __init__(self) -> None:
        self.lock, self.inside = Lock(), 0
        self.entered, self.left = Event(), Event()
        self.thread: Thread | None = None

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1 and SCHEDSTAT:
                self.left.clear()
                self.entered.set()
                if self.thread is None or not self.thread.is_alive():
                    # A forked process does not inherit the thread.
                    self.thread = Thread(target=self._run, name="aevb-contention", daemon=True)
                    self.thread.start()

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.entered.clear()
                self.left.set()

    def _run(self) -> None:
        policy = Policy()
        while True:
            self.entered.wait()
            _follow(self.left, policy)
            if not self.entered.wait(LINGER):
                policy.release()


watch = Watch()


def _follow(left: Event, policy: Policy) -> None:
    """Measure contention, and hold or release teams, until ``left`` is set."""
    while "torch" not in sys.modules:  # there are no OpenMP threads
        if left.wait(UNLOADED):
            return
    policy.begin()
    before, began, used, pause = waited(), time.perf_counter(), time.process_time(), FIRST
    while not left.wait(pause):
        start = time.thread_time()
        now, at, using = waited(), time.perf_counter(), time.process_time()
        longest = max((now[task] - before[task] for task in now if task in before), default=0)
        # If the process used all cores, its threads waited only for each other.
        seconds = at - began
        all_used = using - used > ALL * CORES * seconds
        policy.follow(0.0 if all_used else longest / 1e9 / seconds, seconds)
        before, began, used = now, at, using
        pause = max(PERIOD, COST * (time.thread_time() - start))


def waited() -> dict[str, int]:
    """Return, for each thread of this process, the nanoseconds that it waited for a core."""
    found = {}
    for task in os.listdir(TASKS):
        try:
            with open(f"{TASKS}/{task}/schedstat", "rb", buffering=0) as file:
                found[task] = int(file.read().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return found


class Policy:
    """Hold idle teams while the mean share of waiting is high, until it is low again."""

    def __init__(self) -> None:
        self.teams: list[IdleTeam] = []
        self.mean: float | None = None

    def begin(self) -> None:
        """Forget the mean: nothing was measured for a while."""
        self.mean = None

    def follow(self, share: float, seconds: float) -> None:
        """Take into account that a thread waited for a core for ``share`` of the last ``seconds``.

        The thread is the one that waited longest. The first measurement is the first mean, so a
        short run beside busy processes stops spinning at once.
        """
        if self.mean is None:
            self.mean = share
        self.mean += (share - self.mean) * (1 - math.exp(-seconds / WINDOW))
        if self.mean > CONTENDED and not self.teams:
            self.teams = [IdleTeam(library) for library in openmp() if can_start(surplus(library))]
        elif self.mean < FREE:
            self.release()

    def release(self) -> None:
        while self.teams:
            self.teams.pop().release()


def openmp() -> list[ctypes.CDLL]:
    """Return every libgomp that this process has loaded: torch's, and other packages' copies."""
    with open("/proc/self/maps") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if "libgomp" in line}
    return [ctypes.CDLL(path) for path in sorted(paths) if os.path.exists(path)]


def surplus(library: ctypes.CDLL) -> int:
    """Return a number of threads that exceeds the number of cores.

    libgomp counts the cores that the process had when libgomp was loaded.
    """
    return max(CORES, int(library.omp_get_num_procs())) + 1


def can_start(count: int) -> bool:
    """Return whether the system allows ``count`` more threads.

    If it does not, libgomp would end the process.
    """
    end, started = Event(), []
    try:
        for _ in range(count):
            thread = Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True


class IdleTeam:
    """A thread with an OpenMP team of its own, which has run an empty parallel region and sleeps.

    The team ends with the thread.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.ended, self.ready = Event(), Event()
        self.thread = Thread(target=self._hold, args=(library,), name="aevb-idle-team", daemon=True)
        self.thread.start()
        self.ready.wait()

    def _hold(self, library: ctypes.CDLL) -> None:
        # Any function without side effects will do.
        harmless = ctypes.cast(library.omp_get_level, ctypes.c_void_p)
        library.GOMP_parallel(harmless, None, ctypes.c_uint(surplus(library)), ctypes.c_uint(0))
        self.ready.set()
        self.ended.wait()

    def release(self) -> None:
        self.ended.set()
        self.thread.join()
