"""torch Datasets: large ones are indexed when needed, streams are stored once."""

import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from aevb import Model, Normal, fit
from aevb.data import torch_datasets
from aevb.data.sources import Mapped, Resident, open_source, read_arrays
from aevb.data.torch_datasets import DatasetRows

N = 200
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
X[3, 1] = np.nan
H = np.arange(N, dtype=np.float32)[:, None] / N


def model():
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z, h": Normal(3)}, {"z | x": Normal()}, given={"h": 1})


class Rows(Dataset):
    """Rows by number, with a count of how often each was read."""

    def __init__(self, read=lambda i: {"x": X[i], "h": H[i]}, n=N):
        self.read, self.n, self.counts = read, n, np.zeros(n, int)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.counts[i] += 1
        return self.read(i)


class Batches(Rows):
    def __getitems__(self, numbers):
        return [self[i] for i in numbers]


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows())


def pairs():
    return ({"x": x, "h": h} for x, h in zip(X, H, strict=True))


@pytest.fixture
def small(monkeypatch):
    """Take the data for large ones."""
    monkeypatch.setattr(torch_datasets, "LARGE", 500)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", [Rows, Batches])
def test_a_large_dataset_is_indexed_when_its_rows_are_needed(small, kind):
    m, data = model(), kind()
    found = read_arrays(data, m.graph)
    assert all(isinstance(value, DatasetRows) for value in found.values())
    assert data.counts[10:].sum() == 0  # only the first rows were read
    lazy = open_source(m.graph, data, m._parameter())
    resident = open_source(m.graph, {"x": X, "h": H}, m._parameter())
    assert isinstance(lazy, Mapped)
    before = data.counts.copy()
    rows = torch.randperm(N)[:40]
    assert same(lazy.take(rows), resident.take(rows))
    assert (data.counts - before).sum() == 40  # once for x and h together
    assert lazy.digest() == resident.digest()
    assert (data.counts - before).sum() == 40  # the check has hashed the rows


def test_a_small_dataset_is_in_memory():
    data, m = Rows(), model()
    assert isinstance(open_source(m.graph, data, m._parameter()), Resident)
    assert isinstance(open_source(m.graph, DataLoader(data), m._parameter()), Resident)


def test_a_run_on_a_large_dataset_equals_one_in_memory(small):
    runs = [model(), model()]
    for m, data in zip(runs, (Rows(), {"x": X, "h": H}), strict=True):
        fit(m, data, steps=30, batch=32, seed=1, progress=False)
    for name, value in runs[0].state_dict().items():
        assert torch.equal(value, runs[1].state_dict()[name]), name


def test_rows_that_change_or_differ_are_refused(small):
    graph, like = model().graph, model()._parameter()
    random = Rows(lambda i: {"x": X[i] + np.random.normal(), "h": H[i]})
    with pytest.raises(ValueError, match="returns another x each time row 0 is read"):
        open_source(graph, random, like)
    shapes = Rows(lambda i: {"x": X[i, : 2 if i == 150 else 3], "h": H[i]})
    with pytest.raises(ValueError, match=re.escape("Row 150 (from 0) of the Dataset has x of")):
        open_source(graph, shapes, like)
    names = Rows(lambda i: {"x": X[i]} | ({} if i == 170 else {"h": H[i]}))
    with pytest.raises(ValueError, match=re.escape("Row 170 (from 0) of the Dataset has x, row 0")):
        open_source(graph, names, like)


@pytest.mark.parametrize("large", [False, True])
def test_a_stream_is_stored_once_and_trains_as_arrays_do(tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr(torch_datasets, "LARGE", 500)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    m = model()
    source = open_source(m.graph, Stream(pairs), m._parameter())
    assert isinstance(source, Mapped if large else Resident)
    resident = open_source(m.graph, {"x": X, "h": H}, m._parameter())
    rows = torch.randperm(N)
    assert same(source.take(rows), resident.take(rows))
    assert source.digest() == resident.digest()
    loader = open_source(m.graph, DataLoader(Stream(pairs)), m._parameter())
    assert loader.n == N
    del source, loader
    gc.collect()
    assert not list(Path(tmp_path).iterdir())  # the temporary files are gone


def test_streams_that_cannot_be_stored_are_refused(small, monkeypatch):
    graph, like = model().graph, model()._parameter()
    with pytest.raises(ValueError, match="The IterableDataset has no rows"):
        open_source(graph, Stream(list), like)
    uneven = [{"x": X[i, : 2 if i == 150 else 3], "h": H[i]} for i in range(N)]
    with pytest.raises(ValueError, match=re.escape("Row 150 (from 0) of the IterableDataset has")):
        open_source(graph, Stream(lambda: uneven), like)
    monkeypatch.setattr(torch_datasets, "KEPT_FREE", 2**62)
    with pytest.raises(ValueError, match="did not end before .* was full"):
        open_source(graph, Stream(pairs), like)
    series = Model({"z[t]": Normal(2), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()})
    with pytest.raises(ValueError, match="more than 0 MiB of sequences"):
        open_source(series.graph, Stream(lambda: iter(X[:, :, None])), series._parameter())
