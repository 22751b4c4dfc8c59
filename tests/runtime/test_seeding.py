"""Seeded calls: the same numbers from any thread, and no state of torch or of the model switched
meanwhile.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from aevb import (
    AIS,
    Beta,
    Conditional,
    ContinuousBernoulli,
    Exact,
    Model,
    Normal,
    OneHot,
    Poisson,
    linear,
    mlp,
    wrap,
)
from aevb.declare.networks import Network
from aevb.runtime.evaluation_mode import drops_units, evaluating
from aevb.runtime.seeding import seeded
from aevb.zoo import zoo

GENERATOR = torch.Generator().manual_seed(0)
X, SERIES = torch.randn(12, 3, generator=GENERATOR), torch.randn(2, 3, 2, generator=GENERATOR)
HOLES = torch.where(torch.rand(X.shape, generator=GENERATOR) < 0.3, torch.nan, X)

torch.manual_seed(0)
DEEP = Model(
    {"z": Normal(2), "x | z": Normal(3, net=mlp(4, dropout=0.5))},
    {"z | x": Normal(net=mlp(4, dropout=0.5))},
)
LINEAR = Model(
    {"y": OneHot(2), "z | y": Normal(2), "x | z": Normal(3, scale=1.0)},
    {"y | x": OneHot(), "z | x, y": Normal()},
)
BAYES = Model({"y": OneHot(3), "x | y": ContinuousBernoulli(3)}, {"y | x": Exact()})
TORCHS_OWN = Model(  # families that torch draws itself
    {"k": Poisson(1, learned=True), "b | k": Beta(1), "x | b": Normal(3)},
    {"k | x": Poisson(), "b | x, k": Beta()},
)
TIMED = Model(
    {"z[t] | z[t-1]": Normal(2, net=mlp(4)), "x[t] | z[t]": Normal(2)},
    {"z[t] | z[t-1], x[t]": Normal()},
)

CALLS = {
    "sample": lambda seed: DEEP.sample(9, seed=seed)["x"],
    "sample, torch's own": lambda seed: TORCHS_OWN.sample(9, seed=seed)["x"],
    "sample, finite": lambda seed: BAYES.sample(9, seed=seed)["x"],
    "sample in time": lambda seed: TIMED.sample(5, steps=4, seed=seed)["x"],
    "reconstruct": lambda seed: DEEP.reconstruct(x=X, mean=False, seed=seed, method="q")["x"],
    "impute by q": lambda seed: DEEP.impute(x=HOLES, seed=seed, samples=4, method="q").draws["x"],
    "impute exactly": lambda seed: LINEAR.impute(
        x=HOLES, seed=seed, samples=4, method="exact"
    ).draws["x"],
    "posterior": lambda seed: TIMED.posterior(x=SERIES, seed=seed, method="q")["z"].mean,
    "posterior samples": lambda seed: DEEP.posterior(x=X, seed=seed, method="q").sample(3)["z"],
    "posterior samples, Bayes": lambda seed: BAYES.posterior(x=X.sigmoid(), seed=seed).sample(3)[
        "y"
    ],
    "posterior samples, exact": lambda seed: LINEAR.posterior(
        x=X, seed=seed, method="exact"
    ).sample(3)["z"],
    "elbo": lambda seed: DEEP.elbo(x=X, seed=seed).value,
    "elbo, torch's own": lambda seed: TORCHS_OWN.elbo(x=X, seed=seed, samples=2).value,
    "importance": lambda seed: (
        DEEP.log_evidence(x=X, samples=20, seed=seed, method="importance").value
    ),
    "prior": lambda seed: TORCHS_OWN.log_evidence(x=X, samples=20, seed=seed, method="prior").value,
    "ais": lambda seed: (
        DEEP.log_evidence(x=X, samples=2, seed=seed, method=AIS(temperatures=4, leapfrog=2)).value
    ),
    "particles": lambda seed: (
        TIMED.log_evidence(x=SERIES, samples=20, seed=seed, method="particles").value
    ),
    "gap": lambda seed: DEEP.gap(x=X, seed=seed, iterations=2, samples=20).best,
    "fresh": lambda seed: torch.cat(
        [parameter.flatten() for parameter in DEEP.fresh(seed).parameters()]
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_four_threads_get_the_numbers_of_one(call):
    seeds = range(5)
    expected = [call(seed).detach() for seed in seeds]
    assert not torch.equal(expected[0], expected[1])
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, seeds))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)
    for model in (DEEP, LINEAR, BAYES, TORCHS_OWN, TIMED):
        assert all(module.training for module in model.modules())
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["sample", "reconstruct", "importance", "ais", "gap"])
def test_nothing_is_switched_while_a_seeded_call_runs(name):
    """Seen from inside the call, as another thread would see it."""
    torch.manual_seed(123)
    state, seen = torch.get_rng_state(), []
    hook = DEEP.factors["p(x|z)"].register_forward_hook(
        lambda *_: seen.append(
            (
                DEEP.training,
                torch.equal(torch.get_rng_state(), state),
                all(p.requires_grad for p in DEEP.parameters()),
            )
        )
    )
    try:
        CALLS[name](0)
    finally:
        hook.remove()
    assert set(seen) == {(True, True, True)}


def test_another_thread_may_train_while_one_evaluates():
    """It has dropout and gradients; the one that evaluates has neither."""
    inside, found = threading.Event(), {}

    def train():
        inside.wait(10)
        found["training"] = drops_units(DEEP)
        bound = DEEP.elbo(x=X).value.sum()
        found["gradients"] = [
            gradient is not None
            for gradient in torch.autograd.grad(bound, list(DEEP.parameters()), allow_unused=True)
        ]

    thread = threading.Thread(target=train)
    thread.start()
    with DEEP._evaluating(0):
        assert not drops_units(DEEP)
        inside.set()
        thread.join(10)
        assert not torch.is_grad_enabled()
    assert found["training"]
    assert all(found["gradients"])
    assert drops_units(DEEP)


class Noisy(nn.Module):
    """A module of one's own that draws numbers itself, and drops units in training."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.drop, self.training_seen = inner, nn.Dropout(0.5), []

        self.first = inner.first

    def rest(self, h, keep=()):
        self.training_seen.append(self.drop.training)
        return self.drop(h) + torch.randn_like(h) + torch.normal(0.0, 1.0, (1,))


