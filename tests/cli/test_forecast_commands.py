"""The commands forecast and smooth: the model's numbers in the units and times of files."""

import csv
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import aevb
from aevb import cli, fit

LEVEL = """
from aevb import GRU, Bernoulli, Model, Normal, OneHot, mlp

def level():
    return Model(
        {"l[0]": Normal(1, learned=True), "l[t] | l[t-1]": Normal(1, scale="learned"),
         "flow[t] | l[t]": Normal(1, scale="learned")},
        {"l[t] | flow[t]": Normal()},
    )

def two():
    return Model(
        {"l[t] | l[t-1]": Normal(2, scale="learned"), "x[t] | l[t]": Normal(2, scale="learned")},
        {"l[t] | x[t]": Normal()},
    )

def states():
    return Model(
        {"s[t] | s[t-1]": OneHot(2), "x[t] | s[t]": Normal(1, scale="learned")},
        {"s[t] | x[t]": OneHot()},
    )

def driven():
    return Model(
        {"l[t] | l[t-1], u[t]": Normal(1, scale="learned"),
         "x[t] | l[t]": Normal(1, scale="learned")},
        {"l[t] | x[t]": Normal()}, given={"u": 1},
    )

def recurrent():
    return Model(
        {"h[t] | h[t-1], x[t-1]": GRU(3), "l[t] | h[t]": Normal(1),
         "x[t] | l[t], h[t]": Bernoulli(2, net=mlp(3))},
        {"l[t] | h[t], x[t]": Normal()},
    )
"""


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert not stop.value.code, printed.err
    return printed.out


