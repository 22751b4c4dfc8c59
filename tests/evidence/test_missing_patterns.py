"""Rows with the same missing entries share covariances; the results are those of each row alone."""

from __future__ import annotations

import math

import pytest
import torch

from aevb import Bernoulli, Exact, Model, MultivariateNormal, OneHot
from aevb.declare import distributions as ad
from aevb.evidence import missing_patterns
from aevb.evidence.structure import Structure


@pytest.fixture
def mixture():
    generator = torch.Generator().manual_seed(0)
    model = Model(
        p={"c": OneHot(3, learned=True), "x | c": MultivariateNormal(4), "f | c": Bernoulli(2)},
        q={"c | x, f": Exact()},
    ).double()
    for value in model.parameters():
        value.data = 0.5 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
    rows = model.sample(60, seed=1)
    data = {"x": rows["x"], "f": rows["f"]}
    for value in data.values():
        value[torch.rand(value.shape, generator=generator) < 0.3] = math.nan
    return model, data


def test_grouped_rows_have_the_values_of_rows_alone(mixture):
    model, data = mixture
    alone = [{name: value[i : i + 1] for name, value in data.items()} for i in range(60)]
    torch.testing.assert_close(
        model.log_evidence(**data).value,
        torch.cat([model.log_evidence(**row).value for row in alone]),
        rtol=1e-12,
        atol=1e-12,
    )
    whole = model.posterior(method="exact", **data).marginals
    each = [model.posterior(method="exact", **row).marginals for row in alone]
    torch.testing.assert_close(
        whole.probs["c"], torch.cat([one.probs["c"] for one in each]), rtol=1e-12, atol=1e-12
    )
    for name in ("x", "f"):
        hidden = data[name].isnan()
        mean, deviation = whole.components[name].moments()
        for i, one in enumerate(each):
            if name in one.components:
                here, there = (value[:, 0] for value in one.components[name].moments())
                gone = hidden[i : i + 1]
                torch.testing.assert_close(mean[i : i + 1, 0][gone], here[gone])
                torch.testing.assert_close(deviation[i : i + 1, 0][gone], there[gone])


def test_the_parts_hold_every_row_once(mixture, monkeypatch):
    model, data = mixture
    batch = model.prepare(**data)
    with torch.no_grad():
        for few in (1, 3, 8, 100):
            monkeypatch.setattr(missing_patterns, "FEW", few)
            found = list(missing_patterns.parts(Structure(model), batch, 7, 2**24))
            numbers = torch.cat([index for index, _ in found])
            assert numbers.sort().values.tolist() == list(range(60))
            for index, part in found:
                assert len(index) <= 7
                assert torch.equal(part["x"], batch["x"][:, index])
                assert torch.equal(part["x?"].expand(1, len(index), 4), batch["x?"][:, index])
                assert torch.equal(part["f?"], batch["f?"][:, index])


def test_rows_with_own_covariances_come_a_few_at_a_time(mixture, monkeypatch):
    model, data = mixture
    monkeypatch.setattr(missing_patterns, "FEW", 100)
    with torch.no_grad():
        found = list(
            missing_patterns.parts(Structure(model), model.prepare(**data), 60, 5 * 3 * 4**2)
        )
    assert [len(index) for index, _ in found] == [5] * 12


def test_a_nearly_singular_covariance_keeps_its_conditional_variance():
    """x₂ = x₁ + 10⁻³ ε with x₁ of size 10⁴: a difference of covariances has no digits left."""
    root = torch.tensor([[1e4, 0.0], [1e4, 1e-3]], dtype=torch.float64)
    dist = ad.MultivariateNormal(torch.zeros(1, 2, dtype=torch.float64), root)
    value = torch.tensor([[2e4, 0.0]], dtype=torch.float64)
    found = MultivariateNormal(2).given_known(dist, value, torch.tensor([[True, False]]))
    assert found.mean[0].tolist() == pytest.approx([2e4, 2e4], rel=1e-12)
    assert found.variance[0].tolist() == pytest.approx([1.0, 1e-6], rel=1e-9)
