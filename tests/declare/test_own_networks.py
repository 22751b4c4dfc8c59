"""Modules and functions of the user as networks: equal, to rounding, to the same computation by
hand, wherever a network of the library can stand.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aevb
from aevb import Bernoulli, Deterministic, Model, Network, Normal, OneHot, fit, mlp, wrap
from aevb.declare.own_networks import Wrapped
from aevb.estimate.estimators import estimate
from aevb.training.purity import own_part

IMAGE = (1, 4, 4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class Reader(nn.Module):
    """Reads an image and a class, in the order of the key."""

    def __init__(self, width: int = 6, drop: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.dense, self.drop = nn.Linear(12 + 3, width), nn.Dropout(drop)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.cat([torch.relu(self.conv(x)).flatten(1), y], -1)
        return self.drop(torch.tanh(self.dense(h)))


class Small(nn.Module):
    """Reads one vector; its class can be registered, because it takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


def doubled(z: Tensor) -> Tensor:
    return torch.cat([z, z], -1)[:, :3]


def model_of(net: Any, **others: Any) -> Model:
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(2), "x | z": Normal(3)}, q={"z | x": Normal(net=net)}, **others
    ).double()


def joint(width: int, out: int, inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, out))


def copy_into(model: Model, key: str, layers: nn.Sequential) -> None:
    """The weights of a plain network on the parents side by side, into an mlp."""
    mine: Any = model.factors[key].net
    names = key[2:-1].partition("|")[2].split(", ")
    with torch.no_grad():
        weights = [mine.blocks.weights[name] for name in names]
        widths = [weight.shape[1] for weight in weights]
        for weight, block in zip(weights, layers[0].weight.split(widths, 1), strict=True):
            weight.copy_(block)
        mine.blocks.bias.copy_(layers[0].bias)
        mine.heads.weight.copy_(layers[2].weight)
        mine.heads.bias.copy_(layers[2].bias)


# Exactness ----------------------------------------------------------------------------------------


def test_modules_give_the_bound_of_the_same_perceptrons_over_ten_enumerated_classes() -> None:
    torch.manual_seed(0)
    own = [joint(7, 10, 5), joint(7, 4, 15), joint(7, 5, 12)]

    def gmvae(nets: list[Any]) -> Model:
        return Model(
            p={"y": OneHot(10), "z | y": Normal(2), "x | y, z": Bernoulli(5, net=nets[2])},
            q={"y | x": OneHot(net=nets[0]), "z | x, y": Normal(net=nets[1])},
        ).double()

    plain = gmvae([mlp(7)] * 3)
    mine = gmvae([own[0], wrap(own[1], join=True), wrap(own[2], join=True)])
    factors = ["q(y|x)", "q(z|x, y)", "p(x|y, z)"]
    for name, net in zip(factors, own, strict=True):
        copy_into(plain, name, net)
        assert mine.factors[name].net.heads is None  # the module returns the parameters
    with torch.no_grad():
        plain.factors["p(z|y)"].load_state_dict(mine.factors["p(z|y)"].state_dict())
    x = (normal(6, 5) > 0).double()
    bounds = [model.elbo(x=x, seed=3, samples=2) for model in (plain, mine)]
    for name, term in bounds[0].terms.items():
        close(bounds[1].terms[name], term)
    gradients = []
    for model, bound in zip((plain, mine), bounds, strict=True):
        net = model.factors["q(z|x, y)"].net
        first = list(net.blocks.weights.values()) if model is plain else [net.module[0].weight]
        grads = torch.autograd.grad(bound.value.sum(), first)
        gradients.append(torch.cat(grads, -1))
    close(*gradients)


def test_a_module_reads_each_parent_in_its_shape_for_every_enumerated_value() -> None:
    torch.manual_seed(0)
    module = Reader().double()
    model = Model(
        p={"y": OneHot(3), "z | y": Normal(2), "x | z": Bernoulli(IMAGE)},
        q={"y | x": OneHot(), "z | x, y": Normal(net=module)},
    ).double()
    net = model.factors["q(z|x, y)"].net
    x, y = normal(1, 5, 16), torch.eye(3, dtype=torch.float64).reshape(3, 1, 1, 1, 3)
    got = net.rest(net.first({"x": x, "y": y}))
    assert got.shape == (3, 1, 1, 5, 4)
    module.load_state_dict(net.module.state_dict())
    for c in range(3):
        features = module(x.reshape(5, *IMAGE), y[c, 0, 0, 0].expand(5, 3))
        close(got[c, 0, 0], net.heads(features))
    close(net.first({"x": x}) + net.first({"y": y}, bias=False), net.first({"x": x, "y": y}))


