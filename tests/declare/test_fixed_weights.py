"""Constant weights: what they compute, that they stay, and what is refused."""

import json
import re

import numpy as np
import pytest
import torch

import aevb
from aevb import (
    Bernoulli,
    Exact,
    Model,
    Normal,
    OneHot,
    compare_estimators,
    em,
    fit,
    joint,
    linear,
    mle,
    mlp,
    switching,
)
from aevb.declare.registry import from_record, to_record

TURN = [[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]]


def turning():
    """Return a model with two fixed factors, one of them beside a learned parent."""
    torch.manual_seed(0)
    turn = linear(bias=False, fixed={"z[t-1]": TURN})
    return Model(
        p={
            "z[0]": Normal(2),
            "z[t] | z[t-1]": Normal(2, net=turn, scale="learned"),
            "x[t] | z[t], u[t]": Normal(1, net=linear(fixed={"z[t]": [[1, 0]]}), scale="isotropic"),
        },
        q={"z[t] | x[t]": Normal()},
        given={"u": 1},
    )


DATA = {
    "x": np.random.default_rng(0).normal(size=(5, 6, 1)),
    "u": np.random.default_rng(1).normal(size=(5, 6, 1)),
}


def test_constant_weights_are_as_declared_in_any_precision():
    """A cast starts from the declared numbers, so float64 keeps all of their digits."""
    model = turning()
    weights = model.factors["p(z[t]|z[t-1])"].net.blocks.weights
    assert weights["z[t-1]"].dtype == torch.float32
    expected = torch.tensor(TURN, dtype=torch.float64)
    assert torch.equal(weights["z[t-1]"], expected.float())
    model.double()
    assert torch.equal(weights["z[t-1]"], expected)
    assert torch.equal(
        model.half().double().factors["p(z[t]|z[t-1])"].net.blocks.weights["z[t-1]"], expected
    )


