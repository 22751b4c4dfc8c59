"""p in the browser: the exported program, run by node, against torch.

One node process decodes every case of ``MODELS``, once with the precision that the export chooses
and once in single precision, and draws from every distribution of ``DRAWN``.
"""

import base64
import json
import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from small_models import Sphere
from torch import nn

import aevb.page.decoder as decoder
from aevb import (
    GRU,
    Bernoulli,
    Beta,
    Conditional,
    ContinuousBernoulli,
    Deterministic,
    Laplace,
    Mixture,
    Model,
    MultivariateNormal,
    NegativeBinomial,
    Network,
    Normal,
    OneHot,
    Poisson,
    StudentT,
    conv,
    deconv,
    linear,
    mlp,
    table,
)
from aevb.declare.families import FAMILIES
from aevb.declare.networks import ACTIVATIONS
from aevb.page.decoder import decode, export, plane

WEB = Path(__file__).parents[2] / "web" / "src"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
DRAWS = 20_000
POINTS = 4

SCRIPT = """
import { readFileSync, writeFileSync } from "node:fs";
import { revive } from "./data.js";
import { createDecoder } from "./decode.js";
import { createRandom } from "./random.js";

const packed = (array) => Buffer.from(new Float32Array(array).buffer).toString("base64");
const all = (values) =>
  Object.fromEntries(Object.entries(values).map(([name, value]) => [name, packed(value)]));
const asked = JSON.parse(readFileSync(process.argv[2], "utf8"));
const { cases, drawn, seed, draws } = await revive(asked);
const decoded = cases.map(({ program, points }) => {
  const made = createDecoder(program);
  const forward = (values, options) => {
    const { latents, observed } = made.forward(values, options);
    return {
      latents: all(latents),
      observed: Object.fromEntries(Object.entries(observed).map(
        ([name, { mean, sd }]) => [name, { mean: packed(mean), sd: packed(sd) }])),
    };
  };
  const { latents, observed, given } = made;
  return {
    descriptors: { latents, observed, given },
    points: points.map((values) => forward(values)),
    free: forward({}, { fixed: new Set() }),
    start: all(made.start()),
    partly: forward(points[0], { fixed: new Set([latents[0].name]) }),
    drawn: [7, 7, 8].map((seed) => all(made.start(createRandom(seed)))),
  };
});
const samples = drawn.map((program) => {
  const made = createDecoder(program);
  const random = createRandom(seed), values = made.start();
  const size = made.observed[0].size, found = new Float32Array(draws * size);
  for (let i = 0; i < draws; i++) {
    const { observed } = made.forward(values, { draw: true, random });
    found.set(observed.x.draw, i * size);
  }
  return packed(found);
});
writeFileSync(process.argv[3], JSON.stringify({ decoded, samples }));
"""


def vae(likelihood, *, latent=None, given=None, parents="z"):
    p = {"z": latent or Normal(3), f"x | {parents}": likelihood}
    family = type(latent) if latent else Normal
    return Model(p, {"z | x": family()}, given=given)


def chain(family, **settings):
    """A model whose latents have a family: z without parents, w given z."""
    p = {
        "z": family(3, learned=True, **settings),
        "w | z": family(3, net=mlp(5, activation="tanh"), **settings),
        "x | w, z": Normal(4, scale=0.5),
    }
    return Model(p, {"z | x": family(**settings), "w | z, x": family(**settings)})


def wide(model, factor=40.0):
    """The same model with large outputs of x."""
    with torch.no_grad():
        model.factors["p(x|z)"].net.heads.weight.mul_(factor)
    return model


NET = mlp(8, activation="tanh")
SETTINGS = {
    "Normal": [{"scale": "network"}, {"scale": "learned"}, {"scale": 0.3}],
    "Laplace": [{"scale": "network"}, {"scale": "learned"}, {"scale": 0.3}],
    "StudentT": [
        *({"scale": scale} for scale in ("network", "learned", 0.3)),
        *({"df": df} for df in (0.8, 1.5, 2.5)),
    ],
    "MultivariateNormal": [{"covariance": "network"}, {"covariance": "shared"}],
    "Mixture": [{"components": 1}, {"components": 3}],
    "Bernoulli": [{}],
    "ContinuousBernoulli": [{}, {"clamped": True}],
    "OneHot": [{}],
    "Beta": [{}],
    "Poisson": [{}],
    "NegativeBinomial": [{"dispersion": d} for d in ("network", "learned", 2.5)],
}


