"""The gap between evidence and bound, split into what q's family and what its amortisation cost,
against closed forms.
"""

import re

import numpy as np
import pytest
import torch
from gap_models import CASES, MIXED, NET, PRECISION, TO_MEAN, S, X, factor_analysis, rows
from torch.distributions import MultivariateNormal as Gaussian
from torch.distributions import kl_divergence

from aevb import (
    Bernoulli,
    Deterministic,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    em,
    fit,
    linear,
    mlp,
)
from aevb.data.sources import open_source
from aevb.declare.distributions import inverse_softplus
from aevb.estimate.estimators import estimate
from aevb.evidence.amortisation import Gap
from aevb.evidence.gap import gap
from aevb.evidence.per_example_q import free_factors, zero_offsets
from aevb.runtime.checked_files import DataWarning
from aevb.training.evaluation import evaluate

# the least KL of a diagonal q: variances 1/diag(precision)
MEAN_FIELD = 0.5 * (PRECISION.diagonal().log().sum() - torch.logdet(PRECISION))


def test_an_encoder_whose_family_holds_the_posterior_loses_by_amortisation_alone():
    model, x = (
        factor_analysis(MultivariateNormal(net=linear(bias=False), covariance="shared")),
        rows(8),
    )
    with torch.no_grad():
        model.factors["q(z|x)"].net.blocks.weights["x"].mul_(0.5)
    found = model.gap(x=x, seed=0)
    q = model.posterior(x=x)["z"]
    closed = kl_divergence(
        Gaussian(q.loc, scale_tril=q.scale_tril),
        Gaussian(x @ TO_MEAN.T, precision_matrix=PRECISION),
    )
    assert found.method == "exact"
    assert closed.min() > 1
    assert found.approximation.abs().max() < 0.01
    assert (
        (found.total - closed).abs() < 5 * found.stderr["total"]
    ).all()  # 8 comparisons, batch means of 10: 0.6 % of seeds would fail one
    assert torch.allclose(found.total, found.approximation + found.amortisation, rtol=0, atol=1e-12)


def test_a_diagonal_q_at_its_optimum_loses_by_its_family_alone():
    model, x = factor_analysis(Normal(net=linear(bias=False), scale="learned")), rows(8)
    with torch.no_grad():
        model.factors["q(z|x)"].vectors["scale"].copy_(
            inverse_softplus(PRECISION.diagonal().rsqrt())
        )
    found = model.gap(x=x, seed=0)
    assert MEAN_FIELD > 0.4
    assert (
        (found.approximation - MEAN_FIELD).abs() < 5 * found.stderr["approximation"] + 0.01
    ).all()
    assert found.amortisation.abs().max() < 0.02


def test_a_shared_scale_that_is_wrong_is_amortisation_too():
    # its scale starts at 1
    model, x = (factor_analysis(Normal(net=linear(bias=False), scale="learned")), rows(8))
    found = model.gap(x=x, seed=0)
    assert (
        (found.approximation - MEAN_FIELD).abs() < 5 * found.stderr["approximation"] + 0.01
    ).all()
    assert found.amortisation.min() > 1


def test_a_scale_that_the_declaration_fixes_belongs_to_the_family():
    model, x = factor_analysis(Normal(net=linear(bias=False), scale=1.0)), rows(8)
    found = model.gap(x=x, seed=0)
    # KL(N(m, I) ‖ N(m, precision⁻¹))
    cost = 0.5 * (PRECISION.diagonal().sum() - 2 - torch.logdet(PRECISION))
    assert found.amortisation.abs().max() < 0.1
    assert ((found.approximation - cost).abs() < 5 * found.stderr["approximation"] + 0.1).all()


def of_the_mean(found: Gap, name: str) -> float:
    """The standard error of a mean over the examples; one seed in a thousand falls three of them
    short.
    """
    return float(found.stderr[name].square().sum().sqrt()) / len(found.elbo)


def test_an_ascent_that_noise_carries_below_its_start_is_not_followed():
    """The encoder is at the family's best, and a scale that is far too wide makes the gradient
    noisy.
    """
    found = factor_analysis(Normal(net=linear(bias=False), scale=1.0)).gap(x=rows(50), seed=0)
    assert float(found.amortisation.mean()) > -3 * of_the_mean(found, "amortisation")
    assert of_the_mean(found, "amortisation") < 0.005


@pytest.mark.slow
def test_a_trained_encoder_whose_family_holds_the_posterior_has_no_gap_of_either_kind():
    torch.manual_seed(2)
    model = Model(
        p={
            "u": Normal(1),
            "z | u": Normal(2, scale="learned"),
            "x | z, u": Normal(4, scale="learned"),
        },
        q={"u | x": Normal(scale="learned"), "z | x, u": MultivariateNormal()},
    )
    x = torch.randn(64, 3) @ torch.randn(3, 4) + 0.5 * torch.randn(64, 4)
    fit(model, {"x": x}, steps=1500, lr=0.01, seed=0, progress=False)
    found = model.gap(x=x[:50], seed=0)
    assert found.method == "exact"
    assert float(found.amortisation.mean()) > -3 * of_the_mean(found, "amortisation")
    assert float(found.approximation.mean()) < 0.001


