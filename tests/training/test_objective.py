"""What is added to the bound: labels that are known teach q, and a class stays when its image is
distorted.
"""

import math
import signal
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_runs import assert_equal_weights, bits, small_vae, weights

from aevb import GRU, Bernoulli, Deterministic, Model, Normal, OneHot, fit
from aevb.data import Affine
from aevb.training.gradient_steps import GradientSteps as Stepper
from aevb.training.objective import Objective
from aevb.training.run import Run
from aevb.training.settings import Settings
from aevb.zoo import gmvae, m2

# Labels -------------------------------------------------------------------------------------------


def test_classification_teaches_q_what_clamped_rows_do_not():
    x, y = bits(60), np.array([0, 1, 2] * 20)
    found = {}
    for weight in (0.0, 5.0):
        torch.manual_seed(0)
        model = m2(x=6, z=2, y=3, hidden=(8,))
        before = {name: tensor for name, tensor in weights(model).items() if "q(y|x)" in name}
        fit(model, {"x": x, "y": y}, steps=30, batch=30, lr=1e-2, classify=weight)
        found[weight] = any(
            not torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items()
        )
    assert found == {0.0: False, 5.0: True}


def test_labels_in_time_are_classified_whatever_the_order_of_the_data():
    random = np.random.default_rng(0)
    labels = random.integers(2, size=60)
    x = random.normal(size=(60, 4, 1)) + 3 * (2 * labels - 1)[:, None, None]

    def trained(**data):
        torch.manual_seed(0)
        model = Model(
            p={"y": OneHot(2), "z": Normal(1), "x[t] | y, z": Normal(1)},
            q={"h[t] | h[t-1], x[t]": GRU(8), "y | h[T]": OneHot(), "z | h[T]": Normal()},
        )
        fit(model, data, steps=100, lr=0.02, batch=60, classify=10.0)
        return model

    first, second = trained(x=x, y=labels), trained(y=labels, x=x)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert (first.posterior(x=x)["y"].probs.argmax(-1).numpy() == labels).all()


def test_classification_and_agreement_compute_nothing_that_reads_a_latent():
    """p's h is a function of latents, and q's f and g one of the data and one of a latent; both
    terms need f alone.
    """
    torch.manual_seed(0)
    model = Model(
        p={"y": OneHot(3), "z": Normal(2), "h | y, z": Deterministic(4), "x | h": Bernoulli(64)},
        q={
            "f | x": Deterministic(5),
            "y | f": OneHot(),
            "g | y": Deterministic(2),
            "z | f, g": Normal(),
        },
    )
    x, labels = torch.as_tensor(images(), dtype=torch.float32), torch.arange(40) % 4 - 1
    fit(
        model,
        {"x": x, "y": labels},
        steps=2,
        batch=40,
        classify=1.0,
        agree=1.0,
        distort={"x": Affine((8, 8))},
    )
    objective = Objective(
        model, model.plan(), SimpleNamespace(like=x), 40, Settings(), ["y"], ["y"], None
    )
    log_q = model.factors["q(y|f)"]({"f": model.factors["q(f|x)"]({"x": x})}).log_softmax(-1)
    known = labels >= 0
    batch = model.prepare(x=x, y=labels)
    torch.testing.assert_close(objective._classification(batch), log_q[known, labels[known]].sum())
    target = torch.where(
        known[:, None], torch.nn.functional.one_hot(labels.clamp_min(0), 3), log_q.exp().detach()
    )
    torch.testing.assert_close(objective.agreement(batch, batch), (target * log_q).sum())


def test_classification_refuses_a_class_that_reads_a_latent_through_a_function():
    model = Model(
        p={"y": OneHot(3), "z": Normal(2), "x | y, z": Bernoulli(64)},
        q={"z | x": Normal(), "g | z": Deterministic(2), "y | g": OneHot()},
    )
    with pytest.raises(ValueError, match="as a function of the data alone, but it reads 'z'"):
        fit(model, {"x": images(), "y": np.zeros(40, int)}, steps=1, classify=1.0)


def test_the_agreement_of_a_root_of_q_counts_every_row():
    torch.manual_seed(0)
    model = Model({"y": OneHot(3), "x | y": Bernoulli(64)}, {"y": OneHot(learned=True)})
    batch = model.prepare(x=images())
    objective = Objective(
        model, model.plan(), SimpleNamespace(like=batch["x"]), 40, Settings(), [], ["y"], None
    )
    torch.testing.assert_close(objective.agreement(batch, batch), torch.tensor(-40 * math.log(3)))


# A class that stays when the image is distorted ---------------------------------------------------


