"""Which evidence estimators apply to a model, and which one to recommend in messages.

Importance sampling and draws from p apply to every model.
"""

from __future__ import annotations

from collections.abc import Sequence

from aevb.declare.families import Exact
from aevb.derive.dependence import S
from aevb.derive.plan import LIMIT, derive
from aevb.estimate.declared_model import DeclaredModel


def why_not_annealed(model: DeclaredModel) -> str | None:
    """Return why annealed importance sampling does not apply; None if it does."""
    graph, values, continuous = model.graph, 1, 0
    for name in graph.latents:
        spec = graph.rule("p", name).spec
        if not spec.finite and any(
            entry.spec.support.is_discrete for entry in graph.p[name].values()
        ):
            return (
                f"{name} is a {type(spec).__name__}, which has neither gradients nor a finite "
                f"list of values to sum over"
            )
        if not spec.finite:
            continuous += 1
        elif graph.timed[name]:
            return (
                f"{name}[t] is finite and has a time axis, so that the sum over its values does "
                f"not factor over steps"
            )
        else:
            values *= spec.count(graph.size(name)) or 1
    if values > LIMIT:
        return f"the finite latents have {values} joint values, more than {LIMIT}"
    return None if continuous else "no latent is continuous"


def why_not_filtered(model: DeclaredModel) -> str | None:
    """Return why a particle filter does not apply; None if it does."""
    graph = model.graph
    if not any(graph.timed[name] for name in graph.latents):
        return "no latent has a time axis"
    for name in graph.latents:
        if isinstance(graph.rule("q", name).spec, Exact):
            return f"q computes {name} by Bayes' rule over all of its values and draws no samples"
    plan = derive(graph, samples=2, sampling=True)
    drawn = {name for name, axes in plan.values.items() if S in axes}
    for entry in graph.entries():
        for ref in entry.key.parents:
            if ref.name in drawn and ref.lag > 0:
                return (
                    f'"{entry.key}" reads {ref}, so that {ref.name} is drawn from its end, but a '
                    f"filter starts at the beginning"
                )
            static = (
                entry.side == "p"
                and not graph.timed[entry.key.name]
                and not graph.is_deterministic(entry.key.name)
            )
            # The entry of the last step reads its own step.
            early = not static and entry.key.at != "last"
            if ref.name in drawn and ref.at == "last" and early:
                return (
                    f'"{entry.key}" reads {ref}, the end of the sequence, which a filter has not '
                    f"reached yet at that step"
                )
    for name in graph.latents:
        late = [
            ref
            for ref in graph.reads("q", name)
            if not graph.timed[name] and ref.name in drawn and ref.timed
        ]
        if late:
            return (
                f"q draws {name} after {late[0]}, but a filter needs {name} from the first step on"
            )
    return None


def advised(model: DeclaredModel) -> str:
    """Return the estimator to try first.

    This is the particle filter where it applies: importance weights of whole sequences degenerate,
    so that a few of them dominate the mean.
    """
    return "importance" if why_not_filtered(model) else "particles"


def closer(model: DeclaredModel) -> list[str]:
    """Return the applicable estimators that depend less on q than importance sampling."""
    return [
        method
        for method, reason in (
            ("particles", why_not_filtered(model)),
            ("ais", why_not_annealed(model)),
        )
        if reason is None
    ]


def either(methods: Sequence[str]) -> str:
    """Format methods for a message.

    >>> either(["importance", "particles", "ais"])
    'method="importance", "particles" or "ais"'
    """
    *first, last = [f'"{method}"' for method in methods]
    return f"method={', '.join(first)} or {last}" if first else f"method={last}"
