"""Training by particles: the bound rises, resumed runs are equal, validation has the same bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import assert_equal_weights, weights

from aevb import LSTM, Bernoulli, Model, Normal, Settings, diagnose, fit, mlp
from aevb.training.row_order import seed_of

CHOICES = {"bound": "particles", "samples": 4}


def small_vrnn() -> Model:
    torch.manual_seed(0)
    return Model(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(8),
            "z[t] | h[t]": Normal(2, net=mlp(8)),
            "x[t] | h[t], z[t]": Bernoulli(6, net=mlp(8)),
        },
        {"z[t] | h[t], x[t]": Normal(net=mlp(8))},
    )


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    """Ragged sequences whose entries copy the step before."""
    draw = np.random.default_rng(0)
    x = np.zeros((90, 7, 6), np.float32)
    x[:, 0] = draw.random((90, 6)) < 0.5
    for t in range(1, 7):
        x[:, t] = np.where(draw.random((90, 6)) < 0.9, x[:, t - 1], draw.random((90, 6)) < 0.5)
    return {"x": x, "lengths": draw.integers(2, 8, 90)}


class StopRunError(Exception):
    """Stops a run between two steps."""


def some(rows: dict, n: slice) -> dict:
    return {name: value[n] for name, value in rows.items()}


@pytest.mark.parametrize("gradient", ["plain", pytest.param("score", marks=pytest.mark.slow)])
def test_a_run_raises_the_bound_and_validates_by_it(rows, gradient):
    model = small_vrnn()
    train, held_out = some(rows, slice(70)), some(rows, slice(70, 90))
    start = float(
        model.elbo(gradient=gradient, seed=0, **CHOICES, **held_out).value.detach().mean()
    )
    run = fit(
        model, train, validation=held_out, steps=150, batch=35, lr=0.02, seed=3,
        validate_every=75, gradient=gradient, **CHOICES,
    )  # fmt: skip
    history = run.history["validation particles"]
    assert history[-1] > start + 2
    assert {"particles", "x", "kl(z)", "validation x"} <= run.history.keys()
    # the last validation, computed anew with its noise
    batch = model.prepare(**held_out)
    plan = model.plan(gradient=gradient, **CHOICES)
    noise = model.draw_noise(plan, batch, seed=seed_of(3, "evaluation", 0))
    model.eval()
    found = model.elbo(noise=noise, gradient=gradient, **CHOICES, **held_out)
    assert float(found.value.detach().double().mean()) == pytest.approx(history[-1], abs=1e-5)
    exact = model.log_evidence(method="particles", samples=500, seed=0, **held_out)
    assert float(exact.value.mean()) > history[-1]


def test_a_resumed_run_is_bit_equal(rows, tmp_path):
    def train(out, **more):
        model = small_vrnn()
        fit(
            model, rows, validation=some(rows, slice(9)), steps=24, batch=30, lr=0.01, seed=1,
            resample=0.8, kl_warmup=5, checkpoint_every=6, out=tmp_path / out, **CHOICES, **more,
        )  # fmt: skip
        return weights(model)

    def stop(step, model):
        if step >= 14:
            raise StopRunError

    whole = train("whole")
    with pytest.raises(StopRunError):
        train("part", after=stop)
    assert not all(torch.equal(value, whole[name]) for name, value in weights(small_vrnn()).items())
    assert_equal_weights(whole, train("part", resume=True))
    assert Settings.from_toml(tmp_path / "part" / "config.toml").resample == 0.8


def test_seeds_train_as_runs_alone(rows):
    alone = small_vrnn().fresh(5)
    fit(alone, rows, steps=4, batch=30, seed=5, **CHOICES)
    model = small_vrnn()
    runs = fit(model, rows, steps=4, batch=30, seeds=[5, 6], **CHOICES)
    assert_equal_weights(weights(alone), weights(runs[0].model))


def test_weights_of_the_kl_are_those_of_the_objective(rows):
    run = fit(small_vrnn(), rows, validation=some(rows, slice(20)), steps=4, beta=0.5, **CHOICES)
    assert "objective" in run.history
    assert (run.history["objective"] != run.history["particles"]).all()
    assert "validation objective" in run.history


def test_what_training_refuses(rows):
    with pytest.raises(ValueError, match='bound="particles" has no KL terms'):
        fit(small_vrnn(), rows, steps=1, free_bits=0.5, **CHOICES)
    with pytest.raises(ValueError, match='resample= is for bound="particles"'):
        fit(small_vrnn(), rows, steps=1, resample=0.5)
    with pytest.raises(ValueError, match="resample is a share of the particles, from 0 to 1"):
        Settings(bound="particles", resample=-1)


def test_a_diagnosis_tells_that_the_gradient_is_biased(rows):
    for gradient, told in (("plain", True), ("score", False)):
        model = small_vrnn()
        run = fit(model, rows, steps=20, gradient=gradient, **CHOICES)
        found = diagnose(model, some(rows, slice(20)), run=run, calibrate=False)
        texts = [finding.text for finding in found.findings if finding.kind == "biased estimator"]
        assert bool(texts) == told
        assert all("leaves out how the chosen ancestors and steps" in text for text in texts)


@pytest.mark.slow
def test_missing_values_that_p_reads_are_drawn(rows):
    """The trained model explains complete rows better than before, and the run tells the bias."""
    gappy = {"x": rows["x"].copy(), "lengths": rows["lengths"]}
    gappy["x"][np.random.default_rng(1).random((90, 7)) < 0.3] = np.nan
    model = small_vrnn()
    start = model.log_evidence(method="particles", samples=200, seed=0, **rows).value.mean()
    run = fit(
        model, gappy, validation=some(gappy, slice(20)), steps=150, batch=45, lr=0.02, seed=0,
        validate_every=150, **CHOICES,
    )  # fmt: skip
    end = model.log_evidence(method="particles", samples=200, seed=0, **rows).value.mean()
    assert end > start + 1
    (note,) = (row["note"] for row in run.rows if row.get("kind") == "biased gradient")
    assert note.startswith("Missing values of x are drawn from p. A Bernoulli draw has no gradient")
    with pytest.raises(ValueError, match="x has missing entries that p reads.*Ask for samples=2"):
        fit(small_vrnn(), gappy, steps=1)


def test_the_exact_evidence_is_reported_where_p_reads_missing_values():
    def walk():
        torch.manual_seed(0)
        return Model(
            {
                "z[t] | z[t-1]": Normal(1, scale=0.5),
                "x[t] | x[t-1], z[t]": Normal(1, scale=0.5),
            },
            {"z[t] | z[t-1], x[t]": Normal()},
        )

    x = walk().sample(30, steps=5, seed=0)["x"]
    for missing in (False, True):
        if missing:
            x[0, 2] = torch.nan
        run = fit(walk(), {"x": x}, validation={"x": x}, steps=4, **CHOICES)
        assert run.history["validation evidence"][-1] > run.history["validation particles"][-1]
    exact = walk().log_evidence(x=x, method="exact").value.mean()
    estimated = walk().log_evidence(x=x, method="particles", samples=500, seed=0).value.mean()
    assert abs(exact - estimated) < 0.05
