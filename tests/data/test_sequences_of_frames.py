"""Frames with a time index or an id column are sequences, and results come back in that index."""

import re

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import aevb
from aevb import Model, Normal, OneHot, fit, mle, sequences

NAN = float("nan")
VALUES = np.random.default_rng(0).normal(size=(17, 3))


def level(seed=0):
    torch.manual_seed(seed)
    return Model(
        {
            "l[t] | l[t-1], u[t]": Normal(1, scale="learned"),
            "x[t] | l[t]": Normal(2, scale="learned"),
        },
        {"l[t] | x[t]": Normal()},
        given={"u": 1},
    ).double()


def walk():
    return Model(
        {"l[t] | l[t-1]": Normal(1), "x[t] | l[t]": Normal(1, scale="learned")},
        {"l[t] | x[t]": Normal()},
    ).double()


MODEL, WALK = level(), walk()
MONTHS = pd.date_range("2024-01-31", periods=17, freq="ME")
FRAME = pd.DataFrame(VALUES, index=MONTHS, columns=["a", "b", "u"])
# Two countries, year by year, of 9 and 8 years.
LONG = pd.DataFrame(
    {"country": ["no", "se"] * 8 + ["no"], "year": 1990 + np.arange(17) // 2}
    | dict(zip(("a", "b", "u"), VALUES.T, strict=True))
)


@pytest.mark.parametrize(
    "frequency",
    ["MS", "ME", "QS", "QE", "YS", "YE", "2YE", "D", "B", "2D", "W", "W-MON", "h", "15min"],
)
def test_the_times_ahead_are_those_of_pandas(frequency):
    every = pd.date_range("2024-01-03", periods=30, freq=frequency, name="when")
    found = WALK.forecast(steps=16, x=pd.Series(0.0, every[:14]), samples=1, seed=0).frame()
    pd.testing.assert_index_equal(found.index, every[14:], check_exact=True, check_freq=False)


def test_periods_zones_and_numbers_go_on():
    def ahead(index):
        return WALK.forecast(steps=2, x=pd.Series(0.0, index), samples=1, seed=0).frame().index

    for frequency in ("M", "Q", "W", "Y"):
        every = pd.period_range("2020-01", periods=7, freq=frequency)
        assert ahead(every[:5]).equals(every[5:])
    # A day has 23 hours when the clocks change; an hour is an hour.
    for start, frequency in (("2024-03-29", "D"), ("2024-03-30 22:00", "h")):
        every = pd.date_range(start, periods=6, freq=frequency, tz="Europe/Oslo")
        pd.testing.assert_index_equal(
            ahead(every[:4]), every[4:], check_exact=True, check_freq=False
        )
    assert ahead(pd.Index([1871, 1873, 1875], name="year")).tolist() == [1877, 1879]
    assert ahead(pd.RangeIndex(3)).tolist() == [3, 4]
    rounded = ahead(pd.Index(np.round(1949 + np.arange(24) / 12, 3)))
    assert rounded.to_numpy() == pytest.approx(1951 + np.array([0, 1 / 12]), abs=1e-3)


def test_results_are_those_of_arrays_in_the_index_of_the_frame():
    x, u = FRAME[["a", "b"]].copy(), FRAME["u"]
    x.iloc[3, 0] = NAN
    arrays = {"x": x.to_numpy()[None], "u": u.to_numpy()[None, :, None]}
    later = pd.date_range("2025-06-30", periods=3, freq="ME")
    future = pd.Series([1.0, 2.0, 3.0], later)
    found = MODEL.forecast(steps=2, x=x, u=u, given={"u": future}, samples=3, seed=0)
    plain = MODEL.forecast(
        steps=2, **arrays, given={"u": future.to_numpy()[None, :2, None]}, samples=3, seed=0
    )
    assert torch.equal(found.draws["x"], plain.draws["x"])
    frame = found.frame([0.5])
    assert frame.index.equals(later[:2])
    assert list(frame) == [
        f"{entry}_{kind}" for entry in "ab" for kind in ("mean", "sd", "lower_50", "upper_50")
    ]
    np.testing.assert_array_equal(frame["b_mean"], plain.mean["x"][0, :, 1])
    low, high = plain.interval(0.5)["x"]
    np.testing.assert_array_equal(frame["a_lower_50"], low[0, :, 0])
    np.testing.assert_array_equal(frame["b_upper_50"], high[0, :, 1])

    truth = pd.DataFrame({"a": [0.0, 1.0, 2.0], "b": [1.0, NAN, 3.0]}, later)
    np.testing.assert_array_equal(
        found.log_prob(x=truth), plain.log_prob(x=truth.to_numpy()[None, :2])
    )
    for what in ("filter", "smooth"):
        beliefs = getattr(MODEL, what)(x=x, u=u).frame()
        assert beliefs.index.equals(MONTHS)
        expected = getattr(MODEL, what)(**arrays)
        np.testing.assert_array_equal(beliefs["l_mean"], expected.mean["l"][0, :, 0])
        np.testing.assert_array_equal(beliefs["l_sd"], expected.sd["l"][0, :, 0])
    filled = MODEL.impute(x=x, u=u, samples=2, seed=0).frame()
    pd.testing.assert_frame_equal(filled.drop(MONTHS[3]), x.drop(MONTHS[3]), check_freq=False)
    expected = MODEL.impute(**arrays, samples=2, seed=0).mean["x"][0, 3, 0]
    assert filled["a"].iloc[3] == float(expected)
    evidence = MODEL.log_evidence(x=x, u=u)
    assert float(evidence.value) == float(MODEL.log_evidence(**arrays).value)
    assert evidence.frame()["log_p"].tolist() == evidence.value.tolist()
    assert torch.equal(MODEL.elbo(x=x, u=u, seed=0).value, MODEL.elbo(**arrays, seed=0).value)


def test_imputed_variables_without_time_are_repeated_whatever_their_shape():
    """A variable of shape (3, 2) in sequences of 3 steps has no time axis."""
    torch.manual_seed(0)
    model = Model(
        {"c": Normal(1), "s | c": Normal((3, 2), scale=1.0), "x[t] | c": Normal(1, scale=1.0)},
        {"c | s": Normal()},
    )
    columns = [f"s{i}" for i in range(6)]
    values = np.repeat(np.arange(12.0).reshape(2, 6), 3, 0)
    frame = pd.DataFrame({"id": [0, 0, 0, 1, 1, 1], "x": np.arange(6.0)})
    frame[columns] = values
    frame.loc[1, "x"] = NAN
    read = sequences(frame, id="id")
    filled = model.impute(x=read["x"], s=read[columns], samples=2, seed=0).frame()
    assert np.array_equal(filled[columns].to_numpy(), values)
    assert np.isfinite(filled["x"]).all()


def test_an_id_makes_sequences_and_comes_back():
    rows = [LONG[LONG.country == name] for name in ("no", "se")]
    arrays = {
        "x": [row[["a", "b"]].to_numpy() for row in rows],
        "u": [row[["u"]].to_numpy() for row in rows],
    }
    ahead = np.ones((2, 2, 1))
    plain = MODEL.forecast(steps=2, **arrays, given={"u": ahead}, samples=1, seed=0)
    indexed = LONG.set_index(["country", "year"])
    future = pd.DataFrame({"country": list("nnss"), "year": [1999, 2000, 1998, 1999], "u": 1.0})
    future["country"] = future["country"].map({"n": "no", "s": "se"})
    named = sequences(LONG, id="country")
    assert repr(named) == (
        "2 sequences of 8 to 9 steps by country (year 1990 to 1998 in the first, 1 apart): a, b, u"
    )
    polars = sequences(pl.from_pandas(LONG), id="country", time="year")
    arrow = sequences(pa.Table.from_pandas(LONG), id="country", time="year")
    for library, data, given in (
        (pd.DataFrame, indexed, future.set_index(["country", "year"])),
        (pd.DataFrame, named, sequences(future, id="country")),
        (pl.DataFrame, polars, ahead),
        (pa.Table, arrow, ahead),
    ):
        given = {"u": given}
        found = MODEL.forecast(
            steps=2, x=data[["a", "b"]], u=data["u"], given=given, samples=1, seed=0
        )
        assert torch.equal(found.mean["x"], plain.mean["x"])
        frame = found.frame()
        assert isinstance(frame, library)
        if library is pd.DataFrame:
            assert frame.index.names == ["country", "year"]
            frame = frame.reset_index()
        country, year, mean = (list(frame[name]) for name in ("country", "year", "a_mean"))
        if library is pa.Table:
            country, year, mean = (
                [cell.as_py() for cell in each] for each in (country, year, mean)
            )
        assert country == ["no", "no", "se", "se"]
        assert year == [1999, 2000, 1998, 1999]
        np.testing.assert_array_equal(mean, plain.mean["x"][..., 0].reshape(-1))
    # The lines of the frame alternate between the countries; so do those of the result.
    states = MODEL.smooth(x=named[["a", "b"]], u=named["u"]).frame()
    assert states.index.tolist() == list(zip(LONG.country, LONG.year, strict=True))
    expected = MODEL.smooth(**arrays).mean["l"]
    np.testing.assert_array_equal(states["l_mean"].loc["se"], expected[1, :8, 0])
    evidence = MODEL.log_evidence(x=indexed[["a", "b"]], u=indexed["u"])
    assert evidence.frame().index.tolist() == ["no", "se"]
    assert torch.equal(evidence.value, MODEL.log_evidence(**arrays).value)


def test_fit_reads_the_columns_of_a_frame_by_name():
    renamed = LONG.rename(columns={"a": "x0", "b": "x1"})
    lengths = {"lengths": [9, 8]}
    rows = [renamed[renamed.country == name] for name in ("no", "se")]
    arrays = {
        name: np.stack([np.resize(row[columns].to_numpy(), (9, len(columns))) for row in rows])
        for name, columns in {"x": ["x0", "x1"], "u": ["u"]}.items()
    }
    found = []
    for data in (
        arrays | lengths,
        sequences(renamed, id="country"),
        renamed.set_index(["country", "year"]),
        {"x": sequences(LONG, id="country")[["a", "b"]], "u": sequences(LONG, id="country")["u"]},
    ):
        run = fit(model := level(), data, schedule=mle(), steps=3, progress=False)
        found.append((run.history["evidence"], model.factors["p(x[t]|l[t])"].net.blocks.bias))
    for history, bias in found[1:]:
        assert np.array_equal(history, found[0][0])
        assert torch.equal(bias, found[0][1])


def test_holes_are_filled_when_asked():
    gone = FRAME.drop(MONTHS[[4, 5, 9]])
    found = sequences(gone, gaps="missing")
    whole = FRAME.copy()
    whole.iloc[[4, 5, 9]] = NAN
    x = found[["a", "b"]].variable(MODEL.graph, "x")
    np.testing.assert_array_equal(x[0], whole[["a", "b"]])
    states = WALK.smooth(x=found["a"]).frame()
    assert states.index.equals(MONTHS)
    days = pd.date_range("2024-01-01", periods=20, freq="B").delete([3])
    assert len(sequences(pd.Series(0.0, days), gaps="missing").index.times[0]) == 20


def test_classes_constants_and_pictures(tmp_path):
    model = Model(
        {"k | c": Normal(1), "y[t] | k, y[t-1]": OneHot(3)},
        {"k | y[0]": Normal()},
        given={"c": 2},
    ).double()
    frame = pd.DataFrame(
        {"id": [7] * 4 + [5] * 4, "step": [0, 1, 2, 3] * 2, "c0": [1] * 4 + [2] * 4, "c1": 0.5,
         "y": [0, 1, 2, 0, 1, 1, 2, 0]}
    )  # fmt: skip
    found = sequences(frame)
    assert found[["c0", "c1"]].variable(model.graph, "c").tolist() == [[1, 0.5], [2, 0.5]]
    assert found["y"].variable(model.graph, "y").tolist() == [[0, 1, 2, 0], [1, 1, 2, 0]]
    ahead = model.forecast(
        steps=1, y=found["y"], c=found[["c0", "c1"]], samples=4, method="q", seed=0
    ).frame()
    assert list(ahead) == ["y0_p", "y1_p", "y2_p"]
    assert ahead.sum(axis=1).to_numpy() == pytest.approx(1)
    changing = sequences(frame.assign(c0=range(8)))
    with pytest.raises(ValueError, match="c has no time, but changes within row 7"):
        model.forecast(steps=1, y=changing["y"], c=changing[["c0", "c1"]])
    for index in (MONTHS, MONTHS.to_period("M"), pd.RangeIndex(17)):
        forecast = WALK.forecast(steps=2, x=pd.Series(VALUES[:, 0], index), samples=1, seed=0)
        forecast.plot(tmp_path / "fan.svg")
        text = (tmp_path / "fan.svg").read_text()
        assert "fan" not in text
    numbered = WALK.forecast(steps=2, x=VALUES[None, :, :1], samples=1, seed=0).frame()
    assert numbered.index.tolist() == [17, 18]
    with pytest.raises(ValueError, match=r"were arrays.*aevb\.sequences"):
        WALK.log_evidence(x=VALUES[None, :, :1]).frame()


DAYS = pd.Series(np.arange(8.0), pd.date_range("2024-01-01", periods=8), name="x")
YYYYMM = pd.DataFrame({"month": [201011, 201012, 201101], "x": 0.0})
BAD_FRAMES = {
    "not sorted": (
        lambda: sequences(DAYS[::-1]),
        "The times are not in order: after time 2024-01-08 comes 2024-01-07. Sort the frame, e.g. "
        "frame.sort_index(). If the lines belong to several sequences, name the column that says "
        "to which: aevb.sequences(frame, id=…).",
    ),
    "not sorted within an id": (
        lambda: sequences(pl.DataFrame({"id": [1, 2, 1], "t": [5, 1, 4], "x": 0.0})),
        "after t 5 comes 4 of id 1. Sort the frame, e.g. frame.sort('id', 't').",
    ),
    "not sorted, with columns of ids and times": (
        lambda: sequences(
            pd.DataFrame({"patient_id": [1, 2, 1], "date": DAYS.index[:3][::-1]}).assign(x=0.0)
        ),
        "Sort the frame, e.g. frame.sort_values(['patient_id', 'date']).",
    ),
    "months as numbers": (
        lambda: sequences(YYYYMM, gaps="missing"),
        "The times 'month' are dates written as whole numbers, 201011 to 201101. Numbers have "
        "other distances than dates. Convert them: frame['month'] = "
        "pd.to_datetime(frame['month'].astype(str), format='%Y%m'). If they number the "
        "steps, subtract the first from each: 0, 1, 2, ….",
    ),
    "months as numbers in the index": (
        lambda: sequences(YYYYMM.set_index("month")),
        "Convert them: frame.index = pd.to_datetime(frame.index.astype(str), format='%Y%m').",
    ),
    "days as numbers": (
        lambda: sequences(pl.DataFrame({"day": [20240229, 20240301], "x": 0.0}), time="day"),
        "Convert them: frame.with_columns(pl.col('day').cast(pl.String).str.to_date('%Y%m%d')).",
    ),
    "a time twice": (
        lambda: sequences(DAYS.iloc[[0, 1, 1, 2]]),
        "The time 2024-01-02 occurs twice. Keep one line of a time (or their mean).",
    ),
    "a hole": (
        lambda: sequences(DAYS.drop(DAYS.index[[3, 4]])),
        "The times have 1 hole: from time 2024-01-03 to 2024-01-06, where steps are 1 day apart. "
        'If nothing was observed there, aevb.sequences(frame, gaps="missing") adds missing steps',
    ),
    "a hole of a period": (
        lambda: fit(WALK, {"x": DAYS.to_period("D").drop(pd.Period("2024-01-03"))}, steps=1),
        "x: The times have 1 hole: from time 2024-01-02 to 2024-01-04",
    ),
    "a hole of a sequence": (
        lambda: fit(
            MODEL, LONG.rename(columns={"a": "x0", "b": "x1", "country": "id"}).drop(5), steps=1
        ),
        "from year 1991 to 1993 of id se, where steps are 1 apart",
    ),
    "mixed frequencies": (
        lambda: sequences(DAYS.set_axis([*DAYS.index[:7], pd.Timestamp("2024-01-08 07:00")])),
        "The times ('time') are not evenly spaced: some steps are 1 day and 31 hours apart. A step "
        "of a model has one length: dates of one calendar period become even as periods",
    ),
    "uneven numbers": (
        lambda: sequences(DAYS.iloc[:3].set_axis([1, 3, 6])),
        "some steps are 2 and 3 apart. A step of a model has one length: round the times",
    ),
    "far too many holes": (
        lambda: sequences(DAYS.iloc[:3].set_axis([0, 1, 10**6]), gaps="missing"),
        "Filling the holes would add 999,998 steps to 3 lines, because some lines are only 1 apart",
    ),
    "words as times": (
        lambda: sequences(DAYS.iloc[:3].set_axis(list("abc"))),
        "The times 'time' are of type str (first: 'a'), neither numbers nor dates. Convert them: "
        "pd.to_datetime(…), or .to_timestamp(). If they name the sequences, use aevb.sequences(",
    ),
    "dates of another form as text": (
        lambda: sequences(pl.DataFrame({"t": ["1/31/2024"], "x": [1.0]})),
        "The times 't' are of type String, neither numbers nor dates. Convert them, e.g. "
        "frame.with_columns(pl.col('t').str.to_datetime()).",
    ),
    "a missing time": (
        lambda: sequences(DAYS.iloc[:2].set_axis([pd.Timestamp("2024-01-01"), pd.NaT])),
        "Line 1 (from 0) of the frame has no time ('time'). Drop the line, or fill in the time.",
    ),
    "a missing id": (
        lambda: sequences(pl.DataFrame({"id": [1, None], "x": [1.0, 2.0]})),
        "Line 1 (from 0) of the frame has no id ('id').",
    ),
    "an id for each line": (
        lambda: sequences(pl.DataFrame({"id": [1, 2, 3], "x": 0.0})),
        "Each line has an id of its own ('id'), so every sequence would have one step.",
    ),
    "two columns of times": (
        lambda: sequences(pl.DataFrame({"year": [1], "month": [2], "x": 0.0})),
        "The columns 'year' and 'month' look like the time of a step.",
    ),
    "three levels": (
        lambda: sequences(pd.concat({1: pd.concat({1: DAYS})})),
        "The index has 3 levels (None, None, None), but a sequence has an id and a time. Make the "
        "ids one column, and name it: aevb.sequences(frame.reset_index(), id=…, time=…).",
    ),
    "no lines": (lambda: sequences(DAYS[:0]), "The frame has no lines; a sequence needs at least"),
    "no data": (lambda: sequences(DAYS.to_frame()[[]]), "has no column of data beside its times"),
    "no such column": (
        lambda: sequences(DAYS, time="when"),
        "time='when' is not a column; those are x.",
    ),
    "a word for gaps": (
        lambda: sequences(DAYS, gaps="fill"),
        'gaps is "refuse", or "missing" to fill holes between the times with missing steps; got',
    ),
    "no frame": (lambda: sequences([1, 2]), "takes a frame of pandas, polars or pyarrow, got list"),
    "too many columns": (
        lambda: WALK.forecast(steps=1, x=FRAME),
        "x needs 1 column, but the frame has 3 (a, b, u). A line of a frame is a step: select the "
        "columns of x, e.g. frame[['a']]. If a line is a whole sequence, pass frame.to_numpy().",
    ),
    "words as data": (
        lambda: WALK.smooth(x=pd.Series(["high", "low"])),
        "x: The column 'value' holds String, not numbers. Leave it out, or number its categories",
    ),
    "lengths beside a frame": (
        lambda: WALK.forecast(steps=1, x=DAYS, lengths=[8]),
        "x is a frame, whose index says how long its sequences are. Leave out lengths=.",
    ),
    "other times": (
        lambda: MODEL.log_evidence(x=FRAME[["a", "b"]], u=FRAME["u"][1:]),
        "x and u have different times: 17 steps, 2024-01-31 to 2025-05-31, and 16 steps, "
        "2024-02-29 to 2025-05-31. Take both from one frame",
    ),
    "other sequences": (
        lambda: MODEL.log_evidence(
            x=sequences(LONG, id="country")[["a", "b"]],
            u=sequences(LONG[LONG.country == "no"], id="country")["u"],
        ),
        "x and u have different sequences: 2 and 1, or in another order. Take both from one frame.",
    ),
    "a future that is past": (
        lambda: MODEL.forecast(steps=2, x=FRAME[["a", "b"]], u=FRAME["u"], given={"u": FRAME["u"]}),
        "given: the future of u lacks the time 2025-06-30; the forecast goes from 2025-06-30 to "
        "2025-07-31, these lines from 2024-01-31 to 2025-05-31.",
    ),
    "a future without dates": (
        lambda: MODEL.forecast(
            steps=2, x=FRAME[["a", "b"]], u=FRAME["u"], given={"u": pd.Series([1.0, 2.0])}
        ),
        "the future of u has the times 0 to 1, those of the past are 2024-01-31 to 2025-05-31. "
        "Give both the same kind of index.",
    ),
    "a future frame of arrays": (
        lambda: MODEL.forecast(
            steps=2, x=VALUES[None, :, :2], u=VALUES[None, :, 2:], given={"u": FRAME["u"]}
        ),
        "given: the future of u is a frame, but the past is not. Pass the past as a frame too",
    ),
    "no realised future": (
        lambda: WALK.forecast(steps=2, x=DAYS, samples=1).log_prob(x=DAYS),
        "log_prob: the future of x lacks the time 2024-01-09",
    ),
    "no time to come": (
        lambda: WALK.forecast(steps=2, x=DAYS[:1], samples=1).frame(),
        "Every sequence has one step, so the time between two steps is unknown",
    ),
    "an imputation of arrays": (
        lambda: WALK.impute(x=VALUES[None, :, :1], samples=1).frame(),
        "The data were arrays, so there is no index",
    ),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frames(name):
    use, words = BAD_FRAMES[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        use()


NUMBERED = pd.DataFrame({"id": 7, "at": [20240131, 20240201, 20240202], "x": 0.0})


@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("form", ["%Y%m%d", "%Y%m"])
@pytest.mark.parametrize(
    "made",
    [
        lambda frame: frame,
        lambda frame: frame.drop(columns="id").set_index("at"),
        lambda frame: frame.set_index(["id", "at"]),
        lambda frame: frame.set_index(["id", "at"]).rename_axis([None, None]),
        pl.from_pandas,
        lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
    ],
    ids=["column", "index", "level", "level without a name", "polars", "pyarrow"],
)
def test_the_code_of_the_message_reads_numbers_as_dates(made, form, dtype):
    table = NUMBERED.assign(at=[202311, 202312, 202401] if form == "%Y%m" else NUMBERED["at"])
    frame = made(table.astype({"at": dtype}))
    time = None if isinstance(frame, pd.DataFrame) and "at" not in frame else "at"
    with pytest.raises(ValueError, match="dates written as whole numbers") as error:
        sequences(frame, time=time)
    code = str(error.value).partition("Convert them: ")[2].partition(". If they number")[0]
    names = {"frame": frame, "table": frame, "pd": pd, "pl": pl, "pyarrow": pa}
    if isinstance(frame, pd.DataFrame):
        exec(code, names)
        frame = names["frame"]
        time = next((name for name in ("at", "time") if name in frame), None)
    else:
        frame = eval(code, names)
    index = sequences(frame, time=time).index
    assert str(index.spacing) == ("1 month" if form == "%Y%m" else "1 day")


def test_the_times_of_a_pyarrow_table_are_converted_by_pyarrow():
    text = pa.table({"at": ["2024-01-31 00", "2024-02-01 00"], "x": [0.0, 1.0]})
    with pytest.raises(ValueError, match="neither numbers nor dates") as error:
        sequences(text, time="at")
    code = str(error.value).partition("e.g. ")[2].removesuffix(".")
    assert str(sequences(eval(code, {"table": text}), time="at").index.spacing) == "1 day"


def test_columns_of_other_types_and_names():
    """Nullable numbers, truth values, mixed ids, and a series with the name of a time."""
    frame = pd.DataFrame(
        {"id": ["a", "a", 7, 7], "x": pd.array([1, None, 3, 4], "Int64"), "day": [True, False] * 2}
    )
    found = sequences(frame[["id", "x"]])
    assert found.index.ids.tolist() == ["a", 7]
    np.testing.assert_array_equal(found.cells()[:, 0], [1, NAN, 3, 4])
    assert sequences(frame["day"]).cells()[:, 0].tolist() == [1, 0, 1, 0]
    nulls = sequences(pl.DataFrame({"t": [0.0, 0.5, 1.0], "x": [1, None, 3]}))
    np.testing.assert_array_equal(nulls.cells()[:, 0], [1, NAN, 3])
    assert nulls.index.ahead(2)[0].tolist() == [1.5, 2.0]


def test_a_selection_of_columns_that_are_not_there():
    with pytest.raises(KeyError, match="'z' is not a column; those are x"):
        sequences(DAYS)["z"]
    assert list(sequences(FRAME)) == ["a", "b", "u"]
    assert isinstance(sequences(FRAME)["a"], aevb.Sequences)


def given_future(index, future, steps=2, model=MODEL):
    """Forecast after an index with u = 0, 1, 2, … and return the values of u that it read."""
    x, u = pd.DataFrame(0.0, index, ["a", "b"]), pd.Series(np.arange(float(len(index))), index)
    found = model.forecast(steps=steps, x=x, u=u, given={"u": future}, samples=1, seed=0)
    rows = future.to_numpy().reshape(-1)
    for start in range(len(rows) - steps + 1):
        given = {"u": rows[None, start : start + steps, None]}
        arrays = {"x": x.to_numpy()[None], "u": u.to_numpy()[None, :, None]}
        plain = model.forecast(steps=steps, **arrays, given=given, samples=1, seed=0)
        if torch.equal(plain.mean["x"], found.mean["x"]):
            return rows[start : start + steps].tolist()
    return None


def test_a_future_is_found_by_rounded_times_and_across_zones():
    every = pd.Index(np.round(1949 + np.arange(30) / 12, 3))
    later = pd.Series(np.arange(6.0), every[24:])
    assert given_future(every[:24], later) == [0, 1]
    with pytest.raises(ValueError, match=r"lacks the step 1951\.0"):
        given_future(every[:24], later[1:])

    hours = pd.date_range("2024-05-01", periods=30, freq="h", tz="Europe/Oslo")
    later = pd.Series(np.arange(30.0), hours)
    assert given_future(hours[:24], later) == [24, 25]
    assert given_future(hours[:24], later.tz_convert("America/New_York")) == [24, 25]
    assert given_future(hours[:24], later[24:25], steps=1) == [24]  # one line shows no spacing
    assert given_future(hours[:24], later[24:26], steps=np.int64(2)) == [24, 25]
    days = pd.date_range("2024-03-20", periods=30, tz="Europe/Oslo")
    assert given_future(days[:24], pd.Series(np.arange(30.0), days)) == [24, 25]
    for past, future, words in (
        (hours, later.tz_localize(None), "the past has one, the future has none"),
        (hours.tz_localize(None), later, "the future has one, the past has none"),
    ):
        with pytest.raises(ValueError, match=words):
            given_future(past[:24], future)
    with pytest.raises(ValueError, match="lacks the step 24"):
        given_future(pd.RangeIndex(24), pd.Series([1.0, 2.0], [26, 27]), steps=np.int64(2))


def test_days_that_are_even_in_utc_only():
    days = pd.date_range("2024-03-20", periods=22, tz="UTC").tz_convert("Europe/Oslo")
    found = WALK.forecast(steps=2, x=pd.Series(0.0, days[:20]), samples=1, seed=0).frame()
    pd.testing.assert_index_equal(found.index, days[20:], check_exact=True, check_freq=False)
    uneven = days.delete(3) + pd.to_timedelta([0] * 20 + [5], unit="h")
    with pytest.raises(ValueError, match="not evenly spaced"):
        sequences(pd.Series(0.0, uneven))


def test_a_sequence_of_one_step_has_the_calendar_of_the_others():
    def ahead(dates, alone):
        frame = pd.DataFrame({"id": ["a"] * len(dates) + ["b"], "date": [*dates, alone], "x": 0.0})
        data = sequences(frame)["x"]
        return WALK.forecast(steps=1, x=data, samples=1, seed=0).frame().index[1][1]

    ends = pd.date_range("2024-01-31", periods=4, freq="ME")
    assert ahead(ends, pd.Timestamp("2024-02-29")) == pd.Timestamp("2024-03-31")
    starts = pd.date_range("2024-01-01", periods=4, freq="MS")
    for dates, alone in ((ends, "2024-01-15"), (starts, "2024-01-31")):
        with pytest.raises(ValueError, match="not evenly spaced"):
            ahead(dates, pd.Timestamp(alone))
    with pytest.raises(ValueError, match="have 2 holes"):  # days, because b is on a Saturday
        ahead(pd.bdate_range("2024-01-03", periods=10), pd.Timestamp("2024-01-06"))


def test_a_frame_of_constants_is_found_by_its_ids():
    model = Model(
        {"l[t] | l[t-1], c": Normal(1, scale="learned"), "x[t] | l[t]": Normal(1)},
        {"l[t] | x[t]": Normal()},
        given={"c": 1},
    ).double()
    x = sequences(LONG[::-1].sort_values("year", kind="stable"), id="country")["a"]
    assert x.index.ids.tolist() == ["se", "no"]
    c = pd.DataFrame({"c": [1.0, 2.0, 3.0]}, pd.Index(["fi", "no", "se"], name="country"))
    expected = model.prepare(x=x, c=np.array([[3.0], [2.0]]))["c"]
    assert torch.equal(model.prepare(x=x, c=c)["c"], expected)
    assert torch.equal(model.prepare(x=x, c=c["c"])["c"], expected)
    plain = pd.DataFrame({"c": [3.0, 2.0]})
    assert torch.equal(model.prepare(x=x, c=plain)["c"], expected)
    for wrong, words in ((c[:2], "has none for se"), (c.iloc[[1, 1, 2]], "has several for one")):
        with pytest.raises(ValueError, match=words):
            model.prepare(x=x, c=wrong)


def test_dates_and_ids_keep_their_types():
    days = pd.date_range("2024-01-01", periods=3).date
    frame = pl.DataFrame({"id": [1, 1, 1, 2, 2, 2], "date": [*days] * 2, "x": 0.0})
    frame = frame.with_columns(pl.col("id").cast(pl.Int32))
    for table in (frame, frame.to_arrow()):
        data = sequences(table)["x"]
        for found in (
            WALK.smooth(x=data, method="particles", seed=0).frame(),
            WALK.forecast(steps=2, x=data, samples=1, method="particles", seed=0).frame(),
        ):
            found = found if isinstance(found, pl.DataFrame) else pl.from_arrow(found)
            assert found.schema["id"] == pl.Int32
            assert found.schema["date"] == pl.Date
    arrow = pd.Series(0.0, pd.Index(pd.array(days, "timestamp[us][pyarrow]")))
    assert sequences(arrow).index.spacing.unit == "microsecond"


@pytest.mark.parametrize(
    ("frequency", "said"),
    [
        ("M", "1 month apart"),
        ("2M", "2 months apart"),
        ("Q", "1 quarter apart"),
        ("Y-JUN", "1 year apart"),
        ("W-TUE", "1 week apart"),
        ("3h", "3 hours apart"),
        ("15min", "15 minutes apart"),
    ],
)
def test_the_distance_of_periods_has_a_unit(frequency, said):
    periods = pd.period_range("2024-01", periods=4, freq=frequency)
    frame = pd.DataFrame({"x": np.arange(4.0)}, index=periods)
    assert said in repr(sequences(frame))
    with pytest.raises(ValueError, match=f"where steps are {said}"):
        sequences(frame.iloc[[0, 1, 3]])


@pytest.mark.parametrize("library", [pd.DataFrame, pa.table], ids=["pandas", "pyarrow"])
def test_a_column_that_occurs_twice_is_named(library):
    columns = np.arange(6.0).reshape(3, 2)
    frame = (
        pd.DataFrame(columns, columns=["x", "x"])
        if library is pd.DataFrame
        else pa.table(list(columns.T), names=["x", "x"])
    )
    with pytest.raises(ValueError, match="The frame has the column 'x' more than once. Rename or"):
        sequences(frame)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_local_time_that_does_not_exist_is_moved_forward(library):
    """Clocks of Cairo skip the first hour of 2024-04-26, and repeat the last one of 2024-10-31."""
    for first, later in (
        ("2024-04-23", ["2024-04-26 01:00:00+03:00", "2024-04-27 00:00:00+03:00"]),
        ("2024-10-29", ["2024-11-01 00:00:00+02:00", "2024-11-02 00:00:00+02:00"]),
    ):
        times = pd.date_range(first, periods=3, freq="D", tz="Africa/Cairo")
        frame = pd.DataFrame({"time": times, "x": np.arange(3.0)})
        data = {
            "pandas": frame,
            "polars": pl.from_pandas(frame),
            "pyarrow": pa.Table.from_pandas(frame),
        }[library]
        found = WALK.forecast(steps=2, x=sequences(data, time="time")["x"]).frame()
        column = found.index if library == "pandas" else found["time"].to_pandas()
        assert [str(time) for time in column] == later


def test_a_dated_series_of_one_step_is_drawn_by_numbers(tmp_path):
    one = pd.Series([1.0], pd.DatetimeIndex(["2024-01-01"], name="day"), name="x")
    found = WALK.forecast(steps=3, x=one)
    found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="Every sequence has one step"):
        found.frame()


def test_a_frame_whose_lines_belong_to_several_sequences_is_refused():
    visits = pd.DataFrame(
        {
            "customer": np.repeat([1, 2, 3, 4], 5),
            "visit": np.tile(np.arange(1, 6), 4),
            "v": np.random.default_rng(0).normal(size=20),
        }
    )
    message = re.escape(
        "The column 'visit' counts repeatedly from 1 (1, 2, 3, …). If it numbers the steps, name "
        "it, and the column that says which sequence a line belongs to, if there are several: "
        "aevb.sequences(frame, id=…, time='visit'). If it is data, name the columns x0, x1, …."
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        aevb.sequences(visits)
    assert len(aevb.sequences(visits, id="customer", time="visit").index.lengths) == 4
    data = visits.set_axis(["x0", "x1", "x2"], axis=1)
    assert aevb.sequences(data).index.lengths == [20]
    assert aevb.sequences(visits[["visit"]]).index.lengths == [20]


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
@pytest.mark.parametrize("name", ["date", "when"])
def test_texts_that_are_dates_are_times(make, name):
    months = ["2024-01-31", "2024-02-29", "2024-03-31"]
    read = aevb.sequences(make({name: months, "v": [1.0, 2.0, 4.0]}))
    assert repr(read) == (
        f"1 sequence of 3 steps ({name} 2024-01-31 to 2024-03-31, 1 month apart): v"
    )


def test_texts_that_are_no_dates_are_not_times():
    frame = pd.DataFrame({"date": ["2024-01-31", "2024-02-31"], "v": [1.0, 2.0]})
    with pytest.raises(ValueError, match="The times 'date' are of type .* neither numbers nor"):
        aevb.sequences(frame)
    indexed = pd.DataFrame({"v": [1.0, 2.0]}, index=["2024-01", "2024-02"])
    assert "1 month apart" in repr(aevb.sequences(indexed))


def test_a_decimal_comma_is_named():
    frame = pd.DataFrame({"t": [1, 2], "v": ["1,5", "-0,25"]})
    message = re.escape(
        "x: The column 'v' holds texts with a decimal comma, such as '1,5', not numbers. Read the "
        "file with pd.read_csv(…, decimal=',') (polars: decimal_comma=True)."
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        aevb.zoo.local_level().log_evidence(x=frame)