def test_modules_in_a_recurrence_are_the_same_perceptrons() -> None:
    torch.manual_seed(0)
    own = {"z[t] | z[t-1]": joint(6, 4, 2), "z[t] | z[t-1], x[t]": joint(6, 4, 5)}

    def chain(nets: Callable[[str], Any]) -> Model:
        prior, q = own
        return Model(
            p={prior: Normal(2, net=nets(prior)), "x[t] | z[t]": Normal(3, scale=1.0)},
            q={q: Normal(net=nets(q))},
        ).double()

    plain, mine = chain(lambda key: mlp(6)), chain(lambda key: wrap(own[key], join=True))
    copy_into(plain, "p(z[t]|z[t-1])", own["z[t] | z[t-1]"])
    copy_into(plain, "q(z[t]|z[t-1], x[t])", own["z[t] | z[t-1], x[t]"])
    name = "p(x[t]|z[t])"
    plain.factors[name].load_state_dict(mine.factors[name].state_dict())
    x = normal(4, 5, 3)
    for choices in ({"lengths": [5, 2, 4, 1]}, {"bound": "particles", "samples": 3}):
        values = [model.elbo(x=x, seed=1, **choices).value for model in (plain, mine)]
        close(*values)


def test_a_function_and_a_tuple_of_parameters() -> None:
    torch.manual_seed(0)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loc, self.scale = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.loc(x), self.scale(x)

    pair = Pair().double()
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=doubled, scale=1.0)},
        q={"z | x": Normal(net=pair)},
    ).double()
    x, z = normal(4, 3), normal(4, 2, seed=1)
    pair.load_state_dict(model.factors["q(z|x)"].net.module.state_dict())
    posterior = model.posterior(x=x)["z"]
    close(posterior.mean, pair(x)[0].detach())
    close(posterior.stddev, F.softplus(pair(x)[1]).detach())
    expected = torch.distributions.Normal(doubled(z), 1.0).log_prob(x).sum(-1)
    standard = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
    close(model.log_prob(x=x, z=z), expected + standard)


def test_features_shared_by_factors_are_a_deterministic_node() -> None:
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3)},
        q={"h | x": Deterministic(5, net=Small()), "z | h": Normal()},
    ).double()
    module, net = model.factors["q(h|x)"].net.module, model.factors["q(z|h)"].net
    x = normal(4, 3)
    raw = module(x) @ net.blocks.weights["h"].T + net.blocks.bias
    close(model.posterior(x=x)["z"].mean, raw[:, :2].detach())


def test_masks_of_missing_entries_start_without_effect_and_then_act() -> None:
    x = normal(4, 3)
    x[0, 1] = math.nan
    model = model_of(Small(), missing="mask")
    net = model.factors["q(z|x)"].net
    mean = model.posterior(x=x)["z"].mean
    close(mean, net.heads(net.module(x.nan_to_num(0.0)))[:, :2].detach())
    with torch.no_grad():
        net.missing["x"].copy_(normal(4, 3))
    close(model.posterior(x=x)["z"].mean - mean, x.isnan().double() @ normal(4, 3)[:2].T)


def test_a_module_may_change_its_inputs_in_place() -> None:
    """Other factors read the same values, and the likelihood those of the data."""
    torch.manual_seed(0)
    inside = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4))
    outside = copy.deepcopy(inside)
    outside[0].inplace = False
    models = [model_of(wrap(net, pretrained=True)) for net in (inside, outside)]
    models[1].load_state_dict(models[0].state_dict())
    x = normal(5, 3)
    values = [model.elbo(x=x.clone(), seed=0).value for model in models]
    assert torch.equal(*values)
    assert float(x.min()) < 0