@dataclass(frozen=True, repr=False)
class noisy(Network):
    def build(self, parents, heads, shape, masked):
        return Noisy(linear().build(parents, heads, shape, masked))


def test_code_of_ones_own_draws_from_the_seed_and_is_not_in_training():
    torch.manual_seed(0)
    model = Model({"z": Normal(2), "x | z": Normal(3, net=noisy())}, {"z | x": Normal()})
    part = model.factors["p(x|z)"].net
    state = torch.get_rng_state()
    expected = [model.sample(9, seed=seed)["x"] for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: model.sample(9, seed=seed)["x"], range(8)))
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), state)
    assert set(part.training_seen) == {False}
    assert all(module.training for module in model.modules())
    with evaluating(model):
        with evaluating(model):
            assert not part.drop.training
        assert not part.drop.training
    assert part.drop.training


def test_a_seed_gives_the_numbers_of_torchs_global_seed():
    with seeded(5, all_code=True):
        found = [
            torch.randn(3),
            torch.rand_like(X),
            torch.randperm(9),
            nn.Linear(2, 3).weight,
            torch.distributions.Gamma(2.0, torch.ones(4)).sample(),
        ]
        with seeded(None), seeded(6, all_code=True):
            inner = torch.randint(99, (4,))
        found.append(torch.empty(3).exponential_())
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = [
            torch.randn(3),
            torch.rand_like(X),
            torch.randperm(9),
            nn.Linear(2, 3).weight,
            torch.distributions.Gamma(2.0, torch.ones(4)).sample(),
        ]
        expected.append(torch.empty(3).exponential_())
        torch.manual_seed(6)
        assert torch.equal(inner, torch.randint(99, (4,)))
    assert all(map(torch.equal, found, expected))


class Scaled(nn.Linear):
    """A module of the user."""


@pytest.mark.parametrize("own", [lambda: mlp(4), lambda: Scaled(3, 4), lambda: Scaled])
def test_a_seed_decides_the_initial_weights(own):
    """In any process: torch's global generator has no part in them, and is left as it was."""

    def built(seed):
        torch.manual_seed(torch.randint(2**31, ()).item())
        net = own() if own() is not Scaled else partial(Scaled, 3, 4)
        before = torch.get_rng_state()
        p = {"z": Normal(2), "x | z": Normal(3, scale="learned")}
        model = Model(p, {"z | x": Normal(net=net)}, seed=seed)
        assert torch.equal(before, torch.get_rng_state()) == (seed is not None)
        return model

    one, same, other = built(7), built(7), built(8)
    for found in (same, one.fresh(7), built(None).fresh(7)):
        assert [*one.state_dict()] == [*found.state_dict()]
        assert all(map(torch.equal, one.parameters(), found.parameters()))
    assert not all(map(torch.equal, one.parameters(), other.parameters()))
    assert one.untouched()
    assert one.declaration() == other.declaration()


