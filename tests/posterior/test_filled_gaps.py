"""Missing entries that p reads, after training: evidence, posterior, imputation, and fit agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from aevb import (
    AIS,
    LSTM,
    Bernoulli,
    Deterministic,
    Exact,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    alternate,
    diagnose,
    em,
    fit,
    linear,
    mle,
    mlp,
)
from aevb.evidence.exact import exact_evidence
from aevb.posterior import impute
from aevb.posterior.amortised import Posterior
from aevb.posterior.weighted import WeightedPosterior

NAN = math.nan
STEPS = 6


def build(p: dict, q: dict, seed: int = 0, **options) -> Model:
    torch.manual_seed(seed)
    return Model(p=p, q=q, **options).double()


def linear_gaussian(seed: int = 0) -> Model:
    """z[t] and x[t] read z[t-1] and x[t-1]; q's mean is linear in what it reads."""
    model = build(
        {
            "h[t] | z[t-1], x[t-1]": Deterministic(2, net=linear(bias=False)),
            "z[t] | h[t]": Normal(1, net=linear(bias=False), scale=0.6),
            "x[t] | x[t-1], z[t]": MultivariateNormal(
                2, net=linear(bias=False), covariance="shared"
            ),
        },
        {"z[t] | h[t], x[t]": Normal(net=linear(), scale=1.0)},
        seed,
    )
    with torch.no_grad():
        for parameter in model.phi():
            parameter.mul_(0.2)  # near the prior, which bounds the importance weights
        model.factors["p(x[t]|x[t-1], z[t])"].vectors["tril"].copy_(torch.tensor([0.2, 0.7, -0.1]))
    return model


def joint_covariance(model: Model) -> np.ndarray:
    """The covariance of (z[0], x[0], z[1], …), by solving v = A v + ε."""

    def weight(entry: str, label: str) -> np.ndarray:
        return model.factors[entry].net.blocks.weights[label].detach().numpy()

    def root() -> np.ndarray:
        factor = model.factors["p(x[t]|x[t-1], z[t])"]
        with torch.no_grad():
            raw = factor({"x[t-1]": torch.zeros(1, 2), "z[t]": torch.zeros(1, 1)})
            return factor.distribution(raw)._unbroadcasted_scale_tril.reshape(2, 2).numpy()

    to_z, z_of_h = weight("p(z[t]|h[t])", "h[t]"), "p(h[t]|z[t-1], x[t-1])"
    reads, noise = np.zeros((3 * STEPS, 3 * STEPS)), np.zeros((3 * STEPS, 3 * STEPS))
    for t in range(STEPS):
        z, x = slice(3 * t, 3 * t + 1), slice(3 * t + 1, 3 * t + 3)
        noise[z, z], noise[x, x] = 0.36, root() @ root().T
        reads[x, z] = weight("p(x[t]|x[t-1], z[t])", "z[t]")
        if t:
            before_z, before_x = slice(3 * t - 3, 3 * t - 2), slice(3 * t - 2, 3 * t)
            reads[z, before_z] = to_z @ weight(z_of_h, "z[t-1]")
            reads[z, before_x] = to_z @ weight(z_of_h, "x[t-1]")
            reads[x, before_x] = weight("p(x[t]|x[t-1], z[t])", "x[t-1]")
    inverse = np.linalg.inv(np.eye(3 * STEPS) - reads)
    return inverse @ noise @ inverse.T


def conditioned(model: Model, x: Tensor) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """log p(known), and the mean and sd [T, 3] of (z, x) given the known entries, by row."""
    whole, found = joint_covariance(model), []
    for row in x.numpy():
        known = np.hstack([np.full((STEPS, 1), False), ~np.isnan(row)]).reshape(-1)
        y, s = row[~np.isnan(row)], whole[np.ix_(known, known)]
        log_p = -0.5 * (y @ np.linalg.solve(s, y) + np.linalg.slogdet(2 * np.pi * s)[1])
        gain = whole[:, known] @ np.linalg.inv(s)
        variance = np.diag(whole - gain @ whole[known]).clip(0)
        found.append((log_p, (gain @ y).reshape(-1, 3), np.sqrt(variance).reshape(-1, 3)))
    return found


@pytest.fixture(scope="module")
def gappy() -> tuple[Model, Tensor]:
    """About 30 % of the entries are missing: single ones and whole steps, one row without."""
    model = linear_gaussian()
    x = model.sample(5, steps=STEPS, seed=1)["x"]
    gone = torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    gone[0], gone[1, 2:4] = False, True
    return model, torch.where(gone, NAN, x)


