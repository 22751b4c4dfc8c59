"""Every gradient × bound × number of samples × way of drawing is unbiased, or said to be biased, or
refused.

The mean of a gradient over the noise is exact here: Gaussian noise takes the nodes of a quadrature,
one row each, and draws by the score function take all their values, weighted by their probability.
It is compared with the gradient of the mean of the bound.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from aevb import Bernoulli, Mixture, Model, Normal, Poisson
from aevb.derive.draws import DRAWS, Draw
from aevb.estimate.estimators import Estimate, estimate

NODES = {1: 60, 2: 40, 3: 24, 4: 14}  # for each number of Gaussian noises
P = {
    "z": Normal(1),
    "w": Normal(1),
    "w | z": Normal(1, scale=1.2),
    "b | z": Bernoulli(1),
    "y": Bernoulli(1, learned=True),
    "b": Bernoulli(1, learned=True),
    "c": Bernoulli(1, learned=True),
    "z[t] | z[t-1]": Normal(1, scale=1.2),
}

MODELS = {  # p's latents, what x reads, q
    "one Gaussian": (["z"], "z", {"z | x": Normal()}),
    "a hierarchy": (["z", "w | z"], "w", {"w | x": Normal(), "z | w": Normal(scale="learned")}),
    "a Gaussian for each class": (["y", "z"], "y, z", {"y | x": Bernoulli(), "z | x, y": Normal()}),
    "a Gaussian beside a class": (["y", "z"], "y, z", {"y | x": Bernoulli(), "z | x": Normal()}),
    "a class after a Gaussian": (["y", "z"], "y, z", {"z | x": Normal(), "y | x, z": Bernoulli()}),
    "a Gaussian after a mixture": (
        ["z", "w | z"],
        "z, w",
        {"z | x": Mixture(components=2), "w | x, z": Normal()},
    ),
    "a Gaussian beside a mixture": (
        ["z", "w"],
        "z, w",
        {"z | x": Mixture(components=2), "w | x": Normal()},
    ),
    "a binary after a Gaussian": (
        ["z", "b | z"],
        "z, b",
        {"z | x": Normal(), "b | x, z": Bernoulli()},
    ),
    "a Gaussian after a binary": (["b", "z"], "z, b", {"b | x": Bernoulli(), "z | x, b": Normal()}),
    "a binary after a mixture": (
        ["z", "b | z"],
        "z, b",
        {"z | x": Mixture(components=2), "b | x, z": Bernoulli()},
    ),
    "a binary for each class": (
        ["y", "b"],
        "y, b",
        {"y | x": Bernoulli(), "b | x, y": Bernoulli()},
    ),
    "two classes, the second by the first": (
        ["y", "b", "z"],
        "y, b, z",
        {"y | x": Bernoulli(), "b | x, y": Bernoulli(), "z | x": Normal()},
    ),
    "a Gaussian for each of two classes in turn": (
        ["y", "b", "z"],
        "y, b, z",
        {"y | x": Bernoulli(), "b | x, y": Bernoulli(), "z | x, b": Normal(scale="learned")},
    ),
    "a class beside one after a Gaussian": (
        ["y", "b", "z"],
        "y, b, z",
        {"z | x": Normal(), "y | x": Bernoulli(), "b | x, z": Bernoulli()},
    ),
    "a sequence of two steps": (
        ["z[t] | z[t-1]"],
        "z[t]",
        {"z[t] | z[t-1], x[t]": Normal(scale="learned")},
    ),
    "a third class beside them": (
        ["y", "b", "c"],
        "y, b, c",
        {"y | x": Bernoulli(), "b | x, y": Bernoulli(), "c | x": Bernoulli()},
    ),
}
WORDS = {
    "z": [""],
    "w": [""],
    "y": ["", "sum", "score"],
    "b": ["", "sum", "score"],
    "c": ["", "sum", "score"],
}


def build(name):
    latents, reads, q = MODELS[name]
    torch.manual_seed(3)
    x = "x[t]" if "[t]" in reads else "x"
    model = Model(
        {key: P[key] for key in latents} | {f"{x} | {reads}": Normal(1, scale=2.0)}, q
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
        for factor in (
            model.factors.values()
        ):  # spreads near 1: the weights vary little, so that the quadrature converges
            if "scale" in factor.sizes and hasattr(factor, "net"):
                factor.net.blocks.bias[-factor.sizes["scale"] :] += 0.5
            for vector in factor.vectors.values():
                vector += 0.5
    return model


def grid(layout, integrate):
    """Values for every number of the noise, one row for each combination, and the rows' weights;
    None if there are too many.

    Draws by the score function (logistic noise) take both values. Gaussian noise takes nodes, or
    one fixed value where it need not be integrated.
    """
    places = [
        (name, index)
        for name, (_, shape) in layout.items()
        for index in itertools.product(*(range(n) for n in shape))
    ]
    gaussian = sum(layout[name][0] == "normal" for name, _ in places)
    if integrate and gaussian > max(NODES):
        return None
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES[max(gaussian, 1)] if integrate else 1)
    rng = np.random.default_rng(0)
    values, shares = [], []
    for name, _ in places:
        if layout[name][0] == "logistic":
            values.append(np.array([-1e4, 1e4]))
            shares.append(np.ones(2))
        else:
            values.append(nodes if integrate else rng.standard_normal(1))
            shares.append(weights / weights.sum())
    rows = [
        torch.as_tensor(column.reshape(-1)) for column in np.meshgrid(*values, indexing="ij")
    ] or [torch.ones(1)]
    share = [torch.as_tensor(column.reshape(-1)) for column in np.meshgrid(*shares, indexing="ij")]
    noise = {
        name: torch.empty(*shape[:-2], len(rows[0]), shape[-1], dtype=torch.float64)
        for name, (_, shape) in layout.items()
    }
    for (name, index), row in zip(places, rows, strict=False):
        noise[name][*index[:-2], :, index[-1]] = row
    return noise, math.prod(share, start=torch.ones(1, dtype=torch.float64))


def mean_gradients(model, plan, plain, kl_weight):
    """The mean of the estimator's gradient, and the gradient of the mean of the bound; None if
    there are too many nodes.
    """
    steps = 2 if model.graph.timed["x"] else 1
    found = grid(plan.layout(1, steps, dropout=False), integrate=plan.gradient != "plain")
    if found is None:
        return None
    noise, share = found
    batch = {
        "x": torch.tensor([0.7, -0.4], dtype=torch.float64)[:steps, None, None].expand(
            steps, len(share), 1
        )
    }
    value = estimate(plan, model.factors, batch, noise, kl_weight=kl_weight).objective
    score = [name for name, choice in plain.choices.items() if choice.draw is Draw.SCORE]
    drawn = replace(
        plain,
        choices={
            name: replace(c, draw=Draw.SAMPLE) if name in score else c
            for name, c in plain.choices.items()
        },
    )
    working = Estimate(drawn, model.factors, batch, noise)
    for name in score:
        share = share * working.log_q(name).movedim(-2, 0).flatten(1).sum(1).exp()
    assert abs(share.sum().item() - 1) < 1e-9
    parameters = list(model.parameters())

    def gradient(total):
        parts = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                for g, p in zip(parts, parameters, strict=True)
            ]
        )

    return gradient((share.detach() * value).sum()), gradient(
        (share * working.bound(kl_weight).objective).sum()
    )


def ways(model):
    latents = model.graph.latents
    for words in itertools.product(*(WORDS[name] for name in latents)):
        how = {name: word for name, word in zip(latents, words, strict=True) if word}
        for bound, samples, gradient in itertools.product(
            ["elbo", "iwae"], [1, 2], ["plain", "stl", "dreg"]
        ):
            yield {"how": how, "bound": bound, "samples": samples, "gradient": gradient}


def test_every_word_for_a_draw_is_compared_here_or_said_to_be_biased():
    models = [build(name) for name in MODELS]
    asked = [(model, way["how"]) for model in models for way in ways(model)]
    biased = [
        (model, {latent: word})
        for model in models
        for latent in model.graph.latents
        for word in DRAWS
    ]
    seen = set()
    for requests, expected in ((asked, False), (biased, True)):
        for model, how in requests:
            for choices in ({"samples": 2}, {"samples": 2, "bound": "iwae"}):
                try:
                    plan = model.plan(how=how, **choices)
                except ValueError:
                    continue
                if bool(plan.biased) == expected:
                    seen |= {
                        plan.choices[name].draw
                        for name in (plan.biased if expected else plan.choices)
                    }
    assert seen == set(DRAWS)


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_of_the_gradient_is_the_gradient_of_the_mean(name):
    model, compared = build(name), 0
    for way in ways(model):
        try:
            plan, plain = model.plan(**way), model.plan(**(way | {"gradient": "plain"}))
        except ValueError:
            continue
        assert not plan.biased
        by_latent = dict(zip(model.graph.latents, itertools.cycle((0.3, 1.4)), strict=False))
        for kl_weight in (
            (1.0, 0.3, 1.5, by_latent) if plan.gradient == "dreg" else (1.0, 0.3, by_latent)
        ):
            both = mean_gradients(model, plan, plain, kl_weight)
            if both is not None:
                compared += 1
                # of the quadrature; finite sums have none
                error = 1e-4 if plan.gradient != "plain" else 1e-12
                torch.testing.assert_close(
                    *both,
                    rtol=0,
                    atol=error,
                    msg=lambda text, way=way, kl=kl_weight: f"{way}, KL weight {kl}: {text}",
                )
    assert compared >= 6


REFUSED = [
    (
        "a Gaussian after a mixture",
        {"gradient": "stl"},
        "the weights of w's draws depend on z, which is summed inside the logarithm",
    ),
    (
        "a Gaussian for each class",
        {"gradient": "stl", "how": {"y": "sum"}},
        "the weights of z's draws depend on y, which is summed inside",
    ),
    (
        "a Gaussian for each of two classes in turn",
        {"gradient": "stl", "how": {"y": "sum"}},
        "the weights of z's draws depend on y",
    ),
    (
        "a third class beside them",
        {"how": {"y": "sum", "c": "score"}, "samples": 2},
        'Use "sum" for b too, or "enumerate" for y',
    ),
]


@pytest.mark.parametrize(("name", "way", "message"), REFUSED)
def test_what_would_be_biased_without_a_word_is_refused(name, way, message):
    with pytest.raises(ValueError, match=message):
        build(name).plan(**{"bound": "iwae", "samples": 1, **way})


@pytest.mark.parametrize("samples", [2, 3])
def test_the_score_function_of_draws_for_each_component_gives_one_number_a_row(samples):
    """The bound is log 1/K Σ_k Σ_c π_c p(x, z, k)/q(z) q(k|z), taken at the draws by hand."""
    torch.manual_seed(0)
    p = {"z": Normal(1), "k | z": Poisson(1), "x | k": Normal(1)}
    model = Model(p, {"z | x": Mixture(components=2), "k | x, z": Poisson()}).double()
    x = torch.tensor([[0.3], [-0.7], [1.1]], dtype=torch.float64)
    for rows in (x, x[:1]):
        plan, batch = model.plan(bound="iwae", samples=samples), model.prepare(x=rows)
        noise = model.draw_noise(plan, batch, seed=1)
        working = Estimate(plan, model.factors, batch, noise)
        z, k = working.program.values["z"], working.program.values["k"]  # [2, K, 1, N, 1]
        mixture = working.program.distribution("q", "z")[1]

        def log_prob(side, name, value, working=working):
            return working.program.distribution(side, name)[1].log_prob(value)

        log_w = (
            log_prob("p", "z", z)
            + log_prob("p", "k", k)
            + log_prob("p", "x", batch["x"])
            - log_prob("q", "k", k)
        )
        log_w = (
            log_w[..., 0] - mixture.log_prob(z) + mixture.log_weights.movedim(-1, 0).unsqueeze(1)
        )
        expected = log_w.logsumexp(0).logsumexp(0).squeeze(0) - math.log(samples)
        found = model.elbo(x=rows, bound="iwae", samples=samples, noise=noise).value
        torch.testing.assert_close(found, expected)
