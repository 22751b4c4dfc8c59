"""Networks of several parents: equal, to rounding, to the plain torch network on the concatenated
parents.

One registry of named constructors (`NETWORKS`) drives the contract tests: a new network costs one
entry there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import aevb
from aevb import (
    GRU,
    LSTM,
    Bernoulli,
    Deterministic,
    Model,
    MultivariateNormal,
    Network,
    Normal,
    OneHot,
    attention,
    conv,
    deconv,
    linear,
    mlp,
    residual,
    switching,
    table,
)
from aevb.declare import deep_networks, networks
from aevb.declare import switching as switching_module
from aevb.declare.deterministic import Recurrence
from aevb.declare.networks import ACTIVATIONS
from aevb.declare.registry import from_record, to_record

PARENTS = {"a": (3,), "b": (2, 2), "c": (5,)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(
    spec: Network,
    parents: dict[str, tuple[int, ...]],
    heads: list[int],
    shape: tuple[int, ...] = (),
    masked: tuple[str, ...] = (),
) -> Any:
    torch.manual_seed(0)
    return spec.build(parents, heads, shape, masked).double()


def inputs(parents: dict[str, tuple[int, ...]], *lead: int) -> dict[str, Tensor]:
    return {
        name: normal(*lead, math.prod(shape), seed=i)
        for i, (name, shape) in enumerate(parents.items())
    }


def run(net: Any, values: dict[str, Tensor], keep: tuple[Tensor, ...] = ()) -> Tensor:
    return net.rest(net.first(values), keep)


def first_weight(blocks: Any, *names: str) -> Tensor:
    """The weight of the one Linear on the parents concatenated in this order."""
    assert set(names) == set(blocks.weights)
    return torch.cat([blocks.weights[name] for name in names], -1)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


# The registry of networks -------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A specification, and what it is built for: the shapes of its parents, the widths of its
    heads, the shape of its own variable.
    """

    spec: Network
    parents: dict[str, tuple[int, ...]]
    heads: list[int]
    shape: tuple[int, ...] = ()
    rows: int = 0  # its parent is the number of a row, less than this

    def inputs(self, *lead: int) -> dict[str, Tensor]:
        return (
            {
                name: torch.arange(float(math.prod(lead))).reshape(*lead, 1) % self.rows
                for name in self.parents
            }
            if self.rows
            else inputs(self.parents, *lead)
        )

    def build(self, masked: tuple[str, ...] = ()) -> Any:
        return build(self.spec, self.parents, self.heads, self.shape, masked)


BOTH: Any = {"parents": {"x": (2, 4, 4), "y": (3,)}, "heads": [2, 5]}  # an image and a class
NETWORKS: dict[str, Entry] = {
    "linear": Entry(linear(), **BOTH),
    "linear, no bias": Entry(linear(bias=False, init="normal"), **BOTH),
    "mlp": Entry(mlp(5), **BOTH),
    "mlp, all settings": Entry(
        mlp(5, 6, activation="tanh", dropout=0.1, init="glorot_normal"), **BOTH
    ),
    "mlp, sizes by name": Entry(mlp(hidden=(5, 6)), **BOTH),
    "mlp of logarithms": Entry(mlp(5, log=True), **BOTH),
    "conv": Entry(conv(3, 4), **BOTH),
    "conv, all settings": Entry(
        conv(3, hidden=7, activation="elu", init="glorot_uniform", dropout=0.2), **BOTH
    ),
    "deconv": Entry(
        deconv(3, 4, hidden=7, dropout=0.2), {"z": (4,), "y": (3,)}, [32, 32], (2, 4, 4)
    ),
    "linear, a fixed parent": Entry(linear(fixed={"y": [[1, 0, 2], [0, 1, -0.5]]}), **BOTH),
    "residual": Entry(residual(width=6, blocks=3), **BOTH),
    "residual, all settings": Entry(
        residual(6, blocks=1, activation="gelu", init="glorot_normal"), **BOTH
    ),
    "attention": Entry(attention(8, heads=2, layers=2), **BOTH),
    "attention over a set": Entry(
        attention(8, heads=4, positions=False), {"x": (4, 3), "y": (3,)}, [2, 5]
    ),
    "switching": Entry(switching("y"), **BOTH),
    "switching, no bias": Entry(switching("y", bias=False, init="normal"), **BOTH),
    "table": Entry(table(8), {"i": (1,)}, [2, 5], rows=8),
}
every_network = pytest.mark.parametrize("name", NETWORKS)
networks_of_two = pytest.mark.parametrize(
    "name", [name for name, entry in NETWORKS.items() if len(entry.parents) > 1]
)


