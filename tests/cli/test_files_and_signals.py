"""Commands: files that they write, signals and closed pipes, the split, runs that are trained
further, pictures.
"""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import X, vae

from aevb import (
    Bernoulli,
    Model,
    Normal,
    cli,
    conv,
    deconv,
    fit,
    load_run,
    predictive_check,
)
from aevb.cli.array_files import write
from aevb.data.datasets import Recipe
from aevb.pictures import grid
from aevb.training.checkpoint import latest
from aevb.training.interrupts import interruptible


@pytest.mark.parametrize("name", ["x.csv", "x.npz", "x.npy"])
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch, name):
    out = tmp_path / name
    out.write_text("before")
    real = io.BufferedWriter.write

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aevb.cli.array_files._digits", full)
    monkeypatch.setattr(np, "savez", full)
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left on device; nothing was written") as caught:
        write(out, {"x": np.zeros((3, 2))}, {})
    assert (caught.value.filename, out.read_text(), os.listdir(tmp_path)) == (
        str(out),
        "before",
        [name],
    )
    assert real is io.BufferedWriter.write


@contextmanager
def files_of_at_most(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_picture_that_does_not_fit_on_the_disk_is_not_half_written(tmp_path):
    images = np.random.default_rng(0).random((9, 20, 20))
    check = predictive_check(vae(), {"x": X}, replicates=20, seed=0)
    writers = {"grid.png": lambda out: grid(images, 3, out), "check.png": check.plot}
    for name, write_picture in writers.items():
        out = tmp_path / name
        with files_of_at_most(500), pytest.raises(OSError, match="nothing was written") as caught:
            write_picture(out)
        assert (caught.value.filename, os.listdir(tmp_path)) == (str(out), [])
        write_picture(out)
        assert out.read_bytes().startswith(b"\x89PNG")
        out.unlink()


def test_a_file_is_written_through_a_link_and_into_a_pipe(tmp_path):
    (tmp_path / "link.csv").symlink_to("real.csv")
    write(tmp_path / "link.csv", {"x": np.zeros((1, 2))}, {})
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() == "x0,x1\n0,0\n"
    os.mkfifo(tmp_path / "pipe.csv")
    with subprocess.Popen(["cat", tmp_path / "pipe.csv"], stdout=subprocess.PIPE) as reader:
        write(tmp_path / "pipe.csv", {"x": np.zeros((1, 2))}, {})
        assert reader.stdout.read() == b"x0,x1\n0,0\n"


def test_a_closed_terminal_asks_a_run_to_end():
    with interruptible() as flag:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.01)
        assert flag
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with interruptible() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not flag
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, was)


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error_and_a_run_goes_on(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(30, 3)))
    command = [
        sys.executable,
        "-m",
        "aevb",
        "train",
        "fa",
        "--data",
        tmp_path / "x.npy",
        "--steps",
        "30",
        "--out",
        tmp_path / "run",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)
    assert latest(tmp_path / "run").step == 30


def aevb(monkeypatch, capsys, *arguments, code=0):
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert stop.value.code == code, printed.err
    return printed.err if code else printed.out


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(3, 2, (60, 3))
    np.savetxt("t.csv", x, delimiter=",", header="a,b,c", comments="")
    return x


FA = ("--set", "z=1", "--prepare", "standardise", "--steps", "20")


def test_the_split_has_a_seed_of_its_own(table, monkeypatch, capsys):
    found = {}
    for name, more in {
        "one": ("--seed", 1),
        "two": ("--seed", 2),
        "other": ("--seed", 1, "--split", 5),
    }.items():
        aevb(
            monkeypatch,
            capsys,
            "train",
            "fa",
            "--data",
            "t.csv",
            *FA,
            "--hold-out",
            "0.2",
            "--out",
            name,
            *more,
        )
        found[name] = Recipe.read(Path(name))
    assert found["one"].mean == found["two"].mean  # of the training rows
    assert found["one"].mean != found["other"].mean


def test_evaluate_says_how_exact_its_bound_is(table, monkeypatch, capsys):
    aevb(monkeypatch, capsys, "train", "fa", "--data", "t.csv", *FA, "--out", "run")
    printed = aevb(monkeypatch, capsys, "evaluate", "run", "--samples", "0")
    numbers = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[1:]}
    assert numbers["elbo"][1] == "±"
    elbo, error = float(numbers["elbo"][0]), float(numbers["elbo"][2])
    assert error <= 0.011
    assert len(numbers["evidence"]) == 1  # exact
    assert abs(elbo + float(numbers["gap"][0]) - float(numbers["evidence"][0])) < 5 * error + 0.002


