"""The order in which nodes are computed: all steps at once, or in a loop for recurrences.

Nodes that depend on each other across time form a strongly connected component, which runs step by
step in one direction. All other nodes are computed for all steps at once, before or after the
loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aevb.declare.notation import Ref


@dataclass(frozen=True)
class Stage:
    """One node computed for all steps at once (``direction`` 0), or a loop over t.

    A loop runs forward (+1) or backward (−1). The nodes of a loop are in the order in which each
    step computes them.
    """

    nodes: tuple[str, ...]
    direction: int = 0


def schedule(reads: Mapping[str, Sequence[Ref]], side: str) -> tuple[Stage, ...]:
    """Order nodes into stages.

    ``reads`` holds the parents of each node. Variables that it does not list are known. Raise
    ValueError, with the names of the nodes, if no order can compute them.
    """
    stages = []
    for group in _strongly_connected(reads):
        inner = {(node, ref) for node in group for ref in reads[node] if ref.name in group}
        if not inner:
            stages.append(Stage((group[0],)))
            continue
        present = {
            node: [ref.name for ref in reads[node] if ref.name in group and not ref.lag]
            for node in group
        }
        order = [names[0] if len(names) == 1 else names for names in _components(present)]
        for names in order:
            if not isinstance(names, str):
                loop = " → ".join(
                    f"{name}[t]" if _timed(reads, name) else name for name in [*names, names[0]]
                )
                at = " at the same t" if any(_timed(reads, name) for name in names) else ""
                shift = ", or shift it to [t-1]" if at else ""
                raise ValueError(
                    f"{side}: {loop} read each other{at}. Drop one of the arrows{shift}."
                )
        itself = [node for node in group if node in present[node]]
        if itself:
            name = itself[0]
            fix = (
                f"Read {name}[t-1] instead, or drop it."
                if _timed(reads, name)
                else "Drop it right of the bar."
            )
            raise ValueError(f"{side}: {name} is its own parent. {fix}")
        signs = {ref.lag for _, ref in inner if ref.lag}
        if len(signs) > 1:
            back, ahead = (
                next(
                    f"{node}[t] reads {ref}"
                    for node, ref in sorted(inner, key=str)
                    if ref.lag == lag
                )
                for lag in (-1, 1)
            )
            raise ValueError(
                f"{side}: {back} and {ahead}, and each needs the other: no order in time computes "
                f"both. Use one direction."
            )
        static = next((name for name in group if not _timed(reads, name)), None)
        if static is not None:
            others = " and ".join(f"{name}[t]" for name in group if _timed(reads, name))
            raise ValueError(
                f"{side}: {static} and {others} need each other across time, but {static} has no "
                f"[t]: no loop over the steps computes it. Drop one of the arrows, or write "
                f"{static}[t]."
            )
        stages.append(Stage(tuple(str(name) for name in order), -signs.pop()))
    return tuple(stages)


def _timed(reads: Mapping[str, Sequence[Ref]], name: str) -> bool:
    return any(ref.name == name and ref.timed for refs in reads.values() for ref in refs)


def _strongly_connected(reads: Mapping[str, Sequence[Ref]]) -> list[list[str]]:
    return _components(
        {node: [ref.name for ref in refs if ref.name in reads] for node, refs in reads.items()}
    )


def _components(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Strongly connected components, parents first.

    Tarjan's algorithm without recursion, because a chain of nodes may be thousands deep.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    waiting: set[str] = set()  # the nodes on the stack
    found: list[list[str]] = []
    for root in edges:
        path = [] if root in index else [(root, iter(edges[root]))]
        while path:
            node, others = path[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
                waiting.add(node)
            for other in others:
                if other not in index:
                    path.append((other, iter(edges[other])))
                    break
                if other in waiting:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    group = [stack.pop()]
                    while group[-1] != node:
                        group.append(stack.pop())
                    waiting.difference_update(group)
                    found.append(group[::-1])
    return found
