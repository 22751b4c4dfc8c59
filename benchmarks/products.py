"""The lower limit: only the matrix products of a step, forward and backward, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from lean import replayed
from problems import BATCH, Contender, Problem

from aevb.compiled_step.gradients import _product


@dataclass(frozen=True)
class Product:
    """x Wᵀ with x [rows, inputs]; ``back`` means that the gradient of x is needed.

    For ``times`` such products in a loop, the gradient of W is one product.
    """

    rows: int
    inputs: int
    outputs: int
    back: bool = True
    times: int = 1


def products(problem: Problem) -> list[Product]:
    """Return the products of a step.

    Each parent of a first layer is multiplied once. A one-hot parent selects a column, without a
    product.
    """
    s, sizes = problem.sizes, problem.networks()

    def layers(name: str, rows: int, first: int = 0, times: int = 1) -> list[Product]:
        return [Product(rows, a, b, times=times) for a, b in list(pairwise(sizes[name]))[first:]]

    if problem.model == "gmvae":
        on_x = [Product(BATCH, s.x, s.hidden[0], back=False) for _ in ("to_y", "encoder")]
        each_class = layers("encoder", s.classes * BATCH, 1) + layers("decoder", s.classes * BATCH)
        return on_x + layers("to_y", BATCH, 1) + each_class
    if problem.model == "vrnn":
        everywhere = s.steps * BATCH
        on_x = [Product(everywhere, s.x, outputs, back=False) for outputs in (4 * s.h, s.hidden[0])]
        on_h = [Product(BATCH, s.h, s.hidden[0], times=s.steps)]
        cells = [
            Product(BATCH, inputs, 4 * s.h, times=s.steps - 1) for inputs in (s.z, s.h, s.h, s.h)
        ]
        return (
            on_x
            + on_h
            + cells
            + layers("encoder", BATCH, 1, s.steps)
            + layers("prior", everywhere)
            + layers("decoder", everywhere)
        )
    return [
        Product(BATCH, s.x, s.hidden[0], back=False),
        *layers("encoder", BATCH, 1),
        *layers("decoder", BATCH),
    ]


def floor(problem: Problem) -> Contender:
    """Return the products with the fastest routine on this device, on a GPU as a graph."""
    work = []
    for product in products(problem):
        x, w, g = (torch.randn(shape, device=problem.device) for shape in _shapes(product))
        work.append((product, x, w, w.T.contiguous(), g, g.T.contiguous()))

    def step() -> None:
        with torch.no_grad():
            for product, x, w, transposed, g, upright in work:
                for _ in range(product.times):
                    _product(x[: product.rows], w)
                    if product.back:
                        _product(g[: product.rows], transposed)
                _product(upright, x.T) if problem.device == "cpu" else torch.mm(g.T, x)

    return Contender(replayed(step) if problem.device == "cuda" else step, bound=None)


def _shapes(product: Product) -> tuple[tuple[int, int], ...]:
    rows = product.rows * product.times
    return (rows, product.inputs), (product.outputs, product.inputs), (rows, product.outputs)
