"""Findings from the history of a run.

They are: a bound that fell, over-fitting, an objective other than the bound, an unfinished KL
warm-up, failed steps, an untrained q, and biased estimators.
"""

from __future__ import annotations

import math

import numpy as np

from aevb.diagnostics.finding import Finding
from aevb.estimate.metric_names import OBJECTIVE, Metric
from aevb.training.events import (
    COMPILED,
    CONVERGED,
    DEVICE,
    FELL_BACK,
    LABELS,
    LOCAL,
    LOOSE,
    NOT_COMPILED,
    NOT_CONVERGED,
    ODD_DATA,
    ONE_SAMPLE,
    P_ALONE,
    PIXELS,
    REPEATED,
    SCHEDULE,
    SKIPPED,
    UNTAUGHT,
    Event,
    events,
)
from aevb.training.events import OBJECTIVE as OBJECTIVE_NOTE
from aevb.training.run import Run
from aevb.training.settings import penalties_of
from aevb.training.warning_signs import fall, fell_back

FELL = 0.01  # fraction of the whole rise of the validation bound, lost since its best value
AHEAD, SHARE = 1.0, 0.05  # training is ahead by more nats, and by more of the validation bound
DATA = (*ODD_DATA, REPEATED, LABELS)  # notes before the first step that are findings
# Notes that other findings tell, and those on how the run was made, which say nothing of the model.
TOLD = (
    *(*DATA, SKIPPED, UNTAUGHT, OBJECTIVE_NOTE, FELL_BACK, ONE_SAMPLE, LOOSE),
    *(COMPILED, NOT_COMPILED, DEVICE, SCHEDULE, PIXELS, P_ALONE, CONVERGED, *LOCAL),
)
NATS = 0.5  # and the loss in nats that is too small to report


def judge_history(run: Run) -> list[Finding]:
    """Return all findings from the history of a run."""
    return [
        *(_fall(run) or _over_fitting(run)),
        *_objective(run),
        *_kl_weight(run),
        *_failures(run),
        *_untaught(run),
        *_bias(run),
        *(as_finding(event) for event in events(run.rows) if event.kind in DATA),
        *_notes(run),
    ]


def _notes(run: Run) -> list[Finding]:
    """Return the notes of the run that no other finding tells."""
    return [
        Finding(
            "warning" if event.kind == NOT_CONVERGED else "note",
            event.kind or "note",
            event.about or "run",
            event.text,
            {},
            event.remedy,
        )
        for event in events(run.rows)
        if event.kind not in TOLD
    ]


def as_finding(event: Event) -> Finding:
    """Return the finding that repeats a note about the data."""
    return Finding("warning", event.kind, event.about, event.text, {}, event.remedy)


