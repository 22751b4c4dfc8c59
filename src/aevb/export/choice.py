"""Which part of a model to export, over which steps, and why it cannot be exported."""

from __future__ import annotations

from collections.abc import Iterable

from aevb.declare.graph import Entry, Graph
from aevb.derive.plan import Plan
from aevb.estimate.before import why_no_windows_by_plan
from aevb.estimate.declared_model import DeclaredModel
from aevb.evidence.exact import why_not_exact
from aevb.export.parts import (
    Bound,
    Decoder,
    Encoder,
    LogEvidence,
    Part,
    encoding_plan,
    generating_stages,
)
from aevb.export.ports import TIME_AXIS
from aevb.posterior.choice import read_by_q
from aevb.posterior.training_record import Teaching

PARTS = ("encoder", "decoder", "prior", "score")
BOUNDS = ("auto", "exact", "elbo", "iwae")
UNROLL = "pass steps= (--steps), the length of the sequences: all steps are then written out"


def part_of(
    model: DeclaredModel,
    teaching: Teaching,
    what: str,
    *,
    steps: int | None = None,
    bound: str = "auto",
    samples: int | None = None,
) -> Part:
    """Return the part to export. Raise ValueError, with the reason and the fix, if there is none.

    ``steps`` writes out that many steps of a recurrence; without it, one step is exported.
    """
    if what not in PARTS:
        raise ValueError(f"what is one of {', '.join(PARTS)}, got {what!r}.")
    if bound not in BOUNDS:
        raise ValueError(f"bound is one of {', '.join(BOUNDS)}, got {bound!r}.")
    if what != "score" and (bound != "auto" or samples not in (None, 1)):
        raise ValueError(f'bound= and samples= are for what="score", not for the {what}.')
    graph = model.graph
    timed = any(graph.timed[name] for name in graph.stochastic)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps is a whole number of steps from 1 on, got {steps!r}.")
    if steps is not None and not timed:
        raise ValueError("No variable of this model has [t], so it has no steps. Leave out steps=.")
    if what == "score":
        return _score(model, teaching, steps, bound, samples, timed)
    if what == "encoder":
        if not graph.latents:
            raise ValueError("This model has no latents, so it has no encoder.")
        check_taught(model, teaching, "encoder")
        plan = encoding_plan(graph)
        over = _steps(graph, steps, timed, _loops(plan), graph.entries(), "encoder")
        chain = _chain(plan)
        if over is None and chain is not None:
            raise ValueError(
                f"One step of the encoder cannot be exported: the probabilities of {chain}[t] are "
                f"summed over those of the step before. To export whole sequences, {UNROLL}."
            )
        unseen, read = teaching.unseen(model, graph.latents), read_by_q(graph)
        return Encoder(model, over, {name: unseen[name] for name in unseen if name in read})
    targets = [
        name
        for name in (graph.observed if what == "decoder" else graph.latents)
        if any(entry.key.parents for entry in graph.p[name].values())
    ]
    if not targets:
        raise ValueError(
            f"p's factors of {', '.join(graph.latents) or 'the data'} have no parents, so the "
            f"{what} is constant: there is nothing to export."
        )
    loops = any(stage.direction for stage in generating_stages(graph))
    entries = [entry for entry in graph.entries() if entry.side == "p"]
    return Decoder(model, _steps(graph, steps, timed, loops, entries, what), what, targets)


def _score(
    model: DeclaredModel,
    teaching: Teaching,
    steps: int | None,
    bound: str,
    samples: int | None,
    timed: bool,
) -> Part:
    graph = model.graph
    reason = why_not_exact(model)
    if bound == "exact" or (bound == "auto" and reason is None and graph.latents):
        if reason is not None:
            raise ValueError(f'log p of this model is not exact: {reason}. Use bound="elbo".')
        if samples not in (None, 1):
            raise ValueError(
                "log p of this model is exact and takes no samples. Leave out samples=."
            )
        if timed and steps is None:
            raise ValueError(
                f"The exact log p is a sum over paths of the latents, so it is no sum over single "
                f'steps: {UNROLL}. Or use bound="elbo".'
            )
        return LogEvidence(model, steps)
    check_taught(model, teaching, "bound")
    bound = "elbo" if bound == "auto" else bound
    plan = model.plan(bound=bound, samples=samples)
    over = _steps(graph, steps, timed, _loops(plan), graph.entries(), "score")
    if over is None:
        static = next((name for name in graph.stochastic if not graph.timed[name]), None)
        if static is not None:
            raise ValueError(
                f"The score is no sum over single steps, because {static} has no [t]: every step "
                f"would count its terms again. To export whole sequences, {UNROLL}."
            )
        if why := why_no_windows_by_plan(plan):
            reason = why.partition(". ")[0]
            raise ValueError(
                f"The score is no sum over single steps: {reason}. {_capital(UNROLL)}."
            )
    return Bound(model, over, bound, samples)


def _loops(plan: Plan) -> bool:
    """Whether a plan computes some values step by step."""
    return any(stage.direction for stage in plan.stages) or _chain(plan) is not None


def _chain(plan: Plan) -> str | None:
    """A latent that is summed over together with its neighbour in time."""
    return next(
        (name for name, (_, neighbour) in plan.slots.items() if neighbour is not None), None
    )


def _steps(
    graph: Graph,
    steps: int | None,
    timed: bool,
    loops: bool,
    entries: Iterable[Entry],
    what: str,
) -> int | str | None:
    """The steps of a part: the number that was asked for, any number, or None for one step."""
    if steps is not None or not timed or not loops:
        return TIME_AXIS if steps is None else steps
    if reason := why_no_step(entries):
        raise ValueError(
            f"One step of the {what} cannot be exported: {reason}. To export whole sequences, "
            f"{UNROLL}."
        )
    return None


def why_no_step(entries: Iterable[Entry]) -> str | None:
    """Return why these factors have no single step, from the past to the next one."""
    for entry in entries:
        key = entry.key
        for ref in key.parents:
            if ref.lag > 0:
                return f'"{key}" reads {ref}, a later step'
        if key.at == "last":
            return f'"{key}" is a rule for the last step, and one step does not know whether it is'
        if key.at == "static" and any(ref.timed for ref in key.parents):
            return f'"{key}" reads an end of the sequence'
    return None


def check_taught(model: DeclaredModel, teaching: Teaching, what: str) -> None:
    """Raise ValueError if q was not trained for this p."""
    reasons = teaching.untaught(model)
    if reasons:
        raise ValueError(
            f"The {what} of this model is not useful: {next(iter(reasons.values()))}. Train q "
            f"(schedule=joint())."
        )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
