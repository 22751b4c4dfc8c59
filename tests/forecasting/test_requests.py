"""Every message for a bad request names what is wrong, where, and what to pass."""

import math
import re

import numpy as np
import pytest
import torch
from series_models import local_level, series

from aevb import GRU, Bernoulli, Model, Normal, OneHot, Poisson, mlp
from aevb.forecasting import Forecast

NAN = math.nan


def driven(**sizes):
    """A model with an input u that p reads, a class c without time, and v that only q reads."""
    torch.manual_seed(0)
    return Model(
        {
            "z[t] | z[t-1], u[t], c": Normal(1, scale="learned"),
            "x[t] | z[t]": Normal(2, scale="learned"),
        },
        {"z[t] | x[t], v[t]": Normal()},
        given={"u": 1, "c": 3, "v": 1} | sizes,
    ).double()


def rows(n=2, steps=5, **other):
    return {
        "x": torch.zeros(n, steps, 2),
        "u": torch.zeros(n, steps, 1),
        "v": torch.zeros(n, steps, 1),
        "c": torch.zeros(n, dtype=torch.long),
    } | other


def future(n=2, steps=3, **other):
    return {"u": torch.zeros(n, steps, 1)} | other


def vae():
    return Model({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Normal()})


def backward():
    return Model({"z[t] | z[t+1]": Normal(1), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()})


def ended():
    return Model(
        {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1), "x[T] | z[T]": Normal(1)},
        {"z[t] | x[t]": Normal()},
    )


def of_the_end():
    return Model(
        {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1), "c | z[T]": Normal(1)},
        {"z[t] | x[t]": Normal()},
    )


def counts(q=None):
    torch.manual_seed(0)
    return Model(
        {"z[t] | z[t-1]": Normal(1, scale="learned"), "x[t] | z[t]": Poisson(1, net=mlp(3))},
        q or {"z[t] | x[t]": Normal()},
    )


LEVEL, X = local_level()[0], torch.zeros(2, 5, 1)
BAD_FORECASTS = {
    "no steps": (LEVEL, {"x": X}, "how many steps to forecast .* e.g. forecast(steps=12, x=x)."),
    "steps of zero": (LEVEL, {"steps": 0, "x": X}, "a whole number from 1 on.* Got 0."),
    "steps that are negative": (LEVEL, {"steps": -3, "x": X}, "Got -3."),
    "steps that are not whole": (LEVEL, {"steps": 2.5, "x": X}, "Got 2.5."),
    "steps that are true": (LEVEL, {"steps": True, "x": X}, "Got True."),
    "no time": (vae(), {"steps": 2, "x": X[:, 0]}, "no observed variable of this model has [t]"),
    "no data": (LEVEL, {"steps": 2}, "'x' is observed .* but the data lack it"),
    "another name": (LEVEL, {"steps": 2, "y": X}, "The data have 'y', which is not a variable"),
    "an empty past": (LEVEL, {"steps": 2, "x": X[:, :0]}, "x has shape [2, 0, 1], so there is no"),
    "no rows": (LEVEL, {"steps": 2, "x": X[:0]}, "x has shape [0, 5, 1], so there is no past"),
    "an empty row": (LEVEL, {"steps": 2, "x": [np.zeros((2, 1)), np.zeros((0, 1))]}, "no steps in"),
    "lengths of zero": (LEVEL, {"steps": 2, "x": X, "lengths": [0, 5]}, "from 1 to 5"),
    "negative lengths": (LEVEL, {"steps": 2, "x": X, "lengths": [-1, 5]}, "from 1 to 5"),
    "lengths beyond the data": (LEVEL, {"steps": 2, "x": X, "lengths": [5, 6]}, "from 1 to 5"),
    "lengths of other rows": (LEVEL, {"steps": 2, "x": X, "lengths": [5]}, "each of the 2 rows"),
    "an infinite value": (LEVEL, {"steps": 2, "x": X + math.inf}, "10 values not finite"),
    "a method": (LEVEL, {"steps": 2, "x": X, "method": "kalman"}, '"exact", "particles" or "q"'),
    "no samples": (LEVEL, {"steps": 2, "x": X, "samples": 0}, "from 1 on. Got 0."),
    "half a sample": (LEVEL, {"steps": 2, "x": X, "samples": 0.5}, "from 1 on. Got 0.5."),
    "backward p": (backward(), {"steps": 2, "x": X}, "reads z[t+1], a later step.* impute"),
    "a rule for the end": (ended(), {"steps": 2, "x": X}, "a rule of its own for the last step"),
    "a reader of the end": (
        of_the_end(),
        {"steps": 2, "x": X, "c": torch.zeros(2, 1)},
        '"c | z[T]" reads z[T], the end of the sequence',
    ),
    "no future of u": (driven(), {"steps": 3, **rows()}, "given={'u': …} of shape [2, 3, 1]"),
    "a short future": (
        driven(),
        {"steps": 3, **rows(), "given": future(steps=2)},
        "future of u has shape [2, 2, 1]; expected [2, 3, 1], the 2 rows of the past and the 3",
    ),
    "a future of other rows": (
        driven(),
        {"steps": 3, **rows(), "given": future(n=4)},
        "future of u has shape [4, 3, 1]; expected [2, 3, 1]",
    ),
    "a future of another size": (
        driven(),
        {"steps": 3, **rows(), "given": {"u": torch.zeros(2, 3, 4)}},
        "u has shape [2, 3, 4]",
    ),
    "a missing future": (
        driven(),
        {"steps": 3, **rows(), "given": {"u": torch.tensor([[0, 1, NAN], [0, 0, 0]])[..., None]}},
        "u is missing in row 0 (from 0) at step 3 of the forecast",
    ),
    "an infinite future": (
        driven(),
        {"steps": 3, **rows(), "given": {"u": torch.full((2, 3, 1), math.inf)}},
        "u has 6 values not finite",
    ),
    "a ragged future": (
        driven(),
        {"steps": 3, **rows(), "given": {"u": [np.zeros((3, 1)), np.zeros((2, 1))]}},
        "given: the future has the same 3 steps in every row",
    ),
    "a future of a constant": (
        driven(),
        {"steps": 3, **rows(), "given": future(c=torch.zeros(2, 3))},
        "c has no time: pass it as data, c=…. Those are u, v.",
    ),
    "a future of data": (
        driven(),
        {"steps": 3, **rows(), "given": future(x=torch.zeros(2, 3, 2))},
        "'x' is not a given variable in time. Those are u, v.",
    ),
    "a future without names": (
        driven(),
        {"steps": 3, **rows(), "given": torch.zeros(2, 3, 1)},
        "given= is the future of the given variables by name.* got Tensor",
    ),
    "no past of u": (
        driven(),
        {"steps": 3, "x": rows()["x"], "c": rows()["c"], "v": rows()["v"], "given": future()},
        "'u' is given",
    ),
    "a gap in u": (
        driven(),
        {"steps": 3, **rows(u=torch.full((2, 5, 1), NAN)), "given": future()},
        "u has missing entries but p reads it",
    ),
    "exact for counts": (
        counts(),
        {"steps": 2, "x": X, "method": "exact"},
        "not known in closed form for this model: p(x[t]|z[t]) is a Poisson. "
        'Use method="particles"',
    ),
    "particles for a static latent": (
        Model(
            {"w": Normal(1), "x[t] | w": Normal(1, scale="learned")},
            {"b[t] | b[t+1], x[t]": GRU(2), "w | b[0]": Normal()},
        ),
        {"steps": 2, "x": X, "method": "particles"},
        'no latent has a time axis. Use method="exact"',
    ),
}


