"""fit(window=…): which rows and times a step takes, what it optimises, resuming, and refusals."""

import numpy as np
import pytest
import torch
from small_runs import assert_equal_weights, weights

from aevb import GRU, LSTM, Model, Normal, OneHot, fit, mle, mlp
from aevb.data.sources import open_source
from aevb.runtime.checked_files import DataWarning
from aevb.training import events, gradient_steps, loop
from aevb.training.row_order import Order
from aevb.training.windows import Windows

N, T = 30, 10


def vrnn(dropout: float = 0.1) -> Model:
    torch.manual_seed(0)
    return Model(
        p={
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(5),
            "z[t] | h[t]": Normal(2),
            "x[t] | h[t], z[t]": Normal(3, net=mlp(6, dropout=dropout)),
        },
        q={"z[t] | h[t], x[t]": Normal(net=mlp(6))},
    )


def series(ragged: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(N, T, 3)).astype(np.float32).cumsum(1)
    return {"x": x} | ({"lengths": random.integers(1, T + 1, N)} if ragged else {})


def test_one_window_is_the_whole_sequence_bit_for_bit():
    settings = {"steps": 20, "batch": 7, "seed": 3, "compile": False}
    whole, window = vrnn(), vrnn()
    first = fit(whole, series(), **settings)
    second = fit(window, series(), window=T, **settings)
    assert_equal_weights(weights(whole), weights(window))
    np.testing.assert_array_equal(first.history["elbo"], second.history["elbo"])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("size", [3, 5, 50])
