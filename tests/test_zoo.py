"""Tests of the documented models, exactly as declared there, and of the models of the zoo."""

import inspect
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from torch.nn.functional import relu, softplus

import aevb
from aevb import (
    LSTM,
    Bernoulli,
    ContinuousBernoulli,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    fit,
    joint,
    linear,
    mlp,
)
from aevb.estimate.estimators import estimate
from aevb.zoo import recipes, zoo

# The contract: models exactly as the documentation declares them ----------------------------------


@pytest.fixture(scope="module")
def fa():
    torch.manual_seed(0)
    return Model(  # factor analysis
        p={"z": Normal(2), "x | z": Normal(3, net=linear(bias=False), scale="learned")},
        q={"z | x": MultivariateNormal(net=linear(bias=False), covariance="shared")},
    ).double()


@pytest.fixture(scope="module")
def cvae():
    return Model(  # y has no factor in p: it is given
        p={
            "z | y": Normal(20),
            "x | y, z": ContinuousBernoulli(784, net=mlp(500, 500, dropout=0.1)),
        },
        q={"z | x, y": Normal(net=mlp(500, 500, dropout=0.1))},
        given={"y": 10},
    )


@pytest.fixture(scope="module")
def gmvae():
    torch.manual_seed(0)
    return Model(
        p={"y": OneHot(10), "z | y": Normal(64), "x | z": Bernoulli(784, net=mlp(512, 512))},
        q={"y | x": OneHot(net=mlp(512, 512)), "z | x, y": Normal(net=mlp(512, 512))},
    ).double()


VRNN = {
    "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(256, layers=2),
    "z[t] | h[t]": Normal(2, net=mlp(500, 500)),
    "x[t] | h[t], z[t]": Bernoulli(28, net=mlp(500, 500)),
}
X = (np.random.default_rng(0).random((6, 784)) > 0.7).astype(float)


def through(factor, inputs):
    """Compute a built mlp by hand: one first layer over all parents, ReLU, and the heads."""
    net = factor.net
    h = net.blocks.bias + sum(
        inputs[name] @ weight.T for name, weight in net.blocks.weights.items()
    )
    for layer in net.hidden:
        h = relu(h) @ layer.weight.T + layer.bias
    return h if net.heads is None else relu(h) @ net.heads.weight.T + net.heads.bias


def test_the_bound_is_its_terms(gmvae):
    bound = gmvae.elbo(x=X)
    assert bound.value.shape == (6,)
    assert set(bound.terms) == {"x", "kl(z)", "kl(y)"}
    assert torch.allclose(
        bound.value,
        bound.terms["x"] - bound.terms["kl(z)"] - bound.terms["kl(y)"],
        rtol=0,
        atol=1e-10,
    )


def test_the_cvae_and_the_vrnn_run_as_declared(cvae):
    bound = cvae.elbo(x=X, y=[0, 1, 2, 3, 9, 9])
    assert set(bound.terms) == {"x", "kl(z)"}
    assert torch.isfinite(bound.value).all()
    smoothing = {
        "b[t] | b[t+1], x[t]": aevb.GRU(256),
        "z[t] | h[t], b[t]": Normal(net=mlp(500, 500)),
    }
    for q in ({"z[t] | h[t], x[t]": Normal(net=mlp(500, 500))}, smoothing):
        bound = Model(VRNN, q).elbo(x=X[:2].reshape(2, 28, 28)[:, :4])
        assert bound.value.shape == (2,)
        assert set(bound.terms) == {"x", "kl(z)"}
        assert torch.isfinite(bound.value).all()


def test_a_model_is_printed_and_explained(gmvae):
    lines = str(gmvae).splitlines()
    assert lines[0].startswith("p:  p(y) p(z|y) p(x|z)   (699,536 parameters θ)")
    assert any(line.startswith("q:  q(y|x) q(z|x, y)   (1,405,066 parameters φ)") for line in lines)
    text = gmvae.explain()
    assert text.startswith("log p(x) ≥ E of this estimator (ELBO):")
    for part in ("Σ_y q(y|x)", "log p(x|zˢ)", "KL(q(z|x, y) ‖ p(z|y))", "ε ~ N(0, I)", "10 values"):
        assert part in text
    for part in (
        r"\sum_{y} q_\phi(y \mid x)",
        r"\log p_\theta(x \mid z^{s})",
        r"D_{\mathrm{KL}}(q_\phi(z \mid x, y) \,\|\, p_\theta(z \mid y))",
    ):
        assert part in text.latex
    assert text.latex.count("{") == text.latex.count("}")


