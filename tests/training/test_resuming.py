"""A run that was stopped goes on as if it had not been, bit for bit, or says why it does not."""

import signal

import numpy as np
import pytest
import torch
from small_runs import across, assert_equal_weights, bits, small_vae, weights

from aevb import Bernoulli, Model, Normal, fit, mlp
from aevb.training import loop, resuming
from aevb.training.checkpoint import CheckpointError, latest
from aevb.zoo import fa


class KilledError(Exception):
    pass


@pytest.mark.parametrize("moment", [3, 10, 17, 29])
def test_a_run_killed_once_equals_the_uninterrupted_one_bit_for_bit(tmp_path, monkeypatch, moment):
    settings = {
        "steps": 30,
        "batch": 20,
        "checkpoint_every": 5,
        "validate_every": 10,
        "warmup": 4,
        "kl_warmup": 7,
    }
    x = bits()
    whole = small_vae()
    reference = fit(whole, {"x": x}, validation={"x": x}, out=tmp_path / "whole", **settings)
    take = loop.Training._take_step

    def dying(self, phase):
        if self.step == moment:
            raise KilledError
        return take(self, phase)

    model = small_vae()
    monkeypatch.setattr(loop.Training, "_take_step", dying)
    with pytest.raises(KilledError):
        fit(model, {"x": x}, validation={"x": x}, out=tmp_path / "run", **settings)
    monkeypatch.undo()
    torch.manual_seed(99)
    fresh = Model(
        p={"z": Normal(2), "x | z": Bernoulli(6, net=mlp(8, dropout=0.2))},
        q={"z | x": Normal(net=mlp(8))},
    )
    if moment < 5:
        fresh.load_state_dict(small_vae().state_dict())  # nothing was saved yet: it starts again
    resumed = fit(
        fresh, {"x": x}, validation={"x": x}, out=tmp_path / "run", resume=True, **settings
    )
    assert_equal_weights(weights(whole), weights(fresh))
    strip = [
        {key: value for key, value in row.items() if key != "seconds"} for row in reference.rows
    ]
    assert strip == [
        {key: value for key, value in row.items() if key != "seconds"} for row in resumed.rows
    ]


def test_resuming_with_other_settings_or_over_another_run_is_refused(tmp_path):
    fit(small_vae(), {"x": bits()}, steps=5, out=tmp_path)
    with pytest.raises(ValueError, match="holds a run already. Continue it with resume=True"):
        fit(small_vae(), {"x": bits()}, steps=5, out=tmp_path)
    with pytest.raises(CheckpointError, match=r"was trained with lr=0\.002, not 0\.1"):
        fit(small_vae(), {"x": bits()}, steps=9, lr=0.1, out=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="its weights are not this model's"):
        fit(fa(x=6), {"x": bits()}, steps=9, lr=0.002, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="give their folder with out="):
        fit(small_vae(), {"x": bits()}, steps=5, resume=True)


def test_a_run_whose_seed_meant_other_numbers_is_not_resumed(tmp_path, monkeypatch):
    fit(small_vae(), {"x": bits()}, steps=3, seed=0, out=tmp_path)
    monkeypatch.setattr(resuming, "NUMBERS", resuming.NUMBERS + 1)
    with pytest.raises(
        CheckpointError,
        match="by another version of aevb, in which a seed gave other random numbers",
    ):
        fit(small_vae(), {"x": bits()}, steps=6, seed=0, out=tmp_path, resume=True)


def test_what_does_not_change_the_steps_may_change_on_resume(tmp_path):
    whole = small_vae()
    fit(whole, {"x": bits()}, steps=20)
    choices = {
        "validation": {"x": bits()},
        "validate_every": 9,
        "after": lambda step, model: signal.raise_signal(signal.SIGTERM),
    }
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        fit(small_vae(), {"x": bits()}, steps=20, out=tmp_path, checkpoint_every=5, **choices)
    assert 0 < latest(tmp_path).step < 20
    resumed = small_vae()
    fit(
        resumed,
        {"x": bits()},
        steps=20,
        out=tmp_path,
        resume=True,
        checkpoint_every=7,
        log_every=3,
        skip=2,
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )
    with pytest.raises(CheckpointError, match=r"was trained with lr=0\.002, not 0\.01"):
        fit(small_vae(), {"x": bits()}, steps=20, out=tmp_path, resume=True, lr=0.01)


def test_resuming_with_other_parameters_frozen_is_refused(tmp_path):
    def half_frozen():
        model = small_vae()
        model.factors["p(x|z)"].requires_grad_(False)
        return model

    fit(half_frozen(), {"x": bits()}, steps=5, out=tmp_path)
    with pytest.raises(
        CheckpointError, match=r"was trained with frozen=\['factors\.p\(x\|z\)\.[^]]*'\], not \[\]"
    ):
        fit(small_vae(), {"x": bits()}, steps=9, out=tmp_path, resume=True)
    assert fit(half_frozen(), {"x": bits()}, steps=9, out=tmp_path, resume=True).step == 9


def test_resuming_on_other_data_is_refused(tmp_path):
    fit(small_vae(), {"x": bits()}, steps=5, out=tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"was trained on other data \(90 rows, .*, not 60 rows, .*\)\. Resume with the same",
    ):
        fit(small_vae(), {"x": bits(60)}, steps=9, out=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="was trained on other data"):
        fit(small_vae(), {"x": 1 - bits()}, steps=9, out=tmp_path, resume=True)
    for row in (0, 7, 8, 40, 81, 82, 89):  # not the first and the last ones only
        other = bits().copy()
        other[row, 3] = 1 - other[row, 3]
        with pytest.raises(CheckpointError, match="was trained on other data"):
            fit(small_vae(), {"x": other}, steps=9, out=tmp_path, resume=True)
    fit(small_vae(), {"x": bits()}, steps=9, out=tmp_path, resume=True)


def test_a_run_goes_on_with_the_same_rows_from_a_file(tmp_path):
    """What identifies rows is their values: they may lie in memory, or in a file that is mapped."""
    x = bits(90).astype(float)
    x[::7, 2] = np.nan
    np.save(tmp_path / "x.npy", x)
    fit(small_vae(), {"x": x}, steps=5, out=tmp_path / "run")
    assert (
        fit(small_vae(), {"x": tmp_path / "x.npy"}, steps=9, out=tmp_path / "run", resume=True).step
        == 9
    )
    x[7, 2] = 0.0
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(CheckpointError, match="was trained on other data"):
        fit(small_vae(), {"x": tmp_path / "x.npy"}, steps=12, out=tmp_path / "run", resume=True)


def test_a_run_whose_weights_lie_across_is_resumed_bit_for_bit(tmp_path):
    def stop(step, model):
        signal.raise_signal(signal.SIGTERM)

    choices = {"validation": {"x": bits()}, "steps": 20, "validate_every": 10}
    whole = fit(across(small_vae()), {"x": bits()}, **choices).model
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        fit(across(small_vae()), {"x": bits()}, out=tmp_path, after=stop, **choices)
    assert latest(tmp_path).step < 20
    resumed = fit(across(small_vae()), {"x": bits()}, out=tmp_path, resume=True, **choices).model
    assert_equal_weights(weights(whole), weights(resumed))
