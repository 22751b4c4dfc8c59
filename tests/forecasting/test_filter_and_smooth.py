"""Exact beliefs against joint Gaussians, sums over all paths, and posteriors of cut data."""

import math

import numpy as np
import pytest
import torch
from exact_models import LENGTHS, MODELS, N, T, data_of, holed
from series_models import (
    EXACT,
    FORWARD,
    Paths,
    autoregression,
    close,
    hidden_markov,
    local_level,
    local_trend,
    series,
)

from aevb import GRU, Model, Normal
from aevb.evidence.structure import NotExactError, Structure

SERIES = {"level": local_level, "trend": local_trend, "autoregression": autoregression}
NAMES = {"level": "z", "trend": "lb", "autoregression": "zw"}


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("holes", [False, True])
def test_beliefs_of_a_state_space_are_those_of_the_joint_gaussian(name, holes):
    model, matrices = SERIES[name]()
    x = series(holes=holes)
    filtered, smoothed = model.filter(x=x[None]), model.smooth(x=x[None])
    assert filtered.method == smoothed.method == "exact"
    for t in range(len(x)):
        for beliefs, known in ((filtered, x[: t + 1]), (smoothed, x)):
            mean, covariance = matrices.states(known, t, len(x))
            for i, latent in enumerate(NAMES[name]):
                close(beliefs.mean[latent][0, t], mean[i : i + 1], atol=1e-7)
                close(beliefs.sd[latent][0, t], [math.sqrt(covariance[i, i])], rtol=1e-6, atol=1e-7)
                assert beliefs[latent].batch_shape == (1, len(x))


def test_beliefs_of_a_hidden_markov_model_are_sums_over_all_paths():
    model = hidden_markov()
    tables, x = Paths.of(model), series(7)[:, 0]
    filtered, smoothed = model.filter(x=x[None, :, None]), model.smooth(x=x[None, :, None])
    for t in range(len(x)):
        for beliefs, known in ((filtered, x[: t + 1]), (smoothed, x)):
            paths, weights, _ = tables.weights(known, len(x))
            expected = [weights @ (paths[:, t] == k) for k in range(3)]
            close(beliefs.probs["s"][0, t], expected)
            close(beliefs["s"].probs[0, t], expected)
            close(beliefs.mean["s"][0, t], expected)


TIMED = [name for name, build in MODELS.items() if any(build().graph.timed.values())]
HOLED = [
    "state space",
    "state space with a static latent",
    "mixture of state spaces",
    "hidden Markov over factor analysers",
    "factor analysis at every step",
]


def exact(name):
    try:
        Structure(MODELS[name]())
    except NotExactError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in FORWARD if exact(name)])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_filter_is_the_posterior_of_the_data_so_far(name, lengths):
    """The posterior itself is compared with brute force in test_exact_posterior.py."""
    model, data = MODELS[name](), data_of(MODELS[name]())
    if name in HOLED:
        data = holed(data, "x")
    beliefs = model.filter(lengths=lengths, method="exact", **data)
    for t in range(T):
        cut = {
            key: value[:, : t + 1] if model.graph.timed[key] else value
            for key, value in data.items()
        }
        own = t + 1 if lengths is None else [min(length, t + 1) for length in lengths]
        posterior = model.posterior(method="exact", lengths=own, **cut)
        for i in range(N):
            for key, mean in beliefs.mean.items():
                if lengths is not None and t >= lengths[i]:
                    assert mean[i, t].isnan().all()
                    continue
                place = (i, t) if model.graph.timed[key] else (i,)
                close(mean[i, t], posterior[key].mean[place])
                close(beliefs.sd[key][i, t], posterior[key].variance[place].sqrt(), atol=1e-8)
                close(beliefs[key].mean[i, t], posterior[key].mean[place])


BACKWARD = [
    "state space backwards, with ends",
    "state space backwards, with inputs",
    "hidden Markov backwards",
    "emissions from both sides",
    "states read only beside",
]


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_p_is_filtered_with_later_data_missing(name):
    model, data = MODELS[name](), data_of(MODELS[name]())
    beliefs = model.filter(method="exact", **data)
    for t in range(T):
        cut = {key: value.clone() for key, value in data.items()}
        for key in model.graph.observed:
            if model.graph.timed[key]:
                cut[key][:, t + 1 :] = math.nan
        posterior = model.posterior(method="exact", **cut)
        for key, mean in beliefs.mean.items():
            close(mean[:, t], posterior[key].mean[:, t])
            close(beliefs.sd[key][:, t], posterior[key].variance[:, t].sqrt())


def test_a_backward_p_that_reads_data_has_no_filter():
    name = "hidden Markov, autoregressive, with ends"
    model = MODELS[name]()
    with pytest.raises(ValueError, match="later data cannot be left out"):
        model.filter(method="exact", **data_of(model))


@pytest.mark.parametrize("name", [name for name in TIMED if exact(name)])
def test_a_smoother_is_the_exact_posterior(name):
    model, data = MODELS[name](), data_of(MODELS[name]())
    beliefs = model.smooth(lengths=LENGTHS, method="exact", **data)
    posterior = model.posterior(lengths=LENGTHS, method="exact", **data)
    for key, mean in beliefs.mean.items():
        for i, length in enumerate(LENGTHS):
            steps = slice(0, length) if model.graph.timed[key] else slice(None)
            close(mean[i, steps], posterior[key].mean[i, steps])
            if model.graph.timed[key]:
                assert mean[i, length:].isnan().all()
                assert beliefs.sd[key][i, length:].isnan().all()


