"""Tests of a trained model: samples, posteriors, log-probabilities, exact evidence, and cost."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm

from aevb import (
    Bernoulli,
    Deterministic,
    Exact,
    Mixture,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    linear,
    mlp,
)
from aevb.evidence.linear_gaussian import LinearGaussian
from aevb.zoo import cvae, gmvae, vae, zoo


def mixture() -> Model:
    torch.manual_seed(0)
    return Model(
        p={"y": OneHot(3, learned=True), "z | y": Normal(2), "x | z": Normal(3)},
        q={"y | x": OneHot(net=linear()), "z | x, y": Normal(net=linear())},
    ).double()


def test_ancestral_samples_have_the_models_moments():
    torch.manual_seed(3)
    model = Model(
        p={"a": Normal(2), "b | a": Normal(1, scale=0.5), "x | a, b": Normal(2, scale="learned")},
        q={"a | x": Normal(), "b | x": Normal()},
    )
    model = model.double()
    n = 40_000
    draws = model.sample(n, seed=0)
    joint = LinearGaussian(model, model.prepare(x=torch.zeros(1, 2)))
    for name in ("a", "b", "x"):
        error = joint.covariances[name, name].diagonal().sqrt() / math.sqrt(n)
        assert ((draws[name].mean(0) - joint.means[name][0]).abs() < 4 * error).all()
    stacked = torch.cat([draws[name] for name in ("a", "b", "x")], 1)
    exact = joint._stack(("a", "b", "x"), ("a", "b", "x"))
    tolerance = (
        5 * torch.outer(exact.diagonal(), exact.diagonal()).sqrt() / math.sqrt(n) * math.sqrt(2)
    )
    assert ((torch.cov(stacked.T) - exact).abs() < tolerance).all()


def test_fixing_a_root_conditions_the_generation_and_a_seed_repeats_it():
    model = mixture()
    draws = model.sample(5000, y=1, seed=0)
    assert (draws["y"].argmax(-1) == 1).all()
    factor = model.factors["p(z|y)"]
    prior = factor.distribution(factor({"y": torch.eye(3, dtype=torch.float64)[1:2]}))
    assert ((draws["z"].mean(0) - prior.loc[0]).abs() < 4 * prior.scale[0] / math.sqrt(5000)).all()
    again = model.sample(5000, y=torch.tensor([0.0, 1.0, 0.0]), seed=0)
    assert torch.equal(draws["x"], again["x"])
    rows = model.sample(3, y=torch.tensor([0, 1, 2]), z=torch.zeros(2), seed=1)
    assert rows["y"].argmax(-1).tolist() == [0, 1, 2]
    assert not rows["z"].any()


def test_means_instead_of_draws():
    model = vae(x=6, z=2, hidden=(5,))
    z = torch.randn(4, 2)
    found = model.sample(4, z=z, mean=True)["x"]
    assert torch.equal(found, model.sample(4, z=z, mean=True)["x"])
    assert found.shape == (4, 6)
    assert ((found > 0) & (found < 1)).all()


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"x": torch.zeros(3)}, "would be an intervention. Use reconstruct"),
        ({"z": torch.zeros(2)}, "p draws it given 'y'"),
        ({"w": 1}, "not a variable"),
    ],
)
def test_fixing_what_has_free_parents_is_refused(fixed, message):
    with pytest.raises(ValueError, match=message):
        mixture().sample(2, **fixed)


def test_given_variables_and_steps_must_be_named():
    with pytest.raises(ValueError, match="'y' is given: p is conditioned on it"):
        cvae(x=6, z=2, y=3, hidden=(4,)).sample(2)
    with pytest.raises(ValueError, match="say how many steps to draw"):
        zoo["vrnn"](x=4, h=5, hidden=(4,)).sample(2)


def test_log_prob_of_a_complete_assignment_by_hand():
    model = mixture()
    x, z, y = (
        torch.randn(4, 3, dtype=torch.float64),
        torch.randn(4, 2, dtype=torch.float64),
        torch.tensor([0, 1, 2, 1]),
    )
    weights = (
        model.factors["p(z|y)"].net.blocks.weights["y"].T + model.factors["p(z|y)"].net.blocks.bias
    )
    mean, scale = weights[y].detach().numpy().reshape(4, 2, 2).transpose(1, 0, 2)
    log_z = norm(mean, np.log1p(np.exp(scale))).logpdf(z.numpy()).sum(1)
    block = model.factors["p(x|z)"].net.blocks
    mean, scale = (
        (z @ block.weights["z"].T + block.bias).detach().numpy().reshape(4, 2, 3).transpose(1, 0, 2)
    )
    log_x = norm(mean, np.log1p(np.exp(scale))).logpdf(x.numpy()).sum(1)
    expected = log_x + log_z - math.log(3)
    assert np.allclose(model.log_prob(x=x, y=y, z=z).detach().numpy(), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="A complete assignment names every variable: pass z="):
        model.log_prob(x=x, y=y)


def test_posterior_marginals_are_exact_mixtures_over_enumerated_parents():
    model = mixture()
    x = torch.randn(4, 3, dtype=torch.float64)
    posterior = model.posterior(x=x)
    z = torch.randn(4, 2, dtype=torch.float64)
    each = torch.stack([posterior.log_prob(z=z, y=torch.full((4,), c)) for c in range(3)])
    assert torch.allclose(posterior["z"].log_prob(z), each.logsumexp(0), rtol=0, atol=1e-12)
    assert torch.allclose(posterior["y"].probs.sum(-1), torch.ones(4, dtype=torch.float64))
    draws = posterior.sample(8000)
    assert draws["y"].shape == (8000, 4, 3)
    frequency = draws["y"].mean(0)
    error = (posterior["y"].probs * (1 - posterior["y"].probs) / 8000).sqrt()
    assert ((frequency - posterior["y"].probs).abs() < 4.5 * error).all()
    assert (
        (draws["z"].mean(0) - posterior["z"].mean).abs()
        < 4.5 * posterior["z"].variance.sqrt() / math.sqrt(8000)
    ).all()


@pytest.mark.parametrize("y_family", ["one-hot", "exact"])
def test_posterior_of_what_depends_on_samples_is_a_mixture_over_them(y_family):
    torch.manual_seed(1)
    factor = Exact() if y_family == "exact" else OneHot(net=linear())
    model = Model(
        p={"y": OneHot(3), "z | y": Normal(1), "x | z": Normal(2)},
        q={"z | x": Normal(net=linear()), "y | z": factor},
    ).double()
    x = torch.randn(2, 2, dtype=torch.float64)
    posterior = model.posterior(x=x, samples=4000, seed=0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    q = model.posterior(x=x)["z"].base_dist
    exact = torch.zeros(2, 3, dtype=torch.float64)
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        z = q.loc + q.scale * node
        log_z = posterior["z"].log_prob(z)
        exact += (
            weight
            * torch.stack(
                [posterior.log_prob(z=z, y=torch.full((2,), c)) - log_z for c in range(3)], -1
            ).exp()
        )
    assert torch.allclose(posterior["y"].probs, exact, atol=0.02)
    draws = posterior.sample(4000)
    assert torch.allclose(draws["y"].mean(0), exact, atol=0.04)


def test_posterior_of_a_mixture_family_and_of_a_full_covariance():
    torch.manual_seed(1)
    x = torch.randn(3, 2)
    for family in (Mixture(net=linear(), components=3), MultivariateNormal(net=linear())):
        model = Model(p={"z": Normal(2), "x | z": Normal(2)}, q={"z | x": family})
        posterior = model.posterior(x=x)
        z = posterior.sample(5)["z"]
        assert z.shape == (5, 3, 2)
        assert torch.allclose(posterior["z"].log_prob(z[0]), posterior.log_prob(z=z[0]), atol=1e-5)


def test_reconstruction_passes_through_the_posterior():
    torch.manual_seed(0)
    model = vae(x=6, z=2, hidden=(5,))
    x = torch.rand(4, 6)
    means, again, draws = (
        model.reconstruct(x=x, seed=3, mean=mean)["x"] for mean in (True, True, False)
    )
    assert means.shape == (4, 6)
    assert torch.equal(means, again)
    assert not torch.equal(means, draws)
    z = model.posterior(x=x, seed=3).sample()["z"][0]
    assert torch.allclose(means, model.sample(4, z=z, mean=True)["x"])
    x[0, 2] = float("nan")  # imputation
    assert model.reconstruct(x=x)["x"].isfinite().all()


def test_dropout_is_off_after_training_and_explicit_noise_within():
    model = vae(x=6, z=2, hidden=(50,), dropout=0.5)
    x = torch.rand(4, 6)
    assert model.training
    assert torch.equal(model.posterior(x=x)["z"].mean, model.posterior(x=x)["z"].mean)
    assert model.training  # the mode is restored
    plan, batch = model.plan(), model.prepare(x=x)
    noise = model.draw_noise(plan, batch, seed=0)
    assert sorted(noise) == ["p(x|z) dropout 0", "q(z|x) dropout 0", "z"]
    assert torch.equal(model.elbo(x=x, noise=noise).value, model.elbo(x=x, noise=noise).value)
    model.eval()
    assert sorted(model.draw_noise(plan, batch, seed=0)) == ["z"]


# Exact evidence -----------------------------------------------------------------------------------


def test_evidence_of_a_deep_linear_gaussian_model_with_a_given_variable_and_missing_entries():
    torch.manual_seed(5)
    model = Model(
        p={
            "a": Normal(2, learned=True),
            "f | a": Deterministic(3),
            "b | f, u": Normal(2, scale="learned"),
            "x | b, a": MultivariateNormal(3, covariance="shared"),
            "w | b": Normal(1, scale=0.3),
        },
        q={"a | x": Normal(), "b | x": Normal()},
        given={"u": 2},
    ).double()
    n = 5
    u, x, w = torch.randn(n, 2).double(), torch.randn(n, 3).double(), torch.randn(n, 1).double()
    found = model.log_evidence(x=x, w=w, u=u)

    def affine(name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        blocks = model.factors[name].net.blocks
        return {
            k: v.detach().numpy() for k, v in blocks.weights.items()
        }, blocks.bias.detach().numpy()

    softplus = lambda v: np.log1p(np.exp(v.detach().numpy()))  # noqa: E731
    root = model.factors["p(a)"].root
    mean_a, cov_a = root[:2].detach().numpy(), np.diag(softplus(root[2:]) ** 2)
    wf, bf = affine("p(f|a)")
    wb, bb = affine("p(b|f, u)")
    wx, bx = affine("p(x|b, a)")
    ww, bw = affine("p(w|b)")
    scale_b = np.diag(softplus(model.factors["p(b|f, u)"].vectors["scale"]) ** 2)
    tril = (
        model.factors["p(x|b, a)"]
        .distribution(torch.zeros(1, 3).double())
        .scale_tril[0]
        .detach()
        .numpy()
    )
    b_a = wb["f"] @ wf["a"]
    # Stack (a, b): compute its mean and covariance, then (x, w) as a linear map of it.
    cov = np.block([[cov_a, cov_a @ b_a.T], [b_a @ cov_a, b_a @ cov_a @ b_a.T + scale_b]])
    lift = np.block([[wx["a"], wx["b"]], [np.zeros((1, 2)), ww["b"]]])
    cov_xw = lift @ cov @ lift.T + np.block(
        [[tril @ tril.T, np.zeros((3, 1))], [np.zeros((1, 3)), np.full((1, 1), 0.09)]]
    )
    for i in range(n):
        mean_b = wb["f"] @ (wf["a"] @ mean_a + bf) + wb["u"] @ u[i].numpy() + bb
        mean = lift @ np.concatenate([mean_a, mean_b]) + np.concatenate([bx, bw])
        value = np.concatenate([x[i].numpy(), w[i].numpy()])
        assert abs(found.value[i].item() - multivariate_normal(mean, cov_xw).logpdf(value)) < 1e-9
        kept = [0, 2, 3]
        holes = x[i : i + 1].clone()
        holes[0, 1] = float("nan")
        part = model.log_evidence(x=holes, w=w[i : i + 1], u=u[i : i + 1]).value.item()
        assert (
            abs(
                part
                - multivariate_normal(mean[kept], cov_xw[np.ix_(kept, kept)]).logpdf(value[kept])
            )
            < 1e-9
        )


def test_importance_sampling_agrees_with_the_exact_evidence_and_with_a_sum():
    torch.manual_seed(0)
    model = zoo["fa"]().double()
    x = model.sample(6, seed=1)["x"]
    exact, sampled = (
        model.log_evidence(x=x),
        model.log_evidence(x=x, method="importance", samples=200_000, seed=0),
    )
    assert sampled.method == "importance"
    assert ((sampled.value - exact.value).abs() < 5 * sampled.stderr).all()
    labels = mixture()
    gm = Model(
        p={"y": OneHot(3, learned=True), "x | y": Normal(3)}, q={"y | x": OneHot(net=linear())}
    ).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    brute = torch.stack([gm.log_prob(x=x, y=torch.full((4,), c)) for c in range(3)]).logsumexp(0)
    assert torch.allclose(gm.log_evidence(x=x, samples=4).value, brute, rtol=0, atol=1e-12)
    with pytest.raises(
        ValueError, match=r"not known in closed form: the spread of p\(x\|z\) depends on z"
    ):
        labels.log_evidence(x=x, method="exact")


# Cost ---------------------------------------------------------------------------------------------


def test_enumeration_repeats_no_input_in_memory():
    """Compare the memory that autograd keeps for a GMVAE step with that of the tutorial's way.

    The tutorial repeats the batch once for every class.
    """
    model = gmvae(x=784, z=8, y=10, hidden=(32,))
    x = (torch.rand(50, 784) > 0.5).float()
    kept: dict[int, int] = {}
    largest = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        largest.append(tensor.shape)
        return tensor

    batch = model.prepare(x=x)
    noise = model.draw_noise(model.plan(), batch, seed=0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.elbo(x=x, noise=noise).value.mean().backward()
    ours = sum(kept.values())
    kept.clear()
    repeated = x.repeat(10, 1)
    y = torch.eye(10).repeat_interleave(50, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        encoder = torch.nn.Sequential(
            torch.nn.Linear(794, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
        )
        decoder = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 784)
        )
        mean, scale = encoder(torch.cat([repeated, y], 1)).chunk(2, 1)
        z = mean + torch.nn.functional.softplus(scale) * torch.randn_like(mean)
        torch.distributions.Bernoulli(logits=decoder(z)).log_prob(repeated).sum().backward()
    theirs = sum(kept.values())
    assert ours < 0.75 * theirs
    inputs = [
        shape
        for shape in largest[: len(largest) // 2]
        if shape[-1] == 784 and math.prod(shape) > 50 * 784
    ]
    assert all(math.prod(shape) <= 10 * 50 * 784 for shape in inputs)


def test_a_bernoulli_latent_is_enumerated_over_all_its_values():
    torch.manual_seed(0)
    model = Model(
        p={"b": Bernoulli(3), "x | b": Normal(2)}, q={"b | x": Bernoulli(net=mlp(4))}
    ).double()
    x = torch.randn(3, 2, dtype=torch.float64)
    values = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).double()
    total = torch.zeros(3, dtype=torch.float64)
    for value in values:
        b = value.expand(3, 3)
        log_q = model.posterior(x=x).log_prob(b=b)
        total += log_q.exp() * (model.log_prob(x=x, b=b) - log_q)
    assert torch.allclose(model.elbo(x=x).value, total, rtol=0, atol=1e-12)
    assert model.plan().passes("x") == 8
