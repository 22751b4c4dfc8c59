"""The command line for a table: from a file with words, dates and missing cells to results beside
its columns.
"""

import csv
import datetime
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from aevb import cli, load_table
from aevb.cli.series_hint import series_hint
from aevb.cli.table_files import own_names, read_table_file, rounded_cells, write_beside
from aevb.cli.table_text import schema_text
from aevb.tables import Schema

ROWS = 120
HEADER = ["code", "remark", "seen", "city", "visits", "price", "vip", "p0", "log_p"]


def aevb(monkeypatch, capsys, *arguments, columns: int = 80) -> str:
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", str(columns))
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            raise
    return capsys.readouterr().out


def refused(monkeypatch, capsys, *arguments) -> str:
    """Run a command that must fail with code 2, and return its message."""
    with pytest.raises(SystemExit) as stop:
        aevb(monkeypatch, capsys, *arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def two_kinds(rows: int = ROWS) -> list[list[str]]:
    """Rows of two kinds of guests, with quotes, line breaks, leading zeros and missing cells.

    Some columns are named like results of the commands.
    """
    draw = np.random.default_rng(0)
    found = []
    for i in range(rows):
        old = i % 3 == 0
        day = datetime.date(2020, 1, 1) + datetime.timedelta(
            days=int(draw.integers(90)) + 400 * old
        )
        found.append(
            [
                f"{i:05d}",
                f'said "{i}"\nand, left' if i % 2 else "",
                "NA" if i % 11 == 5 else day.isoformat(),
                ""
                if i % 13 == 4
                else str(draw.choice(["Köln", "Bonn"] if old else ["Nice", "Lyon"])),
                "" if i % 17 == 3 else str(draw.poisson(2 if old else 9)),
                f"{draw.lognormal(1 + 2 * old, 0.3):.2f}",
                str(draw.choice(["true", "false"])),
                f"{draw.normal():.3f}",
                f"{draw.normal(5 * old):.3f}",
            ]
        )
    return found


def write_csv(path: Path, rows: list[list[str]], header=HEADER, **how) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **how).writerows([header, *rows])
    return path


def read_csv(path: Path, **how) -> tuple[list[str], list[list[str]]]:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file, **how)
    return header, rows


