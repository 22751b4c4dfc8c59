"""The order of a bound's sums, from the declared graphs alone.

The plan and the printed formula must follow these rules:

1. A sum is inside every sum that its weights depend on, directly or through other variables. The
   weights are then known where they are used.
2. log Σ exp E ≤ E log Σ exp. An expectation is therefore outside every sum in a logarithm (the
   samples' log-mean-exp, ``how`` "sum", a mixture's components) that rule 1 does not put outside
   it, as far as all latents together allow.

This module tries all orders. Orders that break rule 2 equally often, and least, are equally good.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from .declaration import Declaration, Line
from .unroll import ON_AXES

Nesting = tuple[tuple[str, str], ...]  # outermost first: (kind, latent or "samples")


def kind(way: str, bound: str) -> str:
    """Return how the sum over a latent, or over "samples", is taken."""
    inside = bound == "iwae"
    if way == "samples":
        return "log mean exp" if inside else "mean"
    return (
        "log sum exp"
        if way == "sum"
        else "log expect exp"
        if way == "stratify" and inside
        else "expect"
    )


def blanket(declaration: Declaration, name: str) -> set[str]:
    """Return the other variables in those factors of p that contain a latent.

    The parents of a deterministic node replace it.
    """
    found: set[str] = set()
    for line in (line for line in declaration.lines if line.side == "p" and line.stochastic):
        members, frontier = {line.name}, [read.name for read in line.reads]
        while frontier:
            current = frontier.pop()
            if current not in members:
                members.add(current)
                if current not in declaration.given and not declaration.stochastic(current):
                    frontier += [
                        read.name
                        for rule in _lines(declaration, "p", current)
                        for read in rule.reads
                    ]
        found |= members if name in members else set()
    return found - {name}


def dependencies(declaration: Declaration, ways: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the unknown latents that each latent depends on under q, directly or indirectly.

    The set of a latent contains "samples" if it depends on a draw.
    """
    known = {*declaration.observed, *declaration.given} | (set(declaration.latents) - set(ways))
    found = {}
    for name in ways:
        above: set[str] = set()
        frontier = _above(declaration, name)
        while frontier:
            current = frontier.pop()
            if current in known or current in above or current == name:
                continue
            above.add(current)
            frontier |= _above(declaration, current)
        drawn = (
            {"samples"}
            if any(ways.get(each) not in (None, "enumerate", "sum") for each in above)
            else set()
        )
        found[name] = {each for each in above if each in ways} | drawn
    return found


def _lines(declaration: Declaration, side: str, name: str) -> list[Line]:
    return [line for line in declaration.lines if line.side == side and line.name == name]


def _above(declaration: Declaration, name: str) -> set[str]:
    lines = _lines(declaration, "q" if name in declaration.names("q") else "p", name)
    if any(line.family == "Exact" for line in lines):
        return blanket(declaration, name)
    return {read.name for line in lines for read in line.reads}


def nestings(declaration: Declaration, ways: Mapping[str, str], bound: str) -> list[Nesting]:
    """Return the orders that follow the rules.

    Latents with time are not part of them: all their paths are summed before.
    """
    above = dependencies(declaration, ways)
    kinds = {
        name: kind(way, bound)
        for name, way in ways.items()
        if way in ON_AXES and name not in declaration.timed
    }
    kinds["samples"] = kind("samples", bound)
    above["samples"] = set()
    allowed: dict[Nesting, int] = {}
    for order in permutations(kinds):
        pairs = [(outer, inner) for i, outer in enumerate(order) for inner in order[i + 1 :]]
        if any(inner in above[outer] for outer, inner in pairs):
            continue
        loose = sum(
            kinds[inner] == "expect" and "log" in kinds[outer] and outer not in above[inner]
            for outer, inner in pairs
        )
        allowed[tuple((kinds[name], name) for name in order)] = loose
    return [order for order, loose in allowed.items() if loose == min(allowed.values())]
