"""EM of over-dispersed counts against scipy, the maximum of the evidence, and brute force."""

import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize, stats

from aevb import Exact, Model, NegativeBinomial, Normal, OneHot, em, fit, mle
from aevb.data.sources import open_source
from aevb.declare.conditionals import Occurrences
from aevb.declare.dispersion import most_likely_dispersion
from aevb.evidence.exact import exact_evidence
from aevb.tables.kinds import negative_binomial_likelihood
from aevb.training.distributed import World
from aevb.training.em import Mixtures, Responsibilities, exact_em
from aevb.training.em.factors import ROWS, Rows
from aevb.training.em.occurrences import occurrences
from aevb.training.loop import Training


def drawn(n: int, *, seed: int = 0, missing: float = 0.0) -> np.ndarray:
    """Counts of three clusters, with the dispersions 0.7, 2 and 8."""
    random = np.random.default_rng(seed)
    mean = np.array([[1.0, 4.0, 30.0], [6.0, 0.5, 5.0], [20.0, 9.0, 60.0]])
    mean, r = mean[random.integers(3, size=n)], np.array([0.7, 2.0, 8.0])
    x = random.poisson(random.gamma(r, mean / r)).astype(float)
    return np.where(random.random(x.shape) < missing, np.nan, x)


def mixture(spec: NegativeBinomial, clusters: int = 3, *, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    p = {"y": OneHot(clusters, learned=True), "x | y": spec}
    return Model(p, {"y | x": Exact()}).double()


def parameters(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """The means [clusters, columns], and the dispersions [columns]."""
    factor = model.factors["p(x|y)"]
    with torch.no_grad():
        mean = (factor.net.blocks.weights["y"].mT + factor.net.blocks.bias).exp()
        return mean.numpy(), F.softplus(factor.vectors["dispersion"]).numpy()


def log_pmf(x: np.ndarray, mean: np.ndarray, r: float) -> np.ndarray:
    return stats.nbinom.logpmf(x, r, r / (r + mean))


def counted(x: np.ndarray) -> Occurrences:
    found = [np.unique(column[~np.isnan(column)], return_counts=True) for column in x.T]
    column = [np.full(len(value), j) for j, (value, _) in enumerate(found)]
    value, times = (np.concatenate(one) for one in zip(*found, strict=True))
    times = torch.as_tensor(times).double()
    return Occurrences(torch.as_tensor(np.concatenate(column)), torch.as_tensor(value), times)


# The M-step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0.0, 0.3], ids=["", "missing"])
def test_an_m_step_is_scipys_maximum(missing):
    """For random responsibilities, over all means of a column and its dispersion."""
    x = drawn(200, missing=missing)
    weight = np.random.default_rng(1).dirichlet(np.ones(3), size=len(x))
    known = ~np.isnan(x)
    count = weight.T @ known
    mean = weight.T @ np.where(known, x, 0) / count
    spec = NegativeBinomial(3)
    some = [torch.as_tensor(one) for one in (count, mean)]
    heads = spec.most_likely(*some, some[1], some[1][0])
    heads |= spec.most_likely_vectors(*some, heads, counted(x))
    np.testing.assert_allclose(heads["log_mean"].exp(), mean, rtol=1e-12)
    for j in range(3):
        here, values = weight[known[:, j]], x[known[:, j], j]

        def loss(point, here=here, values=values):
            mean, r = np.exp(point[:-1]), np.exp(point[-1])
            return -(here * log_pmf(values[:, None], mean, r)).sum()

        start = np.append(np.log(mean[:, j]), 0.0)
        best = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-7})
        alone = optimize.minimize_scalar(
            lambda log_r, j=j, loss=loss: loss(np.append(np.log(mean[:, j]), log_r)),
            bracket=(-1, 1),
            tol=1e-12,
        )
        r = float(F.softplus(heads["dispersion"][j]))
        assert np.log(r) == pytest.approx(alone.x, abs=1e-6)
        assert -loss(np.append(np.log(mean[:, j]), np.log(r))) >= -best.fun - 1e-9


