"""The command line's main job, on the embedded digits and on files: train, evaluate, sample,
encode, impute, resume.
"""

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aevb import cli
from aevb.cli.array_files import significant
from aevb.data.datasets import clustering_accuracy


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


def test_several_seeds_have_a_folder_each_and_go_on_together(tmp_path, monkeypatch, capsys, small):
    runs = tmp_path / "runs"
    command = [
        "train",
        f"{small}:mixture",
        "--data",
        "digits",
        "--out",
        runs,
        "--seeds",
        "2",
        "--decay",
        "constant",
    ]
    printed = aevb(monkeypatch, capsys, *command, "--steps", "20")
    assert "2 runs in " in printed
    values = {
        line.split(":")[0].strip(): float(line.split()[5])
        for line in printed.splitlines()
        if line.startswith("  seed-")
    }
    assert len(set(values.values())) == 2
    assert f"Next: aevb evaluate {runs}/{max(values, key=values.get)};" in printed
    for i in range(2):
        assert (runs / f"seed-{i}" / "curves.png").stat().st_size > 1000
        assert "299 rows of digits (test)" in aevb(
            monkeypatch, capsys, "evaluate", runs / f"seed-{i}", "--samples", "0"
        )
    assert "seed-0 holds a run already" in mistake(monkeypatch, capsys, *command, "--steps", "20")
    assert "seed-1: 30 steps" in aevb(monkeypatch, capsys, *command, "--steps", "30", "--resume")
    for wrong in (["--seeds", "0"], ["--seeds", "2", "--seed", "3"]):
        arguments = [
            "train",
            f"{small}:mixture",
            "--data",
            "digits",
            "--out",
            tmp_path / "other",
            *wrong,
        ]
        assert "is a number of runs" in mistake(monkeypatch, capsys, *arguments)
    assert not (tmp_path / "other").exists()


def test_a_name_of_the_zoo_means_the_model_even_if_a_run_has_this_name(
    tmp_path, monkeypatch, capsys
):
    """A run in the folder vae must not decide how the rows of a new model are prepared."""
    monkeypatch.chdir(tmp_path)
    small = ["--set", "hidden=[4]", "--set", "z=2", "--steps", "2"]
    assert "dequantised" in aevb(
        monkeypatch, capsys, "train", "vae", "--data", "digits", *small, "--out", "vae"
    )
    binary = ["--set", "likelihood=Bernoulli", "--out", "binary"]
    printed = aevb(monkeypatch, capsys, "train", "vae", "--data", "digits", *small, *binary)
    assert "threshold" in printed
    assert "1498 rows of digits" in printed


def test_from_training_to_samples_and_codes(tmp_path, monkeypatch, capsys, small):
    run = tmp_path / "run"
    printed = aevb(
        monkeypatch,
        capsys,
        "train",
        f"{small}:mixture",
        "--data",
        "digits",
        "--out",
        run,
        "--epochs",
        "2",
    )
    assert "Σ_y q(y|x) { log p(x|zˢ) − KL(q(z|x, y) ‖ p(z|y)) } − KL(q(y|x) ‖ p(y))" in printed
    assert "30 steps" in printed
    assert (run / "curves.png").stat().st_size > 1000
    printed = aevb(monkeypatch, capsys, "evaluate", run, "--data", "digits", "--samples", "10")
    values = {
        line.split()[0]: float(line.split()[1])
        for line in printed.splitlines()
        if line.startswith("  ")
        and "clusters" not in line
        and "log p" not in line
        and "± is" not in line
    }
    assert abs(values["elbo"] - (values["x"] - values["kl(y)"] - values["kl(z)"])) < 0.002
    evidence = next(float(line.split()[2]) for line in printed.splitlines() if "log p(x)" in line)
    assert evidence > values["elbo"]
    assert "299 rows of digits (test)" in printed
    closer = aevb(
        monkeypatch,
        capsys,
        "evaluate",
        run,
        "--data",
        "digits",
        "--samples",
        "0",
        "--evidence",
        "importance",
    ).splitlines()
    bounds = [float(line.split()[3]) for line in closer if line.startswith("  k = ")]
    assert len(bounds) == 4
    assert bounds == sorted(bounds)  # the bound rises with its samples
    assert any(
        line.startswith("  log p = ") and "mean of 299 examples, importance, samples 1000" in line
        for line in closer
    )
    with pytest.raises(SystemExit):
        aevb(monkeypatch, capsys, "evaluate", run, "--evidence", "annealing")
    told = capsys.readouterr()
    assert "Unknown --evidence annealing. Choose auto, exact," in told.err
    assert not told.out  # said before anything is computed
    printed = aevb(monkeypatch, capsys, "sample", run, "--out", tmp_path / "samples.png", "-n", "3")
    assert "30 samples of x, 3 for each of the 10 values of y" in printed
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.width > 3 * 63 + 30  # the rows' labels stand left of three images
    aevb(monkeypatch, capsys, "encode", run, "--data", "digits", "--out", tmp_path / "codes.csv")
    codes = np.loadtxt(tmp_path / "codes.csv", delimiter=",", skiprows=1)
    assert codes.shape == (299, 14)
    assert np.allclose(codes[:, :10].sum(1), 1, atol=1e-4)
    again = aevb(
        monkeypatch,
        capsys,
        "train",
        f"{small}:mixture",
        "--data",
        "digits",
        "--out",
        run,
        "--epochs",
        "3",
        "--resume",
    )
    assert "45 steps" in again
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", ["rows", "conditional"])
def test_sequences_and_conditional_models_sample_as_images(
    tmp_path, monkeypatch, capsys, small, name
):
    run = tmp_path / "run"
    aevb(
        monkeypatch,
        capsys,
        "train",
        f"{small}:{name}",
        "--data",
        "digits",
        "--out",
        run,
        "--epochs",
        "0.2",
    )
    aevb(monkeypatch, capsys, "sample", run, "--out", tmp_path / "samples.png", "-n", "2", "--draw")
    assert (tmp_path / "samples.png").read_bytes()[:4] == b"\x89PNG"
    aevb(monkeypatch, capsys, "encode", run, "--data", "digits", "--out", tmp_path / "codes.npz")
    with np.load(tmp_path / "codes.npz") as codes:
        assert codes["z"].shape == ((299, 8, 2) if name == "rows" else (299, 2))


