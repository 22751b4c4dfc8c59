"""Group the rows whose missing entries are the same, so that they share one factorised covariance.

A variable with a full covariance needs the Cholesky factor of the covariance of its known entries,
for every cluster and every pattern of missing entries. Rows with the same pattern share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from aevb.estimate.keys import mask_of
from aevb.evidence.memory_limit import narrow
from aevb.evidence.structure import Structure

FEW = 8  # rows of a pattern below which each row has covariances of its own


def parts(
    structure: Structure, batch: Mapping[str, Tensor], rows: int, at_once: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the numbers of some rows, and the batch of these rows.

    A part has at most ``rows`` rows, and fewer if they have covariances of their own with more than
    ``at_once`` entries in all. In the batch of rows with one pattern, the masks of their variables
    with a full covariance have one row, which stands for all. Rows are grouped on a CPU and without
    gradients: a training step is recorded or captured, and must not depend on the data.
    """
    like, names = next(iter(batch.values())), _with_covariance(structure, batch)
    n = like.shape[-2]
    numbers = structure.count * max((structure.graph.size(name) for name in names), default=0) ** 2
    fewer = max(1, min(rows, at_once // max(1, numbers)))
    if not names or torch.is_grad_enabled() or like.device.type != "cpu":
        for start in range(0, n, fewer):
            count = min(fewer, n - start)
            yield (
                torch.arange(start, start + count, device=like.device),
                narrow(batch, start, count),
            )
        return
    masks = torch.cat([batch[mask_of(name)][0] for name in names], -1)
    sizes, rest = [structure.graph.size(name) for name in names], []
    for index in _groups(masks):
        if len(index) < FEW:
            rest.append(index)
            continue
        pattern = masks[index[0]]
        own = dict(
            zip(map(mask_of, names), pattern.reshape(1, 1, -1).split(sizes, -1), strict=True)
        )
        for some in index.split(rows):
            yield some, _rows(batch, some) | own
    if rest:
        for some in torch.cat(rest).sort().values.split(fewer):
            yield some, _rows(batch, some)


def _groups(masks: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of the rows that have the same mask, for every mask."""
    width = masks.shape[1]
    if width <= 62:  # sorting whole numbers is faster than sorting rows
        masks = masks.long() @ 2 ** torch.arange(width)
    _, which, counts = masks.unique(dim=0, return_inverse=True, return_counts=True)
    return which.argsort(stable=True).split(counts.tolist())


def _with_covariance(structure: Structure, batch: Mapping[str, Tensor]) -> list[str]:
    """Variables with missing entries and a full covariance that reads no Gaussian unknown."""
    graph = structure.graph
    return [
        name
        for name in graph.observed
        if mask_of(name) in batch
        and not graph.timed[name]
        and name not in structure.linked
        and graph.rule("p", name).spec.full_moments
    ]


def _rows(batch: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {name: value.index_select(-2, index) for name, value in batch.items()}