def clusters(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return gmvae(64, 2, 3, hidden=(8,)).double()


def images(n: int = 40) -> np.ndarray:
    return (np.random.default_rng(0).random((n, 64)) > 0.6).astype(float)


def test_a_distortion_of_nothing_is_nothing_and_a_shift_shifts():
    rows = torch.as_tensor(images(5))
    still = Affine((8, 8), rotate=0, shear=0, scale=0, shift=0)
    draws = torch.rand(5, 6, dtype=torch.float64)
    torch.testing.assert_close(still(rows, draws, binary=False), rows)
    draws = torch.zeros(5, 6, dtype=torch.float64)
    draws[:, 4] = 1
    moved = Affine((8, 8), shift=1 / 8)(rows, draws, binary=False).reshape(5, 8, 8)
    # a column to the left
    torch.testing.assert_close(moved[:, :, :7], rows.reshape(5, 8, 8)[:, :, 1:])
    draws = torch.zeros(5, 6, dtype=torch.float64)
    draws[:, 0] = 1
    turned = Affine((8, 8), rotate=np.pi / 2)(rows, draws, binary=True).reshape(5, 8, 8)
    assert torch.equal(turned, rows.reshape(5, 8, 8).rot90(1, (1, 2)))


def test_agreement_is_the_cross_entropy_with_the_distorted_image(monkeypatch):
    seen = []
    real = Stepper._distorted
    monkeypatch.setattr(
        Stepper,
        "_distorted",
        lambda self, batch: (seen.append((self, batch)), real(self, batch))[1],
    )
    model = clusters()
    labels = np.where(np.arange(40) < 10, 1, -1)
    fit(
        model,
        {"x": images(), "y": labels},
        steps=1,
        batch=40,
        agree=2.0,
        distort={"x": Affine((8, 8))},
    )
    stepper, batch = seen[0]
    stepper.drawing.manual_seed(5)
    total = stepper.objective.agreement(batch, batch | real(stepper, batch))
    stepper.drawing.manual_seed(5)
    x = batch["x"][0]
    moved = Affine((8, 8))(x, Affine((8, 8)).draws(40, stepper.drawing, x), binary=True)
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    q = model.factors["q(y|x)"]
    here, there = (q({"x": rows}).log_softmax(-1) for rows in (x, moved))
    target = torch.where(batch["y?"][0], batch["y"][0], here.exp()).detach()
    torch.testing.assert_close(total, (target * there).sum())
    mine = torch.autograd.grad(total, model.phi(), allow_unused=True)
    expected = torch.autograd.grad((target * there).sum(), model.phi(), allow_unused=True)
    for a, b in zip(mine, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_a_run_with_distortions_resumes_bit_for_bit(tmp_path):
    settings = {
        "steps": 20,
        "agree": 1.0,
        "distort": {"x": Affine((8, 8), rotate=0.1)},
        "batch": 16,
    }
    whole, part = clusters(), clusters()
    fit(whole, {"x": images()}, **settings)

    def stop(step, model):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(
            part,
            {"x": images()},
            out=tmp_path,
            validation={"x": images()},
            validate_every=7,
            after=stop,
            **settings,
        )
    resumed = clusters(seed=3)
    fit(resumed, {"x": images()}, out=tmp_path, resume=True, **settings)
    assert_equal_weights(weights(whole), weights(resumed))
    assert tomllib.loads((tmp_path / "config.toml").read_text())["distort"] == {
        "x": [8, 8, 0.1, 0.3, 0.12, 0.06]
    }
    assert Run.load(tmp_path).settings.distort == settings["distort"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agree": 1.0}, "Set both, or neither"),
        ({"distort": {"x": Affine((8, 8))}}, "Set both, or neither"),
        (
            {"agree": 1.0, "distort": {"x": Affine((4, 4))}},
            r"images of shape \(4, 4\) for 'x', which is no observed variable of that size",
        ),
        (
            {"agree": 1.0, "distort": {"z": Affine((1, 2))}},
            "for 'z', which is no observed variable",
        ),
        ({"agree": -1.0}, "agree is a weight, 0 or more"),
        (
            {"agree": 1.0, "distort": {"x": "affine"}},
            "distort is a dictionary from variable to distortion",
        ),
    ],
)
def test_distortions_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(clusters(), {"x": images()}, steps=1, **settings)


def test_agreement_needs_a_class():
    with pytest.raises(
        ValueError, match=r"agree= needs q\(y\|x\) of a OneHot latent without a time index"
    ):
        fit(small_vae(), {"x": bits()}, steps=1, agree=1.0, distort={"x": Affine((2, 3))})