# The evidence -------------------------------------------------------------------------------------


def test_all_estimates_of_the_evidence_agree(gappy):
    model, x = gappy
    exact = torch.tensor([log_p for log_p, *_ in conditioned(model, x)])
    for method in ("auto", "exact"):
        found = model.log_evidence(x=x, method=method)
        assert found.method == "exact"
        torch.testing.assert_close(found.value, exact)
    for method in ("importance", "particles", "prior"):
        found = model.log_evidence(x=x, method=method, samples=4000, seed=0)
        assert found.method == method
        # 15 normal numbers: one seed in 1,000 fails (t₁₅ for the filters: one in 150)
        assert ((found.value - exact).abs() < 4 * found.stderr + 1e-12).all(), method
        assert found.stderr.max() < 0.2
    with torch.no_grad():
        bound = model.elbo(x=x, samples=4000, seed=0)
    assert (bound.value < exact).all()


def test_the_exact_evidence_has_the_gradient_of_the_marginal(gappy):
    """mle() ascends it: against finite differences."""
    model, x = gappy
    batch = model.prepare(gaps=True, x=x)
    value = exact_evidence(model, batch).sum()
    parameters = model.theta()
    gradients = torch.autograd.grad(value, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        flat, step = parameter.detach().reshape(-1), 1e-5
        for i in range(len(flat)):
            with torch.no_grad():
                flat[i] += step
                above = exact_evidence(model, batch).sum()
                flat[i] -= 2 * step
                below = exact_evidence(model, batch).sum()
                flat[i] += step
            torch.testing.assert_close(
                gradient.reshape(-1)[i], (above - below) / (2 * step), rtol=1e-5, atol=1e-6
            )


def test_other_methods_refuse_gaps_with_the_reason(gappy):
    model, x = gappy
    for method in ("ais", AIS()):
        with pytest.raises(ValueError, match="annealed importance sampling has no chains for them"):
            model.log_evidence(x=x, method=method)
    state = build(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(3),
            "z[t] | h[t]": Normal(1),
            "x[t] | h[t], z[t]": Normal(2),
        },
        {"z[t] | h[t], x[t]": Normal()},
    )
    with pytest.raises(ValueError, match='not known in closed form.* Use method="particles"'):
        state.log_evidence(x=x, method="exact")
    assert state.log_evidence(x=x, samples=20, seed=0).method == "particles"


def test_gaps_without_time_have_exact_evidence():
    """y reads x: a Gaussian x is integrated out, classes are summed over."""
    rows = torch.tensor([[NAN], [0.3]], dtype=torch.float64)
    y = torch.tensor([[0.5], [-0.2]], dtype=torch.float64)
    gaussian = build(
        {"z": Normal(1), "x | z": Normal(1, scale=0.8), "y | x, z": Normal(1, scale=0.5)},
        {"z | y": Normal()},
    )
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64).unsqueeze(-1)
    whole = gaussian.log_evidence(x=grid, y=y[:1].expand(len(grid), 1), method="exact").value
    expected = torch.trapezoid(whole.exp(), grid[:, 0]).log()
    found = gaussian.log_evidence(x=rows, y=y, method="exact").value
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found[1], gaussian.log_evidence(x=rows[1:], y=y[1:], method="exact").value[0]
    )
    classes = build(
        {"z": OneHot(2), "x | z": OneHot(3), "y | x, z": Normal(1)}, {"z | y": OneHot()}
    )
    labels = torch.tensor([-1, 2])
    every = classes.log_evidence(x=torch.arange(3), y=y[:1].expand(3, 1), method="exact").value
    torch.testing.assert_close(
        classes.log_evidence(x=labels, y=y, method="exact").value[0], every.logsumexp(0)
    )