def test_the_dispersion_fits_means_that_are_not_those_of_the_data():
    x, mean = drawn(300)[:, :1], 3.0
    count, total = torch.tensor([[300.0]]).double(), torch.tensor([[x.sum()]])
    r = most_likely_dispersion(count, total, torch.full_like(total, mean), counted(x))
    best = optimize.minimize_scalar(
        lambda log_r: -log_pmf(x, mean, np.exp(log_r)).sum(), bracket=(-1, 1), tol=1e-12
    )
    assert float(r.log()) == pytest.approx(best.x, abs=1e-6)


def test_of_two_maxima_the_dispersion_is_the_higher_one():
    """A cluster of very few large counts wants a small r, and a cluster of equal ones a large r."""
    for many, small in ((20, True), (2000, False)):
        scarce, even = np.zeros(200), np.full(many, 5.0)
        scarce[0] = 5000.0
        x = np.concatenate([scarce, even])
        count = torch.tensor([[200.0], [float(many)]]).double()
        mean = torch.tensor([[25.0], [5.0]]).double()
        r = float(most_likely_dispersion(count, count * mean, mean, counted(x[:, None])))
        grid = np.exp(np.linspace(-12, 14, 1041))
        each = [log_pmf(scarce, 25.0, one).sum() + log_pmf(even, 5.0, one).sum() for one in grid]
        found = log_pmf(scarce, 25.0, r).sum() + log_pmf(even, 5.0, r).sum()
        assert found >= max(each) - 1e-6
        assert (r < 1) is small


def test_counts_without_more_spread_than_poissons_have_a_large_dispersion():
    x = np.tile([4.0, 5.0, 6.0], 50)[:, None]
    count = torch.tensor([[150.0]]).double()
    r = most_likely_dispersion(count, 5 * count, torch.full_like(count, 5.0), counted(x))
    assert float(r) == pytest.approx(np.exp(14), rel=1e-6)


# Values and how often they occur ------------------------------------------------------------------


class Half(World):
    """One of two processes, which knows what the other found."""

    def gather(self, found):
        return [found if rank == self.rank else self.others[rank] for rank in range(2)]


def test_occurrences_count_the_known_values_of_all_rows_and_processes():
    x = drawn(2 * ROWS + 10, missing=0.1)
    model = mixture(NegativeBinomial(3))
    source, expected = open_source(model.graph, {"x": x}, model._parameter()), counted(x)
    for got, one in zip(occurrences(Rows(source, World()), "x"), expected, strict=True):
        assert torch.equal(got, one)
    middle = len(x) // 2
    others = [counted(x[:middle]), counted(x[middle:])]
    for rank in range(2):
        world = Half(rank, 2)
        object.__setattr__(world, "others", others)
        for got, one in zip(occurrences(Rows(source, world), "x"), expected, strict=True):
            assert torch.equal(got, one)


# Whole runs ---------------------------------------------------------------------------------------


def test_over_dispersed_counts_have_an_m_step_if_clusters_share_the_dispersion():
    assert type(exact_em(mixture(NegativeBinomial(3)))) is Mixtures
    assert type(exact_em(mixture(NegativeBinomial(3, dispersion=2.0)))) is Mixtures
    spec = NegativeBinomial(3, dispersion="network")
    method = exact_em(mixture(spec))
    assert type(method) is Responsibilities
    assert not method.closed  # its M-step takes gradient steps
    ones = torch.ones(1, 3)
    assert spec.most_likely(ones, ones, ones, ones[0]) is None
    assert spec.polynomial(ones, ones) is None


@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("missing", [0.0, 0.3], ids=["", "missing"])
def test_the_evidence_never_falls_and_ends_at_a_maximum(missing, accelerate):
    x = drawn(400, missing=missing)
    for seed in range(3):
        model = mixture(NegativeBinomial(3), seed=seed)
        schedule = em(tol=0, accelerate=accelerate)
        run = fit(model, {"x": x}, schedule=schedule, steps=300, seed=seed, progress=False)
        evidence = np.array(run.history["evidence"])
        assert (np.diff(evidence) >= 0).all()
        value = exact_evidence(model, model.prepare(x=x)).mean()
        assert evidence[-1] == pytest.approx(value.item(), abs=1e-12)
        slopes = torch.autograd.grad(value, list(model.theta()))
        assert max(float(one.abs().max()) for one in slopes) < 1e-6


