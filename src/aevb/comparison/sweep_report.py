"""The results of a sweep: table, chosen run, CSV and picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aevb.comparison.result import (
    Compared,
    Comparison,
    aligned,
    counted,
    listed,
    plus_minus,
    wrapped,
    write_csv,
)
from aevb.comparison.sweep import Combination, Finished, across_seeds
from aevb.runtime.checked_files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = 10  # combinations of the other arguments that get a colour of their own in the legend


def sweep_text(found: Sequence[Finished], comparison: Comparison, *, most: int = 40) -> str:
    """Return the table of a sweep, best run first, and which run to choose.

    At most ``most`` lines are shown; the CSV file has all runs.
    """
    table = comparison.table()
    hidden = len(found) - most
    lines = [comparison.title(), *table[: most + 1]]
    lines += [f"  … {counted(hidden, 'run')} more, in table.csv"] if hidden > 0 else []
    groups = across_seeds(found)
    if any(len(one.runs) > 1 for one in groups):
        lines += ["", "Averages over seeds:", *_by_combination(groups)]
    sentences = [comparison.legend(), *chosen(found, comparison, groups)]
    sentences += [one for one in (comparison.units, *comparison.notes) if one]
    return "\n".join([*lines, *(wrapped(one) for one in sentences)])


def _by_combination(groups: Sequence[Combination]) -> list[str]:
    return aligned(
        {
            "model": [one.name for one in groups],
            "log p": [f"{one.mean:.3f}" for one in groups],
            "sd of seeds": [_or_dash(one.spread) for one in groups],
            "difference": [
                "" if one is groups[0] else plus_minus(one.difference, one.error, sign=True)
                for one in groups
            ],
        }
    )


def _or_dash(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def chosen(
    found: Sequence[Finished], comparison: Comparison, groups: Sequence[Combination]
) -> list[str]:
    """Say which run to choose and how sure the choice is."""
    best, close = comparison.best, comparison.close()
    others = len(comparison.models) - 1
    said = [f"Chosen: {best.name} ({found[0].folder})."]
    if close:
        said[0] += (
            f" {len(close)} of the other {counted(others, 'run')} cannot be told from it: "
            f"{listed([one.name for one in close])}."
        )
        if (smallest := _smallest(comparison)) is not None:
            said[0] += (
                f" The smallest of them is {smallest.name}, whose p has {smallest.parameters} "
                f"parameters, not {best.parameters}."
            )
    elif others and all(comparison.difference(one.name).told for one in comparison.models[1:]):
        next_ = comparison.models[1]
        said[0] += (
            f" Every other run is worse by more than noise; the next is {next_.name}, with a "
            f"difference of {comparison.difference(next_.name)} nats per example."
        )
    said += [
        sentence
        for sentence in comparison.sentences()
        if " cannot be told from " not in sentence and " is better than " not in sentence
    ]
    if len(groups) > 1 and all(len(one.runs) > 1 for one in groups[:2]):
        first, second = groups[:2]
        noise = math.sqrt(
            second.error**2 + sum(one.spread**2 / len(one.runs) for one in (first, second))
        )
        told = abs(second.difference) > 2 * noise
        said.append(
            f"On average over seeds, {first.name} is the best; the next, {second.name}, differs by "
            f"{plus_minus(second.difference, noise, sign=True)} (error over rows and seeds), which "
            f"{'is more than noise' if told else 'cannot be told from noise'}."
        )
    if others:
        said.append(
            "The run was chosen on these rows, so its log p on them is a little too high. Evaluate "
            "it on rows that were not used here: aevb evaluate RUN --data FILE."
        )
    return said


def _smallest(comparison: Comparison) -> Compared | None:
    """Return the smallest run that cannot be told from the best; None if that is the best."""
    best = comparison.best
    found = min((best, *comparison.close()), key=lambda one: one.parameters)
    return found if found.parameters < best.parameters else None


def sweep_records(found: Sequence[Finished], comparison: Comparison) -> list[dict[str, Any]]:
    """Return one dictionary per run, best first, with its arguments, for a CSV file."""
    records = comparison.record()
    return [
        {"rank": record.pop("rank")}
        | dict(one.arguments)
        | {"seed": one.seed}
        | {key: value for key, value in record.items() if key != "model"}
        | {"steps": one.steps, "folder": str(one.folder)}
        for one, record in zip(found, records, strict=True)
    ]


def write_table(path: Path, found: Sequence[Finished], comparison: Comparison) -> None:
    write_csv(path, sweep_records(found, comparison))


# The picture --------------------------------------------------------------------------------------


def sweep_picture(
    found: Sequence[Finished],
    comparison: Comparison,
    grid: Mapping[str, Sequence[str]],
    path: Path | None = None,
) -> Figure:
    """Plot log p of every run against the argument with the most values.

    The scale is the difference to the best run, in nats per example. There is one line per
    combination of the other arguments, through the averages over seeds. Bars are standard errors
    of the paired differences over rows. A star marks the best run, and an open star the smallest
    run that cannot be told from it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across, values = _axis(grid)
    others = [name for name in grid if name != across and len(grid[name]) > 1]
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[Finished]] = {}
    for one in found:
        key = ", ".join(f"{name} = {one.arguments[name]}" for name in others)
        lines.setdefault(key, []).append(one)
    ordered = sorted(lines, key=_natural)
    place_of: dict[str, float] = {}
    for i, key in enumerate(ordered):
        aside = _aside(values) * (i - (len(ordered) - 1) / 2)
        places = [_place(values, one.arguments.get(across, "")) + aside for one in lines[key]]
        _line(axes, lines[key], comparison, places, _colour(i, len(ordered)), key)
        place_of |= {one.compared.name: x for one, x in zip(lines[key], places, strict=True)}
    axes.axhline(0, color="0.6", lw=0.8, zorder=0)
    best, smallest = comparison.best, _smallest(comparison)
    stars = [(best, "black", f"chosen: {best.name} (log p {best.mean:.3f})")]
    if smallest is not None:
        stars.append((smallest, "white", f"smallest, not told from it: {smallest.name}"))
    for marked, colour, label in stars:
        axes.plot(
            [place_of[marked.name]],
            [comparison.difference(marked.name).mean],
            marker="*",
            ms=15,
            color=colour,
            mec="black",
            ls="",
            zorder=5,
            label=label,
        )
    _dress(axes, found, comparison, across, values)
    if 1 < len(axes.get_legend_handles_labels()[0]) <= LINES + 3 or len(ordered) == 1:
        # Below the picture, where it hides no run.
        axes.legend(
            fontsize=8, edgecolor="none", loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2
        )
    else:
        axes.legend(fontsize=8, edgecolor="none", loc="center left", bbox_to_anchor=(1.02, 0.5))
    if path is not None:
        with whole_file(path) as place:
            figure.savefig(place, dpi=140, format="png")
    return figure


