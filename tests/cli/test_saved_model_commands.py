"""Commands on the folder of ``model.save``: a model that was trained by a loop of the user."""

import sys

import numpy as np
import pytest
import torch

from aevb import Model, Normal
from aevb.cli import main


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run ``aevb …`` in a folder with a saved model and rows: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    Model({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal()}).save("saved")
    np.save("x.npy", np.random.default_rng(0).normal(size=(30, 3)))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["aevb", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "saved", "--data", "x.npy"),
        ("sample", "saved"),
        ("doctor", "saved", "--data", "x.npy"),
        ("check", "saved", "--data", "x.npy"),
        ("impute", "saved", "--data", "x.npy", "--out", "full.npy"),
        ("encode", "saved", "--data", "x.npy", "--out", "codes.npy"),
        ("page", "saved", "--data", "x.npy", "--out", "page.html"),
        ("page", "saved", "--out", "page.html"),
    ],
    ids=lambda command: " ".join(command[:1]) + " data" * ("--data" in command),
)
def test_commands_read_a_saved_model(run, command):
    code, out, err = run(*command)
    assert code == 0, err
    assert "cannot be read: saved" not in out + err


def test_the_card_of_a_saved_model_has_results_and_names_no_run(run, tmp_path):
    assert run("card", "saved", "--data", "x.npy")[0] == 0
    text = (tmp_path / "saved" / "README.md").read_text()
    assert "The folder holds a saved model, without a record of its training." in text
    assert "log p (evidence)" in text
    for wrong in ("aevb.fit", "The run does not record", "cannot be read", "load_run"):
        assert wrong not in text


def test_rows_must_be_named(run):
    code, _, err = run("evaluate", "saved")
    assert code == 2
    assert "does not record which data it was trained on. Name them" in err
