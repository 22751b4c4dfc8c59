"""The bound of particles: identities with iwae, unbiasedness, exact gradients, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aevb import (
    LSTM,
    Bernoulli,
    Deterministic,
    Mixture,
    Model,
    Normal,
    OneHot,
    Poisson,
    linear,
    mlp,
)
from aevb.derive.noise_names import RESAMPLING
from aevb.derive.plan import Plan
from aevb.estimate.estimators import estimate
from aevb.estimate.particle_filter import ParticleFilter

NAN = math.nan


def build(p: dict, q: dict, seed: int = 0, **options) -> Model:
    torch.manual_seed(seed)
    return Model(p=p, q=q, **options).double()


def vrnn(q: dict | None = None, dropout: float = 0.0) -> Model:
    return build(
        {
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(5, layers=2),
            "z[t] | h[t]": Normal(2, net=mlp(4)),
            "x[t] | h[t], z[t]": Bernoulli(6, net=mlp(4, dropout=dropout)),
        },
        q or {"z[t] | h[t], x[t]": Normal(net=mlp(4, dropout=dropout))},
    )


def state_space(q_scale: float = 1.0) -> Model:
    """A linear-Gaussian model, whose evidence is exact."""
    return build(
        {
            "z[0]": Normal(1, learned=True),
            "z[t] | z[t-1]": Normal(1, net=linear(), scale=0.7),
            "x[t] | z[t]": Normal(1, net=linear(), scale="learned"),
        },
        {"z[t] | z[t-1], x[t]": Normal(net=linear(), scale=q_scale)},
    )


MODELS = {
    "vrnn": vrnn(),
    "smoothing": vrnn({"b[t] | b[t+1], x[t]": LSTM(3), "z[t] | h[t], b[t]": Normal(net=mlp(4))}),
    "static": build(
        {
            "c": Normal(1),
            "z[t] | z[t-1], c": Normal(1),
            "x[t] | z[t], c": Bernoulli(6),
            "y | z[T], c": Normal(1),
        },
        {
            "b[t] | b[t+1], x[t]": LSTM(3),
            "c | b[0]": Normal(),
            "z[t] | z[t-1], b[t], c": Normal(),
        },
    ),
    "ends": build(
        {
            "z[0]": Normal(1),
            "z[t] | z[t-1]": Normal(1, net=linear(), scale=0.7),
            "x[t] | z[t]": Normal(2, net=linear(), scale=0.8),
            "x[T] | z[T]": Normal(2, net=linear(), scale=0.5),
        },
        {"z[t] | z[t-1], x[t]": Normal(scale=1.5), "z[T] | x[T]": Normal(scale=1.5)},
    ),
    "first": build(
        {
            "z[t] | z[t-1]": Normal(2),
            "h[t] | h[t-1], z[t-1]": LSTM(3),
            "x[0] | z[0]": Normal(2),
            "x[t] | z[t], h[t]": Normal(2),
        },
        {"z[0] | x[0]": Normal(), "z[t] | z[t-1], x[t]": Normal()},
    ),
    "two latents": build(
        {
            "w[t] | w[t-1]": Normal(1),
            "f[t] | w[t]": Deterministic(2),
            "z[t] | z[t-1], f[t]": Normal(2),
            "x[t] | z[t], w[t]": Normal(2),
        },
        {"z[t] | z[t-1], x[t]": Normal(), "w[t] | z[t], w[t-1], x[t]": Normal()},
    ),
    "dropout": vrnn(dropout=0.3),
}
LENGTHS = [4, 2, 1]


def rows_of(model: Model) -> dict:
    drawn = model.sample(3, steps=4, seed=1)
    return {key: drawn[key] for key in model.graph.observed} | {"lengths": LENGTHS}


def gradients(model: Model, value: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value.sum(), list(model.parameters()), allow_unused=True)
    zero = [torch.zeros_like(parameter) for parameter in model.parameters()]
    return [b if a is None else a for a, b in zip(found, zero, strict=True)]


# Identities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "resample"), [(1, None), (5, 0)])
@pytest.mark.parametrize("name", MODELS)
def test_without_resampling_it_is_iwae(name, k, resample):
    """One particle, or none resampled: the same value, terms and gradients for the same noise."""
    model = MODELS[name]
    data = rows_of(model)
    batch = model.prepare(**data)
    plan = model.plan(bound="particles", samples=k, resample=resample)
    noise = model.draw_noise(plan, batch, seed=0)
    assert noise.keys() == model.draw_noise(model.plan(bound="iwae", samples=k), batch).keys()
    ours = model.elbo(bound="particles", samples=k, resample=resample, noise=noise, **data)
    iwae = model.elbo(bound="iwae", samples=k, noise=noise, **data)
    torch.testing.assert_close(ours.value, iwae.value)
    assert ours.terms.keys() == iwae.terms.keys()
    for term in ours.terms:
        torch.testing.assert_close(ours.terms[term], iwae.terms[term].detach())
    torch.testing.assert_close(gradients(model, ours.value), gradients(model, iwae.value))


def test_known_latents_and_missing_entries_are_those_of_iwae():
    model = MODELS["ends"]
    x = rows_of(model)["x"]
    x[0, 1, 0] = x[1, 1] = NAN
    z = torch.full((3, 4, 1), NAN, dtype=torch.float64)
    z[0, 2], z[1, 0], z[2, 0] = 0.3, -1.0, 0.5
    data = {"x": x, "z": z, "lengths": LENGTHS}
    noise = model.draw_noise(model.plan(bound="iwae", samples=4), model.prepare(**data), seed=0)
    ours = model.elbo(bound="particles", samples=4, resample=0, noise=noise, **data)
    iwae = model.elbo(bound="iwae", samples=4, noise=noise, **data)
    torch.testing.assert_close(ours.value, iwae.value)
    for term in iwae.terms:
        torch.testing.assert_close(ours.terms[term], iwae.terms[term].detach())
    torch.testing.assert_close(gradients(model, ours.value), gradients(model, iwae.value))


def test_all_latents_known():
    model = MODELS["ends"]
    drawn = model.sample(3, steps=4, seed=1)
    found = model.elbo(bound="particles", samples=3, seed=0, x=drawn["x"], z=drawn["z"])
    torch.testing.assert_close(found.value, model.log_prob(x=drawn["x"], z=drawn["z"]))


def test_weights_of_kl_terms_are_those_of_iwae():
    model = MODELS["static"]
    data = rows_of(model)
    noise = model.draw_noise(model.plan(bound="iwae", samples=4), model.prepare(**data), seed=0)
    for weight in (0.3, {"z": 0.5}):
        ours = model.elbo(
            bound="particles", samples=4, resample=0, noise=noise, kl_weight=weight, **data
        )
        iwae = model.elbo(bound="iwae", samples=4, noise=noise, kl_weight=weight, **data)
        torch.testing.assert_close(ours.value, iwae.value)
        torch.testing.assert_close(ours.objective, iwae.objective)
        assert (ours.objective - ours.value).abs().min() > 0.01
        torch.testing.assert_close(
            gradients(model, ours.objective), gradients(model, iwae.objective)
        )


@pytest.mark.parametrize("gradient", ["plain", "score"])
@pytest.mark.parametrize("name", ["vrnn", "smoothing", "static", "ends"])
def test_padding_and_other_rows_change_nothing(name, gradient):
    """A row alone, at its own length, has the same value and gradients."""
    model, choices = MODELS[name], {"bound": "particles", "samples": 4, "gradient": gradient}
    data = rows_of(model)
    plan = model.plan(**choices)
    batch = model.prepare(**data)
    noise = model.draw_noise(plan, batch, seed=0)
    whole = estimate(plan, model.factors, batch, noise)
    for row, length in enumerate(LENGTHS):
        alone = {
            key: value[row : row + 1, :length] if model.graph.timed[key] else value[row : row + 1]
            for key, value in data.items()
            if key != "lengths"
        }
        cut = {
            key: value[:, :length, row : row + 1] if value.shape[-3] > 1 else value[:, :, [row]]
            for key, value in noise.items()
        }
        found = model.elbo(noise=cut, lengths=length, **choices, **alone)
        torch.testing.assert_close(found.value[0], whole.value[row])
        torch.testing.assert_close(
            gradients(model, found.value), gradients(model, whole.value[row])
        )
        model.zero_grad()
        whole = estimate(plan, model.factors, batch, noise)


@pytest.mark.parametrize("name", MODELS)
def test_densities_of_all_steps_at_once_are_those_of_the_loop(name):
    """The filter itself is differentiable; the bound takes densities and gradients together."""
    model = MODELS[name]
    batch = model.prepare(**rows_of(model))
    plan = model.plan(bound="particles", samples=4, resample=0.9)
    noise = model.draw_noise(plan, batch, seed=0)
    whole = estimate(plan, model.factors, batch, noise).value
    loop = ParticleFilter(plan, model.factors, batch, noise, threshold=0.9).run()
    assert loop.resampled.max() > 0
    torch.testing.assert_close(whole, loop.value)
    torch.testing.assert_close(gradients(model, whole), gradients(model, loop.value))
    with torch.no_grad():
        torch.testing.assert_close(estimate(plan, model.factors, batch, noise).value, loop.value)


class NoReading(TorchDispatchMode):
    """Refuse operations for which the host waits for numbers of a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradient", ["plain", "score"])
