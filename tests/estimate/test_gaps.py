"""Missing entries that p reads, drawn from p: the bound, its gradients, and their explanation."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributions as td
from torch import Tensor

from aevb import (
    GRU,
    LSTM,
    Bernoulli,
    Beta,
    Deterministic,
    Exact,
    Mixture,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    linear,
    mlp,
)
from aevb.derive.draws import Draw, Term
from aevb.derive.plan import Plan
from aevb.estimate.batch import split_latents
from aevb.estimate.estimators import Estimate, estimate

NAN = math.nan
NODES = {1: 60, 2: 40, 3: 24, 4: 14}  # of a quadrature, by the number of Gaussian noises


def build(p: dict, q: dict, seed: int = 0, **options) -> Model:
    torch.manual_seed(seed)
    return Model(p=p, q=q, **options).double()


def vrnn(family, d: int = 3, **options) -> Model:
    return build(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(5),
            "z[t] | h[t]": Normal(2, net=mlp(4)),
            "x[t] | h[t], z[t]": family(d, net=mlp(4)),
        },
        {"b[t] | b[t+1], x[t]": GRU(4), "z[t] | h[t], b[t]": Normal(net=mlp(4))},
        **options,
    )


def with_gaps(x: Tensor, share: float = 0.3, seed: int = 0) -> Tensor:
    gone = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(gone, torch.nan, x)


def plan_of(model: Model, batch: dict, **choices) -> Plan:
    clamped, partial = split_latents(model.graph, batch)
    return model.plan(clamped=clamped, partial=partial, **choices)


# The gradient: its mean over the noise is the gradient of the bound's mean ------------------------

GAUSSIAN, BINARY = Normal(1, scale=1.5), Bernoulli(1)
SMALL = {  # p, q, data; the missing entries are integrated by quadrature or enumerated
    "a Gaussian past": (
        {"z": Normal(1), "x[t] | x[t-1], z": GAUSSIAN},
        {"z": Normal(learned=True)},
        {"x": [NAN, 0.4]},
    ),
    "a Gaussian past, q of a state": (
        {
            "h[t] | x[t-1]": Deterministic(1),
            "z[t] | h[t]": Normal(1),
            "x[t] | h[t], z[t]": GAUSSIAN,
        },
        {"z[t] | h[t], x[t]": Normal(scale="learned")},
        {"x": [NAN, 0.4]},
    ),
    "a binary past": (
        {"z": Normal(1), "x[t] | x[t-1], z": BINARY},
        {"z": Normal(learned=True)},
        {"x": [NAN, 1.0, NAN]},
    ),
    "a binary past, q of a state": (
        {
            "h[t] | x[t-1]": Deterministic(1),
            "z[t] | h[t]": Normal(1),
            "x[t] | h[t], z[t]": BINARY,
        },
        {"z[t] | h[t], x[t]": Normal(scale="learned")},
        {"x": [NAN, 1.0]},
    ),
    "a binary past and class": (
        {"y": Bernoulli(1, learned=True), "x[t] | x[t-1], y": BINARY},
        {"y": Bernoulli(learned=True)},
        {"x": [NAN, 1.0, NAN]},
    ),
    "no time": (
        {"z": Normal(1), "x | z": BINARY, "y | x, z": Normal(1)},
        {"z | y": Normal()},
        {"x": NAN, "y": 0.3},
    ),
    "no time, q of a node of p": (
        {
            "x": Normal(1, learned=True),
            "h | x": Deterministic(1),
            "z | h": GAUSSIAN,
            "y | z, h": GAUSSIAN,
        },
        {"z | h, y": Normal()},
        {"x": NAN, "y": 0.3},
    ),
    "no time, the closed form does not hold": (
        {"a": Normal(1), "x | a": GAUSSIAN, "z | x": GAUSSIAN, "y | z": GAUSSIAN},
        {"z | y": Normal(), "a | z, y": Normal()},
        {"x": NAN, "y": 0.7},
    ),
}


def small(name: str) -> tuple[Model, dict]:
    p, q, data = SMALL[name]
    model = build(p, q, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
        for factor in model.factors.values():  # spreads near 1, so that the quadrature converges
            if "scale" in getattr(factor, "sizes", {}) and hasattr(factor, "net"):
                factor.net.blocks.bias[-factor.sizes["scale"] :] += 0.5
            for vector in getattr(factor, "vectors", {}).values():
                vector += 0.5
    return model, {
        key: torch.tensor(value, dtype=torch.float64).reshape(1, -1, *[1] * isinstance(value, list))
        for key, value in data.items()
    }


def used(model: Model, batch: dict, name: str, index: tuple[int, ...]) -> bool:
    """Whether an entry of the noise is used: that of known data is not."""
    return name not in model.graph.observed or not bool(batch[f"{name}?"][index[-3], 0, index[-1]])


def nodes_of(model: Model, plan: Plan, batch: dict) -> tuple[dict, Tensor] | None:
    """Values for all the noise, a row each, and the weights of the Gaussian ones."""
    steps = model._extent(batch)[1]
    layout = plan.layout(1, steps, dropout=False)
    places = [
        (name, index)
        for name, (_, shape) in layout.items()
        for index in itertools.product(*(range(n) for n in shape))
        if used(model, batch, name, index)
    ]
    gaussian = sum(layout[name][0] == "normal" for name, _ in places)
    if gaussian > max(NODES):
        return None
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES[max(gaussian, 1)])
    values, shares = [], []
    for name, _ in places:
        binary = layout[name][0] == "logistic"
        values.append(np.array([-1e4, 1e4]) if binary else nodes)
        shares.append(np.ones(2) if binary else weights / weights.sum())
    rows = [torch.as_tensor(each.reshape(-1)) for each in np.meshgrid(*values, indexing="ij")]
    share = [torch.as_tensor(each.reshape(-1)) for each in np.meshgrid(*shares, indexing="ij")]
    noise = {
        name: torch.zeros(*shape[:-2], len(rows[0]), shape[-1], dtype=torch.float64)
        for name, (_, shape) in layout.items()
    }
    for (name, index), row in zip(places, rows, strict=True):
        noise[name][*index[:-2], :, index[-1]] = row
    return noise, math.prod(share, start=torch.ones(1, dtype=torch.float64))


def gradients(model: Model, data: dict, **choices) -> tuple[Tensor, Tensor] | None:
    """The mean of the estimator's gradient, and the gradient of the bound's mean."""
    batch = model.prepare(gaps=True, **data)
    plan = plan_of(model, batch, **choices)
    plain = plan_of(model, batch, **(choices | {"gradient": "plain", "how": None}))
    found = nodes_of(model, plan, batch)
    if found is None:
        return None
    noise, share = found
    batch = {key: value.repeat(1, len(share), 1) for key, value in batch.items()}
    value = estimate(plan, model.factors, batch, noise).value
    # The same value without the score function; its probability is part of the mean.
    score = plain.scored
    draws = {
        name: replace(one, draw=Draw.SAMPLE) if name in score else one
        for name, one in (plain.choices | dict(plain.completions)).items()
    }
    plain = replace(
        plain,
        choices={name: draws[name] for name in plain.choices},
        completions={name: draws[name] for name in plain.completions},
    )
    working = Estimate(plain, model.factors, batch, noise)
    for name in score:
        share = share * working.log_drawn(name).movedim(-2, 0).flatten(1).sum(1).exp()
    torch.testing.assert_close(share.sum(), torch.ones((), dtype=torch.float64))
    parameters = list(model.parameters())

    def gradient(total: Tensor) -> Tensor:
        parts = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                for g, p in zip(parts, parameters, strict=True)
            ]
        )

    return gradient((share.detach() * value).sum()), gradient((share * working.bound().value).sum())


@pytest.mark.parametrize("name", SMALL)
def test_the_mean_of_the_gradient_is_the_gradient_of_the_mean(name):
    model, data = small(name)
    compared = set()
    observed = [name for name in data if bool(data[name].isnan().any())]
    for bound, samples, gradient, word in itertools.product(
        ["elbo", "iwae"], [1, 2], ["plain", "stl", "dreg"], ["", "score"]
    ):
        choices = {"bound": bound, "samples": samples, "gradient": gradient}
        choices |= {"how": dict.fromkeys(observed, word)} if word else {}
        try:
            both = gradients(model, data, **choices)
        except ValueError:  # refused
            continue
        if both is not None:
            compared.add((bound, samples, gradient, word))
            torch.testing.assert_close(*both, rtol=0, atol=1e-4)  # the error of the quadrature
    assert len(compared) >= 2, compared
    if name in ("a Gaussian past", "no time, q of a node of p"):
        assert {("elbo", 1, "stl", ""), ("iwae", 2, "dreg", ""), ("iwae", 2, "plain", "score")} <= (
            compared
        )


def test_detached_draws_are_biased_and_said_to_be():
    model, data = small("a Gaussian past")
    batch = model.prepare(gaps=True, **data)
    plan = plan_of(model, batch, how={"x": "detached"})
    assert plan.biased == {
        "x": "the gradient leaves out how the drawn entries of x depend on the parameters; the "
        "value is unbiased"
    }
    noise = model.draw_noise(plan, batch, seed=0)
    usual = plan_of(model, batch)
    assert not usual.biased
    one, other = (estimate(each, model.factors, batch, noise).value for each in (plan, usual))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    p = list(model.theta())
    assert not torch.allclose(
        torch.autograd.grad(one.sum(), p)[0], torch.autograd.grad(other.sum(), p)[0]
    )


# The closed form of a KL term ---------------------------------------------------------------------


def test_a_closed_form_does_not_hold_across_missing_entries():
    """p(z | x) depends on z if x is drawn after z: by q(a | z), p(x | a)."""
    model, data = small("no time, the closed form does not hold")
    known = model.plan()
    assert known.choices["z"].term is Term.CLOSED
    batch = model.prepare(gaps=True, **data)
    plan = plan_of(model, batch)
    assert plan.choices["z"].term is Term.ENTROPY
    assert "p conditions z on x, which depends on z under q" in plan.choices["z"].why_term
    found = nodes_of(model, plan, batch)
    assert found is not None
    noise, share = found
    rows = {key: value.repeat(1, len(share), 1) for key, value in batch.items()}
    with torch.no_grad():
        working = Estimate(plan, model.factors, rows, noise)
        z, a = (working.program.values[name].reshape(-1, 1) for name in "za")
        x, y = working.program.values["x"].reshape(-1, 1), rows["y"].reshape(-1, 1)

        def factor(entry: str, **parents: Tensor) -> td.Distribution:
            module = model.factors[entry]
            return module.distribution(module(parents))

        q = factor("q(z|y)", y=y).log_prob(z) + factor("q(a|z, y)", z=z, y=y).log_prob(a)
        prior = factor("p(z|x)", x=x)
        p = factor("p(a)").log_prob(a) + prior.log_prob(z) + factor("p(y|z)", z=z).log_prob(y)
        expected = (share * (p - q).reshape(-1)).sum()
        torch.testing.assert_close((share * working.bound().value).sum(), expected)
        # With KL(q(z|y) ‖ p(z|x)) in closed form the result would be another one.
        closed = td.kl_divergence(factor("q(z|y)", y=y), prior) - (
            factor("q(z|y)", y=y).log_prob(z) - prior.log_prob(z)
        )
        assert abs(float((share * closed.reshape(-1)).sum())) > 0.01
        assert expected < model.log_evidence(method="exact", **data).value[0]


def test_the_kl_terms_of_a_vrnn_stay_in_closed_form():
    plan = vrnn(Normal).plan(partial=["x"])
    assert plan.choices["z"].term is Term.CLOSED
    backward = build(
        {"z[t] | x[t-1]": Normal(1), "x[t] | z[t]": Normal(1)},
        {"z[t] | z[t+1], x[t]": Normal()},
    )
    assert backward.plan().choices["z"].term is Term.CLOSED
    assert backward.plan(partial=["x"]).choices["z"].term is Term.ENTROPY


# The value ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [Normal, Bernoulli, MultivariateNormal])
def test_the_importance_weights_are_those_of_particles_that_are_not_resampled(family):
    """Two implementations, one with a loop for the particles' steps, at the same noise."""
    model = vrnn(family)
    x = with_gaps(model.sample(4, steps=5, seed=1)["x"])
    batch = model.prepare(gaps=True, x=x, lengths=[5, 3, 5, 4])
    plan = plan_of(model, batch, bound="iwae", samples=3)
    other = plan_of(model, batch, bound="particles", samples=3, resample=0)
    noise = model.draw_noise(plan, batch, seed=0)
    assert noise.keys() == model.draw_noise(other, batch, seed=0).keys()
    torch.testing.assert_close(
        *(estimate(each, model.factors, batch, noise).value for each in (plan, other))
    )