def test_finite_latents_reach_the_evidence_without_sampling():
    torch.manual_seed(0)
    model = Model(
        p={"y": OneHot(4), "x | y": Bernoulli(6)}, q={"y | x": OneHot(net=mlp(8))}
    ).double()
    found = model.gap(x=torch.rand(10, 6).round(), seed=0)
    assert found.approximation.abs().max() < 1e-4
    assert found.amortisation.min() > 1e-3
    assert found.stderr["total"].max() == 0


@pytest.mark.parametrize("case", CASES)
def test_offsets_of_zero_change_nothing_and_the_ascent_raises_the_bound(case):
    p, q, data = CASES[case]
    torch.manual_seed(0)
    model = Model(p=p, q=q).double().eval()
    batch = model.prepare(**data)
    partial = frozenset(name[:-1] for name in batch if name.endswith("?"))
    plan = model.plan(samples=4, partial=partial)
    noise = model.draw_noise(plan, batch, seed=0)
    free = estimate(
        plan, free_factors(model, plan), batch, noise | zero_offsets(model, plan, batch)
    ).value
    assert torch.allclose(
        free, estimate(plan, model.factors, batch, noise).value, rtol=0, atol=1e-12
    )
    found = model.gap(iterations=40, samples=100, seed=0, **data)
    assert (found.amortisation > -5 * found.stderr["amortisation"] - 0.02).all()
    assert found.amortisation.mean() > 0.01
    assert (
        found.approximation.mean()
        > -5 * float(found.stderr["approximation"].square().sum().sqrt()) / 6
    )
    assert "amortisation gap" in str(found)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_split_is_refused():
    model = Model(p=MIXED, q={"y | x": OneHot(net=NET), "z | x, y": Normal(net=NET)})
    with pytest.raises(ValueError, match="Every latent is passed"):
        model.gap(x=X, y=np.zeros(6, int), z=torch.zeros(6, 2))
    with pytest.raises(
        ValueError, match=re.escape("gives no unbiased bound to compare with log p(x): no gradient")
    ) as error:
        model.gap(x=X, how={"z": "detached"})
    assert str(error.value).endswith(" Leave it out.")
    with pytest.raises(ValueError, match="unknown word 'guess'") as error:
        model.gap(x=X, how={"y": "guess"})
    assert "A gap needs" not in str(error.value)
    with pytest.raises(ValueError, match="samples is a whole number, 20 or more"):
        model.gap(x=X, samples=3)


def test_a_switching_chain_is_told_the_way_that_works():
    model = Model(
        p={
            "s[t] | s[t-1]": OneHot(2),
            "z[t] | z[t-1], s[t]": Normal(2),
            "x[t] | z[t]": Bernoulli(3),
        },
        q={"s[t] | s[t-1], x[t]": OneHot(), "z[t] | z[t-1], s[t], x[t]": Normal()},
    )
    with pytest.raises(
        ValueError, match=re.escape("A gap needs an unbiased bound: use how={'s': 'score'}.")
    ):
        model.gap(x=S)
    with pytest.raises(
        ValueError, match=re.escape("less so at low temperature. Use how={'s': 'score'}.")
    ):
        model.gap(x=S, how={"s": "gumbel"})
    with pytest.raises(
        ValueError,
        match=re.escape("reaches q, so the gradient of q is biased. Use how={'s': 'score'}."),
    ):
        model.gap(x=S, how={"s": "score", "z": "detached"})
    assert (
        model.gap(x=S, how={"s": "score"}, iterations=2, samples=20, seed=0).total.isfinite().all()
    )


def test_the_evidence_may_be_found_as_one_asks():
    p, q, data = CASES["enumerated"]
    torch.manual_seed(0)
    model = Model(p=p, q=q).double()
    own, plain = (
        model.gap(iterations=100, samples=400, method=method, seed=0, **data)
        for method in ("auto", "prior")
    )
    assert (own.method, plain.method) == ("importance, from the best q", "prior")
    assert torch.equal(own.best, plain.best)
    error = (own.stderr["evidence"].square() + plain.stderr["evidence"].square()).sqrt()
    assert ((own.evidence - plain.evidence).abs() < 5 * error).all()


# Without sampling ---------------------------------------------------------------------------------

