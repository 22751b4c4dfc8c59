"""Exported parts: the functions are the model's own, and the files compute the same numbers."""

import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import aevb
from aevb import (
    Exact,
    Mixture,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    linear,
    zoo,
)
from aevb.export import ExportError, ExportWarning, operators, read_metadata, run_onnx, run_torch
from aevb.export.choice import part_of
from aevb.export.operators import LARGEST, NotInOnnxError
from aevb.export.values import example
from aevb.posterior.choice import UntaughtError

NAN = float("nan")
SMALL = {
    "fa": {},
    "vae": {"x": 6, "z": 2, "hidden": (8,)},
    "cvae": {"x": 6, "z": 2, "y": 3, "hidden": (8,)},
    "gmvae": {"x": 6, "z": 2, "y": 3, "hidden": (8,)},
    "m2": {"x": 6, "z": 2, "y": 3, "hidden": (8,)},
    "vrnn": {"x": 4, "z": 2, "h": 5, "hidden": (8,)},
    "local_level": {},
    "local_trend": {},
    "seasonal": {"period": 4},
    "ar": {"x": 2},
    "hmm": {"x": 2, "y": 3},
    "switching": {"u": 2},
    "volatility": {"h": 5, "hidden": (8,)},
    "dmm": {"x": 4, "z": 2, "h": 5, "hidden": (8,)},
    "srnn": {"x": 4, "z": 2, "h": 5, "hidden": (8,)},
    "kvae": {"x": 4, "hidden": (8,)},
}


def build(name, **more):
    torch.manual_seed(0)
    return zoo.zoo[name](**SMALL[name], **more).eval()


def part(model, what, **settings):
    return part_of(model, model.teaching, what, **settings)


def public(values):
    """The data among the inputs of a part."""
    return {name: value for name, value in values.items() if "." not in name and name != "start"}


def internal(noise):
    """The noise of a part as the model's own methods take it: [samples, T or 1, N, d]."""
    noise = {name.partition(".")[2]: value for name, value in noise.items() if "noise." in name}
    return {
        name: value.transpose(0, 1).unsqueeze(0) if value.dim() == 3 else value[None, None]
        for name, value in noise.items()
    }


def following(outputs):
    """The state for the next step."""
    return {
        f"state{name[4:]}": value for name, value in outputs.items() if name.startswith("next.")
    }


# The parts, without tracing -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fa", "vae", "cvae", "gmvae", "m2"])
def test_an_encoder_is_qs_posterior_and_a_decoder_ps_mean(name):
    model = build(name)
    encoder = part(model, "encoder")
    values = example(encoder, 7, 1, seed=0, missing=True)
    assert values["x"].isnan().any()
    with torch.no_grad():
        found = encoder(values)
    posterior = model.posterior(method="q", **public(values))
    for latent in model.graph.latents:
        dist = posterior[latent]
        if model.graph.rule("p", latent).spec.finite:
            torch.testing.assert_close(found[f"{latent}.probs"], dist.probs)
        else:
            torch.testing.assert_close(found[f"{latent}.mean"], dist.mean)
            torch.testing.assert_close(found[f"{latent}.sd"], dist.stddev)
    decoder = part(model, "decoder")
    given = {key: value for key, value in example(decoder, 7, 1, seed=0).items() if key != "x"}
    with torch.no_grad():
        found = decoder(given | {"x": torch.zeros(7, 6 if name != "fa" else 3)})
    expected = model.sample(7, mean=True, seed=0, **given)["x"]
    key = "x.probs" if "x.probs" in found else "x.mean"
    torch.testing.assert_close(found[key], expected)


@pytest.mark.parametrize("name", ["vae", "cvae", "gmvae", "m2"])
def test_a_score_is_the_bound_with_the_same_noise(name):
    model = build(name)
    score = part(model, "score")
    values = example(score, 7, 1, seed=0, missing=True)
    with torch.no_grad():
        found = score(values)["elbo"]
    plan = score.plan
    noise = {
        key.partition(".")[2]: value.reshape(plan.layout(7, 1, dropout=False)[key[6:]][1])
        for key, value in values.items()
        if key.startswith("noise.")
    }
    torch.testing.assert_close(found, model.elbo(noise=noise, **public(values)).value)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("fa", None), *((name, 5) for name in ("local_level", "hmm", "switching"))],
)
def test_the_score_of_a_model_with_exact_evidence_is_log_p(name, steps):
    model = build(name)
    score = part(model, "score", steps=steps)
    values = example(score, 7, 5, seed=0, missing=True)
    with torch.no_grad():
        found = score(values)["log_p"]
    assert model.log_evidence(**values).method == "exact"
    torch.testing.assert_close(found, model.log_evidence(**values).value)