def test_rows_without_gaps_are_the_same_beside_rows_with_gaps():
    model = vrnn(Normal)
    x = model.sample(4, steps=5, seed=1)["x"]
    gappy = x.clone()
    gappy[0, 2], gappy[3, 1, 0] = NAN, NAN
    batch = model.prepare(gaps=True, x=gappy)
    plan = plan_of(model, batch)
    noise = model.draw_noise(plan, batch, seed=0)
    value = estimate(plan, model.factors, batch, noise).value
    alone = model.prepare(x=x)
    found = model.elbo(x=x, noise={"z": noise["z"]})
    torch.testing.assert_close(value[1:3], found.value[1:3], rtol=1e-12, atol=0)
    # The same computation, with a mask that marks all entries as known.
    whole = alone | {"x?": torch.ones_like(alone["x"], dtype=torch.bool)}
    assert torch.equal(estimate(plan, model.factors, whole, noise).value[1:3], value[1:3])


@pytest.mark.parametrize("missing", ["zeros", "mask"])
def test_q_reads_missing_entries_as_before(missing):
    """q's network sees zeros (and the mask), p's the drawn entries."""
    model = build(
        {"z[t] | z[t-1]": Normal(1), "x[t] | x[t-1], z[t]": Normal(2)},
        {"z[t] | z[t-1], x[t]": Normal(net=mlp(3))},
        missing=missing,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = model.sample(2, steps=3, seed=0)["x"]
    x[0, 1] = NAN
    batch = model.prepare(gaps=True, x=x)
    plan = plan_of(model, batch)
    working = Estimate(plan, model.factors, batch, model.draw_noise(plan, batch, seed=0))
    filled = working.program.values["x"][0]
    assert bool((filled[1, 0] != 0).all())
    assert torch.equal(filled[:, 1], batch["x"][:, 1])
    entry = model.graph.rule("q", "z")
    z = working.program.values["z"]
    before = torch.cat([torch.zeros_like(z[..., :1, :, :]), z[..., :-1, :, :]], -3)
    masks = {"x[t]": (~batch["x?"]).double()} if missing == "mask" else {}
    raw = model.factors[entry.id]({"z[t-1]": before, "x[t]": batch["x"]}, [], masks)
    torch.testing.assert_close(working.program.raw(entry).expand_as(raw), raw)


def test_partly_known_classes_are_drawn_as_a_whole():
    model = build({"z": Normal(1), "x | z": OneHot(3), "y | x": Normal(1)}, {"z | y": Normal()})
    x = torch.eye(3, dtype=torch.float64)[[0, 1]]
    x[0, 2] = NAN
    batch = model.prepare(gaps=True, x=x, y=torch.zeros(2, 1))
    plan = plan_of(model, batch, samples=50)
    working = Estimate(plan, model.factors, batch, model.draw_noise(plan, batch, seed=0))
    drawn = working.program.values["x"][:, 0, 0]
    assert bool((drawn.sum(-1) == 1).all())
    assert bool((drawn.sum(0) > 0).all())


def test_mixtures_and_seeded_families_have_gaps_too():
    """Families without explicit noise draw by a seed, with the score function."""
    for family, draw in ((Mixture, Draw.SCORE), (Poisson, Draw.SCORE), (Beta, Draw.PATHWISE)):
        model = build(
            {"z[t] | z[t-1]": Normal(1), "x[t] | x[t-1], z[t]": family(2)},
            {"z[t] | z[t-1], x[t]": Normal()},
        )
        x = model.sample(3, steps=4, seed=0)["x"].clamp(1e-3)
        x = x.clamp(max=1 - 1e-3) if family is Beta else x.round() if family is Poisson else x
        x[0, 1, 0], x[1, 2] = NAN, NAN
        plan = model.plan(partial=["x"], samples=2)
        assert plan.completions["x"].draw is draw
        bound = model.elbo(x=x, samples=2, seed=0)
        assert bool(bound.value.isfinite().all())
        bound.value.sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.theta() if p.grad is not None)


