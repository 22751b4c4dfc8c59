"""EM of one chain of states by matrix products against EM by the model's own log-factors."""

from __future__ import annotations

import pytest
import torch

from aevb import (
    Bernoulli,
    Model,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHot,
    Poisson,
    em,
    fit,
)
from aevb.data.sources import open_source
from aevb.training.distributed import World
from aevb.training.em import exact_em
from aevb.training.em.factors import Rows
from aevb.training.em.hidden_markov import HiddenMarkov
from aevb.training.em.markov_chain import MarkovChain

EMISSIONS = {
    "real columns": {"x[t] | y[t]": Normal(2)},
    "one scale for all states": {"x[t] | y[t]": Normal(2, scale="learned")},
    "a full covariance": {"x[t] | y[t]": MultivariateNormal(2)},
    "counts, a switch and a class": {
        "x[t] | y[t]": Poisson(2),
        "b[t] | y[t]": Bernoulli(1),
        "c[t] | y[t]": OneHot(3),
    },
    "over-dispersed counts": {
        "x[t] | y[t]": NegativeBinomial(2),
        "e[t]": NegativeBinomial(1, learned=True),
    },
    "a column without a parent": {
        "x[t] | y[t]": Normal(2),
        "e[t]": Normal(1, learned=True),
    },
}
CHAIN = {"y[0]": OneHot(3, learned=True), "y[t] | y[t-1]": OneHot(3)}


def chain(name: str) -> Model:
    torch.manual_seed(0)
    model = Model(CHAIN | EMISSIONS[name], {"y[t] | x[t]": OneHot()}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6)
    return model


@pytest.mark.parametrize("rows", ["complete", "ragged", "missing", "known at times", "one step"])
@pytest.mark.parametrize("name", EMISSIONS)
def test_an_update_is_that_of_the_general_method(name: str, rows: str) -> None:
    model, generator = chain(name), torch.Generator().manual_seed(1)
    every = model.sample(7, seed=1, steps=1 if rows == "one step" else 40)
    data = {key: value for key, value in every.items() if key in model.graph.observed}
    if rows == "missing":
        data["x"] = data["x"].masked_fill(
            torch.rand(data["x"].shape, generator=generator) < 0.3, torch.nan
        )
    if rows == "known at times":
        states = every["y"].argmax(-1)
        data["y"] = states.masked_fill(torch.rand(states.shape, generator=generator) < 0.6, -1)
    if rows == "ragged" or rows == "one step":
        lengths = [40, 3, 1, 25, 40, 17, 2] if rows == "ragged" else [1] * 7
        data["lengths"] = torch.tensor(lengths)
    assert type(exact_em(model)) is MarkovChain
    results = []
    for method in (MarkovChain(model), HiddenMarkov(model)):
        method.open(Rows(open_source(model.graph, data, model._parameter()), World()))
        if isinstance(method, HiddenMarkov) and rows == "missing" and "full" in name:
            continue
        results.append(method.update(method.read()))
    if len(results) == 1:
        (evidence, _), n = results[0], len(data["x"])
        assert float(evidence) * n == pytest.approx(float(model.log_evidence(**data).value.sum()))
        return
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_a_chain_that_needs_log_space_is_left_to_the_general_method(monkeypatch) -> None:
    """A transition with probability 0 underflows; the iteration goes on and still climbs."""
    model = chain("real columns")
    with torch.no_grad():
        model.factors["p(y[t]|y[t-1])"].net.blocks.weights["y[t-1]"].copy_(
            torch.tensor([[0.0, -400.0, -400.0], [-400.0, 0.0, -400.0], [0.0, 0.0, 0.0]])
        )
    x, called = model.sample(3, seed=0, steps=20)["x"], []
    update = HiddenMarkov.update
    monkeypatch.setattr(
        HiddenMarkov, "update", lambda self, vector: called.append(1) or update(self, vector)
    )
    before = float(model.log_evidence(x=x).value.mean())
    fit(model, {"x": x}, schedule=em(start="keep"), steps=3)
    assert called
    assert float(model.log_evidence(x=x).value.mean()) > before


def test_over_dispersed_counts_need_one_factor_for_all_steps() -> None:
    """The first step would have a dispersion of its own, and em() counts values of all steps."""
    p = CHAIN | {"x[0] | y[0]": NegativeBinomial(2), "x[t] | y[t]": NegativeBinomial(2)}
    with pytest.raises(ValueError, match=r"x has another factor at other steps.*use mle\(\)"):
        exact_em(Model(p, {"y[t] | x[t]": OneHot()}))