def test_steps_of_a_recurrence_are_the_whole_sequence():
    """The state of every step is the output of the step before; the bounds sum to the ELBO."""
    model = build("vrnn").double()
    step, whole = part(model, "score"), part(model, "score", steps=4)
    values = example(whole, 7, 4, seed=0)
    state = {port.name: torch.randn(7, port.axes[-1]).double() for port in step.ports}
    total = torch.zeros(7).double()
    with torch.no_grad():
        expected = whole(values)
        for t in range(4):
            here = {name: value[:, t] for name, value in values.items()}
            found = step({**state, **here, "start": torch.tensor([t == 0])})
            total = total + found["elbo"]
            state = following(found)
    torch.testing.assert_close(total, expected["elbo"])
    bound = model.elbo(x=values["x"], noise=internal(values))
    torch.testing.assert_close(total, bound.value)


def test_the_encoder_and_the_prior_of_a_recurrence_step_by_step():
    model = build("vrnn").double()
    whole, step = part(model, "encoder", steps=3), part(model, "encoder")
    values = example(whole, 5, 3, seed=0)
    decoder, prior = part(model, "decoder"), part(model, "prior")
    state = {port.name: torch.zeros(5, port.axes[-1]).double() for port in step.ports}
    with torch.no_grad():
        expected = whole(values)
        for t in range(3):
            here = {name: value[:, t] for name, value in values.items()}
            inputs = {**state, **here, "start": torch.tensor([t == 0])}
            found = step(inputs)
            torch.testing.assert_close(found["z.mean"], expected["z.mean"][:, t])
            torch.testing.assert_close(found["z.sd"], expected["z.sd"][:, t])
            # The decoder and the prior compute the same state from the same step before.
            for other, key in ((decoder, "x.probs"), (prior, "z.mean")):
                got = other({**inputs, "z": found["next.z"]})
                assert got[key].shape[0] == 5
                torch.testing.assert_close(got["next.h.1"], found["next.h.1"])
            state = following(found)


def test_latents_of_every_family_have_their_moments():
    for family in (Mixture, MultivariateNormal, aevb.Beta, aevb.Laplace, aevb.StudentT, Poisson):
        torch.manual_seed(0)
        model = Model({"v": family(3), "x | v": Normal(4)}, {"v | x": family()})
        encoder = part(model, "encoder")
        with torch.no_grad():
            found = encoder(example(encoder, 5, 1, seed=0))
        x = example(encoder, 5, 1, seed=0)["x"]
        torch.testing.assert_close(
            found["v.mean"], model.posterior(method="q", x=x)["v"].mean, equal_nan=True
        )


# Files --------------------------------------------------------------------------------------------


def mixture():
    """Clusters with full covariances: log p of rows with gaps needs a factorisation per row."""
    torch.manual_seed(0)
    return Model(
        {"y": OneHot(3, learned=True), "x | y": MultivariateNormal(3, net=linear())},
        {"y | x": Exact()},
    )


FILES = {
    "ar": (lambda: build("ar"), "score", {}),  # one step of a recurrence
    "mixture": (mixture, "score", {}),
}


@pytest.fixture(scope="session", params=FILES)
def onnx_file(request, tmp_path_factory):
    pytest.importorskip("onnxruntime")
    make, what, settings = FILES[request.param]
    model = make()
    out = tmp_path_factory.mktemp("onnx") / f"{request.param}.onnx"
    return model, model.export(what=what, out=out, check=False, **settings), settings


def test_an_onnx_file_computes_the_models_numbers_for_other_rows_and_missing_entries(onnx_file):
    model, exported, settings = onnx_file
    function = part(model, exported.what, **settings)
    function.drop({port.name for port in function.ports} - set(exported.inputs))
    for rows, gaps in ((1, False), (11, True)):
        values = example(function, rows, 3, seed=rows, missing=gaps, start=False)
        with torch.no_grad():
            expected = function(values)
        found = run_onnx(exported.path, {name: value.numpy() for name, value in values.items()})
        assert set(exported.outputs) == set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value.numpy(), rtol=2e-5, atol=2e-5)
    facts = read_metadata(exported.path)
    assert (facts["what"], facts["version"]) == (exported.what, aevb.__version__)
    assert facts["declaration"] == json.loads(json.dumps(model.declaration()))
    assert [one["name"] for one in facts["inputs"]] == list(exported.inputs)


