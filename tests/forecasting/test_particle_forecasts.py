"""Forecasts and beliefs by particles and by q, against the exact ones of the same models.

Estimates are repeated with different seeds. Their mean is compared with the exact answer in
standard errors of the mean, so that no size of the error needs to be guessed: 5 standard errors of
60 runs fail by chance once in 100,000 numbers.
"""

import math

import numpy as np
import pytest
import torch
from series_models import close, hidden_markov, local_level, local_trend
from series_models import series as series_of

from aevb import GRU, LSTM, Bernoulli, Deterministic, Model, Normal, OneHot, mlp
from aevb.forecasting.backward_simulation import why_not_markov
from aevb.forecasting.particles import degenerate, named

RUNS, BOUND = 60, 5.0
MODELS = {
    "level": lambda: local_level()[0],
    "trend": lambda: local_trend()[0],
    "hidden Markov": hidden_markov,
}


def series(steps=9, holes=True):
    """A series that starts with data: q is narrower than p, which reads a missing entry as zero.

    Weights of a missing first step would have infinite variance.
    """
    x = series_of(steps, holes)
    x[0] = 0.3
    return x


@pytest.fixture(autouse=True)
def fewer_particles(monkeypatch):
    monkeypatch.setattr("aevb.forecasting.particles.LEAST", 200)
    monkeypatch.setattr("aevb.forecasting.particles.FEW", 0.0)


def agree(estimates, exact, bias=0.0):
    """The mean of independent estimates is the exact value, within its standard error."""
    values = torch.stack(estimates)
    error = values.std(0) / math.sqrt(len(values))
    assert ((values.mean(0) - exact).abs() <= BOUND * error + bias).all()


