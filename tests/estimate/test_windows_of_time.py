"""The bounds of the windows of a sequence sum to the bound of the whole, with the same noise."""

import pytest
import torch

from aevb import GRU, LSTM, Deterministic, Laplace, Model, Normal, OneHot, linear, mlp
from aevb.estimate.batch import prepare, split_latents
from aevb.estimate.before import Before, shapes_before, why_no_windows, why_no_windows_by_plan
from aevb.estimate.estimators import Estimate

W, T, N = 4, 12, 6
STATE = "h[t] | h[t-1], x[t-1], z[t-1]"
MODELS = {
    "vrnn": lambda: Model(
        p={
            STATE: LSTM(7, layers=2),
            "z[t] | h[t]": Normal(2, net=mlp(6)),
            "x[t] | h[t], z[t]": Normal(5, net=mlp(6)),
        },
        q={"z[t] | h[t], x[t]": Normal(net=mlp(6))},
    ),
    "a declared first state": lambda: Model(
        p={
            "h[t] | h[t-1], z[t-1]": GRU(4),
            "h[0] | u": Deterministic(4, net=linear()),
            "z[t] | h[t]": Normal(2),
            "x[t] | h[t], z[t]": Normal(5),
        },
        q={"z[t] | h[t], x[t]": Normal()},
        given={"u": 2},
    ),
    "linear, with first steps": lambda: Model(
        p={
            "z[t] | z[t-1]": Normal(2),
            "z[0]": Normal(2, learned=True),
            "x[t] | z[t]": Normal(5),
        },
        q={"z[t] | z[t-1], x[t]": Normal(), "z[0] | x[0]": Normal()},
    ),
    "functions": lambda: Model(
        p={
            "f[t] | x[t-1]": Deterministic(3),
            "g[t] | g[t-1], f[t]": Deterministic(3, net=mlp(4), activation="tanh"),
            "e[t] | g[t-1]": Deterministic(3),
            "z[t] | g[t], z[t-1]": Normal(2),
            "x[t] | z[t], z[t-1], f[t], e[t]": Normal(5),
            "x[0] | z[0]": Laplace(5),
        },
        q={"z[t] | g[t], x[t], x[t-1]": Normal()},
    ),
    "an enumerated class per step": lambda: Model(
        p={
            "h[t] | h[t-1], x[t-1]": LSTM(4),
            "y[t] | h[t]": OneHot(3),
            "z[t] | y[t]": Normal(2),
            "x[t] | z[t], h[t]": Normal(5),
        },
        q={"y[t] | h[t], x[t]": OneHot(), "z[t] | y[t], x[t]": Normal()},
    ),
    "q reads the past, and what is missing in it": lambda: Model(
        p={"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(5)},
        q={"h[t] | h[t-1], x[t-1]": GRU(3), "z[t] | z[t-1], h[t], x[t-1], x[t]": Normal()},
        missing="mask",
    ),
    "given": lambda: Model(
        p={
            "h[t] | h[t-1], u[t], x[t-1]": GRU(4),
            "z[t] | h[t], s": Normal(2),
            "x[t] | z[t], u[t-1]": Normal(5),
        },
        q={"z[t] | h[t], x[t]": Normal()},
        given={"u": (2,), "s": 3},
    ),
}


def data_of(model: Model, kind: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    data = {"x": torch.randn(N, T, 5, generator=random)}
    for name, (size,) in model.graph.given.items():
        timed = [T] if model.graph.timed[name] else []
        data[name] = torch.randn(N, *timed, size, generator=random)
    if kind == "ragged":
        data["lengths"] = torch.tensor([12, 1, 4, 5, 9, 8])
    if kind == "missing":
        data["x"][0, 3] = data["x"][2, 4:6, 1] = data["x"][1, 7] = torch.nan
    return data


def cut(values: dict[str, torch.Tensor], axis: int, w: int) -> dict[str, torch.Tensor]:
    return {
        name: value.narrow(axis, w * W, W)
        if value.dim() >= -axis and value.shape[axis] == T
        else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", ["full", "ragged", "missing"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bounds_of_windows_sum_to_the_bound_of_the_whole(name, kind, samples):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for label, parameter in model.named_parameters():
        if ".missing." in label:
            torch.nn.init.normal_(parameter)  # they start at zero
    if kind == "missing" and any(
        ref.name == "x" for e in model.graph.entries() if e.side == "p" for ref in e.key.parents
    ):
        pytest.skip("p reads x, whose values must then be known")
    data = data_of(model, kind)
    lengths = data.pop("lengths", None)
    batch = prepare(model.graph, data, like=model._parameter(), lengths=lengths)
    clamped, partial = split_latents(model.graph, batch)
    plan = model.plan(samples=samples, clamped=clamped, partial=partial)
    assert why_no_windows(model.graph) is None
    assert why_no_windows_by_plan(plan) is None
    noise = model.draw_noise(plan, batch, seed=0)
    whole = Estimate(plan, model.factors, batch, noise).bound()
    # What stands there before the first window must not matter.
    values = {
        name: torch.full(shape, 7.0, dtype=torch.float64)
        for name, shape in shapes_before(plan, batch, model.factors).items()
    }
    total, terms = torch.zeros(N, dtype=torch.float64), dict.fromkeys(whole.terms, 0.0)
    for w in range(T // W):
        before = Before.of(torch.full((1, 1, 1), w == 0), values)
        window = Estimate(plan, model.factors, cut(batch, 0, w), cut(noise, -3, w), before=before)
        bound = window.bound()
        values, total = window.after(), total + bound.value
        terms = {name: terms[name] + bound.terms[name] for name in terms}
        assert not any(value.requires_grad for value in values.values())
    torch.testing.assert_close(total, whole.value, rtol=1e-13, atol=1e-11)
    for name, term in whole.terms.items():
        torch.testing.assert_close(terms[name], term, rtol=1e-13, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 3, 5, 100])
@pytest.mark.parametrize(
    ("name", "bound"),
    [*((name, "elbo") for name in MODELS), ("vrnn", "iwae"), ("smoothing", "elbo")],
)
def test_chunks_of_time_give_the_same_bound_and_gradients(name, bound, chunk):
    torch.manual_seed(0)
    build = {
        "smoothing": lambda: Model(
            p={
                STATE: LSTM(4),
                "z[t] | h[t]": Normal(2, net=mlp(6)),
                "x[t] | h[t], z[t]": Normal(5, net=mlp(6, dropout=0.2)),
            },
            q={"b[t] | b[t+1], x[t]": GRU(4), "z[t] | h[t], b[t]": Normal(net=mlp(6))},
        )
    } | MODELS
    model = build[name]().double()
    data = data_of(model, "ragged")
    lengths = data.pop("lengths")
    batch = prepare(model.graph, data, like=model._parameter(), lengths=lengths)
    settings = {"samples": 3, "bound": "iwae", "gradient": "dreg"} if bound == "iwae" else {}
    plan = model.plan(**settings)
    noise = model.draw_noise(plan, batch, seed=0)
    found = []
    for size in (None, chunk):
        value = Estimate(plan, model.factors, batch, noise, chunk=size).bound().value
        parameters = list(model.parameters())
        found.append((value, torch.autograd.grad(value.sum(), parameters, allow_unused=True)))
    (value, gradients), (again, others) = found
    assert torch.equal(value, again)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient, rtol=1e-11, atol=1e-11)


REFUSED = {
    "reads b": Model(
        p={"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(5)},
        q={"b[t] | b[t+1], x[t]": GRU(3), "z[t] | z[t-1], b[t]": Normal()},
    ),
    "a rule for the last step": Model(
        p={"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(5), "x[T] | z[T]": Normal(5)},
        q={"z[t] | z[t-1], x[t]": Normal()},
    ),
    "c has no [t]": Model(
        p={"c": Normal(2), "z[t] | z[t-1], c": Normal(2), "x[t] | z[t]": Normal(5)},
        q={"c | x[0]": Normal(), "z[t] | z[t-1], x[t]": Normal()},
    ),
    "reads an end": Model(
        p={
            "f | u[0]": Deterministic(2),
            "z[t] | z[t-1], f": Normal(2),
            "x[t] | z[t]": Normal(5),
        },
        q={"z[t] | z[t-1], x[t]": Normal()},
        given={"u": 2},
    ),
    "no sequences": Model(p={"z": Normal(2), "x | z": Normal(5)}, q={"z | x": Normal()}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_need_the_whole_sequence_are_refused(reason):
    assert reason in why_no_windows(REFUSED[reason].graph)


def test_bounds_that_are_no_sum_over_windows_are_refused():
    chain = Model(
        p={"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(5)},
        q={"y[t] | y[t-1], x[t]": OneHot()},
    )
    assert "summed over together with its neighbour" in why_no_windows_by_plan(chain.plan())
    assert why_no_windows_by_plan(chain.plan(how={"y": "gumbel"})) is None
    plan = MODELS["vrnn"]().plan(bound="iwae", samples=2)
    assert "logarithm of a mean" in why_no_windows_by_plan(plan)
