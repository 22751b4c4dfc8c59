"""Every estimator against an exact answer: closed forms, brute-force sums, quadrature, enumerated
gradients.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch.nn.functional import softplus

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
    table,
)

W = torch.tensor([[-0.5, -1.0], [-1.0, -1.0], [2.0, 0.5]], dtype=torch.float64)
SIGMA = torch.tensor([0.4, 0.2, 0.3], dtype=torch.float64)


def inverse_softplus(y: torch.Tensor) -> torch.Tensor:
    return y + torch.log(-torch.expm1(-y))


def factor_analysis(exact: bool) -> Model:
    """The tutorial's true model, with q its exact posterior or something else."""
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=linear(bias=False), scale="learned")},
        q={"z | x": MultivariateNormal(net=linear(bias=False), covariance="shared")},
    ).double()
    p, q = model.factors["p(x|z)"], model.factors["q(z|x)"]
    with torch.no_grad():
        p.net.blocks.weights["z"].copy_(W)
        p.vectors["scale"].copy_(inverse_softplus(SIGMA))
        if exact:
            precision = torch.eye(2, dtype=torch.float64) + W.T @ torch.diag(SIGMA**-2) @ W
            tril = torch.linalg.cholesky(torch.linalg.inv(precision))
            q.net.blocks.weights["x"].copy_(
                torch.linalg.inv(precision) @ W.T @ torch.diag(SIGMA**-2)
            )
            q.vectors["tril"].copy_(
                torch.stack(
                    [inverse_softplus(tril[0, 0]), tril[1, 0], inverse_softplus(tril[1, 1])]
                )
            )
    return model


