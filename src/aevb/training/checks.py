"""Checks before the first step: settings that do not fit the model, its data or its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from aevb.declare.families import Exact
from aevb.derive.dependence import S
from aevb.derive.plan import WEIGHTED
from aevb.derive.sample_counts import usual_samples
from aevb.evidence.exact import why_not_exact
from aevb.model import Model
from aevb.runtime.suggestions import did_you_mean
from aevb.training.job import Job
from aevb.training.purity import UNKNOWN_HOOKS
from aevb.training.schedules import em
from aevb.training.settings import Settings
from aevb.training.step import Stepper

# Settings that exact answers do not use.
ESTIMATES = (
    "bound",
    "samples",
    "gradient",
    "temperature",
    "beta",
    "free_bits",
    "kl_warmup",
    "kl_cycles",
    "classify",
    "agree",
)


class NoValidationError(ValueError):
    """A setting needs validation data. ``for_commands`` is the command line's message."""

    for_commands = "patience counts validations; add --validation FILE, or --hold-out 0.1."


def check_settings(job: Job, *, validated: bool) -> None:
    """Raise a ValueError if a setting does not fit the model, the data or the schedule."""
    for check in _CHECKS:
        check(job)
    if job.settings.patience is not None and not validated:
        raise NoValidationError("patience counts validations; pass validation= data.")


def _check_length(job: Job) -> None:
    """Refuse batches with fewer rows than processes, and warm-ups that do not end."""
    s, batch = job.settings, job.order.batch
    if batch < job.world.size:
        raise ValueError(
            f"A step takes {batch} rows, so some of the {job.world.size} processes would have "
            f"none. Start at most {batch} processes (torchrun --nproc-per-node)"
            + (", or raise batch=." if batch < job.source.n else ".")
        )
    if s.kl_warmup >= job.total:
        raise ValueError(
            f"kl_warmup={s.kl_warmup} does not end before training does ({job.total} steps): the "
            f"bound would never be trained. Shorten it."
        )
    if s.kl_cycles > 1 and s.kl_warmup >= job.total // s.kl_cycles:
        raise ValueError(
            f"kl_warmup={s.kl_warmup} does not end within a cycle: kl_cycles={s.kl_cycles} "
            f"divides {job.total} steps into cycles of {job.total // s.kl_cycles}. Shorten it, or "
            f"use fewer cycles."
        )
    if s.warmup >= job.total:
        raise ValueError(
            f"warmup={s.warmup} does not end before training does ({job.total} steps). Shorten it."
        )


def _check_objective(job: Job) -> None:
    """Refuse an objective that cannot be computed, or that does not train q."""
    objective = job.settings.schedule.objective
    if job.plan.untrained and objective == "bound":
        name = job.plan.untrained[0]
        raise ValueError(
            f"how={{{name!r}: 'sum'}} cancels q({name}) from the bound, so it cannot be trained. "
            f"Use 'enumerate' to train, 'sum' to evaluate."
        )
    gaps = job.plan.completed
    if gaps and objective == "em":
        raise ValueError(
            f"em() has no closed form if entries are missing that p reads ({min(gaps)}). Use "
            f"mle() where the evidence is exact, or joint()."
        )
    first = job.source.take(torch.arange(min(2, job.source.n)))
    if objective == "evidence" and (reason := why_not_exact(job.model, first)):
        raise ValueError(
            f"mle() ascends the exact evidence, which is not known for this model: {reason}. Use "
            f"joint()."
        )


def _check_penalties(job: Job) -> None:
    """Refuse ``beta=`` and ``free_bits=`` for latents without a KL term, or without a meaning."""
    s = job.settings
    if s.schedule.objective != "bound":
        return
    if s.has_free_bits and s.bound in WEIGHTED:
        raise ValueError(
            f'free_bits= compares KL terms with a number, but bound="{s.bound}" has no KL terms: '
            'they are inside its logarithm. Use bound="elbo", or leave free_bits= out.'
        )
    for name, differs in (("beta", s.has_beta), ("free_bits", s.has_free_bits)):
        value = getattr(s, name)
        for latent in value if isinstance(value, Mapping) else ():
            if latent not in job.model.graph.latents:
                raise ValueError(
                    f"{name}= names {latent!r}, which is no latent. The latents are "
                    f"{', '.join(job.model.graph.latents)}."
                    f"{did_you_mean(latent, job.model.graph.latents)}"
                )
            if latent not in job.plan.choices:
                raise ValueError(
                    f"{name}= names {latent!r}, which is known in every row and therefore has no "
                    f"KL term. Leave {latent!r} out of {name}=, or out of the data."
                )
        if differs and not job.plan.choices:
            raise ValueError(
                f"{name}= changes KL terms, but the bound has none: every latent is known in "
                f"every row. Leave {name}= out."
            )


