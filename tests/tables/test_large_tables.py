"""Large Parquet tables are read part by part, with the results of tables in memory."""

import datetime
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from aevb.data import large_tables, parquet, read_frame
from aevb.data.large_tables import open_large
from aevb.runtime.checked_files import DataWarning
from aevb.tables import Schema, kinds, large_columns

N = 1000


def columns(n: int = N, seed: int = 0) -> dict[str, pa.Array]:
    """Columns of every type, some with holes; rare cells lie in the last rows."""
    draw = np.random.default_rng(seed)
    holes = draw.random(n) < 0.1
    mass = np.exp(draw.normal(1, 0.5, n))
    city = np.array(["Bonn", "Kiel", "Ulm"])[draw.integers(3, size=n)].astype(object)
    city[-1], city[-2], city[5] = "Trier", "n/a", None
    days = draw.integers(400, size=n).tolist()
    price = [f"${10 ** (1 + i % 4) + 0.25 * (i % 7):,.2f}" for i in range(n)]
    price[-1] = "-$0.50"
    return {
        "id": pa.array([f"row {i}" for i in range(n)]),
        "number": pa.array(range(n)),
        "mass": pa.array(mass, mask=holes),
        "height": pa.array(np.append(draw.normal(0, 2, n - 1), 40.0)),
        "city": pa.array(city.tolist()),
        "grade": pa.array(np.array(["A", "B", "C"])[draw.integers(3, size=n)]).dictionary_encode(),
        "vip": pa.array(draw.random(n) < 0.3),
        "visits": pa.array(draw.poisson(3.0, n)),
        "bursts": pa.array(draw.negative_binomial(1, 0.1, n)),
        "rooms": pa.array(draw.choice([1, 2, 4], n)),
        "day": pa.array([datetime.date(2020, 1, 1) + datetime.timedelta(k) for k in days]),
        "price": pa.array(price),
        "empty": pa.array([None] * n, pa.float64()),
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three files with row groups of 64 rows, taken for large ones."""
    frame, place = pa.table(columns()), tmp_path / "table"
    place.mkdir()
    for i, (start, stop) in enumerate([(0, 300), (300, 420), (420, N)]):
        part = frame.slice(start, stop - start)
        pq.write_table(part, place / f"{i}.parquet", row_group_size=64)
    monkeypatch.setattr(parquet, "LARGE", 20_000)
    return place


def facts(column):
    return {k: v for k, v in asdict(column.facts).items() if "mean" not in k and "spread" not in k}


def test_the_schema_of_all_rows(folder):
    large, whole = Schema.read(open_large(folder)), Schema.read(read_frame(folder))
    assert large.names == whole.names
    assert large.variables.keys() == whole.variables.keys()
    for a, b in zip(large.columns, whole.columns, strict=True):
        assert (a.kind, a.likelihood, a.reason, a.dtype, a.levels) == (
            (b.kind, b.likelihood, b.reason, b.dtype, b.levels)
        )
        assert facts(a) == facts(b)
        assert (a.location, a.scale) == pytest.approx((b.location, b.scale), rel=1e-12)
    assert "Trier" in large["city"].levels
    assert large["city"].facts.words == ("n/a",)
    assert large["height"].facts.high == 40.0
    assert large["price"].facts.low == -0.5
    assert large["number"].reason == "row numbers: they rise by 1 from row to row"


def test_facts_hold_for_rows_that_are_not_in_the_sample(folder, monkeypatch):
    monkeypatch.setattr(large_tables, "CELLS", 100)
    monkeypatch.setattr(large_tables, "LEAST_ROWS", 10)
    monkeypatch.setattr(large_columns, "RANDOM_CELLS", 200)
    table = open_large(folder)
    assert table.sample.num_rows == len(table.sample_rows) == 10
    assert table.sample.equals(read_frame(folder).take(table.sample_rows))
    large, whole = Schema.read(table), Schema.read(read_frame(folder))
    for a, b in zip(large.columns, whole.columns, strict=True):
        assert (a.kind, a.levels, a.missing) == (b.kind, b.levels, b.missing)
        assert facts(a) == facts(b)


def test_encoded_rows_equal_those_in_memory(folder):
    frame = read_frame(folder)
    schema = Schema.read(frame)
    lazy, whole = schema.encode(open_large(folder)), schema.encode(frame)
    assert lazy.keys() == whole.keys()
    some = np.random.default_rng(1).integers(0, N, 200)
    for name, value in whole.items():
        assert lazy[name].shape == value.shape
        assert np.array_equal(lazy[name][some], value[some], equal_nan=True)
        assert np.array_equal(np.asarray(lazy[name]), value, equal_nan=True)


def test_hidden_cells_are_the_same_in_every_reading(folder):
    frame = read_frame(folder)
    schema = Schema.read(frame)
    whole = schema.encode(frame)
    for name, value in schema.encode(open_large(folder)).items():
        one, other = (np.asarray(value.with_hidden(0.2, 3)) for _ in range(2))
        assert np.array_equal(one, other, equal_nan=True)
        assert np.array_equal(one[:N], whole[name], equal_nan=True)
        kept = ~np.isnan(one[N:])
        assert np.array_equal(one[N:][kept], whole[name][kept])
        known = ~np.isnan(whole[name])
        assert 0.15 < 1 - kept[known].mean() < 0.25
        assert not np.array_equal(one[N:], np.asarray(value.with_hidden(0.2, 4))[N:], True)


def test_held_out_rows_are_not_in_the_table(folder):
    frame = read_frame(folder)
    table, held = open_large(folder).split(0.3, 7)
    assert (table.num_rows, held.num_rows) == (700, 300)
    rest = pa.concat_tables(list(table.parts()))
    assert set(rest["id"].to_pylist()) | set(held["id"].to_pylist()) == set(frame["id"].to_pylist())
    assert held.equals(open_large(folder).split(0.3, 7)[1])
    schema = Schema.read(frame)
    for name, value in schema.encode(table).items():
        expected = schema.encode(rest)[name]
        assert np.array_equal(np.asarray(value), expected, equal_nan=True)
    assert table.sample["id"].to_pylist() == frame["id"].take(table.sample_rows).to_pylist()


def test_amounts_without_a_unit_are_judged_by_all_cells(tmp_path, monkeypatch):
    """Most cells have a comma in one column and few in the other; the forms are the same."""
    cells = [f"{i % 90 + 10},25" if i % 3 else str(i % 7) for i in range(N)]
    lists = [f"{i % 90 + 10},25" if i % 3 == 0 else str(i % 7) for i in range(N)]
    frame = pa.table({"most": cells, "few": lists})
    monkeypatch.setattr(parquet, "LARGE", 1)
    pq.write_table(frame, tmp_path / "t.parquet", row_group_size=64)
    here, whole = Schema.read(open_large(tmp_path / "t.parquet")), Schema.read(frame)
    for name, type_ in (("most", "number"), ("few", "text")):
        assert here[name].facts.type == whole[name].facts.type == type_


def test_many_texts_are_left_out(folder, monkeypatch):
    monkeypatch.setattr(large_columns, "MOST_ASKED", 300)
    schema = Schema.read(open_large(folder))
    assert schema["id"].reason == "an identifier: text that differs in 1,000 random rows"
    monkeypatch.setattr(large_columns, "MOST_ASKED", 2)
    monkeypatch.setattr(kinds, "MOST_LEVELS", 2)
    reason = "more than 2 levels in 1,000 known cells: most levels are too rare to learn"
    table = open_large(folder).select(["grade", "vip"])
    assert Schema.read(table)["grade"].reason == reason


@pytest.mark.parametrize(
    ("name", "cell", "message"),
    [
        ("height", float("inf"), r"'height' has 1 infinite cell \(row 990, from 0\)"),
        ("day", datetime.date(1, 1, 1), None),
    ],
)
def test_cells_of_late_rows_are_checked(folder, name, cell, message):
    frame = read_frame(folder)
    cells = frame[name].to_pylist()
    cells[990] = cell
    column = pa.array(cells, frame.schema.field(name).type)
    changed = frame.set_column(frame.column_names.index(name), name, column)
    for file in folder.iterdir():
        file.unlink()
    pq.write_table(changed, folder / "0.parquet", row_group_size=64)
    if message is None:
        with pytest.warns(DataWarning, match="A cell of 'day' lies far .* .0001-01-01."):
            assert Schema.read(open_large(folder))[name].facts.low == -719162.0
    else:
        with pytest.raises(ValueError, match=message):
            Schema.read(open_large(folder))


def test_an_unknown_level_names_the_row(folder):
    schema = Schema.read(read_frame(folder).slice(0, N - 1))
    with pytest.raises(ValueError, match=r"'Trier' \(row 3, from 0\).* from row 996 of the table"):
        schema.encode(open_large(folder))["city"][N - 1]
