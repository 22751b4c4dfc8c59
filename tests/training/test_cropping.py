"""Batches of sequences that are much shorter than the longest one are cut to their own length."""

import numpy as np
import pytest
import torch

from aevb import GRU, LSTM, Model, Normal, OneHot, fit
from aevb.data.sources import open_source
from aevb.training import cropping
from aevb.training.job import prepare_job
from aevb.training.row_order import Order
from aevb.training.settings import Settings

LONG, N = 60, 50


def data(spread: bool = True) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 12, N) if spread else random.integers(LONG // 2, LONG, N)
    lengths[7] = LONG
    return {"x": random.normal(size=(N, LONG, 3)).astype(np.float32), "lengths": lengths}


MODELS = {
    "smoothing": lambda: Model(
        p={
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(4),
            "z[t] | h[t]": Normal(2),
            "x[t] | h[t], z[t]": Normal(3),
            "x[T] | z[T]": Normal(3),
        },
        q={"b[t] | b[t+1], x[t]": GRU(4), "z[t] | h[t], b[t]": Normal()},
    ),
    "static": lambda: Model(
        p={"c": Normal(2), "z[t] | z[t-1], c": Normal(2), "x[t] | z[t]": Normal(3)},
        q={
            "b[t] | b[t+1], x[t]": GRU(4),
            "c | b[0]": Normal(),
            "z[t] | z[t-1], c, x[t]": Normal(),
        },
    ),
    "chain": lambda: Model(
        p={"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(3)},
        q={"y[t] | y[t-1], x[t]": OneHot()},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_cut_batches_train_the_same_weights(name, monkeypatch):
    found, steps = [], []
    real = cropping.cropped
    for share in (cropping.SHARE, 0.0):
        monkeypatch.setattr(cropping, "SHARE", share)
        monkeypatch.setattr(
            "aevb.training.gradient_steps.cropped",
            lambda inputs: steps.append(cut := real(inputs)) or cut,
        )
        torch.manual_seed(0)
        model = MODELS[name]().double()
        fit(model, data(), steps=20, batch=5, seed=1, compile=False)
        found.append(model.state_dict())
    assert len(steps) >= 20
    assert min(len(inputs["batch", "steps"]) for inputs in steps) < 12
    assert any(len(inputs["batch", "steps"]) == LONG for inputs in steps)
    for key, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][key], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("spread", "settings", "crops"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"compile": True}, False),
        (True, {"batch": N}, False),
    ],
)
def test_only_much_shorter_batches_are_cut(spread, settings, crops):
    job = prepare_job(MODELS["chain"](), data(spread), Settings(**{"batch": 5} | settings))
    assert job.crops == crops


def test_full_sequences_are_never_cut():
    model = MODELS["chain"]()
    source = open_source(model.graph, {"x": data()["x"]}, model._parameter())
    assert not cropping.cropping_pays(source, Order(N, 5, seed=0))