def test_classes_in_time_are_summed_over_where_they_are_missing():
    """An autoregressive hidden Markov model, against the sum over all completions."""
    model = build(
        {"z[t] | z[t-1]": OneHot(2), "x[t] | x[t-1], z[t]": Bernoulli(2)},
        {"z[t] | z[t-1], x[t]": OneHot()},
    )
    x = model.sample(1, steps=4, seed=0)["x"]
    x[0, 1], x[0, 2, 0], x[0, 3, 1] = NAN, NAN, NAN
    gone = x[0].isnan()
    bits = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 4)
    every = x.repeat(16, 1, 1)
    every[:, gone] = bits
    whole = model.log_evidence(x=every, method="exact").value
    assert model.log_evidence(x=x).method == "exact"
    torch.testing.assert_close(model.log_evidence(x=x).value[0], whole.logsumexp(0))
    weight = whole.softmax(0)
    filled = model.impute(x=x, method="exact", samples=4000, seed=0)
    expected = weight @ bits
    torch.testing.assert_close(filled.mean["x"][0, gone], expected)
    torch.testing.assert_close(filled.sd["x"][0, gone], (expected * (1 - expected)).sqrt())
    drawn = filled.draws["x"][:, 0, gone]
    found = (drawn @ torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)).long()
    share = torch.bincount(found, minlength=16) / 4000
    assert ((share - weight).abs() < 5 * (weight / 4000).sqrt()).all()
    sampled = model.log_evidence(x=x, method="importance", samples=4000, seed=0)
    assert (sampled.value - whole.logsumexp(0)).abs() < 4 * sampled.stderr


# Imputation ---------------------------------------------------------------------------------------


def test_imputed_moments_are_those_of_the_exact_conditional(gappy):
    model, x = gappy
    gone = x.isnan()
    mean, sd = (
        torch.tensor(np.stack([row[i][:, 1:] for row in conditioned(model, x)])) for i in (1, 2)
    )
    exact = model.impute(x=x, method="exact", samples=4000, seed=0)
    torch.testing.assert_close(exact.mean["x"][gone], mean[gone])
    torch.testing.assert_close(exact.sd["x"][gone], sd[gone])
    assert torch.equal(exact.mean["x"][~gone], x[~gone])
    batch = model.prepare(gaps=True, x=x)
    particles = impute(WeightedPosterior(model, batch, seed=0), 4000)
    assert particles.method == "particles"
    # 4,000 draws; of 1,000 weighted particles, about 100 count at the first steps.
    for found, error in ((exact, 5 / 4000**0.5), (particles, 5 / 100**0.5)):
        draws = found.draws["x"]
        assert torch.equal(draws[:, ~gone], x[~gone].expand(4000, -1))
        assert ((draws[:, gone].mean(0) - mean[gone]).abs() < error * sd[gone]).all()
        assert ((draws[:, gone].std(0) / sd[gone]).log().abs() < error).all()
    assert ((particles.mean["x"][gone] - mean[gone]).abs() < 0.5 * sd[gone]).all()
    assert ((particles.sd["x"][gone] / sd[gone]).log().abs() < 0.5).all()


def test_importance_weights_fill_gaps_where_no_filter_applies():
    model = build(
        {"z": Normal(1), "x | z": Normal(2, scale=0.8), "y | x, z": Normal(1, scale=0.5)},
        {"z | y": Normal(scale=1.0)},
    )
    data = {"x": torch.tensor([[NAN, 0.4]]), "y": torch.tensor([[2.0]])}
    exact = model.impute(method="exact", **data)
    posterior = WeightedPosterior(model, model.prepare(gaps=True, **data), seed=0)
    assert posterior.method == "importance"
    found = impute(posterior, 500)
    assert (found.mean["x"] - exact.mean["x"]).abs().max() < 0.2 * exact.sd["x"].max()
    assert "weighted draws of q" in repr(found)


def test_what_impute_chooses():
    """Weighted draws where p reads the gaps, also for a q that was trained without them."""
    model = build(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(3),
            "z[t] | h[t]": Normal(1),
            "x[t] | h[t], z[t]": Bernoulli(2),
        },
        {"z[t] | h[t], x[t]": Normal()},
    )
    x = model.sample(20, steps=4, seed=0)["x"]
    fit(model, {"x": x}, steps=3, progress=False)
    x[0, 2], x[1, 3, 0] = NAN, NAN
    found = model.impute(x=x[:2], seed=0)
    assert repr(found) == "3 missing cells of x filled by a particle filter, 50 draws"
    assert bool(((found.mean["x"] >= 0) & (found.mean["x"] <= 1)).all())
    assert set(found.draws["x"].unique().tolist()) <= {0.0, 1.0}
    again = model.impute(x=x[:2], seed=0)
    assert torch.equal(found.draws["x"], again.draws["x"])
    assert model.impute(x=x[:2], seed=0, method="q").method == "q"


