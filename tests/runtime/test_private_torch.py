"""Training goes on where a torch release lacks a private API: each is patched away in turn, and the
run ends with the same numbers.
"""

import pytest
import torch

from aevb import LSTM, Bernoulli, Model, Normal, StudentT, fit, mlp
from aevb.runtime import private_torch
from aevb.training import gradient_steps
from aevb.training.events import NOT_COMPILED, events

# torch's compiler uses what torch advises against
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def vae():
    return Model({"z": Normal(2), "x | z": Bernoulli(6, net=mlp(8))}, {"z | x": Normal(net=mlp(8))})


def heavy():
    return Model(
        {"z": StudentT(2), "x | z": Bernoulli(6, net=mlp(8))}, {"z | x": Normal(net=mlp(8))}
    )


def vrnn():
    p = {
        "h[t] | h[t-1], z[t-1]": LSTM(4),
        "z[t] | h[t]": Normal(2),
        "x[t] | h[t], z[t]": Bernoulli(2, net=mlp(4)),
    }
    return Model(p, {"z[t] | h[t], x[t]": Normal(net=mlp(4))})


def trained(build, monkeypatch, **settings):
    monkeypatch.setattr(gradient_steps, "RECORD_AFTER", 2)
    monkeypatch.setattr(gradient_steps, "RECORD_FOR", 0)
    torch.manual_seed(0)
    x = (torch.rand(40, 6) < 0.5).float()
    torch.manual_seed(0)
    model = build().double()
    run = fit(
        model,
        {"x": x.reshape(40, 3, 2) if build is vrnn else x},
        steps=12,
        batch=10,
        seed=1,
        clip=1.0,
        **settings,
    )
    return {
        name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }, run


def refuse(*_, **__):
    raise ImportError("no such module in this torch")


MISSING = [*private_torch.SLOWER, "DispatchMode"]


@pytest.mark.parametrize("build", [vae, vrnn])
@pytest.mark.parametrize("name", MISSING)
def test_a_run_without_a_private_api_has_the_same_numbers(name, build, monkeypatch):
    expected, _ = trained(build, monkeypatch)
    monkeypatch.setattr(private_torch, name, None)
    found, run = trained(build, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    (event,) = events(run.rows, NOT_COMPILED)
    expected = private_torch.SLOWER.get(
        name,
        "Steps run as they are written, since they could not be recorded: this version of torch "
        "has no TorchDispatchMode",
    )
    assert expected in event.text


def test_without_torchs_compiler_a_compiled_run_goes_on_uncompiled(monkeypatch):
    expected, _ = trained(vae, monkeypatch)
    monkeypatch.setattr(private_torch, "inductor", refuse)
    found, run = trained(vae, monkeypatch, compile=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    (event,) = events(run.rows, NOT_COMPILED)
    assert "torch could not compile a part of the step (no such module in this torch)" in event.text


def test_without_the_gamma_sampler_draws_follow_the_generator_and_the_distribution(monkeypatch):
    monkeypatch.setattr(private_torch, "standard_gamma", None)
    before = torch.random.get_rng_state()
    a, b = (
        private_torch.gamma(torch.full((20_000,), 2.5), torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert torch.equal(a, b)
    assert torch.equal(torch.random.get_rng_state(), before)
    c, d = (private_torch.gamma(torch.full((20,), 2.5), None) for _ in range(2))
    assert not torch.equal(c, d)  # without a generator, torch's own moves on
    assert abs(a.mean().item() - 2.5) < 5 * (2.5 / 20_000) ** 0.5  # one in a million fails
    trained(heavy, monkeypatch)


def test_without_the_vmap_switch_the_context_does_nothing(monkeypatch):
    monkeypatch.setattr(private_torch, "set_vmap_fallback", None)
    with private_torch.vmap_without_loops():
        assert torch.vmap(torch.sin)(torch.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_where_torch_does_not_tell_of_hooks_steps_run_as_they_are_written(monkeypatch, compiled):
    expected, _ = trained(vae, monkeypatch)
    monkeypatch.setattr(private_torch, "HOOKS", ("_hooks_elsewhere",))
    found, run = trained(vae, monkeypatch, compile=compiled)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    (event,) = events(run.rows, NOT_COMPILED)
    assert event.text == (
        "Steps run as they are written: this version of torch does not tell whether a module has "
        "hooks, which every step must call."
    )


def test_a_part_without_its_list_of_hooks_is_taken_to_have_some():
    assert private_torch.hooks_known()
    layer = torch.nn.Linear(2, 2)
    assert not private_torch.has_hooks(layer)
    layer.register_forward_hook(lambda *_: None)
    assert private_torch.has_hooks(layer)
    assert not private_torch.has_hooks(layer.weight)
    del layer.__dict__["_backward_pre_hooks"]
    assert private_torch.has_hooks(layer)


def test_memory_is_taken_in_small_pieces_where_nobody_can_say_what_is_held(monkeypatch):
    from aevb.evidence.memory_limit import PROBE, pieces

    monkeypatch.setattr(private_torch, "DispatchMode", None)
    assert pieces(lambda rows, samples: None, 100, 1000, 2**20) == (1, PROBE)


def test_large_products_without_onednn_are_the_same(monkeypatch):
    from aevb.compiled_step.gradients import affine

    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(256, 300),
        torch.randn(280, 300, requires_grad=True),
        torch.randn(280, requires_grad=True),
    )
    expected = torch.autograd.grad(
        affine(x, weight, bias, relu=True).square().sum(), [weight, bias]
    )
    monkeypatch.setattr(private_torch, "onednn_linear", None)
    found = torch.autograd.grad(affine(x, weight, bias, relu=True).square().sum(), [weight, bias])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    "where",
    [
        "recording.traced",
        "recording.rewritten",
        "recording.fused",
        "recording.CompiledStep.__call__",
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        KeyError,
        RuntimeError,
        *(
            pytest.param(e, marks=pytest.mark.slow)
            for e in (TypeError, AttributeError, AssertionError)
        ),
    ],
)
def test_a_run_survives_whatever_an_optimisation_raises(where, error, monkeypatch):
    expected, _ = trained(vae, monkeypatch)

    def fails(*_, **__):
        raise error("a change in torch")

    monkeypatch.setattr(f"aevb.compiled_step.{where}", fails)
    found, run = trained(vae, monkeypatch, compile=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert "a change in torch" in events(run.rows, NOT_COMPILED)[0].text


def test_unchecked_code_of_another_compiler_is_not_run(monkeypatch):
    from types import SimpleNamespace

    from aevb.compiled_step import fusing

    real = private_torch.inductor()
    inner = lambda *given, **choices: SimpleNamespace(run=real.compile_fx_inner(*given, **choices))  # noqa: E731  # without current_callable
    monkeypatch.setattr(private_torch, "cpp_kernels", lambda: None)
    monkeypatch.setattr(
        private_torch,
        "inductor",
        lambda: SimpleNamespace(**{**vars(real), "compile_fx_inner": inner}),
    )
    remarks, given = [], [torch.ones(40)]
    code = fusing.or_plain(fusing.compiled, lambda x: [x.sin() + 1], given, remarks)
    torch.testing.assert_close(code(given)[0], torch.ones(40).sin() + 1)
    assert "can neither be corrected nor be checked" in remarks[0]
