"""Declarations in odd orders: the bound against its definition, E_q[log p − log q], from log_prob
and samples of q; gradients too.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from aevb import (
    GRU,
    Bernoulli,
    Beta,
    ContinuousBernoulli,
    Deterministic,
    Exact,
    Laplace,
    Mixture,
    Model,
    Network,
    Normal,
    OneHot,
    StudentT,
    linear,
    mlp,
)

TANH = mlp(3, activation="tanh")


def build(p: dict, q: dict, seed: int = 0, **more) -> Model:
    torch.manual_seed(seed)
    return Model(p=p, q=q, **more).double()


STATIC = {
    "enumerated behind a draw": (
        {"y2": OneHot(2), "y3 | y2": OneHot(4), "z | y3": Normal(1), "x | z, y2": Normal(2)},
        {
            "z | x": Normal(net=TANH),
            "y2 | z, x": OneHot(net=linear()),
            "y3 | y2": OneHot(net=linear()),
        },
    ),
    "enumerated between draws": (
        {"u": Normal(1), "y | u": OneHot(3), "z | y": Normal(1), "x | z, u": Normal(2)},
        {"u | x": Normal(), "y | u, x": OneHot(), "z | y, x": Normal()},
    ),
    "mixture with children": (
        {"z": Normal(1), "w | z": Normal(1), "x | w": Normal(2)},
        {"z | x": Mixture(components=2), "w | z, x": Normal()},
    ),
    "mixture under a class that reads a draw": (
        {"u": Normal(1), "y": OneHot(2), "z | y": Normal(1), "x | z, u": Normal(2)},
        {"u | x": Normal(), "y | u": OneHot(), "z | y, x": Mixture(components=2)},
    ),
    "Bayes after a draw, then another latent": (
        {"y": OneHot(3), "z | y": Normal(1), "w": Normal(1), "x | z, w": Normal(2)},
        {"z | x": Normal(), "y | z": Exact(), "w | y, x": Normal()},
    ),
    "heavy tails": (
        {"a": Laplace(2), "b | a": StudentT(1), "x | b": Laplace(2)},
        {"b | x": StudentT(net=TANH, df=5.0), "a | b": Laplace()},
    ),
    "beta and continuous Bernoulli": (
        {"a": Beta(1), "b": ContinuousBernoulli(1), "x | a, b": Normal(2)},
        {"a | x": Beta(), "b | a": ContinuousBernoulli()},
    ),
}


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("way", ["planned", "two samples", "sampled"])
def test_the_bound_is_its_definition(name, way):
    model = build(*STATIC[name])
    sampled = {
        key: "sampled" for key, choice in model.plan().choices.items() if choice.draw == "pathwise"
    }
    choices = {"planned": {}, "two samples": {"samples": 2}, "sampled": {"how": sampled}}[way]
    x = torch.randn(2, 2, dtype=torch.float64)
    n = 20_000
    many = x.repeat(n, 1)
    posterior = model.posterior(x=many, seed=1)
    latents = {key: value[0] for key, value in posterior.sample().items()}
    direct = (
        (model.log_prob(x=many, **latents) - posterior.log_prob(**latents)).detach().reshape(n, 2)
    )
    ours = model.elbo(x=many, seed=2, **choices).value.detach().reshape(n, 2)
    error = ((direct.var(0) + ours.var(0)) / n).sqrt()
    assert ((direct.mean(0) - ours.mean(0)).abs() < 4.5 * error).all()


def test_ends_of_another_family_have_their_own_noise():
    q = {"z[0] | x[0]": Laplace(), "z[t] | z[t-1], x[t]": Normal(), "z[T] | x[T]": StudentT()}
    model = build({"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)}, q)
    assert sorted(model.plan().layout(2, 3, dropout=False)) == ["z", "z[0]", "z[T]"]
    x = torch.randn(1, 3, 1, dtype=torch.float64)
    many = x.expand(20_000, 3, 1)
    posterior = model.posterior(x=many, seed=1)
    z = posterior.sample()["z"][0]
    direct = (model.log_prob(x=many, z=z) - posterior.log_prob(z=z)).detach()
    ours = model.elbo(x=many, seed=2).value.detach()
    assert abs(direct.mean() - ours.mean()) < 4.5 * ((direct.var() + ours.var()) / 20_000).sqrt()
    first = posterior.sample()["z"][0, :, 0, 0]
    scale = torch.nn.functional.softplus(model.factors["q(z[0]|x[0])"]({"x[0]": x[:, 0]})[0, 1])
    # A Laplace has mean absolute deviation b and variance 2 b²; a Gaussian's ratio of the two would
    # differ by 9 %.
    assert abs(first.var() / (2 * scale**2) - 1) < 0.08


DREG = {
    "an enumerated latent reads a draw": (
        {"y": OneHot(3), "z | y": Normal(1), "x | z": Normal(2)},
        {"z | x": Normal(net=TANH), "y | z, x": OneHot(net=linear())},
    ),
    "a class, then a hierarchy": (
        {"y": OneHot(2), "a | y": Normal(1), "b | a": Normal(1), "x | b": Normal(2)},
        {"y | x": OneHot(), "b | x, y": Normal(), "a | b, y": Normal()},
    ),
    "through features": (
        {"a": Normal(1), "b | a": Normal(1), "x | b": Normal(2)},
        {"f | x": Deterministic(3, activation="tanh"), "b | f": Normal(), "a | b, f": Normal()},
    ),
}


def gradients(model: Model, data: dict, repeats: int, **choices) -> list[torch.Tensor]:
    rows = [
        torch.autograd.grad(
            model.elbo(seed=s, **data, **choices).value.mean(), list(model.parameters())
        )
        for s in range(repeats)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def assert_same_mean(a: list[torch.Tensor], b: list[torch.Tensor], names: list[str]) -> None:
    for name, one, two in zip(names, a, b, strict=True):
        error = (one.var(0) / len(one) + two.var(0) / len(two)).sqrt()
        assert ((one.mean(0) - two.mean(0)).abs() <= 5 * error + 1e-10).all(), name


@pytest.mark.parametrize("name", DREG)
def test_dreg_has_the_plain_gradients_mean(name):
    model = build(*DREG[name])
    x = torch.randn(1, 2, dtype=torch.float64).expand(500, 2)
    common = {"bound": "iwae", "samples": 3}
    names = [key for key, _ in model.named_parameters()]
    assert_same_mean(
        gradients(model, {"x": x}, 60, **common),
        gradients(model, {"x": x}, 60, gradient="dreg", **common),
        names,
    )


def test_dreg_through_a_state_whose_first_step_has_no_samples():
    model = build(
        {
            "c": Normal(1),
            "h[t] | h[t-1], z[t-1], x[t-1], c": GRU(3),
            "z[t] | h[t]": Normal(1),
            "x[t] | h[t], z[t]": Normal(1),
        },
        {"b[t] | b[t+1], x[t]": GRU(2), "c | b[0]": Normal(), "z[t] | h[t], x[t]": Normal()},
    )
    x = torch.randn(1, 3, 1, dtype=torch.float64).expand(300, 3, 1)
    common = {"bound": "iwae", "samples": 3}
    names = [key for key, _ in model.named_parameters()]
    assert_same_mean(
        gradients(model, {"x": x}, 50, **common),
        gradients(model, {"x": x}, 50, gradient="dreg", **common),
        names,
    )


def test_dreg_is_refused_where_it_has_no_weights():
    model = build(
        {
            "a": OneHot(2),
            "z | a": Normal(1),
            "b": OneHot(2),
            "w | b": Normal(1),
            "x | z, w": Normal(2),
        },
        {"a | x": OneHot(), "z | a, x": Normal(), "b | z": OneHot(), "w | b, a": Normal()},
    )
    with pytest.raises(
        ValueError, match="w is drawn for each value of b, whose weights depend on samples"
    ):
        model.plan(bound="iwae", samples=3, gradient="dreg")
    with pytest.raises(ValueError, match='gradient="dreg" is not defined with how=.*a.*: "sum"'):
        model.plan(bound="iwae", samples=3, gradient="dreg", how={"a": "sum"})


def gmvae() -> Model:
    return build(
        {"y": OneHot(3, learned=True), "z | y": Normal(1), "x | z": Normal(2)},
        {"y | x": OneHot(), "z | x, y": Normal()},
    )


def test_sums_inside_the_logarithm_respect_labels():
    model, x, y = gmvae(), torch.randn(4, 2, dtype=torch.float64), torch.tensor([2, -1, 0, -1])
    choices = {"bound": "iwae", "samples": 3, "how": {"y": "sum"}}
    noise = model.draw_noise(model.plan(**choices), model.prepare(x=x), seed=0)
    mixed = model.elbo(x=x, y=y, noise=noise, **choices).value
    free = model.elbo(x=x, noise=noise, **choices).value
    for i in range(4):
        if y[i] < 0:
            assert torch.allclose(mixed[i], free[i], rtol=0, atol=1e-12)
        else:
            alone = model.elbo(
                x=x[i : i + 1],
                y=y[i : i + 1],
                bound="iwae",
                samples=3,
                noise={"z": noise["z"][y[i], :, :, i : i + 1]},
            ).value
            assert torch.allclose(mixed[i], alone[0], rtol=0, atol=1e-12)


def test_evidence_conditions_on_latents_that_are_passed():
    model, x = gmvae(), torch.randn(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.factors["q(z|x, y)"].net.blocks.bias[1] += (
            2  # a wide proposal: the weights then have a variance to speak of
        )
    y = torch.tensor([1, -1, 2])
    found = model.log_evidence(x=x, y=y, samples=20_000, seed=0)
    grid = torch.linspace(-15, 15, 3001, dtype=torch.float64).unsqueeze(-1)
    for i in range(3):
        parts = []
        for c in range(3) if y[i] < 0 else [int(y[i])]:
            log_joint = model.log_prob(x=x[i].expand(3001, 2), z=grid, y=torch.full((3001,), c))
            parts.append(torch.trapezoid(log_joint.exp(), dx=0.01))
        exact = torch.stack(parts).sum().log()
        assert abs(found.value[i] - exact) < 5 * found.stderr[i]
    chain = build({"s[t]": OneHot(2), "x[t] | s[t]": Normal(1)}, {"s[t] | x[t]": Exact()})
    sequence = torch.randn(2, 3, 1, dtype=torch.float64)
    paths = torch.cartesian_prod(*[torch.arange(2)] * 3)
    brute = torch.stack(
        [chain.log_prob(x=sequence, s=path.expand(2, 3)) for path in paths]
    ).logsumexp(0)
    assert torch.allclose(
        chain.log_evidence(x=sequence, samples=2).value, brute, rtol=0, atol=1e-10
    )
    wide = build({"b": Bernoulli(24), "x | b": Normal(1)}, {"b | x": Bernoulli()})
    # 2²⁴ values: drawn, not listed
    assert wide.log_evidence(x=torch.zeros(1, 1), samples=10).value.isfinite().all()


def test_evidence_in_small_pieces_is_the_same_estimate():
    model, x = gmvae(), torch.randn(7, 2, dtype=torch.float64)
    whole = model.log_evidence(x=x, samples=4000, seed=0)
    pieces = model.log_evidence(x=x, samples=4000, seed=0, memory=20_000)
    assert (
        (whole.value - pieces.value).abs()
        < 5 * (whole.stderr.square() + pieces.stderr.square()).sqrt()
    ).all()


def test_the_posterior_is_certain_where_a_latent_is_known():
    model, x = gmvae(), torch.randn(3, 2, dtype=torch.float64)
    y = torch.tensor([1, -1, 2])
    posterior, free = model.posterior(x=x, y=y), model.posterior(x=x)
    assert posterior["y"].probs[[0, 2]].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert torch.equal(posterior["y"].probs[1], free["y"].probs[1])
    z = torch.randn(3, 1, dtype=torch.float64)
    labels = torch.tensor([1, 0, 2])
    given, all_free = posterior.log_prob(y=labels, z=z), free.log_prob(y=labels, z=z)
    log_q = free["y"].logits[torch.arange(3), labels]
    assert torch.allclose(given, all_free - torch.where(y >= 0, log_q, 0.0), rtol=0, atol=1e-12)


def test_the_posterior_of_bits_by_bayes_is_over_their_values():
    model = build({"b": Bernoulli(2), "x | b": Normal(2)}, {"b | x": Exact()})
    x = torch.randn(3, 2, dtype=torch.float64)
    posterior = model.posterior(x=x)["b"]
    values = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    joint = torch.stack([model.log_prob(x=x, b=value.expand(3, 2)) for value in values])
    for i, value in enumerate(values):
        assert torch.allclose(
            posterior.log_prob(value.expand(3, 2)), joint.log_softmax(0)[i], rtol=0, atol=1e-12
        )
    assert torch.allclose(posterior.mean, joint.softmax(0).T @ values)
    assert posterior.sample((5,)).shape == (5, 3, 2)


def test_relaxed_terms_are_never_taken_under_the_categorical():
    model = gmvae()
    assert model.plan(how={"y": "gumbel"}, gradient="stl").choices["y"].term == "closed"
    bits = build({"b": Bernoulli(12), "x | b": Normal(1)}, {"b | x": Bernoulli()})
    assert bits.plan(bound="iwae", samples=1).choices["b"].draw == "relaxed"
    assert "of the relaxed model ≥" in bits.explain(bound="iwae", samples=1)
    assert "sigmoid((logits(x) + g)/τ), g ~ Logistic(0, 1)" in bits.explain()
    assert "log p(x) ≈ E of this estimator" in bits.explain()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"how": {"y": "gumbel enumerate"}}, "asks for two things at once"),
        ({"noise": {}}, "The noise of z is missing; this estimate needs"),
        ({"noise": {"z": torch.zeros(3)}}, r"The noise of z has shape \[3\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        gmvae().elbo(x=torch.zeros(2, 2), **choices)


def test_an_end_that_is_not_pathwise_is_not_taken_for_one():
    model = build(
        {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)},
        {"z[0] | x[0]": Mixture(), "z[t] | z[t-1], x[t]": Normal()},
    )
    with pytest.raises(
        ValueError, match="a Mixture sample is not a differentiable function of its parameters"
    ):
        model.plan(how={"z": "pathwise"})
    assert model.plan(samples=2).choices["z"].draw == "score"


@dataclass(frozen=True, repr=False)
class Dropping(Network):
    """A network of one's own: linear, with dropout on its output."""

    def dropouts(self):
        return ((0.5, 2),)

    def build(self, parents, heads, shape, masked):
        inner = linear().build(parents, heads, shape, masked)
        inner.rest = lambda h, keep=(): h * keep[0] * 2 if keep else h
        return inner


