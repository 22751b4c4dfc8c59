"""Record in the model which factors of q a run trained, and which it left untrained, and why."""

from __future__ import annotations

from aevb.posterior.training_record import trainable_latents, with_weights
from aevb.training.job import Job

LEAST_SHARE = 10  # q counts as untrained if p took more than this many steps per step of q


def record_trained_factors(job: Job, step: int, left_alone: str | None) -> None:
    """Record in the model what ``step`` steps of a job did to q's factors.

    ``left_alone`` is the reason why EM did not set q, or None if it did.
    """
    if not step:
        return
    model, objective = job.model, job.settings.schedule.objective
    source = job.source
    model.teaching.saw(model, source.extents, source.columns, source.pixels, source.places.pace)
    untrained = {
        name: f"{name} was known in every training row, so that q({name}|·) was not trained"
        for name in known_everywhere(job)
    }
    if objective == "bound":
        _record_gradient_steps(job, step, untrained)
        return
    behind = (
        "mle() trains p alone"
        if objective == "evidence"
        else left_alone and f"em() left q as it is: {left_alone}"
    )
    names = with_weights(model)
    if behind:
        model.teaching.record(model, dict.fromkeys(names, behind) | untrained)
        return
    model.teaching.record(model, untrained)
    if names := [name for name in names if name not in job.plan.clamped]:
        model.teaching.replaced(model, names)


def _record_gradient_steps(job: Job, step: int, untrained: dict[str, str]) -> None:
    model = job.model
    e_steps, m_steps = _counted(job, step)
    trained = [name for name in trainable_latents(model) if name not in untrained]
    if e_steps and e_steps * LEAST_SHARE < m_steps:
        reason = f"q was trained in {e_steps} of {step} steps"
        model.teaching.record(model, dict.fromkeys(trained, reason))
    elif e_steps:
        source = job.source
        model.teaching.taught(
            model,
            trained,
            lacked=source.lacking,
            patterns=source.patterns,
            open_ends=job.open_ends,
        )
        model.teaching.record(model, untrained)


def known_everywhere(job: Job) -> list[str]:
    """Return the latents that are observed in every row: no term of the objective uses their q."""
    s, model = job.settings, job.model
    if s.schedule.objective == "evidence":
        return []  # mle() has its own note: it trains no factor of q
    taught = {*(job.labelled if s.classify else ()), *(job.classes if s.agree else ())}
    trainable = trainable_latents(model)
    return [
        name
        for name in model.graph.latents
        if name in job.plan.clamped and name not in taught and name in trainable
    ]


def _counted(job: Job, step: int) -> tuple[int, int]:
    """Return how many of the first ``step`` steps trained q, and how many trained p."""
    schedule = job.settings.schedule
    cycles, rest = divmod(step, schedule.cycle)
    phases = [schedule.phase(i, job.total) for i in range(schedule.cycle if cycles else rest)]
    q, p = [phase.phi for phase in phases], [phase.theta for phase in phases]
    return cycles * sum(q) + sum(q[:rest]), cycles * sum(p) + sum(p[:rest])
