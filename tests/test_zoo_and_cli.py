"""What a newcomer runs first: the declarations of the documentation, the zoo, and the command line."""

import ast
import importlib
import inspect
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from torch.nn.functional import relu, softplus

import aevb
from aevb import LSTM, Bernoulli, ContinuousBernoulli, Model, MultivariateNormal, Normal, OneHot, Poisson, linear, mlp
from aevb.cli import main
from aevb.estimate.estimators import estimate
from aevb.zoo import zoo

# The contract: models exactly as the documentation declares them -------------------------------------------------------------


@pytest.fixture(scope="module")
def fa():
    torch.manual_seed(0)
    return Model(  # factor analysis
        p={"z": Normal(2), "x | z": Normal(3, net=linear(bias=False), scale="learned")},
        q={"z | x": MultivariateNormal(net=linear(bias=False), covariance="shared")},
    ).double()


@pytest.fixture(scope="module")
def cvae():
    return Model(  # y stands on no left-hand side of p: it is given
        p={"z | y": Normal(20), "x | y, z": ContinuousBernoulli(784, net=mlp(500, 500, dropout=0.1))},
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
    """A built mlp by hand: one first layer over all parents, ReLU, and the heads."""
    net = factor.net
    h = net.blocks.bias + sum(inputs[name] @ weight.T for name, weight in net.blocks.weights.items())
    for layer in net.hidden:
        h = relu(h) @ layer.weight.T + layer.bias
    return h if net.heads is None else relu(h) @ net.heads.weight.T + net.heads.bias


def test_the_bound_is_its_terms(gmvae):
    bound = gmvae.elbo(x=X)
    assert bound.value.shape == (6,)
    assert set(bound.terms) == {"x", "kl(z)", "kl(y)"}
    assert torch.allclose(bound.value, bound.terms["x"] - bound.terms["kl(z)"] - bound.terms["kl(y)"], rtol=0, atol=1e-10)


def test_the_cvae_and_the_vrnn_run_as_declared(cvae):
    bound = cvae.elbo(x=X, y=[0, 1, 2, 3, 9, 9])
    assert set(bound.terms) == {"x", "kl(z)"}
    assert torch.isfinite(bound.value).all()
    smoothing = {"b[t] | b[t+1], x[t]": aevb.GRU(256), "z[t] | h[t], b[t]": Normal(net=mlp(500, 500))}
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
    for part in (r"\sum_{y} q_\phi(y \mid x)", r"\log p_\theta(x \mid z^{s})", r"D_{\mathrm{KL}}(q_\phi(z \mid x, y) \,\|\, p_\theta(z \mid y))"):
        assert part in text.latex
    assert text.latex.count("{") == text.latex.count("}")


def test_the_clusters_are_the_softmax_of_qs_network(gmvae):
    probs = gmvae.posterior(x=X)["y"].probs
    expected = through(gmvae.factors["q(y|x)"], {"x": torch.tensor(X)}).softmax(-1)
    assert probs.shape == (6, 10)
    assert torch.allclose(probs, expected, rtol=0, atol=1e-12)


def test_a_fixed_class_conditions_the_generation(gmvae):
    samples = gmvae.sample(15, y=3, seed=0)
    assert {name: tuple(value.shape) for name, value in samples.items()} == {"y": (15, 10), "z": (15, 64), "x": (15, 784)}
    assert torch.equal(samples["y"], torch.eye(10, dtype=torch.float64)[3].expand(15, 10))
    assert set(samples["x"].unique().tolist()) == {0.0, 1.0}
    assert torch.equal(samples["x"], gmvae.sample(15, y=3, seed=0)["x"])
    assert not torch.equal(samples["x"], gmvae.sample(15, y=3, seed=1)["x"])
    # z | y is Gaussian with the moments of y = 3: the mean of 4,000 draws lies within 5 standard errors, in each of 64 entries.
    loc, scale = through(gmvae.factors["p(z|y)"], {"y": samples["y"][:1]})[0].split(64)
    z = gmvae.sample(4000, y=3, seed=0)["z"]
    assert ((z.mean(0) - loc).abs() < 5 * softplus(scale) / 4000**0.5).all()


def test_log_prob_of_a_complete_assignment(gmvae):
    y = np.array([0, 3, 3, 9, 1, 5])
    z = np.random.default_rng(1).standard_normal((6, 64))
    vectors = torch.eye(10, dtype=torch.float64)[y]
    loc, scale = (part.detach().numpy() for part in through(gmvae.factors["p(z|y)"], {"y": vectors}).split(64, -1))
    logits = through(gmvae.factors["p(x|z)"], {"z": torch.tensor(z)}).detach().numpy()
    log_prior = -np.log(10) + norm.logpdf(z, loc, np.log1p(np.exp(scale))).sum(-1)
    log_likelihood = (X * logits - np.logaddexp(0, logits)).sum(-1)
    assert np.allclose(gmvae.log_prob(x=X, y=y, z=z).detach(), log_prior + log_likelihood, rtol=0, atol=1e-10)


def test_factor_analysis_knows_its_evidence(fa):
    x = np.random.default_rng(2).standard_normal((7, 3))
    W = fa.factors["p(x|z)"].net.blocks.weights["z"].detach().numpy()
    noise = softplus(fa.factors["p(x|z)"].vectors["scale"]).detach().numpy()
    evidence = fa.log_evidence(x=x)
    assert evidence.method == "exact"
    assert torch.equal(evidence.stderr, torch.zeros(7, dtype=torch.float64))
    assert np.allclose(evidence.value, multivariate_normal.logpdf(x, np.zeros(3), W @ W.T + np.diag(noise**2)), rtol=0, atol=1e-10)


def test_a_model_is_saved_and_loaded(gmvae, tmp_path):
    gmvae.save(tmp_path / "gmvae/")
    assert torch.equal(aevb.load(tmp_path / "gmvae/").elbo(x=X, seed=0).value, gmvae.elbo(x=X, seed=0).value)


# The zoo ----------------------------------------------------------------------------------------------------------------------

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
}