def data(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return z @ W.T + SIGMA * torch.randn(n, 3, generator=generator, dtype=torch.float64)


def evidence(x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(
        multivariate_normal(np.zeros(3), (W @ W.T + torch.diag(SIGMA**2)).numpy()).logpdf(x.numpy())
    )


# Factor analysis: the exact posterior makes the bound the evidence --------------------------------


def test_at_the_exact_posterior_every_sample_gives_the_evidence():
    model, x = factor_analysis(exact=True), data(50)
    each = torch.stack(
        [model.elbo(x=x, how={"z": "sampled"}, seed=seed).value for seed in range(20)]
    )
    assert (each - evidence(x)).abs().max() < 1e-9
    assert (model.log_evidence(x=x).value - evidence(x)).abs().max() < 1e-9
    assert model.log_evidence(x=x).method == "exact"


@pytest.mark.parametrize("how", [{}, {"z": "sampled"}, {"z": "entropy"}])
def test_a_wrong_q_lies_below_by_the_closed_form_kl(how):
    model, x = factor_analysis(exact=False), data(20)
    q = model.posterior(x=x, method="q")["z"]
    precision = torch.eye(2, dtype=torch.float64) + W.T @ torch.diag(SIGMA**-2) @ W
    true = torch.distributions.MultivariateNormal(
        x @ torch.diag(SIGMA**-2) @ W @ torch.linalg.inv(precision), precision_matrix=precision
    )
    gap = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(q.loc, scale_tril=q.scale_tril), true
    )
    draws = model.elbo(x=x.repeat(4000, 1), how=how, seed=0).value.reshape(4000, 20)
    error = draws.std(0) / math.sqrt(4000)
    assert gap.min() > 0.1
    assert (
        (draws.mean(0) - (evidence(x) - gap)).abs() < 3 * error
    ).all()  # 60 comparisons: 15 % of seeds would fail one


def test_iwae_never_exceeds_the_evidence_but_a_closed_form_kl_inside_it_would():
    model, x = factor_analysis(exact=True), data(30)
    bound = model.elbo(x=x, bound="iwae", samples=1000, seed=0)
    assert (bound.value - evidence(x)).abs().max() < 1e-9
    # log p(x|z) − KL, closed form
    plain = model.elbo(x=x.repeat(1000, 1), seed=0).value.reshape(1000, 30)
    wrong = plain.logsumexp(0) - math.log(1000)
    assert (wrong - evidence(x)).mean() > 0.3


def test_iwae_rises_with_k_toward_the_evidence():
    model, x = factor_analysis(exact=False), data(40)
    means = [
        model.elbo(x=x, bound="iwae", samples=k, seed=0).value.mean() for k in (1, 10, 100, 1000)
    ]
    assert means == sorted(means)
    assert means[-1] < evidence(x).mean()


def test_k_samples_average_k_single_estimates():
    model, x = factor_analysis(exact=False), data(5)
    plan, batch = model.plan(samples=3), model.prepare(x=x)
    noise = model.draw_noise(plan, batch, seed=0)
    singles = [model.elbo(x=x, noise={"z": noise["z"][k : k + 1]}).value for k in range(3)]
    assert torch.allclose(
        model.elbo(x=x, samples=3, noise=noise).value,
        torch.stack(singles).mean(0),
        rtol=0,
        atol=1e-12,
    )


def test_terms_add_up_exactly():
    model, x = factor_analysis(exact=False), data(5)
    bound = model.elbo(x=x)
    assert torch.equal(bound.value, bound.terms["x"] - bound.terms["kl(z)"])
    bound = model.elbo(x=x, kl_weight=0.25)
    assert torch.allclose(
        bound.objective, bound.terms["x"] - 0.25 * bound.terms["kl(z)"], rtol=0, atol=1e-14
    )


# A mixture VAE: enumeration, relaxations, score function ------------------------------------------


def small_gmvae(x: int = 6, z: int = 2, y: int = 3) -> Model:
    torch.manual_seed(3)
    model = Model(
        p={
            "y": OneHot(y),
            "z | y": Normal(z),
            "x | z": Bernoulli(x, net=mlp(8, activation="tanh")),
        },
        q={
            "y | x": OneHot(net=mlp(8, activation="tanh")),
            "z | x, y": Normal(net=mlp(8, activation="tanh")),
        },
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def binary(n: int, d: int = 6) -> torch.Tensor:
    return (torch.rand(n, d, generator=torch.Generator().manual_seed(2)) > 0.5).double()


def brute_force(model: Model, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Eq. 5 of the tutorial, one class after the other, with concatenated inputs."""

    def net(name: str, *inputs: torch.Tensor) -> torch.Tensor:
        module = model.factors[name].net
        h = (
            torch.cat(inputs, -1) @ torch.cat(list(module.blocks.weights.values()), -1).T
            + module.blocks.bias
        )
        return module.heads(torch.tanh(h)) if module.heads is not None else h

    log_q_y = net("q(y|x)", x).log_softmax(-1)
    total = torch.zeros(len(x), dtype=torch.float64)
    for c in range(3):
        y = torch.eye(3, dtype=torch.float64)[c].expand(len(x), 3)
        mean, scale = net("q(z|x, y)", x, y).chunk(2, -1)
        prior_mean, prior_scale = net("p(z|y)", y).chunk(2, -1)
        q, p = (
            torch.distributions.Normal(m, softplus(s))
            for m, s in ((mean, scale), (prior_mean, prior_scale))
        )
        z = q.loc + q.scale * noise[c]
        log_lik = torch.distributions.Bernoulli(logits=net("p(x|z)", z)).log_prob(x).sum(-1)
        inner = (
            log_lik - torch.distributions.kl_divergence(q, p).sum(-1) - math.log(3) - log_q_y[:, c]
        )
        total = total + log_q_y[:, c].exp() * inner
    return total


def test_enumeration_equals_a_brute_force_sum():
    model, x = small_gmvae(), binary(7)
    plan = model.plan()
    noise = model.draw_noise(plan, model.prepare(x=x), seed=0)
    assert noise["z"].shape == (3, 1, 1, 7, 2)  # independent for every class
    ours, theirs = model.elbo(x=x, noise=noise).value, brute_force(model, x, noise["z"][:, 0, 0])
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    for mine, reference in zip(
        *(torch.autograd.grad(v.sum(), list(model.parameters())) for v in (ours, theirs)),
        strict=True,
    ):
        assert torch.allclose(mine, reference, rtol=0, atol=1e-11)


def projected_gradients(
    model: Model, x: torch.Tensor, repeats: int, **choices
) -> dict[str, torch.Tensor]:
    """Repeated gradients of the mean bound, each parameter tensor projected on 5 fixed directions:
    [repeats, 5].
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    generator = torch.Generator().manual_seed(9)
    directions = [
        torch.randn(5, *p.shape, generator=generator, dtype=torch.float64) for p in parameters
    ]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for seed in range(repeats):
        gradients = torch.autograd.grad(
            model.elbo(x=x, seed=seed, **choices).value.mean(), parameters
        )
        for name, gradient, direction in zip(names, gradients, directions, strict=True):
            rows[name].append((direction * gradient).flatten(1).sum(1))
    return {name: torch.stack(row) for name, row in rows.items()}


def z_scores(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """How many standard errors two estimates of a mean lie apart, the worst direction of each
    tensor.
    """
    scores = {}
    for name in a:
        error = sum(rows.var(0) / len(rows) for rows in (a[name], b[name])).sqrt()
        scores[name] = (
            ((a[name].mean(0) - b[name].mean(0)).abs() / error.clamp_min(1e-12)).max().item()
        )
    return scores


def test_enumerated_and_score_function_gradients_agree_for_every_parameter():
    model, x = small_gmvae(), binary(4)
    exact = projected_gradients(model, x, 300)
    score = projected_gradients(model, x, 300, how={"y": "score"}, samples=40)
    assert max(z_scores(exact, score).values()) < 4  # 70 comparisons: 0.4 % of seeds would fail one


def test_score_function_is_unbiased_under_iwae_too():
    """VIMCO's gradient against the exact gradient of the two-sample bound, by enumerating both
    samples' classes.
    """
    torch.manual_seed(5)
    model = Model(
        p={"y": OneHot(3, learned=True), "x | y": Normal(2)}, q={"y | x": OneHot(net=linear())}
    ).double()
    x = torch.tensor([[0.3, -1.0]], dtype=torch.float64)
    log_q = model.factors["q(y|x)"].net.first({"x": x}).log_softmax(-1)[0]
    joint = torch.stack([model.log_prob(x=x, y=torch.tensor([c])) for c in range(3)])[:, 0]
    ratio = joint - log_q
    pairs = [(i, j) for i in range(3) for j in range(3)]
    exact = sum(
        (log_q[i] + log_q[j]).exp() * (torch.logaddexp(ratio[i], ratio[j]) - math.log(2))
        for i, j in pairs
    )
    truth = torch.autograd.grad(exact, list(model.parameters()))
    many = x.expand(40_000, 2)
    bound = model.elbo(x=many, how={"y": "score"}, bound="iwae", samples=2, seed=0).value
    assert abs(bound.mean().item() - exact.item()) < 4 * bound.std().item() / 200
    batches = [
        model.elbo(x=many[:2000], how={"y": "score"}, bound="iwae", samples=2, seed=s).value.mean()
        for s in range(40)
    ]
    gradients = [torch.autograd.grad(b, list(model.parameters())) for b in batches]
    for parameter, reference in enumerate(truth):
        rows = torch.stack([g[parameter] for g in gradients])
        assert ((rows.mean(0) - reference).abs() < 4 * rows.std(0) / math.sqrt(40) + 1e-12).all()


def test_gumbel_value_bias_falls_with_the_temperature_and_straight_through_has_none():
    model, x = small_gmvae(), binary(3)
    many = x.repeat(20_000, 1)
    exact = model.elbo(x=many, seed=0).value.detach()
    values = {
        (draw, tau): model.elbo(x=many, how={"y": draw}, temperature=tau, seed=1).value.detach()
        for draw, tau in (("gumbel", 1.0), ("gumbel", 0.1), ("straight-through", 0.5))
    }
    bias = {key: (value.mean() - exact.mean()).abs().item() for key, value in values.items()}
    error = {
        key: math.sqrt((value.var() + exact.var()).item() / len(many))
        for key, value in values.items()
    }
    assert bias["gumbel", 0.1] < bias["gumbel", 1.0] - 4 * (
        error["gumbel", 0.1] + error["gumbel", 1.0]
    )
    assert bias["straight-through", 0.5] < 4 * error["straight-through", 0.5]


def test_straight_through_gradients_are_biased_as_the_plan_says():
    model, x = small_gmvae(), binary(4).repeat(50, 1)
    exact = projected_gradients(model, x, 60)
    through = projected_gradients(model, x, 60, how={"y": "straight-through"})
    scores = z_scores(exact, through)
    assert max(score for name, score in scores.items() if name.startswith("factors.q(y")) > 4
    assert "gradient is not" in model.plan(how={"y": "straight-through"}).biased["y"]


def test_relaxed_heads_exceed_the_categorical_kl_by_an_amount_free_of_the_temperature():
    model, x = small_gmvae(), binary(3).repeat(5000, 1)
    noise = model.draw_noise(model.plan(how={"y": "relaxed"}), model.prepare(x=x), seed=0)
    kls = [
        model.elbo(x=x, how={"y": "relaxed"}, temperature=tau, noise=noise).terms["kl(y)"]
        for tau in (0.1, 0.5, 2.0)
    ]
    assert torch.allclose(kls[0], kls[1], rtol=0, atol=1e-9)
    assert torch.allclose(kls[1], kls[2], rtol=0, atol=1e-9)
    categorical = model.elbo(x=x).terms["kl(y)"]
    excess = kls[0] - categorical
    assert excess.mean() > 4 * excess.std() / math.sqrt(len(x))


def test_enumerated_iwae_sums_outside_and_inside_the_logarithm():
    model, x = small_gmvae(), binary(5)
    plan = model.plan(bound="iwae", samples=4)
    noise = model.draw_noise(plan, model.prepare(x=x), seed=0)
    log_q_y = model.posterior(x=x)["y"].logits
    inside = []
    for c in range(3):
        y = torch.full((5,), c)
        weights = model.elbo(
            x=x, y=y, bound="iwae", samples=4, noise={"z": noise["z"][c]}
        ).log_weights
        inside.append(weights)  # log p(x, z, y) − log q(z | x, y)
    stacked = torch.stack(inside)  # [C, K, N]
    outside = (log_q_y.T.exp() * (stacked.logsumexp(1) - math.log(4) - log_q_y.T)).sum(0)
    assert torch.allclose(
        model.elbo(x=x, bound="iwae", samples=4, noise=noise).value, outside, rtol=0, atol=1e-12
    )
    summed = model.elbo(x=x, bound="iwae", samples=4, how={"y": "sum"}, noise=noise).value
    assert torch.allclose(
        summed, stacked.flatten(0, 1).logsumexp(0) - math.log(4), rtol=0, atol=1e-12
    )
    assert (summed >= outside).all()
    gradients = torch.autograd.grad(
        summed.sum(), list(model.factors["q(y|x)"].parameters()), allow_unused=True
    )
    assert all(g is None or not g.any() for g in gradients)  # q(y|x) cancels, as the plan says
    assert model.plan(bound="iwae", how={"y": "sum"}).untrained == ("y",)


def test_the_order_of_the_lines_of_q_does_not_change_the_bound():
    """An expectation stays outside a sum in a logarithm that its weights do not depend on: E_y log
    Σ_k exp, never log Σ_k exp E_y.
    """
    p = {"z": Normal(1), "k": OneHot(2), "y": OneHot(3), "x | z, k, y": Normal(2, scale=1.0)}
    q = {"z | x": Normal(), "k | x": OneHot(), "y | x, z": OneHot()}
    torch.manual_seed(0)
    x, values, weights = torch.randn(5, 2, dtype=torch.float64), [], None
    for keys in itertools.permutations(q):
        model = Model(p, {key: q[key] for key in keys}).double()
        weights = weights or {
            name: torch.randn_like(weight) for name, weight in model.state_dict().items()
        }
        model.load_state_dict(weights)
        plan = model.plan(bound="iwae", samples=2, how={"k": "sum"})
        assert plan.order == ("k", "y", "#S")
        values.append(
            model.elbo(
                x=x,
                bound="iwae",
                samples=2,
                how={"k": "sum"},
                noise=model.draw_noise(plan, model.prepare(x=x), seed=1),
            ).value
        )
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-12, atol=0)


def test_several_discrete_latents_are_enumerated_jointly():
    torch.manual_seed(7)
    model = Model(
        p={"a": OneHot(3, learned=True), "b | a": Bernoulli(2), "x | a, b": Normal(2)},
        q={"b | x": Bernoulli(net=linear()), "a | x, b": OneHot(net=linear())},
    ).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    total = torch.zeros(4, dtype=torch.float64)
    for a in range(3):
        for b in ([0, 0], [0, 1], [1, 0], [1, 1]):
            ya, yb = torch.full((4,), a), torch.tensor(b, dtype=torch.float64).expand(4, 2)
            log_q = model.posterior(x=x).log_prob(a=ya, b=yb)
            total += log_q.exp() * (model.log_prob(x=x, a=ya, b=yb) - log_q)
    bound = model.elbo(x=x)
    assert torch.allclose(bound.value, total, rtol=0, atol=1e-12)
    assert model.plan().passes("x") == 12


# Gradients: sticking the landing, doubly reparametrised -------------------------------------------


def test_stl_gradient_vanishes_at_the_exact_posterior_and_is_unbiased_elsewhere():
    x = data(6)
    model = factor_analysis(exact=True)
    bound = model.elbo(x=x, gradient="stl", seed=0).value
    assert all(g.abs().max() < 1e-9 for g in torch.autograd.grad(bound.sum(), model.phi()))
    # Near the posterior, on the same noise: the differences of the two gradients, which are small
    # there, must average to zero.
    with torch.no_grad():
        for parameter in model.phi():
            parameter.mul_(1.1)
    plain, stl = (
        projected_gradients(model, x, 400, samples=20, gradient=gradient)
        for gradient in ("plain", "stl")
    )
    for name, rows in plain.items():
        difference = rows - stl[name]
        assert (difference.mean(0).abs() <= 4 * difference.std(0) / math.sqrt(400) + 1e-9).all(), (
            name
        )


def quadrature(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(n)
    return torch.as_tensor(nodes), torch.as_tensor(weights / weights.sum())


def hierarchy() -> Model:
    """p: z₂ → z₁ → x; q bottom-up: x → z₁ → z₂. All one-dimensional, so that expectations can be
    integrated.
    """
    torch.manual_seed(11)
    model = Model(
        p={
            "z2": Normal(1),
            "z1 | z2": Normal(1, net=mlp(4, activation="tanh")),
            "x | z1": Normal(1, net=mlp(4, activation="tanh"), scale=0.5),
        },
        q={
            "z1 | x": Normal(net=mlp(4, activation="tanh")),
            "z2 | z1": Normal(net=mlp(4, activation="tanh"), scale="learned"),
        },
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def by_hand(model: Model, x: torch.Tensor, e1: torch.Tensor, e2: torch.Tensor) -> torch.Tensor:
    """log p(x, z₁, z₂) − log q(z₁, z₂ | x) at the samples that this noise gives."""

    def normal(name: str, value: torch.Tensor) -> torch.distributions.Normal:
        factor = model.factors[name]
        module = factor.net
        (weight,) = module.blocks.weights.values()
        raw = module.heads(torch.tanh(value @ weight.T + module.blocks.bias))
        free = (
            softplus(factor.vectors["scale"])
            if "scale" in factor.vectors
            else torch.tensor(0.5, dtype=torch.float64)
        )
        scale = softplus(raw[..., 1:]) if raw.shape[-1] == 2 else free
        return torch.distributions.Normal(raw[..., :1], scale)

    q1 = normal("q(z1|x)", x)
    z1 = q1.loc + q1.scale * e1
    q2 = normal("q(z2|z1)", z1)
    z2 = q2.loc + q2.scale * e2
    standard = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    log_p = (
        standard.log_prob(z2)
        + normal("p(z1|z2)", z2).log_prob(z1)
        + normal("p(x|z1)", z1).log_prob(x)
    )
    return (log_p - q1.log_prob(z1) - q2.log_prob(z2)).squeeze(-1)


def test_hierarchy_takes_the_upper_kl_in_closed_form_the_lower_by_sampling():
    model, x = hierarchy(), torch.tensor([[0.7]], dtype=torch.float64)
    plan = model.plan()
    assert plan.choices["z2"].term == "closed"
    assert plan.choices["z1"].term == "entropy"
    assert "p conditions z1 on z2, which depends on z1 under q" in plan.choices["z1"].why_term
    nodes, weights = quadrature(60)
    e1, e2 = torch.meshgrid(nodes, nodes, indexing="ij")
    integral = (
        (
            by_hand(model, x, e1.reshape(-1, 1), e2.reshape(-1, 1))
            * torch.outer(weights, weights).reshape(-1)
        )
        .sum()
        .item()
    )
    for how in ({}, {"z1": "sampled"}, {"z1": "sampled", "z2": "sampled"}):
        draws = model.elbo(x=x.expand(40_000, 1), how=how, seed=0).value
        assert abs(draws.mean().item() - integral) < 4 * draws.std().item() / 200


@pytest.mark.parametrize("gradient", ["plain", "stl"])
def test_elbo_gradients_of_a_hierarchy_against_quadrature(gradient):
    model, x = hierarchy(), torch.tensor([[0.7]], dtype=torch.float64)
    nodes, weights = quadrature(60)
    e1, e2 = torch.meshgrid(nodes, nodes, indexing="ij")
    exact = (
        by_hand(model, x, e1.reshape(-1, 1), e2.reshape(-1, 1))
        * torch.outer(weights, weights).reshape(-1)
    ).sum()
    names = [name for name, _ in model.named_parameters()]
    truth = dict(zip(names, torch.autograd.grad(exact, list(model.parameters())), strict=True))
    rows = []
    for seed in range(60):
        bound = model.elbo(x=x.expand(1000, 1), gradient=gradient, seed=seed).value.mean()
        rows.append(torch.autograd.grad(bound, list(model.parameters())))
    for i, name in enumerate(names):
        sample = torch.stack([row[i] for row in rows])
        error = sample.std(0) / math.sqrt(len(rows))
        assert ((sample.mean(0) - truth[name]).abs() < 4.5 * error + 1e-9).all(), name


@pytest.mark.parametrize("gradient", ["plain", "dreg"])
def test_iwae_gradients_of_a_hierarchy_against_quadrature(gradient):
    """K = 2: four noises, integrated on a grid; both gradients must have the integral's mean, φ's
    and θ's.
    """
    model, x = hierarchy(), torch.tensor([[0.7]], dtype=torch.float64)
    nodes, weights = quadrature(32)
    grid = torch.meshgrid(nodes, nodes, indexing="ij")
    pair_weight = torch.outer(weights, weights).reshape(-1)
    log_w = by_hand(model, x, grid[0].reshape(-1, 1), grid[1].reshape(-1, 1))
    both = torch.logaddexp(log_w[:, None], log_w[None, :]) - math.log(2)
    exact = (both * torch.outer(pair_weight, pair_weight)).sum()
    names = [name for name, _ in model.named_parameters()]
    truth = dict(zip(names, torch.autograd.grad(exact, list(model.parameters())), strict=True))
    rows = []
    for seed in range(40):
        bound = model.elbo(
            x=x.expand(1000, 1), bound="iwae", samples=2, gradient=gradient, seed=seed
        ).value.mean()
        rows.append(torch.autograd.grad(bound, list(model.parameters())))
    for i, name in enumerate(names):
        sample = torch.stack([row[i] for row in rows])
        error = sample.std(0) / math.sqrt(len(rows))
        assert ((sample.mean(0) - truth[name]).abs() < 4.5 * error + 1e-6).all(), name


def test_dreg_leaves_theta_alone_and_calms_phi():
    model, x = factor_analysis(exact=True), data(5)
    with torch.no_grad():
        for parameter in model.phi():
            parameter.mul_(1.02)  # near the posterior, where training ends up
    rows = {g: [] for g in ("plain", "dreg")}
    for seed in range(100):
        for gradient, found in rows.items():
            bound = model.elbo(
                x=x, bound="iwae", samples=16, gradient=gradient, seed=seed
            ).value.mean()
            found.append(torch.autograd.grad(bound, [*model.theta(), *model.phi()]))
    k = len(model.theta())
    for plain, dreg in zip(rows["plain"], rows["dreg"], strict=True):
        assert all(
            torch.allclose(a, b, rtol=0, atol=1e-10)
            for a, b in zip(plain[:k], dreg[:k], strict=True)
        )
    spread = {
        g: sum(torch.stack([row[i] for row in found]).var(0).sum() for i in range(k, len(found[0])))
        for g, found in rows.items()
    }
    assert spread["dreg"] < 0.1 * spread["plain"]


# The graph condition, and the q families of the tutorial's remarks --------------------------------


def test_a_deterministic_node_between_blocks_the_closed_form():
    """p: z, h = f(z), u | h, x | u; q: u | x, z | x, u. u's parent h depends, through z, on u."""
    torch.manual_seed(2)
    model = Model(
        p={
            "z": Normal(1),
            "h | z": Deterministic(2, net=mlp(3, activation="tanh")),
            "u | h": Normal(1),
            "x | u": Normal(1, scale=0.7),
        },
        q={"u | x": Normal(net=linear()), "z | x, u": Normal(net=mlp(3, activation="tanh"))},
    ).double()
    plan = model.plan()
    assert plan.choices["u"].term == "entropy"
    assert "on h, which depends on u under q" in plan.choices["u"].why_term
    assert plan.choices["z"].term == "closed"  # z is a root of p
    x = torch.tensor([[0.4]], dtype=torch.float64)
    nodes, weights = quadrature(40)
    e1, e2 = (e.reshape(1, -1, 1) for e in torch.meshgrid(nodes, nodes, indexing="ij"))
    noise = {"u": e1.reshape(-1, 1, 1, 1), "z": e2.reshape(-1, 1, 1, 1)}
    grid_plan = model.plan(how={"u": "sampled", "z": "sampled"}, samples=1600, bound="iwae")
    from aevb.estimate.estimators import estimate

    log_weights = estimate(grid_plan, model.factors, model.prepare(x=x), noise).log_weights[:, 0]
    latents = {
        name: torch.as_tensor(value) for name, value in _hand_latents(model, x, noise).items()
    }
    many = x.expand(1600, 1)
    hand = model.log_prob(x=many, **latents) - model.posterior(x=many).log_prob(**latents)
    assert torch.allclose(log_weights, hand, rtol=0, atol=1e-10)
    integral = (hand * torch.outer(weights, weights).reshape(-1)).sum().item()
    draws = model.elbo(x=x.expand(40_000, 1), seed=0).value
    assert abs(draws.mean().item() - integral) < 4 * draws.std().item() / 200
    with pytest.raises(ValueError, match="depends on u under q"):
        model.plan(how={"u": "closed"})


def _hand_latents(
    model: Model, x: torch.Tensor, noise: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    q_u, q_z = model.factors["q(u|x)"].net, model.factors["q(z|x, u)"].net
    mean, scale = (x @ q_u.blocks.weights["x"].T + q_u.blocks.bias).chunk(2, -1)
    u = (mean + softplus(scale) * noise["u"]).reshape(-1, 1)
    hidden = torch.tanh(
        x @ q_z.blocks.weights["x"].T + u @ q_z.blocks.weights["u"].T + q_z.blocks.bias
    )
    mean, scale = q_z.heads(hidden).chunk(2, -1)
    return {"u": u, "z": mean + softplus(scale) * noise["z"].reshape(-1, 1)}


def test_a_mixture_posterior_is_stratified_without_bias():
    torch.manual_seed(4)
    model = Model(
        p={"z": Normal(1), "x | z": Normal(1, net=mlp(4, activation="tanh"), scale=0.3)},
        q={"z | x": Mixture(net=mlp(4, activation="tanh"), components=3)},
    ).double()
    assert model.plan().choices["z"].draw == "stratify"
    x = torch.tensor([[0.2]], dtype=torch.float64)
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64).unsqueeze(-1)
    many = x.expand(4001, 1)
    log_q = model.posterior(x=many).log_prob(z=grid)
    log_p = model.log_prob(x=many, z=grid)
    integral = torch.trapezoid(log_q.exp() * (log_p - log_q), dx=24 / 4000).item()
    draws = model.elbo(x=x.expand(40_000, 1), seed=0).value
    assert abs(draws.mean().item() - integral) < 4 * draws.std().item() / 200
    log_evidence = torch.trapezoid(log_p.exp(), dx=24 / 4000).log().item()
    assert integral < log_evidence
    iwae = model.elbo(x=x, bound="iwae", samples=20_000, seed=0).value.item()
    assert abs(iwae - log_evidence) < 0.02


def test_a_table_gives_every_example_its_own_posterior():
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=linear(bias=False), scale="learned")},
        q={"z | i": Normal(net=table(5))},
        given={"i": 1},
    ).double()
    x, i = data(3), torch.tensor([4, 0, 4])
    gradient = torch.autograd.grad(model.elbo(x=x, i=i).value.sum(), model.phi())[0]
    assert gradient.abs().sum(1).gt(0).tolist() == [True, False, False, False, True]
    # The best diagonal Gaussian has the true mean and the conditional variances: there the mean
    # gradient of its row vanishes.
    loadings, noise = (
        model.factors["p(x|z)"].net.blocks.weights["z"],
        softplus(model.factors["p(x|z)"].vectors["scale"]),
    )
    precision = torch.eye(2, dtype=torch.float64) + loadings.T @ torch.diag(noise**-2) @ loadings
    mean = torch.linalg.solve(precision, loadings.T @ (x[0] / noise**2))
    with torch.no_grad():
        model.factors["q(z|i)"].net.rows[4] = torch.cat(
            [mean, inverse_softplus(precision.diagonal() ** -0.5)]
        )
    rows = [
        torch.autograd.grad(model.elbo(x=x[:1], i=i[:1], samples=50, seed=s).value, model.phi())[0][
            4
        ]
        for s in range(200)
    ]
    gradients = torch.stack(rows)
    assert (gradients.mean(0).abs() < 4 * gradients.std(0) / math.sqrt(200)).all()
    assert torch.allclose(model.posterior(x=x[:1], i=i[:1])["z"].base_dist.loc[0], mean)


def test_exact_is_bayes_rule_and_collapses_to_a_logsumexp():
    torch.manual_seed(6)
    declaration = {"y": OneHot(4, learned=True), "z | y": Normal(2), "x | z": Normal(3)}
    model = Model(p=declaration, q={"z | x": Normal(net=linear()), "y | z": Exact()}).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    noise = model.draw_noise(model.plan(), model.prepare(x=x), seed=0)
    z = model.posterior(x=x)["z"].base_dist
    z = z.loc + z.scale * noise["z"][0, 0]
    log_joint = torch.stack([model.log_prob(x=x, z=z, y=torch.full((5,), c)) for c in range(4)])
    q = model.posterior(x=x)["z"]
    value = model.elbo(x=x, how={"z": "sampled"}, noise=noise).value
    assert torch.allclose(value, log_joint.logsumexp(0) - q.log_prob(z), rtol=0, atol=1e-12)
    posterior = model.posterior(x=x)
    y = posterior["y"].probs
    assert torch.allclose(y.sum(-1), torch.ones(5, dtype=torch.float64))
    assert torch.allclose(
        posterior.log_prob(z=z, y=torch.zeros(5, dtype=torch.long)) - q.log_prob(z),
        log_joint.log_softmax(0)[0],
        rtol=0,
        atol=1e-12,
    )


# Which choices go together ------------------------------------------------------------------------

REFUSED = [
    ({"gradient": "stl", "bound": "iwae", "samples": 2}, "biased for iwae with samples > 1"),
    ({"gradient": "dreg"}, 'is for bound="iwae" with samples=2 or more'),
    (
        {"gradient": "dreg", "bound": "iwae", "samples": 1},
        'is for bound="iwae" with samples=2 or more',
    ),
    (
        {"gradient": "dreg", "bound": "iwae", "samples": 2, "how": {"y": "score"}},
        "but y is drawn by 'score'",
    ),
    (
        {"gradient": "dreg", "bound": "iwae", "samples": 2, "how": {"z": "detached"}},
        "but z is drawn by 'detached'",
    ),
    ({"gradient": "stl", "how": {"z": "detached"}}, "needs a pathwise latent"),
    ({"gradient": "stl", "how": {"z": "closed"}}, "differentiates −log q at the sample"),
    (
        {"bound": "iwae", "samples": 5, "how": {"z": "closed"}},
        "with a closed-form KL it would be no bound",
    ),
    (
        {"bound": "iwae", "samples": 5, "how": {"y": "gumbel"}},
        'Use "relaxed" or "straight-through"',
    ),
    ({"how": {"y": "score"}}, "Ask for samples=2 or more"),
    ({"how": {"y": "sum"}}, 'Ask for bound="iwae" too'),
    ({"how": {"y": "pathwise"}}, "not a differentiable function of its parameters"),
    ({"how": {"y": "detached"}}, "not a differentiable function of its parameters"),
    ({"how": {"z": "enumerate"}}, "infinitely many values"),
    ({"how": {"z": "gumbel"}}, "only OneHot and Bernoulli have a relaxation"),
    ({"how": {"z": "stratify"}}, "only a Mixture has components"),
    ({"how": {"y": "sampled"}}, "there is no sample"),
    ({"how": {"y": "gumbel sampled"}}, 'Use "relaxed"'),
    ({"how": {"y": "relaxed closed"}}, 'Use "gumbel" for the categorical KL'),
    ({"how": {"w": "pathwise"}}, "not a latent. The latents are y, z"),
    ({"how": {"z": "magic"}}, "unknown word 'magic'"),
    ({"bound": "vr"}, "Unknown bound"),
    ({"gradient": "rws"}, "Unknown gradient"),
    ({"samples": 0}, "positive whole number"),
]


@pytest.mark.parametrize(("choices", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_forbidden_combinations_say_why(choices, message):
    with pytest.raises(ValueError, match=message):
        small_gmvae().plan(**choices)


def test_detached_sampling_cuts_the_reconstruction_from_q_and_says_so():
    model, x = small_gmvae(), binary(3)
    reconstruction = model.elbo(x=x, how={"z": "detached"}).terms["x"].sum()
    gradients = torch.autograd.grad(
        reconstruction, list(model.factors["q(z|x, y)"].parameters()), allow_unused=True
    )
    assert all(g is None or not g.any() for g in gradients)
    assert "biased: no gradient of the reconstruction reaches q" in model.explain(
        how={"z": "detached"}
    )


def test_too_many_values_are_not_enumerated():
    model = Model(p={"y": OneHot(300), "x | y": Normal(2)}, q={"y | x": OneHot(net=linear())})
    assert model.plan().choices["y"].draw == "gumbel"
    assert model.plan(samples=4).choices["y"].draw == "score"
    assert model.plan(how={"y": "enumerate"}).choices["y"].draw == "enumerate"
    assert "too many to enumerate" in model.explain()