def forecasts(model, x, method, **options):
    return [
        model.forecast(steps=3, x=x, samples=200, seed=seed, method=method, **options)
        for seed in range(RUNS)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_forecast_by_particles_is_the_exact_one(name):
    """Moments of normalised weights are biased by O(1/200) of their variance; 0.01 allows for it.

    Squares are averaged because standard deviations are biased by themselves.
    """
    model, x = MODELS[name](), series(8)[None]
    exact = model.forecast(steps=3, x=x, samples=1, seed=0)
    found = forecasts(model, x, "particles")
    scale = float(exact.sd["x"].max())
    agree([one.mean["x"] for one in found], exact.mean["x"], 0.01 * scale)
    squares = [one.sd["x"].square() + (one.mean["x"] - exact.mean["x"]).square() for one in found]
    agree(squares, exact.sd["x"].square(), 0.01 * scale**2)
    # Joint over the steps: the mean product of two steps' deviations.
    low = exact.quantile(0.1)["x"][0]
    agree([(one.draws["x"] < low).double().mean(0) for one in found], 0.1, 0.005)


@pytest.mark.parametrize("name", MODELS)
def test_rows_start_at_their_own_end(name):
    model = MODELS[name]()
    x = np.stack([series(8), series(8, holes=False)])
    x[1, 5:] = 1e9  # padding
    exact = model.forecast(steps=3, x=x, lengths=[8, 5], samples=1, seed=0)
    found = forecasts(model, x, "particles", lengths=[8, 5])
    agree([one.mean["x"] for one in found], exact.mean["x"], 0.01 * float(exact.sd["x"].max()))


@pytest.mark.parametrize("name", MODELS)
def test_the_score_by_particles_is_the_exact_one(name, monkeypatch):
    """The estimate lies within its own standard error: |z| has mean 0.8 and is below 5."""
    monkeypatch.setattr("aevb.forecasting.particles.REPEATS", 32)
    model, x = MODELS[name](), series(8)[None]
    exact = model.forecast(steps=3, x=x, samples=1, seed=0)
    by_particles = model.forecast(steps=3, x=x, samples=200, seed=1, method="particles")
    for values in ([0.5, -0.5, 1.0], [math.nan, 0.3, math.nan]):
        future = np.array(values).reshape(1, 3, 1)
        found, truth = by_particles.score(x=future), exact.log_prob(x=future)
        assert found.method == "particles"
        assert 0 < float(found.stderr) < 0.2
        assert float((found.value - truth).abs() / found.stderr) < 5


def moments(beliefs, name):
    """Means and mean squares, whose averages are not biased by a standard deviation."""
    mean = beliefs.mean[name]
    return torch.cat([mean, beliefs.sd[name].square() + mean.square()], -1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", ["filter", "smooth"])
def test_beliefs_by_particles_are_the_exact_ones(name, what):
    model, x = MODELS[name](), series(6)[None]
    x = np.concatenate([x, x])
    exact = getattr(model, what)(x=x, lengths=[6, 4])
    found = [
        getattr(model, what)(x=x, lengths=[6, 4], method="particles", samples=200, seed=seed)
        for seed in range(RUNS if what == "filter" else RUNS // 3)
    ]
    for key in exact.mean:
        truth = moments(exact, key)
        estimates = [moments(one, key) for one in found]
        assert truth[1, 4:].isnan().all()
        assert all(one[1, 4:].isnan().all() for one in estimates)
        scale = float(truth.nan_to_num().abs().max())
        agree([one.nan_to_num() for one in estimates], truth.nan_to_num(), 0.01 * scale)
    if what == "smooth":
        assert all(one.why.startswith("backward simulation") for one in found)
        draws = found[0].draws[key]
        assert draws.shape == (200, *exact.mean[key].shape)
        close(draws.mean(0)[0], found[0].mean[key][0])


def test_backward_simulation_draws_pairs_of_steps():
    """The covariance of z[0] and z[1] given all data, which lines and marginals would not show."""
    model, matrices = local_level()
    x = series(6)
    _, covariance = matrices.given(x, np.arange(2), 6)
    found = []
    for seed in range(RUNS):
        drawn = model.smooth(x=x[None], method="particles", samples=200, seed=seed).draws["z"]
        mean, _ = matrices.given(x, np.arange(2), 6)
        centred = drawn[:, 0, :2, 0] - torch.tensor(mean)
        found.append((centred[:, 0] * centred[:, 1]).mean())
    agree(found, covariance[0, 1], 0.01)


def test_lines_of_the_last_particles_where_p_remembers():
    """A linear recurrence of the latents: exact by augmenting, not Markov in the latents alone."""
    torch.manual_seed(0)
    p = {
        "z[t]": Normal(1),
        "f[t] | f[t-1], z[t]": Deterministic(1),
        "x[t] | f[t]": Normal(1, scale=0.8),
    }
    model = Model(p, {"z[t] | x[t]": Normal(scale=1.0)}).double()
    x = series(5)[None]
    exact = model.smooth(x=x, method="exact")
    found = [model.smooth(x=x, method="particles", samples=200, seed=seed) for seed in range(RUNS)]
    assert "lines of the last particles" in found[0].why
    assert "reads its own past" in found[0].why
    agree([moments(one, "z") for one in found], moments(exact, "z"), 0.02)


def test_why_p_is_not_markov_in_its_latents():
    h = {"h[t] | h[t-1], z[t-1]": GRU(3), "z[t] | h[t]": Normal(1), "x[t] | z[t]": Normal(1)}
    data_only = {
        "h[t] | h[t-1], x[t-1]": GRU(3),
        "z[t] | h[t], z[t-1]": Normal(1),
        "x[t] | z[t]": Normal(1),
    }
    function = {
        "f[t] | z[t-1]": Deterministic(2, net=mlp(3)),
        "z[t] | f[t]": Normal(1),
        "x[t] | z[t]": Normal(1),
    }
    two = {
        "f[t] | z[t-1]": Deterministic(2, net=mlp(3)),
        "z[t] | f[t-1]": Normal(1),
        "x[t] | z[t]": Normal(1),
    }
    static = {"w": Normal(1), "z[t] | z[t-1], w": Normal(1), "x[t] | z[t]": Normal(1)}
    x = torch.zeros(1, 4, 1)

    def why(p, extra=None):
        model = Model(p, {"z[t] | x[t]": Normal(), **(extra or {})})
        return why_not_markov(model, model.prepare(x=x))

    assert "h is a recurrence" in why(h)
    assert why(data_only) is None
    assert why(function) is None
    assert "more than one step back" in why(two)
    assert "w has no time axis" in why(
        static, {"b[t] | b[t+1], x[t]": GRU(2), "w | b[0]": Normal()}
    )


@pytest.mark.parametrize("kind", ["data", "function"])
def test_backward_simulation_through_functions_and_recurrences_of_data(kind):
    """The filtered and the smoothed belief agree at the last step; weights of earlier steps are
    compared with importance sampling by q, which knows no filter.
    """
    p = {
        "data": {
            "h[t] | h[t-1], x[t-1]": GRU(2),
            "z[t] | h[t], z[t-1]": Normal(1, scale=0.7),
            "x[t] | z[t]": Normal(1, scale=0.8, net=mlp(3, activation="tanh")),
        },
        "function": {
            "f[t] | z[t-1]": Deterministic(2, net=mlp(3, activation="tanh")),
            "z[t] | f[t]": Normal(1, scale=0.7),
            "x[t] | z[t], f[t]": Normal(1, scale=0.8),
        },
    }[kind]
    torch.manual_seed(2)
    model = Model(p, {"z[t] | x[t]": Normal(scale=1.0)}).double()
    x = torch.tensor([0.5, -0.3, 0.9, 0.2]).double().reshape(1, 4, 1)
    found = [model.smooth(x=x, method="particles", samples=200, seed=seed) for seed in range(RUNS)]
    assert found[0].why.startswith("backward simulation")
    count = 200000
    drawn = model.posterior(x=x, method="q", seed=0).sample(count)["z"][:, 0]
    wide = x.expand(count, 4, 1)
    log_w = model.log_prob(x=wide, z=drawn) - torch.distributions.Normal(*_q(model, x)).log_prob(
        drawn[..., 0]
    ).sum(-1)
    weight = log_w.softmax(0)
    expected = (weight[:, None, None] * drawn).sum(0)
    agree([one.mean["z"][0] for one in found], expected, 0.02)


def _q(model, x):
    dist = model.posterior(x=x, method="q")["z"]
    return dist.mean[0, :, 0], dist.variance[0, :, 0].sqrt()


def vrnn(seed=0):
    torch.manual_seed(seed)
    return Model(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(4),
            "z[t] | h[t]": Normal(2, net=mlp(5)),
            "x[t] | h[t], z[t]": Bernoulli(3, net=mlp(5)),
        },
        {"z[t] | h[t], x[t]": Normal(net=mlp(5))},
    ).double()


def test_a_recurrent_model_is_continued_step_by_step():
    """The one-step forecast of a VRNN is the mean of p over the filter's particles; the forecast
    of two steps equals a sum over the first future step.
    """
    model = vrnn()
    x = (torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(0)) < 0.5).double()
    found = [
        model.forecast(steps=2, x=x, samples=200, seed=seed, method="particles")
        for seed in range(RUNS)
    ]
    assert set(found[0].draws["x"].unique().tolist()) == {0.0, 1.0}
    one_step = [
        model.forecast(steps=1, x=x, samples=200, seed=1000 + seed, method="particles").mean["x"]
        for seed in range(RUNS)
    ]
    first = torch.stack([one.mean["x"][:, 0] for one in found])
    second = torch.stack(one_step)[:, :, 0]
    error = ((first.var(0) + second.var(0)) / RUNS).sqrt()
    assert ((first.mean(0) - second.mean(0)).abs() < BOUND * error + 1e-12).all()
    # P(x₁ = a) by the score of every possible first step sums to one, and agrees with the mean.
    few = model.forecast(steps=1, x=x[:1], samples=200, seed=0, method="particles")
    every = [torch.tensor([[[float(i >> j & 1) for j in range(3)]]]).double() for i in range(8)]
    probs = torch.stack([few.log_prob(x=value)[0].exp() for value in every])
    assert float(probs.sum()) == pytest.approx(1, abs=0.02)
    mean = sum(p * value[0, 0] for p, value in zip(probs, every, strict=True))
    torch.testing.assert_close(mean, first.mean(0)[0], atol=0.02, rtol=0)


def test_gaps_of_a_recurrent_model_are_filled_by_particles():
    model, x = vrnn(), torch.ones(1, 6, 3).double()
    x[0, 2] = math.nan
    x[0, 4, 1] = math.nan
    forecast = model.forecast(steps=2, x=x, samples=50, seed=0, method="particles")
    assert not forecast.mean["x"].isnan().any()
    assert model.smooth(x=x, samples=50, seed=0, method="particles").mean["z"].shape == (1, 6, 2)


def test_q_draws_the_past_and_p_the_future():
    """With q equal to the exact posterior of a model without memory, q's forecast is exact."""
    model, _ = local_level()
    x = series(8, holes=False)[None]
    found = model.forecast(steps=2, x=x, samples=4000, seed=0, method="q")
    assert (found.method, found.why) == ("q", "as asked")
    # q's last state given all data, from its own linear-Gaussian recursion.
    weight, sd = gains(model)
    mean, variance = weight[0] * x[0, 0, 0], sd[0] ** 2
    for t in range(1, 8):
        mean = (1 - weight[1]) * mean + weight[1] * x[0, t, 0]
        variance = (1 - weight[1]) ** 2 * variance + sd[1] ** 2
    expected = math.sqrt(variance + 1.3**2 + 2.0**2)
    assert float((found.mean["x"][0, 0, 0] - mean).abs()) < 5 * math.sqrt(variance / 4000)
    assert float(found.sd["x"][0, 0, 0]) == pytest.approx(expected, rel=0.02)
    exact = model.forecast(steps=2, x=x, samples=1, seed=0)
    future = exact.mean["x"]
    score = found.score(x=future)
    assert float((score.value - exact.log_prob(x=future)).abs() / score.stderr) < 5


def gains(model):
    from series_models import gain, spread

    return (gain(3.0, 2.0), gain(1.3, 2.0)), (spread(3.0, 2.0), spread(1.3, 2.0))


def test_a_smoothing_q_forecasts_but_does_not_filter():
    p = {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1, net=mlp(3))}
    q = {"b[t] | b[t+1], x[t]": GRU(3), "z[t] | b[t]": Normal()}
    torch.manual_seed(0)
    model, x = Model(p, q).double(), torch.zeros(2, 5, 1)
    assert model.forecast(steps=2, x=x, samples=20, seed=0, method="q").mean["x"].shape == (2, 2, 1)
    assert model.smooth(x=x, method="q", seed=0)["z"].mean.shape == (2, 5, 1)
    with pytest.raises(ValueError, match=r'q is no filter: "b\[t\] \| b\[t\+1\], x\[t\]" reads'):
        model.filter(x=x, method="q")
    assert model.filter(x=x, method="particles", samples=20, seed=0).mean["z"].shape == (2, 5, 1)


