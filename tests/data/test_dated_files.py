"""Files of sequences with dates as times and words as ids; results are numbered as the file is."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from aevb import Model, Normal
from aevb.data.datasets import load
from aevb.data.files import read_lines

# The file's dates of one sequence of three steps, the time after them, and the spacing.
DATES = {
    "days": (("2024-02-28", "2024-02-29", "2024-03-01"), "2024-03-02", "1 day"),
    "ends of months": (("2024-01-31", "2024-02-29", "2024-03-31"), "2024-04-30", "1 month"),
    "months": (("2024-11", "2024-12", "2025-01"), "2025-02", "1 month"),
    "quarters": (("2024-01", "2024-04", "2024-07"), "2024-10", "3 months"),
    "business days": (("2024-03-07", "2024-03-08", "2024-03-11"), "2024-03-12", "1 business day"),
    "hours": (
        ("2024-01-01 22:00", "2024-01-01 23:00", "2024-01-02 00:00"),
        "2024-01-02 01:00:00",
        "1 hour",
    ),
    "hours in UTC": (
        ("2024-01-01T22:00Z", "2024-01-01T23:00Z", "2024-01-02T00:00Z"),
        "2024-01-02 01:00:00+00:00",
        "1 hour",
    ),
    "numbers": (("3", "5", "7"), "9", "2"),
}


def level():
    return Model({"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()})


def lines_of(path, text):
    path.write_text(text)
    return read_lines(path, level().graph)


@pytest.mark.parametrize(("dates", "after", "spacing"), DATES.values(), ids=DATES)
def test_a_column_of_dates_numbers_the_steps_in_any_order(tmp_path, dates, after, spacing):
    text = "date,x\n" + "".join(f"{dates[i]},{i}\n" for i in (2, 0, 1))
    found, lines = lines_of(tmp_path / "t.csv", text)
    assert found["x"].tolist() == [[[0.0], [1.0], [2.0]]]
    assert (str(lines.spacing), lines.keys.names) == (spacing, ("date",))
    written = lines.numbers(np.zeros(4, int), np.arange(4))
    assert written[3] == f"{after},"
    full = lambda one: np.datetime64(one.rstrip(",").removesuffix("+00:00"))  # noqa: E731
    if spacing != "2":
        assert [full(one) for one in written[:3]] == [full(one.rstrip("Z")) for one in dates]


def test_steps_that_a_table_lacks_are_filled_when_asked(tmp_path):
    path, graph = tmp_path / "t.csv", level().graph
    path.write_text("row,step,x\n0,0,1\n0,1,2\n0,4,3\n0,5,4\n1,0,5\n1,2,6\n")
    with pytest.raises(ValueError, match=r"row 0 lacks step 2\. .* \(--gaps missing"):
        read_lines(path, graph)
    found, lines = read_lines(path, graph, fill=True)
    nan = float("nan")
    assert [len(row) for row in found["x"]] == [6, 3]
    np.testing.assert_array_equal(
        np.concatenate(found["x"])[:, 0], [1, 2, nan, nan, 3, 4, 5, nan, 6]
    )
    assert lines.numbers(np.array([0, 1]), np.array([5, 2])) == ["0,5,", "1,2,"]
    path.write_text("row,step,x\n0,0,1\n0,3,2\n0,3,3\n")
    with pytest.raises(ValueError, match=r"row 0 has step 3 twice\. Number"):
        read_lines(path, graph, fill=True)


def test_gaps_are_refused_where_no_times_are(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 1)))
    (tmp_path / "wide.csv").write_text("a,b,c\n1,2,4\n3,5,9\n")
    (tmp_path / "rows.csv").write_text("row,x\n0,1\n0,2\n1,3\n")
    still = Model({"z": Normal(1), "x | z": Normal(3)}, {"z | x": Normal()}).graph
    for name, graph in (
        ("x.npy", level().graph),
        ("wide.csv", still),
        ("rows.csv", level().graph),
        ("digits", still),
    ):
        data = name if name == "digits" else str(tmp_path / name)
        with pytest.raises(ValueError, match=r"has no times, .* Leave out --gaps"):
            load(data, graph, gaps="missing")


def test_ids_are_words_in_the_order_of_the_file(tmp_path):
    text = 'date,series,x\n2024-01-01,"b, south",1\n2024-01-02,"b, south",2\n2024-01-05,a,3\n'
    found, lines = lines_of(tmp_path / "t.csv", text)
    assert [row[:, 0].tolist() for row in found["x"]] == [[1.0, 2.0], [3.0]]
    assert lines.numbers(np.array([0, 1]), np.array([2, 1])) == [
        '"b, south",2024-01-03,',
        "a,2024-01-06,",
    ]
    assert lines.span == "date 2024-01-01 to 2024-01-05"
    text = "id,step,x\n010,0,1\n010,1,2\n007,0,3\n"
    _, lines = lines_of(tmp_path / "codes.csv", text)
    assert lines.rows.tolist() == ["010", "007"]


@pytest.mark.parametrize(
    ("name", "times"),
    [("year", [1900, 1901, 1902, 1903]), ("month", ["2024-11", "2024-12", "2025-01", "2025-02"])],
)
def test_holes_are_filled_with_missing_steps_when_asked(tmp_path, name, times):
    path = tmp_path / "t.csv"
    text = f"id,{name},x\nb,{times[0]},1\nb,{times[3]},2\na,{times[1]},3\na,{times[2]},4\n"
    path.write_text(text)
    found, lines = read_lines(path, level().graph, fill=True)
    first, second = found["x"]
    assert first[[0, 3], 0].tolist() == [1.0, 2.0]
    assert np.isnan(first[1:3, 0]).all()
    assert second[:, 0].tolist() == [3.0, 4.0]
    assert lines.numbers(np.zeros(4, int), np.arange(4)) == [f"b,{time}," for time in times]
    assert lines.span == f"{name} {times[0]} to {times[3]}"
    assert lines.constants("c", np.array([7.0, 7.0, 8.0, 8.0])).tolist() == [7.0, 8.0]
    path.write_text("date,x\n2024-01-01,1\n2024-01-02,1\n2034-01-01,2\n")
    with pytest.raises(ValueError, match="filling its holes would add 3,651 steps to 3 lines"):
        read_lines(path, level().graph, fill=True)


def test_sequences_of_one_step_have_no_later_times(tmp_path):
    _, lines = lines_of(tmp_path / "t.csv", "row,date,x\na,2024-01-01,1\nb,2024-01-01,2\n")
    assert lines.numbers(np.array([1]), np.array([0])) == ["b,2024-01-01,"]
    with pytest.raises(ValueError, match="Every sequence has one step"):
        lines.numbers(np.array([1]), np.array([1]))


def test_parquet_has_dates_zones_and_categories(tmp_path):
    """A clock of a zone that changes to summer time is even by days, and in UTC by hours."""
    days = np.array(["2024-03-30T23:00", "2024-03-31T22:00", "2024-04-01T22:00"], "datetime64[us]")
    zoned = pa.array(days).cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us", "Europe/Berlin"))
    table = pa.table(
        {"id": pa.array(["a"] * 3).dictionary_encode(), "time": zoned, "x": [1.0, 2.0, 3.0]}
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    found, lines = read_lines(tmp_path / "t.parquet", level().graph)
    assert found["x"].tolist() == [[[1.0], [2.0], [3.0]]]
    assert lines.numbers(np.zeros(2, int), np.array([0, 3])) == [
        "a,2024-03-31 00:00:00+01:00,",
        "a,2024-04-03 00:00:00+02:00,",
    ]
