"""Constant first-layer weights: ``linear(fixed={"z[t-1]": [[1, 1], [0, 1]]})``.

Structural time series have matrices that are part of the model, such as the transition of a level
with a slope. A declaration states them as numbers. Training leaves them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Matrix = tuple[tuple[float, ...], ...]
Fixed = tuple[tuple[str, float | Matrix], ...]  # pairs of a parent's label and its weight
SHOWN = 25  # entries of the largest matrix that a printed model shows


def read_fixed(fixed: Any) -> Fixed:
    """Return constant weights as pairs: a mapping from parents to numbers or matrices, checked.

    >>> read_fixed({"z[t-1]": [[1, 1], [0, 1]], "x": 2})
    (('z[t-1]', ((1, 1), (0, 1))), ('x', 2))
    """
    pairs = list(fixed.items()) if isinstance(fixed, Mapping) else fixed
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
        for pair in pairs
    ):
        raise ValueError(
            f"fixed is a dictionary from a parent to its weight, e.g. "
            f'fixed={{"z[t-1]": [[1, 1], [0, 1]]}}, got {_short(fixed)}.'
        )
    return tuple((label.replace(" ", ""), _weight(label, weight)) for label, weight in pairs)


def _weight(label: str, weight: Any) -> float | Matrix:
    if hasattr(weight, "tolist"):  # an array or a tensor
        weight = weight.tolist()
    if _is_number(weight):
        number: float = weight
        return number
    rows = weight if isinstance(weight, list | tuple) else ()
    if not rows or not all(isinstance(row, list | tuple) and row for row in rows):
        raise ValueError(
            f"fixed: the weight of {label} is a number or a matrix with a row per entry of the "
            f"variable and a column per entry of {label}, e.g. [[1, 1], [0, 1]]; got "
            f"{_short(weight)}."
        )
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"fixed: the rows of the weight of {label} differ in length "
            f"({', '.join(str(len(row)) for row in rows)}). Give every row the same length."
        )
    wrong = [value for row in rows for value in row if not _is_number(value)]
    if wrong:
        raise ValueError(
            f"fixed: the weight of {label} contains {wrong[0]!r}, which is not a finite number."
        )
    return tuple(tuple(row) for row in rows)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def show_fixed(fixed: Fixed) -> str:
    """Return constant weights as a dictionary; a large matrix only by its size."""

    def shown(weight: float | Matrix) -> str:
        if isinstance(weight, int | float):
            return repr(_whole(weight))
        if len(weight) * len(weight[0]) > SHOWN:
            return f"'{len(weight)}×{len(weight[0])}'"
        return repr([list(map(_whole, row)) for row in weight])

    return "{" + ", ".join(f"{label!r}: {shown(weight)}" for label, weight in fixed) + "}"


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def constant_blocks(
    fixed: Fixed, parents: Mapping[str, int], heads: Sequence[int]
) -> dict[str, Tensor]:
    """Return the constant weight blocks by parent, [sum of the heads, size of the parent], float64.

    A number w stands for w · I. A matrix with one row per entry of the variable is about the first
    head (the location); the parent's weights in all other heads are then zero, so that a scale does
    not depend on this parent.
    """
    found: dict[str, Tensor] = {}
    first, rows = heads[0], sum(heads)
    for label, weight in fixed:
        if label not in parents:
            raise ValueError(
                f"fixed names {label!r}, but the parents here are {', '.join(parents)}."
            )
        if label in found:
            raise ValueError(f"fixed names {label!r} twice. Name it once.")
        columns = parents[label]
        if isinstance(weight, int | float):
            if columns != first:
                raise ValueError(
                    f"fixed={{{label!r}: {weight}}} stands for {weight} times the identity, but "
                    f"{label} has size {columns} and the variable {first}. Give a matrix with "
                    f"{_count(first, 'row')} and {_count(columns, 'column')}."
                )
            block = weight * torch.eye(first, dtype=torch.float64)
        else:
            block = torch.tensor(weight, dtype=torch.float64)
        if block.shape[0] not in (first, rows) or block.shape[1] != columns:
            either = _count(first, "row") + (
                "" if rows == first else f" (or {rows}, for all of its parameters)"
            )
            raise ValueError(
                f"fixed gives {label} a {block.shape[0]}×{block.shape[1]} matrix; this variable "
                f"needs {either} and {_count(columns, 'column')}."
            )
        whole = torch.zeros(rows, columns, dtype=torch.float64)
        whole[: len(block)] = block
        found[label] = whole
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
