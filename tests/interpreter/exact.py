"""Evidence and posterior by definition: sums over finite unknowns, Gaussian integrals of others.

The logarithm of the joint density is a quadratic function of the continuous unknowns. It is
evaluated at points that determine this function exactly. The computation therefore has no filter
and no regression in common with the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .declaration import Declaration
from .families import LOG_TWO_PI
from .unroll import Node, Row, World


@dataclass(frozen=True)
class Joint:
    """log p(data, unknowns): −½ uᵀAu + bᵀu + c for each assignment of the finite unknowns."""

    world: World
    places: list[tuple[Node, int]]  # the node and index of each entry of u
    constant: Tensor  # [values…]
    linear: Tensor  # [values…, n]
    precision: Tensor  # [values…, n, n]

    def log_integral(self) -> Tensor:
        """Return log ∫ over the continuous unknowns, for each assignment of the finite ones."""
        n = len(self.places)
        if not n:
            return self.constant
        mean = torch.linalg.solve(self.precision, self.linear.unsqueeze(-1)).squeeze(-1)
        return (
            self.constant
            + 0.5 * (mean * self.linear).sum(-1)
            + 0.5 * n * LOG_TWO_PI
            - 0.5 * torch.logdet(self.precision)
        )

    def log_evidence(self) -> Tensor:
        return torch.logsumexp(self.log_integral().flatten(), 0)


def joint(declaration: Declaration, weights: Mapping[str, Tensor], row: Row) -> Joint | None:
    """Return the joint density; None if log p is not quadratic in the continuous unknowns."""
    finite = {name: "enumerate" for name in declaration.latents if declaration.finite(name)}
    free = [name for name in declaration.latents if name not in finite]
    blank = World(declaration, weights, row, ways=finite)
    places = [
        (node, i)
        for name in free
        for node in blank.nodes(name)
        if not row.known(node)
        for i in range(declaration.sizes[name])
    ]
    n = len(places)
    probe = (
        torch.linspace(-1.3, 1.7, n, dtype=torch.float64)
        if n
        else torch.zeros(0, dtype=torch.float64)
    )
    eye = torch.eye(n, dtype=torch.float64)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    points = torch.stack(
        [
            torch.zeros(n, dtype=torch.float64),
            *eye,
            *-eye,
            *(eye[i] + eye[j] for i, j in pairs),
            probe,
        ]
    )
    fixed = {}
    for name in free:
        steps = blank.nodes(name)
        value = torch.zeros(len(points), len(steps), declaration.sizes[name], dtype=torch.float64)
        for t, node in enumerate(steps):
            if row.known(node):
                value[:, t] = row.data[name] if node[1] is None else row.data[name][node[1]]
        for position, (node, i) in enumerate(places):
            if node[0] == name:
                value[:, node[1] or 0, i] = points[:, position]
        fixed[name] = value if name in declaration.timed else value[:, 0]
    world = World(declaration, weights, row, ways=finite, fixed=fixed)
    names = [name for name in declaration.names("p") if declaration.stochastic(name)]
    if any(
        world.line("p", node).family not in ("Normal", "MultivariateNormal")
        for node in {node for node, _ in places}
    ):
        return None
    log_p = sum(world.log_p(node) for name in names for node in world.nodes(name))
    shape = [len(points), *(world.value(axis).shape[i] for i, axis in enumerate(world.axes) if i)]  # type: ignore[arg-type]
    f = log_p.expand(shape).movedim(0, -1)
    c, plus, minus, mixed = (
        f[..., 0],
        f[..., 1 : n + 1],
        f[..., n + 1 : 2 * n + 1],
        f[..., 2 * n + 1 : -1],
    )
    linear = (plus - minus) / 2
    rows = [[torch.zeros_like(c)] * n for _ in range(n)]
    for i in range(n):
        rows[i][i] = -(plus[..., i] + minus[..., i] - 2 * c)
    for position, (i, j) in enumerate(pairs):
        rows[i][j] = rows[j][i] = -(mixed[..., position] - plus[..., i] - plus[..., j] + c)
    precision = (
        torch.stack([torch.stack(each, -1) for each in rows], -2)
        if n
        else torch.zeros(*c.shape, 0, 0, dtype=torch.float64)
    )
    guess = c + linear @ probe - 0.5 * (precision @ probe) @ probe if n else c
    if not torch.allclose(guess, f[..., -1], rtol=1e-8, atol=1e-8):
        return None
    return Joint(world, places, c, linear, precision)
