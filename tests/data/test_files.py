"""Files: which of their arrays and columns go to which variable, and what cannot be read."""

import re

import numpy as np
import pytest
import torch
from small_models import LENGTHS, NAN, RAGGED, SEQUENCE, X, conditional, state, vae

from aevb import Model, Normal, OneHot
from aevb.data.files import assign, layout, read_file, read_lines
from aevb.data.sources import open_source, read_arrays
from aevb.data.tables import header
from aevb.data.text_tables import read_text
from aevb.runtime.checked_files import DataWarning


def test_members_of_an_archive_are_mapped_where_they_are_stored_plainly(tmp_path):
    graph = vae().graph
    np.savez(tmp_path / "odd.npz", a_name_of_some_length=np.zeros(3, np.uint8), x=X.astype(">f4"))
    with pytest.warns(
        DataWarning,
        match="odd.npz: the array 'a_name_of_some_length' is not used, because no variable has "
        "that name",
    ):
        found = read_file(tmp_path / "odd.npz", graph)
    assert isinstance(found["x"], np.memmap)
    assert np.array_equal(found["x"], X.astype(np.float32))
    np.savez_compressed(tmp_path / "packed.npz", x=X)
    assert not isinstance(read_file(tmp_path / "packed.npz", graph)["x"], np.memmap)
    content = bytearray((tmp_path / "odd.npz").read_bytes())
    (tmp_path / "cut.npz").write_bytes(content[:300])
    with pytest.raises(ValueError, match="cut.npz cannot be read"):
        read_file(tmp_path / "cut.npz", graph)
    np.savez(tmp_path / "two.npz", a=X, b=X)
    with pytest.raises(
        ValueError, match="its arrays are a, b; name them after the model's variables"
    ):
        read_file(tmp_path / "two.npz", graph)


# Tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["1950,1951,1952\n0.5,1.5,2.5\n", "1950,1951,1952,1953,1954\n5,6,7,8,9\n"]
)
def test_a_first_line_that_counts_may_be_a_header_and_is_refused(tmp_path, text):
    path = tmp_path / "pivot.csv"
    path.write_text(text)
    with pytest.raises(
        ValueError,
        match="its first line counts 1950, 1951, 1952, …: it may be a header or a row. Give the "
        "columns names",
    ):
        read_text(path)


@pytest.mark.parametrize("text", ["1,2,3\n4,5,6\n", "1,2,4,5,6\n0.5,1,2,3,4\n", "1,2\n0.5,1\n"])
def test_other_first_lines_of_numbers_are_rows(tmp_path, text):
    path = tmp_path / "bare.csv"
    path.write_text(text)
    numbers, names, _ = read_text(path)
    assert names is None
    assert len(numbers) == 2


SHUFFLED = "b,y,x_2,a\n0.5,2,1,7\n1.5,,2,8\n2.5,0,3,9\n"


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_columns_go_to_the_variables_they_are_named_after(tmp_path):
    graph = Model({"y": OneHot(3), "x | y": Normal(3)}, {"y | x": OneHot()}).graph
    (tmp_path / "t.csv").write_text(SHUFFLED)
    write_parquet(
        tmp_path / "t.parquet",
        {"b": [0.5, 1.5, 2.5], "y": [2, None, 0], "x_2": [1, 2, 3], "a": [7.0, 8.0, 9.0]},
    )
    for name in ("t.csv", "t.parquet"):
        found = read_file(tmp_path / name, graph)
        assert found["x"].tolist() == [[0.5, 1, 7], [1.5, 2, 8], [2.5, 3, 9]]  # in the file's order
        assert np.array_equal(found["y"], [2, NAN, 0], equal_nan=True)
    (tmp_path / "n.csv").write_text("x.10,x.2,x.1,y0,y1,y2\n10,2,1,0,1,0\n")
    found = read_file(tmp_path / "n.csv", graph)
    assert found["x"].tolist() == [[1, 2, 10]]  # numbered: in the order of the numbers
    assert found["y"].tolist() == [[0, 1, 0]]
    (tmp_path / "bare.csv").write_text("\ufeff1;2;3\n4;NA;6\n")
    assert np.array_equal(
        read_file(tmp_path / "bare.csv", graph)["x"], [[1, 2, 3], [4, NAN, 6]], equal_nan=True
    )
    again = read_file(tmp_path / "t.csv", graph, columns={"x": ["a", "b", "x_2"]})
    assert again["x"].tolist()[0] == [7, 0.5, 1]
    both = read_arrays({"x": tmp_path / "t.csv", "y": tmp_path / "t.csv"}, graph)
    assert both["x"].shape == (3, 3)
    assert both["y"].shape == (3,)


