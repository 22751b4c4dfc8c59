"""HTML representations of models and results, as notebooks show them.

A card is one ``<div class="aevb">`` with its own style. It takes its colours from the notebook, and
needs no script and no network. The classes call these functions in ``_repr_html_``. The functions
lie below those classes in the order of packages, so they read plain attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol, TypeVar

import numpy as np
from markupsafe import Markup

from aevb.declare.families import Exact
from aevb.declare.graph import Entry, Graph
from aevb.derive.explain import Writer, explain
from aevb.derive.plan import Plan
from aevb.notebook.curves import Line, histogram, sparkline
from aevb.notebook.diagram import caption, diagram
from aevb.notebook.mathematics import factorisation, formula, with_names

Shown = TypeVar("Shown")

STYLE = Markup("""<style>
.aevb { --good: #2b7a3f; --note: #7a6000; --warn: #a34700; --bad: #b3261e; --accent: #0067a8;
  color: inherit; font: 14px/1.45 system-ui, sans-serif; max-width: 62rem;
  font-variant-numeric: tabular-nums; }
@media (prefers-color-scheme: dark) {
  body:not([data-jp-theme-light="true"], .vscode-light) .aevb { --good: #7fce91; --note: #d9bf4f;
    --warn: #f0a060; --bad: #ff8a80; --accent: #6bb8ee; } }
body[data-jp-theme-light="false"] .aevb, body.vscode-dark .aevb { --good: #7fce91;
  --note: #d9bf4f; --warn: #f0a060; --bad: #ff8a80; --accent: #6bb8ee; }
.aevb h4 { font-size: 15px; margin: .3em 0 .5em; }
.aevb h5 { font-size: 13px; margin: .9em 0 .3em; }
.aevb p { margin: .3em 0; }
.aevb .quiet { opacity: .72; }
.aevb .formula + .quiet { margin-left: .6em; }
.aevb .formula { font-size: 1.1em; line-height: 2.1; }
.aevb svg.math { vertical-align: middle; max-width: 100%; }
.aevb .side { display: flex; flex-wrap: wrap; gap: .4em 1.6em; align-items: flex-start; }
.aevb figure { margin: .2em 0; max-width: 100%; }
.aevb figcaption { font-size: 12px; opacity: .72; }
.aevb svg.graph, .aevb svg.small { max-width: 100%; height: auto; }
.aevb .scroll { overflow-x: auto; }
.aevb table { border-collapse: collapse; margin: .3em 0; font-size: 13px; }
.aevb th, .aevb td { text-align: left; vertical-align: top; padding: .2em .9em .2em 0;
  border: 0; border-bottom: 1px solid color-mix(in srgb, currentColor 22%, transparent);
  background: none; white-space: normal; }
.aevb th { font-weight: 600; }
.aevb .number { text-align: right; white-space: nowrap; }
.aevb .big { font-size: 1.35em; }
.aevb ul { list-style: none; margin: .3em 0; padding: 0; }
.aevb li { margin: .45em 0; }
.aevb .level { display: inline-block; min-width: 5em; font-weight: 600; }
.aevb .ok { color: var(--good); } .aevb .note { color: var(--note); }
.aevb .warning { color: var(--warn); } .aevb .problem { color: var(--bad); }
.aevb .remedy { display: block; margin-left: 5.3em; }
.aevb .accent { color: var(--accent); }
</style>""")


class Declared(Protocol):
    """A declaration with its weights: a Model."""

    @property
    def graph(self) -> Graph: ...

    @property
    def factors(self) -> Any: ...

    @property
    def plan(self) -> Callable[..., Plan]: ...


def or_text(card: Callable[[Shown], Markup]) -> Callable[[Shown], str]:
    """Return a card as a string; if it fails, the printed object.

    A notebook must show something for every object, also for one on the meta device.
    """

    @wraps(card)
    def safe(shown: Shown) -> str:
        try:
            return str(_card(card(shown)))
        except Exception:  # whatever it is, print() will say it better
            try:
                text = str(shown)
            except Exception:
                text = object.__repr__(shown)
            return str(Markup('<div class="aevb"><pre>{}</pre></div>').format(text))

    return safe


# The model ----------------------------------------------------------------------------------------


def model_parts(model: Declared, **choices: Any) -> dict[str, Any]:
    """Return the declaration, its diagrams and its derived estimator as JSON-ready data.

    ``choices`` are those of ``model.explain``: how, bound, samples, gradient, clamped and partial.
    Values called ``html`` and the diagrams are markup; all others are text or numbers.
    """
    graph, plan = model.graph, model.plan(**choices)
    names = [*graph.shapes]
    explanation = explain(plan)
    text = Writer(plan, tex=False).estimator()
    latex = with_names(explanation.latex, names)
    counts = {
        entry.id: sum(parameter.numel() for parameter in model.factors[entry.id].parameters())
        for entry in graph.entries()
    }
    sides = {side: [e for e in graph.entries() if e.side == side] for side in "pq"}
    sides = {side: entries for side, entries in sides.items() if entries}  # q may be empty
    return {
        "factorisations": [
            {
                "side": side,
                **_both(factorisation(line), line),
                "text": line,
                "parameters": sum(counts[entry.id] for entry in entries),
            }
            for side, entries in sides.items()
            for line in [_line(entries)]
        ],
        "diagrams": {side: diagram(graph, side) for side in sides},
        "caption": caption(graph),
        "estimator": {
            **_both(latex, text),
            "text": text,
            "heading": str(explanation).partition("\n")[0],
            "explanation": str(explanation),
        },
        "entries": [
            {
                "side": entry.side,
                "key": str(entry.key),
                "size": _size(graph.shapes[entry.key.name]),
                "parameters": counts[entry.id],
                "spec": repr(entry.spec),
            }
            for entry in graph.entries()
        ],
        "latents": [
            {
                "name": choice.name,
                "draw": "enumerated by Bayes"
                if isinstance(graph.rule("q", choice.name).spec, Exact)
                else str(choice.draw),
                "why_draw": choice.why_draw,
                "term": str(choice.term),
                "why_term": choice.why_term,
            }
            for choice in plan.choices.values()
        ],
        "given": {name: _size(shape) for name, shape in graph.given.items()},
    }


def _both(latex: str, text: str) -> dict[str, str]:
    """A formula as markup and as LaTeX; the markup is text if mathtext cannot draw the formula."""
    drawn = Markup('<code class="formula">{}</code>').format(text)
    if latex.isascii():  # mathtext's fonts lack the letters of many scripts
        with suppress(ValueError):
            drawn = formula(latex)
    return {"html": str(drawn), "latex": latex}


def _line(entries: Sequence[Entry]) -> str:
    """The factorisation of a side, as a printed model has it."""
    product = " ".join(entry.id for entry in entries if entry.spec.stochastic)
    functions = ", ".join(
        f"{entry.key.target} = f({', '.join(map(str, entry.key.parents))})"
        for entry in entries
        if not entry.spec.stochastic
    )
    return f"{product}; {functions}" if functions else product


def _size(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))


@or_text
def model_card(model: Declared) -> Markup:
    """The card of a model: factorisations, diagrams, the derived estimator and its reasons."""
    parts = model_parts(model)
    words = {"p": ("generative model", "θ"), "q": ("approximate posterior", "φ")}
    body = Markup("")
    for one in parts["factorisations"]:
        what, symbol = words[one["side"]]
        body += Markup('<p>{} <span class="quiet">{}, {} parameters {}</span></p>').format(
            Markup(one["html"]), what, f"{one['parameters']:,}", symbol
        )
    figures = Markup("").join(
        Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(Markup(svg), side)
        for side, svg in parts["diagrams"].items()
    )
    body += Markup('<div class="side">{}</div><p class="quiet">{}</p>').format(
        figures, parts["caption"]
    )
    body += table(
        ("", "", ".size", ".parameters", ""),
        [
            (one["side"], one["key"], one["size"], f"{one['parameters']:,}", one["spec"])
            for one in parts["entries"]
        ]
        + [("given", name, size, "", "") for name, size in parts["given"].items()],
    )
    body += Markup("<h5>{}</h5><p>{}</p>").format(
        parts["estimator"]["heading"], Markup(parts["estimator"]["html"])
    )
    body += table(
        ("latent", "draw", "reason", "term", "reason"),
        [
            (one["name"], one["draw"], one["why_draw"], one["term"], one["why_term"])
            for one in parts["latents"]
        ],
    )
    graph = model.graph
    title = f"Model of {', '.join(graph.observed)}" + (
        f" with latent {', '.join(graph.latents)}" if graph.latents else ""
    )
    return Markup("<h4>{}</h4>{}").format(title, body)


# Results ------------------------------------------------------------------------------------------


class Trained(Protocol):
    """What the card of a run reads."""

    step: int
    seconds: float
    settings: Any
    out: Any

    @property
    def best(self) -> Any: ...

    @property
    def ended(self) -> str: ...

    @property
    def history(self) -> Mapping[str, np.ndarray]: ...


class Metric(Protocol):
    """A quantity of a history, by its key and the key of its steps."""

    @property
    def key(self) -> str: ...

    @property
    def steps(self) -> str: ...


def run_card(run: Trained, *metrics: Metric) -> str:
    """The card of a run: its summary, and a small plot of the metrics that it has."""

    @or_text
    def card(run: Trained) -> Markup:
        history = run.history
        lines = [
            Line(metric.key, history[metric.steps], history[metric.key])
            for metric in metrics
            if metric.key in history
        ]
        rows = [(f"last {line.label}", number(float(line.y[-1]))) for line in lines if len(line.y)]
        if run.best is not None:
            rows.append(("best validation", f"{number(run.best.value)} at step {run.best.step:,}"))
        rows += [
            ("end", run.ended),
            ("time", duration(run.seconds)),
            ("seed", str(run.settings.seed)),
            ("folder", "not saved" if run.out is None else str(run.out)),
        ]
        body = Markup('<div class="side">{}{}</div>').format(
            table(("", ""), rows), sparkline(lines)
        )
        if hasattr(run, "page"):
            body += Markup('<p class="quiet"><code>run.page()</code> shows the whole run.</p>')
        return Markup("<h4>Run of {} steps</h4>{}").format(f"{run.step:,}", body)

    return card(run)


@or_text
def evidence_card(evidence: Any) -> Markup:
    """The card of an evidence estimate: mean, error, method, notes, and log p per example."""
    values = evidence.value.detach().double().cpu().numpy()
    error = "" if evidence.method == "exact" else f" ± {evidence.error:.2g}"
    details = repr(evidence).partition("\n")[0].partition("(")[2].removesuffix(")")
    body = Markup('<p class="big">log p = {}{} nats</p><p class="quiet">{}</p>').format(
        number(evidence.mean), error, details
    )
    if len(values) > 1:
        body += Markup(
            "<figure>{}<figcaption>log p of the {} examples</figcaption></figure>"
        ).format(histogram(values), f"{len(values):,}")
    return body + notes(evidence.notes)


@or_text
def gap_card(gap: Any) -> Markup:
    """The card of a gap: log p(x), the two gaps and the two bounds, as means over the examples."""
    n = len(gap.elbo)
    rows = []
    for label, name, remark in (
        ("log p(x)", "evidence", gap.method),
        ("approximation gap", "approximation", "what q's family cannot reach"),
        ("best q per example", "best", ""),
        ("amortisation gap", "amortisation", "what one network for all examples costs"),
        ("ELBO", "elbo", ""),
    ):
        error = float(gap.stderr[name].square().sum().sqrt()) / n
        mean = float(getattr(gap, name).mean())
        rows.append((label, number(mean), f"± {error:.4f}" if error else "", remark))
    head = Markup("<h4>Mean over {} example{}, in nats; ± is the sampling error</h4>")
    return head.format(f"{n:,}", "s" * (n > 1)) + table(("", ".", ".", ""), rows) + notes(gap.notes)


@or_text
def diagnosis_card(diagnosis: Any) -> Markup:
    """The card of a diagnosis: its findings, the gravest first."""
    items = Markup("").join(
        Markup('<li><span class="level {}">{}</span> {}{}</li>').format(
            finding.level,
            finding.level,
            finding.text,
            Markup('<span class="remedy">→ {}</span>').format(finding.remedy)
            if finding.remedy
            else "",
        )
        for finding in diagnosis.findings
    )
    return Markup("<h4>{}</h4><ul>{}</ul>").format(str(diagnosis).partition("\n")[0], items)


@or_text
def check_card(check: Any) -> Markup:
    """The card of a predictive check: statistics of the data and of the replicates."""
    strange = check.extreme()
    columns = [found for found in strange if found.column is not None]
    shown = [found for found in check.comparisons if found.column is None] + columns[:20]
    rows = []
    for found in shown:
        low, high = np.quantile(found.replicates, [0.05, 0.95])
        rows.append(
            (
                found.label,
                short(found.observed),
                f"{short(low)} … {short(high)}",
                f"{found.p:.3f}",
                Markup('<span class="problem">not reproduced</span>') if found in strange else "",
            )
        )
    more = len(columns) - 20
    return (
        Markup("<h4>{}</h4>").format(str(check).partition("\n")[0])
        + table(("", ".data", ".replicates, 90 %", ".p", ""), rows)
        + notes([f"and {more} more columns"] if more > 0 else [])
    )


@or_text
def comparison_card(comparison: Any) -> Markup:
    """The card of a comparison: its table, the best model first, and what can be concluded."""
    columns = comparison.columns()
    left = ("", "model")
    return (
        Markup("<h4>{}</h4>").format(comparison.title())
        + table(
            [name if name in left else f".{name}" for name in columns],
            list(
                zip(*([minus(cell) for cell in cells] for cells in columns.values()), strict=True)
            ),
        )
        + notes(
            sentence
            for sentence in (
                comparison.legend(),
                *comparison.sentences(),
                comparison.units,
                *comparison.notes,
            )
            if sentence
        )
    )


# Parts --------------------------------------------------------------------------------------------


def _card(body: Markup) -> Markup:
    return Markup('<div class="aevb">{}{}</div>').format(STYLE, body)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table. A heading that begins with a dot belongs to a column of numbers."""
    kinds = [Markup(' class="number"') if head.startswith(".") else "" for head in headings]

    def line(tag: str, cells: Iterable[str]) -> Markup:
        return Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup("<{}{}>{}</{}>").format(tag, kind, cell, tag)
                for kind, cell in zip(kinds, cells, strict=True)
            )
        )

    words = [head.removeprefix(".") for head in headings]
    head = Markup("<thead>{}</thead>").format(line("th", words)) if any(words) else Markup("")
    return Markup('<div class="scroll"><table>{}<tbody>{}</tbody></table></div>').format(
        head, Markup("").join(line("td", row) for row in rows)
    )


def notes(sentences: Iterable[str]) -> Markup:
    """A paragraph for each sentence."""
    return Markup("").join(Markup("<p>{}</p>").format(sentence) for sentence in sentences)


def number(value: float, digits: int = 4) -> str:
    """A number with a true minus sign.

    >>> number(-12.34567)
    '−12.3457'
    """
    return minus(f"{value:,.{digits}f}")


def short(value: float) -> str:
    """A number with four significant digits."""
    return minus(f"{value:.4g}")


def minus(text: str) -> str:
    """Replace the hyphen in front of a number by a minus sign."""
    return f"−{text[1:]}" if text.startswith("-") else text


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(3.21), duration(75), duration(7384)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