def test_a_filtering_q_filters():
    model, _ = local_level()
    x = series(6, holes=False)[None]
    beliefs = model.filter(x=x, method="q", samples=500, seed=0)
    assert (beliefs.method, beliefs.filtered) == ("q", True)
    close(beliefs.mean["z"][0, 0], gains(model)[0][0] * x[0, 0])


def test_auto_prefers_exact_then_particles_then_q():
    model, _ = local_level()
    x = series()[None]
    assert model.forecast(steps=1, x=x).method == "exact"
    seen = (torch.rand(1, 6, 3) < 0.5).double()
    trained = vrnn()
    trained.teaching.record(trained, {"z": None}, trained=True)
    found = trained.forecast(steps=1, x=seen, samples=20, seed=0)
    assert found.method == "particles"
    assert "not exact: p(h[t]|h[t-1], x[t-1], z[t-1]) is" in found.why
    assert trained.filter(x=seen, samples=20, seed=0).method == "particles"
    assert trained.smooth(x=seen, samples=20, seed=0).method == "particles"
    static = Model(
        {"w": Normal(2), "x[t] | w": Normal(3, net=mlp(4))},
        {"b[t] | b[t+1], x[t]": GRU(3), "w | b[0]": Normal()},
    ).double()
    found = static.forecast(steps=2, x=torch.zeros(1, 4, 3), samples=20, seed=0)
    assert (found.method, "no particles: no latent has a time axis" in found.why) == ("q", True)