def test_tables_train_and_sample_as_tables(tmp_path, monkeypatch, capsys):
    np.savetxt(tmp_path / "x.csv", np.random.default_rng(0).normal(size=(50, 3)), delimiter=",")
    run = tmp_path / "run"
    aevb(
        monkeypatch,
        capsys,
        "train",
        "fa",
        "--data",
        tmp_path / "x.csv",
        "--out",
        run,
        "--epochs",
        "2",
    )
    printed = aevb(monkeypatch, capsys, "evaluate", run, "--data", tmp_path / "x.csv")
    assert "evidence" in printed
    aevb(monkeypatch, capsys, "sample", run, "--out", tmp_path / "samples.csv", "-n", "7")
    assert (tmp_path / "samples.csv").read_text().splitlines()[0] == "x0,x1,x2"
    assert np.loadtxt(tmp_path / "samples.csv", delimiter=",", skiprows=1).shape == (7, 3)


NAMES = "height,weight,income,year"


def write_csv(path, table, header):
    lines = (",".join("" if np.isnan(cell) else f"{cell:.8g}" for cell in row) for row in table)
    path.write_text(header + "\n" + "\n".join(lines) + "\n")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """400 rows of four columns in very different units, driven by two factors, without a tenth of
    the cells; table.csv, and y in labelled.csv.
    """
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 400)
    z = random.normal(size=(400, 2)) + 4 * np.array([[0, 0], [1, 0], [0, 1]])[labels]
    whole = z @ np.array([[1, 0.5], [0, 2], [-1, 1], [0.3, 0.3]]).T + 0.1 * random.normal(
        size=(400, 4)
    )
    whole = whole * [1, 10, 100, 1] + [0, 50, -200, 1000]
    holes = np.where(random.random(whole.shape) < 0.1, np.nan, whole)
    write_csv(tmp_path / "table.csv", holes, NAMES)
    write_csv(tmp_path / "labelled.csv", np.c_[labels, holes], f"y,{NAMES}")
    return whole, holes


SMALL = ["--set", "z=2", "--set", "hidden=[16]"]