def test_a_network_of_ones_own_gets_its_dropout_masks():
    model = build({"z": Normal(1), "x | z": Normal(1)}, {"z | x": Normal(net=Dropping())})
    x = torch.randn(50, 1, dtype=torch.float64)
    plan, batch = model.plan(), model.prepare(x=x)
    noise = model.draw_noise(plan, batch, seed=0)
    mask = noise["q(z|x) dropout 0"]
    assert mask.shape == (1, 1, 50, 2)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    kept = model.elbo(x=x, noise=noise).terms["kl(z)"]
    raw = model.factors["q(z|x)"].net.first({"x": x}) * mask[0, 0] * 2
    scale = torch.nn.functional.softplus(raw[:, 1])
    assert torch.allclose(
        kept, 0.5 * (scale**2 + raw[:, 0] ** 2 - 1 - 2 * scale.log()), rtol=0, atol=1e-12
    )
    model.eval()
    assert sorted(model.draw_noise(plan, batch, seed=0)) == ["z"]


def test_an_unknown_clamped_variable_is_refused():
    with pytest.raises(ValueError, match="'foo' is not a variable of this model"):
        gmvae().plan(clamped=["foo"])
    assert math.isfinite(gmvae().elbo(x=torch.zeros(2, 2)).value.sum().item())


