"""Pictures: a grid of images, learning curves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np


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


def curves(history: dict[str, np.ndarray], path: str | Path) -> None:
    """Write the bound (and the evidence, where known) over the steps, in training and validation, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [name for name in ("elbo", "iwae", "evidence", "validation elbo", "validation evidence") if name in history]
    for name in shown:
        axes.plot(history[f"{name}.step"], history[name], label=name, lw=1.2)
    start = [history[name][len(history[name]) // 10 :] for name in shown]
    low, high = min(part.min() for part in start), max(part.max() for part in start)
    axes.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.05 * (high - low) + 1e-6)
    axes.set_xlabel("step")
    axes.set_ylabel("nats an example")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