def test_few_particles_are_noted(monkeypatch):
    monkeypatch.setattr("aevb.forecasting.particles.FEW", 0.02)
    torch.manual_seed(0)
    model = Model(
        {"z[t] | z[t-1]": Normal(1, scale=0.1), "x[t] | z[t]": Normal(1, scale=0.05)},
        {"z[t] | x[t]": Normal(scale=3.0)},
    ).double()
    x = 10 + torch.arange(12.0).reshape(1, 12, 1)
    for found in (
        model.forecast(steps=1, x=x, samples=50, seed=0, method="particles"),
        model.filter(x=x, samples=50, seed=0, method="particles"),
        model.smooth(x=x, samples=50, seed=0, method="particles"),
    ):
        note, _ = found.notes
        assert note.startswith("1 row has a step at which only ")
        assert note in repr(found)


def test_the_note_on_few_particles_names_the_rows(monkeypatch):
    monkeypatch.setattr("aevb.forecasting.particles.FEW", 0.02)
    ess = torch.tensor([500.0, 1.2, 3.0, 600.0, 4.0, 5.0, 6.0, 7.0, 2.0])
    notes = degenerate(ess, 1000)
    assert notes[0].startswith(
        "7 of 9 rows (rows 1, 2, 4, 5, 6, …) have a step at which only 1.2 of"
    )
    ids = [f"river {i}" for i in range(9)]
    (note,) = named(("other", *notes), ids)[1:]
    assert note.startswith("7 of 9 rows (river 1, river 2, river 4, river 5, river 6, …) have a")
    assert degenerate(ess[:2], 1000)[0].startswith("1 row (row 1) has a step")
    assert named(notes, None) == notes
    assert degenerate(ess[:1], 1000) == ()


