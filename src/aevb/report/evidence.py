"""Figures about evidence and estimators: tightness of the bound, predictive checks, trade-offs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aevb.experiments.lab import Result
from aevb.report.figures import AXIS, BLUE, GREEN, INK, MUTED, OCHRE, RED, Panel, Picture


def tight(result: Result) -> Picture:
    """Draw the importance-weighted bound as K grows, and the two parts of each row's gap.

    The evidence by annealing is drawn above the bound.
    """
    found = result.numbers["tight"]
    ks = [int(k) for k in found["k"]]
    values, errors = (
        np.array([row[key] for row in found["k"].values()]) for key in ("bound", "error")
    )
    rising = Panel(
        "tight",
        "The importance-weighted bound against the number of samples, with the evidence by "
        "annealing",
        width=320,
        height=240,
    )
    rising.axes.errorbar(ks, values, 2 * errors, color=BLUE, lw=1.6, marker="o", ms=4, elinewidth=1)
    level, spread = found["gap"]["evidence"], 2 * found["gap errors"]["evidence"]
    rising.axes.axhspan(level - spread, level + spread, color=GREEN, alpha=0.2, lw=0)
    rising.axes.axhline(level, color=GREEN, lw=1.4)
    rising.axes.set(xscale="log", xlabel="samples K", ylabel=AXIS)
    rising.axes.set_xticks(ks, [f"{k:,}" for k in ks])
    rising.axes.minorticks_off()
    legend = [
        ("blue", "bound with K samples"),
        ("green", "log p(x) by annealing"),
        ("ochre box", "approximation gap"),
        ("red box", "amortisation gap"),
    ]
    return Picture([rising.svg(), _gaps(result).svg()], legend)


def _gaps(result: Result) -> Panel:
    """Draw the gap of every row, from the widest to the narrowest."""
    amortisation, approximation = (
        result.arrays[f"tight {name}"] for name in ("amortisation", "approximation")
    )
    order = np.argsort(-(amortisation + approximation))
    panel = Panel(
        "gaps",
        "The gap between evidence and ELBO of every row, split into approximation and amortisation",
        width=320,
        height=240,
    )
    place = np.arange(1, len(order) + 1)
    panel.axes.bar(place, amortisation[order], 0.8, color=RED, lw=0, alpha=0.85)
    panel.axes.bar(
        place, approximation[order], 0.8, bottom=amortisation[order], color=OCHRE, lw=0, alpha=0.85
    )
    panel.axes.axhline(0, color=MUTED, lw=0.8)
    panel.axes.locator_params(axis="x", integer=True, nbins=6)
    panel.axes.set(
        xlabel="test rows, the widest gap first", ylabel="gap, nats", xlim=(0.2, len(order) + 0.8)
    )
    return panel


def split(result: Result) -> list[tuple[str, float, float, str]]:
    """Return the parts between evidence and bound: name, nats, standard error, and a remark."""
    found = result.numbers["tight"]
    told = (
        ("evidence", "log p(x)", "by annealing"),
        ("approximation", "approximation gap", "cost of the restriction to q's family"),
        ("best", "bound with the best q per row", "by gradient ascent from the encoder's q"),
        ("amortisation", "amortisation gap", "cost of one network for all rows"),
        ("elbo", "ELBO", "with the encoder's q"),
    )
    return [
        (words, found["gap"][key], found["gap errors"][key], remark) for key, words, remark in told
    ]


def predictive(result: Result) -> Picture:
    """Draw a histogram of the replicates for every statistic, with the data as a line."""
    panels = []
    outside = strange(result)
    for one in result.numbers["predictive"]["comparisons"]:
        label = f"{one['statistic']}({one['variable']})"
        values = result.arrays[f"predictive {label}"]
        panel = Panel(
            f"predictive-{one['statistic']}",
            f"{label} of the data and of replicated data",
            width=200,
            height=135,
        )
        panel.axes.hist(
            values, bins=min(20, max(1, len(np.unique(values)))), color=MUTED, alpha=0.45
        )
        panel.axes.axvline(
            one["observed"], color=RED if one["statistic"] in outside else BLUE, lw=2
        )
        panel.axes.set(yticks=[])
        panel.axes.locator_params(axis="x", nbins=3)
        panel.axes.spines["left"].set_visible(False)
        panel.axes.set_title(f"{one['statistic']}, p = {one['p']:.3f}", loc="left", fontsize=10)
        panels.append(panel.svg())
    legend = [("muted box", "replicated"), ("blue", "data"), ("red", "data, not reproduced")]
    return Picture(panels, legend, "13rem")


def strange(result: Result) -> list[str]:
    """Return the statistics of the data that lie outside those of all replicates.

    They have the smallest possible p-value.
    """
    found = result.numbers["predictive"]
    return [
        one["statistic"]
        for one in found["comparisons"]
        if one["p"] <= 2.001 / (1 + found["replicates"])
    ]


def trade_off(figures: Sequence[Mapping[str, Any]], latent: str) -> Picture:
    """Draw the variance of the gradient against time, for θ and for φ, on logarithmic axes.

    The number of each way is that of its line in the table.
    """
    panels = []
    for letter, group in (("θ", "theta"), ("φ", "phi")):
        label = (
            f"Variance of the gradient for {letter} against the time of a step, one numbered mark "
            f"per way of estimating"
        )
        panel = Panel(f"trade-{group}", label, width=330, height=270)
        for i, one in enumerate(figures, 1):
            colour = BLUE if f"{latent} enumerate" in one["name"] else RED
            x, y = 1000 * one["seconds"], max(one[group]["variance"], 1e-12)
            face = colour if one["unbiased"] else "none"
            panel.axes.plot(
                [x],
                [y],
                marker="os"[one["samples"] > 1],
                ms=6,
                mec=colour,
                mfc=face,
                mew=1.3,
                ls="",
            )
            panel.axes.annotate(
                str(i), (x, y), (4, 3), textcoords="offset points", fontsize=8, color=INK
            )
        panel.axes.set(
            xscale="log",
            yscale="log",
            xlabel="milliseconds per step",
            ylabel=f"variance of ∇{letter}",
        )
        _few_ticks(panel)
        panels.append(panel.svg())
    return Picture(panels, [("blue dot", f"{latent} summed"), ("red dot", f"{latent} drawn")])


def _few_ticks(panel: Panel) -> None:
    """Put plain numbers at 1, 2 and 5 of every decade.

    With matplotlib's ticks, an axis of less than a decade would have no number, or ten.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (panel.axes.xaxis, panel.axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
