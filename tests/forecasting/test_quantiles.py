"""Tests of quantiles of counts: attained values, and intervals that hold their share."""

import numpy as np
import pytest
import torch

from aevb import Bernoulli, Model, NegativeBinomial, Normal, OneHot, Poisson
from aevb.evidence.quantiles import drawn_quantiles

FAMILIES = {"Poisson": Poisson, "NegativeBinomial": NegativeBinomial, "Bernoulli": Bernoulli}


def test_discrete_quantiles_are_the_smallest_values_that_hold_their_share():
    draws = torch.tensor([0.0, 0.0, 1.0, 5.0])
    found = drawn_quantiles(draws, [0.25, 0.5, 0.51, 0.75, 0.76], discrete=True)
    assert found.tolist() == [0.0, 0.0, 1.0, 1.0, 5.0]
    assert drawn_quantiles(draws, [0.9]).item() == pytest.approx(3.8)  # interpolated


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["exact", "particles"])
def test_intervals_of_counts_end_at_counts_and_hold_at_least_their_share(family, method):
    torch.manual_seed(0)
    p = {
        "y[0]": OneHot(2, learned=True),
        "y[t] | y[t-1]": OneHot(2),
        "x[t] | y[t]": FAMILIES[family](1),
    }
    model = Model(p, {"y[t] | x[t]": OneHot()})
    x = model.sample(3, steps=20, seed=0)["x"]
    found = model.forecast(steps=4, x=x, samples=333, method=method, seed=1)
    for level in (0.5, 0.8, 0.95):
        low, high = found.interval(level)["x"]
        assert torch.equal(low, low.round())
        assert torch.equal(high, high.round())
        inside = (found.draws["x"] >= low) & (found.draws["x"] <= high)
        assert bool((inside.double().mean(0) >= level).all())
    columns = found.frame(levels=[0.8])[["x_lower_80", "x_upper_80"]].to_numpy()
    assert np.array_equal(columns, columns.round())


def test_quantiles_of_numbers_are_still_interpolated():
    model = Model({"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()})
    found = model.forecast(steps=1, x=torch.zeros(1, 5, 1), samples=2, method="particles", seed=0)
    one, other = found.draws["x"][:, 0, 0, 0]
    middle = found.quantile(0.5)["x"].item()
    assert middle == pytest.approx(float(one + other) / 2, abs=1e-6)
