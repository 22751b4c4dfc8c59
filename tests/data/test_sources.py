"""Sources: a file read in parts gives the rows that an array in memory does."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import NAN, SEQUENCE, conditional, put, state, vae
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from aevb import Bernoulli, ContinuousBernoulli, Model, Normal, OneHot, fit, mlp, zoo
from aevb.data import binarise, dequantise, sources, standardise
from aevb.data.sources import Mapped, Resident, open_source
from aevb.training.gradient_steps import GradientSteps as Stepper
from aevb.training.row_order import Order
from aevb.training.staging import Gathered, Staged


def kinds(tmp_path):
    """A conditional model's rows with labels and holes, as every kind of map, and as arrays in
    memory.
    """
    x, y = (
        put(np.random.default_rng(3).standard_normal((700, 4)), NAN, slice(3, 700, 7), 2),
        np.arange(700) % 3,
    )
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
            assert torch.allclose(
                taken[key], value, rtol=0, atol=1e-7 if name == "single" else 0
            ), (name, key)
        # no hole there, but the same plan
        assert source.take(torch.tensor([0, 1])).keys() == {"x", "y", "x?"}
        low, high = source.extents["x"]
        assert torch.allclose(
            low, torch.tensor(np.nanmin(kinds(tmp_path)["memory"]["x"], 0)), rtol=0, atol=1e-7
        )
        assert (high > 1).all()


def test_rows_are_staged_before_they_are_asked_for(tmp_path):
    data, model = kinds(tmp_path), conditional()
    for name in ("memory", "mapped", "columns"):
        source, order = (
            open_source(model.graph, data[name], model._parameter()),
            Order(700, 90, seed=1),
        )
        staged = Staged(source, order, 4, 44, torch.device("cpu"))
        for step, count in [
            (0, 1),
            (1, 1),
            (2, 4),
            (6, 2),
            (8, 4),
            (12, 3),
            (3, 4),
            (40, 4),
        ]:  # within a block, across two, back, far away
            staged.load(step, count)
            last = (step + count - 1) // 4
            # nothing beyond the end
            assert sorted(staged.blocks) == ([last, last + 1] if step < 40 else [last])
            for i in range(count):
                expected, found = source.read(order.rows(step + i)), staged.batch(i)
                assert expected.keys() == found.keys()
                assert all(torch.equal(found[key], value) for key, value in expected.items()), (
                    name,
                    step,
                    i,
                )
                assert all(
                    value.is_contiguous()
                    and value.data_ptr() % 16 == staged.here[key].data_ptr() % 16
                    for key, value in found.items()
                )
        staged.settle()
        assert all(coming.done() for coming in staged.blocks.values())
        staged.close()
        assert not staged.blocks


def test_small_rows_are_taken_for_some_steps_at_once(tmp_path, monkeypatch):
    data, model = kinds(tmp_path), conditional()
    source, order = (
        open_source(model.graph, data["memory"], model._parameter()),
        Order(700, 90, seed=1),
    )
    assert Gathered.pays(source, order)
    gathered = Gathered(source, order)
    reads = []
    monkeypatch.setattr(
        source, "read", lambda rows, real=source.read: (reads.append(len(rows)), real(rows))[1]
    )
    for step in (0, 1, 7, 8, 9, 3, 100, 101):  # the data end within a batch, at step 7
        gathered.load(step, 1)
        for key, value in source.batch.items():
            assert torch.equal(gathered.batch(0)[key], value[:, order.rows(step)]), (key, step)
    assert reads == [8 * 90] * 4
    gathered.close()
    assert gathered.here == {}


def test_memory_and_a_file_train_the_same_weights_also_of_odd_sizes(tmp_path):
    x = (np.random.default_rng(0).random((61, 15)) < 0.4).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    found = []
    for rows in (x, tmp_path / "x.npy"):
        torch.manual_seed(0)
        model = Model(
            {"z": Normal(2), "x | z": Bernoulli(15, net=mlp(9, 7))},
            {"z | x": Normal(net=mlp(9, 7))},
        )
        fit(model, {"x": rows}, steps=40, batch=23, seed=0)
        found.append(model.state_dict())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_large_rows_files_and_sequences_are_taken_step_by_step(tmp_path):
    model = conditional()
    order = Order(700, 90, seed=1)
    assert not Gathered.pays(
        open_source(model.graph, kinds(tmp_path)["mapped"], model._parameter()), order
    )
    wide = Model({"z": Normal(2), "x | z": Bernoulli(3000)}, {"z | x": Normal()})
    rows = open_source(wide.graph, {"x": np.zeros((200, 3000), np.float32)}, wide._parameter())
    assert not Gathered.pays(rows, Order(200, 90, seed=0))  # 1.03 MB
    assert Gathered.pays(rows, Order(200, 80, seed=0))
    timed = Model(
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Bernoulli(2)}, {"z[t] | z[t-1], x[t]": Normal()}
    )
    assert not Gathered.pays(
        open_source(timed.graph, {"x": np.zeros((20, 3, 2), np.float32)}, timed._parameter()),
        Order(20, 5, seed=0),
    )


def test_staged_sequences_and_fresh_values_are_the_ones_that_are_read(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (50, 6, 2)).astype(np.uint8)
    np.save(tmp_path / "x.npy", x)
    model = Model(
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Bernoulli(2)}, {"z[t] | z[t-1], x[t]": Normal()}
    )
    order = Order(50, 7, seed=0)
    for values in (np.load(tmp_path / "x.npy", mmap_mode="r"), x):
        source = open_source(
            model.graph,
            {"x": binarise(values, fresh=True), "lengths": np.arange(50) % 6 + 1},
            model._parameter(),
        )
        staged = Staged(source, order, 3, 100, torch.device("cpu"))
        staged.load(1, 3)
        for i in range(3):
            generators = [torch.Generator().manual_seed(i) for _ in range(2)]
            expected = source.take(order.rows(1 + i), generator=generators[0])
            found = staged.batch(i)
            found = source.prepare(found, source.uniform(found, 7, generators[1]))
            assert found["x"].shape == (6, 7, 2)
            assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_trouble_with_a_file_reaches_whoever_asks_for_its_rows(tmp_path, monkeypatch):
    model, data = conditional(), kinds(tmp_path)["mapped"]
    staged = Staged(
        source := open_source(model.graph, data, model._parameter()),
        Order(700, 90, seed=1),
        4,
        1000,
        torch.device("cpu"),
    )

    def gone(name, index):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(source, "_gather", gone)
        with pytest.raises(OSError, match="the disk is gone"):
            staged.load(100, 4)
        staged.settle()
    staged.load(100, 4)  # it is there again
    assert torch.equal(staged.batch(2)["x"], source.read(Order(700, 90, seed=1).rows(102))["x"])


def test_training_on_staged_rows_is_training(tmp_path, monkeypatch):
    x = (np.random.default_rng(0).random((300, 6)) < 0.4).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    real, found = Stepper.__init__, []

    def staging(self, job, *more):
        real(self, job, *more)
        self.staged = Staged(job.source, job.order, 1, 25, self.device)

    for init in (real, staging):
        monkeypatch.setattr(Stepper, "__init__", init)
        torch.manual_seed(0)
        model = Model({"z": Normal(2), "x | z": Bernoulli(6)}, {"z | x": Normal()})
        fit(model, {"x": tmp_path / "x.npy"}, steps=25, batch=40, seed=0)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_data_that_would_fill_a_device_stay_with_the_host(monkeypatch):
    model, x, rows = conditional(), torch.rand(20, 4), torch.tensor([3, 1])
    like = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), element_size=lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 4 * 100 + 1, 0))
    assert sources._surely_fits({"x": x, "y": [[0]] * 20}, like)
    assert not sources._surely_fits({"x": x, "y": [[0, 1]] * 20}, like)
    assert sources._fits({"x": torch.zeros(1, 400)}, like)
    assert not sources._fits(
        {"x": torch.zeros(1, 400), "x?": torch.zeros(1, 400, dtype=torch.bool)}, like
    )
    near = Resident(model.graph, {"x": x, "y": torch.arange(20) % 3}, model._parameter())
    assert near.near
    for key, value in near.read(rows).items():
        assert torch.equal(value, near.on_host(rows)[key])
        # what a source of one's own has
        assert torch.equal(value, super(Resident, near).on_host(rows)[key])


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
    assert all(
        torch.equal(value, before[name]) for name, value in source.read(torch.arange(20)).items()
    )


def test_what_is_written_into_the_users_steps_later_changes_nothing():
    steps, x = torch.ones(5, 3, dtype=torch.bool), SEQUENCE.copy()
    source = open_source(state().graph, {"x": x, "steps": steps}, torch.zeros(()).double())
    steps[:, 1:], x[:] = False, 0.0
    assert source.batch["steps"].all()
    assert torch.equal(source.batch["x"].transpose(0, 1), torch.as_tensor(SEQUENCE))


def test_no_rows_of_a_file_are_an_empty_batch(tmp_path):
    for data in kinds(tmp_path).values():
        source = open_source(conditional().graph, data, torch.zeros(()).double())
        assert {name: value.shape for name, value in source.take(torch.arange(0)).items()} == {
            "x": (1, 0, 4),
            "x?": (1, 0, 4),
            "y": (1, 0, 3),
        }


def test_labels_out_of_range_are_found_in_any_part_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 4000)
    y = np.arange(700) % 3
    y[650] = 3
    np.savez(tmp_path / "bad.npz", x=np.zeros((700, 4)), y=y)
    with pytest.raises(
        ValueError, match=r"y has 1 label outside 0 … 2 \(first, from 0: row 650: 3\)"
    ):
        open_source(conditional().graph, tmp_path / "bad.npz", torch.zeros(()))


def test_what_a_loader_would_change_is_not_dropped_silently():
    rows = TensorDataset(torch.as_tensor(np.random.default_rng(0).random((20, 3))))
    graph, like = zoo.fa().graph, torch.zeros(())
    assert open_source(graph, DataLoader(rows, batch_size=4, shuffle=True), like).n == 20
    with pytest.raises(ValueError, match="SubsetRandomSampler; training orders the rows itself"):
        open_source(graph, DataLoader(rows, sampler=SubsetRandomSampler([1, 2])), like)
    with pytest.raises(ValueError, match="its own collate_fn"):
        open_source(graph, DataLoader(rows, collate_fn=lambda batch: batch), like)


@pytest.mark.parametrize("kind", ["plain", "bytes", "missing", "sequences"])
def test_files_that_are_brought_to_a_device_are_the_rows_of_the_files(tmp_path, kind):
    rng = np.random.default_rng(0)
    x = rng.random((50, 6)).astype(np.float32)
    model = Model({"z": Normal(2), "x | z": Normal(6)}, {"z | x": Normal()})
    if kind == "missing":
        x[3, 2] = x[40, 0] = np.nan
    elif kind == "bytes":
        x = rng.integers(0, 256, (50, 6)).astype(np.uint8)
        model = Model({"z": Normal(2), "x | z": ContinuousBernoulli(6)}, {"z | x": Normal()})
    elif kind == "sequences":
        x = rng.random((50, 3, 6)).astype(np.float32)
        model = Model(
            {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(6)}, {"z[t] | x[t]": Normal()}
        )
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = Mapped(
        model.graph,
        {"x": dequantise(mapped, fresh=True) if kind == "bytes" else mapped},
        model._parameter(),
    )
    source.part = 16
    brought = Resident.brought(source)
    rows = torch.tensor([7, 3, 49, 40, 7])
    assert brought.near
    assert brought.n == 50
    for mine, theirs in (
        (brought.read(rows), source.read(rows)),
        (brought.take(rows), source.take(rows)),
        (brought.on_host(rows), source.on_host(rows)),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    drawn = [
        one.take(rows, generator=torch.Generator().manual_seed(1))["x"] for one in (brought, source)
    ]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("kind", [float, np.float32, int])
def test_masked_entries_are_missing(kind):
    x = np.random.default_rng(0).integers(-9, 9, (30, 4)).astype(kind)
    y = np.ma.masked_equal(np.arange(30) % 3, 2)
    model = Model({"y": OneHot(3), "x | y": Normal(4)}, {"y | x": OneHot()}).double()
    found = open_source(
        model.graph, {"x": np.ma.masked_greater(x, 0), "y": y}, model._parameter()
    ).batch
    expected = open_source(
        model.graph,
        {"x": np.where(x > 0, NAN, x), "y": np.where(y.mask, NAN, y.data)},
        model._parameter(),
    ).batch
    assert found.keys() == expected.keys() == {"x", "x?", "y", "y?"}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    whole = open_source(model.graph, {"x": np.ma.masked_array(x)}, model._parameter()).batch
    assert whole.keys() == {"x"}
    assert torch.equal(whole["x"][0], torch.tensor(x).double())


def test_masked_rows_of_sequences_and_datasets_are_missing():
    rows = [np.ma.masked_greater(np.arange(float(n))[:, None], 2) for n in (4, 2)]
    model = Model({"z[t]": Normal(2), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()}).double()

    class Rows(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return rows[i]

    for data in ({"x": rows}, Rows()):
        found = open_source(model.graph, data, model._parameter()).batch
        # beyond the end nothing is missing
        assert found["x?"][:, :, 0].T.tolist() == [[True, True, True, False], [True] * 4]


def test_a_dataset_is_no_variable():
    class Endless(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return torch.zeros(4)

    message = (
        r"x is a Dataset, which holds whole rows. Pass it as the data themselves, e.g. "
        r"fit\(model, dataset\), .* in the order x."
    )
    with pytest.raises(ValueError, match=message):
        fit(vae(), {"x": Endless()}, steps=1)
    with pytest.raises(ValueError, match="x is a DataLoader, which holds whole rows"):
        fit(vae(), {"x": DataLoader(Endless())}, steps=1)
    assert open_source(vae().graph, Endless(), torch.zeros(())).n == 3


@pytest.mark.parametrize("kind", ["array", "tensor", "file"])
def test_missing_entries_that_p_reads_are_marked(tmp_path, kind):
    x = put(SEQUENCE, NAN, 2, slice(1, None))
    np.savez(tmp_path / "x.npz", x=x)
    data = {"array": {"x": x}, "tensor": {"x": torch.tensor(x)}, "file": tmp_path / "x.npz"}[kind]
    batch = open_source(state().graph, data, torch.zeros(()).double()).take(torch.arange(5))
    assert torch.equal(batch["x?"].transpose(0, 1), ~torch.tensor(np.isnan(x)))
    assert not batch["x"].isnan().any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(5), r"x has shape \[5\]; expected \[N, T, 4\]"),
        (np.zeros((5, 0, 4)), "x has no steps"),
        (np.float64(0.5), r"x has shape \[\]; expected \[N, T, 4\]"),
        (np.array(["a", "b"]), "x holds 'a' in row 0 .from 0., not a number"),
        (None, "x holds object, not numbers|the data lack it"),
    ],
)
def test_sequences_that_are_none_are_refused_as_what_they_are(value, message):
    with pytest.raises(ValueError, match=message):
        fit(state(), {"x": value}, steps=1)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: model.elbo(x=x),
        lambda model, x: model.log_evidence(x=x),
        lambda model, x: model.posterior(x=x),
        lambda model, x: standardise(x),
    ],
    ids=["elbo", "log_evidence", "posterior", "standardise"],
)
def test_a_mapped_file_that_was_truncated_is_refused_by_every_call(tmp_path, use):
    """Reading it would end the process (SIGBUS)."""
    np.save(tmp_path / "x.npy", np.zeros((5000, 4), dtype=np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    os.truncate(tmp_path / "x.npy", 4096)
    model = zoo.fa(4, 2)
    with pytest.raises(ValueError, match=r"x\.npy has 4096 bytes, but had 80128 when"):
        use(model, x)
