"""Sources: a file read in parts gives the rows that an array in memory does."""

import numpy as np
import pytest
import torch
from small_models import NAN, SEQUENCE, conditional, put, state, vae
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from aevb import Bernoulli, zoo
from aevb.data import binarise, sources
from aevb.data.sources import Mapped, Resident, open_source


def kinds(tmp_path):
    """A conditional model's rows with labels and holes, as every kind of map, and as arrays in memory."""
    x, y = put(np.random.default_rng(3).standard_normal((700, 4)), NAN, slice(3, 700, 7), 2), np.arange(700) % 3
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "packed.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x))
    np.save(tmp_path / "wide.npy", np.hstack([x, x]))
    np.save(tmp_path / "single.npy", x.astype(np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    return {
        "memory": {"x": x, "y": y},
        "plain": tmp_path / "plain.npz",
        "packed": tmp_path / "packed.npz",
        "npy": {"x": tmp_path / "x.npy", "y": y},
        "mapped": {"x": mapped, "y": torch.tensor(y)},
        "fortran": {"x": tmp_path / "fortran.npy", "y": y.tolist()},
        "columns": {"x": np.load(tmp_path / "wide.npy", mmap_mode="r")[:, :4], "y": y},
        "reshaped": {"x": mapped.reshape(700, 4, 1)[..., 0], "y": y},
        "copy on write": {"x": np.load(tmp_path / "x.npy", mmap_mode="c"), "y": y},
        "single": {"x": tmp_path / "single.npy", "y": y},
    }


def test_every_kind_of_file_gives_the_rows_that_memory_does(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 4000)  # a hundred rows at a time
    monkeypatch.setattr(sources, "RELEASE", -1)  # every page goes back at once
    model, rows = conditional(), torch.tensor([5, 699, 3, 3, 10, 17])
    for name, data in kinds(tmp_path).items():
        source = open_source(model.graph, data, model._parameter())
        if name == "memory":
            expected = source.take(rows)
        assert isinstance(source, Resident if name in ("memory", "packed") else Mapped), name
        taken = source.take(rows)
        assert taken.keys() == expected.keys() == {"x", "y", "x?"}
        for key, value in expected.items():
            assert torch.allclose(taken[key], value, rtol=0, atol=1e-7 if name == "single" else 0), (name, key)
        assert source.take(torch.tensor([0, 1])).keys() == {"x", "y", "x?"}  # no hole there, but the same plan
        low, high = source.extents["x"]
        assert torch.allclose(low, torch.tensor(np.nanmin(kinds(tmp_path)["memory"]["x"], 0)), rtol=0, atol=1e-7)
        assert (high > 1).all()


def test_a_map_that_was_written_to_keeps_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "RELEASE", -1)
    np.save(tmp_path / "x.npy", np.ones((50, 4)))
    array = np.load(tmp_path / "x.npy", mmap_mode="c")
    array[7] = 5.0
    source = open_source(vae().graph, {"x": array}, torch.zeros(()).double())
    assert source.take(torch.tensor([7]))["x"].flatten().tolist() == [5.0] * 4


OWNERS = {
    "array": lambda x: {"x": x},
    "strided": lambda x: {"x": x[:, ::-1][:, ::-1]},
    "tensor": lambda x: {"x": torch.as_tensor(x)},
    "levels": lambda x: {"x": binarise(x, 17, fresh=True)},
}


@pytest.mark.parametrize("form", OWNERS)
def test_what_is_written_into_the_users_array_later_is_no_training_data(form):
    x = np.random.default_rng(0).integers(0, 2, (20, 4)).astype(float)
    source = open_source(vae(Bernoulli(4)).graph, OWNERS[form](x), torch.zeros(()).double())
    before = {name: value.clone() for name, value in source.read(torch.arange(20)).items()}
    x += 5
    assert all(torch.equal(value, before[name]) for name, value in source.read(torch.arange(20)).items())


def test_what_is_written_into_the_users_steps_later_changes_nothing():
    steps, x = torch.ones(5, 3, dtype=torch.bool), SEQUENCE.copy()
    source = open_source(state().graph, {"x": x, "steps": steps}, torch.zeros(()).double())
    steps[:, 1:], x[:] = False, 0.0
    assert source.batch["steps"].all()
    assert torch.equal(source.batch["x"].transpose(0, 1), torch.as_tensor(SEQUENCE))


def test_no_rows_of_a_file_are_an_empty_batch(tmp_path):
    for data in kinds(tmp_path).values():
        source = open_source(conditional().graph, data, torch.zeros(()).double())
        assert {name: value.shape for name, value in source.take(torch.arange(0)).items()} == {"x": (1, 0, 4), "x?": (1, 0, 4), "y": (1, 0, 3)}


def test_labels_out_of_range_are_found_in_any_part_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 4000)
    y = np.arange(700) % 3
    y[650] = 3
    np.savez(tmp_path / "bad.npz", x=np.zeros((700, 4)), y=y)
    with pytest.raises(ValueError, match=r"y has 1 label outside 0 … 2 \(first: row 650: 3\)"):
        open_source(conditional().graph, tmp_path / "bad.npz", torch.zeros(()))


def test_what_a_loader_would_change_is_not_dropped_silently():
    rows = TensorDataset(torch.as_tensor(np.random.default_rng(0).random((20, 3))))
    graph, like = zoo.fa().graph, torch.zeros(())
    assert open_source(graph, DataLoader(rows, batch_size=4, shuffle=True), like).n == 20
    with pytest.raises(ValueError, match="SubsetRandomSampler; training orders the rows itself"):
        open_source(graph, DataLoader(rows, sampler=SubsetRandomSampler([1, 2])), like)
    with pytest.raises(ValueError, match="collate_fn of its own"):
        open_source(graph, DataLoader(rows, collate_fn=lambda batch: batch), like)
