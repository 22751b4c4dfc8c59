"""Evidence log p(x) and its gap to the ELBO: exact where the model allows it, else estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from aevb.data.repeated_values import note_repeats
from aevb.estimate.batch import completed
from aevb.estimate.declared_model import DeclaredModel
from aevb.evidence.annealing import AIS, CHAINS, Bidirectional, annealed, bidirectional
from aevb.evidence.curve import Curve, curve
from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.evidence.methods import advised
from aevb.evidence.particles import Particles, filtered
from aevb.evidence.result import Evidence
from aevb.evidence.sampling import Memory, importance, naive
from aevb.runtime.suggestions import did_you_mean

__all__ = [
    "AIS",
    "Bidirectional",
    "Curve",
    "Evidence",
    "Particles",
    "bidirectional",
    "curve",
    "log_evidence",
    "unnoted_evidence",
]


METHODS = ("auto", "exact", "importance", "ais", "prior", "particles")
SAMPLES = 1000


def log_evidence(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    *,
    method: str | AIS | Particles = "auto",
    samples: int | None = None,
    seed: int | None = None,
    memory: Memory = None,
) -> Evidence:
    """Return log p(observed | given) of a batch, per example.

    ``method`` is one of ``METHODS``, or an :class:`AIS` or :class:`Particles` object with the
    settings of that method. "auto" takes the exact evidence where it has a closed form, and
    importance sampling otherwise; a particle filter, where it applies, if entries are missing
    that p reads. ``samples`` is the number of importance samples, particles or chains per example.
    ``memory`` limits the memory, such as "2 GiB". The result is an
    :class:`Evidence` with values, standard errors, diagnostics and notes.

    Raises ValueError if the method is unknown or does not apply to this model; the message names a
    method that does.
    """
    found = unnoted_evidence(model, batch, method=method, samples=samples, seed=seed, memory=memory)
    return replace(found, notes=(*found.notes, *note_repeats(model.graph, batch)))


def unnoted_evidence(
    model: DeclaredModel,
    batch: Mapping[str, Tensor],
    *,
    method: str | AIS | Particles = "auto",
    samples: int | None = None,
    seed: int | None = None,
    memory: Memory = None,
) -> Evidence:
    """Return the result of :func:`log_evidence` without its notes about the data.

    All remaining notes are reasons not to trust the estimate.
    """
    if not isinstance(method, AIS | Particles) and method not in METHODS:
        raise ValueError(
            f"Unknown method {method!r}. Choose {', '.join(METHODS[:-1])} or {METHODS[-1]}."
            f"{did_you_mean(method, METHODS)}"
        )
    gaps = completed(model.graph, batch)
    if gaps and (method == "ais" or isinstance(method, AIS)):
        raise ValueError(
            f"{min(gaps)} has missing entries that p reads; annealed importance sampling has no "
            f'chains for them. Use method="{advised(model, gaps)}", which draws them from p.'
        )
    if method in ("auto", "exact"):
        reason = why_not_exact(model, batch)
        if reason is None:
            with model._evaluating(None):
                value = exact_evidence(model, batch)
            return Evidence(value, torch.zeros_like(value), "exact")
        if method == "exact":
            what = f"this model with missing entries of {min(gaps)}" if gaps else "this model"
            raise ValueError(
                f"The evidence of {what} is not known in closed form: {reason}. Use "
                f'method="{advised(model, gaps)}".'
            )
        if gaps:  # a filter conditions draws of missing entries on the past, step by step
            method = advised(model, gaps)
    if method == "ais" or isinstance(method, AIS):
        settings = method if isinstance(method, AIS) else AIS()
        return annealed(
            model,
            batch,
            settings,
            chains=CHAINS if samples is None else samples,
            seed=seed,
            memory=memory,
        )
    samples = SAMPLES if samples is None else samples
    if method == "particles" or isinstance(method, Particles):
        return filtered(
            model,
            batch,
            method if isinstance(method, Particles) else Particles(),
            particles=samples,
            seed=seed,
            memory=memory,
        )
    if method == "prior":
        return naive(model, batch, samples, seed, memory=memory)
    return importance(model, batch, samples, seed, memory=memory, compare=True)