def test_labels_from_1_are_told(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for first, told in ((1, True), (0, False)):
        Path("labels.csv").write_text(
            "id,a,b,c,d,y\n"
            + "".join(f"{i},{i % 5}.5,{i % 3},{i % 7},0.{i},{first + i % 3}\n" for i in range(12))
        )
        printed = aevb(
            monkeypatch,
            capsys,
            "train",
            "m2",
            "--data",
            "labels.csv",
            "--set",
            "likelihood=Normal",
            *SMALL,
            "--out",
            f"r{first}",
            "--steps",
            "2",
        )
        assert "x: 5 columns (id, a, b, c, …).\ny: 1 column (y)." in printed
        assert ("y: the labels begin with 1, so no row has class 0." in printed) == told


@pytest.mark.parametrize(
    "change",
    [
        "another order",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("a row more", "another cell")),
    ],
)
def test_rows_of_a_changed_file_are_not_called_held_out(monkeypatch, capsys, table, change):
    asked = ["vae", "--data", "table.csv", "--set", "likelihood=Normal", "--set", "z=1"]
    asked += ["--prepare", "standardise", "--hold-out", "0.1", "--steps", "2", "--out", "run"]
    aevb(monkeypatch, capsys, "train", *asked)
    assert "40 rows of table.csv (held out), " in aevb(monkeypatch, capsys, "evaluate", "run")
    header, *lines = Path("table.csv").read_text().splitlines()
    training = np.random.default_rng(0).permutation(400)[40:]
    if change == "a row more":
        lines.append(lines[0])
    elif change == "another order":
        lines = lines[::-1]
    else:
        lines[training[0]] = "1,2,3,4"
    Path("table.csv").write_text("\n".join([header, *lines]) + "\n")
    for command in (["evaluate", "run"], ["doctor", "run", "--json", "--no-calibrate"]):
        monkeypatch.setattr(sys, "argv", ["aevb", *command])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        said = capsys.readouterr()
        assert (
            said.err.count(
                "aevb: table.csv has changed since training, so which of its rows were held out is "
                "unknown. These are all its rows, and the model may have been trained on most of "
                "them. Name new rows: --data FILE.\n"
            )
            == 1
        )
        if command[0] == "evaluate":
            assert f"{len(lines)} rows of table.csv, nats per example:" in said.out
        else:
            json.loads(said.out)
    monkeypatch.setattr(sys, "argv", ["aevb", "compare", "run", "run"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "table.csv has changed since run was trained, so which" in capsys.readouterr().err


def test_a_table_with_missing_cells_from_training_to_imputation(monkeypatch, capsys, table):
    whole, holes = table
    asked = [
        "gmvae",
        "--data",
        "table.csv",
        "--set",
        "likelihood=Normal",
        "--set",
        "y=3",
        *SMALL,
        "--prepare",
        "standardise",
        "--hold-out",
        "0.1",
    ]
    printed = aevb(
        monkeypatch, capsys, "train", *asked, "--out", "run", "--steps", "300", "--lr", "0.01"
    )
    assert "x | z            4" in printed  # as many as the table has columns
    assert (
        "Data: 360 rows of table.csv, standardised, 40 for validation.\nx: 4 columns (" in printed
    )
    recipe = json.loads(Path("run/data.json").read_text())
    held = np.sort(np.random.default_rng(0).permutation(400)[:40])
    assert np.allclose(recipe["mean"], np.nanmean(np.delete(holes, held, 0), 0), rtol=1e-6)
    assert recipe["columns"] == {"x": NAMES.split(",")}
    assert "40 rows of table.csv (held out), nats per example:" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--samples", "0"
    )
    assert "400 rows of table.csv, nats" not in aevb(
        monkeypatch, capsys, "evaluate", "run", "--data", "labelled.csv", "--samples", "0"
    )
    # Other marks of missing cells do not change the file.
    assert "40 rows of table.csv (held out)" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--samples", "0", "--missing", "-999"
    )
    aevb(monkeypatch, capsys, "sample", "run", "-n", "50")
    assert Path("run/samples.csv").read_text().splitlines()[0] == f"{NAMES},y"
    drawn = np.loadtxt("run/samples.csv", delimiter=",", skiprows=1)
    assert drawn.shape == (150, 5)
    spread = np.nanstd(holes, 0)
    assert (
        np.abs(drawn[:, :4].mean(0) - np.nanmean(holes, 0)) < spread
    ).all()  # in the table's units
    aevb(monkeypatch, capsys, "encode", "run", "--out", "codes.csv")
    assert np.loadtxt("codes.csv", delimiter=",", skiprows=1).shape == (400, 5)
    printed = aevb(monkeypatch, capsys, "impute", "run", "--out", "filled.csv", "--samples", "10")
    missing = np.isnan(holes)
    assert f"{missing.sum()} missing cells of 400 rows filled, in filled.csv" in printed
    filled = np.loadtxt("filled.csv", delimiter=",", skiprows=1)
    assert np.allclose(filled[~missing], holes[~missing], rtol=1e-5)
    error = np.sqrt(np.mean(((filled - whole) / spread)[missing] ** 2))
    # the columns' means know less
    assert error < 0.8 * np.sqrt(np.mean(((np.nanmean(holes, 0) - whole) / spread)[missing] ** 2))


def test_columns_are_found_again_by_name(monkeypatch, capsys, table):
    _, holes = table
    asked = [
        "vae",
        "--data",
        "table.csv",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
    ]
    aevb(monkeypatch, capsys, "train", *asked, "--out", "run", "--steps", "3")
    expected = aevb(monkeypatch, capsys, "evaluate", "run", "--samples", "0").splitlines()[1:]
    write_csv(
        Path("turned.csv"),
        np.c_[np.zeros(400), holes[:, ::-1]],
        "id," + ",".join(reversed(NAMES.split(","))),
    )
    assert (
        aevb(
            monkeypatch, capsys, "evaluate", "run", "--data", "turned.csv", "--samples", "0"
        ).splitlines()[1:]
        == expected
    )
    write_csv(Path("less.csv"), holes[:, :3], "height,weight,income")
    assert "less.csv: it lacks the column 'year' that x was trained with" in mistake(
        monkeypatch, capsys, "evaluate", "run", "--data", "less.csv"
    )


def test_labels_in_a_table_size_a_conditional_model_and_judge_clusters(monkeypatch, capsys, table):
    asked = [
        "--data",
        "labelled.csv",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "5",
    ]
    printed = aevb(monkeypatch, capsys, "train", "cvae", *asked, "--out", "given")
    assert "x | y, z         4" in printed
    assert "6 samples of x, 2 for each of the 3 values of y" in aevb(
        monkeypatch, capsys, "sample", "given", "-n", "2"
    )
    aevb(monkeypatch, capsys, "train", "gmvae", *asked, "--out", "latent", "--classify", "1")
    assert "of the rows with a label is their label" in aevb(
        monkeypatch, capsys, "evaluate", "latent", "--samples", "0"
    )
    assert (
        "y needs 10 columns, or one of labels, but gets none. Its columns are height, weight, "
        "income, year."
        in mistake(
            monkeypatch,
            capsys,
            "train",
            "cvae",
            "--data",
            "table.csv",
            "--set",
            "likelihood=Normal",
            "--out",
            "no",
        )
    )
    assert not Path("no").exists()