def test_a_variable_that_nothing_reads_is_filled_given_weighted_draws():
    """y[t] | x[t] has gaps of its own: its moments follow from the draws of x and z."""
    model = build(
        {
            "z[t] | z[t-1]": Normal(1, scale=0.6),
            "x[t] | x[t-1], z[t]": Normal(1, scale=0.5),
            "y[t] | x[t]": Normal(1, scale=0.3),
        },
        {"z[t] | z[t-1], x[t]": Normal(scale=0.8)},
    )
    drawn = model.sample(2, steps=4, seed=1)
    x, y = drawn["x"], drawn["y"]
    x[0, 1], y[0, 1], y[1, 2] = NAN, NAN, NAN
    exact = model.impute(x=x, y=y, method="exact")
    found = impute(WeightedPosterior(model, model.prepare(gaps=True, x=x, y=y), seed=0), 2000)
    gone = y.isnan()
    assert ((found.mean["y"] - exact.mean["y"])[gone].abs() < 0.2 * exact.sd["y"][gone]).all()
    assert ((found.sd["y"] / exact.sd["y"])[gone].log().abs() < 0.2).all()


# The posterior ------------------------------------------------------------------------------------


def test_the_exact_posterior_integrates_gaps_out(gappy):
    model, x = gappy
    posterior = model.posterior(x=x, method="exact", seed=0)
    rows = conditioned(model, x)
    mean, sd = (torch.tensor(np.stack([row[i][:, :1] for row in rows])) for i in (1, 2))
    torch.testing.assert_close(posterior["z"].mean, mean)
    drawn = posterior.sample(4000)["z"]
    assert ((drawn.mean(0) - mean).abs() < 5 / 4000**0.5 * sd).all()
    z = drawn[0]
    # log p(z | x) from the joint Gaussian: log p(z, x known) − log p(x known)
    whole = joint_covariance(model)
    for row, value in enumerate(posterior.log_prob(z=z)):
        both = torch.cat([z[row], x[row]], -1).numpy()
        known = ~np.isnan(both).reshape(-1)
        y, s = both.reshape(-1)[known], whole[np.ix_(known, known)]
        log_p = -0.5 * (y @ np.linalg.solve(s, y) + np.linalg.slogdet(2 * np.pi * s)[1])
        expected = log_p - conditioned(model, x)[row][0]
        torch.testing.assert_close(float(value), float(expected), rtol=1e-8, atol=1e-8)


def test_the_posterior_by_q_draws_missing_entries(gappy):
    model, x = gappy
    posterior = model.posterior(x=x, method="q", samples=200, seed=0)
    assert posterior["z"].mean.shape == (5, STEPS, 1)
    drawn = posterior.sample(3)["z"]
    assert drawn.shape == (3, 5, STEPS, 1)
    joint = posterior.joint(3)
    assert torch.equal(joint["x"][..., 0, :], x[0].expand(3, -1, -1))
    assert not joint["x"].isnan().any()
    with pytest.raises(ValueError, match=r"reads h\[t\], which depends on missing entries of x"):
        posterior.log_prob(z=drawn[0])
    means = model.reconstruct(x=x, method="q", seed=0)["x"]
    assert means.shape == x.shape
    assert bool(means.isfinite().all())


def test_q_of_data_alone_has_a_density_beside_gaps():
    model = build(
        {"z[t] | z[t-1]": Normal(1), "x[t] | x[t-1], z[t]": Normal(1)},
        {"z[t] | z[t-1], x[t]": Normal()},
    )
    x = model.sample(2, steps=3, seed=0)["x"]
    x[0, 1] = NAN
    posterior = model.posterior(x=x, method="q", seed=0)
    z = posterior.sample(1)["z"][0]
    zeros = model.posterior(x=x.nan_to_num(0.0), method="q")
    torch.testing.assert_close(posterior.log_prob(z=z), zeros.log_prob(z=z))


def test_joint_draws_by_bayes_rule_beside_gaps():
    p = {"y": OneHot(2), "z": Normal(1), "x | z": Normal(1), "w | x, y": Normal(1)}
    model = build(p, {"z | w": Normal(), "y | x, w": Exact()})
    data = {"x": torch.tensor([[NAN], [0.2]]), "w": torch.tensor([[1.0], [0.3]])}
    posterior = Posterior(model, model.prepare(gaps=True, **data), seed=0)
    drawn = posterior.joint(4)
    assert set(drawn) == {"x", "y", "z"}
    assert ((drawn["x"][:, 0, 1] - 0.2).abs() < 1e-6).all()
    p = {"y": OneHot(2), "x | y": Normal(1), "w | x, y": Normal(1)}
    tied = build(p, {"y | x, w": Exact()})
    with pytest.raises(ValueError, match="p reads and draws given y, so there are no joint draws"):
        Posterior(tied, tied.prepare(gaps=True, **data)).joint()


# Training -----------------------------------------------------------------------------------------