@pytest.fixture(scope="module")
def guests(tmp_path_factory):
    """A folder with guests.csv and the run of a mixture of two components."""
    folder = tmp_path_factory.mktemp("guests")
    write_csv(folder / "guests.csv", two_kinds())
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    arguments = ["train", "guests.csv", "--set", "components=2", "--set", "covariance=diagonal"]
    patch.setattr(sys, "argv", ["aevb", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    patch.undo()
    assert not stop.value.code
    return folder


@pytest.fixture
def here(guests, monkeypatch):
    monkeypatch.chdir(guests)
    return guests


@pytest.mark.filterwarnings("ignore:.* levels in:aevb.runtime.checked_files.DataWarning")
def test_levels_beyond_the_width_are_counted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    frame = {
        "few": ["red", "blue", "green"] * 80,
        "many": [f"level {i % 120:03d}" for i in range(240)],
        "long": [f"{'word ' * 30}{i % 2}" for i in range(240)],
        "number": np.random.default_rng(0).normal(size=240).round(1),
    }
    lines = schema_text(Schema.read(frame)).splitlines()
    values = [line[lines[0].index("values") :] for line in lines]
    assert values[1] == "blue, green, red"
    assert values[2] == "level 000, level 001, … (120)"
    assert values[3].startswith("word word word")
    assert values[3].endswith("…, … (2)")
    assert " … " in values[4]
    assert max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    assert "level 011, level 012, … (120)" in schema_text(Schema.read(frame))


@pytest.mark.parametrize("command", ["score", "cluster", "impute", "evaluate"])
def test_unknown_levels_are_missing_cells_if_asked(here, monkeypatch, capsys, command):
    rows = two_kinds(30)
    new = [[*row[:3], "Metz" if i < 4 else row[3], *row[4:]] for i, row in enumerate(rows)]
    empty = [[*row[:3], "" if i < 4 else row[3], *row[4:]] for i, row in enumerate(rows)]
    write_csv(here / "new.csv", new)
    write_csv(here / "empty.csv", empty)
    found = []
    for name in ("new", "empty"):
        out = [] if command == "evaluate" else ["--out", f"{name}-out.csv"]
        arguments = [command, "guests-run", f"{name}.csv", *out, "--unknown-levels", "missing"]
        monkeypatch.setattr(sys, "argv", ["aevb", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        found.append(capsys.readouterr())
    told = (
        "aevb: Cells with a level that the schema does not know are treated as missing: 4 in "
        "'city' ('Metz').\n"
    )
    assert [one.err for one in found] == [told, ""]
    if command == "evaluate":
        assert found[0].out == found[1].out.replace("empty.csv", "new.csv")
        return
    header, written = read_csv(here / "new-out.csv")
    _, expected = read_csv(here / "empty-out.csv")
    assert header[:9] == HEADER
    assert [row[3] for row in written[:4]] == ["Metz"] * 4  # not filled
    for row, other in zip(written, expected, strict=True):
        assert row[:3] + row[4:] == other[:3] + other[4:]


# Reading ------------------------------------------------------------------------------------------


def test_words_for_missing_are_shown_and_levels_kept(tmp_path):
    cells = ["none", "?", "NA", "x"] * 5
    path = write_csv(tmp_path / "t.csv", [[cell] for cell in cells], ["a"])
    schema = Schema.read(read_table_file(path).frame)
    assert schema["a"].levels == ("?", "none", "x")
    assert schema["a"].missing == 5
    assert "a: missing where the text is 'NA'" in schema_text(schema)
    write_csv(tmp_path / "new.csv", [["None"], ["NA"]], ["a"])
    with pytest.raises(ValueError, match="does not know: 'None'"):
        schema.encode(read_table_file(tmp_path / "new.csv").known_to(schema))


def test_codes_with_leading_zeros_are_levels(tmp_path):
    codes = [f"{i % 25:03d}" for i in range(100)]
    numbers = [f"{i % 25}" for i in range(100)]
    rows = [list(row) for row in zip(codes, numbers, strict=True)]
    schema = Schema.read(read_table_file(write_csv(tmp_path / "t.csv", rows, ["a", "b"])).frame)
    assert schema["a"].kind == "category"
    assert schema["a"].levels[:2] == ("000", "001")
    # A new file that writes the numbers with zeros has the same numbers.
    write_csv(tmp_path / "new.csv", [["020", "07"], ["021", "7"]], ["a", "b"])
    new = read_table_file(tmp_path / "new.csv").known_to(schema)
    assert new.to_pydict() == {"a": ["020", "021"], "b": [7, 7]}


# Amounts ------------------------------------------------------------------------------------------


def amounts(rows: int = ROWS) -> list[list[str]]:
    """Rows of two kinds, with prices in dollars, percents and thousands; some are missing."""
    draw = np.random.default_rng(0)
    found = []
    for i in range(rows):
        old = i % 3 == 0
        found.append(
            [
                "" if i % 13 == 4 else f"${draw.lognormal(6 + 2 * old, 0.4):,.2f}",
                "?" if i % 17 == 3 else f"{draw.normal(10 - 20 * old, 2):.1f} %",
                "NA" if i % 19 == 5 else f"{draw.normal(6e4 + 3e4 * old, 5e3):,.0f}",
            ]
        )
    return found


AMOUNTS = ["price", "rate", "people"]


def test_amounts_are_numbers_and_come_back_in_their_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "t.csv", amounts(), AMOUNTS)
    printed = aevb(
        monkeypatch, capsys, "train", "t.csv", "--set", "components=2", "--set", "covariance=full"
    )
    assert "price: amounts such as '$" in printed
    assert "%', in percent" in printed
    assert "rate: missing where the text is '?'" in printed
    assert "', ',' separates thousands" in printed
    printed = aevb(monkeypatch, capsys, "impute", "t-run", "--out", "filled.csv")
    assert "23 missing cells filled" in printed
    header, rows = read_csv(tmp_path / "filled.csv")
    assert header == AMOUNTS
    for before, after in zip(amounts(), rows, strict=True):
        for cell, found, form in zip(
            before, after, (r"\$[\d,]+\.\d\d", r"-?\d+\.\d %", r"\d\d,\d{3}"), strict=True
        ):
            assert re.fullmatch(form, found)
            assert cell in (found, "", "?", "NA")
    schema = load_table(tmp_path / "t-run").schema
    assert Schema.read(read_table_file(tmp_path / "filled.csv").frame)["price"].used
    aevb(monkeypatch, capsys, "score", "t-run", "filled.csv", "--out", "scored.csv")
    assert [row[:3] for row in read_csv(tmp_path / "scored.csv")[1]] == rows
    aevb(monkeypatch, capsys, "sample", "t-run", "-n", "30", "--out", "drawn.csv")
    assert all(row[0].startswith("$") for row in read_csv(tmp_path / "drawn.csv")[1])
    cells = schema.cells(read_table_file(tmp_path / "drawn.csv").known_to(schema))
    assert not any(np.isnan(values).any() for values in cells.values())


def test_clusters_and_evaluation_read_amounts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [[*row, "$5" if i % 3 else "$1,000"] for i, row in enumerate(amounts())]
    write_csv(tmp_path / "t.csv", rows, [*AMOUNTS, "fee"])
    arguments = ["--set", "components=2", "--set", "covariance=diagonal"]
    aevb(monkeypatch, capsys, "train", "t.csv", *arguments)
    lines = aevb(monkeypatch, capsys, "cluster", "t-run").splitlines()
    fees = next(line.split() for line in lines if line.split()[:1] == ["fee"])
    assert sorted(fees[1::3]) == ["1000", "5"]
    lines = aevb(monkeypatch, capsys, "evaluate", "t-run").splitlines()
    assert not any("changed" in line for line in lines)
    for name, error in (("price", "RMSE"), ("rate", "RMSE"), ("fee", "wrong")):
        assert next(line.split()[2] for line in lines if line.split()[:1] == [name]) == error


def test_new_files_of_amounts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "t.csv", amounts(), AMOUNTS)
    arguments = ["--set", "components=2", "--set", "covariance=diagonal"]
    aevb(monkeypatch, capsys, "train", "t.csv", *arguments)
    # Prices without a known cell, and thousands without a separator.
    write_csv(tmp_path / "new.csv", [["", "9.5 %", "61000"], ["", "-12 %", ""]], AMOUNTS)
    for ending in ("csv", "parquet"):
        aevb(monkeypatch, capsys, "impute", "t-run", "new.csv", "--out", f"filled.{ending}")
    rows = read_csv(tmp_path / "filled.csv")[1]
    assert [row[1] for row in rows] == ["9.5 %", "-12 %"]
    prices = [row[0] for row in rows]
    assert all(re.fullmatch(r"\$[\d,]+\.\d\d", price) for price in prices)
    assert pq.read_table(tmp_path / "filled.parquet")["price"].to_pylist() == prices
    write_csv(tmp_path / "euros.csv", [["€5.00", "9.5 %", "61,000"]], AMOUNTS)
    assert "now holds '€5.00' in row 0" in refused(
        monkeypatch, capsys, "score", "t-run", "euros.csv"
    )


def test_decimal_commas_of_amounts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    comma = str.maketrans(",.", ".,")
    rows = [
        [f"{price[1:]} €".translate(comma) if price else "", rate.rstrip(" %?").translate(comma)]
        for price, rate, _ in amounts()
    ]
    write_csv(tmp_path / "t.csv", rows, AMOUNTS[:2], delimiter=";")
    arguments = ["--set", "components=2", "--set", "covariance=diagonal"]
    printed = aevb(monkeypatch, capsys, "train", "t.csv", *arguments)
    assert "€', with a decimal comma" in printed
    aevb(monkeypatch, capsys, "impute", "t-run", "--out", "filled.csv")
    for before, after in zip(
        rows, read_csv(tmp_path / "filled.csv", delimiter=";")[1], strict=True
    ):
        assert re.fullmatch(r"[\d.]+,\d\d €", after[0])
        assert before[0] in (after[0], "")


def test_numbers_of_a_new_file_are_read_in_the_form_of_the_amounts(tmp_path, monkeypatch, capsys):
    """1.234 is 1234 in a column of decimal commas, and 0.05 is no amount in percent."""
    monkeypatch.chdir(tmp_path)
    comma = str.maketrans(",.", ".,")
    rows = [[row[0][1:].translate(comma), row[1], row[2]] for row in amounts()]
    write_csv(tmp_path / "t.csv", rows, AMOUNTS)
    schema = Schema.read(read_table_file(tmp_path / "t.csv").frame)
    assert schema["price"].facts.amounts.decimal == ","
    write_csv(tmp_path / "new.csv", [["1.234", "5 %", "61000"], ["2.500", "", "7e4"]], AMOUNTS)
    cells = schema.cells(read_table_file(tmp_path / "new.csv").known_to(schema))
    assert cells["price"].tolist() == [1234, 2500]
    assert cells["people"].tolist() == [61000, 70000]
    write_csv(tmp_path / "new.csv", [["1.5", "", ""], ["", "", ""]], AMOUNTS)
    with pytest.raises(ValueError, match=r"amounts such as .* now holds '1\.5' in row 0\. Write"):
        schema.cells(read_table_file(tmp_path / "new.csv").known_to(schema))
    write_csv(tmp_path / "new.csv", [["-999.0", "?", ""], ["3.500", "?", ""]], AMOUNTS)
    file = read_table_file(tmp_path / "new.csv", [-999.0])
    np.testing.assert_array_equal(schema.cells(file.known_to(schema))["price"], [np.nan, 3500])
    write_csv(tmp_path / "new.csv", [["1,5", "", ""], ["2", "0.05", ""]], AMOUNTS)
    with pytest.raises(ValueError, match=r"'rate' had amounts .* now holds '0\.05' in row 1\. Wri"):
        schema.cells(read_table_file(tmp_path / "new.csv").known_to(schema))


@pytest.mark.parametrize("cells", [["€ 1,234", "€ 5"], ["1,234 %", "12,345 %"], ["-£1,234", "£5"]])
def test_a_comma_of_amounts_between_semicolons_is_ambiguous(tmp_path, cells):
    rows = [[cell, str(i)] for i, cell in enumerate(cells * 10)]
    path = write_csv(tmp_path / "t.csv", rows, ["a", "b"], delimiter=";")
    with pytest.raises(ValueError, match=r"t.csv .* column 'a' .* comma may separate thousands or"):
        read_table_file(path)
    # Two groups, or decimals of another length, are not.
    for one in ("€ 1,234,567", "€ 3,50"):
        path = write_csv(
            tmp_path / "t.csv", [["€ 1,234", "0"], [one, "1"]], ["a", "b"], delimiter=";"
        )
        assert read_table_file(path).frame["a"].to_pylist() == ["€ 1,234", one]


@pytest.mark.filterwarnings(
    "ignore:.* holds another whole number:aevb.runtime.checked_files.DataWarning"
)
@pytest.mark.filterwarnings("ignore:.*n. is .price. - 0.5")
def test_a_number_marks_missing_cells_of_text_columns(tmp_path):
    """Levels, amounts and codes with -999 among them are text; 0999 is a code of its own."""
    rows = [
        [f"${i}.50", "ABC"[i % 3], f"0{900 + i}", str(i)] if i % 5 else ["-999"] * 4
        for i in range(100)
    ]
    path = write_csv(tmp_path / "t.csv", rows, ["price", "grade", "code", "n"])
    file = read_table_file(path, [-999.0, 999.0])
    schema = Schema.read(file.frame, missing=("", *file.words))
    assert schema["price"].facts.amounts.unit == "$"
    assert schema["grade"].levels == ("A", "B", "C")
    assert [schema[name].missing for name in schema.names] == [20] * 4
    assert file.frame["code"][99].as_py() == "0999"
    plain = read_table_file(path).frame.select(["grade"])
    assert Schema.read(plain)["grade"].levels == ("-999", "A", "B", "C")
    # The schema knows the mark, too.
    assert np.isnan(schema.cells(read_table_file(path).known_to(schema))["grade"][::5]).all()


# Dates --------------------------------------------------------------------------------------------


def test_dates_as_text_come_back_in_their_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    days = [datetime.date(2023, 1, 1) + datetime.timedelta(days=i * 37 % 400) for i in range(60)]
    cells = ["?" if i == 7 else f"{day:%d.%m.%Y}" for i, day in enumerate(days)]
    rows = [[cell, f"{i / 7:.3f}"] for i, cell in enumerate(cells)]
    write_csv(tmp_path / "t.csv", rows, ["seen", "x"])
    arguments = ["--set", "components=2", "--set", "covariance=full"]
    printed = aevb(monkeypatch, capsys, "train", "t.csv", *arguments)
    assert "seen: dates such as '01.01.2023' (day.month.year)" in printed
    assert "seen: missing where the text is '?'" in printed
    aevb(monkeypatch, capsys, "impute", "t-run", "--out", "filled.csv")
    filled = [row[0] for row in read_csv(tmp_path / "filled.csv")[1]]
    assert filled[:7] + filled[8:] == cells[:7] + cells[8:]
    assert re.fullmatch(r"\d\d\.\d\d\.202[34]", filled[7])
    write_csv(tmp_path / "new.csv", [["", "1.5"], ["", "2.5"]], ["seen", "x"])
    aevb(monkeypatch, capsys, "impute", "t-run", "new.csv", "--out", "new-filled.csv")
    for row in read_csv(tmp_path / "new-filled.csv")[1]:
        assert re.fullmatch(r"\d\d\.\d\d\.202[34]", row[0])
    write_csv(tmp_path / "us.csv", [["3/1/2024", "1.5"]], ["seen", "x"])
    assert "now holds '3/1/2024' in row 0" in refused(
        monkeypatch, capsys, "score", "t-run", "us.csv"
    )


def test_ambiguous_dates_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [[f"0{i % 9 + 1}/0{i % 7 + 1}/2024", str(i * i)] for i in range(60)]
    write_csv(tmp_path / "t.csv", rows, ["seen", "x"])
    error = " ".join(refused(monkeypatch, capsys, "train", "t.csv").split())
    assert "may be the day or the month" in error
    assert "--kind seen=category" in error
    aevb(monkeypatch, capsys, "train", "t.csv", "--kind", "seen=category")


# Words among numbers ------------------------------------------------------------------------------


def test_a_word_among_decimal_commas_is_refused_and_declared_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    rows = [
        ["k.A." if i % 20 == 3 else f"{draw.normal(5):.2f}".replace(".", ","), f"{i * i % 31}"]
        for i in range(60)
    ]
    write_csv(tmp_path / "t.csv", rows, ["mass", "x"], delimiter=";")
    error = " ".join(refused(monkeypatch, capsys, "train", "t.csv").split())
    assert "'mass' is text because of one word: 57 of 60 cells are numbers" in error
    assert "--missing k.A." in error
    assert "--kind mass=category" in error
    printed = aevb(monkeypatch, capsys, "train", "t.csv", "--missing", "k.A.")
    assert re.search(r"mass +real +Normal +3 ", printed)


def test_levels_that_may_mark_missing_cells_are_told(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table = pa.table({"city": ["Bonn", "unknown", "Köln", "other"] * 9, "x": np.arange(36) ** 2})
    told = "city: 'unknown' is a level; if it marks missing cells, declare it missing (--missing)"
    assert told in schema_text(Schema.read(table))
    words = table.set_column(0, "city", table["city"].dictionary_encode())
    assert "is a level" not in schema_text(Schema.read(words))


# Training -----------------------------------------------------------------------------------------


def test_a_table_is_read_modelled_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "guests.csv", two_kinds())
    command = ["train", "guests.csv", "--without", "vip,p0", "--kind", "visits=count"]
    printed = aevb(monkeypatch, capsys, *command, "--model", "mixture")
    assert max(map(len, printed.splitlines())) <= 80
    assert "guests.csv: 120 rows, 9 columns, 5 modelled" in printed
    for line in (
        "visits  count",
        "seen    date      Normal",
        "city    category  OneHot",
        "Bonn, Köln, Lyon, Nice",
        "vip     as asked",
        "code    an identifier",
        "remark  an identifier",
        "Chosen: mixture of 2 components, diagonal covariance",
        "aevb cluster guests-run --out clusters.csv",
    ):
        assert line in printed, line
    run = tmp_path / "guests-run"
    files = {path.name for path in run.iterdir()}
    assert {"schema.json", "config.toml", "data.json", "notes.txt", "curves.png"} <= files
    schema = load_table(run).schema
    assert {column.name for column in schema.used} == {"seen", "city", "visits", "price", "log_p"}
    assert schema["visits"].kind == "count"
    notes = (run / "notes.txt").read_text()
    assert "Chosen: mixture of 2 components" in notes
    assert all(column.reason in notes for column in schema.columns)
    assert json.loads((run / "data.json").read_text())["data"] == "guests.csv"


@pytest.mark.slow
def test_the_default_is_a_density_and_cluster_finds_clusters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "guests.csv", two_kinds())
    printed = aevb(
        monkeypatch, capsys, "train", "guests.csv", "--without", "vip,p0", "--out", "run"
    )
    assert "Model: density of " in printed
    assert "aevb cluster run --out clusters.csv" in printed
    run = tmp_path / "run"
    assert {"schema.json", "data.json", "notes.txt"} <= {path.name for path in run.iterdir()}
    assert load_table(run).model.graph.latents == ("part",)
    for command in ("score", "impute", "evaluate", "doctor"):
        assert "120 rows" in aevb(monkeypatch, capsys, command, "run")
    first = aevb(monkeypatch, capsys, "cluster", "run", "--out", "first.csv")
    assert "Chosen: mixture of 2 components" in first
    assert "in 2 clusters" in first
    # The mixture is kept.
    second = aevb(monkeypatch, capsys, "cluster", "run", "--out", "second.csv")
    assert "Chosen" not in second
    assert second.startswith("The clusters are those of the mixture in run/clusters.\n\n120 rows")
    assert Path("first.csv").read_text() == Path("second.csv").read_text()
    compared = aevb(monkeypatch, capsys, "compare", "run", "run/clusters")
    assert "These are the training rows of" in compared
    # BIC chooses the covariance only, if the number of clusters is given.
    three = aevb(monkeypatch, capsys, "cluster", "run", "--clusters", 3)
    assert "Chosen: mixture of 3 components" in three
    assert "  2 components" not in three
    assert "The mixture is in run/clusters-3." in three
    assert "in 3 clusters" in three
    assert "Write all rows: aevb cluster run --out clusters.csv --clusters 3\n" in three
    assert load_table("run/clusters-3").model.graph.size("cluster") == 3
    again = aevb(monkeypatch, capsys, "cluster", "run", "--clusters", 3)
    kept = "The clusters are those of the mixture in run/clusters-3.\n\n"
    assert again == kept + three[three.index("120 rows of") :]
    one = aevb(monkeypatch, capsys, "cluster", "run", "--clusters", 1)
    assert "BIC finds no clusters" not in one
    assert "in 1 cluster; the" in one
    assert "in 2 clusters" in aevb(monkeypatch, capsys, "cluster", "run")


@pytest.mark.parametrize("columns", [1, 2])
def test_covariances_are_those_of_several_columns(tmp_path, monkeypatch, capsys, columns):
    monkeypatch.chdir(tmp_path)
    cells = np.random.default_rng(0).normal(size=(60, columns))
    rows = [[f"{cell:.3f}" for cell in row] for row in cells]
    write_csv(tmp_path / "t.csv", rows, ["a", "b"][:columns])
    printed = aevb(monkeypatch, capsys, "train", "t.csv", "--out", "run")
    model = next(line for line in printed.splitlines() if line.startswith("Model: density of "))
    assert ("full covariance" in model) == (columns > 1)


def test_a_density_is_written_at_once_or_not_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = write_csv(tmp_path / "guests.csv", two_kinds(40))
    Path("run").mkdir()  # may exist as an empty folder

    def fails(self, *_):
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr("aevb.cli.train_table._write_notes", fails)
        with pytest.raises(SystemExit):
            aevb(patch, capsys, "train", "guests.csv", "--out", "run")
    assert sorted(tmp_path.iterdir()) == [table, tmp_path / "run"]
    assert not any(Path("run").iterdir())
    aevb(monkeypatch, capsys, "train", "guests.csv", "--out", "run")
    assert sorted(tmp_path.iterdir()) == [table, tmp_path / "run"]
    assert load_table("run").model.graph.latents == ("part",)
    aevb(monkeypatch, capsys, "train", "guests.csv", "--out", "new/run")
    assert (tmp_path / "new/run/notes.txt").is_file()
    Path("half").mkdir()
    Path("half/schema.json").write_text("{}")
    err = refused(monkeypatch, capsys, "train", "guests.csv", "--out", "half")
    assert "half is no empty folder. Delete it, or choose another: --out FOLDER." in err


@pytest.mark.filterwarnings("ignore:Collapsed")
def test_the_fix_is_named_if_all_models_collapsed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = np.random.default_rng(0).normal(size=9).round(3)
    write_csv(tmp_path / "twice.csv", [[f"{x:.3f}", f"{2 * x:.3f}"] for x in cells], ["a", "b"])
    train = ("train", "twice.csv", "--model", "mixture")
    printed = aevb(monkeypatch, capsys, *train, "--set", "covariance=full", "--out", "full")
    printed = " ".join(printed.split())
    assert "All models collapsed, the chosen one too: mixture of 1 component, full" in printed
    assert "a few rows, in which columns 'a', 'b' are constant or a function of other" in printed
    assert (
        "aevb train … --without b. Or read it as levels: aevb train … --kind b=ordered" in printed
    )
    assert "Chosen" not in printed
    assert "not chosen" not in printed
    assert "BIC finds no clusters" not in printed
    printed = aevb(monkeypatch, capsys, *train, "--set", "components=1", "--out", "any")
    printed = " ".join(printed.split())
    assert "Chosen: mixture of 1 component, diagonal covariance." in printed
    assert "Such models are not chosen." in printed


@pytest.mark.slow
def test_a_mixture_for_clusters_is_written_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "guests.csv", two_kinds(60))
    aevb(monkeypatch, capsys, "train", "guests.csv", "--out", "run")
    files, fit = sorted(Path("run").iterdir()), Schema.fit
    command = ("cluster", "run", "--clusters", 2)

    def stopped(*arguments, **settings):
        fit(*arguments, **settings)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Schema, "fit", stopped)
        with pytest.raises(SystemExit):
            aevb(patch, capsys, *command)
    assert sorted(Path("run").iterdir()) == files  # nothing blocks the next command

    def second(*arguments, **settings):
        """Another command is faster."""
        fit(*arguments, **(settings | {"out": "run/clusters-2", "seed": 1}))
        return fit(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Schema, "fit", second)
        printed = aevb(patch, capsys, *command)
    assert "The clusters are those of the mixture in run/clusters-2.\n\n60 rows" in printed
    assert "The mixture is in" not in printed
    assert sorted(Path("run").iterdir()) == sorted([*files, Path("run/clusters-2")])
    for path in Path("run/clusters-2/checkpoints").rglob("weights.safetensors"):
        path.write_bytes(b"damaged")
    err = refused(monkeypatch, capsys, *command)
    assert "The mixture in run/clusters-2 cannot be read: " in err
    assert "Delete the folder run/clusters-2, and repeat the command" in err