def test_every_network_of_the_library_is_in_the_registry() -> None:
    known = {
        cls
        for module in (networks, deep_networks, switching_module)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Network) and "build" in vars(cls)
    }
    assert known - {Network} == {type(entry.spec) for entry in NETWORKS.values()}


@every_network
def test_a_network_is_a_value(name: str) -> None:
    spec = NETWORKS[name].spec
    assert eval(repr(spec), vars(aevb)) == spec
    assert from_record(json.loads(json.dumps(to_record(spec)))) == spec
    assert hash(spec) == hash(from_record(to_record(spec)))


@every_network
def test_a_gradient_reaches_every_parameter(name: str) -> None:
    entry = NETWORKS[name]
    net = entry.build()
    got = run(net, entry.inputs(3, 1, 16))
    assert got.shape == (3, 1, 16, sum(entry.heads))
    (got - 1).square().sum().backward()
    assert list(net.parameters())
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


@networks_of_two
def test_the_parts_of_the_parents_add_up(name: str) -> None:
    """What a recurrence relies on: some parents' part for all steps at once, the others' inside the
    loop.
    """
    entry = NETWORKS[name]
    net, values = entry.build(), inputs(entry.parents, 7)
    first, *others = entry.parents
    close(
        net.first({first: values[first]})
        + net.first({key: values[key] for key in others}, bias=False),
        net.first(values),
    )


@networks_of_two
def test_a_parent_being_enumerated_broadcasts(name: str) -> None:
    """Classes on [C, 1, 1, 1, C], the other parent on [1, N, d]: the result is [C, 1, 1, N, out],
    as by repeating and looping.
    """
    entry, C, N = NETWORKS[name], 3, 4
    net, (other, shape) = entry.build(), next(iter(entry.parents.items()))
    x, y = normal(1, N, math.prod(shape)), torch.eye(C, dtype=torch.float64).reshape(C, 1, 1, 1, C)
    got = run(net, {other: x, "y": y})
    assert got.shape == (C, 1, 1, N, sum(entry.heads))
    for c in range(C):
        close(got[c, 0, 0], run(net, {other: x[0], "y": y[c, 0, 0, 0].expand(N, C)}))


@every_network
def test_dropout_masks_are_taken_as_asked_for(name: str) -> None:
    """Masks of ones divide the kept units by 1 − p; of zeros they leave what no input changes."""
    entry = NETWORKS[name]
    asked = entry.spec.dropouts()
    if not asked:
        return
    net, values = entry.build(), inputs(entry.parents, 6)
    ones, zeros = (
        tuple(fill(6, width, dtype=torch.float64) for _, width in asked)
        for fill in (torch.ones, torch.zeros)
    )
    assert not torch.equal(run(net, values, ones), run(net, values))
    dropped = run(net, values, zeros)
    close(dropped, dropped[:1].expand_as(dropped))


@networks_of_two
def test_a_mask_of_missing_entries_starts_without_effect_and_then_acts(name: str) -> None:
    entry = NETWORKS[name]
    net, values = entry.build(tuple(entry.parents)), inputs(entry.parents, 5)
    masks = [
        {key: (normal(5, math.prod(shape), seed=8) > 0).double()}
        for key, shape in entry.parents.items()
    ]
    for mask in masks:
        close(net.rest(net.first(values, missing=mask)), run(net, values))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    for mask in masks:
        assert not torch.allclose(net.rest(net.first(values, missing=mask)), run(net, values))


# One block a parent -------------------------------------------------------------------------------


def test_blocks_are_one_linear_layer_on_the_concatenated_parents() -> None:
    net, values = build(linear(), PARENTS, [4, 6]), inputs(PARENTS, 7)
    layer = nn.Linear(12, 10).double()
    with torch.no_grad():
        layer.weight.copy_(first_weight(net.blocks, *PARENTS))
        layer.bias.copy_(net.blocks.bias)
    close(run(net, values), layer(torch.cat(list(values.values()), -1)))
    assert {name: tuple(weight.shape) for name, weight in net.blocks.weights.items()} == {
        "a": (10, 3),
        "b": (10, 4),
        "c": (10, 5),
    }


def test_blocks_add_up_over_the_parents() -> None:
    net, values = build(mlp(8), PARENTS, [4]), inputs(PARENTS, 7)
    parts = [net.first({name: value}, bias=name == "a") for name, value in values.items()]
    close(sum(parts), net.first(values))
    with pytest.raises(ValueError, match="at least one parent"):
        net.first({})


