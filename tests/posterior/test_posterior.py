"""The posterior of each latent: ends with factors of their own, rows where the latent is known."""

from __future__ import annotations

import math

import pytest
import torch

from aevb import Bernoulli, Exact, Laplace, Model, MultivariateNormal, Normal, OneHot, mlp

NAN = math.nan


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(p, q, seed: int = 0, **choices) -> Model:
    torch.manual_seed(seed)
    return Model(p=p, q=q, **choices).double()


# Factors of the ends ------------------------------------------------------------------------------

ENDS = [
    Normal(),
    Normal(scale="learned"),
    Normal(scale=3.0),
    MultivariateNormal(covariance="shared"),
    MultivariateNormal(),
    Laplace(),
]
LENGTHS = [3, 1, 2]


@pytest.mark.parametrize("end", ENDS, ids=repr)
@pytest.mark.parametrize("at", ["0", "T"])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_marginal_has_the_factor_of_its_step(end, at, ragged):
    q = {"z[t] | x[t]": Normal(scale=0.127), f"z[{at}] | x[{at}]": end}
    model = built({"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(1)}, q)
    x = randn(3, 3, 1)
    marginal = model.posterior(x=x, **({"lengths": LENGTHS} if ragged else {}))["z"]
    main, own = (model.factors[f"q(z[{step}]|x[{step}])"] for step in ("t", at))
    for row, length in enumerate(LENGTHS if ragged else [3, 3, 3]):
        for t in range(length):
            factor = own if t == (0 if at == "0" else length - 1) else main
            expected = factor.distribution(
                factor({f"x[{'t' if factor is main else at}]": x[row, t]})
            )
            assert torch.allclose(marginal.mean[row, t], expected.mean)
            assert torch.allclose(marginal.stddev[row, t], expected.stddev)
    z = randn(3, 3, 2, seed=1)
    if not ragged:
        assert torch.allclose(marginal.log_prob(z).sum(1), model.posterior(x=x).log_prob(z=z))


def test_a_marginal_over_samples_has_the_factor_of_its_step():
    q = {"z[t] | z[t-1], x[t]": Normal(scale=0.1), "z[0] | x[0]": Normal(scale="learned")}
    model = built({"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)}, q)
    x = randn(2, 3, 1)
    marginal = model.posterior(x=x, samples=20000, seed=0)["z"]
    drawn = model.posterior(x=x, seed=1).sample(20000)["z"]
    # 1 / sqrt(20000) is 0.007; the gain of each step is below 1
    assert torch.allclose(marginal.mean, drawn.mean(0), atol=0.04)
    assert torch.allclose(marginal.stddev, drawn.std(0), atol=0.04)
    assert torch.allclose(marginal.stddev[:, 0], torch.ones(2, 1, dtype=torch.float64))


def test_classes_have_the_factor_of_their_step():
    q = {"y[t] | y[t-1], x[t]": OneHot(), "y[0] | x[0]": OneHot(net=mlp(4))}
    model = built({"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(1)}, q)
    x = randn(2, 3, 1)
    probs = model.posterior(x=x)["y"].probs
    first = model.factors["q(y[0]|x[0])"]({"x[0]": x[:, 0]}).softmax(-1)
    step = model.factors["q(y[t]|y[t-1], x[t])"]
    rows = torch.stack(
        [
            step({"y[t-1]": torch.eye(3, dtype=torch.float64)[c], "x[t]": x[:, 1]}).softmax(-1)
            for c in range(3)
        ],
        1,
    )
    assert torch.allclose(probs[:, 0], first)
    assert torch.allclose(probs[:, 1], (first.unsqueeze(-1) * rows).sum(1))


# Rows where the latent is known -------------------------------------------------------------------

B = torch.tensor([[1.0], [0.0], [NAN]], dtype=torch.float64)
Z = torch.tensor([[2.0], [NAN], [-3.0]], dtype=torch.float64)


@pytest.mark.parametrize("q", [Bernoulli(), Exact()], ids=repr)
def test_a_known_binary_latent_is_certain(q):
    model = built({"b": Bernoulli(1, learned=True), "x | b": Normal(1)}, {"b | x": q})
    x = randn(3, 1)
    posterior, free = model.posterior(x=x, b=B)["b"], model.posterior(x=x)["b"]
    assert posterior.mean[:2].flatten().tolist() == [1.0, 0.0]
    assert torch.equal(posterior.mean[2], free.mean[2])
    assert torch.equal(
        posterior.log_prob(torch.ones(3, 1, dtype=torch.float64))[:2].exp(),
        torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    assert torch.equal(posterior.sample((5,))[:, :2], B[:2].expand(5, 2, 1))


@pytest.mark.parametrize("family", [Normal(), MultivariateNormal(), Laplace()], ids=repr)
def test_a_known_continuous_latent_is_a_point(family):
    model = built({"z": Normal(1), "x | z": Normal(1)}, {"z | x": family})
    x = randn(3, 1)
    posterior, free = model.posterior(x=x, z=Z)["z"], model.posterior(x=x)["z"]
    assert posterior.mean[[0, 2]].flatten().tolist() == [2.0, -3.0]
    assert posterior.stddev[[0, 2]].flatten().tolist() == [0.0, 0.0]
    assert torch.equal(posterior.mean[1], free.mean[1])
    assert torch.equal(posterior.stddev[1], free.stddev[1])
    assert torch.equal(posterior.sample((4,))[:, [0, 2]], Z[[0, 2]].expand(4, 2, 1))


def test_a_latent_known_at_some_steps_is_a_point_there():
    model = built(
        {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)}, {"z[t] | z[t-1], x[t]": Normal()}
    )
    z = torch.tensor([[[0.5], [NAN], [NAN]], [[NAN], [-1.0], [NAN]]], dtype=torch.float64)
    found = model.posterior(x=randn(2, 3, 1), z=z)["z"]
    known = ~z.isnan()
    assert torch.equal(found.mean[known], z[known])
    assert torch.equal(found.stddev == 0, known)


# Bayes' rule --------------------------------------------------------------------------------------

X_OF_Y = {"b[t]": Bernoulli(1, learned=True), "y": OneHot(2, learned=True), "x[t] | y": Normal(1)}
READERS = {
    "at the end": (X_OF_Y, {"b[t]": Exact(), "y | b[T]": OneHot()}, "y"),
    "at the next step": (
        {"b[t]": Bernoulli(1, learned=True), "z[t]": Normal(1), "x[t] | z[t]": Normal(1)},
        {"b[t]": Exact(), "z[t] | b[t], b[t+1]": Normal()},
        "z",
    ),
}


@pytest.mark.parametrize("how", READERS)
def test_a_latent_may_read_one_that_bayes_rule_gives(how):
    """Averages of draws and the marginal, both over 40,000 draws: they differ by more than 0.03
    with probability below 1e-6.
    """
    p, q, name = READERS[how]
    model = built(p, q, seed=3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(randn(*weight.shape, seed=weight.numel()))
    posterior = model.posterior(x=randn(1, 3, 1), method="q", seed=1, samples=40_000)
    drawn = posterior.sample(40_000)
    assert (posterior[name].mean[0] - drawn[name].mean(0)[0]).abs().max() < 0.03
    bits = drawn["b"][:, 0, :, 0]
    for last in (
        0.0,
        1.0,
    ):  # each draw belongs to the bits that were drawn with it, and log_prob says so
        here = bits[:, -1] == last
        same = (bits == bits[here][0]).all(-1)
        if name == "y":
            ways = [
                posterior.log_prob(b=drawn["b"][here][0], y=value.double().unsqueeze(0))
                for value in torch.eye(2)
            ]
            expected = torch.cat(ways).softmax(0)
            assert (drawn["y"][same, 0].mean(0) - expected).abs().max() < 0.04
        else:
            z = drawn["z"][same, 0, :, 0]
            mean, log_q = (
                z.mean(0),
                lambda at, here=here: posterior.log_prob(
                    b=drawn["b"][here][0], z=at.reshape(1, 3, 1)
                ),
            )
            step = torch.eye(3).double()
            # of a Gaussian: (loc − mean) / scale²
            slope = torch.cat(
                [log_q(mean + 0.5 * each) - log_q(mean - 0.5 * each) for each in step]
            )
            assert slope.abs().max() < 0.2
