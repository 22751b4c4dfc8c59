"""Diagnose a failed step: find the term, the factor and the rows that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.estimate.metric_names import latent_of
from aevb.training.job import Job
from aevb.training.objective import Objective
from aevb.training.starting_notes import notes_on_scales, rows_for_scales
from aevb.training.step_inputs import Inputs


def finite(objective: Objective, inputs: Inputs) -> bool:
    """Whether the objective of these inputs is finite."""
    try:
        with torch.no_grad():
            value, _ = objective(inputs)
    except (RuntimeError, ValueError):
        # A covariance is not positive definite, or torch refuses parameters that are not numbers.
        return False
    return bool(value.isfinite())


def what_failed(
    job: Job,
    objective: Objective,
    inputs: Inputs,
    rows: Tensor,
    active: Sequence[nn.Parameter],
    broken: Sequence[str],
) -> str:
    """Describe what is not finite in a step with these inputs, of these rows.

    ``broken`` lists the factors whose parameters are not finite.
    """
    cause = f" The parameters of {', '.join(broken)} are not finite." if broken else ""
    try:
        what, bad, in_gradient = _culprit(job, objective, inputs, active)
    except LinAlgError:
        what, bad, in_gradient = (
            "the exact evidence (a covariance of p is not positive definite)",
            torch.ones(len(rows), dtype=torch.bool),
            False,
        )
    except (RuntimeError, ValueError):  # torch refuses parameters that are not numbers
        if not broken:
            raise
        what, bad, in_gradient = "the bound", torch.ones(len(rows), dtype=torch.bool), False
    mine = (not in_gradient, what, rows[bad].tolist())
    # If several processes failed, report one that has a term to name.
    _, what, which = max(job.world.gather(mine), key=lambda found: found[0])
    return f"{what} is not finite for {job.source.places.rows(which)}.{cause}"


def _culprit(
    job: Job, objective: Objective, inputs: Inputs, active: Sequence[nn.Parameter]
) -> tuple[str, Tensor, bool]:
    """Find the term or the gradient that is not finite.

    Return its description, a mask of the rows, and whether it is a gradient. A gradient belongs to
    all rows.
    """
    value, bound = objective(inputs)
    graph = job.model.graph
    for name, term in bound.terms.items():
        bad = ~term.detach().isfinite().cpu()
        if bool(bad.any()):
            variable = latent_of(name) or name
            factor = (
                f" (p's factor {graph.rule('p', variable).id})"
                if variable in graph.stochastic
                else ""
            )
            return f"the term {name}{factor}", bad, False
    for what, values in (("the bound", bound.value), ("the objective", bound.objective)):
        bad = ~values.detach().isfinite().cpu()
        if bool(bad.any()):
            return what, bad, False
    gradients = torch.autograd.grad(-value, list(active), allow_unused=True)
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    pairs = zip(active, gradients, strict=True)
    culprit = next(
        (
            names[p]
            for p, gradient in pairs
            if gradient is not None and not bool(gradient.isfinite().all())
        ),
        None,
    )
    return f"the gradient of {culprit}" if culprit else "the gradient", torch.ones_like(bad), True


def advice(job: Job, step: int) -> str:
    """Return what to do about a failed step."""
    if job.em is not None and job.em.closed:
        return " Standardise the data (aevb.data.standardise), or use mle()."
    if (scale := scale_at_fault(job)) is not None:
        return scale
    if step == 0 and (name := _large_input(job)) is not None:
        return (
            f" Nothing has been learned yet, so the cause is probably the networks' inputs: {name} "
            f"is large. For counts, let the networks read logarithms, net=mlp(…, log=True); "
            f"standardise other data (aevb.data.standardise)."
        )
    return " Look at these rows; a new run may do better with a lower lr, or clip=."


def scale_at_fault(job: Job) -> str | None:
    """Return a sentence that blames the scale of the data for a failure, if it is odd."""
    found = next(notes_on_scales(job.model, rows_for_scales(job.source)), None)
    return None if found is None else f" The scale of the data is the probable cause: {found}"


def _large_input(job: Job) -> str | None:
    """Return a variable that q reads and that has values above 100, or None."""
    batch, graph = job.source.take(job.order.rows(0).cpu()), job.model.graph
    read = {ref.name for name in graph.latents for ref in graph.reads("q", name)}
    return next(
        (name for name in batch if name in read and float(batch[name].abs().max()) > 100), None
    )