def test_linear_without_bias_maps_zero_to_zero() -> None:
    net = build(linear(bias=False), {"a": (3,)}, [4])
    assert [name for name, _ in net.named_parameters()] == ["blocks.weights.a"]
    close(run(net, {"a": normal(5, 3)}), normal(5, 3) @ net.blocks.weights["a"].T)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_is_the_sequential_network(activation: str) -> None:
    names = {
        "relu": nn.ReLU(),
        "tanh": nn.Tanh(),
        "sigmoid": nn.Sigmoid(),
        "elu": nn.ELU(),
        "gelu": nn.GELU(),
        "silu": nn.SiLU(),
        "softplus": nn.Softplus(),
        "leaky_relu": nn.LeakyReLU(),
        "identity": nn.Identity(),
    }
    net, values = build(mlp(8, 9, 6, activation=activation), PARENTS, [4, 2]), inputs(PARENTS, 7)
    unit = names[activation]
    plain = nn.Sequential(
        nn.Linear(12, 8), unit, nn.Linear(8, 9), unit, nn.Linear(9, 6), unit, nn.Linear(6, 6)
    ).double()
    layers = [layer for layer in plain if isinstance(layer, nn.Linear)]
    sources = [
        (first_weight(net.blocks, *PARENTS), net.blocks.bias),
        *((layer.weight, layer.bias) for layer in (*net.hidden, net.heads)),
    ]
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, sources, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    close(run(net, values), plain(torch.cat(list(values.values()), -1)))
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in plain.parameters())


def test_a_variable_read_at_two_steps_has_two_blocks() -> None:
    """x[t] | z[t], z[t-1], with zeros before the start."""
    model = Model(
        p={"z[t]": Normal(2), "x[t] | z[t], z[t-1]": Normal(3, scale=1.0)},
        q={"z[t] | x[t]": Normal()},
    ).double()
    z, x = normal(5, 4, 2), normal(5, 4, 3, seed=1)
    blocks = model.factors["p(x[t]|z[t], z[t-1])"].net.blocks
    before = torch.cat([torch.zeros(5, 1, 2, dtype=torch.float64), z[:, :-1]], 1)
    mean = z @ blocks.weights["z[t]"].T + before @ blocks.weights["z[t-1]"].T + blocks.bias
    expected = stats.norm.logpdf(x.numpy(), mean.detach().numpy()).sum((1, 2)) + stats.norm.logpdf(
        z.numpy()
    ).sum((1, 2))
    np.testing.assert_allclose(model.log_prob(x=x, z=z).detach().numpy(), expected, rtol=1e-8)


def test_one_specification_used_twice_shares_no_weights() -> None:
    spec = mlp(4)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=spec), "u | z": Normal(3, net=spec)},
        q={"z | x, u": Normal(net=spec)},
    )
    weights = [model.factors[key].net.heads.weight for key in ("p(x|z)", "p(u|z)")]
    assert not torch.equal(*weights)
    assert len({id(parameter) for parameter in model.parameters()}) == 3 * 2 + 2 * 2 + 3


# Initialisation -----------------------------------------------------------------------------------


def has_variance(weight: Tensor, variance: float, *, uniform: bool = False) -> None:
    """The mean square within 4 standard errors: Var w² is 2σ⁴ for a Gaussian, 4σ⁴/5 for a uniform.
    A uniform also keeps its bounds.
    """
    relative = weight.square().mean().item() / variance - 1
    assert abs(relative) < 4 * math.sqrt((0.8 if uniform else 2) / weight.numel())
    if uniform:
        assert weight.abs().max() <= math.sqrt(3 * variance) * (1 + 1e-6)


WIDE = {"a": (150,), "b": (250,)}


def test_default_initialisation_is_that_of_one_linear_layer() -> None:
    """U(±1/√fan_in) with the fan-in of all parents, so that a split layer starts as the whole one
    would.
    """
    net = build(mlp(300, 200), WIDE, [100, 150])
    for tensor in (net.blocks.weights["a"], net.blocks.weights["b"], net.blocks.bias):
        has_variance(tensor, 1 / 400 / 3, uniform=True)
    for layer, fan_in in ((net.hidden[0], 300), (net.heads, 200)):
        has_variance(layer.weight, 1 / fan_in / 3, uniform=True)
        has_variance(layer.bias, 1 / fan_in / 3, uniform=True)