def test_the_number_of_clusters_of_a_mixture_is_fixed(here, monkeypatch, capsys):
    err = refused(monkeypatch, capsys, "cluster", "guests-run", "--clusters", 3)
    assert "The model of guests-run has clusters already, so leave --clusters out." in err
    assert "aevb train TABLE --model mixture --set components=3 --out FOLDER" in err
    err = refused(monkeypatch, capsys, "cluster", "guests-run", "--clusters", 0)
    assert "--clusters must be at least 1, got 0" in err


def test_clusters_of_a_density_need_its_own_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "guests.csv", two_kinds())
    aevb(monkeypatch, capsys, "train", "guests.csv", "--out", "run")
    write_csv(tmp_path / "others.csv", two_kinds(90))
    write_csv(tmp_path / "guests.csv", two_kinds(100))
    err = refused(monkeypatch, capsys, "cluster", "run", "others.csv")
    assert "the table that it was trained on has changed. Train a mixture: aevb train" in err
    Path("guests.csv").unlink()
    err = refused(monkeypatch, capsys, "cluster", "run", "others.csv")
    assert "the table that it was trained on is not here" in err


def test_held_out_rows_are_the_same_for_every_seed_and_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "guests.csv", two_kinds())
    for seed in (0, 1):
        printed = aevb(
            monkeypatch,
            capsys,
            *("train", "guests.csv", "--out", f"run-{seed}", "--set", "components=2"),
            *("--set", "covariance=diagonal", "--hold-out", "0.25", "--seed", seed),
        )
        assert "90 rows to train on, 30 held out." in printed
        held = float(printed.split("(training rows), ")[1].split()[0])
        order = np.sort(np.random.default_rng(0).permutation(ROWS)[:30])
        frame = read_table_file("guests.csv").frame.take(order)
        want = load_table(f"run-{seed}").score(frame)["log_p"].to_numpy().mean()
        assert held == pytest.approx(want, abs=6e-4)
        printed = aevb(monkeypatch, capsys, "evaluate", f"run-{seed}")
        assert "30 rows of guests.csv (held out)" in printed
        assert f"log p per row: {want:.3f}" in printed
    printed = aevb(monkeypatch, capsys, "compare", "run-0", "run-1")
    assert "30 rows of guests.csv (held out)" in printed
    assert f"{want:.3f}" in printed


