"""Places where a printed result could be misread: units, columns that are not used, labels, markers
of missing cells, errors, and places.
"""

import json
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from aevb import Model, Normal, cli, fit, mlp
from aevb.data import mark_missing, standardise
from aevb.data.datasets import Recipe
from aevb.data.markers import find_markers
from aevb.runtime.checked_files import seal
from aevb.training.run_folder import check_recipe

SMALL = ("--set", "z=2", "--set", "hidden=[8]")


@pytest.fixture
def aevb(tmp_path, monkeypatch, capsys):
    """A command in an empty folder: what it printed, errors too; ``code`` is how it is expected to
    end.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        assert (stop.value.code or 0) == code, printed
        return printed.out + printed.err

    return run


def write_csv(name, rows, header):
    lines = [
        ",".join(
            "" if isinstance(value, float) and math.isnan(value) else str(value) for value in row
        )
        for row in rows
    ]
    Path(name).write_text("\n".join([header, *lines]) + "\n")


def figures(printed):
    """The figures of ``evaluate`` by name."""
    pairs = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    return {
        words[0]: float(words[1])
        for words in pairs
        if words[1].lstrip("-").replace(".", "").isdigit()
    }


def table(n=120, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(n, 1)) @ rng.normal(size=(1, 3)) * [1, 20, 300]
        + rng.normal(size=(n, 3)) * [0.5, 5, 50]
        + [0, 10, 1000]
    )


# Units --------------------------------------------------------------------------------------------


def test_evaluate_prints_the_density_of_the_data_in_their_own_units(aevb):
    x = table()[:, :2]
    write_csv("t.csv", x.tolist(), "a,b")
    told = aevb(
        "train",
        "fa",
        "--set",
        "z=1",
        "--data",
        "t.csv",
        "--prepare",
        "standardise",
        "--schedule",
        "mle",
        "--out",
        "run",
    )
    lower = np.log(x.std(0)).sum()
    assert (
        f"Bounds and log p are of standardised x. For the units of the data add {-lower:.3f} nats "
        f"per row (x, no cell missing)." in told
    )
    # one factor fits two columns' covariance
    exact = -0.5 * np.linalg.slogdet(2 * np.pi * np.e * np.cov(x.T, bias=True))[1]
    for more in ((), ("--evidence", "exact")):
        printed = aevb("evaluate", "run", *more)
        assert abs(figures(printed)["evidence"] - exact) < 2e-3
        assert (
            f"in the units of the data. For standardised x, as in training, add {lower:.3f} nats "
            f"per example." in printed
        )
    assert f"log p = {figures(printed)['evidence']:.1f}" in printed
    assert "Bounds and log p are of standardised x." in aevb("doctor", "run", "--no-calibrate")
    assert "Statistics are of standardised x, not in the units of the data." in aevb(
        "check", "run", "--replicates", "20"
    )


def test_the_same_data_in_other_units_differ_by_the_jacobian_of_their_known_cells(aevb):
    x = table()
    x[::3, 0], x[1::4, 2] = np.nan, np.nan
    write_csv("m.csv", x.tolist(), "a,b,c")
    # powers of two: the standardised values are the same
    write_csv("mm.csv", (x * [1024, 1, 64]).tolist(), "a,b,c")
    found = []
    for name in ("m", "mm"):
        aevb(
            "train",
            "vae",
            "--data",
            f"{name}.csv",
            "--set",
            "likelihood=Normal",
            *SMALL,
            "--prepare",
            "standardise",
            "--steps",
            "20",
            "--out",
            name,
        )
        found.append(
            (
                figures(aevb("evaluate", name, "--samples", "0")),
                aevb("evaluate", name, "--evidence", "importance"),
            )
        )
    expected = (np.isfinite(x) * np.log([1024, 1, 64])).sum() / len(x)
    for name, differs in (("elbo", 1), ("x", 1), ("kl(z)", 0)):
        assert abs(found[0][0][name] - found[1][0][name] - differs * expected) < 2e-3
    bounds = [
        [float(line.split()[3]) for line in told.splitlines() if line.startswith("  k = ")]
        for _, told in found
    ]
    assert np.allclose(np.subtract(*bounds), expected, rtol=0, atol=2e-4)


def test_steps_beyond_the_end_of_a_sequence_and_other_variables_count_in_the_units(aevb):
    rng = np.random.default_rng(0)
    Path("m.py").write_text(
        'from aevb import Model, Normal\nm = Model(p={"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": '
        'Normal(2), "s": Normal(1, learned=True)}, q={"z[t] | x[t]": Normal()})\n'
    )
    arrays = {
        "x": rng.normal(size=(12, 4, 2)) * [8, 2],
        "s": rng.normal(size=(12, 1)) * 4,
        "lengths": np.arange(12) % 4 + 1,
    }
    np.savez("t.npz", **arrays)
    told = aevb(
        "train",
        "m.py:m",
        "--data",
        "t.npz",
        "--prepare",
        "standardise",
        "--steps",
        "3",
        "--out",
        "run",
    )
    recipe = json.loads(Path("run/data.json").read_text())
    step, row = np.log(recipe["scale"]).sum(), np.log(recipe["others"]["s"]["scale"]).sum()
    assert (
        f"add {-step:.3f} nats per step (x, no cell missing) and {-row:.3f} nats per row (s, no "
        f"cell missing)." in told
    )
    assert f"add {2.5 * step + row:.3f} nats per example." in aevb(
        "evaluate", "run", "--samples", "0"
    )


def test_grey_levels_between_0_and_1_are_told_with_what_to_add(aevb):
    told = aevb("train", "vae", "--data", "digits", *SMALL, "--steps", "3", "--out", "run")
    sentence = "Bounds and log p are of x with grey levels from 0 to 1 (dequantise)."
    assert sentence in told
    assert f"{sentence} For grey levels add {-64 * math.log(17):.3f} nats per example." in aevb(
        "evaluate", "run", "--samples", "0"
    )
    aevb(
        "train",
        "vae",
        "--data",
        "digits",
        "--set",
        "likelihood=Bernoulli",
        *SMALL,
        "--steps",
        "3",
        "--out",
        "binary",
    )
    # a probability has no units
    assert "Bounds and log p" not in aevb("evaluate", "binary", "--samples", "0")


# A q that was not trained -------------------------------------------------------------------------


def test_the_bound_of_a_q_that_was_not_trained_is_left_out(aevb):
    write_csv("t.csv", table().tolist(), "a,b,c")
    told = aevb(
        "train",
        "fa",
        "--set",
        "z=1",
        "--data",
        "t.csv",
        "--prepare",
        "standardise",
        "--schedule",
        "mle",
        "--hold-out",
        "0.1",
        "--out",
        "run",
    )
    assert (
        "mle() trains p alone. Judge the run by the evidence: the elbo, its terms and the gap use "
        "q as it was before the run." in told
    )
    printed = aevb("evaluate", "run")
    assert list(figures(printed)) == ["evidence"]
    assert (
        "mle() trains p alone: the bound of that q and its terms say nothing about p and are not "
        "printed" in printed
    )
    told = aevb("doctor", "run", "--no-calibrate")
    assert "q is not used (mle() trains p alone)" in told
    assert "ok       log p is" in told
    assert "The ELBO" not in told


def test_a_q_that_the_bound_does_not_read_leaves_it_as_it_is(aevb):
    x = table()
    write_csv("t.csv", [[*row, i % 2] for i, row in enumerate(x.tolist())], "a,b,c,y")
    asked = [
        "--data",
        "t.csv",
        "--set",
        "likelihood=Normal",
        "--set",
        "y=2",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "5",
    ]
    assert "y is known in every row" in aevb("train", "m2", *asked, "--out", "known")
    told = aevb("evaluate", "known", "--samples", "0")
    assert {"elbo", "x", "kl(z)"} <= figures(told).keys()  # of log p(x, y), which has no q(y|x)
    assert "not printed" not in told
    write_csv("unknown.csv", [[*row, -1] for row in x.tolist()], "a,b,c,y")
    told = aevb("evaluate", "known", "--data", "unknown.csv", "--samples", "10")
    assert (
        "so that q(y|·) was not trained: the bound of that q and its terms say nothing about p "
        "and are not printed" in told
    )
    assert "with an untrained q it may be far too low: try --evidence prior or ais" in told
    assert "elbo" not in figures(told)


# Columns and labels -------------------------------------------------------------------------------


@pytest.mark.slow
def test_columns_that_are_not_used_are_named_whatever_they_hold(aevb):
    x = table()
    write_csv("t.csv", x.tolist(), "a,b,c")
    write_csv(
        "more.csv",
        [[1.5, *row, "north", "2024-01-02"] for row in x.tolist()],
        "bmi,a,b,c,site,seen",
    )
    asked = [
        "--data",
        "t.csv",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "3",
    ]
    aevb("train", "vae", *asked, "--out", "run")
    sentence = (
        "aevb: more.csv: the columns 'bmi', 'site', 'seen' are not used, because the model was "
        "trained without them.\n"
    )
    assert (
        aevb("train", "vae", *asked, "--out", "validated", "--validation", "more.csv").count(
            sentence
        )
        == 1
    )
    for command in (
        ["evaluate"],
        ["encode", "--out", "c.csv"],
        ["impute", "--out", "f.csv"],
        ["doctor", "--no-calibrate"],
        ["check"],
    ):
        assert aevb(command[0], "run", "--data", "more.csv", *command[1:]).count(sentence) == 1, (
            command
        )
        assert "not used" not in aevb(command[0], "run", "--data", "t.csv", *command[1:]), command
    assert figures(aevb("evaluate", "run", "--data", "more.csv")) == figures(
        aevb("evaluate", "run", "--data", "t.csv")
    )
    write_csv("less.csv", [[row[1], "north"] for row in x.tolist()], "b,site")
    told = aevb("evaluate", "run", "--data", "less.csv", code=2)
    assert (
        told
        == "aevb: less.csv: it lacks the columns 'a', 'c' that x was trained with; its columns "
        "are b, site.\n"
    )


def test_columns_of_parquet_that_are_not_used_are_named(aevb):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = dict(zip("abc", table().T.tolist(), strict=True))
    parquet.write_table(pyarrow.table(columns), "t.parquet")
    parquet.write_table(
        pyarrow.table(columns | {"site": ["north"] * 120, "path": [[1.0, 2.0]] * 120}),
        "more.parquet",
    )
    asked = [
        "--data",
        "t.parquet",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "3",
    ]
    aevb("train", "vae", *asked, "--out", "run")
    told = aevb("evaluate", "run", "--data", "more.parquet")
    assert (
        "aevb: more.parquet: the columns 'site', 'path' are not used, because the model was "
        "trained without them." in told
    )
    assert figures(told) == figures(aevb("evaluate", "run"))


def test_arrays_that_are_not_used_are_named(aevb):
    np.savez("t.npz", x=table(), age=np.zeros(120), bmi=np.zeros(120))
    asked = [
        "train",
        "vae",
        "--data",
        "t.npz",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "3",
        "--out",
        "run",
    ]
    for command in (asked, ["evaluate", "run"]):
        assert (
            aevb(*command).count(
                "aevb: t.npz: the arrays 'age', 'bmi' are not used, because no variable has that "
                "name."
            )
            == 1
        )


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_labels_that_only_evaluate_is_given_judge_the_clusters(aevb, kind):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 100)
    x = np.where(y[:, None] == 1, 5.0, -5.0) + rng.normal(size=(100, 2))
    labels = np.where(y == 1, 7, 4)  # numbers of their own, which the model has no such classes for
    if kind == "csv":
        write_csv("t.csv", x.tolist(), "a,b")
        write_csv(
            "labelled.csv",
            [[*row, label] for row, label in zip(x.tolist(), labels.tolist(), strict=True)],
            "a,b,y",
        )
        write_csv(
            "words.csv",
            [
                [*row, "no" if label == 4 else "yes"]
                for row, label in zip(x.tolist(), labels.tolist(), strict=True)
            ],
            "a,b,y",
        )
    else:
        np.savez("t.npz", x=x)
        np.savez("labelled.npz", x=x, y=labels)
    Path("m.py").write_text(
        'from aevb import Model, Normal, OneHot\nm = Model(p={"y": OneHot(2), "x | y": '
        'Normal(2)}, q={"y | x": OneHot()})\n'
    )
    aevb(
        "train",
        "m.py:m",
        "--data",
        f"t.{kind}",
        "--prepare",
        "standardise",
        "--steps",
        "200",
        "--out",
        "run",
    )
    assert "labels" not in aevb("evaluate", "run")
    told = aevb("evaluate", "run", "--data", f"labelled.{kind}")
    assert "clusters y: 1.000 of the rows match their label" in told
    assert (
        "The training rows had no labels y: labels are only compared with the clusters, and log p "
        "does not include them" in told
    )
    assert figures(told) == figures(aevb("evaluate", "run"))
    if kind == "csv":
        told = aevb("evaluate", "run", "--data", "words.csv", code=2)
        assert "the column 'y' holds words (" in told
        assert "Number the classes in it from 0 (" in told
    further = ["train", "run", "--data", f"labelled.{kind}", "--steps", "2", "--out", "further"]
    assert "y has 100 labels outside 0 … 1" in aevb(*further, code=2)  # in training they are data
    (
        write_csv("labelled.csv", np.c_[x, y].tolist(), "a,b,y")
        if kind == "csv"
        else np.savez("labelled.npz", x=x, y=y)
    )
    assert "y known in all" in aevb(*further)
    told = aevb("evaluate", "further")
    assert "The labels y were not" not in told
    assert "  y: the most probable class of " in told


def test_a_run_that_does_not_say_what_was_known_goes_on(aevb):
    np.savez("t.npz", x=table())
    asked = [
        "train",
        "vae",
        "--data",
        "t.npz",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--out",
        "run",
    ]
    aevb(*asked, "--steps", "3")
    recipe = json.loads(Path("run/data.json").read_text())
    assert recipe.pop("known") == ["x"]
    assert Recipe(**recipe).known is None
    check_recipe(Path("run"), Recipe(**recipe | {"known": ["x"]}), seal(recipe))
    aevb(*asked, "--steps", "5", "--resume")


# Markers of missing cells -------------------------------------------------------------------------


def marked_table(marker):
    x = table()
    x[::7, 1] = np.nan
    return x, np.where(np.isnan(x), marker, x)


@pytest.mark.parametrize("marker", [-999.0, -99.0, 9999.0, -9999.0])
def test_a_marker_of_missing_cells_is_named_and_can_be_declared(aevb, marker):
    holes, marked = marked_table(marker)
    write_csv("holes.csv", holes.tolist(), "a,b,c")
    write_csv("marked.csv", marked.tolist(), "a,b,c")
    asked = [
        "train",
        "vae",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "5",
    ]
    sentence = (
        f"aevb: marked.csv: the value {marker:g} repeats far outside the others of its column: "
        f"column 'b' (18 times). If it marks missing entries, leave its cells empty, or add "
        f"--missing {marker:g}.\n"
    )
    assert aevb(*asked, "--data", "marked.csv", "--out", "read").count(sentence) == 1
    assert aevb("evaluate", "read").count(sentence) == 1
    told = aevb(*asked, "--data", "marked.csv", "--missing", f"{marker:g}", "--out", "run")
    assert "repeats far outside" not in told
    assert json.loads(Path("run/data.json").read_text())["missing"] == [marker]
    assert "repeats far outside" not in aevb(*asked, "--data", "holes.csv", "--out", "plain")
    expected = figures(aevb("evaluate", "plain"))
    assert figures(aevb("evaluate", "run")) == expected  # the marker is in the recipe
    assert (
        figures(aevb("evaluate", "plain", "--data", "marked.csv", "--missing", marker)) == expected
    )
    aevb("impute", "run", "--out", "f.csv")
    filled = np.loadtxt("f.csv", delimiter=",", skiprows=1)
    assert not (filled == marker).any()
    assert np.allclose(filled[~np.isnan(holes)], holes[~np.isnan(holes)], rtol=1e-12, atol=0)
    assert "trained with missing=" in aevb(
        *asked, "--data", "marked.csv", "--out", "run", "--resume", code=2
    )


def test_labels_that_are_marked_missing_size_no_model(aevb):
    x = table()
    write_csv(
        "t.csv",
        [[*row, 9999 if i % 5 == 0 else i % 3] for i, row in enumerate(x.tolist())],
        "a,b,c,y",
    )
    asked = [
        "train",
        "m2",
        "--data",
        "t.csv",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "2",
        "--missing",
        "9999",
    ]
    told = aevb(*asked, "--out", "run")
    assert "y                3" in told
    assert "y known in 96" in told


def test_arrays_with_a_marker_are_named_and_mark_missing_declares_it(aevb):
    holes, marked = marked_table(-999.0)
    np.savez("t.npz", x=marked)
    asked = [
        "train",
        "vae",
        "--data",
        "t.npz",
        "--set",
        "likelihood=Normal",
        *SMALL,
        "--prepare",
        "standardise",
        "--steps",
        "2",
    ]
    told = aevb(*asked, "--out", "run")
    sentence = (
        "the value -999 repeats far outside the others of its column: column 1 of x (from 0) (18 "
        "times). If it marks missing entries, write NaN"
    )
    assert told.count(f"aevb: t.npz: {sentence} there.\n") == 1
    assert "--missing) are for tables only. Write NaN in the arrays." in aevb(
        *asked, "--missing", "-999", "--out", "other", code=2
    )
    assert "digits has no missing cells" in aevb(
        "train", "vae", "--data", "digits", "--missing", "-999", "--out", "other", code=2
    )
    for data, noted in (
        (marked, 1),
        (standardise(marked), 1),
        (torch.tensor(marked), 1),
        (mark_missing(marked, -999), 0),
        (holes, 0),
    ):
        model = Model(
            p={"z": Normal(1), "x | z": Normal(3)}, q={"z | x": Normal(net=mlp(4, log=True))}
        )
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run = fit(model, {"x": data}, steps=1)
        notes = [note for note in run.notes if "repeats far outside" in note]
        assert all(note in [str(one.message) for one in warned] for note in notes)
        assert notes == [f"{sentence} there: aevb.data.mark_missing(x, -999)."] * noted
    assert np.array_equal(mark_missing(marked, -999), holes, equal_nan=True)


def test_numbers_that_are_no_markers_are_left_alone():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(200, 6)) * 30
    values[:2, 0] = 99  # inside
    values[:1, 1] = -999  # once
    values[:, 2] = rng.integers(0, 110, 200)  # ages
    values[:, 3] = rng.integers(900, 1100, 200)
    values[:3, 4] = -998
    values[:, 5] = -999  # nothing else
    assert find_markers(values) == {}
    values[5:8, 0], values[5:9, 2] = -999, -99
    assert find_markers(values) == {-999.0: {0: 3}, -99.0: {2: 4}}


# Resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--seeds", "2")])
def test_a_run_that_is_not_there_is_not_resumed_by_the_command(aevb, more):
    write_csv("t.csv", table().tolist(), "a,b,c")
    asked = ["train", "fa", "--data", "t.csv", "--prepare", "standardise", "--steps", "3", *more]
    Path("empty").mkdir()
    for folder in ("nowhere", "empty"):
        told = aevb(*asked, "--out", folder, "--resume", code=2)
        fix = "Name its folder by --out, or leave out --resume to start a new run."
        assert told == f"aevb: There is no run in {folder} that --resume could continue. {fix}\n"
    assert not Path("nowhere").exists()
    aevb(*asked, "--out", "run")
    assert "There is no" not in aevb(*asked, "--out", "run", "--resume")


def test_in_python_resume_starts_where_there_is_no_run_and_says_so(tmp_path, capsys):
    model, x = (
        Model(p={"z": Normal(1), "x | z": Normal(3)}, q={"z | x": Normal()}),
        torch.zeros(20, 3).normal_(generator=torch.Generator().manual_seed(0)),
    )
    sentence = (
        f"There is no checkpoint in {tmp_path / 'r'} yet that resume=True could continue: the run "
        f"starts at step 0.\n"
    )
    for steps, said in ((2, 1), (4, 0)):
        run = fit(
            model,
            {"x": x},
            steps=steps,
            out=tmp_path / "r",
            resume=True,
            progress=True,
            decay="constant",
        )
        assert capsys.readouterr().out.count(sentence) == said
        assert not any("note" in row for row in run.rows)


# Errors -------------------------------------------------------------------------------------------


def test_each_error_says_what_it_is_the_error_of(aevb):
    write_csv("t.csv", table().tolist(), "a,b,c")
    aevb(
        "train",
        "fa",
        "--set",
        "z=1",
        "--data",
        "t.csv",
        "--prepare",
        "standardise",
        "--steps",
        "20",
        "--out",
        "run",
    )
    sentence = (
        "± is the sampling error: the standard error of the estimate for these rows, not the "
        "variation between rows"
    )
    for more in ((), ("--evidence", "importance"), ("--evidence", "exact")):
        told = aevb("evaluate", "run", *more)
        assert told.count(sentence) == 1
    told = aevb("doctor", "run", "--no-calibrate")
    assert " nats per example (standard error over the rows 0." in told
    assert "±" not in told
    assert "±: the standard error over the replicates." in aevb(
        "estimators", "run", "--rows", "5", "--replicates", "16", "--samples", "1"
    )
    Path("m.py").write_text(
        'from aevb import Model, Normal, OneHot\nm = Model(p={"y": OneHot(2), "x | y": '
        'Normal(3)}, q={"y | x": OneHot()})\n'
    )
    aevb(
        "train",
        "m.py:m",
        "--data",
        "t.csv",
        "--prepare",
        "standardise",
        "--steps",
        "5",
        "--out",
        "summed",
    )
    assert "±" not in aevb("evaluate", "summed")  # nothing is sampled


# Places -------------------------------------------------------------------------------------------


def test_cells_of_a_table_are_named_by_line_and_column(aevb):
    Path("b.csv").write_text(
        "\nsex,ill,y\n" + "".join(f"{i % 2},{i % 3 // 2},{i % 2}\n\n" for i in range(6)) + "0,3,1\n"
    )
    Path("m.py").write_text(
        'from aevb import Bernoulli, Model, Normal, OneHot, mlp\nm = Model(p={"y": OneHot(2), "x '
        '| y": Bernoulli(2)}, q={"y | x": OneHot()})\nn = Model(p={"z": Normal(1), "x | z": '
        'Normal(2)}, q={"z | x": Normal(net=mlp(4))})\n'
    )
    asked = ["--steps", "2", "--out", "run"]
    assert "x has 1 value that is not 0 or 1 (first: line 15, column 'ill': 3.0), but p" in aevb(
        "train", "m.py:m", "--data", "b.csv", *asked, code=2
    )
    held = aevb("train", "m.py:m", "--data", "b.csv", "--hold-out", "0.3", *asked, code=2)
    assert "(first: line 15, column 'ill': 3.0)" in held  # whichever part it falls in
    Path("y.csv").write_text("a,b,y\n0,1,0\n1,1,5\n0,0,1\n")
    assert "y has 1 label outside 0 … 1 (first: line 3, column 'y': 5.0)." in aevb(
        "train", "m.py:m", "--data", "y.csv", *asked, code=2
    )
    Path("plain.csv").write_text("1,0\n1,1\n0,7\n")
    assert "(first: line 3, column '2': 7.0)" in aevb(
        "train", "m.py:m", "--data", "plain.csv", *asked, code=2
    )
    Path("inf.csv").write_text("a,b\n0,1\n1,inf\n0,7\n")
    told = aevb("train", "m.py:n", "--data", "inf.csv", "--prepare", "standardise", *asked, code=2)
    assert (
        "x: standardise takes finite numbers, but not all are (first: line 3, column 'b': inf)."
        in told
    )
    Path("flat.csv").write_text("a,b\n" + "".join(f"{i},4\n" for i in range(9)))
    assert "x has 1 of 2 columns that are constant (column 'b')" in aevb(
        "train", "m.py:n", "--data", "flat.csv", *asked, code=2
    )
    Path("lost.csv").write_text("a,b\n" + "".join(f",{i}\n" for i in range(9)))
    assert "x is missing (NaN) in every row of column 'a': p cannot learn it" in aevb(
        "train", "m.py:n", "--data", "lost.csv", *asked, code=2
    )
    Path("large.csv").write_text("a,b\n" + "".join(f"{i},{i % 3}\n" for i in range(9)) + "1e30,1\n")
    assert "is not finite for lines 11." in aevb(
        "train", "m.py:n", "--data", "large.csv", *asked, code=1
    )


def test_steps_of_a_table_are_named_by_line_and_column(aevb):
    Path("m.py").write_text(
        "from aevb import Bernoulli, Model, OneHot\n"
        'm = Model(p={"y[t] | y[t-1]": OneHot(2), "x[t] | y[t]": Bernoulli(1)}, q={"y[t] | x[t]": '
        "OneHot()})\n"
    )
    Path("long.csv").write_text(
        "row,step,x\n" + "".join(f"{i % 3},{i // 3},{2 * (i == 7)}\n" for i in range(9))
    )
    Path("wide.csv").write_text(
        "mon,tue,wed\n" + "".join(f"0,{i % 2},{2 * (i == 4)}\n" for i in range(6))
    )
    for name, place in (("long", "line 9, column 'x'"), ("wide", "line 6, column 'wed'")):
        assert f"(first: {place}: 2.0)" in aevb(
            "train", "m.py:m", "--data", f"{name}.csv", "--steps", "2", "--out", "run", code=2
        )
    Path("half.csv").write_text("row,step,x\n\n0,0,1\n\n0,0.5,1\n")
    assert "half.csv: line 5 has the step 0.5; rows and steps are whole numbers" in aevb(
        "train", "m.py:m", "--data", "half.csv", "--out", "run", code=2
    )


def test_entries_of_arrays_are_counted_from_0_and_say_so(tmp_path):
    model = Model(p={"z": Normal(1), "x | z": Normal(3)}, q={"z | x": Normal()})
    with pytest.raises(
        ValueError, match=r"x has 1 value not finite \(first, from 0: row 1, column 2: inf\)"
    ):
        fit(model, {"x": [[1, 2, 3], [4, 5, math.inf]]}, steps=1)
    (tmp_path / "t.csv").write_text("a,b,c\n1,2,3\n4,5,inf\n")
    with pytest.raises(
        ValueError, match=r"x has 1 value not finite \(first: line 3, column 'c': inf\)"
    ):
        fit(model, tmp_path / "t.csv", steps=1)


def test_evaluate_notes_a_density_that_grows_because_values_repeat(aevb):
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.normal(size=200), rng.integers(0, 2, 200)])
    np.savetxt("t.csv", table, delimiter=",", header="height,sex", comments="")
    Path("m.py").write_text(
        "from aevb import Exact, Model, Normal, OneHot\n"
        'p = {"y": OneHot(2, learned=True), "x | y": Normal(2)}\n'
        'mixture = Model(p, {"y | x": Exact()})\n'
    )
    aevb("train", "m.py:mixture", "--data", "t.csv", "--schedule", "em", "--out", "run")
    printed = " ".join(aevb("evaluate", "run").split())
    assert "of few values that repeat (column 'sex'" in printed


def test_classes_of_a_model_trained_with_labels(aevb):
    """They have the numbers of the labels, so their accuracy needs no matching."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    x = (labels[:, None] * 4 + rng.normal(size=(60, 2))).astype(np.float32)
    np.savez("known.npz", x=x, y=np.where(np.arange(60) < 40, labels, -1))
    np.savez("swapped.npz", x=x, y=1 - labels)
    np.savez("new.npz", x=x)
    asked = ("m2", "--data", "known.npz", "--set", "likelihood=Normal(scale=1)")
    sizes = ("--set", "hidden=8", "--set", "z=1", "--set", "y=2", "--steps", "150", "--lr", "0.02")
    aevb("train", *asked, *sizes, "--classify", "20", "--out", "run")
    right = aevb("evaluate", "run")
    assert "y: the most probable class of 1.000 of the rows with a label is their label" in right
    assert "class of 0.000 of the rows" in aevb("evaluate", "run", "swapped.npz")
    told = aevb("cluster", "run", "new.npz")
    assert "rows by most probable y" in told
    assert "0: 30, 1: 30" in told
    assert "aevb cluster run new.npz --out classes.csv" in told
    aevb("cluster", "run", "new.npz", "--out", "classes.csv")
    found = np.genfromtxt("classes.csv", delimiter=",", names=True)
    assert found.dtype.names == ("y", "p0", "p1")
    assert (found["y"] == labels).all()
    assert ((found["p1"] > 0.5) == labels).all()