def test_pretrained_modules_keep_their_weights_with_a_seed():
    net = Scaled(3, 4)
    model = Model(
        {"z": Normal(2), "x | z": Normal(3)},
        {"z | x": Normal(net=wrap(net, pretrained=True))},
        seed=0,
    )
    assert torch.equal(model.factors["q(z|x)"].net.module.weight, net.weight)


@pytest.mark.parametrize("name", zoo)
def test_models_of_the_zoo_take_a_seed(name):
    one, same, other = (zoo[name](seed=seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, one.parameters(), same.parameters()))
    assert not all(map(torch.equal, one.parameters(), other.parameters()))


class Operators(nn.Module):
    """Every kind of operator that Python has, as torch wraps them differently."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.reads = nn.LazyLinear(4)

    def forward(self, *parents):
        h = self.reads(torch.cat(parents, -1)) @ self.weight
        h = abs(h) ** 2 + 2 ** h.sigmoid() + 1 / (1 + h**2) - h % 2
        quotient, rest = h.detach() // 2, h % 2  # a tensor has no divmod
        h = torch.where((h > 0) & (rest <= 1) | ~(h != 1), quotient + h, -rest)
        h += 1
        h *= 0.5
        h **= 2
        h /= 3
        h[..., 0] = h[..., 1] + len(h) * 0.0
        return (h + (h == 0) + pow(h, 2) + float(2) ** -h.tanh()).tanh()


class Density(torch.distributions.LogNormal):
    """A density with operators, of a family of one's own; torch's LogNormal has scale**2."""

    def log_prob(self, value):
        residual = (value.log() - self.loc) / self.scale
        return (
            -(abs(residual) ** 2) / 2 - self.scale.log() - value.log() - 0.5 * math.log(2 * math.pi)
        )


def _positive(raw):
    return nn.functional.softplus(raw) + 0.1


def _with_distribution(distribution):
    @dataclass(frozen=True, repr=False)
    class Positive(Conditional):
        support = torch.distributions.constraints.positive
        fill: ClassVar[float] = 1.0
        has_entropy: ClassVar[bool] = True
        pathwise: ClassVar[bool] = True

        def heads(self, d):
            return {"first": d, "second": d}

        def distribution(self, first, second):
            return distribution(first, second)

    return Positive


LogNormal = _with_distribution(
    lambda loc, scale: torch.distributions.LogNormal(loc, _positive(scale))
)
OwnDensity = _with_distribution(lambda loc, scale: Density(loc, _positive(scale)))
OwnGamma = _with_distribution(
    lambda concentration, rate: torch.distributions.Gamma(
        _positive(concentration), _positive(rate), validate_args=False
    )
)


@pytest.mark.parametrize("family", [LogNormal, OwnDensity, OwnGamma])
@pytest.mark.parametrize("net", [None, Operators], ids=["linear", "operators"])
def test_code_of_ones_own_may_use_every_operator(family, net):
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(2), "x | z": family(3, net=net)}, {"z | x": Normal(net=net and Operators)}
    )
    x = X.exp()
    for method in ("importance", AIS(temperatures=4, leapfrog=2)):
        found = [model.log_evidence(x=x, samples=3, seed=1, method=method).value for _ in range(2)]
        assert torch.equal(*found)
        assert bool(found[0].isfinite().all())
    assert torch.equal(model.sample(5, seed=1)["x"], model.sample(5, seed=1)["x"])
    assert torch.equal(*(model.gap(x=x, seed=1, iterations=2, samples=20).best for _ in range(2)))
    model.fresh(1)


def test_callables_without_a_signature_do_not_draw():
    with seeded(1, all_code=True):
        assert torch.equal(torch.ones(2) ** 2, torch.ones(2))
        assert torch.equal(2 ** torch.ones(2), torch.full((2,), 2.0))
        assert torch.equal(torch.ones(2).pow(2), torch.ones(2).__pow__(2))
