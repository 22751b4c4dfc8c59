"""Check for series far from 0 whose rule reads zeros before their first step.

An autoregression without a rule for its first step reads 0 as the values before the series. If the
mean of the series is far from 0, these steps have large residuals, which distort the coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from aevb.data.unscaled import moments
from aevb.declare.deterministic import Deterministic
from aevb.declare.families import LocationScale, MultivariateNormal
from aevb.declare.graph import Graph
from aevb.declare.networks import mlp
from aevb.declare.switching import switching

FAR = 2.0  # standard deviations between the mean and 0
SHARE = 0.05  # of the sum of squares about the mean, that the zeros may add


def note_zero_starts(graph: Graph, rows: Mapping[str, Tensor]) -> Iterator[tuple[str, str, str]]:
    """Yield a variable, a note and a remedy for each linear autoregression far from 0."""
    for name in graph.observed:
        lags = _zeros_read(graph, name)
        if name not in rows or not lags:
            continue
        found = moments(rows, name, timed=True)
        mean, sd = found.mean, found.sd
        share = ((mean / sd).square() * lags / len(rows[name])).nan_to_num(0.0, 0.0, 0.0)
        share = share * (mean.abs() > FAR * sd)
        if not bool((share > SHARE).any()):
            continue
        worst = int(share.argmax())
        yield (
            name,
            f"p reads the values of {name} before its first step as 0, but {name} has the mean "
            f"{float(mean[worst]):.4g} and the standard deviation {float(sd[worst]):.3g}. This "
            f"distorts the coefficients and the forecasts.",
            f"Train on {name} = aevb.data.standardise({name}), whose mean is 0 (on the command "
            f'line, --prepare standardise); or give the values, as zoo.ar(start="given") does.',
        )


def _zeros_read(graph: Graph, name: str) -> int:
    """Return how many steps read zeros as past values of a variable; 0 if its rule is not linear.

    A rule for the first step, of the variable or of the node that holds its past, reads none.
    """
    rules = graph.p.get(name, {})
    if "t" not in rules or "first" in rules:
        return 0
    entry = rules["t"]
    if not isinstance(entry.spec, LocationScale | MultivariateNormal) or not _affine(
        entry.spec.network
    ):
        return 0
    found = 0
    for ref in entry.key.parents:
        if ref.name == name and ref.lag < 0:
            found = max(found, 1)
        node = graph.p.get(ref.name, {})
        if ref.name not in graph.functions or "t" not in node or "first" in node:
            continue
        inner = node["t"]
        moves = isinstance(inner.spec, Deterministic) and _affine(inner.spec.network)
        if moves and any(one.name == name and one.lag < 0 for one in inner.key.parents):
            found = max(found, graph.size(ref.name) // graph.size(name))
    return found


def _affine(network: object) -> bool:
    """Return whether a network is an affine map, or one per class."""
    return (
        network is None
        or isinstance(network, switching)
        or (isinstance(network, mlp) and not network.hidden)
    )