def test_a_column_named_like_a_latent_code_is_data(tmp_path):
    """A finite latent has labels that a table may hold; a code z has none, so that a column z is
    one of x's.
    """
    (tmp_path / "t.csv").write_text("z,a,y,b,c\n1,2,0,3,4\n5,6,2,7,8\n")
    graph = Model(
        {"y": OneHot(3), "z | y": Normal(2), "x | z": Normal(4)},
        {"y | x": OneHot(), "z | x, y": Normal()},
    ).graph
    found = read_file(tmp_path / "t.csv", graph)
    assert {name: value.tolist() for name, value in found.items()} == {
        "x": [[1, 2, 3, 4], [5, 6, 7, 8]],
        "y": [0, 2],
    }
    assert assign(header(tmp_path / "t.csv").names, graph) == {
        "x": ["z", "a", "b", "c"],
        "y": ["y"],
    }


def test_the_numbers_that_pandas_names_columns_by_are_a_header(tmp_path):
    (tmp_path / "t.csv").write_text("0,1,2,3\n9,8,7,6\n5,4,3,2\n")
    assert read_file(tmp_path / "t.csv", vae().graph)["x"].tolist() == [[9, 8, 7, 6], [5, 4, 3, 2]]
    assert header(tmp_path / "t.csv").names == ("0", "1", "2", "3")
    (tmp_path / "one.csv").write_text("0\n9\n5\n")  # a column of numbers that begins with 0
    single = Model({"z": Normal(2), "x | z": Normal(1)}, {"z | x": Normal()}).graph
    assert read_file(tmp_path / "one.csv", single)["x"].tolist() == [[0], [9], [5]]
    (tmp_path / "index.csv").write_text(",0,1,2,3\n0,9,8,7,6\n1,5,4,3,2\n")
    with pytest.raises(
        ValueError, match=re.escape("its column 1 has no name; drop it (an index?), or name it")
    ):
        read_file(tmp_path / "index.csv", vae().graph)


def test_a_header_names_labels_of_a_given_variable_and_steps_of_a_sequence(tmp_path):
    (tmp_path / "t.csv").write_text("y,a,b,c,d\n0,1,2,3,4\n2,5,6,7,8\n")
    model = conditional()
    source = open_source(model.graph, tmp_path / "t.csv", model._parameter())
    assert source.batch["y"][0].tolist() == [[1, 0, 0], [0, 0, 1]]
    series = Model({"z[t]": Normal(2), "x[t] | z[t]": Normal(1)}, {"z[t] | x[t]": Normal()})
    source = open_source(series.graph, tmp_path / "t.csv", series._parameter())
    assert source.batch["x"].shape == (5, 2, 1)


def test_lists_in_parquet_are_vectors_and_ragged_sequences(tmp_path):
    write_parquet(tmp_path / "v.parquet", {"embedding": X.tolist()})
    assert np.array_equal(read_file(tmp_path / "v.parquet", vae().graph)["x"], X)
    write_parquet(tmp_path / "s.parquet", {"x": [row.tolist() for row in RAGGED]})
    model = state()
    source = open_source(model.graph, tmp_path / "s.parquet", model._parameter())
    expected = model.prepare(x=SEQUENCE, lengths=LENGTHS)
    assert all(torch.equal(source.batch[name], value) for name, value in expected.items())


