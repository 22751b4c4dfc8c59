"""Tests of the initial clusters: the partition of a graph of neighbours."""

import numpy as np
import pytest
import torch

from aevb.clustering import deskew, graph_partition, principal, spread_labels
from aevb.data.builtin import digits
from aevb.data.datasets import clustering_accuracy


def rings(n: int = 600) -> tuple[torch.Tensor, np.ndarray]:
    """Three concentric rings, which neither a mixture of Gaussians nor k-means can separate."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=n)
    angle = random.random(n) * 2 * np.pi
    radius = np.array([1.0, 3.0, 5.0])[labels] + 0.1 * random.normal(size=n)
    return torch.as_tensor(
        np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1), dtype=torch.float32
    ), labels


@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_joined_is_separated(seed):
    rows, labels = rings()
    found, cut = graph_partition(rows, 3, seed=seed)
    assert clustering_accuracy(found.numpy(), labels) == 1.0
    assert cut == pytest.approx(0, abs=1e-3)  # no edge joins two rings


def test_the_same_seed_gives_the_same_classes():
    rows, _ = rings()
    assert torch.equal(graph_partition(rows, 4, seed=3)[0], graph_partition(rows, 4, seed=3)[0])


def test_one_label_per_ring_reaches_its_whole_ring():
    rows, truth = rings()
    labels = torch.full((len(rows),), -1)
    for k in range(3):
        labels[np.flatnonzero(truth == k)[0]] = k
    found = spread_labels(rows.double(), labels, 3, neighbours=10)
    torch.testing.assert_close(found.sum(1), torch.ones_like(found[:, 0]))
    assert torch.equal(found.argmax(1), torch.as_tensor(truth))


def test_rows_that_no_label_reaches_have_no_probabilities():
    rows, truth = rings()
    labels = torch.where(torch.as_tensor(truth) == 0, 0, -1)
    found = spread_labels(rows, labels, 2)
    assert torch.equal(found.any(1), torch.as_tensor(truth) == 0)


def test_real_digits_fall_apart_without_labels():
    train, _ = digits()
    upright = deskew(torch.as_tensor(train.pixels / 16, dtype=torch.float32))
    found, _ = graph_partition(principal(upright.flatten(1), 60), 10)
    assert clustering_accuracy(found.numpy(), train.labels) > 0.8


def test_an_upright_image_is_centred_and_has_no_slant():
    y, x = np.mgrid[:29, :29] - 14.0
    slanted = np.exp(-((x - 0.5 * y - 3) ** 2) / 4 - (y - 2) ** 2 / 18)
    upright = deskew(torch.as_tensor(slanted[None]))[0].numpy()
    mass = upright.sum()
    at_x, at_y = (upright * x).sum() / mass, (upright * y).sum() / mass
    assert abs(at_x) < 0.1
    assert abs(at_y) < 0.1
    assert abs((upright * (x - at_x) * (y - at_y)).sum() / mass) < 0.15
    assert abs((slanted * (x - 4) * (y - 2)).sum() / slanted.sum()) > 3


def test_principal_components_keep_distances():
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(
        torch.cdist(principal(rows, 6), principal(rows, 6)), torch.cdist(rows, rows)
    )
    few = principal(rows, 2)
    values = torch.linalg.eigvalsh(torch.cov(rows.T))
    torch.testing.assert_close(few.var(0).sum(), values[-2:].sum())


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="8 rows are too few for 3 classes and 10 neighbours"):
        graph_partition(torch.zeros(8, 2), 3)
