"""OpenMP threads do not spin while threads of this process wait for cores, and spin again
afterwards; results do not change.
"""

import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from aevb import Bernoulli, fit, zoo
from aevb.runtime import contention
from aevb.runtime.contention import Policy, can_start, sharing_cores, waited

linux = pytest.mark.skipif(
    not contention.SCHEDSTAT, reason="the scheduler's statistics are Linux's"
)
gnu = pytest.mark.skipif(
    not contention.SCHEDSTAT or not contention.openmp(), reason="torch does not use libgomp here"
)


class Team:
    def __init__(self, library):
        held.append(self)

    def release(self):
        held.remove(self)


held: list[Team] = []


@pytest.fixture
def policy(monkeypatch):
    """A policy whose teams are only counted, in ``held``."""
    held.clear()
    monkeypatch.setattr(contention, "openmp", lambda: ["a libgomp"])
    monkeypatch.setattr(contention, "surplus", lambda library: 2)
    monkeypatch.setattr(contention, "IdleTeam", Team)
    return Policy()


def names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aevb-")]


def test_a_team_is_held_while_cores_are_contended_and_a_while_longer(policy):
    policy.follow(0.0, 0.02)
    for _ in range(4):
        policy.follow(0.6, 0.1)
    assert len(held) == 1
    for _ in range(2):
        policy.follow(0.0, 0.1)
    assert len(held) == 1
    for _ in range(12):
        policy.follow(0.0, 0.1)
    assert not held


def test_a_first_measurement_of_contention_stops_the_spinning_at_once(policy):
    policy.follow(0.5, 0.02)
    assert len(held) == 1
    policy.begin()  # another run begins, on free cores
    policy.follow(0.0, 0.02)
    assert not held


def test_short_waits_do_not_stop_the_spinning(policy):
    """A process that takes a core for 30 ms, twice a second, costs less than not to spin."""
    for _ in range(20):
        for share in (0.0, 0.3, 0.0, 0.0, 0.0):
            policy.follow(share, 0.1)
            assert not held


def test_no_team_where_the_system_allows_no_more_threads(policy, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not can_start(2)
        policy.follow(1.0, 0.1)
    assert not held
    assert can_start(2)
    policy.follow(1.0, 0.1)
    assert len(held) == 1


def watching():
    return contention.watch.entered.is_set() and not contention.watch.left.is_set()


@linux
def test_contexts_are_nested_and_share_one_thread_that_sleeps_outside():
    for _ in range(3):
        with sharing_cores():
            with pytest.raises(RuntimeError, match="mine"), sharing_cores():
                raise RuntimeError("mine")
            assert watching()
        assert not watching()
        assert names() == ["aevb-contention"]


@linux
def test_teams_are_released_when_nobody_is_inside_any_more(policy, monkeypatch):
    # it waits all the time
    monkeypatch.setattr(contention, "waited", lambda: {"a thread": time.perf_counter_ns()})
    with sharing_cores():
        end = time.perf_counter() + 10
        while not held and time.perf_counter() < end:
            time.sleep(0.01)
        assert len(held) == 1
    assert len(held) == 1  # for a while: someone may come again
    end = time.perf_counter() + 10
    while held and time.perf_counter() < end:
        time.sleep(0.01)
    assert not held


@linux
def test_nothing_is_measured_before_torch_is_loaded(monkeypatch):
    """A process that never loads torch, such as the server of pages, pays nothing for it."""
    measured = []
    monkeypatch.setattr(contention, "UNLOADED", 0.01)
    monkeypatch.setattr(contention, "waited", lambda: measured.append(sys.modules["torch"]) or {})
    left, loaded = threading.Event(), sys.modules["torch"]
    follower = threading.Thread(target=contention._follow, args=(left, Policy()))
    with monkeypatch.context() as unloaded:
        unloaded.delitem(sys.modules, "torch")
        follower.start()
        time.sleep(0.1)
        assert not measured
    end = time.perf_counter() + 10
    while len(measured) < 2 and time.perf_counter() < end:
        time.sleep(0.01)
    left.set()
    follower.join(10)
    assert measured[:2] == [loaded, loaded]


@linux
def test_a_run_watches_for_contention_and_changes_no_setting():
    seen, before = [], torch.get_num_threads()
    x = (torch.rand(40, 6) < 0.5).float()
    model = zoo.vae(6, 2, hidden=(4,), likelihood=Bernoulli())
    fit(
        model,
        {"x": x},
        validation={"x": x},
        steps=4,
        batch=10,
        after=lambda *_: seen.append(watching()),
    )
    assert seen
    assert all(seen)
    assert not watching()
    assert torch.get_num_threads() == before
    with pytest.raises(TypeError):
        fit(model, {"x": x}, step=4)
    assert not watching()


@linux
def test_waiting_for_a_core_is_measured():
    """Two threads on one core wait half of the time each; one that sleeps does not wait."""
    mine, end = os.sched_getaffinity(0), time.perf_counter() + 0.4
    blocks = [bytes(1 << 20)] * 2
    found = {}

    def busy(block):
        os.sched_setaffinity(0, {min(mine)})
        before = waited()[str(threading.get_native_id())]
        while time.perf_counter() < end:
            hashlib.sha256(block).digest()  # without the interpreter's lock
        found[threading.get_native_id()] = (waited()[str(threading.get_native_id())] - before) / 1e9

    threads = [threading.Thread(target=busy, args=(block,)) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found.values()) > 0.2  # 0.4 but for the start; more beside other processes


CHILD = """
import contextlib, hashlib, os, time
import torch
from aevb import Bernoulli, fit, zoo
from aevb.runtime import contention
from aevb.training import fit as fitting

torch.set_num_threads(2)
a = torch.zeros(100_000)

# CPU seconds that the other thread of the team spends after a product, while this one sleeps.
def spun():
    a.add_(1)
    began = time.process_time()
    time.sleep(0.2)
    return time.process_time() - began

teams = [contention.IdleTeam(library) for library in contention.openmp()]
idle = min(spun() for _ in range(3))
for team in teams:
    team.release()
assert idle < max(spun() for _ in range(3)) / 3

def steps(count):  # CPU seconds
    torch.manual_seed(0)
    model = zoo.vae(256, 20, hidden=(300, 300), likelihood=Bernoulli())
    began = time.process_time()
    x = (torch.rand(500, 256) < 0.5).float()
    fit(model, {"x": x}, steps=count, batch=500, seed=0, progress=False)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return time.process_time() - began, hashlib.sha256(weights).hexdigest()

core = min(os.sched_getaffinity(0))
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), {core})
shared, weights = steps(3)
fitting.sharing_cores = contextlib.nullcontext
time.sleep(contention.LINGER + 0.5)  # until the team is gone
spinning, same = steps(3)
print(shared, spinning, weights == same)
"""


@pytest.mark.slow
@gnu
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_two_threads_on_one_core_do_not_spin_and_compute_the_same():
    """The two threads of the team wait for the same core: that is contention on any machine."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    shared, spinning, equal = done.stdout.split()
    assert equal == "True"
    assert float(shared) < float(spinning) / 2