def words(settings):
    return "".join(f" {key}={value}" for key, value in settings.items())


MODELS = {
    **{
        f"{name}{words(settings)}": lambda name=name, settings=settings: vae(
            FAMILIES[name](5, net=NET, **settings)
        )
        for name, each in SETTINGS.items()
        for settings in each
    },
    **{
        f"latent {name}{words(settings)}": lambda name=name, settings=settings: chain(
            FAMILIES[name], **settings
        )
        for name, each in SETTINGS.items()
        for settings in each
    },
    **{
        f"mlp {activation}": lambda activation=activation: vae(
            Normal(6, net=mlp(17, 9, activation=activation))
        )
        for activation in ACTIVATIONS
    },
    "large logits": lambda: wide(vae(ContinuousBernoulli(5, net=NET))),
    "clamped logits": lambda: wide(vae(ContinuousBernoulli(5, net=NET, clamped=True))),
    "linear": lambda: vae(Normal(6, net=linear())),
    "linear without bias": lambda: vae(Normal(6, net=linear(bias=False))),
    "log": lambda: vae(Poisson(6, net=mlp(9, log=True)), latent=Poisson(3, learned=True)),
    "dropout": lambda: vae(Bernoulli(6, net=mlp(9, 8, dropout=0.5))),
    "given": lambda: vae(
        Bernoulli((2, 3), net=mlp(9)), parents="y, z, u", given={"y": 4, "u": (2, 2)}
    ),
    "three levels": lambda: Model(
        {
            "c": OneHot(4, learned=True),
            "z2 | c": Normal(2),
            "z1 | z2, c": Normal(3, net=mlp(6), scale="learned"),
            "x | z1": Bernoulli(7, net=mlp(8)),
            "y | z1, z2": Poisson(2),
        },
        {"z1 | x": Normal(), "z2 | z1": Normal(), "c | z2": OneHot()},
    ),
    "shared features": lambda: Model(
        {
            "values": Normal(3),
            "h | values": Deterministic(6, net=mlp(7), activation="softplus"),
            "x | h": Normal(5),
            "y | h, values": OneHot(3),
        },
        {"values | x": Normal()},
    ),
    "observed parents": lambda: Model(
        {"z": Normal(2), "y | z": OneHot(3), "a | y": Normal(2), "x | a, y": Normal(4)},
        {"z | x": Normal(), "a | x": Normal()},
    ),
    "deconv": lambda: vae(Bernoulli((1, 8, 8), net=deconv(6, 4, hidden=11))),
    "deconv odd sizes, two heads": lambda: vae(
        Normal((3, 7, 10), net=deconv(5, 4, 3, hidden=6, activation="elu"))
    ),
    "deconv one row": lambda: vae(
        Beta((2, 1, 5), net=deconv(3, hidden=6, activation="silu")), parents="z, y", given={"y": 3}
    ),
    "deconv inside": lambda: Model(
        {
            "z": Normal(2),
            "h | z": Deterministic((2, 3, 5), net=deconv(3), activation="tanh"),
            "x | h": Normal(4),
        },
        {"z | x": Normal()},
    ),
}


def build(name, seed=0):
    """The model of a case, with weights of the size that training gives them."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
            else:
                parameter.mul_(1.5)
    return model


def head(model, **heads):
    """Set the raw outputs of x's factor, whatever its parents are."""
    factor = model.factors["p(x|z)"]
    with torch.no_grad():
        for weight in factor.net.blocks.weights.values():
            weight.zero_()
        parts = [torch.as_tensor(heads.pop(name)).float() for name in factor.sizes]
        factor.net.blocks.bias.copy_(torch.cat([part.reshape(-1) for part in parts]))
        for name, value in heads.items():
            factor.vectors[name].copy_(torch.as_tensor(value))
    return model


