"""An evaluation that is asked again, as weights change, says what a new one says; on a GPU by a
graph. The bound with its error.
"""

import numpy as np
import pytest
import torch
from compiled_runs import data, vae
from small_runs import bits, small_vae

from aevb import Exact, Model, Normal, OneHot
from aevb.data.sources import open_source
from aevb.training.evaluation import Evaluation, evaluate, evaluate_precisely
from aevb.zoo import fa


def test_an_evaluation_that_is_asked_again_says_what_a_new_one_says():
    model, factors = small_vae(), fa()
    for one, x in (
        (model, bits(2300)),
        (factors, np.random.default_rng(0).standard_normal((30, 3))),
    ):
        source = open_source(one.graph, {"x": x}, one._parameter())
        again = Evaluation(one, source, samples=3, bound="iwae", seed=5)
        for _ in range(3):
            assert again() == evaluate(one, source, samples=3, bound="iwae", seed=5)
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(1.1)


class Graph:
    """A graph that computes again what was captured."""

    def __init__(self, evaluation, held):
        self.evaluation, self.held = evaluation, held

    def replay(self):
        self.evaluation.found = self.evaluation._totals(self.held)


def test_an_evaluation_is_captured_when_it_is_asked_again_and_anew_where_weights_have_moved(
    monkeypatch,
):
    made = []
    monkeypatch.setattr(
        Evaluation, "_captured", lambda self, held: made.append(held) or Graph(self, held)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    model, other = vae(), vae()
    source = open_source(model.graph, {"x": data(2500)}, model._parameter())
    both = [Evaluation(model, source, seed=5), Evaluation(other, source, seed=6)]
    for evaluation in both:
        evaluation.captures = True

    def check():
        for evaluation in both:
            assert evaluation() == evaluate(evaluation.model, source, seed=evaluation.seed)

    check()
    assert made == []
    check()
    assert len(made) == 2
    for mine, theirs in zip(*made, strict=True):
        assert mine[0] is theirs[0]  # the same rows, once
        assert mine[2].keys() == theirs[2].keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    check()
    assert len(made) == 2
    for parameter in model.parameters():
        parameter.data = 1.1 * parameter.data
    check()
    assert len(made) == 3
    called = []
    next(iter(model.factors.values())).register_forward_hook(lambda *_: called.append(1))
    both[0]()
    assert called


def test_an_evaluation_whose_rows_are_many_is_not_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
    model = vae()
    source = open_source(model.graph, {"x": data(2500)}, model._parameter())
    evaluation = Evaluation(model, source)
    evaluation.captures = True
    assert [evaluation(), evaluation(), evaluation()] == [evaluate(model, source)] * 3
    assert not evaluation.captures
    assert evaluation.held is None


def test_the_bound_is_taken_until_its_error_is_small():
    model = Model({"y": OneHot(2, learned=True), "x | y": Normal(1)}, {"y | x": Exact()})
    x = np.random.default_rng(0).normal(size=(30, 1))
    found = evaluate_precisely(model, open_source(model.graph, {"x": x}, model._parameter()))
    assert found["elbo"] == (pytest.approx(found["evidence"][0], abs=1e-5), 0.0)  # nothing is drawn
    model = Model({"z": Normal(1), "x | z": Normal(1, scale=1.0)}, {"z | x": Normal()})
    source = open_source(model.graph, {"x": x}, model._parameter())
    loose, tight = (evaluate_precisely(model, source, error=error)["elbo"] for error in (1.0, 0.03))
    assert tight[1] <= 0.03
    assert abs(loose[0] - tight[0]) < 5 * (loose[1] + tight[1])
