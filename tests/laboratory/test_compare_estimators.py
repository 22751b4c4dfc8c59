"""The estimator laboratory: its statistics against direct calculations, and what it says of
estimators whose properties are known.
"""

import json
import math
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from aevb import Bernoulli, Model, MultivariateNormal, Normal, OneHot, cli, linear, mlp
from aevb.laboratory import compare_estimators
from aevb.laboratory.advice import worth
from aevb.laboratory.measurement import (
    BLOCKS,
    Moments,
    exact_elbo,
    gradients,
    groups_of,
    squared_bias,
)
from aevb.zoo import gmvae, m2, vrnn

W = torch.tensor([[1.0, 0.0], [0.5, 2.0], [-1.0, 1.0]], dtype=torch.float64)
SIGMA = torch.tensor([0.6, 0.8, 1.0], dtype=torch.float64)
FAST = {"rows": 12, "replicates": 32, "rounds": 1, "temperatures": (0.5,)}


def factor_analysis(exact: bool) -> Model:
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=linear(bias=False), scale="learned")},
        q={"z | x": MultivariateNormal(net=linear(bias=False), covariance="shared")},
    ).double()
    if exact:
        p, q = model.factors["p(x|z)"], model.factors["q(z|x)"]
        covariance = torch.linalg.inv(
            torch.eye(2, dtype=torch.float64) + W.T @ torch.diag(SIGMA**-2) @ W
        )
        tril = torch.linalg.cholesky(covariance)
        with torch.no_grad():
            p.net.blocks.weights["z"].copy_(W)
            p.vectors["scale"].copy_(SIGMA.expm1().log())
            q.net.blocks.weights["x"].copy_(covariance @ W.T @ torch.diag(SIGMA**-2))
            q.vectors["tril"].copy_(
                torch.stack([tril[0, 0].expm1().log(), tril[1, 0], tril[1, 1].expm1().log()])
            )
    return model


def finite() -> Model:
    """One finite latent, so that the exact bound is a sum; its posterior is not sure of itself."""
    torch.manual_seed(1)
    return Model(
        p={"y": OneHot(2), "x | y": Normal(3, net=mlp(4))}, q={"y | x": OneHot(net=linear())}
    ).double()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture(scope="module")
def mixture():
    torch.manual_seed(0)
    model = gmvae(x=6, z=2, y=4, hidden=(6,)).double()
    x = (normal(30, 6) > 0).double()
    return compare_estimators(
        model, {"x": x}, rows=12, replicates=24, samples=(1, 4), temperatures=(0.5,), rounds=3
    )


# The statistics -----------------------------------------------------------------------------------


def test_moments_are_those_of_the_whole_sample_even_far_from_zero():
    vectors = normal(50, 7) + 1e6
    moments = Moments(50)
    for vector in vectors:
        moments.add(vector)
    variance, error = moments.variance()
    assert variance == pytest.approx(float(vectors.var(0).sum()), rel=1e-9)
    assert torch.allclose(moments.mean, vectors.mean(0), rtol=1e-14)
    assert 0.05 < error / variance < 0.4  # √(2 / 7 / 50) = 0.08 is expected of Gaussian vectors
    assert moments.blocks.shape == (BLOCKS, 7)


def test_a_squared_bias_has_its_noise_taken_out_and_chance_seldom_passes_for_one():
    random, bias = np.random.default_rng(0), torch.linspace(-1, 1, 20, dtype=torch.float64) / 8
    found = np.array(
        [
            squared_bias(torch.as_tensor(random.normal(size=(BLOCKS, 20))) + bias)[0]
            for _ in range(100)
        ]
    )
    assert abs(found.mean() - float(bias.square().sum())) < 4 * found.std() / 10
    p = np.array(
        [squared_bias(torch.as_tensor(random.normal(size=(BLOCKS, 20))))[1] for _ in range(100)]
    )
    # exact for symmetric noise; one seed in 15,000 fails
    assert abs((p <= 0.1).mean() - 0.1) < 4 * math.sqrt(0.09 / 100)
    # no flip of signs does as much
    assert squared_bias(torch.ones(BLOCKS, 1))[1] == 2.0 ** (1 - BLOCKS)


