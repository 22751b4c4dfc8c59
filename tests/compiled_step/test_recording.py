"""A recorded step is the step: the same numbers to the last bit, whatever is recorded; several runs
together are each alone.
"""

import re
import signal

import numpy as np
import pytest
import torch
from compiled_runs import CASES, data, gmvae, trained, vae, with_counting
from torch import nn

from aevb import (
    Bernoulli,
    Beta,
    Model,
    Normal,
    OneHot,
    alternate,
    em,
    fit,
    joint,
    linear,
    load_run,
    mle,
    mlp,
)
from aevb.compiled_step import recording
from aevb.compiled_step.tracing import traced
from aevb.training import gradient_steps as stepping
from aevb.training.checkpoint import TrainingError
from aevb.training.events import NOT_COMPILED
from aevb.training.settings import Settings


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_run_is_the_run_bit_for_bit(monkeypatch, name):
    build, more, settings = CASES[name]
    eager, first, none = trained(monkeypatch, build, more, settings, after=1000)
    recorded, second, some = trained(monkeypatch, build, more, settings, after=3)
    assert none == 0
    assert some == (2 if "by turns" in name else 1)
    for (key, a), b in zip(eager.state_dict().items(), recorded.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert first.history.keys() == second.history.keys()
    assert all(
        np.array_equal(first.history[key], second.history[key])
        for key in first.history
        if "seconds" not in key
    )


def test_a_failure_in_a_recorded_step_names_the_rows(monkeypatch):
    monkeypatch.setattr(stepping, "RECORD_AFTER", 1)
    monkeypatch.setattr(stepping, "RECORD_FOR", 0)
    model = vae()

    def spoil(step, model):
        with torch.no_grad():
            model.theta()[0].fill_(torch.inf)

    made, real = [], recording.CompiledStep.__call__
    monkeypatch.setattr(
        recording.CompiledStep,
        "__call__",
        lambda self, inputs: (made.append(1), real(self, inputs))[1],
    )
    with pytest.raises(RuntimeError, match=r"Step 6: .*not finite"):
        fit(
            model,
            {"x": data()},
            validation={"x": data()},
            steps=20,
            batch=60,
            validate_every=6,
            after=spoil,
        )
    assert len(made) == 7


def test_a_part_of_ones_own_runs_as_it_was_written_unless_it_is_pure(soon):
    often, seldom = [], []
    called, recorded = with_counting(often, False), with_counting(seldom, True)
    seldom.clear()  # the check of a family calls it, too
    for model in (called, recorded):
        fit(model, {"x": data()}, steps=12, batch=20)
    assert len(often) >= 12 > len(seldom) > 0
    for a, b in zip(called.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(
        ValueError,
        match=r"compile=True .*Counting is a part of your own, .* \(set pure = True in its "
        r"class if it has none\)",
    ):
        fit(with_counting([], False), {"x": data()}, steps=1, compile=True)


def forward(model, called):
    model.factors["p(x|z)"].register_forward_hook(lambda *_: called())


def backward(model, called):
    model.factors["p(x|z)"].register_full_backward_hook(lambda *_: called())


def of_a_gradient(model, called):
    model.factors["p(x|z)"].net.heads.bias.register_hook(
        lambda gradient: (called(), 0 * gradient)[1]
    )


def parametrized(model, called):
    class Watched(nn.Module):
        def forward(self, weight):
            called()
            return weight

    nn.utils.parametrize.register_parametrization(
        model.factors["p(x|z)"].net.heads, "weight", Watched()
    )


def replaced(model, called):
    net = model.factors["p(x|z)"].net

    class Own(type(net)):
        def rest(self, *arguments):
            called()
            return super().rest(*arguments)

    net.__class__ = Own


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing"
)  # a factor is given no tensors but a dictionary of them
@pytest.mark.parametrize("add", [forward, backward, of_a_gradient, parametrized, replaced])
def test_a_model_with_a_hook_or_a_layer_of_ones_own_runs_as_it_was_written(soon, add):
    calls, model = [], vae()
    add(model, lambda: calls.append(1))
    bias = model.factors["p(x|z)"].net.heads.bias
    before = bias.detach().clone()
    fit(model, {"x": data()}, steps=12, batch=20)
    assert len(calls) >= 12
    assert torch.equal(before, bias) == (add is of_a_gradient)


def test_a_hook_of_the_model_itself_is_named():
    model = vae()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="compile=True .*, but the model has a hook, which"):
        fit(model, {"x": data()}, steps=12, batch=20, compile=True)


@pytest.mark.parametrize("add", [forward, backward, of_a_gradient])
def test_a_hook_that_comes_too_late_is_refused(soon, add):
    with pytest.raises(
        TrainingError,
        match=r"after= changed the model at step 6: .*p\(x\|z\).* has a hook, .* Make it before "
        r"fit\(\)",
    ):
        fit(
            vae(),
            {"x": data()},
            validation={"x": data()},
            steps=12,
            batch=20,
            validate_every=6,
            after=lambda _, model: add(model, list),
        )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("schedule", [joint(), alternate(2, 2)], ids=str)
