"""The sections of a model card."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.comparison.entrants import trained_here
from aevb.declare.own_networks import wrap
from aevb.estimate.metric_names import BESIDES, BOUNDS, OBJECTIVE, Metric, latent_of
from aevb.model_card.markdown import block, bullets, plain, table
from aevb.page.sections import Opened
from aevb.training.checkpoint import latest_manifest
from aevb.training.events import LOCAL, events
from aevb.training.settings import Settings
from aevb.version import __version__

if TYPE_CHECKING:
    from aevb.model import Model

COMMAND = "command.txt"  # the command line that trained a run
SHOWN = 40  # columns that are listed
RECORDED_ANYWAY = ("batch", "lr", "seed", "bound", "schedule")  # settings shown as defaults too


def tags(opened: Opened) -> list[str]:
    """Return the tags for hubs: what kind of model and data it is."""
    assert opened.model is not None
    graph = opened.model.graph
    found = ["aevb", "latent-variable-model"]
    if opened.subject is not None and opened.subject.schema is not None:
        found.append("tabular")
    if any(graph.timed[name] for name in graph.observed):
        found.append("time-series")
    return found


def without_paths(text: str, opened: Opened) -> str:
    """Return a text in which the files of the run have no folders, which may be private."""
    known = [opened.folder, *(Path(one) for one in _files(opened))]
    for path in known:
        if path is not None and path.name:
            for shown in (str(path), str(path.resolve())):
                text = text.replace(shown, path.name)
    return text


def _files(opened: Opened) -> list[str]:
    recipe = opened.recipe
    return [] if recipe is None else [one for one in (recipe.data, recipe.validation) if one]


def introduction(opened: Opened, about: str | None) -> str:
    assert opened.model is not None
    graph = opened.model.graph
    latents = ", ".join(f"{name} ({graph.size(name)})" for name in graph.latents)
    observed = ", ".join(f"{name} ({graph.size(name)})" for name in graph.observed)
    kind = "sequence model" if any(graph.timed.values()) else "model"
    text = (
        f"A latent variable {kind} of {observed} with the latents {latents}"
        if latents
        else f"A {kind} of {observed} without latents"
    )
    lines = [
        f"# {plain(opened.name)}",
        f"{plain(text)}; sizes are in brackets. It was declared and trained with aevb, which "
        "derives the training objective from the declaration.",
    ]
    lines.append(
        plain(about)
        if about
        else "*The author has not stated what the model is for, nor for which data it is unfit. "
        "Everything below is read from the run or computed.*"
    )
    return "\n\n".join(lines)


def model(opened: Opened) -> str:
    return block(str(opened.model))


def derivation(opened: Opened) -> str:
    assert opened.model is not None
    settings = opened.run.settings if opened.run is not None else Settings()
    if not opened.model.graph.latents:
        return "The model has no latents: its bound is log p itself."
    objective = settings.schedule.objective
    if objective != "bound":
        return (
            "The training maximised the exact evidence log p(x); no bound was needed. The bound "
            "with q is:\n\n" + block(str(opened.model.explain()))
        )
    choices = {
        "how": settings.how,
        "bound": settings.bound,
        "samples": settings.samples,
        "gradient": settings.gradient,
        "resample": settings.resample,
    }
    return block(str(opened.model.explain(**choices)))


# Data ---------------------------------------------------------------------------------------------


def data(opened: Opened, summary: Mapping[str, Any]) -> str:
    """Return rows, columns and kinds. It holds no cell of the data."""
    assert opened.model is not None
    graph = opened.model.graph
    pairs = [pair for pair in summary.get("data") or [] if pair[0] != "missing cells"]
    if (trained := _trained_rows(opened)) is not None:
        pairs = [*pairs, ["rows of the training", trained]]
    if opened.subject is not None:
        sizes = [opened.subject.source(i).n for i in range(len(opened.subject.splits))]
        names = [split.name or "all" for split in opened.subject.splits]
        pairs += [[f"rows here ({name})", f"{n:,}"] for name, n in zip(names, sizes, strict=True)]
    found = [table(["what", "value"], pairs)] if pairs else []
    schema = opened.subject.schema if opened.subject is not None else None
    if schema is not None:
        rows = [
            [one.name, one.kind, one.likelihood or "", one.missing or ""]
            for one in schema.columns[:SHOWN]
        ]
        found.append(table(["column", "kind", "likelihood", "missing cells"], rows))
        if len(schema.columns) > SHOWN:
            found.append(f"… and {len(schema.columns) - SHOWN} more columns.")
    else:
        columns = (opened.recipe.columns if opened.recipe is not None else None) or {}
        headings = ["variable", "size", "likelihood", "columns"]
        rows = [
            [
                f"{name}[t]" if graph.timed[name] else name,
                " × ".join(map(str, graph.shapes[name])),
                type(graph.rule("p", name).spec).__name__ if name in graph.stochastic else "given",
                _listed(columns.get(name, ())),
            ]
            for name in (*graph.observed, *graph.given)
        ]
        if not columns:
            headings, rows = headings[:-1], [row[:-1] for row in rows]
        found.append(table(headings, rows))
    if opened.recipe is None and schema is None and not _saved(opened):
        found.append("The run does not record where its rows came from.")
    return "\n\n".join(found)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns[:SHOWN]) + (f", … ({len(columns)})" if len(columns) > SHOWN else "")


def _saved(opened: Opened) -> bool:
    """Whether the model was saved by ``model.save``, and not trained in this folder by ``fit``."""
    return (
        opened.run is None
        and opened.folder is not None
        and (opened.folder / "weights.safetensors").is_file()
        and not (opened.folder / "schema.json").is_file()
    )


def _trained_rows(opened: Opened) -> str | None:
    """Return the recorded number of training rows with the beginning of their hash."""
    manifest = latest_manifest(opened.folder) if opened.folder is not None else None
    recorded = (manifest or {}).get("state", {}).get("settings", {}).get("data")
    if not isinstance(recorded, str):
        return None
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]+\b", r"hash \1…", recorded)


# Training and results -----------------------------------------------------------------------------


def training(opened: Opened, summary: Mapping[str, Any]) -> str:
    if opened.run is None:
        if _saved(opened):
            return "The folder holds a saved model, without a record of its training."
        return "The parameters were fitted in closed form or by EM, without steps to record."
    run = opened.run
    rows = [
        [one["name"], one["value"], one["help"]]
        for one in summary.get("settings", [])
        if (not one["usual"] or one["name"] in RECORDED_ANYWAY)
        and not (one["name"] == "bound" and run.settings.schedule.objective != "bound")
    ]
    lines = [
        f"{run.step:,} steps in {run.seconds:.1f} s.",
        table(["setting", "value", "meaning"], rows) + "\n\nAll others have their defaults.",
    ]
    last = _last(run.rows)
    if last:
        lines.append(
            "The last recorded values, in nats per row and in the units of the model. Those of "
            "training are means over the last batches, with dropout. Each value is of one draw of "
            "q per row (or of the samples= above), so it differs from the results below by "
            "sampling."
        )
        names = list(dict.fromkeys(Metric.of(key).name for key in last))
        assert opened.model is not None
        terms = [name for name in names if _is_term(opened.model, name)]
        shown = [
            [name, *(_recorded(last.get(Metric(name, one).key)) for one in (False, True))]
            for name in terms
        ]
        if shown:
            lines.append(table(["term", "training", "validation"], shown))
        own = [[name, _recorded(last.get(name))] for name in names if name not in terms]
        if own:
            lines.append("Numbers that the function `after=` returned:")
            lines.append(table(["name", "last value"], own))
    if run.best is not None:
        lines.append(
            f"The best validation was {run.best.value:.4f} ({plain(run.settings.judge)}), at step "
            f"{run.best.step:,}."
        )
    return "\n\n".join(lines)


def _is_term(model: Model, name: str) -> bool:
    """Whether a recorded number is a bound or a term of it; others are those of ``after=``."""
    return (
        name in (*BOUNDS, OBJECTIVE, "gap")
        or name in model.graph.shapes
        or latent_of(name) in model.graph.latents
    )


def _last(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last recorded value of each term of the bound."""
    found: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if Metric.of(key).name not in (*BESIDES, "epoch") and isinstance(value, int | float):
                found[key] = value
    return found


