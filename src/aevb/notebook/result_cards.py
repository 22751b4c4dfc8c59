"""HTML of the other results in notebooks: bounds, posteriors, imputations, series and tables.

As in :mod:`aevb.notebook.cards`, the functions read plain attributes of the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
from markupsafe import Markup

from aevb.notebook.cards import minus, notes, number, or_text, short, table
from aevb.notebook.curves import Line, histogram, sparkline

ROWS = 3  # rows of the data that a card shows
COLUMNS = 60  # columns of a table that a card shows


@or_text
def bound_card(bound: Any) -> Markup:
    """The card of a bound: its mean and that of each term, and the bound per example."""
    values = _numpy(bound.value).astype(float)
    rows = [(name, number(float(_numpy(term).mean()))) for name, term in bound.terms.items()]
    body = Markup('<p class="big">bound = {} nats</p>').format(number(float(values.mean())))
    body += Markup('<p class="quiet">mean of {} example{}</p>').format(
        f"{len(values):,}", "s" * (len(values) != 1)
    )
    return body + table(("term", ".mean"), rows) + histogram(values)


@or_text
def posterior_card(posterior: Any) -> Markup:
    """The card of a posterior: its latents, what q reads for each, and how to use it."""
    graph, exact = posterior.graph, posterior.method == "exact"
    rows = []
    for name in graph.latents:
        entry = graph.rule("q", name)
        how = "known in every row" if name in posterior.clamped else entry.id
        if exact and name not in posterior.clamped:
            how = "by Bayes' rule"
        size = "×".join(map(str, graph.shapes[name]))
        rows.append((name, type(graph.rule("p", name).spec).__name__, size, how))
    use = Markup('<p class="quiet"><code>posterior["{}"]</code> is a distribution.</p>')
    first = next((row[0] for row in rows if row[0] not in posterior.clamped), None)
    return (
        _title(repr(posterior))
        + table(("latent", "family of p", ".size", "drawn from"), rows)
        + (use.format(first) if first is not None else Markup(""))
    )


@or_text
def imputation_card(imputation: Any) -> Markup:
    """The card of an imputation: the missing cells of each variable, and some filled ones."""
    counts, cells = [], []
    for name, mask in imputation.missing.items():
        mask = _numpy(mask)
        counts.append((name, f"{int(mask.sum()):,}", f"{mask.size:,}"))
        mean, sd = _numpy(imputation.mean[name]), _numpy(imputation.sd[name])
        for place in islice(np.argwhere(mask), ROWS):
            where = ", ".join(map(str, place))
            at = tuple(place)
            if mean.shape == mask.shape:
                cells.append((f"{name}[{where}]", short(mean[at]), f"± {short(sd[at])}"))
    return (
        _title(repr(imputation).partition("\n")[0])
        + table(("variable", ".missing cells", ".cells"), counts)
        + (table(("some cells", ".mean", ".standard deviation"), cells) if cells else Markup(""))
        + notes(imputation.notes)
    )


@or_text
def forecast_card(forecast: Any) -> Markup:
    """The card of a forecast: the first and last step of some rows, and a curve of the first."""
    intervals, rows, last = forecast.interval(0.95), [], forecast.steps - 1
    for name, mean in forecast.mean.items():
        n = len(mean)
        middle, spread = (
            _numpy(part).reshape(n, forecast.steps, -1) for part in (mean, forecast.sd[name])
        )
        low, high = _numpy(intervals[name]).reshape(2, n, forecast.steps, -1)
        for row in range(min(n, ROWS)):
            for t in dict.fromkeys((0, last)):
                at = row, t, 0
                ends = f"{short(low[at])} … {short(high[at])}"
                rows.append(
                    (name, str(row), str(t + 1), short(middle[at]), short(spread[at]), ends)
                )
    head = ("variable", ".row", ".step", ".mean", ".standard deviation", ".95 % interval")
    lines = repr(forecast).splitlines()
    return (
        _title(lines[0])
        + Markup('<div class="side">{}{}</div>').format(
            table(head, rows), sparkline(_curves(forecast, intervals), cut=0.0)
        )
        + notes(forecast.notes)
    )


def _curves(forecast: Any, intervals: Mapping[str, Any]) -> list[Line]:
    """The first entry of the first row: its past, and mean and interval of its future."""
    name = next(iter(forecast.mean))
    n, past = len(forecast.mean[name]), _numpy(forecast.past[name])
    before = past[0].reshape(len(past[0]), -1)[: int(forecast.lengths[0]), 0].astype(float)
    steps = np.arange(len(before) + forecast.steps)
    ahead = steps[len(before) :]
    low, high = _numpy(intervals[name]).reshape(2, n, forecast.steps, -1)[:, 0, :, 0]
    mean = _numpy(forecast.mean[name]).reshape(n, forecast.steps, -1)[0, :, 0]
    return [
        Line(name, steps[: len(before)], before),
        Line("mean ahead", ahead, mean),
        Line("2.5 %", ahead, low),
        Line("97.5 %", ahead, high),
    ]


@or_text
def beliefs_card(beliefs: Any) -> Markup:
    """The card of beliefs about states: a line of numbers per row, and curves of the first row."""
    head, *rest = repr(beliefs).splitlines()
    told = [line.strip() for line in rest if line.startswith("  ")]
    pairs = [tuple(line.split(": ", 1)) for line in told if ": " in line]
    lines = []
    for name, mean in beliefs.mean.items():
        values = _numpy(mean)
        probs = beliefs.probs.get(name)
        if probs is not None:
            values = _numpy(probs)
        if beliefs._by_step(name):  # [N, T, …]
            first = values[0].reshape(len(values[0]), -1)
            count = first.shape[1] if probs is not None else 1
            lines += [
                Line(
                    f"P({name} = {k})" if probs is not None else name,
                    np.arange(len(first)),
                    first[:, k].astype(float),
                )
                for k in range(min(count, 4))
            ]
    return (
        _title(head)
        + Markup('<div class="side">{}{}</div>').format(
            table(("latent and row", ""), pairs), sparkline(lines, cut=0.0)
        )
        + notes(beliefs.notes)
    )


@or_text
def schema_card(schema: Any) -> Markup:
    """The card of a schema: its columns with kind, likelihood and the reason."""
    rows = [
        (
            column.name,
            column.kind,
            f"{column.missing:,}" if column.missing else "",
            column.likelihood or "—",
            column.reason,
        )
        for column in schema.columns[:COLUMNS]
    ]
    head, *_, foot = str(schema).splitlines()
    more = len(schema.columns) - COLUMNS
    return (
        _title(head)
        + table(("column", "kind", ".missing", "likelihood", "reason"), rows)
        + notes([f"and {more} more columns"] if more > 0 else [])
        + Markup('<p class="quiet">{}</p>').format(foot)
    )


@or_text
def table_card(fitted: Any) -> Markup:
    """The card of a model of a table: its variables and columns, and how it was fitted."""
    held = [
        (name, type(fitted.model.graph.rule("p", name).spec).__name__, _names(columns))
        for name, columns in fitted.schema.variables.items()
    ]
    run, body = fitted.run, _title(repr(fitted))
    body += table(("variable", "likelihood", "columns"), held)
    if run is not None:
        body += notes([f"{repr(run).partition(chr(10))[0]}."])
    if fitted.folder is not None:
        body += notes([f"In {fitted.folder}."])
    return body


def _names(columns: Any) -> str:
    shown = ", ".join(column.name for column in columns[:12])
    return shown + (f", … ({len(columns)} in all)" if len(columns) > 12 else "")


def _title(text: str) -> Markup:
    return Markup("<h4>{}</h4>").format(minus(text))


def _numpy(value: Any) -> np.ndarray:
    array: np.ndarray = value.detach().cpu().numpy()
    return array