@pytest.mark.parametrize("init", ["glorot_normal", "glorot_uniform", "normal", "zeros"])
def test_other_initialisations(init: str) -> None:
    """Glorot: variance 2/(fan_in + fan_out), each head a layer of its own; biases are zero."""
    deep, flat = (
        build(mlp(300, 200, init=init), WIDE, [100, 150]),
        build(linear(init=init), WIDE, [100, 150]),
    )
    layers = [
        (deep.blocks.weights["a"], 400, 300),
        (deep.blocks.weights["b"], 400, 300),
        (deep.hidden[0].weight, 300, 200),
        (deep.heads.weight[:100], 200, 100),
        (deep.heads.weight[100:], 200, 150),
        (first_weight(flat.blocks, *WIDE)[:100], 400, 100),
        (first_weight(flat.blocks, *WIDE)[100:], 400, 150),
    ]
    for weight, fan_in, fan_out in layers:
        if init == "zeros":
            assert (weight == 0).all()
        else:
            has_variance(
                weight,
                1 if init == "normal" else 2 / (fan_in + fan_out),
                uniform=init == "glorot_uniform",
            )
    for bias in (deep.blocks.bias, deep.hidden[0].bias, deep.heads.bias, flat.blocks.bias):
        assert (bias == 0).all()


@pytest.mark.parametrize("init", ["glorot_normal", "glorot_uniform"])
def test_glorot_counts_the_kernel_in_both_fans(init: str) -> None:
    """As nn.init.xavier_*: fan_in and fan_out are channels × kernel area, for convolutions and
    transposed ones.
    """
    encoder = build(conv(16, 32, init=init), {"x": (8, 16, 16)}, [4])
    decoder = build(deconv(32, 16, init=init), {"z": (8,)}, [256], (1, 16, 16))
    for layer in (*encoder.stacks["x"], *decoder.layers):
        area = math.prod(layer.kernel_size)
        has_variance(
            layer.weight,
            2 / (area * (layer.in_channels + layer.out_channels)),
            uniform=init == "glorot_uniform",
        )
        assert (layer.bias == 0).all()


def test_recurrences_start_as_torchs() -> None:
    """U(±1/√size), every weight and bias."""
    torch.manual_seed(0)
    net = Recurrence(LSTM(64, layers=2), 64, {"x[t]": (200,)})
    for parameter in net.parameters():
        has_variance(parameter, 1 / 64 / 3, uniform=True)


# Dropout ------------------------------------------------------------------------------------------


def test_dropout_with_given_masks_is_torchs() -> None:
    """F.dropout from the same generator state zeroes the same units of any tensor, so its masks can
    be read off from ones.
    """
    net, values = build(mlp(8, 6, dropout=0.25), PARENTS, [4]), inputs(PARENTS, 50)
    torch.manual_seed(0)
    keep = tuple(
        (F.dropout(torch.ones(50, width, dtype=torch.float64), 0.25) > 0).double()
        for width in (8, 6)
    )
    torch.manual_seed(0)
    h = F.dropout(
        torch.relu(
            torch.cat(list(values.values()), -1) @ first_weight(net.blocks, *PARENTS).T
            + net.blocks.bias
        ),
        0.25,
    )
    h = F.dropout(torch.relu(net.hidden[0](h)), 0.25)
    close(run(net, values, keep), net.heads(h))
    assert net.spec.dropouts() == ((0.25, 8), (0.25, 6))


def test_a_model_drops_out_in_training_only() -> None:
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=mlp(400, dropout=0.1), scale=1.0)},
        q={"z | x": Normal(net=mlp(300, 200, dropout=0.3))},
    ).double()
    x, plan = normal(5, 3), model.plan(samples=2)
    noise = model.draw_noise(plan, model.prepare(x=x), seed=0)
    masks = {name: value for name, value in noise.items() if "dropout" in name}
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {
        "p(x|z) dropout 0": (2, 1, 5, 400),
        "q(z|x) dropout 0": (1, 1, 5, 300),
        "q(z|x) dropout 1": (1, 1, 5, 200),
    }
    for name, p in {
        "p(x|z) dropout 0": 0.1,
        "q(z|x) dropout 0": 0.3,
        "q(z|x) dropout 1": 0.3,
    }.items():
        assert set(masks[name].unique().tolist()) == {0.0, 1.0}
        assert abs(masks[name].mean().item() - (1 - p)) < 4 * math.sqrt(
            p * (1 - p) / masks[name].numel()
        )
    q, p = model.factors["q(z|x)"].net, model.factors["p(x|z)"].net

    def likelihood(keep: dict[str, Tensor]) -> Tensor:
        """log p(x|z) by hand, averaged over the two samples of z."""
        h = (
            torch.relu(x @ q.blocks.weights["x"].T + q.blocks.bias)
            * keep.get("q(z|x) dropout 0", 0.7)
            / 0.7
        )
        loc, scale = q.heads(
            torch.relu(q.hidden[0](h)) * keep.get("q(z|x) dropout 1", 0.7) / 0.7
        ).chunk(2, -1)
        z = loc + F.softplus(scale) * noise["z"]
        mean = p.heads(
            torch.relu(z @ p.blocks.weights["z"].T + p.blocks.bias)
            * keep.get("p(x|z) dropout 0", 0.9)
            / 0.9
        )
        return (-0.5 * (x - mean).square() - 0.5 * math.log(2 * math.pi)).sum(-1).mean(0)[0]

    close(model.elbo(x=x, samples=2, noise=noise).terms["x"], likelihood(masks))
    model.eval()
    assert set(model.draw_noise(plan, model.prepare(x=x), seed=0)) == {"z"}
    close(model.elbo(x=x, samples=2, noise={"z": noise["z"]}).terms["x"], likelihood({}))


