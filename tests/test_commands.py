"""The command line's main job on the embedded digits: train, evaluate, sample, encode, resume."""

import json
import sys

import numpy as np
import pytest

from aevb import cli
from aevb.data.named import clustering_accuracy


def aevb(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            raise
    return capsys.readouterr().out


@pytest.fixture
def small(tmp_path):
    """A small mixture VAE in a file, so that training takes a second."""
    path = tmp_path / "models.py"
    path.write_text(
        "from aevb.zoo import gmvae, vrnn, cvae\n\n\n"
        "def mixture():\n    return gmvae(x=64, z=4, hidden=(16,))\n\n\n"
        "def rows():\n    return vrnn(x=8, z=2, h=16, hidden=(16,), layers=1)\n\n\n"
        "def conditional():\n    return cvae(x=64, z=2, hidden=(16,))\n"
    )
    return path


def test_from_training_to_samples_and_codes(tmp_path, monkeypatch, capsys, small):
    run = tmp_path / "run"
    printed = aevb(monkeypatch, capsys, "train", f"{small}:mixture", "--data", "digits", "--out", run, "--epochs", "2")
    assert "Σ_y q(y|x) { log p(x|zˢ) − KL(q(z|x, y) ‖ p(z|y)) } − KL(q(y|x) ‖ p(y))" in printed
    assert "30 steps" in printed
    assert (run / "curves.png").stat().st_size > 1000
    printed = aevb(monkeypatch, capsys, "evaluate", run, "--data", "digits", "--samples", "10")
    values = {
        line.split()[0]: float(line.split()[1])
        for line in printed.splitlines()
        if line.startswith("  ") and "clusters" not in line and "log p" not in line
    }
    assert abs(values["elbo"] - (values["x"] - values["kl(y)"] - values["kl(z)"])) < 0.002
    evidence = next(float(line.split()[2]) for line in printed.splitlines() if "log p(x)" in line)
    assert evidence > values["elbo"]
    assert "299 rows of digits (test)" in printed
    printed = aevb(monkeypatch, capsys, "sample", run, "--out", tmp_path / "samples.png", "-n", "3")
    assert "30 samples of x, 3 for each of the 10 values of y" in printed
    assert (tmp_path / "samples.png").read_bytes()[:4] == b"\x89PNG"
    aevb(monkeypatch, capsys, "encode", run, "--data", "digits", "--out", tmp_path / "codes.csv")
    codes = np.loadtxt(tmp_path / "codes.csv", delimiter=",", skiprows=1)
    assert codes.shape == (299, 14)
    assert np.allclose(codes[:, :10].sum(1), 1, atol=1e-4)
    again = aevb(monkeypatch, capsys, "train", f"{small}:mixture", "--data", "digits", "--out", run, "--epochs", "3", "--resume")
    assert "45 steps" in again
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", ["rows", "conditional"])
def test_sequences_and_conditional_models_sample_as_images(tmp_path, monkeypatch, capsys, small, name):
    run = tmp_path / "run"
    aevb(monkeypatch, capsys, "train", f"{small}:{name}", "--data", "digits", "--out", run, "--epochs", "0.2")
    aevb(monkeypatch, capsys, "sample", run, "--out", tmp_path / "samples.png", "-n", "2", "--draw")
    assert (tmp_path / "samples.png").read_bytes()[:4] == b"\x89PNG"
    aevb(monkeypatch, capsys, "encode", run, "--data", "digits", "--out", tmp_path / "codes.npz")
    with np.load(tmp_path / "codes.npz") as codes:
        assert codes["z"].shape == ((299, 8, 2) if name == "rows" else (299, 2))


def test_tables_train_and_sample_as_tables(tmp_path, monkeypatch, capsys):
    np.savetxt(tmp_path / "x.csv", np.random.default_rng(0).normal(size=(50, 3)), delimiter=",")
    run = tmp_path / "run"
    aevb(monkeypatch, capsys, "train", "fa", "--data", tmp_path / "x.csv", "--out", run, "--epochs", "2")
    printed = aevb(monkeypatch, capsys, "evaluate", run, "--data", tmp_path / "x.csv")
    assert "evidence" in printed
    aevb(monkeypatch, capsys, "sample", run, "--out", tmp_path / "samples.csv", "-n", "7")
    assert np.loadtxt(tmp_path / "samples.csv", delimiter=",").shape == (7, 3)


MISTAKES = [
    (["train", "gmvae", "--data", "nothing.csv", "--out", "run"], 2, "There is no file nothing.csv"),
    (["train", "gmvae", "--data", "digits", "--out", "run", "--prepare", "sharpen"], 2, "Unknown preparation 'sharpen'"),
    (["evaluate", "nowhere", "--data", "digits"], 2, "holds no run: model.json is missing"),
    (["train", "gmvae", "--data", "digits", "--out", "/proc/run", "--epochs", "0.1"], 1, "/proc/run"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=[a[0] + " " + m for a, _, m in MISTAKES])
def test_mistakes_are_one_line_and_an_exit_code(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["aevb", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_clusters_are_matched_to_labels_as_well_as_possible():
    labels = np.array([0, 0, 1, 1, 2, 2])
    assert clustering_accuracy(np.array([5, 5, 3, 3, 0, 0]), labels) == 1
    assert clustering_accuracy(np.array([1, 1, 1, 1, 0, 0]), labels) == pytest.approx(4 / 6)
