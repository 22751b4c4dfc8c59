"""Operators that ONNX or onnxruntime lacks, or that the usual translation computes inaccurately.

Each is written with operators that ONNX has. The loops over the entries of a matrix are unrolled,
so that a matrix of d × d needs about 5 · d operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aevb.runtime.shapes import broadcast_shapes

aten = torch.ops.aten

LARGEST = 128  # the size of a matrix above which the unrolled loops would be too long
SHIFT = 8  # Stirling's series is accurate from here on


class NotInOnnxError(ValueError):
    """An operator that ONNX lacks and that cannot be written with those it has."""


def log1p(x: Tensor) -> Tensor:
    """log(1 + x), without the rounding error of 1 + x.

    >>> x = torch.tensor([1e-12, 0.5, -0.9], dtype=torch.float64)
    >>> bool(((log1p(x) - torch.log1p(x)).abs() <= 1e-15).all())
    True
    """
    u = 1 + x
    d = u - 1
    exact = (d == 0) | (x > 1)
    factor = x / torch.where(exact, torch.ones_like(d), d)
    return torch.where(d == 0, x, torch.log(u) * torch.where(exact, torch.ones_like(d), factor))


def expm1(x: Tensor) -> Tensor:
    """exp(x) − 1, without the rounding error of exp(x) near 1.

    >>> x = torch.tensor([1e-12, 0.5, -0.9], dtype=torch.float64)
    >>> bool(((expm1(x) - torch.expm1(x)).abs() <= 1e-15).all())
    True
    """
    u = torch.exp(x)
    near = (x.abs() < 1) & (u != 1)
    ratio = (u - 1) * x / torch.where(near, torch.log(u), torch.ones_like(u))
    return torch.where(u == 1, x, torch.where(near, ratio, u - 1))


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """log(1 + exp(x)) in double precision, which onnxruntime lacks; in others, ONNX's own.

    >>> x = torch.tensor([-800.0, 0.5, 900.0], dtype=torch.float64)
    >>> torch.equal(softplus(x), torch.nn.functional.softplus(x))
    True
    """
    if x.dtype != torch.float64 or beta != 1:
        return NotImplemented
    return x.clamp_min(0) + log1p(torch.exp(-x.abs()))


def lgamma(x: Tensor) -> Tensor:
    """log Γ(x) for x ≥ 0, by Stirling's series from ``SHIFT`` on and the recursion below it.

    >>> x = torch.tensor([0.1, 1.0, 7.5, 300.0], dtype=torch.float64)
    >>> bool(((lgamma(x) - torch.lgamma(x)).abs() <= 1e-12).all())
    True
    """
    small = x < SHIFT
    y = torch.where(small, x + SHIFT, x)
    inverse = 1 / y
    s = inverse * inverse
    series = inverse * (
        1 / 12
        - s
        * (
            1 / 360
            - s * (1 / 1260 - s * (1 / 1680 - s * (1 / 1188 - s * (691 / 360360 - s / 156))))
        )
    )
    found = (y - 0.5) * torch.log(y) - y + 0.5 * math.log(2 * math.pi) + series
    below = torch.where(small, x, torch.ones_like(x))
    product = below
    for i in range(1, SHIFT):
        product = product * (below + i)
    return torch.where(small, found - torch.log(product), found)


def digamma(x: Tensor) -> Tensor:
    """The derivative of log Γ(x) for x > 0.

    >>> x = torch.tensor([0.1, 1.0, 7.5, 300.0], dtype=torch.float64)
    >>> bool(((digamma(x) - torch.digamma(x)).abs() <= 1e-12).all())
    True
    """
    small = x < SHIFT
    y = torch.where(small, x + SHIFT, x)
    inverse = 1 / y
    s = inverse * inverse
    series = s * (
        1 / 12
        - s * (1 / 120 - s * (1 / 252 - s * (1 / 240 - s * (1 / 132 - s * (691 / 32760 - s / 12)))))
    )
    found = torch.log(y) - 0.5 * inverse - series
    below = torch.where(small, x, torch.ones_like(x))
    total = 1 / below
    for i in range(1, SHIFT):
        total = total + 1 / (below + i)
    return torch.where(small, found - total, found)


def cholesky(matrix: Tensor, upper: bool = False) -> Tensor:
    """The Cholesky factor, column by column; NaN where the matrix is not positive definite.

    >>> a = torch.tensor([[4.0, 2.0], [2.0, 3.0]])
    >>> torch.allclose(cholesky(a), torch.linalg.cholesky(a))
    True
    """
    d = _size(matrix, "linalg.cholesky")
    rows = torch.arange(d, device=matrix.device)
    columns = []
    for j in range(d):
        column = matrix[..., j] / matrix[..., j, j].sqrt().unsqueeze(-1)
        column = torch.where(rows >= j, column, torch.zeros_like(column))
        columns.append(column)
        if j + 1 < d:
            matrix = matrix - column.unsqueeze(-1) * column.unsqueeze(-2)
    factor = torch.stack(columns, -1)
    return factor.mT if upper else factor


def cholesky_ex(
    matrix: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """The Cholesky factor and zeros: a failure shows as NaN."""
    factor = cholesky(matrix, upper)
    return factor, torch.zeros(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)


def solve_triangular(
    matrix: Tensor,
    value: Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Tensor:
    """The solution X of A X = B for a triangular A, row by row.

    >>> a, b = torch.tensor([[4.0, 0.0], [2.0, 3.0]]), torch.eye(2)
    >>> found = solve_triangular(a, b, upper=False)
    >>> torch.allclose(found, torch.linalg.solve_triangular(a, b, upper=False))
    True
    """
    d = _size(matrix, "linalg.solve_triangular")
    if not left:
        solved = solve_triangular(matrix.mT, value.mT, upper=not upper, unitriangular=unitriangular)
        return solved.mT
    rows: list[Any] = [None] * d
    for i in range(d - 1, -1, -1) if upper else range(d):
        row = value[..., i, :]
        row = row if unitriangular else row / matrix[..., i, i].unsqueeze(-1)
        rows[i] = row
        value = value - matrix[..., :, i].unsqueeze(-1) * row.unsqueeze(-2)
    shape = broadcast_shapes(*(row.shape for row in rows))
    return torch.stack([row.expand(shape) for row in rows], -2)


def _size(matrix: Tensor, name: str) -> int:
    d = int(matrix.shape[-1])
    if d > LARGEST:
        raise NotInOnnxError(
            f"ONNX has no operator for {name}, and a matrix of {d} × {d} is too large to write it "
            f'out (more than {LARGEST} rows). Export with format "torch".'
        )
    return d


OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.log1p.default: log1p,
    aten.expm1.default: expm1,
    aten.softplus.default: softplus,
    aten.lgamma.default: lgamma,
    aten.digamma.default: digamma,
    aten.linalg_cholesky.default: cholesky,
    aten.linalg_cholesky_ex.default: cholesky_ex,
    aten.linalg_solve_triangular.default: solve_triangular,
}