def small(variant):
    """A small model of the zoo, 40 examples for it, its plan and their noise."""
    name, sizes = VARIANTS[variant]
    torch.manual_seed(0)
    model = zoo[name](**sizes)
    x = torch.bernoulli(torch.full((40, 3, 5) if name == "vrnn" else (40, 3 if name == "fa" else 5), 0.5))
    batch = model.prepare(x=x, **({"y": torch.arange(40) % 3} if name == "cvae" else {}))
    plan = model.plan()
    return model, plan, batch, model.draw_noise(plan, batch, seed=0)


def test_the_variants_are_the_whole_zoo():
    assert {name for name, _ in VARIANTS.values()} == set(zoo)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_receives_a_gradient(variant):
    model, plan, batch, noise = small(variant)
    estimate(plan, model.factors, batch, noise).value.mean().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_bound_is_captured_whole_and_equals_eager(variant):
    model, plan, batch, noise = small(variant)

    def bound(batch, noise):
        return estimate(plan, model.factors, batch, noise).value

    torch._dynamo.reset()
    captured = torch.compile(bound, fullgraph=True, backend="eager")(batch, noise)
    torch._dynamo.reset()
    assert torch.equal(captured, bound(batch, noise))


@pytest.mark.parametrize("name", [name for name in zoo if name != "fa"])
def test_any_family_may_be_the_likelihood(name):
    sizes = {"x": 5, "z": 2, "hidden": (4,)}
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
        ("vae", {"likelihood": "Gaussian"}, "Unknown likelihood 'Gaussian'. Choose one of Normal, Laplace, StudentT"),
        ("vae", {"likelihood": 3}, "likelihood is a family's name or a conditional, got 3."),
        ("fa", {"posterior": "exact"}, "Unknown posterior 'exact'. Choose one of full, diagonal, fixed."),
        ("cvae", {"variant": "none"}, "Unknown variant 'none'. Choose one of both, prior, likelihood."),
        ("vrnn", {"posterior": "full"}, "Unknown posterior 'full'. Choose one of filtering, smoothing."),
    ],
)
def test_an_unknown_variant_is_refused(name, setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        zoo[name](**setting)


# The command line ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``aevb …`` in this process: exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


def test_models_lists_the_zoo(run):
    code, out, err = run("models")
    listed, _, hint = out.strip().partition("\n\n")
    assert (code, err) == (0, "")
    assert hint == "See one derived: aevb explain gmvae"
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(zoo)
    assert all(len(line.split()) > 3 for line in lines[::2])  # each with what it is
    for name, line in zip(zoo, lines[1::2], strict=True):  # and with its arguments
        assert [part.split("=")[0] for part in re.findall(r"\w+=", line)] == list(inspect.signature(zoo[name]).parameters)


@pytest.mark.parametrize("command", ["train", "evaluate", "sample", "encode", "impute", "explain"])
def test_every_command_shows_an_example(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"aevb {command}" in out.replace(f"Usage: aevb {command}", "")
    assert "[default: (dynamic)]" not in out


def test_explain_takes_the_models_arguments(run):
    code, out, _ = run("explain", "gmvae", "--set", "y=3", "--set", "hidden=[8,8]", "--set", "likelihood=Normal")
    assert code == 0
    assert "Normal(784, net=mlp(8, 8, init='glorot_normal'))" in out
    assert "3 values" in out


def test_a_number_is_a_list_of_one_where_a_list_is_meant(run):
    found = [run("explain", "gmvae", "--set", f"hidden={text}") for text in ("16", "[16]")]
    assert found[0] == found[1]
    assert found[0][0] == 0
    assert "mlp(16" in found[0][1]


def test_explain_prints_the_model_and_its_derivation(run):
    code, out, err = run("explain", "gmvae")
    model = zoo["gmvae"]()
    assert (code, err) == (0, "")
    assert out == f"{model}\n\n{model.explain()}\n"


def test_explain_takes_the_plans_choices(run):
    code, out, _ = run("explain", "gmvae", "--how", "y=gumbel", "--samples", "3")
    assert code == 0
    assert "y: gumbel: as asked." in out
    assert "1/3 Σₛ" in out
    code, out, _ = run("explain", "vae", "--bound", "iwae", "--samples", "5", "--gradient", "dreg")
    assert code == 0
    assert "importance-weighted bound, K = 5" in out
    assert "doubly reparametrised" in out


def test_explain_prints_latex(run):
    code, out, _ = run("explain", "gmvae", "--latex")
    assert code == 0
    assert out == zoo["gmvae"]().explain().latex + "\n"


FILE = """
from aevb import Model, Normal

tiny = Model({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal()})
number = 3

def build():
    return Model({"w": Normal(1), "x | w": Normal(3)}, {"w | x": Normal()})
"""


def test_explain_reads_a_file_of_ones_own_and_a_saved_folder(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    code, out, _ = run("explain", f"{path}:tiny")
    assert code == 0
    assert out.startswith("p:  p(z) p(x|z)   (18 parameters θ)")
    code, out, _ = run("explain", f"{path}:build")
    assert code == 0
    assert out.startswith("p:  p(w) p(x|w)")
    zoo["fa"]().save(tmp_path / "saved")
    code, out, _ = run("explain", tmp_path / "saved")
    assert code == 0
    assert out == f"{zoo['fa']()}\n\n{zoo['fa']().explain()}\n"


def test_a_file_named_like_a_module_does_not_take_its_place(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "random", random)  # put back afterwards
    (tmp_path / "random.py").write_text(FILE)
    assert run("explain", f"{tmp_path / 'random.py'}:tiny")[0] == 0
    assert sys.modules["random"] is random


MISTAKES = {
    "unknown model": (
        ["explain", "gmva"],
        "There is no model 'gmva'. Name one of fa, vae, cvae, gmvae, m2, vrnn, a file.py:name, or the folder of a run or a saved model.",
    ),
    "no such file": (["explain", "nowhere.py:vae"], "There is no file nowhere.py."),
    "no such name": (["explain", "FILE:huge"], "FILE has no 'huge'. Its models are tiny."),
    "not a model": (["explain", "FILE:number"], "not a Model or a function that returns one."),
    "how without a choice": (["explain", "gmvae", "--how", "y"], "--how takes latent=choice, e.g. --how y=gumbel; got 'y'."),
    "how of data": (["explain", "gmvae", "--how", "x=gumbel"], "how names 'x', which is not a latent. The latents are y, z."),
    "unknown choice": (["explain", "gmvae", "--how", "y=guess"], "how={'y': 'guess'}: unknown word 'guess'. Draws: enumerate,"),
    "impossible choice": (["explain", "gmvae", "--how", "z=gumbel"], "only OneHot and Bernoulli have a relaxation, z is a Normal."),
    "unknown bound": (["explain", "gmvae", "--bound", "elbow"], "Unknown bound 'elbow'. Choose one of elbo, iwae."),
    "unknown gradient": (["explain", "gmvae", "--gradient", "sgd"], "Unknown gradient 'sgd'. Choose one of plain, stl, dreg."),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(arguments, message, run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    code, out, err = run(*(argument.replace("FILE", str(path)) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("aevb: ")
    assert err.count("\n") == 1
    assert message.replace("FILE", str(path)) in err


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "aevb", "explain", "nope"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "aevb: There is no model 'nope'. Name one of fa, vae, cvae, gmvae, m2, vrnn, a file.py:name, or the folder of a run or a saved model.\n"
    )


def test_importing_the_library_imports_nothing_heavy():
    heavy = ("scipy", "sklearn", "matplotlib", "typer", "rich", "pandas")
    code = f"import sys; from aevb import *; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_fit_does_not_load_torchs_compiler_unless_it_compiles():
    """It takes as long to load as torch itself. 1,020 steps: enough for one to be recorded."""
    code = (
        "import sys, torch; from aevb import fit, zoo; from aevb.training import gradient_steps as step; made = step.compile_step; count = []\n"
        "step.compile_step = lambda *given, **more: (count.append(1), made(*given, **more))[1]\n"
        "fit(zoo.vae(16, 2, hidden=(8,)), {'x': torch.rand(60, 16)}, steps=1020, batch=20, progress=False)\n"
        "print(len(count), [name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1 []\n"


# What a name costs -------------------------------------------------------------------------------------------------------------------------


def test_public_names_are_imported_when_they_are_asked_for():
    """Those who check types read other lines than Python does: both say the same."""
    stub = ast.parse(Path(aevb.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    told = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    exported = next(ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert set(aevb.__all__) == set(told) == set(exported)
    for name, module in told.items():
        assert getattr(aevb, name) is getattr(importlib.import_module(module), name)
    assert set(aevb.__all__) <= set(dir(aevb))
    for odd in ("Norml", "", "zoo.vae", "training.fit", "_HOM"):
        with pytest.raises(AttributeError, match=f"module 'aevb' has no attribute {odd!r}"):
            getattr(aevb, odd)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from aevb import nothing")


@pytest.mark.parametrize("asked", [["--help"], ["--version"], ["train", "--help"], ["trian"]])
def test_help_does_not_wait_for_torch(asked):
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); sys.argv[1:] = {asked}; from aevb.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"
    assert done.returncode == (2 if asked == ["trian"] else 0)


def test_a_module_is_found_by_its_name_too():
    code = "import aevb; print(aevb.zoo.vae(4, 2).graph.latents)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "('z',)\n"
