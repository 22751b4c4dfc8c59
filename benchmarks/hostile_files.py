"""Train on hostile data files: measure the answer to each of them, and the memory.

python benchmarks/hostile_files.py

writes a folder of files that are damaged, empty, in another encoding, or not of the type that they
claim, and trains one step on each. A file must be read, or refused with a sentence that names it.
Any other outcome is raw. The test suite runs the same table.
"""

from __future__ import annotations

import argparse
import gzip
import io
import struct
import tempfile
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from aevb import Bernoulli, Model, Normal, OneHot, fit
from aevb.training.fit import TrainingError

X = np.random.default_rng(0).normal(size=(12, 3))
ROWS = "".join(",".join(f"{value:.6f}" for value in row) + "\n" for row in X)
TABLE = "a,b,c\n" + ROWS
SERIES = np.random.default_rng(1).normal(size=12)
READ = ""  # the sentence for a file that is read: none

Content = bytes | Callable[[Path], None]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npz(compressed: bool = False, **arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def described(text: str, body: bytes = b"") -> bytes:
    """Return a .npy file with this header."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n" + body


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def changed(content: bytes, at: int, to: bytes) -> bytes:
    at = at if at >= 0 else len(content) + at
    return content[:at] + to + content[at + len(to) :]


def locked(content: bytes) -> bytes:
    """Return an archive whose members claim to be encrypted."""
    at = content.index(b"PK\x01\x02") + 8
    return changed(changed(content, at, b"\x01"), 6, b"\x01")


def lines(header: str, *columns: object) -> bytes:
    return (
        header
        + "\n"
        + "".join(",".join(map(str, line)) + "\n" for line in zip(*columns, strict=True))
    ).encode()  # type: ignore[call-overload]


def parquet(**columns: object) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow  # type: ignore[import-not-found, import-untyped]
        from pyarrow import parquet as format

        format.write_table(pyarrow.table(columns), path)

    return write


def cut(write: Callable[[Path], None], share: float) -> Callable[[Path], None]:
    def written(path: Path) -> None:
        write(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return written


HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 3), }"
WORDS = ("a", "b") * 6

# Name of the file → its content, and a part of the sentence that refuses it.
STATIC: dict[str, tuple[Content, str]] = {
    # Text that is not a table.
    "empty.csv": (b"", "it is empty"),
    "newlines.csv": (b"\n\n\n", "it is empty"),
    "many-newlines.csv": (b"\n" * 40_000, "it is empty"),
    "line.csv": (b"1," * 2**23 + b"1", "line 1 has more than 16777216 characters"),
    "bom.csv": (b"\xef\xbb\xbf", "it is empty"),
    "header.csv": (b"a,b,c\n", "it has a header but no rows"),
    "binary.csv": (bytes(range(256)) * 20, "NUL"),
    "nul.csv": (TABLE.encode() + b"1,2\0,3\n", "NUL"),
    "late-nul.csv": ((TABLE + ROWS * 50).encode() + b"1,2\0,3\n", "line 614"),
    "gzip.csv": (gzip.compress(TABLE.encode()), "compressed by gzip"),
    "workbook.csv": (zipped({"xl/workbook.xml": b"<x/>"}), "an Excel workbook?"),
    "picture.csv": (b"\x89PNG\r\n\x1a\n" + bytes(300), "NUL"),
    "page.csv": (b"<html><body>404</body></html>\n", "it has a header but no rows"),
    "record.csv": (b'{"a": 1,\n "b": 2}\n', "its column 2 has no name"),
    # Quotes.
    "quote.csv": (b'a,b,c\n1,"2,3\n4,5,6\n', 'a quote (")'),
    "large-quote.csv": (
        TABLE.encode() + b'1,"2,3\n' + ROWS.encode() * 1000,
        'a quote (") that opens on line 14',
    ),
    "long-cell.csv": (
        b"a,b,c\n1," + b"7" * 300_000 + b",3\n",
        "line 2 has a cell of more than 131072 characters",
    ),
    "long-name.csv": (
        b"a" * 300_000 + b",b,c\n1,2,3\n",
        "line 1 has a cell of more than 131072 characters",
    ),
    "inner-quote.csv": (b'a,b,c\n1,2"3,4\n', """'2"3'"""),
    # Encodings.
    "utf16.csv": (TABLE.encode("utf-16"), READ),
    "utf16-big.csv": (b"\xfe\xff" + TABLE.encode("utf-16-be"), READ),
    "utf16-bare.csv": (TABLE.encode("utf-16-le"), "UTF-16"),
    "utf16-odd.csv": (TABLE.encode("utf-16")[:-1], "begins as UTF-16 but is not valid"),
    "utf32.csv": (TABLE.encode("utf-32"), "UTF-"),
    "latin1.csv": ("größe,b,c\n".encode("latin-1") + ROWS.encode(), "iconv -f latin1 -t utf-8"),
    "latin1-late.csv": (
        TABLE.encode() + ROWS.encode() * 200 + b"1,2,\xe9\n",
        "iconv -f latin1 -t utf-8",
    ),
    # Other formats of numbers.
    "commas.csv": (TABLE.replace(",", ";").replace(".", ",").encode(), READ),
    "commas-quoted.csv": (b'a,b,c\n1,"2,5",3\n', "a decimal comma? Write 2.5"),
    "commas-tabs.tsv": (b"a\tb\tc\n1\t2,5\t3\n", "a decimal comma? Write 2.5"),
    "commas-points.csv": (
        b"a;b;c\n1.234;2;3\n4;2,5;6\n",
        "decimal commas and points (2,5 on line 3, 1.234 on line 2)",
    ),
    "thousands.csv": (b"a;b;c\n1.234,5;2;3\n4;5;6\n", "'1.234,5', not a number"),
    "percent.csv": (b"a,b,c\n1,5%,3\n", "'5%'"),
    "hexadecimal.csv": (b"a,b,c\n1,0x10,3\n", "'0x10'"),
    "minus.csv": ("a,b,c\n1,−5,3\n".encode(), "'−5'"),
    "infinite.csv": (TABLE.encode() + b"1,inf,3\n", "not finite"),
    "overflow.csv": (TABLE.encode() + b"1,1e400,3\n", "not finite"),
    "dates.csv": (lines("a,b,c", X[:, 0], ["2020-01-01"] * 12, X[:, 2]), "a date or a time"),
    "category.csv": (
        lines("sex,b,c", ["female", "male"] * 6, X[:, 1], X[:, 2]),
        '"sex | y": OneHot(2)',
    ),
    "names.csv": (
        lines("who,b,c", [f"n{i}" for i in range(70)], range(70), range(70)),
        "more than 50 different words",
    ),
    "unknown.csv": (
        TABLE.encode() + b"1,unknown,3\n",
        "If it marks a missing cell, leave the cell empty",
    ),
    # Lines of different lengths.
    "fewer.csv": (TABLE.encode() + b"1,2\n", "has 2 cells, the first has 3"),
    "more.csv": (TABLE.encode() + b"1,2,3,4\n", "has 4 cells, the first has 3"),
    "trailing.csv": (TABLE.replace("\n", ",\n").encode(), "its column 4 has no name"),
    "twice.csv": (b"a,a,c\n1,2,3\n", "the column 'a' more than once"),
    "index.csv": (b",a,b,c\n0,1,2,3\n", "its column 1 has no name"),
    "wide.csv": (
        ",".join(f"c{i}" for i in range(20000)).encode()
        + b"\n"
        + b",".join([b"1"] * 20000)
        + b"\n",
        "gets 20000",
    ),
    "one-cell.csv": (b"7", "gets 1"),
    "windows.csv": (TABLE.replace("\n", "\r\n").encode(), READ),
    "mac.csv": (TABLE.replace("\n", "\r").encode(), READ),
    "blanks.txt": (ROWS.replace(",", " ").encode(), READ),
    # Files without values.
    "missing.csv": (b"a,b,c\n" + b"NA,NA,NA\n" * 12, "missing (NaN) in every row"),
    "missing-column.csv": (
        lines("a,b,c", X[:, 0], [""] * 12, X[:, 2]),
        "in every row of column 'b'",
    ),
    "constant.csv": (lines("a,b,c", X[:, 0], [1] * 12, X[:, 2]), "constant"),
    # Unknown types of files.
    "table.json": (b"[]", "files of kind .json are not known"),
    "table.xlsx": (zipped({"xl/workbook.xml": b"<x/>"}), "files of kind .xlsx are not known"),
    "bare": (TABLE.encode(), "files of kind no suffix are not known"),
    # .npy
    "empty.npy": (b"", "not an array written by numpy"),
    "words.npy": (b"nothing of the kind", "not an array written by numpy"),
    "cut.npy": (npy(X)[:-40], "it is cut short"),
    "cut-header.npy": (npy(X)[:40], "not an array written by numpy"),
    "number.npy": (npy(np.array(3.0)), "a single number"),
    "objects.npy": (npy(np.array([X, None], dtype=object)), "it holds Python objects"),
    "complex.npy": (npy(X.astype(complex)), "it holds complex128, not numbers"),
    "strings.npy": (npy(np.array([["a", "b", "c"]])), "it holds <U1, not numbers"),
    "records.npy": (npy(np.zeros(3, dtype=[("a", float), ("b", int)])), "not numbers"),
    "times.npy": (npy(np.zeros((3, 3), dtype="datetime64[D]")), "not numbers"),
    "huge.npy": (described(HUGE), "it is cut short"),
    "negative.npy": (
        described("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 3), }"),
        "it is damaged",
    ),
    "code.npy": (described("__import__('os').system('true')"), "not an array written by numpy"),
    "no-rows.npy": (npy(np.zeros((0, 3))), "x has no examples"),
    "no-columns.npy": (npy(np.zeros((12, 0))), "x has shape [12, 0]"),
    "cube.npy": (npy(np.zeros((4, 3, 2, 2))), "x has shape"),
    "half.npy": (npy(X.astype(np.float16)), READ),
    "swapped.npy": (npy(X.astype(">f8")), READ),
    "columns-first.npy": (npy(np.asfortranarray(X)), READ),
    "wide-float.npy": (npy(X.astype(np.longdouble)), READ),
    "unsigned.npy": (npy((X * 9 + 99).astype(np.uint32)), READ),
    # .npz
    "words.npz": (b"nothing of the kind", "it is damaged"),
    "cut.npz": (npz(x=X)[:200], "it is damaged"),
    "cut-packed.npz": (npz(True, x=X)[:-60], "it is damaged"),
    "flipped.npz": (changed(npz(True, x=X), 120, b"\xff\xff\xff\xff"), "it is damaged"),
    "flipped-plain.npz": (changed(npz(x=X), 300, b"\xff\xff\xff\xff"), "its checksum differs"),
    "locked.npz": (locked(npz(True, x=X)), "is encrypted"),
    "empty.npz": (zipped({}), "its arrays are none"),
    "no-arrays.npz": (zipped({"a.txt": b"1"}), "its arrays are none"),
    "two.npz": (npz(a=X, b=X), "its arrays are a, b"),
    "huge.npz": (zipped({"x.npy": described(HUGE)}), "is damaged"),
    "huge-plain.npz": (zipped({"x.npy": described(HUGE)}, zipfile.ZIP_STORED), "is cut short"),
    "no-array.npz": (zipped({"x.npy": b"nothing"}), "not an array written by numpy"),
    "number.npz": (npz(x=np.array(3.0)), "x has shape []"),
    "objects.npz": (npz(True, x=np.array([X, None], dtype=object)), "it holds Python objects"),
    "unsigned-labels.npz": (npz(x=X, y=np.array([0, 1] * 6, dtype=np.uint64)), READ),
    "wrong-labels.npz": (
        npz(x=X, y=np.arange(12, dtype=np.uint16)),
        "y has 10 labels outside 0 … 1",
    ),
    "other-rows.npz": (npz(x=X, y=np.zeros(7, dtype=int)), "disagree on the number of examples"),
    # Parquet
    "words.parquet": (b"nothing of the kind", "cannot be read"),
    "cut.parquet": (cut(parquet(a=X[:, 0], b=X[:, 1], c=X[:, 2]), 0.6), "cannot be read"),
    "category.parquet": (parquet(sex=WORDS, b=X[:, 1], c=X[:, 2]), '"sex | y": OneHot(2)'),
    "uneven.parquet": (parquet(x=[[1.0, 2.0, 3.0], [4.0]]), "different lengths"),
    "no-list.parquet": (parquet(x=[[1.0, 2.0, 3.0], None]), "has no list in row 1"),
    "nested.parquet": (parquet(a=[{"b": 1}] * 3), "not numbers"),
}

IN_TIME: dict[str, tuple[Content, str]] = {
    "year.csv": (lines("year,volume", range(1871, 1883), SERIES), READ),
    "count.csv": (lines("when,volume", range(1871, 1883), SERIES), "counts the lines"),
    "gap.csv": (lines("year,x", [*range(11), 12], SERIES), "goes from year 10 to 12"),
    "twice.csv": (lines("id,t,x", [1] * 12, [*range(11), 3], SERIES), "row 1 has the t 3 twice"),
    "missing-time.csv": (
        lines("t,x", ["", *range(11)], SERIES),
        "line 2 has the t nan; times are numbers",
    ),
    "huge-row.csv": (
        lines("row,step,x", [1e300] * 12, range(12), SERIES),
        "rows and steps are whole numbers",
    ),
    "ids.csv": (lines("id,x", range(12), SERIES), "numbers the lines one by one"),
    "one-step.npy": (npy(SERIES[:, None]), "12 sequences of one step each"),
    "flat.npy": (npy(SERIES), "x has shape [12]"),
    "lengths.npz": (
        npz(x=SERIES.reshape(3, 4), lengths=np.array([4, 2, 1], dtype=np.uint32)),
        READ,
    ),
    "long-lengths.npz": (
        npz(x=SERIES.reshape(3, 4), lengths=np.array([9, 2, 1], dtype=np.uint8)),
        "from 1 to 4",
    ),
    "few-lengths.npz": (
        npz(x=SERIES.reshape(3, 4), lengths=np.array([4, 2])),
        "disagree on the number of examples",
    ),
    "gaps.npz": (npz(x=SERIES.reshape(3, 4), steps=np.array([[1, 0, 1, 1]] * 3)), "without gaps"),
    "ragged.npz": (
        npz(True, x=np.array([[1.0], [2.0, 3.0]], dtype=object)),
        "it holds Python objects",
    ),
}

BYTES: dict[str, tuple[Content, str]] = {
    "grey.npy": (
        npy(np.random.default_rng(2).integers(0, 256, (20, 4)).astype(np.uint8)),
        "They look like grey levels 0 … 255",
    ),
    "few-levels.npy": (
        npy(np.random.default_rng(2).integers(0, 17, (20, 4)).astype(np.uint16)),
        "They look like grey levels 0 … 16",
    ),
}


def static() -> Model:
    return Model({"y": OneHot(2), "x | y": Normal(3)}, {"y | x": OneHot()})


def in_time() -> Model:
    return Model(
        {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1, scale=1.0)}, {"z[t] | x[t]": Normal()}
    )


def binary() -> Model:
    return Model({"z": Normal(1), "x | z": Bernoulli(4)}, {"z | x": Normal()})


GROUPS: dict[str, tuple[Callable[[], Model], dict[str, tuple[Content, str]]]] = {
    "static": (static, STATIC), "in time": (in_time, IN_TIME), "binary": (binary, BYTES),
}  # fmt: skip


def write(path: Path, content: Content) -> None:
    path.write_bytes(content) if isinstance(content, bytes) else content(path)


def outcome(model: Model, path: Path) -> tuple[str, str]:
    """Take one step on a file; return the outcome (read, refused or raw) and the sentence."""
    try:
        fit(model, path, steps=1, progress=False)
    except (ValueError, TrainingError) as error:
        return "refused", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    return "read", ""


def judged(folder: Path) -> Iterator[tuple[str, str, str, str, int, int]]:
    """Yield, per file: group, name, outcome, sentence, peak memory and size in bytes."""
    for group, (build, files) in GROUPS.items():
        model = build()
        for name, (content, _) in files.items():
            path = folder / name
            write(path, content)
            size = path.stat().st_size
            tracemalloc.start()
            found, sentence = outcome(model, path)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            path.unlink()
            yield group, name, found, sentence, peak, size


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    counts = {"read": 0, "refused": 0, "raw": 0}
    highest = 0
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for group, name, found, sentence, peak, size in judged(Path(folder)):
            counts[found] += 1
            highest = max(highest, peak)
            print(
                f"{group:<8} {name:<22} {size:>9} bytes  {found:<8} {peak / 2**20:6.1f} MiB  "
                f"{sentence.replace(folder + '/', '')[:150]}"
            )
    print(
        f"\n{sum(counts.values())} files: "
        f"{', '.join(f'{count} {what}' for what, count in counts.items())}; at most "
        f"{highest / 2**20:.0f} MiB."
    )


if __name__ == "__main__":
    main()
