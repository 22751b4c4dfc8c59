"""Measure what `aevb serve` costs a run that trains, and how soon its page shows a row.

python benchmarks/serve_live.py                              # about twelve minutes
python benchmarks/serve_live.py --minutes 60 --browser --json serve_live.json
python benchmarks/serve_live.py --only latency memory        # half a minute

"steps": the same run is trained in turn alone and with a server and a client beside it, which gets
all rows, the summary and the latent map of each checkpoint. Every run is a process of its own. The
order of the two sides changes from pair to pair. Steps per second are those of the run's own clock,
between its second and its last tenth ("whole") and in its second half, when the page has its first
map ("later"): a page that is opened costs some seconds of CPU time once, to import torch and to
compute that map. A ratio is the mean of the pairs' ratios, with its standard error. It needs a
machine without other load; the load average is printed first.

"latency": a history grows by one line at a time, and a line has the time at which it was written.

"memory": a history grows to 100,000 rows while a client reads all of them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MEASURES = ("steps", "latency", "memory")
AEVB = [sys.executable, "-m", "aevb"]
CHECKPOINTS = 8  # in each run


class Page:
    """A client like the page: it follows the events and fetches every part that has changed."""

    def __init__(self, port: int, on_rows: Callable[[dict[str, Any]], None], parts: bool) -> None:
        self.port, self.on_rows, self.parts = port, on_rows, parts
        self.rows, self.fetched, self.bytes = 0, 0, 0
        self.ended = False
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/api/events")
        response = connection.getresponse()
        kind = ""
        while not self.ended and (line := response.readline()):
            self.bytes += len(line)
            name, _, value = line.rstrip(b"\n").partition(b": ")
            if name == b"event":
                kind = value.decode()
            elif name == b"data":
                self._take(kind, json.loads(value))
        connection.close()

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "rows":
            self.rows += data["rows"]
            self.on_rows(data)
        elif self.parts and (
            (kind == "state" and data["step"] is not None and not self.fetched)
            or (kind == "version" and self.fetched and data["part"] in ("summary", "map"))
        ):
            wanted = ["summary", "map"] if kind == "state" else [data["part"]]
            for part in wanted:
                self.fetched += 1
                threading.Thread(target=self._fetch, args=(part,), daemon=True).start()

    def _fetch(self, part: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", f"/api/runs/0/{part}")
            self.bytes += len(connection.getresponse().read())
        except OSError:  # the server has ended
            pass
        finally:
            connection.close()


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, int]]:
    """Run a server; yield its port and its process id."""
    server = subprocess.Popen(
        [*AEVB, "serve", str(folder), "--follow", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        found = re.match(r"http://127\.0\.0\.1:(\d+)/", server.stdout.readline())
        if found is None:
            raise SystemExit("aevb serve did not start.")
        yield int(found[1]), server.pid
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


@contextmanager
def browser(port: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                f"http://127.0.0.1:{port}/",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


# Steps per second ---------------------------------------------------------------------------------


def train(folder: Path, model: str, data: str, steps: int) -> dict[str, float]:
    """Train, and return the steps per second of the whole run and of its second half."""
    command = [*AEVB, "train", model, "--data", data, "--steps", str(steps), "--out", str(folder)]
    command += ["--checkpoint-every", str(max(1, steps // CHECKPOINTS))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "seconds" in row]
    last = [row for row in rows if row["step"] <= 0.95 * steps][-1]
    found = {}
    for name, start in (("whole", 0.1), ("later", 0.5)):
        first = next(row for row in rows if row["step"] >= start * steps)
        found[name] = (last["step"] - first["step"]) / (last["seconds"] - first["seconds"])
    return found


def pair(folder: Path, arguments: argparse.Namespace, steps: int, served: bool) -> dict[str, Any]:
    if not served:
        return {"speed": train(folder, arguments.model, arguments.data, steps)}
    with serving(folder) as (port, process):
        page = Page(port, lambda _: None, parts=True)
        with browser(port) if arguments.browser else _nothing():
            speed = train(folder, arguments.model, arguments.data, steps)
        cpu, used = _cpu_seconds(process), [_cpu_seconds(child) for child in _children(process)]
        page.ended = True
        return {"speed": speed, "server": cpu, "children": used, "rows": page.rows} | {
            "parts": page.fetched,
            "bytes": page.bytes,
        }


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def measure_steps(place: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    probe = 400
    speed = train(place / "probe", arguments.model, arguments.data, probe)["whole"]
    steps = max(200, round(speed * arguments.seconds))
    print(f"steps: {steps} steps a run, about {arguments.seconds:g} s each", flush=True)
    until, pairs = time.monotonic() + 60 * arguments.minutes, []
    while not pairs or time.monotonic() < until:
        found = {}
        order = [False, True] if len(pairs) % 2 == 0 else [True, False]
        for served in order:
            found[served] = pair(place / f"run-{len(pairs)}-{served}", arguments, steps, served)
        pairs.append(found)
        alone, beside = found[False]["speed"], found[True]
        speeds = [
            f"{name}: alone {alone[name]:.1f}, with a page {beside['speed'][name]:.1f} steps/s, "
            f"ratio {beside['speed'][name] / alone[name]:.4f}"
            for name in alone
        ]
        print(
            f"  {'; '.join(speeds)}; {beside['rows']} rows, {beside['parts']} parts, CPU "
            f"{beside['server']:.2f} s of the server, "
            f"{', '.join(f'{one:.2f} s' for one in beside['children']) or 'none'} of its children",
            flush=True,
        )
    summary: dict[str, Any] = {"pairs": pairs}
    for name in ("whole", "later"):
        ratios = [one[True]["speed"][name] / one[False]["speed"][name] for one in pairs]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        mean, median = statistics.mean(ratios), statistics.median(ratios)
        summary[name] = {"ratio": mean, "standard error": error, "median": median}
        print(
            f"  {name}: ratio {mean:.4f} ± {error:.4f} (median {median:.4f}) over {len(ratios)} "
            f"pairs",
            flush=True,
        )
    return summary


# Latency and memory -------------------------------------------------------------------------------


@contextmanager
def growing(folder: Path) -> Iterator[Any]:
    """Yield the history of a run that seems to train: its lock is held."""
    import fcntl

    folder.mkdir()
    (folder / "model.json").write_text("{}")
    with (folder / ".lock").open("w") as lock, (folder / "metrics.jsonl").open("a") as history:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield history


def measure_latency(place: Path, count: int = 60) -> dict[str, float]:
    waits: list[float] = []

    def arrived(data: dict[str, Any]) -> None:
        waits.extend(time.time() - written for written in data["columns"]["microseconds"])

    with growing(place / "latency") as history, serving(place / "latency") as (port, _):
        page = Page(port, lambda data: arrived(_seconds(data)), parts=False)
        time.sleep(1)
        for step in range(1, count + 1):
            # A whole number: the server rounds others to seven digits.
            now = round(1e6 * time.time())
            history.write(json.dumps({"step": step, "microseconds": now}) + "\n")
            history.flush()
            time.sleep(0.13 + 0.05 * (step % 3))
        time.sleep(1.5)
        page.ended = True
    waits.sort()
    found = {"median": statistics.median(waits), "largest": waits[-1], "rows": float(len(waits))}
    print(
        f"latency: median {1000 * found['median']:.0f} ms, largest {1000 * found['largest']:.0f} "
        f"ms from writing to arrival, {len(waits)} of {count} rows",
        flush=True,
    )
    return found


def _seconds(data: dict[str, Any]) -> dict[str, Any]:
    return {"columns": {"microseconds": [one / 1e6 for one in data["columns"]["microseconds"]]}}


def measure_memory(place: Path, rows: int = 100_000) -> dict[str, float]:
    names = ["elbo", "x", "kl(z)", "gradient", "lr", "epoch", "seconds"]
    found: dict[str, float] = {}
    with growing(place / "memory") as history, serving(place / "memory") as (port, process):
        page = Page(port, lambda _: None, parts=False)
        time.sleep(2)
        found["before"] = _memory(process)
        began = time.perf_counter()
        for step in range(1, rows + 1):
            values = {name: math.sin(step + i) for i, name in enumerate(names)}
            history.write(json.dumps({"step": step, **values, "phase": "joint"}) + "\n")
            if step % 1000 == 0:
                history.flush()
                time.sleep(0.05)
        history.flush()
        while page.rows < rows and time.perf_counter() - began < 60:
            time.sleep(0.1)
        found |= {"seconds": time.perf_counter() - began, "followed": float(page.rows)}
        found["after"] = _memory(process)
        page.ended = True
        again = Page(port, lambda _: None, parts=False)
        began = time.perf_counter()
        while again.rows < rows and time.perf_counter() - began < 60:
            time.sleep(0.02)
        found |= {"reload seconds": time.perf_counter() - began, "reload bytes": again.bytes}
        found["after reload"] = _memory(process)
        again.ended = True
    print(
        f"memory: {found['before']:.1f} MiB before, {found['after']:.1f} MiB after "
        f"{found['followed']:,.0f} rows, {found['after reload']:.1f} MiB after a page was loaded "
        f"again ({found['reload bytes'] / 2**20:.1f} MiB in {found['reload seconds']:.1f} s)",
        flush=True,
    )
    return found


# Processes ----------------------------------------------------------------------------------------


def _memory(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()  # a child belongs to the thread that began it
    found = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    names = [Path(f"/proc/{one}/cmdline").read_text() for one in found]
    return [one for one, name in zip(found, names, strict=True) if "resource_tracker" not in name]


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="Minutes of the pairs of runs.")
    parser.add_argument("--seconds", type=float, default=60, help="Seconds of a run.")
    parser.add_argument("--model", default="vae")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--browser", action="store_true", help="Open the page in Chromium too.")
    parser.add_argument("--only", nargs="*", choices=MEASURES, default=MEASURES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    print(f"{os.cpu_count()} cores, load average {load}", flush=True)
    found: dict[str, Any] = {"load": os.getloadavg()}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if "steps" in arguments.only:
            found["steps"] = measure_steps(place, arguments)
        if "latency" in arguments.only:
            found["latency"] = measure_latency(place)
        if "memory" in arguments.only:
            found["memory"] = measure_memory(place)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