def test_every_chain_is_captured_whole():
    model = build(
        {"s[0]": OneHot(3), "s[t] | s[t-1]": OneHot(3), "x[t] | s[t]": Normal(1)},
        {"s[t] | s[t-1], x[t]": OneHot()},
    )
    from aevb.estimate.estimators import estimate

    batch = model.prepare(x=torch.randn(2, 3, 1))
    plan = model.plan()

    def bound(batch):
        return estimate(plan, model.factors, batch, {}).value

    assert torch.equal(torch.compile(bound, fullgraph=True, backend="eager")(batch), bound(batch))


# What is asked of a sample ------------------------------------------------------------------------


CLASSES = {"y": OneHot(3), "z": Normal(1), "x | z, y": Normal(2)}
UNKNOWN = "but its value in row {row} (from 0) is unknown (−1 or NaN). Give its value there"


@pytest.mark.parametrize(
    ("value", "row"),
    [(-1, 0), (math.nan, 0), ([2, -1], 1), (torch.tensor([[1.0, 0, 0], [math.nan] * 3]), 1)],
)
@pytest.mark.parametrize(
    "q",
    [{"y | x": OneHot(), "z | x, y": Normal()}, {"z | x, y": Normal()}],
    ids=["latent", "observed"],
)
def test_a_fixed_value_is_known(q, value, row):
    with pytest.raises(
        ValueError,
        match=re.escape(f"sample fixes y, {UNKNOWN.format(row=row)}, or leave y out to draw it."),
    ):
        build(CLASSES, q).sample(2, y=value)