def test_evaluate_reads_columns_by_name_and_names_gaps_that_q_was_not_trained_on(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(40, 3))
    lines = [",".join(f"{value:.6f}" for value in row) for row in rows]
    Path("t.csv").write_text("\n".join(["a,b,c", *lines]))
    Path("other.csv").write_text(
        "\n".join(["c,a,b", *(",".join(line.split(",")[i] for i in (2, 0, 1)) for line in lines)])
    )
    lacking = [f",{line.partition(',')[2]}" for line in lines[:3]]
    Path("gaps.csv").write_text("\n".join(["a,b,c", lines[3], *lacking]))
    small = ("--set", "z=1", "--set", "hidden=[4]", "--set", "likelihood=Normal", "--steps", "2")
    aevb(monkeypatch, capsys, "train", "vae", "--data", "t.csv", *small, "--out", "run")

    def evaluated(name):
        return aevb(monkeypatch, capsys, "evaluate", "run", "--data", name, "--samples", "0")

    assert evaluated("other.csv").splitlines()[1:] == evaluated("t.csv").splitlines()[1:]
    assert "  3 rows lack entries of x (first: line 3), which q was not trained on" in evaluated(
        "gaps.csv"
    )


def test_a_run_is_trained_further_with_another_rate(table, monkeypatch, capsys):
    aevb(monkeypatch, capsys, "train", "fa", "--data", "t.csv", *FA, "--out", "run")
    aevb(monkeypatch, capsys, "train", "run", "--lr", "1e-9", "--steps", "2", "--out", "further")
    before, after = (Recipe.read(Path(name)) for name in ("run", "further"))
    # its own data, prepared as they were
    assert (before.mean, before.prepare) == (after.mean, "standardise")
    for one, other in zip(
        load_run("run", "last").parameters(), load_run("further", "last").parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    error = aevb(monkeypatch, capsys, "train", "vae", "--out", "none", code=2)
    assert "Say which data to train on" in error


def test_arguments_of_another_kind_are_a_sentence(monkeypatch, capsys):
    for value in ("hidden={}", "z=1.5", 'hidden=[1,"a"]', "x=null", "likelihood=[1]", "dropout={}"):
        assert "aevb: " in aevb(monkeypatch, capsys, "explain", "vae", "--set", value, code=2)


def test_a_declared_image_is_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("PIL")
    from PIL import Image

    for shape in ((1, 8, 8), (3, 4, 4)):
        model = Model(
            {"z": Normal(2), "x | z": Bernoulli(shape, net=deconv(4))},
            {"z | x": Normal(net=conv(4))},
        )
        x = (np.random.default_rng(0).random((20, *shape)) > 0.5).astype(float)
        np.save(tmp_path / "x.npy", x)
        run = tmp_path / f"run{shape[0]}"
        fit(model, tmp_path / "x.npy", steps=1, out=run)
        aevb(monkeypatch, capsys, "sample", run, "-n", "2", "--out", tmp_path / "s.png")
        with Image.open(tmp_path / "s.png") as picture:
            assert (picture.mode, picture.height) == (
                ("L", 7 * 10) if shape[0] == 1 else ("RGB", 14 * 6)
            )
        (run / "data.json").write_text(json.dumps({"data": str(tmp_path / "x.npy")}))
        assert "samples.png" in aevb(monkeypatch, capsys, "sample", run, "-n", "2")


def test_cells_of_images_in_flat_rows_are_filled(tmp_path, monkeypatch, capsys):
    model = Model(
        {"z": Normal(2), "x | z": Bernoulli((1, 4, 4), net=deconv(4))},
        {"z | x": Normal(net=conv(4))},
    )
    x = (np.random.default_rng(0).random((20, 16)) > 0.5).astype(float)
    x[3, 7] = np.nan
    np.save(tmp_path / "x.npy", x)
    fit(model, tmp_path / "x.npy", steps=1, out=tmp_path / "run")
    printed = aevb(
        monkeypatch,
        capsys,
        "impute",
        tmp_path / "run",
        "--data",
        tmp_path / "x.npy",
        "--out",
        tmp_path / "filled.npy",
    )
    assert printed.startswith("1 missing cell of 20 rows filled")
    filled = np.load(tmp_path / "filled.npy")
    assert filled.shape == x.shape
    assert 0 < filled[3, 7] < 1
    assert np.array_equal(np.delete(filled, 55), np.delete(x, 55))
