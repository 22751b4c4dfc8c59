"""torch's own LSTM and GRU give the values and gradients of the loop over time."""

import pytest
import torch

from aevb import GRU, LSTM, Deterministic, Model, Normal, fit, linear, mlp
from aevb.estimate import fused_recurrence, loop
from aevb.estimate.batch import prepare, split_latents
from aevb.estimate.before import Before, shapes_before
from aevb.estimate.estimators import Estimate

T, N = 9, 6
Z = {"z[t] | h[t]": Normal(2, net=mlp(4)), "x[t] | h[t], z[t]": Normal(3)}
Q = {"z[t] | h[t], x[t]": Normal()}
CELLS = [LSTM(5), GRU(5), LSTM(4, layers=3), GRU(4, layers=2)]
MODELS = {
    "the past of the data": lambda cell: Model({"h[t] | h[t-1], x[t-1]": cell} | Z, Q),
    "two inputs": lambda cell: Model(
        {"h[t] | h[t-1], x[t-1], u[t], s": cell} | Z, Q, given={"u": 2, "s": 3}
    ),
    "a declared first state": lambda cell: Model(
        {"h[t] | h[t-1], x[t-1]": cell, "h[0] | s": Deterministic(cell.size, net=linear())} | Z,
        Q,
        given={"s": 2},
    ),
    "backward": lambda cell: Model(
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(3)},
        {"b[t] | b[t+1], x[t]": cell, "z[t] | z[t-1], b[t]": Normal()},
    ),
    "backward, with a first step": lambda cell: Model(
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(3)},
        {
            "b[t] | b[t+1], x[t]": cell,
            "b[0] | x[0]": Deterministic(cell.size),
            "z[t] | z[t-1], b[t]": Normal(),
        },
    ),
    "backward, of the future": lambda cell: Model(
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(3)},
        {"b[t] | b[t+1], x[t+1]": cell, "z[t] | z[t-1], b[t]": Normal()},
    ),
    "masks of missing entries": lambda cell: Model(
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(3)},
        {"b[t] | b[t+1], x[t]": cell, "z[t] | z[t-1], b[t]": Normal()},
        missing="mask",
    ),
    # The states of q's draws have an axis of samples.
    "samples": lambda cell: Model(
        {"c[t]": Normal(2), "h[t] | h[t-1], c[t]": cell, "x[t] | h[t]": Normal(3)},
        {"c[t] | x[t]": Normal()},
    ),
}


def batch_of(model: Model, kind: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    data = {"x": torch.randn(N, T, 3, generator=random)}
    for name, (size,) in model.graph.given.items():
        timed = [T] if model.graph.timed[name] else []
        data[name] = torch.randn(N, *timed, size, generator=random)
    if model.missing == "mask":
        data["x"][0, 3] = data["x"][2, 4:6, 1] = torch.nan
    lengths = torch.tensor([9, 1, 4, 5, 9, 8]) if kind == "ragged" else None
    return prepare(model.graph, data, like=model._parameter(), lengths=lengths)


def estimated(model, plan, batch, noise, monkeypatch, shortest, before=None):
    monkeypatch.setattr(fused_recurrence, "LONG", shortest)
    calls = []
    real = loop.fused
    monkeypatch.setattr(loop, "fused", lambda *a: (calls.append(1), real(*a))[1])
    found = Estimate(plan, model.factors, batch, noise, before=before)
    value = found.bound().value
    gradients = torch.autograd.grad(
        value.sum(), list(model.parameters()), allow_unused=True, retain_graph=True
    )
    monkeypatch.undo()
    return value, gradients, found, calls


@pytest.mark.parametrize("kind", ["full", "ragged"])
@pytest.mark.parametrize("cell", CELLS, ids=repr)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_the_loop(name, cell, kind, dtype, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name](cell).to(dtype)
    for label, parameter in model.named_parameters():
        if ".missing." in label:
            torch.nn.init.normal_(parameter)
    batch = batch_of(model, kind)
    clamped, partial = split_latents(model.graph, batch)
    plan = model.plan(samples=2, clamped=clamped, partial=partial)
    noise = model.draw_noise(plan, batch, seed=0)
    value, gradients, there, none = estimated(model, plan, batch, noise, monkeypatch, 10**9)
    again, others, here, calls = estimated(model, plan, batch, noise, monkeypatch, 2)
    assert not none
    assert bool(calls) == (name != "backward, of the future")
    close = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.float64: {"rtol": 0, "atol": 1e-11}}
    torch.testing.assert_close(again, value, **close[dtype])
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient, **close[dtype])
    for node, expected in there.program.values.items():
        found = here.program.values[node].expand(expected.shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cell", CELLS, ids=repr)
@pytest.mark.parametrize("name", ["the past of the data", "two inputs", "a declared first state"])
@pytest.mark.parametrize("start", [True, False])
def test_windows_continue_from_the_state_before(name, cell, start, monkeypatch):
    torch.manual_seed(0)
    model = MODELS[name](cell).double()
    batch = batch_of(model, "ragged")
    plan = model.plan()
    noise = model.draw_noise(plan, batch, seed=0)
    values = {
        key: torch.randn(shape, dtype=torch.float64)
        for key, shape in shapes_before(plan, batch, model.factors).items()
    }
    before = Before.of(torch.full((1, 1, 1), start), values)
    found = [
        estimated(model, plan, batch, noise, monkeypatch, shortest, before)
        for shortest in (10**9, 2)
    ]
    (value, _, there, _), (again, _, here, calls) = found
    assert calls
    torch.testing.assert_close(again, value, rtol=0, atol=1e-11)
    going_on = batch["steps"][-1, :, 0]
    for key, expected in there.after().items():
        torch.testing.assert_close(
            here.after()[key][..., going_on, :], expected[..., going_on, :], rtol=0, atol=1e-11
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a module that torch imports
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="recorded"),
        pytest.param({"compile": True}, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_a_recorded_step_runs_torchs_recurrence(settings, monkeypatch, soon):
    monkeypatch.setattr(fused_recurrence, "LONG", 2)
    random = torch.Generator().manual_seed(0)
    x, found = torch.randn(40, T, 3, generator=random), []
    for compile in (None, settings):
        torch.manual_seed(0)
        model = MODELS["backward"](LSTM(5))
        if compile is None:
            monkeypatch.setattr("aevb.training.gradient_steps.RECORD_FOR", 10**9)
        run = fit(model, {"x": x}, steps=12, batch=10, **({"compile": False} | (compile or {})))
        monkeypatch.setattr("aevb.training.gradient_steps.RECORD_FOR", 0)
        assert not [row["note"] for row in run.rows if "note" in row]
        found.append(model)
    for name, tensor in found[0].state_dict().items():
        exact = {"rtol": 0, "atol": 0} if not settings else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found[1].state_dict()[name], tensor, **exact)