def test_a_given_value_is_known_and_minus_one_is_a_number_where_it_is_no_label():
    model = build({"z": Normal(1), "x | z, y": Normal(2)}, {"z | x, y": Normal()}, given={"y": 3})
    with pytest.raises(ValueError, match=re.escape(f"{UNKNOWN.format(row=0)}.")):
        model.sample(2, y=-1)
    assert model.sample(2, y=1, z=-1)["z"].tolist() == [[-1.0], [-1.0]]


@pytest.mark.parametrize("n", [-1, 0, 2.5, True, None])
def test_a_sample_has_a_whole_number_of_rows_and_steps(n):
    model = build({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Normal()})
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"sample(n=…) is how many rows to draw, a whole number from 1 on. Got {n!r}."
        ),
    ):
        model.sample(n)
    chain = build({"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(2)}, {"z[t] | x[t]": Normal()})
    if n is not None:
        with pytest.raises(
            ValueError,
            match=re.escape(
                f"sample(steps=…) is how many steps to draw, a whole number from 1 on. Got {n!r}."
            ),
        ):
            chain.sample(2, steps=n)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "No variable of this model has [t], so a sample has no steps. Leave out steps=."
        ),
    ):
        model.sample(2, steps=3)
    assert model.sample(np.int64(2))["x"].shape == (2, 2)
    assert chain.sample(2, steps=np.int64(3))["x"].shape == (2, 3, 2)


