"""Finite latents: the table of log p over all their joint values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from aevb.axes import expand_axis
from aevb.batch import split_latents
from aevb.estimators import Estimate
from aevb.plan import LIMIT

if TYPE_CHECKING:
    from aevb.model import Model


def why_not_finite(model: Model) -> str | None:
    """What keeps p's latents from being summed over, in words; None if nothing does."""
    graph, count = model.graph, 1
    for name in graph.latents:
        spec = graph.rule("p", name).spec
        if not spec.finite:
            return f"{name} has no finite list of values"
        if graph.timed[name]:
            return f"{name} lives in time"
        count *= spec.count(graph.size(name)) or 1
    return f"the latents have {count} joint values, more than {LIMIT}" if count > LIMIT else None


def log_joint(model: Model, batch: Mapping[str, Tensor]) -> Tensor:
    """log p(observed, latents | given) for every joint value of the latents: an axis each, in the graph's order, the examples last.

    A latent known in all rows has an axis of one; where it is known in some, −∞ stands at its other values.
    """
    graph = model.graph
    clamped, partial = split_latents(graph, batch)
    unknown = [name for name in graph.latents if name not in clamped]
    plan = model.plan(how=dict.fromkeys(unknown, "sum"), bound="iwae", clamped=clamped, partial=partial)
    table = Estimate(plan, model.factors, batch, {}).log_joint()  # type: ignore[arg-type]
    for name in unknown:
        table = expand_axis(table, plan.slots[name][0], plan.size((name, 0)))
    n = next(iter(batch.values())).shape[-2]
    table = table.squeeze(-1).expand(*table.shape[:-2], n)
    axes = {name: plan.slots[name][0] + 1 for name in unknown}
    table = table.permute(*(axes[name] for name in unknown), *range(-3, 0)) if unknown else table
    return table.reshape([1 if name in clamped else plan.size((name, 0)) for name in graph.latents] + [n])
