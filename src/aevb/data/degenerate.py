"""Data on which a density has no greatest value: refused before the first step, since training could only diverge."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aevb.data.sources import Source
from aevb.families import Beta, ContinuousBernoulli, LocationScale, Mixture, MultivariateNormal
from aevb.graph import Entry, Graph


def refuse_degenerate(graph: Graph, source: Source) -> None:
    """Refuse columns on which p's density of an observed variable grows without bound."""
    for name in graph.observed:
        if name in source.extents and bool((source.extents[name][0] > source.extents[name][1]).all()):
            raise ValueError(f"{name} is missing (NaN) in every row: there is nothing to learn it from. Give it values, or leave it out of p.")
        for entry in graph.p[name].values():
            trouble = _trouble(entry)
            if trouble is None or name not in source.extents:
                continue
            bad, what, why, fix = trouble
            low, high = (part.cpu() for part in source.extents[name])
            columns = (bad(low, high) & (low <= high)).nonzero()[:, 0].tolist()  # a column that is missing everywhere has low > high
            if columns:
                raise ValueError(_message(name, type(entry.spec).__name__, columns, what, why, fix, source.n, graph.size(name)))


Trouble = tuple[Callable[[Tensor, Tensor], Tensor], str, str, str]


def _trouble(entry: Entry) -> Trouble | None:
    """Which columns are degenerate under a factor (a function of their least and greatest value), in words, and the fix."""
    spec = entry.spec
    if not entry.key.parents and not spec.learned and getattr(spec, "scale", None) != "learned":
        return None  # fixed: there is nothing to grow

    def constant(low: Tensor, high: Tensor) -> Tensor:
        return low == high

    name = type(spec).__name__
    if isinstance(spec, LocationScale) and not isinstance(spec.scale, int | float):
        return constant, "constant", "whose scale is learned", f"fix the scale ({name}(…, scale=0.1))"
    if isinstance(spec, MultivariateNormal):
        return constant, "constant", "whose covariance is learned", "use Normal(…, scale=0.1)"
    if isinstance(spec, Mixture):
        return constant, "constant", "whose scales are learned", "use Normal(…, scale=0.1)"
    if isinstance(spec, Beta):
        return constant, "constant", "", "use ContinuousBernoulli"
    if isinstance(spec, ContinuousBernoulli) and not spec.clamped:
        return (lambda low, high: (high == 0) | (low == 1)), "exactly 0 (or exactly 1) in every row", "", "use Bernoulli for binary data"
    return None


def _message(name: str, family: str, columns: list[int], what: str, why: str, fix: str, n: int, d: int) -> str:
    shown = ", ".join(map(str, columns[:8])) + (", …" if len(columns) > 8 else "")
    which = f"{len(columns)} of {d} columns that are {what} (column{'s' * (len(columns) > 1)} {shown})"
    if n == 1 and len(columns) == d:
        which = "a single row, so every column is constant"
    reason = f"but p gives {name} a {family}{why and ' ' + why}: its density has no bound there, and training would only sharpen it"
    first = "Train on more rows" if n == 1 else "Drop these columns"
    return f"{name} has {which}, {reason}. {first}, dequantise them (aevb.data.dequantise), or {fix}."
