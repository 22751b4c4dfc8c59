"""A step gets as many threads as it is worth, and everyone else gets all of them."""

import pytest
import torch

from aevb import Bernoulli, Model, Normal, conv, deconv, fit, mle, zoo
from aevb.training import loop
from aevb.training.threads import FEW, SHARE, threads, worth


@pytest.fixture
def sixteen(monkeypatch):
    """A machine with sixteen threads; returns how many were asked for, in turn."""
    asked = [16]
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


def of(model, batch):
    return worth(model, model.plan(), batch)


def test_threads_follow_the_work_of_a_product(sixteen):
    vae = zoo.vae(784, 20, hidden=(500, 500), likelihood=Bernoulli())
    weights = [784 * 500, 500 * 500, 500 * 40, 20 * 500, 500 * 500, 500 * 784]
    for batch in (1, 50, 100, 200, 10_000):
        assert of(vae, batch) == min(16, max(FEW, int(batch * sum(weights) / 6 / SHARE)))
    assert of(zoo.vae(64, 10, hidden=(200, 200)), 100) == FEW
    assert of(zoo.gmvae(784, 64, 10, hidden=(512, 512)), 100) == 16  # a hundred rows in ten classes
    assert worth(vae, vae.plan(bound="iwae", samples=50), 20) == of(vae, 1000)


def test_work_that_is_not_known_gets_all_threads(sixteen):
    p = {"z": Normal(2), "x | z": Bernoulli((1, 8, 8), net=deconv(4))}
    assert of(Model(p, {"z | x": Normal(net=conv(4))}), 10) == 16
    hooked = zoo.vae(8, 2, hidden=(4,))
    next(iter(hooked.factors.values())).register_forward_hook(lambda *_: None)
    assert of(hooked, 10) == 16


def test_a_run_has_few_threads_and_what_is_called_has_all(sixteen, monkeypatch):
    seen, during = [], []
    x = (torch.rand(40, 6) < 0.5).float()
    real = loop.Training._take_step
    monkeypatch.setattr(
        loop.Training,
        "_take_step",
        lambda self, phase: (during.append(torch.get_num_threads()), real(self, phase))[1],
    )
    model = zoo.vae(6, 2, hidden=(4,), likelihood=Bernoulli())
    fit(
        model,
        {"x": x},
        validation={"x": x},
        steps=4,
        batch=10,
        after=lambda *_: seen.append(torch.get_num_threads()),
    )
    assert during == [FEW] * 4
    assert seen == [16]
    assert torch.get_num_threads() == 16
    during.clear()
    fit(zoo.fa(6, 2), {"x": torch.randn(40, 6)}, steps=2, batch=10, schedule=mle())
    assert during == [16] * 2


def test_threads_come_back_after_an_error(sixteen):
    def fail():
        assert torch.get_num_threads() == 3
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), threads(3):
        fail()
    assert sixteen == [16, 3, 16]
    with threads(16):
        pass
    assert sixteen == [16, 3, 16]


def test_networks_of_a_sequence_count_the_rows_of_one_step(sixteen):
    model = zoo.vrnn(28, 2, 64, hidden=(64,))
    numbers = [parameter.numel() for parameter in model.parameters() if parameter.dim() == 2]
    assert of(model, 20_000) == min(16, max(FEW, int(20_000 * sum(numbers) / len(numbers) / SHARE)))
