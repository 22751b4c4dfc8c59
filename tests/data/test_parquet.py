"""Large Parquet files: read by row groups, in an order of (seed, step), and resumed exactly."""

import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from aevb import Model, Normal, OneHot, fit
from aevb.data import lazy_rows, read_frame, standardise
from aevb.data import parquet as rows_of_parquet
from aevb.data.datasets import load
from aevb.data.files import read_file
from aevb.data.parquet import ParquetRows
from aevb.data.sources import Mapped, Resident, open_source
from aevb.training import loop
from aevb.training.row_order import Order

N, COLUMNS = 1000, ("x0", "x1", "x2")


def model_of(*, labels=False):
    torch.manual_seed(0)
    p = {"z": Normal(2), "x | z": Normal(3)} | ({"y | z": OneHot(3)} if labels else {})
    return Model(p, {"z | x": Normal()})


@pytest.fixture
def folder(tmp_path):
    """Three files of 1000 rows in all, in row groups of 64 rows; some cells are missing."""
    random = np.random.default_rng(0)
    x = random.normal(size=(N, 3))
    x[random.random(x.shape) < 0.1] = np.nan
    y = random.integers(0, 3, N)
    for i, part in enumerate(np.array_split(np.arange(N), [300, 420])):
        columns = {name: pa.array(x[part, j], from_pandas=True) for j, name in enumerate(COLUMNS)}
        parquet.write_table(
            pa.table(columns | {"y": y[part]}), tmp_path / f"part-{i}.parquet", row_group_size=64
        )
    return tmp_path, x, y


@pytest.fixture
def small(monkeypatch):
    """Take the files for large ones, and keep at most 300 rows of x and y in memory."""
    for module in (lazy_rows, rows_of_parquet):
        monkeypatch.setattr(module, "LARGE", 300 * (3 + 1) * 8)


def test_rows_of_a_folder_are_read_when_indexed(folder, small):
    path, x, y = folder
    found = read_file(path, model_of(labels=True).graph)
    assert isinstance(found["x"], ParquetRows)
    assert (found["x"].shape, found["y"].shape) == ((N, 3), (N,))
    index = np.random.default_rng(1).integers(0, N, 50)
    for rows in (slice(290, 310), index, np.arange(N) % 7 == 0, slice(None)):
        assert np.array_equal(found["x"][rows], x[rows], equal_nan=True)
        assert np.array_equal(found["y"][rows], y[rows])
    assert np.array_equal(found["x"][-1], x[-1], equal_nan=True)
    assert np.array_equal(found["x"][:, [2, 0]][5:9], x[5:9, [2, 0]], equal_nan=True)
    held = sum(value.nbytes for value in found["x"].groups.cache.values())
    assert 0 < held <= 300 * 4 * 8


def test_small_files_are_in_memory_and_give_the_same_batches(folder, monkeypatch):
    path, _, _ = folder
    m = model_of(labels=True)
    resident = open_source(m.graph, path, m._parameter())
    assert isinstance(resident, Resident)
    for module in (lazy_rows, rows_of_parquet):
        monkeypatch.setattr(module, "LARGE", 1000)
    lazy = open_source(m.graph, path, m._parameter())
    assert isinstance(lazy, Mapped)
    rows = torch.randperm(N)[:100]
    expected, found = resident.take(rows), lazy.take(rows)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert resident.digest() == lazy.digest()
    for name, extent in resident.extents.items():
        assert all(map(torch.equal, extent, lazy.extents[name]))


def test_a_pass_reads_every_row_once_and_every_group_once(folder, small, monkeypatch):
    path, _, _ = folder
    m = model_of(labels=True)
    source = open_source(m.graph, path, m._parameter())
    assert source.windows.sizes == (64, 64, 64, 64, 44, 64, 56, *[64] * 9, 4)
    assert source.windows.rows == 150
    order = Order(N, 30, seed=1, windows=source.windows)
    epoch = order.rows(0, 34)[:N]
    assert epoch.sort().values.tolist() == list(range(N))
    read = []
    reading = rows_of_parquet.RowGroups.read

    def recorded(self, group, columns):
        read.append(group)
        return reading(self, group, columns)

    monkeypatch.setattr(rows_of_parquet.RowGroups, "read", recorded)
    source.data["x"].groups.cache.clear()
    for step in range(33):
        source.take(order.rows(step))
    assert sorted(read) == sorted([*range(17), *range(17)])  # the columns of x, and that of y
    again = Order(N, 30, seed=1, windows=source.windows)
    assert torch.equal(again.rows(50), order.rows(50))  # of (seed, step) alone
    assert torch.equal(again.rows(20, 3), torch.cat([order.rows(step) for step in (20, 21, 22)]))
    assert not torch.equal(Order(N, 30, seed=2, windows=source.windows).rows(0), order.rows(0))
    neighbours = (epoch[1:] - epoch[:-1]).abs()
    assert (neighbours == 1).float().mean() < 0.05  # rows of a window are mixed


def test_a_sample_of_rows_comes_from_few_groups(folder, small):
    m = model_of(labels=True)
    source = open_source(m.graph, folder[0], m._parameter())
    rows = source.spread(100)
    assert len(rows) <= 100
    assert torch.equal(rows, rows.unique())
    starts = torch.tensor([0, *source.windows.sizes]).cumsum(0)
    groups = torch.searchsorted(starts, rows, right=True).unique()
    assert len(groups) == 8
    assert groups[0] == 1
    assert groups[-1] == len(source.windows.sizes)
    assert source.spread(N).tolist() == list(range(N))


