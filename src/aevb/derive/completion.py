"""How missing entries are drawn that p reads.

If p reads an observed variable x (its own past, for instance), a missing entry cannot simply leave
the likelihood: later factors need its value. It is then drawn from p's own conditional, given the
known entries of its step: q(x_missing | ·) = p(x_missing | x_known, ·). In log p − log q the terms
of the drawn entries cancel, and log p of the known entries remains. By Jensen's inequality this is
a bound on log p of the known data, for one sample and for the mean weight of several. q reads the
data as they are, with zeros in place of missing entries.

The draws depend on θ. If the family reparametrises, their gradient is pathwise. Otherwise the score
function log p(x_missing | x_known, ·) has it, with the leave-one-out baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from aevb.declare.graph import Graph
from aevb.derive.draws import Draw

DRAWS = (Draw.PATHWISE, Draw.SCORE, Draw.DETACHED)  # what a request may ask for


@dataclass(frozen=True)
class Completion:
    """How the missing entries of an observed variable are drawn from p, and why so."""

    name: str
    draw: Draw
    why: str

    @property
    def bias(self) -> str | None:
        """A description of the gradient's bias; None if it is unbiased."""
        if self.draw is not Draw.DETACHED:
            return None
        return (
            f"the gradient leaves out how the drawn entries of {self.name} depend on the "
            f"parameters; the value is unbiased"
        )


def incomplete(graph: Graph, partial: Collection[str]) -> frozenset[str]:
    """Return the observed variables with missing entries that p reads."""
    return frozenset(
        name for name in partial if name in graph.observed and graph.is_read_by_p(name)
    )


def completions(
    graph: Graph,
    completed: Collection[str],
    how: Mapping[str, str],
    *,
    samples: int,
    sampling: bool,
) -> dict[str, Completion]:
    """Choose how to draw the missing entries of every variable.

    Raises ValueError, with the reason and the fix, if a request in ``how`` is impossible, or if
    there is no unbiased gradient.
    """
    return {
        name: Completion(name, Draw.SAMPLE, "a sample of p")
        if sampling
        else _completion(graph, name, how.get(name, ""), samples)
        for name in sorted(completed)
    }


def _completion(graph: Graph, name: str, request: str, samples: int) -> Completion:
    family = type(graph.rule("p", name).spec).__name__
    entry = next((entry for entry in graph.p[name].values() if not entry.spec.pathwise), None)
    where = f"how={{{name!r}: {request!r}}}"
    if request and request not in DRAWS:
        raise ValueError(
            f"{where}: {name} is observed, and p draws its missing entries. Choose "
            f"{', '.join(map(repr, DRAWS[:-1]))} or {DRAWS[-1]!r}."
        )
    if request == Draw.PATHWISE and entry is not None:
        raise ValueError(
            f"{where}: a {type(entry.spec).__name__} sample is not a differentiable function of "
            f'its parameters. Use "score" or "detached".'
        )
    score = request == Draw.SCORE or (not request and entry is not None)
    if score and samples < 2:
        what = (
            f"{where} compares samples"
            if request
            else f"{name} has missing entries that p reads. They are drawn from p, but a "
            f"{type(entry.spec).__name__ if entry else family} sample is no differentiable "
            f"function of its parameters, so that its gradient compares samples"
        )
        fix = f'Ask for samples=2 or more, or for the biased how={{{name!r}: "detached"}}.'
        if graph.timed[name]:
            fix += " If only the ends of rows are missing (padding), pass lengths= instead."
        raise ValueError(f"{what}. {fix}")
    if request:
        return Completion(name, Draw(request), "as asked")
    if score:
        return Completion(
            name,
            Draw.SCORE,
            f"a {type(entry.spec).__name__ if entry else family} sample is no differentiable "
            f"function of its parameters: score function with a leave-one-out baseline",
        )
    return Completion(
        name,
        Draw.PATHWISE,
        f"a {family} sample is a differentiable function of its parameters and of noise",
    )
