"""q's marginals by definition: sums over all finite ancestors of a latent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .declaration import Declaration
from .unroll import Node, Row, World


def ancestors(world: World, node: Node) -> set[Node]:
    """Return the unknown latents that a node's factor of q depends on.

    They include those behind deterministic nodes.
    """
    found: set[Node] = set()
    frontier = [node]
    while frontier:
        current = frontier.pop()
        side = "q" if current[0] in world.declaration.latents else world.owner(current[0])
        for read in world.line(side, current).reads:
            above = world.parent(read, current)
            if (
                above is None
                or above in found
                or above[0] in world.declaration.given
                or above[0] in world.declaration.observed
            ):
                continue
            if above[0] in world.declaration.latents and world.row.known(above):
                continue
            found.add(above)
            frontier.append(above)
    return {each for each in found if each[0] in world.declaration.latents}


def marginal(
    declaration: Declaration, weights: Mapping[str, Tensor], row: Row, node: Node, values: Tensor
) -> Tensor | None:
    """Return log q of each of these values ([V, d]) of one latent at one step.

    None if the latent depends on a continuous latent.
    """
    finite = {name: "enumerate" for name in declaration.latents if declaration.finite(name)}
    blank = World(declaration, weights, row, ways=finite)
    above = ancestors(blank, node)
    if any(name not in finite for name, _ in above):
        return None
    world = World(declaration, weights, row, ways=finite)
    exact = world.line("q", node).family == "Exact"
    if not exact:
        world._values[node] = world.on_axis(values, "samples")
    log_q = world.log_q(node)
    axes = [world.axes.index(each) for each in above]
    total = sum((world.log_weight(each) for each in above), log_q)
    total = torch.logsumexp(total, axes, keepdim=True) if axes else total
    if exact:  # Bayes' rule: one number for each of its own values
        total = total.movedim(world.axes.index(node), 0)
    return total.expand(len(values), *total.shape[1:]).reshape(len(values), -1)[:, 0]