def test_a_network_may_return_one_number_per_row() -> None:
    x = normal(4, 3)
    values = [
        Model(
            p={"z": Normal(1), "x | z": Normal(3, scale=1.0, net=lambda z: z.expand(-1, 3))},
            q={"z | x": Normal(scale=0.5, net=net)},
        )
        .double()
        .elbo(x=x, seed=0)
        .value
        for net in (lambda x: x.sum(-1), lambda x: x.sum(-1, keepdim=True))
    ]
    close(*values)


# Values -------------------------------------------------------------------------------------------


def test_a_module_is_copied_and_shares_no_weights() -> None:
    given = Small()
    spec = wrap(given)
    with torch.no_grad():
        given.layer.weight.zero_()  # after the declaration
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3)},
        q={"h | x": Deterministic(5, net=spec), "g | x": Deterministic(5, net=spec)}
        | {"z | h, g": Normal()},
    )
    h, g = (model.factors[name].net.module.layer.weight for name in ("q(h|x)", "q(g|x)"))
    assert h is not g
    assert torch.equal(h, g)
    assert float(h.detach().abs().min()) > 0


def test_fresh_models_draw_new_weights_and_keep_what_is_trained_already() -> None:
    def layer(model: Model) -> Tensor:
        return model.factors["q(z|x)"].net.module.layer.weight.detach()

    given = Small()
    for net in (given, Small):
        model = model_of(net)
        first, again, second = (layer(model.fresh(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert not torch.equal(first, layer(model))
        assert float(first.abs().max()) <= 1 / math.sqrt(3)
    kept = model_of(wrap(given, pretrained=True))
    assert torch.equal(layer(kept.fresh(1)), given.layer.weight.double())
    given.layer.requires_grad_(False)
    frozen = model_of(given)
    assert torch.equal(layer(frozen.fresh(1)), given.layer.weight.double())
    assert not frozen.fresh(1).factors["q(z|x)"].net.module.layer.weight.requires_grad

    class Token(Small):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.token

    with pytest.raises(ValueError, match=r"how its parameter token is drawn.*net=Token"):
        model_of(Token()).fresh(1)
    assert model_of(Token).fresh(1)


def test_fresh_models_redraw_everything_or_say_what_they_cannot() -> None:
    class Scaled(nn.Linear):  # the scale is not drawn by reset_parameters of nn.Linear
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    for net, name in ((Scaled(), "scale"), (normed, "0.parametrizations.weight.original0")):
        with pytest.raises(ValueError, match=f"how its parameter {name} is drawn"):
            model_of(net).fresh(1)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
            self.outer = nn.Linear(1, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.outer(x.unsqueeze(-1))
            return self.inner(h, h, h)[0].mean(1)

    fresh = model_of(Attending()).fresh(1).factors["q(z|x)"].net.module.inner
    assert float(fresh.out_proj.bias.detach().abs().max()) == 0  # drawn last, as when it is made


def test_parts_given_in_evaluation_mode_stay_in_it() -> None:
    trained = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    trained(torch.randn(50, 3))
    trained[1].eval()
    model = model_of(trained)
    model.train()
    norm = model.factors["q(z|x)"].net.module[1]
    assert not norm.training
    x = normal(6, 3)
    before = copy.deepcopy(norm.state_dict())
    fit(model, {"x": x}, steps=3, progress=False)
    for name in ("running_mean", "running_var"):
        assert torch.equal(norm.state_dict()[name], before[name])
    fresh = model.fresh(1).factors["q(z|x)"].net.module
    assert torch.equal(fresh[1].running_mean, before["running_mean"])
    assert not torch.equal(fresh[0].weight, model.factors["q(z|x)"].net.module[0].weight)


@aevb.register
@dataclass(frozen=True, repr=False)
class pyramid(Network):
    """A network of the user whose settings are data."""

    width: int = 4

    def make(self, parents: Any, shape: Any) -> nn.Module:
        inputs = sum(math.prod(parent) for parent in parents.values())
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, self.width), nn.Dropout(0.2))


def test_models_are_saved_and_loaded_with_their_modules(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = normal(4, 3)

    def same(loaded: Model, model: Model) -> None:
        loaded.eval(), model.eval()
        assert torch.equal(loaded.elbo(x=x, seed=0).value, model.elbo(x=x, seed=0).value)

    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=doubled, scale=1.0)},
        q={"z | x": Normal(net=wrap(Small(), output="features"))},
    ).double()
    model.save(tmp_path / "own")
    with pytest.raises(ValueError, match=r'own in p\(x\|z\), doubled. Pass it.*modules={"p\(x'):
        aevb.load(tmp_path / "own")
    for encoder in (Small(), Small):
        modules = {"z | x": encoder, "p(x|z)": doubled}
        same(aevb.load(tmp_path / "own", modules=modules), model)
    with pytest.raises(ValueError, match=r"modules= names 'h', which is no factor .* p\(z\), p\(x"):
        aevb.load(tmp_path / "own", modules={"h": Small()})
    with pytest.raises(ValueError, match="is in only one of them|has shape"):
        aevb.load(tmp_path / "own", modules=modules | {"z | x": nn.Linear(3, 5)})
    aevb.register(doubled)
    named = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=doubled, scale=1.0)},
        q={"z | x": Normal(net=aevb.register(Small))},
    ).double()
    for saved in (named, model_of(pyramid(5))):
        saved.save(tmp_path / f"{saved.factors['q(z|x)'].net.title}")
        same(aevb.load(tmp_path / f"{saved.factors['q(z|x)'].net.title}"), saved)
    run = fit(model.train(), {"x": x}, steps=2, out=tmp_path / "run", progress=False)
    loaded = aevb.load_run(tmp_path / "run", modules=modules)
    same(loaded, run.model)
    assert aevb.Run.load(tmp_path / "run", modules=modules).step == 2