def test_rows_brought_to_a_device_keep_their_order(folder, small):
    m = model_of(labels=True)
    lazy = open_source(m.graph, folder[0], m._parameter())
    brought = Resident.brought(lazy)
    assert brought.windows == lazy.windows
    rows = torch.arange(N)
    assert all(
        torch.equal(value, lazy.take(rows)[name]) for name, value in brought.take(rows).items()
    )


class KilledError(Exception):
    pass


@pytest.mark.parametrize("moment", [7, 47])
def test_a_killed_run_is_resumed_bit_for_bit(folder, small, tmp_path, monkeypatch, moment):
    path, _, _ = folder
    settings = {"steps": 60, "batch": 30, "seed": 3, "checkpoint_every": 5, "progress": False}
    whole, killed, resumed = (model_of(labels=True) for _ in range(3))
    fit(whole, path, out=tmp_path / "whole", **settings)
    take = loop.Training._take_step

    def dying(self, phase):
        if self.step == moment:
            raise KilledError
        return take(self, phase)

    monkeypatch.setattr(loop.Training, "_take_step", dying)
    with pytest.raises(KilledError):
        fit(killed, path, out=tmp_path / "run", **settings)
    monkeypatch.setattr(loop.Training, "_take_step", take)
    fit(resumed, path, out=tmp_path / "run", resume=True, **settings)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_rows_are_standardised_and_held_out_lazily(folder, small):
    path, x, _ = folder
    lazy = read_file(path, model_of(labels=True).graph)["x"]
    expected = standardise(x)
    found = standardise(lazy)
    assert found.raw is lazy
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(found[10:20], expected[10:20], rtol=1e-9)
    loaded = load(str(path), model_of(labels=True).graph, prepare="standardise", hold_out=0.2)
    like = model_of()._parameter()
    source = open_source(model_of(labels=True).graph, loaded.train.data, like)
    assert isinstance(source, Mapped)
    assert source.n == sum(source.windows.sizes) == 800
    rows = source.windows.sizes[0]
    kept = loaded.train.data["x"].raw.index
    assert kept[rows - 1] < 64 <= kept[rows]


def test_lists_of_one_length_are_vectors(tmp_path, small):
    x = np.random.default_rng(0).normal(size=(N, 3))
    table = pa.table({"embedding": x.tolist()})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    found = read_file(tmp_path / "t.parquet", model_of().graph)["x"]
    assert isinstance(found, ParquetRows)
    assert np.array_equal(found[[5, 999, 5]], x[[5, 999, 5]])
    rows = [*x.tolist()]
    rows[750] = [1.0, 2.0]
    parquet.write_table(pa.table({"x": rows}), tmp_path / "t.parquet", row_group_size=100)
    with pytest.raises(ValueError, match=re.escape("3 numbers in row 0 but 2 in row 750 (from 0)")):
        open_source(model_of().graph, tmp_path / "t.parquet", model_of()._parameter())
    rows[750] = None
    parquet.write_table(pa.table({"x": rows}), tmp_path / "t.parquet", row_group_size=100)
    with pytest.raises(ValueError, match=re.escape("has no list in row 750 (from 0)")):
        open_source(model_of().graph, tmp_path / "t.parquet", model_of()._parameter())


def test_numbers_that_mark_missing_cells(folder, small):
    path, x, _ = folder
    first = float(x[0, 1])
    found = read_file(path, model_of(labels=True).graph, missing=[first])["x"][:64]
    assert np.isnan(found[0, 1])
    assert np.array_equal(found[1:], x[1:64], equal_nan=True)


def test_files_that_differ_change_or_hold_words_are_refused(folder, small):
    path, _, _ = folder
    graph, like = model_of(labels=True).graph, model_of()._parameter()
    source = open_source(graph, path, like)
    table = parquet.read_table(path / "part-2.parquet")
    parquet.write_table(table.slice(0, 500), path / "part-2.parquet", row_group_size=64)
    with pytest.raises(ValueError, match=r"part-2.parquet was changed after it was opened"):
        source.take(torch.arange(421, N))
    parquet.write_table(table.rename_columns([*COLUMNS, "label"]), path / "part-2.parquet")
    with pytest.raises(
        ValueError, match=r"part-2.parquet has other columns than the first file: 'label' is int64"
    ):
        read_file(path, graph)
    for file in path.glob("*.parquet"):
        words = pa.table({"x0": ["a", "b"] * 500, "x1": range(1000)})
        parquet.write_table(words, file)
    with pytest.raises(ValueError, match=re.escape("the column 'x0' holds words (a, b)")):
        read_file(path, model_of().graph)


def test_files_of_a_small_folder_have_the_same_columns(tmp_path):
    first, other = pa.table({"a": [1.0], "b": ["u"]}), pa.table({"a": [2.0], "c": ["v"]})
    parquet.write_table(first, tmp_path / "1.parquet")
    parquet.write_table(other, tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"2\.parquet has other columns .* 'c' is string, not"):
        read_frame(tmp_path)


def test_files_with_hidden_names_are_not_read(tmp_path):
    parquet.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "1.parquet")
    for name in (".hidden.parquet", "_metadata.parquet", "_temporary/0.parquet", ".git/0.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(pa.table({"other": ["u"]}), tmp_path / name)
    assert read_frame(tmp_path).to_pydict() == {"a": [1.0, 2.0]}
    (tmp_path / "1.parquet").unlink()
    assert not rows_of_parquet.is_parquet(tmp_path)