@pytest.mark.parametrize("name", MODELS)
def test_no_step_reads_a_number(name, gradient):
    """A GPU can then compute the steps without waiting for the host."""
    model = MODELS[name]
    batch = model.prepare(**rows_of(model))
    plan = model.plan(bound="particles", samples=3, gradient=gradient)
    noise = model.draw_noise(plan, batch, seed=0)
    with NoReading():
        estimate(
            plan, model.factors, batch, noise, kl_weight=torch.tensor(0.5)
        ).objective.sum().backward()
    model.zero_grad()


# Unbiasedness -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices",
    [{}, {"resample": 1.0}, {"gradient": "score"}, {"resample": 0.9}],
    ids=["half", "always", "independently", "often"],
)
def test_the_mean_of_its_exponential_is_the_evidence(choices):
    model, n = state_space(), 20_000
    x = model.sample(1, steps=6, seed=2)["x"]
    exact = model.log_evidence(x=x, method="exact").value
    means = []
    for k in (2, 4, 16):
        with torch.no_grad():
            found = model.elbo(
                bound="particles", samples=k, seed=0, x=x.expand(n, -1, -1), **choices
            ).value
        ratio = (found - exact).exp()
        # three standard errors: one seed in 30 fails for one of the twelve means
        assert abs(ratio.mean() - 1) < 3 * ratio.std() / n**0.5
        means.append(float((exact - found).mean()))
    assert means[0] > 2 * means[1] > 6 * means[2] > 0  # the gap falls about as 1/K