def test_fit_trains_with_gaps_and_agrees_with_the_exact_evidence(gappy):
    model = linear_gaussian()
    x = model.sample(60, steps=STEPS, seed=5)["x"]
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = NAN
    other = linear_gaussian(seed=7)
    before = other.log_evidence(x=x, method="exact").value.mean()
    run = fit(
        other, {"x": x}, validation={"x": x}, epochs=60, batch=30, lr=0.02, seed=0, progress=False
    )
    history = run.history
    after = other.log_evidence(x=x, method="exact").value.mean()
    assert after > before + 0.3
    assert history["validation elbo"][-1] < history["validation evidence"][-1]
    assert abs(history["validation evidence"][-1] - float(after)) < 1e-6
    best = linear_gaussian(seed=7)
    fit(best, {"x": x}, schedule=mle(), progress=False)
    assert best.log_evidence(x=x, method="exact").value.mean() >= after
    with pytest.raises(ValueError, match="entries are missing that p reads|em\\(\\)"):
        fit(linear_gaussian(), {"x": x}, schedule=em(), steps=1, progress=False)


def test_mle_integrates_gaps_out_of_a_gaussian_autoregression():
    """At the maximum, the gradient of the evidence vanishes."""
    model = linear_gaussian(3)
    x = linear_gaussian(4).sample(40, steps=STEPS, seed=2)["x"]
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = NAN
    fit(model, {"x": x}, schedule=mle(tol=1e-10), progress=False)
    value = exact_evidence(model, model.prepare(gaps=True, x=x)).mean()
    gradients = torch.autograd.grad(value, model.theta())
    assert max(float(g.abs().max()) for g in gradients) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["elbo", "iwae"])
def test_fit_trains_binary_gaps_by_the_score_function(bound):
    model = build(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(4),
            "z[t] | h[t]": Normal(1, net=mlp(4)),
            "x[t] | h[t], z[t]": Bernoulli(3, net=mlp(4)),
        },
        {"z[t] | h[t], x[t]": Normal(net=mlp(4))},
    )
    x = (torch.arange(6)[:, None] + torch.arange(3)) % 3 == 0  # a pattern with period 3
    x = x.double().expand(40, 6, 3).clone()
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = NAN
    run = fit(
        model, {"x": x}, validation={"x": x}, epochs=80, batch=20, lr=0.02, samples=4, bound=bound,
        seed=0, progress=False,
    )  # fmt: skip
    found = run.history[f"validation {bound}"]
    assert found[-1] > found[0] + 2
    filled = model.impute(x=x[:5], seed=0).mean["x"]
    truth = ((torch.arange(6)[:, None] + torch.arange(3)) % 3 == 0).double().expand(5, 6, 3)
    gone = x[:5].isnan()
    assert float(((filled > 0.5).double() == truth)[gone].double().mean()) > 0.9


def test_a_detached_request_is_recorded_and_needs_one_sample(tmp_path):
    model = build(
        {"z[t]": Normal(1), "x[t] | x[t-1], z[t]": Bernoulli(2)}, {"z[t] | x[t]": Normal()}
    )
    x = model.sample(20, steps=4, seed=0)["x"]
    x[:5, 2] = NAN
    with pytest.raises(ValueError, match="Ask for samples=2 or more"):
        fit(model, {"x": x}, steps=2, progress=False)
    run = fit(
        model, {"x": x}, validation={"x": x}, steps=4, how={"x": "detached"}, out=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    assert 'how = {x = "detached"}' in (tmp_path / "run" / "config.toml").read_text() or (
        "detached" in (tmp_path / "run" / "config.toml").read_text()
    )
    assert len(run.history["validation elbo"])


def test_alternate_and_em_with_gaps(gappy):
    model, x = gappy
    fit(model.fresh(0), {"x": x}, schedule=alternate(1, 1), steps=4, progress=False)


def test_what_needs_complete_rows_says_so():
    model = build(
        {"y": OneHot(2), "f[t] | x[t-1]": Deterministic(1), "x[t] | f[t], y": Normal(1)},
        {"y | f[0]": OneHot()},
    )
    x = model.sample(10, steps=3, seed=0)["x"]
    x[0, 1] = NAN
    with pytest.raises(ValueError, match="x has missing entries that p reads, and diagnose"):
        diagnose(model, {"x": x})
    labels = torch.arange(10) % 2
    with pytest.raises(ValueError, match=r"reads f\[.*, which depends on missing entries that p"):
        fit(model, {"x": x, "y": labels}, classify=1.0, steps=1, progress=False)