def test_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savetxt(
        "counts.csv",
        np.random.default_rng(0).poisson(3, (60, 3)),
        delimiter=",",
        fmt="%d",
        header="a,b,c",
        comments="",
    )
    asked = [
        "vae",
        "--data",
        "counts.csv",
        "--set",
        "likelihood=Poisson",
        *SMALL,
        "--validation",
        "counts.csv",
        "--out",
        "run",
        "--steps",
        "5",
    ]
    aevb(monkeypatch, capsys, "train", *asked)
    assert "60 rows of counts.csv (validation)" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--samples", "0"
    )
    aevb(monkeypatch, capsys, "sample", "run", "-n", "9", "--draw", "--out", "drawn")
    drawn = np.loadtxt("drawn.csv", delimiter=",", skiprows=1)
    assert drawn.shape == (9, 3)
    assert np.array_equal(drawn, drawn.round())


def test_ragged_sequences(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    lengths = random.integers(2, 7, 40)
    np.savez("sequences.npz", x=random.normal(5, 2, (40, 6, 2)), lengths=lengths)
    asked = [
        "vrnn",
        "--data",
        "sequences.npz",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--set",
        "h=8",
        "--set",
        "layers=1",
        "--prepare",
        "standardise",
    ]
    printed = aevb(
        monkeypatch,
        capsys,
        "train",
        *asked,
        "--out",
        "run",
        "--steps",
        "4",
        "--hold-out",
        "0.25",
        "--schedule",
        "alternate:2,2",
    )
    assert (
        "Data: 30 sequences of 2 to 6 steps of sequences.npz, standardised, 10 for validation."
        in printed
    )
    assert "10 sequences of 2 to 6 steps of sequences.npz (held out)" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--samples", "0"
    )
    aevb(monkeypatch, capsys, "sample", "run", "-n", "3")
    lines = Path("run/samples.csv").read_text().splitlines()
    assert lines[0] == "row,step,x0,x1"
    assert len(lines) == 1 + 3 * 6
    assert abs(np.loadtxt(lines[1:], delimiter=",")[:, 2:].mean() - 5) < 2  # in the data's units
    aevb(monkeypatch, capsys, "encode", "run", "--out", "codes.csv")
    # a line a real step
    assert len(Path("codes.csv").read_text().splitlines()) == 1 + lengths.sum()