def test_gaps_that_p_reads_are_marginalised():
    """The mean of exp is p of the known entries, by the joint Gaussian of a short chain."""
    model = build(
        {
            "z[t] | z[t-1]": Normal(1, net=linear(bias=False), scale=0.6),
            "x[t] | x[t-1], z[t]": Normal(1, net=linear(bias=False), scale=0.7),
        },
        {"z[t] | z[t-1], x[t]": Normal(net=linear(), scale=1.0)},
    )
    x = model.sample(1, steps=3, seed=1)["x"]
    grid = torch.linspace(-9, 9, 721, dtype=torch.float64)
    filled = x.repeat(len(grid), 1, 1)
    filled[:, 1, 0] = grid
    exact = torch.trapezoid(model.log_evidence(x=filled, lengths=3).value.exp(), grid).log()
    x[0, 1] = NAN
    with torch.no_grad():
        found = model.elbo(bound="particles", samples=4, seed=0, x=x.expand(20_000, -1, -1)).value
    ratio = (found - exact).exp()
    assert abs(ratio.mean() - 1) < 3 * ratio.std() / 20_000**0.5  # one seed in 300 fails


def test_gradients_reach_p_through_its_draws_of_gaps():
    """With one particle nothing is resampled: the gradient is that of the same computation."""
    model = build(
        {
            "z[t] | z[t-1]": Normal(1, scale=0.6),
            "x[t] | x[t-1], z[t]": Normal(1, scale=0.7),
        },
        {"z[t] | z[t-1], x[t]": Normal(scale=1.0)},
    )
    x = model.sample(2, steps=3, seed=1)["x"]
    x[0, 1] = x[1, 0] = NAN
    plan = model.plan(bound="particles", samples=1, partial=["x"])
    assert plan.completed == {"x"}
    noise = model.draw_noise(plan, model.prepare(gaps=True, x=x), seed=0)
    assert noise["x"].shape == (1, 3, 2, 1)

    def value() -> Tensor:
        return model.elbo(bound="particles", samples=1, noise=noise, x=x).value.sum()

    for parameter, gradient in zip(model.parameters(), gradients(model, value()), strict=True):
        _assert_derivative(parameter, gradient, lambda: value().item())


