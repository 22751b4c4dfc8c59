"""Quiet commands print their result alone, and the shell completes names."""

import inspect
import re
import sys

import numpy as np
import pytest

from aevb import Settings, cli
from aevb.cli import completion
from aevb.cli.model_argument import parameters_of
from aevb.cli.options import SETTINGS
from aevb.cli.table_models import ARGUMENTS
from aevb.derive.plan import BOUNDS, GRADIENTS
from aevb.training.schedules import Schedule
from aevb.zoo import zoo


def aevb(monkeypatch, capsys, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert not stop.value.code, printed.err
    assert printed.err == ""
    return printed.out


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rows = np.random.default_rng(0).normal(size=(60, 2)).round(3)
    path = tmp_path_factory.mktemp("quiet") / "table.csv"
    path.write_text("a,b\n" + "\n".join(f"{a},{b + 3 * (a > 0)}" for a, b in rows) + "\n")
    return path


QUIET = ("train", "sweep", "evaluate", "cluster", "estimators", "page", "reproduce")


def test_every_command_with_progress_can_be_quiet():
    """The others print only their result."""
    for command in cli.app.registered_commands:
        quiet = "quiet" in inspect.signature(command.callback).parameters
        assert quiet == (command.callback.__name__ in QUIET), command.callback.__name__


def test_training_prints_what_it_does_or_only_its_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", "fa", "--data", "fa", "--steps", "90", "--validate-every", "2"]
    command += ["--patience", "2", "--lr", "0.3"]
    (line,) = aevb(monkeypatch, capsys, *command, "--out", "quiet", "--quiet").splitlines()
    end = r"steps in \d+\.\d s, stopped early \(patience 2\)\. The run is in"
    assert re.fullmatch(rf"\d+ {end} quiet: curves\.png, metrics\.jsonl, checkpoints\.", line)
    printed = aevb(monkeypatch, capsys, *command, "--out", "told").splitlines()
    lines = [one for one in printed if re.match(r" +\d+ +\d+\.\d\d ", one)]
    assert 3 <= len(lines) <= 22  # not one for each of up to 45 validations
    assert any(one.startswith("Stopped early, after step ") for one in printed)
    assert re.search(end, printed[-2])
    assert printed[-1].startswith("Next: aevb evaluate told; ")
    assert aevb(monkeypatch, capsys, "evaluate", "quiet", "-q").startswith("1000 rows of fa")


def test_commands_of_tables_are_quiet(table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ("--model", "mixture", "--set", "components=2", "--steps", "3", "-q")
    result = aevb(monkeypatch, capsys, "train", table, "--out", "mixture", *options)
    assert result.startswith("Trained in ")
    assert result.endswith("\nThe run is in mixture.\n")
    assert len(result.splitlines()) <= 3
    swept = aevb(
        monkeypatch, capsys, "sweep", table, "--set", "components=1,2", "--steps", "2",
        "--out", "sweep", "--quiet",
    )  # fmt: skip
    assert "The table is in sweep/table.csv" in swept
    assert "Next:" not in swept
    assert "2 runs in" not in swept


# Completion ---------------------------------------------------------------------------------------


def offered(monkeypatch, capsys, *typed: str) -> list[str]:
    """What the shell offers for the last word."""
    monkeypatch.setenv("_AEVB_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "aevb " + " ".join(typed))
    monkeypatch.setenv("COMP_CWORD", str(len(typed)))
    with pytest.raises(SystemExit) as stop:
        cli.app(prog_name="aevb")
    assert not stop.value.code
    return capsys.readouterr().out.split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("run-1/checkpoints", "deep/run-2/checkpoints", "gmodels/seed-0", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("run-1/model.json", "deep/run-2/model.json", "rows.csv", "rows.npz", "models.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["trai"], ["train"]),
        (["train", "gm"], ["gmodels", "gmvae"]),
        (["train", "r"], ["rows.csv", "run-1"]),
        (["explain", "local"], ["local_level", "local_trend"]),
        (["explain", "m"], ["m2", "models.py"]),
        (["evaluate", ""], ["deep/", "gmodels", "run-1"]),
        (["evaluate", "deep/"], ["deep/run-2"]),
        (["impute", "run-1", "ro"], ["rows.csv", "rows.npz"]),
        (["compare", "run-1", "r"], ["run-1"]),
        (["train", "vae", "--data", "d"], ["deep/", "digits"]),
        (["train", "vae", "--set", "h"], ["hidden="]),
        (["explain", "vae", "--set", "z=3", "--set", "dr"], ["dropout="]),
        (["train", "rows.csv", "--set", "c"], ["components=", "covariance="]),
        (["train", "rows.csv", "--model", "vae", "--set", ""], ["hidden=", "latent="]),
        (["train", "rows.csv", "--model", "f"], ["factors"]),
        (["train", "vae", "--kl"], ["--kl-cycles", "--kl-warmup"]),
        (["train", "vae", "--schedule", "a"], ["alternate"]),
        (["train", "vae", "--device", "c"], ["cpu", "cuda"]),
        (["train", "vae", "--prepare", "b"], ["binarise"]),
        (["train", "vae", "--size", ""], []),
        (["train", "vae", "--track", "t"], ["tensorboard", "trackio"]),
    ],
)
def test_the_shell_completes(typed, expected, folder, monkeypatch, capsys):
    assert sorted(offered(monkeypatch, capsys, *typed)) == expected


def test_completion_is_in_step_with_the_library():
    assert completion.zoo_arguments() == {
        name: tuple(parameters_of(build)) for name, build in zoo.items()
    }
    known = {
        "bound": BOUNDS,
        "gradient": GRADIENTS,
        "schedule": [
            kind.__name__
            for kind in Schedule.__subclasses__()
            if kind.__module__.startswith("aevb.")  # other tests define schedules of their own
        ],
    }
    command = next(c for c in cli.app.registered_commands if c.callback.__name__ == "train")
    parameters = inspect.signature(command.callback).parameters
    for name, words in known.items():
        (option,) = parameters[name].annotation.__metadata__
        assert sorted(option.autocompletion("")) == sorted(words), name
        assert name in SETTINGS
    for word in parameters["decay"].annotation.__metadata__[0].autocompletion(""):
        Settings(decay=word)
    for word in parameters["precision"].annotation.__metadata__[0].autocompletion(""):
        Settings(precision=word)
    (option,) = (
        inspect.signature(command.callback, eval_str=True)
        .parameters["model_"]
        .annotation.__metadata__
    )
    assert sorted(option.autocompletion("")) == sorted(ARGUMENTS)


def test_the_shell_is_given_a_script(monkeypatch, capsys):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    script = aevb(monkeypatch, capsys, "--show-completion")
    assert "complete_bash" in script
    assert "complete -o default -F" in script
