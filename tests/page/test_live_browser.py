"""`aevb serve` in a real browser: a page that follows runs, without being loaded again.

The training of some tests is a process of its own, as for a user. Every test ends with a check of
its tab: no error or warning on the console, and no request to another address.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from browser import SMALL, TIMEOUT, Sine, Visit, start_browser, train

from aevb.cli.model_argument import open_run
from aevb.cli.page_subjects import comparison_json, decode_json, section_json  # noqa: F401
from aevb.declare.registry import register
from aevb.page.decoder import decode
from aevb.page.metric_series import described
from aevb.page.server import live as live_module
from aevb.page.server.access import Access
from aevb.page.server.app import create_app
from aevb.page.server.listening import Server, open_socket
from aevb.page.server.workers import Functions

AEVB = (sys.executable, "-m", "aevb")
# The children of the server import this file, and with it the network of a user.
FUNCTIONS = Functions(
    *(f"test_live_browser:{name}_json" for name in ("section", "decode", "comparison"))
)
DIGITS = ("--data", "digits", "--set", "z=3", *SMALL)
OFTEN = ("--log-every", 20, "--checkpoint-every", 500, "--no-compile")
TOLERANCE = 1e-3  # of a mean, relative to max(1, |mean|)
MODEL = """
from aevb import Model, Normal, mlp
from test_live_browser import Waves

model = Model({"z": Normal(2), "x | z": Normal(5, net=Waves())}, {"z | x": Normal(net=mlp(8))})
"""


@register
@dataclass(frozen=True)
class Waves(Sine):
    """A network that only the server can run."""


@dataclass
class LiveVisit(Visit):
    """A page of a server in the browser. ``away``: the server does not run, on purpose."""

    port: int = 0
    away: bool = False

    def listen(self):
        own = f"http://127.0.0.1:{self.port}/"

        def note(text):
            if not (self.away and "ERR_" in text):
                self.trouble.append(text)

        def console(message):
            if message.type in ("error", "warning", "assert"):
                note(f"console: {message.text}")

        def request(request):
            if not request.url.startswith((own, "blob:", "data:")):
                note(f"request: {request.url[:200]}")

        self.page.set_default_timeout(TIMEOUT)
        self.page.on("console", console)
        self.page.on("request", request)
        self.page.on("pageerror", lambda error: note(f"error: {error}"))

    def go(self, fragment=""):
        self.page.goto("about:blank")
        self.page.goto(f"http://127.0.0.1:{self.port}/" + (f"#{fragment}" if fragment else ""))
        self.page.wait_for_selector("#page[data-ready]")
        assert self.page.get_attribute("#page", "data-ready") == "1"
        self.js("window.loadedOnce = true")

    def wait_long(self, condition, seconds=240):
        """Wait until an expression is true; a page says meanwhile what it shows."""
        until = time.monotonic() + seconds
        while not self.js(condition):
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{condition} stays false: {self.page.locator('body').inner_text()[:800]}"
                )
            time.sleep(0.05)

    def entries(self):
        """The number of entries of each curve, as the table of the curves says."""
        rows = self.page.locator("#curves details tbody tr")
        cells = rows.evaluate_all(
            "(all) => all.map((row) => [...row.cells].map((one) => one.textContent))"
        )
        return {name: int(count.replace(",", "")) for name, count, *_ in cells}

    def text(self, selector):
        return self.page.locator(selector).inner_text()


@pytest.fixture(scope="module")
def browser():
    with start_browser() as found:
        yield found


@pytest.fixture
def visit(browser):
    """Open a server's page in a tab; at the end, nothing went wrong in it."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    visits = []

    def visit(port, fragment=""):
        found = LiveVisit(context.new_page(), None, port=port)
        visits.append(found)
        found.listen()
        found.go(fragment)
        return found

    yield visit
    try:
        for found in visits:
            assert found.trouble == []
            assert found.js("loadedOnce")
    finally:
        context.close()


# Processes ----------------------------------------------------------------------------------------