def test_a_table_with_a_line_a_step_holds_sequences(tmp_path):
    p = {"z[t]": Normal(2), "x[t] | z[t]": Normal(2), "y[t] | z[t]": OneHot(3), "c | g": Normal(1)}
    graph = Model(p, {"z[t] | x[t]": Normal()}, given={"g": 4}).graph
    (tmp_path / "t.csv").write_text(
        "row,step,x1,g,x0,y,c\n7,2,4,1,40,,.5\n2,1,1,3,10,2,1.5\n7,1,3,1,30,0,.5\n7,3,,1,50,1,.5\n"
    )
    found = read_file(tmp_path / "t.csv", graph)
    assert [row.tolist() for row in found["x"][:1]] == [[[10, 1]]]  # by row, and by step within it
    assert np.array_equal(found["x"][1], [[30, 3], [40, 4], [50, NAN]], equal_nan=True)
    assert [len(row) for row in found["y"]] == [1, 3]
    assert np.array_equal(np.concatenate(found["y"]), [2, 0, NAN, 1], equal_nan=True)
    assert found["g"].tolist() == [3, 1]  # labels, without time
    assert found["c"].tolist() == [[1.5], [0.5]]
    assert assign(header(tmp_path / "t.csv").names, graph) == {
        "x": ["x0", "x1"],
        "y": ["y"],
        "c": ["c"],
        "g": ["g"],
    }
    by_row = read_lines(tmp_path / "t.csv", graph)[1]
    assert (by_row.rows.tolist(), by_row.begins.tolist()) == ([2, 7], [1, 1])
    (tmp_path / "even.csv").write_text(
        "row,step,x0,x1,y,c,g\n"
        + "".join(f"{i},{t},{i},{t},0,0,1\n" for i in range(2) for t in range(3))
    )
    assert read_file(tmp_path / "even.csv", graph)["x"].tolist() == [
        [[i, t] for t in range(3)] for i in range(2)
    ]
    still = Model(
        {"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal()}
    ).graph  # no time: row and step are columns
    (tmp_path / "still.csv").write_text("row,step,a,b\n1,2,3,4\n")
    assert read_file(tmp_path / "still.csv", still)["x"].tolist() == [[1, 2, 3, 4]]


BAD_LINES = {
    "missing": (
        "0,0,1,2\n3,0,1,2\n3,2,1,2\n",
        "row 3 lacks step 1. If nothing was observed between, add the missing steps (--gaps "
        'missing, or aevb.sequences(frame, gaps="missing")), or number the steps of a row 0, 1, '
        "2, …, and leave cells empty",
    ),
    "missing at the start": ("0,0,1,2\n4,1,1,2\n", "row 4 lacks step 0."),
    "double": ("0,0,1,2\n5,1,1,2\n5,0,1,2\n5,1,1,2\n", "row 5 has step 1 twice."),
    "negative": ("6,-1,1,2\n", "row 6 begins with step -1."),
    "no number": ("0,0,1,2\n,1,1,2\n", "line 3 has the row nan; rows and steps are whole numbers."),
    "changes": (
        "0,0,1,2\n0,1,1,3\n",
        "c has no time, but changes within row 0. Repeat a row's value on each of its lines.",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_lines_that_are_no_sequences_are_refused_with_row_and_step(tmp_path, text, message):
    graph = Model(
        {"z[t]": Normal(2), "x[t] | z[t]": Normal(1), "c": Normal(1)}, {"z[t] | x[t]": Normal()}
    ).graph
    (tmp_path / "t.csv").write_text("row,step,x,c\n" + text)
    with pytest.raises(ValueError, match=re.escape(f"t.csv: {message}")):
        read_file(tmp_path / "t.csv", graph)


def test_an_array_of_objects_is_told_how_to_be_saved(tmp_path):
    rows = np.empty(2, object)
    rows[:] = [[1.0], [2.0, 3.0]]
    np.save(tmp_path / "x.npy", rows)
    np.savez(tmp_path / "x.npz", x=rows)
    np.savez_compressed(tmp_path / "packed.npz", x=rows)
    for name in ("x.npy", "x.npz", "packed.npz"):
        with pytest.raises(
            ValueError,
            match=re.escape(
                "holds Python objects, not an array of numbers. Save sequences of different "
                "lengths padded"
            ),
        ):
            read_file(tmp_path / name, state().graph)


def test_what_cannot_be_read_ends_with_one_full_stop_and_names_the_file(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"nothing")
    (tmp_path / "t.csv").write_text("a,a\n1,2\n")
    for wrong in (
        lambda: read_file(tmp_path / "x.npy", vae().graph),
        lambda: layout(tmp_path / "t.csv", vae().graph),
    ):
        with pytest.raises(ValueError, match=r"(x.npy|t.csv) cannot be read: .*[^.]\.$"):
            wrong()


BAD_TABLES = {
    "too many": (
        vae,
        "a,b,c,d,e\n1,2,3,4,5\n",
        "x needs 4 columns, but gets 5 (a, b, c, d, e). Its columns are a, b, c, d, e.",
    ),
    "too few": (vae, "a,b\n1,2\n", "x needs 4 columns, but gets 2 (a, b)."),
    "no header": (vae, "1,2,3\n", "x needs 4 columns, but gets 3 (1, 2, 3). It has no header."),
    "no labels": (
        conditional,
        "a,b,c,d\n1,2,3,4\n",
        "y needs 3 columns, or one of labels, but gets none. Its columns are a, b, c, d.",
    ),
    "two of three": (
        conditional,
        "a,b,c,d,y0,y1\n1,2,3,4,0,1\n",
        "y needs 3 columns, or one of labels, but gets 2 (y0, y1).",
    ),
    "sequences of vectors": (
        state,
        "a,b\n1,2\n",
        "for more, write one line per step (row,step,x0,x1,…), or use .npz.",
    ),
    "vectors in lines": (state, "row,step,a,b\n0,0,1,2\n", "x needs 4 columns, but gets 2 (a, b)."),
    "twice": (
        vae,
        "a,a,c,d\n1,2,3,4\n",
        "its header has the column 'a' more than once. Rename it.",
    ),
    "no rows": (vae, "a,b,c,d\n", "it has a header but no rows"),
    "words": (vae, "a,b,c,d\n1,2,3,x\n", "line 2, column 'd' holds 'x', not a number"),
}


@pytest.mark.parametrize(("build", "text", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_table_that_does_not_fit_is_refused_with_its_columns(tmp_path, build, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_file(tmp_path / "t.csv", build().graph)


def test_parquet_that_cannot_be_read_is_named(tmp_path):
    graph = vae().graph
    write_parquet(tmp_path / "w.parquet", {"name": ["a", "b"]})
    with pytest.raises(
        ValueError, match=re.escape("w.parquet: the column 'name' holds words (a, b), not numbers")
    ):
        read_file(tmp_path / "w.parquet", graph)
    (tmp_path / "no.parquet").write_text("nothing of the kind")
    with pytest.raises(ValueError, match="no.parquet cannot be read"):
        read_file(tmp_path / "no.parquet", graph)