def test_rows_in_blocks(monkeypatch):
    """Memory limits split rows and draws; every row still starts at its own end."""
    monkeypatch.setattr("aevb.forecasting.particles.AT_ONCE", 1)
    monkeypatch.setattr("aevb.forecasting.continuation.NUMBERS", 1)
    model = hidden_markov()
    x = np.stack([series(8)] * 3)
    found = model.forecast(steps=2, x=x, samples=80, seed=0, method="particles", lengths=[8, 3, 6])
    exact = model.forecast(steps=2, x=x, samples=1, seed=0, lengths=[8, 3, 6])
    error = exact.sd["x"] / math.sqrt(50)
    assert ((found.mean["x"] - exact.mean["x"]).abs() < 5 * error).all()
    assert model.filter(x=x, samples=10, seed=0, method="particles").probs["s"].shape == (3, 8, 3)
    assert model.smooth(x=x, samples=10, seed=0, method="particles").probs["s"].shape == (3, 8, 3)


def test_labels_known_in_the_past_stay():
    torch.manual_seed(0)
    model = Model(
        {"s[t] | s[t-1]": OneHot(2), "x[t] | s[t]": Normal(1, net=mlp(3))},
        {"s[t] | x[t]": OneHot()},
    ).double()
    x, s = torch.zeros(2, 4, 1), torch.tensor([[0, 1, -1, 1], [1, 1, 1, 0]])
    exact = model.forecast(steps=2, x=x, s=s, samples=1, seed=0, method="exact")
    found = [
        model.forecast(steps=2, x=x, s=s, samples=200, seed=seed, method="particles").mean["x"]
        for seed in range(RUNS)
    ]
    agree(found, exact.mean["x"], 0.005)


def test_one_draw_has_the_spread_of_p():
    """With one draw of the latents, the moments are those of p given that draw."""
    model, _ = local_level(noise=2.0)
    for method in ("particles", "q"):
        found = model.forecast(steps=3, x=series()[None], samples=1, method=method, seed=0)
        close(found.sd["x"], torch.full((1, 3, 1), 2.0))
