"""What is unknown or missing: labels are summed over, entries leave the likelihood, and q reads
them as zeros.
"""

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm
from small_models import LABELS, NAN, Sphere, X, mixture, put, vae

from aevb import Mixture, Model, MultivariateNormal, Normal, OneHot, linear

# What is unknown ----------------------------------------------------------------------------------


def by_hand(model):
    """log p(y), log p(x|y) and log q(y|x) of the mixture model for all y, [N, 3] each, from its
    weights.
    """
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    root = weights["factors.p(y).root"]
    log_prior = root - np.log(np.exp(root).sum())

    def affine(name):
        blocks = model.factors[name].net.blocks
        (weight,) = blocks.weights.values()
        return weight.detach().numpy(), blocks.bias.detach().numpy()

    weight, bias = affine("p(x|y)")
    heads = weight.T + bias  # a row for each y
    loc, scale = heads[:, :4], np.log1p(np.exp(heads[:, 4:]))
    log_likelihood = norm.logpdf(X[:, None], loc, scale).sum(-1)
    weight, bias = affine("q(y|x)")
    logits = X @ weight.T + bias
    return log_prior, log_likelihood, logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_an_unknown_label_is_summed_over_and_a_known_one_is_clamped():
    model = mixture()
    with torch.no_grad():
        model.factors["p(y)"].root.copy_(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))
    log_prior, log_likelihood, log_q = by_hand(model)
    free = (np.exp(log_q) * (log_prior + log_likelihood - log_q)).sum(-1)
    rows = np.arange(5)
    clamped = log_prior[LABELS] + log_likelihood[rows, LABELS]
    assert np.allclose(model.elbo(x=X).value.detach(), free, rtol=0, atol=1e-12)
    assert np.allclose(model.elbo(x=X, y=LABELS).value.detach(), clamped, rtol=0, atol=1e-12)
    known = np.array([True, False, True, False, False])
    expected = np.where(known, clamped, free)
    integers = np.where(known, LABELS, -1)
    floats = np.where(known, LABELS, NAN)
    vectors = np.where(known[:, None], np.eye(3)[LABELS], NAN)
    for y in (integers, floats, vectors, torch.tensor(integers)):
        bound = model.elbo(x=X, y=y)
        assert np.allclose(bound.value.detach(), expected, rtol=0, atol=1e-12)
        assert set(bound.terms) == {"x", "kl(y)"}
    for nothing in (None, [-1] * 5, np.full(5, NAN), np.full((5, 3), NAN)):
        assert np.allclose(model.elbo(x=X, y=nothing).value.detach(), free, rtol=0, atol=1e-12)


def test_a_known_latent_has_no_kl_weight_whether_other_rows_know_it_or_not():
    model = mixture()
    every = model.elbo(x=X, y=LABELS, kl_weight=0.25).objective
    some = model.elbo(x=X, y=np.where(np.arange(5) < 3, LABELS, -1), kl_weight=0.25).objective
    assert torch.allclose(some[:3], every[:3], rtol=0, atol=1e-12)
    assert torch.allclose(every, model.elbo(x=X, y=LABELS).value, rtol=0, atol=1e-12)


def test_a_latent_known_in_every_row_is_clamped():
    model = vae()
    z = np.random.default_rng(2).standard_normal((5, 2))
    bound = model.elbo(x=X, z=z)
    assert set(bound.terms) == {"x", "z"}
    assert np.allclose(bound.terms["z"].detach(), norm.logpdf(z).sum(-1), rtol=0, atol=1e-12)
    assert torch.equal(bound.value, bound.terms["x"] + bound.terms["z"])
    assert torch.equal(bound.value, model.log_prob(x=X, z=z))
    assert torch.equal(bound.value, model.elbo(x=X, z=z, seed=5).value)  # nothing is drawn


# What is missing ----------------------------------------------------------------------------------

# one entry, a whole row, all but one
HOLES = put(put(put(X, NAN, 0, 1), NAN, 2), NAN, 4, slice(1, 4))


def test_missing_entries_leave_a_factorised_likelihood():
    model = vae(Normal(4, net=linear(), scale="learned"))
    with torch.no_grad():
        model.factors["p(x|z)"].vectors["scale"].copy_(
            torch.tensor([0.1, 0.4, -0.3, 0.9], dtype=torch.float64)
        )
    z = np.random.default_rng(2).standard_normal((5, 2))
    blocks = model.factors["p(x|z)"].net.blocks
    loc = z @ blocks.weights["z"].detach().numpy().T + blocks.bias.detach().numpy()
    scale = np.log1p(np.exp([0.1, 0.4, -0.3, 0.9]))
    each = norm.logpdf(X, loc, scale)
    expected = np.where(np.isnan(HOLES), 0, each).sum(-1)
    term = model.elbo(x=HOLES, z=z).terms["x"].detach()
    assert np.allclose(term, expected, rtol=0, atol=1e-12)
    assert term[2] == 0


