"""Devices: which one a name means, what is said if it is not here, and how a run moves there.

There is no GPU here. Availability is patched, so these tests say nothing about the numbers that a
GPU computes.
"""

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from aevb import Model, Normal, OneHot, Settings, fit, mle, mlp, zoo
from aevb.runtime import devices
from aevb.training import devices as training_devices
from aevb.training import evaluation, events
from aevb.training.gradient_steps import GradientSteps


def small() -> Model:
    torch.manual_seed(0)
    return Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal(net=mlp(4))})


X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "cuda_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def an_apple(monkeypatch):
    monkeypatch.setattr(devices, "mps_is_here", lambda: True)


def test_a_name_is_a_device_that_is_here(two_gpus, an_apple, monkeypatch):
    assert devices.available_devices() == ["cuda:0", "cuda:1", "mps", "cpu"]
    for name, index in (("cuda", 0), ("cuda:1", 1)):
        assert devices.device_named(name) == torch.device("cuda", index)
    for name in ("cpu", "mps"):
        assert devices.device_named(name) == torch.device(name)
    assert devices.device_named(torch.device("cuda:1")) == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun gives each process a GPU of its own
    assert devices.device_named("cuda") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"this is process 2 \(from 0\), but torch finds cuda:0"):
        devices.device_named("cuda")
    with pytest.raises(ValueError, match="no device 'cuda:2' here.*finds cuda:0, cuda:1, mps, cpu"):
        devices.device_named("cuda:2")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("cuda", r"no device 'cuda' here.*; torch finds cpu. Use device='cpu'."),
        ("cuda:1", "no device 'cuda:1' here"),
        (torch.device("mps"), r"no device 'mps' here \(MPS needs an Apple GPU\); torch finds cpu"),
        ("gpu", "device='gpu' is not a device .* torch finds cpu here. Did you mean 'cuda'?"),
        ("meta", "device='meta' is not a device that a model is trained on"),
        (3, "A device is a name, such as device='cpu'"),
    ],
)
def test_a_device_that_is_not_here_is_refused_and_named(asked, message):
    if devices.cuda_count() or devices.mps_is_here():
        pytest.skip("this machine has a GPU")
    model = small()
    with pytest.raises(ValueError, match=message):
        fit(model, {"x": X}, steps=1, device=asked)
    if asked in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=rf"no device '{asked}' here.*Use \.to\('cpu'\)"):
            model.to(asked)


def test_a_run_moves_its_model_and_leaves_it_there(monkeypatch):
    """The model of several seeds is a pattern, and stays where it is."""
    moved = []
    to = Model.to
    monkeypatch.setattr(Model, "to", lambda self, *a, **k: moved.append((self, *a)) or to(self, *a))
    model = small()
    run = fit(model, {"x": X}, steps=1, device=torch.device("cpu"))
    assert moved == [(model, torch.device("cpu"))]
    assert run.model is model
    moved.clear()
    runs = fit(model, {"x": X}, steps=1, seeds=2, device="cpu")
    asked = [(one, *place) for one, *place in moved if place == [torch.device("cpu")]]
    assert asked == [(run.model, torch.device("cpu")) for run in runs]
    moved.clear()
    fit(model, {"x": X}, steps=1)
    assert moved == []


def test_auto_takes_cuda_then_mps_then_the_cpu(monkeypatch):
    model, settings = small(), Settings(steps=5)

    def chosen() -> str:
        return str(training_devices.device_for(model, "auto", settings)[0])

    monkeypatch.setattr(devices, "cuda_count", lambda: 0)
    assert chosen() == "cpu"
    monkeypatch.setattr(devices, "mps_is_here", lambda: True)
    monkeypatch.setattr(training_devices, "why_not_on", lambda *_: None)
    assert chosen() == "mps"
    monkeypatch.setattr(devices, "cuda_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert chosen() == "cuda:0"


def test_auto_avoids_a_gpu_on_which_two_steps_fail(monkeypatch, an_apple):
    monkeypatch.setattr(devices, "cuda_count", lambda: 0)

    def lacks(self, *_):
        raise NotImplementedError("The operator 'aten::_standard_gamma' is not on this device.\nX")

    real = training_devices.why_not_on
    with monkeypatch.context() as patch:
        patch.setattr(GradientSteps, "inputs", lacks)
        reason = real(torch.device("cpu"), small(), Settings())
    assert reason == "The operator 'aten::_standard_gamma' is not on this device"
    monkeypatch.setattr(training_devices, "why_not_on", lambda *_: reason)
    run = fit(small(), {"x": X}, steps=2, device="auto")
    assert str(run.model._parameter().device) == "cpu"
    (event,) = events.events(run.rows, events.DEVICE)
    assert event.text.startswith('device="auto" trains on the CPU, because two steps on MPS failed')
    assert reason in event.text


MODELS = {
    "vae": lambda: zoo.vae(4, 2, hidden=(4,)),
    "cvae": lambda: zoo.cvae(4, 2, hidden=(4,)),
    "vrnn": lambda: zoo.vrnn(2, 2, hidden=(4,)),
    "given in time": lambda: Model(
        {"y": OneHot(2), "x[t] | x[t-1], u[t], y": Normal(1)}, {"y | u[0]": OneHot()}, {"u": 2}
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_trial_succeeds_where_training_does_and_changes_nothing(name):
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert training_devices.why_not_on(torch.device("cpu"), model, Settings(patience=3)) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.untouched()


def test_the_trial_has_the_schedule_of_the_run():
    reason = training_devices.why_not_on(torch.device("cpu"), small(), Settings(schedule=mle()))
    assert reason is not None
    assert reason.startswith("mle() ascends the exact evidence, which is not known")


class WideOperations(TorchDispatchMode):
    """Record which files of the library compute in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(getattr(one, "dtype", None) is torch.float64 for one in tree_flatten(out)[0]):
            frames = [f.filename for f in traceback.extract_stack() if "/aevb/" in f.filename]
            self.files.add(frames[-1].rpartition("/aevb/")[2])
        return out


@pytest.mark.parametrize("name", ["vae", "gmvae", "vrnn"])
def test_steps_and_validations_need_no_float64(name, monkeypatch):
    """MPS has no float64. Only what is computed on the CPU, before or after a step, uses it."""
    monkeypatch.setattr(evaluation, "wide", lambda value: value)
    model = zoo.zoo[name](4, 2)
    rows = training_devices._rows(model)
    with WideOperations() as wide:
        fit(model, rows, validation=rows, steps=3, batch=2, validate_every=2, progress=False)
    assert wide.files <= {
        "data/markers.py",  # moves the numbers to the CPU first
        "data/short_series.py",
        "data/unscaled.py",
        "posterior/training_record.py",  # by devices.wide, or moves them first
        "runtime/devices.py",
        "training/starting_notes.py",  # numbers of rows
    }