def test_a_phase_that_nothing_teaches_is_refused(schedule, compiled):
    """Every label is known: nothing teaches q(y|x)."""
    model = Model({"y": OneHot(3), "x | y": Bernoulli(16)}, {"y | x": OneHot()})
    for parameter in model.theta() if schedule == joint() else ():
        parameter.requires_grad_(False)
    with pytest.raises(
        ValueError, match="The objective depends on no parameter that this phase may train"
    ):
        fit(
            model,
            {"x": data(), "y": np.arange(60) % 3},
            steps=4,
            schedule=schedule,
            compile=compiled,
        )


def test_a_phase_computes_the_gradients_that_it_moves_by(monkeypatch):
    """In an E-step no weight of p gets a gradient, and the parameters ask for theirs again
    afterwards.
    """
    asked = []
    real = stepping.GradientSteps._arithmetic
    monkeypatch.setattr(
        stepping.GradientSteps,
        "_arithmetic",
        lambda self, inputs: (
            asked.append([p.requires_grad for p in self.model.theta()]),
            real(self, inputs),
        )[1],
    )
    model = vae()
    fit(model, {"x": data()}, steps=4, batch=20, schedule=alternate(2, 2))
    assert [any(flags) for flags in asked] == [False, False, True, True]
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("schedule", "reason"), [(mle(), "mle"), (em(), "em")])
def test_what_cannot_be_compiled_is_refused_with_the_reason(schedule, reason):
    model = Model(
        {"z": Normal(2), "x | z": Normal(16, net=linear(), scale="learned")},
        {"z | x": Normal(net=linear())},
    )
    with pytest.raises(ValueError, match=rf"compile=True .*{reason}\(.*exact"):
        fit(model, {"x": data() + torch.randn(60, 16)}, steps=1, schedule=schedule, compile=True)
    drawn = Model({"z": Beta(2), "x | z": Bernoulli(16)}, {"z | x": Beta()})
    with pytest.raises(ValueError, match=r"compile=True .*z is drawn by a sampler of torch's own"):
        fit(drawn, {"x": data()}, steps=1, compile=True)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's compiler uses what torch advises against
def test_without_a_compiler_the_run_goes_on_and_says_what_is_needed(monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(*_, **__):
        raise BackendCompilerFailed("inductor", FileNotFoundError("g++"), None)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fails)
    torch.manual_seed(0)
    run = fit(vae(), {"x": data()}, steps=20, batch=20, compile=True)
    noted = [row for row in run.rows if row.get("kind") == NOT_COMPILED]
    assert len(noted) == 1
    assert re.search(
        r"compile=True: torch could not compile a part of the step .*needs a C\+\+ compiler",
        noted[0]["note"],
    )
    torch.manual_seed(0)
    plain = fit(vae(), {"x": data()}, steps=20, batch=20)
    torch.testing.assert_close(dict(run.model.state_dict()), dict(plain.model.state_dict()))


def test_a_run_from_before_precision_and_compile_is_resumed(monkeypatch, tmp_path):

    x, real = {"x": data()}, Settings.record
    monkeypatch.setattr(
        Settings,
        "record",
        lambda self: {
            key: value for key, value in real(self).items() if key not in ("precision", "compile")
        },
    )
    torch.manual_seed(0)
    fit(model := vae(), x, steps=6, batch=20, decay="constant", out=tmp_path)
    monkeypatch.undo()
    run = fit(model, x, steps=9, batch=20, decay="constant", out=tmp_path, resume=True)
    assert (run.step, run.settings.precision) == (9, "float32")


def test_seeds_together_are_the_seeds_alone(tmp_path):
    torch.manual_seed(0)
    model = gmvae()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    runs = fit(
        model,
        {"x": data()},
        validation={"x": data()},
        steps=30,
        batch=20,
        seeds=[4, 7],
        out=tmp_path,
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for seed, run in zip((4, 7), runs, strict=True):
        alone = fit(
            other := model.fresh(seed),
            {"x": data()},
            validation={"x": data()},
            steps=30,
            batch=20,
            seed=seed,
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                run.model.state_dict().values(), other.state_dict().values(), strict=True
            )
        )
        assert np.array_equal(run.history["validation elbo"], alone.history["validation elbo"])
        stored = load_run(tmp_path / f"seed-{seed}", which="last")
        assert all(
            torch.equal(a, b)
            for a, b in zip(stored.state_dict().values(), other.state_dict().values(), strict=True)
        )
    assert not all(
        torch.equal(a, b)
        for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True)
    )


def test_seeds_that_were_interrupted_go_on_together(tmp_path):
    x = {"x": data()}
    whole = fit(vae(), x, steps=20, batch=20, seeds=2)
    fit(vae(), x, steps=10, batch=20, decay="constant", seeds=2, out=tmp_path)
    runs = fit(vae(), x, steps=20, batch=20, decay="constant", seeds=3, out=tmp_path, resume=True)
    straight = fit(vae(), x, steps=20, batch=20, decay="constant", seeds=3)
    assert len(whole) == 2
    for a, b in zip(runs, straight, strict=True):
        assert all(
            torch.equal(v, w)
            for v, w in zip(
                a.model.state_dict().values(), b.model.state_dict().values(), strict=True
            )
        )


