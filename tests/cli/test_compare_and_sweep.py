"""``aevb compare`` and ``aevb sweep``, from the command to its table."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from aevb import cli, compare, load_run, load_table
from aevb.data.frames import read_frame
from aevb.training.seed_folders import seed_folder

MODELS = """
from aevb import Exact, Model, Normal, OneHot, mlp


def mixture(components: int = 2):
    p = {"y": OneHot(components, learned=True), "x | y": Normal(2)}
    return Model(p, {"y | x": Exact()})


def vae(z: int = 1):
    return Model({"z": Normal(z), "x | z": Normal(2, net=mlp(4))}, {"z | x": Normal(net=mlp(4))})
"""


def aevb(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert stop.value.code in (0, None), printed.err
    return printed.out


def mistake(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    x = np.random.default_rng(0).normal(size=(200, 2)) + 5 * (np.arange(200) % 2)[:, None]
    np.savetxt("x.csv", x * [1, 100], delimiter=",", header="a,b", comments="")
    np.savetxt("y.csv", x, delimiter=",", header="a,b", comments="")
    np.savetxt("z.csv", x, delimiter=",", header="a,c", comments="")
    return tmp_path


EM = ("--schedule", "em", "--steps", "30")
DATA = ("--data", "x.csv", "--prepare", "standardise", "--hold-out", "0.25")


def test_compare_prints_the_table_of_runs(files, monkeypatch, capsys):
    for k in (1, 2):
        aevb(
            monkeypatch,
            capsys,
            "train",
            "models.py:mixture",
            *DATA,
            "--set",
            f"components={k}",
            *EM,
            "--out",
            f"runs/k{k}",
        )
    printed = aevb(monkeypatch, capsys, "compare", "runs/k1", "runs/k2", "--elbo", "--out", "t.csv")
    lines = printed.splitlines()
    assert lines[0] == "50 rows of x.csv (held out): exact log p in nats per example"
    assert lines[2].startswith("* k2 ")
    assert lines[3].startswith("  k1 ")
    assert max(map(len, lines)) <= 80
    assert "k2 is better than the other: each difference exceeds 2.0" in " ".join(printed.split())
    assert "in the units of the data" in printed
    evaluated = aevb(monkeypatch, capsys, "evaluate", "runs/k2")
    exact = next(line.split()[1] for line in evaluated.splitlines() if "evidence" in line)
    assert float(lines[2].split()[2]) == pytest.approx(float(exact), abs=1.1e-3)
    with open("t.csv", newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["k2", "k1"]
    assert compare(["runs/k1", "runs/k2"])["k2"].mean == pytest.approx(float(exact), abs=1.1e-3)


def test_compare_refuses_other_data_and_other_columns(files, monkeypatch, capsys):
    train = ("train", "models.py:mixture", *EM)
    aevb(monkeypatch, capsys, *train, *DATA, "--out", "x")
    aevb(monkeypatch, capsys, *train, "--data", "y.csv", "--out", "y")
    aevb(monkeypatch, capsys, *train, "--data", "z.csv", "--out", "z")
    aevb(monkeypatch, capsys, *train, *DATA, "--split", "1", "--out", "w")
    said = mistake(monkeypatch, capsys, "compare", "x", "y")
    assert "x and y have different rows: data is 'x.csv' and 'y.csv' (data.json)" in said
    said = mistake(monkeypatch, capsys, "compare", "x", "w")
    assert "split is 0 and 1" in said
    said = mistake(monkeypatch, capsys, "compare", "x", "z", "--data", "y.csv")
    assert "c" in said
    assert mistake(monkeypatch, capsys, "compare", "nowhere") == (
        "aevb: nowhere is not the folder of a run."
    )
    # On rows that are new to both, runs compare, whatever they were trained on.
    printed = aevb(monkeypatch, capsys, "compare", "x", "w", "--data", "y.csv")
    assert printed.startswith("200 rows of y.csv: exact log p")


def test_compare_says_what_must_not_be_trusted(files, monkeypatch, capsys):
    aevb(monkeypatch, capsys, "train", "models.py:mixture", *DATA, *EM, "--out", "mixture")
    aevb(monkeypatch, capsys, "train", "models.py:vae", *DATA, "--steps", "5", "--out", "vae")
    printed = aevb(monkeypatch, capsys, "compare", "mixture", "vae", "--samples", "100")
    text = " ".join(printed.split())
    assert "log p was estimated (importance); it is exact for mixture." in text
    assert "sampling error" in text


SWEEP = ("sweep", "models.py:mixture", *DATA, "--set", "components=1..3", "--seeds", "2", *EM)


def test_sweep_trains_the_grid_and_goes_on(files, monkeypatch, capsys):
    printed = aevb(monkeypatch, capsys, *SWEEP, "--out", "sweep")
    lines = printed.splitlines()
    assert lines[0] == "6 runs in sweep; 6 to do."
    assert "50 rows of x.csv (held out): exact log p in nats per example" in lines
    assert max(map(len, lines)) <= 80
    with open("sweep/table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {row["components"] for row in rows} == {"1", "2", "3"}
    best = seed_folder(
        files / "sweep" / f"components={rows[0]['components']}", int(rows[0]["seed"])
    )
    assert f"Chosen: components={rows[0]['components']} seed {rows[0]['seed']}" in printed
    assert load_run(best).graph.size("y") == int(rows[0]["components"])
    again = aevb(monkeypatch, capsys, *SWEEP, "--out", "sweep")
    assert again.splitlines()[0] == "6 runs in sweep, 6 of them finished before."
    table = [line for line in lines if " seed " in line and "±" in line]
    assert table
    assert all(line in again.splitlines() for line in table)
    compared = aevb(monkeypatch, capsys, "compare", "sweep")
    assert compared.splitlines()[2].split()[2] == f"{float(rows[0]['log_p']):.3f}"


def test_sweep_takes_a_fifth_of_a_file_by_default(files, monkeypatch, capsys):
    printed = aevb(
        monkeypatch,
        capsys,
        "sweep",
        "models.py:mixture",
        "--data",
        "y.csv",
        *EM,
        "--set",
        "components=1,2",
        "--out",
        "sweep",
    )
    assert "40 rows of y.csv (held out)" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "components=3..1"), "the range 3..1 is empty"),
        (("--set", "clusters=2"), "models.py:mixture has no argument 'clusters'"),
        (("--set", "components=two"), "a size is a positive whole number"),
        (("--seed", "3"), "Use --seeds instead of --seed"),
        (("--hold-out", "0"), "A sweep compares held-out rows"),
        (("--evidence", "guess"), "Unknown --evidence guess"),
        (("--schedule", "what"), "--schedule what"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    files, monkeypatch, capsys, arguments, message
):
    command = ("sweep", "models.py:mixture", "--data", "y.csv", "--out", "sweep")
    assert message in mistake(monkeypatch, capsys, *command, *arguments)
    assert not (files / "sweep").exists()


def test_a_run_that_fails_is_listed_and_the_others_are_ranked(files, monkeypatch, capsys):
    """EM needs closed forms, which a network does not have."""
    (files / "models.py").write_text(
        MODELS + "\n\ndef either(components: int = 1):\n"
        "    return vae() if components == 2 else mixture(components)\n"
    )
    monkeypatch.setattr(
        sys,
        "argv",
        ["aevb", "sweep", "models.py:either", *DATA, *EM, "--set", "components=1..3", "--out", "s"],
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr().out
    assert stop.value.code == 1
    assert "Failed: components=2 seed 0:" in printed
    assert "Chosen: components=3 (s/components=3/seed-0)" in printed


# Tables -------------------------------------------------------------------------------------------


@pytest.fixture
def birds(tmp_path, monkeypatch):
    """A table of three kinds of birds, with words and missing cells."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    kind = draw.integers(3, size=150)
    columns = {
        "ring": [f"r{i:03d}" for i in range(150)],
        "mass": [f"{value:.4f}" for value in np.exp(draw.normal(kind, 0.3))],
        "length": [
            "" if draw.random() < 0.05 else f"{value:.3f}" for value in draw.normal(6 * kind, 1)
        ],
        "island": np.array(["A", "B", "C"])[kind].tolist(),
    }
    with open("birds.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return tmp_path


def test_sweep_of_a_table_chooses_the_number_of_clusters(birds, monkeypatch, capsys):
    command = ("sweep", "birds.csv", "--set", "components=1..3", "--without", "ring", "--out", "s")
    printed = aevb(monkeypatch, capsys, *command)
    assert "island  category" in printed
    assert "30 rows of birds.csv (held out): exact log p in nats per example" in printed
    assert "Chosen: components=3 (s/components=3/seed-0)." in printed
    assert "log p is of the columns in their own units" in printed
    with open("s/table.csv", newline="") as file:
        best = next(csv.DictReader(file))
    table = load_table("s/components=3/seed-0")
    order = np.random.default_rng(0).permutation(150)
    held_out = read_frame("birds.csv").drop_columns(["ring"]).take(np.sort(order[:30]))
    scores = table.score(held_out)["log_p"].to_numpy()
    assert scores.mean() == pytest.approx(float(best["log_p"]), abs=1e-9)
    again = aevb(monkeypatch, capsys, *command)
    assert "3 runs in s, 3 of them finished before." in again
    compared = aevb(monkeypatch, capsys, "compare", "s")
    assert compared.splitlines()[2].split()[2] == f"{float(best['log_p']):.3f}"
    said = mistake(monkeypatch, capsys, *command[:4], "--out", "s")
    assert "without = ['ring'], but this command has []" in said
    header, *lines = Path("birds.csv").read_text().splitlines()
    Path("birds.csv").write_text("\n".join([header, *lines[::-1]]) + "\n")
    said = mistake(monkeypatch, capsys, "compare", "s")
    assert "birds.csv has changed since components=1 was trained" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Say which model of the table to train"),
        (("--set", "hidden=[8],[16]"), "Say which model of the table to train"),
        (("--model", "density"), "The default density has no arguments to vary"),
        (("--model", "mixture", "--set", "latent=2"), "has no argument 'latent'"),
        (("--model", "mixture", "--set", "covariance=full"), "Give --set components="),
        (("--set", "components=0..2"), "a whole number from 1 on"),
        (("--set", "components=2", "--data", "birds.csv"), "is a table already"),
        (("--set", "components=2", "--without", "wing"), "which the table does not have"),
        (("--set", "components=2", "--hold-out", "0"), "A sweep compares held-out rows"),
    ],
)
def test_mistakes_of_a_table_are_found_before_anything_is_trained(
    birds, monkeypatch, capsys, arguments, message
):
    command = ("sweep", "birds.csv", "--out", "sweep")
    assert message in mistake(monkeypatch, capsys, *command, *arguments)
    assert not (birds / "sweep").exists()