def test_the_clusters_are_the_softmax_of_qs_network(gmvae):
    probs = gmvae.posterior(x=X)["y"].probs
    expected = through(gmvae.factors["q(y|x)"], {"x": torch.tensor(X)}).softmax(-1)
    assert probs.shape == (6, 10)
    assert torch.allclose(probs, expected, rtol=0, atol=1e-12)


def test_a_fixed_class_conditions_the_generation(gmvae):
    samples = gmvae.sample(15, y=3, seed=0)
    assert {name: tuple(value.shape) for name, value in samples.items()} == {
        "y": (15, 10),
        "z": (15, 64),
        "x": (15, 784),
    }
    assert torch.equal(samples["y"], torch.eye(10, dtype=torch.float64)[3].expand(15, 10))
    assert set(samples["x"].unique().tolist()) == {0.0, 1.0}
    assert torch.equal(samples["x"], gmvae.sample(15, y=3, seed=0)["x"])
    assert not torch.equal(samples["x"], gmvae.sample(15, y=3, seed=1)["x"])
    # z | y is Gaussian with the moments of y = 3: the mean of 4,000 draws lies within 5 standard
    # errors, in each of 64 entries.
    loc, scale = through(gmvae.factors["p(z|y)"], {"y": samples["y"][:1]})[0].split(64)
    z = gmvae.sample(4000, y=3, seed=0)["z"]
    assert ((z.mean(0) - loc).abs() < 5 * softplus(scale) / 4000**0.5).all()


def test_log_prob_of_a_complete_assignment(gmvae):
    y = np.array([0, 3, 3, 9, 1, 5])
    z = np.random.default_rng(1).standard_normal((6, 64))
    vectors = torch.eye(10, dtype=torch.float64)[y]
    loc, scale = (
        part.detach().numpy()
        for part in through(gmvae.factors["p(z|y)"], {"y": vectors}).split(64, -1)
    )
    logits = through(gmvae.factors["p(x|z)"], {"z": torch.tensor(z)}).detach().numpy()
    log_prior = -np.log(10) + norm.logpdf(z, loc, np.log1p(np.exp(scale))).sum(-1)
    log_likelihood = (X * logits - np.logaddexp(0, logits)).sum(-1)
    assert np.allclose(
        gmvae.log_prob(x=X, y=y, z=z).detach(), log_prior + log_likelihood, rtol=0, atol=1e-10
    )


def test_factor_analysis_knows_its_evidence(fa):
    x = np.random.default_rng(2).standard_normal((7, 3))
    W = fa.factors["p(x|z)"].net.blocks.weights["z"].detach().numpy()
    noise = softplus(fa.factors["p(x|z)"].vectors["scale"]).detach().numpy()
    evidence = fa.log_evidence(x=x)
    assert evidence.method == "exact"
    assert torch.equal(evidence.stderr, torch.zeros(7, dtype=torch.float64))
    assert np.allclose(
        evidence.value,
        multivariate_normal.logpdf(x, np.zeros(3), W @ W.T + np.diag(noise**2)),
        rtol=0,
        atol=1e-10,
    )


def test_a_model_is_saved_and_loaded(gmvae, tmp_path):
    gmvae.save(tmp_path / "gmvae/")
    assert torch.equal(
        aevb.load(tmp_path / "gmvae/").elbo(x=X, seed=0).value, gmvae.elbo(x=X, seed=0).value
    )


# The zoo ------------------------------------------------------------------------------------------