def test_the_evidence_is_a_sum_over_clusters():
    x = drawn(50, missing=0.2)
    model = mixture(NegativeBinomial(3))
    run = fit(model, {"x": x}, schedule=em(), steps=20, progress=False)
    mean, r = parameters(model)
    share = model.factors["p(y)"].root.detach().softmax(-1).numpy()
    each = np.stack([np.nansum(log_pmf(x, one, r), -1) for one in mean], 1)
    value = np.log(np.exp(each) @ share).mean()
    assert run.history["evidence"][-1] == pytest.approx(value, rel=1e-10)


def test_one_cluster_is_the_fit_of_each_column_alone():
    x = drawn(300, missing=0.2)
    model = mixture(NegativeBinomial(3), 1)
    run = fit(model, {"x": x}, schedule=em(), progress=False)
    total, each = 0.0, []
    for column in x.T:
        known = column[~np.isnan(column)]
        value, r = negative_binomial_likelihood(known)
        total, each = total + value * len(known), [*each, r]
    assert run.history["evidence"][-1] * len(x) == pytest.approx(total, abs=1e-6)
    mean, r = parameters(model)
    np.testing.assert_allclose(mean[0], np.nanmean(x, 0), rtol=1e-9)
    np.testing.assert_allclose(r, each, rtol=1e-3)  # scipy's search ends at 1e-5 of log r


def test_the_maximum_is_that_of_mle():
    x = drawn(500)
    found = mixture(NegativeBinomial(3))
    fit(found, {"x": x}, schedule=em(tol=1e-12), progress=False)
    other = mixture(NegativeBinomial(3))
    other.load_state_dict(found.state_dict())
    before = float(found.log_evidence(x=x).value.mean())
    fit(other, {"x": x}, schedule=mle(tol=1e-12), progress=False)
    assert float(other.log_evidence(x=x).value.mean()) == pytest.approx(before, abs=1e-9)
    for one, two in zip(parameters(found), parameters(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_a_learned_dispersion_of_a_fixed_mean_is_the_most_likely_one():
    """A variable without parents that is not learned has the mean 1."""
    random = np.random.default_rng(0)
    k, x = random.negative_binomial(2, 0.5, (200, 1)).astype(float), random.normal(size=(200, 1))
    p = {"y": OneHot(2, learned=True), "x | y": Normal(1), "k": NegativeBinomial(1)}
    model = Model(p, {"y | x": Exact()}).double()
    fit(model, {"k": k, "x": x}, schedule=em(), steps=20, progress=False)
    r = F.softplus(model.factors["p(k)"].vectors["dispersion"]).item()
    best = optimize.minimize_scalar(
        lambda log_r: -log_pmf(k, 1.0, np.exp(log_r)).sum(), bracket=(-1, 1), tol=1e-12
    )
    assert np.log(r) == pytest.approx(best.x, abs=1e-6)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    x = drawn(200, missing=0.1)
    whole, part = mixture(NegativeBinomial(3)), mixture(NegativeBinomial(3), seed=7)
    run = fit(whole, {"x": x}, schedule=em(tol=0), steps=20)
    take = Training._take_step

    def interrupted(self, phase):
        if self.step == 6:
            signal.raise_signal(signal.SIGINT)
        return take(self, phase)

    monkeypatch.setattr(Training, "_take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(mixture(NegativeBinomial(3)), {"x": x}, schedule=em(tol=0), steps=20, out=tmp_path)
    monkeypatch.setattr(Training, "_take_step", take)
    resumed = fit(part, {"x": x}, schedule=em(tol=0), steps=20, out=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.history["evidence"], run.history["evidence"])
    assert all(torch.equal(a, b) for a, b in zip(whole.theta(), part.theta(), strict=True))