@pytest.mark.slow
def test_a_named_file_is_known_to_be_that_of_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = two_kinds()
    for name, some in (("guests", rows), ("copy", rows), ("new", rows[:40])):
        write_csv(tmp_path / f"{name}.csv", some)
    mixture = ("--set", "components=2", "--set", "covariance=diagonal")
    held = ("--hold-out", "0.25")
    for out, options in (("d", ()), ("m", mixture), ("dh", held), ("mh", (*mixture, *held))):
        aevb(monkeypatch, capsys, "train", "guests.csv", "--out", out, *options)

    def said(*command) -> str:
        return " ".join(aevb(monkeypatch, capsys, *command).split())

    for name in ("guests.csv", "copy.csv"):
        printed = said("evaluate", "d", "--data", name)
        assert f"120 rows of {name} (the training rows)" in printed
        assert "The model was fitted to these rows, so log p" in printed
        printed = said("evaluate", "dh", "--data", name)
        assert f"120 rows of {name} (most of them training rows)" in printed
        assert "The model was fitted to most of these rows, so log p" in printed
        assert "For the rows held out: aevb evaluate dh." in printed
    assert "fitted to" not in said("evaluate", "d", "--data", "new.csv")
    Path("guests.csv").unlink()  # the copy is the table of the training, too
    printed = said("evaluate", "d", "--data", "copy.csv")
    assert "is not here" not in printed
    assert "The model was fitted to these rows" in printed

    printed = said("compare", "d", "m", "--data", "copy.csv")
    assert "120 rows of copy.csv (the training rows): " in printed
    assert "These are the training rows of all models: " in printed
    printed = said("compare", "d", "dh", "mh", "--data", "copy.csv")
    assert "120 rows of copy.csv: " in printed
    assert "These are the training rows of d: " in printed
    assert "Most of these rows are training rows of dh and mh: " in printed
    assert "training rows" not in said("compare", "d", "mh", "--data", "new.csv")
    vae = ("--model", "vae", "--set", "latent=1", "--set", "hidden=4", "--steps", 5)
    aevb(monkeypatch, capsys, "train", "copy.csv", "--out", "v", *vae)
    printed = said("compare", "d", "v", "--data", "copy.csv", "--samples", 20)
    assert "These are the training rows of all models: " in printed