# What is printed of a mixture ---------------------------------------------------------------------


def test_a_mixtures_weights_are_written_with_what_they_depend_on():
    def line(text: str) -> str:
        return text.splitlines()[2].strip()

    one = build({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Mixture(components=2)})
    assert line(one.explain()) == "Σₖ πₖ(x) { log p(x|zˢ) + log p(zˢ) − log q(zˢ|x) }"
    assert one.explain().latex.startswith(r"\sum_{k} \pi_k(x) \Big\{ ")
    assert (
        line(one.explain(bound="iwae", samples=1))
        == "log Σₖ πₖ(x) exp { log p(x|zˢ) + log p(zˢ) − log q(zˢ|x) }"
    )
    root = build({"z": Normal(1), "x | z": Normal(2)}, {"z": Mixture(components=2, learned=True)})
    assert line(root.explain()).startswith("Σₖ πₖ { log p(x|zˢ)")
    two = build(
        {"u": Normal(1), "z | u": Normal(1), "x | z": Normal(2)},
        {"u | x": Normal(), "z | x, u": Mixture(components=2)},
    )
    # a weight of each sample's own stands inside their mean
    assert line(two.explain(samples=5)).startswith("1/5 Σₛ Σₖ πₖ(x, uˢ) { ")
    assert two.explain(samples=5).latex.startswith(
        r"\tfrac{1}{5} \sum_{s=1}^{5} \sum_{k} \pi_k(x, u^{s}) \Big\{ "
    )


def test_a_mixtures_estimator_under_iwae_is_the_one_that_is_written():
    """log Σₖ πₖ(x) exp { … }, from log p and q's parts, at each component's own draw."""
    model = build({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Mixture(components=2)})
    x = torch.randn(4, 2, dtype=torch.float64)
    plan, batch = model.plan(bound="iwae", samples=1), model.prepare(x=x)
    noise = model.draw_noise(plan, batch, seed=0)
    raw = model.factors["q(z|x)"].net.first({"x": x})
    weight, loc, scale = raw.split([2, 2, 2], -1)
    z = loc + torch.nn.functional.softplus(scale) * noise["z"].reshape(2, 4).T  # [rows, components]
    q = model.posterior(x=x)["z"]
    inside = torch.stack(
        [model.log_prob(x=x, z=z[:, k : k + 1]) - q.log_prob(z[:, k : k + 1]) for k in range(2)], -1
    )
    expected = (weight.log_softmax(-1) + inside).logsumexp(-1)
    assert torch.allclose(
        model.elbo(x=x, bound="iwae", samples=1, noise=noise).value, expected, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    ("components", "said"),
    [(1, "the only component is drawn"), (2, "each of the 2 components is drawn once")],
)
def test_the_plan_counts_the_components_of_a_mixture(components, said):
    p = {"z": Normal(1), "x | z": Normal(2)}
    assert said in str(build(p, {"z | x": Mixture(components=components)}).explain())
