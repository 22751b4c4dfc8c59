"""Pictures: a grid of images, learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def grid(images: np.ndarray, columns: int, path: str | Path) -> None:
    """Write images [N, height, width] in [0, 1] as one PNG, ``columns`` a row, each enlarged to be seen."""
    from matplotlib import image

    n, height, width = images.shape
    rows = math.ceil(n / columns)
    canvas = np.ones((rows * (height + 1) + 1, columns * (width + 1) + 1))
    for i, picture in enumerate(images):
        top, left = (i // columns) * (height + 1) + 1, (i % columns) * (width + 1) + 1
        canvas[top : top + height, left : left + width] = 1 - picture  # ink on paper
    zoom = max(1, round(56 / height))
    image.imsave(path, canvas.repeat(zoom, 0).repeat(zoom, 1), cmap="gray", vmin=0, vmax=1)


def curves(history: Mapping[str, np.ndarray], shaded: Sequence[tuple[int, int]] = ()) -> Figure:
    """The bound (and the evidence, where known) over the steps, and below it each term on an axis of its own.

    ``history`` has, for every name, the values, and in ``<name>.step`` the steps; a name that starts with "validation " is drawn
    with the name itself. ``shaded`` are spans of steps, drawn as bands: the E-steps of alternating training.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    bounds = [name for name in ("elbo", "iwae", "expected", "evidence") if name in history or f"validation {name}" in history]
    besides = (*bounds, "epoch", "lr", "gradient", "kl weight", "seconds")
    names = dict.fromkeys(name.removeprefix("validation ") for name in history if not name.endswith(".step"))
    terms = sorted((name for name in names if name not in besides), key=lambda name: (name == "gap", name.startswith("kl(")))
    columns = max(1, min(3, len(terms)))
    lines = math.ceil(len(terms) / columns)
    figure = Figure(figsize=(8, 3.6 + 1.7 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    layout = figure.add_gridspec(1 + lines, columns, height_ratios=[3.4, *[1.6] * lines])
    top = figure.add_subplot(layout[0, :])
    _panel(top, history, bounds, shaded)
    top.xaxis.set_major_locator(MaxNLocator(5 if lines else 8))  # shared with the small panels below
    top.set_ylabel("nats an example")
    for i, name in enumerate(terms):
        axes = figure.add_subplot(layout[1 + i // columns, i % columns], sharex=top)
        _panel(axes, history, [name], shaded)
        axes.set_title(name if name == "gap" or name.startswith("kl(") else f"log p({name}|·)", fontsize=9, loc="left")
    for axes in figure.axes[-columns:]:
        axes.set_xlabel("step")
    if len(top.lines) > 1:
        top.legend(loc="lower right", fontsize=9, edgecolor="none", framealpha=0.9)
    return figure


def _panel(axes: Axes, history: Mapping[str, np.ndarray], names: Sequence[str], shaded: Sequence[tuple[int, int]]) -> None:
    """Names in training (thin) and validation (strong), over bands, with limits that the first steps and outliers do not set."""
    for i, (start, end) in enumerate(shaded):
        axes.axvspan(start, end, color="0.93", lw=0, zorder=0, label="_" if i else "E-steps")
    for i, name in enumerate(names):
        colour = f"C{i}"
        drawn = [(side, history[side + name], history[f"{side}{name}.step"]) for side in ("", "validation ") if side + name in history]
        for side, values, steps in drawn:
            width, alpha = (1.6, 1.0) if side or len(drawn) == 1 else (0.9, 0.5)
            label = f"{name}, {'validation' if side else 'training'}"
            axes.plot(steps, values, label=label, color=colour, lw=width, alpha=alpha, marker="." if len(values) == 1 else "")
    axes.set_ylim(*_limits([line.get_ydata() for line in axes.lines]))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _limits(curves: Sequence[Any]) -> tuple[float, float]:
    """The range of the curves without their first tenth, and without what lies far outside the middle of the rest."""
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