# Estimators whose properties are known ------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "unbiased"),
    [
        (finite, 2),
        (lambda: factor_analysis(False), 5),
    ],
)
def test_against_the_exact_bound_the_unbiased_are_found_unbiased_and_the_biased_biased(
    build, unbiased
):
    found = compare_estimators(
        build(),
        {"x": normal(12, 3)},
        bounds=["elbo"],
        samples=(2,),
        temperatures=(1.0,),
        replicates=160,
        rows=12,
        rounds=1,
    )
    assert found.targets[0].reference == "exact"
    assert len([one for one in found.figures if one.unbiased]) == unbiased
    for one in found.figures:  # 10 figures at one in ten thousand: one seed in a thousand fails
        assert one.bias_seen != one.unbiased, one.full_name
    assert "Unexpected" not in found.advice


def relaxed_elbo(model: Model, x: torch.Tensor, temperature: float, nodes: int) -> torch.Tensor:
    """The expectation of Gumbel-Softmax's ELBO with two values: ỹ₁ = σ((l + logistic noise) / τ),
    an integral over a uniform number.
    """
    logits = model.factors["q(y|x)"]({"x": x})
    logit = logits[:, 1] - logits[:, 0]
    u = (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes
    y = ((logit[:, None] + torch.logit(u)) / temperature).sigmoid()
    likelihood = model.factors["p(x|y)"]
    log_p = (
        likelihood.distribution(likelihood({"y": torch.stack([1 - y, y], -1)}))
        .log_prob(x[:, None])
        .sum(-1)
        .mean(1)
    )
    probs = torch.stack([(-logit).sigmoid(), logit.sigmoid()], -1)
    return log_p - (probs * (probs.log() + math.log(2))).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_gumbels_bias_is_the_one_that_an_integral_gives(temperature):
    model, x = finite(), normal(8, 3)
    found = compare_estimators(
        model,
        {"x": x},
        how=[{"y": "gumbel"}],
        bounds=["elbo"],
        samples=(4,),
        temperatures=(temperature,),
        rows=8,
        replicates=480,
        rounds=1,
    )
    (one,) = found.figures
    integral, exact = relaxed_elbo(model, x, temperature, 4000), model.elbo(x=x).value
    bias = float((integral - exact).detach().mean())
    assert abs(bias) > 8 * one.bias_error
    assert abs(one.bias - bias) < 4 * one.bias_error
    for part, group in ((one.theta, model.theta()), (one.phi, model.phi())):
        gradient, right = (
            torch.autograd.grad(value.mean(), group, retain_graph=True)
            for value in (integral, exact)
        )
        squared = sum(float((a - b).square().sum()) for a, b in zip(gradient, right, strict=True))
        # The error of a squared length ‖b + ε‖² is about 2‖b‖ times that of the vector along b.
        assert abs(part.squared_bias - squared) < 4 * (
            2 * math.sqrt(squared * part.variance / 480) + part.variance / 480
        )


@pytest.mark.slow
def test_enumeration_has_the_least_variance(mixture):
    best = mixture["elbo K=4: y enumerate, z pathwise closed"]
    for drawn in (
        "y score closed",
        "y gumbel τ=0.5 closed",
        "y relaxed τ=0.5",
        "y straight-through τ=0.5 closed",
    ):
        other = mixture[f"elbo K=4: {drawn}, z pathwise closed"]
        for less, more in (
            (best.variance, other.variance),
            (best.theta.variance, other.theta.variance),
            (best.phi.variance, other.phi.variance),
        ):
            assert less < 0.7 * more
    one = mixture["elbo K=1: y enumerate, z pathwise closed"]
    # a variance falls with the number of samples
    assert best.noise == pytest.approx(one.noise / 4, rel=0.5)
    assert (
        best.memory
        > one.memory
        > mixture["elbo K=1: y gumbel τ=0.5 closed, z pathwise closed"].memory
        > 0
    )


def test_drawing_a_finite_latent_has_more_variance_but_its_cost_does_not_grow_with_the_values():
    """The tutorial's footnote 19; of the cost the memory is what a test can count on."""
    found = {}
    for values in (5, 50):
        torch.manual_seed(0)
        model = gmvae(x=6, z=2, y=values, hidden=(6,))
        x = (normal(12, 6) > 0).float()
        found[values] = compare_estimators(
            model, {"x": x}, how=[{}, {"y": "gumbel"}], bounds=["elbo"], samples=(1,), **FAST
        )
    names = (
        "elbo K=1: y enumerate, z pathwise closed",
        "elbo K=1: y gumbel τ=0.5 closed, z pathwise closed",
    )
    (few, few_drawn), (many, many_drawn) = (
        [laboratory[name] for name in names] for laboratory in found.values()
    )
    for summed, drawn in ((few, few_drawn), (many, many_drawn)):
        assert summed.theta.variance < 0.5 * drawn.theta.variance
        assert summed.phi.variance < 0.5 * drawn.phi.variance
    # the draw itself has 50 entries instead of 5, the rest is the same
    assert many.memory / few.memory > 2 * many_drawn.memory / few_drawn.memory
    assert many.noise / many_drawn.noise < few.noise / few_drawn.noise


def test_sticking_the_landing_has_no_variance_at_the_exact_posterior():
    found = compare_estimators(
        factor_analysis(True), {"x": normal(12, 3)}, bounds=["elbo"], samples=(1,), **FAST
    )
    plain, stl = found["elbo K=1: z pathwise sampled"], found["elbo K=1: z pathwise sampled, stl"]
    assert stl.phi.variance < 1e-18 < 1e-3 < plain.phi.variance
    assert plain.variance < 1e-18  # log p − log q is constant there
    assert stl.theta.variance > 1e-3


def test_a_bound_without_noise_is_told_to_have_none():
    found = compare_estimators(
        finite(), {"x": normal(12, 3)}, bounds=["elbo"], samples=(1,), **FAST
    )
    best = found.best(found.targets[0])
    assert best.name == "y enumerate"
    assert best.noise == best.variance == 0
    assert "It has no variance at all." in found.advice


def test_the_variance_between_batches_is_that_of_means_of_rows():
    """Of n rows with gradients gᵢ, a batch of B without replacement has tr Var = tr Cov(g) / B · (n
    − B) / (n − 1).
    """
    model, x = factor_analysis(False), normal(40, 3)
    found = compare_estimators(
        model,
        {"x": x},
        how=[{}],
        bounds=["elbo"],
        samples=(1,),
        temperatures=(0.5,),
        rows=8,
        replicates=200,
        rounds=1,
    )
    each = [gradients(exact_elbo(model, model.prepare(x=row[None])), groups_of(model)) for row in x]
    for name, between in found.targets[0].between.items():
        spread = torch.stack([row[name] for row in each]).var(0, correction=0).sum()
        assert between == pytest.approx(float(spread) / 8 * 32 / 39, rel=0.35)
    whole = compare_estimators(
        model,
        {"x": x},
        how=[{}],
        bounds=["elbo"],
        samples=(1,),
        temperatures=(0.5,),
        rows=40,
        replicates=16,
        rounds=1,
    )
    assert whole.targets[0].rows_noise == 0


# What is shown ------------------------------------------------------------------------------------


def numbers(record: object) -> list[float]:
    parts = (
        record.values()
        if isinstance(record, dict)
        else record
        if isinstance(record, list | tuple)
        else []
    )
    return (
        [record]
        if isinstance(record, float)
        else [number for part in parts for number in numbers(part)]
    )


def test_the_text_is_the_same_in_a_notebook(mixture, monkeypatch):
    expected = str(mixture)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(mixture) == expected


def test_every_figure_is_finite_and_written(mixture, tmp_path):
    assert len(mixture.figures) > 20
    for one in mixture.figures:
        assert {
            getattr(one, field.name) is not None
            for field in fields(one)
            if field.name not in ("temperature",)
        } == {True}
        assert one.seconds > 0
    assert all(map(math.isfinite, numbers(mixture.record())))
    mixture.save(tmp_path / "found.json")
    record = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in record["figures"]] == [one.name for one in mixture.figures]
    mixture.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"
    lines = str(mixture).splitlines()
    assert all(any(one.name in line for line in lines) for one in mixture.figures)
    with pytest.raises(ValueError, match="No way is called 'elbo'"):
        mixture["elbo"]


