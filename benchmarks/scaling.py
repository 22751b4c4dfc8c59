"""Measure how the time of a step of ``fit`` grows, and the time of an import.

The studies vary the data, latents, classes, sequences, processes, and runs together.

python benchmarks/scaling.py                              # all; writes into docs/figures
python benchmarks/scaling.py --only classes length        # some of the studies
python benchmarks/scaling.py --quick --out /tmp/scaling   # tiny sizes: whether everything runs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import torch
from imports import startup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from studies import STUDIES, Place, processes, record, worker
from timing import use_cores

NAMES = [*STUDIES, "processes", "startup"]
COLOURS = ("#2f6b4f", "#b5482f", "#34568b", "#8a6d1d")


def run(names: Sequence[str], place: Place) -> tuple[dict[str, Any], dict[str, str]]:
    """Run studies by name; return them, and the reasons why some were left out."""
    found, left_out = {}, {}
    for name in names:
        print(name, flush=True)
        if name == "startup":
            found[name] = {"what": "seconds from start to end", "commands": startup(place.rounds)}
        elif name == "processes":
            count = torch.cuda.device_count() if place.device == "cuda" else 2
            if count < 2:
                left_out[name] = "one GPU, which several processes would share"
            else:
                found[name] = processes(place)
        elif place.device not in STUDIES[name].devices:
            left_out[name] = (
                f"runs take turns on a {place.device.upper()}, and n of them cost n times one"
            )
        else:
            found[name] = STUDIES[name].run(place)
    return found, left_out


def _with_earlier(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Return the record, together with earlier studies of the file that were not run again.

    The earlier record must be of the same machine and length.
    """
    before = json.loads(path.read_text()) if path.exists() else None
    if before is None or any(before[key] != now[key] for key in ("machine", "rounds", "seconds")):
        return now
    studies = {
        name: (before["studies"] | now["studies"])[name]
        for name in NAMES
        if name in before["studies"].keys() | now["studies"].keys()
    }
    return now | {"studies": studies, "left out": before["left out"] | now["left out"]}


def picture(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one panel per study: ms per step against its variable, one line style per machine."""
    panels = [name for name in NAMES if any(name in one["studies"] for one in records)]
    columns = min(3, len(panels))
    figure = Figure(figsize=(3.6 * columns, 2.9 * -(-len(panels) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).ravel()
    for axes, name in zip(grid, panels, strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        here = [one for one in records if name in one["studies"]]
        if name == "startup":
            _bars(axes, here, name)
        else:
            _lines(axes, here, name, say_where=len(records) > 1)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=110)


def _lines(axes: Any, records: Sequence[dict[str, Any]], name: str, *, say_where: bool) -> None:
    for one in records:
        kind, style = {"cpu": ("CPU", "-"), "cuda": ("GPU", "--")}[one["machine"]["kind"]]
        for (line, points), colour in zip(
            one["studies"][name]["lines"].items(), COLOURS, strict=False
        ):
            label = f"{line}, {kind}" if say_where else line
            axes.plot(
                [p["value"] for p in points],
                [p["ms"] for p in points],
                style,
                color=colour,
                marker="o",
                ms=3,
                label=label,
            )
    values = [point["value"] for point in next(iter(records[0]["studies"][name]["lines"].values()))]
    axes.set_xscale("log")
    axes.set_yscale("log")
    if max(values) < 10**3:
        axes.set_xticks(values, [str(value) for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    middle, half = (low * high) ** 0.5, max(high / low, 10) ** 0.5
    axes.set_ylim(middle / half, middle * half)  # so that a flat line looks flat
    axes.set_xlabel(records[0]["studies"][name]["what"])
    axes.set_ylabel("ms a step")
    axes.legend(frameon=False, fontsize="small")


def _bars(axes: Any, records: Sequence[dict[str, Any]], name: str) -> None:
    commands = records[0]["studies"][name]["commands"]
    axes.barh(
        [fill(command, 16) for command in commands],
        [row["ms"] / 1e3 for row in commands.values()],
        color="#2f6b4f",
    )
    axes.invert_yaxis()
    axes.set_xlabel("seconds from start to end")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--threads", type=int, help="number of threads and cores; by default all cores"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "docs" / "figures"
    )
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        worker(given.worker)
        return
    if given.threads is not None:
        use_cores(given.threads)
    torch.set_float32_matmul_precision("high" if given.device == "cuda" else "highest")
    given.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        place = Place(
            given.device,
            Path(folder),
            *((1, 0.005, True) if given.quick else (given.rounds, given.seconds, False)),
        )
        found, left_out = run(given.only, place)
    path, now = given.out / f"scaling-{given.device}.json", record(place, found, left_out)
    path.write_text(json.dumps(_with_earlier(path, now), indent=1) + "\n")
    picture(
        [json.loads(one.read_text()) for one in sorted(given.out.glob("scaling-*.json"))],
        given.out / "scaling.png",
    )
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")


if __name__ == "__main__":
    main()
