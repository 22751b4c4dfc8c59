"""``diagnose``: run all checks of a trained model in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.data.sources import Source, open_source, read_arrays
from aevb.derive.completion import incomplete
from aevb.derive.plan import Plan
from aevb.diagnostics.baseline import judge_baseline
from aevb.diagnostics.calibration import judge_calibration
from aevb.diagnostics.causes import Reach, dependence, reaching
from aevb.diagnostics.clusters import judge_classes
from aevb.diagnostics.finding import Diagnosis, Finding, gravest_first
from aevb.diagnostics.further_training import bound_of, exact_value, judge_training
from aevb.diagnostics.history import as_finding, judge_history
from aevb.diagnostics.impossible import judge_bound
from aevb.diagnostics.latents import judge
from aevb.diagnostics.measure import SAMPLES_DRAWN, measured
from aevb.diagnostics.scales import ScaleSums
from aevb.diagnostics.usage import UsageSums
from aevb.estimate.batch import Batch, split_latents, unmasked
from aevb.estimate.metric_names import kl_term
from aevb.estimate.places import columns_of
from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.model import Model
from aevb.posterior.training_record import check_rows, with_weights
from aevb.predictive.replicate import some_rows
from aevb.runtime.contention import sharing_cores
from aevb.tables.declarations import PART
from aevb.training import warning_signs as course
from aevb.training.run import Run
from aevb.training.starting_notes import notes_on_scales

CHUNK = 250  # rows per batch
COMPARED = 1000  # most rows that are compared with independent columns
FEW = 200  # rows for measuring gradients and the dependence on latents


@sharing_cores()
def diagnose(
    model: Model,
    data: Any,
    *,
    run: Run | str | Path | None = None,
    labels: Any = None,
    how: Mapping[str, str] | None = None,
    rows: int | None = 1000,
    calibrate: bool = True,
    train: bool = True,
    seed: int = 0,
) -> Diagnosis:
    """Diagnose a trained model on data: what is wrong, how much, why, and what to do about it.

    The checks are:

    - parameters and bounds that are not finite;
    - for every latent, its KL and activity. For a collapsed latent also the cause: no gradient of
      the reconstruction reaches q (under the ``how`` of ``run``, or this one), p does not need the
      latent, or q has not learned it;
    - dead and duplicate classes, and their match with ``labels``;
    - scales that diverged;
    - a bound far below the evidence, where that is exact, or above it, which is impossible;
    - whether further training helps: a copy of the model is trained for up to 300 steps, or 5
      seconds, on one half of the rows and compared on the other;
    - whether independent columns, each with one distribution for all rows, explain the rows better;
    - calibration of q on data simulated from p, unless q is not used (after ``mle()``, where the
      posterior is exact);
    - data on a scale for which the model is not made; with ``run``, what it noted about its data;
    - from ``run``: its notes, a bound that fell, over-fitting, importance weights dominated by one
      sample, failed steps, and a KL warm-up that did not finish.

    Arguments:
        model: The trained model.
        data: The rows, as for :func:`fit`. Values of latents in the data are not given to the
            model; those of a class serve as labels.
        run: The run that trained it, or its folder.
        labels: Class numbers [N], −1 for unknown.
        how: How it was trained, if there is no run.
        rows: At most this many rows are used, chosen at random; None uses all.
        calibrate: Whether to check the calibration.
        train: Whether to train a copy for a short while, to see if further training helps.
        seed: Decides the rows and draws.

    Returns:
        The :class:`Diagnosis`: ``print`` shows it, and ``worst`` is its gravest level.

    >>> from aevb import Normal, fit
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    >>> run = fit(model, {"x": x}, steps=20, progress=False)
    >>> found = diagnose(model, {"x": x}, run=run, calibrate=False)
    >>> found.rows, len(found.of("further training"))
    (100, 1)
    """
    graph = model.graph
    run = Run.load(run) if isinstance(run, str | Path) else run
    how = dict(run.settings.how if run is not None and how is None else how or {})
    arrays = read_arrays(data, graph)
    source = open_source(
        graph,
        {name: value for name, value in arrays.items() if name not in graph.latents},
        model._parameter(),
    )
    model.teaching.check_columns(columns_of(arrays))
    check_rows(source, {}, model.teaching.pixels)
    chosen = some_rows(source.n, rows, seed)
    batches = [source.take(chosen[start : start + CHUNK]) for start in range(0, len(chosen), CHUNK)]
    if gaps := incomplete(graph, split_latents(graph, batches[0])[1]):
        raise ValueError(
            f"{min(gaps)} has missing entries that p reads, and diagnose compares densities at "
            f"complete rows. Pass rows without them, or fill them: impute(…).draws."
        )
    findings = (
        judge_history(run)
        if run is not None
        else [as_finding(event) for event in notes_on_scales(model, batches[0])]
    )
    findings += _weights(model)
    reported = {finding.about for finding in findings if finding.kind == "untaught q"}
    unused = _is_unused(model, batches[0])
    if unused:
        findings += [_q_unused(model)]
    else:
        findings += [finding for finding in _behind(model) if finding.about not in reported]
    if not any(finding.level == "problem" for finding in findings):
        findings += _rests_on_one(model, batches[0], run, seed) if run is not None else []
        with model._evaluating(None):
            found, values = (
                _examine_p(model, batches, how, seed)
                if unused
                else _examine(
                    model,
                    batches,
                    _labels(model, arrays, labels, chosen, source.n),
                    how,
                    calibrate,
                    seed,
                )
            )
        findings += found
        sound = bool(values.isfinite().all()) and not any(
            finding.kind == "impossible bound" for finding in found
        )
        if sound and (unused or not model.untaught()):
            what = "log p" if unused else "the ELBO"
            few = source.take(chosen[:COMPARED])
            findings += judge_baseline(what, values[:COMPARED], model, few)
            # A mixture joined of several is made without training.
            if train and PART not in model.graph.latents:
                findings += _further_training(model, source, chosen, run, how, unused, seed)
    findings = _by_beta(_of_one_cause(findings), run)
    return Diagnosis(gravest_first(findings), len(chosen))


MORE_STEPS = ("further training", "worse than independent columns")  # whose remedy is more steps
SHARE_AHEAD = 0.5  # of what more steps would gain, by which the training rows are ahead


def _of_one_cause(findings: list[Finding]) -> list[Finding]:
    """Give findings of one cause one remedy.

    A collapsed latent whose q was not trained: to train q. A run that over-fitted: the remedy for
    that, since steps on other rows then help because these are more data.
    """
    for one in findings:
        if one.kind != "over-fitting":
            continue
        ahead = one.figures.get("training", -math.inf) - one.figures.get("last", math.inf)
        remedy = one.remedy or (
            f"The bound of the training rows is {ahead:.1f} nats better than that of validation: "
            f"more data, dropout or smaller networks help, rather than more steps."
        )
        findings = [
            replace(finding, remedy=remedy)
            if finding.kind in MORE_STEPS
            and finding.level == "warning"
            and (one.level == "warning" or ahead > SHARE_AHEAD * finding.figures["mean"])
            else finding
            for finding in findings
        ]
    remedies = {
        finding.about: finding.remedy for finding in findings if finding.kind == "untaught q"
    }
    return [
        replace(finding, remedy=remedies.get(finding.about, finding.remedy))
        if finding.kind == "collapse"
        else finding
        for finding in findings
    ]


def _by_beta(findings: list[Finding], run: Run | None) -> list[Finding]:
    """Name the weight of the KL as the first cause of a latent that is not used."""
    found = []
    for finding in findings:
        unused = finding.kind in ("collapse", "unused entries") and run is not None
        beta = run.settings.beta_of(finding.about) if run is not None and unused else 1.0
        if beta > 1:
            text = (
                f"The run counted each nat of {finding.about}'s KL {beta:g} times (beta={beta:g}), "
                f"which is the likely cause of this: {finding.text}"
            )
            remedy = f"Lower beta first, to 1 for the ELBO itself. {finding.remedy}"
            figures = {**finding.figures, "beta": beta}
            finding = replace(finding, text=text, figures=figures, remedy=remedy)
        found.append(finding)
    return found


def _weights(model: Model) -> list[Finding]:
    bad = [
        name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())
    ]
    if not bad:
        return []
    text = (
        f"{len(bad)} of the model's parameters hold numbers that are not finite; the first is "
        f"{bad[0]}. Nothing else can be examined."
    )
    return [
        Finding(
            "problem",
            "not finite",
            "run",
            text,
            {"parameters": bad},
            "Load an earlier checkpoint; train with a lower lr, or clip=.",
        )
    ]


def _rests_on_one(model: Model, batch: Batch, run: Run, seed: int) -> list[Finding]:
    """Report importance weights of the trained bound that are dominated by one sample."""
    settings, few = (
        run.settings,
        {name: value.narrow(-2, 0, min(FEW, value.shape[-2])) for name, value in batch.items()},
    )
    if settings.bound != "iwae":
        return []
    plan = model.plan(
        how=settings.how,
        bound="iwae",
        samples=settings.samples,
        partial=split_latents(model.graph, batch)[1],
    )
    effective = course.effective_weights(model, plan, few, seed)
    if effective is None or effective >= course.FEW:
        return []
    event = course.one_sample(effective, plan.samples)
    figures = {"effective": effective, "samples": plan.samples}
    return [Finding("warning", "one weight", "run", event.text, figures, event.remedy)]


def _behind(model: Model) -> list[Finding]:
    """Report latents whose factors in q are outdated.

    Measurements by q then show faults of q, not of p.
    """
    remedy = (
        "Train q (fit with joint() or alternate()); until then posterior() and impute() use the "
        "exact posterior if it is known."
    )
    return [
        Finding(
            "warning",
            "q behind p",
            name,
            f"{reason}: q({name}|·) is not the posterior, and the findings about {name} below "
            f"describe q, not p.",
            {},
            remedy,
        )
        for name, reason in model.untaught().items()
    ]


def _is_unused(model: Model, batch: Batch) -> bool:
    """Return whether nothing uses q: no factor of it was trained for p, and the evidence is exact.

    The posterior, forecasts and the evidence are then exact too. Classes of rows are examined in
    any case, because their findings describe p as well.
    """
    behind, graph = model.untaught(), model.graph
    classes = any(
        graph.rule("p", name).spec.categorical and not graph.timed[name] for name in graph.latents
    )
    return (
        bool(behind)
        and not classes
        and behind.keys() >= set(with_weights(model))
        and why_not_exact(model, batch) is None
    )


def _q_unused(model: Model) -> Finding:
    reasons = "; ".join(dict.fromkeys(model.untaught().values()))
    text = f"q is not used ({reasons}): the evidence, the posterior and forecasts are exact."
    return Finding("note", "q unused", "run", text)


def _further_training(
    model: Model,
    source: Source,
    chosen: Tensor,
    run: Run | None,
    how: Mapping[str, str],
    unused: bool,
    seed: int,
) -> list[Finding]:
    """Report whether further training raises what the run maximised: log p, or its bound.

    Nothing is reported if the run maximised something else, which is a finding of its own.
    """
    settings = None if run is None else run.settings
    lr = None if settings is None else settings.lr
    if unused:
        return judge_training(model, source, chosen, "log p", exact_value, None, seed)
    if settings is not None and (settings.penalised or settings.classify or settings.agree):
        return []
    batch = source.take(chosen[:1])
    partial = split_latents(model.graph, batch)[1]
    if settings is None or settings.bound == "elbo" or settings.schedule.objective != "bound":
        what, plan = "the ELBO", _plan(model, batch, how, SAMPLES_DRAWN)
        # As the run was trained: its estimator may be the reason why it did not go on.
        trained = model.plan(how=how, samples=SAMPLES_DRAWN, partial=partial) if how else plan
    else:
        what = f"the bound ({settings.bound}, {settings.samples} samples)"
        plan = trained = model.plan(
            how=how,
            bound=settings.bound,
            samples=settings.samples,
            gradient=settings.gradient,
            resample=settings.resample,
            partial=partial,
        )
    value = bound_of(plan)
    return judge_training(model, source, chosen, what, value, lr, seed, bound_of(trained))


def _examine_p(
    model: Model, batches: list[Batch], how: Mapping[str, str], seed: int
) -> tuple[list[Finding], Tensor]:
    """Examine p alone: its exact evidence, and the scales of the observed variables.

    Return the findings, and log p per row.
    """
    values = torch.cat([exact_evidence(model, batch) for batch in batches])
    if not bool(values.isfinite().all()):
        return [_not_finite("log p", values)], values
    findings = [_mean(values, "log p", "evidence", " (exact)")]
    scales = ScaleSums()
    for part in measured(model, _plan(model, batches[0], how, SAMPLES_DRAWN), batches, seed):
        scales.add(part)
    observed = [one for one in scales.findings(model) if one.about in model.graph.observed]
    return findings + observed, values


def _loose(model: Model, batches: list[Batch], elbo: float) -> list[Finding]:
    """Report a bound far below the exact evidence: p was then trained on a loose bound."""
    if not model.graph.latents or why_not_exact(model, batches[0]) is not None:
        return []
    try:
        evidence = float(torch.cat([exact_evidence(model, one) for one in batches]).double().mean())
    except LinAlgError:
        return []
    if not course.is_loose(evidence, elbo):
        return []
    event = course.loose(evidence, elbo)
    figures = {"evidence": evidence, "elbo": elbo}
    return [Finding("warning", "loose bound", "run", event.text, figures, event.remedy)]


def _labels(
    model: Model, arrays: Mapping[str, Any], labels: Any, chosen: Tensor, n: int
) -> dict[str, np.ndarray]:
    """Return labels of the chosen rows for every static class.

    They are ``labels``, or the values of the class in the data.
    """
    graph = model.graph
    classes = [
        name
        for name in graph.latents
        if graph.rule("p", name).spec.categorical and not graph.timed[name]
    ]
    if labels is None:
        return {name: _numbers(arrays[name])[chosen.numpy()] for name in classes if name in arrays}
    found = _numbers(labels)
    if found.shape != (n,):
        raise ValueError(
            f"labels has shape {list(found.shape)}; expected one number for each of the {n} rows, "
            f"−1 where unknown."
        )
    return dict.fromkeys(classes, found[chosen.numpy()])


def _numbers(labels: Any) -> np.ndarray:
    """Convert labels or one-hot rows to class numbers, −1 if unknown."""
    found = np.nan_to_num(np.asarray(unmasked(labels)).astype(float), nan=-1.0)
    return (
        np.where(found.max(-1) > 0, found.argmax(-1), -1.0)
        if found.ndim == 2 and found.shape[-1] > 1
        else found
    )


def _plan(model: Model, batch: Batch, how: Mapping[str, str], samples: int) -> Plan:
    """Return the model's default plan, or the plan with ``how`` if it has none.

    The default plan is exact if possible.
    """
    choices: dict[str, Any] = {"samples": samples, "partial": split_latents(model.graph, batch)[1]}
    try:
        return model.plan(**choices)
    except ValueError:
        return model.plan(how=how, **choices)


def _examine(
    model: Model,
    batches: list[Batch],
    labels: Mapping[str, np.ndarray],
    how: Mapping[str, str],
    calibrate: bool,
    seed: int,
) -> tuple[list[Finding], Tensor]:
    """Examine p and q; return the findings, and the ELBO per row."""
    graph = model.graph
    usage, scales = {name: UsageSums() for name in graph.latents}, ScaleSums()
    values, kls = [], []
    for part in measured(model, _plan(model, batches[0], how, SAMPLES_DRAWN), batches, seed):
        values.append(part.bound.value)
        kls.append({name: part.bound.terms[kl_term(name)] for name in graph.latents})
        scales.add(part)
        for name, sums in usage.items():
            sums.add(part, name)
    elbo = torch.cat(values)
    findings = _bounds(elbo, behind=bool(model.untaught()))
    if findings[0].level == "problem":
        return findings, elbo
    plan = _plan(model, batches[0], how, SAMPLES_DRAWN)
    if impossible := judge_bound(model, batches[0], plan, seed):
        return findings + impossible, elbo
    if not model.untaught():
        findings += _loose(model, batches, findings[0].figures["elbo"])
    few = {
        name: value.narrow(-2, 0, min(FEW, value.shape[-2])) for name, value in batches[0].items()
    }
    recorded = model.plan(how=how, samples=SAMPLES_DRAWN, partial=split_latents(graph, few)[1])
    trained, own = (
        reaching(model, plan, few, seed)
        for plan in (recorded, _plan(model, few, how, SAMPLES_DRAWN))
    )
    for name in graph.latents:
        # There is no reach if q is Bayes' rule.
        reach = Reach(trained[name], own[name]) if name in trained else None
        relies = dependence(model, few, name, kls[0][name][:FEW], seed)
        if graph.rule("p", name).spec.categorical:
            found = usage[name].usage()
            findings += judge_classes(
                model,
                batches,
                name,
                kl=found.kl,
                reach=reach,
                relies=relies,
                how=how,
                labels=labels.get(name),
                seed=seed,
            )
        else:
            findings += judge(model, name, usage[name].usage(), reach, relies, how)
    findings += scales.findings(model)
    return findings + (judge_calibration(model, batches, seed) if calibrate else []), elbo


def _bounds(values: Tensor, behind: bool) -> list[Finding]:
    """Report the bound, or the rows on which it is not finite.

    ``behind``: q was not trained for this p.
    """
    if not bool(values.isfinite().all()):
        return [_not_finite("The ELBO", values)]
    also = ", but q was not trained for this p: the bound says nothing about p" * behind
    found = _mean(values, "The ELBO", "elbo", also)
    return [replace(found, level="note") if behind else found]


def _not_finite(what: str, values: Tensor) -> Finding:
    bad = (~values.isfinite()).nonzero()[:, 0].tolist()
    text = (
        f"{what} is not finite in {len(bad)} of {len(values)} rows; the first of those examined is "
        f"{bad[0]}. Nothing else can be examined."
    )
    remedy = "Look at these rows, and at the parameters that p computes for them."
    return Finding("problem", "not finite", "run", text, {"rows": bad}, remedy)


def _mean(values: Tensor, what: str, kind: str, also: str) -> Finding:
    """Report the mean of a quantity over the rows, with its standard error."""
    figures = {kind: float(values.double().mean())}
    if len(values) > 1:
        figures["stderr"] = float(values.double().std()) / len(values) ** 0.5
    shown = (
        f" (standard error over the rows {figures['stderr']:.2f})" if "stderr" in figures else ""
    )
    text = f"{what} is {figures[kind]:.2f} nats per example{shown}{also}."
    return Finding("ok", kind, "run", text, figures)