def test_every_enumerated_value_has_its_own_dropout_mask() -> None:
    model = Model(
        p={"y": OneHot(3), "z | y": Normal(2), "x | y, z": Bernoulli(4, net=mlp(7, dropout=0.5))},
        q={"y | x": OneHot(net=mlp(6, dropout=0.5)), "z | x, y": Normal()},
    )
    noise = model.draw_noise(model.plan(), model.prepare(x=torch.zeros(5, 4)), seed=0)
    assert noise["p(x|y, z) dropout 0"].shape == (3, 1, 1, 5, 7)
    assert noise["q(y|x) dropout 0"].shape == (1, 1, 5, 6)


# Convolutions -------------------------------------------------------------------------------------

SHAPES = [(1, 28, 28), (3, 17, 9), (2, 5, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_conv_is_torchs_convolutions_then_a_dense_layer(shape: tuple[int, ...]) -> None:
    parents = {"x": shape, "y": (3,)}
    net = build(conv(4, 6, hidden=10, activation="elu"), parents, [2, 5])
    x, y = normal(2, 1, 5, math.prod(shape)), normal(5, 3, seed=1)
    images = x.reshape(10, *shape)
    for layer in net.stacks["x"]:
        images = F.elu(F.conv2d(images, layer.weight, layer.bias, stride=2, padding=1))
    assert images.shape[1:] == (6, math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
    joined = torch.cat([images.reshape(2, 1, 5, -1), y.expand(2, 1, 5, 3)], -1)
    expected = net.heads(F.elu(joined @ first_weight(net.blocks, *parents).T + net.blocks.bias))
    close(run(net, {"x": x, "y": y}), expected)
    assert expected.shape == (2, 1, 5, 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_deconv_is_a_dense_layer_then_torchs_transposed_convolutions(
    shape: tuple[int, ...],
) -> None:
    """One map of parameters a head, in the heads' order; doubling overshoots odd sizes, which are
    cut.
    """
    d = math.prod(shape)
    net = build(deconv(6, 4, hidden=10, activation="elu"), {"z": (3,), "y": (2,)}, [d, d], shape)
    z, y = normal(2, 1, 5, 3), normal(5, 2, seed=1)
    h = F.elu(
        torch.cat([z, y.expand(2, 1, 5, 2)], -1) @ first_weight(net.blocks, "z", "y").T
        + net.blocks.bias
    )
    half = [math.ceil(s / 2) for s in shape[1:]]
    images = F.elu(net.grow(h)).reshape(10, 6, *(math.ceil(s / 2) for s in half))
    images = F.elu(
        F.conv_transpose2d(images, net.layers[0].weight, net.layers[0].bias, stride=2, padding=1)[
            ..., : half[0], : half[1]
        ]
    )
    images = F.conv_transpose2d(
        images, net.layers[1].weight, net.layers[1].bias, stride=2, padding=1
    )[..., : shape[1], : shape[2]]
    assert images.shape == (10, 2 * shape[0], *shape[1:])
    got = run(net, {"z": z, "y": y})
    close(got, images.reshape(2, 1, 5, 2 * d))
    close(got[..., :d], images[:, : shape[0]].reshape(2, 1, 5, d))


def test_a_convolutional_model_gives_each_pixel_a_gradient() -> None:
    shape = (2, 7, 5)
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(3), "x | z": Normal(shape, net=deconv(4, 3, hidden=8))},
        q={"z | x": Normal(net=conv(3, 4, hidden=8))},
    ).double()
    x = normal(6, *shape)
    plan = model.plan()
    noise = model.draw_noise(plan, model.prepare(x=x), seed=0)
    bound = model.elbo(x=x, noise=noise)
    # images or flat rows
    torch.testing.assert_close(bound.value, model.elbo(x=x.flatten(1), noise=noise).value)
    bound.value.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert model.sample(2)["x"].shape == (2, *shape)


# Missing inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [linear(), mlp(6), conv(2, 3, hidden=6)])
def test_a_mask_input_starts_without_effect_and_then_acts_as_an_input(spec: Network) -> None:
    parents, lead = {"x": (2, 4, 4), "y": (3,)}, (2, 1, 5)
    net = build(spec, parents, [4], masked=("x", "y"))
    values, absent = (
        inputs(parents, *lead),
        {"x": (normal(5, 32, seed=8) > 0).double(), "y": (normal(5, 3, seed=9) > 0).double()},
    )

    def told() -> Tensor:
        return net.rest(net.first(values, missing=absent))

    close(told(), run(net, values))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    total = net.blocks.bias
    if isinstance(spec, conv):
        image = torch.cat(
            [part.expand(*lead, 32).reshape(10, 2, 4, 4) for part in (values["x"], absent["x"])], 1
        )
        for layer in net.stacks["x"]:
            image = torch.relu(F.conv2d(image, layer.weight, layer.bias, stride=2, padding=1))
        total = total + image.reshape(*lead, -1) @ net.blocks.weights["x"].T
    else:
        total = (
            total
            + values["x"] @ net.blocks.weights["x"].T
            + absent["x"] @ net.blocks.missing["x"].T
        )
    total = (
        total + values["y"] @ net.blocks.weights["y"].T + absent["y"] @ net.blocks.missing["y"].T
    )
    close(told(), total if net.heads is None else net.heads(torch.relu(total)))


# Recurrences --------------------------------------------------------------------------------------


def as_torch(cell: Recurrence, *names: str) -> nn.LSTM | nn.GRU:
    """torch's network with the same weights, on these inputs concatenated."""
    kind = nn.LSTM if isinstance(cell.spec, LSTM) else nn.GRU
    inner = first_weight(cell.blocks, *names)
    net = kind(inner.shape[-1], cell.d, cell.spec.layers, batch_first=True).double()
    with torch.no_grad():
        for i in range(cell.spec.layers):
            weight, bias = (
                (cell.upper[i - 1].weight, cell.upper[i - 1].bias)
                if i
                else (inner, cell.blocks.bias)
            )
            getattr(net, f"weight_ih_l{i}").copy_(weight)
            getattr(net, f"bias_ih_l{i}").copy_(bias)
            getattr(net, f"weight_hh_l{i}").copy_(cell.recurrent[i].weight)
            getattr(net, f"bias_hh_l{i}").copy_(cell.recurrent[i].bias)
    return net


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_a_cell_steps_as_torchs(kind: type[LSTM] | type[GRU], layers: int) -> None:
    torch.manual_seed(0)
    cell = Recurrence(kind(5, layers=layers), 5, {"x[t]": (3,), "u": (2,)}).double()
    x, u = normal(4, 7, 3), normal(4, 2, seed=1)
    expected, last = as_torch(cell, "x[t]", "u")(torch.cat([x, u[:, None].expand(4, 7, 2)], -1))
    before = cell.first({"u": u})  # the part that no step changes
    state = cell.initial(before)
    outputs = []
    for t in range(7):
        value, state = cell.step(before + cell.first({"x[t]": x[:, t]}, bias=False), state)
        outputs.append(value)
    close(torch.stack(outputs, 1), expected)
    finals = [*last[0], *last[1]] if kind is LSTM else list(last)
    for got, final in zip(state, finals, strict=True):
        close(got, final)


def test_a_state_starts_from_a_declared_first_value() -> None:
    cell = Recurrence(LSTM(5, layers=2), 5, {"x[t]": (3,)}).double()
    value = normal(4, 5)
    lower, top, *cells = cell.starting_from(value)
    assert torch.equal(top, value)
    assert all((part == 0).all() for part in (lower, *cells))
    assert len(cells) == 2


def test_recurrences_of_a_model_are_torchs() -> None:
    """A forward LSTM in p, which is zero until there is a past, and a backward GRU in q."""
    torch.manual_seed(0)
    model = Model(
        p={
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(5, layers=2),
            "z[t] | h[t]": Normal(2, scale=1.0),
            "x[t] | h[t], z[t]": Normal(3, scale=1.0),
        },
        q={"b[t] | b[t+1], x[t]": GRU(4, layers=2), "z[t] | h[t], b[t]": Normal(scale=0.5)},
    ).double()
    x, z = normal(6, 7, 3), normal(6, 7, 2, seed=1)
    forward, backward = (
        model.factors[key] for key in ("p(h[t]|h[t-1], x[t-1], z[t-1])", "q(b[t]|b[t+1], x[t])")
    )
    past, _ = as_torch(forward, "x[t-1]", "z[t-1]")(torch.cat([x, z], -1)[:, :-1])
    h = torch.cat([torch.zeros(6, 1, 5, dtype=torch.float64), past], 1)

    def mean(key: str, **parents: Tensor) -> Tensor:
        blocks = model.factors[key].net.blocks
        return (
            torch.cat(list(parents.values()), -1)
            @ first_weight(blocks, *(f"{name}[t]" for name in parents)).T
            + blocks.bias
        )

    def log_density(value: Tensor, loc: Tensor, scale: float) -> Tensor:
        return (
            -0.5 * ((value - loc) / scale).square() - math.log(scale) - 0.5 * math.log(2 * math.pi)
        ).sum((1, 2))

    expected = log_density(z, mean("p(z[t]|h[t])", h=h), 1) + log_density(
        x, mean("p(x[t]|h[t], z[t])", h=h, z=z), 1
    )
    close(model.log_prob(x=x, z=z), expected)
    b = as_torch(backward, "x[t]")(x.flip(1))[0].flip(1)
    close(
        model.posterior(x=x).log_prob(z=z),
        log_density(z, mean("q(z[t]|h[t], b[t])", h=h, b=b), 0.5),
    )


# Deep networks ------------------------------------------------------------------------------------


def test_a_residual_network_adds_pairs_of_layers() -> None:
    net, values = build(residual(6, blocks=2, activation="tanh"), PARENTS, [4]), inputs(PARENTS, 7)
    weight = first_weight(net.blocks, *PARENTS)
    h = torch.cat(list(values.values()), -1) @ weight.T + net.blocks.bias
    for inner, outer in zip(net.inner, net.outer, strict=True):
        h = h + outer(torch.tanh(inner(torch.tanh(h))))
    close(run(net, values), net.heads(torch.tanh(h)))


def test_attention_is_torchs_transformer_encoder_over_the_tokens_of_all_parents() -> None:
    parents = {"b": (4, 3), "a": (5,)}
    net, values = build(attention(8, heads=2, layers=2), parents, [3]), inputs(parents, 2, 7)
    plain = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    tokens = torch.cat(
        [
            values["b"].reshape(14, 4, 3) @ net.weights["b"].T,
            values["a"].reshape(14, 1, 5) @ net.weights["a"].T,
        ],
        1,
    )
    tokens = tokens + net.places
    for layer in net.layers:
        with torch.no_grad():
            plain.self_attn.in_proj_weight.copy_(layer.reads.weight)
            plain.self_attn.in_proj_bias.copy_(layer.reads.bias)
            for mine, theirs in (
                (layer.mixes, plain.self_attn.out_proj),
                (layer.inner, plain.linear1),
                (layer.outer, plain.linear2),
                (layer.norms[0], plain.norm1),
                (layer.norms[1], plain.norm2),
            ):
                theirs.load_state_dict(mine.state_dict())
        tokens = plain(tokens)
    close(run(net, values), net.heads(net.norm(tokens).mean(1)).reshape(2, 7, 3))


def test_the_tokens_of_a_set_have_no_order() -> None:
    parents = {"x": (4, 3), "y": (2,)}
    values, order = inputs(parents, 6), [2, 0, 3, 1]
    moved = values | {"x": values["x"].reshape(6, 4, 3)[:, order].flatten(1)}
    ordered, unordered = (
        build(attention(8, heads=2, positions=positions), parents, [3])
        for positions in (True, False)
    )
    close(run(unordered, moved), run(unordered, values))
    assert not torch.allclose(run(ordered, moved), run(ordered, values))


# Tables -------------------------------------------------------------------------------------------


def test_a_table_looks_its_rows_up() -> None:
    net = build(table(6), {"i": (1,)}, [2, 3])
    assert (net.rows == 0).all()
    with torch.no_grad():
        net.rows.copy_(normal(6, 5))
    index = torch.tensor([[[4.0], [0.0], [4.0]]], dtype=torch.float64)
    got = run(net, {"i": index})
    close(got, normal(6, 5)[[4, 0, 4]][None])
    got.sum().backward()
    assert net.rows.grad.sum(-1).tolist() == [5, 0, 0, 0, 10, 0]


def test_a_table_is_a_posterior_of_free_rows() -> None:
    """q(z|i) has its own mean and scale for each example, whatever the order of the batch."""
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3)}, q={"z | i": Normal(net=table(4))}, given={"i": 1}
    ).double()
    with torch.no_grad():
        model.factors["q(z|i)"].net.rows.copy_(normal(4, 4))
    i = torch.tensor([2, 0, 3])
    rows = normal(4, 4)[i]
    loc, scale = rows[:, :2], F.softplus(rows[:, 2:])
    expected = 0.5 * (scale.square() + loc.square() - 1 - 2 * scale.log()).sum(-1)
    got = model.elbo(x=normal(3, 3), i=i).terms["kl(z)"]
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


