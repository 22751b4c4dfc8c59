"""The commands models and explain: what they print, and that each mistake is one line."""

import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from aevb.cli import main
from aevb.cli.model_argument import parameters_of, resolve
from aevb.zoo import zoo


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
    assert hint == "Show one model and its estimator: aevb explain gmvae"
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(zoo)
    assert all(len(line.split()) > 3 for line in lines[::2])  # each with what it is
    for name, line in zip(zoo, lines[1::2], strict=True):  # and with its arguments
        assert [part.split("=")[0] for part in re.findall(r"\w+=", line)] == list(
            parameters_of(zoo[name])
        )


@pytest.mark.parametrize("command", ["train", "evaluate", "sample", "encode", "impute", "explain"])
def test_every_command_shows_an_example(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"aevb {command}" in out.replace(f"Usage: aevb {command}", "")
    assert "[default: (dynamic)]" not in out


def test_explain_takes_the_models_arguments(run):
    code, out, _ = run(
        "explain", "gmvae", "--set", "y=3", "--set", "hidden=[8,8]", "--set", "likelihood=Normal"
    )
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
        f"There is no model 'gmva'. Name one of {', '.join(zoo)}, a file.py:name, or the folder of "
        "a run or a saved model.",
    ),
    "no such file": (["explain", "nowhere.py:vae"], "There is no file nowhere.py."),
    "no such name": (["explain", "FILE:huge"], "FILE has no 'huge'. Its models are tiny."),
    "not a model": (["explain", "FILE:number"], "not a Model or a function that returns one."),
    "how without a choice": (
        ["explain", "gmvae", "--how", "y"],
        "--how takes latent=choice, e.g. --how y=gumbel; got 'y'.",
    ),
    "how of data": (
        ["explain", "gmvae", "--how", "x=gumbel"],
        "how names 'x', which is not a latent. The latents are y, z.",
    ),
    "unknown choice": (
        ["explain", "gmvae", "--how", "y=guess"],
        "how={'y': 'guess'}: unknown word 'guess'. Draws: enumerate,",
    ),
    "impossible choice": (
        ["explain", "gmvae", "--how", "z=gumbel"],
        "only OneHot and Bernoulli have a relaxation, z is a Normal.",
    ),
    "unknown bound": (
        ["explain", "gmvae", "--bound", "elbow"],
        "Unknown bound 'elbow'. Choose one of elbo, iwae, particles.",
    ),
    "unknown gradient": (
        ["explain", "gmvae", "--gradient", "sgd"],
        "Unknown gradient 'sgd'. Choose one of plain, stl, dreg, score.",
    ),
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
    done = subprocess.run(
        [sys.executable, "-m", "aevb", "explain", "nope"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"aevb: There is no model 'nope'. Name one of {', '.join(zoo)}, a file.py:name, or the "
        "folder of a run or a saved model.\n"
    )


def test_explain_of_particles(run):
    choices = ["--bound", "particles", "--samples", "4"]
    code, out, err = run("explain", "vrnn", *choices, "--resample", "0.25")
    assert (code, err) == (0, "")
    assert "particle bound, K = 4" in out
    assert "below 1 (0.25 of 4)" in out
    code, _, err = run("explain", "gmvae", *choices)
    assert code == 2
    assert 'bound="particles" needs draws with a pathwise gradient at every step, but y is' in err


def test_a_recipe_of_the_zoo_trains_without_settings_of_the_bound(run, tmp_path):
    """hmm is trained by em(), unless the command asks for a bound."""
    data = tmp_path / "x.npy"
    np.save(data, np.random.default_rng(0).normal(size=(2, 30, 1)))
    for more, expected in ((), "evidence"), (("--samples", 2, "--steps", 3), "elbo"):
        out = tmp_path / expected
        code, _, err = run("train", "hmm", "--data", data, "--out", out, *more)
        assert code == 0, err
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert expected in rows[-1]


def test_a_seed_on_the_command_line_gives_the_weights_of_python(run):
    for name in ("fa", "vae", "hmm"):
        torch.manual_seed(3)  # as ``aevb train --seed 3`` does
        assert all(map(torch.equal, resolve(name).parameters(), zoo[name](seed=3).parameters()))
    code, _, err = run("explain", "fa", "--set", "seed=3")
    assert code != 0
    assert "fa has no argument 'seed'" in err