def test_a_latent_of_classes_in_time_is_drawn():
    """Enumerated, it would be remembered by the missing entries; the error says so."""
    model = build(
        {"z[t] | z[t-1]": OneHot(2), "x[t] | x[t-1], z[t]": Normal(1)},
        {"z[t] | z[t-1], x[t]": OneHot()},
    )
    x = with_gaps(model.sample(3, steps=4, seed=0)["x"])
    with pytest.raises(ValueError, match="x has missing entries that p reads, which cannot be"):
        model.elbo(x=x)
    assert model.elbo(x=x, how={"z": "score"}, samples=2, seed=0).value.shape == (3,)


def test_bayes_rule_beside_missing_entries():
    """Exact() sums over y at draws of x; the bound stays below the evidence."""
    model = build(
        {
            "y": OneHot(2, learned=True),
            "x | y": Normal(1),
            "w | x, y": Normal(1, scale=1.0),
        },
        {"y | x, w": Exact()},
    )
    data = {"x": torch.tensor([[NAN], [0.3]]), "w": torch.tensor([[1.0], [0.2]])}
    bound = model.elbo(samples=2000, seed=0, **data)
    exact = model.log_evidence(method="exact", **data).value
    assert bound.value[0] < exact[0]
    torch.testing.assert_close(bound.value[1], exact[1])


