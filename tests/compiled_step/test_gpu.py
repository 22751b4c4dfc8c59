"""What fit does on a GPU, with real graphs, streams and kernels, is what it does without them."""

import math

import numpy as np
import pytest
import torch
from compiled_runs import CASES, data, partly_frozen, vae, vrnn, with_counting

from aevb import fit
from aevb.compiled_step import cuda_graphs
from aevb.data.sources import open_source
from aevb.training import gradient_steps as stepping
from aevb.training import step_queue
from aevb.training.evaluation import Evaluation
from aevb.training.events import NOT_COMPILED, events

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning"
    ),  # torch 2.11 imports such a thing itself when it compiles for a GPU
]

STEPS = {"steps": 57, "batch": 20, "seed": 3, "log_every": 10}
CAPTURED = [name for name in CASES if name not in ("Beta", "bfloat16")]


def case(name):
    """A model in double precision on the GPU, its rows there, and its settings."""
    build, more, settings = CASES[name]
    x = data().reshape(60, 4, 4) if build in (vrnn, partly_frozen) else data()
    torch.manual_seed(1)
    return build().double().cuda(), {"x": x.cuda(), **more}, STEPS | settings


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def eagerly(monkeypatch, model, rows, **choices):
    """A run without recordings and compiled functions: captured, but with the operations of the
    model as it was written.
    """
    with monkeypatch.context() as patch:
        patch.setattr(stepping, "why_not_recorded", lambda *_: "for comparison")
        return fit(model, rows, **choices)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_run_is_the_run(soon, monkeypatch, name):
    model, rows, choices = case(name)
    run, eager = (
        fit(model.fresh(0), rows, **choices),
        eagerly(monkeypatch, model.fresh(0), rows, **choices),
    )
    torch.testing.assert_close(weights(run.model), weights(eager.model), rtol=0, atol=1e-9)
    for key in ("elbo", "iwae", "particles", "gradient"):
        if key in eager.history:
            np.testing.assert_allclose(run.history[key], eager.history[key], rtol=1e-9)


@pytest.mark.parametrize("name", ["vae", "mixture"])
def test_a_compiled_run_is_the_run(monkeypatch, name):
    model, rows, choices = case(name)
    run, eager = (
        fit(model.fresh(0), rows, compile=True, **choices),
        eagerly(monkeypatch, model.fresh(0), rows, **choices),
    )
    torch.testing.assert_close(weights(run.model), weights(eager.model), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("dropout", False), ("mixture", False), ("sequence", False), ("mixture", True)],
)
def test_runs_together_are_each_alone(soon, name, compiled):
    model, rows, choices = case(name)
    choices |= {"compile": compiled, "validation": rows, "validate_every": 20}
    choices.pop("seed")
    for run in fit(model, rows, seeds=3, **choices):
        seed = run.settings.seed
        alone = fit(model.fresh(seed), rows, seed=seed, **choices)
        torch.testing.assert_close(
            weights(run.model), weights(alone.model), rtol=0, atol=1e-9 if compiled else 0
        )
        np.testing.assert_allclose(
            run.history["validation elbo"], alone.history["validation elbo"], rtol=1e-9
        )


@pytest.mark.parametrize("inside", [False, True], ids=["before the capture", "inside it"])
@pytest.mark.parametrize(("seeds", "compiled"), [(None, False), (2, False), (2, True)])
def test_a_run_whose_steps_cannot_be_captured_goes_on_without_a_graph(
    monkeypatch, seeds, compiled, inside
):
    model, rows, choices = case("vae")
    choices |= {"compile": compiled}
    seed = choices.pop("seed")

    def runs():
        return (
            [fit(model.fresh(seed), rows, seed=seed, **choices)]
            if seeds is None
            else fit(model, rows, seeds=seeds, **choices)
        )

    expected = runs()

    def failing(model, *others):
        if inside:
            model.inputs(0)  # draws random numbers
        raise RuntimeError("a change in CUDA")

    if inside:
        monkeypatch.setattr(cuda_graphs, "_advance", failing)
    else:
        monkeypatch.setattr(step_queue, "captured", failing)
    for run, other in zip(runs(), expected, strict=True):
        torch.testing.assert_close(weights(run.model), weights(other.model), rtol=0, atol=1e-9)
        assert run.step == other.step
        assert [event.text for event in events(run.rows, NOT_COMPILED)] == [
            "Steps run without a CUDA graph, since they could not be captured: a change in CUDA"
        ]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_resumed_run_is_the_whole_one(tmp_path, compiled):
    """What a step draws is that of its place, wherever the run began."""
    model, rows, choices = case("dropout")
    choices |= {"compile": compiled, "decay": "constant"}
    whole = fit(model.fresh(0), rows, **choices)
    fit(model.fresh(0), rows, **choices | {"steps": 24}, out=tmp_path)
    resumed = fit(model.fresh(0), rows, out=tmp_path, resume=True, **choices)
    torch.testing.assert_close(weights(resumed.model), weights(whole.model), rtol=0, atol=1e-9)


def test_rows_of_a_file_are_the_rows(tmp_path):
    model, rows, choices = case("vae")
    np.save(tmp_path / "x.npy", rows["x"].cpu().numpy())
    here = fit(model.fresh(0), rows, **choices)
    staged = fit(model.fresh(0), {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, **choices)
    assert torch.equal(weights(here.model), weights(staged.model))


def test_an_evaluation_that_is_asked_again_finds_the_same():
    model, rows, _ = case("mixture")
    evaluation = Evaluation(model, open_source(model.graph, rows, model._parameter()))
    first = evaluation()
    assert evaluation() == pytest.approx(first, rel=1e-12)
    assert evaluation.graph is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    again = Evaluation(model, open_source(model.graph, rows, model._parameter()))
    assert evaluation() == pytest.approx(again(), rel=1e-12) != pytest.approx(first)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_is_not_finite_is_found_and_named(soon, compiled):
    def spoil(step, model):
        with torch.no_grad():
            for parameter in model.theta():
                parameter.fill_(math.inf)

    model, rows, choices = case("vae")
    with pytest.raises(RuntimeError, match=r"Step 30: .*is not finite for rows"):
        fit(
            model,
            rows,
            validation=rows,
            validate_every=30,
            after=spoil,
            compile=compiled,
            **choices,
        )


@pytest.mark.parametrize("pure", [False, True])
def test_a_part_of_ones_own_is_called_at_every_step_unless_it_is_pure(pure):
    calls = []
    fit(with_counting(calls, pure).cuda(), {"x": data().cuda()}, steps=50, batch=20)
    assert (len(calls) >= 50) != pure
    assert calls


def test_half_precision_is_near():
    _, rows, choices = case("vae")
    torch.manual_seed(0)
    model = vae().cuda()
    full, half = (
        fit(model.fresh(0), rows, precision=precision, **choices)
        for precision in ("float32", "bf16")
    )
    assert not torch.equal(weights(full.model), weights(half.model))
    np.testing.assert_allclose(full.history["elbo"], half.history["elbo"], rtol=0.02)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_a_bound_that_is_still_alive_does_not_keep_steps_from_being_captured(soon):
    """Autograd remembers the stream on which a parameter was first used; recorded steps do not."""
    model, rows, choices = case("vae")
    expected = fit(model.fresh(0), rows, **choices)
    fresh = model.fresh(0)
    bound = fresh.elbo(**{name: value[:20] for name, value in rows.items()}, seed=0).value.mean()
    run = fit(fresh, rows, **choices)
    assert torch.equal(weights(run.model), weights(expected.model))
    assert not events(run.rows, NOT_COMPILED)
    assert bound.requires_grad