def test_runs_without_classes_say_what_to_do_for_them(aevb):
    np.savez("t.npz", x=np.random.default_rng(0).normal(size=(20, 2)), y=np.arange(20) % 2)
    for model, advice in (("fa", "aevb encode fa"), ("cvae", "to predict a class train m2")):
        more = () if model == "fa" else ("--set", "likelihood=Normal", "--set", "y=2")
        aevb("train", model, "--data", "t.npz", *more, "--steps", "2", "--out", model)
        assert advice in aevb("cluster", model, code=2)


def test_a_bound_that_is_not_finite_ends_with_an_error(aevb):
    x = np.random.default_rng(0).normal(size=(40, 3)) * [1, 1, 0.01]
    np.save("x.npy", x)
    np.save("large.npy", x * 1e30)
    normal = (*SMALL, "--set", "likelihood=Normal")
    aevb("train", "vae", "--data", "x.npy", *normal, "--steps", 20, "--out", "run", "-q")
    printed = aevb("evaluate", "run", "--data", "large.npy", code=2)
    assert "columns 0, 1, 2 lie far from the rows that the model was trained on" in printed
    assert "Give the columns in the order and the units of the training rows." in printed
    assert "Not finite: elbo, x" in printed
    assert "lie far" not in aevb("evaluate", "run", "--data", "x.npy")


def test_numbers_from_0_to_1_are_prepared_images(aevb):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 4, 4), dtype=np.uint8)
    np.save("bytes.npy", pixels)
    np.save("floats.npy", ((pixels + 0.5) / 256).astype(np.float32))
    np.save("levels.npy", pixels.astype(np.float32))
    aevb("train", "vae", "--data", "bytes.npy", *SMALL, "--steps", 20, "--out", "run", "-q")
    printed = {name: aevb("evaluate", "run", "--data", f"{name}.npy") for name in
               ("bytes", "levels", "floats")}  # fmt: skip
    bounds = {name: figures(text)["elbo"] for name, text in printed.items()}
    assert bounds["levels"] == bounds["bytes"]
    assert bounds["floats"] == pytest.approx(bounds["bytes"], abs=0.2)
    note = "floats.npy holds numbers from 0 to 1, which are taken as prepared (dequantise), not as"
    assert note in printed["floats"]
    assert "as prepared" not in printed["bytes"] + printed["levels"]
