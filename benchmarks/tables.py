"""Write the measured numbers into the tables of pages of the documentation.

No number between the marks of a page is typed by hand.

python benchmarks/tables.py             # fill the tables from docs/figures/FILE.json
python benchmarks/tables.py --check     # exit with 1 if the page differs from the files
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compile import HEAD as CHOICE_HEAD
from compile import row as choice_row
from contenders import BASE
from contention import SIDES
from contention import rows as contention_rows
from fallbacks import rows_of as fallback_rows
from passes import notes_of as pass_notes
from passes import rows_of as pass_rows

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "performance.md", DOCS / "results.md")
MARKED = re.compile(
    r"(<!-- (?P<file>[\w-]+)\.json: (?P<command>.*?) -->\n).*?(<!-- end -->)", re.DOTALL
)
BOUNDS = {"elbo": "ELBO", "iwae": "importance weights", "particles": "particles"}
MODELS = {
    "vae": "VAE, Bernoulli, 784-500-500-20",
    "vae-tutorial": "the tutorial's VAE: continuous Bernoulli, dropout 0.1, "
    "pixels dequantised anew at every step",
    "gmvae": "Gaussian-mixture VAE, ten classes summed, 784-512-512-64",
    "vrnn": "variational RNN, 28 steps of 28, LSTM of two layers of 256",
}


def rendered(page: str, figures: Path) -> str:
    """Return the page with each marked place filled from its file.

    If the file is missing, the place has the command that makes it.
    """

    def fill(found: re.Match[str]) -> str:
        path = figures / f"{found['file']}.json"
        body = _command(found["command"])
        if found["file"] == "fits":
            body += "\n" + summary(
                [json.loads(one.read_text()) for one in sorted(figures.glob("fits-*.json"))]
            )
        elif path.exists():
            body += "\n" + RENDERERS[found["file"].partition("-")[0]](
                json.loads(path.read_text()), figures
            )
        else:
            body += "\nNot measured yet.\n"
        return found[1] + body + found[4]

    return MARKED.sub(fill, page)


def steps(record: dict[str, Any], figures: Path) -> str:
    blocks = [_machine(record)]
    for model, found in record["models"].items():
        head = (
            MODELS[model],
            "ms a step",
            "times the tutorial's speed",
            "times the products alone",
        )
        rows = [
            (name, _number(row["ms"]), _ratio(row, "speed"), _ratio(row, "floor"))
            for name, row in found["ways"].items()
        ]
        blocks.append(_table(head, rows))
        blocks += _left_out(found)
    return "\n".join(blocks)


def scaling(record: dict[str, Any], figures: Path) -> str:
    blocks = [_machine(record)]
    rows = []
    for study in record["studies"].values():
        for line, points in study.get("lines", {}).items():
            values, ms = (
                ", ".join(f"{p['value']:,}" for p in points),
                ", ".join(_number(p["ms"]) for p in points),
            )
            rows.append((f"{study['what']}: {line}", values, ms, f"{points[-1]['times']:.2f}"))
    if rows:
        blocks.append(
            _table(
                ("what grows", "from … to", "ms a step", "the last, in times of the first"), rows
            )
        )
    if "startup" in record["studies"]:
        commands = record["studies"]["startup"]["commands"]
        blocks.append(
            _table(
                ("command", "seconds from start to end"),
                [(f"`{name}`", f"{row['ms'] / 1e3:.2f}") for name, row in commands.items()],
            )
        )
    blocks += _left_out(record)
    # One picture shows all machines, so only the first record includes it.
    first = min(path.name for path in figures.glob("scaling-*.json"))
    if first == f"scaling-{record['machine']['kind']}.json" and (figures / "scaling.png").exists():
        blocks.append("![what a step costs as things grow](figures/scaling.png)\n")
    return "\n".join(blocks)


def race(record: dict[str, Any], figures: Path) -> str:
    head = (
        "model",
        "the tutorial's number",
        "reached",
        "steps",
        "seconds from the start of the process",
    )
    rows = [
        (
            row["model"],
            f"{row['target']:.1f}",
            f"{row['reached']:.1f}",
            f"{row['steps']:,}",
            f"{row['seconds']:.1f}",
        )
        for row in record["models"]
    ]
    return _table(head, rows) + f"\nAll of them: {record['seconds']:.1f} s.\n"


def fits(record: dict[str, Any], figures: Path) -> str:
    blocks = [_machine(record)]
    for model, found in record["models"].items():
        head = (MODELS[model], "ms a step", "times the tutorial's speed")
        blocks.append(
            _table(
                head,
                [
                    (name, _number(row["ms"]), _ratio(row, "speed"))
                    for name, row in found["ways"].items()
                ],
            )
        )
    return "\n".join(blocks)


def precision(record: dict[str, Any], figures: Path) -> str:
    rows = []
    for model, found in record["models"].items():
        full, half = (sum(values) / len(values) for values in found["bounds"].values())
        error = f" ± {found['error']:.2f}" if found["error"] is not None else ""
        rows.append(
            (
                MODELS[model],
                f"{len(found['bounds']['float32'])}",
                f"{full:.2f}",
                f"{half:.2f}",
                f"{found['better']:+.2f}{error}",
            )
        )
    head = ("model", "seeds", "float32", "bfloat16", "better by, % of float32's")
    return f"{_where(record)}; {_versions(record)}.\n\n" + _table(head, rows)


def exact(record: dict[str, Any], figures: Path) -> str:
    """Render a comparison of an exact method with a library made for it."""
    return f"{_machine(record)}\n" + "".join(
        f"{line}\n" for line in (*exact_head(record["who"]), *map(exact_line, record["rows"]))
    )


def exact_head(who: str) -> tuple[str, str]:
    head = (
        "data",
        f"log p, {who}",
        "aevb",
        f"iterations, {who}",
        "aevb",
        f"seconds, {who}",
        "aevb",
        "ratio",
    )
    return _line(head), _line(["---", *["---:"] * (len(head) - 1)])


def exact_line(row: dict[str, Any]) -> str:
    def number(side: dict[str, Any] | None, key: str) -> str:
        if side is None:
            return "–"
        return (
            side[key]
            if key == "iterations"
            else f"{side[key]:.4f}"
            if key == "log p"
            else f"{side[key]:.3f}"
        )

    cells = [
        number(row[side], key)
        for key in ("log p", "iterations", "seconds")
        for side in ("theirs", "ours")
    ]
    return _line([row["data"], *cells, "–" if row["ratio"] is None else f"{row['ratio']:.2f}"])


def contention(record: dict[str, Any], figures: Path) -> str:
    head = (
        f"seconds for {record['steps']} steps, beside",
        *SIDES,
        "before : after",
        "of its share",
    )
    lines = [
        (f"{model}, {first}", *rest)
        for model, found in record["seconds"].items()
        for first, *rest in contention_rows(found, record["limit"])
    ]
    return f"{_machine(record)}\n" + _table(head, lines)


def passes(record: dict[str, Any], figures: Path) -> str:
    notes = "".join(f"\n{note}\n" for note in pass_notes(record["models"]))
    return f"{_machine(record)}\n" + _table(*pass_rows(record["models"])) + notes


def fallbacks(record: dict[str, Any], figures: Path) -> str:
    return f"{_machine(record)}\n" + _table(*fallback_rows(record["models"]))


def compile_choices(record: dict[str, Any], figures: Path) -> str:
    rows = [choice_row(run, found) for run, found in record["models"].items()]
    return f"{_where(record)}; one round; {_versions(record)}.\n\n" + _table(CHOICE_HEAD, rows)


def music(rows: Sequence[dict[str, Any]], figures: Path) -> str:
    """Render log p of models of polyphonic music, in nats per step."""
    head = (
        "collection, bound",
        "test log p",
        "validation",
        "K",
        "steps, best",
        "part",
        "h, z",
        "dropout",
        "minutes",
    )
    lines = [
        (
            f"{row['collection']}, {BOUNDS[row['bound']]}",
            f"{_signed(row['log p'])} ± {row['stderr']:.4f}",
            _signed(row["best validation"]),
            str(row["samples"]),
            f"{row['steps']:,}, {row['best step']:,}",
            str(row["part"]),
            f"{row['h']}, {row['z']}",
            str(row["dropout"]),
            f"{row['training minutes']:.1f}",
        )
        for row in rows
    ]
    return _table(head, lines)


def gaps(rows: Sequence[dict[str, Any]], figures: Path) -> str:
    """Render log p of removed steps, in nats per removed step."""

    def cell(score: Sequence[float] | None) -> str:
        if score is None:
            return "–"
        return _signed(score[0], 3) + (f" ± {score[1]:.3f}" if score[1] else "")

    head = ("nats per removed step", "given the past", "given the rest", "steps of training")
    return _table(
        head,
        [
            (row["name"], cell(row["past"]), cell(row["rest"]), f"{row.get('steps', '–')}")
            for row in rows
        ],
    )


def long(record: dict[str, Any], figures: Path) -> str:
    """Render the cost of training against the length of the sequences."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault((row["model"], row["way"]), []).append(row)
    head = ("model, way", "T", "first step, s", "compile, s", "step, s", "memory, MiB", "slope")
    lines = []
    for (model, way), rows in found.items():
        for before, row in zip([None, *rows], rows, strict=False):
            name = f"{model}, {way}"
            if "step" not in row:
                lines.append((name, f"{row['T']:,}", row["why"], *[""] * 4))
                continue
            slope = ""
            if before is not None:
                ratio = math.log(row["step"] / before["step"])
                slope = f"{ratio / math.log(row['T'] / before['T']):.2f}"
            numbers = [_number(row[key]) for key in ("first", "compile", "step")]
            lines.append(
                (name, f"{row['T']:,}", *numbers, f"{max(0.0, row['memory']):,.0f}", slope)
            )
    return f"{record['on']}.\n\n" + _table(head, lines)