def inverse_softplus(*values):
    return [math.log(math.expm1(value)) for value in values]


LOC, SCALE = [-2.0, 0.5, 3.0], inverse_softplus(0.2, 1.0, 4.0)
# Three entries each, so that every branch of the samplers is reached.
DRAWN = {
    "Normal": lambda: head(vae(Normal(3)), loc=LOC, scale=SCALE),
    "Laplace": lambda: head(vae(Laplace(3)), loc=LOC, scale=SCALE),
    "StudentT": lambda: head(vae(StudentT(3, df=9.0)), loc=LOC, scale=SCALE),
    "MultivariateNormal": lambda: head(
        vae(MultivariateNormal(3)), loc=LOC, tril=[0.5, -2.0, 1.0, 0.7, 1.5, -1.0]
    ),
    "Mixture": lambda: head(
        vae(Mixture(3, components=2)), weight=[0.0, 1.0], loc=[LOC, [0.0, 4, 4]], scale=[SCALE] * 2
    ),
    "Bernoulli": lambda: head(vae(Bernoulli(3)), logits=[-3.0, 0.0, 1.0]),
    "ContinuousBernoulli": lambda: head(vae(ContinuousBernoulli(3)), logits=[-30.0, 0.3, 4.0]),
    "OneHot": lambda: head(vae(OneHot(3)), logits=[-2.0, 0.0, 1.0]),
    "Beta": lambda: head(
        vae(Beta(3)),
        concentration1=inverse_softplus(0.1, 2.0, 30.0),
        concentration0=inverse_softplus(0.3, 0.5, 8.0),
    ),
    "Poisson": lambda: head(vae(Poisson(3)), log_rate=[-1.0, math.log(9.0), math.log(11.0)]),
    "Poisson, large rates": lambda: head(vae(Poisson(3)), log_rate=[4.0, 9.0, 15.0]),
    "NegativeBinomial": lambda: head(
        vae(NegativeBinomial(3)), log_mean=[-1.0, 2.0, 5.0], dispersion=inverse_softplus(0.3, 2, 40)
    ),
}


@pytest.fixture(scope="module")
def cases():
    """Name → (model, its program as chosen, its program in single precision, points)."""
    found = {}
    for name in MODELS:
        model = build(name)
        rows = np.random.default_rng(1)
        given = {
            key: rows.standard_normal((POINTS, model.graph.size(key))).astype(np.float32)
            for key in model.graph.given
        }
        drawn = [
            decode(model, {key: value[i] for key, value in given.items()}, draw=True, seed=i)
            for i in range(POINTS)
        ]
        latents = {
            key: np.stack([one["latents"][key] for one in drawn]) for key in drawn[0]["latents"]
        }
        values = given | latents
        found[name] = model, export(model), export(model, precision="f4"), values
    return found


@pytest.fixture(scope="module")
def found(cases, tmp_path_factory):
    """What node decodes: case → its answers, and distribution → its draws."""
    folder = tmp_path_factory.mktemp("decoder")
    for file in ("data.js", "decode.js", "families.js", "random.js"):
        shutil.copy(WEB / file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "main.js").write_text(SCRIPT)
    asked = [
        {
            "program": program,
            "points": [
                {key: value[i].tolist() for key, value in values.items()} for i in range(POINTS)
            ],
        }
        for _, chosen, single, values in cases.values()
        for program in (chosen, single)
    ]
    drawn = [export(make(), precision="f4") for make in DRAWN.values()]
    (folder / "in.json").write_text(
        json.dumps({"cases": asked, "drawn": drawn, "seed": 5, "draws": DRAWS}, allow_nan=False)
    )
    subprocess.run([NODE, "main.js", "in.json", "out.json"], cwd=folder, check=True, timeout=120)
    answer = json.loads((folder / "out.json").read_text())
    decoded = iter(answer["decoded"])
    return (
        {name: {"chosen": next(decoded), "single": next(decoded)} for name in cases},
        {
            name: numbers(samples).reshape(DRAWS, -1)
            for name, samples in zip(DRAWN, answer["samples"], strict=True)
        },
    )