def test_the_last_filtered_belief_is_the_smoothed_one():
    for name in EXACT:
        model, data = MODELS[name](), data_of(MODELS[name]())
        filtered, smoothed = model.filter(**data), model.smooth(**data)
        for key, mean in filtered.mean.items():
            last = smoothed.mean[key][:, -1] if model.graph.timed[key] else smoothed.mean[key]
            close(mean[:, -1], last)


def test_known_latents_have_no_belief_and_change_the_others():
    model = MODELS["two chains"]()
    data = data_of(model)
    known = torch.zeros(N, T, dtype=torch.long)
    beliefs = model.filter(a=known, **data)
    assert set(beliefs.mean) == {"b"}
    known[1, 2] = -1
    partly = model.filter(a=known, **data)
    assert set(partly.mean) == {"a", "b"}
    close(partly.probs["a"][0], np.eye(2)[np.zeros(T, int)])
    assert 0 < partly.probs["a"][1, 2, 0] < 1


def test_a_filter_has_no_joint_draws():
    model, _ = local_level()
    posterior = model.filter(x=series()[None])._posterior
    with pytest.raises(ValueError, match="no joint draws"):
        posterior.sample(3)
    with pytest.raises(ValueError, match="no joint density"):
        posterior.log_prob(z=torch.zeros(1, 9, 1))


def test_many_rows_in_parts_are_the_same_rows(monkeypatch):
    for name in ("hidden Markov over factor analysers", "mixture of state spaces"):
        model, data = MODELS[name](), data_of(MODELS[name]())
        whole = model.filter(**data)
        monkeypatch.setattr("aevb.evidence.forward_pass.AT_ONCE", 1)
        parts = model.filter(**data)
        monkeypatch.undo()
        for key, mean in whole.mean.items():
            close(parts.mean[key], mean)
            close(parts.sd[key], whole.sd[key])


def test_the_text_has_numbers():
    model = hidden_markov()
    text = repr(model.filter(x=series()[None].repeat(5, 0)))
    assert text.startswith("Beliefs about s at each step given the data up to it, 5 rows (exact")
    assert "s, row 0: step 1 0." in text
    assert "… and 2 more rows" in text
    model, _ = local_level()
    assert "given all data, 1 row (exact" in repr(model.smooth(x=series()[None]))
    assert " ± " in repr(model.smooth(x=series()[None]))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_step_by_step_gives_the_same_as_all_steps_at_once(name, lengths, monkeypatch):
    """Chains have a vectorised filter and smoother; other models are visited step by step."""
    model, data = MODELS[name](), data_of(MODELS[name]())
    if name in HOLED:
        data = holed(data, "x")
    options = {"lengths": lengths, "method": "exact"}

    def every():
        given = {u: torch.ones(N, 2, model.graph.size(u)) for u in model.graph.given}
        given = {u: value for u, value in given.items() if model.graph.timed[u]}
        forecast = model.forecast(steps=2, given=given, samples=1, seed=0, **options, **data)
        filled = model.impute(samples=1, seed=0, **options, **data)
        found = [forecast.mean, forecast.sd, filled.mean, filled.sd]
        for beliefs in (model.filter(**options, **data), model.smooth(**options, **data)):
            found += [beliefs.mean, beliefs.sd]
        return found

    quick = every()
    monkeypatch.setattr("aevb.evidence.filtering.Filter.fast", False)
    for a, b in zip(quick, every(), strict=True):
        for key in a:
            close(a[key], b[key], atol=1e-8)


def test_a_precise_series_keeps_its_digits():
    """The smoother subtracts; where little of a variance is left, it is computed with care."""
    model, matrices = local_level(level=1e-3, noise=1e-3, start=1e3)
    x = 1 + 1e-3 * series(6, holes=False)
    x[0] = np.nan
    beliefs = model.smooth(x=x[None])
    # The state before the first observation: it lies one step from the rest.
    mean, _ = matrices.states(x, 1, 6)
    close(beliefs.mean["z"][0, 1], mean, rtol=1e-6)
    first = math.hypot(1e-3, float(beliefs.sd["z"][0, 1]))
    assert float(beliefs.sd["z"][0, 0]) == pytest.approx(first, rel=1e-4)


@pytest.mark.parametrize("steps", [2, 4])
def test_a_constant_latent_with_several_axes_is_repeated_on_each_line(steps):
    model = Model(
        {"c": Normal((2, 3)), "x[t] | c": Normal(1, scale="learned")},
        {"b[t] | b[t-1], x[t]": GRU(4), "c | b[T]": Normal()},
    ).double()
    beliefs = model.smooth(x=np.ones((2, steps, 1)), method="q", seed=0)
    frame = beliefs.frame()
    assert list(frame)[:6] == [f"c{i}_mean" for i in range(6)]
    expected = beliefs.mean["c"].reshape(2, 1, 6).expand(2, steps, 6).reshape(2 * steps, 6)
    np.testing.assert_array_equal(frame.iloc[:, :6], expected)
    assert "step" not in repr(beliefs).split("\n")[1]


def test_particles_need_an_unknown_latent():
    model, _ = local_level()
    x = np.ones((2, 5, 1))
    for what in (model.filter, model.smooth):
        with pytest.raises(ValueError, match=r"the data hold all of them \(z\). Leave out those"):
            what(x=x, z=x, method="particles")
