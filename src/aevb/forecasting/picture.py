"""Draw forecasts: the past of each series, and intervals that open like a fan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aevb.runtime.checked_files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from aevb.forecasting.forecast import Forecast

LEVELS = (0.95, 0.8, 0.5)  # of the intervals, the widest first
SHADES = ("#cfe1f2", "#94c4df", "#4a98c9")  # light to dark blue: told apart without colour vision
MEDIAN, PAST = "#08306b", "#333333"
PANELS = 12  # panels that a picture has at most, unless it is asked for more
SHOWN = 8  # the past is shown for this many times the horizon
KINDS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Panel:
    """One series: its past, and quantiles of its future at the levels of ``LEVELS``.

    ``bands`` are [levels, 2, steps]; unknown values of the past are NaN.
    """

    title: str
    times: np.ndarray
    past: np.ndarray
    times_ahead: np.ndarray
    median: np.ndarray
    bands: np.ndarray


def plot(
    forecast: Forecast,
    path: str | Path,
    *,
    panels: int = PANELS,
    past: int | None = None,
    start: float = 1.0,
    spacing: float = 1.0,
    time: str = "step",
    columns: Sequence[str] | None = None,
) -> None:
    """Write a picture of a forecast, one panel per row and entry, as .png, .svg or .pdf.

    At most ``panels`` of them are drawn; the picture says so. ``past`` is the number of past steps
    to show. The first step of a row has the time ``start``, and steps are ``spacing`` apart;
    ``time`` names the axis. ``columns`` names the entries of all variables. If the past was a
    frame, times and names are those of the frame; series of one step have numbers as times.
    """
    if isinstance(panels, bool) or not isinstance(panels, int) or panels < 1:
        raise ValueError(f"panels is the largest number of panels, from 1 on. Got {panels!r}.")
    check_kind(path)
    named = None if columns is None else list(columns)
    wanted = sum(math.prod(mean.shape[2:]) for mean in forecast.mean.values())
    if named is not None and len(named) != wanted:
        raise ValueError(
            f"columns names the {wanted} entries of {', '.join(forecast.mean)}; got {len(named)}."
        )
    index = forecast.index
    if index is not None and index.spacing is not None and time == "step":
        time = str(index.time_name)
    every = panels_of(forecast, named, start, spacing)
    save(fan(list(every), time=time, panels=panels, past=past), path)


def check_kind(path: str | Path) -> None:
    """Raise ValueError unless the path ends in a kind of picture."""
    if Path(path).suffix not in KINDS:
        raise ValueError(f"A picture is a {', '.join(KINDS[:-1])} or {KINDS[-1]} file, got {path}.")


def panels_of(
    forecast: Forecast, columns: list[str] | None, start: float, spacing: float
) -> Iterator[Panel]:
    """Yield the panels of a forecast, all entries of a row after each other."""
    ends = [end for level in LEVELS for end in ((1 - level) / 2, (1 + level) / 2)]
    quantiles = {
        name: value.double().cpu().numpy()
        for name, value in forecast.quantile([*ends, 0.5]).items()
    }
    lengths = forecast.lengths.cpu().numpy()
    index = forecast.index
    # The dates of later steps are unknown if each series has one step: then steps are numbered.
    ahead = None if index is None or index.spacing is None else index.ahead(forecast.steps)
    for row, length in enumerate(lengths):
        titles = iter(columns or ())
        times = start + spacing * np.arange(length)
        times_ahead = start + spacing * (length + np.arange(forecast.steps))
        among = f", row {row}" if len(lengths) > 1 else ""
        if index is not None and ahead is not None:
            times, times_ahead = index.drawn(index.times[row]), index.drawn(ahead[row])
        if index is not None:
            among = "" if index.ids is None else f", {index.id_name} {index.ids[row]}"
        for name, whole in quantiles.items():
            past = (
                forecast.past[name][row]
                .double()
                .cpu()
                .numpy()
                .reshape(len(forecast.past[name][row]), -1)
            )
            each = whole[:, row].reshape(len(whole), forecast.steps, -1)
            known = () if index is None else index.columns.get(name, ())
            for entry in range(each.shape[-1]):
                own = name + (f"[{entry}]" if each.shape[-1] > 1 else "")
                title = next(titles, known[entry] if len(known) == each.shape[-1] else own)
                yield Panel(
                    title + among,
                    times,
                    past[:length, entry],
                    times_ahead,
                    each[-1, :, entry],
                    each[:-1, :, entry].reshape(len(LEVELS), 2, forecast.steps),
                )


def fan(
    every: Sequence[Panel], *, time: str = "step", panels: int = PANELS, past: int | None = None
) -> Figure:
    """Draw the panels; the last known value joins the fan to the past."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = every[:panels]
    across = 1 if len(shown) == 1 else 2 if len(shown) <= 4 else 3
    down = math.ceil(len(shown) / across)
    width = 7.0 if across == 1 else 3.6 * across
    figure = Figure(figsize=(width, 0.5 + (3.4 if down == 1 else 2.1 * down)), layout="constrained")
    FigureCanvasAgg(figure)
    for i, panel in enumerate(shown):
        axes = figure.add_subplot(down, across, i + 1)
        _draw(axes, panel, past)
        axes.set_title(panel.title, fontsize=9, loc="left")
        if panel.times.dtype.kind == "M":
            dates = AutoDateLocator(maxticks=6 if across == 1 else 4)  # type: ignore[no-untyped-call]
            axes.xaxis.set_major_locator(dates)
            axes.xaxis.set_major_formatter(ConciseDateFormatter(dates))  # type: ignore[no-untyped-call]
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6 if across == 1 else 4, integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if i >= len(shown) - across:
            axes.set_xlabel(time, fontsize=9)
        if i % across == 0:
            axes.set_ylabel("value", fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False
    )
    if len(every) > len(shown):
        figure.suptitle(
            f"{len(shown)} of {len(every)} series are shown", fontsize=9, x=0.01, ha="left"
        )
    return figure


def _draw(axes: Axes, panel: Panel, past: int | None) -> None:
    count = max(SHOWN * len(panel.times_ahead), 24) if past is None else past
    first = max(len(panel.times) - count, 0)
    times, values = panel.times[first:], panel.past[first:]
    axes.plot(times, values, color=PAST, lw=1.1, marker=".", ms=2.5, label="past")
    known = np.flatnonzero(~np.isnan(panel.past))
    joined = len(known) and known[-1] == len(panel.past) - 1 and count
    begin = panel.times[-1:] if joined else panel.times[:0]
    last = [panel.past[-1]] if joined else []
    ahead = np.concatenate([begin, panel.times_ahead])
    marker = "o" if len(ahead) == 1 else ""
    for level, shade, (low, high) in zip(LEVELS, SHADES, panel.bands, strict=True):
        if marker:  # an area needs two steps
            axes.vlines(ahead, low, high, color=shade, lw=7, label=f"{level:.0%} interval")
            continue
        axes.fill_between(
            ahead,
            np.concatenate([last, low]),
            np.concatenate([last, high]),
            color=shade,
            lw=0,
            label=f"{level:.0%} interval",
        )
    middle = np.concatenate([last, panel.median])
    axes.plot(ahead, middle, color=MEDIAN, lw=1.4, marker=marker, ms=4, label="median")
    axes.margins(x=0.01)


def save(figure: Figure, path: str | Path) -> None:
    """Write a picture to a file."""
    kind: Mapping[str, Any] = {"dpi": 150} if Path(path).suffix == ".png" else {}
    with whole_file(Path(path)) as place:
        figure.savefig(place, **kind)
