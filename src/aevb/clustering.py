"""Initial classes of a mixture without labels, by spectral clustering of the neighbour graph.

A mixture trained from random weights decides in its first epochs which rows form a class, and the
result depends on the initial weights. Classes from the graph of nearest neighbours are more
reliable and need no training. This module computes a partition of that graph with a small
normalised cut, from its leading eigenvectors. The model then starts from these classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["deskew", "graph_partition", "principal", "spread_labels"]

CHUNK = 2000  # compute the distances of this many rows to all others at a time, to limit memory


def deskew(images: Tensor) -> Tensor:
    """Centre images on their mass, and shear each until its second moment xy is 0.

    Arguments:
        images: Grey levels [N, height, width]; 0 is background.

    Returns:
        The upright images, in the same shape.

    >>> slanted = torch.eye(8)[None]
    >>> upright = deskew(slanted)[0]
    >>> int((upright.sum(0) > 0.5).sum())
    2
    """
    n, height, width = images.shape
    y = torch.arange(height, device=images.device, dtype=images.dtype) - (height - 1) / 2
    x = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2
    mass = images.sum((1, 2)).clamp_min(1e-6)
    at_x, at_y = (images.sum(1) * x).sum(1) / mass, (images.sum(2) * y).sum(1) / mass
    from_y, from_x = y[None, :, None] - at_y[:, None, None], x[None, None, :] - at_x[:, None, None]
    shear = (images * from_y * from_x).sum((1, 2)) / (images * from_y.square()).sum(
        (1, 2)
    ).clamp_min(1e-6)
    maps = torch.zeros(n, 2, 3, device=images.device, dtype=images.dtype)
    maps[:, 0, 0] = maps[:, 1, 1] = 1
    maps[:, 0, 1] = shear * height / width
    maps[:, 0, 2], maps[:, 1, 2] = 2 * at_x / width, 2 * at_y / height
    grid = F.affine_grid(maps, [n, 1, height, width], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def principal(rows: Tensor, components: int) -> Tensor:
    """Project rows onto their leading principal components.

    Arguments:
        rows: The rows [N, d].
        components: Number of components; at most d are used.

    Returns:
        The projections [N, components] of the centred rows. The last column has the largest
        variance.

    >>> rows = torch.tensor([[0.0, 0.0], [1.0, 3.0], [2.0, 6.0]])
    >>> principal(rows, 1).abs()[:, 0].round(decimals=3)
    tensor([3.1620, 0.0000, 3.1620])
    """
    centred = rows - rows.mean(0)
    vectors = torch.linalg.eigh((centred.T @ centred).double())[1]
    return centred @ vectors[:, -min(components, rows.shape[1]) :].to(rows.dtype)


def graph_partition(
    rows: Tensor, classes: int, *, neighbours: int = 10, restarts: int = 3, seed: int = 0
) -> tuple[Tensor, float]:
    """Partition rows by a small normalised cut of their graph of nearest neighbours.

    The graph joins each row with its nearest neighbours, with weights exp(−d²/σᵢσⱼ), where σ is a
    local scale of each row. k-means clusters the leading eigenvectors of the graph, for several
    numbers of eigenvectors and several restarts. The partition with the smallest cut is kept.

    Arguments:
        rows: The rows [N, d].
        classes: Number of classes.
        neighbours: Number of neighbours of a row in the graph.
        restarts: Number of starts of k-means for each number of eigenvectors.
        seed: Decides the starts.

    Returns:
        The class of each row [N], and the normalised cut of the partition.

    >>> rows = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> rows[30:] += 20
    >>> classes, cut = graph_partition(rows, 2)
    >>> classes[:30].unique().numel(), classes[30:].unique().numel(), abs(round(cut, 3))
    (1, 1, 0.0)
    """
    if len(rows) <= max(classes, neighbours):
        raise ValueError(
            f"{len(rows)} rows are too few for {classes} classes and {neighbours} neighbours."
        )
    # torch warns unless this is set explicitly.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return _least_cut(rows, classes, neighbours, restarts, torch.Generator().manual_seed(seed))


def spread_labels(
    rows: Tensor,
    labels: Tensor,
    classes: int,
    *,
    neighbours: int = 5,
    known_share: float = 0.05,
    rounds: int = 200,
) -> Tensor:
    """Spread the labels of some rows over the graph of :func:`graph_partition`.

    In each round, a row's scores become the weighted mean of its neighbours' scores, with a share
    for its own label. The labels of each class have the same total weight.

    Arguments:
        rows: The rows [N, d].
        labels: Class numbers [N], −1 where unknown.
        classes: Number of classes.
        neighbours: Number of neighbours of a row in the graph.
        known_share: The share of a row's own label in each round.
        rounds: Number of rounds.

    Returns:
        The probability of every class [N, classes]. A row that no known label reaches has zeros.

    >>> rows = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> rows[30:] += 20
    >>> labels = torch.full((60,), -1)
    >>> labels[0], labels[59] = 0, 1
    >>> found = spread_labels(rows, labels, 2).argmax(1)
    >>> found[:30].unique().tolist(), found[30:].unique().tolist()
    ([0], [1])
    """
    with torch.sparse.check_sparse_tensor_invariants(False):
        normal = _normalised(*_graph_and_degree(rows, min(neighbours, len(rows) - 1)))
        known = labels >= 0
        start = torch.zeros(len(rows), classes, dtype=rows.dtype, device=rows.device)
        start[known, labels[known]] = 1.0
        start = start / start.sum(0).clamp_min(1.0)
        scores = start
        for _ in range(rounds):
            scores = (1 - known_share) * (normal @ scores) + known_share * start
    total = scores.sum(1, keepdim=True)
    return torch.where(total > 0, scores / total.clamp_min(torch.finfo(rows.dtype).tiny), 0.0)


def _least_cut(
    rows: Tensor, classes: int, neighbours: int, restarts: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    graph, degree = _graph_and_degree(rows, neighbours)
    vectors = _leading(graph, degree, 2 * classes, generator)
    best: tuple[float, Tensor] | None = None
    for count in range(classes, 2 * classes + 1, max(1, classes // 5)):
        embedded = F.normalize(vectors[:, :count], dim=1)
        for _ in range(restarts):
            labels = _k_means(embedded, classes, generator)
            cut = _cut(graph, degree, labels, classes)
            if best is None or cut < best[0]:
                best = cut, labels
    assert best is not None
    return best[1], best[0]


def _graph(rows: Tensor, neighbours: int) -> Tensor:
    """The symmetric sparse matrix of weights between neighbours."""
    n, squares = len(rows), rows.square().sum(1)
    distances, others = [], []
    for start in range(0, n, CHUNK):
        part = (
            squares[start : start + CHUNK, None]
            + squares
            - 2 * rows[start : start + CHUNK] @ rows.T
        )
        here = torch.arange(len(part), device=rows.device)
        part[here, here + start] = torch.inf
        found = part.topk(neighbours, largest=False)
        distances.append(found.values.clamp_min(0).sqrt())
        others.append(found.indices)
    distance, other = torch.cat(distances), torch.cat(others)
    scale = distance[:, min(6, neighbours - 1)].clamp_min(1e-12)
    weight = (torch.exp(-distance.square() / (scale[:, None] * scale[other])) / 2).reshape(-1)
    row, column = (
        torch.arange(n, device=rows.device).repeat_interleave(neighbours),
        other.reshape(-1),
    )
    places = torch.stack([torch.cat([row, column]), torch.cat([column, row])])
    return torch.sparse_coo_tensor(places, torch.cat([weight, weight]), (n, n)).coalesce()


def _graph_and_degree(rows: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    graph = _graph(rows, neighbours)
    return graph, (graph @ torch.ones(len(rows), 1, device=rows.device, dtype=rows.dtype))[:, 0]


def _normalised(graph: Tensor, degree: Tensor) -> Tensor:
    """The graph with each weight divided by the square roots of its two rows' degrees."""
    scale, places = degree.clamp_min(1e-12).rsqrt(), graph.indices()
    values = graph.values() * scale[places[0]] * scale[places[1]]
    return torch.sparse_coo_tensor(places, values, graph.shape).coalesce()


