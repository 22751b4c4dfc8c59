"""The evidence by sampling: importance, annealing, particles, plain Monte Carlo, against exact
answers; their diagnostics and their memory.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from aevb import (
    LSTM,
    Bernoulli,
    Beta,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    linear,
    mlp,
)
from aevb.declare.families import Exact, Mixture
from aevb.estimate.particle_filter import ParticleFilter
from aevb.evidence import AIS, Evidence, Particles, bidirectional, curve
from aevb.evidence.density import Path
from aevb.evidence.memory_limit import Peak, limit, pieces, shares
from aevb.evidence.result import weight_notes
from aevb.evidence.sampling import proposal_weights
from aevb.evidence.weights import Weights, pareto_shape, reliable_shape, suspect

FEW = AIS(temperatures=20, leapfrog=2)


def build(p: dict, q: dict, seed: int = 0, **options) -> Model:
    torch.manual_seed(seed)
    return Model(p=p, q=q, **options).double()


def factor_analysis(d: int, size: int, *, q: str = "near") -> Model:
    """Factor analysis whose q is p's own root, or the exact posterior with its covariance widened a
    little.
    """
    root = q == "prior"
    model = build(
        {"z": Normal(d), "x | z": Normal(size, net=linear(bias=False), scale="learned")},
        {
            "z" if root else "z | x": Normal()
            if root
            else MultivariateNormal(net=linear(bias=False), covariance="shared")
        },
    )
    with torch.no_grad():
        loadings = model.factors["p(x|z)"].net.blocks.weights["z"]
        loadings.copy_(0.3 * torch.randn_like(loadings))
        if not root:
            covariance = torch.linalg.inv(torch.eye(d, dtype=torch.float64) + loadings.T @ loadings)
            factor = model.factors["q(z|x)"]
            factor.net.blocks.weights["x"].copy_(covariance @ loadings.T)
            factor.vectors["tril"].copy_(vector_from_tril(1.1 * torch.linalg.cholesky(covariance)))
    return model


def vector_from_tril(tril: Tensor) -> Tensor:
    from aevb.declare.distributions import vector_from_tril as convert

    return convert(tril)


def z_scores(found: Evidence, exact: Tensor) -> Tensor:
    return (found.value - exact).abs() / found.stderr


def gmvae() -> Model:
    return build(
        {
            "y": OneHot(3, learned=True),
            "z | y": Normal(1),
            "x | z, y": Normal(2, net=mlp(4), scale=0.7),
        },
        {"y | x": OneHot(net=linear()), "z | x, y": Normal(net=linear())},
    )


def by_quadrature(model: Model, grid: Tensor, **data: Tensor) -> Tensor:
    """log Σ_y ∫ p(x, y, z) dz over a grid of the one-dimensional z, a row at a time."""
    rows = []
    for i in range(len(data["x"])):
        row = {name: value[i].expand(len(grid), *value[i].shape) for name, value in data.items()}
        labels = range(3) if "y" in model.graph.latents else [None]
        parts = [
            model.log_prob(
                z=grid.unsqueeze(-1),
                **row,
                **({} if c is None else {"y": torch.full((len(grid),), c)}),
            ).exp()
            for c in labels
        ]
        rows.append(torch.trapezoid(sum(parts), grid).log())
    return torch.stack(rows).detach()


# Running statistics -------------------------------------------------------------------------------


def test_weights_in_pieces_have_the_statistics_of_all_of_them():
    log_w = 300 * torch.randn(1, 5, dtype=torch.float64) + 2 * torch.randn(
        1000, 5, dtype=torch.float64
    )
    whole, parts = Weights(5, 1000, log_w.device), Weights(5, 1000, log_w.device)
    whole.add(log_w)
    for part in log_w.split([1, 2, 400, 597]):
        parts.add(part)
    w = (log_w - log_w.amax(0)).exp()
    assert torch.allclose(parts.value, log_w.logsumexp(0) - math.log(1000), rtol=0, atol=1e-10)
    assert torch.allclose(parts.stderr, w.std(0) / w.mean(0) / math.sqrt(1000), rtol=1e-9)
    assert torch.allclose(parts.ess, w.sum(0) ** 2 / w.square().sum(0), rtol=1e-9)
    for name in ("value", "stderr", "ess", "khat"):
        assert torch.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-9)
    nothing = Weights(1, 2, log_w.device, tail=False)
    nothing.add(torch.full((2, 1), -math.inf))
    assert nothing.value.item() == -math.inf


@pytest.mark.parametrize("k", [-0.3, 0.2, 0.5, 1.0])
def test_the_shape_of_a_pareto_tail_is_found(k):
    torch.manual_seed(0)
    n, rows = 2000, 50
    x = (torch.rand(n, rows, dtype=torch.float64) ** -k - 1) / k  # a generalised Pareto's quantiles
    found = pareto_shape(x.sort(0).values)
    # the estimate's own sd is about (1 + k)/√n, 0.045 at most; its mean over 50 rows has 0.006
    assert abs(found.mean() - k) < 0.02


def test_khat_of_importance_weights():
    torch.manual_seed(0)
    for scale, low, high in (
        (0.6, 0.5, 0.8),
        (0.9, -0.1, 0.35),
    ):  # target N(0, 1), proposal N(0, s²): k = 1 − s²
        z = scale * torch.randn(100_000, 8, dtype=torch.float64)
        weights = Weights(8, len(z), z.device)
        weights.add(-(z**2) / 2 + (z / scale) ** 2 / 2)
        assert low < float(weights.khat.mean()) < high
    flat = Weights(2, 100, z.device)
    flat.add(torch.zeros(100, 2))
    assert flat.khat.tolist() == [0, 0]
    few = Weights(2, 10, z.device)
    few.add(torch.zeros(10, 2))
    assert few.khat.isnan().all()


# Importance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [10, 50])
def test_importance_agrees_with_the_exact_evidence_where_it_says_so(d):
    model = factor_analysis(d, 2 * d)
    x = model.sample(20, seed=1)["x"]
    exact, found = (
        model.log_evidence(x=x).value,
        model.log_evidence(x=x, method="importance", samples=5000, seed=0),
    )
    assert found.diagnostics["ess"].median() >= 300
    assert not found.notes
    assert (z_scores(found, exact) < 4).all()  # 20 comparisons: 0.13 % of seeds would fail one
    assert abs(found.mean - exact.mean()) < 4 * found.error


def test_a_hopeless_proposal_says_so_and_annealing_does_not_need_a_better_one():
    model = factor_analysis(50, 100, q="prior")
    x = model.sample(2, seed=1)["x"]
    exact = model.log_evidence(x=x).value
    found = model.log_evidence(x=x, method="importance", samples=1000, seed=0)
    assert (found.value < exact - 50).all()
    assert "2 of 2 examples have Pareto k above" in found.notes[0]
    annealed = model.log_evidence(x=x, method=AIS(temperatures=200, leapfrog=3), seed=0)
    assert (annealed.value - exact).abs().max() < 5


def test_the_bound_rises_with_k():
    model = build({"z": Normal(2), "x | z": Normal(3, scale=0.3)}, {"z | x": Normal()})
    x = model.sample(50, seed=1)["x"]
    found = curve(model, model.prepare(x=x), ks=(1, 10, 100, 1000), seed=0)
    exact = model.log_evidence(x=x).value.mean()
    assert (found.mean.diff() > 0).all()
    assert found.mean[-1] < exact + 4 * found.error[-1]
    draws = torch.stack(
        [model.elbo(x=x, bound="iwae", samples=10, seed=seed).value.detach() for seed in range(100)]
    )
    # k = 10 against the bound itself
    assert abs(draws.mean() - found.mean[1]) < 4 * (draws.mean(1).std() / 10 + found.error[1])
    # groups straddle pieces
    pieces = curve(model, model.prepare(x=x), ks=(1, 10, 100, 1000), seed=1, memory=20_000)
    assert ((pieces.mean - found.mean).abs() < 4 * (pieces.error + found.error)).all()
    with pytest.raises(ValueError, match="positive whole numbers"):
        curve(model, model.prepare(x=x), ks=(0, 1))


def test_plain_monte_carlo_from_p():
    model = gmvae()
    x = model.sample(5, seed=1)["x"]
    exact = by_quadrature(model, torch.linspace(-15, 15, 3001, dtype=torch.float64), x=x)
    y = torch.tensor([0, -1, 2, -1, 1])
    found = model.log_evidence(x=x, method="prior", samples=20_000, seed=0)
    assert (z_scores(found, exact) < 4).all()
    known = model.log_evidence(x=x, y=y, method="prior", samples=20_000, seed=0)
    same = model.log_evidence(x=x, y=y, method="importance", samples=20_000, seed=0)
    assert (
        (known.value - same.value).abs() < 4 * (known.stderr.square() + same.stderr.square()).sqrt()
    ).all()


# Memory -------------------------------------------------------------------------------------------


def test_the_peak_counts_what_is_held_at_once():
    weight = torch.zeros(100, 100, dtype=torch.float64)
    with Peak() as peak:
        a = torch.zeros(1000, dtype=torch.float64)
        view = a[:500] + weight[0, :1]  # a view of what was there before takes nothing
        del a, view
        b = torch.zeros(300, dtype=torch.float64)
    assert peak.bytes == 8 * 1500
    assert peak.live == 8 * 300
    del b


@pytest.mark.parametrize(
    "method", ["importance", "prior", AIS(temperatures=8, leapfrog=1), Particles(repeats=2)]
)
def test_a_limit_on_memory_holds(method):
    if isinstance(method, Particles):
        model = build(
            {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(20, net=mlp(50))},
            {"z[t] | z[t-1], x[t]": Normal(net=mlp(50))},
        )
        x, samples, memory = model.sample(40, steps=4, seed=0)["x"], 50, 1_500_000
    else:
        model = build(
            {"z": Normal(5), "x | z": Bernoulli(100, net=mlp(50))}, {"z | x": Normal(net=mlp(50))}
        )
        x, samples, memory = (
            model.sample(40, seed=0)["x"],
            16 if isinstance(method, AIS) else 2000,
            1_000_000,
        )
    with Peak() as peak:
        found = model.log_evidence(x=x, method=method, samples=samples, seed=0, memory=memory)
    assert found.value.isfinite().all()
    assert memory / 4 < peak.bytes <= memory


def test_memory_is_said_in_bytes_or_words():
    cpu = torch.device("cpu")
    assert limit("2 GiB", cpu) == 2**31
    assert limit("500MB", cpu) == 500_000_000
    assert limit(1e6, cpu) == 1_000_000
    for wrong in ("much", "2 TB", "1.5.2 MB", -1, 0, math.inf, True):
        with pytest.raises(ValueError, match="memory is a"):
            limit(wrong, cpu)
    assert shares(10, 4) == [4, 3, 3]
    assert shares(5, 1, smallest=2) == [3, 2]
    assert pieces(lambda rows, k: torch.zeros(rows * k, dtype=torch.float64), 1000, 100, 8000) == (
        10,
        100,
    )
    assert pieces(lambda rows, k: torch.zeros(rows * k, dtype=torch.float64), 1000, 5000, 8000) == (
        1,
        1000,
    )


# Annealing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["prior", "posterior"])
def test_annealing_sums_finite_latents_and_keeps_known_ones(start):
    model = gmvae()
    x = model.sample(4, seed=1)["x"]
    grid = torch.linspace(-15, 15, 3001, dtype=torch.float64)
    settings = AIS(temperatures=40, leapfrog=2, start=start)
    found = model.log_evidence(x=x, method=settings, samples=64, seed=0)
    assert (z_scores(found, by_quadrature(model, grid, x=x)) < 4).all()
    y = torch.tensor([0, -1, 2, -1])
    some = model.log_evidence(x=x, y=y, method=settings, samples=64, seed=0)
    rows = [(x[i].expand(3001, 2), y[i].expand(3001)) for i in (0, 2)]
    known = torch.stack(
        [
            torch.trapezoid(model.log_prob(x=a, y=b, z=grid.unsqueeze(-1)).exp(), grid).log()
            for a, b in rows
        ]
    )
    assert ((some.value[[0, 2]] - known).abs() < 4 * some.stderr[[0, 2]]).all()
    assert (z_scores(some, by_quadrature(model, grid, x=x))[[1, 3]] < 4).all()


@pytest.mark.parametrize("start", ["prior", "posterior"])
def test_annealing_in_a_hierarchy_with_missing_entries_given_and_partly_known_latents(start):
    model = build(
        {
            "w | u": Normal(2, net=linear(), scale=0.5),
            "z | w": Normal(2, net=linear(), scale=0.5),
            "x | z, u": Normal(4, net=linear(), scale=0.5),
        },
        {"z | x": Normal(), "w | z, u": Normal()},
        given={"u": 1},
    )
    u = torch.randn(4, 1, dtype=torch.float64)
    drawn = model.sample(4, u=u, seed=1)
    x, w = drawn["x"].clone(), drawn["w"].clone()
    x[0, 1] = x[3, 2:] = math.nan
    w[:2] = math.nan
    exact = model.log_evidence(x=x, u=u, w=w, method="exact").value
    found = model.log_evidence(
        x=x, u=u, w=w, method=AIS(temperatures=60, leapfrog=2, start=start), samples=64, seed=0
    )
    assert (z_scores(found, exact) < 4).all()


@pytest.mark.parametrize("start", ["prior", "posterior"])
def test_annealing_a_bounded_latent(start):
    model = build(
        {"z": Beta(1), "x | z": Normal(2, net=mlp(4), scale=0.3)}, {"z | x": Beta(net=linear())}
    )
    x = model.sample(3, seed=1)["x"]
    grid = torch.linspace(1e-9, 1 - 1e-9, 4001, dtype=torch.float64)
    found = model.log_evidence(
        x=x, method=AIS(temperatures=40, leapfrog=2, start=start), samples=64, seed=0
    )
    assert (z_scores(found, by_quadrature(model, grid, x=x)) < 4).all()


def state_space(q: dict) -> Model:
    model = build(
        {
            "z[0]": Normal(1),
            "z[t] | z[t-1]": Normal(1, net=linear(bias=False), scale=0.7),
            "x[t] | z[t]": Normal(2, net=linear(bias=False), scale=0.8),
        },
        q,
    )
    with torch.no_grad():
        model.factors["p(z[t]|z[t-1])"].net.blocks.weights["z[t-1]"].fill_(0.9)
        model.factors["p(x[t]|z[t])"].net.blocks.weights["z[t]"].copy_(
            torch.tensor([[1.0], [-0.5]])
        )
        for entry in model.graph.q[
            "z"
        ].values():  # wide proposals: weights then have a variance to speak of
            model.factors[entry.id].net.blocks.bias[1] += 2
    return model


def kalman(x: np.ndarray) -> float:
    """log p(x) of one sequence under ``state_space``."""
    c, total, mean, variance = np.array([1.0, -0.5]), 0.0, 0.0, 1.0
    for t, row in enumerate(x):
        if t:
            mean, variance = 0.9 * mean, 0.81 * variance + 0.49
        s = variance * np.outer(c, c) + 0.64 * np.eye(2)
        residual = row - c * mean
        total += -0.5 * (
            residual @ np.linalg.solve(s, residual) + np.linalg.slogdet(2 * np.pi * s)[1]
        )
        gain = variance * np.linalg.solve(s, c)
        mean, variance = mean + gain @ residual, variance - gain @ c * variance
    return total


LENGTHS = (6, 2, 1, 4)


@pytest.fixture(scope="module")
def sequences() -> Tensor:
    return state_space({"z[t] | x[t]": Normal()}).sample(4, steps=6, seed=3)["x"]


def exact_of(sequences: Tensor) -> Tensor:
    return torch.tensor(
        [kalman(row[:length].numpy()) for row, length in zip(sequences, LENGTHS, strict=True)]
    )


def test_annealing_a_sequence(sequences):
    model = state_space({"z[t] | z[t-1], x[t]": Normal()})
    found = model.log_evidence(
        x=sequences, lengths=LENGTHS, method=AIS(temperatures=60, leapfrog=2), samples=64, seed=0
    )
    assert (z_scores(found, exact_of(sequences)) < 4).all()


def test_a_mixture_as_proposal(sequences):
    model = build(
        {"z": Normal(1), "x | z": Normal(2, net=linear(), scale=0.5)},
        {"z | x": Mixture(components=3)},
    )
    x = model.sample(3, seed=1)["x"]
    for method, samples in (
        ("importance", 5000),
        (AIS(temperatures=40, leapfrog=2, start="posterior"), 64),
    ):
        assert (
            z_scores(
                model.log_evidence(x=x, method=method, samples=samples, seed=0),
                model.log_evidence(x=x).value,
            )
            < 4
        ).all()
    filtering = state_space({"z[t] | x[t]": Normal()})
    mixed = build(
        {str(e.key): e.spec for e in filtering.graph.entries() if e.side == "p"},
        {"z[t] | z[t-1], x[t]": Mixture(components=2)},
    )
    mixed.load_state_dict(
        {key: value for key, value in filtering.state_dict().items() if "p(" in key}, strict=False
    )
    for method in ("importance", "particles"):
        assert (
            z_scores(
                mixed.log_evidence(
                    x=sequences, lengths=LENGTHS, method=method, samples=3000, seed=0
                ),
                exact_of(sequences),
            )
            < 4
        ).all()


def test_the_start_of_a_path_is_a_density(sequences):
    model = gmvae()
    x = model.sample(2, seed=1)["x"]
    grid = torch.linspace(-15, 15, 3001, dtype=torch.float64)
    with torch.no_grad():
        for start in ("prior", "posterior"):
            path = Path(model, model.prepare(x=x), start)
            log_start, _ = path(grid[:, None, None].expand(-1, 2, 1))
            assert torch.allclose(
                torch.trapezoid(log_start.exp(), grid, dim=0),
                torch.ones(2, dtype=torch.float64),
                atol=1e-6,
            )


def test_annealing_moves_leave_weights_and_training_mode_as_they_were():
    model = gmvae()
    x = model.sample(2, seed=1)["x"]
    model.factors["q(y|x)"].requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    same = [model.log_evidence(x=x, method=FEW, seed=5).value for _ in range(2)]
    assert torch.equal(*same)
    assert model.training
    assert before == {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def test_what_annealing_refuses():
    x = torch.zeros(2, 1, dtype=torch.float64)
    counts = build({"c": Poisson(1), "x | c": Normal(1)}, {"c | x": Poisson()})
    with pytest.raises(
        ValueError, match="c is a Poisson, which has neither gradients nor a finite list"
    ):
        counts.log_evidence(x=x, method="ais")
    chain = build(
        {"s[t]": OneHot(2), "z[t] | s[t]": Normal(1), "x[t] | z[t]": Normal(1)},
        {"s[t] | x[t]": OneHot(), "z[t] | x[t], s[t]": Normal()},
    )
    with pytest.raises(ValueError, match=r"s\[t\] is finite and has a time axis"):
        chain.log_evidence(x=x.unsqueeze(0), method="ais")
    labels = build({"y": OneHot(2), "x | y": Normal(1)}, {"y | x": OneHot()})
    with pytest.raises(ValueError, match="no latent is continuous"):
        labels.log_evidence(x=x, method="ais")
    model = gmvae()
    with pytest.raises(ValueError, match="nothing to move"):
        model.log_evidence(x=torch.zeros(2, 2), z=x, method="ais")
    with pytest.raises(ValueError, match="number of chains"):
        model.log_evidence(x=torch.zeros(2, 2), samples=1, method="ais")
    with pytest.raises(ValueError, match='start is "posterior" or "prior"'):
        AIS(start="somewhere")
    with pytest.raises(ValueError, match="temperatures is a positive whole number"):
        AIS(temperatures=0)
    bayes = build(
        {"y": OneHot(2), "a | y": Normal(1), "z": Normal(1), "x | z": Normal(1)},
        {"y | a": Exact(), "z | x, y": Normal()},
    )
    with pytest.raises(
        ValueError, match="q draws z for each value of y, which follows by Bayes' rule"
    ):
        bayes.log_evidence(x=x, a=x, method=AIS(start="posterior"))
    assert (
        bayes.log_evidence(x=x, a=x, method=AIS(temperatures=2, leapfrog=1), seed=0).method
        == "ais from prior"
    )


def test_bidirectional_bounds_hold_the_evidence_between_them():
    model = factor_analysis(10, 40, q="prior")
    found = bidirectional(model, 20, settings=AIS(temperatures=20, leapfrog=3), chains=4, seed=0)
    exact = model.log_evidence(x=found.drawn["x"]).value
    assert (exact - found.lower.value).mean() > 0.1
    assert (found.upper.value - exact).mean() > 0.1
    finer = bidirectional(model, 20, settings=AIS(temperatures=200, leapfrog=3), chains=4, seed=0)
    assert abs(finer.mean) < found.mean / 3  # the gap falls with the temperatures
    given = build(
        {"z | u": Normal(1), "x | z, u": Normal(2)}, {"z | x, u": Normal()}, given={"u": 2}
    )
    assert abs(bidirectional(given, 4, settings=FEW, u=torch.ones(4, 2), seed=0).mean) < 1
    with pytest.raises(ValueError, match="'u' is a given variable: pass a value"):
        bidirectional(given, 4)


# Particles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_particles_agree_with_a_kalman_filter(sequences, threshold):
    model = state_space({"z[0] | x[0]": Normal(), "z[t] | z[t-1], x[t]": Normal()})
    found = model.log_evidence(
        x=sequences,
        lengths=LENGTHS,
        method=Particles(repeats=30, threshold=threshold),
        samples=300,
        seed=0,
    )
    assert (z_scores(found, exact_of(sequences)) < 4).all()
    padded = sequences.clone()
    padded[1, 2:] = 77.0  # beyond a row's end nothing counts
    same = model.log_evidence(
        x=padded,
        lengths=LENGTHS,
        method=Particles(repeats=30, threshold=threshold),
        samples=300,
        seed=0,
    )
    assert torch.equal(found.value, same.value)


def test_the_mean_of_a_filter_is_unbiased_where_that_of_its_logarithm_is_not(sequences):
    # a proposal that reads the future
    model = state_space({"b[t] | b[t+1], x[t]": LSTM(4), "z[t] | z[t-1], b[t]": Normal()})
    exact, row = exact_of(sequences)[0], sequences[:1].repeat(4000, 1, 1)
    with model._evaluating(0):
        found = ParticleFilter.of(model, model.prepare(x=row), 8).run()
    values, resampled = found.value, found.resampled
    ratio = (values - exact).exp()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(4000)
    assert values.mean() < exact - 0.1  # Jensen
    assert resampled.mean() > 0.1


def vrnn(q: dict) -> Model:
    return build(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(5, layers=2),
            "z[t] | h[t]": Normal(2, net=mlp(4)),
            "x[t] | h[t], z[t]": Bernoulli(6, net=mlp(4)),
        },
        q,
    )


SEQUENCE_MODELS = {
    "vrnn": vrnn({"z[t] | h[t], x[t]": Normal(net=mlp(4))}),
    "smoothing": vrnn({"b[t] | b[t+1], x[t]": LSTM(3), "z[t] | h[t], b[t]": Normal(net=mlp(4))}),
    "discrete": build(
        {"s[t] | s[t-1]": OneHot(3), "x[t] | s[t]": Bernoulli(6)}, {"s[t] | s[t-1], x[t]": OneHot()}
    ),
    "static": build(
        {
            "c": Normal(1),
            "z[t] | z[t-1], c": Normal(1),
            "x[t] | z[t], c": Bernoulli(6),
            "y | z[T], c": Normal(1),
        },
        {"b[t] | b[t+1], x[t]": LSTM(3), "c | b[0]": Normal(), "z[t] | z[t-1], b[t], c": Normal()},
    ),
}


@pytest.mark.parametrize("name", SEQUENCE_MODELS)
def test_without_resampling_a_filter_is_importance_sampling(name):
    model = SEQUENCE_MODELS[name]
    drawn = model.sample(3, steps=4, seed=1)
    data = {key: drawn[key] for key in model.graph.observed} | {"lengths": [4, 2, 3]}
    whole = model.log_evidence(method="importance", samples=20_000, seed=0, **data)
    for threshold in (0.0, 1.0):
        found = model.log_evidence(
            method=Particles(repeats=10, threshold=threshold), samples=2000, seed=0, **data
        )
        assert (
            (found.value - whole.value).abs()
            < 4 * (found.stderr.square() + whole.stderr.square()).sqrt()
        ).all()


def test_particles_keep_known_latents_and_missing_entries(sequences):
    model = state_space({"z[t] | z[t-1], x[t]": Normal()})
    x, z = sequences[:2].clone(), torch.full((2, 6, 1), math.nan, dtype=torch.float64)
    x[0, 1, 0] = x[1, 3] = math.nan
    z[0, 2] = 0.3
    z[1, 5] = -1.0
    found = model.log_evidence(x=x, z=z, method=Particles(repeats=20), samples=500, seed=0)
    whole = model.log_evidence(x=x, z=z, method="importance", samples=20_000, seed=0)
    assert (
        (found.value - whole.value).abs()
        < 4 * (found.stderr.square() + whole.stderr.square()).sqrt()
    ).all()


def test_a_filter_whose_weights_have_heavy_tails_says_so(sequences):
    model = state_space({"z[t] | z[t-1], x[t]": Normal()})
    found = model.log_evidence(x=sequences, method="particles", samples=300, seed=0)
    assert found.diagnostics["khat"].max() < 0.5
    assert not any("Pareto" in note for note in found.notes)
    with torch.no_grad():
        model.factors["q(z[t]|z[t-1], x[t])"].net.blocks.bias[1] -= (
            5  # far narrower than the posterior: weights without a variance
        )
    found = model.log_evidence(x=sequences, method="particles", samples=300, seed=0)
    assert found.diagnostics["khat"].min() > 0.7
    assert "4 of 4 examples have Pareto k above" in found.notes[0]


def test_a_filter_reads_the_last_steps_own_entries(sequences):
    p = {
        "z[0]": Normal(1),
        "z[t] | z[t-1]": Normal(1, net=linear(), scale=0.7),
        "x[t] | z[t]": Normal(2, net=linear(), scale=0.8),
        "x[T] | z[T]": Normal(2, net=linear(), scale=0.5),
    }
    model = build(p, {"z[t] | z[t-1], x[t]": Normal(scale=1.5), "z[T] | x[T]": Normal(scale=1.5)})
    found = model.log_evidence(
        x=sequences, lengths=LENGTHS, method=Particles(repeats=30), samples=300, seed=0
    )
    assert (
        z_scores(found, model.log_evidence(x=sequences, lengths=LENGTHS, method="exact").value) < 4
    ).all()  # t₂₉: one seed in 600 fails


def test_advice_names_methods_that_the_model_allows(sequences):
    switching = build(
        {"s[t] | s[t-1]": OneHot(2), "z[t] | z[t-1], s[t]": Normal(2), "x[t] | z[t]": Normal(2)},
        {"s[t] | s[t-1], x[t]": OneHot(), "z[t] | z[t-1], s[t], x[t]": Normal()},
    )
    for method in ("exact", "ais"):
        with pytest.raises(ValueError, match=r'\. Use method="particles"\.$'):
            switching.log_evidence(x=sequences, method=method)
    notes = {
        "importance": 'raise samples, train q longer, or use method="particles".',
        "prior": 'hardly any draw from p explains x; use method="importance" or "particles".',
    }
    for method, end in notes.items():
        found = switching.log_evidence(x=sequences * 5, method=method, samples=50, seed=0)
        assert found.notes[0].endswith(end)
    assert (
        switching.log_evidence(x=sequences, method="particles", samples=50, seed=0)
        .value.isfinite()
        .all()
    )
    walk = state_space({"z[t] | z[t-1], x[t]": Normal()})
    (note, *_) = walk.log_evidence(x=sequences * 5, method="prior", samples=50, seed=0).notes
    assert note.endswith('use method="importance", "particles" or "ais".')
    backwards = build(
        {"s[t]": OneHot(2), "x[t] | s[t]": Normal(2)}, {"s[t] | s[t+1], x[t]": OneHot()}
    )
    with pytest.raises(ValueError, match=r'Use method="importance"\.$'):
        backwards.log_evidence(x=sequences, method="ais")


def test_what_a_filter_refuses(sequences):
    static = gmvae()
    with pytest.raises(ValueError, match="no latent has a time axis"):
        static.log_evidence(x=torch.zeros(2, 2), method="particles")
    backwards = state_space({"z[t] | z[t+1], x[t]": Normal()})
    with pytest.raises(ValueError, match=r"reads z\[t\+1\], so that z is drawn from its end"):
        backwards.log_evidence(x=sequences, method="particles")
    bayes = build({"s[t]": OneHot(2), "x[t] | s[t]": Normal(2)}, {"s[t] | x[t]": Exact()})
    with pytest.raises(ValueError, match="q computes s by Bayes' rule"):
        bayes.log_evidence(x=sequences, method="particles")
    with pytest.raises(ValueError, match="repeats is a whole number of at least 2"):
        Particles(repeats=1)
    with pytest.raises(ValueError, match="threshold is between 0 and 1"):
        Particles(threshold=2)


# The result ---------------------------------------------------------------------------------------


def test_an_evidence_prints_its_mean_its_error_and_its_worst():
    diagnostics = {"samples": 50, "ess": torch.tensor([7.0, 20.0])}
    found = Evidence(
        torch.tensor([-1.0, -3.0]),
        torch.tensor([0.3, 0.4]),
        "importance",
        diagnostics,
        ("A note.",),
    )
    assert (
        str(found)
        == "log p = -2.0000 ± 0.25 nats (mean of 2 examples, importance, samples 50, lowest ess "
        "7)\nA note."
    )
    assert (
        str(Evidence(torch.tensor([-1.0]), torch.zeros(1), "exact"))
        == "log p = -1.0000 nats (1 example, exact)"
    )


def test_too_few_weights_and_weights_that_are_no_numbers_are_said():
    model, x = gmvae(), torch.zeros(2, 2)
    for method in ("importance", "prior"):
        note, _ = model.log_evidence(x=x, method=method, samples=20, seed=0).notes
        assert note.startswith("20 weights are too few to tell")
        assert not any(
            "too few" in note
            for note in model.log_evidence(x=x, method=method, samples=21, seed=0).notes
        )
    with torch.no_grad():
        model.factors["q(z|x, y)"].net.blocks.bias.fill_(math.nan)
    note, _ = model.log_evidence(x=x, method="importance", samples=50, seed=0).notes
    assert "no finite evidence" in note


def test_annealing_says_nothing_against_what_it_cannot_judge():
    """Two chains that agree, and one temperature, at which nothing moves."""
    model = factor_analysis(2, 3)
    x = model.sample(3, seed=0)["x"]
    assert not model.log_evidence(
        x=x, method=AIS(temperatures=40, leapfrog=2), samples=2, seed=0
    ).notes
    found = model.log_evidence(x=x, method=AIS(temperatures=1), seed=0)
    assert found.diagnostics["acceptance"].isnan().all()
    assert not found.notes
    alone = bidirectional(model, 1, settings=FEW, chains=4, seed=0)
    assert math.isnan(alone.error)
    assert str(alone).startswith("gap ")


def test_methods_are_named():
    model = gmvae()
    with pytest.raises(
        ValueError,
        match="Unknown method 'annealing'. Choose auto, exact, importance, ais, prior or particles",
    ):
        model.log_evidence(x=torch.zeros(2, 2), method="annealing")
    with pytest.raises(ValueError, match="samples is a whole number of at least 2"):
        model.log_evidence(x=torch.zeros(2, 2), method="importance", samples=1)


# What Pareto's k cannot see -----------------------------------------------------------------------


def narrow(scale: float, d: int = 1) -> tuple[Model, Tensor]:
    """x says nothing about z, so that the posterior is p(z) = N(0, 1); q has this scale."""
    model = build({"z": Normal(d), "x | z": Normal(1, scale=1.0)}, {"z | x": Normal(scale=scale)})
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    return model, torch.zeros(40, 1, dtype=torch.float64)


def test_a_narrow_q_whose_weights_look_fine_is_told():
    model, x = narrow(0.01)
    truth = model.log_evidence(x=x[:1]).mean
    whole = model.log_evidence(x=x, method="importance", seed=0)
    # rows are alike: another draw of the same weights
    (row,) = (whole.diagnostics["khat"] <= 0.66).nonzero()[:1].flatten().tolist()
    assert truth - float(whole.value[row]) > 2  # though the shape of their tail is fine
    note = next(
        note
        for note in whole.notes
        if note.startswith("100 draws from p find a higher log p than q does, by ")
    )
    assert (
        "k cannot see that q has no samples in part of the posterior; train q longer, or use "
        'method="ais" or "prior".' in note
    )


def test_one_mode_of_two_is_told():
    model = build(
        {"z": Mixture(1, components=2, learned=True), "x | z": Bernoulli(1)}, {"z | x": Normal()}
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        # at −4 and at 4
        model.factors["p(z)"].root.copy_(torch.tensor([0.0, 0.0, -4.0, 4.0, 0.0, 0.0]))
        # at 4, a little wider
        model.factors["q(z|x)"].net.blocks.bias.copy_(torch.tensor([4.0, 0.05]))
    found = model.log_evidence(x=torch.ones(5, 1), method="importance", seed=0)
    assert found.diagnostics["khat"].max() < 0.5
    assert found.mean == pytest.approx(math.log(0.25), abs=0.01)  # half of p(x) = ½
    assert any(
        note.startswith("100 draws from p find a higher log p than q does, by 0.6")
        for note in found.notes
    )


def test_a_good_q_is_not_suspected():
    model = factor_analysis(2, 8)
    found = model.log_evidence(x=model.sample(300, seed=1)["x"], method="importance", seed=0)
    assert not found.notes


WIDE = {
    "static": ({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal()}),
    "for each class": (
        {"y": OneHot(2, learned=True), "z | y": Normal(1), "x | z": Normal(3)},
        {"y | x": OneHot(), "z | x, y": Normal()},
    ),
    "in time": (
        {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(3)},
        {"z[t] | z[t-1], x[t]": Normal()},
    ),
}


@pytest.mark.parametrize("kind", WIDE)
def test_weights_of_a_wider_q_have_the_same_mean(kind):
    """The mean of 200,000 weights is off by more than five standard errors with probability below
    1e-6.
    """
    p, q = WIDE[kind]
    p = {
        key: Normal(spec.size, scale=1.0) if isinstance(spec, Normal) else spec
        for key, spec in p.items()
    }
    model = build(p, q, seed=1)
    x = torch.zeros(1, *([2] if kind == "in time" else []), 3, dtype=torch.float64)
    batch, weights = model.prepare(x=x), Weights(1, 200_000, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        weights.add(proposal_weights(model, batch, wider=True)(batch, 200_000))
    exact = model.log_evidence(x=x, method="exact").value
    assert (weights.value - exact).abs() < 5 * weights.stderr
    assert weights.stderr < 0.05


def test_pareto_k_alone_makes_no_row_suspect():
    """Nearly equal weights with a long tail, which carries nothing, and weights of few samples."""
    random = torch.Generator().manual_seed(0)
    nearly = (1 + 0.01 * ((torch.arange(1000) + 0.5) / 1000) ** -0.8).log()[:, None]
    heavy = 3.0 * torch.randn(1000, 1, generator=random)
    weights = Weights(2, 1000, torch.device("cpu"))
    weights.add(torch.cat([nearly, heavy], 1))
    assert (weights.khat > reliable_shape(1000)).all()
    assert weights.ess[0] > 900
    assert weights.ess[1] < 200
    assert suspect(weights.khat, weights.ess, 1000).tolist() == [False, True]
    (note,) = weight_notes(weights.value, weights.khat, weights.ess, 1000, "raise samples")
    assert note.startswith("1 of 2 examples have Pareto k above 0.67 and an effective sample size")