def test_the_windows_of_a_batch_cover_its_rows_once(size, ragged):
    model, data = vrnn(), series(ragged)
    source = open_source(model.graph, data, model._parameter())
    order = Order(N, 7, seed=1)
    windows = Windows(model.graph, source, order, size)
    lengths = data.get("lengths", np.full(N, T))
    step = 0
    for number in range(9):
        rows = order.rows(number)
        expected, seen = source.read(rows)["x"], []
        count = -(-int(lengths[rows].max()) // min(size, T))
        for w in range(count):
            assert windows.at(step) == (number, w, count)
            assert torch.equal(windows.rows(step), rows)
            batch = windows.read(rows, windows.times(step))
            assert batch["x"].shape[0] == min(size, T)
            real = batch.get("steps")
            seen.append(batch["x"] if real is None else batch["x"].masked_fill(~real, 0))
            if real is not None:
                now = windows.times(step)[:, None] < torch.tensor(lengths[rows])[None]
                assert torch.equal(real[..., 0], now)
            step += 1
            assert windows.batches(step) == number + (w + 1) / count
        found = torch.cat(seen)[:T]
        assert torch.equal(found, expected[: len(found)])
        assert not expected[len(found) :].any()
    # Any step can be asked for first: a resumed run begins in the middle.
    assert Windows(model.graph, source, order, size).at(step - 1) == windows.at(step - 1)


def test_rows_in_files_have_the_same_windows(tmp_path):
    np.save(tmp_path / "x.npy", series()["x"])
    in_memory, in_file = vrnn(), vrnn()
    settings = {"steps": 20, "batch": 7, "window": 4, "compile": False}
    fit(in_memory, series(), **settings)
    fit(in_file, {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, **settings)
    assert_equal_weights(weights(in_memory), weights(in_file))


@pytest.mark.parametrize(
    ("moment", "compile"),
    [
        (3, False),
        (10, False),
        (17, False),
        (29, False),
        pytest.param(17, True, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_between_windows_goes_on_bit_for_bit(tmp_path, monkeypatch, moment, compile):
    settings = {
        "steps": 30,
        "batch": 7,
        "checkpoint_every": 1,
        "window": 3,
        "validate_every": 10,
        "compile": compile,
    }
    x = series(ragged=True)
    whole = vrnn()
    reference = fit(whole, x, validation=x, out=tmp_path / "whole", **settings)
    take = loop.Training._take_step

    class KilledError(Exception):
        pass

    def dying(self, phase):
        if self.step == moment:
            raise KilledError
        return take(self, phase)

    monkeypatch.setattr(loop.Training, "_take_step", dying)
    with pytest.raises(KilledError):
        fit(vrnn(), x, validation=x, out=tmp_path / "run", **settings)
    monkeypatch.undo()
    fresh = vrnn()
    resumed = fit(fresh, x, validation=x, out=tmp_path / "run", resume=True, **settings)
    assert_equal_weights(weights(whole), weights(fresh))
    for name, values in reference.history.items():
        if name != "seconds":
            np.testing.assert_array_equal(values, resumed.history[name])


def test_the_recorded_bound_is_that_of_whole_sequences():
    """With a learning rate near zero, the mean over a pass is the bound, up to the noise of z."""
    x = series(ragged=True)
    model = vrnn(dropout=0.0)
    settings = {"epochs": 1, "batch": N, "lr": 1e-12, "log_every": 99, "compile": False}
    run = fit(model, x, validation=x, window=3, **settings)
    assert run.step == -(-int(x["lengths"].max()) // 3)
    recorded, whole = run.history["elbo"], run.history["validation elbo"]
    # Over seeds, the bound has a standard deviation of 2 nats; one window has a quarter of it.
    assert abs(recorded[-1] - whole[-1]) < 15 < 0.5 * abs(whole[-1])
    assert run.rows[-1]["epoch"] == 1


def test_a_run_says_what_it_optimises_and_counts_epochs_in_batches():
    run = fit(vrnn(), series(), epochs=4, batch=10, window=5, compile=False)
    assert run.step == 4 * 3 * 2
    (note,) = events.events(run.rows, events.WINDOWS)
    assert "truncated at the borders of windows" in note.text
    assert run.rows[-1]["epoch"] == 4


@pytest.mark.slow
def test_windows_learn_a_memory_that_is_longer_than_a_window():
    """A given number stands in the first step alone; the state has to carry it to later windows."""
    random = np.random.default_rng(0)
    sign = random.choice([-1.0, 1.0], (200, 1, 1))
    u = np.concatenate([sign, np.zeros((200, 11, 1))], 1).astype(np.float32)
    x = (sign + 0.1 * random.normal(size=(200, 12, 1))).astype(np.float32)

    def bound(reset: bool) -> float:
        torch.manual_seed(0)
        model = Model(
            p={
                "h[t] | h[t-1], u[t]": GRU(8),
                "z[t] | h[t]": Normal(1),
                "x[t] | h[t], z[t]": Normal(1, scale=0.2),
            },
            q={"z[t] | h[t], x[t]": Normal()},
            given={"u": 1},
        )
        data = {"x": x, "u": u}
        if reset:  # windows as sequences of their own
            data = {name: value.reshape(-1, 3, 1) for name, value in data.items()}
        settings = {} if reset else {"window": 3}
        fit(model, data, steps=1200, batch=50, lr=1e-2, compile=False, **settings)
        return float(model.elbo(x=x, u=u, seed=0).value.detach().mean())

    assert bound(reset=False) > bound(reset=True) + 3


def test_a_skipped_step_leaves_the_values_of_the_window_before():
    x = series()
    x["x"][3, 4] = 1e30  # overflows in one window of one batch
    with pytest.warns(DataWarning, match="column"):
        run = fit(vrnn(), x, steps=40, batch=10, window=2, skip=40, compile=False)
    assert run.step == 40
    assert events.events(run.rows, events.SKIPPED)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


CHAIN = {
    "p": {"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(3)},
    "q": {"y[t] | y[t-1], x[t]": OneHot()},
}
LINEAR = {
    "p": {"z[t] | z[t-1]": Normal(2, scale="learned"), "x[t] | z[t]": Normal(3, scale="learned")},
    "q": {"z[t] | z[t-1], x[t]": Normal()},
}


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (CHAIN, {}, "summed over together with its neighbour"),
        (LINEAR, {"bound": "iwae", "samples": 2}, "logarithm of a mean"),
        (LINEAR, {"free_bits": 0.1}, "free_bits= compares"),
        (LINEAR, {"schedule": mle(optimiser="adam")}, "computes an exact objective"),
        (
            {"p": LINEAR["p"], "q": {"b[t] | b[t+1], x[t]": GRU(2), "z[t] | b[t]": Normal()}},
            {},
            r"reads b\[t\+1\], which lies in the next window",
        ),
    ],
)
def test_runs_whose_objective_is_no_sum_over_windows_are_refused(model, settings, reason):
    with pytest.raises(ValueError, match=rf"window=4 trains on windows of time, but .*{reason}"):
        fit(Model(**model), series(), steps=2, window=4, **settings)


@pytest.mark.parametrize("name", ["window", "checkpoint_time"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_windows_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} is a whole number, 1 or more"):
        fit(vrnn(), series(), steps=1, **{name: value})


def test_checkpoints_in_time_train_the_same_weights_up_to_rounding():
    plain, chunked = vrnn().double(), vrnn().double()
    settings = {"steps": 20, "batch": 7, "compile": False}
    fit(plain, series(), **settings)
    fit(chunked, series(), checkpoint_time=4, **settings)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(chunked)[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a module that torch imports
def test_loops_over_many_steps_are_not_recorded_but_their_windows_are(monkeypatch, soon):
    monkeypatch.setattr("aevb.training.purity.LONGEST", 6)
    made = []
    real = gradient_steps.compile_step
    monkeypatch.setattr(
        gradient_steps, "compile_step", lambda *a, **k: (made.append(1), real(*a, **k))[1]
    )
    whole = fit(vrnn(), series(), steps=4, batch=10, compile=True)
    note = events.events(whole.rows, events.NOT_COMPILED)[-1]
    assert "sequences of 10 steps are too long to record (over 6)" in note.text
    assert not made
    quiet = fit(vrnn(), series(), steps=4, batch=10, compile=False)
    assert not events.events(quiet.rows, events.NOT_COMPILED)
    assert not made
    fit(vrnn(), series(), steps=4, batch=10, window=5, compile=False)
    assert len(made) == 1  # one recording serves all windows
    static = Model(p={"z[t]": Normal(2), "x[t] | z[t]": Normal(3)}, q={"z[t] | x[t]": Normal()})
    fit(static, series(), steps=4, batch=10, compile=False)
    assert len(made) == 2  # no loop over time
