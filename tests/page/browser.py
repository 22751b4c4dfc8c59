"""Small trained runs, their pages, and a real browser that shows them.

The runs take a few steps each: the tests compare a page with the data and with torch, and no test
needs a good model.
"""

import contextlib
import csv
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aevb import Model, Network, Normal, fit, mlp
from aevb.cli import app
from aevb.cli.page_subjects import open_for_page
from aevb.data.builtin import at_hand, mnist
from aevb.page.html import document, write_page
from aevb.page.packing import unpack
from aevb.page.sections import Opened, section
from aevb.page.subject import Split, Subject

PENGUINS = Path(__file__).parents[2] / "docs/data/penguins.csv"
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
TIMEOUT = 10_000  # milliseconds
SMALL = ("--set", "hidden=[16]")
MARKUP = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(2)</script>"


# Runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sine(Network):
    """A network that no page can run."""

    def build(self, parents, heads, shape, masked):
        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(
                    torch.randn(sum(map(np.prod, parents.values())), sum(heads))
                )

            def first(self, inputs, *, bias=True, missing=None):
                parts = list(inputs.values())
                shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
                return torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], -1)

            def rest(self, h, keep=()):
                return torch.sin(h @ self.weight)

        return Module()


def train(*arguments: Any) -> None:
    """Run ``aevb train`` in this process, without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app(["train", *map(str, arguments)], standalone_mode=False)


def images(folder: Path) -> Path:
    """A file of 28 × 28 images: MNIST if it is on this machine, and enlarged digits otherwise."""
    if at_hand("mnist"):
        values = mnist()[0].pixels[:300].reshape(-1, 28, 28)
        values = values / values.max()
    else:
        from sklearn.datasets import load_digits

        small = load_digits().images[:300]
        values = np.kron(small, np.ones((4, 4)))[:, 2:30, 2:30] / 16
    # A pixel that is the same in every row would have no density.
    values = 0.9 * values + 0.1 * np.random.default_rng(0).random(values.shape)
    np.savez(folder / "images.npz", x=values.astype(np.float32))
    return folder / "images.npz"


def ragged(folder: Path) -> Path:
    """Sequences of 5 to 11 steps with two entries."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 12, 40)
    lengths[0] = 11
    values = generator.normal(size=(40, 13, 2)).astype(np.float32)  # two steps of padding
    np.savez(folder / "ragged.npz", x=values, lengths=lengths)
    return folder / "ragged.npz"


