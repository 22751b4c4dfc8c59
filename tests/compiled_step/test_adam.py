"""Adam by its kernel, by its formula, and torch's own are one."""

import numpy as np
import pytest
import torch
from compiled_runs import data, gmvae, partly_frozen, vae

from aevb import Model, Normal, OneHot, alternate, em, fit, mlp
from aevb.compiled_step import adam
from aevb.compiled_step.adam import Adam
from aevb.training import gradient_steps as stepping


def mixture():
    return Model({"y": OneHot(3), "x | y": Normal(16, net=mlp(4))}, {"y | x": OneHot(net=mlp(4))})


@pytest.mark.parametrize(
    ("build", "more", "settings"),
    [
        (vae, {}, {}),
        (vae, {}, {"clip": 0.1}),
        (vae, {}, {"schedule": alternate(5, 7)}),
        (gmvae, {"y": np.arange(60) % 3}, {}),  # what nothing teaches does not move
        (partly_frozen, {}, {"schedule": alternate(3, 4)}),
        (mixture, {}, {"schedule": em(5)}),
    ],
)
def test_adam_by_its_kernel_is_torchs_adam_also_after_a_break(
    tmp_path, monkeypatch, build, more, settings
):
    x = (
        data().reshape(60, 4, 4)
        if build is partly_frozen
        else data() + 0.1 * torch.arange(60.0).unsqueeze(1)
        if build is mixture
        else data()
    )
    found = []
    for name in ("ours", "torch's"):
        steppers, begin = [], stepping.GradientSteps.__init__
        with monkeypatch.context() as patch:
            patch.setattr(
                stepping.GradientSteps,
                "__init__",
                lambda self, *args, begin=begin, made=steppers: (
                    begin(self, *args),
                    made.append(self),
                )[0],
            )
            if name == "torch's":
                patch.setattr(Adam, "update", by_torch)
            torch.manual_seed(0)
            model = build()
            for steps in (20, 47):
                fit(
                    model,
                    {"x": x, **more},
                    steps=steps,
                    batch=20,
                    seed=1,
                    out=tmp_path / name,
                    resume=steps > 20,
                    decay="constant",
                    **settings,
                )
        found.append((dict(model.state_dict()), steppers[-1].state()))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def by_torch(self, parameters, gradients, failed=None):
    """A step by torch's optimiser, from the state that is there."""
    optimizer = torch.optim.Adam(parameters, lr=self.rate, fused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
        optimizer.state[parameter] = {
            key: value.clone() for key, value in self.state.get(parameter, {}).items()
        }
    optimizer.step()
    for parameter in parameters:
        self.state[parameter] = optimizer.state[parameter]
        parameter.grad = None


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator, dtype=dtype))
        for size in ((5, 4), (3,), (), (2, 2, 2))
    ]


def gradients(step):
    return [
        torch.cos(step + torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape)
        for p in parameters()
    ]


def test_the_formula_is_the_kernel(monkeypatch):
    found = []
    for devices in (adam.FUSED, ()):
        monkeypatch.setattr(adam, "FUSED", devices)
        moving, optimiser = parameters(), Adam(0.1)
        for step in range(5):
            optimiser.update(moving, gradients(step))
        found.append((moving, list(optimiser.state.values())))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("devices", [adam.FUSED, ()])
def test_what_has_failed_does_not_move_and_is_not_counted(monkeypatch, devices):
    monkeypatch.setattr(adam, "FUSED", devices)
    found = []
    for steps in ([0, 1, 2], [0, -1, 1, -1, 2]):
        moving, optimiser = parameters(), Adam(0.1)
        for step in steps:
            bad = [torch.full_like(g, torch.nan) for g in gradients(0)]
            optimiser.update(
                moving, bad if step < 0 else gradients(step), torch.tensor(float(step < 0))
            )
        found.append((moving, list(optimiser.state.values())))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_parameter_that_comes_later_is_counted_by_itself():
    moving, optimiser = parameters(), Adam(0.1)
    for count in (2, 2, 2, 4, 1, 4):
        optimiser.update(moving[:count], gradients(0)[:count])
    assert [int(optimiser.state[parameter]["step"]) for parameter in moving] == [6, 5, 2, 2]


def test_steps_that_are_shared_are_counted_once_also_where_the_host_does_not_look():
    moving, optimiser = parameters(), Adam(0.1)
    optimiser.update(moving, gradients(0))
    optimiser.update(moving, gradients(1), torch.zeros(()))
    assert {float(state["step"]) for state in optimiser.state.values()} == {2.0}


def test_nothing_moves_where_nothing_is_to():
    optimiser = Adam(0.1)
    optimiser.update([], [])
    assert optimiser.state == {}
