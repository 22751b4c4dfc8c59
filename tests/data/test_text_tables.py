"""Text tables: pyarrow reads what the reader of lines reads, and frames keep words and types."""

import datetime
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aevb.data import arrow_text, frames, read_frame
from aevb.data.arrow_text import read_numbers
from aevb.data.text_tables import read_layout, read_lines, read_text

NUMBERS = [
    "1",
    "-2.5",
    "+3",
    ".5",
    "5.",
    "1e3",
    "1e400",
    "1e-400",
    "0.1",
    " 7 ",
    "inf",
    "-Infinity",
]
HOLES = ["", " ", "NA", " NA", "?", "nan", "-nan", "NAN", '""']
ODD = ["1_000", '"8"', '"1"2', '1"2', '"9\n"', "1,5", ",5", "5,", "٣", "\t4"]
WRONG = ["−3", "x", "nan(7)", "0x1", "1;2", '"x']
CELLS = st.sampled_from([*NUMBERS, *HOLES, *ODD, *WRONG])
TABLES = st.lists(st.lists(CELLS, min_size=1, max_size=3), min_size=1, max_size=6)


def outcome(read):
    """The numbers of a table, or the words that refuse it."""
    try:
        return read()
    except ValueError as error:
        return str(error)


@settings(max_examples=400, deadline=None)
@given(
    TABLES,
    st.sampled_from([",", ";", "\t", " "]),
    st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
    st.sampled_from(["", "a{0}b{0}c\n", "a\n"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_pyarrow_reads_what_the_reader_of_lines_reads(
    tmp_path_factory, rows, separator, end, header, encoding
):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    text = header.format(separator) + end.join(separator.join(row) for row in rows) + end
    path.write_bytes(text.encode(encoding))
    found, expected = outcome(lambda: read_text(path)), outcome(lambda: read_lines(path))
    if isinstance(expected, str):
        assert found == expected
        return
    assert np.array_equal(found[0], expected[0], equal_nan=True)
    assert found[1] == expected[1]
    assert found[2].tolist() == expected[2].tolist()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_blocks_end_anywhere_and_lines_are_counted(tmp_path, monkeypatch, end, encoding):
    """Blocks of a few bytes: rows and quoted line breaks lie across them."""
    lines = [f"{i},{i / 7!r},{'' if i % 5 else 'NA'}" for i in range(200)]
    lines[50], lines[120] = "", '"50","1.5","2"'
    text = end.join(["a,b,note", *lines]) + end
    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
    quoted = text.replace("7,1.0,", f'7,1.0,"x{end}""y"""')
    (tmp_path / "q.csv").write_bytes(quoted.encode(encoding))
    monkeypatch.setattr(arrow_text, "BLOCK", 50)
    for name, without in (("t.csv", []), ("q.csv", ["note"])):
        path = tmp_path / name
        layout = read_layout(path)
        found = read_numbers(path, layout, layout.kept(without))
        expected = read_lines(path, without)
        assert found is not None
        assert np.array_equal(found[0], expected[0], equal_nan=True)
        assert found[1].tolist() == expected[2].tolist()
        assert len(found[0]) == 199


def test_usual_tables_are_read_by_pyarrow(tmp_path):
    """The reader of lines is for odd tables only: it is many times slower."""
    tables = {
        "plain.csv": "a,b\n1,2\n3,4\n",
        "holes.csv": "a,b\n1,\nNA, NA\n",
        "comma.csv": "a;b\n1,5;2\n3,25;4\n",
        "tab.tsv": "a\tb\n1\t2\n",
        "blanks.txt": "  1   2\n 3.5 4 \n",
        "windows.csv": "a,b\r\n1,2\r\n",
        "open.csv": "1,2\n3,4",
        "gap.csv": "a,b\n1,2\n\n3,4\n\n",
        "quotes.csv": '"a","b"\n"1","2"\n',
    }
    for name, text in tables.items():
        path = tmp_path / name
        path.write_text(text, newline="")
        layout = read_layout(path)
        assert read_numbers(path, layout, [0, 1]) is not None, name


def test_a_table_of_thousands_of_columns(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 5000))
    np.savetxt(tmp_path / "t.csv", x, fmt="%.17g", delimiter=",")
    layout = read_layout(tmp_path / "t.csv")
    found = read_numbers(tmp_path / "t.csv", layout, range(5000))
    assert found is not None
    assert np.array_equal(found[0], x)
    frame = read_frame(tmp_path / "t.csv")
    assert (frame.num_rows, frame.num_columns) == (30, 5000)


# Frames -------------------------------------------------------------------------------------------

DAY = datetime.date(2020, 1, 31)
FRAMES = {
    "kinds": (
        "a,b,c,d\n1,x,2020-01-31,true\n2, y ,,false\n?,NA,2020-01-31,\n",
        {
            "a": [1, 2, None],
            "b": ["x", "y", None],
            "c": [DAY, None, DAY],
            "d": [True, False, None],
        },
    ),
    "decimal commas": ("a;b\n1,5;x,y\n2;z\n", {"a": [1.5, 2.0], "b": ["x,y", "z"]}),
    "quoted line breaks": ('\ufeffa,b\n1,"x\ny"\n2,z\n', {"a": [1, 2], "b": ["x\ny", "z"]}),
    "words that may be levels": (
        "a,b,c\n?,?,none\n2,None,?\nNone,null,NA\n",
        {"a": [None, 2, None], "b": [None, None, None], "c": ["none", "?", None]},
    ),
    "levels named None": ("a\nNone\nx\nnull\n", {"a": ["None", "x", "null"]}),
    "commas and holes": ("a;b\n1,5;x\n?;z\n", {"a": [1.5, None], "b": ["x", "z"]}),
    "codes": (
        'zip,n\n02139,1\n94305,20\n?,3\n"00501",0\n',
        {"zip": ["02139", "94305", None, "00501"], "n": [1, 20, 3, 0]},
    ),
    "mixed": ("a,b\n1,2\nx,3\n", {"a": ["1", "x"], "b": [2, 3]}),
    "a gap": ("a\n1\n\nNA\n\n\n", {"a": [1, None, None]}),
    "no header": ("1,2\n2,NA\n", {"1": [1, 2], "2": [2, None]}),
    "blanks": (" 1  2\n3   4 \n", {"1": [1, 3], "2": [2, 4]}),
    "all missing": ("a,b\n,1\n,2\n", {"a": [None, None], "b": [1, 2]}),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize(("text", "columns"), FRAMES.values(), ids=FRAMES)
def test_a_frame_keeps_words_types_and_holes(tmp_path, text, columns, encoding):
    path = tmp_path / "t.csv"
    text = text.lstrip("\ufeff") if encoding == "utf-16" else text
    path.write_bytes(text.encode(encoding))
    assert read_frame(path).to_pydict() == columns


def test_the_metadata_count_words_that_were_made_missing(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\nx,NA\nNA,1\n NA ,2\n,3\nn/a,?\n")
    frame = read_frame(tmp_path / "t.csv")
    assert frame.to_pydict() == {"a": ["x", *[None] * 4], "b": [None, 1, 2, 3, None]}
    assert json.loads(frame.schema.field("a").metadata[b"missing words"]) == {"NA": 2, "n/a": 1}
    assert frame.schema.field("b").metadata is None


REFUSED = {
    "empty": (b"", "it is empty"),
    "no rows": (b"a,b\n", "it has a header but no rows"),
    "twice": (b"a,a\n1,2\n", "its header has the column 'a' more than once. Rename it."),
    "several": (b"a,b,b,a,c,b\n", "has the columns 'a', 'b' more than once. Rename them."),
    "no name": (b",a\n1,2\n", "its column 1 has no name"),
    "cells": (b"a,b\n1,2\n1,2,3\n", "line 3 has 3 cells, the first has 2"),
    "open quote": (b'a,b\n1,x\n1,"x\n2,z\n', "that opens on line 3 or later is not closed"),
    "latin-1": ("a,b\n1,é\n".encode("latin1"), "it is not UTF-8 text (byte 0xe9: Latin-1?)"),
    "cp1252": ("a,b\n1,é €\n".encode("cp1252"), "(byte 0xe9: Windows-1252?). Save it as UTF-8, "),
    "a sign": ("a,b\n1,€\n".encode("cp1252"), "iconv -f cp1252 -t utf-8 old.csv > new.csv"),
    "two signs": (b"a;b\n1,5;1.5\n", "decimal commas (column 'a') and points (column 'b')"),
    "NUL": (b"a,b\n1,\0\n", "it holds NUL bytes"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_a_frame_that_cannot_be_read_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_frame(tmp_path / "t.csv")


def test_a_frame_of_parquet_files(tmp_path):
    from pyarrow import parquet

    parts = [pa.table({"a": [1, None], "b": ["x", "y"]}), pa.table({"a": [3], "b": ["z"]})]
    for i, part in enumerate(parts):
        parquet.write_table(part, tmp_path / f"{i}.parquet")
    assert read_frame(tmp_path).to_pydict() == {"a": [1, None, 3], "b": ["x", "y", "z"]}
    assert read_frame(tmp_path / "1.parquet").to_pydict() == {"a": [3], "b": ["z"]}
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none cannot be read: there is no file .parquet in it"):
        read_frame(tmp_path / "none")
    with pytest.raises(ValueError, match="files of kind .xlsx are not known"):
        read_frame("t.xlsx")


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize(
    ("cell", "code"),
    [
        (b"007", True),
        (b"-01", True),
        (b'"00"', True),
        (b"0", False),
        (b"100", False),
        (b"0.5", False),
    ],
)
def test_a_scan_finds_leading_zeros_wherever_blocks_end(tmp_path, monkeypatch, cell, code, at):
    """Blocks of 5 to 10 bytes end before, inside and after the cell."""
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,b\n1,2\n30,4\n5," + cell + b"\n7,80\n")
    monkeypatch.setattr(frames, "SCANNED", 5 + at)
    assert frames._may_have_codes(path, frames.read_layout(path)) is code