def hostile(folder: Path) -> Path:
    """A table whose names and cells are markup."""
    generator = np.random.default_rng(0)
    with (folder / "hostile.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([MARKUP, SCRIPT, "=1+1"])
        for i in range(60):
            word = [SCRIPT, MARKUP, "&amp;\"'"][i % 3]
            writer.writerow([f"{generator.normal() + 3 * (i % 3):.4f}", word, f"{i % 7}.5"])
    return folder / "hostile.csv"


def train_run(name: str, folder: Path) -> Path:
    """Train the run of a page into a folder, and return the folder."""
    out = folder / (MARKUP.replace("1", "3") if name == "hostile" else name)
    sequences = ("--set", "h=8", "--set", "layers=1", "--steps", 4, *SMALL)
    steps = ("--steps", 40)
    if name == "fa":
        train("fa", "--data", "fa", *steps, "--out", out)
    elif name in ("vae", "cvae", "m2"):
        train(name, "--data", "digits", "--set", "z=2", *SMALL, *steps, "--out", out)
    elif name == "gmvae":
        train("gmvae", "--data", "digits", "--set", "z=3", *SMALL, *steps, "--out", out)
    elif name == "images":
        likelihood = ("--set", "likelihood=Normal", "--set", "z=1")
        train("vae", "--data", images(folder), *likelihood, *SMALL, *steps, "--out", out)
    elif name == "vrnn":
        train("vrnn", "--data", "digits", *sequences, "--out", out)
    elif name == "ragged":
        likelihood = ("--set", "likelihood=Normal", "--hold-out", 0.2)
        train("vrnn", "--data", ragged(folder), *likelihood, *sequences, "--out", out)
    elif name == "penguins":
        columns = ("--without", "species", "--hold-out", 0.2)
        train(PENGUINS, "--model", "vae", *columns, *steps, "--out", out)
    elif name == "hostile":
        train(hostile(folder), "--model", "vae", *steps, "--out", out)
    else:
        raise LookupError(name)
    return out


def run_in_memory() -> Opened:
    """A run whose decoder is a network of the user's, so that a page holds decoded points."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    x = np.sin(generator.normal(size=(200, 2)) @ generator.normal(size=(2, 5))).astype(np.float32)
    model = Model({"z": Normal(2), "x | z": Normal(5, net=Sine())}, {"z | x": Normal(net=mlp(8))})
    run = fit(model, {"x": x}, steps=30)
    subject = Subject("sine", model, [Split("", {"x": x})], run=run)
    return Opened("sine", None, model, run, run.rows, None, subject)


# Pages --------------------------------------------------------------------------------------------

CHECKED = ("fa", "penguins")  # whose checks are computed; they take seconds
ROWS = {"gmvae": 400, "vrnn": 150}  # fewer points, for speed


@dataclass
class Made:
    """A page, the run that it shows, and the data in it."""

    name: str
    file: Path
    content: dict[str, Any]
    opened: Opened
    folder: Path | None

    @property
    def map(self) -> dict[str, Any]:
        return self.content["runs"][0]["map"]

    @property
    def model(self) -> Model:
        assert self.opened.model is not None
        return self.opened.model

    @property
    def view(self) -> dict[str, Any]:
        return self.map["spaces"][0]["views"][0]

    @cached_property
    def points(self) -> np.ndarray:
        """The quantised coordinates of the first view, [P, 2]."""
        sides = [unpack(self.view[side]["values"]) for side in ("across", "up")]
        return np.stack(sides, 1).astype(np.int64)

    @cached_property
    def row_of(self) -> np.ndarray:
        """The row of each point."""
        row = self.map["spaces"][0]["row"]
        return np.arange(len(self.points)) if row is None else unpack(row)

    def place(self, row: int) -> tuple[Split, int]:
        """The split of a row of the map, and its number there."""
        rows = self.map["rows"]
        split = 0 if rows["split"] is None else int(unpack(rows["split"])[row])
        numbers = rows["numbers"]
        number = row if numbers is None else int(unpack(numbers)[row])
        assert self.opened.subject is not None
        return self.opened.subject.splits[split], number


def make_page(name: str, folder: Path) -> Made:
    if name == "sine":
        opened, run = run_in_memory(), None
    else:
        run = train_run(name, folder)
        opened = open_for_page(run)
    return write(name, opened, folder, run)


def write(name: str, opened: Opened, folder: Path, run: Path | None) -> Made:
    part = {
        "name": opened.name,
        "folder": "",
        "state": "finished",
        "problems": list(opened.problems),
    }
    for one in ("summary", "map", "checks"):
        options = {"rows": ROWS[name]} if one == "map" and name in ROWS else {}
        skipped = one == "checks" and name not in CHECKED
        part[one] = None if skipped else section(opened, one, **options)
        part["problems"] += (part[one] or {}).get("problems", [])
    content = document([part])
    file = folder / f"{name}.html"
    write_page(content, file)
    return Made(name, file, content, opened, run)


# The browser --------------------------------------------------------------------------------------


@dataclass
class Visit:
    """A page that is open in the browser, and all that went wrong in it."""

    page: Any
    made: Made
    trouble: list[str] = field(default_factory=list)

    def js(self, expression: str, argument: Any = None) -> Any:
        return self.page.evaluate(expression, argument)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true. The page's policy forbids to evaluate it from within,
        as ``wait_for_function`` does.
        """
        self.js(
            f"""async () => {{
                const end = performance.now() + {TIMEOUT};
                while (!({condition})) {{
                    if (performance.now() > end) throw new Error("this stays false");
                    await new Promise((next) => setTimeout(next, 5));
                }}
            }}"""
        )

    def listen(self) -> None:
        page, own = self.page, self.made.file.as_uri()
        page.set_default_timeout(TIMEOUT)

        def console(message: Any) -> None:
            if message.type in ("error", "warning", "assert"):
                self.trouble.append(f"console: {message.text}")

        def request(request: Any) -> None:
            address = request.url.partition("#")[0]
            if address != own and not address.startswith("blob:"):
                self.trouble.append(f"request: {request.url[:200]}")

        def dialog(dialog: Any) -> None:
            self.trouble.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("console", console)
        page.on("request", request)
        page.on("dialog", dialog)
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))

    def go(self, fragment: str = "") -> None:
        """Open the file anew."""
        self.page.goto("about:blank")
        self.page.goto(self.made.file.as_uri() + (f"#{fragment}" if fragment else ""))
        self.ready()

    def ready(self) -> None:
        self.page.wait_for_selector("#page[data-ready]")
        assert self.page.get_attribute("#page", "data-ready") == "1"
        if self.js("Boolean(aevb.mapPart)"):
            self.wait("aevb.mapPart?.draws >= 1")

    def fresh(self) -> None:
        """Bring the map back to its first state."""
        self.js(
            """() => {
                const map = aevb.mapPart;
                map.clearSelection();
                map.useTool("move");
                map.camera.reset();
                map.moved();
                map.canvas.scrollIntoView({ block: "center", behavior: "instant" });
            }"""
        )

    def box(self) -> dict[str, float]:
        return self.page.locator("canvas.map").bounding_box()

    def pixels(self) -> np.ndarray:
        """Where the points lie in the window, [P, 2]."""
        camera = self.js(
            "(({ x, y, scale, aspect, width, height }) => "
            "({ x, y, scale, aspect, width, height }))(aevb.mapPart.camera)"
        )
        box = self.box()
        x, y = self.made.points.T
        across = box["x"] + camera["width"] / 2 + (x - camera["x"]) * camera["scale"]
        up = (y - camera["y"]) * camera["scale"] * camera["aspect"]
        return np.stack([across, box["y"] + camera["height"] / 2 - up], 1)

    def decoded(self) -> dict[str, Any]:
        """Wait until the explorer has decoded, and return its values and means."""
        self.wait("!aevb.mapPart.explorer.pending && aevb.mapPart.explorer.found")
        return self.js(
            """() => {
                const { values, fixed, found } = aevb.mapPart.explorer;
                const plain = (one) => Object.fromEntries(
                    Object.entries(one).map(([name, value]) => [name, Array.from(value)]));
                return { values: plain(values), fixed: [...fixed],
                    means: plain(Object.fromEntries(Object.entries(found.observed)
                        .map(([name, { mean }]) => [name, mean]))) };
            }"""
        )

    def downloaded(self, button: Any) -> tuple[str, bytes]:
        """Press a button that saves a file: the file's name and content."""
        with self.page.expect_download() as download:
            button.click()
        return download.value.suggested_filename, Path(download.value.path()).read_bytes()