def mistake(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(LEVEL)
    return tmp_path


def read(path):
    with open(path, newline="") as file:
        header, *lines = csv.reader(file)
    columns = zip(*([float(cell) for cell in line] for line in lines), strict=True)
    return dict(zip(header, map(np.array, columns), strict=True))


def flows(n=40):
    return np.round(900 + 30 * np.random.default_rng(0).normal(size=n).cumsum())


def write(path, header, lines):
    path.write_text("\n".join([header, *(",".join(map(str, line)) for line in lines)]) + "\n")


def trained(monkeypatch, capsys, model, data, *more):
    run(
        monkeypatch, capsys, "train", f"models.py:{model}", "--data", data, "--out", "run",
        "--steps", 20, *more,
    )  # fmt: skip


def test_years_go_on_in_the_units_of_the_data(place, monkeypatch, capsys):
    values = flows()
    write(place / "nile.csv", "year,flow", zip(range(1871, 1911), values, strict=True))
    trained(
        monkeypatch, capsys, "level", "nile.csv", "--prepare", "standardise", "--schedule", "mle"
    )
    printed = run(
        monkeypatch, capsys, "forecast", "run", "--steps", 5, "--out", "next.csv", "--plot", "n.png"
    )
    assert printed.startswith("5 steps after 1 sequence of 40 steps (year 1871 to 1910), in next.")
    assert "(exact: known for this model)" in printed
    found = read("next.csv")
    assert list(found) == [
        "year", "flow_mean", "flow_sd",
        "flow_lower_80", "flow_upper_80", "flow_lower_95", "flow_upper_95",
    ]  # fmt: skip
    assert found["year"].tolist() == [1911, 1912, 1913, 1914, 1915]
    model = aevb.load_run("run")
    mean, spread = values.mean(), values.std()
    expected = model.forecast(steps=5, flow=((values - mean) / spread)[None, :, None])
    close = {"rtol": 1e-4}
    middle = expected.mean["flow"][0, :, 0].detach().numpy()
    np.testing.assert_allclose(found["flow_mean"], mean + spread * middle, **close)
    np.testing.assert_allclose(
        found["flow_sd"], spread * expected.sd["flow"][0, :, 0].numpy(), **close
    )
    ends = expected.quantile([0.1, 0.9, 0.025, 0.975])["flow"][:, 0, :, 0].numpy()
    for name, end in zip(list(found)[3:], ends, strict=True):
        np.testing.assert_allclose(found[name], mean + spread * end, **close)
    with Image.open("n.png") as picture:
        assert picture.width > 500


def test_each_row_goes_on_after_its_own_end(place, monkeypatch, capsys):
    lines = [(7, t, t % 3, 1 - t) for t in range(6)] + [(9, t, 2 * t, t) for t in range(4)]
    write(place / "long.csv", "id,step,a,b", lines)
    trained(monkeypatch, capsys, "two", "long.csv")
    run(monkeypatch, capsys, "forecast", "run", "--steps", 2, "--out", "next.csv")
    found = read("next.csv")
    assert found["id"].tolist() == [7, 7, 9, 9]
    assert found["step"].tolist() == [6, 7, 4, 5]
    assert {"a_mean", "b_mean", "a_upper_95", "b_sd"} < set(found)
    run(monkeypatch, capsys, "smooth", "run", "--out", "states.csv")
    states = read("states.csv")
    assert list(states) == ["id", "step", "l0_mean", "l0_sd", "l1_mean", "l1_sd"]
    assert states["step"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    run(monkeypatch, capsys, "smooth", "run", "--filter", "--out", "filtered.csv")
    filtered = read("filtered.csv")
    for last in (5, 9):
        assert filtered["l0_mean"][last] == pytest.approx(states["l0_mean"][last], rel=1e-4)
    assert filtered["l0_mean"][0] != pytest.approx(states["l0_mean"][0], rel=1e-4)


def test_a_line_per_row_and_another_file(place, monkeypatch, capsys):
    rows = np.random.default_rng(0).normal(size=(30, 6)).round(3)
    write(place / "wide.csv", ",".join(f"x{i}" for i in range(6)), rows)
    write(place / "other.csv", ",".join(f"x{i}" for i in range(6)), rows[:2])
    trained(monkeypatch, capsys, "states", "wide.csv")
    printed = run(
        monkeypatch, capsys, "forecast", "run", "other.csv", "--steps", 2, "--out", "next.csv",
    )  # fmt: skip
    assert printed.startswith("2 steps after 2 sequences of 6 steps, in next.csv")
    found = read("next.csv")
    assert (found["row"].tolist(), found["step"].tolist()) == ([0, 0, 1, 1], [6, 7, 6, 7])
    model = aevb.load_run("run")
    expected = model.forecast(steps=2, x=rows[:2, :, None], samples=1).mean["x"].reshape(-1)
    np.testing.assert_allclose(found["x_mean"], expected, rtol=1e-4)
    run(monkeypatch, capsys, "smooth", "run", "other.csv", "--out", "states.csv")
    states = read("states.csv")
    assert list(states) == ["row", "step", "s_p0", "s_p1"]
    np.testing.assert_allclose(states["s_p0"] + states["s_p1"], 1, atol=1e-5)


def test_particles_are_named_and_seeded(place, monkeypatch, capsys):
    rows = (np.random.default_rng(0).random((8, 5, 2)) < 0.5).astype(np.float32)
    np.savez(place / "rows.npz", x=rows)
    trained(monkeypatch, capsys, "recurrent", "rows.npz")
    command = ["forecast", "run", "--steps", 3, "--samples", 40]
    printed = run(monkeypatch, capsys, *command, "--out", "a.npz", "--plot", "p.svg")
    assert "(particles, 40 draws: 1000 particles; not exact: " in printed
    run(monkeypatch, capsys, *command, "--out", "b.npz")
    run(monkeypatch, capsys, *command, "--seed", 1, "--out", "c.npz")
    a, b, c = (dict(np.load(name)) for name in ("a.npz", "b.npz", "c.npz"))
    assert a["x0_mean"].shape == (8, 3)
    assert np.array_equal(a["x0_mean"], b["x0_mean"])
    assert not np.array_equal(a["x0_mean"], c["x0_mean"])
    printed = run(monkeypatch, capsys, "smooth", "run", "--samples", 20, "--out", "s.csv")
    assert "l of 8 sequences of 5 steps, given all data, in s.csv (particles: " in printed


def test_bad_commands(place, monkeypatch, capsys):
    values = flows(12)
    write(place / "nile.csv", "year,flow", zip(range(1871, 1883), values, strict=True))
    trained(monkeypatch, capsys, "level", "nile.csv", "--schedule", "mle")

    def said(*arguments):
        return mistake(monkeypatch, capsys, *arguments)

    assert "--out forecast.csv, --plot forecast.png, or both" in said("forecast", "run")
    assert "--steps must be at least 1" in said("forecast", "run", "--steps", 0, "--out", "a.csv")
    assert "--samples must be at least 1" in said(
        "forecast", "run", "--samples", 0, "--out", "a.csv"
    )
    assert "write a .csv or a .npz file" in said("forecast", "run", "--out", "a.xlsx")
    assert ".png, .svg or .pdf" in said("forecast", "run", "--plot", "a.csv")
    assert "is the file that the data are read from" in said("forecast", "run", "--out", "nile.csv")
    assert "--out states.csv" in said("smooth", "run")

    (place / "run" / "data.json").rename(place / "kept.json")
    assert "run/data.json is missing" in said("forecast", "run", "--out", "a.csv")


def test_a_model_with_inputs_or_without_time_is_refused(place, monkeypatch, capsys):
    generator = torch.Generator().manual_seed(0)
    x, u = torch.randn(2, 10, 6, 1, generator=generator).numpy()
    np.savez(place / "rows.npz", x=x, u=u)
    trained(monkeypatch, capsys, "driven", "rows.npz")
    said = mistake(monkeypatch, capsys, "forecast", "run", "--out", "a.csv")
    assert (
        "needs its future: --given FILE, a .npz file with the arrays u of shape [10, 12, size], "
        "for the 12 steps after the end of each row." in said
    )
    model = aevb.zoo.vae(4, 2, hidden=(3,))
    fit(model, {"x": np.random.default_rng(0).random((20, 4))}, steps=2, out="vae", progress=False)
    said = mistake(monkeypatch, capsys, "forecast", "vae", "--out", "a.csv")
    assert "has no sequences: no observed variable has [t]" in said


def test_the_future_of_given_variables_comes_from_a_file(place, monkeypatch, capsys):
    """The forecast is that of Python with the same future, whatever the order of the lines."""
    rng = np.random.default_rng(0)
    lines = [(i, 1990 + t, *rng.normal(size=2).round(3)) for i, n in ((7, 6), (3, 8))
             for t in range(n)]  # fmt: skip
    write(place / "long.csv", "id,year,x,u", lines)
    trained(monkeypatch, capsys, "driven", "long.csv", "--schedule", "mle")
    future = [(3, 1998, 1, "a"), (3, 1999, 2, "b"), (7, 1995, 9, "c"), (7, 1996, 3, "d"),
              (7, 1997, 4, "e")]  # fmt: skip
    write(place / "next.csv", "id,year,u,note", future)
    command = ["forecast", "run", "--steps", 2, "--out", "ahead.csv"]
    run(monkeypatch, capsys, *command, "--given", "next.csv")
    found = read("ahead.csv")
    assert found["id"].tolist() == [3, 3, 7, 7]
    assert found["year"].tolist() == [1998, 1999, 1996, 1997]
    data = aevb.sequences(_frame(lines), id="id", time="year")
    u = torch.tensor([[[3.0], [4.0]], [[1.0], [2.0]]])
    expected = aevb.load_run("run").forecast(
        steps=2, x=data["x"], u=data["u"], given={"u": u}, samples=1
    )
    np.testing.assert_allclose(
        found["x_mean"], expected.mean["x"][[1, 0], :, 0].reshape(-1), rtol=1e-4
    )
    np.savez(place / "next.npz", u=u[[1, 0]].numpy())
    run(monkeypatch, capsys, *command[:-1], "same.csv", "--given", "next.npz")
    assert (place / "same.csv").read_text() == (place / "ahead.csv").read_text()

    def said(header, lines):
        write(place / "bad.csv", header, lines)
        return mistake(monkeypatch, capsys, *command, "--given", "bad.csv")

    assert "--given bad.csv: it has no column 'year', which numbers the lines" in said(
        "id,u", [(3, 1)]
    )
    assert "u needs the column u; its columns are id, year, v" in said("id,year,v", [(3, 1998, 1)])
    assert "bad.csv: the future of u lacks the id 7." in said(
        "id,year,u", [(3, 1998, 1), (3, 1999, 1)]
    )
    assert "lacks the year 1997 of id 7; the forecast goes from 1996 to 1997" in said(
        "id,year,u", [(3, 1998, 1), (3, 1999, 1), (7, 1996, 3)]
    )
    assert "the future of u is missing in row 0" in said(
        "id,year,u", [(3, 1998, ""), (3, 1999, 1), (7, 1996, 3), (7, 1997, 4)]
    )
    marked = [(3, 1998, -9), (3, 1999, 1), (7, 1996, 3), (7, 1997, 4)]
    write(place / "bad.csv", "id,year,u", marked)
    assert "the future of u is missing in row 0" in mistake(
        monkeypatch, capsys, *command, "--given", "bad.csv", "--missing", -9
    )
    assert "is the file that the data are read from" in mistake(
        monkeypatch, capsys, *command[:-1], "next.csv", "--given", "next.csv"
    )
    nothing = mistake(monkeypatch, capsys, *command)
    assert (
        "p is conditioned on u[t], so a forecast needs its future: --given FILE, a table with the "
        "columns u, for year 1996 to 1999 of each id." in nothing
    )
    assert "is the future of given variables in time, and p has none" in _without_given(
        place, monkeypatch, capsys
    )


def _without_given(place, monkeypatch, capsys):
    write(place / "plain.csv", "flow", [(value,) for value in flows(12)])
    run(
        monkeypatch, capsys, "train", "models.py:level", "--data", "plain.csv", "--out", "plain",
        "--steps", 2, "--schedule", "mle",
    )  # fmt: skip
    return mistake(
        monkeypatch, capsys, "forecast", "plain", "--out", "a.csv", "--given", "plain.csv"
    )


def _frame(lines):
    import pandas as pd

    return pd.DataFrame(lines, columns=["id", "year", "x", "u"])


DATED = """date,series,flow
2024-01-31,north,910
2024-02-29,north,930
2024-03-31,north,
2024-04-30,north,960
2024-02-29,south,890
2024-03-31,south,870
2024-04-30,south,905
"""


def test_holes_in_the_times_are_missing_steps_when_asked(place, monkeypatch, capsys):
    """The results are those of the same file with a line of an empty cell."""
    monkeypatch.setattr("aevb.training.run.Run.plot", lambda run, path: None)  # slow
    whole = "month,flow\n" + "".join(f"2024-{i:02},{i % 3}\n" for i in range(1, 10))
    (place / "whole.csv").write_text(whole.replace("2024-04,1", "2024-04,"))
    (place / "holed.csv").write_text(whole.replace("2024-04,1\n", ""))
    train = ("train", "models.py:level", "--steps", 3, "--schedule", "mle", "--data")
    told = mistake(monkeypatch, capsys, *train, "holed.csv", "--out", "no")
    assert "from month 2024-03 to 2024-05" in told
    assert "add the missing steps (--gaps missing" in told
    run(monkeypatch, capsys, *train, "whole.csv", "--out", "whole")
    run(monkeypatch, capsys, *train, "holed.csv", "--out", "holed", "--gaps", "missing")
    for command in ("forecast", "impute"):
        run(monkeypatch, capsys, command, "whole", "--out", "whole-out.csv")
        run(monkeypatch, capsys, command, "holed", "--out", "holed-out.csv")  # the run keeps it
        assert (place / "whole-out.csv").read_text() == (place / "holed-out.csv").read_text()
        mistake(monkeypatch, capsys, command, "whole", "holed.csv", "--out", "other.csv")
        run(
            monkeypatch, capsys, command, "whole", "holed.csv", "--gaps", "missing",
            "--out", "other.csv",
        )  # fmt: skip
        assert (place / "other.csv").read_text() == (place / "whole-out.csv").read_text()
    assert 'gaps is "missing" or left out' in mistake(
        monkeypatch, capsys, "smooth", "whole", "--gaps", "no", "--out", "other.csv"
    )


def test_dates_and_words_number_the_results(place, monkeypatch, capsys):
    """All commands take the file; the values are those of the same file with numbers."""
    (place / "dated.csv").write_text(DATED)
    months = {"2024-01-31": "1", "2024-02-29": "2", "2024-03-31": "3", "2024-04-30": "4"}
    text = DATED.replace("date,series", "month,id").replace("north", "0").replace("south", "1")
    for date, number in months.items():
        text = text.replace(date, number)
    (place / "numbers.csv").write_text(text)
    found = {}
    for name in ("dated", "numbers"):
        data = place / f"{name}.csv"
        out = run(
            monkeypatch, capsys, "train", "models.py:level", "--data", data, "--out", name,
            "--steps", 3, "--prepare", "standardise", "--schedule", "mle",
        )  # fmt: skip
        for command, more in {
            "forecast": ["--steps", 2],
            "smooth": [],
            "encode": [],
            "impute": [],
        }.items():
            file = place / f"{name}-{command}.csv"
            out = run(monkeypatch, capsys, command, name, *more, "--out", file)
            assert name != "dated" or "(date 2024-01-31 to 2024-04-30)" in out
            found[name, command] = [line.split(",") for line in file.read_text().splitlines()]
        run(monkeypatch, capsys, "evaluate", name)
    for command in ("forecast", "smooth", "encode", "impute"):
        dated, numbers = found["dated", command], found["numbers", command]
        assert dated[0][:2] == ["series", "date"]
        assert [line[2:] for line in dated] == [line[2:] for line in numbers]
        assert [line[0] for line in dated[1:]] == [
            ("north", "south")[int(line[0])] for line in numbers[1:]
        ]
        known = months | {"2024-05-31": "5", "2024-06-30": "6"}
        assert [known[line[1]] for line in dated[1:]] == [line[1] for line in numbers[1:]]
    assert len(found["dated", "impute"]) == 8
    assert len(found["dated", "forecast"]) == 5
    run(monkeypatch, capsys, "forecast", "dated", "--plot", "dated.png")
    with Image.open("dated.png") as picture:
        assert picture.width > 300


def test_months_of_the_future_of_given_variables(place, monkeypatch, capsys):
    lines = [("2023-10", 1, 0.5), ("2023-11", 2, 0.1), ("2023-12", 1, 0.3), ("2024-01", 2, 0.2)]
    write(place / "past.csv", "month,x,u", lines)
    trained(monkeypatch, capsys, "driven", "past.csv", "--schedule", "mle")
    command = ["forecast", "run", "--steps", 2, "--out", "ahead.csv"]
    assert "for month 2024-02 to 2024-03." in mistake(monkeypatch, capsys, *command)
    write(place / "next.csv", "month,u", [("2024-02", 1), ("2024-03", 2)])
    run(monkeypatch, capsys, *command, "--given", "next.csv")
    found = [line.split(",")[0] for line in (place / "ahead.csv").read_text().splitlines()]
    assert found == ["month", "2024-02", "2024-03"]
