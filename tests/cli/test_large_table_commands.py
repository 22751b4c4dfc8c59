"""Commands for tables in large Parquet files: the results of tables in memory, part by part."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from aevb import cli, load_table
from aevb.cli.table_files import read_table_file
from aevb.data import large_tables, parquet, read_frame
from aevb.tables import Schema

N = 600


def aevb(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "100")
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            raise
    return capsys.readouterr().out


def frame(seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    kind = draw.integers(2, size=N)
    mass = np.exp(draw.normal(1 + kind, 0.2))
    city = np.array(["Bonn", "Kiel", "Ulm"])[(kind + (draw.random(N) < 0.2)) % 3].astype(object)
    city[draw.random(N) < 0.1] = "Unknown"
    visits = draw.poisson(2 + 3 * kind)
    visits[draw.random(N) < 0.1] = -9
    return pa.table(
        {
            "name": [f"guest {i}" for i in range(N)],
            "mass": pa.array(mass, mask=draw.random(N) < 0.2),
            "height": pa.array(3 * np.log(mass) + draw.normal(0, 0.3, N)),
            "city": city.tolist(),
            "visits": visits,
            "vip": draw.random(N) < 0.3 + 0.4 * kind,
        }
    )


def write(place, table: pa.Table) -> None:
    place.mkdir(exist_ok=True)
    for i, (start, stop) in enumerate([(0, 250), (250, N)]):
        part = table.slice(start, stop - start)
        pq.write_table(part, place / f"{i}.parquet", row_group_size=100)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "guests", frame())
    return tmp_path


def lower(monkeypatch):
    """Take the files for large ones, and read few rows at once."""
    monkeypatch.setattr(parquet, "LARGE", 10_000)
    monkeypatch.setattr(large_tables, "AT_ONCE", 6 * 70)


MARKS = ["--missing", "unknown", "--missing", "-9"]


@pytest.mark.parametrize(
    ("command", "options", "ending"),
    [
        ("score", [], "csv"),
        ("impute", ["--std"], "parquet"),
        ("cluster", [], "csv"),
        pytest.param("score", [], "parquet", marks=pytest.mark.slow),
        pytest.param("impute", ["--std"], "csv", marks=pytest.mark.slow),
        pytest.param("cluster", [], "parquet", marks=pytest.mark.slow),
    ],
)
def test_results_equal_those_of_a_table_in_memory(
    here, monkeypatch, capsys, command, options, ending
):
    asked = ["train", "guests", "--set", "components=2", "--out", "run", *MARKS]
    aevb(monkeypatch, capsys, *asked)
    aevb(monkeypatch, capsys, command, "run", *options, "--out", f"whole.{ending}")
    lower(monkeypatch)
    said = aevb(monkeypatch, capsys, command, "run", *options, "--out", f"parts.{ending}")
    assert "600 random rows of the 600 rows of guests" in said
    if ending == "csv":
        assert (here / "whole.csv").read_text() == (here / "parts.csv").read_text()
    else:
        whole, parts = (pq.read_table(here / f"{name}.parquet") for name in ("whole", "parts"))
        assert whole.equals(parts)


def test_codes_equal_those_of_a_table_in_memory(here, monkeypatch, capsys):
    asked = ["train", "guests", "--model", "factors", "--set", "latent=1", "--without"]
    aevb(monkeypatch, capsys, *asked, "city,visits,vip", "--out", "run")
    aevb(monkeypatch, capsys, "encode", "run", "--out", "whole.csv")
    lower(monkeypatch)
    aevb(monkeypatch, capsys, "encode", "run", "--out", "parts.csv")
    assert (here / "whole.csv").read_text() == (here / "parts.csv").read_text()


def test_marked_cells_are_missing_in_every_part(here, monkeypatch, capsys):
    small = read_table_file("guests", ["unknown", -9.0]).frame
    lower(monkeypatch)
    large = read_table_file("guests", ["unknown", -9.0])
    assert pa.concat_tables(large.large.parts()).equals(small)
    assert large.frame.equals(small)
    for column, other in zip(Schema.read(large.table).columns, Schema.read(small).columns):
        assert (column.kind, column.levels, column.missing, column.facts.words) == (
            (other.kind, other.levels, other.missing, other.facts.words)
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", [[], ["--set", "components=2"]])
def test_exact_models_are_fitted_to_random_rows(here, monkeypatch, capsys, model):
    lower(monkeypatch)
    monkeypatch.setattr(large_tables, "CELLS", 6 * 200)
    monkeypatch.setattr(large_tables, "LEAST_ROWS", 100)
    said = aevb(monkeypatch, capsys, "train", "guests", "--out", "run", *MARKS, *model)
    assert "guests: 600 rows, 6 columns, 5 modelled" in said
    said = " ".join(said.split())
    assert "All its rows describe the columns, and random rows the model." in said
    assert "(200 random training rows)" in said
    assert "It is fitted to 200 random rows." in said or not model
    assert load_table("run").schema.rows == N
    said = aevb(monkeypatch, capsys, "evaluate", "run")
    assert said.startswith("200 random rows of the 600 rows of guests (the training rows)\n")
    said = aevb(monkeypatch, capsys, "score", "run")
    assert said.startswith("200 random rows of the 600 rows of guests: log p per row is")


@pytest.mark.slow
def test_a_stopped_run_of_a_large_table_resumes_as_if_it_had_not_stopped(here, monkeypatch, capsys):
    lower(monkeypatch)
    command = ["train", "guests", "--model", "vae", "--set", "latent=2", "--set", "hidden=8"]
    command += ["--decay", "constant", "--seed", "3", "--hold-out", "0.1", *MARKS]
    said = aevb(monkeypatch, capsys, *command, "--out", "whole", "--steps", "30")
    assert "540 rows to train on, 60 held out." in said
    assert "It is fitted to all rows." in said
    aevb(monkeypatch, capsys, *command, "--out", "parts", "--steps", "11")
    aevb(monkeypatch, capsys, *command, "--out", "parts", "--steps", "30", "--resume")
    whole, parts = (load_table(run).model.state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert "60 rows of guests (held out)" in aevb(monkeypatch, capsys, "evaluate", "whole")


def test_a_changed_file_of_a_large_table_is_noticed(here, monkeypatch, capsys):
    lower(monkeypatch)
    aevb(monkeypatch, capsys, "train", "guests", "--set", "components=2", "--out", "run", *MARKS)
    assert "has changed" not in aevb(monkeypatch, capsys, "evaluate", "run")
    write(here / "guests", frame(1))
    assert "guests has changed since training" in aevb(monkeypatch, capsys, "evaluate", "run")


def test_rows_are_numbered_as_in_the_files(here, monkeypatch, capsys):
    aevb(monkeypatch, capsys, "train", "guests", "--set", "components=2", "--out", "run", *MARKS)
    lower(monkeypatch)
    monkeypatch.setattr(large_tables, "CELLS", 6 * 200)
    monkeypatch.setattr(large_tables, "LEAST_ROWS", 100)
    lines = aevb(monkeypatch, capsys, "score", "run").splitlines()
    table = [line.replace("< ", "<").split() for line in lines[lines.index("") + 2 :]]
    names = read_frame("guests")["name"].to_pylist()
    rows = [line for line in table if line and line[0].isdigit()]
    assert len(rows) == 5
    for line in rows:
        assert names[int(line[0])] == " ".join(line[3:5])


def test_results_are_not_written_into_the_folder_of_the_table(here, monkeypatch, capsys):
    aevb(monkeypatch, capsys, "train", "guests", "--set", "components=2", "--out", "run", *MARKS)
    with pytest.raises(SystemExit):
        aevb(monkeypatch, capsys, "score", "run", "--out", "guests/scores.parquet")
    said = capsys.readouterr().err
    assert "--out guests/scores.parquet lies in the folder that the data are read from" in said


@pytest.mark.slow
def test_models_are_compared_on_the_same_random_rows(here, monkeypatch, capsys):
    lower(monkeypatch)
    monkeypatch.setattr(large_tables, "CELLS", 6 * 200)
    monkeypatch.setattr(large_tables, "LEAST_ROWS", 100)
    monkeypatch.setattr(large_tables, "FEW", 50)
    command = ["train", "guests", *MARKS, "--out"]
    aevb(monkeypatch, capsys, *command, "mixture", "--set", "components=2")
    aevb(monkeypatch, capsys, *command, "vae", "--model", "vae", "--steps", "5")
    said = aevb(monkeypatch, capsys, "compare", "mixture", "vae")
    assert said.startswith("50 rows")