class Site:
    """The pages of the tests, made on demand and opened once."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.context = browser.new_context(
            viewport={"width": 1280, "height": 900}, accept_downloads=True, color_scheme="light"
        )
        self.pages: dict[str, Made] = {}
        self.visits: dict[str, Visit] = {}

    def made(self, name: str) -> Made:
        if name not in self.pages:
            self.pages[name] = make_page(name, self.folder)
        return self.pages[name]

    def open(self, made: Made, context: Any = None, fragment: str = "") -> Visit:
        """Open a page in a new tab."""
        found = Visit((context or self.context).new_page(), made)
        found.listen()
        found.go(fragment)
        return found

    def visit(self, name: str) -> Visit:
        """The tab of a page, with its map as at the start."""
        if name not in self.visits:
            self.visits[name] = self.open(self.made(name))
        found = self.visits[name]
        found.page.bring_to_front()  # a tab behind another one draws once a second
        if self.made(name).map is not None:
            found.fresh()
        return found


@contextlib.contextmanager
def start_browser() -> Iterator[Any]:
    """Start Chromium without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The contrast of two colours (0 … 255), by WCAG 2.

    >>> contrast((0, 0, 0), (255, 255, 255))
    21.0
    """

    def luminance(colour: tuple[float, ...]) -> float:
        parts = [value / 255 for value in colour]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return round((light + 0.05) / (dark + 0.05), 6)


def inside(polygon: list[tuple[int, int]], points: np.ndarray) -> np.ndarray:
    """Which integer points lie in a polygon, by the even–odd rule in exact arithmetic.

    >>> inside([(0, 0), (4, 0), (4, 4), (0, 4)], np.array([[1, 1], [5, 1]])).tolist()
    [True, False]
    """
    x, y = points.T.astype(np.int64)
    odd = np.zeros(len(points), bool)
    for (xi, yi), (xj, yj) in zip(polygon, [polygon[-1], *polygon[:-1]], strict=True):
        crosses = (yi > y) != (yj > y)
        # x < xi + (xj − xi)(y − yi) / (yj − yi), multiplied by the denominator
        left = (x - xi) * (yj - yi)
        right = (xj - xi) * (y - yi)
        odd ^= crosses & (left < right if yj > yi else left > right)
    return odd