def _leading(
    graph: Tensor, degree: Tensor, count: int, generator: torch.Generator, rounds: int = 400
) -> Tensor:
    """Compute the leading eigenvectors of the normalised graph by subspace iteration.

    The subspace has twice as many vectors.
    """
    normal = _normalised(graph, degree)
    space = torch.randn(
        graph.shape[0], min(2 * count, graph.shape[0]), generator=generator, dtype=degree.dtype
    ).to(degree.device)
    for step in range(rounds):
        if step % 10 == 0:
            space = torch.linalg.qr(space)[0]
        # This maps the eigenvalues to [0, 1], so that the leading ones are the largest in
        # magnitude.
        space = (space + normal @ space) / 2
    space = torch.linalg.qr(space)[0]
    rotation = torch.linalg.eigh(space.T @ (normal @ space))[1]
    return (space @ rotation).flip(1)[:, :count]


def _k_means(rows: Tensor, classes: int, generator: torch.Generator, rounds: int = 60) -> Tensor:
    """Lloyd's algorithm, started from greedy k-means++.

    In the greedy version, each centre is the best of a few candidates.
    """
    centres = rows[torch.randint(len(rows), (1,), generator=generator)]
    for _ in range(classes - 1):
        near = torch.cdist(rows, centres).amin(1).square()
        chosen = torch.multinomial((near / near.sum()).cpu().double(), 6, generator=generator).to(
            rows.device
        )
        left = torch.minimum(near[:, None], torch.cdist(rows, rows[chosen]).square()).sum(0)
        centres = torch.cat([centres, rows[chosen[left.argmin()]][None]])
    for _ in range(rounds):
        members = F.one_hot(torch.cdist(rows, centres).argmin(1), classes).to(rows.dtype)
        centres = (members.T @ rows) / members.sum(0).clamp_min(1)[:, None]
    return torch.cdist(rows, centres).argmin(1)


def _cut(graph: Tensor, degree: Tensor, labels: Tensor, classes: int) -> float:
    """Compute the normalised cut.

    It is the sum over classes of the share of a class's edge weight that leaves the class.
    """
    members = F.one_hot(labels, classes).to(degree.dtype)
    inside = (members * (graph @ members)).sum(0) / (members.T @ degree).clamp_min(1e-12)
    return float((1 - inside).sum())