def _assert_derivative(parameter: Tensor, gradient: Tensor, function) -> None:
    """Compare a gradient with central differences of a function, entry by entry."""
    flat, step = parameter.data.view(-1), 1e-5
    with torch.no_grad():
        for i, expected in enumerate(gradient.reshape(-1).tolist()):
            before = flat[i].item()
            flat[i] = before + step
            up = function()
            flat[i] = before - step
            down = function()
            flat[i] = before
            assert (up - down) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-8)


# Gradients ----------------------------------------------------------------------------------------


def toy(steps: int, k: int, gradient: str) -> tuple[Model, dict, Plan, dict]:
    """A short state space with fixed noise; only the random numbers of resampling are free."""
    model = state_space()
    x = 2 * model.sample(1, steps=steps, seed=4)["x"]
    plan = model.plan(bound="particles", samples=k, gradient=gradient, resample=1.0)
    batch = model.prepare(x=x)
    return model, batch, plan, model.draw_noise(plan, batch, seed=3)


def edges_at(model: Model, batch: dict, plan: Plan, noise: dict, t: int) -> Tensor:
    """The cumulative weights after step t, [K + 1]."""
    with torch.no_grad():
        steps = list(ParticleFilter(plan, model.factors, batch, noise, threshold=1.0))
    return torch.cat([torch.zeros(1).double(), steps[t].log_weights[:, 0].exp().cumsum(0)])


def ways_to_resample(
    model: Model, batch: dict, plan: Plan, noise: dict, t: int = 0
) -> Iterator[tuple[float, dict]]:
    """All choices of ancestors: their probabilities, and noise that makes them."""
    k, steps = plan.samples, batch["x"].shape[0]
    if t == steps - 1:
        yield 1.0, noise
        return
    edges = edges_at(model, batch, plan, noise, t)
    if plan.gradient == "score":  # independent ancestors
        cells = [
            (math.prod(float(edges[a + 1] - edges[a]) for a in ancestors), ancestors)
            for ancestors in itertools.product(range(k), repeat=k)
        ]
        uniforms = [
            (p, torch.stack([(edges[a] + edges[a + 1]) / 2 for a in ancestors]))
            for p, ancestors in cells
        ]
    else:  # the ancestors are constant between these numbers
        cuts = torch.cat([(edges * k) % 1, torch.ones(1).double()]).sort().values
        uniforms = [
            (float(b - a), ((a + b) / 2).reshape(1)) for a, b in itertools.pairwise(cuts) if b > a
        ]
    for p, uniform in uniforms:
        chosen = noise[RESAMPLING].clone()
        chosen[:, t, 0, 0] = uniform
        for after, last in ways_to_resample(
            model, batch, plan, noise | {RESAMPLING: chosen}, t + 1
        ):
            yield p * after, last


def expectation(model: Model, batch: dict, plan: Plan, noise: dict) -> float:
    """The exact mean of the bound over all choices of ancestors."""
    return sum(
        p * estimate(plan, model.factors, batch, one).value.item()
        for p, one in ways_to_resample(model, batch, plan, noise)
    )