def test_a_torch_file_computes_the_models_numbers(tmp_path):
    model = build("gmvae")
    exported = model.export("torch", what="score", out=tmp_path / "score.pt2")
    assert exported.difference < 1e-6
    assert exported.inputs == {"x": ("batch", 6), "noise.z": (3, "batch", 2)}
    assert list(exported.outputs) == ["elbo", "elbo.x", "elbo.kl(y)", "elbo.kl(z)"]
    assert read_metadata(exported.path)["meaning"].startswith("ELBO of each row, 1 sample")
    x, noise = torch.zeros(2, 6), torch.zeros(3, 2, 2)
    x[1, 2:] = NAN
    found = run_torch(exported.path, {"x": x.numpy(), "noise.z": noise.numpy()})
    expected = model.elbo(x=x, noise={"z": noise.reshape(3, 1, 1, 2, 2)}).value
    np.testing.assert_allclose(found["elbo"], expected.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: value + 0.5, "z.mean differs by 5.0e-01. Do not use these outputs"),
        (lambda value: value * NAN, "z.mean has another shape, or NaN or infinite values in one"),
        (lambda value: value[:, :1], "z.mean has another shape, or NaN or infinite values in one"),
    ],
)
def test_a_file_that_computes_something_else_is_a_warning(tmp_path, monkeypatch, change, said):
    def wrong(path, inputs):
        found = run_torch(path, inputs)
        return found | {"z.mean": change(found["z.mean"])}

    monkeypatch.setattr(aevb.export, "run_torch", wrong)
    with pytest.warns(ExportWarning, match="does not compute what the model does") as told:
        exported = build("vae").export("torch", out=tmp_path / "encoder.pt2")
    assert said in str(told[0].message)
    assert exported.difference > 0.4


def test_a_weighted_score_takes_the_samples_of_fit():
    model = build("vae")
    assert part(model, "score", bound="iwae").plan.samples == 5
    assert part(model, "score", bound="iwae", samples=2).plan.samples == 2
    assert part(model, "score").plan.samples == 1


def test_a_file_in_double_precision_is_exact_to_its_rounding(tmp_path):
    """No constant, such as ½ log 2π or 0.3, is rounded to single precision (by about 3e-8)."""
    pytest.importorskip("onnxruntime")
    model = Model({"x": Normal(2, scale=0.3, learned=True)}, {}, seed=0).double()
    exported = model.export("onnx", what="score", out=tmp_path / "score.onnx")
    assert exported.difference < 1e-14


@pytest.mark.parametrize("holes", [(), (0,)])
def test_an_encoder_refuses_gaps_that_q_was_not_trained_on(holes, tmp_path):
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    gone = torch.zeros(30, 3, dtype=torch.bool)
    gone[:5, list(holes)] = True
    model = Model({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal()}, seed=0)
    aevb.fit(model, {"x": x.masked_fill(gone, NAN)}, steps=2, seed=0, progress=False)
    exported = model.export("torch", out=tmp_path / "encoder.pt2")
    assert exported.difference < 1e-5
    rows = x[:4].clone()
    rows[1, 0] = rows[2, 1] = NAN
    found = run_torch(exported.path, {"x": rows.numpy()})["z.mean"]
    known = [0, 1, 3] if holes else [0, 3]
    expected = model.posterior(x=rows[known])["z"].mean
    np.testing.assert_allclose(found[known], expected.numpy(), rtol=1e-5, atol=1e-6)
    for row in set(range(4)) - set(known):
        assert np.isnan(found[row]).all()
        with pytest.raises(UntaughtError):
            model.posterior(x=rows[row : row + 1])
    facts = read_metadata(exported.path)
    (record,) = facts["inputs"]
    assert record["missing"] == ("NaN" if holes else "refused")
    assert record.get("refused") == ([1, 2] if holes else None)
    said = "parameters of q's factors; NaN for rows whose gaps in x q was not trained on"
    assert facts["meaning"] == exported.meaning == said


def test_a_difference_in_double_precision_does_not_advise_double_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(aevb.export, "TOLERANCE", {"float32": 1e-3, "float64": -1.0})
    with pytest.warns(ExportWarning, match=r"outputs of the file\. Try the format 'onnx'\."):
        build("vae").double().export("torch", out=tmp_path / "encoder.pt2")