Q = {"z | x": Normal(), "w | x": Normal()}
KNOWN_EXACTLY = {  # p beside p(z), p(w) and p(x|·); what x reads; q
    "a function of a latent": ({"h | z": Deterministic(2)}, "h, w", Q),
    "a function of a function": ({"h | z": Deterministic(2), "g | h, w": Deterministic(2)}, "g", Q),
    "a function of the data": (
        {},
        "z, w",
        {"f | x": Deterministic(2), "z | f": Normal(), "w | f": Normal()},
    ),
    "a root": ({}, "z, w", {"z": Normal(learned=True), "w | x": Normal()}),
    "a root and a function": (
        {"h | z, w": Deterministic(2)},
        "h",
        {"z": Normal(learned=True), "w | x": Normal()},
    ),
    "roots alone": ({}, "z, w", {"z": Normal(learned=True), "w": MultivariateNormal(learned=True)}),
}


@pytest.mark.parametrize("known", [(), ("w",)])
@pytest.mark.parametrize("case", KNOWN_EXACTLY)
def test_the_gap_of_a_linear_gaussian_model_is_the_evidence_less_the_bound(case, known):
    """The integrand is quadratic in the noise, so that three nodes of a quadrature give the bound
    exactly.
    """
    functions, reads, q = KNOWN_EXACTLY[case]
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(1), "w": Normal(1), **functions, f"x | {reads}": Normal(2, scale="learned")}, q
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    random = np.random.default_rng(0)
    data = {"x": random.standard_normal((4, 2))} | {
        name: random.standard_normal((4, 1)) for name in known
    }
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    count = 3 ** (2 - len(known))
    batch = model.prepare(**{name: np.repeat(value, count, 0) for name, value in data.items()})
    plan = model.plan(
        clamped=known, how={name: "sampled" for name in ("z", "w") if name not in known}
    )
    grid = np.stack(
        [axis.reshape(-1) for axis in np.meshgrid(*[nodes] * (2 - len(known)), indexing="ij")]
    )
    share = np.prod(
        np.meshgrid(*[weights / weights.sum()] * (2 - len(known)), indexing="ij"), 0
    ).reshape(-1)
    noise = {
        name: torch.as_tensor(np.tile(row, 4)).reshape(1, 1, -1, 1)
        for name, row in zip(plan.drawn, grid, strict=True)
    }
    bound = (
        estimate(plan, model.factors, batch, noise).value.reshape(4, count) * torch.as_tensor(share)
    ).sum(1)
    expected = model.log_evidence(**data).value - bound
    torch.testing.assert_close(gap(model, model.prepare(**data)), expected, rtol=1e-9, atol=1e-9)
    found = evaluate(model, open_source(model.graph, data, model._parameter()))
    assert abs(found["gap"] - expected.mean().item()) < 1e-9


def test_the_gap_of_a_column_without_noise_has_a_value():
    """One factor of data far from 0, without a bias, explains one column alone: the posterior's
    variance is 1e-8, lost in single precision.
    """
    torch.manual_seed(0)
    x = torch.randn(60, 1) * torch.tensor([1.0, 2.0, -1.0]) + 0.3 * torch.randn(60, 3) + 5
    p = {"z": Normal(1), "x | z": Normal(3, net=linear(bias=False), scale="learned")}
    model = Model(p, {"z | x": MultivariateNormal(net=linear(bias=False), covariance="shared")})
    fit(model, {"x": x}, schedule=em(), steps=100)
    found = evaluate(model, open_source(model.graph, {"x": x}, model._parameter()))
    assert abs(found["evidence"] - float(model.log_evidence(x=x).value.mean())) < 1e-4
    assert abs(found["gap"]) < 1e-3


def test_missing_entries_that_p_reads_count_as_approximation():
    """They are drawn from p in both bounds: complete rows lose nothing to an exact q, others do."""
    torch.manual_seed(0)
    model = Model(
        {
            "z[t] | z[t-1]": Normal(1, scale="learned"),
            "x[t] | z[t], x[t-1]": Normal(1, scale="learned"),
        },
        {"z[t] | z[t-1], x[t]": Normal()},
    ).double()
    x = model.sample(4, steps=5, seed=1)["x"]
    fit(model, {"x": model.sample(200, steps=5, seed=2)["x"]}, steps=150, seed=0, progress=False)
    x[0, 2:4] = np.nan
    x[1, 0] = np.nan
    found = model.gap(x=x, iterations=0, samples=1000, seed=0)
    assert found.method == "exact"
    assert torch.equal(found.evidence, model.log_evidence(x=x).value)
    assert (found.approximation > -4 * found.stderr["approximation"]).all()
    with pytest.warns(DataWarning, match="which q was not trained on"):
        elbo = torch.stack([model.elbo(x=x, samples=100, seed=i).value for i in range(5)])
    assert ((found.elbo - elbo.mean(0)).abs() < 0.05).all()
    weighted = model.gap(x=x, iterations=0, samples=4000, method="particles", seed=0)
    assert ((weighted.evidence - found.evidence).abs() < 0.05).all()