def _check_labels(job: Job) -> None:
    """Refuse ``classify=`` without labels, or for a q(y|·) that it cannot train on them."""
    if not job.settings.classify:
        return
    if not job.labelled:
        raise ValueError(
            "classify= adds log q(y|x) on rows whose label is known; the data have labels for no "
            "discrete latent. Pass y=…, −1 where unknown."
        )
    for name in job.labelled:
        if isinstance(job.model.graph.rule("q", name).spec, Exact):
            raise ValueError(
                f"classify= trains q({name}|·), but q({name}|·) is Exact(): it has no parameters "
                f"of its own. Leave classify= out; the labels train p."
            )
        if unknown := job.model.graph.latent_behind(name):
            raise ValueError(
                f"classify= needs q({name}|·) as a function of the data alone, but it reads "
                f"{unknown!r}."
            )
        for ref in job.model.graph.reads("q", name) if job.plan.completed else ():
            if ref.name not in job.plan.completed and S in job.plan.values.get(ref.name, ()):
                raise ValueError(
                    f"classify= needs q({name}|·) as a function of the data alone, but it reads "
                    f"{ref}, which depends on missing entries that p draws. Fill the entries, or "
                    f"leave classify= out."
                )


def _check_exact(job: Job) -> None:
    """Refuse settings of an estimate, and frozen parameters, where the answer is exact."""
    s = job.settings
    if s.schedule.objective != "bound":
        defaults = Settings(samples=usual_samples(Settings.bound))
        idle = next(
            (name for name in ESTIMATES if getattr(s, name) != getattr(defaults, name)), None
        )
        if idle is not None:
            raise ValueError(
                f"{idle}= configures q or the estimate of the bound, but {s.schedule} computes "
                f"the objective exactly. Leave {idle}= out, or use joint()."
            )
    if job.em is not None and job.em.closed:
        parameters, theta = dict(job.model.named_parameters()), set(job.model.theta())
        held = [name for name in job.frozen if parameters[name] in theta]
        if held:
            raise ValueError(
                f"em() sets all of p's parameters in closed form, but {held[0]} is frozen. Use "
                f"mle() or joint()."
            )
    elif isinstance(s.schedule, em) and s.schedule.start == "data":
        raise ValueError(
            'em(start="data") needs a closed-form M-step, which this model does not have. Leave '
            "start= out."
        )


def _check_agreement(job: Job) -> None:
    """Refuse ``agree=`` and ``distort=`` that do not belong together, or to the model."""
    s, graph = job.settings, job.model.graph
    if bool(s.agree) != bool(s.distort):
        raise ValueError(
            "agree= weights the agreement of q(y|x) under distortions, and distort= defines the "
            "distortions. Set both, or neither."
        )
    if s.agree and not job.classes:
        raise ValueError(
            "agree= needs q(y|x) of a OneHot latent without a time index whose parents in q are "
            "data, but the model has none."
        )
    for name, distortion in s.distort.items():
        if name not in graph.observed or math.prod(distortion.shape) != graph.size(name):
            raise ValueError(
                f"distort= gives images of shape {distortion.shape} for {name!r}, which is no "
                f"observed variable of that size."
            )


def _check_precision(job: Job) -> None:
    dtype = job.model._parameter().dtype
    if job.settings.precision == "bf16" and dtype != torch.float32:
        raise ValueError(
            f'precision="bf16" lowers the precision of products in float32, but the model is in '
            f"{str(dtype)[6:]}."
        )


_CHECKS: tuple[Callable[[Job], None], ...] = (
    _check_length,
    _check_objective,
    _check_labels,
    _check_exact,
    _check_penalties,
    _check_agreement,
    _check_precision,
)


def check_steps(job: Job, stepper: Stepper) -> None:
    """Refuse a phase without parameters to train, and steps that ``compile=`` cannot compile."""
    schedule = job.settings.schedule
    phases = {
        phase.name: phase
        for phase in (
            schedule.phase(step, job.total) for step in range(min(job.total, schedule.cycle))
        )
    }
    for phase in phases.values():
        if not stepper.active(phase) and not (job.em is not None and job.em.closed):
            only_q, only_p = phase.phi and not phase.theta, phase.theta and not phase.phi
            what = "q" if only_q else "p" if only_p else "the model"
            raise ValueError(
                f"There is nothing to train in phase {phase.name}: {what} has no free parameters. "
                f"Use another schedule."
            )
    if job.settings.compile and stepper.not_recorded not in (None, UNKNOWN_HOOKS):
        raise ValueError(
            f"compile=True compiles a step of the bound, but {stepper.not_recorded}. Train "
            f"without compile=True."
        )


def check_weights(model: Model) -> None:
    """Refuse weights that are not finite: a ReLU can turn NaN into 0 and hide the error."""
    refuse_shared(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(parameter.isfinite().all()):
            raise ValueError(
                f"The parameter {name} holds numbers that are not finite. Start with a fresh "
                f"model, or load finite weights."
            )


def refuse_shared(model: Model) -> None:
    """Refuse a parameter under two names: each step would update it twice."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ValueError(
                f"{first} and {name} are one parameter, but in a declaration every factor has its "
                f"own parameters. To share a computation, declare it as a variable that both "
                f"factors read."
            )
