"""Which evidence estimators apply to a model, and which one to recommend in messages.

Importance sampling and draws from p apply to every model.
"""

from __future__ import annotations

from collections.abc import Sequence

from aevb.derive import filtering
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


def why_not_filtered(model: DeclaredModel, completed: frozenset[str] = frozenset()) -> str | None:
    """Return why a particle filter does not apply; None if it does.

    ``completed`` names observed variables whose missing entries it would draw from p.
    """
    try:
        plan = derive(model.graph, samples=2, sampling=True, completed=completed)
    except ValueError as error:
        if not completed:
            raise
        return str(error).rstrip(".")
    drawn = {name for name, axes in plan.values.items() if S in axes}
    return filtering.why_not_filtered(model.graph, drawn, completed)


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
