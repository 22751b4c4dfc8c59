"""Measure what `aevb serve` costs a run that trains, and how soon its page shows a row.

python benchmarks/serve_live.py                              # about twelve minutes
python benchmarks/serve_live.py --minutes 60 --browser --json serve_live.json
python benchmarks/serve_live.py --only latency memory screen # one minute

"steps": one run trains beside a server with a client that gets all rows, ten a second, and the
latent maps, like a page. In turns (off, on, on, off) the server and its children are stopped by a
signal, or run. Blocks are short, because the speed of a shared machine drifts. Steps per second are
those of the run's own clock in each block. The ratio is the mean over groups of four blocks, with
its standard error. It overestimates the cost: a map may be computed after a pause in seconds, and
half of them pass while the server is stopped. The first page costs some seconds of CPU time once,
to import torch and to compute its map; they are reported apart, and as a share of the CPU time of
all cores. With --browser, Chromium shows the page on the same machine, too. It needs a machine
without other load; the load average is printed first.

"latency": a history grows by one line at a time, and a line has the time at which it was written.

"memory": a history grows to 100,000 rows while a client reads all of them.

"screen": the same in Chromium, on the page itself. A row is on the screen when the frame after the
redraw of its curve begins. Chromium's memory is that of the page's heap and arrays. It needs
playwright.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import shutil
import signal
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

MEASURES = ("steps", "latency", "memory", "screen")
AEVB = [sys.executable, "-m", "aevb"]


class Page:
    """A client like the page: it follows the events and fetches every part that has changed."""

    def __init__(self, port: int, on_rows: Callable[[dict[str, Any]], None], parts: bool) -> None:
        self.port, self.on_rows, self.parts = port, on_rows, parts
        self.rows, self.fetched, self.bytes = 0, 0, 0
        self.answered: list[str] = []
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
            self.answered.append(part)
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


def train(folder: Path, model: str, data: str, steps: int) -> list[dict[str, Any]]:
    """Train to the end, and return the rows of the history that have a time."""
    command = [*AEVB, "train", model, "--data", data, "--steps", str(steps), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return timed_rows(folder)


def timed_rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "seconds" in row]


@contextmanager
def long_run(folder: Path, arguments: argparse.Namespace, speed: float) -> Iterator[None]:
    """Train until the end of the block, with ten rows and a checkpoint each ten seconds."""
    command = [*AEVB, "train", arguments.model, "--data", arguments.data, "--out", str(folder)]
    command += ["--steps", str(round(speed * 600 * arguments.minutes)), "--log-every"]
    command += [str(max(1, round(speed / 10))), "--checkpoint-every", str(round(10 * speed))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list((folder / "checkpoints").glob("step-*")):
            time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def measure_steps(place: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    probe = train(place / "probe", arguments.model, arguments.data, 2000)
    last, first = probe[-1], probe[len(probe) // 2]
    speed = (last["step"] - first["step"]) / (last["seconds"] - first["seconds"])
    folder = place / "run"
    blocks = max(4, round(60 * arguments.minutes / arguments.seconds))
    cuts: list[dict[str, Any]] = []
    with long_run(folder, arguments, speed), serving(folder) as (port, process):
        began = time.monotonic()
        page = Page(port, lambda _: None, parts=True)
        while len(page.answered) < 2:
            time.sleep(0.1)
        opened, start_cpu = time.monotonic() - began, _all_cpu(process)
        print(
            f"steps: {speed:.0f} steps/s before; the page showed its first map after "
            f"{opened:.1f} s, for which the server took {start_cpu:.1f} s of CPU time",
            flush=True,
        )
        with browser(port) if arguments.browser else _nothing():
            time.sleep(5)
            for block in range(blocks):
                watched = block % 4 in (1, 2)  # off, on, on, off
                stop_or_continue(process, watched)
                before, cpu = timed_rows(folder)[-1], _all_cpu(process)
                time.sleep(arguments.seconds)
                after = timed_rows(folder)[-1]
                rate = (after["step"] - before["step"]) / (after["seconds"] - before["seconds"])
                cuts.append({"watched": watched, "rate": rate, "cpu": _all_cpu(process) - cpu})
            stop_or_continue(process, True)
        page.ended = True
    ratios = []
    for i in range(0, len(cuts) - 3, 4):
        off, on = cuts[i]["rate"] + cuts[i + 3]["rate"], cuts[i + 1]["rate"] + cuts[i + 2]["rate"]
        ratios.append(on / off)
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    cpu = sum(cut["cpu"] for cut in cuts if cut["watched"])
    seconds = arguments.seconds * sum(cut["watched"] for cut in cuts)
    share = cpu / seconds / (os.cpu_count() or 1)
    # Over the whole run, the start counts once.
    whole = (cpu + start_cpu) / (seconds + opened) / (os.cpu_count() or 1)
    print(
        f"  with a page / without: {statistics.mean(ratios):.4f} ± {error:.4f}, {len(ratios)} "
        f"groups of four blocks of {arguments.seconds:g} s: "
        f"{', '.join(f'{one:.3f}' for one in ratios)}\n"
        f"  CPU time of the server: {100 * share:.2f} % of all cores while a page is open, "
        f"{100 * whole:.2f} % with its start; {page.rows} rows, "
        f"{len(page.answered)} parts sent",
        flush=True,
    )
    return {"ratio": statistics.mean(ratios), "standard error": error, "blocks": cuts} | {
        "cpu share": share,
        "cpu share with start": whole,
        "first map seconds": opened,
        "start cpu": start_cpu,
        "speed before": speed,
    }


def stop_or_continue(process: int, running: bool) -> None:
    """Stop the server and its children for a while, or let them go on."""
    for one in (process, *_children(process)):
        os.kill(one, signal.SIGCONT if running else signal.SIGSTOP)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _all_cpu(process: int) -> float:
    return _cpu_seconds(process) + sum(_cpu_seconds(child) for child in _children(process))


# Latency and memory -------------------------------------------------------------------------------


def hold(lock: Any) -> None:
    """Lock a file and write this process into it, as a trainer does."""
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


@contextmanager
def growing(folder: Path) -> Iterator[Any]:
    """Yield the history of a run that seems to train: its lock is held."""
    folder.mkdir()
    (folder / "model.json").write_text("{}")
    with (folder / ".lock").open("w") as lock, (folder / "metrics.jsonl").open("a") as history:
        hold(lock)
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


# On the screen ------------------------------------------------------------------------------------

# Every frame after a change of the table below the curves: how many rows are drawn, and when.
WATCHED = """() => {
    window.seen = [];
    window.blocked = [];
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) window.blocked.push(entry.duration);
    }).observe({ type: "longtask" });
    const table = document.querySelector("#curves details");
    const look = () => {
        const cell = [...table.querySelectorAll("tbody tr")]
            .find((row) => row.querySelector("th").textContent === "elbo, training").cells[1];
        const rows = Number(cell.textContent.replaceAll(/\\D/g, ""));
        requestAnimationFrame(() => window.seen.push([rows, Date.now()]));
    };
    new MutationObserver(look).observe(table, { childList: true, subtree: true });
    look();
}"""
DRAWN = "() => window.seen.at(-1)?.[0] ?? 0"


def measure_screen(place: Path, slow: int = 60, rows: int = 100_000) -> dict[str, float]:
    """Append rows to the history of a small run, and watch its page in Chromium."""
    from playwright.sync_api import sync_playwright

    folder = place / "screen"
    train(folder, "vae", "digits", 200)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    like = [one for one in lines if "elbo" in one][-1]
    logged = sum("elbo" in one for one in lines)
    found: dict[str, float] = {}

    def append(history: Any, row: int) -> None:
        step = 200 + row
        values = {"elbo": -20 + math.sin(step), "step": step, "seconds": like["seconds"] + step}
        history.write(json.dumps(like | values) + "\n")

    with (
        (folder / ".lock").open("r+") as lock,
        (folder / "metrics.jsonl").open("a") as history,
        sync_playwright() as playwright,
    ):
        hold(lock)
        with serving(folder) as (port, process):
            chromium = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("#map canvas.map", timeout=120_000)
            page.evaluate(WATCHED)
            session = page.context.new_cdp_session(page)

            def heap() -> float:
                session.send("HeapProfiler.collectGarbage")
                used = session.send("Runtime.getHeapUsage")
                return float(used["usedSize"] + used.get("backingStorageSize", 0)) / 2**20

            def drawn(wanted: int, seconds: float = 120) -> None:
                until = time.monotonic() + seconds
                while page.evaluate(DRAWN) < wanted:
                    if time.monotonic() > until:
                        raise SystemExit(f"The page shows {page.evaluate(DRAWN)} of {wanted} rows.")
                    time.sleep(0.05)

            def waits(first: int, count: int) -> list[float]:
                written = []
                for row in range(first, first + count):
                    append(history, row)
                    history.flush()
                    written.append(1000 * time.time())
                    time.sleep(0.13 + 0.05 * (row % 3))
                drawn(logged + first + count - 1)
                seen = page.evaluate("() => window.seen")
                return sorted(
                    next(at for shown, at in seen if shown >= logged + first + i) - when
                    for i, when in enumerate(written)
                )

            found["heap before"] = heap()
            few = waits(1, slow)
            for row in range(slow + 1, rows - slow + 1):
                append(history, row)
                if row % 1000 == 0:
                    history.flush()
                    time.sleep(0.05)
            history.flush()
            drawn(logged + rows - slow)
            found["longest task while 100,000 rows arrive"] = max(
                page.evaluate("() => window.blocked.splice(0)"), default=0.0
            )
            many = waits(rows - slow + 1, slow)
            blocked = page.evaluate("() => window.blocked")
            found |= {
                "median": statistics.median(few),
                "largest": few[-1],
                "median at the end": statistics.median(many),
                "largest at the end": many[-1],
                "longest task at the end": max(blocked, default=0.0),
                "heap after": heap(),
                "server": _memory(process),
            }
            chromium.close()
    print(
        f"screen: {found['median']:.0f} ms from writing to the screen (largest "
        f"{found['largest']:.0f}), and after {rows:,} rows {found['median at the end']:.0f} "
        f"(largest {found['largest at the end']:.0f}); the page's heap {found['heap before']:.0f} "
        f"MiB before, {found['heap after']:.0f} MiB after; longest task (0: none above 50 ms) "
        f"{found['longest task while 100,000 rows arrive']:.0f} ms while they arrive, "
        f"{found['longest task at the end']:.0f} ms after them; server {found['server']:.0f} MiB",
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
    parser.add_argument("--minutes", type=float, default=10, help="Minutes of all blocks.")
    parser.add_argument("--seconds", type=float, default=2.5, help="Seconds of a block.")
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
        if "screen" in arguments.only:
            found["screen"] = measure_screen(place)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