def _signed(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Render, per machine and model, the tutorial's loop and a compiled fit in full precision."""
    rows = []
    for record in records:
        for model, found in record["models"].items():
            loop, ours = found["ways"][BASE], found["ways"]["aevb, compiled"]
            rows.append(
                (
                    MODELS[model],
                    _where(record),
                    _number(loop["ms"]),
                    _number(ours["ms"]),
                    _number(ours["speed"]),
                )
            )
    return _table(
        (
            "a step of 100 rows",
            "on",
            "the tutorial's loop, ms",
            "`fit`, compiled, ms",
            "times as fast",
        ),
        rows,
    )


RENDERERS: dict[str, Callable[[Any, Path], str]] = {
    "music": music,
    "gaps": gaps,
    "long": long,
    "steps": steps,
    "fits": fits,
    "scaling": scaling,
    "race": race,
    "precision": precision,
    "exact": exact,
    "contention": contention,
    "passes": passes,
    "fallbacks": fallbacks,
    "compile": compile_choices,
}


def _command(command: str) -> str:
    return f"```sh\n{command}\n```\n"


def _machine(record: dict[str, Any]) -> str:
    rounds = sorted(
        {one["rounds"] for one in record["models"].values()}
        if "models" in record
        else {record["rounds"]}
    )
    return (
        f"{_where(record)}; {' to '.join(map(str, sorted({rounds[0], rounds[-1]})))} rounds; "
        f"{_versions(record)}.\n"
    )


def _versions(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["machine"]["versions"].items())


def _where(record: dict[str, Any]) -> str:
    found = record["machine"]
    if found["kind"] == "cuda":
        return f"{found['device']}{', TF32' if found['float32 products'] == 'high' else ''}"
    return f"{found['device']}, {found['threads']} of {found['cores']} cores"


def _left_out(found: dict[str, Any]) -> list[str]:
    reasons = [f"{name}, because {reason}" for name, reason in found["left out"].items()]
    return [f"Left out: {'; '.join(reasons)}.\n"] if reasons else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(
        f"{_line(cells)}\n" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: dict[str, float], key: str) -> str:
    return f"{row[key]:.2f}" if key in row else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    for page in PAGES:
        text = page.read_text()
        new = rendered(text, DOCS / "figures")
        if given.check and new != text:
            sys.exit(f"{page.name} is not what the files say: python benchmarks/tables.py")
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
