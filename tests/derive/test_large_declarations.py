"""Declarations with many parents, classes or layers: what they cost grows as they do."""

import math
import time

import pytest
import torch

from aevb import Bernoulli, Deterministic, Model, Normal, OneHot
from aevb.declare.graph import Graph
from aevb.declare.notation import parse_key
from aevb.derive.plan import derive


def hierarchy(depth, *, bottom_up):
    p = (
        {f"z{depth - 1}": Normal(1)}
        | {f"z{i} | z{i + 1}": Normal(1) for i in range(depth - 2, -1, -1)}
        | {"x | z0": Normal(1)}
    )
    up = {"z0 | x": Normal()} | {f"z{i} | z{i - 1}": Normal() for i in range(1, depth)}
    down = {f"z{depth - 1} | x": Normal()} | {
        f"z{i} | z{i + 1}, x": Normal() for i in range(depth - 1)
    }
    return p, up if bottom_up else down


def seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


@pytest.mark.parametrize("bottom_up", [True, False])
def test_a_hierarchy_of_two_thousand_layers_is_derived(bottom_up):
    plan = derive(Graph(*hierarchy(2000, bottom_up=bottom_up), {}))
    closed = [name for name, choice in plan.choices.items() if choice.term == "closed"]
    assert closed == (["z1999"] if bottom_up else [f"z{i}" for i in range(1999, -1, -1)])


def test_a_chain_of_functions_may_be_thousands_long():
    p = (
        {"z": Normal(1), "h0 | z": Deterministic(1)}
        | {f"h{i} | h{i - 1}": Deterministic(1) for i in range(1, 2000)}
        | {"x | h1999": Normal(1)}
    )
    graph = Graph(p, {"z | x": Normal()}, {})
    assert [stage.nodes[0] for stage in graph.inference] == ["z", *(f"h{i}" for i in range(2000))]


def test_the_time_of_a_derivation_grows_with_the_depth():
    """16 times the layers take some 16 times as long; a bound of 80 leaves room for a busy machine
    (the square would be 256).
    """
    small, large = (hierarchy(depth, bottom_up=True) for depth in (100, 1600))
    derive(Graph(*small, {}))
    quick = min(seconds(lambda: derive(Graph(*small, {}))) for _ in range(5))
    assert min(seconds(lambda: derive(Graph(*large, {}))) for _ in range(2)) < 80 * quick


def test_twenty_thousand_parents_are_read():
    text = "x | " + ", ".join(f"a{i}" for i in range(20_000))
    assert seconds(lambda: parse_key(text)) < 5  # the square took minutes
    with pytest.raises(ValueError, match="names the parent a7 twice"):
        parse_key(text + ", a9, a7")


def test_many_classes_are_not_listed_unless_they_are_enumerated():
    classes = 20_000
    model = Model({"y": OneHot(classes, learned=True), "x | y": Normal(1)}, {"y | x": OneHot()})
    observed = Model({"z": Normal(1), "x | z": OneHot(classes)}, {"z | x": Normal()})
    for built in (model, observed):
        assert (
            sum(tensor.numel() for tensor in (*built.parameters(), *built.buffers())) < 6 * classes
        )
    # drawn: too many to enumerate
    assert model.elbo(x=torch.zeros(2, 1), seed=0).value.isfinite().all()
    assert not any("values" in name for name, _ in model.named_buffers())


@pytest.mark.parametrize(
    ("family", "count"), [(OneHot(300, learned=True), 300), (Bernoulli(9, learned=True), 512)]
)
def test_classes_listed_on_demand_follow_the_models_precision(family, count):
    torch.manual_seed(0)
    model = Model({"y": family, "x | y": Normal(2, scale=1.0)}, {"y | x": type(family)()})
    x = torch.randn(3, 2)
    table = model.factors["p(y)"].table()
    assert table.shape == (count, model.graph.size("y"))
    assert len(table.unique(dim=0)) == count
    for precision in (torch.float32, torch.float64):
        model.to(precision)
        assert model.factors["p(y)"].table().dtype == precision
        # the prior is uniform
        means = model.factors["p(x|y)"]({"y": model.factors["p(y)"].table()})
        by_hand = torch.distributions.Normal(means, 1.0).log_prob(x.to(precision).unsqueeze(1)).sum(
            -1
        ).logsumexp(-1) - math.log(count)
        torch.testing.assert_close(model.elbo(x=x, how={"y": "sum"}, bound="iwae").value, by_hand)