def numbers(text):
    return np.frombuffer(base64.b64decode(text), np.float32).astype(float)


def difference(answer, right):
    """The largest difference relative to max(1, |right|); NaN and infinity must be equal."""
    answer, right = np.asarray(answer, float), np.asarray(right, float)
    finite = np.isfinite(right)
    np.testing.assert_array_equal(answer[~finite], right[~finite])
    answer, right = answer[finite], right[finite]
    return float(np.max(np.abs(answer - right) / np.maximum(1, np.abs(right)), initial=0.0))


def largest_differences(model, answers, values):
    """The largest differences of means and of standard deviations from double precision."""
    exact = decode(model.double(), values)["observed"]
    worst = {}
    for what in ("mean", "sd"):
        each = [
            difference(
                np.stack([numbers(point["observed"][name][what]) for point in answers["points"]]),
                right[what],
            )
            for name, right in exact.items()
        ]
        worst[what] = np.max(each)  # NaN if one of them is
    model.float()
    return worst


# The browser's answers ----------------------------------------------------------------------------


def test_the_cases_cover_every_family_and_activation():
    assert set(SETTINGS) == set(FAMILIES)
    assert {name.partition(",")[0] for name in DRAWN} == set(FAMILIES)


@needs_node
@pytest.mark.parametrize("name", MODELS)
def test_node_decodes_as_torch_does(cases, found, name):
    model, chosen, _, values = cases[name]
    assert chosen["runs"]
    assert chosen["error"] < 1e-3
    answers = found[0][name]
    errors = largest_differences(model, answers["chosen"], values)
    assert errors["mean"] <= 1e-3
    assert errors["sd"] <= 1e-3
    errors = largest_differences(model, answers["single"], values)
    assert errors["mean"] <= 1e-5
    assert errors["sd"] <= 1e-5


@needs_node
@pytest.mark.parametrize("name", MODELS)
def test_node_completes_free_latents_as_torch_does(cases, found, name):
    model = cases[name][0]
    right = decode(model.double(), {})
    model.float()
    answer = found[0][name]["single"]
    for latent, value in right["latents"].items():
        assert difference(numbers(answer["free"]["latents"][latent]), value) <= 1e-5
        assert answer["start"][latent] == answer["free"]["latents"][latent]
    for observed, value in right["observed"].items():
        mean = numbers(answer["free"]["observed"][observed]["mean"])
        assert difference(mean, value["mean"]) <= 1e-5
    for role, listed in answer["descriptors"].items():
        graph = model.graph
        names = [entry["name"] for entry in listed]
        assert set(names) == set(getattr(graph, role))
        assert [entry["size"] for entry in listed] == [graph.size(key) for key in names]


@needs_node
@pytest.mark.parametrize("name", MODELS)
def test_node_recomputes_latents_that_are_not_fixed(cases, found, name):
    model, _, _, values = cases[name]
    answer = found[0][name]["single"]
    kept = {answer["descriptors"]["latents"][0]["name"], *model.graph.given}
    right = decode(model.double(), {key: value[0] for key, value in values.items() if key in kept})
    model.float()
    for latent, value in right["latents"].items():
        assert difference(numbers(answer["partly"]["latents"][latent]), value) <= 1e-5
    for observed, value in right["observed"].items():
        mean = numbers(answer["partly"]["observed"][observed]["mean"])
        assert difference(mean, value["mean"]) <= 1e-5


@needs_node
def test_equal_seeds_draw_equal_latents(found):
    for name in ("three levels", "latent Beta", "given"):
        first, second, other = found[0][name]["single"]["drawn"]
        assert first == second
        assert first != other