def mean_gradient(model: Model, batch: dict, plan: Plan, noise: dict) -> list[Tensor]:
    """The exact mean of the estimator's gradient over all choices of ancestors."""
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for p, one in ways_to_resample(model, batch, plan, noise):
        found = gradients(model, estimate(plan, model.factors, batch, one).value)
        total = [a + p * b for a, b in zip(total, found, strict=True)]
    return total


@pytest.mark.parametrize(("steps", "k"), [(2, 2), (2, 3), (3, 2)])
def test_the_score_gradient_is_that_of_the_exact_expectation(steps, k):
    """Against differences of the mean over all ancestors, which is enumerated."""
    model, batch, plan, noise = toy(steps, k, "score")
    assert sum(p for p, _ in ways_to_resample(model, batch, plan, noise)) == pytest.approx(1)
    found = mean_gradient(model, batch, plan, noise)
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        _assert_derivative(parameter, gradient, lambda: expectation(model, batch, plan, noise))


def test_the_plain_gradient_leaves_out_the_term_of_resampling():
    """It is the derivative with the probabilities of the ancestors held fixed, and no other."""
    model, batch, plan, noise = toy(2, 2, "plain")
    ways = list(ways_to_resample(model, batch, plan, noise))
    assert len(ways) > 1
    found = mean_gradient(model, batch, plan, noise)
    step, missed = 1e-5, []
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        flat = parameter.data.view(-1)
        for i, expected in enumerate(gradient.reshape(-1).tolist()):
            before, fixed, whole = flat[i].item(), [], []
            for sign in (1, -1):
                flat[i] = before + sign * step
                fixed.append(
                    sum(p * estimate(plan, model.factors, batch, w).value.item() for p, w in ways)
                )
                whole.append(expectation(model, batch, plan, noise))
                flat[i] = before
            assert (fixed[0] - fixed[1]) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-8)
            missed.append(abs((whole[0] - whole[1]) / (2 * step) - expected))
    assert max(missed) > 0.01


def test_the_baseline_reduces_the_variance_of_the_score_gradient(monkeypatch):
    from aevb.estimate.particle_bound import ParticleEstimate

    model = state_space()
    x = 2 * model.sample(1, steps=8, seed=4)["x"].expand(400, -1, -1)
    bias = model.factors["p(x[t]|z[t])"].net.blocks.bias

    def spread() -> float:
        rows = []
        for seed in range(30):
            value = model.elbo(
                bound="particles", samples=4, gradient="score", x=x[:20], seed=seed
            ).value
            rows.append(torch.autograd.grad(value.sum(), bias)[0])
        return float(torch.stack(rows).var(0).sum())

    with_baseline = spread()

    def without(self, steps, real, baselines):
        after = torch.stack([step.increment for step in steps]).detach().flip(0).cumsum(0).flip(0)
        return sum(
            (after[t + 1] * step.log_weights.gather(0, step.ancestors)).sum(0)
            for t, step in enumerate(steps[:-1])
        )

    monkeypatch.setattr(ParticleEstimate, "_score", without)
    assert with_baseline < spread() / 4


# The plan -----------------------------------------------------------------------------------------


def test_explanations_say_how_particles_are_resampled():
    model = MODELS["vrnn"]
    text = model.explain(bound="particles", samples=4)
    assert "E of this estimator (particle bound, K = 4)" in text
    assert "Σₜ log Σₖ Wₜ₋₁ᵏ p(xₜ|hₜ, zₜᵏ) p(zₜᵏ|hₜ) / q(zₜᵏ|hₜ, xₜ)" in text
    assert "effective sample size 1/Σ W² below 2 (0.5 of 4)" in text
    assert "systematic resampling" in text
    assert "so it is biased; the value is not" in text
    assert text.latex.startswith(r"\sum_{t} \log \sum_{k=1}^{4} W_{t-1}^{k} \, \frac{p_\theta(")
    score = model.explain(bound="particles", samples=4, gradient="score")
    assert "After every step each particle continues an ancestor drawn independently" in score
    assert "It is unbiased." in score
    never = model.explain(bound="particles", samples=4, resample=0)
    assert "W is never resampled, so this is the same as iwae with 4 samples." in never
    gaps = model.explain(bound="particles", samples=4, partial=["x"])
    assert "x: its missing entries are drawn from p for every particle" in gaps
    assert "x: biased: a Bernoulli draw has no gradient" in gaps
    static = MODELS["static"].explain(bound="particles", samples=4)
    assert "· [p(cᵏ) / q(cᵏ|b₀)] at t = 0 · [p(y|z_Tᵏ, cᵏ)] at t = T" in static
    from aevb.notebook import cards

    cards.model_parts(MODELS["static"], bound="particles", samples=4)