@pytest.mark.slow
def test_rows_of_a_changed_file_are_not_called_held_out(tmp_path, monkeypatch, capsys):
    """The split depends on the order of the lines, so that after a shuffle it is another one."""
    monkeypatch.chdir(tmp_path)
    rows = two_kinds()
    write_csv(tmp_path / "guests.csv", rows)
    write_csv(tmp_path / "new.csv", rows[:40])
    options = ("--set", "components=2", "--set", "covariance=diagonal", "--hold-out", "0.25")
    for out, more in (("run", ()), ("other", ("--without", "city"))):
        aevb(monkeypatch, capsys, "train", "guests.csv", "--out", out, *options, *more)
    write_csv(tmp_path / "guests.csv", rows)  # the same cells, written again
    assert "30 rows of guests.csv (held out)" in aevb(monkeypatch, capsys, "evaluate", "run")
    turned = [one[:1] + other[1:] for one, other in zip(rows, rows[::-1], strict=True)]
    write_csv(tmp_path / "guests.csv", turned)
    printed = " ".join(aevb(monkeypatch, capsys, "evaluate", "run").split())
    assert "120 rows of guests.csv Note: guests.csv has changed since training" in printed
    assert "which of its rows were held out is unknown" in printed
    assert "(held out)" not in printed
    assert "training rows" not in printed
    for command in (("compare", "run"), ("compare", "other", "run")):
        said = refused(monkeypatch, capsys, *command)
        assert f"guests.csv has changed since {command[1]} was trained" in said
    printed = aevb(monkeypatch, capsys, "compare", "run", "--data", "new.csv")
    assert "40 rows of new.csv" in printed
    printed = aevb(monkeypatch, capsys, "evaluate", "run", "--data", "new.csv")
    assert "guests.csv has changed since training" in printed
    said = refused(monkeypatch, capsys, "train", "guests.csv", "--out", "run", *options, "--resume")
    assert "run was trained with another schema" in said
    (tmp_path / "guests.csv").unlink()
    printed = " ".join(aevb(monkeypatch, capsys, "evaluate", "run", "--data", "new.csv").split())
    assert "guests.csv, the table of the training, is not here" in printed
    assert "training rows" not in printed