MODELS = """
from aevb import Model, Normal, OneHot, Poisson

series = Model(
    {"z[t] | z[t-1]": Normal(1, scale="learned"), "x[t] | z[t]": Normal(1, scale="learned")},
    {"z[t] | z[t-1], x[t]": Normal(scale="learned")},
)
several = Model(
    {"z": Normal(2), "x | z": Normal(2, scale=0.5), "w | z": Normal(1, scale=0.5),
     "k | z": Poisson(1), "c | z": OneHot(3)},
    {"z | x, w, k, c": Normal()},
)
steps = Model(
    {"z[t]": Normal(2), "x[t] | z[t]": Normal(2, scale=0.5), "y[t] | z[t]": OneHot(3),
     "g": Normal(1, scale=0.5)},
    {"z[t] | x[t], y[t]": Normal()},
)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)


def test_a_table_with_a_column_a_step_comes_back_as_one(monkeypatch, capsys, models):
    random = np.random.default_rng(0)
    whole = np.cumsum(random.normal(size=(60, 5)), 1) * 3 + 100 + 10 * np.arange(5)
    missing = random.random(whole.shape) < 0.1
    write_csv(Path("t.csv"), np.where(missing, np.nan, whole), "a,b,c,d,e")
    aevb(
        monkeypatch,
        capsys,
        "train",
        "models.py:series",
        "--data",
        "t.csv",
        "--steps",
        "300",
        "--prepare",
        "standardise",
        "--out",
        "run",
    )
    printed = aevb(monkeypatch, capsys, "impute", "run", "--out", "filled.csv", "--samples", "20")
    assert f"{missing.sum()} missing cells of 60 sequences of 5 steps filled" in printed
    assert Path("filled.csv").read_text().startswith("a,b,c,d,e\n")
    filled = np.loadtxt("filled.csv", delimiter=",", skiprows=1)
    assert np.allclose(filled[~missing], whole[~missing], rtol=1e-6)
    # in the table's units; a step's number would be off by 100
    assert np.sqrt(np.mean((filled - whole)[missing] ** 2)) < whole.std()
    aevb(monkeypatch, capsys, "sample", "run", "-n", "4", "--out", "s.csv")
    assert Path("s.csv").read_text().startswith("a,b,c,d,e\n")
    drawn = np.loadtxt("s.csv", delimiter=",", skiprows=1)
    assert drawn.shape == (4, 5)
    assert (np.abs(drawn - whole.mean()) < 5 * whole.std()).all()
    aevb(monkeypatch, capsys, "sample", "run", "-n", "4", "--steps", "3", "--out", "short.csv")
    assert Path("short.csv").read_text().startswith("row,step,x\n0,0,")
    assert np.loadtxt("short.csv", delimiter=",", skiprows=1)[:, :2].tolist() == [
        [i, t] for i in range(4) for t in range(3)
    ]
    for name, steps in {
        "s.csv": "5 steps",
        "short.csv": "3 steps (step 0 to 2)",
    }.items():  # both are read again
        assert f"4 sequences of {steps} of {name}" in aevb(
            monkeypatch, capsys, "evaluate", "run", "--data", name, "--samples", "0"
        )


def test_a_table_without_a_header_has_a_column_a_step_too(monkeypatch, capsys, models):
    np.savetxt("t.csv", np.random.default_rng(0).normal(size=(20, 3)), delimiter=",")
    aevb(
        monkeypatch,
        capsys,
        "train",
        "models.py:series",
        "--data",
        "t.csv",
        "--steps",
        "2",
        "--out",
        "run",
    )
    aevb(monkeypatch, capsys, "sample", "run", "-n", "2", "--out", "s.csv")
    assert Path("s.csv").read_text().startswith("x0,x1,x2\n")
    assert "2 sequences of 3 steps of s.csv" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--data", "s.csv", "--samples", "0"
    )


def test_all_observed_variables_are_sampled_and_filled_in_their_units(monkeypatch, capsys, models):
    random = np.random.default_rng(0)
    z = random.normal(size=(80, 2))
    table = np.c_[
        100 + 20 * z[:, 0],
        -5 + z[:, 1],
        1000 + 300 * z[:, 0],
        random.poisson(3, 80),
        random.integers(0, 3, 80),
    ]
    table[::7, 2], table[::9, 1] = np.nan, np.nan
    write_csv(Path("t.csv"), table, "x0,x1,w,k,c")
    aevb(
        monkeypatch,
        capsys,
        "train",
        "models.py:several",
        "--data",
        "t.csv",
        "--steps",
        "150",
        "--prepare",
        "standardise",
        "--out",
        "run",
    )
    drawn = {}
    for more in ([], ["--draw"]):
        printed = aevb(monkeypatch, capsys, "sample", "run", "-n", "40", "--out", "s.csv", *more)
        assert printed == "40 samples of x, w, k, c in s.csv\n"
        assert Path("s.csv").read_text().startswith("x0,x1,w,k,c\n")
        drawn[bool(more)] = np.loadtxt("s.csv", delimiter=",", skiprows=1)
        assert (
            np.abs(drawn[bool(more)].mean(0) - np.nanmean(table, 0)) < np.nanstd(table, 0)
        ).all()
        assert set(drawn[bool(more)][:, 4]) <= {0, 1, 2}
    assert set(drawn[True][:, 4]) == {0, 1, 2}
    assert np.array_equal(drawn[True][:, 3], drawn[True][:, 3].round())
    assert not np.array_equal(drawn[False][:, 3], drawn[False][:, 3].round())  # a mean
    aevb(monkeypatch, capsys, "impute", "run", "--out", "f.csv", "--samples", "10")
    filled = np.loadtxt("f.csv", delimiter=",", skiprows=1)
    assert np.abs(filled[::7, 2] - 1000).max() < 1200
    assert np.abs(filled[::7, 2] - 1000 - 15 * (filled[::7, 0] - 100)).max() < 300  # w follows x0
    assert np.allclose(filled[~np.isnan(table)], table[~np.isnan(table)], rtol=1e-6)


def write_lines(path):
    """20 rows of two to five steps, numbered 3, 13, … and from 1 on, with holes in x0 and y; in no
    order.
    """
    random, lines = np.random.default_rng(0), []
    for i in range(20):
        g = 500 + 50 * random.normal()
        for t in range(int(random.integers(2, 6))):
            hole = random.random(2) < 0.15
            x0, y = (
                "" if hole[0] else f"{100 + 20 * random.normal():.4f}",
                "" if hole[1] else random.integers(3),
            )
            lines.append(f"{10 * i + 3},{t + 1},{x0},{-5 + random.normal():.4f},{y},{g:.4f}")
    path.write_text("row,step,x0,x1,y,g\n" + "\n".join(random.permutation(lines)) + "\n")
    return sorted(lines, key=lambda line: [int(cell) for cell in line.split(",")[:2]])


def test_a_table_with_a_line_a_step_is_trained_on_evaluated_encoded_and_filled(
    monkeypatch, capsys, models
):
    lines = write_lines(Path("t.csv"))
    asked = [
        "models.py:steps",
        "--data",
        "t.csv",
        "--steps",
        "100",
        "--prepare",
        "standardise",
        "--hold-out",
        "0.2",
    ]
    assert (
        "Data: 16 sequences of 2 to 5 steps (step 1 to 5) of t.csv, standardised, 4 for validation."
        in aevb(monkeypatch, capsys, "train", *asked, "--out", "run")
    )
    assert "4 sequences of 3 to 5 steps (step 1 to 5) of t.csv (held out)" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--samples", "0"
    )
    holes = sum(line.split(",").count("") for line in lines)
    printed = aevb(monkeypatch, capsys, "impute", "run", "--out", "f.csv", "--samples", "5")
    assert (
        f"{holes} missing cells of 20 sequences of 2 to 5 steps (step 1 to 5) filled, in f.csv"
        in printed
    )
    written = Path("f.csv").read_text().splitlines()
    assert written[0] == "row,step,x0,x1,y,g"
    for line, found in zip(lines, written[1:], strict=True):
        for cell, other in zip(line.split(","), found.split(","), strict=True):
            assert float(cell) == float(other) if cell else np.isfinite(float(other))
    filled = np.loadtxt("f.csv", delimiter=",", skiprows=1)
    assert (np.abs(filled[:, 2] - 100) < 100).all()
    assert set(filled[:, 4]) == {0, 1, 2}
    aevb(monkeypatch, capsys, "encode", "run", "--out", "codes.csv")
    codes = np.loadtxt("codes.csv", delimiter=",", skiprows=1)
    assert np.array_equal(codes[:, :2], filled[:, :2])  # the table's own numbers of rows and steps
    aevb(monkeypatch, capsys, "sample", "run", "-n", "3", "--out", "s.csv")
    assert Path("s.csv").read_text().startswith("row,step,x0,x1,y,g\n0,0,")
    assert "3 sequences of 5 steps (step 0 to 4) of s.csv" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--data", "s.csv", "--samples", "0"
    )
    aevb(monkeypatch, capsys, "impute", "run", "--out", "f.npz", "--samples", "5")
    with np.load("f.npz") as found:
        assert found["lengths"].tolist() == np.unique(filled[:, 0], return_counts=True)[1].tolist()
        assert np.array_equal(found["x"][np.arange(5) < found["lengths"][:, None]], filled[:, 2:4])
    expected = (
        "a .npy file holds a single array, but these are x, y, g, lengths. Write a .npz or a .csv "
        "file."
    )
    assert expected in mistake(
        monkeypatch, capsys, "impute", "run", "--out", "f.npy", "--samples", "1"
    )


def test_ragged_lists_in_parquet_are_filled(monkeypatch, capsys, models):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    random = np.random.default_rng(0)
    rows = [random.normal(100, 10, random.integers(2, 6)) for _ in range(15)]
    for row in rows[:5]:
        row[1] = np.nan
    parquet.write_table(pyarrow.table({"x": [row.tolist() for row in rows]}), "t.parquet")
    asked = ["models.py:series", "--data", "t.parquet", "--steps", "50", "--prepare", "standardise"]
    aevb(monkeypatch, capsys, "train", *asked, "--out", "run")
    assert "5 missing cells of 15 sequences of 2 to 5 steps filled" in aevb(
        monkeypatch, capsys, "impute", "run", "--out", "f.csv", "--samples", "5"
    )
    assert Path("f.csv").read_text().startswith("row,step,x\n0,0,")
    found = np.loadtxt("f.csv", delimiter=",", skiprows=1)
    known = ~np.isnan(np.concatenate(rows))
    assert np.array_equal(found[known, 2], np.concatenate(rows)[known])
    assert (np.abs(found[:, 2] - 100) < 60).all()
    assert "15 sequences of 2 to 5 steps (step 0 to 4) of f.csv" in aevb(
        monkeypatch, capsys, "evaluate", "run", "--data", "f.csv", "--samples", "0"
    )


def test_what_cannot_be_asked_of_a_run_is_one_line(monkeypatch, capsys, models):
    np.savetxt("t.csv", np.random.default_rng(0).normal(size=(20, 3)), delimiter=",")
    aevb(
        monkeypatch,
        capsys,
        "train",
        "models.py:series",
        "--data",
        "t.csv",
        "--steps",
        "2",
        "--seeds",
        "2",
        "--out",
        "runs",
    )
    for command in (
        ["evaluate"],
        ["sample"],
        ["encode", "--out", "c.csv"],
        ["impute", "--out", "f.csv"],
        ["doctor"],
        ["check"],
        ["estimators"],
    ):
        told = mistake(monkeypatch, capsys, command[0], "runs", *command[1:])
        assert (
            told == "aevb: runs holds 2 runs, one for each seed. Name one of them: runs/seed-0, "
            "runs/seed-1.\n"
        )
    assert "of the same kind" not in aevb(monkeypatch, capsys, "impute", "--help")
    for number in ("0", "-1"):
        assert (
            mistake(monkeypatch, capsys, "sample", "runs/seed-0", "-n", number)
            == f"aevb: -n must be at least 1, got {number}.\n"
        )
        assert (
            mistake(monkeypatch, capsys, "sample", "runs/seed-0", "--steps", number)
            == f"aevb: --steps must be at least 1, got {number}.\n"
        )
    for command in ("sample", "encode", "impute"):
        told = mistake(monkeypatch, capsys, command, "runs/seed-0", "--out", "f.parquet")
        assert (
            told == "aevb: f.parquet: write a .csv or a .npz file, or a .npy of a single array.\n"
        )


def test_images_drawn_anew_are_recorded_and_resumed(tmp_path, monkeypatch, capsys, small):
    asked = [
        "train",
        f"{small}:mixture",
        "--data",
        "digits",
        "--out",
        tmp_path / "run",
        "--epochs",
        "0.3",
        "--prepare",
        "binarise-fresh",
    ]
    aevb(monkeypatch, capsys, *asked)
    assert 'x" = "binarise 17"' in (tmp_path / "run" / "config.toml").read_text()
    assert json.loads((tmp_path / "run" / "data.json").read_text())["prepare"] == "binarise-fresh"
    assert "holds a run already" in mistake(monkeypatch, capsys, *asked)
    aevb(monkeypatch, capsys, *asked, "--resume")
    assert "was trained with prepare='binarise-fresh', not 'threshold'" in mistake(
        monkeypatch, capsys, *asked[:-1], "threshold", "--resume"
    )
    values = [
        aevb(monkeypatch, capsys, "evaluate", tmp_path / "run", "--samples", "0") for _ in range(2)
    ]
    assert values[0] == values[1]


def mistake(monkeypatch, capsys, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_weights_of_kl_terms_are_options(tmp_path, monkeypatch, capsys, small):
    command = ["train", f"{small}:mixture", "--data", "digits", "--steps", "20"]
    options = ["--beta", "z=4", "--beta", "y=0.5", "--free-bits", "0.2"]
    cycles = ["--kl-warmup", "5", "--kl-cycles", "2"]
    run = tmp_path / "run"
    printed = aevb(monkeypatch, capsys, *command, *options, *cycles, "--out", run)
    assert (
        "The run maximises the objective, which has beta={'z': 4.0, 'y': 0.5} and free_bits=0.2. "
        "The elbo and its terms are reported without them." in printed
    )
    found = tomllib.loads((run / "config.toml").read_text())
    assert found["beta"] == {"z": 4.0, "y": 0.5}
    assert [found[name] for name in ("free_bits", "kl_warmup", "kl_cycles")] == [0.2, 5, 2]
    evaluated = aevb(monkeypatch, capsys, "evaluate", run, "--samples", "0")
    assert "elbo" in evaluated
    assert "objective" not in evaluated
    again = ["--config", run / "config.toml", "--beta", "2", "--seeds", "2"]
    printed = aevb(monkeypatch, capsys, *command, *again, "--out", tmp_path / "more")
    assert "seed-1: 20 steps, best validation objective -" in printed
    assert tomllib.loads((tmp_path / "more/seed-0/config.toml").read_text())["beta"] == 2.0


MISTAKES = [
    *(
        (
            ["train", "gmvae", "--data", "digits", "--out", "run", *wrong],
            2,
            "--beta takes one number, e.g. --beta 0.5, or LATENT=NUMBER for each latent",
        )
        for wrong in (["--beta", "much"], ["--beta", "z=a"], ["--beta", "2", "--beta", "z=2"])
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--free-bits", "w=1"],
        2,
        "free_bits= names 'w', which is no latent. The latents are y, z.",
    ),
    (
        ["train", "gmvae", "--data", "nothing.csv", "--out", "run"],
        2,
        "There is no file nothing.csv",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--prepare", "sharpen"],
        2,
        "Unknown preparation 'sharpen'",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--set", "layers=3"],
        2,
        "gmvae has no argument 'layers'. Its arguments are x=784, z=64",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--set", "z"],
        2,
        "--set takes NAME=VALUE, e.g. --set z=5; got 'z'.",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--set", "likelihood=Gauss"],
        2,
        "Unknown likelihood 'Gauss'. Choose one of Normal",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--schedule", "slow"],
        2,
        "Unknown schedule 'slow'. Choose one of joint, alternate",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--schedule", "alternate:0,1"],
        2,
        "alternate takes positive numbers of steps",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--hold-out", "0.1"],
        2,
        "digits has its own test rows",
    ),
    (
        ["train", "gmvae", "--data", "digits", "--out", "run", "--prepare", "scale"],
        2,
        "On the command line, --set 'likelihood=Normal(scale=",
    ),
    (["evaluate", "nowhere", "--data", "digits"], 2, "holds no run: model.json is missing"),
    (
        ["train", "gmvae", "--data", "digits", "--out", "/proc/run", "--epochs", "0.1"],
        1,
        "/proc/run",
    ),
]


MISTAKES += [
    (
        [command, "run", "--unknown-levels", "missing"],
        2,
        "aevb: --unknown-levels is for runs of tables (`aevb train table.csv`).",
    )
    for command in ("evaluate", "encode", "impute")
]
MISTAKES += [
    (
        ["train", "vae", "--data", "digits", "--out", "r", "--missing", "unknown"],
        2,
        "--missing unknown: the data of a named model are numbers, so a number marks their missing "
        "cells, e.g. --missing -999. Words are for models of a table: aevb train table.csv "
        "--missing unknown.",
    ),
    (
        ["sweep", "vae", "--data", "digits", "--out", "r", "--missing", "nan", "--set", "z=1"],
        2,
        "--missing nan: the data of a named model are numbers",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "code", "message"), MISTAKES, ids=[a[0] + " " + m for a, _, m in MISTAKES]
)
def test_mistakes_are_one_line_and_an_exit_code(
    tmp_path, monkeypatch, capsys, arguments, code, message
):
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


def test_labels_of_steps_and_unknown_labels_are_counted(monkeypatch, capsys, models):
    """Rows of a table with a line a step differ in length; a class that no row knows is no part of
    what log p is of.
    """
    lines = [
        (row, step, 0.1 * step, (row + step) % 2)
        for row, length in enumerate((4, 6, 5) * 4)
        for step in range(length)
    ]
    Path("chain.py").write_text(
        'from aevb import Model, Normal, OneHot\nm = Model(p={"y[t] | y[t-1]": OneHot(2), "x[t] | '
        'y[t]": Normal(1)}, q={"y[t] | x[t]": OneHot()})\n'
    )
    write_csv(Path("steps.csv"), np.array(lines), "row,step,x,y")
    told = aevb(
        monkeypatch,
        capsys,
        "train",
        "chain.py:m",
        "--data",
        "steps.csv",
        "--steps",
        "3",
        "--out",
        "chain",
    )
    assert "12 sequences of 4 to 6 steps (step 0 to 5) of steps.csv, y known in all." in told
    Path("mixture.py").write_text(
        'from aevb import Model, Normal, OneHot\nm = Model(p={"y": OneHot(2), "z | y": Normal(1), '
        '"x | z": Normal(2)}, q={"y | x": OneHot(), "z | x, y": Normal()})\n'
    )
    for name, labels in (("none", [-1, -1]), ("some", [-1, 1]), ("all", [0, 1])):
        write_csv(
            Path(f"{name}.csv"),
            np.array([(0.1 * i, -0.2 * i, labels[i % 2]) for i in range(20)]),
            "x0,x1,y",
        )
        aevb(
            monkeypatch,
            capsys,
            "train",
            "mixture.py:m",
            "--data",
            f"{name}.csv",
            "--steps",
            "3",
            "--out",
            name,
        )
        told = aevb(monkeypatch, capsys, "evaluate", name)
        assert {"none": "log p(x) ", "some": "log p(x, y where known)", "all": "log p(x, y) "}[
            name
        ] in told
        assert ("of the rows with a label is their label" in told) == (name == "some")
        # Where every class was known, q(y) was not trained.
        assert ("--classify 1 where every row has a label" in told) == (name == "all")


def test_a_q_that_was_not_trained_is_told_and_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 1)) * [1, 2, -1] + 0.3 * rng.normal(size=(60, 3)) + 5
    holes = np.where(np.arange(60)[:, None] % 6 == [0, 2, 4], np.nan, x)
    for name, rows in (("full.csv", x), ("holes.csv", holes)):
        lines = [
            ",".join("" if np.isnan(value) else f"{value:.5f}" for value in row) for row in rows
        ]
        Path(name).write_text("\n".join(["a,b,c", *lines]) + "\n")
    asked = [
        "train",
        "fa",
        "--set",
        "z=1",
        "--data",
        "full.csv",
        "--prepare",
        "standardise",
        "--schedule",
        "mle",
        "--out",
        "fa",
    ]
    # the model's usual rate and batch are about the bound
    assert "iterations of L-BFGS on all rows" in aevb(monkeypatch, capsys, *asked)
    printed = aevb(monkeypatch, capsys, "evaluate", "fa")
    assert (
        "mle() trains p alone: the bound of that q and its terms say nothing about p and are not "
        "printed" in printed
    )
    assert "z [60, 1] in c.csv (by the exact posterior)" in aevb(
        monkeypatch, capsys, "encode", "fa", "--data", "holes.csv", "--out", "c.csv"
    )
    assert "30 missing cells of 60 rows filled" in aevb(
        monkeypatch, capsys, "impute", "fa", "--data", "holes.csv", "--out", "f.csv"
    )
    filled, lost = np.loadtxt("f.csv", delimiter=",", skiprows=1), np.isnan(holes)
    assert (
        np.square((filled - x)[lost]).mean()
        < 0.5 * np.square((np.nanmean(holes, 0) - x)[lost]).mean()
    )
    aevb(
        monkeypatch,
        capsys,
        "train",
        "vae",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--data",
        "full.csv",
        "--steps",
        "5",
        "--out",
        "vae",
    )
    for command in ("encode", "impute"):
        told = mistake(monkeypatch, capsys, command, "vae", "--data", "holes.csv", "--out", "o.csv")
        assert "30 rows lack entries of x (first: line 2), which q was not trained on" in told
        assert 'method="q"' not in told
        assert not Path("o.csv").exists()


def test_a_sequence_model_trains_by_particles(tmp_path, monkeypatch, capsys, small):
    choices = ["--bound", "particles", "--samples", "3", "--resample", "0.8"]
    printed = aevb(
        monkeypatch, capsys, "train", f"{small}:rows", "--data", "digits", "--steps", "4",
        *choices, "--out", tmp_path / "run",
    )  # fmt: skip
    assert "particle bound, K = 3" in printed
    assert "below 2.4 (0.8 of 3)" in printed
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (config["bound"], config["samples"], config["resample"]) == ("particles", 3, 0.8)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert any("validation particles" in row for row in rows)
    assert aevb(monkeypatch, capsys, "evaluate", tmp_path / "run")


def test_filled_cells_have_no_more_digits_than_their_precision():
    sizes = 10.0 ** np.arange(-5, 15).repeat(5)
    drawn = np.random.default_rng(0).normal(size=100) * sizes
    for values, digits in ((drawn.astype(np.float32), 7), (drawn, 15)):
        found = significant(values, single=digits == 7)
        for value in found.tolist():
            shown = repr(value).partition("e")[0].replace(".", "").strip("-0")
            assert len(shown) <= digits
        assert np.allclose(found, values, rtol=10.0 ** (1 - digits), atol=0)
    assert np.isnan(significant(np.array([np.nan]), single=True)).all()
