"""Names in the noise of an estimate, besides the latents' own (``Plan.noise_keys``)."""

from __future__ import annotations

from aevb.declare.graph import Entry

RESAMPLING = "uniforms of resampling"  # no variable can have such a name


def dropout_name(entry: Entry, layer: int) -> str:
    """Return the name of the dropout mask of a layer of a factor's network."""
    return f"{entry.id} dropout {layer}"


def own_draws_name(entry: Entry) -> str:
    """Return the name of the seed of what a network of the user draws itself in training."""
    return f"{entry.id} own draws"


def offset_name(entry: Entry) -> str:
    """Return the name of the offset of a factor whose parameters are free for every example."""
    return f"{entry.id} offset"