@needs_node
@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_the_exact_moments(found, name):
    """Five standard errors of three means and three variances, from a fixed seed."""
    samples = found[1][name]
    model = DRAWN[name]().double()
    exact = decode(model, {})["observed"]["x"]
    mean, sd = exact["mean"].astype(float), exact["sd"].astype(float)
    assert (np.abs(samples.mean(0) - mean) <= 5 * sd / math.sqrt(DRAWS)).all()
    squares = (samples - mean) ** 2
    assert (np.abs(squares.mean(0) - sd**2) <= 5 * squares.std(0) / math.sqrt(DRAWS)).all()


@needs_node
def test_draws_of_vectors_have_the_exact_covariance(found):
    samples = found[1]["MultivariateNormal"]
    dist = model_distribution(DRAWN["MultivariateNormal"]())
    covariance = dist.covariance_matrix[0, 0].numpy()
    centred = samples - dist.mean[0, 0].numpy()
    products = centred[:, :, None] * centred[:, None, :]
    error = np.abs(products.mean(0) - covariance)
    assert (error <= 5 * products.std(0) / math.sqrt(DRAWS)).all()


@needs_node
@pytest.mark.parametrize(
    ("name", "cdf"),
    [
        ("Normal", lambda d: scipy.stats.norm(d.loc, d.scale)),
        ("Laplace", lambda d: scipy.stats.laplace(d.loc, d.scale)),
        ("StudentT", lambda d: scipy.stats.t(d.df, d.loc, d.scale)),
        ("Beta", lambda d: scipy.stats.beta(d.concentration1, d.concentration0)),
    ],
)
def test_draws_have_the_exact_distribution(found, name, cdf):
    """The Kolmogorov–Smirnov test; each of 12 fails with probability 1e-5 for another seed."""
    dist = cdf(model_distribution(DRAWN[name]().double()))
    for column, sample in enumerate(found[1][name].T):
        levels = np.sort(dist.cdf(np.tile(sample[:, None], 3))[..., column].reshape(-1))
        assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-5


@needs_node
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("Poisson", lambda d: scipy.stats.poisson(d.rate)),
        ("Poisson, large rates", lambda d: scipy.stats.poisson(d.rate)),
        ("NegativeBinomial", lambda d: scipy.stats.nbinom(d.total_count, 1 - d.probs)),
    ],
)
def test_draws_of_counts_have_the_exact_distribution(found, name, frozen):
    """A χ² test in up to 40 intervals; each of 9 fails with probability 1e-5 for another seed."""
    dist = frozen(model_distribution(DRAWN[name]().double()))
    levels = np.linspace(0, 1, 41)[1:-1].reshape(-1, 1, 1, 1)
    edges = dist.ppf(levels).reshape(39, 3)
    for column, sample in enumerate(found[1][name].T):
        ends = np.unique(edges[:, column])
        below = dist.cdf(np.tile(ends[:, None, None, None], 3))[..., column].reshape(-1)
        expected = DRAWS * np.diff(np.concatenate([[0], below, [1]]))
        counted = np.bincount(np.searchsorted(ends, sample), minlength=len(ends) + 1)
        assert scipy.stats.chisquare(counted, expected).pvalue > 1e-5


def model_distribution(model):
    with torch.no_grad():
        factor = model.factors["p(x|z)"]
        return factor.distribution(factor({"z": torch.zeros(1, 1, 3).to(model._parameter())}))


# The program --------------------------------------------------------------------------------------


def test_half_precision_is_chosen_by_its_measured_error(cases):
    _, chosen, single, _ = cases["Bernoulli"]
    assert chosen["precision"] == "f2"
    assert 0 < chosen["error"] < 1e-3
    assert single["precision"] == "f4"
    assert single["error"] < 1e-6
    assert chosen["nodes"][1]["net"]["layers"][0]["weight"]["$"] == "f2"
    assert chosen["nodes"][1]["net"]["layers"][0]["bias"]["$"] == "f4"
    # Means in the hundreds of a mean's own unit: half precision keeps only three digits of each.
    model = wide(vae(Normal(5, net=NET)), 100.0)
    assert export(model)["precision"] == "f4"
    assert export(model, precision="f2")["error"] > 1e-3


