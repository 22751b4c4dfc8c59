"""The doctor: everything that is looked at after training, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.sources import open_source, read_arrays
from aevb.derive.plan import Plan
from aevb.diagnostics.calibration import judge_calibration
from aevb.diagnostics.causes import Reach, dependence, reaching
from aevb.diagnostics.clusters import judge_classes
from aevb.diagnostics.finding import Diagnosis, Finding, gravest_first
from aevb.diagnostics.history import judge_history
from aevb.diagnostics.latents import judge
from aevb.diagnostics.measure import SAMPLES_DRAWN, measured
from aevb.diagnostics.scales import ScaleSums
from aevb.diagnostics.usage import UsageSums
from aevb.estimate.batch import Batch, split_latents
from aevb.model import Model
from aevb.predictive.replicate import some_rows
from aevb.runtime.contention import sharing_cores
from aevb.training import warning_signs as course
from aevb.training.run import Run

CHUNK = 250  # rows at a time
FEW = 200  # rows on which gradients and exchanged latents are measured


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
    seed: int = 0,
) -> Diagnosis:
    """Examine a trained model on data: what is wrong, by how much, from what cause, and what to do about it.

    Looked at are: numbers that are not finite; for every latent its KL and activity, and where it has collapsed, whether the gradient of the
    reconstruction reaches q (under the ``how`` that ``run`` recorded, or this one), whether p needs the latent, and whether q has found it; dead and
    duplicate classes, and with ``labels`` ([N], −1 unknown) how they match; scales that ran away; calibration of q on p's own draws
    (``calibrate=False`` leaves it out); and from the ``run`` (or its folder) a bound that fell back, over-fitting, importance weights that rest on
    one sample, failed steps and a KL warm-up that did not end. Values of latents among the data are not given to the model; those of a class
    serve as labels. At most ``rows`` rows are used, chosen at random.
    """
    graph = model.graph
    run = Run.load(run) if isinstance(run, str | Path) else run
    how = dict(run.settings.how if run is not None and how is None else how or {})
    arrays = read_arrays(data, graph)
    source = open_source(graph, {name: value for name, value in arrays.items() if name not in graph.latents}, model._parameter())
    chosen = some_rows(source.n, rows, seed)
    batches = [source.take(chosen[start : start + CHUNK]) for start in range(0, len(chosen), CHUNK)]
    findings = judge_history(run) if run is not None else []
    findings += _weights(model)
    told = {finding.about for finding in findings if finding.kind == "untaught q"}
    findings += [finding for finding in _behind(model) if finding.about not in told]
    if not any(finding.level == "problem" for finding in findings):
        findings += _rests_on_one(model, batches[0], run, seed) if run is not None else []
        with model._evaluating(None):
            findings += _examine(model, batches, _labels(model, arrays, labels, chosen, source.n), how, calibrate, seed)
    return Diagnosis(gravest_first(_of_one_cause(findings)), len(chosen))


def _of_one_cause(findings: list[Finding]) -> list[Finding]:
    """A q that nothing taught says nothing for that reason: it needs that remedy, and no other."""
    remedies = {finding.about: finding.remedy for finding in findings if finding.kind == "untaught q"}
    return [replace(finding, remedy=remedies.get(finding.about, finding.remedy)) if finding.kind == "collapse" else finding for finding in findings]


def _weights(model: Model) -> list[Finding]:
    bad = [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
    if not bad:
        return []
    text = f"{len(bad)} of the model's parameters hold numbers that are not finite; the first is {bad[0]}. Nothing else can be examined."
    return [Finding("problem", "not finite", "run", text, {"parameters": bad}, "Load an earlier checkpoint; train with a lower lr, or clip=.")]


def _rests_on_one(model: Model, batch: Batch, run: Run, seed: int) -> list[Finding]:
    """Whether the importance weights of the bound that was trained have collapsed onto one sample."""
    settings, few = run.settings, {name: value.narrow(-2, 0, min(FEW, value.shape[-2])) for name, value in batch.items()}
    if settings.bound != "iwae":
        return []
    plan = model.plan(how=settings.how, bound="iwae", samples=settings.samples, partial=split_latents(model.graph, batch)[1])
    effective = course.effective_weights(model, plan, few, seed)
    if effective is None or effective >= course.FEW:
        return []
    text, remedy = course.told_weights(effective, settings.samples)
    return [Finding("warning", "one weight", "run", text, {"effective": effective, "samples": settings.samples}, remedy)]


def _behind(model: Model) -> list[Finding]:
    """Latents whose factors in q are behind p: what is measured by q there is q's shortcoming, not p's."""
    remedy = "Train q (fit with joint() or alternate()); until then posterior() and impute() take the exact posterior where it is known."
    return [
        Finding(
            "warning", "q behind p", name, f"{reason}: q({name}|·) is not the posterior's, and what is said of {name} below is about q.", {}, remedy
        )
        for name, reason in model.untaught().items()
    ]


def _labels(model: Model, arrays: Mapping[str, Any], labels: Any, chosen: Tensor, n: int) -> dict[str, np.ndarray]:
    """The labels of the chosen rows for every class that has one for a row: those handed over, or its own values among the data."""
    graph = model.graph
    classes = [name for name in graph.latents if graph.rule("p", name).spec.categorical and not graph.timed[name]]
    if labels is None:
        return {name: _numbers(arrays[name])[chosen.numpy()] for name in classes if name in arrays}
    found = _numbers(labels)
    if found.shape != (n,):
        raise ValueError(f"labels has shape {list(found.shape)}; expected one number for each of the {n} rows, −1 where unknown.")
    return dict.fromkeys(classes, found[chosen.numpy()])


def _numbers(labels: Any) -> np.ndarray:
    """Labels as numbers, −1 where unknown; of one-hot rows the place of the one."""
    found = np.nan_to_num(np.asarray(labels).astype(float), nan=-1.0)
    return np.where(found.max(-1) > 0, found.argmax(-1), -1.0) if found.ndim == 2 and found.shape[-1] > 1 else found


def _plan(model: Model, batch: Batch, how: Mapping[str, str], samples: int) -> Plan:
    """The model's own plan, which is exact where it can be; with ``how`` for a model that has none."""
    choices: dict[str, Any] = {"samples": samples, "partial": split_latents(model.graph, batch)[1]}
    try:
        return model.plan(**choices)
    except ValueError:
        return model.plan(how=how, **choices)


