"""One page from a folder of results: every number and picture comes from the results' files."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from aevb.experiments.lab import Result, read
from aevb.notebook.mathematics import factorisation, formula
from aevb.report import evidence, figures

SECTIONS = {
    "summary": "Summary",
    "em": "From EM to AEVB",
    "fa": "Factor analysis",
    "vae": "The variational auto-encoder",
    "cvae": "The conditional VAE",
    "gmvae": "The Gaussian-mixture VAE",
    "vrnn": "The variational RNN",
    "errata": "Errata",
    "again": "How to reproduce this page",
}
TASKS = {
    "fa": ("data", "joint", "tutorial", "alternate", "exact", "posteriors", "naive", "evidence"),
    "vae": ("originals", "exact", "clamped", "beta", "mixture", "ours"),
    "cvae": ("both", "prior", "likelihood", "clamped", "shuffled"),
    "gmvae": ("tutorial", "ours", "estimators", "m2", "clustering"),
    "vrnn": ("filtering", "detached", "smoothing", "ours"),
}
# The run of each model that the summary shows.
SHOWN = {
    "fa": "fa/joint",
    "vae": "vae/exact",
    "cvae": "cvae/both",
    "gmvae": "gmvae/tutorial",
    "vrnn": "vrnn/filtering",
}
DATA = {"digits": "scikit-learn's handwritten digits", "mnist": "MNIST", "fashion": "Fashion-MNIST"}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def build(out: Path) -> Path:
    """Write ``out/report.html`` from the files under ``out/results``.

    Tasks without a result are left out, and the page says so.
    """
    results = load(out)
    if not results:
        raise ValueError(
            f"There are no results in {Path(out) / 'results'}. Run the experiments first: aevb "
            f"reproduce."
        )
    path = Path(out) / "report.html"
    temporary = path.with_name(".report.html.writing")
    temporary.write_text(render(results, wall=_wall(out)), encoding="utf-8")
    os.replace(temporary, path)
    return path


def load(out: Path) -> dict[str, Result]:
    """Return the results of the finished tasks of a laboratory, by name."""
    folders = (path.parent for path in sorted((Path(out) / "results").glob("*/*/result.json")))
    return {
        f"{folder.parent.name}/{folder.name}": read(folder)
        for folder in folders
        if not folder.name.startswith(".")
    }


def _wall(out: Path) -> float | None:
    """Return the recorded wall time of the whole reproduction in seconds, or None."""
    path = Path(out) / "lab.json"
    return json.loads(path.read_text(encoding="utf-8")).get("seconds") if path.is_file() else None


def render(results: Mapping[str, Result], wall: float | None = None) -> str:
    """Return the page as HTML."""
    counter = itertools.count(1)
    return (
        _environment()
        .get_template("page.html")
        .render(
            r=results,
            data=about(results),
            machines=machines(results),
            checks=checks(results),
            missing=missing(results),
            rows=rows(results),
            seconds=sum(result.numbers["seconds"] for result in results.values()),
            wall=wall,
            next_figure=lambda: next(counter),
        )
    )


@cache
def _environment() -> Environment:
    loader = PackageLoader("aevb.report", "templates")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "plain": plain,
        "spread": spread,
        "duration": duration,
        "settings": settings,
    }
    environment.filters["tex"] = lambda text: formula(str(text).strip())
    environment.globals |= {
        "sections": SECTIONS,
        "models": {key: SECTIONS[key] for key in TASKS},
        "shown": SHOWN,
        "draw": figures,
        "tell": evidence,
    }
    environment.globals |= {
        "sides": sides,
        "target": target,
        "limits": limits,
        "compared": compared,
        "logit_limit": LOGIT,
        "logit_cap": math.log(LOGIT),
    }
    return environment


EPSILON = float(np.finfo(np.float32).eps)  # torch clamps probabilities to [EPSILON, 1 − EPSILON]
LOGIT = math.log((1 - EPSILON) / EPSILON)  # and therefore logits to [−LOGIT, LOGIT]


# The content of the page --------------------------------------------------------------------------


def about(results: Mapping[str, Result]) -> dict[str, Any]:
    """Describe the data of most tasks.

    The description has the name, the size of an image, the numbers of rows if they were recorded,
    and whether ``--quick`` shortened any training.
    """
    names = [result.numbers["data"] for result in results.values()]
    key = max(sorted(set(names)), key=names.count)
    found: dict[str, Any] = {
        "key": key,
        "name": DATA.get(key, key),
        "quick": any(result.numbers["quick"] for result in results.values()),
    }
    found |= {"shape": None, "counts": {}}
    originals = results.get("vae/originals")
    if originals is not None:
        found["shape"] = originals.arrays["images"].shape[1:]
        found["counts"] = {
            name: originals.numbers[name] for name in ("train", "test") if name in originals.numbers
        }
    return found


def machines(results: Mapping[str, Result]) -> list[dict[str, str]]:
    """Return the machines on which the tasks ran, without duplicates."""
    found: list[dict[str, str]] = []
    for result in results.values():
        if result.numbers["machine"] not in found:
            found.append(result.numbers["machine"])
    return found


def checks(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Return every target with its section, in the order of the sections."""
    order = [f"{section}/{name}" for section, names in TASKS.items() for name in names]
    tasks = sorted(results, key=lambda task: order.index(task) if task in order else len(order))
    return [
        {"section": task.partition("/")[0], **check}
        for task in tasks
        for check in results[task].numbers.get("checks", ())
    ]