def stopping(when, how):
    """A function for ``after=`` that does something the nth time."""
    calls = []

    def after(step, model):
        calls.append(step)
        if len(calls) == when:
            how(model)

    return after


def test_an_interruption_saves_every_seed(tmp_path):
    x = {"x": data()}
    interrupt = stopping(5, lambda model: signal.raise_signal(signal.SIGINT))
    with pytest.raises(
        KeyboardInterrupt,
        match=r"stopped after steps 7, 7, 6 of 30; resume=True continues them from",
    ):
        fit(vae(), x, validation=x, steps=30, batch=20, seeds=3, out=tmp_path, after=interrupt)
    resumed = fit(vae(), x, validation=x, steps=30, batch=20, seeds=3, out=tmp_path, resume=True)
    for a, b in zip(resumed, fit(vae(), x, validation=x, steps=30, batch=20, seeds=3), strict=True):
        assert all(
            torch.equal(v, w)
            for v, w in zip(
                a.model.state_dict().values(), b.model.state_dict().values(), strict=True
            )
        )


def test_where_one_seed_fails_it_is_named_and_the_others_are_saved(tmp_path):
    spoil = stopping(5, lambda model: model.theta()[0].data.fill_(torch.inf))
    with pytest.raises(
        TrainingError, match=r"Seed 1: Step 6: .*not finite.* The other runs were stopped and saved"
    ):
        fit(
            vae(),
            {"x": data()},
            validation={"x": data()},
            steps=30,
            batch=20,
            seeds=3,
            out=tmp_path,
            after=spoil,
        )
    for seed, step in ((0, 8), (2, 7)):
        assert (tmp_path / f"seed-{seed}" / "checkpoints" / f"step-{step}").is_dir()


def test_seeds_share_the_rows_and_keep_their_notes(monkeypatch):
    from aevb.training import job

    opened = []
    real = job.open_source
    monkeypatch.setattr(
        job, "open_source", lambda *args: (opened.append(real(*args)), opened[-1])[1]
    )
    model = Model(
        {"z": Normal(2), "x | z": Normal(16, net=linear(), scale="learned")},
        {"z | x": Normal(net=mlp(5))},
    )
    runs = fit(model, {"x": data() + torch.randn(60, 16)}, steps=2, schedule=em(), seeds=3)
    assert len({id(source) for source in opened}) == 1
    assert all(any("leaves q as it is" in row.get("note", "") for row in run.rows) for run in runs)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"seeds": 0}, "number of runs"),
        ({"seeds": True}, "number of runs"),
        ({"seeds": [1, 1]}, "different seeds"),
        ({"seeds": [-1]}, "0 or more"),
        ({"seeds": 2, "seed": 1}, "not both"),
        ({"seeds": 2, "resume": True}, "give their folder"),
    ],
)
def test_bad_seeds_are_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        fit(vae(), {"x": data()}, steps=1, **choice)


def test_half_precision_trains_nearly_the_same_model():
    torch.manual_seed(0)
    x, runs = data(400), {}
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        runs[precision] = fit(
            vae(), {"x": x}, validation={"x": x}, steps=400, batch=50, precision=precision
        )
        assert all(
            parameter.dtype == torch.float32 for parameter in runs[precision].model.parameters()
        )
    full, half = (
        runs[precision].history["validation elbo"][-1] for precision in ("float32", "bf16")
    )
    assert full != half
    assert abs(half - full) < 0.01 * abs(full)


def of_one(x):
    """Operations that change nothing; what is written into afterwards has to be a copy."""
    once, alone, total = x**1, torch.cat([x]), x.unsqueeze(0).sum([0], True)
    kept = torch.cat([x])
    kept.split(1)[0].add_(1)
    base = x * 2
    before = base.view(-1) ** 1
    base.add_(1)
    product = x.unsqueeze(0) @ x.T.unsqueeze(0)
    early = product**1
    product.add_(1)
    whole = x * 2
    part = whole[1:]
    torch.add(x, 1, out=whole)
    late = whole**1
    part.mul_(2)
    return once * 2, alone * 2, total * 2, kept, before, base, early, product, late, part, x**1


def test_what_changes_nothing_is_left_out_unless_it_is_a_copy():
    x = data(3, 4) + 0.5
    kept = x.clone()
    graph = recording._trim(traced(of_one, x))
    for _ in range(2):
        found = tuple(graph(x))
        torch.testing.assert_close(found, of_one(x), rtol=0, atol=0)
        found[-1].mul_(3)  # a result that was a copy still is
    assert torch.equal(x, kept)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert (
        names.count("aten.pow.Tensor_Scalar"),
        names.count("aten.cat.default"),
        names.count("aten.sum.dim_IntList"),
    ) == (4, 1, 0)