@pytest.mark.parametrize("schedule", [joint(), mle()], ids=str)
def test_training_leaves_constant_weights(schedule):
    model = turning()
    assert {name for name, _ in model.named_parameters() if name.startswith("factors.p")} == {
        "factors.p(z[t]|z[t-1]).vectors.scale",
        "factors.p(x[t]|z[t], u[t]).vectors.scale",
        "factors.p(x[t]|z[t], u[t]).net.blocks.bias",
        "factors.p(x[t]|z[t], u[t]).net.blocks.weights.u[t]",
    }
    before = {name: value.clone() for name, value in model.named_buffers()}
    learned = model.factors["p(x[t]|z[t], u[t])"].net.blocks.weights["u[t]"].clone()
    fit(model, DATA, schedule=schedule, steps=3, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert not torch.equal(model.factors["p(x[t]|z[t], u[t])"].net.blocks.weights["u[t]"], learned)


def test_constant_weights_are_saved_with_the_declaration(tmp_path):
    model = turning().double()
    model.save(tmp_path / "model")
    record = json.loads((tmp_path / "model" / "model.json").read_text())
    assert record["p"]["z[t] | z[t-1]"]["net"]["fixed"] == [["z[t-1]", TURN]]
    again = aevb.load(tmp_path / "model").double()
    assert torch.equal(again.log_evidence(**DATA).value, model.log_evidence(**DATA).value)
    assert not any(name.endswith("weights.z[t-1]") for name in model.state_dict())


def test_the_printed_model_shows_constant_weights_and_counts_learned_ones():
    lines = str(turning()).splitlines()
    assert lines[0].endswith("(5 parameters θ)")
    assert "net=linear(fixed={'z[t]': [[1, 0]]})" in lines[3]


def test_a_large_matrix_is_printed_by_its_size():
    assert repr(linear(fixed={"z": np.ones((6, 7))})) == "linear(fixed={'z': '6×7'})"


def test_arrays_and_tensors_are_numbers():
    spec = linear(fixed={"z": [[1, 2], [3, 4]]})
    assert linear(fixed={"z": np.array([[1, 2], [3, 4]])}) == spec
    assert linear(fixed={"z": torch.tensor([[1, 2], [3, 4]])}) == spec
    assert linear(fixed={"z[ t-1 ]": 1}) == linear(fixed={"z[t-1]": 1})
    assert from_record(json.loads(json.dumps(to_record(spec)))) == spec


def test_a_number_is_a_multiple_of_the_identity():
    spec = linear(bias=False, fixed={"z": -2})
    model = Model(
        p={"z": Normal(3), "x | z": Normal(3, net=spec, scale=1.0)}, q={"z | x": Normal()}
    )
    assert torch.equal(model.factors["p(x|z)"].net.blocks.weights["z"], -2 * torch.eye(3))


REFUSED = {
    "no mapping": (lambda: linear(fixed=3), "fixed is a dictionary from a parent to its weight"),
    "a word": (
        lambda: linear(fixed={"z": "eye"}),
        "fixed: the weight of z is a number or a matrix with a row per entry",
    ),
    "a vector": (lambda: linear(fixed={"z": [1, 2]}), "the weight of z is a number or a matrix"),
    "ragged rows": (
        lambda: linear(fixed={"z": [[1, 2], [3]]}),
        "the rows of the weight of z differ in length (2, 1). Give every row the same length.",
    ),
    "not finite": (
        lambda: linear(fixed={"z": [[1.0, float("nan")]]}),
        "the weight of z contains nan, which is not a finite number.",
    ),
    "hidden layers": (
        lambda: mlp(8, fixed={"z": 1}),
        "mlp with hidden layers learns all of its weights; only linear() takes fixed=.",
    ),
    "unknown parent": (
        lambda: model_of(linear(fixed={"y": 1})),
        "p has \"x | z\": Normal(3, net=linear(fixed={'y': 1})): fixed names 'y', but the "
        "parents here are z.",
    ),
    "another size": (
        lambda: model_of(linear(fixed={"z": 1})),
        "fixed={'z': 1} stands for 1 times the identity, but z has size 2 and the variable 3. "
        "Give a matrix with 3 rows and 2 columns.",
    ),
    "another shape": (
        lambda: model_of(linear(fixed={"z": [[1, 2], [3, 4]]})),
        "fixed gives z a 2×2 matrix; this variable needs 3 rows (or 6, for all of its parameters) "
        "and 2 columns.",
    ),
    "named twice": (
        lambda: model_of(linear(fixed=[["z", [[1, 2]] * 3], ["z ", [[1, 2]] * 3]])),
        "fixed names 'z' twice. Name it once.",
    ),
    "switching without a parent to choose": (
        lambda: switching(""),
        "switching takes the parent that chooses the weights",
    ),
    "switching by a stranger": (
        lambda: model_of(switching("y")),
        "switching('y') names a parent that this variable does not have. Its parents are z.",
    ),
    "switching alone": (
        lambda: model_of(switching("z")),
        "switching('z') needs another parent, whose weights z chooses. Without one, use linear()",
    ),
}


def model_of(net):
    return Model(p={"z": Normal(2), "x | z": Normal(3, net=net)}, q={"z | x": Normal()})


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_declaration_is_refused_with_its_fix(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_closed_form_em_refuses_constant_weights_and_isotropic_scales():
    x = np.random.default_rng(0).normal(size=(20, 3))
    fixed = linear(fixed={"z": [[1, 0], [0, 1], [1, 1]]})
    for spec, message in (
        (Normal(3, net=fixed, scale="learned"), "p(x|z) has fixed weights. Use mle() or joint()."),
        (Normal(3, scale="isotropic"), "p(x|z) has one scale for all columns"),
    ):
        model = Model(p={"z": Normal(2), "x | z": spec}, q={"z | x": Normal()})
        with pytest.raises(ValueError, match=re.escape(message)):
            fit(model, {"x": x}, schedule=em())
        fit(model, {"x": x}, schedule=mle(), steps=5, progress=False)


# A model without latents --------------------------------------------------------------------------


def test_a_single_variable_without_latents_is_a_model():
    """The bound is log p itself, whatever the number of samples."""
    torch.manual_seed(0)
    model = Model(p={"x | u": Bernoulli(3)}, q={}, given={"u": 2}).double()
    u, x = np.random.default_rng(0).normal(size=(4, 2)), np.eye(4)[:, :3]
    bound = model.elbo(x=x, u=u).value
    assert torch.equal(bound, model.log_prob(x=x, u=u))
    assert torch.equal(bound, model.elbo(x=x, u=u, samples=3, bound="iwae").value)
    torch.testing.assert_close(bound, model.log_evidence(x=x, u=u).value)
    assert str(model).splitlines()[-1] == "observed x"
    with pytest.raises(ValueError, match=r"em\(\) computes the posterior of latents"):
        fit(model, {"x": x, "u": u}, schedule=em())
    with pytest.raises(ValueError, match="no latents, so there is no q and no gap"):
        model.gap(x=x, u=u)
    with pytest.raises(ValueError, match="no latents, so its bound is log p"):
        compare_estimators(model, {"x": x, "u": u})
    assert model._repr_html_().count('class="graph"') == 1


# A mixture of regressions -------------------------------------------------------------------------


def test_a_mixture_of_regressions_has_its_exact_evidence_and_posterior():
    """log Σ_y p(y) N(x; w_y·u + b_y, σ_y), and the weights of its terms."""
    torch.manual_seed(0)
    model = Model(
        p={"y": OneHot(3), "x | y, u": Normal(1, net=switching("y"))},
        q={"y | x, u": Exact()},
        given={"u": 2},
    ).double()
    u, x = (torch.randn(5, size, dtype=torch.float64) for size in (2, 1))
    blocks = model.factors["p(x|y, u)"].net.blocks
    raw = (u @ blocks.weights["u"].T + blocks.bias).reshape(5, 3, 2)
    terms = (
        torch.distributions.Normal(raw[..., 0], torch.nn.functional.softplus(raw[..., 1]))
        .log_prob(x)
        .detach()
    )
    expected = terms.logsumexp(1) - np.log(3)
    torch.testing.assert_close(model.log_evidence(x=x, u=u).value, expected)
    torch.testing.assert_close(model.elbo(x=x, u=u).value.detach(), expected)
    torch.testing.assert_close(model.posterior(x=x, u=u)["y"].probs, terms.softmax(1))