def test_the_advice_names_an_unbiased_way_for_each_target(mixture):
    assert {target.name for target in mixture.targets} == {
        "elbo",
        "iwae K=4 (y enumerated)",
        "iwae K=4 (y drawn)",
    }
    for target in mixture.targets:
        best = mixture.best(target)
        assert best.unbiased
        assert f"{target.name}: {best.name}, K = {best.samples}." in mixture.advice
        others = [one for one in mixture.of(target) if one.unbiased and not one.bias_seen]
        assert mixture.cost(best) == min(map(mixture.cost, others))
    assert "Drawing y instead of enumerating it (elbo, K = 4): gumbel τ=0.5 takes" in mixture.advice


def test_a_biased_way_is_worth_it_for_as_many_steps_as_its_bias_allows(mixture):
    """V/n = b² + V' t' / (n t) at n = (V − V' t'/t) / b²."""
    best = replace(mixture["elbo K=1: y enumerate, z pathwise closed"], seconds=2.0)
    part = replace(best.theta, squared_bias=0.01, p=0.0)
    fast = replace(best, seconds=1.0, unbiased=False, theta=part, phi=replace(best.phi, p=1.0))
    variance = best.noise + mixture.targets[0].rows_noise
    steps = worth(mixture, fast, best)
    assert steps == pytest.approx(variance / 2 / 0.01)
    assert variance / steps == pytest.approx(0.01 + variance * 1.0 / (steps * 2.0))
    assert worth(mixture, replace(fast, seconds=3.0), best) == 0
    assert worth(mixture, replace(fast, theta=replace(part, p=1.0)), best) == math.inf


