"""Runs of models with networks and families of the user: --code names their file."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aevb.cli import main
from aevb.declare import serialization
from aevb.page.server.workers import Job, JobError, Worker

MODELS = """
from dataclasses import dataclass
import torch.distributions as td
from torch import nn
from torch.distributions import constraints
from aevb import Bernoulli, Conditional, Model, Normal

def model(z, net):
    return Model(p={"z": Normal(z), "x | z": Bernoulli(64)}, q={"z | x": Normal(net=net)})

plain = model(2, nn.Sequential(nn.Linear(64, 8), nn.Tanh()))

@dataclass(frozen=True, repr=False)
class Unregistered(Conditional):
    support = constraints.positive
    def heads(self, d):
        return {"rate": d}
    def distribution(self, rate):
        return td.Exponential(rate.exp(), validate_args=False)

positive = Model(p={"z": Normal(2), "x | z": Unregistered(2)}, q={"z | x": Normal()})

def build(z=3):
    return model(z, nn.Sequential(nn.Linear(64, 8), nn.Tanh()))
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run ``aevb …`` in a folder with models.py: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["aevb", *arguments])
        monkeypatch.setattr(serialization, "_offered", [])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("name", "file"), [("plain", "models.py"), ("build", "models.py:build")])
def test_a_run_with_networks_of_its_own_is_read_with_its_file(run, name, file):
    train = ("train", f"models.py:{name}", "--data", "digits", "--steps", "2", "--out", "run", "-q")
    assert run(*train)[0] == 0
    for command in (("sample", "run"), ("evaluate", "run", "--samples", "0"), ("card", "run")):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert "has a network of your own in q(z|x), Sequential(…). Name the Python file" in err
        assert "aevb --code FILE.py" in err
    for command in (("sample", "run"), ("evaluate", "run", "--samples", "0", "--device", "auto")):
        assert run("--code", file, *command)[0] == 0


def test_a_run_with_an_unregistered_family_is_read_with_its_file(run, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).exponential(size=(40, 2)))
    train = ("train", "models.py:positive", "--data", "x.npy", "--steps", "2", "--out", "run")
    code, out, _ = run(*train)
    assert code == 0
    assert out.splitlines()[-1].startswith("Next: aevb --code models.py evaluate run; aevb --code")
    code, _, err = run("sample", "run")
    assert code == 2
    assert "uses 'Unregistered', which is not a known conditional" in err
    for command in (("sample", "run"), ("evaluate", "run", "--samples", "0")):
        assert run("--code", "models.py", *command)[0] == 0
    code, out, _ = run("--code", "models.py", "card", "run")
    assert (code, "Next: aevb --code models.py push run" in out) == (0, True)


def test_the_next_commands_name_a_file_only_if_it_is_needed(run):
    file = "from aevb import zoo\nmodel = zoo.vae(x=64, z=2, hidden=(4,))\n"
    Path("library.py").write_text(file)
    words = ("--data", "digits", "--steps", "1")
    _, out, _ = run("train", "library.py:model", *words, "--out", "plain")
    assert "Next: aevb evaluate plain" in out
    _, out, _ = run("train", "models.py:build", *words, "--out", "built")
    assert "Next: aevb --code models.py:build evaluate built" in out


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nothing.py", "There is no file nothing.py."),
        ("models.txt", "--code models.txt is no Python file. Name one: --code models.py."),
        (
            "models.py:plane",
            "models.py has no 'plane'. Its models are plain, positive. Did you mean 'plain'",
        ),
    ],
)
def test_a_wrong_file_is_named(run, file, message):
    code, out, err = run("--code", file, "models")
    assert (code, out) == (2, "")
    assert message in err


def test_the_processes_of_a_page_read_the_file_too(run, monkeypatch, tmp_path):
    pytest.importorskip("starlette", reason="the extra serve is not installed")
    train = ("train", "models.py:plain", "--data", "digits", "--steps", "2", "--out", "run", "-q")
    assert run(*train)[0] == 0
    served = []
    monkeypatch.setattr(
        "aevb.page.server.app.create_app", lambda _, __, functions: served.append(functions)
    )
    monkeypatch.setattr("aevb.page.server.listening.listen", lambda _, socket, *__: socket.close())
    for before in ((), ("--code", "models.py")):
        assert run(*before, "serve", "run", "--port", "0")[0] == 0
    job = Job(
        "aevb.cli.page_subjects:decode_json", (tmp_path / "run", {"values": {"z": [[0.5, -1]]}})
    )

    async def answered(functions):
        worker = Worker("test", idle=False, names=[], prepare=functions.prepare)
        try:
            return (await worker.run(job)).text.decode()
        except JobError as error:
            return str(error)
        finally:
            await worker.close()

    without, with_file = (asyncio.run(answered(functions)) for functions in served)
    assert "has a network of your own in q(z|x)" in without
    assert "x" in json.dumps(json.loads(with_file))
    assert "network" not in with_file


@pytest.mark.parametrize(
    ("model", "settings", "code"),
    [
        ("models.py:plain", (), "models.py"),
        ("models.py:build", (), "models.py:build"),
        ("models.py:build", ("--set", "z=4"), "models.py"),
        ("library.py:plain", (), None),
    ],
)
def test_the_page_beside_a_training_gets_the_file(
    run, monkeypatch, tmp_path, model, settings, code
):
    (tmp_path / "library.py").write_text(
        "from aevb import Bernoulli, Model, Normal\n"
        'plain = Model(p={"z": Normal(2), "x | z": Bernoulli(64)}, q={"z | x": Normal()})\n'
    )
    beside = []
    server = SimpleNamespace(stay=lambda: None, close=lambda: None)
    monkeypatch.setattr(
        "aevb.cli.serve.PageServer", lambda _, code: [beside.append(code), server][1]
    )
    train = ("train", model, *settings, "--data", "digits", "--steps", "1", "--out", "run", "-q")
    assert run(*train, "--serve")[0] == 0
    assert beside == [code]


def test_devices_of_commands_are_checked(run):
    assert run("train", "fa", "--data", "fa", "--steps", "2", "--out", "run", "-q")[0] == 0
    for command in ("evaluate", "sample", "encode", "impute"):
        words = [command, "run", "--device", "cuda:9"]
        code, _, err = run(*words, *(["--out", "x.csv"] * (command in ("encode", "impute"))))
        assert code == 2, command
        assert "There is no device 'cuda:9' here" in err