def test_weights_in_any_layout_are_saved(tmp_path: Path) -> None:
    net = nn.Linear(3, 4)
    net.weight = nn.Parameter(torch.randn(3, 4).T)  # not contiguous
    model, x = model_of(net), normal(6, 3)
    model.save(tmp_path / "saved")
    loaded = aevb.load(tmp_path / "saved", modules={"q(z|x)": nn.Linear(3, 4)})
    close(loaded.elbo(x=x, seed=0).value, model.elbo(x=x, seed=0).value)


class Halved(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_another_network_than_the_saved_one_is_a_warning(tmp_path: Path) -> None:
    model_of(Small()).save(tmp_path)
    message = (
        r"q\(z\|x\) was saved with the network Small, but is loaded with Halved\. Unless .* Pass "
        r'Small: load\(path, modules=\{"q\(z\|x\)": …\}\)\.'
    )
    with pytest.warns(aevb.runtime.checked_files.IntegrityWarning, match=message):
        aevb.load(tmp_path, modules={"q(z|x)": Halved()})


def test_the_printed_form_names_the_network() -> None:
    encoder = wrap(Small(), output="features", join=True)
    assert repr(Normal(net=Small())) == "Normal(net=Small(…))"
    assert repr(Normal(net=Small)) == "Normal(net=Small)"
    assert repr(Normal(net=doubled)) == "Normal(net=doubled)"
    assert repr(encoder) == "wrap(Small(…), output='features', join=True)"
    assert repr(Normal(net=partial(Reader, 4))) == "Normal(net=Reader)"
    model = model_of(Small())
    assert "44   Normal(net=Small(…))" in str(model)  # 3·5 + 5 and 5·4 + 4
    names = [name for name, _ in model.named_parameters() if name.startswith("factors.q")]
    inner = ["module.layer.weight", "module.layer.bias", "heads.weight", "heads.bias"]
    assert names == [f"factors.q(z|x).net.{name}" for name in inner]


# Training -----------------------------------------------------------------------------------------


def test_dropout_layers_take_their_masks_from_the_noise() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Dropout2d(0.25), nn.Flatten(), nn.Dropout(0.5)
    )
    model = Model(
        p={"z": Normal(2), "x | z": Bernoulli(IMAGE)}, q={"z | x": Normal(net=module)}
    ).double()
    x = normal(5, *IMAGE)
    batch, plan = model.prepare(x=(x > 0).double()), model.plan()
    noise = model.draw_noise(plan, batch, seed=0)
    channels, entries = (noise[f"q(z|x) dropout {i}"] for i in range(2))
    assert channels.shape == (1, 1, 5, 3)
    assert entries.shape == (1, 1, 5, 48)
    net = model.factors["q(z|x)"].net
    maps = net.module[0]((x > 0).double()) * channels.reshape(5, 3, 1, 1) / 0.75
    raw = net.heads(maps.flatten(1) * entries.reshape(5, 48) / 0.5)
    loc, scale = raw[:, :2], F.softplus(raw[:, 2:])
    kl = 0.5 * (scale.square() + loc.square() - 1 - 2 * scale.log()).sum(-1)
    close(model.elbo(x=(x > 0).double(), noise=noise).terms["kl(z)"], kl)
    model.eval()
    assert set(model.draw_noise(plan, batch, seed=0)) == {"z"}