SMALL = {"x": 5, "z": 2, "hidden": (4, 4)}
VARIANTS = {
    "fa full": ("fa", {}),
    "fa diagonal": ("fa", {"posterior": "diagonal"}),
    "fa fixed": ("fa", {"posterior": "fixed"}),
    "vae": ("vae", SMALL),
    "cvae both": ("cvae", SMALL | {"y": 3}),
    "cvae prior": ("cvae", SMALL | {"y": 3, "variant": "prior"}),
    "cvae likelihood": ("cvae", SMALL | {"y": 3, "variant": "likelihood"}),
    "gmvae": ("gmvae", SMALL | {"y": 3}),
    "m2": ("m2", SMALL | {"y": 3}),
    "vrnn filtering": ("vrnn", SMALL | {"h": 3}),
    "vrnn smoothing": ("vrnn", SMALL | {"h": 3, "posterior": "smoothing"}),
    "local level": ("local_level", {"x": 2, "start": 10}),
    "local trend": ("local_trend", {"x": 2, "start": 10}),
    "seasonal": ("seasonal", {"period": 4, "start": 10}),
    "seasonal, odd period": ("seasonal", {"period": 3, "start": 10}),
    "ar": ("ar", {"lags": 2}),
    "ar of two series": ("ar", {"x": 2, "lags": 2}),
    "ar, values before given": ("ar", {"lags": 2, "start": "given"}),
    "hmm": ("hmm", {"x": 2, "y": 3, "h": 3}),
    "hmm, full covariances": ("hmm", {"x": 2, "h": 3, "likelihood": "MultivariateNormal"}),
    "switching": ("switching", {"x": 2, "u": 2, "h": 3}),
    "switching, autoregressive": ("switching", {"u": 0, "autoregressive": True, "h": 3}),
    "volatility": ("volatility", {"x": 2, "h": 3, "hidden": (4,)}),
    "dmm": ("dmm", SMALL | {"h": 3}),
    "srnn": ("srnn", SMALL | {"h": 3}),
    "kvae": ("kvae", {"x": 5, "hidden": (4, 4)}),
}
# Their steps have the same operations as those of other variants.
ALIKE = {
    "fa diagonal",
    "cvae prior",
    "cvae likelihood",
    "vrnn filtering",
    "local trend",
    "seasonal, odd period",
    "ar of two series",
    "ar, values before given",
    "switching, autoregressive",
}


def small(variant):
    """Return a small model of the zoo, 40 examples for it, its plan and its noise."""
    name, sizes = VARIANTS[variant]
    torch.manual_seed(0)
    model = zoo[name](**sizes)
    graph = model.graph
    x = torch.bernoulli(torch.full((40, *([3] if graph.timed["x"] else []), graph.size("x")), 0.5))
    given = {
        name: torch.arange(40) % 3
        if name == "y"
        else torch.randn(40, *([3] if graph.timed[name] else []), graph.size(name))
        for name in graph.given
    }
    batch = model.prepare(x=x, **given)
    plan = model.plan()
    return model, plan, batch, model.draw_noise(plan, batch, seed=0)


def test_the_variants_are_the_whole_zoo():
    assert {name for name, _ in VARIANTS.values()} == set(zoo)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_receives_a_gradient(variant):
    model, plan, batch, noise = small(variant)
    estimate(plan, model.factors, batch, noise).value.mean().backward()
    assert [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ] == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in VARIANTS],
)
def test_every_bound_is_captured_whole_and_equals_eager(variant):
    model, plan, batch, noise = small(variant)

    def bound(batch, noise):
        return estimate(plan, model.factors, batch, noise).value

    torch._dynamo.reset()
    captured = torch.compile(bound, fullgraph=True, backend="eager")(batch, noise)
    torch._dynamo.reset()
    assert torch.equal(captured, bound(batch, noise))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model_trains_is_saved_samples_and_explains_itself(variant, tmp_path):
    model, _, batch, _ = small(variant)
    timed = model.graph.timed["x"]
    data = {
        name: batch[name].transpose(0, 1) if model.graph.timed[name] else batch[name][0]
        for name in (*model.graph.observed, *model.graph.given)
    }
    run = fit(model, data, schedule=joint(), steps=3, batch=20, seed=0, progress=False)
    assert np.isfinite(run.history["elbo"]).all()
    assert str(model.explain()).startswith("log p(x")
    assert str(model).startswith("p:  p(")
    model.save(tmp_path / "model")
    again = aevb.load(tmp_path / "model")
    model.eval()  # as a loaded model is
    assert torch.equal(again.elbo(**data, seed=0).value, model.elbo(**data, seed=0).value)
    given = {name: data[name][:2] for name in model.graph.given}
    drawn = model.sample(2, seed=0, **({"steps": 3} if timed else {}), **given)
    assert drawn["x"].shape == data["x"][:2].shape
    assert torch.isfinite(drawn["x"]).all()


