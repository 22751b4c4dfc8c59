"""Exact evidence of Gaussians whose weights a class chooses, against joint densities by hand."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch.nn.functional import softplus

from aevb import Model, Normal, OneHot, switching
from aevb.evidence.exact import exact_evidence

RNG = np.random.default_rng(0)


def both_ways(model, **data):
    """Return the evidence, found with and without gradients: they differ in their filters."""
    found = model.log_evidence(**data)
    assert found.method == "exact"
    again = exact_evidence(model, model.prepare(**data)).detach()
    np.testing.assert_allclose(again, found.value, rtol=1e-10)
    return found.value


def numbers(model, factor):
    """Return the weights and biases by class, and the scale, of a switching factor."""
    found = model.factors[factor]
    blocks, classes = found.net.blocks, found.net.classes
    weights = {
        name: weight.detach().numpy().reshape(classes, found.d, -1)
        for name, weight in blocks.weights.items()
    }
    bias = blocks.bias.detach().numpy().reshape(classes, found.d)
    return weights, bias, softplus(found.vectors["scale"]).detach().numpy()


def test_a_mixture_of_factor_analysers_with_loadings_of_its_own_for_each():
    """log Σ_y p(y) N(x; b_y, W_y W_yᵀ + Ψ)."""
    torch.manual_seed(0)
    model = Model(
        p={
            "y": OneHot(3),
            "z": Normal(2),
            "x | z, y": Normal(4, net=switching("y"), scale="learned"),
        },
        q={"y | x": OneHot(), "z | x, y": Normal()},
    ).double()
    x = RNG.normal(size=(6, 4))
    weights, bias, scale = numbers(model, "p(x|z, y)")
    terms = np.stack(
        [
            multivariate_normal.logpdf(x, bias[c], W @ W.T + np.diag(scale**2))
            for c, W in enumerate(weights["z"])
        ],
        1,
    )
    found = both_ways(model, x=x)
    np.testing.assert_allclose(found, logsumexp(terms, 1) - np.log(3), rtol=1e-10)


@pytest.mark.parametrize("lengths", [None, [4, 2, 3]])
def test_a_state_space_model_whose_matrices_follow_a_given_class(lengths):
    """z_t = W_u z_{t−1} + b_u + noise, x_t = C z_t + noise: a joint Gaussian per row."""
    torch.manual_seed(0)
    model = Model(
        p={
            "z[t] | z[t-1], u[t]": Normal(2, net=switching("u[t]"), scale="learned"),
            "x[t] | z[t]": Normal(1, scale="learned"),
        },
        q={"z[t] | x[t]": Normal()},
        given={"u": 3},
    ).double()
    steps, labels = 4, RNG.integers(0, 3, (3, 4))
    x = RNG.normal(size=(3, steps, 1))
    weights, bias, scale = numbers(model, "p(z[t]|z[t-1], u[t])")
    seen = model.factors["p(x[t]|z[t])"]
    C = seen.net.blocks.weights["z[t]"].detach().numpy()
    shift = seen.net.blocks.bias.detach().numpy()
    noise = softplus(seen.vectors["scale"]).item()
    expected = []
    for n in range(3):
        count = steps if lengths is None else lengths[n]
        mean, spread = np.zeros(2), np.zeros((2, 2))
        means, covariances, passed = [], [], []
        for t in range(count):
            W = weights["z[t-1]"][labels[n, t]]
            mean = W @ mean + bias[labels[n, t]]
            spread = W @ spread @ W.T + np.diag(scale**2)
            passed = [W @ matrix for matrix in passed] + [np.eye(2)]
            means.append(C @ mean + shift)
            covariances.append([spread, list(passed)])
        joint = np.zeros((count, count))
        for t in range(count):
            for s in range(t + 1):
                across = covariances[t][1][s] @ covariances[s][0]
                joint[t, s] = joint[s, t] = (C @ across @ C.T).item()
        joint += noise**2 * np.eye(count)
        expected.append(multivariate_normal.logpdf(x[n, :count, 0], np.concatenate(means), joint))
    more = {} if lengths is None else {"lengths": lengths}
    found = both_ways(model, x=x, u=np.eye(3)[labels], **more)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_a_chain_of_classes_that_switches_carried_gaussians_is_refused():
    model = Model(
        p={
            "y[t] | y[t-1]": OneHot(2),
            "z[t] | z[t-1], y[t]": Normal(2, net=switching("y[t]"), scale="learned"),
            "x[t] | z[t]": Normal(1, scale="learned"),
        },
        q={"y[t] | x[t]": OneHot(), "z[t] | x[t], y[t]": Normal()},
    )
    with pytest.raises(ValueError, match="each path of y has its own Gaussian"):
        model.log_evidence(x=np.zeros((2, 4, 1)), method="exact")


def test_a_latent_that_chooses_weights_must_be_finite_or_known():
    model = Model(
        p={"g": Normal(2), "z": Normal(2), "x | z, g": Normal(3, net=switching("g"), scale=1.0)},
        q={"g | x": Normal(), "z | x, g": Normal()},
    )
    with pytest.raises(ValueError, match=r"p\(x\|z, g\) is not linear in z"):
        model.log_evidence(x=np.zeros((2, 3)), method="exact")