# Other models, and mistakes -----------------------------------------------------------------------


def labelled() -> tuple[Model, dict]:
    y = torch.arange(12) % 3
    y[::2] = -1
    return m2(x=4, z=2, y=3, hidden=(4,)), {"x": (normal(12, 4) > 0).float(), "y": y}


def ragged() -> tuple[Model, dict]:
    return vrnn(x=3, z=2, h=4, hidden=(4,), layers=1), {
        "x": (normal(12, 3, 3) > 0).float(),
        "lengths": torch.arange(12) % 3 + 1,
    }


def chain() -> tuple[Model, dict]:
    model = Model(
        p={"s[t] | s[t-1]": OneHot(2), "x[t] | s[t]": Normal(2)},
        q={"s[t] | s[t-1], x[t]": OneHot(net=linear())},
    )
    return model, {"x": normal(12, 3, 2)}


def bits() -> tuple[Model, dict]:
    """512 values: too many to be enumerated unasked."""
    return Model(p={"z": Bernoulli(9), "x | z": Normal(2)}, q={"z | x": Bernoulli(net=linear())}), {
        "x": normal(12, 2)
    }


@pytest.mark.slow
@pytest.mark.parametrize("build", [labelled, ragged, chain, bits])
def test_other_models_are_measured_too(build):
    torch.manual_seed(0)
    model, data = build()
    found = compare_estimators(model, data, samples=(1, 2), **(FAST | {"replicates": 16}))
    assert all(map(math.isfinite, numbers(found.record())))
    for target in found.targets:
        assert found.best(target).unbiased
    assert found.refused
    assert model.training