def _over_fitting(run: Run) -> list[Finding]:
    """Report whether the validation bound fell from its best while the training bound rose."""
    history, judge = run.history, run.settings.judge
    best, validated = run.best, Metric(judge, validation=True)
    if best is None:
        return [
            Finding(
                "note",
                "over-fitting",
                "run",
                "No validation rows were held out, so over-fitting cannot be seen.",
            )
        ]
    values, steps = history[validated.key], history[validated.steps]
    values, steps = values[np.isfinite(values)], steps[np.isfinite(values)]
    last, lost = float(values[-1]), best.value - float(values[-1])
    figures = {
        "best": best.value,
        "best step": best.step,
        "last": last,
        "last step": int(steps[-1]),
    }
    if judge in history:
        # These values were recorded in training: with dropout, and as means over the steps since
        # the previous row.
        recorded = history[judge][np.isfinite(history[judge])]
        if len(recorded):
            figures["training"] = float(recorded[-max(1, len(recorded) // 20) :].mean())
    rise = best.value - float(values[0])
    objective = "objective " if judge == OBJECTIVE else ""
    ahead = f", training {figures['training']:.2f}" if "training" in figures else ""
    if lost > max(NATS, FELL * rise) and figures.get("training", math.inf) > last:
        text = (
            f"Over-fitted since step {best.step}: the validation {objective or 'bound '}fell from "
            f"{best.value:.2f} to {last:.2f} nats{ahead}."
        )
        remedy = (
            "load_run reads the best checkpoint, which is not affected. To prevent over-fitting: "
            "patience=…, dropout, smaller networks, more data."
        )
        return [Finding("warning", "over-fitting", "run", text, figures, remedy)]
    better = figures.get("training", -math.inf) - last
    if better > max(AHEAD, SHARE * abs(last)):
        fell = "has not fallen" if lost <= 0 else "has hardly fallen"
        text = (
            f"Not over-fitted: validation {objective}{last:.2f} nats {fell} (best "
            f"{best.value:.2f} at step {best.step:,}). Training is {better:.1f} nats better: more "
            f"data or dropout may still help."
        )
    else:
        text = (
            f"Not over-fitted: validation {objective}{last:.2f} nats, best {best.value:.2f}{ahead}."
        )
    return [Finding("ok", "over-fitting", "run", text, figures)]


def _fall(run: Run) -> list[Finding]:
    """Report whether the training bound fell from its best.

    A fall in validation is then not over-fitting.
    """
    found = fall(run)
    if found is None:
        return []
    event = fell_back(found)
    figures = {"best": found.best, "step": found.step, "last": found.last}
    return [Finding("warning", "fell back", "run", event.text, figures, event.remedy)]


def _objective(run: Run) -> list[Finding]:
    """Report whether the run maximised something else than the bound until its end."""
    settings = run.settings
    if not settings.penalised:
        return []
    text = (
        f"Training maximised an objective with {penalties_of(settings)}, not the bound itself. "
        f"The elbo, its terms and the gap have no such weights."
    )
    figures = {"beta": settings.beta, "free bits": settings.free_bits}
    return [Finding("note", "objective", "run", text, figures)]


def _kl_weight(run: Run) -> list[Finding]:
    warmup = run.settings.kl_warmup
    recorded = run.history.get("kl weight", np.ones(1))
    weight = (
        float(recorded[-1])
        if run.settings.kl_cycles > 1
        else min(1.0, run.step / warmup)
        if warmup
        else 1.0
    )
    if weight >= 1:
        return []
    text = (
        f"The KL's weight had reached {weight:.2f} when training ended (kl_warmup={warmup}, "
        f"{run.step} steps): training never used the ELBO."
    )
    figures = {"weight": weight, "kl_warmup": warmup, "steps": run.step}
    return [
        Finding("warning", "kl warm-up", "run", text, figures, "Train longer, or warm up faster.")
    ]


def _failures(run: Run) -> list[Finding]:
    found = events(run.rows, SKIPPED)
    if not found:
        return []
    text = (
        f"{len(found)} step{'s were' if len(found) > 1 else ' was'} skipped because the loss or a "
        f"gradient was not finite; the last: {found[-1]}"
    )
    return [
        Finding(
            "warning",
            "failed steps",
            "run",
            text,
            {"count": len(found)},
            "Look at these rows; a lower lr or clip= may help.",
        )
    ]


def _untaught(run: Run) -> list[Finding]:
    """Report latents that were known in every training row."""
    text = "{0} was known in every training row, so q({0}|·) was not trained."
    return [
        Finding("warning", "untaught q", event.about, text.format(event.about), {}, event.remedy)
        for event in events(run.rows, UNTAUGHT)
    ]


def _bias(run: Run) -> list[Finding]:
    """Report latents whose gradient estimator is biased by design."""
    settings = run.settings
    try:
        plan = run.model.plan(
            how=settings.how,
            bound=settings.bound,
            samples=settings.samples,
            gradient=settings.gradient,
            resample=settings.resample,
        )
    except ValueError:  # the plan is valid only with the latents that the training data know
        return []
    found = [
        Finding(
            "note",
            "biased estimator",
            name,
            f"{name} was trained with how={settings.how.get(name, plan.choices[name].draw)!r}: "
            f"{why}.",
        )
        for name, why in plan.biased.items()
    ]
    if plan.resampling_bias:
        text = f"Trained by particles with gradient='plain': {plan.resampling_bias}."
        found.append(Finding("note", "biased estimator", "run", text))
    return found