# Mistakes -----------------------------------------------------------------------------------------

IMAGE = (1, 8, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mlp(0), "mlp takes positive whole numbers, got 0"),
        (lambda: mlp(5, -2), "positive whole numbers, got -2"),
        (lambda: mlp(2.0), "positive whole numbers, got 2.0"),
        (lambda: mlp(True), "positive whole numbers, got True"),
        (lambda: mlp(5, dropout=1.5), "dropout is a probability below 1, got 1.5"),
        (lambda: mlp(5, dropout=1), "dropout is a probability below 1, got 1"),
        (lambda: mlp(5, dropout=-0.1), "dropout is a probability below 1, got -0.1"),
        (
            lambda: mlp(5, activation="swish"),
            "Unknown activation 'swish'. Choose one of relu, tanh",
        ),
        (
            lambda: mlp(5, init="he"),
            "Unknown initialiser 'he'. Choose one of default, glorot_normal",
        ),
        (lambda: mlp(5, bias=False), r"only linear\(\) takes bias=False"),
        (lambda: conv(), r"conv needs at least one number of channels, e.g. conv\(32, 64\)"),
        (lambda: deconv(), r"deconv needs at least one number of channels, e.g. deconv\(32, 64\)"),
        (lambda: conv(4, hidden=0), "conv takes positive whole numbers, got 0"),
        (lambda: deconv(4, 0), "deconv takes positive whole numbers, got 0"),
        (lambda: conv(4, activation="swish"), "Unknown activation 'swish'"),
        (
            lambda: table(0).build({"i": (1,)}, [2], (2,), ()),
            "table takes positive whole numbers, got 0",
        ),
        (
            lambda: table(4).build({"x": (3,)}, [2], (2,), ()),
            r"table\(4\) is looked up by one parent of size 1",
        ),
        (
            lambda: table(4).build({"i": (1,), "j": (1,)}, [2], (2,), ()),
            "looked up by one parent of size 1",
        ),
        (lambda: residual(0), "residual takes positive whole numbers, got 0"),
        (lambda: residual(8, activation="swish"), "Unknown activation 'swish'"),
        (lambda: attention(10, heads=4), "10 cannot be split into 4"),
        (lambda: Network().build({}, [1], (1,), ()), "Network has no method build"),
        (lambda: LSTM(4, layers=0), "LSTM: layers is a positive whole number, got 0"),
        (lambda: GRU(4, net=mlp(3)), "GRU takes no net; its parents feed its gates"),
        (lambda: Deterministic(4, activation="swish"), "Unknown activation 'swish'"),
        (
            lambda: Model(p={"z": Normal(2), "x | z": Normal(3)}, q={"z | x": Normal(net=conv(4))}),
            r"z \| x.*conv needs a parent of shape \(channels, height, width\); the parents here "
            r"are x \(3,\). Use mlp",
        ),
        (
            lambda: Model(
                p={"z": Normal(2), "x | z": Normal(3, net=deconv(4))}, q={"z | x": Normal()}
            ),
            r"x \| z.*deconv makes an image \(channels, height, width\), but this variable has "
            r"shape \(3,\). Use mlp",
        ),
        (
            lambda: Model(
                p={"z": Normal(2), "x | z": MultivariateNormal(IMAGE, net=deconv(4))},
                q={"z | x": Normal()},
            ),
            "deconv gives each pixel its own parameters; this conditional has parameters of "
            "another size. Use mlp",
        ),
        (
            lambda: Model(
                p={"z": Normal(2), "x | z": Normal(3)}, q={"z | x": Normal(net=table(4))}
            ),
            r"z \| x.*table\(4\) is looked up by one parent of size 1, the row of each example: "
            r'"z \| i" with given=\{"i": 1\}',
        ),
    ],
)
def test_bad_networks_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_counts_may_be_read_by_their_logarithms():
    net = mlp(4, log=True).build({"x": (2,)}, [1], (1,), ())
    plain = mlp(4).build({"x": (2,)}, [1], (1,), ())
    plain.load_state_dict(net.state_dict())
    x = torch.tensor([[0.0, 3000.0]], requires_grad=True)
    assert torch.equal(net.first({"x": x}), plain.first({"x": x.asinh()}))
    (slope,) = torch.autograd.grad(net.first({"x": x}).sum(), x)
    # as without logarithm where v is 0
    assert slope[0, 0] == pytest.approx(float(net.blocks.weights["x"].detach()[:, 0].sum()))
    with pytest.raises(ValueError, match="log=True needs a hidden layer"):
        mlp(log=True)
