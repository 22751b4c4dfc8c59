"""The server of pages: who may ask, histories that grow, states of runs, and its processes."""

import asyncio
import fcntl
import http.client
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from aevb.cli.serve import PageServer, folders_of
from aevb.page.server import listening
from aevb.page.server import live as live_module
from aevb.page.server.access import HEADERS, Access
from aevb.page.server.app import create_app
from aevb.page.server.listening import Server, open_socket
from aevb.page.server.live import Live
from aevb.page.server.metrics_tail import START, end_of, parse_position, read_block
from aevb.page.server.run_state import Folder
from aevb.page.server.workers import Answer, Functions, Job, JobError, Worker, public_text
from aevb.runtime.process_namespace import process_namespace
from aevb.training.settings import Settings

# What the children compute: they import this file.


def section(folder, part, *, live=False, progress=None):
    with (folder / "calls").open("a") as file:
        file.write(f"{part} {'live' if live else 'whole'}\n")
    if (folder / "die").exists():
        (folder / "die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (folder / "wrong").exists():
        raise ValueError(f"{folder.resolve()}/model.json is damaged, see /etc/hosts.")
    if (folder / "bug").exists():
        raise KeyError("secret")
    if part == "checks":
        progress("half of it")
        while (folder / "hold").exists():
            pass
    return json.dumps({"part": part, "process": os.getpid()})


def decode(folder, request):
    if "z" not in request:
        raise ValueError("The request names no z.")
    return json.dumps({"x": request["z"]})


def comparison(runs):
    return json.dumps([[name, folder.name] for name, folder in runs.items()])


def sleeping(seconds):
    time.sleep(seconds)
    return json.dumps(seconds)


STUBS = Functions("test_server:section", "test_server:decode", "test_server:comparison")
FILES = {"app.js": "console.log(1)", "app.css": "p {}"}
SHELL = '<!doctype html><script src="/app.js" type="module"></script>'


def make_run(path, step=30, *, name_of_row="elbo", rows=30, **settings):
    """Write the files of a run by hand."""
    path.mkdir(parents=True)
    (path / "model.json").write_text("{}")
    write_lock(path)
    write_rows(path, range(1, rows + 1), name_of_row)
    checkpoint(path, step, **settings)
    return path


def write_lock(path, process=None, namespace=None):
    """Write the lock of a run as its trainer does, by default as this process."""
    lines = [process or os.getpid(), "0" * 32, namespace or process_namespace()]
    (path / ".lock").write_text("".join(f"{line}\n" for line in lines))


def write_rows(path, steps, name="elbo", mode="w"):
    lines = [json.dumps({"step": i, name: -1 / i, "lr": 1.0, "phase": "joint"}) for i in steps]
    with (path / "metrics.jsonl").open(mode) as file:
        file.write("".join(line + "\n" for line in lines))


def checkpoint(path, step, *, waited=0, **settings):
    record = Settings(**{"steps": 30, **settings}).record() | {"data": "100 rows, abc"}
    place = path / "checkpoints" / f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    state = {"settings": record, "waited": waited}
    (place / "manifest.json").write_text(json.dumps({"step": step, "state": state}))


@contextmanager
def training(path):
    """Hold the lock of a run, as a trainer does."""
    with (path / ".lock").open("r") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def serving(*folders, token=None, functions=STUBS):
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    app = create_app(
        list(folders), Access("127.0.0.1", port, token), functions, shell=SHELL, static=FILES
    )
    started = threading.Event()
    server = Server(app, started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    assert started.wait(10)
    try:
        yield SimpleNamespace(port=port, live=app.state.live)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
    assert not thread.is_alive()


def ask(server, path, method="GET", host=None, **headers):
    """Send a request exactly as it is written; return status, headers and body."""
    host = f"127.0.0.1:{server.port}" if host is None else host
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()


def get(server, path, **headers):
    status, _, body = ask(server, path, **headers)
    return status, json.loads(body)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>")
    with serving(folder) as server:
        yield server


def has_headers(headers):
    found = {name: headers.get(name.lower()) for name in HEADERS}
    cache = found.pop("Cache-Control")
    assert cache in ("no-store", "no-cache, private")
    assert found == {name: value for name, value in HEADERS.items() if name != "Cache-Control"}


# Who may ask --------------------------------------------------------------------------------------

DEEP = quote("[" * 30_000)
REFUSED = {
    "parent folders": ("/../../etc/passwd", {}, 404),
    "encoded parent folders": ("/..%2f..%2fetc/passwd", {}, 404),
    "twice encoded": ("/%252e%252e%252fetc/passwd", {}, 404),
    "a folder before them": ("/api/runs/0/..%2f..%2f..%2fetc%2fpasswd", {}, 404),
    "two slashes": ("//etc/passwd", {}, 404),
    "another host in the path": ("//example.org/app.js", {}, 404),
    "backslashes": ("/..\\..\\etc\\passwd", {}, 404),
    "encoded backslashes": ("/..%5c..%5cetc%5cpasswd", {}, 404),
    "a null byte": ("/app.js%00.html", {}, 404),
    "a null byte in a part": ("/api/runs/0/map%00", {}, 404),
    "a slash too much": ("/app.js/", {}, 404),
    "a whole address": ("http://example.org/", {}, 404),
    "a path as a run": ("/api/runs/%2fetc/summary", {}, 404),
    "a run that is not there": ("/api/runs/1/summary", {}, 404),
    "a negative run": ("/api/runs/-1/summary", {}, 404),
    "a huge run": (f"/api/runs/{'9' * 5000}/summary", {}, 404),
    "another digit": ("/api/runs/%D9%A0/summary", {}, 404),
    "another part": ("/api/runs/0/weights", {}, 404),
    "a foreign host": ("/", {"host": "example.org"}, 421),
    "a foreign host with the port": ("/", {"host": "example.org:{port}"}, 421),
    "a name that begins like ours": ("/", {"host": "localhost.example.org:{port}"}, 421),
    "a wrong port": ("/", {"host": "localhost:1"}, 421),
    "no host": ("/", {"host": ""}, 421),
    "a foreign origin": ("/api/runs", {"Origin": "http://example.org"}, 403),
    "another port's origin": ("/api/runs", {"Origin": "http://127.0.0.1:3000"}, 403),
    "no origin to name": ("/api/runs", {"Origin": "null"}, 403),
    "another site": ("/api/runs", {"Sec_Fetch_Site": "cross-site"}, 403),
    "another host of the site": ("/api/runs", {"Sec_Fetch_Site": "same-site"}, 403),
    "POST": ("/api/runs", {"method": "POST"}, 405),
    "PUT": ("/", {"method": "PUT"}, 405),
    "DELETE": ("/api/runs/0/summary", {"method": "DELETE"}, 405),
    "OPTIONS": ("/", {"method": "OPTIONS"}, 405),
    "TRACE": ("/", {"method": "TRACE"}, 405),
    "no request": ("/api/runs/0/decode", {}, 400),
    "no JSON": ("/api/runs/0/decode?request=%7B", {}, 400),
    "no object": ("/api/runs/0/decode?request=1", {}, 400),
    "not a number": ("/api/runs/0/decode?request=%7B%22z%22:NaN%7D", {}, 400),
    "an infinite number": ("/api/runs/0/decode?request=%7B%22z%22:1e999%7D", {}, 400),
    "too many digits": (f"/api/runs/0/decode?request=%7B%22z%22:{'1' * 5000}%7D", {}, 400),
    "deep JSON": (f"/api/runs/0/decode?request={DEEP}", {}, 400),
    "nine levels": ("/api/runs/0/decode?request=" + quote('{"z":[[[[[[[[1]]]]]]]]}'), {}, 400),
    "long JSON": (f"/api/runs/0/decode?request={'1' * 70_000}", {}, 413),
    "a long address": (f"/?{'x' * 200_001}", {}, 414),
    "long headers": ("/", {"X_Long": "x" * 70_000}, 431),
    "no HTTP": ("/ a b", {}, 400),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused_with_a_sentence(shown, case):
    path, change, status = REFUSED[case]
    change = {name: value.replace("{port}", str(shown.port)) for name, value in change.items()}
    found, headers, body = ask(shown, path, **change)
    assert found == status
    has_headers(headers)
    text = json.loads(body)["error"]
    assert text.endswith(".")
    assert "Traceback" not in text
    assert "/tmp" not in text
    assert "root:" not in text
    assert headers.get("allow") == ("GET, HEAD" if status == 405 else None)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/", {}),
        ("/app.js", {}),
        ("/app.css", {"host": "localhost:{port}"}),
        ("/api/runs", {"host": "[::1]:{port}"}),
        ("/api/runs", {"host": "LOCALHOST:{port}"}),
        ("/api/runs", {"Origin": "http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"}),
        ("/", {"Sec_Fetch_Site": "none"}),
        ("/", {"method": "HEAD"}),
        ("/api/events", {"method": "HEAD"}),
        ("/api/runs/0/summary", {}),
    ],
)
def test_requests_of_the_page_itself_are_answered(shown, path, change):
    change = {name: value.replace("{port}", str(shown.port)) for name, value in change.items()}
    status, headers, body = ask(shown, path, **change)
    assert (status, bool(body)) == (200, change.get("method") != "HEAD")
    has_headers(headers)


def test_markup_in_a_name_stays_text(shown):
    _, headers, body = ask(shown, "/api/runs")
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["runs"][0]["name"] == "<img src=x onerror=alert(1)>"
    _, headers, body = ask(shown, "/")
    assert headers["content-type"].startswith("text/html")
    assert b"onerror" not in body
    with http_stream(shown) as stream:
        assert next(stream)[1]["runs"][0]["name"] == "<img src=x onerror=alert(1)>"


def test_a_token_is_asked_for_on_every_route(tmp_path):
    token = "right-token-1234"
    with serving(make_run(tmp_path / "run"), token=token) as server:
        cookie = f"aevb-{server.port}={token}"
        for path in ("/", "/app.js", "/app.css", "/api/runs", "/api/events", "/nothing"):
            for headers in ({}, {"Cookie": f"aevb-{server.port}=wrong"}, {"Cookie": "a=b"}):
                status, found, body = ask(server, path, **headers)
                assert (status, "token" in json.loads(body)["error"]) == (401, True)
                has_headers(found)
                assert token.encode() not in body
        assert ask(server, "/?token=wrong-token-1234")[0] == 401
        assert ask(server, f"/api/runs?token={token}")[0] == 401  # only the page sets a cookie
        status, headers, _ = ask(server, f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        assert headers["set-cookie"] == f"{cookie}; Path=/; HttpOnly; SameSite=Strict"
        assert ask(server, "/api/runs", Cookie=f"other=1; {cookie}")[0] == 200


def test_other_machines_need_a_token():
    with pytest.raises(ValueError, match=r"Other machines can reach 0\.0\.0\.0"):
        Access("0.0.0.0", 80)
    with pytest.raises(ValueError, match="12 to 200"):
        Access("127.0.0.1", 80, "short")
    access = Access("0.0.0.0", 80, "long-enough-token")
    own = {"192.168.1.5": True, "[fe80::1]:80": True, "example.org": False, "localhost": True}
    cookie = (b"cookie", b"aevb-80=long-enough-token")
    for host, allowed in own.items():
        refusal = access.refusal("GET", b"/", [(b"host", host.encode()), cookie])
        assert (refusal is None) == allowed, host
    twice = [(b"host", b"localhost"), (b"host", b"example.org"), cookie]
    assert access.refusal("GET", b"/", twice).status == 421


def test_messages_have_only_paths_that_the_user_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_run(Path("run"))
    with serving(folder) as server:
        (folder / "wrong").touch()
        assert get(server, "/api/runs/0/map") == (
            422,
            {"error": "…/model.json is damaged, see …/hosts."},
        )
        (folder / "wrong").rename(folder / "bug")
        status, found = get(server, "/api/runs/0/map")
        assert (status, "secret" in found["error"], "KeyError" in found["error"]) == (
            503,
            False,
            True,
        )
    assert public_text("a/b and /x/y: 1/2", ["/x"]) == "a/b and /x/y: 1/2"


# Parts and processes ------------------------------------------------------------------------------


def test_a_part_is_computed_once_for_each_checkpoint(tmp_path):
    folder, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    with serving(folder, other) as server:
        found = together(10, lambda: ask(server, "/api/runs/0/map"))
        assert {status for status, _, _ in found} == {200}
        assert len({body for _, _, body in found}) == 1
        assert (folder / "calls").read_text() == "map whole\n"
        tag = found[0][1]["etag"]
        assert ask(server, "/api/runs/0/map", If_None_Match=tag)[0] == 304
        checkpoint(folder, 31)
        assert ask(server, "/api/runs/0/map", If_None_Match=tag)[0] == 200
        assert (folder / "calls").read_text() == "map whole\n" * 2
        status, compared = get(server, "/api/comparison")
        assert (status, compared) == (200, [["run", "run"], ["other", "other"]])


def test_while_a_run_trains_its_map_is_small_and_its_checks_wait(tmp_path):
    folder = make_run(tmp_path / "run", 10)
    with serving(folder) as server:
        with training(folder):
            assert get(server, "/api/runs/0/checks") == (
                200,
                {"waiting": "The checks are computed when the run has ended."},
            )
            assert get(server, "/api/runs/0/map")[0] == 200
            assert get(server, "/api/runs")[1]["runs"][0]["state"] == "training"
        assert get(server, "/api/runs/0/map")[0] == 200
        assert (folder / "calls").read_text() == "map live\nmap whole\n"
        assert get(server, "/api/comparison")[1].keys() == {"waiting"}


def test_decoding_does_not_wait_for_checks_and_a_dead_process_is_replaced(tmp_path):
    folder = make_run(tmp_path / "run")
    address = "/api/runs/0/decode?request=" + quote('{"z": [1.5]}')
    with serving(folder) as server:
        assert get(server, address) == (200, {"x": [1.5]})
        assert get(server, "/api/runs/0/decode?request=%7B%7D") == (
            422,
            {"error": "The request names no z."},
        )
        checks = []
        (folder / "calls").touch()
        (folder / "hold").touch()  # the checks do not end before this file is removed
        thread = threading.Thread(target=lambda: checks.append(get(server, "/api/runs/0/checks")))
        thread.start()
        while "checks" not in (folder / "calls").read_text():
            time.sleep(0.01)
        for _ in range(5):
            assert get(server, address)[0] == 200
        assert not checks
        (folder / "hold").unlink()
        thread.join()
        assert checks[0][1]["part"] == "checks"
        (folder / "die").touch()
        checkpoint(folder, 31)
        status, found = get(server, "/api/runs/0/map")
        assert (status, found["error"]) == (
            503,
            "The process that computes this ended (signal 9). The memory may be full. A new one "
            "starts with the next request: ask again.",
        )
        assert get(server, "/api/runs/0/map")[1]["part"] == "map"
        assert server.live.showing.started == 2


def test_updates_while_training_take_a_third_of_a_percent_of_a_core(tmp_path):
    """An update that takes 0.3 s of CPU time is followed by a pause of 90 s; the first is free."""
    folder, now, jobs = make_run(tmp_path / "run", 10, steps=100), [1000.0], []

    async def run(job, **_):
        jobs.append(now[0])
        return Answer(b"{}", 0.3)

    async def follow():
        live = Live([folder], STUBS, clock=lambda: now[0])
        live.showing.run = run
        only = live.runs[0]
        await live.part(only, "map")
        for step in range(11, 201):
            checkpoint(folder, step)
            now[0] += 1
            await live.look(only)
            live._update(only)
            assert (await live.part(only, "map")).version.startswith(f"{step}.") == (
                jobs[-1] == now[0]
            )
        await live.close()

    with training(folder):
        asyncio.run(follow())
    assert jobs == [1000.0, 1001.0, 1091.0, 1181.0]


def test_a_run_that_cannot_be_read_stops_nothing(tmp_path, monkeypatch, capsys):
    """The stream of one run breaks, and the other is followed; so is the first when it can be."""
    monkeypatch.setattr(live_module, "POLL", 0.02)
    folders = [make_run(tmp_path / name) for name in "ab"]
    read, broken = live_module.read_block, [True]

    def failing(path, *arguments):
        if broken[0] and path.parent.name == "a":
            raise OSError(5, "Input/output error")
        return read(path, *arguments)

    with (
        serving(*folders) as server,
        training(folders[0]),
        training(folders[1]),
        http_stream(server) as stream,
    ):
        assert [until(stream, "rows")[1]["run"] for _ in folders] == [0, 1]
        monkeypatch.setattr(live_module, "read_block", failing)
        for folder in folders:
            write_rows(folder, [31], mode="a")
        assert until(stream, "rows")[1]["run"] == 1
        while not server.live.runs[0].trouble:
            time.sleep(0.01)
        broken[0] = False
        assert until(stream, "rows")[1]["run"] == 0
    assert "a cannot be followed now, the server tries again:" in capsys.readouterr().err


def test_a_mistake_in_a_worker_answers_its_job(monkeypatch, capsys):
    async def ask():
        worker = Worker("test", idle=False, names=[])
        monkeypatch.setattr(worker, "_exchange", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(JobError, match="ZeroDivisionError"):
                await worker.run(Job("none", ()))
        await worker.close()

    asyncio.run(ask())
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_child_that_starts_while_the_server_stops_is_ended(monkeypatch):
    worker = Worker("test", idle=False, names=[])
    children = []

    class Process:
        def __init__(self, **_):
            children.append(self)
            self.killed = False

        def start(self):
            worker._closed = True

        def kill(self):
            self.killed = True

    class Context:
        Pipe = staticmethod(multiprocessing.Pipe)

    Context.Process = Process
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: Context)
    with pytest.raises(JobError, match="stopping"):
        worker._start()
    assert [child.killed for child in children] == [True]
    assert worker._child is None


def test_the_start_of_a_child_is_no_part_of_its_time(tmp_path):
    """The first job imports this file and what it needs; the time counts for the later ones."""

    async def ask():
        worker = Worker("test", idle=False, names=[])
        slow = Job("test_server:sleeping", (0.3,))
        assert (await worker.run(slow, timeout=0.01)).text == b"0.3"
        with pytest.raises(JobError, match="took longer than 0.01 s"):
            await worker.run(slow, timeout=0.01)
        await worker.close()

    asyncio.run(ask())


def test_too_many_jobs_are_refused(tmp_path, monkeypatch):
    async def fill():
        live = Live([tmp_path], STUBS)
        live.decoding._queue = asyncio.PriorityQueue(1)
        live.decoding._task = asyncio.create_task(asyncio.sleep(60))  # nobody works
        first = asyncio.create_task(live.decoding.run(None))
        await asyncio.sleep(0)
        with pytest.raises(JobError, match="busy"):
            await live.decoding.run(None)
        first.cancel()
        await live.close()

    asyncio.run(fill())


# Histories ----------------------------------------------------------------------------------------


def test_a_history_is_read_from_where_it_was_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_block(path, START) == read_block(tmp_path, START)
    write_rows(tmp_path, [1, 2])
    first = read_block(path, START)
    assert (first.reset, [row["step"] for row in first.rows]) == (True, [1, 2])
    assert first.end == end_of(path) == parse_position(str(first.end))
    assert read_block(path, first.end).end == first.end
    with path.open("a") as file:
        file.write('{"step": 3, "elbo": NaN}\n[1]\n{"step": 4, "no')
    second = read_block(path, first.end)
    assert (second.reset, second.skipped, second.rows) == (False, 1, [{"step": 3, "elbo": None}])
    assert end_of(path) == second.end
    with path.open("a") as file:
        file.write('te": "</script>"}\n')
    third = read_block(path, second.end)
    assert third.rows == [{"step": 4, "note": "</script>"}]
    assert read_block(path, first.end, until=second.end.offset).end == second.end


def test_a_history_that_was_replaced_or_cut_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(tmp_path, range(1, 20))
    end = read_block(path, START).end
    (tmp_path / "new").write_bytes(path.read_bytes())
    (tmp_path / "new").replace(path)  # as a resumed run does
    again = read_block(path, end)
    assert (again.reset, len(again.rows)) == (True, 19)
    os.truncate(path, 0)
    assert read_block(path, again.end).reset
    write_rows(tmp_path, range(1, 40), "other")  # the same file, cut and longer again
    assert (path.stat().st_ino, path.stat().st_size > end.offset) == (again.end.inode, True)
    third = read_block(path, again.end)
    assert (third.reset, len(third.rows)) == (True, 39)
    path.unlink()
    assert read_block(path, third.end).reset


def test_hostile_histories_are_bounded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, f"quantity {i}": 1.0}) for i in range(2000)]
    path.write_text("\n".join(["x" * (2**20 + 5), "[" * 100_000, *lines, ""]))
    rows, skipped, here = [], 0, START
    while (block := read_block(path, here)).end != here:
        assert len(block.columns()) <= 256
        here, skipped, rows = block.end, skipped + block.skipped, rows + block.rows
    assert (len(rows), skipped) == (2000, 3)
    path.unlink()
    os.mkfifo(path)
    assert read_block(path, START).rows == []
    assert end_of(path) == START


