"""Checks of a trained model for its page.

They are the diagnosis, the evidence and its gap to the bound, the calibration of q, the use of each
latent, and a posterior predictive check.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from aevb.data.sources import Source, open_source
from aevb.derive.plan import Plan
from aevb.diagnostics import Diagnosis, Finding, diagnose
from aevb.diagnostics.calibration import LEAST, judge_calibration, judge_ranks, ranks
from aevb.diagnostics.doctor import CHUNK
from aevb.diagnostics.finding import gravest_first
from aevb.diagnostics.measure import SAMPLES_DRAWN, measured
from aevb.diagnostics.usage import UsageSums
from aevb.estimate.batch import Batch, split_latents
from aevb.estimate.keys import STEPS, is_mask, real_steps, variable_of
from aevb.estimate.places import Placed, places_of
from aevb.evidence import Evidence, curve, log_evidence
from aevb.evidence.exact import why_not_exact
from aevb.evidence.weights import suspect
from aevb.model import Model
from aevb.page.measures import work_of
from aevb.page.packing import pack
from aevb.predictive import predictive_check
from aevb.predictive.check import Comparison
from aevb.predictive.replicate import as_array, some_rows
from aevb.runtime.checked_files import DataWarning
from aevb.tables.declarations import PART
from aevb.training.run import Run

ROWS = 1000  # rows for the diagnosis, the use of the latents and the calibration
EVIDENCE_ROWS, CHECK_ROWS, GAP_ROWS = 500, 2000, 100
QUICK_ROWS = 100  # rows for the evidence, if only the quick checks are made
ITERATIONS, GAP_SAMPLES = 200, 300  # of the ascent that splits the gap, and of its three estimates
# Most multiplications of the evidence and of the gap. A large model is judged by fewer rows.
EVIDENCE_WORK, GAP_WORK, CHECK_WORK = 6e11, 3e11, 3e11
REPLICATES, MANY_ROWS = 300, 100  # of the predictive check, and its fewest rows
MOST_COMPARED = 200  # statistics of columns; the most extreme ones are shown
CHECKED = 2**18  # most numbers of a replicate; quantiles and correlations take time
FEWEST = 20  # rows; with fewer, the gap is not split
RANK_BINS, EVIDENCE_BINS = 20, 30
KS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # numbers of samples of the bound
FAILURES = (ValueError, RuntimeError, ArithmeticError)

# The part of a page that shows a finding, by its kind.
PICTURES = {
    "over-fitting": "curves",
    "fell back": "curves",
    "kl warm-up": "curves",
    "failed steps": "curves",
    "further training": "curves",
    "not converged": "curves",
    "objective": "curves",
    "used": "map",
    "collapse": "latents",
    "unused entries": "latents",
    "no gradient": "latents",
    "misleading q": "latents",
    "point posterior": "latents",
    "wide posterior": "latents",
    "classes": "clusters",
    "dead classes": "clusters",
    "same classes": "clusters",
    "undecided": "clusters",
    "labels": "clusters",
    "calibration": "calibration",
    "sharp likelihood": "check",
    "elbo": "evidence",
    "one weight": "evidence",
    "worse than independent columns": "evidence",
    "impossible bound": "evidence",
}


def checks(
    model: Model,
    data: Mapping[str, Any],
    *,
    held_out: str = "",
    run: Run | None = None,
    labels: Any = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    quick: bool = False,
    log_jacobian: Tensor | None = None,
    numbers: np.ndarray | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return all checks of a model on rows, as plain data and packed arrays.

    Arguments:
        model: The trained model.
        data: The rows to judge it by, as for :func:`fit`. Values of latents are used as labels
            only.
        held_out: Which rows they are, such as "held out" or "training".
        run: Its training, for the findings about the history.
        labels: Class numbers [N], −1 where unknown.
        seed: Seed of the choice of rows and of all estimates.
        progress: Called with the name of a part before it is computed.
        quick: Leave out the parts that take long: the gap and the bound by samples, the
            calibration, and the predictive check.
        log_jacobian: What to subtract from log p of each row for the units of the data, [N].
        numbers: The numbers of the rows in their file, from 0, [N].
        columns: The names of the entries of some variables: the columns of a table. The predictive
            check then compares each of them.

    A part that fails is None, and ``problems`` says why. Warnings about the data are there too.
    """
    parts = _Parts(progress)
    found: dict[str, Any] = dict.fromkeys(
        ("rows", "diagnosis", "calibration", "latents", "evidence", "curve", "gap", "predictive")
    )
    rows: _Rows | None = None
    with parts.part("rows"):
        rows = _Rows.of(model, data, seed, log_jacobian, numbers)
        found["rows"] = _described(rows.source.n, held_out)
    if rows is not None:
        found |= _examined(rows, data, run, labels, parts, quick=quick)
        found |= _estimated(rows, parts, quick=quick)
        if not quick:
            with parts.part("predictive"):
                # A replicate goes through q and p, about as much work as a sample.
                most = int(CHECK_WORK / (REPLICATES * work_of(model, rows.some(1))))
                entries = sum(value.numel() for value in rows.some(1).values())
                most = min(CHECK_ROWS, most, CHECKED // entries)
                most = max(MANY_ROWS, most)
                found["predictive"] = _predictive(model, rows.data, most, seed, columns or {})
    return found | {"problems": list(dict.fromkeys(parts.problems)), "seconds": parts.seconds}


def _examined(
    rows: _Rows,
    data: Mapping[str, Any],
    run: Run | None,
    labels: Any,
    parts: _Parts,
    *,
    quick: bool,
) -> dict[str, Any]:
    """Return the diagnosis, the calibration and the use of the latents.

    Nothing but the diagnosis is there if the model or its bound is not finite.
    """
    model, seed, found = rows.model, rows.seed, dict[str, Any]()
    findings: list[Finding] | None = None
    with parts.part("diagnosis"):
        diagnosis = diagnose(
            model,
            data,
            run=run,
            labels=labels,
            rows=ROWS,
            calibrate=False,
            train=not quick,
            seed=seed,
        )
        findings, examined = list(diagnosis.findings), diagnosis.rows
        if diagnosis.of("not finite"):
            return {"diagnosis": _diagnosis(model, diagnosis)}
        if diagnosis.of("q unused"):  # the rest describes q
            return {"diagnosis": _diagnosis(model, diagnosis)}
    if not quick:
        with parts.part("calibration"):
            added, ranked = _calibration(model, rows.batches(ROWS), seed)
            found["calibration"] = {name: _rank_histogram(rank) for name, rank in ranked.items()}
            if findings is not None:
                findings += added
    with parts.part("latents"):
        how = run.settings.how if run is not None else {}
        found["latents"] = _latents(model, rows.batches(ROWS), how, findings or [], seed)
    if findings is not None:
        found["diagnosis"] = _diagnosis(model, Diagnosis(gravest_first(findings), examined))
    return found


def _estimated(rows: _Rows, parts: _Parts, *, quick: bool) -> dict[str, Any]:
    """Return the evidence, the bound by the number of samples, and the two parts of the gap."""
    model, seed, found = rows.model, rows.seed, dict[str, Any]()
    with parts.part("evidence"):
        work = work_of(model, rows.some(1))
        sampled = why_not_exact(model) is not None
        most = QUICK_ROWS if quick else EVIDENCE_ROWS
        most = max(FEWEST, min(most, int(EVIDENCE_WORK / (KS[-1] * work)))) if sampled else most
        batch = rows.some(most)
        model.teaching.warn_of_other_units(model, batch)
        shift = rows.log_jacobian(most)
        estimate = log_evidence(model, batch, seed=seed)
        found["evidence"] = _evidence(replace(estimate, value=estimate.value.double() - shift))
        # The learning curves are in the units of the model.
        found["evidence"]["model_mean"] = plain(estimate.mean)
        found["evidence"]["numbers"] = pack(rows.numbers(most), "u4")
        found["shifted"] = bool(rows.jacobian is not None and rows.jacobian.abs().max() > 0)
    if quick:
        return found
    if "evidence" in found and found["evidence"]["method"] == "importance":
        with parts.part("curve"):
            found["curve"] = _curve(model, batch, shift, seed)
    with parts.part("gap"):
        # An iteration costs about three samples: it goes through the model and back.
        each = work_of(model, rows.some(1)) * (3 * ITERATIONS + 3 * GAP_SAMPLES)
        count = min(GAP_ROWS, int(GAP_WORK / each))
        if count < FEWEST:
            raise ValueError("it would take minutes for a model of this size. Use model.gap(…).")
        found["gap"] = _gap(model, rows.some(count), rows.log_jacobian(count), seed)
    return found


# Parts, and what goes wrong in them ---------------------------------------------------------------

NAMES = {
    "rows": "The rows could not be read",
    "diagnosis": "The diagnosis failed",
    "latents": "The use of the latents could not be measured",
    "calibration": "The calibration could not be checked",
    "evidence": "log p(x) could not be computed",
    "curve": "The bound for several numbers of samples could not be computed",
    "gap": "The gap between log p(x) and the ELBO could not be split",
    "predictive": "The predictive check failed",
}


@dataclass
class _Parts:
    """The parts computed so far: how long each took, and sentences about those that failed."""

    progress: Callable[[str], None] | None
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Compute a part: an error in it becomes a sentence, and so do warnings about the data."""
        if self.progress is not None:
            self.progress(name)
        start = time.perf_counter()
        try:
            with _collected_warnings(self.problems):
                yield
        except FAILURES as error:
            text = getattr(error, "for_commands", str(error)).strip() or type(error).__name__
            self.problems.append(f"{NAMES[name]}: {text}")
        finally:
            self.seconds[name] = round(time.perf_counter() - start, 3)


@contextmanager
def _collected_warnings(sentences: list[str]) -> Iterator[None]:
    """Add warnings about the data to the sentences; others are shown as usual, but later."""
    others = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DataWarning)
            try:
                yield
            finally:
                for one in caught:
                    if issubclass(one.category, DataWarning):
                        sentences.append(str(one.message))
                    else:
                        others.append(one)
    finally:
        for one in others:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


# Rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """The rows without values of latents, as data and as a source of batches."""

    model: Model
    data: Mapping[str, Any]
    source: Source
    seed: int
    jacobian: Tensor | None = None  # in the order of the rows
    known_as: np.ndarray | None = None  # their numbers in their file

    @classmethod
    def of(
        cls,
        model: Model,
        data: Mapping[str, Any],
        seed: int,
        jacobian: Tensor | None,
        known_as: np.ndarray | None,
    ) -> _Rows:
        seen = Placed(
            {name: value for name, value in data.items() if name not in model.graph.latents},
            places_of(data),
        )
        source = open_source(model.graph, seen, model._parameter())
        return cls(model, seen, source, seed, jacobian, known_as)

    def some(self, most: int) -> Batch:
        """The batch of all rows, or of ``most`` random ones."""
        return self.source.take(some_rows(self.source.n, most, self.seed))

    def numbers(self, most: int) -> np.ndarray:
        """The numbers of the rows of ``some(most)`` in their file or split, from 0."""
        chosen = some_rows(self.source.n, most, self.seed).numpy()
        return chosen if self.known_as is None else np.asarray(self.known_as[chosen])

    def log_jacobian(self, most: int) -> Tensor | float:
        """What to subtract from log p of ``some(most)`` for the units of the data."""
        if self.jacobian is None:
            return 0.0
        return self.jacobian[some_rows(self.source.n, most, self.seed)]

    def batches(self, most: int) -> list[Batch]:
        """The batches that the diagnosis examines."""
        chosen = some_rows(self.source.n, most, self.seed)
        return [
            self.source.take(chosen[start : start + CHUNK])
            for start in range(0, len(chosen), CHUNK)
        ]


def _described(n: int, held_out: str) -> str:
    which = f"{held_out.replace(' ', '-')} " if held_out else ""
    return f"{n:,} {which}row{'s' * (n != 1)}"


def _as_data(model: Model, batch: Batch) -> dict[str, Any]:
    """Return a batch as data of the model: arrays with NaN for missing entries."""
    real = real_steps(batch)
    data: dict[str, Any] = {
        name: as_array(model.graph, batch, name, value)
        for name, value in batch.items()
        if not is_mask(name) and name != STEPS
    }
    return data if real is None else data | {STEPS: real[..., 0].T.cpu().numpy()}


# Diagnosis, latents and calibration ---------------------------------------------------------------


def _diagnosis(model: Model, found: Diagnosis) -> dict[str, Any]:
    result = found.to_dict()
    for record, finding in zip(result["findings"], found.findings, strict=True):
        record["picture"] = _picture(model, finding)
    return dict(plain(result))


def _picture(model: Model, finding: Finding) -> str | None:
    if finding.about == PART:  # parts of a density are no clusters
        return None
    if finding.kind == "collapse" and _is_class(model, finding.about):
        return "clusters"
    return PICTURES.get(finding.kind)


def _is_class(model: Model, name: str) -> bool:
    graph = model.graph
    return name in graph.latents and bool(graph.rule("p", name).spec.categorical)


def _plan(model: Model, batch: Batch, how: Mapping[str, str]) -> Plan:
    """Return the plan by which the diagnosis measures the latents."""
    partial = split_latents(model.graph, batch)[1]
    try:
        return model.plan(samples=SAMPLES_DRAWN, partial=partial)
    except ValueError:
        return model.plan(how=how, samples=SAMPLES_DRAWN, partial=partial)


def _latents(
    model: Model, batches: list[Batch], how: Mapping[str, str], findings: list[Finding], seed: int
) -> list[dict[str, Any]]:
    """Return the KL of each latent and, by entry, its KL, activity and use.

    ``classes`` are the shares of the rows that each class of a categorical latent has.
    """
    graph = model.graph
    sums = {name: UsageSums() for name in graph.latents}
    with model._evaluating(None):
        for part in measured(model, _plan(model, batches[0], how), batches, seed):
            for name, sum_ in sums.items():
                sum_.add(part, name)
    result = []
    for name, usage in ((name, sum_.usage()) for name, sum_ in sums.items()):
        inactive = usage.inactive
        shares = [
            finding.figures["usage"]
            for finding in findings
            if finding.about == name and "usage" in finding.figures
        ]
        result.append(
            {
                "name": name,
                "size": graph.size(name),
                "sequence": bool(graph.timed[name]),
                "class": _is_class(model, name),
                "kl": plain(usage.kl),
                "steps": usage.steps,
                "entries": {
                    "kl": _packed(usage.kl_by_entry, "f4"),
                    "activity": _packed(usage.activity, "f4"),
                    "active": _packed(None if inactive is None else ~inactive, "u1"),
                },
                "classes": plain(shares[0]) if shares else None,
            }
        )
    return result


def _packed(values: Tensor | None, dtype: str) -> dict[str, Any] | None:
    return None if values is None else pack(values.detach().cpu().numpy(), dtype)


def _calibration(
    model: Model, batches: list[Batch], seed: int
) -> tuple[list[Finding], dict[str, np.ndarray]]:
    """Return the findings of ``judge_calibration`` and the ranks that they are about."""
    given = model.graph.given
    if any(is_mask(key) and variable_of(key) in given for batch in batches for key in batch):
        return judge_calibration(model, batches, seed), {}
    times = -(-LEAST // sum(model._extent(batch)[0] for batch in batches))
    parts = [ranks(model, batch, seed + i) for i, batch in enumerate(batches * times)]
    found = {name: np.concatenate([part[name] for part in parts]) for name in model.graph.latents}
    return [judge_ranks(name, rank) for name, rank in found.items()], found


def _rank_histogram(rank: np.ndarray) -> dict[str, Any]:
    """Return the number of ranks in each of 20 bins of (0, 1), per entry, [d, 20]."""
    n, d = rank.shape
    counts = [np.histogram(rank[:, i], RANK_BINS, (0, 1))[0] for i in range(d)]
    return {"n": n, "ranks": pack(np.stack(counts), "u2" if n < 2**16 else "u4")}


# Evidence -----------------------------------------------------------------------------------------


def _evidence(found: Evidence) -> dict[str, Any]:
    values = found.value.double().cpu().numpy()
    n = len(values)
    return {
        "mean": plain(found.mean),
        "stderr": plain(found.error),
        "between": plain(float(values.std(ddof=1)) / math.sqrt(n)) if n > 1 else None,
        "method": found.method,
        "rows": n,
        "untrusted": _untrusted(found),
        "notes": list(found.notes),
        "values": pack(values, "f4"),
        "histogram": histogram(values, EVIDENCE_BINS),
    }


def _untrusted(found: Evidence) -> int:
    """The number of rows whose estimate a few samples carry, which may be too low."""
    khat, ess, samples = (found.diagnostics.get(name) for name in ("khat", "ess", "samples"))
    if not isinstance(khat, Tensor) or not isinstance(ess, Tensor) or not isinstance(samples, int):
        return 0
    return int((suspect(khat, ess, samples) & found.value.isfinite()).sum())


def histogram(values: np.ndarray, bins: int) -> dict[str, Any] | None:
    """Return the counts of the finite values in equal bins from ``low`` to ``high``."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    counts, edges = np.histogram(finite, bins)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}


def _curve(model: Model, batch: Batch, shift: Tensor | float, seed: int) -> dict[str, Any]:
    found = curve(model, batch, KS, seed=seed)
    found = replace(found, value=found.value.double() - shift)
    mean, error = found.mean.tolist(), found.error.tolist()
    return {"ks": list(found.ks), "mean": plain(mean), "error": plain(error)}


def _gap(model: Model, batch: Batch, shift: Tensor | float, seed: int) -> dict[str, Any]:
    reasons = list(dict.fromkeys(model.untaught().values()))
    if reasons:
        raise ValueError(f"{'; '.join(reasons)}, so the ELBO says nothing about p.")
    found = model.gap(
        iterations=ITERATIONS, samples=GAP_SAMPLES, seed=seed, **_as_data(model, batch)
    )
    moved = {name: getattr(found, name).double() - shift for name in ("evidence", "elbo", "best")}
    found = replace(found, **moved)
    n = len(found.elbo)

    def mean(name: str) -> dict[str, Any]:
        value = round(float(getattr(found, name).double().mean()), 9)  # less is rounding
        error = float(found.stderr[name].double().square().sum().sqrt()) / n
        return {"mean": plain(value), "error": plain(error)}

    names = ("elbo", "best", "evidence", "approximation", "amortisation", "total")
    return {name: mean(name) for name in names} | {
        "method": found.method,
        "rows": n,
        "notes": list(found.notes),
    }


# Predictive check ---------------------------------------------------------------------------------


def _predictive(
    model: Model,
    data: Mapping[str, Any],
    most: int,
    seed: int,
    columns: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    found = predictive_check(
        model, data, columns=bool(columns), rows=most, replicates=REPLICATES, seed=seed
    )
    extreme = {id(one) for one in found.extreme()}
    shown = [
        one
        for one in found.comparisons
        if (one.column is not None) == (one.variable in columns) and not _is_constant(one)
    ]
    if len(shown) > MOST_COMPARED:
        shown = sorted(shown, key=lambda one: (one.p, one.normal_p))[:MOST_COMPARED]

    def label(one: Comparison) -> str:
        if one.column is None:
            return one.label
        return f"{one.statistic}({columns[one.variable][one.column]})"

    return {
        "kind": found.kind,
        "rows": found.rows,
        "replicates": found.replicates,
        "comparisons": [
            {
                "label": label(one),
                "variable": one.variable,
                "statistic": one.statistic,
                "observed": one.observed,
                "p": one.p,
                "extreme": id(one) in extreme,
                "replicates": pack(one.replicates, "f4"),
            }
            for one in shown
        ],
    }


def _is_constant(found: Comparison) -> bool:
    """Whether data and replicates cannot differ: entries of a one-hot vector always sum to 1."""
    spread = np.abs(found.replicates - found.observed).max(initial=0.0)
    return bool(spread <= 1e-6 * max(1.0, abs(found.observed)))


def plain(value: Any) -> Any:
    """Return nested data as JSON can hold them: numbers that are not finite become None.

    >>> plain({"a": [1, float("nan")], "b": (2.5, "x")})
    {'a': [1, None], 'b': [2.5, 'x']}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
