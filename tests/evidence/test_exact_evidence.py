"""The exact evidence against closed forms, independent filters, and a sum and integral over
complete assignments. All in float64.

The reference ``summed`` knows no filter: it walks over every joint value (every path) of the
discrete latents, and for each integrates the continuous ones by log ∫ exp f = f(z*) + ½ D log 2π −
½ log |−f''|, exact for the quadratic f(z) = log p(x, z) that automatic differentiation sees.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from exact_models import LENGTHS, MODELS, N, T, build, data_of, holed, laid_out, log_p
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.mixture import GaussianMixture

from aevb import (
    GRU,
    Bernoulli,
    Deterministic,
    Laplace,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    em,
    fit,
    linear,
    mle,
    mlp,
    zoo,
)
from aevb.evidence import exact
from aevb.evidence.exact import exact_evidence, marginal, why_not_exact
from aevb.evidence.structure import Structure

# Every joint value, and the integral at each ------------------------------------------------------


def integral(model, values, free, steps):
    """log ∫ p over the continuous latents of one row, by the exact second-order expansion."""
    graph = model.graph
    width = sum(graph.size(name) for name, _ in free)
    batch = laid_out(
        model,
        values
        | {place: torch.zeros(1, graph.size(place[0]), dtype=torch.float64) for place in free},
        steps,
    )

    def f(flat):
        filled, parts = dict(batch), flat.split([graph.size(name) for name, _ in free])
        for name in {name for name, _ in free}:
            steps_of = [filled[name][t] for t in range(len(filled[name]))]
            for (other, t), part in zip(free, parts, strict=True):
                if other == name:
                    steps_of[t] = part[None]
            filled[name] = torch.stack(steps_of)
        return log_p(model, filled).sum()

    zero = torch.zeros(width, dtype=torch.float64, requires_grad=True)
    value = f(zero)
    (gradient,) = torch.autograd.grad(value, zero, create_graph=True)
    precision = -torch.stack(
        [torch.autograd.grad(entry, zero, retain_graph=True)[0] for entry in gradient]
    )
    quadratic = gradient @ torch.linalg.solve(precision, gradient)
    return (
        value + 0.5 * (quadratic + width * math.log(2 * math.pi) - torch.logdet(precision))
    ).item()


def summed(model, data, lengths=None):
    """log Σ ∫ p over all that is unknown, row by row, each cut to its own length."""
    graph, found = model.graph, []
    for i in range(len(next(iter(data.values())))):
        steps = T if lengths is None else lengths[i]
        values, discrete, free = {}, [], []
        for name in (*graph.stochastic, *graph.given):
            for t in range(steps if graph.timed[name] else 1):
                value = (
                    None
                    if name not in data
                    else data[name][i : i + 1, t]
                    if graph.timed[name]
                    else data[name][i : i + 1]
                )
                if name not in graph.latents or (value is not None and not value.isnan().any()):
                    values[name, t] = value
                elif graph.rule("p", name).spec.finite:
                    discrete.append((name, t))
                else:
                    free.append((name, t))
        tables = [model.factors[graph.rule("p", name).id].table() for name, _ in discrete]
        choices = list(itertools.product(*(range(len(table)) for table in tables)))
        for place, table, index in zip(discrete, tables, zip(*choices, strict=True), strict=True):
            values[place] = table[list(index)]
        if free:
            rows = [
                {place: value[min(k, len(value) - 1)][None] for place, value in values.items()}
                for k in range(len(choices))
            ]
            logs = [integral(model, row, free, steps) for row in rows]
        else:
            logs = log_p(model, laid_out(model, values, steps)).tolist()
        found.append(logsumexp(logs))
    return torch.tensor(found, dtype=torch.float64)


def same(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_evidence_is_the_sum_and_integral_over_all_unknowns(name):
    model = MODELS[name]()
    data = data_of(model)
    assert why_not_exact(model) is None
    found = model.log_evidence(**data)
    assert found.method == "exact"
    if any(model.graph.timed.values()):
        same(model.log_evidence(**data, lengths=LENGTHS).value, summed(model, data, LENGTHS))
    else:
        same(found.value, summed(model, data))
    same(found.value[:1], summed(model, {name: value[:1] for name, value in data.items()}))


@pytest.mark.parametrize(
    "name",
    [
        "mixture of factor analysers",
        "full covariances by class",
        "state space",
        "state space with a static latent",
        "hidden Markov",
        "two chains",
        "hidden Markov over factor analysers",
        "factor analysis at every step",
        "state space backwards, with ends",
    ],
)
def test_missing_entries_are_integrated_over(name):
    model = MODELS[name]()
    data = holed(data_of(model), "x")
    lengths = {"lengths": LENGTHS} if any(model.graph.timed.values()) else {}
    found = model.log_evidence(**data, **lengths).value
    same(found, summed(model, data, *lengths.values()))
    assert (found - model.log_evidence(**data_of(model), **lengths).value).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("mixture of factor analysers", ["y", "z"]),
        ("two layers, two discrete, given", ["c", "b"]),
        ("state space", ["z"]),
        ("state space with inputs and lags", ["a", "b"]),
        ("state space backwards, with ends", ["z"]),
        ("state space with a static latent", ["w"]),
        ("hidden Markov", ["s"]),
        ("two chains", ["a", "b"]),
        ("mixture of hidden Markovs", ["y", "s"]),
        ("hidden Markov over factor analysers", ["z", "s"]),
    ],
)
def test_latents_known_in_some_rows_or_steps(name, known):
    model = MODELS[name]()
    timed = any(model.graph.timed.values())
    drawn = model.sample(
        N,
        seed=2,
        **({"steps": T} if timed else {}),
        **{u: data_of(model)[u] for u in model.graph.given},
    )
    data = {key: drawn[key] for key in model.graph.observed} | {
        u: data_of(model)[u] for u in model.graph.given
    }
    lengths = {"lengths": LENGTHS} if timed else {}
    for latent in known:
        data[latent] = drawn[latent].clone()
        data[latent][(0, slice(1, 3)) if model.graph.timed[latent] else 0] = math.nan
        same(model.log_evidence(**data, **lengths).value, summed(model, data, *lengths.values()))
        data[latent] = drawn[latent]  # known everywhere
        same(model.log_evidence(**data, **lengths).value, summed(model, data, *lengths.values()))


# Against what others wrote ------------------------------------------------------------------------


def weights_of(model, entry):
    blocks = model.factors[entry].net.blocks
    return {
        label: weight.detach().numpy() for label, weight in blocks.weights.items()
    }, blocks.bias.detach().numpy()


def softplus(tensor):
    return torch.nn.functional.softplus(tensor).detach().numpy()


def test_factor_analysis_is_its_gaussian():
    torch.manual_seed(0)
    model = zoo.fa().double()
    x = model.sample(20, seed=1)["x"]
    loadings = model.factors["p(x|z)"].net.blocks.weights["z"].detach().numpy()
    covariance = loadings @ loadings.T + np.diag(
        softplus(model.factors["p(x|z)"].vectors["scale"]) ** 2
    )
    expected = torch.as_tensor(multivariate_normal(np.zeros(3), covariance).logpdf(x.numpy()))
    same(model.log_evidence(x=x).value, expected, 1e-12)
    # integrated out one variable after the other
    same(marginal(model, Structure(model), model.prepare(x=x)), expected, 1e-12)


@pytest.mark.parametrize("kind", ["diag", "full"])
def test_a_gaussian_mixture_is_scikit_learns(kind):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(c, 1 + c / 4, (60, 3)) for c in range(3)])
    reference = GaussianMixture(3, covariance_type=kind, random_state=0).fit(x)
    family = Normal(3) if kind == "diag" else MultivariateNormal(3)
    model = Model(p={"y": OneHot(3, learned=True), "x | y": family}, q={"y | x": OneHot()}).double()
    factor = model.factors["p(x|y)"]
    covariances = [np.diag(c) if kind == "diag" else c for c in reference.covariances_]
    with torch.no_grad():
        model.factors["p(y)"].root.copy_(torch.as_tensor(np.log(reference.weights_)))
        rows = []
        for mean, covariance in zip(reference.means_, covariances, strict=True):
            heads = family.most_likely(
                torch.ones(1, 3),
                torch.as_tensor(mean)[None],
                torch.as_tensor(
                    covariance + np.outer(mean, mean)
                    if kind == "full"
                    else np.diag(covariance) + mean**2
                )[None],
                torch.full((3,), 1e-12, dtype=torch.float64),
            )
            rows.append(torch.cat([heads[head].reshape(-1) for head in factor.sizes]))
        factor.net.blocks.weights["y"].copy_(torch.stack(rows, 1))
        factor.net.blocks.bias.zero_()
    same(model.log_evidence(x=x).value, torch.as_tensor(reference.score_samples(x)))


def test_a_mixture_of_factor_analysers_is_a_sum_of_gaussian_densities():
    model = MODELS["mixture of factor analysers"]()
    x = data_of(model)["x"]
    (wz, bz), (wx, bx) = weights_of(model, "p(z|y)"), weights_of(model, "p(x|z, y)")
    shares = torch.softmax(model.factors["p(y)"].root, -1).detach().numpy()
    noise = np.diag(softplus(model.factors["p(x|z, y)"].vectors["scale"]) ** 2)
    densities = 0.0
    for c in range(3):
        head = wz["y"][:, c] + bz
        spread = np.diag(softplus(torch.as_tensor(head[2:])) ** 2)
        mean = wx["z"] @ head[:2] + wx["y"][:, c] + bx
        densities = densities + shares[c] * multivariate_normal(
            mean, wx["z"] @ spread @ wx["z"].T + noise
        ).pdf(x.numpy())
    same(model.log_evidence(x=x).value, torch.as_tensor(np.log(densities)))


def state_space_parameters(model):
    (wz, bz), (wx, bx) = weights_of(model, "p(z[t]|z[t-1])"), weights_of(model, "p(x[t]|z[t])")
    root = model.factors["p(z[0])"].root
    q, r = (
        np.diag(softplus(model.factors[entry].vectors["scale"]) ** 2)
        for entry in ("p(z[t]|z[t-1])", "p(x[t]|z[t])")
    )
    return (
        wz["z[t-1]"],
        bz,
        q,
        wx["z[t]"],
        bx,
        r,
        root[:2].detach().numpy(),
        np.diag(softplus(root[2:]) ** 2),
    )


def kalman(x, a, b, q, h, c, r, mean, covariance):
    """The textbook filter for one sequence, NaN where nothing was seen."""
    total = 0.0
    for t, row in enumerate(x):
        if t:
            mean, covariance = a @ mean + b, a @ covariance @ a.T + q
        seen = ~np.isnan(row)
        if seen.any():
            hs, s = h[seen], h[seen] @ covariance @ h[seen].T + r[np.ix_(seen, seen)]
            residual = row[seen] - hs @ mean - c[seen]
            total += -0.5 * (
                residual @ np.linalg.solve(s, residual) + np.linalg.slogdet(2 * np.pi * s)[1]
            )
            gain = covariance @ hs.T @ np.linalg.inv(s)
            mean, covariance = mean + gain @ residual, covariance - gain @ hs @ covariance
    return total


def test_a_state_space_model_is_the_kalman_filters_and_its_joint_gaussian():
    model, steps = MODELS["state space"](), 30
    x = model.sample(3, steps=steps, seed=1)["x"]
    a, b, q, h, c, r, mean, covariance = state_space_parameters(model)
    found = model.log_evidence(x=x).value
    same(
        found,
        torch.tensor(
            [kalman(row, a, b, q, h, c, r, mean, covariance) for row in x.numpy()],
            dtype=torch.float64,
        ),
    )
    # z = M ε + m with ε standard, so that (x₁ … x_T) is one Gaussian of 90 entries.
    lift, shift = np.zeros((2 * steps, 2 * steps)), np.zeros(2 * steps)
    for t in range(steps):
        here, before = slice(2 * t, 2 * t + 2), slice(2 * t - 2, 2 * t)
        shift[here] = mean if t == 0 else a @ shift[before] + b
        lift[here] = 0.0 if t == 0 else a @ lift[before]
        lift[here, here] = np.linalg.cholesky(covariance if t == 0 else q)
    big_h = np.kron(np.eye(steps), h)
    factor = np.linalg.cholesky(big_h @ lift @ lift.T @ big_h.T + np.kron(np.eye(steps), r))
    white = np.linalg.solve(
        factor, (x.reshape(3, -1).numpy() - big_h @ shift - np.tile(c, steps)).T
    )
    joint = (
        -0.5 * ((white**2).sum(0) + 3 * steps * np.log(2 * np.pi)) - np.log(np.diag(factor)).sum()
    )
    same(found, torch.as_tensor(joint))
    holes, lengths = holed({"x": x}, "x")["x"], [30, 17, 1]
    expected = [
        kalman(row[:n], a, b, q, h, c, r, mean, covariance)
        for row, n in zip(holes.numpy(), lengths, strict=True)
    ]
    same(
        model.log_evidence(x=holes, lengths=lengths).value,
        torch.tensor(expected, dtype=torch.float64),
    )


def test_a_hidden_markov_model_is_a_product_of_matrices():
    """1ᵀ D(x_T) Pᵀ … Pᵀ D(x₁) π, scaled at every step; 40 steps have 3⁴⁰ paths."""
    model = MODELS["hidden Markov"]()
    x = model.sample(3, steps=40, seed=1)["x"]
    start = model.factors["p(s[0])"].root.softmax(-1)
    transition = model.factors["p(s[t]|s[t-1])"]
    p = transition({"s[t-1]": torch.eye(3, dtype=torch.float64)}).softmax(-1)
    emission = model.factors["p(x[t]|s[t])"]
    dist = emission.distribution(emission({"s[t]": torch.eye(3, dtype=torch.float64)}))
    density = dist.log_prob(x.unsqueeze(-2)).sum(-1).exp()  # [N, T, C]
    total, state = 0.0, start.expand(3, 3)
    for t in range(40):
        state = (state @ p if t else state) * density[:, t]
        total = total + state.sum(-1).log()
        state = state / state.sum(-1, keepdim=True)
    same(model.log_evidence(x=x).value, total.detach())


def test_importance_sampling_agrees_within_its_error():
    torch.manual_seed(0)
    model = Model(
        p={"y": OneHot(3), "z | y": Normal(1), "x | z, y": Normal(2, scale=1.0)},
        q={
            "y | x": OneHot(),
            "z | x, y": Normal(net=linear(init="zeros"), scale=3.0),
        },  # wider than any posterior: no weight is large
    ).double()
    x = model.sample(8, seed=4)["x"]
    known, sampled = (
        model.log_evidence(x=x),
        model.log_evidence(x=x, method="importance", samples=5000, seed=0),
    )
    assert (
        (sampled.value - known.value).abs() < 5 * sampled.stderr
    ).all()  # 8 comparisons at 5 σ: fewer than one seed in 10⁵ fails
    assert sampled.stderr.max() < 0.02


# What training needs of it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "mixture of factor analysers",
        "state space with a static latent",
        "two chains",
        "hidden Markov over factor analysers",
    ],
)
def test_its_gradient_is_the_difference_quotient(name):
    model = MODELS[name]()
    lengths = {"lengths": LENGTHS} if any(model.graph.timed.values()) else {}
    data = holed(data_of(model), "x")
    if name == "two chains":
        data["a"] = torch.tensor([[0, -1, 1, -1], [-1, 1, 0, 0], [1, 0, 0, 0]])
    batch = model.prepare(**data, **lengths)
    theta = model.theta()
    gradient = torch.autograd.grad(exact_evidence(model, batch).sum(), theta)
    step, generator = 1e-5, torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = [
            torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            for parameter in theta
        ]
        values = []
        with torch.no_grad():
            for sign in (1, -2, 1):  # to θ + εd, then θ − εd, then back
                for parameter, way in zip(theta, direction, strict=True):
                    parameter.add_(sign * step * way)
                values.append(exact_evidence(model, batch).sum())
        quotient = (values[0] - values[1]) / (2 * step)
        slope = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))
        assert abs(float(quotient - slope)) < 1e-6 * max(1.0, abs(float(slope)))


def test_single_precision_is_rounded_double():
    for name in ("state space", "hidden Markov", "mixture of factor analysers"):
        model = MODELS[name]()
        data = data_of(model)
        double = model.log_evidence(**data).value
        single = model.float().log_evidence(**data).value
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["two chains", "state space with a static latent"])
def test_rows_taken_in_parts_are_the_same_rows(name, monkeypatch):
    model = MODELS[name]()
    data = holed(data_of(model), "x")
    whole = model.log_evidence(**data, lengths=LENGTHS).value
    monkeypatch.setattr(exact, "AT_ONCE", 32)
    same(model.log_evidence(**data, lengths=LENGTHS).value, whole, 1e-12)


def test_it_is_p_alone_that_decides():
    """q may remember all states, so that the bound cannot be enumerated; the evidence does not read
    it.
    """
    p = {"s[t] | s[t-1]": OneHot(2), "x[t] | s[t]": Normal(1)}
    model = build(p, {"h[t] | h[t-1], s[t-1]": GRU(3), "s[t] | h[t], x[t]": OneHot()})
    plain = Model(p, {"s[t] | x[t]": OneHot()}).double()
    plain.load_state_dict(
        {
            **plain.state_dict(),
            **{key: value for key, value in model.state_dict().items() if ".p(" in key},
        }
    )
    x = data_of(model)["x"]
    same(model.log_evidence(x=x).value, plain.log_evidence(x=x).value, 1e-12)


@pytest.mark.parametrize("name", ["state space", "hidden Markov", "mixture of state spaces"])
def test_training_shows_it_beside_the_bound_and_can_ascend_it(name):
    model = MODELS[name]()
    rows = model.sample(32, steps=6, seed=5)["x"].numpy()
    rows[0, 4:] = np.nan
    data = {"x": rows}
    other = MODELS[name](seed=9)
    run = fit(other, data, validation=data, steps=20, batch=16, validate_every=10, lr=1e-2)
    evidence, bound = run.history["validation evidence"], run.history["validation elbo"]
    assert np.isfinite(evidence).all()
    assert (bound < evidence + 1e-9).all()
    before = float(other.log_evidence(x=rows).value.mean())
    run = fit(other, data, schedule=mle(), steps=60, batch=32, lr=3e-2, log_every=1)
    after = float(other.log_evidence(x=rows).value.mean())
    assert run.history["evidence"][0] == pytest.approx(before, abs=1e-9)
    assert after > before + 0.1
    with pytest.raises(
        ValueError, match=r"em\(\) has closed forms for finite latents .* use mle\(\)"
    ):
        fit(other, data, schedule=em(), steps=1)


def test_em_is_refused_where_a_sum_and_an_integral_meet():
    model = MODELS["mixture of factor analysers"]()
    with pytest.raises(
        ValueError, match=r"em\(\) has closed forms for .*; here p\(y\) is a OneHot"
    ):
        fit(model, {"x": np.random.default_rng(0).normal(size=(20, 4))}, schedule=em(), steps=1)


# What is not exact, and why -----------------------------------------------------------------------

NOT_EXACT = [
    ({"z": Normal(2), "x | z": Bernoulli(3)}, {"z | x": Normal()}, r"p\(x\|z\) is a Bernoulli"),
    (
        {"z": Laplace(2), "x | z": Normal(3, scale=1.0)},
        {"z | x": Laplace()},
        r"p\(z\) is a Laplace",
    ),
    (
        {"z": Normal(2), "x | z": Normal(3, net=mlp(5), scale=1.0)},
        {"z | x": Normal()},
        r"p\(x\|z\) is not linear in z",
    ),
    (
        {"z": Normal(2), "x | z": Normal(3)},
        {"z | x": Normal()},
        r"the spread of p\(x\|z\) depends on z",
    ),
    (
        {
            "z": Normal(2),
            "f | z": Deterministic(2, activation="tanh"),
            "x | f": Normal(3, scale=1.0),
        },
        {"z | x": Normal()},
        r"p\(f\|z\) is not linear in z",
    ),
    (
        {
            "z[t]": Normal(1),
            "h[t] | h[t-1], z[t-1]": GRU(2),
            "x[t] | h[t], z[t]": Normal(1, scale=1.0),
        },
        {"z[t] | x[t]": Normal()},
        r"p\(h\[t\]\|h\[t-1\], z\[t-1\]\) is not linear in",
    ),
    (
        {"z": Normal(1), "y | z": OneHot(2), "x | y": Normal(1)},
        {"z | x": Normal(), "y | x": OneHot()},
        r"p\(y\|z\) gives the discrete y probabilities that depend on the continuous z",
    ),
    (
        {
            "s[t] | s[t-1]": OneHot(2),
            "z[t] | z[t-1], s[t]": Normal(1, scale=1.0),
            "x[t] | z[t]": Normal(1, scale=1.0),
        },
        {"s[t] | x[t]": OneHot(), "z[t] | x[t]": Normal()},
        r"the continuous z is carried through time by rules that depend on the discrete s\[t\]: "
        r".* too many to sum over",
    ),
    (
        {"w": Normal(1), "s[t]": OneHot(2), "x[t] | s[t], w": Normal(1, scale=1.0)},
        {"b[t] | b[t+1], x[t]": GRU(2), "w | b[0]": Normal(), "s[t] | x[t]": OneHot()},
        r"the continuous w is carried through time by rules that depend on the discrete s\[t\]",
    ),
    (
        {"s[t]": OneHot(2), "h[t] | h[t-1], s[t-1]": GRU(2), "x[t] | h[t], s[t]": Normal(1)},
        {"s[t] | x[t]": OneHot()},
        r"p\(h\[t\]\|h\[t-1\], s\[t-1\]\) remembers s, so that all its 2\^T paths",
    ),
    (
        {"s[t] | s[t-1]": OneHot(2), "x[t] | s[t-1], s[t+1]": Normal(1)},
        {"s[t] | x[t]": OneHot()},
        r"p's factor of x depends on two steps of the discrete s at once that are not adjacent",
    ),
    (
        {"s[t]": OneHot(2), "c | s[0], s[T]": Normal(1)},
        {"s[t]": OneHot()},
        r"p's factor of c depends on two steps of the discrete s",
    ),
    (
        {"s[t]": OneHot(2), "f | s[0]": Deterministic(2), "x[t] | f, s[t]": Normal(1)},
        {"s[t] | x[t]": OneHot()},
        r"p\(f\|s\[0\]\) remembers an end of s",
    ),
    (
        {
            "s[t] | s[t-1]": OneHot(2),
            "z | s[T]": Normal(1),
            "x[t] | s[t]": Normal(1),
            "c | z": Normal(1, scale=1.0),
        },
        {"s[t] | x[t]": OneHot(), "z | c": Normal()},
        r"the continuous z depends on an end of the discrete s",
    ),
    (
        {"z[t] | z[t-1]": Normal(1, scale=1.0), "c | z[T]": Normal(1, scale=1.0)},
        {"z[t]": Normal()},
        r"p\(c\|z\[T\]\) lets a static variable depend on z\[T\], an end of a sequence",
    ),
    (
        {"z[t] | z[t-1]": Normal(1, scale=1.0), "x[t] | z[t+1]": Normal(1, scale=1.0)},
        {"z[t] | x[t]": Normal()},
        r"z\[t\] reads z\[t-1\] and x\[t\] reads z\[t\+1\], so a filter cannot run through time "
        r"in one direction",
    ),
    (
        {"s": OneHot(20), "y": OneHot(20), "x | s, y": Normal(1)},
        {"s | x": OneHot(), "y | x": OneHot()},
        r"400 joint values, more than 256",
    ),
]


@pytest.mark.parametrize(("p", "q", "reason"), NOT_EXACT)
def test_what_is_not_exact_says_why(p, q, reason):
    found = why_not_exact(Model(p, q))
    assert found is not None
    assert re.search(reason, found), found