def test_recipes_name_models_of_the_zoo():
    assert recipes.keys() <= zoo.keys()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in zoo
        if "likelihood" in inspect.signature(zoo[name]).parameters and name != "volatility"
    ],
)
def test_any_family_may_be_the_likelihood(name):
    takes = inspect.signature(zoo[name]).parameters
    sizes = {key: value for key, value in {"x": 5, "z": 2, "hidden": (4,)}.items() if key in takes}
    networks = zoo[name](**sizes).graph.p["x"]
    for likelihood, expected in (
        ("Poisson", Poisson(5)),
        (Normal(scale=0.1), Normal(5, scale=0.1)),
        (Normal(5, net=linear()), Normal(5, net=linear())),
    ):
        for at, entry in zoo[name](**sizes, likelihood=likelihood).graph.p["x"].items():
            assert entry.spec == replace(expected, net=expected.net or networks[at].spec.net)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        (
            "vae",
            {"likelihood": "Gaussian"},
            "Unknown likelihood 'Gaussian'. Choose one of Normal, Laplace, StudentT",
        ),
        ("vae", {"likelihood": 3}, "likelihood is a family's name or a conditional, got 3."),
        (
            "fa",
            {"posterior": "exact"},
            "Unknown posterior 'exact'. Choose one of full, diagonal, fixed.",
        ),
        (
            "cvae",
            {"variant": "none"},
            "Unknown variant 'none'. Choose one of both, prior, likelihood.",
        ),
        (
            "vrnn",
            {"posterior": "full"},
            "Unknown posterior 'full'. Choose one of filtering, smoothing.",
        ),
        ("ar", {"lags": 0}, "ar: lags is a positive whole number, got 0."),
        ("ar", {"start": "mean"}, "Unknown start 'mean'. Choose one of zeros, given."),
        ("seasonal", {"period": 1}, "seasonal: period is a whole number of steps from 2 on, got 1"),
        ("switching", {"u": 0}, "switching: with u=0 and without autoregressive=True"),
        (
            "volatility",
            {"likelihood": "Poisson"},
            "fixed gives v[t] a 2×1 matrix; this variable needs 1 row and 1 column.",
        ),
    ],
)
def test_an_unknown_variant_is_refused(name, setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        zoo[name](**setting)


def test_a_likelihood_may_be_a_text_with_settings():
    built = zoo["vae"](x=4, z=2, hidden=(4,), likelihood="Normal(scale=0.2)")
    assert built.graph.rule("p", "x").spec.scale == 0.2
    built = zoo["vae"](x=4, z=2, hidden=(4,), likelihood="Normal(scale=learned)")
    assert built.graph.rule("p", "x").spec.scale == "learned"
    for text, said in (
        ("Normal(scal=1)", "Its settings are scale. Did you mean 'scale'"),
        ("Normal(3)", "cannot be read"),
        ("Normal(scale=__import__('os').getcwd())", "cannot be read"),
        ("Normal(scale=[1])", "cannot be read"),
        ("Normal(size=3)", "Its settings are scale"),
        ("Normal(scale=", "Unknown likelihood"),
        ("Normal((scale=1)", "cannot be read"),
        ("Nrmal(scale=1)", "Unknown likelihood 'Nrmal'"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            zoo["vae"](x=4, z=2, hidden=(4,), likelihood=text)


# The conditionals of p ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(zoo))
def test_every_conditional_is_a_distribution_of_values_of_its_parents(name):
    model = zoo[name](seed=0)
    for variable in model.graph.stochastic:
        for entry in model.graph.p[variable].values():
            parents = {}
            for ref in entry.key.parents:
                value = torch.randn(5, model.graph.size(ref.name))
                known = ref.name in model.graph.stochastic
                classes = known and model.graph.rule("p", ref.name).spec.categorical
                parents[ref.label] = value.softmax(-1) if classes else value
            found = model.distribution(str(entry.key.target), parents)
            drawn = found.sample()
            assert drawn.shape == (*[5] * bool(parents), model.graph.size(variable))
            factor = model.factors[entry.id]
            wanted = factor.distribution(factor(parents).flatten(0, -2))
            assert torch.equal(
                found.log_prob(drawn), wanted.log_prob(drawn).reshape(found.log_prob(drawn).shape)
            )


def test_the_conditionals_of_a_chain_add_up_to_log_p():
    hmm = zoo.hmm(2, 3, seed=0)
    drawn = hmm.sample(4, steps=6, seed=0)
    y, x = drawn["y"], drawn["x"]
    total = hmm.distribution("y[0]").log_prob(y[:, 0])
    total = total + hmm.distribution("y[t]", {"y[t-1]": y[:, :-1]}).log_prob(y[:, 1:]).sum(1)
    total = total + hmm.distribution("x[t]", {"y[t]": y}).log_prob(x).sum((1, 2))
    torch.testing.assert_close(total, hmm.log_prob(**drawn))
    by_class = hmm.distribution("x[t]", {"y[t]": y.argmax(-1)}).mean
    assert torch.equal(by_class, hmm.distribution("x[t]", {"y[t]": y}).mean)


def test_classes_of_any_type_are_classes_and_one_hot_rows_are_vectors():
    pd = pytest.importorskip("pandas")
    hmm = zoo.hmm(2, 3, seed=0)
    mean = hmm.distribution("x[t]", {"y[t]": torch.arange(3)}).mean
    assert mean.shape == (3, 2)
    types = (torch.int32, torch.uint8, torch.uint16, torch.float32, torch.float64)
    for classes in (
        np.array([0.0, 1.0, 2.0]),
        [0, 1, 2],
        *(torch.arange(3).to(dtype) for dtype in types),
        *(torch.eye(3).to(dtype) for dtype in (torch.long, torch.uint8, torch.bool, torch.float64)),
        pd.DataFrame(np.eye(3), columns=list("abc")),
        pd.Series([0, 1, 2]),
    ):
        assert torch.equal(hmm.distribution("x[t]", {"y[t]": classes}).mean, mean)
    for first in (torch.tensor([0, 1]).bool(), torch.tensor([0, 1]), torch.tensor([[0], [1]])):
        found = hmm.distribution("x[t]", {"y[t]": first}).mean
        assert torch.equal(found.reshape(2, 2), mean[:2])
    two = zoo.hmm(2, 2, seed=0)  # arange(2) is no one-hot vector
    assert two.distribution("y[t]", {"y[t-1]": torch.arange(2)}).probs.shape == (2, 2)
    shares = torch.tensor([0.2, 0.3, 0.5], requires_grad=True)
    hmm.distribution("x[t]", {"y[t]": shares}).mean.sum().backward()
    assert shares.grad is not None


@pytest.mark.parametrize(
    ("variable", "parents", "message"),
    [
        ("z[t]", {}, "p has no conditional of 'z[t]'; it has those of y[0], y[t], x[t]."),
        ("y[t]", None, "y[t] | y[t-1] needs values of y[t-1]; got none."),
        ("y[0]", {"y[t-1]": [0]}, "y[0] needs values of no parents; got y[t-1]."),
        ("y[t]", {"y[t-1]": [3]}, "y[t-1] has classes 0 to 2, or 3 numbers that sum to 1 on its"),
        ("x[t]", {"y[t]": [0.5]}, "y[t] has classes 0 to 2, or 3 numbers that sum to 1 on its"),
        ("x[t]", {"y[t]": [0.5, 0.1, 0.1]}, "last axis, got [0.5, 0.1"),
        ("x[t]", {"y[t]": [math.nan, 1.0]}, "last axis, got [nan, 1.0]."),
    ],
)
def test_conditionals_of_other_variables_or_parents_are_refused(variable, parents, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        zoo.hmm(2, 3).distribution(variable, parents)
