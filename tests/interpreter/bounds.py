"""Bounds and their gradients by definition, for one row.

A bound is the integrand Σ log p + Σ latent terms on the axes of all unknowns, reduced axis by axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .declaration import Declaration
from .unroll import ON_AXES, Finite, Node, Row, World


@dataclass(frozen=True)
class Recipe:
    """How to estimate a bound: ways and terms of the latents, the nesting, samples, weights.

    The nesting starts with the outermost sum.
    """

    ways: Mapping[str, str]
    terms: Mapping[str, str]
    nesting: tuple[tuple[str, str], ...]
    bound: str = "elbo"
    samples: int = 1
    gradient: str = "plain"
    beta: float = 1.0
    temperature: float = 0.5


def integrand(world: World, recipe: Recipe, frozen: World | None = None) -> Tensor:
    """Return Σ log p of known variables + β Σ terms of the latents, on all axes.

    ``frozen`` gives log q with its parameters held fixed.
    """
    declaration, total = world.declaration, torch.zeros([1] * len(world.axes), dtype=torch.float64)
    for name in declaration.names("p"):
        if not declaration.stochastic(name):
            continue
        for node in world.nodes(name):
            if name in declaration.observed or world.row.known(node):
                total = total + world.log_p(node)
            else:
                total = total + recipe.beta * latent_term(world, node, recipe, frozen)
    return total


def latent_term(world: World, node: Node, recipe: Recipe, frozen: World | None) -> Tensor:
    """Return E[log p − log q] of one unknown, computed as the recipe says."""
    way, term = recipe.ways[node[0]], recipe.terms[node[0]]
    if term == "closed":
        return -world.density("q", node).kl(world.density("p", node))
    if term == "entropy":
        return world.log_p(node) + world.density("q", node).entropy()
    if term == "relaxed":
        q, p = world.density("q", node), world.density("p", node)
        assert isinstance(q, Finite)
        assert isinstance(p, Finite)
        coordinate = q.relax(world._noise(node), world.temperature)
        return p.relaxed_log_prob(coordinate, world.temperature) - q.relaxed_log_prob(
            coordinate, world.temperature
        )
    if way == "sum":
        return world.log_p(node)
    return world.log_p(node) - (frozen if frozen and way == "pathwise" else world).log_q(node)


def over_paths(world: World, total: Tensor) -> Tensor:
    """Return the expectation over all paths of the latents enumerated at every step."""
    paths = [axis for axis in world.axes if isinstance(axis, tuple) and axis[1] is not None]
    if not paths:
        return total
    weight = sum(world.log_weight(axis) for axis in paths).exp()  # type: ignore[union-attr]
    return (weight * total).sum([world.axes.index(axis) for axis in paths], keepdim=True)


def reduce(world: World, total: Tensor, steps: list[tuple[str, str]]) -> Tensor:
    """Take the reductions, innermost first."""
    for kind, name in steps:
        if name == "samples":
            count = total.shape[0]
            total = (
                total.mean(0, keepdim=True)
                if kind == "mean"
                else torch.logsumexp(total, 0, keepdim=True) - math.log(count)
            )
            continue
        node = (name, None)
        if node not in world.axes:  # it is known in this row
            continue
        axis = world.axes.index(node)
        if kind == "expect":
            total = (world.log_weight(node).exp() * total).sum(axis, keepdim=True)
        else:
            count = world.value(node).shape[axis]
            inside = total + (world.log_weight(node) if kind == "log expect exp" else 0.0)
            shape = list(inside.shape)
            shape[axis] = count
            total = torch.logsumexp(inside.expand(shape), axis, keepdim=True)
    return total


def bound(
    declaration: Declaration,
    weights: Mapping[str, Tensor],
    row: Row,
    noise: Mapping[str, Tensor],
    recipe: Recipe,
) -> Tensor:
    """Return the estimate for one row; its gradient is the one of the recipe."""
    settings = {"ways": recipe.ways, "noise": noise, "temperature": recipe.temperature}
    world = World(declaration, weights, row, **settings)
    steps = list(reversed(recipe.nesting))
    names = [name for _, name in steps]
    cut = names.index("samples") if "samples" in names else len(names)
    if recipe.gradient == "dreg":
        return _doubly_reparametrised(world, recipe, steps, cut).reshape(())
    frozen = (
        _with_values(world, {key: value.detach() for key, value in weights.items()}, detach=False)
        if recipe.gradient == "stl"
        else None
    )
    inside = reduce(world, over_paths(world, integrand(world, recipe, frozen)), steps[:cut])
    value = reduce(world, inside, steps[cut:])
    scored = [name for name, way in recipe.ways.items() if way == "score"]
    if scored:
        surrogate = _score(world, recipe, inside, scored)
        held = [(kind, name) for kind, name in steps[cut + 1 :]]
        surrogate = reduce(
            _with_values(world, {key: each.detach() for key, each in weights.items()}, detach=True),
            surrogate,
            held,
        )
        value = value + (surrogate - surrogate.detach())
    return value.reshape(())


def expected_bound(
    declaration: Declaration,
    weights: Mapping[str, Tensor],
    row: Row,
    noise: Mapping[str, Tensor],
    node_weights: Tensor,
    recipe: Recipe,
) -> Tensor:
    """Return the bound as a weighted sum over nodes of the noise, without closed forms.

    log p − log q of every latent is taken at its value. Each sample of iwae has its own nodes, so
    the weighted sum is over all tuples of nodes.
    """
    world, open_recipe = _on_nodes(declaration, weights, row, noise, recipe)
    steps = list(reversed(recipe.nesting))
    names = [name for _, name in steps]
    cut = names.index("samples") if "samples" in names else len(names)
    inside = reduce(world, over_paths(world, integrand(world, open_recipe)), steps[:cut])
    inside = inside.expand(len(node_weights), *inside.shape[1:])
    value, weight = inside, node_weights
    if recipe.bound == "iwae":
        for _ in range(recipe.samples - 1):
            value = torch.logaddexp(value.unsqueeze(1), inside.unsqueeze(0)).flatten(0, 1)
            weight = (weight.unsqueeze(1) * node_weights).flatten()
        value = value - math.log(recipe.samples)
    for _, name in steps[cut + 1 :]:
        assert (name, None) not in world.axes or world.log_weight((name, None)).shape[0] == 1, (
            f"{name} depends on samples"
        )
    return (weight * reduce(world, value, steps[cut + 1 :]).reshape(len(weight))).sum()


def evidence_on_nodes(
    declaration: Declaration,
    weights: Mapping[str, Tensor],
    row: Row,
    noise: Mapping[str, Tensor],
    node_weights: Tensor,
    recipe: Recipe,
) -> Tensor:
    """Return the log of the mean of p/q over nodes of the noise and all enumerated values.

    By Jensen's inequality it is above every bound on these nodes.
    """
    world, open_recipe = _on_nodes(declaration, weights, row, noise, recipe)
    total = integrand(world, open_recipe) + world.on_axis(
        node_weights.log().unsqueeze(-1), "samples"
    ).squeeze(-1)
    for axis in world.axes[1:]:
        assert isinstance(axis, tuple)
        count = world.value(axis).shape[world.axes.index(axis)]
        per_value = world.on_axis(torch.zeros(count, 1, dtype=torch.float64), axis).squeeze(-1)
        total = total + (per_value if recipe.ways[axis[0]] == "sum" else world.log_weight(axis))
    return torch.logsumexp(total.flatten(), 0)


def _on_nodes(
    declaration: Declaration,
    weights: Mapping[str, Tensor],
    row: Row,
    noise: Mapping[str, Tensor],
    recipe: Recipe,
) -> tuple[World, Recipe]:
    """Return a world with all nodes of the noise as samples, and a recipe without closed forms."""
    sampled = {name: "summed" if way in ON_AXES else "sampled" for name, way in recipe.ways.items()}
    world = World(
        declaration, weights, row, ways=recipe.ways, noise=noise, temperature=recipe.temperature
    )
    return world, replace(recipe, terms=sampled, gradient="plain")


def _with_values(world: World, weights: Mapping[str, Tensor], *, detach: bool) -> World:
    """Return a world with the same draws under other weights."""
    other = World(
        world.declaration,
        weights,
        world.row,
        ways=world.ways,
        noise=world.noise,
        fixed=world.fixed,
        temperature=world.temperature,
    )
    for name in world.declaration.latents:
        for node in world.nodes(name):
            value = world.value(node)
            other._values[node] = value.detach() if detach else value
    return other


def _score(world: World, recipe: Recipe, inside: Tensor, names: list[str]) -> Tensor:
    """Return the surrogate of the score function, with a leave-one-out baseline.

    Under iwae, the geometric mean of the other samples replaces each sample.
    """
    nodes = [node for name in names for node in world.nodes(name) if not world.row.known(node)]
    if not nodes:
        return torch.zeros([1] * len(world.axes), dtype=torch.float64)
    log_q = sum(world.log_q(node) for node in nodes)
    # A sample has one draw for each value on these axes.
    inner = [axis for axis in range(1, len(world.axes)) if inside.shape[axis] == 1]
    log_q = log_q.sum(inner, keepdim=True) if inner else log_q
    k = recipe.samples
    f = inside.detach().expand(k, *inside.shape[1:])
    total = torch.zeros_like(f[:1])
    for s in range(k):
        others = torch.cat([f[:s], f[s + 1 :]]).mean(0, keepdim=True)
        if recipe.bound == "elbo":
            total = total + (f[s : s + 1] - others) * log_q[s : s + 1] / k
        else:
            without = torch.logsumexp(torch.cat([f[:s], others, f[s + 1 :]]), 0, keepdim=True)
            total = total + (torch.logsumexp(f, 0, keepdim=True) - without) * log_q[s : s + 1]
    return total


def _doubly_reparametrised(
    world: World, recipe: Recipe, steps: list[tuple[str, str]], cut: int
) -> Tensor:
    """Return a bound whose gradient is the doubly reparametrised one.

    The gradient along the samples has the weights (1 − β) w + β w², everything else the normalised
    weights w.
    """
    held = {key: value.detach() for key, value in world.weights.items()}
    live, fixed = (
        _with_values(world, world.weights, detach=True),
        _with_values(world, held, detach=True),
    )
    along = _with_values(world, held, detach=False)
    value = reduce(live, over_paths(live, integrand(live, recipe, fixed)), steps[:cut])
    path = reduce(along, over_paths(along, integrand(along, recipe)), steps[:cut])
    w = path.detach().expand(recipe.samples, *path.shape[1:]).softmax(0)
    share = (1 - recipe.beta) * w + recipe.beta * w**2
    surrogate = (share * (path - path.detach())).sum(0, keepdim=True)
    return reduce(live, value, steps[cut:]) + reduce(fixed, surrogate, steps[cut + 1 :])
