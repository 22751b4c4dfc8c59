"""Time series as files and arrays: a line a time point is a step, never a row of one step."""

import re

import numpy as np
import pytest
import torch

from aevb import Model, Normal, OneHot, fit
from aevb.data.datasets import load
from aevb.data.files import layout, read_file, read_lines
from aevb.data.sources import open_source
from aevb.data.time_steps import Spacing

YEARS, VOLUME = (
    np.arange(1871, 1881),
    np.array([1120, 1160, 963, 1210, 1160, 1160, 813, 1230, 1370, 1140], dtype=float),
)


def level(d=1):
    return Model({"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(d)}, {"z[t] | x[t]": Normal()})


def table(header, *columns):
    lines = [",".join(f"{value:.12g}" for value in line) for line in zip(*columns, strict=True)]
    return "\n".join([header] * bool(header) + lines) + "\n"


ONE_SEQUENCE = {
    "year and value": table("year,volume", YEARS, VOLUME),
    "year, not first": table("volume,Year", VOLUME, YEARS),
    "backwards": table("year,volume", YEARS[::-1], VOLUME[::-1]),
    "one column": table("volume", VOLUME),
    "no header": table("", VOLUME),
    "id, time, value": table("id,time,value", np.zeros(10), YEARS, VOLUME),
    "value, row, step": table("x,row,step", VOLUME, np.zeros(10), np.arange(10)),
    "step alone": table("x,step", VOLUME, np.arange(10)),
    "an id of two words": table("Patient ID,reaction_time", np.zeros(10), VOLUME),
    "id alone": table("id,x", np.zeros(10), VOLUME),
    "months as rounded years": table("time,x", np.round(1949 + np.arange(10) / 12, 3), VOLUME),
    "every second month": table("month,x", np.arange(0, 20, 2), VOLUME),
}


@pytest.mark.parametrize("text", ONE_SEQUENCE.values(), ids=ONE_SEQUENCE.keys())
def test_a_line_a_time_point_is_a_step(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    model = level()
    assert read_file(tmp_path / "t.csv", model.graph)["x"].tolist() == [
        [[value] for value in VOLUME]
    ]
    assert layout(tmp_path / "t.csv", model.graph)[1]
    assert open_source(model.graph, tmp_path / "t.csv", model._parameter()).batch["x"].shape == (
        10,
        1,
        1,
    )
    assert open_source(model.graph, {"x": tmp_path / "t.csv"}, model._parameter()).batch[
        "x"
    ].shape == (10, 1, 1)


def test_vectors_and_several_variables_a_line_are_one_sequence(tmp_path):
    (tmp_path / "t.csv").write_text("x0,x1\n1,2\n3,4\n5,6\n")
    assert read_file(tmp_path / "t.csv", level(2).graph)["x"].tolist() == [[[1, 2], [3, 4], [5, 6]]]
    model = Model(
        {"y[t] | u[t]": OneHot(3), "x[t] | y[t]": Normal(1)},
        {"y[t] | x[t]": OneHot()},
        given={"u": 2},
    )
    (tmp_path / "u.csv").write_text("x,u,y\n1,0,0\n3,1,2\n5,1,1\n")
    found = read_file(tmp_path / "u.csv", model.graph)
    assert (found["x"].shape, found["u"].tolist(), found["y"].tolist()) == (
        (1, 3, 1),
        [[0, 1, 1]],
        [[0, 2, 1]],
    )


def test_rows_of_a_panel_have_their_own_numbers(tmp_path):
    """What a command writes is numbered as the file was: its ids, its years; rows may begin in
    different years.
    """
    (tmp_path / "t.csv").write_text(
        "subject,year,x\n7,2001,1\n7,2002,2\n3,1999,3\n3,2000,4\n3,2001,5\n"
    )
    found, lines = read_lines(tmp_path / "t.csv", level().graph)
    assert [row.tolist() for row in found["x"]] == [[[3], [4], [5]], [[1], [2]]]
    assert (lines.rows.tolist(), lines.begins.tolist()) == ([3, 7], [1999, 2001])
    assert lines.spacing == Spacing("number", 1.0)
    assert lines.numbers(np.array([0, 0, 1]), np.array([0, 2, 1])) == [
        "3,1999,",
        "3,2001,",
        "7,2002,",
    ]
    assert (lines.keys.names, lines.span) == (("subject", "year"), "year 1999 to 2002")
    (tmp_path / "m.csv").write_text(
        table("time,x", np.round(1949 + np.arange(120) / 12, 3), np.zeros(120))
    )
    last = read_lines(tmp_path / "m.csv", level().graph)[1].numbers(np.array([0]), np.array([119]))
    # what rounding took away does not add up
    assert abs(float(last[0].rstrip(",")) - (1949 + 119 / 12)) < 1e-3
    # no time: three columns
    bare = read_lines(
        tmp_path / "t.csv", Model({"z": Normal(1), "x | z": Normal(3)}, {"z | x": Normal()}).graph
    )
    assert (bare[0]["x"].shape, bare[1]) == ((5, 3), None)


REFUSED = {
    "a count of the lines": (
        table("when,volume", YEARS, VOLUME),
        "its column 'when' counts the lines (1871, 1872, …, 1880)",
    ),
    "a count without a header": (
        table("", VOLUME, YEARS),
        "its column '2' counts the lines (1871, 1872, …, 1880)",
    ),
    "an id a row": (
        "id,a\n0,1\n1,3\n",
        "its column 'id' numbers the lines one by one, and no column numbers the steps.",
    ),
    "an id a line": (
        table("id,year,volume", np.arange(10), YEARS, VOLUME),
        "its column 'id' numbers the lines one by one, so each line would be a",
    ),
    "two times": (
        "year,month,x\n2000,1,1\n2000,2,1\n",
        "its columns 'year' and 'month' look like the time of a step. Rename the right one to",
    ),
    "a gap": (
        "year,x\n1,1\n2,1\n3,1\n5,1\n",
        "goes from year 3 to 5, where steps are 1 apart. If nothing was observed between",
    ),
    "a gap in a row": ("id,t,x\n1,1,1\n1,2,1\n9,1,1\n9,2,1\n9,4,1\n", "row 9 goes from t 2 to 4"),
    "two rows without numbers": (
        "year,x\n1,1\n2,1\n1,1\n2,1\n",
        "has the year 1 twice. If its lines belong to several rows",
    ),
    "a count in fractions": (
        table("", np.round(1871 + np.arange(10) / 12, 6), VOLUME),
        "its column '1' counts the lines (1871, 1871.08",
    ),
    "years out of order": (
        table("ano,volume", np.roll(YEARS, 3), VOLUME),
        "its column 'ano' has every number from 1871 to 1880 once",
    ),
    "uneven times": (
        table("zeit,volume", np.cumsum([1, 4, 2, 2, 1, 3, 5, 1, 2, 1]), VOLUME),
        "its column 'zeit' is in order (1, 5, …, 22)",
    ),
    "months by number": (
        table("yyyymm,x", [*range(200010, 200013), *range(200101, 200108)], VOLUME),
        "its column 'yyyymm' is in order",
    ),
    "visits": (
        table("a,b,visit", VOLUME, VOLUME, np.arange(10) % 5),
        "its column 'visit' counts repeatedly from 0 (0, 1, 2, …)",
    ),
    "ids in the middle": (
        table("a,person,b", VOLUME, np.arange(10) // 2, VOLUME),
        "its column 'person' is in order (0, 0, …, 4)",
    ),
    "a name of its own beside another": (
        table("x,weight", VOLUME, VOLUME[::-1]),
        "its columns 'x' and 'weight' would be two steps of x",
    ),
    "ids in words, one line each": (
        "subject,t,x\nA,0,1\nB,0,2\n",
        "its column 'subject' numbers the lines one by one, so each line would be a sequence",
    ),
    "an id is missing": (
        "subject,t,x\nA,0,1\n,1,2\nA,2,3\n",
        "row 1 (from 0) has no subject. Fill in the cell, or drop the line.",
    ),
    "names in words": (
        "country,t,x\nA,0,1\nB,0,2\n",
        "If they name the sequences, rename the column to id.",
    ),
    "months beside a year": (
        "year,jan,feb\n2000,1,2\n2001,3,4\n",
        "because the column 'year' numbers them; if a line is a whole row",
    ),
    "dates of another form": (
        "date,x\n31/01/2001,1\n28/02/2001,2\n",
        "line 2, column 'date' holds '31/01/2001', a date or a time, not a number. If it is the "
        "time of a step, write it as 2024-03-01 or 2024-03-01 12:30 in a column date, or number "
        "the steps 0, 1, 2, … in a column step",
    ),
    "dates of two forms": (
        "date,x\n2001-01-31,1\n28/02/2001,2\n",
        "its column 'date' has '28/02/2001' in row 1 (from 0), but '2001-01-31' in row 0. Write "
        "all dates of it in one way",
    ),
    "a date is missing": (
        "date,x\n2001-01-31,1\n,2\n2001-02-02,2\n",
        "row 1 (from 0) has no date. Fill in the cell, or drop the line.",
    ),
    "a date occurs twice": (
        "date,x\n2001-01-31,1\n2001-01-31,2\n2001-02-01,2\n",
        "it has the date 2001-01-31 twice. If its lines belong to several rows",
    ),
    "a hole between dates": (
        "id,date,x\na,2001-01-01,1\na,2001-01-02,2\nb,2001-01-03,1\nb,2001-01-05,2\n",
        "row b goes from date 2001-01-03 to 2001-01-05, where steps are 1 day apart. If "
        "nothing was observed between, add the missing steps (--gaps missing, or "
        'aevb.sequences(frame, gaps="missing")), or number the steps 0, 1, 2, … in a column step',
    ),
    "months as numbers": (
        "month,x\n201011,1\n201012,2\n201101,1\n",
        "its times (month) are dates written as whole numbers, 201011 to 201101, and numbers have "
        "other distances than dates. Write them as dates, such as 2010-12 or 2010-12-31. If they "
        "number the steps, subtract the first from each: 0, 1, 2, ….",
    ),
    "uneven dates": (
        "date,x\n2001-01-01,1\n2001-01-03,2\n2001-01-06,1\n",
        "some of its steps (date) are 2 days and 3 days apart, but all steps of a model have one "
        "length. Round the times, or number the steps 0, 1, 2, … in a column step",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_may_be_a_time_is_never_data(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_file(tmp_path / "t.csv", level().graph)


def test_vectors_with_a_count_among_them_are_refused(tmp_path):
    for text, message in (
        (
            table("Jahr,a", YEARS, VOLUME),
            "its column 'Jahr' counts the lines (1871, 1872, …, 1880). If it numbers the steps, "
            "rename it to step",
        ),
        (
            table("subject,visit,score", np.arange(10) // 5, np.arange(10) % 5, VOLUME),
            "its column 'visit' counts repeatedly from 0",
        ),
    ):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_file(tmp_path / "t.csv", level(2).graph)
    (tmp_path / "t.csv").write_text(
        table("patient_id,x0,x1", np.arange(10) // 5, np.arange(10) % 5, VOLUME)
    )
    # the header says that it is x's
    assert read_file(tmp_path / "t.csv", level(2).graph)["x"].shape == (2, 5, 2)


def test_an_array_with_a_column_of_times_is_refused():
    model, pairs = (
        level(),
        torch.stack(
            [
                torch.arange(1871.0, 1901.0),
                torch.randn(30, generator=torch.Generator().manual_seed(0)),
            ],
            1,
        ),
    )
    for call in (lambda: model.log_evidence(x=pairs), lambda: fit(model, {"x": pairs}, steps=1)):
        with pytest.raises(
            ValueError,
            match=r"30 sequences of 2 steps, of which step 0 counts the sequences \(1871, 1872, "
            r"…\).*lengths=2",
        ):
            call()
    assert model.log_evidence(x=pairs, lengths=2, seed=0).value.shape == (30,)


def test_a_column_a_step_is_read_as_before(tmp_path):
    # named after x, a count is data
    (tmp_path / "x.csv").write_text(table("x0,x1,x2", YEARS, VOLUME, VOLUME))
    assert read_file(tmp_path / "x.csv", level().graph)["x"].shape == (10, 3)
    (tmp_path / "t.csv").write_text("1,2,3\n4,5,7\n")
    assert read_file(tmp_path / "t.csv", level().graph)["x"].tolist() == [[1, 2, 3], [4, 5, 7]]
    # a variable of that name is data
    model = Model({"z[t]": Normal(1), "year[t] | z[t]": Normal(1)}, {"z[t] | year[t]": Normal()})
    (tmp_path / "y.csv").write_text("year\n3\n1\n4\n")
    assert read_file(tmp_path / "y.csv", model.graph)["year"].tolist() == [[[3], [1], [4]]]


ONE_STEP = (
    "x holds 10 sequences of one step each; the axes are [N, T, …]. If they are the 10 steps of "
    "one sequence"
)


def test_sequences_of_one_step_must_be_asked_for(tmp_path):
    model, series = level(), torch.as_tensor((VOLUME - VOLUME.mean()) / VOLUME.std())
    np.save(tmp_path / "x.npy", VOLUME[:, None])
    (tmp_path / "x.csv").write_text("row,step,x\n" + "".join(f"{i},0,1\n" for i in range(10)))
    wrong = {
        "log_evidence": lambda: model.log_evidence(x=series[:, None]),
        "elbo": lambda: model.elbo(x=series[:, None, None]),
        "posterior": lambda: model.posterior(x=series[:, None]),
        "reconstruct": lambda: model.reconstruct(x=series[:, None]),
        "fit": lambda: fit(model, {"x": series[:, None]}, steps=1),
        "fit a list": lambda: fit(model, {"x": [[value] for value in VOLUME.tolist()]}, steps=1),
        "fit a mapped file": lambda: fit(model, tmp_path / "x.npy", steps=1),
        "fit a table": lambda: fit(model, tmp_path / "x.csv", steps=1),
    }
    for call in wrong.values():
        with pytest.raises(ValueError, match=re.escape(ONE_STEP)):
            call()
    alone = model.log_evidence(x=series.reshape(1, 10, 1)).value
    assert alone.shape == (1,)
    asked = model.log_evidence(x=series[:, None], lengths=1, seed=0).value
    assert torch.equal(asked, model.log_evidence(x=series[:, None], lengths=[1] * 10, seed=0).value)
    assert model.log_evidence(x=series[:1, None]).value.shape == (1,)  # one number has one reading
    for data in ({"x": series[:, None], "lengths": 1}, {"x": tmp_path / "x.npy", "lengths": 1}):
        assert open_source(model.graph, data, model._parameter()).n == 10
    with pytest.raises(ValueError, match=r"lengths=3, but x has 1 step\. Leave out lengths="):
        model.elbo(x=series[:, None], lengths=3)
    with pytest.raises(ValueError, match="steps= and lengths= are for sequences"):
        Model({"z": Normal(1), "x | z": Normal(1)}, {"z | x": Normal()}).elbo(
            x=series[:, None], lengths=1
        )


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_file_with_one_axis_is_refused_with_the_fix(tmp_path, suffix):
    path = tmp_path / f"series.{suffix}"
    np.save(path, VOLUME) if suffix == "npy" else np.savez(path, x=VOLUME)
    series = Model(
        {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()}
    )
    with pytest.raises(ValueError, match=rf"save x\.reshape\(1, {len(VOLUME)}, 1\)"):
        load(str(path), series.graph)