def test_weights_beyond_half_precision_stay_single():
    assert export(wide(vae(Normal(5, net=NET)), 1e6))["precision"] == "f4"


def test_export_lists_parents_first_with_their_roles():
    program = export(build("shared features"))
    assert [(node["name"], node["role"], node["parents"]) for node in program["nodes"]] == [
        ("values", "latent", []),
        ("h", "deterministic", ["values"]),
        ("x", "observed", ["h"]),
        ("y", "observed", ["h", "values"]),
    ]
    program = export(build("given"), categorical=["y"])
    assert [node["role"] for node in program["nodes"]] == ["given", "given", "latent", "observed"]
    assert program["given"] == {
        "y": {"shape": [4], "categorical": True},
        "u": {"shape": [2, 2], "categorical": False},
    }


def test_export_leaves_the_model_and_torchs_generator_unchanged():
    model = build("given")
    model.train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    first, second = export(model), export(model)
    assert first == second
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# Refusals -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubling(Network):
    def build(self, parents, heads, shape, masked):
        class Module(nn.Module):
            def first(self, inputs, *, bias=True, missing=None):
                return torch.cat([sum(inputs.values())] * 2, -1)

            def rest(self, h, keep=()):
                return h

        return Module()


@dataclass(frozen=True)
class Faceless(Conditional):
    """A family without a mean."""

    def heads(self, d):
        return {"loc": d}

    def distribution(self, loc):
        return torch.distributions.Distribution(loc.shape, validate_args=False)


def sequences():
    p = {"h[t] | h[t-1], x[t-1]": GRU(3), "z[t] | h[t]": Normal(2), "x[t] | h[t], z[t]": Normal(4)}
    return Model(p, {"z[t] | h[t], x[t]": Normal()})


def hooked():
    model = vae(Normal(4))
    model.factors["p(x|z)"].net.register_forward_hook(lambda *arguments: None)
    return model


def normalised():
    model = vae(Normal(4, net=mlp(5)))
    net = model.factors["p(x|z)"].net
    net.heads = nn.utils.parametrizations.weight_norm(net.heads)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (sequences, "h[t] is a sequence, and only a model without time steps can be decoded point"),
        (lambda: vae(Normal(6, net=Doubling(), scale=1)), "x's network Doubling cannot run in a"),
        (
            lambda: Model(
                {"z": Normal(2), "x | i": Normal(4, net=table(7)), "y | z": Normal(1)},
                {"z | y": Normal()},
                given={"i": 1},
            ),
            "x's network table cannot run in a page. Only linear, mlp and deconv can.",
        ),
        (
            lambda: vae(Normal(4, net=conv(2)), latent=Normal((1, 4, 4))),
            "x's network conv cannot run in a page.",
        ),
        (lambda: vae(Sphere(4)), "x's family Sphere is a class of its own"),
        (hooked, "x's network has a forward hook"),
        (normalised, "x's network contains a module ParametrizedLinear"),
    ],
)
def test_export_says_why_a_page_cannot_run_p(make, why):
    program = export(make())
    assert program["runs"] is False
    assert program["why"].startswith(why)


def test_export_refuses_too_many_weights(monkeypatch):
    monkeypatch.setattr(decoder, "MOST_WEIGHTS", 20)
    program = export(vae(Normal(4)))
    assert program["why"] == "p has 32 weights, and a page holds at most 20."


# Decoding in torch --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["given", "shared features", "deconv", "Mixture components=3"])
def test_decode_equals_sample(cases, name):
    model, _, _, values = cases[name]
    fixed = {
        key: torch.tensor(value).reshape(POINTS, *model.graph.shapes[key])
        for key, value in values.items()
    }
    sampled = model.sample(POINTS, mean=True, **fixed)
    for observed, value in decode(model, values)["observed"].items():
        right = sampled[observed].reshape(POINTS, -1)
        np.testing.assert_allclose(value["mean"], right, rtol=1e-5, atol=1e-6)
        assert value["draw"] is None


