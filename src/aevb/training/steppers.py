"""Choose the stepper of a run."""

from __future__ import annotations

from aevb.training.exact_steps import EMSteps, LikelihoodSteps
from aevb.training.gradient_steps import GradientSteps
from aevb.training.graph_steps import AT_ONCE, GraphSteps, can_capture
from aevb.training.job import Job
from aevb.training.step import Stepper


def stepper_for(job: Job) -> Stepper:
    """Return the stepper: closed-form EM or L-BFGS on all rows, or Adam on batches."""
    if job.on_all_rows:
        return LikelihoodSteps(job) if job.em is None else EMSteps(job, job.em)
    if can_capture(job):
        return GraphSteps(job)
    return GradientSteps(job, AT_ONCE if job.model._parameter().device.type == "cuda" else 1)