def _examine(
    model: Model, batches: list[Batch], labels: Mapping[str, np.ndarray], how: Mapping[str, str], calibrate: bool, seed: int
) -> list[Finding]:
    graph = model.graph
    usage, scales = {name: UsageSums() for name in graph.latents}, ScaleSums()
    values, kls = [], []
    for part in measured(model, _plan(model, batches[0], how, SAMPLES_DRAWN), batches, seed):
        values.append(part.bound.value)
        kls.append({name: part.bound.terms[f"kl({name})"] for name in graph.latents})
        scales.add(part)
        for name, sums in usage.items():
            sums.add(part, name)
    findings = _bounds(torch.cat(values), behind=bool(model.untaught()))
    if findings[0].level == "problem":
        return findings
    few = {name: value.narrow(-2, 0, min(FEW, value.shape[-2])) for name, value in batches[0].items()}
    recorded = model.plan(how=how, samples=SAMPLES_DRAWN, partial=split_latents(graph, few)[1])
    trained, own = (reaching(model, plan, few, seed) for plan in (recorded, _plan(model, few, how, SAMPLES_DRAWN)))
    for name in graph.latents:
        reach = Reach(trained[name], own[name]) if name in trained else None  # none for q by Bayes' rule
        relies = dependence(model, few, name, kls[0][name][:FEW], seed)
        if graph.rule("p", name).spec.categorical:
            found = usage[name].usage()
            findings += judge_classes(
                model, batches, name, kl=found.kl, reach=reach, relies=relies, how=how, labels=labels.get(name), seed=seed
            )  # fmt: skip
        else:
            findings += judge(model, name, usage[name].usage(), reach, relies, how)
    findings += scales.findings(model)
    return findings + (judge_calibration(model, batches, seed) if calibrate else [])


def _bounds(values: Tensor, behind: bool) -> list[Finding]:
    """The bound itself, and rows on which it is not a number; ``behind``: of a q that was not trained for this p."""
    bad = (~values.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        text = f"The ELBO is not finite in {len(bad)} of {len(values)} rows; the first of those examined is {bad[0]}. Nothing else can be examined."
        return [Finding("problem", "not finite", "run", text, {"rows": bad}, "Look at these rows, and at what p makes of them.")]
    figures = {"elbo": float(values.double().mean())}
    if len(values) > 1:
        figures["stderr"] = float(values.double().std()) / len(values) ** 0.5
    shown = f" (standard error over the rows {figures['stderr']:.2f})" if "stderr" in figures else ""
    text = (
        f"The ELBO is {figures['elbo']:.2f} nats an example{shown}" + ", that of a q which was not trained for this p: it says nothing of p" * behind
    )
    return [Finding("note" if behind else "ok", "elbo", "run", f"{text}.", figures)]
