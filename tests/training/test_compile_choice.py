"""The default of compile=: a rule of sizes, device and steps, recorded with the run."""

from __future__ import annotations

import tomllib

import pytest
import torch

from aevb import Bernoulli, fit, zoo
from aevb.runtime import private_torch
from aevb.training import compile_choice
from aevb.training.compile_choice import Choice, choose, step_sizes
from aevb.training.events import COMPILED, events

X = (torch.rand(40, 16, generator=torch.Generator().manual_seed(0)) < 0.5).float()


def vae(hidden=(8,)):
    torch.manual_seed(0)
    return zoo.vae(x=16, z=2, hidden=hidden, likelihood=Bernoulli())


def sizes(model, rows=20, **choices):
    return step_sizes(model, model.plan(**choices), model.prepare(x=X[:rows]))


def test_the_sizes_of_a_step_grow_with_its_layers_rows_and_samples():
    small, deep = sizes(vae()), sizes(vae((8, 8, 8)))
    assert deep.operations > small.operations > 20
    assert small.kinds <= small.operations
    twice, several = sizes(vae(), rows=40), sizes(vae(), samples=5)
    assert twice.operations == small.operations
    assert 1.7 * small.numbers < twice.numbers < 2.1 * small.numbers
    assert several.numbers > 2 * small.numbers


def test_counting_leaves_no_gradient_and_no_random_state():
    model = vae()
    state = torch.get_rng_state()
    assert sizes(model) == sizes(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_short_runs_are_not_compiled_and_long_ones_are(monkeypatch):
    model = vae()
    plan, batch = model.plan(), model.prepare(x=X)
    monkeypatch.setattr(compile_choice, "has_compiler", lambda device: True)
    assert choose(model, plan, batch, compile_choice.FEWEST - 1) is None
    found = [choose(model, plan, batch, steps) for steps in (10**4, 10**5, 10**6)]
    assert [one.compile for one in found] == [False, False, True] or [
        one.compile for one in found
    ] == [False, True, True]
    assert found[0].cost == found[2].cost > 0
    assert found[2].saving == pytest.approx(100 * found[0].saving)
    monkeypatch.setattr(compile_choice, "has_compiler", lambda device: False)
    assert choose(model, plan, batch, 10**9) is None
    monkeypatch.setattr(compile_choice, "has_compiler", lambda device: True)
    monkeypatch.setattr(private_torch, "DispatchMode", None)
    assert choose(model, plan, batch, 10**9) is None


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, True])
def test_the_choice_is_noted_recorded_and_kept_when_the_run_is_resumed(
    tmp_path, monkeypatch, chosen
):
    fused = []
    from aevb.training import gradient_steps

    original = gradient_steps.compile_step

    def plainly(*args, fuse, **more):
        fused.append(fuse)
        return original(*args, fuse=False, **more)

    monkeypatch.setattr(gradient_steps, "compile_step", plainly)
    monkeypatch.setattr("aevb.training.job.choose", lambda *_: Choice(chosen, 12.0, 34.0))
    run = fit(vae(), {"x": X}, steps=5, batch=20, out=tmp_path / "run")
    assert run.settings.compile is chosen
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["compile"] is chosen
    texts = [event.text for event in events(run.rows, COMPILED)]
    assert texts == ([str(Choice(True, 12.0, 34.0))] if chosen else [])
    assert fused == ([True] if chosen else [])
    monkeypatch.setattr("aevb.training.job.choose", lambda *_: Choice(not chosen, 1.0, 1.0))
    longer = fit(vae(), {"x": X}, steps=9, batch=20, out=tmp_path / "run", resume=True)
    assert longer.settings.compile is chosen
    with pytest.raises(ValueError, match="was trained with compile="):
        fit(
            vae(), {"x": X}, steps=9, batch=20, out=tmp_path / "run", resume=True,
            compile=not chosen,
        )  # fmt: skip


def test_what_the_user_sets_is_not_decided(monkeypatch):
    def unasked(*_):
        raise AssertionError("nobody asked")

    monkeypatch.setattr("aevb.training.job.choose", unasked)
    assert fit(vae(), {"x": X}, steps=2, compile=False).settings.compile is False
    with pytest.raises(ValueError, match=r"compile is True, False, or None"):
        fit(vae(), {"x": X}, steps=2, compile="yes")
