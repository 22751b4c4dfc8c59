"""Whether a particle filter applies: it draws every variable from the first step on."""

from __future__ import annotations

from collections.abc import Collection

from aevb.declare.families import Exact
from aevb.declare.graph import Graph


def why_not_filtered(
    graph: Graph, drawn: Collection[str], completed: Collection[str] = ()
) -> str | None:
    """Return why a particle filter does not apply; None if it does.

    ``drawn`` names the variables with a value per particle. The missing entries of a ``completed``
    variable are drawn from p.
    """
    if not any(graph.timed[name] for name in graph.latents):
        return "no latent has a time axis"
    for name in graph.latents:
        if isinstance(graph.rule("q", name).spec, Exact):
            return f"q computes {name} by Bayes' rule over all of its values and draws no samples"
    for entry in graph.entries():
        for ref in entry.key.parents:
            if ref.name not in drawn or (entry.side == "q" and ref.name in completed):
                continue
            if ref.lag > 0:
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
            if ref.at == "last" and early:
                return (
                    f'"{entry.key}" reads {ref}, the end of the sequence, which a filter has not '
                    f"reached yet at that step"
                )
    for name in graph.latents:
        late = [
            ref
            for ref in graph.reads("q", name)
            if not graph.timed[name]
            and ref.name in drawn
            and ref.name not in completed
            and ref.timed
        ]
        if late:
            return (
                f"q draws {name} after {late[0]}, but a filter needs {name} from the first step on"
            )
    for name in completed:
        steps = [ref for ref in graph.reads("p", name) if ref.name in drawn and ref.timed]
        if not graph.timed[name] and steps:
            return (
                f"{name} has missing entries that p draws after {steps[0]}, but a filter needs "
                f"{name} from the first step on"
            )
    return None
