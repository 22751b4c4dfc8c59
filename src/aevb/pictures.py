"""Pictures: image grids, learning curves, trade-offs, and histograms of statistics.

A trade-off is between two costs. The statistics are those of replicated data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aevb.estimate.metric_names import BESIDES, BOUNDS, OBJECTIVE, Metric, is_steps, latent_of
from aevb.runtime.checked_files import whole_file

__all__ = ["grid"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image


def grid(
    images: Any, columns: int, path: str | Path, labels: Sequence[str] = (), *, ink: bool = True
) -> None:
    """Write images in [0, 1] as one PNG file. Small images are enlarged.

    Arguments:
        images: Arrays or tensors [N, height, width], or [N, channels, height, width] with one or
            three channels, as a model samples and reconstructs them; bytes are divided by 255. A
            dictionary holds one row of images per label.
        columns: The number of images per row.
        path: The file.
        labels: Texts to the left of the rows.
        ink: Draw grey levels as dark ink on white paper; otherwise light on black, as in a
            photograph. Three channels are colours.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "drawn.png")
    ...     grid({"data": np.zeros((4, 8, 8)), "drawn": np.ones((4, 8, 8))}, 4, path)
    ...     os.path.exists(path)
    True
    """
    from PIL import Image

    if isinstance(images, Mapping):
        labels, found = list(images), [_pictures(row) for row in images.values()]
        columns = min(columns, *map(len, found))
        pictures = np.concatenate([row[:columns] for row in found])
    else:
        pictures = _pictures(images)
    if pictures.ndim == 3 and ink:
        pictures = 1 - pictures
    n, height, width = pictures.shape[:3]
    rows = math.ceil(n / columns)
    canvas = np.ones((rows * (height + 1) + 1, columns * (width + 1) + 1, *pictures.shape[3:]))
    for i, picture in enumerate(pictures):
        top, left = (i // columns) * (height + 1) + 1, (i % columns) * (width + 1) + 1
        canvas[top : top + height, left : left + width] = picture
    zoom = max(1, round(56 / height))
    whole = Image.fromarray(np.uint8(np.round(255 * canvas).repeat(zoom, 0).repeat(zoom, 1)))
    picture = _labelled(whole, labels, zoom * (height + 1), zoom) if labels else whole
    with whole_file(Path(path)) as place:
        picture.save(place, format="PNG")


def _pictures(images: Any) -> np.ndarray:
    """Images in [0, 1], [N, height, width] or [N, height, width, 3]."""
    whole = images.detach().cpu().numpy() if hasattr(images, "detach") else np.asarray(images)
    # Bytes that are all 0 or 1 are numbers, as in data.
    levels = 255 if whole.dtype == np.uint8 and whole.max(initial=0) > 1 else 1
    found = np.clip(np.nan_to_num(whole.astype(np.float64) / levels, nan=0.5), 0, 1)
    if found.ndim == 4 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim == 4 and found.shape[3] == 1:
        found = found[..., 0]
    if found.ndim == 4 and found.shape[1] == 3:
        found = found.transpose(0, 2, 3, 1)
    if found.ndim != 3 and (found.ndim != 4 or found.shape[3] != 3):
        raise ValueError(
            f"Images have shape [N, height, width] or [N, channels, height, width] with 1 or 3 "
            f"channels, got {list(whole.shape)}. Reshape rows of pixels: x.reshape(-1, height, "
            f"width)."
        )
    return found


def _labelled(picture: Image.Image, labels: Sequence[str], line: int, top: int) -> Image.Image:
    """Add a left margin with one label per row.

    Rows are ``line`` pixels high, and the first starts at ``top``.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(16)
    margin = 12 + math.ceil(max(font.getlength(label) for label in labels))
    whole = Image.new(picture.mode, (picture.width + margin, picture.height), "white")
    whole.paste(picture, (margin, 0))
    pen = ImageDraw.Draw(whole)
    for i, label in enumerate(labels):
        pen.text(
            (margin - 6, top + i * line + line // 2), label, fill="black", font=font, anchor="rm"
        )
    return whole


def curves(history: Mapping[str, np.ndarray], shaded: Sequence[tuple[int, int]] = ()) -> Figure:
    """Plot the bound over the steps, and below it each term in its own panel.

    The evidence is plotted with the bound if it is known.

    ``history`` maps each name to its values, and ``<name>.step`` to the steps. "validation <name>"
    is drawn in the panel of <name>. ``shaded`` holds spans of steps that are drawn as bands: the
    E-steps of alternating training.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = dict.fromkeys(Metric.of(key).name for key in history if not is_steps(key))
    bounds = [name for name in BOUNDS if name in names]
    terms = sorted(
        (name for name in names if name not in (*BOUNDS, *BESIDES)),
        key=lambda name: (name in (OBJECTIVE, "gap"), latent_of(name) is not None),
    )
    columns = max(1, min(3, len(terms)))
    lines = math.ceil(len(terms) / columns)
    figure = Figure(figsize=(8, 3.6 + 1.7 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    layout = figure.add_gridspec(1 + lines, columns, height_ratios=[3.4, *[1.6] * lines])
    top = figure.add_subplot(layout[0, :])
    _panel(top, history, bounds, shaded)
    # The small panels below share these ticks.
    top.xaxis.set_major_locator(MaxNLocator(5 if lines else 8))
    top.set_ylabel("nats per example")
    for i, name in enumerate(terms):
        axes = figure.add_subplot(layout[1 + i // columns, i % columns], sharex=top)
        _panel(axes, history, [name], shaded)
        axes.set_title(
            name
            if name in (OBJECTIVE, "gap") or latent_of(name) is not None
            else f"log p({name}|·)",
            fontsize=9,
            loc="left",
        )
    for axes in figure.axes[-columns:]:
        axes.set_xlabel("step")
    if len(top.lines) > 1:
        top.legend(loc="lower right", fontsize=9, edgecolor="none", framealpha=0.9)
    return figure


def _panel(
    axes: Axes,
    history: Mapping[str, np.ndarray],
    names: Sequence[str],
    shaded: Sequence[tuple[int, int]],
) -> None:
    """Plot training (thin) and validation (bold) curves over the bands.

    The limits ignore the first steps and outliers.
    """
    for i, (start, end) in enumerate(shaded):
        axes.axvspan(start, end, color="0.93", lw=0, zorder=0, label="_" if i else "E-steps")
    for i, name in enumerate(names):
        colour = f"C{i}"
        drawn = [
            (metric.validation, history[metric.key], history[metric.steps])
            for metric in (Metric(name), Metric(name, validation=True))
            if metric.key in history
        ]
        for validation, values, steps in drawn:
            width, alpha = (1.6, 1.0) if validation or len(drawn) == 1 else (0.9, 0.5)
            label = f"{name}, {'validation' if validation else 'training'}"
            axes.plot(
                steps,
                values,
                label=label,
                color=colour,
                lw=width,
                alpha=alpha,
                marker="." if len(values) == 1 else "",
            )
    axes.set_ylim(*_limits([line.get_ydata() for line in axes.lines]))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _limits(curves: Sequence[Any]) -> tuple[float, float]:
    """The range of the curves without their first tenth and without outliers."""
    late = [np.asarray(curve, float)[len(curve) // 10 :] for curve in curves]
    values = np.concatenate([*late, np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = np.quantile(values, [0.02, 0.98])
    reach = 1.5 * (high - low)
    inside = values[(values >= low - reach) & (values <= high + reach)]
    low, high = inside.min(), inside.max()
    margin = 0.06 * (high - low) + 1e-3 * max(1.0, abs(low) / 100)
    return float(low - margin), float(high + margin)


def trade_off(
    panels: Mapping[str, Sequence[tuple[str, str, float, float, bool]]], xlabel: str, *, hollow: str
) -> Figure:
    """Scatter plot of two costs on logarithmic axes, one panel per title.

    Thin lines show constant x × y. A point is (series, label, x, y, hollow or not). Each label has
    a colour and each series a marker; the legend to the right lists both. ``hollow`` is the legend
    text of hollow points.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    points = [point for panel in panels.values() for point in panel]
    series, labels = (list(dict.fromkeys(point[i] for point in points)) for i in range(2))
    markers = dict(zip(series, "osD^v<>pP*X" * len(series), strict=False))
    colours = {label: colormaps["tab20"](i % 20) for i, label in enumerate(labels)}
    figure = Figure(
        figsize=(4.2 * len(panels) + 3.4, max(4.2, 0.19 * len(labels) + 1)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    for axes, (title, panel) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        least = min((y for *_, y, _ in panel if y > 0), default=1.0)
        for name, label, x, y, empty in panel:
            face = "none" if empty else colours[label]
            axes.scatter(
                x,
                max(y, least / 10),
                marker=markers[name],
                s=34,
                facecolors=[face],
                edgecolors=[colours[label]],
                linewidths=1.2,
                zorder=2,
            )
        axes.set(xscale="log", yscale="log", xlabel=xlabel)
        axes.set_title(title, fontsize=9, loc="left")
        _same_product(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    handles = [
        Line2D([], [], ls="", marker=markers[name], color="0.3", label=name) for name in series
    ]
    handles.append(
        Line2D([], [], ls="", marker="o", color="0.3", markerfacecolor="none", label=hollow)
    )
    full = {point[1] for point in points if not point[4]}
    handles += [
        Line2D(
            [],
            [],
            ls="",
            marker="s",
            color=colours[label],
            markerfacecolor=colours[label] if label in full else "none",
            label=label,
        )
        for label in labels
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=7.5, edgecolor="none")
    return figure


def _same_product(axes: Axes) -> None:
    """Draw thin lines of constant x × y behind the points, a factor of ten apart.

    The limits of the axes do not change.
    """
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for power in range(math.floor(math.log10(left * low)), math.ceil(math.log10(right * high)) + 1):
        axes.plot(
            [left, right], [10.0**power / left, 10.0**power / right], color="0.88", lw=0.7, zorder=0
        )
    axes.set(xlim=(left, right), ylim=(low, high))


def replicated(panels: Sequence[tuple[str, float, np.ndarray, float]]) -> Figure:
    """Histograms of replicated statistics, with a line for the statistic of the data.

    A panel is (label, statistic of the data, statistics of the replicates, p-value).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = max(1, min(4, len(panels)))
    lines = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(2.5 * columns, 1.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (label, observed, values, p) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        axes.hist(values, bins=min(30, max(1, len(np.unique(values)))), color="0.75")
        axes.axvline(observed, color="C3" if p < 0.02 else "C0", lw=1.8)
        axes.set_title(f"{label}, p = {p:.3f}", fontsize=8, loc="left")
        axes.set_yticks([])
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=7)
    return figure