def test_runs_with_modules_are_recorded_and_repeatable() -> None:
    """A recorded step gives the numbers of an eager one, dropout included."""
    x = (normal(40, *IMAGE) > 0).float()

    def trained(net: Any) -> tuple[Model, Tensor]:
        torch.manual_seed(0)
        model = Model(p={"z": Normal(2), "x | z": Bernoulli(IMAGE)}, q={"z | x": Normal(net=net)})
        fit(model, {"x": x}, steps=60, batch=10, seed=0, progress=False)
        return model, torch.cat([value.detach().flatten() for value in model.parameters()])

    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5), nn.Dropout(0.3))

    class Same(nn.Module):  # the same computation, in a class that may have side effects
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(plain)

        def forward(self, value: Tensor) -> Tensor:
            return self.inner(value)

    recorded, once = trained(plain)
    eager, twice = trained(Same())
    assert own_part(recorded) is None
    assert "Same is a module of your own" in str(own_part(eager))
    torch.testing.assert_close(once, twice)
    assert torch.equal(once, trained(plain)[1])
    runs = fit(eager, {"x": x}, steps=3, batch=10, seeds=2, progress=False)
    weights = [run.model.factors["q(z|x)"].net.module.inner[1].weight for run in runs]
    assert not torch.equal(*weights)


# Mistakes -----------------------------------------------------------------------------------------


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.second(self.first(x))
        return h