def _axis(grid: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """Return the argument of the horizontal axis, the one with the most values, and the values."""
    if not grid:
        return "", [""]
    name = max(grid, key=lambda one: len(grid[one]))
    return name, list(grid[name])


def _place(values: Sequence[str], value: str) -> float:
    """Return where a value stands on the axis: itself if all are numbers, else its position."""
    return float(value) if _numeric(values) else float(list(values).index(value))


def _aside(values: Sequence[str]) -> float:
    """Return how far apart lines are drawn, so that bars of the same value do not overlap."""
    if _logarithmic(values):
        return 0.0
    places = sorted(_place(values, value) for value in values)
    gaps = [b - a for a, b in pairwise(places)]
    return 0.05 * min(gaps, default=1.0)


def _logarithmic(values: Sequence[str]) -> bool:
    """Return whether the axis is logarithmic: positive numbers over a wide range."""
    numbers = [float(value) for value in values] if _numeric(values) else []
    return bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) >= 50


def _numeric(values: Sequence[str]) -> bool:
    try:
        return all(math.isfinite(float(value)) for value in values)
    except ValueError:
        return False


def _natural(text: str) -> list[tuple[int, float, str]]:
    """Return a key that sorts texts with numbers by these numbers."""
    return [
        (0, float(word), "") if _numeric([word]) else (1, 0.0, word)
        for word in text.replace(",", " ").split()
    ]


def _colour(i: int, n: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.05 + 0.85 * i / max(1, n - 1)) if n > 1 else "C0"


def _line(
    axes: Axes,
    runs: Sequence[Finished],
    comparison: Comparison,
    places: Sequence[float],
    colour: Any,
    name: str,
) -> None:
    """Draw the runs as dots with error bars, and a line through the averages over seeds."""
    at: dict[float, list[float]] = {}
    for one, x in zip(runs, places, strict=True):
        difference = comparison.difference(one.compared.name)
        at.setdefault(x, []).append(difference.mean)
        axes.errorbar(
            x,
            difference.mean,
            yerr=difference.stderr if math.isfinite(difference.stderr) else None,
            fmt="o" if one.compared.trusted else "x",
            ms=4.5,
            color=colour,
            elinewidth=1,
            alpha=0.9,
        )
    ordered = sorted(at)
    axes.plot(
        ordered,
        [float(np.mean(at[x])) for x in ordered],
        color=colour,
        lw=1.3,
        label=name or None,
    )


def _dress(
    axes: Axes,
    found: Sequence[Finished],
    comparison: Comparison,
    across: str,
    values: Sequence[str],
) -> None:
    from matplotlib.ticker import MaxNLocator

    means = np.array([comparison.difference(one.compared.name).mean for one in found])
    errors = np.array([comparison.difference(one.compared.name).stderr for one in found])
    low, cut = _lowest(means, errors)
    top = float(np.nanmax(np.where(np.isfinite(errors), means + errors, means)))
    room = 0.06 * max(top - low, 1e-9)
    axes.set_ylim(low - room, max(top, 0.0) + 2 * room)
    if _numeric(values):
        whole = all(float(value) == int(float(value)) for value in values)
        axes.xaxis.set_major_locator(MaxNLocator(integer=whole, nbins=12))
        if _logarithmic(values):
            axes.set_xscale("log")
    else:
        axes.set_xticks(range(len(values)), list(values))
    axes.set_xlabel(across or "model")
    axes.set_ylabel(
        "difference of log p to the best run, nats per example\n"
        "(bars: ± one standard error of the paired difference)",
        fontsize=9,
    )
    title = comparison.what or counted(comparison.rows)
    if cut:
        title += f"; {counted(cut, 'run')} below the picture"
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _lowest(means: np.ndarray, errors: np.ndarray) -> tuple[float, int]:
    """Return the lower limit of the axis, and how many runs lie below it.

    Runs far below the others are left out, because they would flatten the rest.
    """
    finite = means[np.isfinite(means)]
    quarter = float(np.quantile(finite, 0.25))
    fence = quarter - 3 * (float(finite.max()) - quarter)
    inside = np.isfinite(means) & (means >= fence)
    low = float((means - np.where(np.isfinite(errors), errors, 0.0))[inside].min())
    return low, int(len(means) - inside.sum())