def _recorded(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def results(opened: Opened, checks: Mapping[str, Any]) -> str:
    if opened.subject is None:
        return "Not computed: the rows are not here."
    lines = [f"Computed on {checks.get('rows', 'rows')}, in nats per row."]
    evidence, gap = checks.get("evidence"), checks.get("gap")
    rows = []
    if evidence is not None:
        error = "exact" if evidence["method"] == "exact" else _error(evidence["stderr"])
        between = _error(evidence["between"])
        rows.append(["log p (evidence)", _number(evidence["mean"]), error, between])
        rows[-1].append(f"{evidence['method']}, {evidence['rows']:,} rows")
    if gap is not None:
        words = {
            "evidence": "log p, from the best q",
            "elbo": "ELBO",
            "total": "gap: log p − ELBO",
            "approximation": "… of q's family",
            "amortisation": "… of one network for all rows",
        }
        for name, word in words.items():
            one = gap[name]
            rows.append([word, _number(one["mean"]), _error(one["error"]), "", ""])
            rows[-1][-1] = f"log p: {gap['method']}, {gap['rows']:,} rows"
        if gap["method"] == "exact":  # log p is one number, whatever computes it
            rows = [row for row in rows if row[0] != words["evidence"]]
    if rows:
        lines.append(
            table(["quantity", "mean", "± sampling", "± between rows", "how"], rows)
            + "\n\n± sampling is the standard error of the estimate for these rows; ± between rows "
            "is the standard error of the mean over rows."
        )
    lines += [bullets(one["notes"]) for one in (evidence, gap) if one and one["notes"]]
    if checks.get("shifted"):
        lines.append(
            "These are densities of the data in their own units. Terms of the training and numbers "
            "in the findings are in the units of the model, which reads standardised values."
        )
    if evidence is not None and gap is not None and gap["rows"] != evidence["rows"]:
        lines.append(
            f"The ELBO and the gap are of {gap['rows']:,} of these rows, because they take longer; "
            f"the gap is not the difference to log p of {evidence['rows']:,} rows."
        )
    predictive = checks.get("predictive")
    if predictive is not None:
        extreme = [one["label"] for one in predictive["comparisons"] if one["extreme"]]
        total = len(predictive["comparisons"])
        rest = f": {', '.join(map(plain, extreme[:8]))}" if extreme else ""
        lines.append(
            f"Posterior predictive check with {predictive['replicates']} simulated data sets: "
            f"{len(extreme)} of {total} statistics of the data are extreme{rest}."
        )
    return "\n\n".join(lines)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def findings(checks: Mapping[str, Any]) -> str:
    diagnosis = checks.get("diagnosis")
    if diagnosis is None:
        return "Not computed."
    rows = [
        [one["level"], one["about"], f"{one['text']} {one['remedy']}".strip()]
        for one in diagnosis["findings"]
        # The results have the ELBO already, from more draws.
        if not (one["kind"] == "elbo" and one["level"] == "ok" and checks.get("gap"))
    ]
    head = f"Of {diagnosis['rows']:,} rows; the gravest is {diagnosis['worst']!r}."
    return f"{head}\n\n{table(['level', 'about', 'finding'], rows)}" if rows else head


def limits(opened: Opened, checks: Mapping[str, Any], problems: Sequence[str]) -> str:
    """Return what restricts the results above: it is all found in the run or in the checks."""
    assert opened.model is not None
    found = []
    judged = opened.subject.judged.name if opened.subject is not None else None
    if judged == "" and _trained_here(opened):
        judged = "training"
    if judged == "training":
        found.append(
            "The results are of rows that the model was trained on, so they look better than they "
            "are for new rows."
        )
    elif judged == "" and _trained_here(opened) is False:
        found.append(
            "By the recorded hash, the rows of the results are not the training rows. Whether some "
            "of them are among the training rows is not recorded."
        )
    elif judged == "":
        found.append(
            "Whether the model was trained on the rows of the results is not recorded. On training "
            "rows they look better than they are for new rows."
        )
    found += [f"{reason}." for reason in dict.fromkeys(opened.model.untaught().values())]
    evidence = checks.get("evidence")
    if evidence is not None and evidence["untrusted"]:
        found.append(
            f"log p of {evidence['untrusted']} of {evidence['rows']} rows rests on a few samples, "
            f"and is too low there."
        )
    rows = opened.run.rows if opened.run is not None else []
    found += [
        f"During training: {without_paths(str(event), opened)}"
        for event in events(rows)
        if event.kind not in LOCAL
    ]
    if opened.state == "training":
        found.append("The run was still training when this card was made.")
    if opened.run is not None and opened.run.settings.seed is not None:
        found.append("All numbers are of one run; another seed gives others.")
    found += [f"Not computed: {problem}" for problem in problems]
    return bullets(dict.fromkeys(found)) if found else "None were found."


def _trained_here(opened: Opened) -> bool | None:
    """Whether the rows that judge a run are those of its training; None without a record."""
    subject = opened.subject
    if subject is None or opened.folder is None or opened.run is None:
        return None
    return trained_here(opened.folder, subject.source(len(subject.splits) - 1))


# Use ----------------------------------------------------------------------------------------------


def use(opened: Opened, repo: str | None) -> str:
    assert opened.model is not None
    folder = opened.folder.resolve().name if opened.folder is not None else "run"
    here = repo.rpartition("/")[2] if repo is not None else folder
    lines = []
    if repo is not None:
        lines.append(block(f"pip install 'aevb[hub]'\naevb pull {repo} --out {here}", "sh"))
    table_run = opened.subject is not None and opened.subject.schema is not None
    if table_run:
        code = (
            f"import aevb\n\ntable = aevb.load_table({here!r})\n"
            "table.sample(5)  # new rows; table.score(frame) is log p of a frame's rows"
        )
    else:
        load = "load_run" if opened.run is not None else "load"
        if opened.folder is None:
            load, here = "load", "model"
            lines.append("The run has no folder; `run.model.save('model')` saves the model.")
        graph = opened.model.graph
        rows = ", ".join(f"{name}=…" for name in (*graph.observed, *graph.given))
        method = "posterior" if graph.latents else "log_evidence"
        own = [one.id for one in graph.entries() if isinstance(one.spec.net, wrap)]
        modules = ", ".join(f'"{one}": …' for one in own)
        code_of = f", modules={{{modules}}}" if own else ""  # the author's own networks
        what = "of the latents" if graph.latents else "log p"
        code = (
            f"import aevb\n\nmodel = aevb.{load}({here!r}{code_of})\n"
            f"model.{method}({rows})  # {what}, for rows that are prepared as here\n"
            f"model.sample(5{_given(opened)})"
        )
    lines += [
        block(code, "python"),
        "Loading compares the files with their recorded hashes. It unpickles nothing and executes "
        "no code of the repository.",
    ]
    return "\n\n".join(lines)


def _given(opened: Opened) -> str:
    assert opened.model is not None
    graph = opened.model.graph
    steps = ", steps=10" if any(graph.timed[name] for name in graph.observed) else ""
    return steps + "".join(f", {name}=…" for name in graph.given)


def reproduce(opened: Opened, command: str | None) -> str:
    lines = []
    trained = _command(opened)
    if trained is not None:
        lines.append("The model was trained by this command (without folders):")
        lines.append(block(trained, "sh"))
    elif not _saved(opened):
        lines.append(
            "The model was trained from Python, by `aevb.fit` with the settings above; "
            "`aevb.Settings.from_toml('config.toml')` reads all of them from the run."
        )
    if command is not None:
        lines += ["This card was made by:", block(_without_folders(command), "sh")]
    return "\n\n".join([*lines, f"The card was made with aevb {__version__}."])


def _command(opened: Opened) -> str | None:
    path = opened.folder / COMMAND if opened.folder is not None else None
    if path is None or not path.is_file() or path.stat().st_size > 2**16:
        return None
    return _without_folders(path.read_text(encoding="utf-8", errors="replace").strip())


def _without_folders(command: str) -> str:
    """Return a command line in which paths are names of files: folders may be private.

    >>> _without_folders("aevb train vae --data /home/me/birds/ --out=runs/ward")
    'aevb train vae --data birds --out=ward'
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    # A word may be a path, or --option=path, or name=path. A folder may end in a slash.
    return shlex.join(re.sub(r"(?s)^([\w-]+=)?.*?([^/]*)/*$", r"\1\2", word) for word in words)
