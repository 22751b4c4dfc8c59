"""Tests of saving and loading.

A loaded model equals the saved one bit for bit, a folder holds data only, and a damaged folder is
refused with the name of the file.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributions as td
from safetensors.torch import load_file, save_file
from torch.nn.functional import softplus

import aevb
from aevb import (
    GRU,
    LSTM,
    Bernoulli,
    Beta,
    Conditional,
    ContinuousBernoulli,
    Deterministic,
    Exact,
    Laplace,
    Mixture,
    Model,
    MultivariateNormal,
    NegativeBinomial,
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
from aevb.model_folder import FILES
from aevb.runtime.checked_files import IntegrityWarning, file_sha256
from aevb.zoo import zoo

N, T = 6, 3


def uniform(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def binary(*shape):
    return (uniform(*shape) > 0.5).float()


LABELS = torch.arange(N) % 3
HOLES = torch.where(uniform(N, 4) < 0.3, float("nan"), uniform(N, 4))

MODELS = {
    # The models of the zoo, with all variants.
    "fa": (lambda: zoo["fa"](), {"x": uniform(N, 3)}),
    "fa diagonal": (lambda: zoo["fa"](posterior="diagonal"), {"x": uniform(N, 3)}),
    "fa fixed": (lambda: zoo["fa"](posterior="fixed", scale=0.3), {"x": uniform(N, 3)}),
    "vae": (lambda: zoo["vae"](4, 2, hidden=(5, 5)), {"x": uniform(N, 4)}),
    "vae clamped": (
        lambda: zoo["vae"](
            4, 2, hidden=(5,), likelihood=ContinuousBernoulli(4, net=mlp(3), clamped=True)
        ),
        {"x": uniform(N, 4)},
    ),
    "cvae": (lambda: zoo["cvae"](4, 2, 3, hidden=(5, 5)), {"x": uniform(N, 4), "y": LABELS}),
    "cvae prior": (
        lambda: zoo["cvae"](4, 2, 3, variant="prior", hidden=(5,)),
        {"x": uniform(N, 4), "y": LABELS},
    ),
    "cvae likelihood": (
        lambda: zoo["cvae"](4, 2, 3, variant="likelihood", hidden=(5,)),
        {"x": uniform(N, 4), "y": LABELS},
    ),
    "gmvae": (lambda: zoo["gmvae"](4, 2, 3, hidden=(5, 5)), {"x": binary(N, 4)}),
    "m2": (
        lambda: zoo["m2"](4, 2, 3, hidden=(5, 5)),
        {"x": binary(N, 4), "y": torch.where(LABELS > 0, LABELS, -1)},
    ),
    "vrnn": (lambda: zoo["vrnn"](4, 2, 3, hidden=(5,)), {"x": binary(N, T, 4)}),
    "vrnn smoothing": (
        lambda: zoo["vrnn"](4, 2, 3, posterior="smoothing", hidden=(5,)),
        {"x": binary(N, T, 4), "lengths": [3, 2, 1, 3, 3, 2]},
    ),
    # Networks.
    "conv": (
        lambda: Model(
            {"z": Normal(2), "x | z": Bernoulli((1, 6, 5), net=deconv(4, 3, hidden=5))},
            {"z | x": Normal(net=conv(3, 4, hidden=5, activation="elu"))},
        ),
        {"x": binary(N, 1, 6, 5)},
    ),
    "table": (
        lambda: Model(
            {"z": Normal(2), "x | z": Normal(4)}, {"z | i": Normal(net=table(N))}, given={"i": 1}
        ),
        {"x": uniform(N, 4), "i": torch.arange(N)},
    ),
    "missing=mask": (
        lambda: Model(
            {"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal(net=mlp(5))}, missing="mask"
        ),
        {"x": HOLES},
    ),
    "linear without bias": (
        lambda: Model(
            {"z": Normal(2), "x | z": Normal(4, net=linear(bias=False))}, {"z | x": Normal()}
        ),
        {"x": uniform(N, 4)},
    ),
    # Families.
    "Exact": (
        lambda: Model(
            {"y": OneHot(3, learned=True), "z | y": Normal(2), "x | z": Normal(4)},
            {"z | x": Normal(net=mlp(5)), "y | z": Exact()},
        ),
        {"x": uniform(N, 4)},
    ),
    "Mixture": (
        lambda: Model(
            {"z": Normal(2), "x | z": Normal(4)}, {"z | x": Mixture(components=3, net=mlp(5))}
        ),
        {"x": uniform(N, 4)},
    ),
    "MultivariateNormal": (
        lambda: Model(
            {
                "z": MultivariateNormal(2, learned=True),
                "x | z": MultivariateNormal(4, covariance="shared"),
            },
            {"z | x": MultivariateNormal()},
        ),
        {"x": uniform(N, 4)},
    ),
    "other families": (
        lambda: Model(
            {
                "a": Laplace(2),
                "b": Beta(1),
                "y": Bernoulli(2, learned=True),
                "h | a, b, y": Deterministic(3, activation="tanh"),
                "x | h": StudentT(4, df=3.0, scale="learned"),
                "n1 | h": Poisson(2),
                "n2 | h": NegativeBinomial(2),
            },
            {
                "g | x": Deterministic(4, net=mlp(5)),
                "a | g": Laplace(),
                "b | g": Beta(),
                "y | g": Bernoulli(),
            },
        ),
        {"x": uniform(N, 4), "n1": binary(N, 2), "n2": 3 * binary(N, 2)},
    ),
    # Time.
    "ends in time": (
        lambda: Model(
            {
                "z[0]": Normal(2, learned=True),
                "z[t] | z[t-1], c": Normal(2, net=mlp(4)),
                "c": OneHot(2),
                "x[t] | z[t]": Normal(4),
                "x[T] | z[T], c": Normal(4, net=mlp(3)),
            },
            {
                "b[t] | b[t+1], x[t]": GRU(3),
                "c | b[0]": OneHot(),
                "z[0] | b[0], c": Normal(),
                "z[t] | z[t-1], b[t], c": Normal(net=mlp(4)),
                "z[T] | b[T]": Normal(),
            },
        ),
        {"x": uniform(N, T, 4), "lengths": [3, 2, 1, 3, 3, 2]},
    ),
    "a state that starts somewhere": (
        lambda: Model(
            {
                "c": Normal(2),
                "h[0] | c": Deterministic(3),
                "h[t] | h[t-1], x[t-1]": LSTM(3, layers=2),
                "x[t] | h[t], u[t]": Normal(4),
            },
            {"b[t] | b[t+1], x[t]": GRU(3), "c | b[0]": Normal()},
            given={"u": 2},
        ),
        {"x": uniform(N, T, 4), "u": uniform(N, T, 2)},
    ),
    "a discrete chain": (
        lambda: Model(
            {"y[0]": OneHot(3), "y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(4)},
            {"y[t] | y[t-1], x[t]": OneHot(net=mlp(4))},
        ),
        {"x": uniform(N, T, 4)},
    ),
}


def scrambled(build):
    """Return the model with every parameter moved away from its initial value."""
    model, generator = build(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_gives_the_saved_ones_bound_to_the_last_bit(name, dtype, tmp_path):
    build, data = MODELS[name]
    model = scrambled(build).to(dtype)
    model.save(tmp_path / "model")
    loaded = aevb.load(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "manifest.json",
        "model.json",
        "weights.safetensors",
    ]
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert {buffer.dtype for buffer in loaded.buffers()} <= {dtype}
    assert str(loaded) == str(model)
    assert loaded.declaration() == model.declaration()
    assert not loaded.training
    for mode in (False, True):
        bound, again = (one.train(mode).elbo(**data, seed=0) for one in (model, loaded))
        assert bound.value.dtype == dtype
        assert torch.isfinite(bound.value).all()
        assert torch.equal(bound.value, again.value)
        assert all(torch.equal(bound.terms[key], again.terms[key]) for key in bound.terms)


def test_the_files_are_json_and_tensors_and_nothing_else(tmp_path):
    model = zoo["gmvae"](4, 2, 3, hidden=(5,))
    model.save(tmp_path)
    declaration = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert declaration == {
        "format": "aevb model",
        "version": 1,
        "p": {
            "y": {"type": "OneHot", "size": 3},
            "z | y": {"type": "Normal", "size": 2, "net": {"type": "mlp", "init": "glorot_normal"}},
            "x | z": {
                "type": "Bernoulli",
                "size": 4,
                "net": {"type": "mlp", "hidden": [5], "init": "glorot_normal"},
            },
        },
        "q": {
            "y | x": {
                "type": "OneHot",
                "net": {"type": "mlp", "hidden": [5], "init": "glorot_normal"},
            },
            "z | x, y": {
                "type": "Normal",
                "net": {"type": "mlp", "hidden": [5], "init": "glorot_normal"},
            },
        },
        "given": {},
        "missing": "zeros",
    }
    weights = load_file(tmp_path / "weights.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"pickle" not in content
    assert b"aevb.declare.conditionals" not in content  # names, not paths to code


def test_a_declaration_as_data_gives_a_fresh_model():
    model = MODELS["ends in time"][0]()
    data = json.loads(json.dumps(model.declaration()))
    fresh = aevb.from_declaration(data)
    assert str(fresh) == str(model)
    assert not any(torch.equal(a, b) for a, b in zip(fresh.phi(), model.phi(), strict=True))


def test_saving_again_replaces_what_was_there(tmp_path):
    zoo["fa"]().save(tmp_path)
    model = scrambled(lambda: zoo["gmvae"](4, 2, 3, hidden=(5,)))
    model.save(str(tmp_path))  # a path may be a string
    loaded = aevb.load(str(tmp_path))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )


KILLED = """
import os, pathlib, sys
import safetensors.torch, torch
from aevb.zoo import zoo

