"""Sentences on the units of densities and statistics, if the preparation changed the units."""

from __future__ import annotations

from aevb.data.datasets import Recipe, log_spreads
from aevb.declare.graph import Graph


def densities_note(recipe: Recipe, graph: Graph) -> str:
    """Say in which units bounds and log p of the model are, and what to add for those of the data.

    The sentence is empty if they are in the units of the data already.
    """
    spreads = log_spreads(recipe, graph)
    if not spreads:
        return ""
    terms = [
        f"{-spread.sum():.3f} nats per "
        f"{'step' if graph.timed[name] and spread.ndim == 1 else 'row'} ({name}, no cell missing)"
        for name, spread in spreads.items()
    ]
    return (
        f"Bounds and log p are of {as_prepared(recipe, list(spreads))}. For the units of the data "
        f"add {' and '.join(terms)}."
    )


def statistics_note(recipe: Recipe, graph: Graph) -> str:
    """Say in which units statistics of observed variables are; empty for those of the data."""
    names = list(log_spreads(recipe, graph))
    if not names:
        return ""
    return f"Statistics are of {as_prepared(recipe, names)}, not in the units of the data."


def as_prepared(recipe: Recipe, names: list[str]) -> str:
    """Name the variables in the units that the model reads."""
    x = ", ".join(names)
    return (
        f"standardised {x}"
        if recipe.prepare == "standardise"
        else f"{x} with grey levels from 0 to 1 ({recipe.prepare})"
    )
