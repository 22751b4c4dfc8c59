"""Dependence analysis: the axes of every value, and the descendants of a latent under q."""

from __future__ import annotations

from typing import Literal, NamedTuple

from aevb.declare.evaluation_order import Stage
from aevb.declare.families import Exact
from aevb.declare.graph import Entry, Graph
from aevb.declare.notation import Ref
from aevb.derive.draws import Draw


class Axis(NamedTuple):
    """An axis that a value depends on.

    It is S (samples), T (steps), N (examples), or a latent with an offset in time.
    """

    name: str
    offset: int = 0


S, T, N = Axis("#S"), Axis("#T"), Axis("#N")  # no variable can have such a name


def _shifted(axes: frozenset[Axis], ref: Ref, reader: str, graph: Graph) -> frozenset[Axis]:
    """The axes of a parent's value as ``reader`` reads it, at another step if ``ref`` has a lag."""
    if ref.at in ("first", "last"):
        return axes - {T}
    if not ref.lag:
        return axes
    result = set()
    for name, offset in axes:
        if name in graph.shapes and graph.timed[name]:
            moved = offset + ref.lag
            if abs(moved) > 1:
                count = graph.rule("p", name).spec.count(graph.size(name))
                raise ValueError(
                    f"{reader}[t] remembers {name}, so {name} cannot be enumerated ({count}^T "
                    f"paths). how={{{name!r}: 'gumbel'}} draws it (or 'score', with samples=2 or "
                    f"more)."
                )
            result.add(Axis(name, moved))
        else:
            result.add(Axis(name, offset))
    return frozenset(result | {T})


def find_axes(
    graph: Graph,
    draws: dict,
    stages: tuple[Stage, ...],
    clamped: frozenset[str],
    completed: frozenset[str] = frozenset(),
) -> tuple[dict, dict]:
    """Compute the axes of every variable's value and of every factor's raw numbers.

    This is a fixed-point iteration over the graph. The missing entries of a ``completed`` variable
    are drawn for each sample; only p reads the drawn ones.
    """
    none: frozenset[Axis] = frozenset()
    values: dict[str, frozenset[Axis]] = {}

    def of_data(name: str) -> frozenset[Axis]:
        return frozenset({N, T} if graph.timed[name] else {N})

    for name in (*graph.observed, *graph.given, *clamped):
        values[name] = none if name in completed else of_data(name)
    for name, (draw, _) in draws.items():
        values[name] = frozenset({Axis(name)}) if draw.enumerates else none

    def reads(entry: Entry) -> frozenset[Axis]:
        here = entry.key.at
        parents = [
            Ref(ref.name, "t") if here in ("first", "last") and ref.timed else ref
            for ref in entry.key.parents
        ]
        of_q = entry.side == "q"
        return none.union(
            *(
                _shifted(
                    of_data(ref.name)
                    if of_q and ref.name in completed
                    else values.get(ref.name, none),
                    ref,
                    entry.key.name,
                    graph,
                )
                for ref in parents
            )
        )

    changed = True
    while changed:
        changed = False
        for stage in stages:
            for name in stage.nodes:
                side = "q" if name in draws or name not in graph.p else "p"
                found = none.union(
                    *(
                        reads(entry)
                        for entry in (graph.q if side == "q" else graph.p)[name].values()
                    )
                )
                if name in draws or name in completed:
                    found |= {S, N} | ({T} if graph.timed[name] else set())
                if name in draws:
                    found |= {Axis(name)} if draws[name][0] is Draw.STRATIFY else set()
                if found != values.get(name):
                    values[name], changed = found, True
    axes = {}
    for entry in graph.entries():
        if entry.side == "p" or entry.key.name in draws or graph.is_deterministic(entry.key.name):
            axes[entry.id] = reads(entry)
            for latent in {axis.name for axis in axes[entry.id]}:
                if {Axis(latent, -1), Axis(latent, 1)} <= axes[entry.id]:
                    raise ValueError(
                        f"{entry.id} depends on {latent}[t-1] and {latent}[t+1] at once, so "
                        f"{latent} cannot be enumerated. how={{{latent!r}: 'gumbel'}} draws it."
                    )
    for name in draws:
        if isinstance(graph.rule("q", name).spec, Exact):
            own = none.union(
                *(
                    axes[entry.id] | values[factor]
                    for factor in graph.factors_containing(name)
                    for entry in graph.p[factor].values()
                )
            )
            axes[graph.rule("q", name).id] = own - {Axis(name)}
    return values, axes


Step = int | None | Literal["any"]


def _descends(graph: Graph, target: tuple[str, Step], name: str, clamped: frozenset[str]) -> bool:
    """Return whether a node at a step depends on ``name`` at step 0 in the unrolled graph.

    The graph is that of q's factors and all deterministic nodes. The step is None for static nodes,
    and for nodes that depend on ``name`` at every step through a static node. Observed variables
    block paths. The search goes backwards from the target to its parents, and skips nodes that are
    computed before ``name``.
    """
    reads, place = graph.reads_of_values, graph.place
    reach = 2 * len(reads) + 2
    start: Step = 0 if graph.timed[name] else None
    frontier, seen = [target], {target}
    while frontier:
        node, step = frontier.pop()
        if node in clamped or node not in reads:
            continue
        for ref in reads[node]:
            before: Step
            if isinstance(step, int):
                if ref.at != "t" or abs(step + ref.lag) > reach:
                    continue
                before = step + ref.lag
            else:
                before = None if step is None and graph.timed[node] and ref.at == "t" else "any"
            if ref.name == name and before in (start, "any"):
                return True
            found = (ref.name, before)
            if found not in seen and place.get(ref.name, -1) >= place[name]:
                seen.add(found)
                frontier.append(found)
    return False


def conflict(graph: Graph, name: str, clamped: frozenset[str]) -> str | None:
    """Describe a parent of ``name`` in p that depends on ``name`` under q.

    None if there is none.
    """
    for entry in graph.p[name].values():
        for ref in entry.key.parents:
            steps: list[Step] = (
                [None] if ref.at == "static" else [ref.lag if ref.at == "t" else 0, None]
            )
            if any(_descends(graph, (ref.name, step), name, clamped) for step in steps):
                return (
                    f"p conditions {entry.key.target} on {ref}, which depends on "
                    f"{entry.key.target} under q"
                )
    return None