CHAIN = {"s[t] | s[t-1]": OneHot(3), "x[t] | s[t]": Bernoulli(6)}
WALK = {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Normal(3)}
REFUSED = [
    (CHAIN, {"s[t] | s[t-1], x[t]": OneHot()}, {}, r"but s is a OneHot with 3 values\. Use bound"),
    (
        {"z": Normal(2), "x | z": Normal(3)},
        {"z | x": Normal()},
        {},
        r'filters sequences, but no latent has a time axis\. Use bound="iwae"',
    ),
    (WALK, {"z[t] | z[t-1], x[t]": Mixture(components=3)}, {}, "Give z a Normal in q, or use"),
    (WALK, {"z[t] | z[t+1], x[t]": Normal()}, {}, r"reads z\[t\+1\], so that z is drawn"),
    (
        {"z[t] | z[t-1]": Poisson(2), "x[t] | z[t]": Normal(3)},
        {"z[t] | z[t-1], x[t]": Poisson()},
        {},
        "q draws z from a Poisson, which has no such gradient",
    ),
    (WALK, None, {"gradient": "stl"}, "resamples between steps, where it is biased"),
    (WALK, None, {"gradient": "dreg", "samples": 4}, 'Use gradient="plain" or "score"'),
    (WALK, None, {"gradient": "score", "samples": 1}, "which needs samples=2 or more"),
    (WALK, None, {"gradient": "score", "samples": 4, "resample": 0.5}, r"Use resample=1, or leave"),
    (WALK, None, {"gradient": "score", "samples": 4, "resample": 0}, "no row is ever resampled"),
    (WALK, None, {"resample": 1.5}, r"from 0 \(never\) to 1 \(after every step\), got 1\.5"),
    (WALK, None, {"resample": True}, "got True"),
    (WALK, None, {"how": {"z": "detached"}}, r"Leave it out of how=\."),
    (WALK, None, {"how": {"z": "closed"}}, "with a closed-form KL it would be no bound"),
    (WALK, None, {"bound": "iwae", "resample": 0.5}, "bound='iwae' has no particles"),
    (WALK, None, {"bound": "elbo", "gradient": "score"}, "resamples nothing"),
]


@pytest.mark.parametrize(("p", "q", "choices", "message"), REFUSED)
def test_what_particles_refuse(p, q, choices, message):
    model = Model(p, q or {"z[t] | z[t-1], x[t]": Normal()})
    with pytest.raises(ValueError, match=message):
        model.plan(**{"bound": "particles", **choices})


def test_gaps_that_cannot_be_drawn_are_refused_with_the_reason():
    model = build(
        {
            "z[t] | z[t-1]": Normal(1),
            "x[t] | z[t]": Normal(2),
            "f[t] | x[t]": Deterministic(3),
            "y[t] | f[t]": Normal(1),
        },
        {"z[t] | f[t]": Normal()},
    )
    x = torch.zeros(1, 3, 2)
    x[0, 1] = NAN
    with pytest.raises(ValueError, match="x has missing entries that p reads, which cannot be"):
        model.elbo(bound="particles", samples=2, x=x, y=torch.zeros(1, 3, 1))
    with pytest.raises(ValueError, match="x has missing entries that p reads, which cannot be"):
        model.elbo(bound="iwae", samples=2, x=x, y=torch.zeros(1, 3, 1))