def test_a_stopped_run_of_a_table_resumes_as_if_it_had_not_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "guests.csv", two_kinds())
    command = ["train", "guests.csv", "--model", "vae", "--set", "latent=2", "--set", "hidden=8"]
    command += ["--decay", "constant", "--seed", "3"]
    printed = aevb(monkeypatch, capsys, *command, "--out", "whole", "--steps", "20")
    assert "steps/s" not in printed  # the progress is for terminals
    assert printed.count("(20 steps)") == 1
    aevb(monkeypatch, capsys, *command, "--out", "parts", "--steps", "10")
    printed = aevb(monkeypatch, capsys, *command, "--out", "parts", "--steps", "20", "--resume")
    assert "The model is that of parts." in printed
    whole, parts = (load_table(run).model.state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    err = refused(monkeypatch, capsys, *command, "--out", "parts", "--resume", "--without", "city")
    assert "was trained with column 'city' as category, and now it is left out" in err


def test_numbers_that_mark_missing_cells_are_missing_in_later_files_too(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = two_kinds()
    for row in rows[::7]:
        row[7] = "-999"
    write_csv(tmp_path / "guests.csv", rows)
    aevb(
        monkeypatch,
        capsys,
        *("train", "guests.csv", "--missing", "-999", "--set", "components=2"),
        *("--out", "run"),
    )
    assert load_table("run").schema["p0"].missing == len(rows[::7])
    aevb(monkeypatch, capsys, "impute", "run", "--out", "filled.csv")
    header, filled = read_csv(tmp_path / "filled.csv")
    assert all(row[header.index("p0")] != "-999" for row in filled)


def test_words_that_mark_missing_cells_are_missing_in_later_files_too(
    tmp_path, monkeypatch, capsys
):
    """They leave numbers, dates and truth values what they are, and so do their spellings."""
    monkeypatch.chdir(tmp_path)
    rows, empty = two_kinds(), two_kinds()
    for i, word in enumerate(["unknown", "Unknown", " UNKNOWN", "-999"] * 5):
        rows[6 * i][7] = word
        for column in (2, 3, 5, 6):
            rows[6 * i][column] = "unknown" if word == "-999" else word
        for column in (2, 3, 5, 6, 7):
            empty[6 * i][column] = ""
    write_csv(tmp_path / "guests.csv", rows)
    write_csv(tmp_path / "empty.csv", empty)
    marks = ["--missing", "unknown", "--missing", "-999"]
    more = ["--set", "components=2", "--set", "covariance=diagonal"]
    told = aevb(monkeypatch, capsys, "train", "guests.csv", *marks, *more, "--out", "run")
    aevb(monkeypatch, capsys, "train", "empty.csv", *more, "--out", "plain")
    schema, plain = load_table("run").schema, load_table("plain").schema
    assert [(c.kind, c.levels, c.missing, c.location) for c in schema.columns] == [
        (c.kind, c.levels, c.missing, c.location) for c in plain.columns
    ]
    assert "city: missing where the text is 'UNKNOWN', 'Unknown'" in " ".join(told.split())
    assert schema.missing_words[-2:] == ("unknown", "-999")
    assert json.loads(Path("run/data.json").read_text())["missing"] == ["unknown", -999.0]
    assert np.isnan(
        schema.cells({name: ["Unknown" if name == "city" else None] for name in schema.names})[
            "city"
        ]
    )
    for name in ("run", "plain"):
        aevb(monkeypatch, capsys, "impute", name, "--out", f"{name}.csv")
        aevb(monkeypatch, capsys, "score", name, "--out", f"{name}-scores.csv")
    assert Path("run.csv").read_bytes() == Path("plain.csv").read_bytes()
    scores = [[row[9:] for row in read_csv(Path(f"{n}-scores.csv"))[1]] for n in ("run", "plain")]
    assert scores[0] == scores[1]
    # Other marks replace those of the training; these rows have none of them.
    write_csv(
        tmp_path / "new.csv",
        [["no idea" if cell == "" else cell for cell in row] for row in two_kinds(9)],
    )
    assert "9 rows of new.csv" in aevb(
        monkeypatch, capsys, "score", "run", "new.csv", "--missing", "No Idea"
    )
    assert "does not know: 'no idea'" in refused(monkeypatch, capsys, "score", "run", "new.csv")


def test_a_run_is_not_resumed_with_other_words_for_missing_cells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "guests.csv", two_kinds())
    asked = ["train", "guests.csv", "--set", "components=1", "--out", "run"]
    aevb(monkeypatch, capsys, *asked)
    said = refused(monkeypatch, capsys, *asked, "--missing", "unknown", "--resume")
    assert "for missing cells, and now they are '', 'na'" in said
    assert "'nan', 'unknown'. To resume, give the words of the run" in said


def test_a_marker_of_missing_cells_is_named_with_its_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = two_kinds()
    for row in rows[::7]:
        row[7] = "-999"
    write_csv(tmp_path / "guests.csv", rows)
    monkeypatch.setattr(sys, "argv", ["aevb", "train", "guests.csv", "--set", "components=1"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    said = capsys.readouterr().err
    assert "the value -999 repeats far outside the others of its column: column p0" in said
    assert "If it marks missing entries, leave its cells empty, or add --missing -999." in said
    assert "frame" not in said


# Results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["score", "cluster"])
def test_the_file_may_be_an_option(here, monkeypatch, capsys, command):
    one = aevb(monkeypatch, capsys, command, "guests-run", "guests.csv")
    assert aevb(monkeypatch, capsys, command, "guests-run", "--data", "guests.csv") == one
    err = refused(monkeypatch, capsys, command, "guests-run", "a.csv", "--data", "b.csv")
    assert "Two files are named: a.csv and --data b.csv. Name one." in err


def test_a_tail_without_a_simulated_row_is_below_the_resolution(
    here, monkeypatch, capsys, tmp_path
):
    rows = two_kinds()
    rows[5][5] = "9e9"
    odd = write_csv(tmp_path / "odd.csv", rows)
    printed = aevb(monkeypatch, capsys, "score", "guests-run", odd)
    first = printed.split("tail probability:\n")[1].splitlines()[1]
    assert re.match(r"\s*5\s+-\S+\s+< 0\.001\s", first)


def test_scores_stand_beside_the_cells_as_they_were_written(here, monkeypatch, capsys):
    printed = aevb(monkeypatch, capsys, "score", "guests-run", "--out", "scored.csv")
    header, rows = read_csv(here / "scored.csv")
    # A column log_p is in the table already.
    assert header == [*HEADER, "log_p_", "tail_"]
    assert [row[:9] for row in rows] == two_kinds()
    table, frame = load_table("guests-run"), read_table_file("guests.csv").frame
    want = table.score(frame)["log_p"].to_numpy()
    got = np.array([float(row[9]) for row in rows])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    tails = np.array([float(row[10]) for row in rows])
    assert f"log p per row is {want.mean():.3f} in the mean" in printed.replace("\n", " ")
    listed = [int(line.split()[0]) for line in printed.splitlines() if line[:5].strip().isdigit()]
    assert listed == np.lexsort((want, tails))[:5].tolist()
    assert "\nThe least likely rows, ordered by tail probability:\n" in printed
    assert (
        "\n\nrow: counted from 0, without the header line of the file.\n"
        "tail: share of simulated rows that are at most as likely." in printed
    )
    assert max(map(len, printed.splitlines())) <= 80


def test_tail_probabilities_of_rows_from_the_model_are_uniform(here, monkeypatch, capsys):
    """200 rows drawn from the model, with holes: their tails' mean is 1/2 within 4 errors."""
    table = load_table("guests-run")
    frame = table.sample(200, seed=5)
    holes = np.random.default_rng(1).random(200) < 0.5
    price = frame.column("price").to_numpy()
    new = pa.array(np.where(holes, np.nan, price), from_pandas=True)
    frame = frame.set_column(frame.column_names.index("price"), "price", new)
    pq.write_table(frame, here / "drawn.parquet")
    aevb(monkeypatch, capsys, "score", "guests-run", "drawn.parquet", "--out", "tails.parquet")
    tails = pq.read_table(here / "tails.parquet")["tail_"].to_numpy()
    assert abs(tails.mean() - 0.5) < 4 * (1 / 12 / 200 + 1 / 12 / 1000) ** 0.5
    assert 0 <= tails.min() < 0.1 < 0.9 < tails.max() <= 1


def test_clusters_stand_beside_the_columns_and_are_compared(here, monkeypatch, capsys):
    kinds = ["old" if i % 3 == 0 else "young" for i in range(ROWS)]
    rows = [[*row, kind] for row, kind in zip(two_kinds(), kinds, strict=True)]
    write_csv(here / "labelled.csv", rows, [*HEADER, "kind"])
    printed = aevb(
        monkeypatch, capsys, "cluster", "guests-run", "labelled.csv", "--out", "clusters.csv"
    )
    header, found = read_csv(here / "clusters.csv")
    assert header == [*HEADER, "kind", "cluster_", "p0_", "p1_"]
    assert [row[:10] for row in found] == rows
    clusters = [int(row[10]) for row in found]
    old = clusters[0]
    assert clusters == [old if kind == "old" else 1 - old for kind in kinds]
    flat = " ".join(printed.split())
    assert "Clusters against kind, which the model did not read: 120 of 120 rows" in flat
    assert "adjusted Rand index 1.000" in flat
    assert "Not in the run's table, so not read by the model: kind." in flat
    assert sorted(line.split()[1:] for line in printed.splitlines() if "rows  " in line) == [
        ["40", "80"] if old == 0 else ["80", "40"]
    ]


def test_only_missing_cells_are_filled(here, monkeypatch, capsys):
    printed = aevb(monkeypatch, capsys, "impute", "guests-run", "--std", "--out", "filled.csv")
    header, rows = read_csv(here / "filled.csv")
    assert header == [*HEADER, "seen_std", "city_std", "visits_std"]
    count = 0
    for before, after in zip(two_kinds(), rows, strict=True):
        for name, old, new in zip(HEADER, before, after, strict=False):
            if name in ("seen", "city", "visits") and old in ("", "NA"):
                count += 1
                assert new
                assert float(after[header.index(f"{name}_std")]) > 0
            else:
                assert new == old
    assert f"{count} missing cells filled" in printed
    assert {row[3] for row in rows} == {"Köln", "Bonn", "Nice", "Lyon"}
    days = [datetime.date.fromisoformat(row[2]) for row in rows]
    assert min(days) >= datetime.date(2020, 1, 1)
    assert all(row[4].isdigit() for row in rows)
    # A filled table has nothing left to fill.
    printed = aevb(monkeypatch, capsys, "impute", "guests-run", "filled.csv")
    assert "0 missing cells filled" in printed


def test_parquet_keeps_types_and_leading_zeros(here, monkeypatch, capsys):
    aevb(monkeypatch, capsys, "impute", "guests-run", "--out", "filled.parquet")
    found = pq.read_table(here / "filled.parquet")
    assert found.column_names == HEADER
    assert found["code"].to_pylist() == [row[0] for row in two_kinds()]
    assert pa.types.is_date(found.schema.field("seen").type)
    assert pa.types.is_integer(found.schema.field("visits").type)
    assert found["city"].null_count == found["seen"].null_count == found["visits"].null_count == 0
    aevb(monkeypatch, capsys, "score", "guests-run", "filled.parquet", "--out", "s.csv")
    header, rows = read_csv(here / "s.csv")
    assert header == [*HEADER, "log_p_", "tail_"]
    assert [row[1] for row in rows] == [row[1] for row in two_kinds()]


def test_samples_have_the_columns_of_the_table(here, monkeypatch, capsys):
    aevb(monkeypatch, capsys, "sample", "guests-run", "-n", "50", "--out", "new.csv")
    header, rows = read_csv(here / "new.csv")
    assert header == ["seen", "city", "visits", "price", "vip", "p0", "log_p"]
    assert len(rows) == 50
    assert {row[1] for row in rows} <= {"Köln", "Bonn", "Nice", "Lyon"}
    assert {row[4] for row in rows} == {"true", "false"}
    assert all(row[2].isdigit() and float(row[3]) > 0 for row in rows)
    # The samples are rows that the model reads.
    assert "50 rows of new.csv" in aevb(monkeypatch, capsys, "score", "guests-run", "new.csv")
    printed = aevb(monkeypatch, capsys, "sample", "guests-run", "-n", "12")
    assert "… 2 more rows" in printed
    assert "… 1 more row\n" in aevb(monkeypatch, capsys, "sample", "guests-run", "-n", "11")
    assert "1 new row from" in aevb(monkeypatch, capsys, "sample", "guests-run", "-n", "1")
    printed = aevb(monkeypatch, capsys, "sample", "guests-run", "-n", "1", "--out", "new.csv")
    assert printed == "1 new row with the columns of the table is in new.csv.\n"


def test_one_row_and_one_cell_are_singular(here, monkeypatch, capsys):
    """A row without known cells belongs to no cluster for certain."""
    write_csv(here / "new.csv", [["7", *[""] * 8], two_kinds()[0]])
    printed = " ".join(aevb(monkeypatch, capsys, "cluster", "guests-run", "new.csv").split())
    assert "and 1 row has less than 0.8." in printed
    row = two_kinds()[0]
    write_csv(here / "new.csv", [[*row[:3], "", *row[4:]]])
    printed = aevb(monkeypatch, capsys, "impute", "guests-run", "new.csv")
    assert "1 row of new.csv: 1 missing cell filled.\n" in printed


def test_codes_stand_beside_the_columns(here, monkeypatch, capsys):
    err = refused(monkeypatch, capsys, "encode", "guests-run")
    assert "aevb cluster guests-run" in err
    numbers = [[row[0], row[5], row[7], row[8]] for row in two_kinds()]
    write_csv(here / "numbers.csv", numbers, ["code", "price", "p0", "z"])
    command = ["train", "numbers.csv", "--model", "factors", "--set", "latent=1", "--out", "fa"]
    aevb(monkeypatch, capsys, *command)
    aevb(monkeypatch, capsys, "encode", "fa", "--out", "codes.csv")
    header, rows = read_csv(here / "codes.csv")
    assert header == ["code", "price", "p0", "z", "z_", "z_std_"]
    means, spreads = load_table("fa").codes(read_table_file("numbers.csv").frame, return_std=True)
    np.testing.assert_allclose([float(row[4]) for row in rows], means["z"].to_numpy(), rtol=1e-5)
    np.testing.assert_allclose([float(row[5]) for row in rows], spreads["z"].to_numpy(), rtol=1e-5)
    err = refused(monkeypatch, capsys, "cluster", "fa")
    assert "aevb encode fa" in err
    printed = aevb(monkeypatch, capsys, "encode", "fa")
    assert printed.splitlines()[1].split()[:4] == ["row", "z_", "z_std_", "code"]
    assert printed.splitlines()[2].split()[3] == "00000"


def test_columns_may_come_in_another_order_and_with_numbers_for_words(
    tmp_path, monkeypatch, capsys
):
    """A category of words such as 01 stays words in a file where all of them look like numbers."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    rows = [[str(draw.choice(["01", "02", "x"])), f"{draw.normal():.3f}"] for _ in range(60)]
    write_csv(tmp_path / "all.csv", rows, ["code", "value"])
    aevb(monkeypatch, capsys, "train", "all.csv", "--set", "components=1", "--out", "run")
    some = [[value, code] for code, value in rows if code != "x"]
    write_csv(tmp_path / "some.csv", some, ["value", "code"])
    aevb(monkeypatch, capsys, "score", "run", "some.csv", "--out", "scored.csv")
    header, scored = read_csv(tmp_path / "scored.csv")
    assert header == ["value", "code", "log_p", "tail"]
    assert [row[:2] for row in scored] == some
    frame = read_table_file("all.csv").frame
    kept = [i for i, (code, _) in enumerate(rows) if code != "x"]
    want = load_table("run").score(frame)["log_p"].to_numpy()[kept]
    np.testing.assert_allclose([float(row[2]) for row in scored], want, rtol=1e-5)


def test_semicolons_and_decimal_commas_come_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [[row[3], row[5].replace(".", ","), row[7].replace(".", ",")] for row in two_kinds()]
    rows[5][1] = ""
    write_csv(tmp_path / "euro.csv", rows, ["city", "price", "p"], delimiter=";")
    aevb(monkeypatch, capsys, "train", "euro.csv", "--set", "components=1", "--out", "run")
    aevb(monkeypatch, capsys, "impute", "run", "--out", "filled.csv")
    header, filled = read_csv(tmp_path / "filled.csv", delimiter=";")
    assert header == ["city", "price", "p"]
    assert [row[2] for row in filled] == [row[2] for row in rows]
    assert "," in filled[5][1]
    aevb(monkeypatch, capsys, "score", "run", "filled.csv", "--out", "scored.csv")
    header, scored = read_csv(tmp_path / "scored.csv", delimiter=";")
    assert header == ["city", "price", "p", "log_p", "tail"]
    assert all("," in row[3] and "." not in row[3] for row in scored)
    aevb(monkeypatch, capsys, "sample", "run", "-n", "9", "--out", "new.csv")
    header, new = read_csv(tmp_path / "new.csv", delimiter=";")
    assert header == ["city", "price", "p"]
    assert len(new) == 9
    assert all("," in row[2] and "." not in row[2] for row in new)
    (tmp_path / "euro.csv").unlink()
    aevb(monkeypatch, capsys, "sample", "run", "-n", "9", "--out", "new.csv")
    header, plain = read_csv(tmp_path / "new.csv")
    assert header == ["city", "price", "p"]
    assert plain == [[cell.replace(",", ".") for cell in row] for row in new]


# Other commands on the run of a table -------------------------------------------------------------


def test_commands_that_examine_a_model_read_the_table(here, monkeypatch, capsys):
    printed = aevb(monkeypatch, capsys, "doctor", "guests-run", "--no-calibrate")
    assert "x holds seen, price, p0, log_p, standardised." in printed
    assert "120 rows examined" in printed
    found = json.loads(
        aevb(monkeypatch, capsys, "doctor", "guests-run", "--no-calibrate", "--json")
    )
    assert found
    printed = aevb(monkeypatch, capsys, "check", "guests-run", "--replicates", "20")
    assert "120 rows against 20 replicates" in printed
    printed = aevb(monkeypatch, capsys, "explain", "guests-run")
    assert "cluster: enumerated by Bayes" in printed


def test_evaluate_hides_known_cells_and_compares_with_the_truth(here, monkeypatch, capsys):
    printed = aevb(monkeypatch, capsys, "evaluate", "guests-run")
    frame = read_table_file("guests.csv").frame
    want = load_table("guests-run").score(frame)["log_p"].to_numpy().mean()
    assert f"log p per row: {want:.3f}" in printed
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line[:3] == "  p"}
    # The price depends on the cluster, and p0 on nothing.
    gains = {name: float(cells[-2]) for name, cells in lines.items()}
    assert gains["price"] > 40
    assert abs(gains["p0"]) < 15
    assert max(map(len, printed.splitlines())) <= 80


def test_evaluate_sees_no_gain_where_columns_are_independent(tmp_path, monkeypatch, capsys):
    """With one component, the model predicts the commonest level, as the column alone does."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    rows = [list(draw.choice(["a", "b", "c"], 3)) for _ in range(60)]
    write_csv(tmp_path / "words.csv", rows, ["first", "second", "third"])
    command = ["train", "words.csv", "--set", "components=1", "--out", "run", "--hold-out", "0.3"]
    aevb(monkeypatch, capsys, *command)
    printed = aevb(monkeypatch, capsys, "evaluate", "run")
    gains = [line.split()[-2] for line in printed.splitlines() if "wrong level" in line]
    assert gains == ["0", "0", "0"]


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no.csv"], "There is no file no.csv in this folder"),
        (["train", "no.xlsx"], "There is no file no.xlsx in this folder"),
        (["train", "empty.csv"], "empty.csv cannot be read: it is empty."),
        (["train", "header.csv"], "it has a header but no rows"),
        (["train", "one.csv"], "The table has one row"),
        (["train", "folder"], "The folder folder holds no run, no saved model and no Parquet"),
        (["train", "book.xlsx"], "book.xlsx is not a file that can be read as a table: save"),
        (["train", "rows.npz"], "aevb train vae --data rows.npz --out run"),
        (["train", "nothing"], "There is no model 'nothing'"),
        (["train", "guests.csv", "--data", "digits"], "guests.csv is a table already"),
        (["train", "guests.csv", "--prepare", "standardise"], "Leave out --prepare"),
        (["train", "guests.csv", "--seeds", "2"], "Leave out --seeds"),
        (["train", "guests.csv", "--kind", "visit=count"], "Did you mean 'visits'?"),
        (["train", "guests.csv", "--kind", "visits=counts"], "Unknown kind 'counts'"),
        (["train", "guests.csv", "--kind", "city=real"], "'city' cannot be of kind real"),
        (["train", "guests.csv", "--kind", "city"], "--kind takes COLUMN=KIND"),
        (["train", "guests.csv", "--without", "id"], "--without names the column 'id'"),
        (
            ["train", "guests.csv", "--without", "city", "--kind", "city=category"],
            "'city' is named by --kind and by --without",
        ),
        (["train", "guests.csv", "--model", "gmm"], "Unknown --model gmm"),
        (["train", "guests.csv", "--set", "latent=2"], "--set latent=… needs the model"),
        (["train", "guests.csv", "--set", "components=0"], "whole number from 1 on, got 0"),
        (["train", "guests.csv", "--set", "covariance=round"], "diagonal or full, got 'round'"),
        (["train", "guests.csv", "--model", "factors"], "--set latent=2"),
        (["train", "guests.csv", "--model", "vae", "--set", "z=2"], "arguments are latent, hidden"),
        (["train", "guests.csv", "--hold-out", "1"], "--hold-out is a fraction"),
        (["train", "guests.csv", "--out", "guests-run"], "holds a run already"),
        (
            ["train", "guests.csv", "--model", "mixture", "--resume", "--out", "none"],
            "There is no run in none",
        ),
        (["train", "guests.csv", "--resume"], "--resume has no meaning for the default density"),
        (["train", "guests.csv", "--tensorboard"], "--tensorboard has no meaning for the default"),
        (["train", "guests.csv", "--epochs", "3"], "--epochs has no meaning for the default"),
        (["train", "guests.csv", "--model", "density", "--set", "latent=2"], "takes no --set"),
        (["train", "guests-run", "--out", "more"], "guests-run is the run of a table"),
        (["train", "vae", "--data", "digits"], "Say where to write the run, e.g. --out run"),
        (
            ["train", "vae", "--data", "guests.csv", "--out", "r"],
            "To model the table with its words as they are: aevb train guests.csv.",
        ),
        (["train", "vae", "--without", "a", "--out", "r"], "--without belongs to a table"),
        (["score", "guests-run", "no.csv"], "There is no file no.csv"),
        (["score", "guests-run", "empty.csv"], "it is empty"),
        (["score", "guests-run", "lacks.csv"], "lacks.csv lacks the columns 'visits', 'price'"),
        (["score", "guests-run", "level.csv"], "a level that the schema does not know: 'Metz'"),
        (["score", "guests-run", "level.csv"], "or treat unknown levels as missing cells: in"),
        (
            ["score", "guests-run", "level.csv", "--unknown-levels", "drop"],
            'Unknown levels are "error" or "missing", got \'drop\'',
        ),
        (["score", "guests-run", "words.csv"], "Column 'price' had numbers"),
        (["score", "guests-run", "--out", "s.xlsx"], "write a .csv, .tsv or .parquet file"),
        (["score", "guests-run", "--out", "guests.csv"], "the data are read from"),
        (["score", "folder"], "folder holds no run"),
        (["impute", "guests-run", "guests.csv", "--data", "guests.csv"], "Two files are named"),
        (["sample", "guests-run", "-n", "0"], "-n must be at least 1"),
        (["sample", "guests-run", "--steps", "3"], "--steps is not for the run of a table"),
        (["doctor", "guests-run", "--prepare", "none"], "--prepare is not for the run of a table"),
        (["evaluate", "guests-run", "--evidence", "guess"], "Unknown --evidence guess"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(here, monkeypatch, capsys, arguments, message):
    rows = two_kinds(4)
    (here / "empty.csv").write_text("")
    (here / "header.csv").write_text("a,b\n")
    (here / "one.csv").write_text("a,b\n1,x\n")
    (here / "book.xlsx").write_bytes(b"PK\x03\x04")
    (here / "folder").mkdir(exist_ok=True)
    write_csv(here / "lacks.csv", [row[:4] for row in rows], HEADER[:4])
    write_csv(here / "level.csv", [[*row[:3], "Metz", *row[4:]] for row in rows])
    write_csv(here / "words.csv", [[*row[:5], "dear", *row[6:]] for row in rows])
    if arguments[:2] == ["train", "guests.csv"] and "--out" not in arguments:
        arguments = [*arguments, "--out", "another"]
    err = refused(monkeypatch, capsys, *arguments)
    assert message in err
    assert err.startswith("aevb: ")
    assert "Traceback" not in err


def test_a_run_whose_table_is_gone_asks_for_it(here, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    err = refused(monkeypatch, capsys, "score", here / "guests-run")
    assert "was trained on guests.csv, which is not here" in err
    printed = aevb(monkeypatch, capsys, "score", here / "guests-run", here / "guests.csv")
    assert "120 rows of" in printed


# Parts --------------------------------------------------------------------------------------------


def test_new_columns_never_have_the_name_of_a_column():
    names = own_names(["cluster", "p0", "p1"], ["p1", "p1_", "x"])
    assert names == {"cluster": "cluster__", "p0": "p0__", "p1": "p1__"}


def test_cells_are_rounded_to_a_small_part_of_the_spread():
    schema = Schema.read({"far": 1e9 + np.arange(50.0) / 7, "level": ["a", "b"] * 25})
    (cell,) = rounded_cells(schema["far"], [1e9 + 1.23456789])
    assert abs(cell - 1e9 - 1.23456789) < 1e-3 * schema["far"].facts.spread
    assert rounded_cells(schema["level"], ["a"]) == ["a"]


@pytest.mark.filterwarnings(
    "ignore:.* lies far from all others:aevb.runtime.checked_files.DataWarning"
)
def test_a_far_cell_does_not_coarsen_the_other_cells():
    price = (20 + np.arange(60) / 7).round(2)
    price[7] = 2.5e6  # a typo
    column = Schema.read({"price": price}, kinds={"price": "positive"})["price"]
    assert rounded_cells(column, [59.17348, 0.001, 2e6]) == [59.17, 0.01, 2e6]
    heavy = np.exp(30 * np.random.default_rng(0).normal(size=60))  # more than six decimals
    column = Schema.read({"heavy": heavy})["heavy"]
    assert rounded_cells(column, [1.23456789, 1.23456789e-9]) == [1.23457, 1.23457e-9]
    *infinite, nan = rounded_cells(column, [math.inf, -math.inf, math.nan])
    assert infinite == [math.inf, -math.inf]
    assert math.isnan(nan)


def test_written_samples_of_a_far_column_can_be_scored(tmp_path, monkeypatch, capsys):
    """A typo makes the standard deviation large, and rows have their own decimals in spite of it.

    Levels that differ in capitals and zeros among amounts are told.
    """
    draw = np.random.default_rng(0)
    price = np.exp(3 + 0.5 * draw.normal(size=80)).round(2)
    price[7] = 2.5e6
    sales = np.exp(3 + 2.5 * draw.normal(size=80)).round(2)
    sales[5] = 0
    rows = [
        ["" if i in (3, 4) else f"{price[i]}", f"{sales[i]:.2f}", ["Bonn", "bonn", "Nice"][i % 3]]
        for i in range(80)
    ]
    write_csv(tmp_path / "far.csv", rows, ["price", "sales", "city"])
    monkeypatch.chdir(tmp_path)
    printed = aevb(monkeypatch, capsys, "train", "far.csv", "--out", "run", columns=200)
    assert "sales: 1 zero; a zero is read as 0." in printed
    assert "half of the smallest positive number" in printed
    same = "city: some levels differ only in spaces or capitals ('Bonn', 'bonn')"
    assert same in printed
    assert same in (tmp_path / "run" / "notes.txt").read_text()
    aevb(monkeypatch, capsys, "sample", "run", "-n", "50", "--out", "new.csv")
    aevb(monkeypatch, capsys, "impute", "run", "--out", "filled.csv")
    _, new = read_csv(tmp_path / "new.csv")
    _, filled = read_csv(tmp_path / "filled.csv")
    table = load_table(tmp_path / "run")
    drawn = table.sample(50, seed=0)
    for row, value in zip(new, drawn["price"].to_pylist(), strict=True):
        assert float(row[0]) == pytest.approx(value, abs=0.0051)
    assert filled[3][0] == f"{float(filled[3][0]):.2f}".rstrip("0").rstrip(".")
    assert "50 rows of new.csv" in aevb(monkeypatch, capsys, "score", "run", "new.csv")


@pytest.mark.parametrize("text", ["a\n\n1\n2\n\n", "a b\n1 2\n3 4\n", "a\tb\n1\t2\n3\t\n"])
def test_odd_layouts_come_back_with_all_rows(tmp_path, text):
    path = tmp_path / "odd.txt"
    path.write_text(text)
    file = read_table_file(path)
    assert file.written is not None
    write_beside(tmp_path / "out.tsv", file, {"r": np.arange(file.rows)})
    header, rows = read_csv(tmp_path / "out.tsv", delimiter="\t")
    assert header == [*file.names, "r"]
    assert len(rows) == file.rows
    typed = [
        ["" if cell is None else str(cell) for cell in row.values()]
        for row in file.frame.to_pylist()
    ]
    assert [row[:-1] for row in rows] == typed


def test_a_table_that_looks_like_a_time_series_names_the_command():
    months = [f"{2020 + i // 12}-{i % 12 + 1:02}-01" for i in range(24)]
    sales = np.random.default_rng(0).normal(size=24)
    arrow = pa.table({"month": months, "sales": sales})
    text, command = series_hint("my sales.csv", arrow)
    assert text == (
        "'month' has one line per step, 1 month apart, so this looks like a time series. A model "
        "of tables takes its lines as unrelated. For forecasts:"
    )
    assert command == "aevb train local_level --data 'my sales.csv' --out series"
    assert series_hint("t", arrow.take(list(range(23, -1, -1)))) is None
    assert series_hint("t", pa.concat_tables([arrow, arrow])) is None
    assert series_hint("t", arrow.select(["sales"])) is None
    assert series_hint("t", pa.table({"a": sales, "b": sales})) is None