def test_sweep_of_a_table_takes_two_arguments_of_one_model(birds, monkeypatch, capsys):
    printed = aevb(
        monkeypatch,
        capsys,
        "sweep",
        "birds.csv",
        "--without",
        "ring",
        "--set",
        "components=2",
        "--set",
        "latent=1,2",
        "--steps",
        "20",
        "--evidence-samples",
        "50",
        "--out",
        "s",
    )
    assert "2/2  components=2 latent=2: log p " in printed
    assert load_table("s/components=2,latent=1/seed-0").model.graph.size("z") == 1


def test_each_run_of_a_table_reads_its_own_missing_cells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    lines = [f"{-999 if i % 8 == 0 else draw.normal():.3f},{draw.normal():.3f}" for i in range(80)]
    Path("marked.csv").write_text("\n".join(["a,b", *lines]) + "\n")
    Path("plain.csv").write_text("\n".join(["a,b", *lines[1:8]]) + "\n")
    common = ("train", "marked.csv", "--set", "components=1", "--hold-out", "0.5")
    marks = {
        "asis": (),
        "marked": ("--missing", "-999"),
        "more": ("--missing", "-999", "--missing", "-99"),
    }
    for out, options in marks.items():
        aevb(monkeypatch, capsys, *common, *options, "--out", out)
    held_out = np.random.default_rng(0).permutation(80)[:40]
    known = int((held_out % 8 != 0).sum())
    said = mistake(monkeypatch, capsys, "compare", "asis", "marked")
    assert f"Column 'a': asis reads 40 of 40 cells and marked {known}" in said
    said = mistake(monkeypatch, capsys, "compare", "marked", "asis")
    assert f"Column 'a': marked reads {known} of 40 cells and asis 40" in said
    assert "40 rows of marked.csv (held out)" in aevb(
        monkeypatch, capsys, "compare", "marked", "more"
    )
    assert "7 rows of plain.csv" in aevb(
        monkeypatch, capsys, "compare", "asis", "marked", "--data", "plain.csv"
    )