def test_sequences_without_a_recurrence_have_any_number_of_steps(tmp_path):
    torch.manual_seed(0)
    model = Model({"z[t]": Normal(2), "x[t] | z[t], z[t-1]": Normal(3)}, {"z[t] | x[t]": Normal()})
    exported = model.export("torch", what="score", out=tmp_path / "score.pt2")
    assert exported.inputs["x"] == ("batch", "time", 3)
    assert exported.difference < 1e-5


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vae", {"what": "code"}, "what is one of encoder, decoder, prior, score"),
        ("vae", {"format": "h5"}, "format is 'onnx' or 'torch'"),
        ("vae", {"what": "prior"}, "p's factors of z have no parents, so the prior is constant"),
        ("vae", {"what": "score", "bound": "exact"}, "log p of this model is not exact"),
        ("vae", {"steps": 3}, "has no steps"),
        ("vae", {"bound": "elbo"}, 'bound= and samples= are for what="score"'),
        ("vae", {"out": "encoder.h5"}, "does not end in .onnx"),
        ("vae", {"out": "nowhere/encoder.onnx"}, "There is no folder nowhere"),
        ("dmm", {}, r'"b[t] | b[t+1], x[t]" reads b[t+1], a later step'),
        ("hmm", {"what": "score"}, "a sum over paths of the latents"),
        ("ar", {}, "no latents, so it has no encoder"),
        ("fa", {"what": "score", "samples": 2}, "takes no samples"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(name, settings, message):
    with pytest.raises(ValueError) as error:
        build(name).export(**settings)
    assert message in str(error.value)


def test_an_outdated_q_is_refused():
    model = build("vae")
    with torch.no_grad():
        model.theta()[0].add_(1)
    for what in ("encoder", "score"):
        with pytest.raises(ValueError, match="Train q"):
            part(model, what)
    part(model, "decoder")


def test_an_operator_that_onnx_lacks_is_named(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    size = LARGEST + 1
    with pytest.raises(NotInOnnxError, match=f"linalg.cholesky, and a matrix of {size} × {size}"):
        operators.cholesky(torch.eye(size))

    def export(*_, **__):
        cause = RuntimeError("No ONNX function found for <OpOverload(op='aten.foo', overload='x')>")
        raise torch.onnx.errors.OnnxExporterError("Failed to convert") from cause

    monkeypatch.setattr(torch.onnx, "export", export)
    with pytest.raises(ExportError, match=r"ONNX has no operator for torch's aten\.foo"):
        build("vae").export(out=tmp_path / "encoder.onnx")
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True, repr=False)
class Deciding(aevb.Network):
    """A network that decides by the values of its inputs."""

    def build(self, parents, heads, shape, masked):
        net = linear().build(parents, heads, shape, masked)
        rest = net.rest
        net.rest = lambda h, keep=(): rest(h, keep) * (2 if h.sum() > 0 else 1)
        return net


def test_a_network_that_decides_by_values_is_refused(tmp_path, capfd):
    model = Model({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal(net=Deciding())})
    with pytest.raises(ExportError, match=r"decides by the values of tensors.*Use torch\.where"):
        model.export("torch", out=tmp_path / "encoder.pt2")
    assert capfd.readouterr().err == ""


def test_one_step_of_a_chain_that_is_summed_is_refused():
    p = {"y[0]": OneHot(3), "y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(2)}
    model = Model(p, {"y[t] | y[t-1], x[t]": OneHot()})
    with pytest.raises(ValueError, match=r"the probabilities of y\[t\] are summed"):
        model.export()
    assert part(model, "encoder", steps=3).steps == 3


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"ONNX files need the package onnxscript: pip install"):
        build("vae").export(out=tmp_path / "encoder.onnx")


# Tables and the command line ----------------------------------------------------------------------


def test_the_file_of_a_table_says_how_columns_are_prepared(tmp_path):
    import pandas as pd

    numbers = np.random.default_rng(0)
    frame = pd.DataFrame({"a": numbers.normal(size=60) * 9, "b": numbers.choice(["u", "v"], 60)})
    schema = aevb.Schema.read(frame)
    table = schema.fit(schema.mixture(2), frame, seed=0, progress=False)
    exported = table.export("torch", what="score", out=tmp_path / "score.pt2")
    facts = read_metadata(exported.path)
    assert facts["schema"] == json.loads(schema.to_json())
    data = {name: np.asarray(value, exported.dtype) for name, value in schema.encode(frame).items()}
    found = run_torch(exported.path, {name: data[name] for name in exported.inputs})
    expected = table.score(frame)["log_p"] - schema.log_jacobian(frame)
    np.testing.assert_allclose(found["log_p"], expected, rtol=1e-4)


def test_the_command_prints_what_it_wrote(tmp_path, monkeypatch, capsys):
    from aevb import cli

    monkeypatch.chdir(tmp_path)
    words = ["aevb", "export", "vae", "--set", "x=4", "--set", "z=2", "--out", "encoder.pt2"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert printed.startswith(
        "encoder.pt2: parameters of q's factors, in float32\n  inputs   x [batch, 4]\n"
    )
    assert "largest difference from the model: " in printed
    monkeypatch.setattr(sys, "argv", ["aevb", "export", "vae", "--out", "encoder.txt"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "is neither .onnx nor .pt2" in capsys.readouterr().err