def test_missing_entries_are_marginalised_out_of_a_full_covariance():
    model = vae(MultivariateNormal(4, net=linear(), covariance="shared"))
    tril = torch.tensor([0.3, -0.4, 0.8, 0.5, 0.2, 1.1, -0.7, 0.6, 0.1, 0.4], dtype=torch.float64)
    with torch.no_grad():
        model.factors["p(x|z)"].vectors["tril"].copy_(tril)
    factor = np.zeros((4, 4))
    factor[np.tril_indices(4)] = tril
    np.fill_diagonal(factor, np.log1p(np.exp(factor.diagonal())))
    covariance = factor @ factor.T
    z = np.random.default_rng(2).standard_normal((5, 2))
    blocks = model.factors["p(x|z)"].net.blocks
    loc = z @ blocks.weights["z"].detach().numpy().T + blocks.bias.detach().numpy()
    expected = [
        multivariate_normal.logpdf(x[seen], mean[seen], covariance[np.ix_(seen, seen)])
        if seen.any()
        else 0.0
        for x, mean, seen in zip(HOLES, loc, ~np.isnan(HOLES))
    ]
    assert np.allclose(model.elbo(x=HOLES, z=z).terms["x"].detach(), expected, rtol=0, atol=1e-12)


def test_missing_entries_are_marginalised_out_of_every_component():
    model = vae(Mixture(4, components=3))
    z = np.random.default_rng(2).standard_normal((5, 2))
    blocks = model.factors["p(x|z)"].net.blocks
    heads = z @ blocks.weights["z"].detach().numpy().T + blocks.bias.detach().numpy()
    weight, loc, scale = (
        heads[:, :3],
        heads[:, 3:15].reshape(5, 3, 4),
        np.log1p(np.exp(heads[:, 15:].reshape(5, 3, 4))),
    )
    each = np.where(np.isnan(HOLES)[:, None], 0, norm.logpdf(X[:, None], loc, scale)).sum(-1)
    expected = logsumexp(weight - logsumexp(weight, -1, keepdims=True) + each, -1)
    assert np.allclose(model.elbo(x=HOLES, z=z).terms["x"].detach(), expected, rtol=0, atol=1e-12)


def test_a_row_that_is_missing_as_a_whole_leaves_any_likelihood():
    model = vae(Sphere(4))
    z = np.random.default_rng(2).standard_normal((5, 2))
    full, holes = (model.elbo(x=x, z=z).terms["x"].detach() for x in (X, put(X, NAN, 2)))
    assert torch.equal(holes, torch.where(torch.arange(5) == 2, 0.0, full))


def test_a_missing_label_that_is_data_leaves_its_likelihood():
    torch.manual_seed(0)
    model = Model({"z": Normal(2), "x | z": OneHot(3)}, {"z | x": Normal()}).double()
    z = np.random.default_rng(2).standard_normal((5, 2))
    full, holes = (
        model.elbo(x=labels, z=z).terms["x"].detach() for labels in (LABELS, [0, -1, 1, -1, 0])
    )
    assert torch.equal(
        holes, torch.where(torch.tensor([True, False, True, False, True]), full, 0.0)
    )


def test_q_reads_missing_entries_as_zeros():
    model = vae()
    zeros = np.nan_to_num(HOLES)
    assert torch.equal(
        model.elbo(x=HOLES, seed=0).terms["kl(z)"], model.elbo(x=zeros, seed=0).terms["kl(z)"]
    )


def test_the_mask_that_q_reads_starts_without_effect_and_then_has_one():
    torch.manual_seed(0)
    plain = Model({"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal()}).double()
    torch.manual_seed(0)
    told = Model({"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal()}, missing="mask").double()
    assert torch.equal(told.elbo(x=HOLES, seed=0).value, plain.elbo(x=HOLES, seed=0).value)
    with torch.no_grad():
        told.factors["q(z|x)"].net.blocks.missing["x"].fill_(0.5)
    changed = told.elbo(x=HOLES, seed=0).value != plain.elbo(x=HOLES, seed=0).value
    assert changed.tolist() == np.isnan(HOLES).any(-1).tolist()
    assert torch.equal(told.elbo(x=X, seed=0).value, plain.elbo(x=X, seed=0).value)