# Messages -----------------------------------------------------------------------------------------


def test_one_sample_is_refused_where_the_gradient_needs_two():
    model = vrnn(Bernoulli)
    x = with_gaps(model.sample(2, steps=3, seed=0)["x"])
    with pytest.raises(ValueError) as error:
        model.elbo(x=x)
    assert str(error.value) == (
        "x has missing entries that p reads. They are drawn from p, but a Bernoulli sample is no "
        "differentiable function of its parameters, so that its gradient compares samples. Ask for "
        "samples=2 or more, or for the biased how={'x': \"detached\"}. If only the ends of rows "
        "are missing (padding), pass lengths= instead."
    )
    model.elbo(x=x, how={"x": "detached"})
    model.elbo(x=x, samples=2)


REFUSED = [
    (Bernoulli, {"how": {"x": "pathwise"}}, "a Bernoulli sample is not a differentiable function"),
    (Bernoulli, {"how": {"x": "gumbel"}}, "x is observed, and p draws its missing entries. Choose"),
    (Normal, {"how": {"x": "score"}}, "compares samples. Ask for samples=2 or more"),
    (
        Bernoulli,
        {"bound": "iwae", "samples": 2, "gradient": "dreg"},
        "and missing entries that p draws, to be pathwise, but x is drawn by 'score'",
    ),
    (
        Normal,
        {"bound": "particles", "samples": 2, "how": {"x": "detached"}},
        "particles draw its missing entries from p in one way only",
    ),
]


