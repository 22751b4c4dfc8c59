"""``aevb page`` on runs of all kinds, whole and damaged, and pages of runs in memory."""

import contextlib
import html
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import typer

from aevb import Model, Normal, OneHot, Schema, fit, mlp
from aevb.cli import main, page_subjects
from aevb.cli.page_subjects import open_for_page
from aevb.cli.serve import page_beside
from aevb.page.html import to_json
from aevb.page.packing import unpack
from aevb.page.sections import section
from aevb.training.seed_folders import expanded

GENERATOR = np.random.default_rng(0)
N = 60


def command(monkeypatch, capsys, *arguments):
    """Run a command; return its exit code, what it printed, and its messages."""
    monkeypatch.setattr("sys.argv", ["aevb", *map(str, arguments)])
    capsys.readouterr()
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    found = capsys.readouterr()
    return code, found.out, found.err


def document_of(path):
    text = Path(path).read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(autouse=True)
def small_checks(monkeypatch):
    """The checks have tests of their own, and take most of the time of a page."""
    monkeypatch.setattr(
        "aevb.page.sections.checks", lambda *_, **__: {"problems": [], "seconds": {}}
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two files and the runs of the command line on them."""
    folder = tmp_path_factory.mktemp("runs")
    k = np.arange(N) % 2
    pd.DataFrame(
        {
            "split": np.where(k, "a", "b"),
            "height": np.where(np.arange(N) % 7, GENERATOR.normal(3 * k, 1), np.nan),
            "income": np.exp(GENERATOR.normal(7 + k, 0.4)),
            "name": [f"name {i}" for i in range(N)],
        }
    ).to_csv(folder / "table.csv", index=False)
    numbers = pd.DataFrame(GENERATOR.normal(size=(N, 3)) * [1, 10, 100] + 5, columns=list("abc"))
    numbers.to_csv(folder / "numbers.csv", index=False)
    numbers.head(20).to_csv(folder / "other.csv", index=False)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        vae = "vae --data numbers.csv --set likelihood=Normal --set z=2 --set hidden=4"
        for line in (
            f"{vae} --prepare standardise --hold-out 0.2 --steps 10 --out vae",
            "fa --data fa --steps 10 --seeds 2 --out seeds",
            "table.csv --hold-out 0.2 --out density",
            "table.csv --model mixture --set components=2 --validation table.csv --out mixture",
        ):
            patch.setattr("sys.argv", ["aevb", "train", *line.split()])
            with contextlib.suppress(SystemExit):
                main()
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def test_the_page_of_a_run_shows_its_rows_by_their_numbers_in_the_file(here, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "page", "vae")
    assert code == 0
    assert "The page is in vae/page.html" in out
    (run,) = document_of("vae/page.html")["runs"]
    assert (run["name"], run["state"], run["problems"]) == ("vae", "finished", [])
    assert run["summary"]["curves"]["series"]
    found = run["map"]
    assert found["rows"]["splits"] == ["training", "held out"]
    numbers, split = (unpack(found["rows"][name]) for name in ("numbers", "split"))
    assert sorted(numbers) == list(range(N))
    assert (split == 1).sum() == 12
    file = pd.read_csv("numbers.csv").to_numpy()
    (variable,) = found["contents"]["variables"]
    assert variable["columns"] == ["a", "b", "c"]
    assert np.allclose(unpack(variable["numbers"]["values"]), file[numbers], rtol=1e-5)


def test_two_pages_of_a_run_are_equal_bytes(here, monkeypatch, capsys):
    for out in ("one.html", "two.html"):
        assert command(monkeypatch, capsys, "page", "vae", "--rows", "30", "--out", out)[0] == 0
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()
    rows = document_of("one.html")["runs"][0]["map"]["rows"]
    assert (rows["count"], rows["total"]) == (30, N)


def test_other_rows_are_prepared_like_the_training_rows(here, monkeypatch, capsys):
    code, _, _ = command(
        monkeypatch, capsys, "page", "vae", "--data", "other.csv", "--out", "other.html"
    )
    assert code == 0
    found = document_of("other.html")["runs"][0]["map"]
    assert found["rows"]["splits"] == [""]
    values = unpack(found["contents"]["variables"][0]["numbers"]["values"])
    assert np.allclose(values, pd.read_csv("other.csv").to_numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("run", "splits"),
    [("density", ["training", "held out"]), ("mixture", ["training", "validation"])],
)
def test_the_page_of_a_table(here, monkeypatch, capsys, run, splits):
    assert command(monkeypatch, capsys, "page", run, "--out", "table.html")[0] == 0
    (found,) = document_of("table.html")["runs"]
    assert found["problems"] == ["The map has no colours for name: more than 40 different texts."]
    assert found["map"]["rows"]["splits"] == splits
    numbers = unpack(found["map"]["rows"]["numbers"])
    columns = {column["name"]: column for column in found["map"]["contents"]["columns"]}
    file = pd.read_csv("table.csv")
    names = np.array([*columns["name"]["levels"], None])[unpack(columns["name"]["codes"])]
    assert (names == file["name"].to_numpy()[numbers]).all()
    height = unpack(columns["height"]["numbers"]["values"])
    assert np.allclose(height, file["height"].to_numpy()[numbers], equal_nan=True)
    colours = [colour["name"] for colour in found["map"]["colours"]]
    assert len(set(colours)) == len(colours)
    assert {"split", "split (column)", "log p", "height"} <= set(colours)
    assert bool(found["map"]["clusters"]) == (run == "mixture")


def test_several_runs_are_compared(here, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "page", "seeds", "--rows", "40")
    assert code == 0
    assert "seeds/page.html" in out
    found = document_of("seeds/page.html")
    assert [run["name"] for run in found["runs"]] == ["seed-0", "seed-1"]
    assert found["comparison"] is not None
    sweep = here / "sweep"
    (sweep / "a").mkdir(parents=True, exist_ok=True)
    (sweep / "sweep.json").write_text("{}")
    code, _, error = command(monkeypatch, capsys, "page", "sweep")
    assert (code, error) == (2, "aevb: sweep holds no runs yet.\n")
    shutil.copytree("seeds/seed-0", sweep / "a" / "seed-0")
    assert expanded([sweep]) == [sweep / "a" / "seed-0"]
    assert command(monkeypatch, capsys, "page", sweep, "--rows", "20")[0] == 0


def compared_runs(**runs):
    return json.loads(page_subjects.comparison_json({name: Path(at) for name, at in runs.items()}))


def test_a_damaged_run_does_not_keep_the_others_from_being_compared(here):
    shutil.copytree("seeds/seed-1", "broken")
    for file in Path("broken").glob("checkpoints/*/weights.safetensors"):
        damage(file)
    found = compared_runs(one="seeds/seed-0", other="seeds/seed-1", lost="broken")
    assert found["problem"] is None
    assert sorted(one["name"] for one in found["models"]) == ["one", "other"]
    assert found["names"] == ["one", "other", "lost"]
    assert found["notes"][0].startswith("lost is left out: The trained model cannot be read: ")
    alone = compared_runs(one="seeds/seed-0", lost="broken")
    assert alone["problem"] == "The runs cannot be compared: Fewer than two of them can be read."


def test_fewer_samples_for_large_models_are_said(here, monkeypatch):
    shutil.copytree("vae", "again")
    whole = compared_runs(one="vae", other="again")
    assert {one["samples"] for one in whole["models"]} == {1000}
    monkeypatch.setattr(page_subjects, "WORK", 0)
    found = compared_runs(one="vae", other="again")
    assert {one["samples"] for one in found["models"]} == {200}
    assert "estimated with 200 samples per row instead of 1,000" in found["notes"][0]
    assert not any("samples per row" in note for note in whole["notes"])


def test_the_rows_of_a_run_that_trains_are_read_once(here, monkeypatch):
    read, opened = page_subjects._subject, []

    def counted(folder, *arguments):
        opened.append(folder.name)
        return read(folder, *arguments)

    def live_map(folder):
        found = json.loads(page_subjects.section_json(folder, "map", live=True))
        del found["content"]["seconds"]
        return found

    monkeypatch.setattr(page_subjects, "_subject", counted)
    monkeypatch.setattr(page_subjects, "_KEPT", {})
    shutil.copytree("seeds/seed-0", "run")
    folder = Path("run")
    first = live_map(folder)
    assert live_map(folder) == first
    shutil.rmtree("run/checkpoints")  # the next checkpoint has other weights
    shutil.copytree("seeds/seed-1/checkpoints", "run/checkpoints")
    second = live_map(folder)
    assert opened == ["run"]
    assert second != first
    monkeypatch.setattr(page_subjects, "_KEPT", {})
    assert live_map(folder) == second
    opened.clear()
    for _ in range(2):
        live_map(Path("vae"))
    os.utime("numbers.csv")
    live_map(Path("vae"))
    assert opened == ["vae"] * 2


def test_an_interrupted_training_leaves_its_page_open(monkeypatch):
    told = []
    server = SimpleNamespace(stay=lambda: told.append("stays"), close=lambda: told.append("ends"))
    monkeypatch.setattr("aevb.cli.serve.PageServer", lambda folders, code: server)
    for error in (None, typer.Exit(130), ValueError("no data")):
        with contextlib.suppress(typer.Exit, ValueError), page_beside([Path("run")], wanted=True):
            if error is not None:
                raise error
    assert told == ["stays", "stays", "ends"]


def test_no_page_is_opened_for_wrong_arguments(here, monkeypatch, capsys):
    monkeypatch.setattr("aevb.cli.serve.PageServer", lambda folders, code: 1 / 0)
    code, _, error = command(
        monkeypatch, capsys, "train", "table.csv", "--hold-out", "2", "--serve"
    )
    assert (code, "--hold-out is a fraction" in error) == (2, True)


WRONG = {
    "nothing": "There is no folder nothing. Name the folder of a run.",
    "empty": "empty holds no run: model.json is missing.",
    "vae --out page.csv": "--out page.csv is no HTML file. Name one, e.g. --out page.html.",
    "vae --out no/page.html": "There is no folder no for --out no/page.html. Make it first.",
    "vae --data no.csv": "There is no file no.csv",
    "vae --data data.html --out data.html": "--out data.html is the file that the data are read "
    "from. Write to another file.",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_are_refused(here, monkeypatch, capsys, line):
    Path("empty").mkdir(exist_ok=True)
    Path("data.html").write_text("a,b,c\n1,2,3\n")
    code, _, error = command(monkeypatch, capsys, "page", *line.split())
    assert code == 2
    assert error.startswith(f"aevb: {WRONG[line]}")
    assert Path("data.html").read_text() == "a,b,c\n1,2,3\n"


def damage(path):
    path.write_bytes(b"{" + path.read_bytes()[:50])


DAMAGED = {
    "weights": (
        "vae",
        "checkpoints/*/weights.safetensors",
        "weights.safetensors is damaged",
        "curves",
    ),
    "manifest": ("vae", "checkpoints/*/manifest.json", "manifest.json is damaged", "curves"),
    "history": ("vae", "metrics.jsonl", "metrics.jsonl is damaged", "map"),
    "recipe": ("vae", "data.json", "data.json is damaged", "curves"),
    "model": ("vae", "model.json", "model.json is damaged", "curves"),
    "schema": ("mixture", "schema.json", "schema.json is damaged", "curves"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_the_page_of_a_damaged_run_says_so_and_shows_the_rest(here, monkeypatch, capsys, kind):
    run, name, text, shown = DAMAGED[kind]
    shutil.rmtree("damaged", ignore_errors=True)
    shutil.copytree(run, "damaged")
    for path in Path("damaged").glob(name):
        damage(path)
    code, out, _ = command(monkeypatch, capsys, "page", "damaged", "--rows", "20")
    assert code == 0
    (found,) = document_of("damaged/page.html")["runs"]
    assert len(found["problems"]) == 1
    assert text in found["problems"][0]
    assert found["problems"][0] in out
    if shown == "map":
        assert found["map"]["spaces"]
    else:
        assert found["map"] is None
        assert found["summary"]["curves"]["series"]


@pytest.mark.parametrize(
    "line",
    [
        "vae --data numbers.csv --set likelihood=Normal --set z=2 --set hidden=4 "
        "--prepare standardise --steps 5",
        "table.csv --model mixture --set components=2",
    ],
)
def test_a_missing_validation_file_leaves_the_map_of_the_training_rows(
    here, tmp_path, monkeypatch, capsys, line
):
    source = "numbers.csv" if line.startswith("vae") else "table.csv"
    shutil.copy(source, tmp_path / "check.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code, _, _ = command(
            monkeypatch, capsys, "train", *line.split(),
            "--validation", tmp_path / "check.csv", "--out", tmp_path / "run",
        )  # fmt: skip
    assert code == 0
    whole = section(open_for_page(tmp_path / "run"), "map")
    assert whole["rows"]["splits"] == ["training", "validation"]
    (tmp_path / "check.csv").unlink()
    opened = open_for_page(tmp_path / "run")
    (problem,) = opened.problems
    assert "check.csv cannot be read, so the page shows the training rows only" in problem
    found = section(opened, "map")
    assert found["rows"]["splits"] == ["training"]
    assert found["rows"]["count"] == N
    n = whole["spaces"][0]["codes"]["shape"][1]
    assert (
        unpack(found["spaces"][0]["codes"]) == unpack(whole["spaces"][0]["codes"])[:N]
    ).all() or n == 0


def test_a_run_whose_file_was_moved_shows_what_it_has(here, tmp_path, monkeypatch, capsys):
    for run, data in {"vae": "numbers.csv", "mixture": "table.csv"}.items():
        shutil.copytree(here / run, tmp_path / run)
        monkeypatch.chdir(tmp_path)
        assert command(monkeypatch, capsys, "page", run)[0] == 0
        (found,) = document_of(tmp_path / run / "page.html")["runs"]
        assert found["map"] is None
        assert found["summary"]["model"]["text"]
        (problem,) = found["problems"]
        assert f"{run} was trained on {data}" in problem
        assert "--data PATH" in problem


def test_a_file_that_changed_since_training_has_no_held_out_rows(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run, file in {"vae": "numbers.csv", "density": "table.csv"}.items():
        shutil.copytree(here / run, run)
        lines = (here / file).read_text().splitlines()
        Path(file).write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
        opened = open_for_page(Path(run))
        assert [split.name for split in opened.subject.splits] == [""]
        (problem,) = opened.problems
        assert f"{file} has changed since training" in problem


def test_a_run_without_a_checkpoint_shows_its_model(here, monkeypatch, capsys):
    shutil.copytree("vae", "early", dirs_exist_ok=True)
    shutil.rmtree("early/checkpoints")
    assert command(monkeypatch, capsys, "page", "early")[0] == 0
    (found,) = document_of("early/page.html")["runs"]
    assert found["state"] == "stopped"
    assert found["map"] is None
    assert "holds no checkpoint yet" in found["problems"][0]
    assert found["summary"]["model"]["text"]


def test_a_model_that_cannot_be_shown_leaves_the_curves(here, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no plan.")

    monkeypatch.setattr("aevb.page.summary.model_parts", fail)
    found = section(open_for_page(here / "vae", with_rows=False), "summary")
    assert found["problems"] == ["The model cannot be shown: no plan."]
    assert found["curves"]["series"]


# Pages of runs in memory --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    x = GENERATOR.random((30, 64))
    model = Model({"z": Normal(2), "x | z": Normal(64)}, {"z | x": Normal(net=mlp(4))})
    return fit(model, {"x": x}, steps=5, log_every=1), x


def test_a_run_in_memory_has_a_page(trained, tmp_path):
    run, x = trained
    found = run.page({"x": x}, np.arange(30) % 3, out=tmp_path / "page.html")
    assert repr(found) == "Page of run; page.save('page.html') writes it"
    assert found.problems == []
    content = document_of(tmp_path / "page.html")
    assert to_json(content) == to_json(found.content)
    (shown,) = content["runs"]
    assert shown["summary"]["curves"]["series"]
    assert shown["map"]["contents"]["variables"][0]["image"] == [8, 8]
    assert (unpack(shown["map"]["colours"][0]["values"]) == np.arange(30) % 3).all()
    assert found.save(tmp_path / "two.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_a_table_of_any_kind_has_a_page_and_a_card():
    rng = np.random.default_rng(0)
    columns = {"height": rng.normal(170, 9, 40), "kind": ["a", "b"] * 20}
    schema = Schema.read(columns)
    fitted = schema.fit(schema.mixture(2), columns, seed=0, starts=1, steps=5, progress=False)
    shown = {
        kind: fitted.page(frame, rows=10)
        for kind, frame in {
            "a dictionary": columns,
            "pyarrow": pa.table(columns),
            "a lazy frame": pl.DataFrame(columns).lazy(),
        }.items()
    }
    assert all(page.problems == [] for page in shown.values())
    contents = [page.content["runs"][0]["map"]["contents"] for page in shown.values()]
    assert to_json(contents[0]) == to_json(contents[1]) == to_json(contents[2])
    assert fitted.card(columns).problems == ()


def test_grey_levels_are_ink_or_light(trained):
    run, x = trained
    for ink in (True, False):
        (found,) = run.page({"x": x}, ink=ink).content["runs"]
        assert found["map"]["contents"]["variables"][0]["light"] == (not ink)


def test_a_notebook_shows_the_page_apart_from_itself(trained):
    run, x = trained
    shown = run.page({"x": x}, rows=10)
    text = shown._repr_html_()
    assert re.match(r'<iframe srcdoc="', text)
    assert 'sandbox="allow-scripts allow-downloads"' in text
    assert "allow-same-origin" not in text
    inner = re.search(r'srcdoc="([^"]*)"', text)[1]
    assert html.unescape(inner) == shown.html
    assert shown.content["runs"][0]["map"]["rows"]["count"] == 10


def test_known_classes_serve_as_labels_and_rows_without_an_image_are_numbers():
    torch.manual_seed(0)
    model = Model(
        {"y": OneHot(3), "x | y": Normal(9)},
        {"y | x": OneHot()},
    )
    x, y = GENERATOR.normal(size=(20, 9)), np.arange(20) % 3
    run = fit(model, {"x": x, "y": np.where(y, y, -1)}, steps=3)
    (found,) = run.page({"x": x, "y": y}).content["runs"]
    assert (unpack(found["map"]["colours"][0]["values"]) == y).all()
    assert found["map"]["contents"]["kind"] == "numbers"
    (found,) = run.page({"x": x}, image=(3, 3)).content["runs"]
    assert "label" not in [colour["name"] for colour in found["map"]["colours"]]
    assert found["map"]["contents"]["variables"][0]["image"] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, r'A page shows rows: run\.page\(\{"x": X\}\)\.$'),
        ({"data": np.zeros((3, 64))}, "arrays by variable, such as {'x': X}; got a ndarray"),
        ({"data": 30, "labels": np.zeros(3)}, "There are 30 rows, but 3 labels"),
        (
            {"data": 30, "labels": np.zeros((30, 2))},
            r"class numbers or texts \[N\], got shape \(30, 2\)",
        ),
        ({"data": 30, "image": (9, 9)}, "has 81 pixels, but x has 64 entries"),
        ({"data": 3, "out": "page.csv"}, "page.csv is no HTML file"),
    ],
)
def test_wrong_arguments_of_a_page_are_refused(trained, arguments, match):
    run, x = trained
    if isinstance(arguments.get("data"), int):
        arguments = arguments | {"data": {"x": x[: arguments["data"]]}}
    with pytest.raises(ValueError, match=match):
        run.page(**arguments)


def test_a_run_of_the_command_line_points_to_its_command(here):
    from aevb.training.run import Run

    with pytest.raises(ValueError, match="`aevb page vae` reads those of the training"):
        Run.load("vae").page()


def test_a_model_of_a_table_has_a_page():
    values = np.random.default_rng(1).normal(size=30)
    frame = pd.DataFrame({"a": values, "note": [f"{i}" for i in range(30)]})
    schema = Schema.read(frame[["a"]])
    fitted = schema.fit(schema.mixture(2), frame[["a"]])
    (found,) = fitted.page(frame).content["runs"]
    columns = {column["name"]: column for column in found["map"]["contents"]["columns"]}
    assert (unpack(columns["a"]["numbers"]["values"]) == frame["a"].to_numpy()).all()
    assert not columns["note"]["modelled"]