@contextmanager
def training(*arguments):
    """Train in another process, which gives way as a server's do; it is interrupted at the end."""
    process = subprocess.Popen(
        ["nice", "-n", "19", *AEVB, "train", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def serving(*folders, port=0):
    """Run `aevb serve`; yield its port."""
    server = subprocess.Popen(
        [*AEVB, "serve", *map(str, folders), "--follow", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield int(re.match(r"http://127\.0\.0\.1:(\d+)/", server.stdout.readline())[1])
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


@contextmanager
def serving_here(*folders):
    """Serve in this process, so that a test can change the server's times; yield its port."""
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = Server(create_app(list(folders), Access("127.0.0.1", port), FUNCTIONS))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def eager(monkeypatch):
    """A server that computes a map for every checkpoint, however long that takes."""
    monkeypatch.setattr(live_module, "PAUSE", 0.0)
    monkeypatch.setattr(live_module, "LOOK", 0.2)


def entries_of(folder):
    """The number of entries of each curve in the history of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    keys = [key for line in lines for key in json.loads(line) if described(key) is not None]
    found = {}
    for key in keys:
        which = "validation" if described(key)["validation"] else "training"
        name = f"{described(key)['name']}, {which}"
        found[name] = found.get(name, 0) + 1
    return found


# What a page shows that was not loaded again must be what it shows when it is.
SHOWN = """() => ({
    links: [...document.querySelectorAll("nav a")].map((link) => link.textContent),
    facts: document.querySelector(".facts").textContent,
    table: document.querySelector("#curves details").textContent,
    plots: [...document.querySelectorAll("#curves .line-plot")].map((plot) => plot.ariaLabel),
    legend: document.querySelector("#curves .curves-legend").textContent,
    views: [...document.querySelectorAll("#map select")].map((one) => one.textContent),
    points: aevb.mapPart.points.count,
    findings: document.querySelector("#findings").textContent,
    evidence: document.querySelector("#evidence").textContent,
})"""
ENTRIES = (
    "Number(document.querySelector('#curves details tbody td')?.textContent.replaceAll(',', '')"
    " ?? 0)"
)


def test_a_run_is_followed_from_before_its_start_to_its_end(visit, tmp_path):
    folder = tmp_path / "run"
    with serving(folder) as port:
        page = visit(port)
        assert "has not begun" in page.text(".facts")
        assert "The run has not begun yet." in page.text("#findings")
        arguments = ("--steps", 3000, *OFTEN)
        with training("vae", *DIGITS, *arguments, "--out", folder) as process:
            page.wait_long(f"{ENTRIES} > 0")
            seen = page.js(ENTRIES)
            page.wait_long(f"{ENTRIES} > {seen + 5}")
            page.wait_long(r"/training, step [\d,]+ of 3,000/.test(aevb.facts.textContent)")
            assert "The checks are made when the training has ended." in page.text("#findings")
            page.js("void (aevb.parts.curves.stays = true)")
            page.page.locator("#curves").get_by_label("whole range of values").check()
            process.wait(200)
        page.wait_long(
            "aevb.run.state === 'finished' && aevb.run.checks"
            " && aevb.run.map.spaces[0].views.length === 2"
        )
        page.wait_long("document.querySelector('#evidence .histogram, #evidence figure')")
        # The part is the same one, with what the user has chosen.
        assert page.js("aevb.parts.curves.stays")
        assert page.page.locator("#curves").get_by_label("whole range of values").is_checked()
        page.page.locator("#curves").get_by_label("whole range of values").uncheck()
        page.wait_long("aevb.run.waiting.checks === null")
        page.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 300)))"
        )
        live = page.js(SHOWN)
        assert page.entries() == entries_of(folder)
        page.go()
        page.wait_long("aevb.run.checks && aevb.run.map && aevb.run.summary")
        page.wait_long("aevb.mapPart?.draws > 0")
        assert page.js(SHOWN) == live
        assert live["points"] == 1797


def append(folder, rows):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def seeming_to_train(folder):
    """Hold the lock of a run as its trainer does."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def test_growing_curves_keep_zoom_focus_and_place(visit, tmp_path):
    """Events beyond a thousand are counted, and the first and the last ones are listed."""
    folder = tmp_path / "run"
    train("fa", "--data", "fa", "--steps", 40, "--out", folder)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    bound = {key: value for key, value in last.items() if isinstance(value, int | float)}

    def events(first, count):
        return [
            {"step": 40 + i, "note": f"event {i}", "kind": "folder", "about": "run"}
            for i in range(first, first + count)
        ]

    with seeming_to_train(folder), serving(folder) as port:
        page = visit(port)
        append(folder, [*events(0, 30), {**bound, "step": 100, "elbo": -1.0}])
        page.wait_long("document.querySelectorAll('.curves-events li').length >= 30")
        list_ = page.page.locator(".curves-events")
        page.page.locator("#curves select").first.select_option("epochs")
        list_.locator("button").nth(3).focus()
        page.js("aevb.parts.curves.stays = true")
        page.js("document.querySelector('.curves-events').scrollTop = 40")
        append(folder, [*events(30, 1500), {**bound, "step": 2000, "elbo": -0.5}])
        page.wait_long("document.querySelector('#curves h3').textContent.startsWith('1,5')")
        shown = page.js(
            """() => ({
                stays: aevb.parts.curves.stays,
                unit: document.querySelector("#curves select").value,
                items: document.querySelectorAll(".curves-events li").length,
                place: document.querySelector(".curves-events").scrollTop,
                focused: document.activeElement.textContent,
                heading: document.querySelector("#curves h3").textContent,
                last: document.querySelector(".curves-events li:last-child span").textContent,
            })"""
        )
        listed = "of which the first and the last 500 are listed"
        assert shown == {
            "stays": True,
            "unit": "epochs",
            "items": 1000,
            "place": 40,
            "focused": list_.locator("button").nth(3).inner_text(),
            "heading": f"{len(events_of(folder)):,} events, {listed}",
            "last": "event 1529",
        }


def events_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["note"] for line in lines if "note" in json.loads(line)]


def decoded_by_torch(folder, values):
    found = decode(open_run(folder), {name: np.array(value) for name, value in values.items()})
    return {name: one["mean"] for name, one in found["observed"].items()}


def close(found, expected):
    expected = np.asarray(expected)
    error = np.abs(np.asarray(found) - expected) / np.maximum(1, np.abs(expected))
    return bool((error < TOLERANCE).all())


def choose_on_the_map(page):
    """Zoom, keep a row, select rows, and return what was chosen, by row."""
    return page.js(
        """() => {
            const map = aevb.mapPart;
            map.pin(5);
            const rows = [3, 5, 8, 13, 21];
            map.selectRows(rows, "mine");
            map.camera.zoom(2, 100, 100);
            map.moved();
            return rows;
        }"""
    )


SELECTED = (
    "() => [...aevb.mapPart.selection.mask].flatMap((on, i) => (on ? [aevb.mapPart.rowOf(i)] : []))"
)


def test_a_new_map_keeps_the_place_and_decodes_with_the_new_weights(visit, tmp_path, eager):
    folder = tmp_path / "run"
    with serving_here(folder) as port:
        page = visit(port)
        arguments = ("--steps", 1_000_000, *OFTEN)
        with training("vae", *DIGITS, *arguments, "--out", folder):
            page.wait_long("aevb.mapPart?.draws > 0")
            rows = choose_on_the_map(page)
            page.wait("aevb.mapPart.explorer.found")
            first = page.js(
                "window.first = aevb.mapPart, window.code = first.explorer.values.z, "
                "first.camera.scale / first.camera.base"
            )
            page.page.locator("#map input[type=search]").fill("17")
            page.page.locator("#map input[type=search]").focus()
            page.wait_long("aevb.mapPart !== first && aevb.mapPart?.draws > 0")
            assert page.js(SELECTED) == rows
            assert page.js("[aevb.mapPart.pinned, Number(aevb.mapPart.inspector.dataset.row)]") == [
                5,
                5,
            ]
            assert page.js("aevb.mapPart.camera.scale / aevb.mapPart.camera.base") > 1.2
            assert first > 1.9
            assert page.js("document.activeElement.type") == "search"
            assert page.js("document.activeElement.value") == "17"
            # The kept row has a new code, and p new weights.
            page.wait("aevb.mapPart.explorer.found")
            assert page.js("aevb.mapPart.explorer.values.z.some((v, j) => v !== code[j])")
            # A slider that was set by hand stays where it is.
            page.js(
                """() => {
                    const slider = aevb.mapPart.explorer.inputs.z[1].input;
                    slider.value = 1.5;
                    slider.dispatchEvent(new Event("input"));
                }"""
            )
            page.wait("aevb.mapPart.explorer.values.z[1] === 1.5")
            hand = page.js("window.second = aevb.mapPart, Array.from(second.explorer.values.z)")
            page.wait_long(
                "aevb.mapPart !== second && aevb.mapPart?.draws > 0 && aevb.mapPart.explorer.found"
            )
            assert page.js("Array.from(aevb.mapPart.explorer.values.z)") == hand
            assert page.js(SELECTED) == rows
        # The whole map arrives without a reload, with its second view, log p and the gap.
        page.wait_long("aevb.run.map.spaces[0].views.length === 2")
        page.wait_long("aevb.mapPart?.draws > 0 && aevb.mapPart.explorer.found")
        assert page.js(SELECTED) == rows
        assert page.js("Array.from(aevb.mapPart.explorer.values.z)") == hand
        colours = page.page.locator("#map").get_by_label("Colour by").inner_text()
        assert "log p" in colours
        found = page.js("Array.from(aevb.mapPart.explorer.found.observed.x.mean)")
        assert close(found, decoded_by_torch(folder, {"z": hand})["x"])
        page.page.locator("#map select").first.select_option("0.1")
        page.wait("aevb.mapPart.view.kind === 'neighbours'")


def test_the_server_decodes_what_a_page_cannot(visit, tmp_path):
    """Only `live.decode` is tested here: the sliders of such a model are tested with the map."""
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=generator.normal(size=(60, 5)).astype(np.float32))
    (tmp_path / "model.py").write_text(MODEL)
    folder = tmp_path / "run"
    train(
        f"{tmp_path / 'model.py'}:model",
        "--data",
        tmp_path / "x.npz",
        "--steps",
        30,
        "--out",
        folder,
    )
    with serving_here(folder) as port:
        page = visit(port)
        page.wait_long("aevb.mapPart?.draws > 0")
        assert page.js("aevb.run.map.decoder.runs") is False
        values = {"z": [0.5, -1.25]}
        ask = "(request) => aevb.context().live.decode(0, request)"
        found = page.js(ask, {"values": values})
        assert close(found["observed"]["x"]["mean"], decoded_by_torch(folder, values)["x"])
        # Of many requests at once, the last one is answered.
        many = page.js(
            """async () => {
                const all = Array.from({ length: 20 }, (_, i) =>
                    aevb.context().live.decode(0, { values: { z: [i / 10, 0] } }));
                return (await Promise.all(all)).map((one) => one && one.observed.x.mean);
            }"""
        )
        assert sum(one is not None for one in many) <= 3
        assert close(many[-1], decoded_by_torch(folder, {"z": [1.9, 0]})["x"])
        refused = [
            {"values": {"z": [[0, 0]] * 257}},
            {"values": {"z": ["one", "two"]}},
            {"values": [1]},
            {"values": values, "draw": "yes"},
            {"values": values, "seed": -1},
        ]
        sentences = page.js(
            """(requests) => Promise.all(requests.map(async (request) => {
                const text = encodeURIComponent(JSON.stringify(request));
                const answer = await fetch(`/api/runs/0/decode?request=${text}`);
                return [answer.status, (await answer.json()).error];
            }))""",
            refused,
        )
        assert sentences == [
            [422, "z has more than 256 rows."],
            [422, "The value of z is no array of numbers."],
            [422, "values is an object: the numbers of each variable by its name."],
            [422, "draw is true or false."],
            [422, "seed is a whole number from 0 to 2**63 − 1."],
        ]
        page.trouble = [text for text in page.trouble if "422" not in text]


GROWN = """aevb.content.runs.map((run) =>
    run.growing?.series.find((one) => one.key === "elbo")?.step.array.length ?? 0)"""
LINES = "document.querySelector('#comparison .line-plot').ariaLabel"


@pytest.mark.slow
def test_two_runs_are_compared_while_they_train_and_afterwards(visit, tmp_path):
    folders = [tmp_path / "small", tmp_path / "large"]
    arguments = ("--data", "digits", *OFTEN)
    with serving(*folders) as port:
        page = visit(port)
        with (
            training(
                "vae", *arguments, *SMALL, "--set", "z=2", "--steps", 3000, "--out", folders[0]
            ) as one,
            training("fa", *arguments, "--steps", 3000, "--out", folders[1]) as other,
        ):
            # The curves of both grow, also of the one that is not shown.
            page.wait_long(f"{GROWN}.every((count) => count > 3)")
            seen = page.js(GROWN)
            page.wait_long(f"{GROWN}.every((count, i) => count > {seen}[i])")
            assert "of 2 runs" in page.js(LINES)
            assert "The runs are compared when all of them have ended." in page.text("#comparison")
            one.wait(200)
            other.wait(200)
        page.wait_long("aevb.content.comparison")
        names = page.page.locator("#comparison table").first.locator("tbody th").all_inner_texts()
        assert sorted(names) == ["large", "small"]
        assert sorted(
            run["name"] for run in page.js("aevb.content.runs.map(({ name }) => ({ name }))")
        ) == sorted(names)
        assert "samples per row" in page.text("#comparison table >> nth=0")
        assert page.page.locator("#comparison .small-pictures figure").count() == 1
        # The run that was not shown has its final curves, and its page.
        page.page.locator("header select").select_option("1")
        page.wait_long("aevb.run.name === 'large' && aevb.mapPart?.draws > 0")
        assert page.entries() == entries_of(folders[1])


@pytest.mark.slow
def test_a_page_goes_on_after_the_server_was_started_again(visit, tmp_path):
    folder = tmp_path / "run"
    trainer = training("vae", *DIGITS, "--steps", 1_000_000, *OFTEN, "--out", folder)
    with trainer:
        with serving(folder) as port:
            page = visit(port)
            page.wait_long(f"{ENTRIES} > 3 && aevb.mapPart?.draws > 0")
            page.away = True
        page.wait_long("document.querySelector('.link').textContent !== ''")
        assert "The connection to the server is lost" in page.text(".link")
        assert page.js("aevb.run.state") == "training"
    # The training has ended meanwhile, of which the page knows nothing.
    with serving(folder, port=port):
        page.wait_long("document.querySelector('.link').textContent === ''", 60)
        page.away = False
        page.wait_long("aevb.run.state === 'stopped' && aevb.run.summary.curves.series.length")
        assert "stopped before its end" in page.text(".facts")
        assert page.entries() == entries_of(folder)
