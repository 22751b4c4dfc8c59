"""The end of a step: the gradient's norm, the judgement, Adam."""

import math
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from compiled_runs import as_written, compiles, data, vae

from aevb.compiled_step import fused_adam as flat
from aevb.compiled_step import recording
from aevb.training import gradient_steps
from aevb.training.loop import Training
from aevb.training.settings import Settings

SHAPES = ((5, 4), (3,), (7,), (2, 2), (2, 3, 2), ())


def begun(dtype, lr=0.1):
    """Parameters and Adam after a first step."""
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    adam = torch.optim.Adam(parameters, lr=lr)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    return parameters, adam


def alike(mine, theirs):
    """The same numbers, apart from each other."""
    (parameters, adam), (others, other) = mine, theirs
    for a, b in zip(parameters, others, strict=True):
        b.data = a.data.clone()
        other.state[b] = {key: value.clone() for key, value in adam.state[a].items()}


def counts(dtype):
    return torch.zeros(()), torch.zeros(3, dtype=dtype), torch.zeros(()), torch.zeros(())


def moving(kind, parameters, adam):
    return (
        flat.Vector((parameters, adam), remarks=[])
        if kind == "vector"
        else flat.Parts(parameters, adam, [])
    )


@pytest.mark.parametrize("kind", ["vector", "parts"])
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_end_of_a_step_is_torchs_adam_and_leaves_a_bad_step_out(
    kind, clip, dtype, tolerance, monkeypatch
):
    monkeypatch.setattr(flat, "compiled", as_written)
    steps_are_adams(kind, clip, dtype, tolerance)


@compiles
@pytest.mark.parametrize("kind", ["vector", pytest.param("parts", marks=pytest.mark.slow)])
def test_compiled_it_is_too(kind):
    steps_are_adams(kind, 0.7, torch.float64, 1e-12)