@pytest.mark.parametrize(("family", "choices", "message"), REFUSED)
def test_what_is_refused(family, choices, message):
    with pytest.raises(ValueError, match=message):
        vrnn(family).plan(partial=["x"], **choices)


def test_requests_for_variables_without_gaps_change_nothing():
    model = vrnn(Bernoulli)
    assert model.plan(how={"x": "detached"}).completions == {}
    assert not model.plan(how={"x": "detached"}).biased
    with pytest.raises(ValueError, match="how names 'h', which is not a latent"):
        model.plan(how={"h": "detached"})


def test_gaps_that_no_order_can_draw_are_refused_with_the_reason():
    model = build(
        {"z[t]": Normal(1), "x[t] | z[t]": Normal(2), "f[t] | x[t]": Deterministic(3),
         "y[t] | f[t]": Normal(1)},
        {"z[t] | f[t]": Normal()},
    )  # fmt: skip
    x = torch.zeros(1, 3, 2)
    x[0, 1] = NAN
    data = {"x": x, "y": torch.zeros(1, 3, 1)}
    with pytest.raises(ValueError, match=r"which cannot be drawn: .*f\[t\] → x\[t\] → z\[t\]"):
        model.elbo(**data)


def test_an_estimate_never_reads_missing_entries_as_zeros():
    model = vrnn(Normal)
    batch = model.prepare(gaps=True, x=with_gaps(model.sample(2, steps=3, seed=0)["x"]))
    with pytest.raises(ValueError, match="x has missing entries that p reads, and this estimate"):
        Estimate(model.plan(), model.factors, batch, model.draw_noise(model.plan(), batch))
    with pytest.raises(ValueError, match="x has missing entries but p reads it"):
        model.log_prob(x=torch.full((1, 2, 3), NAN), z=torch.zeros(1, 2, 2))