SHARED = nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.BatchNorm1d(3), "has BatchNorm1d, which mixes the rows .* Use nn.GroupNorm"),
        (lambda x: x - x.mean(0), "<lambda> mixes rows"),
        (Counter(), "Counter changes its buffer calls"),
        (Tied(), "Tied has one parameter under two names, first.weight and second.weight"),
        (Hidden(), "Hidden uses parameters that it does not register"),
        (SHARED.forward, "forward uses parameters .* Pass the module itself"),
        (nn.Linear(4, 4), r"Linear failed on 3 rows of its parents \(x \[rows, 3\]; one tensor"),
        (lambda x: x.sum(), "one line per row"),
        (lambda x: x[:, :0], r"float32 of shape \[3, 0\] for 3 rows; it must return numbers"),
        (lambda x: None, "returns a NoneType"),
        (lambda x: F.dropout(x, 0.5), "draws random numbers in every call"),
        (lambda x: (x, x), r"2 tensors of 3 \+ 3 numbers per row; .* here 2 \+ 2"),
        (wrap(nn.Linear(3, 5), output="parameters"), r"returns 5 numbers .* needs 2 \+ 2"),
        (nn.Dropout(1.0), "dropout is a probability below 1, got 1.0"),
        (nn.LSTM(3, 4), "returns a tuple"),
        (nn.Linear, r"Linear\(\) cannot make a module: .*functools.partial\(Linear, …\)"),
    ],
)
def test_networks_that_no_bound_can_use_are_refused(net: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(net)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normal(2, net="mlp"), "net='mlp' is not a network"),
        (lambda: Normal(2, net=mlp), r"an object, not the class"),
        (lambda: wrap(int), "takes a torch module, a class of modules, or a function; got"),
        (lambda: wrap(nn.Linear(2, 2), output="raw"), "Unknown output 'raw'. Choose one of auto"),
        (lambda: aevb.register(lambda z: z), "has no name to find it by"),
        (
            lambda: Model(
                p={"z": Normal(2), "x | z": Bernoulli(IMAGE, net=nn.Unflatten(1, (2, 1, 1)))},
                q={"z | x": Normal()},
            ),
            "Unflatten returns 2×1×1 numbers per row, but this variable of shape 1×4×4 needs 16",
        ),
        (
            lambda: Model(
                p={"z": Normal(2), "x | z": Normal(3)},
                q={"z | x, y": Normal(net=Small())},
                given={"y": 3},
            ),
            r"x \[rows, 3\], y \[rows, 3\].*For one tensor of all of them: wrap\(…, join=True\)",
        ),
    ],
)
def test_mistakes_are_explained(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Attends(nn.Module):
    """Attention over the entries of a vector; its inner dropout is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(3, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.4, batch_first=True)

    def forward(self, *parents: Tensor) -> Tensor:
        x = torch.cat(parents, -1)[:, :3]
        return self.layer(x[..., None] * self.tokens).flatten(1)


def attending() -> Model:
    torch.manual_seed(0)
    return Model(p={"z": Normal(3), "x | z": Normal(3, net=Attends)}, q={"z | x": Normal()})


def weights_of(model: Model) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_attention_draws_its_dropout_from_the_seed_of_the_run(tmp_path: Path) -> None:
    model, x = attending(), normal(12, 3).float()
    net = model.factors["p(x|z)"].net
    assert isinstance(net, Wrapped)
    assert net.found.draws
    assert "draws random numbers itself" in str(own_part(model))
    state = torch.get_rng_state()
    once, again, other = (model.elbo(x=x, seed=seed).value for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    noise = model.draw_noise(model.plan(), model.prepare(x=x), seed=1)
    assert torch.equal(model.elbo(x=x, noise=noise).value, once)
    assert torch.equal(torch.get_rng_state(), state)
    with_other_draws = {**noise, "p(x|z) own draws": noise["p(x|z) own draws"] + 1}
    assert not torch.equal(model.elbo(x=x, noise=with_other_draws).value, once)

    settings = {"batch": 4, "seed": 3, "steps": 12, "checkpoint_every": 3, "progress": False}
    whole = weights_of(fit(attending(), {"x": x}, **settings).model)
    torch.manual_seed(99)  # the global generator has no effect
    assert torch.equal(weights_of(fit(attending(), {"x": x}, **settings).model), whole)

    def stop(step: int, model: Model) -> None:
        if step >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(attending(), {"x": x}, **settings, validation={"x": x}, after=stop, out=tmp_path / "r")
    torch.manual_seed(7)
    resumed = fit(
        attending(), {"x": x}, **settings, validation={"x": x}, out=tmp_path / "r", resume=True
    )
    assert torch.equal(weights_of(resumed.model), whole)


def test_every_step_of_time_has_draws_of_its_own_and_repeats_them() -> None:
    seen: list[Tensor] = []

    class Noisy(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            drawn = torch.rand_like(z) if self.training else torch.zeros_like(z)
            seen.append(drawn.detach())
            return torch.cat([z + drawn, 0 * z], -1)

    torch.manual_seed(0)
    model = Model(
        p={"z[t] | z[t-1]": Normal(1, net=Noisy()), "x[t] | z[t]": Normal(1)},
        q={"z[t] | z[t-1], x[t]": Normal()},
    ).double()
    x = normal(2, 5, 1)
    for bound in ({}, {"bound": "particles", "samples": 3}):
        seen.clear()
        values = [model.elbo(x=x, seed=1, **bound).value for _ in range(2)]
        assert torch.equal(*values)
        drawn, again = torch.cat(seen).flatten().chunk(2)
        assert torch.equal(drawn, again)
        firsts = [call.flatten()[0] for call in seen[: len(seen) // 2]]  # one call per step
        assert len({float(first) for first in firsts}) >= (5 if len(firsts) > 1 else 1)
        assert len(drawn.unique()) >= 10
    batch, plan = model.prepare(x=x), model.plan()
    noise = model.draw_noise(plan, batch, seed=1)
    parameters = list(model.parameters())
    gradients = [
        torch.autograd.grad(
            estimate(plan, model.factors, batch, noise, chunk=chunk).value.sum(), parameters
        )
        for chunk in (None, 2)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        close(mine, theirs)