def steps_are_adams(kind, clip, dtype, tolerance):
    torch.manual_seed(0)
    (mine, holder), (theirs, adam) = begun(dtype), begun(dtype)
    alike((mine, holder), (theirs, adam))
    ours = moving(kind, mine, holder)
    bad, sums, taken, moved = counts(dtype)
    rate, total, measured = (
        torch.tensor(0.1, dtype=dtype),
        torch.tensor(-3.0, dtype=dtype),
        torch.tensor([2.0, 5.0], dtype=dtype),
    )
    norms = []
    for _ in range(7):
        gradients = [torch.randn_like(parameter) for parameter in mine]
        ours.finish(
            dict(zip(mine, gradients, strict=True)),
            rate,
            clip,
            total,
            measured,
            (bad, sums, taken, moved),
        )
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        norms.append(
            torch.nn.utils.clip_grad_norm_(theirs, math.inf if clip is None else clip).item()
        )
        adam.step()
    assert (bad.item(), taken.item(), moved.item()) == (0, 7, 7)
    torch.testing.assert_close(
        sums, torch.tensor([14.0, 35.0, sum(norms)], dtype=dtype), rtol=tolerance, atol=0
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        for key in ("step", "exp_avg", "exp_avg_sq"):  # what a checkpoint holds
            torch.testing.assert_close(
                holder.state[a][key], adam.state[b][key], rtol=tolerance, atol=tolerance
            )

    kept = [
        tensor.clone()
        for tensor in (*mine, *(value for a in mine for value in holder.state[a].values()))
    ]
    for spoilt, objective in (
        (torch.nan, -3.0),
        (1.0, math.inf),
        (1.0, -3.0),
    ):  # the last is good, but nobody has looked
        gradients = [torch.full_like(parameter, spoilt) for parameter in mine]
        ours.finish(
            dict(zip(mine, gradients, strict=True)),
            rate,
            clip,
            torch.tensor(objective, dtype=dtype),
            measured,
            (bad, sums, taken, moved),
        )
        assert (bad.item(), taken.item(), moved.item()) == (1, 7, 7)
    for before, after in zip(
        kept, (*mine, *(value for a in mine for value in holder.state[a].values())), strict=True
    ):
        assert torch.equal(before, after)


@compiles
def test_compiling_leaves_the_arguments_as_they_are():
    torch.manual_seed(0)
    (parameters, adam), dtype = begun(torch.float64), torch.float64
    ours = flat.Parts(parameters, adam, [])
    numbers = torch.tensor(True), torch.tensor(0.1, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    arguments = [
        *ours.values,
        *ours.means,
        *ours.squares,
        *map(torch.ones_like, parameters),
        *numbers,
    ]
    before = [argument.detach().clone() for argument in arguments]
    with torch.no_grad():
        run = flat.compiled(partial(flat._moved, len(parameters)), arguments)
        assert all(map(torch.equal, before, arguments))
        run(list(arguments))
    assert not any(
        map(torch.equal, before[: 3 * len(parameters)], arguments[: 3 * len(parameters)])
    )


def test_what_cannot_be_compiled_runs_uncompiled_and_is_explained(monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(function, arguments):
        raise BackendCompilerFailed(fails, FileNotFoundError("g++"), None)

    monkeypatch.setattr(flat, "compiled", fails)
    parameters, adam = begun(torch.float64)
    before, remarks = [parameter.detach().clone() for parameter in parameters], []
    number = torch.tensor(1.0, dtype=torch.float64)
    gradients = dict(zip(parameters, parameters, strict=True))
    flat.Parts(parameters, adam, remarks).finish(
        gradients, number, None, number, number.expand(2).clone(), counts(torch.float64)
    )
    assert len(remarks) == 1
    assert "torch could not compile a part of the step (" in remarks[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


@pytest.mark.parametrize("most", [2, 48])
def test_of_many_parameters_the_end_is_not_compiled(most, monkeypatch):
    asked = []
    monkeypatch.setattr(gradient_steps, "MOST", most)
    monkeypatch.setattr(
        flat,
        "compiled",
        lambda function, arguments: asked.append(len(arguments)) or as_written(function, arguments),
    )
    run = Training(
        vae(),
        {"x": data()},
        None,
        Settings(steps=10, batch=20, compile=True),
        None,
        False,
        ExitStack(),
    )
    # so that none is made, and none fits
    run.stepper.compiled["joint"] = SimpleNamespace(fits=lambda inputs: False, remarks=[])
    for _ in range(3):
        run._take_step(run.settings.schedule.phase(run.step, 10))
        run.step += 1
    count = len(list(run.model.parameters()))
    assert asked == ([] if most == 2 else [count + 8, 4 * count + 3])


def test_gradients_are_gathered_wherever_they_are():
    torch.manual_seed(0)
    parameters, adam = begun(torch.float64)
    vector = flat.Vector((parameters, adam), remarks=[])
    there, moved, absent = parameters[0], parameters[1], parameters[2]
    found = {parameter: torch.randn_like(parameter) for parameter in parameters}
    vector.gradients[there].copy_(found[there])  # put there already
    vector.gradients[absent].fill_(7.0)
    vector.gather(found | {there: vector.gradients[there], absent: None})
    assert torch.equal(vector.gradients[there], found[there])
    assert torch.equal(vector.gradients[moved], found[moved])
    assert not vector.gradients[absent].any()


def test_gradients_of_parts_lie_as_their_parameters_do():
    torch.manual_seed(0)
    parameters, adam = begun(torch.float64)
    across = torch.randn(4, 5, dtype=torch.float64).t()
    found = {parameter: torch.randn_like(parameter) for parameter in parameters} | {
        parameters[0]: across,
        parameters[2]: None,
    }
    gradients = flat.Parts(parameters, adam, []).gather(found)
    assert [gradient.stride() for gradient in gradients] == [
        parameter.stride() for parameter in parameters
    ]
    assert torch.equal(gradients[0], across)
    assert gradients[1] is found[parameters[1]]
    assert not gradients[2].any()


def test_gradients_in_half_precision_are_read_as_they_come(monkeypatch):
    """The same numbers, to the last bit, as if they were widened first: nothing is written down
    twice.
    """
    monkeypatch.setattr(flat, "compiled", as_written)
    monkeypatch.setattr(recording, "fused", lambda graph, *_, **__: graph)
    found = []
    for as_they_come in (lambda graph, count: None, recording._as_they_come):
        monkeypatch.setattr(recording, "_as_they_come", as_they_come)
        torch.manual_seed(0)
        run = Training(
            vae(),
            {"x": data()},
            None,
            Settings(steps=10, batch=20, compile=True, precision="bf16", clip=0.5),
            None,
            False,
            ExitStack(),
        )
        phase = run.settings.schedule.phase(0, 10)
        for step in range(6):
            run.stepper.step(step, phase, 1e-2)
        *_, gradients = run.stepper.compiled["joint"](run.stepper.inputs(0))
        found.append(
            ({gradient.dtype for gradient in gradients}, run.model.state_dict(), run.stepper.read())
        )
    assert [dtypes for dtypes, *_ in found] == [{torch.float32}, {torch.bfloat16}]
    assert isinstance(run.stepper.moving["joint"], flat.Parts)
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=0)
