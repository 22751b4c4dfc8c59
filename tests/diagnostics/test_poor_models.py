"""Models that are untrained, badly trained or wrong, and the findings that say so."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributions as td
from scipy.stats import norm
from torch import nn

from aevb import Bernoulli, Laplace, Model, Normal, OneHot, Poisson, fit, mle, mlp, register_kl, zoo
from aevb.diagnostics import diagnose
from aevb.diagnostics.baseline import independent_columns
from aevb.diagnostics.calibration import judge_ranks
from aevb.diagnostics.paired import paired
from aevb.runtime.checked_files import DataWarning

RANDOM = torch.Generator().manual_seed(1)
X = torch.randn(200, 2, generator=RANDOM) @ torch.randn(2, 5, generator=RANDOM)
X = X + 0.5 * torch.randn(200, 5, generator=RANDOM) + torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0])


@pytest.fixture
def brief_trial():
    """Here a diagnosis trains its copy as long as usual."""


def trained(**settings):
    """Factor analysis with a network as q, and its run."""
    model = Model(
        p={"z": Normal(2), "x | z": Normal(5, scale="learned")},
        q={"z | x": Normal(net=mlp(32))},
        seed=0,
    )
    return model, fit(model, {"x": X}, progress=False, **settings)


@pytest.mark.parametrize("settings", [{"steps": 3}, {"steps": 20, "lr": 1e-7}])
def test_training_that_ended_too_early_is_told(settings):
    model, run = trained(**settings)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = diagnose(model, {"x": X}, run=run, calibrate=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    (told,) = found.of("further training")
    assert told.level == "warning"
    assert told.figures["mean"] > 1
    assert told.figures["lr"] == 2e-3
    assert (
        "Further training would help: after 300 steps of a copy (lr=0.002) on 100 of" in told.text
    )
    assert ("a larger lr than 1e-07, such as the default 0.002" in told.remedy) == (
        "lr" in settings
    )
    assert found.of("worse than independent columns")[0].level == "warning"


def test_a_model_at_its_maximum_gives_no_alarm():
    model, run = trained(schedule=mle())
    found = diagnose(model, {"x": X}, run=run)
    assert found.of("further training")[0].level == "ok"
    assert not found.of("worse than independent columns")
    assert found.worst == "note"


def test_training_on_another_objective_is_not_continued():
    model, run = trained(steps=3, beta=4.0)
    assert not diagnose(model, {"x": X}, run=run, calibrate=False).of("further training")
    assert not diagnose(model, {"x": X}, calibrate=False, train=False).of("further training")


def test_one_series_is_compared_on_itself():
    x = np.cumsum(np.random.default_rng(0).normal(size=(1, 60, 1)), 1).astype("float32")
    model = zoo.local_level(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fit(model, {"x": x}, steps=1, progress=False)
    found = diagnose(model, {"x": x}, run=run)
    (noted,) = found.of("not converged")
    assert noted.level == "warning"
    assert "before it converged" in noted.text
    (told,) = found.of("further training")
    assert told.level == "warning"
    assert "on these rows, log p rose by" in told.text


def test_a_decoder_that_ends_in_a_sigmoid_is_worse_than_independent_columns():
    x = (torch.rand(200, 8, generator=RANDOM) < torch.linspace(0.02, 0.3, 8)).float()
    net = nn.Sequential(nn.Linear(1, 8), nn.Sigmoid())  # probabilities between 0.5 and 0.73
    model = Model(p={"z": Normal(1), "x | z": Bernoulli(8, net=net)}, q={"z | x": Normal()})
    (told,) = diagnose(model, {"x": x}, calibrate=False, train=False).of(
        "worse than independent columns"
    )
    assert told.figures["independent columns"] - told.figures["model"] > 1
    assert "Sigmoid" in told.remedy


def test_independent_columns_are_fitted_to_the_other_half():
    p = {"z": Normal(1), "a | z": Normal(2), "b | z": Bernoulli(1), "c | z": OneHot(3)}
    model = Model(p={**p, "m | z": Poisson(1)}, q={"z | b": Normal()})
    generator = np.random.default_rng(0)
    a = generator.normal(3, 2, size=(60, 2))
    b, c, n = generator.integers(2, size=60), generator.integers(3, size=60), np.arange(60) % 5
    batch = model.prepare(a=a, b=b[:, None], c=c, m=n[:, None])
    found = independent_columns(model, batch)
    expected = np.zeros(60)
    for fitted, judged in ((slice(0, 60, 2), slice(1, 60, 2)), (slice(1, 60, 2), slice(0, 60, 2))):
        mean, sd = a[fitted].mean(0), a[fitted].std(0)
        z = (a[judged] - mean) / sd
        expected[judged] += (-0.5 * z**2 - np.log(sd) - 0.5 * np.log(2 * np.pi)).sum(1)
        share = (b[fitted].sum() + 0.5) / 31
        expected[judged] += np.where(b[judged] == 1, np.log(share), np.log(1 - share))
        shares = (np.bincount(c[fitted], minlength=3) + 0.5) / 31.5
        expected[judged] += np.log(shares)[c[judged]]
        rate, k = (n[fitted].sum() + 0.5) / 31, n[judged]
        factorials = np.array([1, 1, 2, 6, 24])
        expected[judged] += k * np.log(rate) - rate - np.log(factorials[k])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    gaps = a.copy()
    gaps[::3, 0] = np.nan
    partly = independent_columns(model, model.prepare(a=gaps, b=b[:, None], c=c, m=n[:, None]))
    assert bool(partly.isfinite().all())
    constant = model.prepare(a=np.ones((60, 2)), b=b[:, None], c=c, m=n[:, None])
    assert independent_columns(model, constant) is None


def test_few_rows_do_not_decide_a_difference():
    values = torch.full((100,), 0.2)
    values[:3] = -1e6
    told = paired(values + 0.01 * torch.randn(100, generator=RANDOM), numbers=2)
    assert told.clear
    assert told.mean == pytest.approx(0.2, abs=0.01)
    assert not paired(torch.randn(100, generator=RANDOM), numbers=2).clear
    assert not paired(values + 1, numbers=1000).clear


# Impossible bounds --------------------------------------------------------------------------------


class HalfSure(Normal):
    """A family of the user with a registered KL that is far too small."""


@register_kl(HalfSure, Normal)
def small_kl(q, p):
    return 0.1 * td.kl_divergence(q, p).sum(-1)


class TooSure(td.Normal):
    """Draws that are a tenth as wide as log_prob says."""

    def rsample(self, sample_shape=()):
        return self.loc + 0.1 * (super().rsample(sample_shape) - self.loc)


class Sure(Normal):
    def distribution(self, loc, scale=None):
        return TooSure(loc, self.scales(loc, scale), validate_args=False)

    def reparametrise(self, dist, noise):
        return dist.loc + 0.1 * dist.scale * noise


def near_posterior(q, likelihood):
    """x = z + noise of scale 1, and q(z|x) = N(x/2, 0.7²), which is nearly the posterior."""
    model = Model(p={"z": Normal(1), "x | z": likelihood}, q={"z | x": q})
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.weights["z"].fill_(1.0)
        model.factors["p(x|z)"].net.blocks.bias.zero_()
        model.factors["q(z|x)"].net.blocks.weights["x"].fill_(0.5)
        model.factors["q(z|x)"].net.blocks.bias.zero_()
    return model


@pytest.mark.parametrize("likelihood", [Normal(1, scale=1.0), Laplace(1, scale=1.0)])
def test_an_elbo_above_the_evidence_is_a_problem_of_a_family(likelihood):
    x = 1.4 * torch.randn(200, 1, generator=RANDOM)
    settings = {"calibrate": False, "train": False}
    with pytest.warns(DataWarning, match="contradict each other"):
        model = near_posterior(HalfSure(scale=0.7), likelihood)
    found = diagnose(model, {"x": x}, **settings)
    (told,) = found.of("impossible bound")
    assert told.level == found.worst == "problem"
    assert told.figures["elbo"] > told.figures["evidence"] + 0.05
    assert "z (HalfSure, the registered KL of HalfSure and Normal)" in told.remedy
    right = diagnose(near_posterior(Normal(scale=0.7), likelihood), {"x": x}, **settings)
    assert not right.of("impossible bound")


def test_draws_that_do_not_fit_log_prob_are_found_by_draws_from_p():
    x = 1.4 * torch.randn(200, 1, generator=RANDOM)
    with pytest.warns(DataWarning, match="contradict each other"):
        model = near_posterior(Sure(scale=0.7), Laplace(1, scale=1.0))
    (told,) = diagnose(model, {"x": x}, calibrate=False, train=False).of("impossible bound")
    assert "draws from p" in told.text
    assert "z (Sure)" in told.remedy


# Unused entries -----------------------------------------------------------------------------------


def with_unused(d, used):
    """A VAE in whose q(z|x) only the first entries are used, a little."""
    model = Model(p={"z": Normal(d), "x | z": Normal(2)}, q={"z | x": Normal()}, seed=0)
    with torch.no_grad():
        blocks = model.factors["q(z|x)"].net.blocks
        blocks.weights["x"].zero_()
        blocks.weights["x"][:used] = 0.3
        blocks.bias[:d].zero_()
        blocks.bias[d:].fill_(np.log(np.e - 1))
    return model


def test_what_unused_entries_mean_is_left_open():
    x = torch.randn(200, 2, generator=RANDOM)
    settings = {"calibrate": False, "train": False}
    (told,) = diagnose(with_unused(2, 1), {"x": x}, **settings).of("unused entries")
    assert "no harm" not in told.remedy
    assert told.remedy.startswith("In this model it carries nothing. This does not tell whether")
    assert "compare() with z of size 1" in told.remedy
    found = diagnose(with_unused(32, 1), {"x": x}, **settings)
    (dead,) = found.of("collapse")
    assert not found.of("unused entries")
    assert "31 of its 32 entries are not used" in dead.text


def test_beta_is_named_first():
    x = torch.randn(200, 2, generator=RANDOM)
    model = with_unused(2, 1)
    run = fit(model, {"x": x}, steps=1, lr=1e-9, beta=20.0, progress=False)
    (told,) = diagnose(model, {"x": x}, run=run, calibrate=False).of("unused entries")
    assert told.text.startswith("The run counted each nat of z's KL 20 times (beta=20)")
    assert told.remedy.startswith("Lower beta first")


# Calibration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "rows", "level", "words"),
    [
        (1.0, 1000, "ok", "is calibrated"),
        (1.3, 1000, "note", "is slightly too narrow"),
        (0.8, 1000, "note", "is slightly too wide"),
        (1.1, 20000, "ok", "is calibrated"),  # a small error that many rows reveal
        (3.0, 1000, "note", "is too narrow"),
        (8.0, 1000, "warning", "is too narrow"),
    ],
)
def test_ranks_that_are_clearly_not_uniform_are_not_calibrated(width, rows, level, words):
    u = (np.arange(rows) + 0.5) / rows
    rank = norm.cdf(width * norm.ppf(u))[:, None]
    found = judge_ranks("z", rank)
    assert found.level == level
    assert words in found.text


def test_the_match_with_labels_says_which_rows_are_meant():
    model = Model(p={"y": OneHot(2), "x | y": Normal(5)}, q={"y | x": OneHot()}, seed=0)
    with torch.no_grad():
        model.factors["q(y|x)"].net.blocks.weights["x"][0] = 3.0
    labels = (X @ torch.ones(5) > 0).long()
    (told,) = diagnose(model, {"x": X}, labels=labels, calibrate=False, train=False).of("labels")
    assert "if the training saw their labels, this is no test" in told.text


def test_more_steps_are_no_remedy_of_over_fitting():
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(120, 12, generator=random)
    model = Model(
        p={"z": Normal(4), "x | z": Normal(12, net=mlp(64), scale="learned")},
        q={"z | x": Normal(net=mlp(64))},
        seed=0,
    )
    held = {"x": rows[20:]}
    run = fit(model, {"x": rows[:20]}, validation=held, steps=600, lr=0.01, progress=False, seed=0)
    found = diagnose(model, held, run=run, calibrate=False)
    (fitted,) = found.of("over-fitting")
    (further,) = found.of("further training")
    assert (fitted.level, further.level) == ("warning", "warning")
    assert further.remedy == fitted.remedy