@contextmanager
def http_stream(server, last=""):
    """Yield events as (kind, data, id); heartbeats are left out."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"GET /api/events HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
    head += f"Last-Event-ID: {last}\r\n" if last else ""
    connection.sendall(f"{head}\r\n".encode())
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")

    def events():
        kind = data = name = None
        while line := response.readline().decode():
            key, _, value = line.rstrip("\n").partition(": ")
            kind = value if key == "event" else kind
            data = value if key == "data" else data
            name = value if key == "id" else name
            if line == "\n" and data is not None:
                yield kind, json.loads(data), name
                kind = data = None

    try:
        yield events()
    finally:
        response.close()
        connection.close()


def until(stream, kind):
    """Return the next event of a kind."""
    return next(event for event in stream if event[0] == kind)


def test_events_follow_a_run_from_its_first_row_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(live_module, "POLL", 0.02)
    monkeypatch.setattr(live_module, "LOOK", 0.05)
    folder = tmp_path / "run"
    with serving(folder) as server, http_stream(server) as stream:
        kind, data, _ = next(stream)
        assert (kind, data["runs"][0]["state"]) == ("hello", "waiting")
        assert get(server, "/api/runs/0/summary")[1] == {"waiting": "The run has not begun yet."}
        assert not folder.exists()
        make_run(folder, 3, rows=3)
        with training(folder):
            assert until(stream, "reset")[1] == {"run": 0}
            _, data, last = until(stream, "rows")
            assert data["columns"]["step"] == [1, 2, 3]
            assert until(stream, "state")[1] | {"state": ""} == {
                "run": 0,
                "state": "",
                "step": 3,
                "total": 30,
            }
            write_rows(folder, [4, 5], mode="a")
            _, data, later = until(stream, "rows")
            assert data["columns"]["elbo"] == [-0.25, -0.2]
            with http_stream(server, last) as again:  # goes on where it was
                assert until(again, "rows")[1]["columns"]["step"] == [4, 5]
            with http_stream(server) as new:  # a page that was loaded again
                assert until(new, "rows")[1]["columns"]["step"] == [1, 2, 3, 4, 5]
            write_rows(folder, [1, 2])
            assert until(stream, "reset")
            assert until(stream, "rows")[1]["columns"]["step"] == [1, 2]
            checkpoint(folder, 30)
            while until(stream, "state")[1]["step"] != 30:
                pass
        while until(stream, "state")[1]["state"] != "finished":
            pass
        assert until(stream, "version")[1]["version"].startswith("30.")
        with http_stream(server, later) as back:  # it slept while the run was cut and ended
            assert until(back, "reset")
        with http_stream(server) as new:
            assert next(new)[1]["runs"][0]["state"] == "finished"


def test_a_stream_too_many_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(live_module, "MOST_CLIENTS", 1)
    with serving(make_run(tmp_path / "run")) as server:
        with http_stream(server) as stream:
            next(stream)
            status, found = get(server, "/api/events")
            assert (status, "Close one" in found["error"]) == (503, True)
        deadline = time.monotonic() + 5
        while server.live.clients:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with http_stream(server) as stream:
            assert next(stream)[0] == "hello"


# States -------------------------------------------------------------------------------------------


def test_the_state_of_a_run_is_read_from_its_files(tmp_path):
    folder = Folder(tmp_path / "run")
    assert folder.look().state == "waiting"
    make_run(folder.path, 10)
    before = sorted(os.listdir(folder.path))
    assert (folder.look().state, folder.look().total) == ("stopped", 30)
    with training(folder.path):
        assert folder.look().state == "training"
        with (folder.path / ".lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (folder.path / ".lock").open() as file:  # looking takes no lock
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    checkpoint(folder.path, 30)
    assert (folder.look().state, folder.look().step) == ("finished", 30)
    assert sorted(os.listdir(folder.path)) == before


@pytest.mark.parametrize(
    ("settings", "last", "state"),
    [
        ({"steps": None, "epochs": 3.0, "batch": 10}, None, "finished"),
        ({"steps": None, "epochs": 4.0, "batch": 10}, None, "stopped"),
        ({"steps": 100, "patience": 5, "waited": 5}, None, "finished"),
        ({"steps": 100, "patience": 5, "waited": 4}, None, "stopped"),
        ({"steps": 100}, {"step": 29, "note": "em() converged", "kind": "converged"}, "finished"),
        ({"steps": 100}, {"step": 5, "note": "em() converged", "kind": "converged"}, "stopped"),
    ],
)
def test_a_run_has_finished_when_its_settings_say_so(tmp_path, settings, last, state):
    path = make_run(tmp_path / "run", 30, **settings)
    if last is not None:
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last) + "\n")
    assert Folder(path).look().state == state


def test_a_lock_of_another_process_is_not_that_of_the_run(tmp_path):
    """A file of another file system may have the inode of the lock."""
    path = make_run(tmp_path / "run", 10)
    with training(path):
        write_lock(path, process=1)
        assert Folder(path).look().state == "stopped"
        write_lock(path)
        assert Folder(path).look().state == "training"


def test_a_trainer_in_another_container_is_known_by_its_history(tmp_path):
    path = make_run(tmp_path / "run", 10)
    write_lock(path, namespace="pid:[1]")
    assert Folder(path).look().state == "training"
    os.utime(path / "metrics.jsonl", (time.time() - 120,) * 2)
    assert Folder(path).look().state == "stopped"
    os.utime(path / "metrics.jsonl")
    checkpoint(path, 30)  # the last one
    assert Folder(path).look().state == "finished"


def test_damaged_files_leave_a_state(tmp_path):
    path = make_run(tmp_path / "run", 10)
    for text in ("", "{", "[]", '{"state": 1}', '{"state": {"settings": {"steps": -1}}}'):
        (path / "checkpoints" / "step-10" / "manifest.json").write_text(text)
        assert Folder(path).look().state == "stopped"


def test_the_server_itself_does_without_torch(tmp_path):
    """Only its children import torch, so that the server starts soon and stays small."""
    make_run(tmp_path / "run", steps=None, epochs=3.0, batch=10)
    program = (
        "import sys; from pathlib import Path; import aevb.page.server.app; "
        "import aevb.page.server.listening; from aevb.page.server.run_state import Folder; "
        "print(Folder(Path(sys.argv[1])).look().state, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "finished False\n"


# Load ---------------------------------------------------------------------------------------------


def together(count, task):
    found = []
    threads = [threading.Thread(target=lambda: found.append(task())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_hundred_clients_at_once_are_all_answered(tmp_path):
    """No client waits longer than three seconds, while others hold streams open."""
    paths = ["/", "/app.js", "/api/runs", "/api/runs/0/summary", "/api/runs/0/map"]
    with serving(make_run(tmp_path / "run")) as server:
        get(server, "/api/runs/0/summary")
        get(server, "/api/runs/0/map")

        async def one(i):
            began = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            path = "/api/events" if i % 4 == 0 else paths[i % len(paths)]
            head = f"GET {path} HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode())
            line = await reader.readline()
            if path == "/api/events":
                await reader.readuntil(b"event: rows")
            else:
                await reader.read()
            seconds = time.perf_counter() - began
            writer.close()
            return line.split()[1], seconds

        async def all_of_them():
            return await asyncio.gather(*(one(i) for i in range(200)))

        with training(tmp_path / "run"):
            found = asyncio.run(all_of_them())
        assert {status for status, _ in found} == {b"200"}
        assert max(seconds for _, seconds in found) < 3


def test_a_head_that_never_ends_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(listening, "HEAD_TIMEOUT", 0.1)
    with serving(make_run(tmp_path / "run")) as server:
        for sent in (b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nX: "):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
                slow.sendall(sent)
                assert slow.recv(10) == b""


def test_the_server_beside_a_training_waits_for_its_folder_and_ends_with_it(tmp_path, capsys):
    folder = tmp_path / "-run"
    beside = PageServer([folder])
    address = re.search(r"http://127\.0\.0\.1:(\d+)/", capsys.readouterr().out)
    server = SimpleNamespace(port=int(address[1]))
    assert get(server, "/api/runs")[1]["runs"][0]["state"] == "waiting"
    assert ask(server, "/app.js")[0] == 200
    assert not folder.exists()
    beside.stay()  # there is no terminal, so it ends
    assert beside.process.returncode == 0
    assert capsys.readouterr().out == f"aevb serve {folder} shows the page again.\n"
    with pytest.raises(ConnectionRefusedError):
        get(server, "/api/runs")


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        folders_of([tmp_path])
    assert folders_of([tmp_path], follow=True) == [tmp_path]
    seeds = [make_run(tmp_path / f"seed-{i}") for i in range(2)]
    assert folders_of([tmp_path, seeds[0]]) == seeds
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no runs yet"):
        folders_of([sweep])
    runs = [make_run(sweep / name / "seed-0") for name in "ab"]
    assert folders_of([sweep]) == runs