def model(seed):
    torch.manual_seed(seed)
    return zoo["fa"]() if seed == 1 else zoo["gmvae"](4, 2, 3, hidden=(5,))

def dying(where, name, at):
    whole = getattr(where, name)
    def call(*arguments, **options):
        count[0] += 1
        if count[0] == at:
            if name == "save_file":  # half a file
                whole(*arguments, **options)
                os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
            os._exit(9)
        return whole(*arguments, **options)
    setattr(where, name, call)

out, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
models = [model(1), model(2)]
at, killed = 1, True
while killed:  # one save more for each place to be killed at
    folder = out / str(at)
    if first:
        models[0].save(folder)
    child = os.fork()
    if child == 0:
        count = [0]
        for where, name in (
            (os, "fsync"), (os, "open"), (pathlib.Path, "open"), (pathlib.Path, "replace"),
            (pathlib.Path, "unlink"), (safetensors.torch, "save_file"),
        ):
            dying(where, name, at)
        models[1].save(folder)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    at += 1
print(at - 2)
"""


def _same(a, b):
    return a.declaration() == b.declaration() and all(
        torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_model_or_the_new_one(first, tmp_path):
    """Kill a save at every open, write, fsync, rename and removal.

    The model that is left must load, and a new save into the folder must work.
    """
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "out"), str(int(first))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    places = int(done.stdout)
    assert places >= 12
    torch.manual_seed(1)
    old = zoo["fa"]()
    torch.manual_seed(2)
    new = zoo["gmvae"](4, 2, 3, hidden=(5,))
    seen = []
    for at in range(1, places + 2):
        folder = tmp_path / "out" / str(at)
        if first or (folder / "manifest.json").exists():
            loaded = aevb.load(folder)
            seen.append("new" if _same(loaded, new) else "old" if _same(loaded, old) else "mixed")
        else:
            with pytest.raises(ValueError, match="holds no saved model"):
                aevb.load(folder)
            seen.append("none")
        old.save(folder)
        assert _same(aevb.load(folder), old)
        left = {path.name for path in folder.iterdir()} - {"manifest.json.writing"}
        assert left == {"manifest.json", "model.json", "weights.safetensors"}
    before = "old" if first else "none"
    assert set(seen) == {before, "new"}
    assert seen == sorted(seen, key=[before, "new"].index)


def test_a_full_disk_leaves_the_old_model(tmp_path, monkeypatch):
    model = zoo["fa"]()
    model.save(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        zoo["gmvae"](4, 2, 3).save(tmp_path)
    assert _same(aevb.load(tmp_path), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "model.json",
        "weights.safetensors",
    ]


def test_a_file_is_no_folder_to_save_into(tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(
            ValueError,
            match=re.escape(f"{path} cannot be a folder: it or one of its parents is a file."),
        ):
            zoo["fa"]().save(path)
    assert (tmp_path / "file").read_text() == "kept"


# Classes of one's own -----------------------------------------------------------------------------


@aevb.register
@dataclass(frozen=True)
class ShiftedGamma(Conditional):
    """Positive data; the example of the documentation."""

    shift: float = 0.0
    support = td.constraints.positive
    fill = 1.0

    def heads(self, d):
        return {"concentration": d, "rate": d}

    def distribution(self, concentration, rate):
        return td.Gamma(softplus(concentration) + self.shift, softplus(rate), validate_args=False)


@dataclass(frozen=True)
class LogNormal(Conditional):
    """The same family, but not registered."""

    support = td.constraints.positive
    fill = 1.0

    def heads(self, d):
        return {"loc": d}

    def distribution(self, loc):
        return td.LogNormal(loc, loc.new_ones(()), validate_args=False)


@dataclass(frozen=True, repr=False)
class squares(aevb.Network):
    """A network of the user's own: the wrapped network's first layer, squared."""

    width: int = 3

    def build(self, parents, heads, shape, masked):
        module = mlp(self.width).build(parents, heads, shape, masked)
        module.activation = torch.square
        return module


CUSTOM = {
    "registered": (
        lambda: Model({"z": Normal(2), "x | z": ShiftedGamma(4, shift=0.5)}, {"z | x": Normal()}),
        [],
    ),
    "handed over": (
        lambda: Model({"z": Normal(2), "x | z": LogNormal(4)}, {"z | x": Normal()}),
        [LogNormal],
    ),
    "a network": (
        lambda: Model({"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal(net=squares(5))}),
        [squares],
    ),
}


@pytest.mark.parametrize(("build", "custom"), CUSTOM.values(), ids=CUSTOM)
def test_a_class_of_ones_own_is_saved_by_name(build, custom, tmp_path):
    model, x = scrambled(build), 0.1 + uniform(N, 4)
    model.save(tmp_path)
    loaded = aevb.load(tmp_path, custom=custom)
    assert torch.equal(model.elbo(x=x, seed=0).value, loaded.elbo(x=x, seed=0).value)
    for cls in custom:  # ``custom=`` does not register a class
        message = (
            f"The saved model uses {cls.__name__!r}, which is not a known conditional or network. "
            f"Pass its class: load(path, custom=["
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            aevb.load(tmp_path)


def test_what_can_be_registered():
    @dataclass(frozen=True)
    class Normal(Conditional):
        """A class with the name of a registered one."""

    with pytest.raises(
        ValueError,
        match=re.escape(
            "The name 'Normal' is taken by aevb.declare.families.Normal. Rename the class."
        ),
    ):
        aevb.register(Normal)

    with pytest.raises(
        TypeError,
        match=re.escape("Int is not a dataclass. Put @dataclass(frozen=True) below @register."),
    ):
        aevb.register(type("Int", (int,), {}))

    @dataclass
    class Mutable:
        a: int = 0

    with pytest.raises(
        TypeError, match=re.escape("Mutable is a mutable dataclass. Write @dataclass(frozen=True).")
    ):
        aevb.register(Mutable)


def test_a_setting_that_is_no_data_cannot_be_saved(tmp_path):
    @dataclass(frozen=True)
    class Curved(LogNormal):
        function: object = None

    model = Model({"z": Normal(2), "x | z": Curved(4, function=torch.sin)}, {"z | x": Normal()})
    with pytest.raises(
        TypeError,
        match="A declaration holds numbers, strings, tuples and registered specifications, not "
        "builtin",
    ):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model" / "model.json").exists()


# Damage -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    zoo["gmvae"](4, 2, 3, hidden=(5,)).save(folder)
    return folder


def edit(change):
    """Change the declaration on disk."""

    def damage(folder):
        path = folder / "model.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(change(data)), encoding="utf-8")

    return damage


def weights(change):
    """Change the weights on disk."""

    def damage(folder):
        path = folder / "weights.safetensors"
        save_file(change(load_file(path)), path)

    return damage


def cut(name, share):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return damage


def resave(folder):
    """Write the manifest for the files as they are now."""
    path = folder / "manifest.json"
    files = {
        name: {"sha256": file_sha256(folder / name), "bytes": (folder / name).stat().st_size}
        for name in FILES
        if (folder / name).exists()
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))


def without(mapping, *names):
    return {key: value for key, value in mapping.items() if key not in names}


HEADS = "factors.p(x|z).net.heads.weight"
DAMAGE = {
    "no folder": (shutil.rmtree, "holds no saved model: model.json is missing."),
    "no declaration": (
        lambda folder: (folder / "model.json").unlink(),
        "holds no saved model: model.json is missing.",
    ),
    "no weights": (
        lambda folder: (folder / "weights.safetensors").unlink(),
        "holds no saved model: weights.safetensors is missing.",
    ),
    "half a declaration": (cut("model.json", 0.5), "model.json is damaged: "),
    "empty declaration": (cut("model.json", 0), "model.json is damaged: "),
    "not text": (
        lambda folder: (folder / "model.json").write_bytes(b"\xff\xfe\x00"),
        "model.json is damaged: ",
    ),
    "half the weights": (
        cut("weights.safetensors", 0.9),
        "weights.safetensors is damaged or not a safetensors file: ",
    ),
    "empty weights": (
        cut("weights.safetensors", 0),
        "weights.safetensors is damaged or not a safetensors file: ",
    ),
    "a pickle": (
        lambda folder: torch.save({"a": torch.ones(2)}, folder / "weights.safetensors"),
        "is damaged or not a safetensors file: ",
    ),
    "another format": (
        edit(lambda data: data | {"format": "onnx"}),
        "This is not an aevb model's declaration.",
    ),
    "a list": (edit(lambda data: [data]), "This is not an aevb model's declaration."),
    "a number": (edit(lambda data: 3), "This is not an aevb model's declaration."),
    "newer": (
        edit(lambda data: data | {"version": 2}),
        "The model was saved in format 2, newer than this version's 1. Update aevb.",
    ),
    "no p": (edit(lambda data: without(data, "p")), "This is not an aevb model's declaration"),
    "p is a list": (
        edit(lambda data: data | {"p": [1]}),
        "This is not an aevb model's declaration",
    ),
    "given is a list": (
        edit(lambda data: data | {"given": ["y"]}),
        "This is not an aevb model's declaration",
    ),
    "version is text": (
        edit(lambda data: data | {"version": "two"}),
        "This is not an aevb model's declaration",
    ),
    "type is a list": (
        edit(lambda data: data | {"p": data["p"] | {"y": {"type": ["OneHot"]}}}),
        "The saved model uses ['OneHot'], which is not",
    ),
    "unknown class": (
        edit(lambda data: data | {"p": data["p"] | {"z | y": {"type": "Wishart", "size": 2}}}),
        "The saved model uses 'Wishart', which is not a known conditional or network. Pass its "
        "class: load(path, custom=[Wishart]).",
    ),
    "a path to code": (
        edit(lambda data: data | {"p": data["p"] | {"z | y": {"type": "os.system", "size": 2}}}),
        "The saved model uses 'os.system', which is not a known",
    ),
    "unknown setting": (
        edit(
            lambda data: data | {"p": data["p"] | {"y": {"type": "OneHot", "size": 3, "colour": 1}}}
        ),
        "The saved model gives OneHot a setting 'colour' that it does not have; it may come from "
        "another version.",
    ),
    "impossible size": (
        edit(lambda data: data | {"p": data["p"] | {"y": {"type": "OneHot", "size": 0}}}),
        "OneHot: a size is a positive whole number or a tuple of them",
    ),
    "another size": (
        edit(lambda data: data | {"p": data["p"] | {"x | z": data["p"]["x | z"] | {"size": 5}}}),
        "factors.p(x|z).net.heads.weight has shape [4, 5], the declaration says [5, 5].",
    ),
    "a factor less": (
        edit(lambda data: data | {"q": without(data["q"], "y | x")}),
        "the weights and the declaration disagree: factors.q(y|x).net.",
    ),
    "a weight less": (
        weights(lambda w: without(w, HEADS)),
        f"the weights and the declaration disagree: {HEADS} is in only one of them.",
    ),
    "a weight more": (
        weights(lambda w: w | {"extra": torch.ones(1)}),
        "the weights and the declaration disagree: extra is in only one of them.",
    ),
    "a weight of another shape": (
        weights(lambda w: w | {HEADS: w[HEADS][:, :2].clone()}),
        f"{HEADS} has shape [4, 2], the declaration says [4, 5].",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_model_is_refused_by_name(damage, message, saved, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    damage(folder)
    if folder.exists():
        if all((folder / name).exists() for name in FILES):
            with pytest.raises(
                ValueError,
                match=r"is damaged: \d+ bytes instead of \d+|was changed: its SHA-256 is not the "
                r"one in manifest.json",
            ):
                aevb.load(folder)
        resave(folder)  # as if it had been saved like this
    with pytest.raises(ValueError, match=re.escape(message)):
        aevb.load(folder)


def test_no_change_of_a_byte_goes_unnoticed(saved, tmp_path):
    model, generator, named = aevb.load(saved), torch.Generator().manual_seed(0), 0
    for name in (*FILES, "manifest.json"):
        content = (saved / name).read_bytes()
        for place in torch.randint(len(content), (40,), generator=generator).tolist():
            folder = tmp_path / f"{name} {place}"
            shutil.copytree(saved, folder, dirs_exist_ok=True)
            (folder / name).write_bytes(
                content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
            )
            try:
                found = aevb.load(folder)
            except ValueError as error:
                named += str(folder) in str(error)
                continue
            named += 1
            assert name == "manifest.json"  # whitespace between its entries has no effect
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    model.state_dict().values(), found.state_dict().values(), strict=True
                )
            )
    assert named == 120


def test_a_model_that_an_earlier_version_saved_is_read_with_a_warning(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "old")
    (tmp_path / "old" / "manifest.json").unlink()
    with pytest.warns(
        IntegrityWarning,
        match=re.escape(
            f"{tmp_path / 'old'} has no manifest.json, so damage to the model would not be noticed"
        ),
    ):
        loaded = aevb.load(tmp_path / "old")
    loaded.save(tmp_path / "old")
    aevb.load(tmp_path / "old")


@pytest.mark.parametrize("name", ["model.json", "weights.safetensors", "manifest.json"])
def test_saving_overwrites_no_file_of_anybody_else(name, tmp_path):
    (tmp_path / name).write_text('{"name": "my site"}')
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"{tmp_path / name} does not belong to a saved model and would be overwritten. Save "
            f"the model elsewhere"
        ),
    ):
        zoo["fa"]().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"name": "my site"}'


def test_saving_into_a_run_or_nowhere_is_refused(tmp_path):
    model = zoo["fa"]()
    aevb.fit(model, {"x": uniform(N, 3)}, steps=2, out=tmp_path)
    before = (tmp_path / "model.json").read_bytes()
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"{tmp_path} holds a run, whose model.json would be overwritten. Save the model "
            f"elsewhere."
        ),
    ):
        zoo["gmvae"](4, 2, 3).save(tmp_path)
    assert (tmp_path / "model.json").read_bytes() == before
    with pytest.raises(ValueError, match="names no folder"):
        model.save("")


# Hostile declarations -----------------------------------------------------------------------------


def factor(side, key, **settings):
    return edit(lambda data: data | {side: data[side] | {key: data[side][key] | settings}})


def network(**settings):
    return factor("q", "y | x", net={"type": "mlp", "hidden": [5]} | settings)


def text(content):
    return lambda folder: (folder / "model.json").write_text(content)


def header(content, data=b""):
    return lambda folder: (folder / "weights.safetensors").write_bytes(
        len(content).to_bytes(8, "little") + content + data
    )


HOSTILE = {
    "nested": (
        text("[" * 100_000 + "]" * 100_000),
        "model.json is damaged: it is nested too deeply",
    ),
    "nested a little": (
        text("[" * 40 + "]" * 40),
        "model.json is damaged: it is nested more than 32 levels deep",
    ),
    "long": (
        text(" " * (2**22 + 1)),
        "model.json is damaged: it has 4,194,305 bytes, more than the 4,194,304 that are read",
    ),
    "a huge size": (
        factor("p", "x | z", size=10**12),
        "the sizes in the declaration are larger than the weights in the file",
    ),
    "a huge root": (
        factor("p", "y", size=10**12),
        "the sizes in the declaration are larger than the weights in the file",
    ),
    "a huge layer": (
        network(hidden=[10**12]),
        "the sizes in the declaration are larger than the weights in the file",
    ),
    "a huge shape": (
        factor("p", "x | z", size=[10**6, 10**6, 10**6]),
        "the sizes in the declaration are larger than the weights in the file",
    ),
    "more digits than memory": (
        factor("p", "x | z", size=10**30),
        "the sizes in the declaration are larger than the weights in the file",
    ),
    "many factors": (
        edit(
            lambda data: (
                data | {"p": {f"x{i}": {"type": "Normal", "size": 1} for i in range(10_001)}}
            )
        ),
        "at most 10000 are read",
    ),
    "many layers": (
        edit(
            lambda data: (
                data
                | {
                    "p": data["p"]
                    | {"h[t] | h[t-1], x": {"type": "LSTM", "size": 1, "layers": 10**9}}
                }
            )
        ),
        "a recurrence of 1000000000 layers, but there are only",
    ),
    "hidden a number": (
        network(hidden=5),
        "gives mlp the setting hidden=5, which has the wrong type",
    ),
    "hidden of words": (
        network(hidden=["5"]),
        "gives mlp the setting hidden=('5',), which has the wrong type",
    ),
    "dropout a word": (
        network(dropout="much"),
        "gives mlp the setting dropout='much', which has the wrong type",
    ),
    "activation a number": (
        network(activation=3),
        "gives mlp the setting activation=3, which has the wrong type",
    ),
    "net a number": (
        factor("q", "y | x", net=3),
        "gives OneHot the setting net=3, which has the wrong type",
    ),
    "net a conditional": (
        factor("q", "y | x", net={"type": "Normal", "size": 2}),
        "which has the wrong type",
    ),
    "learned a word": (
        factor("p", "y", learned="no"),
        "gives OneHot the setting learned='no', which has the wrong type",
    ),
    "size a word": (
        factor("p", "y", size="three"),
        "gives OneHot the setting size='three', which has the wrong type",
    ),
    "a factor a number": (
        edit(lambda data: data | {"p": data["p"] | {"y": 3}}),
        "p gives 'y' the value 3, which is not a conditional",
    ),
    "a key that is none": (
        edit(lambda data: data | {"p": data["p"] | {"": {"type": "Normal", "size": 1}}}),
        "Cannot read '' in ''",
    ),
    "given a number": (
        edit(lambda data: data | {"given": {"u": 5}}),
        "given must map each variable to a shape",
    ),
    "missing a list": (
        edit(lambda data: data | {"missing": ["zeros"]}),
        "missing must be a string",
    ),
    "a header longer than the file": (
        lambda folder: (folder / "weights.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
        "its header would have",
    ),
    "a header of words": (header(b"words"), "its header is no JSON"),
    "a nested header": (header(b"[" * 100_000), "its header is no JSON"),
    "a header that is a list": (header(b"[]"), "its header is no JSON object"),
    "a huge tensor": (
        header(
            json.dumps(
                {"w": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}}
            ).encode(),
            b"0000",
        ),
        "its header gives w a shape that the file has no room for",
    ),
    "a shape of words": (
        header(
            json.dumps({"w": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}).encode(),
            b"0000",
        ),
        "gives w a shape",
    ),
}


@pytest.mark.parametrize(("damage", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_folder_is_refused_at_once(damage, message, saved, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    damage(folder)
    resave(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        aevb.load(folder)


def test_a_damaged_folder_is_named_with_its_path(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "gmvae")
    cut("weights.safetensors", 0.5)(tmp_path / "gmvae")
    with pytest.raises(
        ValueError, match=re.escape(str(tmp_path / "gmvae" / "weights.safetensors"))
    ):
        aevb.load(tmp_path / "gmvae")


def test_a_run_and_a_saved_model_are_told_apart(saved, tmp_path):
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"{saved} holds a saved model, not a run. Read it by aevb.load('{saved}')."
        ),
    ):
        aevb.load_run(saved)
    aevb.fit(zoo["fa"](), {"x": uniform(N, 3)}, steps=2, out=tmp_path / "run")
    with pytest.raises(
        ValueError,
        match=re.escape("run holds a run, not a saved model. Read its model by aevb.load_run("),
    ):
        aevb.load(tmp_path / "run")


def test_a_loaded_model_has_no_dropout_until_it_is_trained(tmp_path):
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=mlp(8, dropout=0.5))},
        q={"z | x": Normal(net=torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Dropout(0.5)))},
    )
    x = torch.randn(30, 3)
    run = aevb.fit(model, {"x": x}, steps=4, seed=0, progress=False, out=tmp_path / "run")
    run.model.save(tmp_path / "saved")
    modules = {"q(z|x)": torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Dropout(0.5))}
    for found in (
        aevb.load(tmp_path / "saved", modules=modules),
        aevb.load_run(tmp_path / "run", modules=modules),
        aevb.Run.load(tmp_path / "run", modules=modules).model,
    ):
        assert not any(part.training for part in found.modules())
        noise = found.draw_noise(found.plan(), found.prepare(x=x), seed=0)
        assert set(noise) == {"z"}
    aevb.fit(found, {"x": x}, steps=1, seed=0, progress=False)
    again = [
        aevb.fit(one, {"x": x}, steps=3, seed=5, progress=False).model
        for one in (run.model, aevb.load(tmp_path / "saved", modules=modules))
    ]
    assert all(map(torch.equal, *(one.state_dict().values() for one in again)))
