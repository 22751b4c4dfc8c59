"""Which estimates of the evidence a model allows: what keeps annealing or a filter from it, and what messages advise.

Importance sampling and draws from p are open to every model.
"""

from __future__ import annotations

from collections.abc import Sequence

from aevb.declare.families import Exact
from aevb.derive.dependence import S
from aevb.derive.plan import LIMIT, derive
from aevb.estimate.declared_model import DeclaredModel


def why_not_annealed(model: DeclaredModel) -> str | None:
    """What keeps the latents from being moved by gradients, in words; None if nothing does."""
    graph, values, continuous = model.graph, 1, 0
    for name in graph.latents:
        spec = graph.rule("p", name).spec
        if not spec.finite and any(entry.spec.support.is_discrete for entry in graph.p[name].values()):
            return f"{name} is a {type(spec).__name__}, which has neither gradients nor a finite list of values to sum over"
        if not spec.finite:
            continuous += 1
        elif graph.timed[name]:
            return f"{name}[t] is finite and lives in time, where the sum over its values does not factor"
        else:
            values *= spec.count(graph.size(name)) or 1
    if values > LIMIT:
        return f"the finite latents have {values} joint values, more than {LIMIT}"
    return None if continuous else "no latent is continuous"


def why_not_filtered(model: DeclaredModel) -> str | None:
    """What keeps a filter from running forward in time, in words; None if nothing does."""
    graph = model.graph
    if not any(graph.timed[name] for name in graph.latents):
        return "no latent lives in time"
    for name in graph.latents:
        if isinstance(graph.rule("q", name).spec, Exact):
            return f"q takes {name} by Bayes, over all of its values, and draws none"
    plan = derive(graph, samples=2, sampling=True)
    drawn = {name for name, axes in plan.values.items() if S in axes}
    for entry in graph.entries():
        for ref in entry.key.parents:
            if ref.name in drawn and ref.lag > 0:
                return f'"{entry.key}" reads {ref}, so that {ref.name} is drawn from its end, and a filter starts at the beginning'
            static = entry.side == "p" and not graph.timed[entry.key.name] and not graph.is_deterministic(entry.key.name)
            early = not static and entry.key.at != "last"  # the entry of the last step reads its own step
            if ref.name in drawn and ref.at == "last" and early:
                return f'"{entry.key}" reads {ref}, the end of what is drawn, before a filter has come to it'
    for name in graph.latents:
        late = [ref for ref in graph.reads("q", name) if not graph.timed[name] and ref.name in drawn and ref.timed]
        if late:
            return f"q draws {name} after {late[0]}, and a filter needs it from the first step on"
    return None


def advised(model: DeclaredModel) -> str:
    """The estimate to try first: a filter where it can run, since weights of whole sequences soon rest on a few of them."""
    return "importance" if why_not_filtered(model) else "particles"


def closer(model: DeclaredModel) -> list[str]:
    """The estimates that this model allows and that need less of q than importance sampling does."""
    return [method for method, reason in (("particles", why_not_filtered(model)), ("ais", why_not_annealed(model))) if reason is None]


def either(methods: Sequence[str]) -> str:
    """``method="importance", "particles" or "ais"``."""
    *first, last = [f'"{method}"' for method in methods]
    return f"method={', '.join(first)} or {last}" if first else f"method={last}"