def test_noise_and_elbo_say_the_same_of_gaps():
    model = vrnn(Bernoulli)
    x = with_gaps(model.sample(2, steps=3, seed=0)["x"])
    with pytest.raises(ValueError) as said:
        model.elbo(x=x)
    with pytest.raises(ValueError) as again:
        model.draw_noise(model.plan(partial=["x"]), model.prepare(x=x, gaps=True))
    assert str(said.value) == str(again.value)
    with pytest.raises(
        ValueError, match=r"or use elbo\(\), which has p draw them \(for draw_noise"
    ):
        model.prepare(x=x)
    batch = model.prepare(x=x, gaps=True)
    with pytest.raises(ValueError, match="name x in the plan's partial="):
        model.draw_noise(model.plan(samples=2), batch)
    noise = model.draw_noise(model.plan(samples=2, partial=["x"]), batch, seed=1)
    bounds = [model.elbo(x=x, samples=2, **kind) for kind in ({"noise": noise}, {"seed": 1})]
    assert torch.equal(bounds[0].value, bounds[1].value)


def test_noise_with_exchanged_axes_is_refused():
    model = vrnn(Normal)
    x = model.sample(4, steps=3, seed=0)["x"]
    noise = model.draw_noise(model.plan(samples=2), model.prepare(x=x))
    (name, value), *_ = noise.items()
    for order in ((1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        wrong = {**noise, name: value.permute(order)}
        message = r"needs \[2, 3, 4, \d\]: samples, steps, rows, entries"
        with pytest.raises(ValueError, match=message):
            model.elbo(x=x, samples=2, noise=wrong)


def test_the_explanation_says_what_is_drawn_and_why():
    model = vrnn(Bernoulli)
    text = model.explain(partial=["x"], samples=2)
    for line in (
        "  xₜˢ = xₜ where it is known, elsewhere xₜˢ ~ p(xₜ|hₜ, zₜˢ)",
        'x: "h[t] | h[t-1], x[t-1], z[t-1]" reads it, so its missing entries are drawn from '
        "p(x[t]|h[t], z[t]), given the known entries of the step.",
        "   log p − log q of the drawn entries is zero: the bound has log p of the known ones "
        "only. q reads the data.",
        "   gradient of the draws score: a Bernoulli sample is no differentiable function of its "
        "parameters: score function with a leave-one-out baseline.",
    ):
        assert line in text.splitlines()
    autoregressive = build(
        {"z[t]": Normal(1), "x[t] | x[t-1], z[t]": Normal(1)}, {"z[t] | x[t]": Normal()}
    )
    text = autoregressive.explain(partial=["x"])
    assert "log p(xₜ|xₜ₋₁ˢ, zₜˢ) − KL(q(zₜ|xₜ) ‖ p(zₜ))" in text
    assert "x: biased:" in autoregressive.explain(partial=["x"], how={"x": "detached"})
    assert "missing" not in autoregressive.explain()


def test_linear_models_have_gaps_too():
    """A model whose x has only linear factors, with gaps of single entries."""
    model = build(
        {"z[t] | z[t-1]": Normal(1, scale=0.5), "x[t] | x[t-1], z[t]": Normal(2, scale=0.5)},
        {"z[t] | z[t-1], x[t]": Normal(net=linear(), scale=0.5)},
    )
    x = with_gaps(model.sample(3, steps=6, seed=0)["x"])
    exact = model.log_evidence(x=x, method="exact").value
    with torch.no_grad():
        values = [
            model.elbo(x=x.repeat(500, 1, 1), bound="iwae", samples=k, seed=k).value.reshape(500, 3)
            for k in (1, 4, 16, 64)
        ]
    means = torch.stack([value.mean(0) for value in values])
    errors = torch.stack([value.std(0) / 500**0.5 for value in values])
    assert bool((means.diff(dim=0) > 0).all())
    assert bool((means - 4 * errors < exact).all())
    assert bool((exact - means[-1] < 0.5 * (exact - means[0])).all())