def test_a_model_without_an_unbiased_way_is_measured_without_biases():
    model, data = bits()
    found = compare_estimators(
        model, data, how=[{}], bounds=["elbo"], samples=(1,), **(FAST | {"replicates": 16})
    )
    (one,) = found.figures
    assert one.bias is None
    assert one.theta.squared_bias is None
    assert "no unbiased way was measured" in found.advice
    assert "no unbiased way to compare with" in str(found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicates": 5}, "use 16 replicates or more, got 5"),
        ({"temperatures": (0.5, 0.0)}, "temperatures are positive numbers, got 0.0"),
        ({"rows": 0}, "rows and rounds must be at least 1"),
        ({"bounds": ["iwae"], "samples": (1,)}, "Ask for bound iwae with samples=2 or more"),
        ({"how": [{"y": "pathwise"}]}, "not a differentiable function"),
        ({"how": [{}, {"y": "foo"}]}, "unknown word 'foo'"),
        ({"bounds": ["vae"]}, "Unknown bound 'vae'"),
        (
            {"how": "score"},
            'how is a request such as {"y": "enumerate"}, or a list of them. Got \'score\' as one',
        ),
        ({"how": [{}, "score"]}, "or a list of them. Got 'score' as one"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        compare_estimators(finite(), {"x": normal(4, 3)}, **settings)


def test_one_request_is_a_list_of_one():
    found = compare_estimators(
        finite(),
        {"x": normal(4, 3)},
        how={"y": "score"},
        bounds=["elbo"],
        samples=(2,),
        **(FAST | {"replicates": 16}),
    )
    assert [one.how for one in found.figures] == [{"y": "score"}]


def test_known_latents_leave_nothing_to_estimate():
    with pytest.raises(ValueError, match="Every latent is known in all rows"):
        compare_estimators(finite(), {"x": normal(4, 3), "y": torch.tensor([0, 1, 1, 0])})


# The command --------------------------------------------------------------------------------------


def aevb(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_command_measures_a_run_and_a_model_of_the_zoo(tmp_path, monkeypatch, capsys):
    few = ["--rows", "10", "--replicates", "16", "--samples", "1", "--temperature", "0.5"]
    small = ["--set", "z=2", "--set", "hidden=[8]"]
    run = tmp_path / "run"
    aevb(
        monkeypatch,
        capsys,
        "train",
        "gmvae",
        "--data",
        "digits",
        "--steps",
        "5",
        "--out",
        run,
        *small,
    )
    code, out, _ = aevb(monkeypatch, capsys, "estimators", run, *few)
    assert code == 0
    assert "Rows of digits (test)." in out
    assert "y gumbel τ=0.5 closed, z pathwise closed" in out
    assert json.loads((run / "estimators.json").read_text(encoding="utf-8"))["rows"] == 10
    assert (run / "estimators.png").stat().st_size > 1000
    monkeypatch.chdir(tmp_path)
    code, out, _ = aevb(
        monkeypatch,
        capsys,
        "estimators",
        "gmvae",
        "--data",
        "digits",
        *small,
        *few,
        "--how",
        "y=gumbel",
    )
    assert code == 0
    assert "y enumerate, z pathwise closed" in out
    assert "relaxed" not in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    code, _, err = aevb(monkeypatch, capsys, "estimators", "gmvae")
    assert code == 2
    assert (
        "gmvae is not the folder of a run, so it has no data of its own. Name them: --data digits."
        in err
    )
    code, _, err = aevb(monkeypatch, capsys, "estimators", run, "--set", "z=3")
    assert code == 2
    assert "--set gives arguments to a zoo model; a run already has its arguments." in err
