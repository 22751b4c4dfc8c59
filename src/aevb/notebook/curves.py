"""Small plots as SVG, drawn by hand: a curve of training, a histogram.

Their colours are ``currentColor`` and the card's accent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

WIDTH, HEIGHT = 320.0, 110.0  # of the plot itself
LEFT, RIGHT, ABOVE, BELOW = 62.0, 12.0, 18.0, 16.0  # for labels
BINS = 24
MOST = 300  # points of a drawn curve
ACCENT = "var(--accent, currentColor)"


@dataclass(frozen=True)
class Line:
    """A curve and its name."""

    label: str
    x: np.ndarray
    y: np.ndarray


def sparkline(lines: Sequence[Line], *, cut: float = 0.05) -> Markup:
    """Draw curves over the same axis; empty if no curve has two points.

    The axis leaves out a share ``cut`` of the values, the lowest: there a run begins.
    """
    found = []
    for line in lines:
        known = np.isfinite(line.y)
        if known.sum() > 1:
            found.append(Line(line.label, line.x[known], line.y[known]))
    if not found:
        return Markup("")
    values = np.concatenate([line.y for line in found])
    steps = np.concatenate([line.x for line in found])
    low, high = float(np.quantile(values, cut)), float(values.max())
    first, last = float(steps.min()), float(steps.max())
    if high <= low:
        low, high = low - 1.0, high + 1.0
    parts, legend = [], Markup("")
    for i, line in enumerate(found):
        chosen = np.unique(np.linspace(0, len(line.x) - 1, MOST).astype(int))
        x = LEFT + (line.x[chosen] - first) / max(1.0, last - first) * WIDTH
        y = ABOVE + (high - np.clip(line.y[chosen], low, high)) / (high - low) * HEIGHT
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        colour = ACCENT if i else "currentColor"
        parts.append(
            Markup(
                '<polyline class="curve" points="{}" stroke="{}" stroke-width="1.5" '
                'stroke-linejoin="round"{}/>'
            ).format(points, colour, Markup("" if i else ' stroke-opacity=".65"'))
        )
        legend += Markup('<tspan fill="{}" dx="{}">{}</tspan>').format(
            colour, 0 if i == 0 else 10, line.label
        )
    words = f"{' and '.join(line.label for line in found)} over the steps"
    return _plot(
        words,
        [
            *parts,
            Markup('<text x="{}" y="11">{}</text>').format(LEFT, legend),
            *_ends(low, high),
            _label(LEFT, ABOVE + HEIGHT + 13, f"{first:,.0f}", "start"),
            _label(LEFT + WIDTH, ABOVE + HEIGHT + 13, f"step {last:,.0f}", "end"),
        ],
    )


def histogram(values: np.ndarray) -> Markup:
    """Draw a histogram of the finite values; empty if there are fewer than two."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return Markup("")
    low, high = float(values.min()), float(values.max())
    if high <= low:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(values, BINS, (low, high))
    width = WIDTH / BINS
    bars = [
        Markup(
            '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="currentColor" '
            'fill-opacity=".45"/>'
        ).format(
            LEFT + i * width + 0.5,
            ABOVE + HEIGHT * (1 - count / counts.max()),
            width - 1,
            HEIGHT * count / counts.max(),
        )
        for i, count in enumerate(counts)
        if count
    ]
    mean = LEFT + (float(values.mean()) - low) / (high - low) * WIDTH
    line = Markup('<path d="M{:.1f} {:.1f}V{:.1f}" stroke="{}" stroke-width="1.5"/>').format(
        mean, ABOVE - 3, ABOVE + HEIGHT, ACCENT
    )
    return _plot(
        f"Histogram of {len(values)} values from {_value(low)} to {_value(high)}",
        [
            *bars,
            line,
            _label(mean, ABOVE - 6, "mean", "middle"),
            _label(LEFT, ABOVE + HEIGHT + 13, _value(low), "start"),
            _label(LEFT + WIDTH, ABOVE + HEIGHT + 13, _value(high), "end"),
            _label(LEFT - 5, ABOVE + 8, f"{counts.max():,}", "end"),
        ],
    )


def _plot(words: str, parts: Sequence[Markup]) -> Markup:
    width, height = LEFT + WIDTH + RIGHT, ABOVE + HEIGHT + BELOW
    axes = Markup('<path d="M{} {}V{}H{}" stroke="currentColor" stroke-opacity=".35"/>').format(
        LEFT, ABOVE, ABOVE + HEIGHT, LEFT + WIDTH
    )
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="small" role="img" aria-label="{}" '
        'viewBox="0 0 {} {}" width="{}" height="{}" fill="none" '
        'font-family="system-ui, sans-serif" font-size="11">{}{}</svg>'
    ).format(words, width, height, width, height, axes, Markup("").join(parts))


def _ends(low: float, high: float) -> list[Markup]:
    return [
        _label(LEFT - 5, ABOVE + 8, _value(high), "end"),
        _label(LEFT - 5, ABOVE + HEIGHT, _value(low), "end"),
    ]


def _label(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup(
        '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" fill="currentColor" '
        'fill-opacity=".75">{}</text>'
    ).format(x, y, anchor, text)


def _value(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")