def test_decode_draws_from_p():
    model = build("three levels")
    first, second = (decode(model, {}, draw=True, seed=3) for _ in range(2))
    np.testing.assert_equal(first, second)
    assert first["latents"]["c"].sum() == 1
    sampled = model.sample(1, seed=3)
    for name, value in first["latents"].items():
        np.testing.assert_array_equal(value, sampled[name].reshape(-1))
    for name, value in first["observed"].items():
        np.testing.assert_array_equal(value["draw"], sampled[name].reshape(-1))


def test_decode_passes_a_fixed_observed_value_to_its_children():
    model = build("observed parents")
    chosen = {"z": [0.3, -0.2], "y": [0.0, 0.0, 1.0], "a": [1.0, 2.0]}
    found = decode(model, chosen, draw=True, seed=0)["observed"]
    with torch.no_grad():
        inputs = {name: torch.tensor(chosen[name]).reshape(1, 1, -1) for name in ("a", "y")}
        factor = model.factors["p(x|a, y)"]
        mean = factor.distribution(factor(inputs)).mean[0, 0]
    np.testing.assert_allclose(found["x"]["mean"], mean, rtol=1e-6)
    assert found["y"]["draw"].sum() == 1


def test_decode_runs_networks_of_the_user():
    model = vae(Normal(6, net=Doubling(), scale=1))
    mean = decode(model, {"z": [[1.0, 2.0, 3.0]] * 2})["observed"]["x"]["mean"]
    np.testing.assert_array_equal(mean, [[1, 2, 3, 1, 2, 3]] * 2)
    mean = decode(model, {"z": [1.0, 2.0, 3.0]})["observed"]["x"]["mean"]
    np.testing.assert_array_equal(mean, [1, 2, 3, 1, 2, 3])


def test_plane_is_row_by_row_over_the_two_axes():
    model = vae(Normal(6, net=Doubling(), scale=1))
    axes = np.array([[2.0, 0, 0], [0, 20.0, 0]])
    found = plane(model, "z", np.array([-1.0, -10, 5]), axes, 3, {})
    assert found.shape == (9, 6)
    np.testing.assert_array_equal(found[:, 0], [-1, 0, 1] * 3)
    np.testing.assert_array_equal(found[:, 1], [-10] * 3 + [0] * 3 + [10] * 3)
    np.testing.assert_array_equal(found[:, 2], 5)


def test_plane_in_parts_equals_decode(monkeypatch):
    model = build("three levels")
    axes, fixed = np.eye(2), {"c": [0.0, 0, 1, 0]}
    whole = plane(model, "z2", np.zeros(2), axes, 4, fixed)
    monkeypatch.setattr(decoder, "PLANE_ROWS", 5)
    np.testing.assert_allclose(plane(model, "z2", np.zeros(2), axes, 4, fixed), whole, rtol=1e-5)
    corner = decode(model, {"z2": [0.0, 0.0], **fixed})["observed"]["x"]["mean"]
    np.testing.assert_allclose(whole[0], corner, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decode(sequences(), {}), "h[t] is a sequence"),
        (lambda: decode(vae(Normal(4)), {"w": [1.0]}), "'w' is not a variable that can be fixed"),
        (lambda: decode(vae(Normal(4)), {"z": [1.0, 2.0]}), "a row has 3 numbers"),
        (
            lambda: decode(vae(Normal(4)), {"z": np.zeros((2, 3)), "x": np.zeros((3, 4))}),
            "z has 2 rows, but another variable has 3.",
        ),
        (lambda: decode(vae(Faceless(4)), {}), "x's family Faceless has no mean"),
        (
            lambda: plane(vae(Normal(4)), "x", np.zeros(4), np.zeros((2, 4)), 2, {}),
            "plane needs a latent (z) and a point of its space, got 'x'",
        ),
        (
            lambda: plane(vae(Normal(4)), "z", np.zeros(3), np.zeros((3, 3)), 2, {}),
            "The axes have shape (3, 3); a plane needs (2, 3).",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