@pytest.mark.parametrize("name", BAD_FORECASTS)
def test_bad_forecasts(name):
    model, request, words = BAD_FORECASTS[name]
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        model.forecast(**request)


BAD_BELIEFS = {
    "no time": (vae(), {"x": X[:, 0]}, "no observed variable of this model has [t]"),
    "an empty series": (LEVEL, {"x": X[:, :0]}, "a row needs at least one step"),
    "a method": (LEVEL, {"x": X, "method": "kalman"}, '"exact", "particles" or "q"'),
    "no samples": (LEVEL, {"x": X, "samples": 0}, "from 1 on. Got 0."),
    "lengths": (LEVEL, {"x": X, "lengths": [9, 1]}, "from 1 to 5"),
    "exact for counts": (counts(), {"x": X, "method": "exact"}, 'Use method="particles"'),
}


@pytest.mark.parametrize("what", ["filter", "smooth"])
@pytest.mark.parametrize("name", BAD_BELIEFS)
def test_bad_beliefs(name, what):
    model, request, words = BAD_BELIEFS[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        getattr(model, what)(**request)


def test_an_untrained_q_is_refused_with_the_fix():
    from aevb import fit

    model = counts()
    x = torch.poisson(torch.full((20, 6, 1), 2.0), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.theta():
            parameter.add_(0.1)
    for call in (lambda: model.forecast(steps=2, x=x), lambda: model.smooth(x=x)):
        with pytest.raises(ValueError, match=r"never trained.*Train q \(schedule=joint\(\)\)"):
            call()
    fit(model, {"x": x}, steps=5, seed=0, progress=False)
    found = model.forecast(steps=2, x=x, samples=10, seed=0)
    assert (found.method, found.mean["x"].shape) == ("particles", (20, 2, 1))


def test_units_far_from_the_training_rows_are_noted():
    from aevb import fit
    from aevb.runtime.checked_files import DataWarning

    model = counts()
    x = torch.poisson(torch.full((20, 6, 1), 2.0), generator=torch.Generator().manual_seed(0))
    fit(model, {"x": x}, steps=2, seed=0, progress=False)
    with pytest.warns(DataWarning, match="far from the rows"):
        model.forecast(steps=1, x=1000 * x, samples=5, seed=0)


def test_valid_futures_of_given_variables():
    """One row for all, a class by label, and no future of what only q reads."""
    model, data = driven(), rows()
    u = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)
    every = model.forecast(steps=3, given={"u": u.expand(2, 3, 1)}, samples=2, seed=0, **data)
    for same in ({"u": u}, {"u": u[:, 0]}, {"u": u[:, 0].expand(2, 3)}, {"u": u, "v": u}):
        one = model.forecast(steps=3, given=same, samples=2, seed=0, **data)
        assert torch.equal(one.mean["x"], every.mean["x"])
        assert torch.equal(one.draws["x"], every.draws["x"])
    labels = Model(
        {
            "z[t] | z[t-1], k[t]": Normal(1, scale="learned"),
            "x[t] | z[t]": Normal(1, scale="learned"),
        },
        {"z[t] | x[t]": Normal()},
        given={"k": 3},
    ).double()
    k = torch.tensor([[0, 1, 2, 1, 0]])
    a = labels.forecast(steps=2, given={"k": [[2, 1]]}, samples=2, seed=0, x=X[:1], k=k)
    vectors = torch.eye(3)[[2, 1]][None]
    b = labels.forecast(steps=2, given={"k": vectors}, samples=2, seed=0, x=X[:1], k=k)
    assert torch.equal(a.mean["x"], b.mean["x"])
    with pytest.raises(ValueError, match="k is missing in row 0"):
        labels.forecast(steps=2, given={"k": [[2, -1]]}, samples=2, seed=0, x=X[:1], k=k)


def test_a_missing_start_is_marginalised():
    """NaN at the start says nothing: the forecast equals that of the joint Gaussian."""
    model, matrices = local_level()
    x = series(6)
    x[:3] = NAN
    forecast = model.forecast(steps=1, x=x[None], samples=1, seed=0)
    mean, covariance = matrices.future(x, 1)
    assert float(forecast.mean["x"]) == pytest.approx(mean[0])
    assert float(forecast.sd["x"]) == pytest.approx(covariance[0, 0] ** 0.5)
    nothing = model.forecast(steps=1, x=np.full((1, 2, 1), NAN), samples=1, seed=0)
    assert float(nothing.mean["x"]) == pytest.approx(0)


FORECAST = LEVEL.forecast(steps=2, x=X, samples=5, seed=0)
BAD_USES = {
    "a level of one": (lambda: FORECAST.quantile(1.0), "lie between 0 and 1"),
    "a level of zero": (lambda: FORECAST.quantile([0.5, 0]), "Got 0."),
    "no levels": (lambda: FORECAST.quantile([]), "at least one level"),
    "a word": (lambda: FORECAST.interval("wide"), "lie between 0 and 1"),
    "no future": (lambda: FORECAST.log_prob(), "the realised future of x, 2 steps.*got nothing"),
    "another future": (lambda: FORECAST.log_prob(y=X), "got y"),
    "a long future": (lambda: FORECAST.log_prob(x=X), "shape [2, 5, 1]; expected [2, 2, 1]"),
    "an infinite future": (lambda: FORECAST.log_prob(x=X[:, :2] + math.inf), "not finite"),
    "a picture of words": (lambda: FORECAST.plot("forecast.txt"), ".png, .svg or .pdf"),
    "no panels": (lambda: FORECAST.plot("forecast.png", panels=0), "panels is the largest"),
    "columns of others": (lambda: FORECAST.plot("f.png", columns=["a", "b"]), "the 1 entries of x"),
    "a distribution of particles": (
        lambda: LEVEL.filter(x=X, method="particles", samples=5, seed=0)["z"],
        "Beliefs by particles have no distribution for 'z'. Use .mean['z']",
    ),
    "beliefs about data": (
        lambda: LEVEL.filter(x=X, method="particles", samples=5, seed=0)["x"],
        "'x' is not an unknown latent; those are z",
    ),
    "exact beliefs about data": (lambda: LEVEL.filter(x=X)["x"], "'x' is not a latent"),
}


@pytest.mark.parametrize("name", BAD_USES)
def test_bad_uses_of_a_result(name):
    use, words = BAD_USES[name]
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    with pytest.raises(ValueError, match=pattern):
        use()


def test_results_are_public_and_say_what_they_are():
    import aevb

    assert aevb.Forecast is Forecast
    assert isinstance(LEVEL.filter(x=X), aevb.Beliefs)
    many = LEVEL.forecast(steps=2, x=torch.zeros(5, 4, 1), samples=7, seed=0)
    text = repr(many)
    assert text.startswith("Forecast of x, 2 steps after the end of 5 rows (exact, exact quantiles")
    assert "step 1 0 ± " in text
    assert "(95 % -" in text
    assert "… and 2 more rows" in text
    assert many.samples == 7
    binary = Model(
        {"s[t] | s[t-1]": OneHot(2), "x[t] | s[t]": Bernoulli(1)}, {"s[t] | x[t]": OneHot()}
    )
    assert "quantiles of x from 7 draws" in repr(binary.forecast(steps=2, x=X, samples=7, seed=0))


def test_a_variable_cannot_be_called_given():
    with pytest.raises(ValueError, match="'given' is a word of this library"):
        Model({"given": Normal(1), "x | given": Normal(1)}, {"given | x": Normal()})