def missing(results: Mapping[str, Result]) -> dict[str, list[str]]:
    """Return, per section, the tasks without a result."""
    return {
        section: [name for name in names if f"{section}/{name}" not in results]
        for section, names in TASKS.items()
    }


def rows(results: Mapping[str, Result]) -> dict[str, list[tuple[str, Result]]]:
    """Return, per section, the finished tasks as pairs (name, result)."""
    return {
        section: [
            (task.partition("/")[2], result)
            for task, result in results.items()
            if task.startswith(f"{section}/")
        ]
        for section in TASKS
    }


def sides(model: str) -> list[tuple[str, str, str]]:
    """Return p and q of a printed model: letter, factorisation as LaTeX, number of parameters."""
    found = re.findall(r"^([pq]):  (.*?)   \(([\d,]+) parameters", model, flags=re.MULTILINE)
    return [(side, factorisation(line), count) for side, line, count in found]


def settings(numbers: Mapping[str, Any]) -> str:
    """Describe how a task was trained; empty if the task records no settings."""
    told: dict[str, Any] = {**numbers, **numbers.get("settings", {})}
    words = []
    if "lr" in told:
        words.append(
            f"learning rate {plain(told['lr'])}" + (f", {told['decay']}" if "decay" in told else "")
        )
    if "batch" in told:
        words.append(f"batches of {told['batch']}")
    if "clip" in told:
        words.append(f"gradients clipped at {plain(told['clip'])}")
    for unit in ("epochs", "steps"):
        if unit in told:
            words.append(f"{told[unit]:,} {unit}")
    return "; ".join(words)


def limits(alternate: Result) -> dict[str, float]:
    """Return the largest gap after the first E-phase, and the smallest after the first M-phase."""
    return {
        "closed": max(alternate.numbers["gap"]),
        "opened": min(alternate.numbers["gap after M"]),
    }


def compared(first: float, second: float, digits: int = 1) -> str:
    """Say how much more or less the first number is than the second."""
    difference = first - second
    return f"{number(abs(difference), digits)} nats {'more' if difference >= 0 else 'less'}"


# Numbers ------------------------------------------------------------------------------------------


def number(value: float | None, digits: int | None = None) -> str:
    """Format a number for a table; its size determines the decimals unless ``digits`` is given.

    >>> number(3206.8123), number(-83.1), number(0.0007737), number(6.5e-14)
    ('3,206.8', '−83.10', '0.0008', '6.5 × 10⁻¹⁴')
    >>> number(0.25, 1), number(None)
    ('0.2', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if digits is None and isinstance(value, int):
        text = f"{value:,}"
    elif digits is not None or size >= 0.0005 or size == 0:
        decimals = (
            digits
            if digits is not None
            else 0
            if size == 0
            else 1
            if size >= 100
            else 2
            if size >= 10
            else 3
            if size >= 0.1
            else 4
        )
        text = f"{value:,.{decimals}f}"
    else:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return text.replace("-", "−")


def plain(value: float) -> str:
    """Format a number that a person chose, with its own digits.

    >>> plain(3195.0), plain(0.0003), plain(-77.5), plain(1e-6)
    ('3,195', '0.0003', '−77.5', '1 × 10⁻⁶')
    """
    mantissa, _, exponent = f"{value:,g}".partition("e")
    return mantissa.replace("-", "−") + (
        f" × 10{str(int(exponent)).translate(SUPERSCRIPTS)}" if exponent else ""
    )


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Format mean ± standard deviation.

    >>> spread([0.5, 0.7])
    '0.600 ± 0.141'
    """
    found: Sequence[float] = list(values)
    mean = number(float(np.mean(found)), digits)
    return mean if len(found) < 2 else f"{mean} ± {number(float(np.std(found, ddof=1)), digits)}"


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(7.4), duration(754), duration(7600)
    ('7.4 s', '12 min 34 s', '2 h 7 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest} s"
        if minutes < 60
        else f"{minutes // 60} h {round(minutes % 60 + rest / 60)} min"
    )


def target(check: Mapping[str, Any]) -> str:
    """Format the limits of a target."""
    parts = [
        f"{sign} {plain(check[key])}"
        for sign, key in (("≥", "least"), ("≤", "most"))
        if check[key] is not None
    ]
    return " and ".join(parts)
