"""How large pages are, and how fast they open and draw, by the number of rows.

A small model is trained on a table of eight columns with clusters. Its pages show the summary and
the map of 10,000, 100,000 and 1,000,000 rows, without checks. Chromium without a window and without
a graphics card opens them. Times are medians of seven, except those of writing and opening, and of
the first redraws.

    python benchmarks/page_size.py
    python benchmarks/page_size.py --rows 10000 100000 --json page_size.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from playwright.sync_api import sync_playwright

from aevb import Model, Normal, fit, mlp
from aevb.page.html import document, write_page
from aevb.page.sections import Opened, section
from aevb.page.subject import Split, Subject

ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--enable-precise-memory-info",
]
COLUMNS, CLUSTERS = 8, 10
# Medians in milliseconds. The last line of a drawing reads a pixel, so that it has happened.
MEASURED = """() => {
    const map = window.aevb.mapPart, context = map.canvas.getContext("2d");
    const median = (act) => {
        const found = Array.from({ length: 7 }, (_, i) => {
            const began = performance.now();
            act(i);
            return performance.now() - began;
        });
        return found.sort((a, b) => a - b)[3];
    };
    const draw = () => { map.draw(); context.getImageData(0, 0, 1, 1); };
    const { points } = map;
    const middle = (values) => values.slice().sort()[Math.floor(values.length / 2)];
    const x = middle(points.across), y = middle(points.up);
    const corners = [[-1, -1], [x, -1], [x, y], [-1, y]];
    // 60 corners along the edges of the quarter of the plane below and left of the medians.
    const quarter = corners.flatMap(([a, b], i) => {
        const [c, d] = corners[(i + 1) % 4];
        return Array.from({ length: 15 }, (_, k) => k / 15)
            .map((t) => [a + (c - a) * t, b + (d - b) * t]);
    });
    // The browser compiles the loop over the points while it runs for the first times.
    const early = Array.from({ length: 3 }, () => {
        const began = performance.now();
        draw();
        return performance.now() - began;
    });
    const cold = Math.max(...early);
    const pan = median((i) => { map.camera.pan(i % 2 ? 7 : -7, 3); draw(); });
    const grid = median(() => { points.index = null; points.grid(); });
    const near = median((i) => points.nearest(20000 + 300 * i, 30000, 600, 600));
    const names = map.map.colours.map((one) => one.name);
    const colour = median((i) => { map.showColour(names[i % names.length]); draw(); });
    const lasso = median(() => { map.lasso(quarter); draw(); });
    const selected = map.selection.count;
    const inside = median(() => points.inside(quarter));
    return { cold, pan, grid, near, colour, lasso, inside, selected };
}"""


def rows_of(n: int, seed: int = 0) -> np.ndarray:
    """A table with clusters, [n, 8]."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(1).normal(scale=3, size=(CLUSTERS, COLUMNS))
    return np.asarray(
        centres[generator.integers(CLUSTERS, size=n)] + generator.normal(size=(n, COLUMNS)),
        dtype=np.float32,
    )


def trained() -> Model:
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(2), "x | z": Normal(COLUMNS, net=mlp(32))}, {"z | x": Normal(net=mlp(32))}
    )
    fit(model, {"x": rows_of(5000)}, steps=400, batch=128)
    return model


def write(model: Model, n: int, file: Path) -> dict[str, Any]:
    """Write the page of n rows: its size in bytes, and seconds."""
    began = time.perf_counter()
    subject = Subject("clusters", model, [Split("", {"x": rows_of(n, seed=2)})])
    opened = Opened("clusters", model=model, subject=subject)
    parts = {part: section(opened, part) for part in ("summary", "map")}
    computed = time.perf_counter()
    run = {"name": "clusters", "folder": "", "state": "finished", "problems": [], "checks": None}
    write_page(document([run | parts]), file)
    ended = time.perf_counter()
    return {
        "rows": n,
        "bytes": file.stat().st_size,
        "compute_s": computed - began,
        "write_s": ended - computed,
    }


def look(browser: Any, file: Path) -> dict[str, Any]:
    """Open a page, and measure it. Times are milliseconds, memory is bytes."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(120_000)
    page.goto(file.as_uri())
    first = page.evaluate(
        """async () => {
            while (!(window.aevb?.mapPart?.draws >= 1)) {
                await new Promise((next) => setTimeout(next, 2));
            }
            return performance.now();
        }"""
    )
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")
    found = {
        "first_ms": first,
        "heap": heap["usedSize"],
        "buffers": heap.get("backingStorageSize"),
        **page.evaluate(MEASURED),
    }
    page.close()
    return found


def table(found: list[dict[str, Any]]) -> str:
    head = (
        "| rows | file, MB | computed, s | written, s | first picture, ms | heap + arrays, MB "
        "| slowest of the first three redraws, ms | pan, ms | search grid, ms "
        "| lasso and its panel, ms | points in the lasso, ms | colour, ms |"
    )
    lines = [head, "|" + "---:|" * 12]
    for one in found:
        memory = f"{one['heap'] / 2**20:.0f} + {(one['buffers'] or 0) / 2**20:.0f}"
        times = [one[key] for key in ("cold", "pan", "grid", "lasso", "inside", "colour")]
        cells = [
            f"{one['rows']:,}",
            f"{one['bytes'] / 2**20:.1f}",
            f"{one['compute_s']:.1f}",
            f"{one['write_s']:.1f}",
            f"{one['first_ms']:.0f}",
            memory,
            *(f"{value:.1f}" for value in times),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    options = parser.parse_args()
    model = trained()
    found = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=ARGUMENTS)
        for n in options.rows:
            file = Path(folder) / f"{n}.html"
            found.append(write(model, n, file) | look(browser, file))
        browser.close()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
